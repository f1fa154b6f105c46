"""Answer a file of requests against a server: OpenAI's batch format in and out, resumable.

Knows HTTP and the two file formats; nothing of engines. A request that fails becomes a line like any other;
a later run with the same output file asks again for those that the server could not answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiofiles
import httpx

ATTEMPTS = 6
"""Tries for a request that the server is too busy for, or that found no server."""
LONGEST_WAIT_S = 60.0
UNANSWERED = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses that say nothing of the request itself: worth another try, now or in a later run."""


@dataclass(slots=True)
class Outcome:
    """What became of a file's requests."""

    total: int = 0
    resumed: int = 0
    """Answered by an earlier run."""
    succeeded: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class _Request:
    custom_id: str | None
    url: str
    body: dict[str, Any]
    problem: str | None = None
    """Why it cannot be sent."""


async def answer_file(
    client: httpx.AsyncClient,
    requests: Path,
    output: Path,
    *,
    concurrency: int = 64,
    progress: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Send every request of `requests` that `output` has no answer for, and append the answers to it.

    Answers are written as they come, so in any order. Cancelling leaves whole lines only, or one partial
    last line that the next run drops.

    Raises:
        OSError: a file cannot be read or written.
    """
    everything = list(_read_requests(requests))
    answered = _keep_answered(output)
    waiting = [request for request in everything if request.custom_id not in answered]
    outcome = Outcome(total=len(everything), resumed=len(everything) - len(waiting))
    turns = iter(waiting)

    async with aiofiles.open(output, "ab") as sink, asyncio.TaskGroup() as workers:

        async def work() -> None:
            for request in turns:
                record = await _answer(client, request)
                if record["error"] is None and record["response"]["status_code"] < 400:
                    outcome.succeeded += 1
                else:
                    outcome.failed += 1
                await sink.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                await sink.flush()
                progress(outcome)

        progress(outcome)
        for _ in range(min(concurrency, len(waiting))):
            workers.create_task(work())
    return outcome


def _read_requests(path: Path) -> Iterator[_Request]:
    seen: set[str | None] = set()
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            request = _parse(line)
            if request.problem is None and request.custom_id in seen:
                request = _Request(None, "", {}, f"custom_id {request.custom_id!r} was used before")
            seen.add(request.custom_id)
            if request.problem:
                request = _Request(request.custom_id, "", {}, f"line {number}: {request.problem}")
            yield request


def _parse(line: str) -> _Request:
    try:
        item = json.loads(line)
    except ValueError as err:
        return _Request(None, "", {}, f"not JSON: {err}")
    if not isinstance(item, dict) or not isinstance(item.get("custom_id"), str):
        return _Request(None, "", {}, "expected an object with the string custom_id")
    custom_id, url, body = item["custom_id"], item.get("url"), item.get("body")
    if item.get("method", "POST") != "POST" or not isinstance(url, str) or not url.startswith("/v1/"):
        return _Request(custom_id, "", {}, "expected method POST and a url such as /v1/chat/completions")
    if not isinstance(body, dict) or body.get("stream"):
        return _Request(custom_id, "", {}, "expected a body that is an object and does not stream")
    return _Request(custom_id, url, body)


def _keep_answered(output: Path) -> set[str]:
    """Return the ids that `output` answers, after removing every other line from it."""
    if not output.exists():
        return set()
    answered: set[str] = set()
    kept = output.with_name(output.name + ".tmp")
    with output.open(encoding="utf-8", errors="replace") as lines, kept.open("w", encoding="utf-8") as sink:
        for line in lines:
            try:
                record = json.loads(line)
                custom_id, status = record["custom_id"], record["response"]["status_code"]
            except (ValueError, KeyError, TypeError):
                continue
            if status not in UNANSWERED and line.endswith("\n"):
                answered.add(custom_id)
                sink.write(line)
    os.replace(kept, output)
    return answered


async def _answer(client: httpx.AsyncClient, request: _Request) -> dict[str, Any]:
    record = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request.custom_id, "response": None}
    if request.problem:
        return record | {"error": {"code": "invalid_request", "message": request.problem}}
    try:
        answer = await _post(client, request)
        response = {
            "status_code": answer.status_code,
            "request_id": answer.headers.get("x-request-id", ""),
            "body": answer.json(),
        }
    except httpx.HTTPError as err:
        return record | {"error": {"code": "connection_error", "message": f"{err or type(err).__name__}"}}
    except ValueError as err:
        return record | {"error": {"code": "invalid_response", "message": f"the answer is not JSON: {err}"}}
    return record | {"response": response, "error": None}


async def _post(client: httpx.AsyncClient, request: _Request) -> httpx.Response:
    """Send a request, again while the server is busy or away; the last answer or error counts."""
    for attempt in range(1, ATTEMPTS + 1):
        wait_s = 0.5 * 2**attempt
        try:
            answer = await client.post(request.url, json=request.body)
        except httpx.TransportError:
            if attempt == ATTEMPTS:
                raise
        else:
            if answer.status_code not in (429, 503) or attempt == ATTEMPTS:
                return answer
            retry_after = answer.headers.get("retry-after", "")
            wait_s = float(retry_after) if retry_after.isdigit() else wait_s
        await asyncio.sleep(min(wait_s, LONGEST_WAIT_S))
    raise AssertionError("the last attempt returns or raises")
