"""Tools for a model whose template does not know them: told in the Hermes form, in plain messages."""

from __future__ import annotations

import json
from typing import Any

from msgspec.structs import replace

from ..conversation import Message, ToolCall
from .hermes import CLOSE, OPEN

_INTRODUCTION = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_MANNER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    f"{OPEN}{CLOSE} XML tags:\n{OPEN}\n"
    f'{{"name": <function-name>, "arguments": <args-json-object>}}\n{CLOSE}'
)


def with_tools_told(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """The messages with a system text about the tools (in OpenAI's form)."""
    told = _INTRODUCTION + "\n".join(_json(tool) for tool in tools) + _MANNER
    if messages[0].role in ("system", "developer"):
        return [replace(messages[0], content=f"{messages[0].text}\n\n{told}"), *messages[1:]]
    return [Message("system", told), *messages]


def with_calls_told(messages: list[Message]) -> list[Message]:
    """The messages with calls and their results as text; results that follow each other are one turn."""
    told: list[Message] = []
    results: list[str] = []
    for message in messages:
        if message.role == "tool":
            results.append(f"<tool_response>\n{message.text}\n</tool_response>")
            continue
        if results:
            told.append(Message("user", "\n".join(results)))
            results = []
        told.append(_as_text(message))
    return [*told, Message("user", "\n".join(results))] if results else told


def _as_text(message: Message) -> Message:
    if not message.tool_calls:
        return message
    parts = [message.text] if message.text else []
    parts += [f"{OPEN}\n{_call(call)}\n{CLOSE}" for call in message.tool_calls]
    return replace(message, content="\n".join(parts), tool_calls=())


def _call(call: ToolCall) -> str:
    return f'{{"name": {_json(call.name)}, "arguments": {call.arguments or "{}"}}}'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
