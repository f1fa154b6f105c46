"""`artesian serve`."""

from __future__ import annotations

import logging
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from ...engine.load.sources import DEFAULT_MODEL
from ...server.config import ServerConfig
from .hosting import Hosted, hosted
from .settings import EngineFlags, Place, ServerFlags, configure

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s %(message)s"


def serve(
    model: str = DEFAULT_MODEL,
    /,
    *,
    config: Path | None = None,
    place: Place | None = None,
    server: ServerFlags | None = None,
    engine: EngineFlags | None = None,
) -> None:
    """Serve a model over HTTP: the OpenAI API and its neighbours.

    Ctrl-C or SIGTERM lets running requests finish; a second one ends them.

    Parameters
    ----------
    model
        A catalogue name, a GGUF file, a Hugging Face folder, or hf:org/name[@revision][/file.gguf].
    config
        TOML file with the tables [server] and [engine]; their keys are the names of the flags.
    """
    server_config, engine_config = configure(model, config, place, server, engine)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # what it says at INFO is said below
    with hosted(server_config, engine_config) as ready:
        _welcome(ready, server_config)
        ready.run()


def _welcome(ready: Hosted, config: ServerConfig) -> None:
    """Say what is served and where, with a line to try it."""
    service = ready.app.state.service
    name, info = service.model_names[0], service.engine.model
    connect = f"--unix-socket {config.uds} " if config.uds else ""
    key = "-H 'authorization: Bearer YOUR_KEY' " if config.api_keys else ""
    message = '{"role": "user", "content": "What is gravity?"}'
    body = f'{{"model": "{name}", "stream": true, "temperature": 0, "messages": [{message}]}}'
    url = _url(ready, config)
    Console(highlight=False, soft_wrap=True, markup=False).print(
        f"\nArtesian {version('artesian')} serves {name} on {config.uds or url}\n"
        f"({info.architecture}, {info.max_model_len} tokens of context, backend {info.backend}). Try it:\n\n"
        f"curl -N {connect}{url}/v1/chat/completions {key}-H 'content-type: application/json' -d '{body}'\n"
    )


def _url(ready: Hosted, config: ServerConfig) -> str:
    if config.uds:
        return "http://localhost"
    host, port = ready.listening.getsockname()[:2]
    host = "127.0.0.1" if host == "0.0.0.0" else f"[{host}]" if ":" in host else host
    return f"{'https' if config.ssl_certfile else 'http'}://{host}:{port}"
