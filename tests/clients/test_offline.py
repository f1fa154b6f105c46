"""A file of requests is answered against a real ASGI application that misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from artesian.clients.offline import Outcome, answer_file


class Echo:
    """Answers with the prompt; prompts named in `failures` get these answers first."""

    def __init__(self, **failures: list[Response]) -> None:
        self.failures, self.asked, self.busy, self.most_busy = failures, Counter[str](), 0, 0

    async def answer(self, request: Request) -> Response:
        prompt = (await request.json())["prompt"]
        self.asked[prompt] += 1
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        await asyncio.sleep(0)
        self.busy -= 1
        if self.failures.get(prompt):
            return self.failures[prompt].pop(0)
        return JSONResponse({"text": prompt}, headers={"x-request-id": f"req-{prompt}"})


def _line(custom_id: str, **changes: object) -> str:
    item = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": custom_id}}
    return json.dumps(item | changes)


async def _answer(echo: Echo, tmp_path: Path, *lines: str, concurrency: int = 4) -> Outcome:
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    app = Starlette(routes=[Route("/v1/completions", echo.answer, methods=["POST"])])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await answer_file(
            client, tmp_path / "in.jsonl", tmp_path / "out.jsonl", concurrency=concurrency
        )


def _records(tmp_path: Path) -> dict[str | None, dict[str, Any]]:
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    return {record["custom_id"]: record for record in records}


async def test_every_request_gets_a_record_in_the_batch_format(tmp_path: Path) -> None:
    outcome = await _answer(Echo(), tmp_path, _line("a"), "", _line("b"))
    assert outcome == Outcome(total=2, succeeded=2)
    record = _records(tmp_path)["b"]
    assert record.pop("id").startswith("batch_req_")
    assert record == {
        "custom_id": "b",
        "response": {"status_code": 200, "request_id": "req-b", "body": {"text": "b"}},
        "error": None,
    }


async def test_a_second_run_asks_only_for_what_is_missing(tmp_path: Path) -> None:
    echo = Echo()
    await _answer(echo, tmp_path, _line("a"), _line("b"))
    outcome = await _answer(echo, tmp_path, _line("a"), _line("b"), _line("c"))
    assert outcome == Outcome(total=3, resumed=2, succeeded=1)
    assert echo.asked == {"a": 1, "b": 1, "c": 1}
    assert set(_records(tmp_path)) == {"a", "b", "c"}


async def test_a_partial_last_line_is_asked_again(tmp_path: Path) -> None:
    await _answer(Echo(), tmp_path, _line("a"), _line("b"), concurrency=1)
    whole = (tmp_path / "out.jsonl").read_bytes()
    for cut in (1, 5, len(whole.splitlines()[1])):
        (tmp_path / "out.jsonl").write_bytes(whole[:-cut])
        assert (await _answer(Echo(), tmp_path, _line("a"), _line("b"))).resumed == 1
        assert set(_records(tmp_path)) == {"a", "b"}


async def test_what_the_server_could_not_answer_is_asked_again_but_what_it_refused_is_not(
    tmp_path: Path,
) -> None:
    refused = JSONResponse({"error": {"message": "no"}}, status_code=400)
    echo = Echo(a=[PlainTextResponse("{}", 500)], b=[refused])
    assert (await _answer(echo, tmp_path, _line("a"), _line("b"))).failed == 2
    outcome = await _answer(echo, tmp_path, _line("a"), _line("b"))
    assert outcome == Outcome(total=2, resumed=1, succeeded=1)
    assert _records(tmp_path)["b"]["response"]["status_code"] == 400


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_server_is_asked_again_when_it_says(status: int, tmp_path: Path) -> None:
    busy = [Response(status_code=status, headers={"retry-after": "0"}) for _ in range(3)]
    echo = Echo(a=list(busy))
    assert (await _answer(echo, tmp_path, _line("a"))).succeeded == 1
    assert echo.asked["a"] == 4


@pytest.mark.parametrize(
    ("line", "custom_id", "message"),
    [
        ("{", None, "line 2: not JSON"),
        ("[]", None, "line 2: expected an object with the string custom_id"),
        (_line("x", url="https://other/v1"), "x", "line 2: expected method POST and a url"),
        (_line("x", body={"stream": True}), "x", "line 2: expected a body"),
        (_line("a"), None, "line 2: custom_id 'a' was used before"),
    ],
)
async def test_a_line_that_is_no_request_fails_alone(
    line: str, custom_id: str | None, message: str, tmp_path: Path
) -> None:
    outcome = await _answer(Echo(), tmp_path, _line("a"), line, _line("b"))
    assert (outcome.succeeded, outcome.failed) == (2, 1)
    assert message in _records(tmp_path)[custom_id]["error"]["message"]


async def test_an_answer_that_is_not_json_is_an_error_of_its_line(tmp_path: Path) -> None:
    outcome = await _answer(Echo(a=[PlainTextResponse("<html>")]), tmp_path, _line("a"), _line("b"))
    assert (outcome.succeeded, outcome.failed) == (1, 1)
    assert _records(tmp_path)["a"]["error"]["code"] == "invalid_response"


async def test_no_more_requests_are_open_than_allowed(tmp_path: Path) -> None:
    echo = Echo()
    await _answer(echo, tmp_path, *(_line(str(number)) for number in range(20)), concurrency=3)
    assert echo.most_busy == 3


async def test_a_missing_input_touches_no_output(tmp_path: Path) -> None:
    async with httpx.AsyncClient(base_url="http://test") as client:
        with pytest.raises(FileNotFoundError):
            await answer_file(client, tmp_path / "none", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
