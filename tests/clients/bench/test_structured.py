"""The structured benchmark measures what it says, on an engine without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import running_engine

from artesian.clients.bench import structured
from artesian.clients.bench.report import Report

CASES: list[dict[str, Any]] = [
    {
        "name": "a",
        "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        "tests": [{"valid": True, "data": {"a": 1}}, {"valid": False, "data": {"a": "1"}}],
    },
    {"name": "b", "schema": {"type": "array", "uniqueItems": True}, "tests": [{"valid": True, "data": []}]},
]


async def test_instances_are_counted_by_what_the_masks_let_through() -> None:
    report = Report("structured", {})
    async with running_engine() as engine:
        structured._enforcement(report, engine, CASES, [{"schema": {"type": "null"}}])
    values = {bar.name: bar.value for bar in report.result.bars}
    assert values["valid instances accepted, strict, %"] == 100
    assert values["invalid instances rejected, strict, %"] == 100
    assert report.result.notes == [
        "strict: 1 of 3 schemas refused",
        "not strict: 0 of 3 schemas refused",
    ]


async def test_answers_are_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "ASK", "ab")  # the tiny vocabulary has more tokens than the device
    report = Report("structured", {})
    async with running_engine() as engine:
        await structured._answers(report, engine, CASES[1:], 2, 8, 2)
    assert [bar.value for bar in report.result.bars] == [100, 100]


@pytest.mark.parametrize(
    ("schema", "loose"),
    [
        ({"oneOf": [{"oneOf": [True]}]}, {"anyOf": [{"anyOf": [True]}]}),
        ({"oneOf": [1], "anyOf": [2]}, {"allOf": [{"anyOf": [2]}, {"anyOf": [1]}]}),
    ],
)
def test_one_of_is_held_to_any_of_where_the_client_was_told_so(schema: Any, loose: Any) -> None:
    assert structured._loosened(schema) == loose


async def test_what_a_token_costs_is_told_of_both_sides_and_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = SimpleNamespace(take=lambda tokens: "ab")  # the tiny vocabulary has more tokens than the device
    monkeypatch.setattr(structured, "Prompts", lambda tokenizer: prompts)
    report = Report("structured", {})
    async with running_engine() as engine:
        await structured._cost(report, engine, 2, 4, 2)
    measured = {(measure.name, measure.subject): measure.samples for measure in report.result.measures}
    for side in ("json_schema", "free text"):
        whole = measured["CPU per token", side]
        loop = measured["of it on the event loop's thread", side]
        assert len(whole) == 2
        assert all(0 < part <= total for part, total in zip(loop, whole, strict=True))
    assert len(report.result.ratios) == 1
