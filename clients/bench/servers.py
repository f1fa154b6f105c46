"""Servers as child processes: start, wait until they answer, stop. Nothing of what is asked of them."""

from __future__ import annotations

import contextlib
import http.client
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .load import LoadError

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.003


@dataclass(frozen=True, slots=True)
class Child:
    """A server that runs as our child, listening on this port of 127.0.0.1."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    started: float
    """`time.perf_counter` just before it was started."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_until_ok(self, path: str) -> float:
        """Wait for the first 200 of a GET; return the time of `time.perf_counter` when it came.

        Raises:
            LoadError: the process has ended, or the timeout is over; with the end of its log.
        """
        while time.perf_counter() - self.started < START_TIMEOUT_S:
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_TIMEOUT_S)
                try:
                    connection.request("GET", path)
                    if connection.getresponse().status == 200:
                        return time.perf_counter()
                finally:
                    connection.close()
            if self.process.poll() is not None:
                break
            time.sleep(POLL_S)
        raise LoadError(f"{self.process.args!r} does not answer {path}: {self._end_of_log()}")

    def _end_of_log(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]


@contextmanager
def child(command: Sequence[str | Path]) -> Iterator[Child]:
    """Run a server until the block ends. `{port}` in an argument becomes a free port."""
    port = _free_port()
    filled = [str(part).replace("{port}", str(port)) for part in command]
    with tempfile.TemporaryDirectory(prefix="artesian-bench-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as sink:
            started = time.perf_counter()
            process = subprocess.Popen(filled, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
        try:
            yield Child(process, port, log, started)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def artesian_command(
    model: Path, threads: int, *flags: str, cache_dir: Path | None = None
) -> list[str | Path]:
    """The command line of our own server; without a `cache_dir` prompts are cold in every run."""
    command: list[str | Path] = [sys.executable, "-P", "-m", "artesian.clients.cli", "serve", model]
    disk: list[str | Path] = ["--cache-dir", cache_dir] if cache_dir else ["--no-disk-cache"]
    return [*command, "--port", "{port}", "--threads", str(threads), *disk, *flags]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
