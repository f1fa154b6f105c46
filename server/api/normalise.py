"""Optional: takes what changes with every request out of the first system message, where it would keep every
prompt from being reused. Off unless the operator asks for it; what it did is told in the answer.

Left alone is what a model may need to read, such as dates: only identifiers without meaning are replaced.
"""

from __future__ import annotations

import json
import re

import msgspec
from msgspec.structs import replace

from ...engine.codec import Conversation, Message, TextPart

PLACEHOLDER = "[volatile]"
RULES = {
    "nonce_header": re.compile(r"^x-[a-z0-9-]{1,64}:[^\n]*$", re.I | re.M),
    "uuid": re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.I),
    "hex": re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{16,128}\b", re.I),
    "epoch_ms": re.compile(r"(?<![\d.])1[5-9]\d{11}(?!\d|\.\d)"),
}
"""In order: what one rule has replaced, the next does not see."""


class Change(msgspec.Struct, frozen=True):
    """What was changed in one message."""

    message_index: int
    kind: str
    count: int


def normalise(conversation: Conversation) -> tuple[Conversation, tuple[Change, ...]]:
    """Return the conversation without its volatile parts, and what was changed."""
    messages, changes = list(conversation.messages), []
    for index, message in enumerate(messages):
        if index == 0 and message.role in ("system", "developer"):
            messages[index], counts = _system(message)
        else:
            messages[index], counts = _tool_calls(message)
        changes += [Change(index, kind, count) for kind, count in counts.items() if count]
    return replace(conversation, messages=tuple(messages)), tuple(changes)


def _system(message: Message) -> tuple[Message, dict[str, int]]:
    counts: dict[str, int] = {}
    if isinstance(message.content, str):
        return replace(message, content=_text(message.content, counts)), counts
    if message.content is None:
        return message, counts
    return replace(
        message,
        content=tuple(
            replace(part, text=_text(part.text, counts)) if isinstance(part, TextPart) else part
            for part in message.content
        ),
    ), counts


def _text(text: str, counts: dict[str, int]) -> str:
    for kind, rule in RULES.items():
        text, count = rule.subn(PLACEHOLDER, text)
        counts[kind] = counts.get(kind, 0) + count
    return text


def _tool_calls(message: Message) -> tuple[Message, dict[str, int]]:
    """Write tool calls' arguments with their keys in one order."""
    calls = tuple(replace(call, arguments=_ordered(call.arguments)) for call in message.tool_calls)
    count = sum(a.arguments != b.arguments for a, b in zip(calls, message.tool_calls, strict=True))
    return (replace(message, tool_calls=calls) if count else message), {"argument_order": count}


def _ordered(arguments: str) -> str:
    """The same JSON with its keys sorted, if they are not yet and no number or repeated key would change."""
    try:
        value = json.loads(arguments, parse_float=_exact, parse_int=_exact, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return arguments
    as_it_is, in_order = (
        json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort) for sort in (False, True)
    )
    return arguments if as_it_is == in_order else in_order


def _exact(text: str) -> int | float:
    """A number that is written as it was read. Raises `ValueError` otherwise."""
    number = float(text) if any(mark in text for mark in ".eE") else int(text)
    if json.dumps(number) != text:
        raise ValueError("a number would change")
    return number


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key is repeated")
    return dict(pairs)
