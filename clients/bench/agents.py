"""Agents' multi-turn tool loops over the disk cache: hit rate over three days, and prefill throughput."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import uvloop
from cyclopts import Parameter

from ...cache.config import CacheConfig
from ...engine import GenerationRequest, SamplingParams
from ...engine.config import EngineConfig
from ...engine.load.sources import DEFAULT_MODEL
from ..cli import environment
from ..cli.models import find_model
from .replay import replay_agents
from .report import Report, run_scenario
from .traces import (
    AgentRequest,
    AgentShape,
    AgentTrace,
    agent_blocks,
    agent_ideal,
    agent_trace,
    lru_hit_rate,
    tail_gain,
    ttl_hit_rate,
    unique_blocks,
)

SCALE = 28.0
"""Of the simulated three days: the longest session then fits the default model's 8,192 tokens."""
BLOCK = 64
RESTARTS = 6
TTLS = {"5 minutes": 300.0, "1 hour": 3600.0, "24 hours": 86400.0, "72 hours": 259200.0}
VOCAB = 49_000
REAL_SESSIONS, REAL_TURNS, REAL_TOKENS = 8, 6, 3000
"""Of the real run: as many agents, their turns that are counted, and the longest of their prompts."""
KV_BYTES = 256 << 20
"""Of the real run: less than its sessions hold, so that a part of their prefixes comes from disk."""
ALL_KV_BYTES = 1 << 30
"""Room for all of them."""


def agents(
    *,
    model: str = DEFAULT_MODEL,
    threads: int = 0,
    scratch: Path | None = None,
    json: Annotated[Path | None, Parameter(help="Where the JSON goes.")] = None,
) -> None:
    """Replay three days of agents through the store, then some of them through the real engine.

    Parameters
    ----------
    model
        A GGUF file, a Hugging Face folder, or a name of the catalogue.
    threads
        Of the device; 0 = the cores this process may use.
    scratch
        Where caches are made; on the disk that is to be measured.
    """
    path = find_model(model, None, None)
    threads = threads or len(os.sched_getaffinity(0))
    report = Report("agents", {"model": path.name, "threads": threads, "scale": SCALE})
    with tempfile.TemporaryDirectory(dir=scratch, prefix="artesian-bench-") as name:
        folder = Path(name)
        agents_hit_rates(report, folder)
        agents_throughput(report, path, threads, folder / "real")
    report.finish(json)


def agents_hit_rates(report: Report, folder: Path) -> None:
    """The three days: what is possible at full scale and scaled, and the scaled ones through the store."""
    full = agent_trace(AgentShape())
    trace = agent_trace(AgentShape(scale=SCALE))
    small = f"1/{SCALE:g}"
    report.measure("agents, input tokens", "mean at full scale", "", [full.mean_input])
    report.measure("agents, input tokens", f"mean at {small}", "", [trace.mean_input])
    for scaled, name in ((full, "full scale"), (trace, small)):
        for grain in (1, BLOCK):
            title = f"{name}, blocks of {grain}" if grain > 1 else f"{name}, single tokens"
            report.measure("agents, ideal hit rate", title, "", [agent_ideal(scaled, grain)])
        tails = tail_gain(scaled, BLOCK)
        report.note(
            f"agents, {name}: partial blocks at requests' ends would add {100 * tails.gained:.2f} points of "
            f"hit rate, save {tails.saved:.1%} of what is computed, and cost {tails.written:.1%} more bytes "
            f"and {tails.records:.1%} more records written, {tails.kept:.1%} more bytes kept"
        )
    requests = agent_blocks(trace, BLOCK)
    for title, ttl_s in TTLS.items():
        rate = ttl_hit_rate(requests, ttl_s, BLOCK)
        report.measure("agents, possible hit rate", f"{small}, kept for {title}", "", [rate])
    tenth = unique_blocks(requests) // 10
    for title, possible, capacity, limit in (
        ("without a limit", agent_ideal(trace, BLOCK), None, 0.005),
        (
            "a tenth of the blocks",
            lru_hit_rate(requests, tenth, BLOCK),
            tenth,
            0.02,
        ),
    ):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=folder) as directory:
            outcome = replay_agents(Path(directory), trace, grain=BLOCK, capacity=capacity, restarts=RESTARTS)
        seconds = time.perf_counter() - began
        report.measure("agents, hit rate of the store", title, "", [outcome.hit_rate])
        short = possible - outcome.hit_rate
        report.bar(
            f"agents, {title}, {RESTARTS} restarts: {outcome.hit_rate:.4f} of {possible:.4f}, short by",
            short, f"at most {limit}", short <= limit,
        )  # fmt: skip
        report.note(f"agents, {title}: {outcome.told}, {seconds:.0f} s")


