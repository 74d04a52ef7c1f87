/* The store in etcd 3.4 or newer. Ephemeral keys are bound to a lease of this client, which a thread renews; waits are
 * etcd's watches. */
#include "bus/store/etcd_json.h"
#include "bus/store/etcd_token.h"
#include "bus/store/gateway.h"

#include "base/mem.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    LEASE_S = 5,
    LINGER_MS = LEASE_S * 1000 + 2500, /* etcd checks for expired leases periodically */
    REVOKE_MS = 1000,                  /* for revoking the lease, which expires anyway */
    PAGE = 256,
};

typedef struct etcd_client {
    char url[512];
    pid_t owner;
    _Atomic int timeout_ms;
    tb__gateway *gateway;
    int64_t lease, lease_ms;
    pthread_t keeper;
    int64_t renewed_ms; /* when the last renewal that succeeded was sent; only the lease thread uses it */

    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool is_ending;
} etcd_client;

typedef struct etcd_key {
    char text[sizeof TB__ETCD_DATA + TB__STORE_MAX_NAMESPACE + 1 + TB__STORE_MAX_KEY + 8];
} etcd_key;

static etcd_key data_key(const char *key) {
    etcd_key full;
    snprintf(full.text, sizeof full.text, TB__ETCD_DATA "%s", key);
    return full;
}

/* Ends all calls, and the lease thread, which revokes the lease. */
static void stop_client(etcd_client *c, const char *why) {
    tb__gateway_stop(c->gateway, why);
    pthread_mutex_lock(&c->lock);
    c->is_ending = true;
    pthread_cond_signal(&c->ended);
    pthread_mutex_unlock(&c->lock);
}

static tb_status check_owner(const etcd_client *c) {
    if (c->owner == getpid())
        return TB_OK;
    return tb__fail(TB_LOST, "%s: the connection belongs to the process that opened it", c->url);
}

/* Posts the body, and frees it. */
static tb_status post_body(etcd_client *c, tb__gateway_call *call, tb__bytes *body, json_t **reply) {
    tb_status status = check_owner(c);
    call->body = body;
    if (status == TB_OK)
        status = tb__gateway_post(c->gateway, call, reply);
    call->body = NULL;
    free(body->item);
    return status;
}

/* A request by the deadline that calls have by default. */
static tb_status post_request(etcd_client *c, const char *path, tb__bytes *body, json_t **reply) {
    tb__gateway_call call = {.path = path, .deadline_ms = tb__now_ms() + c->timeout_ms};
    return post_body(c, &call, body, reply);
}

/* A change that names an expired lease means that the connection is lost. */
static tb_status post_change(etcd_client *c, tb__gateway_call *call, tb__bytes *body, json_t **reply) {
    call->deadline_ms = tb__now_ms() + c->timeout_ms;
    tb_status status = post_body(c, call, body, reply);
    if (status == TB_OK || call->code != TB__ETCD_NOT_FOUND)
        return status;
    stop_client(c, "its lease has run out");
    return tb__fail(TB_LOST, "%s: the connection was lost: its lease has run out", c->url);
}

static int64_t lease_of(const etcd_client *c, tb__store_lifetime lifetime) {
    return lifetime == TB__STORE_EPHEMERAL ? c->lease : 0;
}

static const json_t *first_kv(const json_t *reply) {
    return json_array_get(json_object_get(reply, "kvs"), 0);
}

/* ---- One key ---------------------------------------------------------------------------------------------------- */

static tb_status etcd_set(void *context, const char *key, const void *data, size_t nbytes, tb__store_lifetime lifetime,
                          uint64_t *revision) {
    etcd_client *c = context;
    tb__bytes body;
    json_t *reply;
    TB_TRY(tb__etcd_put(data_key(key).text, data, nbytes, lease_of(c, lifetime), &body));
    tb__gateway_call call = {.path = "/v3/kv/put"};
    TB_TRY(post_change(c, &call, &body, &reply));
    *revision = tb__etcd_read_revision(reply);
    json_decref(reply);
    return TB_OK;
}

/* `revision` is the store's. */
static tb_status read_key(etcd_client *c, const char *key, tb__gateway_call *call, tb__store_value *out,
                          uint64_t *revision) {
    tb__bytes body;
    json_t *reply;
    TB_TRY(tb__etcd_range(key, TB__ETCD_KEY, &body));
    call->path = "/v3/kv/range";
    TB_TRY(post_body(c, call, &body, &reply));
    *revision = tb__etcd_read_revision(reply);
    tb_status status = tb__etcd_read_value(first_kv(reply), out);
    json_decref(reply);
    return status;
}

