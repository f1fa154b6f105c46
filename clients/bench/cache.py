"""The disk cache: first token after kill -9, restore rate, index, hit rates of traces, and what it costs."""

from __future__ import annotations

import asyncio
import hashlib
import json as json_module
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
from cyclopts import Parameter

from ...cache.tiers import Found, Kind, Record
from ...cache.tiers.index import Index, Place, SegmentInfo
from ...cache.tiers.nvme import NvmeTier
from ...engine.load.sources import DEFAULT_MODEL
from ..cli.models import find_model
from .agents import agents_part
from .machine import cpu_seconds
from .replay import record_bytes, replay_blocks
from .report import Report, run_scenario
from .servers import Child, artesian_command, child
from .summary import alternating
from .texts import Prompts, model_codec
from .traces import MOONCAKE_BLOCK, lru_hit_rate, read_mooncake, unique_blocks

PREFIX_TOKENS, NEW_TOKENS = 1500, 30
SETTLE_S = 1.0
"""After a request, for its blocks to be on disk: gathered for at most 0.25 s."""
READ_BYTES = 4 << 20
RESTORE_RECORDS, RESTORE_BYTES = 256, 64 * 23040
"""Records of the default model's blocks: 64 tokens of 23,040 bytes."""
INDEX_RECORDS = 1_000_000
LOOKUPS = 20_000
PARTS = ("ttft", "restore", "index", "mooncake", "agents", "idle", "writes")


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
        Parts to run, separated by commas: ttft, restore, index, mooncake, agents, idle, writes.
    traces
        Folder with Mooncake's conversation_trace.jsonl and synthetic_trace.jsonl; none = left out.
    runs
        Repetitions of what is timed.
    pairs
        Alternating pairs of the two cost measurements.
    threads
        Of the device; 0 = the cores this process may use.
    scratch
        Where caches are made: on the disk that is to be measured.
    """
    began = time.perf_counter()
    wanted = only.split(",") if only else list(PARTS)
    path = find_model(model, None, None)
    threads = threads or len(os.sched_getaffinity(0))
    report = Report("cache", {"model": path.name, "threads": threads, "runs": runs, "pairs": pairs})
    with tempfile.TemporaryDirectory(dir=scratch, prefix="artesian-bench-") as name:
        folder = Path(name)
        if "ttft" in wanted:
            _ttft(report, path, threads, folder / "ttft", runs)
        if "restore" in wanted:
            _restore(report, folder / "restore", runs)
        if "index" in wanted:
            _index(report, folder / "index")
        if "mooncake" in wanted and traces is not None:
            _mooncake(report, traces, folder)
        if "agents" in wanted:
            agents_part(report, folder)
        if "idle" in wanted:
            _cost(report, "idle", path, threads, folder, pairs)
        if "writes" in wanted:
            _cost(report, "writes", path, threads, folder, pairs)
    report.note(f"all of it took {time.perf_counter() - began:.0f} s")
    report.finish(json)


# -- after kill -9 ---------------------------------------------------------------------------------


def _ttft(report: Report, model: Path, threads: int, folder: Path, runs: int) -> None:
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
    cached = 0
    for times, drop in [(disk, True), (warm, False)] * runs:
        with _killed(command) as server:
            if drop:
                _drop_page_cache(folder)
            seconds, usage = _first_token(server, prefix + prompts.take(NEW_TOKENS))
            times.append(seconds)
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            device.append(_first_token(server, prefix + prompts.take(NEW_TOKENS))[0])
            time.sleep(SETTLE_S)
    rate = statistics.median(_read_rate(folder) for _ in range(runs))
    hit_bytes = cached * RESTORE_BYTES / 64
    on_disk = report.measure("first token after kill -9", "from disk", "ms", [1000 * s for s in disk])
    in_cache = report.measure("first token after kill -9", "from page cache", "ms", [1000 * s for s in warm])
    on_device = report.measure("first token", "prefix on the device", "ms", [1000 * s for s in device])
    computed = report.measure("first token", "cold", "ms", [1000 * s for s in cold])
    report.measure("read rate of the cache's files", "sequential, cold", "MB/s", [rate / 1e6])
    bar_ms = 1000 * hit_bytes / rate + on_device.median + 15
    report.bar(
        f"first token from disk, {cached} of {PREFIX_TOKENS + NEW_TOKENS} tokens hit, ms", on_disk.median,
        f"{bar_ms:.0f} = {hit_bytes / 1e6:.0f} MB at the read rate + {on_device.median:.0f} + 15",
        on_disk.median <= bar_ms,
    )  # fmt: skip
    share = in_cache.median / computed.median
    report.bar("first token from page cache / cold", share, "1/12 = 0.083", share <= 1 / 12)


@contextmanager
def _killed(command: Sequence[str | Path]) -> Iterator[Child]:
    """A server that is ready, and ends by kill -9."""
    with child(command) as server:
        server.wait_until_ok("/ready")
        yield server
        server.process.kill()
        server.process.wait()


def _first_token(
    server: Child, prompt: str, max_tokens: int = 1, **fields: Any
) -> tuple[float, dict[str, Any]]:
    """Seconds to the first token of a streamed completion, and its usage."""
    body = {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True}, **fields,
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
                    usage = json_module.loads(line[6:]).get("usage") or usage
    assert first is not None, "the stream had no event"
    return first, usage


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _drop_page_cache(folder: Path) -> None:
    """Make the files of a folder cold."""
    for path in _files(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _read_rate(folder: Path) -> float:
    """Bytes per second of reading the segments from end to end, cold, as one would with dd."""
    _drop_page_cache(folder)
    buffer = memoryview(mmap.mmap(-1, READ_BYTES))
    size = 0
    began = time.perf_counter()
    for path in folder.rglob("*.seg"):
        fd = os.open(path, os.O_RDONLY)
        try:
            offset = 0
            while got := os.preadv(fd, [buffer], offset):
                offset += got
            size += offset
        finally:
            os.close(fd)
    return size / (time.perf_counter() - began)


# -- the tier alone --------------------------------------------------------------------------------


def _restore(report: Report, folder: Path, runs: int) -> None:
    """Read records in the order of a chain, with as many threads as the engine has."""
    tier = NvmeTier(folder, budget_bytes=1 << 40, min_free_bytes=0, default_ttl_s=3600.0, clock=time.time)
    payload = memoryview(os.urandom(RESTORE_BYTES))
    records = [
        Record(
            Kind.BLOCK,
            hashlib.sha256(b"%d" % i).digest(),
            bytes(32),
            bytes(256),
            payload,
            3600.0,
            depth=i + 1,
        )
        for i in range(RESTORE_RECORDS)
    ]
    for first in range(0, RESTORE_RECORDS, 16):
        tier.put(records[first : first + 16])
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(runs):
        theirs.append(_read_rate(folder) / 1e6)
        _drop_page_cache(folder)
        ours.append(_restore_rate(tier, tier.find([record.key for record in records])) / 1e6)
    tier.close()
    report.measure("read rate", "restored payload", "MB/s", ours)
    report.measure("read rate", "the files, sequential", "MB/s", theirs)
    ratio = report.ratio("read rate", "restored payload", "the files, sequential")
    report.bar("restore / the disk's sequential rate", ratio.median, "at least 0.70", ratio.median >= 0.7)


def _restore_rate(tier: NvmeTier, found: Sequence[Found]) -> float:
    waiting = iter(found)

    def work() -> int:
        buffer, size = memoryview(mmap.mmap(-1, RESTORE_BYTES)), 0
        for one in waiting:  # the iterator hands each record out once: next() holds the interpreter
            tier.read(one, Kind.BLOCK, bytes(32), bytes(256), buffer)
            size += len(buffer)
        return size

    began = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        size = sum(pool.map(lambda _: work(), range(4)))
    return size / (time.perf_counter() - began)


def _index(report: Report, folder: Path) -> None:
    """An index of a million records: how long a fresh process takes to open it, and to look keys up."""
    folder.mkdir()
    index = Index(folder)
    keys = [hashlib.blake2b(i.to_bytes(8, "little"), digest_size=32).digest() for i in range(INDEX_RECORDS)]
    for first in range(0, INDEX_RECORDS, 50_000):
        with index.change() as change:
            change.put_segment(1, SegmentInfo(0, 0, 0, 0.0, "0/00000001.seg"))
            for i in range(first, first + 50_000):
                place = Place(1, 1, 0, 0, i, 4096, 1, 0.0, 1.8e9 + i, 3600.0, i % 100, 1, i)
                change.add(keys[i], place, bytes(32))
    size = index.file_bytes()
    index.close()
    code = (
        "import sys,time\nfrom pathlib import Path\nfrom artesian.cache.tiers.index import Index\n"
        "began=time.perf_counter()\nindex=Index(Path(sys.argv[1]))\n"
        "with index.snapshot() as view: view.get(bytes(32))\n"
        "print(time.perf_counter()-began)"
    )
    opens = []
    for _ in range(5):
        _drop_page_cache(folder)
        said = subprocess.run([sys.executable, "-P", "-c", code, folder], capture_output=True, check=True)
        opens.append(1000 * float(said.stdout))
    index = Index(folder)
    chosen = random.Random(1).sample(keys, LOOKUPS)
    times: dict[str, list[float]] = {"lookup, file cold": [], "lookup": []}
    for samples in times.values():
        with index.snapshot() as view:
            for key in chosen:
                began = time.perf_counter()
                view.get(key)
                samples.append(1e6 * (time.perf_counter() - began))
    index.close()
    report.measure("index of 1e6 records", "lookup, file cold", "us", times["lookup, file cold"])
    opened = report.measure("index of 1e6 records", "open, cold", "ms", opens)
    looked = report.measure("index of 1e6 records", "lookup", "us", times["lookup"])
    report.measure("index of 1e6 records", "size", "MB", [size / 1e6])
    report.bar("index of 1e6 records, open, ms", opened.median, "under 100", opened.median < 100)
    report.bar("index of 1e6 records, lookup, us", looked.median, "under 20", looked.median < 20)


# -- traces ----------------------------------------------------------------------------------------


def _mooncake(report: Report, traces: Path, folder: Path) -> None:
    for name in ("conversation", "synthetic"):
        requests = read_mooncake(traces / f"{name}_trace.jsonl")
        unique = unique_blocks(requests)
        for percent in (100, 50, 25, 10):
            capacity = unique * percent // 100
            possible = lru_hit_rate(requests, capacity)
            # Index, journal and what one change may add come on top of the records.
            budget = 1 << 40 if percent == 100 else capacity * (record_bytes(MOONCAKE_BLOCK) + 420)
            with tempfile.TemporaryDirectory(dir=folder) as directory:
                outcome = replay_blocks(
                    Path(directory), requests, block_tokens=MOONCAKE_BLOCK, budget_bytes=budget
                )
            limit = 0.005 if percent == 100 else 0.02
            report.measure(f"token hit rate, {name}", f"{percent} % of the blocks", "", [outcome.hit_rate])
            report.bar(
                f"{name} at {percent} %: hit rate {outcome.hit_rate:.4f}, possible {possible:.4f}, short by",
                possible - outcome.hit_rate, f"{limit}", possible - outcome.hit_rate <= limit,
            )  # fmt: skip


# -- what it costs ---------------------------------------------------------------------------------


def _cost(report: Report, part: str, model: Path, threads: int, folder: Path, pairs: int) -> None:
    """Process CPU-seconds per token of a server with the disk cache over one without, in turns.

    idle: prompts that nobody has seen, kept in memory only: what looking below the device costs.
    writes: sixteen streams that decode, all blocks written.
    """
    prompts = Prompts(model_codec(model).tokenizer)
    flags = ("--no-access-log", "--kv-cache-memory-bytes", "512MiB")
    with_disk = artesian_command(model, threads, *flags, cache_dir=folder / part)
    without = artesian_command(model, threads, *flags)
    name = "CPU per token, nothing hits" if part == "idle" else "CPU per token, decoding"
    costs: dict[str, list[float]] = {"disk cache": [], "none": []}
    gaps: dict[str, list[float]] = {"disk cache": [], "none": []}
    with child(with_disk) as one, child(without) as other:
        servers = {"disk cache": one, "none": other}
        for server in servers.values():
            server.wait_until_ok("/ready")
            _load(server, part, prompts)
        for pair in alternating(pairs):
            for side in pair:
                subject = ("disk cache", "none")[side]
                cost, latencies = _load(servers[subject], part, prompts)
                costs[subject].append(1000 * cost)
                gaps[subject] += latencies
    for subject, samples in costs.items():
        report.measure(name, subject, "ms", samples)
    ratio = report.ratio(name, "disk cache", "none")
    limit = 1.02 if part == "idle" else 1.03
    low, high = _interval([a / b for a, b in zip(costs["disk cache"], costs["none"], strict=True)])
    report.bar(
        f"{name}: with / without (95 % of bootstrapped medians {low:.3f} to {high:.3f})", ratio.median,
        f"{limit}", ratio.median <= limit,
    )  # fmt: skip
    if part == "writes":
        for subject, samples in gaps.items():
            report.measure("time between tokens", subject, "ms", [1000 * s for s in samples])


def _load(server: Child, part: str, prompts: Prompts) -> tuple[float, list[float]]:
    """Run one side's share of a pair; CPU-seconds per token, and the times between tokens."""
    pid = server.process.pid
    if part == "idle":
        fields: dict[str, Any] = {"prompt_cache_retention": "in_memory", "max_tokens": 8}
        bodies = [{"prompt": prompts.take(512), **fields} for _ in range(4)]
    else:
        bodies = [{"prompt": prompts.take(64), "max_tokens": 128} for _ in range(16)]
    before = cpu_seconds(pid)
    tokens, gaps = asyncio.run(_together(server, bodies))
    return (cpu_seconds(pid) - before) / tokens, gaps


async def _together(server: Child, bodies: Sequence[dict[str, Any]]) -> tuple[int, list[float]]:
    """Stream all bodies at once; tokens of prompts and answers, and the times between events."""

    async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, list[float]]:
        asked = {
            **body, "temperature": 0, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        gaps: list[float] = []
        tokens, last = 0, 0.0
        async with client.stream("POST", f"{server.url}/v1/completions", json=asked) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    if last:
                        gaps.append(now - last)
                    last = now
                    if '"usage":{' in line:
                        tokens = json_module.loads(line[6:])["usage"]["total_tokens"]
        return tokens, gaps

    async with httpx.AsyncClient(timeout=None) as client:
        results = await asyncio.gather(*[one(client, body) for body in bodies])
    return sum(tokens for tokens, _ in results), [gap for _, gaps in results for gap in gaps]


def _interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The middle 95 % of the medians of resampled pairs."""
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


def main(arguments: list[str]) -> None:
    """Entry of `artesian bench cache`."""
    run_scenario(cache, arguments)
