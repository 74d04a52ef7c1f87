/* The operations of the embedded server. */
#include "bus/store/session.h"

#include <string.h>

void tb__session_touch(tb__session *session) {
    if (!session->is_dirty) {
        session->is_dirty = true;
        TAILQ_INSERT_TAIL(&session->server->dirty, session, dirty);
    }
}

static void send_reply(tb__session *session, const tb__store_message *reply) {
    tb__session_touch(session);
    if (session->is_closing)
        return;
    if (tb__store_encode(reply, &session->out) != TB_OK || session->out.count - session->nsent > TB__SESSION_STUCK)
        session->is_closing = true;
}

void tb__session_refuse(tb__session *session, uint64_t id, tb__store_op op, tb_status status) {
    const char *sentence = tb_error_detail();
    send_reply(session, &(tb__store_message){
                            .id = id,
                            .op = op,
                            .is_reply = true,
                            .status = status,
                            .value = {.data = (const uint8_t *)sentence, .nbytes = strlen(sentence)},
                        });
}

static void reply_revision(tb__session *session, const tb__store_message *request, uint64_t revision) {
    send_reply(session,
               &(tb__store_message){.id = request->id, .op = request->op, .is_reply = true, .revision = revision});
}

/* `record` may be NULL. */
static void reply_record(tb__session *session, uint64_t id, tb__store_op op, tb_status status,
                         const tb__record *record) {
    tb__store_message reply = {.id = id, .op = op, .is_reply = true, .status = status};
    if (record) {
        reply.revision = record->revision;
        reply.value = tb__record_value(record);
    }
    send_reply(session, &reply);
}

/* Takes as long for any token as for any other. */
static bool is_server_token(const tb__store_server *server, tb__span given) {
    uint8_t padded[TB__STORE_MAX_TOKEN] = {0};
    if (given.nbytes > 0)
        memcpy(padded, given.data, given.nbytes);
    volatile unsigned difference = (unsigned)(given.nbytes ^ server->token_nbytes);
    for (size_t i = 0; i < sizeof padded; i++)
        difference |= (unsigned)(padded[i] ^ server->token[i]);
    return difference == 0;
}

static void serve_hello(tb__session *session, const tb__store_message *request) {
    tb__store_server *server = session->server;
    tb_status status = TB_OK;
    if (session->has_greeted)
        status = tb__fail(TB_INVALID, "a second hello");
    else if (request->version != TB__STORE_VERSION)
        status = tb__fail(TB_REFUSED, "the client speaks version %u of the store's protocol, the server version %u",
                          (unsigned)request->version, (unsigned)TB__STORE_VERSION);
    else if (!is_server_token(server, request->value))
        status = tb__fail(TB_DENIED, "the token is not the server's");
    if (status != TB_OK) {
        tb__session_refuse(session, request->id, request->op, status);
        session->is_closing = true;
        return;
    }
    session->has_greeted = true;
    TAILQ_REMOVE(&server->pending_hello, session, pending_hello);
    send_reply(session, &(tb__store_message){
                            .id = request->id, .op = request->op, .is_reply = true, .version = TB__STORE_VERSION});
}

static void serve_set(tb__session *session, const tb__store_message *request) {
    tb__store_table *table = &session->server->table;
    bool is_ephemeral = request->lifetime == TB__STORE_EPHEMERAL;
    tb_status status = tb__store_table_set(table, request->key, request->value, is_ephemeral ? session->id : 0);
    if (status != TB_OK) {
        tb__session_refuse(session, request->id, request->op, status);
        return;
    }
    session->has_ephemerals |= is_ephemeral;
    reply_revision(session, request, table->revision);
}

static void serve_get(tb__session *session, const tb__store_message *request) {
    reply_record(session, request->id, request->op, TB_OK, tb__store_table_find(&session->server->table, request->key));
}

static void serve_compare_and_set(tb__session *session, const tb__store_message *request) {
    const tb__record *present = tb__store_table_find(&session->server->table, request->key);
    if ((present ? present->revision : 0) == request->revision)
        serve_set(session, request);
    else
        reply_record(session, request->id, request->op, TB_CONFLICT, present);
}

static void serve_delete(tb__session *session, const tb__store_message *request) {
    tb__store_table_remove(&session->server->table, request->key);
    reply_revision(session, request, session->server->table.revision);
}

static void serve_delete_prefix(tb__session *session, const tb__store_message *request) {
    tb__store_table_remove_prefix(&session->server->table, request->key);
    reply_revision(session, request, session->server->table.revision);
}

static void serve_list(tb__session *session, const tb__store_message *request) {
    const tb__store_table *table = &session->server->table;
    size_t first, last, nbytes = 0;
    tb__store_table_range(table, request->key, &first, &last);
    for (size_t i = first; i < last; i++)
        nbytes += 14 + table->records.item[i]->key_nbytes + table->records.item[i]->value_nbytes;
    tb_status status = TB_OK;
    tb__bytes entries = {0};
    if (nbytes > TB__STORE_MAX_REPLY - 64)
        status = tb__fail(TB_TOO_BIG, "%zu keys with %zu bytes in all; a list has at most %d: ask for longer prefixes",
                          last - first, nbytes, TB__STORE_MAX_REPLY - 64);
    else if (!tb__vec_reserve(&entries, nbytes))
        status = TB_NO_MEMORY;
    for (size_t i = first; i < last && status == TB_OK; i++) {
        const tb__record *record = table->records.item[i];
        status = tb__store_add_entry(&entries, tb__record_key(record), record->revision, tb__record_value(record));
    }
    if (status == TB_OK)
        send_reply(session, &(tb__store_message){
                                .id = request->id,
                                .op = request->op,
                                .is_reply = true,
                                .revision = table->revision,
                                .nentries = (uint32_t)(last - first),
                                .entries = {.data = entries.item, .nbytes = entries.count},
                            });
    else
        tb__session_refuse(session, request->id, request->op, status);
    free(entries.item);
}

