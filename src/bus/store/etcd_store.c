/* The store in etcd 3.4 or newer. Ephemeral keys are bound to a lease of this process, which a thread renews; waits are
 * etcd's watches. */
#include "bus/store/address.h"
#include "bus/store/etcd_json.h"
#include "bus/store/etcd_token.h"
#include "bus/store/gateway.h"
#include "bus/store/table.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>
#include <sys/queue.h>
#include <unistd.h>

enum {
    LEASE_S = 5,
    LINGER_MS = LEASE_S * 1000 + 2500, /* etcd checks for expired leases periodically */
    REVOKE_MS = 1000,                  /* for revoking the lease, which expires anyway */
    PAGE = 4096,                       /* fewer if etcd refuses that many */
};

/* Shared by the stores of this process that have the same address, namespace and token: connections, and a lease.
 * leases_lock guards all that changes, here and in the stores. */
typedef struct etcd_lease {
    LIST_ENTRY(etcd_lease) link; /* in `leases`, while more stores may share it */
    tb__store_url url;
    char *token;
    tb__gateway *gateway;
    int64_t id, ms;
    pthread_t keeper;
    int64_t renewed_ms; /* when the last renewal that succeeded was sent; only the lease thread uses it */
    bool is_granted, is_listed, is_ending;
    size_t nstores, nopen; /* that have not been closed; that have not hung up */
} etcd_lease;

LIST_HEAD(lease_list, etcd_lease);
static struct lease_list leases;
static pthread_mutex_t leases_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t leases_changed;
static pthread_once_t leases_once = PTHREAD_ONCE_INIT;

/* A store. The keys that it has bound to the lease are deleted when it is closed, unless it is the last one. */
typedef struct etcd_client {
    char url[512];
    pid_t owner;
    etcd_lease *lease;
    tb__gateway_user user;
    bool is_hung_up;
    TB_VEC(struct bound_key {
        char *key;
        uint64_t revision; /* 0: not known */
    })
    keys;
} etcd_client;

typedef struct etcd_key {
    char text[sizeof TB__ETCD_DATA + TB__STORE_MAX_NAMESPACE + 1 + TB__STORE_MAX_KEY + 8];
} etcd_key;

static etcd_key data_key(tb__blob key) {
    etcd_key full;
    snprintf(full.text, sizeof full.text, TB__ETCD_DATA "%s", (const char *)key.data);
    return full;
}

/* Ends all calls of all stores, and the lease thread, which revokes the lease. */
static void stop_lease(etcd_lease *l, const char *why) {
    pthread_mutex_lock(&leases_lock);
    if (l->is_listed)
        LIST_REMOVE(l, link);
    l->is_listed = false;
    tb__gateway_stop(l->gateway, why);
    l->is_ending = true;
    pthread_cond_broadcast(&leases_changed);
    pthread_mutex_unlock(&leases_lock);
}

/* Takes over the request. */
static tb_status post(etcd_client *c, tb__gateway_call *call, json_t *request, json_t **reply) {
    call->user = &c->user;
    if (c->owner == getpid())
        return tb__gateway_post(c->lease->gateway, call, request, reply);
    json_decref(request);
    return tb__fail(TB_LOST, "%s: the connection belongs to the process that opened it", c->url);
}

#define TRANSACTION "/v3/kv/txn"

/* A change that names an expired lease means that the connection is lost. */
static tb_status post_change(etcd_client *c, const char *path, json_t *request, int64_t deadline_ms, json_t **reply) {
    bool is_transaction = strcmp(path, TRANSACTION) == 0;
    tb__gateway_call call = {.path = path, .deadline_ms = deadline_ms, .is_not_repeatable = is_transaction};
    tb_status status = post(c, &call, request, reply);
    if (status == TB_OK || call.code != TB__ETCD_NOT_FOUND)
        return status;
    stop_lease(c->lease, "its lease has run out");
    return tb__fail(TB_LOST, "%s: the connection was lost: its lease has run out", c->url);
}

