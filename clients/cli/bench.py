"""`artesian bench`: finds a scenario in `artesian.clients.bench` by name, hands it the rest of the line."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from ...server.config import ConfigError
from .. import bench as scenarios

USAGE = "Usage: artesian bench NAME [FLAGS]; `artesian bench NAME --help` lists the flags.\n\nScenarios:"


def bench(
    scenario: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    /,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
) -> None:
    """Run a benchmark; without a name, list them.

    Parameters
    ----------
    scenario
        The scenario's name.
    arguments
        The scenario's own flags; `artesian bench NAME --help` lists them.
    """
    known = sorted(module.name for module in pkgutil.iter_modules(scenarios.__path__))
    if scenario in (None, "--help", "-h"):
        runnable = {name: module for name in known if hasattr(module := _module(name), "main")}
        lines = [f"  {name:12} {_summary(module)}" for name, module in runnable.items()]
        Console().print("\n".join([USAGE, *lines]), highlight=False, soft_wrap=True)
        return
    if scenario not in known or not hasattr(module := _module(scenario), "main"):
        raise ConfigError(f"no benchmark {scenario!r}; `artesian bench` lists them")
    module.main(list(arguments))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{scenarios.__name__}.{name}")


def _summary(module: ModuleType) -> str:
    return (module.__doc__ or "").strip().partition("\n")[0]
