"""What an operator can set about the HTTP side. Owns the only reads of the environment (secrets).

The fields are flat and of plain types: command-line flags and the TOML file are generated from them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server; `engine` and `cache` have their own."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """TCP port; 0 takes a free one."""
    uds: str | None = None
    """Path of a Unix socket to listen on instead of host and port."""
    served_model_names: tuple[str, ...] = ()
    """Names that requests may use; the first is listed first. Default: the engine's model name."""
    api_keys: tuple[str, ...] = ()
    """Accepted API keys; none = open. Prefer ARTESIAN_API_KEY or api_key_file over the command line."""
    api_key_file: str | None = None
    """File with one API key a line; `#` starts a comment line."""
    admin_key: str | None = None
    """Key for /metrics; without one /metrics is open, even with API keys. Prefer ARTESIAN_ADMIN_KEY."""
    allowed_origins: tuple[str, ...] = ()
    """Origins that browsers may call from (CORS); `*` = any; none = CORS off."""
    ssl_certfile: str | None = None
    """PEM certificate chain; with ssl_keyfile the server speaks HTTPS."""
    ssl_keyfile: str | None = None
    """PEM private key."""
    root_path: str = ""
    """Path prefix that a proxy in front of the server strips."""
    max_body_bytes: int = 8 * 1024 * 1024
    """Largest request body; beyond it 413."""
    max_header_bytes: int = 64 * 1024
    """Largest request head (request line and headers); beyond it 431."""
    header_timeout_s: float = 20.0
    """Seconds for a request's head to arrive; beyond it 408 and the connection is closed."""
    body_timeout_s: float = 60.0
    """Seconds for a request's body to arrive; beyond it 408 and the connection is closed."""
    send_timeout_s: float = 30.0
    """Seconds a client may read nothing while data waits for it; beyond it the connection is dropped."""
    idle_timeout_s: float = 75.0
    """Seconds that a connection may stay open between requests."""
    keep_alive_interval_s: float = 10.0
    """Seconds between the comment lines that keep a silent stream open; 0 = none."""
    resume_grace_s: float = 30.0
    """Seconds that a stream which asked to be resumable goes on when its reader has left."""
    shutdown_timeout_s: float = 30.0
    """Seconds that running requests may take to finish after SIGTERM."""
    tool_call_parser: str | None = None
    """Dialect in which tool calls are read out of answers. Default: the one that the chat template shows."""
    reasoning_parser: str | None = None
    """Markers by which thoughts are told from answers; `none` = no thoughts. Default: the chat template's."""
    normalise_prompts: bool = False
    """Replace meaningless identifiers in the first system message, so that prompts can be reused."""
    strict_fields: bool = False
    """Refuse requests with unknown fields instead of naming these in the answer."""
    max_n: int = 32
    """Largest `n` of a request."""
    max_prompts: int = 128
    """Most prompts in one /v1/completions request."""
    max_stops: int = 64
    """Most stop strings of a request (OpenAI allows 4, agents send more)."""
    key_requests_per_minute: int = 0
    """Generation requests that one key may start per minute; beyond it 429; 0 = no limit."""
    key_concurrency: int = 0
    """Generation requests that one key may have open; beyond it 429; 0 = no limit."""
    access_log: bool = True
    """Log a line for every request (never prompts or keys)."""
    vllm_metric_names: bool = True
    """Also publish the popular metrics under their `vllm:` names, for existing dashboards."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} must be between 0 and 65535")
        for name in ("header_timeout_s", "body_timeout_s", "send_timeout_s", "idle_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be more than 0 seconds")
        for name in (
            "keep_alive_interval_s",
            "resume_grace_s",
            "shutdown_timeout_s",
            "key_requests_per_minute",
            "key_concurrency",
        ):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must not be negative")
        for name in ("max_body_bytes", "max_header_bytes", "max_n", "max_prompts", "max_stops"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be at least 1")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile belong together; only one is set")
        if any(not key for key in (*self.api_keys, *([] if self.admin_key is None else [self.admin_key]))):
            raise ConfigError("an empty string is not a key")


def with_secrets(config: ServerConfig, environ: Mapping[str, str] = os.environ) -> ServerConfig:
    """Add the keys of the environment and of `api_key_file`.

    ARTESIAN_API_KEY (several: separated by commas) adds to `api_keys`; ARTESIAN_ADMIN_KEY is used when no
    `admin_key` is set.

    Raises:
        ConfigError: the key file cannot be read or holds no key.
    """
    keys = [*config.api_keys, *_names(environ.get("ARTESIAN_API_KEY", ""), ",")]
    if config.api_key_file is not None:
        try:
            text = Path(config.api_key_file).read_text(encoding="utf-8")
        except OSError as err:
            raise ConfigError(f"api_key_file={config.api_key_file}: {err.strerror}") from err
        except UnicodeDecodeError as err:
            raise ConfigError(f"api_key_file={config.api_key_file} is not UTF-8 text") from err
        found = [line for line in _names(text, "\n") if not line.startswith("#")]
        if not found:
            raise ConfigError(f"api_key_file={config.api_key_file} holds no key")
        keys += found
    admin_key = config.admin_key or environ.get("ARTESIAN_ADMIN_KEY") or None
    return replace(config, api_keys=tuple(dict.fromkeys(keys)), admin_key=admin_key)


def _names(text: str, separator: str) -> list[str]:
    return [part.strip() for part in text.split(separator) if part.strip()]
