"""`/v1/responses` over a WebSocket: OpenAI's own client, several turns, steering, resuming, hostile peers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import websockets
from http_server import running_server, scripted_app, server_process
from openai_spec import faults_of
from scripted_engine import Script, ScriptedEngine, toy_codec
from websockets.asyncio.client import ClientConnection

TERMINAL = ("response.completed", "response.incomplete", "response.failed")


class Scene:
    """A server and what connects to it."""

    def __init__(self, url: str, engine: ScriptedEngine) -> None:
        self.url, self.engine = url, engine
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="one", max_retries=0)

    def connect(self, **options: Any) -> websockets.connect:
        address = self.url.replace("http", "ws") + "/v1/responses"
        headers = {"authorization": "Bearer one", **options.pop("headers", {})}
        return websockets.connect(address, additional_headers=headers, proxy=None, **options)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    engine = ScriptedEngine(toy_codec(), Script(text="Hé 😊!"), max_model_len=1000)
    app, _ = scripted_app(engine, api_keys=("one",), max_body_bytes=10_000)
    async with running_server(app, max_body_bytes=10_000) as url:
        scene = Scene(url, engine)
        yield scene
        await scene.client.close()


async def say(socket: ClientConnection, kind: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": kind, **fields}))


async def read_turn(socket: ClientConnection) -> list[dict[str, Any]]:
    """The events up to a terminal one, each checked."""
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] not in (*TERMINAL, "error"):
        events.append(json.loads(await asyncio.wait_for(socket.recv(), 10)))
        if events[-1]["type"] != "error" and "steer" not in events[-1]["type"]:
            assert not faults_of("response event")(events[-1])
    return events


async def test_openais_client_runs_several_turns_on_one_connection(scene: Scene) -> None:
    texts: list[str] = []
    previous: str | openai.Omit = openai.omit
    async with scene.client.responses.connect() as connection:
        for _ in range(3):
            await connection.response.create(model="scripted", input="hi", previous_response_id=previous)
            async for event in connection:
                if event.type == "response.completed":
                    texts.append(event.response.output_text)
                    previous = event.response.id
                    break
    assert texts == ["Hé 😊!"] * 3
    assert scene.engine.codec.detokenize(scene.engine.requests[-1].prompt).count("Hé 😊!") == 2


async def test_the_events_are_those_of_the_http_stream(scene: Scene) -> None:
    async with scene.connect() as socket:
        await say(socket, "response.create", input="hi")
        events = await read_turn(socket)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.completed"


async def test_a_turn_that_is_not_stored_can_be_continued_on_its_connection_only(scene: Scene) -> None:
    async with scene.connect() as socket:
        await say(socket, "response.create", input="hi", store=False)
        first = (await read_turn(socket))[-1]["response"]["id"]
        await say(socket, "response.create", input="more", previous_response_id=first)
        assert (await read_turn(socket))[-1]["type"] == "response.completed"
    async with scene.connect() as socket:
        await say(socket, "response.create", input="more", previous_response_id=first)
        assert (await read_turn(socket))[-1]["error"]["code"] == "previous_response_not_found"


async def test_lanes_run_side_by_side_and_one_lane_runs_one(scene: Scene) -> None:
    scene.engine.script = Script(text="x" * 30, step_s=0.005)
    async with scene.connect() as socket:
        await say(socket, "response.create", input="a", stream_id="a")
        await say(socket, "response.create", input="b", stream_id="b")
        await say(socket, "response.create", input="c", stream_id="a")
        events = [json.loads(await socket.recv())]
        while sum(event["type"] == "response.completed" for event in events) < 2:
            events.append(json.loads(await socket.recv()))
    refused = [event for event in events if event["type"] == "error"]
    assert [event["error"]["code"] for event in refused] == ["response_in_progress"]
    for lane in "ab":
        numbers = [e["sequence_number"] for e in events if e.get("stream_id") == lane and "status" not in e]
        assert numbers == list(range(len(numbers)))


async def test_steering_ends_a_response_and_the_next_one_goes_on(scene: Scene) -> None:
    scene.engine.script = Script(text="tell ", endless=True, step_s=0.005)
    async with scene.connect() as socket:
        await say(socket, "response.create", input="hi", max_output_tokens=500)
        created = json.loads(await socket.recv())
        await asyncio.sleep(0.05)
        scene.engine.script = Script(text="done")
        target = created["response"]["id"]
        await say(socket, "response.steer", previous_response_id=target, input="be short")
        steered, successor = await read_turn(socket), await read_turn(socket)
    numbers = [0, *(event["sequence_number"] for event in steered)]
    assert numbers == list(range(len(numbers)))
    assert [e["type"] for e in steered].count("response.steer.accepted") == 1
    assert steered[-1]["response"]["incomplete_details"] == {"reason": "steered"}
    assert successor[-1]["response"]["previous_response_id"] == created["response"]["id"]
    assert successor[-1]["response"]["output"][0]["content"][0]["text"] == "done"
    assert "be short" in scene.engine.codec.detokenize(scene.engine.requests[-1].prompt)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"previous_response_id": "resp_0", "input": "x"}, "response_not_found"),
        ({"previous_response_id": "resp_0", "input": []}, "invalid_input"),
        ({"previous_response_id": "resp_0", "input": [{"role": "system", "content": "x"}]}, "invalid_input"),
        ({"previous_response_id": "resp_0"}, "invalid_input"),
    ],
)
async def test_steering_that_cannot_be_taken_comes_back(
    scene: Scene, fields: dict[str, Any], code: str
) -> None:
    async with scene.connect() as socket:
        await say(socket, "response.steer", **fields)
        event = json.loads(await socket.recv())
    assert (event["type"], event["error"]["code"]) == ("response.steer.failed", code)
    assert event["steer"]["input"] == fields.get("input")


async def test_a_client_that_leaves_ends_its_response(scene: Scene) -> None:
    scene.engine.script = Script(endless=True, step_s=0.005)
    async with scene.connect() as socket:
        await say(socket, "response.create", input="hi", max_output_tokens=900)
        await socket.recv()
    for _ in range(100):
        if scene.engine.aborted:
            break
        await asyncio.sleep(0.02)
    assert len(scene.engine.aborted) == 1 and scene.engine.status().running == 0


async def test_a_resumable_response_is_taken_up_after_a_drop(scene: Scene) -> None:
    scene.engine.script = Script(text="x" * 60, step_s=0.005)
    async with scene.connect() as socket:
        await say(socket, "response.create", input="hi", stream_options={"resume": True})
        seen = [json.loads(await socket.recv()) for _ in range(10)]
    assert not scene.engine.aborted
    async with scene.connect() as socket:
        response_id = seen[0]["response"]["id"]
        await say(socket, "response.resume", response_id=response_id, starting_after=9)
        rest = await read_turn(socket)
    numbers = [event["sequence_number"] for event in (*seen, *rest)]
    assert numbers == list(range(len(numbers))) and rest[-1]["type"] == "response.completed"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("nonsense", None),
        ("[]", None),
        ('{"type": "session.update"}', "type"),
        ('{"type": 7}', "type"),
        ('{"type": "response.create", "input": 7}', "input"),
        ('{"type": "response.create", "input": "x", "background": true}', "background"),
        ('{"type": "response.create", "model": "nope", "input": "x"}', "model"),
        ('{"type": "response.resume", "response_id": "resp_1"}', "response_id"),
        (b"\xff\x00", None),
    ],
)
async def test_what_is_wrong_is_told_and_the_connection_goes_on(
    scene: Scene, message: str | bytes, param: str | None
) -> None:
    async with scene.connect() as socket:
        await socket.send(message)
        event = json.loads(await socket.recv())
        assert event["type"] == "error" and event["status"] in (400, 404)
        assert event["error"]["param"] == param
        await say(socket, "response.create", input="hi")
        assert (await read_turn(socket))[-1]["type"] == "response.completed"


async def test_a_message_in_pieces_is_one_and_a_huge_one_closes(scene: Scene) -> None:
    async with scene.connect() as socket:
        await socket.send(['{"type": "response.create",', '"input":', '"hi"}'])
        assert (await read_turn(socket))[-1]["type"] == "response.completed"
        with pytest.raises(websockets.ConnectionClosedError) as closed:
            await socket.send("x" * 20_000)
            await socket.recv()
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


async def test_a_flood_of_pings_does_not_stop_an_answer(scene: Scene) -> None:
    async with scene.connect() as socket:
        await say(socket, "response.create", input="hi")
        for _ in range(2000):
            await socket.ping()
        assert (await read_turn(socket))[-1]["type"] == "response.completed"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer two"}, 401),
        ({"authorization": "", "sec-websocket-protocol": "openai-insecure-api-key.one"}, 401),
        ({"origin": "http://evil.example"}, 403),
    ],
)
async def test_who_may_not_connect_gets_an_http_error(
    scene: Scene, headers: dict[str, str], status: int
) -> None:
    with pytest.raises(websockets.InvalidStatus) as refused:
        async with scene.connect(headers=headers):
            pass
    assert refused.value.response.status_code == status
    assert json.loads(refused.value.response.body or b"")["error"]["message"]


async def test_a_key_in_the_url_opens_nothing_and_is_not_logged(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    address = scene.url.replace("http", "ws") + "/v1/responses?api_key=one-secret"
    with pytest.raises(websockets.InvalidStatus):
        async with websockets.connect(address, proxy=None):
            pass
    assert "one-secret" not in caplog.text


async def test_a_server_that_ends_says_so_with_1001() -> None:
    with server_process(script={"text": "Hello"}) as (process, url):
        async with websockets.connect(url.replace("http", "ws") + "/v1/responses", proxy=None) as socket:
            await say(socket, "response.create", input="hi")
            await read_turn(socket)
            process.terminate()
            with pytest.raises(websockets.ConnectionClosedOK) as closed:
                await asyncio.wait_for(socket.recv(), 10)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
        assert process.wait(10) == 0
