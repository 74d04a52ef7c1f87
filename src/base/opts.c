/* Public structs that begin with their size: see opts.h. */
#include "base/opts.h"

#include "base/int.h"

#include <string.h>

enum { SIZE_LIMIT = 1 << 16 }; /* no struct is that large, but an uninitialised `size` may be */

static size_t callers_size(const void *callers) {
    size_t size;
    memcpy(&size, callers, sizeof size);
    return size;
}

tb_status tb__struct_check(const void *callers, const char *what) {
    size_t given = callers_size(callers);
    if (given < sizeof given || given > SIZE_LIMIT)
        return tb__fail(TB_INVALID, "%s has size %zu; set it to sizeof the struct", what, given);
    return TB_OK;
}

static tb_status read_struct(void *ours, size_t size, const void *callers, const char *what) {
    TB_TRY(tb__struct_check(callers, what));
    size_t given = callers_size(callers);
    for (size_t i = size; i < given; i++) {
        if (((const unsigned char *)callers)[i] != 0)
            return tb__fail(TB_REFUSED,
                            "%s has %zu bytes, and sets a field that tensorbus %s does not know: it knows %zu bytes",
                            what, given, tb_version_string(), size);
    }
    memset(ours, 0, size);
    memcpy(ours, callers, tb__min_size(given, size));
    memcpy(ours, &size, sizeof size);
    return TB_OK;
}

tb_status tb__opts_read(void *ours, size_t size, const void *callers) {
    if (callers)
        return read_struct(ours, size, callers, "an options struct");
    memset(ours, 0, size);
    memcpy(ours, &size, sizeof size);
    return TB_OK;
}

tb_status tb__struct_read(void *ours, size_t size, const void *callers, size_t i, const char *what) {
    TB_TRY(tb__struct_check(callers, what));
    const char *from = (const char *)callers + i * callers_size(callers);
    if (callers_size(from) != callers_size(callers))
        return tb__fail(TB_INVALID, "%s has size %zu, but the first in its array has %zu", what, callers_size(from),
                        callers_size(callers));
    return read_struct(ours, size, from, what);
}

tb_status tb__struct_write(void *callers, const void *ours, size_t size, const char *what) {
    TB_TRY(tb__struct_check(callers, what));
    size_t given = callers_size(callers);
    memset(callers, 0, given);
    memcpy(callers, ours, tb__min_size(given, size));
    memcpy(callers, &given, sizeof given);
    return TB_OK;
}

void tb__struct_take(void *ours, size_t size, void *callers) {
    size_t given = callers_size(callers);
    memset(ours, 0, size);
    if (given <= sizeof given)
        return;
    memcpy(ours, callers, tb__min_size(given, size));
    memset((char *)callers + sizeof given, 0, tb__min_size(given, size) - sizeof given);
}
