/* Exposures and direct reads (direct.c). A sender has a word in shared memory for each reader, which says for which
 * attempt the reader may read its tensors; the reader completes it, or the sender revokes it, by compare-and-set. The
 * reader runs parts of one job, which was prepared for the plan. struct flow_direct and struct member_direct are
 * written in direct.c; but bind.c maps the words of senders.
 *
 * All of this needs the loop's lock. */
#ifndef TB_FLOW_DIRECT_H
#define TB_FLOW_DIRECT_H

#include "flow/setup.h"

#include <stdatomic.h>

/* An exposure's word: attempt << 2 | state. */
enum { EXPOSURE_READY = 1, EXPOSURE_COMPLETE = 2, EXPOSURE_REVOKED = 3 };

/* Each word has a cache line. */
enum { WORD_STRIDE = 64 };

struct flow_direct {
    char *words; /* of all readers */
    tb__region *words_region;
    bool is_exposed;           /* the attempt that is being sent */
    uint64_t writable_attempt; /* the last one for which sources may be overwritten */
    size_t readers_left, committers_left;
    uint32_t next_lane_in;
};

/* What this rank and another one read of each other, in the transfers under way. */
struct member_direct {
    _Atomic uint64_t *word;                   /* of what we expose to it */
    bool has_stashed, is_done, has_committed; /* as a reader */

    tb_remote *words;
    _Atomic uint64_t *peer_exposure; /* as a sender: its word for us; NULL: it is not mapped */
    uint64_t ready;                  /* for which attempt it is */
    size_t left, aside_left;         /* buckets of its that are not here, and that are to be put aside */
    bool is_concluded;               /* it has been told that all is here */
};

/* A word for each reader, in a cache line of its own. */
tb_status tb__flow_make_words(tb__flow *flow);
void tb__flow_free_words(tb__flow *flow);

/* Sending: */
void tb__flow_forget_exposures(tb__flow *flow); /* of the attempt before: a send begins */
void tb__flow_expose(tb__flow *flow);
void tb__flow_revoke(tb__flow *flow); /* every exposure of the attempt that is being sent */
void tb__flow_on_stashed(tb__flow *flow, member *from, uint64_t attempt);
void tb__flow_on_done(tb__flow *flow, member *from, uint64_t attempt);
void tb__flow_on_committed(tb__flow *flow, member *from, uint64_t attempt);
bool tb__flow_is_served(const tb__flow *flow, const member *reader); /* it needs this rank no more */
void tb__flow_read_word(tb__flow *flow, member *reader); /* of one that is gone: it may have completed its exposure */

/* Receiving: */
void tb__flow_open_reads(tb__flow *flow);
bool tb__flow_on_ready(tb__flow *flow, member *from, uint64_t attempt);
/* Reads what is ready; *did: something was. */
tb_status tb__flow_step_reads(tb__flow *flow, bool *did);
/* Whether this rank's targets may be written: nobody still reads what they overwrite. */
bool tb__flow_may_write(const tb__flow *flow);
/* A bucket of the lane is in the tensors, or was put aside. */
tb_status tb__flow_count_arrived(tb__flow *flow, const lane *l);
void tb__flow_count_aside(tb__flow *flow, const lane *l);
/* Tells senders of which everything is here that they are not needed any more. */
tb_status tb__flow_conclude(tb__flow *flow);
void tb__flow_conclude_gone(tb__flow *flow, member *sender); /* if all that comes from it is here */
/* Whether what was read of the group was good: none of its senders has withdrawn it. */
tb_status tb__flow_check_exposures(const tb__flow *flow, const group *g);

#endif
