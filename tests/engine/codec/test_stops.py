"""Stop strings: what is held back, where the text is cut, what a character costs."""

from __future__ import annotations

from collections.abc import Sequence
from time import thread_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artesian.engine.codec import StopMatcher, StopSet, StopStep
from artesian.engine.codec.stops import MAX_STOP_CHARS
from artesian.engine.errors import InvalidRequest

FEW = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def expected(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The rule as a search: the first end of a match, the longest match there."""
    for end in range(1, len(text) + 1):
        ending_here = [stop for stop in stops if text[:end].endswith(stop)]
        if ending_here:
            stop = max(ending_here, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(pieces: Sequence[str], stops: Sequence[str], *, include_stop: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop=include_stop)
    text = ""
    for piece in pieces:
        emit, matched = matcher.push(piece)
        text += emit
        if matched is not None:
            return text, matched
    return text + matcher.flush(), None


@given(text=FEW, stops=STOPS, cuts=st.lists(st.integers(0, 12), max_size=4))
def test_any_split_gives_what_a_search_of_the_whole_text_gives(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = [0, *sorted(cuts), len(text)]
    pieces = [text[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    assert run(pieces, stops) == expected(text, stops)


@given(text=FEW, stops=STOPS)
def test_exactly_the_longest_end_that_may_become_a_stop_is_held(text: str, stops: list[str]) -> None:
    before, matched = expected(text, stops)
    if matched is not None:
        return
    ends = [text[i:] for i in range(len(text) + 1)]
    held = next(end for end in ends if any(stop.startswith(end) for stop in stops))
    assert StopMatcher(stops).push(text) == StopStep(text[: len(text) - len(held)], None)


def test_no_beginning_of_a_stop_leaks() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    steps = [matcher.push(letter) for letter in "ABCDEFGHIJ"]
    assert [step.emit for step in steps] == ["A", "B", "C", "", "", "", "", "", "", ""]
    assert steps[-1].matched == "DEFGHIJ"


def test_a_near_miss_is_released_at_once() -> None:
    matcher = StopMatcher(["DEFX"])
    assert [matcher.push(letter).emit for letter in "CDEFGH"] == ["C", "", "", "", "DEFG", "H"]


def test_a_near_miss_at_the_end_is_flushed() -> None:
    assert run(["ABC", "DEF"], ["DEFX"]) == ("ABCDEF", None)


@pytest.mark.parametrize(
    ("stop", "before"), [("beta gamma", "alpha "), ("amm", "alpha beta g"), ("delta", "alpha beta gamma ")]
)
@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_the_text_is_cut_where_the_stop_starts(stop: str, before: str, size: int) -> None:
    text = "alpha beta gamma delta"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert run(pieces, [stop]) == (before, stop)
    assert run(pieces, [stop], include_stop=True) == (before + stop, stop)


def test_the_match_that_completes_first_wins() -> None:
    assert run(["abcdef"], ["abcdef", "cd"]) == ("ab", "cd")


def test_of_matches_completing_together_the_longest_wins() -> None:
    assert run(["xabcd"], ["cd", "abcd", "d"]) == ("x", "abcd")


@pytest.mark.parametrize("stop", ["\0", "\u2028", "👩‍👩‍👧‍👦", "é", "e\u0301"])
def test_any_character_can_be_a_stop(stop: str) -> None:
    assert run(["a", *stop, "b"], [stop]) == ("a", stop)


@pytest.mark.parametrize(
    ("stops", "message"),
    [(["a", ""], "empty"), (["\ud83d"], "surrogate"), (["a" * (MAX_STOP_CHARS + 1)], "limit")],
)
def test_a_stop_that_cannot_be_served_is_refused(stops: list[str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        StopSet(stops)
    assert caught.value.param == "stop"


def test_ten_thousand_stops_cost_a_character_no_more_than_one() -> None:
    text = "the quick brown fox " * 500
    many = StopSet([f"{number:05d} stop" for number in range(10_000)] + ["the quick brown fox!"])
    one = StopSet(["the quick brown fox!"])

    def seconds(stops: StopSet) -> float:
        def once() -> float:
            matcher, start = StopMatcher(stops), thread_time()
            for at in range(0, len(text), 4):
                matcher.push(text[at : at + 4])
            return thread_time() - start

        return min(once() for _ in range(5))

    assert seconds(many) < 3 * seconds(one)


def test_a_text_that_keeps_missing_a_long_stop_costs_linear_time() -> None:
    matcher = StopMatcher(["a" * 50_000 + "b"])
    start = thread_time()
    for _ in range(30_000):
        matcher.push("aaaa")
    assert thread_time() - start < 5.0  # 0.2 s; a comparison at every start would be 6e9 steps
