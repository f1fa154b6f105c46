"""Agent frameworks run a loop of two tools, unchanged, over Responses and over Chat Completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import agents
import openai
import pydantic_ai
import pytest
from agent_scripts import agent_engine, call
from http_server import running_server, scripted_app
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PAIR = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


@pytest.fixture
async def url() -> AsyncIterator[str]:
    engine = agent_engine(
        ("sum is 42", "It is sunny, and 42."),
        ("sunny in Bonn", call("add", '{"a": 40, "b": 2}')),
        ("", call("weather", '{"city": "Bonn"}')),
    )
    app, _ = scripted_app(engine)
    async with running_server(app) as url:
        yield url


@agents.function_tool
def weather(city: str) -> str:
    """The weather."""
    return f"sunny in {city}"


@agents.function_tool
def add(a: int, b: int) -> str:
    """The sum."""
    return f"sum is {a + b}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", [agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel])
async def test_openai_agents_run(url: str, form: Any, stream: bool) -> None:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = form("scripted", client)
    agent = agents.Agent(name="a", instructions="Use the tools.", model=model, tools=[weather, add])
    if stream:
        running = agents.Runner.run_streamed(agent, "Weather in Bonn, and 40 + 2?")
        assert [event async for event in running.stream_events()]
        final = running.final_output
    else:
        final = (await agents.Runner.run(agent, "Weather in Bonn, and 40 + 2?")).final_output
    await client.close()
    assert final == "It is sunny, and 42."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", [OpenAIResponsesModel, OpenAIChatModel])
async def test_pydantic_ai_runs(url: str, form: Any, stream: bool) -> None:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    agent = pydantic_ai.Agent(
        form("scripted", provider=OpenAIProvider(openai_client=client)), instructions="Use the tools."
    )

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather."""
        return f"sunny in {city}"

    @agent.tool_plain
    def add(a: int, b: int) -> str:
        """The sum."""
        return f"sum is {a + b}"

    if stream:
        async with agent.run_stream("Weather in Bonn, and 40 + 2?") as running:
            final = await running.get_output()
    else:
        final = (await agent.run("Weather in Bonn, and 40 + 2?")).output
    await client.close()
    assert final == "It is sunny, and 42."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("use_responses", [True, False])
async def test_langchain_runs(url: str, use_responses: bool, stream: bool) -> None:
    key = SecretStr("none")
    plain = ChatOpenAI(model="scripted", base_url=f"{url}/v1", api_key=key, use_responses_api=use_responses)
    tools = [
        {"name": "weather", "description": "", "parameters": CITY},
        {"name": "add", "description": "", "parameters": PAIR},
    ]
    model = plain.bind_tools(tools)

    async def ask(messages: list[Any]) -> Any:
        if not stream:
            return await model.ainvoke(messages)
        chunks = [chunk async for chunk in model.astream(messages)]
        return sum(chunks[1:], chunks[0])

    messages: list[Any] = [("user", "Weather in Bonn, and 40 + 2?")]
    for _ in range(2):
        answer = await ask(messages)
        made = answer.tool_calls[0]
        values = made["args"]
        found = f"sunny in {values['city']}" if "city" in values else f"sum is {values['a'] + values['b']}"
        messages += [answer, {"role": "tool", "content": found, "tool_call_id": made["id"]}]
    assert (await ask(messages)).text == "It is sunny, and 42."
