"""The prompt cache as users meet it: a real server, a real model, real kill -9, the same words afterwards."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from real_server import ARTESIAN, MODEL_NAME, RealServer, real_server

pytestmark = pytest.mark.model

SYSTEM = "You are a careful assistant. " + " ".join(f"Rule {i}: answer in plain words." for i in range(45))
CONVERSATION = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is gravity?"}]
RECORDS = 8
"""Of CONVERSATION: seven blocks and a trace."""
STORED_S = 20.0


@contextmanager
def serving(model: Path, tmp_path: Path, *flags: str, **options: Any) -> Iterator[RealServer]:
    cache = ("--cache-dir", str(tmp_path / "prompts"), "--cache-min-free-bytes", "0")
    with real_server(model, tmp_path, *cache, *flags, **options) as server:
        yield server


def chat(server: RealServer, messages: list[dict[str, str]], key: str = "", **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "messages": messages, "temperature": 0, "max_tokens": 24, **fields}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text(answer: dict[str, Any]) -> str:
    said: str = answer["choices"][0]["message"]["content"]
    return said


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def kill_when_stored(server: RealServer) -> None:
    """kill -9, once the prompt's blocks and its trace are on disk."""
    deadline = time.monotonic() + STORED_S
    while server.metrics().get("artesian_cache_written_records_total", 0) < RECORDS:
        assert time.monotonic() < deadline, "the prompt is not stored"
        time.sleep(0.05)
    server.process.kill()
    server.process.wait()


def test_a_conversation_goes_on_from_disk_after_kill_9(smollm2_path: Path, tmp_path: Path) -> None:
    follow_up: list[dict[str, str]] = []
    with serving(smollm2_path, tmp_path) as server:
        cold = chat(server, CONVERSATION)
        assert cold["prompt_cache_diagnostics"]["type"] == "cache_miss"
        assert cold["prompt_cache_diagnostics"]["reason"] == "never_seen"
        follow_up = [
            *CONVERSATION, {"role": "assistant", "content": text(cold)}, {"role": "user", "content": "Why?"},
        ]  # fmt: skip
        warm = chat(server, follow_up)
        assert cached(warm) > 0 and warm["prompt_cache_diagnostics"]["sources"] == {"device": cached(warm)}
        kill_when_stored(server)
    with serving(smollm2_path, tmp_path) as server:
        again = chat(server, CONVERSATION)
        restarted = chat(server, follow_up)
        listed = subprocess.run(
            [*ARTESIAN, "cache", "ls", "--cache-dir", str(tmp_path / "prompts")],
            capture_output=True,
            text=True,
        )
    assert text(again) == text(cold) and text(restarted) == text(warm)
    diagnostics = again["prompt_cache_diagnostics"]
    assert diagnostics["type"] == "cache_hit" and diagnostics["sources"]["disk"] >= 448
    assert diagnostics["age_s"] > 0 and diagnostics["ttl_s"] == 72 * 3600
    assert diagnostics["expires_at"] == pytest.approx(time.time() + 72 * 3600, abs=60)
    assert cached(again) <= again["usage"]["prompt_tokens"] - 1
    assert "in 2d 23h" in listed.stdout and MODEL_NAME in listed.stdout


def test_a_miss_is_explained_by_what_changed_even_after_a_restart(smollm2_path: Path, tmp_path: Path) -> None:
    with serving(smollm2_path, tmp_path) as server:
        first = chat(server, CONVERSATION)
        kill_when_stored(server)
    changed = [{"role": "system", "content": "Nonce 4711. " + SYSTEM}, CONVERSATION[1]]
    with serving(smollm2_path, tmp_path) as server:
        answer = chat(server, changed, prompt_cache_options={"comparison_response_id": first["id"]})
        unknown = chat(server, changed, prompt_cache_options={"comparison_response_id": "nobody"})
    diagnostics = answer["prompt_cache_diagnostics"]
    assert diagnostics["type"] == "cache_miss" and diagnostics["reason"] == "input_changed"
    divergence = diagnostics["divergence"]
    assert divergence["what"] == "system" and divergence["message_index"] == 0
    assert 0 < divergence["token_offset"] < 10
    assert unknown["prompt_cache_diagnostics"]["type"] == "comparison_response_not_found"


def test_keys_and_salts_never_share(smollm2_path: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "ARTESIAN_API_KEY": "one,two"}
    with serving(smollm2_path, tmp_path, environ=environ) as server:
        first = chat(server, CONVERSATION, "one")
        strangers = [
            chat(server, CONVERSATION, "two"),
            chat(server, CONVERSATION, "one", cache_salt="a"),
            chat(server, CONVERSATION, "one", cache_salt="ab"),
        ]
        own = chat(server, CONVERSATION, "one")
    assert [cached(answer) for answer in strangers] == [0, 0, 0] and cached(own) > 0
    assert {text(answer) for answer in [first, own, *strangers]} == {text(first)}


