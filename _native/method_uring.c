/* Reads through io_uring, by its system calls; everything else, and every read
 * that isn't one straight direct read or comes back with less, by the workers.
 *
 * Only the user of the queue touches the rings. Each read is submitted at once:
 * one system call for megabytes. Completions are told to the queue's eventfd. A
 * short or failed read is finished by a worker from the byte where it stopped,
 * which is where retries and the fallback to buffered reads are. */
#include "ld_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PROBE_TAG = UINT32_MAX, MOST_TRIES = 100 };

struct mapping {
    void *address;
    size_t length;
};

struct ld_uring {
    int fd;
    uint32_t in_flight;
    struct mapping submission;
    struct mapping completion;
    struct mapping entries;
    _Atomic uint32_t *submission_tail;
    uint32_t submission_mask;
    uint32_t *submission_array;
    _Atomic uint32_t *completion_head;
    _Atomic uint32_t *completion_tail;
    uint32_t completion_mask;
    struct ld_uring_completion *completions;
};

static int map_ring(struct ld_uring *uring, struct mapping *mapping, size_t length, off_t offset)
{
    void *address =
        ld_sys()->mmap(length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, uring->fd, offset);
    if (address == MAP_FAILED)
        return -errno;
    /* A forked child mustn't take completions that are the parent's. */
    (void)ld_sys()->madvise(address, length, LD_MADV_DONTFORK);
    *mapping = (struct mapping){address, length};
    return 0;
}

static void *at(const struct mapping *mapping, uint32_t offset)
{
    return (uint8_t *)mapping->address + offset;
}

static int map_rings(struct ld_uring *uring, const struct ld_uring_params *params)
{
    const struct ld_uring_ring_offsets *sq = &params->submission, *cq = &params->completion;
    int error = map_ring(uring, &uring->submission,
                         sq->array_or_flags + params->submission_entries * sizeof(uint32_t),
                         LD_URING_OFF_SUBMISSION);
    if (error == 0)
        error = map_ring(uring, &uring->completion,
                         cq->dropped_or_entries +
                             params->completion_entries * sizeof(struct ld_uring_completion),
                         LD_URING_OFF_COMPLETION);
    if (error == 0)
        error = map_ring(uring, &uring->entries,
                         params->submission_entries * sizeof(struct ld_uring_submission),
                         LD_URING_OFF_ENTRIES);
    if (error != 0)
        return error;
    uring->submission_tail = at(&uring->submission, sq->tail);
    uring->submission_mask = *(uint32_t *)at(&uring->submission, sq->ring_mask);
    uring->submission_array = at(&uring->submission, sq->array_or_flags);
    uring->completion_head = at(&uring->completion, cq->head);
    uring->completion_tail = at(&uring->completion, cq->tail);
    uring->completion_mask = *(uint32_t *)at(&uring->completion, cq->ring_mask);
    uring->completions = at(&uring->completion, cq->dropped_or_entries);
    return 0;
}

/* Submits one read: 0 or -errno, and then it isn't submitted. */
static int submit(struct ld_uring *uring, int fd, void *address, uint64_t length, uint64_t offset,
                  uint64_t tag)
{
    uint32_t tail = atomic_load_explicit(uring->submission_tail, memory_order_relaxed);
    uint32_t index = tail & uring->submission_mask;
    struct ld_uring_submission *entry = uring->entries.address;
    entry += index;
    memset(entry, 0, sizeof *entry);
    entry->opcode = LD_URING_OP_READ;
    entry->fd = fd;
    entry->address = (uint64_t)(uintptr_t)address;
    entry->length = (uint32_t)length;
    entry->offset = offset;
    entry->user_data = tag;
    uring->submission_array[index] = index;
    atomic_store_explicit(uring->submission_tail, tail + 1, memory_order_release);
    int submitted = -1;
    for (int tries = 0; submitted < 0 && tries < MOST_TRIES; tries++) {
        submitted = ld_sys()->uring_enter(uring->fd, 1, 0, 0);
        if (submitted < 0 && errno != EINTR)
            break;
    }
    if (submitted == 1) {
        uring->in_flight++;
        return 0;
    }
    /* The kernel reads the ring only inside that call: the entry can be taken back. */
    int error = submitted < 0 ? -errno : -EAGAIN;
    atomic_store_explicit(uring->submission_tail, tail, memory_order_release);
    return error;
}

/* The next completion, if there is one. */
static bool next_completion(struct ld_uring *uring, struct ld_uring_completion *out)
{
    uint32_t head = atomic_load_explicit(uring->completion_head, memory_order_relaxed);
    if (head == atomic_load_explicit(uring->completion_tail, memory_order_acquire))
        return false;
    *out = uring->completions[head & uring->completion_mask];
    atomic_store_explicit(uring->completion_head, head + 1, memory_order_release);
    uring->in_flight--;
    return true;
}

