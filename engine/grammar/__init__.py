"""Constrained decoding: grammars, their compiler and the masks they give."""

from .schema import Finding, SchemaReport
from .spec import Choice, Grammar, JsonSchema, Lark, Regex, Schema, Tag, Tags, Thoughtful

__all__ = [
    "Choice",
    "Finding",
    "Grammar",
    "JsonSchema",
    "Lark",
    "Regex",
    "Schema",
    "SchemaReport",
    "Tag",
    "Tags",
    "Thoughtful",
]