/* Records that the key is bound to the lease, before it is written, and the revision afterwards. */
static tb_status bind_key(etcd_client *c, const char *key, uint64_t revision) {
    struct bound_key *at = NULL;
    tb_status status = TB_OK;
    pthread_mutex_lock(&leases_lock);
    for (size_t i = 0; i < c->keys.count && !at; i++)
        at = strcmp(c->keys.item[i].key, key) == 0 ? &c->keys.item[i] : NULL;
    if (!at) {
        char *copy = tb__strdup(key);
        status = copy && tb__vec_push(&c->keys, (struct bound_key){copy, 0}) ? TB_OK : TB_NO_MEMORY;
        at = status == TB_OK ? &c->keys.item[c->keys.count - 1] : NULL;
        if (!at)
            free(copy);
    }
    if (at)
        at->revision = revision;
    pthread_mutex_unlock(&leases_lock);
    return status;
}

static void unbind_key(etcd_client *c, const char *key) {
    pthread_mutex_lock(&leases_lock);
    for (size_t i = 0; i < c->keys.count; i++) {
        if (strcmp(c->keys.item[i].key, key) != 0)
            continue;
        free(c->keys.item[i].key);
        c->keys.item[i] = c->keys.item[--c->keys.count];
        break;
    }
    pthread_mutex_unlock(&leases_lock);
}

/* The lease that the key is bound to; 0: none. */
static tb_status lease_of(etcd_client *c, const char *key, uint64_t lifetime, int64_t *lease) {
    *lease = lifetime == TB__STORE_EPHEMERAL ? c->lease->id : 0;
    return *lease ? bind_key(c, key, 0) : TB_OK;
}

static const json_t *first_kv(const json_t *reply) {
    return json_array_get(json_object_get(reply, "kvs"), 0);
}

static tb_status etcd_set(etcd_client *c, const char *key, const tb__store_message *q, int64_t deadline_ms,
                          uint64_t *revision) {
    json_t *reply;
    int64_t lease;
    TB_TRY(lease_of(c, key, q->lifetime, &lease));
    json_t *request = tb__etcd_put(key, q->value.data, q->value.nbytes, lease);
    TB_TRY(post_change(c, "/v3/kv/put", request, deadline_ms, &reply));
    *revision = tb__etcd_read_revision(reply);
    json_decref(reply);
    return lease ? bind_key(c, key, *revision) : TB_OK;
}

/* `revision` is the store's. */
static tb_status read_key(etcd_client *c, const char *key, tb__gateway_call *call, tb__store_value *out,
                          uint64_t *revision) {
    json_t *reply;
    call->path = "/v3/kv/range";
    TB_TRY(post(c, call, tb__etcd_key(key), &reply));
    *revision = tb__etcd_read_revision(reply);
    tb_status status = tb__etcd_read_value(first_kv(reply), out);
    json_decref(reply);
    return status;
}

/* Makes the changes if the keys are as the request says. TB_CONFLICT if they are not: then `found` has the values of
 * the keys that it reads in that case, for tb__store_value_fini. */
static tb_status post_transaction(etcd_client *c, json_t *request, int64_t deadline_ms, uint64_t *revision,
                                  tb__store_value found[2]) {
    json_t *reply;
    TB_TRY(post_change(c, TRANSACTION, request, deadline_ms, &reply));
    bool is_made = json_is_true(json_object_get(reply, "succeeded"));
    const json_t *ranges = json_object_get(reply, "responses");
    tb_status status = TB_OK;
    *revision = tb__etcd_read_revision(reply);
    for (size_t i = 0; !is_made && i < 2 && status == TB_OK; i++)
        status = tb__etcd_read_value(first_kv(json_object_get(json_array_get(ranges, i), "response_range")), &found[i]);
    json_decref(reply);
    if (status != TB_OK)
        tb__store_value_fini(&found[0]);
    return status == TB_OK && !is_made ? TB_CONFLICT : status;
}

