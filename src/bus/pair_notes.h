/* What ranks say about a pair, in the store, for all to see: a note of each, which is a wish, or a verdict: that the
 * pair can't be made as it is, and why. pair.c tells what becomes of them. */
#ifndef TB_BUS_PAIR_NOTES_H
#define TB_BUS_PAIR_NOTES_H

#include "bus/world.h"

enum { TB__MOST_SUBJECTS = 2 };

/* A process that a verdict is about. */
typedef struct tb__subject {
    char group[TB__DIRECTORY_MAX_NAME + 1];
    int32_t index, rank;
    uint64_t incarnation;
} tb__subject;

typedef struct tb__pair_verdict {
    tb_status status; /* TB_OK: it is none */
    size_t nsubjects;
    tb__subject subjects[TB__MOST_SUBJECTS];
} tb__pair_verdict;

typedef struct tb__pair_note {
    const char *remote, *layout; /* the group that is expected, and this side's layout */
    uint32_t round;
    tb__pair_verdict verdict;
    const char *why;
} tb__pair_note;

/* What nobody can make good by waiting: wishes that differ, ranks that can't talk to each other. */
static inline bool tb__is_verdict(tb_status status) {
    return status == TB_CONFLICT || status == TB_REFUSED;
}

/* False: it is a verdict, or nonsense. What is read points into the note. */
bool tb__pair_read_wish(const tb__note *from, tb__pair_note *out);

/* Why another rank could not make the pair, which this one has made: for sentences about that rank. Empty: nobody has
 * said so. */
void tb__pair_find_verdict(const tb_pair *pair, char *out, size_t room);

/* Puts this rank's note in the place of the one before. It has a second at least. */
tb_status tb__pair_say(const tb_pair *pair, uint32_t round, const tb__pair_verdict *verdict, const char *why,
                       int64_t deadline_ms);
/* Takes it away; does not wait for more than a second. */
void tb__pair_unsay(const tb_pair *pair);

/* Adds one of those whom a reason that was found is about, and returns that reason, in tb_error_detail. */
tb_status tb__pair_blame(const tb_pair *pair, tb__pair_verdict *verdict, tb_status status, const char *group,
                         int32_t index);

/* What others have found; and the last round that anybody is in, as a verdict of ours has to hold for all. */
tb_status tb__pair_obey(const tb_pair *pair, const tb__notes *notes, tb__pair_verdict *verdict, uint32_t *last_round);

#endif
