"""A chat stream: bytes in, typed events out, and the whole answer at its end."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType

import httpx
import msgspec

from .errors import APIResponseError, ErrorObject, StreamError
from .events import (
    ChatEvent,
    ChoiceDone,
    ContentDelta,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallBegun,
    ToolCallDone,
    UsageReport,
)
from .sse import EventParser, ServerEvent
from .transport import connection_error
from .types import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatMessage,
    ChunkChoice,
    FunctionCall,
    Logprobs,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
)

DONE = "[DONE]"


class _Chunk(ChatChunk, kw_only=True):
    """A chunk, or the error that ends the stream."""

    id: str = ""
    model: str = ""
    created: int = 0
    error: ErrorObject | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class ChatReader:
    """Builds events and the answer from a stream's bytes. Does no input or output."""

    def __init__(self, request_id: str | None = None) -> None:
        self._request_id = request_id
        self._parser = EventParser()
        self._choices: dict[int, _Choice] = {}
        self._answer = ChatAnswer(id="", model="", created=0, request_id=request_id)
        self.is_done = False
        self.last_id = ""
        """Of the last event, where the stream can be taken up again behind it."""

    def connect(self) -> None:
        """Begin with the bytes of another connection, which goes on behind the last event."""
        self._parser = EventParser()

    def feed(self, data: bytes) -> list[ChatEvent]:
        """Return the events that these bytes complete.

        Raises:
            StreamError: the server says that it failed.
            APIResponseError: not a chat stream.
        """
        return [event for sent in self._parser.feed(data) for event in self._take(sent)]

    def answer(self) -> ChatAnswer:
        """Return what has come so far; the whole answer once `is_done`."""
        self._answer.choices = [self._choices[index].result() for index in sorted(self._choices)]
        return self._answer

    def _take(self, sent: ServerEvent) -> Iterator[ChatEvent]:
        if self.is_done:
            return
        self.last_id = sent.id or self.last_id
        if sent.data == DONE:
            self.is_done = True
            return
        try:
            chunk = _decode(sent.data)
        except msgspec.DecodeError as err:
            message = f"The stream has an event that is no chunk: {err}"
            raise APIResponseError(message, request_id=self._request_id) from err
        if (error := chunk.error) is not None:
            raise StreamError(
                error.message,
                request_id=self._request_id,
                code=error.code,
                param=error.param,
                type=error.type,
            )
        answer = self._answer
        answer.id, answer.model, answer.created = chunk.id, chunk.model, chunk.created
        answer.system_fingerprint = chunk.system_fingerprint
        answer.warnings = chunk.warnings or answer.warnings
        answer.prompt_token_ids = chunk.prompt_token_ids or answer.prompt_token_ids
        for part in chunk.choices:
            choice = self._choices.setdefault(part.index, _Choice(part.index))
            yield from choice.take(part)
        if chunk.usage is not None:
            answer.usage = chunk.usage
            answer.prompt_cache_diagnostics = chunk.prompt_cache_diagnostics
            if not chunk.choices:
                yield UsageReport(usage=chunk.usage, prompt_cache_diagnostics=chunk.prompt_cache_diagnostics)