/* With TB_CONFLICT, `present` is what is there. */
static tb_status compare_and_set(etcd_client *c, const char *key, uint64_t expected, const void *data, size_t nbytes,
                                 int64_t lease, int64_t deadline_ms, uint64_t *revision, tb__store_value *present) {
    tb__store_value found[2] = {0};
    json_t *request = tb__etcd_compare_and_set(key, expected, data, nbytes, lease);
    tb_status status = post_transaction(c, request, deadline_ms, revision, found);
    if (status == TB_OK && lease)
        return bind_key(c, key, *revision);
    if (status != TB_CONFLICT)
        return status;
    unbind_key(c, key);
    *present = found[0];
    return present->revision != expected
               ? TB_CONFLICT
               : tb__fail(TB_IO, "%s: etcd refuses a change for its revision, which is %llu, as expected", c->url,
                          (unsigned long long)expected);
}

static tb_status etcd_create_guarded(etcd_client *c, const char *key, const tb__store_message *q, int64_t deadline_ms,
                                     tb__store_value *present) {
    tb__store_value found[2] = {0};
    uint64_t unused;
    const char *guard = (const char *)q->guard_value.data;
    json_t *request = tb__etcd_create_guarded(data_key(q->guard).text, guard, key, q->value.data, q->value.nbytes);
    tb_status status = post_transaction(c, request, deadline_ms, &unused, found);
    if (status != TB_CONFLICT)
        return status;
    bool is_guarded = found[1].data && strcmp(found[1].data, guard) == 0;
    tb__store_value_fini(&found[1]);
    *present = found[0];
    return !is_guarded     ? tb__fail(TB_REFUSED, "the key that guards it has another value")
           : present->data ? TB_CONFLICT
                           : tb__fail(TB_IO, "%s: etcd refuses to create a key", c->url);
}

static tb_status etcd_delete(etcd_client *c, const char *key, int64_t deadline_ms) {
    json_t *reply;
    tb__gateway_call call = {.path = "/v3/kv/deleterange", .deadline_ms = deadline_ms};
    TB_TRY(post(c, &call, tb__etcd_key(key), &reply));
    json_decref(reply);
    unbind_key(c, key);
    return TB_OK;
}

/* Frees the value. */
static bool read_counter(tb__store_value *value, uint64_t *number) {
    *number = 0;
    bool is_number = !value->data || tb__counter_decode(value->data, value->nbytes, number);
    tb__store_value_fini(value);
    return is_number;
}

/* A counter is a decimal number. The first attempt assumes that there is none: most counters are used once. */
static tb_status etcd_count(etcd_client *c, const char *key, const tb__store_message *q, int64_t deadline_ms,
                            uint64_t *before) {
    tb__store_value value = {0};
    uint64_t unused;
    for (;;) {
        uint64_t number, expected = value.revision;
        char text[TB__COUNTER_TEXT];
        size_t length;
        if (!read_counter(&value, &number))
            return tb__fail(TB_INVALID, "it is not a counter");
        bool is_raised = number < q->revision;
        number = is_raised ? q->revision : number;
        TB_TRY(tb__counter_add(number, q->number, text, &length));
        *before = number;
        if (expected > 0 && q->number == 0 && !is_raised) /* many ranks ask for what is there */
            return TB_OK;
        tb_status status = compare_and_set(c, key, expected, text, length, 0, deadline_ms, &unused, &value);
        if (status == TB_CONFLICT)
            continue;
        tb__store_value_fini(&value);
        return status;
    }
}

/* The first attempt assumes an empty store, and reads the present values. If another process has made the key, they are
 * the result. */
static tb_status etcd_take_block(etcd_client *c, const char *key, const tb__store_message *q, int64_t deadline_ms,
                                 tb__store_result *out) {
    uint64_t expected = 0, first = 0, unused;
    for (;;) {
        char next[TB__COUNTER_TEXT], text[TB__COUNTER_TEXT];
        size_t length;
        tb__store_value found[2] = {0};
        out->revision = first;
        out->number = first + q->number;
        TB_TRY(tb__counter_add(first, 0, text, &length));
        TB_TRY(tb__counter_add(first, q->number, next, &length));
        json_t *request = tb__etcd_take_block(data_key(q->guard).text, expected, next, key, text);
        tb_status status = post_transaction(c, request, deadline_ms, &unused, found);
        if (status != TB_CONFLICT)
            return status;
        bool is_taken = found[0].data;
        expected = found[1].revision;
        bool are_numbers = read_counter(&found[0], &out->revision);
        if (!read_counter(&found[1], &first) || !are_numbers)
            return tb__fail(TB_INVALID, "it is not a counter");
        out->number = first;
        if (is_taken)
            return TB_OK;
    }
}

