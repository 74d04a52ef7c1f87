/* The embedded server's data: sorted keys, the revision counter, and a log of recent changes, which tells whether
 * anything under a prefix has changed. For one thread. */
#ifndef TB_BUS_STORE_TABLE_H
#define TB_BUS_STORE_TABLE_H

#include "base/mem.h"
#include "bus/store/protocol.h"

typedef struct tb__record {
    uint64_t revision;
    uint64_t owner; /* the session whose end removes it; 0: none */
    size_t key_nbytes, value_nbytes;
    uint8_t data[]; /* the key, then the value */
} tb__record;

enum { TB__STORE_LOG = 4096 };

typedef struct tb__store_table {
    TB_VEC(tb__record *) records; /* by key */
    uint64_t revision;
    size_t nbytes, max_nbytes; /* keys, values and what it takes to keep them */
    uint64_t horizon;          /* the log does not have the keys of changes up to this revision */
    struct {
        uint64_t revision;
        size_t nbytes;
        uint8_t *key;
    } log[TB__STORE_LOG]; /* change r is in log[r % TB__STORE_LOG] */

    /* Told of every change, after it; must not change the table. */
    void (*changed)(void *context, const tb__record *record, bool is_removed);
    void *context;
} tb__store_table;

tb__span tb__record_key(const tb__record *record);
tb__span tb__record_value(const tb__record *record);

void tb__store_table_fini(tb__store_table *table);

/* NULL if there is none. Valid until the table changes. */
const tb__record *tb__store_table_find(const tb__store_table *table, tb__span key);

/* The records [first, last) whose keys start with the prefix. */
void tb__store_table_range(const tb__store_table *table, tb__span prefix, size_t *first, size_t *last);

/* TB_TOO_BIG when the table is full. */
tb_status tb__store_table_set(tb__store_table *table, tb__span key, tb__span value, uint64_t owner);

void tb__store_table_remove(tb__store_table *table, tb__span key);
void tb__store_table_remove_prefix(tb__store_table *table, tb__span prefix);
void tb__store_table_remove_owner(tb__store_table *table, uint64_t owner);

/* True also if the log does not reach back to the revision, or the revision is not one of this table. */
bool tb__store_table_changed_since(const tb__store_table *table, tb__span prefix, uint64_t since);

bool tb__span_starts_with(tb__span span, tb__span prefix);

#endif
