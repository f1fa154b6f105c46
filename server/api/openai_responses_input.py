"""The body of `/v1/responses`: its fields, its input items, and their way into a neutral conversation."""

from __future__ import annotations

from collections.abc import Sequence
from secrets import token_hex
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from ...engine.codec import Conversation, Message, TextPart, ToolCall
from ..errors import BadRequest
from .body import typed
from .chat_messages import TEXT_PARTS
from .openai_responses_tools import ToolFields, seen_name
from .prompt_cache import PromptCacheBreakpoint
from .sampling import MAX_LOGPROBS, SamplingFields
from .thinking import Effort
from .tool_use import ToolUse, custom_arguments

S = TypeVar("S", bound=msgspec.Struct)

Item: TypeAlias = dict[str, Any]
"""An input or output item as JSON."""

ROLES = frozenset({"user", "assistant", "system", "developer"})
MAX_METADATA = 16
INCLUDABLE = frozenset({"message.output_text.logprobs", "reasoning.encrypted_content"})
"""What `include` may ask for; reasoning is not hidden here, so there is nothing to encrypt."""


class TextFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseRequest(SamplingFields, kw_only=True):
    """The body of a request. Beside OpenAI's fields it takes the sampling fields that chat has."""

    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=256)] | None = None
    conversation: Any = None
    prompt: Any = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[ToolFields] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class InputPart(msgspec.Struct):
    """One part of a message's content; only text can be served."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class MessageItem(msgspec.Struct):
    role: str
    content: str | list[InputPart]


class FunctionCallItem(msgspec.Struct):
    call_id: Annotated[str, Meta(min_length=1)]
    name: str
    arguments: str = ""
    namespace: str | None = None


class CustomCallItem(msgspec.Struct):
    call_id: Annotated[str, Meta(min_length=1)]
    name: str
    input: str = ""
    namespace: str | None = None


class CallOutputItem(msgspec.Struct):
    call_id: Annotated[str, Meta(min_length=1)]
    output: str | list[InputPart]


class ReasoningItem(msgspec.Struct):
    summary: list[InputPart] = []
    content: list[InputPart] | None = None


def input_items(given: str | list[Item] | None) -> list[Item]:
    """Return a request's own items as they are stored: with ids and types, content as parts.

    Raises:
        BadRequest: no input, or items that are none; `param` has the place.
    """
    if given is None:
        return []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_with_id(item) for item in given]


def _with_id(item: Item) -> Item:
    kind = item.get("type") or "message"
    shown = {**item, "type": kind}
    if not isinstance(shown.get("id"), str):
        shown["id"] = f"{_ID_PREFIXES.get(str(kind), 'item')}_{token_hex(16)}"
    if kind == "message":
        content, by_model = item.get("content"), item.get("role") == "assistant"
        if isinstance(content, str):
            text: Item = {"type": "output_text" if by_model else "input_text", "text": content}
            shown["content"] = [{**text, "annotations": [], "logprobs": []} if by_model else text]
        shown.setdefault("status", "completed")
    return shown


_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


class Turns:
    """Builds a conversation's messages from items: what the assistant did between two others is one turn.

    `last_breakpoint` is the place of the last part with a `prompt_cache_breakpoint`: its message, and the
    parts up to its end.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.last_breakpoint: tuple[int, int] | None = None
        self._called: set[str] = set()
        self._open: Message | None = None
        """The assistant's turn that may still grow."""

    def system(self, text: str) -> None:
        self._close()
        self.messages.append(Message("system", text))

    def add(self, items: Sequence[Item], path: str) -> None:
        """Take items.

        Raises:
            BadRequest: one that cannot be understood; `param` has its place below `path`.
        """
        for i, item in enumerate(items):
            self._add(item, f"{path}[{i}]")

    def finish(self) -> tuple[Message, ...]:
        self._close()
        return tuple(self.messages)

    def _add(self, item: Item, path: str) -> None:
        kind = item.get("type") or "message"
        if kind == "message":
            self._message(_read(item, MessageItem, path), path)
        elif kind == "function_call":
            call = _read(item, FunctionCallItem, path)
            self._call(ToolCall(call.call_id, seen_name(call.namespace, call.name), call.arguments))
        elif kind == "custom_tool_call":
            custom = _read(item, CustomCallItem, path)
            name = seen_name(custom.namespace, custom.name)
            self._call(ToolCall(custom.call_id, name, custom_arguments(custom.input)))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = _read(item, CallOutputItem, path)
            if output.call_id not in self._called:
                raise invalid(f"{path}.call_id", f"{path}.call_id does not name a call of an earlier item")
            self._close()
            content = _content(output.output, f"{path}.output")
            self.messages.append(Message("tool", content, tool_call_id=output.call_id))
        elif kind == "reasoning":
            thought = _read(item, ReasoningItem, path)
            text = "".join(part.text or "" for part in thought.content or thought.summary)
            opened = self._opened()
            if opened.content is not None or opened.tool_calls:
                self._close()  # it thinks anew: another turn
                opened = self._opened()
            self._open = msgspec.structs.replace(opened, reasoning=(opened.reasoning or "") + text)
        else:
            shown = str(kind)[:40]
            raise invalid(f"{path}.type", f"{path} has type {shown!r}, which this server does not take")

    def _message(self, message: MessageItem, path: str) -> None:
        if message.role not in ROLES:
            shown = message.role[:40]
            raise invalid(
                f"{path}.role", f"{path}.role is {shown!r}; expected one of {', '.join(sorted(ROLES))}"
            )
        content = _content(message.content, f"{path}.content")
        if message.role == "assistant":
            opened = self._opened()
            if opened.content is not None or opened.tool_calls:
                self._close()
                opened = self._opened()
            self._open = msgspec.structs.replace(opened, content=content)
            self._mark(message.content)
            return
        self._close()
        self._mark(message.content)
        self.messages.append(Message(message.role, content))

    def _call(self, call: ToolCall) -> None:
        opened = self._opened()
        self._called.add(call.id)
        self._open = msgspec.structs.replace(opened, tool_calls=(*opened.tool_calls, call))

    def _mark(self, content: str | list[InputPart]) -> None:
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if part.prompt_cache_breakpoint is not None:
                self.last_breakpoint = (len(self.messages), number + 1)

    def _opened(self) -> Message:
        if self._open is None:
            self._open = Message("assistant", None)
        return self._open

    def _close(self) -> None:
        if self._open is not None:
            self.messages.append(self._open)
            self._open = None


