/* Claims seats and bus ranks. A claim is an ephemeral key, created by compare-and-set: it goes when its process does.
 */
#include "bus/directory_claim.h"

#include "base/int.h"
#include "base/log.h"
#include "base/process.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* For undoing a failed claim: the deadline may have passed. */
enum { UNDO_MS = 1000 };

tb_status tb__store_deadline_apply(const tb__store_deadline *deadline) {
    int left = tb__ms_until(deadline->deadline_ms);
    if (left == 0)
        return tb__fail(TB_TIMEOUT, "the store has not answered all questions within %d ms", deadline->timeout_ms);
    tb__store_set_timeout(deadline->store, left);
    return TB_OK;
}

/* Sleeps until a key under the prefix has changed since the revision, which advances. TB_TIMEOUT at `until_ms`. */
static tb_status wait_for_change(const tb__store_deadline *deadline, const char *prefix, int64_t until_ms,
                                 uint64_t *revision) {
    int left = tb__ms_until(until_ms < deadline->deadline_ms ? until_ms : deadline->deadline_ms);
    if (left == 0)
        return TB_TIMEOUT;
    return tb__store_wait_change(deadline->store, prefix, *revision, left, revision);
}

static tb_status fail_seat_taken(const char *group, int32_t index, const tb__store_value *present) {
    tb__seat_record other;
    if (!tb__seat_decode(present, index, &other))
        return tb__fail(TB_CONFLICT, "seat %" PRId32 " of group '%s' is taken, by an unknown process", index, group);
    return tb__fail(TB_CONFLICT, "seat %" PRId32 " of group '%s' is taken by %s", index, group,
                    tb__seat_describe(&other).text);
}

/* Whether the record is this process's own: left over from a call that failed half-way, or from before the store was
 * lost. A process that has not announced itself may have claimed the seat without a rank. */
static bool is_own_record(const tb__store_value *present, int32_t index, const tb__seat_record *mine, bool is_again) {
    tb__seat_record other;
    if (mine->rank == TB_NO_RANK || !tb__seat_decode(present, index, &other))
        return false;
    if (other.rank == TB_NO_RANK)
        return is_again && other.pid == mine->pid && strcmp(other.host, mine->host) == 0;
    return other.rank == mine->rank && other.incarnation == mine->incarnation;
}

/* `revision` is that of the claim. */
static tb_status claim_seat_key(const tb__store_deadline *deadline, const char *group, int32_t index,
                                const tb__seat_record *mine, bool is_again, int64_t until_ms, uint64_t *revision) {
    tb__key key = tb__key_of_seat(group, index);
    tb__seat_bytes bytes = {0};
    tb__seat_encode(mine, &bytes);
    uint64_t expected = 0, since = 0;
    for (;;) {
        tb__store_value present;
        TB_TRY(tb__store_deadline_apply(deadline));
        tb_status status = tb__store_compare_and_set(deadline->store, key.text, expected, bytes.data, bytes.nbytes,
                                                     TB__STORE_EPHEMERAL, revision, &present);
        if (status != TB_CONFLICT)
            return status;
        expected = is_own_record(&present, index, mine, is_again) ? present.revision : 0;
        if (present.revision > since)
            since = present.revision;
        status = present.revision == 0 || expected > 0 ? TB_OK : wait_for_change(deadline, key.text, until_ms, &since);
        if (status == TB_TIMEOUT)
            status = fail_seat_taken(group, index, &present);
        tb__store_value_fini(&present);
        TB_TRY(status);
    }
}

/* A member that has announced itself decides the size; of the others, the first. The later one lists after the earlier
 * one has claimed its seat, so they never both stay. */
static tb_status compare_size(const tb__store_entry *entry, const char *group, const tb__seat_record *mine,
                              uint64_t revision) {
    tb__key_parts key;
    tb__seat_record other;
    if (!tb__key_split(entry->key, &key) || key.is_note || strcmp(key.group, group) != 0 ||
        !tb__seat_decode(&entry->value, key.index, &other))
        return TB_OK;
    if (other.size == mine->size || (!other.is_announced && entry->value.revision > revision))
        return TB_OK;
    return tb__fail(TB_CONFLICT,
                    "group '%s' has %" PRId32 " seats according to %s in seat %" PRId32 ", and %" PRId32
                    " according to this process",
                    group, other.size, tb__seat_describe(&other).text, key.index, mine->size);
}

