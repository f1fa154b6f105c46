"""`artesian chat`: reads lines, shows answers; the conversation itself is `clients.conversation`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from ...engine.load.sources import DEFAULT_MODEL
from ..conversation import ChatError, Conversation, first_model
from .hosting import Address, private_server
from .settings import EngineFlags, Place, configure

HELP = "Ctrl-C stops an answer, /reset forgets the conversation, Ctrl-D leaves."


def chat(
    model: str = DEFAULT_MODEL,
    /,
    *,
    url: str | None = None,
    api_key: Annotated[str | None, Parameter(env_var="ARTESIAN_API_KEY", show_env_var=True)] = None,
    system: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    config: Path | None = None,
    place: Place | None = None,
    engine: EngineFlags | None = None,
) -> None:
    """Talk to a model in the terminal. Ctrl-C stops an answer, /reset forgets, Ctrl-D leaves.

    Parameters
    ----------
    model
        What to load here; with --url the model's name there. [default there: the first]
    url
        Talk to a server, http://127.0.0.1:8000 for one, instead of loading a model here.
    api_key
        The server's API key.
    system
        A system message.
    temperature
        0 for the most likely answer. [default: the server's]
    max_tokens
        Tokens of an answer. [default: as many as fit]
    config
        TOML file with the tables [server] and [engine].
    """
    options: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
    options = {name: value for name, value in options.items() if value is not None}
    with contextlib.ExitStack() as stack:
        if url:
            address = Address.parse(url, api_key)
        else:
            address = stack.enter_context(private_server(*configure(model, config, place, None, engine)))
        client = stack.enter_context(address.client())
        name = model if url and model != DEFAULT_MODEL else first_model(client)
        _talk(
            Conversation(client, name, options, system), Console(highlight=False, markup=False, emoji=False)
        )


def _talk(conversation: Conversation, console: Console) -> None:
    """Read and answer until the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - makes input() edit lines and remember them
    if sys.stdin.isatty():
        console.print(f"{conversation.model}. {HELP}", style="dim")
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print()
            continue
        if text == "/reset":
            conversation.reset()
        elif text == "/help":
            console.print(HELP, style="dim")
        elif text:
            _answer(conversation, text, console)


def _answer(conversation: Conversation, text: str, console: Console) -> None:
    try:
        conversation.say(text, lambda piece: console.print(piece, end="", soft_wrap=True))
        console.print()
    except KeyboardInterrupt:
        console.print(" [stopped]", style="dim")
    except ChatError as err:
        console.print(f"{err}", style="red")
