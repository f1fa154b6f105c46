"""The layers around every request: ids, keys, limits, CORS, the log, errors of the router."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from http_server import client_of, scripted_app

from artesian.server.admission import KeyLimits
from artesian.server.config import ConfigError, ServerConfig, with_secrets
from artesian.server.errors import Unavailable

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-1.2_3:4", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False), ("", False)],
)
async def test_a_sane_request_id_is_kept_and_any_other_replaced(given: str, kept: bool) -> None:
    app, _ = scripted_app()
    async with client_of(app) as client:
        answer = await client.get("/health", headers={b"x-request-id": given.encode("latin-1")})
    assert (answer.headers["x-request-id"] == given) is kept
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer one"}, 200),
        ({"authorization": "bearer  two "}, 200),
        ({"x-api-key": "two"}, 200),
        ({"authorization": "Bearer wrong", "x-api-key": "one"}, 200),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic one"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "Bearer \xff"}, 401),
        ({"authorization": "Bearer admin"}, 401),
    ],
)
async def test_a_known_key_is_needed(headers: dict[str, str], status: int) -> None:
    app, engine = scripted_app(api_keys=("one", "two"), admin_key="admin")
    async with client_of(app) as client:
        sent = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
        answer = await client.post(CHAT, json=BODY, headers=sent)
    assert answer.status_code == status
    assert len(engine.requests) == (status == 200)
    if status == 401:
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


async def test_keys_guard_all_paths_but_health_and_preflights() -> None:
    app, _ = scripted_app(api_keys=("one",), admin_key="admin")
    async with client_of(app) as client:
        for path, status in [
            ("/health", 200), ("/ready", 200), ("/version", 200), ("/", 200), ("/v1/models", 401),
            ("/metrics", 401), ("/tokenize", 401), ("/nope", 401),
        ]:  # fmt: skip
            assert (await client.get(path)).status_code == status, path
        assert (await client.options(CHAT)).status_code == 405
        assert (await client.get("/metrics", headers={"x-api-key": "one"})).status_code == 401
        assert (await client.get("/metrics", headers={"x-api-key": "admin"})).status_code == 200


async def test_keys_do_not_share_prefixes_and_a_salt_splits_further() -> None:
    app, engine = scripted_app(api_keys=("one", "two"))
    async with client_of(app) as client:
        for key, salt in [("one", {}), ("two", {}), ("one", {"cache_salt": "x"}), ("one", {})]:
            await client.post(CHAT, json={**BODY, **salt}, headers={"x-api-key": key})
    salts = [request.salt for request in engine.requests]
    assert salts[0] == salts[3]
    assert len(set(salts)) == 3


async def test_the_log_has_a_line_and_neither_prompt_nor_key(caplog: pytest.LogCaptureFixture) -> None:
    app, _ = scripted_app(api_keys=("topsecret",), access_log=True)
    with caplog.at_level(logging.DEBUG):
        async with client_of(app, headers={"x-request-id": "r1", "x-api-key": "topsecret"}) as client:
            await client.post(
                f"{CHAT}?key=topsecret", json={"messages": [{"role": "user", "content": "myprompt"}]}
            )
            await client.get("/a%0Ab")
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith("http")]
    lines = [record.getMessage() for record in caplog.records if record.name == "artesian.access"]
    assert lines[0].startswith("request_id=r1 generation_id=chatcmpl-")
    assert f" method=POST path={CHAT} status=200 ms=" in lines[0]
    assert "path=/a%0Ab status=404" in lines[1]
    assert not any("topsecret" in line or "myprompt" in line for line in ours)


async def test_the_access_log_can_be_off(caplog: pytest.LogCaptureFixture) -> None:
    app, _ = scripted_app(access_log=False)
    with caplog.at_level(logging.DEBUG):
        async with client_of(app) as client:
            await client.get("/health")
    assert not [record for record in caplog.records if record.name == "artesian.access"]


ORIGIN = {"origin": "https://app.example"}
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-os",
}


async def test_a_preflight_from_an_allowed_origin_needs_no_key() -> None:
    app, _ = scripted_app(api_keys=("one",), allowed_origins=("https://app.example",))
    async with client_of(app) as client:
        answer = await client.options(CHAT, headers={**ORIGIN, **PREFLIGHT})
        evil = await client.options(CHAT, headers={"origin": "https://evil.example", **PREFLIGHT})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    assert evil.status_code == 400
    assert "access-control-allow-origin" not in evil.headers


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (BODY, {"x-api-key": "one"}, 200),
        ({**BODY, "stream": True}, {"x-api-key": "one"}, 200),
        (BODY, {}, 401),
        ({}, {"x-api-key": "one"}, 400),
    ],
)
async def test_cors_headers_are_on_answers_errors_and_streams(
    body: dict[str, Any], headers: dict[str, str], status: int
) -> None:
    app, _ = scripted_app(api_keys=("one",), allowed_origins=("https://app.example",))
    async with client_of(app) as client:
        answer = await client.post(CHAT, json=body, headers={**ORIGIN, **headers})
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]


async def test_without_origins_there_is_no_cors() -> None:
    app, _ = scripted_app()
    async with client_of(app) as client:
        answer = await client.post(CHAT, json=BODY, headers=ORIGIN)
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_unknown_paths_and_methods_have_the_error_body() -> None:
    app, _ = scripted_app()
    async with client_of(app) as client:
        missing, wrong = await client.get("/v1/nope"), await client.get(CHAT)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


async def test_a_root_path_is_seen_through() -> None:
    app, _ = scripted_app(api_keys=("one",))
    app.router.redirect_slashes = False
    async with client_of(app) as client:
        transport = client._transport
        transport.root_path = "/api"  # type: ignore[attr-defined]
        assert (await client.get("/api/health")).status_code == 200
        assert (await client.get("/api/v1/models")).status_code == 401


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_key_may_start_so_many_requests_a_minute() -> None:
    clock = Clock()
    limits = KeyLimits(requests_per_minute=2, concurrency=0, clock=clock)
    assert limits.take("a")["x-ratelimit-remaining-requests"] == "1"
    limits.take("a")
    with pytest.raises(Unavailable) as refused:
        limits.take("a")
    assert refused.value.status == 429
    assert refused.value.headers["retry-after"] == "30"
    limits.take("b")
    clock.now += 30
    assert limits.take("a")["x-ratelimit-remaining-requests"] == "0"


def test_a_clock_that_goes_back_gives_and_takes_nothing() -> None:
    clock = Clock()
    limits = KeyLimits(requests_per_minute=2, concurrency=0, clock=clock)
    limits.take("a")
    clock.now -= 1000
    limits.take("a")
    with pytest.raises(Unavailable):
        limits.take("a")
    clock.now += 30
    limits.take("a")


def test_a_key_may_have_so_many_requests_open() -> None:
    limits = KeyLimits(requests_per_minute=0, concurrency=1, clock=Clock())
    limits.take("a")
    with pytest.raises(Unavailable):
        limits.take("a")
    limits.give_back("a")
    limits.take("a")


async def test_a_key_at_its_limit_gets_429_and_is_told_where_it_stands() -> None:
    app, _ = scripted_app(key_requests_per_minute=1)
    async with client_of(app) as client:
        first, second = await client.post(CHAT, json=BODY), await client.post(CHAT, json=BODY)
        health = await client.get("/health")
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    assert (second.status_code, second.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 0 < int(second.headers["retry-after"]) <= 60
    assert health.status_code == 200


async def test_open_requests_are_given_back_after_streams_and_errors() -> None:
    app, _ = scripted_app(key_concurrency=1)
    async with client_of(app) as client:
        for body in (BODY, {**BODY, "stream": True}, {}, BODY):
            assert (await client.post(CHAT, json=body)).status_code != 429


@pytest.mark.parametrize("seconds", [float("nan"), -1.0, 0.0, 0.01, 3.2, 1e9, float("inf")])
def test_retry_headers_are_always_sane(seconds: float) -> None:
    headers = Unavailable("full", code="server_overloaded", retry_after_s=seconds).headers
    assert 1 <= int(headers["retry-after"]) <= 60
    assert 1 <= int(headers["retry-after-ms"]) <= 60_000


def test_a_setting_out_of_range_is_named() -> None:
    with pytest.raises(ConfigError, match="max_n"):
        ServerConfig(max_n=0)


def test_secrets_come_from_the_environment_and_a_file(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfrom-file\n\n")
    config = ServerConfig(api_keys=("flag",), api_key_file=str(file))
    full = with_secrets(config, {"ARTESIAN_API_KEY": "env1, env2", "ARTESIAN_ADMIN_KEY": "boss"})
    assert full.api_keys == ("flag", "env1", "env2", "from-file")
    assert full.admin_key == "boss"
    with pytest.raises(ConfigError, match="api_key_file=.*none: No such file"):
        with_secrets(ServerConfig(api_key_file=str(tmp_path / "none")), {})
