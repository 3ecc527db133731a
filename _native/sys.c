/* The system calls behind ld_sys(). */
#include "ld_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int sys_open(const char *path, int flags)
{
    return open(path, flags);
}

static int sys_fstat(int fd, struct stat *out)
{
    return fstat(fd, out);
}

static int sys_statx(int fd, struct ld_statx *out)
{
    return (int)syscall(SYS_statx, fd, "", LD_AT_EMPTY_PATH, LD_STATX_DIOALIGN, out);
}

static int sys_set_flags(int fd, int flags)
{
    return fcntl(fd, F_SETFL, flags);
}

static ssize_t sys_pread(int fd, void *buffer, size_t length, off_t offset)
{
    return pread(fd, buffer, length, offset);
}

static FILE *sys_fopencookie(void *cookie, cookie_io_functions_t functions)
{
    return fopencookie(cookie, "rb", functions);
}

static int sys_fseek(FILE *stream, off_t offset)
{
    return fseeko(stream, offset, SEEK_SET);
}

static size_t sys_fread(void *buffer, size_t length, FILE *stream)
{
    return fread(buffer, 1, length, stream);
}

static void *sys_mmap(size_t length, int protection, int flags, int fd, off_t offset)
{
    return mmap(NULL, length, protection, flags, fd, offset);
}

static int sys_cachestat(int fd, struct ld_cachestat *out)
{
    struct {
        uint64_t offset;
        uint64_t length;
    } everything = {0, 0};
    return (int)syscall(LD_SYS_CACHESTAT, fd, &everything, out, 0);
}

static int sys_writable(const char *path)
{
    return faccessat(AT_FDCWD, path, W_OK, AT_EACCESS);
}

static ssize_t sys_pread_nowait(int fd, void *buffer, size_t length, off_t offset)
{
    struct iovec part = {buffer, length};
    return preadv2(fd, &part, 1, offset, LD_RWF_NOWAIT);
}

static int sys_uring_setup(unsigned entries, struct ld_uring_params *params)
{
    return (int)syscall(SYS_io_uring_setup, entries, params);
}

static int sys_uring_enter(int fd, unsigned submit, unsigned wait, unsigned flags)
{
    return (int)syscall(SYS_io_uring_enter, fd, submit, wait, flags, NULL, 0);
}

static int sys_uring_register(int fd, unsigned opcode, void *argument, unsigned count)
{
    return (int)syscall(SYS_io_uring_register, fd, opcode, argument, count);
}

static ssize_t sys_uring_result(int32_t result, void *buffer)
{
    (void)buffer;
    if (result >= 0)
        return result;
    errno = -result;
    return -1;
}

static int sys_eventfd(void)
{
    return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
}

static int sys_poll(int fd, int milliseconds)
{
    struct pollfd entry = {.fd = fd, .events = POLLIN};
    return poll(&entry, 1, milliseconds);
}

const struct ld_sys_table ld_sys_real = {
    .open = sys_open,
    .fstat = sys_fstat,
    .statx = sys_statx,
    .set_flags = sys_set_flags,
    .pread_direct = sys_pread,
    .pread = sys_pread,
    .fopencookie = sys_fopencookie,
    .fseek = sys_fseek,
    .fread = sys_fread,
    .mmap = sys_mmap,
    .madvise = madvise,
    .mlock = mlock,
    .cachestat = sys_cachestat,
    .fstatfs = fstatfs,
    .mincore = mincore,
    .writable = sys_writable,
    .pread_nowait = sys_pread_nowait,
    .uring_setup = sys_uring_setup,
    .uring_enter = sys_uring_enter,
    .uring_register = sys_uring_register,
    .uring_result = sys_uring_result,
    .eventfd = sys_eventfd,
    .poll = sys_poll,
    .thread_create = pthread_create,
    .realloc = realloc,
    .aligned_alloc = aligned_alloc,
};

const struct ld_sys_table *_Atomic ld_sys_current = &ld_sys_real;

const char *ld_version(void)
{
    return LD_VERSION;
}
