"""`artesian cache`: the prompt cache on disk, with or without a server beside it."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from ...cache.archive import ArchiveError, export_records, import_records
from ...cache.config import CacheConfig
from ...cache.listing import Chain, chains
from ...cache.sizing import disk_budget
from ...cache.tiers import Entry, Kind, TierFault
from ...cache.tiers.nvme import NvmeTier
from ...engine.load.sources import DEFAULT_MODEL
from ...server.cache_trace import NAMESPACE, Trace, unpack_tokens
from ...server.config import ConfigError
from . import environment
from .cache_why import explain_prompt
from .settings import Place

SHOWN_ID = 20
"""Enough of an id to name a prompt by."""
TABLE_WIDTH = 110

cache = App(name="cache", help="Look into the prompt cache on disk. Works beside a running server.")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Where:
    """Which cache, and how to print."""

    cache_dir: Path | None = None
    """The cache's directory. [default: `prompts` in ARTESIAN_HOME, or in the user's cache folder]"""
    json: Annotated[bool, Parameter(negative=())] = False
    """Print JSON instead of a table."""

    @property
    def path(self) -> Path:
        return self.cache_dir or environment.prompts_dir()


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt of the listing."""

    id: str
    """The response it belongs to, or the key of its last block."""
    model: str
    tokens: int
    bytes: int
    created_at: float
    last_used_at: float
    expires_at: float | None
    pinned: bool
    prompt_cache_key: str


@cache.command
def ls(
    *,
    where: Where | None = None,
    blocks: Annotated[bool, Parameter(negative=())] = False,
    limit: int = 50,
) -> None:
    """List cached prompts, the last used first.

    Parameters
    ----------
    blocks
        List single blocks instead.
    limit
        Rows at most; 0 = all.
    """
    where = where or Where()
    with _opened(where.path) as tier:
        entries = list(tier.entries(Kind.BLOCK))
        traces = [trace for _, trace in _traces(tier)]
    if blocks:
        _print_blocks(entries, where, limit)
        return
    rows = _rows(chains(entries), traces)
    shown = rows[:limit] if limit else rows
    if where.json:
        _print_json([msgspec.to_builtins(row) for row in shown])
        return
    table = Table(box=None, pad_edge=False)
    for name in ("PROMPT", "MODEL", "TOKENS", "SIZE", "AGE", "LAST USE", "EXPIRES", "KEY"):
        table.add_column(name, justify="right" if name in ("TOKENS", "SIZE") else "left", no_wrap=True)
    now = time.time()
    for row in shown:
        expires = "pinned" if row.expires_at is None else f"in {_span(row.expires_at - now)}"
        table.add_row(
            row.id[:SHOWN_ID], row.model, str(row.tokens), _size(row.bytes), _span(now - row.created_at),
            f"{_span(now - row.last_used_at)} ago", expires, row.prompt_cache_key,
        )  # fmt: skip
    _out().print(table if rows else "Nothing is cached here.")
    if len(shown) < len(rows):
        _out().print(f"... and {len(rows) - len(shown)} more (--limit 0 lists all)")


@cache.command
def stat(*, where: Where | None = None) -> None:
    """Sums: bytes, records, what expires when."""
    where = where or Where()
    now = time.time()
    with _opened(where.path) as tier:
        entries = [*tier.entries(Kind.BLOCK), *tier.entries(Kind.NAMED)]
        stats, root = tier.stats, tier.root
    disk = os.statvfs(root)
    found = chains(entry for entry in entries if entry.kind is Kind.BLOCK)
    ends = [entry.found.expires_at - now for entry in entries]
    facts: dict[str, Any] = {
        "directory": str(where.path),
        "format": root.name,
        "bytes": stats.bytes,
        "default_budget_bytes": disk_budget(where.path),
        "disk_free_bytes": disk.f_bavail * disk.f_frsize,
        "records": stats.records,
        "blocks": sum(entry.kind is Kind.BLOCK for entry in entries),
        "prompts": len(found),
        "names": sum(entry.kind is Kind.NAMED for entry in entries),
        "pinned": sum(entry.found.pinned for entry in entries),
        "models": len({entry.identity for entry in entries if entry.kind is Kind.BLOCK}),
        "segments": len(list(tier.files.names())),
        "expire_within_1h": sum(end < 3600 for end in ends),
        "expire_within_24h": sum(end < 86400 for end in ends),
        "oldest_s": max((now - entry.found.created_at for entry in entries), default=0.0),
    }
    if where.json:
        _print_json(facts)
        return
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        text = _size(value) if name.endswith("bytes") else _span(value) if name.endswith("_s") else str(value)
        table.add_row(name.removesuffix("_bytes").removesuffix("_s").replace("_", " "), text)
    _out().print(table)


