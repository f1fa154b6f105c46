"""A model's chat template: a conversation becomes the prompt's text. It knows no tokens.

What a template expects is found by rendering small probes when it is built: content as text or as parts, a
null content as null or as "", a call's arguments as an object or as JSON text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Protocol

import jinja2
from msgspec.structs import replace as replace_fields

from ..errors import InvalidRequest, ModelError
from .conversation import Conversation, Message, Tool, ToolCall
from .sandbox import RenderTimeout, Sandbox
from .tools.hermes_prompt import with_calls_told, with_tools_told

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""For a model without a template whose vocabulary has these markers."""

# Private-use characters, which no template writes.
_CUT = "\uf8f0cut\uf8f1"
_NEEDLE = "needle"
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})


@dataclass(frozen=True, slots=True)
class Wants:
    """The form in which a template takes a message's fields."""

    parts: bool = False
    """Content as a list of parts instead of text."""
    null_content: bool = True
    """A missing content as null instead of ""."""
    argument_object: bool = True
    """A call's arguments as an object instead of JSON text."""


class PromptTemplate(Protocol):
    """What renders a model's prompts."""

    @property
    def source(self) -> str:
        """Shows the dialect: how the model writes thoughts and calls."""
        ...

    def reads(self, variable: str) -> bool:
        """Whether a variable of `kwargs` makes a difference."""
        ...

    def render(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt, see `ChatTemplate.render`."""
        ...


class ChatTemplate:
    """A compiled template. `render` may be called from any thread; run it off the event loop.

    Raises:
        ModelError: the source is not a valid template.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None,
        eos_token: str | None,
        timeout_s: float = 5.0,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._sandbox = Sandbox(clock)
        try:
            self._template = self._sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as err:
            raise ModelError(f"The chat template is not valid, line {err.lineno}: {err.message}") from err
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._timeout_s = timeout_s
        self.source = source
        self.wants = self._probe()
        self.shows_tools = self._reacts("tools")
        self.shows_calls = self._reacts("calls")
        """Whether the template knows tools and calls; if not, they are told in plain messages."""

    def reads(self, variable: str) -> bool:
        """Whether the template mentions a variable."""
        return re.search(rf"\b{re.escape(variable)}\b", self.source) is not None

    def render(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt.

        A template that refuses the messages as they are is tried once more with all system messages joined
        (by an empty line) into one at the front.

        Args:
            add_generation_prompt: End with the head of the assistant's turn.
            continue_final_message: End right after the last message's text, so that the model goes on with
                it. Excludes `add_generation_prompt`.
            kwargs: More variables for the template (`chat_template_kwargs`).

        Raises:
            InvalidRequest: the template's own complaint, a limit of the sandbox, or bad arguments.
        """
        check_ending(conversation, add_generation_prompt, continue_final_message)
        if reserved := _RESERVED & (kwargs or {}).keys():
            raise InvalidRequest(
                f"chat_template_kwargs cannot set {', '.join(sorted(reserved))}", "chat_template_kwargs"
            )
        tools = _offered_tools(conversation)
        messages = list(conversation.messages)
        if not self.shows_calls:
            messages = with_calls_told(messages)
        if tools and not self.shows_tools:
            messages, tools = with_tools_told(messages, tools), []
        if continue_final_message:
            messages[-1] = _with_cut_mark(messages[-1])
        values = {
            **(kwargs or {}),
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._run(messages, self.wants, values)
        except InvalidRequest:
            normalised = _system_first(messages)
            if normalised == messages:
                raise
            text = self._run(normalised, self.wants, values)
        return _cut(text) if continue_final_message else text

    def _run(self, messages: list[Message], wants: Wants, values: dict[str, Any]) -> str:
        shown = [_template_message(message, wants) for message in messages]
        try:
            return self._sandbox.render(
                self._template, {**values, **self._tokens, "messages": shown}, self._timeout_s
            )
        except RenderTimeout as err:
            raise InvalidRequest(str(err), "messages") from err
        except Exception as err:  # the template is code from outside: it may raise anything
            raise InvalidRequest(f"The chat template refuses the messages: {err}", "messages") from err

    def _probe(self) -> Wants:
        wants = Wants()
        user = Message("user", _NEEDLE)

        def shown(messages: list[Message], wants: Wants) -> str:
            try:
                return self._run(messages, wants, {"tools": None, "add_generation_prompt": False})
            except InvalidRequest:
                return ""

        if _NEEDLE not in shown([user], wants):
            in_parts = replace(wants, parts=True)
            if _NEEDLE in shown([user], in_parts):
                wants = in_parts
        call = Message("assistant", tool_calls=(ToolCall("call00000", "f", f'{{"{_NEEDLE}": 1}}'),))
        forms = {
            (null, as_object): shown(
                [Message("user", "x"), call], replace(wants, null_content=null, argument_object=as_object)
            )
            for null in (True, False)
            for as_object in (True, False)
        }
        for (null, as_object), text in forms.items():
            if f'"{_NEEDLE}"' in text and "None" not in text:
                return replace(wants, null_content=null, argument_object=as_object)
        with_null = forms[True, True]  # the arguments are not shown, or not as JSON
        return replace(wants, null_content=bool(with_null) and "None" not in with_null)

    def _reacts(self, to: str) -> bool:
        """Whether tools, or calls, make a difference. A template that refuses them knows them."""
        tool = _template_tool(Tool(_NEEDLE, _NEEDLE, {"type": "object", "properties": {}}))
        silent = Message("assistant")
        call = replace_fields(silent, tool_calls=(ToolCall("call00000", "f", "{}"),))
        user = Message("user", "x")
        texts: list[str | None] = []
        for asked in (False, True):
            turns = [user, call if asked else silent] if to == "calls" else [user]
            values = {"tools": [tool] if asked and to == "tools" else None, "add_generation_prompt": False}
            try:
                texts.append(self._run(turns, self.wants, values))
            except InvalidRequest:
                texts.append(None)
        return texts[1] is None or texts[0] != texts[1]


def check_ending(
    conversation: Conversation, add_generation_prompt: bool, continue_final_message: bool
) -> None:
    """Raises: InvalidRequest: a prompt cannot end as it is asked to."""
    if not continue_final_message:
        return
    if add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    if conversation.messages[-1].role != "assistant":
        raise InvalidRequest("the message to continue must be the assistant's", "messages")


def _template_message(message: Message, wants: Wants) -> dict[str, Any]:
    """The message as Hugging Face's templates know it."""
    shown: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    if message.content is None and wants.null_content:
        shown["content"] = None
    elif wants.parts:
        shown["content"] = [{"type": "text", "text": message.text}] if message.text else []
    else:
        shown["content"] = message.text
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_calls:
        shown["tool_calls"] = [_template_call(call, wants) for call in message.tool_calls]
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        shown["reasoning_content"] = shown["thinking"] = message.reasoning
    return shown


def _template_call(call: ToolCall, wants: Wants) -> dict[str, Any]:
    arguments: Any = call.arguments
    if wants.argument_object:
        try:
            parsed = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None  # what a model wrote is shown as it is
        arguments = parsed if isinstance(parsed, dict) else call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _offered_tools(conversation: Conversation) -> list[dict[str, Any]]:
    """The tools for the template; none when the choice is "none", or the model would still call them."""
    return [_template_tool(tool) for tool in conversation.tools] if conversation.tool_choice != "none" else []


def _template_tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _system_first(messages: list[Message]) -> list[Message]:
    system = [message for message in messages if message.role in ("system", "developer")]
    if not system:
        return messages
    rest = [message for message in messages if message.role not in ("system", "developer")]
    return [Message("system", "\n\n".join(message.text for message in system)), *rest]


def _with_cut_mark(message: Message) -> Message:
    return Message(
        message.role,
        message.text + _CUT,
        message.name,
        message.tool_calls,
        message.tool_call_id,
        message.reasoning,
    )


def _cut(text: str) -> str:
    at = text.rfind(_CUT)
    if at < 0:
        raise InvalidRequest(
            "The chat template does not show the last message, so it cannot be continued",
            "continue_final_message",
        )
    return text[:at]
