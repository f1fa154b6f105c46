"""What of a JSON schema can be enforced: every keyword is read, and none is dropped in silence.

`examine` sorts a schema's keywords, with their JSON pointers, into *enforced*, *approximated* (the answer may
break it in a way that is said), *annotation* (it says nothing about validity here) and *refused*; what it
returns to be compiled has only the first two. It fetches nothing. It knows nothing of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal
from urllib.parse import unquote

import msgspec

from ..errors import GrammarRefused
from .spec import Schema

Status = Literal["enforced", "approximated", "annotation", "refused"]

MAX_DEPTH = 100
MAX_NODES = 20_000
"""Values in the whole schema; each costs about 10 us until its grammar stands."""
MAX_PROPERTIES = 1_000
"""Of one object: the mask where any of them may come next grows with their number (20 ms at this)."""
MAX_MULTIPLE = 10_000
"""`multipleOf`, counted in its own last decimal: its automaton has that many states."""

BY_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": (
        "items prefixItems additionalItems unevaluatedItems minItems maxItems uniqueItems contains "
        "minContains maxContains"
    ).split(),
    "object": (
        "properties patternProperties additionalProperties unevaluatedProperties required minProperties "
        "maxProperties propertyNames dependencies dependentRequired dependentSchemas"
    ).split(),
}
TYPE_OF = {keyword: name for name, keywords in BY_TYPE.items() for keyword in keywords}
REFUSED = frozenset(
    "$dynamicRef $recursiveRef contains dependencies dependentRequired dependentSchemas if not propertyNames "
    "unevaluatedItems unevaluatedProperties uniqueItems".split()
)
"""Keywords that constrain and that no mask here follows."""
ANNOTATIONS = frozenset(
    "$schema $id $anchor $comment $defs $dynamicAnchor $recursiveAnchor $vocabulary id definitions title "
    "description default examples example deprecated readOnly writeOnly contentEncoding contentMediaType "
    "contentSchema then else minContains maxContains discriminator".split()
)
"""Keywords that say nothing about validity (`then`, `else`, `minContains` and `maxContains` only beside what
they belong to, which is refused)."""
ENFORCED = frozenset(TYPE_OF) - REFUSED - ANNOTATIONS | frozenset(
    "type enum const anyOf allOf oneOf $ref".split()
)
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uri uuid".split())
UNENFORCED_FORMATS = frozenset(
    "idn-email idn-hostname uri-reference iri iri-reference uri-template json-pointer relative-json-pointer "
    "regex".split()
)
"""Formats of the standard without a grammar here; all others are a schema's own and mean nothing to it."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}),
    "not": (False,),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}
"""Values of refused keywords that ask for nothing."""
IN_PLACE = frozenset("allOf anyOf oneOf $ref $dynamicRef if dependentSchemas".split())
"""Keywords whose subschemas see the same instance: behind them "unevaluated" is more than "additional"."""

ONE = frozenset("items additionalItems additionalProperties contains not if then else propertyNames".split())
MANY = frozenset("allOf anyOf oneOf prefixItems items".split())
NAMED = frozenset("properties patternProperties $defs definitions dependentSchemas".split())
DRAFTS = frozenset(
    ["https://json-schema.org/draft/2020-12/schema", "https://json-schema.org/draft/2019-09/schema"]
    + [f"http://json-schema.org/draft-0{n}/schema" for n in (4, 6, 7)]
)


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """What becomes of one keyword."""

    pointer: str
    keyword: str
    status: Status
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.pointer}: {self.detail}" if self.detail else self.pointer


class Examined(msgspec.Struct, frozen=True):
    """A schema, read."""

    schema: Schema
    """To be compiled: without what cannot be enforced."""
    findings: tuple[Finding, ...]
    """One per keyword of what the root reaches, in the schema's order."""

    def having(self, status: Status) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == status]

    def unknown(self) -> list[Finding]:
        """Keywords that nobody knows: a slip of the pen is one of them."""
        return [f for f in self.findings if f.detail and f.keyword not in ENFORCED | REFUSED | ANNOTATIONS]


class SchemaReport(msgspec.Struct, frozen=True):
    """What becomes of a schema."""

    accepted: bool
    keywords: tuple[Finding, ...]
    warnings: tuple[str, ...]
    """What an answer may break although the schema is accepted, in words."""
    error: str | None = None
    pointer: str | None = None
    """Where the error is."""


def examine(schema: Schema) -> Examined:
    """Sort a schema's keywords.

    Raises:
        GrammarRefused: it is too large or too deep, no JSON schema, or points outside itself.
    """
    _check_size(schema)
    reader = _Reader(schema)
    cleaned = reader.clean(schema, "")
    return Examined(cleaned, tuple(reader.reached()))


