"""The sampler's definition, in numpy: the truth that every backend's own sampler must reproduce.

One row of logits l[V] (float32), one slot's `SlotSampling`, the slot's token history tokens[0:p], and the
absolute position p of the token being drawn. In this order:

1. repetition r (rounded to float32): for every distinct token of the history (prompt and output),
   l = l / r if l > 0 else l * r, one float32 operation.
   frequency f and presence q: for every distinct token of the output part (positions >= prompt_len),
   l = f32(l - f32(f * count + q)), the product and the sum in float64, each rounded (no FMA).
2. bias: l[id] += value (float32), in the order given.
3. masks: l = -inf where `allowed` or the step's mask has no bit; while p < min_len, at `stop_ids`.
   If a value is NaN or +inf, or nothing finite is left, the row is not finite: its token is 0.
4. temperature 0: argmax, lowest id on a tie. Otherwise, with m = max l (float32) and T the temperature:
   d = (float64(l) - float64(m)) / T; weight w = floor(exp(d) * 2^32) as uint64, 0 where d < -32 ln 2.
5. min_p: w = 0 where w < ceil(min_p * 2^32).
6. top_k: keep the k largest, ordered by (w descending, id ascending).
7. top_p: in the same order, keep the shortest prefix whose sum >= ceil(top_p * total), at least one.
   (Both are float64 products, rounded up; total is the sum after 6; top_p 0 keeps one token, top_p 1 all.)
8. draw: r = 64 random bits; t = (r * total) >> 64 in 128-bit arithmetic; the token is the lowest id
   whose running sum of w in id order exceeds t.

Integer weights make the choice independent of the order of summation. The 64 bits come from
Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with key = the seed (low
word first) and counter = (p, 0, 0, 0): r = word0 | word1 << 32. So a token depends on the seed and its
position, never on its neighbours in the batch.

A whole step: rows are settled segment by segment. A drawn token is stored at tokens[slot, p] at once, so
a later segment of the same slot has it in its history; nothing is stored when p is beyond the table.
A scored row reports the token that follows it in the table (token 0 beyond its end). Ranks and the top
tokens are ordered by (raw logit descending, id ascending). Raw logprobs are computed in float64,
(l - m) - log(sum exp(l - m)), and rounded once. A row is finite when its raw logits have no NaN, no +inf
and one finite value, and, if it is drawn, what is left after step 3 has, too. A row whose raw logits are
not finite has logprobs NaN, rank 0 and top tokens 0.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .batch import F32, I32, SlotSampling, SlotTables, StepBatch, StepOutput

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

_WEIGHT_ONE = 2.0**32


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return Philox4x32-10's four 32-bit words for a counter and a key of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (high >> 32) ^ c1 ^ k0,
            high & 0xFFFFFFFF,
            (low >> 32) ^ c3 ^ k1,
            low & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_bits(seed: int, position: int) -> int:
    """Return the 64 bits that draw the token at `position`."""
    words = philox((position, 0, 0, 0), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    return words[0] | words[1] << 32


def is_finite(logits_V: F32) -> bool:
    """Whether something can be drawn: no NaN, no +inf, and not everything -inf."""
    return bool(np.isfinite(logits_V.max()))  # max passes NaN on


@np.errstate(over="ignore")
def process_logits(logits_V: F32, sampling: SlotSampling, history: I32, mask: U32 | None = None) -> F32:
    """Return a copy of the logits after steps 1 to 3; the token drawn is the one at len(history)."""
    logits = logits_V.copy()
    if sampling.repetition != 1.0:
        seen = np.unique(history)
        factor = np.float32(sampling.repetition)
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / factor, values * factor)
    if sampling.frequency or sampling.presence:
        seen, counts = np.unique(history[sampling.prompt_len :], return_counts=True)
        penalty = sampling.frequency * counts.astype(np.float64) + sampling.presence
        logits[seen] -= penalty.astype(np.float32)
    if sampling.bias_ids is not None and sampling.bias_values is not None:
        np.add.at(logits, sampling.bias_ids, sampling.bias_values)
    for bits in (sampling.allowed, mask):
        if bits is not None:
            logits[~_unpack(bits, len(logits))] = -np.inf
    if sampling.stop_ids is not None and len(history) < sampling.min_len:
        logits[sampling.stop_ids] = -np.inf
    return logits


@np.errstate(over="ignore")
def token_weights(logits_V: F32, sampling: SlotSampling) -> U64:
    """Return the integer weights after steps 4 to 7, for a temperature above 0 and finite logits."""
    distance = (logits_V.astype(np.float64) - np.float64(logits_V.max())) / sampling.temperature
    weights = np.floor(np.exp(distance) * _WEIGHT_ONE).astype(np.uint64)
    weights[distance < -32 * math.log(2)] = 0
    weights[weights < np.uint64(math.ceil(sampling.min_p * _WEIGHT_ONE))] = 0
    if sampling.top_k <= 0 and sampling.top_p >= 1.0:
        return weights
    ids = np.flatnonzero(weights)
    order = ids[np.argsort(weights[ids].max() - weights[ids], kind="stable")]
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    if sampling.top_p < 1.0:
        sums = np.cumsum(weights[order])
        enough = math.ceil(sampling.top_p * float(sums[-1]))
        order = order[: int(np.searchsorted(sums, np.uint64(enough))) + 1]
    kept = np.zeros_like(weights)
    kept[order] = weights[order]
    return kept


def draw(logits_V: F32, sampling: SlotSampling, position: int) -> int:
    """Return the token of processed, finite logits (steps 4 to 8)."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    sums = np.cumsum(token_weights(logits_V, sampling))
    target = random_bits(sampling.seed, position) * int(sums[-1]) >> 64
    return int(np.searchsorted(sums, np.uint64(target), side="right"))


