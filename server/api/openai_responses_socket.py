"""`/v1/responses` over a WebSocket: several turns a connection, steering, and taking a stream up again.

The events are those of the HTTP stream. A client's messages are `response.create`, `response.steer` and
`response.resume` (ours). One response runs at a time, or one in each lane that `stream_id` names.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from ...engine import Engine
from ..admission import KeyLimits
from ..errors import ApiError, BadRequest, ErrorBody, as_api_error, draining
from ..middleware import request_info
from ..service import Service
from ..stream.runs import Run
from ..websocket import check_origin
from .body import parse_object, typed
from .openai_responses_body import CustomCallOutput
from .openai_responses_events import ResponseEvents
from .openai_responses_input import Item, MessageItem, ResponseRequest, input_items, invalid
from .openai_responses_make import start_response
from .openai_responses_store import ResponseStore, StoredResponse
from .respond import isolation_salt
from .sampling import read_object
from .types import encode

logger = logging.getLogger(__name__)

MAX_LANES = 16
"""Responses that one connection may run at once."""
MAX_STEERS = 16
"""Steering inputs that may wait for one response."""
MAX_UNSTORED = 32
"""Latest responses with `store: false` that a connection can still continue from."""
LEFT_GRACE_S = 5.0
"""For a run that is not resumable: longer than its reader needs to begin."""


class CreateFields(ResponseRequest, kw_only=True):
    """`response.create`: the fields of a request, and the connection's own."""

    stream_id: str | None = None
    generate: bool | None = None


class SteerFields(msgspec.Struct, kw_only=True):
    """`response.steer`."""

    previous_response_id: str
    input: str | list[Item]


class ResumeFields(msgspec.Struct, kw_only=True):
    """`response.resume`."""

    response_id: str
    starting_after: int = -1
    stream_id: str | None = None
    cache_salt: str | None = None


