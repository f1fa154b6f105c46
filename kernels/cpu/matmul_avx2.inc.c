// int8 dot products with AVX2, eight matrix rows a vector, four columns a 32-bit lane.
// maddubs(u8, s8) adds pairs into int16. Q4: q <= 15, so eight of them fit: 8 * 2 * 15 * 127 = 30480. Q8: one
// fits (2 * 128 * 127), as |w| times x with w's sign.
// The empty asm statements stop gcc from hoisting all products of a block and spilling them (2x slower).

#define PREFETCH_BYTES 2048

INLINE __m256i load_i8(const void *p) { return _mm256_load_si256((const __m256i *)p); }

INLINE __m256i columns4(const struct act_block *x, int j, int slot) {
    int32_t four;
    memcpy(&four, x->q[j][slot], sizeof four);
    return _mm256_set1_epi32(four);
}

INLINE f32x8 q4_step(__m256i dots, f32x8 scale, f32x8 minimum, const struct act_block *x, int slot, f32x8 acc) {
    f32x8 dot = (f32x8)_mm256_cvtepi32_ps(_mm256_madd_epi16(dots, _mm256_set1_epi16(1)));
    acc = fma8(dot, scale * set8(x->scale[slot]), acc);
    return fma8(minimum, set8(x->sum[slot]), acc);
}

// 8 rows x `tokens` <= 4, straight from the packed weights: for steps of few rows.
INLINE void q4_direct(const struct q4_block *w, const struct act_block *x, int blocks, int tokens, f32x8 *out) {
    const __m256i low = _mm256_set1_epi8(15);
    f32x8 acc[4];
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++) acc[t] = set8(0);
    for (int b = 0; b < blocks; b++, w++, x++) {
        for (int i = 0; i < 192; i += 64) _mm_prefetch((const char *)w + PREFETCH_BYTES + i, _MM_HINT_T0);
        __m256i q[8];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            __m256i both = load_i8(w->q + 32 * j);
            q[j] = _mm256_and_si256(both, low);
            q[j + 4] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        }
        f32x8 scale = load_half8(w->scale), minimum = load_half8(w->minimum);
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) {
            __m256i a = _mm256_maddubs_epi16(q[0], columns4(x, 0, t));
            __m256i c = _mm256_maddubs_epi16(q[1], columns4(x, 1, t));
#pragma GCC unroll 3
            for (int j = 2; j < 8; j += 2) {
                a = _mm256_add_epi16(a, _mm256_maddubs_epi16(q[j], columns4(x, j, t)));
                c = _mm256_add_epi16(c, _mm256_maddubs_epi16(q[j + 1], columns4(x, j + 1, t)));
                __asm__ volatile("" : "+x"(a), "+x"(c));
            }
            acc[t] = q4_step(_mm256_add_epi16(a, c), scale, minimum, x, t, acc[t]);
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++) out[t] = acc[t];
}

// 16 rows with the nibbles apart: what many tokens share.
struct q4_wide {
    uint8_t q[8][2][32];
    float scale[2][8], minimum[2][8];
};

static void q4_widen(const struct q4_block *w, int blocks, struct q4_wide *out) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int b = 0; b < blocks; b++, out++) {
        for (int g = 0; g < 2; g++) {
            const struct q4_block *block = w + (size_t)g * (size_t)blocks + b;
            for (int j = 0; j < 4; j++) {
                __m256i both = load_i8(block->q + 32 * j);
                _mm256_store_si256((__m256i *)out->q[j][g], _mm256_and_si256(both, low));
                _mm256_store_si256((__m256i *)out->q[j + 4][g], _mm256_and_si256(_mm256_srli_epi16(both, 4), low));
            }
            store8(out->scale[g], load_half8(block->scale));
            store8(out->minimum[g], load_half8(block->minimum));
        }
    }
}

// 16 rows x 4 tokens: eight int16 sums in registers over a block.
static __attribute__((noinline)) void q4_tile(const struct q4_wide *w, const struct act_block *x, int blocks,
                                              f32x8 out[2][4]) {
    f32x8 acc[2][4];
    for (int i = 0; i < 8; i++) acc[i / 4][i % 4] = set8(0);
    for (int b = 0; b < blocks; b++, w++, x++) {
        __m256i a0, a1, a2, a3, b0, b1, b2, b3;
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = _mm256_setzero_si256();
#define Q4_TOKEN(a, b, t)                                         \
    column = columns4(x, j, t);                                   \
    a = _mm256_add_epi16(a, _mm256_maddubs_epi16(w0, column));    \
    b = _mm256_add_epi16(b, _mm256_maddubs_epi16(w1, column))
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            __m256i w0 = load_i8(w->q[j][0]), w1 = load_i8(w->q[j][1]), column;
            Q4_TOKEN(a0, b0, 0);
            Q4_TOKEN(a1, b1, 1);
            Q4_TOKEN(a2, b2, 2);
            Q4_TOKEN(a3, b3, 3);
            __asm__ volatile("" : "+x"(a0), "+x"(a1), "+x"(a2), "+x"(a3), "+x"(b0), "+x"(b1), "+x"(b2), "+x"(b3));
        }
#undef Q4_TOKEN
        const __m256i sums[2][4] = {{a0, a1, a2, a3}, {b0, b1, b2, b3}};
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            int g = i / 4, t = i % 4;
            acc[g][t] = q4_step(sums[g][t], load8(w->scale[g]), load8(w->minimum[g]), x, t, acc[g][t]);
        }
    }
    for (int i = 0; i < 8; i++) out[i / 4][i % 4] = acc[i / 4][i % 4];
}

