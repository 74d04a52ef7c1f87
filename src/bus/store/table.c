/* A sorted array of records and a ring of the latest changes. */
#include "bus/store/table.h"

#include "base/int.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { RECORD_COST = 128, MAX_RECORDS = 1 << 18 }; /* inserting moves what stands behind, so the array is kept short */

tb__blob tb__record_key(const tb__record *record) {
    return (tb__blob){.data = record->data, .nbytes = record->key_nbytes};
}

tb__blob tb__record_value(const tb__record *record) {
    return (tb__blob){.data = record->data + record->key_nbytes, .nbytes = record->value_nbytes};
}

static size_t cost_of(const tb__record *record) {
    return RECORD_COST + record->key_nbytes + record->value_nbytes;
}

bool tb__blob_starts_with(tb__blob span, tb__blob prefix) {
    return span.nbytes >= prefix.nbytes && (prefix.nbytes == 0 || memcmp(span.data, prefix.data, prefix.nbytes) == 0);
}

static int compare_spans(tb__blob a, tb__blob b) {
    size_t shorter = a.nbytes < b.nbytes ? a.nbytes : b.nbytes;
    int order = shorter ? memcmp(a.data, b.data, shorter) : 0;
    return order ? order : (a.nbytes > b.nbytes) - (a.nbytes < b.nbytes);
}

/* The first record whose key is not before `key`. */
static size_t lower_bound(const tb__store_table *table, tb__blob key) {
    size_t i = 0;
    TB_BISECT(i, table->records.count, compare_spans(tb__record_key(table->records.item[i]), key) >= 0);
    return i;
}

static bool is_at(const tb__store_table *table, size_t i, tb__blob key) {
    return i < table->records.count && compare_spans(tb__record_key(table->records.item[i]), key) == 0;
}

void tb__store_table_fini(tb__store_table *table) {
    for (size_t i = 0; i < table->records.count; i++)
        free(table->records.item[i]);
    free(table->records.item);
    for (size_t i = 0; i < TB__STORE_LOG; i++)
        free(table->log[i].key);
}

const tb__record *tb__store_table_find(const tb__store_table *table, tb__blob key) {
    size_t i = lower_bound(table, key);
    return is_at(table, i, key) ? table->records.item[i] : NULL;
}

void tb__store_table_range(const tb__store_table *table, tb__blob prefix, size_t *first, size_t *last) {
    size_t i = *first = lower_bound(table, prefix);
    while (i < table->records.count && tb__blob_starts_with(tb__record_key(table->records.item[i]), prefix))
        i++;
    *last = i;
}

/* Assigns the change its revision, logs it, and calls `changed`. */
static void log_change(tb__store_table *table, tb__record *record) {
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
        table->changed(table->context, record);
}

tb_status tb__store_table_set(tb__store_table *table, tb__blob key, tb__blob value, const tb__key_owner *owner,
                              tb__store_lifetime lifetime) {
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
    *record =
        (tb__record){.owner = *owner, .lifetime = lifetime, .key_nbytes = key.nbytes, .value_nbytes = value.nbytes};
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
    log_change(table, record);
    return TB_OK;
}

/* Removes those of [first, last) that are ephemeral and the owner's; NULL: all of them. */
static void remove_range(tb__store_table *table, size_t first, size_t last, const tb__key_owner *owner) {
    tb__record **item = table->records.item;
    size_t kept = first;
    for (size_t i = first; i < last; i++) {
        bool is_ephemeral = item[i]->lifetime == TB__STORE_EPHEMERAL;
        if (owner && (!is_ephemeral || memcmp(&item[i]->owner, owner, sizeof *owner) != 0)) {
            item[kept++] = item[i];
            continue;
        }
        table->nbytes -= cost_of(item[i]);
        item[i]->is_removed = true;
        log_change(table, item[i]);
        free(item[i]);
    }
    if (kept == last)
        return;
    memmove(item + kept, item + last, (table->records.count - last) * sizeof *item);
    table->records.count -= last - kept;
}

void tb__store_table_remove(tb__store_table *table, tb__blob key) {
    size_t i = lower_bound(table, key);
    if (is_at(table, i, key))
        remove_range(table, i, i + 1, NULL);
}

void tb__store_table_remove_ephemerals(tb__store_table *table, const tb__key_owner *owner) {
    remove_range(table, 0, table->records.count, owner);
}

