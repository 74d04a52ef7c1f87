/* The client of the embedded server, on a link (bus/client/link.h).
 *
 * After a network outage TCP retransmits at growing intervals: an old connection may stay silent for many seconds while
 * a new one works at once. So a caller whose reply takes long opens a new connection. If that is answered, and the old
 * one still is not, the old one is lost. A server that is stopped or unreachable answers neither. */
#include "base/traffic.h"
#include "bus/client/link.h"
#include "bus/store/address.h"

#include <string.h>
#include <sys/socket.h>

/* LINGER_MS: the server removes a dead process's keys when the kernel has closed its connection, and the server is
 * scheduled. */
enum { LINGER_MS = 500 };

/* How long the connection may be silent before a new one is tried, the time in which that has to be answered, and the
 * time that the old one has then. */
enum { SILENCE_MS = 1500, TRIAL_MS = 1000, GRACE_MS = 300 };

/* A request that is under way. */
typedef struct call {
    LIST_ENTRY(call) link;
    struct socket_client *client;
    uint64_t id, ninterrupts;
    bool is_prompt;   /* it does not wait for others */
    int64_t begun_ms; /* of a trial */
    tb__link_reply *reply;
} call;

typedef struct socket_client {
    tb__address address;
    tb__proof_key key;
    tb__store_secret secret; /* zeros: this is a connection to try whether the server answers */
    bool is_trial;
    tb__link *link; /* its lock is for all that follows */
    LIST_HEAD(call_list, call) calls;
    uint64_t last_id;
    bool has_answered; /* the peer has answered like a store */
    uint64_t ninterrupts;
    bool is_trying; /* a caller tries a new connection */
} socket_client;

/* A reply that nobody waits for any more is dropped. */
static tb_status read_store_frame(tb__link *l, tb__blob frame, tb__link_reply *out, bool *is_reply) {
    socket_client *c = l->arg;
    tb__store_message *reply = &out->store;
    TB_TRY(tb__store_decode(frame, reply));
    if (!reply->is_reply) /* an echo server does this */
        return tb__fail(TB_INVALID, "the server sent a request instead of a reply");
    c->has_answered = true;
    tb__count_message(&tb__traffic_total.store);
    if (reply->id == 0) /* it is about the connection */
        return tb__fail(TB_LOST, "the server says: %.*s", (int)reply->value.nbytes, (const char *)reply->value.data);
    out->seq = reply->id;
    for (const call *waiting = LIST_FIRST(&c->calls); waiting; waiting = LIST_NEXT(waiting, link))
        *is_reply |= waiting->id == reply->id;
    return TB_OK;
}

static bool has_ended(void *arg) {
    call *c = arg;
    c->reply = tb__link_take_reply(c->client->link, c->id);
    return c->reply || (!c->is_prompt && c->ninterrupts != c->client->ninterrupts);
}

static bool has_heard(void *arg) {
    const call *c = arg;
    return has_ended(arg) || c->client->link->heard_ms >= c->begun_ms;
}

static tb_status open_client(const tb__address *address, const tb__proof_key *key, const tb__store_secret *secret,
                             int64_t deadline_ms, socket_client **out);
static void socket_close(void *context);

