// Ops that work on one row alone: norms, rotations, activations, arithmetic, the embedding, K/V stores.
// Buffers are padded to eight columns, so elementwise loops run over whole vectors; sums do not.

static void rms_norm_row(const float *x, const float *weight, int width, int group, float eps, float *out) {
    for (int at = 0; at < width; at += group, x += group, out += group) {
        f32x8 squares = set8(0);
        int i = 0;
        for (; i + 8 <= group; i += 8) squares = fma8(load8(x + i), load8(x + i), squares);
        float sum = sum8(squares);
        for (; i < group; i++) sum += x[i] * x[i];
        float inverse = 1.0f / sqrtf(sum / (float)group + eps);
        for (i = 0; i + 8 <= group; i += 8) store8(out + i, load8(x + i) * set8(inverse) * load8(weight + i));
        for (; i < group; i++) out[i] = x[i] * inverse * weight[i];
    }
}

// cos and sin of f32(position * inv_freq[i]): `half` cosines, then `half` sines.
static void angles_row(const float *inv_freq, int half, int position, float *out) {
    for (int i = 0; i < half; i++) {
        double angle = (double)((float)position * inv_freq[i]);
        out[i] = (float)cos(angle);
        out[half + i] = (float)sin(angle);
    }
}

// (a, b) -> (a cos - b sin, b cos + a sin); the pair is columns (2i, 2i + 1) or (i, i + half) of each head.
static void rope_row(const struct op *op, const float *x, const float *angles, float *out) {
    int half = op->rotary / 2;
    const float *cosines = angles, *sines = angles + half;
    float magnitude = op->scale;
    for (int at = 0; at < op->width; at += op->head_dim, x += op->head_dim, out += op->head_dim) {
        int i = 0;
        if (op->interleaved) {
            for (; i < half; i++) {
                float c = cosines[i] * magnitude, s = sines[i] * magnitude, a = x[2 * i], b = x[2 * i + 1];
                out[2 * i] = a * c - b * s;
                out[2 * i + 1] = b * c + a * s;
            }
        } else {
            for (; i + 8 <= half; i += 8) {
                f32x8 c = load8(cosines + i) * set8(magnitude), s = load8(sines + i) * set8(magnitude);
                f32x8 a = load8(x + i), b = load8(x + half + i);
                store8(out + i, a * c - b * s);
                store8(out + half + i, b * c + a * s);
            }
            for (; i < half; i++) {
                float c = cosines[i] * magnitude, s = sines[i] * magnitude, a = x[i], b = x[half + i];
                out[i] = a * c - b * s;
                out[half + i] = b * c + a * s;
            }
        }
        memcpy(out + op->rotary, x + op->rotary, (size_t)(op->head_dim - op->rotary) * sizeof *x);
    }
}

INLINE f32x8 activate8(f32x8 x, int act) {
    if (act == ACT_SILU) return x / (set8(1.0f) + exp8(-x));
    if (act == ACT_GELU_TANH) {
        f32x8 inner = set8(0.79788456f) * (x + set8(0.044715f) * (x * x * x));  // sqrt(2 / pi)
        return set8(0.5f) * x * (set8(1.0f) + tanh8(inner));
    }
    f32x8 erf;
    for (int i = 0; i < 8; i++) erf[i] = erff(x[i] * 0.70710678f);
    return set8(0.5f) * x * (set8(1.0f) + erf);
}

static void glu_row(const float *gate, const float *up, int width, int act, float *out) {
    for (int i = 0; i < width; i += 8) store8(out + i, activate8(load8(gate + i), act) * load8(up + i));
}

static void softcap_row(const float *x, int width, float cap, float *out) {
    for (int i = 0; i < width; i += 8) store8(out + i, tanh8(load8(x + i) / set8(cap)) * set8(cap));
}

// Store one position's K (a column of the transposed chunk) and V (a row), rounded to the group's dtype.
static void kv_write_row(const struct executor *ex, const struct op *op, const float *k, const float *v, int row) {
    const struct kv *kv = &ex->kv[op->kv_group];
    const int32_t *table = kv->spec.table + (size_t)ex->row_slot[row] * (size_t)kv->spec.table_blocks;
    int position = ex->row_position[row], dim = kv->spec.head_dim, lanes = kv->lanes;
    int block = table[position / kv->spec.block_tokens];
    int lane = position % kv->spec.block_tokens;
    for (int head = 0; head < kv->spec.heads; head++, k += dim, v += dim) {
        uint8_t *chunk = kv_chunk(kv, op->layer, head, block);
        if (kv->spec.half) {
            uint16_t *keys = (uint16_t *)chunk + lane, *values = (uint16_t *)chunk + (size_t)(dim * lanes + lane * dim);
            for (int d = 0; d < dim; d += 8) {
                uint16_t rounded[8];
                store_half8(rounded, load8(k + d));
                for (int i = 0; i < 8; i++) keys[(d + i) * lanes] = rounded[i];
                store_half8(values + d, load8(v + d));
            }
        } else {
            float *keys = (float *)chunk + lane, *values = (float *)chunk + (size_t)(dim * lanes + lane * dim);
            for (int d = 0; d < dim; d++) keys[d * lanes] = k[d];
            memcpy(values, v, (size_t)dim * sizeof *v);
        }
    }
}

static void embed_row(const struct executor *ex, const struct op *op, int row, float *out) {
    const struct matrix *table = &ex->matrices[op->weight];
    int token = ex->plan.tokens[(size_t)ex->row_slot[row] * (size_t)ex->plan.max_len + (size_t)ex->row_position[row]];
    token = min_int(max_int(token, 0), table->rows - 1);
    unpack_row(table, token, out);
    for (int i = 0; i < op->width; i += 8) store8(out + i, load8(out + i) * set8(op->scale));
}

static void run_row(const struct executor *ex, const struct op *op, int row) {
    const float *x = op->in0 < 0 ? NULL : row_of(ex, op->in0, op->width, row);
    const float *y = op->in1 < 0 ? NULL : row_of(ex, op->in1, op->code == OP_ROPE ? op->rotary : op->width, row);
    const float *vector = op->vector < 0 ? NULL : ex->vectors[op->vector];
    float *out = op->out < 0 || op->code == OP_QUANTISE ? NULL : row_of(ex, op->out, op->width, row);
    switch (op->code) {
    case OP_EMBED: embed_row(ex, op, row, out); break;
    case OP_ANGLES: angles_row(vector, op->rotary / 2, ex->row_position[row], out); break;
    case OP_RMS_NORM: rms_norm_row(x, vector, op->width, op->head_dim, op->scale, out); break;
    case OP_QUANTISE: {
        struct act_block *tiles = (struct act_block *)(ex->arena + op->out);
        quantise_row(x, op->width, tiles + (size_t)(row / 4) * (size_t)(op->width / 32), row % 4);
        break;
    }
    case OP_ROPE: rope_row(op, x, y, out); break;
    case OP_KV_WRITE: kv_write_row(ex, op, x, y, row); break;
    case OP_GLU: glu_row(x, y, op->width, op->act, out); break;
    case OP_ADD:
        for (int i = 0; i < op->width; i += 8) store8(out + i, load8(x + i) + load8(y + i));
        break;
    case OP_SCALE:
        for (int i = 0; i < op->width; i += 8) store8(out + i, load8(x + i) * set8(op->scale));
        break;
    case OP_SOFTCAP: softcap_row(x, op->width, op->softcap, out); break;
    case OP_SELECT:
        x = row_of(ex, op->in0, op->width, ex->logit_row[row]);
        memcpy(out, x, (size_t)op->width * sizeof *x);
        break;
    default: break;
    }
}
