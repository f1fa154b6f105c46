"""What the server answers, as typed Structs. Fields that a newer server adds are passed over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

Message: TypeAlias = "Mapping[str, Any] | ChatMessage"
"""One message of a request: a mapping in OpenAI's form, or a message of an earlier answer."""


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str = ""
    """JSON text."""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the model asks for."""

    id: str
    type: str = "function"
    function: FunctionCall

    def to_dict(self) -> dict[str, Any]:
        """Return the form that a request's `tool_calls` take."""
        calls: dict[str, Any] = msgspec.to_builtins(self)
        return calls


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message of the model; may be sent back as it is."""

    role: str
    content: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed again."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else 0


class Divergence(msgspec.Struct, kw_only=True):
    """Where a prompt parts from the one it was compared with."""

    compared_with: str
    token_offset: int
    what: str
    message_index: int | None = None
    role: str | None = None


class CacheDiagnostics(msgspec.Struct, kw_only=True):
    """Whether the prompt cache was hit, and if not, why. Times are seconds since the epoch."""

    type: str
    """`cache_hit`, `cache_miss`, `comparison_response_not_found`, `unavailable`."""
    reason: str | None = None
    cache_missed_tokens: int | None = None
    comparison_reusable_tokens: int | None = None
    cached_tokens: int | None = None
    sources: dict[str, int] = {}
    """Reused tokens by where they came from: device, host, disk, shared."""
    created_at: float | None = None
    age_s: float | None = None
    expires_at: float | None = None
    ttl_s: float | None = None
    load_s: float | None = None
    divergence: Divergence | None = None
    normalised: list[Any] = []

    @property
    def is_hit(self) -> bool:
        return self.type == "cache_hit"


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob] = []


class Logprobs(msgspec.Struct, kw_only=True):
    content: list[TokenLogprob] | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None


class Answer(msgspec.Struct, kw_only=True):
    """What all answers have."""

    request_id: str | None = None
    """The answer's `x-request-id`, as the server's log has it."""


class Generated(Answer, kw_only=True):
    """What the answers of both generation endpoints have."""

    id: str
    model: str
    created: int
    system_fingerprint: str | None = None
    usage: Usage | None = None
    prompt_cache_diagnostics: CacheDiagnostics | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: Any = None
    warnings: list[str] = []


class ChatAnswer(Generated, kw_only=True):
    """A whole chat completion."""

    choices: list[ChatChoice] = []

    @property
    def message(self) -> ChatMessage:
        """The first choice's message."""
        return self.choices[0].message

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.message.content or ""

    @property
    def finish_reason(self) -> str | None:
        """The first choice's."""
        return self.choices[0].finish_reason


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Any = None
    token_ids: list[int] | None = None


class CompletionAnswer(Generated, kw_only=True):
    """A whole text completion."""

    choices: list[CompletionChoice] = []

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, kw_only=True):
    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None


class ChunkDelta(msgspec.Struct, kw_only=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChunkDelta
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None


class ChatChunk(Generated, kw_only=True):
    """One event of a chat stream, as it is sent."""

    choices: list[ChunkChoice] = []


class Model(msgspec.Struct, kw_only=True):
    id: str
    created: int = 0
    owned_by: str = ""
    root: str | None = None
    max_model_len: int | None = None


class ModelList(Answer, kw_only=True):
    data: list[Model]


class NamedCache(Answer, kw_only=True):
    """A prompt that is kept by name. Times are seconds since the epoch."""

    name: str
    model: str
    created_at: float
    tokens: int
    cached_tokens: int
    sources: dict[str, int]
    bytes: int
    pinned: bool
    expires_at: float | None = None
    """None = pinned, or nothing of it is kept below the device."""
    ends_with: str | None = None
    """Why not more of the prompt is cached."""
    prompt_cache_key: str | None = None
    usage: Usage | None = None
    """What computing it took, where this call has computed it."""


class AnsweredPrompt(msgspec.Struct, kw_only=True):
    """A prompt that was answered lately."""

    id: str
    model: str
    created_at: float
    tokens: int
    prompt_cache_key: str | None = None


class CacheList(Answer, kw_only=True):
    data: list[NamedCache]
    prompts: list[AnsweredPrompt] = []


class CachedPrompt(msgspec.Struct, kw_only=True):
    """How much of a prompt is cached now."""

    tokens: int
    block_tokens: int
    cached_tokens: int
    sources: dict[str, int] = {}
    bytes: int = 0
    created_at: float | None = None
    expires_at: float | None = None
    pinned: bool = False
    ends_with: str | None = None


class CacheExplanation(Answer, kw_only=True):
    """What would be reused of a prompt, and why not more."""

    model: str
    prompt: CachedPrompt
    prompt_cache_diagnostics: CacheDiagnostics


class ChatEstimate(Answer, kw_only=True):
    """What a chat request would take now."""

    model: str
    prompt_tokens: int
    cached_tokens: int
    sources: dict[str, int] = {}
    queue_s: float
    compute_s: float
    time_to_first_token_s: float
    """The sum of the two."""
    prompt_cache_diagnostics: CacheDiagnostics | None = None
    warnings: list[str] = []


class CacheDeleted(Answer, kw_only=True):
    deleted_tokens: int
    deleted_prompts: int
    name: str | None = None