/* Whether bytes have arrived that the thread has not read yet, because the machine is busy. */
static bool has_unread(const tb__link *link) {
    char byte;
    return recv(link->socket.fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
}

/* The old connection is reset (SO_LINGER 0), so that none of its unsent requests reaches the server after those of the
 * next connection. */
static void probe_new_connection(call *c, int64_t deadline_ms) {
    socket_client *client = c->client, *other;
    c->begun_ms = tb__now_ms();
    int64_t trial_ms = c->begun_ms + TRIAL_MS;
    client->is_trying = true;
    tb__link_unlock(client->link);
    tb_status status =
        open_client(&client->address, &client->key, NULL, trial_ms < deadline_ms ? trial_ms : deadline_ms, &other);
    if (status == TB_OK)
        socket_close(other);
    tb__link_lock(client->link);
    if (status == TB_OK &&
        tb__link_wait(client->link, has_heard, c, tb__now_ms() + GRACE_MS, "answered") == TB_TIMEOUT &&
        !has_unread(client->link)) {
        struct linger at_once = {.l_onoff = 1, .l_linger = 0};
        setsockopt(client->link->socket.fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
        tb__link_break(client->link, "it was silent, and a new one was answered");
        tb__link_wake(client->link);
    }
    client->is_trying = false;
}

/* Until there is a reply, the connection is lost, or the time is up. */
static tb_status await_reply(call *c, int64_t deadline_ms) {
    tb__link *l = c->client->link;
    for (int64_t since_ms = tb__now_ms();;) {
        int64_t silent_ms = (since_ms > l->heard_ms ? since_ms : l->heard_ms) + SILENCE_MS;
        bool may_probe = c->is_prompt && !c->client->is_trial && silent_ms < deadline_ms;
        tb_status status = tb__link_wait(l, has_ended, c, may_probe ? silent_ms : deadline_ms, "answered");
        if (status != TB_TIMEOUT || !may_probe)
            return status;
        since_ms = tb__now_ms();
        if (!c->client->is_trying && l->heard_ms + SILENCE_MS <= since_ms && !has_unread(l))
            probe_new_connection(c, deadline_ms);
        if (c->reply)
            return TB_OK;
    }
}

/* With the lock held. */
static tb_status send_request(socket_client *client, const tb__store_message *request, int64_t deadline_ms) {
    tb__bytes frame = {0};
    tb_status status = tb__store_encode(request, &frame);
    tb__count_message(&tb__traffic_total.store);
    if (status == TB_OK)
        status = tb__link_send(client->link, &frame, NULL, 0, deadline_ms, NULL);
    free(frame.item);
    return status;
}

/* Sends the request and sleeps. The reply is for tb__link_reply_free, also with TB_CONFLICT. */
static tb_status request_reply(socket_client *client, tb__store_message request, int timeout_ms, tb__link_reply **out) {
    tb__link *l = client->link;
    if (l->socket.fd < 0)
        return tb__fail(TB_LOST, "%s: the connection belongs to the process that opened it", client->address.url);
    int64_t deadline_ms = tb__now_ms() + timeout_ms + 1;
    tb__link_lock(l);
    request.id = ++client->last_id;
    call c = {.client = client,
              .id = request.id,
              .is_prompt = request.op != TB__STORE_WAIT_CHANGE,
              .ninterrupts = client->ninterrupts};
    LIST_INSERT_HEAD(&client->calls, &c, link);
    tb_status status = send_request(client, &request, deadline_ms);
    bool is_sent = status == TB_OK;
    if (is_sent)
        status = await_reply(&c, deadline_ms);
    LIST_REMOVE(&c, link); /* so that nobody keeps an answer that comes while it is cancelled */
    if (is_sent && !c.reply && !c.is_prompt && status != TB_LOST)
        (void)send_request(client, &(tb__store_message){.id = c.id, .op = TB__STORE_CANCEL}, tb__now_ms());
    tb__link_unlock(l);
    if (!c.reply)
        return status == TB_OK || status == TB_TIMEOUT
                   ? tb__fail(TB_TIMEOUT, "%s: nothing within %d ms", client->address.url, timeout_ms)
                   : status;
    const tb__store_message *reply = &c.reply->store;
    status = reply->status;
    if (status == TB_OK && reply->op != request.op)
        status = tb__fail(TB_INTERNAL, "%s: a %s was answered as a %s", client->address.url,
                          tb__store_op_name(request.op), tb__store_op_name(reply->op));
    else if (status != TB_OK && status != TB_CONFLICT)
        status = tb__fail(status, "%.*s", (int)reply->value.nbytes, (const char *)reply->value.data);
    if (status == TB_OK || status == TB_CONFLICT)
        *out = c.reply;
    else
        tb__link_reply_free(c.reply);
    return status;
}

/* The value takes over the frame's memory, in which other fields come before it: so there is room for a NUL. */
static void take_value(tb__link_reply *reply, tb__store_value *out) {
    const tb__store_message *m = &reply->store;
    if (m->revision == 0)
        return;
    char *data = (char *)reply->frame;
    if (m->value.nbytes > 0)
        memmove(data, m->value.data, m->value.nbytes);
    data[m->value.nbytes] = '\0';
    reply->frame = NULL;
    *out = (tb__store_value){.data = data, .nbytes = m->value.nbytes, .revision = m->revision};
}

/* The array of entries, then their keys and values, each with a NUL after it. */
static tb_status copy_entries(const tb__store_message *reply, tb__store_entries *out) {
    size_t count = reply->nentries;
    char *memory = tb__malloc(1, count * sizeof *out->item + reply->entries.nbytes);
    if (!memory)
        return TB_NO_MEMORY;
    *out = (tb__store_entries){
        .count = count, .item = (void *)memory, .revision = reply->revision, .must_list = reply->number != 0};
    char *at = memory + count * sizeof *out->item;
    tb__blob rest = reply->entries, key, value;
    uint64_t revision;
    for (size_t i = 0; i < count && tb__store_next_entry(&rest, &key, &revision, &value); i++) {
        memcpy(at, key.data, key.nbytes);
        at[key.nbytes] = '\0';
        char *data = at + key.nbytes + 1;
        if (value.nbytes > 0)
            memcpy(data, value.data, value.nbytes);
        data[value.nbytes] = '\0';
        out->item[i] = (tb__store_entry){
            .key = at, .value = {.data = revision ? data : NULL, .nbytes = value.nbytes, .revision = revision}};
        at = data + value.nbytes + 1;
    }
    return TB_OK;
}

static tb_status socket_call(void *context, const tb__store_message *request, int timeout_ms, tb__store_result *out) {
    tb__link_reply *reply = NULL;
    tb_status copied = TB_OK, status = request_reply(context, *request, timeout_ms, &reply);
    if (!reply)
        return status;
    out->revision = reply->store.revision;
    out->number = reply->store.number;
    if (status == TB_OK && (request->op == TB__STORE_LIST || request->op == TB__STORE_WAIT_CHANGE))
        copied = copy_entries(&reply->store, &out->entries);
    else if (request->op == TB__STORE_GET || status == TB_CONFLICT)
        take_value(reply, &out->value);
    tb__link_reply_free(reply);
    return copied == TB_OK ? status : copied;
}

static void socket_interrupt(void *context) {
    socket_client *c = context;
    tb__link_lock(c->link);
    c->ninterrupts++;
    tb__link_wake(c->link);
    tb__link_unlock(c->link);
}

static void socket_hang_up(void *context) {
    tb__link *l = ((socket_client *)context)->link;
    if (l->socket.fd < 0)
        return;
    tb__link_lock(l);
    tb__link_break(l, "this side has hung up");
    tb__link_wake(l);
    tb__link_unlock(l);
}

static void socket_close(void *context) {
    socket_client *c = context;
    /* A forked child does not have the descriptors, and the memory may be in the middle of a change. */
    if (tb__is_inherited(&c->link->owner))
        return;
    tb__link_close(c->link);
    free(c);
}

static const tb__store_ops socket_ops = {
    .call = socket_call,
    .hang_up = socket_hang_up,
    .interrupt = socket_interrupt,
    .close = socket_close,
    .linger_ms = LINGER_MS,
};

/* Why the hello was not answered as by a store. The status stays TB_LOST: another program may listen there the next
 * time. */
static tb_status fail_hello(const socket_client *c) {
    if (c->has_answered)
        return TB_LOST;
    if (c->link->is_malformed)
        return tb__fail(TB_LOST, "%s: a program that is not a tensorbus store listens there", c->address.url);
    return tb__fail(TB_LOST,
                    "%s: the program that listens there has closed the connection without an answer: it is not a "
                    "tensorbus store, or "
                    "it is ending",
                    c->address.url);
}

/* Proves to the server that this process has the token, and lets it prove the same. */
static tb_status prove_token(socket_client *c, int64_t deadline_ms) {
    tb__proof_end mine;
    uint8_t proof[TB__PROOF_NBYTES], digest[TB__SHA256_NBYTES];
    tb__link_reply *reply;
    tb__sha256 hash;
    tb__sha256_init(&hash);
    tb__sha256_add(&hash, c->secret.bytes, sizeof c->secret.bytes);
    tb__sha256_end(&hash, digest);
    memcpy(mine.id, digest, sizeof mine.id);
    TB_TRY(tb__random_bytes(mine.nonce, sizeof mine.nonce));
    tb__store_message hello = {.op = TB__STORE_HELLO, .version = TB__STORE_VERSION, .end = mine};
    TB_TRY(request_reply(c, hello, tb__ms_until(deadline_ms), &reply));
    const tb__store_message *m = &reply->store;
    bool is_same = m->version == TB__STORE_VERSION && tb__proof_accepts(&c->key, "server", TB__STORE_VERSION, &m->end,
                                                                        &mine, m->value.data, m->value.nbytes);
    tb__proof_make(&c->key, "client", TB__STORE_VERSION, &mine, &m->end, proof);
    tb__link_reply_free(reply);
    if (!is_same)
        return tb__fail(TB_DENIED, "the token is not the server's");
    tb__store_message prove = {.op = TB__STORE_PROVE, .value = {proof, sizeof proof}, .secret = c->secret};
    TB_TRY(request_reply(c, prove, tb__ms_until(deadline_ms), &reply));
    tb__link_reply_free(reply);
    return TB_OK;
}

static tb_status connect_client(socket_client *c, int64_t deadline_ms) {
    int fd, error;
    TB_TRY(tb__link_watch_wake(c->link));
    TB_TRY(tb__address_connect(&c->address, deadline_ms, &fd, &error));
    tb__owned_fd_init(&c->link->socket, fd);
    TB_TRY(tb__address_check_server(&c->address, fd));
    tb_status status = prove_token(c, deadline_ms);
    if (status == TB_TIMEOUT)
        return tb__fail(TB_TIMEOUT, "%s: silent: a program listens there, but does not answer", c->address.url);
    if (status == TB_LOST)
        return fail_hello(c);
    return status == TB_REFUSED || status == TB_DENIED ? tb__fail_within(status, "%.100s", c->address.url) : status;
}

static tb_status open_client(const tb__address *address, const tb__proof_key *key, const tb__store_secret *secret,
                             int64_t deadline_ms, socket_client **out) {
    socket_client *c = tb__calloc(1, sizeof *c);
    if (!c)
        return TB_NO_MEMORY;
    LIST_INIT(&c->calls);
    c->address = *address;
    c->key = *key;
    c->is_trial = !secret;
    if (secret)
        c->secret = *secret;
    tb_status status = tb__link_create(address->url, ": the connection was lost", &c->link);
    if (status != TB_OK) {
        free(c);
        return status;
    }
    c->link->read = read_store_frame;
    c->link->arg = c;
    c->link->keeps_unsent = true;
    c->link->in.max_nbytes = TB__STORE_MAX_REPLY;
    status = connect_client(c, deadline_ms);
    if (status != TB_OK) {
        socket_close(c);
        return status;
    }
    *out = c;
    return TB_OK;
}

tb_status tb__socket_store_open(const tb__store_url *url, const char *token, const tb__store_secret *secret,
                                int64_t deadline_ms, const tb__store_ops **ops, void **context) {
    tb__address address;
    tb__proof_key key;
    socket_client *c;
    TB_TRY(tb__address_parse(url->base, &address));
    tb__proof_key_derive(token, TB__STORE_PURPOSE, &key);
    TB_TRY(open_client(&address, &key, secret, deadline_ms, &c));
    *ops = &socket_ops;
    *context = c;
    return TB_OK;
}
