"""Short traces through the real store, on a real directory: exactly what the simulation says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from artesian.clients.bench.replay import Replay, replay_agents, replay_blocks
from artesian.clients.bench.traces import (
    AgentShape,
    BlockRequest,
    agent_ideal,
    agent_trace,
    lru_hit_rate,
)

AGENTS = AgentShape(scale=100.0, sessions=8, turns_mean=6, kinds=2, days=1.0)


def chains(count: int, every_s: float = 60.0) -> list[BlockRequest]:
    """Conversations that grow by a block a turn, twelve at a time, behind one common block."""
    requests = []
    for number in range(count):
        session, turn = number % 12 + 12 * (number // 120), number // 12 % 10
        blocks = (0, *(1000 * (session + 1) + i for i in range(turn + 2)))
        requests.append(BlockRequest(every_s * number, 512 * len(blocks) - 100, blocks))
    return requests


def test_without_a_limit_the_store_hits_all_that_is_possible(tmp_path: Path) -> None:
    requests = chains(60)
    outcome = replay_blocks(tmp_path, requests, block_tokens=512, capacity=None)
    assert outcome.hit_rate == lru_hit_rate(requests, 1 << 30) > 0.4
    assert outcome.from_disk > 100 and not outcome.evicted and not outcome.faults


def test_under_a_budget_the_store_is_lru_over_the_blocks_it_has(tmp_path: Path) -> None:
    requests = chains(240)
    outcome = replay_blocks(tmp_path, requests, block_tokens=512, capacity=150)
    assert outcome.evicted > 50 and 100 < max(outcome.kept) <= 150
    assert outcome.hit_rate < lru_hit_rate(requests, 1 << 30) - 0.05
    assert abs(outcome.hit_rate - lru_hit_rate(requests, outcome.kept)) < 0.01


def test_agents_hit_the_ideal_of_whole_blocks_across_restarts(tmp_path: Path) -> None:
    trace = agent_trace(AGENTS)
    outcome = replay_agents(tmp_path, trace, grain=64, capacity=None, restarts=3)
    assert outcome.hit_rate == agent_ideal(trace, 64) > 0.5
    assert outcome.from_disk > 0 and not outcome.faults


def test_a_block_ends_on_disk_after_its_last_use_and_not_before(tmp_path: Path) -> None:
    replay = Replay(tmp_path, block_tokens=64, device_blocks=8, capacity=None, ttl_s=72 * 3600.0)
    tokens = np.arange(130, dtype=np.int32)
    reused = []
    for hour in (0, 71, 142, 215):
        reused.append(replay.request(3600.0 * hour, tokens, tokens))
        replay.restart()
    replay.close()
    assert reused == [0, 2, 2, 0]


def test_a_block_that_is_not_what_its_key_says_fails_the_replay(tmp_path: Path) -> None:
    replay = Replay(tmp_path, block_tokens=64, device_blocks=8, capacity=None, ttl_s=3600.0)
    tokens = np.zeros(130, np.int32)
    replay.request(0.0, tokens, tokens)
    replay.device.memory[:] = 7
    with pytest.raises(AssertionError, match="another block"):
        replay.request(1.0, tokens, tokens)
    replay.close()
