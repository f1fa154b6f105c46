"""`/v1/responses` by HTTP: bodies, events, stored responses, refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from http_server import client_of, scripted_app
from scripted_engine import Script, ScriptedEngine, toy_codec

from artesian.engine.grammar import Tags

URL = "/v1/responses"


@pytest.fixture
async def engine() -> ScriptedEngine:
    return ScriptedEngine(toy_codec(), Script(text="Hé 😊!"), max_model_len=2000)


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[httpx.AsyncClient]:
    app, _ = scripted_app(engine)
    async with client_of(app) as client:
        yield client


async def create(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(URL, json={"input": "hi", **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def events_of(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await client.post(URL, json={"input": "hi", "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    return read_events(answer.text)


def read_events(text: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for block in text.strip().split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        assert lines[0].startswith("event: ") and lines[1].startswith("data: ") and len(lines) == 2, block
        event = json.loads(lines[1][6:])
        assert event["type"] == lines[0][7:]
        events.append(event)
    return events


def prompt_text(engine: ScriptedEngine, index: int = -1) -> str:
    return engine.codec.detokenize(engine.requests[index].prompt)


async def test_a_whole_answer_is_as_the_document_says(client: httpx.AsyncClient) -> None:
    body = await create(client, instructions="be brief", metadata={"a": "b"}, prompt_cache_key="k")
    assert body["status"] == "completed" and body["completed_at"] >= body["created_at"]
    assert body["output"][0]["content"][0]["text"] == "Hé 😊!"
    assert body["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert body["prompt_cache_diagnostics"]["cached_tokens"] == 3
    assert body["instructions"] == "be brief" and body["metadata"] == {"a": "b"}


async def test_a_stream_has_one_end_and_numbers_without_gaps(client: httpx.AsyncClient) -> None:
    events = await events_of(client)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert kinds.count("response.completed") == 1


async def test_done_events_say_what_the_final_output_holds(client: httpx.AsyncClient) -> None:
    events = await events_of(client)
    final = events[-1]["response"]
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == final["output"]
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert text == final["output"][0]["content"][0]["text"]
    assert {e["item_id"] for e in events if "item_id" in e} == {final["output"][0]["id"]}


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_cut_by_its_limit_is_incomplete(client: httpx.AsyncClient, stream: bool) -> None:
    if stream:
        events = await events_of(client, max_output_tokens=1)
        assert events[-1]["type"] == "response.incomplete"
        body = events[-1]["response"]
    else:
        body = await create(client, max_output_tokens=1)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"


async def test_a_fault_in_the_middle_is_the_one_terminal_event() -> None:
    app, _ = scripted_app(ScriptedEngine(toy_codec(), Script(text="Hello", fail_after=2)))
    async with client_of(app) as client:
        events = await events_of(client)
        whole = await client.post(URL, json={"input": "hi"})
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert "response.output_item.done" in [event["type"] for event in events]
    assert whole.status_code == 500 and whole.json()["error"]["code"] == "request_failed"


async def test_an_empty_answer_has_an_empty_message() -> None:
    app, _ = scripted_app(ScriptedEngine(toy_codec(), Script(text="")))
    async with client_of(app) as client:
        body = await create(client)
        events = await events_of(client)
    assert body["output"][0]["content"][0]["text"] == ""
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


async def test_logprobs_come_with_the_text_they_belong_to(client: httpx.AsyncClient) -> None:
    events = await events_of(client, include=["message.output_text.logprobs"], top_logprobs=2)
    final = events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert sum(len(e["logprobs"]) for e in deltas) <= len(final)
    assert b"".join(bytes(one["bytes"]) for one in final[:-1]).decode() == "Hé 😊!"
    assert len(final[0]["top_logprobs"]) == 2


async def test_a_response_is_continued_by_its_id(engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
    first = await create(client, input="one", instructions="be A")
    second = await create(client, input="two", previous_response_id=first["id"], instructions="be B")
    await create(client, input="three", previous_response_id=second["id"])
    said = prompt_text(engine)
    assert [said.index(part) for part in ("one", "Hé 😊!", "two", "three")] == sorted(
        said.index(part) for part in ("one", "Hé 😊!", "two", "three")
    )
    assert "be A" not in said and "be B" not in said and "be B" in prompt_text(engine, 1)


async def test_a_response_can_be_read_listed_and_deleted(client: httpx.AsyncClient) -> None:
    first = await create(client, input="one")
    second = await create(client, input="two", previous_response_id=first["id"])
    assert (await client.get(f"{URL}/{second['id']}")).json() == second
    listed = (await client.get(f"{URL}/{second['id']}/input_items?order=asc")).json()
    assert [item["content"][0]["text"] for item in listed["data"]] == ["one", "Hé 😊!", "two"]
    page = (await client.get(f"{URL}/{second['id']}/input_items?limit=1")).json()
    assert page["has_more"] and page["data"][0]["content"][0]["text"] == "two"
    assert (await client.delete(f"{URL}/{second['id']}")).json()["deleted"]
    assert (await client.get(f"{URL}/{second['id']}")).status_code == 404
    assert (await client.delete(f"{URL}/{second['id']}")).status_code == 404


async def test_a_response_that_is_not_stored_cannot_be_continued(client: httpx.AsyncClient) -> None:
    first = await create(client, store=False)
    assert (await client.get(f"{URL}/{first['id']}")).status_code == 404
    answer = await client.post(URL, json={"input": "x", "previous_response_id": first["id"]})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "previous_response_not_found"
    assert answer.json()["error"]["param"] == "previous_response_id"


async def test_responses_of_another_key_are_not_there(engine: ScriptedEngine) -> None:
    app, _ = scripted_app(engine, api_keys=("one", "two"))
    async with client_of(app) as client:
        mine = {"authorization": "Bearer one"}
        theirs = {"authorization": "Bearer two"}
        body = (await client.post(URL, json={"input": "hi"}, headers=mine)).json()
        assert (await client.get(f"{URL}/{body['id']}", headers=theirs)).status_code == 404
        continued = {"input": "x", "previous_response_id": body["id"]}
        assert (await client.post(URL, json=continued, headers=theirs)).status_code == 400
        assert (await client.post(URL, json=continued, headers=mine)).status_code == 200


async def test_items_of_an_agents_history_become_turns(
    engine: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    await create(
        client,
        input=[
            {"role": "developer", "content": "rules"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "ask"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "found"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": []}]},
            {"role": "user", "content": "again"},
        ],
    )
    said = prompt_text(engine)
    assert all(part in said for part in ("rules", "ask", "found", "so", "again"))


async def test_input_tokens_counts_what_the_prompt_has(
    engine: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    first = await create(client, input="one")
    fields = {"input": "two", "previous_response_id": first["id"]}
    counted = (await client.post(f"{URL}/input_tokens", json=fields)).json()
    await create(client, **fields)
    assert counted == {"object": "response.input_tokens", "input_tokens": len(engine.requests[-1].prompt)}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "q", "output": ""}]}, "input[0].call_id"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"type": "reasoning", "summary": 1}]}, "input[0].summary"),
        ({"conversation": "c"}, "conversation"),
        ({"tools": [{"type": "telepathy"}]}, "tools[0].type"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
            "tools[0].tools[0].name",
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "custom", "name": "c", "format": {"type": "xml"}}]}, "tools[0].format"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f"}, {"type": "function", "name": "f"}]}, "tools[1].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["nope"]}, "include[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"n": 2}, "n"),
        ({"background": True, "store": False}, "background"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"previous_response_id": 3}, "previous_response_id"),
        ({"stream_options": {"resume": True}}, "stream_options"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    answer = await client.post(URL, json={"input": "hi", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert (await client.post(URL, json={"input": "hi"})).status_code == 200


async def test_a_background_response_is_read_when_it_is_done(engine: ScriptedEngine) -> None:
    engine.script = Script(text="Hello", step_s=0.02)
    app, _ = scripted_app(engine)
    async with client_of(app) as client:
        begun = await create(client, background=True)
        assert begun["status"] == "queued" and begun["output"] == []
        assert (await client.get(f"{URL}/{begun['id']}")).json()["status"] in ("queued", "in_progress")
        answer = await client.get(f"{URL}/{begun['id']}?stream=true&starting_after=2")
        events = read_events(answer.text)
        assert [e["sequence_number"] for e in events] == list(range(3, 3 + len(events)))
        assert events[-1]["type"] == "response.completed"
        again = read_events((await client.get(f"{URL}/{begun['id']}?stream=true")).text)
        assert again[3:] == events and again[1]["type"] == "response.queued"
        assert (await client.get(f"{URL}/{begun['id']}")).json() == events[-1]["response"]
        odd = await client.get(f"{URL}/{begun['id']}?stream=yes")
        assert odd.status_code == 400 and odd.json()["error"]["param"] == "stream"
        late = await client.get(f"{URL}/{begun['id']}?stream=true&starting_after=99")
        assert late.status_code == 400 and late.json()["error"]["param"] == "starting_after"


async def test_a_background_response_can_be_cancelled(engine: ScriptedEngine) -> None:
    engine.script = Script(text="Hello ", endless=True, step_s=0.005)
    app, _ = scripted_app(engine)
    async with client_of(app) as client:
        begun = await create(client, background=True)
        await asyncio.sleep(0.05)
        cancelled = await client.post(f"{URL}/{begun['id']}/cancel")
        assert cancelled.json()["status"] == "cancelled" and engine.aborted == [begun["id"]]
        assert (await client.post(f"{URL}/{begun['id']}/cancel")).json() == cancelled.json()
        assert (await client.get(f"{URL}/{begun['id']}")).json()["status"] == "cancelled"
        plain = await create(client, max_output_tokens=2)
        assert (await client.post(f"{URL}/{plain['id']}/cancel")).status_code == 400


USER = {"role": "user", "content": "hi"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
NOTE = '<tool_call>\n{"name": "note", "arguments": {"input": "a\\nb"}}\n</tool_call>'


@pytest.mark.parametrize("tokens_per_step", [1, 7, 500])
async def test_calls_are_items_with_their_events(engine: ScriptedEngine, tokens_per_step: int) -> None:
    engine.script = Script(text=f"Let me look.\n{CALL}\n{CALL}", tokens_per_step=tokens_per_step)
    app, _ = scripted_app(engine)
    async with client_of(app) as client:
        whole = await create(client, tools=[WEATHER])
        events = await events_of(client, tools=[WEATHER])
    final = events[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["message", "function_call", "function_call"]
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == final["output"]
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    for item in final["output"][1:]:
        mine = [e for e in events if e.get("item_id") == item["id"]]
        deltas = [e["delta"] for e in mine if e["type"] == "response.function_call_arguments.delta"]
        assert "".join(deltas) == mine[-1]["arguments"] == item["arguments"] == '{"city": "Köln"}'
    assert len({item["call_id"] for item in final["output"][1:]}) == 2
    shown = [[{**item, "id": "", "call_id": ""} for item in body["output"]] for body in (whole, final)]
    assert shown[0] == shown[1] and final["status"] == "completed"


async def test_a_custom_tool_gets_its_text(engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
    engine.script = Script(text=NOTE)
    events = await events_of(client, tools=[{"type": "custom", "name": "note"}])
    item = events[-1]["response"]["output"][0]
    assert (item["type"], item["input"]) == ("custom_tool_call", "a\nb")
    assert events[-3]["type"] == "response.custom_tool_call_input.done"


@pytest.mark.parametrize("length", [35, 40, 60])
async def test_a_call_that_was_cut_is_incomplete(
    engine: ScriptedEngine, client: httpx.AsyncClient, length: int
) -> None:
    engine.script = Script(text=CALL)
    body = await create(client, tools=[WEATHER], max_output_tokens=length)
    assert body["status"] == "incomplete" and body["output"][-1]["status"] == "incomplete"
    engine.script = Script(text=CALL[:length])
    body = await create(client, tools=[WEATHER])
    assert body["status"] == "completed" and body["output"][-1]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("choice", "required", "names"),
    [
        ("auto", False, ["weather", "note"]),
        ("required", True, ["weather", "note"]),
        ({"type": "custom", "name": "note"}, True, ["note"]),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
            False,
            ["weather"],
        ),
    ],
)
async def test_the_choice_is_held_by_a_grammar(
    engine: ScriptedEngine, client: httpx.AsyncClient, choice: Any, required: bool, names: list[str]
) -> None:
    tools = [WEATHER, {"type": "custom", "name": "note"}]
    await create(client, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    grammar = engine.requests[-1].grammar
    assert isinstance(grammar, Tags) and grammar.required == required and not grammar.parallel
    assert [name for name in ("weather", "note") if any(name in tag.begin for tag in grammar.tags)] == names


CRM = {"type": "namespace", "name": "crm", "description": "Customers", "tools": [{**WEATHER, "name": "find"}]}


async def test_tools_of_a_namespace_are_called_by_it(
    engine: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    engine.script = Script(text=CALL.replace("weather", "crm__find"))
    body = await create(client, tools=[WEATHER, CRM])
    made = body["output"][0]
    assert (made["namespace"], made["name"]) == ("crm", "find")
    history = [made, {"type": "function_call_output", "call_id": made["call_id"], "output": "x"}]
    await create(client, input=history, tools=[CRM], tool_choice={"type": "function", "name": "find"})
    assert '"name": "crm__find"' in prompt_text(engine)
    grammar = engine.requests[-1].grammar
    assert isinstance(grammar, Tags) and ["crm__find" in tag.begin for tag in grammar.tags] == [True]


async def test_what_others_would_run_is_left_out_with_a_warning(
    engine: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    tools = [{"type": "web_search"}, WEATHER, {"type": "custom", "name": "patch", "format": lark}]
    body = await create(client, tools=tools)
    assert [text.partition(" ")[0] for text in body["warnings"]] == ["tools[0]", "tools[2].format"]
    assert "web_search" not in prompt_text(engine)


async def test_a_custom_tool_is_held_to_its_regex(engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "a|b+"}
    await create(client, tools=[{"type": "custom", "name": "note", "format": form}])
    grammar = engine.requests[-1].grammar
    assert isinstance(grammar, Tags) and isinstance(grammar.tags[0].schema, dict)
    assert grammar.tags[0].schema["properties"]["input"] == {"type": "string", "pattern": "^(?:a|b+)$"}


async def test_with_choice_none_nothing_is_read_as_a_call(
    engine: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    engine.script = Script(text=CALL)
    body = await create(client, tools=[WEATHER], tool_choice="none")
    assert body["output"][0]["content"][0]["text"] == CALL and engine.requests[-1].grammar is None


async def test_thoughts_are_items_of_their_own() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <think></think> #}"
    )
    engine = ScriptedEngine(toy_codec(chat_template=template), Script(text="<think>hm</think>\n\nSo."))
    app, _ = scripted_app(engine)
    async with client_of(app) as client:
        events = await events_of(client)
        answer = await client.post(
            "/v1/messages", json={"model": "scripted", "max_tokens": 99, "messages": [USER], "stream": True}
        )
    final = events[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["reasoning", "message"]
    assert final["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert final["output"][1]["content"][0]["text"] == "So."
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == final["output"]
    assert '"thinking_delta"' in answer.text and '"signature_delta"' in answer.text
