"""Load on any server that speaks OpenAI's protocols over HTTP/1.1: streams, and when their tokens came.

While an answer streams it only notes bytes and times; what they say is read afterwards, so that the client
takes little from a server on the same cores.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools
import httpx
import msgspec

READ_TIMEOUT_S = 600.0


class LoadError(OSError):
    """A server did not answer as a completion stream should; says what it did."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """One streamed answer. Times are of `time.perf_counter`."""

    sent: float
    arrivals: list[float]
    """When each event that carries text arrived."""
    texts: list[str]
    """Of those events."""
    finish_reason: str
    tokens: int
    """The server's count if it tells it, else `max_tokens` if it was reached, else one per event."""
    writes: int
    """HTTP chunks of the body: how often the server wrote."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def ttft_s(self) -> float:
        """From sending the request, on an open connection, to the first text."""
        return self.arrivals[0] - self.sent

    @property
    def decode_tokens_per_s(self) -> float:
        """Of the tokens after the first."""
        return (self.tokens - 1) / (self.arrivals[-1] - self.arrivals[0])


@dataclass(frozen=True, slots=True)
class Target:
    """A server's base URL, without /v1, and the model to ask for."""

    name: str
    url: str
    model: str

    @classmethod
    def find(cls, name: str, url: str) -> Target:
        """Ask a server for the name of its first model."""
        base = url.rstrip("/").removesuffix("/v1")
        answer = httpx.get(f"{base}/v1/models", timeout=30.0).raise_for_status().json()
        return cls(name, base, answer["data"][0]["id"])

    def body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        """A greedy completion that does not end early where the server can be told so."""
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }

    def stream_body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        """The same, streamed, with token counts at the end."""
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return self.body(prompt, max_tokens) | streamed

    def chat_body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        """The same as a chat of one message."""
        body = self.stream_body(prompt, max_tokens)
        return {"messages": [{"role": "user", "content": body.pop("prompt")}], **body}

    def prompt_tokens(self, prompt: str) -> int:
        """The server's own count of a prompt's tokens."""
        answer = httpx.post(
            f"{self.url}/v1/completions", json=self.body(prompt, 1), timeout=READ_TIMEOUT_S
        ).raise_for_status()
        count: int = answer.json()["usage"]["prompt_tokens"]
        return count

    async def stream(self, prompt: str, max_tokens: int) -> Streamed:
        """Stream one completion; see `post`."""
        return await self.post("/v1/completions", self.stream_body(prompt, max_tokens), max_tokens)

    async def post(self, path: str, body: Mapping[str, Any], max_tokens: int) -> Streamed:
        """Stream one answer, on a connection of its own that is opened before the clock starts.

        Raises:
            LoadError: no answer, another status than 200, an error in the stream, no text.
        """
        parts = urlsplit(self.url)
        is_tls = parts.scheme == "https"
        transport, exchange = await asyncio.get_running_loop().create_connection(
            _Exchange, parts.hostname or "", parts.port or (443 if is_tls else 80), ssl=is_tls or None
        )
        try:
            payload = msgspec.json.encode(body)
            head = (
                f"POST {parts.path}{path} HTTP/1.1\r\nhost: {parts.netloc}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
            )
            sent = time.perf_counter()
            transport.write(head.encode() + payload)
            async with asyncio.timeout(READ_TIMEOUT_S):
                await exchange.complete
        finally:
            transport.abort()
        if exchange.status != 200:
            answer = b"".join(data for _, data in exchange.pieces)[:300].decode(errors="replace")
            raise LoadError(f"{self.name} answered {exchange.status}: {answer}")
        return read_stream(sent, exchange.pieces, max_tokens, exchange.writes)

    async def streams(self, prompts: Sequence[str], max_tokens: int) -> tuple[list[Streamed], float]:
        """Stream all at once; return the answers, and the seconds until the last of them had ended."""
        started = time.perf_counter()
        answers = await asyncio.gather(*(self.stream(prompt, max_tokens) for prompt in prompts))
        return answers, max(answer.arrivals[-1] for answer in answers) - started


def read_stream(
    sent: float, pieces: Iterable[tuple[float, bytes]], max_tokens: int, writes: int = 0
) -> Streamed:
    """Read the pieces of a body, each with its time of arrival, as server-sent events.

    Raises:
        LoadError: an error event, or no text at all.
    """
    return read_events(sent, _payloads(pieces), max_tokens, writes)


def read_events(sent: float, events: Iterable[tuple[float, bytes]], max_tokens: int, writes: int) -> Streamed:
    """Read the JSON of events, each with its time of arrival: completions, chat chunks or Responses.

    Raises:
        LoadError: an error event, or no text at all.
    """
    arrivals: list[float] = []
    texts: list[str] = []
    finish_reason, counted = "", 0
    for arrived, payload in events:
        if payload == b"[DONE]":
            continue
        event = msgspec.json.decode(payload)
        if "error" in event:
            raise LoadError(f"the stream failed: {event['error']}")
        if event.get("usage"):
            counted = event["usage"]["completion_tokens"]
        for choice in event.get("choices", ()):
            finish_reason = choice.get("finish_reason") or finish_reason
        for text in _texts(event):
            texts.append(text)
            arrivals.append(arrived)
    if not arrivals:
        raise LoadError("the stream ended without any text")
    tokens = counted or (max_tokens if finish_reason == "length" else len(arrivals))
    return Streamed(sent, arrivals, texts, finish_reason, tokens, writes)


def _payloads(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    rest = b""
    for arrived, data in pieces:
        *lines, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield arrived, line[5:].strip()


def _texts(event: dict[str, Any]) -> Iterator[str]:
    """What an event adds to an answer, be it text or the arguments of a call."""
    if event.get("type") == "response.output_text.delta":
        yield event["delta"]
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {}
        pieces = [choice.get("text"), delta.get("content")]
        pieces += [call["function"].get("arguments") for call in delta.get("tool_calls", ())]
        yield from filter(None, pieces)


class _Exchange(asyncio.Protocol):
    """One answer on one connection: its status, and the pieces of its body as they come."""

    def __init__(self) -> None:
        self.complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pieces: list[tuple[float, bytes]] = []
        self.status = self.writes = 0
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_chunk_header(self) -> None:
        self.writes += 1

    def on_body(self, body: bytes) -> None:
        self.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        if not self.complete.done():
            self.complete.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.complete.done():
            self.complete.set_exception(exc or LoadError("the server closed the connection early"))
