"""`artesian cache` on real directories, made by the disk tier itself."""

from __future__ import annotations

import fcntl
import io
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console
from tiers import IDENTITY

from artesian.cache.spec import block_keys, named_key, root_key, tenant_digest
from artesian.cache.tiers import Kind, Record
from artesian.cache.tiers.nvme import NvmeTier
from artesian.clients.cli import main
from artesian.clients.cli.cache_prompts import Row
from artesian.clients.cli.cache_tables import table_of_prompts
from artesian.engine.codec import Conversation, Message
from artesian.engine.config import EngineConfig
from artesian.engine.load.model import open_model
from artesian.engine.run.runtime import codec_of, kv_identities
from artesian.server.api.caches import NamedPrompt
from artesian.server.cache_trace import Trace, Turn, pack_tokens

TOKENS = list(range(100, 100 + 3 * 64))


SALTED, SALT = root_key(IDENTITY, "key"), tenant_digest("key")


def tier_of(path: Path) -> NvmeTier:
    return NvmeTier(path, budget_bytes=1 << 30, min_free_bytes=0, clock=time.time)


def put(path: Path, *records: Record) -> None:
    tier = tier_of(path)
    assert len(tier.put(records)) == len(records)
    tier.close()


def blocks_of(
    tokens: list[int], root: bytes = SALTED, pinned: bool = False, identity: bytes = IDENTITY
) -> list[Record]:
    keys, contents = block_keys(root, tokens, 64)
    parents = [root, *keys]
    return [
        Record(
            Kind.BLOCK, k, identity, content, memoryview(os.urandom(5000)), 7200.0, parents[i], i + 1,
            pinned=pinned,
        )
        for i, (k, content) in enumerate(zip(keys, contents, strict=True))
    ]  # fmt: skip


def trace_of(
    tokens: list[int], name: str, key: str = "", turns: str = "", tenant: bytes = SALT, age_s: float = 0.0
) -> Record:
    """What a server remembers of a prompt; `turns` has a letter for each message."""
    trace = Trace(
        id=name, model="tiny", weights="w", created_at=time.time() - age_s, count=len(tokens), key=key,
        packed=pack_tokens(np.asarray(tokens, np.int32)),
        turns=tuple(Turn("user", letter.encode()) for letter in turns),
    )  # fmt: skip
    return named("responses", name, msgspec.msgpack.encode(trace), tenant)


def cache_of(tokens: list[int], name: str, pinned: bool) -> Record:
    """What POST /v1/caches remembers."""
    packed = pack_tokens(np.asarray(tokens, np.int32))
    value = NamedPrompt(model="tiny", created_at=time.time(), count=len(tokens), packed=packed, pinned=pinned)
    return named("caches", name, msgspec.msgpack.encode(value), SALT)


def named(space: str, name: str, value: bytes, tenant: bytes) -> Record:
    content = f"{space}\0{name}".encode()
    return Record(Kind.NAMED, named_key(tenant, content), tenant, content, memoryview(value), 7200.0)


def fill(
    path: Path, tokens: list[int] = TOKENS, name: str = "chatcmpl-0123456789abcdef", key: str = "job"
) -> None:
    """A prompt of whole blocks and its trace."""
    put(path, *blocks_of(tokens), trace_of(tokens, name, key))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """The exit code and what was said."""
    with pytest.raises(SystemExit) as ended:
        main(["cache", *map(str, arguments)])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def read_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_prompts_are_listed_by_their_response(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path)
    (row,) = read_json(capsys, "ls", "--cache-dir", tmp_path)
    assert (row["id"], row["model"], row["tokens"]) == ("chatcmpl-0123456789abcdef", "tiny", 192)
    assert (row["cached_tokens"], row["tenant"]) == (192, SALT.hex()[:8])
    assert row["prompt_cache_key"] == "job" and row["expires_at"] == pytest.approx(time.time() + 7200, abs=60)
    _, table, _ = run(capsys, "ls", "--cache-dir", tmp_path)
    assert "chatcmpl-0123456789" in table and "in 1h 59m" in table
    assert len(read_json(capsys, "ls", "--blocks", "--cache-dir", tmp_path)) == 3


