// The functions that Python calls. All return a `status` where they can fail.
#ifndef ARTESIAN_LIBRARY_H
#define ARTESIAN_LIBRARY_H

#include "abi.h"

#define EXPORT __attribute__((visibility("default")))

enum isa { ISA_BEST, ISA_PORTABLE, ISA_AVX2_ONLY };

struct executor;

EXPORT int artesian_create(const struct plan *plan, struct executor **out);
EXPORT void artesian_destroy(struct executor *ex);

// Pack `rows` rows of the file's format into a matrix; `bytes` guards the length of `data`.
EXPORT int artesian_pack(struct executor *ex, int matrix, int source, const uint8_t *data, int64_t bytes, int first_row, int rows);

// Run one step: block copies, forward, sampling. `failed` is the segment that a bad step was refused for.
EXPORT int artesian_step(struct executor *ex, const struct step *step, int32_t *failed);

// A queue of steps on a thread of its own. `event_fd` is written to whenever a step has ended. A submitted
// step's arrays must live until the step is taken. `close` runs what is queued first.
struct queue;
EXPORT int artesian_queue_open(struct executor *ex, int event_fd, struct queue **out);
EXPORT int artesian_queue_submit(struct queue *queue, const struct step *step);
EXPORT int artesian_queue_take(struct queue *queue, struct completion *out);  // 1: *out is the next one
EXPORT void artesian_queue_close(struct queue *queue);

// Copy a block's bytes out of a KV group, or in. Any thread, beside a step that does not touch the block.
EXPORT int artesian_export_block(const struct executor *ex, int group, int block, uint8_t *out, int64_t bytes);
EXPORT int artesian_import_block(struct executor *ex, int group, int block, const uint8_t *data, int64_t bytes);

// The latest step's logits: [rows, stride8(vocab)].
EXPORT const float *artesian_logits(const struct executor *ex);

EXPORT void artesian_memory(const struct executor *ex, struct memory *out);
EXPORT const char *artesian_isa(const struct executor *ex);
EXPORT const char *artesian_isa_for(int isa);  // what `artesian_create` would choose; "" = nothing

// A digest of the struct sizes and of the interface's version, to recognise a library that another version was built for.
EXPORT int64_t artesian_abi(void);

#endif