static void add_waiter(tb__session *session, const tb__store_message *request) {
    tb_status status = TB_OK;
    tb__waiter *waiter = NULL;
    if (session->nwaiters >= TB__SESSION_MAX_WAITERS)
        status = tb__fail(TB_REFUSED, "%zu waits are under way on this connection, and no more are allowed",
                          session->nwaiters);
    else if (!(waiter = tb__malloc(1, sizeof *waiter + request->key.nbytes)))
        status = TB_NO_MEMORY;
    if (status != TB_OK) {
        tb__session_refuse(session, request->id, request->op, status);
        return;
    }
    *waiter = (tb__waiter){.session = session, .id = request->id, .op = request->op, .nbytes = request->key.nbytes};
    if (request->key.nbytes > 0)
        memcpy(waiter->key, request->key.data, request->key.nbytes);
    LIST_INSERT_HEAD(&session->server->waiters, waiter, in_server);
    LIST_INSERT_HEAD(&session->waiters, waiter, in_session);
    session->nwaiters++;
}

static void remove_waiter(tb__waiter *waiter) {
    waiter->session->nwaiters--;
    LIST_REMOVE(waiter, in_server);
    LIST_REMOVE(waiter, in_session);
    free(waiter);
}

static void serve_wait(tb__session *session, const tb__store_message *request) {
    const tb__record *present = tb__store_table_find(&session->server->table, request->key);
    if (present)
        reply_record(session, request->id, request->op, TB_OK, present);
    else
        add_waiter(session, request);
}

static void serve_wait_change(tb__session *session, const tb__store_message *request) {
    const tb__store_table *table = &session->server->table;
    if (tb__store_table_changed_since(table, request->key, request->revision))
        reply_revision(session, request, table->revision);
    else
        add_waiter(session, request);
}

static void serve_cancel(tb__session *session, const tb__store_message *request) {
    for (tb__waiter *waiter = LIST_FIRST(&session->waiters); waiter; waiter = LIST_NEXT(waiter, in_session)) {
        if (waiter->id == request->id) {
            remove_waiter(waiter);
            return;
        }
    }
}

void tb__session_drop_waiters(tb__session *session) {
    tb__waiter *next;
    for (tb__waiter *waiter = LIST_FIRST(&session->waiters); waiter; waiter = next) {
        next = LIST_NEXT(waiter, in_session);
        remove_waiter(waiter);
    }
}

void tb__wake_waiters(void *server, const tb__record *record, bool is_removed) {
    tb__span key = tb__record_key(record);
    tb__waiter *next;
    for (tb__waiter *waiter = LIST_FIRST(&((tb__store_server *)server)->waiters); waiter; waiter = next) {
        next = LIST_NEXT(waiter, in_server);
        tb__span wanted = {.data = waiter->key, .nbytes = waiter->nbytes};
        if (!tb__span_starts_with(key, wanted))
            continue;
        if (waiter->op == TB__STORE_WAIT && (is_removed || wanted.nbytes != key.nbytes))
            continue;
        if (waiter->op == TB__STORE_WAIT)
            reply_record(waiter->session, waiter->id, waiter->op, TB_OK, record);
        else
            send_reply(waiter->session,
                       &(tb__store_message){
                           .id = waiter->id, .op = waiter->op, .is_reply = true, .revision = record->revision});
        remove_waiter(waiter);
    }
}

static void (*const handlers[])(tb__session *session, const tb__store_message *request) = {
    [TB__STORE_HELLO] = serve_hello,
    [TB__STORE_SET] = serve_set,
    [TB__STORE_GET] = serve_get,
    [TB__STORE_WAIT] = serve_wait,
    [TB__STORE_COMPARE_AND_SET] = serve_compare_and_set,
    [TB__STORE_DELETE] = serve_delete,
    [TB__STORE_DELETE_PREFIX] = serve_delete_prefix,
    [TB__STORE_LIST] = serve_list,
    [TB__STORE_WAIT_CHANGE] = serve_wait_change,
    [TB__STORE_CANCEL] = serve_cancel,
};

_Static_assert(sizeof handlers / sizeof *handlers == TB__STORE_NOPS, "every operation has a handler");

void tb__session_serve(tb__session *session, const tb__store_message *request) {
    tb_status status = TB_OK;
    if (request->is_reply)
        status = tb__fail(TB_INVALID, "a reply where a request belongs");
    else if (!session->has_greeted && request->op != TB__STORE_HELLO)
        status = tb__fail(TB_INVALID, "a %s before the hello", tb__store_op_name(request->op));
    if (status == TB_OK) {
        handlers[request->op](session, request);
    } else {
        tb__session_refuse(session, request->id, request->op, status);
        session->is_closing = true;
    }
}
