// softmax(scale q K^T) V over a paged K/V store, for one KV head and a tile of query rows.
//
// Positions are cut into spans anchored at multiples of KEYS_PER_SPAN. Within a span: scores (one FMA chain over
// head_dim per key), their maximum, exp, sum (lanes by position mod 8), and P V (one chain over the keys per
// column). Spans are merged in ascending order. None of this depends on the tile, the chunk, the other rows
// or the thread: a masked key adds an exact zero. Bound: K/V bytes for single rows, FMA for prefill tiles.

#define ROWS_PER_PASS 4
#define DIRECT_ROWS 4  // up to here K and V are widened in registers, above it once into scratch

// What a span contributes to a row, before division by the sum.
struct span_view {
    const struct kv *kv;
    const int32_t *table;
    int layer, head, first_block, last_block;  // blocks of this span that the tile needs, last excluded
};

struct attention_job {
    const struct executor *ex;
    const struct op *op;
    struct attention_tile tile;
    int head, rows, per_token, dim, lanes, span_lanes;
    const float **queries;
    float *widened, *scores, *tops, *sums, *outs, *running_tops, *running_sums, *running_outs;
};

static void lay_out(struct attention_job *job, void *scratch) {
    size_t r = (size_t)job->rows, d = (size_t)job->dim;
    float *at = scratch;
    job->widened = at, at += (size_t)job->lanes * d;
    job->outs = at, at += r * d;
    job->running_outs = at, at += r * d;
    job->scores = at, at += r * (size_t)job->span_lanes;
    job->tops = at, at += r;
    job->sums = at, at += r;
    job->running_tops = at, at += r;
    job->running_sums = at, at += r;
    job->queries = (const float **)(((uintptr_t)at + 15) & ~(uintptr_t)15);
}

static void start_job(struct attention_job *job, const struct executor *ex, const struct op *op, int tile, int head,
                      void *scratch) {
    const struct kv *kv = &ex->kv[op->kv_group];
    int per_token = op->heads / kv->spec.heads;
    *job = (struct attention_job){.ex = ex, .op = op, .tile = ex->tile[tile], .head = head, .per_token = per_token};
    job->rows = job->tile.count * per_token;
    job->dim = kv->spec.head_dim;
    job->lanes = kv->lanes;
    job->span_lanes = blocks_per_span(kv->lanes) * kv->lanes;
    lay_out(job, scratch);
    for (int r = 0; r < job->rows; r++) {
        int column = (head * per_token + r % per_token) * job->dim;
        job->queries[r] = row_of(ex, op->in0, op->width, job->tile.first + r / per_token) + column;
    }
}

// The positions [*low, *high) that a query row reads.
INLINE void row_range(const struct attention_job *job, int row, int *low, int *high) {
    int position = job->ex->row_position[job->tile.first + row / job->per_token];
    int window = job->ex->kv[job->op->kv_group].spec.window;
    *high = position + 1;
    *low = window > 0 ? max_int(0, position + 1 - window) : 0;
}

INLINE f32x8 load_kv8(const void *p, int at, int half) {
    return half ? load_half8((const uint16_t *)p + at) : load8((const float *)p + at);
}

static const float *widen(const void *chunk, int count, float *out) {
    for (int i = 0; i < count; i += 8) store8(out + i, load_half8((const uint16_t *)chunk + i));
    return out;
}

