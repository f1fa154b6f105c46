"""`instructor` extracts models, in the environment that `make dev` gives it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from real_server import MODEL_NAME, RealServer

PYTHON = Path(sys.prefix) / "instructor" / "bin" / "python"
SCRIPT = Path(__file__).resolve().parents[1] / "support" / "instructor_script.py"
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs an environment with instructor: make dev"),
]


def test_instructor_extracts_a_model_by_tools_and_by_schema_whole_and_in_parts(server: RealServer) -> None:
    command = [str(PYTHON), "-P", str(SCRIPT), server.url, MODEL_NAME]
    done = subprocess.run(command, capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 6
    for person in found.values():
        assert person["name"] and 0 <= person["age"] <= 150
