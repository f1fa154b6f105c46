"""What is possible on a trace: small cases by hand, and the shape of the agents' trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from artesian.clients.bench.traces import (
    AgentRequest,
    AgentShape,
    AgentTrace,
    BlockRequest,
    agent_blocks,
    agent_ideal,
    agent_trace,
    lru_hit_rate,
    read_mooncake,
    tail_gain,
    ttl_hit_rate,
    unique_blocks,
)

TRACES = Path(__file__).parents[4] / "shared" / "data" / "traces"
SMALL = AgentShape(scale=28.0, sessions=40)


def requests_of(*chains: tuple[int, ...], tokens: int = 0) -> list[BlockRequest]:
    return [BlockRequest(10.0 * i, tokens or 512 * len(c), c) for i, c in enumerate(chains)]


def test_a_hit_ends_at_the_first_block_that_is_not_there() -> None:
    requests = requests_of((1, 2, 3, 4), (1, 9, 3, 4))
    assert lru_hit_rate(requests, 100) == 1 / 8


def test_the_least_recently_used_block_goes_and_a_chains_end_before_its_beginning() -> None:
    requests = requests_of((1, 2), (5,), (1, 2), (6,), (1, 2))
    assert lru_hit_rate(requests, 2) == 2 / 8  # only block 1 survives each stranger
    assert lru_hit_rate(requests, 3) == 4 / 8


def test_a_capacity_for_each_request_bounds_what_is_kept_after_it() -> None:
    requests = requests_of((1, 2), (1, 2), (1, 2))
    assert lru_hit_rate(requests, [2, 0, 2]) == 2 / 6


def test_a_partial_last_block_counts_with_its_tokens() -> None:
    requests = requests_of((1, 2), (1, 2), tokens=700)
    assert lru_hit_rate(requests, 10) == 700 / 1400


def test_a_block_ends_after_its_time_unless_it_is_used() -> None:
    requests = requests_of((1,), (1,), (1,))
    assert ttl_hit_rate(requests, 10.0) == pytest.approx(2 / 3)
    assert ttl_hit_rate(requests, 9.0) == 0


@pytest.mark.parametrize(
    ("name", "ideal", "lru"),
    [("conversation", 0.374, (0.284, 0.360, 0.370)), ("synthetic", 0.651, (0.265, 0.452, 0.600))],
)
def test_mooncakes_traces_give_the_known_rates(name: str, ideal: float, lru: tuple[float, ...]) -> None:
    path = TRACES / f"{name}_trace.jsonl"
    if not path.exists():
        pytest.skip("Mooncake's traces are not beside this checkout")
    requests = read_mooncake(path)
    unique = unique_blocks(requests)
    assert lru_hit_rate(requests, unique) == pytest.approx(ideal, abs=0.0005)
    rates = [lru_hit_rate(requests, unique * percent // 100) for percent in (10, 25, 50)]
    assert rates == pytest.approx(lru, abs=0.005)


def test_a_mooncake_line_is_read(tmp_path: Path) -> None:
    row = {"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [4, 7]}
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert read_mooncake(path) == [BlockRequest(1.5, 700, (4, 7))]


def two_turns() -> AgentTrace:
    """One session of two turns, then another that shares its first 6 tokens."""
    one = np.arange(40, dtype=np.int32)
    other = np.concatenate([one[:6], np.arange(100, 134, dtype=np.int32)])
    requests = [AgentRequest(0.0, 0, 10, 4), AgentRequest(1.0, 0, 20, 4), AgentRequest(2.0, 1, 12, 4)]
    return AgentTrace(requests, [one, other])


def test_an_ideal_cache_reuses_prompt_and_output_in_whole_blocks() -> None:
    # The first turn leaves 13 computed tokens, so 12 in blocks of 4; the stranger shares one block of 4.
    assert agent_ideal(two_turns(), 4) == (12 + 4) / 42


def test_at_the_grain_of_a_token_all_that_was_computed_is_reused() -> None:
    assert agent_ideal(two_turns(), 1) == (13 + 6) / 42


def test_a_tail_is_reused_where_a_request_goes_on_from_it() -> None:
    assert agent_ideal(two_turns(), 4, tails=True) == (13 + 4) / 42


def test_a_prompts_last_token_is_computed_even_if_known() -> None:
    same = [AgentRequest(0.0, 0, 8, 1), AgentRequest(1.0, 0, 8, 1)]
    assert agent_ideal(AgentTrace(same, [np.arange(9, dtype=np.int32)]), 4) == 4 / 16


def test_tails_cost_what_lies_behind_whole_blocks() -> None:
    tails = tail_gain(two_turns(), 4)
    # Ends at 13, 23 and 15 tokens: rests of 1, 3 and 3 beside 7 whole blocks; the first rest is replaced.
    assert (tails.written, tails.records, tails.kept) == (7 / 28, 3 / 7, 6 / 28)
    assert tails.gained == pytest.approx(1 / 42)


def test_blocks_have_one_number_where_content_and_history_are_the_same() -> None:
    requests = agent_blocks(two_turns(), 4)
    assert [r.blocks for r in requests] == [(0, 1), (0, 1, 2, 3), (0, 5)]
    assert [r.kept for r in requests] == [(0, 1, 2), (0, 1, 2, 3, 4), (0, 5, 6)]


def test_the_blocks_of_the_agents_have_the_ideal_of_the_agents() -> None:
    trace = agent_trace(SMALL)
    blocks = agent_blocks(trace, 64)
    assert lru_hit_rate(blocks, unique_blocks(blocks), 64) == pytest.approx(agent_ideal(trace, 64), abs=1e-12)


def test_the_same_shape_gives_the_same_trace_and_another_seed_another() -> None:
    one, again, other = agent_trace(SMALL), agent_trace(SMALL), agent_trace(replace(SMALL, seed=2))
    assert one.requests == again.requests
    assert all((a == b).all() for a, b in zip(one.texts, again.texts, strict=True))
    assert one.requests != other.requests


def test_the_agents_have_the_documented_shape() -> None:
    trace = agent_trace(AgentShape())
    assert 70_000 < trace.mean_input < 84_000
    growth = [
        b.prompt - a.prompt
        for a, b in zip(trace.requests, trace.requests[1:], strict=False)
        if a.session == b.session
    ]
    assert 2_600 < np.mean(growth) < 3_400
    assert 0.955 < agent_ideal(trace, 64) < 0.975


def test_scaling_keeps_the_shape_and_fits_the_context() -> None:
    full, scaled = agent_trace(AgentShape()), agent_trace(AgentShape(scale=28.0))
    assert scaled.mean_input * 28 == pytest.approx(full.mean_input, rel=0.05)
    assert max(request.prompt + request.output for request in scaled.requests) <= 8192
    assert agent_ideal(scaled, 1) == pytest.approx(agent_ideal(full, 1), abs=0.002)


def test_few_sessions_begin_at_night() -> None:
    trace = agent_trace(AgentShape(sessions=600, turns_mean=1, turns_most=1, scale=1000.0))
    hours = np.array([request.at / 3600 % 24 for request in trace.requests])
    night, day = ((hours < 3) | (hours >= 21)).sum(), ((hours >= 9) & (hours < 15)).sum()
    assert 0 < night < day / 4
    assert max(request.at for request in trace.requests) < 3 * 86400
