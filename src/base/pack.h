/* Serialised messages between processes: numbers little-endian and unaligned; strings and blobs after their length.
 * Input may be malformed, so reading checks everything: after a failed read all later ones return zeros, and the caller
 * checks once, at the end. */
#ifndef TB_BASE_PACK_H
#define TB_BASE_PACK_H

#include "base/error.h"

/* Zero-initialised: empty. After a failed append it stays failed; check once, at the end. */
typedef struct tb__pack {
    unsigned char *data;
    size_t count, capacity;
    bool failed;
} tb__pack;

void tb__pack_u32(tb__pack *pack, uint32_t value);
void tb__pack_u64(tb__pack *pack, uint64_t value);
void tb__pack_i64(tb__pack *pack, int64_t value);
void tb__pack_status(tb__pack *pack, tb_status status);
void tb__pack_raw(tb__pack *pack, const void *data, size_t nbytes);   /* without a length */
void tb__pack_bytes(tb__pack *pack, const void *data, size_t nbytes); /* with one */
void tb__pack_string(tb__pack *pack, const char *string);
void tb__pack_fini(tb__pack *pack);

typedef struct tb__unpack {
    const unsigned char *at, *end;
    bool failed;
} tb__unpack;

uint32_t tb__unpack_u32(tb__unpack *u);
uint64_t tb__unpack_u64(tb__unpack *u);
int64_t tb__unpack_i64(tb__unpack *u);
tb_status tb__unpack_status(tb__unpack *u);
const void *tb__unpack_raw(tb__unpack *u, size_t nbytes);    /* NULL if there are fewer */
const void *tb__unpack_bytes(tb__unpack *u, size_t *nbytes); /* points into the message */
const char *tb__unpack_string(tb__unpack *u);                /* likewise; never NULL */
size_t tb__unpack_count(tb__unpack *u, size_t least);        /* a u32; fails if fewer than count * least bytes follow */
bool tb__unpack_is_done(const tb__unpack *u);                /* everything was read, and nothing failed */

#endif
