"""Opened files compute what the transformers models that were written into them compute."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stepping import Segment, open_session
from tiny_models import tiny_model, write_gguf, write_hf_folder

from artesian.engine.load.check import check_weights
from artesian.engine.load.model import ModelFile, open_model
from artesian.engine.models.registry import build_program
from artesian.kernels.backend import open_backend

TOLERANCE = 1e-4  # float32 in another order of summation
LENGTH = 40
TOKENS = [int(token) for token in np.random.default_rng(7).integers(3, 320, LENGTH)]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 1e4,
}
GEMMA_ROPE = {"full_attention": LINEAR | {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 9e3}}

FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tied": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-dynamic": ("llama", {"rope_parameters": DYNAMIC}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-sharded": ("llama", {"max_shard_size": "100KB"}),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"tied": True}),
    "gemma3": ("gemma3", {"tied": True}),
    "gemma3-ropes": ("gemma3", {"tied": True, "rope_parameters": GEMMA_ROPE}),
    "gemma3-softcap": ("gemma3", {"tied": True, "final_logit_softcapping": 3.0}),
    "bfloat16": ("qwen3", {"dtype": "bfloat16"}),
    "float16": ("llama", {"dtype": "float16"}),
}


def yarn_gguf() -> dict[str, Any]:
    names = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    return {"metadata": {f"llama.rope.scaling.{key}": value for key, value in names.items()}}


FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tied": True, "formats": "Q8_0"}),
    "llama-yarn": ("llama", {"rope_parameters": YARN} | yarn_gguf()),
    "llama-q4_k": ("llama", {"formats": "Q4_K"}),
    "llama-mixed": ("llama", {"formats": {"*": "Q4_1", "attn_v": "F16", "token_embd": "BF16"}}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"formats": "Q5_0"}),
    "gemma3": ("gemma3", {"tied": True, "query_pre_attn_scalar": 16}),
    "gemma3-linear": (
        "gemma3",
        {
            "tied": True,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "full_attention": LINEAR | {"rope_theta": 1e6},
                "sliding_attention": {"rope_theta": 1e4},
            },
            "metadata": {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 2.0},
        },
    ),
}


def assert_computes(opened: ModelFile, oracle: Any) -> None:
    program = build_program(opened.config, kv_dtype="f32", block_tokens=16)
    check_weights(program, opened.tensors, str(opened.root))
    session = open_session(open_backend("reference"), program, dict(opened.tensors), slots=1, max_len=64)
    slot = session.start(TOKENS)
    session.step(Segment(slot, LENGTH, logits=LENGTH))
    got = session.executor.logits  # type: ignore[attr-defined]
    with torch.inference_mode():
        want = oracle(torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_computes_its_oracles_logits(case: str, tmp_path: Path) -> None:
    architecture, options = FOLDERS[case]
    oracle = write_hf_folder(tmp_path, architecture, seed=3, **options)
    assert_computes(open_model(tmp_path), oracle)


@pytest.mark.parametrize("case", FILES)
def test_a_gguf_file_computes_its_oracles_logits(case: str, tmp_path: Path) -> None:
    architecture, options = FILES[case]
    oracle = write_gguf(tmp_path / "m.gguf", architecture, seed=3, **options)
    assert_computes(open_model(tmp_path / "m.gguf"), oracle)


def test_rope_factors_of_a_gguf_file_are_llama3s_scaling(tmp_path: Path) -> None:
    scaled = tiny_model("llama", rope_parameters=LLAMA3).model.rotary_emb.inv_freq
    factors = (tiny_model("llama").model.rotary_emb.inv_freq / scaled).numpy()
    oracle = write_gguf(tmp_path / "m.gguf", "llama", rope_freqs=factors, rope_parameters=LLAMA3)
    assert factors.max() == 8.0
    assert_computes(open_model(tmp_path / "m.gguf"), oracle)
