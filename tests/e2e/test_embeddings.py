"""Embeddings of the real model through OpenAI's SDK."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import openai
import pytest
from real_server import RealServer

pytestmark = pytest.mark.model
TEXTS = ["The cat sits on the mat.", "A cat is sitting on a mat.", "Interest rates rose by half a percent."]


def test_the_sdk_gets_unit_vectors_that_tell_texts_apart(server: RealServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        answer = client.embeddings.create(model=model, input=TEXTS)
        floats = client.embeddings.create(model=model, input=TEXTS, encoding_format="float")
        one = client.embeddings.create(model=model, input=TEXTS[1])
        many = client.embeddings.create(model=model, input=TEXTS * 15)
        tokens = client.post("/tokenize", body={"prompt": TEXTS[0]}, cast_to=object)
        last = client.embeddings.create(model=model, input=TEXTS, extra_body={"pooling": "last"})
    rows = np.array([item.embedding for item in answer.data])
    assert rows.shape == (3, 576) and np.allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-5)
    assert rows[0] @ rows[1] > rows[0] @ rows[2]
    assert np.array_equal(rows, np.array([item.embedding for item in floats.data]).astype(np.float32))
    assert np.array_equal(rows[1], one.data[0].embedding)
    assert np.array_equal(np.array([item.embedding for item in many.data]), np.tile(rows, (15, 1)))
    assert not np.allclose(rows, [item.embedding for item in last.data])
    assert isinstance(tokens, dict)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(tokens["tokens"])
    assert answer.object == "list" and answer.data[2].index == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [[1], [10**9]]}, "input[1]"),
        ({"input": [-1]}, "input"),
        ({"input": "a" * 100_000}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 64}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
    ],
)  # fmt: skip
def test_bad_input_names_its_field(server: RealServer, body: dict[str, Any], param: str | None) -> None:
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_vectors_need_no_second_computation_of_what_is_cached(server: RealServer) -> None:
    body = {"input": "one two three four five " * 30, "pooling": "last"}
    first, second = (
        httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60).json() for _ in range(2)
    )
    assert first["data"] == second["data"]
    server.assert_idle()
