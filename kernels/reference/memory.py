"""The reference backend's KV memory: one pool of K and V a layer, addressed by block tables.

# P positions of a pool, C columns (kv_heads * head_dim)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..backend import BackendError
from ..batch import I32
from ..kv import KVKind, KVSpec

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class KVPool:
    """The blocks of one KV group, stored in the group's dtype.

    Raises:
        BackendError: the group is not one K and one V per token, or its dtype is packed.
    """

    def __init__(self, spec: KVSpec, blocks: int) -> None:
        if spec.kind not in (KVKind.FULL, KVKind.WINDOW):
            raise BackendError(f"backend reference cannot keep KV group {spec.name} of kind {spec.kind}")
        if spec.dtype not in DTYPES:
            raise BackendError(f"backend reference cannot keep KV group {spec.name} as {spec.dtype}")
        self.spec = spec
        shape = (len(spec.layers), 2, blocks, spec.block_tokens, spec.kv_heads * spec.head_dim)
        self.entries = torch.zeros(shape, dtype=DTYPES[spec.dtype])

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes

    def export_block(self, block: int, out: NDArray[np.uint8]) -> None:
        """Copy a block's bytes out: by layer, K then V, position by position."""
        self._check(block, out)
        out[:] = self.entries[:, :, block].contiguous().view(torch.uint8).flatten().numpy()

    def import_block(self, block: int, data: NDArray[np.uint8]) -> None:
        """Fill a block with bytes of `export_block`."""
        self._check(block, data)
        rows = self.entries[:, :, block]
        rows.copy_(torch.from_numpy(data.copy()).view(rows.dtype).view(rows.shape))

    def _check(self, block: int, data: NDArray[np.uint8]) -> None:
        if not 0 <= block < self.entries.shape[2] or data.nbytes != self.spec.block_bytes:
            raise BackendError(
                f"backend reference: block {block} of KV group {self.spec.name}: "
                f"{data.nbytes} bytes given, a block has {self.spec.block_bytes}"
            )

    def copy_block(self, source: int, target: int) -> None:
        self.entries[:, :, target] = self.entries[:, :, source]

    def write(self, layer: int, places: torch.Tensor, k_TC: torch.Tensor, v_TC: torch.Tensor) -> None:
        """Round k and v to the group's dtype and store them at `places` (block * block_tokens + offset)."""
        pool_PC = self.entries[layer].flatten(1, 2)
        pool_PC[0, places] = k_TC.to(pool_PC.dtype)
        pool_PC[1, places] = v_TC.to(pool_PC.dtype)

    def read(self, layer: int, table: I32, start: int, end: int, padded_end: int) -> torch.Tensor:
        """Return [2, padded_end - start, C] in float32: positions [start, end), zeros after them.

        `table` is the sequence's row of the block table. A position without a block reads as zeros: it
        lies before the window, so that nothing attends to it.
        """
        out = torch.zeros(2, padded_end - start, self.entries.shape[-1])
        block_tokens = self.spec.block_tokens
        for index in range(start // block_tokens, self.spec.blocks_for(end)):
            first, last = max(index * block_tokens, start), min((index + 1) * block_tokens, end)
            if table[index] >= 0:
                rows = self.entries[layer, :, int(table[index])]
                offset = index * block_tokens
                out[:, first - start : last - start] = rows[:, first - offset : last - offset]
        return out


def make_pools(groups: Sequence[KVSpec], kv_blocks: Sequence[int]) -> tuple[KVPool, ...]:
    if len(groups) != len(kv_blocks):
        raise BackendError(f"the program has {len(groups)} KV groups, got {len(kv_blocks)} block counts")
    return tuple(KVPool(spec, blocks) for spec, blocks in zip(groups, kv_blocks, strict=True))
