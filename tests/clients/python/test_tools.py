"""Python functions as tools: their schema, and the loop that runs them."""

from __future__ import annotations

import asyncio
import contextvars
import enum
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jsonschema
import msgspec
import pydantic
import pytest
from answer_server import Answer, AnswerServer, call_deltas, delta, events

from artesian.clients.python import (
    AsyncClient,
    BadRequestError,
    Cancellation,
    Client,
    ContentDelta,
    Tool,
    ToolFinished,
    ToolLimits,
    ToolLoopCancelled,
    ToolLoopEvent,
    ToolRoundsExceeded,
    ToolRun,
)
from artesian.clients.python.tool import ToolArgumentsError

HELLO = [{"role": "user", "content": "Weather?"}]
FINAL = events(delta("stop", content="Sunny."))


class Unit(enum.Enum):
    C = "celsius"
    F = "fahrenheit"


@dataclass
class Place:
    city: str
    country: str = "DE"


def weather(
    place: Place,
    unit: Unit,
    days: Annotated[int, msgspec.Meta(ge=1, le=7)] = 1,
    *,
    detail: Literal["low", "high"] | None = None,
) -> str:
    """Tell the weather.

    It knows a week.

    Args:
        place: Where, as a city
            and its country.
        unit (Unit): Of temperatures.
        days: How many.

    Returns:
        text: not a parameter
    """
    return f"{place.city} {unit.value} {days} {detail}"


def test_a_tools_definition_comes_from_hints_and_docstring() -> None:
    definition = Tool(weather).definition()["function"]
    schema = definition["parameters"]
    assert (definition["name"], definition["description"]) == (
        "weather", "Tell the weather.\n\nIt knows a week.",
    )  # fmt: skip
    assert schema["required"] == ["place", "unit"] and schema["additionalProperties"] is False
    said = {name: field.get("description") for name, field in schema["properties"].items()}
    assert said == {
        "place": "Where, as a city and its country.", "unit": "Of temperatures.", "days": "How many.",
        "detail": None,
    }  # fmt: skip
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"place": {"city": "Bonn"}, "unit": "celsius"}',
        '{"place": {"city": "Bonn", "country": "DE"}, "unit": "fahrenheit", "days": 7, "detail": "low"}',
        '{"unit": "celsius"}',
        '{"place": "Bonn", "unit": "celsius"}',
        '{"place": {"city": "Bonn"}, "unit": "kelvin"}',
        '{"place": {"city": "Bonn"}, "unit": "celsius", "days": 8}',
        '{"place": {"city": "Bonn"}, "unit": "celsius", "more": 1}',
        "[]",
    ],
)
def test_arguments_are_taken_if_and_only_if_the_schema_takes_them(arguments: str) -> None:
    tool = Tool(weather)
    try:
        jsonschema.validate(msgspec.json.decode(arguments), tool.parameters)
    except jsonschema.ValidationError:
        with pytest.raises(ToolArgumentsError):
            tool.arguments(arguments)
    else:
        assert weather(**tool.arguments(arguments)).startswith("Bonn ")


def test_a_function_without_parameters_takes_an_empty_object() -> None:
    def now() -> str:
        return "noon"

    tool = Tool(now)
    assert tool.parameters["properties"] == {} and "description" not in tool.definition()["function"]
    assert tool.arguments("{}") == tool.arguments("") == {}


def _untyped(x) -> None:  # type: ignore[no-untyped-def]
    pass


def _starred(*x: int) -> None:
    pass


def _by_position(x: int, /) -> None:
    pass


def _without_schema(x: threading.Lock) -> None:
    pass


@pytest.mark.parametrize("function", [_untyped, _starred, _by_position, _without_schema])
def test_a_function_that_cannot_be_a_tool_is_refused_with_its_name(function: Callable[..., None]) -> None:
    with pytest.raises(TypeError, match=function.__name__):
        Tool(function)


@pytest.mark.parametrize("name", ["a b", "x" * 65, "ö"])
def test_a_name_that_tools_cannot_have_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no name for a tool"):
        Tool(weather, name=name)


@pytest.fixture
def server() -> Iterator[AnswerServer]:
    with AnswerServer() as server:
        yield server


def calling(*calls: tuple[str, str, str]) -> Answer:
    return events(*call_deltas(*calls))


