"""What an answer may look like, in neutral form: a protocol's front end builds it, the compiler reads it."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from ..codec.tools import MemberForms

Schema: TypeAlias = dict[str, Any] | bool


class JsonSchema(msgspec.Struct, frozen=True, tag="json_schema"):
    """The whole answer is one JSON value."""

    schema: Schema
    strict: bool = True
    """A keyword that cannot be enforced refuses the request; else it is a warning."""


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    """The whole answer matches."""

    pattern: str


class Choice(msgspec.Struct, frozen=True, tag="choice"):
    """The whole answer is one of these texts."""

    texts: tuple[str, ...]


class Lark(msgspec.Struct, frozen=True, tag="lark"):
    """The whole answer is a sentence of a context-free grammar in Lark's notation."""

    source: str


class Tag(msgspec.Struct, frozen=True):
    """A form that begins with a fixed text, holds one JSON value and ends with a fixed text. With `members`
    the value is an object whose members stand by themselves."""

    begin: str
    schema: Schema
    end: str
    strict: bool = True
    members: MemberForms | None = None


class Tags(msgspec.Struct, frozen=True, tag="tags"):
    """Free text in which forms may occur: what a trigger opens is one of the forms that begin with it."""

    tags: tuple[Tag, ...]
    triggers: tuple[str, ...]
    """Each form's `begin` starts with one of them; or `opening` has the only one."""
    required: bool = False
    """No free text: the answer is one form at least."""
    parallel: bool = True
    """More than one form may occur."""
    between: str = ""
    """What stands between two forms that follow each other."""
    opening: str = ""
    """What stands before the forms, which then all stand in one row."""
    closing: str = ""
    """What stands behind them."""
    text: JsonSchema | Regex | Choice | Lark | None = None
    """What the answer is if it is no form: then there is no free text, and forms follow each other only."""

    @property
    def is_free(self) -> bool:
        """Whether free text may stand around the forms."""
        return not self.required and self.text is None


class Thoughtful(msgspec.Struct, frozen=True, tag="thoughtful"):
    """A thought, then the answer proper."""

    close: str
    """The text that ends the thought."""
    answer: JsonSchema | Regex | Choice | Lark | Tags
    open: str = ""
    """The text that begins it, or there is none; empty: the thought is open already."""


Grammar = JsonSchema | Regex | Choice | Lark | Tags | Thoughtful
