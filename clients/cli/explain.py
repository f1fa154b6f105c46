"""`artesian explain`."""

from __future__ import annotations

import sys

from ...engine.load.model import open_model
from ...engine.load.sources import DEFAULT_MODEL
from ...engine.models.registry import build_program
from . import environment
from .models import find_model
from .settings import Place


def explain(model: str = DEFAULT_MODEL, /, *, place: Place | None = None) -> None:
    """Print a model's forward pass as the backends run it: buffers, ops, weights, KV groups.

    Parameters
    ----------
    model
        A catalogue name, a GGUF file, a Hugging Face folder, or hf:org/name[@revision][/file.gguf].
    """
    place = place or Place()
    path = find_model(model, place.models_dir, place.index_url)
    opened = open_model(path, cache_dir=environment.home() / "derived")
    sys.stdout.write(build_program(opened.config).render().rstrip("\n") + "\n")
