"""Chat streams of the Python SDK: typed events, the whole answer, and every way a stream can end."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from answer_server import Answer, AnswerServer, call_deltas, delta, events
from http_server import running_server, scripted_app
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import Script, ScriptedEngine, toy_codec

from artesian.clients.python import (
    APIResponseError,
    AsyncClient,
    BadRequestError,
    ChoiceDone,
    Client,
    ContentDelta,
    ReasoningDelta,
    StreamError,
    ToolArgumentsDelta,
    ToolCallBegun,
    ToolCallDone,
    UnprocessableEntityError,
    UsageReport,
)
from artesian.clients.python.sse import EventParser, ServerEvent

HELLO = [{"role": "user", "content": "hi"}]
STREAM = ": ping\n\r\ndata: one\r\ndata:two\r\nid: 7\r\n\nevent: x\rdata: é😊\r\rdata\n\ndata: half".encode()
EVENTS = [ServerEvent("one\ntwo", "", "7"), ServerEvent("é😊", "x", "7"), ServerEvent("", "", "7")]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_are_the_same_wherever_the_bytes_are_cut(cuts: list[int]) -> None:
    parser, found, last = EventParser(), [], 0
    for cut in [*sorted(cuts), len(STREAM)]:
        found += parser.feed(STREAM[last:cut])
        last = cut
    assert found == EVENTS


@pytest.fixture
def server() -> Iterator[AnswerServer]:
    with AnswerServer() as server:
        yield server


def test_a_stream_with_reasoning_text_and_calls_becomes_typed_events(server: AnswerServer) -> None:
    usage: dict[str, Any] = {"usage": {"prompt_tokens": 5}, "prompt_cache_diagnostics": {"type": "cache_hit"}}
    server.script(
        [
            events(
                delta(role="assistant", content=""),
                delta(reasoning_content="hm"),
                delta(content="So"),
                *call_deltas(("call_1", "f", '{"a":1}'), ("call_2", "g", "{}")),
                {"choices": [], **usage},
            )
        ]
    )
    with Client(server.url) as client, client.chat.stream(HELLO) as stream:
        found = list(stream)
        answer = stream.get_answer()
    assert [type(event) for event in found] == [
        ReasoningDelta, ContentDelta, ToolCallBegun, ToolArgumentsDelta, ToolArgumentsDelta, ToolCallDone,
        ToolCallBegun, ToolArgumentsDelta, ToolArgumentsDelta, ToolCallDone, ChoiceDone, UsageReport,
    ]  # fmt: skip
    message = answer.message
    assert (message.reasoning_content, message.content) == ("hm", "So")
    assert [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()] == [
        ("call_1", "f", '{"a":1}'), ("call_2", "g", "{}"),
    ]  # fmt: skip
    assert answer.request_id == stream.request_id == "req_1"
    assert answer.prompt_cache_diagnostics is not None and answer.prompt_cache_diagnostics.is_hit
    assert server.bodies()[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("drop", [True, False])
def test_a_stream_that_breaks_off_is_an_error_and_keeps_what_came(server: AnswerServer, drop: bool) -> None:
    answer = events(delta(content="Hel"), done=False)
    answer.drop = drop
    server.script([answer])
    with Client(server.url) as client, client.chat.stream(HELLO) as stream:
        with pytest.raises(StreamError, match="broke off") as raised:
            stream.get_answer()
        assert stream.partial.text == "Hel"
    assert raised.value.request_id == "req_1"
    assert len(server.seen) == 1  # half an answer is never asked for again


def test_something_else_than_a_stream_is_an_error(server: AnswerServer) -> None:
    server.script([Answer(pieces=["data: <html>\n\n"])])
    with Client(server.url) as client, client.chat.stream(HELLO) as stream:
        with pytest.raises(APIResponseError, match="no chunk"):
            stream.get_answer()


def test_a_stream_is_opened_again_before_its_first_byte(server: AnswerServer) -> None:
    server.script([Answer(status=503, body={}), events(delta("stop", content="Hi"))])
    with Client(server.url, sleep=lambda seconds: None) as client, client.chat.stream(HELLO) as stream:
        assert "".join(stream.texts()) == "Hi"


class Scene:
    """Our own server, and its client."""

    def __init__(self, client: AsyncClient, engine: ScriptedEngine) -> None:
        self.client, self.engine = client, engine


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    engine = ScriptedEngine(toy_codec(), Script(text="Hé 😊!", prefill_s=0.1))
    app, _ = scripted_app(engine, api_keys=("one",), keep_alive_interval_s=0.02)
    async with running_server(app) as url, AsyncClient(url, api_key="one") as client:
        yield Scene(client, engine)


async def test_a_stream_of_our_server_equals_its_whole_answer(scene: Scene) -> None:
    whole = await scene.client.chat.create(HELLO, n=2, logprobs=True, return_token_ids=True)
    async with scene.client.chat.stream(HELLO, n=2, logprobs=True, return_token_ids=True) as stream:
        streamed = await stream.get_answer()
    assert [choice.message for choice in streamed.choices] == [choice.message for choice in whole.choices]
    assert [choice.logprobs for choice in streamed.choices] == [choice.logprobs for choice in whole.choices]
    assert [choice.token_ids for choice in streamed.choices] == [choice.token_ids for choice in whole.choices]
    assert streamed.usage == whole.usage
    assert streamed.prompt_cache_diagnostics is not None and whole.prompt_cache_diagnostics is not None


async def test_a_fault_in_our_stream_is_raised_behind_the_text(scene: Scene) -> None:
    scene.engine.script = Script(text="abcdef", fail_after=2)
    async with scene.client.chat.stream(HELLO) as stream:
        with pytest.raises(StreamError, match="on fire") as raised:
            await stream.get_answer()
    assert (raised.value.code, stream.partial.text) == ("request_failed", "ab")


async def test_leaving_a_stream_ends_the_request_in_the_server(scene: Scene) -> None:
    scene.engine.script = Script(text="x", endless=True, step_s=0.01)
    async with scene.client.chat.stream(HELLO) as stream:
        async for event in stream:
            if isinstance(event, ContentDelta):
                break
    await scene.client.models()  # a round trip later
    assert scene.engine.aborted == [scene.engine.requests[0].id]


async def test_a_refusal_is_raised_where_the_stream_is_entered(scene: Scene) -> None:
    with pytest.raises(BadRequestError) as raised:
        async with scene.client.chat.stream(HELLO, temperature=9):
            pass
    assert raised.value.param == "temperature"


async def test_completions_and_models_are_read(scene: Scene) -> None:
    assert (await scene.client.complete("hi")).text == "Hé 😊!"
    assert [model.id for model in (await scene.client.models()).data] == ["scripted"]


async def test_a_call_that_is_sent_again_with_its_key_runs_once(scene: Scene) -> None:
    first, again = [await scene.client.chat.create(HELLO, idempotency_key="k") for _ in range(2)]
    assert first.id == again.id and first.request_id != again.request_id
    with pytest.raises(UnprocessableEntityError) as raised:
        await scene.client.chat.create(HELLO, temperature=0, idempotency_key="k")
    assert raised.value.code == "idempotency_key_reused"


def resumable(*deltas: tuple[int, dict[str, Any]], done: bool = False, drop: bool = True) -> Answer:
    """Part of a stream whose events have ids."""
    answer = events(*[chunk for _, chunk in deltas], done=done)
    numbers = [number for number, _ in deltas]
    pieces = answer.pieces or []
    answer.pieces = [f"id: chatcmpl-1:{n}\n{piece}" for n, piece in zip(numbers, pieces, strict=False)]
    answer.pieces += pieces[len(numbers) :]
    answer.drop = drop
    return answer


async def test_a_lost_chat_goes_on_behind_its_last_event(server: AnswerServer) -> None:
    first = resumable((0, delta(content="Hel")), (1, delta(content="lo")))
    rest = resumable((2, delta("stop", content="!")), done=True, drop=False)
    server.script([first, Answer(status=503, body={}), rest])
    async with AsyncClient(server.url, sleep=no_wait) as client:
        async with client.chat.stream(HELLO, resume=True, cache_salt="s") as stream:
            assert "".join([text async for text in stream.texts()]) == "Hello!"
        assert (await stream.get_answer()).text == "Hello!"
    assert server.bodies()[0]["stream_options"] == {"include_usage": True, "resume": True}
    path = "/v1/streams/chatcmpl-1?starting_after=1&cache_salt=s"
    assert [seen.path for seen in server.seen[1:]] == [path, path]


def test_a_lost_chat_that_brings_nothing_more_is_given_up(server: AnswerServer) -> None:
    server.script([resumable((0, delta(content="Hel"))), *[Answer(pieces=[], drop=True)] * 5])
    with Client(server.url, max_retries=1) as client, client.chat.stream(HELLO, resume=True) as stream:
        with pytest.raises(StreamError, match="broke off"):
            stream.get_answer()
    assert len(server.seen) == 3


async def test_our_servers_chat_is_taken_up_again_after_a_cut(scene: Scene) -> None:
    scene.engine.script = Script(text="abcdefghij" * 3, step_s=0.005)
    async with scene.client.chat.stream(HELLO, resume=True) as stream:
        text = ""
        async for event in stream:
            if isinstance(event, ContentDelta):
                text += event.text
                if len(text) == 3:
                    assert stream._response is not None
                    network = stream._response.extensions["network_stream"]
                    network.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    assert text == "abcdefghij" * 3 and scene.engine.aborted == []


async def no_wait(seconds: float) -> None:
    pass
