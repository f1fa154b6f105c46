"""One server with the real model for all tests that only ask it things."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_server import RealServer, real_server

NODE = Path(__file__).resolve().parents[1] / "support" / "node"


@pytest.fixture(scope="session")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Four run, four may wait; requests without a seed are seeded, and none gets longer than 512 tokens."""
    flags = ("--max-num-seqs", "4", "--max-num-queued-reqs", "4", "--max-model-len", "512", "--seed", "1")
    with real_server(smollm2_path, tmp_path_factory.mktemp("server"), *flags) as server:
        yield server


@pytest.fixture(scope="session")
def node_folder() -> Path:
    """The folder in which scripts find OpenAI's SDK; it is installed there on first use."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs node and npm")
    if not (NODE / "node_modules" / "openai").is_dir():
        install = ["npm", "install", "--prefix", str(NODE), "--no-package-lock", "--no-audit", "--no-fund"]
        subprocess.run(install, check=True, timeout=100, capture_output=True)
    return NODE
