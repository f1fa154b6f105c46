"""Streams that are taken up again, by SSE and by chat's WebSocket; and chat's WebSocket itself."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import websockets
from http_server import running_server, scripted_app
from openai_spec import faults_of
from scripted_engine import Script, ScriptedEngine, toy_codec
from websockets.asyncio.client import ClientConnection

from artesian.server.stream import runs as runs_module
from artesian.server.stream.log import EventLog
from artesian.server.stream.named import Event

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
RESUMABLE: dict[str, Any] = {"messages": HELLO, "stream": True, "stream_options": {"resume": True}}


class Scene:
    """A server and its address."""

    def __init__(self, url: str, engine: ScriptedEngine) -> None:
        self.url, self.engine = url, engine
        self.client = httpx.AsyncClient(base_url=url, headers={"x-api-key": "one"}, timeout=20)

    def connect(self) -> websockets.connect:
        headers = {"x-api-key": "one"}
        return websockets.connect(
            self.url.replace("http", "ws") + CHAT, additional_headers=headers, proxy=None
        )


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    engine = ScriptedEngine(toy_codec(), Script(text="abcdefghij" * 4, step_s=0.005), max_model_len=1000)
    app, _ = scripted_app(
        engine, api_keys=("one", "two"), resume_grace_s=0.4, keep_alive_interval_s=0.05, strict_fields=True
    )
    async with running_server(app) as url:
        scene = Scene(url, engine)
        yield scene
        await scene.client.aclose()


async def read_some(scene: Scene, path: str, body: dict[str, Any], count: int) -> tuple[list[str], str]:
    """The first events' lines, then the connection is cut; and the request's id."""
    lines: list[str] = []
    async with scene.client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            lines.append(line)
            if sum(one.startswith("id:") for one in lines) == count and line == "":
                break
    return lines, answer.headers["x-request-id"]


def ids_of(lines: list[str]) -> list[str]:
    return [line.removeprefix("id: ") for line in lines if line.startswith("id:")]


def text_of(lines: list[str]) -> str:
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    choices = [choice for one in data for choice in json.loads(one)["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


async def test_a_chat_stream_is_taken_up_by_the_same_request_with_its_last_id(scene: Scene) -> None:
    begun, _ = await read_some(scene, CHAT, RESUMABLE, 5)
    last = ids_of(begun)[-1]
    rest = await scene.client.post(CHAT, json=RESUMABLE, headers={"last-event-id": last})
    lines = rest.text.split("\n")
    numbers = [int(one.rpartition(":")[2]) for one in (*ids_of(begun), *ids_of(lines))]
    assert numbers == list(range(len(numbers))) and len(scene.engine.requests) == 1
    assert text_of([*begun, *lines]) == "abcdefghij" * 4
    assert rest.text.endswith("data: [DONE]\n\n") and ": keep-alive" not in rest.text


@pytest.mark.parametrize("by", ["response", "request"])
async def test_a_stream_is_taken_up_by_either_id(scene: Scene, by: str) -> None:
    begun, request_id = await read_some(scene, CHAT, RESUMABLE, 3)
    name = request_id if by == "request" else ids_of(begun)[0].partition(":")[0]
    rest = await scene.client.get(f"/v1/streams/{name}?starting_after=2")
    assert text_of([*begun, *rest.text.split("\n")]) == "abcdefghij" * 4
    stranger = await scene.client.get(f"/v1/streams/{name}", headers={"x-api-key": "two"})
    assert stranger.status_code == 404 and stranger.json()["error"]["code"] == "events_expired"


async def test_a_responses_stream_is_taken_up_with_its_last_id(scene: Scene) -> None:
    body = {"input": "hi", "stream": True, "stream_options": {"resume": True}}
    begun, _ = await read_some(scene, "/v1/responses", body, 4)
    again = {"last-event-id": ids_of(begun)[-1]}
    rest = await scene.client.post("/v1/responses", json=body, headers=again)
    events = [json.loads(line[6:]) for line in rest.text.split("\n") if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(4, 4 + len(events)))
    assert events[-1]["type"] == "response.completed"


async def test_nobody_coming_back_ends_it_after_the_grace_time(scene: Scene) -> None:
    scene.engine.script = Script(endless=True, step_s=0.01)
    begun, _ = await read_some(scene, CHAT, {**RESUMABLE, "max_tokens": 900}, 3)
    left_at = time.monotonic()
    while scene.engine.status().running:
        assert time.monotonic() - left_at < 5
        await asyncio.sleep(0.02)
    assert time.monotonic() - left_at > 0.3 and len(scene.engine.aborted) == 1
    await asyncio.sleep(0.6)
    late = await scene.client.post(CHAT, json=RESUMABLE, headers={"last-event-id": ids_of(begun)[-1]})
    assert late.status_code == 400 and late.json()["error"]["code"] == "events_expired"


async def test_without_asking_there_are_no_ids_and_leaving_ends_it(scene: Scene) -> None:
    scene.engine.script = Script(endless=True, step_s=0.01)
    lines = []
    async with scene.client.stream("POST", CHAT, json={"messages": HELLO, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            lines.append(line)
            if len(lines) > 6:
                break
    left_at = time.monotonic()
    while scene.engine.status().running:
        assert time.monotonic() - left_at < 0.35, "it outlives its reader"
        await asyncio.sleep(0.01)
    assert not ids_of(lines)


async def test_orphans_are_bounded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "MAX_ORPHANS", 2)
    scene.engine.script = Script(endless=True, step_s=0.02)
    for _ in range(4):
        await read_some(scene, CHAT, {**RESUMABLE, "max_tokens": 900}, 1)
    await asyncio.sleep(0.05)
    assert len(scene.engine.aborted) == 2


async def test_a_log_keeps_its_bounds_and_tells_who_is_too_late() -> None:
    log = EventLog(max_bytes=2000)
    for number in range(100):
        log.append([Event("x", b"%d" % number)])
    assert log.bytes <= 2000 and log.end == 100 and log.first > 80
    log.close()
    kept = [event async for batch in log.read(log.first - 1) for event in batch]
    assert [event.data for event in kept] == [b"%d" % number for number in range(log.first, 100)]
    for after in (log.first - 2, 100):
        with pytest.raises(Exception, match="no longer kept|no event"):
            log.check(after)


async def frames_of(socket: ClientConnection) -> list[str]:
    frames: list[str] = []
    while not frames or frames[-1] != "[DONE]":
        frames.append(str(await asyncio.wait_for(socket.recv(), 10)))
    return frames


async def test_chat_by_websocket_gives_the_chunks_of_the_stream(scene: Scene) -> None:
    async with scene.connect() as socket:
        for _ in range(2):
            await socket.send(json.dumps({"messages": HELLO, "stream_options": {"include_usage": True}}))
            chunks = [json.loads(frame) for frame in (await frames_of(socket))[:-1]]
            assert not any(faults_of("chat chunk")(chunk) for chunk in chunks)
            said = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
            assert "".join(said) == "abcdefghij" * 4 and chunks[-1]["usage"]["completion_tokens"] > 40


async def test_chat_by_websocket_is_taken_up_after_a_drop(scene: Scene) -> None:
    body = {"messages": HELLO, "stream_options": {"resume": True}}
    async with scene.connect() as socket:
        await socket.send(json.dumps(body))
        begun = [json.loads(await socket.recv()) for _ in range(6)]
    async with scene.connect() as socket:
        await socket.send(json.dumps({"resume": begun[0]["id"], "starting_after": 5}))
        rest = [json.loads(frame) for frame in (await frames_of(socket))[:-1]]
    said = [choice["delta"].get("content", "") for chunk in (*begun, *rest) for choice in chunk["choices"]]
    assert "".join(said) == "abcdefghij" * 4


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("x", "invalid_json"),
        ('{"messages": []}', "invalid_value"),
        ('{"messages": [{"role": "user", "content": "x"}], "zzz": 1}', "unknown_parameter"),
        ('{"resume": "chatcmpl-0"}', "events_expired"),
    ],
)
async def test_what_is_wrong_is_told_and_chat_goes_on(scene: Scene, message: str, code: str) -> None:
    async with scene.connect() as socket:
        await socket.send(message)
        frames = await frames_of(socket)
        assert json.loads(frames[0])["error"]["code"] == code and len(frames) == 2
        await socket.send(json.dumps({"messages": HELLO}))
        assert len(await frames_of(socket)) > 40


async def test_a_second_request_waits_for_the_first_and_leaving_ends_it(scene: Scene) -> None:
    scene.engine.script = Script(endless=True, step_s=0.01)
    async with scene.connect() as socket:
        await socket.send(json.dumps({"messages": HELLO}))
        await socket.recv()
        await socket.send(json.dumps({"messages": HELLO}))
        frames = [json.loads(await socket.recv()) for _ in range(10)]
        assert [f["error"]["code"] for f in frames if "error" in f] == ["response_in_progress"]
    left_at = time.monotonic()
    while scene.engine.status().running:
        assert time.monotonic() - left_at < 2
        await asyncio.sleep(0.01)
