"""`artesian cache` on real directories, made by the disk tier itself."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tiers import IDENTITY, TENANT

from artesian.cache.spec import block_keys, named_key
from artesian.cache.tiers import Kind, Record
from artesian.cache.tiers.nvme import NvmeTier
from artesian.clients.cli import main
from artesian.server.cache_trace import Trace, pack_tokens

TOKENS = list(range(100, 100 + 3 * 64))


def tier_of(path: Path) -> NvmeTier:
    return NvmeTier(path, budget_bytes=1 << 30, min_free_bytes=0, default_ttl_s=3600.0, clock=time.time)


def fill(
    path: Path, tokens: list[int] = TOKENS, name: str = "chatcmpl-0123456789abcdef", key: str = "job"
) -> None:
    """A prompt of whole blocks and its trace."""
    keys, contents = block_keys(bytes(32), tokens, 64)
    parents = [bytes(32), *keys]
    blocks = [
        Record(Kind.BLOCK, k, IDENTITY, content, memoryview(os.urandom(5000)), 7200.0, parents[i], i + 1)
        for i, (k, content) in enumerate(zip(keys, contents, strict=True))
    ]
    array = np.asarray(tokens, np.int32)
    trace = Trace(
        id=name, model="tiny", weights="w", created_at=time.time(), count=len(tokens),
        packed=pack_tokens(array), key=key,
    )  # fmt: skip
    content = b"responses\0" + name.encode()
    value = memoryview(msgspec.msgpack.encode(trace))
    named = Record(Kind.NAMED, named_key(TENANT, content), TENANT, content, value, 7200.0)
    tier = tier_of(path)
    assert len(tier.put([*blocks, named])) == len(blocks) + 1
    tier.close()


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
    assert row["prompt_cache_key"] == "job" and row["expires_at"] == pytest.approx(time.time() + 7200, abs=60)
    _, table, _ = run(capsys, "ls", "--cache-dir", tmp_path)
    assert "chatcmpl-0123456789" in table and "in 1h 59m" in table
    assert len(read_json(capsys, "ls", "--blocks", "--cache-dir", tmp_path)) == 3


def test_turns_of_one_conversation_are_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, TOKENS[:128], "chatcmpl-first")
    fill(tmp_path, TOKENS, "chatcmpl-second")
    (row,) = read_json(capsys, "ls", "--cache-dir", tmp_path)
    assert (row["id"], row["tokens"]) == ("chatcmpl-second", 192)


def test_sums_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path)
    sums = read_json(capsys, "stat", "--cache-dir", tmp_path)
    assert (sums["blocks"], sums["names"], sums["prompts"], sums["format"]) == (3, 1, 1, "v2")


def test_a_damaged_record_is_found_and_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path)
    assert run(capsys, "verify", "--cache-dir", tmp_path)[0] == 0
    (segment,) = (tmp_path / "v2" / "seg").rglob("*.seg")
    with segment.open("r+b") as file:
        file.seek(4096 + 4096 + 10)
        file.write(b"damage")
    code, out, _ = run(capsys, "verify", "--cache-dir", tmp_path)
    assert code == 1 and "3 records are sound" in out and "1 are not" in out
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
    code, _, err = run(capsys, "ls", "--cache-dir", tmp_path / "nowhere")
    assert code == 2 and err.count("\n") == 1 and "there is no prompt cache" in err
    (tmp_path / "v3").mkdir()
    code, _, err = run(capsys, "ls", "--cache-dir", tmp_path)
    assert code == 2 and err.count("\n") == 1 and "only one of format v3" in err


@pytest.mark.model
def test_why_names_the_token_where_prompts_part(
    tmp_path: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path)
    answer = read_json(
        capsys, "why", json.dumps({"prompt": [*TOKENS[:70], 5, *TOKENS[71:]]}), "--model", smollm2_path,
        "--cache-dir", tmp_path,
    )  # fmt: skip
    assert (answer["tokens"], answer["cached_tokens"], answer["ends_with"]) == (192, 0, "never_seen")
