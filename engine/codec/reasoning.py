"""What a model thinks before it answers, told apart from the answer by two markers.

Only the beginning of an answer can open a thought. What is behind it goes on to the parser of the calls.
"""

from __future__ import annotations

import msgspec

from .segments import AnswerParser, Reasoning, Segment, Text
from .tools.base import SPACE, Markers


class ReasoningMarks(msgspec.Struct, frozen=True):
    """A model's spelling of its thoughts."""

    names: tuple[str, ...]
    """As `--reasoning-parser` takes them."""
    open: str
    close: str


REASONING_MARKS = (
    ReasoningMarks(
        ("qwen3", "deepseek_r1", "deepseek_v3", "deepseek_v4", "glm45", "think"), "<think>", "</think>"
    ),
    ReasoningMarks(("mistral",), "[THINK]", "[/THINK]"),
    ReasoningMarks(("seed_oss",), "<seed:think>", "</seed:think>"),
    ReasoningMarks(("cohere_command3",), "<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningMarks(("kimi_k2",), "◁think▷", "◁/think▷"),
)


class PlainParser:
    """An answer that is all text."""

    def feed(self, text: str) -> list[Segment]:
        return [Text(text)] if text else []

    def finish(self) -> list[Segment]:
        return []


class ReasoningParser:
    """Reads a thought, then hands on to `inner`.

    Args:
        is_open: The prompt has opened the thought already.
    """

    def __init__(self, marks: ReasoningMarks, inner: AnswerParser, *, is_open: bool) -> None:
        self._inner = inner
        self._open, self._close = Markers(marks.open), Markers(marks.close)
        self._state = "thought" if is_open else "start"
        self._rest = ""
        self._space = ""
        self._is_fresh = True
        """Nothing of the thought has been given out: white space goes."""

    def feed(self, text: str) -> list[Segment]:
        if self._state == "answer":
            return self._inner.feed(text)
        self._rest += text
        out: list[Segment] = []
        if self._state == "start":
            marker = self._open.at_start(self._rest.lstrip(SPACE))
            if marker == "":
                return out
            if marker is None:
                self._state = "answer"
            else:
                self._rest = self._rest.lstrip(SPACE).removeprefix(marker)
                self._state = "thought"
        if self._state == "thought":
            before, marker, self._rest = self._close.split(self._rest)
            self._think(before, out)
            if marker is None:
                return out
            self._state, self._space = "gap", ""
        if self._state == "gap":
            self._rest = self._rest.lstrip(SPACE)
            if not self._rest:
                return out
            self._state = "answer"
        rest, self._rest = self._rest, ""
        return out + self._inner.feed(rest)

    def finish(self) -> list[Segment]:
        out: list[Segment] = []
        if self._state == "thought":
            self._think(self._rest, out)
        elif self._state == "start":
            out = self._inner.feed(self._rest)
        return out + self._inner.finish()

    def _think(self, text: str, out: list[Segment]) -> None:
        """White space at a thought's ends is the markers'."""
        if self._is_fresh:
            text = text.lstrip(SPACE)
        solid = text.rstrip(SPACE)
        if solid:
            self._is_fresh = False
            out.append(Reasoning(self._space + solid))
            self._space = text[len(solid) :]
        else:
            self._space += text
