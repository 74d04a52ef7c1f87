/* The store's interface: finds the implementation for a URL, checks arguments, and adds and removes the namespace of
 * keys. */
#include "bus/store/store.h"

#include "base/mem.h"
#include "base/proof.h"
#include "bus/store/address.h"
#include "bus/store/protocol.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>

struct tb__store {
    const tb__store_ops *ops;
    void *context;
    _Atomic int timeout_ms;
    size_t prefix_length;
    char prefix[TB__STORE_MAX_NAMESPACE + 2];
};

static const struct {
    const char *scheme;
    tb__store_open_fn *open;
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

static tb__blob blob_of(const char *text) {
    return (tb__blob){.data = (const uint8_t *)text, .nbytes = strlen(text)};
}

/* A key with its namespace. */
typedef struct full_key {
    char text[TB__STORE_MAX_NAMESPACE + 1 + TB__STORE_MAX_KEY + 1];
} full_key;

tb_status tb__store_open(const char *url, const char *token, int timeout_ms, tb__store **out) {
    return tb__store_open_until(url, token, NULL, tb__now_ms() + timeout_ms, timeout_ms, out);
}

tb_status tb__store_secret_make(tb__store_secret *out) {
    return tb__random_bytes(out->bytes, sizeof out->bytes);
}

tb_status tb__store_open_until(const char *url, const char *token, const tb__store_secret *secret, int64_t deadline_ms,
                               int timeout_ms, tb__store **out) {
    tb__store_url parts;
    tb__store_secret own;
    TB_TRY(tb__token_check(token));
    if (!secret) {
        TB_TRY(tb__store_secret_make(&own));
        secret = &own;
    }
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
    store->timeout_ms = timeout_ms;
    tb_status status =
        schemes[scheme].open(&parts, token ? token : "", secret, deadline_ms, &store->ops, &store->context);
    if (status != TB_OK) {
        free(store);
        return status;
    }
    *out = store;
    return TB_OK;
}

void tb__store_set_timeout(tb__store *store, int timeout_ms) {
    store->timeout_ms = timeout_ms;
}

int tb__store_linger_ms(const tb__store *store) {
    return store->ops->linger_ms;
}

void tb__store_interrupt(tb__store *store) {
    store->ops->interrupt(store->context);
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

static tb_status make_full_key(const tb__store *store, const char *key, full_key *out) {
    size_t length = strlen(key);
    if (length > TB__STORE_MAX_KEY)
        return tb__fail(TB_TOO_BIG, "a key of %zu bytes; %d are allowed", length, TB__STORE_MAX_KEY);
    memcpy(out->text, store->prefix, store->prefix_length);
    memcpy(out->text + store->prefix_length, key, length + 1);
    return TB_OK;
}

static tb_status fail_conflict(const tb__store_message *request, uint64_t present) {
    if (request->op == TB__STORE_CREATE_GUARDED)
        return tb__fail(TB_CONFLICT, "it exists");
    if (present == 0)
        return tb__fail(TB_CONFLICT, "there is no such key, so its revision is not %" PRIu64, request->revision);
    return tb__fail(TB_CONFLICT, "its revision is %" PRIu64 ", not %" PRIu64, present, request->revision);
}

static tb_status check_and_call(const tb__store *store, const char *key, tb__store_message *request, int timeout_ms,
                                tb__store_result *out) {
    full_key full;
    if (!*key && request->op != TB__STORE_LIST && request->op != TB__STORE_WAIT_CHANGE)
        return tb__fail(TB_INVALID, "a key is empty");
    if (request->value.nbytes > TB__STORE_MAX_VALUE)
        return tb__fail(TB_TOO_BIG, "a value of %zu bytes; %d are allowed", request->value.nbytes, TB__STORE_MAX_VALUE);
    if (timeout_ms < 0)
        return tb__fail(TB_INVALID, "a timeout of %d ms", timeout_ms);
    TB_TRY(make_full_key(store, key, &full));
    request->key = blob_of(full.text);
    tb_status status = store->ops->call(store->context, request, timeout_ms, out);
    return status == TB_CONFLICT ? fail_conflict(request, out->value.revision) : status;
}

/* The message of a failure names the key. */
static tb_status call_within(const tb__store *store, const char *key, tb__store_message request, int timeout_ms,
                             tb__store_result *out) {
    static const char *const verbs[TB__STORE_NOPS] = {
        [TB__STORE_SET] = "set",
        [TB__STORE_GET] = "get",
        [TB__STORE_COMPARE_AND_SET] = "compare and set",
        [TB__STORE_CREATE_GUARDED] = "create",
        [TB__STORE_DELETE] = "delete",
        [TB__STORE_COUNT] = "count",
        [TB__STORE_TAKE_BLOCK] = "take a block for",
        [TB__STORE_LIST] = "list",
        [TB__STORE_WAIT_CHANGE] = "wait for a change of",
    };
    *out = (tb__store_result){0};
    tb_status status = check_and_call(store, key, &request, timeout_ms, out);
    return status == TB_OK ? TB_OK : tb__fail_within(status, "%s '%.90s'", verbs[request.op], key);
}

static tb_status call_store(const tb__store *store, const char *key, tb__store_message request, tb__store_result *out) {
    return call_within(store, key, request, store->timeout_ms, out);
}

/* For operations that return a number at most. */
static tb_status call_for_number(const tb__store *store, const char *key, tb__store_message request, int timeout_ms,
                                 uint64_t *number) {
    tb__store_result result;
    TB_TRY(call_within(store, key, request, timeout_ms, &result));
    if (number)
        *number = result.revision;
    return TB_OK;
}

static tb_status give_present(tb_status status, tb__store_value found, tb__store_value *present) {
    if (status == TB_CONFLICT && present)
        *present = found;
    else
        free(found.data);
    return status;
}

tb_status tb__store_set(tb__store *store, const char *key, const void *data, size_t nbytes, tb__store_lifetime lifetime,
                        uint64_t *revision) {
    tb__store_message request = {.op = TB__STORE_SET, .value = {data, nbytes}, .lifetime = lifetime};
    return call_for_number(store, key, request, store->timeout_ms, revision);
}

tb_status tb__store_get(tb__store *store, const char *key, tb__store_value *out) {
    tb__store_result result;
    TB_TRY(call_store(store, key, (tb__store_message){.op = TB__STORE_GET}, &result));
    *out = result.value;
    return TB_OK;
}

tb_status tb__store_compare_and_set(tb__store *store, const char *key, uint64_t expected, const void *data,
                                    size_t nbytes, tb__store_lifetime lifetime, uint64_t *revision,
                                    tb__store_value *present) {
    tb__store_message request = {
        .op = TB__STORE_COMPARE_AND_SET, .revision = expected, .value = {data, nbytes}, .lifetime = lifetime};
    tb__store_result result;
    tb_status status = call_store(store, key, request, &result);
    if (status == TB_OK && revision)
        *revision = result.revision;
    return give_present(status, result.value, present);
}

tb_status tb__store_create_guarded(tb__store *store, const char *guard, const char *guard_value, const char *key,
                                   const void *data, size_t nbytes, tb__store_value *present) {
    full_key full_guard;
    tb__store_result result;
    TB_TRY(make_full_key(store, guard, &full_guard));
    tb__store_message request = {.op = TB__STORE_CREATE_GUARDED,
                                 .guard = blob_of(full_guard.text),
                                 .guard_value = blob_of(guard_value),
                                 .value = {data, nbytes}};
    tb_status status = call_store(store, key, request, &result);
    return give_present(status, result.value, present);
}

tb_status tb__store_delete(tb__store *store, const char *key) {
    return call_for_number(store, key, (tb__store_message){.op = TB__STORE_DELETE}, store->timeout_ms, NULL);
}

tb_status tb__store_count(tb__store *store, const char *key, uint64_t least, uint64_t add, uint64_t *before) {
    tb__store_message request = {.op = TB__STORE_COUNT, .revision = least, .number = add};
    return call_for_number(store, key, request, store->timeout_ms, before);
}

tb_status tb__store_take_block(tb__store *store, const char *counter, const char *key, uint64_t count, uint64_t *first,
                               uint64_t *next) {
    full_key full_counter;
    tb__store_result result;
    TB_TRY(make_full_key(store, counter, &full_counter));
    tb__store_message request = {.op = TB__STORE_TAKE_BLOCK, .guard = blob_of(full_counter.text), .number = count};
    TB_TRY(call_store(store, key, request, &result));
    *first = result.revision;
    *next = result.number;
    return TB_OK;
}

static tb_status call_for_entries(const tb__store *store, const char *prefix, tb__store_message request, int timeout_ms,
                                  tb__store_entries *out) {
    tb__store_result result;
    TB_TRY(call_within(store, prefix, request, timeout_ms, &result));
    for (size_t i = 0; i < result.entries.count; i++)
        result.entries.item[i].key += store->prefix_length;
    *out = result.entries;
    return TB_OK;
}

tb_status tb__store_list(tb__store *store, const char *prefix, tb__store_entries *out) {
    return call_for_entries(store, prefix, (tb__store_message){.op = TB__STORE_LIST}, store->timeout_ms, out);
}

tb_status tb__store_wait_changes(tb__store *store, const char *prefix, uint64_t since, int timeout_ms,
                                 tb__store_entries *out) {
    tb__store_message request = {.op = TB__STORE_WAIT_CHANGE, .revision = since};
    return call_for_entries(store, prefix, request, timeout_ms, out);
}

tb_status tb__store_wait_change(tb__store *store, const char *prefix, uint64_t since, int timeout_ms,
                                uint64_t *revision) {
    tb__store_entries changes;
    TB_TRY(tb__store_wait_changes(store, prefix, since, timeout_ms, &changes));
    *revision = changes.revision;
    tb__store_entries_fini(&changes);
    return TB_OK;
}

/* By key, and those of one key in their order. */
static int compare_changes(const void *a, const void *b) {
    const tb__store_entry *x = *(const tb__store_entry *const *)a, *y = *(const tb__store_entry *const *)b;
    int order = strcmp(x->key, y->key);
    return order ? order : (x > y) - (x < y);
}

/* Keeps the last change of each key. Returns their number. */
static size_t sort_changes(const tb__store_entries *changes, const tb__store_entry **sorted) {
    size_t kept = 0;
    for (size_t i = 0; i < changes->count; i++)
        sorted[i] = &changes->item[i];
    qsort(sorted, changes->count, sizeof *sorted, compare_changes);
    for (size_t i = 0; i < changes->count; i++) {
        if (i + 1 == changes->count || strcmp(sorted[i]->key, sorted[i + 1]->key) != 0)
            sorted[kept++] = sorted[i];
    }
    return kept;
}

static void add_copy(tb__store_entries *out, char **at, const tb__store_entry *entry) {
    size_t length = strlen(entry->key) + 1;
    tb__store_entry copy = {.key = memcpy(*at, entry->key, length), .value = entry->value};
    copy.value.data = memcpy(*at + length, entry->value.data, entry->value.nbytes + 1);
    out->item[out->count++] = copy;
    *at += length + entry->value.nbytes + 1;
}

tb_status tb__store_apply_changes(const tb__store_entries *before, const tb__store_entries *changes,
                                  tb__store_entries *out) {
    const tb__store_entries *from[] = {before, changes};
    size_t nbytes = (before->count + changes->count) * sizeof *out->item;
    for (int k = 0; k < 2; k++) {
        for (size_t i = 0; i < from[k]->count; i++)
            nbytes += strlen(from[k]->item[i].key) + from[k]->item[i].value.nbytes + 2;
    }
    tb__store_entries after = {.item = tb__malloc(1, nbytes), .revision = changes->revision};
    const tb__store_entry **sorted = tb__malloc(changes->count, sizeof *sorted);
    if (!after.item || !sorted) {
        free(after.item);
        free(sorted);
        return TB_NO_MEMORY;
    }
    char *at = (char *)(after.item + before->count + changes->count);
    size_t n = sort_changes(changes, sorted), i = 0, k = 0;
    while (i < before->count || k < n) {
        int order = i == before->count ? 1 : k == n ? -1 : strcmp(before->item[i].key, sorted[k]->key);
        const tb__store_entry *next = order < 0 ? &before->item[i] : sorted[k];
        if (next->value.data)
            add_copy(&after, &at, next);
        i += order <= 0;
        k += order >= 0;
    }
    free(sorted);
    *out = after;
    return TB_OK;
}

void tb__store_value_fini(tb__store_value *value) {
    free(value->data);
    *value = (tb__store_value){0};
}

void tb__store_entries_fini(tb__store_entries *entries) {
    free(entries->item);
    *entries = (tb__store_entries){0};
}
