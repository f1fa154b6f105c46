"""The pieces that every decoder-only family shares, recorded with the canonical (GGUF) weight names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...kernels.kv import KVDtype, KVKind, KVSpec
from ...kernels.program import Buffer, Program, Recorder, Rows
from .config import ModelConfig, RopeConfig
from .rope import rope_table

Block = Callable[["Layer", Buffer], Buffer]
"""A family's decoder layer: hidden states in, hidden states out."""


def kv_groups(config: ModelConfig, kv_dtype: KVDtype, block_tokens: int) -> tuple[KVSpec, ...]:
    """Full-attention layers first, then the sliding-window ones; a kind without layers has no group.

    Blocks of a window may be shared while they are still in memory, so both are prefix-cacheable.
    """
    sliding = set(config.window_layers) if config.window else set()
    kinds = (
        ("full", KVKind.FULL, 0, [i for i in range(config.layers) if i not in sliding]),
        ("window", KVKind.WINDOW, config.window, sorted(sliding)),
    )
    return tuple(
        KVSpec(name, kind, tuple(layers), config.kv_heads, config.head_dim, kv_dtype, window, block_tokens)
        for name, kind, window, layers in kinds
        if layers
    )


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer being recorded."""

    recorder: Recorder
    config: ModelConfig
    index: int

    def weight(self, name: str, *shape: int) -> str:
        return self.recorder.weight(f"blk.{self.index}.{name}", *shape)

    def norm(self, x: Buffer, name: str) -> Buffer:
        return self.recorder.rms_norm(x, self.weight(f"{name}.weight", x.width), eps=self.config.norm_eps)

    def linear(
        self, x: Buffer, name: str, width: int, *, bias: bool, residual: Buffer | None = None
    ) -> Buffer:
        matrix = self.weight(f"{name}.weight", width, x.width)
        return self.recorder.linear(
            x, matrix, bias=self.weight(f"{name}.bias", width) if bias else None, residual=residual
        )

    def branch(self, x: Buffer, name: str, *, bias: bool, residual: Buffer) -> Buffer:
        """A branch's last projection, added to the residual stream."""
        factor = self.config.residual_scale
        if factor == 1.0:
            return self.linear(x, name, residual.width, bias=bias, residual=residual)
        out = self.linear(x, name, residual.width, bias=bias)
        return self.recorder.add(residual, self.recorder.scale(out, factor))

    def attention(self, x: Buffer) -> Buffer:
        """Attention over the normed `x` up to, and without, the output projection."""
        config, recorder = self.config, self.recorder
        group = next(i for i, spec in enumerate(recorder.kv_groups) if self.index in spec.layers)
        q = self.linear(x, "attn_q", config.heads * config.head_dim, bias=config.qkv_bias)
        k = self.linear(x, "attn_k", config.kv_heads * config.head_dim, bias=config.qkv_bias)
        v = self.linear(x, "attn_v", config.kv_heads * config.head_dim, bias=config.qkv_bias)
        if config.qk_norm:
            q, k = self._head_norm(q, "attn_q_norm"), self._head_norm(k, "attn_k_norm")
        windowed = recorder.kv_groups[group].kind is KVKind.WINDOW
        q, k = self._rotate(q, windowed), self._rotate(k, windowed)
        recorder.kv_write(k, v, group=group, layer=self.index)
        return recorder.attention(
            q,
            group=group,
            layer=self.index,
            scale=config.attention_scale or config.head_dim**-0.5,
            softcap=config.attention_softcap,
        )

    def gated(self, x: Buffer) -> Buffer:
        """act(gate x) * (up x), without the down projection."""
        config = self.config
        gate = self.linear(x, "ffn_gate", config.ffn, bias=config.mlp_bias)
        up = self.linear(x, "ffn_up", config.ffn, bias=config.mlp_bias)
        return self.recorder.glu(gate, up, act=config.activation)

    def _head_norm(self, x: Buffer, name: str) -> Buffer:
        head_dim = self.config.head_dim
        weight = self.weight(f"{name}.weight", head_dim)
        return self.recorder.rms_norm(x, weight, eps=self.config.norm_eps, group=head_dim)

    def _rotate(self, x: Buffer, windowed: bool) -> Buffer:
        config = self.config
        local = config.rope_local if windowed else None
        rope: RopeConfig = local or config.rope
        table = rope_table(rope, config.head_dim, config.max_position)
        name = "rope.local.inv_freq" if local else "rope.inv_freq"
        return self.recorder.rope(
            x,
            self.recorder.constant(name, table.inv_freq),
            head_dim=config.head_dim,
            interleaved=rope.interleaved,
            magnitude=table.magnitude,
        )


def decoder(config: ModelConfig, block: Block, kv_dtype: KVDtype, block_tokens: int) -> Program:
    """Record embedding, `config.layers` times `block`, the final norm and the logits."""
    recorder = Recorder(config.architecture, kv_groups(config, kv_dtype, block_tokens))
    table = recorder.weight("token_embd.weight", config.vocab, config.hidden)
    x = recorder.embed(table, scale=config.embedding_scale)
    for index in range(config.layers):
        x = block(Layer(recorder, config, index), x)
    x = recorder.select(x, Rows.LOGITS)
    norm = recorder.weight("output_norm.weight", config.hidden)
    hidden = recorder.rms_norm(x, norm, eps=config.norm_eps)
    head = table if config.tied else recorder.weight("output.weight", config.vocab, config.hidden)
    logits = recorder.linear(hidden, head)
    if config.logits_scale != 1.0:
        logits = recorder.scale(logits, config.logits_scale)
    if config.logits_softcap:
        logits = recorder.softcap(logits, config.logits_softcap)
    return recorder.finish(logits, hidden)
