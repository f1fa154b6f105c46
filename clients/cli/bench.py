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


def bench(
    scenario: str | None = None,
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
    known = {module.name for module in pkgutil.iter_modules(scenarios.__path__)}
    names = sorted(name for name in known if hasattr(_module(name), "main"))
    if scenario is None:
        lines = [f"  {name:12} {(_module(name).__doc__ or '').strip().splitlines()[0]}" for name in names]
        Console().print("\n".join(["Scenarios:", *lines]), highlight=False)
    elif scenario not in names:
        raise ConfigError(f"no benchmark {scenario!r}; there are: {', '.join(names) or 'none'}")
    else:
        _module(scenario).main(list(arguments))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{scenarios.__name__}.{name}")
