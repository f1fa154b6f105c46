"""`/openapi.json`: it names every route, it is a sound document, and what the server does agrees with it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from http_server import client_of, scripted_app, server_process
from starlette.routing import Route

from artesian.server.api.openapi import OPERATIONS, document

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
NOT_CHECKED = (
    "positive_data_acceptance",  # a schema cannot say all that is refused: other models, one of two fields
    "allow_header_conformance",  # a cache may be named `explain`: that path then knows GET and DELETE too
)


def test_every_route_is_described_and_nothing_else() -> None:
    app, _ = scripted_app()
    routes = {
        (method.lower(), re.sub(r":\w+}", "}", route.path))
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert {(row.method, row.path) for row in OPERATIONS} == routes


def test_every_schema_is_one_and_every_reference_leads_somewhere() -> None:
    found = document()
    schemas = found["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    named = set(re.findall(r"#/components/schemas/([\w.]+)", str(found)))
    assert named <= set(schemas) and {"ChatRequest", "ChatAnswer", "ChatChunk", "ErrorEnvelope"} <= named
    ids = [row["operationId"] for path in found["paths"].values() for row in path.values()]
    assert len(set(ids)) == len(ids) == len(OPERATIONS)


@pytest.mark.parametrize(("keys", "security"), [((), None), (("one",), [{"bearer": []}, {"key": []}])])
async def test_the_document_is_open_and_says_whether_the_rest_needs_a_key(
    keys: tuple[str, ...], security: Any
) -> None:
    app, _ = scripted_app(api_keys=keys)
    async with client_of(app) as client:
        found = (await client.get("/openapi.json")).json()
    assert found["paths"]["/v1/models"]["get"].get("security") == security
    assert "security" not in found["paths"]["/openapi.json"]["get"]


async def test_a_wrong_method_is_told_all_that_the_path_knows() -> None:
    app, _ = scripted_app()
    async with client_of(app) as client:
        answer: httpx.Response = await client.put("/v1/caches", json={})
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET, HEAD, POST")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phases", "examples"),
    [
        ("fuzzing", 5),
        pytest.param("coverage,fuzzing", 100, marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
def test_what_schemathesis_sends_is_answered_as_the_document_says(
    tmp_path: Path, phases: str, examples: int
) -> None:
    config = {"access_log": False, "api_keys": ["one"]}
    with server_process(script={"text": "Hello"}, config=config) as (_, url):
        done = subprocess.run(
            [
                str(SCHEMATHESIS), "run", f"{url}/openapi.json", "--header", "Authorization: Bearer one",
                "--phases", phases, "--max-examples", str(examples), "--seed", "1", "--no-color",
                "--exclude-checks", ",".join(NOT_CHECKED),
            ],
            cwd=tmp_path, capture_output=True, text=True, timeout=800,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    tested = re.search(r"Tested: (\d+)", done.stdout)
    assert tested is not None and int(tested[1]) == len(OPERATIONS) - 1  # all but /openapi.json itself