/* A list comes in pages, all of the first one's revision. */
typedef struct listing {
    etcd_key prefix, from;
    int64_t limit, deadline_ms;
    uint64_t revision; /* 0: not known yet */
    json_t *pages;
    bool is_complete;
    bool is_compacted; /* etcd has compacted the revision: list again from the start */
} listing;

static tb_status read_page(etcd_client *c, listing *l) {
    json_t *page, *request = tb__etcd_page(l->prefix.text, l->from.text, l->limit, l->revision);
    tb__gateway_call call = {.path = "/v3/kv/range", .deadline_ms = l->deadline_ms};
    tb_status status = post(c, &call, request, &page);
    if (status == TB_TOO_BIG && l->limit > 1) {
        l->limit = 1 + l->limit / 8;
        return TB_OK;
    }
    l->is_compacted = status != TB_OK && call.code == TB__ETCD_OUT_OF_RANGE && l->revision > 0;
    TB_TRY(status);
    if (l->revision == 0)
        l->revision = tb__etcd_read_revision(page);
    bool has_more = json_is_true(json_object_get(page, "more"));
    size_t length = 0;
    if (has_more && tb__etcd_read_last_key(page, l->from.text, sizeof l->from.text - 1))
        length = strlen(l->from.text);
    if (json_array_append_new(l->pages, page) != 0)
        return tb__fail(TB_NO_MEMORY, "no memory for a list");
    if (has_more && length == 0)
        return tb__fail(TB_IO, "%s: etcd says that a list has more keys, but does not send the last key of a page",
                        c->url);
    /* No key of ours lies before this one. */
    memcpy(l->from.text + length, "\1", 2);
    l->is_complete = !has_more;
    size_t count, nbytes;
    return tb__etcd_measure(l->pages, &count, &nbytes);
}

static tb_status etcd_list(etcd_client *c, const etcd_key *prefix, int64_t deadline_ms, tb__store_entries *out) {
    for (;;) {
        listing l = {.prefix = *prefix, .from = *prefix, .limit = PAGE, .deadline_ms = deadline_ms};
        l.pages = json_array();
        tb_status status = l.pages ? TB_OK : tb__fail(TB_NO_MEMORY, "no memory for a list");
        while (status == TB_OK && !l.is_complete)
            status = read_page(c, &l);
        if (status == TB_OK)
            status = tb__etcd_read_entries(l.pages, strlen(TB__ETCD_DATA), l.revision, out);
        json_decref(l.pages);
        if (!l.is_compacted)
            return status;
    }
}

typedef struct watch_state {
    uint64_t since;
    bool is_behind; /* the member that answers has not reached `since` */
    bool is_compacted;
    uint64_t reached; /* revision of the last change */
    json_t *pages;    /* results: a page's pairs are those of its events */
} watch_state;

/* The pairs of the events, those of deleted keys marked. NULL: no memory, or an event has none. */
static json_t *collect_changes(json_t *events) {
    json_t *kvs = json_array(), *event;
    size_t i;
    bool is_good = kvs;
    json_array_foreach(events, i, event) {
        json_t *kv = json_object_get(event, "kv");
        const char *type = json_string_value(json_object_get(event, "type"));
        if (type && strcmp(type, "DELETE") == 0)
            is_good &= json_object_set_new(kv, TB__ETCD_DELETED, json_true()) == 0;
        is_good &= json_array_append(kvs, kv) == 0;
    }
    if (is_good)
        return json_pack("{s:o}", "kvs", kvs);
    json_decref(kvs);
    return NULL;
}

