"""One call of the Python SDK: what is sent, retried, raised and returned."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from answer_server import Answer, AnswerServer

from artesian.clients.python import (
    APIConnectionError,
    APIResponseError,
    APIStatusError,
    APITimeoutError,
    AsyncClient,
    AuthenticationError,
    BadRequestError,
    Client,
    ConflictError,
    InternalServerError,
    NotFoundError,
    RateLimitError,
    RetryPolicy,
    ServiceUnavailableError,
    UnprocessableEntityError,
)

HELLO = [{"role": "user", "content": "hi"}]
ANSWER = Answer(
    body={
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello", "future": 1},
                     "finish_reason": "stop", "logprobs": None}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11,
                  "prompt_tokens_details": {"cached_tokens": 4}},
        "prompt_cache_diagnostics": {"type": "cache_hit", "cached_tokens": 4, "sources": {"disk": 4}},
    }
)  # fmt: skip


@pytest.fixture
def server() -> Iterator[AnswerServer]:
    with AnswerServer() as server:
        yield server


class Waits(list[float]):
    """A sleep that notes how long it would have been."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


def client_of(server: AnswerServer, **options: Any) -> Client:
    return Client(server.url, sleep=options.pop("sleep", Waits()), **options)


def full(**headers: str) -> Answer:
    return Answer(
        status=503, headers=headers, body={"error": {"message": "full", "code": "server_overloaded"}}
    )


def test_an_answer_is_typed_and_has_its_request_id_and_diagnostics(server: AnswerServer) -> None:
    server.script([ANSWER])
    with client_of(server) as client:
        answer = client.chat.create(HELLO, model="m", temperature=0, extra_body={"top_k": 3})
    assert (answer.text, answer.finish_reason, answer.request_id) == ("Hello", "stop", "req_1")
    assert answer.usage is not None and answer.usage.cached_tokens == 4
    diagnostics = answer.prompt_cache_diagnostics
    assert diagnostics is not None and diagnostics.is_hit and diagnostics.sources == {"disk": 4}
    assert server.bodies() == [{"messages": HELLO, "model": "m", "temperature": 0, "top_k": 3}]


def test_a_message_of_an_answer_may_be_sent_back(server: AnswerServer) -> None:
    server.script([ANSWER, ANSWER])
    with client_of(server) as client:
        message = client.chat.create(HELLO).message
        client.chat.create([*HELLO, message, {"role": "user", "content": "more"}])
    assert server.bodies()[1]["messages"][1] == {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_address_may_be_the_servers_or_the_apis(server: AnswerServer, suffix: str) -> None:
    server.script([ANSWER])
    with Client(server.url + suffix, api_key="secret") as client:
        client.chat.create(HELLO, idempotency_key="once")
    seen = server.seen[0]
    assert seen.path == "/v1/chat/completions"
    assert (seen.headers["authorization"], seen.headers["idempotency-key"]) == ("Bearer secret", "once")


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:01:40 GMT"}, 10.0),
        ({"retry-after": "soon"}, 0.5),
        ({}, 0.5),
    ],
)
def test_a_refused_request_waits_as_long_as_it_is_told(
    server: AnswerServer, headers: dict[str, str], wait_s: float
) -> None:
    server.script([full(**headers), ANSWER])
    waits = Waits()
    policy = RetryPolicy(uniform=lambda: 0.0, now=lambda: 90.0)
    with client_of(server, sleep=waits, retry=policy) as client:
        assert client.chat.create(HELLO).text == "Hello"
    assert list(waits) == pytest.approx([wait_s])


def test_waits_grow_and_vary_but_stay_below_the_cap() -> None:
    policy = RetryPolicy(max_retries=9, uniform=lambda: 1.0)
    waits = [policy.wait_s(attempt, 500, {}) for attempt in range(10)]
    assert waits[:3] == [0.375, 0.75, 1.5] and waits[8] == 6.0 and waits[9] is None


def test_a_server_wait_is_never_cut_short_and_never_endless() -> None:
    policy = RetryPolicy(uniform=lambda: 1.0)
    assert policy.wait_s(0, 429, {"retry-after": "4"}) == 5.0
    assert policy.wait_s(0, 429, {"retry-after": "61"}) is None
    assert policy.wait_s(0, 429, {"retry-after": "-5"}) == 0.0
    assert policy.wait_s(0, 429, {"retry-after": "nan"}) == 0.375


