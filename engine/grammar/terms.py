"""Texts as the library's Lark spells them, where a special token's name stands for that token."""

from __future__ import annotations

import json
import re

from ..codec.tokenizer import Tokenizer


class Terms:
    """Texts as sequences of literals and special tokens.

    Args:
        special: The special tokens' ids by name.
    """

    def __init__(self, special: dict[str, int]) -> None:
        self._special = special
        longest_first = sorted(special, key=len, reverse=True)
        self._find = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if special else None

    def of(self, text: str) -> str:
        """Exactly this text."""
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part, ensure_ascii=False)
            for part in self._parts(text)
        )

    def ids_of(self, text: str) -> list[int]:
        """The special tokens in a text."""
        return [self._special[part] for part in self._parts(text) if part in self._special]

    def up_to(self, rule: str, text: str) -> str:
        """The definition of `rule`: any text up to the first `text`, that included.

        What is read as text goes on to the next special token; so what stands before one in `text` is the end
        of what is read. The grammar has TEXT, and PLAIN for a text that is not empty.
        """
        first, *rest = self._parts(text)
        if not self.ids_of(text):
            return f"{rule}[lazy]: TEXT {self.of(text)}"
        if first in self._special:
            return f"{rule}: PLAIN? {self.of(text)}"
        return f"{rule}: /(.|\\n)*{pattern(first)}/ {self.of(''.join(rest))}"

    def _parts(self, text: str) -> list[str]:
        parts = self._find.split(text) if self._find else [text]
        return [part for part in parts if part]


def terms_of(tokenizer: Tokenizer) -> Terms:
    """The terms of a vocabulary."""
    names = {tokenizer.token_name(i): i for i in sorted(tokenizer.special_ids)}
    return Terms({name: token_id for name, token_id in names.items() if name})


def pattern(text: str) -> str:
    """A regex that matches just the text, as Lark's slashes hold it."""
    return "".join(f"\\x{{{ord(c):x}}}" if not c.isalnum() else c for c in text)
