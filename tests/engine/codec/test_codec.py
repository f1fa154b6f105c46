"""Tokenizer and template together."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_tokenizers import byte_level, codec_of, sentencepiece

from artesian.engine.codec import Codec, Conversation, Message, TextStream, Tool
from artesian.engine.errors import InvalidRequest
from artesian.engine.load.gguf_model import parse_gguf
from artesian.engine.load.vocab import open_vocab

HELLO = Conversation((Message("user", "hello"),))


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ bos_token + messages[0].content }}"])
def test_a_chat_has_one_bos_whether_the_template_writes_it_or_not(template: str) -> None:
    codec = codec_of(byte_level(), add_bos=True, chat_template=template)
    ids = codec.encode_chat(HELLO)
    assert codec.detokenize(ids) == "<s>hello"
    assert ids == codec.encode_prompt("hello")


def test_a_chat_never_ends_in_an_eos_that_the_template_did_not_write() -> None:
    codec = codec_of(byte_level(), add_eos=True, chat_template="{{ messages[0].content }}")
    assert codec.detokenize(codec.encode_chat(HELLO)) == "hello"


def test_without_a_template_the_markers_of_chatml_are_enough() -> None:
    text = codec_of(byte_level()).render_chat(HELLO)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_a_model_without_template_and_markers_cannot_chat() -> None:
    hf = byte_level()
    codec = Codec.build(
        type(hf).from_str(hf.to_str().replace("<|im_", "<|xx_")),
        bos_token_id=None,
        eos_token_ids=[],
        add_bos=False,
        add_eos=False,
        special_ids=[],
        chat_template=None,
    )
    with pytest.raises(InvalidRequest, match="no chat template"):
        codec.encode_chat(HELLO)


def test_a_surrogate_in_a_tool_is_refused() -> None:
    codec = codec_of(byte_level(), chat_template="{{ tools | tojson }}")
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        codec.encode_chat(Conversation(HELLO.messages, (Tool("f", "\ud83d"),)))
    assert caught.value.param == "messages"


def test_a_surrogate_in_a_prompt_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest) as caught:
        codec_of(byte_level()).encode_prompt("\ud83d")
    assert caught.value.param == "prompt"


def test_labels_never_show_a_replacement_character() -> None:
    codec = codec_of(sentencepiece())
    ids = codec.encode_prompt("a😊")
    assert [codec.label(token) for token in ids][-4:] == ["\\xf0", "\\x9f", "\\x98", "\\x8a"]
    assert codec.label(ids[0]).strip() == "a"


@pytest.mark.model
def test_the_default_model_chats_in_its_own_format(smollm2_path: Path) -> None:
    codec = real_codec(smollm2_path)
    text = "👩‍👩‍👧‍👦 家族 ₹ é\u2028\0 <b>1234</b>\n\n  x"
    ids = codec.encode_chat(Conversation((Message("system", "s"), Message("user", text))))
    assert codec.detokenize(ids) == (
        f"<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert codec.tokenizer.decode(ids[:1], skip_special=True) == ""


@pytest.mark.model
def test_the_default_models_text_streams_exactly(smollm2_path: Path) -> None:
    codec = real_codec(smollm2_path)
    text = "Emoji 👩‍👩‍👧‍👦, 家族, ₹ and e\u0301 — ABCDEFGHIJKL"
    ids = codec.encode_prompt(text)
    stream = TextStream(codec.tokenizer, stops=["no such"])
    deltas = [stream.push([token]).text for token in ids]
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert TextStream(codec.tokenizer, stops=["DEFGHIJ"]).push(ids).text == text.removesuffix("DEFGHIJKL")


def real_codec(path: Path) -> Codec:
    """The codec of a GGUF file."""
    record = parse_gguf(path)
    vocab = open_vocab(record.vocab, str(path))
    return Codec.build(
        vocab.tokenizer,
        bos_token_id=vocab.bos_token_id,
        eos_token_ids=vocab.eos_token_ids,
        add_bos=vocab.add_bos,
        add_eos=vocab.add_eos,
        special_ids=vocab.special_ids,
        chat_template=record.chat_templates["default"],
    )
