/* The method without threads: a request is done while its user waits for one. */
#include "ld_internal.h"

static int sync_open(struct ld_queue *queue)
{
    (void)queue;
    return 0;
}

static void sync_start(struct ld_queue *queue, uint32_t slot)
{
    ld_queue_put(queue, &queue->waiting, slot);
}

static void sync_collect(struct ld_queue *queue)
{
    if (queue->done.first != LD_NO_SLOT)
        return;
    uint32_t slot = ld_queue_take(queue, &queue->waiting);
    if (slot == LD_NO_SLOT)
        return;
    ld_request_run(&queue->slots[slot].request);
    ld_queue_put(queue, &queue->done, slot);
}

static void sync_close(struct ld_queue *queue)
{
    (void)queue;
}

const struct ld_method ld_method_sync = {
    .open = sync_open,
    .start = sync_start,
    .collect = sync_collect,
    .close = sync_close,
    .abandon = sync_close,
};
