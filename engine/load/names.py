"""Checkpoint names -> canonical (GGUF-style) tensor names, as tables. It knows no shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping

_GLOBALS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}

_LLAMA = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

_QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}

LAYERS: Mapping[str, Mapping[str, str]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA | _QK_NORMS,
    "gemma3": _LLAMA
    | _QK_NORMS
    | {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
"""Names inside `model.layers.N.` of each family, without .weight or .bias."""

NORMS_WITHOUT_ONE = frozenset({"gemma3"})
"""Families whose checkpoints store a norm's weight as its distance from one."""

# Multimodal checkpoints keep the text model under a prefix, in one of two orders.
_TEXT_PREFIX = re.compile(r"^(?:language_model\.model\.|model\.language_model\.)")
_TEXT_HEAD = "language_model.lm_head.weight"
_IGNORED = re.compile(r"^(?:model\.)?(?:vision_tower|multi_modal_projector)\.|\.rotary_emb\.inv_freq$")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)\.(weight|bias)$")


def canonical_name(architecture: str, name: str) -> str | None:
    """Return the canonical name of a checkpoint's tensor, or None when the text model does not use it.

    Raises:
        KeyError: the family has no such tensor.
    """
    if _IGNORED.search(name):
        return None
    name = "lm_head.weight" if name == _TEXT_HEAD else _TEXT_PREFIX.sub("model.", name)
    if name in _GLOBALS:
        return _GLOBALS[name]
    match = _LAYER.match(name)
    if match is None:
        raise KeyError(name)
    layer, part, kind = match.groups()
    return f"blk.{layer}.{LAYERS[architecture][part]}.{kind}"
