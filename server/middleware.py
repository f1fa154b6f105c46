"""What happens around every request: its id, its key, its error answer, its line in the log. Pure ASGI.

Knows nothing of what the endpoints do. Order, from the outside: `RequestContext`, CORS, `ErrorAnswers`,
`Auth`, `idempotency.Idempotency`, then `admission.Admission`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from secrets import token_hex
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from .errors import ApiError, Unauthorized, anthropic_error_body, anthropic_status, as_api_error, error_body
from .metrics import Telemetry

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("artesian.access")

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version", "/openapi.json"})
GENERATION_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/v1/caches",
    }
)
ADMIN_PATHS = frozenset({"/metrics"})
EXPOSED_HEADERS = (
    "x-request-id",
    "openai-processing-ms",
    "openai-version",
    "x-ignored-fields",
    "x-queue-position",
    "idempotent-replayed",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
)
CLIENT_LEFT = 499
"""Status in the log (nginx's number) when a client left before its answer began."""

_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_CONTEXT = "artesian.request"


@dataclass(slots=True)
class RequestInfo:
    """What the layers know about one HTTP request."""

    id: str
    arrived_at: float
    """`time.perf_counter()` seconds."""
    key_id: str = ""
    """Digest of the API key that was used; empty on an open server."""
    status: int = CLIENT_LEFT
    generation_id: str = "-"
    """The id under which the engine knows what this request generates."""
    queue_position: int = 0
    """Its place among those that waited when it was accepted; 0 = it did not have to wait."""
    has_failed: Callable[[], bool] = lambda: False
    """Whether what was generated for it has failed, be it in the middle of the answer."""
    started: bool = False
    """Whether the answer's first byte has been sent."""


def request_info(scope: Scope) -> RequestInfo:
    """Return what `RequestContext` noted about this request."""
    info: RequestInfo = scope[_CONTEXT]
    return info


def route_path(scope: Scope) -> str:
    """Return the path as the routes know it, without the prefix of a proxy."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def is_generation(scope: Scope) -> bool:
    """Whether this request runs a prompt."""
    path = route_path(scope)
    prewarms = path.startswith("/v1/caches/") and path.endswith("/prewarm")
    return scope["method"] == "POST" and (path in GENERATION_PATHS or prewarms)


def is_anthropic(path: str) -> bool:
    """Whether this path speaks Anthropic's protocol."""
    return f"{path}/".startswith("/v1/messages/")


def error_answer(scope: Scope, error: ApiError) -> Response:
    """Return the answer that tells an error in the form of the path's protocol."""
    if is_anthropic(route_path(scope)):
        body, status = anthropic_error_body(error), anthropic_status(error)
    else:
        body, status = error_body(error), error.status
    return Response(body, status, error.headers, "application/json")


class RequestContext:
    """Gives every request an id, every answer the common headers, and the log one line for each."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry, access_log: bool) -> None:
        self.app, self.telemetry, self.access_log = app, telemetry, access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        sane = _SANE_REQUEST_ID.fullmatch(given) is not None
        info = RequestInfo(given if sane else f"req_{token_hex(12)}", time.perf_counter())
        scope[_CONTEXT] = info

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "websocket.accept":
                info.started, info.status = True, 101
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = info.id
            elif not info.started and message["type"].endswith("http.response.start"):
                info.started, info.status = True, message["status"]
                elapsed_ms = (time.perf_counter() - info.arrived_at) * 1000
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = info.id
                if is_anthropic(route_path(scope)):
                    headers["request-id"] = info.id
                headers["openai-processing-ms"] = f"{elapsed_ms:.0f}"
                headers["openai-version"] = "2020-10-01"
                if info.queue_position:
                    headers["x-queue-position"] = str(info.queue_position)
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        finally:
            self.telemetry.responses[info.status] += 1
            if self.access_log:
                path = scope.get("raw_path") or quote(scope["path"]).encode()
                access_logger.info(
                    "request_id=%s generation_id=%s method=%s path=%s status=%d ms=%.1f",
                    info.id,
                    info.generation_id,
                    scope.get("method", "WEBSOCKET"),
                    path.decode("latin-1"),
                    info.status,
                    (time.perf_counter() - info.arrived_at) * 1000,
                )


class ErrorAnswers:
    """Turns exceptions that come before the first byte into their answer."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self.app, self.telemetry = app, telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except ClientDisconnect:
            self.telemetry.disconnects += 1
        except Exception as exc:
            info = request_info(scope)
            error = as_api_error(exc)
            if error.code == "internal_error":
                logger.exception("internal error request_id=%s", info.id)
            if info.started:
                raise  # the status is out: only cutting the connection can still say that this failed
            if error.status in (429, 503) and is_generation(scope):
                self.telemetry.rejections[error.code or "unavailable"] += 1
            answer = error_answer(scope, error)
            if scope["type"] == "websocket":
                await WebSocket(scope, receive, send).send_denial_response(answer)
            else:
                await answer(scope, receive, send)


class Auth:
    """Lets in who has a key; compares digests in constant time, and never logs a key."""

    def __init__(self, app: ASGIApp, api_keys: Iterable[str], admin_key: str | None) -> None:
        self.app = app
        self._keys = tuple(_digest(key) for key in api_keys)
        self._admin_keys = () if admin_key is None else (_digest(admin_key),)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            path = route_path(scope)
            accepted = self._admin_keys if path in ADMIN_PATHS else self._keys
            if accepted and path not in OPEN_PATHS and scope.get("method") != "OPTIONS":
                request_info(scope).key_id = _check(Headers(scope=scope), accepted)
        await self.app(scope, receive, send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _check(headers: Headers, accepted: tuple[bytes, ...]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = [token.strip()] if scheme.lower() == "bearer" else []
    if "x-api-key" in headers:
        given.append(headers["x-api-key"].strip())
    if not any(given):
        raise Unauthorized("No API key: send `Authorization: Bearer KEY` (or `x-api-key: KEY`).")
    matched = ""
    for key in given:
        # Starlette decodes headers as latin-1; a key is compared by the bytes that were sent.
        digest = hashlib.sha256(key.encode("latin-1")).digest()
        for known in accepted:
            if hmac.compare_digest(digest, known):
                matched = known.hex()[:16]
    if not matched:
        raise Unauthorized("The API key is not known here.")
    return matched


def cors(origins: tuple[str, ...]) -> list[Middleware]:
    """Return the CORS layer, or none. Credentials are never allowed: keys travel in headers, not cookies."""
    if not origins:
        return []
    options: dict[str, Any] = {
        "allow_origins": origins,
        "allow_methods": ("GET", "POST", "DELETE", "OPTIONS"),
        "allow_headers": ("*",),
        "expose_headers": EXPOSED_HEADERS,
    }
    return [Middleware(CORSMiddleware, **options)]
