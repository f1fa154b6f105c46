// The thread team. A wait spins for about 50 us (the gap between two ops, or two steps of a busy server) and
// then sleeps on a condition variable, so that an idle or oversubscribed process leaves its cores to others.
#define _POSIX_C_SOURCE 200809L
#include "pool.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#define SPIN_NS 50000
#define CACHE_LINE 64

// A counter that threads wait on. The waiter announces itself before its last look at `turn`; the opener
// moves `turn` before it looks for waiters: one of the two sees the other.
struct gate {
    _Alignas(CACHE_LINE) _Atomic uint32_t turn;
    _Atomic int32_t sleepers;
    pthread_mutex_t mutex;
    pthread_cond_t moved;
};

struct pool {
    struct gate start, done, barrier;
    _Alignas(CACHE_LINE) _Atomic int32_t running, arrived;
    void (*work)(void *, int);
    void *arg;
    int threads, started, closing;
    struct member {
        struct pool *pool;
        pthread_t thread;
        int index;
    } *members;
};

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void gate_init(struct gate *gate) {
    pthread_mutex_init(&gate->mutex, NULL);
    pthread_cond_init(&gate->moved, NULL);
}

static void gate_destroy(struct gate *gate) {
    pthread_mutex_destroy(&gate->mutex);
    pthread_cond_destroy(&gate->moved);
}

static void gate_open(struct gate *gate) {
    atomic_fetch_add(&gate->turn, 1);
    if (atomic_load(&gate->sleepers) == 0) return;
    pthread_mutex_lock(&gate->mutex);
    pthread_cond_broadcast(&gate->moved);
    pthread_mutex_unlock(&gate->mutex);
}

// Wait until the gate has moved on from `turn`.
static void gate_wait(struct gate *gate, uint32_t turn) {
    int64_t deadline = 0;
    for (int spins = 0; atomic_load_explicit(&gate->turn, memory_order_acquire) == turn; spins++) {
        relax();
        if (spins % 32 != 31) continue;
        int64_t now = now_ns();
        if (deadline == 0) deadline = now + SPIN_NS;
        if (now < deadline) continue;
        pthread_mutex_lock(&gate->mutex);
        atomic_fetch_add(&gate->sleepers, 1);
        while (atomic_load(&gate->turn) == turn) pthread_cond_wait(&gate->moved, &gate->mutex);
        atomic_fetch_sub(&gate->sleepers, 1);
        pthread_mutex_unlock(&gate->mutex);
        return;
    }
}

static void *member_main(void *self) {
    struct member *member = self;
    struct pool *pool = member->pool;
    for (uint32_t turn = 0;; turn++) {
        gate_wait(&pool->start, turn);
        if (pool->closing) return NULL;
        pool->work(pool->arg, member->index);
        if (atomic_fetch_sub(&pool->running, 1) == 1) gate_open(&pool->done);
    }
}

struct pool *pool_open(int threads) {
    struct pool *pool = aligned_alloc(CACHE_LINE, sizeof *pool);
    if (!pool) return NULL;
    *pool = (struct pool){.threads = threads, .started = 1};
    gate_init(&pool->start);
    gate_init(&pool->done);
    gate_init(&pool->barrier);
    pool->members = calloc((size_t)threads, sizeof *pool->members);
    for (int i = 1; pool->members && i < threads; i++, pool->started++) {
        struct member *member = &pool->members[i];
        *member = (struct member){.pool = pool, .index = i};
        if (pthread_create(&member->thread, NULL, member_main, member) != 0) break;
    }
    if (pool->started == threads && pool->members) return pool;
    pool_close(pool);
    return NULL;
}

void pool_close(struct pool *pool) {
    pool->closing = 1;
    gate_open(&pool->start);
    for (int i = 1; i < pool->started; i++) pthread_join(pool->members[i].thread, NULL);
    gate_destroy(&pool->start);
    gate_destroy(&pool->done);
    gate_destroy(&pool->barrier);
    free(pool->members);
    free(pool);
}

int pool_threads(const struct pool *pool) { return pool->threads; }

void pool_run(struct pool *pool, void (*work)(void *, int), void *arg) {
    if (pool->threads == 1) {
        work(arg, 0);
        return;
    }
    uint32_t turn = atomic_load(&pool->done.turn);
    pool->work = work;
    pool->arg = arg;
    atomic_store(&pool->running, pool->threads - 1);
    gate_open(&pool->start);
    work(arg, 0);
    gate_wait(&pool->done, turn);
}

void pool_barrier(struct pool *pool) {
    if (pool->threads == 1) return;
    uint32_t turn = atomic_load(&pool->barrier.turn);
    if (atomic_fetch_add(&pool->arrived, 1) == pool->threads - 1) {
        atomic_store(&pool->arrived, 0);
        gate_open(&pool->barrier);
    } else {
        gate_wait(&pool->barrier, turn);
    }
}
