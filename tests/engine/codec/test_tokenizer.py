"""Encoding, decoding and the exact bytes of tokens, on both families of vocabulary."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level, codec_of, sentencepiece
from tokenizers import decoders, models

from artesian.engine.codec import Tokenizer
from artesian.engine.errors import InvalidRequest, ModelError

BYTE_LEVEL_HF, SENTENCEPIECE_HF = byte_level(), sentencepiece()
BYTE_LEVEL, SENTENCEPIECE = codec_of(BYTE_LEVEL_HF).tokenizer, codec_of(SENTENCEPIECE_HF).tokenizer
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "pieces"])
UNICODE = st.text(st.characters(exclude_categories=["Cs"]))


@BOTH
@given(text=UNICODE)
def test_any_text_comes_back_exactly(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    marked = text.replace("\u2581", " ") if tokenizer is SENTENCEPIECE else text  # U+2581 is its space
    assert tokenizer.decode(ids, skip_special=False) == marked


@BOTH
@pytest.mark.parametrize("text", ["Hello:World", " x", "\n\nx", "a\0b", "\u2028", "\ufeffx", "e\u0301"])
def test_awkward_texts_come_back_exactly(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special=False), skip_special=False) == text


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 2)), skip=st.booleans())
def test_byte_level_decode_equals_the_library(ids: list[int], skip: bool) -> None:
    expected = BYTE_LEVEL_HF.decode(ids, skip_special_tokens=skip)
    assert BYTE_LEVEL.decode(ids, skip_special=skip) == expected


@given(text=UNICODE.filter(lambda text: "\u2581" not in text), skip=st.booleans())
def test_sentencepiece_decode_equals_the_library_on_encoded_text(text: str, skip: bool) -> None:
    ids = SENTENCEPIECE.encode(text, add_special=False)
    assert SENTENCEPIECE.decode(ids, skip_special=skip) == SENTENCEPIECE_HF.decode(
        ids, skip_special_tokens=skip
    )


@given(text=UNICODE)
def test_token_bytes_join_to_the_text(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special=False, parse_special=False)
    assert b"".join(map(BYTE_LEVEL.token_bytes, ids)) == text.encode()


@given(text=UNICODE.filter(bool))
def test_token_bytes_join_to_the_text_after_sentencepiece_space(text: str) -> None:
    ids = SENTENCEPIECE.encode(text, add_special=False, parse_special=False)
    expected = " " + text.replace("\u2581", " ")
    assert b"".join(map(SENTENCEPIECE.token_bytes, ids)) == expected.encode()


@BOTH
def test_every_single_byte_has_its_token(tokenizer: Tokenizer) -> None:
    singles = {tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= singles


@BOTH
def test_a_special_token_has_the_bytes_of_its_name(tokenizer: Tokenizer) -> None:
    token = tokenizer.token_id("<|im_end|>")
    assert token is not None
    assert tokenizer.token_bytes(token) == b"<|im_end|>"
    assert tokenizer.decode([token], skip_special=True) == ""


def test_an_added_token_is_its_plain_text() -> None:
    ids = BYTE_LEVEL.encode("x<toolé>", add_special=False)
    assert BYTE_LEVEL.token_bytes(ids[-1]) == "<toolé>".encode()
    assert BYTE_LEVEL.decode(ids, skip_special=True) == "x<toolé>"


def test_a_broken_byte_run_keeps_its_good_characters() -> None:
    ids = [SENTENCEPIECE.token_id(f"<0x{byte:02X}>") or 0 for byte in b"\xe2\x82\xac\xff"]
    assert SENTENCEPIECE.decode(ids, skip_special=False) == "€\ufffd"


@pytest.mark.parametrize("text", ["x", "<s>x", "", "<s>"])
def test_bos_is_there_exactly_once(text: str) -> None:
    tokenizer = codec_of(byte_level(), add_bos=True).tokenizer
    ids = tokenizer.encode(text, add_special=True)
    assert ids.count(tokenizer.bos_token_id or 0) == 1
    assert ids[0] == tokenizer.bos_token_id


def test_eos_is_added_once_and_only_when_asked() -> None:
    tokenizer = codec_of(byte_level(), add_eos=True).tokenizer
    eos = tokenizer.eos_token_ids[0]
    assert tokenizer.encode("x", add_special=True)[-1] == eos
    assert tokenizer.encode("x</s>", add_special=True).count(eos) == 1
    assert eos not in tokenizer.encode("x", add_special=False)


def test_special_names_can_be_read_as_plain_text() -> None:
    ids = BYTE_LEVEL.encode("<|im_end|>", add_special=False, parse_special=False)
    assert not any(map(BYTE_LEVEL.is_special, ids))
    assert BYTE_LEVEL.decode(ids, skip_special=True) == "<|im_end|>"


@BOTH
def test_a_batch_equals_single_calls(tokenizer: Tokenizer) -> None:
    texts = ["alpha", "", "家族 é"]
    assert tokenizer.encode_batch(texts, add_special=True) == [
        tokenizer.encode(text, add_special=True) for text in texts
    ]


@BOTH
def test_the_count_is_the_number_of_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_count("家族", add_special=False) == len(
        tokenizer.encode("家族", add_special=False)
    )


@BOTH
@pytest.mark.parametrize("text", ["\ud83d", "ok \udc00", "é\ud83dx"])
def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode(text, add_special=True)


@BOTH
def test_ids_without_a_token_have_no_text_and_leave_no_trace(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.vocab_size, 2**32 - 1], skip_special=True) == ""
    assert tokenizer.pieces[2**32 - 1] == ""
    assert 2**32 - 1 not in tokenizer.pieces


@BOTH
@pytest.mark.parametrize("token", [-1, 2**32, 10**30])
def test_a_number_that_is_no_id_is_refused(tokenizer: Tokenizer, token: int) -> None:
    with pytest.raises(InvalidRequest, match="not a token id"):
        tokenizer.decode([token], skip_special=True)


@BOTH
@pytest.mark.parametrize("text", ["word ", " ", "a", "1", "é", "\U0001f469\u200d\U0001f467", "<|im_start|>"])
def test_a_text_far_too_long_is_found_without_reading_it_all(tokenizer: Tokenizer, text: str) -> None:
    limit, text = 50, text * 20_000
    read: list[int] = []

    def encode_batch_fast(texts: list[str], *, add_special_tokens: bool) -> list[tokenizers.Encoding]:
        read.append(sum(map(len, texts)))
        return hf.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    hf = tokenizer._hf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_hf", SimpleNamespace(encode_batch_fast=encode_batch_fast))
        assert tokenizer.exceeds(text, limit)
    assert sum(read) < 100 * limit


@BOTH
@given(text=UNICODE, repeats=st.integers(1, 200), limit=st.integers(1, 20))
def test_no_text_within_the_limit_is_taken_for_too_long(
    tokenizer: Tokenizer, text: str, repeats: int, limit: int
) -> None:
    if tokenizer.exceeds(text * repeats, limit):
        assert tokenizer.token_count(text * repeats, add_special=False) > limit


def test_a_files_own_truncation_is_switched_off() -> None:
    hf = byte_level()
    hf.enable_truncation(max_length=3)
    hf.enable_padding(length=8)
    assert len(codec_of(hf).tokenizer.encode("x" * 20, add_special=False)) == 20


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    ticks, done = [0], threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    before = ticks[0]
    BYTE_LEVEL_HF.encode_batch_fast([" the quick brown fox" * 20_000])
    after = ticks[0]
    done.set()
    thread.join()
    assert after - before > 1000


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Metaspace()])
def test_a_decoder_that_cannot_be_streamed_is_refused(decoder: decoders.Decoder | None) -> None:
    hf = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    hf.decoder = decoder
    with pytest.raises(ModelError, match="decoder"):
        Tokenizer(hf, bos_token_id=None, eos_token_ids=[], add_bos=False, add_eos=False, special_ids=[])


def test_adding_a_bos_that_has_no_id_is_refused() -> None:
    with pytest.raises(ModelError, match="BOS"):
        Tokenizer(
            byte_level(), bos_token_id=None, eos_token_ids=[], add_bos=True, add_eos=False, special_ids=[]
        )