// scores[r, lane] = scale * sum_d q[r, d] k[d, lane] for `vectors` groups of eight lanes.
INLINE void score_tile(const float *const *q, int rows, int vectors, const void *k, int half, int lanes, int dim,
                       float scale, float *scores, int stride) {
    f32x8 acc[ROWS_PER_PASS][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) acc[r][v] = set8(0);
    for (int d = 0; d < dim; d++) {
        f32x8 key[4];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) key[v] = load_kv8(k, d * lanes + v * 8, half);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            f32x8 query = set8(q[r][d]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) acc[r][v] = fma8(query, key[v], acc[r][v]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store8(scores + r * stride + v * 8, acc[r][v] * set8(scale));
}

// out[r, d] += sum_key p[r, key] v[key, d] for `vectors` groups of eight columns.
INLINE void value_tile(const float *p, int stride, int rows, int vectors, const void *values, int half, int dim,
                       int first, int last, float *out) {
    f32x8 acc[ROWS_PER_PASS][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) acc[r][v] = load8(out + r * dim + v * 8);
    for (int key = first; key < last; key++) {
        f32x8 value[4];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) value[v] = load_kv8(values, key * dim + v * 8, half);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            f32x8 weight = set8(p[r * stride + key]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) acc[r][v] = fma8(weight, value[v], acc[r][v]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store8(out + r * dim + v * 8, acc[r][v]);
}

// Few rows take four vectors at a time (a cache line of float16, enough chains to hide the FMA's latency),
// four rows take two.
INLINE void scores_of(const struct attention_job *job, int row, int rows, const void *k, int half, float *scores) {
    const float *const *q = job->queries + row;
    int wide = rows < 4 ? 4 : 2, v = 0, item = half ? 2 : 4;
    for (; v + wide <= job->lanes / 8; v += wide)
        score_tile(q, rows, wide, (const uint8_t *)k + v * 8 * item, half, job->lanes, job->dim, job->op->scale,
                   scores + v * 8, job->span_lanes);
    for (; v < job->lanes / 8; v++)
        score_tile(q, rows, 1, (const uint8_t *)k + v * 8 * item, half, job->lanes, job->dim, job->op->scale,
                   scores + v * 8, job->span_lanes);
}

INLINE void values_of(const struct attention_job *job, int row, int rows, const void *values, int half, int first,
                      int last, const float *p) {
    int wide = rows < 4 ? 4 : 2, v = 0, item = half ? 2 : 4;
    float *out = job->outs + row * job->dim;
    for (; v + wide <= job->dim / 8; v += wide)
        value_tile(p, job->span_lanes, rows, wide, (const uint8_t *)values + v * 8 * item, half, job->dim, first,
                   last, out + v * 8);
    for (; v < job->dim / 8; v++)
        value_tile(p, job->span_lanes, rows, 1, (const uint8_t *)values + v * 8 * item, half, job->dim, first, last,
                   out + v * 8);
}

// Constant row counts and element types, so that the tiles above live in registers.
#define FOR_ROWS(rows, half, call)                 \
    switch ((rows) * 2 + (half)) {                 \
    case 2: call(1, 0); break;                     \
    case 3: call(1, 1); break;                     \
    case 4: call(2, 0); break;                     \
    case 5: call(2, 1); break;                     \
    case 6: call(3, 0); break;                     \
    case 7: call(3, 1); break;                     \
    case 8: call(4, 0); break;                     \
    default: call(4, 1); break;                    \
    }

static void block_scores(const struct attention_job *job, const void *k, int half, float *scores) {
    for (int row = 0; row < job->rows; row += ROWS_PER_PASS) {
        float *out = scores + (size_t)row * (size_t)job->span_lanes;
#define CALL(n, h) scores_of(job, row, n, k, h, out)
        FOR_ROWS(min_int(ROWS_PER_PASS, job->rows - row), half, CALL)
#undef CALL
    }
}

static void block_values(const struct attention_job *job, const void *values, int half, int first, int last,
                         const float *scores) {
    for (int row = 0; row < job->rows; row += ROWS_PER_PASS) {
        const float *p = scores + (size_t)row * (size_t)job->span_lanes;
#define CALL(n, h) values_of(job, row, n, values, h, first, last, p)
        FOR_ROWS(min_int(ROWS_PER_PASS, job->rows - row), half, CALL)
#undef CALL
    }
}

// Scores of one row -> weights: cap, mask, subtract the maximum, exp, sum. Lanes outside the row become zero.
static void span_softmax(const struct attention_job *job, const struct span_view *span, int row) {
    const i32x8 iota = {0, 1, 2, 3, 4, 5, 6, 7};
    float *scores = job->scores + (size_t)row * (size_t)job->span_lanes;
    int low, high, block_tokens = span->kv->spec.block_tokens;
    row_range(job, row, &low, &high);
    f32x8 top = set8(-INFINITY), sum = set8(0);
    for (int pass = 0; pass < 2; pass++) {
        float best = top8(top);
        for (int b = span->first_block; b < span->last_block; b++) {
            int first = low - b * block_tokens, last = min_int(high - b * block_tokens, block_tokens);
            float *block = scores + (b - span->first_block) * job->lanes;
            for (int i = 0; i < job->lanes; i += 8) {
                i32x8 lane = iota + i, inside = (lane >= first) & (lane < last);
                f32x8 s = load8(block + i);
                if (pass == 0) {
                    if (job->op->softcap > 0) s = tanh8(s / set8(job->op->softcap)) * set8(job->op->softcap);
                    s = select8(inside, s, set8(-INFINITY));
                    top = max8(top, s);
                } else {
                    s = select8(inside, exp8(s - set8(best)), set8(0));
                    sum += s;
                }
                store8(block + i, s);
            }
        }
    }
    job->tops[row] = top8(top);
    job->sums[row] = sum8(sum);
}

// Compute one span for all rows of the tile: tops, sums and outs.
static void compute_span(const struct attention_job *job, const struct span_view *span) {
    const struct kv *kv = span->kv;
    int half = kv->spec.half, widen_first = half && job->rows > DIRECT_ROWS, count = job->dim * job->lanes;
    for (int b = span->first_block; b < span->last_block; b++) {
        const void *k = kv_chunk(kv, span->layer, span->head, span->table[b]);
        if (widen_first) k = widen(k, count, job->widened);
        block_scores(job, k, half && !widen_first, job->scores + (b - span->first_block) * job->lanes);
    }
    for (int row = 0; row < job->rows; row++) span_softmax(job, span, row);
    memset(job->outs, 0, (size_t)(job->rows * job->dim) * sizeof *job->outs);
    int low, high, unused;
    row_range(job, 0, &low, &unused);
    row_range(job, job->rows - 1, &unused, &high);
    for (int b = span->first_block; b < span->last_block; b++) {
        int block_tokens = kv->spec.block_tokens, first = max_int(0, low - b * block_tokens);
        int last = min_int(block_tokens, high - b * block_tokens);
        const uint8_t *chunk = kv_chunk(kv, span->layer, span->head, span->table[b]);
        const void *values = chunk + (size_t)count * (half ? 2 : 4);
        if (widen_first) values = widen(values, count, job->widened);
        block_values(job, values, half && !widen_first, first, last,
                     job->scores + (b - span->first_block) * job->lanes);
    }
}

// The blocks of span `index` that some row of the tile reads; 0 when there are none.
static int find_span(const struct attention_job *job, int index, struct span_view *span) {
    const struct kv *kv = &job->ex->kv[job->op->kv_group];
    int per_span = job->span_lanes / job->lanes, block_tokens = kv->spec.block_tokens, low, high, unused;
    row_range(job, 0, &low, &unused);
    row_range(job, job->rows - 1, &unused, &high);
    int slot = job->ex->row_slot[job->tile.first];
    *span = (struct span_view){
        .kv = kv,
        .table = kv->spec.table + (size_t)slot * (size_t)kv->spec.table_blocks,
        .layer = job->op->layer,
        .head = job->head,
        .first_block = max_int(index * per_span, low / block_tokens),
        .last_block = min_int((index + 1) * per_span, (high + block_tokens - 1) / block_tokens),
    };
    return span->first_block < span->last_block;
}

// Whether a row reads anything in a span.
INLINE int reads_span(const struct attention_job *job, int index, int row) {
    int low, high, positions = job->span_lanes / job->lanes * job->ex->kv[job->op->kv_group].spec.block_tokens;
    row_range(job, row, &low, &high);
    return low < (index + 1) * positions && high > index * positions;
}

// (top, sum, out) of a span into the running ones: rescale both to the larger top.
static void merge_row(float top, float sum, const float *out, int dim, float *running_top, float *running_sum,
                      float *running_out) {
    float larger = top > *running_top ? top : *running_top;
    f32x8 pair = {*running_top - larger, top - larger};
    f32x8 factors = exp8(pair);
    float old = *running_top == -INFINITY ? 0.0f : factors[0], new = factors[1];
    *running_top = larger;
    *running_sum = *running_sum * old + sum * new;
    for (int d = 0; d < dim; d += 8)
        store8(running_out + d, fma8(load8(out + d), set8(new), load8(running_out + d) * set8(old)));
}

static void start_merge(const struct attention_job *job) {
    memset(job->running_outs, 0, (size_t)(job->rows * job->dim) * sizeof(float));
    for (int row = 0; row < job->rows; row++) job->running_tops[row] = -INFINITY, job->running_sums[row] = 0;
}

static void finish_merge(const struct attention_job *job) {
    for (int row = 0; row < job->rows; row++) {
        int column = (job->head * job->per_token + row % job->per_token) * job->dim;
        float *out = row_of(job->ex, job->op->out, job->op->width, job->tile.first + row / job->per_token) + column;
        f32x8 inverse = set8(1.0f / job->running_sums[row]);
        for (int d = 0; d < job->dim; d += 8) store8(out + d, load8(job->running_outs + row * job->dim + d) * inverse);
    }
}

// An item is (tile, head), the last tiles (the longest ranges) first; a split step adds the span.
static void attention_item(const struct executor *ex, const struct op *op, int item, void *scratch) {
    struct attention_job job;
    struct span_view span;
    int heads = ex->kv[op->kv_group].spec.heads;
    if (ex->split) {
        int index = item % ex->spans, unit = item / ex->spans;
        start_job(&job, ex, op, unit / heads, unit % heads, scratch);
        if (!find_span(&job, index, &span)) return;
        compute_span(&job, &span);
        float *partial = ex->partials + (size_t)item * ex->partial_stride;
        memcpy(partial, job.tops, (size_t)job.rows * sizeof(float));
        memcpy(partial + job.rows, job.sums, (size_t)job.rows * sizeof(float));
        memcpy(partial + 2 * job.rows, job.outs, (size_t)(job.rows * job.dim) * sizeof(float));
        return;
    }
    start_job(&job, ex, op, ex->tiles - 1 - item / heads, item % heads, scratch);
    start_merge(&job);
    for (int index = 0; index < ex->spans; index++) {
        if (!find_span(&job, index, &span)) continue;
        compute_span(&job, &span);
        for (int row = 0; row < job.rows; row++)
            if (reads_span(&job, index, row))
                merge_row(job.tops[row], job.sums[row], job.outs + row * job.dim, job.dim, &job.running_tops[row],
                          &job.running_sums[row], job.running_outs + row * job.dim);
    }
    finish_merge(&job);
}

// The second half of a split step: an item is (tile, head).
static void attention_merge(const struct executor *ex, const struct op *op, int item, void *scratch) {
    struct attention_job job;
    int heads = ex->kv[op->kv_group].spec.heads;
    start_job(&job, ex, op, item / heads, item % heads, scratch);
    start_merge(&job);
    for (int index = 0; index < ex->spans; index++) {
        const float *partial = ex->partials + ((size_t)item * (size_t)ex->spans + (size_t)index) * ex->partial_stride;
        for (int row = 0; row < job.rows; row++)
            if (reads_span(&job, index, row))
                merge_row(partial[row], partial[job.rows + row], partial + 2 * job.rows + row * job.dim, job.dim,
                          &job.running_tops[row], &job.running_sums[row], job.running_outs + row * job.dim);
    }
    finish_merge(&job);
}
