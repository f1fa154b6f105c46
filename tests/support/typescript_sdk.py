"""The TypeScript SDK as the package ships it: compiled once for the tests of a module."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from readme import ROOT

PACKAGE = ROOT / "clients" / "typescript"
TSC = PACKAGE / "node_modules" / ".bin" / "tsc"

needs_compiler = pytest.mark.skipif(
    shutil.which("node") is None or not TSC.exists(),
    reason="needs node and the TypeScript compiler: make dev",
)


def compile_typescript(folder: Path, *arguments: str) -> None:
    """Run the compiler; what it says is the test's failure."""
    done = subprocess.run([str(TSC), *arguments], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """`dist/` is up to date."""
    compile_typescript(PACKAGE)
