"""What compiles and what is refused, on a byte-level vocabulary: every text is a run of its tokens."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_engine import IM_END, IM_START, VOCAB_SIZE, toy_codec

from artesian.engine import EngineOverloaded, GrammarRefused
from artesian.engine.grammar import Choice, Grammar, JsonSchema, Lark, Regex, Tag, Tags
from artesian.engine.grammar.check import MAX_WHITESPACE
from artesian.engine.grammar.compiler import MAX_WAITING, GrammarCompiler

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(toy_codec().tokenizer, VOCAB_SIZE, (IM_END,))
    yield compiler
    compiler.close()


def accepts(compiler: GrammarCompiler, grammar: Grammar, text: str | list[int]) -> bool:
    """Whether the text is a whole answer."""
    matcher = compiler.get(grammar).matcher()
    for token in text.encode() if isinstance(text, str) else text:
        matcher.advance(token)
    return matcher.may_end


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Regex(r"\d{3}-[a-z]+"), "123-ab", "12-ab"),
        (Regex(r"^a+$"), "aa", "ab"),
        (Choice(("yes", "no", "yes indeed")), "yes indeed", "yes ind"),
        (Choice(('a "quoted" one', "", "ö\n")), "ö\n", "o"),
        (Lark('start: "a" B "c"\nB: /b+/'), "abbc", "ac"),
        (Lark('root ::= "a" [b-c]+'), "abcb", "ad"),
        (JsonSchema(PERSON), '{"name": "Jürgen 👩‍👧", "age": 3}', '{"name": "x", "age": "3"}'),
        (JsonSchema(True), "[1, null]", "[1, nul]"),
        (JsonSchema({"type": "object"}), '{"a": {}}', "[]"),
    ],
)
def test_whole_answer_is_a_sentence_of_the_grammar(
    compiler: GrammarCompiler, grammar: Grammar, good: str, bad: str
) -> None:
    assert accepts(compiler, grammar, good)
    assert not accepts(compiler, grammar, bad)


def test_answer_is_complete_at_the_closing_brace(compiler: GrammarCompiler) -> None:
    matcher = compiler.get(JsonSchema(PERSON)).matcher()
    text = '{"name":"a","age":1}'
    for token in text.encode():
        assert not matcher.is_complete
        matcher.advance(token)
    assert matcher.is_complete


@pytest.mark.parametrize("grammar", [JsonSchema(PERSON), JsonSchema({"type": "object"})])
def test_whitespace_in_a_row_is_bounded(compiler: GrammarCompiler, grammar: JsonSchema) -> None:
    def text(spaces: int) -> str:
        return "{" + "\n" * spaces + '"name": "a",' + " " * spaces + '"age": 1' + "\t" * spaces + "}"

    assert accepts(compiler, grammar, text(MAX_WHITESPACE))
    assert not accepts(compiler, grammar, text(MAX_WHITESPACE + 1))
    assert not accepts(compiler, grammar, " " + text(1))


def test_special_tokens_never_match_as_text(compiler: GrammarCompiler) -> None:
    inside = [*b'{"name": "', IM_START, *b'", "age": 1}']
    assert not accepts(compiler, JsonSchema(PERSON), inside)
    assert accepts(compiler, JsonSchema(PERSON), '{"name": "<|im_start|>", "age": 1}')


def test_lone_surrogates_cannot_be_written(compiler: GrammarCompiler) -> None:
    assert not accepts(compiler, JsonSchema({"type": "string"}), r'"\ud800"')


@pytest.mark.parametrize("pattern", ["[", "(?<=x)*", "(" * 500 + ")" * 500, r"\bfoo", "(?=a)b", "a{2,1}"])
def test_bad_regexes_are_refused(compiler: GrammarCompiler, pattern: str) -> None:
    with pytest.raises(GrammarRefused, match="regex"):
        compiler.get(Regex(pattern))


@pytest.mark.parametrize(
    "grammar",
    [Lark("start: ("), Lark("start: unknown"), Lark(""), Choice(()), Choice(("",)), JsonSchema(False)],
)
def test_bad_grammars_are_refused(compiler: GrammarCompiler, grammar: Grammar) -> None:
    with pytest.raises(GrammarRefused):
        compiler.get(grammar)


def any_of(depth: int, keyword: str) -> dict[str, Any]:
    if not depth:
        return {"type": "string"}
    return {
        keyword: [
            any_of(depth - 1, keyword),
            {"type": "object", "properties": {"a": any_of(depth - 1, keyword)}},
        ]
    }


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return schema


BOMBS: dict[str, Grammar] = {
    "oneOf nested 12 times": JsonSchema(any_of(12, "oneOf")),
    "anyOf nested 14 times": JsonSchema(any_of(14, "anyOf")),
    "5,000 properties": JsonSchema({"properties": {f"p{i}": {"type": "string"} for i in range(5000)}}),
    "300 objects deep": JsonSchema(nested(300)),
    "a product of choices": JsonSchema(
        {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(20)]}
    ),
    "a large prime": JsonSchema({"type": "integer", "multipleOf": 999_983}),
    "choices": Choice(tuple(f"text {i}" for i in range(20_000))),
    "a long pattern": Regex("a" * 600_000),
}
MILD: dict[str, Grammar] = {
    "a pattern that needs many states": Regex("[ab]*a[ab]{13}"),
    "the same in a schema": JsonSchema({"type": "string", "pattern": "^[ab]*a[ab]{13}$"}),
    "repeats of repeats": Regex("(a{1,1000}){1,1000}"),
    "100,000 items": JsonSchema({"type": "array", "minItems": 100_000, "items": {"type": "integer"}}),
}


@pytest.mark.parametrize("bomb", BOMBS)
async def test_bomb_is_refused_while_the_loop_goes_on(compiler: GrammarCompiler, bomb: str) -> None:
    gaps: list[float] = []

    async def tick() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    ticking = asyncio.ensure_future(tick())
    started = time.monotonic()
    with pytest.raises(GrammarRefused):
        await compiler.prepare(BOMBS[bomb])
    ticking.cancel()
    assert time.monotonic() - started < 5
    assert max(gaps, default=0) < 1  # a busy machine; alone it is below 0.05 s


@pytest.mark.parametrize("name", MILD)
async def test_what_only_looks_like_a_bomb_is_followed(compiler: GrammarCompiler, name: str) -> None:
    compiled = await compiler.prepare(MILD[name])
    assert compiled.matcher().error is None


async def test_equal_grammars_are_compiled_once(compiler: GrammarCompiler) -> None:
    first, second = await asyncio.gather(*[compiler.prepare(Regex("once[0-9]")) for _ in range(2)])
    assert first is second is compiler.get(Regex("once[0-9]"))


async def test_too_many_waiting_compilations_are_refused(compiler: GrammarCompiler) -> None:
    await compiler.prepare(Regex("warm"))
    asked = [compiler.prepare(Regex(f"[ab]{{{i + 1}}}")) for i in range(MAX_WAITING + 5)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(result, EngineOverloaded) for result in results) == 5


# -- forms in free text --------------------------------------------------------------------------------

NONE = {"type": "object", "properties": {}, "additionalProperties": False}
CALL = '<tool>{"name": "f", "arguments": {"name": "a", "age": 1}}</tool>'
OTHER = '<tool>{"name": "g", "arguments": {}}</tool>'


def tags(**options: Any) -> Tags:
    return Tags(
        tags=(
            Tag('<tool>{"name": "f", "arguments": ', PERSON, "}</tool>"),
            Tag('<tool>{"name": "g", "arguments": ', NONE, "}</tool>"),
        ),
        triggers=("<tool>",),
        **options,
    )


@pytest.mark.parametrize(
    "text", ["hello\n", "a <tool", CALL, f"I call {CALL} and {OTHER}.", CALL + OTHER, "a < b", "</tool>"]
)
def test_free_text_and_forms_may_alternate(compiler: GrammarCompiler, text: str) -> None:
    assert accepts(compiler, tags(), text)


@pytest.mark.parametrize(
    "text", ["a <tool>", "<tool> ", '<tool>{"name": "h"', CALL[:-1], CALL.replace("1", '"1"')]
)
def test_what_a_trigger_opens_must_be_a_form(compiler: GrammarCompiler, text: str) -> None:
    assert not accepts(compiler, tags(), text)


def test_required_form_leaves_no_free_text(compiler: GrammarCompiler) -> None:
    required = tags(required=True, between="\n")
    assert accepts(compiler, required, f"{CALL}\n{OTHER}")
    assert not accepts(compiler, required, f" {CALL}")
    assert not accepts(compiler, required, CALL + OTHER)
    assert not accepts(compiler, required, "")


def test_without_parallel_one_form_is_all(compiler: GrammarCompiler) -> None:
    assert accepts(compiler, tags(parallel=False), f"I call {CALL} now")
    assert not accepts(compiler, tags(parallel=False), CALL + OTHER)
    matcher = compiler.get(tags(parallel=False, required=True)).matcher()
    for token in CALL.encode():
        matcher.advance(token)
    assert matcher.is_complete


def test_special_token_in_a_form_is_that_token(compiler: GrammarCompiler) -> None:
    form = Tags(tags=(Tag("<|im_start|>f ", NONE, ""),), triggers=("<|im_start|>",))
    assert accepts(compiler, form, [*b"a", IM_START, *b"f {}", *b" b", IM_START, *b"f {}"])
    assert not accepts(compiler, form, [*b"a", IM_START, *b"g"])
    assert accepts(compiler, form, "a <|im_start|>g")


def test_free_text_may_hold_special_tokens_that_open_nothing(compiler: GrammarCompiler) -> None:
    text = [IM_START, *b"a", IM_START, IM_START, *CALL.encode(), *b"b", IM_START]
    assert accepts(compiler, tags(), text)
    assert not accepts(compiler, tags(), [*text, *b"<tool>x"])


def test_refused_schema_says_which_form_has_it(compiler: GrammarCompiler) -> None:
    bad = Tags(tags=(Tag("<a>", NONE, ""), Tag("<b>", {"uniqueItems": True}, "")), triggers=("<",))
    with pytest.raises(GrammarRefused) as refused:
        compiler.get(bad)
    assert (refused.value.tag, refused.value.pointer) == (1, "/uniqueItems")


def test_tag_without_a_trigger_is_a_mistake(compiler: GrammarCompiler) -> None:
    with pytest.raises(ValueError, match="triggers"):
        compiler.get(Tags(tags=(Tag("<a>", NONE, ""),), triggers=("[",)))


# -- following -----------------------------------------------------------------------------------------


def test_draft_is_counted_and_rolled_back(compiler: GrammarCompiler) -> None:
    matcher = compiler.get(Regex("abc[0-9]")).matcher()
    assert matcher.accepted(list(b"abx")) == 2
    for token in b"abc7":
        matcher.advance(token)
    assert matcher.is_complete
    matcher.rollback(2)
    assert not matcher.is_complete
    assert matcher.accepted(list(b"c1")) == 2


def test_wrong_token_is_an_error_of_that_matcher_alone(compiler: GrammarCompiler) -> None:
    compiled = compiler.get(Regex("abc"))
    broken, whole = compiled.matcher(), compiled.matcher()
    broken.advance(ord("x"))
    assert broken.error is not None
    assert "\n" not in broken.error
    whole.advance(ord("a"))
    assert whole.error is None
