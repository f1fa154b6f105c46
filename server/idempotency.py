"""`Idempotency-Key`: a request that comes again gets the first one's answer, or joins it while it runs.

Knows requests and answers as bytes, not what they mean. Keys belong to the API key. An answer is kept in
memory for a while, within bounds; one that failed is not kept, so that trying again means trying again. The
request of a key goes on for a grace time after its last reader has left.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .api.body import read_body
from .errors import BadRequest, Unavailable, draining
from .middleware import is_generation, request_info, route_path

HEADER = "idempotency-key"
REPLAYED = (b"idempotent-replayed", b"true")
WINDOW_S = 3600.0
"""Longer than any client goes on trying."""
GRACE_S = 30.0
"""A client that lost its connection is back by then; a request that nobody waits for holds KV no longer."""
MAX_RECORDS = 4096
MAX_TOTAL_BYTES = 64 << 20
MAX_ANSWER_BYTES = 8 << 20
"""About 30,000 streamed tokens. A longer answer is served, but not kept."""
LAG_BYTES = 256 << 10
"""Of an answer that is not kept: as much lies here for its slowest reader."""
MESSAGE_BYTES = 300
"""What one message of an answer takes besides its body."""
_KEY = re.compile(r"[\x21-\x7e]{1,255}")


@dataclass(eq=False)
class _Reader:
    at: int = 0
    """Messages that it has been sent."""


@dataclass(eq=False)
class Record:
    """One answer: its messages so far, and who reads them."""

    fingerprint: bytes
    is_kept: bool = True
    """Later requests may have it from its beginning."""
    status: int = 0
    finished_at: float | None = None
    failure: Exception | None = None
    bytes: int = 0
    """Of the messages that lie here."""
    _messages: list[Message] = field(default_factory=list)
    _dropped: int = 0
    _readers: set[_Reader] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_read(self) -> bool:
        return bool(self._readers)

    def changed(self) -> asyncio.Event:
        """Set at the next change of anything here."""
        return self._changed

    def add(self, message: Message) -> int:
        """Take the answer's next message; returns the bytes that were added."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        size = MESSAGE_BYTES + len(message.get("body", b""))
        self._messages.append(message)
        self.bytes += size
        self._wake()
        return size

    def finish(self, at: float, failure: Exception | None) -> None:
        self.finished_at, self.failure = at, failure
        self._wake()

    def enter(self) -> _Reader:
        reader = _Reader()
        self._readers.add(reader)
        self._wake()
        return reader

    def leave(self, reader: _Reader) -> None:
        self._readers.discard(reader)
        self._trim()
        self._wake()

    def unread(self, reader: _Reader) -> Iterator[Message]:
        """Yield what a reader has not had; each message counts as read when the next is asked for."""
        while reader.at < self._dropped + len(self._messages):
            yield self._messages[reader.at - self._dropped]
            reader.at += 1
            self._trim()

    def _trim(self) -> None:
        """Let go of what every reader has had, if nobody else will come."""
        if self.is_kept:
            return
        end = min((reader.at for reader in self._readers), default=self._dropped + len(self._messages))
        gone = self._messages[: end - self._dropped]
        if gone:
            del self._messages[: len(gone)]
            self._dropped = end
            self.bytes -= sum(MESSAGE_BYTES + len(message.get("body", b"")) for message in gone)
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class RecordBook:
    """The records by tenant and key, the oldest first, within bounds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.bytes = 0
        """Of the records in the book."""
        self._records: dict[tuple[str, str], Record] = {}

    def find(self, tenant: str, key: str) -> Record | None:
        self._drop_expired()
        return self._records.get((tenant, key))

    def begin(self, tenant: str, key: str, fingerprint: bytes) -> Record:
        """Open the record of a new request.

        Raises:
            Unavailable: as many requests with keys are running as can be.
        """
        if len(self._records) >= MAX_RECORDS and not self._evict():
            raise Unavailable(
                "Too many requests with an Idempotency-Key are running.",
                code="server_overloaded",
                retry_after_s=1.0,
            )
        record = self._records[tenant, key] = Record(fingerprint)
        return record

    def add(self, record: Record, message: Message) -> None:
        """Add to an answer; what has no room is not kept."""
        size = record.add(message)
        if not record.is_kept:
            return
        self.bytes += size
        while self.bytes > MAX_TOTAL_BYTES and self._evict():
            pass
        if record.bytes > MAX_ANSWER_BYTES or self.bytes > MAX_TOTAL_BYTES:
            self.forget(record)

    def forget(self, record: Record) -> None:
        """Take a record out of the book. Its readers read on."""
        for name, known in self._records.items():
            if known is record:
                del self._records[name]
                self.bytes -= record.bytes
                record.is_kept = False
                return

    def _evict(self) -> bool:
        oldest = next((record for record in self._records.values() if record.finished_at is not None), None)
        if oldest is not None:
            self.forget(oldest)
        return oldest is not None

    def _drop_expired(self) -> None:
        since = self.clock() - WINDOW_S
        for record in list(self._records.values()):
            if record.finished_at is not None and record.finished_at < since:
                self.forget(record)


class Idempotency:
    """The layer behind the keys and in front of the limits: what is answered again counts once."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, clock: Callable[[], float]) -> None:
        self.app, self._max_body_bytes = app, max_body_bytes
        self.book = RecordBook(clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        key = headers.get(HEADER)
        takes_up = "last-event-id" in headers  # a stream that goes on, behind that event
        if key is None or takes_up or not is_generation(scope):
            await self.app(scope, receive, send)
            return
        if not _KEY.fullmatch(key):
            raise BadRequest(
                "Idempotency-Key must have 1 to 255 visible ASCII characters",
                code="invalid_value",
                param="Idempotency-Key",
            )
        body = await read_body(Request(scope, receive), self._max_body_bytes)
        fingerprint = _fingerprint(scope, body)
        tenant = request_info(scope).key_id
        record = self.book.find(tenant, key)
        if record is None:
            await self._first(self.book.begin(tenant, key, fingerprint), scope, body, receive, send)
        elif record.fingerprint == fingerprint:
            await _read(record, receive, send, is_first=False)
        else:
            raise BadRequest(
                "This Idempotency-Key was used with another request: a new request needs a new key.",
                code="idempotency_key_reused",
                param="Idempotency-Key",
                status=422,
                headers={"x-should-retry": "false"},
            )

    async def _first(self, record: Record, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the request, for its own client and for those that join."""
        failure: Exception | None = None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run(record, scope, body))
            try:
                await _read(record, receive, send, is_first=True)
            except Exception as exc:  # the others may still be reading
                failure = exc
        if failure is not None:
            raise failure

    async def _run(self, record: Record, scope: Scope, body: bytes) -> None:
        begun = False

        async def receive() -> Message:
            nonlocal begun
            if not begun:
                begun = True
                return {"type": "http.request", "body": body, "more_body": False}
            await _abandoned(record)
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            self.book.add(record, message)
            while not record.is_kept and record.bytes > LAG_BYTES and record.is_read:
                await record.changed().wait()

        failure: Exception | None = draining()  # what those that joined are told if this task is cancelled
        try:
            await self.app(scope, receive, send)
            failure = None
        except Exception as exc:
            failure = exc
        finally:
            if failure is not None or record.status >= 400 or request_info(scope).has_failed():
                self.book.forget(record)
            record.finish(self.book.clock(), failure)


def _fingerprint(scope: Scope, body: bytes) -> bytes:
    digest = hashlib.sha256(route_path(scope).encode() + b"\0" + scope.get("query_string", b"") + b"\0")
    digest.update(body)
    return digest.digest()


async def _read(record: Record, receive: Receive, send: Send, *, is_first: bool) -> None:
    """Send the answer to one client, as it comes.

    Raises:
        ClientDisconnect: the client left.
        Exception: what the request failed with.
    """
    reader = record.enter()
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        while True:
            changed = record.changed()
            for message in record.unread(reader):
                await send(_copy(message, is_first))
            if record.finished_at is not None:
                break
            if not changed.is_set():
                waiting = asyncio.ensure_future(changed.wait())
                await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
            if leaving.done():
                raise ClientDisconnect
        if record.failure is not None:
            raise record.failure
    finally:
        leaving.cancel()
        record.leave(reader)


def _copy(message: Message, is_first: bool) -> Message:
    """Return a message that the outer layers may add headers to."""
    if message["type"] != "http.response.start":
        return message
    headers = list(message["headers"])
    if not is_first:  # it took nothing from the key's limits
        headers = [header for header in headers if not header[0].startswith(b"x-ratelimit-")] + [REPLAYED]
    return {**message, "headers": headers}


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _abandoned(record: Record) -> None:
    """Return when nobody has read for the grace time; at once, if nobody can come back."""
    while True:
        changed = record.changed()
        if record.is_read:
            await changed.wait()
            continue
        if not record.is_kept:
            return
        try:
            async with asyncio.timeout(GRACE_S):
                while not record.is_read and record.is_kept:
                    await record.changed().wait()
        except TimeoutError:
            return
