"""What streaming costs: processor time per token beside a bare handler, and many streams held open."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import uvloop
from cyclopts import Parameter
from rich.console import Console

from .load import LoadError, Target, read_stream
from .machine import cpu_seconds
from .open_streams import many_streams
from .report import Report, run_scenario
from .servers import Child, child
from .stream_server import events_of
from .summary import alternating

BAR_US = 15.0
PACED = 5
"""By so much a stream is shorter where steps are paced: enough that its beginning does not count."""
PROMPT = "How deep is the"
_ENTRIES = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "depth": {"type": "integer"}},
        "required": ["name", "depth"],
        "additionalProperties": False,
    },
}
_WELLS = {"type": "object", "properties": {"wells": _ENTRIES}, "required": ["wells"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": what, "parameters": _WELLS}}
    for name, what in (("list", "List wells."), ("dig", "Dig wells."))
]


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked for, and what the engine then says."""

    name: str
    script: str
    fields: Mapping[str, Any] | None
    """Of a chat; None: a plain completion."""

    @property
    def path(self) -> str:
        return "/v1/completions" if self.fields is None else "/v1/chat/completions"

    def body(self, url: str, tokens: int) -> dict[str, Any]:
        target = Target("server", url, "ticks")
        if self.fields is None:
            return target.stream_body(PROMPT, tokens)
        return {**target.chat_body(PROMPT, tokens), **self.fields}


CASES = (
    Case("completions", "text", None),
    Case("chat with two tools, which are called", "call", {"tools": TOOLS}),
    Case(
        "chat with a schema",
        "json",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "wells", "schema": _WELLS},
            }
        },
    ),
)


def stream(
    *,
    tokens: int = 10000,
    clients: tuple[int, ...] = (1, 16),
    steps_ms: tuple[float, ...] = (0.0, 2.0),
    pairs: int = 5,
    open_streams: int = 1000,
    json_path: Annotated[Path | None, Parameter("--json", help="Where the JSON goes.")] = None,
) -> None:
    """Measure the processor time that streaming takes per token.

    The engine computes nothing: a step brings one token to every stream. The bare handler, on uvicorn as it
    comes, is woken by the same steps and writes the same events in as many writes; so what the difference
    holds is ours: the engine's stream, JSON, SSE, layers, counters.

    Parameters
    ----------
    tokens
        Of each stream; a fifth of it where steps are paced.
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
        "cases": [case.name for case in CASES],
        "clients": list(clients),
        "steps_ms": list(steps_ms),
        "pairs": pairs,
        "warm-up": "one stream per server",
    }
    report = Report("stream", settings)
    for case in CASES:
        for step_ms in steps_ms:
            _processor_time(report, case, step_ms, tokens // PACED if step_ms else tokens, clients, pairs)
    if open_streams:
        many_streams(report, open_streams)
    report.finish(json_path)


def main(arguments: list[str]) -> None:
    run_scenario(stream, arguments)


def _processor_time(
    report: Report, case: Case, step_ms: float, tokens: int, clients: tuple[int, ...], pairs: int
) -> None:
    status = Console(stderr=True).status
    with (
        _servers(case, step_ms, tokens) as (servers, events),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop,
    ):
        for server in servers:
            loop.run(_us_per_token(server, case, 1, tokens, events))
        for count in clients:
            samples: list[list[float]] = [[], []]
            name = f"{case.name}, {count} clients, {step_ms:g} ms steps"
            with status(name):
                for order in alternating(pairs):
                    for index in order:
                        spent = loop.run(_us_per_token(servers[index], case, count, tokens, events))
                        samples[index].append(spent)
            _report(report, name, *samples)


@contextmanager
def _servers(case: Case, step_ms: float, tokens: int) -> Iterator[tuple[tuple[Child, Child], int]]:
    """Ours, and the bare handler with what ours answers to the load's request; the events of an answer."""
    module = f"{__package__}.stream_server"
    command = [sys.executable, "-P", "-m", module, "{port}", str(step_ms / 1000), "1", case.script]
    with tempfile.TemporaryDirectory(prefix="artesian-bench-") as folder, child(command) as ours:
        ours.wait_until_ok("/health")
        answer = httpx.post(ours.url + case.path, json=case.body(ours.url, tokens), timeout=600.0)
        text = read_stream(0.0, [(0.0, answer.content)], tokens).text
        if case.script != "text":
            json.loads(text)  # else not what is named was measured
        body = Path(folder) / "body"
        body.write_bytes(answer.content)
        with child([*command, body]) as bare:
            bare.wait_until_ok("/")
            yield (ours, bare), len(events_of(answer.content))


def _report(report: Report, case: str, ours: list[float], bare: list[float]) -> None:
    report.measure(f"processor, {case}", "artesian", "us/token", ours)
    report.measure(f"processor, {case}", "bare handler", "us/token", bare)
    differences = [our - their for our, their in zip(ours, bare, strict=True)]
    cost = report.measure(f"streaming, {case}", "artesian - bare", "us/token", differences).median
    report.bar(f"streaming, {case}, us per token", cost, f"<= {BAR_US:g}", cost <= BAR_US)


async def _us_per_token(server: Child, case: Case, clients: int, tokens: int, events: int) -> float:
    """Raises `LoadError` if more than one event in a hundred was written together with another: then a slow
    client, not the server, was measured."""
    target = Target("server", server.url, "ticks")
    body = case.body(server.url, tokens)
    before = cpu_seconds(server.process.pid)
    answers = await asyncio.gather(*(target.post(case.path, body, tokens) for _ in range(clients)))
    spent = cpu_seconds(server.process.pid) - before
    writes = sum(answer.writes for answer in answers)
    if writes < 0.99 * clients * events:
        raise LoadError(f"{clients * events} events came in {writes} writes: the client reads too slowly")
    return 1e6 * spent / (clients * tokens)
