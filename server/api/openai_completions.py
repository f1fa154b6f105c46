"""OpenAI's `/v1/completions`: plain prompts of text or tokens, several at once, with echo."""

from __future__ import annotations

import time
from secrets import token_hex
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ...engine import ContextTooLong, Delta, GenerationRequest, ModelInfo, PositionLogprobs
from ...engine.codec import Codec
from ..errors import BadRequest
from ..middleware import request_info
from ..service import Service
from ..stream.events import ResponseSteps, Step
from .body import ignored_header
from .cache_report import CacheDiagnostics, PromptDiagnosis
from .chat_messages import ChatPrompt
from .legacy_logprobs import GeneratedOffsets, LegacyLogprobs, prompt_part
from .prompt_cache import cache_policy
from .respond import isolation_salt, off_loop, stream_response, submit, wants_resume, whole_response
from .sampling import MAX_LOGPROBS, read_fields, to_params, token_ids
from .structured import StructuredFields, asked_grammar, prepare
from .types import PromptLogprobs, UsageBody, encode, prompt_logprobs_body, usage_body

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


PromptForms: TypeAlias = str | list[str | int | list[int]]


class CompletionRequest(StructuredFields, kw_only=True):
    """The body of a request."""

    prompt: PromptForms
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    """0 needs `echo` or `prompt_logprobs`: then only the prompt is computed."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    add_special_tokens: bool | None = None


class Prompt(NamedTuple):
    """One prompt, as tokens and as the text that `echo` shows."""

    token_ids: list[int]
    text: str


def to_prompts(fields: CompletionRequest, codec: Codec, model: ModelInfo, limit: int) -> list[Prompt]:
    """Return the prompts of a request, whichever of the four forms they have.

    Raises:
        BadRequest: an empty prompt, mixed forms, too many, a token out of the vocabulary.
        ContextTooLong: the first prompt that is; the ones behind it are not read.
    """
    max_model_len = model.max_model_len
    rows = prompt_rows(fields.prompt, "prompt", limit)
    prompts: list[Prompt] = []
    for i, row in enumerate(rows):
        name = "prompt" if len(rows) == 1 else f"prompt[{i}]"
        prompt: Prompt
        if isinstance(row, str):
            add_special = fields.add_special_tokens is not False
            ids = codec.encode_prompt(row, add_special=add_special, limit=max_model_len)
            prompt = Prompt(ids, row)
        else:
            ids = list(token_ids(row, model.vocab_size, name))
            prompt = Prompt(ids, codec.detokenize(ids) if fields.echo else "")
        if not prompt.token_ids:
            raise _invalid(name, f"{name} is empty: there is no token to continue from")
        if len(prompt.token_ids) > max_model_len:
            raise ContextTooLong(len(prompt.token_ids), max_model_len, param="prompt")
        prompts.append(prompt)
    return prompts


def prompt_rows(given: PromptForms, name: str, limit: int) -> list[str | list[int]]:
    """Return the prompts that a field holds, each a text or tokens.

    Raises:
        BadRequest: mixed forms, none or too many.
    """
    rows: list[str | list[int]]
    if isinstance(given, str):
        rows = [given]
    elif all(isinstance(item, str) for item in given):
        rows = [item for item in given if isinstance(item, str)]
    elif all(isinstance(item, int) for item in given):
        rows = [[item for item in given if isinstance(item, int)]]
    elif all(isinstance(item, list) for item in given):
        rows = [item for item in given if isinstance(item, list)]
    else:
        raise _invalid(name, f"{name} mixes texts, tokens and lists of tokens; give one form")
    if not rows:
        raise _invalid(name, f"{name} is an empty list")
    if len(rows) > limit:
        raise _invalid(name, f"{name} has {len(rows)} prompts; this server's limit is {limit}")
    return rows


def _invalid(param: str, message: str) -> BadRequest:
    return BadRequest(message, code="invalid_value", param=param)


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: LegacyLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionAnswer(msgspec.Struct, kw_only=True):
    """The body of a whole answer, and one event of a stream: their form is the same."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageBody | None | UnsetType = UNSET
    prompt_cache_diagnostics: CacheDiagnostics | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class _Answer:
    """What chunks and body have in common; follows each choice's place in its text."""

    def __init__(
        self,
        service: Service,
        fields: CompletionRequest,
        model: str,
        prompts: list[Prompt],
        answer_id: str,
        diagnosis: PromptDiagnosis,
    ) -> None:
        self.diagnosis = diagnosis
        self.codec, self.prompts, self.n = service.codec, prompts, fields.n or 1
        self.id, self.created, self.model = answer_id, int(time.time()), model
        self.fingerprint = service.system_fingerprint
        self.echo = bool(fields.echo)
        self.with_logprobs = fields.logprobs is not None
        self.with_token_ids = bool(fields.return_token_ids)
        self.with_prompt_logprobs = fields.prompt_logprobs is not None
        options = fields.stream_options
        self.with_usage = bool(options and options.include_usage)
        self.with_running_usage = bool(options and options.include_usage and options.continuous_usage_stats)
        self.prompt_logprobs: list[tuple[PositionLogprobs | None, ...] | None] = [None] * len(prompts)
        self._offsets = [
            GeneratedOffsets(
                len(prompt.text) if self.echo else 0, self.codec, fields.skip_special_tokens is not False
            )
            for prompt in prompts
            for _ in range(self.n)
        ]

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    def note_prompts(self, step: Step) -> None:
        """Keep the prompts' logprobs of a step; they belong to all choices of their prompt."""
        for delta in step:
            if delta.prompt_logprobs is not None:
                self.prompt_logprobs[delta.index // self.n] = delta.prompt_logprobs

    def prompt_choice(self, index: int) -> CompletionChoice:
        """Return the part of a choice that comes from its prompt."""
        row = index // self.n
        prompt, positions = self.prompts[row], self.prompt_logprobs[row]
        choice = CompletionChoice(index=index, text=prompt.text if self.echo else "")
        if self.with_logprobs:
            choice.logprobs = LegacyLogprobs()
            if self.echo and positions is not None:
                choice.logprobs = prompt_part(prompt.token_ids, prompt.text, positions, self.codec)
        if self.with_token_ids:
            choice.token_ids, choice.prompt_token_ids = [], prompt.token_ids
        if self.with_prompt_logprobs and positions is not None:
            choice.prompt_logprobs = prompt_logprobs_body(positions, self.codec)
        return choice

    def logprobs_of(self, delta: Delta) -> LegacyLogprobs:
        return self._offsets[delta.index].part(delta.logprobs or ())

    def whole(
        self,
        choices: list[CompletionChoice],
        usage: UsageBody | None | UnsetType,
        warnings: list[str],
        diagnostics: CacheDiagnostics | UnsetType = UNSET,
    ) -> CompletionAnswer:
        return CompletionAnswer(
            id=self.id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=choices,
            usage=usage,
            prompt_cache_diagnostics=diagnostics,
            warnings=warnings or UNSET,
        )


class CompletionChunks:
    """Encodes steps as events."""

    def __init__(self, answer: _Answer, steps: ResponseSteps, warnings: list[str]) -> None:
        self._answer, self._steps, self._warnings = answer, steps, warnings
        self._begun: set[int] = set()
        self._is_plain = not (answer.with_logprobs or answer.with_token_ids)

    def step(self, step: Step) -> list[bytes]:
        answer, events = self._answer, []
        answer.note_prompts(step)
        for delta in step:
            if delta.index not in self._begun:
                self._begun.add(delta.index)
                if answer.echo or answer.with_token_ids or (self._warnings and len(self._begun) == 1):
                    events.append(self._event(answer.prompt_choice(delta.index), self._warnings))
            if delta.text or delta.finish_reason is not None or not self._is_plain:
                events.append(self._event(self._choice(delta), []))
        return events

    async def end(self) -> list[bytes]:
        usage, diagnosis = self._steps.usage, self._answer.diagnosis
        if not self._answer.with_usage:
            diagnosis.remember(usage)
            return []
        return [encode(self._answer.whole([], usage_body(usage), [], await diagnosis.finish(usage)))]

    def _choice(self, delta: Delta) -> CompletionChoice:
        choice = CompletionChoice(index=delta.index, text=delta.text, finish_reason=delta.finish_reason)
        if self._answer.with_logprobs:
            choice.logprobs = self._answer.logprobs_of(delta)
        if self._answer.with_token_ids:
            choice.token_ids = list(delta.token_ids)
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        return choice

    def _event(self, choice: CompletionChoice, warnings: list[str]) -> bytes:
        answer = self._answer
        usage: UsageBody | None | UnsetType = UNSET
        if answer.with_usage:
            usage = usage_body(self._steps.usage) if answer.with_running_usage else None
        return encode(answer.whole([choice], usage, warnings))


class CompletionBody:
    """Collects steps into the body of a whole answer."""

    def __init__(self, answer: _Answer, steps: ResponseSteps, warnings: list[str]) -> None:
        self._answer, self._steps, self._warnings = answer, steps, warnings
        self._deltas: list[list[Delta]] = [[] for _ in range(answer.choices)]

    def step(self, step: Step) -> None:
        self._answer.note_prompts(step)
        for delta in step:
            self._deltas[delta.index].append(delta)

    async def body(self) -> bytes:
        choices = [self._choice(index) for index in range(self._answer.choices)]
        usage = self._steps.usage
        diagnostics = await self._answer.diagnosis.finish(usage)
        return encode(self._answer.whole(choices, usage_body(usage), self._warnings, diagnostics))

    def _choice(self, index: int) -> CompletionChoice:
        answer, choice = self._answer, self._answer.prompt_choice(index)
        choice.stop_reason = None
        choice.text += "".join([delta.text for delta in self._deltas[index]])
        for delta in self._deltas[index]:
            if choice.logprobs is not None:
                choice.logprobs.extend(answer.logprobs_of(delta))
            if answer.with_token_ids and choice.token_ids is not UNSET:
                choice.token_ids += delta.token_ids
            if delta.finish_reason is not None:
                choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        return choice


class CompletionApi:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """POST /v1/completions."""
        service = self._service
        config, vocab_size = service.config, service.engine.model.vocab_size
        fields, ignored, size_bytes = await read_fields(request, CompletionRequest, config)
        model = service.model_name(fields.model)
        n = fields.n or 1
        max_tokens = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
        if fields.prewarms:
            max_tokens = 0
        elif max_tokens == 0 and not fields.echo and fields.prompt_logprobs is None:
            raise _invalid(
                "max_tokens", "max_tokens=0 needs echo=true or prompt_logprobs: nothing else is left"
            )
        if fields.best_of not in (None, n):
            raise _invalid(
                "best_of", f"best_of={fields.best_of} differs from n={n}; ranking is not available"
            )
        if fields.prompt_logprobs is not None and fields.stream:
            raise _invalid("prompt_logprobs", "prompt_logprobs is not available with stream=true")
        params = to_params(
            fields,
            config,
            vocab_size,
            max_tokens=max_tokens,
            logprobs=fields.logprobs,
            prompt_logprobs=_prompt_logprobs(fields, max_tokens),
        )
        shape = asked_grammar(fields)
        loose = await prepare(service, shape)
        prompts = await off_loop(
            service,
            size_bytes,
            lambda: to_prompts(fields, service.codec, service.engine.model, config.max_prompts),
        )
        answer_id = f"cmpl-{token_hex(16)}"
        salt = isolation_salt(request_info(request.scope).key_id, fields.cache_salt)
        policy = cache_policy(fields)
        generations = [
            GenerationRequest(
                id=answer_id if len(prompts) == 1 else f"{answer_id}-{row}",
                prompt=prompt.token_ids,
                params=params,
                priority=fields.priority or 0,
                salt=salt,
                cache=policy,
                grammar=None if shape is None else shape.grammar,
            )
            for row, prompt in enumerate(prompts)
        ]
        diagnosis = PromptDiagnosis(service, model, fields, generations, ChatPrompt(prompts[0].token_ids))
        resumes = wants_resume(service, fields.stream_options)
        try:
            steps = submit(service, request, generations)
        except ContextTooLong as err:
            err.param = "prompt"
            raise
        answer = _Answer(service, fields, model, prompts, answer_id, diagnosis)
        warnings = [f"`{name}` has no effect here" for name in ignored] + loose
        headers = ignored_header(ignored)
        if fields.stream:
            chunks = CompletionChunks(answer, steps, warnings)
            resumable = (answer_id, generations[0].salt) if resumes else None
            return stream_response(service, request, steps, chunks, headers, resumable=resumable)
        return await whole_response(request, steps, CompletionBody(answer, steps, warnings), headers)


def _prompt_logprobs(fields: CompletionRequest, max_tokens: int) -> int | None:
    wanted = [fields.prompt_logprobs] if fields.prompt_logprobs is not None else []
    if fields.echo and fields.logprobs is not None:
        wanted.append(fields.logprobs)
    return max(wanted, default=None)
