"""From accepted requests to an HTTP response, streamed or whole: what the generation endpoints do alike.

Knows no protocol: an encoder makes the events of a stream, a collector the body of a whole answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ...engine import GenerationRequest
from ..middleware import RequestInfo, request_info
from ..service import Service
from ..stream.answers import Answers
from ..stream.events import ResponseSteps, Step
from ..stream.named import DataEvents
from ..stream.resume import run_response
from ..stream.runs import Run
from ..stream.sse import EventEncoder, SseResponse, data_events
from .sampling import StreamOptions

T = TypeVar("T")

LONG_BODY_BYTES = 4096
"""Below this, tokenising takes about 1 ms: less than the way to another thread and back is worth."""


class BodyCollector(Protocol):
    """A protocol's form of a whole answer."""

    def step(self, step: Step) -> None:
        """Take one step."""
        ...

    async def body(self) -> bytes:
        """Return the answer's JSON, once all steps are in."""
        ...


async def off_loop(service: Service, size_bytes: int, work: Callable[[], T]) -> T:
    """Run codec work: at once when it is small, else on a codec thread."""
    if size_bytes < LONG_BODY_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(service.codec_pool, work)


def read_answers(service: Service, prompt: Sequence[int], names: Collection[str], n: int) -> Answers | None:
    """Return what reads thoughts, and calls of these names, out of an answer; None if it is all text. A
    mapping tells the schemas of their arguments, which some dialects need to know the types."""
    if service.dialect.is_plain(names):
        return None
    return Answers(service.codec, service.dialect, prompt, names, n)


def submit(service: Service, request: Request, requests: Sequence[GenerationRequest]) -> ResponseSteps:
    """Hand the requests to the engine.

    Raises:
        EngineError: one was refused; none is left running.
    """
    info = request_info(request.scope)
    steps = ResponseSteps(service.engine, requests, service.telemetry, info.arrived_at)
    note_generation(service, info, requests[0].id, steps)
    return steps


def note_generation(service: Service, info: RequestInfo, generation_id: str, steps: ResponseSteps) -> None:
    """Tell the outer layers what an HTTP request generates."""
    info.generation_id = generation_id
    info.has_failed = lambda: steps.has_failed
    info.queue_position = service.engine.queue_position(generation_id)


def stream_response(
    service: Service,
    request: Request,
    steps: ResponseSteps,
    encoder: EventEncoder,
    headers: dict[str, str],
    *,
    resumable: tuple[str, str] | None = None,
) -> Response:
    """Return the response that writes events as they come. `resumable` = the response's id and its salt, if
    it was asked to outlive its reader.

    Raises:
        Unavailable: too many such responses run.
    """
    if resumable is not None:
        response_id, salt = resumable
        info, grace_s = request_info(request.scope), service.config.resume_grace_s
        run = Run(response_id, info.id, salt, steps, DataEvents(encoder), grace_s, is_background=False)
        service.runs.start(run)
        return run_response(service.runs, run, -1, headers, with_ids=True, keep_alive_interval_s=0)
    return SseResponse(
        data_events(steps, encoder, request_info(request.scope).id),
        steps.aclose,
        keep_alive_interval_s=service.config.keep_alive_interval_s,
        headers=headers,
    )


async def whole_response(
    request: Request, steps: ResponseSteps, collector: BodyCollector, headers: dict[str, str]
) -> Response:
    """Collect the whole answer, and stop at once when the client leaves.

    Raises:
        ClientDisconnect: it left.
        RequestFailed, Unavailable: the engine failed a choice.
    """
    await collect(request, steps, collector.step)
    return Response(await collector.body(), media_type="application/json", headers=headers)


async def collect(request: Request, steps: ResponseSteps, take: Callable[[Step], None]) -> None:
    """Give out all steps, and stop at once when the client leaves.

    Raises:
        ClientDisconnect, RequestFailed, Unavailable: see `whole_response`.
    """
    collecting = asyncio.ensure_future(_collect(steps, take))
    leaving = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((collecting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            raise ClientDisconnect
        await collecting
    finally:
        collecting.cancel()
        leaving.cancel()
        await asyncio.gather(collecting, leaving, return_exceptions=True)
        await steps.aclose()


async def _collect(steps: ResponseSteps, take: Callable[[Step], None]) -> None:
    async for step in steps:
        take(step)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def wants_resume(service: Service, options: StreamOptions | None) -> bool:
    """Whether a stream was asked to be resumable.

    Raises:
        Unavailable: too many such responses run.
    """
    if options is None or not options.resume:
        return False
    service.runs.check_room()
    return True


def isolation_salt(key_id: str, cache_salt: str | None) -> str:
    """Return what keeps prefixes apart: by key, and by the request's own salt. The key's part has a fixed
    length (or none), so that no salt of one key can equal another key's."""
    return f"{key_id}:{cache_salt or ''}" if key_id or cache_salt else ""
