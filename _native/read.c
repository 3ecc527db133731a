/* Reading: any range of a file, through aligned direct reads where they are
 * possible, and buffered from the byte where they stop being possible.
 *
 * A read is a span: the file's bytes [offset, offset + length) go to a
 * destination, and `done` of them are there. Each step moves `done` on by one
 * system call:
 *
 *   straight   offset and destination are both aligned: the device writes whole
 *              blocks where they belong. The last block may go over the span's
 *              end if the destination has room for it.
 *   bounced    anything else: whole blocks go to a bounce buffer and the wanted
 *              bytes are copied. Where destination and offset are congruent,
 *              only the odd edges go this way.
 *   buffered   direct reads are off: for the file (EINVAL, EOPNOTSUPP), for
 *              this user of it (EFAULT: its memory is no DMA target), or from
 *              the beginning.
 *
 * A step that fails in a way that says "not directly" switches direct reads off
 * and the next step goes on, buffered, at the same byte. */
#include "ld_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BOUNCE_BYTES = 1 << 20 };

struct span {
    struct ld_file *file;
    struct ld_transfer *transfer;
    uint8_t *destination;
    uint64_t room;
    uint64_t length;
    uint64_t offset;
    uint64_t done;
    bool cursor;      /* buffered reads go through the stream */
    uint8_t *bounce;
    uint64_t bounce_size;
};

static uint64_t remaining(const struct span *span)
{
    return span->length - span->done;
}

static uint64_t at(const struct span *span)
{
    return span->offset + span->done;
}

static bool direct_is_on(const struct span *span)
{
    const struct ld_file *file = span->file;
    return file->direct_fd >= 0 && atomic_load(&file->direct_errno) == 0 &&
           span->transfer->fallback_errno == 0 && !span->transfer->buffered_only;
}

/* Whether `error` of a direct read means that reading can go on without it.
 * How long that lasts: EFAULT for this transfer, the others for the file. */
static int switch_direct_off(struct span *span, int error)
{
    if (error != -EFAULT && error != -EINVAL && error != -EOPNOTSUPP)
        return error;
    if (span->transfer->direct_required)
        return error;
    if (error != -EFAULT)
        atomic_store(&span->file->direct_errno, -error);
    span->transfer->fallback_errno = -error;
    span->transfer->fallback_offset = at(span);
    return 0;
}

static ssize_t direct_read(struct span *span, void *buffer, uint64_t length, uint64_t offset)
{
    ssize_t got = ld_pread_retrying(true, span->file->direct_fd, buffer, length, offset);
    if (got > 0)
        span->transfer->bytes_direct += (uint64_t)got;
    return got;
}

/* The stream of the cursor's buffered reads. It keeps its position here and not
 * in the kernel, where a forked process would share it. */
static ssize_t cookie_read(void *cookie, char *buffer, size_t length)
{
    struct ld_file *file = cookie;
    int fd = ld_file_buffered_fd(file);
    ssize_t got = fd < 0 ? fd : ld_pread_retrying(false, fd, buffer, length, file->cookie_position);
    if (got < 0) {
        errno = (int)-got;
        return -1;
    }
    file->cookie_position += (uint64_t)got;
    return got;
}

static int cookie_seek(void *cookie, off64_t *offset, int whence)
{
    struct ld_file *file = cookie;
    if (whence == SEEK_CUR)
        *offset += (off64_t)file->cookie_position;
    else if (whence != SEEK_SET)
        return -1; /* nothing here seeks from the end */
    file->cookie_position = (uint64_t)*offset;
    return 0;
}

static int open_stream(struct ld_file *file)
{
    cookie_io_functions_t functions = {.read = cookie_read, .seek = cookie_seek};
    file->stream = ld_sys()->fopencookie(file, functions);
    file->stream_position = UINT64_MAX;
    return file->stream == NULL ? -errno : 0;
}

