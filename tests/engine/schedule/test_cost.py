"""The estimate against sums done by hand, and the budget that it fills."""

from __future__ import annotations

import pytest

from artesian.engine.schedule.cost import Attention, CostModel, ProgramCost, visible_keys
from artesian.kernels.kv import KVKind, KVSpec
from artesian.kernels.program import Recorder, Rows


@pytest.mark.parametrize(
    ("start", "count", "window"), [(0, 1, 0), (0, 9, 0), (7, 5, 0), (0, 9, 4), (2, 9, 4), (9, 3, 4)]
)
def test_visible_keys_are_the_sum_over_rows(start: int, count: int, window: int) -> None:
    rows = range(start, start + count)
    assert visible_keys(start, count, window) == sum(min(p + 1, window or p + 1) for p in rows)


def test_program_cost_equals_the_hand_sum() -> None:
    groups = (
        KVSpec("full", KVKind.FULL, (0,), 1, 8, "f32"),
        KVSpec("window", KVKind.WINDOW, (1,), 1, 8, "f32", window=4),
    )
    r = Recorder("m", groups)
    r.weight("embd", 100, 16)
    r.weight("q", 16, 16)
    r.weight("kv", 8, 16)
    x = r.embed("embd")
    for layer in range(2):
        k, v = r.linear(x, "kv"), r.linear(x, "kv")
        r.kv_write(k, v, group=layer, layer=layer)
        x = r.attention(r.linear(x, "q"), group=layer, layer=layer, scale=1.0)
    cost = ProgramCost.of(r.finish(r.linear(r.select(x, Rows.LOGITS), "embd")))
    linear = 2 * 2 * (2 * 8 * 16 + 16 * 16)
    assert cost.row_flops == linear and cost.logits_flops == 2 * 100 * 16
    attention = 4 * 2 * 8 * (visible_keys(5, 3) + visible_keys(5, 3, 4))
    assert cost.linear_flops(3, logits_rows=1) == 3 * linear + 2 * 100 * 16
    assert cost.attention_flops(5, 3) == attention
    assert cost.kv_bytes(5, 3) == 2 * 8 * 4 * (
        8 + 7
    )  # K and V in f32; the window's rows read 4 + 3 positions


def test_chunks_shrink_with_their_position_so_that_steps_stay_equal() -> None:
    model = CostModel(
        ProgramCost(10_000, 0, (Attention(0, 100, 0),)), flops_per_ms=100_000, attention_flops_per_ms=100_000
    )
    near, far = model.rows_within(10.0, 0, 1000), model.rows_within(10.0, 1000, 1000)
    assert far < near
    assert model.chunk_ms(1000, far) <= 10.0 < model.chunk_ms(1000, far + 1)


def test_calibration_recovers_overhead_and_rates() -> None:
    cost = ProgramCost(100_000, 50, (Attention(0, 1, 4),))
    true = CostModel(cost, overhead_ms=3.0, flops_per_ms=500.0, attention_flops_per_ms=200.0)
    model = CostModel(cost)
    model.calibrate(lambda start, rows: 3.0 + true.chunk_ms(start, rows, 1), 4096)
    assert model.overhead_ms == pytest.approx(3.0, rel=0.1)
    assert model.flops_per_ms == pytest.approx(500, rel=0.02)
    assert model.attention_flops_per_ms == pytest.approx(200, rel=0.02)


def test_reading_a_long_context_costs_its_bytes() -> None:
    cost = ProgramCost(0, 0, (Attention(0, 1, 1000),))
    model = CostModel(cost, weight_bytes=10_000, overhead_ms=2.0, attention_flops_per_ms=1e9)
    assert model.chunk_ms(49, 1) == pytest.approx(50 * 1000 / 5_000)


def test_estimate_follows_a_machine_that_became_slower() -> None:
    model = CostModel(ProgramCost(1000, 0, ()), overhead_ms=1.0, flops_per_ms=1000)
    for _ in range(200):
        model.observe(model.step_overhead_ms() + model.chunk_ms(0, 4), 10.0)
    assert model.step_overhead_ms() + model.chunk_ms(0, 4) == pytest.approx(10.0, rel=0.01)
