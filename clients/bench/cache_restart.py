"""The first token after kill -9 and a restart, against the same prompt cold and against the disk itself."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from ...cache.tiers import Kind
from ...cache.tiers.nvme import NvmeTier
from .cold_files import drop_page_cache, read_rate
from .report import Report
from .servers import Child, artesian_command, child
from .texts import Prompts, model_codec

PREFIX_TOKENS, NEW_TOKENS = 1500, 30
SETTLE_S = 1.0
"""After a request, for its blocks to be on disk: gathered for at most 0.25 s."""
ALLOWED_S = 0.015
COLD_SHARE = 1 / 12


def first_token_after_restart(report: Report, model: Path, threads: int, folder: Path, runs: int) -> None:
    """One long prefix with new words behind it: cold, from disk, from the page cache, on the device."""
    prompts = Prompts(model_codec(model).tokenizer)
    prefix = prompts.take(PREFIX_TOKENS)
    command = artesian_command(model, threads, "--no-access-log", cache_dir=folder)
    with _killed(command) as server:
        cold = [_first_token(server, prompts.take(PREFIX_TOKENS + NEW_TOKENS))[0] for _ in range(runs)]
        _first_token(server, prefix)
        time.sleep(SETTLE_S)
    disk: list[float] = []
    warm: list[float] = []
    device: list[float] = []
    usage: dict[str, Any] = {}
    for times, is_cold in [(disk, True), (warm, False)] * runs:
        with _killed(command) as server:
            if is_cold:
                drop_page_cache(folder)
            seconds, usage = _first_token(server, prefix + prompts.take(NEW_TOKENS))
            times.append(seconds)
            device.append(_first_token(server, prefix + prompts.take(NEW_TOKENS))[0])
            time.sleep(SETTLE_S)
    rate = statistics.median(read_rate(folder) for _ in range(runs))
    cached, prompt = usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
    hit_bytes = cached * _bytes_per_token(folder)
    name = "first token"
    on_disk = report.measure(name, "after kill -9, from disk", "ms", [1000 * s for s in disk])
    in_memory = report.measure(name, "after kill -9, from page cache", "ms", [1000 * s for s in warm])
    on_device = report.measure(name, "prefix on the device", "ms", [1000 * s for s in device])
    computed = report.measure(name, "cold", "ms", [1000 * s for s in cold])
    report.measure("read rate of these files", "sequential, cold", "MB/s", [rate / 1e6])
    bar_ms = 1000 * (hit_bytes / rate + ALLOWED_S) + on_device.median
    report.bar(
        f"first token from disk, {cached} of {prompt} tokens hit, ms", on_disk.median,
        f"{bar_ms:.0f} = {1000 * hit_bytes / rate:.0f} for {hit_bytes / 1e6:.0f} MB at the read rate"
        f" + {on_device.median:.0f} for the rest + {1000 * ALLOWED_S:.0f}",
        on_disk.median <= bar_ms,
    )  # fmt: skip
    share = in_memory.median / computed.median
    report.bar("first token from page cache / cold", share, "1/12 = 0.083", share <= COLD_SHARE)


@contextmanager
def _killed(command: Sequence[str | Path]) -> Iterator[Child]:
    """A server that is ready, and ends by kill -9."""
    with child(command) as server:
        server.wait_until_ok("/ready")
        yield server
        server.process.kill()
        server.process.wait()


def _first_token(server: Child, prompt: str) -> tuple[float, dict[str, Any]]:
    """Seconds to the first token of a streamed completion, and its usage."""
    body = {
        "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    first: float | None = None
    usage: dict[str, Any] = {}
    with httpx.Client(timeout=None) as client:
        client.get(f"{server.url}/health")  # the connection is not part of the time
        began = time.perf_counter()
        with client.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter() - began
                    usage = json.loads(line[6:]).get("usage") or usage
    assert first is not None, "the stream had no event"
    return first, usage


def _bytes_per_token(folder: Path) -> float:
    """Of the payload, by what is stored."""
    tier = NvmeTier(folder, budget_bytes=1 << 40, min_free_bytes=0, clock=time.time, read_only=True)
    entry = next(tier.entries(Kind.BLOCK))
    tier.close()
    return entry.found.payload_bytes / (len(entry.content) // 4)
