/* A mutation for text with numbers in it, which libFuzzer uses besides its own: they rarely make one valid number of
 * another, and never change all places at once that must agree. To be included by a target's only file. */
#ifndef TB_TESTS_FUZZ_NUMBERS_H
#define TB_TESTS_FUZZ_NUMBERS_H

#include "fuzz.h"

#include <ctype.h>
#include <inttypes.h>

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);

typedef struct number {
    const uint8_t *digits;
    size_t length;
} number;

/* The next run of digits at or after `at`; its length is 0 if there is none before `end`. */
static inline number next_number(const uint8_t *at, const uint8_t *end) {
    while (at < end && !isdigit(*at))
        at++;
    number n = {at, 0};
    while (at + n.length < end && isdigit(at[n.length]))
        n.length++;
    return n;
}

static inline bool same_number(number a, number b) {
    return a.length == b.length && memcmp(a.digits, b.digits, a.length) == 0;
}

static inline unsigned roll(unsigned *dice, unsigned sides) {
    *dice = *dice * 1664525 + 1013904223;
    return (*dice >> 16) % sides;
}

static inline number pick_number(const uint8_t *text, size_t size, unsigned *dice) {
    unsigned count = 0;
    number n = next_number(text, text + size);
    for (number i = n; i.length; i = next_number(i.digits + i.length, text + size))
        count++;
    for (unsigned skip = count ? roll(dice, count) : 0; skip; skip--)
        n = next_number(n.digits + n.length, text + size);
    return n;
}

/* Another value: near the old one, small, or at a limit. */
static inline uint64_t pick_value(uint64_t old, unsigned *dice) {
    static const uint64_t limits[] = {1 << 12,           1 << 18,           1 << 20,           1 << 24,
                                      UINT64_C(1) << 32, UINT64_C(1) << 61, UINT64_C(1) << 62, INT64_MAX};
    switch (roll(dice, 6)) {
    case 0:
        return old + 1;
    case 1:
        return old ? old - 1 : 0;
    case 2:
        return old * (2 + roll(dice, 3));
    case 3:
        return old / (2 + roll(dice, 3));
    case 4:
        return limits[roll(dice, sizeof limits / sizeof *limits)] - roll(dice, 2);
    default:
        return roll(dice, 10);
    }
}

/* Copies the text with `new` in the place of `old`, or of every number like it; returns the size, 0 if it has no room.
 */
static inline size_t replace_number(const uint8_t *text, size_t size, number old, number new, bool all, uint8_t *out,
                                    size_t max_size) {
    size_t n = 0;
    for (const uint8_t *from = text, *end = text + size; from < end;) {
        number i = next_number(from, end);
        number put = i.digits == old.digits || (all && same_number(i, old)) ? new : i;
        size_t before = (size_t)(i.digits - from);
        if (before + put.length > max_size - n)
            return 0;
        memcpy(out + n, from, before);
        memcpy(out + n + before, put.digits, put.length);
        n += before + put.length;
        from = i.digits + i.length;
    }
    return n;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    unsigned dice = seed;
    uint8_t *text = (uint8_t *)fuzz_string(data, size);
    number old = pick_number(text, size, &dice);
    if (old.length == 0 || roll(&dice, 2) == 0) {
        free(text);
        return LLVMFuzzerMutate(data, size, max_size);
    }
    char value[24];
    number new = pick_number(text, size, &dice);
    if (roll(&dice, 8)) {
        snprintf(value, sizeof value, "%" PRIu64, pick_value(strtoull((const char *)old.digits, NULL, 10), &dice));
        new = (number){(const uint8_t *)value, strlen(value)};
    }
    size = replace_number(text, size, old, new, roll(&dice, 2), data, max_size);
    free(text);
    return size;
}

#endif
