"""The command line: what it prints, how it fails, what it costs to start."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from artesian.clients.cli import main
from artesian.clients.cli.app import COMMANDS, NOT_NEEDED

ALL_COMMANDS = [name for group in COMMANDS.values() for name in group]


def _exit_code(*arguments: str | Path) -> int:
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as err:
        return int(err.code or 0)
    return 0


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code() == _exit_code("--help") == 0
    shown = capsys.readouterr().out
    assert [name for name in ALL_COMMANDS if f" {name} " not in shown] == []


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(command, "--help") == 0
    assert f"artesian {command}" in capsys.readouterr().out


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys; from artesian.clients.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print({'numpy', 'torch', 'uvicorn', 'httpx', 'tokenizers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.fixture
def occupied_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sevre"], "Unknown command"),
        (["serve", "--prot", "1"], "Unknown option: --prot. Did you mean --port?"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "--kv-cache-memory-bytes", "lots"], "'lots' is not a size"),
        (["serve", "--cache-ttl", "soon"], "'soon' is not a duration"),
        (["serve", "--cache-ttl", "1000d"], "cache_ttl=86400000.0 seconds must be between 1s and 366d"),
        (["serve", "--cache-bytes", "all"], "'all' is not a size"),
        (["serve", "--max-n", "0"], "max_n=0 must be at least 1"),
        (["serve", "--cache-dir", __file__], "cannot be used: File exists"),
        (["serve", "--cache-dir", "/proc/none"], "cache_dir: /proc/none cannot be used"),
        (["serve", "no-such-model", "--port", "0"], "no model at no-such-model"),
        (["serve", __file__, "--port", "0"], "not a GGUF file"),
        (["serve", "--config", "none.toml"], "cannot read none.toml"),
        (["explain", "org/name"], "write hf:org/name"),
        (["run", "none.jsonl", "-o", "out.jsonl"], "none.jsonl: no such file"),
        (["chat", "--url", "http://127.0.0.1:9"], "no server at http://127.0.0.1:9"),
        (["bench", "none"], "no benchmark 'none'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_failed_start_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code(*arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("artesian: ") and said.count("\n") == 1
    assert message in said


@pytest.mark.model
def test_an_occupied_port_is_said_before_anything_is_loaded(
    occupied_port: int, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code("serve", smollm2_path, "--port", str(occupied_port)) == 2
    said = capsys.readouterr().err
    assert f"port {occupied_port}" in said and "choose another with --port" in said


@pytest.mark.parametrize("flag", NOT_NEEDED)
def test_other_servers_flags_get_a_notice(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code("serve", flag, "--help") == 0
    assert f"{flag} is not needed" in capsys.readouterr().err


@pytest.mark.model
def test_explain_prints_the_program(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code("explain", smollm2_path) == 0
    assert "attention" in capsys.readouterr().out


def test_doctor_reports_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code("doctor") == 0
    shown = capsys.readouterr().out
    assert "backend reference" in shown and "cache" in shown


def test_chat_reads_its_lines_from_a_pipe_and_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from artesian.clients.cli.chat import HELP, _talk
    from artesian.clients.conversation import Conversation

    class Parrot(Conversation):
        def say(self, text: str, show: object) -> None:
            assert callable(show)
            show(text.upper())

    from rich.console import Console

    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/reset\n\n/help\nbye\n"))
    _talk(Parrot(None, "m"), Console())  # type: ignore[arg-type]
    assert capsys.readouterr().out == f"HELLO\n{HELP}\nBYE\n"