static bool on_watch_result(void *arg, json_t *result) {
    watch_state *w = arg;
    json_t *events = json_object_get(result, "events"), *event;
    size_t i;
    if (json_is_true(json_object_get(result, "canceled"))) {
        w->is_compacted = true;
        return true;
    }
    if (json_is_true(json_object_get(result, "created")) && tb__etcd_read_revision(result) < w->since) {
        w->is_behind = true;
        return true;
    }
    json_array_foreach(events, i, event) {
        int64_t revision = tb__etcd_read_number(json_object_get(event, "kv"), "mod_revision");
        if (revision > 0 && (uint64_t)revision > w->since && (uint64_t)revision > w->reached)
            w->reached = (uint64_t)revision;
    }
    if (events && json_array_append_new(w->pages, collect_changes(events)) != 0)
        w->is_compacted = true; /* they have to be listed */
    /* Changes of one revision may come in several results. */
    return w->is_compacted || (w->reached > 0 && !json_is_true(json_object_get(result, "fragment")));
}

/* The store's revision, from a linearizable read. */
static tb_status ask_revision(etcd_client *c, int64_t deadline_ms, uint64_t *revision) {
    tb__store_value value;
    tb__gateway_call call = {.deadline_ms = deadline_ms};
    TB_TRY(read_key(c, TB__ETCD_TOKEN, &call, &value, revision));
    tb__store_value_fini(&value);
    return TB_OK;
}

static tb_status watch_once(etcd_client *c, const char *prefix, watch_state *w, int64_t deadline_ms,
                            tb__store_entries *out) {
    json_t *none;
    tb__gateway_call call = {.path = "/v3/watch", .deadline_ms = deadline_ms, .on_result = on_watch_result, .arg = w};
    TB_TRY(post(c, &call, tb__etcd_watch(prefix, w->since < UINT64_MAX ? w->since + 1 : w->since), &none));
    if (w->is_behind || w->is_compacted)
        return TB_OK;
    tb_status status = tb__etcd_read_entries(w->pages, strlen(TB__ETCD_DATA), w->reached, out);
    w->is_compacted = status == TB_TOO_BIG;
    return w->is_compacted ? TB_OK : status;
}

static tb_status etcd_wait_change(etcd_client *c, const char *prefix, uint64_t since, int64_t deadline_ms,
                                  tb__store_entries *out) {
    for (;;) {
        watch_state w = {.since = since, .pages = json_array()};
        tb_status status =
            w.pages ? watch_once(c, prefix, &w, deadline_ms, out) : tb__fail(TB_NO_MEMORY, "no memory for changes");
        json_decref(w.pages);
        TB_TRY(status);
        if (!w.is_behind && !w.is_compacted)
            return TB_OK;
        uint64_t now;
        TB_TRY(ask_revision(c, deadline_ms, &now));
        /* The member that answered was behind the others. */
        if (w.is_behind && now >= since)
            continue;
        *out = (tb__store_entries){.revision = now, .must_list = true};
        return TB_OK;
    }
}

static tb_status etcd_call(void *context, const tb__store_message *q, int timeout_ms, tb__store_result *out) {
    etcd_client *c = context;
    int64_t deadline_ms = tb__now_ms() + timeout_ms;
    etcd_key key = data_key(q->key);
    tb__gateway_call look = {.deadline_ms = deadline_ms};
    int64_t lease;
    switch (q->op) {
    case TB__STORE_SET:
        return etcd_set(c, key.text, q, deadline_ms, &out->revision);
    case TB__STORE_GET:
        return read_key(c, key.text, &look, &out->value, &out->revision);
    case TB__STORE_COMPARE_AND_SET:
        TB_TRY(lease_of(c, key.text, q->lifetime, &lease));
        return compare_and_set(c, key.text, q->revision, q->value.data, q->value.nbytes, lease, deadline_ms,
                               &out->revision, &out->value);
    case TB__STORE_CREATE_GUARDED:
        return etcd_create_guarded(c, key.text, q, deadline_ms, &out->value);
    case TB__STORE_DELETE:
        return etcd_delete(c, key.text, deadline_ms);
    case TB__STORE_COUNT:
        return etcd_count(c, key.text, q, deadline_ms, &out->revision);
    case TB__STORE_TAKE_BLOCK:
        return etcd_take_block(c, key.text, q, deadline_ms, out);
    case TB__STORE_LIST:
        return etcd_list(c, &key, deadline_ms, &out->entries);
    case TB__STORE_WAIT_CHANGE:
        return etcd_wait_change(c, key.text, q->revision, deadline_ms, &out->entries);
    default:
        return tb__fail(TB_INTERNAL, "a %s of etcd", tb__store_op_name(q->op));
    }
}

