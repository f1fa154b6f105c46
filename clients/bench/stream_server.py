"""The servers of `stream`, as child processes: our whole HTTP application over an engine that computes
nothing, and a bare ASGI handler that writes the same bytes. Both are driven by the same ticks.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers

from ...engine import Delta, DeltaIterator, EngineStatus, GenerationRequest, ModelInfo, Usage
from ...engine.codec import Codec
from ...engine.codec.template import CHATML
from ...engine.grammar import Grammar, Schema, SchemaReport
from ...engine.prompt_cache import names_only
from ...engine.stream import DeltaStream
from ...server.app import create_app
from ...server.config import ServerConfig
from ...server.serve import serve

ENTRY = ('{"', "name", '":', ' "', "well", " ", "head", '",', ' "', "depth", '":', " ", "12", "},")


class Ticks:
    """Wakes all who wait, once a step; while nobody waits nothing happens."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._waiting: list[asyncio.Future[None]] = []

    def next(self) -> asyncio.Future[None]:
        """Done at the next step."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_later(self._step_s, self._step)
        future = loop.create_future()
        self._waiting.append(future)
        return future

    def _step(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


@dataclass(frozen=True, slots=True)
class Script:
    """What an answer's tokens say, whatever its length."""

    begin: tuple[str, ...] = ()
    middle: tuple[str, ...] = (" well",)
    """Over and over, filled up with spaces in front."""
    end: tuple[str, ...] = ()

    def tokens(self, count: int) -> tuple[str, ...]:
        """So many; they must be enough for begin and end."""
        times, spaces = divmod(count - len(self.begin) - len(self.end), len(self.middle))
        return (*self.begin, *(" ",) * spaces, *self.middle * times, *self.end)


_NAME = ("<tool_call>", "\n", '{"', "name", '":', ' "', "list", '",', ' "', "arguments", '":', " ")
_LIST = Script(('{"', "wells", '":', " ["), ENTRY, (*ENTRY[:-1], "}", "]", "}"))
SCRIPTS = {
    "text": Script(),
    "json": _LIST,
    "call": Script((*_NAME, *_LIST.begin), ENTRY, (*_LIST.end, "}", "\n", "</tool_call>")),
}
"""Cut as a vocabulary might: the text, a JSON value, and a call in Hermes' form with it for arguments."""


@dataclass(slots=True)
class _Run:
    request: GenerationRequest
    stream: DeltaStream
    phase: int
    script: tuple[str, ...]
    tokens: int = 0


class TickingEngine:
    """`Engine` without a model: every step adds one token to its requests, until `max_tokens`. With more than
    one phase the requests are spread over as many steps, which follow each other evenly."""

    def __init__(self, step_s: float, phases: int = 1, script: Script = SCRIPTS["text"]) -> None:
        self.prompt_cache = names_only()
        self._step_s, self._script = step_s, script
        self._runs: dict[str, _Run] = {}
        self._phases: list[dict[str, _Run]] = [{} for _ in range(phases)]
        self._submitted = self._phase = 0

    @property
    def model(self) -> ModelInfo:
        return ModelInfo(
            name="ticks",
            max_model_len=1 << 20,
            vocab_size=256,
            architecture="none",
            weights_digest="0" * 64,
            root="none",
            backend="none",
            eos_token_ids=(),
        )

    async def start(self) -> None: ...

    async def prepare(self, grammar: Grammar) -> tuple[str, ...]:
        return ()

    async def report_schema(self, schema: Schema, *, strict: bool) -> SchemaReport:
        return SchemaReport(True, (), ())

    def submit(self, request: GenerationRequest) -> DeltaIterator:
        if not self._runs:
            self._step_later()
        stream = DeltaStream(lambda: self.abort(request.id))
        phase = self._submitted % len(self._phases)
        self._submitted += 1
        script = self._script.tokens(request.params.max_tokens or 1)
        self._runs[request.id] = self._phases[phase][request.id] = _Run(request, stream, phase, script)
        return stream

    def queue_position(self, request_id: str) -> int:
        return 0

    def prompt_s(self, tokens: int, cached: int) -> float:
        return 0.0

    def abort(self, request_id: str) -> None:
        if (run := self._runs.get(request_id)) is not None:
            self._forget(run)
            run.stream.put([Delta(text="", finish_reason="abort")], last=True)

    def status(self) -> EngineStatus:
        return EngineStatus(running=len(self._runs))

    async def drain(self, timeout_s: float) -> bool:
        return True

    async def close(self) -> None: ...

    def text(self, run: _Run) -> str:
        """Of a run's next token."""
        return run.script[run.tokens]

    def _forget(self, run: _Run) -> None:
        del self._runs[run.request.id], self._phases[run.phase][run.request.id]

    def _step_later(self) -> None:
        asyncio.get_running_loop().call_later(self._step_s / len(self._phases), self._step)

    def _step(self) -> None:
        self._phase = (self._phase + 1) % len(self._phases)
        for run in list(self._phases[self._phase].values()):
            text = self.text(run)
            run.tokens += 1
            last = run.tokens == len(run.script)
            usage = (
                Usage(prompt_tokens=len(run.request.prompt), completion_tokens=run.tokens) if last else None
            )
            delta = Delta(text=text, token_ids=(1,), finish_reason="length" if last else None, usage=usage)
            run.stream.put([delta], last=last)
            if last:
                self._forget(run)
        if self._runs:
            self._step_later()


class StampingEngine(TickingEngine):
    """Every token says when it was made: seconds of `time.perf_counter`, which processes share on Linux."""

    def text(self, run: _Run) -> str:
        return f" {time.perf_counter():.6f}"


def bare_app(chunks: list[bytes], ticks: Ticks) -> Any:
    """An ASGI application that answers anything with these chunks, one a tick."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["method"] == "POST":
            for chunk in chunks:
                await ticks.next()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


def byte_codec() -> Codec:
    """One token a byte, and a chat template."""
    vocabulary = {
        character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    hf = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hf.decoder = decoders.ByteLevel()
    return Codec.build(
        hf,
        bos_token_id=None,
        eos_token_ids=(),
        add_bos=False,
        add_eos=False,
        special_ids=(),
        chat_template=CHATML,
    )


def _main(port: int, step_s: float, phases: int, script: Script, body: Path | None) -> None:
    if body is None:
        config = ServerConfig(port=port, access_log=False)
        made = StampingEngine if phases > 1 else TickingEngine
        engine = made(step_s, phases, script)
        serve(create_app(engine, byte_codec(), config), config)
    else:
        app = bare_app(events_of(body.read_bytes()), Ticks(step_s))
        uvicorn.run(app, port=port, loop="uvloop", http="httptools", lifespan="off", log_config=None)


def events_of(body: bytes) -> list[bytes]:
    """A streamed body, cut into its events: what our application gives to one write each."""
    return [event + b"\n\n" for event in body.split(b"\n\n") if event]


if __name__ == "__main__":
    port, step_s, phases, script, *body = sys.argv[1:]
    _main(int(port), float(step_s), int(phases), SCRIPTS[script], Path(body[0]) if body else None)
