"""What requests are taken, and how the others are refused: always 400-something that says what and where."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
from http_server import client_of, scripted_app
from scripted_engine import VOCAB_SIZE, ScriptedEngine, toy_codec

HELLO = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def post(path: str, body: dict[str, Any], **settings: Any) -> tuple[int, dict[str, Any]]:
    app, _ = scripted_app(**settings)
    async with client_of(app) as client:
        answer = await client.post(path, json=body)
        return answer.status_code, answer.json()


async def post_raw(data: bytes, path: str = CHAT, **headers: str) -> tuple[int, dict[str, Any]]:
    app, _ = scripted_app()
    async with client_of(app) as client:
        sent = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        answer = await client.post(path, content=data, headers=sent)
        return answer.status_code, answer.json()


# By field: the values that are served, and those that are refused by name.
GRID: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 1e-9, 0.7, 2, None], [-1, 2.1, "NaN", "0.7", True, []]),
    "top_p": ([0, 0.5, 1, None], [1.1, -0.1, "1"]),
    "top_k": ([-1, 0, 1, 10**9, None], [-2, 1.5, True]),
    "min_p": ([0, 1], [2, -0.1]),
    "presence_penalty": ([-2, 2], [-3, 3]),
    "frequency_penalty": ([-2, 2], [-3, 3]),
    "repetition_penalty": ([0.5, 1, 2], [0, -1, 11]),
    "n": ([1, 2, None], [0, -1, 33, 1.0, "2"]),
    "seed": ([0, -1, 2**63 - 1], [2**63, 1.5, "7"]),
    "max_tokens": ([1, None], [-1, 1.5, "4", True]),
    "logit_bias": (
        [{}, {"65": -100}, {"65": 100, "66": 0.5}, None],
        [{"1000000000": 1}, {"-1": 1}, {"AI": 1}, {"65": 1000}, {"65": "x"}, {"٣": 1}, [65]],
    ),
    "stop_token_ids": ([[], [1], None], [[10**9], [-1], ["a"], [VOCAB_SIZE]]),
    "allowed_token_ids": ([[65], None], [[], [VOCAB_SIZE], [-1]]),
    "stop": (
        ["x", ["x"] * 64, [], None, "\u0000"],
        ["", ["a", ""], ["x"] * 65, ["x"] * 10_000, "x" * 1_000_000, 3, [1]],
    ),
    "min_tokens": ([0, 2], [-1, "2"]),
    "priority": ([5, None], [10**6, "high"]),
    "cache_salt": (["tenant", None], ["", 7, "x" * 300]),
    "stream": ([False, None], [1, "true"]),
    "stream_options": ([None], [{"include_usage": True}, {"include_usage": 1}, 7]),
    "prompt_logprobs": ([0, 1], [-1, 21, True]),
    "response_format": (
        [
            None,
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
            {"type": "json_schema", "json_schema": {"name": "B-9_", "schema": {}, "strict": True}},
            {"type": "regex", "pattern": "a+"},
        ],
        [
            {"type": "json_schema"},
            {"type": "structural_tag"},
            {},
            {"type": "json_schema", "json_schema": {"name": "no schema"}},
            {"type": "json_schema", "json_schema": {"name": "ä", "schema": {}}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": '{"type": "null"}'}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": []}}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strin"}}},
            {"type": "regex", "pattern": "["},
            1,
        ],
    ),
    "structured_outputs": (
        [{"json": {}}, {"json": "true"}, {"regex": "a"}, {"choice": ["a"]}, {"grammar": 'root ::= "a"'}],
        [{}, {"a": 1}, {"regex": "["}, {"choice": []}, {"json": "{"}, {"regex": "a", "choice": ["a"]}, "a"],
    ),
    "guided_json": ([None, {"type": "null"}, '{"type": "null"}'], ["a", {"not": {}}, 1, []]),
    "guided_regex": ([None, "a"], ["(?<=x)*", 1]),
    "guided_choice": ([None, ["a", "b"]], [[], [1], "a"]),
    "guided_grammar": ([None, 'start: "a"'], ["start: (", "", 1]),
    "guided_json_object": ([None, False, True], ["a"]),
    "json_schema": ([None, {"type": "null"}], [{"$ref": "http://localhost:1/a"}, "a"]),
    "regex": ([None, "a"], [")", 1]),
    "choice": ([None, ["a"]], [[""], "a"]),
    "ebnf": ([None, 'root ::= "a"'], ["root ::= b", 1]),
    "grammar": ([None, 'start: "a"'], ["start: b", 1]),
    "tools": ([None, []], [{}, "f"]),
    "tool_choice": ([None, "none", "auto"], ["required"]),
    "functions": ([[]], [[{"name": "f"}]]),
    "modalities": ([["text"]], [["audio"]]),
    "suffix": ([None, ""], ["end"]),
    "use_beam_search": ([False], [True]),
    "bad_words": ([[]], [["x"]]),
    "user": (["u"], []),
    "metadata": ([{"a": "b"}], []),
    "store": ([False], []),
    "service_tier": (["auto"], []),
    "prompt_cache_key": (["k"], []),
    "safety_identifier": (["s"], []),
    "parallel_tool_calls": ([True], []),
    **{
        name: ([None], [{"a": 1}, "a"])
        for name in (
            "structural_tag", "guided_whitespace_pattern", "audio",
            "web_search_options", "chat_template",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_each_value_of_the_grid_is_served_or_refused_by_name(path: str) -> None:
    app, _ = scripted_app()
    base: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "hi"}
    wrong: list[object] = []
    async with client_of(app) as client:
        for name, (served, refused) in GRID.items():
            for value in served:
                answer = await client.post(path, json={"max_tokens": 4, **base, name: value})
                if answer.status_code != 200:
                    wrong.append((name, value, answer.text))
            for value in refused:
                answer = await client.post(path, json={"max_tokens": 4, **base, name: value})
                error = answer.json().get("error") or {"param": "", "message": "served"}
                is_named = error["param"].startswith(name) and name in error["message"]
                if answer.status_code != 400 or not is_named:
                    wrong.append((name, value, answer.text))
    assert not wrong


@pytest.mark.parametrize("text", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
async def test_numbers_that_json_does_not_have_are_refused(text: bytes) -> None:
    status, answer = await post_raw(b'{"messages":[{"role":"user","content":"x"}],"temperature":%b}' % text)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


BODY = b'{"messages":[{"role":"user","content":"%b"}]}'


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (BODY % rb"\ud83d", "lone surrogate"),
        (BODY % rb"\ude00", "lone surrogate"),
        (b'{"model":"\\ud83d","messages":[]}', "lone surrogate"),
        (b'{"user":"\\ud83d","messages":[]}', "lone surrogate"),
        (BODY % b"\xff", "UTF-8 at byte 39"),
        (BODY % b"\xed\xa0\xbd", "UTF-8"),
        (BODY % b"x" + b" trailing", "trailing"),
        (b"", "empty"),
        (b"  ", "empty"),
        (b"[]", "object"),
        (b"null", "object"),
        (b"{", "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"a":' * 100_000, "nested"),
        (b'{"messages":' + b"[" * 5_000 + b"]" * 5_000 + b"}", "nested"),
        (b'\xff\xfe{\x00"\x00', "UTF-8"),
    ],
)
async def test_a_body_that_is_not_json_is_refused_with_the_reason(data: bytes, said: str) -> None:
    status, answer = await post_raw(data)
    assert status == 400
    assert said in answer["error"]["message"]


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + BODY % b"x",
        BODY % b"a\\u0000b",
        BODY % "\u2028\u2029".encode(),
        BODY % rb"\ud83d\ude00",
        b'{"messages":[],"messages":[{"role":"user","content":"the last counts"}]}',
    ],
)
async def test_odd_but_valid_json_is_served(data: bytes) -> None:
    status, _ = await post_raw(data)
    assert status == 200


async def test_a_4_mb_line_is_read() -> None:
    status, _ = await post_raw(
        b'{"user":"' + b"x" * 4_000_000 + b'","messages":[{"role":"user","content":"x"}]}'
    )
    assert status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content_type": "text/plain"}, 415),
        ({"content_type": "application/x-www-form-urlencoded"}, 415),
        ({"content_type": "application/json; charset=utf-8"}, 200),
        ({"content_type": "application/vnd.api+json"}, 200),
        ({"content_encoding": "gzip"}, 415),
        ({"content_encoding": "identity"}, 200),
    ],
)
async def test_only_plain_json_bodies_are_taken(headers: dict[str, str], status: int) -> None:
    assert (await post_raw(BODY % b"x", **headers))[0] == status


async def test_a_body_over_the_limit_is_refused() -> None:
    status, answer = await post(CHAT, {"messages": HELLO, "user": "x" * 2000}, max_body_bytes=1000)
    assert (status, answer["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "foo", "content": "x"}], "messages[0].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": [{"type": "hologram"}]}], "messages[0].content[0].type"),
        ([*HELLO, {"role": "tool", "content": "x", "tool_call_id": "nope"}], "messages[1].tool_call_id"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], "messages[0].tool_calls[0].function"),
    ],
)
async def test_messages_that_cannot_be_understood_are_refused_by_place(messages: Any, param: str) -> None:
    status, answer = await post(CHAT, {"messages": messages})
    assert (status, answer["error"]["param"]) == (400, param)


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


WITHOUT_TEXT: list[dict[str, Any]] = [{"content": None}, {"content": ""}, {}, {"content": []}]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": []}],
        [{"role": "system", "content": "s"}, *HELLO],
        [*HELLO, {"role": "system", "content": "s"}],
        [{"role": "developer", "content": "s"}, *HELLO],
        [*HELLO, *HELLO],
        [{"role": "assistant", "content": "x"}],
        [*HELLO, {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None}],
        *[
            [*HELLO, {"role": "assistant", **content, "tool_calls": [CALL]}, {"role": "tool", **result}]
            for content in WITHOUT_TEXT
            for result in (
                {"tool_call_id": "call_1", "content": "42"},
                {"tool_call_id": "call_1", "content": [{"type": "text", "text": "42"}]},
            )
        ],
    ],
)
async def test_messages_in_any_common_form_are_served(messages: Any) -> None:
    status, answer = await post(CHAT, {"messages": messages})
    assert status == 200, answer
    assert "warnings" not in answer


async def test_text_parts_are_joined_with_nothing_between() -> None:
    app, engine = scripted_app()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    async with client_of(app) as client:
        await client.post(CHAT, json={"messages": [{"role": "user", "content": parts}]})
    assert b"onetwo" in bytes(token for token in engine.requests[0].prompt if token < 256)


async def test_unknown_fields_are_named_back() -> None:
    app, _ = scripted_app()
    message = {"role": "user", "content": "hi", "mood": "good", "audio": None}
    body = {"messages": [message], "respose_format": {"type": "json_object"}, "verbosity": "low", "a\r\nb": 1}
    async with client_of(app) as client:
        answer = await client.post(CHAT, json=body)
        stream = await client.post(CHAT, json={**body, "stream": True})
    assert answer.headers["x-ignored-fields"] == "messages[].mood, respose_format, verbosity, a??b"
    assert [line.split("`")[1] for line in answer.json()["warnings"]] == [
        "messages[].mood", "respose_format", "verbosity", "a\r\nb",
    ]  # fmt: skip
    first = json.loads(stream.text.partition("\n")[0].removeprefix("data: "))
    assert first["warnings"] == answer.json()["warnings"]


async def test_no_more_unknown_fields_are_named_back_than_someone_can_have_meant() -> None:
    _, answer = await post(CHAT, {"messages": HELLO, **{f"{i}{'x' * 1000}": 1 for i in range(1000)}})
    assert len(answer["warnings"]) == 32
    assert max(map(len, answer["warnings"])) < 100


async def test_strict_fields_refuses_unknown_ones_by_name() -> None:
    status, answer = await post(CHAT, {"messages": HELLO, "temprature": 0}, strict_fields=True)
    assert (status, answer["error"]["param"]) == (400, "temprature")
    status, _ = await post(CHAT, {"messages": HELLO, "user": "u", "verbosity": "low"}, strict_fields=True)
    assert status == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        ({"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": HELLO, "logprobs": 1}, "logprobs"),
        ({"messages": HELLO, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": HELLO, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"messages": HELLO, "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        (
            {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
async def test_chat_fields_out_of_their_bounds_are_refused(body: dict[str, Any], param: str) -> None:
    status, answer = await post(CHAT, body)
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [[1], [-1]]}, "prompt[1]"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
    ],
)
async def test_completion_fields_out_of_their_bounds_are_refused(body: dict[str, Any], param: str) -> None:
    status, answer = await post(COMPLETIONS, body)
    assert status == 400
    assert (answer["error"]["param"] or "").startswith(param)


async def test_the_last_given_maximum_of_tokens_counts() -> None:
    app, engine = scripted_app()
    async with client_of(app) as client:
        await client.post(CHAT, json={"messages": HELLO, "max_tokens": 9, "max_completion_tokens": 3})
        await client.post(CHAT, json={"messages": HELLO, "max_tokens": None})
    assert [request.params.max_tokens for request in engine.requests] == [3, None]


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1e-9}, {"top_p": 0}])
async def test_zero_temperature_and_zero_top_p_are_greedy(fields: dict[str, Any]) -> None:
    app, engine = scripted_app()
    async with client_of(app) as client:
        await client.post(CHAT, json={"messages": HELLO, **fields})
    assert (engine.requests[0].params.temperature, engine.requests[0].params.top_p) == (0.0, 1.0)


async def test_every_sampling_field_reaches_the_engine() -> None:
    app, engine = scripted_app()
    body = {
        "prompt": "hi", "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7,
        "min_p": 0.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "repetition_penalty": 1.1,
        "seed": 11, "n": 2, "logit_bias": {"65": 2}, "allowed_token_ids": [65, 66], "stop": "x",
        "stop_token_ids": [9], "ignore_eos": True, "include_stop_str_in_output": True,
        "logprobs": 2, "prompt_logprobs": 1,
        "skip_special_tokens": False, "priority": 3, "cache_salt": "s",
    }  # fmt: skip
    async with client_of(app) as client:
        answer = await client.post(COMPLETIONS, json=body)
    assert answer.status_code == 200
    request = engine.requests[0]
    params = {name: getattr(request.params, name) for name in request.params.__struct_fields__}
    assert params == {
        "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "repetition_penalty": 1.1, "seed": 11, "n": 2,
        "logit_bias": {65: 2.0}, "allowed_token_ids": (65, 66), "stop": ("x",), "stop_token_ids": (9,),
        "ignore_eos": True, "include_stop": True, "logprobs": 2, "prompt_logprobs": 1,
        "skip_special_tokens": False,
    }  # fmt: skip
    assert (request.priority, request.salt) == (3, ":s")


@pytest.mark.parametrize(("path", "param"), [(CHAT, "messages"), (COMPLETIONS, "prompt")])
async def test_a_prompt_over_the_context_is_refused_with_the_true_numbers(path: str, param: str) -> None:
    app, _ = scripted_app(ScriptedEngine(toy_codec(), max_model_len=100))
    text = "x" * 100
    body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    async with client_of(app) as client:
        error = (await client.post(path, json={**body, "max_tokens": 1})).json()["error"]
        shorter = await client.post(COMPLETIONS, json={"prompt": "x" * 99, "max_tokens": 1})
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "100" in error["message"]
    assert shorter.json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 10**6}]}, "messages"),
        (CHAT, {"messages": HELLO * 101}, "messages"),
        (COMPLETIONS, {"prompt": "x" * 10**6}, "prompt"),
        (COMPLETIONS, {"prompt": ["x" * 10**5] * 20}, "prompt"),
    ],
)
async def test_a_prompt_far_over_the_context_is_refused_without_reading_it_all(
    path: str, body: dict[str, Any], param: str
) -> None:
    app, _ = scripted_app(ScriptedEngine(toy_codec(), max_model_len=100))
    async with client_of(app) as client:
        error = (await client.post(path, json=body)).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "at least 101 tokens" in error["message"]


async def test_parsing_a_large_body_waits_for_no_garbage_collection() -> None:
    collections: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(info["generation"])

    gc.callbacks.append(note)
    try:
        await post_raw(b'{"messages":[{"role":"user","content":"x"}],"x":[' + b"[]," * 200_000 + b"1]}")
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()
    assert collections.count(0) < 50  # one per 700 lists otherwise


async def test_a_template_that_refuses_is_a_400_with_its_text() -> None:
    template = (
        "{% if messages[1] %}{{ raise_exception('one turn only') }}{% endif %}{{ messages[0].content }}"
    )
    app, _ = scripted_app(ScriptedEngine(toy_codec(chat_template=template)))
    async with client_of(app) as client:
        answer = await client.post(CHAT, json={"messages": [*HELLO, *HELLO]})
    assert answer.status_code == 400
    assert "one turn only" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize"])
async def test_an_unknown_model_is_404(path: str) -> None:
    status, answer = await post(path, {"model": "gpt-9" * 99, "messages": HELLO, "prompt": "x"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert len(answer["error"]["message"]) < 200