def test_other_weights_layouts_and_dtypes_never_share(smollm2_path: Path, tmp_path: Path) -> None:
    other = tmp_path / smollm2_path.name  # the same name, one byte of one tensor changed
    shutil.copy(smollm2_path, other)
    with other.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))
    with serving(smollm2_path, tmp_path) as server:
        chat(server, CONVERSATION)
        kill_when_stored(server)
    for model, flags in (
        (other, ()),
        (smollm2_path, ("--kv-cache-dtype", "f32")),
        (smollm2_path, ("--block-tokens", "32")),
    ):
        with serving(model, tmp_path, *flags) as server:
            assert cached(chat(server, CONVERSATION)) == 0


def test_the_cap_on_disk_is_kept_and_what_gave_way_is_counted(smollm2_path: Path, tmp_path: Path) -> None:
    with serving(smollm2_path, tmp_path, "--cache-bytes", "20MB") as server:
        for number in range(6):
            chat(server, [{"role": "user", "content": f"{number} {SYSTEM}"}], max_tokens=1)
        deadline = time.monotonic() + STORED_S
        while server.metrics().get("artesian_cache_evicted_total", 0) == 0:
            assert time.monotonic() < deadline, "nothing gave way"
            time.sleep(0.1)
        seen = server.metrics()
    used = sum(path.lstat().st_blocks * 512 for path in (tmp_path / "prompts").rglob("*") if path.is_file())
    assert used <= 20_000_000 + 1_500_000 and seen["artesian_cache_bytes"] <= 20_000_000


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.timeout(900)
def test_damage_while_serving_costs_a_miss_and_never_a_word(
    rounds: int, smollm2_path: Path, tmp_path: Path
) -> None:
    with serving(smollm2_path, tmp_path) as server:
        expected = text(chat(server, CONVERSATION))
        kill_when_stored(server)
    chance = random.Random(5)
    for number in range(rounds):
        for path in (tmp_path / "prompts").rglob("*.seg"):
            with path.open("r+b") as file:
                for _ in range(3):
                    at = chance.randrange(4096, path.stat().st_size)
                    file.seek(at)
                    byte = file.read(1) or b"\0"
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 0x40]))
        with serving(smollm2_path, tmp_path) as server:
            assert text(chat(server, CONVERSATION)) == expected, f"round {number}"
            server.assert_idle()


@pytest.mark.parametrize("rounds", [2, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.timeout(3600)
def test_kill_9_at_any_moment_never_brings_a_wrong_word(
    rounds: int, smollm2_path: Path, tmp_path: Path
) -> None:
    chance = random.Random(11)
    prompts = [[{"role": "user", "content": f"{n} {SYSTEM}"}] for n in range(3)]
    with serving(smollm2_path, tmp_path, "--no-disk-cache") as server:
        expected = [text(chat(server, prompt, max_tokens=8)) for prompt in prompts]
    hits = 0
    for _ in range(rounds):
        with serving(smollm2_path, tmp_path) as server:
            for prompt, words in zip(prompts, expected, strict=True):
                answer = chat(server, prompt, max_tokens=8)
                assert text(answer) == words
                hits += answer["prompt_cache_diagnostics"].get("sources", {}).get("disk", 0) > 0
            time.sleep(chance.random() * 0.6)
            server.process.kill()
            server.process.wait()
    assert hits > 0


def test_named_caches_outlive_a_restart(smollm2_path: Path, tmp_path: Path) -> None:
    with serving(smollm2_path, tmp_path) as server:
        made = httpx.post(
            f"{server.url}/v1/caches",
            json={"name": "rules", "messages": CONVERSATION, "pinned": True},
            timeout=60,
        )
        assert made.status_code == 201, made.text
        server.process.kill()
        server.process.wait()
    with serving(smollm2_path, tmp_path) as server:
        (only,) = httpx.get(f"{server.url}/v1/caches").json()["data"]
        assert only["name"] == "rules" and only["pinned"] and only["cached_tokens"] >= 448
        assert chat(server, CONVERSATION)["prompt_cache_diagnostics"]["sources"]["disk"] >= 448
        gone = httpx.delete(f"{server.url}/v1/caches/rules").json()
        assert gone["deleted"] and httpx.get(f"{server.url}/v1/caches/rules").status_code == 404
    found = subprocess.run(
        [*ARTESIAN, "cache", "stat", "--json", "--cache-dir", str(tmp_path / "prompts")], capture_output=True
    )
    assert json.loads(found.stdout)["pinned"] == 0
