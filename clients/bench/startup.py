"""From the start of `artesian serve` to its first answers, and the memory it takes, idle and loaded."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import uvloop
from cyclopts import Parameter
from rich.console import Console

from ...cache.config import CacheConfig
from ...engine.load.sources import DEFAULT_MODEL
from ..cli.models import find_model
from .load import Target
from .machine import peak_rss_bytes
from .report import Report, run_scenario
from .servers import artesian_command, child
from .texts import Prompts, model_codec

STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 512, 128
READY_BAR_S = 1.5
RSS_BAR = 2.5
MIB = 1 << 20


@dataclass(slots=True)
class _Start:
    """One start; seconds since the process was started, and bytes."""

    health: float
    ready: float
    token: float
    rss_idle: int
    rss_loaded: int


def startup(
    *,
    model: str = DEFAULT_MODEL,
    runs: int = 7,
    threads: int = 0,
    json: Annotated[Path | None, Parameter(help="Where the JSON goes.")] = None,
) -> None:
    """Start the server again and again, with its file in the page cache.

    Parameters
    ----------
    model
        A GGUF file, a Hugging Face folder, or a name of the catalogue.
    runs
        Starts; one more before them warms the disk.
    threads
        Of the device; 0 = the cores this process may use.
    """
    path = find_model(model, None, None)
    threads = threads or len(os.sched_getaffinity(0))
    budget = CacheConfig().kv_cache_memory_bytes
    size = sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size
    settings = {
        "model": path.name,
        "threads": threads,
        "runs": runs,
        "warm-up": "one start",
        "load": {"streams": STREAMS, "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS},
        "file_bytes": size,
        "kv_cache_memory_bytes": budget,
    }
    report = Report("startup", settings)
    prompts = Prompts(model_codec(path).tokenizer)
    with Console(stderr=True).status("starting, again and again"):
        starts = [_start(path, threads, prompts) for _ in range(runs + 1)][1:]
    subject = "artesian serve"
    report.measure("start to /health", subject, "s", [s.health for s in starts])
    ready = report.measure("start to /ready", subject, "s", [s.ready for s in starts]).median
    report.measure("start to first token", subject, "s", [s.token for s in starts])
    report.measure("peak memory, one token", subject, "MiB", [s.rss_idle / MIB for s in starts])
    report.measure("peak memory, loaded", subject, "MiB", [s.rss_loaded / MIB for s in starts])
    report.bar("start to ready, s", ready, f"< {READY_BAR_S:g}", ready < READY_BAR_S)
    limit = (RSS_BAR * size + budget) / MIB
    peak = max(s.rss_loaded for s in starts) / MIB
    report.bar(
        "peak memory, loaded, MiB", peak, f"< {limit:.0f}: {RSS_BAR:g} x file + KV budget", peak < limit
    )
    report.finish(json)


def main(arguments: list[str]) -> None:
    run_scenario(startup, arguments)


def _start(path: Path, threads: int, prompts: Prompts) -> _Start:
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with child(artesian_command(path, threads)) as server, runner as loop:
        health = server.wait_until_ok("/health") - server.started
        ready = server.wait_until_ok("/ready") - server.started
        target = Target.find("artesian", server.url)
        first = loop.run(target.stream("The well is", 1))
        token = first.arrivals[0] - server.started
        idle = peak_rss_bytes(server.process.pid)
        texts = [prompts.take(PROMPT_TOKENS) for _ in range(STREAMS)]
        loop.run(target.streams(texts, OUTPUT_TOKENS))
        return _Start(health, ready, token, idle, peak_rss_bytes(server.process.pid))
