/* A queue of requests: reads, memory to be populated, mappings to be prefetched, data to be
 * checked.
 *
 * One request type, one table of operations per method, one synchronous executor
 * (ld_request_run) that all of them fall back to. A request lives in a slot; a
 * slot is in one list (free, waiting, done) or in the hands of a method. There
 * is no allocation after the queue is open.
 *
 * The user of the queue, one thread, submits and waits. What is done is put into
 * the list of done slots and told to an eventfd, on which the user sleeps; so
 * worker threads and io_uring can wake it alike, and a signal too. */
#include "ld_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

void ld_queue_put(struct ld_queue *queue, struct ld_slots *list, uint32_t slot)
{
    queue->slots[slot].next = LD_NO_SLOT;
    if (list->first == LD_NO_SLOT)
        list->first = slot;
    else
        queue->slots[list->last].next = slot;
    list->last = slot;
}

uint32_t ld_queue_take(struct ld_queue *queue, struct ld_slots *list)
{
    uint32_t slot = list->first;
    if (slot != LD_NO_SLOT)
        list->first = queue->slots[slot].next;
    return slot;
}

void ld_queue_delegate(struct ld_queue *queue, uint32_t slot)
{
    pthread_mutex_lock(&queue->lock);
    ld_queue_put(queue, &queue->waiting, slot);
    pthread_cond_signal(&queue->work);
    pthread_mutex_unlock(&queue->lock);
}

void ld_queue_finish(struct ld_queue *queue, uint32_t slot)
{
    pthread_mutex_lock(&queue->lock);
    ld_queue_put(queue, &queue->done, slot);
    pthread_mutex_unlock(&queue->lock);
    uint64_t one = 1;
    /* Can only fail when the counter is full, and then the user is awake. */
    ssize_t written = write(queue->event_fd, &one, sizeof one);
    (void)written;
}

/* --- The synchronous executor ---------------------------------------------- */

static void run_read(struct ld_request *request)
{
    while ((uint64_t)request->result < request->length) {
        uint64_t done = (uint64_t)request->result;
        int64_t got = ld_file_pread(request->file, (uint8_t *)request->address + done,
                                    request->room - done, request->length - done,
                                    request->offset + done, &request->transfer);
        if (got == -EINTR)
            return; /* what is there so far is the result */
        if (got <= 0) {
            request->result = got < 0 ? got : -ENODATA;
            return;
        }
        request->result += got;
    }
}

/* Gives fresh memory its pages. A kernel that can't be asked for that (EINVAL)
 * gives them when they are touched. */
static int populate(uint8_t *address, uint64_t length)
{
    int error = ld_madvise_retrying(address, length, LD_MADV_POPULATE_WRITE);
    if (error != -EINVAL)
        return error;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    for (uint64_t at = 0; at < length; at += page)
        *(volatile uint8_t *)(address + at) = 0;
    return 0;
}

void ld_request_run(struct ld_request *request)
{
    switch (request->operation) {
    case LD_OP_READ:
        run_read(request);
        break;
    case LD_OP_POPULATE:
        request->result = populate(request->address, request->length);
        break;
    case LD_OP_PREFETCH:
        request->result = ld_map_prefetch(request->map, request->offset, request->length,
                                          (int)request->type);
        break;
    case LD_OP_CHECK:
        request->result =
            ld_rows_check(request->type, request->address, request->length, &request->block);
        break;
    }
}

/* --- The user's side --------------------------------------------------------- */

static bool is_valid(const struct ld_request *request)
{
    switch (request->operation) {
    case LD_OP_READ:
        return request->file != NULL && request->room >= request->length &&
               request->offset <= request->file->size &&
               request->length <= request->file->size - request->offset;
    case LD_OP_PREFETCH:
        return request->map != NULL;
    case LD_OP_POPULATE:
    case LD_OP_CHECK:
        return true;
    default:
        return false;
    }
}

