/* A snapshot of all groups and notes in the store, at one revision. Immutable, and shared: rosters and lists of notes
 * point into it and keep it. */
#ifndef TB_BUS_DIRECTORY_VIEW_H
#define TB_BUS_DIRECTORY_VIEW_H

#include "bus/directory_keys.h"

/* Takes over the entries, also if it fails. Ignores invalid entries, and logs a warning for those newer than revision
 * `warned`. */
tb_status tb__directory_view_create(tb__store_entries *entries, uint64_t warned, tb__directory_view **out);
void tb__directory_view_unref(tb__directory_view *view); /* NULL is allowed */

uint64_t tb__directory_view_revision(const tb__directory_view *view);

/* What it was made from. */
const tb__store_entries *tb__directory_view_entries(const tb__directory_view *view);

int32_t tb__directory_view_next_rank(const tb__directory_view *view); /* one more than the highest rank */

/* As in directory.h. */
tb_status tb__directory_view_roster(tb__directory_view *view, const char *group, tb__roster *out);
void tb__directory_view_notes(tb__directory_view *view, const char *topic, tb__notes *out);
tb_status tb__directory_view_check_members(const tb__directory_view *view,
                                           tb_status (*check)(const void *contact, size_t nbytes, const char *label));
void tb__directory_view_list_groups(const tb__directory_view *view, tb__text *out);
int32_t tb__directory_view_count_contacts(const tb__directory_view *view, const void *prefix, size_t nbytes);

#endif
