// The running step: checks what the host wrote and lays out its rows, logits rows and attention tiles.
#include <string.h>

#include "executor.h"

// Every block that the rows [start, start + count) of a slot write or read must exist.
static int blocks_exist(const struct executor *ex, int slot, int start, int count) {
    for (int g = 0; g < ex->plan.kv_count; g++) {
        const struct kv_spec *kv = &ex->kv[g].spec;
        const int32_t *table = kv->table + (size_t)slot * (size_t)kv->table_blocks;
        int low = kv->window > 0 ? max_int(0, start + 1 - kv->window) : 0;
        int last = (start + count - 1) / kv->block_tokens;
        if (last >= kv->table_blocks) return 0;
        for (int b = low / kv->block_tokens; b <= last; b++)
            if (table[b] < 0 || table[b] >= kv->blocks) return 0;
    }
    return 1;
}

static int check_segment(const struct executor *ex, const struct step *step, int s) {
    int slot = step->slots[s], start = step->starts[s], count = step->counts[s], logits = step->logits[s];
    if (slot < 0 || slot >= ex->plan.slots) return STATUS_BAD_SLOT;
    if (start < 0 || count < 1 || start > ex->plan.max_len - count) return STATUS_BAD_RANGE;
    if (logits < 0 || logits > count || (step->sample[s] && logits < 1)) return STATUS_BAD_RANGE;
    if (count > ex->plan.max_rows - ex->rows) return STATUS_TOO_MANY_ROWS;
    if (logits > ex->plan.max_logits - ex->logits_rows) return STATUS_TOO_MANY_LOGITS;
    return blocks_exist(ex, slot, start, count) ? STATUS_OK : STATUS_BAD_BLOCK;
}

static void add_segment(struct executor *ex, int s) {
    const struct step *step = &ex->step;
    int count = step->counts[s], first = ex->rows;
    for (int i = 0; i < count; i++, ex->rows++) {
        ex->row_slot[ex->rows] = step->slots[s];
        ex->row_position[ex->rows] = step->starts[s] + i;
        if (i < count - step->logits[s]) continue;
        ex->logit_row[ex->logits_rows] = ex->rows;
        ex->logit_segment[ex->logits_rows++] = s;
    }
    for (int i = 0; i < count; i += ex->tile_tokens)
        ex->tile[ex->tiles++] = (struct attention_tile){first + i, min_int(ex->tile_tokens, count - i)};
}

// Spans that cover the longest sequence of the step, and whether they are handed out one by one.
static void choose_spans(struct executor *ex, int longest) {
    int single = 1;
    for (int i = 0; i < ex->tiles; i++) single &= ex->tile[i].count == 1;
    ex->spans = 0;
    int most_units = 0;
    for (int g = 0; g < ex->plan.kv_count; g++) {
        const struct kv *kv = &ex->kv[g];
        int positions = blocks_per_span(kv->lanes) * kv->spec.block_tokens;
        ex->spans = max_int(ex->spans, (longest + positions - 1) / positions);
        most_units = max_int(most_units, ex->tiles * kv->spec.heads);
    }
    ex->split = single && ex->spans > 1 && most_units < SPLIT_UNITS(ex->plan.threads);
}

// Two drawn segments of one slot: the later one's history has the earlier one's token.
static int repeats_slot(const struct step *step) {
    for (int s = 1; s < step->segments; s++)
        for (int other = 0; other < s; other++)
            if (step->slots[s] == step->slots[other]) return 1;
    return 0;
}

int begin_step(struct executor *ex, const struct step *step, int32_t *failed) {
    ex->step = *step;
    *failed = 0;
    ex->rows = ex->logits_rows = ex->tiles = 0;
    int longest = 0;
    for (int s = 0; s < step->segments; s++) {
        int status = check_segment(ex, step, s);
        *failed = s;
        if (status != STATUS_OK) return status;
        add_segment(ex, s);
        longest = max_int(longest, step->starts[s] + step->counts[s]);
    }
    if (step->top < 0 || step->top > ex->plan.max_top) return STATUS_TOO_MANY_LOGITS;
    for (int c = 0; c < step->copy_count; c++) {
        const int32_t *copy = step->copies + 3 * c;
        *failed = c;
        if (copy[0] < 0 || copy[0] >= ex->plan.kv_count) return STATUS_BAD_COPY;
        int blocks = ex->kv[copy[0]].spec.blocks;
        if (copy[1] < 0 || copy[1] >= blocks || copy[2] < 0 || copy[2] >= blocks) return STATUS_BAD_COPY;
    }
    choose_spans(ex, longest);
    ex->serial_sampling = repeats_slot(step);
    return STATUS_OK;
}

// Whole-block copies, in the step's order: item = one (layer, head) of the largest group.
void copy_blocks(struct executor *ex, int item) {
    for (int c = 0; c < ex->step.copy_count; c++) {
        const int32_t *copy = ex->step.copies + 3 * c;
        const struct kv *kv = &ex->kv[copy[0]];
        int layer = item / kv->spec.heads, head = item % kv->spec.heads;
        if (layer >= kv->spec.layers) continue;
        memmove(kv_chunk(kv, layer, head, copy[2]), kv_chunk(kv, layer, head, copy[1]), kv->chunk_bytes);
    }
}
