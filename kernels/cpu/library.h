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

// The latest step's logits: [rows, stride8(vocab)].
EXPORT const float *artesian_logits(const struct executor *ex);

EXPORT void artesian_memory(const struct executor *ex, struct memory *out);
EXPORT const char *artesian_isa(const struct executor *ex);

// A digest of the struct sizes, to recognise a library that another version was built for.
EXPORT int64_t artesian_abi(void);

#endif
