"""The body of `/v1/messages`: its fields, its content blocks, and their way into a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from ...engine import CachePolicy
from ...engine.codec import Conversation, ForcedTool, Message, TextPart, Tool, ToolCall
from ..errors import BadRequest
from .prompt_cache import PromptCacheFields, cache_policy, parse_ttl
from .sampling import SamplingFields
from .thinking import Effort, Thinking, thinking_arguments
from .tool_use import ToolChoice, ToolUse, tool_named


class CacheControl(msgspec.Struct, kw_only=True):
    """A cache breakpoint. Without `ttl` the server's own time to live counts, which is longer than theirs."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] | None = None


class Block(msgspec.Struct, kw_only=True):
    """One content block of a request; `type` says which of the fields count."""

    type: str
    text: str | None = None
    citations: Any = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Content: TypeAlias = str | list[Block]


class Turn(msgspec.Struct):
    """One message of a request."""

    role: Literal["user", "assistant", "system"]
    content: Content


class ToolForm(msgspec.Struct, kw_only=True):
    """A tool on offer; only the caller's own can be, none that a server would run."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoiceForm(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    format: OutputFormat | None = None
    effort: Effort | None = None


class Metadata(msgspec.Struct, kw_only=True):
    user_id: str | None = None


class MessagesRequest(PromptCacheFields, kw_only=True):
    """The body of a request; the prompt cache's fields are ours."""

    model: str
    messages: list[Turn]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    system: Content | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    tools: list[ToolForm] | None = None
    tool_choice: ToolChoiceForm | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    """On the whole request: all of the prompt is kept, with that time to live."""
    metadata: Metadata | None = None
    service_tier: str | None = None


class Reading:
    """A request's messages as a conversation, with the last cache breakpoint in it."""

    def __init__(self, fields: MessagesRequest, use: ToolUse) -> None:
        """Raises: BadRequest: a block that cannot be understood; `param` has its place."""
        self.last_breakpoint: tuple[int, int] | None = None
        """Its message, and the parts up to its end."""
        self.control: CacheControl | None = None
        """Of that breakpoint."""
        self._messages: list[Message] = []
        self._called: set[str] = set()
        self._marked_tools = [tool.cache_control for tool in fields.tools or () if tool.cache_control]
        if fields.system is not None:
            self._message("system", fields.system, "system")
        for i, turn in enumerate(fields.messages):
            path = f"messages[{i}]"
            if turn.role == "assistant":
                self._assistant(turn.content, f"{path}.content")
            else:
                self._message(turn.role, turn.content, f"{path}.content")
        if not fields.messages:
            raise invalid("messages", "messages is empty; at least one message is needed")
        self.conversation = Conversation(tuple(self._messages), use.tools, use.choice)
        self.continues = fields.messages[-1].role == "assistant"
        """The answer goes on with the last message."""

    def policy(self, fields: MessagesRequest, breakpoint_tokens: int | None) -> CachePolicy:
        """What the cache may do: up to the last breakpoint if there is one, else everything."""
        policy = cache_policy(fields, lambda: breakpoint_tokens)
        control = fields.cache_control or self.control or next(iter(self._marked_tools), None)
        if control is None:
            return policy
        ttl_s = policy.ttl_s if control.ttl is None else parse_ttl(control.ttl, "cache_control.ttl")
        limit = policy.write_tokens if fields.cache_control else breakpoint_tokens
        return msgspec.structs.replace(policy, ttl_s=ttl_s, write_tokens=limit)

    def _message(self, role: str, content: Content, path: str) -> None:
        """A message of the user or of the system; what tools gave are messages of their own."""
        if isinstance(content, str):
            self._messages.append(Message(role, content))
            return
        parts: list[TextPart] = []
        for j, block in enumerate(content):
            if block.type == "tool_result" and role == "user":
                self._flush(role, parts)
                self._result(block, f"{path}[{j}]")
            else:
                parts.append(_text(block, f"{path}[{j}]"))
                self._mark(block, len(parts))
        self._flush(role, parts)
        if not content:
            self._messages.append(Message(role, ""))

    def _flush(self, role: str, parts: list[TextPart]) -> None:
        if parts:
            self._messages.append(Message(role, tuple(parts)))
            parts.clear()

    def _result(self, block: Block, path: str) -> None:
        if block.tool_use_id is None or block.tool_use_id not in self._called:
            raise invalid(
                f"{path}.tool_use_id", f"{path}.tool_use_id does not name a tool_use of an earlier message"
            )
        content: str | tuple[TextPart, ...]
        if isinstance(block.content, list):
            content = tuple(_text(one, f"{path}.content[{k}]") for k, one in enumerate(block.content))
        else:
            content = block.content or ""
        self._mark(block, max(1, len(content)) if isinstance(content, tuple) else 1)
        self._messages.append(Message("tool", content, tool_call_id=block.tool_use_id))

    def _assistant(self, content: Content, path: str) -> None:
        if isinstance(content, str):
            self._messages.append(Message("assistant", content))
            return
        parts: list[TextPart] = []
        calls: list[ToolCall] = []
        thoughts: list[str] = []
        for j, block in enumerate(content):
            place = f"{path}[{j}]"
            if block.type == "thinking":
                thoughts.append(block.thinking or "")
            elif block.type == "redacted_thinking":
                pass  # nobody here can read it
            elif block.type == "tool_use":
                if not block.id or not block.name:
                    raise invalid(f"{place}.id", f"{place} needs an id and a name")
                arguments = msgspec.json.encode(block.input or {}).decode()
                calls.append(ToolCall(block.id, block.name, arguments))
                self._called.add(block.id)
            else:
                parts.append(_text(block, place))
            self._mark(block, len(parts))
        said = tuple(parts) if parts or not calls else None
        self._messages.append(
            Message("assistant", said, tool_calls=tuple(calls), reasoning="".join(thoughts) or None)
        )

    def _mark(self, block: Block, parts: int) -> None:
        if block.cache_control is not None:
            self.last_breakpoint, self.control = (len(self._messages), parts), block.cache_control


