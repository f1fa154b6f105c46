"""Tools in `/v1/chat/completions`: streams and whole answers tell the same calls, ends, thoughts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from http_server import client_of, scripted_app
from scripted_engine import Script, ScriptedEngine, toy_codec

from artesian.engine.grammar import JsonSchema, Tags, Thoughtful

URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
UNIQUE = {"type": "array", "uniqueItems": True}
SHELL = {"type": "custom", "custom": {"name": "shell", "description": "Runs it"}}
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not "
    "enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def tool_of(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}


def allowed_tools(*names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ONE = call("weather", '{"city": "Köln"}')
TWO = f"Let me look.\n{ONE}\n{call('clock', '{}')}"


class Scene:
    """A client of a scripted model; `template` is the model's own."""

    def __init__(self, engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
        self.engine, self.client = engine, client

    async def whole(self, script: Script | None = None, **fields: Any) -> dict[str, Any]:
        self.engine.script = script or self.engine.script
        answer = await self.client.post(URL, json={"messages": HELLO, "max_tokens": 500, **fields})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def chunks(self, script: Script | None = None, **fields: Any) -> list[dict[str, Any]]:
        self.engine.script = script or self.engine.script
        body = {"messages": HELLO, "max_tokens": 500, "stream": True, **fields}
        answer = await self.client.post(URL, json=body)
        assert answer.status_code == 200, answer.text
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    async def error(self, **fields: Any) -> dict[str, Any]:
        answer = await self.client.post(URL, json={"messages": HELLO, **fields})
        assert answer.status_code == 400, answer.text
        found: dict[str, Any] = answer.json()["error"]
        return found

    @property
    def prompt(self) -> str:
        return self.engine.codec.detokenize(self.engine.requests[-1].prompt)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    engine = ScriptedEngine(toy_codec(), max_model_len=4000)
    app, _ = scripted_app(engine)
    async with client_of(app) as client:
        yield Scene(engine, client)


@pytest.fixture
async def thinking() -> AsyncIterator[Scene]:
    engine = ScriptedEngine(toy_codec(chat_template=THINKING), max_model_len=4000)
    app, _ = scripted_app(engine)
    async with client_of(app) as client:
        yield Scene(engine, client)


def merged(chunks: Sequence[dict[str, Any]], choice: int = 0) -> dict[str, Any]:
    """A choice's message and end, as a client puts its chunks together."""
    message: dict[str, Any] = {"content": None}
    ends: list[str] = []
    for chunk in chunks:
        for found in chunk["choices"]:
            if found["index"] != choice:
                continue
            delta = found["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name) is not None:
                    message[name] = (message.get(name) or "") + delta[name]
            for piece in delta.get("tool_calls", ()):
                _merge_call(message.setdefault("tool_calls", []), piece)
            if found["finish_reason"] is not None:
                ends.append(found["finish_reason"])
    assert len(ends) == 1
    return {**message, "end": ends[0]}


def _merge_call(calls: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    if piece["index"] == len(calls):
        assert piece["id"] and piece["type"] in ("function", "custom")
        inner = piece[piece["type"]]
        assert inner["name"] and inner[_text_of(piece["type"])] == ""
        calls.append({"id": piece["id"], "type": piece["type"], piece["type"]: dict(inner)})
        return
    assert piece["index"] == len(calls) - 1 and not {"id", "type"} & piece.keys()
    open_call = calls[-1]
    text = _text_of(open_call["type"])
    assert piece[open_call["type"]].keys() == {text}
    open_call[open_call["type"]][text] += piece[open_call["type"]][text]


def _text_of(kind: str) -> str:
    return "arguments" if kind == "function" else "input"


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**made, "id": ""} for made in message.get("tool_calls", ())]
    named = ("content", "reasoning_content")
    return {**{name: message[name] for name in named if name in message}, "calls": calls}


@pytest.mark.parametrize("tokens_per_step", [1, 7, 1000])
async def test_a_stream_tells_the_calls_that_the_whole_answer_tells(
    scene: Scene, tokens_per_step: int
) -> None:
    script = Script(text=TWO, tokens_per_step=tokens_per_step)
    chosen = (await scene.whole(script, tools=[WEATHER, CLOCK]))["choices"][0]
    message = chosen["message"]
    streamed = merged(await scene.chunks(script, tools=[WEATHER, CLOCK]))
    assert without_ids(streamed) == without_ids(message)
    assert streamed["end"] == chosen["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me look."
    weather, clock = message["tool_calls"]
    assert weather["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert clock["function"] == {"name": "clock", "arguments": "{}"}
    ids = [made["id"] for made in (weather, clock, *streamed["tool_calls"])]
    assert len(set(ids)) == 4 and all(one.startswith("call_") for one in ids)


async def test_text_before_calls_and_none_at_all(scene: Scene) -> None:
    answer = await scene.whole(Script(text=ONE), tools=[WEATHER])
    assert answer["choices"][0]["message"]["content"] is None
    chunks = await scene.chunks(tools=[WEATHER])
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert merged(chunks)["content"] is None
    text = await scene.chunks(Script(text="Just text"), tools=[WEATHER])
    assert text[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("finish_reason" in choice for chunk in text for choice in chunk["choices"])
    assert merged(text) == {"content": "Just text", "end": "stop"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "choice", "max_tokens", "end"),
    [
        (ONE, "auto", 500, "tool_calls"),
        ("No need.", "auto", 500, "stop"),
        (ONE, "required", 500, "tool_calls"),
        (ONE, {"type": "function", "function": {"name": "weather"}}, 500, "stop"),
        (ONE, "required", 60, "length"),
        (ONE, "auto", 12, "length"),
        (ONE, "none", 500, "stop"),
    ],
)
async def test_why_an_answer_ended(
    scene: Scene, stream: bool, text: str, choice: Any, max_tokens: int, end: str
) -> None:
    fields = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": max_tokens}
    script = Script(text=text)
    if stream:
        assert merged(await scene.chunks(script, **fields))["end"] == end
    else:
        assert (await scene.whole(script, **fields))["choices"][0]["finish_reason"] == end


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "stop", "end"),
    [
        (ONE, "Köln", "stop"),
        (ONE[:50], None, "stop"),
        (ONE[:40], None, "stop"),
        (f"{ONE}{ONE[:50]}", None, "stop"),
        (ONE, "</tool_call>", "tool_calls"),
        (TWO, "</tool_call>", "tool_calls"),
    ],
)
async def test_a_call_that_was_broken_off_is_none_to_act_on(
    scene: Scene, stream: bool, text: str, stop: str | None, end: str
) -> None:
    fields = {"tools": [WEATHER, CLOCK], "stop": stop}
    script = Script(text=text)
    if stream:
        found = merged(await scene.chunks(script, **fields))
        assert found["tool_calls"] and found["end"] == end
    else:
        chosen = (await scene.whole(script, **fields))["choices"][0]
        assert chosen["message"]["tool_calls"] and chosen["finish_reason"] == end


async def test_with_choice_none_tools_are_not_told_and_calls_are_text(scene: Scene) -> None:
    answer = await scene.whole(Script(text=ONE), tools=[WEATHER], tool_choice="none")
    assert answer["choices"][0]["message"]["content"] == ONE
    assert "tool_calls" not in answer["choices"][0]["message"] and "weather" not in scene.prompt
    assert scene.engine.requests[-1].grammar is None


async def test_each_choice_has_its_own_calls(scene: Scene) -> None:
    script = Script(text=[ONE, "Text.", TWO])
    answer = await scene.whole(script, tools=[WEATHER, CLOCK], n=3)
    chunks = await scene.chunks(script, tools=[WEATHER, CLOCK], n=3)
    for index, count in enumerate((1, 0, 2)):
        chosen = answer["choices"][index]
        assert len(chosen["message"].get("tool_calls", ())) == count
        streamed = merged(chunks, index)
        assert without_ids(streamed) == without_ids(chosen["message"])
        assert streamed["end"] == chosen["finish_reason"]


async def test_custom_tools_take_text(scene: Scene) -> None:
    script = Script(text=call("shell", '{"input": "ls \\"a b\\"\\n"}'))
    made = (await scene.whole(script, tools=[SHELL, WEATHER]))["choices"][0]["message"]["tool_calls"]
    assert [one["type"] for one in made] == ["custom"]
    assert made[0]["custom"] == {"name": "shell", "input": 'ls "a b"\n'}
    streamed = merged(await scene.chunks(script, tools=[SHELL, WEATHER]))["tool_calls"]
    assert streamed[0]["custom"] == made[0]["custom"]
    history = [*HELLO, {"role": "assistant", "tool_calls": made}]
    history.append({"role": "tool", "tool_call_id": made[0]["id"], "content": "a b"})
    await scene.whole(Script(text="Done."), messages=history, tools=[SHELL])
    assert '{"name": "shell", "arguments": {"input":"ls \\"a b\\"\\n"}}' in scene.prompt


async def test_a_custom_tool_is_held_to_a_regex_but_not_to_a_lark_grammar(scene: Scene) -> None:
    def tool(syntax: str, definition: str) -> dict[str, Any]:
        grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
        return {"type": "custom", "custom": {"name": syntax, "format": grammar}}

    answer = await scene.whole(Script(text="x"), tools=[tool("regex", "[ab]+"), tool("lark", 'start: "a"')])
    assert answer["warnings"] == ["tools[1].custom.format is not enforced: only text and regexes are"]
    grammar = scene.engine.requests[-1].grammar
    assert isinstance(grammar, Tags) and "^(?:[ab]+)$" in str(grammar.tags[0].schema)
    assert (await scene.error(tools=[tool("xml", "")]))["param"] == "tools[0].custom.format"


@pytest.mark.parametrize("content", ["absent", None, "", []])
@pytest.mark.parametrize("result", ["sunny", [{"type": "text", "text": "sunny"}]])
async def test_a_history_with_calls_is_understood(scene: Scene, content: Any, result: Any) -> None:
    made = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"B"}'}}
    assistant: dict[str, Any] = {"role": "assistant", "tool_calls": [made]}
    if content != "absent":
        assistant["content"] = content
    messages = [*HELLO, assistant, {"role": "tool", "tool_call_id": "c1", "content": result}]
    await scene.whole(Script(text="Fine."), messages=messages, tools=[WEATHER])
    assert call("weather", '{"city":"B"}') in scene.prompt and "sunny" in scene.prompt