int ld_queue_submit(ld_queue *queue, const struct ld_request *request)
{
    if (queue->owner != getpid())
        return -ECHILD;
    if (!is_valid(request))
        return -EINVAL;
    pthread_mutex_lock(&queue->lock);
    uint32_t slot = ld_queue_take(queue, &queue->free);
    pthread_mutex_unlock(&queue->lock);
    if (slot == LD_NO_SLOT)
        return -EAGAIN;
    queue->slots[slot].request = *request;
    queue->slots[slot].request.result = 0;
    queue->method->start(queue, slot);
    return 0;
}

/* Fetches a done request: whether there was one. */
static bool fetch(struct ld_queue *queue, struct ld_request *out)
{
    queue->method->collect(queue);
    pthread_mutex_lock(&queue->lock);
    uint32_t slot = ld_queue_take(queue, &queue->done);
    if (slot != LD_NO_SLOT) {
        *out = queue->slots[slot].request;
        ld_queue_put(queue, &queue->free, slot);
    }
    pthread_mutex_unlock(&queue->lock);
    return slot != LD_NO_SLOT;
}

int ld_queue_wait(ld_queue *queue, int milliseconds, struct ld_request *out)
{
    if (queue->owner != getpid())
        return -ECHILD;
    if (fetch(queue, out))
        return 1;
    if (ld_sys()->poll(queue->event_fd, milliseconds) < 0)
        return -errno;
    /* Emptied before the lists are looked at: what comes later wakes us again. */
    uint64_t count;
    ssize_t got = read(queue->event_fd, &count, sizeof count);
    (void)got;
    return fetch(queue, out) ? 1 : 0;
}

static const struct ld_method *find_method(int id)
{
    switch (id) {
    case LD_METHOD_SYNC:
        return &ld_method_sync;
    case LD_METHOD_THREADS:
        return &ld_method_threads;
    case LD_METHOD_URING:
        return &ld_method_uring;
    default:
        return NULL;
    }
}

static void release(struct ld_queue *queue)
{
    if (queue->event_fd >= 0)
        close(queue->event_fd);
    if (queue->owner == getpid()) { /* elsewhere a thread may have held them */
        pthread_cond_destroy(&queue->work);
        pthread_mutex_destroy(&queue->lock);
    }
    free(queue->slots);
    free(queue);
}

static struct ld_queue *allocate_queue(uint32_t capacity)
{
    struct ld_queue *queue = ld_sys()->realloc(NULL, sizeof *queue);
    if (queue == NULL)
        return NULL;
    *queue = (struct ld_queue){
        .slots = ld_sys()->realloc(NULL, capacity * sizeof *queue->slots),
        .owner = getpid(),
        .capacity = capacity,
        .event_fd = -1,
        .free = {LD_NO_SLOT, LD_NO_SLOT},
        .waiting = {LD_NO_SLOT, LD_NO_SLOT},
        .done = {LD_NO_SLOT, LD_NO_SLOT},
    };
    if (queue->slots == NULL) {
        free(queue);
        return NULL;
    }
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->work, NULL);
    for (uint32_t slot = 0; slot < capacity; slot++)
        ld_queue_put(queue, &queue->free, slot);
    return queue;
}

int ld_queue_open(int method, uint32_t capacity, uint32_t workers, ld_queue **out)
{
    *out = NULL;
    const struct ld_method *found = find_method(method);
    bool wants_workers = found != &ld_method_sync;
    if (found == NULL || capacity == 0 || capacity > 1024 || workers > LD_MOST_WORKERS ||
        wants_workers != (workers != 0))
        return -EINVAL;
    struct ld_queue *queue = allocate_queue(capacity);
    if (queue == NULL)
        return -ENOMEM;
    queue->method = found;
    queue->n_workers = workers;
    queue->event_fd = ld_sys()->eventfd();
    int error = queue->event_fd < 0 ? -errno : found->open(queue);
    if (error != 0) {
        release(queue);
        return error;
    }
    *out = queue;
    return 0;
}

void ld_queue_close(ld_queue *queue)
{
    if (queue == NULL)
        return;
    if (queue->owner == getpid())
        queue->method->close(queue);
    else
        queue->method->abandon(queue);
    release(queue);
}
