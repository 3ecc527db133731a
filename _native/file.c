/* Opening a file for direct and buffered reads.
 *
 * The path is opened once, buffered, which fixes the inode, the size and the
 * bounds. The direct descriptor is a second open of that same inode through
 * /proc/self/fd, so that a path that is replaced meanwhile can't give us two
 * files; where /proc isn't there, a second open by path is kept only if it is
 * the same inode.
 *
 * Which alignment direct reads need is asked of the kernel (statx,
 * STATX_DIOALIGN), else taken from st_blksize; then a read proves it, at an
 * address and an offset that are aligned to just that and no more. Whatever
 * goes wrong on the way only means that there is no direct I/O, and
 * direct_errno says why.
 *
 * Of the two descriptors only the direct one stays open when it works; the
 * buffered one is opened again from it when it is needed. */
#include "ld_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    SMALLEST_BLOCK = 512,
    LARGEST_BLOCK = 1 << 20,
    USUAL_BLOCK = 4096,
    MOST_AGAIN = 100 /* so often a call is tried again, EAGAIN a millisecond apart */
};

int ld_reopen(int fd, int flags)
{
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int opened = ld_sys()->open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | flags);
    return opened < 0 ? -errno : opened;
}

ssize_t ld_pread_retrying(bool direct, int fd, void *buffer, size_t length, uint64_t offset)
{
    const struct ld_sys_table *sys = ld_sys();
    for (int again = 0;; again++) {
        ssize_t got = direct ? sys->pread_direct(fd, buffer, length, (off_t)offset)
                             : sys->pread(fd, buffer, length, (off_t)offset);
        if (got >= 0)
            return got;
        if (errno != EAGAIN || again == MOST_AGAIN)
            return -errno;
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

static bool usable_block(uint64_t size)
{
    return size != 0 && (size & (size - 1)) == 0 && size <= LARGEST_BLOCK;
}

/* Fills in the alignments that direct reads of `fd` are said to need. */
static int ask_alignment(struct ld_file *file, int fd, uint64_t block_size)
{
    struct ld_statx status;
    memset(&status, 0, sizeof status);
    if (ld_sys()->statx(fd, &status) == 0 && (status.mask & LD_STATX_DIOALIGN) != 0) {
        file->memory_alignment = status.dio_memory_alignment;
        file->offset_alignment = status.dio_offset_alignment;
        if (file->memory_alignment == 0 || file->offset_alignment == 0)
            return -EOPNOTSUPP; /* the kernel's way of saying: not on this file */
    } else {
        bool usable = usable_block(block_size) && block_size >= SMALLEST_BLOCK;
        file->memory_alignment = file->offset_alignment =
            usable ? (uint32_t)block_size : USUAL_BLOCK;
    }
    return usable_block(file->memory_alignment) && usable_block(file->offset_alignment)
               ? 0
               : -EINVAL;
}

/* Reads one block at an address and an offset that are aligned to the file's
 * alignments, and, if the file is long enough, to nothing larger. */
static int probe(const struct ld_file *file, int fd)
{
    uint64_t memory = file->memory_alignment, block = file->offset_alignment;
    uint64_t base = memory < sizeof(void *) ? sizeof(void *) : memory;
    uint8_t *buffer = ld_sys()->aligned_alloc(2 * base, ld_align_up(memory + block, 2 * base));
    if (buffer == NULL)
        return -ENOMEM;
    uint64_t offset = file->size > block ? block : 0;
    ssize_t got = -EINTR;
    for (int again = 0; got == -EINTR && again <= MOST_AGAIN; again++)
        got = ld_pread_retrying(true, fd, buffer + memory, block, offset);
    free(buffer);
    return got < 0 ? (int)got : 0;
}

static bool same_inode(const struct ld_file *file, int fd)
{
    struct stat status;
    return ld_sys()->fstat(fd, &status) == 0 && (uint64_t)status.st_dev == file->device &&
           (uint64_t)status.st_ino == file->inode;
}

/* Opens the inode once more for direct reads. *by_path: it had to be done by
 * path, so it can't be done again later. */
static int open_direct_fd(const struct ld_file *file, const char *path, bool *by_path)
{
    int fd = ld_reopen(atomic_load(&file->buffered_fd), O_DIRECT);
    *by_path = fd == -ENOENT;
    if (!*by_path)
        return fd;
    fd = ld_sys()->open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | O_DIRECT);
    if (fd < 0)
        return -errno;
    if (same_inode(file, fd))
        return fd;
    close(fd);
    return -ESTALE;
}

static int open_direct(struct ld_file *file, const char *path, uint64_t block_size)
{
    bool by_path;
    int fd = open_direct_fd(file, path, &by_path);
    if (fd < 0)
        return fd;
    int error = ask_alignment(file, fd, block_size);
    if (error == 0)
        error = probe(file, fd);
    if (error != 0) {
        close(fd);
        file->memory_alignment = file->offset_alignment = 0;
        return error;
    }
    file->direct_fd = fd;
    if (!by_path)
        close(atomic_exchange(&file->buffered_fd, -1));
    return 0;
}

/* Buffered reads go through a file from one end to the other; reading ahead twice
 * as far is measured to be faster. */
static void advise(int fd)
{
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
}

/* O_NONBLOCK, so that a FIFO put there at the last moment can't hang us; it
 * has no meaning for a regular file and is taken off again. */
static int open_regular(const char *path, struct stat *status)
{
    int fd = ld_sys()->open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd < 0)
        return -errno;
    int error = 0;
    if (ld_sys()->fstat(fd, status) != 0)
        error = -errno;
    else if (S_ISDIR(status->st_mode))
        error = -EISDIR;
    else if (!S_ISREG(status->st_mode))
        error = -EINVAL;
    else if (ld_sys()->set_flags(fd, O_RDONLY) != 0)
        error = -errno;
    if (error != 0)
        close(fd);
    return error != 0 ? error : fd;
}

