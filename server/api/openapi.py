"""`/openapi.json`: every route with the types that it reads and writes, generated from those types.

A new route is a row of `OPERATIONS`; a test compares the rows with the routes.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..errors import AnthropicEnvelope, ErrorEnvelope
from ..middleware import ADMIN_PATHS, OPEN_PATHS, is_anthropic
from .anthropic_events import MessageBody
from .anthropic_input import MessagesRequest
from .anthropic_messages import TokenCount
from .caches import CacheBody, CacheList, CreateCache, Deleted, Explanation, PromptFields, SaltFields
from .estimate import Estimate
from .meta import (
    DetokenizeAnswer,
    DetokenizeRequest,
    ModelBody,
    ModelList,
    RootBody,
    StatusBody,
    TokenizeAnswer,
    TokenizeRequest,
    VersionBody,
)
from .openai_chat import ChatRequest
from .openai_chat_answer import ChatAnswer, ChatChunk
from .openai_completions import CompletionAnswer, CompletionRequest
from .openai_embeddings import EmbeddingAnswer, EmbeddingRequest
from .openai_responses_body import InputTokens, ItemPage, ResponseBody, ResponseDeleted
from .openai_responses_input import ResponseRequest
from .structured import ValidateAnswer, ValidateRequest
from .types import encode

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
REFERENCE = "#/components/schemas/{name}"
SALT, KEY = "cache_salt", "prompt_cache_key"


class NumberedEvent(msgspec.Struct):
    """An event of a stream with named events; what else it has depends on its type."""

    type: str
    sequence_number: int


class NamedEvent(msgspec.Struct):
    """An event of Anthropic's streams."""

    type: str


class StreamEvent(msgspec.Struct):
    """An event of a stream, in the form of the request that began it."""


LIMITS: dict[str, dict[str, Any]] = {
    SALT: {"minLength": 1, "maxLength": 256},
    KEY: {"minLength": 1},
    "stream": {"enum": ["true", "false"]},
    "starting_after": {"pattern": "^[0-9]{1,11}$"},
    "order": {"enum": ["asc", "desc"]},
    "limit": {"pattern": "^[0-9]{1,3}$"},
    "Idempotency-Key": {"pattern": "^[!-~]+$", "maxLength": 255},
}
"""Of parameters, by their name."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path."""

    method: str
    path: str
    summary: str
    body: Any = None
    """The type of the request's body."""
    body_is_optional: bool = False
    answer: Any = None
    """The type of a whole answer; None = plain text."""
    event: Any = None
    """The type of a stream's events, where `"stream": true` asks for one."""
    status: int = 200
    query: tuple[str, ...] = ()
    requires_query: bool = False
    generates: bool = False
    """Whether it runs a prompt: it can be refused for load, and takes an `Idempotency-Key`."""


def _post(path: str, summary: str, body: Any, answer: Any, **rest: Any) -> Operation:
    return Operation(method="post", path=path, summary=summary, body=body, answer=answer, **rest)


def _get(path: str, summary: str, answer: Any, **rest: Any) -> Operation:
    return Operation(method="get", path=path, summary=summary, answer=answer, **rest)


def _act(act: str, summary: str, **rest: Any) -> Operation:
    path = f"/v1/caches/{{name}}/{act}"
    return _post(path, summary, SaltFields, CacheBody, body_is_optional=True, **rest)


CHAT = "/v1/chat/completions"
OPERATIONS = (
    _post(CHAT, "Answer a chat", ChatRequest, ChatAnswer, event=ChatChunk, generates=True),
    _post(f"{CHAT}/estimate", "What a chat request would take", ChatRequest, Estimate),
    _post(
        "/v1/completions", "Continue a text", CompletionRequest, CompletionAnswer,
        event=CompletionAnswer, generates=True,
    ),
    _post("/v1/embeddings", "Turn texts into vectors", EmbeddingRequest, EmbeddingAnswer, generates=True),
    _post("/v1/schemas/validate", "What of a schema is enforced", ValidateRequest, ValidateAnswer),
    _post(
        "/v1/responses", "Answer a turn, and remember it", ResponseRequest, ResponseBody,
        event=NumberedEvent, generates=True,
    ),
    _post("/v1/responses/input_tokens", "Count a turn's tokens", ResponseRequest, InputTokens),
    _get(
        "/v1/responses/{id}", "A response, or its events", ResponseBody, event=NumberedEvent,
        query=("stream", "starting_after", SALT),
    ),
    Operation(
        method="delete", path="/v1/responses/{id}", summary="Forget a response", answer=ResponseDeleted,
        query=(SALT,),
    ),
    Operation(
        method="post", path="/v1/responses/{id}/cancel", summary="End a response in the background",
        answer=ResponseBody, query=(SALT,),
    ),
    _get(
        "/v1/responses/{id}/input_items", "What a response was given", ItemPage,
        query=("order", "after", "limit", SALT),
    ),
    _get(
        "/v1/streams/{id}", "The rest of a stream", StreamEvent, event=StreamEvent,
        query=("starting_after", SALT),
    ),
    _post(
        "/v1/messages", "Answer messages in Anthropic's protocol", MessagesRequest, MessageBody,
        event=NamedEvent, generates=True,
    ),
    _post("/v1/messages/count_tokens", "Count the tokens of messages", MessagesRequest, TokenCount),
    _post("/v1/caches", "Keep a prompt by name", CreateCache, CacheBody, status=201, generates=True),
    _get("/v1/caches", "List the named prompts", CacheList, query=(SALT,)),
    Operation(
        method="delete", path="/v1/caches", summary="Delete the prompts of a key", answer=Deleted,
        query=(KEY, SALT), requires_query=True,
    ),
    _post("/v1/caches/explain", "What would be reused of a prompt", PromptFields, Explanation),
    _get("/v1/caches/{name}", "A named prompt", CacheBody, query=(SALT,)),
    Operation(
        method="delete", path="/v1/caches/{name}", summary="Delete a named prompt", answer=Deleted,
        query=(SALT,),
    ),
    _act("pin", "Keep a named prompt whatever happens"),
    _act("unpin", "Let a named prompt expire again"),
    _act("prewarm", "Compute what is missing of a named prompt", generates=True),
    _get("/v1/models", "The served models", ModelList),
    _get("/v1/models/{id}", "A served model", ModelBody),
    *[_post(f"{at}/tokenize", "Text to tokens", TokenizeRequest, TokenizeAnswer) for at in ("", "/v1")],
    *[_post(f"{at}/detokenize", "Tokens to text", DetokenizeRequest, DetokenizeAnswer) for at in ("", "/v1")],
    _get("/health", "Whether the process works", StatusBody),
    _get("/ready", "Whether new requests are taken", StatusBody),
    _get("/version", "What runs here", VersionBody),
    _get("/metrics", "Counters and gauges", None),
    _get("/openapi.json", "This document", dict[str, Any]),
    _get("/", "What runs here", RootBody),
)  # fmt: skip