async def test_thoughts_are_told_apart_in_both_modes(thinking: Scene) -> None:
    script = Script(text=f"<think>Hm, rain?</think>\n\nI look.\n{ONE}")
    answer = await thinking.whole(script, tools=[WEATHER])
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, rain?", "I look.")
    details = answer["usage"]["completion_tokens_details"]
    assert 8 < details["reasoning_tokens"] < 40
    chunks = await thinking.chunks(script, tools=[WEATHER], stream_options={"include_usage": True})
    assert without_ids(merged(chunks)) == without_ids(message)
    assert chunks[-1]["usage"]["completion_tokens_details"] == details
    assert next(iter(chunks[1]["choices"][0]["delta"])) == "reasoning_content"


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
        {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
    ],
)
async def test_no_thought_where_thinking_is_off(thinking: Scene, fields: dict[str, Any]) -> None:
    script = Script(text="All of it is the answer.")
    answer = await thinking.whole(script, **fields)
    assert answer["choices"][0]["message"]["content"] == "All of it is the answer."
    assert merged(await thinking.chunks(script, **fields)) == {
        "content": "All of it is the answer.",
        "end": "stop",
    }


FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": CITY, "strict": True}}


async def test_a_thought_stands_before_what_a_grammar_holds(thinking: Scene) -> None:
    for fields in ({"response_format": FORMAT}, {"tools": [WEATHER], "tool_choice": "required"}):
        await thinking.whole(Script(text="<think>Hm.</think>\n{}"), **fields)
        grammar = thinking.engine.requests[-1].grammar
        assert isinstance(grammar, Thoughtful) and (grammar.open, grammar.close) == ("<think>", "</think>")
        await thinking.whole(Script(text="{}"), reasoning_effort="none", **fields)
        assert isinstance(thinking.engine.requests[-1].grammar, JsonSchema | Tags)