static tb_status etcd_get(void *context, const char *key, tb__store_value *out) {
    etcd_client *c = context;
    uint64_t revision;
    tb__gateway_call call = {.deadline_ms = tb__now_ms() + c->timeout_ms};
    return read_key(c, data_key(key).text, &call, out, &revision);
}

static tb_status fail_conflict(uint64_t present, uint64_t expected) {
    if (present == 0)
        return tb__fail(TB_CONFLICT, "there is no such key, so its revision is not %llu", (unsigned long long)expected);
    return tb__fail(TB_CONFLICT, "its revision is %llu, not %llu", (unsigned long long)present,
                    (unsigned long long)expected);
}

static tb_status txn_compare_and_set(etcd_client *c, const char *key, uint64_t expected, const void *data,
                                     size_t nbytes, int64_t lease, uint64_t *revision, tb__store_value *present) {
    tb__bytes body;
    json_t *reply;
    TB_TRY(tb__etcd_compare_and_set(key, expected, data, nbytes, lease, &body));
    tb__gateway_call call = {.path = "/v3/kv/txn", .is_not_repeatable = true};
    TB_TRY(post_change(c, &call, &body, &reply));
    tb_status status = TB_OK;
    if (json_is_true(json_object_get(reply, "succeeded"))) {
        *revision = tb__etcd_read_revision(reply);
    } else {
        const json_t *range = json_array_get(json_object_get(reply, "responses"), 0);
        status = tb__etcd_read_value(first_kv(json_object_get(range, "response_range")), present);
        if (status == TB_OK && present->revision == expected)
            status = tb__fail(TB_IO, "%s: etcd refuses a change for its revision, which is %llu, as expected", c->url,
                              (unsigned long long)expected);
        else if (status == TB_OK)
            status = fail_conflict(present->revision, expected);
    }
    json_decref(reply);
    return status;
}

static tb_status etcd_compare_and_set(void *context, const char *key, uint64_t expected, const void *data,
                                      size_t nbytes, tb__store_lifetime lifetime, uint64_t *revision,
                                      tb__store_value *present) {
    etcd_client *c = context;
    return txn_compare_and_set(c, data_key(key).text, expected, data, nbytes, lease_of(c, lifetime), revision, present);
}

static tb_status delete_range(etcd_client *c, const char *key, tb__etcd_scope scope) {
    tb__bytes body;
    json_t *reply;
    TB_TRY(tb__etcd_delete(data_key(key).text, scope, &body));
    TB_TRY(post_request(c, "/v3/kv/deleterange", &body, &reply));
    json_decref(reply);
    return TB_OK;
}

static tb_status etcd_delete(void *context, const char *key) {
    return delete_range(context, key, TB__ETCD_KEY);
}

static tb_status etcd_delete_prefix(void *context, const char *prefix) {
    return delete_range(context, prefix, TB__ETCD_PREFIX);
}

/* ---- Lists ------------------------------------------------------------------------------------------------------ */

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
    tb__bytes body;
    json_t *page;
    TB_TRY(tb__etcd_page(l->prefix.text, l->from.text, l->limit, l->revision, &body));
    tb__gateway_call call = {.path = "/v3/kv/range", .deadline_ms = l->deadline_ms};
    tb_status status = post_body(c, &call, &body, &page);
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
        return tb__fail(TB_IO, "%s: a list of etcd's does not go on", c->url);
    /* No key of ours lies before this one. */
    memcpy(l->from.text + length, "\1", 2);
    l->is_complete = !has_more;
    size_t count, nbytes;
    return tb__etcd_measure(l->pages, &count, &nbytes);
}

