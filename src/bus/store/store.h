/* The key-value store through which independently launched processes find each other. The URL's scheme chooses the
 * implementation:
 *
 *   unix:/path/to.sock     the embedded server (server.h) on a Unix socket
 *   tcp://127.0.0.1:7000   the same over TCP: a name, an IPv4 address or a bracketed IPv6 one
 *   etcd://a:2379,b:2379   etcd 3.4 or newer, by its JSON gateway over plain HTTP; endpoints are tried in turn
 *
 * "?namespace=NAME" after any of them puts "NAME/" before every key, which the caller never sees.
 *
 * Every change gets the next number of the store's revision counter, from 1. Calls may come from several threads at
 * once, and a wait in one does not hold up the others. Waits end after their own timeout, all other calls after the
 * timeout given at open, with TB_TIMEOUT; a change that timed out may still take effect. Once the connection is lost
 * every call returns TB_LOST, and the store can only be closed. It belongs to the process that opened it: in a forked
 * child it counts as lost.
 *
 * With etcd the connection is a lease of a few seconds: it is lost when no endpoint has answered for that long, and
 * what a dead process wrote stays for that long. The token is kept per namespace, by the first process that opens it;
 * it blocks clients with a wrong token, but not other users of etcd, which has to be protected by its own means.
 * Revisions are etcd's, shared by all its users. */
#ifndef TB_BUS_STORE_STORE_H
#define TB_BUS_STORE_STORE_H

#include "base/error.h"

enum {
    TB__STORE_MAX_KEY = 1024,      /* bytes of text, at least 1 */
    TB__STORE_MAX_VALUE = 1 << 20, /* bytes, 0 allowed */
    TB__STORE_MAX_NAMESPACE = 127,
};

typedef enum tb__store_lifetime {
    TB__STORE_PERMANENT, /* until it is deleted, or the server ends */
    TB__STORE_EPHEMERAL, /* until the connection that wrote it last ends, for whatever reason */
} tb__store_lifetime;

typedef struct tb__store_value {
    void *data; /* a NUL follows the bytes; NULL where there is no such key */
    size_t nbytes;
    uint64_t revision; /* of the key's last change; 0 where there is no such key */
} tb__store_value;

typedef struct tb__store_entry {
    const char *key;
    tb__store_value value;
} tb__store_entry;

typedef struct tb__store_entries {
    size_t count;
    tb__store_entry *item; /* by key; one allocation with all they point to */
    uint64_t revision;     /* of the whole store when they were listed */
} tb__store_entries;

typedef struct tb__store tb__store;

/* Connects, once. TB_IO if nobody listens there, TB_TIMEOUT if the server does not answer, TB_DENIED for a wrong token,
 * TB_REFUSED for another protocol version. A token of NULL is "". */
tb_status tb__store_open(const char *url, const char *token, int timeout_ms, tb__store **out);

/* For calls that begin from now on, in place of the timeout given at open. */
void tb__store_set_timeout(tb__store *store, int timeout_ms);

/* How long what a dead process wrote may still be there. */
int tb__store_linger_ms(const tb__store *store);

/* Ends the connection: every call that is running, and all later ones, return TB_LOST. Stops a thread that waits. The
 * store still has to be closed. */
void tb__store_hang_up(tb__store *store);

/* Ephemeral keys go with it. No other call may be under way. NULL is allowed. */
void tb__store_close(tb__store *store);

/* `revision` of the change may be NULL, here and below. */
tb_status tb__store_set(tb__store *store, const char *key, const void *data, size_t nbytes, tb__store_lifetime lifetime,
                        uint64_t *revision);

/* A key that is not there is no failure: the value's revision is 0. Values are freed with tb__store_value_fini. */
tb_status tb__store_get(tb__store *store, const char *key, tb__store_value *out);

/* Sleeps until the key exists. To look without waiting use get: a short timeout may pass before the answer comes. */
tb_status tb__store_wait(tb__store *store, const char *key, int timeout_ms, tb__store_value *out);

/* Writes only if the key's revision is `expected`; 0: only if there is no such key. If not: TB_CONFLICT, and `present`
 * (may be NULL) is what is there now; it is left alone whatever else happens. */
tb_status tb__store_compare_and_set(tb__store *store, const char *key, uint64_t expected, const void *data,
                                    size_t nbytes, tb__store_lifetime lifetime, uint64_t *revision,
                                    tb__store_value *present);

/* Deleting what is not there succeeds. */
tb_status tb__store_delete(tb__store *store, const char *key);
tb_status tb__store_delete_prefix(tb__store *store, const char *prefix);

/* All keys that start with the prefix; "" is every key of the namespace. Freed with tb__store_entries_fini. */
tb_status tb__store_list(tb__store *store, const char *prefix, tb__store_entries *out);

/* Sleeps until a key that starts with the prefix was written or deleted after revision `since`. To follow a prefix:
 * list it, wait for a change since the list's revision, list it again. May return without a change if the server's log
 * does not reach back to `since`. */
tb_status tb__store_wait_change(tb__store *store, const char *prefix, uint64_t since, int timeout_ms,
                                uint64_t *revision);

void tb__store_value_fini(tb__store_value *value);
void tb__store_entries_fini(tb__store_entries *entries);

/* What an implementation provides. Keys and prefixes arrive checked and with the namespace before them; outputs are
 * never NULL. Every slot may be called from several threads at once, except close. */
typedef struct tb__store_ops {
    tb_status (*set)(void *context, const char *key, const void *data, size_t nbytes, tb__store_lifetime lifetime,
                     uint64_t *revision);
    tb_status (*get)(void *context, const char *key, tb__store_value *out);
    tb_status (*wait)(void *context, const char *key, int timeout_ms, tb__store_value *out);
    tb_status (*compare_and_set)(void *context, const char *key, uint64_t expected, const void *data, size_t nbytes,
                                 tb__store_lifetime lifetime, uint64_t *revision, tb__store_value *present);
    tb_status (*delete_key)(void *context, const char *key);
    tb_status (*delete_prefix)(void *context, const char *prefix);
    tb_status (*list)(void *context, const char *prefix, tb__store_entries *out);
    tb_status (*wait_change)(void *context, const char *prefix, uint64_t since, int timeout_ms, uint64_t *revision);
    void (*set_timeout)(void *context, int timeout_ms);
    void (*hang_up)(void *context);
    void (*close)(void *context);
    int linger_ms; /* how long what a dead process wrote may still be there */
} tb__store_ops;

/* Opens an implementation by the deadline (of CLOCK_MONOTONIC); later calls take timeout_ms. The URL comes without the
 * namespace, and keys come with it. */
typedef tb_status (*tb__store_open_fn)(const char *url, const char *name_space, const char *token, int64_t deadline_ms,
                                       int timeout_ms, const tb__store_ops **ops, void **context);

tb_status tb__socket_store_open(const char *url, const char *name_space, const char *token, int64_t deadline_ms,
                                int timeout_ms, const tb__store_ops **ops, void **context);
tb_status tb__etcd_store_open(const char *url, const char *name_space, const char *token, int64_t deadline_ms,
                              int timeout_ms, const tb__store_ops **ops, void **context);

/* Whether the store is an embedded server (server.h). */
bool tb__store_is_embedded(const char *url);

/* As tb__store_open, with a deadline of its own for connecting. */
tb_status tb__store_open_until(const char *url, const char *token, int64_t deadline_ms, int timeout_ms,
                               tb__store **out);

#endif
