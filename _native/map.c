/* Read-only mappings of whole files. */
#include "ld_internal.h"

#include <errno.h>
#include <sys/mman.h>

int ld_map_open(ld_file *file, ld_memory **out)
{
    *out = NULL;
    if (file->size == 0)
        return -EINVAL;
    if (file->size > SIZE_MAX - LD_RW_MAX)
        return -EOVERFLOW;
    int fd = file->direct_fd >= 0 ? file->direct_fd : ld_file_buffered_fd(file);
    if (fd < 0)
        return fd;
    void *mapping = ld_sys()->mmap((size_t)file->size, PROT_READ, MAP_SHARED, fd, 0);
    if (mapping == MAP_FAILED)
        return -errno;
    return ld_memory_wrap(mapping, (size_t)file->size, mapping, file->size, out);
}

int ld_map_prefetch(const ld_memory *map, uint64_t offset, uint64_t length)
{
    void *address;
    size_t pages_length;
    int error = ld_memory_pages(map, offset, length, &address, &pages_length);
    if (error != 0)
        return error;
    /* WILLNEED starts the reads, POPULATE_READ waits for them and says whether
     * they worked. A kernel without the latter (EINVAL) leaves them running. */
    if (ld_sys()->madvise(address, pages_length, LD_MADV_WILLNEED) != 0)
        return -errno;
    while (ld_sys()->madvise(address, pages_length, LD_MADV_POPULATE_READ) != 0) {
        if (errno == EINVAL)
            break;
        if (errno != EINTR && errno != EAGAIN)
            return -errno;
    }
    return 0;
}
