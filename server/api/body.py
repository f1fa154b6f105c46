"""From the bytes of a request's body to a typed Struct, with every refusal saying what and where.

Rules where JSON leaves a choice: a byte order mark is skipped; the last of duplicate keys counts; numbers
keep their type (1.0 is no integer, true is no number); unknown fields that are null or empty say nothing.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from ..errors import BadRequest, Refused

S = TypeVar("S", bound=msgspec.Struct)

_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_AT_PATH = re.compile(r" - at `(key in )?\$\.?(.*)`$")
_ANY_INDEX = re.compile(r"\[\.\.\.\]")
_UNSAFE_IN_HEADER = re.compile(r"[^A-Za-z0-9_.\[\]\-]")

_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


@contextmanager
def gc_paused() -> Iterator[None]:
    """No garbage collection in this block: among millions of new objects, none of them garbage, the passes
    of the collector take ten times as long as the parsing itself, and the event loop waits for them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body, which must declare itself as plain JSON.

    Raises:
        Refused: 413 too large, 415 not JSON or compressed.
        ClientDisconnect: the client left before its body was whole.
    """
    headers = request.headers
    media_type = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        # Also what keeps a web page's form from posting here without a CORS preflight.
        raise Refused(
            f"content-type is {media_type[:100]!r}; expected application/json",
            code="unsupported_media_type",
            status=415,
        )
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise Refused(
            "content-encoding is not supported: send the JSON uncompressed",
            code="unsupported_content_encoding",
            status=415,
        )
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(data)


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse one JSON object.

    Raises:
        BadRequest: not UTF-8, not JSON or not an object; says at which byte.
    """
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        data.decode()  # msgspec does not look into strings that it skips
        return _decode_object(data)
    except UnicodeDecodeError as err:
        raise _not_json(f"The body is not valid UTF-8 at byte {err.start}.") from None
    except RecursionError:
        raise _not_json("The body's JSON is nested too deeply.") from None
    except msgspec.ValidationError as err:
        raise _not_json(f"The body must be a JSON object: {err}.") from None
    except msgspec.DecodeError as err:
        if not data.strip():
            raise _not_json("The body is empty; expected a JSON object.") from None
        if lone := _LONE_SURROGATE.search(data):
            raise _not_json(
                f"The body has the lone surrogate escape {lone[0].decode()} at byte {lone.start()}; "
                "it is no Unicode character."
            ) from None
        raise _not_json(f"The body is not valid JSON: {err}.") from None


def typed(fields: dict[str, Any], form: type[S]) -> S:
    """Return the object's fields as a Struct.

    Raises:
        BadRequest: a field is missing, of the wrong type or out of range; `param` names it.
    """
    try:
        return msgspec.convert(fields, form)
    except msgspec.ValidationError as err:
        message = str(err)
        found = _AT_PATH.search(message)
        param = _ANY_INDEX.sub("", found[2]) if found else None
        said = message[: found.start()].replace("`", "") if found else message
        if missing := re.fullmatch(r"Object missing required field (\w+)", said.replace("`", "")):
            param = f"{param}.{missing[1]}" if param else missing[1]
        raise BadRequest(
            f"{param}: {said}" if param else said, code="invalid_value", param=param or None
        ) from None
    except RecursionError:
        raise _not_json("The body's JSON is nested too deeply.") from None


def unknown_fields(fields: dict[str, Any], known: msgspec.Struct) -> list[str]:
    """Return the paths of the fields that the Struct has no place for, such as `messages[].cache`."""
    return list(dict.fromkeys(_unknown(fields, known, "")))


def ignored_header(names: list[str]) -> dict[str, str]:
    """Return the response header that names ignored fields, as safe characters."""
    if not names:
        return {}
    return {"x-ignored-fields": ", ".join(_UNSAFE_IN_HEADER.sub("?", name) for name in names)}


def _unknown(raw: Any, known: Any, path: str) -> Iterator[str]:
    if isinstance(known, msgspec.Struct):
        names = known.__struct_encode_fields__
        for key, value in raw.items():
            if key not in names and key != known.__struct_config__.tag_field:
                if value is not None and value != [] and value != {}:
                    yield f"{path}{key}"
            elif isinstance(value, dict | list) and key in names:
                yield from _unknown(value, getattr(known, key), f"{path}{key}.")
    elif isinstance(known, list) and known and isinstance(known[0], msgspec.Struct):
        for item, known_item in zip(raw, known, strict=True):
            yield from _unknown(item, known_item, f"{path[:-1]}[].")


def _too_large(max_bytes: int) -> Refused:
    return Refused(f"The body has more than {max_bytes} bytes.", code="request_too_large", status=413)


def _not_json(message: str) -> BadRequest:
    return BadRequest(message, code="invalid_json")
