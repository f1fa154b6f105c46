"""`artesian cache`: the prompt cache on disk, with or without a server beside it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter
from rich.table import Table

from ...cache.archive import ArchiveError, Imported, export_records, import_records
from ...cache.audit import audit
from ...cache.config import CacheConfig
from ...cache.sizing import disk_budget
from ...cache.tiers import Entry, Kind
from ...cache.tiers.nvme import NvmeTier
from ...engine.load.sources import DEFAULT_MODEL
from ...server.config import ConfigError
from .cache_dir import NO_BUDGET, Where, check_written, opened, written_whole
from .cache_prompts import Contents, Prompt, Selection
from .cache_tables import console, print_blocks, print_json, table_of_prompts
from .cache_why import explain_prompt
from .flags import parse_bytes
from .human import records, size, span
from .settings import EngineFlags, Place, configure

Dash = Annotated[str, Parameter(allow_leading_hyphen=True)]
"""An argument that may be `-`."""
Size = Annotated[int | None, Parameter(converter=lambda _type, tokens: parse_bytes(tokens[0].value))]

cache = App(name="cache", help="Look into the prompt cache on disk. Works beside a running server.")


@cache.command
def ls(
    *,
    where: Where | None = None,
    blocks: Annotated[bool, Parameter(negative=())] = False,
    limit: int = 50,
) -> None:
    """List cached prompts, the last used first. A conversation is one row.

    Parameters
    ----------
    blocks
        List single blocks instead.
    limit
        Rows at most; 0 = all.
    """
    where = where or Where()
    with opened(where.path) as tier:
        if blocks:
            print_blocks(list(tier.entries(Kind.BLOCK)), limit, as_json=where.json)
            return
        rows = [prompt.row() for prompt in Contents.read(tier).prompts()]
    shown = rows[:limit] if limit else rows
    if where.json:
        print_json(msgspec.to_builtins(shown))
        return
    console().print(table_of_prompts(shown, time.time()) if rows else f"Nothing is cached in {where.path}.")
    if len(shown) < len(rows):
        console().print(f"... and {len(rows) - len(shown)} more (--limit 0 lists all)")


@cache.command
def stat(*, where: Where | None = None) -> None:
    """Sums: bytes, records, what expires when, for which models."""
    where = where or Where()
    now = time.time()
    with opened(where.path) as tier:
        contents = Contents.read(tier)
        stats, root = tier.stats, tier.root
        segments = len(tier.files.names())
    entries = [*contents.blocks, *contents.named]
    prompts = contents.prompts()
    disk = os.statvfs(root)
    ends = [entry.found.expires_at - now for entry in entries]
    facts: dict[str, Any] = {
        "directory": str(where.path),
        "format": root.name,
        "bytes": stats.bytes,
        "default_budget_bytes": disk_budget(where.path),
        "disk_free_bytes": disk.f_bavail * disk.f_frsize,
        "journal_bytes": _length(root / "journal"),
        "segments": segments,
        "records": stats.records,
        "blocks": len(contents.blocks),
        "prompts": len(prompts),
        "names": len(contents.named),
        "pinned": sum(entry.found.pinned for entry in entries),
        "expire_within_1h": sum(end < 3600 for end in ends),
        "expire_within_24h": sum(end < 86400 for end in ends),
        "oldest_s": max((now - entry.found.created_at for entry in entries), default=0.0),
    }
    models = _models(contents, prompts)
    if where.json:
        print_json({**facts, "models": models})
        return
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        text = size(value) if name.endswith("bytes") else span(value) if name.endswith("_s") else str(value)
        table.add_row(name.removesuffix("_bytes").removesuffix("_s").replace("_", " "), text)
    for model in models:
        text = f"{model['blocks']} blocks of {model['block_tokens']} tokens, {size(model['bytes'])}"
        table.add_row(f"model {model['model'] or model['identity']}", text)
    console().print(table)


@cache.command
def why(
    prompt: Dash,
    /,
    *,
    model: str = DEFAULT_MODEL,
    cache_salt: str | None = None,
    api_key: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    config: Path | None = None,
    place: Place | None = None,
    engine: EngineFlags | None = None,
) -> None:
    """Say how much of a prompt would be reused from disk, and what ends it.

    Give it the flags, or the file, that the server is started with: another KV type, block size or template
    makes other blocks.

    Parameters
    ----------
    prompt
        Text, `-` for standard input, or JSON (or a JSON file) with `messages` or `prompt`, as for the API.
    model
        The model that serves it.
    cache_salt
        The request's cache_salt. [default: the JSON's]
    api_key
        The API key it is sent with.
    json
        Print JSON.
    config
        TOML file with the tables [server] and [engine].
    """
    fields = _prompt_fields(prompt)
    server_config, engine_config = configure(model, config, place, None, engine)
    assert engine_config.cache.cache_dir is not None
    with opened(engine_config.cache.cache_dir) as tier:
        answer = explain_prompt(
            tier, fields, engine_config, api_key, cache_salt, normalises=server_config.normalise_prompts
        )
    if json:
        print_json(msgspec.to_builtins(answer))
    else:
        console().print("\n".join(answer.lines(time.time())))


@cache.command
def verify(*, repair: Annotated[bool, Parameter(negative=())] = False, where: Where | None = None) -> None:
    """Read every record and check it. Exit code 1 if something is wrong.

    Parameters
    ----------
    repair
        Drop what is bad.
    """
    where = where or Where()
    with opened(where.path, budget_bytes=NO_BUDGET if repair else None) as tier:
        found = audit(tier, time.time())
        if repair:
            if found.damaged:
                tier.rebuild_index()
            tier.maintain()
            tier.erase(list(found.bad))
            check_written(tier)
    if where.json:
        facts = {name: getattr(found, name) for name in ("good", "payload_bytes", "expired", "unreachable")}
        bad = {key.hex(): text for key, text in found.bad.items()}
        print_json({**facts, "bad": bad, "stray_files": found.stray_files})
    else:
        for key, text in found.bad.items():
            console().print(f"bad {key.hex()[:16]}: {text}", soft_wrap=True)
        for name in found.stray_files:
            console().print(f"no record is in {name}", soft_wrap=True)
        console().print(f"{records(found.good)} sound ({size(found.payload_bytes)}), {len(found.bad)} not")
        if found.unreachable:
            console().print(f"{found.unreachable} sound blocks follow one that is gone: they just expire")
        if repair and not found.is_sound:
            console().print("what is bad was dropped")
    if not found.is_sound:
        sys.exit(1)


@cache.command
def gc(
    *,
    rebuild_index: Annotated[bool, Parameter(negative=())] = False,
    cache_bytes: Size = None,
    where: Where | None = None,
) -> None:
    """Expire and reclaim now, instead of when a server next does.

    Parameters
    ----------
    rebuild_index
        Make the index anew from the segments first.
    cache_bytes
        Let the prompts that expire first give way, until the cache takes no more than this.
    """
    where = where or Where()
    with opened(where.path, budget_bytes=NO_BUDGET if cache_bytes is None else cache_bytes) as tier:
        before = tier.stats.bytes
        if rebuild_index:
            tier.rebuild_index()
        tier.maintain()
        check_written(tier)
        facts = {"expired": tier.stats.expired, "evicted": tier.stats.evicted, "bytes": tier.stats.bytes}
    if where.json:
        print_json({**facts, "bytes_before": before})
    else:
        evicted = f", {facts['evicted']} gave way" if facts["evicted"] else ""
        console().print(
            f"{records(facts['expired'])} had expired{evicted}; {size(before)} -> {size(facts['bytes'])}"
        )


@cache.command
def rm(
    *prompts: str,
    key: str | None = None,
    all: Annotated[bool, Parameter(negative=())] = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative=())] = False,
    where: Where | None = None,
) -> None:
    """Delete prompts and all that continues them; their bytes are erased.

    What is pinned for the sake of another name stays. A running server may have a prompt in memory still:
    DELETE /v1/caches deletes there too.

    Parameters
    ----------
    prompts
        As `artesian cache ls` names them: response ids, names, or beginnings of keys.
    key
        Every prompt of this prompt_cache_key.
    all
        Everything.
    yes
        Do not ask.
    """
    where = where or Where()
    with opened(where.path, budget_bytes=NO_BUDGET) as tier:
        chosen = _selected(tier, prompts, key, all)
        doomed = [entry for entry in chosen.entries if entry.found.key not in chosen.held]
        total = sum(entry.stored_bytes for entry in doomed)
        if doomed and not yes and not _confirmed(f"Delete {records(len(doomed))} ({size(total)})?"):
            raise ConfigError("nothing was deleted (say --yes)")
        erased = tier.erase([entry.found.key for entry in doomed])
        tier.maintain()
        check_written(tier)
    if where.json:
        print_json({"deleted_records": erased, "bytes": total, "pinned_records": len(chosen.held)})
        return
    console().print(f"{records(erased)} deleted ({size(total)})")
    if chosen.held:
        console().print(f"{len(chosen.held)} stay: they are pinned by name")


@cache.command(name="export")
def export_(
    out: Dash,
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
    with opened(where.path) as tier:
        chosen = _selected(tier, prompts, key, not prompts and key is None).entries
        with written_whole(out) as file:
            written, failed = export_records(tier, chosen, file, time.time())
    if where.json and out != "-":
        print_json({"records": written, "failed": failed})
    else:
        bad = f", {failed} could not be read" if failed else ""
        sys.stderr.write(f"{records(written)} exported{bad}\n")
    if failed:
        sys.exit(1)


@cache.command(name="import")
def import_(file: Dash, /, *, where: Where | None = None) -> None:
    """Read a file that `export` wrote. Each record is checked and keeps what is left of its time.

    What is here already stays as it is. Exit code 1 if not all could be taken.

    Parameters
    ----------
    file
        The file, or `-` for standard input.
    """
    where = where or Where()
    floor = CacheConfig().cache_min_free_bytes
    try:
        with opened(where.path, budget_bytes=NO_BUDGET, min_free_bytes=floor, creates=True) as tier:
            if file == "-":
                counts = import_records(tier, sys.stdin.buffer, time.time)
            else:
                with open(file, "rb") as source:
                    counts = import_records(tier, source, time.time)
    except ArchiveError as err:
        raise ConfigError(f"{file}: {err}") from err
    if where.json:
        print_json({name: getattr(counts, name) for name in Imported.__slots__})
    else:
        console().print(
            f"{records(counts.stored)} imported; {counts.present} were here, {counts.expired} had expired, "
            f"{counts.failed} could not be taken"
        )
        if not counts.is_complete:
            console().print("the archive is cut off or damaged: what follows could not be read")
    if counts.failed or not counts.is_complete:
        sys.exit(1)


# -- pieces ----------------------------------------------------------------------------------------


def _selected(tier: NvmeTier, prompts: Sequence[str], key: str | None, everything: bool) -> Selection:
    """The records that a command is about."""
    contents = Contents.read(tier)
    if everything:
        return Selection([*contents.blocks, *contents.named], set(), [])
    if not prompts and key is None:
        raise ConfigError("say which prompts: ids as `artesian cache ls` shows them, --key, or --all")
    chosen = contents.select(prompts, key)
    if chosen.unknown:
        raise ConfigError(f"no cached prompt is called {chosen.unknown[0]!r}")
    return chosen


def _prompt_fields(prompt: str) -> dict[str, Any]:
    """A prompt as the API takes it, from what was typed."""
    text = sys.stdin.read() if prompt == "-" else prompt
    path = Path(prompt)
    if len(prompt) < 1024 and prompt.endswith(".json") and " " not in prompt:
        try:
            text = path.read_text("utf-8")
        except OSError as err:
            raise ConfigError(f"{prompt}: {err.strerror}") from err
    if text.lstrip().startswith("{"):
        try:
            fields = json.loads(text)
        except ValueError as err:
            raise ConfigError(f"the prompt is not JSON: {err}") from err
        if isinstance(fields, dict) and ("messages" in fields) != ("prompt" in fields):
            return fields
        raise ConfigError("the prompt's JSON must have either messages or prompt")
    return {"prompt": text}


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        return False
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def _models(contents: Contents, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """By identity of the blocks, the most bytes first."""
    names = {chain.leaf.identity: p.label.model for p in prompts if p.label for chain in p.chains}
    blocks: dict[bytes, list[Entry]] = defaultdict(list)
    for entry in contents.blocks:
        blocks[entry.identity].append(entry)
    models = [
        {
            "identity": identity.hex()[:16],
            "model": names.get(identity),
            "block_tokens": len(entries[0].content) // 4,
            "blocks": len(entries),
            "prompts": sum(p.longest.leaf.identity == identity for p in prompts),
            "bytes": sum(entry.stored_bytes for entry in entries),
        }
        for identity, entries in blocks.items()
    ]
    return sorted(models, key=lambda model: -int(str(model["bytes"])))


def _length(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_size
    except OSError:
        return 0
