"""A model's hyper-parameters out of config.json or of GGUF metadata: one table of families for both.

It reads fields and counts; it never looks at a weight's bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import ModelError
from ..models.config import Activation, ModelConfig, RopeConfig
from .fields import Fields
from .rope import rope_from_gguf, rope_from_json, rope_section

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a file's tensors by canonical name."""

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

GEMMA_PATTERN = 6
"""Every 6th layer of Gemma 3 attends to everything, where the file does not say otherwise."""

GEMMA_27B_LAYERS = 62
"""GGUF files carry no query scale; the 27B model alone does not scale by its head size."""


@dataclass(frozen=True, slots=True)
class Family:
    """What the files of a family leave unsaid."""

    rope_theta: float = 10000.0
    rope_interleaved: bool = False
    """The converter to GGUF permutes q and k rows for pairs (2i, 2i+1)."""
    activation: Activation = "silu"
    head_dim: int = 0
    """Default of `head_dim` in config.json; 0 = hidden / heads."""
    tied: bool = False
    """Default of `tie_word_embeddings` in config.json."""
    qk_norm: bool = False
    attention_bias: bool | None = None
    """None: `attention_bias` in config.json decides, for q, k, v and the output alike."""


FAMILIES = {
    "llama": Family(rope_interleaved=True),
    "qwen2": Family(attention_bias=True),
    "qwen3": Family(head_dim=128, qk_norm=True),
    "gemma3": Family(rope_theta=1e6, activation="gelu_tanh", head_dim=256, tied=True, qk_norm=True),
}

MODEL_TYPES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
}
"""`model_type` of config.json -> family."""


def config_from_json(config: Fields) -> ModelConfig:
    """Return the hyper-parameters of a Hugging Face config.json (token ids are the vocabulary's to fill).

    Raises:
        ModelError: unknown architecture, missing or impossible field; names it.
    """
    model_type = config.text("model_type")
    if model_type not in MODEL_TYPES:
        config.refuse("model_type", f"architecture not supported (supported: {', '.join(MODEL_TYPES)})")
    if config.has("quantization_config"):
        config.refuse("quantization_config", "quantised checkpoints are not supported; use a GGUF file")
    architecture = MODEL_TYPES[model_type]
    family = FAMILIES[architecture]
    if model_type == "gemma3":
        config = config.section("text_config") or config
    hidden, heads = config.integer("hidden_size", minimum=1), config.integer("num_attention_heads", minimum=1)
    max_position = config.integer("max_position_embeddings", minimum=1)
    head_dim = config.integer("head_dim", family.head_dim or hidden // heads, minimum=2)
    bias = (
        family.attention_bias if family.attention_bias is not None else config.flag("attention_bias", False)
    )
    model = ModelConfig(
        architecture=architecture,
        layers=config.integer("num_hidden_layers", minimum=1),
        hidden=hidden,
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads, minimum=1),
        head_dim=head_dim,
        ffn=config.integer("intermediate_size", minimum=1),
        vocab=config.integer("vocab_size", minimum=1),
        max_position=max_position,
        norm_eps=config.positive("rms_norm_eps", 1e-6),
        activation=_activation(config, family),
        tied=config.flag("tie_word_embeddings", family.tied),
        rope=RopeConfig(),
        qkv_bias=bias,
        out_bias=bias and family.attention_bias is None,
        mlp_bias=architecture == "llama" and config.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
    )
    if architecture == "gemma3":
        model = _gemma_from_json(model, config)
    else:
        rope = rope_from_json(config, head_dim, max_position, family.rope_theta)
        model = replace(_windows_from_json(model, config, model_type), rope=rope)
    return _checked(model, config.file)


