"""The command `artesian`: its commands by name, each loaded when called, and what a failure looks like."""

from __future__ import annotations

import sys
from importlib.metadata import version

from cyclopts import App, CycloptsError, Group

HELP = """An asyncio-native streaming LLM API server.

Start with `artesian serve`: it downloads a small model once and serves it on port 8000.

MODEL is a name (`smollm2-135m`), the path of a GGUF file or of a Hugging Face folder, or
`hf:org/name[@revision][/file.gguf]`. Each command explains itself: `artesian serve --help`.
"""
COMMANDS = {
    "Serve": {
        "serve": "Serve a model over HTTP: the OpenAI API and its neighbours.",
        "pull": "Download a model, so that serving it needs no network.",
    },
    "Use": {
        "chat": "Talk to a model in the terminal.",
        "run": "Answer a file of requests, OpenAI's batch format in and out.",
    },
    "Look inside": {
        "cache": "Look into the prompt cache on disk: list, explain, verify, delete, move.",
        "explain": "Print a model's forward pass as the backends run it.",
        "doctor": "Check what this machine offers, and say what is missing.",
        "bench": "Measure: `artesian bench` lists the scenarios.",
    },
}
NOT_NEEDED = {
    "--disable-log-requests": "prompts are never logged",
    "--enable-cache-report": "usage always tells cached tokens",
    "--enable-chunked-prefill": "prompts are always cut to the step's budget",
    "--enable-prompt-tokens-details": "usage always tells cached tokens",
    "--trust-remote-code": "a model's own code is never run",
}
"""Flags of other servers that ask for what is so anyway: accepted, with a notice."""

app = App(name="artesian", help=HELP, help_format="markdown", version=lambda: version("artesian"))
for title, commands in COMMANDS.items():
    group = Group.create_ordered(title)
    for position, (name, summary) in enumerate(commands.items()):
        # A scenario explains itself: its --help is not ours to answer.
        flags = {"help_flags": ()} if name == "bench" else {}
        app.command(
            f"artesian.clients.cli.{name}:{name}", help=summary, group=group, sort_key=position, **flags
        )
app["--help"].group = app["--version"].group = Group.create_ordered("Also")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 done in part, 2 not started (one line says why)."""
    try:
        app(
            _understood(sys.argv[1:] if arguments is None else arguments),
            exit_on_error=False,
            print_error=False,
        )
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has left: nobody to tell
        sys.exit(141)
    except CycloptsError as err:
        _fail(str(err))
    except Exception as err:
        if not _is_the_users(err):
            raise
        _fail(f"{err.filename}: {err.strerror}" if isinstance(err, OSError) and err.filename else str(err))


def _understood(arguments: list[str]) -> list[str]:
    for flag in filter(NOT_NEEDED.__contains__, arguments):
        sys.stderr.write(f"artesian: {flag} is not needed: {NOT_NEEDED[flag]}\n")
    return [argument for argument in arguments if argument not in NOT_NEEDED]


def _is_the_users(err: Exception) -> bool:
    """Whether the message says all: no defect of ours, so no traceback."""
    from ...engine.errors import EngineError
    from ...server.config import ConfigError
    from ..conversation import ChatError

    return isinstance(err, EngineError | ConfigError | ChatError | OSError)


def _fail(message: str) -> None:
    sys.stderr.write(f"artesian: {' '.join(message.split())}\n")
    sys.exit(2)
