/* What the files of the native core share. */
#ifndef LD_INTERNAL_H
#define LD_INTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/vfs.h>

#include "kernel_abi.h"
#include "ld_api.h"

/* --- System calls (sys.c, fault.c) ---------------------------------------- */
/* Each member behaves as the call of its name and sets errno. All system calls
 * that can fail in a way that matters go through `ld_sys`; fault.c puts its
 * own table there while a test has rules. */
struct ld_sys_table {
    int (*open)(const char *path, int flags);
    int (*fstat)(int fd, struct stat *out);
    int (*statx)(int fd, struct ld_statx *out);
    int (*set_flags)(int fd, int flags); /* fcntl F_SETFL */
    ssize_t (*pread_direct)(int fd, void *buffer, size_t length, off_t offset);
    ssize_t (*pread)(int fd, void *buffer, size_t length, off_t offset);
    FILE *(*fopencookie)(void *cookie, cookie_io_functions_t functions); /* for reading */
    int (*fseek)(FILE *stream, off_t offset);
    size_t (*fread)(void *buffer, size_t length, FILE *stream);
    void *(*mmap)(size_t length, int protection, int flags, int fd, off_t offset);
    int (*madvise)(void *address, size_t length, int advice);
    int (*mlock)(const void *address, size_t length);
    int (*cachestat)(int fd, struct ld_cachestat *out); /* of the whole file */
    int (*fstatfs)(int fd, struct statfs *out);
    int (*mincore)(void *address, size_t length, unsigned char *pages);
    int (*writable)(const char *path); /* 0 when we may write to it */
    ssize_t (*pread_nowait)(int fd, void *buffer, size_t length, off_t offset);
    int (*uring_setup)(unsigned entries, struct ld_uring_params *params);
    int (*uring_enter)(int fd, unsigned submit, unsigned wait, unsigned flags);
    int (*uring_register)(int fd, unsigned opcode, void *argument, unsigned count);
    /* What a completion says of a read to `buffer`: -1 with errno, or a count. */
    ssize_t (*uring_result)(int32_t result, void *buffer);
    int (*eventfd)(void);
    int (*poll)(int fd, int milliseconds); /* for reading */
    int (*thread_create)(pthread_t *thread, const pthread_attr_t *attributes,
                         void *(*run)(void *), void *argument);
    void *(*realloc)(void *old, size_t size);
    void *(*aligned_alloc)(size_t alignment, size_t size);
};

extern const struct ld_sys_table ld_sys_real;
extern const struct ld_sys_table *_Atomic ld_sys_current;

static inline const struct ld_sys_table *ld_sys(void)
{
    return atomic_load_explicit(&ld_sys_current, memory_order_acquire);
}

/* --- Files ----------------------------------------------------------------- */
struct ld_file {
    uint64_t size;
    uint64_t device;
    uint64_t inode;
    uint32_t memory_alignment;
    uint32_t offset_alignment;
    int direct_fd;           /* -1: none; else open as long as the file */
    _Atomic int buffered_fd; /* -1: not opened yet */
    _Atomic int direct_errno; /* 0 as long as direct reads are possible */
    /* The cursor: for one thread at a time, but for cursor_errno. */
    uint64_t position;
    struct ld_transfer cursor;
    _Atomic int cursor_errno; /* its fallback, 0 while there was none */
    FILE *stream;             /* NULL until the first buffered read */
    uint64_t stream_position; /* where the next fread reads; UINT64_MAX: unknown */
    uint64_t cookie_position; /* where the stream's own next read reads */
};

/* A descriptor for buffered reads, opened from the direct one (the same inode)
 * when it is first needed; -errno. Safe from many threads. */
int ld_file_buffered_fd(struct ld_file *file);
/* A new open file description of the inode behind `fd`, with `flags`. */
int ld_reopen(int fd, int flags);
/* pread that retries EAGAIN a bounded number of times; a count or -errno. */
ssize_t ld_pread_retrying(bool direct, int fd, void *buffer, size_t length, uint64_t offset);