INLINE void q8_direct(const struct q8_block *w, const uint16_t *scales, const struct act_block *x, int blocks,
                      int tokens, f32x8 *out) {
    const __m256i ones = _mm256_set1_epi16(1);
    f32x8 acc[4];
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++) acc[t] = set8(0);
    for (int b = 0; b < blocks; b++, w++, scales += 8, x++) {
        for (int i = 0; i < 256; i += 64) _mm_prefetch((const char *)w + PREFETCH_BYTES + i, _MM_HINT_T0);
        __m256i sums[4];
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) sums[t] = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            __m256i q = load_i8(w->q + 32 * j), magnitude = _mm256_abs_epi8(q);
#pragma GCC unroll 4
            for (int t = 0; t < tokens; t++) {
                __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(columns4(x, j, t), q));
                sums[t] = _mm256_add_epi32(sums[t], _mm256_madd_epi16(pairs, ones));
                __asm__ volatile("" : "+x"(sums[t]));
            }
        }
        f32x8 scale = load_half8(scales);
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++)
            acc[t] = fma8((f32x8)_mm256_cvtepi32_ps(sums[t]), scale * set8(x->scale[t]), acc[t]);
    }
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++) out[t] = acc[t];
}

static void q4_few(const struct q4_block *w, const struct act_block *x, int blocks, int tokens, f32x8 *out) {
    switch (tokens) {
    case 1: q4_direct(w, x, blocks, 1, out); break;
    case 2: q4_direct(w, x, blocks, 2, out); break;
    case 3: q4_direct(w, x, blocks, 3, out); break;
    default: q4_direct(w, x, blocks, 4, out); break;
    }
}

static void q8_few(const struct q8_block *w, const uint16_t *scales, const struct act_block *x, int blocks,
                   int tokens, f32x8 *out) {
    switch (tokens) {
    case 1: q8_direct(w, scales, x, blocks, 1, out); break;
    case 2: q8_direct(w, scales, x, blocks, 2, out); break;
    case 3: q8_direct(w, scales, x, blocks, 3, out); break;
    default: q8_direct(w, scales, x, blocks, 4, out); break;
    }
}

static void linear_q4(const struct executor *ex, const struct op *op, int tile, int first, int last, void *scratch) {
    const struct matrix *w = &ex->matrices[op->weight];
    int blocks = w->cols / 32;
    const struct q4_block *packed = (const struct q4_block *)w->data + (size_t)tile * 2 * (size_t)blocks;
    const struct act_block *x = (const struct act_block *)(ex->arena + op->in0);
    int wide = last - first > 8;
    if (wide) q4_widen(packed, blocks, scratch);
    for (int t = first; t < last; t += 4) {
        int tokens = min_int(4, last - t);
        const struct act_block *rows = x + (size_t)(t / 4) * (size_t)blocks;
        f32x8 out[2][4];
        if (wide) {
            q4_tile(scratch, rows, blocks, out);
        } else {
            q4_few(packed, rows, blocks, tokens, out[0]);
            q4_few(packed + blocks, rows, blocks, tokens, out[1]);
        }
        for (int i = 0; i < tokens; i++)
            for (int g = 0; g < 2; g++) finish8(ex, op, t + i, tile * 2 + g, out[g][i]);
    }
}

static void linear_q8(const struct executor *ex, const struct op *op, int tile, int first, int last) {
    const struct matrix *w = &ex->matrices[op->weight];
    int blocks = w->cols / 32;
    const struct act_block *x = (const struct act_block *)(ex->arena + op->in0);
    for (int g = tile * 2; g < tile * 2 + 2; g++) {
        size_t start = (size_t)g * (size_t)blocks;
        for (int t = first; t < last; t += 4) {
            int tokens = min_int(4, last - t);
            f32x8 out[4];
            q8_few((const struct q8_block *)w->data + start, w->scales + start * 8,
                   x + (size_t)(t / 4) * (size_t)blocks, blocks, tokens, out);
            for (int i = 0; i < tokens; i++) finish8(ex, op, t + i, g, out[i]);
        }
    }
}
