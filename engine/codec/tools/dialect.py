"""What there is to know about a tool dialect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..segments import AnswerParser
from .forms import CallForms


@dataclass(frozen=True, kw_only=True)
class ToolDialect:
    """A row of the table of dialects."""

    names: tuple[str, ...]
    """As `--tool-call-parser` takes them."""
    signs: tuple[tuple[str, ...], ...]
    """A model speaks it if its template has all texts of one of these."""
    markers: tuple[str, ...]
    """What must be visible in an answer's text, be it a special token or not."""
    parser: Callable[..., AnswerParser]
    """Makes a parser for the tools of these names; one that reads thoughts is told the prompt's end too."""
    forms: CallForms | None = None
    """None: its calls are not a JSON value between fixed texts."""
    reads_reasoning: bool = False
    """Its parser tells thoughts too, and is needed without tools."""

    def is_shown_in(self, template: str) -> bool:
        return any(all(text in template for text in texts) for texts in self.signs)
