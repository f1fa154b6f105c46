"""What is remembered of a finished prompt, so that a later miss can be explained: its tokens and its turns.

A trace is kept in memory for a while and, as a named record of the prompt cache, as long as the prompt.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from ..engine import PromptCache

NAMESPACE = "responses"
MAX_MEMORY_BYTES = 32 << 20
TRACE_BYTES = 1000
"""What a trace takes besides its tokens and texts, by estimate."""
COMPARED = 64
"""The latest prompts of a tenant that a new one is compared with."""
MAX_TRACE_TOKENS = 1 << 20

I32 = NDArray[np.int32]


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """One message: its role and a digest of all it says."""

    role: str
    digest: bytes


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """One finished prompt, as it is stored (msgpack)."""

    id: str
    """The response's id."""
    model: str
    weights: str
    """Digest of the model's weights."""
    created_at: float
    count: int
    """Tokens of the prompt."""
    packed: bytes
    """The prompt's tokens, little-endian int32, zstd."""
    turns: tuple[Turn, ...] = ()
    settings: bytes = b""
    """Digest of the template's arguments and the tools."""
    key: str = ""
    """prompt_cache_key."""


def digest(value: object) -> bytes:
    """Eight bytes that stand for a JSON-like value."""
    return hashlib.blake2b(msgspec.json.encode(value, order="deterministic"), digest_size=8).digest()


def as_array(tokens: Sequence[int]) -> I32:
    return np.asarray(tokens, np.int32)


def pack_tokens(tokens: I32) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(tokens.astype("<i4").tobytes())


def unpack_tokens(count: int, packed: bytes) -> I32:
    """The tokens of `pack_tokens`; empty if they cannot be read."""
    if not 0 <= count <= MAX_TRACE_TOKENS:
        return np.zeros(0, np.int32)
    try:
        data = zstandard.ZstdDecompressor().decompress(packed, max_output_size=4 * count + 64)
    except zstandard.ZstdError:
        return np.zeros(0, np.int32)
    return np.frombuffer(data[: len(data) // 4 * 4], "<i4").astype(np.int32)


def common_prefix(a: I32, b: I32) -> int:
    """Tokens that two prompts share from their beginning."""
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    first = int(differs.argmax()) if count else 0
    return first if count and differs[first] else count


class TraceBook:
    """The traces of one server, the latest in memory."""

    def __init__(self) -> None:
        self._recent: OrderedDict[str, OrderedDict[str, tuple[Trace, I32]]] = OrderedDict()
        """By tenant, then by response id; the latest last."""
        self._bytes = 0

    def add(self, cache: PromptCache, salt: str, trace: Trace, tokens: I32, ttl_s: float | None) -> None:
        """Remember a prompt; below the device too if it is kept there (`ttl_s`)."""
        self._remember(salt, trace, tokens)
        if ttl_s is not None:
            cache.put_soon(NAMESPACE, salt, trace.id, msgspec.msgpack.encode(trace), ttl_s)

    async def get(self, cache: PromptCache, salt: str, id: str) -> tuple[Trace, I32] | None:
        """A tenant's trace by response id, from memory or from below."""
        recent = self._recent.get(salt)
        if recent is not None and id in recent:
            return recent[id]
        data = await cache.get(NAMESPACE, salt, id)
        if data is None:
            return None
        try:
            trace = msgspec.msgpack.decode(data, type=Trace)
        except msgspec.DecodeError:
            return None
        tokens = unpack_tokens(trace.count, trace.packed)
        self._remember(salt, trace, tokens)
        return trace, tokens

    def closest(self, salt: str, tokens: I32, key: str) -> tuple[Trace, I32] | None:
        """The recent prompt of a tenant that shares the most with this one; with a prompt_cache_key, among
        those of the same key if there are any."""
        recent = list(islice(reversed(self._recent.get(salt, {}).values()), COMPARED))
        if key and (same := [known for known in recent if known[0].key == key]):
            recent = same
        best = max(recent, key=lambda known: common_prefix(known[1], tokens), default=None)
        return best if best is not None and common_prefix(best[1], tokens) > 0 else None

    def recent(self, salt: str) -> list[Trace]:
        """A tenant's traces in memory, the latest first."""
        return [trace for trace, _ in reversed(self._recent.get(salt, {}).values())]

    def forget(self, salt: str, id: str) -> None:
        traces = self._recent.get(salt)
        known = traces.pop(id, None) if traces is not None else None
        if known is not None:
            self._bytes -= _bytes_of(*known)
            if not traces:
                del self._recent[salt]

    def _remember(self, salt: str, trace: Trace, tokens: I32) -> None:
        """Keep a trace; the oldest of the tenant that was quiet the longest goes first."""
        self.forget(salt, trace.id)
        self._recent.setdefault(salt, OrderedDict())[trace.id] = (trace, tokens)
        self._recent.move_to_end(salt)
        self._bytes += _bytes_of(trace, tokens)
        while self._bytes > MAX_MEMORY_BYTES:
            quietest = next(iter(self._recent))
            self.forget(quietest, next(iter(self._recent[quietest])))


def _bytes_of(trace: Trace, tokens: I32) -> int:
    return tokens.nbytes + len(trace.packed) + len(trace.key) + 64 * len(trace.turns) + TRACE_BYTES
