"""Many streams held open at once: what a token waits for between engine and client, and their memory."""

from __future__ import annotations

import asyncio
import sys

import uvloop

from .load import Streamed, Target
from .machine import rss_bytes
from .report import Report
from .servers import Child, child
from .sockets import stream_over_socket

PROMPT = "How deep is the"
STEP_S, PHASES = 0.2, 20
"""Every stream gets a token each 0.2 s; a twentieth of them in each step."""
TOKENS = 75
OPEN_S = 3.0
"""The streams begin spread over this time."""
RESPONSE_END = b'"response.incomplete"'
"""In the last event of a Response that its limit ends."""
LATENCY_BAR_MS, MEMORY_BAR_KB = 50.0, 50.0


WAYS = ("server-sent events", "websocket", "websocket, Responses")


def many_streams(report: Report, streams: int) -> None:
    """Open `streams` answers, in each way to read them, and read them to their ends. Client and server share
    the machine, so a token's latency holds the client's own work too."""
    for way in WAYS:
        _many_streams(report, streams, way)


def _many_streams(report: Report, streams: int, way: str) -> None:
    server_command = [sys.executable, "-P", "-m", f"{__package__}.stream_server", "{port}"]
    with child([*server_command, str(STEP_S), str(PHASES), "text"]) as server:
        server.wait_until_ok("/health")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            loop.run(_open(server, PHASES, way))  # warm
            before = rss_bytes(server.process.pid)
            answers, resident = loop.run(_open(server, streams, way))
    latencies = [
        1000 * (arrived - float(stamp))
        for answer in answers
        for arrived, text in zip(answer.arrivals, answer.texts, strict=True)
        for stamp in text.split()
    ]
    case = f"{streams} open streams, {way}"
    whole = sum(len(answer.text.split()) == TOKENS for answer in answers)
    added = report.measure(case, "from the engine to the client", "ms", latencies)
    memory = (resident - before) / streams / 1024
    report.bar(f"{case}: complete", whole, f"{streams}", whole == streams)
    report.bar(
        f"{case}: p99 of added latency, ms", added.p99, f"< {LATENCY_BAR_MS:g}", added.p99 < LATENCY_BAR_MS
    )
    report.bar(f"{case}: resident KB each", memory, f"<= {MEMORY_BAR_KB:g}", memory <= MEMORY_BAR_KB)


async def _open(server: Child, streams: int, way: str) -> tuple[list[Streamed], int]:
    """The answers, and the server's memory while all are open."""
    target = Target("server", server.url, "ticks")
    response = {"type": "response.create", "input": PROMPT, "max_output_tokens": TOKENS, "store": False}

    async def one(number: int) -> Streamed:
        await asyncio.sleep(OPEN_S * number / streams)
        match way:
            case "websocket":
                body = target.chat_body(PROMPT, TOKENS)
                return await stream_over_socket(target, "/v1/chat/completions", body, b"[DONE]", TOKENS)
            case "websocket, Responses":
                return await stream_over_socket(target, "/v1/responses", response, RESPONSE_END, TOKENS)
            case _:
                return await target.stream(PROMPT, TOKENS)

    tasks = [asyncio.create_task(one(number)) for number in range(streams)]
    await asyncio.sleep(OPEN_S + (TOKENS * STEP_S - OPEN_S) / 2)
    resident = rss_bytes(server.process.pid)
    return await asyncio.gather(*tasks), resident
