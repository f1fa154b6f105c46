"""The answer of `artesian cache why`: what of a prompt lies on disk, and what ends it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from ...cache.spec import block_keys, root_key, tenant_digest
from ...cache.tiers import Kind, TierFault
from ...cache.tiers.nvme import NvmeTier
from ...engine.codec import Codec, Conversation, Message
from ...engine.config import EngineConfig
from ...engine.load.model import open_model
from ...engine.run.runtime import codec_of, kv_identities
from ...server.api.respond import isolation_salt
from ...server.cache_trace import NAMESPACE, Trace, common_prefix, unpack_tokens
from ...server.config import ConfigError
from . import environment
from .models import find_model
from .settings import Place


class Why(msgspec.Struct, kw_only=True):
    """How much of a prompt is on disk. Times are seconds since the epoch."""

    tokens: int
    block_tokens: int
    cached_tokens: int
    backend: str
    created_at: float | None = None
    expires_at: float | None = None
    pinned: bool = False
    ends_with: str | None = None
    """Why the next full block is not there; None if nothing is missing."""
    closest: str | None = None
    """The response whose prompt shares the most with this one."""
    shared_tokens: int = 0
    closest_tokens: int = 0
    differs_at: str | None = None
    """The text of this prompt from where the two part."""

    def lines(self, now: float, span: Callable[[float], str]) -> list[str]:
        """The answer for people."""
        lines = [
            f"{self.cached_tokens} of {self.tokens} tokens would come from disk (backend {self.backend})"
        ]
        if self.created_at is not None:
            ends = "pinned" if self.pinned else f"expires in {span((self.expires_at or now) - now)}"
            lines.append(f"computed {span(now - self.created_at)} ago, {ends}")
        if self.tokens < self.block_tokens:
            lines.append(f"a prompt of less than {self.block_tokens} tokens (one block) is not kept")
        elif self.ends_with is not None:
            first = self.cached_tokens
            lines.append(f"tokens {first} to {first + self.block_tokens - 1} are not there: {self.ends_with}")
        if self.closest is not None and self.shared_tokens < min(self.tokens, self.closest_tokens):
            lines.append(f"closest: {self.closest}, the same up to token {self.shared_tokens}")
            lines.append(f"from there this prompt goes on: {self.differs_at!r}")
        return lines


def explain_prompt(
    tier: NvmeTier,
    fields: dict[str, Any],
    model: str,
    place: Place,
    api_key: str | None,
    cache_salt: str | None,
) -> Why:
    """Look a prompt up as a server with default settings would.

    Raises:
        ConfigError, EngineError: the prompt or the model cannot be read.
    """
    path = find_model(model, place.models_dir, place.index_url)
    opened = open_model(path, cache_dir=environment.home() / "derived")
    codec = codec_of(opened)
    tokens = _tokens(codec, fields)
    key_id = hashlib.sha256(api_key.encode()).hexdigest()[:16] if api_key else ""
    salt = isolation_salt(key_id, cache_salt)
    config = EngineConfig(model=path)
    block_tokens = config.cache.block_tokens
    answers = []
    for backend, identity in kv_identities(config, opened).items():
        keys, _ = block_keys(root_key(identity, salt), tokens, block_tokens)
        found = tier.find(keys)
        fate = tier.fate(keys[len(found)]) if len(found) < len(keys) else None
        answers.append(
            Why(
                tokens=len(tokens),
                block_tokens=block_tokens,
                cached_tokens=len(found) * block_tokens,
                backend=backend,
                created_at=found[-1].created_at if found else None,
                expires_at=found[-1].expires_at if found and not found[-1].pinned else None,
                pinned=bool(found) and found[-1].pinned,
                ends_with=None if len(found) == len(keys) else fate.value if fate else "never seen",
            )
        )
    if not answers:
        raise ConfigError("no backend works here (see artesian doctor)")
    best = max(answers, key=lambda answer: answer.cached_tokens)
    _compare(tier, codec, best, tokens, salt)
    return best


def _compare(tier: NvmeTier, codec: Codec, answer: Why, tokens: list[int], salt: str) -> None:
    """Add the closest prompt that was answered."""
    mine = np.asarray(tokens, np.int32)
    for entry in tier.entries(Kind.NAMED, tenant_digest(salt)):
        if not entry.content.startswith(NAMESPACE.encode() + b"\0"):
            continue
        value = bytearray(entry.found.payload_bytes)
        try:
            tier.read(entry.found, Kind.NAMED, entry.identity, entry.content, memoryview(value))
            trace = msgspec.msgpack.decode(value, type=Trace)
        except (TierFault, msgspec.DecodeError):
            continue
        theirs = unpack_tokens(trace.count, trace.packed)
        shared = common_prefix(mine, theirs)
        if shared > answer.shared_tokens:
            answer.closest, answer.shared_tokens, answer.closest_tokens = trace.id, shared, len(theirs)
    answer.differs_at = codec.detokenize(tokens[answer.shared_tokens : answer.shared_tokens + 16])


def _tokens(codec: Codec, fields: dict[str, Any]) -> list[int]:
    if "messages" in fields:
        try:
            messages = msgspec.convert(fields["messages"], tuple[Message, ...])
        except msgspec.ValidationError as err:
            raise ConfigError(f"messages: {err}") from err
        kwargs = fields.get("chat_template_kwargs")
        return codec.encode_chat(Conversation(messages), kwargs=kwargs)
    prompt = fields["prompt"]
    if isinstance(prompt, str):
        return codec.encode_prompt(prompt)
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return prompt
    raise ConfigError("prompt must be text or a list of token ids")
