/* The operations of the embedded server. */
#include "bus/store/session.h"

#include "base/log.h"

#include <string.h>

void tb__session_touch(tb__session *session) {
    if (!session->is_dirty) {
        session->is_dirty = true;
        TAILQ_INSERT_TAIL(&session->server->dirty, session, dirty);
    }
}

/* What a handler fills in. */
typedef struct answer {
    tb__store_message reply;
    tb__bytes entries; /* of the reply */
    uint8_t proof[TB__PROOF_NBYTES];
    bool is_none; /* it comes later, or never */
} answer;

static void send_reply(tb__session *session, const tb__store_message *reply) {
    tb__session_touch(session);
    if (session->is_closing)
        return;
    if (tb__store_encode(reply, &session->connection.out) != TB_OK)
        session->is_closing = true;
}

static void refuse(tb__session *session, uint64_t id, tb__store_op op, tb_status status) {
    const char *sentence = tb_error_detail();
    send_reply(session, &(tb__store_message){
                            .id = id,
                            .op = op,
                            .is_reply = true,
                            .status = status,
                            .value = {.data = (const uint8_t *)sentence, .nbytes = strlen(sentence)},
                        });
}

void tb__session_end(tb__session *session, uint64_t id, tb__store_op op, tb_status status) {
    refuse(session, id, op, status);
    session->is_closing = true;
}

/* `record` may be NULL. */
static tb_status give_record(answer *a, const tb__record *record, tb_status status) {
    if (record) {
        a->reply.revision = record->revision;
        a->reply.value = tb__record_value(record);
    }
    return status;
}

static tb_status serve_hello(tb__session *session, const tb__store_message *request, answer *a) {
    tb__store_server *server = session->server;
    if (session->has_hello)
        return tb__fail(TB_INVALID, "a second hello");
    if (request->version != TB__STORE_VERSION)
        return tb__fail(TB_REFUSED, "the client speaks version %u of the store's protocol, the server version %u",
                        (unsigned)request->version, (unsigned)TB__STORE_VERSION);
    TB_TRY(tb__random_bytes(session->mine.nonce, sizeof session->mine.nonce));
    session->has_hello = true;
    session->peer = request->end;
    memcpy(session->mine.id, server->id, sizeof server->id);
    tb__proof_make(&server->key, "server", TB__STORE_VERSION, &session->mine, &session->peer, a->proof);
    a->reply.version = TB__STORE_VERSION;
    a->reply.end = session->mine;
    a->reply.value = (tb__blob){.data = a->proof, .nbytes = sizeof a->proof};
    return TB_OK;
}

static bool is_writer(const tb__session *session) {
    static const tb__key_owner nobody;
    return memcmp(&session->owner, &nobody, sizeof nobody) != 0;
}

/* The connected session of a process; NULL: it has none. */
static tb__session *find_session(const tb__store_server *server, const tb__key_owner *owner) {
    for (tb__session *s = LIST_FIRST(&server->sessions); s; s = LIST_NEXT(s, link)) {
        if (s->has_proved && !s->is_closing && memcmp(&s->owner, owner, sizeof *owner) == 0)
            return s;
    }
    return NULL;
}

/* Gives the session the keys of the process whose secret it has. An older connection of that process is half open: the
 * process has given it up. */
static void take_over(tb__session *session, const tb__key_owner *owner) {
    tb__session *old = find_session(session->server, owner);
    session->owner = *owner;
    if (!old)
        return;
    session->has_ephemerals = old->has_ephemerals;
    old->has_ephemerals = false;
    tb__set_detail("a newer connection of the same process has taken over");
    tb__session_end(old, 0, TB__STORE_HELLO, TB_LOST);
}