/* `seats`: lists all that is followed, and keeps it; NULL: this group's seats. */
static tb_status agree_on_size(const tb__store_deadline *deadline, const char *group, const tb__seat_record *mine,
                               uint64_t revision, tb__store_entries *seats) {
    int64_t until_ms = tb__now_ms() + tb__store_linger_ms(deadline->store);
    tb__key prefix = tb__key_of_group(group);
    if (seats)
        snprintf(prefix.text, sizeof prefix.text, TB__NOW);
    for (;;) {
        tb__store_entries entries;
        tb_status status = TB_OK;
        TB_TRY(tb__store_deadline_apply(deadline));
        TB_TRY(tb__store_list(deadline->store, prefix.text, &entries));
        for (size_t i = 0; i < entries.count && status == TB_OK; i++)
            status = compare_size(&entries.item[i], group, mine, revision);
        uint64_t since = entries.revision;
        if (status == TB_OK && seats)
            *seats = entries;
        else
            tb__store_entries_fini(&entries);
        if (status == TB_OK)
            return TB_OK;
        tb__saved_detail why = tb__save_detail();
        status = wait_for_change(deadline, prefix.text, until_ms, &since);
        if (status == TB_TIMEOUT)
            return tb__fail(TB_CONFLICT, "%s", why.text);
        TB_TRY(status);
    }
}

tb_status tb__seat_give_up(const tb__store_deadline *deadline, const char *group, int32_t index, tb_status status) {
    tb__saved_detail why = tb__save_detail();
    /* If this fails, too, the next claim finds out that the record is its own. */
    if (status != TB_LOST) {
        tb__store_set_timeout(deadline->store, UNDO_MS);
        (void)tb__store_delete(deadline->store, tb__key_of_seat(group, index).text);
    }
    return tb__fail(status, "%s", why.text);
}

/* Whether the group's first rank has joined with the same size: it has compared that with all others, and later ones
 * are compared with it. `lead` is its record then. */
static tb_status look_at_lead(const tb__store_deadline *deadline, const char *group, const tb__seat_record *mine,
                              tb__store_value *lead, bool *is_same) {
    tb__seat_record other;
    TB_TRY(tb__store_deadline_apply(deadline));
    TB_TRY(tb__store_get(deadline->store, tb__key_of_seat(group, 0).text, lead));
    *is_same = lead->data && tb__seat_decode(lead, 0, &other) && other.is_announced && other.size == mine->size;
    if (!*is_same)
        tb__store_value_fini(lead);
    return TB_OK;
}

tb_status tb__seat_claim(const tb__store_deadline *deadline, const char *group, int32_t index,
                         const tb__seat_record *mine, bool is_again, uint64_t *revision) {
    int64_t until_ms = tb__now_ms() + tb__store_linger_ms(deadline->store);
    return claim_seat_key(deadline, group, index, mine, is_again, until_ms, revision);
}

tb_status tb__seat_check_size(const tb__store_deadline *deadline, const tb__own_seat *own, const tb__seat_record *mine,
                              tb__store_value *lead, tb__store_entries *seats) {
    bool is_same = false;
    tb_status status = lead ? look_at_lead(deadline, own->group, mine, lead, &is_same) : TB_OK;
    if (status == TB_OK && !is_same)
        status = agree_on_size(deadline, own->group, mine, own->revision, seats);
    return status == TB_OK ? TB_OK : tb__seat_give_up(deadline, own->group, own->index, status);
}

/* Adds 1 to a counter; `before` is its old value. */
static tb_status increment_counter(const tb__store_deadline *deadline, const char *key, uint64_t max,
                                   uint64_t *before) {
    TB_TRY(tb__store_deadline_apply(deadline));
    TB_TRY(tb__store_count(deadline->store, key, 0, 1, before));
    if (*before >= max)
        return tb__fail(TB_TOO_BIG, "the store's counter '%s' has reached %" PRIu64, key, max);
    return TB_OK;
}

/* TB_CONFLICT if the rank is in use. */
static tb_status take_rank(const tb__store_deadline *deadline, int32_t rank, const char *holder) {
    tb__store_value present;
    tb__key key = tb__key_of_rank(rank);
    TB_TRY(tb__store_deadline_apply(deadline));
    tb_status status = tb__store_compare_and_set(deadline->store, key.text, 0, holder, strlen(holder),
                                                 TB__STORE_EPHEMERAL, NULL, &present);
    if (status == TB_CONFLICT) {
        tb__log(TB_LOG_INFO, "directory: bus rank %" PRId32 " is in use by %.400s", rank, (const char *)present.data);
        tb__store_value_fini(&present);
    }
    return status;
}

