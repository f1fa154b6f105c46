"""Grammars made ready to follow: compiled off the loop, within bounds, and kept for the next request."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from ..codec.tokenizer import Tokenizer
from ..errors import EngineOverloaded, GrammarRefused
from .check import Part, SchemaChecker, error_of, json_part, lark_part, library_form, warnings_of
from .closing import LONGEST_WAY, Closings
from .mask import Matcher
from .members import Members, read_members
from .schema import SchemaReport
from .spec import Choice, Grammar, JsonSchema, Lark, Regex, Schema, Tags, Thoughtful
from .tags import tags_to_lark
from .terms import terms_of
from .thought import Marks, thought_to_lark
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


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar at its start."""

    start: LLMatcher
    parts: tuple[Part, ...]
    """In the library's form."""
    closings: Closings
    shortest: int | None
    """Tokens of a short answer, None if none was found."""
    warnings: tuple[str, ...]
    """What of it is not enforced, in words."""
    is_free: bool = False
    """It has free text, or is whole at every moment."""
    repeats: bool = False
    """Behind an end another answer may begin."""
    marks: Marks | None = None
    """Of the thought before it."""

    def matcher(self) -> Matcher:
        """A new follower, for one choice."""
        return Matcher(
            self.start.deep_copy(),
            self.closings,
            self.shortest,
            is_free=self.is_free,
            repeats=self.repeats,
            marks=self.marks,
        )


class GrammarCompiler:
    """Compiles for one vocabulary. `get` and `close` are called on the loop's thread, as `prepare` is."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, tuple(eos_token_ids)
        self._read: Vocabulary | None = None
        self._read_lock = threading.Lock()
        self._limits = LLParserLimits(verbose_errors=False)
        self.schemas = SchemaChecker(self._state)
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
                return self._whole(_regex_lark(grammar.pattern), "the regex")
            case Choice():
                return self._whole(_choice_lark(grammar.texts), "the choice")
            case Lark():
                return self._whole(_lark(grammar.source), "the grammar")
            case Tags():
                return self._tags(grammar)
            case Thoughtful():
                return self._thoughtful(grammar)

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

    async def report(self, schema: Schema, *, strict: bool) -> SchemaReport:
        """Say what becomes of a schema's keywords.

        Raises:
            EngineOverloaded: as `prepare`.
        """
        key = _key(JsonSchema(schema, strict)) + b"report"
        return await self._off_loop(key, lambda: self.schemas.report(schema, strict))

    # -- kinds -------------------------------------------------------------------------------------

    def _json(self, schema: Schema, strict: bool) -> CompiledGrammar:
        checked = self.schemas.check(schema, strict)
        assert checked.state is not None, checked.error
        warnings = warnings_of(checked.examined)
        return self._finish([json_part("answer", checked.source)], warnings, checked.state)

    def _tags(self, tags: Tags) -> CompiledGrammar:
        sources: dict[str, dict[str, Any]] = {}
        warnings: list[str] = []
        members: dict[int, Members] = {}
        for number, tag in enumerate(tags.tags):
            try:
                checked = self.schemas.check(tag.schema, tag.strict)
                told = warnings_of(checked.examined)
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
        parts = [lark_part("answer", lark), *(json_part(name, source) for name, source in sources.items())]
        if tags.text is not None:
            text = self.compile(tags.text)
            parts += _named(text.parts, "text")
            warnings += text.warnings
        return self._finish(parts, warnings, repeats=tags.parallel and not tags.is_free)

    def _thoughtful(self, thought: Thoughtful) -> CompiledGrammar:
        answer = self.compile(thought.answer)
        if thought.open and isinstance(thought.answer, Tags) and thought.answer.is_free:
            return answer  # its free text may hold a thought as it is, though a trigger there opens a form
        lark = thought_to_lark(thought, terms_of(self._tokenizer), "inner")
        parts = [lark_part("answer", lark), *_named(answer.parts, "inner")]
        marks = Marks(thought, self._tokenizer)
        whole = self._finish(parts, answer.warnings, repeats=answer.repeats, marks=marks)
        shortest = None if answer.shortest is None else answer.shortest + len(marks.way_out)
        return replace(whole, is_free=answer.is_free, shortest=shortest)

    def _member_sources(self, name: str, members: Members) -> dict[str, dict[str, Any]]:
        """The grammars of the members' JSON."""
        if members.may_have_any:
            return {f"{name}_0": self.schemas.check(True, False).source}
        sources: dict[str, dict[str, Any]] = {}
        for j, member in enumerate(members.named):
            if member.schema is None:
                continue
            try:
                sources[f"{name}_{j}"] = self.schemas.check(member.schema, False).source
            except GrammarRefused as err:
                err.pointer = f"/properties/{member.name}{err.pointer or ''}"
                raise
        return sources

    def _whole(self, lark: str, what: str) -> CompiledGrammar:
        parts = [lark_part("answer", lark)]
        state = self._state(library_form(parts))
        if state.is_error():
            raise GrammarRefused(f"{what} cannot be compiled: {error_of(state)}")
        return self._finish(parts, (), state)

    def _finish(
        self,
        parts: Sequence[Part],
        warnings: Sequence[str],
        state: LLMatcher | None = None,
        *,
        repeats: bool = False,
        marks: Marks | None = None,
    ) -> CompiledGrammar:
        state = state or self._state(library_form(parts))
        if not state.is_error():
            state.compute_bitmask()  # the dearest one: most of what later ones need is kept
        if state.is_error():
            raise GrammarRefused(f"the grammar cannot be compiled: {error_of(state)}")
        closings = self.vocabulary.closings
        way = None if marks else closings.way(state, LONGEST_WAY)
        shortest = None if way is None else len(way)
        return CompiledGrammar(
            state, tuple(parts), closings, shortest, tuple(warnings), shortest == 1, repeats, marks
        )

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


def _named(parts: Sequence[Part], name: str) -> list[Part]:
    """The same grammar under another name."""
    return [{**parts[0], "name": name}, *parts[1:]]


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


def _regex_lark(pattern: str) -> str:
    _check_length(pattern, "the regex")
    lark: str = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
    return lark


def _choice_lark(texts: Sequence[str]) -> str:
    if not texts:
        raise GrammarRefused("the choice is empty: no answer is allowed")
    if len(texts) > MAX_CHOICES:
        raise GrammarRefused(f"the choice has more than {MAX_CHOICES} texts")
    literals = [json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts) if text]
    if not literals:
        raise GrammarRefused("the choice has only empty texts")
    lark = f"start: ({' | '.join(literals)}){'?' if '' in texts else ''}"
    _check_length(lark, "the choice")
    return lark


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
