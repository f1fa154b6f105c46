"""Recorded answers, cut everywhere: the segments are the same; what is no call is text, to the last byte."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from answer_segments import call, parser_of, read
from hypothesis import given
from hypothesis import strategies as st

from artesian.engine.codec.segments import (
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    Reasoning,
    Segment,
    Text,
)
from artesian.engine.codec.tools import TOOL_DIALECTS

WEATHER = '{"city": "Zürich \\"</tool_call>\\" {", "days": [1, 2]}'


RECORDED: dict[str, tuple[str, str, list[Segment]]] = {
    "hermes one call": (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
        call(0, "get_weather", WEATHER),
    ),
    "hermes text and two calls": (
        "hermes",
        'Let me see.\n<tool_call>{"name": "now"}</tool_call>\n'
        '<tool_call>\n{"arguments": {"a": 1}, "name": "add", "id": [1]}\n</tool_call>\nDone.\n',
        [Text("Let me see."), *call(0, "now", "{}"), *call(1, "add", '{"a": 1}'), Text("Done.\n")],
    ),
    "hermes arguments as text": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        call(0, "add", '{"a": 1}'),
    ),
    "hermes no call at all": ("hermes", " a < b <tool \n", [Text(" a < b <tool \n")]),
    "hermes half a marker": ("hermes", "see <tool_ca", [Text("see <tool_ca")]),
    "hermes not JSON": (
        "hermes",
        "<tool_call>add(1)</tool_call>",
        [Text("<tool_call>add(1)</tool_call>")],
    ),
    "hermes no name": (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}} after',
        [Text('<tool_call>{"arguments": {"a": 1}} after')],
    ),
    "hermes cut in the arguments": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": "x',
        call(0, "add", '{"a": "x', is_whole=False),
    ),
    "hermes cut behind the name": (
        "hermes",
        '<tool_call>{"name": "add", "arg',
        call(0, "add", "{}", is_whole=False),
    ),
    "hermes cut behind the arguments": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1}',
        call(0, "add", '{"a": 1}'),
    ),
    "hermes unclosed": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1} and more',
        [*call(0, "add", '{"a": 1}'), Text("and more")],
    ),
}


@pytest.fixture(params=RECORDED)
def recorded(request: pytest.FixtureRequest) -> tuple[str, str, list[Segment]]:
    return RECORDED[request.param]


def test_a_recorded_answer_gives_its_segments(recorded: tuple[str, str, list[Segment]]) -> None:
    name, text, expected = recorded
    assert read(parser_of(name), [text]) == expected


def test_it_gives_the_same_cut_at_any_two_places(recorded: tuple[str, str, list[Segment]]) -> None:
    name, text, expected = recorded
    places = range(len(text) + 1)
    for a, b in itertools.combinations_with_replacement(places, 2):
        assert read(parser_of(name), [text[:a], text[a:b], text[b:]]) == expected


def test_it_gives_the_same_character_by_character(recorded: tuple[str, str, list[Segment]]) -> None:
    name, text, expected = recorded
    assert read(parser_of(name), text) == expected


def test_arguments_come_as_they_are_written() -> None:
    parser = parser_of("hermes")
    parser.feed('<tool_call>{"name": "add", "arguments": {"a"')
    assert parser.feed(": 1") == [CallArguments(0, ": 1")]


def test_ids_are_made_once_and_differ() -> None:
    parser = parser_of("hermes")
    segments = parser.feed('<tool_call>{"name": "now"}</tool_call>' * 2)
    ids = [segment.id for segment in segments if isinstance(segment, CallBegin)]
    assert len(set(ids)) == 2
    assert all(len(one) == 29 and one.startswith("call_") and one[5:].isalnum() for one in ids)


HOSTILE: list[str] = sorted(
    {marker for row in TOOL_DIALECTS for marker in row.markers}
    | {
        '{"name": "add"',
        ', "arguments": ',
        '{"a": 1}',
        "}",
        "{",
        '"',
        "\\",
        "[",
        "]",
        "\n",
        " ",
        "add",
        "(",
        ")",
    }
    | {"a=1", ",", ":", "'", "\ud7ff", "null", "<think>", "</think>", "to=functions.add", "json", "```"}
)


@pytest.mark.parametrize("name", [row.names[0] for row in TOOL_DIALECTS])
@given(parts=st.lists(st.sampled_from(HOSTILE), max_size=12), seed=st.integers(0, 99))
def test_hostile_text_never_raises_and_cuts_change_nothing(name: str, parts: list[str], seed: int) -> None:
    text = "".join(parts)
    cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=6))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    whole = read(parser_of(name, "qwen3"), [text])
    assert read(parser_of(name, "qwen3"), pieces) == whole
    begun = [segment.index for segment in whole if isinstance(segment, CallBegin)]
    assert begun == [segment.index for segment in whole if isinstance(segment, CallEnd)]


@given(st.text(alphabet=st.characters(exclude_characters="<[{", exclude_categories=["Cs"])))
def test_text_without_markers_comes_whole(text: str) -> None:
    for row in TOOL_DIALECTS:
        if not row.reads_reasoning:
            assert read(parser_of(row.names[0]), text) == ([Text(text)] if text else [])


THOUGHTS: list[tuple[str, str, list[Segment]]] = [
    ("", "<think>\nhm\n\n</think>\n\nHi.", [Reasoning("hm"), Text("Hi.")]),
    ("<think>\n", "hm </thin </think> Hi </think>", [Reasoning("hm </thin"), Text("Hi </think>")]),
    ("<think>\n\n</think>\n\n", "Hi <think>", [Text("Hi <think>")]),
    ("", "Hi <think>x</think>", [Text("Hi <think>x</think>")]),
    ("", " \n<thi", [Text(" \n<thi")]),
    ("<think>", "never ends </thi", [Reasoning("never ends </thi")]),
    (
        "<think>",
        'call <tool_call> it</think>\n<tool_call>{"name": "now"}</tool_call>',
        [Reasoning("call <tool_call> it"), *call(0, "now", "{}")],
    ),
]


@pytest.mark.parametrize(("prompt_end", "text", "expected"), THOUGHTS)
def test_thoughts_are_told_apart_however_they_are_cut(
    prompt_end: str, text: str, expected: list[Segment]
) -> None:
    def parser() -> AnswerParser:
        return parser_of("hermes", "qwen3", prompt_end)

    assert read(parser(), text) == expected
    for at in range(len(text) + 1):
        assert read(parser(), [text[:at], text[at:]]) == expected


def test_arguments_of_all_recorded_calls_are_json() -> None:
    whole = [segments for _, text, segments in RECORDED.values() if "cut" not in text]
    texts = [s.text for segments in whole for s in segments if isinstance(s, CallArguments)]
    for text in texts:
        if text.endswith("}"):
            json.loads(text)
