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

/* The packer's own errors are of no interest: it fails where this does, and then the sentence is set. */
static int append_packed(void *data, const char *bytes, size_t nbytes) {
    tb__bytes *out = data;
    if (!tb__vec_reserve(out, nbytes))
        return -1;
    if (nbytes > 0)
        memcpy(out->item + out->count, bytes, nbytes);
    out->count += nbytes;
    return 0;
}

static tb_status packer_status(int result) {
    return result == 0 ? TB_OK : TB_NO_MEMORY;
}

static const void *const_field_address(const void *from, const tb__field *field) {
    return (const char *)from + field->offset;
}

/* Whether there is something to write other than nil or the default. */
static bool field_is_set(const tb__field *field, const void *at) {
    switch (field->type) {
    case TB__FIELD_TEXT:
    case TB__FIELD_SENTENCE:
        return *(const char *const *)at != NULL;
    case TB__FIELD_CHOICE:
        return *(const unsigned *)at != 0;
    case TB__FIELD_DTYPE:
        return *(const tb_dtype *)at != TB_DTYPE_NONE;
    case TB__FIELD_STATUS:
        return *(const tb_status *)at != TB_OK;
    case TB__FIELD_UINT:
        return *(const uint64_t *)at != 0;
    case TB__FIELD_BOOL:
    case TB__FIELD_UNLESS:
        return *(const bool *)at;
    case TB__FIELD_MAYBE_UINT:
        return ((const tb__maybe_uint *)at)->is_set;
    case TB__FIELD_MAYBE_FLOAT:
        return ((const tb__maybe_float *)at)->is_set;
    case TB__FIELD_MAYBE_BOOL:
        return ((const tb__maybe_bool *)at)->is_set;
    case TB__FIELD_BIN:
    case TB__FIELD_MAP:
    case TB__FIELD_ARRAY:
        return ((const tb__blob *)at)->nbytes > 0;
    case TB__FIELD_INTS:
        return ((const tb__ints *)at)->is_set;
    case TB__FIELD_TEXTS:
        return ((const tb__texts *)at)->count > 0;
    case TB__FIELD_TIES:
        return ((const tb__ties *)at)->count > 0;
    case TB__FIELD_ENTRIES:
        return ((const tb__entries *)at)->count > 0;
    case TB__FIELD_OUTCOMES:
        return ((const tb__outcomes *)at)->count > 0;
    }
    return false;
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

/* Sentences quote what others wrote, so they may be anything, and must get through all the same. */
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

static tb_status put_uint(writer *w, uint64_t value) {
    if (w->field->max && value > w->field->max)
        return tb__fail(TB_TOO_BIG, "%s: %s is %" PRIu64 "; it is at most %" PRIu64, w->map, w->field->name, value,
                        w->field->max);
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

static tb_status put_count(writer *w, size_t count) {
    if (count > TB__MAX_ITEMS)
        return tb__fail(TB_TOO_BIG, "%s: %s has %zu items; at most %d are allowed", w->map, w->field->name, count,
                        TB__MAX_ITEMS);
    return packer_status(msgpack_pack_array(&w->packer, count));
}

static tb_status put_entries(writer *w, const tb__entries *entries) {
    TB_TRY(put_count(w, entries->count));
    for (size_t i = 0; i < entries->count; i++) {
        TB_TRY(packer_status(msgpack_pack_array(&w->packer, 2)));
        TB_TRY(put_text(w, entries->item[i].pair_name));
        TB_TRY(put_bin(w, entries->item[i].payload));
    }
    return TB_OK;
}

static tb_status put_ties(writer *w, const tb__ties *ties) {
    TB_TRY(put_count(w, ties->count));
    for (size_t i = 0; i < ties->count; i++) {
        TB_TRY(packer_status(msgpack_pack_array(&w->packer, 2)));
        TB_TRY(put_text(w, ties->item[i].name));
        TB_TRY(put_text(w, ties->item[i].canonical));
    }
    return TB_OK;
}

static tb_status put_status(writer *w, tb_status status) {
    return put_uint(w, (uint64_t) - (int64_t)status);
}

static tb_status put_outcomes(writer *w, const tb__outcomes *outcomes) {
    TB_TRY(put_count(w, outcomes->count));
    for (size_t i = 0; i < outcomes->count; i++) {
        const tb__outcome *o = &outcomes->item[i];
        TB_TRY(packer_status(msgpack_pack_array(&w->packer, 5)));
        TB_TRY(put_text(w, o->pair_name));
        TB_TRY(put_status(w, o->status));
        TB_TRY(put_sentence(w, o->message));
        TB_TRY(packer_status(msgpack_pack_uint64(&w->packer, o->version)));
        TB_TRY(put_bool(w, o->is_torn));
    }
    return TB_OK;
}

static tb_status put_texts(writer *w, const tb__texts *texts) {
    TB_TRY(put_count(w, texts->count));
    for (size_t i = 0; i < texts->count; i++)
        TB_TRY(put_text(w, texts->item[i]));
    return TB_OK;
}

static tb_status put_ints(writer *w, const tb__ints *ints) {
    TB_TRY(put_count(w, ints->count));
    for (size_t i = 0; i < ints->count; i++)
        TB_TRY(packer_status(msgpack_pack_int64(&w->packer, ints->item[i])));
    return TB_OK;
}

static tb_status put_value(writer *w, tb__blob value) {
    if (value.nbytes == 0)
        return tb__fail(TB_INVALID, "%s: %s is not set", w->map, w->field->name);
    return packer_status(append_packed(w->packer.data, (const char *)value.data, value.nbytes));
}

static tb_status put_field(writer *w, const void *at) {
    switch (w->field->type) {
    case TB__FIELD_TEXT:
        return put_text(w, *(const char *const *)at);
    case TB__FIELD_SENTENCE:
        return put_sentence(w, *(const char *const *)at);
    case TB__FIELD_CHOICE:
        return put_choice(w, *(const unsigned *)at);
    case TB__FIELD_DTYPE:
        return put_text(w, tb_dtype_name(*(const tb_dtype *)at));
    case TB__FIELD_STATUS:
        return put_status(w, *(const tb_status *)at);
    case TB__FIELD_UINT:
        return put_uint(w, *(const uint64_t *)at);
    case TB__FIELD_BOOL:
        return put_bool(w, *(const bool *)at);
    case TB__FIELD_UNLESS:
        return put_bool(w, !*(const bool *)at);
    case TB__FIELD_MAYBE_UINT:
        return put_uint(w, ((const tb__maybe_uint *)at)->value);
    case TB__FIELD_MAYBE_FLOAT:
        return put_float(w, ((const tb__maybe_float *)at)->value);
    case TB__FIELD_MAYBE_BOOL:
        return put_bool(w, ((const tb__maybe_bool *)at)->value);
    case TB__FIELD_BIN:
        return put_bin(w, *(const tb__blob *)at);
    case TB__FIELD_MAP:
    case TB__FIELD_ARRAY:
        return put_value(w, *(const tb__blob *)at);
    case TB__FIELD_INTS:
        return put_ints(w, at);
    case TB__FIELD_TEXTS:
        return put_texts(w, at);
    case TB__FIELD_TIES:
        return put_ties(w, at);
    case TB__FIELD_ENTRIES:
        return put_entries(w, at);
    case TB__FIELD_OUTCOMES:
        return put_outcomes(w, at);
    }
    return tb__fail(TB_INTERNAL, "%s: %s has no type", w->map, w->field->name);
}

static tb_status put_map(writer *w, const tb__schema *schema, const void *from) {
    size_t count = schema->has_type;
    for (size_t i = 0; i < schema->nfields; i++)
        count += schema->fields[i].rule != TB__OPTION ||
                 field_is_set(&schema->fields[i], const_field_address(from, &schema->fields[i]));
    TB_TRY(packer_status(msgpack_pack_map(&w->packer, count)));
    if (schema->has_type) {
        TB_TRY(put_str(w, "type", strlen("type")));
        TB_TRY(put_str(w, schema->name, strlen(schema->name)));
    }
    for (size_t i = 0; i < schema->nfields; i++) {
        w->field = &schema->fields[i];
        const void *at = const_field_address(from, w->field);
        bool is_there = field_is_set(w->field, at);
        if (w->field->rule == TB__OPTION && !is_there)
            continue;
        TB_TRY(put_str(w, w->field->name, strlen(w->field->name)));
        if (w->field->rule == TB__NILABLE && !is_there)
            TB_TRY(packer_status(msgpack_pack_nil(&w->packer)));
        else
            TB_TRY(put_field(w, at));
    }
    return TB_OK;
}

tb_status tb__map_encode(const tb__schema *schema, const void *from, tb__bytes *out) {
    size_t start = out->count;
    writer w = {.map = schema->name};
    msgpack_packer_init(&w.packer, out, append_packed);
    tb_status status = put_map(&w, schema, from);
    if (status != TB_OK)
        out->count = start;
    return status;
}
