/* Memory that is handed to users: a mapped file (map.c) or an arena (arena.c). */
#include "ld_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_AGAIN = 1000 };

int ld_memory_wrap(void *mapping, size_t mapping_length, uint8_t *address, uint64_t size,
                   struct ld_memory **out)
{
    struct ld_memory *memory = ld_sys()->realloc(NULL, sizeof *memory);
    if (memory == NULL) {
        munmap(mapping, mapping_length);
        return -ENOMEM;
    }
    *memory = (struct ld_memory){
        .address = address,
        .size = size,
        .mapping = mapping,
        .mapping_length = mapping_length,
    };
    *out = memory;
    return 0;
}

int ld_memory_pages(const struct ld_memory *memory, uint64_t offset, uint64_t length,
                    void **address, size_t *pages_length)
{
    if (offset > memory->size || length > memory->size - offset)
        return -EINVAL;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t start = ld_align_down(offset, page);
    *address = memory->address + start;
    *pages_length = (size_t)(ld_align_up(offset + length, page) - start);
    return 0;
}

int ld_madvise_retrying(void *address, size_t length, int advice)
{
    for (int again = 0;; again++) {
        if (ld_sys()->madvise(address, length, advice) == 0)
            return 0;
        if ((errno != EINTR && errno != EAGAIN) || again == MOST_AGAIN)
            return -errno;
    }
}

void *ld_memory_address(const ld_memory *memory)
{
    return memory->address;
}

uint64_t ld_memory_size(const ld_memory *memory)
{
    return memory->size;
}

int ld_memory_lock(const ld_memory *memory, uint64_t offset, uint64_t length)
{
    void *address;
    size_t pages_length;
    int error = ld_memory_pages(memory, offset, length, &address, &pages_length);
    if (error != 0)
        return error;
    return ld_sys()->mlock(address, pages_length) != 0 ? -errno : 0;
}

int ld_memory_release(const ld_memory *memory, uint64_t offset, uint64_t length)
{
    if (offset > memory->size || length > memory->size - offset)
        return -EINVAL;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t start = ld_align_up(offset, page);
    uint64_t end = offset + length == memory->size ? ld_align_up(memory->size, page)
                                                   : ld_align_down(offset + length, page);
    if (end <= start)
        return 0;
    /* Something that can't be touched stays in the place, so that nothing else
     * is mapped there before the whole is given back. */
    void *found = mmap(memory->address + start, (size_t)(end - start), PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return found == MAP_FAILED ? -errno : 0;
}

void ld_memory_close(ld_memory *memory)
{
    if (memory == NULL)
        return;
    munmap(memory->mapping, memory->mapping_length);
    free(memory);
}
