"""Tiny random models of every family, as Hugging Face folders and GGUF files, with their oracle.

Both writers return the transformers model that the written file holds: after quantisation the returned
model carries the dequantised weights, so its logits are the truth for the file.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
VOCAB = 320
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID = 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = [
    "the quick brown fox jumps over the lazy dog and then the other dog over there",
    "in the beginning there was a tiny model that answered with the words it had been given",
]


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE of `VOCAB` tokens; the special tokens are ids 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def tiny_model(architecture: str, *, seed: int = 0, tied: bool = False, **overrides: Any) -> Any:
    """A transformers model with random float32 weights; norms differ from one, biases from zero.

    `overrides` are fields of the transformers config (hidden_size, rope_parameters, layer_types, ...).
    """
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.1,
        "tie_word_embeddings": tied,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
    }
    if architecture == "gemma3":
        fields |= {"num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 24}
    if architecture == "qwen2":
        del fields["head_dim"]  # qwen2 derives it
    config = AutoConfig.for_model(MODEL_TYPES[architecture], **(fields | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def write_hf_folder(
    path: Path,
    architecture: str,
    *,
    seed: int = 0,
    tied: bool = False,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Any:
    """Write config.json, safetensors and tokenizer files under `path`; return the model (in float32, with
    the values as stored)."""
    model = tiny_model(architecture, seed=seed, tied=tied, **overrides)
    stored = copy.deepcopy(model).to(getattr(torch, dtype))
    stored.save_pretrained(path, max_shard_size=max_shard_size)
    # Only the parameters are rounded: casting the model back would leave rounded rope frequencies.
    with torch.no_grad():
        for mine, saved in zip(model.parameters(), stored.parameters(), strict=True):
            mine.copy_(saved)
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    settings = {"bos_token": SPECIAL_TOKENS[BOS_ID], "eos_token": SPECIAL_TOKENS[EOS_ID]}
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHAT_TEMPLATE}))
    return model


def write_gguf(
    path: Path,
    architecture: str,
    formats: str | Mapping[str, str] = "F32",
    *,
    seed: int = 0,
    tied: bool = False,
    metadata: Mapping[str, int | float | bool | str] | None = None,
    rope_freqs: NDArray[np.float32] | None = None,
    **overrides: Any,
) -> Any:
    """Write a GGUF file as llama.cpp's converter would; return the model with the stored values.

    `formats` is one format for all matrices, or a format by tensor kind ("attn_q", "token_embd", ...;
    "*" for the rest). K-quants make the matrices wider, and hold random blocks instead of the model's
    weights. `metadata` adds or replaces keys; values are written by their Python type.
    """
    chosen = {"*": formats} if isinstance(formats, str) else dict(formats)
    if any(name.endswith("_K") for name in chosen.values()):
        overrides = {"hidden_size": 256, "intermediate_size": 512} | overrides
        if architecture != "qwen2":
            overrides = {"head_dim": 64} | overrides
    model = tiny_model(architecture, seed=seed, tied=tied, **overrides)
    writer = GGUFWriter(path, architecture)
    _write_config(writer, architecture, model.config, metadata or {})
    _write_vocab(writer)
    rng = np.random.default_rng(seed)
    for name, parameter in _gguf_parameters(architecture, model):
        values = _to_gguf_layout(architecture, name, parameter.detach().numpy(), model.config)
        kind = name.split(".")[-2]
        format = chosen.get(kind, chosen.get("*", "F32")) if values.ndim == 2 else "F32"
        stored, values = _quantize(values, format, rng)
        writer.add_tensor(name, stored, raw_dtype=GGMLQuantizationType[format])
        restored = _from_gguf_layout(architecture, name, values, model.config)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(restored)))
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _write_config(
    writer: GGUFWriter, architecture: str, config: Any, metadata: Mapping[str, int | float | bool | str]
) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    fields: dict[str, int | float | bool | str] = {
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{architecture}.attention.key_length": head_dim,
        f"{architecture}.attention.value_length": head_dim,
        f"{architecture}.rope.freq_base": float(rope["rope_theta"]),
    }
    if architecture == "llama":
        fields["llama.rope.dimension_count"] = head_dim
    if architecture == "gemma3":
        fields["gemma3.attention.sliding_window"] = config.sliding_window
    for key, value in (fields | dict(metadata)).items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)


def _write_vocab(writer: GGUFWriter) -> None:
    model = json.loads(tiny_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _gguf_parameters(architecture: str, model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Names from the gguf package's own table, so that the loader's table is checked against it."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        found = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        yield found, parameter


def _to_gguf_layout(
    architecture: str, name: str, values: NDArray[np.float32], config: Any
) -> NDArray[np.float32]:
    if architecture == "gemma3" and "norm" in name:
        return values + np.float32(1)
    heads = _permuted_heads(architecture, name, config)
    if heads:
        half = values.shape[0] // heads // 2
        return np.ascontiguousarray(
            values.reshape(heads, 2, half, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        )
    return values


def _from_gguf_layout(
    architecture: str, name: str, values: NDArray[np.float32], config: Any
) -> NDArray[np.float32]:
    if architecture == "gemma3" and "norm" in name:
        return values - np.float32(1)
    heads = _permuted_heads(architecture, name, config)
    if heads:
        half = values.shape[0] // heads // 2
        return values.reshape(heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    return values


def _permuted_heads(architecture: str, name: str, config: Any) -> int:
    """Heads of a projection whose rows the llama converter interleaves; 0 = stored as it is."""
    if architecture != "llama":
        return 0
    if ".attn_q." in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".attn_k." in name else 0


def _quantize(
    values: NDArray[np.float32], format: str, rng: np.random.Generator
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Return the stored bytes and the float32 values that they mean."""
    kind = GGMLQuantizationType[format]
    if format.endswith("_K"):
        stored = _random_k_blocks(values.shape, format, rng)
    else:
        stored = gguf.quantize(values, kind)
    return stored, gguf.dequantize(stored, kind).astype(np.float32).reshape(values.shape)


def _random_k_blocks(shape: tuple[int, ...], format: str, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Random K-quant blocks: every scale, minimum and quant is used, values stay within about 0.3."""
    elements, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[format]]
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // elements, size), dtype=np.uint8)
    scale = rng.uniform(0.5, 1.0, len(blocks)).astype(np.float32)
    # The minimum centres the values: mean(d * sc * q) = mean(dmin * m) when dmin = d * mean(q).
    match format:
        case "Q4_K":
            fields = {0: scale * 3e-4, 2: scale * 3e-4 * 7.5}
        case "Q5_K":
            fields = {0: scale * 1.5e-4, 2: scale * 1.5e-4 * 15.5}
        case _:
            fields = {208: scale * 5e-5}
    for offset, column in fields.items():
        blocks[:, offset : offset + 2] = column.astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)
