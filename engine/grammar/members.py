"""A call's arguments where each stands by itself: what a schema says of them, and that as grammar rules.

A string stands as it is, so nothing of its schema but a list of its texts can be enforced. Members come in
the schema's order, and only those that it names, if it names any.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..codec.tools import MemberForms
from .spec import Schema
from .terms import Terms

MAX_REFERENCES = 8
"""One behind another."""
_WHOLE = "_whole"
_ON_STRINGS = frozenset({"pattern", "format", "minLength", "maxLength"})
_ON_THE_WHOLE = frozenset(
    "anyOf oneOf allOf not if patternProperties propertyNames minProperties maxProperties dependentRequired "
    "dependentSchemas".split()
)


class Member(NamedTuple):
    """One argument."""

    name: str
    is_required: bool
    texts: tuple[str, ...] | None
    """The strings it may be; empty: any, None: none."""
    schema: Schema | None
    """What it may be else, by itself; None: nothing."""


class Members(NamedTuple):
    """An object."""

    named: tuple[Member, ...]
    """None at all: whatever the model writes, unless there may be none."""
    may_have_any: bool
    loose: tuple[str, ...]
    """Pointers to what is not enforced."""


def read_members(schema: Schema) -> Members:
    """What an object's schema says of its members; the schema must be one that the library takes."""
    root: dict[str, Any] = schema if isinstance(schema, dict) else {}
    whole = _resolved(root, root)
    whole = whole if isinstance(whole, dict) else {}
    properties: dict[str, Any] = {
        **{name: True for name in whole.get("required", ())},
        **whole.get("properties", {}),
    }
    order = dict.fromkeys([*whole.get("properties", {}), *properties])
    required = set(whole.get("required", ()))
    split = [Member(name, name in required, *_split(properties[name], root)) for name in order]
    named = tuple(
        one._replace(schema=_by_itself(one.schema, root))
        for one in split
        if one.is_required or one.schema is not False or one.texts is not None
    )
    loose = [f"/{keyword}" for keyword in whole if keyword in _ON_THE_WHOLE]
    for name, given in properties.items():
        inner = _resolved(given, root)
        if isinstance(inner, dict) and "enum" not in inner and "const" not in inner:
            loose += [f"/properties/{name}/{keyword}" for keyword in inner if keyword in _ON_STRINGS]
    may_have_any = not split and whole.get("additionalProperties") is not False
    return Members(named, may_have_any, tuple(loose))


def _split(
    given: Schema, root: dict[str, Any], depth: int = 0
) -> tuple[tuple[str, ...] | None, Schema | None]:
    """The strings a schema allows, and a schema of what else it does."""
    schema = _resolved(given, root)
    if schema is False:
        return None, False
    if not isinstance(schema, dict):
        return (), True
    if "const" in schema:
        schema = {**schema, "enum": [schema["const"]]}
    if isinstance(schema.get("enum"), list):
        texts = tuple(one for one in schema["enum"] if isinstance(one, str))
        rest = [one for one in schema["enum"] if not isinstance(one, str)]
        return texts or None, {"enum": rest} if rest else None
    kinds = schema.get("type")
    if kinds == "string":
        return (), None
    if isinstance(kinds, list):
        others = [kind for kind in kinds if kind != "string"]
        return () if "string" in kinds else None, {**schema, "type": others} if others else None
    if kinds is not None:
        return None, schema
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list) and depth < MAX_REFERENCES:
            return _of_either([_split(one, root, depth + 1) for one in schema[keyword]])
    return (), schema


def _of_either(
    parts: list[tuple[tuple[str, ...] | None, Schema | None]],
) -> tuple[tuple[str, ...] | None, Schema | None]:
    texts = [texts for texts, _ in parts if texts is not None]
    rest = [schema for _, schema in parts if schema is not None]
    joined = tuple(dict.fromkeys(text for one in texts for text in one)) if all(texts) else ()
    if not texts and not rest:
        return None, False
    return joined if texts else None, {"anyOf": rest} if rest else None


def _by_itself(schema: Schema | None, root: dict[str, Any]) -> Schema | None:
    """A part of a document with the whole in its definitions, where its references lead."""
    if not isinstance(schema, dict) or "$ref" not in str(schema):
        return schema
    whole = {key: value for key, value in root.items() if key != "$id"}
    named = {"$schema": root["$schema"]} if "$schema" in root else {}
    return {**named, **_moved(schema), "$defs": {_WHOLE: _moved(whole)}}


def _moved(part: Any) -> Any:
    if isinstance(part, list):
        return [_moved(one) for one in part]
    if not isinstance(part, dict):
        return part
    moved = {key: _moved(value) for key, value in part.items()}
    reference = part.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = f"#/$defs/{_WHOLE}{reference[1:]}"
    return moved


def _resolved(schema: Schema, root: dict[str, Any]) -> Schema:
    """Behind references within the document; one that leads nowhere is left for the library to refuse."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found: Any = root
        for step in reference[2:].split("/"):
            key = step.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, dict) else None
        if not isinstance(found, dict | bool):
            break
        schema = found
    return schema


def member_rules(number: int, members: Members, forms: MemberForms, terms: Terms) -> Iterator[str]:
    """The rule `members_{number}`. It needs `@json_{number}_{j}` for the JSON of member j, and `any_text` up
    to the forms' end."""
    rule = f"members_{number}"
    if members.may_have_any:
        yield f"{rule}: {rule}_0* | {terms.of(forms.none)}"
        before, _, behind = forms.begin.partition("{name}")
        as_text, as_json = (terms.of(behind.format(is_string=kind)) for kind in ("true", "false"))
        value = f"{as_text} any_text | {as_json} @json_{number}_0 {terms.of(forms.end)}"
        yield f'{rule}_0: {terms.of(before)} /[^"<>\\n]+/ ({value})'
        return
    shown = [f"{rule}_{j}{'' if one.is_required else '?'}" for j, one in enumerate(members.named)]
    is_free = not any(one.is_required for one in members.named)
    yield f"{rule}: {' '.join(shown)}{f' | {terms.of(forms.none)}' if is_free else ''}"
    for j, one in enumerate(members.named):
        yield f"{rule}_{j}: {' | '.join(_ways(f'@json_{number}_{j}', one, forms, terms))}"


def _ways(json_rule: str, member: Member, forms: MemberForms, terms: Terms) -> Iterator[str]:
    as_text = forms.begin_of(member.name, is_string=True)
    for text in member.texts or ():
        yield terms.of(f"{as_text}{text}{forms.end}")
    if member.texts == ():
        yield f"{terms.of(as_text)} any_text"
    if member.schema is not None:
        yield f"{terms.of(forms.begin_of(member.name, is_string=False))} {json_rule} {terms.of(forms.end)}"
