"""The answer of `artesian cache why`: what of a prompt lies on disk, and what ends it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from ...cache.spec import block_keys, root_key, tenant_digest
from ...cache.tiers import Fate, Kind, TierFault
from ...cache.tiers.nvme import NvmeTier
from ...engine.codec import Codec, Conversation
from ...engine.config import EngineConfig
from ...engine.errors import InvalidRequest
from ...engine.load.model import open_model
from ...engine.run.runtime import codec_of, kv_identities
from ...server.api.caches import PromptFields
from ...server.api.chat_messages import to_conversation
from ...server.api.normalise import normalise
from ...server.api.respond import isolation_salt
from ...server.cache_trace import NAMESPACE, Trace, common_prefix, unpack_tokens
from ...server.config import ConfigError
from ...server.errors import BadRequest
from .human import span

SHOWN_TOKENS = 12
FATES = {
    Fate.EXPIRED: "expired",
    Fate.EVICTED: "evicted before their time: the budget or the disk was full",
    Fate.DELETED: "deleted",
    Fate.CORRUPT: "damaged on disk, and dropped",
}


class Closest(msgspec.Struct, kw_only=True):
    """The answered prompt that shares the most with this one, and where the two part."""

    id: str
    created_at: float
    tokens: int
    shared_tokens: int
    message_index: int | None = None
    """The message of this prompt that the first other token belongs to."""
    role: str | None = None
    there: str = ""
    """How that prompt goes on from there."""
    here: str = ""
    """How this one does."""


class Why(msgspec.Struct, kw_only=True):
    """How much of a prompt is on disk. Times are seconds since the epoch."""

    tokens: int
    block_tokens: int
    cached_tokens: int
    """That a request would reuse: at most all but one."""
    backend: str
    files: list[str] = []
    """Where they lie, in the cache's directory."""
    created_at: float | None = None
    expires_at: float | None = None
    pinned: bool = False
    missing_at: int | None = None
    """The first token whose block is not there; None if no full block is missing."""
    ends_with: str | None = None
    """Why it is not there: expired, evicted, deleted, corrupt or never_seen."""
    closest: Closest | None = None

    def lines(self, now: float) -> list[str]:
        """The answer for people."""
        lines = [
            f"{self.cached_tokens} of {self.tokens} tokens would come from disk (backend {self.backend})"
        ]
        if self.created_at is not None:
            ends = "pinned" if self.pinned else f"expires in {span((self.expires_at or now) - now)}"
            more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
            lines.append(f"computed {span(now - self.created_at)} ago, {ends}; in {self.files[-1]}{more}")
        if self.tokens < self.block_tokens:
            lines.append(f"a prompt of less than {self.block_tokens} tokens (one block) is not kept")
        if self.missing_at is not None:
            last = self.missing_at + self.block_tokens - 1
            why = FATES[Fate(self.ends_with)] if self.ends_with in set(Fate) else "never seen"
            lines.append(f"tokens {self.missing_at} to {last} are not there: {why}")
        near = self.closest
        if near is not None and near.shared_tokens < min(self.tokens, near.tokens):
            place = f" (message {near.message_index}, {near.role})" if near.message_index is not None else ""
            ago = span(now - near.created_at)
            lines.append(f"closest: {near.id}, {ago} ago; they part at token {near.shared_tokens}{place}")
            lines.append(f"  there: {near.there!r}")
            lines.append(f"  here:  {near.here!r}")
        return lines


class _Prompt(msgspec.Struct):
    """A prompt as the server would see it."""

    tokens: list[int]
    conversation: Conversation | None = None
    kwargs: Mapping[str, Any] = {}


def explain_prompt(
    tier: NvmeTier,
    fields: dict[str, Any],
    config: EngineConfig,
    api_key: str | None,
    cache_salt: str | None,
    *,
    normalises: bool,
) -> Why:
    """Look a prompt up as a server of that configuration would.

    Raises:
        ConfigError, EngineError: the prompt or the model cannot be read.
    """
    try:
        asked = msgspec.convert(fields, PromptFields)
    except msgspec.ValidationError as err:
        raise ConfigError(f"the prompt: {err}") from err
    model = open_model(config.model, cache_dir=config.derived_dir)
    codec = codec_of(model, config.chat_template)
    try:
        prompt = _encode(codec, asked, normalises)
    except (BadRequest, InvalidRequest) as err:
        raise ConfigError(f"the prompt: {err}") from err
    key_id = hashlib.sha256(api_key.encode()).hexdigest()[:16] if api_key else ""
    salt = isolation_salt(key_id, cache_salt or asked.cache_salt)
    answers = [
        _look_up(tier, prompt.tokens, config.cache.block_tokens, backend, root_key(identity, salt))
        for backend, identity in kv_identities(config, model).items()
    ]
    if not answers:
        raise ConfigError("no backend works here (see artesian doctor)")
    best = max(answers, key=lambda answer: (answer.cached_tokens, answer.ends_with != "never_seen"))
    best.closest = _closest(tier, codec, prompt, salt)
    return best


