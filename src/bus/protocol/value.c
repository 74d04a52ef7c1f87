/* Reads MessagePack headers, and skips values. */
#include "bus/protocol/value.h"

#include <string.h>

static const char *const type_names[] = {
    [TB__VALUE_NIL] = "nil",       [TB__VALUE_BOOL] = "a bool",
    [TB__VALUE_UINT] = "a number", [TB__VALUE_NEGATIVE] = "a negative number",
    [TB__VALUE_FLOAT] = "a float", [TB__VALUE_STR] = "a string",
    [TB__VALUE_BIN] = "bytes",     [TB__VALUE_ARRAY] = "an array",
    [TB__VALUE_MAP] = "a map",     [TB__VALUE_EXT] = "an extension",
};

const char *tb__value_type_name(tb__value_type type) {
    return type_names[type];
}

static size_t bytes_left(const tb__cursor *from) {
    return (size_t)(from->end - from->at);
}

static tb_status ends_early(void) {
    return tb__fail(TB_INVALID, "MessagePack that ends in the middle of a value");
}

/* A big-endian number of so many bytes. */
static tb_status take_big_endian(tb__cursor *from, size_t nbytes, uint64_t *out) {
    if (bytes_left(from) < nbytes)
        return ends_early();
    uint64_t value = 0;
    for (size_t i = 0; i < nbytes; i++)
        value = value << 8 | from->at[i];
    from->at += nbytes;
    *out = value;
    return TB_OK;
}

static tb_status take_bytes(tb__cursor *from, uint64_t nbytes, tb__value_type type, tb__value *out) {
    if (bytes_left(from) < nbytes)
        return ends_early();
    *out = (tb__value){.type = type, .bytes = {.data = from->at, .nbytes = (size_t)nbytes}};
    from->at += nbytes;
    return TB_OK;
}

/* Each item of a container has at least a byte. */
static tb_status take_count(const tb__cursor *from, uint64_t count, tb__value_type type, tb__value *out) {
    if (bytes_left(from) / (type == TB__VALUE_MAP ? 2 : 1) < count)
        return ends_early();
    *out = (tb__value){.type = type, .count = (uint32_t)count};
    return TB_OK;
}

static tb_status take_signed(tb__cursor *from, size_t nbytes, tb__value *out) {
    uint64_t raw;
    TB_TRY(take_big_endian(from, nbytes, &raw));
    unsigned unused = 64 - 8 * (unsigned)nbytes;
    int64_t value = (int64_t)(raw << unused) >> unused;
    *out = value < 0 ? (tb__value){.type = TB__VALUE_NEGATIVE, .negative = value}
                     : (tb__value){.type = TB__VALUE_UINT, .positive = (uint64_t)value};
    return TB_OK;
}

static tb_status take_float_value(tb__cursor *from, size_t nbytes, tb__value *out) {
    uint64_t raw;
    TB_TRY(take_big_endian(from, nbytes, &raw));
    double number;
    if (nbytes == 4) {
        uint32_t bits = (uint32_t)raw;
        float narrow;
        memcpy(&narrow, &bits, sizeof narrow);
        number = (double)narrow;
    } else {
        memcpy(&number, &raw, sizeof number);
    }
    *out = (tb__value){.type = TB__VALUE_FLOAT, .number = number};
    return TB_OK;
}

