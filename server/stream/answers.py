"""A response's text as segments: one parser a choice, fed with the engine's deltas.

It knows no protocol: chat, Responses and Messages encode the same segments.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...engine import Delta
from ...engine.codec import Codec
from ...engine.codec.dialects import PROMPT_END_TOKENS, Dialect
from ...engine.codec.segments import CallEnd, Reasoning, Segment


def prompt_end(codec: Codec, prompt: Sequence[int]) -> str:
    """Return the text that says whether the prompt has opened a thought."""
    return codec.detokenize(prompt[-PROMPT_END_TOKENS:])


class Answers:
    """The choices of one response.

    Args:
        prompt: The prompt's tokens: their end says whether a thought is open.
        tools: The names of the tools on offer; none: nothing is read as a call.
    """

    def __init__(
        self, codec: Codec, dialect: Dialect, prompt: Sequence[int], tools: Collection[str], n: int
    ) -> None:
        end = prompt_end(codec, prompt)
        self._choices = [_Choice(dialect, end, tools) for _ in range(n)]

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thoughts so far, their markers included."""
        return sum(choice.reasoning_tokens for choice in self._choices)

    def take(self, delta: Delta) -> list[Segment]:
        """The segments that a delta makes certain; with its last delta all that is left of a choice."""
        return self._choices[delta.index].take(delta)

    def finish_reason(self, delta: Delta) -> str | None:
        """Why a choice ended, as the protocols tell it: "tool_calls" if it stopped by itself after calls.
        A call that a stop string or the model itself broke off is none to act on."""
        if delta.finish_reason == "stop" and self._choices[delta.index].calls_are_whole:
            return "tool_calls"
        return delta.finish_reason


class _Choice:
    def __init__(self, dialect: Dialect, prompt_end: str, tools: Collection[str]) -> None:
        self._parser = dialect.parser(prompt_end, tools)
        self._undecided = 0
        self.reasoning_tokens = 0
        self.calls_are_whole = False

    def take(self, delta: Delta) -> list[Segment]:
        segments = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            segments += self._parser.finish()
        self._undecided += len(delta.token_ids)
        if segments:
            if isinstance(segments[0], Reasoning):
                self.reasoning_tokens += self._undecided
            self._undecided = 0
            for segment in segments:
                if isinstance(segment, CallEnd):
                    self.calls_are_whole = segment.is_whole
        return segments