static tb_status etcd_list(void *context, const char *prefix, tb__store_entries *out) {
    etcd_client *c = context;
    int64_t deadline_ms = tb__now_ms() + c->timeout_ms;
    for (;;) {
        listing l = {.prefix = data_key(prefix), .from = data_key(prefix), .limit = PAGE, .deadline_ms = deadline_ms};
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

/* ---- Waiting ---------------------------------------------------------------------------------------------------- */

typedef struct watch_state {
    uint64_t since;
    bool wants_value; /* ends only when the key has a value */
    bool is_behind;   /* the member that answers has not reached `since` */
    bool is_compacted;
    uint64_t reached; /* revision of the last change */
    tb_status status;
    tb__store_value value;
} watch_state;

static bool on_watch_event(watch_state *w, const json_t *event) {
    const json_t *kv = json_object_get(event, "kv");
    int64_t revision = tb__etcd_read_number(kv, "mod_revision");
    if (revision <= 0 || (uint64_t)revision <= w->since)
        return false;
    const char *type = json_string_value(json_object_get(event, "type"));
    bool is_put = !type || strcmp(type, "PUT") == 0;
    if (w->wants_value && !is_put)
        return false;
    if ((uint64_t)revision > w->reached)
        w->reached = (uint64_t)revision;
    if (w->wants_value)
        w->status = tb__etcd_read_value(kv, &w->value);
    return true;
}

static bool on_watch_result(void *arg, const json_t *result) {
    watch_state *w = arg;
    const json_t *events = json_object_get(result, "events"), *event;
    size_t i;
    bool is_enough = false;
    if (json_is_true(json_object_get(result, "canceled"))) {
        int64_t compacted = tb__etcd_read_number(result, "compact_revision");
        w->is_compacted = true;
        w->reached = compacted > 0 ? (uint64_t)compacted : 0;
        return true;
    }
    if (json_is_true(json_object_get(result, "created")) && tb__etcd_read_revision(result) < w->since) {
        w->is_behind = true;
        return true;
    }
    json_array_foreach(events, i, event) {
        is_enough |= on_watch_event(w, event);
        if (is_enough && w->wants_value)
            break;
    }
    return is_enough;
}

static tb_status watch_key(etcd_client *c, const char *key, tb__etcd_scope scope, int64_t deadline_ms, watch_state *w) {
    tb__bytes body;
    json_t *none;
    TB_TRY(tb__etcd_watch(key, scope, w->since < UINT64_MAX ? w->since + 1 : w->since, &body));
    tb__gateway_call call = {.path = "/v3/watch", .deadline_ms = deadline_ms, .on_result = on_watch_result, .arg = w};
    TB_TRY(post_body(c, &call, &body, &none));
    return w->status;
}

static tb_status etcd_wait(void *context, const char *key, int timeout_ms, tb__store_value *out) {
    etcd_client *c = context;
    etcd_key full = data_key(key);
    int64_t deadline_ms = tb__now_ms() + timeout_ms;
    for (;;) {
        watch_state w = {.wants_value = true};
        tb__gateway_call look = {.deadline_ms = deadline_ms};
        TB_TRY(read_key(c, full.text, &look, &w.value, &w.since));
        if (w.value.revision == 0)
            TB_TRY(watch_key(c, full.text, TB__ETCD_KEY, deadline_ms, &w));
        if (w.value.revision > 0) {
            *out = w.value;
            return TB_OK;
        }
    }
}

/* The store's revision, from a linearizable read. */
static tb_status ask_revision(etcd_client *c, int64_t deadline_ms, uint64_t *revision) {
    tb__store_value value;
    tb__gateway_call call = {.deadline_ms = deadline_ms};
    TB_TRY(read_key(c, TB__ETCD_TOKEN, &call, &value, revision));
    tb__store_value_fini(&value);
    return TB_OK;
}

static tb_status etcd_wait_change(void *context, const char *prefix, uint64_t since, int timeout_ms,
                                  uint64_t *revision) {
    etcd_client *c = context;
    int64_t deadline_ms = tb__now_ms() + timeout_ms;
    for (;;) {
        watch_state w = {.since = since};
        TB_TRY(watch_key(c, data_key(prefix).text, TB__ETCD_PREFIX, deadline_ms, &w));
        if (w.is_behind || w.is_compacted) {
            uint64_t now;
            TB_TRY(ask_revision(c, deadline_ms, &now));
            /* One member was behind the others. */
            if (w.is_behind && now >= since)
                continue;
            w.reached = now;
        }
        *revision = w.reached;
        return TB_OK;
    }
}

/* ---- The lease -------------------------------------------------------------------------------------------------- */

/* Renews the lease once, before it expires. */
static tb_status renew_lease(etcd_client *c) {
    int64_t begun_ms = tb__now_ms();
    tb__bytes body;
    json_t *reply;
    TB_TRY(tb__etcd_number("ID", c->lease, &body));
    tb__gateway_call call = {.path = "/v3/lease/keepalive", .deadline_ms = c->renewed_ms + c->lease_ms};
    TB_TRY(post_body(c, &call, &body, &reply));
    int64_t left_s = tb__etcd_read_number(json_object_get(reply, "result"), "TTL");
    json_decref(reply);
    if (left_s < 1)
        return tb__fail(TB_LOST, "its lease has run out");
    c->renewed_ms = begun_ms;
    return TB_OK;
}

static void revoke_lease(etcd_client *c) {
    tb__bytes body;
    json_t *reply;
    tb__gateway_call call = {
        .path = "/v3/lease/revoke", .deadline_ms = tb__now_ms() + REVOKE_MS, .is_first = true, .ignores_stop = true};
    if (tb__etcd_number("ID", c->lease, &body) == TB_OK && post_body(c, &call, &body, &reply) == TB_OK)
        json_decref(reply);
}

/* True if it is time to end. */
static bool sleep_unless_ending(etcd_client *c, int64_t until_ms) {
    struct timespec until = tb__time_of_ms(until_ms);
    pthread_mutex_lock(&c->lock);
    while (!c->is_ending && pthread_cond_timedwait(&c->ended, &c->lock, &until) == 0)
        ;
    bool is_ending = c->is_ending;
    pthread_mutex_unlock(&c->lock);
    return is_ending;
}

static void *lease_thread(void *arg) {
    etcd_client *c = arg;
    int64_t next_ms = c->renewed_ms + c->lease_ms / 3;
    while (!sleep_unless_ending(c, next_ms)) {
        tb_status status = renew_lease(c);
        bool is_over = tb__ms_until(c->renewed_ms + c->lease_ms) == 0;
        next_ms = status == TB_OK ? c->renewed_ms + c->lease_ms / 3 : tb__now_ms() + c->lease_ms / 10;
        if (status == TB_LOST || (status != TB_OK && is_over))
            stop_client(c, tb_error_detail());
    }
    /* An expired lease need not be revoked. */
    if (tb__ms_until(c->renewed_ms + c->lease_ms) > 0)
        revoke_lease(c);
    return NULL;
}

static tb_status grant_lease(etcd_client *c, int64_t deadline_ms) {
    tb__bytes body;
    json_t *reply;
    TB_TRY(tb__etcd_number("TTL", LEASE_S, &body));
    c->renewed_ms = tb__now_ms();
    tb__gateway_call call = {.path = "/v3/lease/grant", .deadline_ms = deadline_ms};
    TB_TRY(post_body(c, &call, &body, &reply));
    c->lease = tb__etcd_read_number(reply, "ID");
    c->lease_ms = tb__etcd_read_number(reply, "TTL") * 1000;
    json_decref(reply);
    if (c->lease == 0 || c->lease_ms < 1000)
        return tb__fail(TB_REFUSED, "%s: what answers grants no leases: it is no etcd", c->url);
    return TB_OK;
}

/* ---- Opening and closing ---------------------------------------------------------------------------------------- */

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
        status = txn_compare_and_set(c, key, 0, verifier.text, TB__VERIFIER_NBYTES, 0, &revision, &found);
    }
    if (found.revision > 0)
        status = check_verifier(c, &found, key, token);
    tb__store_value_fini(&found);
    return status;
}