/* One fread at `offset`; a count or -errno. */
static ssize_t stream_read(struct ld_file *file, void *buffer, size_t length, uint64_t offset)
{
    int error = file->stream != NULL ? 0 : open_stream(file);
    if (error != 0)
        return error;
    if (file->stream_position != offset && ld_sys()->fseek(file->stream, (off_t)offset) != 0)
        return -errno;
    errno = 0;
    size_t got = ld_sys()->fread(buffer, length, file->stream);
    error = got < length ? -errno : 0; /* 0 at the end of the file */
    clearerr(file->stream);
    /* After an error the stream's position is anybody's guess: seek again. */
    file->stream_position = error == 0 ? offset + got : UINT64_MAX;
    return got != 0 ? (ssize_t)got : error;
}

/* Up to `most` bytes, buffered. */
static int step_buffered(struct span *span, uint64_t most)
{
    uint64_t n = ld_min(ld_min(remaining(span), most), LD_RW_MAX);
    uint8_t *to = span->destination + span->done;
    ssize_t got;
    if (span->cursor) {
        got = stream_read(span->file, to, n, at(span));
    } else {
        int fd = ld_file_buffered_fd(span->file);
        got = fd < 0 ? fd : ld_pread_retrying(false, fd, to, n, at(span));
    }
    if (got < 0)
        return (int)got;
    if (got == 0)
        return -ENODATA;
    span->transfer->bytes_buffered += (uint64_t)got;
    span->done += (uint64_t)got;
    return 0;
}

static bool is_aligned(const void *address, uint64_t alignment)
{
    return ((uintptr_t)address & (alignment - 1)) == 0;
}

/* How many bytes a straight read may ask for here; 0: none. */
static uint64_t straight_length(const struct span *span)
{
    uint64_t block = span->file->offset_alignment;
    if ((at(span) & (block - 1)) != 0 ||
        !is_aligned(span->destination + span->done, span->file->memory_alignment))
        return 0;
    uint64_t most = ld_align_down(LD_RW_MAX, block);
    if (remaining(span) >= most)
        return most;
    uint64_t whole = ld_align_up(remaining(span), block);
    return whole <= span->room - span->done ? whole : ld_align_down(remaining(span), block);
}

static int step_straight(struct span *span, uint64_t n)
{
    ssize_t got = direct_read(span, span->destination + span->done, n, at(span));
    if (got < 0)
        return switch_direct_off(span, (int)got);
    if (got == 0)
        return -ENODATA;
    span->done += ld_min((uint64_t)got, remaining(span));
    return 0;
}

/* A bounce buffer for the rest of the span, never larger than BOUNCE_BYTES (or
 * one block). */
static int need_bounce(struct span *span, uint64_t size)
{
    if (span->bounce_size >= size)
        return 0;
    uint64_t alignment = span->file->memory_alignment;
    if (alignment < sizeof(void *))
        alignment = sizeof(void *);
    free(span->bounce);
    span->bounce_size = 0;
    span->bounce = ld_sys()->aligned_alloc(alignment, ld_align_up(size, alignment));
    if (span->bounce == NULL)
        return -ENOMEM;
    span->bounce_size = size;
    return 0;
}

static int step_bounced(struct span *span)
{
    uint64_t block = span->file->offset_alignment;
    uint64_t start = ld_align_down(at(span), block), head = at(span) - start;
    uint64_t n = block;
    if (!is_aligned((uint8_t *)((uintptr_t)span->destination + span->done - head),
                    span->file->memory_alignment)) {
        /* Not congruent: the rest has to go this way, as much at a time as fits. */
        uint64_t most = block > BOUNCE_BYTES ? block : BOUNCE_BYTES;
        n = remaining(span) >= most ? most : ld_min(ld_align_up(head + remaining(span), block), most);
    }
    int error = need_bounce(span, n);
    if (error != 0)
        return error;
    ssize_t got = direct_read(span, span->bounce, n, start);
    if (got < 0)
        return switch_direct_off(span, (int)got);
    if ((uint64_t)got <= head) {
        /* Not even the block that holds our byte. At the end of the file it is
         * gone; else the file system gives odd pieces that we could get for
         * ever, and one buffered read brings us past this block. */
        error = got == 0 ? -ENODATA : ld_file_check_size(span->file);
        if (error != 0)
            return error;
        return span->transfer->direct_required ? -EOPNOTSUPP : step_buffered(span, block - head);
    }
    uint64_t wanted = ld_min((uint64_t)got - head, remaining(span));
    memcpy(span->destination + span->done, span->bounce + head, wanted);
    span->transfer->bytes_bounced += wanted;
    span->done += wanted;
    return 0;
}

