"""Keeps text apart from control: what users and tools say must not become a special token, which could end
their turn and begin the system's.

A template writes the markers of turns as names of special tokens. Where a conversation's own text holds such
a name, a mark is put into it before the template sees it; what is marked is then encoded as ordinary text.
What the assistant said is left as it is: templates look for its markers, and its tokens must be found again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from msgspec.structs import replace

from .conversation import Conversation, Message, TextPart, Tool

MARK = "\uf8f3"
"""Of the private use area, which no template writes. In a text from outside it is harmless."""

T = TypeVar("T")
Change = Callable[[str], str]


class Guard:
    """For one vocabulary.

    Args:
        names: Of its special tokens.
    """

    def __init__(self, names: Iterable[str]) -> None:
        longest_first = sorted((name for name in names if name), key=len, reverse=True)
        self._find = _any_of(longest_first)
        self._find_marked = _any_of([_marked(name) for name in longest_first])

    def guarded(self, conversation: Conversation) -> Conversation:
        """The conversation with every name marked that its text holds; itself if there is none."""
        find = self._find
        if find is None or not any(find.search(text) for text in _texts(conversation)):
            return conversation

        def mark(text: str) -> str:
            return find.sub(lambda found: _marked(found[0]), text)

        return replace(
            conversation,
            messages=tuple(
                message if message.role == "assistant" else _message(message, mark)
                for message in conversation.messages
            ),
            tools=tuple(_tool(tool, mark) for tool in conversation.tools),
        )

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """What a template has made of it: its pieces, and for each whether names in it are special tokens."""
        at = 0
        for found in self._find_marked.finditer(text) if self._find_marked else ():
            if found.start() > at:
                yield text[at : found.start()], True
            yield found[0].replace(MARK, "", 1), False
            at = found.end()
        if at < len(text):
            yield text[at:], True


def _any_of(texts: list[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def _marked(name: str) -> str:
    return f"{name[0]}{MARK}{name[1:]}"


def _texts(conversation: Conversation) -> Iterator[str]:
    seen: list[str] = []

    def note(text: str) -> str:
        seen.append(text)
        return text

    for message in conversation.messages:
        if message.role != "assistant":
            _message(message, note)
            yield from seen
            seen.clear()
    for tool in conversation.tools:
        _tool(tool, note)
        yield from seen
        seen.clear()


def _message(message: Message, change: Change) -> Message:
    content = message.content
    if isinstance(content, tuple):
        return replace(
            message,
            content=tuple(TextPart(change(part.text)) for part in content),
            name=_if_any(message.name, change),
        )
    return replace(message, content=_if_any(content, change), name=_if_any(message.name, change))


def _tool(tool: Tool, change: Change) -> Tool:
    return replace(
        tool, description=_if_any(tool.description, change), parameters=_json(tool.parameters, change)
    )


def _json(value: T, change: Change) -> T:
    """A JSON value with its texts changed, names of members included."""
    changed: Any = value
    if isinstance(value, str):
        changed = change(value)
    elif isinstance(value, list):
        changed = [_json(each, change) for each in value]
    elif isinstance(value, dict):
        changed = {change(name): _json(each, change) for name, each in value.items()}
    result: T = changed
    return result


def _if_any(text: str | None, change: Change) -> str | None:
    return None if text is None else change(text)
