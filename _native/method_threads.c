/* Worker threads, and the method that leaves everything to them. They know
 * nothing of the interpreter, take no signals, and allocate nothing but, for a
 * read that can't go straight, its bounce buffer. */
#include "ld_internal.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>

enum { STACK_BYTES = 128 << 10 };

static void *work(void *argument)
{
    struct ld_queue *queue = argument;
    pthread_mutex_lock(&queue->lock);
    for (;;) {
        uint32_t slot = LD_NO_SLOT;
        while (!queue->closing && (slot = ld_queue_take(queue, &queue->waiting)) == LD_NO_SLOT)
            pthread_cond_wait(&queue->work, &queue->lock);
        if (slot == LD_NO_SLOT)
            break;
        pthread_mutex_unlock(&queue->lock);
        ld_request_run(&queue->slots[slot].request);
        ld_queue_finish(queue, slot);
        pthread_mutex_lock(&queue->lock);
    }
    pthread_mutex_unlock(&queue->lock);
    return NULL;
}

/* Starts the workers with all signals blocked: they are for the interpreter. */
static int start_workers(struct ld_queue *queue, const pthread_attr_t *attributes)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    uint32_t started = 0;
    int error = 0;
    while (error == 0 && started < queue->n_workers) {
        error = ld_sys()->thread_create(&queue->workers[started], attributes, work, queue);
        started += error == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    queue->n_workers = started;
    return -error;
}

int ld_workers_open(struct ld_queue *queue)
{
    pthread_attr_t attributes;
    int error = pthread_attr_init(&attributes);
    if (error != 0)
        return -error;
    /* Only a wish: where it is too small for the system, its own size is taken. */
    (void)pthread_attr_setstacksize(&attributes, STACK_BYTES);
    error = start_workers(queue, &attributes);
    pthread_attr_destroy(&attributes);
    if (error != 0)
        ld_workers_close(queue);
    return error;
}

void ld_workers_close(struct ld_queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    queue->closing = true;
    pthread_cond_broadcast(&queue->work);
    pthread_mutex_unlock(&queue->lock);
    for (uint32_t i = 0; i < queue->n_workers; i++)
        pthread_join(queue->workers[i], NULL);
    queue->n_workers = 0;
}

static void threads_collect(struct ld_queue *queue)
{
    (void)queue; /* the workers put what is done where it belongs */
}

const struct ld_method ld_method_threads = {
    .open = ld_workers_open,
    .start = ld_queue_delegate,
    .collect = threads_collect,
    .close = ld_workers_close,
    .abandon = threads_collect, /* the threads are in the parent */
};
