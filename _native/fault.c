/* Makes system calls fail on demand. While there are rules, ld_sys() is the
 * table below: it counts the calls of each kind, asks the rules, and calls the
 * real function when none of them wants a failure. */
#include "ld_internal.h"

#include <errno.h>
#include <string.h>

enum { MOST_RULES = 64 };

struct rule {
    int call;
    uint64_t first;
    uint64_t times;
    int error;
    uint64_t limit;
};

static struct rule rules[MOST_RULES];
static size_t n_rules;
static _Atomic uint64_t counts[LD_CALL_END];

/* Counts a call. Returns false, with errno set, when it is to fail; else
 * `length` (may be NULL) is cut to what a rule allows. */
static bool admit(int call, size_t *length)
{
    uint64_t number = atomic_fetch_add(&counts[call], 1) + 1;
    for (size_t i = 0; i < n_rules; i++) {
        const struct rule *rule = &rules[i];
        if (rule->call != call || number < rule->first || number - rule->first >= rule->times)
            continue;
        if (rule->error != 0) {
            errno = rule->error;
            return false;
        }
        if (length != NULL && *length > rule->limit)
            *length = (size_t)rule->limit;
    }
    return true;
}

static int fault_open(const char *path, int flags)
{
    return admit(LD_CALL_OPEN, NULL) ? ld_sys_real.open(path, flags) : -1;
}

static int fault_fstat(int fd, struct stat *out)
{
    return admit(LD_CALL_FSTAT, NULL) ? ld_sys_real.fstat(fd, out) : -1;
}

static int fault_statx(int fd, struct ld_statx *out)
{
    return admit(LD_CALL_STATX, NULL) ? ld_sys_real.statx(fd, out) : -1;
}

static int fault_set_flags(int fd, int flags)
{
    return admit(LD_CALL_FCNTL, NULL) ? ld_sys_real.set_flags(fd, flags) : -1;
}

/* A read cut short is made whole and its tail thrown away, since a direct read
 * of an odd length would be refused: the bytes past the limit are scrambled, so
 * that a reader that trusts them is found out. */
static ssize_t short_read(ssize_t (*read)(int, void *, size_t, off_t), int fd, void *buffer,
                          size_t length, off_t offset, size_t limit)
{
    ssize_t got = read(fd, buffer, length, offset);
    if (got < 0 || (size_t)got <= limit)
        return got;
    memset((uint8_t *)buffer + limit, 0xdb, (size_t)got - limit);
    return (ssize_t)limit;
}

static ssize_t fault_pread_direct(int fd, void *buffer, size_t length, off_t offset)
{
    size_t limit = length;
    if (!admit(LD_CALL_PREAD_DIRECT, &limit))
        return -1;
    return short_read(ld_sys_real.pread_direct, fd, buffer, length, offset, limit);
}

static ssize_t fault_pread(int fd, void *buffer, size_t length, off_t offset)
{
    size_t limit = length;
    if (!admit(LD_CALL_PREAD, &limit))
        return -1;
    return short_read(ld_sys_real.pread, fd, buffer, length, offset, limit);
}

static FILE *fault_fopencookie(void *cookie, cookie_io_functions_t functions)
{
    return admit(LD_CALL_FOPENCOOKIE, NULL) ? ld_sys_real.fopencookie(cookie, functions) : NULL;
}

static int fault_fseek(FILE *stream, off_t offset)
{
    return admit(LD_CALL_FSEEK, NULL) ? ld_sys_real.fseek(stream, offset) : -1;
}

static size_t fault_fread(void *buffer, size_t length, FILE *stream)
{
    return admit(LD_CALL_FREAD, &length) ? ld_sys_real.fread(buffer, length, stream) : 0;
}

static void *fault_mmap(size_t length, int protection, int flags, int fd, off_t offset)
{
    return admit(LD_CALL_MMAP, NULL) ? ld_sys_real.mmap(length, protection, flags, fd, offset)
                                     : (void *)-1; /* MAP_FAILED */
}

static int fault_cachestat(int fd, struct ld_cachestat *out)
{
    return admit(LD_CALL_CACHESTAT, NULL) ? ld_sys_real.cachestat(fd, out) : -1;
}

static int fault_fstatfs(int fd, struct statfs *out)
{
    return admit(LD_CALL_FSTATFS, NULL) ? ld_sys_real.fstatfs(fd, out) : -1;
}

static int fault_mincore(void *address, size_t length, unsigned char *pages)
{
    return admit(LD_CALL_MINCORE, NULL) ? ld_sys_real.mincore(address, length, pages) : -1;
}

static int fault_writable(const char *path)
{
    return admit(LD_CALL_WRITABLE, NULL) ? ld_sys_real.writable(path) : -1;
}