@pytest.mark.parametrize(
    ("status", "told", "attempts"),
    [(400, None, 1), (409, None, 1), (400, "true", 3), (503, "false", 1), (408, None, 3), (500, None, 3)],
)
def test_what_is_tried_again(server: AnswerServer, status: int, told: str | None, attempts: int) -> None:
    headers = {} if told is None else {"x-should-retry": told}
    server.script([Answer(status=status, headers=headers, body={})] * 5)
    with client_of(server) as client, pytest.raises(APIStatusError):
        client.chat.create(HELLO)
    assert len(server.seen) == attempts


def test_a_call_may_have_retries_of_its_own(server: AnswerServer) -> None:
    server.script([full()] * 5)
    with client_of(server, max_retries=4) as client, pytest.raises(ServiceUnavailableError):
        client.chat.create(HELLO, max_retries=0)
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequestError), (401, AuthenticationError), (404, NotFoundError), (409, ConflictError),
        (422, UnprocessableEntityError), (429, RateLimitError), (500, InternalServerError),
        (503, ServiceUnavailableError), (502, InternalServerError), (418, APIStatusError),
    ],
)  # fmt: skip
def test_errors_have_a_type_and_say_what_the_server_said(
    server: AnswerServer, status: int, kind: type[APIStatusError]
) -> None:
    error = {"message": "no", "type": "t", "param": "messages[0]", "code": "c"}
    server.script([Answer(status=status, body={"error": error})])
    with client_of(server, max_retries=0) as client, pytest.raises(APIStatusError) as raised:
        client.chat.create(HELLO)
    assert type(raised.value) is kind
    found = raised.value
    assert (found.status, found.code, found.param, found.type) == (status, "c", "messages[0]", "t")
    assert found.request_id == "req_1" and "req_1" in str(found)


def test_a_proxys_page_is_an_error_with_its_beginning(server: AnswerServer) -> None:
    server.script([Answer(status=502, pieces=["<html>Bad Gateway" + "x" * 1000])])
    with client_of(server, max_retries=0) as client, pytest.raises(InternalServerError) as raised:
        client.chat.create(HELLO)
    assert "Bad Gateway" in str(raised.value) and len(str(raised.value)) < 300


def test_a_success_that_is_no_answer_is_an_error_of_its_own(server: AnswerServer) -> None:
    server.script([Answer(body={"choices": "none"})])
    with client_of(server) as client, pytest.raises(APIResponseError, match=r"completions.*req_1"):
        client.chat.create(HELLO)


def test_a_lost_connection_is_tried_again(server: AnswerServer) -> None:
    server.script([Answer(drop=True), ANSWER])
    with client_of(server) as client:
        assert client.chat.create(HELLO).text == "Hello"


def test_no_server_is_a_connection_error() -> None:
    with Client("http://127.0.0.1:9", max_retries=0) as client, pytest.raises(APIConnectionError):
        client.models()


def test_a_slow_answer_is_a_timeout(server: AnswerServer) -> None:
    server.script([Answer(pause_s=5)])
    with client_of(server, max_retries=0) as client, pytest.raises(APITimeoutError):
        client.chat.create(HELLO, timeout_s=0.05)


async def test_the_async_client_retries_and_raises_alike(server: AnswerServer) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    server.script([full(), Answer(drop=True), ANSWER, Answer(status=404, body={})])
    async with AsyncClient(server.url, sleep=sleep) as client:
        assert (await client.chat.create(HELLO)).text == "Hello"
        with pytest.raises(NotFoundError):
            await client.models()
    assert len(waits) == 2 and 0.375 <= waits[0] <= 0.5 and 0.75 <= waits[1] <= 1.0


async def test_a_cancelled_wait_is_over_at_once(server: AnswerServer) -> None:
    server.script([full(**{"retry-after": "50"})] * 3)
    async with AsyncClient(server.url) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.chat.create(HELLO), 0.3)
    assert len(server.seen) == 1


def test_an_http_client_of_ones_own_stays_open(server: AnswerServer) -> None:
    server.script([ANSWER, ANSWER])
    with httpx.Client() as http:
        for _ in range(2):
            with Client(server.url, http_client=http) as client:
                client.chat.create(HELLO)
    assert len(server.seen) == 2
