"""How requests ask for a form of the answer, and what they are told when it cannot be had."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from http_server import client_of, scripted_app
from scripted_engine import Script, ScriptedEngine, toy_codec

from artesian.engine.grammar import Choice, Grammar, JsonSchema, Lark, Regex, Tag, Tags

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 50},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
LOOSE = {"type": "array", "uniqueItems": True}


def response_format(schema: Any, **options: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **options}}


SPELLINGS: list[tuple[str, Any, Grammar | None]] = [
    ("response_format", {"type": "text"}, None),
    ("response_format", {"type": "json_object"}, JsonSchema({"type": "object"})),
    ("response_format", response_format(SCHEMA), JsonSchema(SCHEMA, strict=False)),
    ("response_format", response_format(SCHEMA, strict=True), JsonSchema(SCHEMA)),
    ("response_format", {"type": "regex", "pattern": "a+"}, Regex("a+")),
    (
        "response_format",
        {
            "type": "structural_tag",
            "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
            "triggers": ["<"],
        },
        Tags((Tag("<f>", SCHEMA, "</f>", strict=False),), ("<",)),
    ),
    ("structured_outputs", {"json": SCHEMA}, JsonSchema(SCHEMA)),
    ("structured_outputs", {"json": '{"type":"null"}'}, JsonSchema({"type": "null"})),
    ("structured_outputs", {"regex": "a"}, Regex("a")),
    ("structured_outputs", {"choice": ["a", "b"]}, Choice(("a", "b"))),
    ("structured_outputs", {"grammar": 'root ::= "a"'}, Lark('root ::= "a"')),
    ("structured_outputs", {"json_object": True}, JsonSchema({"type": "object"})),
    ("guided_json", SCHEMA, JsonSchema(SCHEMA)),
    ("guided_regex", "a", Regex("a")),
    ("guided_choice", ["a"], Choice(("a",))),
    ("guided_grammar", 'start: "a"', Lark('start: "a"')),
    ("guided_json_object", True, JsonSchema({"type": "object"})),
    ("json_schema", SCHEMA, JsonSchema(SCHEMA)),
    ("regex", "a", Regex("a")),
    ("choice", ["a"], Choice(("a",))),
    ("ebnf", 'root ::= "a"', Lark('root ::= "a"')),
    ("grammar", 'start: "a"', Lark('start: "a"')),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_every_spelling_reaches_the_engine(path: str) -> None:
    app, engine = scripted_app()
    async with client_of(app) as client:
        for name, value, _ in SPELLINGS:
            for stream in (False, True):
                answer = await client.post(path, json={**BASE[path], name: value, "stream": stream})
                assert answer.status_code == 200, (name, value, answer.text)
                assert "x-ignored-fields" not in answer.headers
    wanted = [grammar for *_, grammar in SPELLINGS for _ in range(2)]
    assert [request.grammar for request in engine.requests] == wanted


async def test_structural_tags_need_their_trigger_and_the_answer_for_themselves() -> None:
    app, engine = scripted_app()
    form = {"begin": "<f>", "schema": True, "end": ""}
    tags = {"type": "structural_tag", "structures": [form], "triggers": ["<g"]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with client_of(app) as client:
        for fields, param in (
            ({"response_format": tags}, "response_format.structures[0].begin"),
            ({"response_format": {**tags, "triggers": ["<"]}, "tools": tools}, "response_format"),
        ):
            answer = await client.post(CHAT, json={**BASE[CHAT], **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not engine.requests


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_misspelt_field_is_named_back(path: str) -> None:
    app, _ = scripted_app()
    async with client_of(app) as client:
        answer = await client.post(path, json={**BASE[path], "respose_format": {"type": "json_object"}})
    assert answer.headers["x-ignored-fields"] == "respose_format"
    assert answer.json()["warnings"] == ["`respose_format` has no effect here"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_two_forms_at_once_are_refused(path: str) -> None:
    app, _ = scripted_app()
    body = {**BASE[path], "guided_regex": "a", "response_format": {"type": "json_object"}}
    async with client_of(app) as client:
        error = (await client.post(path, json=body)).json()["error"]
    assert (error["param"], error["code"]) == ("guided_regex", "invalid_value")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
async def test_strict_schema_with_what_cannot_be_enforced_is_refused_with_its_place(
    path: str, stream: bool
) -> None:
    app, engine = scripted_app()
    schema = {"properties": {"a": {"items": LOOSE}}}
    body = {**BASE[path], "stream": stream, "response_format": response_format(schema, strict=True)}
    async with client_of(app) as client:
        answer = await client.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["param"], error["code"]) == ("response_format", "invalid_json_schema")
    assert "(at /properties/a/items/uniqueItems)" in error["message"]
    assert not engine.requests


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_schema_that_is_not_strict_is_answered_with_a_warning(path: str) -> None:
    app, _ = scripted_app()
    async with client_of(app) as client:
        body = {**BASE[path], "response_format": response_format(LOOSE)}
        whole = await client.post(path, json=body)
        stream = await client.post(path, json={**body, "stream": True})
    said = "response_format: /uniqueItems: `uniqueItems` is not enforced"
    assert whole.json()["warnings"] == [said]
    assert said in stream.text.partition("\n\n")[0]


@pytest.mark.parametrize(
    "reference", ["http://localhost:1/a", "other.json", "file:///etc/passwd", "//x/y#/a"]
)
async def test_reference_to_elsewhere_is_never_followed(reference: str) -> None:
    app, _ = scripted_app()
    body = {**BASE[CHAT], "response_format": response_format({"items": {"$ref": reference}})}
    async with client_of(app) as client:
        answer = await client.post(CHAT, json=body)
    assert answer.status_code == 400
    assert "nothing is fetched (at /items/$ref)" in answer.json()["error"]["message"]


async def test_health_is_quick_and_streams_flow_while_bombs_are_compiled() -> None:
    app, _ = scripted_app(ScriptedEngine(toy_codec(), Script(text="x" * 40, step_s=0.02)))
    names = {f"p{i}": {"type": "string", "pattern": "[ab]*a[ab]{9}"} for i in range(900)}
    bombs = [
        {"properties": names},
        {"type": "integer", "multipleOf": 9973},
        {
            "allOf": [{"anyOf": [{"pattern": f"^a{i}"}, {"pattern": f"b{i}$"}]} for i in range(12)],
            "type": "string",
        },
    ]
    async with client_of(app) as client:

        async def health() -> list[float]:
            times = []
            for _ in range(20):
                started = time.monotonic()
                await client.get("/health")
                times.append(time.monotonic() - started)
                await asyncio.sleep(0.02)
            return times

        stream = client.post(CHAT, json={**BASE[CHAT], "stream": True})
        asked = [
            client.post(CHAT, json={**BASE[CHAT], "max_tokens": 1, "response_format": response_format(bomb)})
            for bomb in bombs
        ]
        started = time.monotonic()
        times, streamed, answers = await asyncio.gather(health(), stream, asyncio.gather(*asked))
    assert time.monotonic() - started < 5
    assert max(times) < 1  # on a busy machine; alone it is below 0.05 s
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert {answer.status_code for answer in answers} <= {200, 400}


# -- /v1/schemas/validate --------------------------------------------------------------------------------


async def validate(**body: Any) -> tuple[int, dict[str, Any]]:
    app, _ = scripted_app()
    async with client_of(app) as client:
        answer = await client.post("/v1/schemas/validate", json=body)
        result: dict[str, Any] = answer.json()
        return answer.status_code, result


async def test_validation_says_what_becomes_of_each_keyword() -> None:
    status, answer = await validate(
        schema={"title": "t", "items": {"type": "string", "minLength": 2}, **LOOSE}
    )
    assert (status, answer["accepted"], answer["strict"]) == (200, False, True)
    assert answer["error"]["pointer"] == "/uniqueItems"
    assert {keyword["pointer"]: keyword["status"] for keyword in answer["keywords"]} == {
        "/title": "annotation",
        "/items": "enforced",
        "/items/type": "enforced",
        "/items/minLength": "enforced",
        "/type": "enforced",
        "/uniqueItems": "refused",
    }


async def test_validation_without_strict_gives_the_warnings_of_a_request() -> None:
    _, answer = await validate(schema=LOOSE, strict=False)
    assert (answer["accepted"], answer["error"]) == (True, None)
    assert answer["warnings"] == ["/uniqueItems: `uniqueItems` is not enforced"]


async def test_validation_points_at_what_cannot_be_compiled() -> None:
    _, answer = await validate(schema={"properties": {"a": {"anyOf": [{"type": "null"}, {"pattern": "["}]}}})
    assert answer["error"]["pointer"] == "/properties/a/anyOf/1"


@pytest.mark.parametrize("body", [{}, {"schema": 1}, {"schema": "true"}, {"schema": {}, "strict": 1}])
async def test_validation_of_what_is_no_schema_is_a_bad_request(body: dict[str, Any]) -> None:
    status, answer = await validate(**body)
    assert status == 400
    assert answer["error"]["param"] in ("schema", "strict")
