// Weight formats: from the file's rows to groups of eight interleaved rows, and one row back (the embedding).

#define Q4_0_BYTES 18  // block_q4_0, block_q4_1 and block_q8_0 of ggml-common.h: 32 columns each
#define Q4_1_BYTES 20
#define Q8_0_BYTES 34

static inline float half_value(uint16_t h) {
    uint16_t lanes[8] = {h};
    return load_half8(lanes)[0];
}

static inline uint16_t half_bits(float x) {
    uint16_t lanes[8];
    store_half8(lanes, set8(x));
    return lanes[0];
}

static void pack_q4_row(const struct matrix *w, int row, const uint8_t *source, int source_format) {
    int blocks = w->cols / 32, r = row % 8;
    struct q4_block *out = (struct q4_block *)w->data + (size_t)(row / 8) * (size_t)blocks;
    for (int b = 0; b < blocks; b++, out++) {
        memcpy(&out->scale[r], source, 2);
        if (source_format == SOURCE_Q4_1) {
            memcpy(&out->minimum[r], source + 2, 2);
        } else {  // d (q - 8) = d q + (-8 d)
            out->minimum[r] = half_bits(-8.0f * half_value(out->scale[r]));
        }
        const uint8_t *q = source + (source_format == SOURCE_Q4_1 ? 4 : 2);
        for (int c = 0; c < 16; c++) out->q[32 * (c / 4) + 4 * r + c % 4] = q[c];  // nibbles: columns c, c + 16
        source += source_format == SOURCE_Q4_1 ? Q4_1_BYTES : Q4_0_BYTES;
    }
}

static void pack_q8_row(const struct matrix *w, int row, const uint8_t *source) {
    int blocks = w->cols / 32, r = row % 8;
    size_t first = (size_t)(row / 8) * (size_t)blocks;
    struct q8_block *out = (struct q8_block *)w->data + first;
    uint16_t *scales = w->scales + first * 8 + r;
    for (int b = 0; b < blocks; b++, out++, scales += 8, source += Q8_0_BYTES) {
        memcpy(scales, source, 2);
        for (int c = 0; c < 32; c += 4) memcpy(&out->q[8 * c + 4 * r], source + 2 + c, 4);
    }
}

// Column-major within the group: the eight rows' values of a column lie together.
static void pack_float_row(const struct matrix *w, int row, const uint8_t *source) {
    size_t start = (size_t)(row / 8) * (size_t)w->cols * 8 + (size_t)(row % 8);
    for (int c = 0; c < w->cols; c++) {
        size_t at = start + (size_t)c * 8;
        if (w->format == PACKED_F32) {
            memcpy((float *)w->data + at, source + (size_t)c * 4, 4);
        } else {
            memcpy((uint16_t *)w->data + at, source + (size_t)c * 2, 2);
        }
    }
}

static void pack_rows(const struct matrix *w, int source, const uint8_t *data, int first_row, int rows) {
    size_t cols = (size_t)w->cols;
    for (int i = 0; i < rows; i++) {
        switch (source) {
        case SOURCE_Q4_0: pack_q4_row(w, first_row + i, data + (size_t)i * cols / 32 * Q4_0_BYTES, source); break;
        case SOURCE_Q4_1: pack_q4_row(w, first_row + i, data + (size_t)i * cols / 32 * Q4_1_BYTES, source); break;
        case SOURCE_Q8_0: pack_q8_row(w, first_row + i, data + (size_t)i * cols / 32 * Q8_0_BYTES); break;
        case SOURCE_F32: pack_float_row(w, first_row + i, data + (size_t)i * cols * 4); break;
        default: pack_float_row(w, first_row + i, data + (size_t)i * cols * 2); break;
        }
    }
}

static void unpack_row(const struct matrix *w, int row, float *out) {
    int r = row % 8;
    size_t group = (size_t)(row / 8), cols = (size_t)w->cols, blocks = cols / 32;
    for (size_t c = 0; c < cols; c++) {
        size_t at = (group * cols + c) * 8 + (size_t)r, b = group * blocks + c / 32, j = c % 32 / 4;
        switch (w->format) {
        case PACKED_F32: out[c] = ((const float *)w->data)[at]; break;
        case PACKED_F16: out[c] = half_value(((const uint16_t *)w->data)[at]); break;
        case PACKED_BF16: {
            uint32_t bits = (uint32_t)((const uint16_t *)w->data)[at] << 16;
            memcpy(&out[c], &bits, sizeof bits);
            break;
        }
        case PACKED_Q4: {
            const struct q4_block *block = (const struct q4_block *)w->data + b;
            uint8_t both = block->q[32 * (j % 4) + 4 * (size_t)r + c % 4];
            int q = j < 4 ? both & 15 : both >> 4;
            out[c] = half_value(block->scale[r]) * (float)q + half_value(block->minimum[r]);
            break;
        }
        default: {
            const struct q8_block *block = (const struct q8_block *)w->data + b;
            out[c] = half_value(w->scales[b * 8 + (size_t)r]) * (float)block->q[32 * j + 4 * (size_t)r + c % 4];
        }
        }
    }
}
