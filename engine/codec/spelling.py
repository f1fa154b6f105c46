"""How a vocabulary spells text: from a token's stored form to the exact bytes it stands for.

It reads the description of the tokenizer's decoder; it knows nothing of special tokens or streams.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import tokenizers

from ..errors import ModelError


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 stands for itself, the rest for U+0100 onwards.

    Source: Radford et al. 2019, the encoder published with GPT-2 (`bytes_to_unicode`).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}


_BYTE_OF = _byte_level_alphabet()


class ByteLevel:
    """Byte-level BPE: each character of a token stands for one byte."""

    leading_spaces = 0
    added_is_plain = True
    """Whether tokens added by hand are listed as the text they stand for."""

    def to_bytes(self, token: str) -> bytes:
        """The token's bytes; a token with a character outside the alphabet stands for itself."""
        try:
            return bytes([_BYTE_OF[character] for character in token])
        except KeyError:
            return token.encode()


class SentencePiece(NamedTuple):
    """SentencePiece: a marker stands for the space, `<0xNN>` for a byte that has no piece."""

    replacements: tuple[tuple[str, str], ...]
    byte_fallback: bool
    leading_spaces: int
    """How many spaces a full decode removes from the start of the text."""
    added_is_plain: bool = False

    def to_bytes(self, token: str) -> bytes:
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


Spelling = ByteLevel | SentencePiece


def spelling_of(hf: tokenizers.Tokenizer) -> Spelling:
    """Read the spelling from the tokenizer's decoder.

    Raises:
        ModelError: the decoder is none, or one that cannot be applied token by token.
    """
    steps = _steps(json.loads(hf.decoder.__getstate__())) if hf.decoder is not None else []
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevel()
    replacements: list[tuple[str, str]] = []
    byte_fallback, leading_spaces, fused = False, 0, False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if not fused:
                replacements.append((old, new))
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": start, "stop": 0} if fused:
                leading_spaces = start
            case _:
                raise ModelError(f"The tokenizer's decoder has a step that is not supported: {step}")
    if not steps or not fused:
        raise ModelError(f"The tokenizer's decoder is not supported: {kinds or 'none'}")
    return SentencePiece(tuple(replacements), byte_fallback, leading_spaces)


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]
