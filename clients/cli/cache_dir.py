"""A disk cache's directory, opened by a tool beside whatever servers use it."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

from cyclopts import Parameter

from ...cache.tiers import TierFault
from ...cache.tiers.nvme import NvmeTier
from ...cache.tiers.segment import FORMAT_VERSION
from ...server.config import ConfigError
from . import environment

FORMAT = f"v{FORMAT_VERSION}"
BUSY = "another process is writing to it; try again"
NO_BUDGET = 1 << 62
"""For commands that must let nothing give way: a server may have been given more than the default."""


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


@contextmanager
def opened(
    path: Path, *, budget_bytes: int | None = None, min_free_bytes: int = 0, creates: bool = False
) -> Iterator[NvmeTier]:
    """The disk tier of a directory; for reading only, unless a budget is given."""
    if not creates:
        check_there(path)
    log = logging.getLogger(NvmeTier.__module__)
    level = log.level
    log.setLevel(logging.ERROR)  # a command says itself, and once, what is wrong
    tier = NvmeTier(
        path,
        budget_bytes=budget_bytes or NO_BUDGET,
        min_free_bytes=min_free_bytes,
        clock=time.time,
        read_only=budget_bytes is None,
    )
    try:
        if not tier.is_open:
            raise ConfigError(f"the prompt cache in {path} cannot be opened: {tier.problem or BUSY}")
        yield tier
    except TierFault as err:
        raise ConfigError(f"the prompt cache in {path} could not be changed: {tier.problem or err}") from err
    finally:
        tier.close()
        log.setLevel(level)


def check_there(path: Path) -> None:
    """Raises `ConfigError` if a directory holds no cache of this version."""
    if not path.is_dir():
        raise ConfigError(f"there is no prompt cache in {path}")
    try:
        found = sorted(f.name for f in path.iterdir() if f.name[:1] == "v" and f.name[1:].isdecimal())
    except OSError as err:
        raise ConfigError(f"the prompt cache in {path} cannot be read: {err.strerror}") from err
    if FORMAT not in found:
        others = f", only one of format {', '.join(found)}" if found else ""
        raise ConfigError(f"there is no prompt cache of format {FORMAT} in {path}{others}")


def check_written(tier: NvmeTier) -> None:
    """Raises `ConfigError` if changes did not come through."""
    if tier.stats.suspended or tier.stats.faults.get("lease"):
        reason = tier.problem if tier.stats.suspended else ""
        raise ConfigError(f"the prompt cache in {tier.directory} could not be changed: {reason or BUSY}")


@contextmanager
def written_whole(out: str) -> Iterator[BinaryIO]:
    """A file that has its name only when it is complete, and is its owner's alone; `-` = standard output."""
    if out == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(out)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(fd)
        fresh.rename(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
