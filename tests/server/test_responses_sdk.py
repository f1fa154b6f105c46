"""`client.responses` of OpenAI's own client against a real port."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from http_server import running_server, scripted_app
from pydantic import BaseModel
from scripted_engine import Script, ScriptedEngine, toy_codec


class Scene:
    """A server and its client."""

    def __init__(self, url: str, engine: ScriptedEngine) -> None:
        self.url, self.engine = url, engine
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="one", max_retries=0)


class City(BaseModel):
    name: str
    people: int


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    engine = ScriptedEngine(toy_codec(), Script(text="Hé 😊!", prefill_s=0.12), max_model_len=1000)
    app, _ = scripted_app(engine, api_keys=("one",), keep_alive_interval_s=0.05)
    async with running_server(app) as url:
        scene = Scene(url, engine)
        yield scene
        await scene.client.close()


async def test_create_continue_retrieve_and_delete(scene: Scene) -> None:
    first = await scene.client.responses.create(model="scripted", input="hi")
    assert first.output_text == "Hé 😊!" and first.usage and first.usage.input_tokens_details.cached_tokens
    second = await scene.client.responses.create(
        model="scripted", input="more", previous_response_id=first.id, instructions="be brief"
    )
    assert (await scene.client.responses.retrieve(second.id)).output == second.output
    items = [item async for item in scene.client.responses.input_items.list(second.id, limit=1, order="asc")]
    assert [item.type for item in items] == ["message"] * 3
    await scene.client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        await scene.client.responses.retrieve(second.id)


async def test_the_stream_helper_builds_the_final_response(scene: Scene) -> None:
    async with scene.client.responses.stream(model="scripted", input="hi") as stream:
        texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(texts) == final.output_text == "Hé 😊!"


async def test_parse_gives_an_instance_of_the_model(scene: Scene) -> None:
    scene.engine.script = Script(text='{"name": "Bonn", "people": 7}')
    answer = await scene.client.responses.parse(model="scripted", input="hi", text_format=City)
    assert answer.output_parsed == City(name="Bonn", people=7)
    assert scene.engine.requests[-1].grammar is not None


async def test_a_background_stream_goes_on_where_it_was_left(scene: Scene) -> None:
    stream = await scene.client.responses.create(model="scripted", input="hi", background=True, stream=True)
    seen = []
    async for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    assert seen[0].type == "response.created"
    rest = await scene.client.responses.retrieve(
        seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number
    )
    numbers = [event.sequence_number for event in seen] + [event.sequence_number async for event in rest]
    assert numbers == list(range(len(numbers)))
    assert (await scene.client.responses.retrieve(seen[0].response.id)).output_text == "Hé 😊!"


async def test_cancel_and_count(scene: Scene) -> None:
    scene.engine.script = Script(text="x", endless=True, step_s=0.01)
    begun = await scene.client.responses.create(model="scripted", input="hi", background=True)
    assert (await scene.client.responses.cancel(begun.id)).status == "cancelled"
    counted = await scene.client.responses.input_tokens.count(model="scripted", input="hi")
    assert counted.input_tokens == len(scene.engine.requests[-1].prompt)


async def test_errors_are_raised_as_their_class(scene: Scene) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await scene.client.responses.create(model="scripted", input="x" * 2000)
    assert raised.value.code == "context_length_exceeded" and raised.value.param == "input"
    with pytest.raises(openai.NotFoundError):
        await scene.client.responses.create(model="nope", input="x")
