/* What each rank writes to the store about a pair, for all ranks to read: a request for the pair, or a refusal, which
 * says why the pair can't be made as requested. pair.c uses them. */
#ifndef TB_BUS_PAIR_NOTES_H
#define TB_BUS_PAIR_NOTES_H

#include "bus/world.h"

enum { TB__MOST_SUBJECTS = 2 };

/* A process that a refusal is about. */
typedef struct tb__subject {
    char group[TB__DIRECTORY_MAX_NAME + 1];
    int32_t index, rank;
    uint64_t incarnation;
} tb__subject;

typedef struct tb__pair_refusal {
    tb_status status; /* TB_OK: the note is a request */
    size_t nsubjects;
    tb__subject subjects[TB__MOST_SUBJECTS];
} tb__pair_refusal;

typedef struct tb__pair_note {
    const char *remote, *layout; /* the group that the author expects, and its own side's layout */
    uint32_t round;
    tb__pair_refusal refusal;
    const char *why;
} tb__pair_note;

/* What waiting does not mend: requests that differ, ranks that can't reach each other. */
static inline bool tb__is_refusal(tb_status status) {
    return status == TB_CONFLICT || status == TB_REFUSED;
}

/* False: the note is a refusal, or malformed. What is read points into the note. */
bool tb__pair_read_request(const tb__note *from, tb__pair_note *out);

/* Why another rank has refused the pair, which this one has made. Empty: none has. */
void tb__pair_find_refusal(const tb_pair *pair, char *out, size_t room);

/* Writes this rank's note, which replaces the one before. It has a second at least. */
tb_status tb__pair_publish(const tb_pair *pair, uint32_t round, const tb__pair_refusal *refusal, const char *why,
                           int64_t deadline_ms);
/* Deletes it; waits a second at most. */
void tb__pair_withdraw(const tb_pair *pair);

/* Adds a rank that the refusal is about. Returns `status`, and leaves tb_error_detail as it was. */
tb_status tb__refusal_add_subject(const tb_pair *pair, tb__pair_refusal *refusal, tb_status status, const char *group,
                                  int32_t index);

/* TB_OK, or the status and reason of a refusal that holds, which goes to `refusal`. `last_round` is the latest round
 * that any rank is in: a refusal of ours has to hold in all of them. */
tb_status tb__pair_check_refusals(const tb_pair *pair, const tb__notes *notes, tb__pair_refusal *refusal,
                                  uint32_t *last_round);

#endif
