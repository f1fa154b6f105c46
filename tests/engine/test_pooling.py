"""Embeddings: one vector of a prompt, whatever happened around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import read
from numpy.typing import NDArray
from tiny_models import write_gguf

from artesian.cache import CacheConfig
from artesian.engine import GenerationRequest, InvalidRequest, SamplingParams
from artesian.engine.config import EngineConfig
from artesian.engine.local import LocalEngine
from artesian.engine.pooling import Pooled

PROMPT = [3 + (7 * i) % 90 for i in range(200)]


def request(name: str, prompt: list[int], pooling: Any = "mean", **params: Any) -> GenerationRequest:
    return GenerationRequest(
        id=name, prompt=prompt, params=SamplingParams(**{"max_tokens": 0} | params), pooling=pooling
    )


def test_a_sum_does_not_depend_on_the_cuts() -> None:
    rows = np.random.default_rng(1).normal(size=(50, 8)).astype(np.float32)
    for kind, expected in (("mean", rows.astype(np.float64).mean(0)), ("last", rows[-1])):
        whole, cut = Pooled(kind, 8), Pooled(kind, 8)  # type: ignore[arg-type]
        whole.add(rows)
        for start in range(0, 50, 7):
            cut.add(rows[start : start + 7])
        assert whole.vector() == cut.vector() == np.asarray(expected, "<f4").tobytes()


@asynccontextmanager
async def engine_of(path: Path, backend: Any = "auto") -> AsyncIterator[LocalEngine]:
    cache = CacheConfig(block_tokens=8, disk_cache=False)
    engine = LocalEngine.load(EngineConfig(model=path, backend=backend, max_num_seqs=4, cache=cache))
    await engine.start()
    try:
        yield engine
        engine.check_integrity()
    finally:
        await engine.close()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
async def test_a_vector_is_the_same_alone_in_a_crowd_and_from_cache(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    oracle = write_gguf(path, "qwen3")
    async with engine_of(path, backend) as engine:

        async def vector(name: str, pooling: str, length: int = len(PROMPT)) -> NDArray[np.float32]:
            result = await read(engine, request(name, PROMPT[:length], pooling))
            assert result.usage is not None and result.usage.completion_tokens == 0
            return np.frombuffer(result.deltas[-1].embedding or b"", "<f4")

        mean, last = await vector("a", "mean"), await vector("b", "last")
        crowd = await asyncio.gather(
            *(
                vector(f"{kind}{n}", kind, len(PROMPT) - 9 * (n % 3))
                for n in range(6)
                for kind in ("mean", "last")
            )
        )
    assert np.array_equal(crowd[0], mean) and np.array_equal(crowd[1], last)
    assert np.array_equal(crowd[6], mean) and np.array_equal(crowd[7], last)
    with torch.inference_mode():
        rows = oracle(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states[-1][0].numpy()
    bound = float(0.03 * np.abs(rows).max())
    np.testing.assert_allclose(mean, rows.mean(0), atol=bound)
    np.testing.assert_allclose(last, rows[-1], atol=bound)


async def test_pooling_generates_nothing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "qwen3")
    async with engine_of(tmp_path / "model.gguf") as engine:
        with pytest.raises(InvalidRequest, match="max_tokens=0"):
            engine.submit(request("a", [3, 4], max_tokens=1))
