/* Options structs: they begin with their size, so that a program built against an older header still works. */
#ifndef TB_BASE_OPTS_H
#define TB_BASE_OPTS_H

#include "base/error.h"

#include <string.h>

/* Copies what the caller's struct has of ours, and zeros (the defaults) for the rest. */
static inline tb_status tb__opts_read(void *ours, size_t size, const void *callers) {
    memset(ours, 0, size);
    if (!callers)
        return TB_OK;
    size_t given;
    memcpy(&given, callers, sizeof given);
    if (given < sizeof given)
        return tb__fail(TB_INVALID, "an options struct has size %zu; set it to sizeof the struct", given);
    memcpy(ours, callers, given < size ? given : size);
    return TB_OK;
}

#endif
