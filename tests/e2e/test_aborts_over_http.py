"""Hundreds of clients that leave at any moment: nothing of them stays, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from real_server import RealServer, real_server

pytestmark = pytest.mark.model

REQUESTS = 500
SLOTS, WAITING = 8, 16
CLIENTS = SLOTS + WAITING + 4
LONGEST_STAY_S = 0.6
HEALTH_EVERY_S = 0.1
HEALTH_MEDIAN_S, HEALTH_P99_S = 0.25, 3.0  # 7 and 100 ms on two idle cores; half of them may be taken
RESET = struct.pack("ii", 1, 0)  # linger for 0 s: closing sends RST instead of FIN
PROBE = {"prompt": "The three longest rivers are", "max_tokens": 16, "temperature": 0}


@pytest.fixture(scope="module")
def crowded(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    flags = ("--max-num-seqs", str(SLOTS), "--max-num-queued-reqs", str(WAITING), "--threads", "2")
    with real_server(smollm2_path, tmp_path_factory.mktemp("server"), *flags) as server:
        yield server


def body(dice: random.Random) -> dict[str, Any]:
    """Short and long prompts, whole answers and streams, one choice and several; none ends by itself soon."""
    words = dice.choice([3, 20, 400])
    return {
        "prompt": " ".join(dice.choice(["river", "well", "spring", "lake"]) for _ in range(words)),
        "max_tokens": dice.choice([2, 300]),
        "ignore_eos": True,
        "stream": dice.random() < 0.7,
        "n": dice.choice([1, 1, 2]),
    }


async def visit(server: RealServer, dice: random.Random) -> str:
    """Send a request, stay for a random time, leave by FIN or RST; return what had come by then."""
    url = httpx.URL(server.url)
    content = json.dumps(body(dice)).encode()
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    answer = b""
    try:
        async with asyncio.timeout(dice.uniform(0, LONGEST_STAY_S)):
            answer = await reader.readuntil(b"\r\n")
            await reader.readuntil(b"\r\n0\r\n\r\n")
    except (TimeoutError, asyncio.LimitOverrunError, asyncio.IncompleteReadError):
        pass
    if dice.random() < 0.5:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
    return answer[9:12].decode() or "nothing"


async def watch_health(server: RealServer, waits: list[float]) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        while True:
            began = time.monotonic()
            assert (await client.get("/health")).status_code == 200
            waits.append(time.monotonic() - began)
            await asyncio.sleep(HEALTH_EVERY_S)


def probe(server: RealServer) -> Any:
    return httpx.post(f"{server.url}/v1/completions", json=PROBE, timeout=60).json()["choices"]


async def storm(server: RealServer) -> tuple[Counter[str], list[float], float]:
    """Return what the clients saw by status, the times of /health, and after how long all was idle."""
    dice = random.Random(4)
    seen: Counter[str] = Counter()
    waits: list[float] = []
    turns = iter(range(REQUESTS))

    async def client() -> None:
        for _ in turns:
            seen[await visit(server, dice)] += 1

    watch = asyncio.create_task(watch_health(server, waits))
    async with asyncio.TaskGroup() as clients:
        for _ in range(CLIENTS):
            clients.create_task(client())
    idle_after_s = await asyncio.to_thread(server.assert_idle)
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    return seen, sorted(waits), idle_after_s


def test_clients_that_leave_at_any_moment_leave_nothing_behind(
    crowded: RealServer, capsys: pytest.CaptureFixture[str]
) -> None:
    before = probe(crowded)
    seen, waits, idle_after_s = asyncio.run(storm(crowded))
    p99 = waits[len(waits) * 99 // 100]
    with capsys.disabled():
        print(f" [{dict(seen)}, /health p99 {1000 * p99:.0f} ms, idle after {idle_after_s:.2f} s] ", end="")  # noqa: T201
    assert seen.total() == REQUESTS and min(seen[what] for what in ("200", "nothing", "503")) > 10, seen
    assert crowded.metrics()["artesian_client_disconnects_total"] > 100
    assert waits[len(waits) // 2] < HEALTH_MEDIAN_S and p99 < HEALTH_P99_S, waits
    assert probe(crowded) == before
    assert "Traceback" not in crowded.log.read_text()