@cache.command
def why(
    prompt: str,
    /,
    *,
    model: str = DEFAULT_MODEL,
    cache_salt: str | None = None,
    api_key: str | None = None,
    where: Where | None = None,
    place: Place | None = None,
) -> None:
    """Say how much of a prompt would be reused from disk, and what ends it.

    Parameters
    ----------
    prompt
        Text, `-` for standard input, or JSON (or a JSON file) with `messages` or `prompt`, as for the API.
    model
        The model that serves it.
    cache_salt
        The request's cache_salt.
    api_key
        The API key it is sent with.
    """
    where = where or Where()
    with _opened(where.path) as tier:
        answer = explain_prompt(tier, _prompt_fields(prompt), model, place or Place(), api_key, cache_salt)
    if where.json:
        _print_json(msgspec.to_builtins(answer))
    else:
        _out().print("\n".join(answer.lines(time.time(), _span)))


@cache.command
def verify(*, repair: Annotated[bool, Parameter(negative=())] = False, where: Where | None = None) -> None:
    """Read every record and check it. Exit code 1 if one is bad.

    Parameters
    ----------
    repair
        Drop what is bad.
    """
    where = where or Where()
    good = read_bytes = 0
    bad: list[str] = []
    with _opened(where.path, write=repair) as tier:
        for kind in Kind:
            for found, _ in tier.listed(kind):
                try:
                    header = tier.header(found)
                    payload = bytearray(found.payload_bytes)
                    tier.read(found, header.kind, header.identity, header.content, memoryview(payload))
                    good += 1
                    read_bytes += len(payload)
                except TierFault as err:
                    bad.append(f"{found.key.hex()[:16]}: {err}")
        if repair:
            tier.maintain()
        faults = dict(tier.stats.faults)
    facts = {"good": good, "bad": len(bad), "bytes": read_bytes, "faults": faults}
    if where.json:
        _print_json({**facts, "bad_records": bad})
    else:
        for line in bad:
            _out().print(f"bad {line}")
        _out().print(f"{good} records are sound ({_size(read_bytes)}), {len(bad)} are not")
    if bad:
        sys.exit(1)


@cache.command
def gc(*, rebuild_index: Annotated[bool, Parameter(negative=())] = False, where: Where | None = None) -> None:
    """Expire and reclaim now, instead of when a server next does.

    Parameters
    ----------
    rebuild_index
        Make the index anew from the segments first.
    """
    where = where or Where()
    with _opened(where.path, write=True) as tier:
        before = tier.stats.bytes
        if rebuild_index:
            tier.rebuild_index()
        tier.maintain()
        facts = {"expired": tier.stats.expired, "evicted": tier.stats.evicted, "bytes": tier.stats.bytes}
    if where.json:
        _print_json({**facts, "bytes_before": before})
    else:
        _out().print(f"{facts['expired']} records had expired; {_size(before)} -> {_size(facts['bytes'])}")


@cache.command
def rm(
    *prompts: str,
    key: str | None = None,
    all: Annotated[bool, Parameter(negative=())] = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative=())] = False,
    where: Where | None = None,
) -> None:
    """Delete prompts; their bytes are erased.

    Parameters
    ----------
    prompts
        As `artesian cache ls` names them: response ids, or beginnings of keys.
    key
        Every prompt of this prompt_cache_key.
    all
        Everything.
    yes
        Do not ask.
    """
    where = where or Where()
    with _opened(where.path, write=True) as tier:
        doomed = _selected(tier, prompts, key, all)
        size = sum(entry.stored_bytes for entry in doomed)
        if doomed and not yes and not _confirmed(f"Delete {len(doomed)} records ({_size(size)})?"):
            raise ConfigError("nothing was deleted")
        erased = tier.erase([entry.found.key for entry in doomed])
        tier.maintain()
    if where.json:
        _print_json({"deleted_records": erased, "bytes": size})
    else:
        _out().print(f"{erased} records deleted ({_size(size)})")


