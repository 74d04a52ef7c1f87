/* Requests are put together as text: base64 and numbers need no escapes. Answers are parsed by jansson. */
#include "bus/store/etcd_json.h"

#include "base/mem.h"
#include "base/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

static size_t encoded_size(size_t nbytes) {
    return (nbytes + 2) / 3 * 4;
}

static char *base64_encode(char *at, const uint8_t *data, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += 3) {
        size_t n = nbytes - i < 3 ? nbytes - i : 3;
        uint32_t bits = (uint32_t)data[i] << 16;
        if (n > 1)
            bits |= (uint32_t)data[i + 1] << 8;
        if (n > 2)
            bits |= data[i + 2];
        *at++ = digits[bits >> 18];
        *at++ = digits[bits >> 12 & 63];
        *at++ = n > 1 ? digits[bits >> 6 & 63] : '=';
        *at++ = n > 2 ? digits[bits & 63] : '=';
    }
    return at;
}

static int digit_value(char c) {
    if (c >= 'A' && c <= 'Z')
        return c - 'A';
    if (c >= 'a' && c <= 'z')
        return c - 'a' + 26;
    if (c >= '0' && c <= '9')
        return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* There is room for 3 bytes for every 4 digits. */
static bool base64_decode(const char *text, size_t length, char *out, size_t *nbytes) {
    uint32_t bits = 0;
    int nbits = 0;
    size_t count = 0;
    while (length > 0 && text[length - 1] == '=')
        length--;
    for (size_t i = 0; i < length; i++) {
        int value = digit_value(text[i]);
        if (value < 0)
            return false;
        bits = bits << 6 | (uint32_t)value;
        nbits += 6;
        if (nbits >= 8) {
            nbits -= 8;
            out[count++] = (char)(uint8_t)(bits >> nbits);
        }
    }
    *nbytes = count;
    return true;
}

static bool append_json(tb__bytes *out, const char *text) {
    size_t length = strlen(text);
    if (!tb__vec_reserve(out, length))
        return false;
    memcpy(out->item + out->count, text, length);
    out->count += length;
    return true;
}

static bool append_base64(tb__bytes *out, const char *field, const void *data, size_t nbytes) {
    if (!append_json(out, "\"") || !append_json(out, field) || !append_json(out, "\":\"") ||
        !tb__vec_reserve(out, encoded_size(nbytes)))
        return false;
    char *begin = (char *)out->item + out->count;
    out->count += (size_t)(base64_encode(begin, data, nbytes) - begin);
    return append_json(out, "\"");
}

static bool append_number(tb__bytes *out, const char *field, int64_t number) {
    char text[80];
    snprintf(text, sizeof text, "\"%s\":\"%" PRId64 "\"", field, number);
    return append_json(out, text);
}

/* The first key that does not begin with the prefix any more. */
static bool append_range_end(tb__bytes *out, const char *prefix) {
    uint8_t end[TB__STORE_MAX_NAMESPACE + TB__STORE_MAX_KEY + 64];
    size_t length = strlen(prefix);
    memcpy(end, prefix, length + 1);
    while (length > 0 && end[length - 1] == 0xFF)
        length--;
    if (length > 0)
        end[length - 1]++;
    return append_json(out, ",") && append_base64(out, "range_end", end, length);
}

static bool append_key(tb__bytes *out, const char *key, tb__etcd_scope scope) {
    return append_base64(out, "key", key, strlen(key)) && (scope == TB__ETCD_KEY || append_range_end(out, key));
}

static bool append_put(tb__bytes *out, const char *key, const void *data, size_t nbytes, int64_t lease) {
    return append_json(out, "{") && append_key(out, key, TB__ETCD_KEY) && append_json(out, ",") &&
           append_base64(out, "value", data, nbytes) &&
           (lease == 0 || (append_json(out, ",") && append_number(out, "lease", lease))) && append_json(out, "}");
}

static int64_t clamp_revision(uint64_t revision) {
    return revision > INT64_MAX ? INT64_MAX : (int64_t)revision;
}

static tb_status finish_request(tb__bytes *out, bool is_made) {
    if (is_made)
        return TB_OK;
    free(out->item);
    *out = (tb__bytes){0};
    return TB_NO_MEMORY;
}

tb_status tb__etcd_range(const char *key, tb__etcd_scope scope, tb__bytes *out) {
    *out = (tb__bytes){0};
    return finish_request(out, append_json(out, "{") && append_key(out, key, scope) && append_json(out, "}"));
}

tb_status tb__etcd_page(const char *prefix, const char *from, int64_t limit, uint64_t revision, tb__bytes *out) {
    *out = (tb__bytes){0};
    return finish_request(out, append_json(out, "{") && append_key(out, from, TB__ETCD_KEY) &&
                                   append_range_end(out, prefix) && append_json(out, ",") &&
                                   append_number(out, "limit", limit) && append_json(out, ",") &&
                                   append_number(out, "revision", clamp_revision(revision)) && append_json(out, "}"));
}

tb_status tb__etcd_put(const char *key, const void *data, size_t nbytes, int64_t lease, tb__bytes *out) {
    *out = (tb__bytes){0};
    return finish_request(out, append_put(out, key, data, nbytes, lease));
}

static bool append_compare_revision(tb__bytes *out, const char *key, uint64_t revision) {
    return append_json(out, "{\"target\":\"MOD\",\"result\":\"EQUAL\",") && append_key(out, key, TB__ETCD_KEY) &&
           append_json(out, ",") && append_number(out, "mod_revision", clamp_revision(revision)) &&
           append_json(out, "}");
}

tb_status tb__etcd_compare_and_set(const char *key, uint64_t expected, const void *data, size_t nbytes, int64_t lease,
                                   tb__bytes *out) {
    *out = (tb__bytes){0};
    return finish_request(out, append_json(out, "{\"compare\":[") && append_compare_revision(out, key, expected) &&
                                   append_json(out, "],\"success\":[{\"request_put\":") &&
                                   append_put(out, key, data, nbytes, lease) &&
                                   append_json(out, "}],\"failure\":[{\"request_range\":{") &&
                                   append_key(out, key, TB__ETCD_KEY) && append_json(out, "}}]}"));
}

static bool append_compare_value(tb__bytes *out, const char *key, const char *value) {
    return append_json(out, "{\"target\":\"VALUE\",\"result\":\"EQUAL\",") && append_key(out, key, TB__ETCD_KEY) &&
           append_json(out, ",") && append_base64(out, "value", value, strlen(value)) && append_json(out, "}");
}

/* The end of a transaction that creates a key, after the comparison of another one, which may be written, too. */
static bool append_creation(tb__bytes *out, const char *key, const void *data, size_t nbytes, const char *other,
                            const char *other_value) {
    return append_json(out, ",") && append_compare_revision(out, key, 0) &&
           append_json(out, "],\"success\":[{\"request_put\":") && append_put(out, key, data, nbytes, 0) &&
           (!other_value ||
            (append_json(out, "},{\"request_put\":") && append_put(out, other, other_value, strlen(other_value), 0))) &&
           append_json(out, "}],\"failure\":[{\"request_range\":{") && append_key(out, key, TB__ETCD_KEY) &&
           append_json(out, "}},{\"request_range\":{") && append_key(out, other, TB__ETCD_KEY) &&
           append_json(out, "}}]}");
}

tb_status tb__etcd_create_guarded(const char *guard, const char *guard_value, const char *key, const void *data,
                                  size_t nbytes, tb__bytes *out) {
    *out = (tb__bytes){0};
    return finish_request(out, append_json(out, "{\"compare\":[") && append_compare_value(out, guard, guard_value) &&
                                   append_creation(out, key, data, nbytes, guard, NULL));
}

tb_status tb__etcd_take_block(const char *counter, uint64_t expected, const char *next, const char *key,
                              const char *first, tb__bytes *out) {
    *out = (tb__bytes){0};
    return finish_request(out, append_json(out, "{\"compare\":[") && append_compare_revision(out, counter, expected) &&
                                   append_creation(out, key, first, strlen(first), counter, next));
}

tb_status tb__etcd_watch(const char *key, tb__etcd_scope scope, uint64_t start, tb__bytes *out) {
    *out = (tb__bytes){0};
    /* In fragments: what has happened since long ago may be more than one message can carry. */
    return finish_request(out, append_json(out, "{\"create_request\":{") && append_key(out, key, scope) &&
                                   append_json(out, ",") &&
                                   append_number(out, "start_revision", clamp_revision(start)) &&
                                   append_json(out, ",\"fragment\":true}}"));
}

tb_status tb__etcd_number(const char *field, int64_t number, tb__bytes *out) {
    *out = (tb__bytes){0};
    return finish_request(out, append_json(out, "{") && append_number(out, field, number) && append_json(out, "}"));
}

int64_t tb__etcd_read_number(const json_t *object, const char *field) {
    const json_t *value = json_object_get(object, field);
    int64_t number = 0;
    if (json_is_integer(value))
        return json_integer_value(value);
    const char *at = json_string_value(value);
    return at && tb__read_int(&at, &number) && !*at ? number : 0;
}

uint64_t tb__etcd_read_revision(const json_t *reply) {
    int64_t revision = tb__etcd_read_number(json_object_get(reply, "header"), "revision");
    return revision < 0 ? 0 : (uint64_t)revision;
}

/* Digits of a field that holds bytes. */
static const char *base64_field(const json_t *kv, const char *field, size_t *length) {
    const json_t *value = json_object_get(kv, field);
    *length = json_string_length(value);
    return json_is_string(value) ? json_string_value(value) : "";
}

static tb_status fail_malformed(void) {
    return tb__fail(TB_IO, "etcd's answer has an entry without mod_revision, or whose key or value is not base64");
}

tb_status tb__etcd_read_value(const json_t *kv, tb__store_value *out) {
    int64_t revision = tb__etcd_read_number(kv, "mod_revision");
    if (!kv) {
        *out = (tb__store_value){0};
        return TB_OK;
    }
    size_t length;
    const char *text = base64_field(kv, "value", &length);
    tb__store_value value = {.revision = (uint64_t)revision};
    if (revision < 1)
        return fail_malformed();
    char *data = tb__malloc(length / 4 * 3 + 4, 1);
    if (!data)
        return TB_NO_MEMORY;
    if (!base64_decode(text, length, data, &value.nbytes)) {
        free(data);
        return fail_malformed();
    }
    data[value.nbytes] = '\0';
    value.data = data;
    *out = value;
    return TB_OK;
}

/* Writes the entry's bytes at `at`, which advances. */
static bool read_entry(const json_t *kv, size_t strip, char **at, tb__store_entry *out) {
    size_t key_length, length, key_nbytes, nbytes;
    const char *key_text = base64_field(kv, "key", &key_length), *text = base64_field(kv, "value", &length);
    int64_t revision = tb__etcd_read_number(kv, "mod_revision");
    char *key = *at, *data;
    if (!base64_decode(key_text, key_length, key, &key_nbytes) || key_nbytes < strip || revision < 1)
        return false;
    key[key_nbytes] = '\0';
    data = key + key_nbytes + 1;
    if (!base64_decode(text, length, data, &nbytes))
        return false;
    data[nbytes] = '\0';
    *at = data + nbytes + 1;
    *out = (tb__store_entry){.key = key + strip,
                             .value = {.data = data, .nbytes = nbytes, .revision = (uint64_t)revision}};
    return true;
}

tb_status tb__etcd_measure(const json_t *pages, size_t *count, size_t *nbytes) {
    size_t i, k, key_length, length;
    const json_t *page, *kv;
    *count = *nbytes = 0;
    json_array_foreach(pages, i, page) {
        json_array_foreach(json_object_get(page, "kvs"), k, kv) {
            base64_field(kv, "key", &key_length);
            base64_field(kv, "value", &length);
            *nbytes += key_length / 4 * 3 + length / 4 * 3 + 8;
            (*count)++;
        }
    }
    if (*nbytes > TB__STORE_MAX_REPLY)
        return tb__fail(TB_TOO_BIG, "%zu keys with %zu bytes; a list has at most %d: ask for longer prefixes", *count,
                        *nbytes, TB__STORE_MAX_REPLY);
    return TB_OK;
}

tb_status tb__etcd_read_entries(const json_t *pages, size_t strip, uint64_t revision, tb__store_entries *out) {
    size_t count, nbytes, i, k;
    const json_t *page, *kv;
    TB_TRY(tb__etcd_measure(pages, &count, &nbytes));
    tb__store_entry *item = tb__malloc(1, count * sizeof *item + nbytes);
    if (!item)
        return TB_NO_MEMORY;
    char *at = (char *)(item + count);
    size_t n = 0;
    json_array_foreach(pages, i, page){
        json_array_foreach(json_object_get(page, "kvs"), k, kv){if (!read_entry(kv, strip, &at, &item[n++])){free(item);
    return fail_malformed();
}
}
}
*out = (tb__store_entries){.count = count, .item = item, .revision = revision};
return TB_OK;
}

bool tb__etcd_read_last_key(const json_t *page, char *out, size_t room) {
    const json_t *kvs = json_object_get(page, "kvs");
    size_t count = json_array_size(kvs), length, nbytes;
    const char *text = base64_field(count > 0 ? json_array_get(kvs, count - 1) : NULL, "key", &length);
    if (length == 0 || length / 4 * 3 + 4 > room || !base64_decode(text, length, out, &nbytes))
        return false;
    out[nbytes] = '\0';
    return true;
}
