/* Shared by the files of the copy service: copy.c (opening, closing, messages), copy_run.c (submitted operations, and
 * the agreement before a run), copy_move.c (the data), copy_memory.c (memory that the program invalidates), reshard.c
 * (plans of models, as runs), ir_run.c (IRs, as runs). */
#ifndef TB_COPY_COPY_H
#define TB_COPY_COPY_H

#include "bus/world.h"
#include "copy/match.h"

/* Sends or receives that this rank has submitted. */
typedef struct tb__copy_list {
    TB_VEC(tb__match_op) ops; /* when a run begins, sorted, and those of one task merged */
} tb__copy_list;

/* The state of another rank. */
typedef struct tb__copy_peer {
    int32_t seat;
    char *label; /* "rank 6 (inference 2)" */
    int64_t bucket_size, staging_bytes;
    bool is_ready;    /* it has confirmed that all ranks have opened the service */
    uint64_t offered; /* the last run that it has sent an offer for ... */
    unsigned char *offer;
    size_t offer_nbytes;
    uint64_t voted; /* the last run that it has voted on ... */
    tb_status vote;
    char why[TB__WHY_MAX];
    char *lost_why;          /* why it was lost; NULL: it was not */
    uint64_t nwithout_id[2]; /* operations with it that were submitted without a task id: receives, sends */
} tb__copy_peer;

struct tb_copy {
    tb__handshake handshake; /* first: messages find the service through it */
    tb__task task;
    tb_world *world;
    char what[TB__DIRECTORY_MAX_NAME + 80]; /* "copy service 'weights' over shm" */
    tb_copy_opts opts;
    int32_t index, size;                /* this rank's seat, and the group's size */
    int64_t bucket_size, staging_bytes; /* the smallest of all ranks */
    size_t *position;                   /* by seat: index in `peers` */
    tb__copy_peer *peers;               /* by position */
    size_t self;
    bool has_agreed;  /* all ranks have opened the service, and know that */
    tb_status broken; /* TB_OK: usable */
    char why[TB__WHY_MAX];
    size_t nlost; /* lost peers: the current run may succeed without them, the next one can't */

    /* Submitted operations. */
    tb__copy_list sends, recvs;
    TB_VEC(tb__match_view) views;
    TB_VEC(tb__match_view)
    params; /* of a plan that is being executed: memory that is read before the run, or written
               after it */
    tb__memory_user memory;
    tb__fault refused; /* why this rank can't do the next run */
    /* The next run is of an IR, in place of operations. */
    tb_ir *ir;           /* in ranks of the bus; NULL: it is not */
    uint64_t *ir_hashes; /* by seat: the hash of the fields that it shares with that rank */
    tb__flow_tensor *ir_tensors;
    void (*on_bucket)(void *arg, size_t bucket, tb_bucket_step step);
    void *on_bucket_arg;

    /* Runs. */
    uint64_t run; /* the last one */
    bool is_running;
    uint64_t aborted; /* the last run that was aborted, perhaps by others */
    bool is_given_up; /* the running run was aborted, for the reason below */
    bool is_late;     /* because this rank had not sent its offer by the others' deadline */
    tb_status abort_status;
    char abort_why[TB__WHY_MAX];

    /* The data of one run. */
    tb__flow *flow; /* NULL: this rank has no operations with others */
    tb__phases phases;
    int64_t deadline_ms;
    bool has_moved;
    bool copies_local; /* local copies are running, or the user's functions that use tensors */
    tb_status status;  /* of the data's move; the message is in `moved_why` */
    char moved_why[TB__WHY_MAX];
    TB_VEC(struct tb__copy_backlog {
        size_t peer;
        unsigned char *data;
        size_t nbytes;
    })
    backlog; /* messages to the run's flow, which does not exist yet */
};

/* Messages to the service's port begin with one of these, or with the number of a flow. */
enum { COPY_READY, COPY_OFFER, COPY_VOTE, COPY_ABORT, COPY_FLOWS };

/* copy.c. All with the lock held. */
void tb__copy_break(tb_copy *copy,
                    tb_status status); /* makes the service unusable, for the reason in tb_error_detail */
/* Aborts the run on all ranks, for the reason in tb_error_detail; returns the status. */
tb_status tb__copy_abort(tb_copy *copy, tb_status status);
void tb__copy_drop_backlog(tb_copy *copy);
uint32_t tb__copy_flow_number(uint64_t run);

/* This rank's sends to, or receives from, one seat. */
tb__match_end tb__copy_ops_with(tb_copy *copy, bool is_send, int32_t seat);

/* copy_move.c: moves the data of an agreed run; unlocks meanwhile. */
tb_status tb__copy_move(tb_copy *copy);
/* TB_INVALID if targets overlap, or a local copy reads what the run writes. */
tb_status tb__copy_check_memory(tb_copy *copy);
/* Runs moves within this rank, before the deadline. *is_stuck: a device may still use their memory. */
tb_status tb__copy_run_moves(tb_copy *copy, const tb__move *moves, size_t nmoves, void *dst_buffer, bool *is_stuck);
void tb__copy_flow_gone(tb_copy *copy, size_t peer);
/* TB_LOST if a peer was lost, so that no further run can begin. */
tb_status tb__copy_find_loss(const tb_copy *copy);

/* copy_memory.c: TB_INVALID, naming the tensor, if memory of a submitted operation was invalidated. */
tb_status tb__copy_check_invalidated(const tb_copy *copy);
bool tb__copy_invalidate(tb__memory_user *user, uintptr_t first, uintptr_t last, char *still, size_t room);

#endif
