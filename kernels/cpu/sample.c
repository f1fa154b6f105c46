// Settling one logits row: finite or not, the drawn or scored token, its logprob and rank, the top tokens.
// The definition, step by step, is in kernels/sampling.py; the numbers below are its steps.
#include <math.h>
#include <string.h>

#include "executor.h"

#define WEIGHT_ONE ((uint64_t)1 << 32)
#define PROMPT_ONLY (1 << 30)  // flag beside the output count of a token

// Philox4x32-10 with counter (position, 0, 0, 0) and key = seed; the first two words.
static uint64_t random_bits(uint64_t seed, uint32_t position) {
    uint32_t c0 = position, c1 = 0, c2 = 0, c3 = 0, k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        uint64_t low = (uint64_t)c0 * 0xD2511F53u, high = (uint64_t)c2 * 0xCD9E8D57u;
        c0 = (uint32_t)(high >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)high;
        c2 = (uint32_t)(low >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)low;
    }
    return c0 | (uint64_t)c1 << 32;
}

// Step 1. `counts` is zero before and after.
static void apply_penalties(float *logits, int vocab, const struct sampling *s, const int32_t *history, int length,
                            int32_t *counts) {
    for (int i = 0; i < length; i++) {
        if ((uint32_t)history[i] >= (uint32_t)vocab) continue;
        if (i < s->prompt_len) {
            counts[history[i]] |= PROMPT_ONLY;
        } else {
            counts[history[i]]++;
        }
    }
    float repetition = (float)s->repetition;
    for (int i = 0; i < length; i++) {
        int32_t id = history[i];
        if ((uint32_t)id >= (uint32_t)vocab || counts[id] == 0) continue;
        int drawn = counts[id] & ~PROMPT_ONLY;
        counts[id] = 0;
        if (repetition != 1.0f) logits[id] = logits[id] > 0 ? logits[id] / repetition : logits[id] * repetition;
        if (drawn) logits[id] -= (float)(s->frequency * drawn + s->presence);
    }
}

static void apply_mask(float *logits, int vocab, const uint32_t *mask) {
    for (int word = 0; word * 32 < vocab; word++) {
        if (mask[word] == 0xFFFFFFFFu) continue;
        for (int i = word * 32; i < min_int(vocab, word * 32 + 32); i++)
            if (!(mask[word] >> (i % 32) & 1)) logits[i] = -INFINITY;
    }
}

// Steps 1 to 3. Returns the raw row when nothing changes it, else a shaped copy in the scratch.
static const float *shape_logits(const struct executor *ex, const float *raw, const struct sampling *s,
                                 const int32_t *history, int length, const uint32_t *mask,
                                 struct scratch *scratch) {
    int vocab = ex->plan.vocab, too_short = length < s->min_len && s->stop_count > 0;
    int penalised = s->repetition != 1.0 || s->frequency != 0.0 || s->presence != 0.0;
    if (!penalised && s->bias_count == 0 && !s->allowed && !mask && !too_short) return raw;
    float *logits = scratch->logits;
    memcpy(logits, raw, (size_t)vocab * sizeof *raw);
    if (penalised) apply_penalties(logits, vocab, s, history, length, scratch->counts);
    for (int i = 0; i < s->bias_count; i++)
        if ((uint32_t)s->bias_ids[i] < (uint32_t)vocab) logits[s->bias_ids[i]] += s->bias_values[i];
    if (s->allowed) apply_mask(logits, vocab, s->allowed);
    if (mask) apply_mask(logits, vocab, mask);
    for (int i = 0; too_short && i < s->stop_count; i++)
        if ((uint32_t)s->stop_ids[i] < (uint32_t)vocab) logits[s->stop_ids[i]] = -INFINITY;
    return logits;
}

// Weights are at most 2^32 and ids below 2^31: one integer that sorts by (weight, then lower id first).
static inline uint64_t sort_key(uint64_t weight, int id) { return weight << 31 | (uint32_t)(0x7FFFFFFF - id); }

// The key that ends the shortest descending prefix whose measure reaches `need`: the measure of a key is one,
// or its weight. Radix descent, eleven bits a pass over the keys that still matter. Destroys `keys`.
static uint64_t cut_key(uint64_t *keys, int count, uint64_t need, int by_weight) {
    for (int shift = 53; count > 1; shift = shift > 11 ? shift - 11 : 0) {
        uint64_t measure[2048] = {0};
        for (int i = 0; i < count; i++) measure[keys[i] >> shift & 2047] += by_weight ? keys[i] >> 31 : 1;
        int digit = 2047;
        while (digit > 0 && measure[digit] < need) need -= measure[digit--];
        int kept = 0;
        for (int i = 0; i < count; i++) {
            uint64_t key = keys[i];
            keys[kept] = key;
            kept += (int)(key >> shift & 2047) == digit;
        }
        count = kept;
    }
    return keys[0];
}