# -- the real engine -------------------------------------------------------------------------------


@dataclass(slots=True)
class Sums:
    prompt: int = 0
    cached: int = 0
    from_disk: int = 0
    seconds: float = 0.0

    @property
    def prompt_rate(self) -> float:
        return self.prompt / self.seconds

    @property
    def computed_rate(self) -> float:
        return (self.prompt - self.cached) / self.seconds

    def formula(self, compute_rate: float, load_rate: float) -> float:
        """Prompt tokens per second that these hits allow, if loading and computing took turns."""
        miss, disk = 1 - self.cached / self.prompt, self.from_disk / self.prompt
        return 1 / (miss / compute_rate + disk / load_rate)


def agents_throughput(report: Report, model: Path, threads: int, folder: Path) -> None:
    """Concurrent agents without think times: prompt tokens per second, against cold prefill.

    What a turn adds lies at the end of a long prompt and costs more per token than a whole prompt does. So
    the formula is given twice: with the rate of whole cold prompts, and with the rate at which the very same
    turns are computed when all their prefixes are on the device. Only the second says how well loads hide.
    """
    trace = agent_trace(replace(AgentShape(), scale=SCALE, sessions=REAL_SESSIONS, kinds=2, seed=3), VOCAB)
    chosen = _late_turns(trace)
    cache = CacheConfig(kv_cache_memory_bytes=KV_BYTES, cache_dir=folder, cache_min_free_bytes=0)
    config = EngineConfig(
        model=model, threads=threads, cache=cache, derived_dir=environment.home() / "derived"
    )
    in_memory = replace(config, cache=replace(cache, disk_cache=False, kv_cache_memory_bytes=ALL_KV_BYTES))
    warm, first = uvloop.run(_run(config, trace, chosen))
    gc.collect()
    device, _ = uvloop.run(_run(in_memory, trace, chosen))
    gc.collect()
    cold = uvloop.run(_cold(in_memory, trace, chosen))
    load_rate = _load_rate(folder)
    report.measure("prefill", "cold, whole prompts", "tokens/s", [cold.prompt_rate])
    report.measure("prefill", "turns behind prefixes on the device", "tokens/s", [device.computed_rate])
    report.measure("prefill", "agents, prompt tokens", "tokens/s", [warm.prompt_rate])
    report.measure("restore", "KV from disk", "tokens/s", [load_rate])
    report.measure("agents in the engine", "hit rate", "", [warm.cached / warm.prompt])
    report.measure("agents in the engine", "hit rate, all on the device", "", [device.cached / device.prompt])
    report.measure(
        "agents in the engine", "from disk, of all prompt tokens", "", [warm.from_disk / warm.prompt]
    )
    report.measure("agents in the engine", "first turns, hit rate", "", [first.cached / max(first.prompt, 1)])
    for title, rate in (
        ("whole cold prompts", cold.prompt_rate),
        ("the same turns on the device", device.computed_rate),
    ):
        share = warm.prompt_rate / warm.formula(rate, load_rate)
        report.bar(
            f"agents' prefill over 1 / (miss / compute + hit / load), compute = {title}", share,
            "at least 0.85", share >= 0.85,
        )  # fmt: skip
    gain = warm.prompt_rate / cold.prompt_rate
    report.bar("agents' prefill over cold", gain, "aim 25", gain >= 25)