def results(server: AnswerServer) -> list[str]:
    """What the model was told in the last request."""
    return [message["content"] for message in server.bodies()[-1]["messages"] if message["role"] == "tool"]


def run(server: AnswerServer, *tools: Any, **options: Any) -> ToolRun:
    with Client(server.url) as client:
        return client.chat.run_tools(HELLO, tools, **options)


def add(a: int, b: int) -> int:
    return a + b


async def double(a: float) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"twice": 2 * a}


def test_calls_run_and_the_answer_ends_the_loop(server: AnswerServer) -> None:
    server.script([calling(("c1", "add", '{"a":2,"b":3}'), ("c2", "double", '{"a":1.5}')), FINAL])
    told: list[ToolLoopEvent] = []
    done = run(server, add, double, temperature=0, tool_choice="required", on_event=told.append)
    assert (done.text, done.rounds) == ("Sunny.", 2)
    first, second = server.bodies()
    assert [tool["function"]["name"] for tool in first["tools"]] == ["add", "double"]
    assert (first["tool_choice"], second["tool_choice"]) == ("required", "auto")
    assert second["messages"] == done.messages[:-1]
    assert [message["role"] for message in done.messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert [message["tool_call_id"] for message in done.messages[2:4]] == ["c1", "c2"]
    assert results(server) == ["5", '{"twice":3.0}']
    assert sum(isinstance(event, ToolFinished) for event in told) == 2
    assert any(isinstance(event, ContentDelta) for event in told)
    assert HELLO == [{"role": "user", "content": "Weather?"}]


async def test_the_async_loop_does_the_same(server: AnswerServer) -> None:
    server.script([calling(("c1", "add", '{"a":2,"b":3}'), ("c2", "double", '{"a":1.5}')), FINAL])
    async with AsyncClient(server.url) as client:
        done = await client.chat.run_tools(HELLO, [add, double], idempotency_key="k")
    assert (done.text, results(server)) == ("Sunny.", ["5", '{"twice":3.0}'])
    assert [seen.headers["idempotency-key"] for seen in server.seen] == ["k-0", "k-1"]


def test_calls_of_one_round_run_at_once_within_the_limit(server: AnswerServer) -> None:
    running, most, lock = 0, 0, threading.Lock()
    met = threading.Barrier(2, timeout=10)

    def meet(n: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        met.wait()
        with lock:
            running -= 1
        return n

    server.script([calling(*[(f"c{n}", "meet", f'{{"n":{n}}}') for n in range(4)]), FINAL])
    run(server, meet, limits=ToolLimits(concurrency=2))
    assert results(server) == ["0", "1", "2", "3"]
    assert most == 2


class Report(pydantic.BaseModel):
    ok: bool


def fails() -> str:
    raise KeyError("no such city")


def exits() -> str:
    raise SystemExit(3)


def stops() -> str:
    raise StopIteration


def times_out_itself() -> str:
    raise TimeoutError("the other server")


def gives_no_json() -> object:
    return object()


def gives_pydantic() -> object:
    return [Report(ok=True)]


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        (fails, "{}", """{"error":"KeyError: 'no such city'"}"""),
        (exits, "{}", '{"error":"RuntimeError: SystemExit: 3"}'),
        (stops, "{}", '{"error":"RuntimeError: StopIteration: "}'),
        (times_out_itself, "{}", '{"error":"TimeoutError: the other server"}'),
        (gives_no_json, "{}", '{"error":"TypeError: a result of type object cannot be written as JSON"}'),
        (gives_pydantic, "{}", '[{"ok":true}]'),
        (add, '{"a":1', '{"error":"The arguments of add are wrong: Input data was truncated"}'),
    ],
)
def test_an_error_of_a_tool_goes_back_to_the_model(
    server: AnswerServer, tool: Callable[..., object], arguments: str, said: str
) -> None:
    server.script([calling(("c1", tool.__name__, arguments)), FINAL])
    assert run(server, tool).text == "Sunny."
    assert results(server) == [said]


def test_an_unknown_tool_is_answered_with_the_known_ones(server: AnswerServer) -> None:
    server.script([calling(("c1", "subtract", "{}")), FINAL])
    run(server, add, double)
    assert results(server) == ["""{"error":"There is no tool 'subtract'; there are: add, double."}"""]


