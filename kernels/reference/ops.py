"""The op set in torch: one function an op, buffers in, buffer out.

Every function gives a row the same bits whatever other rows are there. Products and sums over columns
run in tiles of `ROW_TILE` rows, always the same shape, because a matrix library picks its kernel, and so
its order of summation, by the number of rows. Elementwise functions are built from operations that give
the same bits at any place in an array (torch.exp, tanh, erf, arithmetic); torch's sigmoid and silu do not:
what is left of an array after its last full vector goes another way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from ..batch import SlotTables, StepBatch
from ..program import Op, Program
from .attention import attend
from .memory import KVPool

ROW_TILE = 16


@dataclass(slots=True)
class Run:
    """One step in flight: the rows' places, the loaded model, and the buffers that are still needed."""

    program: Program
    weights: Mapping[str, torch.Tensor]
    rotations: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    """cos and sin by rope constant, each [max_len, rotary / 2]."""
    pools: tuple[KVPool, ...]
    tables: SlotTables
    batch: StepBatch
    slots: torch.Tensor
    """[T] int64, as `positions`."""
    positions: torch.Tensor
    logits_rows: torch.Tensor
    """[R] int64: indices into the T rows."""
    buffers: dict[int, torch.Tensor]

    def inputs(self, op: Op) -> list[torch.Tensor]:
        return [self.buffers[index] for index in op.inputs]


def in_row_tiles(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply `function` to [ROW_TILE, width] pieces of x, the last one padded with zeros."""
    padded = F.pad(x, (0, 0, 0, -x.shape[0] % ROW_TILE))
    return torch.cat([function(tile) for tile in torch.split(padded, ROW_TILE)])[: x.shape[0]]


def embed(run: Run, op: Op) -> torch.Tensor:
    tokens = torch.from_numpy(run.tables.tokens)[run.slots, run.positions]
    rows = run.weights[op.weights[0]][tokens]
    return rows * op.number("scale")


def rms_norm(run: Run, op: Op) -> torch.Tensor:
    (x,) = run.inputs(op)
    weight, group, eps = run.weights[op.weights[0]], op.integer("group"), op.number("eps")

    def norm(tile: torch.Tensor) -> torch.Tensor:
        grouped = tile.reshape(-1, group)
        mean = (grouped * grouped).sum(-1, keepdim=True) / group
        return (grouped * (1.0 / torch.sqrt(mean + eps)) * weight).reshape(tile.shape)

    return in_row_tiles(x, norm)


def linear(run: Run, op: Op) -> torch.Tensor:
    x, *residual = run.inputs(op)
    weight = run.weights[op.weights[0]]
    out = in_row_tiles(x, lambda tile: tile @ weight.mT)
    if op.attrs["has_bias"]:
        out = out + run.weights[op.weights[1]]
    return out + residual[0] if residual else out


def rope(run: Run, op: Op) -> torch.Tensor:
    (x,) = run.inputs(op)
    rotary, magnitude = op.integer("rotary"), op.number("magnitude")
    table_cos, table_sin = run.rotations[op.weights[0]]
    cos = (table_cos[run.positions] * magnitude)[:, None]
    sin = (table_sin[run.positions] * magnitude)[:, None]
    heads = x.reshape(x.shape[0], -1, op.integer("head_dim"))
    turned, kept = heads[..., :rotary], heads[..., rotary:]
    if op.attrs["interleaved"]:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned, kept), -1).flatten(1)


def kv_write(run: Run, op: Op) -> None:
    k, v = run.inputs(op)
    group = op.integer("group")
    block_tokens = run.program.kv_groups[group].block_tokens
    table = torch.from_numpy(run.tables.block_tables[group])
    blocks = table[run.slots, run.positions // block_tokens].long()
    places = blocks * block_tokens + run.positions % block_tokens
    run.pools[group].write(op.integer("layer"), places, k, v)


def attention(run: Run, op: Op) -> torch.Tensor:
    (q,) = run.inputs(op)
    group, layer = op.integer("group"), op.integer("layer")
    scale, softcap = op.number("scale"), op.number("softcap")
    batch, outs = run.batch, []
    for slot, start, rows in zip(
        batch.slots.tolist(), batch.starts.tolist(), torch.split(q, batch.counts.tolist()), strict=True
    ):
        table = run.tables.block_tables[group][slot]
        outs.append(attend(rows, run.pools[group], layer, table, start, scale, softcap))
    return torch.cat(outs)


def glu(run: Run, op: Op) -> torch.Tensor:
    gate, up = run.inputs(op)
    match op.attrs["act"]:
        case "silu":
            acted = gate / (1.0 + torch.exp(-gate))
        case "gelu_tanh":
            inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * (gate * gate * gate))
            acted = 0.5 * gate * (1.0 + torch.tanh(inner))
        case _:
            acted = 0.5 * gate * (1.0 + torch.erf(gate * math.sqrt(0.5)))
    return acted * up


def add(run: Run, op: Op) -> torch.Tensor:
    a, b = run.inputs(op)
    return a + b


def scale(run: Run, op: Op) -> torch.Tensor:
    return run.inputs(op)[0] * op.number("factor")


def softcap(run: Run, op: Op) -> torch.Tensor:
    (x,) = run.inputs(op)
    cap = op.number("cap")
    return torch.tanh(x / cap) * cap


def select(run: Run, op: Op) -> torch.Tensor:
    return run.inputs(op)[0][run.logits_rows]


OPS: Mapping[str, Callable[[Run, Op], torch.Tensor | None]] = {
    "embed": embed,
    "rms_norm": rms_norm,
    "linear": linear,
    "rope": rope,
    "kv_write": kv_write,
    "attention": attention,
    "glu": glu,
    "add": add,
    "scale": scale,
    "softcap": softcap,
    "select": select,
}


def rotations(inv_freq: torch.Tensor, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of f32(position * inv_freq) for every position: [max_len, rotary / 2] each."""
    angles = np.arange(max_len, dtype=np.float32)[:, None] * inv_freq.numpy()
    wide = angles.astype(np.float64)
    return torch.from_numpy(np.cos(wide).astype(np.float32)), torch.from_numpy(
        np.sin(wide).astype(np.float32)
    )
