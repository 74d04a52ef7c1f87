/* Requests to etcd's gateway, and its answers: JSON with base64 for bytes and text for 64-bit numbers. Pure functions.
 *
 * All keys lie under "tensorbus/data/", apart from those of other users of the same etcd. */
#ifndef TB_BUS_STORE_ETCD_JSON_H
#define TB_BUS_STORE_ETCD_JSON_H

#include "bus/store/protocol.h"

#include <jansson.h>

#define TB__ETCD_DATA  "tensorbus/data/"
#define TB__ETCD_TOKEN "tensorbus/token/" /* and a namespace: what its token is checked with */

/* Each makes a request, for tb__gateway_post; NULL: there is no memory. Keys are etcd's, with the prefix. */
/* For reading a key, and for deleting one. */
json_t *tb__etcd_key(const char *key);

/* All keys from `from` on that begin with the prefix, at most `limit`; as they were at the revision, if that is not 0.
 */
json_t *tb__etcd_page(const char *prefix, const char *from, int64_t limit, uint64_t revision);
json_t *tb__etcd_put(const char *key, const void *data, size_t nbytes, int64_t lease);
json_t *tb__etcd_compare_and_set(const char *key, uint64_t expected, const void *data, size_t nbytes, int64_t lease);
/* Deletes a key that has this revision, or, with 0, that is bound to the lease. */
json_t *tb__etcd_delete_bound(const char *key, uint64_t revision, int64_t lease);
/* If it fails, the reply has the values of the key and of the guard. */
json_t *tb__etcd_create_guarded(const char *guard, const char *guard_value, const char *key, const void *data,
                                size_t nbytes);
/* Creates the key, with `first`, and sets the counter to `next`; if it fails, likewise. */
json_t *tb__etcd_take_block(const char *counter, uint64_t expected, const char *next, const char *key,
                            const char *first);
json_t *tb__etcd_watch(const char *prefix, uint64_t start);
json_t *tb__etcd_number(const char *field, int64_t number); /* {"field":"number"} */

/* A number's field; 0 if it is not there, for then etcd leaves it out. */
int64_t tb__etcd_read_number(const json_t *object, const char *field);
uint64_t tb__etcd_read_revision(const json_t *reply); /* the store's, from the header */

/* The key-value pair: its value, freed with tb__store_value_fini. `kv` NULL is no such key. */
tb_status tb__etcd_read_value(const json_t *kv, tb__store_value *out);

/* How many pairs the pages have, and how many bytes their entries take. TB_TOO_BIG for more than a list may have. */
tb_status tb__etcd_measure(const json_t *pages, size_t *count, size_t *nbytes);

/* The pairs of several pages as entries, without what lies before their keys. One with this field has no value. */
#define TB__ETCD_DELETED "tensorbus_deleted"
tb_status tb__etcd_read_entries(const json_t *pages, size_t strip, uint64_t revision, tb__store_entries *out);

/* The last key of a page, into room for the longest key. False if the page has none, or it is not base64. */
bool tb__etcd_read_last_key(const json_t *page, char *out, size_t room);

#endif
