/* Borrowed bytes, and a growing buffer. */
#ifndef TB_BASE_BYTES_H
#define TB_BASE_BYTES_H

#include <stddef.h>
#include <stdint.h>

/* Borrowed bytes. */
typedef struct tb__blob {
    const uint8_t *data;
    size_t nbytes;
} tb__blob;

typedef struct tb__bytes { /* for tb__vec_* */
    uint8_t *item;
    size_t count, capacity;
} tb__bytes;

#endif
