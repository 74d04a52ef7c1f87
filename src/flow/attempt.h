/* The attempts of a flow (attempt.c): which have started, under which transfer number, which have failed, and which of
 * them this rank's legs have taken. Only attempt.c writes struct flow_attempts, and the attempt, the number and the
 * acknowledgements of a tb__leg. A flow counts its attempts 1, 2, 3,
 * ...; the batch gives each a transfer number.
 *
 * All of this needs the loop's lock. */
#ifndef TB_FLOW_ATTEMPT_H
#define TB_FLOW_ATTEMPT_H

#include "base/mem.h"
#include "flow/flow.h"

typedef struct member member;

/* An attempt that the lead has started, and its transfer number. Later attempts have consecutive numbers, up to the
 * next entry. */
typedef struct issued {
    uint64_t attempt, number;
} issued;

/* A range of failed attempts. Number, status and message are those of the last one. */
typedef struct tb__abort {
    uint64_t first, last;
    uint64_t number;
    tb_status status;
    char *why;
} tb__abort;

struct flow_attempts {
    uint64_t started;                  /* the last attempt that this rank knows to have started */
    uint64_t announced;                /* the last one whose number it knows */
    TB_VEC(issued) starts;             /* ascending */
    uint64_t last_sent, last_received; /* taken by legs of this rank */
    TB_VEC(tb__abort) aborts;          /* ascending */
};

/* Records the transfer number of an attempt. False: no memory. */
bool tb__flow_record_start(tb__flow *flow, uint64_t attempt, uint64_t number);
/* Another rank knows that this attempt has started. */
void tb__flow_record_started(tb__flow *flow, uint64_t started);
/* The transfer number of the last attempt that this rank knows of. */
uint64_t tb__flow_last_number(const tb__flow *flow);
/* The last attempt that the leg has taken. */
uint64_t tb__flow_last_attempt(const tb__flow *flow, bool is_send);
/* Counts the attempt after that as taken, and returns it. */
uint64_t tb__flow_count_attempt(tb__flow *flow, bool is_send);
/* The lead's send takes a new attempt. */
uint64_t tb__flow_issue_attempt(tb__flow *flow);
/* The first attempt after the leg's last one that has not failed. */
uint64_t tb__flow_next_attempt(const tb__flow *flow, bool is_send);
/* Counts attempts that failed before the leg began as taken; of a send, those with a lower number than its own. */
void tb__flow_skip_ended(tb__flow *flow, bool is_send);
/* Gives a leg without an attempt the next one, if that has started. Returns whether the leg has one. */
bool tb__flow_take_attempt(tb__flow *flow, bool is_send);
const tb__abort *tb__flow_find_abort(const tb__flow *flow, uint64_t attempt);
/* Makes a failed leg wait until all members have acknowledged its ABORT. */
void tb__flow_await_abort_acks(tb__flow *flow, bool is_send);
void tb__flow_ack_abort(tb__flow *flow, member *to, uint64_t attempt);
void tb__flow_on_abort_ack(member *from, uint64_t attempt);
bool tb__flow_step_abort_acks(tb__flow *flow, bool is_send);
void tb__attempts_fini(struct flow_attempts *attempts);

#endif
