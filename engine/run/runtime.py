"""A model made ready to run: file, codec, program, executor, memory. Built once, before the port opens."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...cache import KVStore
from ...cache.mover import open_tiers
from ...cache.sizing import blocks_for_budget, context_capacity
from ...cache.spec import layout_digest
from ...cache.tiers import Tier
from ...kernels.backend import Backend, BackendError, Executor, StepLimits, check_ops, open_backend
from ...kernels.batch import SlotTables, StepBatch, StepOutput
from ...kernels.kv import ITEM_BYTES, KVDtype
from ...kernels.program import Program
from ..api import ModelInfo
from ..codec import Codec
from ..config import EngineConfig
from ..errors import ModelError
from ..load.check import check_weights
from ..load.model import ModelFile, open_model
from ..models.registry import build_program
from ..schedule import CostModel, ProgramCost

logger = logging.getLogger(__name__)

MAX_STEP_ROWS = 512  # rows of one step: beyond this a matmul gains nothing from more rows
MAX_LOGITS_ROWS = 128  # at least; logits of one step are this many times the vocabulary
SLOW_STEP_MS = 500.0  # a start must not take seconds for a better figure
AUTO_BACKENDS = ("cpu", "reference")


@dataclass(slots=True)
class Runtime:
    """All that `LocalEngine` needs of a loaded model."""

    info: ModelInfo
    codec: Codec
    program: Program
    executor: Executor
    tables: SlotTables
    store: KVStore
    cost: CostModel
    limits: StepLimits
    eos_token_ids: frozenset[int]
    tiers: list[Tier] = field(default_factory=list)
    """Where blocks live below the device, fastest first."""


def assemble(config: EngineConfig) -> Runtime:
    """Load what `config` names. Blocking: run it in a thread, or before the event loop.

    Raises:
        ModelError: the model cannot be served as configured; says which tensor, field or flag.
    """
    model = open_model(config.model, cache_dir=config.derived_dir)
    dtype: KVDtype = "f16" if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype
    program = build_program(model.config, kv_dtype=dtype, block_tokens=config.cache.block_tokens)
    check_weights(program, model.tensors, str(model.root))
    codec = codec_of(model, config.chat_template)
    limits = StepLimits(MAX_STEP_ROWS, max(MAX_LOGITS_ROWS, config.max_num_seqs))
    try:
        kv_blocks = blocks_for_budget(
            program.kv_groups,
            config.cache.kv_cache_memory_bytes,
            sequences=config.max_num_seqs,
            chunk_tokens=limits.rows,
        )
    except ValueError as err:
        raise ModelError(f"{err} (--kv-cache-memory-bytes)") from err
    max_len = _context(config, model.config.max_position, context_capacity(program.kv_groups, kv_blocks))
    tables = SlotTables(config.max_num_seqs, max_len, program.kv_groups)
    executor, backend = _load(config, program, model, tables, kv_blocks, limits)
    weight_bytes = sum(model.tensors[name].data.nbytes for name in program.weights)
    cost = CostModel(ProgramCost.of(program), weight_bytes)
    cost.calibrate(lambda start, rows: _measure(executor, tables, start, rows), max_len - 1)
    name = config.served_name or model.name
    logger.info(
        "ready model=%s backend=%s context=%d kv_blocks=%s step_overhead_ms=%.2f row_ms=%.3f",
        name, backend, max_len, list(kv_blocks), cost.overhead_ms, cost.chunk_ms(0, 1),
    )  # fmt: skip
    eos = tuple(dict.fromkeys((*model.config.eos_token_ids, *model.vocab.eos_token_ids)))
    info = ModelInfo(
        name=name,
        max_model_len=max_len,
        vocab_size=program.vocab_size,
        architecture=model.config.architecture,
        weights_digest=model.digest,
        root=model.root.name,
        backend=backend,
        eos_token_ids=eos,
        hidden_size=program.hidden_size,
    )
    store = KVStore(program.kv_groups, kv_blocks, model.digest, config.cache, executor.kv_layout)
    tiers = open_tiers(config.cache, ITEM_BYTES[dtype]) if config.cache.enable_prefix_caching else []
    return Runtime(info, codec, program, executor, tables, store, cost, limits, frozenset(eos), tiers)


def kv_identities(config: EngineConfig, model: ModelFile) -> dict[str, bytes]:
    """By backend, the identity under which it would keep this model's blocks (`layout_digest`). No weights
    are loaded."""
    dtype: KVDtype = "f16" if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype
    program = build_program(model.config, kv_dtype=dtype, block_tokens=config.cache.block_tokens)
    identities: dict[str, bytes] = {}
    for name in AUTO_BACKENDS if config.backend == "auto" else (config.backend,):
        try:
            kv_layout = open_backend(name).kv_layout
        except BackendError:
            continue
        identities[name] = layout_digest(model.digest, program.kv_groups, kv_layout)
    return identities


def codec_of(model: ModelFile, template: Path | None = None) -> Codec:
    """The text side of an opened model, with `template` instead of its own if one is given.

    Raises:
        ModelError: the template cannot be read, or the vocabulary is of a kind that cannot be served.
    """
    source = model.chat_template
    if template is not None:
        try:
            source = template.read_text("utf-8")
        except OSError as err:
            raise ModelError(f"--chat-template {template}: {err.strerror}") from err
        except UnicodeDecodeError as err:
            raise ModelError(f"--chat-template {template} is not UTF-8 text") from err
    vocab = model.vocab
    return Codec.build(
        vocab.tokenizer,
        bos_token_id=vocab.bos_token_id,
        eos_token_ids=vocab.eos_token_ids,
        add_bos=vocab.add_bos,
        add_eos=vocab.add_eos,
        special_ids=vocab.special_ids,
        chat_template=source,
    )


def _context(config: EngineConfig, trained: int, capacity: int) -> int:
    wanted = config.max_model_len or trained
    if wanted <= capacity:
        return wanted
    if config.max_model_len:
        raise ModelError(
            f"--max-model-len {wanted} does not fit: the KV cache holds {capacity} tokens "
            f"(--kv-cache-memory-bytes {config.cache.kv_cache_memory_bytes})"
        )
    logger.warning("context=%d tokens: the KV cache holds no more of the model's %d", capacity, trained)
    return capacity


def _load(
    config: EngineConfig,
    program: Program,
    model: ModelFile,
    tables: SlotTables,
    kv_blocks: Sequence[int],
    limits: StepLimits,
) -> tuple[Executor, str]:
    """Load on the backend that was asked for, or on the first that can."""
    names = AUTO_BACKENDS if config.backend == "auto" else (config.backend,)
    threads = config.threads or len(os.sched_getaffinity(0))
    refusals: list[str] = []
    for name in names:
        try:
            backend: Backend = open_backend(name)
            check_ops(program, backend)
            executor = backend.load(program, model.tensors, tables, kv_blocks, limits, threads)
        except BackendError as err:
            refusals.append(str(err))
            continue
        for refusal in refusals:
            logger.warning("%s", refusal)
        return executor, name
    raise ModelError(f"{model.root}: no backend can run this model. " + "; ".join(refusals))


def _measure(executor: Executor, tables: SlotTables, start: int, rows: int) -> float:
    """Milliseconds of a step of `rows` rows at `start` in slot 0, the better of two unless it is slow anyway;
    the tables are left clean. Every position lies in block 0: what is computed does not matter here."""
    for table in tables.block_tables:
        table[0] = 0
    batch = StepBatch(
        slots=np.zeros(1, np.int32),
        starts=np.array([start], np.int32),
        counts=np.array([rows], np.int32),
        logits=np.ones(1, np.int32),
        sample=np.zeros(1, np.uint8),
    )
    times: list[float] = []
    while len(times) < 2 and sum(times) < SLOW_STEP_MS:
        started = time.perf_counter()
        executor.step(batch, StepOutput.empty(1, 0))
        times.append(1000 * (time.perf_counter() - started))
    for table in tables.block_tables:
        table[0] = -1
    return min(times)