/* How many bytes one direct read into `address` would ask for, with the last
 * block whole; 0 when the request can't be one direct read. */
uint64_t ld_file_straight(const struct ld_file *file, const struct ld_request *request);

/* --- Queues ------------------------------------------------------------------ */
enum { LD_NO_SLOT = UINT32_MAX, LD_MOST_WORKERS = 64 };

struct ld_slot {
    struct ld_request request; /* its result is what was read so far */
    uint32_t next;
};

struct ld_slots { /* a list */
    uint32_t first;
    uint32_t last;
};

struct ld_queue {
    const struct ld_method *method;
    pid_t owner; /* a forked child has the memory, but neither the threads nor the ring */
    struct ld_slot *slots;
    uint32_t capacity;
    pthread_mutex_t lock; /* of the lists, `closing` and the slots in them */
    pthread_cond_t work;
    struct ld_slots free;
    struct ld_slots waiting; /* for a worker, or for `wait` where there are none */
    struct ld_slots done;
    bool closing;
    int event_fd; /* is written to when something is done */
    uint32_t n_workers;
    pthread_t workers[LD_MOST_WORKERS];
    struct ld_uring *uring;
};

/* What a method does with requests. Each of them is called by the one thread
 * that uses the queue. */
struct ld_method {
    int (*open)(struct ld_queue *queue);
    /* Takes charge of a slot that holds a request. */
    void (*start)(struct ld_queue *queue, uint32_t slot);
    /* Puts what is done into the list of done slots, without waiting. */
    void (*collect)(struct ld_queue *queue);
    /* Waits for what can't be called back, starts nothing more, and releases. */
    void (*close)(struct ld_queue *queue);
    /* Releases what a forked child has of it. */
    void (*abandon)(struct ld_queue *queue);
};

extern const struct ld_method ld_method_sync;
extern const struct ld_method ld_method_threads;
extern const struct ld_method ld_method_uring;

/* The synchronous executor: does what is left of a request, here and now. */
void ld_request_run(struct ld_request *request);
void ld_queue_put(struct ld_queue *queue, struct ld_slots *list, uint32_t slot);
uint32_t ld_queue_take(struct ld_queue *queue, struct ld_slots *list);
/* Hands a slot to the workers; to the user of the queue. */
void ld_queue_delegate(struct ld_queue *queue, uint32_t slot);
void ld_queue_finish(struct ld_queue *queue, uint32_t slot);
int ld_workers_open(struct ld_queue *queue);
void ld_workers_close(struct ld_queue *queue);

/* --- Memory ---------------------------------------------------------------- */
struct ld_memory {
    uint8_t *address;   /* of what the user sees */
    uint64_t size;
    void *mapping;      /* what munmap takes */
    size_t mapping_length;
};

/* Wraps a mapping; on failure the mapping is removed. */
int ld_memory_wrap(void *mapping, size_t mapping_length, uint8_t *address, uint64_t size,
                   struct ld_memory **out);
/* madvise, tried again a bounded number of times when it was interrupted. */
int ld_madvise_retrying(void *address, size_t length, int advice);
/* The whole pages that hold a range of the memory; -EINVAL when the range
 * isn't inside it. */
int ld_memory_pages(const struct ld_memory *memory, uint64_t offset, uint64_t length,
                    void **address, size_t *pages_length);

/* --- Arithmetic ------------------------------------------------------------ */
/* `alignment` is a power of two. */
static inline uint64_t ld_align_down(uint64_t value, uint64_t alignment)
{
    return value & ~(alignment - 1);
}

/* The caller has made sure that value + alignment doesn't wrap. */
static inline uint64_t ld_align_up(uint64_t value, uint64_t alignment)
{
    return ld_align_down(value + alignment - 1, alignment);
}

static inline uint64_t ld_min(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

#endif
