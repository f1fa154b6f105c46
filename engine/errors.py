"""What can go wrong in the engine, as facts; the server alone knows their HTTP form.

EngineError
├── InvalidRequest           the request can never be served; names the parameter
│   ├── ContextTooLong       prompt (+ wanted tokens) beyond the context; has the numbers
│   └── GrammarRefused       the answer's grammar; says where in the schema
├── EngineOverloaded         the bounded queue is full; says when to try again
├── EngineDraining           shutting down, takes nothing new
├── EngineStopped            the engine's loop has failed; only a restart helps
├── CacheUnavailable         a tier of the prompt cache cannot be changed now
├── RequestFailed            a step or a deadline failed this request after it was accepted
└── ModelError               a model cannot be loaded; names the tensor, type or field
"""

from __future__ import annotations


class EngineError(Exception):
    """Root of the engine's errors."""


class InvalidRequest(EngineError):
    """A parameter's value cannot be honoured."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(InvalidRequest):
    """The prompt leaves no room in the context. With `is_least` it has `prompt_tokens` or more: a text that
    is far too long is not counted to its end."""

    def __init__(
        self,
        prompt_tokens: int,
        limit: int,
        wanted: int = 0,
        *,
        param: str = "messages",
        is_least: bool = False,
    ) -> None:
        asked = f" and {wanted} tokens of output were asked for" if wanted else ""
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, the prompt has "
            f"{'at least ' * is_least}{prompt_tokens} tokens{asked}. Please shorten it.",
            param,
        )
        self.prompt_tokens, self.limit, self.wanted = prompt_tokens, limit, wanted


class GrammarRefused(InvalidRequest):
    """A grammar that is wrong, or asks for what cannot be enforced."""

    def __init__(self, message: str, *, pointer: str | None = None) -> None:
        where = "" if pointer is None else f" (at {pointer or 'the root'})"
        super().__init__(message + where)
        self.pointer = pointer
        """JSON pointer into the schema, "" being its root; None for what is no schema."""
        self.tag: int | None = None
        """Which of several forms has that schema."""


class EngineOverloaded(EngineError):
    """The waiting queue is full."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDraining(EngineError):
    """The engine finishes what it has and takes nothing new."""


class EngineStopped(EngineError):
    """The engine's loop has ended by a fault: nothing can be served any more."""


class CacheUnavailable(EngineError):
    """What was to be deleted may still be in a tier: ask again."""


class RequestFailed(EngineError):
    """An accepted request could not be finished."""


class ModelError(EngineError):
    """A model file cannot be served."""
