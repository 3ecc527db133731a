/* What the files of the native core share. */
#ifndef LD_INTERNAL_H
#define LD_INTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/types.h>

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
    void *(*mmap)(size_t length, int protection, int flags, int fd);
    int (*madvise)(void *address, size_t length, int advice);
    int (*mlock)(const void *address, size_t length);
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
