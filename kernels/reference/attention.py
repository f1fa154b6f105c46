"""Attention over paged KV, computed so that a row's bits depend on its own sequence only.

    m' = max(m, max_j s_j)
    l' = l e^(m - m') + sum_j e^(s_j - m')
    o' = o e^(m - m') + sum_j e^(s_j - m') v_j

Queries go in tiles of `QUERY_TILE` rows and keys in blocks of `KEY_BLOCK` positions counted from position
0 of the sequence, so every product has the same shape whatever shares the step, and every sum the same
order. A block that is masked for a row changes nothing: its factors are e^0 = 1 and e^-inf = 0.

# Q rows of a tile, G query heads per KV head, J keys of a block
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..batch import I32
from .memory import KVPool

QUERY_TILE = 16
KEY_BLOCK = 64


def attend(
    q: torch.Tensor, pool: KVPool, layer: int, table: I32, start: int, scale: float, softcap: float
) -> torch.Tensor:
    """Return [T, heads * head_dim] for one sequence's rows at positions start, start + 1, ..."""
    spec = pool.spec
    rows, width = q.shape
    end = start + rows
    first = max(start - spec.window + 1, 0) // KEY_BLOCK * KEY_BLOCK if spec.window else 0
    padded_end = -(-end // KEY_BLOCK) * KEY_BLOCK
    kv = pool.read(layer, table, first, end, padded_end)
    k, v = kv.reshape(2, -1, spec.kv_heads, spec.head_dim).transpose(1, 2).contiguous()

    q = F.pad(q, (0, 0, 0, -rows % QUERY_TILE))
    q = q.reshape(-1, QUERY_TILE, spec.kv_heads, width // (spec.kv_heads * spec.head_dim), spec.head_dim)
    outs = []
    for tile, q_QKGD in enumerate(q):
        positions = torch.arange(start + tile * QUERY_TILE, start + (tile + 1) * QUERY_TILE)
        last = min(int(positions[-1]) + 1, end)
        lower = positions - spec.window if spec.window else torch.full_like(positions, -1)
        accumulator = _Softmax(q_QKGD.permute(1, 2, 0, 3).flatten(1, 2).contiguous(), scale, softcap)
        nearest = max(int(lower[0]) + 1, 0) // KEY_BLOCK * KEY_BLOCK
        for begin in range(nearest, last, KEY_BLOCK):
            keys = torch.arange(begin, begin + KEY_BLOCK)
            visible_QJ = (keys <= positions[:, None]) & (keys > lower[:, None])
            block = slice(begin - first, begin - first + KEY_BLOCK)
            accumulator.add(k[:, block].contiguous(), v[:, block].contiguous(), visible_QJ)
        out = accumulator.result().reshape(spec.kv_heads, -1, QUERY_TILE, spec.head_dim)
        outs.append(out.permute(2, 0, 1, 3).flatten(1))
    return torch.cat(outs)[:rows]


class _Softmax:
    """The running maximum, sum and output of one tile, [kv_heads, G * Q, ...]."""

    def __init__(self, q: torch.Tensor, scale: float, softcap: float) -> None:
        self.q, self.scale, self.softcap = q, scale, softcap
        self.maximum = torch.full((*q.shape[:2], 1), -torch.inf)
        self.sum = torch.zeros(*q.shape[:2], 1)
        self.out = torch.zeros_like(q)

    def add(self, k: torch.Tensor, v: torch.Tensor, visible_QJ: torch.Tensor) -> None:
        scores = self.q @ k.mT * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        repeats = scores.shape[1] // QUERY_TILE
        scores = scores.masked_fill(~visible_QJ.repeat(repeats, 1), -torch.inf)
        maximum = torch.maximum(self.maximum, scores.amax(-1, keepdim=True))
        base = maximum.masked_fill(maximum == -torch.inf, 0.0)  # nothing visible yet: e^-inf, not NaN
        weights = torch.exp(scores - base)
        decay = torch.exp(self.maximum - base)
        self.sum = self.sum * decay + weights.sum(-1, keepdim=True)
        self.out = self.out * decay + weights @ v
        self.maximum = maximum

    def result(self) -> torch.Tensor:
        return self.out / self.sum