async def test_a_thought_that_the_prompt_opens_is_only_closed() -> None:
    engine = ScriptedEngine(
        toy_codec(chat_template=THINKING.replace("assistant\n", "assistant\n<think>\n", 1))
    )
    app, _ = scripted_app(engine)
    async with client_of(app) as client:
        scene = Scene(engine, client)
        answer = await scene.whole(Script(text='Hm.</think>\n{"city": "B"}'), response_format=FORMAT)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", '{"city": "B"}')
    grammar = engine.requests[-1].grammar
    assert isinstance(grammar, Thoughtful) and not grammar.open


async def test_an_answer_is_calls_or_text_of_its_schema(scene: Scene) -> None:
    answer = await scene.whole(Script(text='{"city": "B"}'), tools=[WEATHER], response_format=FORMAT)
    grammar = scene.engine.requests[-1].grammar
    assert isinstance(grammar, Tags) and grammar.text == JsonSchema(CITY) and "warnings" not in answer
    await scene.whole(Script(text=ONE), tools=[WEATHER], response_format=FORMAT, tool_choice="required")
    grammar = scene.engine.requests[-1].grammar
    assert isinstance(grammar, Tags) and grammar.text is None


async def test_a_form_binds_alone_where_calls_have_no_grammar() -> None:
    engine = ScriptedEngine(toy_codec(), Script(text='{"city": "B"}'), max_model_len=4000)
    app, _ = scripted_app(engine, tool_call_parser="pythonic")
    async with client_of(app) as client:
        answer = await Scene(engine, client).whole(tools=[WEATHER], response_format=FORMAT)
    assert "`tools` are not called" in answer["warnings"][0]
    assert engine.requests[-1].grammar == JsonSchema(CITY)


