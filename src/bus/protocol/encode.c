/* Structs to MessagePack maps. */
#include "base/text.h"
#include "bus/protocol/codec.h"

#include <inttypes.h>
#include <math.h>
#include <msgpack.h>
#include <string.h>

typedef struct writer {
    msgpack_packer packer;
    const char *map;
    const tb__field *field;
} writer;

/* Ignores the packer's own errors: it fails only if this function fails, which sets the error message. */
int tb__append_packed(void *out, const char *bytes, size_t nbytes) {
    tb__bytes *to = out;
    if (!tb__vec_reserve(to, nbytes))
        return -1;
    if (nbytes > 0)
        memcpy(to->item + to->count, bytes, nbytes);
    to->count += nbytes;
    return 0;
}

static tb_status packer_status(int result) {
    return result == 0 ? TB_OK : TB_NO_MEMORY;
}

static const void *const_field_address(const void *from, const tb__field *field) {
    return (const char *)from + field->offset;
}

#define PART(type, member)                                                                                             \
    { TB__FIELD_##type, offsetof(tb__outcome, member) }
static const tb__list lists[] = {
    [TB__FIELD_INTS] = {"an array of numbers", sizeof(int64_t), 1, 1, {{TB__FIELD_INT, 0}}},
    [TB__FIELD_TEXTS] = {"an array of str", sizeof(const char *), 1, 1, {{TB__FIELD_TEXT, 0}}},
    [TB__FIELD_TIES] = {"an array of [str, str]",
                        sizeof(tb_tie),
                        3,
                        2,
                        {{TB__FIELD_TEXT, offsetof(tb_tie, name)}, {TB__FIELD_TEXT, offsetof(tb_tie, canonical)}}},
    [TB__FIELD_ENTRIES] = {"an array of [str, bin]",
                           sizeof(tb__entry),
                           4,
                           2,
                           {{TB__FIELD_TEXT, offsetof(tb__entry, pair_name)},
                            {TB__FIELD_BIN, offsetof(tb__entry, payload)}}},
    [TB__FIELD_OUTCOMES] = {"an array of [str, uint, str, uint, bool]",
                            sizeof(tb__outcome),
                            6,
                            5,
                            {PART(TEXT, pair_name), PART(STATUS, status), PART(SENTENCE, message), PART(UINT, version),
                             PART(BOOL, is_torn)}},
    [TB__FIELD_INT] = {0},
};

const tb__list *tb__list_of(tb__field_type type) {
    return lists[type].nparts ? &lists[type] : NULL;
}

/* Whether there is something to write other than nil or the default: any of these bytes is not 0. */
static bool field_is_set(const tb__field *field, const void *from) {
    static const struct {
        size_t offset, nbytes;
    } telling[] = {
        [TB__FIELD_TEXT] = {0, sizeof(const char *)},
        [TB__FIELD_SENTENCE] = {0, sizeof(const char *)},
        [TB__FIELD_CHOICE] = {0, sizeof(unsigned)},
        [TB__FIELD_DTYPE] = {0, sizeof(tb_dtype)},
        [TB__FIELD_STATUS] = {0, sizeof(tb_status)},
        [TB__FIELD_UINT] = {0, sizeof(uint64_t)},
        [TB__FIELD_UINT32] = {0, sizeof(uint32_t)},
        [TB__FIELD_FLOAT] = {0, sizeof(double)},
        [TB__FIELD_BOOL] = {0, sizeof(bool)},
        [TB__FIELD_UNLESS] = {0, sizeof(bool)},
        [TB__FIELD_MAYBE_UINT] = {offsetof(tb__maybe_uint, is_set), sizeof(bool)},
        [TB__FIELD_MAYBE_FLOAT] = {offsetof(tb__maybe_float, is_set), sizeof(bool)},
        [TB__FIELD_MAYBE_BOOL] = {offsetof(tb__maybe_bool, is_set), sizeof(bool)},
        [TB__FIELD_BIN] = {offsetof(tb__blob, nbytes), sizeof(size_t)},
        [TB__FIELD_MAP] = {offsetof(tb__blob, nbytes), sizeof(size_t)},
        [TB__FIELD_ARRAY] = {offsetof(tb__blob, nbytes), sizeof(size_t)},
        [TB__FIELD_INTS] = {offsetof(tb__ints, is_set), sizeof(bool)},
        [TB__FIELD_TEXTS] = {0, sizeof(size_t)},
        [TB__FIELD_TIES] = {0, sizeof(size_t)},
        [TB__FIELD_ENTRIES] = {0, sizeof(size_t)},
        [TB__FIELD_OUTCOMES] = {0, sizeof(size_t)},
    };
    const uint8_t *at = (const uint8_t *)const_field_address(from, field) + telling[field->type].offset;
    uint8_t any = 0;
    for (size_t i = 0; i < telling[field->type].nbytes; i++)
        any |= at[i];
    return any != 0;
}

static tb_status put_str(writer *w, const char *text, size_t nbytes) {
    return packer_status(msgpack_pack_str_with_body(&w->packer, text, nbytes));
}

static tb_status put_text(writer *w, const char *text) {
    if (!text)
        return tb__fail(TB_INVALID, "%s: %s is not set", w->map, w->field->name);
    size_t nbytes = strlen(text);
    if (nbytes > TB__MAX_TEXT)
        return tb__fail(TB_TOO_BIG, "%s: %s has %zu bytes; at most %d are allowed", w->map, w->field->name, nbytes,
                        TB__MAX_TEXT);
    if (!tb__is_utf8(text))
        return tb__fail(TB_INVALID, "%s: %s is not UTF-8", w->map, w->field->name);
    return put_str(w, text, nbytes);
}

/* Error messages quote text of others, which may be anything: it is made valid UTF-8. */
static tb_status put_sentence(writer *w, const char *text) {
    if (!text)
        return tb__fail(TB_INVALID, "%s: %s is not set", w->map, w->field->name);
    char clean[TB__MAX_SENTENCE];
    size_t nbytes = 0;
    for (int length; *text; text += length ? length : 1) {
        length = tb__utf8_length(text);
        size_t more = length ? (size_t)length : 1;
        if (nbytes + more > sizeof clean)
            break;
        memcpy(clean + nbytes, length ? text : "?", more);
        nbytes += more;
    }
    return put_str(w, clean, nbytes);
}

static tb_status put_uint(writer *w, uint64_t value, uint64_t max) {
    if (max && value > max)
        return tb__fail(TB_TOO_BIG, "%s: %s is %" PRIu64 "; it is at most %" PRIu64, w->map, w->field->name, value,
                        max);
    return packer_status(msgpack_pack_uint64(&w->packer, value));
}

static tb_status put_bool(writer *w, bool value) {
    return packer_status(value ? msgpack_pack_true(&w->packer) : msgpack_pack_false(&w->packer));
}

static tb_status put_float(writer *w, double value) {
    if (!isfinite(value))
        return tb__fail(TB_INVALID, "%s: %s is not finite", w->map, w->field->name);
    return packer_status(msgpack_pack_double(&w->packer, value));
}

static tb_status put_choice(writer *w, unsigned value) {
    unsigned choice = value - (w->field->rule == TB__OPTION), n = 0;
    while (n < choice && w->field->choices[n])
        n++;
    if (!w->field->choices[n])
        return tb__fail(TB_INVALID, "%s: %s has no choice %u", w->map, w->field->name, choice);
    return put_text(w, w->field->choices[n]);
}

static tb_status put_bin(writer *w, tb__blob bytes) {
    if (bytes.nbytes > UINT32_MAX)
        return tb__fail(TB_TOO_BIG, "%s: %s has %zu bytes", w->map, w->field->name, bytes.nbytes);
    TB_TRY(packer_status(msgpack_pack_bin(&w->packer, bytes.nbytes)));
    return bytes.nbytes ? packer_status(msgpack_pack_bin_body(&w->packer, bytes.data, bytes.nbytes)) : TB_OK;
}

static tb_status put_value(writer *w, tb__blob value) {
    if (value.nbytes == 0)
        return tb__fail(TB_INVALID, "%s: %s is not set", w->map, w->field->name);
    return packer_status(tb__append_packed(w->packer.data, (const char *)value.data, value.nbytes));
}

static tb_status put_list(writer *w, const tb__list *list, const void *at);

static tb_status put_typed(writer *w, tb__field_type type, const void *at) {
    const tb__list *list = tb__list_of(type);
    if (list)
        return put_list(w, list, at);
    switch (type) {
    case TB__FIELD_TEXT:
        return put_text(w, *(const char *const *)at);
    case TB__FIELD_SENTENCE:
        return put_sentence(w, *(const char *const *)at);
    case TB__FIELD_CHOICE:
        return put_choice(w, *(const unsigned *)at);
    case TB__FIELD_DTYPE:
        return put_text(w, tb_dtype_name(*(const tb_dtype *)at));
    case TB__FIELD_STATUS:
        return put_uint(w, (uint64_t) - (int64_t) * (const tb_status *)at, w->field->max);
    case TB__FIELD_UINT:
        return put_uint(w, *(const uint64_t *)at, w->field->type == type ? w->field->max : 0);
    case TB__FIELD_UINT32:
        return put_uint(w, *(const uint32_t *)at, w->field->max);
    case TB__FIELD_FLOAT:
        return put_float(w, *(const double *)at);
    case TB__FIELD_INT:
        return packer_status(msgpack_pack_int64(&w->packer, *(const int64_t *)at));
    case TB__FIELD_BOOL:
        return put_bool(w, *(const bool *)at);
    case TB__FIELD_UNLESS:
        return put_bool(w, !*(const bool *)at);
    case TB__FIELD_MAYBE_UINT:
        return put_uint(w, ((const tb__maybe_uint *)at)->value, w->field->max);
    case TB__FIELD_MAYBE_FLOAT:
        return put_float(w, ((const tb__maybe_float *)at)->value);
    case TB__FIELD_MAYBE_BOOL:
        return put_bool(w, ((const tb__maybe_bool *)at)->value);
    case TB__FIELD_BIN:
        return put_bin(w, *(const tb__blob *)at);
    case TB__FIELD_MAP:
    case TB__FIELD_ARRAY:
        return put_value(w, *(const tb__blob *)at);
    default:
        return tb__fail(TB_INTERNAL, "%s: %s has no type", w->map, w->field->name);
    }
}

static tb_status put_list(writer *w, const tb__list *list, const void *at) {
    struct {
        size_t count;
        const char *item;
    } all;
    memcpy(&all, at, sizeof all);
    if (all.count > TB__MAX_ITEMS)
        return tb__fail(TB_TOO_BIG, "%s: %s has %zu items; at most %d are allowed", w->map, w->field->name, all.count,
                        TB__MAX_ITEMS);
    TB_TRY(packer_status(msgpack_pack_array(&w->packer, all.count)));
    for (size_t i = 0; i < all.count; i++) {
        if (list->nparts > 1)
            TB_TRY(packer_status(msgpack_pack_array(&w->packer, list->nparts)));
        for (size_t j = 0; j < list->nparts; j++)
            TB_TRY(put_typed(w, list->parts[j].type, all.item + i * list->size + list->parts[j].offset));
    }
    return TB_OK;
}

static tb_status put_map(writer *w, const tb__schema *schema, const void *from) {
    size_t count = schema->has_type;
    for (size_t i = 0; i < schema->nfields; i++)
        count += schema->fields[i].rule != TB__OPTION || field_is_set(&schema->fields[i], from);
    TB_TRY(packer_status(msgpack_pack_map(&w->packer, count)));
    if (schema->has_type) {
        TB_TRY(put_str(w, "type", strlen("type")));
        TB_TRY(put_str(w, schema->name, strlen(schema->name)));
    }
    for (size_t i = 0; i < schema->nfields; i++) {
        w->field = &schema->fields[i];
        bool is_there = field_is_set(w->field, from);
        if (w->field->rule == TB__OPTION && !is_there)
            continue;
        TB_TRY(put_str(w, w->field->name, strlen(w->field->name)));
        if (w->field->rule == TB__NILABLE && !is_there)
            TB_TRY(packer_status(msgpack_pack_nil(&w->packer)));
        else
            TB_TRY(put_typed(w, w->field->type, const_field_address(from, w->field)));
    }
    return TB_OK;
}

tb_status tb__map_encode(const tb__schema *schema, const void *from, tb__bytes *out) {
    size_t start = out->count;
    writer w = {.map = schema->name};
    msgpack_packer_init(&w.packer, out, tb__append_packed);
    tb_status status = put_map(&w, schema, from);
    if (status != TB_OK)
        out->count = start;
    return status;
}

tb_status tb__map_encode_kept(const tb__schema *schema, const void *from, tb__arena *arena, tb__blob *out) {
    tb__bytes bytes = {0};
    tb_status status = tb__map_encode(schema, from, &bytes);
    void *kept = status == TB_OK ? tb__arena_alloc(arena, bytes.count, 1) : NULL;
    if (kept)
        *out = (tb__blob){memcpy(kept, bytes.item, bytes.count), bytes.count};
    free(bytes.item);
    return status == TB_OK && !kept ? TB_NO_MEMORY : status;
}
