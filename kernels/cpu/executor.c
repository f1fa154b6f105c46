// One step: every thread walks the phases together; inside a phase each takes items until none is left.
#define _POSIX_C_SOURCE 200809L
#include "executor.h"

#include <time.h>

#include "library.h"

#define MASK_NAP_NS 50000

enum { PASS_COPY, PASS_SAMPLE, PASS_FIRST_PHASE };  // then two passes a phase

struct walk {
    struct executor *ex;
    int thread;
};

static int row_count(const struct executor *ex, int kind) { return kind == ROWS_TOKENS ? ex->rows : ex->logits_rows; }

// Take items of a pass one call at a time; -1 when there are none left.
#define FOR_ITEMS(walk, pass, n, begin, count) \
    for (int begin = 0, count; (count = pool_take(&(walk)->ex->counters[pass].next, n, (walk)->ex->plan.threads, &begin)) > 0;)

static void run_rows(const struct walk *walk, const struct phase *phase, int pass) {
    const struct executor *ex = walk->ex;
    FOR_ITEMS(walk, pass, row_count(ex, phase->rows), begin, count)
        for (int row = begin; row < begin + count; row++)
            for (int i = 0; i < phase->count; i++) ex->kernels->row(ex, &ex->plan.ops[phase->first + i], row);
}

// The items of all linears of the phase lie back to back.
static void run_linears(const struct walk *walk, const struct phase *phase, int pass) {
    const struct executor *ex = walk->ex;
    const struct op *ops = ex->plan.ops + phase->first;
    int total = 0;
    for (int i = 0; i < phase->count; i++) total += linear_items(ex, &ops[i]);
    FOR_ITEMS(walk, pass, total, begin, count) {
        int op = 0, item = begin;
        while (item >= linear_items(ex, &ops[op])) item -= linear_items(ex, &ops[op++]);
        for (; count > 0; count--, item++) {
            if (item == linear_items(ex, &ops[op])) op++, item = 0;
            ex->kernels->linear(ex, &ops[op], item, ex->scratch[walk->thread].kernel);
        }
    }
}

static void run_attention(const struct walk *walk, const struct op *op, int pass) {
    struct executor *ex = walk->ex;
    int units = ex->tiles * ex->kv[op->kv_group].spec.heads, items = ex->split ? units * ex->spans : units;
    void *scratch = ex->scratch[walk->thread].kernel;
    _Atomic int32_t *next = &ex->counters[pass].next;
    for (int item; (item = atomic_fetch_add(next, 1)) < items;) ex->kernels->attention(ex, op, item, scratch);
    if (!ex->split) return;
    pool_barrier(ex->pool);
    next = &ex->counters[pass + 1].next;
    for (int item; (item = atomic_fetch_add(next, 1)) < units;) ex->kernels->attention_merge(ex, op, item, scratch);
}

static void run_phases(const struct walk *walk) {
    struct executor *ex = walk->ex;
    for (int p = 0; p < ex->plan.phase_count; p++) {
        const struct phase *phase = &ex->plan.phases[p];
        int pass = PASS_FIRST_PHASE + 2 * p;
        if (row_count(ex, phase->rows) == 0) continue;
        switch (phase->kind) {
        case PHASE_ROWS: run_rows(walk, phase, pass); break;
        case PHASE_LINEAR: run_linears(walk, phase, pass); break;
        default: run_attention(walk, &ex->plan.ops[phase->first], pass); break;
        }
        pool_barrier(ex->pool);
    }
}

static void run_copies(const struct walk *walk) {
    struct executor *ex = walk->ex;
    if (ex->step.copy_count == 0) return;
    int items = 0;
    for (int g = 0; g < ex->plan.kv_count; g++) items = max_int(items, ex->kv[g].spec.layers * ex->kv[g].spec.heads);
    FOR_ITEMS(walk, PASS_COPY, items, begin, count)
        for (int i = 0; i < count; i++) copy_blocks(ex, begin + i);
    pool_barrier(ex->pool);
}

// The host may still be filling the mask: every thread waits for it, by naps that are short beside a step.
static void await_mask(const struct executor *ex) {
    const int32_t *ready = ex->step.mask_ready;
    while (ready && __atomic_load_n(ready, __ATOMIC_ACQUIRE) == 0)
        nanosleep(&(struct timespec){.tv_nsec = MASK_NAP_NS}, NULL);
}

static void run_sampling(const struct walk *walk) {
    struct executor *ex = walk->ex;
    await_mask(ex);
    struct scratch *scratch = &ex->scratch[walk->thread];
    if (ex->serial_sampling) {
        for (int row = 0; walk->thread == 0 && row < ex->logits_rows; row++) sample_row(ex, row, scratch);
        return;
    }
    FOR_ITEMS(walk, PASS_SAMPLE, ex->logits_rows, begin, count)
        for (int row = begin; row < begin + count; row++) sample_row(ex, row, scratch);
}

// Hidden rows of the logits rows, as they lie in the arena until the next step.
static void copy_hidden(const struct walk *walk) {
    const struct executor *ex = walk->ex;
    if (!ex->step.hidden || walk->thread != 0) return;
    size_t width = (size_t)ex->plan.hidden_size;
    for (int row = 0; row < ex->logits_rows; row++)
        memcpy(ex->step.hidden + (size_t)row * width, row_of(ex, ex->plan.hidden, ex->plan.hidden_size, row), width * sizeof(float));
}

static void step_work(void *arg, int thread) {
    struct walk walk = {arg, thread};
    run_copies(&walk);
    run_phases(&walk);
    copy_hidden(&walk);
    run_sampling(&walk);
}

int artesian_step(struct executor *ex, const struct step *step, int32_t *failed) {
    int status = begin_step(ex, step, failed);
    if (status != STATUS_OK) return status;
    for (size_t i = 0; i < PASSES(ex); i++) atomic_store_explicit(&ex->counters[i].next, 0, memory_order_relaxed);
    pool_run(ex->pool, step_work, ex);
    return STATUS_OK;
}

const float *artesian_logits(const struct executor *ex) { return row_of(ex, ex->plan.logits, ex->plan.vocab, 0); }
