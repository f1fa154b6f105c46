"""DeepSeek's prompts, byte for byte those of its own library, over conversations made at random."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from artesian.engine.codec import Codec, Conversation, Message, TextPart, Tool, ToolCall
from artesian.engine.codec.deepseek import EFFORTS, DeepSeekTemplate, DeepSeekV4, DeepSeekV41
from artesian.engine.codec.dialects import find_dialect
from artesian.engine.codec.segments import CallArguments, CallBegin, Reasoning, Segment, Text
from artesian.engine.codec.tools.dsml import DsmlParser
from artesian.engine.errors import InvalidRequest

recipe = pytest.importorskip("deepseek_recipe", reason="its wheels are for Linux on x86-64")

CONVERSATIONS = 1000
TEXTS = (
    "", "hi", "two\n\nlines", "  x ", "é😀\u2028", "\n", "\\", "$ {0} %s", '{"a": 1}', "</tool_result>",
    "<｜User｜>", "<think>x</think>", "</think>", "<｜DSML｜ calls>", "<｜end▁of▁sentence｜>", "\x00\x7f",
)  # fmt: skip
ARGUMENTS = (
    "{}", "oops", "[1]", "", "null", '{"a": "x<\\"\\n", "b": 1.50}', '{"x\\"y": "</｜DSML｜parameter>"}',
    '{"n": [1, {"é": null}], "t": true, "o": {}}', '{"a": "\\ud800"}', '{"a": NaN}', '{"a": 1e400}',
    '{"a": 1e-5, "b": -1.5e-5, "c": 1e-7, "d": 1e16, "e": -0, "f": 123456789012345678901, "g": 0.0001}',
    '{"a": 1, "b": 2, "a": "3"}', '{"z": {"b": 1.0, "a": [[]]}, "y": "0.1"}', ' {"a": "é\\u00e9\\u0001"} ',
    '{"a":' + "[" * 126 + "]" * 126 + "}", '{"a":' + "[" * 127 + "]" * 127 + "}",
)  # fmt: skip
PARAMETERS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"type": "object"},
    {
        "type": "object",
        "properties": {"a": {"type": "string", "description": 'é "\n'}, "b": {"minimum": 1e-5}},
    },
)
WORDS = (None, "low", "high", "xhigh", "max")
MODELS: list[tuple[DeepSeekTemplate, Any]] = [
    (DeepSeekV4(), recipe.DeepseekV4Encoding()),
    (DeepSeekV41(), recipe.DeepseekV41Encoding()),
]
both = pytest.mark.parametrize("ours", [DeepSeekV4(), DeepSeekV41()])
USER = Message("user", "hi")


class Case:
    """A request made at random. Not `orderly`, results are missing, unknown or between the user's texts."""

    def __init__(self, seed: int, *, orderly: bool) -> None:
        self._random = choose = random.Random(seed)
        self._is_orderly = orderly
        messages = [
            Message(choose.choice(("system", "developer")), self._text()) for _ in range(choose.randrange(3))
        ]
        for _ in range(choose.randint(1, 4)):
            messages += [Message("user", self._content()) for _ in range(choose.choice((1, 1, 2)))]
            if choose.random() < 0.2:
                messages.append(Message("system", self._text()))
            for _ in range(choose.randrange(3)):
                messages += self._turn()
        tools = tuple(
            Tool(name, choose.choice((None, self._text())), choose.choice(PARAMETERS))
            for name in choose.sample("fgh", choose.randrange(4))
        )
        self.conversation = Conversation(tuple(messages), tools, choose.choice(("auto", "auto", "none")))
        self.thinks = choose.random() < 0.6
        self.effort = choose.choice(WORDS)
        last = messages[-1]
        self.continues = (
            orderly and last.role == "assistant" and not last.tool_calls and choose.random() < 0.7
        )

    def _text(self) -> str:
        return self._random.choice(TEXTS)

    def _content(self) -> str | tuple[TextPart, ...]:
        if self._random.random() < 0.8:
            return self._text()
        return tuple(TextPart(self._text()) for _ in range(self._random.randrange(3)))

    def _turn(self) -> list[Message]:
        choose = self._random
        ids = choose.sample(
            [f"{form}{n}" for form in ("call_0", "", "id") for n in range(12)], choose.choice((0, 1, 3))
        )
        calls = tuple(ToolCall(one, choose.choice("fgh"), choose.choice(ARGUMENTS)) for one in ids)
        reasoning = choose.choice((None, "", self._text()))
        results = [Message("tool", self._content(), tool_call_id=one) for one in choose.sample(ids, len(ids))]
        if not self._is_orderly:
            results = results[choose.randrange(2) :]
            for stray in (Message("tool", "?", tool_call_id="unknown"), Message("user", "?")):
                if choose.random() < 0.3:
                    results.insert(choose.randint(0, len(results)), stray)
        said = choose.choice((None, self._content()))
        return [Message("assistant", said, tool_calls=calls, reasoning=reasoning), *results]

    def rendered(self, template: DeepSeekTemplate) -> str:
        return template.render(
            self.conversation,
            add_generation_prompt=not self.continues,
            continue_final_message=self.continues,
            kwargs={"thinking": self.thinks, "reasoning_effort": self.effort},
        )

    def rendered_by_recipe(self, encoding: Any) -> str:
        messages = [self._recipe_message(message) for message in self.conversation.messages[:-1]]
        messages.append(self._recipe_message(self.conversation.messages[-1], self.continues))
        conversation = recipe.Conversation(
            messages,
            thinking_mode=self.thinks,
            reasoning_effort=self.effort,
            tool_choice=self.conversation.tool_choice,
            tools=[
                recipe.ToolDefinition(tool.name, tool.description, tool.parameters)
                for tool in self.conversation.tools
            ],
        )
        return str(encoding.render_conversation(conversation).prompt)

    def _recipe_message(self, message: Message, continues: bool = False) -> Any:
        # The library's conversations have neither parts nor, in thinking mode, turns without a thought: what
        # it makes of requests that have is tested below.
        content = message.content
        text = "\n\n".join(part.text for part in content) if isinstance(content, tuple) else content or ""
        match message.role:
            case "user":
                return recipe.UserMessage(text)
            case "tool":
                return recipe.ToolMessage(text, message.tool_call_id)
            case "assistant":
                calls = [recipe.ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls]
                reasoning = message.reasoning if message.reasoning is not None or not self.thinks else ""
                return recipe.AssistantMessage(text, reasoning, calls or None, continues)
            case _:
                return recipe.SystemMessage(text)


