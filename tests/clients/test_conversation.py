"""A terminal conversation against a scripted server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from artesian.clients.conversation import ChatError, Conversation, first_model


class Script(httpx.BaseTransport):
    """Answers turns with the given bodies, in order, and keeps what was asked."""

    def __init__(self, *answers: Callable[[], httpx.Response]) -> None:
        self.answers, self.asked = list(answers), list[dict[str, Any]]()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(json.loads(request.read() or b"{}"))
        return self.answers.pop(0)()


def _stream(*pieces: str, last: str = "data: [DONE]\n\n") -> Callable[[], httpx.Response]:
    events = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
    text = ": keep-alive\n\n" + "".join(f"data: {json.dumps(event)}\n\n" for event in events) + last
    return lambda: httpx.Response(200, text=text)


def _talk(*answers: Callable[[], httpx.Response], **options: Any) -> tuple[Conversation, Script]:
    script = Script(*answers)
    return Conversation(httpx.Client(transport=script, base_url="http://test"), "m", **options), script


def test_an_answer_is_shown_piece_by_piece_and_remembered() -> None:
    talk, script = _talk(_stream("Hel", "lo"), _stream("Bye"), system="Be brief.", options={"seed": 1})
    shown: list[str] = []
    talk.say("Hi", shown.append)
    talk.say("And?", shown.append)
    assert shown == ["Hel", "lo", "Bye"]
    assert script.asked[1] == {
        "model": "m", "stream": True, "seed": 1,
        "messages": [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "And?"},
        ],
    }  # fmt: skip


def test_a_cancelled_answer_keeps_what_was_shown_and_leaves_the_server() -> None:
    closed: list[bool] = []

    class Endless(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            while True:
                yield b'data: {"choices": [{"delta": {"content": "on "}}]}\n\n'

        def close(self) -> None:
            closed.append(True)

    talk, _ = _talk(lambda: httpx.Response(200, stream=Endless()))

    def interrupt_second(piece: str, seen: list[str] = []) -> None:  # noqa: B006 - counts its calls
        seen.append(piece)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.say("Go", interrupt_second)
    assert talk.messages[-1] == {"role": "assistant", "content": "on "}
    assert closed == [True]


def test_a_reset_keeps_only_the_system_message() -> None:
    talk, _ = _talk(_stream("x"), system="S")
    talk.say("Hi", lambda piece: None)
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "S"}]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda: httpx.Response(400, json={"error": {"message": "too long"}}), "too long"),
        (lambda: httpx.Response(502, text="bad gateway"), "bad gateway"),
        (_stream(last='data: {"error": {"message": "step failed"}}\n\n'), "step failed"),
    ],
)
def test_a_refused_turn_is_told_and_forgotten(answer: Callable[[], httpx.Response], message: str) -> None:
    talk, _ = _talk(answer)
    with pytest.raises(ChatError, match=message):
        talk.say("Hi", lambda piece: None)
    assert talk.messages == []


def test_the_servers_first_model_is_used() -> None:
    listing = httpx.Response(200, json={"data": [{"id": "a"}, {"id": "b"}]})
    client = httpx.Client(transport=Script(lambda: listing), base_url="http://test")
    assert first_model(client) == "a"


def test_no_server_is_one_clear_error() -> None:
    with pytest.raises(ChatError, match="no server at http://127.0.0.1:9"):
        first_model(httpx.Client(base_url="http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(401, json={"error": {"message": "No API key."}}), "answers 401: No API key."),
        (httpx.Response(200, html="<html>"), "no model at http://test"),
        (httpx.Response(200, json={"data": []}), "no model at http://test"),
    ],
)
def test_a_server_that_names_no_model_is_one_clear_error(answer: httpx.Response, message: str) -> None:
    client = httpx.Client(transport=Script(lambda: answer), base_url="http://test")
    with pytest.raises(ChatError, match=message):
        first_model(client)