def sampling_fields(fields: MessagesRequest) -> SamplingFields:
    """Return what the request says of sampling, in the form that all protocols share."""
    return SamplingFields(
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        stop=fields.stop_sequences,
        stream=fields.stream,
    )


def template_arguments(fields: MessagesRequest) -> dict[str, Any]:
    """Return what the request tells the chat template of thinking."""
    return thinking_arguments(fields.output_config.effort if fields.output_config else None, fields.thinking)


def invalid(param: str, message: str) -> BadRequest:
    return BadRequest(message, code="invalid_value", param=param)


def _text(block: Block, path: str) -> TextPart:
    if block.type != "text":
        raise invalid(
            f"{path}.type", f"{path} has type {block.type[:40]!r}; this model takes text there only"
        )
    if block.text is None:
        raise invalid(f"{path}.text", f"{path}.text is missing")
    return TextPart(block.text)


HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_")
"""How the types of tools begin that Anthropic runs."""


def tool_use(fields: MessagesRequest, warnings: list[str] | None = None) -> ToolUse:
    """Return the tools on offer. What Anthropic would run is left out, and `warnings` say so.

    Raises:
        BadRequest: a tool whose calls have a form of their own, or a choice that cannot be made.
    """
    tools: list[Tool] = []
    places: list[str] = []
    for i, tool in enumerate(fields.tools or ()):
        if tool.type is not None and tool.type.startswith(HOSTED):
            if warnings is not None:
                warnings.append(f"tools[{i}] is not offered: this server runs no tools of type {tool.type!r}")
            continue
        if tool.type not in (None, "custom"):
            raise BadRequest(
                f"tools[{i}] has type {tool.type[:40]!r}; this server runs no tools, it offers the caller's",
                code="unsupported_parameter",
                param=f"tools[{i}].type",
            )
        place = f"tools[{i}].input_schema"
        tools.append(tool_named(tool.name, tool.description, tool.input_schema, bool(tool.strict), place))
        places.append(place)
    given = fields.tool_choice or ToolChoiceForm(type="auto")
    choice: ToolChoice
    if given.type == "tool":
        if given.name is None:
            raise invalid("tool_choice.name", "tool_choice.name is missing")
        choice = ForcedTool(given.name)
    else:
        choice = "required" if given.type == "any" else given.type
    return ToolUse(tuple(tools), choice, not given.disable_parallel_tool_use, None, tuple(places))
