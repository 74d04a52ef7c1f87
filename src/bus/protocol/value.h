/* Reads MessagePack one value at a time, in place, without allocation or recursion. A header that claims more than the
 * bytes behind it can hold is refused; unwanted values are skipped with a small stack. The unpacker of msgpack-c builds
 * a tree, and allocates what headers claim. */
#ifndef TB_BUS_PROTOCOL_VALUE_H
#define TB_BUS_PROTOCOL_VALUE_H

#include "base/bytes.h"
#include "base/error.h"

#include <string.h>

enum { TB__MAX_NESTING = 16 }; /* maps and arrays within one another */

typedef enum tb__value_type {
    TB__VALUE_NIL,
    TB__VALUE_BOOL,
    TB__VALUE_UINT,
    TB__VALUE_NEGATIVE,
    TB__VALUE_FLOAT,
    TB__VALUE_STR,
    TB__VALUE_BIN,
    TB__VALUE_ARRAY,
    TB__VALUE_MAP,
    TB__VALUE_EXT,
} tb__value_type;

const char *tb__value_type_name(tb__value_type type); /* "a string" */

typedef struct tb__value {
    tb__value_type type;
    union {
        bool is_true;
        uint64_t positive;
        int64_t negative;
        double number;
        tb__blob bytes; /* STR, BIN, EXT; points into the input */
        uint32_t count; /* ARRAY: values that follow; MAP: pairs of a key and a value */
    };
} tb__value;

/* The rest of the input. */
typedef struct tb__cursor {
    const uint8_t *at, *end;
} tb__cursor;

static inline tb__cursor tb__cursor_over(tb__blob blob) {
    return (tb__cursor){.at = blob.data, .end = blob.data ? blob.data + blob.nbytes : NULL};
}

/* Takes the next value; of an array or a map the header only. */
tb_status tb__value_take(tb__cursor *from, tb__value *out);

/* Goes over one value with all that is in it, which is `nesting` deep already. */
tb_status tb__value_skip(tb__cursor *from, int nesting);

/* Whether the bytes are one well-formed value and nothing more. */
tb_status tb__value_check(tb__blob bytes);

/* Whether the text is this string, which is not empty. */
static inline bool tb__blob_is(tb__blob text, const char *string) {
    return text.nbytes > 0 && *string == (char)*text.data && strlen(string) == text.nbytes &&
           memcmp(string, text.data, text.nbytes) == 0;
}

/* The value at a key of the map, which must have been checked; false if the key is not there. */
bool tb__map_find(tb__blob map, const char *key, tb__value *out);

#endif
