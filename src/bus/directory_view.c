/* Makes rosters and notes from the store's entries. */
#include "bus/directory_view.h"

#include "base/log.h"
#include "base/mem.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

/* What rosters need of a seat record. */
typedef struct seat_entry {
    const char *group;
    int32_t index, size; /* of the group, as the member was told */
    tb__member member;
} seat_entry;

struct tb__directory_view {
    atomic_size_t refs;
    tb__store_entries entries; /* the rest points into them */
    tb__arena names;
    TB_VEC(seat_entry) seats; /* of members that have announced themselves; by group, then index */
    TB_VEC(tb__note) notes;   /* by topic, group, index */
    const tb__member **by_rank;
};

static int compare_group_index(const char *group_a, int32_t a, const char *group_b, int32_t b) {
    int order = group_a == group_b ? 0 : strcmp(group_a, group_b);
    return order ? order : (a > b) - (a < b);
}

static int compare_seats(const void *a, const void *b) {
    const seat_entry *left = a, *right = b;
    return compare_group_index(left->group, left->index, right->group, right->index);
}

static int compare_notes(const void *a, const void *b) {
    const tb__note *left = a, *right = b;
    int order = left->topic == right->topic ? 0 : strcmp(left->topic, right->topic);
    return order ? order : compare_group_index(left->group, left->index, right->group, right->index);
}

static int compare_seat_ranks(const void *a, const void *b) {
    const tb__member *left = *(const tb__member *const *)a, *right = *(const tb__member *const *)b;
    return (left->rank > right->rank) - (left->rank < right->rank);
}

/* A copy of the name; entries are sorted, and it is mostly that of the one before. NULL: no memory. */
static const char *keep_name(tb__directory_view *view, const char *name, const char *before) {
    return before && strcmp(before, name) == 0 ? before : tb__arena_strdup(&view->names, name);
}

static tb_status add_note(tb__directory_view *view, const tb__key_parts *key, const tb__store_value *value) {
    const tb__note *last = view->notes.count > 0 ? &view->notes.item[view->notes.count - 1] : NULL;
    const char *topic = keep_name(view, key->topic, last ? last->topic : NULL);
    const char *group = keep_name(view, key->group, last ? last->group : NULL);
    tb__note note = {topic, group, key->index, value->data, value->nbytes};
    return topic && group && tb__vec_push(&view->notes, note) ? TB_OK : TB_NO_MEMORY;
}

static tb_status add_seat_entry(tb__directory_view *view, const tb__key_parts *key, const tb__seat_record *seat) {
    const char *last = view->seats.count > 0 ? view->seats.item[view->seats.count - 1].group : NULL;
    const char *group = keep_name(view, key->group, last);
    tb__member member = {seat->rank, seat->incarnation, seat->contact, seat->contact_nbytes};
    return group && tb__vec_push(&view->seats, (seat_entry){group, key->index, seat->size, member}) ? TB_OK
                                                                                                    : TB_NO_MEMORY;
}

static tb_status add_store_entry(tb__directory_view *view, const tb__store_entry *entry, uint64_t warned) {
    tb__key_parts key;
    tb__seat_record seat;
    if (strncmp(entry->key, TB__HINTS, strlen(TB__HINTS)) == 0)
        return TB_OK;
    bool is_key = tb__key_split(entry->key, &key);
    if (is_key && key.is_note && entry->value.nbytes <= TB__DIRECTORY_MAX_NOTE)
        return add_note(view, &key, &entry->value);
    if (is_key && !key.is_note && tb__seat_decode(&entry->value, key.index, &seat))
        return seat.is_announced ? add_seat_entry(view, &key, &seat) : TB_OK;
    if (entry->value.revision > warned)
        tb__log(TB_LOG_WARN, "directory: the store's key '%.200s' is not a valid seat or note; it is ignored",
                entry->key);
    return TB_OK;
}

static tb_status build_view(tb__directory_view *view, uint64_t warned) {
    if (!tb__vec_reserve(&view->seats, view->entries.count / 2) ||
        !tb__vec_reserve(&view->notes, view->entries.count / 2))
        return TB_NO_MEMORY;
    for (size_t i = 0; i < view->entries.count; i++)
        TB_TRY(add_store_entry(view, &view->entries.item[i], warned));
    size_t nseats = view->seats.count;
    if (nseats > 0)
        qsort(view->seats.item, nseats, sizeof *view->seats.item, compare_seats);
    if (view->notes.count > 0)
        qsort(view->notes.item, view->notes.count, sizeof *view->notes.item, compare_notes);
    view->by_rank = tb__malloc(nseats, sizeof *view->by_rank);
    if (!view->by_rank)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < nseats; i++)
        view->by_rank[i] = &view->seats.item[i].member;
    qsort(view->by_rank, nseats, sizeof *view->by_rank, compare_seat_ranks);
    return TB_OK;
}