/* Headers whose first byte says only the type; `tag` is that byte. */
static tb_status take_tagged(tb__cursor *from, unsigned tag, tb__value *out) {
    uint64_t n;
    switch (tag) {
    case 0xc0:
        *out = (tb__value){.type = TB__VALUE_NIL};
        return TB_OK;
    case 0xc2:
    case 0xc3:
        *out = (tb__value){.type = TB__VALUE_BOOL, .is_true = tag == 0xc3};
        return TB_OK;
    case 0xc4:
    case 0xc5:
    case 0xc6:
        TB_TRY(take_big_endian(from, (size_t)1 << (tag - 0xc4), &n));
        return take_bytes(from, n, TB__VALUE_BIN, out);
    case 0xc7:
    case 0xc8:
    case 0xc9:
        TB_TRY(take_big_endian(from, (size_t)1 << (tag - 0xc7), &n));
        return take_bytes(from, n + 1, TB__VALUE_EXT, out); /* its type is a byte */
    case 0xca:
    case 0xcb:
        return take_float_value(from, tag == 0xca ? 4 : 8, out);
    case 0xcc:
    case 0xcd:
    case 0xce:
    case 0xcf:
        TB_TRY(take_big_endian(from, (size_t)1 << (tag - 0xcc), &n));
        *out = (tb__value){.type = TB__VALUE_UINT, .positive = n};
        return TB_OK;
    case 0xd0:
    case 0xd1:
    case 0xd2:
    case 0xd3:
        return take_signed(from, (size_t)1 << (tag - 0xd0), out);
    case 0xd4:
    case 0xd5:
    case 0xd6:
    case 0xd7:
    case 0xd8:
        return take_bytes(from, ((uint64_t)1 << (tag - 0xd4)) + 1, TB__VALUE_EXT, out);
    case 0xd9:
    case 0xda:
    case 0xdb:
        TB_TRY(take_big_endian(from, (size_t)1 << (tag - 0xd9), &n));
        return take_bytes(from, n, TB__VALUE_STR, out);
    case 0xdc:
    case 0xdd:
        TB_TRY(take_big_endian(from, tag == 0xdc ? 2 : 4, &n));
        return take_count(from, n, TB__VALUE_ARRAY, out);
    case 0xde:
    case 0xdf:
        TB_TRY(take_big_endian(from, tag == 0xde ? 2 : 4, &n));
        return take_count(from, n, TB__VALUE_MAP, out);
    default:
        return tb__fail(TB_INVALID, "0x%02x does not begin a MessagePack value", tag);
    }
}

tb_status tb__value_take(tb__cursor *from, tb__value *out) {
    if (from->at == from->end)
        return ends_early();
    unsigned tag = *from->at++;
    if (tag < 0x80) {
        *out = (tb__value){.type = TB__VALUE_UINT, .positive = tag};
        return TB_OK;
    }
    if (tag < 0x90)
        return take_count(from, tag & 0x0f, TB__VALUE_MAP, out);
    if (tag < 0xa0)
        return take_count(from, tag & 0x0f, TB__VALUE_ARRAY, out);
    if (tag < 0xc0)
        return take_bytes(from, tag & 0x1f, TB__VALUE_STR, out);
    if (tag < 0xe0)
        return take_tagged(from, tag, out);
    *out = (tb__value){.type = TB__VALUE_NEGATIVE, .negative = (int)tag - 256};
    return TB_OK;
}

tb_status tb__value_skip(tb__cursor *from, int nesting) {
    uint64_t open[TB__MAX_NESTING + 1] = {1}; /* values still to come, per container that is open */
    for (int depth = 0; depth >= 0;) {
        tb__value value;
        TB_TRY(tb__value_take(from, &value));
        open[depth]--;
        if (value.type == TB__VALUE_ARRAY || value.type == TB__VALUE_MAP) {
            if (nesting + ++depth > TB__MAX_NESTING)
                return tb__fail(TB_TOO_BIG, "MessagePack nested deeper than %d", TB__MAX_NESTING);
            open[depth] = (uint64_t)value.count * (value.type == TB__VALUE_MAP ? 2 : 1);
        }
        while (depth >= 0 && open[depth] == 0)
            depth--;
    }
    return TB_OK;
}

tb_status tb__value_check(tb__blob bytes) {
    tb__cursor from = tb__cursor_over(bytes);
    TB_TRY(tb__value_skip(&from, 0));
    if (from.at != from.end)
        return tb__fail(TB_INVALID, "%zu bytes after the MessagePack value", bytes_left(&from));
    return TB_OK;
}

bool tb__map_find(tb__blob map, const char *key, tb__value *out) {
    tb__cursor from = tb__cursor_over(map);
    tb__value header, name;
    if (tb__value_take(&from, &header) != TB_OK || header.type != TB__VALUE_MAP)
        return false;
    size_t length = strlen(key);
    for (uint32_t i = 0; i < header.count; i++) {
        tb__cursor value = from;
        if (tb__value_skip(&from, 1) != TB_OK)
            return false;
        if (tb__value_take(&value, &name) != TB_OK)
            return false;
        if (name.type == TB__VALUE_STR && name.bytes.nbytes == length && memcmp(name.bytes.data, key, length) == 0)
            return tb__value_take(&from, out) == TB_OK;
        if (tb__value_skip(&from, 1) != TB_OK)
            return false;
    }
    return false;
}
