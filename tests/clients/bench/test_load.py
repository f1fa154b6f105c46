"""The load generator, on canned bodies and on our own server with a scripted engine."""

import json
from typing import Any

import pytest
from http_server import running_server, scripted_app
from scripted_engine import Script, ScriptedEngine, toy_codec

from artesian.clients.bench.load import LoadError, Target, read_stream
from artesian.clients.bench.sockets import stream_over_socket


def event(text: str = "", finish_reason: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def test_an_event_arrives_with_the_piece_that_completes_it() -> None:
    first, second = event("a"), event("b", "length")
    pieces = [
        (1.0, first[:10]),
        (2.0, first[10:] + second[:5]),
        (3.0, second[5:]),
        (4.0, b"data: [DONE]\n\n"),
    ]

    answer = read_stream(0.5, pieces, max_tokens=2)

    assert (answer.text, answer.arrivals) == ("ab", [2.0, 3.0])
    assert answer.ttft_s == 1.5
    assert answer.decode_tokens_per_s == 1.0


def test_crlf_and_comment_lines_are_read_as_well() -> None:
    body = b": ping\r\n\r\n" + event("a", "stop").replace(b"\n", b"\r\n")

    assert read_stream(0.0, [(1.0, body)], max_tokens=9).text == "a"


@pytest.mark.parametrize(
    ("events", "tokens"),
    [
        ([event("ab"), event(finish_reason="length")], 8),
        ([event("a"), event("b"), event(finish_reason="stop")], 2),
        ([event("a"), event(finish_reason="stop", usage={"completion_tokens": 5})], 5),
    ],
    ids=["the limit when it was reached", "else the events", "best the server's own count"],
)
def test_tokens_are_counted_by_the_best_witness(events: list[bytes], tokens: int) -> None:
    assert read_stream(0.0, [(1.0, b"".join(events))], max_tokens=8).tokens == tokens


def test_a_stream_that_fails_or_says_nothing_is_no_measurement() -> None:
    with pytest.raises(LoadError, match="on fire"):
        read_stream(0.0, [(1.0, b'data: {"error": {"message": "on fire"}}\n\n')], max_tokens=8)
    with pytest.raises(LoadError, match="without any text"):
        read_stream(0.0, [(1.0, b"data: [DONE]\n\n")], max_tokens=8)


async def test_streams_are_read_from_a_real_server() -> None:
    app, _ = scripted_app(ScriptedEngine(toy_codec(), Script(text="well", endless=True)))
    async with running_server(app) as url:
        target = Target("ours", url, app.state.service.model_names[0])
        answers, seconds = await target.streams(["one", "two"], 6)

    assert [answer.text for answer in answers] == ["wellwe", "wellwe"]
    assert [answer.tokens for answer in answers] == [6, 6]
    assert min(answer.writes for answer in answers) >= 6
    assert 0 < answers[0].ttft_s <= seconds


async def test_a_refusal_is_told_with_the_servers_words() -> None:
    app, _ = scripted_app()
    async with running_server(app) as url:
        with pytest.raises(LoadError, match="404.*no-such-model"):
            await Target("ours", url, "no-such-model").stream("one", 6)


async def test_a_call_is_read_by_its_arguments() -> None:
    text = '<tool_call>{"name": "dig", "arguments": {"feet": 12}}</tool_call>'
    app, _ = scripted_app(ScriptedEngine(toy_codec(), Script(text=text)))
    tool = {"type": "function", "function": {"name": "dig", "parameters": {"type": "object"}}}
    async with running_server(app) as url:
        target = Target("ours", url, app.state.service.model_names[0])
        body = target.chat_body("dig", 90) | {"tools": [tool], "ignore_eos": False}
        answer = await target.post("/v1/chat/completions", body, 90)

    assert (answer.text, answer.finish_reason) == ('{"feet": 12}', "tool_calls")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_streams_are_read_over_a_socket(path: str) -> None:
    app, _ = scripted_app(ScriptedEngine(toy_codec(), Script(text="well", endless=True)))
    async with running_server(app) as url:
        target = Target("ours", url, app.state.service.model_names[0])
        if path == "/v1/responses":
            message = {"type": "response.create", "input": "one", "max_output_tokens": 16}
            answer = await stream_over_socket(target, path, message, b'"response.incomplete"', 16)
        else:
            answer = await stream_over_socket(target, path, target.chat_body("one", 16), b"[DONE]", 16)

    assert answer.text == "well" * 4
    assert answer.writes > len(answer.texts) == 16
    assert answer.sent < answer.arrivals[0] <= answer.arrivals[-1]


async def test_a_refused_handshake_or_request_is_told() -> None:
    app, _ = scripted_app()
    async with running_server(app) as url:
        target = Target("ours", url, "no-such-model")
        with pytest.raises(LoadError, match="handshake was answered 4"):
            await stream_over_socket(target, "/v1/nothing", {}, b"[DONE]", 6)
        with pytest.raises(LoadError, match="no-such-model"):
            body = target.chat_body("one", 6)
            await stream_over_socket(target, "/v1/chat/completions", body, b"[DONE]", 6)
