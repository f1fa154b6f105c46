// Building an executor: memory, packed weights, K/V stores, threads. Everything large is mapped in regions that
// are zero and page-aligned, and is released with the executor.
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "executor.h"
#include "library.h"

#define HUGE_PAGE ((size_t)2 << 20)
#define POPULATED_BYTES ((size_t)48 << 20)  // of each K/V store
#define QUERY_ROWS 48  // rows of an attention tile: enough to reuse a widened block, few enough for its scores

struct region {
    struct region *next;
    void *base;
    size_t bytes;
};

static void *map_region(struct executor *ex, size_t bytes, int64_t *account) {
    struct region *region = malloc(sizeof *region);
    if (!region) return NULL;
    if (bytes == 0) bytes = 1;
    size_t align = bytes >= HUGE_PAGE ? HUGE_PAGE : 4096, total = (bytes + align - 1) / align * align + align;
    void *base = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
        free(region);
        return NULL;
    }
    *region = (struct region){ex->regions, base, total};
    ex->regions = region;
    *account += (int64_t)bytes;
    void *start = (void *)(((uintptr_t)base + align - 1) / align * align);
#ifdef MADV_HUGEPAGE
    if (align == HUGE_PAGE) madvise(start, total - align, MADV_HUGEPAGE);
#endif
    return start;
}

static const struct kernels *choose_kernels(int isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (isa != ISA_PORTABLE && has_avx2) return &kernels_avx2;
#endif
    return isa == ISA_AVX2_ONLY ? NULL : &kernels_portable;
}

