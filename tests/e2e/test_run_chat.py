"""`artesian run` and `artesian chat` as processes, with an engine of their own and against a server."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from real_server import ARTESIAN, RealServer

pytestmark = pytest.mark.model

COUNT = 20
ENGINE = ("--backend", "cpu", "--threads", "1")


def write_requests(path: Path, *, max_tokens: int = 6, extra: tuple[str, ...] = ()) -> Path:
    """Chat and plain completions, one a line."""
    lines = []
    for number in range(COUNT):
        body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        text, url = f"Count on from {number}:", "/v1/completions"
        if number % 2:
            body["messages"], url = [{"role": "user", "content": text}], "/v1/chat/completions"
        else:
            body["prompt"] = text
        lines.append(json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}))
    path.write_text("\n".join([*lines, *extra]) + "\n")
    return path


def run_command(requests: Path, output: Path, *flags: str) -> list[str]:
    return [*ARTESIAN, "run", str(requests), "-o", str(output), "--no-disk-cache", *flags]


def run(requests: Path, output: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = run_command(requests, output, *flags)
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def texts(output: Path) -> dict[str, str]:
    """What was answered, by custom_id; every answer must be there once, with status 200."""
    found = records(output)
    assert Counter(record["custom_id"] for record in found) == {f"r{i}": 1 for i in range(COUNT)}
    assert {record["response"]["status_code"] for record in found} == {200}
    choices = {record["custom_id"]: record["response"]["body"]["choices"][0] for record in found}
    return {name: choice.get("text") or choice["message"]["content"] for name, choice in choices.items()}


def test_own_engine_and_server_answer_a_file_alike(
    smollm2_path: Path, server: RealServer, tmp_path: Path
) -> None:
    requests = write_requests(tmp_path / "in.jsonl")
    own, remote = tmp_path / "own.jsonl", tmp_path / "remote.jsonl"
    here = run(requests, own, "--model", str(smollm2_path), *ENGINE)
    # Fewer at once than the server takes; one more would be told to come back, and come back.
    there = run(requests, remote, "--url", f"{server.url}/v1", "--concurrency", "8")
    assert (here.returncode, there.returncode) == (0, 0), here.stderr + there.stderr
    assert f"{COUNT} answered, 0 failed, 0 answered before" in here.stderr
    assert texts(own) == texts(remote)


def test_a_killed_run_goes_on_where_it_was(smollm2_path: Path, tmp_path: Path) -> None:
    requests, output = write_requests(tmp_path / "in.jsonl", max_tokens=24), tmp_path / "out.jsonl"
    flags = ("--model", str(smollm2_path), *ENGINE, "--concurrency", "2")
    process = subprocess.Popen(run_command(requests, output, *flags), stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not output.exists() or output.read_bytes().count(b"\n") < 4:
            assert process.poll() is None and time.monotonic() < deadline, "the run does not begin"
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    kept = output.read_bytes().count(b"\n")
    assert 4 <= kept < COUNT
    output.write_bytes(output.read_bytes() + b'{"custom_id": "r19", "resp')  # a line that the kill cut
    resumed = run(requests, output, *flags)
    assert resumed.returncode == 0, resumed.stderr
    assert f"{COUNT - kept} answered, 0 failed, {kept} answered before" in resumed.stderr
    assert all(texts(output).values())
    again = run(requests, output, *flags)
    assert (again.returncode, len(records(output))) == (0, COUNT)


def test_lines_that_cannot_be_answered_are_reported_and_the_rest_is_answered(
    server: RealServer, tmp_path: Path
) -> None:
    bad = (
        "{",
        '{"custom_id": "no url"}',
        '{"custom_id": "r3", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}',
        '{"custom_id": "hot", "url": "/v1/completions", "body": {"prompt": "x", "temperature": 9}}',
    )
    requests, output = write_requests(tmp_path / "in.jsonl", extra=bad), tmp_path / "out.jsonl"
    done = run(requests, output, "--url", server.url, "--concurrency", "4")
    assert done.returncode == 1
    assert f"{COUNT} answered, 4 failed, 0 answered before" in done.stderr
    problems = [record["error"]["message"] for record in records(output) if record["error"]]
    assert sorted(problem.split(":")[0] for problem in problems) == ["line 21", "line 22", "line 23"]
    refused = [r["response"] for r in records(output) if r["custom_id"] == "hot"]
    assert refused[0]["status_code"] == 400 and refused[0]["body"]["error"]["param"] == "temperature"


@pytest.mark.parametrize("flags", [("--url", "http://127.0.0.1:1"), ("--model", "no/such.gguf")])
def test_a_run_that_cannot_begin_says_so_in_one_line(tmp_path: Path, flags: tuple[str, str]) -> None:
    requests = tmp_path / "missing.jsonl" if "--url" in flags else write_requests(tmp_path / "in.jsonl")
    done = run(requests, tmp_path / "out.jsonl", *flags)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "missing.jsonl" in done.stderr or "no/such.gguf" in done.stderr


def test_chat_remembers_until_it_is_told_to_forget(server: RealServer) -> None:
    said = "My name is Ada.\nWhat is my name?\n/reset\nWhat is my name?\n"
    command = [*ARTESIAN, "chat", "--url", server.url, "--temperature", "0", "--max-tokens", "24"]
    done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    before, after = re.split(r"(?<=\n)(?=.*\Z)", done.stdout.strip())[0], done.stdout.strip().splitlines()[-1]
    assert "Ada" in before and "Ada" not in after
