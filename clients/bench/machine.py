"""Where a measurement was made: commit, processor, memory, versions, and how busy the machine was."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import msgspec

PACKAGES = ("artesian", "numpy", "uvicorn", "uvloop", "starlette", "sse-starlette")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """As it was when the benchmark began."""

    commit: str
    """Empty when this is no checkout; ends in + when files differed from the commit."""
    cpu: str
    cores: int
    """Cores that this process may use."""
    memory_bytes: int
    system: str
    python: str
    packages: dict[str, str]
    load_average: float
    """Of the last minute: above 0 something else ran too."""
    started_at: str


def this_machine() -> Machine:
    """Look around. Linux only."""
    return Machine(
        commit=_commit(),
        cpu=_field(Path("/proc/cpuinfo"), "model name"),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=1024 * int(_field(Path("/proc/meminfo"), "MemTotal").split()[0]),
        system=platform.platform(),
        python=platform.python_version(),
        packages={name: version(name) for name in PACKAGES},
        load_average=os.getloadavg()[0],
        started_at=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, all its threads, to the nanosecond.

    Raises:
        OSError: there is no such process.
    """
    return time.clock_gettime((~pid << 3) | 2)  # the clock id that clock_getcpuclockid(3) makes of a pid


def thread_seconds(pid: int) -> dict[int, float]:
    """The same of each of its threads, by thread id.

    Raises:
        OSError: there is no such process.
    """
    spent = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            spent[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return spent


def peak_rss_bytes(pid: int) -> int:
    """The most memory that a process has had resident so far."""
    return 1024 * int(_field(Path(f"/proc/{pid}/status"), "VmHWM").split()[0])


def rss_bytes(pid: int) -> int:
    """The memory that a process has resident now."""
    return 1024 * int(_field(Path(f"/proc/{pid}/status"), "VmRSS").split()[0])


def _field(path: Path, name: str) -> str:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown" if name == "model name" else "0"


def _commit() -> str:
    """Only of Artesian's own checkout: an installed package may lie in somebody else's."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return ""
    try:
        head = subprocess.run(
            ["git", "-C", folder, "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
        changed = subprocess.run(
            ["git", "-C", folder, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
