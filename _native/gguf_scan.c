/* One pass over the header of a GGUF file, version 2 or 3, little-endian.
 *
 * The header is untrusted. Every length is held against the bytes that are left
 * in the file before anything is done with it; tables grow with the records
 * that were really there, never with a count that the header claims.
 *
 * The bytes may be only the first part of the file. A record that goes over
 * their end is left for the next call, which goes on at that record with more
 * bytes (LD_GGUF_MORE and `needed`). So a scan costs one pass plus the records
 * that were cut, and the caller can read a header in a few large reads without
 * knowing its size.
 *
 * Format: GGUF specification (ggml, docs/gguf.md). */
#include "ld_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
    FIXED_HEADER = 24,      /* magic, version, two counts */
    SMALLEST_KEY = 8 + 1 + 4 + 1,
    SMALLEST_TENSOR = 8 + 4 + 4 + 8,
    MOST_DIMS = 8,
    TYPE_STRING = 8,
    TYPE_ARRAY = 9,
    FIRST_TABLE = 64,       /* entries of a new table */
    MOST_RECORDS = 1 << 20  /* keys or tensors; a record costs memory many times its bytes */
};

/* Bytes of a value, by type id; 0: string or array. */
static const uint8_t value_sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

enum { N_VALUE_TYPES = sizeof value_sizes };

/* Where the scan of a record stands. */
struct reader {
    struct ld_gguf *scan;
    const uint8_t *bytes;
    uint64_t length;   /* of bytes */
    uint64_t position;
};

static int problem(struct reader *in, int code, uint64_t offset, uint64_t value, uint64_t limit)
{
    struct ld_gguf_problem *problem = &in->scan->problem;
    problem->code = code;
    problem->offset = offset;
    problem->value = value;
    problem->limit = limit;
    return -EBADMSG;
}

/* Makes sure that the next `n` bytes are in the file, and then, that they are
 * in memory: 0, LD_GGUF_MORE or -EBADMSG. */
static int need(struct reader *in, uint64_t n)
{
    uint64_t left = in->scan->file_size - in->position;
    if (n > left)
        return problem(in, LD_GGUF_TRUNCATED, in->position, n, left);
    if (n > in->length - in->position) {
        in->scan->needed = in->position + n;
        return LD_GGUF_MORE;
    }
    return 0;
}

static uint64_t little_endian(const uint8_t *bytes, int n)
{
    uint64_t value = 0;
    for (int i = 0; i < n; i++)
        value |= (uint64_t)bytes[i] << (8 * i);
    return value;
}

static int read_u32(struct reader *in, uint32_t *out)
{
    int status = need(in, 4);
    if (status == 0) {
        *out = (uint32_t)little_endian(in->bytes + in->position, 4);
        in->position += 4;
    }
    return status;
}

static int read_u64(struct reader *in, uint64_t *out)
{
    int status = need(in, 8);
    if (status == 0) {
        *out = little_endian(in->bytes + in->position, 8);
        in->position += 8;
    }
    return status;
}

static int read_string(struct reader *in, uint64_t *offset, uint64_t *length)
{
    int status = read_u64(in, length);
    if (status == 0)
        status = need(in, *length);
    if (status == 0) {
        *offset = in->position;
        in->position += *length;
    }
    return status;
}

/* A name becomes part of the message about whatever is wrong later in its
 * record. */
static int read_name(struct reader *in, uint64_t *offset, uint64_t *length)
{
    int status = read_string(in, offset, length);
    if (status == 0) {
        in->scan->problem.name_offset = *offset;
        in->scan->problem.name_length = *length;
    }
    return status;
}

static int skip_strings(struct reader *in, uint64_t count)
{
    int status = 0;
    uint64_t offset, length;
    for (uint64_t i = 0; status == 0 && i < count; i++)
        status = read_string(in, &offset, &length);
    return status;
}

static int read_array(struct reader *in, struct ld_gguf_key *key)
{
    uint64_t type_offset = in->position;
    int status = read_u32(in, &key->element_type);
    if (status != 0)
        return status;
    if (key->element_type == TYPE_ARRAY)
        return problem(in, LD_GGUF_NESTED_ARRAY, type_offset, TYPE_ARRAY, 0);
    if (key->element_type >= N_VALUE_TYPES)
        return problem(in, LD_GGUF_BAD_TYPE, type_offset, key->element_type, N_VALUE_TYPES - 1);

    uint64_t count_offset = in->position;
    status = read_u64(in, &key->count);
    if (status != 0)
        return status;
    uint64_t size = value_sizes[key->element_type];
    uint64_t most = (in->scan->file_size - in->position) / (size != 0 ? size : 8);
    if (key->count > most)
        return problem(in, LD_GGUF_ARRAY_TOO_LONG, count_offset, key->count, most);

    key->value_offset = in->position;
    if (size == 0) {
        status = skip_strings(in, key->count);
    } else {
        status = need(in, key->count * size);
        in->position += status == 0 ? key->count * size : 0;
    }
    key->value_length = in->position - key->value_offset;
    return status;
}

