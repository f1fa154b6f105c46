"""What the disk cache costs, in turns with none: processor time per token, and times between tokens.

Processor time of the whole process is what counts, and on a shared machine it varies more than the bar
allows: the same computation takes a third more while a neighbour uses the caches. So the threads that do
not compute are measured by themselves too, which resolves to a thousandth; what computing pays for a fuller
cache is not in that.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .load import Target
from .machine import cpu_seconds, thread_seconds
from .report import Report
from .servers import Child, artesian_command, child
from .summary import Summary, alternating, pair_ratios
from .texts import Prompts, model_codec

Part = Literal["lookups", "idle", "writes"]
WITH, WITHOUT = "disk cache", "none"
SETTLE_S = 0.6
"""After each load, for what is written behind it: gathered for at most 0.25 s."""
RESAMPLED = 2000


@dataclass(frozen=True, slots=True)
class _Load:
    """One side's share of a pair."""

    title: str
    streams: int
    prompt_tokens: int
    max_tokens: int
    limit: float
    fields: dict[str, Any]

    @property
    def tokens(self) -> int:
        return self.streams * (self.prompt_tokens + self.max_tokens)


LOADS: dict[Part, _Load] = {
    "lookups": _Load(
        "CPU per token, nothing hits, nothing written", 4, 512, 8, 1.02,
        {"prompt_cache_retention": "in_memory"},
    ),
    "idle": _Load("CPU per token, nothing hits", 4, 512, 8, 1.02, {}),
    "writes": _Load("CPU per token, decoding", 16, 24, 160, 1.03, {}),
}  # fmt: skip


SERVED = "served"


@dataclass(frozen=True, slots=True)
class _Asking(Target):
    """A target whose requests carry more fields."""

    fields: dict[str, Any]

    def body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        return Target.body(self, prompt, max_tokens) | self.fields


def cost(report: Report, part: Part, model: Path, threads: int, folder: Path, pairs: int) -> None:
    """Load a server with the disk cache and one without in turns, with prompts that nobody has seen.

    lookups: kept in memory only, so what remains is looking below the device in vain.
    idle: as by default, so that all prompts are written too.
    writes: sixteen streams that decode.
    """
    load, prompts = LOADS[part], Prompts(model_codec(model).tokenizer)
    flags = ("--no-access-log", "--kv-cache-memory-bytes", "512MiB", "--served-model-name", SERVED)
    costs: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    beside: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    gaps: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    with (
        child(artesian_command(model, threads, *flags, cache_dir=folder / part)) as one,
        child(artesian_command(model, threads, *flags)) as other,
    ):
        sides = [(WITH, one), (WITHOUT, other)]
        for _, server in sides:
            server.wait_until_ok("/ready")
            _run(server, load, threads, prompts)
        for pair in alternating(pairs):
            for side in pair:
                subject, server = sides[side]
                spent = _run(server, load, threads, prompts)
                costs[subject].append(1000 * spent.seconds)
                beside[subject].append(1000 * spent.beside)
                gaps[subject].append(1000 * spent.slowest)
    _compare(report, load.title, "ms", costs, load.limit)
    _compare_threads(report, load, beside, statistics.median(costs[WITHOUT]))
    if part == "writes":
        _compare(report, "p99 time between tokens", "ms", gaps, None)


@dataclass(frozen=True, slots=True)
class _Spent:
    seconds: float
    """Processor time per token."""
    beside: float
    """Of it, that of threads that do not compute."""
    slowest: float
    """The 99th percentile of the times between tokens."""


def _run(server: Child, load: _Load, threads: int, prompts: Prompts) -> _Spent:
    """Load the server once. The device has `threads` threads: those that are busiest."""
    pid = server.process.pid
    texts = [prompts.take(load.prompt_tokens) for _ in range(load.streams)]
    target = _Asking("server", server.url, SERVED, load.fields)
    before, of_each = cpu_seconds(pid), thread_seconds(pid)
    answers, _ = asyncio.run(target.streams(texts, load.max_tokens))
    time.sleep(SETTLE_S)
    seconds = cpu_seconds(pid) - before
    each = sorted(spent - of_each.get(thread, 0.0) for thread, spent in thread_seconds(pid).items())
    gaps = [
        b - a for answer in answers for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)
    ]  # fmt: skip
    return _Spent(seconds / load.tokens, sum(each[:-threads]) / load.tokens, Summary.of(gaps).p99)


def _compare(
    report: Report, name: str, unit: str, samples: dict[str, list[float]], limit: float | None
) -> None:
    """One row for each side and a bar on their ratio; without a limit the ratio may not lie above 1 for
    sure."""
    for subject, values in samples.items():
        report.measure(name, subject, unit, values)
    ratio = report.ratio(name, WITH, WITHOUT)
    low, high = bootstrap(pair_ratios(samples[WITH], samples[WITHOUT]))
    told = f"{name}: with / without (95 % of bootstrapped medians: {low:.3f} to {high:.3f})"
    if limit is None:
        report.bar(told, ratio.median, "within noise: the interval reaches 1", low <= 1)
    else:
        report.bar(told, ratio.median, f"at most {limit}", ratio.median <= limit)


def _compare_threads(report: Report, load: _Load, beside: dict[str, list[float]], total: float) -> None:
    """What the threads that do not compute need more with the cache than without, over the whole without."""
    name = f"{load.title}, threads beside the device's"
    medians = [report.measure(name, subject, "ms", values).median for subject, values in beside.items()]
    share = 1 + (medians[0] - medians[1]) / total
    report.bar(f"{name}: more with it, over all without", share, f"at most {load.limit}", share <= load.limit)


def bootstrap(ratios: Sequence[float]) -> tuple[float, float]:
    """The middle 95 % of the medians of resampled pairs."""
    chance = random.Random(1)
    medians = sorted(
        statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLED)
    )  # fmt: skip
    return medians[RESAMPLED // 40], medians[-RESAMPLED // 40 - 1]
