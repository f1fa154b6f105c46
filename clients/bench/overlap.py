"""The overlapped engine loop against the serial one: idle gaps of the device, tokens/s, event-loop lag."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import uvloop
from cyclopts import Parameter
from rich.console import Console

from ...engine import GenerationRequest, SamplingParams
from ...engine.config import EngineConfig
from ...engine.load.sources import DEFAULT_MODEL
from ..cli import environment
from ..cli.models import find_model
from .report import Report, run_scenario
from .summary import alternating
from .texts import Prompts, model_codec

if TYPE_CHECKING:
    from ...engine.local import LocalEngine

PROMPT_TOKENS = 64
TICK_S = 0.005
MODES: tuple[Literal["overlap"], Literal["serial"]] = ("overlap", "serial")


@dataclass(slots=True)
class _Run:
    """One batch of sequences on one engine."""

    tokens: list[list[int]]
    tokens_per_s: float
    busy: float
    """Share of the time in which the device ran a step."""
    queued: float
    """Share of the steps that were queued before the one before them had ended."""
    gap: float
    """Share of the device's time from the first step to the last that the gaps between queued steps take."""
    gaps_us: list[float]
    """Of the device, before the steps that were queued."""
    lags_ms: list[float]


def overlap(
    *,
    model: str = DEFAULT_MODEL,
    backend: Literal["auto", "cpu", "reference"] = "auto",
    threads: int = 0,
    sequences: tuple[int, ...] = (1, 4, 16),
    tokens: int = 128,
    pairs: int = 5,
    json: Annotated[Path | None, Parameter(help="Where the JSON goes.")] = None,
) -> None:
    """Compare the two loops of the engine in this process, without HTTP, in turns, on the same prompts.

    Parameters
    ----------
    model
        A GGUF file, a Hugging Face folder, or a name of the catalogue.
    threads
        Of the device; 0 = the cores this process may use.
    sequences
        Sequences at once, one measure for each number.
    tokens
        Generated for each sequence, greedy; the prompts have 64.
    pairs
        Alternating pairs for each number of sequences.
    """
    path = find_model(model, None, None)
    threads = threads or len(os.sched_getaffinity(0))
    settings = {
        "model": path.name,
        "backend": backend,
        "threads": threads,
        "prompt_tokens": PROMPT_TOKENS,
        "tokens": tokens,
        "sequences": list(sequences),
        "pairs": pairs,
        "ticker_ms": 1000 * TICK_S,
        "warm-up": "one run of each loop per number of sequences",
    }
    configs = [
        EngineConfig(
            model=path,
            backend=backend,
            threads=threads,
            loop=mode,
            derived_dir=environment.home() / "derived",
        )
        for mode in MODES
    ]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_compare(Report("overlap", settings), configs, sequences, tokens, pairs, json))


def main(arguments: list[str]) -> None:
    run_scenario(overlap, arguments)


async def _compare(
    report: Report,
    configs: Sequence[EngineConfig],
    sequences: Sequence[int],
    tokens: int,
    pairs: int,
    json: Path | None,
) -> None:
    from ...engine.local import LocalEngine

    prompts = Prompts(model_codec(configs[0].model).tokenizer)
    engines = [LocalEngine.load(config) for config in configs]
    try:
        for engine in engines:
            await engine.start()
        report.result.settings["backend"] = engines[0].model.backend
        for count in sequences:
            with Console(stderr=True).status(f"{count} sequences"):
                await _measure(report, engines, prompts, count, tokens, pairs)
    finally:
        for engine in engines:
            await engine.close()
    report.finish(json)


async def _measure(
    report: Report, engines: list[LocalEngine], prompts: Prompts, count: int, tokens: int, pairs: int
) -> None:
    runs: list[list[_Run]] = [[], []]
    for order in [(0, 1), *alternating(pairs)]:
        texts = [prompts.take(PROMPT_TOKENS) for _ in range(count)]
        for index in order:
            runs[index].append(await _run(engines[index], texts, tokens))
        if runs[0][-1].tokens != runs[1][-1].tokens:
            raise AssertionError(f"the loops' tokens differ with {count} sequences")
    case = f"{count} sequences"
    for mode, (_, *kept) in zip(MODES, runs, strict=True):  # the first run of each warms up
        report.measure(f"tokens, {case}", mode, "tokens/s", [run.tokens_per_s for run in kept])
        report.measure(f"device busy, {case}", mode, "%", [100 * run.busy for run in kept])
        report.measure(f"event-loop lag, {case}", mode, "ms", [lag for run in kept for lag in run.lags_ms])
        if gaps := [gap for run in kept for gap in run.gaps_us]:
            report.measure(f"device gap before a queued step, {case}", mode, "us", gaps)
            report.measure(
                f"gaps' share of the step time, {case}", mode, "%", [100 * run.gap for run in kept]
            )
            report.measure(f"steps queued in time, {case}", mode, "%", [100 * run.queued for run in kept])
    report.ratio(f"tokens, {case}", *MODES)


async def _run(engine: LocalEngine, texts: Sequence[str], tokens: int) -> _Run:
    """Generate for all texts at once, with a ticker beside it."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    encode = engine.codec.encode_prompt
    stats = engine.step_stats
    steps, device_s = stats.steps, stats.device_s
    stats.idle_s.clear()
    lags: list[float] = []
    ticker = asyncio.create_task(_tick(lags))
    started = time.perf_counter()
    requests = [
        GenerationRequest(id=f"{started}-{row}", prompt=encode(text), params=params)
        for row, text in enumerate(texts)
    ]
    found = await asyncio.gather(*(_tokens(engine, request) for request in requests))
    seconds = time.perf_counter() - started
    ticker.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await ticker
    ran, device_s, idle_s = stats.steps - steps, stats.device_s - device_s, sum(stats.idle_s)
    return _Run(
        tokens=found,
        tokens_per_s=sum(map(len, found)) / seconds,
        busy=device_s / seconds,
        gap=idle_s / (idle_s + device_s),
        queued=len(stats.idle_s) / ran,
        gaps_us=[1e6 * idle for idle in stats.idle_s],
        lags_ms=[1000 * lag for lag in lags],
    )


async def _tokens(engine: LocalEngine, request: GenerationRequest) -> list[int]:
    found: list[int] = []
    async for step in engine.submit(request):
        for delta in step:
            if delta.error is not None:
                raise RuntimeError(delta.error)
            found += delta.token_ids
    return found


async def _tick(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + TICK_S
        await asyncio.sleep(TICK_S)
        lags.append(max(0.0, time.perf_counter() - due))
