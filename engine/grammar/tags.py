"""Free text with forms in it, as a grammar in the library's Lark dialect.

Text ends at a trigger, lazily: from there on only a form that begins with that trigger is possible. A special
token in a form's texts stands for that token and not for its name, and free text may hold any special token
that is no trigger, as it may without a grammar.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from ..codec.tokenizer import Tokenizer
from .members import Members, member_rules
from .spec import Tag, Tags
from .terms import Terms, pattern, terms_of


def tags_to_lark(
    tags: Tags,
    tokenizer: Tokenizer,
    eos_token_ids: Sequence[int],
    members: Mapping[int, Members] | None = None,
) -> str:
    """Return the grammar; the caller defines the rules of JSON: `@json_i` for tag i, or where its members
    stand by themselves `@json_i_j` for member j; and `@text`, if there is one.

    Args:
        members: Those of the tags that have some, by the tags' numbers.

    Raises:
        ValueError: a tag begins with none of the triggers, or a trigger has two special tokens.
    """
    terms = terms_of(tokenizer)
    special_ids = sorted(tokenizer.special_ids - set(eos_token_ids))
    return "\n".join(
        [
            *(_free_text(tags, terms, special_ids) if tags.is_free else _calls_or(tags, terms)),
            *_member_lines(tags, terms, members or {}),
            r"TEXT: /(.|\n)*/",
            rf"PLAIN: /(.|\n)+/{_without(tags, terms)}",
            "",
        ]
    )


def _calls_or(tags: Tags, terms: Terms) -> Iterator[str]:
    """Nothing but calls, or the text that may be in their place."""
    text = "" if tags.required else "@text | "
    yield f"start: {text}{terms.of(tags.opening)} {_row(tags, terms)} {terms.of(tags.closing)}"
    yield f"form: {' | '.join(_form(tags, i, terms) for i in range(len(tags.tags)))}"


def _row(tags: Tags, terms: Terms) -> str:
    return f"form ({terms.of(tags.between)} form)*" if tags.parallel else "form"


def _form(tags: Tags, number: int, terms: Terms, trigger: str = "") -> str:
    """A form, or what of it is behind the trigger."""
    tag = tags.tags[number]
    content = f"@json_{number}" if tag.members is None else f"members_{number}"
    return f"{terms.of(tag.begin.removeprefix(trigger))} {content} {terms.of(tag.end)}"


def _free_text(tags: Tags, terms: Terms, special_ids: list[int]) -> Iterator[str]:
    opened: list[str] = []
    for number, trigger in enumerate(tags.triggers):
        own = [i for i, tag in enumerate(tags.tags) if tags.opening or _trigger_of(tags, tag) == trigger]
        ids = terms.ids_of(trigger)
        if len(ids) > 1:
            raise ValueError(f"the trigger {trigger!r} has two special tokens")
        special_ids = [token_id for token_id in special_ids if token_id not in ids]
        if not own:
            continue
        yield terms.up_to(f"trigger_{number}", trigger)
        if tags.opening:
            behind = tags.opening.partition(trigger)[2]
            row = f"{terms.of(behind)} {_row(tags, terms)} {terms.of(tags.closing)}"
            opened.append(f"trigger_{number} {row}")
            yield f"form: {' | '.join(_form(tags, i, terms) for i in own)}"
        else:
            opened.append(f"trigger_{number} ({' | '.join(_form(tags, i, terms, trigger) for i in own)})")
    special = " | ".join(f"<[{span}]>" for span in _spans(special_ids))
    other = f"(PLAIN? ({special}))* " if special else ""
    yield f"opened: {' | '.join(opened)}"
    yield f"start: ({other}opened){'*' if tags.parallel and not tags.opening else '?'} tail"
    yield f"tail: {other}PLAIN?"


def _member_lines(tags: Tags, terms: Terms, members: Mapping[int, Members]) -> Iterator[str]:
    ends: set[str] = set()
    for number, tag in enumerate(tags.tags):
        if tag.members is None:
            continue
        yield from member_rules(number, members[number], tag.members, terms)
        ends.add(tag.members.end)
    for end in ends:  # one dialect's tags have the same
        yield terms.up_to("any_text", end)


def _without(tags: Tags, terms: Terms) -> str:
    texts = [trigger for trigger in tags.triggers if not terms.ids_of(trigger)]
    return "".join(f" & ~/(.|\\n)*{pattern(text)}(.|\\n)*/" for text in texts)


def _trigger_of(tags: Tags, tag: Tag) -> str:
    for trigger in tags.triggers:
        if tag.begin.startswith(trigger):
            return trigger
    raise ValueError(f"the tag {tag.begin!r} begins with none of the triggers {tags.triggers!r}")


def _spans(ids: list[int]) -> Iterator[str]:
    """Ascending ids as `3-16` and `20`."""
    for _, run in groupby(enumerate(ids), key=lambda pair: pair[1] - pair[0]):
        span = [token_id for _, token_id in run]
        yield f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0])
