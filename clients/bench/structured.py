"""Structured output: answers that validate, schemas enforced, what compiling, masks and tokens cost."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import uvloop
from cyclopts import Parameter
from rich.console import Console

from ...engine import GenerationRequest, GrammarRefused, SamplingParams
from ...engine.config import EngineConfig
from ...engine.grammar import Grammar, JsonSchema
from ...engine.grammar.compiler import GrammarCompiler
from ...engine.load.sources import DEFAULT_MODEL
from ...server.config import ConfigError
from ..cli import environment
from ..cli.models import find_model
from .report import Report, run_scenario
from .texts import Prompts

if TYPE_CHECKING:
    from ...engine.local import LocalEngine

HOT = 1.5
ASK = "Write one JSON value of this schema:\n{}"
ASK_CHARACTERS = 600
PROMPT_TOKENS = 64
LISTING = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["city", "river", "mountain"]},
            "height": {"type": ["number", "null"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "kind"],
        "additionalProperties": False,
    },
}
"""An answer of it does not end by itself: both sides generate the same number of tokens."""


def structured(
    *,
    cases: Annotated[Path, Parameter(help="JSON lines of {schema, tests: [{valid, data}]}, as MaskBench's.")],
    schemas: Annotated[Path | None, Parameter(help="JSON lines of {schema}; more to compile.")] = None,
    model: str = DEFAULT_MODEL,
    threads: int = 0,
    answers: int = 300,
    max_tokens: int = 256,
    streams: int = 16,
    tokens: int = 128,
    pairs: int = 10,
    json_path: Annotated[Path | None, Parameter("--json", help="Where the JSON goes.")] = None,
) -> None:
    """Measure the engine in this process, without HTTP.

    Parameters
    ----------
    model
        A GGUF file, a Hugging Face folder, or a name of the catalogue.
    threads
        Of the device; 0 = the cores this process may use.
    answers
        Generated at temperature 1.5, each of another schema of `cases` (not strict) and with another seed;
        0 = none.
    max_tokens
        Of each of them.
    streams
        Requests at once.
    tokens
        Of each stream when the cost is measured.
    pairs
        Of runs with a schema and without, each side twice; 0 = none.
    """
    config = EngineConfig(
        model=find_model(model, None, None),
        threads=threads or len(os.sched_getaffinity(0)),
        max_num_seqs=max(streams, 1),
        derived_dir=environment.home() / "derived",
    )
    settings = {
        "model": config.model.name,
        "threads": config.threads,
        "cases": cases.name,
        "temperature": HOT,
        "max_tokens": max_tokens,
        "streams": streams,
        "tokens": tokens,
        "pairs": pairs,
    }
    lines = [json.loads(line) for line in cases.read_text("utf-8").splitlines()]
    more = [] if schemas is None else [json.loads(line) for line in schemas.read_text("utf-8").splitlines()]
    report = Report("structured", settings)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_measure(report, config, lines, more, answers, max_tokens, streams, tokens, pairs))
    report.finish(json_path)


def main(arguments: list[str]) -> None:
    run_scenario(structured, arguments)


async def _measure(
    report: Report,
    config: EngineConfig,
    cases: Sequence[dict[str, Any]],
    more: Sequence[dict[str, Any]],
    answers: int,
    max_tokens: int,
    streams: int,
    tokens: int,
    pairs: int,
) -> None:
    from ...engine.local import LocalEngine

    engine = LocalEngine.load(config)
    await engine.start()
    status = Console(stderr=True).status
    try:
        with status("schemas"):
            _enforcement(report, engine, cases, more)
        if answers:
            with status("answers"):
                await _answers(report, engine, cases, answers, max_tokens, streams)
        if pairs:
            with status("cost"):
                await _cost(report, engine, streams, tokens, pairs)
    finally:
        await engine.close()


# -- what is accepted and what it costs ------------------------------------------------------------------


@dataclass(slots=True)
class _Tally:
    """Of one way to compile."""

    refused: int = 0
    accepted: list[bool] = field(default_factory=list)
    """By valid instance."""
    rejected: list[bool] = field(default_factory=list)
    """By invalid instance."""
    compile_ms: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)


def _enforcement(
    report: Report, engine: LocalEngine, cases: Sequence[dict[str, Any]], more: Sequence[dict[str, Any]]
) -> None:
    tokenizer, info = engine.codec.tokenizer, engine.model
    for strict in (True, False):
        compiler = GrammarCompiler(tokenizer, info.vocab_size, info.eos_token_ids)
        compiler.compile(JsonSchema({}))
        tally = _Tally()
        for case in [*cases, *more]:
            _try_case(tally, compiler, engine, case, strict)
        compiler.close()
        _tell(report, tally, "strict" if strict else "not strict", len(cases) + len(more))


def _try_case(
    tally: _Tally, compiler: GrammarCompiler, engine: LocalEngine, case: dict[str, Any], strict: bool
) -> None:
    started = time.perf_counter()
    try:
        compiled = compiler.compile(JsonSchema(case["schema"], strict))
    except GrammarRefused:
        tally.refused += 1
        return
    finally:
        tally.compile_ms.append(1000 * (time.perf_counter() - started))
    row = np.zeros(-(-engine.model.vocab_size // 32), np.uint32)
    for test in case.get("tests", ()):
        text = json.dumps(test["data"], ensure_ascii=False)
        matcher = compiled.matcher()
        for token in engine.codec.tokenizer.encode(text, add_special=False, parse_special=False):
            started = time.perf_counter()
            matcher.fill(row)
            tally.mask_us.append(1e6 * (time.perf_counter() - started))
            matcher.advance(token)
            if matcher.error is not None:
                break
        if test["valid"]:
            tally.accepted.append(matcher.may_end)
        else:
            tally.rejected.append(not matcher.may_end)


def _tell(report: Report, tally: _Tally, way: str, schemas: int) -> None:
    compile_ms = report.measure("compile, first mask included", way, "ms", tally.compile_ms)
    masks = report.measure("mask", way, "us", tally.mask_us)
    accepted, rejected = 100 * np.mean(tally.accepted), 100 * np.mean(tally.rejected)
    report.bar(f"valid instances accepted, {way}, %", float(accepted), "100", bool(accepted == 100))
    report.bar(f"invalid instances rejected, {way}, %", float(rejected), "98", bool(rejected >= 98))
    report.note(f"{way}: {tally.refused} of {schemas} schemas refused")
    report.bar(f"compile p99, {way}, ms", compile_ms.p99, "under 100", compile_ms.p99 < 100)
    mean = float(np.mean(tally.mask_us))
    report.bar(f"mask mean, {way}, us", mean, "under 60", mean < 60)
    report.bar(f"mask p99, {way}, us", masks.p99, "under 1000", masks.p99 < 1000)


# -- answers that validate -------------------------------------------------------------------------------


async def _answers(
    report: Report,
    engine: LocalEngine,
    cases: Sequence[dict[str, Any]],
    answers: int,
    max_tokens: int,
    streams: int,
) -> None:
    try:
        import jsonschema  # of the development environment: the server itself does not validate
    except ImportError as err:
        raise ConfigError("this benchmark needs jsonschema: pip install 'artesian[bench]'") from err
    wanted = list(itertools.islice(_compilable(engine, cases), answers))
    ends: list[str] = []
    invalid: list[str] = []
    at_once = asyncio.Semaphore(streams)

    async def one(seed: int, name: str, grammar: JsonSchema, examined: Any) -> None:
        async with at_once:
            params = SamplingParams(temperature=HOT, seed=seed, max_tokens=max_tokens)
            prompt = ASK.format(json.dumps(grammar.schema)[:ASK_CHARACTERS])
            end, text = await _generate(engine, f"answer-{seed}", prompt, params, grammar)
        ends.append(end)
        if end == "stop" and not _is_valid(jsonschema, examined, text):
            invalid.append(name)

    await asyncio.gather(*(one(seed, *entry) for seed, entry in enumerate(wanted)))
    stopped = ends.count("stop")
    valid, ended = 100 * (1 - len(invalid) / max(stopped, 1)), 100 * stopped / len(ends)
    report.bar(f"valid among {stopped} answers that end with stop, %", valid, "100", not invalid)
    report.bar(f"of {len(ends)} answers end with stop, %", ended, "95 or more", ended >= 95)
    if invalid:
        report.note(f"invalid answers: {', '.join(sorted(invalid)[:8])}")


def _compilable(
    engine: LocalEngine, cases: Sequence[dict[str, Any]]
) -> Iterator[tuple[str, JsonSchema, Any]]:
    """Each schema with what of it is enforced: an answer is held to that, and the rest is warned of."""
    info = engine.model
    compiler = GrammarCompiler(engine.codec.tokenizer, info.vocab_size, info.eos_token_ids)
    for case in itertools.islice(itertools.cycle(cases), 2 * len(cases)):
        try:
            examined = compiler.schemas.check(case["schema"], False).examined
        except GrammarRefused:
            continue
        coerced = any(finding.status == "approximated" for finding in examined.findings)
        schema = _loosened(examined.schema) if coerced else examined.schema
        yield case.get("name", ""), JsonSchema(case["schema"], strict=False), schema
    compiler.close()


def _loosened(schema: Any) -> Any:
    """With `anyOf` for every `oneOf`: what the answer was told to keep to."""
    if isinstance(schema, list):
        return [_loosened(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    loose = {key: _loosened(value) for key, value in schema.items() if key != "oneOf"}
    if isinstance(schema.get("oneOf"), list):
        any_of = {"anyOf": _loosened(schema["oneOf"])}
        loose = {"allOf": [loose, any_of]} if "anyOf" in loose else {**loose, **any_of}
    return loose


def _is_valid(jsonschema: Any, schema: Any, text: str) -> bool:
    value = json.loads(text)
    return bool(jsonschema.validators.validator_for(schema)(schema).is_valid(value))


async def _generate(
    engine: LocalEngine, name: str, prompt: str, params: SamplingParams, grammar: Grammar | None
) -> tuple[str, str]:
    if grammar is not None:
        await engine.prepare(grammar)
    ids = engine.codec.encode_prompt(prompt)
    texts, end = [], ""
    async for step in engine.submit(GenerationRequest(id=name, prompt=ids, params=params, grammar=grammar)):
        for delta in step:
            if delta.error is not None:
                return f"error: {delta.error}", ""
            texts.append(delta.text)
            end = delta.finish_reason or end
    return end, "".join(texts)


# -- what a token costs ----------------------------------------------------------------------------------

THERE_AND_BACK = (0, 1, 1, 0)


async def _cost(report: Report, engine: LocalEngine, streams: int, tokens: int, pairs: int) -> None:
    """A pair is four runs, the sides there and back, so that what drifts meets both alike."""
    prompts = Prompts(engine.codec.tokenizer)
    sides: list[tuple[str, Grammar | None]] = [("json_schema", JsonSchema(LISTING)), ("free text", None)]
    totals: list[list[float]] = [[], []]
    loops: list[list[float]] = [[], []]
    for pair in range(pairs + 1):
        spent = np.zeros((2, 2))
        for index in THERE_AND_BACK:
            index ^= pair % 2
            texts = [prompts.take(PROMPT_TOKENS) for _ in range(streams)]  # none is in the cache
            spent[index] += await _cpu_ms(engine, texts, tokens, sides[index][1])
        for index in (0, 1) if pair else ():  # the first pair warms up
            totals[index].append(float(spent[index, 0]) / 2)
            loops[index].append(float(spent[index, 1]) / 2)
    for (name, _), total, loop in zip(sides, totals, loops, strict=True):
        report.measure("CPU per token", name, "ms", total)
        report.measure("of it on the event loop's thread", name, "ms", loop)
    ratio = report.ratio("CPU per token", *(name for name, _ in sides))
    report.bar("CPU per token, json_schema over free text", ratio.median, "under 1.05", ratio.median < 1.05)
    all_of = sum(totals[0]) / sum(totals[1])
    more_ms = float(np.mean(loops[0]) - np.mean(loops[1]))
    report.note(
        f"over all pairs the ratio is {all_of:.3f}; the loop's thread takes {more_ms:.3f} ms more per token"
    )


async def _cpu_ms(
    engine: LocalEngine, texts: Sequence[str], tokens: int, grammar: Grammar | None
) -> tuple[float, float]:
    """CPU milliseconds per token of a run: of this process, and of this thread, which is the loop's."""
    started, loop_started, stamp = time.process_time(), time.thread_time(), time.perf_counter()
    jobs = [
        _generate(
            engine,
            f"cost-{stamp}-{row}",
            text,
            SamplingParams(max_tokens=tokens, temperature=1.0, seed=row, ignore_eos=True),
            grammar,
        )
        for row, text in enumerate(texts)
    ]
    ends = [end for end, _ in await asyncio.gather(*jobs)]
    if ends != ["length"] * len(texts):
        raise AssertionError(f"answers ended early: {ends}")
    per_token_ms = 1000 / (len(texts) * tokens)
    return (
        per_token_ms * (time.process_time() - started),
        per_token_ms * (time.thread_time() - loop_started),
    )
