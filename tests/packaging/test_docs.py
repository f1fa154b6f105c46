"""The documents say what the code does: fields, flags and codes are named where a reader looks for them."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

import artesian.server
from artesian.server.api.openai_chat import ChatRequest
from artesian.server.api.openai_completions import CompletionRequest
from artesian.server.api.sampling import LABELS, UNAVAILABLE, WITHOUT_EFFECT, StreamOptions

DOCS = Path(__file__).resolve().parents[2] / "docs"
FIELDS = {
    "both": {
        *msgspec.structs.asdict(ChatRequest(messages=[])),
        *msgspec.structs.asdict(CompletionRequest(prompt="")),
    },  # fmt: skip
    "stream_options": {f"stream_options.{name}" for name in msgspec.structs.asdict(StreamOptions())},
    "refused": set(UNAVAILABLE),
    "ignored": set(WITHOUT_EFFECT),
    "labels": set(LABELS),
}


@pytest.mark.parametrize("kind", FIELDS)
def test_every_request_field_is_documented(kind: str) -> None:
    documented = set(re.findall(r"`([\w.]+)`", (DOCS / "api.md").read_text()))
    assert FIELDS[kind] - {"stream_options"} <= documented


def test_every_error_code_is_documented() -> None:
    server = Path(artesian.server.__file__).parent
    codes = {code for file in server.rglob("*.py") for code in re.findall(r'code="(\w+)"', file.read_text())}
    assert codes and codes <= set(re.findall(r"`(\w+)`", (DOCS / "api.md").read_text()))
