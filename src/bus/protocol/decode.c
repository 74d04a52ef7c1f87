/* MessagePack maps to structs. */
#include "base/text.h"
#include "bus/protocol/codec.h"
#include "bus/protocol/value.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct reader {
    tb__cursor from;
    tb__arena *arena;
    const char *map;
    const tb__field *field;
    const char *list; /* what the array is whose items are being read; NULL: none is */
    size_t expected;  /* the field that is mostly next: encoders keep the schema's order */
} reader;

static void *field_address(void *out, const tb__field *field) {
    return (char *)out + field->offset;
}

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

static tb_status take_uint(reader *r, uint64_t max, uint64_t *out) {
    tb__value value;
    TB_TRY(take_typed(r, TB__VALUE_UINT, "a number that is not negative", &value));
    if (max && value.positive > max)
        return tb__fail(TB_TOO_BIG, "%s: %s is %" PRIu64 "; it is at most %" PRIu64, r->map, r->field->name,
                        value.positive, max);
    *out = value.positive;
    return TB_OK;
}

static tb_status take_field_float(reader *r, double *out) {
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

static tb_status take_bool(reader *r, bool *out) {
    tb__value value;
    TB_TRY(take_typed(r, TB__VALUE_BOOL, "a bool", &value));
    *out = value.is_true;
    return TB_OK;
}

static tb_status take_choice(reader *r, unsigned *out) {
    const char *text;
    TB_TRY(take_string(r, TB__MAX_TEXT, &text));
    for (unsigned i = 0; r->field->choices[i]; i++) {
        if (strcmp(r->field->choices[i], text) == 0) {
            *out = i + (r->field->rule == TB__OPTION);
            return TB_OK;
        }
    }
    char list[256];
    write_choices(r->field->choices, list, sizeof list);
    return tb__fail(TB_INVALID, "%s: %s is '%.40s'; it must be %s", r->map, r->field->name, text, list);
}

static tb_status take_dtype(reader *r, tb_dtype *out) {
    const char *text;
    TB_TRY(take_string(r, TB__MAX_TEXT, &text));
    tb_status status = tb_dtype_parse(text, out);
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

static tb_status take_int(reader *r, int64_t *out) {
    tb__value value;
    TB_TRY(tb__value_take(&r->from, &value));
    if (value.type != TB__VALUE_NEGATIVE && value.type != TB__VALUE_UINT)
        return wrong_type(r, &value, "a number");
    if (value.type == TB__VALUE_UINT && value.positive > INT64_MAX)
        return tb__fail(TB_TOO_BIG, "%s: %s has %" PRIu64 " in it", r->map, r->field->name, value.positive);
    *out = value.type == TB__VALUE_NEGATIVE ? value.negative : (int64_t)value.positive;
    return TB_OK;
}

static tb_status take_list(reader *r, const tb__list *list, void *out);

static tb_status take_value(reader *r, tb__field_type type, void *at) {
    const tb__list *list = tb__list_of(type);
    if (list)
        return take_list(r, list, at);
    switch (type) {
    case TB__FIELD_TEXT:
        return take_string(r, TB__MAX_TEXT, at);
    case TB__FIELD_SENTENCE:
        return take_string(r, TB__MAX_SENTENCE, at);
    case TB__FIELD_CHOICE:
        return take_choice(r, at);
    case TB__FIELD_DTYPE:
        return take_dtype(r, at);
    case TB__FIELD_STATUS: {
        uint64_t code;
        TB_TRY(take_uint(r, r->field->max, &code));
        *(tb_status *)at = (tb_status) - (int)code;
        return TB_OK;
    }
    case TB__FIELD_UINT:
        return take_uint(r, r->field->type == type ? r->field->max : 0, at);
    case TB__FIELD_UINT32: {
        uint64_t value;
        TB_TRY(take_uint(r, r->field->max, &value));
        *(uint32_t *)at = (uint32_t)value;
        return TB_OK;
    }
    case TB__FIELD_FLOAT:
        return take_field_float(r, at);
    case TB__FIELD_INT:
        return take_int(r, at);
    case TB__FIELD_BOOL:
        return take_bool(r, at);
    case TB__FIELD_UNLESS: {
        bool value;
        TB_TRY(take_bool(r, &value));
        *(bool *)at = !value;
        return TB_OK;
    }
    case TB__FIELD_MAYBE_UINT:
        ((tb__maybe_uint *)at)->is_set = true;
        return take_uint(r, r->field->max, &((tb__maybe_uint *)at)->value);
    case TB__FIELD_MAYBE_FLOAT:
        ((tb__maybe_float *)at)->is_set = true;
        return take_field_float(r, &((tb__maybe_float *)at)->value);
    case TB__FIELD_MAYBE_BOOL:
        ((tb__maybe_bool *)at)->is_set = true;
        return take_bool(r, &((tb__maybe_bool *)at)->value);
    case TB__FIELD_BIN: {
        tb__value value;
        TB_TRY(take_typed(r, TB__VALUE_BIN, "bytes", &value));
        *(tb__blob *)at = value.bytes;
        return TB_OK;
    }
    case TB__FIELD_MAP:
        return take_container(r, TB__VALUE_MAP, "a map", at);
    case TB__FIELD_ARRAY:
        return take_container(r, TB__VALUE_ARRAY, "an array", at);
    default:
        return tb__fail(TB_INTERNAL, "%s: %s has no type", r->map, r->field->name);
    }
}

/* The number of items was compared with the available bytes. */
static tb_status take_list(reader *r, const tb__list *list, void *out) {
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
    memcpy(out, &all, sizeof all);
    if (r->field->type == TB__FIELD_INTS)
        ((tb__ints *)out)->is_set = true;
    return TB_OK;
}

/* Skips a nil; false if the next value is another. */
static bool accept_nil(tb__cursor *from) {
    if (from->at == from->end || *from->at != 0xc0)
        return false;
    from->at++;
    return true;
}

static bool is_called(tb__blob key, const char *name) {
    return strlen(name) == key.nbytes && memcmp(name, key.data, key.nbytes) == 0;
}

/* schema->nfields: there is none with this name. */
static size_t find_field(const tb__schema *schema, size_t expected, tb__blob key) {
    for (size_t n = 0; n < schema->nfields; n++) {
        size_t i = (expected + n) % schema->nfields;
        if (is_called(key, schema->fields[i].name))
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
    bool is_type = schema->has_type && is_called(key.bytes, type.name);
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
    return take_value(r, r->field->type, field_address(out, r->field));
}

tb_status tb__map_decode(const tb__schema *schema, tb__blob bytes, tb__arena *arena, void *out) {
    tb_status status = tb__value_check(bytes);
    if (status != TB_OK)
        return tb__fail_within(status, "%s", schema->name);
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
