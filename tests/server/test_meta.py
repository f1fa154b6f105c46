"""Models, tokenize and detokenize, health, metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from http_server import client_of, scripted_app
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import BOS, Script, ScriptedEngine, toy_codec

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


async def test_models_are_listed_with_their_limits() -> None:
    app, _ = scripted_app(served_model_names=("main", "org/alias"))
    async with client_of(app) as client:
        listed = (await client.get("/v1/models")).json()
        one = (await client.get("/v1/models/org/alias")).json()
        none = await client.get("/v1/models/nope")
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["main", "org/alias"]
    assert one == listed["data"][1]
    assert (one["max_model_len"], one["root"], one["parent"]) == (4096, "scripted/model", None)
    assert (none.status_code, none.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize("text", ["Hello:World", " x", "\n\nx", "👩‍👩‍👧 é", "a\u0000b", "<|im_start|>user"])
async def test_tokenize_and_detokenize_are_inverse(prefix: str, text: str) -> None:
    app, _ = scripted_app()
    async with client_of(app) as client:
        split = (await client.post(f"{prefix}/tokenize", json={"prompt": text})).json()
        back = (await client.post(f"{prefix}/detokenize", json={"tokens": split["tokens"]})).json()
    assert split["count"] == len(split["tokens"])
    assert split["max_model_len"] == 4096
    assert back == {"prompt": text}


async def test_one_bos_for_prompts_and_for_chats() -> None:
    app, engine = scripted_app(ScriptedEngine(toy_codec(add_bos=True)))
    async with client_of(app) as client:

        async def tokens(**body: Any) -> list[int]:
            answer = (await client.post("/tokenize", json=body)).json()
            ids: list[int] = answer["tokens"]
            return ids

        assert (await tokens(prompt="x")).count(BOS) == 1
        assert (await tokens(prompt="<s>x")).count(BOS) == 1
        assert (await tokens(prompt="x", add_special_tokens=False)).count(BOS) == 0
        assert (await tokens(messages=HELLO)).count(BOS) == 1
        assert (await tokens(messages=HELLO, add_special_tokens=True)).count(BOS) == 1
        usage = (await client.post(CHAT, json={"messages": HELLO})).json()["usage"]
        assert usage["prompt_tokens"] == len(await tokens(messages=HELLO))
        assert engine.requests[0].prompt == await tokens(messages=HELLO)


async def test_tokenize_can_leave_the_last_message_open() -> None:
    app, _ = scripted_app()
    messages = [*HELLO, {"role": "assistant", "content": "The answer is"}]
    async with client_of(app) as client:
        body = {"messages": messages, "continue_final_message": True, "return_token_strs": True}
        answer = (await client.post("/tokenize", json=body)).json()
    assert "".join(answer["token_strs"]).endswith("The answer is")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": HELLO}),
        ("/tokenize", {"prompt": 1}),
        ("/tokenize", {"messages": []}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": "abc"}),
    ],
)
async def test_what_cannot_be_split_or_joined_is_400(path: str, body: dict[str, Any]) -> None:
    app, _ = scripted_app()
    async with client_of(app) as client:
        assert (await client.post(path, json=body)).status_code == 400


async def test_health_and_ready_follow_the_engine_and_the_drain() -> None:
    app, engine = scripted_app()
    async with client_of(app) as client:

        async def statuses() -> list[int]:
            return [(await client.get(path)).status_code for path in ("/health", "/ready")]

        assert await statuses() == [200, 200]
        app.state.service.draining = True
        assert await statuses() == [200, 503]
        refused = await client.post(CHAT, json={"messages": HELLO})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_overloaded")
        assert refused.headers["retry-after"]
        engine.healthy = False
        assert await statuses() == [503, 503]


async def test_the_lifespan_starts_and_closes_the_engine() -> None:
    app, engine = scripted_app()
    async with client_of(app):
        assert engine.is_open
    assert not engine.is_open


async def scrape(client: Any) -> dict[tuple[str, str], float]:
    text = (await client.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    labels = ("finished_reason", "reason", "source", "status", "le")
    return {
        (
            sample.name,
            next((sample.labels[label] for label in labels if label in sample.labels), ""),
        ): sample.value
        for sample in samples
    }


async def test_metrics_count_what_happened() -> None:
    app, _ = scripted_app(ScriptedEngine(toy_codec(), Script(text="abc"), queue_limit=1))
    async with client_of(app) as client:
        stream = await client.post(CHAT, json={"messages": HELLO, "stream": True})
        await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
        await client.post("/v1/completions", json={"prompt": ["a", "b"]})
        app.state.service.draining = True
        await client.get("/ready")
        seen = await scrape(client)
    assert stream.status_code == 200
    for prefix in ("artesian_", "vllm:"):
        assert seen[f"{prefix}num_requests_running", ""] == 0
        assert seen[f"{prefix}generation_tokens_total", ""] == 4 + 2
        assert seen[f"{prefix}prefix_cache_hits_total", ""] == 3 + 1
        assert seen[f"{prefix}prompt_tokens_total", ""] == seen[f"{prefix}prefix_cache_queries_total", ""]
        assert seen[f"{prefix}request_success_total", "stop"] == 1
        assert seen[f"{prefix}request_success_total", "length"] == 1
        assert seen[f"{prefix}time_to_first_token_seconds_count", ""] == 2
        assert seen[f"{prefix}inter_token_latency_seconds_count", ""] == 3 + 1
        assert seen[f"{prefix}e2e_request_latency_seconds_bucket", "+Inf"] == 2
    assert seen["artesian_admission_rejections_total", "server_overloaded"] == 1
    assert seen["artesian_http_responses_total", "503"] == 2
    computed = seen["artesian_prompt_tokens_by_source_total", "compute"]
    assert computed == seen["artesian_prompt_tokens_total", ""] - 4


@pytest.mark.parametrize(
    "accept", ["application/openmetrics-text; version=x", "a; version=1.é;q=nan", ";,;="]
)
async def test_metrics_are_given_whatever_is_accepted(accept: str) -> None:
    app, _ = scripted_app()
    async with client_of(app) as client:
        answer = await client.get("/metrics", headers={b"accept": accept.encode("latin-1")})
    assert answer.status_code == 200 and "artesian_num_requests_running" in answer.text


async def test_no_metric_label_comes_from_a_client() -> None:
    app, _ = scripted_app()
    async with client_of(app) as client:
        for i in range(20):
            await client.post(CHAT, json={"model": f"evil-{i}", "messages": HELLO})
            await client.get(f"/evil-{i}")
        text = (await client.get("/metrics")).text
    assert "evil" not in text


async def test_metrics_can_do_without_the_vllm_names() -> None:
    app, _ = scripted_app(vllm_metric_names=False)
    async with client_of(app) as client:
        assert "vllm:" not in (await client.get("/metrics")).text


async def test_the_event_loop_s_lag_is_sampled() -> None:
    app, _ = scripted_app()
    async with client_of(app) as client:
        await asyncio.sleep(0.6)
        seen = await scrape(client)
    assert seen["artesian_event_loop_lag_seconds_count", ""] >= 1
