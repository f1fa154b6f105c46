"""Checks answers against OpenAI's own description of its API as they pass.

The document lies beside the repository (`shared/data/openai/openapi.yaml`); where it does not, the types of
the `openai` package are the measure.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml  # type: ignore[import-untyped]
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send

DOCUMENT = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "openai" / "openapi.yaml"
KNOWN: dict[str, tuple[str, Any]] = {
    "chat": ("CreateChatCompletionResponse", ChatCompletion),
    "chat chunk": ("CreateChatCompletionStreamResponse", ChatCompletionChunk),
    "completion": ("CreateCompletionResponse", Completion),
    "embeddings": ("CreateEmbeddingResponse", CreateEmbeddingResponse),
    "model": ("Model", Model),
    "models": ("ListModelsResponse", None),
    "error": ("ErrorResponse", None),
    "response": ("Response", Response),
    "response event": ("ResponseStreamEvent", ResponseStreamEvent),
    "response items": ("ResponseItemList", None),
    "input tokens": ("TokenCountsResource", None),
}
"""By what is checked: the document's schema, and the package's type."""
ROUTES = [
    ("POST", "/v1/chat/completions", "chat", "chat chunk"),
    ("POST", "/v1/completions", "completion", "completion"),
    ("POST", "/v1/embeddings", "embeddings", ""),
    ("GET", "/v1/models", "models", ""),
    ("GET", "/v1/models/.+", "model", ""),
    ("POST", "/v1/responses", "response", "response event"),
    ("POST", "/v1/responses/input_tokens", "input tokens", ""),
    ("GET", "/v1/responses/[^/]+", "response", "response event"),
    ("POST", "/v1/responses/[^/]+/cancel", "response", ""),
    ("GET", "/v1/responses/[^/]+/input_items", "response items", ""),
]
_CHOICE = "properties/choices/items/properties"
_LOGPROBS = f"{_CHOICE}/logprobs/anyOf/0/properties"
AMENDED: list[tuple[str, str, Any]] = [
    # OpenAI's own streams have null until the end.
    ("CreateCompletionResponse", f"{_CHOICE}/finish_reason", {"type": "null"}),
    ("CreateCompletionResponse", "properties/usage", {"type": "null"}),
    # The first token of an echoed prompt has no logprob.
    (
        "CreateCompletionResponse",
        f"{_LOGPROBS}/token_logprobs/items",
        {"type": "null"},
    ),
    (
        "CreateCompletionResponse",
        f"{_LOGPROBS}/top_logprobs/items",
        {"type": "null"},
    ),
    # A response that was steered: OpenAI's SDK knows it, the document does not.
    (
        "Response",
        "allOf/2/properties/incomplete_details/anyOf/0/properties/reason",
        {"const": "steered"},
    ),
    # Custom tools in a stream of chunks: in the document only whole answers have them.
    (
        "ChatCompletionMessageToolCallChunk",
        "properties/type",
        {"const": "custom"},
    ),
    # Ours: a request that was ended from outside.
    ("CreateCompletionResponse", f"{_CHOICE}/finish_reason", {"const": "abort"}),
    ("CreateChatCompletionResponse", f"{_CHOICE}/finish_reason", {"const": "abort"}),
    ("CreateChatCompletionStreamResponse", f"{_CHOICE}/finish_reason", {"const": "abort"}),
]
"""What is right though the document does not say so: schema, place, what may stand there too."""
UNKNOWN_TO_THE_DOCUMENT = frozenset(f"response.steer.{what}" for what in ("accepted", "pending", "failed"))
"""Names of event types that OpenAI's SDK knows and the document does not."""


@functools.cache
def faults_of(kind: str) -> Callable[[Any], str]:
    """A function that says what is wrong with a decoded body; nothing: ""."""
    schema, form = KNOWN[kind]
    if DOCUMENT.exists():
        parts = _reachable(schema)
        validator = jsonschema_rs.validator_for(
            {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "$ref": f"#/components/schemas/{schema}",
                "components": {"schemas": parts},
            }
        )
        return lambda body: next((str(error)[:2000] for error in validator.iter_errors(body)), "")
    if form is None:
        return lambda _: ""
    adapter = TypeAdapter(form)

    def faults(body: Any) -> str:
        try:
            adapter.validate_python(body)
        except ValidationError as err:
            members: dict[Any, list[Any]] = {}
            for error in err.errors():
                members.setdefault(error["loc"][0] if kind == "response event" else "", []).append(error)
            is_fine = any(all(_is_amended(error["loc"]) for error in errors) for errors in members.values())
            return "" if is_fine else str(err)[:2000]
        return ""

    return faults


