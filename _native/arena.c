/* Anonymous memory for weights. It begins on a huge page, so that an address
 * can be congruent to a file offset modulo any alignment up to that. */
#include "ld_internal.h"

#include <errno.h>
#include <sys/mman.h>

enum { HUGE_PAGE = 2 << 20, LARGEST_PAGE = 64 << 10 };

int ld_arena_open(uint64_t size, ld_memory **out)
{
    *out = NULL;
    if (size == 0)
        return -EINVAL;
    if (size > SIZE_MAX - HUGE_PAGE - LARGEST_PAGE)
        return -ENOMEM;
    size_t length = (size_t)ld_align_up(size, LARGEST_PAGE);
    size_t reserved = length + HUGE_PAGE;
    uint8_t *mapping = ld_sys()->mmap(reserved, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED)
        return -errno;
    size_t before = (size_t)(ld_align_up((uintptr_t)mapping, HUGE_PAGE) - (uintptr_t)mapping);
    size_t after = reserved - length - before;
    if (before != 0)
        munmap(mapping, before);
    if (after != 0)
        munmap(mapping + before + length, after);
    /* Only a wish: a system without huge pages does without. */
    if (length >= HUGE_PAGE)
        (void)ld_sys()->madvise(mapping + before, length, LD_MADV_HUGEPAGE);
    return ld_memory_wrap(mapping + before, length, mapping + before, size, out);
}