def config_from_gguf(
    metadata: Fields, shapes: Shapes, rope_tensors: Mapping[str, tuple[float, ...]]
) -> ModelConfig:
    """Return the hyper-parameters of a GGUF file; `rope_tensors` holds its rope_* tensors' values.

    Raises:
        ModelError: unknown architecture, missing or impossible field; names it.
    """
    architecture = metadata.text("general.architecture")
    if architecture not in FAMILIES:
        metadata.refuse(
            "general.architecture", f"architecture not supported (supported: {', '.join(FAMILIES)})"
        )
    family, fields = FAMILIES[architecture], Fields(metadata.file, metadata.values, f"{architecture}.")
    if fields.integer("expert_count", 0):
        fields.refuse("expert_count", "mixtures of experts are not supported")
    if "token_embd.weight" not in shapes:
        raise ModelError(f"{metadata.file}: the tensor token_embd.weight is missing")
    hidden = fields.integer("embedding_length", minimum=1)
    heads = fields.integer("attention.head_count", minimum=1)
    max_position = fields.integer("context_length", minimum=1)
    head_dim = fields.integer("attention.key_length", hidden // heads, minimum=2)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        fields.refuse("attention.value_length", f"keys have {head_dim} columns; they must be equal")
    model = ModelConfig(
        architecture=architecture,
        layers=fields.integer("block_count", minimum=1),
        hidden=hidden,
        heads=heads,
        kv_heads=fields.integer("attention.head_count_kv", heads, minimum=1),
        head_dim=head_dim,
        ffn=fields.integer("feed_forward_length", minimum=1),
        vocab=shapes["token_embd.weight"][0],
        max_position=max_position,
        norm_eps=fields.positive("attention.layer_norm_rms_epsilon"),
        activation=family.activation,
        tied="output.weight" not in shapes,
        rope=rope_from_gguf(
            fields,
            head_dim,
            max_position,
            theta=family.rope_theta,
            interleaved=family.rope_interleaved,
            frequency_factors=rope_tensors.get("rope_freqs.weight", ()),
            short_factors=rope_tensors.get("rope_factors_short.weight", ()),
            long_factors=rope_tensors.get("rope_factors_long.weight", ()),
        ),
        qkv_bias="blk.0.attn_q.bias" in shapes,
        out_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm=family.qk_norm,
        logits_softcap=fields.number("final_logit_softcapping", 0.0),
        attention_softcap=fields.number("attn_logit_softcapping", 0.0),
    )
    if architecture == "gemma3":
        pattern = fields.integer("attention.sliding_window_pattern", GEMMA_PATTERN, minimum=1)
        by_width = hidden // heads if model.layers == GEMMA_27B_LAYERS else head_dim
        local = RopeConfig(
            theta=fields.positive("rope.freq_base_swa", 10000.0), rotary_dim=model.rope.rotary_dim
        )
        model = replace(
            model,
            rope_local=local,
            embedding_scale=math.sqrt(hidden),
            attention_scale=by_width**-0.5,
            window=fields.integer("attention.sliding_window", minimum=1),
            window_layers=tuple(layer for layer in range(model.layers) if (layer + 1) % pattern),
        )
    return _checked(model, metadata.file)


def _gemma_from_json(model: ModelConfig, config: Fields) -> ModelConfig:
    if config.flag("use_bidirectional_attention", False):
        config.refuse("use_bidirectional_attention", "only causal models can be served")
    base = RopeConfig(theta=config.positive("rope_theta", FAMILIES["gemma3"].rope_theta))
    local_base = RopeConfig(theta=config.positive("rope_local_base_freq", 10000.0))
    parameters = config.section("rope_parameters")
    if parameters is not None and (parameters.has("full_attention") or parameters.has("sliding_attention")):
        full, local = parameters.section("full_attention"), parameters.section("sliding_attention")
    else:  # one dictionary is the global layers'; the local ones are never scaled
        full, local = parameters or config.section("rope_scaling"), None

    def read(section: Fields | None, base: RopeConfig) -> RopeConfig:
        empty = Fields(config.file, {})
        return rope_section(section or empty, config, base, model.head_dim, model.max_position)

    pattern = config.integer("sliding_window_pattern", GEMMA_PATTERN, minimum=1)
    return replace(
        model,
        rope=read(full, base),
        rope_local=read(local, local_base),
        # Gemma multiplies in the weights' dtype; computing in float32, nothing is rounded.
        embedding_scale=math.sqrt(model.hidden),
        attention_scale=config.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=config.number("attn_logit_softcapping", 0.0),
        logits_softcap=config.number("final_logit_softcapping", 0.0),
        window=config.integer("sliding_window", 4096, minimum=1),
        window_layers=_window_layers(
            config, model.layers, [layer for layer in range(model.layers) if (layer + 1) % pattern]
        ),
    )


def _windows_from_json(model: ModelConfig, config: Fields, model_type: str) -> ModelConfig:
    """Windows of Mistral (all layers) and of Qwen (the upper ones, where switched on)."""
    first = 0
    match model_type:
        case "mistral":
            on = config.has("sliding_window")
        case "qwen2" | "qwen3":
            on = config.flag("use_sliding_window", False) and config.has("sliding_window")
            first = config.integer("max_window_layers", 28) if on else 0
        case _:
            on = False
    if not on:
        return model
    layers = _window_layers(config, model.layers, list(range(first, model.layers)))
    return replace(model, window=config.integer("sliding_window", minimum=1), window_layers=layers)


def _window_layers(config: Fields, layers: int, default: list[int]) -> tuple[int, ...]:
    if not config.has("layer_types"):
        return tuple(default)
    kinds = config.texts("layer_types")
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        config.refuse("layer_types", f"expected {layers} of full_attention or sliding_attention")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


def _activation(config: Fields, family: Family) -> Activation:
    field = "hidden_activation" if config.has("hidden_activation") else "hidden_act"
    if not config.has(field):
        return family.activation
    name = config.text(field)
    if name not in ACTIVATIONS:
        config.refuse(field, f"activation not supported (supported: {', '.join(ACTIVATIONS)})")
    return ACTIVATIONS[name]


def _checked(model: ModelConfig, file: str) -> ModelConfig:
    if model.heads % model.kv_heads:
        raise ModelError(f"{file}: {model.heads} heads cannot share {model.kv_heads} key-value heads evenly")
    return model
