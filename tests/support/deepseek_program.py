"""DeepSeek-V4.1's forward pass as a recording without weights: a design check of `kernels.program`.

It shows that the seam carries what the family needs beyond Llama: several compressed KV sources, window
rings that are never stored, index keys with two-level selection, experts, hyper-connections, n-gram
memory, and a decoder half that runs on the tail rows of a prompt only. Every op that is not in the common
set is a macro-op. Shapes and layer roles are those of the published checkpoint layout.
"""

from __future__ import annotations

from dataclasses import dataclass

from artesian.kernels.kv import KVKind, KVSpec
from artesian.kernels.program import Buffer, Program, Recorder, Rows


@dataclass(frozen=True, slots=True)
class Config:
    vocab: int = 1024
    hidden: int = 128
    heads: int = 4
    head_dim: int = 64
    q_rank: int = 64
    o_groups: int = 2
    o_rank: int = 32
    experts: int = 8
    top_experts: int = 2
    expert_ffn: int = 64
    window: int = 8
    ratios: tuple[int, ...] = (0, 0, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1)
    kv_sources: tuple[int, ...] = (2, 4, 6, 8)
    index_sources: tuple[int, ...] = (2, 4, 6, 8, 10)
    index_heads: int = 4
    index_dim: int = 32
    index_topk: int = 4
    candidate_blocks: int = 3
    streams: int = 4
    engram_layers: tuple[int, ...] = (1, 4)
    engram_columns: int = 4
    engram_dim: int = 32
    engram_rows: int = 2055
    tail_rows: int = 12
    max_position: int = 4096
    block_tokens: int = 64

    @property
    def cut(self) -> int:
        """The last KV source: layers after it own window rings only."""
        return self.kv_sources[-1]


FLASH = Config(
    vocab=129280,
    hidden=5120,
    heads=64,
    head_dim=512,
    q_rank=1280,
    o_groups=8,
    o_rank=1024,
    experts=384,
    top_experts=6,
    expert_ffn=2304,
    window=128,
    ratios=(0,) * 2 + (2,) * 18 + (1,) * 20,
    kv_sources=(2, 8, 14, 20),
    index_sources=(2, 8, 14, 20, 24, 28, 32, 36),
    index_heads=32,
    index_dim=128,
    index_topk=512,
    candidate_blocks=2048,
    engram_layers=(1, 14),
    engram_columns=24,
    engram_dim=256,
    engram_rows=384_006_168,
    tail_rows=140,
    max_position=1 << 20,
)
"""The released model's sizes."""


def kv_groups(config: Config) -> tuple[KVSpec, ...]:
    """One LATENT group a source, then the rings before and after the cut, then the open pairs."""
    # e2m1 nibbles with an e4m3 scale per 16 (latent) and an e8m0 scale per 32 (index key).
    latent_bytes = config.head_dim // 2 + config.head_dim // 16
    index_bytes = config.index_dim // 2 + config.index_dim // 32
    ring_bytes = config.head_dim + config.head_dim // 32  # e4m3 with an e8m0 scale per 32
    layers = range(len(config.ratios))
    sources = [
        KVSpec(
            f"source{layer}",
            KVKind.LATENT,
            (layer,),
            1,
            config.head_dim,
            "packed",
            block_tokens=config.block_tokens,
            tokens_per_entry=config.ratios[layer],
            entry_bytes=latent_bytes + index_bytes,
        )
        for layer in config.kv_sources
    ]
    rings = [
        KVSpec(
            name,
            KVKind.WINDOW,
            ring_layers,
            1,
            config.head_dim,
            "packed",
            window=config.window,
            block_tokens=config.block_tokens,
            prefix_cacheable=False,
            entry_bytes=ring_bytes * len(ring_layers),
        )
        for name, ring_layers in (
            ("rings", tuple(i for i in layers if i <= config.cut)),
            ("tail rings", tuple(i for i in layers if i > config.cut)),
        )
    ]
    paired = tuple(layer for layer in config.kv_sources if config.ratios[layer] == 2)
    pairs = KVSpec(
        "open pairs",
        KVKind.STATE,
        paired,
        1,
        config.head_dim,
        "f32",
        block_tokens=config.max_position,
        tokens_per_entry=config.max_position,  # one entry a sequence
        prefix_cacheable=False,
        entry_bytes=len(paired) * 2 * config.head_dim * 4,  # kv and gate of the pair's first token
    )
    return (*sources, *rings, pairs)


def build(config: Config) -> Program:
    """Record the whole model."""
    return _Model(config, Recorder("deepseek_v41", kv_groups(config), config.tail_rows)).record()


