/* Exposures and direct reads (direct.c). An *exposure* is a 64-bit word in the sender's shared memory, one for each
 * reader. It says for which attempt the reader may read the sender's tensors; the reader completes it, or the sender
 * revokes it, by compare-and-set. The reader runs parts of one job, which was prepared for the plan. Only direct.c
 * writes struct flow_direct and struct member_direct, except that bind.c maps the exposures of senders.
 *
 * All of this needs the loop's lock. */
#ifndef TB_FLOW_DIRECT_H
#define TB_FLOW_DIRECT_H

#include "flow/setup.h"
#include "loop/share.h"

#include <stdatomic.h>

/* An exposure's value: attempt << 2 | state. */
enum { EXPOSURE_READY = 1, EXPOSURE_COMPLETE = 2, EXPOSURE_REVOKED = 3 };

/* Each exposure has a cache line. */
enum { EXPOSURE_STRIDE = 64 };

struct flow_direct {
    char *exposures; /* for all readers */
    tb__region *exposures_region;
    bool is_exposed;           /* tensors are exposed for the attempt that is being sent */
    uint64_t writable_attempt; /* the last attempt for which this rank may overwrite its sources */
    size_t readers_left, committers_left;
    uint32_t next_lane_in;
    tb__revocation_watch watch;         /* written by invalidate.c, as is ... */
    bool is_revoking;                   /* ... this: senders' memory is released when no copy reads it */
    size_t nunreachable;                /* members with why_unreachable */
    TB_VEC(tb__peer_memory *) replaced; /* likewise, of tensors that have moved; written by bind.c, too */
};

/* Progress of direct reads between this rank and another one, in the current transfers. */
struct member_direct {
    _Atomic uint64_t *exposure;               /* of this rank's tensors to it */
    bool has_stashed, is_done, has_committed; /* as a reader */

    tb__peer_memory *exposures;
    _Atomic uint64_t *peer_exposure; /* as a sender: of its tensors to this rank; NULL: not mapped */
    uint64_t ready;                  /* the attempt of its last READY */
    size_t left, stash_left;         /* reads of its buckets that are left, and buckets that have not been stashed */
    bool is_concluded;               /* it knows that all its buckets have arrived */
};

tb_status tb__flow_make_exposures(tb__flow *flow);
void tb__flow_free_exposures(tb__flow *flow);

/* Sending: */
void tb__flow_forget_exposures(tb__flow *flow); /* of the previous attempt, when a send begins */
void tb__flow_expose(tb__flow *flow);
void tb__flow_revoke(tb__flow *flow); /* all exposures of the current send */
void tb__flow_on_stashed(tb__flow *flow, member *from, uint64_t attempt);
void tb__flow_on_done(tb__flow *flow, member *from, uint64_t attempt);
void tb__flow_on_committed(tb__flow *flow, member *from, uint64_t attempt);
bool tb__flow_is_served(const tb__flow *flow, const member *reader); /* the reader does not need this rank any more */
void tb__flow_check_exposure_of(tb__flow *flow,
                                member *reader); /* whether a reader that is gone had completed its exposure */

/* Receiving: */
void tb__flow_open_reads(tb__flow *flow);
bool tb__member_on_ready(member *from, uint64_t attempt);
/* Starts a read of what is ready; *did: there was something. */
tb_status tb__flow_step_reads(tb__flow *flow, bool *did);
/* Whether this rank may write its targets: no reader still needs the sources that they overwrite. */
bool tb__flow_may_write(const tb__flow *flow);
/* Counts a bucket of the lane that is in the tensors, or in the stash. */
tb_status tb__flow_count_arrived(tb__flow *flow, const lane *l);
tb_status tb__flow_count_second_reads(tb__flow *flow, const lane *l, uint32_t number); /* of a group */
void tb__flow_count_stashed(tb__flow *flow, const lane *l);
/* Sends DONE to senders all of whose buckets have arrived. */
tb_status tb__flow_conclude(tb__flow *flow);
void tb__flow_conclude_gone(tb__flow *flow, member *sender); /* if all its buckets have arrived */
/* Whether the sender has not revoked its exposure for the current receive, as far as that is known. */
bool tb__member_is_exposed(const tb__flow *flow, const member *sender);
/* Checks that no sender has revoked its exposure while the group was read. */
tb_status tb__flow_check_exposures(const tb__flow *flow, const group *g);

#endif
