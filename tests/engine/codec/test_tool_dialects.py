"""Answers in each dialect's public form: the segments are these wherever the text is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from answer_segments import NAMES, call, parser_of, read
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level, codec_of

from artesian.engine.codec import TextStream
from artesian.engine.codec.segments import CallArguments, CallBegin, CallEnd, Reasoning, Segment, Text
from artesian.engine.codec.tools import TOOL_DIALECTS, ToolDialect

PAIRS_UP_TO_CHARS = 72
"""Longer texts are cut in two and into characters and tokens, not at every pair of places."""
HARD = (
    '{"city": "Zürich \\"[/]\\\\ {👩\u200d👩", "days": [1, {"a": "}"}], '
    '"raw": "<|end|>[TOOL_CALLS]<｜tool▁call▁end｜>"}'
)
ADD = '{"a": 1, "b": -2.5}'

LLAMA: dict[str, tuple[str, list[Segment]]] = {
    "one call": ('{"name": "add", "parameters": ' + ADD + "}", call(0, "add", ADD)),
    "tag": (f'<|python_tag|>{{"name": "get_weather", "parameters": {HARD}}}', call(0, "get_weather", HARD)),
    "several": (
        '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "add", "parameters": {"a": 1}}',
        [*call(0, "now", "{}"), *call(1, "add", '{"a": 1}')],
    ),
    "a tag for each": (
        '<|python_tag|>{"name": "now"};<|python_tag|>{"name": "now"}\n{"name": "now"}',
        [*call(0, "now", "{}"), *call(1, "now", "{}"), *call(2, "now", "{}")],
    ),
    "text around": (
        'I look.\n\n{"type": "function", "name": "now", "parameters": {}}\nDone; {x}',
        [Text("I look."), *call(0, "now", "{}"), Text("Done; {x}")],
    ),
    "llama 4": (
        '<|python_start|>{"name": "now", "parameters": {}}<|python_end|>\n',
        call(0, "now", "{}"),
    ),
    "unknown name behind a tag": (
        '<|python_tag|> {"name": "nope", "parameters": {}}',
        call(0, "nope", "{}"),
    ),
    "unknown name": (
        '{"name": "Bob", "parameters": {}}',
        [Text('{"name": "Bob", "parameters": {}}')],
    ),
    "other JSON": (
        '{"title": {"name": 1}} and ; {"type": "x", "of": 1}',
        [Text('{"title": {"name": 1}} and ; {"type": "x", "of": 1}')],
    ),
    "text behind the semicolon": (
        '{"name": "now"} ; that was it',
        [*call(0, "now", "{}"), Text("; that was it")],
    ),
    "code": ("<|python_tag|>print({1})", [Text("<|python_tag|>print({1})")]),
    "half a tag": ('a <|python_t {"na', [Text('a <|python_t {"na')]),
    "cut": ('{"name": "add", "parameters": {"a": "x', call(0, "add", '{"a": "x', is_whole=False)),
}
MISTRAL: dict[str, tuple[str, list[Segment]]] = {
    "array": (f'[TOOL_CALLS] [{{"name": "add", "arguments": {ADD}}}]', call(0, "add", ADD)),
    "array of several": (
        '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "aBc123dEf"}, '
        f'{{"name": "get_weather", "arguments": {HARD}}}] ',
        [*call(0, "now", "{}"), *call(1, "get_weather", HARD)],
    ),
    "args": (f"[TOOL_CALLS]get_weather[ARGS]{HARD}", call(0, "get_weather", HARD)),
    "args of several": (
        'Let me see.[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]add[ARGS] {"a": 1}\nSo.',
        [Text("Let me see."), *call(0, "now", "{}"), *call(1, "add", '{"a": 1}'), Text("So.")],
    ),
    "id": (f"[TOOL_CALLS]add[CALL_ID]bbc5b7ede[ARGS]{ADD}", call(0, "add", ADD)),
    "no [ARGS]": (f"[TOOL_CALLS]add{ADD}", call(0, "add", ADD)),
    "no arguments": (
        "[TOOL_CALLS]now[ARGS][TOOL_CALLS]now[ARGS]",
        [*call(0, "now", "{}"), *call(1, "now", "{}")],
    ),
    "unknown name": ("[TOOL_CALLS]nope[ARGS]{}", call(0, "nope", "{}")),
    "empty array": ("[TOOL_CALLS] [] x", [Text("[TOOL_CALLS] [] x")]),
    "no call": ("[TOOL_CALLS] are what I make", [Text("[TOOL_CALLS] are what I make")]),
    "no call in an array": ('[TOOL_CALLS] [{"a": 1}] x', [Text('[TOOL_CALLS] [{"a": 1}] x')]),
    "array that breaks off": (
        '[TOOL_CALLS][{"name": "now"}, x]',
        [*call(0, "now", "{}"), Text(", x]")],
    ),
    "half a marker": ("a[1] [TOOL_CAL", [Text("a[1] [TOOL_CAL")]),
    "cut in the head": ("[TOOL_CALLS]add[CALL_ID]bb", [Text("[TOOL_CALLS]add[CALL_ID]bb")]),
    "cut": ('[TOOL_CALLS]add[ARGS]{"a": "x', call(0, "add", '{"a": "x', is_whole=False)),
    "not JSON": ("[TOOL_CALLS]add[ARGS]1, 2 ", call(0, "add", "1, 2")),
}
PYTHONIC: dict[str, tuple[str, list[Segment]]] = {
    "one call": ("[add(a=1, b=-2.5)]", call(0, "add", ADD)),
    "several": (
        "[now(), add(a=1), now( )]",
        [*call(0, "now", "{}"), *call(1, "add", '{"a": 1}'), *call(2, "now", "{}")],
    ),
    "text around": (
        "Let me see. [now()]\nDone [1].",
        [Text("Let me see."), *call(0, "now", "{}"), Text("Done [1].")],
    ),
    "markers": (
        '<|python_start|>[get_weather(city="B")]<|python_end|> x',
        [*call(0, "get_weather", '{"city": "B"}'), Text("x")],
    ),
    "no brackets": (
        "<function_calls>\nadd(a='x')\nnope(b=None)\n</function_calls>",
        [*call(0, "add", '{"a": "x"}'), *call(1, "nope", '{"b": null}')],
    ),
    "LFM2": ("<|tool_call_start|>[now()]<|tool_call_end|>", call(0, "now", "{}")),
    "nesting": (
        "[add(a=[1, (2, 'x')], b={'k': {'m': True,}, 3: [],}, c=())]",
        call(0, "add", '{"a": [1, [2, "x"]], "b": {"k": {"m": true}, "3": []}, "c": []}'),
    ),
    "strings": (
        r"""[add(a='it\'s "x"\n\x41\u00fc\U0001F600\101\q', b=r"\d", c='''a'b''c''', d="", e='')]""",
        call(
            0,
            "add",
            r"""{"a": "it's \"x\"\nAü😀A\\q", "b": "\\d", "c": "a'b''c", "d": "", "e": ""}""",
        ),
    ),
    "markers in strings": (
        '[add(a=")]<|python_end|>[now()]", b=1)]',
        call(0, "add", '{"a": ")]<|python_end|>[now()]", "b": 1}'),
    ),
    "words": (
        "[add(a=New York, b=0x1F, c=1_000, d=.5, e=true, f=1e5, g=nan, h='a' 'b')]",
        call(
            0,
            "add",
            '{"a": "New York", "b": 31, "c": 1000, "d": 0.5, "e": true, "f": 1e5, "g": "nan", "h": "ab"}',
        ),
    ),
    "halves of a pair": (r"[add(a='\ud83d\ude00')]", call(0, "add", r'{"a": "\ud83d\ude00"}')),
    "unknown name": ("[nope(a=1)]", [Text("[nope(a=1)]")]),
    "positional": ("[add(1, 2)]", [Text("[add(1, 2)]")]),
    "no call": ("[add] (x) [ad", [Text("[add] (x) [ad")]),
    "no call behind a marker": ("<|python_start|>print(1)", [Text("<|python_start|>print(1)")]),
    "list that breaks off": ("[now(), 3]", [*call(0, "now", "{}"), Text(", 3]")]),
    "cut": ("[add(a=1, b='x", call(0, "add", '{"a": 1, "b": "x', is_whole=False)),
    "cut in a word": ("[add(a=Tru", call(0, "add", '{"a": "Tru', is_whole=False)),
}
HARMONY: dict[str, tuple[str, list[Segment]]] = {
    "thought and answer": (
        "<|channel|>analysis<|message|>2+2.<|end|>"
        "<|start|>assistant<|channel|>final<|message|> It is <4>.\n<|return|>",
        [Reasoning("2+2."), Text(" It is <4>.\n")],
    ),
    "call": (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + HARD + "<|call|>",
        call(0, "get_weather", HARD),
    ),
    "recipient first": (
        " to=functions.add<|channel|>commentary json<|message|>" + ADD,
        call(0, "add", ADD),
    ),
    "preamble and two calls": (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.now<|message|><|end|>"
        '<|start|>assistant to=functions.add<|channel|>analysis code<|message|>{"a": 1}<|call|>',
        [Reasoning("a"), Text("Let me see."), *call(0, "now", "{}"), *call(1, "add", '{"a": 1}')],
    ),
    "messages of a kind": (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"
        "<|start|>assistant<|channel|>commentary<|message|>c<|end|>\n<|channel|>final<|message|>d",
        [Reasoning("a\n\nb"), Text("c\n\nd")],
    ),
    "built-in tool": (
        "<|channel|>commentary to=python code<|message|>print(1)<|call|>",
        [Reasoning("print(1)")],
    ),
    "unknown name": (
        "<|channel|>commentary to=functions.nope<|message|>{}<|call|>",
        call(0, "nope", "{}"),
    ),
    "no namespace": ("<|channel|>commentary to=now json<|message|>{}", call(0, "now", "{}")),
    "no channel": ("<|start|>assistant<|message|>Hi", [Text("Hi")]),
    "no markers": ("Hello <| there\n", [Text("Hello <| there\n")]),
    "no head": ("<|channel|>final is what I say", [Text("<|channel|>final is what I say")]),
    "cut in a head": ("<|channel|>analysis<|message|>a<|end|><|start|>assist", [Reasoning("a")]),
    "half a marker": ("<|channel|>final<|message|>a <|en", [Text("a <|en")]),
    "cut": (
        '<|channel|>commentary to=functions.add<|message|>{"a": "x',
        call(0, "add", '{"a": "x', is_whole=False),
    ),
}
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK: dict[str, tuple[str, list[Segment]]] = {
    "fenced": (
        f"{CALLS}{CALL}function{SEP}get_weather\n```json\n{HARD}\n```{CALL_END}{CALLS_END}",
        call(0, "get_weather", HARD),
    ),
    "several fenced": (
        f"I look.{CALLS}{CALL}function{SEP}now\n```json\n{{}}\n```{CALL_END}\n"
        f"{CALL}function{SEP}add\n```json\n{ADD}\n```{CALL_END}{CALLS_END}\nSo.",
        [Text("I look."), *call(0, "now", "{}"), *call(1, "add", ADD), Text("So.")],
    ),
    "bare": (f"{CALLS}{CALL}get_weather{SEP}{HARD}{CALL_END}{CALLS_END}", call(0, "get_weather", HARD)),
    "several bare": (
        f"a\n\n{CALLS}{CALL}now{SEP}{CALL_END}{CALL}add{SEP}{ADD}{CALL_END}{CALLS_END}b",
        [Text("a"), *call(0, "now", "{}"), *call(1, "add", ADD), Text("b")],
    ),
    "a tool named function": (f"{CALL}function{SEP}{{}}{CALL_END}", call(0, "function", "{}")),
    "no end": (
        f"{CALLS}{CALL}add{SEP}{ADD}{CALL}now{SEP}{{}}",
        [*call(0, "add", ADD), *call(1, "now", "{}")],
    ),
    "not JSON": (f"{CALL}add{SEP}1, 2\n{CALL_END}", call(0, "add", "1, 2")),
    "unknown name": (f"{CALL}nope{SEP}{{}}{CALL_END}", call(0, "nope", "{}")),
    "no call": (f"{CALLS} x {CALL_END}{CALLS_END}", [Text(f"{CALLS} x {CALL_END}{CALLS_END}")]),
    "no separator": (f"{CALL}add({{}}){CALL_END}", [Text(f"{CALL}add({{}}){CALL_END}")]),
    "no fence": (f"{CALL}function{SEP}a b{{}}", [Text(f"{CALL}function{SEP}a b{{}}")]),
    "half a marker": ("<｜tool▁calls▁beg", [Text("<｜tool▁calls▁beg")]),
    "cut in the head": (f"{CALLS}{CALL}function{SEP}ad", [Text(f"{CALLS}{CALL}function{SEP}ad")]),
    "cut": (f'{CALL}add{SEP}{{"a": "x', call(0, "add", '{"a": "x', is_whole=False)),
}
RECORDED = {
    f"{name}: {title}": (name, text, expected)
    for name, answers in (
        ("llama3_json", LLAMA),
        ("mistral", MISTRAL),
        ("pythonic", PYTHONIC),
        ("openai", HARMONY),
        ("deepseek_v3", DEEPSEEK),
    )
    for title, (text, expected) in answers.items()
}
TOKENIZER = codec_of(byte_level()).tokenizer


@pytest.mark.parametrize("title", RECORDED)
def test_an_answer_gives_its_segments_however_it_is_cut(title: str) -> None:
    name, text, expected = RECORDED[title]
    assert read(parser_of(name), [text]) == expected
    assert read(parser_of(name), text) == expected
    places = range(len(text) + 1)
    for at in places:
        assert read(parser_of(name), [text[:at], text[at:]]) == expected
    if len(text) <= PAIRS_UP_TO_CHARS:
        for a, b in itertools.combinations(places, 2):
            assert read(parser_of(name), [text[:a], text[a:b], text[b:]]) == expected


@pytest.mark.parametrize("title", RECORDED)
def test_it_gives_the_same_token_by_token(title: str) -> None:
    name, text, expected = RECORDED[title]
    stream = TextStream(TOKENIZER, skip_special=False)
    pieces = [stream.push([token]).text for token in TOKENIZER.encode(text, add_special=False)]
    assert read(parser_of(name), [*pieces, stream.finish().text]) == expected


@pytest.mark.parametrize("title", RECORDED)
def test_an_answer_that_ends_anywhere_ends_its_calls(title: str) -> None:
    name, text, _ = RECORDED[title]
    for at in range(len(text)):
        segments = read(parser_of(name), [text[:at]])
        begun = [one.index for one in segments if isinstance(one, CallBegin)]
        assert begun == [one.index for one in segments if isinstance(one, CallEnd)] == list(range(len(begun)))
        assert read(parser_of(name), text[:at]) == segments


WITH_JSON = [row for row in TOOL_DIALECTS if row.forms and not row.forms.members]


@pytest.mark.parametrize("arguments", ["{}", ADD, HARD])
@pytest.mark.parametrize("row", WITH_JSON, ids=lambda row: row.names[0])
def test_what_a_grammar_writes_is_read_as_it_was_meant(row: ToolDialect, arguments: str) -> None:
    name, forms = row.names[0], row.forms
    assert forms is not None
    begins = [forms.begin_of(tool) for tool in NAMES]
    assert all((forms.opening or begin).startswith(forms.trigger) for begin in begins)
    text = forms.between.join(begin + arguments + forms.end for begin in begins)
    text = forms.opening + text + forms.closing
    expected = [segment for i, tool in enumerate(NAMES) for segment in call(i, tool, arguments)]
    assert read(parser_of(name), [text]) == expected
    assert read(parser_of(name), text) == expected


WORDS = [f"w{i}x" for i in range(8)]
PIECES: dict[str, list[str]] = {
    "llama3_json": ["<|python_tag|>", '{"name": "add"', ', "parameters": {', '{"name"', "}", ";", "{", '"'],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[", '{"name": "add", "arguments": ', "{}", "}", "]", ",", "add"],
    "pythonic": ["<|python_start|>", "<|python_end|>", "[", "add(", "now()", "a=", ")", "]", ",", "'", "{"],
    "openai": [
        "<|channel|>final<|message|>",
        "<|channel|>analysis<|message|>",
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>",
        "<|start|>assistant<|message|>",
        "<|end|>",
        "<|call|>",
        "{",
        "}",
    ],
    "deepseek_v3": [CALLS, CALLS_END, CALL, CALL_END, SEP, "function", "\n```json\n", "```", "{", "}", "add"],
}


@pytest.mark.parametrize("name", PIECES)
@given(data=st.data())
def test_no_word_is_ever_lost(name: str, data: st.DataObject) -> None:
    parts: Sequence[str] = data.draw(
        st.lists(st.sampled_from([*PIECES[name], *WORDS, " ", "\n"]), max_size=14), label="parts"
    )
    text = "".join(parts)
    told = "".join(
        one.name if isinstance(one, CallBegin) else getattr(one, "text", "")
        for one in read(parser_of(name), [text])
    )
    assert [word for word in parts if word in WORDS and word not in told] == []


@pytest.mark.parametrize(
    ("prompt_end", "text", "expected"),
    [
        ("<|end|><|start|>assistant", "<|channel|>final<|message|>a", [Text("a")]),
        ("<|end|><|start|>assistant<|channel|>analysis<|message|>", "a<|end|>", [Reasoning("a")]),
        ("<|start|>assistant<|channel|>final<|message|>The", " end", [Text(" end")]),
        ("<|start|>assistant<|channel|>ana", "lysis<|message|>a", [Reasoning("a")]),
        ("in the midst of a text", " to=functions.now a", [Text(" to=functions.now a")]),
    ],
)
def test_harmony_goes_on_where_the_prompt_ends(prompt_end: str, text: str, expected: list[Segment]) -> None:
    assert read(parser_of("openai", prompt_end=prompt_end), text) == expected


def test_harmony_without_tools_reads_thoughts_and_no_calls() -> None:
    text = "<|channel|>analysis<|message|>a<|end|><|channel|>commentary to=functions.now<|message|>{}"
    assert read(parser_of("openai", tools=()), text) == [Reasoning("a\n\n{}")]


def test_arguments_come_before_the_call_is_complete() -> None:
    for name, text in (
        ("llama3_json", '{"name": "add", "parameters": {"a": "xy'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": "xy'),
        ("pythonic", "[add(a='xy"),
        ("openai", '<|channel|>commentary to=functions.add<|message|>{"a": "xy'),
        ("deepseek_v3", f'{CALL}add{SEP}{{"a": "xy'),
    ):
        parser = parser_of(name)
        given = "".join(one.text for one in parser.feed(text) if isinstance(one, CallArguments))
        assert given == '{"a": "xy'


def test_python_arguments_become_json() -> None:
    whole = [segments for title, (_, segments) in PYTHONIC.items() if "cut" not in title]
    for segment in itertools.chain.from_iterable(whole):
        if isinstance(segment, CallArguments):
            json.loads(segment.text)
