"""Where blocks and named records live below the device: RAM, NVMe, a shared directory. One protocol, bytes
only; which block is worth keeping where is the mover's business."""

from .base import (
    NO_KEY,
    Entry,
    Fate,
    Found,
    Kind,
    Record,
    Tier,
    TierFault,
    TierStats,
    erase_all,
    lasting,
)

__all__ = [
    "NO_KEY", "Entry", "Fate", "Found", "Kind", "Record", "Tier", "TierFault", "TierStats", "erase_all",
    "lasting",
]  # fmt: skip
