"""OpenAI's own description of its API, as a check of what we send: `../shared/data/openai/openapi.yaml`.

`OURS` lists what we say beyond it. Where that file is not at hand, nothing is checked.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import yaml  # type: ignore[import-untyped]
from referencing import Registry
from referencing.jsonschema import DRAFT202012

SPEC = Path(__file__).parents[3] / "shared/data/openai/openapi.yaml"
URI = "urn:openai"

EVENT_SCHEMAS = {
    "response.created": "ResponseCreatedEvent",
    "response.queued": "ResponseQueuedEvent",
    "response.in_progress": "ResponseInProgressEvent",
    "response.completed": "ResponseCompletedEvent",
    "response.incomplete": "ResponseIncompleteEvent",
    "response.failed": "ResponseFailedEvent",
    "response.output_item.added": "ResponseOutputItemAddedEvent",
    "response.output_item.done": "ResponseOutputItemDoneEvent",
    "response.content_part.added": "ResponseContentPartAddedEvent",
    "response.content_part.done": "ResponseContentPartDoneEvent",
    "response.output_text.delta": "ResponseTextDeltaEvent",
    "response.output_text.done": "ResponseTextDoneEvent",
    "response.reasoning_text.delta": "ResponseReasoningTextDeltaEvent",
    "response.reasoning_text.done": "ResponseReasoningTextDoneEvent",
    "response.function_call_arguments.delta": "ResponseFunctionCallArgumentsDeltaEvent",
    "response.function_call_arguments.done": "ResponseFunctionCallArgumentsDoneEvent",
    "response.custom_tool_call_input.delta": "ResponseCustomToolCallInputDeltaEvent",
    "response.custom_tool_call_input.done": "ResponseCustomToolCallInputDoneEvent",
    "error": "ResponseErrorEvent",
}

OURS = frozenset({"prompt_cache_diagnostics", "warnings"})
"""Top-level fields that the document does not know yet (diagnostics) or that are ours (warnings)."""


def check(value: Any, schema: str) -> None:
    """Validate a JSON value (or its text) against one of the document's schemas."""
    if not SPEC.exists():
        return
    if isinstance(value, str | bytes):
        value = json.loads(value)
    if isinstance(value, dict):
        value = {name: part for name, part in value.items() if name not in OURS}
    _validator(schema).validate(value)


def check_event(event: dict[str, Any]) -> None:
    """Validate one event of a Responses stream."""
    if isinstance(event.get("response"), dict):
        body = {k: v for k, v in event["response"].items() if k not in OURS}
        if body.get("incomplete_details") == {"reason": "steered"}:  # newer than the document
            body["incomplete_details"] = None
        event = {**event, "response": body}
    check(event, EVENT_SCHEMAS[event["type"]])


@functools.cache
def _validator(schema: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(
        {"$ref": f"{URI}#/components/schemas/{schema}"}, registry=_registry()
    )


@functools.cache
def _registry() -> Registry[Any]:
    document = yaml.load(SPEC.read_text(), yaml.CSafeLoader)
    registry: Registry[Any] = Registry().with_resource(URI, DRAFT202012.create_resource(document))
    return registry
