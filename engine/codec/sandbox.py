"""The jinja2 sandbox in which chat templates run, and what bounds a run. It knows no messages.

What is bounded: the time (checked at every loop turn, every call of a function, macro or method, and every
piece of output), the size of the output, `range` (100,000, jinja2's own), and the size of a repeated string
or list and of a power. What is not: one single filter or operator on data of that size cannot be broken
off midway, and a template that doubles a string turn by turn meets memory before time. So templates are the
operator's to choose, never a client's; messages are only data.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_OUTPUT_CHARS = 1 << 26
"""More than the longest context of any model here, by far; and 64 MB at most in memory for ASCII."""

_MAX_REPEATED = 1 << 20
_MAX_POWER = 64


class RenderTimeout(Exception):
    """The template ran out of time or of output."""


class _TimedLoops(CodeGenerator):
    """Compiles `for x in y` as `for x in environment.timed(y)`."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.iter = nodes.Call(nodes.EnvironmentAttribute("timed"), [node.iter], [], None, None)
        super().visit_For(node, frame)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for (as transformers sets it up), bounded."""

    code_generator_class = _TimedLoops
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, clock: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self._run = threading.local()
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: clock().strftime(form)
        del self.globals["lipsum"]

    def render(self, template: jinja2.Template, values: dict[str, Any], timeout_s: float) -> str:
        """Render within `timeout_s` seconds and `MAX_OUTPUT_CHARS`.

        Raises:
            RenderTimeout: one of the two was reached.
            Exception: whatever the template's code raises.
        """
        self._run.deadline = time.monotonic() + timeout_s
        chunks: list[str] = []
        size = 0
        for chunk in template.generate(values):
            self._check_time()
            size += len(chunk)
            if size > MAX_OUTPUT_CHARS:
                raise RenderTimeout(f"The chat template wrote more than {MAX_OUTPUT_CHARS} characters")
            chunks.append(chunk)
        return "".join(chunks)

    def timed(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """The same items, with a look at the clock before each."""
        for item in iterable:
            self._check_time()
            yield item

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._check_time()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > _MAX_REPEATED or abs(right) > _MAX_POWER):
            raise SecurityError(f"{left} ** {right} is too large")
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and len(sequence) * times > _MAX_REPEATED:
                    raise SecurityError(f"a repetition of more than {_MAX_REPEATED} is too large")
        return super().call_binop(context, operator, left, right)

    def _check_time(self) -> None:
        if time.monotonic() > self._run.deadline:
            raise RenderTimeout("The chat template took too long")


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks training targets; here it is its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own, without HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
