"""How far the cpu backend's answers are from the reference: perplexity, KL divergence, top-1 agreement."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Protocol

import numpy as np
from cyclopts import Parameter
from numpy.typing import NDArray
from rich.console import Console

from ...engine.load.model import ModelFile, open_model
from ...engine.load.sources import DEFAULT_MODEL
from ...engine.models.registry import build_program
from ...kernels.backend import Backend, Executor, StepLimits, open_backend
from ...kernels.batch import F32, SlotTables, StepBatch, StepOutput
from ...kernels.kv import KVDtype
from ...server.config import ConfigError
from ..cli.models import find_model
from .report import Report, run_scenario
from .texts import model_codec, reference_text

F64 = NDArray[np.float64]

BLOCK_TOKENS = 64
TEXT_CHARACTERS_PER_TOKEN = 8
PPL_BAR, KL_BAR, TOP1_BAR = 0.5, 0.005, 96.0


class LogitsExecutor(Executor, Protocol):
    """An executor that shows the logits it sampled from."""

    @property
    def logits(self) -> F32:
        """[R, V] of the latest step."""
        ...


def quality(
    *,
    model: str = DEFAULT_MODEL,
    text: Path | None = None,
    tokens: int = 4096,
    window: int = 512,
    backend: str = "cpu",
    threads: int = 0,
    json: Annotated[Path | None, Parameter(help="Where the JSON goes.")] = None,
) -> None:
    """Compare a backend (KV f16) with the reference backend (float32 of the same quantised file, KV f32).

    Parameters
    ----------
    model
        A GGUF file, a Hugging Face folder, or a name of the catalogue.
    text
        A text file; without one, the language reference inside Python itself.
    tokens
        Of the text, from its beginning.
    window
        Tokens that are predicted from each other; each window starts anew.
    backend
        What is compared with the reference.
    threads
        0 = the cores this process may use.
    """
    threads = threads or len(os.sched_getaffinity(0))
    path = find_model(model, None, None)
    source = text.read_text(encoding="utf-8") if text else reference_text()
    source = source[: tokens * TEXT_CHARACTERS_PER_TOKEN]
    ids = model_codec(path).encode_prompt(source, add_special=False)[:tokens]
    windows = [ids[at : at + window] for at in range(0, len(ids) - window + 1, window)]
    if not windows:
        raise ConfigError(f"the text has {len(ids)} tokens, less than a window of {window}")
    settings = {
        "model": path.name,
        "text": str(text) if text else "pydoc_data.topics, joined",
        "text_sha256": hashlib.sha256(source.encode()).hexdigest(),
        "tokens": sum(map(len, windows)),
        "window": window,
        "kv": {backend: "f16", "reference": "f32"},
        "warm-up": "none: nothing is timed",
    }
    opened = open_model(path)
    tested = _logits(opened, open_backend(backend), "f16", windows, threads)
    reference = _logits(opened, open_backend("reference"), "f32", windows, threads)
    compared = []
    with Console(stderr=True).status("computing both"):
        for ids, ours, theirs in zip(windows, tested, reference, strict=True):
            compared.append(compare(log_softmax(ours), log_softmax(theirs), np.array(ids)))
    _report(Report("quality", settings), backend, np.concatenate(compared, axis=1), json)


def main(arguments: list[str]) -> None:
    run_scenario(quality, arguments)


def _report(report: Report, backend: str, rows: F64, json: Path | None) -> None:
    """`rows` is [4, rows] of what `compare` returns."""
    ours, reference, kl, agrees = rows
    ppl, reference_ppl = float(np.exp(ours.mean())), float(np.exp(reference.mean()))
    relative = 100 * (ppl / reference_ppl - 1)
    top1 = 100 * float(agrees.mean())
    report.measure("perplexity", backend, "", [ppl])
    report.measure("perplexity", "reference", "", [reference_ppl])
    report.measure("KL(reference, tested) by row", backend, "nats", kl.tolist())
    report.bar(
        "perplexity against the reference, %", relative, f"within {PPL_BAR:g}", abs(relative) <= PPL_BAR
    )
    report.bar("mean KL, nats", float(kl.mean()), f"< {KL_BAR:g}", float(kl.mean()) < KL_BAR)
    report.bar("same most likely token, %", top1, f"> {TOP1_BAR:g}", top1 > TOP1_BAR)
    report.finish(json)


def compare(ours: F64, reference: F64, ids: NDArray[np.int64]) -> F64:
    """Compare the log-probabilities [n, V] that two models give after each of n tokens.

    Returns:
        [4, n - 1]: each next token's surprise (nats) in ours and in the reference, KL(reference, ours), and
        whether the most likely token is the same.
    """
    ours, reference, next_ids = ours[:-1], reference[:-1], ids[1:, None]
    return np.stack(
        [
            -np.take_along_axis(ours, next_ids, 1)[:, 0],
            -np.take_along_axis(reference, next_ids, 1)[:, 0],
            (np.exp(reference) * (reference - ours)).sum(axis=1),
            (ours.argmax(axis=1) == reference.argmax(axis=1)).astype(np.float64),
        ]
    )


def log_softmax(logits: F32) -> F64:
    """Of each row, in double precision."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    normal: F64 = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return normal


def _logits(
    model: ModelFile, backend: Backend, kv: KVDtype, windows: list[list[int]], threads: int
) -> Iterator[F32]:
    """The logits [n, V] of every window, each computed in one step in an empty slot."""
    rows = max(map(len, windows))
    program = build_program(model.config, kv_dtype=kv, block_tokens=BLOCK_TOKENS)
    tables = SlotTables(1, rows + 1, program.kv_groups)
    blocks = [table.shape[1] for table in tables.block_tables]
    limits = StepLimits(rows, rows)
    executor: LogitsExecutor = backend.load(program, model.tensors, tables, blocks, limits, threads)  # type: ignore[assignment]
    for table in tables.block_tables:
        table[0] = range(table.shape[1])
    try:
        for ids in windows:
            count = len(ids)
            tables.tokens[0, :count] = ids
            batch = StepBatch(
                slots=np.zeros(1, np.int32),
                starts=np.zeros(1, np.int32),
                counts=np.array([count], np.int32),
                logits=np.array([count], np.int32),
                sample=np.zeros(1, np.uint8),
            )
            executor.step(batch, StepOutput.empty(count, 0))
            yield executor.logits
    finally:
        executor.close()