/* The rank of the seat in the group's block of ranks. */
static tb_status take_seat_rank(const tb__store_deadline *deadline, const tb__own_seat *seat, const char *holder,
                                tb__claimed_rank *out) {
    uint64_t first, next;
    tb__key key = tb__key_of_block(seat->group, seat->size);
    TB_TRY(tb__store_deadline_apply(deadline));
    TB_TRY(tb__store_take_block(deadline->store, "next_rank", key.text, (uint64_t)seat->size, &first, &next));
    if (first > TB_MAX_RANKS || first + (uint64_t)seat->size > TB_MAX_RANKS)
        return tb__fail(TB_TOO_BIG, "the store's counter 'next_rank' has reached %d with the ranks of group '%s'",
                        TB_MAX_RANKS, seat->group);
    out->next = (int32_t)tb__min64((int64_t)next, TB_MAX_RANKS);
    TB_TRY(take_rank(deadline, (int32_t)first + seat->index, holder));
    out->first = (int32_t)first;
    out->rank = out->first + seat->index;
    return TB_OK;
}

static tb_status take_new_rank(const tb__store_deadline *deadline, const char *holder, int32_t *rank) {
    for (;;) {
        uint64_t number;
        TB_TRY(increment_counter(deadline, "next_rank", TB_MAX_RANKS, &number));
        tb_status status = take_rank(deadline, (int32_t)number, holder);
        if (status == TB_OK)
            *rank = (int32_t)number;
        if (status != TB_CONFLICT)
            return status;
    }
}

tb_status tb__rank_claim(const tb__store_deadline *deadline, const tb__own_seat *seat, const char *holder,
                         tb__claimed_rank *out) {
    tb__claimed_rank claimed = {.first = TB_NO_RANK};
    uint64_t before;
    tb_status status = take_seat_rank(deadline, seat, holder, &claimed);
    if (status == TB_CONFLICT)
        status = take_new_rank(deadline, holder, &claimed.rank);
    TB_TRY(status);
    TB_TRY(increment_counter(deadline, tb__key_of_counter("incarnations", claimed.rank).text, INT64_MAX, &before));
    claimed.incarnation = before + 1;
    *out = claimed;
    return TB_OK;
}

tb_status tb__ranks_reserve(const tb__store_deadline *deadline, const tb__own_seat *seat, int32_t first,
                            int32_t next_rank) {
    TB_TRY(tb__store_deadline_apply(deadline));
    TB_TRY(tb__store_count(deadline->store, "next_rank", (uint64_t)next_rank, 0, NULL));
    if (first == TB_NO_RANK)
        return TB_OK;
    TB_TRY(tb__store_deadline_apply(deadline));
    tb__key key = tb__key_of_block(seat->group, seat->size);
    return tb__store_count(deadline->store, key.text, (uint64_t)first, 0, NULL);
}

/* A process that holds the rank may be dead, and is given time to disappear. */
static tb_status reclaim_rank_key(const tb__store_deadline *deadline, const char *holder, int32_t rank) {
    tb__key key = tb__key_of_rank(rank);
    int64_t until_ms = tb__now_ms() + tb__store_linger_ms(deadline->store);
    uint64_t expected = 0, since = 0;
    for (;;) {
        tb__store_value present;
        TB_TRY(tb__store_deadline_apply(deadline));
        tb_status status = tb__store_compare_and_set(deadline->store, key.text, expected, holder, strlen(holder),
                                                     TB__STORE_EPHEMERAL, NULL, &present);
        if (status != TB_CONFLICT)
            return status;
        /* With etcd, keys outlive the connection for a while: this one may be our own. */
        expected = present.data && strcmp(present.data, holder) == 0 ? present.revision : 0;
        if (present.revision > since)
            since = present.revision;
        status = present.revision == 0 || expected > 0 ? TB_OK : wait_for_change(deadline, key.text, until_ms, &since);
        if (status == TB_TIMEOUT)
            status = tb__fail(TB_CONFLICT, "bus rank %" PRId32 " was taken meanwhile by %.300s", rank,
                              (const char *)present.data);
        tb__store_value_fini(&present);
        TB_TRY(status);
    }
}

tb_status tb__rank_reclaim(const tb__store_deadline *deadline, const char *holder, int32_t rank, uint64_t incarnation) {
    tb__key key = tb__key_of_counter("incarnations", rank);
    uint64_t reached;
    TB_TRY(reclaim_rank_key(deadline, holder, rank));
    TB_TRY(tb__store_deadline_apply(deadline));
    TB_TRY(tb__store_count(deadline->store, key.text, incarnation, 0, &reached));
    if (reached > incarnation)
        return tb__fail(TB_CONFLICT, "bus rank %" PRId32 " was taken meanwhile by a process that has ended", rank);
    return TB_OK;
}