static ssize_t fault_pread_nowait(int fd, void *buffer, size_t length, off_t offset)
{
    return admit(LD_CALL_PREAD_NOWAIT, NULL)
               ? ld_sys_real.pread_nowait(fd, buffer, length, offset)
               : -1;
}

static int fault_uring_setup(unsigned entries, struct ld_uring_params *params)
{
    return admit(LD_CALL_URING_SETUP, NULL) ? ld_sys_real.uring_setup(entries, params) : -1;
}

static int fault_uring_enter(int fd, unsigned submit, unsigned wait, unsigned flags)
{
    return admit(LD_CALL_URING_ENTER, NULL) ? ld_sys_real.uring_enter(fd, submit, wait, flags)
                                            : -1;
}

static int fault_uring_register(int fd, unsigned opcode, void *argument, unsigned count)
{
    return admit(LD_CALL_URING_REGISTER, NULL)
               ? ld_sys_real.uring_register(fd, opcode, argument, count)
               : -1;
}

/* Of a completion that is to come back short, or to fail, the bytes that it then
 * didn't deliver are scrambled, as in short_read. */
static ssize_t fault_uring_result(int32_t result, void *buffer)
{
    if (result <= 0)
        return admit(LD_CALL_URING_RESULT, NULL) ? ld_sys_real.uring_result(result, buffer) : -1;
    size_t count = (size_t)result;
    bool admitted = admit(LD_CALL_URING_RESULT, &count);
    size_t delivered = admitted ? count : 0;
    memset((uint8_t *)buffer + delivered, 0xdb, (size_t)result - delivered);
    return admitted ? (ssize_t)count : -1;
}

static int fault_eventfd(void)
{
    return admit(LD_CALL_EVENTFD, NULL) ? ld_sys_real.eventfd() : -1;
}

static int fault_poll(int fd, int milliseconds)
{
    return admit(LD_CALL_POLL, NULL) ? ld_sys_real.poll(fd, milliseconds) : -1;
}

static int fault_thread_create(pthread_t *thread, const pthread_attr_t *attributes,
                               void *(*run)(void *), void *argument)
{
    return admit(LD_CALL_THREAD_CREATE, NULL)
               ? ld_sys_real.thread_create(thread, attributes, run, argument)
               : errno;
}

static int fault_madvise(void *address, size_t length, int advice)
{
    return admit(LD_CALL_MADVISE, NULL) ? ld_sys_real.madvise(address, length, advice) : -1;
}

static int fault_mlock(const void *address, size_t length)
{
    return admit(LD_CALL_MLOCK, NULL) ? ld_sys_real.mlock(address, length) : -1;
}

static void *fault_realloc(void *old, size_t size)
{
    return admit(LD_CALL_ALLOC, NULL) ? ld_sys_real.realloc(old, size) : NULL;
}

static void *fault_aligned_alloc(size_t alignment, size_t size)
{
    return admit(LD_CALL_ALLOC, NULL) ? ld_sys_real.aligned_alloc(alignment, size) : NULL;
}

static const struct ld_sys_table faulty = {
    .open = fault_open,
    .fstat = fault_fstat,
    .statx = fault_statx,
    .set_flags = fault_set_flags,
    .pread_direct = fault_pread_direct,
    .pread = fault_pread,
    .fopencookie = fault_fopencookie,
    .fseek = fault_fseek,
    .fread = fault_fread,
    .mmap = fault_mmap,
    .madvise = fault_madvise,
    .mlock = fault_mlock,
    .cachestat = fault_cachestat,
    .fstatfs = fault_fstatfs,
    .mincore = fault_mincore,
    .writable = fault_writable,
    .pread_nowait = fault_pread_nowait,
    .uring_setup = fault_uring_setup,
    .uring_enter = fault_uring_enter,
    .uring_register = fault_uring_register,
    .uring_result = fault_uring_result,
    .eventfd = fault_eventfd,
    .poll = fault_poll,
    .thread_create = fault_thread_create,
    .realloc = fault_realloc,
    .aligned_alloc = fault_aligned_alloc,
};

int ld_fault_add(int call, uint64_t nth, uint64_t times, int error, uint64_t limit)
{
    if (call <= 0 || call >= LD_CALL_END || nth == 0 || error < 0)
        return -EINVAL;
    if (n_rules == MOST_RULES)
        return -ENOSPC;
    uint64_t first = atomic_load(&counts[call]) + nth;
    rules[n_rules++] =
        (struct rule){.call = call, .first = first, .times = times, .error = error, .limit = limit};
    atomic_store(&ld_sys_current, &faulty);
    return 0;
}

void ld_fault_clear(void)
{
    atomic_store(&ld_sys_current, &ld_sys_real);
    n_rules = 0;
    for (int call = 0; call < LD_CALL_END; call++)
        atomic_store(&counts[call], 0);
}

uint64_t ld_fault_count(int call)
{
    return call > 0 && call < LD_CALL_END ? atomic_load(&counts[call]) : 0;
}
