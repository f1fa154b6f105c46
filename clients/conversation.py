"""A conversation in the terminal: history, streaming, and an answer that can be cut short.

Speaks Chat Completions over HTTP; knows nothing of engines or of how a line is read and shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx


class ChatError(Exception):
    """The server refused a turn or broke off; the conversation is as it was before."""


@dataclass(slots=True)
class Conversation:
    """The messages so far and how to continue them."""

    client: httpx.Client
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    """More fields of every request, `temperature` for one."""
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def say(self, text: str, show: Callable[[str], None]) -> None:
        """Add a turn and show its answer as it comes. KeyboardInterrupt keeps what has been shown.

        Raises:
            ChatError: the server refused, or ended the stream with an error.
        """
        asked = {"role": "user", "content": text}
        answer = ""
        try:
            for piece in self._stream([*self.messages, asked]):
                show(piece)
                answer += piece
        finally:
            if answer:
                self.messages += [asked, {"role": "assistant", "content": answer}]

    def _stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        body = {"model": self.model, "messages": messages, "stream": True, **self.options}
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    raise ChatError(_message(response.read()))
                for line in response.iter_lines():
                    data = line.removeprefix("data: ")
                    if data == "[DONE]" or not line.startswith("data: "):
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise ChatError(event["error"]["message"])
                    for choice in event["choices"]:
                        yield choice["delta"].get("content") or ""
        except httpx.HTTPError as err:
            raise ChatError(f"{err or type(err).__name__}") from err


def first_model(client: httpx.Client) -> str:
    """Return the name of the first model that the server offers.

    Raises:
        ChatError: there is no server, it refuses, or it does not speak OpenAI's API.
    """
    try:
        answer = client.get("/v1/models")
    except httpx.HTTPError as err:
        raise ChatError(f"no server at {client.base_url}: {err or type(err).__name__}") from err
    if answer.is_error:
        raise ChatError(f"{client.base_url} answers {answer.status_code}: {_message(answer.content)}")
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as err:
        raise ChatError(f"no model at {client.base_url}: it does not list any as OpenAI's API does") from err


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace")[:200]