class Checked:
    """An application whose answers are checked; `faults` lists what was wrong."""

    def __init__(self, app: Starlette) -> None:
        self._app, self.state = app, app.state
        self.faults: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._app(scope, receive, self._frames_noted(scope["path"], send))
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, media_type, body = 0, "", bytearray()

        async def send_noting(message: Message) -> None:
            nonlocal status, media_type
            if message["type"] == "http.response.start":
                status = message["status"]
                media_type = dict(message["headers"]).get(b"content-type", b"").decode().partition(";")[0]
            elif message["type"] == "http.response.body":
                body.extend(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_noting)
        for what, fault in check(scope["method"], scope["path"], status, media_type, bytes(body)):
            self.faults.append(f"{scope['method']} {scope['path']}: {fault}\n{what}")

    def _frames_noted(self, path: str, send: Send) -> Send:
        async def send_noting(message: Message) -> None:
            if text := message.get("text"):
                for what, fault in check_events(path, [text.encode()]):
                    self.faults.append(f"WebSocket {path}: {fault}\n{what}")
            await send(message)

        return send_noting


def check(method: str, path: str, status: int, media_type: str, body: bytes) -> Iterable[tuple[str, str]]:
    """What does not conform, each with its fault."""
    route = next((r for r in ROUTES if r[0] == method and re.fullmatch(r[1], path)), None)
    if route is None:
        return
    if media_type == "application/json":
        kind = route[2] if status < 400 else "error"
        if fault := faults_of(kind)(json.loads(body)):
            yield body.decode()[:2000], fault
    elif media_type == "text/event-stream":
        events = re.split(rb"\r?\n\r?\n", body)[:-1]
        lines = ([line[5:] for line in event.splitlines() if line.startswith(b"data:")] for event in events)
        yield from check_events(path, (b"".join(data) for data in lines))


def check_events(path: str, events: Iterable[bytes]) -> Iterable[tuple[str, str]]:
    """What does not conform of a stream's events, each with its fault."""
    kinds = [row[3] for row in ROUTES if row[3] and re.fullmatch(row[1], path)]
    for event in events:
        data = event.strip()
        if not data or data == b"[DONE]" or not kinds:
            continue
        decoded = json.loads(data)
        if decoded.get("type") in UNKNOWN_TO_THE_DOCUMENT:
            continue
        if decoded.get("type") == "error" and "status" in decoded:
            decoded = {"error": decoded["error"]}  # the form on a WebSocket, which the document lacks
        kind = "error" if decoded.keys() == {"error"} else kinds[0]
        if fault := faults_of(kind)(decoded):
            yield data.decode()[:2000], fault


def _is_amended(place: tuple[int | str, ...]) -> bool:
    """Whether something else may stand at this place of a body: the package knows fewer reasons of misses."""
    names = tuple(part for part in place if isinstance(part, str))
    return "prompt_cache_diagnostics" in names or any(
        names[-len(tail) :] == tail for tail in _amended_tails()
    )


@functools.cache
def _amended_tails() -> frozenset[tuple[str, ...]]:
    """The amended places as the names that lead there."""
    return frozenset(tuple(re.findall(r"properties/(\w+)", place)) for _, place, _ in AMENDED)


@functools.cache
def _document() -> dict[str, Any]:
    document: dict[str, Any] = yaml.load(DOCUMENT.read_bytes(), Loader=yaml.CSafeLoader)
    schemas: dict[str, Any] = _with_nulls(document["components"]["schemas"])
    return schemas


def _with_nulls(part: Any) -> Any:
    """`nullable` is OpenAPI 3.0's, and the document of 3.1 still has it: said in JSON Schema's words."""
    if isinstance(part, list):
        return [_with_nulls(each) for each in part]
    if not isinstance(part, dict):
        return part
    plain = {name: _with_nulls(each) for name, each in part.items() if name != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if part.get("nullable") is True else plain


def _amend(schema: Any, place: str, also: Any) -> Any:
    """The schema with one more thing allowed at a place."""
    if not place:
        return {"anyOf": [schema, also]}
    first, _, rest = place.partition("/")
    if isinstance(schema, list):
        return [_amend(part, rest, also) if str(at) == first else part for at, part in enumerate(schema)]
    return {**schema, first: _amend(schema[first], rest, also)}


def _reachable(name: str) -> dict[str, Any]:
    """A schema and all that it refers to, amended."""
    found: dict[str, Any] = {}
    todo = [name]
    while todo:
        name = todo.pop()
        if name not in found:
            found[name] = _document()[name]
            for schema, place, also in AMENDED:
                if schema == name:
                    found[name] = _amend(found[name], place, also)
            todo += re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(found[name], default=str))
    return found
