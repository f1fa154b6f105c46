"""The result of a benchmark: a table for people, a JSON file for comparisons. It measures nothing itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from cyclopts import App
from rich.console import Console
from rich.table import Table

from ..cli import environment
from .machine import Machine, this_machine
from .summary import Summary, pair_ratios

TABLE_WIDTH = 130
"""Of the terminal or not: a table that wraps cannot be read or compared."""


class Measure(msgspec.Struct, frozen=True):
    """Samples of one quantity of one subject."""

    name: str
    subject: str
    unit: str
    summary: Summary
    samples: list[float]


class Ratio(msgspec.Struct, frozen=True):
    """One subject over another, measured in turns."""

    name: str
    of: str
    to: str
    summary: Summary


class Bar(msgspec.Struct, frozen=True):
    """A promise and what was measured."""

    name: str
    limit: str
    value: float
    holds: bool


class Result(msgspec.Struct, kw_only=True):
    """All of a benchmark, as its JSON file has it."""

    scenario: str
    machine: Machine
    settings: dict[str, Any]
    measures: list[Measure] = []
    ratios: list[Ratio] = []
    bars: list[Bar] = []
    notes: list[str] = []


class Report:
    """Collects what a scenario measures. `settings`: model, shapes, warm-up, runs, all that is plain data."""

    def __init__(self, scenario: str, settings: dict[str, Any]) -> None:
        self.result = Result(scenario=scenario, machine=this_machine(), settings=settings)
        self.console = Console(highlight=False, width=TABLE_WIDTH)

    def measure(self, name: str, subject: str, unit: str, samples: Sequence[float]) -> Summary:
        """Add the samples of one quantity."""
        summary = Summary.of(samples)
        self.result.measures.append(Measure(name, subject, unit, summary, list(samples)))
        return summary

    def ratio(self, name: str, of: str, to: str) -> Summary:
        """Add the ratios, pair by pair, of two subjects that have the measure `name`."""
        samples = {m.subject: m.samples for m in self.result.measures if m.name == name}
        summary = Summary.of(pair_ratios(samples[of], samples[to]))
        self.result.ratios.append(Ratio(name, of, to, summary))
        return summary

    def bar(self, name: str, value: float, limit: str, holds: bool) -> None:
        self.result.bars.append(Bar(name, limit, value, holds))

    def note(self, text: str) -> None:
        self.result.notes.append(text)

    def finish(self, path: Path | None = None) -> None:
        """Print the tables and write the JSON file; by default a new one in the user's cache folder."""
        if path is None:
            stamp = time.strftime("%Y%m%d-%H%M%S")
            path = environment.home() / "bench" / "results" / f"{self.result.scenario}-{stamp}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self.result)))
        machine = self.result.machine
        self.console.print(
            f"{machine.cpu}, {machine.cores} cores, load {machine.load_average:.1f}, commit {machine.commit}"
        )
        self.console.print(_measures(self.result))
        if self.result.ratios:
            self.console.print(_ratios(self.result))
        for bar in self.result.bars:
            verdict = "[green]holds[/]" if bar.holds else "[red]missed[/]"
            self.console.print(f"{verdict}: {bar.name} {_number(bar.value)} (bar: {bar.limit})")
        for note in self.result.notes:
            self.console.print(note, markup=False)
        self.console.print(f"written to {path}", soft_wrap=True)


def run_scenario(scenario: Callable[..., None], arguments: list[str]) -> None:
    """Call a scenario's function with its flags; raises `cyclopts.CycloptsError` for what it has not."""
    app = App(name=f"artesian bench {scenario.__name__}", version_flags=[], result_action="return_value")
    app.default(scenario)
    app(arguments, exit_on_error=False, print_error=False)


def _measures(result: Result) -> Table:
    table = Table("measure", "of", "unit", title=f"artesian bench {result.scenario}", title_justify="left")
    for heading in ("min", "median", "p99", "samples"):
        table.add_column(heading, justify="right")
    for m in result.measures:
        s = m.summary
        numbers = (_number(s.min), _number(s.median), _number(s.p99), str(s.count))
        table.add_row(m.name, m.subject, m.unit, *numbers)
    return table


def _ratios(result: Result) -> Table:
    table = Table("ratio", "of", "to")
    for heading in ("min", "median", "p99", "pairs"):
        table.add_column(heading, justify="right")
    for r in result.ratios:
        s = r.summary
        table.add_row(r.name, r.of, r.to, f"{s.min:.2f}", f"{s.median:.2f}", f"{s.p99:.2f}", str(s.count))
    return table


def _number(value: float) -> str:
    """Four digits that matter, without an exponent."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 0.001 else f"{value:.6f}"
