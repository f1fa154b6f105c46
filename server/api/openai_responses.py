"""OpenAI's `/v1/responses`: create, stream, read again, continue after a drop, cancel, delete, count."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..errors import BadRequest
from ..middleware import request_info
from ..service import Service
from ..stream.events import Step
from ..stream.named import make_events, sse_frame
from ..stream.resume import run_response
from ..stream.runs import Run
from ..stream.sse import SseResponse
from .body import ignored_header
from .openai_responses_body import InputTokens, ItemPage, ResponseBody, ResponseDeleted
from .openai_responses_events import ResponseEvents
from .openai_responses_input import ResponseRequest, input_items, invalid
from .openai_responses_make import Running, read_prompt, start_response, tools_of
from .openai_responses_store import ResponseStore, not_found
from .respond import isolation_salt, note_generation, whole_response
from .resume import starting_after, taken_up
from .sampling import read_fields
from .types import encode

BACKGROUND_GRACE_S = 600.0
"""How long the events of a background response can be streamed again after its end."""
MAX_LISTED = 100


class _Whole:
    """Collects a response without its events."""

    def __init__(self, running: Running) -> None:
        self._events = running.events
        self._events.begin()

    def step(self, step: Step) -> None:
        self._events.step(step)

    async def body(self) -> bytes:
        await self._events.end()
        return encode(self._events.body)


class ResponsesApi:
    """The endpoints."""

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self._service, self._store = service, store

    async def create(self, request: Request) -> Response:
        """POST /v1/responses."""
        service, info = self._service, request_info(request.scope)
        if (rest := taken_up(service, request)) is not None:
            return rest
        fields, ignored, size_bytes = await read_fields(request, ResponseRequest, service.config)
        resumes = bool(fields.stream and fields.stream_options and fields.stream_options.resume)
        if fields.background or resumes:
            service.runs.check_room()
        running = await start_response(
            service,
            self._store,
            fields,
            ignored=ignored,
            size_bytes=size_bytes,
            key_id=info.key_id,
            arrived_at=info.arrived_at,
        )
        note_generation(service, info, running.id, running.steps)
        headers = ignored_header(ignored)
        if fields.background or resumes:
            run = Run(
                running.id,
                info.id,
                running.salt,
                running.steps,
                running.events,
                BACKGROUND_GRACE_S if fields.background else service.config.resume_grace_s,
                bool(fields.background),
            )
            service.runs.start(run)
            if not fields.stream:
                running.events.body.status = "queued"
                return Response(encode(running.events.body), media_type="application/json", headers=headers)
            return self._resumed(run, -1, headers, with_ids=resumes)
        if fields.stream:
            return SseResponse(
                _frames(running, info.id),
                running.steps.aclose,
                keep_alive_interval_s=service.config.keep_alive_interval_s,
                headers=headers,
            )
        return await whole_response(request, running.steps, _Whole(running), headers)

    async def get(self, request: Request) -> Response:
        """GET /v1/responses/{id}, or its events with `stream=true`, those behind `starting_after`."""
        response_id, salt, run = self._place(request)
        stream = request.query_params.get("stream", "false").lower()
        if stream not in ("true", "false"):
            raise invalid("stream", "stream must be true or false")
        if stream == "true":
            if run is None:
                await self._store.get(salt, response_id)
                raise BadRequest(
                    "The events of this response are no longer kept: read it without stream=true.",
                    code="events_expired",
                    param="stream",
                )
            return self._resumed(run, starting_after(request), {}, with_ids=False)
        if run is not None:
            return Response(encode(_body_of(run)), media_type="application/json")
        stored = await self._store.get(salt, response_id)
        return Response(stored.body, media_type="application/json")

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/{id}/cancel: ends a background response; one that has ended stays as it is."""
        response_id, salt, run = self._place(request)
        if run is None:
            stored = await self._store.get(salt, response_id)
            if not msgspec.json.decode(stored.body)["background"]:
                raise invalid("response_id", "only a response with background=true can be cancelled")
            return Response(stored.body, media_type="application/json")
        if not run.is_background:
            raise invalid("response_id", "only a response with background=true can be cancelled")
        run.abort()
        await run.ended.wait()
        return Response(encode(_body_of(run)), media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/responses/{id}."""
        response_id, salt, run = self._place(request)
        if run is not None:
            run.abort()
            await run.ended.wait()
            self._service.runs.forget(run)
        if not await self._store.delete(salt, response_id) and run is None:
            raise not_found(response_id)
        return _json(ResponseDeleted(id=response_id))

    async def input_items(self, request: Request) -> Response:
        """GET /v1/responses/{id}/input_items: what it was given, with all that it continues."""
        response_id, salt, _ = self._place(request)
        stored = await self._store.get(salt, response_id)
        items = [*await self._store.items_through(salt, stored.previous), *stored.input]
        query = request.query_params
        order, after, limit = query.get("order", "desc"), query.get("after"), query.get("limit", "20")
        if order not in ("asc", "desc"):
            raise invalid("order", "order must be asc or desc")
        if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit) <= MAX_LISTED):
            raise invalid("limit", f"limit must be between 1 and {MAX_LISTED}")
        if order == "desc":
            items.reverse()
        if after is not None:
            at = next((i for i, item in enumerate(items) if item["id"] == after), None)
            if at is None:
                raise invalid("after", "after names no item of this response")
            items = items[at + 1 :]
        page = items[: int(limit)]
        return _json(
            ItemPage(
                data=page,
                first_id=page[0]["id"] if page else None,
                last_id=page[-1]["id"] if page else None,
                has_more=len(items) > len(page),
            )
        )

    async def input_tokens(self, request: Request) -> Response:
        """POST /v1/responses/input_tokens: how many tokens the prompt of such a request has."""
        service = self._service
        fields, ignored, size_bytes = await read_fields(request, ResponseRequest, service.config)
        service.model_name(fields.model)
        salt = isolation_salt(request_info(request.scope).key_id, fields.cache_salt)
        own = input_items(fields.input)
        use = tools_of(fields).use
        prompt, _ = await read_prompt(service, self._store, fields, own, salt, size_bytes, use)
        body = InputTokens(input_tokens=len(prompt.tokens))
        return Response(encode(body), media_type="application/json", headers=ignored_header(ignored))

    def _place(self, request: Request) -> tuple[str, str, Run | None]:
        """The response id in the path, whose it is (`cache_salt` may stand in the query), and its run, if it
        runs or has just ended."""
        response_id = request.path_params["id"]
        given = request.query_params.get("cache_salt")
        salt = isolation_salt(request_info(request.scope).key_id, given)
        run = self._service.runs.find(response_id, salt)
        is_ours = run is not None and isinstance(run.maker, ResponseEvents)
        return response_id, salt, run if is_ours else None

    def _resumed(self, run: Run, after: int, headers: dict[str, str], *, with_ids: bool) -> Response:
        interval_s = self._service.config.keep_alive_interval_s
        return run_response(
            self._service.runs, run, after, headers, with_ids=with_ids, keep_alive_interval_s=interval_s
        )


async def _frames(running: Running, request_id: str) -> AsyncIterator[bytes]:
    async for events in make_events(running.steps, running.events, request_id):
        yield sse_frame(events)


def _body_of(run: Run) -> ResponseBody:
    assert isinstance(run.maker, ResponseEvents), "no response of this protocol"
    return run.maker.body


def _json(body: msgspec.Struct) -> Response:
    return Response(encode(body), media_type="application/json")
