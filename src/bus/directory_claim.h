/* Taking seats and bus ranks: what is asked of the store, step by step, against one deadline. */
#ifndef TB_BUS_DIRECTORY_CLAIM_H
#define TB_BUS_DIRECTORY_CLAIM_H

#include "bus/directory_keys.h"

/* Several questions to the store that have to be answered by the same deadline (of CLOCK_MONOTONIC). */
typedef struct tb__store_deadline {
    tb__store *store;
    int64_t deadline_ms;
    int timeout_ms; /* that the deadline was made of, for sentences */
} tb__store_deadline;

/* Before each question: gives the store's next call the time that is left, or fails because there is none. */
tb_status tb__store_deadline_apply(const tb__store_deadline *deadline);

/* Takes the seat; `is_again`: it was this process's before the store was lost. Both who sits there already and who
 * thinks that the group has another size may be about to be found dead, so they are given a moment to disappear; then
 * TB_CONFLICT. */
tb_status tb__seat_claim(const tb__store_deadline *deadline, const char *group, int32_t index,
                         const tb__seat_record *mine, bool is_again);

/* Leaves a seat that was claimed, because of a failure: keeps its sentence and returns its status. */
tb_status tb__seat_give_up(const tb__store_deadline *deadline, const char *group, int32_t index, tb_status status);

/* Takes the rank that the seat had last, or the next one that nobody has had. `holder` says who takes it, in words that
 * no other process uses. */
tb_status tb__rank_claim(const tb__store_deadline *deadline, const char *group, int32_t index, const char *holder,
                         int32_t *rank, uint64_t *incarnation);

/* Takes it again after the store was lost. TB_CONFLICT if another process has it, or has had it meanwhile. */
tb_status tb__rank_reclaim(const tb__store_deadline *deadline, const char *holder, int32_t rank, uint64_t incarnation);

/* A store that has forgotten everything must not give out ranks below this as new ones. */
tb_status tb__ranks_reserve(const tb__store_deadline *deadline, int32_t next_rank);

/* From now on this is the rank that the seat had last. */
tb_status tb__seat_remember_rank(const tb__store_deadline *deadline, const char *group, int32_t index, int32_t rank);

#endif
