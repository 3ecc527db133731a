/* The scan of a header under libFuzzer: any bytes, in one piece and in several.
 * Each piece is an allocation of just its size, so that a byte touched outside
 * of it is found. Beside not crashing, a scan must keep its promises: what it
 * says lies inside the bytes, and is the same in whatever pieces they came.
 *
 * The first byte of an input says how it is cut, and whether the file claims to
 * be larger than the bytes; the rest is the file. See tests/fuzz.py. */
#include "../../_native/ld_internal.h"
#include "check.h"

#include <errno.h>
#include <string.h>

/* Ids with blocks of 1 and of many elements, and one that is unknown. */
static const struct ld_gguf_type types[] = {
    {1, 4}, {1, 2}, {32, 18}, {0, 0}, {256, 210}, {1, 8}, {64, 36},
};

enum { N_TYPES = sizeof types / sizeof types[0], TYPE_STRING = 8, TYPE_ARRAY = 9 };

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);

static int scan_piece(struct ld_gguf *scan, const uint8_t *data, size_t length)
{
    uint8_t *copy = malloc(length + (length == 0));
    CHECK(copy != NULL);
    if (length != 0)
        memcpy(copy, data, length);
    int status = ld_gguf_scan(scan, copy, length, types, N_TYPES);
    free(copy);
    return status;
}

/* Scans the first piece, then as much more as the scan asks for, or a piece. */
static int scan_in_pieces(struct ld_gguf *scan, const uint8_t *data, size_t size, size_t piece)
{
    size_t have = piece < size ? piece : size;
    int status = scan_piece(scan, data, have);
    while (status == LD_GGUF_MORE && have < size) {
        CHECK(scan->needed > have && scan->needed <= scan->file_size);
        size_t wanted = (size_t)ld_min(scan->needed, size);
        have = wanted > have + piece ? wanted : (size_t)ld_min(have + piece, size);
        status = scan_piece(scan, data, have);
    }
    return status;
}

static void check_keys(const struct ld_gguf *scan, const uint8_t *data, size_t size)
{
    for (uint64_t i = 0; i < scan->keys_length; i++) {
        const struct ld_gguf_key *key = &scan->keys[i];
        CHECK(key->name_length > 0 && key->name_offset + key->name_length <= scan->position);
        CHECK(key->value_offset + key->value_length <= scan->position);
        if (key->type != TYPE_ARRAY || key->element_type != TYPE_STRING)
            continue;
        uint64_t *offsets = malloc((size_t)(key->count + 1) * sizeof *offsets);
        CHECK(offsets != NULL);
        CHECK(ld_gguf_strings(data, size, key->value_offset, key->count, offsets) == 0);
        CHECK(offsets[key->count] == key->value_offset + key->value_length);
        free(offsets);
    }
}

static void check_tensors(const struct ld_gguf *scan)
{
    for (uint64_t i = 0; i < scan->tensors_length; i++) {
        const struct ld_gguf_tensor *tensor = &scan->tensors[i];
        CHECK(tensor->name_offset + tensor->name_length <= scan->position);
        CHECK(tensor->n_dims <= 8 && tensor->nbytes <= INT64_MAX);
        CHECK(!tensor->empty || tensor->nbytes == 0);
        CHECK(tensor->known || tensor->nbytes == 0);
    }
}

static void check_same(const struct ld_gguf *a, const struct ld_gguf *b)
{
    CHECK(a->position == b->position);
    CHECK(a->keys_length == b->keys_length && a->tensors_length == b->tensors_length);
    CHECK(a->keys_length == 0 ||
          memcmp(a->keys, b->keys, (size_t)a->keys_length * sizeof *a->keys) == 0);
    CHECK(a->tensors_length == 0 ||
          memcmp(a->tensors, b->tensors, (size_t)a->tensors_length * sizeof *a->tensors) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
    if (size == 0)
        return 0;
    uint8_t how = input[0];
    const uint8_t *data = input + 1;
    size -= 1;
    uint64_t file_size = how & 0x80 ? (uint64_t)INT64_MAX : size;
    size_t piece = 1 + (size_t)(how & 0x7f) * (1 + size / 128);

    struct ld_gguf *whole, *pieces;
    CHECK(ld_gguf_open(file_size, &whole) == 0 && ld_gguf_open(file_size, &pieces) == 0);
    int status = scan_piece(whole, data, size);
    CHECK(status == LD_GGUF_DONE || status == LD_GGUF_MORE || status == -EBADMSG);
    CHECK(status != LD_GGUF_MORE || (file_size > size && whole->needed > size));
    CHECK(status != -EBADMSG || whole->problem.offset <= size);
    CHECK(whole->position <= size);
    check_keys(whole, data, size);
    check_tensors(whole);

    CHECK(scan_in_pieces(pieces, data, size, piece) == status);
    check_same(whole, pieces);
    if (status == -EBADMSG)
        CHECK(memcmp(&whole->problem, &pieces->problem, sizeof whole->problem) == 0);
    ld_gguf_close(whole);
    ld_gguf_close(pieces);
    return 0;
}
