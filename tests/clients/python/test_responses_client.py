"""Responses through the Python SDK: remembered turns, background, streams that are taken up again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from answer_server import Answer, AnswerServer
from http_server import running_server, scripted_app
from scripted_engine import Script, ScriptedEngine, toy_codec

from artesian.clients.python import (
    APIResponseError,
    AsyncClient,
    BadRequestError,
    Client,
    NotFoundError,
    ServiceUnavailableError,
    StreamError,
)


class Scene:
    """Our own server, and its client."""

    def __init__(self, url: str, client: AsyncClient, engine: ScriptedEngine) -> None:
        self.url, self.client, self.engine = url, client, engine


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    engine = ScriptedEngine(toy_codec(), Script(text="Hé 😊!", step_s=0.005))
    app, _ = scripted_app(engine, keep_alive_interval_s=0.02)
    async with running_server(app) as url, AsyncClient(url) as client:
        yield Scene(url, client, engine)


async def test_a_turn_goes_on_from_the_one_before(scene: Scene) -> None:
    responses = scene.client.responses
    first = await responses.create("hi", instructions="be brief", metadata={"a": "b"})
    assert (first.status, first.text, first.metadata) == ("completed", "Hé 😊!", {"a": "b"})
    assert first.usage is not None and first.usage.cached_tokens == 3 and first.request_id
    assert first.prompt_cache_diagnostics is not None
    second = await responses.create("more", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    said = scene.engine.codec.detokenize(scene.engine.requests[1].prompt)
    assert said.index("hi") < said.index("Hé 😊!") < said.index("more")
    items = await responses.input_items(second.id, order="asc", limit=2)
    assert [item["role"] for item in items.data] == ["user", "assistant"] and items.has_more
    assert await responses.count_tokens("hi") < await responses.count_tokens("hi there")


async def test_an_output_may_be_sent_back_as_input(scene: Scene) -> None:
    first = await scene.client.responses.create("hi")
    await scene.client.responses.create(
        [{"role": "user", "content": "hi"}, *first.output, {"role": "user", "content": "more"}]
    )
    assert "Hé 😊!" in scene.engine.codec.detokenize(scene.engine.requests[1].prompt)


async def test_a_stream_ends_with_the_whole_response(scene: Scene) -> None:
    async with scene.client.responses.stream("hi") as stream:
        texts = [text async for text in stream.texts()]
        final = await stream.get_response()
    assert "".join(texts) == final.text == "Hé 😊!"
    assert final.id == stream.response_id and final.request_id
    assert (await scene.client.responses.get(final.id)).text == final.text
    assert (await scene.client.responses.delete(final.id)).deleted
    with pytest.raises(NotFoundError):
        await scene.client.responses.get(final.id)


async def test_a_response_in_the_background_is_read_again_and_cancelled(scene: Scene) -> None:
    scene.engine.script = Script(text="x", endless=True, step_s=0.01)
    begun = await scene.client.responses.create("hi", background=True)
    assert begun.status == "queued" and begun.background
    async with scene.client.responses.resume(begun.id) as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        seen = stream.last_number
    async with scene.client.responses.resume(begun.id, after=seen) as stream:
        assert (await anext(aiter(stream))).sequence_number == seen + 1
    assert (await scene.client.responses.cancel(begun.id)).status == "cancelled"


async def test_a_failed_response_is_returned_as_such(scene: Scene) -> None:
    scene.engine.script = Script(text="abc", fail_after=1)
    async with scene.client.responses.stream("hi") as stream:
        final = await stream.get_response()
    assert final.status == "failed" and final.error is not None and "on fire" in final.error.message


async def test_the_waiting_client_does_the_same(scene: Scene) -> None:
    def work(url: str) -> None:
        with Client(url) as client:
            with client.responses.stream("hi", resume=True) as stream:
                texts = "".join(stream.texts())
                final = stream.get_response()
            assert texts == final.text == client.responses.get(final.id).text == "Hé 😊!"
            assert client.responses.count_tokens("hi") > 1
            assert client.responses.input_items(final.id).data
            client.responses.delete(final.id)
            with pytest.raises(BadRequestError):
                client.responses.create("hi", temperature=9)

    await asyncio.to_thread(work, scene.url)


def numbered(*events: tuple[str, dict[str, Any]], first: int = 0, drop: bool = False) -> Answer:
    pieces = []
    for number, (kind, fields) in enumerate(events, first):
        event = {"type": f"response.{kind}", "sequence_number": number, **fields}
        pieces.append(f"event: {event['type']}\nid: r:{number}\ndata: {json.dumps(event)}\n\n")
    return Answer(pieces=pieces, drop=drop)


BODY = {"id": "resp_1", "status": "in_progress"}
CREATED = ("created", {"response": BODY})
ONE, TWO = [("output_text.delta", {"delta": text}) for text in ("one ", "two")]
DONE = ("completed", {"response": {**BODY, "status": "completed"}})


def test_a_lost_stream_goes_on_behind_its_last_event() -> None:
    with AnswerServer(
        numbered(CREATED, ONE, drop=True), Answer(status=503, body={}), numbered(TWO, DONE, first=2)
    ) as server:
        with Client(server.url, sleep=lambda seconds: None) as client:
            with client.responses.stream("hi", resume=True, cache_salt="s") as stream:
                assert "".join(stream.texts()) == "one two"
            assert stream.get_response().status == "completed"
        assert [seen.path for seen in server.seen[1:]] == [
            "/v1/responses/resp_1?stream=true&starting_after=1&cache_salt=s"
        ] * 2
        assert server.bodies()[0]["stream_options"] == {"resume": True}


async def test_a_stream_that_brings_nothing_more_is_given_up() -> None:
    broken = [Answer(pieces=[], drop=True)] * 5
    with AnswerServer(numbered(CREATED, drop=True), *broken) as server:
        async with AsyncClient(server.url, max_retries=2) as client:
            async with client.responses.stream("hi", resume=True) as stream:
                with pytest.raises(StreamError, match="broke off"):
                    await stream.get_response()
    assert len(server.seen) == 4


@pytest.mark.parametrize("drop", [True, False])
def test_without_resume_a_lost_stream_is_an_error(drop: bool) -> None:
    with AnswerServer(numbered(CREATED, ONE, drop=drop)) as server, Client(server.url) as client:
        with client.responses.stream("hi") as stream, pytest.raises(StreamError, match="broke off"):
            stream.get_response()
        assert len(server.seen) == 1


def test_what_cannot_be_taken_up_again_says_why() -> None:
    with AnswerServer(numbered(CREATED, drop=True), Answer(status=503, body={})) as server:
        with Client(server.url, max_retries=0) as client:
            with client.responses.stream("hi", resume=True) as stream:
                with pytest.raises(ServiceUnavailableError):
                    stream.get_response()


def test_something_else_than_events_is_an_error() -> None:
    with AnswerServer(Answer(pieces=["data: <html>\n\n"])) as server, Client(server.url) as client:
        with client.responses.stream("hi") as stream, pytest.raises(APIResponseError):
            stream.get_response()
