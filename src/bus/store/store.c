/* The store's interface: finds the implementation for a URL, checks what callers pass, puts the namespace before keys
 * and takes it off again. */
#include "bus/store/store.h"

#include "base/mem.h"
#include "bus/store/address.h"

#include <string.h>

struct tb__store {
    const tb__store_ops *ops;
    void *context;
    size_t prefix_length;
    char prefix[TB__STORE_MAX_NAMESPACE + 2];
};

static const struct {
    const char *scheme;
    tb__store_open_fn open;
    bool is_embedded;
} schemes[] = {
    {"unix:", tb__socket_store_open, true},
    {"tcp:", tb__socket_store_open, true},
    {"etcd:", tb__etcd_store_open, false},
};

enum { NSCHEMES = sizeof schemes / sizeof *schemes };

/* NSCHEMES: none of these. */
static size_t find_scheme(const char *url) {
    size_t i = 0;
    while (i < NSCHEMES && strncmp(url, schemes[i].scheme, strlen(schemes[i].scheme)) != 0)
        i++;
    return i;
}

bool tb__store_is_embedded(const char *url) {
    size_t scheme = find_scheme(url);
    return scheme < NSCHEMES && schemes[scheme].is_embedded;
}

/* A key with its namespace. */
typedef struct full_key {
    char text[TB__STORE_MAX_NAMESPACE + 1 + TB__STORE_MAX_KEY + 1];
} full_key;

tb_status tb__store_open(const char *url, const char *token, int timeout_ms, tb__store **out) {
    return tb__store_open_until(url, token, tb__now_ms() + timeout_ms, timeout_ms, out);
}

tb_status tb__store_open_until(const char *url, const char *token, int64_t deadline_ms, int timeout_ms,
                               tb__store **out) {
    tb__store_url parts;
    TB_TRY(tb__store_url_split(url, &parts));
    if (timeout_ms < 0)
        return tb__fail(TB_INVALID, "a timeout of %d ms", timeout_ms);
    size_t scheme = find_scheme(url);
    if (scheme == NSCHEMES)
        return tb__fail(TB_INVALID,
                        "no store is known for '%s': URLs are unix:/path/to.sock, tcp://host:port or "
                        "etcd://host:port",
                        url);
    tb__store *store = tb__calloc(1, sizeof *store);
    if (!store)
        return TB_NO_MEMORY;
    store->prefix_length = strlen(parts.name_space);
    if (store->prefix_length > 0) {
        memcpy(store->prefix, parts.name_space, store->prefix_length);
        store->prefix[store->prefix_length++] = '/';
    }
    tb_status status = schemes[scheme].open(parts.base, parts.name_space, token ? token : "", deadline_ms, timeout_ms,
                                            &store->ops, &store->context);
    if (status != TB_OK) {
        free(store);
        return status;
    }
    *out = store;
    return TB_OK;
}

void tb__store_set_timeout(tb__store *store, int timeout_ms) {
    store->ops->set_timeout(store->context, timeout_ms);
}

int tb__store_linger_ms(const tb__store *store) {
    return store->ops->linger_ms;
}

void tb__store_hang_up(tb__store *store) {
    store->ops->hang_up(store->context);
}

void tb__store_close(tb__store *store) {
    if (!store)
        return;
    store->ops->close(store->context);
    free(store);
}

static tb_status make_prefix(const tb__store *store, const char *prefix, full_key *out) {
    size_t length = strlen(prefix);
    if (length > TB__STORE_MAX_KEY)
        return tb__fail(TB_TOO_BIG, "a key of %zu bytes; %d are allowed", length, TB__STORE_MAX_KEY);
    memcpy(out->text, store->prefix, store->prefix_length);
    memcpy(out->text + store->prefix_length, prefix, length + 1);
    return TB_OK;
}

static tb_status make_full_key(const tb__store *store, const char *key, full_key *out) {
    if (!*key)
        return tb__fail(TB_INVALID, "a key is empty");
    return make_prefix(store, key, out);
}

static tb_status check_value(size_t nbytes) {
    if (nbytes > TB__STORE_MAX_VALUE)
        return tb__fail(TB_TOO_BIG, "a value of %zu bytes; %d are allowed", nbytes, TB__STORE_MAX_VALUE);
    return TB_OK;
}

