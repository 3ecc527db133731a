/* Reads of any range, from several threads, with faults, into memory whose
 * borders the sanitizer watches. Usage: test_read FILE (which it creates). */
#include "../../_native/ld_internal.h"
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SIZE = 300001, ROUNDS = 400, THREADS = 4 };

static uint8_t expected[SIZE];
static const char *path;

static void create_file(void)
{
    uint64_t state = 1;
    for (size_t i = 0; i < SIZE; i++)
        expected[i] = (uint8_t)next_random(&state);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0);
    CHECK(write(fd, expected, SIZE) == SIZE);
    close(fd);
}

static ld_file *open_file(int direct)
{
    ld_file *file;
    CHECK(ld_file_open(path, direct, &file) == 0);
    return file;
}

/* Reads a range into an allocation of just its size, so that a byte written
 * past it is found. `congruent`: as a load does it, with room for whole blocks. */
static void read_range(ld_file *file, uint64_t offset, uint64_t length, int congruent,
                       struct ld_transfer *transfer)
{
    uint64_t shift = congruent ? offset % 4096 : 0;
    uint64_t room = congruent ? ld_align_up(length + shift, 4096) - shift : length;
    uint8_t *memory;
    if (congruent)
        memory = aligned_alloc(4096, ld_align_up(room + shift, 4096));
    else
        memory = malloc(room + 1);
    CHECK(memory != NULL);
    uint8_t *destination = memory + shift;
    uint64_t done = 0;
    while (done < length) {
        int64_t got = ld_file_pread(file, destination + done, room - done, length - done,
                                    offset + done, transfer);
        CHECK(got > 0 || got == -EINTR);
        done += got > 0 ? (uint64_t)got : 0;
    }
    CHECK(memcmp(destination, expected + offset, length) == 0);
    free(memory);
}

static void read_many(ld_file *file, uint64_t seed)
{
    struct ld_transfer transfer = {0};
    for (int i = 0; i < ROUNDS; i++) {
        uint64_t offset = next_random(&seed) % SIZE;
        uint64_t length = 1 + next_random(&seed) % (SIZE - offset);
        if (i % 3 == 0)
            length = 1 + length % 5000 % (SIZE - offset);
        read_range(file, offset, length, i % 2, &transfer);
    }
}

static void test_ranges(void)
{
    for (int direct = 0; direct < 2; direct++) {
        ld_file *file = open_file(direct);
        read_many(file, 7);
        ld_file_close(file);
    }
}

static void *thread_main(void *file)
{
    read_many(file, (uint64_t)pthread_self());
    return NULL;
}

/* Several threads on one file, while it stops being readable directly. */
static void test_threads(int error)
{
    ld_file *file = open_file(1);
    if (error != 0)
        CHECK(ld_fault_add(LD_CALL_PREAD_DIRECT, 50, UINT64_MAX, error, 0) == 0);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, thread_main, file) == 0);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    ld_fault_clear();
    ld_file_close(file);
}

static void test_faults(void)
{
    static const int errors[] = {EINTR, EAGAIN, EINVAL, EFAULT, EOPNOTSUPP, 0};
    uint64_t state = 3;
    for (int i = 0; i < 300; i++) {
        ld_file *file = open_file(1);
        for (int rule = 0; rule < 4; rule++) {
            int error = errors[next_random(&state) % 6];
            int buffered = (int)(next_random(&state) % 2);
            int call = buffered && (error == EINTR || error == 0) ? LD_CALL_PREAD
                                                                  : LD_CALL_PREAD_DIRECT;
            CHECK(ld_fault_add(call, 1 + next_random(&state) % 5, 1, error,
                               1 + next_random(&state) % 9000) == 0);
        }
        struct ld_transfer transfer = {0};
        uint64_t offset = next_random(&state) % 5000;
        read_range(file, offset, SIZE - offset, i % 2, &transfer);
        CHECK(transfer.bytes_bounced <= SIZE);
        ld_fault_clear();
        ld_file_close(file);
    }
}

static void test_cursor(void)
{
    for (int direct = 0; direct < 2; direct++) {
        ld_file *file = open_file(direct);
        uint64_t state = 5, position = 0;
        uint8_t *buffer = malloc(SIZE);
        CHECK(buffer != NULL);
        while (position < SIZE) {
            uint64_t n = 1 + next_random(&state) % 30000;
            int64_t got = ld_file_read(file, buffer, n);
            CHECK(got > 0 && memcmp(buffer, expected + position, (size_t)got) == 0);
            position += (uint64_t)got;
            CHECK(ld_file_tell(file) == position);
        }
        CHECK(ld_file_read(file, buffer, 1) == 0);
        CHECK(ld_file_seek(file, -1, SEEK_END) == SIZE - 1);
        CHECK(ld_file_seek(file, INT64_MAX, SEEK_CUR) == -EOVERFLOW);
        CHECK(ld_file_seek(file, -SIZE, SEEK_CUR) == -EINVAL);
        CHECK(ld_file_seek(file, 0, 9) == -EINVAL);
        CHECK(ld_file_read(file, buffer, 9) == 1 && buffer[0] == expected[SIZE - 1]);
        free(buffer);
        ld_file_close(file);
    }
}

