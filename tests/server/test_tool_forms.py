"""The tool dialects' forms as grammars, with their markers as special tokens and as plain text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tokenizers
from answer_segments import call, parser_of, read
from tokenizers import decoders, models, pre_tokenizers

from artesian.engine.codec import Codec, Tool
from artesian.engine.codec.dialects import Dialect
from artesian.engine.codec.tools import TOOL_DIALECTS, ToolDialect
from artesian.engine.grammar import Grammar
from artesian.engine.grammar.compiler import GrammarCompiler
from artesian.server.api.tool_use import ToolUse

ADD = Tool("add", None, {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
NOW = Tool("now", None, {"type": "object", "properties": {}, "additionalProperties": False})
END = "<eos>"
ROWS = {row.names[0]: row for row in TOOL_DIALECTS if row.forms and not row.forms.members}


class Model:
    """A vocabulary of bytes and markers, and the grammars of a dialect over it."""

    def __init__(self, row: ToolDialect, *, are_special: bool) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {letter: i for i, letter in enumerate(alphabet)}
        hf = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        hf.decoder = decoders.ByteLevel()
        special = [END, *(row.markers if are_special else ())]
        hf.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in special])
        ids = range(len(alphabet), len(alphabet) + len(special))
        ends = tuple(i for i, name in zip(ids, special, strict=True) if name in (END, "<|call|>"))
        self.codec = Codec.build(
            hf,
            bos_token_id=None,
            eos_token_ids=ends,
            add_bos=False,
            add_eos=False,
            special_ids=tuple(ids),
            chat_template=None,
        )
        self.compiler = GrammarCompiler(self.codec.tokenizer, len(alphabet) + len(special), ends)
        self.dialect = Dialect(row, None, are_special)

    def accepts(self, use: ToolUse, text: str) -> bool:
        """Whether the text is a whole answer."""
        asked = use.grammar(self.dialect)
        if asked is None:
            pytest.skip("left free, the model writes its own form")
        shape: Grammar = asked.grammar
        matcher = self.compiler.get(shape).matcher()
        for token in self.codec.tokenizer.encode(text, add_special=False):
            matcher.advance(token)
        return matcher.may_end


@pytest.fixture(
    scope="module", params=[(name, special) for name in ROWS for special in (False, True)], ids=str
)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    name, are_special = request.param
    model = Model(ROWS[name], are_special=are_special)
    yield model
    model.compiler.close()


def written(row: ToolDialect, *calls: tuple[str, str]) -> str:
    assert row.forms is not None
    bodies = [row.forms.begin_of(name) + arguments + row.forms.end for name, arguments in calls]
    return row.forms.opening + row.forms.between.join(bodies) + row.forms.closing


def test_a_call_may_be_required(model: Model) -> None:
    row, use = model.dialect.tools, ToolUse((ADD, NOW), "required")
    assert model.accepts(use, written(row, ("add", '{"a": 1}')))
    assert model.accepts(use, written(row, ("now", "{}"), ("add", '{"a": 1}')))
    assert not model.accepts(use, written(row, ("add", '{"a": "1"}')))
    assert not model.accepts(use, written(row, ("sub", "{}")))
    assert not model.accepts(use, "Hello")
    assert not model.accepts(use, "")


def test_calls_in_free_text_keep_to_their_schema(model: Model) -> None:
    row, use = model.dialect.tools, ToolUse((ADD, NOW))
    assert model.accepts(use, "Hello {x} [y] <z>\n")
    assert model.accepts(use, "So: " + written(row, ("add", '{"a": 1}'), ("now", "{}")) + "\n")
    assert not model.accepts(use, "So: " + written(row, ("add", '{"a": "1"}')))


def test_without_parallel_one_call_is_all(model: Model) -> None:
    row = model.dialect.tools
    two = written(row, ("now", "{}"), ("now", "{}"))
    for choice in ("auto", "required"):
        use = ToolUse((NOW,), choice, parallel=False)
        assert model.accepts(use, written(row, ("now", "{}")))
        assert not model.accepts(use, two)


def test_gpt_oss_thinks_before_it_calls() -> None:
    row = ROWS["openai"]
    model = Model(row, are_special=True)
    head = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
    text = head + written(row, ("add", '{"a": 1}'))
    assert model.accepts(ToolUse((ADD,)), text)
    assert read(parser_of("openai"), text)[1:] == call(0, "add", '{"a": 1}')
    assert not model.accepts(ToolUse((ADD,)), head + written(row, ("add", "{}")))
    model.compiler.close()
