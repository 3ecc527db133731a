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

#define LD_MADV_DONTFORK 10
#define LD_MADV_HUGEPAGE 14
#define LD_MADV_WILLNEED 3
#define LD_MADV_POPULATE_READ 22 /* Linux 5.14 */
#define LD_MADV_POPULATE_WRITE 23

/* cachestat, Linux 6.5: its number is the same everywhere. */
#define LD_SYS_CACHESTAT 451

struct ld_cachestat {
    uint64_t cached_pages;
    uint64_t dirty_pages;
    uint64_t writeback_pages;
    uint64_t evicted_pages;
    uint64_t recently_evicted_pages;
};

#define LD_OVERLAYFS_MAGIC 0x794c7630

#define LD_RWF_NOWAIT 8

/* io_uring, Linux 5.6 for IORING_OP_READ. */
struct ld_uring_ring_offsets {
    uint32_t head;
    uint32_t tail;
    uint32_t ring_mask;
    uint32_t ring_entries;
    uint32_t flags_or_overflow; /* of the submission queue: flags; of the other: overflow */
    uint32_t dropped_or_entries; /* of the submission queue: dropped; of the other: its entries */
    uint32_t array_or_flags;     /* of the submission queue: its array; of the other: flags */
    uint32_t reserved;
    uint64_t user_address;
};

struct ld_uring_params {
    uint32_t submission_entries;
    uint32_t completion_entries;
    uint32_t flags;
    uint32_t thread_cpu;
    uint32_t thread_idle;
    uint32_t features;
    uint32_t workqueue_fd;
    uint32_t reserved[3];
    struct ld_uring_ring_offsets submission;
    struct ld_uring_ring_offsets completion;
};
_Static_assert(sizeof(struct ld_uring_params) == 120, "struct io_uring_params has 120 bytes");

struct ld_uring_submission {
    uint8_t opcode;
    uint8_t flags;
    uint16_t priority;
    int32_t fd;
    uint64_t offset;
    uint64_t address;
    uint32_t length;
    uint32_t rw_flags;
    uint64_t user_data;
    uint64_t rest[3];
};
_Static_assert(sizeof(struct ld_uring_submission) == 64, "struct io_uring_sqe has 64 bytes");

struct ld_uring_completion {
    uint64_t user_data;
    int32_t result;
    uint32_t flags;
};

#define LD_URING_OP_READ 22
#define LD_URING_ENTER_GETEVENTS 1u
#define LD_URING_REGISTER_EVENTFD 4u
#define LD_URING_OFF_SUBMISSION 0
#define LD_URING_OFF_COMPLETION 0x8000000
#define LD_URING_OFF_ENTRIES 0x10000000

/* The most that one read(2) transfers, see its man page. */
#define LD_RW_MAX 0x7ffff000u

#endif
