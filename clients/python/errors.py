"""Everything that a call can raise, with what the server said.

APIError
├── APIConnectionError              no answer came
│   └── APITimeoutError
├── APIStatusError                  an answer that is not a success
│   ├── BadRequestError             400
│   ├── AuthenticationError         401
│   ├── PermissionDeniedError       403
│   ├── NotFoundError               404
│   ├── ConflictError               409
│   ├── RequestTooLargeError        413
│   ├── UnprocessableEntityError    422
│   ├── RateLimitError              429
│   └── InternalServerError         500 and more
│       └── ServiceUnavailableError 503
├── APIResponseError                a success that cannot be read
├── StreamError                     a stream that told of a fault, or broke off
└── ToolLoopError                   a tool loop that did not come to its end
    ├── ToolRoundsExceeded
    └── ToolLoopCancelled
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class APIError(Exception):
    """Root of all errors of this package."""

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message if request_id is None else f"{message} (request {request_id})")
        self.message = message
        self.request_id = request_id
        """The server's `x-request-id`, as its log has it."""


class APIConnectionError(APIError):
    """The server could not be reached, or the connection broke before an answer."""


class APITimeoutError(APIConnectionError):
    """The answer took longer than the client's timeout."""


class APIResponseError(APIError):
    """The answer is not what this client knows: another server, or a newer one."""


class APIStatusError(APIError):
    """The server answered with an error."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        request_id: str | None = None,
        code: str | None = None,
        param: str | None = None,
        type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, request_id=request_id)
        self.status, self.code, self.param, self.type = status, code, param, type
        self.headers = dict(headers or {})


class BadRequestError(APIStatusError):
    """The request is wrong; `param` names the field."""


class AuthenticationError(APIStatusError):
    """No API key, or an unknown one."""


class PermissionDeniedError(APIStatusError):
    """This key may not do that."""


class NotFoundError(APIStatusError):
    """There is no such model, cache, response or path."""


class ConflictError(APIStatusError):
    """It contradicts something that is there, such as an idempotency key with another body."""


class RequestTooLargeError(APIStatusError):
    """The body is larger than the server takes."""


class UnprocessableEntityError(APIStatusError):
    """Understood, but not to be done."""


class RateLimitError(APIStatusError):
    """This key is at one of its limits."""


class InternalServerError(APIStatusError):
    """The server failed."""


class ServiceUnavailableError(InternalServerError):
    """The server is full or shuts down."""


class StreamError(APIError):
    """A stream ended in a fault; what came before it stays valid."""

    def __init__(
        self,
        message: str,
        *,
        request_id: str | None = None,
        code: str | None = None,
        param: str | None = None,
        type: str | None = None,
    ) -> None:
        super().__init__(message, request_id=request_id)
        self.code, self.param, self.type = code, param, type


class ToolLoopError(APIError):
    """A tool loop ended early; `messages` has the conversation so far."""

    def __init__(self, message: str, messages: list[dict[str, Any]]) -> None:
        super().__init__(message)
        self.messages = messages


class ToolRoundsExceeded(ToolLoopError):
    """The model still calls tools after the last round."""


class ToolLoopCancelled(ToolLoopError):
    """The caller's `cancel` was set."""


_BY_STATUS: Mapping[int, type[APIStatusError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    413: RequestTooLargeError,
    422: UnprocessableEntityError,
    429: RateLimitError,
    503: ServiceUnavailableError,
}


class ErrorObject(msgspec.Struct):
    """OpenAI's error object, in a body or in a stream's event."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | None = None


class _Envelope(msgspec.Struct):
    error: ErrorObject


_decode = msgspec.json.Decoder(_Envelope, strict=False).decode
_SHOWN_BODY_CHARS = 200


def status_error(status: int, headers: Mapping[str, str], body: bytes) -> APIStatusError:
    """Return the error of an answer, whatever its body is."""
    try:
        said = _decode(body).error
    except (msgspec.DecodeError, UnicodeDecodeError):  # a proxy's page
        said = ErrorObject(body[:_SHOWN_BODY_CHARS].decode("utf-8", "replace"))
    kind = _BY_STATUS.get(status, InternalServerError if status >= 500 else APIStatusError)
    return kind(
        f"{status}: {said.message}" if said.message else f"The server answered {status}.",
        status=status,
        request_id=headers.get("x-request-id"),
        code=said.code,
        param=said.param,
        type=said.type,
        headers=headers,
    )