def test_turns_of_one_conversation_are_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, TOKENS[:128], "chatcmpl-first")
    fill(tmp_path, TOKENS, "chatcmpl-second")
    # An answer that was written otherwise when it came back: another chain, the same conversation.
    later = [*TOKENS[:64], *range(1, 65)]
    put(tmp_path, *blocks_of(later), trace_of(later, "chatcmpl-third", turns="ab"))
    put(tmp_path, trace_of(TOKENS, "chatcmpl-second", turns="a"))
    (row,) = read_json(capsys, "ls", "--cache-dir", tmp_path)
    assert (row["id"], row["turns"], row["cached_tokens"]) == ("chatcmpl-third", 2, 192)
    assert row["bytes"] == sum(
        b["bytes"] for b in read_json(capsys, "ls", "--blocks", "--cache-dir", tmp_path)
    )


def test_two_answers_to_one_prompt_are_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for answer in (1, 2):
        put(tmp_path, *blocks_of([*TOKENS[:64], *[answer] * 64]))
    put(tmp_path, trace_of(TOKENS[:70], "chatcmpl-asked-twice"))
    (row,) = read_json(capsys, "ls", "--cache-dir", tmp_path)
    assert (row["id"], row["tokens"], row["cached_tokens"]) == ("chatcmpl-asked-twice", 70, 128)


def test_a_prompt_asked_again_shows_its_latest_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, *blocks_of(TOKENS))
    for name, age_s in (("chatcmpl-latest", -60.0), ("chatcmpl-earlier", 0.0)):
        put(tmp_path, trace_of(TOKENS, name, age_s=age_s))
    (row,) = read_json(capsys, "ls", "--cache-dir", tmp_path)
    assert row["id"] == "chatcmpl-latest" and row["last_used_at"] > time.time()


def test_equal_prompts_of_two_tenants_are_two_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    public, root = tenant_digest(""), root_key(IDENTITY, "")
    put(tmp_path, *blocks_of(TOKENS), trace_of(TOKENS, "chatcmpl-salted"))
    put(tmp_path, *blocks_of(TOKENS, root), trace_of(TOKENS, "chatcmpl-public", tenant=public))
    rows = read_json(capsys, "ls", "--cache-dir", tmp_path)
    assert {(row["id"], row["tenant"]) for row in rows} == {
        ("chatcmpl-salted", SALT.hex()[:8]),
        ("chatcmpl-public", None),
    }


def test_what_lost_its_end_keeps_its_name_and_what_has_none_is_listed_by_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, *blocks_of(TOKENS)[:2], trace_of(TOKENS, "chatcmpl-cut"))
    unknown = blocks_of(TOKENS[::-1])
    put(tmp_path, *unknown)
    rows = {row["id"]: row for row in read_json(capsys, "ls", "--cache-dir", tmp_path)}
    assert set(rows) == {"chatcmpl-cut", unknown[-1].key.hex()[:16]}
    assert (rows["chatcmpl-cut"]["tokens"], rows["chatcmpl-cut"]["cached_tokens"]) == (192, 128)


def test_the_listing_looks_as_it_always_did() -> None:
    row = Row(
        id="chatcmpl-0123456789abcdef", names=("rules",), model="tiny", tokens=432, cached_tokens=384,
        bytes=8871936, created_at=0.0, last_used_at=3000.0, expires_at=90000.0, pinned=False,
        prompt_cache_key=None, tenant=None, turns=1, key="00",
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=110)
    console.print(table_of_prompts([row], 3600.0))
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == [  # type: ignore[attr-defined]
        "PROMPT                NAME   MODEL  TOKENS  CACHED     SIZE  AGE    LAST USE  EXPIRES",
        "chatcmpl-0123456789a  rules  tiny      432     384  8.5 MiB  1h 0m  10m ago   in 1d 0h",
    ]


def test_sums_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path)
    sums = read_json(capsys, "stat", "--cache-dir", tmp_path)
    assert (sums["blocks"], sums["names"], sums["prompts"], sums["format"]) == (3, 1, 1, "v2")
    (model,) = sums["models"]
    assert (model["model"], model["block_tokens"], model["blocks"]) == ("tiny", 64, 3)


