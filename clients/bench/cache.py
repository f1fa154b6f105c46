"""The disk cache: first token after kill -9, restore rate, index, hit rates of traces, and what it costs."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ...engine.load.sources import DEFAULT_MODEL
from ...server.config import ConfigError
from ..cli.models import find_model
from .agents import agents_hit_rates, agents_throughput
from .cache_cost import cost
from .cache_disk import index_of_a_million, restore
from .cache_restart import first_token_after_restart
from .replay import replay_blocks
from .report import Report, run_scenario
from .traces import MOONCAKE_BLOCK, lru_hit_rate, read_mooncake, unique_blocks

PARTS = (
    "ttft", "restore", "index", "mooncake", "agents", "throughput", "lookups", "idle", "writes",
)  # fmt: skip


def cache(
    *,
    model: str = DEFAULT_MODEL,
    only: str = "",
    traces: Path | None = None,
    runs: int = 5,
    pairs: int = 20,
    threads: int = 0,
    scratch: Path | None = None,
    json: Annotated[Path | None, Parameter(help="Where the JSON goes.")] = None,
) -> None:
    """Measure the disk cache against its bars.

    Parameters
    ----------
    model
        A GGUF file, a Hugging Face folder, or a name of the catalogue.
    only
        Parts to run, separated by commas: ttft, restore, index, mooncake, agents, throughput, lookups, idle,
        writes.
    traces
        Folder with Mooncake's conversation_trace.jsonl and synthetic_trace.jsonl; none = left out.
    runs
        Repetitions of what is timed.
    pairs
        Alternating pairs of the cost measurements.
    threads
        Of the device; 0 = the cores this process may use.
    scratch
        Where caches are made: on the disk that is to be measured.
    """
    began = time.perf_counter()
    wanted = only.split(",") if only else list(PARTS)
    if unknown := set(wanted) - set(PARTS):
        raise ConfigError(f"--only: no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    path = find_model(model, None, None)
    threads = threads or len(os.sched_getaffinity(0))
    report = Report("cache", {"model": path.name, "threads": threads, "runs": runs, "pairs": pairs})
    with tempfile.TemporaryDirectory(dir=scratch, prefix="artesian-bench-") as name:
        folder = Path(name)
        if "ttft" in wanted:
            first_token_after_restart(report, path, threads, folder / "ttft", runs)
        if "restore" in wanted:
            restore(report, folder / "restore", runs)
        if "index" in wanted:
            index_of_a_million(report, folder / "index", runs)
        if "mooncake" in wanted and traces is not None:
            _mooncake(report, traces, folder)
        if "agents" in wanted:
            agents_hit_rates(report, folder)
        if "throughput" in wanted:
            agents_throughput(report, path, threads, folder / "throughput")
        for part in ("lookups", "idle", "writes"):
            if part in wanted:
                cost(report, part, path, threads, folder, pairs)
    report.note(f"all of it took {time.perf_counter() - began:.0f} s")
    report.finish(json)


def _mooncake(report: Report, traces: Path, folder: Path) -> None:
    """Mooncake's traces through the store: without a limit, and with a budget for a part of their blocks."""
    for name in ("conversation", "synthetic"):
        requests = read_mooncake(traces / f"{name}_trace.jsonl")
        unique = unique_blocks(requests)
        for percent, limit in ((100, 0.005), (50, 0.02), (25, 0.02), (10, 0.02)):
            capacity = unique * percent // 100
            possible = lru_hit_rate(requests, capacity)
            with tempfile.TemporaryDirectory(dir=folder) as directory:
                began = time.perf_counter()
                outcome = replay_blocks(
                    Path(directory),
                    requests,
                    block_tokens=MOONCAKE_BLOCK,
                    capacity=None if percent == 100 else capacity,
                )
                seconds = time.perf_counter() - began
            report.measure(f"{name}, hit rate", f"store, {percent} %", "", [outcome.hit_rate])
            report.measure(f"{name}, hit rate", f"possible with {percent} % of the blocks", "", [possible])
            short = possible - outcome.hit_rate
            report.bar(
                f"{name} at {percent} %: {outcome.hit_rate:.4f} of {possible:.4f}, short by", short,
                f"at most {limit}", short <= limit,
            )  # fmt: skip
            same = lru_hit_rate(requests, outcome.kept)
            report.measure(f"{name}, hit rate", f"LRU with as many blocks, {percent} %", "", [same])
            report.note(f"{name} at {percent} %: {outcome.told}, {seconds:.0f} s")


def main(arguments: list[str]) -> None:
    """Entry of `artesian bench cache`."""
    run_scenario(cache, arguments)
