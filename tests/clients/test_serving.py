"""Commands with a real engine: the server as a process, and behind the private socket of `run` and `chat`."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from artesian.clients.cli import main

pytestmark = pytest.mark.model


@contextmanager
def _serving(model: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`artesian serve` in a process of its own; yields it and all it said until it was ready."""
    command = [sys.executable, "-P", "-m", "artesian.clients.cli", "serve", str(model)]
    command += ["--no-disk-cache", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        said = ""
        while "curl" not in said:
            line = process.stdout.readline()
            assert line, "the server ended before it was ready"
            said += line
        try:
            yield process, said
        finally:
            process.kill()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_printed_line_works_and_sigterm_ends_the_server(smollm2_path: Path) -> None:
    with _serving(smollm2_path, "--port", "0") as (process, said):
        line = next(line for line in said.splitlines() if line.startswith("curl"))
        answer = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=60).stdout
        assert answer.startswith("data: {") and answer.endswith("data: [DONE]\n\n")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_unix_socket_is_served_and_removed_at_the_end(smollm2_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with _serving(smollm2_path, "--uds", str(path), "--served-model-name", "mine") as (process, _):
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x") as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "mine"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert not path.exists()


def test_a_file_of_requests_is_answered_by_an_engine_of_our_own(smollm2_path: Path, tmp_path: Path) -> None:
    bodies = [{"prompt": "The sky is", "max_tokens": 3}, {"prompt": "The sea is", "temperature": 9}]
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "run",
                "--no-disk-cache",
                str(tmp_path / "in.jsonl"),
                "-o",
                str(tmp_path / "out.jsonl"),
                "--model",
                str(smollm2_path),
            ]
        )
    records = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    status = {record["custom_id"]: record["response"]["status_code"] for record in records}
    assert (ended.value.code, status) == (1, {"r0": 200, "r1": 400})


def test_chat_answers_from_an_engine_of_our_own(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Say hello.\nAgain.\n"))
    with pytest.raises(SystemExit):
        main(["chat", str(smollm2_path), "--temperature", "0", "--max-tokens", "8", "--no-disk-cache"])
    answers = capsys.readouterr().out.strip().splitlines()
    assert len(answers) == 2 and all(re.search(r"\w", answer) for answer in answers)
