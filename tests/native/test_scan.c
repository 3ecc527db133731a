/* Headers that are cut, changed and random: whatever they hold, a scan ends, with
 * no byte touched outside the buffer (each is an allocation of just its size). */
#include "../../_native/ld_internal.h"
#include "check.h"

#include <errno.h>
#include <string.h>

static const struct ld_gguf_type types[] = {{1, 4}, {1, 2}, {32, 18}};

enum { N_TYPES = sizeof types / sizeof types[0] };

struct bytes {
    uint8_t data[4096];
    size_t length;
};

static void put(struct bytes *out, uint64_t value, int n)
{
    for (int i = 0; i < n; i++)
        out->data[out->length++] = (uint8_t)(value >> (8 * i));
}

static void put_text(struct bytes *out, const char *text)
{
    put(out, strlen(text), 8);
    memcpy(out->data + out->length, text, strlen(text));
    out->length += strlen(text);
}

/* Two keys (a number, an array of strings) and two tensors. */
static struct bytes good_header(void)
{
    struct bytes out = {.length = 0};
    memcpy(out.data, "GGUF", 4);
    out.length = 4;
    put(&out, 3, 4);
    put(&out, 2, 8);
    put(&out, 2, 8);
    put_text(&out, "number");
    put(&out, 4, 4);
    put(&out, 7, 4);
    put_text(&out, "strings");
    put(&out, 9, 4);
    put(&out, 8, 4);
    put(&out, 2, 8);
    put_text(&out, "one");
    put_text(&out, "two");
    for (uint64_t i = 0; i < 2; i++) {
        put_text(&out, i == 0 ? "first" : "second");
        put(&out, 2, 4);
        put(&out, 32, 8);
        put(&out, 3, 8);
        put(&out, 2 * i, 4);
        put(&out, 512 * i, 8);
    }
    return out;
}

static int scan_all(const uint8_t *data, size_t length, uint64_t file_size, struct ld_gguf **out)
{
    uint8_t *copy = malloc(length + (length == 0));
    CHECK(copy != NULL);
    memcpy(copy, data, length);
    CHECK(ld_gguf_open(file_size, out) == 0);
    int status = ld_gguf_scan(*out, copy, length, types, N_TYPES);
    free(copy);
    return status;
}

static void test_good(void)
{
    struct bytes header = good_header();
    struct ld_gguf *scan;
    CHECK(scan_all(header.data, header.length, header.length, &scan) == LD_GGUF_DONE);
    CHECK(scan->position == header.length && scan->version == 3);
    CHECK(scan->keys_length == 2 && scan->tensors_length == 2);
    CHECK(scan->keys[1].count == 2 && scan->keys[1].element_type == 8);
    CHECK(scan->tensors[0].nbytes == 32 * 3 * 4 && scan->tensors[1].nbytes == 3 * 18);
    uint64_t offsets[3];
    CHECK(ld_gguf_strings(header.data, header.length, scan->keys[1].value_offset, 2, offsets) == 0);
    CHECK(memcmp(header.data + offsets[1] + 8, "two", 3) == 0);
    CHECK(ld_gguf_strings(header.data, header.length, header.length - 7, 1, offsets) == -EBADMSG);
    CHECK(ld_gguf_strings(header.data, 20, 4, 1, offsets) == -EBADMSG);
    ld_gguf_close(scan);
    ld_gguf_close(NULL);
}

/* Whatever the pieces in which it comes, the tables are the same. */
static void test_pieces(void)
{
    struct bytes header = good_header();
    for (size_t piece = 1; piece < header.length; piece++) {
        struct ld_gguf *scan;
        CHECK(ld_gguf_open(header.length, &scan) == 0);
        size_t have = 0;
        int status = LD_GGUF_MORE;
        while (status == LD_GGUF_MORE) {
            have = (size_t)ld_min(have + piece, header.length);
            uint8_t *copy = malloc(have);
            CHECK(copy != NULL);
            memcpy(copy, header.data, have);
            status = ld_gguf_scan(scan, copy, have, types, N_TYPES);
            CHECK(status != LD_GGUF_MORE || scan->needed > have);
            free(copy);
        }
        CHECK(status == LD_GGUF_DONE && scan->keys_length == 2 && scan->tensors_length == 2);
        CHECK(scan->tensors[1].data_offset == 512 && scan->tensors[1].dims[1] == 3);
        ld_gguf_close(scan);
    }
}

