"""What answers say: whole and streamed, text and logprobs, stops, usage, errors after the first byte."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from http_server import client_of, scripted_app
from scripted_engine import IM_END, Script, ScriptedEngine, toy_codec

from artesian.engine import Delta, DeltaIterator, GenerationRequest

HELLO = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "hi", "max_tokens": 1000}
    return {**prompt, **fields}


def events_of(text: str) -> list[dict[str, Any]]:
    """The JSON of each event, after checks that hold for every stream."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: "), parse_constant=pytest.fail) for block in blocks]


def piece(choice: dict[str, Any]) -> str:
    text: str = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return text


class Said:
    """One choice as it arrived."""

    def __init__(self, text: str, finish_reason: str | None, stop_reason: Any, logprobs: Any) -> None:
        self.text, self.finish_reason, self.stop_reason = text, finish_reason, stop_reason
        self.logprobs = logprobs


async def ask(script: Script, path: str, *, stream: bool, **fields: Any) -> list[Said]:
    """The choices of one request, collected from a stream or a body."""
    app, _ = scripted_app(ScriptedEngine(toy_codec(), script))
    async with client_of(app) as client:
        answer = await client.post(path, json=body_of(path, stream=stream, **fields))
    assert answer.status_code == 200, answer.text
    if not stream:
        return [
            Said(
                c["message"]["content"] if "message" in c else c["text"],
                c["finish_reason"], c["stop_reason"], c["logprobs"],
            )
            for c in json.loads(answer.content, parse_constant=pytest.fail)["choices"]
        ]  # fmt: skip
    said = [Said("", None, None, None) for _ in range(fields.get("n", 1))]
    for event in events_of(answer.text):
        for choice in event["choices"]:
            one = said[choice["index"]]
            assert one.finish_reason is None, "nothing comes after a choice's end"
            one.text += piece(choice)
            one.finish_reason, one.stop_reason = choice["finish_reason"], choice.get("stop_reason")
            if choice["logprobs"]:
                one.logprobs = merged(one.logprobs, choice["logprobs"])
    return said


def merged(into: Any, more: Any) -> Any:
    return more if into is None else {k: (into[k] + v if v is not None else None) for k, v in more.items()}


HARD_TEXT = "👩‍👩‍👧‍👦 家族 ₹ é\n\n  two  spaces"


@BOTH
@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("stream", [True, False])
async def test_text_arrives_whole_whatever_the_steps(path: str, tokens_per_step: int, stream: bool) -> None:
    script = Script(text=HARD_TEXT, tokens_per_step=tokens_per_step)
    (said,) = await ask(script, path, stream=stream)
    assert said.text == HARD_TEXT
    assert said.finish_reason == "stop"


@BOTH
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens_per_step", [1, 5])
@pytest.mark.parametrize(
    ("text", "stop", "kept", "finish", "reason"),
    [
        ("ABCDEFGHIJKL", ["DEFGHIJ"], "ABC", "stop", "DEFGHIJ"),
        ("ABCDEFGHIJKL", ["DEFX"], "ABCDEFGHIJKL", "stop", None),
        ("alpha beta gamma delta", ["beta gamma"], "alpha ", "stop", "beta gamma"),
        ("alpha beta gamma delta", ["amm"], "alpha beta g", "stop", "amm"),
        ("alpha beta", "ta", "alpha be", "stop", "ta"),
        ("naïve 😊!", ["😊"], "naïve ", "stop", "😊"),
    ],
)
async def test_stop_strings_cut_where_they_begin(
    path: str, stream: bool, tokens_per_step: int, text: str, stop: Any, kept: str, finish: str, reason: Any
) -> None:
    script = Script(text=text, tokens_per_step=tokens_per_step)
    (said,) = await ask(script, path, stream=stream, stop=stop)
    assert (said.text, said.finish_reason, said.stop_reason) == (kept, finish, reason)
    (said,) = await ask(script, path, stream=stream, stop=stop, include_stop_str_in_output=True)
    assert said.text == (kept + reason if reason else kept)


