"""A GGUF file's tokenizer metadata as a tokenizer.json: byte-level BPE, SentencePiece BPE, unigram.

Source of the keys and their defaults: llama_vocab::impl::load in llama.cpp.
"""

from __future__ import annotations

from enum import IntEnum

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..errors import ModelError
from .fields import Fields
from .pretokenizers import PRE_TOKENIZERS
from .record import VocabRecord

END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "</s>",
    "<eos>",
)
"""Control tokens that end a turn by their name: a GGUF file has one eos field for chat and plain text."""

SPACE = "\u2581"


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)
"""Types of the tokens that are no text."""


def vocab_from_gguf(metadata: Fields, vocab_size: int) -> VocabRecord:
    """Build the vocabulary of a file whose embedding table has `vocab_size` rows.

    Raises:
        ModelError: an unknown tokenizer model or pre-tokenizer, or a missing or ill-sized field; names it.
    """
    fields = Fields(metadata.file, metadata.values, "tokenizer.ggml.")
    model, tokens = fields.text("model"), fields.texts("tokens")
    if len(tokens) > vocab_size:
        raise ModelError(
            f"{metadata.file}: {len(tokens)} tokens, but token_embd.weight has {vocab_size} rows"
        )
    types = _types(fields, tokens)
    add_bos = False
    match model:
        case "gpt2":
            name = fields.text("pre", "default")
            if name not in PRE_TOKENIZERS:
                fields.refuse("pre", f"unknown pre-tokenizer (known: {', '.join(PRE_TOKENIZERS)})")
            add_bos = PRE_TOKENIZERS[name].add_bos
            tokenizer = _byte_level(fields, tokens, name)
        case "llama":
            add_bos = True
            tokens = _spelled(tokens, types)
            gemma = metadata.text("general.architecture").startswith("gemma")
            tokenizer = _sentencepiece(fields, tokens, types, by_position=gemma)
        case "t5":
            tokenizer = _unigram(fields, tokens, types)
        case _:
            fields.refuse("model", "unknown tokenizer (known: gpt2, llama, t5)")
    _add_tokens(tokenizer, tokens, types)
    if tokenizer.get_vocab_size() != len(tokens):
        raise ModelError(f"{metadata.file}: tokenizer.ggml.tokens has duplicates")
    bos = _token_id(fields, "bos_token_id", len(tokens))
    eos = _token_id(fields, "eos_token_id", len(tokens))
    return VocabRecord(
        tokenizer_json=tokenizer.to_str().encode(),
        bos_token_id=bos,
        eos_token_ids=_end_of_turn(fields, tokens, types),
        pad_token_id=_token_id(fields, "padding_token_id", len(tokens)),
        add_bos=bos is not None and fields.flag("add_bos_token", add_bos),
        add_eos=eos is not None and fields.flag("add_eos_token", model == "t5"),
        special_ids=tuple(token for token, kind in enumerate(types) if kind in SPECIAL),
    )


def _byte_level(fields: Fields, tokens: list[str], pre: str) -> Tokenizer:
    rule = PRE_TOKENIZERS[pre]
    merges: list[tuple[str, str]] = []
    for merge in fields.texts("merges"):
        left, space, right = merge.partition(" ") if merge[:1] != " " else ("", "", "")
        if not space:
            raise ModelError(f"{fields.file}: tokenizer.ggml.merges has {merge!r}, expected two tokens")
        merges.append((left, right))
    tokenizer = Tokenizer(_bpe(fields, tokens, merges, ignore_merges=rule.ignore_merges))
    if rule.normalize:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: Fields, tokens: list[str], types: list[int], *, by_position: bool) -> Tokenizer:
    """SentencePiece's BPE merges the adjacent pair whose union scores best, so its merges are recovered
    from the vocabulary: every way to cut a token in two tokens, best token first.

    `by_position`: tokens are listed best first (Gemma, whose scores do not follow its merges).
    """
    scores = [-float(token) for token in range(len(tokens))] if by_position else _scores(fields, tokens)
    ids = {token: number for number, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for number, token in enumerate(tokens):
        if types[number] in (TokenType.BYTE, TokenType.CONTROL, TokenType.UNKNOWN):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[number], ids[left], ids[right], left, right))
    ranked.sort()
    merges = [(left, right) for *_, left, right in ranked]
    unknown = _token_id(fields, "unknown_token_id", len(tokens))
    tokenizer = Tokenizer(
        _bpe(
            fields,
            tokens,
            merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token=tokens[0 if unknown is None else unknown],
        )
    )
    _mark_spaces(tokenizer, fields.flag("add_space_prefix", True))
    return tokenizer