/* Reads the 8 bytes of an eventfd through the ring: does it work, and not only
 * the calls that set it up? */
static int probe(struct ld_uring *uring)
{
    uint64_t value = 1;
    int fd = ld_sys()->eventfd();
    if (fd < 0)
        return -errno;
    int error = write(fd, &value, sizeof value) == sizeof value ? 0 : -errno;
    if (error == 0)
        error = submit(uring, fd, &value, sizeof value, 0, PROBE_TAG);
    struct ld_uring_completion completion = {.result = 0};
    while (error == 0 && !next_completion(uring, &completion)) {
        if (ld_sys()->uring_enter(uring->fd, 0, 1, LD_URING_ENTER_GETEVENTS) < 0 && errno != EINTR)
            error = -errno;
    }
    close(fd);
    if (error == 0 && completion.result != sizeof value)
        error = completion.result < 0 ? completion.result : -EIO;
    return error;
}

static void unmap(const struct mapping *mapping)
{
    if (mapping->address != NULL)
        munmap(mapping->address, mapping->length);
}

static void close_uring(struct ld_uring *uring)
{
    unmap(&uring->entries);
    unmap(&uring->completion);
    unmap(&uring->submission);
    if (uring->fd >= 0)
        close(uring->fd);
    free(uring);
}

static int open_uring(struct ld_queue *queue, struct ld_uring *uring)
{
    struct ld_uring_params params;
    memset(&params, 0, sizeof params);
    uring->fd = ld_sys()->uring_setup(queue->capacity, &params);
    if (uring->fd < 0)
        return -errno;
    int error = map_rings(uring, &params);
    if (error == 0)
        error = probe(uring);
    if (error == 0 && ld_sys()->uring_register(uring->fd, LD_URING_REGISTER_EVENTFD,
                                               &queue->event_fd, 1) != 0)
        error = -errno;
    return error;
}

static int uring_open(struct ld_queue *queue)
{
    struct ld_uring *uring = ld_sys()->realloc(NULL, sizeof *uring);
    if (uring == NULL)
        return -ENOMEM;
    *uring = (struct ld_uring){.fd = -1};
    int error = open_uring(queue, uring);
    if (error == 0)
        error = ld_workers_open(queue);
    if (error != 0) {
        close_uring(uring);
        return error;
    }
    queue->uring = uring;
    return 0;
}

static void uring_start(struct ld_queue *queue, uint32_t slot)
{
    struct ld_request *request = &queue->slots[slot].request;
    uint64_t n = request->operation == LD_OP_READ ? ld_file_straight(request->file, request) : 0;
    if (n == 0 || submit(queue->uring, request->file->direct_fd, request->address, n,
                         request->offset, slot) != 0)
        ld_queue_delegate(queue, slot);
}

/* What a completion says of its request. Whole, it is done; else a worker goes
 * on after the whole blocks that are there. */
static void complete(struct ld_queue *queue, const struct ld_uring_completion *completion)
{
    uint32_t slot = (uint32_t)completion->user_data;
    struct ld_request *request = &queue->slots[slot].request;
    ssize_t got = ld_sys()->uring_result(completion->result, request->address);
    if (got > 0) {
        request->transfer.bytes_direct += (uint64_t)got;
        if ((uint64_t)got >= request->length) {
            request->result = (int64_t)request->length;
            ld_queue_finish(queue, slot);
            return;
        }
        request->result = (int64_t)ld_align_down((uint64_t)got, request->file->offset_alignment);
    }
    ld_queue_delegate(queue, slot);
}

static void uring_collect(struct ld_queue *queue)
{
    struct ld_uring_completion completion;
    while (next_completion(queue->uring, &completion))
        complete(queue, &completion);
}

static void uring_close(struct ld_queue *queue)
{
    struct ld_uring *uring = queue->uring;
    struct ld_uring_completion completion;
    /* A read under way writes to memory of the user: it has to end first. */
    while (uring->in_flight != 0) {
        if (!next_completion(uring, &completion))
            (void)ld_sys_real.uring_enter(uring->fd, 0, 1, LD_URING_ENTER_GETEVENTS);
    }
    ld_workers_close(queue);
    close_uring(uring);
}

static void uring_abandon(struct ld_queue *queue)
{
    close_uring(queue->uring);
}

const struct ld_method ld_method_uring = {
    .open = uring_open,
    .start = uring_start,
    .collect = uring_collect,
    .close = uring_close,
    .abandon = uring_abandon,
};
