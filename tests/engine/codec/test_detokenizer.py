"""Incremental text against the full decode."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level, codec_of, sentencepiece

from artesian.engine.codec import Detokenizer, Tokenizer

BYTE_LEVEL, SENTENCEPIECE = codec_of(byte_level()).tokenizer, codec_of(sentencepiece()).tokenizer
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "pieces"])
FAMILY = "👩‍👩‍👧‍👦 家族 ₹ é"
IDS = st.lists(st.integers(0, min(BYTE_LEVEL.vocab_size, SENTENCEPIECE.vocab_size) + 3), max_size=24)


def stream(
    tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), skip_special: bool = True
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt=prompt, skip_special=skip_special)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def added_text(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip_special: bool) -> str:
    """What the full decode of prompt + ids has beyond that of the prompt."""
    before = tokenizer.decode(prompt, skip_special=skip_special)
    whole = tokenizer.decode(prompt + ids, skip_special=skip_special)
    return whole[len(before) :] if whole.startswith(before) else whole[len(before) - 1 :]


@BOTH
@given(ids=IDS, skip=st.booleans())
def test_pieces_join_to_the_full_decode(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(stream(tokenizer, ids, skip_special=skip)) == tokenizer.decode(ids, skip_special=skip)


@BOTH
@given(ids=IDS, cut=st.integers(0, 24), skip=st.booleans())
def test_pieces_join_to_what_the_full_decode_adds_to_the_prompt(
    tokenizer: Tokenizer, ids: list[int], cut: int, skip: bool
) -> None:
    prompt, rest = ids[:cut], ids[cut:]
    text = "".join(stream(tokenizer, rest, prompt, skip))
    assert text == added_text(tokenizer, prompt, rest, skip)


@BOTH
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_valid_text_never_shows_a_replacement(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text.replace("\ufffd", ""), add_special=False)
    assert not any("\ufffd" in piece for piece in stream(tokenizer, ids))


@BOTH
def test_emoji_families_come_character_by_character(tokenizer: Tokenizer) -> None:
    ids = [single_byte(tokenizer, byte) for byte in FAMILY.encode()]
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == FAMILY
    assert all(len(piece) <= 1 for piece in pieces)


@BOTH
def test_a_half_character_is_held_and_then_flushed_as_a_replacement(tokenizer: Tokenizer) -> None:
    ids = [single_byte(tokenizer, byte) for byte in "a😊".encode()[:-1]]
    assert stream(tokenizer, ids) == ["a", "", "", "", "\ufffd"]


def test_the_leading_space_goes_at_the_start_of_a_text() -> None:
    ids = SENTENCEPIECE.encode("leading", add_special=False)
    assert "".join(stream(SENTENCEPIECE, ids)) == "leading"


def test_the_leading_space_stays_after_a_prompt() -> None:
    prompt = SENTENCEPIECE.encode("a", add_special=False)
    ids = SENTENCEPIECE.encode("leading", add_special=False)
    assert "".join(stream(SENTENCEPIECE, ids, prompt)) == " leading"


def test_a_skipped_bos_is_no_prompt() -> None:
    bos = SENTENCEPIECE.token_id("<s>") or 0
    ids = SENTENCEPIECE.encode("leading", add_special=False)
    assert "".join(stream(SENTENCEPIECE, ids, [bos])) == "leading"
    assert "".join(stream(SENTENCEPIECE, ids, [bos], skip_special=False)) == " leading"


@BOTH
def test_a_character_begun_by_the_prompt_is_given_whole(tokenizer: Tokenizer) -> None:
    ids = [single_byte(tokenizer, byte) for byte in "a😊b".encode()]
    assert stream(tokenizer, ids[3:], ids[:3]) == ["", "😊", "b", ""]


@BOTH
@pytest.mark.parametrize("cut", range(len(FAMILY.encode())))
def test_a_prompt_may_end_anywhere_in_a_character(tokenizer: Tokenizer, cut: int) -> None:
    ids = [single_byte(tokenizer, byte) for byte in FAMILY.encode()]
    whole_before = FAMILY.encode()[:cut].decode(errors="ignore")
    assert "".join(stream(tokenizer, ids[cut:], ids[:cut])) == FAMILY[len(whole_before) :]


@BOTH
def test_special_tokens_show_only_when_asked(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_id("<|im_start|>") or 0]
    assert stream(tokenizer, ids) == ["", ""]
    assert stream(tokenizer, ids, skip_special=False) == ["<|im_start|>", ""]


def single_byte(tokenizer: Tokenizer, byte: int) -> int:
    """A token of exactly this byte."""
    return next(t for t in range(tokenizer.vocab_size) if tokenizer.token_bytes(t) == bytes([byte]))
