"""The messages of a chat request: their Structs, the neutral conversation, the prompt's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from ...engine import ContextTooLong, InvalidRequest
from ...engine.codec import Codec, Conversation, Message, TextPart, ToolCall
from ..cache_trace import as_array, common_prefix
from ..errors import BadRequest
from ..service import Service
from .normalise import Change, normalise
from .prompt_cache import PromptCacheBreakpoint
from .tool_use import NO_TOOLS, ToolUse, custom_arguments

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


class ContentPart(msgspec.Struct):
    """One part of a message's content; only text parts can be served."""

    type: str
    text: str | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class FunctionFields(msgspec.Struct):
    name: str
    arguments: str = ""


class CustomFields(msgspec.Struct):
    name: str
    input: str = ""


class ToolCallFields(msgspec.Struct):
    """A call of an earlier answer."""

    id: Annotated[str, Meta(min_length=1)]
    function: FunctionFields | None = None
    type: str = "function"
    index: int | None = None
    custom: CustomFields | None = None


class MessageFields(msgspec.Struct, kw_only=True):
    """One message of a request."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallFields] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


def to_conversation(messages: list[MessageFields], use: ToolUse = NO_TOOLS) -> Conversation:
    """Return the neutral form of a request's messages and tools.

    Raises:
        BadRequest, InvalidRequest: a message that cannot be understood; `param` has its place.
    """
    called: set[str] = set()
    turns: list[Message] = []
    for i, fields in enumerate(messages):
        path = f"messages[{i}]"
        calls = tuple(
            _called(call, f"{path}.tool_calls[{j}]") for j, call in enumerate(fields.tool_calls or ())
        )
        called.update(call.id for call in calls)
        if calls and fields.role != "assistant":
            raise invalid(f"{path}.tool_calls", f"{path} has tool_calls but its role is not assistant")
        if fields.role == "tool" and fields.tool_call_id not in called:
            raise invalid(
                f"{path}.tool_call_id", f"{path}.tool_call_id does not name a tool call of an earlier message"
            )
        turns.append(
            Message(
                fields.role,
                _content(fields, path),
                fields.name,
                calls,
                fields.tool_call_id,
                fields.reasoning_content or fields.reasoning,
            )
        )
    return Conversation(tuple(turns), use.tools, use.choice)


def _called(call: ToolCallFields, path: str) -> ToolCall:
    if call.type == "custom" and call.custom is not None:
        return ToolCall(call.id, call.custom.name, custom_arguments(call.custom.input))
    if call.function is None:
        raise invalid(f"{path}.function", f"{path}.function is missing")
    return ToolCall(call.id, call.function.name, call.function.arguments)


def _content(fields: MessageFields, path: str) -> str | tuple[TextPart, ...] | None:
    if not isinstance(fields.content, list):
        return fields.content if fields.content is not None else fields.refusal
    parts: list[TextPart] = []
    for j, part in enumerate(fields.content):
        if part.type not in TEXT_PARTS:
            raise invalid(
                f"{path}.content[{j}].type",
                f"{path}.content[{j}] has type {part.type[:40]!r}; this model takes text parts only",
            )
        if part.text is None:
            raise invalid(f"{path}.content[{j}].text", f"{path}.content[{j}].text is missing")
        parts.append(TextPart(part.text))
    return tuple(parts)


def invalid(param: str, message: str) -> BadRequest:
    return BadRequest(message, code="invalid_value", param=param)


class ChatFields(Protocol):
    """What a request says besides its messages."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt's tokens, and what they were made of."""

    tokens: list[int]
    conversation: Conversation | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    normalised: tuple[Change, ...] = ()
    last_breakpoint: tuple[int, int] | None = None
    """The last content part with a `prompt_cache_breakpoint`: its message, and the parts up to its end."""

    def tokens_through(self, codec: Codec, message: int, parts: int | None = None) -> int | None:
        """How many tokens the messages up to this one make up, of its parts only the first `parts` if given;
        None for a plain prompt, and if the template refuses such a beginning. Renders and encodes it."""
        if self.conversation is None:
            return None
        begun = list(self.conversation.messages[: message + 1])
        if parts is not None and isinstance(begun[-1].content, tuple):
            begun[-1] = msgspec.structs.replace(begun[-1], content=begun[-1].content[:parts])
        try:
            conversation = msgspec.structs.replace(self.conversation, messages=tuple(begun))
            tokens = codec.encode_chat(conversation, add_generation_prompt=False, kwargs=self.kwargs)
        except InvalidRequest:
            return None
        return common_prefix(as_array(tokens), as_array(self.tokens))

    def breakpoint_tokens(self, codec: Codec) -> int | None:
        """The prompt's tokens up to its last breakpoint; None without one, 0 if they cannot be told."""
        if self.last_breakpoint is None:
            return None
        return self.tokens_through(codec, *self.last_breakpoint) or 0


def encode_chat(
    service: Service,
    fields: ChatFields,
    messages: list[MessageFields],
    use: ToolUse = NO_TOOLS,
    *,
    normalises: bool | None = None,
) -> ChatPrompt:
    """Return the prompt. `normalises` overrides the server's setting.

    Raises:
        BadRequest, InvalidRequest: the messages or the template's own complaint.
        ContextTooLong: found before all was read.
    """
    limit = service.engine.model.max_model_len
    if len(messages) > limit:  # a template writes at least a token for each
        raise ContextTooLong(len(messages), limit, is_least=True)
    continues = bool(fields.continue_final_message)
    generates = not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
    marked = [
        (index, number + 1)
        for index, message in enumerate(messages)
        if isinstance(message.content, list)
        for number, part in enumerate(message.content)
        if part.prompt_cache_breakpoint is not None
    ]
    return encode_conversation(
        service,
        to_conversation(messages, use),
        generates=generates,
        continues=continues,
        kwargs=fields.chat_template_kwargs,
        normalises=normalises,
        last_breakpoint=max(marked, default=None),
    )


def encode_conversation(
    service: Service,
    conversation: Conversation,
    *,
    generates: bool = True,
    continues: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    normalises: bool | None = None,
    last_breakpoint: tuple[int, int] | None = None,
) -> ChatPrompt:
    """Return the prompt of a conversation, whichever protocol it came by.

    Raises:
        InvalidRequest, ContextTooLong: see `encode_chat`.
    """
    changes: tuple[Change, ...] = ()
    if service.config.normalise_prompts if normalises is None else normalises:
        conversation, changes = normalise(conversation)
    tokens = service.codec.encode_chat(
        conversation,
        add_generation_prompt=generates,
        continue_final_message=continues,
        kwargs=kwargs,
        limit=service.engine.model.max_model_len,
    )
    return ChatPrompt(tokens, conversation, kwargs or {}, changes, last_breakpoint)
