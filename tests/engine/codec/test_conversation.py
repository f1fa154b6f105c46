"""What a conversation refuses when it is built."""

from __future__ import annotations

import msgspec
import pytest

from artesian.engine.codec import Conversation, Message, TextPart, ToolCall
from artesian.engine.errors import InvalidRequest

USER = Message("user", "hi")


def test_text_parts_join_with_nothing_between_them() -> None:
    assert Message("user", (TextPart("a"), TextPart("b "), TextPart("c"))).text == "ab c"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (Message("foo", "hi"), "messages[1].role"),
        (Message("\ud83d", "hi"), "messages[1].role"),
        (Message("user"), "messages[1].content"),
        (Message("user", "\ud83d"), "messages[1].content"),
        (Message("user", (TextPart("\ud83d"),)), "messages[1].content"),
        (Message("user", "hi", name="\ud83d"), "messages[1].name"),
        (Message("tool", "1", tool_call_id="\ud83d"), "messages[1].tool_call_id"),
        (Message("assistant", reasoning="\ud83d"), "messages[1].reasoning"),
        (Message("assistant", tool_calls=(ToolCall("", "f", "\ud83d"),)), "messages[1].tool_calls[0]"),
    ],
)
def test_a_bad_message_is_refused_by_the_name_of_its_field(message: Message, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Conversation((USER, message))
    assert caught.value.param == param
    str(caught.value).encode()


def test_no_messages_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        Conversation(())


def test_a_conversation_crosses_a_process_boundary_unchanged() -> None:
    conversation = Conversation((USER, Message("user", (TextPart("x"),)), Message("assistant")))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(conversation), type=Conversation) == conversation
