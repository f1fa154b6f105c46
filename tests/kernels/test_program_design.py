"""The program carries what later features need: shown by recordings, and by running where it can run."""

import math
from dataclasses import replace

import deepseek_program
import pytest
from random_weights import random_weights
from stepping import Segment, Session, open_session
from tiny_programs import LLAMA

from artesian.engine.models import llama
from artesian.engine.models.layers import Layer, decoder
from artesian.engine.models.registry import build_program
from artesian.kernels.backend import BackendError, check_ops, open_backend
from artesian.kernels.batch import SlotSampling
from artesian.kernels.kv import KVKind
from artesian.kernels.program import Buffer, Op, Program, Rows

CONFIG = replace(LLAMA, hidden=32, heads=4, head_dim=8, ffn=48, vocab=64, tied=False)


def rows_of(program: Program, op: Op) -> set[Rows]:
    return {program.buffers[index].rows for index in (*op.inputs, *op.outputs)}


def refusal(program: Program) -> str:
    with pytest.raises(BackendError) as error:
        check_ops(program, open_backend("reference"))
    return str(error.value)


# -- DeepSeek-V4.1: compressed sources, rings, experts, tail rows -----------------------------------


@pytest.fixture(scope="module", params=["tiny", "flash"])
def deepseek(request: pytest.FixtureRequest) -> tuple[deepseek_program.Config, Program]:
    config = deepseek_program.FLASH if request.param == "flash" else deepseek_program.Config()
    return config, deepseek_program.build(config)


def test_only_compressed_sources_are_prefix_cacheable(
    deepseek: tuple[deepseek_program.Config, Program],
) -> None:
    config, program = deepseek
    stored = [group for group in program.kv_groups if group.prefix_cacheable]
    assert [(group.kind, group.layers) for group in stored] == [
        (KVKind.LATENT, (layer,)) for layer in config.kv_sources
    ]
    assert [group.tokens_per_entry for group in stored] == [2, 2, 2, 1]


def test_released_sizes_give_the_published_bytes_and_parameters() -> None:
    program = deepseek_program.build(deepseek_program.FLASH)
    stored = [group for group in program.kv_groups if group.prefix_cacheable]
    sizes = {name: math.prod(spec.shape) for name, spec in program.weights.items()}
    tables = [name for name in sizes if name.endswith("engram.embed")]
    backbone = sum(size for name, size in sizes.items() if name not in tables)
    assert sum(group.bytes_per_token for group in stored) == 890
    assert sum(group.block_bytes for group in stored) == 890 * 64
    assert round(backbone / 1e9) == 552


def test_state_group_is_one_entry_a_sequence_of_any_length(
    deepseek: tuple[deepseek_program.Config, Program],
) -> None:
    config, program = deepseek
    state = program.kv_groups[-1]
    assert (state.kind, state.blocks_for(1), state.blocks_for(config.max_position)) == (KVKind.STATE, 1, 1)
    assert state.block_bytes == 3 * 2 * config.head_dim * 4


def test_every_token_writes_its_global_kv_and_only_tails_run_the_decoder(
    deepseek: tuple[deepseek_program.Config, Program],
) -> None:
    _, program = deepseek
    first_tail = next(i for i, op in enumerate(program.ops) if Rows.TAIL in rows_of(program, op))
    writes = [i for i, op in enumerate(program.ops) if op.code in ("latent_write", "index_write")]
    assert len(writes) == 8 and max(writes) < first_tail
    decoder_ops = [op for op in program.ops[first_tail:] if op.code != "select"]
    assert {rows for op in decoder_ops for rows in rows_of(program, op)} == {Rows.TAIL, Rows.LOGITS}
    assert program.buffers[program.logits].rows is Rows.LOGITS


def test_layers_between_index_sources_reuse_the_selection(
    deepseek: tuple[deepseek_program.Config, Program],
) -> None:
    config, program = deepseek
    read = [op.inputs[1] for op in program.ops if op.code == "sparse_attention" and len(op.inputs) == 2]
    assert len(read) == sum(1 for ratio in config.ratios if ratio)
    assert len(set(read)) == len(config.index_sources)


def test_reindexing_after_the_cut_reads_the_candidate_blocks(
    deepseek: tuple[deepseek_program.Config, Program],
) -> None:
    config, program = deepseek
    (candidates,) = [op.outputs[0] for op in program.ops if op.code == "candidate_blocks"]
    readers = [op for op in program.ops if candidates in op.inputs]
    assert len(readers) == sum(1 for layer in config.index_sources if layer > config.cut)
    assert program.buffers[candidates].dtype == "i32"


def test_deepseek_is_refused_by_the_name_of_its_first_macro_op(
    deepseek: tuple[deepseek_program.Config, Program],
) -> None:
    assert refusal(deepseek[1]) == ("backend reference has no op 'hc_expand', which deepseek_v41 needs")


# -- adapters: a table of LoRA pairs, chosen by a number a row ---------------------------------------

ADAPTERS, RANK = 3, 4


class AdaptedLayer(Layer):
    """Adds the row's adapter to every projection; the family's file stays as it is."""

    def linear(
        self, x: Buffer, name: str, width: int, *, bias: bool, residual: Buffer | None = None
    ) -> Buffer:
        recorder = self.recorder
        out = Layer.linear(self, x, name, width, bias=bias, residual=residual)
        adapter = next(b for b in recorder.buffers if b.name == "adapter")
        adapted = recorder.buffer("lora", out.rows, width)
        down = self.weight(f"{name}.lora_a", ADAPTERS, RANK, x.width)
        up = self.weight(f"{name}.lora_b", ADAPTERS, width, RANK)
        recorder.op("lora", (x, out, adapter), (adapted,), (down, up), scale=2.0)
        return adapted


