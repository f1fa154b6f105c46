"""Runs the functions that a model called: at once, within limits; an error is what the model is told."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from .events import ToolFinished, ToolLoopEvent, ToolStarted
from .tool import Tool, ToolArgumentsError
from .types import ToolCall

OnEvent = Callable[[ToolLoopEvent], None]


@dataclass(frozen=True, kw_only=True)
class ToolLimits:
    """What a tool loop may take."""

    max_rounds: int = 10
    """Requests to the model."""
    call_timeout_s: float = 60.0
    """For one call, where the tool has no limit of its own."""
    concurrency: int = 8
    """Calls that run at once."""

    def __post_init__(self) -> None:
        if self.max_rounds < 1 or self.concurrency < 1 or not self.call_timeout_s > 0:
            raise ValueError("max_rounds and concurrency are 1 or more, call_timeout_s is above 0")


async def run_calls(
    calls: Sequence[ToolCall],
    tools: Mapping[str, Tool],
    limits: ToolLimits,
    on_event: OnEvent | None = None,
) -> list[str]:
    """Return what the model is told of each call, in their order.

    A call that fails, takes too long or names no tool gives an error text. Plain functions run in threads of
    their own: one that takes too long is left to itself, since no thread can be ended from outside.
    Cancelling cancels async functions.
    """
    gate = asyncio.Semaphore(limits.concurrency)
    tell = on_event or _ignore

    async def run(call: ToolCall) -> str:
        async with gate:
            began = time.monotonic()
            tell(ToolStarted(call=call))
            content, is_error = await _outcome(call, tools, limits.call_timeout_s)
            seconds = time.monotonic() - began
            tell(ToolFinished(call=call, content=content, is_error=is_error, seconds=seconds))
            return content

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(call)) for call in calls]
    except BaseExceptionGroup as failed:  # only `on_event` can raise
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _outcome(call: ToolCall, tools: Mapping[str, Tool], timeout_s: float) -> tuple[str, bool]:
    tool = tools.get(call.function.name)
    if tool is None:
        return _error(f"There is no tool {call.function.name!r}; there are: {', '.join(tools)}."), True
    limit_s = timeout_s if tool.timeout_s is None else tool.timeout_s
    try:
        arguments = tool.arguments(call.function.arguments)
        async with asyncio.timeout(limit_s) as scope:
            if tool.is_async:
                result = await tool.function(**arguments)
            else:
                result = await _in_thread(tool, arguments)
        return result_text(result), False
    except ToolArgumentsError as err:
        return _error(str(err)), True
    except TimeoutError as err:
        if scope.expired():
            return _error(f"{tool.name} took longer than {limit_s:g} seconds."), True
        return _error(f"{type(err).__name__}: {err}"), True
    except Exception as err:
        return _error(f"{type(err).__name__}: {err}"), True


def result_text(result: object) -> str:
    """Return a tool's result as the model reads it: text as it is, everything else as JSON.

    Raises:
        TypeError: JSON cannot hold it.
    """
    return result if isinstance(result, str) else msgspec.json.encode(result, enc_hook=_plain).decode()


def _plain(value: object) -> Any:
    """Return the plain form of pydantic's models, which msgspec does not know."""
    dump = getattr(value, "model_dump", None)
    if dump is None:
        raise TypeError(f"a result of type {type(value).__name__} cannot be written as JSON")
    return dump(mode="json")


def _error(message: str) -> str:
    return msgspec.json.encode({"error": message}).decode()


def _ignore(event: ToolLoopEvent) -> None:
    pass


async def _in_thread(tool: Tool, arguments: dict[str, Any]) -> Any:
    """Call a plain function in a daemon thread, which no exit of the program waits for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def finish(result: Any, error: BaseException | None) -> None:
        if done.done():
            return  # given up
        if error is None:
            done.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            done.set_exception(error)
        else:  # what would end the loop, or cannot be in a future, is the tool's own failure
            done.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(tool.function, **arguments)
        except BaseException as err:
            error = err
        try:
            loop.call_soon_threadsafe(finish, result, error)
        except RuntimeError:
            pass  # the loop has ended; nobody waits for this any more

    threading.Thread(target=work, name=f"tool-{tool.name}", daemon=True).start()
    return await done
