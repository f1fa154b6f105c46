"""Vocabularies: the same text gives the same ids whichever file the tokenizer comes from."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import CHAT_TEMPLATE, SPECIAL_TOKENS, write_gguf, write_hf_folder

from artesian.engine.errors import ModelError
from artesian.engine.load.fields import Fields
from artesian.engine.load.model import open_model
from artesian.engine.load.pretokenizers import PRE_TOKENIZERS
from artesian.engine.load.vocab import Vocab, open_vocab
from artesian.engine.load.vocab_gguf import SPACE, TokenType, vocab_from_gguf

TEXTS = [
    "the dog",
    " x",
    "\n\nx",
    "a  b\t\r\n c",
    "12345 67",
    "don't WE'LL",
    "\u00e9 \u6f22\u5b57 \U0001f600",
    "<|im_start|>user\nhi<|im_end|>",
    "",
]


def ids(vocab: Vocab, text: str) -> list[int]:
    return list(vocab.tokenizer.encode(text, add_special_tokens=False).ids)


def built(**fields: Any) -> Vocab:
    metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    metadata["general.architecture"] = fields.pop("architecture", "llama")
    return open_vocab(vocab_from_gguf(Fields("m.gguf", metadata), 1000), "m.gguf")


def sentencepiece(**fields: Any) -> Vocab:
    """A SentencePiece vocabulary in which `lo` scores better than `el`, and `hel` best of all."""
    words = [SPACE, "h", "e", "l", "o", "lo", "el", "hel", SPACE + "hel"]
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + words
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    scores = [0.0] * 264 + [-2.0, -3.0, -1.0, -4.0]
    return built(
        model="llama",
        tokens=tokens,
        token_type=types + [TokenType.NORMAL] * len(words),
        scores=scores,
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        **fields,
    )


def pieces(vocab: Vocab, text: str) -> list[str]:
    return list(vocab.tokenizer.encode(text, add_special_tokens=False).tokens)


@pytest.mark.parametrize("text", TEXTS)
def test_a_gguf_vocabulary_gives_the_folders_ids_and_the_text_back(tmp_path: Path, text: str) -> None:
    write_hf_folder(tmp_path / "hf", "llama")
    write_gguf(tmp_path / "m.gguf", "llama")
    folder, gguf = open_model(tmp_path / "hf").vocab, open_model(tmp_path / "m.gguf").vocab
    assert ids(gguf, text) == ids(folder, text)
    assert gguf.tokenizer.decode(ids(gguf, text), skip_special_tokens=False) == text
    assert gguf.special_ids == folder.special_ids == set(range(len(SPECIAL_TOKENS)))


def test_sentencepiece_merges_by_score() -> None:
    assert pieces(sentencepiece(), "hello") == [SPACE + "hel", "lo"]
    assert pieces(sentencepiece(), "helo") == [SPACE, "h", "e", "lo"]
    assert pieces(sentencepiece(), "hel") == [SPACE + "hel"]


def test_sentencepiece_spells_what_it_lacks_in_bytes_and_reads_it_back() -> None:
    vocab = sentencepiece()
    assert pieces(vocab, "\u00e9") == [SPACE, "<0xC3>", "<0xA9>"]
    assert vocab.tokenizer.decode(ids(vocab, "hello \u00e9 hel")) == "hello \u00e9 hel"


def test_sentencepiece_adds_bos_and_a_leading_space_unless_told_otherwise() -> None:
    assert (sentencepiece().add_bos, sentencepiece().bos_token_id) == (True, 1)
    told = sentencepiece(add_bos_token=False, add_space_prefix=False)
    assert not told.add_bos
    assert pieces(told, "lo") == ["lo"]


def test_unigram_takes_the_likeliest_split() -> None:
    vocab = built(
        model="t5",
        tokens=["<pad>", "</s>", "<unk>", SPACE, SPACE + "ab", "a", "b", "c", "bc"],
        token_type=[3, 3, 2, 1, 1, 1, 1, 1, 1],
        scores=[0.0, 0.0, 0.0, -2.0, -3.0, -4.0, -4.0, -4.0, -9.0],
        eos_token_id=1,
        unknown_token_id=2,
    )
    assert pieces(vocab, "abc") == [SPACE + "ab", "c"]
    assert (vocab.add_bos, vocab.add_eos, vocab.eos_token_ids) == (False, True, (1,))


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_the_whole_text(name: str) -> None:
    alphabet = [chr(code) for code in range(33, 324)]
    vocab = built(model="gpt2", pre=name, tokens=alphabet, merges=[])
    text = "It's 12345 caf\u00e9s, \u6f22\u5b57\n\n\tfoo_bar  (x) "
    assert vocab.tokenizer.decode(ids(vocab, text)) == text


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("smollm", ["It", "'s", "\u0120", "1", "2", "3", "4", "\u0120x"]),
        ("llama-bpe", ["It", "'s", "\u0120", "123", "4", "\u0120x"]),
        ("qwen2", ["It", "'s", "\u0120", "1", "2", "3", "4", "\u0120x"]),
        ("gpt-2", ["It", "'s", "\u01201234", "\u0120x"]),
        ("default", ["It", "'", "s", "\u0120", "123", "4", "\u0120x"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(name: str, pieces: list[str]) -> None:
    vocab = built(model="gpt2", pre=name, tokens=["a"], merges=[])
    split = vocab.tokenizer.pre_tokenizer.pre_tokenize_str("It's 1234 x")
    assert [piece for piece, _ in split] == pieces


def test_user_defined_tokens_are_matched_whole_and_are_text() -> None:
    vocab = built(model="gpt2", pre="gpt-2", tokens=["a", "<think>", "<e>"], token_type=[1, 4, 3], merges=[])
    assert ids(vocab, "a<think>a<e>") == [0, 1, 0, 2]
    assert vocab.tokenizer.decode([0, 1, 2]) == "a<think>"
    assert vocab.special_ids == {2}


def test_all_declared_and_named_ends_of_turn_are_known() -> None:
    tokens = ["a", "<|eot_id|>", "<|end|>", "</s>", "<x>", "<y>"]
    vocab = built(
        model="gpt2",
        tokens=tokens,
        token_type=[1, 3, 1, 3, 3, 3],
        merges=[],
        eos_token_id=4,
        eom_token_id=5,
        eot_token_id=99,
    )
    assert vocab.eos_token_ids == (4, 5, 1, 3)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": "gpt2", "pre": "nonesuch", "merges": []}, "pre = 'nonesuch': unknown pre-tokenizer"),
        ({"model": "bert"}, "model = 'bert': unknown tokenizer"),
        ({"model": "gpt2", "merges": ["a"]}, "has 'a', expected two tokens"),
        ({"model": "gpt2", "merges": ["a z"]}, "do not fit the tokens"),
        ({"model": "gpt2", "merges": [], "token_type": [1]}, "token_type has 1 entries for 2 tokens"),
        ({"model": "llama", "scores": [0.0]}, "scores has 1 entries for 2 tokens"),
        ({"model": "llama"}, "scores is missing"),
        ({"model": "gpt2", "merges": [], "tokens": ["a", "a"]}, "has duplicates"),
        ({"model": "gpt2", "merges": [], "tokens": ["a"] * 1001}, "1001 tokens, but"),
        ({"model": "gpt2", "merges": [], "tokens": [1]}, "tokens must be a list of strings"),
    ],
)
def test_tokenizer_metadata_that_cannot_be_served_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        built(**({"tokens": ["a", "b"]} | fields))
    assert "m.gguf" in str(caught.value)


def test_a_folders_ends_come_from_every_file_that_states_one(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": 9})
    )
    settings = {"eos_token": {"content": "<|endoftext|>"}, "bos_token": None, "pad_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    vocab = open_model(tmp_path).vocab
    assert vocab.eos_token_ids == (2, 7, 9, 0)
    assert (vocab.bos_token_id, vocab.pad_token_id) == (1, 2)


@pytest.mark.parametrize(("stated", "adds"), [({}, True), ({"add_bos_token": False}, False)])
def test_a_folders_bos_is_added_as_its_post_processor_or_settings_say(
    tmp_path: Path, stated: dict[str, bool], adds: bool
) -> None:
    write_hf_folder(tmp_path, "llama")
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    sequence, bos = {"Sequence": {"id": "A", "type_id": 0}}, "<|im_start|>"
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, sequence],
        "pair": [sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [1], "tokens": [bos]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos} | stated))
    assert open_model(tmp_path).vocab.add_bos is adds


def test_templates_may_be_a_list_and_a_file_wins(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, "llama")
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_model(tmp_path).chat_templates == {"default": "one", "tool_use": "two"}
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert open_model(tmp_path).chat_template == CHAT_TEMPLATE


@pytest.mark.model
def test_smollm2_tokenizes_as_published(smollm2_path: Path) -> None:
    vocab = open_model(smollm2_path).vocab
    assert ids(vocab, "<|im_start|>user\n<|im_end|>") == [1, 4093, 198, 2]
    assert ids(vocab, "Hello:World") == [19556, 42, 11265]
    assert ids(vocab, " x") == [1792]
    assert ids(vocab, "\n\nx") == [198, 198, 104]
    assert pieces(vocab, "12345 67") == ["1", "2", "3", "4", "5", "\u0120", "6", "7"]
    assert [vocab.tokenizer.decode(ids(vocab, text), skip_special_tokens=False) for text in TEXTS] == TEXTS
    assert vocab.eos_token_ids == (2, 0) and not vocab.add_bos
