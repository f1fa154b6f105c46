"""DSML answers: what DeepSeek's own library reads in them, however they are cut."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from artesian.engine.codec.segments import CallArguments, CallBegin, CallEnd, Reasoning, Segment, Text
from artesian.engine.codec.tools import TOOL_DIALECTS
from artesian.engine.codec.tools.dsml import V4, V41, DsmlParser, Tags

recipe = pytest.importorskip("deepseek_recipe", reason="its wheels are for Linux on x86-64")

ANSWERS = 1000
NAMES = ("f", "get_weather")
THINKING, PLAIN = "<｜Assistant｜><think>", "<｜Assistant｜></think>"


@dataclass
class Read:
    """An answer as it is put together."""

    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)


def read(text: str | Iterable[str], prompt_end: str = PLAIN, names: tuple[str, ...] = NAMES) -> Read:
    parser = DsmlParser(names, prompt_end)
    answer = Read()
    ended = 0
    segments = [one for piece in ([text] if isinstance(text, str) else text) for one in parser.feed(piece)]
    for segment in [*segments, *parser.finish()]:
        match segment:
            case Reasoning(piece):
                assert not answer.content and not answer.calls
                answer.reasoning += piece
            case Text(piece):
                answer.content += piece
            case CallBegin(index, _, name):
                assert index == len(answer.calls) == ended
                answer.calls.append([name, ""])
            case CallArguments(index, piece):
                answer.calls[index][1] += piece
            case CallEnd(index):
                assert index == ended
                ended += 1
    assert ended == len(answer.calls)
    return answer


def read_by_recipe(text: str, prompt_end: str) -> Read:
    body = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "x"}]}
    request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    generator = recipe.ChatCompletionRequest.chunk_generator(request, "id", "m")
    stage = recipe.ThinkingInitialStage.ReasoningStart if prompt_end == THINKING else None
    stream = recipe.StreamProcessor(generator, recipe.ParsingOptions(thinking_initial_stage=stage))
    chunks = stream.push(recipe.InferenceChunk.ready()) + stream.push(recipe.InferenceChunk.text(text, 1))
    answer = Read()
    for chunk in chunks + ([] if stream.finished else stream.finish()):
        for choice in json.loads(chunk.to_json())["choices"]:
            delta: dict[str, Any] = choice["delta"]
            answer.reasoning += delta.get("reasoning_content") or ""
            answer.content += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                if call["index"] == len(answer.calls):
                    answer.calls.append([call["function"]["name"], ""])
                answer.calls[call["index"]][1] += call["function"].get("arguments") or ""
    return answer


def call(tags: Tags, name: str, *parameters: tuple[str, str, str]) -> str:
    written = "".join(
        f'<{tags.parameter} name="{key}" string="{kind}">{value}</{tags.parameter}>\n'
        for key, kind, value in parameters
    )
    return f'<{tags.invoke} name="{name}">\n{written}</{tags.invoke}>\n'


def block(tags: Tags, *calls: str) -> str:
    return f"\n\n<{tags.block}>\n{''.join(calls)}</{tags.block}>"


WORDS = (
    "so ", "é😀", "\n", "\n\n", " ", "<", "</", "<think", "<b>", "｜", "|", "\t", '"', "\\", "{", "\u2028",
    "DSML", ">",
)  # fmt: skip
STRINGS = (*WORDS, "</think>", "<think>", "<｜DSML｜ foo>", "\x00\x1f\x7f", "</｜", '">', "\r\n", '{"a": 1}')
VALUES = ("1", "-1.5e3", "true", "null", '{"k": [1, {"é": "\\n<"}]}', "[]", ' {"a":\n1} ', '"text"')


def answer_at_random(seed: int) -> tuple[str, str]:
    """What a model may write, and the end of the prompt."""
    choose = random.Random(seed)

    def words(of: tuple[str, ...], most: int) -> str:
        return "".join(choose.choices(of, k=choose.randint(0, most)))

    def text_before_a_marker() -> str:
        # The library forgets to take the newlines behind what could begin a marker for the marker's.
        return re.sub(r"(<\S*)(?=\n*$)", r"\1.", words(WORDS, 6))

    tags = choose.choice((V4, V41))
    prompt_end = choose.choice((THINKING, PLAIN))
    text = text_before_a_marker() + "</think>" if prompt_end == THINKING else ""
    text += choose.choice(("", "\n", "\n\n")) + text_before_a_marker()
    calls = [
        call(
            tags,
            choose.choice(NAMES),
            *(
                (name, "true", words(STRINGS, 5))
                if choose.random() < 0.6
                else (name, "false", choose.choice(VALUES))
                for name in choose.sample(("a", "é", "b_1", "x>y", "the-city"), choose.randrange(4))
            ),
        )
        for _ in range(choose.choice((0, 1, 1, 2, 3)))
    ]
    return text + (block(tags, *calls) if calls else ""), prompt_end


ANSWERS_AT_RANDOM = [answer_at_random(seed) for seed in range(ANSWERS)]


def test_a_thousand_answers_are_read_as_the_library_reads_them() -> None:
    for text, prompt_end in ANSWERS_AT_RANDOM:
        assert read(text, prompt_end) == read_by_recipe(text, prompt_end), (text, prompt_end)


def test_they_are_read_the_same_however_they_are_cut() -> None:
    choose = random.Random(0)
    for text, prompt_end in ANSWERS_AT_RANDOM:
        whole = read(text, prompt_end)
        assert read(list(text), prompt_end) == whole
        cuts = [0, *sorted(choose.choices(range(len(text) + 1), k=len(text) // 4)), len(text)]
        assert read((text[a:b] for a, b in itertools.pairwise(cuts)), prompt_end) == whole


def test_two_cuts_anywhere_change_nothing() -> None:
    text = "hm\n</think>\nSo <" + block(V41, call(V41, "f", ("a", "true", "x</｜<"), ("b", "false", "[1]")))
    whole = read(text, THINKING)
    assert whole == Read("hm", "So <", [["f", '{"a": "x</｜<", "b": [1]}']])
    for a, b in itertools.combinations(range(len(text) + 1), 2):
        assert read([text[:a], text[a:b], text[b:]], THINKING) == whole


def test_truncated_answers_are_a_beginning_of_the_whole() -> None:
    for text, prompt_end in ANSWERS_AT_RANDOM[:60]:
        whole = read(text, prompt_end)
        for end in range(len(text)):
            part = read(text[:end], prompt_end)
            for (name, arguments), (of_name, of_arguments) in zip(part.calls, whole.calls, strict=False):
                assert name == of_name
                assert arguments == "{}" or of_arguments.startswith(_without_marker(arguments))
            assert len(part.calls) <= len(whole.calls)


def test_a_call_that_the_answer_leaves_open_is_not_whole() -> None:
    text = call(V41, "f", ("a", "true", "1"))
    whole: list[int] = []
    for end in range(text.index(">") + 1, len(text) + 1):
        parser = DsmlParser(NAMES, PLAIN)
        (ends,) = [one for one in parser.feed(text[:end]) + parser.finish() if isinstance(one, CallEnd)]
        whole += [end] * ends.is_whole
    assert whole == list(range(whole[0], len(text) + 1)) and whole[0] > text.rindex("</")


def _without_marker(arguments: str) -> str:
    """A marker that was cut stands at the end as a value's text."""
    return arguments.partition("</")[0].removesuffix("<")


