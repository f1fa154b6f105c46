"""Text that every machine has, for prompts and perplexity: the language reference inside Python itself."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from ...engine.codec import Codec, Tokenizer
from ...engine.load.model import open_model
from ...engine.run.runtime import codec_of

TAIL = 12
"""A little more text than asked for is encoded: where a text is cut, its last tokens differ."""


def reference_text() -> str:
    """The pages of `help()`, 700 kB of English prose and some code; differs between Python versions."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name].strip() for name in sorted(topics))


class Prompts:
    """Texts of a given number of tokens, each different from its first words on."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words = reference_text().split(" ")
        self._given = 0

    def take(self, tokens: int) -> str:
        """The next text of `tokens` tokens, give or take one or two where it is cut. No two texts share
        a prefix worth caching: each starts with its number."""
        start = 997 * self._given % (len(self._words) // 2)
        self._given += 1
        text = f"{self._given}. " + " ".join(self._words[start : start + tokens + TAIL])
        return self._tokenizer.decode(
            self._tokenizer.encode(text, add_special=False)[:tokens], skip_special=True
        )


def model_codec(path: Path) -> Codec:
    """The text side of a model's file. Raises `ModelError` as `open_model` does."""
    return codec_of(open_model(path))
