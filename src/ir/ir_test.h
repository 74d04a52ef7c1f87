/* Helpers of the IR's tests. */
#ifndef TB_IR_IR_TEST_H
#define TB_IR_IR_TEST_H

#include "ir/ir.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

/* What a channel's chunks have in common. */
static inline const tb_chunk *key_of(const tb_ir *ir, const tb_channel *channel) {
    return &ir->chunks[ir->entries[ir->buckets[channel->first_bucket].first_entry].chunk];
}

/* Dumps can be parsed, and the result has the same dumps. */
static inline void check_dumps(const tb_ir *ir) {
    char *json, *again, *text;
    tb_ir *parsed;
    assert_int_equal(tb_ir_dump_json(ir, &json), TB_OK);
    assert_int_equal(tb_ir_parse_json(json, strlen(json), &parsed), TB_OK);
    assert_int_equal(tb_ir_dump_json(parsed, &again), TB_OK);
    assert_string_equal(json, again);
    assert_int_equal(tb_ir_dump_text(parsed, &text), TB_OK);
    assert_non_null(strstr(text, "rank "));
    free(json);
    free(again);
    free(text);
    tb_ir_destroy(parsed);
}

#endif