/* Renews the lease once, before it expires. */
static tb_status renew_lease(etcd_lease *l) {
    int64_t begun_ms = tb__now_ms();
    json_t *reply;
    tb__gateway_call call = {.path = "/v3/lease/keepalive", .deadline_ms = l->renewed_ms + l->ms, .is_urgent = true};
    TB_TRY(tb__gateway_post(l->gateway, &call, tb__etcd_number("ID", l->id), &reply));
    int64_t left_s = tb__etcd_read_number(json_object_get(reply, "result"), "TTL");
    json_decref(reply);
    if (left_s < 1)
        return tb__fail(TB_LOST, "its lease has run out");
    l->renewed_ms = begun_ms;
    return TB_OK;
}

static void revoke_lease(etcd_lease *l) {
    json_t *reply;
    tb__gateway_call call = {.path = "/v3/lease/revoke",
                             .deadline_ms = tb__now_ms() + REVOKE_MS,
                             .is_first = true,
                             .is_urgent = true,
                             .ignores_stop = true};
    (void)tb__gateway_post(l->gateway, &call, tb__etcd_number("ID", l->id), &reply);
    json_decref(reply);
}

/* True if it is time to end. */
static bool sleep_unless_ending(etcd_lease *l, int64_t until_ms) {
    struct timespec until = tb__time_of_ms(until_ms);
    pthread_mutex_lock(&leases_lock);
    while (!l->is_ending && pthread_cond_timedwait(&leases_changed, &leases_lock, &until) == 0)
        ;
    bool is_ending = l->is_ending;
    pthread_mutex_unlock(&leases_lock);
    return is_ending;
}

static void *lease_thread(void *arg) {
    etcd_lease *l = arg;
    int64_t next_ms = l->renewed_ms + l->ms / 3;
    while (!sleep_unless_ending(l, next_ms)) {
        tb_status status = renew_lease(l);
        bool is_over = tb__ms_until(l->renewed_ms + l->ms) == 0;
        next_ms = status == TB_OK ? l->renewed_ms + l->ms / 3 : tb__now_ms() + l->ms / 10;
        if (status == TB_LOST || (status != TB_OK && is_over))
            stop_lease(l, tb_error_detail());
    }
    /* An expired lease need not be revoked. */
    if (tb__ms_until(l->renewed_ms + l->ms) > 0)
        revoke_lease(l);
    return NULL;
}

static tb_status grant_lease(etcd_lease *l, int64_t deadline_ms) {
    json_t *reply;
    l->renewed_ms = tb__now_ms();
    tb__gateway_call call = {.path = "/v3/lease/grant", .deadline_ms = deadline_ms};
    TB_TRY(tb__gateway_post(l->gateway, &call, tb__etcd_number("TTL", LEASE_S), &reply));
    l->id = tb__etcd_read_number(reply, "ID");
    l->ms = tb__etcd_read_number(reply, "TTL") * 1000;
    json_decref(reply);
    if (l->id == 0 || l->ms < 1000)
        return tb__fail(TB_REFUSED, "%s: the server grants no leases: it is not etcd", l->url.base);
    return TB_OK;
}

static tb_status check_verifier(const etcd_client *c, const tb__store_value *found, const char *key,
                                const char *token) {
    if (tb__verifier_accepts(found->data, found->nbytes, token))
        return TB_OK;
    return tb__fail(TB_DENIED, "%s: the token is not the one that etcd's key '%s' was made from", c->url, key);
}

/* Checks the token against the namespace's verifier, or stores the verifier if there is none. */
static tb_status check_token(etcd_client *c, const char *name_space, const char *token, int64_t deadline_ms) {
    char key[sizeof TB__ETCD_TOKEN + TB__STORE_MAX_NAMESPACE];
    tb__store_value found = {0};
    tb__verifier verifier;
    uint64_t revision;
    snprintf(key, sizeof key, TB__ETCD_TOKEN "%s", name_space);
    tb__gateway_call call = {.deadline_ms = deadline_ms, .is_first = true};
    TB_TRY(read_key(c, key, &call, &found, &revision));
    tb_status status = TB_OK;
    if (found.revision == 0) {
        TB_TRY(tb__verifier_make(token, &verifier));
        status = compare_and_set(c, key, 0, verifier.text, TB__VERIFIER_NBYTES, 0, deadline_ms, &revision, &found);
    }
    if (found.revision > 0)
        status = check_verifier(c, &found, key, token);
    tb__store_value_fini(&found);
    return status;
}

