// The device's own thread: runs queued steps in order and tells the event loop through an eventfd. The next
// step starts at once when one ends, whatever the interpreter is busy with.
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "library.h"

#define QUEUE_STEPS 8  // the loop keeps two in flight

// Counters only grow: taken <= ended <= submitted. All are guarded by the mutex.
struct queue {
    struct executor *ex;
    struct step steps[QUEUE_STEPS];
    struct completion completions[QUEUE_STEPS];
    uint32_t submitted, ended, taken;
    int event_fd, closing;
    pthread_mutex_t mutex;
    pthread_cond_t moved;
    pthread_t thread;
};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void signal_loop(int event_fd) {
    uint64_t one = 1;
    while (write(event_fd, &one, sizeof one) < 0) {
        // Only a signal can interrupt it: the counter of an eventfd cannot overflow by steps.
    }
}

static void *run_queue(void *arg) {
    struct queue *queue = arg;
    pthread_mutex_lock(&queue->mutex);
    for (;;) {
        while (queue->ended == queue->submitted && !queue->closing) pthread_cond_wait(&queue->moved, &queue->mutex);
        if (queue->ended == queue->submitted) break;
        struct step *step = &queue->steps[queue->ended % QUEUE_STEPS];
        struct completion *completion = &queue->completions[queue->ended % QUEUE_STEPS];
        pthread_mutex_unlock(&queue->mutex);
        completion->started_ns = now_ns();
        completion->status = artesian_step(queue->ex, step, &completion->failed);
        completion->ended_ns = now_ns();
        pthread_mutex_lock(&queue->mutex);
        queue->ended++;
        signal_loop(queue->event_fd);
    }
    pthread_mutex_unlock(&queue->mutex);
    return NULL;
}

int artesian_queue_open(struct executor *ex, int event_fd, struct queue **out) {
    struct queue *queue = calloc(1, sizeof *queue);
    if (!queue) return STATUS_NO_MEMORY;
    queue->ex = ex;
    queue->event_fd = event_fd;
    pthread_mutex_init(&queue->mutex, NULL);
    pthread_cond_init(&queue->moved, NULL);
    if (pthread_create(&queue->thread, NULL, run_queue, queue) != 0) {
        free(queue);
        return STATUS_NO_THREAD;
    }
    *out = queue;
    return STATUS_OK;
}

int artesian_queue_submit(struct queue *queue, const struct step *step) {
    pthread_mutex_lock(&queue->mutex);
    int full = queue->submitted - queue->taken == QUEUE_STEPS;
    if (!full) {
        queue->steps[queue->submitted % QUEUE_STEPS] = *step;
        queue->completions[queue->submitted % QUEUE_STEPS] = (struct completion){.queued_ns = now_ns()};
        queue->submitted++;
        pthread_cond_signal(&queue->moved);
    }
    pthread_mutex_unlock(&queue->mutex);
    return full ? STATUS_QUEUE_FULL : STATUS_OK;
}

int artesian_queue_take(struct queue *queue, struct completion *out) {
    pthread_mutex_lock(&queue->mutex);
    int ready = queue->taken < queue->ended;
    if (ready) *out = queue->completions[queue->taken++ % QUEUE_STEPS];
    pthread_mutex_unlock(&queue->mutex);
    return ready;
}

void artesian_queue_close(struct queue *queue) {
    pthread_mutex_lock(&queue->mutex);
    queue->closing = 1;
    pthread_cond_signal(&queue->moved);
    pthread_mutex_unlock(&queue->mutex);
    pthread_join(queue->thread, NULL);
    pthread_cond_destroy(&queue->moved);
    pthread_mutex_destroy(&queue->mutex);
    free(queue);
}