def test_a_call_that_takes_too_long_is_given_up_whatever_it_does(server: AnswerServer) -> None:
    release = threading.Event()

    def hangs() -> None:
        release.wait(30)

    async def sleeps() -> None:
        await asyncio.sleep(30)

    server.script([calling(("c1", "hangs", "{}"), ("c2", "sleeps", "{}")), FINAL])
    began = time.monotonic()
    run(server, Tool(hangs, timeout_s=0.05), sleeps, limits=ToolLimits(call_timeout_s=0.1))
    assert time.monotonic() - began < 5
    assert results(server) == [
        '{"error":"hangs took longer than 0.05 seconds."}',
        '{"error":"sleeps took longer than 0.1 seconds."}',
    ]
    release.set()


def test_rounds_are_limited_and_the_conversation_is_kept(server: AnswerServer) -> None:
    server.script([calling(("c1", "add", '{"a":1,"b":1}'))] * 5)
    with pytest.raises(ToolRoundsExceeded, match="3 rounds") as raised:
        run(server, add, limits=ToolLimits(max_rounds=3))
    assert len(server.seen) == 3
    assert [message["role"] for message in raised.value.messages] == ["user", *["assistant", "tool"] * 2]


def test_a_call_that_was_cut_is_not_run(server: AnswerServer) -> None:
    server.script([events(*call_deltas(("c1", "add", '{"a":1,'))[:-1], delta("length"))])
    assert run(server, add).answer.finish_reason == "length"
    assert len(server.seen) == 1


def test_a_tool_sees_the_callers_context(server: AnswerServer) -> None:
    user: contextvars.ContextVar[str] = contextvars.ContextVar("user")

    def who() -> str:
        return user.get()

    server.script([calling(("c1", "who", "{}")), FINAL])
    token = user.set("Ada")
    run(server, who)
    user.reset(token)
    assert results(server) == ["Ada"]


@pytest.mark.parametrize("tools", [[], [add, add], [Tool(add), Tool(double, name="add")]])
def test_tools_need_names_of_their_own(server: AnswerServer, tools: list[Any]) -> None:
    with pytest.raises(ValueError, match="each with a name"):
        run(server, *tools)
    assert server.seen == []


def test_a_refused_round_raises_what_the_server_said(server: AnswerServer) -> None:
    server.script([Answer(status=400, body={"error": {"message": "no", "param": "tools"}})])
    with pytest.raises(BadRequestError, match="no"):
        run(server, add)


async def test_cancelling_the_task_cancels_the_functions(server: AnswerServer) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def waits() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    server.script([calling(("c1", "waits", "{}"))])
    async with AsyncClient(server.url) as client:
        task = asyncio.create_task(client.chat.run_tools(HELLO, [waits]))
        await asyncio.wait_for(began.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert ended.is_set()


def test_a_waiting_loop_is_cancelled_from_another_thread_while_a_tool_runs(server: AnswerServer) -> None:
    cancellation, release = Cancellation(), threading.Event()

    def hangs() -> None:
        cancellation.cancel()
        release.wait(30)

    server.script([calling(("c1", "hangs", "{}"))])
    with pytest.raises(ToolLoopCancelled) as raised:
        run(server, hangs, cancellation=cancellation)
    assert [message["role"] for message in raised.value.messages] == ["user", "assistant"]
    release.set()


def test_a_waiting_loop_is_cancelled_while_the_model_is_silent(server: AnswerServer) -> None:
    cancellation = Cancellation()
    server.script([Answer(pieces=["data: {}\n\n"], pause_s=30)])
    timer = threading.Timer(0.2, cancellation.cancel)
    timer.start()
    began = time.monotonic()
    with pytest.raises(ToolLoopCancelled):
        run(server, add, cancellation=cancellation)
    assert time.monotonic() - began < 5
    timer.join()


def test_a_cancelled_loop_asks_nothing(server: AnswerServer) -> None:
    cancellation = Cancellation()
    cancellation.cancel()
    with pytest.raises(ToolLoopCancelled):
        run(server, add, cancellation=cancellation)
    assert server.seen == []


async def test_the_waiting_loop_says_so_inside_an_event_loop(server: AnswerServer) -> None:
    with pytest.raises(RuntimeError, match="AsyncClient"):
        run(server, add)
    assert server.seen == []
