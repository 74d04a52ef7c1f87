/* What the fuzz targets share. A check that fails ends the process with a sentence, and libFuzzer keeps the input. */
#ifndef TB_TESTS_FUZZ_H
#define TB_TESTS_FUZZ_H

#include "tensorbus/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define expect(claim) ((claim) ? (void)0 : fuzz_fail(__FILE__, __LINE__, #claim))

_Noreturn static inline void fuzz_fail(const char *file, int line, const char *claim) {
    fprintf(stderr, "%s:%d: not so: %s; the last failure: %s\n", file, line, claim, tb_error_detail());
    abort();
}

/* Whether it succeeded. Bad input is refused with a sentence, and is never the library's own fault. */
static inline bool succeeded(tb_status status) {
    if (status == TB_OK)
        return true;
    expect(status == TB_INVALID || status == TB_TOO_BIG || status == TB_REFUSED || status == TB_NO_MEMORY);
    expect(*tb_error_detail());
    return false;
}

/* A string of exactly these bytes, so that a read past its end is seen. */
static inline char *fuzz_string(const uint8_t *data, size_t size) {
    char *text = malloc(size + 1);
    expect(text);
    memcpy(text, data, size);
    text[size] = '\0';
    return text;
}

/* libFuzzer takes these for coverage: an input whose numbers are larger than any before is worth keeping. */
__attribute__((used, section("__libfuzzer_extra_counters"))) static uint8_t fuzz_magnitudes[8][64];

static inline void note_magnitude(int what, int64_t value) {
    fuzz_magnitudes[what][value > 0 ? 63 - __builtin_clzll((unsigned long long)value) : 0] = 1;
}

/* What is formatted parses back to an equal layout, and is formatted the same again. */
static inline void expect_text_form(const tb_layout *layout) {
    char *text, *again;
    tb_layout *back;
    expect(tb_layout_format(layout, &text) == TB_OK);
    expect(tb_layout_parse(text, &back) == TB_OK);
    expect(tb_layout_equal(layout, back) && tb_layout_equal(back, layout));
    expect(tb_layout_format(back, &again) == TB_OK);
    expect(strcmp(text, again) == 0);
    free(text);
    free(again);
    tb_layout_destroy(back);
}

#endif
