/* The same suite for each method: reads, populated memory and checks at once,
 * with faults, and queues that are closed with requests under way.
 * Usage: test_queue FILE (which it creates). */
#include "../../_native/ld_internal.h"
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

enum { SIZE = 3 * 1024 * 1024 + 777, CHUNK = 128 << 10, CAPACITY = 8, BLOCK = 4096 };

static uint8_t *expected;
static const char *path;

static void create_file(void)
{
    uint64_t state = 1;
    expected = malloc(SIZE);
    CHECK(expected != NULL);
    for (size_t i = 0; i < SIZE; i++)
        expected[i] = (uint8_t)next_random(&state);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0);
    CHECK(write(fd, expected, SIZE) == SIZE);
    close(fd);
}

static ld_queue *open_queue(int method)
{
    ld_queue *queue;
    int error = ld_queue_open(method, CAPACITY, method == LD_METHOD_SYNC ? 0 : 3, &queue);
    if (error != 0 && method == LD_METHOD_URING) {
        printf("io_uring is not available here: %s\n", strerror(-error));
        exit(77);
    }
    CHECK(error == 0);
    return queue;
}

/* Reads the whole file in chunks, out of order as they come; a partial result is
 * asked for again. Returns the first error. `shift` makes reads bounce. */
static int read_file(ld_queue *queue, ld_file *file, uint64_t shift, struct ld_transfer *sum)
{
    uint8_t *memory = aligned_alloc(BLOCK, ld_align_up(SIZE + shift + BLOCK, BLOCK));
    CHECK(memory != NULL);
    uint8_t *to = memory + shift;
    uint64_t next = 0, in_flight = 0;
    int error = 0;
    struct ld_request request;
    while ((next < SIZE && error == 0) || in_flight != 0) {
        while (next < SIZE && error == 0) {
            uint64_t n = ld_min(CHUNK, SIZE - next);
            request = (struct ld_request){.operation = LD_OP_READ, .file = file,
                                          .address = to + next, .length = n, .offset = next,
                                          .room = shift != 0 ? n : ld_align_up(n, BLOCK)};
            int status = ld_queue_submit(queue, &request);
            CHECK(status == 0 || status == -EAGAIN);
            if (status != 0)
                break;
            in_flight++;
            next += n;
        }
        int status = ld_queue_wait(queue, 1000, &request);
        CHECK(status >= 0 || status == -EINTR);
        if (status != 1)
            continue;
        in_flight--;
        sum->bytes_direct += request.transfer.bytes_direct;
        sum->bytes_buffered += request.transfer.bytes_buffered;
        sum->bytes_bounced += request.transfer.bytes_bounced;
        if (request.transfer.fallback_errno != 0)
            sum->fallback_errno = request.transfer.fallback_errno;
        if (request.result < 0) {
            error = (int)request.result;
        } else if ((uint64_t)request.result < request.length && error == 0) {
            uint64_t done = (uint64_t)request.result;
            request.address = (uint8_t *)request.address + done;
            request.room -= done;
            request.length -= done;
            request.offset += done;
            memset(&request.transfer, 0, sizeof request.transfer);
            CHECK(ld_queue_submit(queue, &request) == 0);
            in_flight++;
        }
    }
    if (error == 0)
        CHECK(memcmp(to, expected, SIZE) == 0);
    free(memory);
    return error;
}

static void test_reads(int method)
{
    for (int direct = 0; direct < 2; direct++) {
        for (uint64_t shift = 0; shift < 2; shift++) {
            ld_file *file;
            CHECK(ld_file_open(path, direct, &file) == 0);
            ld_queue *queue = open_queue(method);
            struct ld_transfer sum = {0};
            CHECK(read_file(queue, file, shift, &sum) == 0);
            CHECK(sum.bytes_direct + sum.bytes_buffered >= SIZE);
            CHECK(shift != 0 || sum.bytes_bounced == 0);
            ld_queue_close(queue);
            ld_file_close(file);
        }
    }
}

static void test_faults(int method)
{
    static const int errors[] = {EINTR, EAGAIN, EINVAL, EFAULT, EOPNOTSUPP, 0, EIO};
    static const int calls[] = {LD_CALL_PREAD_DIRECT, LD_CALL_URING_RESULT, LD_CALL_URING_ENTER};
    uint64_t state = 5;
    for (int i = 0; i < 60; i++) {
        ld_file *file;
        CHECK(ld_file_open(path, 1, &file) == 0);
        ld_queue *queue = open_queue(method);
        int may_fail = 0;
        for (int rule = 0; rule < 4; rule++) {
            int error = errors[next_random(&state) % 7];
            int call = calls[next_random(&state) % 3];
            may_fail |= error == EIO && call == LD_CALL_PREAD_DIRECT;
            CHECK(ld_fault_add(call, 1 + next_random(&state) % 12, 1 + next_random(&state) % 3,
                               error, next_random(&state) % 70000) == 0);
        }
        struct ld_transfer sum = {0};
        int error = read_file(queue, file, 0, &sum);
        /* A read cut to nothing is the end of the file. */
        CHECK(error == 0 || (may_fail && error == -EIO) || error == -ENODATA);
        ld_fault_clear();
        CHECK(read_file(queue, file, 0, &sum) == 0);
        ld_queue_close(queue);
        ld_file_close(file);
    }
}

