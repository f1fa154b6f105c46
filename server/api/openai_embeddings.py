"""OpenAI's `/v1/embeddings`: one vector for each text, pooled from the served model's last hidden rows."""

from __future__ import annotations

import base64
from secrets import token_hex
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ...engine import (
    CachePolicy,
    ContextTooLong,
    Delta,
    EngineOverloaded,
    GenerationRequest,
    RequestFailed,
    SamplingParams,
)
from ..errors import BadRequest
from ..middleware import request_info
from ..service import Service
from ..stream.events import Step
from .body import ignored_header
from .openai_completions import PromptForms, prompt_rows
from .respond import collect, isolation_salt, off_loop, submit
from .sampling import read_fields, token_ids
from .types import encode

MAX_INPUTS = 2048
"""OpenAI's."""
AT_ONCE = 16
"""Inputs that are in the engine together: a long list must not keep others from their turn."""
NOTHING = SamplingParams(max_tokens=0)


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The body of a request."""

    input: PromptForms
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True
    add_special_tokens: bool = True
    priority: int | None = None
    cache_salt: str | None = None


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(msgspec.Struct, kw_only=True):
    """The body of an answer."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class EmbeddingApi:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        service = self._service
        fields, ignored, size_bytes = await read_fields(request, EmbeddingRequest, service.config)
        model = service.model_name(fields.model)
        width = service.engine.model.hidden_size
        if fields.dimensions not in (None, width):
            message = f"dimensions={fields.dimensions} is not available: this model's vectors have {width}"
            raise _invalid("dimensions", message)
        prompts = await off_loop(service, size_bytes, lambda: self._prompts(fields))
        answer_id = f"embd-{token_hex(16)}"
        salt = isolation_salt(request_info(request.scope).key_id, fields.cache_salt)
        generations = [
            GenerationRequest(
                id=f"{answer_id}-{row}",
                prompt=prompt,
                params=NOTHING,
                priority=fields.priority or 0,
                salt=salt,
                cache=CachePolicy(durable=False),
                pooling=fields.pooling,
            )
            for row, prompt in enumerate(prompts)
        ]
        vectors: list[bytes] = []
        at_once = AT_ONCE
        while len(vectors) < len(generations):
            try:
                vectors += await self._vectors(request, generations[len(vectors) :][:at_once])
            except EngineOverloaded:
                if at_once == 1:
                    raise
                at_once //= 2  # the queue is shorter than that
        tokens = sum(len(prompt) for prompt in prompts)
        answer = EmbeddingAnswer(
            data=[Embedding(index, _form(fields, vector)) for index, vector in enumerate(vectors)],
            model=model,
            usage=EmbeddingUsage(tokens, tokens),
        )
        return Response(encode(answer), media_type="application/json", headers=ignored_header(ignored))

    async def _vectors(self, request: Request, generations: list[GenerationRequest]) -> list[bytes]:
        ends: dict[int, Delta] = {}

        def take(step: Step) -> None:
            ends.update({delta.index: delta for delta in step if delta.finish_reason is not None})

        await collect(request, submit(self._service, request, generations), take)
        vectors = [ends[row].embedding for row in range(len(generations))]
        if None in vectors:
            raise RequestFailed("The model gave no vector.")
        return [vector for vector in vectors if vector is not None]

    def _prompts(self, fields: EmbeddingRequest) -> list[list[int]]:
        """Raises `BadRequest`, `ContextTooLong`."""
        codec, model = self._service.codec, self._service.engine.model
        rows = prompt_rows(fields.input, "input", MAX_INPUTS)
        prompts: list[list[int]] = []
        for index, row in enumerate(rows):
            name = "input" if len(rows) == 1 else f"input[{index}]"
            if isinstance(row, str):
                try:
                    ids = codec.encode_prompt(
                        row, add_special=fields.add_special_tokens, limit=model.max_model_len
                    )
                except ContextTooLong as err:
                    err.param = name
                    raise
            else:
                ids = list(token_ids(row, model.vocab_size, name))
            if not ids:
                raise _invalid(name, f"{name} is empty: there is nothing to embed")
            if len(ids) > model.max_model_len:
                raise ContextTooLong(len(ids), model.max_model_len, param=name)
            prompts.append(ids)
        return prompts


def _form(fields: EmbeddingRequest, data: bytes) -> list[float] | str:
    vector = np.frombuffer(data, "<f4")
    if fields.normalize:
        norm = float(np.linalg.norm(vector.astype(np.float64)))
        vector = (vector / norm).astype("<f4") if norm else vector
    if fields.encoding_format == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    values: list[float] = vector.tolist()
    return values


def _invalid(param: str, message: str) -> BadRequest:
    return BadRequest(message, code="invalid_value", param=param)
