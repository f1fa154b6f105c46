"""What of a schema is enforced: corner by corner, in both directions, and never in silence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from scripted_engine import IM_END, VOCAB_SIZE, toy_codec

from artesian.engine import GrammarRefused
from artesian.engine.grammar import JsonSchema
from artesian.engine.grammar.compiler import GrammarCompiler
from artesian.engine.grammar.schema import ANNOTATIONS, ENFORCED, FORMATS, REFUSED, examine


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(toy_codec().tokenizer, VOCAB_SIZE, (IM_END,))
    yield compiler
    compiler.close()


def accepts(compiler: GrammarCompiler, schema: Any, text: str) -> bool:
    matcher = compiler.get(JsonSchema(schema)).matcher()
    for token in text.encode():
        matcher.advance(token)
    return matcher.may_end


TREE = {
    "$ref": "#/$defs/n",
    "$defs": {
        "n": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "c": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
            "required": ["v"],
            "additionalProperties": False,
        }
    },
}
AB = {"a": {"type": "string"}, "b": {"type": "string"}}

CORNERS: list[tuple[Any, list[str], list[str]]] = [
    (
        {"type": "integer"},
        ["1", "0", "-3", "1000000000000000000000000000000"],
        ["1.5", "1.", "01", "true", "-"],
    ),
    (
        {"type": "number"},
        ["1.0", "1e2", "-0", "1E-7", "1000000000000000000000000000000"],
        ["1.", ".5", "NaN", "+1"],
    ),
    ({"type": "number", "multipleOf": 0.25}, ["0.75", "3", "-0.50"], ["0.3", "-0.3"]),
    ({"type": "number", "multipleOf": 2}, ["4", "-4", "0"], ["3", "-3"]),
    ({"type": "integer", "multipleOf": 7}, ["21", "0", "-14"], ["22"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 2}, ["0.1", "2"], ["0", "2.01", "-1"]),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2024-13-01"', '"x"']),
    ({"type": "string", "format": "email"}, ['"a@b.de"'], ['"a"']),
    ({"type": "string", "format": "uuid"}, ['"01234567-89ab-cdef-0123-456789abcdef"'], ['"0123"']),
    ({"type": "array", "minItems": 2, "maxItems": 3}, ["[1,2]", "[1,2,3]"], ["[1]", "[1,2,3,4]", "[]"]),
    ({}, ["1", "null", '"a"', "[]", "{}"], ["", "nul"]),
    (True, ["1", "{}"], ["undefined"]),
    ({"type": ["string", "null"]}, ["null", '"a"'], ["1"]),
    ({"const": None}, ["null"], ["0"]),
    ({"const": {"a": [1, None]}}, ['{"a": [1, null]}', '{"a":[1,null]}'], ['{"a": [1]}']),
    ({"enum": ["sì", 2, {"b": 1}]}, ['"sì"', "2", '{"b":1}'], ['"si"', '"s\\u00ec"', "3"]),
    ({"type": "object", "required": ["x"]}, ['{"x": 1}', '{"x": 1, "y": 2}'], ["{}", '{"y": 1}']),
    (
        {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"required": ["a"]}], "type": "object"},
        ['{"a": 1}'],
        ["{}", '{"a": "1"}'],
    ),
    (
        {
            "type": "object",
            "properties": AB,
            "additionalProperties": False,
            "anyOf": [{"required": [n]} for n in AB],
        },
        ['{"a": "1"}', '{"b": "1"}', '{"a": "1", "b": "2"}'],
        ["{}", '{"c": 1}', '{"a": "1", "c": 1}'],
    ),
    (
        {
            "type": "object",
            "properties": {"xy": {"maximum": 9}},
            "patternProperties": {"^x": {"type": "integer"}},
        },
        ['{"xy": 1}', '{"xy": 1, "xz": 2}', '{"a": "free"}'],
        ['{"xy": "s"}', '{"xy": 10}', '{"xz": "s"}'],
    ),
    (
        {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
        ['{"a": 1}', "{}"],
        ['{"b": 1}'],
    ),
    (TREE, ['{"v": 1, "c": [{"v": 2, "c": []}]}'], ['{"v": 1, "c": [{}]}', '{"c": []}']),
    ({"type": "string", "maxLength": 2}, ['"日本"', '""', '"\\n\\""'], ['"日本語"']),
    ({"type": "string", "pattern": "b+"}, ['"abbc"'], ['"ac"']),
    (
        {"type": "string", "minLength": 1, "pattern": "^[a-c]*$", "maxLength": 2},
        ['"a"', '"ab"'],
        ['""', '"abc"', '"d"'],
    ),
    ({"type": "integer", "format": "int32", "uniqueItems": True, "minLength": 3}, ["1"], ['"1"']),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"a"'], ["null"]),
    (
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "null"}},
        ["[1,null]"],
        ['["a"]', "[1,2]"],
    ),
    ({"type": "object", "title": "t", "x-order": 1, "default": {}, "examples": [1]}, ["{}"], ["[]"]),
]  # fmt: skip


@pytest.mark.parametrize("corner", CORNERS, ids=lambda corner: json.dumps(corner[0])[:60])
def test_corner_is_enforced_both_ways(
    compiler: GrammarCompiler, corner: tuple[Any, list[str], list[str]]
) -> None:
    schema, good, bad = corner
    for text in good:
        jsonschema.validate(json.loads(text), schema)
        assert accepts(compiler, schema, text), text
    for text in bad:
        assert not accepts(compiler, schema, text), text


@pytest.mark.parametrize(
    ("multiple", "good", "other"),
    [
        (2, ["4"], ["4.0", "4e0"]),
        (0.25, ["0.50", "3", "3.00"], ["0.5", "3.0"]),
        (0.1, ["3", "3.0"], ["3.00"]),
    ],
)
def test_every_multiple_can_be_written_but_not_in_every_way(
    compiler: GrammarCompiler, multiple: float, good: list[str], other: list[str]
) -> None:
    schema = {"type": "number", "multipleOf": multiple}
    assert [text for text in good if not accepts(compiler, schema, text)] == []
    assert [text for text in other if accepts(compiler, schema, text)] == []


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"enum": []}, "/enum"),
        ({"properties": {"a/b~": {"type": "array", "uniqueItems": True}}}, "/properties/a~1b~0/uniqueItems"),
        ({"items": {"not": {"type": "null"}}}, "/items/not"),
        ({"if": {"type": "null"}, "then": {"type": "null"}}, "/if"),
        ({"items": {"$ref": "https://example.com/x"}}, "/items/$ref"),
        ({"$ref": "#/$defs/none"}, ""),
        ({"$ref": "#none"}, "/$ref"),
        ({"properties": {"a": {"type": "strin"}}}, "/properties/a"),
        ({"properties": {"a": {"pattern": "(?=a)"}}}, "/properties/a"),
        ({"properties": {"a": 1}}, "/properties/a"),
        (
            {"items": {"minimum": 5, "maximum": 3, "type": "integer"}, "minItems": 1, "type": "array"},
            "/items",
        ),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, ""),
        ({"type": "string", "format": "uri-template"}, "/format"),
        ({"multipleOf": 999_983, "type": "integer"}, "/multipleOf"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"contains": {}}}}, "/$defs/a/contains"),
        ({"oneOf": [{"required": ["k"]}, {"required": ["b"]}]}, ""),
        ({"patternProperties": {"^a": {}, "b$": {}}, "additionalProperties": False}, ""),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(
    compiler: GrammarCompiler, schema: dict[str, Any], pointer: str
) -> None:
    with pytest.raises(GrammarRefused) as refused:
        compiler.get(JsonSchema(schema))
    assert refused.value.pointer == pointer


@pytest.mark.parametrize(
    ("schema", "warning"),
    [
        ({"type": "array", "uniqueItems": True}, "/uniqueItems: `uniqueItems` is not enforced"),
        ({"minimun": 3}, "/minimun: `minimun` is no keyword and has no effect"),
        (
            {"type": "object", "oneOf": [{"required": ["k"]}, {"required": ["b"]}]},
            "/oneOf: `oneOf` is taken for `anyOf`",
        ),
    ],
)
def test_what_is_not_strict_is_followed_as_far_as_it_goes(
    compiler: GrammarCompiler, schema: dict[str, Any], warning: str
) -> None:
    warnings = compiler.get(JsonSchema(schema, strict=False)).warnings
    assert [text.startswith(warning) for text in warnings] == [True]


def test_one_of_taken_for_any_of_still_binds(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "oneOf": [{"required": ["k"]}, {"required": ["b"]}]}
    matcher = compiler.get(JsonSchema(schema, strict=False)).matcher()
    for token in b'{"c": 1':
        matcher.advance(token)
    assert matcher.accepted(list(b"}")) == 0


def test_definition_that_nothing_uses_asks_for_nothing() -> None:
    schema = {"$defs": {"a": {"not": {}}, "b": {"$ref": "#/$defs/a"}}, "type": "null"}
    assert not examine(schema).having("refused")
    assert examine({**schema, "items": {"$ref": "#/$defs/b"}, "type": "array"}).having("refused")


def test_schema_cannot_loosen_itself_by_the_librarys_own_keyword(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "x-guidance": {"lenient": True, "whitespace_pattern": "[ ]+"}}
    assert not accepts(compiler, schema, "{" + " " * 99 + "}")


VALUES: list[Any] = [True, False, 1, 2, "a", "null", ["a"], ["null"], [{}], [{"type": "null"}]]
VALUES += [{}, {"a": {}}, {"a": {"type": "null"}}, {"type": "null"}]
TEXTS = [
    "null",
    "1",
    "0",
    "5",
    '"a"',
    '"ab"',
    '""',
    '"c"',
    "[1]",
    "[1,2,3]",
    "[]",
    "{}",
    '{"a": 1}',
    '{"b": 1}',
]
TEXTS += ['{"a": 1, "b": 2}']
BESIDE: dict[str, dict[str, Any]] = {
    "additionalItems": {"items": [{}], "$schema": "http://json-schema.org/draft-07/schema#"}
}


@pytest.mark.parametrize("keyword", sorted(ENFORCED - {"$ref", "format"}))
def test_enforced_keyword_changes_what_is_accepted(compiler: GrammarCompiler, keyword: str) -> None:
    def verdicts(schema: dict[str, Any]) -> list[bool] | None:
        try:
            return [accepts(compiler, schema, text) for text in TEXTS]
        except GrammarRefused:
            return None

    base = BESIDE.get(keyword, {})
    without = verdicts(base)
    assert any(verdicts({**base, keyword: value}) not in (None, without) for value in VALUES)


def test_lists_of_keywords_do_not_overlap() -> None:
    assert not ENFORCED & REFUSED
    assert not ANNOTATIONS & REFUSED
    assert not ENFORCED & ANNOTATIONS


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_format_binds(compiler: GrammarCompiler, name: str) -> None:
    assert not accepts(compiler, {"type": "string", "format": name}, '"not at all"')


SUITE = Path(__file__).resolve().parents[4] / "shared/data/schemas/json-schema-test-suite-2020-12"


@pytest.mark.skipif(not SUITE.is_dir(), reason="the JSON Schema test suite is not beside this checkout")
def test_no_invalid_instance_of_the_standards_own_suite_is_accepted(compiler: GrammarCompiler) -> None:
    accepted, tried, refused = [], 0, 0
    for file in sorted(SUITE.glob("*.json")):
        for group in json.loads(file.read_text()):
            try:
                compiler.get(JsonSchema(group["schema"]))
            except GrammarRefused:
                refused += 1
                continue
            invalid = [test for test in group["tests"] if not test["valid"]]
            tried += len(invalid)
            for test in invalid:
                if accepts(compiler, group["schema"], json.dumps(test["data"])):
                    accepted.append((file.name, group["description"], test["description"]))
    assert not accepted
    assert tried > 250 and refused < 200