@pytest.mark.parametrize("orderly", [True, False])
@pytest.mark.parametrize(("ours", "theirs"), MODELS)
def test_a_thousand_prompts_are_those_of_the_library(
    ours: DeepSeekTemplate, theirs: Any, orderly: bool
) -> None:
    for seed in range(CONVERSATIONS):
        case = Case(seed, orderly=orderly)
        assert case.rendered(ours) == case.rendered_by_recipe(theirs), f"seed {seed}"


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(("ours", "theirs"), MODELS)
def test_parts_and_missing_thoughts_are_what_they_are_in_the_librarys_requests(
    ours: DeepSeekTemplate, theirs: Any
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    function = {"name": "f", "description": "F", "parameters": {"type": "object"}}
    body = {
        "model": "DeepSeek-V4-Pro",
        "messages": [
            {"role": "system", "content": parts("a", "b")},
            {"role": "user", "content": parts("a", "", "b\n")},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": parts("c", "d")},
            {"role": "assistant", "content": parts("e", "f")},
            {"role": "user", "content": "g"},
        ],
        "tools": [{"type": "function", "function": function}],
    }
    converted = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())

    def texts(*of: str) -> tuple[TextPart, ...]:
        return tuple(TextPart(text) for text in of)

    conversation = Conversation(
        (
            Message("system", texts("a", "b")),
            Message("user", texts("a", "", "b\n")),
            Message("assistant", None, tool_calls=(ToolCall("1", "f", "{}"),)),
            Message("tool", texts("c", "d"), tool_call_id="1"),
            Message("assistant", texts("e", "f")),
            Message("user", "g"),
        ),
        (Tool("f", "F", {"type": "object"}),),
    )
    assert ours.render(conversation) == theirs.render_conversation(converted.conversation).prompt


@pytest.mark.parametrize("effort", ["none", *EFFORTS])
@pytest.mark.parametrize(("ours", "theirs"), MODELS)
def test_an_effort_means_what_it_means_to_the_library(
    ours: DeepSeekTemplate, theirs: Any, effort: str
) -> None:
    body = {
        "model": "DeepSeek-V4-Pro",
        "messages": [{"role": "user", "content": "hi"}],
        "reasoning_effort": effort,
    }
    converted = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    prompt = ours.render(Conversation((USER,)), kwargs={"reasoning_effort": effort})
    assert prompt == theirs.render_conversation(converted.conversation).prompt


@pytest.mark.parametrize(("ours", "theirs"), MODELS)
def test_a_required_call_begins_in_the_answer_and_not_in_the_prompt(
    ours: DeepSeekTemplate, theirs: Any
) -> None:
    tool = recipe.ToolDefinition("f", None, {"type": "object"})
    asked = recipe.Conversation(
        [recipe.UserMessage("hi")], tools=[tool], tool_choice="required", thinking_mode=False
    )
    conversation = Conversation((USER,), (Tool("f", None, {"type": "object"}),), "required")
    prompt = ours.render(conversation, kwargs={"thinking": False})
    assert theirs.render_conversation(asked).prompt == f"{prompt}\n\n<{ours.dsml.tags.block}>\n"