static tb_status check_prove(const tb__session *session, const tb__store_message *request, tb__key_owner *owner) {
    static const tb__store_secret none;
    uint8_t digest[TB__SHA256_NBYTES];
    tb__sha256 hash;
    if (session->has_proved)
        return tb__fail(TB_INVALID, "a second prove");
    if (!tb__proof_accepts(&session->server->key, "client", TB__STORE_VERSION, &session->peer, &session->mine,
                           request->value.data, request->value.nbytes))
        return tb__fail(TB_DENIED, "the token is not the server's");
    if (memcmp(&request->secret, &none, sizeof none) == 0)
        return TB_OK;
    tb__sha256_init(&hash);
    tb__sha256_add(&hash, request->secret.bytes, sizeof request->secret.bytes);
    tb__sha256_end(&hash, digest);
    memcpy(owner->id, digest, sizeof owner->id);
    if (memcmp(owner->id, session->peer.id, sizeof owner->id) != 0)
        return tb__fail(TB_DENIED, "the id in the hello is not made from the secret");
    return TB_OK;
}

static tb_status serve_prove(tb__session *session, const tb__store_message *request, answer *a) {
    tb__key_owner owner = {0};
    tb_status status = check_prove(session, request, &owner);
    (void)a;
    if (status != TB_OK) {
        tb__log(TB_LOG_WARN, "store %s: a connection was refused: %s", session->server->endpoint.listener.address.url,
                tb_error_detail());
        return status;
    }
    take_over(session, &owner);
    session->has_proved = true;
    TAILQ_REMOVE(&session->server->pending_hello, session, pending_hello);
    return TB_OK;
}

/* Whether the session's process may write or delete the record; NULL: there is none. */
static tb_status check_writer(const tb__session *session, const tb__record *record, bool is_delete) {
    if (!is_writer(session))
        return tb__fail(TB_DENIED, "this connection came without a secret, and may not write");
    if (!record)
        return TB_OK;
    if (record->is_counter)
        return tb__fail(TB_DENIED, "it is a counter");
    bool is_own = memcmp(&record->owner, &session->owner, sizeof session->owner) == 0;
    if (record->lifetime == TB__STORE_ONCE)
        return is_own && is_delete ? TB_OK
                                   : tb__fail(TB_DENIED, is_delete ? "only the process that made it can delete it"
                                                                   : "it is written once, and was");
    if (is_own || (record->lifetime == TB__STORE_PERMANENT && !find_session(session->server, &record->owner)))
        return TB_OK;
    return tb__fail(TB_DENIED, "it belongs to another process");
}

static tb_status set_key(tb__session *session, const tb__store_message *request, tb__store_lifetime lifetime,
                         answer *a) {
    tb__store_table *table = &session->server->table;
    TB_TRY(check_writer(session, tb__store_table_find(table, request->key), false));
    TB_TRY(tb__store_table_set(table, request->key, request->value, &session->owner, lifetime));
    session->has_ephemerals |= lifetime == TB__STORE_EPHEMERAL;
    a->reply.revision = table->revision;
    return TB_OK;
}

static tb_status serve_set(tb__session *session, const tb__store_message *request, answer *a) {
    return set_key(session, request, (tb__store_lifetime)request->lifetime, a);
}

static tb_status serve_count(tb__session *session, const tb__store_message *request, answer *a) {
    TB_TRY(check_writer(session, NULL, false));
    return tb__store_table_count(&session->server->table, request->key, request->revision, request->number,
                                 &a->reply.revision);
}

static tb_status serve_take_block(tb__session *session, const tb__store_message *request, answer *a) {
    TB_TRY(check_writer(session, NULL, false));
    return tb__store_table_take_block(&session->server->table, request->guard, request->key, request->number,
                                      &a->reply.revision, &a->reply.number);
}

static tb_status serve_get(tb__session *session, const tb__store_message *request, answer *a) {
    return give_record(a, tb__store_table_find(&session->server->table, request->key), TB_OK);
}

static tb_status serve_compare_and_set(tb__session *session, const tb__store_message *request, answer *a) {
    const tb__record *present = tb__store_table_find(&session->server->table, request->key);
    return (present ? present->revision : 0) == request->revision ? serve_set(session, request, a)
                                                                  : give_record(a, present, TB_CONFLICT);
}

