/* Little-endian packing. */
#include "base/pack.h"

#include "base/mem.h"

#include <endian.h>
#include <string.h>

enum { MAX_STATUS = 64 }; /* statuses stay below that */

void tb__pack_raw(tb__pack *pack, const void *data, size_t nbytes) {
    if (pack->failed || (nbytes > pack->capacity - pack->count &&
                         !tb__vec_grow((void **)&pack->data, &pack->capacity, pack->count + nbytes, 1))) {
        pack->failed = true;
        return;
    }
    if (nbytes)
        memcpy(pack->data + pack->count, data, nbytes);
    pack->count += nbytes;
}

void tb__pack_u32(tb__pack *pack, uint32_t value) {
    value = htole32(value);
    tb__pack_raw(pack, &value, sizeof value);
}

void tb__pack_u64(tb__pack *pack, uint64_t value) {
    value = htole64(value);
    tb__pack_raw(pack, &value, sizeof value);
}

void tb__pack_i64(tb__pack *pack, int64_t value) {
    tb__pack_u64(pack, (uint64_t)value);
}

void tb__pack_status(tb__pack *pack, tb_status status) {
    tb__pack_u32(pack, (uint32_t)-status);
}

void tb__pack_bytes(tb__pack *pack, const void *data, size_t nbytes) {
    if (nbytes > UINT32_MAX) {
        pack->failed = true;
        return;
    }
    tb__pack_u32(pack, (uint32_t)nbytes);
    tb__pack_raw(pack, data, nbytes);
}

/* The NUL is packed too, so that readers can point into the message. */
void tb__pack_string(tb__pack *pack, const char *string) {
    tb__pack_bytes(pack, string, strlen(string) + 1);
}

void tb__pack_fini(tb__pack *pack) {
    free(pack->data);
    *pack = (tb__pack){0};
}

const void *tb__unpack_raw(tb__unpack *u, size_t nbytes) {
    if (u->failed || nbytes > (size_t)(u->end - u->at)) {
        u->failed = true;
        return NULL;
    }
    const void *at = u->at;
    u->at += nbytes;
    return at;
}

uint32_t tb__unpack_u32(tb__unpack *u) {
    uint32_t value = 0;
    const void *at = tb__unpack_raw(u, sizeof value);
    if (at)
        memcpy(&value, at, sizeof value);
    return le32toh(value);
}

uint64_t tb__unpack_u64(tb__unpack *u) {
    uint64_t value = 0;
    const void *at = tb__unpack_raw(u, sizeof value);
    if (at)
        memcpy(&value, at, sizeof value);
    return le64toh(value);
}

int64_t tb__unpack_i64(tb__unpack *u) {
    return (int64_t)tb__unpack_u64(u);
}

tb_status tb__unpack_status(tb__unpack *u) {
    uint32_t code = tb__unpack_u32(u);
    u->failed |= code > MAX_STATUS;
    return u->failed ? TB_OK : (tb_status) - (int)code;
}

const void *tb__unpack_bytes(tb__unpack *u, size_t *nbytes) {
    *nbytes = tb__unpack_u32(u);
    const void *at = tb__unpack_raw(u, *nbytes);
    if (!at)
        *nbytes = 0;
    return at;
}

const char *tb__unpack_string(tb__unpack *u) {
    size_t nbytes;
    const char *at = tb__unpack_bytes(u, &nbytes);
    if (!at || nbytes == 0 || strnlen(at, nbytes) != nbytes - 1) {
        u->failed = true;
        return "";
    }
    return at;
}

size_t tb__unpack_count(tb__unpack *u, size_t least) {
    size_t count = tb__unpack_u32(u);
    if (!u->failed && count > (size_t)(u->end - u->at) / least)
        u->failed = true;
    return u->failed ? 0 : count;
}

bool tb__unpack_is_done(const tb__unpack *u) {
    return !u->failed && u->at == u->end;
}