def adapted_block(layer: Layer, x: Buffer) -> Buffer:
    if layer.index == 0:
        adapter = layer.recorder.buffer("adapter", Rows.TOKENS, 1, "i32")
        layer.recorder.op("row_input", (), (adapter,), input="adapter")
    return llama.block(AdaptedLayer(layer.recorder, layer.config, layer.index), x)


def test_adapters_are_a_macro_op_with_an_index_a_row() -> None:
    program = decoder(CONFIG, adapted_block, "f16", 64)
    loras = [op for op in program.ops if op.code == "lora"]
    indices = {program.buffers[op.inputs[2]] for op in loras}
    assert len(loras) == 7 * CONFIG.layers
    assert [(b.rows, b.width, b.dtype) for b in indices] == [(Rows.TOKENS, 1, "i32")]
    assert program.weights["blk.1.ffn_up.lora_b"].shape == (ADAPTERS, CONFIG.ffn, RANK)
    assert "no op 'row_input'" in refusal(program)


# -- tensor parallel: a rank's share of heads and columns, summed between segments --------------------


class RankLayer(Layer):
    """The last projection of a branch is a partial sum until the ranks have met."""

    def branch(self, x: Buffer, name: str, *, bias: bool, residual: Buffer) -> Buffer:
        partial = self.linear(x, name, residual.width, bias=bias)
        return self.recorder.add(residual, self.recorder.all_reduce(partial))


def rank_block(layer: Layer, x: Buffer) -> Buffer:
    return llama.block(RankLayer(layer.recorder, layer.config, layer.index), x)


def test_rank_meets_its_peers_twice_a_layer() -> None:
    share = replace(CONFIG, heads=2, kv_heads=1, ffn=24)
    program = decoder(share, rank_block, "f16", 64)
    segments = [[op.code for op in segment] for segment in program.segments()]
    collectives = segments[1::2]
    assert collectives == [["all_reduce"]] * (2 * CONFIG.layers)
    assert all("all_reduce" not in segment for segment in segments[0::2])
    assert segments[2] == ["add", "rms_norm", "linear", "linear", "glu", "linear"]
    assert program.kv_groups[0].bytes_per_token == build_program(CONFIG).kv_groups[0].bytes_per_token / 2
    assert "no op 'all_reduce'" in refusal(program)


# -- speculation: several rows a sequence, forgotten by lengths alone ---------------------------------


def speculating_session() -> Session:
    program = build_program(CONFIG)
    weights = random_weights(program, gain=2.0)
    return open_session(open_backend("reference"), program, weights, slots=4, max_len=64)


def write_drafts(session: Session, slot: int, drafts: list[int]) -> None:
    at = session.length[slot]
    session.tables.tokens[slot, at : at + len(drafts)] = drafts


def wrong(token: int) -> int:
    return (token + 1) % CONFIG.vocab


def test_rejected_drafts_leave_no_trace_in_greedy_decoding() -> None:
    session, prompt = speculating_session(), [5, 9, 2, 40, 17]
    plain = session.generate(session.start(prompt), 12)
    slot = session.start(prompt)
    session.prefill(slot)
    write_drafts(session, slot, [plain[1], plain[2], wrong(plain[3]), wrong(plain[4])])
    output = session.step(Segment(slot, 5, logits=5, sample=False), top_logprobs=1)
    # Row i says what follows draft i; the drafts agree up to the third.
    assert output.top_tokens[:3, 0].tolist() == plain[1:4]
    assert (output.ranks[:2].tolist(), output.ranks[2] > 0) == ([0, 0], True)
    accepted = len(prompt) + 3
    session.rollback(slot, accepted)
    session.tables.tokens[slot, accepted] = output.top_tokens[2, 0]
    session.length[slot] = accepted + 1
    while session.length[slot] < len(prompt) + 12:
        session.step(Segment(slot))
    assert session.tables.tokens[slot, len(prompt) : len(prompt) + 12].tolist() == plain


def test_drafts_are_verified_exactly_under_seeded_sampling_by_one_row_segments() -> None:
    session, prompt = speculating_session(), [5, 9, 2, 40, 17]
    sampling = SlotSampling(temperature=1.1, top_p=0.9, frequency=0.8, seed=4, prompt_len=5)
    plain = session.generate(session.start(prompt, sampling), 12)
    slot = session.start(prompt, sampling)
    session.prefill(slot)
    drafts = [plain[1], plain[2], wrong(plain[3]), wrong(plain[4])]
    write_drafts(session, slot, drafts)
    output = session.step(*[Segment(slot)] * 5)
    drawn = output.tokens.tolist()
    accepted = next(i for i, draft in enumerate(drafts) if draft != drawn[i])
    assert (accepted, drawn[:3]) == (2, plain[1:4])
    session.rollback(slot, len(prompt) + 1 + accepted + 1)
    session.computed[slot] = session.length[slot] - 1
    while session.length[slot] < len(prompt) + 12:
        session.step(Segment(slot))
    assert session.tables.tokens[slot, len(prompt) : len(prompt) + 12].tolist() == plain
