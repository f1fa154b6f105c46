"""`artesian run`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ...engine.load.sources import DEFAULT_MODEL
from ..offline import Outcome, answer_file
from .hosting import Address, private_server
from .settings import EngineFlags, Place, configure


def run(
    requests: Path,
    /,
    *,
    output: Annotated[Path, Parameter(alias="-o")],
    model: str = DEFAULT_MODEL,
    url: str | None = None,
    api_key: Annotated[str | None, Parameter(env_var="ARTESIAN_API_KEY", show_env_var=True)] = None,
    concurrency: int = 64,
    config: Path | None = None,
    place: Place | None = None,
    engine: EngineFlags | None = None,
) -> None:
    """Answer a file of requests, OpenAI's batch format in and out.

    Answers are appended as they come. Run again with the same output to go on: what is answered stays, what
    the server could not answer is asked again. Exit code 1 if any request failed.

    Parameters
    ----------
    requests
        JSON lines, each with custom_id, method, url and body.
    output
        JSON lines, each with custom_id and response or error.
    model
        What to load here.
    url
        Ask a server, http://127.0.0.1:8000 for one, instead of loading a model here.
    api_key
        The server's API key.
    concurrency
        Requests that are open at once.
    config
        TOML file with the tables [server] and [engine].
    """
    if not requests.is_file():
        raise FileNotFoundError(2, "no such file", str(requests))
    with contextlib.ExitStack() as stack:
        if url:
            address = Address.parse(url, api_key)
        else:
            address = stack.enter_context(private_server(*configure(model, config, place, None, engine)))
        outcome = asyncio.run(_run(address, requests, output, concurrency))
    Console(stderr=True, highlight=False).print(
        f"{outcome.succeeded} answered, {outcome.failed} failed, {outcome.resumed} answered before: {output}",
        soft_wrap=True,
    )
    if outcome.failed:
        sys.exit(1)


async def _run(address: Address, requests: Path, output: Path, concurrency: int) -> Outcome:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        bar = bars.add_task(requests.name, total=None)

        def show(outcome: Outcome) -> None:
            done = outcome.resumed + outcome.succeeded + outcome.failed
            bars.update(bar, total=outcome.total, completed=done)

        async with address.async_client(concurrency) as client:
            return await answer_file(client, requests, output, concurrency=concurrency, progress=show)
