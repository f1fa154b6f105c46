"""Whatever is sent, the answer is one that the map of errors knows, never a 500."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from http_server import client_of, scripted_app
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from artesian.server.api.caches import CreateCache
from artesian.server.api.chat_messages import MessageFields
from artesian.server.api.openai_chat import ChatRequest
from artesian.server.api.openai_completions import CompletionRequest
from artesian.server.api.prompt_cache import PromptCacheOptions
from artesian.server.api.sampling import UNAVAILABLE

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
JSON_VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer", "x"])
MESSAGE = st.fixed_dictionaries(
    {"role": ROLES | JSON_VALUES},
    optional={name: JSON_VALUES for name in MessageFields.__struct_fields__ if name != "role"},
)
FIELDS = sorted(
    {"x", *UNAVAILABLE}.union(
        *(form.__struct_fields__ for form in (ChatRequest, CompletionRequest, CreateCache))
    )
)
OPTIONS = st.dictionaries(st.sampled_from(PromptCacheOptions.__struct_fields__), JSON_VALUES, max_size=3)
BODIES = st.builds(
    lambda messages, prompt, options, rest: {
        "prompt_cache_options": options,
        **rest,
        "messages": messages,
        "prompt": prompt,
    },
    st.lists(MESSAGE, max_size=3),
    st.none() | st.text(max_size=8) | st.lists(st.integers(-1, 300), max_size=4) | JSON_VALUES,
    OPTIONS,
    st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=4),
)
KNOWN = {200, 201, 400, 404, 413, 415}
VALID = json.dumps({"messages": [{"role": "user", "content": "hi é"}], "stop": ["x"], "n": 2}).encode()


async def statuses(posts: list[tuple[str, bytes]]) -> set[int]:
    app, _ = scripted_app()
    headers = {"content-type": "application/json"}
    async with client_of(app) as client:
        return {(await client.post(path, content=data, headers=headers)).status_code for path, data in posts}


PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/caches/explain")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(BODIES, min_size=1, max_size=8))
def test_any_json_is_answered(bodies: list[dict[str, Any]]) -> None:
    posts = [(path, json.dumps(body).encode()) for body in bodies for path in PATHS]
    assert asyncio.run(statuses(posts)) <= KNOWN


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(VALID)), st.binary(max_size=4)), min_size=1, max_size=8))
def test_any_broken_json_is_answered(breaks: list[tuple[int, bytes]]) -> None:
    posts = [(PATHS[0], VALID[:at] + noise + VALID[at + len(noise) :]) for at, noise in breaks]
    assert asyncio.run(statuses(posts)) <= KNOWN