def _look_up(tier: NvmeTier, tokens: list[int], block_tokens: int, backend: str, root: bytes) -> Why:
    keys, _ = block_keys(root, tokens, block_tokens)
    found = tier.find(keys)
    answer = Why(
        tokens=len(tokens),
        block_tokens=block_tokens,
        cached_tokens=min(len(found) * block_tokens, max(len(tokens) - 1, 0)),
        backend=backend,
        files=list(dict.fromkeys(str(tier.file_of(one).relative_to(tier.directory)) for one in found)),
    )
    if found:
        answer.created_at, answer.pinned = found[-1].created_at, found[-1].pinned
        answer.expires_at = None if answer.pinned else found[-1].expires_at
    if len(found) < len(keys):
        fate = tier.fate(keys[len(found)])
        answer.missing_at = len(found) * block_tokens
        answer.ends_with = fate.value if fate else "never_seen"
    return answer


def _closest(tier: NvmeTier, codec: Codec, prompt: _Prompt, salt: str) -> Closest | None:
    mine = np.asarray(prompt.tokens, np.int32)
    best: tuple[tuple[int, float], Trace] | None = None
    for entry in tier.entries(Kind.NAMED, tenant_digest(salt)):
        if not entry.content.startswith(NAMESPACE.encode() + b"\0"):
            continue
        value = bytearray(entry.found.payload_bytes)
        try:
            tier.read(entry.found, Kind.NAMED, entry.identity, entry.content, memoryview(value))
            trace = msgspec.msgpack.decode(value, type=Trace)
        except (TierFault, msgspec.DecodeError):
            continue
        rank = (common_prefix(mine, unpack_tokens(trace.count, trace.packed)), trace.created_at)
        if rank[0] and (best is None or rank > best[0]):
            best = rank, trace
    if best is None:
        return None
    (shared, _), trace = best
    index = _message_at(codec, prompt, shared)
    theirs = unpack_tokens(trace.count, trace.packed)[shared : shared + SHOWN_TOKENS].tolist()
    return Closest(
        id=trace.id,
        created_at=trace.created_at,
        tokens=trace.count,
        shared_tokens=shared,
        message_index=index,
        role=None
        if index is None or prompt.conversation is None
        else prompt.conversation.messages[index].role,
        there=codec.detokenize(theirs),
        here=codec.detokenize(prompt.tokens[shared : shared + SHOWN_TOKENS]),
    )


def _message_at(codec: Codec, prompt: _Prompt, offset: int) -> int | None:
    """The message that the token at `offset` belongs to; None if that cannot be told."""
    if prompt.conversation is None or offset >= len(prompt.tokens):
        return None
    whole = np.asarray(prompt.tokens, np.int32)
    low, high = 0, len(prompt.conversation.messages) - 1
    while low < high:
        middle = (low + high) // 2
        begun = Conversation(prompt.conversation.messages[: middle + 1])
        try:
            tokens = codec.encode_chat(begun, add_generation_prompt=False, kwargs=prompt.kwargs)
        except InvalidRequest:
            return None
        if common_prefix(np.asarray(tokens, np.int32), whole) > offset:
            high = middle
        else:
            low = middle + 1
    return low


def _encode(codec: Codec, asked: PromptFields, normalises: bool) -> _Prompt:
    """Raises `BadRequest` or `InvalidRequest`, as for a request."""
    if asked.messages is not None:
        conversation = to_conversation(asked.messages)
        if normalises:
            conversation, _ = normalise(conversation)
        continues = bool(asked.continue_final_message)
        generates = not continues if asked.add_generation_prompt is None else asked.add_generation_prompt
        kwargs = asked.chat_template_kwargs
        tokens = codec.encode_chat(
            conversation,
            add_generation_prompt=generates,
            continue_final_message=continues,
            kwargs=kwargs,
        )
        return _Prompt(tokens, conversation, kwargs or {})
    if isinstance(asked.prompt, str):
        return _Prompt(codec.encode_prompt(asked.prompt, add_special=asked.add_special_tokens is not False))
    return _Prompt(list(asked.prompt or ()))
