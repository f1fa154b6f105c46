"""Anthropic's `/v1/messages`: by HTTP, and with Anthropic's own client against a real port."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import MessageParam, ToolParam
from http_server import client_of, running_server, scripted_app
from scripted_engine import Script, ScriptedEngine, toy_codec

from artesian.engine.grammar import Tags

URL = "/v1/messages"
WEATHER: ToolParam = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
HELLO: list[MessageParam] = [{"role": "user", "content": "hi"}]


class Scene:
    """A server and its client."""

    def __init__(self, url: str, engine: ScriptedEngine) -> None:
        self.url, self.engine = url, engine
        self.client = anthropic.AsyncAnthropic(base_url=url, api_key="one", max_retries=0)


@pytest.fixture
async def engine() -> ScriptedEngine:
    return ScriptedEngine(toy_codec(), Script(text="Hé 😊!"), max_model_len=2000)


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[httpx.AsyncClient]:
    app, _ = scripted_app(engine)
    async with client_of(app) as client:
        yield client


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    engine = ScriptedEngine(toy_codec(), Script(text="Hé 😊!", prefill_s=0.12), max_model_len=1000)
    app, _ = scripted_app(engine, api_keys=("one",), keep_alive_interval_s=0.05)
    async with running_server(app) as url:
        scene = Scene(url, engine)
        yield scene
        await scene.client.close()


def body_of(**fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "max_tokens": 100, "messages": HELLO, **fields}


async def events_of(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await client.post(URL, json=body_of(stream=True, **fields))
    events = []
    for block in answer.text.strip().split("\n\n"):
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        events.append(event)
    return events


def prompt_text(engine: ScriptedEngine) -> str:
    return engine.codec.detokenize(engine.requests[-1].prompt)


async def test_create_gives_a_message(scene: Scene) -> None:
    message = await scene.client.messages.create(model="scripted", max_tokens=99, messages=HELLO, system="s")
    assert message.content[0].type == "text" and message.content[0].text == "Hé 😊!"
    assert message.stop_reason == "end_turn" and message.id.startswith("msg_")
    usage = message.usage
    assert usage.cache_read_input_tokens == 3
    assert usage.input_tokens + 3 == len(scene.engine.requests[-1].prompt)
    assert message._request_id


async def test_the_stream_helper_builds_the_message_through_pings(scene: Scene) -> None:
    async with scene.client.messages.stream(model="scripted", max_tokens=99, messages=HELLO) as stream:
        texts = [text async for text in stream.text_stream]
        message = await stream.get_final_message()
    assert "".join(texts) == "Hé 😊!" == message.content[0].text  # type: ignore[union-attr]
    assert message.stop_reason == "end_turn"
    assert message.usage.cache_read_input_tokens == 3 and message.usage.output_tokens > 3


async def test_pings_are_events(scene: Scene) -> None:
    async with httpx.AsyncClient(headers={"x-api-key": "one"}) as client:
        answer = await client.post(f"{scene.url}{URL}", json=body_of(stream=True))
    assert 'event: ping\ndata: {"type": "ping"}\n\n' in answer.text
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_a_tool_loop_with_anthropics_client(scene: Scene) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    scene.engine.script = Script(text=f"Let me look.\n{call}", tokens_per_step=3)
    async with scene.client.messages.stream(
        model="scripted", max_tokens=200, messages=HELLO, tools=[WEATHER]
    ) as stream:
        pieces = [event.partial_json async for event in stream if event.type == "input_json"]
        first = await stream.get_final_message()
    assert first.stop_reason == "tool_use" and "".join(pieces) == '{"city": "Köln"}'
    use = first.content[-1]
    assert use.type == "tool_use" and use.input == {"city": "Köln"}
    scene.engine.script = Script(text="Rain.")
    result: MessageParam = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "rain"}],
    }
    second = await scene.client.messages.create(
        model="scripted",
        max_tokens=99,
        tools=[WEATHER],
        messages=[*HELLO, {"role": "assistant", "content": first.content}, result],
    )
    assert second.content[0].type == "text" and second.content[0].text == "Rain."
    assert "Köln" in prompt_text(scene.engine)


async def test_what_others_would_run_is_left_out_with_a_warning(client: httpx.AsyncClient) -> None:
    tools = [WEATHER, {"type": "web_search_20250305", "name": "web_search"}]
    answer = (await client.post(URL, json=body_of(tools=tools))).json()
    assert answer["warnings"] == [
        "tools[1] is not offered: this server runs no tools of type 'web_search_20250305'"
    ]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_a_demanded_tool_is_held_by_a_grammar(
    engine: ScriptedEngine, client: httpx.AsyncClient, choice: dict[str, str]
) -> None:
    fields = body_of(tools=[WEATHER], tool_choice={**choice, "disable_parallel_tool_use": True})
    assert (await client.post(URL, json=fields)).status_code == 200
    grammar = engine.requests[-1].grammar
    assert isinstance(grammar, Tags) and grammar.required and not grammar.parallel


async def test_count_tokens_counts_the_prompt(scene: Scene) -> None:
    counted = await scene.client.messages.count_tokens(model="scripted", messages=HELLO, system="be brief")
    await scene.client.messages.create(model="scripted", max_tokens=9, messages=HELLO, system="be brief")
    assert counted.input_tokens == len(scene.engine.requests[-1].prompt)


async def test_errors_are_raised_as_their_class(scene: Scene) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await scene.client.messages.create(model="nope", max_tokens=9, messages=HELLO)
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError):
        await scene.client.messages.create(model="scripted", max_tokens=5000, messages=HELLO)
    with pytest.raises(anthropic.AuthenticationError):
        await scene.client.with_options(api_key="two").messages.create(
            model="scripted", max_tokens=9, messages=HELLO
        )


async def test_a_full_server_is_overloaded_in_anthropics_words() -> None:
    engine = ScriptedEngine(toy_codec(), Script(endless=True, step_s=0.01), slots=1, queue_limit=0)
    app, _ = scripted_app(engine)
    async with running_server(app) as url, httpx.AsyncClient(base_url=url) as client:
        async with client.stream("POST", URL, json=body_of(stream=True)) as running:
            await running.aiter_lines().__anext__()
            engine.queue_limit = -1
            answer = await client.post(URL, json=body_of())
    assert answer.status_code == 529 and answer.headers["retry-after"]
    assert answer.json()["error"]["type"] == "overloaded_error"


async def test_the_events_come_in_order_and_end_once(client: httpx.AsyncClient) -> None:
    events = await events_of(client)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert events[0]["message"]["stop_reason"] is None
    assert events[-2]["prompt_cache_diagnostics"]["cached_tokens"] == 3


async def test_a_stop_sequence_is_named(client: httpx.AsyncClient) -> None:
    body = (await client.post(URL, json=body_of(stop_sequences=["😊"]))).json()
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "😊")
    assert body["content"][0]["text"] == "Hé "
    cut = (await client.post(URL, json=body_of(max_tokens=1))).json()
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)


async def test_a_tool_use_that_was_broken_off_is_none_to_act_on(
    engine: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    engine.script = Script(text='<tool_call>\n{"name": "weather", "arguments": {"city": "K')
    body = (await client.post(URL, json=body_of(tools=[WEATHER]))).json()
    assert body["content"][0]["input"] == {"_partial": '{"city": "K'}
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)


async def test_a_fault_in_the_middle_is_an_error_event() -> None:
    app, _ = scripted_app(ScriptedEngine(toy_codec(), Script(text="Hello", fail_after=2)))
    async with client_of(app) as client:
        events = await events_of(client)
        whole = await client.post(URL, json=body_of())
    assert events[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "the device is on fire"},
    }
    assert whole.status_code == 500 and whole.json()["type"] == "error"


async def test_an_agents_history_becomes_turns(engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
    answer = await client.post(
        URL,
        json=body_of(
            system=[{"type": "text", "text": "rules"}],
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "ask"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "text", "text": "look"},
                        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t1",
                            "content": [{"type": "text", "text": "fnd"}],
                        },
                        {"type": "text", "text": "and?"},
                    ],
                },
            ],
        ),
    )
    assert answer.status_code == 200, answer.text
    said = prompt_text(engine)
    assert [said.index(part) for part in ("rules", "ask", "look", "fnd", "and?")] == sorted(
        said.index(part) for part in ("rules", "ask", "look", "fnd", "and?")
    )


async def test_a_last_message_of_the_assistant_is_continued(
    engine: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The answer is"}]
    assert (await client.post(URL, json=body_of(messages=messages))).status_code == 200
    assert prompt_text(engine).endswith("The answer is")


async def test_cache_control_sets_what_is_kept_and_how_long(
    engine: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    marked = {"type": "text", "text": "rules " * 9, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    await client.post(URL, json=body_of(system=[marked]))
    policy, prompt = engine.requests[-1].cache, engine.requests[-1].prompt
    assert policy.ttl_s == 3600 and policy.write_tokens is not None
    assert engine.codec.detokenize(prompt[: policy.write_tokens]).endswith("rules <|im_end|>\n")
    await client.post(URL, json=body_of(cache_control={"type": "ephemeral", "ttl": "5m"}))
    assert (engine.requests[-1].cache.ttl_s, engine.requests[-1].cache.write_tokens) == (300, None)
    await client.post(URL, json=body_of())
    assert (engine.requests[-1].cache.ttl_s, engine.requests[-1].cache.write_tokens) == (None, None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "q"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": [""]}, "stop"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ],
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, fields: dict[str, Any], said: str) -> None:
    answer = await client.post(URL, json=body_of(**fields))
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert said in error["error"]["message"]
    assert (await client.post(URL, json=body_of())).status_code == 200


async def test_other_methods_and_paths_answer_in_the_same_form(client: httpx.AsyncClient) -> None:
    assert (await client.get(URL)).json()["type"] == "error"
    assert (await client.get(f"{URL}/nope")).json()["error"]["type"] == "not_found_error"