def test_a_damaged_record_is_found_and_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path)
    assert run(capsys, "verify", "--cache-dir", tmp_path)[0] == 0
    (segment,) = (tmp_path / "v2" / "seg").rglob("*.seg")
    with segment.open("r+b") as file:
        file.seek(4096 + 4096 + 10)
        file.write(b"damage")
    code, out, _ = run(capsys, "verify", "--cache-dir", tmp_path)
    assert code == 1 and "3 records sound" in out and "1 not" in out
    run(capsys, "verify", "--repair", "--cache-dir", tmp_path)
    assert run(capsys, "verify", "--cache-dir", tmp_path)[0] == 0


def test_prompts_are_deleted_by_id_key_or_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for how in (["chatcmpl-0123"], ["--key", "job"], ["--all"]):
        fill(tmp_path)
        code, _, err = run(capsys, "rm", *how, "--cache-dir", tmp_path)
        assert code == 2 and "nothing was deleted" in err  # no terminal, no --yes
        assert run(capsys, "rm", *how, "--yes", "--cache-dir", tmp_path)[0] == 0
        sums = read_json(capsys, "stat", "--cache-dir", tmp_path)
        assert (sums["blocks"], sums["names"]) == (0, 0), how
    assert run(capsys, "rm", "unknown-id", "-y", "--cache-dir", tmp_path)[0] == 2
    assert run(capsys, "rm", "--cache-dir", tmp_path)[0] == 2


def test_files_of_nobody_and_lost_parents_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, *blocks_of(TOKENS)[1:])
    (segment,) = (tmp_path / "v2" / "seg").rglob("*.seg")
    stray = segment.with_name("00000099.seg")
    stray.write_bytes(segment.read_bytes())
    code, out, _ = run(capsys, "verify", "--cache-dir", tmp_path)
    assert code == 1 and "00000099.seg" in out and "2 records sound" in out
    assert "2 sound blocks follow one that is gone" in out
    assert run(capsys, "verify", "--repair", "--cache-dir", tmp_path)[0] == 1
    assert not stray.exists() and segment.exists()
    assert run(capsys, "verify", "--cache-dir", tmp_path)[0] == 0


def test_a_record_under_the_wrong_key_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path, *[replace(record, content=bytes(256)) for record in blocks_of(TOKENS)[:1]])
    code, out, _ = run(capsys, "verify", "--repair", "--cache-dir", tmp_path)
    assert code == 1 and "another key" in out
    assert read_json(capsys, "ls", "--cache-dir", tmp_path) == []


def test_a_pinned_prompt_is_listed_as_pinned_though_its_last_part_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = replace(blocks_of(TOKENS)[1], content=bytes(40))
    put(tmp_path, *blocks_of(TOKENS[:64], pinned=True), part)
    (row,) = read_json(capsys, "ls", "--cache-dir", tmp_path)
    assert (row["pinned"], row["expires_at"], row["cached_tokens"]) == (True, None, 74)


def test_names_delete_what_they_pin_and_other_names_keep_theirs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, *blocks_of(TOKENS[:64], pinned=True), *blocks_of(TOKENS)[1:])
    put(tmp_path, cache_of(TOKENS[:64], "rules", True), trace_of(TOKENS, "chatcmpl-0123456789"))
    (row,) = read_json(capsys, "ls", "--cache-dir", tmp_path)
    assert (row["id"], row["names"]) == ("chatcmpl-0123456789", ["rules"])
    code, out, _ = run(capsys, "rm", "chatcmpl-0123456789", "-y", "--cache-dir", tmp_path)
    assert code == 0 and "3 records deleted" in out and "1 stay" in out
    (row,) = read_json(capsys, "ls", "--cache-dir", tmp_path)
    assert (row["id"], row["pinned"], row["cached_tokens"]) == ("rules", True, 64)
    assert run(capsys, "rm", "rules", "-y", "--cache-dir", tmp_path)[0] == 0
    assert read_json(capsys, "ls", "--cache-dir", tmp_path) == []
    assert read_json(capsys, "stat", "--cache-dir", tmp_path)["records"] == 0


def test_only_what_is_selected_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = TOKENS[::-1]
    fill(tmp_path)
    fill(tmp_path, other, "chatcmpl-other", "")
    assert run(capsys, "rm", "chatcmpl-other", "-y", "--cache-dir", tmp_path)[0] == 0
    (row,) = read_json(capsys, "ls", "--cache-dir", tmp_path)
    assert (row["prompt_cache_key"], row["cached_tokens"]) == ("job", 192)
    code, _, err = run(capsys, "rm", "chatcmpl-other", "-y", "--cache-dir", tmp_path)
    assert code == 2 and "no cached prompt is called 'chatcmpl-other'" in err
    assert run(capsys, "rm", blocks_of(TOKENS)[-1].key.hex()[:16], "-y", "--cache-dir", tmp_path)[0] == 0
    assert read_json(capsys, "stat", "--cache-dir", tmp_path)["records"] == 0