@pytest.mark.parametrize("name", ["reasoning_effort", "thinking"])
async def test_a_model_that_heeds_no_effort_says_so(scene: Scene, thinking: Scene, name: str) -> None:
    fields = {name: "low" if name == "reasoning_effort" else {"type": "enabled"}}
    assert (await scene.whole(Script(text="x"), **fields))["warnings"] == [f"`{name}` has no effect here"]
    assert "warnings" not in await thinking.whole(Script(text="x"), **fields)
    assert (await scene.error(reasoning_effort="immense"))["param"] == "reasoning_effort"


async def test_logprobs_of_every_token_are_told_whatever_became_of_its_text(scene: Scene) -> None:
    fields = {"tools": [WEATHER], "logprobs": True, "return_token_ids": True}
    answer = await scene.whole(Script(text=ONE), **fields)
    chunks = await scene.chunks(Script(text=ONE), **fields)
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    told = [one["token"] for choice in choices for one in choice["logprobs"]["content"]]
    assert told == [one["token"] for one in answer["choices"][0]["logprobs"]["content"]]
    ids = [token for choice in choices for token in choice["token_ids"]]
    assert ids == answer["choices"][0]["token_ids"] and len(ids) >= len(ONE)


@pytest.mark.parametrize(
    ("choice", "names", "required"),
    [
        ("auto", ["weather", "clock"], False),
        ("required", ["weather", "clock"], True),
        ({"type": "function", "function": {"name": "clock"}}, ["clock"], True),
        (allowed_tools("clock"), ["clock"], True),
    ],
)
async def test_a_grammar_holds_the_answer_to_the_choice(
    scene: Scene, choice: Any, names: list[str], required: bool
) -> None:
    await scene.whole(Script(text=ONE), tools=[WEATHER, CLOCK], tool_choice=choice, parallel_tool_calls=False)
    grammar = scene.engine.requests[-1].grammar
    assert isinstance(grammar, Tags) and grammar.required is required and not grammar.parallel
    assert [tag.begin for tag in grammar.tags] == [
        f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in names
    ]