def children(
    node: dict[str, Any], pointer: str, root: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The subschemas that a schema applies, with their pointers; a reference's target is one."""
    for keyword, value in node.items():
        at = f"{pointer}/{_escape(keyword)}"
        if keyword in NAMED and keyword not in ("$defs", "definitions") and isinstance(value, dict):
            yield from (
                (f"{at}/{_escape(n)}", child) for n, child in value.items() if isinstance(child, dict)
            )
        elif keyword in MANY and isinstance(value, list):
            yield from ((f"{at}/{i}", child) for i, child in enumerate(value) if isinstance(child, dict))
        elif keyword in ONE and isinstance(value, dict):
            yield at, value
        elif keyword == "$ref" and isinstance(value, str) and value.startswith("#/"):
            target = _at(root, value[1:])
            if isinstance(target, dict):
                yield value[1:], target


def _at(root: Any, pointer: str) -> Any:
    for name in pointer.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, dict) else None
    return root


class _Reader:
    """One walk over a schema."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        ids = dict(_ids(root))
        self._ids = {"", *ids.values()}
        self._is_one_resource = not any(ids[pointer] for pointer in ids if pointer)
        self._anchors = _anchors(root)
        self._findings: list[tuple[str, Finding]] = []
        self._edges: dict[str, set[str]] = {}

    def clean(self, node: Any, pointer: str) -> Schema:
        """Return what of a subschema can be enforced."""
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise GrammarRefused("a schema must be an object or a boolean", pointer=pointer)
        kept: dict[str, Any] = {}
        for keyword, value in node.items():
            at = f"{pointer}/{_escape(keyword)}"
            finding, kept_value = self._judge(node, keyword, value, at)
            self._findings.append((_region(at), finding))
            if kept_value is not msgspec.UNSET:
                kept[keyword] = kept_value
        _move_unevaluated(kept)
        _join_patterns(kept)
        return kept

    def reached(self) -> Iterator[Finding]:
        """The findings of what the root uses: a definition that nothing refers to asks for nothing. Where
        parts have ids of their own, pointers are relative to those, and all of it counts as used."""
        if not self._is_one_resource:
            return (finding for _, finding in self._findings)
        seen, todo = {""}, [""]
        while todo:
            for region in self._edges.get(todo.pop(), ()):
                if region not in seen:
                    seen.add(region)
                    todo.append(region)
        return (finding for region, finding in self._findings if region in seen)

    def _judge(self, node: dict[str, Any], keyword: str, value: Any, at: str) -> tuple[Finding, Any]:
        """What becomes of a keyword, and what of its value is compiled (UNSET = nothing)."""

        def said(status: Status, detail: str = "", kept: Any = msgspec.UNSET) -> tuple[Finding, Any]:
            return Finding(at, keyword, status, detail), kept

        if keyword in ("$defs", "definitions"):
            return said("annotation", kept=self._subschemas(keyword, value, at))
        if keyword == "$schema":
            known = isinstance(value, str) and value.removesuffix("#") in DRAFTS
            return said("annotation", kept=value if known else msgspec.UNSET)
        if keyword in ("$id", "id", "$anchor"):
            return said("annotation", kept=value)
        if keyword in ANNOTATIONS:
            return said("annotation")
        if keyword in TYPE_OF and not _concerns(node, TYPE_OF[keyword]):
            return said("annotation", f"`{keyword}` says nothing about the types it stands beside")
        if keyword == "format":
            return self._judge_format(value, said)
        if keyword in REFUSED and value not in NEUTRAL.get(keyword, ()):
            if keyword == "unevaluatedProperties" and not IN_PLACE & node.keys():
                return said("enforced", kept=self._subschemas("additionalProperties", value, at))
            return said("refused", f"`{keyword}` is not enforced")
        if keyword in REFUSED:
            return said("annotation")
        if keyword not in ENFORCED:
            return said("annotation", f"`{keyword}` is no keyword and has no effect")
        if keyword == "multipleOf":
            _check_multiple(value, at)
        if keyword == "enum" and value == []:
            raise GrammarRefused("`enum` is empty: no value is allowed", pointer=at)
        if keyword == "$ref":
            self._follow(value, at)
        return said("enforced", kept=self._subschemas(keyword, value, at))

    def _judge_format(self, value: Any, said: Any) -> tuple[Finding, Any]:
        if value in FORMATS:
            result: tuple[Finding, Any] = said("enforced", kept=value)
        elif value in UNENFORCED_FORMATS:
            result = said("refused", f"the format `{value}` is not enforced")
        else:
            result = said("annotation", f"the format {str(value)[:60]!r} is none of the standard's")
        return result

    def _subschemas(self, keyword: str, value: Any, at: str) -> Any:
        if keyword in NAMED and isinstance(value, dict):
            if len(value) > MAX_PROPERTIES:
                raise GrammarRefused(f"more than {MAX_PROPERTIES} names in one object", pointer=at)
            return {name: self.clean(child, f"{at}/{_escape(name)}") for name, child in value.items()}
        if keyword in MANY and isinstance(value, list):
            return [self.clean(child, f"{at}/{i}") for i, child in enumerate(value)]
        if keyword in ONE:
            return self.clean(value, at)
        return value

    def _follow(self, reference: Any, at: str) -> None:
        if not isinstance(reference, str):
            raise GrammarRefused("`$ref` must be a text", pointer=at)
        base, _, fragment = reference.partition("#")
        if base not in self._ids:
            raise GrammarRefused("`$ref` points outside the schema; nothing is fetched", pointer=at)
        target = fragment if not fragment or fragment.startswith("/") else self._anchors.get(fragment)
        if target is None:
            raise GrammarRefused(f"`$ref` names the anchor {fragment[:60]!r}, which is not there", pointer=at)
        self._edges.setdefault(_region(at), set()).add(_region(target))


def _concerns(node: dict[str, Any], kind: str) -> bool:
    """Whether an instance of that kind can be valid at all as far as `type` goes."""
    types = node.get("type")
    if isinstance(types, str):
        types = [types]
    if not isinstance(types, list):
        return True
    return kind in types or (kind == "number" and "integer" in types)


def _move_unevaluated(kept: dict[str, Any]) -> None:
    """Without neighbours that see the same object, `unevaluatedProperties` is `additionalProperties`."""
    if "unevaluatedProperties" in kept:
        value = kept.pop("unevaluatedProperties")
        kept.setdefault("additionalProperties", value)


def _join_patterns(kept: dict[str, Any]) -> None:
    """Give a property the schemas of the patterns that its name matches, too: the library forgets them."""
    properties, patterns = kept.get("properties"), kept.get("patternProperties")
    if not isinstance(properties, dict) or not isinstance(patterns, dict):
        return
    for pattern, schema in patterns.items():
        try:
            found = re.compile(pattern)
        except re.error:
            continue  # the compiler will say so
        for name in properties:
            if found.search(name):
                properties[name] = {"allOf": [properties[name], schema]}


def _check_multiple(value: Any, at: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise GrammarRefused("`multipleOf` must be a number above 0", pointer=at)
    digits = f"{value:.17g}" if isinstance(value, float) else str(value)
    count = float(repr(value).replace(".", "").partition("e")[0]) if "." in digits else float(value)
    if count > MAX_MULTIPLE or "e" in repr(value):
        raise GrammarRefused(f"`multipleOf` has more than {MAX_MULTIPLE} steps", pointer=at)


def _check_size(schema: Schema) -> None:
    """Count before anything recurses."""
    todo: list[tuple[Any, int]] = [(schema, 0)]
    nodes = 0
    while todo:
        value, depth = todo.pop()
        nodes += 1
        if depth > MAX_DEPTH:
            raise GrammarRefused(f"the schema is nested more than {MAX_DEPTH} deep")
        if nodes + len(todo) > MAX_NODES:
            raise GrammarRefused(f"the schema has more than {MAX_NODES} values")
        if isinstance(value, dict):
            todo += [(child, depth + 1) for child in value.values()]
        elif isinstance(value, list):
            todo += [(child, depth + 1) for child in value]


def _ids(root: Schema) -> Iterator[tuple[str, str]]:
    """Where a part names itself, and how; "" for one that only names an anchor."""
    for value, pointer in _objects(root):
        own = value.get("$id", value.get("id"))
        if isinstance(own, str):
            yield pointer, own.partition("#")[0]


def _anchors(root: Schema) -> dict[str, str]:
    anchors: dict[str, str] = {}
    for value, pointer in _objects(root):
        for name in ("$anchor", "$dynamicAnchor"):
            if isinstance(value.get(name), str):
                anchors[value[name]] = pointer
        own = value.get("$id", value.get("id"))
        if isinstance(own, str) and own.startswith("#"):  # how drafts before 2019 name an anchor
            anchors[own[1:]] = pointer
    return anchors


def _objects(root: Any) -> Iterator[tuple[dict[str, Any], str]]:
    todo: list[tuple[Any, str]] = [(root, "")]
    while todo:
        value, pointer = todo.pop()
        if isinstance(value, dict):
            yield value, pointer
            todo += [(child, f"{pointer}/{_escape(name)}") for name, child in value.items()]
        elif isinstance(value, list):
            todo += [(child, f"{pointer}/{i}") for i, child in enumerate(value)]


_REGION = re.compile(r".*/(?:\$defs|definitions)/[^/]+")


def _region(pointer: str) -> str:
    """The definition that a pointer lies in; "" = the root's own."""
    found = _REGION.match(pointer)
    return found[0] if found else ""


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
