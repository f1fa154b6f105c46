"""Grammars made ready to follow: compiled off the loop, within bounds, and kept for the next request."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from ..codec.tokenizer import Tokenizer
from ..errors import EngineOverloaded, GrammarRefused
from .closing import LONGEST_WAY, Closings
from .mask import Matcher
from .members import Members, read_members
from .schema import Examined, Finding, SchemaReport, children, examine
from .spec import Choice, Grammar, JsonSchema, Lark, Regex, Schema, Tags
from .tags import tags_to_lark
from .vocabulary import Vocabulary, read_vocabulary

T = TypeVar("T")

COMPILE_LIMIT_S = 4.0
"""A client hears of a grammar that takes longer; the samples of two benchmarks stay below 0.1 s."""
COMPILE_THREADS = 2
MAX_WAITING = 32
MAX_SOURCE_CHARS = 256 * 1024
KEPT = 128
"""Compiled grammars; one takes from 50 KB to a few MB."""
MAX_CHOICES = 10_000
MAX_WHITESPACE = 16
"""Whitespace in a row, between the tokens of JSON: a line's end and what indents seven levels by two."""
LOCATE_LIMIT_S = 0.5
MAX_ERROR_CHARS = 300

JSON_OPTIONS = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": rf"[ \t\n\r]{{1,{MAX_WHITESPACE}}}",
    "lenient": False,
}


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar at its start."""

    start: LLMatcher
    closings: Closings
    shortest: int | None
    """Tokens of a short answer, None if none was found."""
    warnings: tuple[str, ...]
    """What of it is not enforced, in words."""
    repeats: bool = False
    """Behind an end another answer may begin."""

    def matcher(self) -> Matcher:
        """A new follower, for one choice."""
        return Matcher(self.start.deep_copy(), self.closings, self.shortest, repeats=self.repeats)


@dataclass(frozen=True, slots=True)
class CheckedSchema:
    """A schema that was read, in the library's form, and what came of compiling it."""

    examined: Examined
    source: dict[str, Any]
    state: LLMatcher | None
    error: str


