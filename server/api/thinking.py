"""What a request says of how much to think, in the variables that chat templates read."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ...engine.codec import Codec

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
VARIABLES = ("reasoning_effort", "enable_thinking", "thinking")


class Thinking(msgspec.Struct, kw_only=True):
    """Anthropic's and DeepSeek's switch."""

    type: Literal["enabled", "disabled", "adaptive"]


def thinking_arguments(effort: str | None, thinking: Thinking | None) -> dict[str, Any]:
    """Return a template's variables; nothing is said where the request says nothing."""
    said: dict[str, Any] = {}
    if thinking is not None:
        said["enable_thinking"] = said["thinking"] = thinking.type != "disabled"
    if effort == "none":
        said["enable_thinking"] = said["thinking"] = False
    if effort is not None:
        said["reasoning_effort"] = effort
    return said


def heeds_thinking(codec: Codec) -> bool:
    """Whether the model's template reads any of the variables."""
    return codec.template is not None and any(codec.template.reads(name) for name in VARIABLES)
