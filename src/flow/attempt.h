/* The attempts of a flow (attempt.c): which have been started, what they are called, which have ended without success,
 * and which this rank's legs have had. struct flow_attempts is written there only. Attempts are the flow's own, one
 * after the other; what they are called is the batch's business.
 *
 * All of this needs the loop's lock. */
#ifndef TB_FLOW_ATTEMPT_H
#define TB_FLOW_ATTEMPT_H

#include "base/mem.h"
#include "flow/flow.h"

typedef struct member member;

/* A transfer that the lead has begun, and what it is called. Those that follow are called by the numbers that follow,
 * up to the next entry. */
typedef struct issued {
    uint64_t attempt, number;
} issued;

/* Attempts that have ended without success. What is said of them is said of the last one. */
typedef struct tb__abort {
    uint64_t first, last;
    uint64_t number;
    tb_status status;
    char *why;
} tb__abort;

struct flow_attempts {
    uint64_t started;
    TB_VEC(issued) starts;             /* ascending */
    uint64_t last_sent, last_received; /* that legs of this rank have had */
    TB_VEC(tb__abort) aborts;          /* ascending */
};

/* False: there is no memory for it. */
bool tb__flow_note_start(tb__flow *flow, uint64_t attempt, uint64_t number);
/* So many have been started, as another rank says. */
void tb__flow_note_started(tb__flow *flow, uint64_t started);
/* Of the last one that was begun, as far as this rank knows. */
uint64_t tb__flow_last_number(const tb__flow *flow);
/* The last attempt that a leg of this rank has had. */
uint64_t tb__flow_last_attempt(const tb__flow *flow, bool is_send);
/* The leg has had the attempt after that, too; which that is. */
uint64_t tb__flow_count_attempt(tb__flow *flow, bool is_send);
/* The lead's send takes the next number of all. */
uint64_t tb__flow_issue_attempt(tb__flow *flow);
/* The first attempt after that one that has not ended. */
uint64_t tb__flow_next_attempt(const tb__flow *flow, bool is_send);
void tb__flow_skip_ended(tb__flow *flow, bool is_send);
/* Gives a leg that waits for a number the next one, if there is one. */
bool tb__flow_take_attempt(tb__flow *flow, bool is_send);
const tb__abort *tb__flow_find_abort(const tb__flow *flow, uint64_t attempt);
/* All have been told that the leg has failed: waits until they have heard it. */
void tb__flow_await_abort_acks(tb__flow *flow, bool is_send);
void tb__flow_ack_abort(tb__flow *flow, member *to, uint64_t attempt);
void tb__flow_on_abort_ack(member *from, uint64_t attempt);
bool tb__flow_step_abort_acks(tb__flow *flow, bool is_send);
void tb__attempts_fini(struct flow_attempts *attempts);

#endif