static void free_lease(etcd_lease *l) {
    tb__gateway_destroy(l->gateway);
    if (l->token)
        explicit_bzero(l->token, strlen(l->token));
    free(l->token);
    free(l);
}

static void free_client(etcd_client *c) {
    for (size_t i = 0; i < c->keys.count; i++)
        free(c->keys.item[i].key);
    free(c->keys.item);
    free(c);
}

static void etcd_interrupt(void *context) {
    etcd_client *c = context;
    tb__gateway_interrupt(c->lease->gateway, &c->user);
}

static bool get_bound_key(etcd_client *c, size_t i, etcd_key *key, uint64_t *revision) {
    pthread_mutex_lock(&leases_lock);
    bool is_there = i < c->keys.count;
    if (is_there) {
        snprintf(key->text, sizeof key->text, "%s", c->keys.item[i].key);
        *revision = c->keys.item[i].revision;
    }
    pthread_mutex_unlock(&leases_lock);
    return is_there;
}

/* Deletes the keys that this store has bound to the lease, or only those of unknown revision. Other stores still need
 * the lease; keys that could not be deleted end with it. */
static void delete_bound_keys(etcd_client *c, bool only_unknown) {
    int64_t deadline_ms = tb__now_ms() + REVOKE_MS;
    tb_status status = TB_OK;
    etcd_key key;
    uint64_t revision;
    for (size_t i = 0; status == TB_OK && get_bound_key(c, i, &key, &revision); i++) {
        json_t *reply;
        tb__gateway_call call = {.path = TRANSACTION, .deadline_ms = deadline_ms};
        if (only_unknown && revision > 0)
            continue;
        json_t *request = tb__etcd_delete_bound(key.text, revision, c->lease->id);
        status = tb__gateway_post(c->lease->gateway, &call, request, &reply);
        json_decref(reply);
    }
}

static void etcd_hang_up(void *context) {
    etcd_client *c = context;
    if (c->owner != getpid())
        return;
    pthread_mutex_lock(&leases_lock);
    bool is_first = !c->is_hung_up, is_last = is_first && --c->lease->nopen == 0;
    c->is_hung_up = true;
    if (is_last && c->lease->is_listed) { /* no other store comes to share it */
        LIST_REMOVE(c->lease, link);
        c->lease->is_listed = false;
    }
    pthread_mutex_unlock(&leases_lock);
    if (!is_first)
        return;
    if (is_last) {
        stop_lease(c->lease, "this side has hung up");
        return;
    }
    tb__gateway_stop_user(c->lease->gateway, &c->user);
    delete_bound_keys(c, false);
}

static void release_lease(etcd_lease *l) {
    pthread_mutex_lock(&leases_lock);
    bool is_last = --l->nstores == 0;
    pthread_mutex_unlock(&leases_lock);
    if (!is_last)
        return;
    pthread_join(l->keeper, NULL);
    free_lease(l);
}

static void etcd_close(void *context) {
    etcd_client *c = context;
    /* A forked child does not have the thread, and the memory may be in the middle of a change. */
    if (c->owner != getpid())
        return;
    etcd_hang_up(c);
    delete_bound_keys(c, true); /* a call that was under way may have written them meanwhile */
    release_lease(c->lease);
    free_client(c);
}

static const tb__store_ops etcd_ops = {
    .call = etcd_call,
    .hang_up = etcd_hang_up,
    .interrupt = etcd_interrupt,
    .close = etcd_close,
    .linger_ms = LINGER_MS,
};

