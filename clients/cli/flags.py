"""Command-line flags and TOML keys, made from the configuration dataclasses: a knob is declared once, there.

A knob is a field of a (possibly nested) dataclass. Its flag is its name with dashes, its help the text under
the field. Precedence: flag, then file, then the dataclass's default.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from cyclopts import Group, Parameter, Token

from ...server.config import ConfigError

FILLED_IN = frozenset({"model", "served_name", "derived_dir"})
"""Fields that follow from the MODEL a command names."""
ALIASES = {
    "served_model_names": "--served-model-name",
    "api_keys": "--api-key",
    "keep_alive_interval_s": "--sse-keep-alive-interval",
}
"""Names under which users of other servers know a knob."""
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS |= {f"{unit}i": 1 << shift for unit, shift in (("k", 10), ("m", 20), ("g", 30), ("t", 40))}
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
DURATION = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[smhd]?)")
SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kmgt]?i?)b?", re.IGNORECASE)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Knob:
    """One field of a configuration dataclass."""

    name: str
    type: Any
    default: Any
    doc: str


def parse_bytes(text: str) -> int:
    """Return the number of bytes that `512MB`, `2GiB`, `1.5g` or `4096` stand for.

    Raises:
        ValueError: the text is no size.
    """
    match = SIZE.fullmatch(text.strip())
    if match is None or match["unit"].lower() not in UNITS:
        raise ValueError(f"{text!r} is not a size: write 512MB, 2GiB or a number of bytes")
    return int(float(match["number"]) * UNITS[match["unit"].lower()])


def parse_duration(text: str) -> float:
    """Return the seconds that `90s`, `30m`, `72h`, `7d` or `3600` stand for.

    Raises:
        ValueError: the text is no duration.
    """
    match = DURATION.fullmatch(text.strip().lower())
    if match is None or not text.isascii():
        raise ValueError(f"{text!r} is not a duration: write 90s, 30m, 72h, 7d or a number of seconds")
    return float(match["number"]) * SECONDS[match["unit"]]


def knobs(config: type) -> Iterator[Knob]:
    """Yield the fields of a dataclass and of the dataclasses that it holds."""
    types, docs = get_type_hints(config), _field_docs(config)
    for item in fields(config):
        if is_dataclass(types[item.name]):
            yield from knobs(types[item.name])
        elif item.name not in FILLED_IN:
            yield Knob(item.name, types[item.name], _default(item), docs.get(item.name, ""))


def flags_of(config: type, group: Group) -> type:
    """Return a dataclass whose fields are the flags of `config`'s knobs; None stands for "not given"."""
    flags = [
        (knob.name, Annotated[knob.type | None, _parameter(knob, group)], field(default=None))
        for knob in knobs(config)
    ]
    kind = make_dataclass(f"{config.__name__}Flags", flags, frozen=True, kw_only=True)
    kind.__module__ = __name__  # make_dataclass says "types", and cyclopts takes that for a builtin
    return Parameter(name="*")(kind)


def given(flags: object) -> dict[str, Any]:
    """Return the flags that were given."""
    values = {item.name: getattr(flags, item.name) for item in fields(flags)}  # type: ignore[arg-type]
    return {name: value for name, value in values.items() if value is not None}


def read_file(path: Path | None, tables: Mapping[str, type]) -> dict[str, dict[str, Any]]:
    """Return the knobs that a TOML file sets, by table; without a file, none.

    A table sets one configuration dataclass; its keys are the flags' names, with `_` or `-`.

    Raises:
        ConfigError: the file cannot be read, names no knob, or a value has the wrong type.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8")) if path else {}
    except OSError as err:
        raise ConfigError(f"cannot read {path}: {err.strerror}") from err
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise ConfigError(f"{path} is not TOML: {err}") from err
    for name, table in document.items():
        if name not in tables or not isinstance(table, dict):
            raise ConfigError(f"{path}: unknown {name!r}; settings belong in {_listed(tables)}")
    return {name: _read_table(path, document.get(name, {}), tables[name]) for name in tables}


def _read_table(path: Path | None, table: Mapping[str, Any], config: type) -> dict[str, Any]:
    known = {knob.name: knob for knob in knobs(config)}
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{path}: no setting {key!r}{hint}")
        try:
            if isinstance(value, str) and (parse := _parser(name)):
                value = parse(value)
            values[name] = msgspec.convert(value, known[name].type, dec_hook=_from_text)
        except ValueError as err:
            raise ConfigError(f"{path}: {key}: {err}") from err
    return values


def _listed(tables: Mapping[str, type]) -> str:
    return " or ".join(f"[{name}]" for name in tables)


def assemble(config: type[T], values: Mapping[str, Any]) -> T:
    """Build `config`, and the dataclasses it holds, from knobs' values; the rest keeps its default.

    Raises:
        ConfigError: a dataclass refuses its values.
    """
    types, filled = get_type_hints(config), {}
    for item in fields(config):  # type: ignore[arg-type]
        if is_dataclass(types[item.name]):
            filled[item.name] = assemble(types[item.name], values)
        elif item.name in values:
            filled[item.name] = values[item.name]
    try:
        return config(**filled)
    except ValueError as err:
        raise ConfigError(str(err)) from err


def _parameter(knob: Knob, group: Group) -> Parameter:
    shown = _shown(knob)
    names = [f"--{knob.name.replace('_', '-')}", *([ALIASES[knob.name]] if knob.name in ALIASES else [])]
    return Parameter(
        name=names,
        group=group,
        help=f"{knob.doc} [default: {shown}]" if shown else knob.doc,
        show_default=False,
        converter=_converter(_parser(knob.name)),
        negative_iterable=(),
    )


def _shown(knob: Knob) -> str:
    """The default as one would type it; empty if there is nothing to say."""
    if knob.default in (None, "", ()):
        return ""
    if isinstance(knob.default, bool):
        return "on" if knob.default else "off"
    if knob.name.endswith("_bytes"):
        for unit in ("GiB", "MiB", "KiB"):
            if knob.default and knob.default % UNITS[unit[:-1].lower()] == 0:
                return f"{knob.default // UNITS[unit[:-1].lower()]}{unit}"
    if knob.name.endswith("_ttl"):
        return f"{knob.default / 3600:g}h"
    return str(knob.default)


def _parser(name: str) -> Callable[[str], float] | None:
    """What reads a knob's text, if its unit has spellings of its own."""
    return parse_bytes if name.endswith("_bytes") else parse_duration if name.endswith("_ttl") else None


def _converter(parse: Callable[[str], float] | None) -> Callable[[Any, list[Token]], float] | None:
    return None if parse is None else lambda _type, tokens: parse(tokens[0].value)


def _from_text(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value).expanduser()
    raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")


def _default(item: Field[Any]) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default


def _field_docs(config: type) -> dict[str, str]:
    """The strings that stand under the fields of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for above, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr):
            if isinstance(above.target, ast.Name) and isinstance(below.value, ast.Constant):
                docs[above.target.id] = " ".join(str(below.value.value).split())
    return docs
