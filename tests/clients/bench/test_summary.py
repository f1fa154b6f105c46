"""Statistics of samples and pairs."""

import pytest

from artesian.clients.bench.summary import Summary, alternating, pair_ratios


def test_a_summary_has_the_least_the_median_and_the_99th_percentile() -> None:
    samples = [float(value) for value in range(200, 0, -1)]

    assert Summary.of(samples) == Summary(min=1.0, median=100.5, p99=198.0, count=200)


def test_the_99th_percentile_of_few_samples_is_the_largest() -> None:
    assert Summary.of([3.0, 9.0, 1.0]).p99 == 9.0


def test_no_samples_have_no_summary() -> None:
    with pytest.raises(ValueError, match="no samples"):
        Summary.of([])


def test_ratios_are_taken_within_each_pair() -> None:
    assert pair_ratios([10.0, 30.0], [5.0, 10.0]) == [2.0, 3.0]


@pytest.mark.parametrize(("theirs", "why"), [([1.0], "no pairs"), ([1.0, 0.0], "no ratio")])
def test_what_is_no_pair_has_no_ratio(theirs: list[float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        pair_ratios([1.0, 2.0], theirs)


def test_the_side_that_goes_first_changes_with_every_pair() -> None:
    assert alternating(3) == [(0, 1), (1, 0), (0, 1)]
