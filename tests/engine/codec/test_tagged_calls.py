"""Calls with their arguments in tags: the tool's schema tells what is a string and what is not."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from answer_segments import call, dialect, read
from hypothesis import given
from hypothesis import strategies as st

from artesian.engine.codec.segments import CallArguments, CallBegin, CallEnd, Segment, Text

TOOLS: dict[str, dict[str, Any]] = {
    "write": {
        "properties": {
            "path": {"type": "string"},
            "mode": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "size": {"type": "integer"},
            "kind": {"enum": ["1", "2"]},
            "tags": {"type": ["array", "string"]},
            "any": {},
        }
    },
    "now": {},
}


def qwen(name: str, **arguments: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def glm(name: str, **arguments: str) -> str:
    body = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{body}</tool_call>"


WRITERS = {"qwen3_coder": qwen, "glm45": glm}
TYPED: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({}, {}),
    ({"path": "a.py"}, {"path": "a.py"}),
    ({"path": "12", "size": "12"}, {"path": "12", "size": 12}),
    ({"path": ' "x"\\\n\n  {é 👩\u200d👩}'}, {"path": ' "x"\\\n\n  {é 👩\u200d👩}'}),
    ({"path": "", "size": "twelve"}, {"path": "", "size": "twelve"}),
    ({"mode": "null", "tags": '["a", {"b": 1}]'}, {"mode": None, "tags": ["a", {"b": 1}]}),
    ({"mode": "12", "tags": "12", "kind": "1"}, {"mode": "12", "tags": "12", "kind": "1"}),
    ({"any": "True", "other": "None"}, {"any": True, "other": None}),
    ({"any": "NaN", "other": "1.50"}, {"any": "NaN", "other": 1.5}),
    (
        {"path": "</parameter> and </arg_value> <tool_call>"},
        {"path": "</parameter> and </arg_value> <tool_call>"},
    ),
]
OTHERS: dict[str, tuple[str, str, list[Segment]]] = {
    "two": (
        "qwen3_coder",
        f"Let me.\n\n{qwen('now')}\n{qwen('write', path='a')}\nDone.",
        [Text("Let me."), *call(0, "now", "{}"), *call(1, "write", '{"path": "a"}'), Text("Done.")],
    ),
    "two of GLM": (
        "glm45",
        f"Let me.\n{glm('now')}{glm('write', path='a')}",
        [Text("Let me."), *call(0, "now", "{}"), *call(1, "write", '{"path": "a"}')],
    ),
    "one line": (
        "qwen3_coder",
        "<tool_call><function=write><parameter=path>a</parameter><parameter=size>1</parameter></function>",
        call(0, "write", '{"path": "a", "size": 1}'),
    ),
    "GLM's one line": (
        "glm47",
        "<tool_call>write<arg_key>path</arg_key><arg_value>a</arg_value></tool_call>x",
        [*call(0, "write", '{"path": "a"}'), Text("x")],
    ),
    "no outer tag": ("qwen3_coder", "<function=now>\n</function>", call(0, "now", "{}")),
    "Seed": (
        "seed_oss",
        "<seed:tool_call><function=now></function></seed:tool_call>",
        call(0, "now", "{}"),
    ),
    "Hermes": (
        "qwen3_coder",
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        call(0, "now", "{}"),
    ),
    "unknown name": ("glm45", "<tool_call>nope\n</tool_call>", call(0, "nope", "{}")),
    "no call": ("qwen3_coder", "a <tool_call> b", [Text("a <tool_call> b")]),
    "no call of GLM": ("glm45", "a <tool_call> b c", [Text("a <tool_call> b c")]),
    "no name": ("qwen3_coder", "<function=a b>c", [Text("<function=a b>c")]),
    "cut": (
        "qwen3_coder",
        "<function=write><parameter=path>\nab\n</para",
        call(0, "write", '{"path": "ab\\n</para', is_whole=False),
    ),
    "cut in a number": (
        "glm45",
        "<tool_call>write<arg_key>size</arg_key><arg_value>12",
        call(0, "write", '{"size": 12', is_whole=False),
    ),
}


def parse(name: str, pieces: Any) -> list[Segment]:
    return read(dialect(name).parser(TOOLS), pieces)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(("arguments", "expected"), TYPED)
def test_arguments_have_the_types_of_the_schema(
    name: str, arguments: dict[str, str], expected: dict[str, Any]
) -> None:
    text = WRITERS[name]("write", **arguments)
    segments = parse(name, [text])
    assert [type(one) for one in segments] == [CallBegin, CallArguments, CallEnd]
    assert json.loads(segments[1].text) == expected  # type: ignore[union-attr]
    for at in range(len(text)):
        assert parse(name, [text[:at], text[at:]]) == segments
    assert parse(name, text) == segments


@pytest.mark.parametrize("title", OTHERS)
def test_an_answer_gives_its_segments_however_it_is_cut(title: str) -> None:
    name, text, expected = OTHERS[title]
    assert parse(name, [text]) == expected
    assert parse(name, text) == expected
    for at in range(len(text)):
        assert parse(name, [text[:at], text[at:]]) == expected
        ended = parse(name, [text[:at]])
        begun = [one.index for one in ended if isinstance(one, CallBegin)]
        assert begun == [one.index for one in ended if isinstance(one, CallEnd)]
    if len(text) < 80:
        for a, b in itertools.combinations(range(len(text)), 2):
            assert parse(name, [text[:a], text[a:b], text[b:]]) == expected


@pytest.mark.parametrize("name", WRITERS)
@given(value=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<")), size=st.integers())
def test_any_text_comes_back_as_it_was(name: str, value: str, size: int) -> None:
    segments = parse(name, WRITERS[name]("write", path=value, size=str(size)))
    assert json.loads(segments[1].text) == {"path": value, "size": size}  # type: ignore[union-attr]


def test_strings_come_as_they_are_written() -> None:
    parser = dialect("qwen3_coder").parser(TOOLS)
    parser.feed("<tool_call><function=write><parameter=path>\n")
    assert parser.feed('some "te') == [CallArguments(0, 'some \\"te')]


def test_without_schemas_a_value_is_what_it_looks_like() -> None:
    parser = dialect("glm45").parser(["f"])
    assert read(parser, glm("f", a="1", b="x", c="[]")) == call(0, "f", '{"a": 1, "b": "x", "c": []}')
