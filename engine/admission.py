"""From a request to its sequences: what the model can honour, and what it refuses by name."""

from __future__ import annotations

import secrets

import numpy as np

from ..cache import KVStore
from ..kernels.batch import SlotSampling
from .api import GenerationRequest, ModelInfo
from .codec import TextStream, Tokenizer
from .codec.stops import StopSet
from .errors import ContextTooLong, InvalidRequest
from .grammar.compiler import CompiledGrammar
from .params import SamplingParams
from .pooling import Pooled
from .request import Sequence
from .tracking import Choice

GREEDY_BELOW = 1e-5  # a temperature this small is meant as 0: exp((l - max) / T) would only overflow
MAX_TOP_LOGPROBS = 20
MIN_REPETITION = 1e-30  # divides logits: anything below would only overflow float32


def check_request(request: GenerationRequest, model: ModelInfo) -> None:
    """Refuse what can never be served.

    Raises:
        InvalidRequest, ContextTooLong: naming the parameter.
    """
    params, prompt = request.params, request.prompt
    if not prompt:
        raise InvalidRequest("The prompt has no tokens; at least one is needed", "prompt")
    if min(prompt) < 0 or max(prompt) >= model.vocab_size:
        raise InvalidRequest(f"The prompt has a token id outside 0..{model.vocab_size - 1}", "prompt")
    wanted = max(params.max_tokens or 0, params.min_tokens)
    room = len(prompt) if params.max_tokens == 0 else len(prompt) + 1
    if room > model.max_model_len or len(prompt) + wanted > model.max_model_len:
        raise ContextTooLong(len(prompt), model.max_model_len, wanted)
    if params.n < 1:
        raise InvalidRequest(f"n={params.n} must be at least 1", "n")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and not 0 <= value <= MAX_TOP_LOGPROBS:
            raise InvalidRequest(f"{name}={value} must be between 0 and {MAX_TOP_LOGPROBS}", name)
    _check_pooling(request, model)
    _check_ids(list(params.logit_bias), "logit_bias", model)
    _check_ids(params.stop_token_ids, "stop_token_ids", model)
    if params.allowed_token_ids is not None:
        _check_ids(params.allowed_token_ids, "allowed_token_ids", model)
        if not params.allowed_token_ids:
            raise InvalidRequest(
                "allowed_token_ids is empty: nothing could be generated", "allowed_token_ids"
            )


def _check_pooling(request: GenerationRequest, model: ModelInfo) -> None:
    if request.pooling is None:
        return
    if not model.hidden_size:
        raise InvalidRequest("This model gives no embeddings", "pooling")
    params = request.params
    if params.max_tokens != 0 or params.n != 1 or params.prompt_logprobs is not None:
        raise InvalidRequest("pooling needs max_tokens=0, n=1 and no prompt_logprobs", "pooling")


def make_choices(
    request: GenerationRequest,
    model: ModelInfo,
    store: KVStore,
    tokenizer: Tokenizer,
    *,
    order: float,
    seed: int | None,
    grammar: CompiledGrammar | None = None,
) -> list[Choice]:
    """The sequences of a checked request. Choice i draws with seed + i; all but the first share the
    prompt that the first computes."""
    params = request.params
    stop_ids = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids |= frozenset(model.eos_token_ids)
    base = params.seed if params.seed is not None else seed
    if base is None:
        base = secrets.randbits(63)
    length = len(request.prompt)
    max_len = model.max_model_len if params.max_tokens is None else length + params.max_tokens
    stops = StopSet(params.stop)
    prompt = store.prompt(request.prompt, request.salt)
    choices: list[Choice] = []
    for index in range(params.n):
        sequence = Sequence(
            request_id=request.id,
            index=index,
            tokens=list(request.prompt),
            prompt_len=length,
            max_len=max_len,
            sampling=slot_sampling(params, base + index, length, stop_ids, model.vocab_size),
            prompt=prompt.copy(),
            order=order,
            stop_ids=stop_ids,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            pooled=Pooled(request.pooling, model.hidden_size) if request.pooling else None,
            scoring=0 if request.pooling else 1,
            cache=request.cache,
            matcher=None if grammar is None else grammar.matcher(),
            parent=choices[0].sequence if choices else None,
        )
        text = TextStream(
            tokenizer,
            prompt=request.prompt[-8:],
            stops=stops,
            include_stop=params.include_stop,
            skip_special=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )
        choices.append(Choice(sequence, text))
    return choices


def slot_sampling(
    params: SamplingParams, seed: int, prompt_len: int, stop_ids: frozenset[int], vocab: int
) -> SlotSampling:
    """The device's form of a request's parameters."""
    allowed = None
    if params.allowed_token_ids is not None:
        allowed = np.zeros(-(-vocab // 32), np.uint32)
        ids = np.array(params.allowed_token_ids, np.int64)
        np.bitwise_or.at(allowed, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    bias = params.logit_bias
    return SlotSampling(
        temperature=params.temperature if params.temperature >= GREEDY_BELOW else 0.0,
        top_p=params.top_p,
        top_k=min(max(params.top_k, 0), vocab),  # the device counts in 32 bits
        min_p=params.min_p,
        repetition=max(params.repetition_penalty, MIN_REPETITION),
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        seed=seed,
        prompt_len=prompt_len,
        min_len=prompt_len + params.min_tokens if params.min_tokens else 0,
        bias_ids=np.array(list(bias), np.int32) if bias else None,
        bias_values=np.array(list(bias.values()), np.float32) if bias else None,
        stop_ids=np.array(sorted(stop_ids), np.int32) if params.min_tokens and stop_ids else None,
        allowed=allowed,
    )


def _check_ids(ids: list[int] | tuple[int, ...], param: str, model: ModelInfo) -> None:
    for token_id in ids:
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequest(
                f"{param} has the token id {token_id}; this model's are 0 to {model.vocab_size - 1}", param
            )
