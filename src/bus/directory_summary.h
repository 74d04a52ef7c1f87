/* A summary of a pair, in one value of the store, from the first rank of a group for the other ranks, so that they need
 * not list the store themselves: the seats of the pair's two groups and the notes about the pair. */
#ifndef TB_BUS_DIRECTORY_SUMMARY_H
#define TB_BUS_DIRECTORY_SUMMARY_H

#include "base/pack.h"
#include "bus/directory_view.h"

typedef struct tb__summary {
    char pair[TB__DIRECTORY_MAX_NAME + 1], groups[2][TB__DIRECTORY_MAX_NAME + 1];
    uint64_t state;           /* the hint that was given with it */
    uint64_t revision;        /* of its key in the store */
    tb__directory_view *view; /* of these entries only; NULL: there are too many, and the store has to be listed */
} tb__summary;

/* Packs those of the store's entries that are about the pair. */
void tb__summary_pack(tb__pack *pack, const tb__store_entries *entries, const char *pair, const char *const groups[2],
                      uint64_t state);
/* False if the value is malformed, or there is no memory. */
bool tb__summary_unpack(const tb__store_value *value, const char *pair, tb__summary *out);

#endif
