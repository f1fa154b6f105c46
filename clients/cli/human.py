"""Numbers as people say them."""

from __future__ import annotations


def size(count: float) -> str:
    """A number of bytes: 512 B, 8.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def span(seconds: float) -> str:
    """A time span: 12s, 5m, 3h 20m, 2d 4h."""
    left = max(0, int(seconds))
    if left < 60:
        return f"{left}s"
    if left < 3600:
        return f"{left // 60}m"
    if left < 86400:
        return f"{left // 3600}h {left % 3600 // 60}m"
    return f"{left // 86400}d {left % 86400 // 3600}h"


def records(count: int) -> str:
    """`1 record`, `3 records`."""
    return f"{count} record{'' if count == 1 else 's'}"
