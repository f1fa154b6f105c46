"""How commands turn the MODEL that a user names into a path, with a bar while it downloads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...engine.load import sources
from ...engine.load.pull import Progress
from . import environment


def find_model(source: str, models_dir: Path | None, index_url: str | None) -> Path:
    """Return the path of `source`, downloading it if need be; None stands for this machine's own default.

    Raises:
        ModelError: there is no such model, or it cannot be downloaded.
    """
    with _bars() as progress:
        return sources.resolve(
            source,
            models_dir=models_dir or environment.models_dir(),
            index_url=(lambda: index_url) if index_url else environment.index_url,
            progress=progress,
        )


@contextmanager
def _bars() -> Iterator[Progress]:
    """One bar a file on standard error; nothing is drawn before the first byte."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bars = Bars(TextColumn("{task.description}"), *columns, console=Console(stderr=True))
    tasks: dict[str, TaskID] = {}

    def show(label: str, done_bytes: int, total_bytes: int) -> None:
        if label not in tasks:
            bars.start()
            tasks[label] = bars.add_task(label)
        bars.update(tasks[label], completed=done_bytes, total=total_bytes or None)

    try:
        yield show
    finally:
        if tasks:
            bars.stop()
