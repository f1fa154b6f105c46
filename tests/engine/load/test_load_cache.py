"""Kept records, and the digest that identifies a model's function."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import write_gguf, write_hf_folder

from artesian.engine.errors import ModelError
from artesian.engine.load import gguf_model
from artesian.engine.load.check import check_weights
from artesian.engine.load.model import ModelFile, open_model
from artesian.engine.load.record import Record
from artesian.engine.models.registry import build_program
from artesian.kernels.backend import Tensor


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "m.gguf", "llama", "Q8_0")
    return tmp_path / "m.gguf"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were parsed, in order."""
    calls: list[Path] = []
    parse = gguf_model.parse_gguf

    def recording(path: Path) -> Record:
        calls.append(path)
        return parse(path)

    monkeypatch.setattr(gguf_model, "parse_gguf", recording)
    return calls


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def contents(model: ModelFile) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    return [(name, t.format, t.shape, t.data.tobytes()) for name, t in model.tensors.items()]


def test_a_kept_record_opens_the_same_model_without_parsing(
    path: Path, tmp_path: Path, parsed: list[Path]
) -> None:
    first, second = (open_model(path, cache_dir=tmp_path / "kept") for _ in range(2))
    assert parsed == [path]
    assert (first.config, first.digest, first.name) == (second.config, second.digest, second.name)
    assert contents(first) == contents(second)
    assert first.vocab.tokenizer.to_str() == second.vocab.tokenizer.to_str()
    assert first.chat_templates == second.chat_templates


def test_a_folder_is_kept_too(tmp_path: Path) -> None:
    write_hf_folder(tmp_path / "hf", "gemma3", tied=True)
    first, second = (open_model(tmp_path / "hf", cache_dir=tmp_path / "kept") for _ in range(2))
    assert contents(first) == contents(second) and first.digest == second.digest
    (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert 5 in open_model(tmp_path / "hf", cache_dir=tmp_path / "kept").vocab.eos_token_ids


def test_a_changed_file_is_parsed_again(path: Path, tmp_path: Path, parsed: list[Path]) -> None:
    before = open_model(path, cache_dir=tmp_path / "kept")
    flip_last_byte(path)
    after = open_model(path, cache_dir=tmp_path / "kept")
    assert len(parsed) == 2 and before.digest != after.digest


@pytest.mark.parametrize("keep", [0, 10, -1])
def test_a_damaged_record_is_rebuilt(path: Path, tmp_path: Path, parsed: list[Path], keep: int) -> None:
    digest = open_model(path, cache_dir=tmp_path / "kept").digest
    (entry,) = (tmp_path / "kept").iterdir()
    entry.write_bytes(entry.read_bytes()[:keep])
    assert open_model(path, cache_dir=tmp_path / "kept").digest == digest
    assert open_model(path, cache_dir=tmp_path / "kept").digest == digest
    assert len(parsed) == 2


def test_a_folder_that_cannot_be_written_does_no_harm(path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert open_model(path, cache_dir=tmp_path / "file" / "kept").digest == open_model(path).digest


def test_the_digest_depends_on_content_and_on_nothing_else(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(path, copy)
    os.utime(copy, (1, 1))
    assert open_model(copy).digest == open_model(path).digest
    flip_last_byte(copy)
    assert open_model(copy).digest != open_model(path).digest


@pytest.mark.parametrize(
    "metadata", [{"llama.rope.freq_base": 20000.0}, {"llama.attention.layer_norm_rms_epsilon": 1e-5}]
)
def test_a_parameter_that_changes_the_function_changes_the_digest(
    path: Path, tmp_path: Path, metadata: dict[str, float]
) -> None:
    write_gguf(tmp_path / "other.gguf", "llama", "Q8_0", metadata=metadata)
    assert open_model(tmp_path / "other.gguf").digest != open_model(path).digest


def test_the_end_of_turn_tokens_do_not_change_the_digest(path: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", "llama", "Q8_0", metadata={"tokenizer.ggml.eos_token_id": 0})
    assert open_model(tmp_path / "other.gguf").digest == open_model(path).digest


def test_opening_a_model_imports_no_torch(path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from artesian.engine.load.model import open_model;"
        "open_model(Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", script, str(path)], check=False).returncode == 0


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def without(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: without("blk.1.ffn_up.weight", t), r"blk.1.ffn_up.weight \[128, 64\] is missing"),
        (lambda t: t | {"blk.9.ffn_up.weight": t["output.weight"]}, "unexpected tensor blk.9.ffn_up.weight"),
        (
            lambda t: t | {"blk.0.attn_k.weight": t["output.weight"]},
            r"blk.0.attn_k.weight has shape \[320, 64\], expected \[32, 64\]",
        ),
    ],
)
def test_weights_that_are_not_the_programs_are_named(path: Path, change: Change, said: str) -> None:
    model = open_model(path)
    program = build_program(model.config)
    check_weights(program, model.tensors, "m.gguf")
    with pytest.raises(ModelError, match=f"m.gguf: .*{said}"):
        check_weights(program, change(dict(model.tensors)), "m.gguf")
