"""What streaming costs: processor time per token beside a bare handler, and many streams held open."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import httpx
import uvloop
from cyclopts import Parameter
from rich.console import Console

from .load import LoadError, Target
from .machine import cpu_seconds
from .open_streams import many_streams
from .report import Report, run_scenario
from .servers import Child, child
from .summary import alternating

BAR_US = 15.0
PROMPT = "How deep is the"


def stream(
    *,
    tokens: int = 10000,
    clients: tuple[int, ...] = (1, 16),
    steps_ms: tuple[float, ...] = (0.0, 2.0),
    pairs: int = 5,
    open_streams: int = 1000,
    json: Annotated[Path | None, Parameter(help="Where the JSON goes.")] = None,
) -> None:
    """Measure the processor time that streaming takes per token.

    The engine computes nothing: a step brings one token to every stream. The bare handler, on uvicorn as it
    comes, is woken by the same steps and writes the same events in as many writes; so what the difference
    holds is ours: the engine's stream, JSON, SSE, layers, counters.

    Parameters
    ----------
    tokens
        Of each stream; a tenth of it where steps are paced.
    clients
        Streams at once, one measure for each number.
    steps_ms
        Time between steps; 0 = the next step comes as soon as every stream has had its turn. Paced steps find
        the processor's caches cold, as those of a real model do.
    pairs
        Alternating pairs for each measure.
    open_streams
        Held open together, each with five tokens a second; 0 = left out.
    """
    settings = {
        "tokens": tokens,
        "clients": list(clients),
        "steps_ms": list(steps_ms),
        "pairs": pairs,
        "warm-up": "one stream per server",
    }
    report = Report("stream", settings)
    for step_ms in steps_ms:
        length = tokens // 10 if step_ms else tokens
        with _servers(step_ms, length) as servers, asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            for server in servers:
                loop.run(_us_per_token(server, 1, length))
            for count in clients:
                samples: list[list[float]] = [[], []]
                with Console(stderr=True).status(f"{count} clients, steps of {step_ms:g} ms"):
                    for order in alternating(pairs):
                        for index in order:
                            samples[index].append(loop.run(_us_per_token(servers[index], count, length)))
                _report(report, f"{count} clients, {step_ms:g} ms steps", *samples)
    if open_streams:
        many_streams(report, open_streams)
    report.finish(json)


def main(arguments: list[str]) -> None:
    run_scenario(stream, arguments)


@contextmanager
def _servers(step_ms: float, tokens: int) -> Iterator[tuple[Child, Child]]:
    """Ours, and the bare handler with what ours answers to the load's request."""
    command = [sys.executable, "-P", "-m", f"{__package__}.stream_server", "{port}", str(step_ms / 1000), "1"]
    with tempfile.TemporaryDirectory(prefix="artesian-bench-") as folder, child(command) as ours:
        ours.wait_until_ok("/health")
        request = Target("server", ours.url, "ticks").stream_body(PROMPT, tokens)
        body = Path(folder) / "body"
        body.write_bytes(httpx.post(f"{ours.url}/v1/completions", json=request, timeout=600.0).content)
        with child([*command, body]) as bare:
            bare.wait_until_ok("/")
            yield ours, bare


def _report(report: Report, case: str, ours: list[float], bare: list[float]) -> None:
    report.measure(f"processor, {case}", "artesian", "us/token", ours)
    report.measure(f"processor, {case}", "bare handler", "us/token", bare)
    differences = [our - their for our, their in zip(ours, bare, strict=True)]
    cost = report.measure(f"streaming, {case}", "artesian - bare", "us/token", differences).median
    report.bar(f"streaming, {case}, us per token", cost, f"<= {BAR_US:g}", cost <= BAR_US)


async def _us_per_token(server: Child, clients: int, tokens: int) -> float:
    """Raises `LoadError` if more than one event in a hundred was written together with another: then a slow
    client, not the server, was measured."""
    target = Target("server", server.url, "ticks")
    before = cpu_seconds(server.process.pid)
    answers, _ = await target.streams([PROMPT] * clients, tokens)
    spent = cpu_seconds(server.process.pid) - before
    writes = sum(answer.writes for answer in answers)
    if writes < 0.99 * clients * tokens:
        raise LoadError(f"{clients * tokens} tokens came in {writes} writes: the client reads too slowly")
    return 1e6 * spent / (clients * tokens)
