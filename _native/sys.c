/* The system calls behind ld_sys(). */
#include "ld_internal.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
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

static void *sys_mmap(size_t length, int protection, int flags, int fd)
{
    return mmap(NULL, length, protection, flags, fd, 0);
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
    .realloc = realloc,
    .aligned_alloc = aligned_alloc,
};

const struct ld_sys_table *_Atomic ld_sys_current = &ld_sys_real;

const char *ld_version(void)
{
    return LD_VERSION;
}