@BOTH
async def test_no_delta_holds_a_part_of_a_stop_string(path: str) -> None:
    app, _ = scripted_app(ScriptedEngine(toy_codec(), Script(text="ABCDEFGHIJKL")))
    async with client_of(app) as client:
        answer = await client.post(path, json=body_of(path, stream=True, stop=["DEFGHIJ"]))
    assert "D" not in "".join(piece(c) for event in events_of(answer.text) for c in event["choices"])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_split_emoji_has_exact_bytes_in_logprobs(stream: bool) -> None:
    (said,) = await ask(Script(text="😊"), CHAT, stream=stream, logprobs=True, top_logprobs=2)
    content = said.logprobs["content"]
    assert bytes(byte for token in content[:4] for byte in token["bytes"]).decode() == "😊"
    assert all(len(token["top_logprobs"]) == 2 for token in content)
    assert [token["token"] for token in content[:4]] == [r"\xf0", r"\x9f", r"\x98", r"\x8a"]


@pytest.mark.parametrize("stream", [True, False])
async def test_impossible_tokens_are_minus_9999_in_strict_json(stream: bool) -> None:
    script = Script(text="ab", rare_logprob=-math.inf, top_logprob=math.nan)
    (said,) = await ask(script, CHAT, stream=stream, logprobs=True, top_logprobs=20)
    values = [top["logprob"] for token in said.logprobs["content"] for top in token["top_logprobs"]]
    assert set(values) == {-9999.0}
    (said,) = await ask(script, COMPLETIONS, stream=stream, logprobs=5, echo=True)
    assert min(said.logprobs["token_logprobs"][1:]) == -9999.0


@pytest.mark.parametrize("stream", [True, False])
async def test_special_tokens_have_a_name_and_bytes_in_logprobs(stream: bool) -> None:
    (said,) = await ask(Script(text=""), CHAT, stream=stream, logprobs=True, top_logprobs=5)
    (end,) = said.logprobs["content"]
    assert (end["token"], bytes(end["bytes"])) == ("<|im_end|>", b"<|im_end|>")
    assert said.text == ""


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echo_gives_the_prompt_with_its_logprobs(stream: bool, max_tokens: int) -> None:
    prompt = "Your answer: Yés"
    (said,) = await ask(
        Script(text="!?"), COMPLETIONS,
        stream=stream, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens,
    )  # fmt: skip
    logprobs, count = said.logprobs, len(prompt.encode()) + max_tokens
    assert said.text == prompt + "!" * max_tokens
    assert {len(logprobs[name]) for name in logprobs} == {count}
    assert logprobs["token_logprobs"][0] is None and None not in logprobs["token_logprobs"][1:]
    offsets = logprobs["text_offset"]
    assert [said.text[at] for at, token in zip(offsets, logprobs["tokens"], strict=True) if token == "Y"] == [
        "Y", "Y",
    ]  # fmt: skip
    assert offsets[-1] == len(prompt) - (0 if max_tokens else 1)
    assert said.finish_reason == "length"


async def test_echo_of_a_prompt_with_bos_keeps_offsets_in_the_text() -> None:
    app, _ = scripted_app(ScriptedEngine(toy_codec(add_bos=True)))
    body = {"prompt": "Ab", "echo": True, "logprobs": 0, "max_tokens": 0}
    async with client_of(app) as client:
        (choice,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("Ab", ["<s>", "A", "b"])
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]


async def test_echo_of_token_prompts_shows_their_text_for_each_choice() -> None:
    app, _ = scripted_app()
    body = {"prompt": [[72, 105], [89, 111]], "n": 2, "echo": True, "max_tokens": 1}
    async with client_of(app) as client:
        choices = (await client.post(COMPLETIONS, json=body)).json()["choices"]
        stream = await client.post(COMPLETIONS, json={**body, "stream": True})
    assert [(c["index"], c["text"]) for c in choices] == [(0, "HiH"), (1, "HiH"), (2, "YoH"), (3, "YoH")]
    texts = ["", "", "", ""]
    for event in events_of(stream.text):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [c["text"] for c in choices]