bool tb__counter_decode(const void *data, size_t nbytes, uint64_t *out) {
    const char *at = data, *end = at + nbytes;
    uint64_t number = 0;
    if (nbytes == 0 || nbytes > 19)
        return false;
    for (; at < end && *at >= '0' && *at <= '9'; at++)
        number = number * 10 + (uint64_t)(*at - '0');
    *out = number;
    return at == end && number <= INT64_MAX;
}

tb_status tb__counter_add(uint64_t number, uint64_t add, char text[TB__COUNTER_TEXT], size_t *length) {
    if (number > INT64_MAX || add > INT64_MAX - number)
        return tb__fail(TB_TOO_BIG, "a counter has at most %" PRId64, INT64_MAX);
    *length = (size_t)snprintf(text, TB__COUNTER_TEXT, "%" PRIu64, number + add);
    return TB_OK;
}

/* The value of a counter; 0 if there is no such key. */
static tb_status read_counter(const tb__store_table *table, tb__blob key, uint64_t *out) {
    const tb__record *present = tb__store_table_find(table, key);
    *out = 0;
    if (present &&
        (!present->is_counter || !tb__counter_decode(tb__record_value(present).data, present->value_nbytes, out)))
        return tb__fail(TB_INVALID, "it is not a counter");
    return TB_OK;
}

tb_status tb__store_table_count(tb__store_table *table, tb__blob key, uint64_t least, uint64_t add, uint64_t *before) {
    static const tb__key_owner nobody;
    uint64_t number;
    char text[TB__COUNTER_TEXT];
    size_t length;
    TB_TRY(read_counter(table, key, &number));
    if (number < least)
        number = least;
    TB_TRY(tb__counter_add(number, add, text, &length));
    TB_TRY(tb__store_table_set(table, key, (tb__blob){.data = (const uint8_t *)text, .nbytes = length}, &nobody,
                               TB__STORE_PERMANENT));
    table->records.item[lower_bound(table, key)]->is_counter = true;
    *before = number;
    return TB_OK;
}

tb_status tb__store_table_take_block(tb__store_table *table, tb__blob counter, tb__blob key, uint64_t count,
                                     uint64_t *first, uint64_t *next) {
    uint64_t number;
    if (!tb__store_table_find(table, key)) {
        TB_TRY(tb__store_table_count(table, counter, 0, count, &number));
        TB_TRY(tb__store_table_count(table, key, number, 0, &number));
    }
    TB_TRY(read_counter(table, key, &number));
    TB_TRY(read_counter(table, counter, next));
    *first = number;
    return TB_OK;
}

static bool is_logged(const tb__store_table *table, uint64_t since) {
    return since >= table->horizon && since <= table->revision;
}

/* The key of change `r`, if it is under the prefix; else nothing. */
static tb__blob changed_key(const tb__store_table *table, tb__blob prefix, uint64_t r) {
    const tb__logged_change *change = &table->log[r % TB__STORE_LOG];
    tb__blob key = {.data = change->key, .nbytes = change->nbytes};
    return tb__blob_starts_with(key, prefix) ? key : (tb__blob){0};
}

bool tb__store_table_changed_since(const tb__store_table *table, tb__blob prefix, uint64_t since) {
    bool has_changed = !is_logged(table, since);
    for (uint64_t r = table->revision; r > since && !has_changed; r--)
        has_changed = changed_key(table, prefix, r).data;
    return has_changed;
}

tb_status tb__store_table_add_change(const tb__record *record, tb__bytes *out) {
    return record->is_removed
               ? tb__store_add_entry(out, tb__record_key(record), 0, (tb__blob){0})
               : tb__store_add_entry(out, tb__record_key(record), record->revision, tb__record_value(record));
}

bool tb__store_table_get_changes(const tb__store_table *table, tb__blob prefix, uint64_t since, tb__bytes *out,
                                 uint64_t *count) {
    if (!is_logged(table, since))
        return false;
    for (uint64_t r = since + 1; r <= table->revision; r++) {
        tb__blob key = changed_key(table, prefix, r);
        const tb__record *record = key.data ? tb__store_table_find(table, key) : NULL;
        if (!key.data || (record && record->revision != r)) /* a later change has its value */
            continue;
        tb_status status =
            record ? tb__store_table_add_change(record, out) : tb__store_add_entry(out, key, 0, (tb__blob){0});
        if (status != TB_OK || out->count > TB__STORE_MAX_REPLY - 64)
            return false;
        ++*count;
    }
    return true;
}
