"""What a model's answer is made of, once its dialect's markers are read: text, reasoning, tool calls.

A parser is fed the answer's text as it comes, cut anywhere; the segments are the same wherever the cuts lie,
apart from where one text is cut into several.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import msgspec


class Text(msgspec.Struct, frozen=True, gc=False):
    """A piece of the answer proper."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """A piece of what the model thinks before it answers."""

    text: str


class CallBegin(msgspec.Struct, frozen=True, gc=False):
    """A tool call opens. Calls are numbered from 0 in each answer."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """A piece of a call's arguments, as JSON text whatever the dialect writes."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """A call ends."""

    index: int
    is_whole: bool = True
    """Not so if the answer ended before the call did: nothing to act on."""


Segment: TypeAlias = Text | Reasoning | CallBegin | CallArguments | CallEnd


class AnswerParser(Protocol):
    """Reads one choice's text."""

    def feed(self, text: str) -> list[Segment]:
        """What has become certain with this text."""
        ...

    def finish(self) -> list[Segment]:
        """The rest, at the answer's end: a marker that never came to its end is text."""
        ...
