"""The arithmetic of the disk cache's scenarios: agents' prefill, intervals of ratios, cold files."""

from __future__ import annotations

from pathlib import Path

import pytest

from artesian.clients.bench.agents import Sums
from artesian.clients.bench.cache_cost import bootstrap
from artesian.clients.bench.cold_files import drop_page_cache, read_rate


def test_the_formula_charges_misses_and_what_comes_from_disk_but_not_hits_on_the_device() -> None:
    sums = Sums(prompt=1000, cached=960, from_disk=480, seconds=2.0)
    assert sums.formula(100.0, 1e12) == pytest.approx(2500)
    assert sums.formula(100.0, 1200.0) == pytest.approx(1 / (0.04 / 100 + 0.48 / 1200))
    assert (sums.prompt_rate, sums.computed_rate) == (500, 20)


def test_an_interval_of_medians_holds_the_median_and_no_outlier() -> None:
    low, high = bootstrap([1.0] * 10 + [1.01] * 9 + [50.0])
    assert 1.0 <= low <= high <= 1.01


def test_reading_cold_files_reads_segments_only(tmp_path: Path) -> None:
    (tmp_path / "seg").mkdir()
    (tmp_path / "seg" / "1.seg").write_bytes(bytes(10 << 20))
    (tmp_path / "index").write_bytes(bytes(1 << 20))
    drop_page_cache(tmp_path)
    assert read_rate(tmp_path) > 1e6
    (tmp_path / "seg" / "1.seg").unlink()
    assert read_rate(tmp_path) == 0.0