static void test_truncated(void)
{
    struct bytes header = good_header();
    for (size_t length = 0; length < header.length; length++) {
        struct ld_gguf *scan;
        CHECK(scan_all(header.data, length, length, &scan) == -EBADMSG);
        CHECK(scan->problem.code == LD_GGUF_TRUNCATED ||
              scan->problem.code == LD_GGUF_TOO_MANY_TENSORS ||
              scan->problem.code == LD_GGUF_TOO_MANY_KEYS ||
              scan->problem.code == LD_GGUF_ARRAY_TOO_LONG);
        CHECK(scan->problem.offset <= length);
        ld_gguf_close(scan);
    }
}

/* Bytes changed at random, among them to the values that break arithmetic. */
static void test_changed(void)
{
    static const uint64_t wild[] = {0, 1, 8, 9, 0x7fffffff, 0xffffffff, INT64_MAX, UINT64_MAX,
                                    1ull << 63, 1ull << 61, UINT64_MAX - 7};
    uint64_t state = 11;
    for (int i = 0; i < 200000; i++) {
        struct bytes header = good_header();
        for (uint64_t n = 1 + next_random(&state) % 4; n > 0; n--) {
            size_t at = next_random(&state) % header.length;
            uint64_t value = wild[next_random(&state) % (sizeof wild / sizeof wild[0])];
            if (next_random(&state) % 2)
                value = next_random(&state);
            size_t most = (size_t)ld_min(1 + next_random(&state) % 8, header.length - at);
            memcpy(header.data + at, &value, most);
        }
        uint64_t file_size = next_random(&state) % 3 == 0 ? UINT64_MAX >> 1 : header.length;
        struct ld_gguf *scan;
        int status = scan_all(header.data, header.length, file_size, &scan);
        CHECK(status == LD_GGUF_DONE || status == LD_GGUF_MORE || status == -EBADMSG);
        CHECK(status != LD_GGUF_MORE || scan->needed > header.length);
        CHECK(scan->position <= header.length);
        for (uint64_t t = 0; t < scan->tensors_length; t++)
            CHECK(scan->tensors[t].nbytes <= INT64_MAX);
        ld_gguf_close(scan);
    }
}

static void test_no_memory(void)
{
    struct bytes header = good_header();
    for (uint64_t nth = 1; nth <= 3; nth++) {
        struct ld_gguf *scan;
        ld_fault_clear();
        CHECK(ld_fault_add(LD_CALL_ALLOC, nth, 1, ENOMEM, 0) == 0);
        int status = ld_gguf_open(header.length, &scan);
        if (nth == 1) {
            CHECK(status == -ENOMEM && scan == NULL);
            continue;
        }
        CHECK(ld_gguf_scan(scan, header.data, header.length, types, N_TYPES) == -ENOMEM);
        CHECK(ld_gguf_scan(scan, header.data, header.length, types, N_TYPES) == LD_GGUF_DONE);
        ld_gguf_close(scan);
    }
    ld_fault_clear();
}

static void test_rows(void)
{
    uint64_t state = 13, block;
    for (uint32_t type = 0; type < 64; type++) {
        for (size_t length = 0; length < 600; length++) {
            uint8_t *data = malloc(length + (length == 0));
            CHECK(data != NULL);
            for (size_t i = 0; i < length; i++)
                data[i] = (uint8_t)next_random(&state);
            int found = ld_rows_check(type, data, length, &block);
            CHECK(found == 0 || found == 1 || found == -EINVAL || found == -EOPNOTSUPP);
            free(data);
        }
    }
}

int main(void)
{
    test_good();
    test_pieces();
    test_truncated();
    test_changed();
    test_no_memory();
    test_rows();
    return 0;
}
