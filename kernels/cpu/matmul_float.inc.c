// out[t, n] = sum_k x[t, k] w[n, k] for float32, float16 and bfloat16 weights.
// Eight rows of w are the lanes; each (lane, t) is one chain of FMAs over k ascending, whatever the tile, so
// a row's bits do not depend on its neighbours. Tile: 32 rows x 3 tokens, 12 accumulators.
// Bound: the weights' bytes for few tokens, 8 FMA lanes a cycle and port otherwise.

INLINE f32x8 load_weight8(const uint8_t *p, int format) {
    if (format == PACKED_F32) return load8((const float *)p);
    if (format == PACKED_F16) return load_half8((const uint16_t *)p);
    return load_bfloat8((const uint16_t *)p);
}

INLINE void float_tile(const struct matrix *w, int group, const float *const *x, int tokens, int format,
                       f32x8 out[3][4]) {
    size_t item = format == PACKED_F32 ? 32 : 16, plane = (size_t)w->cols * item;
    const uint8_t *p = (const uint8_t *)w->data + (size_t)group * plane;
    f32x8 acc[3][4];
#pragma GCC unroll 3
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++) acc[t][g] = set8(0);
    for (int k = 0; k < w->cols; k++, p += item) {
        f32x8 value[3];
#pragma GCC unroll 3
        for (int t = 0; t < tokens; t++) value[t] = set8(x[t][k]);
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++) {
            f32x8 weight = load_weight8(p + (size_t)g * plane, format);
#pragma GCC unroll 3
            for (int t = 0; t < tokens; t++) acc[t][g] = fma8(weight, value[t], acc[t][g]);
        }
    }
#pragma GCC unroll 3
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++) out[t][g] = acc[t][g];
}

INLINE void float_tile_of(const struct matrix *w, int group, const float *const *x, int tokens, f32x8 out[3][4]) {
    switch (w->format) {
    case PACKED_F32: float_tile(w, group, x, tokens, PACKED_F32, out); break;
    case PACKED_F16: float_tile(w, group, x, tokens, PACKED_F16, out); break;
    default: float_tile(w, group, x, tokens, PACKED_BF16, out); break;
    }
}

static void linear_float(const struct executor *ex, const struct op *op, int tile, int first, int last) {
    const struct matrix *w = &ex->matrices[op->weight];
    for (int t = first; t < last; t += 3) {
        int tokens = min_int(3, last - t);
        const float *x[3];
        f32x8 out[3][4];
        for (int i = 0; i < tokens; i++) x[i] = row_of(ex, op->in0, w->cols, t + i);
        switch (tokens) {
        case 1: float_tile_of(w, tile * 4, x, 1, out); break;
        case 2: float_tile_of(w, tile * 4, x, 2, out); break;
        default: float_tile_of(w, tile * 4, x, 3, out); break;
        }
        for (int i = 0; i < tokens; i++)
            for (int g = 0; g < 4; g++) finish8(ex, op, t + i, tile * 4 + g, out[i][g]);
    }
}
