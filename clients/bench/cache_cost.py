"""What the disk cache costs, in turns with none: processor time per token, and times between tokens."""

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
from .machine import cpu_seconds
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
    gaps: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    with (
        child(artesian_command(model, threads, *flags, cache_dir=folder / part)) as one,
        child(artesian_command(model, threads, *flags)) as other,
    ):
        sides = [(WITH, one), (WITHOUT, other)]
        for _, server in sides:
            server.wait_until_ok("/ready")
            _run(server, load, prompts)
        for pair in alternating(pairs):
            for side in pair:
                subject, server = sides[side]
                seconds, slowest = _run(server, load, prompts)
                costs[subject].append(1000 * seconds)
                gaps[subject].append(1000 * slowest)
    _compare(report, load.title, "ms", costs, load.limit)
    if part == "writes":
        _compare(report, "p99 time between tokens", "ms", gaps, None)


def _run(server: Child, load: _Load, prompts: Prompts) -> tuple[float, float]:
    """CPU-seconds per token of the server, and the 99th percentile of the times between tokens."""
    pid = server.process.pid
    texts = [prompts.take(load.prompt_tokens) for _ in range(load.streams)]
    target = _Asking("server", server.url, SERVED, load.fields)
    before = cpu_seconds(pid)
    answers, _ = asyncio.run(target.streams(texts, load.max_tokens))
    time.sleep(SETTLE_S)
    seconds = cpu_seconds(pid) - before
    gaps = [
        b - a for answer in answers for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)
    ]  # fmt: skip
    return seconds / load.tokens, Summary.of(gaps).p99


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


def bootstrap(ratios: Sequence[float]) -> tuple[float, float]:
    """The middle 95 % of the medians of resampled pairs."""
    chance = random.Random(1)
    medians = sorted(
        statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLED)
    )  # fmt: skip
    return medians[RESAMPLED // 40], medians[-RESAMPLED // 40 - 1]
