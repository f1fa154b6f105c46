"""An engine that says what it is told, behind the real HTTP layer: text, pauses, faults, a full queue.

Tokens are bytes (ids 0 to 255) and a few special tokens; the text side (detokenizer, stops) is the real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from artesian.engine import (
    CacheReport,
    ContextTooLong,
    Delta,
    DeltaIterator,
    EngineDraining,
    EngineOverloaded,
    EngineStatus,
    FinishReason,
    GenerationRequest,
    ModelInfo,
    PositionLogprobs,
    TokenLogprob,
    Usage,
)
from artesian.engine.codec import Codec, TextStream
from artesian.engine.grammar import Grammar, Schema, SchemaReport
from artesian.engine.grammar.compiler import GrammarCompiler
from artesian.engine.prompt_cache import names_only

BOS, IM_START, IM_END = 256, 257, 258
VOCAB_SIZE = 259
SPECIALS = ("<s>", "<|im_start|>", "<|im_end|>")


@functools.cache
def toy_codec(
    *, add_bos: bool = False, chat_template: str | None = None, added: tuple[str, ...] = ()
) -> Codec:
    """A byte-level codec: one token a byte, three special tokens, ChatML; `added` are more, not special."""
    alphabet = _byte_alphabet()
    vocab = {alphabet[byte]: byte for byte in range(256)}
    hf = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in SPECIALS])
    hf.add_tokens([*added])
    return Codec.build(
        hf,
        bos_token_id=BOS,
        eos_token_ids=(IM_END,),
        add_bos=add_bos,
        add_eos=False,
        special_ids=(BOS, IM_START, IM_END),
        chat_template=chat_template,
    )


def _byte_alphabet() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(rest)) for byte in range(256)]


@dataclass(frozen=True, kw_only=True)
class Script:
    """What the model says and how it goes wrong."""

    text: str | Sequence[str] = "Hello world"
    """A list gives each choice its own."""
    token_ids: Sequence[int] | None = None
    """Instead of text."""
    tokens_per_step: int = 1
    prefill_s: float = 0.0
    step_s: float = 0.0
    fail_after: int | None = None
    """Tokens until the engine fails the request."""
    stall_after: int | None = None
    """Tokens until nothing comes any more."""
    crash: Exception | None = None
    """Raised by `submit`."""
    endless: bool = False
    """Say the text again and again."""
    top_logprob: float = -0.25
    rare_logprob: float = -9999.0
    cached_tokens: int = 3
    """Of the prompt, at most all but the last."""
    cache: CacheReport = CacheReport()

    def tokens(self, choice: int) -> list[int]:
        if self.token_ids is not None:
            return list(self.token_ids)
        text = self.text if isinstance(self.text, str) else self.text[choice]
        return list(text.encode())


@dataclass
class _Run:
    request: GenerationRequest
    script: Script
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    cut_by: FinishReason | None = None


class ScriptedEngine:
    """The `Engine` protocol over scripts. `slots` requests run at once, `queue_limit` more may wait."""

    def __init__(
        self,
        codec: Codec,
        script: Script | Callable[[GenerationRequest], Script] = Script(),
        *,
        slots: int = 64,
        queue_limit: int = 1024,
        max_model_len: int = 4096,
        load_s: float = 0.0,
    ) -> None:
        self.codec, self.script = codec, script
        self.max_model_len, self.queue_limit, self.load_s = max_model_len, queue_limit, load_s
        self.requests: list[GenerationRequest] = []
        """All that were accepted."""
        self.aborted: list[str] = []
        """Ids of those that were ended early."""
        self.steps = 0
        """Steps computed in all."""
        self.healthy = True
        self.is_open = False
        self.prompt_cache = names_only()
        self._grammars = GrammarCompiler(codec.tokenizer, VOCAB_SIZE, (IM_END,))
        self._slots, self._slot_count = asyncio.Semaphore(slots), slots
        self._live: dict[str, _Run] = {}
        self._running: set[str] = set()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def model(self) -> ModelInfo:
        return ModelInfo(
            name="scripted",
            max_model_len=self.max_model_len,
            vocab_size=VOCAB_SIZE,
            architecture="scripted",
            weights_digest="5c419ed0123456789abcdef",
            root="scripted/model",
            backend="none",
            eos_token_ids=(IM_END,),
            hidden_size=2,
        )

    async def start(self) -> None:
        await asyncio.sleep(self.load_s)
        self.is_open = True

    async def prepare(self, grammar: Grammar) -> tuple[str, ...]:
        return (await self._grammars.prepare(grammar)).warnings

    async def report_schema(self, schema: Schema, *, strict: bool) -> SchemaReport:
        return await self._grammars.report(schema, strict=strict)

    def submit(self, request: GenerationRequest) -> DeltaIterator:
        script = self.script if isinstance(self.script, Script) else self.script(request)
        if script.crash is not None:
            raise script.crash
        if self._draining:
            raise EngineDraining("draining")
        wanted = request.params.max_tokens or 0
        if len(request.prompt) >= self.max_model_len or len(request.prompt) + wanted > self.max_model_len:
            raise ContextTooLong(len(request.prompt), self.max_model_len, wanted)
        if len(self._live) - len(self._running) >= self.queue_limit:
            raise EngineOverloaded("The queue is full.", retry_after_s=0.2)
        run = _Run(request, script)
        self._live[request.id] = run
        self._idle.clear()
        self.requests.append(request)
        return self._stream(run)

    def queue_position(self, request_id: str) -> int:
        waiting = [other for other in self._live if other not in self._running]
        place = waiting.index(request_id) + 1 if request_id in waiting else 0
        return max(0, place - (self._slot_count - len(self._running)))

    def prompt_s(self, tokens: int, cached: int) -> float:
        return (tokens - cached) / 1000

    def abort(self, request_id: str) -> None:
        if request_id in self._live:
            self.aborted.append(request_id)
            self._cut(self._live[request_id], "abort")

    def status(self) -> EngineStatus:
        return EngineStatus(
            running=len(self._running),
            waiting=len(self._live) - len(self._running),
            blocks_total=100,
            blocks_free=100 - len(self._running),
            draining=self._draining,
            healthy=self.healthy,
        )

    async def drain(self, timeout_s: float) -> bool:
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            for run in list(self._live.values()):
                self._cut(run, "error")
            return False
        return True

    async def close(self) -> None:
        self.is_open = False
        self._grammars.close()
        for run in list(self._live.values()):
            self._cut(run, "abort")

    def _cut(self, run: _Run, reason: FinishReason) -> None:
        run.cut_by = reason
        run.cut.set()
        self._forget(run)

    def _forget(self, run: _Run) -> None:
        self._live.pop(run.request.id, None)
        self._running.discard(run.request.id)
        if not self._live:
            self._idle.set()

    async def _pause(self, run: _Run, seconds: float | None) -> bool:
        """Sleep, or for ever; whether the run goes on."""
        if seconds == 0:
            await asyncio.sleep(0)
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(run.cut.wait(), seconds)
        return run.cut_by is None

    async def _stream(self, run: _Run) -> AsyncGenerator[tuple[Delta, ...], None]:
        slot = asyncio.ensure_future(self._slots.acquire())
        cut = asyncio.ensure_future(run.cut.wait())
        try:
            await asyncio.wait((slot, cut), return_when=asyncio.FIRST_COMPLETED)
            if run.cut_by is None:
                self._running.add(run.request.id)
                async for step in self._steps(run):
                    yield step
            if run.cut_by is not None:
                yield tuple(
                    Delta(
                        index=i, finish_reason=run.cut_by, error="The request was cut.", error_code="draining"
                    )
                    for i in range(run.request.params.n)
                )
        finally:
            cut.cancel()
            if not slot.cancel():
                self._slots.release()
            self.abort(run.request.id)

    async def _steps(self, run: _Run) -> AsyncGenerator[tuple[Delta, ...], None]:
        request, script = run.request, run.script
        if not await self._pause(run, script.prefill_s):
            return
        choices = [_Choice(self, request, script, i) for i in range(request.params.n)]
        generated = 0
        while live := [choice for choice in choices if not choice.is_done]:
            if generated or script.step_s:
                if not await self._pause(run, script.step_s):
                    return
            if script.stall_after is not None and generated >= script.stall_after:
                if not await self._pause(run, None):
                    return
            if script.fail_after is not None and generated >= script.fail_after:
                self._forget(run)
                yield (
                    Delta(index=0, finish_reason="error", error="the device is on fire", error_code="failed"),
                )
                return
            deltas = [choice.step(script.tokens_per_step) for choice in live]
            generated += script.tokens_per_step
            self.steps += 1
            if all(choice.is_done for choice in choices):
                usage = Usage(
                    prompt_tokens=len(request.prompt),
                    completion_tokens=sum(choice.count for choice in choices),
                    cached_tokens=min(script.cached_tokens, len(request.prompt) - 1),
                    cache=script.cache,
                )
                last = deltas.pop()
                vector = struct.pack("<2f", 3.0, 4.0) if request.pooling else None
                deltas.append(msgspec.structs.replace(last, usage=usage, embedding=vector))
                self._forget(run)
            yield tuple(deltas)


class _Choice:
    """One choice on its way through its script."""

    def __init__(
        self, engine: ScriptedEngine, request: GenerationRequest, script: Script, index: int
    ) -> None:
        self._codec, self._request, self._script, self._index = engine.codec, request, script, index
        self._tokens = script.tokens(index)
        context = engine.max_model_len - len(request.prompt)
        self._most = context if request.params.max_tokens is None else request.params.max_tokens
        self._at = 0
        self.count = 0
        self.is_done = False
        params = request.params
        self._text = TextStream(
            engine.codec.tokenizer,
            prompt=request.prompt,
            stops=params.stop,
            include_stop=params.include_stop,
            skip_special=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def step(self, tokens: int) -> Delta:
        params = self._request.params
        first = self._at == 0
        finish: FinishReason | None
        stop_reason: int | str | None
        taken, finish, stop_reason = self._take(tokens)
        delta = self._text.push(taken)
        text = delta.text
        if delta.matched_stop is not None:
            taken = taken[: delta.consumed]
            finish, stop_reason = "stop", delta.matched_stop
        elif finish is not None:
            rest = self._text.finish()
            text += rest.text
            if rest.matched_stop is not None:
                finish, stop_reason = "stop", rest.matched_stop
        self.count += len(taken)
        self.is_done = finish is not None
        prompt_logprobs = None
        if first and self._index == 0 and params.prompt_logprobs is not None:
            rows = [self._position(token, params.prompt_logprobs) for token in self._request.prompt[1:]]
            prompt_logprobs = (None, *rows)
        return Delta(
            index=self._index,
            text=text,
            token_ids=tuple(taken),
            logprobs=None
            if params.logprobs is None
            else tuple(self._position(token, params.logprobs) for token in taken),
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish,
            stop_reason=stop_reason,
        )

    def _take(self, tokens: int) -> tuple[list[int], FinishReason | None, int | None]:
        params = self._request.params
        taken: list[int] = []
        for _ in range(tokens):
            if self._at >= self._most:
                return taken, "length", None
            if self._at >= len(self._tokens) and not self._script.endless and not params.ignore_eos:
                taken.append(IM_END)
                return taken, "stop", None
            token = self._tokens[self._at % len(self._tokens)]
            self._at += 1
            taken.append(token)
            if token in params.stop_token_ids:
                return taken, "stop", token
        return taken, "length" if self._at >= self._most else None, None

    def _position(self, token: int, top: int) -> PositionLogprobs:
        def entry(token_id: int, logprob: float, rank: int) -> TokenLogprob:
            return TokenLogprob(token_id, logprob, self._codec.tokenizer.token_bytes(token_id), rank)

        others = [IM_END, *range(65, 91)]
        tops = [entry(token, self._script.top_logprob, 1)]
        tops += [
            entry(other, self._script.rare_logprob, i + 2) for i, other in enumerate(others) if other != token
        ]
        return PositionLogprobs(tops[0], tuple(tops[:top]))
