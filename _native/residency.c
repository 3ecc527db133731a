/* How much of a file is in the page cache.
 *
 * cachestat(2) says it at once. The kernel tells mincore(2) of a user who neither
 * owns the file nor may write to it that everything is resident, so it is asked
 * only by one who does. Else a sample of reads that must not wait
 * (RWF_NOWAIT) says how many of them would have had to. */
#include "ld_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { WINDOW_PAGES = 1 << 16, SAMPLES = 64 };

/* The pages of a file on overlayfs belong to the file below, which cachestat
 * doesn't look at: it would say that nothing is there. */
static bool has_pages_elsewhere(int fd)
{
    struct statfs found = {0};
    return ld_sys()->fstatfs(fd, &found) == 0 && (uint64_t)found.f_type == LD_OVERLAYFS_MAGIC;
}

static int64_t by_cachestat(int fd, uint64_t page)
{
    struct ld_cachestat found = {0};
    if (has_pages_elsewhere(fd))
        return -EOPNOTSUPP;
    return ld_sys()->cachestat(fd, &found) == 0 ? (int64_t)(found.cached_pages * page) : -errno;
}

static bool may_ask_mincore(int fd)
{
    struct stat status;
    if (ld_sys()->fstat(fd, &status) != 0)
        return false;
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return status.st_uid == geteuid() || ld_sys()->writable(path) == 0;
}

/* Counts the resident pages of one mapped window. */
static int64_t count_window(void *window, size_t length, uint64_t page, unsigned char *pages)
{
    if (ld_sys()->mincore(window, length, pages) != 0)
        return -errno;
    int64_t resident = 0;
    for (size_t i = 0; i < (length + page - 1) / page; i++)
        resident += pages[i] & 1;
    return resident;
}

static int64_t by_mincore(int fd, uint64_t size, uint64_t page)
{
    if (!may_ask_mincore(fd))
        return -EPERM;
    unsigned char *pages = ld_sys()->realloc(NULL, WINDOW_PAGES);
    if (pages == NULL)
        return -ENOMEM;
    int64_t resident = 0, counted = 0;
    for (uint64_t at = 0; at < size && counted >= 0; at += WINDOW_PAGES * page) {
        size_t length = (size_t)ld_min(size - at, WINDOW_PAGES * page);
        void *window = ld_sys()->mmap(length, PROT_READ, MAP_SHARED, fd, (off_t)at);
        if (window == MAP_FAILED) {
            counted = -errno;
            break;
        }
        counted = count_window(window, length, page, pages);
        munmap(window, length);
        resident += counted > 0 ? counted : 0;
    }
    free(pages);
    return counted < 0 ? counted : resident * (int64_t)page;
}

static int64_t by_sample(int fd, uint64_t size)
{
    uint64_t there = 0;
    for (uint64_t i = 0; i < SAMPLES; i++) {
        uint8_t byte;
        uint64_t at = size / SAMPLES * i + size % SAMPLES * i / SAMPLES;
        ssize_t got = ld_sys()->pread_nowait(fd, &byte, 1, (off_t)at);
        if (got < 0 && errno != EAGAIN)
            return -errno;
        there += got == 1;
    }
    return (int64_t)(size / SAMPLES * there + size % SAMPLES * there / SAMPLES);
}

int64_t ld_file_resident(ld_file *file)
{
    if (file->size == 0)
        return 0;
    /* Only the sample needs a descriptor for buffered reads. */
    int fd = file->direct_fd >= 0 ? file->direct_fd : ld_file_buffered_fd(file);
    if (fd < 0)
        return fd;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    int64_t resident = by_cachestat(fd, page);
    if (resident < 0)
        resident = by_mincore(fd, file->size, page);
    if (resident < 0) {
        fd = ld_file_buffered_fd(file);
        resident = fd < 0 ? fd : by_sample(fd, file->size);
    }
    return resident < 0 ? resident : (int64_t)ld_min((uint64_t)resident, file->size);
}
