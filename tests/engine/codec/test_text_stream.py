"""The text of one sequence: tokens in, cut text out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level, codec_of

from artesian.engine.codec import StopSet, TextDelta, TextStream

TOKENIZER = codec_of(byte_level()).tokenizer
TEXT = "alpha beta gamma delta 👩‍👩‍👧‍👦 家族 ₹ é"
IDS = TOKENIZER.encode(TEXT, add_special=False)


@given(cuts=st.lists(st.integers(0, len(IDS)), max_size=5), stops=st.sampled_from([(), ("zz",), ("éx",)]))
def test_any_steps_give_the_same_text(cuts: list[int], stops: tuple[str, ...]) -> None:
    stream = TextStream(TOKENIZER, stops=stops)
    edges = [0, *sorted(cuts), len(IDS)]
    steps = [stream.push(IDS[start:end]) for start, end in zip(edges, edges[1:], strict=False)]
    assert "".join(step.text for step in steps) + stream.finish().text == TEXT


@pytest.mark.parametrize("stop", ["beta gamma", "amm", "家", "👧‍👦 "])
@pytest.mark.parametrize("include_stop", [False, True])
def test_tokens_after_the_one_that_completes_a_stop_are_dropped(stop: str, include_stop: bool) -> None:
    delta = TextStream(TOKENIZER, stops=[stop], include_stop=include_stop).push(IDS)
    until = TOKENIZER.decode(IDS[: delta.consumed], skip_special=True)
    assert delta.text == TEXT[: TEXT.index(stop)] + (stop if include_stop else "")
    assert delta.matched_stop == stop
    assert stop in until
    assert stop not in TOKENIZER.decode(IDS[: delta.consumed - 1], skip_special=True)


def test_a_stop_is_not_looked_for_in_the_first_tokens() -> None:
    ids = TOKENIZER.encode("xyxyxyq", add_special=False)
    singles = [TOKENIZER.encode(letter, add_special=False)[0] for letter in "xyxyxyq"]
    assert TOKENIZER.decode(singles, skip_special=True) == TOKENIZER.decode(ids, skip_special=True)
    delta = TextStream(TOKENIZER, stops=["xy"], min_tokens=3).push(singles)
    assert delta == TextDelta("xyxy", "xy", 6)


def test_a_skipped_token_does_not_break_a_stop() -> None:
    x, y = (TOKENIZER.encode(letter, add_special=False)[0] for letter in "xy")
    special = TOKENIZER.token_id("<|im_end|>") or 0
    assert TextStream(TOKENIZER, stops=["xy"]).push([x, special, y]).matched_stop == "xy"


def test_a_dangling_half_character_comes_at_the_end() -> None:
    ids = TOKENIZER.encode("a😊", add_special=False)[:-1]
    stream = TextStream(TOKENIZER, stops=["zz"])
    assert stream.push(ids).text == "a"
    assert stream.finish() == TextDelta("\ufffd", None, 0)


def test_held_text_comes_before_a_dangling_half_character() -> None:
    ids = TOKENIZER.encode("az😊", add_special=False)[:-1]
    stream = TextStream(TOKENIZER, stops=["zz"])
    assert stream.push(ids).text + stream.finish().text == "az\ufffd"


def test_choices_share_one_stop_set_and_no_state() -> None:
    stops = StopSet(["xy"])
    first, second = TextStream(TOKENIZER, stops=stops), TextStream(TOKENIZER, stops=stops)
    x, y = (TOKENIZER.encode(letter, add_special=False) for letter in "xy")
    first.push(x)
    assert second.push(y).text == "y"
    assert first.push(y).matched_stop == "xy"
