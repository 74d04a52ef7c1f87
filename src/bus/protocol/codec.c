/* Structs to MessagePack maps, and back: one table of the types of fields, in both directions. */
#include "bus/protocol/codec.h"
#include "base/text.h"
#include "bus/protocol/value.h"

#include <inttypes.h>
#include <math.h>
#include <msgpack.h>
#include <stdio.h>
#include <string.h>

typedef struct writer {
    msgpack_packer packer;
    const char *map;
    const tb__field *field;
} writer;

typedef struct reader {
    tb__cursor from;
    tb__arena *arena;
    const char *map;
    const tb__field *field;
    const char *list; /* what the array is whose items are being read; NULL: none is */
    size_t expected;  /* the field that is mostly next: encoders keep the schema's order */
} reader;

/* The items of a field that is an array; in the struct, count and items are its first members. */
typedef struct list_type {
    const char *wanted; /* "an array of [str, bin]" */
    size_t size;        /* of an item in the struct */
    size_t least;       /* bytes of an item in the map */
    size_t nparts;      /* that an item has; 1: it is no array itself */
    struct {
        tb__field_type type;
        size_t offset;
    } parts[5];
} list_type;

#define PART(type, member)                                                                                             \
    { TB__FIELD_##type, offsetof(tb__outcome, member) }
static const list_type lists[] = {
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

/* Of numbers: in an array there is none. */
static uint64_t max_of(const tb__field *field) {
    return lists[field->type].nparts ? 0 : field->max;
}

/* ---- To MessagePack --------------------------------------------------------------------------------------------- */

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

/* Names of fields are short, and there are many: the packer would append the head and the text one by one. */
static tb_status put_str(writer *w, const char *text, size_t nbytes) {
    enum { SHORT = 32, SHORT_STR = 0xa0 };
    tb__bytes *to = w->packer.data;
    if (nbytes < SHORT) {
        if (!tb__vec_reserve(to, nbytes + 1))
            return TB_NO_MEMORY;
        to->item[to->count] = (uint8_t)(SHORT_STR | nbytes);
        memcpy(to->item + to->count + 1, text, nbytes);
        to->count += nbytes + 1;
        return TB_OK;
    }
    return packer_status(msgpack_pack_str_with_body(&w->packer, text, nbytes));
}

static tb_status put_string(writer *w, const char *text) {
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

static tb_status put_text(writer *w, const void *at) {
    return put_string(w, *(const char *const *)at);
}

/* Error messages quote text of others, which may be anything: it is made valid UTF-8. */
static tb_status put_sentence(writer *w, const void *at) {
    const char *text = *(const char *const *)at;
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

static tb_status put_number(writer *w, uint64_t value, uint64_t max) {
    if (max && value > max)
        return tb__fail(TB_TOO_BIG, "%s: %s is %" PRIu64 "; it is at most %" PRIu64, w->map, w->field->name, value,
                        max);
    return packer_status(msgpack_pack_uint64(&w->packer, value));
}

static tb_status put_uint(writer *w, const void *at) {
    return put_number(w, *(const uint64_t *)at, max_of(w->field));
}

static tb_status put_uint32(writer *w, const void *at) {
    return put_number(w, *(const uint32_t *)at, w->field->max);
}

static tb_status put_status(writer *w, const void *at) {
    return put_number(w, (uint64_t) - (int64_t) * (const tb_status *)at, w->field->max);
}

static tb_status put_int(writer *w, const void *at) {
    return packer_status(msgpack_pack_int64(&w->packer, *(const int64_t *)at));
}

static tb_status put_bool(writer *w, const void *at) {
    return packer_status(*(const bool *)at ? msgpack_pack_true(&w->packer) : msgpack_pack_false(&w->packer));
}

static tb_status put_unless(writer *w, const void *at) {
    return put_bool(w, &(bool){!*(const bool *)at});
}

static tb_status put_float(writer *w, const void *at) {
    double value = *(const double *)at;
    if (!isfinite(value))
        return tb__fail(TB_INVALID, "%s: %s is not finite", w->map, w->field->name);
    return packer_status(msgpack_pack_double(&w->packer, value));
}

static tb_status put_choice(writer *w, const void *at) {
    unsigned choice = *(const unsigned *)at - (w->field->rule == TB__OPTION), n = 0;
    while (n < choice && w->field->choices[n])
        n++;
    if (!w->field->choices[n])
        return tb__fail(TB_INVALID, "%s: %s has no choice %u", w->map, w->field->name, choice);
    return put_string(w, w->field->choices[n]);
}

static tb_status put_dtype(writer *w, const void *at) {
    return put_string(w, tb_dtype_name(*(const tb_dtype *)at));
}

static tb_status put_bin(writer *w, const void *at) {
    tb__blob bytes = *(const tb__blob *)at;
    if (bytes.nbytes > UINT32_MAX)
        return tb__fail(TB_TOO_BIG, "%s: %s has %zu bytes", w->map, w->field->name, bytes.nbytes);
    TB_TRY(packer_status(msgpack_pack_bin(&w->packer, bytes.nbytes)));
    return bytes.nbytes ? packer_status(msgpack_pack_bin_body(&w->packer, bytes.data, bytes.nbytes)) : TB_OK;
}

static tb_status put_value(writer *w, const void *at) {
    tb__blob value = *(const tb__blob *)at;
    if (value.nbytes == 0)
        return tb__fail(TB_INVALID, "%s: %s is not set", w->map, w->field->name);
    return packer_status(tb__append_packed(w->packer.data, (const char *)value.data, value.nbytes));
}

static tb_status put_typed(writer *w, tb__field_type type, const void *at);

static tb_status put_list(writer *w, const void *at) {
    const list_type *list = &lists[w->field->type];
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

/* ---- From MessagePack ------------------------------------------------------------------------------------------- */

/* "'a', 'b' or 'c'". */
static void write_choices(const char *const *choices, char *out, size_t nbytes) {
    size_t used = 0;
    *out = '\0';
    for (size_t i = 0; choices[i] && used < nbytes; i++) {
        const char *between = i == 0 ? "" : choices[i + 1] ? ", " : " or ";
        const char *quoted = *choices[i] ? choices[i] : "\"\"";
        int n = snprintf(out + used, nbytes - used, "%s'%s'", between, quoted);
        used += n > 0 ? (size_t)n : 0;
    }
}

static tb_status wrong_type(const reader *r, const tb__value *value, const char *wanted) {
    return tb__fail(TB_INVALID, "%s: %s is %s; it must be %s", r->map, r->field->name, tb__value_type_name(value->type),
                    r->list ? r->list : wanted);
}

static tb_status take_typed(reader *r, tb__value_type type, const char *wanted, tb__value *out) {
    TB_TRY(tb__value_take(&r->from, out));
    return out->type == type ? TB_OK : wrong_type(r, out, wanted);
}

static tb_status take_string(reader *r, size_t most, const char **out) {
    tb__value value;
    TB_TRY(take_typed(r, TB__VALUE_STR, "a string", &value));
    size_t nbytes = value.bytes.nbytes;
    if (nbytes > most)
        return tb__fail(TB_TOO_BIG, "%s: %s has %zu bytes; at most %zu are allowed", r->map, r->field->name, nbytes,
                        most);
    if (nbytes > 0 && memchr(value.bytes.data, 0, nbytes))
        return tb__fail(TB_INVALID, "%s: %s has a NUL in it", r->map, r->field->name);
    char *text = tb__arena_alloc(r->arena, nbytes + 1, 1);
    if (!text)
        return TB_NO_MEMORY;
    memcpy(text, value.bytes.data, nbytes);
    text[nbytes] = '\0';
    if (!tb__is_utf8(text))
        return tb__fail(TB_INVALID, "%s: %s is not UTF-8", r->map, r->field->name);
    *out = text;
    return TB_OK;
}

static tb_status take_text(reader *r, void *at) {
    return take_string(r, TB__MAX_TEXT, at);
}

static tb_status take_sentence(reader *r, void *at) {
    return take_string(r, TB__MAX_SENTENCE, at);
}

static tb_status take_number(reader *r, uint64_t max, uint64_t *out) {
    tb__value value;
    TB_TRY(take_typed(r, TB__VALUE_UINT, "a number that is not negative", &value));
    if (max && value.positive > max)
        return tb__fail(TB_TOO_BIG, "%s: %s is %" PRIu64 "; it is at most %" PRIu64, r->map, r->field->name,
                        value.positive, max);
    *out = value.positive;
    return TB_OK;
}

static tb_status take_uint(reader *r, void *at) {
    return take_number(r, max_of(r->field), at);
}

static tb_status take_uint32(reader *r, void *at) {
    uint64_t value;
    TB_TRY(take_number(r, r->field->max, &value));
    *(uint32_t *)at = (uint32_t)value;
    return TB_OK;
}

static tb_status take_status(reader *r, void *at) {
    uint64_t code;
    TB_TRY(take_number(r, r->field->max, &code));
    *(tb_status *)at = (tb_status) - (int)code;
    return TB_OK;
}

static tb_status take_float(reader *r, void *at) {
    double *out = at;
    tb__value value;
    TB_TRY(tb__value_take(&r->from, &value));
    if (value.type == TB__VALUE_UINT)
        *out = (double)value.positive;
    else if (value.type == TB__VALUE_NEGATIVE)
        *out = (double)value.negative;
    else if (value.type != TB__VALUE_FLOAT)
        return wrong_type(r, &value, "a number");
    else if (!isfinite(value.number))
        return tb__fail(TB_INVALID, "%s: %s is not finite", r->map, r->field->name);
    else
        *out = value.number;
    return TB_OK;
}

static tb_status take_bool(reader *r, void *at) {
    tb__value value;
    TB_TRY(take_typed(r, TB__VALUE_BOOL, "a bool", &value));
    *(bool *)at = value.is_true;
    return TB_OK;
}

static tb_status take_unless(reader *r, void *at) {
    TB_TRY(take_bool(r, at));
    *(bool *)at = !*(bool *)at;
    return TB_OK;
}

static tb_status take_choice(reader *r, void *at) {
    const char *text;
    TB_TRY(take_string(r, TB__MAX_TEXT, &text));
    for (unsigned i = 0; r->field->choices[i]; i++) {
        if (strcmp(r->field->choices[i], text) == 0) {
            *(unsigned *)at = i + (r->field->rule == TB__OPTION);
            return TB_OK;
        }
    }
    char list[256];
    write_choices(r->field->choices, list, sizeof list);
    return tb__fail(TB_INVALID, "%s: %s is '%.40s'; it must be %s", r->map, r->field->name, text, list);
}

static tb_status take_dtype(reader *r, void *at) {
    const char *text;
    TB_TRY(take_string(r, TB__MAX_TEXT, &text));
    tb_status status = tb_dtype_parse(text, at);
    return status == TB_OK ? TB_OK : tb__fail_within(status, "%s: %s", r->map, r->field->name);
}

/* All of the value's own bytes. */
static tb_status take_container(reader *r, tb__value_type type, const char *wanted, tb__blob *out) {
    const uint8_t *start = r->from.at;
    tb__cursor header = r->from;
    tb__value value;
    TB_TRY(tb__value_take(&header, &value));
    if (value.type != type)
        return wrong_type(r, &value, wanted);
    TB_TRY(tb__value_skip(&r->from, 1));
    *out = (tb__blob){.data = start, .nbytes = (size_t)(r->from.at - start)};
    return TB_OK;
}

static tb_status take_map(reader *r, void *at) {
    return take_container(r, TB__VALUE_MAP, "a map", at);
}

static tb_status take_array(reader *r, void *at) {
    return take_container(r, TB__VALUE_ARRAY, "an array", at);
}

static tb_status take_bin(reader *r, void *at) {
    tb__value value;
    TB_TRY(take_typed(r, TB__VALUE_BIN, "bytes", &value));
    *(tb__blob *)at = value.bytes;
    return TB_OK;
}

static tb_status take_int(reader *r, void *at) {
    tb__value value;
    TB_TRY(tb__value_take(&r->from, &value));
    if (value.type != TB__VALUE_NEGATIVE && value.type != TB__VALUE_UINT)
        return wrong_type(r, &value, "a number");
    if (value.type == TB__VALUE_UINT && value.positive > INT64_MAX)
        return tb__fail(TB_TOO_BIG, "%s: %s has %" PRIu64 " in it", r->map, r->field->name, value.positive);
    *(int64_t *)at = value.type == TB__VALUE_NEGATIVE ? value.negative : (int64_t)value.positive;
    return TB_OK;
}

static tb_status take_value(reader *r, tb__field_type type, void *at);

/* The number of items was compared with the available bytes. */
static tb_status take_list(reader *r, void *at) {
    const list_type *list = &lists[r->field->type];
    struct {
        size_t count;
        char *item;
    } all = {0};
    tb__value value;
    TB_TRY(take_typed(r, TB__VALUE_ARRAY, "an array", &value));
    if (value.count > TB__MAX_ITEMS)
        return tb__fail(TB_TOO_BIG, "%s: %s has %" PRIu32 " items; at most %d are allowed", r->map, r->field->name,
                        value.count, TB__MAX_ITEMS);
    if (value.count > (size_t)(r->from.end - r->from.at) / list->least)
        return tb__fail(TB_INVALID, "%s: %s has fewer than %" PRIu32 " items of its kind", r->map, r->field->name,
                        value.count);
    all.count = value.count;
    if (all.count > 0 && !(all.item = tb__arena_alloc(r->arena, all.count, list->size)))
        return TB_NO_MEMORY;
    r->list = list->wanted;
    for (size_t i = 0; i < all.count; i++) {
        if (list->nparts > 1) {
            TB_TRY(take_typed(r, TB__VALUE_ARRAY, "an array", &value));
            if (value.count != list->nparts)
                return tb__fail(TB_INVALID, "%s: %s has an item of %" PRIu32 "; it must be %s", r->map, r->field->name,
                                value.count, list->wanted);
        }
        for (size_t j = 0; j < list->nparts; j++)
            TB_TRY(take_value(r, list->parts[j].type, all.item + i * list->size + list->parts[j].offset));
    }
    r->list = NULL;
    memcpy(at, &all, sizeof all);
    if (r->field->type == TB__FIELD_INTS)
        ((tb__ints *)at)->is_set = true;
    return TB_OK;
}

/* ---- The types ----------------------------------------------------------------------------------------------------
 */

static const struct {
    tb_status (*put)(writer *w, const void *at);
    tb_status (*take)(reader *r, void *at);
    size_t told, nbytes; /* these bytes of the member are 0 if there is nothing but nil or the default to write */
    size_t at;           /* of the value behind the is_set of a tb__maybe_...; 0: it is the member */
} types[] = {
    [TB__FIELD_TEXT] = {put_text, take_text, 0, sizeof(const char *), 0},
    [TB__FIELD_SENTENCE] = {put_sentence, take_sentence, 0, sizeof(const char *), 0},
    [TB__FIELD_CHOICE] = {put_choice, take_choice, 0, sizeof(unsigned), 0},
    [TB__FIELD_DTYPE] = {put_dtype, take_dtype, 0, sizeof(tb_dtype), 0},
    [TB__FIELD_STATUS] = {put_status, take_status, 0, sizeof(tb_status), 0},
    [TB__FIELD_UINT] = {put_uint, take_uint, 0, sizeof(uint64_t), 0},
    [TB__FIELD_UINT32] = {put_uint32, take_uint32, 0, sizeof(uint32_t), 0},
    [TB__FIELD_FLOAT] = {put_float, take_float, 0, sizeof(double), 0},
    [TB__FIELD_BOOL] = {put_bool, take_bool, 0, sizeof(bool), 0},
    [TB__FIELD_UNLESS] = {put_unless, take_unless, 0, sizeof(bool), 0},
    [TB__FIELD_MAYBE_UINT] = {put_uint, take_uint, 0, sizeof(bool), offsetof(tb__maybe_uint, value)},
    [TB__FIELD_MAYBE_FLOAT] = {put_float, take_float, 0, sizeof(bool), offsetof(tb__maybe_float, value)},
    [TB__FIELD_MAYBE_BOOL] = {put_bool, take_bool, 0, sizeof(bool), offsetof(tb__maybe_bool, value)},
    [TB__FIELD_BIN] = {put_bin, take_bin, offsetof(tb__blob, nbytes), sizeof(size_t), 0},
    [TB__FIELD_MAP] = {put_value, take_map, offsetof(tb__blob, nbytes), sizeof(size_t), 0},
    [TB__FIELD_ARRAY] = {put_value, take_array, offsetof(tb__blob, nbytes), sizeof(size_t), 0},
    [TB__FIELD_INTS] = {put_list, take_list, offsetof(tb__ints, is_set), sizeof(bool), 0},
    [TB__FIELD_TEXTS] = {put_list, take_list, 0, sizeof(size_t), 0},
    [TB__FIELD_TIES] = {put_list, take_list, 0, sizeof(size_t), 0},
    [TB__FIELD_ENTRIES] = {put_list, take_list, 0, sizeof(size_t), 0},
    [TB__FIELD_OUTCOMES] = {put_list, take_list, 0, sizeof(size_t), 0},
    [TB__FIELD_INT] = {put_int, take_int, 0, sizeof(int64_t), 0},
};

static bool field_is_set(const tb__field *field, const void *from) {
    static const uint64_t none = 0;
    _Static_assert(sizeof none >= sizeof(size_t) && sizeof none >= sizeof(void *), "no member is longer");
    const uint8_t *at = (const uint8_t *)from + field->offset + types[field->type].told;
    return memcmp(at, &none, types[field->type].nbytes) != 0;
}

static tb_status put_typed(writer *w, tb__field_type type, const void *at) {
    return types[type].put(w, (const char *)at + types[type].at);
}

static tb_status take_value(reader *r, tb__field_type type, void *at) {
    if (types[type].at > 0)
        *(bool *)at = true;
    return types[type].take(r, (char *)at + types[type].at);
}

static tb_status put_map(writer *w, const tb__schema *schema, const void *from) {
    uint64_t set = 0;
    size_t count = schema->has_type;
    for (size_t i = 0; i < schema->nfields; i++) {
        bool is_set = field_is_set(&schema->fields[i], from);
        set |= (uint64_t)is_set << i;
        count += schema->fields[i].rule != TB__OPTION || is_set;
    }
    TB_TRY(packer_status(msgpack_pack_map(&w->packer, count)));
    if (schema->has_type) {
        TB_TRY(put_str(w, "type", strlen("type")));
        TB_TRY(put_str(w, schema->name, strlen(schema->name)));
    }
    for (size_t i = 0; i < schema->nfields; i++) {
        w->field = &schema->fields[i];
        bool is_there = set >> i & 1;
        if (w->field->rule == TB__OPTION && !is_there)
            continue;
        TB_TRY(put_str(w, w->field->name, strlen(w->field->name)));
        if (w->field->rule == TB__NILABLE && !is_there)
            TB_TRY(packer_status(msgpack_pack_nil(&w->packer)));
        else
            TB_TRY(put_typed(w, w->field->type, (const char *)from + w->field->offset));
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

/* Skips a nil; false if the next value is another. */
static bool accept_nil(tb__cursor *from) {
    if (from->at == from->end || *from->at != 0xc0)
        return false;
    from->at++;
    return true;
}

/* schema->nfields: there is none with this name. */
static size_t find_field(const tb__schema *schema, size_t expected, tb__blob key) {
    for (size_t n = 0, i = expected; n < schema->nfields; n++, i++) {
        i = i < schema->nfields ? i : 0;
        if (tb__blob_is(key, schema->fields[i].name))
            return i;
    }
    return schema->nfields;
}

/* One key and its value. `seen` has a bit for each field, and one for the type. */
static tb_status take_key_value(reader *r, const tb__schema *schema, uint64_t *seen, void *out) {
    static const tb__field type = {.name = "type"};
    tb__value key;
    TB_TRY(tb__value_take(&r->from, &key));
    if (key.type != TB__VALUE_STR)
        return tb__fail(TB_INVALID, "%s: a key is %s; it must be a string", r->map, tb__value_type_name(key.type));
    bool is_type = schema->has_type && tb__blob_is(key.bytes, type.name);
    size_t i = is_type ? schema->nfields : find_field(schema, r->expected, key.bytes);
    if (i == schema->nfields && !is_type)
        return tb__value_skip(&r->from, 1);
    r->field = is_type ? &type : &schema->fields[i];
    r->expected = is_type ? 0 : i + 1;
    if (*seen >> i & 1)
        return tb__fail(TB_INVALID, "%s: %s comes twice", r->map, r->field->name);
    *seen |= UINT64_C(1) << i;
    if (is_type)
        return tb__value_skip(&r->from, 1);
    if (r->field->rule != TB__REQUIRED && accept_nil(&r->from))
        return TB_OK;
    return take_value(r, r->field->type, (char *)out + r->field->offset);
}

tb_status tb__map_decode(const tb__schema *schema, tb__blob bytes, tb__arena *arena, void *out) {
    tb_status status = tb__value_check(bytes);
    return status == TB_OK ? tb__map_decode_checked(schema, bytes, arena, out)
                           : tb__fail_within(status, "%s", schema->name);
}

tb_status tb__map_decode_checked(const tb__schema *schema, tb__blob bytes, tb__arena *arena, void *out) {
    reader r = {.from = tb__cursor_over(bytes), .arena = arena, .map = schema->name};
    tb__value header;
    TB_TRY(tb__value_take(&r.from, &header));
    if (header.type != TB__VALUE_MAP)
        return tb__fail(TB_INVALID, "%s is %s; it must be a map", schema->name, tb__value_type_name(header.type));
    uint64_t seen = 0;
    for (uint32_t i = 0; i < header.count; i++)
        TB_TRY(take_key_value(&r, schema, &seen, out));
    for (size_t i = 0; i < schema->nfields; i++) {
        if (schema->fields[i].rule == TB__REQUIRED && !(seen >> i & 1))
            return tb__fail(TB_INVALID, "%s: %s is missing", schema->name, schema->fields[i].name);
    }
    return TB_OK;
}
