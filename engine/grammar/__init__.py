"""Constrained decoding: grammars, their compiler and the masks they give."""

from .spec import Choice, Grammar, JsonSchema, Lark, Regex, Tag, Tags

__all__ = ["Choice", "Grammar", "JsonSchema", "Lark", "Regex", "Tag", "Tags"]
