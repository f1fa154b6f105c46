"""GGUF files: what is read, and how damage and unsupported content are named."""

import random
import struct
from pathlib import Path

import numpy as np
import pytest
from tiny_models import BOS_ID, CHAT_TEMPLATE, EOS_ID, write_gguf

from artesian.engine.errors import ModelError
from artesian.engine.load.model import open_model
from artesian.kernels.quant import FORMATS, dequantize

Q2_K = 10


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, "llama", "Q8_0", tied=True)
    return path.read_bytes()


def opened_error(path: Path, content: bytes) -> str:
    """Write `content` and return what `open_model` says of it."""
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        open_model(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_reads_back_as_the_oracles_weights(name: str, tmp_path: Path) -> None:
    oracle = write_gguf(tmp_path / "m.gguf", "qwen3", name)
    opened = open_model(tmp_path / "m.gguf").tensors
    gate = opened["blk.1.ffn_gate.weight"]
    assert gate.format == name
    assert np.array_equal(dequantize(gate), oracle.model.layers[1].mlp.gate_proj.weight.detach().numpy())


def test_the_vocabulary_and_template_come_from_the_metadata(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", metadata={"tokenizer.chat_template.tool_use": "tools"})
    opened = open_model(tmp_path / "m.gguf")
    assert opened.chat_template == CHAT_TEMPLATE
    assert opened.chat_templates["tool_use"] == "tools"
    assert opened.vocab.eos_token_ids == opened.config.eos_token_ids == (EOS_ID, 0)
    assert opened.vocab.bos_token_id == opened.config.bos_token_id == BOS_ID
    assert opened.vocab.special_ids == {0, 1, 2}


def test_weights_stay_in_the_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama")
    data = open_model(tmp_path / "m.gguf").tensors["token_embd.weight"].data
    assert isinstance(data, np.memmap)
    assert not data.flags.writeable


def test_a_type_that_is_not_supported_is_named_with_its_tensor(tmp_path: Path, content: bytes) -> None:
    name = b"blk.1.attn_q.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8  # after the count of dimensions and the dimensions
    damaged = content[:place] + struct.pack("<I", Q2_K) + content[place + 4 :]
    message = opened_error(tmp_path / "m.gguf", damaged)
    assert "blk.1.attn_q.weight" in message and "Q2_K" in message


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"llama.block_count", b"llama.block_kount", "llama.block_count is missing"),
        (b"general.architecture", b"general.architectura", "general.architecture is missing"),
        (b"tokenizer.ggml.pre\x08\0\0\0\x05", b"tokenizer.ggml.pre\x08\0\0\0\x04", "corrupt"),
        (b"\x05\0\0\0\0\0\0\0gpt-2", b"\x05\0\0\0\0\0\0\0gpt-9", "unknown pre-tokenizer"),
        (b"\x04\0\0\0\0\0\0\0gpt2", b"\x04\0\0\0\0\0\0\0bert", "unknown tokenizer"),
        (b"token_embd.weight", b"token_embq.weight", "token_embd.weight is missing"),
        (b"blk.1.attn_k.weight", b"blk.1.attn_v.weight", "given twice"),
        (b"tokenizer.ggml.merges", b"tokenizer.ggml.mergez", "tokenizer.ggml.merges is missing"),
        (b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", "architecture not supported"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, old: bytes, new: bytes, said: str) -> None:
    assert old in content
    assert said in opened_error(tmp_path / "m.gguf", content.replace(old, new, 1))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.attention.head_count", 0, "llama.attention.head_count must be an integer >= 1, got 0"),
        ("llama.attention.head_count_kv", 3, "4 heads cannot share 3"),
        ("llama.expert_count", 8, "llama.expert_count"),
        ("llama.rope.scaling.type", "mystery", "llama.rope.scaling.type"),
        ("llama.rope.freq_base", -1.0, "llama.rope.freq_base must be a number > 0"),
        ("llama.context_length", "long", "llama.context_length must be an integer >= 1, got 'long'"),
        ("split.count", 2, "split GGUF"),
    ],
)
def test_a_field_that_cannot_be_served_is_named(
    tmp_path: Path, key: str, value: int | float | str, said: str
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", metadata={key: value})
    assert said in opened_error(path, path.read_bytes())


def test_a_file_cut_off_anywhere_is_an_error(tmp_path: Path, content: bytes) -> None:
    for length in sorted(random.Random(0).sample(range(4, len(content)), 60)):
        opened_error(tmp_path / "m.gguf", content[:length])


def test_a_header_with_wrong_bytes_is_read_or_refused_with_a_model_error(
    tmp_path: Path, content: bytes
) -> None:
    rng, path, header = random.Random(1), tmp_path / "m.gguf", content.index(b"output_norm.weight")
    refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(4):
            damaged[rng.randrange(4, header)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            open_model(path)
        except ModelError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("m.gguf", b"", "empty"),
        ("notes.txt", b"hello there", "give a GGUF file or a Hugging Face folder"),
        ("model.safetensors", b"\x10\0\0\0\0\0\0\0{}", "give the folder"),
        ("m.gguf", b"GGUF", "corrupt"),
    ],
)
def test_a_file_that_is_no_model_says_what_to_give(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    assert said in opened_error(tmp_path / name, content)


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        open_model(tmp_path / "absent.gguf")