async def test_prompt_logprobs_and_token_ids_come_when_asked() -> None:
    app, _ = scripted_app(ScriptedEngine(toy_codec(), Script(text="xy")))
    asked = {"prompt_logprobs": 1, "return_token_ids": True}
    async with client_of(app) as client:
        chat = (await client.post(CHAT, json=body_of(CHAT, **asked))).json()
        (choice,) = (await client.post(COMPLETIONS, json=body_of(COMPLETIONS, **asked))).json()["choices"]
        stream = await client.post(CHAT, json=body_of(CHAT, stream=True, return_token_ids=True))
    assert chat["prompt_logprobs"][0] is None
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"])
    assert chat["choices"][0]["token_ids"] == [120, 121, IM_END]
    assert choice["prompt_token_ids"] == [104, 105]
    assert choice["prompt_logprobs"] == [None, {"105": {"logprob": -0.25, "rank": 1, "decoded_token": "i"}}]
    events = events_of(stream.text)
    assert events[0]["prompt_token_ids"] == chat["prompt_token_ids"]
    assert [i for e in events for c in e["choices"] for i in c.get("token_ids", [])] == [120, 121, IM_END]


@BOTH
@pytest.mark.parametrize("stream", [True, False])
async def test_choices_of_n_are_complete_and_apart(path: str, stream: bool) -> None:
    said = await ask(Script(text=("one", "zwei", "")), path, stream=stream, n=3)
    assert [(one.text, one.finish_reason) for one in said] == [
        ("one", "stop"),
        ("zwei", "stop"),
        ("", "stop"),
    ]


async def test_a_chat_stream_begins_with_the_role_of_every_choice() -> None:
    app, _ = scripted_app()
    async with client_of(app) as client:
        answer = await client.post(CHAT, json=body_of(CHAT, stream=True, n=2))
    events = events_of(answer.text)
    for index in range(2):
        first, *others = (e["choices"][0]["delta"] for e in events if e["choices"][0]["index"] == index)
        assert first == {"role": "assistant", "content": ""}
        assert others and all("role" not in delta for delta in others)
    assert all("finish_reason" in c for e in events for c in e["choices"])
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    assert events[0]["id"].startswith("chatcmpl-") and events[0]["object"] == "chat.completion.chunk"


@BOTH
@pytest.mark.parametrize("asked", [None, False, True])
async def test_usage_comes_once_last_and_only_when_asked(path: str, asked: bool | None) -> None:
    app, _ = scripted_app(ScriptedEngine(toy_codec(), Script(text="abc")))
    options = {} if asked is None else {"stream_options": {"include_usage": asked}}
    async with client_of(app) as client:
        *events, last = events_of((await client.post(path, json=body_of(path, stream=True, **options))).text)
    if not asked:
        assert all("usage" not in event for event in (*events, last))
        return
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["completion_tokens"] == 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4
    assert usage["prompt_tokens_details"]["cached_tokens"] == min(3, usage["prompt_tokens"] - 1)


