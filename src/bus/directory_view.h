/* What the store said about all groups and notes at one revision. Never changes once made. */
#ifndef TB_BUS_DIRECTORY_VIEW_H
#define TB_BUS_DIRECTORY_VIEW_H

#include "bus/directory_keys.h"

typedef struct tb__directory_view tb__directory_view;

/* Takes the entries over, whatever it returns. What is not in the directory's language is left out; there is a warning
 * in the log if it is newer than revision `warned`. */
tb_status tb__directory_view_create(tb__store_entries *entries, uint64_t warned, tb__directory_view **out);
void tb__directory_view_destroy(tb__directory_view *view);

uint64_t tb__directory_view_revision(const tb__directory_view *view);

int32_t tb__directory_view_next_rank(const tb__directory_view *view); /* all ranks are below it */

/* As in directory.h. */
tb_status tb__directory_view_roster(const tb__directory_view *view, const char *group, tb__roster *out);
tb_status tb__directory_view_notes(const tb__directory_view *view, const char *topic, tb__notes *out);
tb_status tb__directory_view_check_members(const tb__directory_view *view,
                                           tb_status (*check)(const void *contact, size_t nbytes, const char *label));
int32_t tb__directory_view_count_contacts(const tb__directory_view *view, const void *prefix, size_t nbytes);

#endif
