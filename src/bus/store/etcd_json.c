/* Requests and answers, by jansson. */
#include "bus/store/etcd_json.h"

#include "base/mem.h"
#include "base/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

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

/* Each part of a request is NULL if there is no memory; whoever uses it takes it over. */
static json_t *make_base64(const void *data, size_t nbytes) {
    char *text = tb__malloc((nbytes + 2) / 3 * 4 + 1, 1);
    json_t *json = text ? json_stringn(text, (size_t)(base64_encode(text, data, nbytes) - text)) : NULL;
    free(text);
    return json;
}

static json_t *make_key(const char *key) {
    return make_base64(key, strlen(key));
}

static json_t *make_number(int64_t number) {
    return json_sprintf("%" PRId64, number);
}

static json_t *make_revision(uint64_t revision) {
    return make_number(revision > INT64_MAX ? INT64_MAX : (int64_t)revision);
}

/* The first key that does not begin with the prefix any more. */
static json_t *make_range_end(const char *prefix) {
    uint8_t end[TB__STORE_MAX_NAMESPACE + TB__STORE_MAX_KEY + 64];
    size_t length = strlen(prefix);
    memcpy(end, prefix, length + 1);
    while (length > 0 && end[length - 1] == 0xFF)
        length--;
    if (length > 0)
        end[length - 1]++;
    return make_base64(end, length);
}

static json_t *make_range(const char *key) {
    return json_pack("{s:{s:o}}", "request_range", "key", make_key(key));
}

static json_t *make_compare(const char *target, const char *key, const char *field, json_t *value) {
    return json_pack("{s:s,s:s,s:o,s:o}", "target", target, "result", "EQUAL", "key", make_key(key), field, value);
}

static json_t *make_compare_revision(const char *key, uint64_t revision) {
    return make_compare("MOD", key, "mod_revision", make_revision(revision));
}

json_t *tb__etcd_key(const char *key) {
    return json_pack("{s:o}", "key", make_key(key));
}

json_t *tb__etcd_page(const char *prefix, const char *from, int64_t limit, uint64_t revision) {
    return json_pack("{s:o,s:o,s:o,s:o}", "key", make_key(from), "range_end", make_range_end(prefix), "limit",
                     make_number(limit), "revision", make_revision(revision));
}

json_t *tb__etcd_put(const char *key, const void *data, size_t nbytes, int64_t lease) {
    return json_pack("{s:o,s:o,s:o*}", "key", make_key(key), "value", make_base64(data, nbytes), "lease",
                     lease ? make_number(lease) : NULL);
}

json_t *tb__etcd_compare_and_set(const char *key, uint64_t expected, const void *data, size_t nbytes, int64_t lease) {
    return json_pack("{s:[o],s:[{s:o}],s:[o]}", "compare", make_compare_revision(key, expected), "success",
                     "request_put", tb__etcd_put(key, data, nbytes, lease), "failure", make_range(key));
}

json_t *tb__etcd_delete_bound(const char *key, uint64_t revision, int64_t lease) {
    json_t *compare =
        revision ? make_compare_revision(key, revision) : make_compare("LEASE", key, "lease", make_number(lease));
    return json_pack("{s:[o],s:[{s:{s:o}}]}", "compare", compare, "success", "request_delete_range", "key",
                     make_key(key));
}

json_t *tb__etcd_create_guarded(const char *guard, const char *guard_value, const char *key, const void *data,
                                size_t nbytes) {
    return json_pack("{s:[o,o],s:[{s:o}],s:[o,o]}", "compare",
                     make_compare("VALUE", guard, "value", make_key(guard_value)), make_compare_revision(key, 0),
                     "success", "request_put", tb__etcd_put(key, data, nbytes, 0), "failure", make_range(key),
                     make_range(guard));
}

json_t *tb__etcd_take_block(const char *counter, uint64_t expected, const char *next, const char *key,
                            const char *first) {
    return json_pack("{s:[o,o],s:[{s:o},{s:o}],s:[o,o]}", "compare", make_compare_revision(counter, expected),
                     make_compare_revision(key, 0), "success", "request_put",
                     tb__etcd_put(key, first, strlen(first), 0), "request_put",
                     tb__etcd_put(counter, next, strlen(next), 0), "failure", make_range(key), make_range(counter));
}

/* In fragments: what has happened since long ago may be more than one message can carry. */
json_t *tb__etcd_watch(const char *prefix, uint64_t start) {
    return json_pack("{s:{s:o,s:o,s:o,s:b}}", "create_request", "key", make_key(prefix), "range_end",
                     make_range_end(prefix), "start_revision", make_revision(start), "fragment", 1);
}

json_t *tb__etcd_number(const char *field, int64_t number) {
    return json_pack("{s:o}", field, make_number(number));
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
    *out = (tb__store_entry){.key = key + strip};
    if (!json_object_get(kv, TB__ETCD_DELETED))
        out->value = (tb__store_value){.data = data, .nbytes = nbytes, .revision = (uint64_t)revision};
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
    bool is_good = true;
    json_array_foreach(pages, i, page) {
        json_array_foreach(json_object_get(page, "kvs"), k, kv) {
            is_good = is_good && read_entry(kv, strip, &at, &item[n++]);
        }
    }
    if (!is_good) {
        free(item);
        return fail_malformed();
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
