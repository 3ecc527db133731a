/* The public C interface of the native core, and at the same time the cdef of
 * its Python binding: declarations only, no preprocessor lines. Whoever
 * includes it includes <stdint.h> and <stddef.h> first.
 *
 * Every function returns 0, a count, or -errno; there are no messages here.
 * What is opened is closed by the close function of the same prefix; an
 * out-parameter is NULL after a failure. */

const char *ld_version(void);

/* --- Faults, for tests (fault.c) -----------------------------------------
 * The kinds of system call that a test can make fail. A direct and a buffered
 * pread are kinds of their own. */
enum ld_call {
    LD_CALL_OPEN = 1,
    LD_CALL_FSTAT,
    LD_CALL_STATX,
    LD_CALL_FCNTL,
    LD_CALL_PREAD_DIRECT,
    LD_CALL_PREAD,
    LD_CALL_FOPENCOOKIE,
    LD_CALL_FSEEK,
    LD_CALL_FREAD,
    LD_CALL_MMAP,
    LD_CALL_MADVISE,
    LD_CALL_MLOCK,
    LD_CALL_ALLOC,
    LD_CALL_CACHESTAT,
    LD_CALL_FSTATFS,
    LD_CALL_MINCORE,
    LD_CALL_WRITABLE,
    LD_CALL_PREAD_NOWAIT,
    LD_CALL_URING_SETUP,
    LD_CALL_URING_ENTER,
    LD_CALL_URING_REGISTER,
    LD_CALL_URING_RESULT,
    LD_CALL_EVENTFD,
    LD_CALL_POLL,
    LD_CALL_THREAD_CREATE,
    LD_CALL_END
};

/* From the nth call of the kind (1 is the next one), `times` calls fail with
 * `error`, or, when `error` is 0, transfer at most `limit` bytes.
 * -ENOSPC when there are too many rules, -EINVAL for a rule that makes no
 * sense. Not for use while other threads are inside this library. */
int ld_fault_add(int call, uint64_t nth, uint64_t times, int error, uint64_t limit);
/* Drops all rules and counts. */
void ld_fault_clear(void);
/* How many calls of the kind were made since the first rule was added. */
uint64_t ld_fault_count(int call);

/* --- Files (file.c, read.c) ---------------------------------------------- */
typedef struct ld_file ld_file;

struct ld_file_info {
    uint64_t size;              /* bytes, fixed at open */
    uint64_t device;
    uint64_t inode;
    uint32_t memory_alignment;  /* bytes; 0 when there was no direct descriptor */
    uint32_t offset_alignment;
    int32_t direct_errno;       /* why direct I/O can't be had; 0 when it can or wasn't asked for */
    int32_t has_direct;         /* the next cursor read is direct */
    int32_t has_direct_descriptor; /* the file was opened for direct reads and they are possible */
};

/* What one user of a file (the cursor, or one load) has read, and how. */
struct ld_transfer {
    uint64_t bytes_direct;      /* delivered by direct reads, slack included */
    uint64_t bytes_buffered;    /* delivered by buffered reads */
    uint64_t bytes_bounced;     /* copied from a bounce buffer to their destination */
    uint64_t fallback_offset;   /* where reading went over to buffered */
    uint64_t stop_offset;       /* where the last call stopped */
    int32_t fallback_errno;     /* 0: no fallback */
    int32_t direct_required;    /* set by the caller: an impossible direct read is an error */
    int32_t buffered_only;      /* set by the caller: don't read directly */
};

/* direct: try to read directly; 0: never. -EISDIR for a directory, -EINVAL for
 * anything else that isn't a regular file. That direct I/O can't be had is no
 * error, see direct_errno. */
int ld_file_open(const char *path, int direct, ld_file **out);
void ld_file_close(ld_file *file);
void ld_file_info(const ld_file *file, struct ld_file_info *out);
/* -ENODATA when the file has become shorter than it was at open. */
int ld_file_check_size(ld_file *file);

/* Bytes of the file that are in the page cache, at least roughly; -errno when
 * that can't be found out. */
/* For a file that is read buffered or mapped: the descriptor for direct reads
 * becomes the buffered one, so that the file takes one. Before anything else
 * uses the file. */
void ld_file_stay_buffered(ld_file *file);
int64_t ld_file_resident(ld_file *file);