static void free_etcd_client(etcd_client *c) {
    tb__gateway_destroy(c->gateway);
    pthread_cond_destroy(&c->ended);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

static void etcd_set_timeout(void *context, int timeout_ms) {
    etcd_client *c = context;
    c->timeout_ms = timeout_ms;
}

static void etcd_hang_up(void *context) {
    etcd_client *c = context;
    if (c->owner == getpid())
        stop_client(c, "this side has hung up");
}

static void etcd_close(void *context) {
    etcd_client *c = context;
    /* A forked child does not have the thread, and the memory may be in the middle of a change. */
    if (c->owner != getpid())
        return;
    stop_client(c, "this side has closed it");
    pthread_join(c->keeper, NULL);
    free_etcd_client(c);
}

static const tb__store_ops etcd_ops = {
    .set = etcd_set,
    .get = etcd_get,
    .wait = etcd_wait,
    .compare_and_set = etcd_compare_and_set,
    .delete_key = etcd_delete,
    .delete_prefix = etcd_delete_prefix,
    .list = etcd_list,
    .wait_change = etcd_wait_change,
    .set_timeout = etcd_set_timeout,
    .hang_up = etcd_hang_up,
    .close = etcd_close,
    .linger_ms = LINGER_MS,
};

tb_status tb__etcd_store_open(const char *url, const char *name_space, const char *token, int64_t deadline_ms,
                              int timeout_ms, const tb__store_ops **ops, void **context) {
    if (strlen(token) > TB__STORE_MAX_TOKEN)
        return tb__fail(TB_TOO_BIG, "a token of %zu bytes; %d are allowed", strlen(token), TB__STORE_MAX_TOKEN);
    etcd_client *c = tb__calloc(1, sizeof *c);
    if (!c)
        return TB_NO_MEMORY;
    snprintf(c->url, sizeof c->url, "%s", url);
    c->owner = getpid();
    c->timeout_ms = tb__ms_until(deadline_ms);
    pthread_mutex_init(&c->lock, NULL);
    tb__monotonic_cond_init(&c->ended);
    tb_status status = tb__gateway_create(url, &c->gateway);
    if (status == TB_OK)
        status = check_token(c, name_space, token, deadline_ms);
    if (status == TB_OK)
        status = grant_lease(c, deadline_ms);
    if (status == TB_OK) {
        c->timeout_ms = timeout_ms;
        status = tb__start_thread(&c->keeper, "tb-store-lease", lease_thread, c);
    }
    if (status != TB_OK) {
        free_etcd_client(c);
        return status;
    }
    *ops = &etcd_ops;
    *context = c;
    return TB_OK;
}
