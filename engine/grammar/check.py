"""Schemas as the grammar library takes them: which it can compile, and where one fails."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from llguidance import LLMatcher

from ..errors import GrammarRefused
from .schema import Examined, Finding, SchemaReport, children, examine
from .spec import Schema

Part: TypeAlias = dict[str, Any]
"""A named grammar in the library's form."""

MAX_WHITESPACE = 16
"""Whitespace in a row, between the tokens of JSON: a line's end and what indents seven levels by two."""
LOCATE_LIMIT_S = 0.5
MAX_ERROR_CHARS = 300
JSON_OPTIONS = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": rf"[ \t\n\r]{{1,{MAX_WHITESPACE}}}",
    "lenient": False,
}


@dataclass(frozen=True, slots=True)
class CheckedSchema:
    """A schema that was read, in the library's form, and what came of compiling it."""

    examined: Examined
    source: dict[str, Any]
    state: LLMatcher | None
    error: str


class SchemaChecker:
    """Reads and compiles schemas; blocking, on any thread.

    Args:
        state: Makes the library's matcher of a grammar in its own form; `is_error()` if it is wrong.
    """

    def __init__(self, state: Callable[[str], LLMatcher]) -> None:
        self._state = state

    def check(self, schema: Schema, strict: bool) -> CheckedSchema:
        """Read a schema and compile it; not strict, `oneOf` may be taken for `anyOf` (which is then told).

        Raises:
            GrammarRefused: it cannot be compiled, or is strict and has what cannot be enforced.
        """
        examined = examine(schema)
        refused = examined.having("refused")
        if strict and refused:
            raise GrammarRefused(refused[0].detail, pointer=refused[0].pointer)
        checked = self._compiled(examined, coerced=False)
        if not checked.error:
            return checked
        if not strict and any(f.keyword == "oneOf" and f.status == "enforced" for f in examined.findings):
            loose = self._compiled(_coerced(examined), coerced=True)
            if not loose.error:
                return loose
        pointer, message = self._locate(examined.schema, checked.error)
        raise GrammarRefused(message, pointer=pointer)

    def report(self, schema: Schema, strict: bool) -> SchemaReport:
        findings: tuple[Finding, ...] = ()
        try:
            findings = examine(schema).findings
            checked = self.check(schema, strict)
        except GrammarRefused as err:
            return SchemaReport(False, findings, (), str(err), err.pointer)
        return SchemaReport(True, checked.examined.findings, warnings_of(checked.examined))

    def _compiled(self, examined: Examined, *, coerced: bool) -> CheckedSchema:
        source = _json_source(examined.schema, coerced)
        try:
            state = self._state(library_form([json_part("json_0", source)]))
        except ValueError as err:  # what the library's JSON reader refuses
            return CheckedSchema(examined, source, None, str(err))
        return CheckedSchema(examined, source, state, error_of(state))

    def _locate(self, root: Schema, error: str) -> tuple[str, str]:
        """The deepest subschema that fails by itself, and why."""
        if isinstance(root, bool):
            return "", error
        shared: dict[str, Any] = {
            name: root[name] for name in ("$schema", "$id", "$defs", "definitions") if name in root
        }
        deadline = time.monotonic() + LOCATE_LIMIT_S
        pointer, node, seen = "", root, {""}
        while True:
            for at, child in children(node, pointer, root):
                if at in seen or time.monotonic() > deadline:
                    continue
                seen.add(at)
                found = self._compiled(Examined({**shared, **child}, ()), coerced=False).error
                if found:
                    pointer, node, error = at, child, found
                    break
            else:
                return pointer, error


def json_part(name: str, source: dict[str, Any]) -> Part:
    return {"name": name, "json_schema": source}


def lark_part(name: str, lark: str) -> Part:
    return {"name": name, "lark_grammar": lark}


def library_form(parts: Sequence[Part]) -> str:
    """Several grammars; the first one is the whole answer's, the others are its `@name`s."""
    return json.dumps({"grammars": parts}, ensure_ascii=False)


def _json_source(schema: Schema, coerced: bool) -> dict[str, Any]:
    if schema is False:
        raise GrammarRefused("`false` allows no value", pointer="")
    whole = {} if schema is True else schema
    return {**whole, "x-guidance": {**JSON_OPTIONS, "coerce_one_of": coerced}}


def _coerced(examined: Examined) -> Examined:
    detail = "`oneOf` is taken for `anyOf`: an answer may match more than one of its schemas"
    return Examined(
        examined.schema,
        tuple(
            Finding(f.pointer, f.keyword, "approximated", detail) if f.keyword == "oneOf" else f
            for f in examined.findings
        ),
    )


def warnings_of(examined: Examined) -> tuple[str, ...]:
    loose = [f for f in examined.findings if f.status in ("refused", "approximated")]
    return tuple(f"{f.pointer}: {f.detail}" for f in loose + examined.unknown())


def error_of(state: LLMatcher) -> str:
    """The library's words for what is wrong, without its drawings; empty if nothing is."""
    text = str(state.get_error())
    _, marker, last = text.rpartition("error: ")
    return (last if marker else text).partition("\n")[0].strip()[:MAX_ERROR_CHARS]
