// A loaded program and the views of a running step that the kernels see.
#ifndef ARTESIAN_EXECUTOR_H
#define ARTESIAN_EXECUTOR_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h"
#include "pool.h"

#define CACHE_LINE 64
#define KEYS_PER_SPAN 256  // softmax is reduced over spans anchored at multiples of this many positions
#define TILE_ROWS 16       // rows of a quantised matrix that one work item computes
#define TILE_TOKENS 96     // activations of one work item: 96 x 1536 int8 stay in a 512 KiB cache

// 32 columns of 8 matrix rows, q in 0..15: value = scale * q + minimum. Row r, column 4j + i sits in byte
// 32 (j % 4) + 4r + i, the low nibble for j < 4 and the high one otherwise.
struct q4_block {
    uint16_t scale[8], minimum[8];
    uint8_t q[128];
};

// The same 32 x 8 values as int8: byte 32 j + 4r + i; the scales lie in a plane of their own.
struct q8_block {
    int8_t q[256];
};

// 32 columns of 4 activation rows: int8 in groups of four columns, value = scale * q; sum = scale * sum(q).
struct act_block {
    int8_t q[8][4][4];
    float scale[4], sum[4];
};

// A packed [rows, cols] matrix in groups of 8 rows.
struct matrix {
    int32_t format, rows, cols, groups;  // groups is padded to whole tiles; the padding is zero
    void *data;
    uint16_t *scales;  // PACKED_Q8: [groups, cols / 32, 8] float16
};

// A paged K/V store: chunks [layer][head][block], each K transposed [head_dim][lanes], then V [lanes][head_dim].
struct kv {
    struct kv_spec spec;
    int32_t lanes;        // block_tokens rounded up to 8
    size_t chunk_bytes;
    uint8_t *data;
};

// Query rows of one segment that share passes over K and V.
struct attention_tile {
    int32_t first, count;  // rows of the step
};

struct scratch {
    void *kernel;                 // unpacked weights, or attention's K, V, scores and sums
    float *logits;                // a row being shaped by penalties and masks
    uint64_t *draws, *keys;       // [vocab] draw weights; their sort keys
    int32_t *counts;              // [vocab], zero between uses
};

// Work counter of one pass, alone in its cache line.
struct counter {
    _Alignas(CACHE_LINE) _Atomic int32_t next;
};

struct executor {
    struct plan plan;
    struct matrix *matrices;
    float **vectors;              // padded to eight
    struct kv *kv;
    const struct kernels *kernels;
    struct pool *pool;
    uint8_t *arena;
    struct scratch *scratch;      // one per thread
    float *partials;              // attention of few tokens: one result per (tile, head, span)
    size_t partial_stride;
    int32_t tile_tokens;          // tokens of an attention tile
    struct region *regions;       // everything mapped for this executor
    struct memory bytes;

    // The running step.
    struct step step;
    int32_t rows, logits_rows, tiles, spans;
    int32_t split;                // attention spans are items of their own
    int32_t serial_sampling;      // a slot appears twice
    int32_t *row_slot, *row_position;                    // [max_rows]
    int32_t *logit_row, *logit_segment;                  // [max_logits]
    struct attention_tile *tile;                         // [max_rows]
    struct counter *counters;     // one per pass of a step
};

struct logits_scan {
    float top;
    int32_t token;   // the lowest id with that logit
    int32_t has_nan;
};

struct weight_tail {
    int64_t count;
    uint64_t sum;
};

// The kernels of one instruction set.
struct kernels {
    const char *name;
    void (*row)(const struct executor *, const struct op *, int row);
    void (*linear)(const struct executor *, const struct op *, int item, void *scratch);
    void (*attention)(const struct executor *, const struct op *, int item, void *scratch);
    void (*attention_merge)(const struct executor *, const struct op *, int item, void *scratch);
    void (*pack)(const struct matrix *, int source, const uint8_t *data, int first_row, int rows);
    struct logits_scan (*scan)(const float *logits, int n);
    double (*exp_sum)(const float *logits, int n, float top);
    int (*rank)(const float *logits, int n, int token);
    int (*next_above)(const float *logits, int from, int n, float threshold);
    void (*draw_weights)(const float *logits, int n, float top, double temperature, uint64_t *weights);
    struct weight_tail (*weigh_tail)(const uint64_t *weights, int n, uint64_t least);
    void (*keep_down_to)(uint64_t *weights, int n, uint64_t least, int last);
};

extern const struct kernels kernels_portable, kernels_avx2;

static inline int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }
static inline int stride8(int width) { return round_up(width, 8); }
static inline int min_int(int a, int b) { return a < b ? a : b; }
static inline int max_int(int a, int b) { return a > b ? a : b; }

static inline float *row_of(const struct executor *ex, int64_t buffer, int width, int row) {
    return (float *)(ex->arena + buffer) + (size_t)row * (size_t)stride8(width);
}

// Rows of a packed matrix that one work item computes, by format.
static inline int tile_rows(int format) { return format >= PACKED_Q4 ? TILE_ROWS : 32; }

static inline int linear_items(const struct executor *ex, const struct op *op) {
    const struct matrix *w = &ex->matrices[op->weight];
    int rows = op->rows == ROWS_TOKENS ? ex->rows : ex->logits_rows;
    int tiles = w->groups * 8 / tile_rows(w->format);
    return tiles * ((rows + TILE_TOKENS - 1) / TILE_TOKENS);
}

static inline uint8_t *kv_chunk(const struct kv *kv, int layer, int head, int block) {
    size_t index = ((size_t)layer * (size_t)kv->spec.heads + (size_t)head) * (size_t)kv->spec.blocks + (size_t)block;
    return kv->data + index * kv->chunk_bytes;
}

// attention.inc.c: widened K or V, outs, running outs, scores, four floats and a pointer a row.
static inline size_t attention_scratch_bytes(int rows, int dim, int lanes, int span_lanes) {
    size_t r = (size_t)rows, d = (size_t)dim;
    return sizeof(float) * ((size_t)lanes * d + 2 * r * d + r * (size_t)span_lanes + 4 * r) + sizeof(void *) * r + 16;
}

static inline int blocks_per_span(int lanes) { return max_int(1, KEYS_PER_SPAN / lanes); }

// Below this many (tile, head) units a step of single tokens hands out attention span by span.
#define SPLIT_UNITS(threads) (4 * (threads))

// Work counters of a step: copies, sampling, and two for each phase.
#define PASSES(ex) ((size_t)(2 * (ex)->plan.phase_count + 2))

// Check and lay out a step. On an error *failed is the segment (or copy) at fault.
int begin_step(struct executor *ex, const struct step *step, int32_t *failed);
void copy_blocks(struct executor *ex, int item);
void sample_row(struct executor *ex, int row, struct scratch *scratch);

#endif
