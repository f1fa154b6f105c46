// A KV block's bytes in and out, for the cache below the device: one memcpy for each layer and head. May run
// beside a step: the caller sees to it that no step writes what is read, or reads what is written.
#include <string.h>

#include "executor.h"
#include "library.h"

// The parts of a block follow each other by layer, then head, each as attention reads it.
static int move_block(const struct executor *ex, int group, int block, uint8_t *outside, int64_t bytes, int inwards) {
    if (group < 0 || group >= ex->plan.kv_count) return STATUS_BAD_BLOCK;
    const struct kv *kv = &ex->kv[group];
    size_t parts = (size_t)kv->spec.layers * (size_t)kv->spec.heads;
    if (block < 0 || block >= kv->spec.blocks || (size_t)bytes != parts * kv->chunk_bytes) return STATUS_BAD_BLOCK;
    for (int layer = 0; layer < kv->spec.layers; layer++)
        for (int head = 0; head < kv->spec.heads; head++, outside += kv->chunk_bytes) {
            uint8_t *inside = kv_chunk(kv, layer, head, block);
            if (inwards) memcpy(inside, outside, kv->chunk_bytes);
            else memcpy(outside, inside, kv->chunk_bytes);
        }
    return STATUS_OK;
}

int artesian_export_block(const struct executor *ex, int group, int block, uint8_t *out, int64_t bytes) {
    return move_block(ex, group, block, out, bytes, 0);
}

int artesian_import_block(struct executor *ex, int group, int block, const uint8_t *data, int64_t bytes) {
    return move_block(ex, group, block, (uint8_t *)data, bytes, 1);
}
