"""`artesian doctor`: what this machine offers, found out by trying it."""

from __future__ import annotations

import os
import pkgutil
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from ... import kernels
from ...cache.sizing import disk_budget
from ...cache.tiers.segment_files import can_punch
from ...engine.load.sources import CATALOGUE, installed
from ...kernels.backend import BackendError, open_backend
from ...server.config import ConfigError
from . import environment
from .cache_dir import FORMAT, opened
from .human import size

SIGNS = {"good": "[green]✓[/]", "note": "[yellow]·[/]", "bad": "[red]✗[/]"}
ROOM_TO_WORK_BYTES = 1 << 30
FAST_FLAGS = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8", "neon", "asimd", "sve")
"""Instruction sets that kernels may be written for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    state: Literal["good", "note", "bad"]
    subject: str
    text: str


def doctor(*, cache_dir: Path | None = None) -> None:
    """Check what this machine offers, and say what is missing. Exit code 1 if serving cannot work.

    Parameters
    ----------
    cache_dir
        The disk cache to check. [default: `prompts` in ARTESIAN_HOME, or in the user's cache folder]
    """
    found = list(_findings(cache_dir or environment.prompts_dir()))
    table = Table.grid(padding=(0, 2))
    for finding in found:
        table.add_row(SIGNS[finding.state], finding.subject, finding.text)
    Console(highlight=False).print(table)
    if any(finding.state == "bad" for finding in found):
        sys.exit(1)


def _findings(cache_dir: Path) -> Iterator[Finding]:
    yield Finding("good", "artesian", version("artesian"))
    yield Finding("good", "python", f"{platform.python_version()} on {platform.platform(terse=True)}")
    yield Finding("good", "processor", _processor())
    yield _compiler()
    yield from _backends()
    for package in ("torch", "triton", "transformers"):
        yield _package(package)
    yield _folder(environment.home())
    yield _disk_cache(cache_dir)
    yield from _models()


def _processor() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    flags: set[str] = set()
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = set(line.partition(":")[2].split())
                break
    fast = " ".join(flag for flag in FAST_FLAGS if flag in flags)
    return f"{platform.machine()}, {usable} cores usable{f', {fast}' if fast else ''}"


def _compiler() -> Finding:
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return Finding("good", "C compiler", path)
    return Finding("note", "C compiler", "none; the cpu backend cannot be compiled here")


def _backends() -> Iterator[Finding]:
    """Every backend that is in the checkout, opened; one is enough to serve."""
    problems = []
    works = False
    for name in sorted(_backend_names()):
        try:
            backend = open_backend(name)
        except (BackendError, ImportError, OSError) as err:
            problems.append(Finding("note", f"backend {name}", str(err).removeprefix(f"backend {name} ")))
        else:
            works = True
            formats = ", ".join(sorted(backend.formats()))
            yield Finding("good", f"backend {name}", f"{len(backend.ops())} ops; weights {formats}")
    yield from problems
    if not works:
        yield Finding("bad", "backends", "none works here: install a C compiler, then run make setup")


def _backend_names() -> set[str]:
    """Sub-packages of kernels with a backend, and the reference."""
    folder = Path(kernels.__path__[0])
    packages = {module.name for module in pkgutil.iter_modules([str(folder)]) if module.ispkg}
    return {name for name in packages if (folder / name / "backend.py").exists()} | {"reference"}


def _package(name: str) -> Finding:
    try:
        return Finding("good", name, version(name))
    except PackageNotFoundError:
        return Finding("note", name, "not installed; serving on the cpu backend needs none")


def _folder(home: Path) -> Finding:
    existing = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        return Finding("bad", "cache", f"{home} cannot be written; set ARTESIAN_HOME")
    state: Literal["good", "note"] = "good" if free > ROOM_TO_WORK_BYTES else "note"
    return Finding(state, "cache", f"{home}, {free / 1e9:.1f} GB free")


def _disk_cache(directory: Path) -> Finding:
    """A server works without it, so that nothing here is worse than a note."""
    existing = next(folder for folder in (directory, *directory.parents) if os.path.exists(folder))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding("note", "disk cache", f"{directory} cannot be written: prompts are not kept")
    room = f"may take {size(disk_budget(directory))}"
    if not can_punch(existing):
        room += "; here, deleted space comes back in whole files only"
    if (directory / FORMAT).exists():
        try:
            with opened(directory) as tier:
                return Finding("good", "disk cache", f"{directory}, takes {size(tier.stats.bytes)}, {room}")
        except ConfigError as err:
            return Finding("note", "disk cache", str(err))
    others = ", ".join(sorted(folder.name for folder in directory.glob("v[0-9]*")))
    if others:
        return Finding("note", "disk cache", f"{directory}, {room}; what is there has format {others}")
    return Finding("good", "disk cache", f"{directory}, empty, {room}")


def _models() -> Iterator[Finding]:
    for model in CATALOGUE:
        if installed(model, environment.models_dir()):
            yield Finding("good", model.name, f"{model.title}, {model.size_bytes / 1e6:.0f} MB, here")
        else:
            yield Finding("note", model.name, f"{model.title}; artesian pull {model.name} brings it")