class GrammarCompiler:
    """Compiles for one vocabulary. `get` and `close` are called on the loop's thread, as `prepare` is."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, tuple(eos_token_ids)
        self._read: Vocabulary | None = None
        self._read_lock = threading.Lock()
        self._limits = LLParserLimits(verbose_errors=False)
        self._pool = ThreadPoolExecutor(COMPILE_THREADS, "grammar")
        self._kept: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._running: dict[bytes, _Work] = {}

    async def prepare(self, grammar: Grammar) -> CompiledGrammar:
        """Compile on a thread, once for all who ask meanwhile.

        Raises:
            GrammarRefused: it is wrong, asks for what cannot be enforced, or takes too long.
            EngineOverloaded: too many others are being compiled.
        """
        key = _key(grammar)
        compiled = self._kept.get(key)
        if compiled is None:
            compiled = await self._off_loop(key, lambda: self.compile(grammar))
        self._keep(key, compiled)
        return compiled

    async def report(self, schema: Schema, *, strict: bool) -> SchemaReport:
        """Say what becomes of a schema's keywords.

        Raises:
            EngineOverloaded: as `prepare`.
        """
        key = _key(JsonSchema(schema, strict)) + b"report"
        return await self._off_loop(key, lambda: self._report(schema, strict))

    def get(self, grammar: Grammar) -> CompiledGrammar:
        """A prepared grammar; one that is not kept (any more) is compiled here and now.

        Raises:
            GrammarRefused: see `prepare`.
        """
        key = _key(grammar)
        compiled = self._kept.get(key)
        if compiled is None:
            compiled = self.compile(grammar)
            self._keep(key, compiled)
        return compiled

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile; blocking, on any thread, at most a few seconds.

        Raises:
            GrammarRefused: see `prepare`.
        """
        match grammar:
            case JsonSchema():
                return self._json(grammar.schema, grammar.strict)
            case Regex():
                return self._whole(grammar.pattern, LLMatcher.grammar_from_regex, "the regex")
            case Choice():
                return self._whole(_choice_lark(grammar.texts), LLMatcher.grammar_from_lark, "the choice")
            case Lark():
                lark = _lark(grammar.source)
                return self._whole(lark, LLMatcher.grammar_from_lark, "the grammar")
            case Tags():
                return self._tags(grammar)

    def _state(self, source: str) -> LLMatcher:
        """The library's matcher of a grammar in its own form; `is_error()` if it is wrong."""
        return LLMatcher(self.vocabulary.view, source, log_level=0, limits=self._limits)

    @property
    def vocabulary(self) -> Vocabulary:
        """Built at the first use."""
        with self._read_lock:
            if self._read is None:
                self._read = read_vocabulary(self._tokenizer, self._vocab_size, self._eos)
            return self._read

    # -- schemas -----------------------------------------------------------------------------------

    def check(self, schema: Schema, strict: bool) -> CheckedSchema:
        """Read a schema and compile it; not strict, `oneOf` may be taken for `anyOf` (which is then told).

        Raises:
            GrammarRefused: it cannot be compiled, or is strict and has what cannot be enforced.
        """
        examined = examine(schema)
        refused = examined.having("refused")
        if strict and refused:
            raise GrammarRefused(refused[0].detail, pointer=refused[0].pointer)
        checked = self._compiled(examined, coerced=False)
        if not checked.error:
            return checked
        if not strict and any(f.keyword == "oneOf" and f.status == "enforced" for f in examined.findings):
            loose = self._compiled(_coerced(examined), coerced=True)
            if not loose.error:
                return loose
        pointer, message = self._locate(examined.schema, checked.error)
        raise GrammarRefused(message, pointer=pointer)

    def _report(self, schema: Schema, strict: bool) -> SchemaReport:
        findings: tuple[Finding, ...] = ()
        try:
            findings = examine(schema).findings
            checked = self.check(schema, strict)
        except GrammarRefused as err:
            return SchemaReport(False, findings, (), str(err), err.pointer)
        return SchemaReport(True, checked.examined.findings, _warnings(checked.examined))

    def _compiled(self, examined: Examined, *, coerced: bool) -> CheckedSchema:
        source = _json_source(examined.schema, coerced)
        try:
            state = self._state(_grammars(json_0=source))
        except ValueError as err:  # what the library's JSON reader refuses
            return CheckedSchema(examined, source, None, str(err))
        return CheckedSchema(examined, source, state, _error_of(state))

    def _locate(self, root: Schema, error: str) -> tuple[str, str]:
        """The deepest subschema that fails by itself, and why."""
        if isinstance(root, bool):
            return "", error
        shared: dict[str, Any] = {
            name: root[name] for name in ("$schema", "$id", "$defs", "definitions") if name in root
        }
        deadline = time.monotonic() + LOCATE_LIMIT_S
        pointer, node, seen = "", root, {""}
        while True:
            for at, child in children(node, pointer, root):
                if at in seen or time.monotonic() > deadline:
                    continue
                seen.add(at)
                found = self._compiled(Examined({**shared, **child}, ()), coerced=False).error
                if found:
                    pointer, node, error = at, child, found
                    break
            else:
                return pointer, error

    # -- kinds -------------------------------------------------------------------------------------

    def _json(self, schema: Schema, strict: bool) -> CompiledGrammar:
        checked = self.check(schema, strict)
        assert checked.state is not None, checked.error
        return self._finish(checked.state, _warnings(checked.examined))

    def _tags(self, tags: Tags) -> CompiledGrammar:
        sources: dict[str, dict[str, Any]] = {}
        warnings: list[str] = []
        members: dict[int, Members] = {}
        for number, tag in enumerate(tags.tags):
            try:
                checked = self.check(tag.schema, tag.strict)
                told = _warnings(checked.examined)
                if tag.members is None:
                    sources[f"json_{number}"] = checked.source
                else:
                    members[number] = read_members(tag.schema)
                    told += _loose(members[number], tag.strict)
                    sources |= self._member_sources(f"json_{number}", members[number])
            except GrammarRefused as err:
                err.tag = number
                raise
            warnings += [f"{tag.begin.strip()} {text}" for text in told]
        lark = tags_to_lark(tags, self._tokenizer, self._eos, members)
        state = self._state(_grammars(lark, **sources))
        return self._finish(state, tuple(warnings), repeats=tags.required and tags.parallel)

    def _member_sources(self, name: str, members: Members) -> dict[str, dict[str, Any]]:
        """The grammars of the members' JSON."""
        if members.may_have_any:
            return {f"{name}_0": self.check(True, False).source}
        sources: dict[str, dict[str, Any]] = {}
        for j, member in enumerate(members.named):
            if member.schema is None:
                continue
            try:
                sources[f"{name}_{j}"] = self.check(member.schema, False).source
            except GrammarRefused as err:
                err.pointer = f"/properties/{member.name}{err.pointer or ''}"
                raise
        return sources

    def _whole(self, source: str, form: Callable[[str], str], what: str) -> CompiledGrammar:
        _check_length(source, what)
        state = self._state(form(source))
        if state.is_error():
            raise GrammarRefused(f"{what} cannot be compiled: {_error_of(state)}")
        return self._finish(state, ())

    def _finish(
        self, state: LLMatcher, warnings: tuple[str, ...], *, repeats: bool = False
    ) -> CompiledGrammar:
        if not state.is_error():
            state.compute_bitmask()  # the dearest one: most of what later ones need is kept
        if state.is_error():
            raise GrammarRefused(f"the grammar cannot be compiled: {_error_of(state)}")
        closings = self.vocabulary.closings
        way = closings.way(state, LONGEST_WAY)
        return CompiledGrammar(state, closings, None if way is None else len(way), warnings, repeats)

    # -- threads and keeping -----------------------------------------------------------------------

    async def _off_loop(self, key: bytes, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        if self._read is None:
            await loop.run_in_executor(self._pool, lambda: self.vocabulary)
        running = self._running.get(key)
        if running is None:
            if len(self._running) >= MAX_WAITING:
                raise EngineOverloaded("Too many grammars are being compiled", 1.0)
            running = self._running[key] = _Work(work)
            running.future = loop.run_in_executor(self._pool, running.run)
            running.future.add_done_callback(lambda future: self._ended(key, future))
        try:
            result: T = await asyncio.wait_for(asyncio.shield(running.future), COMPILE_LIMIT_S)
            return result
        except TimeoutError:
            if not running.started:
                raise EngineOverloaded("The grammars before this one take long to compile", 1.0) from None
            raise GrammarRefused(f"the grammar takes more than {COMPILE_LIMIT_S:g} s to compile") from None

    def _ended(self, key: bytes, future: asyncio.Future[Any]) -> None:
        del self._running[key]
        if not future.cancelled():
            future.exception()  # whoever waited knows it; after a timeout nobody did

    def _keep(self, key: bytes, compiled: CompiledGrammar) -> None:
        self._kept[key] = compiled
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)


