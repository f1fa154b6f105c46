"""A local engine over the self-checking device and a small real tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fakes import FakeExecutor, kv_group
from tiny_tokenizers import byte_level, codec_of

from artesian.cache import CacheConfig, KVStore
from artesian.cache.tiers.nvme import NvmeTier
from artesian.engine import Delta, GenerationRequest, ModelInfo, SamplingParams, Usage
from artesian.engine.config import EngineConfig
from artesian.engine.local import LocalEngine
from artesian.engine.run import Runtime
from artesian.engine.schedule import CostModel, ProgramCost
from artesian.kernels.backend import StepLimits
from artesian.kernels.batch import SlotTables
from artesian.kernels.program import Recorder, Rows

VOCAB = 320
EOS = 1


def fake_runtime(
    *, slots: int = 4, blocks: int = 40, window: int = 0, max_len: int = 96, caching: bool = True
) -> Runtime:
    """Blocks of four tokens; the device predicts one fixed token after every prefix (see `fakes`)."""
    groups = [kv_group()] + ([kv_group("window", window=window)] if window else [])
    kv_blocks = [blocks] * len(groups)
    tables = SlotTables(slots, max_len, groups)
    recorder = Recorder("fake", tuple(groups))
    recorder.weight("token_embd.weight", VOCAB, 8)
    hidden = recorder.select(recorder.embed("token_embd.weight"), Rows.LOGITS)
    program = recorder.finish(recorder.linear(hidden, "token_embd.weight"))
    info = ModelInfo(
        name="fake", max_model_len=max_len, vocab_size=VOCAB, architecture="fake", weights_digest="d",
        root="fake", backend="fake", eos_token_ids=(EOS,),
    )  # fmt: skip
    return Runtime(
        info=info,
        codec=codec_of(byte_level()),
        program=program,
        executor=FakeExecutor(tables, groups, kv_blocks, VOCAB),
        tables=tables,
        store=KVStore(groups, kv_blocks, "d", CacheConfig(enable_prefix_caching=caching)),
        cost=CostModel(ProgramCost(1000, 100), overhead_ms=0.1, flops_per_ms=10_000),
        limits=StepLimits(32, 16),
        eos_token_ids=frozenset({EOS}),
    )


def disk_engine(path: Path, *, blocks: int = 200, max_len: int = 300) -> LocalEngine:
    """An engine that is not started, over a fake runtime with a real disk tier."""
    runtime = fake_runtime(blocks=blocks, max_len=max_len)
    clock = runtime.store.clock
    runtime.tiers.append(NvmeTier(path, budget_bytes=1 << 30, min_free_bytes=0, clock=clock, align=64))
    return LocalEngine(runtime, EngineConfig(model=Path("fake"), step_budget_ms=4.0))


@asynccontextmanager
async def running_engine(runtime: Runtime | None = None, **config: object) -> AsyncIterator[LocalEngine]:
    """A started engine; at the end nothing may be left running and no block may be lost."""
    settings = {"model": Path("fake"), "step_budget_ms": 4.0} | config
    engine = LocalEngine(runtime or fake_runtime(), EngineConfig(**settings))  # type: ignore[arg-type]
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
        engine.check_integrity()
        status = engine.status()
        assert (status.running, status.waiting, status.blocks_free) == (0, 0, status.blocks_total)


@dataclass
class Result:
    """A finished request, choice by choice."""

    text: dict[int, str]
    tokens: dict[int, list[int]]
    finish: dict[int, str]
    usage: Usage | None
    deltas: list[Delta]


async def collect(engine: LocalEngine, request_id: str, prompt: Sequence[int], **params: object) -> Result:
    """Submit and read to the end."""
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return await read(engine, GenerationRequest(id=request_id, prompt=list(prompt), params=sampling))


async def read(engine: LocalEngine, request: GenerationRequest) -> Result:
    """Submit a request and read its stream to the end."""
    result = Result({}, {}, {}, None, [])
    async for deltas in engine.submit(request):
        for delta in deltas:
            result.deltas.append(delta)
            result.text[delta.index] = result.text.get(delta.index, "") + delta.text
            result.tokens.setdefault(delta.index, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                result.finish[delta.index] = delta.finish_reason
            result.usage = delta.usage or result.usage
    return result
