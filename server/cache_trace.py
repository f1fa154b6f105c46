"""What is remembered of a finished prompt, so that a later miss can be explained: its tokens and its turns.

A trace is kept in memory for a while and, as a named record of the prompt cache, as long as the prompt.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from typing import NamedTuple

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
HEAD_TOKENS = 512
ALIKE = 0.8
"""Of the tokens of two prompts' heads: with fewer in common they are about different things. A nonce in front
of a prompt leaves almost all."""

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
    packed: bytes = b""
    """The prompt's tokens, little-endian int32, zstd; empty in memory, where they lie beside it."""
    turns: tuple[Turn, ...] = ()
    settings: bytes = b""
    """Digest of the template's arguments."""
    tools: bytes = b""
    """Digest of the tools."""
    key: str = ""
    """prompt_cache_key."""
    kept: int | None = None
    """Tokens that the request let be kept; None = all."""


class Known(NamedTuple):
    """A trace with its tokens."""

    trace: Trace
    tokens: I32


def digest(value: object) -> bytes:
    """Eight bytes that stand for a JSON-like value."""
    return hashlib.blake2b(msgspec.json.encode(value, order="deterministic"), digest_size=8).digest()


def as_array(tokens: Sequence[int]) -> I32:
    return np.asarray(tokens, np.int32)


def pack_tokens(tokens: I32) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(tokens.astype("<i4").tobytes())


def unpack_tokens(count: int, packed: bytes) -> I32:
    """The tokens of `pack_tokens`; empty if they are not exactly that many."""
    try:
        if not 0 <= count <= MAX_TRACE_TOKENS or zstandard.frame_content_size(packed) != 4 * count:
            return np.zeros(0, np.int32)  # the frame's own word would decide what is allocated
        data = zstandard.ZstdDecompressor().decompress(packed)
    except zstandard.ZstdError:
        return np.zeros(0, np.int32)
    return np.frombuffer(data, "<i4").astype(np.int32)


def common_prefix(a: I32, b: I32) -> int:
    """Tokens that two prompts share from their beginning."""
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    first = int(differs.argmax()) if count else 0
    return first if count and differs[first] else count


class TraceBook:
    """The traces of one server, the latest in memory."""

    def __init__(self) -> None:
        self._recent: OrderedDict[str, OrderedDict[str, Known]] = OrderedDict()
        """By tenant, then by response id; the latest last."""
        self._bytes = 0

    def add(self, cache: PromptCache, salt: str, trace: Trace, tokens: I32, ttl_s: float | None) -> None:
        """Remember a prompt of at least a token; below the device too if it is kept there (`ttl_s`)."""
        self._remember(salt, trace, tokens)
        if ttl_s is not None:
            packed = msgspec.structs.replace(trace, packed=pack_tokens(tokens))
            cache.put_soon(NAMESPACE, salt, trace.id, msgspec.msgpack.encode(packed), ttl_s)

    async def get(self, cache: PromptCache, salt: str, id: str) -> Known | None:
        """A tenant's trace by response id, from memory or from below."""
        traces = self._recent.get(salt)
        known = traces.get(id) if traces is not None else None
        return known if known is not None else await _stored(cache, salt, id)

    def closest(self, salt: str, tokens: I32, key: str, block_tokens: int) -> Known | None:
        """The recent prompt of a tenant that shares the most with this one, among those of the same
        prompt_cache_key if there are any. If none shares a block: the most alike, if one is alike at all."""
        recent = list(islice(reversed(self._recent.get(salt, {}).values()), COMPARED))
        if not recent:
            return None
        same_key = [known for known in recent if key and known.trace.key == key]
        best = max(same_key or recent, key=lambda known: common_prefix(known.tokens, tokens))
        if same_key or common_prefix(best.tokens, tokens) >= block_tokens:
            return best
        alike = _likeness([known.tokens for known in recent], tokens)
        return recent[int(alike.argmax())] if alike.max() >= ALIKE else None

    def recent(self, salt: str) -> list[Known]:
        """A tenant's traces in memory, the latest first."""
        return list(reversed(self._recent.get(salt, {}).values()))

    async def recall(self, cache: PromptCache, salt: str) -> None:
        """Bring a tenant's latest traces back into memory, as after a restart."""
        latest = [entry.name for entry in (await cache.names(NAMESPACE, salt))[:COMPARED]]
        older = [await _stored(cache, salt, id) for id in latest if id not in self._recent.get(salt, {})]
        for known in (*reversed([known for known in older if known]), *reversed(self.recent(salt))):
            self._remember(salt, *known)

    async def all(self, cache: PromptCache, salt: str) -> AsyncIterator[Known]:
        """Every trace of a tenant, those in memory first."""
        here = self.recent(salt)
        for known in here:
            yield known
        ids = {known.trace.id for known in here}
        for entry in await cache.names(NAMESPACE, salt):
            if entry.name not in ids and (found := await _stored(cache, salt, entry.name)) is not None:
                yield found

    async def erase(self, cache: PromptCache, salt: str, id: str) -> None:
        """Forget a trace here and below."""
        self._forget(salt, id)
        await cache.delete(NAMESPACE, salt, id)

    def _forget(self, salt: str, id: str) -> None:
        traces = self._recent.get(salt)
        known = traces.pop(id, None) if traces is not None else None
        if known is not None:
            self._bytes -= _bytes_of(known)
            if not traces:
                del self._recent[salt]

    def _remember(self, salt: str, trace: Trace, tokens: I32) -> None:
        """Keep a trace; the oldest of the tenant that was quiet the longest goes first."""
        self._forget(salt, trace.id)
        known = Known(trace, tokens)
        self._recent.setdefault(salt, OrderedDict())[trace.id] = known
        self._recent.move_to_end(salt)
        self._bytes += _bytes_of(known)
        while self._bytes > MAX_MEMORY_BYTES:
            quietest = next(iter(self._recent))
            self._forget(quietest, next(iter(self._recent[quietest])))


async def _stored(cache: PromptCache, salt: str, id: str) -> Known | None:
    """A trace from below; without its packed tokens, which are beside it."""
    data = await cache.get(NAMESPACE, salt, id)
    if data is None:
        return None
    try:
        trace = msgspec.msgpack.decode(data, type=Trace)
    except msgspec.DecodeError:
        return None
    tokens = unpack_tokens(trace.count, trace.packed)
    return Known(msgspec.structs.replace(trace, packed=b""), tokens) if len(tokens) else None


def _likeness(prompts: Sequence[I32], tokens: I32) -> NDArray[np.float64]:
    """For each prompt (none is empty) the share of its head's tokens that this one's head has too."""
    heads = [prompt[:HEAD_TOKENS] for prompt in prompts]
    lengths = np.array([len(head) for head in heads])
    found = np.isin(np.concatenate(heads), tokens[:HEAD_TOKENS]).astype(np.int64)
    shares: NDArray[np.float64] = np.add.reduceat(found, lengths.cumsum() - lengths) / lengths
    return shares


def _bytes_of(known: Known) -> int:
    trace = known.trace
    return known.tokens.nbytes + len(trace.key) + 64 * len(trace.turns) + TRACE_BYTES
