"""A thought before an answer that follows a grammar: markers of text and of special tokens, open or not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from scripted_engine import IM_END, VOCAB_SIZE, toy_codec

from artesian.engine.grammar import Choice, Grammar, JsonSchema, Lark, Regex, Tag, Tags, Thoughtful
from artesian.engine.grammar.compiler import GrammarCompiler

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "maxProperties": 1}
CALL = Tag("<a>", {"const": 1}, "</a>")
INNER: dict[str, tuple[Any, str, str]] = {
    "schema": (JsonSchema(NUMBER), '{"n": 1}', '{"n": "1"}'),
    "regex": (Regex("[0-9]{3}"), "123", "12a"),
    "choice": (Choice(("yes", "no")), "no", "nay"),
    "lark": (Lark('start: "a" x | "b"\nx: "c"+'), "acc", "a"),
    "calls": (Tags(tags=(CALL,), triggers=("<a>",), required=True), "<a>1</a><a>1</a>", "b"),
    "calls or text": (Tags(tags=(CALL,), triggers=("<a>",), text=Regex("[xy]+")), "xy", "x<a>1</a>"),
    "calls in free text": (Tags(tags=(CALL,), triggers=("<a>",)), "well <a>1</a>", "well <a>2"),
}
CLOSE = ["</think>", "<|im_start|>", "\n</t>\n"]


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(toy_codec().tokenizer, VOCAB_SIZE, (IM_END,))
    yield compiler
    compiler.close()


def accepts(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    matcher = compiler.get(grammar).matcher()
    for token in toy_codec().tokenizer.encode(text, add_special=False, parse_special=True):
        matcher.advance(token)
    return matcher.may_end


@pytest.mark.parametrize("close", CLOSE)
@pytest.mark.parametrize("kind", INNER)
def test_a_thought_is_any_text_and_the_answer_follows_its_grammar(
    compiler: GrammarCompiler, kind: str, close: str
) -> None:
    inner, good, bad = INNER[kind]
    opened, optional = Thoughtful(close, inner), Thoughtful(close, inner, "<think>")
    for thought in ("", "Hm { <a> \n\n", "né " * 40):
        assert accepts(compiler, opened, f"{thought}{close}\n{good}")
        if kind == "calls in free text":
            thought = thought.replace("<a>", "")
        assert accepts(compiler, optional, f"<think>{thought}{close}{good}")
        assert not accepts(compiler, opened, f"{thought}{close}{bad}")
    assert accepts(compiler, optional, good)
    assert not accepts(compiler, opened, good)
    if kind != "calls in free text":
        assert not accepts(compiler, optional, f"<think>{good}")


def walk(compiler: GrammarCompiler, grammar: Grammar, seed: int, room: int) -> tuple[str, bool]:
    """An answer of tokens drawn evenly from the masks, and whether it came to its end."""
    chance, matcher = random.Random(seed), compiler.get(grammar).matcher()
    row, taken = np.zeros(-(-VOCAB_SIZE // 32), np.uint32), []
    while room and not matcher.is_complete:
        matcher.fill(row, room)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        token = chance.choice(np.flatnonzero(bits).tolist())
        assert matcher.error is None
        if token == IM_END:
            break
        matcher.advance(token)
        taken.append(token)
        room -= 1
    return toy_codec().detokenize(taken), matcher.may_end


@pytest.mark.parametrize("opening", ["", "<think>"])
@pytest.mark.parametrize("close", CLOSE)
@pytest.mark.parametrize("kind", ["schema", "choice", "calls", "calls or text"])
def test_near_the_limit_a_thought_is_closed_and_answered(
    compiler: GrammarCompiler, kind: str, close: str, opening: str
) -> None:
    grammar = Thoughtful(close, INNER[kind][0], opening)
    for seed in range(6):
        text, is_whole = walk(compiler, grammar, seed, 120)
        assert is_whole and (close in text or opening), text
        if close in text:
            answer = text.partition(close)[2].lstrip(" \t\r\n")
            assert accepts(compiler, INNER[kind][0], answer), text


def test_a_thought_before_free_text_is_cut_as_that_is(compiler: GrammarCompiler) -> None:
    text, is_whole = walk(compiler, Thoughtful("</think>", INNER["calls in free text"][0]), 1, 60)
    assert not is_whole and "</think>" not in text


def test_tokens_of_a_thought_can_be_taken_back(compiler: GrammarCompiler) -> None:
    matcher = compiler.get(Thoughtful("</t>", Choice(("yes",)))).matcher()
    for token in b"hm</t>ye":
        matcher.advance(token)
    matcher.rollback(4)
    for token in b">y":
        matcher.advance(token)
    assert matcher.error is None
    matcher.rollback(4)
    for token in b"t></t>yes":
        matcher.advance(token)
    assert matcher.is_complete