class _Choice:
    """One choice on its way."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._refusal: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._token_ids: list[int] = []
        self._calls: dict[int, tuple[ToolCall, list[str]]] = {}
        self._open_call: int | None = None
        self._result = ChatChoice(index=index, message=ChatMessage(role="assistant"))

    def result(self) -> ChatChoice:
        message = self._result.message
        message.content = "".join(self._content) if self._content or not self._calls else None
        message.reasoning_content = "".join(self._reasoning) or None
        message.refusal = "".join(self._refusal) or None
        message.tool_calls = [self._call(index) for index in sorted(self._calls)] or None
        return self._result

    def take(self, part: ChunkChoice) -> Iterator[ChatEvent]:
        delta, result = part.delta, self._result
        result.message.role = delta.role or result.message.role
        if delta.reasoning_content:
            self._reasoning.append(delta.reasoning_content)
            yield ReasoningDelta(choice=self._index, text=delta.reasoning_content)
        if delta.content:
            self._content.append(delta.content)
            yield ContentDelta(choice=self._index, text=delta.content)
        if delta.refusal:
            self._refusal.append(delta.refusal)
        for call in delta.tool_calls or ():
            yield from self._take_call(call)
        if part.logprobs is not None and part.logprobs.content:
            self._logprobs += part.logprobs.content
            result.logprobs = Logprobs(content=self._logprobs)
        if part.token_ids:
            self._token_ids += part.token_ids
            result.token_ids = self._token_ids
        if part.finish_reason is not None:
            yield from self._end_call()
            result.finish_reason, result.stop_reason = part.finish_reason, part.stop_reason
            yield ChoiceDone(choice=self._index, finish_reason=part.finish_reason)

    def _take_call(self, delta: ToolCallDelta) -> Iterator[ChatEvent]:
        if delta.index not in self._calls:
            yield from self._end_call()
            name = delta.function.name if delta.function else None
            if not delta.id or not name:
                raise APIResponseError(f"The stream's tool call {delta.index} begins without id or name.")
            call = ToolCall(id=delta.id, function=FunctionCall(name=name))
            self._calls[delta.index] = (call, [])
            self._open_call = delta.index
            yield ToolCallBegun(choice=self._index, index=delta.index, id=call.id, name=name)
        text = delta.function.arguments if delta.function else None
        if text:
            self._calls[delta.index][1].append(text)
            yield ToolArgumentsDelta(choice=self._index, index=delta.index, text=text)

    def _end_call(self) -> Iterator[ChatEvent]:
        if self._open_call is not None:
            index, self._open_call = self._open_call, None
            yield ToolCallDone(choice=self._index, index=index, call=self._call(index))

    def _call(self, index: int) -> ToolCall:
        call, pieces = self._calls[index]
        call.function.arguments = "".join(pieces)
        return call


class ChatStream:
    """A stream to iterate over inside `with`; leaving it early ends the request in the server, unless it can
    be taken up again: then it goes on for the server's grace time."""

    def __init__(
        self,
        send: Callable[[], httpx.Response],
        reopen: Callable[[str], httpx.Response] | None = None,
        max_reconnects: int = 0,
    ) -> None:
        """`reopen` takes the id of the last event, and gives what follows it."""
        self._send, self._reopen, self._max_reconnects = send, reopen, max_reconnects
        self._response: httpx.Response | None = None
        self._reader = ChatReader()
        self._events: Iterator[ChatEvent] | None = None

    def __enter__(self) -> ChatStream:
        self._response = self._send()
        self._reader = ChatReader(self.request_id)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[ChatEvent]:
        """Yield the events.

        Raises:
            StreamError, APIResponseError: see `ChatReader`.
        """
        if self._events is None:
            self._events = self._read()
        return self._events

    @property
    def request_id(self) -> str | None:
        """The server's id of this request."""
        return self._response.headers.get("x-request-id") if self._response is not None else None

    @property
    def partial(self) -> ChatAnswer:
        """What has come so far."""
        return self._reader.answer()

    def texts(self) -> Iterator[str]:
        """Yield the pieces of the first choice's text."""
        for event in self:
            if isinstance(event, ContentDelta) and event.choice == 0:
                yield event.text

    def get_answer(self) -> ChatAnswer:
        """Read the rest, and return the whole answer."""
        for _ in self:
            pass
        return self._reader.answer()

    def close(self) -> None:
        """End the request, if it has not ended."""
        if self._response is not None:
            self._response.close()

    def interrupt(self) -> None:
        """From any thread: break the connection, so that whoever reads stops with an error."""
        network = self._response.extensions.get("network_stream") if self._response is not None else None
        connection = network.get_extra_info("socket") if network is not None else None
        if connection is not None:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # closed already

    def _read(self) -> Iterator[ChatEvent]:
        reader, failures = self._reader, 0
        while True:
            if self._response is None:
                raise RuntimeError("a stream is read inside `with`")
            before, lost = reader.last_id, None
            try:
                for data in self._response.iter_bytes():
                    yield from reader.feed(data)
            except httpx.TransportError as err:
                lost = err
            if reader.is_done:
                return
            failures = 0 if reader.last_id != before else failures + 1
            if self._reopen is None or not reader.last_id or failures > self._max_reconnects:
                raise _broken(lost, self.request_id) from lost
            self._response.close()
            self._response = self._reopen(reader.last_id)
            reader.connect()


class AsyncChatStream:
    """`ChatStream` for `async with` and `async for`."""

    def __init__(
        self,
        send: Callable[[], Awaitable[httpx.Response]],
        reopen: Callable[[str], Awaitable[httpx.Response]] | None = None,
        max_reconnects: int = 0,
    ) -> None:
        """See `ChatStream`."""
        self._send, self._reopen, self._max_reconnects = send, reopen, max_reconnects
        self._response: httpx.Response | None = None
        self._reader = ChatReader()
        self._events: AsyncGenerator[ChatEvent, None] | None = None

    async def __aenter__(self) -> AsyncChatStream:
        self._response = await self._send()
        self._reader = ChatReader(self.request_id)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncIterator[ChatEvent]:
        """See `ChatStream.__iter__`."""
        if self._events is None:
            self._events = self._read()
        return self._events

    @property
    def request_id(self) -> str | None:
        """The server's id of this request."""
        return self._response.headers.get("x-request-id") if self._response is not None else None

    @property
    def partial(self) -> ChatAnswer:
        """What has come so far."""
        return self._reader.answer()

    async def texts(self) -> AsyncIterator[str]:
        """Yield the pieces of the first choice's text."""
        async for event in self:
            if isinstance(event, ContentDelta) and event.choice == 0:
                yield event.text

    async def get_answer(self) -> ChatAnswer:
        """Read the rest, and return the whole answer."""
        async for _ in self:
            pass
        return self._reader.answer()

    async def aclose(self) -> None:
        """End the request, if it has not ended."""
        if self._events is not None:
            await self._events.aclose()
        if self._response is not None:
            await self._response.aclose()

    async def _read(self) -> AsyncGenerator[ChatEvent, None]:
        reader, failures = self._reader, 0
        while True:
            if self._response is None:
                raise RuntimeError("a stream is read inside `async with`")
            before, lost = reader.last_id, None
            try:
                async for data in self._response.aiter_bytes():
                    for event in reader.feed(data):
                        yield event
            except httpx.TransportError as err:
                lost = err
            if reader.is_done:
                return
            failures = 0 if reader.last_id != before else failures + 1
            if self._reopen is None or not reader.last_id or failures > self._max_reconnects:
                raise _broken(lost, self.request_id) from lost
            await self._response.aclose()
            self._response = await self._reopen(reader.last_id)
            reader.connect()


def _broken(err: httpx.TransportError | None, request_id: str | None) -> StreamError:
    why = "" if err is None else f" {connection_error(err).message}"
    return StreamError(f"The stream broke off before its end.{why}", request_id=request_id)
