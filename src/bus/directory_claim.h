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

typedef struct tb__own_seat {
    char group[TB__DIRECTORY_MAX_NAME + 1];
    int32_t index, size;
    uint64_t revision; /* of the claim */
} tb__own_seat;

typedef struct tb__claimed_rank {
    int32_t rank;
    uint64_t incarnation;
    int32_t first; /* of the group's block; TB_NO_RANK: the rank is not of the block */
    int32_t next;  /* the first rank that belonged to no group then */
} tb__claimed_rank;

/* Before each request: sets its timeout to the time that is left; TB_TIMEOUT if there is none. */
tb_status tb__store_deadline_apply(const tb__store_deadline *deadline);

/* Claims the seat; `is_again`: this process had it before the store was lost. A process that holds the seat may be
 * dead: it is given time to disappear, then TB_CONFLICT. `revision` is that of the claim. */
tb_status tb__seat_claim(const tb__store_deadline *deadline, const char *group, int32_t index,
                         const tb__seat_record *mine, bool is_again, uint64_t *revision);

/* After the claim: gives the seat up, with TB_CONFLICT, if another process names another group size, and does not
 * disappear either. `lead` becomes the record of the group's first rank, if that has joined, and is compared with that
 * one only. `seats` become those of all groups otherwise. Both may be NULL. */
tb_status tb__seat_check_size(const tb__store_deadline *deadline, const tb__own_seat *own, const tb__seat_record *mine,
                              tb__store_value *lead, tb__store_entries *seats);

/* Releases a claimed seat after a failure. Returns the status, and keeps its error message. */
tb_status tb__seat_give_up(const tb__store_deadline *deadline, const char *group, int32_t index, tb_status status);

/* Claims the seat's rank: that of its index in the block of ranks that belongs to the group with its size. If a living
 * process has that, another one. `holder` describes this process in a text that no other process uses. */
tb_status tb__rank_claim(const tb__store_deadline *deadline, const tb__own_seat *seat, const char *holder,
                         tb__claimed_rank *out);

/* Claims the rank again after the store was lost. TB_CONFLICT if another process has it, or has had it meanwhile. */
tb_status tb__rank_reclaim(const tb__store_deadline *deadline, const char *holder, int32_t rank, uint64_t incarnation);

/* Makes an empty store assign new ranks from `next_rank` on only, and this block to the seat's group; TB_NO_RANK:
 * none. */
tb_status tb__ranks_reserve(const tb__store_deadline *deadline, const tb__own_seat *seat, int32_t first,
                            int32_t next_rank);

#endif
