"""A process that writes records to a disk tier, one commit each, and says which are committed; for kill -9.

Usage: tier_writer.py DIRECTORY NAME COUNT [--hold]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tiers import START, block_record

from artesian.cache.tiers.nvme import NvmeTier


def main() -> None:
    directory, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    tier = NvmeTier(directory, budget_bytes=1 << 30, min_free_bytes=0, clock=lambda: START)
    if "--hold" in sys.argv:
        assert tier._lease is not None
        with tier._lease.hold(1.0):
            sys.stdout.write("held\n")
            sys.stdout.flush()
            time.sleep(60)
    for index in range(count):
        if tier.put([block_record((name, index), size=20_000)]):
            sys.stdout.write(f"{name}:{index}\n")
            sys.stdout.flush()
    tier.close()


if __name__ == "__main__":
    main()
