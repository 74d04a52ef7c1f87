/* The notes that ranks publish about a pair: a request for the pair, or a refusal, which says why the pair can't be
 * made as requested. Used by pair.c. */
#ifndef TB_BUS_PAIR_NOTES_H
#define TB_BUS_PAIR_NOTES_H

#include "bus/world.h"

enum { TB__MOST_SUBJECTS = 2 };

/* A process that a refusal names. */
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

/* Failures that waiting does not mend: requests that differ, ranks that can't reach each other. */
static inline bool tb__is_refusal(tb_status status) {
    return status == TB_CONFLICT || status == TB_REFUSED;
}

/* False: the note is malformed. The strings point into the note. */
bool tb__pair_read_note(const tb__note *from, tb__pair_note *out);
/* False also if it is a refusal. */
bool tb__pair_read_request(const tb__note *from, tb__pair_note *out);

/* The reason for which another rank has refused the pair; "" if none has. */
void tb__pair_find_refusal(const tb_pair *pair, char *out, size_t room);

/* Publishes this rank's note, in place of the one before. It has at least a second, whatever the deadline. */
tb_status tb__pair_publish(const tb_pair *pair, uint32_t round, const tb__pair_refusal *refusal, const char *why,
                           int64_t deadline_ms);
/* Withdraws it; waits a second at most. */
void tb__pair_withdraw(const tb_pair *pair);

/* Names a rank in the refusal. Returns `status`, and leaves tb_error_detail as it was. */
tb_status tb__refusal_add_subject(const tb_pair *pair, tb__pair_refusal *refusal, tb_status status, const char *group,
                                  int32_t index);

/* TB_OK, or the status and reason of a refusal that is in force, which is copied to `refusal`. `last_round` is the
 * latest round of any rank: a refusal of ours must be in force in all of them. */
tb_status tb__pair_check_refusals(const tb_pair *pair, const tb__notes *notes, tb__pair_refusal *refusal,
                                  uint32_t *last_round);

#endif