static tb_status check_wait_timeout(int timeout_ms) {
    return timeout_ms < 0 ? tb__fail(TB_INVALID, "a timeout of %d ms", timeout_ms) : TB_OK;
}

/* Says which key a failure is about. */
static tb_status name_key_in_error(tb_status status, const char *verb, const char *key) {
    return status == TB_OK ? TB_OK : tb__fail_within(status, "%s '%.90s'", verb, key);
}

static void give_revision(tb_status status, uint64_t revision, uint64_t *out) {
    if (status == TB_OK && out)
        *out = revision;
}

tb_status tb__store_set(tb__store *store, const char *key, const void *data, size_t nbytes, tb__store_lifetime lifetime,
                        uint64_t *revision) {
    full_key full;
    uint64_t made = 0;
    TB_TRY(make_full_key(store, key, &full));
    TB_TRY(name_key_in_error(check_value(nbytes), "set", key));
    tb_status status = store->ops->set(store->context, full.text, data, nbytes, lifetime, &made);
    give_revision(status, made, revision);
    return name_key_in_error(status, "set", key);
}

tb_status tb__store_get(tb__store *store, const char *key, tb__store_value *out) {
    full_key full;
    TB_TRY(make_full_key(store, key, &full));
    return name_key_in_error(store->ops->get(store->context, full.text, out), "get", key);
}

tb_status tb__store_wait(tb__store *store, const char *key, int timeout_ms, tb__store_value *out) {
    full_key full;
    TB_TRY(make_full_key(store, key, &full));
    TB_TRY(check_wait_timeout(timeout_ms));
    return name_key_in_error(store->ops->wait(store->context, full.text, timeout_ms, out), "wait for", key);
}

tb_status tb__store_compare_and_set(tb__store *store, const char *key, uint64_t expected, const void *data,
                                    size_t nbytes, tb__store_lifetime lifetime, uint64_t *revision,
                                    tb__store_value *present) {
    full_key full;
    uint64_t made = 0;
    tb__store_value found = {0};
    TB_TRY(make_full_key(store, key, &full));
    TB_TRY(name_key_in_error(check_value(nbytes), "compare and set", key));
    tb_status status =
        store->ops->compare_and_set(store->context, full.text, expected, data, nbytes, lifetime, &made, &found);
    give_revision(status, made, revision);
    if (status == TB_CONFLICT && present)
        *present = found;
    else
        tb__store_value_fini(&found);
    return name_key_in_error(status, "compare and set", key);
}

tb_status tb__store_delete(tb__store *store, const char *key) {
    full_key full;
    TB_TRY(make_full_key(store, key, &full));
    return name_key_in_error(store->ops->delete_key(store->context, full.text), "delete", key);
}

tb_status tb__store_delete_prefix(tb__store *store, const char *prefix) {
    full_key full;
    TB_TRY(make_prefix(store, prefix, &full));
    return name_key_in_error(store->ops->delete_prefix(store->context, full.text), "delete all of", prefix);
}

tb_status tb__store_list(tb__store *store, const char *prefix, tb__store_entries *out) {
    full_key full;
    TB_TRY(make_prefix(store, prefix, &full));
    TB_TRY(name_key_in_error(store->ops->list(store->context, full.text, out), "list", prefix));
    for (size_t i = 0; i < out->count; i++)
        out->item[i].key += store->prefix_length;
    return TB_OK;
}

tb_status tb__store_wait_change(tb__store *store, const char *prefix, uint64_t since, int timeout_ms,
                                uint64_t *revision) {
    full_key full;
    uint64_t reached = 0;
    TB_TRY(make_prefix(store, prefix, &full));
    TB_TRY(check_wait_timeout(timeout_ms));
    tb_status status = store->ops->wait_change(store->context, full.text, since, timeout_ms, &reached);
    give_revision(status, reached, revision);
    return name_key_in_error(status, "wait for a change of", prefix);
}

void tb__store_value_fini(tb__store_value *value) {
    free(value->data);
    *value = (tb__store_value){0};
}

void tb__store_entries_fini(tb__store_entries *entries) {
    free(entries->item);
    *entries = (tb__store_entries){0};
}