class SocketStore(ResponseStore):
    """The stored responses, and this connection's latest ones that were not to be stored."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._own: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()

    async def keep(self, salt: str, response_id: str, stored: StoredResponse, *, is_asked: bool) -> None:
        await super().keep(salt, response_id, stored, is_asked=is_asked)
        if not is_asked:
            self._own[salt, response_id] = stored
            while len(self._own) > MAX_UNSTORED:
                self._own.popitem(last=False)

    async def find(self, salt: str, response_id: str) -> StoredResponse | None:
        return self._own.get((salt, response_id)) or await super().find(salt, response_id)


@dataclass(eq=False)
class _Steer:
    id: str
    input: str | list[Item]


@dataclass(eq=False)
class _Lane:
    """The response that runs in one lane, or ran last."""

    stream_id: str | None
    fields: CreateFields
    run: Run
    events: ResponseEvents
    steers: list[_Steer] = field(default_factory=list)


class ResponsesSocket:
    """The endpoint."""

    def __init__(self, service: Service, limits: KeyLimits) -> None:
        self._service, self._limits = service, limits

    async def connect(self, socket: WebSocket) -> None:
        """GET /v1/responses with an upgrade."""
        check_origin(socket.scope, self._service.config.allowed_origins)
        if self._service.draining:
            raise draining()
        await socket.accept()
        async with asyncio.TaskGroup() as tasks:
            connection = _Connection(self._service, self._limits, socket, tasks)
            try:
                while True:
                    message = await socket.receive()
                    if message["type"] == "websocket.disconnect":
                        break
                    text = message.get("text")
                    await connection.take((text or "").encode() if text is not None else message["bytes"])
            except WebSocketDisconnect:
                pass
            finally:
                connection.leave()


class _Connection:
    """One client."""

    def __init__(
        self, service: Service, limits: KeyLimits, socket: WebSocket, tasks: asyncio.TaskGroup
    ) -> None:
        self._service, self._limits, self._socket, self._tasks = service, limits, socket, tasks
        self._info = request_info(socket.scope)
        self._store = SocketStore(service.engine)
        self._lanes: dict[str | None, _Lane] = {}
        """The running ones."""
        self._waiting: dict[str, list[_Steer]] = {}
        """Steering input behind a response that waits for the results of its calls."""
        self._readers: set[asyncio.Task[None]] = set()

    async def take(self, data: bytes) -> None:
        """Act on one message; what is wrong with it is told, and the connection goes on."""
        stream_id: str | None = None
        try:
            raw = parse_object(data)
            kind, given = raw.pop("type", None), raw.get("stream_id")
            stream_id = given if isinstance(given, str) else None
            if kind == "response.create":
                await self._create(raw, len(data))
            elif kind == "response.steer":
                await self._steer(raw)
            elif kind == "response.resume":
                self._resume(typed(raw, ResumeFields))
            else:
                raise invalid("type", f"there is no event of the type {str(kind)[:60]!r}")
        except WebSocketDisconnect:
            raise
        except Exception as exc:
            await self._tell(exc, stream_id)

    def leave(self) -> None:
        """The client has gone: what it did not ask to keep ends."""
        for task in self._readers:
            task.cancel()
        for lane in self._lanes.values():
            if not _resumes(lane.fields):
                lane.run.abort()
                self._service.runs.forget(lane.run)

    async def _create(self, raw: dict[str, Any], size_bytes: int) -> None:
        fields, ignored = read_object(raw, CreateFields, self._service.config)
        if fields.background:
            raise invalid("background", "background is not available on this connection")
        if fields.stream_options is not None:
            fields.stream = True
        lane_id = fields.stream_id
        if lane_id in self._lanes:
            raise BadRequest(
                "A response is running here: wait for its end, or name another stream_id.",
                code="response_in_progress",
                param="stream_id",
            )
        if len(self._lanes) >= MAX_LANES:
            raise invalid("stream_id", f"this connection runs {MAX_LANES} responses, the most it may")
        waiting = self._waiting.pop(fields.previous_response_id or "", [])
        if waiting:
            own = input_items(fields.input)
            fields.input = [*[item for steer in waiting for item in input_items(steer.input)], *own]
        await self._start(fields, ignored, size_bytes)

    async def _start(self, fields: CreateFields, ignored: list[str], size_bytes: int) -> None:
        service, info = self._service, self._info
        if service.draining:
            raise draining()
        service.runs.check_room()
        limited = bool(self._limits.requests_per_minute or self._limits.concurrency)
        if limited:
            self._limits.take(info.key_id)
        try:
            running = await start_response(
                service,
                self._store,
                fields,
                ignored=ignored,
                size_bytes=size_bytes,
                key_id=info.key_id,
                arrived_at=time.perf_counter(),
                generates=fields.generate is not False,
            )
        except BaseException:
            if limited:
                self._limits.give_back(info.key_id)
            raise
        grace_s = service.config.resume_grace_s if _resumes(fields) else LEFT_GRACE_S
        run = Run(running.id, running.id, running.salt, running.steps, running.events, grace_s, False)
        service.runs.start(run)
        lane = _Lane(fields.stream_id, fields, run, running.events)
        self._lanes[fields.stream_id] = lane
        self._spawn(self._run(lane, limited))

    async def _run(self, lane: _Lane, limited: bool) -> None:
        try:
            await self._send_events(lane.run, -1, lane.stream_id, keeps=_resumes(lane.fields))
        finally:
            if limited:
                self._limits.give_back(self._info.key_id)
        del self._lanes[lane.stream_id]
        if not _resumes(lane.fields):
            lane.run.abort()  # if it still runs, its client was too slow
            self._service.runs.forget(lane.run)
        if lane.steers:
            await self._go_on(lane)

    async def _send_events(self, run: Run, after: int, stream_id: str | None, *, keeps: bool) -> None:
        number = after
        lane = b"" if stream_id is None else b',"stream_id":' + encode(stream_id) + b"}"
        try:
            async for events in self._service.runs.read(run, after):
                for event in events:
                    data = event.data[:-1] + lane if lane else event.data
                    await self._socket.send_text(data.decode())
                number += len(events)
                if not keeps:
                    run.log.drop_before(number + 1)
        except ApiError as error:  # this client is too far behind
            await self._tell(error, stream_id)

    async def _steer(self, raw: dict[str, Any]) -> None:
        target = raw.get("previous_response_id")
        try:
            fields = typed(raw, SteerFields)
            _check_steer(fields.input)
        except ApiError as err:
            await self._steer_failed(raw, "invalid_input", err.message, None)
            return
        lane = next((lane for lane in self._lanes.values() if lane.run.id == target), None)
        if lane is None:
            salt = isolation_salt(self._info.key_id, None)
            is_known = await self._store.find(salt, fields.previous_response_id) is not None
            code = "response_already_completed" if is_known else "response_not_found"
            await self._steer_failed(raw, code, "This response does not run on this connection.", None)
            return
        if lane.run.log.is_closed or len(lane.steers) >= MAX_STEERS:
            code = "response_not_active" if lane.run.log.is_closed else "too_many_pending_steers"
            await self._steer_failed(raw, code, "No more input is taken for this response.", lane)
            return
        steer = _Steer(f"steer_{token_hex(12)}", fields.input)
        lane.steers.append(steer)
        accepted = {"id": steer.id, "previous_response_id": lane.run.id}
        lane.run.log.append([lane.events.insert("response.steer.accepted", steer=accepted)])
        if not lane.events.calls:  # in the middle of a text is a safe place to stop
            lane.events.stopped_by = "steered"
            lane.run.abort()

    async def _go_on(self, lane: _Lane) -> None:
        """Take the steering input of a response that has ended into the next one."""
        response_id, calls = lane.run.id, lane.events.calls
        if calls:
            required = [
                {"type": "custom_tool_call_output", "call_id": call.call_id}
                if isinstance(call, CustomCallOutput)
                else {"type": "function_call_output", "call_id": call.call_id, "name": call.name}
                for call in calls
            ]
            self._waiting[response_id] = lane.steers
            for steer in lane.steers:
                await self._send(
                    lane.events.insert(
                        "response.steer.pending",
                        reason="waiting_for_required_input",
                        required_input=required,
                        steer={"id": steer.id, "previous_response_id": response_id},
                    ).data,
                    lane.stream_id,
                )
            return
        given = [item for steer in lane.steers for item in input_items(steer.input)]
        successor = msgspec.structs.replace(lane.fields, previous_response_id=response_id, input=given)
        try:
            await self._start(successor, [], 200 * len(given))
        except Exception as exc:
            for steer in lane.steers:
                raw = {"previous_response_id": response_id, "input": steer.input}
                await self._steer_failed(
                    raw, "successor_creation_failed", as_api_error(exc).message, lane, steer.id
                )

    async def _steer_failed(
        self, raw: dict[str, Any], code: str, message: str, lane: _Lane | None, steer_id: str | None = None
    ) -> None:
        steer = {"previous_response_id": raw.get("previous_response_id"), "input": raw.get("input")}
        if steer_id is not None:
            steer["id"] = steer_id
        error = {"code": code, "message": message, "type": "invalid_request_error"}
        kind = "response.steer.failed"
        if lane is not None:
            await self._send(lane.events.insert(kind, steer=steer, error=error).data, lane.stream_id)
        else:
            event = {"type": kind, "sequence_number": 0, "steer": steer, "error": error}
            await self._send(encode(event), None)

    def _resume(self, fields: ResumeFields) -> None:
        salt = isolation_salt(self._info.key_id, fields.cache_salt)
        run = self._service.runs.find(fields.response_id, salt)
        if run is None or not isinstance(run.maker, ResponseEvents):
            raise BadRequest(
                "The events of this response are not kept (any more).",
                code="events_expired",
                param="response_id",
            )
        if len(self._readers) >= 2 * MAX_LANES:
            raise invalid("response_id", "too many responses are being read on this connection")
        run.log.check(fields.starting_after)
        self._spawn(self._send_events(run, fields.starting_after, fields.stream_id, keeps=True))

    def _spawn(self, work: Any) -> None:
        task = self._tasks.create_task(_quietly(work))
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)

    async def _send(self, data: bytes, stream_id: str | None) -> None:
        if stream_id is not None:
            data = data[:-1] + b',"stream_id":' + encode(stream_id) + b"}"
        await self._socket.send_text(data.decode())

    async def _tell(self, exc: Exception, stream_id: str | None) -> None:
        error = as_api_error(exc)
        if error.code == "internal_error":
            logger.exception("internal error on a websocket request_id=%s", self._info.id)
        body = ErrorBody(error.message, error.type, error.param, error.code)
        await self._send(encode({"type": "error", "status": error.status, "error": body}), stream_id)


async def _quietly(work: Any) -> None:
    """A client that has gone is no failure of the task that writes to it."""
    try:
        await work
    except (WebSocketDisconnect, RuntimeError):
        pass


def _resumes(fields: ResponseRequest) -> bool:
    return bool(fields.stream_options and fields.stream_options.resume)


def _check_steer(given: str | list[Item]) -> None:
    """Raises: BadRequest: not a text, nor messages of the user."""
    if isinstance(given, str):
        return
    if not given:
        raise invalid("input", "input is empty")
    for i, item in enumerate(given):
        if item.get("type", "message") != "message" or typed(item, MessageItem).role != "user":
            raise invalid(f"input[{i}]", "only messages of the user can steer")
