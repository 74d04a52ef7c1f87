/* The key-value store through which independently launched processes find each other. The URL's scheme chooses the
 * implementation:
 *
 *   unix:/path/to.sock     the embedded server (server.h) on a Unix socket
 *   tcp://127.0.0.1:7000   the same over TCP: a name, an IPv4 address or a bracketed IPv6 one
 *   etcd://a:2379,b:2379   etcd 3.4 or newer, by its JSON gateway; endpoints are tried in turn
 *
 * "?namespace=NAME" after any of them puts "NAME/" before every key, which the caller never sees. Of etcd, "ca=FILE"
 * there is the CA of its certificate, for TLS; "user=FILE" and "password=FILE" are files whose first line is that.
 *
 * Every change gets the next number of the store's revision counter, from 1. Calls may come from several threads at
 * once, and a wait in one does not hold up the others. Waits end after their own timeout, all other calls after the
 * timeout given at open, with TB_TIMEOUT; a change that timed out may still take effect. Once the connection is lost
 * every call returns TB_LOST, and the store can only be closed. It belongs to the process that opened it: in a forked
 * child it counts as lost.
 *
 * In the embedded server keys belong to the process that made them: TB_DENIED for whoever else writes or deletes an
 * ephemeral one, or a permanent one whose maker is still connected. A process is who knows its secret: a connection
 * with the secret of an older one takes its keys over, and ends it.
 *
 * With etcd the connection is a lease of a few seconds: it is lost when no endpoint has answered for that long, and
 * what a dead process wrote stays for that long. The token is kept per namespace, by the first process that opens it;
 * it blocks clients with a wrong token, but not other users of etcd, which has to be protected by its own means. So do
 * keys: they belong to nobody there.
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
    TB__STORE_ONCE,      /* permanent, and never written again; only the process that made it can delete it */
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
    bool must_list;        /* of changes: the store does not know them all any more, and there are none here */
} tb__store_entries;

typedef struct tb__store tb__store;

/* Who opens a store. */
typedef struct tb__store_secret {
    uint8_t bytes[16];
} tb__store_secret;

tb_status tb__store_secret_make(tb__store_secret *out); /* random */

/* Connects, once. TB_IO if nobody listens there, TB_TIMEOUT if the server does not answer, TB_DENIED for a wrong token,
 * TB_REFUSED for another protocol version. A token of NULL is ""; others have at least 32 bytes. */
tb_status tb__store_open(const char *url, const char *token, int timeout_ms, tb__store **out);

/* For calls that begin from now on, in place of the timeout given at open. */
void tb__store_set_timeout(tb__store *store, int timeout_ms);

/* How long what a dead process wrote may still be there. */
int tb__store_linger_ms(const tb__store *store);

/* Ends the connection: every call that is running, and all later ones, return TB_LOST. Stops a thread that waits. The
 * store still has to be closed. */
void tb__store_hang_up(tb__store *store);

/* Ends the waits for changes that are under way, with TB_TIMEOUT. */
void tb__store_interrupt(tb__store *store);

/* Ephemeral keys go with it. No other call may be under way. NULL is allowed. */
void tb__store_close(tb__store *store);

/* `revision` of the change may be NULL, here and below. */
tb_status tb__store_set(tb__store *store, const char *key, const void *data, size_t nbytes, tb__store_lifetime lifetime,
                        uint64_t *revision);

/* A key that is not there is no failure: the value's revision is 0. Values are freed with tb__store_value_fini. */
tb_status tb__store_get(tb__store *store, const char *key, tb__store_value *out);

/* Writes only if the key's revision is `expected`; 0: only if there is no such key. If not: TB_CONFLICT, and `present`
 * (may be NULL) is what is there now; it is left alone whatever else happens. */
tb_status tb__store_compare_and_set(tb__store *store, const char *key, uint64_t expected, const void *data,
                                    size_t nbytes, tb__store_lifetime lifetime, uint64_t *revision,
                                    tb__store_value *present);

/* Creates a key that is written once (TB__STORE_ONCE) in one transaction: only if it does not exist, else TB_CONFLICT
 * with `present`, as above; and only if the key `guard` has this value, else TB_REFUSED, whatever is there. */
tb_status tb__store_create_guarded(tb__store *store, const char *guard, const char *guard_value, const char *key,
                                   const void *data, size_t nbytes, tb__store_value *present);

/* Deleting what is not there succeeds. */
tb_status tb__store_delete(tb__store *store, const char *key);

/* A counter: a key that only this function writes. Raises it to at least `least`, tells that value, and adds `add`; a
 * counter that is not there is 0. */
tb_status tb__store_count(tb__store *store, const char *key, uint64_t least, uint64_t add, uint64_t *before);

/* A block of numbers that belongs to a key: in one transaction, takes `count` numbers from the counter when the key is
 * asked for the first time; `first` of them is the same ever after. `next` is the counter's value then. The key is a
 * counter itself. */
tb_status tb__store_take_block(tb__store *store, const char *counter, const char *key, uint64_t count, uint64_t *first,
                               uint64_t *next);

/* All keys that start with the prefix; "" is every key of the namespace. Freed with tb__store_entries_fini. */
tb_status tb__store_list(tb__store *store, const char *prefix, tb__store_entries *out);

/* Sleeps until a key that starts with the prefix was written or deleted after revision `since`. May return without a
 * change if the server's log does not reach back to `since`. */
tb_status tb__store_wait_change(tb__store *store, const char *prefix, uint64_t since, int timeout_ms,
                                uint64_t *revision);
/* The same, with all changes from `since` up to the revision in `out`, one after the other: a key that was deleted has
 * no data. To follow a prefix: list it, and apply what has changed since the list's revision; list it again only if
 * `must_list` is set. */
tb_status tb__store_wait_changes(tb__store *store, const char *prefix, uint64_t since, int timeout_ms,
                                 tb__store_entries *out);
/* The entries of a list after these changes. */
tb_status tb__store_apply_changes(const tb__store_entries *before, const tb__store_entries *changes,
                                  tb__store_entries *out);

void tb__store_value_fini(tb__store_value *value);
void tb__store_entries_fini(tb__store_entries *entries);

/* Whether the store is an embedded server (server.h). */
bool tb__store_is_embedded(const char *url);

/* As tb__store_open, with a deadline of its own for connecting, by the process with this secret; NULL: a new one. */
tb_status tb__store_open_until(const char *url, const char *token, const tb__store_secret *secret, int64_t deadline_ms,
                               int timeout_ms, tb__store **out);

#endif
