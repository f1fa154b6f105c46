"""What a model keeps per token or per sequence: cache groups, their layout and their bytes.

A group is a set of layers whose K/V entries share one block table. The kernels room knows a
group's bytes and shapes; who owns a block, and for how long, is the cache room's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

KVDtype = Literal["f32", "f16", "bf16", "packed"]

ITEM_BYTES: dict[str, int] = {"f32": 4, "f16": 2, "bf16": 2, "packed": 1}


class KVKind(StrEnum):
    """How a group's entries age."""

    FULL = "full"
    """One entry per token, visible to every later token."""
    WINDOW = "window"
    """One entry per token, visible to the next `window` tokens only."""
    LATENT = "latent"
    """One compressed entry per `tokens_per_entry` tokens, shared by the layers that read it."""
    STATE = "state"
    """A fixed-size state per sequence (rings, recurrent state), not addressable by token."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """One cache group of a model. All sizes are per model, before any parallel split."""

    name: str
    kind: KVKind
    layers: tuple[int, ...]
    """Model layers that write into this group, ascending; the index in this tuple is the group's layer."""
    kv_heads: int
    head_dim: int
    dtype: KVDtype
    window: int = 0
    """WINDOW: token t reads positions (t - window, t]. 0 for the other kinds."""
    block_tokens: int = 64
    prefix_cacheable: bool = True
    """Whether a block may be shared between sequences by the identity of its tokens."""
    tokens_per_entry: int = 1
    entry_bytes: int = 0
    """Bytes of one entry over all of the group's layers; 0 derives K and V of `dtype`."""

    def __post_init__(self) -> None:
        if self.block_tokens <= 0 or self.block_tokens % self.tokens_per_entry:
            raise ValueError(
                f"group {self.name}: block_tokens={self.block_tokens} must be a positive multiple "
                f"of tokens_per_entry={self.tokens_per_entry}"
            )
        if (self.kind is KVKind.WINDOW) != (self.window > 0):
            raise ValueError(f"group {self.name}: window={self.window} does not fit kind {self.kind}")

    @property
    def bytes_per_entry(self) -> int:
        if self.entry_bytes:
            return self.entry_bytes
        return 2 * len(self.layers) * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all of the group's layers."""
        return self.bytes_per_entry * (self.block_tokens // self.tokens_per_entry)

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_per_entry / self.tokens_per_entry

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)