def raw_logprobs(logits_V: F32) -> F32:
    """Return log_softmax of the raw logits."""
    shifted = logits_V.astype(np.float64) - np.float64(logits_V.max())
    logprobs: F32 = (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)
    return logprobs


def rank(logits_V: F32, token: int) -> int:
    """Return how many tokens come before `token` in the order (logit descending, id ascending)."""
    value = logits_V[token]
    return int((logits_V > value).sum() + (logits_V[:token] == value).sum())


def top_tokens(logits_V: F32, count: int) -> I32:
    """Return the `count` first tokens in the order (logit descending, id ascending)."""
    return np.argsort(-logits_V, kind="stable")[:count].astype(np.int32)


def sample_step(logits_RV: F32, batch: StepBatch, tables: SlotTables, output: StepOutput) -> None:
    """Settle all logits rows of a step: fill `output` and append the drawn tokens to `tables.tokens`."""
    row = 0
    for segment, slot in enumerate(batch.slots.tolist()):
        end = int(batch.starts[segment] + batch.counts[segment])
        count = int(batch.logits[segment])
        for position in range(end - count + 1, end + 1):
            logits = logits_RV[row]
            finite = is_finite(logits)
            if batch.sample[segment] and position == end:
                mask = None if batch.mask is None else batch.mask[segment]
                token, drawn = _draw_row(logits, tables, slot, position, mask)
                finite = finite and drawn
            else:
                token = int(tables.tokens[slot, position]) if position < tables.max_len else 0
            output.tokens[row] = token
            output.finite[row] = finite
            _report(logits, token, row, batch.top_logprobs, output)
            row += 1


def _draw_row(
    logits_V: F32, tables: SlotTables, slot: int, position: int, mask: U32 | None
) -> tuple[int, bool]:
    """Draw one token and store it; returns it and whether there was anything to draw from."""
    sampling = tables.slot_sampling[slot]
    processed = process_logits(logits_V, sampling, tables.tokens[slot, :position], mask)
    finite = is_finite(processed)
    token = draw(processed, sampling, position) if finite else 0
    if position < tables.max_len:
        tables.tokens[slot, position] = token
    return token, finite


def _report(logits_V: F32, token: int, row: int, top: int, output: StepOutput) -> None:
    if not is_finite(logits_V):
        output.logprobs[row], output.ranks[row] = np.nan, 0
        output.top_tokens[row], output.top_logprobs[row] = 0, np.nan
        return
    logprobs = raw_logprobs(logits_V)
    output.logprobs[row] = logprobs[token]
    output.ranks[row] = rank(logits_V, token)
    if top:
        best = top_tokens(logits_V, top)
        output.top_tokens[row] = best
        output.top_logprobs[row] = logprobs[best]


def _unpack(bits: U32, vocab: int) -> NDArray[np.bool_]:
    return np.unpackbits(bits.view(np.uint8), count=vocab, bitorder="little").astype(bool)
