"""`Idempotency-Key`: one answer for one key, joined, replayed, kept apart, and let go of."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from http_server import running_server, scripted_app
from scripted_engine import Script, ScriptedEngine, toy_codec

from artesian.server import idempotency
from artesian.server.idempotency import RecordBook

PATH = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
STREAM = {**HELLO, "stream": True}
REPLAYED = "idempotent-replayed"


class Scene:
    """A server and a way to ask it."""

    def __init__(self, client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
        self.client, self.engine = client, engine

    def headers(self, key: str, api_key: str = "one") -> dict[str, str]:
        return {"idempotency-key": key, "authorization": f"Bearer {api_key}"}

    async def ask(self, key: str = "k", api_key: str = "one", **fields: Any) -> httpx.Response:
        return await self.client.post(PATH, json={**HELLO, **fields}, headers=self.headers(key, api_key))

    def stream(self, key: str = "k") -> contextlib.AbstractAsyncContextManager[httpx.Response]:
        return self.client.stream("POST", PATH, json=STREAM, headers=self.headers(key))


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    engine = ScriptedEngine(toy_codec(), Script(text="Hello world", step_s=0.01))
    app, _ = scripted_app(engine, api_keys=("one", "two"), key_requests_per_minute=6)
    async with running_server(app) as url, httpx.AsyncClient(base_url=url, timeout=20) as client:
        yield Scene(client, engine)


async def test_a_repeated_request_gets_the_same_answer_and_counts_once(scene: Scene) -> None:
    answers = [await scene.ask(temperature=1) for _ in range(9)]
    assert {answer.content for answer in answers} == {answers[0].content}
    assert [answer.headers.get(REPLAYED) for answer in answers] == [None, *["true"] * 8]
    assert ["x-ratelimit-remaining-requests" in answer.headers for answer in answers] == [True, *[False] * 8]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 9
    assert len(scene.engine.requests) == 1


async def test_a_request_joins_the_one_that_runs(scene: Scene) -> None:
    first, second = await asyncio.gather(scene.ask(), scene.ask())
    assert first.content == second.content and first.status_code == 200
    assert len(scene.engine.requests) == 1


async def test_a_stream_is_joined_in_its_middle_from_its_beginning(scene: Scene) -> None:
    async with scene.stream() as first:
        pieces = first.aiter_bytes()
        begun = await anext(pieces)
        async with scene.stream() as second:
            assert second.headers[REPLAYED] == "true"
            joined = await second.aread()
        rest = b"".join([piece async for piece in pieces])
    assert begun + rest == joined and joined.endswith(b"data: [DONE]\n\n")
    assert (await scene.ask(stream=True)).content == joined
    assert len(scene.engine.requests) == 1


async def test_another_body_is_refused_for_good(scene: Scene) -> None:
    await scene.ask()
    answer = await scene.ask(temperature=0.5)
    assert answer.status_code == 422 and answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["code"] == "idempotency_key_reused"


async def test_keys_of_different_api_keys_do_not_meet(scene: Scene) -> None:
    one, two = await scene.ask(), await scene.ask(api_key="two", temperature=0.5)
    assert one.status_code == two.status_code == 200
    assert one.json()["id"] != two.json()["id"]


@pytest.mark.parametrize("key", ["", "a b", "x" * 256])
async def test_a_key_that_is_none_is_refused(scene: Scene, key: str) -> None:
    answer = await scene.ask(key)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "Idempotency-Key"


async def test_a_refusal_is_not_kept(scene: Scene) -> None:
    scene.engine.queue_limit = 0
    assert (await scene.ask()).status_code == 503
    scene.engine.queue_limit = 9
    assert (await scene.ask()).status_code == 200


async def test_a_refusal_reaches_all_who_wait_for_it(scene: Scene) -> None:
    scene.engine.script = Script(prefill_s=0.1, fail_after=0)
    answers = await asyncio.gather(scene.ask(), scene.ask())
    assert [answer.status_code for answer in answers] == [500, 500]
    assert len(scene.engine.requests) == 1


async def test_a_stream_that_failed_is_not_kept(scene: Scene) -> None:
    scene.engine.script = Script(text="abcdef", fail_after=2)
    assert b"on fire" in (await scene.ask(stream=True)).content
    scene.engine.script = Script(text="abcdef")
    assert b"on fire" not in (await scene.ask(stream=True)).content


async def test_an_answer_survives_its_lost_connection(scene: Scene) -> None:
    async with scene.stream() as first:
        await anext(first.aiter_bytes())
    answer = await scene.ask(stream=True)
    assert answer.headers[REPLAYED] == "true" and answer.content.endswith(b"data: [DONE]\n\n")
    assert scene.engine.aborted == [] and len(scene.engine.requests) == 1


async def test_a_request_that_nobody_comes_back_for_is_ended(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "GRACE_S", 0.1)
    scene.engine.script = Script(text="x", endless=True, step_s=0.01)
    async with scene.stream() as first:
        await anext(first.aiter_bytes())
    async with asyncio.timeout(5):
        while not scene.engine.aborted:
            await scene.client.get("/health")
    assert (await scene.ask(max_tokens=1)).status_code == 200  # the key is free again


async def test_an_answer_too_long_to_keep_is_served_but_not_joined(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MAX_ANSWER_BYTES", 2000)
    monkeypatch.setattr(idempotency, "LAG_BYTES", 1000)
    scene.engine.script = Script(text="x" * 300)
    first, second = await scene.ask(stream=True), await scene.ask(stream=True)
    assert first.content.count(b'"content":"x"') == second.content.count(b'"content":"x"') == 300
    assert first.content != second.content and len(scene.engine.requests) == 2


def message(size: int) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"x" * size}


def test_the_book_has_bounds_and_lets_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "MAX_TOTAL_BYTES", 3000)
    book = RecordBook(lambda: 0.0)
    records = []
    for name in "abc":
        records.append(book.begin("", name, b""))
        book.add(records[-1], message(700))
        records[-1].finish(0.0, None)
    running = book.begin("", "d", b"")
    book.add(running, message(700))
    assert [book.find("", name) is None for name in "abcd"] == [True, False, False, False]
    book.add(running, message(1600))
    assert [book.find("", name) is None for name in "abcd"] == [True, True, True, False]
    book.add(running, message(100))
    assert book.find("", "d") is None and book.bytes == 0


def test_the_book_forgets_after_its_window() -> None:
    now = 0.0
    book = RecordBook(lambda: now)
    record = book.begin("", "a", b"")
    record.finish(now, None)
    now = idempotency.WINDOW_S
    assert book.find("", "a") is record
    now += 1
    assert book.find("", "a") is None


async def test_a_stream_that_is_taken_up_again_is_not_replayed_from_its_beginning(scene: Scene) -> None:
    body = {**STREAM, "stream_options": {"resume": True}}
    first = await scene.client.post(PATH, json=body, headers=scene.headers("k"))
    ids = re.findall(r"^id: (.+)$", first.text, re.MULTILINE)
    rest = await scene.client.post(PATH, json=body, headers=scene.headers("k") | {"last-event-id": ids[2]})
    assert rest.status_code == 200 and REPLAYED not in rest.headers
    assert [line for line in rest.text.splitlines() if line.startswith("id: ")] == [
        f"id: {i}" for i in ids[3:]
    ]
    assert len(scene.engine.requests) == 1
