"""The peer that `peers` compares with, llama-cpp-python's server, in its own environment, built once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from filelock import FileLock
from rich.console import Console

from .load import LoadError

PEER = "llama-cpp-python"
PEER_VERSION = "0.3.36"
CMAKE_ARGS = "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"
"""Its own default for the processor it is built on; the vision part is never used here."""


def llama_cpp_python(folder: Path) -> Path:
    """Return the interpreter of an environment below `folder` that has the peer; build it if need be, which
    takes some minutes of all cores.

    Raises:
        LoadError: it cannot be built; says where the log is.
    """
    place = folder / f"{PEER}-{PEER_VERSION}"
    python, done = place / "bin" / "python", place / "complete"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(Path(f"{place}.lock")):
        if not done.exists():
            log = Path(f"{place}.log")
            Console(stderr=True).print(f"building {PEER} {PEER_VERSION} once, into {place}; log: {log}")
            with log.open("wb") as sink:
                _run([sys.executable, "-P", "-m", "venv", "--clear", place], sink.fileno(), log)
                requirement = f"{PEER}[server]=={PEER_VERSION}"
                _run([python, "-m", "pip", "install", "-v", requirement], sink.fileno(), log)
            done.touch()
    return python


def llama_cpp_command(python: Path, model: Path, threads: int, context: int) -> list[str | Path]:
    """The command line of its server: the same threads for prompts and tokens, and requests that wait for
    each other instead of its default, where a new request cuts the one before."""
    flags = {
        "model": model,
        "host": "127.0.0.1",
        "port": "{port}",
        "n_ctx": context,
        "n_threads": threads,
        "n_threads_batch": threads,
        "logits_all": "false",
        "flash_attn": "true",
        "interrupt_requests": "false",
        "verbose": "false",
    }
    command: list[str | Path] = [python, "-m", "llama_cpp.server"]
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    return command


def _run(command: list[str | Path], sink: int, log: Path) -> None:
    # -march=native is decided by CMAKE_ARGS; everything else of the environment is the user's.
    environment = {**os.environ, "CMAKE_ARGS": CMAKE_ARGS}
    if subprocess.run(command, stdout=sink, stderr=sink, env=environment).returncode:
        raise LoadError(f"{PEER} could not be built; see {log}")
