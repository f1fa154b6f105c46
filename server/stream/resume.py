"""A run's events as Server-Sent Events that a client can take up again: each with its `id:`."""

from __future__ import annotations

from collections.abc import AsyncIterator

from .named import DataEvents, sse_frame
from .runs import Run, Runs
from .sse import DONE, SseResponse


def run_response(
    runs: Runs,
    run: Run,
    after: int,
    headers: dict[str, str],
    *,
    with_ids: bool,
    keep_alive_interval_s: float,
) -> SseResponse:
    """Return a run's events, those behind number `after`. With ids there are no comment pings: some readers
    dispatch an empty event at a comment once an id was seen.

    Raises:
        BadRequest: those events are not there (any more).
    """
    run.log.check(after)
    reading = runs.read(run, after)

    async def frames() -> AsyncIterator[bytes]:
        number = after
        async for events in reading:
            if not with_ids:
                yield sse_frame(events)
                continue
            framed = []
            for event in events:
                number += 1
                framed.append(b"id: %b:%d\n%b" % (run.id.encode(), number, sse_frame([event])))
            yield b"".join(framed)
        if isinstance(run.maker, DataEvents):
            yield DONE

    return SseResponse(
        frames(),
        reading.aclose,
        keep_alive_interval_s=0 if with_ids else keep_alive_interval_s,
        headers=headers,
    )
