"""Codex and Claude Code as they are, in a loop with their shell.

The model is scripted: they need more context and more sense than a small one has.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_scripts import agent_engine, call
from http_server import running_server, scripted_app

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm"),
]
PACKAGES = {"codex": "@openai/codex@0.171.0", "claude": "@anthropic-ai/claude-code@2.1.197"}
PRINTS = "printf 'hello from the%s' shell"
CONFIG = """
model = "scripted"
model_provider = "artesian"
[model_providers.artesian]
name = "artesian"
base_url = "{url}/v1"
wire_api = "responses"
"""


@pytest.fixture(scope="module", params=PACKAGES)
def agent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The agent's command; a few hundred MB, deleted at the end."""
    folder = tmp_path_factory.mktemp("agent")
    install = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", PACKAGES[request.param]]
    subprocess.run(install, check=True, timeout=600, capture_output=True)
    yield folder / "node_modules" / ".bin" / request.param
    shutil.rmtree(folder)


async def test_a_coding_agent_runs_its_shell_and_reads_what_it_printed(agent: Path, tmp_path: Path) -> None:
    shell = {
        "codex": call("exec_command", json.dumps({"cmd": PRINTS})),
        "claude": call("Bash", json.dumps({"command": PRINTS, "description": "Greet"})),
    }[agent.name]
    engine = agent_engine(
        ("hello from theshell", "It greeted."), ("", f"I run it.\n{shell}"), max_model_len=400_000
    )
    app, _ = scripted_app(engine)
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    async with running_server(app) as url:
        (home / "config.toml").write_text(CONFIG.format(url=url))
        arguments = {
            "codex": ["exec", "--skip-git-repo-check", "Greet me"],
            "claude": ["-p", "Greet me", "--dangerously-skip-permissions"],
        }[agent.name]
        environment = {
            **os.environ,
            "HOME": str(home), "CODEX_HOME": str(home), "IS_SANDBOX": "1",
            "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": "scripted",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            str(agent), *arguments, cwd=project, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, (out + err).decode()
    assert out.decode().strip().endswith("It greeted.")
    assert "hello from theshell" in engine.codec.detokenize(engine.requests[-1].prompt)