static tb_status serve_create_guarded(tb__session *session, const tb__store_message *request, answer *a) {
    const tb__store_table *table = &session->server->table;
    const tb__record *guard = tb__store_table_find(table, request->guard);
    const tb__record *present = tb__store_table_find(table, request->key);
    tb__blob value = guard ? tb__record_value(guard) : (tb__blob){0};
    if (!guard || value.nbytes != request->guard_value.nbytes ||
        (value.nbytes > 0 && memcmp(value.data, request->guard_value.data, value.nbytes) != 0))
        return tb__fail(TB_REFUSED, "the key that guards it has another value");
    return present ? give_record(a, present, TB_CONFLICT) : set_key(session, request, TB__STORE_ONCE, a);
}

static tb_status serve_delete(tb__session *session, const tb__store_message *request, answer *a) {
    tb__store_table *table = &session->server->table;
    TB_TRY(check_writer(session, tb__store_table_find(table, request->key), true));
    tb__store_table_remove(table, request->key);
    a->reply.revision = table->revision;
    return TB_OK;
}

static tb_status serve_list(tb__session *session, const tb__store_message *request, answer *a) {
    const tb__store_table *table = &session->server->table;
    size_t first, last, nbytes = 0;
    tb__store_table_range(table, request->key, &first, &last);
    for (size_t i = first; i < last; i++)
        nbytes += 14 + table->records.item[i]->key_nbytes + table->records.item[i]->value_nbytes;
    if (nbytes > TB__STORE_MAX_REPLY - 64)
        return tb__fail(TB_TOO_BIG, "%zu keys with %zu bytes in all; a list has at most %d: ask for longer prefixes",
                        last - first, nbytes, TB__STORE_MAX_REPLY - 64);
    if (!tb__vec_reserve(&a->entries, nbytes))
        return TB_NO_MEMORY;
    for (size_t i = first; i < last; i++) {
        const tb__record *record = table->records.item[i];
        TB_TRY(tb__store_add_entry(&a->entries, tb__record_key(record), record->revision, tb__record_value(record)));
    }
    a->reply.revision = table->revision;
    a->reply.nentries = last - first;
    return TB_OK;
}

static tb_status add_waiter(tb__session *session, const tb__store_message *request) {
    if (session->nwaiters >= TB__SESSION_MAX_WAITERS)
        return tb__fail(TB_REFUSED, "%zu waits are under way on this connection, and no more are allowed",
                        session->nwaiters);
    tb__waiter *waiter = tb__malloc(1, sizeof *waiter + request->key.nbytes);
    if (!waiter)
        return TB_NO_MEMORY;
    *waiter = (tb__waiter){.session = session, .id = request->id, .nbytes = request->key.nbytes};
    if (request->key.nbytes > 0)
        memcpy(waiter->prefix, request->key.data, request->key.nbytes);
    LIST_INSERT_HEAD(&session->server->waiters, waiter, in_server);
    LIST_INSERT_HEAD(&session->waiters, waiter, in_session);
    session->nwaiters++;
    return TB_OK;
}

static void remove_waiter(tb__waiter *waiter) {
    waiter->session->nwaiters--;
    LIST_REMOVE(waiter, in_server);
    LIST_REMOVE(waiter, in_session);
    free(waiter);
}

/* If there are changes, all of them, or that they are not known and have to be listed. */
static tb_status serve_wait_change(tb__session *session, const tb__store_message *request, answer *a) {
    const tb__store_table *table = &session->server->table;
    a->is_none = !tb__store_table_changed_since(table, request->key, request->revision);
    if (a->is_none)
        return add_waiter(session, request);
    a->reply.revision = table->revision;
    a->reply.number =
        !tb__store_table_get_changes(table, request->key, request->revision, &a->entries, &a->reply.nentries);
    if (a->reply.number)
        a->entries.count = a->reply.nentries = 0;
    return TB_OK;
}