/* Connects, and gets a lease that a thread renews. */
static tb_status open_lease(etcd_client *c, const char *token, int64_t deadline_ms) {
    etcd_lease *l = c->lease;
    TB_TRY(tb__gateway_create(&l->url, &l->gateway));
    TB_TRY(check_token(c, l->url.name_space, token, deadline_ms));
    TB_TRY(grant_lease(l, deadline_ms));
    return tb__start_thread(&l->keeper, "tb-store-lease", lease_thread, l);
}

static etcd_lease *create_lease(const tb__store_url *url, const char *token) {
    etcd_lease *l = tb__calloc(1, sizeof *l);
    if (!l)
        return NULL;
    l->url = *url;
    l->nstores = l->nopen = 1;
    l->token = tb__strdup(token);
    if (l->token)
        return l;
    free_lease(l);
    return NULL;
}

static etcd_lease *find_lease(const tb__store_url *url, const char *token) {
    for (etcd_lease *l = LIST_FIRST(&leases); l; l = LIST_NEXT(l, link)) {
        if (strcmp(l->url.base, url->base) == 0 && strcmp(l->url.name_space, url->name_space) == 0 &&
            strcmp(l->url.ca, url->ca) == 0 && strcmp(l->url.user, url->user) == 0 &&
            strcmp(l->url.password, url->password) == 0 && strcmp(l->token, token) == 0)
            return l;
    }
    return NULL;
}

/* Also in a forked child, where the lock may be held, and the leases are its parent's. */
static void reset_leases(void) {
    pthread_mutex_init(&leases_lock, NULL);
    tb__monotonic_cond_init(&leases_changed);
    LIST_INIT(&leases);
}

static void begin_leases(void) {
    reset_leases();
    pthread_atfork(NULL, NULL, reset_leases);
}

/* Shares the lease of other stores. If there is none, `out` is a new one, to be opened and listed. */
static tb_status take_lease(const tb__store_url *url, const char *token, int64_t deadline_ms, etcd_lease **out) {
    struct timespec until = tb__time_of_ms(deadline_ms);
    tb_status status = TB_OK;
    etcd_lease *l;
    pthread_mutex_lock(&leases_lock);
    while ((l = find_lease(url, token)) && !l->is_granted && status == TB_OK) {
        if (pthread_cond_timedwait(&leases_changed, &leases_lock, &until) != 0)
            status = tb__fail(TB_TIMEOUT, "%s: another thread that opens it has had no answer", url->base);
    }
    if (status == TB_OK && l) {
        l->nstores++;
        l->nopen++;
    } else if (status == TB_OK) {
        l = create_lease(url, token);
        status = l ? TB_OK : TB_NO_MEMORY;
        if (l) {
            LIST_INSERT_HEAD(&leases, l, link);
            l->is_listed = true;
        }
    }
    pthread_mutex_unlock(&leases_lock);
    if (status == TB_OK)
        *out = l;
    return status;
}

/* Others that wait for the lease share it, or, after a failure, try themselves. */
static void end_opening(etcd_lease *l, bool is_granted) {
    pthread_mutex_lock(&leases_lock);
    l->is_granted = is_granted;
    if (!is_granted && l->is_listed)
        LIST_REMOVE(l, link);
    l->is_listed &= is_granted;
    pthread_cond_broadcast(&leases_changed);
    pthread_mutex_unlock(&leases_lock);
}

tb_status tb__etcd_store_open(const tb__store_url *url, const char *token, const tb__store_secret *secret,
                              int64_t deadline_ms, const tb__store_ops **ops, void **context) {
    (void)secret; /* keys have no owner in etcd */
    etcd_client *c = tb__calloc(1, sizeof *c);
    if (!c)
        return TB_NO_MEMORY;
    snprintf(c->url, sizeof c->url, "%s", url->base);
    c->owner = getpid();
    pthread_once(&leases_once, begin_leases);
    tb_status status = take_lease(url, token, deadline_ms, &c->lease);
    if (status == TB_OK && !c->lease->gateway) {
        status = open_lease(c, token, deadline_ms);
        end_opening(c->lease, status == TB_OK);
        if (status != TB_OK)
            free_lease(c->lease);
    }
    if (status != TB_OK) {
        free_client(c);
        return status;
    }
    *ops = &etcd_ops;
    *context = c;
    return TB_OK;
}