/* One more step while direct reads are off. If another user of the file found
 * that out, this one has a fallback all the same. */
static int step_without_direct(struct span *span)
{
    struct ld_transfer *transfer = span->transfer;
    int known = atomic_load(&span->file->direct_errno);
    if (transfer->direct_required)
        return known != 0 ? -known : -EOPNOTSUPP;
    if (span->file->direct_fd >= 0 && !transfer->buffered_only && transfer->fallback_errno == 0) {
        transfer->fallback_errno = known;
        transfer->fallback_offset = at(span);
    }
    return step_buffered(span, UINT64_MAX);
}

static int step(struct span *span)
{
    if (!direct_is_on(span))
        return step_without_direct(span);
    uint64_t n = straight_length(span);
    return n != 0 ? step_straight(span, n) : step_bounced(span);
}

/* Steps until the span is read. A signal ends it early, so that the caller can
 * look at it. */
static int64_t run(struct span *span)
{
    int error = 0;
    while (error == 0 && span->done < span->length)
        error = step(span);
    free(span->bounce);
    span->transfer->stop_offset = at(span);
    if (error == -EINTR && span->done != 0)
        error = 0;
    return error != 0 ? error : (int64_t)span->done;
}

uint64_t ld_file_straight(const struct ld_file *file, const struct ld_request *request)
{
    struct ld_transfer transfer = request->transfer;
    uint64_t done = (uint64_t)request->result;
    struct span span = {
        .file = (struct ld_file *)file,
        .transfer = &transfer,
        .destination = request->address,
        .room = request->room,
        .length = request->length,
        .offset = request->offset,
        .done = done,
    };
    if (!direct_is_on(&span))
        return 0;
    uint64_t n = straight_length(&span);
    return n >= request->length - done ? n : 0;
}

int64_t ld_file_pread(ld_file *file, void *destination, uint64_t room, uint64_t length,
                      uint64_t offset, struct ld_transfer *transfer)
{
    if (room < length)
        return -EINVAL;
    if (offset >= file->size)
        return 0;
    struct span span = {
        .file = file,
        .transfer = transfer,
        .destination = destination,
        .room = room,
        .length = ld_min(length, file->size - offset),
        .offset = offset,
    };
    return run(&span);
}

int64_t ld_file_read(ld_file *file, void *destination, uint64_t length)
{
    if (file->position >= file->size)
        return 0;
    struct span span = {
        .file = file,
        .transfer = &file->cursor,
        .destination = destination,
        .room = length,
        .length = ld_min(length, file->size - file->position),
        .offset = file->position,
        .cursor = true,
    };
    int64_t got = run(&span);
    atomic_store(&file->cursor_errno, file->cursor.fallback_errno);
    if (got > 0)
        file->position += (uint64_t)got;
    return got;
}

int64_t ld_file_seek(ld_file *file, int64_t offset, int whence)
{
    uint64_t base;
    switch (whence) {
    case SEEK_SET:
        base = 0;
        break;
    case SEEK_CUR:
        base = file->position;
        break;
    case SEEK_END:
        base = file->size;
        break;
    default:
        return -EINVAL;
    }
    int64_t target;
    if (__builtin_add_overflow((int64_t)base, offset, &target))
        return -EOVERFLOW;
    if (target < 0)
        return -EINVAL;
    file->position = (uint64_t)target;
    return target;
}

uint64_t ld_file_tell(const ld_file *file)
{
    return file->position;
}

void ld_file_cursor(const ld_file *file, struct ld_transfer *out)
{
    *out = file->cursor;
}
