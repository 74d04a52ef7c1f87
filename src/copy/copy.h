/* What the files of the copy service share: copy.c (who takes part, messages), copy_run.c (what is submitted, and how a
 * run goes), copy_move.c (the data), copy_memory.c (memory that the program invalidates). */
#ifndef TB_COPY_COPY_H
#define TB_COPY_COPY_H

#include "bus/world.h"
#include "copy/match.h"

/* The operations that one rank has for another, or with all. */
typedef struct tb__copy_list {
    TB_VEC(tb__match_op) ops; /* by seat and id, once they are checked */
} tb__copy_list;

/* What another rank has said. */
typedef struct tb__copy_peer {
    int32_t seat;
    char *label; /* "rank 6 (inference 2)" */
    int64_t bucket_size, staging_bytes;
    bool is_ready;    /* it has come, and knows that all others have */
    uint64_t offered; /* the run that it has come to last, and what it has for us */
    unsigned char *offer;
    size_t offer_nbytes;
    uint64_t voted; /* the run that it has judged last, and how */
    tb_status vote;
    char why[TB__WHY_MAX];
    char *lost_why; /* it takes no further part, for this reason; NULL: it has not failed */
} tb__copy_peer;

struct tb_copy {
    tb__handshake all; /* first: messages find the service through it */
    tb__task task;
    tb_world *world;
    char what[TB__DIRECTORY_MAX_NAME + 32];
    tb_copy_opts opts;
    int32_t index, size;                /* this rank's seat, of so many */
    int64_t bucket_size, staging_bytes; /* the least of all ranks */
    size_t *position;                   /* by seat: of the peer */
    tb__copy_peer *peers;               /* by position */
    size_t self;
    bool has_agreed;  /* all have come, and know it */
    tb_status broken; /* no run can succeed any more, and why */
    char why[TB__WHY_MAX];
    size_t nlost; /* peers: the run under way may succeed without them, the next can't */

    /* What was submitted. */
    tb__copy_list sends, recvs;
    TB_VEC(tb__match_view) views;
    tb__memory_user memory;

    /* Runs. */
    uint64_t run; /* the last one */
    bool is_running;
    uint64_t aborted; /* the last one that was given up; perhaps by others, who have finished the one under way */
    bool is_given_up; /* the one under way; why: */
    bool is_late;     /* this rank, perhaps among others, had not come */
    tb_status abort_status;
    char abort_why[TB__WHY_MAX];

    /* The data of one run. */
    tb__flow *flow; /* NULL: nothing goes to or comes from others */
    tb__phases phases;
    int64_t deadline_ms;
    bool has_moved;
    bool copies_local; /* what stays on this rank is being copied */
    tb_status status;  /* of one that has failed; the sentence is in `moved_why` */
    char moved_why[TB__WHY_MAX];
    TB_VEC(struct tb__copy_backlog {
        size_t peer;
        unsigned char *data;
        size_t nbytes;
    })
    backlog; /* messages to the flow of this run, which is not there yet */
};

/* Messages to the service's port begin with one of these, or with the number of a flow. */
enum { COPY_READY, COPY_OFFER, COPY_VOTE, COPY_ABORT, COPY_FLOWS };

/* copy.c. All with the lock held. */
void tb__copy_break(tb_copy *copy, tb_status status); /* for the reason in tb_error_detail */
/* Gives the run up, for all, for the reason in tb_error_detail; returns the status. */
tb_status tb__copy_abort(tb_copy *copy, tb_status status);
void tb__copy_drop_backlog(tb_copy *copy);
uint32_t tb__copy_flow_number(uint64_t run);

/* The operations with one seat. */
tb__match_end tb__copy_ops_with(tb_copy *copy, bool is_send, int32_t seat);

/* copy_move.c: does what all have agreed on; the lock is free meanwhile. */
tb_status tb__copy_move(tb_copy *copy);
/* Where local copies would not know what to read, or targets share memory. */
tb_status tb__copy_check_memory(tb_copy *copy);
void tb__copy_flow_gone(tb_copy *copy, size_t peer);
/* The service can't be used any more because of peers that were lost. TB_OK: it can. */
tb_status tb__copy_find_loss(const tb_copy *copy);

/* copy_memory.c: TB_INVALID, by name, if memory of what was submitted was invalidated. */
tb_status tb__copy_check_invalidated(const tb_copy *copy);
bool tb__copy_invalidate(tb__memory_user *user, uintptr_t first, uintptr_t last, char *still, size_t room);

#endif
