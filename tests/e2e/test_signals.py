"""`artesian serve` as a process: signals, crashes, addresses, keys, certificates, and refusals to start."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from real_server import ARTESIAN, MODEL_NAME, RealServer, real_server

pytestmark = pytest.mark.model

COMPLETIONS = "/v1/completions"
PROBE: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
SLOTS = 3


class Streams:
    """Streams of one length, each read by a thread of its own; the texts are theirs when they have ended."""

    def __init__(self, url: str, count: int, max_tokens: int) -> None:
        self.texts = [""] * count
        body = {"prompt": "Once", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        self._threads = [
            threading.Thread(target=self._read, args=(url, body | {"seed": i}, i)) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, url: str, body: dict[str, Any], i: int) -> None:
        try:
            with httpx.stream("POST", url + COMPLETIONS, json=body, timeout=60) as answer:
                for piece in answer.iter_text():
                    self.texts[i] += piece
        except httpx.TransportError:
            self.texts[i] += "CUT"

    def await_begin(self, count: int) -> None:
        deadline = time.monotonic() + 30
        while sum(map(bool, self.texts)) < count:
            assert time.monotonic() < deadline, "the streams do not begin"
            time.sleep(0.01)

    def join(self) -> list[str]:
        for thread in self._threads:
            thread.join(60)
        return self.texts


def await_queue(server: RealServer, waiting: int) -> None:
    deadline = time.monotonic() + 30
    while server.metrics()["artesian_num_requests_waiting"] != waiting:
        assert time.monotonic() < deadline, "the requests do not queue"
        time.sleep(0.01)


@contextmanager
def serving(model: Path, folder: Path, *flags: str) -> Iterator[RealServer]:
    with real_server(model, folder, "--max-num-seqs", str(SLOTS), *flags) as server:
        yield server


def test_sigterm_finishes_what_runs_and_waits_and_takes_nothing_new(
    smollm2_path: Path, tmp_path: Path
) -> None:
    with serving(smollm2_path, tmp_path, "--shutdown-timeout-s", "60") as server:
        with httpx.Client(base_url=server.url, timeout=30) as idle:
            idle.get("/health")
            streams = Streams(server.url, SLOTS + 2, 100)
            streams.await_begin(SLOTS)
            await_queue(server, 2)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            assert idle.get("/ready").status_code == 503
            health = idle.get("/health")
            assert (health.status_code, health.json()["status"]) == (200, "draining")
            refused = httpx.post(server.url + COMPLETIONS, json=PROBE, timeout=30)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_overloaded")
            texts = streams.join()
            assert server.process.wait(10) == 0
    for text in texts:
        assert text.endswith("data: [DONE]\n\n") and '"error"' not in text
        assert '"finish_reason":"length"' in text
    assert "Traceback" not in server.log.read_text()


def test_what_does_not_finish_in_time_ends_with_an_error_event(smollm2_path: Path, tmp_path: Path) -> None:
    with serving(smollm2_path, tmp_path, "--shutdown-timeout-s", "0.5") as server:
        streams = Streams(server.url, SLOTS + 2, 4000)
        streams.await_begin(SLOTS)
        await_queue(server, 2)
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 8
        texts = streams.join()
    for text in texts:
        *_, error, done, rest = text.split("\n\n")
        assert '"code":"server_overloaded"' in error
        assert (done, rest) == ("data: [DONE]", "")


def test_a_second_sigterm_ends_the_server_now(smollm2_path: Path, tmp_path: Path) -> None:
    with serving(smollm2_path, tmp_path, "--shutdown-timeout-s", "120") as server:
        streams = Streams(server.url, SLOTS, 8000)
        streams.await_begin(SLOTS)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert server.process.poll() is None
        assert server.stop(timeout_s=8) == 0
        streams.join()


def test_after_kill_9_the_same_address_serves_again(smollm2_path: Path, tmp_path: Path) -> None:
    answers = []
    port = "0"
    for _ in range(2):
        with serving(smollm2_path, tmp_path, "--port", port) as server:
            answers.append(httpx.post(server.url + COMPLETIONS, json=PROBE, timeout=60).json()["choices"])
            port = server.url.rpartition(":")[2]
            streams = Streams(server.url, SLOTS, 4000)
            streams.await_begin(SLOTS)
            server.process.kill()
            assert server.process.wait(10) == -signal.SIGKILL
            assert all(text.endswith("CUT") for text in streams.join())
    assert answers[0] == answers[1]


def test_a_unix_socket_serves_even_where_a_killed_server_left_its_own(
    smollm2_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    for _ in range(2):
        with serving(smollm2_path, tmp_path, "--uds", str(path)) as server:
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(transport=transport, base_url=server.url, timeout=60) as client:
                assert "Paris" in client.post(COMPLETIONS, json=PROBE).json()["choices"][0]["text"]
        assert path.exists()  # it was killed


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_tls_and_keys_guard_the_api(smollm2_path: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    openssl = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    )
    subprocess.run(openssl.split(), check=True, capture_output=True)
    trusted = ssl.create_default_context(cafile=str(certificate))
    flags = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--api-keys", "sesame")
    with serving(smollm2_path, tmp_path, *flags) as server:
        assert server.url.startswith("https://")
        with openai.DefaultHttpxClient(verify=trusted, timeout=60) as http:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame", http_client=http)
            answer = client.completions.create(model=MODEL_NAME, **PROBE)
            assert "Paris" in answer.choices[0].text
            with pytest.raises(openai.AuthenticationError) as refused:
                client.with_options(api_key="open").completions.create(model=MODEL_NAME, **PROBE)
            assert refused.value.code == "invalid_api_key"
            assert http.get(f"{server.url}/health").status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/health", timeout=10)
        assert server.stop() == 0
    assert "sesame" not in server.log.read_text()


@pytest.fixture(scope="module")
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        pytest.param(["--port", "{taken}"], "cannot listen on 127.0.0.1 port {taken}", id="port in use"),
        pytest.param(["--port", "70000"], "port=70000", id="no such port"),
        pytest.param(["--port", "x"], "--port", id="port no number"),
        pytest.param(["--host", "203.0.113.1"], "cannot listen on 203.0.113.1", id="foreign address"),
        pytest.param(["--no-such-flag"], "no-such-flag", id="unknown flag"),
        pytest.param(["--backend", "tpu"], "backend", id="unknown backend"),
        pytest.param(["--kv-cache-memory-bytes", "1000"], "--kv-cache-memory-bytes", id="tiny cache"),
        pytest.param(["--max-model-len", "9000000"], "--max-model-len", id="context too long"),
        pytest.param(["--ssl-certfile", "{folder}/none.pem"], "ssl_keyfile", id="half a certificate"),
        pytest.param(
            ["--ssl-certfile", "{folder}/none.pem", "--ssl-keyfile", "{folder}/none.pem"],
            "none.pem",
            id="no certificate",
        ),
        pytest.param(["--api-key-file", "{folder}/none"], "none", id="no key file"),
        pytest.param(["--config", "{folder}/none.toml"], "none.toml", id="no config file"),
        pytest.param(["--uds", "{folder}/none/socket"], "cannot listen on", id="no folder"),
        pytest.param(["--max-num-seqs", "0"], "max_num_seqs", id="no sequences"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(
    smollm2_path: Path, tmp_path: Path, taken_port: int, flags: list[str], said: str
) -> None:
    names = {"taken": taken_port, "folder": tmp_path}
    refused = start(smollm2_path, *(flag.format(**names) for flag in flags))
    assert said.format(**names) in refused


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "other"])
def test_a_bad_model_is_refused_in_one_line(smollm2_path: Path, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "m.gguf"
    if damage != "missing":
        with smollm2_path.open("rb") as whole:
            path.write_bytes({"empty": b"", "cut": whole.read(9 << 20), "other": b"PK" * 500}[damage])
    assert "m.gguf" in start(path)


def start(model: Path, *flags: str) -> str:
    """Try to serve; return the one line that says why not."""
    port = () if "--port" in flags else ("--port", "0")
    command = [*ARTESIAN, "serve", str(model), "--backend", "cpu", *port, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert len(lines) == 1 and lines[0].startswith("artesian: "), done.stderr
    return lines[0]
