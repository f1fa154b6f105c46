"""What the normaliser takes out of a prompt, and what it leaves."""

from __future__ import annotations

import time

from artesian.engine.codec import Conversation, Message, ToolCall
from artesian.server.api.normalise import PLACEHOLDER, normalise


def system(text: str) -> tuple[str, dict[str, int]]:
    conversation, changes = normalise(Conversation((Message("system", text), Message("user", text))))
    assert conversation.messages[1].content == text, "only the first system message is touched"
    return conversation.messages[0].text, {change.kind: change.count for change in changes}


def test_identifiers_without_meaning_are_replaced() -> None:
    text = "Run 123e4567-e89b-12d3-a456-426614174000 of deadbeefdeadbeef0123 at 1796096887123."
    assert system(text) == (
        f"Run {PLACEHOLDER} of {PLACEHOLDER} at {PLACEHOLDER}.", {"uuid": 1, "hex": 1, "epoch_ms": 1},
    )  # fmt: skip


def test_header_lines_are_replaced_whole() -> None:
    text = "x-anthropic-billing-header: cc_version=2; cch=1a2b\nx-nonce: 1\nBe kind."
    assert system(text) == (f"{PLACEHOLDER}\n{PLACEHOLDER}\nBe kind.", {"nonce_header": 2})


def test_dates_words_and_plain_numbers_stay() -> None:
    text = "Today is 2026-12-01T03:54:32Z. Call 5551234567. The colour is #ffeedd. Feedback: decade."
    assert system(text) == (text, {})


def test_arguments_get_their_keys_in_order_and_nothing_else() -> None:
    calls = (
        ToolCall("1", "f", '{"b": 1, "a": 2}'), ToolCall("2", "f", '{"a": 1, "b": 0.12345678901234567890}'),
        ToolCall("3", "f", "{not json"), ToolCall("4", "f", '{"b": -0, "a": 1, "a": 2}'),
    )  # fmt: skip
    conversation, changes = normalise(Conversation((Message("assistant", None, tool_calls=calls),)))
    after = [call.arguments for call in conversation.messages[0].tool_calls]
    assert after == ['{"a":2,"b":1}', calls[1].arguments, calls[2].arguments, calls[3].arguments]
    assert [(change.kind, change.count) for change in changes] == [("argument_order", 1)]


def test_hostile_text_takes_linear_time() -> None:
    text = "x-" + "header-" * 200_000
    began = time.perf_counter()
    system(text)
    assert time.perf_counter() - began < 2.0