static void test_other_operations(int method)
{
    ld_queue *queue = open_queue(method);
    ld_memory *memory;
    uint64_t size = 8 << 20;
    CHECK(ld_arena_open(size, &memory) == 0);
    float values[1024] = {0};
    values[777] = 1.0f / 0.0f;
    struct ld_request requests[] = {
        {.operation = LD_OP_POPULATE, .address = ld_memory_address(memory), .length = size},
        {.operation = LD_OP_CHECK, .type = 0, .address = values, .length = sizeof values},
        {.operation = LD_OP_CHECK, .type = 99, .address = values, .length = sizeof values},
    };
    for (uint64_t i = 0; i < 3; i++) {
        requests[i].tag = i;
        CHECK(ld_queue_submit(queue, &requests[i]) == 0);
    }
    struct ld_request done;
    for (int n = 0; n < 3;) {
        int status = ld_queue_wait(queue, 1000, &done);
        CHECK(status >= 0);
        if (status == 0)
            continue;
        n++;
        CHECK(done.tag != 0 || done.result == 0);
        CHECK(done.tag != 1 || (done.result == 1 && done.block == 777));
        CHECK(done.tag != 2 || done.result == -EOPNOTSUPP);
    }
    CHECK(ld_queue_wait(queue, 1, &done) == 0);
    memset(ld_memory_address(memory), 1, size);
    ld_queue_close(queue);

    /* An old kernel: pages are touched one by one. */
    queue = open_queue(method);
    CHECK(ld_fault_add(LD_CALL_MADVISE, 1, 1, EINVAL, 0) == 0);
    CHECK(ld_queue_submit(queue, &requests[0]) == 0);
    while (ld_queue_wait(queue, 1000, &done) != 1)
        continue;
    CHECK(done.result == 0);
    ld_fault_clear();
    ld_queue_close(queue);
    ld_memory_close(memory);
}

static void test_closed_with_requests_under_way(int method)
{
    uint8_t *memory = aligned_alloc(BLOCK, ld_align_up(SIZE + BLOCK, BLOCK));
    CHECK(memory != NULL);
    for (int i = 0; i < 40; i++) {
        ld_file *file;
        CHECK(ld_file_open(path, 1, &file) == 0);
        ld_queue *queue = open_queue(method);
        for (uint64_t n = 0; n < CAPACITY; n++) {
            struct ld_request request = {.operation = LD_OP_READ, .file = file,
                                         .address = memory + n * CHUNK, .length = CHUNK,
                                         .room = CHUNK, .offset = n * CHUNK};
            CHECK(ld_queue_submit(queue, &request) == 0);
        }
        struct ld_request request = {.operation = LD_OP_CHECK};
        CHECK(ld_queue_submit(queue, &request) == -EAGAIN);
        if (i % 2)
            CHECK(ld_queue_wait(queue, 1000, &request) >= 0);
        ld_queue_close(queue);
        ld_file_close(file);
    }
    free(memory);
}

static void test_open_fails(int method)
{
    static const int calls[] = {LD_CALL_ALLOC,          LD_CALL_EVENTFD,       LD_CALL_THREAD_CREATE,
                                LD_CALL_URING_SETUP,    LD_CALL_URING_ENTER,   LD_CALL_MMAP,
                                LD_CALL_URING_REGISTER};
    ld_queue *queue;
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        for (uint64_t nth = 1; nth <= 3; nth++) {
            CHECK(ld_fault_add(calls[i], nth, 1, EPERM, 0) == 0);
            int error = ld_queue_open(method, CAPACITY, method == LD_METHOD_SYNC ? 0 : 2, &queue);
            CHECK(error == 0 ? queue != NULL : queue == NULL);
            CHECK(error == 0 || error == -EPERM || error == -ENOMEM);
            ld_queue_close(queue);
            ld_fault_clear();
        }
    }
    CHECK(ld_queue_open(method, 0, 1, &queue) == -EINVAL);
    CHECK(ld_queue_open(9, 1, 1, &queue) == -EINVAL);
    CHECK(ld_queue_open(LD_METHOD_THREADS, 1, 0, &queue) == -EINVAL);
    CHECK(ld_queue_open(LD_METHOD_SYNC, 1, 1, &queue) == -EINVAL);
}

static void test_wrong_requests(int method)
{
    ld_file *file;
    CHECK(ld_file_open(path, 1, &file) == 0);
    ld_queue *queue = open_queue(method);
    uint8_t byte;
    struct ld_request wrong[] = {
        {.operation = 0},
        {.operation = 9},
        {.operation = LD_OP_READ, .address = &byte, .length = 1, .room = 1},
        {.operation = LD_OP_READ, .file = file, .address = &byte, .length = 2, .room = 1},
        {.operation = LD_OP_READ, .file = file, .address = &byte, .length = 1, .room = 1, .offset = SIZE},
        {.operation = LD_OP_READ, .file = file, .address = &byte, .length = 1, .room = 1, .offset = UINT64_MAX},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        CHECK(ld_queue_submit(queue, &wrong[i]) == -EINVAL);
    ld_queue_close(queue);
    ld_queue_close(NULL);
    ld_file_close(file);
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    path = argv[1];
    int method = atoi(argv[2]);
    create_file();
    test_reads(method);
    test_faults(method);
    test_other_operations(method);
    test_closed_with_requests_under_way(method);
    test_open_fails(method);
    test_wrong_requests(method);
    free(expected);
    return 0;
}
