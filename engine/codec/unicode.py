"""The one rule for text from outside: it must be Unicode that UTF-8 can carry."""

from __future__ import annotations

from ..errors import InvalidRequest


def require_unicode(text: str, param: str | None = None) -> None:
    """Refuse lone surrogates: no tokenizer, log or disk can take them.

    Raises:
        InvalidRequest: names `param` and the position.
    """
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as err:
        raise InvalidRequest(
            f"{param or 'The text'} is not valid Unicode: lone surrogate "
            f"\\u{ord(text[err.start]):04x} at character {err.start}",
            param,
        ) from err
