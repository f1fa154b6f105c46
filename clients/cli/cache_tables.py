"""How `artesian cache` prints what it found."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ...cache.tiers import Entry
from .cache_prompts import Row
from .human import size, span

SHOWN_ID = 20
"""Enough of an id to name a prompt by."""
TABLE_WIDTH = 110


def table_of_prompts(rows: Sequence[Row], now: float) -> Table:
    """The listing. Columns without a value in any row are left out."""
    columns: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        columns["PROMPT"].append(row.id[:SHOWN_ID])
        columns["NAME"].append(",".join(row.names) if row.names != (row.id,) else "")
        columns["MODEL"].append(row.model or "")
        columns["TOKENS"].append("" if row.tokens is None else str(row.tokens))
        columns["CACHED"].append(str(row.cached_tokens))
        columns["SIZE"].append(size(row.bytes))
        columns["AGE"].append(span(now - row.created_at))
        columns["LAST USE"].append(f"{span(now - row.last_used_at)} ago")
        columns["EXPIRES"].append("pinned" if row.expires_at is None else f"in {span(row.expires_at - now)}")
        columns["KEY"].append(row.prompt_cache_key or "")
        columns["TENANT"].append(row.tenant or "")
    table = Table(box=None, pad_edge=False)
    filled = {name: texts for name, texts in columns.items() if any(texts)}
    for name in filled:
        justify = "right" if name in ("TOKENS", "CACHED", "SIZE") else "left"
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for texts in zip(*filled.values(), strict=True):
        table.add_row(*texts)
    return table


def print_blocks(entries: Sequence[Entry], limit: int, *, as_json: bool) -> None:
    """At most `limit` blocks, the newest first; 0 = all."""
    now = time.time()
    latest = sorted(entries, key=lambda entry: entry.found.created_at, reverse=True)
    shown = latest[:limit] if limit else latest
    rows = [
        {
            "key": entry.found.key.hex(),
            "parent": entry.parent.hex(),
            "depth": entry.depth,
            "bytes": entry.stored_bytes,
            "created_at": entry.found.created_at,
            "expires_at": entry.found.expires_at if math.isfinite(entry.found.expires_at) else None,
        }
        for entry in shown
    ]
    if as_json:
        print_json(rows)
        return
    table = Table("KEY", "PARENT", "DEPTH", "SIZE", "AGE", "EXPIRES", box=None, pad_edge=False)
    for entry in shown:
        ends = "pinned" if entry.found.pinned else f"in {span(entry.found.expires_at - now)}"
        table.add_row(
            entry.found.key.hex()[:16], entry.parent.hex()[:16], str(entry.depth),
            size(entry.stored_bytes), span(now - entry.found.created_at), ends,
        )  # fmt: skip
    console().print(table)


def print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def console() -> Console:
    """Standard output, wide enough for the tables."""
    width = max(Console().width, TABLE_WIDTH)
    return Console(highlight=False, markup=False, width=width)
