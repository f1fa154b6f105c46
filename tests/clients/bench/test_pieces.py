"""The parts of scenarios that can be checked without measuring: texts, comparisons, servers."""

import asyncio
import json
import os
import threading
import time

import numpy as np
import pytest
from scripted_engine import toy_codec

from artesian.clients.bench.load import LoadError
from artesian.clients.bench.machine import cpu_seconds, peak_rss_bytes, thread_seconds
from artesian.clients.bench.quality import compare, log_softmax
from artesian.clients.bench.servers import child
from artesian.clients.bench.stream_server import (
    SCRIPTS,
    TickingEngine,
    Ticks,
    bare_app,
    byte_codec,
    events_of,
)
from artesian.clients.bench.texts import Prompts
from artesian.engine import GenerationRequest, SamplingParams


def test_prompts_have_the_length_asked_for_and_no_common_start() -> None:
    tokenizer = toy_codec().tokenizer
    prompts = Prompts(tokenizer)

    texts = [prompts.take(40) for _ in range(30)]

    assert {len(tokenizer.encode(text, add_special=False)) for text in texts} == {40}
    assert len({text[:4] for text in texts}) == 30


def test_equal_models_have_no_divergence_and_the_right_surprise() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [1.0, 1.0, 1.0]], np.float32)) + 7
    rows = log_softmax(logits)

    ours, reference, kl, agrees = compare(rows, rows, np.array([2, 1, 0]))

    np.testing.assert_allclose(ours, -np.log([0.25, 0.1]), rtol=1e-6)
    assert (ours == reference).all() and (kl == 0).all() and agrees.tolist() == [1, 1]


def test_divergence_is_of_the_reference_against_the_tested() -> None:
    tested = np.log(np.array([[0.5, 0.5], [0.5, 0.5]]))
    reference = np.log(np.array([[0.2, 0.8], [0.5, 0.5]]))

    _, _, kl, agrees = compare(tested, reference, np.array([0, 0]))

    assert kl[0] == pytest.approx(0.2 * np.log(0.4) + 0.8 * np.log(1.6))
    assert agrees[0] == 0


async def test_the_ticking_engine_gives_every_stream_one_token_a_step_until_its_end() -> None:
    engine = TickingEngine(0.0)
    await engine.start()
    params = SamplingParams(max_tokens=3)
    requests = [GenerationRequest(id=name, prompt=[1, 2], params=params) for name in "ab"]

    async def steps(request: GenerationRequest) -> list[int]:
        return [len(step) async for step in engine.submit(request)]

    counts = await asyncio.gather(*map(steps, requests))
    await engine.close()

    assert counts == [[1, 1, 1], [1, 1, 1]]
    assert engine.status().running == 0


async def test_the_ticking_engine_ends_a_stream_that_is_aborted() -> None:
    engine = TickingEngine(60.0)
    stream = engine.submit(GenerationRequest(id="a", prompt=[1], params=SamplingParams(max_tokens=3)))
    engine.abort("a")

    assert [delta.finish_reason async for step in stream for delta in step] == ["abort"]
    assert engine.status().running == 0


@pytest.mark.parametrize("count", range(40, 56))
def test_a_script_is_whole_at_any_length(count: int) -> None:
    tokens = {name: script.tokens(count) for name, script in SCRIPTS.items()}
    texts = {name: "".join(pieces) for name, pieces in tokens.items()}

    assert {len(pieces) for pieces in tokens.values()} == {count}
    assert texts["text"] == " well" * count
    assert json.loads(texts["json"])["wells"][-1] == {"name": "well head", "depth": 12}
    call = json.loads(texts["call"].removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert call["name"] == "list" and call["arguments"]["wells"][-1]["depth"] == 12


async def test_the_bare_handler_writes_each_event_once() -> None:
    sent: list[bytes] = []

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.body":
            assert isinstance(message["body"], bytes)
            sent.append(message["body"])

    events = events_of(b"data: a\n\ndata: b\n\n")
    await bare_app(events, Ticks(0.0))({"type": "http", "method": "POST"}, None, send)

    assert sent == [b"data: a\n\n", b"data: b\n\n", b""]


def test_the_byte_codec_reads_what_it_writes() -> None:
    codec = byte_codec()

    assert codec.detokenize(codec.encode_prompt("Tiefe 3 µm")) == "Tiefe 3 µm"


def test_processor_time_and_memory_of_a_process_are_its_own() -> None:
    before, started = cpu_seconds(os.getpid()), time.process_time()
    sum(range(300_000))
    spent, expected = cpu_seconds(os.getpid()) - before, time.process_time() - started

    assert spent == pytest.approx(expected, abs=0.005)
    assert peak_rss_bytes(os.getpid()) > 10 << 20


def test_processor_time_is_told_by_thread() -> None:
    def work() -> None:
        while time.thread_time() < 0.1:
            pass
        held.wait()

    held = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert thread.native_id is not None
        while thread_seconds(os.getpid())[thread.native_id] < 0.09:
            assert thread.is_alive()
        assert threading.get_native_id() in thread_seconds(os.getpid())
    finally:
        held.set()
        thread.join()


def test_a_server_that_ends_early_is_told_with_its_last_words() -> None:
    with child(["/bin/sh", "-c", "echo no such port {port}; exit 1"]) as server:
        with pytest.raises(LoadError, match=f"no such port {server.port}"):
            server.wait_until_ok("/ready")
