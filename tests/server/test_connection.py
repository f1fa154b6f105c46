"""Real sockets: slow, silent, leaving and odd clients."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from http_server import running_server, scripted_app
from scripted_engine import Script, ScriptedEngine, toy_codec

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


def engine_of(script: Script, **options: Any) -> ScriptedEngine:
    return ScriptedEngine(toy_codec(), script, **options)


def request_bytes(body: dict[str, Any], *, path: str = CHAT, version: str = "1.1", extra: str = "") -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n{extra}"
        f"content-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class Socket:
    """A client by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, url: str, *, receive_bytes: int | None = None) -> Socket:
        host, port = url.removeprefix("http://").split(":")
        sock = socket.socket()
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        return cls(*await asyncio.open_connection(sock=sock))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def read_until(self, mark: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(mark), 5)

    async def read_all(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), 10)

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            pass


async def until(condition: Callable[[], bool], within_s: float = 2.0) -> float:
    """Wait for it to hold; the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, "it never came to hold"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


SLOW = Script(text="abc", endless=True, step_s=0.01)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("script", "slots", "state"),
    [
        (SLOW, 8, "decoding"),
        (Script(prefill_s=60), 8, "in prefill"),
        (SLOW, 0, "queued"),
    ],
)
@pytest.mark.parametrize("half", [False, True])
async def test_a_client_that_leaves_frees_its_request_at_once(
    path: str, stream: bool, script: Script, slots: int, state: str, half: bool
) -> None:
    app, engine = scripted_app(engine_of(script, slots=slots))
    body = {"messages": HELLO} if path == CHAT else {"prompt": ["a", "b"], "max_tokens": 1000}
    async with running_server(app) as url:
        client = await Socket.open(url)
        await client.send(request_bytes({**body, "stream": stream}, path=path))
        await until(lambda: bool(engine.requests))
        if stream:
            await client.read_until(b"\r\n\r\n")
        if state == "decoding":
            await until(lambda: engine.steps > 3)
        if half:
            client.writer.write_eof()
        else:
            client.writer.transport.abort()
        await until(lambda: engine.status().running + engine.status().waiting == 0, within_s=1.0)
        steps = engine.steps
        await asyncio.sleep(0.05)
        assert engine.steps == steps
        assert len(engine.aborted) == len(engine.requests)
        await client.close()
        await until(lambda: app.state.service.telemetry.disconnects == 1)


async def test_headers_of_a_stream_come_before_the_prefill_ends() -> None:
    app, _ = scripted_app(engine_of(Script(prefill_s=60)))
    async with running_server(app) as url:
        client = await Socket.open(url)
        await client.send(request_bytes({"messages": HELLO, "stream": True}))
        head = await client.read_until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        await client.close()


async def test_keep_alive_is_a_bare_comment_between_events() -> None:
    app, _ = scripted_app(
        engine_of(Script(text="ab", prefill_s=0.35, step_s=0.25)), keep_alive_interval_s=0.1
    )
    async with running_server(app) as url, httpx.AsyncClient(base_url=url) as client:
        text = (await client.post(CHAT, json={"messages": HELLO, "stream": True})).text
    assert text.startswith(": keep-alive\n")
    assert text.count(": keep-alive\n") >= 4
    rest = text.replace(": keep-alive\n", "")
    assert all(block.startswith("data: ") for block in rest.split("\n\n")[:-1])
    assert "id:" not in rest.replace('"id":', "")


async def test_all_events_of_a_step_are_one_write() -> None:
    app, _ = scripted_app(engine_of(Script(text="abc", tokens_per_step=3)))
    writes: list[bytes] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            writes.append(message["body"])

    data = json.dumps({"messages": HELLO, "stream": True, "n": 4}).encode()
    received = False

    async def receive() -> dict[str, Any]:
        nonlocal received
        if received:
            await asyncio.Event().wait()
        received = True
        return {"type": "http.request", "body": data}

    scope = {
        "type": "http", "method": "POST", "path": CHAT, "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json")], "http_version": "1.1",
    }  # fmt: skip
    async with app.router.lifespan_context(app):
        await app(scope, receive, send)
    assert [write.count(b"data: ") for write in writes] == [8, 4, 1, 0]


async def test_slow_heads_are_cut_at_the_deadline() -> None:
    app, _ = scripted_app()
    async with running_server(app, header_timeout_s=0.3) as url:
        client = await Socket.open(url)
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            for byte in b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: " + b"y" * 100:
                await client.send(bytes([byte]))
                await asyncio.sleep(0.02)
        assert 0.2 < time.monotonic() - began < 1.5
        await client.close()


async def test_half_a_head_is_answered_408_and_a_silent_connection_closed() -> None:
    app, _ = scripted_app()
    async with running_server(app, header_timeout_s=0.2) as url:
        half, silent = await Socket.open(url), await Socket.open(url)
        await half.send(b"GET /health HTTP/1.1\r\nhost:")
        answer = await half.read_all()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"x-request-id: req_" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"
        assert await silent.read_all() == b""
        await half.close()
        await silent.close()


@pytest.mark.parametrize("path", ["/tokenize", "/health"])
async def test_a_body_that_does_not_come_is_cut_at_the_deadline(path: str) -> None:
    app, _ = scripted_app()
    async with running_server(app, body_timeout_s=0.2) as url:
        client = await Socket.open(url)
        await client.send(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n".encode())
        answer = await client.read_all()
        assert answer.startswith(b"HTTP/1.1 408 " if path == "/tokenize" else b"HTTP/1.1 405 ")
        assert answer.count(b"HTTP/1.1 ") == 1
        await client.close()


async def test_a_dripping_body_is_cut_at_the_deadline() -> None:
    app, _ = scripted_app()
    async with running_server(app, body_timeout_s=0.3) as url:
        client = await Socket.open(url)
        await client.send(b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            for _ in range(100):
                await client.send(b"x")
                await asyncio.sleep(0.02)
        assert time.monotonic() - began < 1.5
        await client.close()


async def test_long_streams_and_idle_connections_outlive_the_deadlines() -> None:
    app, engine = scripted_app(engine_of(Script(text="x" * 30, step_s=0.03)))
    async with running_server(app, header_timeout_s=0.2, body_timeout_s=0.2, send_timeout_s=0.2) as url:
        client = await Socket.open(url)
        await client.send(request_bytes({"messages": HELLO, "stream": True}))
        # Half a head behind the running stream: the client may be early, the stream must not suffer.
        await client.send(b"GET /health HT")
        body = await client.read_until(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert body.count(b'"content":"x"') == 30
        await client.send(b"TP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.read_until(b"}")).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.4)
        await client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.read_until(b"}")).startswith(b"HTTP/1.1 200")
        assert not engine.aborted
        await client.close()


@pytest.mark.parametrize("in_one_write", [True, False])
async def test_a_head_over_the_limit_is_431(in_one_write: bool) -> None:
    app, _ = scripted_app()
    async with running_server(app, max_header_bytes=4096) as url:
        client = await Socket.open(url)
        head = b"GET /health HTTP/1.1\r\nhost: x\r\nx-big: " + b"y" * 1_000_000 + b"\r\n\r\n"
        try:
            if in_one_write:
                await client.send(head[:6000] + b"\r\n\r\n")
            else:
                for at in range(0, len(head), 1000):
                    await client.send(head[at : at + 1000])
                    await asyncio.sleep(0)
        except ConnectionError:
            pass
        try:
            assert (await client.read_all()).startswith(b"HTTP/1.1 431 ")
        except ConnectionError:
            assert not in_one_write  # the kernel drops an answer when the client still writes
        await client.close()


async def test_bytes_that_are_no_http_are_400() -> None:
    app, _ = scripted_app()
    async with running_server(app) as url:
        client = await Socket.open(url)
        await client.send(b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
        answer = await client.read_all()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
        await client.close()


async def test_a_client_that_reads_nothing_is_dropped_and_the_others_live() -> None:
    app, engine = scripted_app(engine_of(Script(text="x" * 2000, endless=True, tokens_per_step=100)))
    large = {"messages": HELLO, "stream": True, "logprobs": True, "top_logprobs": 20}
    async with running_server(app, send_timeout_s=0.3) as url:
        frozen = [await Socket.open(url, receive_bytes=4096) for _ in range(5)]
        for client in frozen:
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await client.send(request_bytes(large))
        await until(lambda: len(engine.requests) == 5)
        async with httpx.AsyncClient(base_url=url) as alive:
            answer = await alive.post(CHAT, json={"messages": HELLO, "max_tokens": 5})
            assert answer.status_code == 200
        await until(lambda: engine.status().running == 0, within_s=20)
        assert len(engine.aborted) == 5
        for client in frozen:
            client.writer.transport.abort()


@pytest.mark.parametrize("stream", [True, False])
async def test_http_1_0_gets_an_unchunked_answer_and_a_close(stream: bool) -> None:
    app, _ = scripted_app()
    async with running_server(app) as url:
        client = await Socket.open(url)
        await client.send(request_bytes({"messages": HELLO, "stream": stream}, version="1.0"))
        head, _, body = (await client.read_all()).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert head.lower().count(b"connection:") == 1
        if stream:
            assert body.startswith(b"data: ") and body.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(body)["object"] == "chat.completion"
        await client.close()


async def test_expect_100_continue_is_answered_before_the_body() -> None:
    app, _ = scripted_app()
    data = json.dumps({"messages": HELLO}).encode()
    async with running_server(app) as url:
        client = await Socket.open(url)
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"expect: 100-continue\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        await client.send(head.encode())
        assert await client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(data)
        assert (await client.read_until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await client.close()


async def test_a_chunked_upload_is_read_and_bounded() -> None:
    app, _ = scripted_app(max_body_bytes=1000)

    async def chunks(data: bytes) -> Any:
        for at in range(0, len(data), 7):
            yield data[at : at + 7]

    headers = {"content-type": "application/json"}
    async with running_server(app) as url, httpx.AsyncClient(base_url=url) as client:
        small, large = [
            await client.post(CHAT, headers=headers, content=chunks(json.dumps(body).encode()))
            for body in ({"messages": HELLO}, {"messages": HELLO, "user": "x" * 5000})
        ]
    assert (small.status_code, large.status_code) == (200, 413)


async def test_pipelined_requests_are_answered_in_order() -> None:
    app, _ = scripted_app()
    async with running_server(app) as url:
        client = await Socket.open(url)
        bodies = [{"messages": HELLO, "max_tokens": count} for count in (1, 2, 3)]
        await client.send(b"".join(request_bytes(body) for body in bodies))
        counts = []
        for _ in bodies:
            head = await client.read_until(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            answer = json.loads(await client.reader.readexactly(length))
            counts.append(answer["usage"]["completion_tokens"])
        assert counts == [1, 2, 3]
        await client.close()


async def test_a_websocket_upgrade_elsewhere_is_refused_at_once() -> None:
    app, _ = scripted_app()
    async with running_server(app) as url:
        client = await Socket.open(url)
        await client.send(
            b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
        )
        assert (await client.read_until(b"\r\n\r\n")).startswith(b"HTTP/1.1 403")
        await client.close()


async def test_a_request_that_offers_an_upgrade_is_served_as_it_is_with_its_body() -> None:
    app, _ = scripted_app()
    offer = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQ\r\n"
    data = request_bytes({"messages": HELLO}, extra=offer)
    leave = request_bytes({"messages": HELLO}, extra="connection: upgrade, close\r\nupgrade: h2c\r\n")
    async with running_server(app) as url:
        client = await Socket.open(url)
        for packet in (data, data[:100], data[100:] + data + leave):
            await client.send(packet)
            await asyncio.sleep(0.02)
        answers = await client.read_all()
        assert answers.count(b"HTTP/1.1 200 OK\r\n") == answers.count(b"HTTP/1.1 ") == 4
        await client.close()


async def test_a_tunnel_is_refused() -> None:
    app, _ = scripted_app()
    async with running_server(app) as url:
        client = await Socket.open(url)
        await client.send(b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n\x16\x03\x01")
        assert (await client.read_all()).startswith(b"HTTP/1.1 400 ")
        await client.close()


async def test_the_begin_of_a_next_head_behind_a_large_body_is_not_over_the_limit() -> None:
    app, _ = scripted_app()
    second = request_bytes({"messages": HELLO}, extra="connection: close\r\n")
    async with running_server(app, max_header_bytes=4096) as url:
        client = await Socket.open(url)
        await client.send(request_bytes({"messages": HELLO, "user": "x" * 20_000}) + second[:40])
        await asyncio.sleep(0.1)
        await client.send(second[40:])
        assert (await client.read_all()).count(b"HTTP/1.1 200") == 2
        await client.close()


async def test_trailers_are_no_headers() -> None:
    app, _ = scripted_app(api_keys=("secret",))
    async with running_server(app) as url:
        client = await Socket.open(url)
        head = (
            b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        await client.send(head + b"0\r\nx-api-key: secret\r\n\r\n")
        assert (await client.read_all()).startswith(b"HTTP/1.1 401")
        await client.close()


async def test_five_hundred_aborts_at_random_times_leak_nothing() -> None:
    app, engine = scripted_app(engine_of(Script(text="x" * 40, step_s=0.002), slots=20))
    async with running_server(app) as url:

        async def one(i: int) -> None:
            client = await Socket.open(url)
            body = {"messages": HELLO, "stream": i % 2 == 0, "n": 1 + i % 3}
            await client.send(request_bytes(body))
            await asyncio.sleep((i * 7919 % 100) / 1000)
            client.writer.transport.abort()

        for wave in range(10):
            await asyncio.gather(*[one(wave * 50 + i) for i in range(50)])
        await until(lambda: engine.status().running + engine.status().waiting == 0)
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.post(CHAT, json={"messages": HELLO})).status_code == 200
    assert engine.aborted


async def test_an_overfull_queue_refuses_at_once_and_finishes_the_rest() -> None:
    app, _ = scripted_app(engine_of(Script(text="abc", step_s=0.01), slots=4, queue_limit=12))
    async with running_server(app) as url:
        limits = httpx.Limits(max_connections=300)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=20) as client:
            posts = [client.post(CHAT, json={"messages": HELLO}) for _ in range(100)]
            answers = await asyncio.gather(*posts)
    refused = [answer for answer in answers if answer.status_code == 503]
    assert 0 < len(refused) <= 100 - 12
    assert all(answer.json()["error"]["code"] == "server_overloaded" for answer in refused)
    assert {answer.status_code for answer in answers} == {200, 503}