tb_status tb__directory_view_create(tb__store_entries *entries, uint64_t warned, tb__directory_view **out) {
    tb__directory_view *view = tb__calloc(1, sizeof *view);
    if (!view) {
        tb__store_entries_fini(entries);
        return TB_NO_MEMORY;
    }
    atomic_init(&view->refs, 1);
    view->entries = *entries;
    *entries = (tb__store_entries){0};
    tb_status status = build_view(view, warned);
    if (status != TB_OK) {
        tb__directory_view_unref(view);
        return status;
    }
    *out = view;
    return TB_OK;
}

static tb__directory_view *ref_view(tb__directory_view *view) {
    atomic_fetch_add(&view->refs, 1);
    return view;
}

void tb__directory_view_unref(tb__directory_view *view) {
    if (!view || atomic_fetch_sub(&view->refs, 1) > 1)
        return;
    tb__store_entries_fini(&view->entries);
    tb__arena_fini(&view->names);
    free(view->seats.item);
    free(view->notes.item);
    free(view->by_rank);
    free(view);
}

uint64_t tb__directory_view_revision(const tb__directory_view *view) {
    return view->entries.revision;
}

const tb__store_entries *tb__directory_view_entries(const tb__directory_view *view) {
    return &view->entries;
}

int32_t tb__directory_view_next_rank(const tb__directory_view *view) {
    return view->seats.count > 0 ? view->by_rank[view->seats.count - 1]->rank + 1 : 0;
}

static void find_group_seats(const tb__directory_view *view, const char *group, size_t *first, size_t *last) {
    size_t i = 0;
    while (i < view->seats.count && strcmp(view->seats.item[i].group, group) != 0)
        i++;
    *first = i;
    while (i < view->seats.count && strcmp(view->seats.item[i].group, group) == 0)
        i++;
    *last = i;
}

void tb__directory_view_list_groups(const tb__directory_view *view, tb__text *out) {
    size_t first, last;
    for (size_t i = 0; i < view->seats.count; i = last) {
        find_group_seats(view, view->seats.item[i].group, &first, &last);
        tb__text_add(out, "%zu %" PRId32 " %s\n", last - first, view->seats.item[i].size, view->seats.item[i].group);
    }
}

tb_status tb__directory_view_roster(tb__directory_view *view, const char *group, tb__roster *out) {
    size_t first, last;
    find_group_seats(view, group, &first, &last);
    if (first == last) {
        *out = (tb__roster){0};
        return TB_OK;
    }
    const seat_entry *seats = view->seats.item;
    tb__roster roster = {.size = seats[first].size};
    roster.member = tb__malloc((size_t)roster.size, sizeof *roster.member);
    if (!roster.member)
        return TB_NO_MEMORY;
    for (int32_t i = 0; i < roster.size; i++)
        roster.member[i] = (tb__member){.rank = TB_NO_RANK};
    for (size_t i = first; i < last; i++) {
        roster.sizes_differ |= seats[i].size != roster.size;
        if (seats[i].index >= roster.size)
            continue;
        roster.npresent++;
        roster.member[seats[i].index] = seats[i].member;
    }
    roster.view = ref_view(view);
    *out = roster;
    return TB_OK;
}

void tb__directory_view_notes(tb__directory_view *view, const char *topic, tb__notes *out) {
    size_t first = 0, last;
    const tb__note *notes = view->notes.item;
    while (first < view->notes.count && strcmp(notes[first].topic, topic) != 0)
        first++;
    for (last = first; last < view->notes.count && strcmp(notes[last].topic, topic) == 0; last++)
        ;
    *out = (tb__notes){last - first, notes + first, ref_view(view)};
}

tb_status tb__directory_view_check_members(const tb__directory_view *view,
                                           tb_status (*check)(const void *contact, size_t nbytes, const char *label)) {
    for (size_t i = 0; i < view->seats.count; i++) {
        const seat_entry *p = &view->seats.item[i];
        char label[TB__DIRECTORY_MAX_NAME + 40];
        snprintf(label, sizeof label, "rank %" PRId32 " (%s %" PRId32 ")", p->member.rank, p->group, p->index);
        TB_TRY(check(p->member.contact, p->member.contact_nbytes, label));
    }
    return TB_OK;
}

int32_t tb__directory_view_count_contacts(const tb__directory_view *view, const void *prefix, size_t nbytes) {
    int32_t count = 0, last = TB_NO_RANK;
    for (size_t i = 0; i < view->seats.count; i++) {
        const tb__member *m = view->by_rank[i];
        bool is_match = m->contact_nbytes >= nbytes && (nbytes == 0 || memcmp(m->contact, prefix, nbytes) == 0);
        if (!is_match || m->rank == last)
            continue;
        count++;
        last = m->rank;
    }
    return count;
}

void tb__roster_fini(tb__roster *roster) {
    free(roster->member);
    tb__directory_view_unref(roster->view);
    *roster = (tb__roster){0};
}

void tb__notes_fini(tb__notes *notes) {
    tb__directory_view_unref(notes->view);
    *notes = (tb__notes){0};
}
