"""`artesian serve` as users start it: a process of its own with a real model, killed at the end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

ARTESIAN = (sys.executable, "-P", "-m", "artesian.clients.cli")
START_TIMEOUT_S = 60.0
IDLE_TIMEOUT_S = 2.0
"""What is left of requests whose clients have gone must be over by then."""
MODEL_NAME = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class RealServer:
    """A server that listens."""

    process: subprocess.Popen[bytes]
    url: str
    """Without /v1."""
    log: Path
    """What it wrote to stderr."""

    def metrics(self) -> dict[str, float]:
        """Return the gauges and counters of `artesian_` by name, summed over their labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        found = re.findall(r"^(artesian_\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)
        sums: dict[str, float] = {}
        for name, value in found:
            sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def assert_idle(self, within_s: float = IDLE_TIMEOUT_S) -> float:
        """Wait until nothing runs, nothing waits and every block is free; return how long that took."""
        began = time.monotonic()
        while True:
            seen = self.metrics()
            waited = time.monotonic() - began
            busy = [seen[f"artesian_{name}"] for name in ("num_requests_running", "num_requests_waiting")]
            if not any(busy) and seen["artesian_kv_blocks_free"] == seen["artesian_kv_blocks"]:
                assert seen["artesian_kv_cache_usage_perc"] == 0
                return waited
            assert waited < within_s, f"not idle after {waited:.1f} s: {seen}"
            time.sleep(0.02)

    def stop(self, timeout_s: float = 30) -> int:
        """Send SIGTERM; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


@contextlib.contextmanager
def real_server(
    model: Path, folder: Path, *flags: str, environ: dict[str, str] | None = None
) -> Iterator[RealServer]:
    """Serve `model` on the cpu backend, without a disk cache unless `--cache-dir` is among the flags;
    `folder` keeps the logs.

    Unless flags say otherwise on a free port, and with one thread: two that wait for each other take ten
    times as long when another process wants their cores.
    """
    log, said = folder / "server.log", folder / "server.out"
    disk = () if "--cache-dir" in flags else ("--no-disk-cache",)
    given = ("--backend", "cpu", "--served-model-name", MODEL_NAME, *disk, *flags)
    defaults = {"--port": "0", "--threads": "1"}
    ours = [word for flag, value in defaults.items() if flag not in flags for word in (flag, value)]
    command = [*ARTESIAN, "serve", str(model), *given, *ours]
    with log.open("wb") as stderr, said.open("wb") as stdout:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **(environ or {})},
        )
    try:
        url = _announced(process, said, log)
        yield RealServer(process, url, log)
    finally:
        process.kill()
        process.wait()


def _announced(process: subprocess.Popen[bytes], said: Path, log: Path) -> str:
    """Wait for the line that a user would try, and take the address from it."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while (line := re.search(r"^curl .*?(https?://\S+)/v1", said.read_text(), re.MULTILINE)) is None:
        assert process.poll() is None, f"the server ended before it was ready: {log.read_text()}"
        assert time.monotonic() < deadline, f"the server does not start: {log.read_text()}"
        time.sleep(0.05)
    return line[1]
