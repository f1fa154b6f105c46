"""The disk tier alone: how fast it restores what a disk holds, and an index of a million records."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...cache.tiers import Found, Kind, Record
from ...cache.tiers.index import Index, Place, SegmentInfo
from ...cache.tiers.nvme import NvmeTier
from ...cache.workers import READERS
from .cold_files import drop_page_cache, read_rate
from .report import Report

RECORDS, RECORD_TOKENS, RECORD_BYTES = 256, 64, 64 * 23040
"""Records of the default model's blocks: 64 tokens of 23,040 bytes."""
PUT_RECORDS = 16
INDEX_RECORDS, INDEX_STEP = 1_000_000, 50_000
LOOKUPS = 20_000
TTL_S = 72 * 3600.0
OPEN = """
import sys, time
from pathlib import Path
from artesian.cache.tiers.nvme import NvmeTier
began = time.perf_counter()
tier = NvmeTier(Path(sys.argv[1]), budget_bytes=1 << 40, min_free_bytes=0, clock=time.time)
tier.find([bytes(32)])
print(time.perf_counter() - began, tier.stats.records)
"""


def restore(report: Report, folder: Path, runs: int) -> None:
    """Read cold records in the order of a chain, with as many threads as the engine has."""
    tier = _tier(folder)
    payload = memoryview(os.urandom(RECORD_BYTES))
    records = [
        Record(
            Kind.BLOCK, _key(number), bytes(32), bytes(4 * RECORD_TOKENS), payload, TTL_S, depth=number + 1
        )
        for number in range(RECORDS)
    ]  # fmt: skip
    for first in range(0, RECORDS, PUT_RECORDS):
        tier.put(records[first : first + PUT_RECORDS])
    found = tier.find([record.key for record in records])
    ours: list[float] = []
    theirs: list[float] = []
    cached: list[float] = []
    for _ in range(runs):
        theirs.append(read_rate(folder) / 1e6)
        drop_page_cache(folder)
        ours.append(_restore_rate(tier, found) / 1e6)
        cached.append(_restore_rate(tier, found) / 1e6)
    tier.close()
    report.measure("read rate", "restored payload", "MB/s", ours)
    report.measure("read rate", "the files, sequential", "MB/s", theirs)
    report.measure("read rate", "restored from page cache", "MB/s", cached)
    ratio = report.ratio("read rate", "restored payload", "the files, sequential")
    report.bar("restore / the disk's sequential rate", ratio.median, "at least 0.70", ratio.median >= 0.7)


def _restore_rate(tier: NvmeTier, found: Sequence[Found]) -> float:
    waiting = iter(found)

    def work(_: int) -> int:
        buffer, size = memoryview(mmap.mmap(-1, RECORD_BYTES)), 0
        for one in waiting:  # hands each record out once: `next` of a list's iterator is atomic
            tier.read(one, Kind.BLOCK, bytes(32), bytes(4 * RECORD_TOKENS), buffer)
            size += len(buffer)
        return size

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(abs, range(READERS)))  # the threads are not part of the time
        began = time.perf_counter()
        size = sum(pool.map(work, range(READERS)))
        return size / (time.perf_counter() - began)


def index_of_a_million(report: Report, folder: Path, runs: int) -> None:
    """How long a fresh process takes to open the tier with a large index, and to look keys up in it."""
    tier = _tier(folder)
    index_folder = tier.root / "index"
    tier.close()
    keys = _fill(index_folder)
    opens = []
    for _ in range(runs):
        drop_page_cache(folder)
        said = subprocess.run([sys.executable, "-P", "-c", OPEN, folder], capture_output=True, check=True)
        seconds, records = said.stdout.split()
        assert int(records) == INDEX_RECORDS, "another index was opened"
        opens.append(1000 * float(seconds))
    drop_page_cache(folder)
    chosen = random.Random(1).sample(keys, LOOKUPS)
    name = "index of 1e6 records"
    opened = report.measure(name, "the tier opens, file cold", "ms", opens)
    index = Index(index_folder, read_only=True)
    with index.snapshot() as view:
        report.measure(name, "lookup, file cold", "us", _times(lambda key: view.get(key), chosen))
        looked = report.measure(name, "lookup", "us", _times(lambda key: view.get(key), chosen))
    report.measure(name, "size", "MB", [index.file_bytes() / 1e6])
    index.close()
    tier = _tier(folder)  # opened after the index is closed: a process opens an environment once
    report.measure(name, "find of one key by the tier", "us", _times(lambda key: tier.find([key]), chosen))
    tier.close()
    report.bar("index of 1e6 records, open, ms", opened.median, "under 100", opened.median < 100)
    report.bar("index of 1e6 records, lookup, us", looked.median, "under 20", looked.median < 20)


def _fill(folder: Path) -> list[bytes]:
    """Enter a million records straight into the index: without files, which neither opening nor looking up
    reads."""
    index = Index(folder)
    keys = [_key(number) for number in range(INDEX_RECORDS)]
    ends = time.time() + TTL_S
    for first in range(0, INDEX_RECORDS, INDEX_STEP):
        with index.change() as change:
            change.put_segment(1, SegmentInfo(0, 0, 0, 0.0, "0/00000001.seg"))
            for number in range(first, first + INDEX_STEP):
                place = Place(
                    1, 1, 0, 0, number, 4096, 1, 0.0, ends + number, TTL_S, number % 100, 1, number
                )  # fmt: skip
                change.add(keys[number], place, bytes(32))
    index.close()
    return keys


def _times(look: Callable[[bytes], object], keys: Sequence[bytes]) -> list[float]:
    samples = []
    for key in keys:
        began = time.perf_counter()
        found = look(key)
        samples.append(1e6 * (time.perf_counter() - began))
        assert found, "a key is missing"
    return samples


def _key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def _tier(folder: Path) -> NvmeTier:
    return NvmeTier(folder, budget_bytes=1 << 40, min_free_bytes=0, clock=time.time)
