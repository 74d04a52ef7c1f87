/* The embedded server's data: sorted keys, the revision counter, and a log of recent changes, which shows whether
 * anything under a prefix has changed. For one thread. */
#ifndef TB_BUS_STORE_TABLE_H
#define TB_BUS_STORE_TABLE_H

#include "base/mem.h"
#include "bus/store/protocol.h"

/* A process, by the id that is made from its secret. */
typedef struct tb__key_owner {
    uint8_t id[TB__PROOF_ID];
} tb__key_owner;

typedef struct tb__record {
    uint64_t revision;
    tb__key_owner owner; /* the process that wrote it last */
    tb__store_lifetime lifetime;
    bool is_counter;
    bool is_removed; /* in `changed`, the last time: it was removed */
    size_t key_nbytes, value_nbytes;
    uint8_t data[]; /* the key, then the value */
} tb__record;

enum { TB__STORE_LOG = 4096 };

typedef struct tb__logged_change {
    uint64_t revision;
    size_t nbytes;
    uint8_t *key;
} tb__logged_change;

typedef struct tb__store_table {
    TB_VEC(tb__record *) records; /* by key */
    uint64_t revision;
    size_t nbytes, max_nbytes;            /* of keys, values and bookkeeping */
    uint64_t horizon;                     /* the log does not have the keys of changes up to this revision */
    tb__logged_change log[TB__STORE_LOG]; /* change r is in log[r % TB__STORE_LOG] */

    /* Called after every change; must not change the table. */
    void (*changed)(void *context, const tb__record *record);
    void *context;
} tb__store_table;

tb__blob tb__record_key(const tb__record *record);
tb__blob tb__record_value(const tb__record *record);

void tb__store_table_fini(tb__store_table *table);

/* NULL if there is none. Valid until the table changes. */
const tb__record *tb__store_table_find(const tb__store_table *table, tb__blob key);

/* The records [first, last) whose keys start with the prefix. */
void tb__store_table_range(const tb__store_table *table, tb__blob prefix, size_t *first, size_t *last);

/* TB_TOO_BIG when the table is full. */
tb_status tb__store_table_set(tb__store_table *table, tb__blob key, tb__blob value, const tb__key_owner *owner,
                              tb__store_lifetime lifetime);

/* tb__store_count. TB_INVALID if the key is not a counter. */
tb_status tb__store_table_count(tb__store_table *table, tb__blob key, uint64_t least, uint64_t add, uint64_t *before);

/* tb__store_take_block. TB_INVALID if one of the keys is not a counter. */
tb_status tb__store_table_take_block(tb__store_table *table, tb__blob counter, tb__blob key, uint64_t count,
                                     uint64_t *first, uint64_t *next);

void tb__store_table_remove(tb__store_table *table, tb__blob key);
void tb__store_table_remove_ephemerals(tb__store_table *table, const tb__key_owner *owner);

/* True also if the log does not reach back to the revision, or the revision is not one of this table. */
bool tb__store_table_changed_since(const tb__store_table *table, tb__blob prefix, uint64_t since);
/* Appends the changes under the prefix since then, as the entries of an `l` field, unless there are more bytes. False:
 * they are not known. */
bool tb__store_table_get_changes(const tb__store_table *table, tb__blob prefix, uint64_t since, tb__bytes *out,
                                 uint64_t *count);
/* Appends one of them. */
tb_status tb__store_table_add_change(const tb__record *record, tb__bytes *out);

/* Counters are decimal numbers up to 2^63 - 1. False if it is none. */
enum { TB__COUNTER_TEXT = 24 };
bool tb__counter_decode(const void *data, size_t nbytes, uint64_t *out);
tb_status tb__counter_add(uint64_t number, uint64_t add, char text[TB__COUNTER_TEXT], size_t *length);

bool tb__blob_starts_with(tb__blob span, tb__blob prefix);

#endif
