"""What an answer says of the prompt cache: the reason, and the message and the token where prompts part."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pydantic
import pytest
from http_server import client_of, scripted_app
from openai.types.beta.beta_response import PromptCacheDiagnostics
from scripted_engine import Script, ScriptedEngine, toy_codec

from artesian.engine import CacheMiss, CacheReport, GenerationRequest, SamplingParams, Usage
from artesian.engine.codec import Conversation, Message, Tool
from artesian.server.api.cache_report import PromptDiagnosis
from artesian.server.api.chat_messages import ChatPrompt
from artesian.server.api.prompt_cache import PromptCacheFields

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SYSTEM = "You are a careful assistant who answers in plain words, and never in haste. Rule 7 is kept."
"""One token a byte: with its turn more than a block of 64."""
TURNS = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is gravity?"}]
BEGUN = len(f"im_system\n{SYSTEM}") - 1
"""Tokens of the prompt up to the system message's end; a mark is one token."""


class Cache:
    """An engine whose requests find what the test says."""

    def __init__(self) -> None:
        self.cached, self.report = 0, CacheReport(miss="never_seen")
        self.engine = ScriptedEngine(toy_codec(), self._script)

    def _script(self, _: GenerationRequest) -> Script:
        return Script(text="ok", cached_tokens=self.cached, cache=self.report)

    def finds(self, cached: int, miss: CacheMiss | None, **facts: Any) -> None:
        self.cached, self.report = cached, CacheReport(miss=miss, **facts)


