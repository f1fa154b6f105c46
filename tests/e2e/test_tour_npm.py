"""The README's TypeScript block, and OpenAI's npm SDK, against the real server with the real model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from readme import code_block
from real_server import MODEL_NAME, RealServer

pytestmark = pytest.mark.model


def node(script: Path, *arguments: str) -> str:
    done = subprocess.run(["node", str(script), *arguments], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def play(server: RealServer, node_folder: Path, scenario: str) -> Any:
    return json.loads(node(node_folder / "tour.mjs", server.url, MODEL_NAME, scenario))


def test_the_readmes_typescript_block_prints_an_answer(
    server: RealServer, node_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "node_modules").symlink_to(node_folder / "node_modules")
    script = tmp_path / "tour.mjs"  # the block has no types to strip: it is JavaScript as it stands
    script.write_text(code_block("ts", server.url))
    assert len(node(script).split()) > 3


def test_a_stream_says_what_the_whole_answer_says(server: RealServer, node_folder: Path) -> None:
    seen = play(server, node_folder, "stream")
    assert seen["whole"] and seen["whole"] == seen["streamed"]


def test_choices_and_logprobs_are_read(server: RealServer, node_folder: Path) -> None:
    first, second = play(server, node_folder, "choices")
    assert first["text"] != second["text"]
    assert 0 < first["logprobs"] <= 24 and 0 < second["logprobs"] <= 24


@pytest.mark.parametrize(
    ("scenario", "seen"), [("abort", {"pieces": 3}), ("abortWhole", {"kind": "APIUserAbortError"})]
)
def test_an_aborted_request_is_ended_in_the_server(
    server: RealServer, node_folder: Path, scenario: str, seen: dict[str, object]
) -> None:
    before = server.metrics()["artesian_client_disconnects_total"]
    assert play(server, node_folder, scenario) == seen
    server.assert_idle()
    assert server.metrics()["artesian_client_disconnects_total"] == before + 1


def test_errors_are_typed_and_say_which_field(server: RealServer, node_folder: Path) -> None:
    seen = play(server, node_folder, "errors")
    assert seen["value"] == {
        "kind": "BadRequestError", "status": 400, "code": "invalid_value", "param": "temperature",
        "hasRequestId": True,
    }  # fmt: skip
    assert seen["model"] == {
        "kind": "NotFoundError", "status": 404, "code": "model_not_found", "param": "model",
        "hasRequestId": True,
    }  # fmt: skip