static void plan_matrix(struct matrix *w, const struct matrix_spec *spec, size_t *bytes) {
    int unit = tile_rows(spec->format);
    *w = (struct matrix){.format = spec->format, .rows = spec->rows, .cols = spec->cols};
    w->groups = round_up(spec->rows, unit) / 8;
    size_t elements = (size_t)w->groups * 8 * (size_t)spec->cols;
    size_t blocks = elements / 256, data = elements * 2, scales = 0;
    if (spec->format == PACKED_F32) data = elements * 4;
    if (spec->format == PACKED_Q4) data = blocks * sizeof(struct q4_block);
    if (spec->format == PACKED_Q8) data = blocks * sizeof(struct q8_block), scales = blocks * 16;
    w->data = (void *)*bytes;  // offsets until the region is mapped
    *bytes += (data + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    w->scales = (void *)*bytes;
    *bytes += (scales + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
}

static int map_weights(struct executor *ex) {
    size_t bytes = 0;
    for (int i = 0; i < ex->plan.matrix_count; i++) plan_matrix(&ex->matrices[i], &ex->plan.matrices[i], &bytes);
    uint8_t *base = map_region(ex, bytes, &ex->bytes.weights);
    if (!base) return STATUS_NO_MEMORY;
    for (int i = 0; i < ex->plan.matrix_count; i++) {
        ex->matrices[i].data = base + (size_t)ex->matrices[i].data;
        ex->matrices[i].scales = (void *)(base + (size_t)ex->matrices[i].scales);
    }
    for (int i = 0; i < ex->plan.vector_count; i++) {
        const struct vector_spec *spec = &ex->plan.vectors[i];
        size_t length = ((size_t)spec->length + 7) / 8 * 8 * sizeof(float);
        ex->vectors[i] = map_region(ex, length, &ex->bytes.weights);
        if (!ex->vectors[i]) return STATUS_NO_MEMORY;
        memcpy(ex->vectors[i], spec->data, (size_t)spec->length * sizeof(float));
    }
    return STATUS_OK;
}

// Have the pages of the first blocks now (the store hands out low indices first), not while the first prompt waits.
static void populate_kv(const struct kv *kv) {
#ifdef MADV_POPULATE_WRITE
    size_t page = (size_t)sysconf(_SC_PAGESIZE), rows = (size_t)kv->spec.layers * (size_t)kv->spec.heads;
    size_t blocks = POPULATED_BYTES / (rows * kv->chunk_bytes), row_bytes = (size_t)kv->spec.blocks * kv->chunk_bytes;
    if (blocks > (size_t)kv->spec.blocks) blocks = (size_t)kv->spec.blocks;
    for (size_t row = 0; row < rows && blocks; row++) {
        size_t begin = row * row_bytes / page * page;
        madvise(kv->data + begin, row * row_bytes + blocks * kv->chunk_bytes - begin, MADV_POPULATE_WRITE);
    }
#else
    (void)kv;
#endif
}

static int map_kv(struct executor *ex) {
    for (int g = 0; g < ex->plan.kv_count; g++) {
        struct kv *kv = &ex->kv[g];
        kv->spec = ex->plan.kv[g];
        kv->lanes = round_up(kv->spec.block_tokens, 8);
        kv->chunk_bytes = (size_t)2 * (size_t)kv->lanes * (size_t)kv->spec.head_dim * (kv->spec.half ? 2 : 4);
        size_t chunks = (size_t)kv->spec.layers * (size_t)kv->spec.heads * (size_t)kv->spec.blocks;
        kv->data = map_region(ex, chunks * kv->chunk_bytes, &ex->bytes.kv);
        if (!kv->data) return STATUS_NO_MEMORY;
#ifdef MADV_NOHUGEPAGE
        // The parts of one block lie far apart: a huge page under each would be 2 MB to zero on first touch.
        madvise(kv->data, chunks * kv->chunk_bytes, MADV_NOHUGEPAGE);
#endif
        populate_kv(kv);
    }
    return STATUS_OK;
}

// Attention's tiles and scratch, from the largest ratio of query to KV heads.
static size_t plan_attention(struct executor *ex, size_t *partial_floats) {
    int most = 1;
    for (int i = 0; i < ex->plan.op_count; i++) {
        const struct op *op = &ex->plan.ops[i];
        if (op->code == OP_ATTENTION) most = max_int(most, op->heads / ex->kv[op->kv_group].spec.heads);
    }
    ex->tile_tokens = max_int(1, QUERY_ROWS / most);
    size_t scratch = 0, spans = 0;
    for (int g = 0; g < ex->plan.kv_count; g++) {
        const struct kv *kv = &ex->kv[g];
        int span_blocks = blocks_per_span(kv->lanes), positions = span_blocks * kv->spec.block_tokens;
        size_t need = attention_scratch_bytes(ex->tile_tokens * most, kv->spec.head_dim, kv->lanes,
                                              span_blocks * kv->lanes);
        size_t stride = (size_t)most * ((size_t)kv->spec.head_dim + 2);
        if (need > scratch) scratch = need;
        if (stride > ex->partial_stride) ex->partial_stride = stride;
        size_t group_spans = (size_t)((ex->plan.max_len + positions - 1) / positions);
        if (group_spans > spans) spans = group_spans;
    }
    *partial_floats = SPLIT_UNITS((size_t)ex->plan.threads) * spans * ex->partial_stride;
    return scratch;
}

static int map_buffers(struct executor *ex) {
    size_t partials, kernel = plan_attention(ex, &partials), vocab = (size_t)ex->plan.vocab;
    size_t rows = (size_t)ex->plan.max_rows, logits = (size_t)ex->plan.max_logits;
    int64_t *account = &ex->bytes.buffers;
    for (int i = 0; i < ex->plan.matrix_count; i++) {  // 32 columns of 16 rows, unpacked: 640 bytes
        size_t widened = (size_t)ex->matrices[i].cols / 32 * 640;
        if (ex->matrices[i].format == PACKED_Q4 && widened > kernel) kernel = widened;
    }
    ex->arena = map_region(ex, (size_t)ex->plan.arena_bytes, account);
    ex->partials = map_region(ex, partials * sizeof(float), account);
    ex->row_slot = map_region(ex, rows * sizeof(int32_t), account);
    ex->row_position = map_region(ex, rows * sizeof(int32_t), account);
    ex->tile = map_region(ex, rows * sizeof(struct attention_tile), account);
    ex->logit_row = map_region(ex, logits * sizeof(int32_t), account);
    ex->logit_segment = map_region(ex, logits * sizeof(int32_t), account);
    ex->counters = map_region(ex, PASSES(ex) * sizeof(struct counter), account);
    if (!ex->arena || !ex->partials || !ex->row_slot || !ex->row_position || !ex->tile || !ex->logit_row ||
        !ex->logit_segment || !ex->counters)
        return STATUS_NO_MEMORY;
    for (int t = 0; t < ex->plan.threads; t++) {
        struct scratch *s = &ex->scratch[t];
        s->kernel = map_region(ex, kernel, account);
        s->logits = map_region(ex, vocab * sizeof(float), account);
        s->draws = map_region(ex, vocab * sizeof(uint64_t), account);
        s->keys = map_region(ex, (vocab + 1) * sizeof(uint64_t), account);
        s->counts = map_region(ex, vocab * sizeof(int32_t), account);
        if (!s->kernel || !s->logits || !s->draws || !s->keys || !s->counts) return STATUS_NO_MEMORY;
    }
    return STATUS_OK;
}

// The plan's own arrays are copied, so that the host may drop them after the call.
static int copy_plan(struct executor *ex, const struct plan *plan) {
    ex->plan = *plan;
    struct op *ops = map_region(ex, sizeof *ops * (size_t)plan->op_count, &ex->bytes.buffers);
    struct phase *phases = map_region(ex, sizeof *phases * (size_t)plan->phase_count, &ex->bytes.buffers);
    ex->matrices = map_region(ex, sizeof *ex->matrices * (size_t)plan->matrix_count, &ex->bytes.buffers);
    ex->vectors = map_region(ex, sizeof *ex->vectors * (size_t)plan->vector_count, &ex->bytes.buffers);
    ex->kv = map_region(ex, sizeof *ex->kv * (size_t)plan->kv_count, &ex->bytes.buffers);
    ex->scratch = map_region(ex, sizeof *ex->scratch * (size_t)plan->threads, &ex->bytes.buffers);
    if (!ops || !phases || !ex->matrices || !ex->vectors || !ex->kv || !ex->scratch) return STATUS_NO_MEMORY;
    memcpy(ops, plan->ops, sizeof *ops * (size_t)plan->op_count);
    memcpy(phases, plan->phases, sizeof *phases * (size_t)plan->phase_count);
    ex->plan.ops = ops;
    ex->plan.phases = phases;
    return STATUS_OK;
}

static int build(struct executor *ex, const struct plan *plan) {
    int status = copy_plan(ex, plan);
    ex->kernels = choose_kernels(plan->isa);
    if (status == STATUS_OK && !ex->kernels) status = STATUS_NO_ISA;
    if (status == STATUS_OK) status = map_weights(ex);
    if (status == STATUS_OK) status = map_kv(ex);
    if (status == STATUS_OK) status = map_buffers(ex);
    if (status != STATUS_OK) return status;
    ex->plan.matrices = NULL;
    ex->plan.vectors = NULL;
    ex->pool = pool_open(plan->threads);
    return ex->pool ? STATUS_OK : STATUS_NO_THREAD;
}

int artesian_create(const struct plan *plan, struct executor **out) {
    struct executor *ex = calloc(1, sizeof *ex);
    if (!ex) return STATUS_NO_MEMORY;
    int status = build(ex, plan);
    if (status == STATUS_OK) {
        *out = ex;
    } else {
        artesian_destroy(ex);
    }
    return status;
}

void artesian_destroy(struct executor *ex) {
    if (ex->pool) pool_close(ex->pool);
    for (struct region *region = ex->regions, *next; region; region = next) {
        next = region->next;
        munmap(region->base, region->bytes);
        free(region);
    }
    free(ex);
}

struct pack_job {
    struct executor *ex;
    const struct matrix *matrix;
    const uint8_t *data;
    size_t row_bytes;
    int source, first_row, rows;
    _Atomic int32_t next;
};

static void pack_work(void *arg, int thread) {
    (void)thread;
    struct pack_job *job = arg;
    for (int begin, n; (n = pool_take(&job->next, job->rows, pool_threads(job->ex->pool), &begin));)
        job->ex->kernels->pack(job->matrix, job->source, job->data + (size_t)begin * job->row_bytes,
                               job->first_row + begin, n);
}

int artesian_pack(struct executor *ex, int matrix, int source, const uint8_t *data, int64_t bytes, int first_row,
                  int rows) {
    if (matrix < 0 || matrix >= ex->plan.matrix_count) return STATUS_BAD_WEIGHT;
    const struct matrix *w = &ex->matrices[matrix];
    static const int bytes_of[] = {4, 2, 2, 18, 20, 34}, columns_of[] = {1, 1, 1, 32, 32, 32};
    size_t row_bytes = (size_t)(w->cols / columns_of[source]) * (size_t)bytes_of[source];
    if (first_row < 0 || rows < 0 || rows > w->rows - first_row) return STATUS_BAD_WEIGHT;
    if ((size_t)bytes != row_bytes * (size_t)rows) return STATUS_BAD_WEIGHT;
    struct pack_job job = {ex, w, data, row_bytes, source, first_row, rows, 0};
    pool_run(ex->pool, pack_work, &job);
    return STATUS_OK;
}

void artesian_memory(const struct executor *ex, struct memory *out) { *out = ex->bytes; }

const char *artesian_isa_for(int isa) {
    const struct kernels *kernels = choose_kernels(isa);
    return kernels ? kernels->name : "";
}

const char *artesian_isa(const struct executor *ex) { return ex->kernels->name; }

int64_t artesian_abi(void) {
    return (int64_t)(sizeof(struct plan) << 48 ^ sizeof(struct step) << 36 ^ sizeof(struct op) << 24 ^
                     sizeof(struct sampling) << 12 ^ sizeof(struct kv_spec) ^ ABI_VERSION);
}
