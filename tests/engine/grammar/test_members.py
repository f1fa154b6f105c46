"""Calls whose arguments stand by themselves, held to their schemas, on byte-level vocabularies: one has a
special token for the mark of DSML, one has not."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from artesian.engine import GrammarRefused
from artesian.engine.codec import Codec
from artesian.engine.codec.segments import CallArguments, CallBegin
from artesian.engine.codec.tools import TOOL_DIALECTS, CallForms
from artesian.engine.codec.tools.dsml import MARK, DsmlParser
from artesian.engine.grammar import Tag, Tags
from artesian.engine.grammar.compiler import GrammarCompiler

V4, V41 = (
    next(row.forms for row in TOOL_DIALECTS if name in row.names and row.forms)
    for name in ("deepseek_v4", "deepseek_v41")
)
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}},
        "unit": {"enum": ["C", "F", None]},
        "exact": {"type": ["boolean", "string"]},
        "where": {"anyOf": [{"type": "string", "enum": ["in", "out"]}, {"type": "integer"}]},
    },
    "required": ["city", "unit"],
    "$defs": {"day": {"type": "integer", "minimum": 1, "maximum": 7}},
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
OPTIONAL = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "string"}}}
ANYTHING: dict[str, Any] = {"type": "object"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": WEATHER, "now": NOTHING, "maybe": OPTIONAL, "any": ANYTHING
}  # fmt: skip


def codec(*, has_mark: bool) -> Codec:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    hf = tokenizers.Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(alphabet)}, merges=[]))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hf.decoder = decoders.ByteLevel()
    names = ["<eos>", "<think>", MARK] if has_mark else ["<eos>", "<think>"]
    hf.add_special_tokens([*names])
    return Codec.build(
        hf,
        bos_token_id=None,
        eos_token_ids=(256,),
        add_bos=False,
        add_eos=False,
        special_ids=range(256, 256 + len(names)),
        chat_template=None,
    )


class Model:
    """A vocabulary and what it is held by."""

    def __init__(self, *, has_mark: bool) -> None:
        self.tokenizer = codec(has_mark=has_mark).tokenizer
        self.compiler = GrammarCompiler(self.tokenizer, self.tokenizer.vocab_size, (256,))

    def accepts(self, tags: Tags, text: str) -> bool:
        matcher = self.compiler.get(tags).matcher()
        for token in self.tokenizer.encode(text, add_special=False):
            matcher.advance(token)
        return matcher.may_end

    def answer(self, tags: Tags, seed: int, most: int) -> str:
        """What a model without sense writes: any token that may come, ends of things more often."""
        choose = random.Random(seed)
        matcher = self.compiler.get(tags).matcher()
        row = np.zeros(-(-self.tokenizer.vocab_size // 32), np.uint32)
        tokens: list[int] = []
        likely = [*self.tokenizer.encode(f'</{MARK}>]"', add_special=False)]
        while not matcher.is_complete and len(tokens) < most:
            matcher.fill(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            few = [token for token in likely if token in allowed]
            token = int(choose.choice(few if few and choose.random() < 0.7 else [*allowed]))
            if token == 256:
                break
            matcher.advance(token)
            assert matcher.error is None
            tokens.append(token)
        return self.tokenizer.decode(tokens, skip_special=False)


@pytest.fixture(scope="module", params=[True, False], ids=["special", "text"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    model = Model(has_mark=request.param)
    yield model
    model.compiler.close()


def tags(forms: CallForms, *names: str, strict: bool = False, **options: Any) -> Tags:
    held = tuple(
        Tag(forms.begin_of(name), SCHEMAS[name], forms.end, strict, forms.members)
        for name in names or SCHEMAS
    )
    return Tags(held, (forms.trigger,), opening=forms.opening, closing=forms.closing, **options)


def call(forms: CallForms, name: str, *arguments: tuple[str, bool, str]) -> str:
    assert forms.members is not None
    written = "".join(
        forms.members.begin_of(key, is_string=is_string) + value + forms.members.end
        for key, is_string, value in arguments
    )
    return forms.begin_of(name) + (written or forms.members.none) + forms.end


def row(forms: CallForms, *calls: str) -> str:
    return forms.opening + "".join(calls) + forms.closing


C = ("unit", True, "C")
GOOD = [
    [("weather", [("city", True, "Köln </div> <b"), C])],
    [
        (
            "weather",
            [("city", True, ""), ("days", False, "[1, 7]"), ("unit", False, "null"), ("exact", True, "no")],
        )
    ],
    [("weather", [("city", True, "x"), C, ("exact", False, "true"), ("where", True, "in")])],
    [("weather", [("city", True, "x"), C, ("where", False, "3")])],
    [("now", []), ("maybe", []), ("maybe", [("b", True, "\n")]), ("any", [])],
    [("any", [("x y", True, "1"), ("z", False, '{"a": []}'), ("x y", False, "1")])],
]
BAD = [
    [("weather", [("city", True, "x")])],
    [("weather", [C, ("city", True, "x")])],
    [("weather", [("city", False, '"x"'), C])],
    [("weather", [("city", True, "x"), ("unit", True, "K")])],
    [("weather", [("city", True, "x"), ("days", False, "[8]"), C])],
    [("weather", [("city", True, "x"), C, ("where", True, "up")])],
    [("weather", [("city", True, "x"), C, ("other", True, "1")])],
    [("now", [("x", True, "1")])],
    [("maybe", [("a", False, "x")])],
    [("any", [("x", False, "1,")])],
    [("unknown", [])],
]


@pytest.mark.parametrize("forms", [V4, V41])
@pytest.mark.parametrize("calls", GOOD)
def test_calls_of_the_schemas_are_possible(model: Model, forms: CallForms, calls: list[Any]) -> None:
    text = row(forms, *(call(forms, name, *arguments) for name, arguments in calls))
    assert model.accepts(tags(forms, required=True), text)
    assert model.accepts(tags(forms), f"Let me < see{text}")


@pytest.mark.parametrize("forms", [V4, V41])
@pytest.mark.parametrize("calls", BAD)
def test_other_calls_are_not(model: Model, forms: CallForms, calls: list[Any]) -> None:
    text = row(forms, *(call(forms, name, *arguments) for name, arguments in calls))
    assert not model.accepts(tags(forms, required=True), text)
    assert not model.accepts(tags(forms), text)


def test_free_text_may_do_without_calls(model: Model) -> None:
    for text in ("", "hello\n", "a < b </", "<think>", "<｜ calls>"):
        assert model.accepts(tags(V41), text)
        assert not model.accepts(tags(V41, required=True), text)


def test_a_block_that_is_opened_is_closed_and_is_the_only_one(model: Model) -> None:
    text = row(V41, call(V41, "now"))
    assert model.accepts(tags(V41), f"{text}\nDone.")
    for broken in (text[:-1], V41.opening, row(V41), text + text):
        assert not model.accepts(tags(V41), broken)


def test_without_parallel_there_is_one_call(model: Model) -> None:
    one, two = row(V4, call(V4, "now")), row(V4, call(V4, "now"), call(V4, "now"))
    for required in (True, False):
        assert model.accepts(tags(V4, required=required, parallel=False), one)
        assert not model.accepts(tags(V4, required=required, parallel=False), two)


@pytest.mark.parametrize("forms", [V4, V41])
def test_whatever_is_written_parses_and_validates(model: Model, forms: CallForms) -> None:
    whole = 0
    for seed in range(40):
        text = model.answer(tags(forms, required=True, parallel=False), seed, 600)
        if not text.endswith(forms.closing):
            continue  # it was cut
        parser = DsmlParser(SCHEMAS)
        segments = parser.feed(text) + parser.finish()
        begun = [segment for segment in segments if isinstance(segment, CallBegin)]
        arguments = "".join(segment.text for segment in segments if isinstance(segment, CallArguments))
        assert len(begun) == 1
        jsonschema.validate(json.loads(arguments), SCHEMAS[begun[0].name])
        whole += 1
    assert whole > 10


def test_references_lead_where_they_led_in_the_whole_schema(model: Model) -> None:
    tree = {
        "type": "object",
        "properties": {"leaf": {"type": "boolean"}, "below": {"type": "array", "items": {"$ref": "#"}}},
        "additionalProperties": False,
    }
    held = tags(V4, "any")
    held = msgspec.structs.replace(held, tags=(msgspec.structs.replace(held.tags[0], schema=tree),))
    for value, is_good in (
        ('[{"leaf": true, "below": []}]', True),
        ("[[]]", False),
        ('[{"below": [1]}]', False),
    ):
        assert model.accepts(held, row(V4, call(V4, "any", ("below", False, value)))) is is_good


def test_a_reference_to_itself_comes_to_an_end(model: Model) -> None:
    schema = {
        "properties": {"a": {"$ref": "#/$defs/a"}},
        "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}},
    }
    held = Tags(
        (Tag(V4.begin_of("f"), schema, V4.end, False, V4.members),),
        (V4.trigger,),
        opening=V4.opening,
        closing=V4.closing,
    )
    assert model.accepts(held, row(V4, call(V4, "f", ("a", False, "null"))))


@pytest.mark.parametrize(
    "schema",
    [{"required": True}, {"properties": []}, {"properties": {"a": {"anyOf": [1]}}}, {"enum": []}, False],
)
def test_a_schema_that_is_wrong_is_refused(model: Model, schema: Any) -> None:
    tag = Tag(V4.begin_of("f"), schema, V4.end, False, V4.members)
    with pytest.raises(GrammarRefused):
        model.compiler.get(Tags((tag,), (V4.trigger,), opening=V4.opening, closing=V4.closing))


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "/properties/a/pattern"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "/properties/a/uniqueItems"),
        ({"anyOf": [{"required": ["a"]}], "properties": {"a": {}}}, "/anyOf"),
    ],
)
def test_what_cannot_be_enforced_refuses_a_strict_tool_and_is_told_of_others(
    model: Model, schema: dict[str, Any], pointer: str
) -> None:
    def held(strict: bool) -> Tags:
        tag = Tag(V4.begin_of("f"), {"type": "object", **schema}, V4.end, strict, V4.members)
        return Tags((tag,), (V4.trigger,), opening=V4.opening, closing=V4.closing)

    with pytest.raises(GrammarRefused) as refused:
        model.compiler.get(held(True))
    assert (refused.value.tag, refused.value.pointer) == (0, pointer)
    assert any(pointer in warning for warning in model.compiler.get(held(False)).warnings)
