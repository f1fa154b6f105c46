"""An answer's segments as a test compares them, and parsers by their dialect's name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from artesian.engine.codec.dialects import Dialect
from artesian.engine.codec.reasoning import REASONING_MARKS
from artesian.engine.codec.segments import (
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    Reasoning,
    Segment,
    Text,
)
from artesian.engine.codec.tools import TOOL_DIALECTS, ToolDialect

NAMES = ("get_weather", "add", "now")


def read(parser: AnswerParser, pieces: Iterable[str]) -> list[Segment]:
    """All segments, with what follows each other joined and ids taken out."""
    segments = [segment for piece in pieces for segment in parser.feed(piece)] + parser.finish()
    joined: list[Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        match last, segment:
            case Text(before), Text(text):
                joined[-1] = Text(before + text)
            case Reasoning(before), Reasoning(text):
                joined[-1] = Reasoning(before + text)
            case CallArguments(index, before), CallArguments(other, text) if index == other:
                joined[-1] = CallArguments(index, before + text)
            case _, CallBegin(index, _, name):
                joined.append(CallBegin(index, "", name))
            case _:
                joined.append(segment)
    return joined


def dialect(name: str) -> ToolDialect:
    return next(row for row in TOOL_DIALECTS if name in row.names)


def parser_of(
    name: str, reasoning: str | None = None, prompt_end: str = "", tools: Sequence[str] = NAMES
) -> AnswerParser:
    marks = next((row for row in REASONING_MARKS if reasoning in row.names), None)
    return Dialect(dialect(name), marks, False).parser(prompt_end, tools)


def call(index: int, name: str, arguments: str, *, is_whole: bool = True) -> list[Segment]:
    return [CallBegin(index, "", name), CallArguments(index, arguments), CallEnd(index, is_whole)]
