// int8 dot products in plain C: eight matrix rows by one token.

static void linear_quant(const struct executor *ex, const struct op *op, int tile, int first, int last) {
    const struct matrix *w = &ex->matrices[op->weight];
    int blocks = w->cols / 32;
    for (int t = first; t < last; t++) {
        const struct act_block *x = (const struct act_block *)(ex->arena + op->in0) + (size_t)(t / 4) * (size_t)blocks;
        for (int g = tile * 2; g < tile * 2 + 2; g++) {
            f32x8 acc = set8(0);
            for (int b = 0; b < blocks; b++) {
                size_t at = (size_t)g * (size_t)blocks + (size_t)b;
                const struct q4_block *q4 = (const struct q4_block *)w->data + at;
                const struct q8_block *q8 = (const struct q8_block *)w->data + at;
                i32x8 dots = {0};
                for (int c = 0; c < 32; c++) {
                    int j = c / 4, value = x[b].q[j][t % 4][c % 4];
                    for (int r = 0; r < 8; r++) {
                        int q = w->format == PACKED_Q8 ? q8->q[32 * j + 4 * r + c % 4]
                                                       : q4->q[32 * (j % 4) + 4 * r + c % 4] >> (j < 4 ? 0 : 4) & 15;
                        dots[r] += q * value;
                    }
                }
                f32x8 scale = load_half8(w->format == PACKED_Q8 ? w->scales + at * 8 : q4->scale);
                acc = fma8(__builtin_convertvector(dots, f32x8), scale * set8(x[b].scale[t % 4]), acc);
                if (w->format == PACKED_Q4) acc = fma8(load_half8(q4->minimum), set8(x[b].sum[t % 4]), acc);
            }
            finish8(ex, op, t, g, acc);
        }
    }
}
