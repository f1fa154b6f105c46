"""The prompts of DeepSeek V4 and V4.1, whose models come without a chat template.

Source: the sentences and the order of things are the models' format, as deepseek-recipe 0.2.0 (MIT) has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar

from msgspec.structs import replace

from ..errors import InvalidRequest
from .conversation import Conversation, Message, Tool
from .template import check_ending
from .tokenizer import Tokenizer
from .tools import dsml_prompt
from .tools.dsml import MARK, THINK, THOUGHT

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
REMINDER = "<｜latest_reminder｜>"
"""Not written here: older models have the mark of DSML too, but not this."""

EFFORTS = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "high",
    "max": "max",
    "ultra": "max",
}
"""The words for an effort, and what the models know of them; "none" is not to think."""
_V4_EFFORTS = {
    "low": "",
    "high": (
        "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
        "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the "
        "root cause, rigorously stress-testing your logic against all potential paths, edge cases, and "
        "adversarial scenarios.\n"
        "Explicitly write out your entire deliberation process, documenting every intermediate step, "
        "considered alternative, and rejected hypothesis to ensure absolutely no assumption is left "
        "unchecked.\n\n"
    ),
    "max": (
        "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
        "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively "
        "decompose the problem into its most fundamental components, trace every causal chain to its root, "
        "and resolve the underlying cause rather than any surface symptom.\n"
        "Do not stop reasoning until you have independently verified the solution from multiple angles and "
        "are certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
    ),
}
_V41_EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
_KWARGS = "chat_template_kwargs"
_SWITCHES = ("thinking", "enable_thinking")
_EFFORT = "reasoning_effort"


class DeepSeekTemplate:
    """What both have in common. `render` may be called from any thread."""

    dsml: ClassVar[dsml_prompt.Writer]
    efforts: ClassVar[Mapping[str, str]]
    """What the model is told about its effort."""

    def __init__(self) -> None:
        self.source = self.dsml.tools(())
        """Shows the dialect, as a template's source does."""

    def reads(self, variable: str) -> bool:
        """Whether it is one of the variables below."""
        return variable == _EFFORT or variable in _SWITCHES

    def render(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt, see `ChatTemplate.render`.

        Without tools the thoughts of past turns are left out. A final message that has nothing but a thought
        is continued inside it.

        Args:
            kwargs: `thinking` or `enable_thinking`, on by default; `reasoning_effort`, one of EFFORTS or
                "none", for V4.1 also a number from 1 to 100. Others have no effect.

        Raises:
            InvalidRequest: bad arguments; names the field.
        """
        check_ending(conversation, add_generation_prompt, continue_final_message)
        effort = self._asked_effort(kwargs or {})
        thinks = effort is not None
        tools = conversation.tools if conversation.tool_choice != "none" else ()
        messages = [_plain(message) for message in conversation.messages]
        last = messages.pop() if continue_final_message else None
        parts = [BOS, *self._written(messages, effort, tools)]
        if last is not None:
            parts.append(self._continued(last, thinks))
        elif add_generation_prompt:
            parts.append(ASSISTANT + (THINK if thinks else THOUGHT))
        return "".join(parts)

    def _written(self, messages: list[Message], effort: str | None, tools: Sequence[Tool]) -> Iterator[str]:
        """Head and turns; without an effort the model does not think."""
        raise NotImplementedError

    def _thought(self, message: Message, thinks: bool) -> str:
        """How a turn begins whose thoughts are shown."""
        raise NotImplementedError

    def _turn(self, message: Message, thinks: bool, tools: Sequence[Tool]) -> str:
        thought = self._thought(message, thinks) if tools else THOUGHT
        return f"{ASSISTANT}{thought}{message.text}{self.dsml.calls(message.tool_calls)}{EOS}"

    def _continued(self, message: Message, thinks: bool) -> str:
        thought = self._thought(message, thinks)
        said = message.text + self.dsml.calls(message.tool_calls)
        if thinks and not said:
            thought = thought.removesuffix(THOUGHT)
        return ASSISTANT + thought + said

    def _asked_effort(self, kwargs: Mapping[str, Any]) -> str | None:
        effort = kwargs.get(_EFFORT)
        thinks = effort != "none"
        for name in _SWITCHES:
            given = kwargs.get(name)
            if given is not None and not isinstance(given, bool):
                raise InvalidRequest(f"{_KWARGS}.{name} must be true or false", f"{_KWARGS}.{name}")
            thinks = thinks and given is not False
        told = self._told_effort("high" if effort in (None, "none") else effort)
        return told if thinks else None

    def _told_effort(self, effort: Any) -> str:
        if not isinstance(effort, str) or effort not in EFFORTS:
            known = ", ".join(("none", *EFFORTS))
            raise InvalidRequest(f"{_KWARGS}.{_EFFORT} must be one of {known}", f"{_KWARGS}.{_EFFORT}")
        return self.efforts[EFFORTS[effort]]


class DeepSeekV4(DeepSeekTemplate):
    """All system texts stand at the front; calls and their results are in the order of their ids."""

    dsml = dsml_prompt.V4
    efforts = _V4_EFFORTS

    def _written(self, messages: list[Message], effort: str | None, tools: Sequence[Tool]) -> Iterator[str]:
        yield effort or ""
        yield "\n\n".join(message.text for message in messages if message.role == "system" and message.text)
        if tools:
            yield self.dsml.tools(tools)
        turns = self._in_order(_users_joined([message for message in messages if message.role != "system"]))
        before = ""
        for message in turns:
            if message.role == "assistant":
                yield self._turn(message, effort is not None, tools)
            elif message.role == "tool":
                yield ("\n\n" if before == "tool" else USER) + _result(message)
            else:
                yield ("\n\n" if before in ("tool", "user") else USER) + message.text
            before = message.role

    def _in_order(self, messages: list[Message]) -> list[Message]:
        """Calls by id; of as many messages behind them, if there are, the results by id and then the rest."""
        for at, message in enumerate(messages):
            count = len(message.tool_calls)
            if not count:
                continue
            messages[at] = replace(
                message, tool_calls=tuple(sorted(message.tool_calls, key=lambda call: call.id))
            )
            behind = messages[at + 1 : at + 1 + count]
            if len(behind) == count:
                behind.sort(key=lambda one: (one.role != "tool", one.tool_call_id or ""))
                messages[at + 1 : at + 1 + count] = behind
        return messages

    def _thought(self, message: Message, thinks: bool) -> str:
        reasoning = message.reasoning
        if reasoning is None and not thinks:
            return THOUGHT
        return f"{THINK}{reasoning or ''}{THOUGHT}"


class DeepSeekV41(DeepSeekTemplate):
    """System texts stand where they were said; results are in the order of their calls."""

    dsml = dsml_prompt.V41
    efforts = {name: _V41_EFFORT.format(number) for name, number in (("low", 50), ("high", 75), ("max", 100))}

    def _written(self, messages: list[Message], effort: str | None, tools: Sequence[Tool]) -> Iterator[str]:
        begins = bool(messages) and messages[0].role == "system"
        if effort is not None or tools or begins:
            yield SYSTEM + (effort or "")
            if begins:
                yield messages.pop(0).text
            if tools:
                yield self.dsml.tools(tools)
        places: dict[str, int] = {}
        for is_user, group in groupby(messages, lambda message: message.role in ("user", "tool")):
            if is_user:
                shown = (
                    _result(message) if message.role == "tool" else message.text
                    for message in _by_call(list(group), places)
                )
                yield USER + "\n\n".join(shown)
                continue
            for message in group:
                if message.role == "system":
                    yield SYSTEM + message.text
                else:
                    yield self._turn(message, effort is not None, tools)
                    places = {call.id: place for place, call in enumerate(message.tool_calls)}

    def _thought(self, message: Message, thinks: bool) -> str:
        return f"{THINK}{message.reasoning or ''}{THOUGHT}" if thinks else THOUGHT

    def _told_effort(self, effort: Any) -> str:
        if isinstance(effort, int) and not isinstance(effort, bool) and 1 <= effort <= 100:
            return _V41_EFFORT.format(effort)
        return super()._told_effort(effort)


def template_of(tokenizer: Tokenizer) -> DeepSeekTemplate | None:
    """The prompts of the model that a vocabulary is made for; None for another's."""

    def has(*names: str) -> bool:
        return all(tokenizer.token_id(name) is not None for name in names)

    if not has(MARK, REMINDER, USER, ASSISTANT):
        return None
    return DeepSeekV41() if has(SYSTEM) else DeepSeekV4()


def _plain(message: Message) -> Message:
    """With one text, parts parted by an empty line, and without a developer."""
    if isinstance(message.content, tuple):
        message = replace(message, content="\n\n".join(part.text for part in message.content))
    return replace(message, role="system") if message.role == "developer" else message


def _result(message: Message) -> str:
    return f"<tool_result>{message.text}</tool_result>"


def _users_joined(messages: Sequence[Message]) -> list[Message]:
    """The user's messages that follow each other are one."""
    joined: list[Message] = []
    for message in messages:
        if message.role == "user" and joined and joined[-1].role == "user":
            message = Message("user", "\n\n".join(filter(None, (joined.pop().text, message.text))))
        joined.append(message)
    return joined


def _by_call(messages: list[Message], places: Mapping[str, int]) -> list[Message]:
    """The results of one run in the order of the calls, in the places where results are."""
    slots = [at for at, message in enumerate(messages) if message.role == "tool" and message.tool_call_id]
    results = sorted((messages[at] for at in slots), key=lambda one: places.get(one.tool_call_id or "", 0))
    for at, message in zip(slots, results, strict=True):
        messages[at] = message
    return messages
