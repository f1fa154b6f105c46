"""`/v1/chat/completions` over a WebSocket: a request a message, its chunks a frame each, then `[DONE]`.

One request at a time, any number one after the other. The chunks are those of the HTTP stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from secrets import token_hex
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from ..admission import KeyLimits
from ..errors import BadRequest, as_api_error, draining, error_body
from ..middleware import request_info
from ..service import Service
from ..stream.named import DataEvents
from ..stream.runs import Run
from ..websocket import check_origin
from .body import parse_object, typed
from .openai_chat import ChatRequest, begin_stream, read_call
from .respond import isolation_salt, wants_resume
from .sampling import read_object

logger = logging.getLogger(__name__)

DONE = "[DONE]"
LEFT_GRACE_S = 5.0
"""For a run that is not resumable: longer than its reader needs to begin."""


class ResumeFields(msgspec.Struct, kw_only=True):
    """`{"resume": ID, "starting_after": NUMBER}`: chunks are numbered from 0."""

    resume: str
    starting_after: int = -1
    cache_salt: str | None = None


class ChatSocket:
    """The endpoint."""

    def __init__(self, service: Service, limits: KeyLimits) -> None:
        self._service, self._limits = service, limits

    async def connect(self, socket: WebSocket) -> None:
        """GET /v1/chat/completions with an upgrade."""
        check_origin(socket.scope, self._service.config.allowed_origins)
        if self._service.draining:
            raise draining()
        await socket.accept()
        turn: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            try:
                while (message := await socket.receive())["type"] != "websocket.disconnect":
                    text = message.get("text")
                    data = message["bytes"] if text is None else text.encode()
                    if turn is not None and not turn.done():
                        busy = BadRequest("Wait for the end of what runs.", code="response_in_progress")
                        await socket.send_text(error_body(busy).decode())
                        continue
                    turn = tasks.create_task(self._turn(socket, data))
            except WebSocketDisconnect:
                pass
            finally:
                if turn is not None:
                    turn.cancel()

    async def _turn(self, socket: WebSocket, data: bytes) -> None:
        """Answer one message; what is wrong is told in an error frame, and the connection goes on."""
        try:
            try:
                raw = parse_object(data)
                if "resume" in raw:
                    await self._resume(socket, typed(raw, ResumeFields))
                else:
                    await self._answer(socket, raw, len(data))
            except WebSocketDisconnect:
                raise
            except Exception as exc:
                error = as_api_error(exc)
                if error.code == "internal_error":
                    logger.exception("internal error request_id=%s", request_info(socket.scope).id)
                await socket.send_text(error_body(error).decode())
            await socket.send_text(DONE)
        except (WebSocketDisconnect, RuntimeError):
            pass  # the client has gone

    async def _answer(self, socket: WebSocket, raw: dict[str, Any], size_bytes: int) -> None:
        service, key_id = self._service, request_info(socket.scope).key_id
        raw["stream"] = True
        fields, ignored = read_object(raw, ChatRequest, service.config)
        resumes = wants_resume(service, fields.stream_options)
        if service.draining:
            raise draining()
        is_limited = bool(self._limits.requests_per_minute or self._limits.concurrency)
        if is_limited:
            self._limits.take(key_id)
        try:
            call = await read_call(service, fields, ignored, size_bytes, key_id)
            steps, chunks = begin_stream(service, call, time.perf_counter())
            grace_s = service.config.resume_grace_s if resumes else LEFT_GRACE_S
            maker = DataEvents(chunks)
            generation = call.generation
            run = Run(generation.id, f"req_{token_hex(12)}", generation.salt, steps, maker, grace_s, False)
            service.runs.start(run)
            try:
                await self._send(socket, run, -1, keeps=resumes)
            finally:
                if not resumes:
                    run.abort()
                    service.runs.forget(run)
        finally:
            if is_limited:
                self._limits.give_back(key_id)

    async def _resume(self, socket: WebSocket, fields: ResumeFields) -> None:
        salt = isolation_salt(request_info(socket.scope).key_id, fields.cache_salt)
        run = self._service.runs.find(fields.resume, salt)
        if run is None or not isinstance(run.maker, DataEvents):
            raise BadRequest(
                "The chunks of this answer are not kept (any more).", code="events_expired", param="resume"
            )
        await self._send(socket, run, fields.starting_after, keeps=True)

    async def _send(self, socket: WebSocket, run: Run, after: int, *, keeps: bool) -> None:
        number = after
        async for events in self._service.runs.read(run, after):
            for event in events:
                await socket.send_text(event.data.decode())
            number += len(events)
            if not keeps:
                run.log.drop_before(number + 1)
