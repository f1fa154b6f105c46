"""What is served, is it well, how busy is it, and how does it split text: everything but generation."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from ...engine.codec import Codec
from ..errors import RESTART_RETRY_AFTER_S, BadRequest, Unavailable
from ..metrics import MetricsCollector
from ..service import Service
from .body import ignored_header
from .chat_messages import MessageFields, to_conversation
from .openai_chat_tools import ToolForm, tool_use
from .respond import off_loop
from .sampling import TokenIds, read_fields, token_ids
from .types import encode


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageFields] | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages, whose template writes them."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolForm] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    return_token_strs: bool = False


class TokenizeAnswer(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: TokenIds
    model: str | None = None


def encode_fields(codec: Codec, fields: TokenizeRequest) -> list[int]:
    """Return the tokens of a prompt or of a conversation.

    Raises:
        BadRequest, InvalidRequest: neither or both are given, or the codec's own complaint.
    """
    if (fields.prompt is None) == (fields.messages is None):
        raise BadRequest("Give either `prompt` or `messages`.", code="invalid_value", param="prompt")
    if fields.prompt is not None:
        return codec.encode_prompt(fields.prompt, add_special=fields.add_special_tokens is not False)
    conversation = to_conversation(fields.messages or [], tool_use(fields))
    continues = fields.continue_final_message
    generates = not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
    kwargs = fields.chat_template_kwargs
    if fields.add_special_tokens:
        text = codec.render_chat(
            conversation, add_generation_prompt=generates, continue_final_message=continues, kwargs=kwargs
        )
        return codec.encode_prompt(text)
    return codec.encode_chat(
        conversation, add_generation_prompt=generates, continue_final_message=continues, kwargs=kwargs
    )


class DetokenizeAnswer(msgspec.Struct):
    prompt: str


class ModelBody(msgspec.Struct, kw_only=True, tag_field="object", tag="model"):
    """One served name."""

    id: str
    created: int
    owned_by: str = "artesian"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True, tag_field="object", tag="list"):
    data: list[ModelBody]


class StatusBody(msgspec.Struct):
    status: str


class VersionBody(msgspec.Struct):
    version: str


class RootBody(msgspec.Struct):
    name: str
    version: str
    models: str
    openapi: str


class MetaApi:
    """The endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started_at = int(time.time())
        self._registry: CollectorRegistry | None = None

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return _json(ModelList(data=[self._model(name) for name in self._service.model_names]))

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}; ids may have slashes."""
        return _json(self._model(self._service.model_name(request.path_params["id"])))

    def _model(self, name: str) -> ModelBody:
        info = self._service.engine.model
        return ModelBody(id=name, created=self._started_at, root=info.root, max_model_len=info.max_model_len)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        service = self._service
        fields, ignored, size_bytes = await read_fields(request, TokenizeRequest, service.config)
        service.model_name(fields.model)

        def work() -> bytes:
            tokens = encode_fields(service.codec, fields)
            strings = [service.codec.label(token) for token in tokens] if fields.return_token_strs else UNSET
            limit = service.engine.model.max_model_len
            return encode(TokenizeAnswer(len(tokens), limit, tokens, strings))

        answer = await off_loop(service, size_bytes, work)
        return Response(answer, media_type="application/json", headers=ignored_header(ignored))

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        service = self._service
        fields, ignored, size_bytes = await read_fields(request, DetokenizeRequest, service.config)
        service.model_name(fields.model)
        ids = token_ids(fields.tokens, service.engine.model.vocab_size, "tokens")
        answer = await off_loop(
            service, size_bytes, lambda: encode(DetokenizeAnswer(service.codec.detokenize(ids)))
        )
        return Response(answer, media_type="application/json", headers=ignored_header(ignored))

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while the process can serve or finish requests, drain included."""
        if not self._service.engine.status().healthy:
            raise Unavailable(
                "The engine has failed.", code="engine_unhealthy", retry_after_s=RESTART_RETRY_AFTER_S
            )
        return _json(StatusBody("draining" if self._service.draining else "ok"))

    async def ready(self, request: Request) -> Response:
        """GET /ready: 200 while new requests are taken."""
        status = self._service.engine.status()
        if self._service.draining or status.draining or not status.healthy:
            raise Unavailable("Not taking new requests.", code="server_overloaded", retry_after_s=5)
        return _json(StatusBody("ready"))

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return _json(VersionBody(version("artesian")))

    async def root(self, request: Request) -> Response:
        """GET /."""
        return _json(RootBody("artesian", version("artesian"), "/v1/models", "/openapi.json"))

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, in the format that the scraper asks for."""
        if self._registry is None:
            self._registry = CollectorRegistry()
            service = self._service
            self._registry.register(
                MetricsCollector(
                    service.telemetry,
                    service.engine,
                    service.model_names[0],
                    service.config.vllm_metric_names,
                )
            )
        try:
            write, content_type = choose_encoder(request.headers.get("accept", ""))
        except (TypeError, ValueError):  # the library reads the versions in the header as numbers
            write, content_type = choose_encoder("")
        return Response(write(self._registry), headers={"content-type": content_type})


def _json(answer: object) -> Response:
    return Response(encode(answer), media_type="application/json")