@pytest.mark.parametrize("parameters", ["absent", None, {}, {"type": "object", "properties": {}}])
async def test_a_tool_without_parameters_is_called_with_none(scene: Scene, parameters: Any) -> None:
    function: dict[str, Any] = {"name": "clock"}
    if parameters != "absent":
        function["parameters"] = parameters
    tools = [{"type": "function", "function": function}]
    for written in (call("clock", "{}"), '<tool_call>{"name": "clock"}</tool_call>'):
        streamed = merged(await scene.chunks(Script(text=written), tools=tools))
        assert streamed["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].custom"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": {}}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"function": {}}}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nope"}}},
            "tool_choice",
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [{}]}},
            },
            "tool_choice.allowed_tools.tools[0]",
        ),
        ({"tools": [WEATHER], "tool_choice": allowed_tools()}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": allowed_tools("weather", "nope")}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tools": [CLOCK, tool_of({"type": "string"})]}, "tools[1].function.parameters.type"),
        (
            {"tools": [CLOCK, tool_of({"properties": {"a": UNIQUE}})]},
            "tools[1].function.parameters",
        ),
        ({"messages": [{"role": "tool", "tool_call_id": "c", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"id": "c"}]}]},
            "messages[1].tool_calls[0].function",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "c", "function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
    ],
)
async def test_what_cannot_be_offered_is_refused_by_name(
    scene: Scene, fields: dict[str, Any], param: str
) -> None:
    error = await scene.error(**fields)
    assert error["param"].startswith(param) and not scene.engine.requests


async def test_a_fault_in_the_middle_of_a_call_ends_the_stream_with_an_error(scene: Scene) -> None:
    chunks = await scene.chunks(Script(text=ONE, fail_after=50), tools=[WEATHER])
    assert chunks[-1]["error"]["type"] == "server_error"
    assert chunks[-2]["choices"][0]["delta"]["tool_calls"][0]["index"] == 0


async def test_tools_count_where_prompts_are_counted(scene: Scene) -> None:
    body = {"messages": HELLO, "tools": [WEATHER]}
    await scene.whole(Script(text="x"), tools=[WEATHER])
    sent = scene.engine.requests[-1].prompt
    tokens = (await scene.client.post("/tokenize", json=body)).json()["tokens"]
    estimated = (await scene.client.post(f"{URL}/estimate", json=body)).json()
    explained = (await scene.client.post("/v1/caches/explain", json=body)).json()
    assert tokens == list(sent)
    assert estimated["prompt_tokens"] == explained["prompt"]["tokens"] == len(sent)


async def test_a_text_that_goes_on_is_told_in_the_form_of_all_chunks(thinking: Scene) -> None:
    """What stands around it is encoded once; with token ids a chunk is encoded as a whole."""
    text = f'<think>hm "\\ \0</think>so:\n{call("weather", json.dumps({"city": "a" * 20}))}{ONE}'

    async def told(**fields: Any) -> list[str]:
        chunks = await thinking.chunks(Script(text=text), tools=[WEATHER], n=2, **fields)
        forms = []
        for chunk in chunks:
            choice = chunk["choices"][0]
            choice.pop("token_ids", None)
            chunk["id"] = chunk["created"] = ""
            is_begin = "role" in choice["delta"] or "id" in choice["delta"].get("tool_calls", [{}])[0]
            if choice["delta"] and not is_begin:
                forms.append(json.dumps(chunk))
        return forms

    around = await told()

    assert around == await told(return_token_ids=True)
    assert sum('"arguments"' in form for form in around) > 4
    assert sum("reasoning_content" in form for form in around) > 4