def _unigram(fields: Fields, tokens: list[str], types: list[int]) -> Tokenizer:
    if fields.has("precompiled_charsmap"):
        fields.refuse("precompiled_charsmap", "a character map is not supported")
    unknown = _token_id(fields, "unknown_token_id", len(tokens))
    pieces = list(zip(tokens, _scores(fields, tokens), strict=True))
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=unknown, byte_fallback=TokenType.BYTE in types))
    _mark_spaces(tokenizer, fields.flag("add_space_prefix", True))
    return tokenizer


def _bpe(fields: Fields, tokens: list[str], merges: list[tuple[str, str]], **options: object) -> models.BPE:
    try:
        ids = {token: number for number, token in enumerate(tokens)}
        return models.BPE(vocab=ids, merges=merges, **options)
    except Exception as err:  # the package raises plain Exception: a merge names no token
        raise ModelError(f"{fields.file}: tokenizer.ggml.merges do not fit the tokens: {err}") from err


def _mark_spaces(tokenizer: Tokenizer, prefix: bool) -> None:
    """Spaces as U+2581, one before the text where `prefix`; bytes without a token as <0xNN>."""
    mark = [normalizers.Replace(" ", SPACE)]
    strip = [decoders.Strip(" ", left=1)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence(([normalizers.Prepend(SPACE)] if prefix else []) + mark)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )


def _spelled(tokens: list[str], types: list[int]) -> list[str]:
    """Runs of spaces are stored as such among user-defined tokens; the normalised text has U+2581."""
    return [
        token.replace(" ", SPACE) if kind == TokenType.USER_DEFINED and not token.strip(" ") else token
        for token, kind in zip(tokens, types, strict=True)
    ]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens, and the tokens that are matched whole before anything else splits the text."""
    whole = [
        AddedToken(token, normalized=False, special=kind in SPECIAL)
        for token, kind in zip(tokens, types, strict=True)
        if (kind in SPECIAL or kind == TokenType.USER_DEFINED) and token.strip(SPACE)
    ]
    tokenizer.add_tokens(whole)


def _end_of_turn(fields: Fields, tokens: list[str], types: list[int]) -> tuple[int, ...]:
    declared = [
        _token_id(fields, name, len(tokens)) for name in ("eos_token_id", "eot_token_id", "eom_token_id")
    ]
    named = [
        token
        for token, kind in enumerate(types)
        if kind == TokenType.CONTROL and tokens[token] in END_OF_TURN
    ]
    return tuple(dict.fromkeys([token for token in declared if token is not None] + named))


def _types(fields: Fields, tokens: list[str]) -> list[int]:
    if not fields.has("token_type"):
        return [TokenType.NORMAL] * len(tokens)
    types = [int(kind) for kind in fields.numbers("token_type")]
    if len(types) != len(tokens):
        raise ModelError(
            f"{fields.file}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    return types


def _scores(fields: Fields, tokens: list[str]) -> list[float]:
    scores = fields.numbers("scores")
    if len(scores) != len(tokens):
        raise ModelError(
            f"{fields.file}: tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens"
        )
    return list(scores)


def _token_id(fields: Fields, name: str, size: int) -> int | None:
    """A token's id; none where the file has none or, as llama.cpp takes it, one out of range."""
    if not fields.has(name):
        return None
    token = fields.integer(name)
    return token if token < size else None