ARGUMENTS = '{"a": "1"}'
ODD: list[tuple[str, Read]] = [
    # A thought that is not closed ends with a call.
    ("t\n" + block(V41, call(V41, "f", ("a", "true", "1"))), Read("t", "", [["f", ARGUMENTS]])),
    # White space, other things between the tags, and missing ends do not matter.
    ("</think>" + block(V4, "x", call(V4, "f", ("a", "true", "1"))), Read("", "x", [["f", ARGUMENTS]])),
    (f"</think>{call(V4, 'f', ('a', 'true', '1'))}", Read("", "", [["f", ARGUMENTS]])),
    (
        f'</think><{V4.block}><{V4.invoke} name="f"> - <{V4.parameter} name="a" string="true">1</{V4.block}>',
        Read("", "", [["f", ARGUMENTS]]),
    ),
    (
        f'</think><{V4.invoke} name="f"><{V4.invoke} name="f"></{V4.invoke}>',
        Read("", "", [["f", "{}"], ["f", "{}"]]),
    ),
    # What the library writes as it is, and would be no JSON.
    ("</think>" + call(V41, "f", ('a"\\', "true", "1")), Read("", "", [["f", '{"a\\"\\\\": "1"}']])),
    # What the library cuts off: a name from its space on.
    ("</think>" + call(V41, "f", ("the city", "false", "1")), Read("", "", [["f", '{"the city": 1}']])),
    # What the library drops: text behind calls, and markers without a call.
    ("</think>" + block(V41, call(V41, "f")) + "\nAnd?", Read("", "And?", [["f", "{}"]])),
    ("</think>see <｜DSML｜ foo>", Read("", "see <｜DSML｜ foo>")),
    ("</think>see <｜DSML｜ cal", Read("", "see <｜DSML｜ cal")),
    (f'</think>see <{V41.invoke} name="f', Read("", f'see <{V41.invoke} name="f')),
    (f'</think><{V41.invoke} name="{"f" * 2000}">', Read("", f'<{V41.invoke} name="{"f" * 2000}">')),
    # An attribute that is missing.
    (
        f'</think><{V41.invoke} name="f"><{V41.parameter} name="a">1</{V41.parameter}>',
        Read("", "", [["f", '{"a": "1"']]),
    ),
]


@pytest.mark.parametrize(("text", "expected"), ODD)
def test_what_no_model_should_write_is_read_kindly(text: str, expected: Read) -> None:
    assert read(text, THINKING) == expected
    assert read(list(text), THINKING) == expected


def test_without_tools_calls_are_text() -> None:
    calls = block(V41, call(V41, "f"))
    assert read(f"t{calls}</think>{calls}", THINKING, ()) == Read("t" + calls, calls.strip("\n"))


def test_a_continued_text_keeps_its_newlines() -> None:
    assert read("\n\nmore", "<think>\n\nt</think>So") == Read("", "\n\nmore")
    assert read("\n\nmore</think>x", "<think>I see") == Read("\n\nmore", "x")


def test_arguments_come_as_they_are_written() -> None:
    parser = DsmlParser(NAMES, PLAIN)
    parser.feed(f'<{V4.invoke} name="f">\n<{V4.parameter} name="a" string="true">')
    assert parser.feed('say "hi" <') == [CallArguments(0, 'say \\"hi\\" ')]
    assert parser.feed("b") == [CallArguments(0, "<b")]


def test_ids_sort_as_the_calls_stand() -> None:
    segments: list[Segment] = DsmlParser(NAMES, PLAIN).feed(call(V4, "f") * 12)
    ids = [segment.id for segment in segments if isinstance(segment, CallBegin)]
    assert ids == sorted(ids)
    assert len({one[8:] for one in ids}) == 12


@pytest.mark.parametrize(("name", "tags"), [("deepseek_v4", V4), ("deepseek_v41", V41)])
def test_a_template_shows_which_model_it_is(name: str, tags: Tags) -> None:
    found = next(row for row in TOOL_DIALECTS if row.is_shown_in(f"<{tags.block}>"))
    assert name in found.names
