"""`artesian serve`."""

from __future__ import annotations

import logging
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from ...engine.load.sources import DEFAULT_MODEL
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
    from ...server import serve as serving  # heavy: not for --help or a mistyped flag
    from ...server.launch import build_app

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # what it says at INFO is said below
    logging.getLogger("httpx").setLevel(logging.WARNING)
    app = build_app(server_config, engine_config)

    def welcome(address: str) -> None:
        """Say where the model is, with a line to try it."""
        service = app.state.service
        info = service.engine.model
        console = Console(highlight=False, soft_wrap=True, markup=False)
        console.print(
            f"\nArtesian {version('artesian')} serves {service.model_names[0]} on {address}\n"
            f"{info.architecture}, {info.max_model_len} tokens of context, backend {info.backend}\n"
        )
        key = "-H 'authorization: Bearer YOUR_KEY' " if server_config.api_keys else ""
        console.print(
            f"curl {address}/v1/chat/completions {key}-H 'content-type: application/json' -d '"
            f'{{"model": "{service.model_names[0]}", "stream": true, '
            f'"messages": [{{"role": "user", "content": "Hello!"}}]}}\'\n'
        )

    serving.serve(app, server_config, on_ready=welcome)
