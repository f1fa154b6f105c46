"""The README's first steps, and OpenAI's Python SDK, against the real server with the real model."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam
from readme import code_block, curl_session
from real_server import MODEL_NAME, RealServer

pytestmark = pytest.mark.model

ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name three rivers."}]
GREEDY: dict[str, Any] = {"model": MODEL_NAME, "messages": ASK, "temperature": 0, "max_tokens": 24}
SAMPLED: dict[str, Any] = {**GREEDY, "temperature": 1}


@pytest.fixture
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def text_of(answer: ChatCompletion, choice: int = 0) -> str:
    return answer.choices[choice].message.content or ""


def shape(value: object) -> object:
    """Names all the way down, without the values."""
    if isinstance(value, dict):
        return {key: shape(part) for key, part in value.items()}
    return [shape(part) for part in value] if isinstance(value, list) else None


def test_the_readmes_python_block_prints_an_answer(server: RealServer) -> None:
    command = [sys.executable, "-P", "-c", code_block("python", server.url)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) > 3


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_readmes_curl_line_gives_an_answer_of_the_shown_form(server: RealServer) -> None:
    command, shown = curl_session(server.url)
    done = subprocess.run([*command, "--silent"], capture_output=True, text=True, timeout=60)
    answer, expected = json.loads(done.stdout), json.loads(shown)
    # What it says depends on what was asked before.
    said, told = (whole.pop("prompt_cache_diagnostics") for whole in (answer, expected))
    assert {said["type"], told["type"]} <= {"cache_hit", "cache_miss"}
    assert shape(answer) == shape(expected)
    assert answer["choices"][0]["finish_reason"] == expected["choices"][0]["finish_reason"]


async def test_sync_async_and_streamed_answers_are_the_same(
    server: RealServer, client: openai.OpenAI
) -> None:
    whole = text_of(client.chat.completions.create(**GREEDY))
    streamed = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**GREEDY, stream=True)
    ]
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as other:
        awaited = text_of(await other.chat.completions.create(**GREEDY))
        chunks = [chunk async for chunk in await other.chat.completions.create(**GREEDY, stream=True)]
    assert whole == "".join(streamed) == awaited
    assert whole == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert len(streamed) > 10 and len({chunk.id for chunk in chunks}) == 1


def test_usage_comes_in_a_chunk_of_its_own(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY).usage
    options: Any = {"include_usage": True}
    *_, last = client.chat.completions.create(**GREEDY, stream=True, stream_options=options)
    assert last.choices == [] and last.usage is not None and whole is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (whole.prompt_tokens, 24)


def test_a_raw_streaming_response_shows_events(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_streaming_response
    with raw.create(**GREEDY, stream=True) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["choices"] for line in lines[:-1])


def test_choices_differ_and_each_has_the_logprobs_of_its_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**SAMPLED, n=3, logprobs=True, top_logprobs=4)
    assert len({text_of(answer, i) for i in range(3)}) == 3
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        tokens = choice.logprobs.content
        raw = b"".join(bytes(token.bytes or []) for token in tokens)
        assert raw.decode(errors="replace").removesuffix("<|im_end|>") == choice.message.content
        for token in tokens:
            top = [other.logprob for other in token.top_logprobs]
            assert top == sorted(top, reverse=True) and len(top) == 4
            assert token.logprob <= top[0] and sum(map(math.exp, top)) <= 1.0001


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, stream: bool) -> None:
    whole = text_of(client.chat.completions.create(**GREEDY))
    stop = whole[len(whole) // 2 : len(whole) // 2 + 5]
    want = whole[: whole.index(stop)]
    answer = client.chat.completions.create(**GREEDY, stop=[stop, "never said"], stream=stream)
    if isinstance(answer, ChatCompletion):
        got, reason = text_of(answer), str(answer.choices[0].finish_reason)
    else:
        choices = [chunk.choices[0] for chunk in answer]
        got = "".join(choice.delta.content or "" for choice in choices)
        reason = str(choices[-1].finish_reason)
    assert (got, reason) == (want, "stop")


def test_a_seed_gives_the_same_text_again_and_another_seed_another(client: openai.OpenAI) -> None:
    one, again, other = (
        text_of(client.chat.completions.create(**SAMPLED, seed=seed)) for seed in (11, 11, 12)
    )
    assert one == again != other


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fields", "error", "code", "param"),
    [
        ({"temperature": 9}, openai.BadRequestError, "invalid_value", "temperature"),
        ({"top_logprobs": 99, "logprobs": True}, openai.BadRequestError, "invalid_value", "top_logprobs"),
        ({"model": "gpt-9"}, openai.NotFoundError, "model_not_found", "model"),
        (
            {"messages": [{"role": "user", "content": "word " * 600}]},
            openai.BadRequestError,
            "context_length_exceeded",
            "messages",
        ),
    ],
)
def test_errors_are_typed_and_say_which_field(
    client: openai.OpenAI,
    fields: dict[str, Any],
    error: type[openai.APIStatusError],
    code: str,
    param: str,
    stream: bool,
) -> None:
    with pytest.raises(error) as raised:
        client.chat.completions.create(**{**GREEDY, **fields, "stream": stream})
    assert (raised.value.code, raised.value.param) == (code, param)
    assert raised.value.request_id == raised.value.response.headers["x-request-id"]


async def test_a_full_queue_refuses_and_the_sdk_comes_back(server: RealServer) -> None:
    many = 16  # twice what runs and waits
    before = server.metrics().get("artesian_admission_rejections_total", 0)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as impatient:
        results = await asyncio.gather(
            *(impatient.chat.completions.create(**GREEDY) for _ in range(many)), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, openai.InternalServerError)]
        assert refused and len(refused) < many
        assert {(error.status_code, error.code) for error in refused} == {(503, "server_overloaded")}
        assert all(isinstance(result, ChatCompletion) for result in results if result not in refused)
        patient = impatient.with_options(max_retries=20)
        answers = await asyncio.gather(*(patient.chat.completions.create(**GREEDY) for _ in range(many)))
    assert len({text_of(answer) for answer in answers}) == 1
    assert server.metrics()["artesian_admission_rejections_total"] >= before + len(refused)
    server.assert_idle()
