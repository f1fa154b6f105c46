"""The load generator, on canned bodies and on our own server with a scripted engine."""

import json
from typing import Any

import pytest
from http_server import running_server, scripted_app
from scripted_engine import Script, ScriptedEngine, toy_codec

from artesian.clients.bench.load import LoadError, Target, read_stream


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