@both
def test_a_turn_that_was_read_is_written_as_it_was(ours: DeepSeekTemplate) -> None:
    written = [
        ToolCall("", "g", '{"text": "\\"a\\"\\n<b>", "n": [1, {"é": null}], "x": 0.5}'),
        ToolCall("", "f", "{}"),
        ToolCall("", "f", '{"n": 3}'),
    ]
    answer = f"Well\n\nthen.</think>Look: {ours.dsml.calls(written)}"
    conversation = Conversation((USER,), (Tool("f"), Tool("g")))
    prompt = ours.render(conversation)
    parser = DsmlParser(("f", "g"), prompt[-50:])
    segments = parser.feed(answer) + parser.finish()
    begun = [one for one in segments if isinstance(one, CallBegin)]
    turn = Message(
        "assistant",
        "".join(one.text for one in segments if isinstance(one, Text)),
        reasoning="".join(one.text for one in segments if isinstance(one, Reasoning)),
        tool_calls=tuple(ToolCall(call.id, call.name, _arguments(segments, call.index)) for call in begun),
    )
    results = [Message("tool", f"r{call.index}", tool_call_id=call.id) for call in reversed(begun)]
    again = ours.render(Conversation((USER, turn, *results), conversation.tools))
    shown = "\n\n".join(f"<tool_result>r{i}</tool_result>" for i in range(3))
    assert again == f"{prompt}{answer}<｜end▁of▁sentence｜><｜User｜>{shown}<｜Assistant｜><think>"


def _arguments(segments: list[Segment], index: int) -> str:
    return "".join(one.text for one in segments if isinstance(one, CallArguments) and one.index == index)


@both
def test_without_a_generation_prompt_the_turn_is_not_opened(ours: DeepSeekTemplate) -> None:
    conversation = Conversation((USER,))
    assert (
        ours.render(conversation)
        == ours.render(conversation, add_generation_prompt=False) + "<｜Assistant｜><think>"
    )


def test_v41_takes_any_effort_between_1_and_100() -> None:
    assert "Effort: 37 (" in DeepSeekV41().render(Conversation((USER,)), kwargs={"reasoning_effort": 37})


@both
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("thinking", "yes"),
        ("enable_thinking", 1),
        ("reasoning_effort", "most"),
        ("reasoning_effort", 0),
        ("reasoning_effort", 101),
        ("reasoning_effort", True),
        ("reasoning_effort", ["low"]),
    ],
)
def test_a_bad_argument_is_named(ours: DeepSeekTemplate, name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ours.render(Conversation((USER,)), kwargs={name: value})
    assert caught.value.param == f"chat_template_kwargs.{name}"


@both
@pytest.mark.parametrize(("last", "generates"), [("assistant", True), ("user", False)])
def test_what_cannot_be_continued_is_refused(ours: DeepSeekTemplate, last: str, generates: bool) -> None:
    with pytest.raises(InvalidRequest):
        ours.render(
            Conversation((USER, Message(last, "x"))),
            add_generation_prompt=generates,
            continue_final_message=True,
        )


@both
def test_a_schema_that_is_too_deep_is_named(ours: DeepSeekTemplate) -> None:
    schema: dict[str, Any] = {}
    for _ in range(127):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest) as caught:
        ours.render(Conversation((USER,), (Tool("f"), Tool("g", None, schema))))
    assert caught.value.param == "tools[1].parameters"


def codec_with(*names: str, chat_template: str | None = None) -> Codec:
    hf = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens([*names])
    return Codec.build(
        hf,
        bos_token_id=None,
        eos_token_ids=(),
        add_bos=False,
        add_eos=False,
        special_ids=[*hf.get_added_tokens_decoder()],
        chat_template=chat_template,
    )


V4_TOKENS = ("<｜User｜>", "<｜Assistant｜>", "｜DSML｜", "<｜latest_reminder｜>")


@pytest.mark.parametrize(
    ("names", "kind", "dialect"),
    [
        (V4_TOKENS, DeepSeekV4, "deepseek_v4"),
        ((*V4_TOKENS, "<｜System｜>"), DeepSeekV41, "deepseek_v41"),
    ],
)
def test_the_vocabulary_tells_the_model(
    names: tuple[str, ...], kind: type[DeepSeekTemplate], dialect: str
) -> None:
    codec = codec_with(*names)
    assert type(codec.template) is kind
    found = find_dialect(codec.template.source, codec.tokenizer)
    assert dialect in found.tools.names
    assert found.keeps_special


def test_a_model_that_brings_a_template_keeps_it() -> None:
    codec = codec_with(*V4_TOKENS, chat_template="{{ messages[0].content }}")
    assert codec.render_chat(Conversation((USER,))) == "hi"


def test_it_is_told_how_much_to_think() -> None:
    template = codec_with(*V4_TOKENS).template
    assert template is not None
    read = [name for name in ("thinking", "enable_thinking", "reasoning_effort", "x") if template.reads(name)]
    assert read == ["thinking", "enable_thinking", "reasoning_effort"]


def test_an_older_vocabulary_has_no_prompts() -> None:
    assert codec_with(*V4_TOKENS[:3]).template is None