def to_turns(instructions: str | None, earlier: Sequence[Item], own: Sequence[Item]) -> Turns:
    """Return the messages of a request: its instructions, what went before, its own input.

    Raises:
        BadRequest: see `Turns.add`; or there is nothing to answer.
    """
    turns = Turns()
    if instructions is not None:
        turns.system(instructions)
    turns.add(earlier, "previous_response_id.items")
    turns.add(own, "input")
    if not turns.finish():
        raise invalid("input", "input is missing: there is nothing to answer")
    return turns


def conversation_of(turns: Turns, use: ToolUse) -> Conversation:
    return Conversation(turns.finish(), use.tools, use.choice)


def _content(content: str | list[InputPart], path: str) -> str | tuple[TextPart, ...]:
    if isinstance(content, str):
        return content
    parts: list[TextPart] = []
    for j, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in TEXT_PARTS and part.type != "refusal":
            raise invalid(
                f"{path}[{j}].type", f"{path}[{j}] has type {part.type[:40]!r}; this model takes text only"
            )
        if text is None:
            raise invalid(f"{path}[{j}].text", f"{path}[{j}].text is missing")
        parts.append(TextPart(text))
    return tuple(parts)


def _read(item: Item, form: type[S], path: str) -> S:
    try:
        return typed(item, form)
    except BadRequest as err:
        param = path if err.param is None else f"{path}.{err.param}"
        raise invalid(param, f"{path}: {err.message}") from None


def check_options(fields: ResponseRequest) -> None:
    """Refuse what this server has no way to honour.

    Raises:
        BadRequest: names the field.
    """
    for name, why in (("conversation", "use previous_response_id"), ("prompt", "send the text as input")):
        if getattr(fields, name) is not None:
            raise BadRequest(
                f"`{name}` is not available on this server: {why}", code="unsupported_parameter", param=name
            )
    if fields.truncation == "auto":
        raise BadRequest(
            "truncation='auto' is not available: nothing is dropped silently; shorten the input",
            code="unsupported_parameter",
            param="truncation",
        )
    for i, name in enumerate(fields.include or ()):
        if name not in INCLUDABLE:
            raise invalid(f"include[{i}]", f"include[{i}]={name[:60]!r} is not available here")
    if fields.metadata is not None and len(fields.metadata) > MAX_METADATA:
        raise invalid("metadata", f"metadata has {len(fields.metadata)} keys; the limit is {MAX_METADATA}")
    if fields.n not in (None, 1):
        raise invalid("n", "n must be 1: a response has one answer")
    if fields.background and fields.store is False:
        raise invalid("background", "background=true needs store=true: nobody could read the answer")


def invalid(param: str, message: str) -> BadRequest:
    return BadRequest(message, code="invalid_value", param=param)
