"""Which dialect a model speaks: tables that its template is looked up in, and the parser they lead to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .reasoning import REASONING_MARKS, PlainParser, ReasoningMarks, ReasoningParser
from .segments import AnswerParser
from .tokenizer import Tokenizer
from .tools import TOOL_DIALECTS, ToolDialect

T = TypeVar("T")

PROMPT_END_TOKENS = 16
"""In which a thought that the prompt has opened shows."""


class UnknownDialect(ValueError):
    """No such name; the message names the field, and the names there are."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model writes what is not plain text."""

    tools: ToolDialect
    reasoning: ReasoningMarks | None
    keeps_special: bool
    """Some marker is a special token: the text must show those."""

    def parser(self, prompt_end: str, names: Collection[str]) -> AnswerParser:
        """A parser for one answer.

        Args:
            prompt_end: The prompt's last text, special tokens shown.
            names: The tools on offer; none: nothing is read as a call.
        """
        if self.tools.reads_reasoning:
            return self.tools.parser(names, prompt_end)
        parser: AnswerParser = self.tools.parser(names) if names else PlainParser()
        if self.reasoning is None:
            return parser
        is_open = prompt_end.rstrip().endswith(self.reasoning.open)
        return ReasoningParser(self.reasoning, parser, is_open=is_open)

    def thought_before(self, prompt_end: str) -> tuple[str, str] | None:
        """What opens and what closes a thought in front of the answer proper; the first is empty where the
        prompt has opened it. None: there can be no thought."""
        marks = (self.reasoning.open, self.reasoning.close) if self.reasoning else self.tools.thoughts
        end = prompt_end.rstrip()
        if marks is None or end.endswith(marks[1]):
            return None
        return ("" if end.endswith(marks[0]) else marks[0], marks[1])

    def is_plain(self, names: Collection[str]) -> bool:
        """Whether an answer is all text whatever it says."""
        return self.reasoning is None and not names and not self.tools.reads_reasoning


def find_dialect(
    template: str | None,
    tokenizer: Tokenizer,
    *,
    shows_tools: bool = True,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> Dialect:
    """The dialect of a model, from its template's source; the names override what it says ("none": none).

    Args:
        shows_tools: Whether the template tells tools; if not, the prompt asks for calls in Hermes' form.

    Raises:
        UnknownDialect: no such name.
    """
    if tool_call_parser:
        tools = _named("tool_call_parser", tool_call_parser, TOOL_DIALECTS, lambda dialect: dialect.names)
    else:
        shown = (row for row in TOOL_DIALECTS if row.is_shown_in(template or ""))
        tools = next((row for row in shown if shows_tools or row.reads_reasoning), TOOL_DIALECTS[-1])
    reasoning: ReasoningMarks | None
    if tools.reads_reasoning or reasoning_parser == "none":
        reasoning = None
    elif reasoning_parser:
        reasoning = _named("reasoning_parser", reasoning_parser, REASONING_MARKS, lambda marks: marks.names)
    else:
        reasoning = next((marks for marks in REASONING_MARKS if marks.close in (template or "")), None)
    markers = [*tools.markers, *([reasoning.open, reasoning.close] if reasoning else [])]
    special = {tokenizer.token_name(token_id) for token_id in tokenizer.special_ids}
    return Dialect(tools, reasoning, not special.isdisjoint(markers))


def _named(field: str, name: str, rows: Sequence[T], names_of: Callable[[T], tuple[str, ...]]) -> T:
    for row in rows:
        if name in names_of(row):
            return row
    known = ", ".join(sorted({one for row in rows for one in names_of(row)}))
    raise UnknownDialect(f"{field}={name!r} is unknown; expected one of {known}")
