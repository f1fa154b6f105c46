"""Typed look-ups in a model file's metadata, whose every failure names the file and the field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import ModelError


@dataclass(frozen=True, slots=True)
class Fields:
    """A file's metadata. A field that is absent or null takes the default; without one it is an error.

    Raises:
        ModelError: from every method, naming the file and the field, what was expected and what is there.
    """

    file: str
    values: Mapping[str, Any]
    prefix: str = ""

    def has(self, name: str) -> bool:
        return self.values.get(self.prefix + name) is not None

    def raw(self, name: str) -> Any:
        return self.values.get(self.prefix + name)

    def integer(self, name: str, default: int | None = None, *, minimum: int = 0) -> int:
        value = self._value(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self._refuse(name, f"an integer >= {minimum}", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self._refuse(name, "a finite number", value)
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if value <= 0:
            self._refuse(name, "a number > 0", value)
        return value

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            self._refuse(name, "true or false", value)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            self._refuse(name, "a string", value)
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self._value(name, None)
        if not isinstance(value, Sequence) or not all(
            isinstance(entry, int | float) and not isinstance(entry, bool) for entry in value
        ):
            self._refuse(name, "a list of numbers", value)
        return tuple(float(entry) for entry in value)

    def texts(self, name: str) -> list[str]:
        value = self._value(name, None)
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            self._refuse(name, "a list of strings", value)
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, a list of ids, or nothing (an empty tuple)."""
        value = self.raw(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in ids):
            self._refuse(name, "a token id or a list of them", value)
        return tuple(ids)

    def section(self, name: str) -> Fields | None:
        """The object under `name`, or None where there is none."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self._refuse(name, "an object", value)
        return Fields(
            self.file,
            {f"{self.prefix}{name}.{key}": entry for key, entry in value.items()},
            f"{self.prefix}{name}.",
        )

    def refuse(self, name: str, why: str) -> NoReturn:
        """Refuse the file for a field's value that is well formed but cannot be served."""
        raise ModelError(f"{self.file}: {self.prefix}{name} = {_short(self.raw(name))}: {why}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.raw(name)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self.file}: the field {self.prefix}{name} is missing")
        return default

    def _refuse(self, name: str, expected: str, got: object) -> NoReturn:
        raise ModelError(f"{self.file}: {self.prefix}{name} must be {expected}, got {_short(got)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