static int read_value(struct reader *in, struct ld_gguf_key *key)
{
    uint64_t type_offset = in->position;
    int status = read_u32(in, &key->type);
    if (status != 0)
        return status;
    if (key->type >= N_VALUE_TYPES)
        return problem(in, LD_GGUF_BAD_TYPE, type_offset, key->type, N_VALUE_TYPES - 1);
    if (key->type == TYPE_ARRAY)
        return read_array(in, key);

    key->element_type = key->type;
    key->count = 1;
    if (key->type == TYPE_STRING)
        return read_string(in, &key->value_offset, &key->value_length);
    key->value_offset = in->position;
    key->value_length = value_sizes[key->type];
    status = need(in, key->value_length);
    in->position += status == 0 ? key->value_length : 0;
    return status;
}

static int read_key(struct reader *in, struct ld_gguf_key *key)
{
    key->offset = in->position;
    int status = read_name(in, &key->name_offset, &key->name_length);
    if (status == 0 && key->name_length == 0)
        return problem(in, LD_GGUF_EMPTY_KEY, key->offset, 0, 0);
    return status == 0 ? read_value(in, key) : status;
}

/* The bytes of a tensor, checked: as numbers of 8 bytes, the largest there are,
 * its elements have to stay below 2^63. A dimension of zero makes a tensor
 * empty, but not its other dimensions harmless. */
static int measure(struct reader *in, struct ld_gguf_tensor *tensor, uint64_t dims_offset,
                   const struct ld_gguf_type *type)
{
    uint64_t elements = 1;
    for (uint32_t i = 0; i < tensor->n_dims; i++) {
        uint64_t dim = tensor->dims[i];
        tensor->empty |= dim == 0;
        if (dim > INT64_MAX || __builtin_mul_overflow(elements, dim != 0 ? dim : 1, &elements) ||
            elements > INT64_MAX / 8)
            return problem(in, LD_GGUF_SIZE_OVERFLOW, dims_offset + 8 * i, dim, 0);
    }
    if (type == NULL)
        return 0;
    tensor->known = 1;
    uint64_t row = tensor->dims[0];
    if (row % type->block_elements != 0)
        return problem(in, LD_GGUF_ROW_NOT_BLOCKS, dims_offset, row, type->block_elements);
    uint64_t blocks = (elements + type->block_elements - 1) / type->block_elements;
    if (__builtin_mul_overflow(blocks, type->block_bytes, &tensor->nbytes) ||
        tensor->nbytes > INT64_MAX)
        return problem(in, LD_GGUF_SIZE_OVERFLOW, dims_offset, elements, 0);
    if (tensor->empty)
        tensor->nbytes = 0;
    return 0;
}

static int read_tensor(struct reader *in, struct ld_gguf_tensor *tensor,
                       const struct ld_gguf_type *types, uint64_t types_length)
{
    tensor->offset = in->position;
    int status = read_name(in, &tensor->name_offset, &tensor->name_length);
    if (status == 0)
        status = read_u32(in, &tensor->n_dims);
    if (status != 0)
        return status;
    if (tensor->n_dims > MOST_DIMS)
        return problem(in, LD_GGUF_TOO_MANY_DIMS, in->position - 4, tensor->n_dims, MOST_DIMS);
    uint64_t dims_offset = in->position;
    for (uint32_t i = 0; i < MOST_DIMS; i++)
        tensor->dims[i] = 1;
    for (uint32_t i = 0; status == 0 && i < tensor->n_dims; i++)
        status = read_u64(in, &tensor->dims[i]);
    if (status == 0)
        status = read_u32(in, &tensor->type);
    if (status == 0)
        status = read_u64(in, &tensor->data_offset);
    if (status != 0)
        return status;
    bool known = tensor->type < types_length && types[tensor->type].block_elements != 0;
    return measure(in, tensor, dims_offset, known ? &types[tensor->type] : NULL);
}

/* Counts that can't be true, however small the records are, end the scan before
 * it begins. */
static int check_counts(struct reader *in)
{
    const struct ld_gguf *scan = in->scan;
    uint64_t left = scan->file_size - FIXED_HEADER;
    uint64_t tensors = ld_min(left / SMALLEST_TENSOR, MOST_RECORDS);
    uint64_t keys = ld_min(left / SMALLEST_KEY, MOST_RECORDS);
    if (scan->n_tensors > tensors)
        return problem(in, LD_GGUF_TOO_MANY_TENSORS, 8, scan->n_tensors, tensors);
    if (scan->n_keys > keys)
        return problem(in, LD_GGUF_TOO_MANY_KEYS, 16, scan->n_keys, keys);
    return 0;
}

