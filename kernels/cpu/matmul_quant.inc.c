// Activations in int8 blocks of 32, x ~ scale * q, and the entry point of every linear op.
// Quantised weights: out[n] = sum_b (wscale_b xscale_b) dot_b (+ minimum_b xsum_b), dot_b an exact integer,
// one float chain over b ascending for every tile shape: a row's bits do not depend on its neighbours.

// Store eight columns from 4j on as int8.
INLINE void store_columns8(struct act_block *out, int j, int slot, i32x8 q) {
#ifdef ISA_AVX2
    const __m256i low_bytes = _mm256_set1_epi32(0x0c080400);  // of each 128-bit half
    i32x8 bytes = (i32x8)_mm256_shuffle_epi8((__m256i)q, low_bytes);
    memcpy(out->q[j][slot], &(int32_t){bytes[0]}, 4);
    memcpy(out->q[j + 1][slot], &(int32_t){bytes[4]}, 4);
#else
    for (int c = 0; c < 8; c++) out->q[j + c / 4][slot][c % 4] = (int8_t)q[c];
#endif
}

// NaN and inf survive: the maximum is taken over the bits of |x|, where inf and NaN are the largest.
static void quantise_row(const float *x, int width, struct act_block *out, int slot) {
    for (int b = 0; b < width / 32; b++, x += 32, out++) {
        i32x8 most = (i32x8)load8(x) & 0x7fffffff;
        for (int i = 8; i < 32; i += 8) {
            i32x8 bits = (i32x8)load8(x + i) & 0x7fffffff, larger = bits > most;
            most = (larger & bits) | (~larger & most);
        }
        int32_t top_bits = most[0];
        for (int i = 1; i < 8; i++) top_bits = most[i] > top_bits ? most[i] : top_bits;
        float top;
        memcpy(&top, &top_bits, sizeof top);
        float scale = top / 127.0f, inverse = top == 0.0f ? 0.0f : 127.0f / top;
        u32x8 total = {0};  // unsigned: what NaN converts to may wrap
        for (int i = 0; i < 32; i += 8) {
            f32x8 scaled = load8(x + i) * set8(inverse);
            f32x8 nearest = (scaled + set8(12582912.0f)) - set8(12582912.0f);  // 1.5 * 2^23 rounds to even
            i32x8 q = __builtin_convertvector(nearest, i32x8);
            total += (u32x8)q;
            store_columns8(out, i / 4, slot, q);
        }
        uint32_t sum = 0;
        for (int i = 0; i < 8; i++) sum += total[i];
        out->scale[slot] = scale;
        out->sum[slot] = scale * (float)(int32_t)sum;
    }
}

// Add bias and residual, store eight columns of a row. Groups that are only padding are dropped.
INLINE void finish8(const struct executor *ex, const struct op *op, int row, int group, f32x8 sum) {
    int column = group * 8;
    if (column >= op->width) return;
    if (op->vector >= 0) sum += load8(ex->vectors[op->vector] + column);
    if (op->in1 >= 0) sum += load8(row_of(ex, op->in1, op->width, row) + column);
    store8(row_of(ex, op->out, op->width, row) + column, sum);
}