class _Work:
    """What runs or waits for a thread."""

    future: asyncio.Future[Any]

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.started = False

    def run(self) -> Any:
        self.started = True
        return self._work()


_encode = msgspec.json.Encoder().encode


def _key(grammar: Grammar) -> bytes:
    return hashlib.blake2b(_encode(grammar), digest_size=16).digest()


def _grammars(lark: str | None = None, **json_sources: dict[str, Any]) -> str:
    """The library's form of several grammars; the first one is the whole answer's."""
    parts: list[dict[str, Any]] = [] if lark is None else [{"name": "answer", "lark_grammar": lark}]
    parts += [{"name": name, "json_schema": source} for name, source in json_sources.items()]
    return json.dumps({"grammars": parts}, ensure_ascii=False)


def _json_source(schema: Schema, coerced: bool) -> dict[str, Any]:
    if schema is False:
        raise GrammarRefused("`false` allows no value", pointer="")
    whole = {} if schema is True else schema
    return {**whole, "x-guidance": {**JSON_OPTIONS, "coerce_one_of": coerced}}


def _coerced(examined: Examined) -> Examined:
    detail = "`oneOf` is taken for `anyOf`: an answer may match more than one of its schemas"
    return Examined(
        examined.schema,
        tuple(
            Finding(f.pointer, f.keyword, "approximated", detail) if f.keyword == "oneOf" else f
            for f in examined.findings
        ),
    )


def _warnings(examined: Examined) -> tuple[str, ...]:
    loose = [f for f in examined.findings if f.status in ("refused", "approximated")]
    return tuple(f"{f.pointer}: {f.detail}" for f in loose + examined.unknown())


def _loose(members: Members, strict: bool) -> tuple[str, ...]:
    """What only the members' forms make unenforceable.

    Raises:
        GrammarRefused: there is something, and it is strict.
    """
    told: list[str] = []
    for pointer in members.loose:
        detail = "cannot be enforced in this model's calls"
        if strict:
            raise GrammarRefused(detail, pointer=pointer)
        told.append(f"{pointer}: {detail}")
    return tuple(told)


def _choice_lark(texts: Sequence[str]) -> str:
    if not texts:
        raise GrammarRefused("the choice is empty: no answer is allowed")
    if len(texts) > MAX_CHOICES:
        raise GrammarRefused(f"the choice has more than {MAX_CHOICES} texts")
    literals = [json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts) if text]
    if not literals:
        raise GrammarRefused("the choice has only empty texts")
    return f"start: ({' | '.join(literals)}){'?' if '' in texts else ''}"


def _check_length(source: str, what: str) -> None:
    if len(source) > MAX_SOURCE_CHARS:
        raise GrammarRefused(f"{what} has more than {MAX_SOURCE_CHARS} characters")


def _lark(source: str) -> str:
    _check_length(source, "the grammar")
    if not source.strip():
        raise GrammarRefused("the grammar is empty")
    try:
        return str(any_to_lark(source))
    except Exception as err:  # the library's translator of GBNF has no class of its own
        raise GrammarRefused(f"the grammar cannot be read: {err}") from err


def _error_of(state: LLMatcher) -> str:
    """The library's words for what is wrong, without its drawings; empty if nothing is."""
    text = str(state.get_error())
    _, marker, last = text.rpartition("error: ")
    return (last if marker else text).partition("\n")[0].strip()[:MAX_ERROR_CHARS]