int ld_file_open(const char *path, int direct, ld_file **out)
{
    *out = NULL;
    struct stat status;
    int fd = open_regular(path, &status);
    if (fd < 0)
        return fd;
    struct ld_file *file = ld_sys()->realloc(NULL, sizeof *file);
    if (file == NULL) {
        close(fd);
        return -ENOMEM;
    }
    *file = (struct ld_file){
        .size = (uint64_t)status.st_size,
        .device = (uint64_t)status.st_dev,
        .inode = (uint64_t)status.st_ino,
        .direct_fd = -1,
        .buffered_fd = fd,
    };
    advise(fd);
    if (direct) {
        int error = open_direct(file, path, (uint64_t)status.st_blksize);
        atomic_store(&file->direct_errno, -error);
    }
    *out = file;
    return 0;
}

void ld_file_close(ld_file *file)
{
    if (file == NULL)
        return;
    if (file->stream != NULL)
        fclose(file->stream);
    if (file->direct_fd >= 0)
        close(file->direct_fd);
    int buffered = atomic_load(&file->buffered_fd);
    if (buffered >= 0)
        close(buffered);
    free(file);
}

int ld_file_buffered_fd(struct ld_file *file)
{
    int fd = atomic_load(&file->buffered_fd);
    if (fd >= 0)
        return fd;
    int opened = ld_reopen(file->direct_fd, 0);
    if (opened < 0) {
        /* No descriptor left, no /proc, no permission any more: the direct
         * descriptor becomes a buffered one, for all users of the file. */
        if (ld_sys()->set_flags(file->direct_fd, O_RDONLY) != 0)
            return opened;
        atomic_store(&file->direct_errno, -opened);
        return file->direct_fd;
    }
    advise(opened);
    fd = -1;
    if (atomic_compare_exchange_strong(&file->buffered_fd, &fd, opened))
        return opened;
    close(opened); /* another thread was faster */
    return fd;
}

void ld_file_stay_buffered(ld_file *file)
{
    if (file->direct_fd < 0)
        return;
    if (atomic_load(&file->buffered_fd) >= 0) {
        close(file->direct_fd);
    } else {
        if (ld_sys()->set_flags(file->direct_fd, O_RDONLY) != 0)
            return; /* it takes two, then */
        advise(file->direct_fd);
        atomic_store(&file->buffered_fd, file->direct_fd);
    }
    file->direct_fd = -1;
}

int ld_file_check_size(ld_file *file)
{
    int fd = file->direct_fd >= 0 ? file->direct_fd : ld_file_buffered_fd(file);
    struct stat status;
    if (fd < 0 || ld_sys()->fstat(fd, &status) != 0)
        return fd < 0 ? fd : -errno;
    return (uint64_t)status.st_size < file->size ? -ENODATA : 0;
}

void ld_file_info(const ld_file *file, struct ld_file_info *out)
{
    int direct_errno = atomic_load(&file->direct_errno);
    int cursor_errno = atomic_load(&file->cursor_errno);
    bool possible = file->direct_fd >= 0 && direct_errno == 0;
    *out = (struct ld_file_info){
        .size = file->size,
        .device = file->device,
        .inode = file->inode,
        .memory_alignment = file->memory_alignment,
        .offset_alignment = file->offset_alignment,
        .direct_errno = direct_errno != 0 ? direct_errno : cursor_errno,
        .has_direct = possible && cursor_errno == 0,
        .has_direct_descriptor = possible,
    };
}
