"""Answers that follow a grammar, through the whole engine, on a device that checks its KV entries."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import pytest
from fake_engine import Result, fake_runtime, read, running_engine

from artesian.engine import GenerationRequest, GrammarRefused, SamplingParams
from artesian.engine.grammar import Choice, Grammar, JsonSchema, Regex, Tag, Tags
from artesian.engine.grammar.mask import Matcher
from artesian.engine.local import LocalEngine

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"enum": [1, None, "ö"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


async def answer(
    engine: LocalEngine, grammar: Grammar | None, prompt: list[int] | None = None, **params: Any
) -> Result:
    prompt = [7, 8, 9] if prompt is None else prompt
    if grammar is not None:
        await engine.prepare(grammar)
    request = GenerationRequest(
        id=f"r{id(params)}", prompt=prompt, params=SamplingParams(**params), grammar=grammar
    )
    return await read(engine, request)


@pytest.mark.parametrize("loop", ["overlap", "serial"])
async def test_every_choice_follows_the_schema_and_ends_by_itself(loop: str) -> None:
    async with running_engine(loop=loop) as engine:
        result = await answer(engine, JsonSchema(SCHEMA), n=3)
    assert set(result.finish.values()) == {"stop"}
    for text in result.text.values():
        assert set(json.loads(text)) == {"a", "b"}


async def test_both_loops_and_any_neighbours_give_the_same_answer() -> None:
    async def run(loop: str) -> list[str]:
        async with running_engine(fake_runtime(blocks=30), loop=loop) as engine:
            grammars = [
                JsonSchema(SCHEMA),
                None,
                Regex("[a-f]{3,9}"),
                Choice(("yes", "no")),
                JsonSchema(SCHEMA),
            ]
            jobs = [answer(engine, g, [5 + i] * (3 + i), max_tokens=40) for i, g in enumerate(grammars)]
            return [result.text[0] for result in await asyncio.gather(*jobs)]

    overlap = await run("overlap")
    assert overlap == await run("serial")
    async with running_engine(loop="serial") as engine:
        alone = await answer(engine, JsonSchema(SCHEMA), [9] * 7, max_tokens=40)
    assert overlap[4] == alone.text[0]


async def test_preempted_sequence_goes_on_in_its_grammar() -> None:
    grammar = Regex("[a-z]{60}")
    async with running_engine(fake_runtime(blocks=24, slots=4, caching=False)) as engine:
        jobs = [answer(engine, grammar, [10 + i] * 8, max_tokens=70) for i in range(4)]
        results = await asyncio.gather(*jobs)
        assert engine.status().preemptions > 0
    assert {len(result.text[0]) for result in results} == {60}


async def test_token_limit_cuts_what_cannot_be_closed() -> None:
    async with running_engine() as engine:
        result = await answer(engine, Regex("[a-z]{60}"), max_tokens=10)
    assert result.finish[0] == "length"


async def test_stop_string_ends_an_answer_that_goes_on() -> None:
    async with running_engine() as engine:
        result = await answer(engine, Regex("abcd+"), stop=("cd",))
    assert (result.text[0], result.finish[0]) == ("ab", "stop")


async def test_whole_answer_ends_even_below_min_tokens() -> None:
    async with running_engine() as engine:
        result = await answer(engine, Choice(("yes",)), min_tokens=20)
    assert (result.text[0], result.finish[0]) == ("yes", "stop")


async def test_logprobs_come_with_every_token() -> None:
    async with running_engine() as engine:
        result = await answer(engine, Choice(("yes",)), logprobs=0)
    assert sum(len(delta.logprobs or ()) for delta in result.deltas) == len(result.tokens[0])


async def test_refused_grammar_leaves_the_engine_well() -> None:
    async with running_engine() as engine:
        with pytest.raises(GrammarRefused):
            await engine.prepare(Regex("["))
        request = GenerationRequest(id="a", prompt=[1, 2], params=SamplingParams(), grammar=Regex("["))
        with pytest.raises(GrammarRefused):
            engine.submit(request)
        assert (await answer(engine, Choice(("yes",)))).text[0] == "yes"


async def test_unprepared_grammar_is_compiled_at_submission() -> None:
    async with running_engine() as engine:
        request = GenerationRequest(id="a", prompt=[1, 2], params=SamplingParams(), grammar=Choice(("no",)))
        assert (await read(engine, request)).text[0] == "no"


async def test_matcher_that_fails_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Matcher.advance

    def fails(matcher: Matcher, token: int) -> None:
        advance(matcher, token)
        if token == bad:
            matcher.error = "the lexer is too complex"

    async with running_engine() as engine:
        bad = engine.codec.tokenizer.encode("Q", add_special=False)[0]
        monkeypatch.setattr(Matcher, "advance", fails)
        broken, whole = await asyncio.gather(
            answer(engine, Choice(("abQd",))), answer(engine, Choice(("abcd",)), max_tokens=9)
        )
    assert broken.finish[0] == "error"
    assert "too complex" in str(broken.deltas[-1].error)
    assert whole.text[0] == "abcd"


async def test_allowed_tokens_that_the_grammar_forbids_end_the_request_with_the_reason() -> None:
    async with running_engine() as engine:
        result = await answer(engine, Regex("[0-9]{9}"), allowed_token_ids=(70, 71))
    assert result.finish[0] == "error"
    assert "allowed_token_ids" in str(result.deltas[-1].error)


async def test_failed_step_and_abort_leave_no_device_waiting_for_a_mask() -> None:
    async with running_engine() as engine:
        requests = [
            GenerationRequest(id=f"r{i}", prompt=[7, 8], params=SamplingParams(), grammar=Regex("[a-z]{80}"))
            for i in range(2)
        ]
        failing = engine.submit(requests[0])
        await anext(failing)
        engine.runtime.executor.fail_next = RuntimeError("boom")  # type: ignore[attr-defined]
        ends = [delta.finish_reason async for deltas in failing for delta in deltas]
        aborted = engine.submit(requests[1])
        await anext(aborted)
        await aborted.aclose()
        assert (await answer(engine, Choice(("yes",)))).text[0] == "yes"
    assert ends[-1] == "error"


# -- near the token limit ------------------------------------------------------------------------------

NESTED = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "list": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer"}}}},
    },
    "required": ["text", "list"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("max_tokens", range(24, 84, 7))
@pytest.mark.parametrize(
    "schema", [{"type": "object"}, NESTED, {"type": "integer"}, {"items": {"type": "string", "minLength": 3}}]
)
async def test_json_is_closed_before_the_limit(schema: dict[str, Any], max_tokens: int) -> None:
    async with running_engine(fake_runtime(max_len=120)) as engine:
        result = await answer(engine, JsonSchema(schema), [max_tokens] * 5, n=2, max_tokens=max_tokens)
    for index, text in result.text.items():
        jsonschema.validate(json.loads(text), schema)
        assert result.finish[index] == "stop"


async def test_free_text_is_cut_at_the_limit_and_not_ended() -> None:
    form = Tags(tags=(Tag("<a>", {"type": "object"}, "</a>"),), triggers=("<a>",))
    async with running_engine() as engine:
        result = await answer(engine, form, max_tokens=20, ignore_eos=True)
    assert result.finish[0] == "length"


@pytest.mark.parametrize("max_tokens", range(45, 110, 7))
async def test_no_further_form_is_begun_that_would_not_come_to_its_end(max_tokens: int) -> None:
    begin = "<a-call-of-a-tool>"
    form = Tags(tags=(Tag(begin, {"const": 1}, "</a>"),), triggers=("<",), required=True, between="\n")
    async with running_engine(fake_runtime(max_len=130)) as engine:
        result = await answer(engine, form, [max_tokens] * 5, n=3, max_tokens=max_tokens)
    for index, text in result.text.items():
        assert result.finish[index] == "stop"
        assert re.fullmatch(rf"{begin}1</a>(\n{begin}1</a>)*", text)
