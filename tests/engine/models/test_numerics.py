"""The families on the reference backend against transformers in float32, same weights, same tokens."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import canonical_name, describe
from numpy.typing import NDArray
from stepping import Segment, Session, open_session
from tiny_models import tiny_model

from artesian.engine.load.model import open_model
from artesian.engine.models.config import ModelConfig
from artesian.engine.models.registry import build_program
from artesian.kernels.backend import Tensor, open_backend
from artesian.kernels.quant import dequantize

F32 = NDArray[np.float32]
TOLERANCE = 1e-4  # float32 in another order of summation
LENGTH = 40

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 1e4,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tied": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", {"tied": True}),
    "gemma3-softcap": ("gemma3", {"final_logit_softcapping": 3.0}),
}


@pytest.fixture(params=MODELS, scope="module")
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Session]]:
    """A transformers model and a session that computes the same function in blocks of 16 tokens."""
    architecture, overrides = MODELS[request.param]
    model = tiny_model(architecture, seed=3, **overrides)
    config, weights = describe(model)
    program = build_program(config, kv_dtype="f32", block_tokens=16)
    session = open_session(open_backend("reference"), program, weights, max_len=128)
    yield model, session
    session.executor.close()


def tokens(seed: int, count: int = LENGTH, vocab: int = 320) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]


def expected(model: Any, sequence: list[int]) -> F32:
    with torch.inference_mode():
        logits: F32 = model(torch.tensor([sequence]), use_cache=False).logits[0].numpy()
    return logits


def logits_of(session: Session) -> F32:
    logits: F32 = session.executor.logits.copy()  # type: ignore[attr-defined]
    return logits


def assert_close(got: F32, want: F32) -> None:
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()


def test_whole_prefill_matches_transformers(pair: tuple[Any, Session]) -> None:
    model, session = pair
    prompt = tokens(0)
    slot = session.start(prompt)
    session.step(Segment(slot, LENGTH, logits=LENGTH))
    session.end(slot)
    assert_close(logits_of(session), expected(model, prompt))


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunked_prefill_matches_transformers(pair: tuple[Any, Session], chunk: int) -> None:
    model, session = pair
    prompt = tokens(1)
    slot = session.start(prompt)
    rows = []
    for start in range(0, LENGTH, chunk):
        count = min(chunk, LENGTH - start)
        session.step(Segment(slot, count, logits=count, sample=False))
        rows.append(logits_of(session))
    session.end(slot)
    assert_close(np.concatenate(rows), expected(model, prompt))


def test_mixed_prefill_and_decode_of_interleaved_sequences_match_transformers(
    pair: tuple[Any, Session],
) -> None:
    model, session = pair
    prompts = [tokens(2, 33), tokens(3, 5), tokens(4, 21)]
    a, b, c = [session.start(prompt) for prompt in prompts]
    session.step(Segment(b, 5), Segment(a, 10, logits=0, sample=False))
    session.step(Segment(a, 10, logits=0, sample=False), Segment(b), Segment(c, 20, logits=0, sample=False))
    session.step(Segment(c, 1), Segment(b), Segment(a, 13))
    mixed = logits_of(session)
    sequences = [session.tables.tokens[slot, : session.computed[slot]].tolist() for slot in (c, b, a)]
    for slot in (a, b, c):
        session.end(slot)
    for row, sequence in zip(mixed, sequences, strict=True):
        assert_close(row, expected(model, sequence)[-1])


def test_greedy_decode_equals_transformers(pair: tuple[Any, Session]) -> None:
    model, session = pair
    prompt = tokens(5, 30)
    slot = session.start(prompt)
    generated = session.generate(slot, 12)
    session.end(slot)
    logits = expected(model, prompt + generated)
    assert logits[29:-1].argmax(-1).tolist() == generated


# -- the default model -----------------------------------------------------------------------------


def to_transformers(config: ModelConfig, weights: Mapping[str, Tensor]) -> Any:
    """LlamaForCausalLM in float32 with the same weights; q and k rows go back to half-split pairs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.hidden,
            intermediate_size=config.ffn,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.max_position,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=config.tied,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = dequantize(weights[canonical_name(name)])
            if "q_proj" in name or "k_proj" in name:
                pairs = values.reshape(-1, config.head_dim // 2, 2, config.hidden)
                values = pairs.swapaxes(1, 2).reshape(values.shape)
            parameter.copy_(torch.from_numpy(values))
    model.train(False)
    return model


@pytest.mark.model
def test_default_model_matches_transformers_in_prefill_chunks_and_decode(smollm2_path: Path) -> None:
    opened = open_model(smollm2_path)
    program = build_program(opened.config, kv_dtype="f32")
    session = open_session(open_backend("reference"), program, dict(opened.tensors), slots=2, max_len=128)
    prompt, other = tokens(6, 100, opened.config.vocab), tokens(7, 20, opened.config.vocab)
    slot, neighbour = session.start(prompt), session.start(other)
    rows = []
    session.step(Segment(slot, 70, logits=70, sample=False))
    rows.append(logits_of(session))
    session.step(Segment(neighbour, 20, logits=0, sample=False), Segment(slot, 30, logits=30))
    rows.append(logits_of(session))
    for _ in range(3):
        session.step(Segment(slot))
        rows.append(logits_of(session))
    sequence = session.tables.tokens[slot, :103].tolist()
    session.executor.close()
    want = expected(to_transformers(opened.config, opened.tensors), sequence)
    assert_close(np.concatenate(rows), want)
