/* A sorted array of records and a ring of the latest changes. */
#include "bus/store/table.h"

#include "base/int.h"

#include <string.h>

enum { RECORD_COST = 128, MAX_RECORDS = 1 << 18 }; /* inserting moves what stands behind, so the array is kept short */

tb__span tb__record_key(const tb__record *record) {
    return (tb__span){.data = record->data, .nbytes = record->key_nbytes};
}

tb__span tb__record_value(const tb__record *record) {
    return (tb__span){.data = record->data + record->key_nbytes, .nbytes = record->value_nbytes};
}

static size_t cost_of(const tb__record *record) {
    return RECORD_COST + record->key_nbytes + record->value_nbytes;
}

bool tb__span_starts_with(tb__span span, tb__span prefix) {
    return span.nbytes >= prefix.nbytes && (prefix.nbytes == 0 || memcmp(span.data, prefix.data, prefix.nbytes) == 0);
}

static int compare_spans(tb__span a, tb__span b) {
    size_t shorter = a.nbytes < b.nbytes ? a.nbytes : b.nbytes;
    int order = shorter ? memcmp(a.data, b.data, shorter) : 0;
    return order ? order : (a.nbytes > b.nbytes) - (a.nbytes < b.nbytes);
}

/* The first record whose key is not before `key`. */
static size_t lower_bound(const tb__store_table *table, tb__span key) {
    size_t i = 0;
    TB_BISECT(i, table->records.count, compare_spans(tb__record_key(table->records.item[i]), key) >= 0);
    return i;
}

static bool is_at(const tb__store_table *table, size_t i, tb__span key) {
    return i < table->records.count && compare_spans(tb__record_key(table->records.item[i]), key) == 0;
}

void tb__store_table_fini(tb__store_table *table) {
    for (size_t i = 0; i < table->records.count; i++)
        free(table->records.item[i]);
    free(table->records.item);
    for (size_t i = 0; i < TB__STORE_LOG; i++)
        free(table->log[i].key);
}

const tb__record *tb__store_table_find(const tb__store_table *table, tb__span key) {
    size_t i = lower_bound(table, key);
    return is_at(table, i, key) ? table->records.item[i] : NULL;
}

void tb__store_table_range(const tb__store_table *table, tb__span prefix, size_t *first, size_t *last) {
    size_t i = *first = lower_bound(table, prefix);
    while (i < table->records.count && tb__span_starts_with(tb__record_key(table->records.item[i]), prefix))
        i++;
    *last = i;
}

/* Gives the change its revision, remembers it, and tells. */
static void log_change(tb__store_table *table, tb__record *record, bool is_removed) {
    record->revision = ++table->revision;
    size_t slot = record->revision % TB__STORE_LOG;
    if (table->log[slot].revision > table->horizon)
        table->horizon = table->log[slot].revision;
    free(table->log[slot].key);
    table->log[slot].revision = record->revision;
    table->log[slot].nbytes = record->key_nbytes;
    table->log[slot].key = tb__memdup(record->data, record->key_nbytes, 1);
    if (!table->log[slot].key)
        table->horizon = record->revision;
    if (table->changed)
        table->changed(table->context, record, is_removed);
}

tb_status tb__store_table_set(tb__store_table *table, tb__span key, tb__span value, uint64_t owner) {
    size_t i = lower_bound(table, key);
    bool is_new = !is_at(table, i, key);
    size_t freed = is_new ? 0 : cost_of(table->records.item[i]);
    size_t cost = RECORD_COST + key.nbytes + value.nbytes;
    if (table->nbytes - freed + cost > table->max_nbytes || (is_new && table->records.count >= MAX_RECORDS))
        return tb__fail(TB_TOO_BIG, "the store is full: %zu keys, %zu bytes", table->records.count, table->nbytes);
    if (is_new && !tb__vec_reserve(&table->records, 1))
        return TB_NO_MEMORY;
    tb__record *record = tb__malloc(1, sizeof *record + key.nbytes + value.nbytes);
    if (!record)
        return TB_NO_MEMORY;
    *record = (tb__record){.owner = owner, .key_nbytes = key.nbytes, .value_nbytes = value.nbytes};
    memcpy(record->data, key.data, key.nbytes);
    if (value.nbytes > 0)
        memcpy(record->data + key.nbytes, value.data, value.nbytes);
    tb__record **at = table->records.item + i;
    if (is_new) {
        memmove(at + 1, at, (table->records.count - i) * sizeof *at);
        table->records.count++;
    } else {
        free(*at);
    }
    *at = record;
    table->nbytes = table->nbytes - freed + cost;
    log_change(table, record, false);
    return TB_OK;
}

/* Removes those of [first, last) that belong to the owner; 0: all of them. */
static void remove_range(tb__store_table *table, size_t first, size_t last, uint64_t owner) {
    tb__record **item = table->records.item;
    size_t kept = first;
    for (size_t i = first; i < last; i++) {
        if (owner && item[i]->owner != owner) {
            item[kept++] = item[i];
            continue;
        }
        table->nbytes -= cost_of(item[i]);
        log_change(table, item[i], true);
        free(item[i]);
    }
    if (kept == last)
        return;
    memmove(item + kept, item + last, (table->records.count - last) * sizeof *item);
    table->records.count -= last - kept;
}

void tb__store_table_remove(tb__store_table *table, tb__span key) {
    size_t i = lower_bound(table, key);
    if (is_at(table, i, key))
        remove_range(table, i, i + 1, 0);
}

void tb__store_table_remove_prefix(tb__store_table *table, tb__span prefix) {
    size_t first, last;
    tb__store_table_range(table, prefix, &first, &last);
    remove_range(table, first, last, 0);
}

void tb__store_table_remove_owner(tb__store_table *table, uint64_t owner) {
    remove_range(table, 0, table->records.count, owner);
}

bool tb__store_table_changed_since(const tb__store_table *table, tb__span prefix, uint64_t since) {
    if (since < table->horizon || since > table->revision)
        return true;
    for (uint64_t r = table->revision; r > since; r--) {
        tb__span key = {.data = table->log[r % TB__STORE_LOG].key, .nbytes = table->log[r % TB__STORE_LOG].nbytes};
        if (tb__span_starts_with(key, prefix))
            return true;
    }
    return false;
}
