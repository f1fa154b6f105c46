"""Small real tokenizers of both families, trained on a few lines of text."""

from __future__ import annotations

import json

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from artesian.engine.codec import Codec

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps",
    "alpha beta gamma delta, alpha beta gamma delta: leading space   and three",
    "👩‍👩‍👧‍👦 家族 ₹ é 👩‍👩‍👧‍👦 家族 ₹ é",
    "naïve café, nai\u0308ve cafe\u0301\n\nnew\tline \u2028 separator",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE: 4 special tokens, the 256 bytes, a few merges; one added token that is plain text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=ALPHABET, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<toolé>", normalized=False)])
    return tokenizer


def sentencepiece() -> tokenizers.Tokenizer:
    """SentencePiece-like BPE with byte fallback and Llama's dummy prefix space."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=["<unk>", *SPECIAL], limit_alphabet=40, show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    size = len(model["vocab"])
    vocab = model["vocab"] | {f"<0x{byte:02X}>": size + byte for byte in range(256)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return tokenizer


def codec_of(
    hf: tokenizers.Tokenizer,
    *,
    add_bos: bool = False,
    add_eos: bool = False,
    chat_template: str | None = None,
) -> Codec:
    """A codec over one of the above, "<s>" its BOS and "</s>" its EOS."""
    vocab = hf.get_vocab()
    ids = [vocab[name] for name in SPECIAL]
    return Codec.build(
        hf,
        bos_token_id=ids[0],
        eos_token_ids=[ids[1]],
        add_bos=add_bos,
        add_eos=add_eos,
        special_ids=ids,
        chat_template=chat_template,
    )