/* Positional read of up to `length` bytes at `offset`; at most `room` bytes
 * at `destination` are touched (room >= length), so that a direct read may
 * write whole blocks there. Returns the bytes that are right: `length`, or
 * fewer at the end of the file or when a signal arrived (-EINTR when nothing
 * was read by then). A file that has become shorter than it was at open gives
 * -ENODATA. Safe from many threads, each with a transfer of its own. */
int64_t ld_file_pread(ld_file *file, void *destination, uint64_t room, uint64_t length,
                      uint64_t offset, struct ld_transfer *transfer);

/* The cursor, in logical bytes. One thread at a time. `read` returns as
 * ld_file_pread does and moves the cursor by that much. */
int64_t ld_file_seek(ld_file *file, int64_t offset, int whence);
uint64_t ld_file_tell(const ld_file *file);
int64_t ld_file_read(ld_file *file, void *destination, uint64_t length);
/* What the cursor has read. */
void ld_file_cursor(const ld_file *file, struct ld_transfer *out);

/* --- Memory (memory.c, map.c, arena.c) ------------------------------------ */
typedef struct ld_memory ld_memory;

/* Read-only mapping of the whole file; nothing is read. */
int ld_map_open(ld_file *file, ld_memory **out);
/* Reads the range into the page cache and the page tables. exact: and nothing
 * that the kernel would read ahead of it. An I/O error or a file that has shrunk
 * gives -EFAULT (MADV_POPULATE_READ says so). */
int ld_map_prefetch(const ld_memory *map, uint64_t offset, uint64_t length, int exact);
/* The mapping of this file is going to be read from one end to the other. */
int ld_file_read_ahead(ld_file *file);

/* Anonymous zeroed memory, aligned to 2 MiB, in huge pages where the system
 * has them. */
int ld_arena_open(uint64_t size, ld_memory **out);

void *ld_memory_address(const ld_memory *memory);
uint64_t ld_memory_size(const ld_memory *memory);
/* Locks the range (rounded to pages) into physical memory. */
int ld_memory_lock(const ld_memory *memory, uint64_t offset, uint64_t length);
/* Gives up the whole pages in the range; they may not be touched any more. */
int ld_memory_release(const ld_memory *memory, uint64_t offset, uint64_t length);
void ld_memory_close(ld_memory *memory);

/* --- The header of a GGUF file (gguf_scan.c) ------------------------------- */
/* Offsets are absolute in the file. */
struct ld_gguf_key {
    uint64_t offset;        /* of the record */
    uint64_t name_offset;
    uint64_t name_length;
    uint64_t value_offset;  /* of the value; of a string, its bytes; of an array, its first element */
    uint64_t value_length;  /* bytes */
    uint64_t count;         /* elements of an array, else 1 */
    uint32_t type;
    uint32_t element_type;  /* of an array, else the type */
};

struct ld_gguf_tensor {
    uint64_t offset;        /* of the record */
    uint64_t name_offset;
    uint64_t name_length;
    uint64_t dims[8];       /* ggml order, ne[0] first; 1 past n_dims */
    uint64_t data_offset;   /* relative to the data section */
    uint64_t nbytes;        /* 0 when the type is unknown */
    uint32_t n_dims;
    uint32_t type;
    uint32_t known;         /* the type is in the table of types */
    uint32_t empty;         /* a dimension is zero */
};

/* One per type id: elements and bytes of a block; elements 0: unknown. */
struct ld_gguf_type {
    uint32_t block_elements;
    uint32_t block_bytes;
};

enum ld_gguf_problem_code {
    LD_GGUF_OK = 0,
    LD_GGUF_BAD_MAGIC,
    LD_GGUF_BAD_VERSION,      /* value: the version */
    LD_GGUF_TRUNCATED,        /* value: bytes needed; limit: bytes left */
    LD_GGUF_TOO_MANY_KEYS,    /* value: the count; limit: the most that are possible */
    LD_GGUF_TOO_MANY_TENSORS,
    LD_GGUF_EMPTY_KEY,
    LD_GGUF_BAD_TYPE,         /* value: the type of a value or of an array's elements */
    LD_GGUF_NESTED_ARRAY,
    LD_GGUF_ARRAY_TOO_LONG,   /* value: the count; limit: the most that fit */
    LD_GGUF_TOO_MANY_DIMS,    /* value: n_dims; limit: 8 */
    LD_GGUF_SIZE_OVERFLOW,    /* elements or bytes pass 2^63 - 1 */
    LD_GGUF_ROW_NOT_BLOCKS    /* value: ne[0]; limit: elements of a block */
};

/* What is wrong, and in which record: index counts keys or tensors from 0,
 * or is -1. The name is that of the record, when it was read. */
