/* Claims seats and bus ranks in the store, against one deadline. */
#ifndef TB_BUS_DIRECTORY_CLAIM_H
#define TB_BUS_DIRECTORY_CLAIM_H

#include "bus/directory_keys.h"

/* Several requests to the store share one deadline (of CLOCK_MONOTONIC). */
typedef struct tb__store_deadline {
    tb__store *store;
    int64_t deadline_ms;
    int timeout_ms; /* from which the deadline was computed, for error messages */
} tb__store_deadline;

/* Before each request: sets its timeout to the time that is left; TB_TIMEOUT if there is none. */
tb_status tb__store_deadline_apply(const tb__store_deadline *deadline);

/* Claims the seat; `is_again`: this process had it before the store was lost. A process that holds the seat, or names
 * another group size, may be dead: it is given time to disappear, then TB_CONFLICT. */
tb_status tb__seat_claim(const tb__store_deadline *deadline, const char *group, int32_t index,
                         const tb__seat_record *mine, bool is_again);

/* Releases a claimed seat after a failure. Returns the status, and keeps its error message. */
tb_status tb__seat_give_up(const tb__store_deadline *deadline, const char *group, int32_t index, tb_status status);

/* Claims the rank that the seat had last, or else a new one. `holder` describes this process in a text that no other
 * process uses. */
tb_status tb__rank_claim(const tb__store_deadline *deadline, const char *group, int32_t index, const char *holder,
                         int32_t *rank, uint64_t *incarnation);

/* Claims the rank again after the store was lost. TB_CONFLICT if another process has it, or has had it meanwhile. */
tb_status tb__rank_reclaim(const tb__store_deadline *deadline, const char *holder, int32_t rank, uint64_t incarnation);

/* Makes an empty store give out only ranks from this one on as new. */
tb_status tb__ranks_reserve(const tb__store_deadline *deadline, int32_t next_rank);

/* Stores the rank as the one that the seat had last. */
tb_status tb__seat_remember_rank(const tb__store_deadline *deadline, const char *group, int32_t index, int32_t rank);

#endif
