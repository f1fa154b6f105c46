"""Arguments that stand one by one as plain text, as a JSON object: the tool's schema tells the types."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

_WORDS = {"True": "true", "False": "false", "None": "null"}
_KINDS: tuple[tuple[type, frozenset[str]], ...] = (
    (bool, frozenset({"boolean"})),
    (int, frozenset({"integer", "number"})),
    (float, frozenset({"number"})),
    (str, frozenset({"string"})),
    (list, frozenset({"array"})),
    (dict, frozenset({"object"})),
    (type(None), frozenset({"null"})),
)


class TypedArguments:
    """One call's arguments. What can only be a string is given out as it comes, the rest once it is whole.

    Args:
        give: Takes the pieces of JSON.
        tools: The tools on offer; as a mapping it tells their schemas.
    """

    def __init__(self, give: Callable[[str], None], tools: Collection[str], name: str) -> None:
        schema = tools.get(name) if isinstance(tools, Mapping) else None
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._give = give
        self._is_first = True
        self._types: frozenset[str] = frozenset()
        self._held: list[str] = []

    def begin(self, key: str) -> None:
        """An argument opens."""
        self._types, self._held = _types(self._properties.get(key)), []
        self._give(("{" if self._is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._is_first = False
        if self._is_text:
            self._give('"')

    def text(self, text: str) -> None:
        """A piece of the open argument."""
        if self._is_text:
            self._give(_escaped(text))
        else:
            self._held.append(text)

    def end(self) -> None:
        """The open argument is whole."""
        self._give('"' if self._is_text else _converted("".join(self._held), self._types))
        self._held.clear()

    def cut(self) -> None:
        """The answer ends in the midst: what is held is given as it is."""
        self._give("{}" if self._is_first else "".join(self._held))

    def close(self) -> None:
        """All arguments are there."""
        self._give("{}" if self._is_first else "}")

    @property
    def _is_text(self) -> bool:
        return self._types == {"string"}


def _types(schema: Any) -> frozenset[str]:
    """The types that a schema allows; none: it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(one for one in named if isinstance(one, str))
    values = schema.get("enum")
    if isinstance(values, list):
        return frozenset(kind for value in values for kind in _kind(value))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found = [_types(one) for one in schema[key]]
            return frozenset(kind for kinds in found for kind in kinds) if all(found) else frozenset()
    return frozenset()


def _converted(text: str, types: frozenset[str]) -> str:
    """A value's text as JSON: a string where it is no other value, or would be one of a wrong type."""
    plain = text.strip()
    plain = _WORDS.get(plain, plain)
    try:
        value = json.loads(plain, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return f'"{_escaped(text)}"'
    if "string" in types and not _kind(value) & types:
        return f'"{_escaped(text)}"'
    return plain


def _kind(value: Any) -> frozenset[str]:
    return next((kind for one, kind in _KINDS if isinstance(value, one)), frozenset())


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
