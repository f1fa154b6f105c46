"""OpenAI's own client against a real port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest
from agent_scripts import agent_engine, call
from http_server import running_server, scripted_app
from openai.types.chat import ChatCompletionMessageParam
from scripted_engine import Script, ScriptedEngine, toy_codec

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


class Scene:
    """A server and its clients."""

    def __init__(self, url: str, engine: ScriptedEngine) -> None:
        self.url, self.engine = url, engine
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="one")
        self.sync_client = openai.OpenAI(base_url=f"{url}/v1", api_key="one")


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    engine = ScriptedEngine(toy_codec(), Script(text="Hé 😊!", prefill_s=0.15), max_model_len=200)
    app, _ = scripted_app(engine, api_keys=("one",), keep_alive_interval_s=0.05)
    async with running_server(app) as url:
        scene = Scene(url, engine)
        yield scene
        await scene.client.close()
        scene.sync_client.close()


async def test_a_whole_answer_has_everything_the_types_promise(scene: Scene) -> None:
    answer = await scene.client.chat.completions.create(
        model="scripted", messages=HELLO, logprobs=True, top_logprobs=2, n=2, seed=1, user="u"
    )
    assert [choice.message.content for choice in answer.choices] == ["Hé 😊!"] * 2
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content[0].top_logprobs) == 2
    assert answer._request_id
    assert answer.system_fingerprint


async def test_an_async_stream_reads_through_keep_alives(scene: Scene) -> None:
    stream = await scene.client.chat.completions.create(
        model="scripted", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hé 😊!"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None and chunks[-1].choices == []


async def test_a_sync_stream_reads_through_keep_alives(scene: Scene) -> None:
    def read() -> str:
        stream = scene.sync_client.chat.completions.create(model="scripted", messages=HELLO, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(read) == "Hé 😊!"


async def test_the_stream_helper_builds_the_final_message(scene: Scene) -> None:
    async with scene.client.chat.completions.stream(model="scripted", messages=HELLO) as stream:
        texts = [event.delta async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()
    assert "".join(texts) == final.choices[0].message.content == "Hé 😊!"


async def test_raw_streaming_responses_show_headers_first(scene: Scene) -> None:
    async with scene.client.chat.completions.with_streaming_response.create(
        model="scripted", messages=HELLO, stream=True
    ) as answer:
        assert answer.headers["x-accel-buffering"] == "no"
        lines = [line async for line in answer.iter_lines()]
    assert lines[0] == ": keep-alive"
    assert lines[-2:] == ["data: [DONE]", ""]


async def test_completions_with_echo_and_logprobs(scene: Scene) -> None:
    answer = await scene.client.completions.create(
        model="scripted", prompt=["ab", "c"], echo=True, logprobs=1, max_tokens=2
    )
    assert [choice.text for choice in answer.choices] == ["abH�", "cH�"]  # é is cut in half
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.tokens or []) == 4


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (openai.BadRequestError, {"temperature": 9}),
        (openai.NotFoundError, {"model": "nope"}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": "x" * 300}]}),
        (openai.BadRequestError, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_errors_are_raised_as_their_class(
    scene: Scene, error: type[openai.APIStatusError], fields: dict[str, Any], stream: bool
) -> None:
    with pytest.raises(error) as raised:
        call: dict[str, Any] = {"model": "scripted", "messages": HELLO, "stream": stream, **fields}
        await scene.client.chat.completions.create(**call)
    assert isinstance(raised.value.code, str)
    assert raised.value.request_id


async def test_a_wrong_key_is_an_authentication_error(scene: Scene) -> None:
    with pytest.raises(openai.AuthenticationError):
        await scene.client.with_options(api_key="two").models.list()


async def test_a_fault_in_a_stream_is_an_api_error(scene: Scene) -> None:
    scene.engine.script = Script(text="abcdef", fail_after=2)
    stream = await scene.client.chat.completions.create(model="scripted", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="on fire"):
        async for _ in stream:
            pass


async def test_a_refused_request_is_tried_again_and_succeeds(scene: Scene) -> None:
    scene.engine.queue_limit = 0
    asyncio.get_running_loop().call_later(0.3, lambda: setattr(scene.engine, "queue_limit", 10))
    answer = await scene.client.with_options(max_retries=5).chat.completions.create(
        model="scripted", messages=HELLO
    )
    assert answer.choices[0].finish_reason == "stop"


async def test_leaving_a_stream_frees_its_request(scene: Scene) -> None:
    scene.engine.script = Script(text="x", endless=True, step_s=0.01)
    async with await scene.client.chat.completions.create(
        model="scripted", messages=HELLO, stream=True
    ) as stream:
        async for _ in stream:
            break
    await asyncio.sleep(0.2)
    assert scene.engine.status().running == 0
    assert len(scene.engine.aborted) == 1


class Add(pydantic.BaseModel):
    """Add."""

    a: int
    b: int


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_are_parsed_into_models(stream: bool) -> None:
    both = [call("Add", '{"a": 1, "b": 2}'), call("Add", '{"a": 3, "b": 4}')]
    engine = agent_engine(("", "\n".join(both)))
    app, _ = scripted_app(engine)
    fields: dict[str, Any] = {
        "model": "scripted", "messages": HELLO, "tools": [openai.pydantic_function_tool(Add)],
    }  # fmt: skip
    async with running_server(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k") as client:
        if stream:
            async with client.chat.completions.stream(**fields) as events:
                kinds = [event.type async for event in events]
                answer = await events.get_final_completion()
            assert kinds.count("tool_calls.function.arguments.done") == 2
        else:
            answer = await client.chat.completions.parse(**fields)
    calls = answer.choices[0].message.tool_calls
    assert calls and [one.function.parsed_arguments for one in calls] == [Add(a=1, b=2), Add(a=3, b=4)]


async def test_models_are_listed_and_found(scene: Scene) -> None:
    assert [model.id async for model in scene.client.models.list()] == ["scripted"]
    assert (await scene.client.models.retrieve("scripted")).owned_by == "artesian"
