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
from .replay import record_bytes, replay_agents
from .report import Report, run_scenario
from .traces import AgentRequest, AgentShape, AgentTrace, agent_ideal, agent_trace

SCALE = 28.0
"""Of the simulated three days: the longest session then fits the default model's 8,192 tokens."""
BLOCK = 64
RESTARTS = 6
VOCAB = 49_000
REAL_SESSIONS, REAL_TURNS, REAL_TOKENS = 8, 6, 3000
"""Of the real run: as many agents, their turns that are counted, and the longest of their prompts."""
KV_BYTES = 256 << 20
"""Of the real run: half of what its sessions hold, so that most prefixes come from disk."""


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
        agents_part(report, folder)
        _throughput(report, path, threads, folder / "real")
    report.finish(json)


def agents_part(report: Report, folder: Path) -> None:
    """The three days: at full scale by arithmetic, scaled through the real store."""
    full = agent_trace(AgentShape())
    report.measure("agents, input tokens", "mean at full scale", "", [full.mean_input])
    report.measure("agents, ideal hit rate", f"full scale, blocks of {BLOCK}", "", [agent_ideal(full, BLOCK)])
    trace = agent_trace(AgentShape(scale=SCALE))
    ideal, by_token = agent_ideal(trace, BLOCK), agent_ideal(trace, 1)
    report.measure("agents, ideal hit rate", f"1/{SCALE:g}, blocks of {BLOCK}", "", [ideal])
    report.measure("agents, ideal hit rate", f"1/{SCALE:g}, single tokens", "", [by_token])
    unique = _unique_blocks(trace)
    for label, share in (("without a limit", None), ("half of its blocks", 0.5)):
        budget = 1 << 40 if share is None else int(unique * share * (record_bytes(BLOCK) + 420))
        with tempfile.TemporaryDirectory(dir=folder) as directory:
            outcome = replay_agents(
                Path(directory), trace, grain=BLOCK, budget_bytes=budget, restarts=RESTARTS
            )
        report.measure("agents, hit rate of the store", label, "", [outcome.hit_rate])
        if share is None:
            report.bar(
                f"agents, {RESTARTS} restarts: hit rate {outcome.hit_rate:.4f}, ideal {ideal:.4f}, short by",
                ideal - outcome.hit_rate, "0.005", ideal - outcome.hit_rate <= 0.005,
            )  # fmt: skip
        else:
            report.note(
                f"agents, {label}: {outcome.evicted} blocks gave way early, {outcome.expired} expired, "
                f"{outcome.from_disk} came from disk"
            )


def _unique_blocks(trace: AgentTrace) -> int:
    ends: dict[int, int] = {}
    for request in trace.requests:
        ends[request.session] = max(ends.get(request.session, 0), request.prompt + request.output)
    return sum(end // BLOCK for end in ends.values())


# -- the real engine -------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sums:
    prompt: int = 0
    cached: int = 0
    from_disk: int = 0
    seconds: float = 0.0


def _throughput(report: Report, model: Path, threads: int, folder: Path) -> None:
    """Concurrent agents without think times: prompt tokens per second, against cold prefill."""
    trace = agent_trace(replace(AgentShape(), scale=SCALE, sessions=REAL_SESSIONS, kinds=2, seed=3), VOCAB)
    chosen = _late_turns(trace)
    cache = CacheConfig(kv_cache_memory_bytes=KV_BYTES, cache_dir=folder, cache_min_free_bytes=0)
    config = EngineConfig(
        model=model, threads=threads, cache=cache, derived_dir=environment.home() / "derived"
    )
    warm, first = uvloop.run(_run(config, trace, chosen))
    gc.collect()
    cold = uvloop.run(_cold(replace(config, cache=replace(cache, disk_cache=False)), trace, chosen))
    effective, base = warm.prompt / warm.seconds, cold.prompt / cold.seconds
    hit, miss = warm.cached / warm.prompt, 1 - warm.cached / warm.prompt
    load_rate = _load_rate(folder)
    disk = warm.from_disk / warm.prompt
    formula = 1 / (miss / base + disk / load_rate)
    report.measure("prefill", "cold", "tokens/s", [base])
    report.measure("prefill", "agents, prompt tokens", "tokens/s", [effective])
    report.measure("prefill", "agents, by the formula", "tokens/s", [formula])
    report.measure("restore", "KV from disk", "tokens/s", [load_rate])
    report.measure("agents in the engine", "hit rate", "", [hit])
    report.measure("agents in the engine", "from disk, of all prompt tokens", "", [disk])
    report.measure("agents in the engine", "first turns, hit rate", "", [first.cached / max(first.prompt, 1)])
    report.bar(
        "agents' prefill over the formula 1 / (miss / cold + hit / load)", effective / formula,
        "at least 0.85", effective / formula >= 0.85,
    )  # fmt: skip
    report.bar("agents' prefill over cold", effective / base, "aim 25", effective / base >= 25)


def _late_turns(trace: AgentTrace) -> list[list[AgentRequest]]:
    """Per session its last turns that fit the context: the first of them makes the prefix, the rest count."""
    by_session: dict[int, list[AgentRequest]] = {}
    for request in trace.requests:
        if request.prompt < REAL_TOKENS:
            by_session.setdefault(request.session, []).append(request)
    return [turns[-REAL_TURNS - 1 :] for turns in by_session.values() if len(turns) > REAL_TURNS]


async def _run(
    config: EngineConfig, trace: AgentTrace, chosen: Sequence[Sequence[AgentRequest]]
) -> tuple[_Sums, _Sums]:
    """The agents side by side, each turn after the one before; the first turn of each is not counted."""
    from ...engine.local import LocalEngine

    engine = LocalEngine.load(config)
    await engine.start()
    first, sums = _Sums(), _Sums()
    for turns in chosen:
        await _turn(engine, trace, turns[0], first)
    await engine.prompt_cache.flush()

    async def agent(turns: Sequence[AgentRequest]) -> None:
        for turn in turns[1:]:
            await _turn(engine, trace, turn, sums)

    began = time.perf_counter()
    await asyncio.gather(*[agent(turns) for turns in chosen])
    sums.seconds = time.perf_counter() - began
    await engine.close()
    return sums, first


async def _cold(config: EngineConfig, trace: AgentTrace, chosen: Sequence[Sequence[AgentRequest]]) -> _Sums:
    """The same prompts' last turns, each computed whole."""
    from ...engine.local import LocalEngine

    engine = LocalEngine.load(config)
    await engine.start()
    sums = _Sums()
    began = time.perf_counter()
    for number, turns in enumerate(chosen):
        tokens = trace.texts[turns[-1].session][: turns[-1].prompt].copy()
        tokens[0] = number  # nothing in common
        await _ask(engine, f"cold-{number}", tokens, sums)
    sums.seconds = time.perf_counter() - began
    await engine.close()
    return sums


async def _turn(engine: object, trace: AgentTrace, turn: AgentRequest, sums: _Sums) -> None:
    tokens = trace.texts[turn.session][: turn.prompt]
    await _ask(engine, f"{turn.session}-{turn.prompt}", tokens, sums)


async def _ask(engine: object, name: str, tokens: np.ndarray, sums: _Sums) -> None:
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

    tier = NvmeTier(
        folder, budget_bytes=1 << 40, min_free_bytes=0, default_ttl_s=3600.0, clock=time.time, read_only=True
    )
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