struct ld_gguf_problem {
    int32_t code;
    int32_t in_tensors;
    int64_t index;
    uint64_t offset;
    uint64_t value;
    uint64_t limit;
    uint64_t name_offset;
    uint64_t name_length;
};

struct ld_gguf {
    uint64_t file_size;
    uint64_t position;        /* end of what was scanned; at the end, of the header */
    uint64_t needed;          /* after LD_GGUF_MORE: so many bytes of the file at least */
    uint64_t n_keys;          /* as the header claims */
    uint64_t n_tensors;
    uint64_t keys_length;     /* as scanned */
    uint64_t tensors_length;
    struct ld_gguf_key *keys;
    struct ld_gguf_tensor *tensors;
    struct ld_gguf_problem problem;
    uint32_t version;
};

enum ld_gguf_status { LD_GGUF_DONE = 1, LD_GGUF_MORE = 2 };

int ld_gguf_open(uint64_t file_size, struct ld_gguf **out);
/* Scans the first `length` bytes of the file, going on after the last record
 * that an earlier call finished. Returns an ld_gguf_status, -EBADMSG (see
 * problem) or -ENOMEM. `types` has `types_length` entries, by type id. */
int ld_gguf_scan(struct ld_gguf *scan, const uint8_t *bytes, uint64_t length,
                 const struct ld_gguf_type *types, uint64_t types_length);
void ld_gguf_close(struct ld_gguf *scan);

/* Where the strings of an array of strings that was scanned lie: offsets gets
 * count + 1 entries, string i is bytes[offsets[i] + 8 .. offsets[i + 1]).
 * -EBADMSG when the strings don't fit into `length` bytes. */
int ld_gguf_strings(const uint8_t *bytes, uint64_t length, uint64_t offset, uint64_t count,
                    uint64_t *offsets);

/* --- Validation of tensor data (rows.c) ------------------------------------ */
/* Bytes of `data` hold whole blocks of the ggml type. Returns 1 and the index
 * of the first block with a NaN or infinite value or scale, 0 when there is
 * none, -EOPNOTSUPP for a type without a rule, -EINVAL for a broken block. */
int ld_rows_check(uint32_t type, const uint8_t *data, uint64_t length, uint64_t *block);

/* --- Queues (queue.c, method_*.c) ------------------------------------------- */
enum ld_operation {
    LD_OP_READ = 1, /* of a file, positional, as ld_file_pread */
    LD_OP_POPULATE, /* fresh memory: gives it its pages */
    LD_OP_PREFETCH, /* of a mapping, as ld_map_prefetch */
    LD_OP_CHECK     /* tensor data, as ld_rows_check */
};

struct ld_request {
    int32_t operation;
    uint32_t type;               /* CHECK: the ggml type; PREFETCH: whether exact */
    ld_file *file;               /* READ; stays open until the queue is drained */
    const ld_memory *map;        /* PREFETCH; likewise */
    void *address;
    uint64_t room;               /* READ */
    uint64_t length;             /* bytes; for READ inside the file */
    uint64_t offset;             /* READ, PREFETCH */
    uint64_t tag;                /* the caller's own */
    struct ld_transfer transfer; /* READ: its flags go in, its counts come out */
    /* READ: -errno, or bytes; fewer than length when a signal came: the rest is
     * to be asked for again. CHECK: as ld_rows_check. POPULATE and
     * PREFETCH: 0 or -errno. */
    int64_t result;
    uint64_t block;              /* CHECK */
};

enum ld_method_id {
    LD_METHOD_SYNC = 1, /* one after the other, while the user waits */
    LD_METHOD_THREADS,
    LD_METHOD_URING
};

typedef struct ld_queue ld_queue;

/* Room for `capacity` requests. workers: threads for what the method doesn't do
 * itself; at least 1 for THREADS and URING, none for SYNC. A method that can't
 * be had gives -errno. A queue is for one thread. */
int ld_queue_open(int method, uint32_t capacity, uint32_t workers, ld_queue **out);
/* -EAGAIN when `capacity` requests are neither done nor fetched. */
int ld_queue_submit(ld_queue *queue, const struct ld_request *request);
/* Fetches a request that is done: 1; 0 after that many milliseconds without
 * one; -EINTR when a signal came. */
int ld_queue_wait(ld_queue *queue, int milliseconds, struct ld_request *out);
/* Waits for what is under way, drops the rest and closes. */
void ld_queue_close(ld_queue *queue);
