// Everything that is compiled once per instruction set. The including file names the set.
#include <math.h>

#include "executor.h"
#include "simd.h"

#include "pack.inc.c"
#include "matmul_quant.inc.c"
#include "matmul_float.inc.c"
#ifdef ISA_AVX2
#include "matmul_avx2.inc.c"
#else
#include "matmul_portable.inc.c"
#endif
#include "attention.inc.c"
#include "logits.inc.c"
#include "rows.inc.c"

// An item is a tile of matrix rows times a run of TILE_TOKENS rows of the step.
static void linear_item(const struct executor *ex, const struct op *op, int item, void *scratch) {
    const struct matrix *w = &ex->matrices[op->weight];
    int rows = op->rows == ROWS_TOKENS ? ex->rows : ex->logits_rows;
    int tiles = w->groups * 8 / tile_rows(w->format), tile = item % tiles, first = item / tiles * TILE_TOKENS;
    int last = min_int(first + TILE_TOKENS, rows);
    if (w->format < PACKED_Q4) {
        linear_float(ex, op, tile, first, last);
        return;
    }
#ifdef ISA_AVX2
    if (w->format == PACKED_Q4) {
        linear_q4(ex, op, tile, first, last, scratch);
    } else {
        linear_q8(ex, op, tile, first, last);
    }
#else
    (void)scratch;
    linear_quant(ex, op, tile, first, last);
#endif
}

#define KERNELS                                                                                            \
    {                                                                                                      \
        .name = ISA_NAME, .row = run_row, .linear = linear_item, .attention = attention_item,              \
        .attention_merge = attention_merge, .pack = pack_rows, .scan = scan_logits, .exp_sum = exp_sum,    \
        .rank = rank_logits, .next_above = next_above, .draw_weights = draw_weights,                       \
        .weigh_tail = weigh_tail, .keep_down_to = keep_down_to,                                            \
    }
