"""A process of its own that is told to stop."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import server_process

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


class Streams:
    """Streams that run in threads; what each had received when it ended."""

    def __init__(self, url: str, count: int) -> None:
        self.texts: list[str] = [""] * count
        self._begun = threading.Barrier(count + 1)
        self._threads = [threading.Thread(target=self._run, args=(url, i)) for i in range(count)]
        for thread in self._threads:
            thread.start()
        self._begun.wait(10)

    def _run(self, url: str, i: int) -> None:
        with httpx.stream("POST", url + CHAT, json={**BODY, "stream": True}, timeout=20) as answer:
            self._begun.wait(10)
            try:
                for piece in answer.iter_text():
                    self.texts[i] += piece
            except httpx.TransportError:
                self.texts[i] += "CUT"

    def join(self) -> list[str]:
        for thread in self._threads:
            thread.join(20)
        return self.texts


def wait_for_exit(process: subprocess.Popen[bytes], within_s: float) -> int:
    return process.wait(within_s)


def catches_sigterm(process: subprocess.Popen[bytes]) -> bool:
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def test_sigterm_lets_streams_finish_and_takes_nothing_new() -> None:
    with server_process(
        script={"text": "x" * 15, "step_s": 0.1}, engine={"slots": 2}, config={"shutdown_timeout_s": 20}
    ) as (process, url):
        with httpx.Client(base_url=url) as idle:
            idle.get("/health")
            streams = Streams(url, 3)  # the third waits in the queue
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
            assert idle.get("/ready").status_code == 503
            assert idle.get("/health").json() == {"status": "draining"}
            refused = httpx.post(url + CHAT, json=BODY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_overloaded")
            assert refused.headers["retry-after"]
            texts = streams.join()
            assert wait_for_exit(process, 5) == 0
    assert [text.count('"content":"x"') for text in texts] == [15, 15, 15]
    assert all(text.endswith("data: [DONE]\n\n") and "error" not in text for text in texts)


def test_after_the_deadline_streams_end_with_an_error_event_and_done() -> None:
    with server_process(
        script={"text": "x", "endless": True, "step_s": 0.05}, config={"shutdown_timeout_s": 0.5}
    ) as (process, url):
        streams = Streams(url, 2)
        process.send_signal(signal.SIGTERM)
        texts = streams.join()
        assert wait_for_exit(process, 5) == 0
    for text in texts:
        *_, error, done, rest = text.split("\n\n")
        assert '"code":"server_overloaded"' in error
        assert (done, rest) == ("data: [DONE]", "")


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_everything_now(second: signal.Signals) -> None:
    with server_process(
        script={"text": "x", "endless": True, "step_s": 0.05}, config={"shutdown_timeout_s": 60}
    ) as (process, url):
        streams = Streams(url, 2)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(second)
        assert wait_for_exit(process, 3) == 0
        streams.join()


def test_without_requests_it_stops_at_once() -> None:
    with server_process(script={}) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert wait_for_exit(process, 2) == 0


def test_a_signal_while_the_model_loads_ends_the_start() -> None:
    with server_process(script={}, engine={"load_s": 60}, wait=False) as (process, _):
        while not catches_sigterm(process):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert wait_for_exit(process, 3) == 0


def test_a_client_that_reads_nothing_does_not_hold_the_exit() -> None:
    with server_process(
        script={"text": "x" * 5000, "endless": True, "tokens_per_step": 5000},
        config={"shutdown_timeout_s": 0.3, "send_timeout_s": 60},
    ) as (process, url):
        with httpx.stream("POST", url + CHAT, json={**BODY, "stream": True}, timeout=20):
            process.send_signal(signal.SIGTERM)
            assert wait_for_exit(process, 9) == 0


def test_a_unix_socket_serves(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with server_process(script={"text": "ok"}, config={"uds": path}) as (_, url):
        transport = httpx.HTTPTransport(uds=path)
        with httpx.Client(transport=transport, base_url=url) as client:
            assert client.post(CHAT, json=BODY).json()["choices"][0]["message"]["content"] == "ok"


async def test_health_answers_while_a_long_prompt_is_split() -> None:
    with server_process(script={"text": "ok"}) as (_, url):
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            long = asyncio.create_task(client.post("/tokenize", json={"prompt": "word " * 400_000}))
            answers = 0
            while not long.done():
                await client.get("/health")
                answers += 1
                await asyncio.sleep(0.02)
            assert (await long).json()["count"] >= 400_000
    assert answers > 3, "the loop stood still while the prompt was split"