// Keep the shortest prefix, in the order of the keys, whose measure reaches `need`; there is one. Most of the
// vocabulary is below every cut: only weights above the first power of 2^-6 that reaches it are looked at.
static void keep_prefix(const struct executor *ex, struct scratch *scratch, uint64_t need, int by_weight) {
    int vocab = ex->plan.vocab, count = 0;
    uint64_t least = WEIGHT_ONE >> 6;
    for (;; least = least >> 6 ? least >> 6 : 1) {
        struct weight_tail tail = ex->kernels->weigh_tail(scratch->draws, vocab, least);
        if (least == 1 || (by_weight ? tail.sum : (uint64_t)tail.count) >= need) break;
    }
    for (int id = 0; id < vocab; id++) {
        scratch->keys[count] = sort_key(scratch->draws[id], id);
        count += scratch->draws[id] >= least;
    }
    uint64_t cut = cut_key(scratch->keys, count, need, by_weight);
    ex->kernels->keep_down_to(scratch->draws, vocab, cut >> 31, 0x7FFFFFFF - (int)(cut & 0x7FFFFFFF));
}

// Steps 4 to 8.
static int draw_token(const struct executor *ex, const float *logits, float top, const struct sampling *s, int position,
                      struct scratch *scratch) {
    int vocab = ex->plan.vocab;
    uint64_t *weights = scratch->draws, sum = 0;
    ex->kernels->draw_weights(logits, vocab, top, s->temperature, weights);
    if (s->min_p > 0) ex->kernels->keep_down_to(weights, vocab, (uint64_t)ceil(s->min_p * (double)WEIGHT_ONE), vocab);
    struct weight_tail all = ex->kernels->weigh_tail(weights, vocab, 1);
    if (s->top_k > 0 && s->top_k < all.count) {
        keep_prefix(ex, scratch, (uint64_t)s->top_k, 0);
        all = ex->kernels->weigh_tail(weights, vocab, 1);
    }
    if (s->top_p < 1.0 && all.count > 0) {
        uint64_t need = s->top_p > 0 ? (uint64_t)ceil(s->top_p * (double)all.sum) : 1;
        keep_prefix(ex, scratch, need, 1);
        all = ex->kernels->weigh_tail(weights, vocab, 1);
    }
    uint64_t target = (uint64_t)((unsigned __int128)random_bits(s->seed, (uint32_t)position) * all.sum >> 64);
    for (int id = 0; id < vocab; id++) {
        sum += weights[id];
        if (sum > target) return id;
    }
    return 0;
}

static void report_top(const struct executor *ex, const float *logits, double log_total, int32_t *tokens,
                       float *logprobs, int count) {
    int vocab = ex->plan.vocab, found = 0;
    count = min_int(count, vocab);
    for (int id = 0; id < vocab && count > 0; id++) {
        if (found == count) {
            id = ex->kernels->next_above(logits, id, vocab, logits[tokens[count - 1]]);
            if (id == vocab) break;
        }
        int at = found < count ? found++ : count - 1;
        for (; at > 0 && logits[tokens[at - 1]] < logits[id]; at--) tokens[at] = tokens[at - 1];
        tokens[at] = id;
    }
    for (int i = 0; i < count; i++) logprobs[i] = (float)((double)logits[tokens[i]] - log_total);
}

void sample_row(struct executor *ex, int row, struct scratch *scratch) {
    const struct step *step = &ex->step;
    int vocab = ex->plan.vocab, max_len = ex->plan.max_len, top = step->top;
    int segment = ex->logit_segment[row], slot = step->slots[segment];
    int position = ex->row_position[ex->logit_row[row]] + 1;
    int is_last = position == step->starts[segment] + step->counts[segment];
    int32_t *tokens = ex->plan.tokens + (size_t)slot * (size_t)max_len, token = 0;
    const float *logits = row_of(ex, ex->plan.logits, vocab, row);
    struct logits_scan scan = ex->kernels->scan(logits, vocab);
    int raw_finite = !scan.has_nan && isfinite(scan.top), finite = raw_finite;

    if (step->sample[segment] && is_last) {
        const struct sampling *s = &ex->plan.sampling[slot];
        const uint32_t *mask = step->mask ? step->mask + (size_t)segment * (size_t)((vocab + 31) / 32) : NULL;
        const float *shaped = shape_logits(ex, logits, s, tokens, min_int(position, max_len), mask, scratch);
        struct logits_scan left = shaped == logits ? scan : ex->kernels->scan(shaped, vocab);
        int drawable = !left.has_nan && isfinite(left.top);
        finite &= drawable;
        if (drawable) token = s->temperature == 0 ? left.token : draw_token(ex, shaped, left.top, s, position, scratch);
        if (position < max_len) tokens[position] = token;
    } else if (position < max_len) {
        token = tokens[position];
    }
    step->tokens[row] = token;
    step->finite[row] = (uint8_t)finite;
    int32_t *top_tokens = step->top_tokens + (size_t)row * (size_t)top;
    float *top_logprobs = step->top_logprobs + (size_t)row * (size_t)top;
    memset(top_tokens, 0, (size_t)top * sizeof *top_tokens);
    for (int i = 0; i < top; i++) top_logprobs[i] = NAN;
    if (!raw_finite) {
        step->logprobs[row] = NAN;
        step->ranks[row] = 0;
        return;
    }
    int known = min_int(max_int(token, 0), vocab - 1);
    double log_total = (double)scan.top + log(ex->kernels->exp_sum(logits, vocab, scan.top));
    step->logprobs[row] = (float)((double)logits[known] - log_total);
    step->ranks[row] = ex->kernels->rank(logits, vocab, known);
    report_top(ex, logits, log_total, top_tokens, top_logprobs, top);
}
