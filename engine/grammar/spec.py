"""What an answer may look like, in neutral form: a protocol's front end builds it, the compiler reads it."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

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
    """A form that begins with a fixed text, holds one JSON value and ends with a fixed text."""

    begin: str
    schema: Schema
    end: str
    strict: bool = True


class Tags(msgspec.Struct, frozen=True, tag="tags"):
    """Free text in which forms may occur: what a trigger opens is one of the forms that begin with it."""

    tags: tuple[Tag, ...]
    triggers: tuple[str, ...]
    """Each form's `begin` starts with one of them, or the `opening` does."""
    required: bool = False
    """No free text: the answer is one form at least."""
    parallel: bool = True
    """More than one form may occur."""
    between: str = ""
    """What stands between two forms that follow each other."""
    opening: str = ""
    """What stands in front of the first of them; "": forms stand alone in free text."""
    closing: str = ""
    """What stands behind the last, if there is an opening."""


Grammar = JsonSchema | Regex | Choice | Lark | Tags
