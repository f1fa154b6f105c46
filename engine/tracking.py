"""From a sequence's tokens to a client's deltas: text, logprobs, why it ended, what it used.

One `Choice` per sequence, one `Tracked` per request. They know text and results; nothing of steps or blocks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..kernels.batch import StepOutput
from .api import (
    CacheReport,
    Delta,
    ErrorCode,
    FinishReason,
    GenerationRequest,
    PositionLogprobs,
    TokenLogprob,
    Usage,
)
from .codec import TextStream, Tokenizer
from .request import Sequence, Settled
from .stream import DeltaStream

LOGPROB_FLOOR = -9999.0
"""Stands for -inf and anything below: JSON has no infinities (vLLM's value, which clients know)."""


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence of a request, with its text."""

    sequence: Sequence
    text: TextStream
    prompt_logprobs: list[PositionLogprobs | None] = field(default_factory=list)
    finished: bool = False


@dataclass(slots=True, eq=False)
class Tracked:
    """A request that has not ended yet."""

    request: GenerationRequest
    choices: list[Choice]
    stream: DeltaStream
    eos_token_ids: frozenset[int]
    arrived: float
    """Time of `time.perf_counter`, as the steps' times are."""
    started: float | None = None
    """When the first step that ran a part of it began."""
    kept_s: float | None = None
    """Seconds that its prompt is kept below the device after its use; None if it is not."""
    clock: Callable[[], float] = time.time

    @property
    def is_done(self) -> bool:
        return all(choice.finished for choice in self.choices)

    def advance(self, settled: Settled, output: StepOutput, tokenizer: Tokenizer) -> Delta | None:
        """Book what one step brought for one choice; None if there is nothing to tell."""
        choice = self.choices[settled.sequence.index]
        seq = choice.sequence
        if not settled.finite:
            return self.end(choice, "error", error="the model's output is not finite", error_code="failed")
        if seq.pooled is not None and settled.rows:
            seq.pooled.add(output.hidden[settled.first_row : settled.first_row + settled.rows])
        if seq.matcher is not None and seq.matcher.error is not None:
            why = f"the answer could not follow its grammar: {seq.matcher.error}"
            return self.end(choice, "error", error=why, error_code="failed")
        prompt_logprobs = self._prompt_logprobs(choice, settled, output, tokenizer)
        if not settled.sampled:
            if seq.max_len > seq.prompt_len or seq.settled < seq.prompt_len:
                return None
            return self.end(choice, "length", prompt_logprobs=prompt_logprobs)
        token = seq.tokens[-1]
        row = settled.first_row + settled.rows - 1
        if token in seq.stop_ids and len(seq.tokens) > seq.sampling.min_len:
            return self._end_at_stop_token(choice, token, prompt_logprobs)
        delta = choice.text.push((token,))
        logprobs = None
        if seq.logprobs is not None:
            logprobs = (position_logprobs(output, row, seq.logprobs, tokenizer),)
        if delta.matched_stop is not None:
            return self.end(
                choice, "stop", text=delta.text, tokens=(token,), logprobs=logprobs,
                prompt_logprobs=prompt_logprobs, stop_reason=delta.matched_stop,
            )  # fmt: skip
        is_whole = seq.matcher is not None and seq.matcher.is_complete
        if is_whole or len(seq.tokens) >= seq.max_len:
            return self.end(
                choice, "stop" if is_whole else "length", text=delta.text, tokens=(token,), logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )  # fmt: skip
        return Delta(
            index=seq.index,
            text=delta.text,
            token_ids=(token,),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def end(
        self,
        choice: Choice,
        reason: FinishReason,
        *,
        text: str = "",
        tokens: tuple[int, ...] = (),
        logprobs: tuple[PositionLogprobs, ...] | None = None,
        prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None,
        stop_reason: int | str | None = None,
        error: str | None = None,
        error_code: ErrorCode | None = None,
    ) -> Delta:
        """The last delta of a choice, with the text that was held back; of the request with its usage."""
        choice.finished = True
        pooled = choice.sequence.pooled
        if not isinstance(stop_reason, str):
            rest = choice.text.finish()
            text += rest.text
            if rest.matched_stop is not None:
                reason, stop_reason = "stop", rest.matched_stop
        return Delta(
            index=choice.sequence.index,
            text=text,
            token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            embedding=pooled.vector() if pooled is not None and reason == "length" else None,
            finish_reason=reason,
            stop_reason=stop_reason,
            usage=self.usage() if self.is_done else None,
            error=error,
            error_code=error_code,
        )

    def usage(self) -> Usage:
        first = self.choices[0].sequence
        block = first.prompt.block_tokens
        return Usage(
            prompt_tokens=first.prompt_len,
            completion_tokens=sum(c.sequence.output_len for c in self.choices),
            cached_tokens=first.cached,
            cache_write_tokens=sum(c.sequence.written_blocks for c in self.choices) * block,
            queued_s=0.0 if self.started is None else max(self.started - self.arrived, 0.0),
            cache=CacheReport(
                sources=first.sources,
                created_at=first.cached_since,
                expires_at=None if self.kept_s is None else self.clock() + self.kept_s,
                ttl_s=self.kept_s,
                miss=first.miss,
                load_s=first.load_s,
            ),
        )

    def _end_at_stop_token(
        self, choice: Choice, token: int, prompt_logprobs: tuple[PositionLogprobs | None, ...] | None
    ) -> Delta:
        text = ""
        if self.request.params.include_stop:
            text = choice.text.push((token,)).text
        is_eos = token in self.eos_token_ids and token not in self.request.params.stop_token_ids
        return self.end(
            choice, "stop", text=text, tokens=(token,), prompt_logprobs=prompt_logprobs,
            stop_reason=None if is_eos else token,
        )  # fmt: skip

    def _prompt_logprobs(
        self, choice: Choice, settled: Settled, output: StepOutput, tokenizer: Tokenizer
    ) -> tuple[PositionLogprobs | None, ...] | None:
        """Collect scored prompt positions; all of them, once, with the step that completes the prompt."""
        seq = choice.sequence
        if seq.prompt_logprobs is None or settled.start >= seq.prompt_len:
            return None
        known = choice.prompt_logprobs
        if not known:
            known.append(None)
        first = settled.start + settled.count - settled.rows  # position of the first logits row
        for row in range(settled.rows):
            scored = first + row + 1
            if len(known) == scored < seq.prompt_len:
                known.append(
                    position_logprobs(output, settled.first_row + row, seq.prompt_logprobs, tokenizer)
                )
        return tuple(known) if len(known) == seq.prompt_len and seq.settled >= seq.prompt_len else None


def position_logprobs(output: StepOutput, row: int, top: int, tokenizer: Tokenizer) -> PositionLogprobs:
    """One row of a step's results as the engine's door shows it; `top` alternatives, most likely first."""
    chosen = _logprob(int(output.tokens[row]), float(output.logprobs[row]), int(output.ranks[row]), tokenizer)
    tops = zip(output.top_tokens[row, :top].tolist(), output.top_logprobs[row, :top].tolist(), strict=True)
    return PositionLogprobs(
        chosen, tuple(_logprob(token, value, rank, tokenizer) for rank, (token, value) in enumerate(tops))
    )


def _logprob(token: int, value: float, rank: int, tokenizer: Tokenizer) -> TokenLogprob:
    value = max(value, LOGPROB_FLOOR) if math.isfinite(value) else LOGPROB_FLOOR
    return TokenLogprob(token, value, tokenizer.token_bytes(token), rank)
