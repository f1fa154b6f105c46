"""A stand-in for a download server: files by path, byte ranges, entity tags, and connections that break."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@dataclass(slots=True)
class FileServer:
    """What the server holds, and what it saw."""

    files: dict[str, bytes] = field(default_factory=dict)
    content_type: str = "application/octet-stream"
    types: dict[str, str] = field(default_factory=dict)
    """Content types that differ from `content_type`, by path."""
    headers: dict[str, str] = field(default_factory=dict)
    """More headers of every answer."""
    etag: str = '"v1"'
    break_after: list[int] = field(default_factory=list)
    """Body bytes after which the next connections break, one entry a connection."""
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """(path, headers with lower-case names)."""
    url: str = ""

    def ranges(self) -> list[str | None]:
        return [headers.get("range") for _, headers in self.requests]


@contextmanager
def serving(server: FileServer) -> Iterator[FileServer]:
    """Serve on a free loopback port until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            server.requests.append((self.path, headers))
            body = server.files.get(self.path)
            if body is None:
                self.send_error(404)
                return
            start = 0
            wanted = re.fullmatch(r"bytes=(\d+)-", headers.get("range", ""))
            if wanted and headers.get("if-range", server.etag) == server.etag:
                start = int(wanted[1])
                if start >= len(body):
                    self.send_error(416)
                    return
            self.send_response(206 if start else 200)
            self.send_header("Content-Type", server.types.get(self.path, server.content_type))
            self.send_header("Content-Length", str(len(body) - start))
            for name, value in {"ETag": server.etag, **server.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                end = start + server.break_after.pop(0) if server.break_after else len(body)
                self.wfile.write(body[start:end])
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        server.url = f"http://127.0.0.1:{http.server_port}"
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
