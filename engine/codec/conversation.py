"""A conversation in neutral form: roles, text, tool calls and tools.

Every protocol's front end builds one; the chat template reads it. It knows no protocol and no template.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from ..errors import InvalidRequest
from .unicode import require_unicode

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """A piece of a message's text."""

    text: str


# A tagged union in waiting: another medium is one more tagged Struct here, `TextPart | ImagePart`.
Part: TypeAlias = TextPart


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the assistant made."""

    id: str
    name: str
    arguments: str
    """As the model wrote them: JSON text, not necessarily valid."""


class Tool(msgspec.Struct, frozen=True):
    """A function the assistant may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool = False


class ForcedTool(msgspec.Struct, frozen=True):
    """The tool choice "call this one"."""

    name: str


class Message(msgspec.Struct, frozen=True):
    """One turn. `content` may be None only for the assistant."""

    role: str
    content: str | tuple[Part, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """With role "tool": the call that this answers."""
    reasoning: str | None = None

    @property
    def text(self) -> str:
        """The content as one string: parts joined with nothing between them, None as ""."""
        if isinstance(self.content, tuple):
            return "".join(part.text for part in self.content)
        return self.content or ""


class Conversation(msgspec.Struct, frozen=True):
    """Messages with the tools that are on offer; checked when built.

    Raises:
        InvalidRequest: no messages, an unknown role, missing content or text that is not Unicode
            (a lone surrogate); names the field, as in `messages[2].role`.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: Literal["auto", "none", "required"] | ForcedTool = "auto"

    def __post_init__(self) -> None:
        if not self.messages:
            raise InvalidRequest("messages is empty; at least one message is needed", "messages")
        for i, message in enumerate(self.messages):
            _check(message, f"messages[{i}]")


def _check(message: Message, path: str) -> None:
    if message.role not in ROLES:
        role = message.role.encode(errors="replace").decode()
        raise InvalidRequest(
            f"{path}.role is {role!r}; expected one of {', '.join(sorted(ROLES))}", f"{path}.role"
        )
    if message.content is None and message.role != "assistant":
        raise InvalidRequest(f"{path}.content is missing", f"{path}.content")
    require_unicode(message.text, f"{path}.content")
    require_unicode(message.name or "", f"{path}.name")
    require_unicode(message.reasoning or "", f"{path}.reasoning")
    require_unicode(message.tool_call_id or "", f"{path}.tool_call_id")
    for j, call in enumerate(message.tool_calls):
        require_unicode(call.id + call.name + call.arguments, f"{path}.tool_calls[{j}]")