def test_nothing_gives_way_unless_it_is_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("artesian.clients.cli.cache.disk_budget", lambda path: 1)
    fill(tmp_path)
    fill(tmp_path, TOKENS[::-1], "chatcmpl-other", "")
    run(capsys, "gc", "--cache-dir", tmp_path)
    run(capsys, "verify", "--repair", "--cache-dir", tmp_path)
    run(capsys, "rm", "chatcmpl-other", "-y", "--cache-dir", tmp_path)
    assert read_json(capsys, "stat", "--cache-dir", tmp_path)["records"] == 4
    code, out, _ = run(capsys, "gc", "--cache-bytes", "1KiB", "--cache-dir", tmp_path)
    assert code == 0 and "gave way" in out
    assert read_json(capsys, "stat", "--cache-dir", tmp_path)["records"] == 0


def test_beside_a_busy_writer_reading_goes_on_and_changing_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path)
    with (tmp_path / "v2" / "lease").open("r+b") as lease:
        fcntl.flock(lease, fcntl.LOCK_EX)
        assert len(read_json(capsys, "ls", "--cache-dir", tmp_path)) == 1
        assert run(capsys, "verify", "--cache-dir", tmp_path)[0] == 0
        code, _, err = run(capsys, "rm", "--all", "-y", "--cache-dir", tmp_path)
    assert code == 2 and err.count("\n") == 1 and "writing" in err
    assert len(read_json(capsys, "ls", "--cache-dir", tmp_path)) == 1


def test_archives_go_through_pipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    fill(tmp_path / "here")
    with pytest.raises(SystemExit):
        main(["cache", "export", "-", "--cache-dir", str(tmp_path / "here")])
    archive = capfdbinary.readouterr().out
    for length, code in ((len(archive), 0), (len(archive) - 64, 1)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(archive[:length])))
        with pytest.raises(SystemExit) as ended:
            main(["cache", "import", "-", "--cache-dir", str(tmp_path / str(length))])
        assert (ended.value.code or 0) == code


def test_an_export_that_fails_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "here")
    (tmp_path / "out").mkdir()
    code, _, err = run(capsys, "export", tmp_path / "out", "--cache-dir", tmp_path / "here")
    assert code == 2 and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "out"]


def test_an_export_is_imported_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "here")
    archive = tmp_path / "prompts.archive"
    assert run(capsys, "export", archive, "--cache-dir", tmp_path / "here")[0] == 0
    assert archive.stat().st_mode & 0o777 == 0o600
    assert run(capsys, "import", archive, "--cache-dir", tmp_path / "there")[0] == 0
    (here,) = read_json(capsys, "ls", "--cache-dir", tmp_path / "here")
    (there,) = read_json(capsys, "ls", "--cache-dir", tmp_path / "there")
    assert there["id"] == here["id"] and there["expires_at"] == pytest.approx(here["expires_at"], abs=5)
    damaged = bytearray(archive.read_bytes())
    damaged[-3000] ^= 1
    archive.write_bytes(damaged)
    assert run(capsys, "import", archive, "--cache-dir", tmp_path / "third")[0] == 1
    archive.write_bytes(b"not an archive")
    code, _, err = run(capsys, "import", archive, "--cache-dir", tmp_path / "fourth")
    assert code == 2 and "not an archive" in err


def test_the_index_is_made_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path)
    (tmp_path / "v2" / "index" / "data.mdb").unlink()
    assert run(capsys, "gc", "--rebuild-index", "--cache-dir", tmp_path)[0] == 0
    assert len(read_json(capsys, "ls", "--cache-dir", tmp_path)) == 1


