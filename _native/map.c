/* Read-only mappings of whole files. */
#include "ld_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

static int mapped_fd(ld_file *file)
{
    return file->direct_fd >= 0 ? file->direct_fd : ld_file_buffered_fd(file);
}

int ld_map_open(ld_file *file, ld_memory **out)
{
    *out = NULL;
    if (file->size == 0)
        return -EINVAL;
    if (file->size > SIZE_MAX - LD_RW_MAX)
        return -EOVERFLOW;
    int fd = mapped_fd(file);
    if (fd < 0)
        return fd;
    void *mapping = ld_sys()->mmap((size_t)file->size, PROT_READ, MAP_SHARED, fd, 0);
    if (mapping == MAP_FAILED)
        return -errno;
    return ld_memory_wrap(mapping, (size_t)file->size, mapping, file->size, out);
}

int ld_file_read_ahead(ld_file *file)
{
    int fd = mapped_fd(file);
    return fd < 0 ? fd : -posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
}

int ld_map_prefetch(const ld_memory *map, uint64_t offset, uint64_t length, int exact)
{
    void *address;
    size_t pages_length;
    int error = ld_memory_pages(map, offset, length, &address, &pages_length);
    if (error != 0)
        return error;
    /* WILLNEED starts the reads of just the range, else they come by reading
     * ahead; POPULATE_READ waits for them and says whether they worked. A kernel
     * without it (EINVAL) leaves the reads running. */
    if (exact && ld_sys()->madvise(address, pages_length, LD_MADV_WILLNEED) != 0)
        return -errno;
    error = ld_madvise_retrying(address, pages_length, LD_MADV_POPULATE_READ);
    if (error == -EINVAL)
        error = exact ? 0 : ld_madvise_retrying(address, pages_length, LD_MADV_WILLNEED);
    return error;
}
