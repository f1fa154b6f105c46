"""Traces of requests: Mooncake's, and one of agents that we make, with what is possible on them.

Nothing here knows the cache: it says what a perfect one, or one with LRU, could reach.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

import numpy as np

MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """One request of a trace of whole blocks. `at` in seconds."""

    at: float
    tokens: int
    """Of the prompt."""
    blocks: tuple[int, ...]
    """Of the prompt, equal numbers for equal blocks behind equal blocks."""
    written: tuple[int, ...] = ()
    """What is in the cache afterwards: the prompt's blocks, then the output's; empty = `blocks`."""

    @property
    def kept(self) -> tuple[int, ...]:
        return self.written or self.blocks


def read_mooncake(path: Path) -> list[BlockRequest]:
    """Read one of the FAST'25 traces (github.com/kvcache-ai/Mooncake): blocks of 512 tokens, the last of a
    prompt may be partial."""
    requests = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            requests.append(
                BlockRequest(row["timestamp"] / 1000, row["input_length"], tuple(row["hash_ids"]))
            )
    return requests


def hit_tokens(blocks: int, request: BlockRequest, block_tokens: int = MOONCAKE_BLOCK) -> int:
    """Tokens of a request that lie in its first blocks."""
    return min(blocks * block_tokens, request.tokens)


def unique_blocks(requests: Sequence[BlockRequest]) -> int:
    return len({block for request in requests for block in request.kept})


def lru_hit_rate(
    requests: Sequence[BlockRequest], capacity: int | Sequence[int], block_tokens: int = MOONCAKE_BLOCK
) -> float:
    """Token hit rate of a cache of `capacity` blocks that lets the least recently used go, prefix-contiguous,
    refreshed on access. A capacity of at least `unique_blocks` is the ideal; one for each request is what the
    cache may hold after it."""
    capacities = repeat(capacity) if isinstance(capacity, int) else capacity
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request, most in zip(requests, capacities, strict=False):
        run = 0
        while run < len(request.blocks) and request.blocks[run] in cache:
            run += 1
        hits += hit_tokens(run, request, block_tokens)
        for block in reversed(request.kept):  # a parent is younger than its children
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > most:
            cache.popitem(last=False)
    return hits / sum(request.tokens for request in requests)


def ttl_hit_rate(requests: Sequence[BlockRequest], ttl_s: float, block_tokens: int = MOONCAKE_BLOCK) -> float:
    """Token hit rate of a cache without a limit in which a block ends `ttl_s` after its last use."""
    used: dict[int, float] = {}
    hits = 0
    for request in requests:
        run = 0
        while run < len(request.blocks) and used.get(request.blocks[run], -math.inf) >= request.at - ttl_s:
            run += 1
        hits += hit_tokens(run, request, block_tokens)
        used.update(dict.fromkeys(request.kept, request.at))
    return hits / sum(request.tokens for request in requests)


@dataclass(frozen=True, slots=True)
class AgentShape:
    """What the agents of a trace are like. All counts are tokens at full scale.

    The defaults give the shape that DeepSeek published of its production traffic: mean input 77k, about 3k of
    it new with each turn, hence a hit rate of 96 %.
    """

    kinds: int = 6
    """Agent kinds, each with a system prompt and tools of its own that all its sessions share."""
    prefix_mean: int = 18_000
    prefix_sigma: float = 0.4
    task_mean: int = 2_500
    """What a session begins with behind its kind's prefix."""
    turns_mean: int = 38
    turns_most: int = 60
    result_mean: int = 2_400
    """New with each turn: a tool's result or the user's next words."""
    result_sigma: float = 0.8
    output_mean: int = 600
    output_sigma: float = 0.6
    sessions: int = 170
    days: float = 3.0
    night: float = 0.05
    """Arrivals at the quietest hour, against the busiest."""
    tool_s: float = 8.0
    tool_sigma: float = 1.2
    user_every: int = 6
    """Every so many turns a person answers instead of a tool."""
    user_s: float = 600.0
    user_sigma: float = 1.5
    scale: float = 1.0
    """All token counts are divided by it, to fit a small model's context."""
    seed: int = 1


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """One turn: its prompt is the session's earlier prompt, its output, and what is new."""

    at: float
    session: int
    prompt: int
    """Tokens of the prompt."""
    output: int


@dataclass(slots=True)
class AgentTrace:
    """Turns in the order of their time, and each session's whole text as token ids."""

    requests: list[AgentRequest]
    texts: list[np.ndarray] = field(repr=False)
    """Per session, int32: prompt n of a session is the first `prompt` tokens of it."""

    @property
    def mean_input(self) -> float:
        return sum(request.prompt for request in self.requests) / len(self.requests)