async def test_continuous_usage_counts_up() -> None:
    app, _ = scripted_app(ScriptedEngine(toy_codec(), Script(text="abc")))
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with client_of(app) as client:
        answer = await client.post(CHAT, json=body_of(CHAT, stream=True, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in events_of(answer.text)]
    assert counts == [1, 1, 2, 3, 4, 4]


@BOTH
async def test_usage_is_the_same_streamed_and_whole(path: str) -> None:
    app, _ = scripted_app()
    async with client_of(app) as client:
        whole = (await client.post(path, json=body_of(path, n=2))).json()["usage"]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await client.post(path, json=body_of(path, n=2, **options))
    assert events_of(stream.text)[-1]["usage"] == whole


@BOTH
async def test_a_fault_after_the_first_byte_is_an_error_event_and_done(path: str) -> None:
    app, engine = scripted_app(ScriptedEngine(toy_codec(), Script(text="abcdef", fail_after=3)))
    async with client_of(app) as client:
        answer = await client.post(path, json=body_of(path, stream=True))
        whole = await client.post(path, json=body_of(path))
    assert answer.status_code == 200
    error = events_of(answer.text)[-1]["error"]
    assert (error["message"], error["code"]) == ("the device is on fire", "request_failed")
    assert (whole.status_code, whole.json()["error"]) == (500, error)
    assert engine.status().running == engine.status().waiting == 0


async def test_text_that_came_in_the_same_step_as_a_failure_is_not_lost() -> None:
    class Merging(ScriptedEngine):
        def submit(self, request: GenerationRequest) -> DeltaIterator:
            async def one_step() -> AsyncGenerator[tuple[Delta, ...], None]:
                yield Delta(text="so far"), Delta(finish_reason="error", error="then it broke")

            return one_step()

    app, _ = scripted_app(Merging(toy_codec()))
    async with client_of(app) as client:
        events = events_of((await client.post(CHAT, json=body_of(CHAT, stream=True))).text)
    assert piece(events[1]["choices"][0]) == "so far"
    assert events[2]["error"]["message"] == "then it broke"


@BOTH
@pytest.mark.parametrize("stream", [True, False])
async def test_a_bug_before_the_first_byte_is_a_500_without_internals(path: str, stream: bool) -> None:
    app, _ = scripted_app(ScriptedEngine(toy_codec(), Script(crash=RuntimeError("secret path /root"))))
    async with client_of(app) as client:
        answer = await client.post(path, json=body_of(path, stream=stream))
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"]


async def test_a_full_queue_is_503_with_the_time_to_try_again() -> None:
    app, _ = scripted_app(ScriptedEngine(toy_codec(), slots=1, queue_limit=0))
    async with client_of(app) as client:
        answer = await client.post(CHAT, json=body_of(CHAT))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_overloaded")
    wanted = ("retry-after", "retry-after-ms", "x-should-retry")
    assert [answer.headers[name] for name in wanted] == ["1", "200", "true"]


async def test_when_one_of_many_prompts_is_refused_none_is_left_running() -> None:
    app, engine = scripted_app(ScriptedEngine(toy_codec(), queue_limit=2))
    async with client_of(app) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": ["a", "b", "c"]})
    assert answer.status_code == 503
    assert len(engine.aborted) == 2
    assert engine.status().waiting == 0


@BOTH
async def test_an_abort_while_queued_ends_a_logprobs_stream_cleanly(path: str) -> None:
    app, engine = scripted_app(ScriptedEngine(toy_codec(), slots=0))
    logprobs: dict[str, Any] = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    async with client_of(app) as client:
        asking = asyncio.create_task(client.post(path, json=body_of(path, stream=True, **logprobs)))
        await asyncio.sleep(0.05)
        engine.abort(engine.requests[0].id)
        events = events_of((await asking).text)
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "abort"


async def test_the_model_name_asked_for_is_echoed() -> None:
    app, _ = scripted_app(served_model_names=("main", "alias/x"))
    async with client_of(app) as client:
        names = [
            (await client.post(CHAT, json={"messages": HELLO, **model})).json()["model"]
            for model in ({}, {"model": "main"}, {"model": "alias/x"})
        ]
    assert names == ["main", "main", "alias/x"]


async def test_stream_headers_keep_proxies_from_buffering() -> None:
    app, _ = scripted_app()
    async with client_of(app) as client:
        headers = (await client.post(CHAT, json=body_of(CHAT, stream=True))).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache, no-transform"
    assert headers["x-accel-buffering"] == "no"
