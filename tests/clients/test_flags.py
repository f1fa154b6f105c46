"""Flags and file settings come from the configuration dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from cyclopts import App, Group

from artesian.cache.config import CacheConfig
from artesian.clients.cli.flags import (
    assemble,
    flags_of,
    given,
    knobs,
    parse_bytes,
    parse_duration,
    read_file,
)
from artesian.clients.cli.settings import EngineFlags, ServerFlags, configure
from artesian.server.config import ConfigError


@dataclass(frozen=True)
class Inner:
    """Held by `Outer`."""

    arena_bytes: int = 1 << 20
    """Bytes of
    something."""
    eager: bool = True


@dataclass(frozen=True)
class Outer:
    """A configuration as rooms write them."""

    model: Path
    mode: Literal["fast", "exact"] = "fast"
    names: tuple[str, ...] = ()
    folder: Path | None = None
    inner: Inner = Inner()

    def __post_init__(self) -> None:
        if len(self.names) > 2:
            raise ConfigError("names: at most 2")


def _parse(*arguments: str) -> dict[str, object]:
    flags_type = flags_of(Outer, Group("Outer"))
    app = App()

    def command(flags: object = None) -> dict[str, object]:
        return given(flags) if flags else {}

    command.__annotations__["flags"] = flags_type | None
    app.default(command)
    values = app(list(arguments), exit_on_error=False, print_error=False, result_action="return_value")
    assert isinstance(values, dict)
    return values


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("512MB", 512_000_000), ("2GiB", 2 << 30), ("1.5g", 1_500_000_000), ("8 KiB", 8192)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "many", "-1", "5XB", "1e9", "12 MBs"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("72h", 259200), ("7d", 604800), ("60", 60), ("1.5 H", 5400)],
)
def test_durations_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1h", "3w", "1e3s", "h", "\u0663h", "inf", "nan"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


def test_knobs_of_held_dataclasses_are_flat_and_carry_the_text_under_the_field() -> None:
    found = {knob.name: knob for knob in knobs(Outer)}
    assert list(found) == ["mode", "names", "folder", "arena_bytes", "eager"]
    assert found["arena_bytes"].doc == "Bytes of something."


def test_only_given_flags_count() -> None:
    assert _parse() == {}
    assert _parse("--no-eager", "--arena-bytes", "2KiB", "--names", "a", "--names", "b") == {
        "eager": False,
        "arena_bytes": 2048,
        "names": ("a", "b"),
    }


def test_knobs_are_put_where_they_belong() -> None:
    built = assemble(Outer, {"model": Path("m"), "eager": False, "mode": "exact"})
    assert built == Outer(Path("m"), mode="exact", inner=Inner(eager=False))


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "artesian.toml"
    path.write_text(text)
    return path


def test_a_file_sets_what_flags_set(tmp_path: Path) -> None:
    path = _file(tmp_path, '[outer]\narena-bytes = "1GiB"\nmode = "exact"\nfolder = "/x"\nnames = ["a"]\n')
    assert read_file(path, {"outer": Outer}) == {
        "outer": {"arena_bytes": 1 << 30, "mode": "exact", "folder": Path("/x"), "names": ("a",)}
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[outer", "is not TOML"),
        ("mode = 'fast'", r"unknown 'mode'; settings belong in \[outer\]"),
        ("[outer]\nmoed = 'fast'", "no setting 'moed'; did you mean 'mode'"),
        ("[outer]\nmode = 'slow'", "mode: Invalid enum value 'slow'"),
        ("[outer]\neager = 1", "eager: Expected `bool`, got `int`"),
        ("[outer]\narena_bytes = '1 ton'", "arena_bytes: '1 ton' is not a size"),
        ("[outer]\nmodel = 'm'", "no setting 'model'"),
    ],
)
def test_a_file_that_cannot_be_used_says_where(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_file(_file(tmp_path, text), {"outer": Outer})


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    model.touch()
    path = _file(tmp_path, "[server]\nport = 1\nmax_n = 3\n[engine]\nthreads = 5\nmax-num-seqs = 6\n")
    server, engine = configure(
        str(model),
        path,
        None,
        ServerFlags(port=2),  # type: ignore[call-arg]
        EngineFlags(max_num_seqs=7),  # type: ignore[call-arg]
    )
    assert (server.port, server.max_n, server.host) == (2, 3, "127.0.0.1")
    assert (engine.threads, engine.max_num_seqs, engine.model) == (5, 7, model)


def _configured(tmp_path: Path, text: str = "", **flags: object) -> CacheConfig:
    """The cache's configuration that a file and flags give."""
    model = tmp_path / "tiny.gguf"
    model.touch()
    engine = EngineFlags(**flags)
    return configure(str(model), _file(tmp_path, text), None, None, engine)[1].cache


@pytest.mark.parametrize(
    ("text", "seconds"), [("'90s'", 90), ("'7d'", 604800), ("3600", 3600), ("90.5", 90.5)]
)
def test_a_file_sets_durations_as_flags_do(text: str, seconds: float, tmp_path: Path) -> None:
    assert _configured(tmp_path, f"[engine]\ncache_ttl = {text}\n").cache_ttl == seconds


@pytest.mark.parametrize("text", ["'soon'", "'0s'", "'9999d'", "true", "-5"])
def test_a_file_with_a_bad_duration_says_which(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cache_ttl"):
        _configured(tmp_path, f"[engine]\ncache_ttl = {text}\n")


def test_the_disk_cache_has_a_place_unless_one_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARTESIAN_HOME", str(tmp_path / "home"))
    assert _configured(tmp_path).cache_dir == tmp_path / "home" / "prompts"
    assert _configured(tmp_path, "[engine]\ncache-dir = '/x'\n").cache_dir == Path("/x")
    assert _configured(tmp_path, cache_dir=Path("/y")).cache_dir == Path("/y")
    assert _configured(tmp_path).disk_cache and not _configured(tmp_path, disk_cache=False).disk_cache


def test_flags_of_the_cache_are_read_and_shown_as_people_write_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    app = App()

    @app.default
    def command(flags: EngineFlags | None = None) -> dict[str, object]:
        return given(flags) if flags else {}

    arguments = (
        "--no-disk-cache --cache-ttl 30m --cache-bytes 50GB --cache-compression zstd --cache-host-bytes 1GiB"
    )
    assert app(arguments.split(), result_action="return_value") == {
        "disk_cache": False,
        "cache_ttl": 1800,
        "cache_bytes": 50 * 10**9,
        "cache_compression": "zstd",
        "cache_host_bytes": 1 << 30,
    }
    app(["--help"], result_action="return_value")
    shown = " ".join(capsys.readouterr().out.split())
    assert "--cache-ttl" in shown and "72h" in shown and "--no-disk-cache" in shown