static tb_status serve_cancel(tb__session *session, const tb__store_message *request, answer *a) {
    tb__waiter *waiter = LIST_FIRST(&session->waiters);
    a->is_none = true;
    while (waiter && waiter->id != request->id)
        waiter = LIST_NEXT(waiter, in_session);
    if (waiter)
        remove_waiter(waiter);
    return TB_OK;
}

void tb__session_drop_waiters(tb__session *session) {
    tb__waiter *next;
    for (tb__waiter *waiter = LIST_FIRST(&session->waiters); waiter; waiter = next) {
        next = LIST_NEXT(waiter, in_session);
        remove_waiter(waiter);
    }
}

void tb__wake_waiters(void *server, const tb__record *record) {
    tb__waiter *next;
    tb__bytes entry = {0};
    bool is_known = tb__store_table_add_change(record, &entry) == TB_OK;
    for (tb__waiter *waiter = LIST_FIRST(&((tb__store_server *)server)->waiters); waiter; waiter = next) {
        next = LIST_NEXT(waiter, in_server);
        if (!tb__blob_starts_with(tb__record_key(record), (tb__blob){.data = waiter->prefix, .nbytes = waiter->nbytes}))
            continue;
        send_reply(waiter->session, &(tb__store_message){.id = waiter->id,
                                                         .op = TB__STORE_WAIT_CHANGE,
                                                         .is_reply = true,
                                                         .revision = record->revision,
                                                         .number = !is_known,
                                                         .nentries = is_known,
                                                         .entries = {entry.item, is_known ? entry.count : 0}});
        remove_waiter(waiter);
    }
    free(entry.item);
}

/* A failure other than TB_CONFLICT is the reply. */
static tb_status (*const handlers[])(tb__session *session, const tb__store_message *request, answer *a) = {
    [TB__STORE_HELLO] = serve_hello,   [TB__STORE_SET] = serve_set,
    [TB__STORE_GET] = serve_get,       [TB__STORE_COMPARE_AND_SET] = serve_compare_and_set,
    [TB__STORE_DELETE] = serve_delete, [TB__STORE_COUNT] = serve_count,
    [TB__STORE_LIST] = serve_list,     [TB__STORE_WAIT_CHANGE] = serve_wait_change,
    [TB__STORE_CANCEL] = serve_cancel, [TB__STORE_CREATE_GUARDED] = serve_create_guarded,
    [TB__STORE_PROVE] = serve_prove,   [TB__STORE_TAKE_BLOCK] = serve_take_block,
};

_Static_assert(sizeof handlers / sizeof *handlers == TB__STORE_NOPS, "every operation has a handler");

static tb_status check_request(const tb__session *session, const tb__store_message *request) {
    if (request->is_reply)
        return tb__fail(TB_INVALID, "a reply, where a request was expected");
    if (!session->has_hello && request->op != TB__STORE_HELLO)
        return tb__fail(TB_INVALID, "a %s before the hello", tb__store_op_name(request->op));
    if (!session->has_proved && request->op > TB__STORE_PROVE)
        return tb__fail(TB_DENIED, "a %s before the client has proved that it has the token",
                        tb__store_op_name(request->op));
    return TB_OK;
}

void tb__session_serve(tb__session *session, const tb__store_message *request) {
    answer a = {.reply = {.id = request->id, .op = request->op, .is_reply = true}};
    tb_status status = check_request(session, request);
    bool may_go_on = status == TB_OK && request->op > TB__STORE_PROVE;
    if (status == TB_OK)
        status = handlers[request->op](session, request, &a);
    a.reply.status = status;
    a.reply.entries = (tb__blob){.data = a.entries.item, .nbytes = a.entries.count};
    if (status != TB_OK && status != TB_CONFLICT)
        (may_go_on ? refuse : tb__session_end)(session, request->id, request->op, status);
    else if (!a.is_none)
        send_reply(session, &a.reply);
    free(a.entries.item);
}