@cache.command(name="export")
def export_(
    out: str,
    /,
    *prompts: str,
    key: str | None = None,
    where: Where | None = None,
) -> None:
    """Write prompts to one file, for another machine or directory.

    Parameters
    ----------
    out
        The file, or `-` for standard output.
    prompts
        As `artesian cache ls` names them; none = all.
    key
        Every prompt of this prompt_cache_key.
    """
    where = where or Where()
    with _opened(where.path) as tier:
        chosen = _selected(tier, prompts, key, not prompts and key is None)
        if out == "-":
            written, failed = export_records(tier, chosen, sys.stdout.buffer, time.time())
            sys.stdout.buffer.flush()
        else:
            path = Path(out)
            fresh = path.with_name(f".{path.name}.tmp")
            with open(fresh, "wb", opener=lambda p, flags: os.open(p, flags, 0o600)) as file:
                written, failed = export_records(tier, chosen, file, time.time())
            fresh.rename(path)
    sys.stderr.write(f"{written} records exported{f', {failed} could not be read' if failed else ''}\n")


@cache.command(name="import")
def import_(file: str, /, *, where: Where | None = None) -> None:
    """Read a file that `export` wrote; each record is checked and keeps what is left of its time.

    Parameters
    ----------
    file
        The file, or `-` for standard input.
    """
    where = where or Where()
    try:
        with _opened(where.path, write=True, create=True) as tier:
            if file == "-":
                counts = import_records(tier, sys.stdin.buffer, time.time)
            else:
                with open(file, "rb") as source:
                    counts = import_records(tier, source, time.time)
    except ArchiveError as err:
        raise ConfigError(f"{file}: {err}") from err
    there, expired, bad = counts
    if where.json:
        _print_json({"records": there, "expired": expired, "failed": bad})
    else:
        _out().print(f"{there} records are here now, {expired} had expired, {bad} could not be taken")
    if bad:
        sys.exit(1)


# -- pieces ----------------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path, *, write: bool = False, create: bool = False) -> Iterator[NvmeTier]:
    """The disk tier of a directory."""
    if not create and not path.is_dir():
        raise ConfigError(f"there is no prompt cache in {path}")
    config = CacheConfig()
    tier = NvmeTier(
        path,
        budget_bytes=disk_budget(path),
        min_free_bytes=config.cache_min_free_bytes,
        default_ttl_s=config.cache_ttl,
        clock=time.time,
        read_only=not write,
    )
    try:
        if not tier.is_open:
            raise ConfigError(f"the prompt cache in {path} cannot be opened: {tier.problem}")
        yield tier
    finally:
        tier.close()


def _traces(tier: NvmeTier) -> list[tuple[Entry, Trace]]:
    """The prompts that were answered, as the server remembers them."""
    traces: list[tuple[Entry, Trace]] = []
    for entry in tier.entries(Kind.NAMED):
        if entry.content.startswith(NAMESPACE.encode() + b"\0"):
            value = bytearray(entry.found.payload_bytes)
            try:
                tier.read(entry.found, Kind.NAMED, entry.identity, entry.content, memoryview(value))
                traces.append((entry, msgspec.msgpack.decode(value, type=Trace)))
            except (TierFault, msgspec.DecodeError):
                continue
    return traces


