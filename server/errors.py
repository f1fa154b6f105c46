"""The one map from what went wrong to what a client sees: status, code, type and OpenAI's error body.

ApiError
├── BadRequest          400   the request itself; has `param`
├── NotFound            404   an unknown model or path
├── Refused             401, 403, 405, 408, 413, 415, 431
└── Unavailable         429, 503, with the time to try again
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException

from ..engine import (
    CacheUnavailable,
    ContextTooLong,
    EngineDraining,
    EngineOverloaded,
    EngineStopped,
    InvalidRequest,
    RequestFailed,
)

MAX_RETRY_AFTER_S = 60.0
"""openai-python gives up instead of waiting when it is told more than 120 s."""
RESTART_RETRY_AFTER_S = 5.0
CACHE_RETRY_AFTER_S = 5.0
DRAIN_RETRY_AFTER_S = 5.0
"""A load balancer needs about that long to see that /ready fails and choose another replica."""


class ApiError(Exception):
    """An answer other than success."""

    status = 500
    type = "server_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.code, self.param = message, code, param
        self.status = status or self.status
        self.headers = dict(headers or {})


class BadRequest(ApiError):
    """The request is wrong and will stay so."""

    status = 400
    type = "invalid_request_error"


class NotFound(BadRequest):
    """There is nothing of that name."""

    status = 404


class Refused(BadRequest):
    """Not to be served in this form: the status says why."""


class Unauthorized(ApiError):
    """No key, or a wrong one."""

    status = 401
    type = "authentication_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


class Unavailable(ApiError):
    """Not now: full, draining, or a key's own limit."""

    status = 503
    type = "server_error"

    def __init__(self, message: str, *, code: str, retry_after_s: float, status: int | None = None) -> None:
        # NaN or a negative estimate must not reach the header.
        wait_s = min(retry_after_s, MAX_RETRY_AFTER_S) if retry_after_s > 0 else 0.1
        headers = {
            "retry-after": str(max(1, math.ceil(wait_s))),
            "retry-after-ms": str(max(1, round(wait_s * 1000))),
            "x-should-retry": "true",
        }
        super().__init__(message, code=code, status=status, headers=headers)
        if self.status == 429:
            self.type = "rate_limit_error"


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object; `code` is always a string or null."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success, and of an error event."""

    error: ErrorBody


_encode = msgspec.json.Encoder().encode


class AnthropicError(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicEnvelope(msgspec.Struct, frozen=True):
    """The body of an error, and the data of an `error` event, on Anthropic's paths."""

    error: AnthropicError
    type: str = "error"


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def anthropic_status(error: ApiError) -> int:
    """Return the status that Anthropic's API gives an error: it has its own for a full or closing server."""
    return 529 if error.status == 503 else error.status


def anthropic_error_body(error: ApiError) -> bytes:
    """Return an error in Anthropic's form."""
    status = anthropic_status(error)
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return _encode(AnthropicEnvelope(AnthropicError(kind, error.message)))


def model_not_found(name: str) -> NotFound:
    """The error for a model that is not served here."""
    shown = name if len(name) <= 100 else name[:100] + "..."
    return NotFound(f"The model `{shown}` does not exist.", code="model_not_found", param="model")


def as_api_error(exc: BaseException) -> ApiError:
    """Return the client's view of any exception; what is not known here is a bug and shows no internals."""
    match exc:
        case ApiError():
            return exc
        case ContextTooLong():
            return BadRequest(str(exc), code="context_length_exceeded", param=exc.param)
        case InvalidRequest():
            return BadRequest(str(exc), code="invalid_value", param=exc.param)
        case EngineOverloaded():
            return Unavailable(str(exc), code="server_overloaded", retry_after_s=exc.retry_after_s)
        case EngineDraining():
            return draining()
        case EngineStopped():
            return Unavailable(str(exc), code="engine_unhealthy", retry_after_s=RESTART_RETRY_AFTER_S)
        case CacheUnavailable():
            return Unavailable(str(exc), code="cache_unavailable", retry_after_s=CACHE_RETRY_AFTER_S)
        case RequestFailed():
            return ApiError(str(exc), code="request_failed", headers={"x-should-retry": "true"})
        case HTTPException(status_code=404):
            return NotFound("There is nothing at this URL.", code="unknown_url")
        case HTTPException(status_code=405, headers=headers):
            return Refused(
                "This URL does not allow that method.",
                code="method_not_allowed",
                status=405,
                headers={"allow": (headers or {}).get("Allow", "POST")},
            )
        case HTTPException():
            return Refused(exc.detail, status=exc.status_code)
        case _:
            return ApiError("The server had an internal error.", code="internal_error")


def draining() -> Unavailable:
    """The answer while the server shuts down."""
    return Unavailable(
        "The server is shutting down and takes no new requests.",
        code="server_overloaded",
        retry_after_s=DRAIN_RETRY_AFTER_S,
    )


def error_body(error: ApiError) -> bytes:
    """Return the JSON body of an error."""
    return _encode(ErrorEnvelope(ErrorBody(error.message, error.type, error.param, error.code)))