async def chat(client: httpx.AsyncClient, messages: list[Any], **fields: Any) -> tuple[str, dict[str, Any]]:
    """The answer's id and its diagnostics."""
    answer = await client.post(CHAT, json={"messages": messages, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["id"], answer.json()["prompt_cache_diagnostics"]


def like(id: str) -> dict[str, Any]:
    return {"prompt_cache_options": {"comparison_response_id": id}}


async def test_a_conversation_that_goes_on_is_a_hit() -> None:
    cache = Cache()
    app, _ = scripted_app(cache.engine)
    async with client_of(app) as client:
        first, _ = await chat(client, TURNS)
        cache.finds(128, "never_seen", sources={"disk": 128}, created_at=10.0, expires_at=2e9, ttl_s=60.0)
        longer = [*TURNS, {"role": "assistant", "content": "A force."}, {"role": "user", "content": "Why?"}]
        for fields in ({}, like(first)):
            _, said = await chat(client, longer, **fields)
            assert said["type"] == "cache_hit" and "divergence" not in said
            assert said["sources"] == {"disk": 128} and said["age_s"] > 1e9
            assert (said["created_at"], said["expires_at"], said["ttl_s"]) == (10.0, 2e9, 60.0)


async def test_what_changed_is_found_by_message_and_token() -> None:
    cache = Cache()
    app, _ = scripted_app(cache.engine)
    async with client_of(app) as client:
        first, _ = await chat(client, TURNS)
        _, said = await chat(client, [{"role": "system", "content": "N" + SYSTEM}, TURNS[1]], **like(first))
        assert (said["type"], said["reason"]) == ("cache_miss", "input_changed")
        assert said["divergence"] == {
            "compared_with": first, "token_offset": 8, "message_index": 0, "role": "system", "what": "system",
        }  # fmt: skip
        assert said["comparison_reusable_tokens"] == 0
        assert said["cache_missed_tokens"] == len(cache.engine.requests[-1].prompt) - 8


async def test_of_a_partial_hit_is_told_where_it_ends() -> None:
    cache = Cache()
    app, _ = scripted_app(cache.engine)
    async with client_of(app) as client:
        first, _ = await chat(client, TURNS)
        cache.finds(64, "never_seen")
        _, said = await chat(client, [TURNS[0], {"role": "user", "content": "How tall is he?"}])
        where = said["divergence"]
        assert said["type"] == "cache_hit" and where["compared_with"] == first
        assert (where["message_index"], where["role"], where["what"]) == (1, "user", "messages")
        assert where["token_offset"] > BEGUN


async def test_long_conversations_are_searched_for_the_message() -> None:
    cache = Cache()
    app, _ = scripted_app(cache.engine)
    turns = [{"role": ("user", "assistant")[i % 2], "content": f"{i} " + "word " * 20} for i in range(21)]
    async with client_of(app) as client:
        for changed in (0, 7, 20):
            first, _ = await chat(client, turns)
            other = [*turns[:changed], {**turns[changed], "content": "else"}, *turns[changed + 1 :]]
            _, said = await chat(client, other, **like(first))
            assert said["divergence"]["message_index"] == changed


async def test_a_change_around_the_messages_is_the_templates() -> None:
    template = "{{ mood }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    app, _ = scripted_app(ScriptedEngine(toy_codec(chat_template=template)))
    async with client_of(app) as client:
        first, _ = await chat(client, TURNS, chat_template_kwargs={"mood": "x"})
        _, said = await chat(client, TURNS, chat_template_kwargs={"mood": "y"}, **like(first))
    assert (said["reason"], said["divergence"]["what"]) == ("input_changed", "template")


async def test_a_change_of_tools_is_told_as_such() -> None:
    template = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    app, engine = scripted_app(ScriptedEngine(toy_codec(chat_template=template)))
    said = []
    async with client_of(app):
        for name in ("f", "g"):
            conversation = Conversation((Message("user", SYSTEM),), (Tool(name),))
            prompt = ChatPrompt(engine.codec.encode_chat(conversation), conversation)
            request = GenerationRequest(id=name, prompt=prompt.tokens, params=SamplingParams())
            diagnosis = PromptDiagnosis(app.state.service, "m", PromptCacheFields(), [request], prompt)
            usage = Usage(prompt_tokens=len(prompt.tokens), completion_tokens=0)
            miss = CacheReport(miss="never_seen")
            said.append(await diagnosis.finish(msgspec.structs.replace(usage, cache=miss)))
    assert said[0].reason == "never_seen" and said[1].reason == "tools_changed"
    assert said[1].divergence.what == "tools" and said[1].divergence.compared_with == "f"  # type: ignore[union-attr]


async def test_other_weights_are_another_model() -> None:
    cache = Cache()
    app, _ = scripted_app(cache.engine)
    async with client_of(app) as client:
        first, _ = await chat(client, TURNS)
        traces = app.state.service.traces
        (trace, tokens), *_ = traces.recent("")
        other = msgspec.structs.replace(trace, weights="others")
        traces.add(cache.engine.prompt_cache, "", other, tokens, None)
        _, said = await chat(client, TURNS, **like(first))
    assert said["reason"] == "model_changed" and said["divergence"]["token_offset"] == 0


@pytest.mark.parametrize("miss", ["expired", "evicted", "deleted", "corrupt", "slow", "fault", "disabled"])
async def test_what_the_store_lost_is_its_own_reason(miss: CacheMiss) -> None:
    cache = Cache()
    app, _ = scripted_app(cache.engine)
    async with client_of(app) as client:
        first, _ = await chat(client, TURNS)
        cache.finds(0, miss)
        for fields in ({}, like(first)):
            _, said = await chat(client, TURNS, **fields)
            assert (said["type"], said["reason"]) == ("cache_miss", miss) and "divergence" not in said
            assert said["cache_missed_tokens"] == len(cache.engine.requests[-1].prompt)
            assert said["comparison_reusable_tokens"] == 128
        cache.finds(64, miss)  # a part was left, and this server remembers no prompt of this key
        _, said = await chat(client, [{"role": "user", "content": "0123456789" * 20}])
        assert said["reason"] == miss and said["cached_tokens"] == 64


async def test_what_is_not_alike_is_not_compared() -> None:
    cache = Cache()
    app, _ = scripted_app(cache.engine)
    async with client_of(app) as client:
        await chat(client, TURNS)
        _, said = await chat(client, [{"role": "user", "content": "0123456789" * 20}])
        assert said["reason"] == "never_seen" and said["comparison_reusable_tokens"] is None
        _, nonce = await chat(client, [{"role": "system", "content": "N" + SYSTEM}, TURNS[1]])
        assert nonce["reason"] == "input_changed" and nonce["divergence"]["what"] == "system"


async def test_the_same_key_is_compared_first() -> None:
    cache = Cache()
    app, _ = scripted_app(cache.engine)
    async with client_of(app) as client:
        ours, _ = await chat(client, [{"role": "user", "content": "0123456789" * 20}], prompt_cache_key="job")
        await chat(client, TURNS)
        _, said = await chat(client, TURNS, prompt_cache_key="job")
    assert said["divergence"]["compared_with"] == ours


async def test_a_prompt_that_asked_not_to_be_kept_promises_nothing() -> None:
    cache = Cache()
    app, _ = scripted_app(cache.engine)
    marked = {"type": "text", "text": SYSTEM[:40], "prompt_cache_breakpoint": {"mode": "explicit"}}
    turns = [{"role": "system", "content": [marked, {"type": "text", "text": SYSTEM[40:]}]}, TURNS[1]]
    async with client_of(app) as client:
        first, _ = await chat(client, turns, prompt_cache_options={"mode": "explicit"})
        assert cache.engine.requests[-1].cache.write_tokens == len("iSystem\n") + 40
        _, said = await chat(client, turns, **like(first))
    assert said["reason"] == "never_seen" and said["comparison_reusable_tokens"] == 0


async def test_breakpoints_end_with_their_message() -> None:
    app, engine = scripted_app()
    marked = {"type": "text", "text": SYSTEM, "prompt_cache_breakpoint": {"mode": "explicit"}}
    turns = [{"role": "system", "content": [marked]}, *TURNS[1:]]
    async with client_of(app) as client:
        await chat(client, turns, prompt_cache_options={"mode": "explicit", "ttl": 90})
    policy, prompt = engine.requests[-1].cache, engine.requests[-1].prompt
    assert policy.write_tokens is not None and policy.read and policy.ttl_s == 90
    kept = engine.codec.detokenize(prompt[: policy.write_tokens])
    assert SYSTEM in kept and "gravity" not in kept


@pytest.mark.parametrize(
    ("fields", "durable", "ttl_s"),
    [
        ({}, True, None),
        ({"prompt_cache_retention": "in_memory"}, False, None),
        ({"prompt_cache_retention": "24h"}, True, 86400.0),
        ({"prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "7d"}}, True, 7 * 86400.0),
        ({"prompt_cache_options": {"ttl": 90.5}}, True, 90.5),
    ],
)
async def test_retention_and_ttl_reach_the_engine(
    fields: dict[str, Any], durable: bool, ttl_s: float | None
) -> None:
    app, engine = scripted_app()
    async with client_of(app) as client:
        for path, body in ((CHAT, {"messages": TURNS}), (COMPLETIONS, {"prompt": "x"})):
            assert (await client.post(path, json={**body, **fields})).status_code == 200
            policy = engine.requests[-1].cache
            assert (policy.durable, policy.ttl_s, policy.write) == (durable, ttl_s, True)


async def test_of_several_prompts_there_is_no_one_reason_but_all_are_remembered() -> None:
    app, _ = scripted_app()
    async with client_of(app) as client:
        answer = await client.post(
            COMPLETIONS, json={"prompt": ["a" * 70, "b" * 70], "prompt_cache_key": "k"}
        )
        assert answer.json()["prompt_cache_diagnostics"] == {"type": "unavailable", "cached_tokens": 6}
        gone = (await client.delete("/v1/caches", params={"prompt_cache_key": "k"})).json()
    assert gone["deleted_prompts"] == 2


async def test_a_stream_without_usage_says_nothing_and_is_remembered() -> None:
    app, _ = scripted_app()
    async with client_of(app) as client:
        for path, body in ((CHAT, {"messages": TURNS}), (COMPLETIONS, {"prompt": "x"})):
            said = (await client.post(path, json={**body, "stream": True})).text
            assert "prompt_cache_diagnostics" not in said and "[DONE]" in said
        assert len((await client.get("/v1/caches")).json()["prompts"]) == 2


async def test_prewarmed_chats_generate_nothing() -> None:
    app, engine = scripted_app()
    options = {"prewarm": True}
    async with client_of(app) as client:
        answer = await client.post(
            CHAT, json={"messages": TURNS, "max_tokens": 9, "prompt_cache_options": options}
        )
    assert answer.json()["choices"][0]["message"]["content"] == ""
    assert answer.json()["usage"]["prompt_tokens"] == len(engine.requests[-1].prompt)
    assert engine.requests[-1].params.max_tokens == 0


@pytest.mark.parametrize(
    ("server", "request_says", "is_done"),
    [(False, None, False), (False, True, True), (True, None, True), (True, False, False)],
)
async def test_server_or_request_have_the_prompt_normalised(
    server: bool, request_says: bool | None, is_done: bool
) -> None:
    app, engine = scripted_app(normalise_prompts=server)
    turns = [{"role": "system", "content": "Run 123e4567-e89b-12d3-a456-426614174000."}, TURNS[1]]
    async with client_of(app) as client:
        _, said = await chat(client, turns, prompt_cache_options={"normalise": request_says})
    changes = [{"message_index": 0, "kind": "uuid", "count": 1}]
    assert said.get("normalised", []) == (changes if is_done else [])
    assert ("123e4567" in engine.codec.detokenize(engine.requests[-1].prompt)) is not is_done


async def test_openais_types_read_what_is_said() -> None:
    cache = Cache()
    app, _ = scripted_app(cache.engine)
    read = pydantic.TypeAdapter(PromptCacheDiagnostics).validate_json
    async with client_of(app) as client:
        first, _ = await chat(client, TURNS)
        _, changed = await chat(client, [{"role": "user", "content": "x" * 80}], **like(first))
        _, unknown = await chat(client, TURNS, **like("nobody"))
        cache.finds(64, None)
        _, hit = await chat(client, TURNS)
    types = [read(json.dumps(said)).type for said in (changed, unknown, hit)]
    assert types == ["cache_miss", "comparison_response_not_found", "cache_hit"]


async def test_another_tenants_response_is_not_there_to_compare_with() -> None:
    app, _ = scripted_app(api_keys=("one", "two"))
    async with client_of(app) as client:
        client.headers["authorization"] = "Bearer one"
        first, _ = await chat(client, TURNS)
        _, salted = await chat(client, TURNS, cache_salt="s", **like(first))
        client.headers["authorization"] = "Bearer two"
        _, theirs = await chat(client, TURNS, **like(first))
    assert [salted["type"], theirs["type"]] == ["comparison_response_not_found"] * 2
