"""The JSON of a benchmark, and its flags."""

import json
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from artesian.clients.bench.report import Report, run_scenario


def test_the_json_holds_samples_ratios_bars_and_the_machine(tmp_path: Path) -> None:
    report = Report("depth", {"model": "a.gguf", "pairs": 2})
    report.measure("depth", "ours", "m", [10.0, 30.0])
    report.measure("depth", "theirs", "m", [5.0, 10.0])

    ratio = report.ratio("depth", "ours", "theirs")
    report.bar("deep enough", ratio.median, ">= 2", ratio.median >= 2)
    report.finish(tmp_path / "new" / "depth.json")

    found = json.loads((tmp_path / "new" / "depth.json").read_text())
    assert found["settings"] == {"model": "a.gguf", "pairs": 2}
    assert found["measures"][0]["samples"] == [10.0, 30.0]
    assert found["measures"][1]["summary"] == {"min": 5.0, "median": 7.5, "p99": 10.0, "count": 2}
    assert found["ratios"][0]["summary"]["median"] == 2.5
    assert found["bars"] == [{"name": "deep enough", "limit": ">= 2", "value": 2.5, "holds": True}]
    assert found["machine"]["cores"] >= 1 and found["machine"]["packages"]["artesian"]


def test_a_scenario_gets_its_flags_and_refuses_others() -> None:
    seen = []

    def depth(*, pairs: int = 1) -> None:
        seen.append(pairs)

    run_scenario(depth, ["--pairs", "3"])
    with pytest.raises(CycloptsError, match="--pears"):
        run_scenario(depth, ["--pears", "3"])

    assert seen == [3]
