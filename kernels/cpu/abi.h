// What crosses between Python (native.py mirrors every struct here) and the library.
// Plain C ABI, fixed-width fields; all offsets are bytes into the executor's buffer arena.
#ifndef ARTESIAN_ABI_H
#define ARTESIAN_ABI_H

#include <stdint.h>

#define ABI_VERSION 3  // raised when a function is added or changes; native.py has the same

enum op_code {
    OP_EMBED,
    OP_ANGLES,
    OP_RMS_NORM,
    OP_QUANTISE,
    OP_ROPE,
    OP_KV_WRITE,
    OP_GLU,
    OP_ADD,
    OP_SCALE,
    OP_SOFTCAP,
    OP_SELECT,
    OP_LINEAR,
    OP_ATTENTION,
};
enum row_kind { ROWS_TOKENS, ROWS_LOGITS };
enum phase_kind { PHASE_ROWS, PHASE_LINEAR, PHASE_ATTENTION };
enum activation { ACT_SILU, ACT_GELU_TANH, ACT_GELU };

// Formats of the file and the packed formats that the kernels read.
enum source_format { SOURCE_F32, SOURCE_F16, SOURCE_BF16, SOURCE_Q4_0, SOURCE_Q4_1, SOURCE_Q8_0 };
enum packed_format { PACKED_F32, PACKED_F16, PACKED_BF16, PACKED_Q4, PACKED_Q8 };

enum status {
    STATUS_OK,
    STATUS_NO_MEMORY,
    STATUS_NO_THREAD,
    STATUS_NO_ISA,
    STATUS_BAD_WEIGHT,
    STATUS_BAD_SLOT,
    STATUS_BAD_RANGE,
    STATUS_BAD_BLOCK,
    STATUS_BAD_COPY,
    STATUS_TOO_MANY_ROWS,
    STATUS_TOO_MANY_LOGITS,
    STATUS_QUEUE_FULL,
};

// One op. Buffers are [rows, width] with rows `stride8(width)` floats apart.
struct op {
    int64_t in0, in1, out;  // -1: absent. in1: addend, `up`, residual, values of kv_write, angles of rope
    int32_t code, rows, width;
    int32_t weight;          // index of a packed matrix, -1: none
    int32_t vector;          // index of a float vector (norm weight, bias, inv_freq), -1: none
    int32_t act;             // enum activation
    int32_t kv_group, layer;
    int32_t heads, head_dim; // rms_norm: head_dim is the norm's group
    int32_t rotary, interleaved;
    float scale;             // embed, scale, attention; rope: magnitude; rms_norm: eps
    float softcap;           // attention, softcap
};

// A run of ops that needs no barrier inside.
struct phase {
    int32_t kind, rows, first, count;
};

struct matrix_spec {
    int32_t format, rows, cols;  // enum packed_format, logical [rows, cols]
};

struct vector_spec {
    const float *data;
    int64_t length;
};

struct kv_spec {
    const int32_t *table;  // [slots, table_blocks]
    int32_t table_blocks, blocks, layers, heads, head_dim, block_tokens, window;
    int32_t half;          // 1: float16, 0: float32
};

// One slot's sampling parameters: SAMPLING_DTYPE of batch.py.
struct sampling {
    double temperature, top_p, min_p, repetition, presence, frequency;
    uint64_t seed;
    const int32_t *bias_ids;
    const float *bias_values;
    const int32_t *stop_ids;
    const uint32_t *allowed;
    int32_t top_k, bias_count, stop_count, prompt_len, min_len, pad;
};

struct plan {
    const struct op *ops;
    const struct phase *phases;
    const struct matrix_spec *matrices;
    const struct vector_spec *vectors;
    const struct kv_spec *kv;
    int32_t *tokens;  // [slots, max_len]
    const struct sampling *sampling;
    int64_t arena_bytes, logits;
    int64_t hidden;  // the buffer that the logits are made of, -1: none
    int32_t op_count, phase_count, matrix_count, vector_count, kv_count;
    int32_t slots, max_len, vocab, hidden_size;
    int32_t max_rows, max_logits, max_top, threads;
    int32_t isa;  // enum isa of library.h
    int32_t pad;
};

struct step {
    const int32_t *slots, *starts, *counts, *logits;
    const uint8_t *sample;
    const uint32_t *mask;   // [segments, ceil(vocab / 32)] or NULL
    const int32_t *mask_ready;  // NULL, or 0 while the host still fills `mask`: sampling waits, the forward does not
    const int32_t *copies;  // [copy_count, 3]
    int32_t *tokens;
    float *logprobs;
    int32_t *ranks;
    uint8_t *finite;
    int32_t *top_tokens;
    float *top_logprobs;
    float *hidden;          // [logits rows, hidden_size], or NULL: not wanted
    int32_t segments, copy_count, top, pad;
};

// A queued step that has run. Times are of CLOCK_MONOTONIC.
struct completion {
    int64_t queued_ns, started_ns, ended_ns;
    int32_t status, failed;
};

struct memory {
    int64_t weights, kv, buffers;
};

#endif
