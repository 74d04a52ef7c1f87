/* Bytes: those of somebody else, and a buffer of one's own that grows. */
#ifndef TB_BASE_BYTES_H
#define TB_BASE_BYTES_H

#include <stddef.h>
#include <stdint.h>

/* Bytes that belong to somebody else. */
typedef struct tb__blob {
    const uint8_t *data;
    size_t nbytes;
} tb__blob;

typedef struct tb__bytes { /* for tb__vec_* */
    uint8_t *item;
    size_t count, capacity;
} tb__bytes;

#endif