def document(operations: Iterable[Operation] = OPERATIONS, *, needs_key: bool = False) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the operations, of a server with or without API keys."""
    rows = list(operations)
    kinds = [kind for row in rows for kind in (row.body, row.answer, row.event) if kind is not None]
    types = list(dict.fromkeys([*kinds, ErrorEnvelope, AnthropicEnvelope]))
    schemas, components = msgspec.json.schema_components(types, ref_template=REFERENCE)
    of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for row in rows:
        paths.setdefault(row.path, {})[row.method] = _operation(row, of, needs_key)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Artesian", "version": version("artesian")},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(row: Operation, of: dict[Any, dict[str, Any]], needs_key: bool) -> dict[str, Any]:
    parameters = [
        _parameter("path", part[1:-1], True) for part in row.path.split("/") if part.startswith("{")
    ]
    parameters += [
        _parameter("query", name, row.requires_query and not place) for place, name in enumerate(row.query)
    ]
    if row.generates:
        parameters.append(_parameter("header", "Idempotency-Key", False))
    described: dict[str, Any] = {
        "operationId": _operation_id(row),
        "summary": row.summary,
        "parameters": parameters,
        "responses": _responses(row, of),
    }
    if row.body is not None:
        content = {JSON: {"schema": of[row.body]}}
        described["requestBody"] = {"required": not row.body_is_optional, "content": content}
    if needs_key and row.path not in OPEN_PATHS | ADMIN_PATHS:
        described["security"] = [{"bearer": []}, {"key": []}]
    return described


def _responses(row: Operation, of: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if row.answer is None:
        content[TEXT] = {"schema": {"type": "string"}}
    else:
        content[JSON] = {"schema": of[row.answer]}
    if row.event is not None:
        content[EVENTS] = {"schema": {"type": "string"}, "x-event-schema": of[row.event]}
    statuses = {400, 405, 408, 431, 500}
    if "{" in row.path or row.body is not None:
        statuses.add(404)
    if row.body is not None:
        statuses |= {413, 415}
    if row.path not in OPEN_PATHS:
        statuses.add(401)
    if row.generates:
        statuses |= {422, 429}
    if row.generates or row.path in ("/health", "/ready") or row.path.startswith("/v1/caches"):
        statuses.add(529 if is_anthropic(row.path) else 503)
    envelope = AnthropicEnvelope if is_anthropic(row.path) else ErrorEnvelope
    error = {"description": "An error", "content": {JSON: {"schema": of[envelope]}}}
    answers: dict[str, Any] = {str(row.status): {"description": "Success", "content": content}}
    return answers | {str(status): error for status in sorted(statuses)}


def _parameter(place: str, name: str, required: bool) -> dict[str, Any]:
    return {
        "name": name,
        "in": place,
        "required": required,
        "schema": {"type": "string", **LIMITS.get(name, {})},
    }


def _operation_id(row: Operation) -> str:
    words = [word.strip("{}").replace(".", "_") for word in row.path.split("/") if word]
    return "_".join([row.method, *words]) if words else f"{row.method}_root"


class OpenApi:
    """The endpoint; the document is made at its first use."""

    def __init__(self, needs_key: bool) -> None:
        self._needs_key = needs_key
        self._body: bytes | None = None

    async def get(self, request: Request) -> Response:
        """GET /openapi.json."""
        if self._body is None:
            self._body = encode(document(needs_key=self._needs_key))
        return Response(self._body, media_type=JSON)