@dataclass(slots=True)
class _Model:
    config: Config
    r: Recorder
    selection: Buffer | None = None
    candidates: Buffer | None = None

    def record(self) -> Program:
        config, r = self.config, self.r
        e = r.embed(r.weight("embed", config.vocab, config.hidden))
        streams = self.macro("hc_expand", [e], config.streams * config.hidden)
        pre: Buffer | None = None  # the first sublayer reads stream 0, which is `e`
        for layer in range(len(config.ratios)):
            if layer in config.engram_layers:
                streams = self.engram(layer, streams)
            streams, pre = self.layer(layer, streams, pre)
        assert pre is not None
        streams, pre = r.select(streams, Rows.LOGITS), r.select(pre, Rows.LOGITS)
        h = self.norm("norm", self.macro("hc_collapse", [streams, pre], config.hidden))
        return r.finish(r.linear(h, r.weight("head", config.vocab, config.hidden)))

    def layer(self, layer: int, streams: Buffer, pre: Buffer | None) -> tuple[Buffer, Buffer]:
        """A site's `pre` collapses the streams of the next site, not of its own."""
        config, r = self.config, self.r
        pre_a, post, comb = self.mix(f"{layer}.hc_attn", streams)
        x = self.norm(f"{layer}.attn_norm", self.collapse(streams, pre))
        self.write_kv(layer, x)
        if layer == config.cut:
            streams, x = r.select(streams, Rows.TAIL), r.select(x, Rows.TAIL)
            pre_a, post, comb = (r.select(b, Rows.TAIL) for b in (pre_a, post, comb))
        y = self.attention(layer, x)
        streams = self.macro("hc_update", [streams, y, post, comb], streams.width)
        pre_f, post, comb = self.mix(f"{layer}.hc_ffn", streams)
        x = self.norm(f"{layer}.ffn_norm", self.collapse(streams, pre_a))
        y = self.experts(layer, x)
        return self.macro("hc_update", [streams, y, post, comb], streams.width), pre_f

    def write_kv(self, layer: int, x: Buffer) -> None:
        """Everything that later tokens may read of this layer; before the cut, of every token."""
        config, r = self.config, self.r
        kv = self.norm(f"{layer}.kv_norm", self.project(f"{layer}.wkv", x, config.head_dim))
        ring, index = self.ring(layer)
        r.op("window_write", [kv], [], group=ring, layer=index, ratio=config.ratios[layer])
        if layer not in config.kv_sources:
            return
        group, ratio = config.kv_sources.index(layer), config.ratios[layer]
        inputs = [self.project(f"{layer}.compressor.wkv", x, config.head_dim)]
        if ratio == 2:
            inputs.append(self.project(f"{layer}.compressor.wgate", x, config.head_dim))
        norm = r.weight(f"{layer}.compressor.norm", config.head_dim)
        latent = self.macro("latent_write", inputs, config.head_dim, (norm,), group=group, ratio=ratio)
        key = self.project(f"{layer}.indexer.wk", latent, config.index_dim)
        key = self.norm(f"{layer}.indexer.k_norm", key)
        r.op("index_write", [key], [], group=group, ratio=ratio)

    def attention(self, layer: int, x: Buffer) -> Buffer:
        config, r = self.config, self.r
        qr = self.norm(f"{layer}.q_norm", self.project(f"{layer}.wq_a", x, config.q_rank))
        q = self.project(f"{layer}.wq_b", qr, config.heads * config.head_dim)
        q = self.macro("rope_tail", [q], q.width, ratio=config.ratios[layer])
        inputs, ring, index = [q], *self.ring(layer)
        if config.ratios[layer]:
            self.select_entries(layer, x, qr)
            assert self.selection is not None
            inputs.append(self.selection)
        sink = r.weight(f"{layer}.attn_sink", config.heads)
        source = max((i for i, s in enumerate(config.kv_sources) if s <= layer), default=-1)
        o = self.macro("sparse_attention", inputs, q.width, (sink,), ring=ring, layer=index, source=source)
        o = self.macro("rope_tail", [o], q.width, ratio=config.ratios[layer], inverse=True)
        wide = q.width // config.o_groups
        wo_a = r.weight(f"{layer}.wo_a", config.o_groups, config.o_rank, wide)
        u = self.macro("grouped_linear", [o], config.o_groups * config.o_rank, (wo_a,))
        return self.project(f"{layer}.wo_b", u, config.hidden)

    def select_entries(self, layer: int, x: Buffer, qr: Buffer) -> None:
        """Sources and re-indexers choose compressed entries; the layers between reuse the choice."""
        config = self.config
        if layer not in config.index_sources:
            return
        group = max(i for i, s in enumerate(config.kv_sources) if s <= layer)
        queries = self.project(f"{layer}.indexer.wq_b", qr, config.index_heads * config.index_dim)
        weights = self.project(f"{layer}.indexer.weights_proj", x, config.index_heads)
        inputs = [queries, weights]
        if layer == config.cut:
            self.candidates = self.macro(
                "candidate_blocks", inputs, config.candidate_blocks, dtype="i32", group=group
            )
        elif layer > config.cut:
            assert self.candidates is not None
            inputs.append(self.candidates)
        self.selection = self.macro("index_topk", inputs, config.index_topk, dtype="i32", group=group)

    def experts(self, layer: int, x: Buffer) -> Buffer:
        config, r = self.config, self.r
        ids = r.buffer("experts", x.rows, config.top_experts, "i32")
        shares = r.buffer("shares", x.rows, config.top_experts)
        gate = r.weight(f"{layer}.gate", config.experts, config.hidden)
        bias = r.weight(f"{layer}.gate_bias", config.experts)
        r.op("route", [x], [ids, shares], [gate, bias], topk=config.top_experts)
        names = [
            r.weight(f"{layer}.experts.w1", config.experts, config.expert_ffn, config.hidden),
            r.weight(f"{layer}.experts.w3", config.experts, config.expert_ffn, config.hidden),
            r.weight(f"{layer}.experts.w2", config.experts, config.hidden, config.expert_ffn),
        ]
        routed = self.macro("experts", [x, ids, shares], config.hidden, names, limit=10.0)
        w1 = self.project(f"{layer}.shared.w1", x, config.expert_ffn)
        w3 = self.project(f"{layer}.shared.w3", x, config.expert_ffn)
        shared = self.macro("glu_clamped", [w1, w3], config.expert_ffn, limit=10.0)
        return r.add(routed, self.project(f"{layer}.shared.w2", shared, config.hidden))

    def engram(self, layer: int, streams: Buffer) -> Buffer:
        """The hashes depend on the row's last token ids, which a backend reads from the slot's table."""
        config, r = self.config, self.r
        columns = r.buffer("hashes", streams.rows, config.engram_columns, "i64")
        r.op("ngram_hash", [], [columns], site=config.engram_layers.index(layer))
        table = r.weight(f"{layer}.engram.embed", config.engram_rows, config.engram_dim)
        memory = self.macro("gather_rows", [columns], config.engram_columns * config.engram_dim, (table,))
        keys = self.project(f"{layer}.engram.wkv", memory, (config.streams + 1) * config.hidden)
        names = [
            r.weight(f"{layer}.engram.{name}", config.streams, config.hidden)
            for name in ("q_weight", "k_weight")
        ]
        return self.macro("engram_inject", [streams, keys], streams.width, names)

    def mix(self, name: str, streams: Buffer) -> tuple[Buffer, Buffer, Buffer]:
        n, r = self.config.streams, self.r
        pre, post = r.buffer("pre", streams.rows, n), r.buffer("post", streams.rows, n)
        comb = r.buffer("comb", streams.rows, n * n)
        names = [
            r.weight(f"{name}_fn", 2 * n + n * n, streams.width),
            r.weight(f"{name}_base", 2 * n + n * n),
            r.weight(f"{name}_scale", 3),
        ]
        r.op("hc_mix", [streams], [pre, post, comb], names, iterations=20)
        return pre, post, comb

    def collapse(self, streams: Buffer, pre: Buffer | None) -> Buffer:
        return self.macro("hc_collapse", [streams] if pre is None else [streams, pre], self.config.hidden)

    def ring(self, layer: int) -> tuple[int, int]:
        """The window group of a layer and the layer's index in it."""
        groups = self.r.kv_groups
        group = next(i for i, g in enumerate(groups) if g.kind is KVKind.WINDOW and layer in g.layers)
        return group, groups[group].layers.index(layer)

    def norm(self, name: str, x: Buffer) -> Buffer:
        return self.r.rms_norm(x, self.r.weight(name, x.width), eps=1e-20)

    def project(self, name: str, x: Buffer, width: int) -> Buffer:
        return self.r.linear(x, self.r.weight(name, width, x.width))

    def macro(
        self,
        code: str,
        inputs: list[Buffer],
        width: int,
        weights: tuple[str, ...] | list[str] = (),
        *,
        dtype: str = "f32",
        **attrs: int | float | bool,
    ) -> Buffer:
        """Record an op of this family with one output on the rows of its inputs."""
        rows = {x.rows for x in inputs}
        assert len(rows) == 1, f"{code} mixes rows {rows}"
        out = self.r.buffer(code, rows.pop(), width, dtype)
        self.r.op(code, inputs, [out], weights, **attrs)
        return out
