"""Hugging Face folders: names, shards and types, and how damage is named."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import write_hf_folder

from artesian.engine.errors import ModelError
from artesian.engine.load.model import open_model
from artesian.kernels.quant import dequantize

Entries = dict[str, tuple[str, list[int], bytes]]


def read_safetensors(path: Path) -> Entries:
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def write_safetensors(path: Path, entries: Entries, **replaced: Any) -> None:
    """Write the entries; `replaced` are fields to put into the first entry's header instead."""
    header, data = {}, b""
    for name, (dtype, shape, content) in entries.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    header[next(iter(header))].update(replaced)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_hf_folder(tmp_path, "llama")
    return tmp_path


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def error_of(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_gemma_norms_are_stored_as_their_distance_from_one(tmp_path: Path) -> None:
    oracle = write_hf_folder(tmp_path, "gemma3", tied=True, dtype="bfloat16")
    norm = open_model(tmp_path).tensors["blk.2.post_ffw_norm.weight"]
    stored = oracle.model.layers[2].post_feedforward_layernorm.weight.detach().numpy()
    assert norm.format == "F32"
    assert np.array_equal(dequantize(norm), 1 + stored)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_multimodal_checkpoint_is_read_for_its_text_model(tmp_path: Path, prefix: str) -> None:
    write_hf_folder(tmp_path, "gemma3", tied=True)
    text = open_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    entries = {name.replace("model.", prefix, 1): entry for name, entry in read_safetensors(weights).items()}
    write_safetensors(weights, entries | {"vision_tower.patch.weight": ("F32", [1], bytes(4))})
    config = json.loads((tmp_path / "config.json").read_text())
    wrapped = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(wrapped))
    assert open_model(tmp_path).digest == text.digest
    assert 106 in open_model(tmp_path).vocab.eos_token_ids


def test_a_tied_model_that_repeats_its_output_matrix_is_still_tied(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, "llama", tied=True)
    weights = tmp_path / "model.safetensors"
    entries = read_safetensors(weights)
    write_safetensors(weights, entries | {"lm_head.weight": entries["model.embed_tokens.weight"]})
    opened = open_model(tmp_path)
    assert opened.config.tied and "output.weight" not in opened.tensors


def test_shards_are_found_by_the_index_and_all_must_be_there(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, "llama", max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1 and open_model(tmp_path).tensors
    shards[0].unlink()
    assert f"names {shards[0].name}, which is missing" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mamba"}, "model_type = 'mamba': architecture not supported"),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_size": "wide"}, "hidden_size must be an integer >= 1, got 'wide'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"hidden_act": "relu2"}, "hidden_act = 'relu2'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_parameters.rope_type = 'mrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
    ],
)
def test_a_config_that_cannot_be_served_names_its_field(
    folder: Path, changes: dict[str, Any], said: str
) -> None:
    change_config(folder, **changes)
    assert said in error_of(folder)


@pytest.mark.parametrize(
    ("replaced", "said"),
    [
        ({"dtype": "F64"}, "lm_head.weight has type F64"),
        ({"shape": [320, 65]}, "lm_head.weight F32 (320, 65) needs 83200 bytes"),
        ({"data_offsets": [0, 1 << 40]}, "truncated: tensor lm_head.weight"),
        ({"data_offsets": [8, 0]}, "lm_head.weight is not valid"),
        ({"shape": [-320, -64]}, "lm_head.weight is not valid"),
        ({"shape": "wide"}, "lm_head.weight is not valid"),
    ],
)
def test_a_tensor_entry_that_cannot_be_served_is_named(
    folder: Path, replaced: dict[str, Any], said: str
) -> None:
    weights = folder / "model.safetensors"
    write_safetensors(weights, read_safetensors(weights), **replaced)
    assert said in error_of(folder)


def test_a_tensor_that_the_family_does_not_have_is_named(folder: Path) -> None:
    weights = folder / "model.safetensors"
    extra: Entries = {"model.layers.0.mlp.router.weight": ("F32", [1], bytes(4))}
    write_safetensors(weights, read_safetensors(weights) | extra)
    assert "unexpected tensor model.layers.0.mlp.router.weight" in error_of(folder)


@pytest.mark.parametrize("length", [0, 5, 8, 100, 20_000, -1])
def test_a_weights_file_cut_off_is_an_error(folder: Path, length: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:length])
    assert "model.safetensors" in error_of(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_json_file_that_is_damaged_is_named(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b'{"model_type": "lla')
    assert name in error_of(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_that_is_missing_is_asked_for(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert f"no {name.replace('model', '*')}" in error_of(folder)


def test_a_folder_with_a_gguf_file_names_the_file_to_give(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert f"give the file, as {tmp_path / 'm.gguf'}" in error_of(tmp_path)