def _rows(found: Sequence[Chain], traces: Sequence[Trace]) -> list[Row]:
    """Name each chain by the latest response whose prompt lies on it."""
    known = sorted(
        ((unpack_tokens(t.count, t.packed).astype("<i4").tobytes(), t) for t in traces),
        key=lambda pair: pair[1].created_at,
        reverse=True,
    )
    rows: list[Row] = []
    for chain in found:
        content, block = chain.content, len(chain.leaf.content)
        trace = None
        for tokens, candidate in known:
            full = tokens[: min(len(tokens) // block * block, len(content))]
            if full and content.startswith(full):
                trace = candidate
                break
        rows.append(
            Row(
                id=trace.id if trace else chain.leaf.found.key.hex()[:16],
                model=trace.model if trace else "",
                tokens=chain.tokens,
                bytes=chain.stored_bytes,
                created_at=chain.created_at,
                last_used_at=chain.last_used_at,
                expires_at=chain.expires_at if math.isfinite(chain.expires_at) else None,
                pinned=chain.pinned,
                prompt_cache_key=trace.key if trace else "",
            )
        )
    return rows


def _selected(tier: NvmeTier, prompts: Sequence[str], key: str | None, everything: bool) -> list[Entry]:
    """The records that a command is about. Blocks that a prompt shares with others are its own too."""
    entries = list(tier.entries(Kind.BLOCK))
    if everything:
        return [*entries, *tier.entries(Kind.NAMED)]
    if not prompts and key is None:
        raise ConfigError("say which prompts: ids as `artesian cache ls` shows them, --key, or --all")
    found = chains(entries)
    traces = _traces(tier)
    rows = _rows(found, [trace for _, trace in traces])
    chosen: dict[bytes, Entry] = {}
    for wanted in prompts:
        hits = [
            chain
            for chain, row in zip(found, rows, strict=True)
            if len(wanted) >= 8
            and (row.id.startswith(wanted) or chain.leaf.found.key.hex().startswith(wanted))
        ]
        if not hits:
            raise ConfigError(f"no cached prompt is called {wanted!r}")
        chosen |= {entry.found.key: entry for chain in hits for entry in chain.blocks}
    for chain, row in zip(found, rows, strict=True):
        if key is not None and row.prompt_cache_key == key:
            chosen |= {entry.found.key: entry for entry in chain.blocks}
    for entry, trace in traces:
        named = any(len(wanted) >= 8 and trace.id.startswith(wanted) for wanted in prompts)
        if named or (key is not None and trace.key == key):
            chosen[entry.found.key] = entry
    return list(chosen.values())


def _prompt_fields(prompt: str) -> dict[str, Any]:
    """A prompt as the API takes it, from what was typed."""
    text = sys.stdin.read() if prompt == "-" else prompt
    path = Path(prompt)
    if len(prompt) < 1024 and prompt.endswith(".json") and path.is_file():
        text = path.read_text("utf-8")
    if text.lstrip().startswith("{"):
        try:
            fields = json.loads(text)
        except ValueError as err:
            raise ConfigError(f"the prompt is not JSON: {err}") from err
        if isinstance(fields, dict) and ("messages" in fields) != ("prompt" in fields):
            return fields
        raise ConfigError("the prompt's JSON must have either messages or prompt")
    return {"prompt": text}


def _print_blocks(entries: Sequence[Entry], where: Where, limit: int) -> None:
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
    if where.json:
        _print_json(rows)
        return
    table = Table("KEY", "PARENT", "DEPTH", "SIZE", "AGE", "EXPIRES", box=None, pad_edge=False)
    for entry in shown:
        ends = "pinned" if entry.found.pinned else f"in {_span(entry.found.expires_at - now)}"
        table.add_row(
            entry.found.key.hex()[:16], entry.parent.hex()[:16], str(entry.depth),
            _size(entry.stored_bytes), _span(now - entry.found.created_at), ends,
        )  # fmt: skip
    _out().print(table)


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        return False
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _out() -> Console:
    console = Console(highlight=False, markup=False)
    return Console(highlight=False, markup=False, width=max(console.width, TABLE_WIDTH))


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def _span(seconds: float) -> str:
    """A time span as people say it: 12s, 5m, 3h 20m, 2d 4h."""
    left = max(0, int(seconds))
    if left < 60:
        return f"{left}s"
    if left < 3600:
        return f"{left // 60}m"
    if left < 86400:
        return f"{left // 3600}h {left % 3600 // 60}m"
    return f"{left // 86400}d {left % 86400 // 3600}h"
