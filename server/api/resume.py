"""Taking a stream up again: where a request says so, and `/v1/streams/{id}`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ..errors import BadRequest, NotFound
from ..middleware import request_info
from ..service import Service
from ..stream.resume import run_response
from .respond import isolation_salt

MAX_NUMBER_CHARS = 11


def starting_after(request: Request) -> int:
    """Return the number behind which a stream goes on, of `starting_after` or `Last-Event-ID`; -1 = from its
    beginning.

    Raises:
        BadRequest: it is no number.
    """
    given = request.query_params.get("starting_after")
    if given is None:
        given = request.headers.get("last-event-id", "").rpartition(":")[2]
        if not given:
            return -1
    if not (given.isascii() and given.isdecimal() and len(given) <= MAX_NUMBER_CHARS):
        raise BadRequest(
            "starting_after must be the number of an event", code="invalid_value", param="starting_after"
        )
    return int(given)


def taken_up(service: Service, request: Request) -> Response | None:
    """Return the rest of the stream that a request's `Last-Event-ID` names; None if there is no such header.
    A client that sends its request again with that header, as the standard says, gets no second answer.

    Raises:
        BadRequest: that stream is not kept (any more).
    """
    last = request.headers.get("last-event-id")
    if last is None:
        return None
    return _rest(service, request, last.rpartition(":")[0])


def _rest(service: Service, request: Request, name: str) -> Response:
    salt = isolation_salt(request_info(request.scope).key_id, request.query_params.get("cache_salt"))
    run = service.runs.find(name, salt)
    if run is None:
        raise BadRequest(
            "The events of this stream are not kept (any more).", code="events_expired", param="Last-Event-ID"
        )
    return run_response(
        service.runs,
        run,
        starting_after(request),
        {},
        with_ids=True,
        keep_alive_interval_s=service.config.keep_alive_interval_s,
    )


class StreamsApi:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def get(self, request: Request) -> Response:
        """GET /v1/streams/{id}, the response's, or the `x-request-id` of the request that began it."""
        try:
            return _rest(self._service, request, request.path_params["id"])
        except BadRequest as err:
            if err.param != "Last-Event-ID":
                raise
            raise NotFound(err.message, code="events_expired", param="id") from None