static int read_fixed(struct reader *in)
{
    struct ld_gguf *scan = in->scan;
    int status = need(in, 4);
    if (status == 0 && memcmp(in->bytes, "GGUF", 4) != 0)
        return problem(in, LD_GGUF_BAD_MAGIC, 0, little_endian(in->bytes, 4), 0);
    if (status != 0)
        return status;
    in->position += 4;
    status = read_u32(in, &scan->version);
    if (status == 0 && scan->version != 2 && scan->version != 3)
        return problem(in, LD_GGUF_BAD_VERSION, 4, scan->version, 0);
    if (status == 0)
        status = read_u64(in, &scan->n_tensors);
    if (status == 0)
        status = read_u64(in, &scan->n_keys);
    if (status == 0)
        status = check_counts(in);
    return status;
}

/* A table with room for one more entry after its `length`; the table itself or
 * a larger one in its place. NULL when there is no memory; the table stays. */
static void *with_room(void *table, uint64_t length, size_t entry_size)
{
    bool full = length == 0 || (length >= FIRST_TABLE && (length & (length - 1)) == 0);
    if (!full)
        return table;
    uint64_t entries = length == 0 ? FIRST_TABLE : 2 * length;
    return entries <= SIZE_MAX / entry_size
               ? ld_sys()->realloc(table, (size_t)entries * entry_size)
               : NULL;
}

static int scan_keys(struct reader *in)
{
    struct ld_gguf *scan = in->scan;
    while (scan->keys_length < scan->n_keys) {
        scan->problem.index = (int64_t)scan->keys_length;
        scan->problem.name_length = 0;
        struct ld_gguf_key *keys =
            with_room(scan->keys, scan->keys_length, sizeof *scan->keys);
        if (keys == NULL)
            return -ENOMEM;
        scan->keys = keys;
        struct ld_gguf_key *key = &keys[scan->keys_length];
        *key = (struct ld_gguf_key){0};
        int status = read_key(in, key);
        if (status != 0)
            return status;
        scan->keys_length++;
        scan->position = in->position;
    }
    return 0;
}

static int scan_tensors(struct reader *in, const struct ld_gguf_type *types,
                        uint64_t types_length)
{
    struct ld_gguf *scan = in->scan;
    scan->problem.in_tensors = 1;
    while (scan->tensors_length < scan->n_tensors) {
        scan->problem.index = (int64_t)scan->tensors_length;
        scan->problem.name_length = 0;
        struct ld_gguf_tensor *tensors =
            with_room(scan->tensors, scan->tensors_length, sizeof *scan->tensors);
        if (tensors == NULL)
            return -ENOMEM;
        scan->tensors = tensors;
        struct ld_gguf_tensor *tensor = &tensors[scan->tensors_length];
        *tensor = (struct ld_gguf_tensor){0};
        int status = read_tensor(in, tensor, types, types_length);
        if (status != 0)
            return status;
        scan->tensors_length++;
        scan->position = in->position;
    }
    return 0;
}

int ld_gguf_scan(struct ld_gguf *scan, const uint8_t *bytes, uint64_t length,
                 const struct ld_gguf_type *types, uint64_t types_length)
{
    struct reader in = {.scan = scan, .bytes = bytes, .position = scan->position};
    in.length = ld_min(length, scan->file_size);
    if (in.length < in.position)
        return -EINVAL;
    int status = 0;
    if (scan->position == 0) {
        scan->problem.index = -1;
        status = read_fixed(&in);
        if (status == 0)
            scan->position = in.position;
    }
    if (status == 0)
        status = scan_keys(&in);
    if (status == 0)
        status = scan_tensors(&in, types, types_length);
    return status != 0 ? status : LD_GGUF_DONE;
}

int ld_gguf_open(uint64_t file_size, struct ld_gguf **out)
{
    *out = ld_sys()->realloc(NULL, sizeof **out);
    if (*out == NULL)
        return -ENOMEM;
    **out = (struct ld_gguf){.file_size = file_size};
    return 0;
}

void ld_gguf_close(struct ld_gguf *scan)
{
    if (scan == NULL)
        return;
    free(scan->keys);
    free(scan->tensors);
    free(scan);
}

int ld_gguf_strings(const uint8_t *bytes, uint64_t length, uint64_t offset, uint64_t count,
                    uint64_t *offsets)
{
    for (uint64_t i = 0; i < count; i++) {
        offsets[i] = offset;
        if (offset > length || length - offset < 8)
            return -EBADMSG;
        uint64_t text = little_endian(bytes + offset, 8);
        if (text > length - offset - 8)
            return -EBADMSG;
        offset += 8 + text;
    }
    offsets[count] = offset;
    return 0;
}
