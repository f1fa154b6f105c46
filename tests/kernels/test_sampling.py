"""The numpy sampler against its own definition, step by step, and against known answers."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from artesian.kernels.batch import SlotSampling, SlotTables, StepBatch, StepOutput
from artesian.kernels.sampling import (
    draw,
    is_finite,
    philox,
    process_logits,
    random_bits,
    rank,
    raw_logprobs,
    sample_step,
    token_weights,
    top_tokens,
)

ONES = 0xFFFFFFFF
NO_HISTORY = np.zeros(0, np.int32)


def f32(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def i32(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def bits(vocab: int, *allowed: int) -> NDArray[np.uint32]:
    words = np.zeros(-(-vocab // 32), np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int, int, int]
) -> None:
    assert philox(counter, key) == words


def test_random_bits_take_the_seed_as_key_and_the_position_as_counter() -> None:
    seed = 0x0123_4567_89AB_CDEF
    words = philox((77, 0, 0, 0), (0x89ABCDEF, 0x01234567))
    assert random_bits(seed, 77) == words[0] | words[1] << 32


def test_repetition_divides_positive_and_multiplies_negative_logits_once_a_token() -> None:
    sampling = SlotSampling(repetition=2.0, prompt_len=2)
    out = process_logits(f32(4, -4, 4, 1), sampling, i32(0, 1, 1, 0))
    assert out.tolist() == [2, -8, 4, 1]


def test_frequency_and_presence_count_output_tokens_only() -> None:
    sampling = SlotSampling(frequency=0.5, presence=0.25, prompt_len=2)
    out = process_logits(f32(1, 1, 1), sampling, i32(0, 0, 1, 1, 2))
    assert out.tolist() == [1, 1 - 1.25, 1 - 0.75]


def test_penalty_is_rounded_to_float32_before_it_is_subtracted() -> None:
    sampling = SlotSampling(frequency=0.1, presence=0.2, prompt_len=0)
    out = process_logits(f32(10.3), sampling, i32(0, 0, 0))
    assert out[0] == np.float32(10.3) - np.float32(0.1 * 3 + 0.2)


def test_bias_is_added_for_each_mention_of_a_token() -> None:
    sampling = SlotSampling(bias_ids=i32(1, 1, 2), bias_values=f32(1, 2, -5))
    assert process_logits(f32(0, 0, 0), sampling, NO_HISTORY).tolist() == [0, 3, -5]


def test_token_needs_both_masks_to_be_drawn() -> None:
    sampling = SlotSampling(allowed=bits(40, 0, 35, 36))
    out = process_logits(np.zeros(40, np.float32), sampling, NO_HISTORY, bits(40, 1, 35))
    assert np.flatnonzero(np.isfinite(out)).tolist() == [35]


@pytest.mark.parametrize(("length", "drawn"), [(4, 1), (5, 0)])
def test_stop_tokens_cannot_be_drawn_before_min_len(length: int, drawn: int) -> None:
    sampling = SlotSampling(temperature=0.0, min_len=5, stop_ids=i32(0))
    out = process_logits(f32(9, 1), sampling, np.zeros(length, np.int32))
    assert draw(out, sampling, length) == drawn


@pytest.mark.parametrize("values", [(math.nan, 1.0), (math.inf, 1.0), (-math.inf, -math.inf)])
def test_nan_infinity_and_nothing_left_are_not_finite(values: tuple[float, float]) -> None:
    assert not is_finite(f32(*values))


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    assert draw(f32(0, 3, 3), SlotSampling(temperature=0.0), 0) == 1


def test_weights_are_floored_exponentials_of_the_distance_to_the_maximum() -> None:
    weights = token_weights(f32(1.0, 0.0, -math.inf, -30.0), SlotSampling(temperature=0.5))
    assert weights.tolist() == [2**32, math.floor(math.exp(-2.0) * 2**32), 0, 0]


def test_tiny_temperature_leaves_the_best_token_only() -> None:
    assert np.flatnonzero(token_weights(f32(1.0, 3.0, -30.0), SlotSampling(temperature=1e-310))).tolist() == [
        1
    ]


def test_min_p_drops_tokens_below_its_share_of_the_best() -> None:
    logits = np.log(f32(1.0, 0.5, 0.2))
    assert np.flatnonzero(token_weights(logits, SlotSampling(min_p=0.4))).tolist() == [0, 1]


def test_top_k_keeps_the_lower_id_of_equal_weights() -> None:
    assert np.flatnonzero(token_weights(f32(1, 2, 1, 1), SlotSampling(top_k=2))).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.0, [2]), (0.5, [2]), (0.51, [0, 2]), (0.75, [0, 2]), (0.76, [0, 1, 2])]
)
def test_top_p_keeps_the_shortest_prefix_that_reaches_it(top_p: float, kept: list[int]) -> None:
    logits = f32(-math.log(2), -math.log(2), 0)
    assert np.flatnonzero(token_weights(logits, SlotSampling(top_p=top_p))).tolist() == kept


def test_top_p_is_measured_after_top_k() -> None:
    logits = np.log(f32(0.4, 0.3, 0.3))
    sampling = SlotSampling(top_k=2, top_p=0.55)
    assert np.flatnonzero(token_weights(logits, sampling)).tolist() == [0]


def test_draw_follows_the_running_sum_in_id_order() -> None:
    sampling, logits = SlotSampling(seed=5), np.log(f32(0.2, 0.5, 0.3))
    sums = np.cumsum(token_weights(logits, sampling).astype(object))
    for position in range(50):
        target = random_bits(5, position) * sums[-1] // 2**64
        assert draw(logits, sampling, position) == next(i for i, s in enumerate(sums) if s > target)


def test_draws_have_the_frequencies_of_the_distribution() -> None:
    logits = np.log(f32(0.2, 0.5, 0.3))
    drawn = [draw(logits, SlotSampling(seed=1), position) for position in range(4000)]
    shares = np.bincount(drawn, minlength=3) / 4000
    assert np.abs(shares - [0.2, 0.5, 0.3]).max() < 0.025  # about three standard deviations


def test_logprobs_and_ranks_are_of_the_raw_distribution() -> None:
    logits = f32(1, 2, 2, 0)
    expected = np.array([1, 2, 2, 0]) - math.log(math.e + 2 * math.exp(2) + 1)
    assert np.allclose(raw_logprobs(logits), expected, atol=1e-7)
    assert [rank(logits, token) for token in range(4)] == [2, 0, 1, 3]
    assert top_tokens(logits, 3).tolist() == [1, 2, 0]


def one_step(
    logits: NDArray[np.float32], sampling: SlotSampling, *, count: int, rows: int, sample: bool, top: int = 0
) -> tuple[SlotTables, StepOutput]:
    tables = SlotTables(2, 8, ())
    tables.tokens[1, :4] = [3, 2, 1, 0]
    tables.set_sampling(1, sampling)
    batch = StepBatch(i32(1), i32(0), i32(count), i32(rows), np.array([sample], np.uint8), top_logprobs=top)
    output = StepOutput.empty(rows, top)
    sample_step(logits, batch, tables, output)
    return tables, output


def test_sampled_token_is_appended_and_earlier_rows_are_scored() -> None:
    logits = np.tile(f32(0, 1, 2, 3), (3, 1))
    tables, output = one_step(logits, SlotSampling(temperature=0.0), count=4, rows=3, sample=True, top=2)
    assert output.tokens.tolist() == [1, 0, 3]  # tokens 2 and 3 of the prompt, then the draw
    assert output.ranks.tolist() == [2, 3, 0]
    assert output.top_tokens.tolist() == [[3, 2]] * 3
    assert np.array_equal(output.logprobs, raw_logprobs(logits[0])[[1, 0, 3]])
    assert tables.tokens[1].tolist() == [3, 2, 1, 0, 3, 0, 0, 0]


def test_unsampled_segment_leaves_the_table_alone() -> None:
    tables, output = one_step(np.zeros((2, 4), np.float32), SlotSampling(), count=2, rows=2, sample=False)
    assert output.tokens.tolist() == [2, 1]
    assert tables.tokens[1].tolist() == [3, 2, 1, 0, 0, 0, 0, 0]


def test_row_with_nothing_left_after_the_mask_is_reported_not_finite() -> None:
    sampling = SlotSampling(allowed=bits(4))
    _, output = one_step(np.zeros((1, 4), np.float32), sampling, count=4, rows=1, sample=True)
    assert (output.finite.tolist(), output.tokens.tolist()) == ([0], [0])


def test_row_with_a_nan_does_not_touch_its_neighbour() -> None:
    logits = np.stack([f32(0, math.nan, 0, 0), f32(0, 0, 5, 0)])
    _, output = one_step(logits, SlotSampling(temperature=0.0), count=4, rows=2, sample=True, top=1)
    assert output.finite.tolist() == [0, 1]
    assert (output.tokens[1], output.top_tokens[1, 0]) == (2, 2)


def test_token_past_the_end_of_the_table_is_reported_but_not_stored() -> None:
    tables, output = one_step(
        np.tile(f32(0, 1, 2, 3), (1, 1)), SlotSampling(temperature=0.0), count=8, rows=1, sample=True
    )
    assert output.tokens.tolist() == [3]
    assert tables.tokens[1].tolist() == [3, 2, 1, 0, 0, 0, 0, 0]


def test_later_segment_of_a_slot_sees_the_token_drawn_before_it() -> None:
    tables = SlotTables(1, 8, ())
    tables.set_sampling(0, SlotSampling(temperature=0.0, presence=2.0, prompt_len=1))
    batch = StepBatch(i32(0, 0), i32(0, 1), i32(1, 1), i32(1, 1), np.ones(2, np.uint8))
    output = StepOutput.empty(2, 0)
    sample_step(np.tile(f32(0, 1.5, 1), (2, 1)), batch, tables, output)
    assert output.tokens.tolist() == [1, 2]
