"""How a dialect writes calls, told in fixed texts, so that a grammar can hold the model to them."""

from __future__ import annotations

import json

import msgspec


class MemberForms(msgspec.Struct, frozen=True):
    """An argument is `begin`, a string as it is or another value as JSON, `end`."""

    begin: str
    """With `{name}`, and `{is_string}` for true or false."""
    end: str
    none: str = ""
    """What may stand in the place of no arguments."""

    def begin_of(self, name: str, *, is_string: bool) -> str:
        """The text that opens an argument."""
        return self.begin.format(name=name, is_string="true" if is_string else "false")


class CallForms(msgspec.Struct, frozen=True):
    """A call is `begin`, the arguments, `end`. Without `members` the arguments are one JSON value."""

    trigger: str
    """Every `begin` starts with it, or `opening` has it if there is one, and nothing else does."""
    begin: str
    """With `{name}`, or `{quoted}` for the name as a JSON string."""
    end: str
    between: str = ""
    """What stands between two calls that follow each other."""
    members: MemberForms | None = None
    is_own: bool = True
    """False: left free, the model writes calls otherwise; it is held to this only where it must call."""
    opening: str = ""
    """What stands once before an answer's calls, of which there is then one row only."""
    closing: str = ""
    """What stands behind them."""

    def begin_of(self, name: str) -> str:
        """The text that opens a call of this function."""
        return self.begin.format(name=name, quoted=json.dumps(name))
