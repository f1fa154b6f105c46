"""Free text with forms in it, as a grammar in the library's Lark dialect.

Text ends at a trigger, lazily: from there on only a form that begins with that trigger is possible. A special
token in a form's texts stands for that token and not for its name, and free text may hold any special token
that is no trigger, as it may without a grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from ..codec.tokenizer import Tokenizer
from .spec import Tags


def tags_to_lark(tags: Tags, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> str:
    """Return the grammar; the JSON value of tag i is the rule `@json_i`, which the caller defines.

    Raises:
        ValueError: a tag begins with none of the triggers, or a trigger has a special token behind text.
    """
    names = {tokenizer.token_name(i): i for i in sorted(tokenizer.special_ids)}
    terms = _Terms({name: token_id for name, token_id in names.items() if name})
    if tags.required:
        whole = f"{terms.of(tags.opening)} {_in_a_row(tags, terms)} {terms.of(tags.closing)}"
        return f"start: {whole}\n{_any_form(tags, terms)}\n"
    return _free_text(tags, terms, sorted(tokenizer.special_ids - set(eos_token_ids)))


def _any_form(tags: Tags, terms: _Terms) -> str:
    forms = [f"{terms.of(tag.begin)} @json_{i} {terms.of(tag.end)}" for i, tag in enumerate(tags.tags)]
    return f"any_form: {' | '.join(forms)}"


def _in_a_row(tags: Tags, terms: _Terms) -> str:
    more = f" ({terms.of(tags.between)} any_form)*" if tags.parallel else ""
    return f"any_form{more}"


def _free_text(tags: Tags, terms: _Terms, special_ids: list[int]) -> str:
    rules: list[str] = []
    opened: list[str] = []
    texts: list[str] = []
    for number, trigger in enumerate(tags.triggers):
        ids = terms.ids_of(trigger)
        if ids:
            if not trigger.startswith(terms.name_of(ids[0])) or len(ids) > 1:
                raise ValueError(f"the trigger {trigger!r} has a special token behind text")
            special_ids = [token_id for token_id in special_ids if token_id != ids[0]]
        own = _opened_by(trigger, tags, terms)
        if not own:
            continue
        if ids:
            rules.append(f"trigger_{number}: PLAIN? {terms.of(trigger)}")
        else:
            texts.append(trigger)
            rules.append(f"trigger_{number}[lazy]: TEXT {terms.of(trigger)}")
        opened.append(f"trigger_{number} ({' | '.join(own)})")
    for tag in tags.tags:
        _trigger_of(tags, tags.opening or tag.begin)
    if tags.opening:
        rules.append(_any_form(tags, terms))
    special = " | ".join(f"<[{span}]>" for span in _spans(special_ids))
    other = f"(PLAIN? ({special}))* " if special else ""
    without = "".join(f" & ~/(.|\\n)*{_pattern(text)}(.|\\n)*/" for text in texts)
    return "\n".join(
        [
            f"start: ({other}form){'*' if tags.parallel else '?'} tail",
            f"form: {' | '.join(opened)}",
            f"tail: {other}PLAIN?",
            *rules,
            r"TEXT: /(.|\n)*/",
            rf"PLAIN: /(.|\n)+/{without}",
            "",
        ]
    )


def _opened_by(trigger: str, tags: Tags, terms: _Terms) -> list[str]:
    """What may follow a trigger."""
    if tags.opening:
        if _trigger_of(tags, tags.opening) != trigger:
            return []
        opening, closing = terms.of(tags.opening.removeprefix(trigger)), terms.of(tags.closing)
        return [f"{opening} {_in_a_row(tags, terms)} {closing}"]
    return [
        f"{terms.of(tag.begin.removeprefix(trigger))} @json_{i} {terms.of(tag.end)}"
        for i, tag in enumerate(tags.tags)
        if tag.begin.startswith(trigger) and _trigger_of(tags, tag.begin) == trigger
    ]


def _trigger_of(tags: Tags, begin: str) -> str:
    for trigger in tags.triggers:
        if begin.startswith(trigger):
            return trigger
    raise ValueError(f"the text {begin!r} begins with none of the triggers {tags.triggers!r}")


class _Terms:
    """Texts as sequences of literals and special tokens."""

    def __init__(self, special: dict[str, int]) -> None:
        self._special = special
        self._names = {token_id: name for name, token_id in special.items()}
        longest_first = sorted(special, key=len, reverse=True)
        self._find = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if special else None

    def of(self, text: str) -> str:
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part, ensure_ascii=False)
            for part in self._parts(text)
        )

    def ids_of(self, text: str) -> list[int]:
        return [self._special[part] for part in self._parts(text) if part in self._special]

    def name_of(self, token_id: int) -> str:
        return self._names[token_id]

    def _parts(self, text: str) -> list[str]:
        parts = self._find.split(text) if self._find else [text]
        return [part for part in parts if part]


def _spans(ids: list[int]) -> Iterator[str]:
    """Ascending ids as `3-16` and `20`."""
    for _, run in groupby(enumerate(ids), key=lambda pair: pair[1] - pair[0]):
        span = [token_id for _, token_id in run]
        yield f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0])


def _pattern(text: str) -> str:
    """A regex that matches just the text, as Lark's slashes hold it."""
    return "".join(f"\\x{{{ord(c):x}}}" if not c.isalnum() else c for c in text)