def agent_trace(shape: AgentShape, vocab: int = 1 << 30) -> AgentTrace:
    """Make a trace; the same shape gives the same trace."""
    chance = np.random.default_rng(shape.seed)

    def lengths(mean: float, sigma: float, count: int) -> np.ndarray:
        drawn = chance.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
        return np.maximum(1, np.round(drawn / shape.scale)).astype(int)

    prefixes = [
        chance.integers(0, vocab, length, dtype=np.int32)
        for length in lengths(shape.prefix_mean, shape.prefix_sigma, shape.kinds)
    ]
    requests: list[AgentRequest] = []
    texts: list[np.ndarray] = []
    popularity = 1 / np.arange(1, shape.kinds + 1)
    for session, start in enumerate(_arrivals(shape, chance)):
        prefix = prefixes[int(chance.choice(shape.kinds, p=popularity / popularity.sum()))]
        turns = int(np.clip(chance.poisson(shape.turns_mean), 1, shape.turns_most))
        results = lengths(shape.result_mean, shape.result_sigma, turns)
        results[0] = int(lengths(shape.task_mean, 0.5, 1)[0])
        outputs = lengths(shape.output_mean, shape.output_sigma, turns)
        own = int(results.sum() + outputs.sum())
        texts.append(np.concatenate([prefix, chance.integers(0, vocab, own, dtype=np.int32)]))
        at, prompt = start, len(prefix)
        for turn in range(turns):
            prompt += int(results[turn])
            requests.append(AgentRequest(at, session, prompt, int(outputs[turn])))
            prompt += int(outputs[turn])
            by_user = turn % shape.user_every == shape.user_every - 1
            median, sigma = (shape.user_s, shape.user_sigma) if by_user else (shape.tool_s, shape.tool_sigma)
            at += float(chance.lognormal(math.log(median), sigma))
    requests.sort(key=lambda request: request.at)
    return AgentTrace(requests, texts)


def agent_ideal(trace: AgentTrace, grain: int, *, tails: bool = False) -> float:
    """The token hit rate of a cache that forgets nothing and keeps whole blocks of `grain` tokens of prompts
    and outputs; with `tails` also the rest behind a request's last whole block, found by requests that go on
    from there. A prompt's last token is always computed, an output's last token never."""
    ends = [0] * len(trace.texts)
    hits = 0
    for request in trace.requests:
        session, most = request.session, request.prompt - 1
        known = ends[session] if tails else ends[session] // grain * grain
        if not known:  # what the session has itself covers what it shares
            alike = [(_common(trace.texts[session], trace.texts[other][:end]), end)
                     for other, end in enumerate(ends) if end]  # fmt: skip
            known = max(
                (same if tails and same == end else same // grain * grain for same, end in alike), default=0
            )
        hits += known if tails and known <= most else min(known, most) // grain * grain
        ends[session] = max(ends[session], request.prompt + request.output - 1)
    return hits / sum(request.prompt for request in trace.requests)


@dataclass(frozen=True, slots=True)
class Tails:
    """What it would mean to keep the partial block at each request's end as well."""

    gained: float
    """Token hit rate."""
    saved: float
    """Of the tokens that are computed without."""
    written: float
    """Bytes written, over those of whole blocks: a tail is written anew with each turn."""
    records: float
    """Records written, likewise."""
    kept: float
    """Bytes kept, likewise, if a tail is deleted once a longer one or a whole block replaces it."""


def tail_gain(trace: AgentTrace, grain: int) -> Tails:
    """Compare whole blocks of `grain` tokens with whole blocks and tails, bytes in proportion to tokens."""
    without, with_tails = agent_ideal(trace, grain), agent_ideal(trace, grain, tails=True)
    whole = unique_blocks(agent_blocks(trace, grain)) * grain
    rests = [(request.session, (request.prompt + request.output - 1) % grain) for request in trace.requests]
    return Tails(
        with_tails - without,
        (with_tails - without) / (1 - without),
        sum(rest for _, rest in rests) / whole,
        sum(rest > 0 for _, rest in rests) * grain / whole,
        sum(dict(rests).values()) / whole,
    )


def agent_blocks(trace: AgentTrace, grain: int) -> list[BlockRequest]:
    """The same trace in whole blocks of `grain` tokens, numbered by their content and what is before them."""
    numbers: dict[tuple[int, bytes], int] = {}
    chains: list[list[int]] = [[] for _ in trace.texts]
    requests = []
    for request in trace.requests:
        text, chain = trace.texts[request.session], chains[request.session]
        end = request.prompt + request.output - 1
        for start in range(len(chain) * grain, end - end % grain, grain):
            block = (chain[-1] if chain else -1, text[start : start + grain].tobytes())
            chain.append(numbers.setdefault(block, len(numbers)))
        prompt, kept = (request.prompt - 1) // grain, end // grain
        requests.append(BlockRequest(request.at, request.prompt, tuple(chain[:prompt]), tuple(chain[:kept])))
    return requests


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """How many leading tokens are the same."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def _arrivals(shape: AgentShape, chance: np.random.Generator) -> Iterator[float]:
    """Sessions' beginnings over the days, few at night (a cosine between `night` and 1), by thinning."""
    times: list[float] = []
    while len(times) < shape.sessions:
        at = float(chance.uniform(0, shape.days * 86400))
        height = shape.night + (1 - shape.night) * (1 - math.cos(2 * math.pi * at / 86400)) / 2
        if chance.random() < height:
            times.append(at)
    yield from sorted(times)
