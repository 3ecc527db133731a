/* Validation of tensor data: no value and no block scale may be NaN or
 * infinite, since one of them spoils every result it takes part in.
 *
 * Each ggml type has a list of the numbers in its block that have to be finite.
 * For the plain types that is the value itself. For the block types it is the
 * scales (and minima) of the block; the quantised values are integers and can't
 * be wrong. The layouts are those of ggml (ggml-common.h), the rules those of
 * ggml_validate_row_data (ggml-quants.c). Types of integers have no rule. */
#include "ld_internal.h"

#include <errno.h>

enum number {
    NONE = 0,
    HALF,        /* IEEE binary16 */
    BRAIN,       /* bfloat16 */
    FLOAT,       /* IEEE binary32 */
    DOUBLE,      /* IEEE binary64 */
    EXPONENT,    /* E8M0, where 0xff is NaN */
    SPREAD_HALF, /* IQ1_M: a binary16 in the top four bits of four 16-bit words */
};

struct layout {
    uint32_t block_bytes; /* 0: no such type */
    struct {
        uint32_t offset;
        enum number number;
    } scales[2];
};

#define ONE(bytes, offset, number) {(bytes), {{(offset), (number)}, {0, NONE}}}
#define TWO(bytes, first, second) {(bytes), {{(first), HALF}, {(second), HALF}}}
#define FREE(bytes) {(bytes), {{0, NONE}, {0, NONE}}}

static const struct layout layouts[] = {
    [0] = ONE(4, 0, FLOAT),          /* F32 */
    [1] = ONE(2, 0, HALF),           /* F16 */
    [2] = ONE(18, 0, HALF),          /* Q4_0 */
    [3] = TWO(20, 0, 2),             /* Q4_1 */
    [6] = ONE(22, 0, HALF),          /* Q5_0 */
    [7] = TWO(24, 0, 2),             /* Q5_1 */
    [8] = ONE(34, 0, HALF),          /* Q8_0 */
    [10] = TWO(84, 80, 82),          /* Q2_K */
    [11] = ONE(110, 108, HALF),      /* Q3_K */
    [12] = TWO(144, 0, 2),           /* Q4_K */
    [13] = TWO(176, 0, 2),           /* Q5_K */
    [14] = ONE(210, 208, HALF),      /* Q6_K */
    [15] = ONE(292, 0, FLOAT),       /* Q8_K */
    [16] = ONE(66, 0, HALF),         /* IQ2_XXS */
    [17] = ONE(74, 0, HALF),         /* IQ2_XS */
    [18] = ONE(98, 0, HALF),         /* IQ3_XXS */
    [19] = ONE(50, 0, HALF),         /* IQ1_S */
    [20] = ONE(18, 0, HALF),         /* IQ4_NL */
    [21] = ONE(110, 0, HALF),        /* IQ3_S */
    [22] = ONE(82, 0, HALF),         /* IQ2_S */
    [23] = ONE(136, 0, HALF),        /* IQ4_XS */
    [24] = FREE(1),                  /* I8 */
    [25] = FREE(2),                  /* I16 */
    [26] = FREE(4),                  /* I32 */
    [27] = FREE(8),                  /* I64 */
    [28] = ONE(8, 0, DOUBLE),        /* F64 */
    [29] = ONE(56, 48, SPREAD_HALF), /* IQ1_M */
    [30] = ONE(2, 0, BRAIN),         /* BF16 */
    [34] = ONE(54, 52, HALF),        /* TQ1_0 */
    [35] = ONE(66, 64, HALF),        /* TQ2_0 */
    [39] = ONE(17, 0, EXPONENT),     /* MXFP4 */
    [40] = FREE(36),                 /* NVFP4: ggml decodes every byte of its scales */
    [41] = ONE(18, 0, HALF),         /* Q1_0 */
    [42] = ONE(18, 0, HALF),         /* Q2_0 */
};

enum { N_LAYOUTS = sizeof layouts / sizeof layouts[0] };

static uint32_t word(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8;
}

/* A number is NaN or infinite when all bits of its exponent are set. */
static bool all_set(uint32_t bits, uint32_t exponent)
{
    return (bits & exponent) == exponent;
}

static bool is_finite(const uint8_t *at, enum number number)
{
    switch (number) {
    case NONE:
        return true;
    case HALF:
        return !all_set(word(at), 0x7c00);
    case BRAIN:
        return !all_set(word(at), 0x7f80);
    case FLOAT:
        return !all_set(word(at + 2), 0x7f80);
    case DOUBLE:
        return !all_set(word(at + 6), 0x7ff0);
    case EXPONENT:
        return *at != 0xff;
    case SPREAD_HALF:
        /* Bits 4-7 of the half come from word 1, 8-11 from word 2, 12-15 from
         * word 3; its exponent is bits 10-14. */
        return !all_set((word(at + 6) & 0xf000) | ((word(at + 4) >> 4) & 0x0f00), 0x7c00);
    }
    return false;
}

int ld_rows_check(uint32_t type, const uint8_t *data, uint64_t length, uint64_t *block)
{
    if (type >= N_LAYOUTS || layouts[type].block_bytes == 0)
        return -EOPNOTSUPP;
    const struct layout *layout = &layouts[type];
    if (length % layout->block_bytes != 0)
        return -EINVAL;
    if (layout->scales[0].number == NONE)
        return 0;
    uint64_t n = length / layout->block_bytes;
    for (uint64_t i = 0; i < n; i++, data += layout->block_bytes) {
        if (!is_finite(data + layout->scales[0].offset, layout->scales[0].number) ||
            !is_finite(data + layout->scales[1].offset, layout->scales[1].number)) {
            *block = i;
            return 1;
        }
    }
    return 0;
}
