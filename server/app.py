"""The application: routes, layers, lifespan. The table of contents of this room."""

from __future__ import annotations

import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, WebSocketRoute

from ..engine import Engine
from ..engine.codec import Codec
from .admission import Admission, KeyLimits
from .api.anthropic_messages import MessagesApi
from .api.caches import ACTS, CachesApi
from .api.meta import MetaApi
from .api.openai_chat import ChatApi
from .api.openai_chat_socket import ChatSocket
from .api.openai_completions import CompletionApi
from .api.openai_embeddings import EmbeddingApi
from .api.openai_responses import ResponsesApi
from .api.openai_responses_socket import ResponsesSocket
from .api.openai_responses_store import ResponseStore
from .api.openapi import OpenApi
from .api.resume import StreamsApi
from .api.structured import SchemasApi
from .config import ServerConfig
from .errors import as_api_error
from .idempotency import Idempotency
from .metrics import Telemetry
from .middleware import Auth, ErrorAnswers, RequestContext, cors, error_answer
from .service import Service


def create_app(engine: Engine, codec: Codec, config: ServerConfig) -> Starlette:
    """Build the ASGI application; its lifespan starts and closes the engine.

    `app.state.service` is the `Service` that `serve` drains.
    """
    telemetry = Telemetry()
    service = Service(engine, codec, config, telemetry)
    chat, completions, meta = ChatApi(service), CompletionApi(service), MetaApi(service)
    caches = CachesApi(service)
    messages = MessagesApi(service)
    responses = ResponsesApi(service, ResponseStore(engine))
    limits = KeyLimits(config.key_requests_per_minute, config.key_concurrency, time.monotonic)
    routes = [
        Route("/v1/chat/completions", chat.create, methods=["POST"]),
        Route("/v1/chat/completions/estimate", chat.estimate, methods=["POST"]),
        Route("/v1/completions", completions.create, methods=["POST"]),
        Route("/v1/embeddings", EmbeddingApi(service).create, methods=["POST"]),
        Route("/v1/schemas/validate", SchemasApi(service).validate, methods=["POST"]),
        Route("/v1/streams/{id}", StreamsApi(service).get, methods=["GET"]),
        WebSocketRoute("/v1/chat/completions", ChatSocket(service, limits).connect),
        WebSocketRoute("/v1/responses", ResponsesSocket(service, limits).connect),
        Route("/v1/responses", responses.create, methods=["POST"]),
        Route("/v1/responses/input_tokens", responses.input_tokens, methods=["POST"]),
        Route("/v1/responses/{id}", responses.get, methods=["GET"]),
        Route("/v1/responses/{id}", responses.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", responses.cancel, methods=["POST"]),
        Route("/v1/responses/{id}/input_items", responses.input_items, methods=["GET"]),
        Route("/v1/messages", messages.create, methods=["POST"]),
        Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
        Route("/v1/caches", caches.create, methods=["POST"]),
        Route("/v1/caches", caches.list_all, methods=["GET"]),
        Route("/v1/caches", caches.delete_by_key, methods=["DELETE"]),
        Route("/v1/caches/explain", caches.explain, methods=["POST"]),
        Route("/v1/caches/{name}", caches.get, methods=["GET"]),
        Route("/v1/caches/{name}", caches.delete, methods=["DELETE"]),
        *[Route(f"/v1/caches/{{name}}/{act}", caches.act(act), methods=["POST"]) for act in ACTS],
        Route("/v1/models", meta.models),
        Route("/v1/models/{id:path}", meta.model),
        *[Route(f"{prefix}/tokenize", meta.tokenize, methods=["POST"]) for prefix in ("", "/v1")],
        *[Route(f"{prefix}/detokenize", meta.detokenize, methods=["POST"]) for prefix in ("", "/v1")],
        Route("/health", meta.health),
        Route("/ready", meta.ready),
        Route("/version", meta.version),
        Route("/openapi.json", OpenApi(bool(config.api_keys)).get),
        Route("/metrics", meta.metrics),
        Route("/", meta.root),
    ]
    middleware = [
        Middleware(RequestContext, telemetry=telemetry, access_log=config.access_log),
        *cors(config.allowed_origins),
        Middleware(ErrorAnswers, telemetry=telemetry),
        Middleware(Auth, api_keys=config.api_keys, admin_key=config.admin_key),
        Middleware(Idempotency, max_body_bytes=config.max_body_bytes, clock=time.monotonic),
        Middleware(Admission, limits=limits, is_draining=lambda: service.draining),
    ]
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: _answer_http_exception},
        lifespan=service.lifespan,
    )
    app.state.service = service
    return app


def _answer_http_exception(request: Request, exc: Exception) -> Response:
    """Give the router's own refusals (404, 405) the body that every error has."""
    error = as_api_error(exc)
    if error.status == 405:  # the router names the methods of the first route of this path only
        routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
        error.headers["allow"] = ", ".join(sorted(set().union(*(route.methods for route in routes))))
    return error_answer(request.scope, error)
