/* Numbers and structs of the Linux kernel that older libc headers lack. They
 * are part of the kernel's stable interface; whether the running kernel knows
 * them is found out by asking it. */
#ifndef LD_KERNEL_ABI_H
#define LD_KERNEL_ABI_H

#include <stdint.h>

#define LD_STATX_DIOALIGN 0x2000u /* Linux 6.1 */
#define LD_AT_EMPTY_PATH 0x1000

/* struct statx, with the fields that Linux 6.1 took from its spare room. */
struct ld_statx {
    uint32_t mask;
    uint32_t block_size;
    uint64_t attributes[1];
    uint32_t links_uid_gid[3];
    uint16_t mode[2];
    uint64_t inode_size_blocks_attributes_mask[4];
    uint64_t timestamps[8];
    uint32_t devices[4];
    uint64_t mount_id;
    uint32_t dio_memory_alignment;
    uint32_t dio_offset_alignment;
    uint64_t spare[12];
};
_Static_assert(sizeof(struct ld_statx) == 256, "struct statx has 256 bytes");

#define LD_MADV_HUGEPAGE 14
#define LD_MADV_WILLNEED 3
#define LD_MADV_POPULATE_READ 22 /* Linux 5.14 */

/* The most that one read(2) transfers, see its man page. */
#define LD_RW_MAX 0x7ffff000u

#endif
