"""What the endpoints share: the engine, the codec, the settings, the counters, and the life of them all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from anyio.to_thread import current_default_thread_limiter

from ..engine import Engine
from ..engine.codec import Codec
from ..engine.codec.dialects import UnknownDialect, find_dialect
from ..engine.codec.template import ChatTemplate
from .cache_trace import TraceBook
from .config import ConfigError, ServerConfig
from .errors import model_not_found
from .metrics import Telemetry
from .stream.runs import Runs

CODEC_THREADS = 2
"""Long prompts are rare and the library releases the GIL: two keep one long prompt from stopping the next."""


class Service:
    """One engine behind HTTP.

    Raises:
        ConfigError: no such parser.
    """

    def __init__(self, engine: Engine, codec: Codec, config: ServerConfig, telemetry: Telemetry) -> None:
        self.engine, self.codec, self.config, self.telemetry = engine, codec, config, telemetry
        template = codec.template
        try:
            self.dialect = find_dialect(
                None if template is None else template.source,
                codec.tokenizer,
                shows_tools=not isinstance(template, ChatTemplate) or template.shows_tools,
                tool_call_parser=config.tool_call_parser,
                reasoning_parser=config.reasoning_parser,
            )
        except UnknownDialect as err:
            raise ConfigError(str(err)) from err
        """How the model writes thoughts and calls."""
        self.codec_pool = ThreadPoolExecutor(CODEC_THREADS, "codec")
        self.traces = TraceBook()
        """What is remembered of finished prompts, to explain the misses of later ones."""
        self.runs = Runs()
        """Responses that outlive their reader."""
        self.draining = False
        """Set once, by the first signal: nothing new is taken from then on."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that requests may use, the main one first."""
        return self.config.served_model_names or (self.engine.model.name,)

    @property
    def system_fingerprint(self) -> str:
        """Changes with the weights, as OpenAI's does with the backend."""
        return f"fp_{self.engine.model.weights_digest[:10]}"

    def model_name(self, asked: str | None) -> str:
        """Return the name to answer with: the one that was asked for, or the main one.

        Raises:
            NotFound: no such model here.
        """
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names:
            raise model_not_found(asked)
        return asked

    @asynccontextmanager
    async def lifespan(self, _app: object) -> AsyncIterator[None]:
        """Start the engine and the watch of the loop; end both."""
        current_default_thread_limiter()  # the first use loads a backend of anyio, 10 ms of a first request
        await self.engine.start()
        async with asyncio.TaskGroup() as tasks, self.runs.open():
            watch = tasks.create_task(self.telemetry.watch_event_loop())
            try:
                yield
            finally:
                watch.cancel()
                await self.engine.close()
                self.codec_pool.shutdown(wait=False, cancel_futures=True)
