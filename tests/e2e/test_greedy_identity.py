"""A request's tokens depend on the request alone: not on neighbours, chunks, preemption, cache or loop.

The truth is each request run by itself, serially, without a prefix cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import Result, collect, read
from tiny_models import VOCAB, write_gguf

from artesian.cache import CacheConfig
from artesian.engine import GenerationRequest, SamplingParams
from artesian.engine.config import EngineConfig
from artesian.engine.load.model import open_model
from artesian.engine.local import LocalEngine
from artesian.engine.models.registry import build_program
from artesian.engine.run.runtime import MAX_STEP_ROWS
from artesian.kernels.kv import KVKind

SUBJECTS = [
    pytest.param(("cpu", "smollm2"), id="smollm2 on cpu", marks=pytest.mark.model),
    *(
        pytest.param((backend, family), id=f"{family} on {backend}")
        for backend in ("cpu", "reference")
        for family in ("qwen3", "gemma3")
    ),
]
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 42}
LENGTHS = [3, 8, 15, 16, 17, 24, 30, 33, 40, 47, 64, 65]
SHARED = [24, 32, 40, 48]
"""Prompts that begin alike and part after so many tokens."""
OUTPUT = 16
BLOCK_TOKENS = 8
SMALL_BLOCKS: dict[str, Any] = {"block_tokens": BLOCK_TOKENS}
NO_CACHING: dict[str, Any] = {"enable_prefix_caching": False}

Tokens = list[int]


@dataclass
class Subject:
    """A model on a backend, what it is asked, and what it says to each alone."""

    backend: str
    path: Path
    prompts: list[Tokens]
    alone: list[Tokens]

    @property
    def jobs(self) -> list[tuple[Tokens, dict[str, Any]]]:
        return [(prompt, GREEDY) for prompt in self.prompts] + [
            (prompt, SEEDED) for prompt in self.prompts[::4]
        ]

    @asynccontextmanager
    async def engine(
        self, cache: dict[str, Any] | None = None, **settings: Any
    ) -> AsyncIterator[LocalEngine]:
        """A started engine; at its end nothing may be left running and no block may be lost."""
        defaults: dict[str, Any] = {"backend": self.backend, "max_num_seqs": 16, "threads": 1}
        kept = CacheConfig(**{"kv_cache_memory_bytes": 256 << 20} | (cache or {}))
        config = EngineConfig(self.path, cache=kept, **(defaults | settings))
        engine = LocalEngine.load(config)
        await engine.start()
        try:
            yield engine
            engine.check_integrity()
            status = engine.status()
            assert (status.running, status.waiting, status.blocks_free) == (0, 0, status.blocks_total)
        finally:
            await engine.close()

    def kv_bytes(self, blocks: int) -> int:
        """Bytes of a cache that has this many blocks of `BLOCK_TOKENS` tokens."""
        config = open_model(self.path).config
        groups = build_program(config, kv_dtype="f16", block_tokens=BLOCK_TOKENS).kv_groups
        windows = [group for group in groups if group.kind is KVKind.WINDOW]
        of_windows = (
            group.block_bytes * (group.blocks_for(group.window + MAX_STEP_ROWS) + 2) for group in windows
        )
        return sum(of_windows) + blocks * sum(g.block_bytes for g in groups if g not in windows)

    def request(self, number: int) -> GenerationRequest:
        prompt, params = self.jobs[number]
        limits: dict[str, Any] = {"max_tokens": OUTPUT, "ignore_eos": True}
        return GenerationRequest(id=f"r{number}", prompt=prompt, params=SamplingParams(**params, **limits))

    async def ask(self, engine: LocalEngine, number: int) -> Result:
        return await read(engine, self.request(number))

    async def ask_all(self, engine: LocalEngine) -> list[Result]:
        return await asyncio.gather(*(self.ask(engine, number) for number in range(len(self.jobs))))


def tokens_of(results: Sequence[Result]) -> list[Tokens]:
    return [result.tokens[0] for result in results]


def make_prompts(source: Tokens) -> list[Tokens]:
    """16 prompts of many lengths; those of `SHARED` have a beginning in common."""
    prompts = [source[7 * i : 7 * i + length] for i, length in enumerate(LENGTHS)]
    return prompts + [source[:at] + source[-at - 9 : -at] for at in SHARED]


async def run_alone(subject: Subject) -> list[Tokens]:
    async with subject.engine(loop="serial", cache=NO_CACHING) as engine:
        return tokens_of([await subject.ask(engine, number) for number in range(len(subject.jobs))])


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    backend, family = request.param
    if family == "smollm2":
        path = request.getfixturevalue("smollm2_path")
        random = np.random.default_rng(1).integers(100, 40_000, 400)
    else:
        path = tmp_path_factory.mktemp(family) / "tiny.gguf"
        write_gguf(path, family, "Q8_0", seed=5)
        random = np.random.default_rng(1).integers(4, VOCAB, 400)
    prompts = make_prompts([int(token) for token in random])
    subject = Subject(backend, path, prompts[::3] if backend == "reference" else prompts, [])
    subject.alone = asyncio.run(run_alone(subject))
    return subject


async def test_the_prompts_have_different_answers(subject: Subject) -> None:
    assert len({tuple(tokens) for tokens in subject.alone}) > len(subject.jobs) - 2
    greedy, seeded = subject.alone[0], subject.alone[len(subject.prompts)]
    assert greedy != seeded


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="overlapping steps"),
        pytest.param({"loop": "serial", "threads": 2}, id="serial steps, two threads"),
        pytest.param({"step_budget_ms": 1e-3, "cache": SMALL_BLOCKS}, id="chunks of 16"),
    ],
)
async def test_a_batch_says_what_each_says_alone(subject: Subject, settings: dict[str, Any]) -> None:
    async with subject.engine(**settings) as engine:
        assert tokens_of(await subject.ask_all(engine)) == subject.alone


async def test_neighbours_that_arrive_in_the_middle_change_nothing(subject: Subject) -> None:
    numbers = iter(range(1, len(subject.jobs)))
    first: Tokens = []
    async with subject.engine() as engine, asyncio.TaskGroup() as group:
        neighbours: list[asyncio.Task[Result]] = []
        async for deltas in engine.submit(subject.request(0)):
            first += [token for delta in deltas for token in delta.token_ids]
            neighbours += [group.create_task(subject.ask(engine, number)) for number in islice(numbers, 2)]
        assert len(neighbours) > 5
        neighbours += [group.create_task(subject.ask(engine, number)) for number in numbers]
        assert [first, *tokens_of([await task for task in neighbours])] == subject.alone


async def test_preempted_sequences_go_on_with_the_same_tokens(subject: Subject) -> None:
    blocks = 3 * (max(map(len, subject.prompts)) + OUTPUT) // BLOCK_TOKENS
    tight = SMALL_BLOCKS | {"kv_cache_memory_bytes": subject.kv_bytes(blocks)}
    async with subject.engine(tight, step_budget_ms=1000.0) as engine:  # all that fit start together
        assert engine.runtime.store.pools[0].total == blocks
        results = await subject.ask_all(engine)
        assert engine._scheduler.preemptions > 0
        assert tokens_of(results) == subject.alone


async def test_cached_prefixes_change_nothing(subject: Subject) -> None:
    async with subject.engine(cache=SMALL_BLOCKS) as engine:
        await subject.ask_all(engine)
        again = await subject.ask_all(engine)
        assert tokens_of(again) == subject.alone
        for result, (prompt, _) in zip(again, subject.jobs, strict=True):
            assert result.usage is not None and result.usage.cached_tokens == len(prompt) - 1


async def test_an_answer_is_a_cached_prefix_of_the_next_turn(subject: Subject) -> None:
    turns = [
        prompt + answer + prompt[:5]
        for prompt, answer in zip(subject.prompts[::2], subject.alone[::2], strict=False)
    ]

    async def take_turns(engine: LocalEngine) -> list[Result]:
        jobs = [collect(engine, f"t{i}", turn, max_tokens=6, **GREEDY) for i, turn in enumerate(turns)]
        return await asyncio.gather(*jobs)

    async with subject.engine(cache=NO_CACHING) as engine:
        computed = await take_turns(engine)
    async with subject.engine(cache=SMALL_BLOCKS) as engine:
        await subject.ask_all(engine)
        cached = await take_turns(engine)
    assert tokens_of(cached) == tokens_of(computed)
    for result, turn in zip(cached, turns, strict=True):
        assert result.usage is not None
        # All but the new words, and the block that the answer did not fill.
        assert len(turn) - result.usage.cached_tokens <= 5 + BLOCK_TOKENS


async def test_choices_are_the_answers_to_consecutive_seeds(subject: Subject) -> None:
    prompt = subject.prompts[2]
    params: dict[str, Any] = {"temperature": 0.8, "max_tokens": OUTPUT, "ignore_eos": True}
    async with subject.engine() as engine:
        choices = await collect(engine, "n", prompt, n=3, seed=7, **params)
        alone = [await collect(engine, f"s{seed}", prompt, seed=seed, **params) for seed in (7, 8, 9)]
    assert [choices.tokens[index] for index in range(3)] == tokens_of(alone)
    assert len({tuple(tokens) for tokens in choices.tokens.values()}) == 3
