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
                    wanted);
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

static tb_status take_field_text(reader *r, const char **out) {
    return take_string(r, r->field->type == TB__FIELD_SENTENCE ? TB__MAX_SENTENCE : TB__MAX_TEXT, out);
}

static tb_status take_uint(reader *r, uint64_t *out) {
    tb__value value;
    TB_TRY(take_typed(r, TB__VALUE_UINT, "a number that is not negative", &value));
    if (r->field->max && value.positive > r->field->max)
        return tb__fail(TB_TOO_BIG, "%s: %s is %" PRIu64 "; it is at most %" PRIu64, r->map, r->field->name,
                        value.positive, r->field->max);
    *out = value.positive;
    return TB_OK;
}

static tb_status take_field_float(reader *r, double *out) {
    tb__value value;
    TB_TRY(take_typed(r, TB__VALUE_FLOAT, "a float", &value));
    if (!isfinite(value.number))
        return tb__fail(TB_INVALID, "%s: %s is not finite", r->map, r->field->name);
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
    TB_TRY(take_field_text(r, &text));
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
    TB_TRY(take_field_text(r, &text));
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

/* An array's header, and room for its items. How many it claims was compared with the bytes that are there, of which
 * each item has at least `least`. */
static tb_status take_field_array(reader *r, size_t size, size_t least, size_t *count, void **items) {
    tb__value value;
    TB_TRY(take_typed(r, TB__VALUE_ARRAY, "an array", &value));
    if (value.count > TB__MAX_ITEMS)
        return tb__fail(TB_TOO_BIG, "%s: %s has %" PRIu32 " items; at most %d are allowed", r->map, r->field->name,
                        value.count, TB__MAX_ITEMS);
    if (value.count > (size_t)(r->from.end - r->from.at) / least)
        return tb__fail(TB_INVALID, "%s: %s has fewer than %" PRIu32 " items of its kind", r->map, r->field->name,
                        value.count);
    *count = value.count;
    *items = NULL;
    if (value.count > 0)
        *items = tb__arena_alloc(r->arena, value.count, size);
    return value.count == 0 || *items ? TB_OK : TB_NO_MEMORY;
}

/* The header of an item of an array, which is an array of so many. */
static tb_status take_item(reader *r, uint32_t count, const char *wanted) {
    tb__value value;
    TB_TRY(take_typed(r, TB__VALUE_ARRAY, wanted, &value));
    if (value.count != count)
        return tb__fail(TB_INVALID, "%s: %s has an item of %" PRIu32 "; it must be %s", r->map, r->field->name,
                        value.count, wanted);
    return TB_OK;
}

static tb_status take_entries(reader *r, tb__entries *out) {
    tb__entry *item;
    size_t count;
    TB_TRY(take_field_array(r, sizeof *item, 4, &count, (void **)&item));
    for (size_t i = 0; i < count; i++) {
        tb__value payload;
        TB_TRY(take_item(r, 2, "an array of [str, bin]"));
        TB_TRY(take_field_text(r, &item[i].pair_name));
        TB_TRY(take_typed(r, TB__VALUE_BIN, "an array of [str, bin]", &payload));
        item[i].payload = payload.bytes;
    }
    *out = (tb__entries){.count = count, .item = item};
    return TB_OK;
}

static tb_status take_ties(reader *r, tb__ties *out) {
    tb_tie *item;
    size_t count;
    TB_TRY(take_field_array(r, sizeof *item, 3, &count, (void **)&item));
    for (size_t i = 0; i < count; i++) {
        TB_TRY(take_item(r, 2, "an array of [str, str]"));
        TB_TRY(take_field_text(r, &item[i].name));
        TB_TRY(take_field_text(r, &item[i].canonical));
    }
    *out = (tb__ties){.count = count, .item = item};
    return TB_OK;
}

static tb_status take_status(reader *r, tb_status *out) {
    uint64_t code;
    TB_TRY(take_uint(r, &code));
    *out = (tb_status) - (int)code;
    return TB_OK;
}

/* The field's `max` bounds the statuses. */
static tb_status take_outcomes(reader *r, tb__outcomes *out) {
    static const char *const wanted = "an array of [str, uint, str, uint, bool]";
    tb__outcome *item;
    size_t count;
    TB_TRY(take_field_array(r, sizeof *item, 6, &count, (void **)&item));
    for (size_t i = 0; i < count; i++) {
        tb__value version;
        TB_TRY(take_item(r, 5, wanted));
        TB_TRY(take_field_text(r, &item[i].pair_name));
        TB_TRY(take_status(r, &item[i].status));
        TB_TRY(take_string(r, TB__MAX_SENTENCE, &item[i].message));
        TB_TRY(take_typed(r, TB__VALUE_UINT, wanted, &version));
        item[i].version = version.positive;
        TB_TRY(take_bool(r, &item[i].is_torn));
    }
    *out = (tb__outcomes){.count = count, .item = item};
    return TB_OK;
}

static tb_status take_texts(reader *r, tb__texts *out) {
    const char **item;
    size_t count;
    TB_TRY(take_field_array(r, sizeof *item, 1, &count, (void **)&item));
    for (size_t i = 0; i < count; i++)
        TB_TRY(take_field_text(r, &item[i]));
    *out = (tb__texts){.count = count, .item = item};
    return TB_OK;
}

static tb_status take_ints(reader *r, tb__ints *out) {
    int64_t *item;
    size_t count;
    TB_TRY(take_field_array(r, sizeof *item, 1, &count, (void **)&item));
    for (size_t i = 0; i < count; i++) {
        tb__value value;
        TB_TRY(tb__value_take(&r->from, &value));
        if (value.type == TB__VALUE_NEGATIVE)
            item[i] = value.negative;
        else if (value.type != TB__VALUE_UINT)
            return wrong_type(r, &value, "an array of numbers");
        else if (value.positive > INT64_MAX)
            return tb__fail(TB_TOO_BIG, "%s: %s has %" PRIu64 " in it", r->map, r->field->name, value.positive);
        else
            item[i] = (int64_t)value.positive;
    }
    *out = (tb__ints){.count = count, .item = item, .is_set = true};
    return TB_OK;
}

static tb_status take_field(reader *r, void *at) {
    switch (r->field->type) {
    case TB__FIELD_TEXT:
    case TB__FIELD_SENTENCE:
        return take_field_text(r, at);
    case TB__FIELD_CHOICE:
        return take_choice(r, at);
    case TB__FIELD_DTYPE:
        return take_dtype(r, at);
    case TB__FIELD_STATUS:
        return take_status(r, at);
    case TB__FIELD_UINT:
        return take_uint(r, at);
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
        return take_uint(r, &((tb__maybe_uint *)at)->value);
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
    case TB__FIELD_INTS:
        return take_ints(r, at);
    case TB__FIELD_TEXTS:
        return take_texts(r, at);
    case TB__FIELD_TIES:
        return take_ties(r, at);
    case TB__FIELD_ENTRIES:
        return take_entries(r, at);
    case TB__FIELD_OUTCOMES:
        return take_outcomes(r, at);
    }
    return tb__fail(TB_INTERNAL, "%s: %s has no type", r->map, r->field->name);
}

/* Skips a nil; false if the next value is another. */
static bool accept_nil(tb__cursor *from) {
    if (from->at == from->end || *from->at != 0xc0)
        return false;
    from->at++;
    return true;
}

static size_t find_field(const tb__schema *schema, tb__blob key) {
    size_t i = 0;
    while (i < schema->nfields &&
           !(strlen(schema->fields[i].name) == key.nbytes && memcmp(schema->fields[i].name, key.data, key.nbytes) == 0))
        i++;
    return i;
}

/* One key and its value. `seen` has a bit for each field, and one for the type. */
static tb_status take_key_value(reader *r, const tb__schema *schema, uint64_t *seen, void *out) {
    static const tb__field type = {.name = "type"};
    tb__value key;
    TB_TRY(tb__value_take(&r->from, &key));
    if (key.type != TB__VALUE_STR)
        return tb__fail(TB_INVALID, "%s: a key is %s; it must be a string", r->map, tb__value_type_name(key.type));
    size_t i = find_field(schema, key.bytes);
    bool is_type = schema->has_type && key.bytes.nbytes == 4 && memcmp(key.bytes.data, "type", 4) == 0;
    if (i == schema->nfields && !is_type)
        return tb__value_skip(&r->from, 1);
    r->field = is_type ? &type : &schema->fields[i];
    if (*seen >> i & 1)
        return tb__fail(TB_INVALID, "%s: %s comes twice", r->map, r->field->name);
    *seen |= UINT64_C(1) << i;
    if (is_type)
        return tb__value_skip(&r->from, 1);
    if (r->field->rule != TB__REQUIRED && accept_nil(&r->from))
        return TB_OK;
    return take_field(r, field_address(out, r->field));
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
        if (schema->fields[i].rule != TB__OPTION && !(seen >> i & 1))
            return tb__fail(TB_INVALID, "%s: %s is missing", schema->name, schema->fields[i].name);
    }
    return TB_OK;
}
