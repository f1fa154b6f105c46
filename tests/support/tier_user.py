"""Opens a disk tier in a process of its own and uses it in every way; prints how many records were sound."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tiers import START, chain, stored, value_of

from artesian.cache.tiers import Record, TierFault
from artesian.cache.tiers.nvme import NvmeTier

COUNT = 10


def held(tier: NvmeTier, record: Record) -> bytes | None:
    try:
        return stored(tier, record)
    except TierFault:
        return None


def main() -> None:
    path, what = Path(sys.argv[1]), sys.argv[2]
    tier = NvmeTier(path, budget_bytes=64 << 20, min_free_bytes=0, clock=lambda: START)
    records = chain("a", COUNT)
    held(tier, records[0])
    if what.startswith("cut:"):
        _, name, size = what.split(":")
        os.truncate(path / "v2" / "index" / name, int(size))
    for _ in range(3):
        for record in records:
            held(tier, record)
        tier.touch({record.key: 9e5 for record in records})
        tier._suspended_until = 0.0
    tier.put(records)
    tier.pin([records[4].key], True)
    tier.pin([records[4].key], False)
    try:
        tier.erase([records[5].key])
        tier.put([records[5]])
    except TierFault:
        pass
    tier.maintain()
    print(sum(held(tier, record) == value_of(record) for record in records))  # noqa: T201
    tier.close()


main()