def test_what_is_no_cache_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "foreign")
    (tmp_path / "foreign" / "v2").rename(tmp_path / "foreign" / "v3")
    fill(tmp_path / "broken")
    (tmp_path / "broken" / "v2" / "index" / "data.mdb").write_bytes(b"junk" * 5000)
    fill(tmp_path / "locked")
    if os.geteuid() == 0:  # root may read everything, but trusts no stranger's folder
        os.chown(tmp_path / "locked" / "v2", 12345, 12345)
    else:
        (tmp_path / "locked").chmod(0)
    (tmp_path / "empty").mkdir()
    expected = {
        "nowhere": "there is no prompt cache in",
        "empty": "there is no prompt cache of format v2",
        "foreign": "only one of format v3",
        "broken": "cannot be opened",
        "locked": "cannot be",
    }
    try:
        for name, message in expected.items():
            for command in (["ls"], ["stat"], ["verify"], ["export", "-"]):
                code, _, err = run(capsys, *command, "--cache-dir", tmp_path / name)
                assert code == 2 and err.count("\n") == 1 and message in err, (name, command, err)
    finally:
        (tmp_path / "locked").chmod(0o700)


def test_doctor_says_where_the_disk_cache_is_and_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    fill(tmp_path / "here")
    (tmp_path / "foreign" / "v3").mkdir(parents=True)
    (tmp_path / "file").touch()
    fill(tmp_path / "broken")
    (tmp_path / "broken" / "v2" / "index" / "data.mdb").write_bytes(b"junk" * 5000)
    for name, text in {
        "here": "takes ",
        "new": "empty, may take",
        "foreign": "what is there has format v3",
        "file": "cannot be written",
        "broken": "cannot be opened",
    }.items():
        with pytest.raises(SystemExit):
            main(["doctor", "--cache-dir", str(tmp_path / name)])
        lines = capsys.readouterr().out.splitlines()
        (line,) = [line for line in lines if "disk cache" in line]
        assert str(tmp_path / name) in line and text in line


@pytest.mark.model
def test_why_names_the_token_where_prompts_part(
    tmp_path: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig(model=smollm2_path)
    model = open_model(smollm2_path)
    identity = next(iter(kv_identities(config, model).values()))
    messages = [{"role": "system", "content": "Be brief. " * 40}, {"role": "user", "content": "Hi"}]
    system, user = (Message(m["role"], m["content"]) for m in messages)
    tokens = codec_of(model).encode_chat(Conversation((system, user)))
    public = tenant_digest("")
    blocks = blocks_of(tokens, root_key(identity, ""), identity=identity)
    put(tmp_path, *blocks, trace_of(tokens, "chatcmpl-1", tenant=public))
    flags = ["--model", smollm2_path, "--cache-dir", tmp_path]
    same = read_json(capsys, "why", json.dumps({"messages": messages}), *flags)
    assert (same["cached_tokens"], same["ends_with"]) == (len(tokens) // 64 * 64, None)
    assert len(same["files"]) == 1 and (tmp_path / same["files"][0]).is_file()
    messages[1]["content"] = "Bye"
    other = read_json(capsys, "why", json.dumps({"messages": messages}), *flags)
    assert other["closest"]["id"] == "chatcmpl-1" and other["closest"]["message_index"] == 1
    assert (other["closest"]["here"][:3], other["closest"]["there"][:2]) == ("Bye", "Hi")
    salted = read_json(capsys, "why", json.dumps({"messages": messages, "cache_salt": "x"}), *flags)
    assert (salted["cached_tokens"], salted["ends_with"], salted["closest"]) == (0, "never_seen", None)
    run(capsys, "rm", "chatcmpl-1", "-y", "--cache-dir", tmp_path)
    gone = read_json(capsys, "why", json.dumps({"messages": messages}), *flags)
    assert (gone["missing_at"], gone["ends_with"]) == (0, "deleted")
    _, text, _ = run(capsys, "why", json.dumps({"messages": messages}), *flags)
    assert "tokens 0 to 63 are not there: deleted" in text


@pytest.mark.model
def test_why_refuses_what_is_no_prompt(
    tmp_path: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path)
    for prompt in ('{"messages": [}', '{"messages": 1}', '{"prompt": [-1]}', '{"x": 1}'):
        code, _, err = run(capsys, "why", prompt, "--model", smollm2_path, "--cache-dir", tmp_path)
        assert code == 2 and err.count("\n") == 1 and "prompt" in err


def test_a_missing_file_is_not_taken_for_a_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path)
    code, _, err = run(capsys, "why", str(tmp_path / "nofile.json"), "--cache-dir", tmp_path)
    assert code and "nofile.json: No such file" in err