def _late_turns(trace: AgentTrace) -> list[list[AgentRequest]]:
    """Per session its last turns that fit the context: the first of them makes the prefix, the rest count."""
    by_session: dict[int, list[AgentRequest]] = {}
    for request in trace.requests:
        if request.prompt < REAL_TOKENS:
            by_session.setdefault(request.session, []).append(request)
    return [turns[-REAL_TURNS - 1 :] for turns in by_session.values() if len(turns) > REAL_TURNS]


async def _run(
    config: EngineConfig, trace: AgentTrace, chosen: Sequence[Sequence[AgentRequest]]
) -> tuple[Sums, Sums]:
    """The agents side by side; the first turn of each is not counted. Between two turns of an agent all
    others have one, as if it thought meanwhile: its prefix has left a small device by the time it is needed.
    """
    from ...engine.local import LocalEngine

    engine = LocalEngine.load(config)
    await engine.start()
    first, sums = Sums(), Sums()
    for turns in chosen:
        await _turn(engine, trace, turns[0], first)
    await engine.prompt_cache.flush()

    began = time.perf_counter()
    for number in range(1, REAL_TURNS + 1):
        await asyncio.gather(*[_turn(engine, trace, turns[number], sums) for turns in chosen])
    sums.seconds = time.perf_counter() - began
    await engine.close()
    return sums, first


async def _cold(config: EngineConfig, trace: AgentTrace, chosen: Sequence[Sequence[AgentRequest]]) -> Sums:
    """The same prompts' last turns, each computed whole."""
    from ...engine.local import LocalEngine

    engine = LocalEngine.load(config)
    await engine.start()
    sums = Sums()
    began = time.perf_counter()
    for number, turns in enumerate(chosen):
        tokens = trace.texts[turns[-1].session][: turns[-1].prompt].copy()
        tokens[0] = number  # nothing in common
        await _ask(engine, f"cold-{number}", tokens, sums)
    sums.seconds = time.perf_counter() - began
    await engine.close()
    return sums


async def _turn(engine: object, trace: AgentTrace, turn: AgentRequest, sums: Sums) -> None:
    tokens = trace.texts[turn.session][: turn.prompt]
    await _ask(engine, f"{turn.session}-{turn.prompt}", tokens, sums)


async def _ask(engine: object, name: str, tokens: np.ndarray, sums: Sums) -> None:
    from ...engine.local import LocalEngine

    assert isinstance(engine, LocalEngine)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    async for deltas in engine.submit(GenerationRequest(id=name, prompt=tokens.tolist(), params=params)):
        for delta in deltas:
            if delta.usage is not None:
                sums.prompt += delta.usage.prompt_tokens
                sums.cached += delta.usage.cached_tokens
                sums.from_disk += delta.usage.cache.sources.get("disk", 0)


def _load_rate(folder: Path) -> float:
    """Tokens per second that the tier restores, its files in the page cache as the run left them."""
    from ...cache.tiers import Kind
    from ...cache.tiers.nvme import NvmeTier

    tier = NvmeTier(folder, budget_bytes=1 << 40, min_free_bytes=0, clock=time.time, read_only=True)
    entries = list(tier.entries(Kind.BLOCK))
    out = bytearray(max(entry.found.payload_bytes for entry in entries))
    began = time.perf_counter()
    for entry in entries:
        view = memoryview(out)[: entry.found.payload_bytes]
        tier.read(entry.found, Kind.BLOCK, entry.identity, entry.content, view)
    seconds = time.perf_counter() - began
    tier.close()
    return len(entries) * BLOCK / seconds


def main(arguments: list[str]) -> None:
    """Entry of `artesian bench agents`."""
    run_scenario(agents, arguments)