#ifndef __SANITIZE_THREAD__
/* More than 2 GiB of address space over 64 MiB of memory, mapped again and again. */
static uint8_t *alias_memory(uint64_t size)
{
    enum { PIECE = 64 << 20 };
    int fd = memfd_create("alias", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, PIECE) == 0);
    uint8_t *memory = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(memory != MAP_FAILED);
    for (uint64_t at = 0; at < size; at += PIECE)
        CHECK(mmap(memory + at, PIECE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) ==
              memory + at);
    close(fd);
    return memory;
}

/* One request of more bytes than one system call takes (0x7ffff000). */
static void test_more_than_one_call_takes(void)
{
    uint64_t length = (2ull << 30) + 12345, room = 33ull * (64 << 20);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)length) == 0);
    CHECK(pwrite(fd, "end", 3, (off_t)length - 3) == 3);
    close(fd);
    uint8_t *memory = alias_memory(room);
    for (int direct = 0; direct < 2; direct++) {
        ld_file *file = open_file(direct);
        struct ld_transfer transfer = {0};
        CHECK(ld_file_pread(file, memory, room, length, 0, &transfer) == (int64_t)length);
        CHECK(memcmp(memory + length - 3, "end", 3) == 0);
        CHECK(transfer.bytes_direct + transfer.bytes_buffered >= length);
        ld_file_close(file);
    }
    CHECK(munmap(memory, room) == 0);
}

#endif

/* Ranges past the end of a file of 5 GiB. */
static void test_large_offsets(void)
{
    uint64_t size = (5ull << 30) + 77;
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)size) == 0);
    CHECK(pwrite(fd, "end", 3, (off_t)size - 3) == 3);
    close(fd);
    ld_file *file = open_file(1);
    struct ld_transfer transfer = {0};
    uint8_t small[16];
    CHECK(ld_file_pread(file, small, sizeof small, sizeof small, size - 3, &transfer) == 3);
    CHECK(memcmp(small, "end", 3) == 0);
    CHECK(ld_file_pread(file, small, sizeof small, sizeof small, size, &transfer) == 0);
    CHECK(ld_file_pread(file, small, sizeof small, sizeof small, UINT64_MAX, &transfer) == 0);
    CHECK(ld_file_pread(file, small, 1, 2, 0, &transfer) == -EINVAL);
    ld_file_close(file);
}

static void test_memory(void)
{
    ld_memory *memory;
    CHECK(ld_arena_open(0, &memory) == -EINVAL && memory == NULL);
    CHECK(ld_arena_open(UINT64_MAX, &memory) == -ENOMEM && memory == NULL);
    CHECK(ld_arena_open(5 << 20, &memory) == 0);
    CHECK((uintptr_t)ld_memory_address(memory) % (2 << 20) == 0);
    CHECK(ld_memory_size(memory) == 5 << 20);
    memset(ld_memory_address(memory), 1, 5 << 20);
    CHECK(ld_memory_lock(memory, 1, (5 << 20)) == -EINVAL);
    CHECK(ld_memory_lock(memory, UINT64_MAX, 1) == -EINVAL);
    ld_memory_close(memory);
    ld_memory_close(NULL);
    ld_file_close(NULL);

    ld_file *file = open_file(1);
    CHECK(ld_map_open(file, &memory) == 0);
    CHECK(memcmp(ld_memory_address(memory), expected, SIZE) == 0);
    CHECK(ld_map_prefetch(memory, 1, SIZE - 1, 1) == 0 && ld_file_read_ahead(file) == 0);
    CHECK(ld_map_prefetch(memory, 1, SIZE, 0) == -EINVAL);
    ld_file_close(file);
    CHECK(((uint8_t *)ld_memory_address(memory))[SIZE - 1] == expected[SIZE - 1]);
    ld_memory_close(memory);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    path = argv[1];
    create_file();
    test_ranges();
    test_cursor();
    test_faults();
    test_threads(0);
    test_threads(EINVAL);
    test_threads(EFAULT);
    test_memory();
    test_large_offsets();
#ifndef __SANITIZE_THREAD__ /* which would note each of its bytes */
    test_more_than_one_call_takes();
#endif
    return 0;
}
