"""Server-sent events out of bytes that are cut anywhere. Knows the framing, not what the data means."""

from __future__ import annotations

from typing import NamedTuple


class ServerEvent(NamedTuple):
    """One event."""

    data: str
    event: str = ""
    id: str = ""
    """The last id that was sent, which a resumed stream begins behind."""


class EventParser:
    """Reads by the rules of the HTML standard: lines end with LF, CR or CR LF; comments say nothing."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._scanned = 0
        """Bytes of the rest that are known to hold no end of a line: a long line is searched once."""
        self._data: list[str] = []
        self._event = ""
        self._id = ""

    def feed(self, chunk: bytes) -> list[ServerEvent]:
        """Return the events that are complete with these bytes."""
        rest = self._rest
        rest += chunk
        events: list[ServerEvent] = []
        start, at = 0, self._scanned
        while (end := _line_end(rest, at)) >= 0:
            if rest[end] == 0x0D and end + 1 == len(rest):
                break  # an LF may follow: it belongs to this line's end
            event = self._line(rest[start:end].decode("utf-8", "replace"))
            if event is not None:
                events.append(event)
            start = at = end + (2 if rest[end : end + 2] == b"\r\n" else 1)
        del rest[:start]
        self._scanned = len(rest) - (1 if rest.endswith(b"\r") else 0)
        return events

    def _line(self, line: str) -> ServerEvent | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self._id = value
        return None

    def _dispatch(self) -> ServerEvent | None:
        data, event = self._data, self._event
        self._data, self._event = [], ""
        return ServerEvent("\n".join(data), event, self._id) if data else None


def _line_end(text: bytearray, start: int) -> int:
    newline = text.find(b"\n", start)
    carriage_return = text.find(b"\r", start, newline if newline >= 0 else len(text))
    return carriage_return if carriage_return >= 0 else newline
