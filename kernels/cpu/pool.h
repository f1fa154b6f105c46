// A fixed team of threads that runs one function together, with barriers and shared work counters.
#ifndef ARTESIAN_POOL_H
#define ARTESIAN_POOL_H

#include <stdatomic.h>
#include <stdint.h>

struct pool;

// `threads` includes the caller. NULL when memory or threads ran out.
struct pool *pool_open(int threads);
void pool_close(struct pool *pool);
int pool_threads(const struct pool *pool);

// Run work(arg, thread) on every thread, the caller being thread 0; returns when all are done.
void pool_run(struct pool *pool, void (*work)(void *, int), void *arg);

// Inside `work`: wait until every thread is here.
void pool_barrier(struct pool *pool);

// Take the next items of a counter that runs from 0 to n: about half of an even share of what is left, so
// that a thread which lost its core holds little back. Returns their number and sets *begin; 0: none left.
static inline int pool_take(_Atomic int32_t *counter, int n, int threads, int *begin) {
    int32_t at = atomic_load_explicit(counter, memory_order_relaxed);
    while (at < n) {
        int size = threads == 1 ? n - at : (n - at) / (2 * threads);
        if (size < 1) size = 1;
        if (atomic_compare_exchange_weak_explicit(counter, &at, at + size, memory_order_relaxed,
                                                  memory_order_relaxed)) {
            *begin = at;
            return size;
        }
    }
    return 0;
}

#endif
