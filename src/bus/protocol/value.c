/* Reads MessagePack headers, and skips values. */
#include "bus/protocol/value.h"

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

static double read_float(uint64_t raw, size_t nbytes) {
    uint32_t bits = (uint32_t)raw;
    float narrow;
    double number;
    memcpy(&narrow, &bits, sizeof narrow);
    memcpy(&number, &raw, sizeof number);
    return nbytes == sizeof narrow ? (double)narrow : number;
}

/* What the tags from 0xc0 on say: the type, and in how many bytes its number, length or count follows. Of a NEGATIVE
 * that is a signed number, which need not be negative. */
static const struct {
    uint8_t type, nbytes;
} tags[0x20] = {
    [0x00] = {TB__VALUE_NIL, 0},      [0x02] = {TB__VALUE_BOOL, 0},     [0x03] = {TB__VALUE_BOOL, 0},
    [0x04] = {TB__VALUE_BIN, 1},      [0x05] = {TB__VALUE_BIN, 2},      [0x06] = {TB__VALUE_BIN, 4},
    [0x07] = {TB__VALUE_EXT, 1},      [0x08] = {TB__VALUE_EXT, 2},      [0x09] = {TB__VALUE_EXT, 4},
    [0x0a] = {TB__VALUE_FLOAT, 4},    [0x0b] = {TB__VALUE_FLOAT, 8},    [0x0c] = {TB__VALUE_UINT, 1},
    [0x0d] = {TB__VALUE_UINT, 2},     [0x0e] = {TB__VALUE_UINT, 4},     [0x0f] = {TB__VALUE_UINT, 8},
    [0x10] = {TB__VALUE_NEGATIVE, 1}, [0x11] = {TB__VALUE_NEGATIVE, 2}, [0x12] = {TB__VALUE_NEGATIVE, 4},
    [0x13] = {TB__VALUE_NEGATIVE, 8}, [0x14] = {TB__VALUE_EXT, 0},      [0x15] = {TB__VALUE_EXT, 0},
    [0x16] = {TB__VALUE_EXT, 0},      [0x17] = {TB__VALUE_EXT, 0},      [0x18] = {TB__VALUE_EXT, 0},
    [0x19] = {TB__VALUE_STR, 1},      [0x1a] = {TB__VALUE_STR, 2},      [0x1b] = {TB__VALUE_STR, 4},
    [0x1c] = {TB__VALUE_ARRAY, 2},    [0x1d] = {TB__VALUE_ARRAY, 4},    [0x1e] = {TB__VALUE_MAP, 2},
    [0x1f] = {TB__VALUE_MAP, 4},
};

static tb_status take_tagged(tb__cursor *from, unsigned tag, tb__value *out) {
    size_t nbytes = tags[tag - 0xc0].nbytes;
    tb__value_type type = tags[tag - 0xc0].type;
    unsigned unused;
    uint64_t n;
    TB_TRY(take_big_endian(from, nbytes, &n));
    *out = (tb__value){.type = type};
    switch (type) {
    case TB__VALUE_NIL:
        return tag == 0xc0 ? TB_OK : tb__fail(TB_INVALID, "0x%02x does not begin a MessagePack value", tag);
    case TB__VALUE_BOOL:
        out->is_true = tag == 0xc3;
        return TB_OK;
    case TB__VALUE_UINT:
        out->positive = n;
        return TB_OK;
    case TB__VALUE_NEGATIVE:
        unused = (64 - 8 * (unsigned)nbytes) % 64;
        out->negative = (int64_t)(n << unused) >> unused;
        if (out->negative >= 0)
            *out = (tb__value){.type = TB__VALUE_UINT, .positive = (uint64_t)out->negative};
        return TB_OK;
    case TB__VALUE_FLOAT:
        out->number = read_float(n, nbytes);
        return TB_OK;
    case TB__VALUE_ARRAY:
    case TB__VALUE_MAP:
        return take_count(from, n, type, out);
    case TB__VALUE_EXT: /* its own type is a byte; without a length it has 1, 2, 4, ... bytes */
        n = (nbytes ? n : (uint64_t)1 << (tag - 0xd4)) + 1;
        break;
    default:
        break;
    }
    return take_bytes(from, n, type, out);
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
    for (uint32_t i = 0; i < header.count; i++) {
        tb__cursor value = from;
        if (tb__value_skip(&from, 1) != TB_OK)
            return false;
        if (tb__value_take(&value, &name) != TB_OK)
            return false;
        if (name.type == TB__VALUE_STR && tb__blob_is(name.bytes, key))
            return tb__value_take(&from, out) == TB_OK;
        if (tb__value_skip(&from, 1) != TB_OK)
            return false;
    }
    return false;
}
