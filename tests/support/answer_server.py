"""An HTTP server that gives the answers it is told, in their order, and notes what it was asked.

Tests in this process use `AnswerServer`; those in other languages tell it over HTTP: POST /script with a list
of answers, GET /requests for what came since.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import msgspec


class Answer(msgspec.Struct, kw_only=True):
    """One answer: a JSON body, or pieces of a body that are sent one by one."""

    status: int = 200
    headers: dict[str, str] = {}
    body: Any = None
    pieces: list[str] | None = None
    pause_s: float = 0.0
    """Before the answer, or before each piece; ends early when the server stops."""
    drop: bool = False
    """Close the connection instead of an answer; behind the pieces, if there are some."""


class Seen(msgspec.Struct):
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any = None
    left: bool = False
    """The client closed the connection before all was written."""


def events(*chunks: dict[str, Any], done: bool = True) -> Answer:
    """A stream of chat chunks; those without an id get one."""
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    pieces = [f"data: {json.dumps({**base, **chunk})}\n\n" for chunk in chunks]
    return Answer(pieces=[*pieces, "data: [DONE]\n\n"] if done else pieces)


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """A chunk that adds to choice 0."""
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def call_deltas(*calls: tuple[str, str, str]) -> list[dict[str, Any]]:
    """The chunks of an answer that calls tools: (id, name, arguments), the arguments cut in two."""
    chunks = []
    for index, (call_id, name, arguments) in enumerate(calls):
        half = len(arguments) // 2
        first = {"name": name, "arguments": arguments[:half]}
        begin = {"index": index, "id": call_id, "type": "function", "function": first}
        rest = {"index": index, "function": {"arguments": arguments[half:]}}
        chunks += [delta(tool_calls=[begin]), delta(tool_calls=[rest])]
    return [*chunks, delta("tool_calls")]


class AnswerServer:
    """Serves on a free port while it is entered."""

    def __init__(self, *answers: Answer) -> None:
        self.answers: deque[Answer] = deque(answers)
        self.seen: list[Seen] = []
        self.stopped = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(0.02), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def bodies(self) -> list[Any]:
        return [seen.body for seen in self.seen]

    def script(self, answers: Sequence[Answer]) -> None:
        """Answer like this from now on, and forget what was asked."""
        self.answers, self.seen = deque(answers), []

    def __enter__(self) -> AnswerServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        scene = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_OPTIONS(self) -> None:
                self._reply(Answer(status=204))

            def do_DELETE(self) -> None:
                self.do_POST()

            def do_GET(self) -> None:
                if self.path == "/requests":
                    self._reply(Answer(body=msgspec.to_builtins(scene.seen)))
                else:
                    self.do_POST()

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("content-length", "0")))
                body = json.loads(data) if data else None
                if self.path == "/script":
                    scene.script(msgspec.convert(body, list[Answer]))
                    self._reply(Answer(body={}))
                    return
                headers = {name.lower(): value for name, value in self.headers.items()}
                seen = Seen(self.command, self.path, headers, body)
                scene.seen.append(seen)
                answer = scene.answers.popleft() if scene.answers else Answer(status=404, body={})
                try:
                    self._reply(answer)
                except OSError:
                    seen.left = True
                    self.close_connection = True

            def _reply(self, answer: Answer) -> None:
                if answer.pieces is None:
                    scene.stopped.wait(answer.pause_s)
                if answer.drop and answer.pieces is None:
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                self.send_header("x-request-id", f"req_{len(scene.seen)}")
                self.send_header("access-control-allow-origin", "*")
                self.send_header("access-control-allow-headers", "*, authorization")
                self.send_header("access-control-expose-headers", "*")
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                if answer.pieces is None:
                    data = b"" if answer.status == 204 else json.dumps(answer.body).encode()
                    self.send_header("content-length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                    return
                self.close_connection = True
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for piece in answer.pieces:
                    scene.stopped.wait(answer.pause_s)
                    self._chunk(piece.encode())
                if not answer.drop:
                    self._chunk(b"")

            def _chunk(self, data: bytes) -> None:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

        return Handler
