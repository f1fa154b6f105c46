"""How a dialect writes calls, told in fixed texts, so that a grammar can hold the model to them."""

from __future__ import annotations

import json

import msgspec


class CallForms(msgspec.Struct, frozen=True):
    """A call is `begin`, the arguments as one JSON value, `end`."""

    trigger: str
    """Every `begin` starts with it (or the `opening`), and nothing else does."""
    begin: str
    """With `{name}`, or `{quoted}` for the name as a JSON string."""
    end: str
    between: str = ""
    """What stands between two calls that follow each other."""
    opening: str = ""
    """What stands in front of the first of them; "": calls stand alone."""
    closing: str = ""
    """What stands behind the last, if there is an opening."""

    def begin_of(self, name: str) -> str:
        """The text that opens a call of this function."""
        return self.begin.format(name=name, quoted=json.dumps(name))
