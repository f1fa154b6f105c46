"""The other protocols on the real model: turns that outlive kill -9, three clients, the same words."""

from __future__ import annotations

import time
from pathlib import Path

import anthropic
import openai
import pytest
from real_server import MODEL_NAME, RealServer, real_server

pytestmark = pytest.mark.model

RULES = "You are a careful assistant. " + " ".join(f"Rule {i}: answer in plain words." for i in range(45))
STORED_S = 20.0


def clients(server: RealServer) -> tuple[openai.OpenAI, anthropic.Anthropic]:
    return (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60),
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60),
    )


def test_a_stored_response_is_continued_from_disk_after_kill_9(smollm2_path: Path, tmp_path: Path) -> None:
    flags = ("--cache-dir", str(tmp_path / "prompts"), "--cache-min-free-bytes", "0")
    options = {"model": MODEL_NAME, "instructions": RULES, "temperature": 0.0, "max_output_tokens": 24}
    with real_server(smollm2_path, tmp_path, *flags) as server:
        client, _ = clients(server)
        first = client.responses.create(input="What is gravity?", **options)  # type: ignore[call-overload]
        warm = client.responses.create(  # type: ignore[call-overload]
            input="Why?", previous_response_id=first.id, **options
        )
        deadline = time.monotonic() + STORED_S
        # Seven blocks of the first prompt, two stored responses, two traces.
        while server.metrics().get("artesian_cache_written_records_total", 0) < 11:
            assert time.monotonic() < deadline, "nothing is stored"
            time.sleep(0.05)
        server.process.kill()
        server.process.wait()
    with real_server(smollm2_path, tmp_path, *flags) as server:
        client, _ = clients(server)
        assert client.responses.retrieve(first.id).output_text == first.output_text
        again = client.responses.create(  # type: ignore[call-overload]
            input="Why?", previous_response_id=first.id, **options
        )
    assert again.output_text == warm.output_text and again.output_text
    assert again.usage.input_tokens_details.cached_tokens >= 7 * 64
    assert set(again.prompt_cache_diagnostics.sources) == {"disk"}


def test_three_protocols_say_the_same_and_share_the_prompt(smollm2_path: Path, tmp_path: Path) -> None:
    with real_server(smollm2_path, tmp_path) as server:
        ours, theirs = clients(server)
        chat = ours.chat.completions.create(
            model=MODEL_NAME,
            messages=[{"role": "system", "content": RULES}, {"role": "user", "content": "Name a colour."}],
            temperature=0,
            max_tokens=16,
        )
        response = ours.responses.create(
            model=MODEL_NAME, instructions=RULES, input="Name a colour.", temperature=0, max_output_tokens=16
        )
        with theirs.messages.stream(
            model=MODEL_NAME,
            system=RULES,
            messages=[{"role": "user", "content": "Name a colour."}],
            extra_body={"temperature": 0},
            max_tokens=16,
        ) as stream:
            said = "".join(stream.text_stream)
            message = stream.get_final_message()
        server.assert_idle()
    assert chat.choices[0].message.content == response.output_text == said
    assert response.usage is not None and response.usage.input_tokens_details.cached_tokens >= 7 * 64
    assert message.usage.cache_read_input_tokens == response.usage.input_tokens_details.cached_tokens
