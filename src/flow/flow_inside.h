/* struct tb__flow, and the functions that its files call in one another. Each struct in it is written only by its
 * owner, one or a few files: see its comment, and the table in docs/design/flow.md.
 *
 * All of this needs the loop's lock. */
#ifndef TB_FLOW_FLOW_INSIDE_H
#define TB_FLOW_FLOW_INSIDE_H

#include "flow/attempt.h"
#include "flow/direct.h"
#include "flow/report.h"
#include "flow/setup.h"
#include "flow/staged.h"
#include "loop/jobs.h"

typedef enum message_kind {
    MESSAGE_BIND,
    MESSAGE_REACH,
    MESSAGE_START,
    MESSAGE_READY,
    MESSAGE_BUCKET,
    MESSAGE_GO,
    MESSAGE_TAKEN,
    MESSAGE_STASHED,
    MESSAGE_DONE,
    MESSAGE_GATHER,
    MESSAGE_ABORT,
    MESSAGE_COMMITTED,
    MESSAGE_ABORT_ACK,
    MESSAGE_REBIND,
    MESSAGE_KINDS
} message_kind;

/* Another rank of the flow, or this one. Only flow.c writes it, except where noted. */
struct member {
    tb__peer *peer;
    uint32_t port;
    bool is_gone;
    tb_status gone_status;
    char *gone_why;      /* message; NULL: there was no memory for it */
    int64_t gone_ms;     /* when that was noticed */
    bool has_left;       /* it said goodbye; else it is lost */
    bool missed_message; /* a message to it could not be sent: it must be told that the flow is broken (report.c) */
    uint64_t unacked[2]; /* by leg (is_send): the failed attempt that it has not acknowledged (attempt.c); 0: none */

    struct member_setup setup;
    struct member_direct direct;
};

/* Copies of buckets, or of whole tensors. */
typedef enum copy_kind {
    COPY_DIRECT,       /* from senders' tensors to the targets, or to slots; or only magnitudes (is_read_twice) */
    COPY_STASH,        /* from senders' tensors to a bucket in the stash */
    COPY_PACK,         /* from sources to a bucket */
    COPY_CONTRIBUTE,   /* from sources to a contribution */
    COPY_UNPACK,       /* from a bucket to the targets */
    COPY_COMBINE,      /* from contributions to a bucket */
    COPY_COMBINE_IN,   /* from contributions to the targets */
    COPY_SNAPSHOT,     /* from sources to the snapshot */
    COPY_COMMIT,       /* from the shadow to the targets, and zeros to their padding */
    COPY_PADDING,      /* zeros to the padding of targets */
    COPY_SUM,          /* only the checksum of a buffer */
    COPY_SCRATCH_SRC,  /* of coded buckets: from sources to scratch memory */
    COPY_SCRATCH_DST,  /* from targets to scratch memory */
    COPY_SCRATCH_BACK, /* from scratch memory to targets */
    COPY_MEASURE,      /* only the largest magnitudes of gathered groups */
    COPY_GATHERED,     /* from slots, or senders' tensors that were measured, to targets */
    COPY_KINDS
} copy_kind;

/* The jobs of all copies of a kind. */
typedef struct prepared {
    bool is_done;
    tb__jobs jobs;
} prepared;

typedef struct copy_op copy_op;

/* A copy operation under way. */
struct copy_op {
    tb__jobs_run run; /* first */
    tb__flow *flow;
    bool is_send; /* belongs to the send, else to the receive */
    copy_kind kind;
    copy_kind running; /* a coded bucket takes several runs of different kinds */
    char *scratch;     /* likewise: row-major boxes in host memory */
    uint32_t *parts;   /* buckets, or gathered groups */
    size_t nparts;
    bool converts;         /* it converts or measures senders' tensors where they are */
    char *from, *to;       /* buffers */
    char why[TB__WHY_MAX]; /* message of a failure, for `end` */
    /* Called by the driver, between steps, or at once if there is nothing to copy. A failure has ended the leg before
     * that. Only a failed read of another rank's memory (see is_failed_read) and a failed COPY_COMMIT are left to
     * `end`.
     */
    void (*end)(copy_op *c, tb_status status);
    staged_bucket *staged_bucket; /* for `end` */
    bucket_message *message;      /* likewise, of a checksum */
    size_t nbytes;
    tb__stream_point *point; /* that a run waits for; NULL: none */
    tb__fence *after[1];     /* its fence */
    size_t nholders;         /* of its fences; it is freed when there are none */
    bool is_over;            /* it is not part of the flow any more */
    copy_op *next;
};

/* Shadowed receives: only shadow.c writes it. */
typedef struct shadow {
    tb_binding *live; /* per tensor: the program's binding, if dst is the shadow */
    bool is_prepared; /* the receive is complete, and waits to be applied or discarded */
    bool would_end;   /* it has a reason to fail, which was reported to its owner */
    bool is_applying; /* the shadow is being copied into the tensors */
} shadow;

/* The targets of the receive: only recv.c writes it. */
struct flow_targets {
    uint64_t version; /* that they hold */
    bool has_written; /* the current receive has written into the tensors themselves */
    bool is_torn;     /* a failed receive has */
    size_t buckets_left;
    bool is_clearing_padding;
};

/* Validity of the program's memory: only invalidate.c writes it. */
struct flow_memory {
    bool is_valid[2]; /* of targets, and of sources: none was invalidated */
};

/* The snapshot of the sources: only send.c writes it. */
struct flow_snapshot {
    uint64_t attempt; /* that it was taken for, or is being taken for */
    bool is_being_taken;
};

/* Tensor groups of the receive: only group.c writes it. */
struct flow_groups {
    bool has_steps;           /* some groups are written in steps of their own, when they are complete */
    size_t done, slots_done;  /* groups that are complete, and how many of them were gathered in slots */
    size_t asked;             /* groups whose magnitudes were sent before they were next */
    bool is_step_running;     /* the next gathered group is being measured or written */
    size_t user_groups_taken; /* by the program ... */
    bool takes_all;           /* ... which takes all of them as they arrive */
    size_t nslots, slot_nbytes;
    char *slots;        /* memory to gather in, ... */
    tb__device *device; /* ... of this device, ... */
    int unit;           /* ... on this unit of it */
};

/* Only copy.c writes it, except where noted. */
struct flow_copies {
    prepared prepared[COPY_KINDS];
    copy_op *ops;               /* under way, a list */
    size_t nops;                /* including those whose `end` is running */
    bool is_stuck;              /* a device has not finished copies in time: the memory that they use is kept */
    bool is_orphan;             /* the flow is freed when the last copy is done ... */
    tb__quarantine *quarantine; /* ... and until then its tensors are in use */
    tb__jobs_run rehearsal;     /* of COPY_DIRECT, before the first receive */
    bool is_rehearsing;
    tb__stream_point *points[2]; /* by leg (is_send): tensors are read and written after it; NULL: at once (stream.c) */
};

/* Fields outside of the structs above are written by flow.c only, except that setup.c binds `tensors` to snapshots and
 * shadows. */
struct tb__flow {
    tb__flow_opts o;
    char *what;
    tb__flow_tensor *tensors;
    bool has_padding; /* in any of their targets */
    member *members;
    size_t nmembers, self, ngone;
    tb__flow *next_kept; /* of flows that are kept for good */

    struct flow_setup setup;
    struct flow_direct direct;
    struct flow_staged staged;
    struct flow_attempts attempts;
    struct flow_report report;
    struct flow_copies copies;
    struct flow_groups groups;
    struct flow_snapshot snapshot;
    struct flow_targets targets;
    struct flow_memory memory;
    shadow shadow;
    tb__leg send, recv;
};

static inline void tb__flow_tell_step(const tb__flow *flow, size_t bucket, tb_bucket_step step) {
    if (flow->o.on_bucket)
        flow->o.on_bucket(flow->o.on_bucket_arg, bucket, step);
}

/* flow.c */
member *tb__flow_find_member(tb__flow *flow, int32_t rank);
void tb__flow_begin_message(tb__flow *flow, tb__pack *pack, message_kind kind, uint64_t attempt);
/* Takes ownership of the pack. If it can't be sent, the flow breaks in the driver's next step. */
void tb__flow_send_message(tb__flow *flow, member *to, tb__pack *pack);
void tb__flow_tell(tb__flow *flow, member *to, message_kind kind, uint64_t attempt);
void tb__flow_fail_no_memory(tb__flow *flow,
                             const member *from); /* for a message from it: the flow breaks in the driver's next step */
/* Why a member is gone. */
const char *tb__member_why_gone(const member *m);
/* Sends ABORT to one member, or to all others. If that one is this rank, records it. */
void tb__flow_tell_abort(tb__flow *flow, size_t position, uint64_t attempt, uint64_t number, tb_status status,
                         const char *why);
void tb__flow_tell_all_abort(tb__flow *flow, uint64_t attempt, uint64_t number, tb_status status, const char *why);
/* No copy operation is under way. False: memory that a transport may still access is kept. */
bool tb__flow_free(tb__flow *flow);

/* leg.c */
/* How long a device may take to finish a copy that was cancelled. */
enum { STUCK_MS = 5000 };
void tb__leg_begin_copy(tb__leg *leg, tb_phase phase);
void tb__leg_end_copy(tb__leg *leg);
void tb__leg_begin_message(tb__leg *leg); /* of a staged bucket */
void tb__leg_end_message(tb__leg *leg);
void tb__leg_add_bytes(tb__leg *leg, int64_t nbytes); /* that are done */
void tb__leg_add_total(tb__leg *leg, int64_t nbytes);
void tb__leg_set_groups(tb__leg *leg, size_t done, size_t total);
void tb__leg_release(tb__leg *leg);
void tb__leg_arrive(tb__leg *leg);
void tb__leg_complete(tb__leg *leg);
void tb__leg_invalidate(tb__leg *leg);               /* its next step ends it */
void tb__leg_wake_at(tb__leg *leg, int64_t wake_ms); /* 0: never */
/* Ends a prepared receive that is not aborted. */
void tb__leg_drop(tb__leg *leg, tb_status status, const char *why);
/* An operation with another rank failed. The cause, such as a lost or failed rank, is mostly about to be reported: the
 * leg waits REASON_MS for that, and otherwise fails with its own message. */
void tb__flow_await_reason(tb__flow *flow, bool is_send, tb_status status, const char *why);
/* Ends a leg that is under way, or makes a prepared receive report the fault. `tells`: other members do not know it. */
void tb__flow_fail_leg(tb__flow *flow, bool is_send, const tb__fault *fault, bool tells);
/* Ends a leg. `told` is the reason that other members get; NULL: they know. */
void tb__flow_end_leg(tb__flow *flow, bool is_send, tb_status status, const char *why, const char *told);
/* Finishes a leg that ends, once its last copy operation is done. */
void tb__flow_close_leg(tb__flow *flow, bool is_send);

/* moves.c */
tb_status tb__flow_list_copies(tb__flow *flow, copy_kind kind, tb__move_list *out);
/* Whether copies of this kind are of whole tensors, and have no parts. */
bool tb__copy_is_whole(copy_kind kind);
/* Lists the moves between a chunk's tensor and its place in the bucket, without a codec. */
tb_status tb__flow_list_elements(tb__flow *flow, const tb_bucket_entry *entry, bool packs, tb__move_list *out);
/* The same of a whole bucket, with codecs: of COPY_PACK or COPY_UNPACK. */
tb_status tb__flow_list_bucket(tb__flow *flow, bool packs, size_t bucket, tb__move_list *out);
int64_t tb__flow_bucket_nbytes(const tb__flow *flow, size_t bucket); /* without gaps between chunks */
int64_t tb__flow_raw_size(const tb__flow *flow, const tb_bucket *bucket);
/* Whether the chunk's source and target are the same elements of the same memory. */
bool tb__flow_is_in_place(const tb__flow *flow, const tb_chunk *chunk);
size_t tb__box_offset(const tb_binding *binding, const tb_box *box);
char *tb__binding_at(const tb_binding *binding, const int64_t *index);
/* The number of contiguous elements of a box; *outer: how many outer dims count such runs. */
int64_t tb__box_run(int ndim, const int64_t *len, const int64_t *strides, int *outer);
/* The index at which the n-th run of a box begins, for a box at `start`. */
void tb__box_run_start(int64_t n, int outer, const int64_t *len, const int64_t *start, int64_t *index);

/* copy.c */
/* Prepares the jobs of this kind, the first time. */
tb_status tb__flow_prepare_copies(tb__flow *flow, copy_kind kind);
void tb__flow_release_copies(tb__flow *flow); /* no copy operation is under way */
/* Whether a copy reads senders' tensors; and releases the jobs of such copies, when none does. */
bool tb__flow_is_reading(const tb__flow *flow);
void tb__flow_forget_reads(tb__flow *flow);
/* A copy operation with room for so many parts; NULL: no memory. Starting it passes ownership to the flow. */
copy_op *tb__flow_new_copy_op(tb__flow *flow, bool is_send, copy_kind kind, size_t nparts);
void tb__flow_start_copy_op(copy_op *c);
void tb__flow_free_copy_op(copy_op *c); /* one that was not started; NULL is allowed */
void tb__flow_cancel_copy_ops(tb__flow *flow, bool is_send);
/* Before the first receive, once it is known what this rank reads: does in the background what the first reads would do
 * beside copying (tb__run.is_rehearsal). A later receive cancels it. */
void tb__flow_rehearse(tb__flow *flow);
void tb__flow_cancel_rehearsal(tb__flow *flow);
bool tb__flow_end_rehearsal(tb__flow *flow); /* and waits for it. False: a device does not finish */
/* A device has not finished copies in time: they are not waited for, the memory that they use is kept, and the flow
 * breaks, for the reason that is written to `why`. */
void tb__flow_give_up_copies(tb__flow *flow, char why[TB__WHY_MAX]);
/* Cancels copies and waits for them. False: a device does not finish; the flow is freed when it does. */
bool tb__flow_end_copies(tb__flow *flow);
bool tb__copy_op_is_coded(const copy_op *c);

/* stream.c */
/* The point that the operation's next run waits for; NULL: none. */
tb__stream_point *tb__copy_op_point(const copy_op *c);
/* Whether the leg waits for the work that was on the program's stream when it began. */
bool tb__flow_awaits_stream(const tb__flow *flow, bool is_send);
/* Fails if that work has failed. */
tb_status tb__flow_check_stream(const tb__flow *flow, bool is_send);

/* coded.c */
/* Whether a conversion of this chunk needs its wire form or its box in host memory. */
bool tb__flow_needs_host(const tb__flow *flow, const tb_chunk *chunk, bool packs);
/* Allocates scratch memory for a bucket whose chunks need it, and sets `running` to the first kind. */
tb_status tb__flow_begin_coded(copy_op *c);
/* Sets `running` to the next kind; COPY_KINDS: done. Calls the user's functions in between, without the lock. */
tb_status tb__flow_step_coded(copy_op *c);
/* Lists the moves of one chunk; *scratch is the offset of its box in scratch memory, and is advanced. */
tb_status tb__flow_list_coded(tb__flow *flow, copy_kind kind, const tb_bucket_entry *entry, int64_t *scratch,
                              tb__move_list *out);

/* group.c */
/* Lists the moves of all gathered groups. */
tb_status tb__flow_list_gathered(tb__flow *flow, copy_kind kind, tb__move_list *out);
void tb__flow_begin_groups(tb__flow *flow);     /* when a receive begins */
tb_status tb__flow_open_groups(tb__flow *flow); /* when its attempt has started */
void tb__flow_free_groups(tb__flow *flow);
bool tb__flow_is_in_window(const tb__flow *flow, const tb_bucket *bucket);
/* Counts a bucket of the group that has arrived. */
tb_status tb__flow_count_group(tb__flow *flow, uint32_t number);
/* Counts a bucket that is unpacked last into the stash (1) or out of it (-1). */
void tb__flow_count_last(tb__flow *flow, uint32_t number, int step);
/* A group of which all that is missing are such buckets; NULL: none. */
const group *tb__flow_find_last(const tb__flow *flow);
/* Measures or writes the next groups, if they are complete and have steps of their own. */
tb_status tb__flow_step_gathered(tb__flow *flow, bool *did);
char *tb__flow_slot(const tb__flow *flow, const tb_chunk *chunk);
/* Whether the group is written in a step of its own, when it is complete. */
bool tb__group_has_step(const group *g);
const group *tb__flow_find_group(const tb__flow *flow, uint32_t number);
const group *tb__flow_group(const tb__flow *flow, size_t bucket); /* of a bucket that this rank receives */

/* send.c, recv.c */
bool tb__flow_step_send(tb__flow *flow);
bool tb__flow_step_recv(tb__flow *flow);
/* A part of the receive is done, or has failed. */
void tb__flow_end_step_recv(tb__flow *flow, tb_status status, const char *why);
/* Whether the bucket may be received now: its group is in the window, or it goes to the stash. */
bool tb__flow_admits(const tb__flow *flow, const lane *l, const tb_bucket *bucket);
void tb__flow_begin_targets(tb__flow *flow); /* when a receive begins */
void tb__flow_mark_written(tb__flow *flow);  /* no-op if receives are shadowed */
void tb__flow_mark_torn(tb__flow *flow);
/* Before tensors are written: sets the owner's mark, which remains after this process has ended. */
void tb__flow_set_mark(const tb__flow *flow);
void tb__flow_set_version(tb__flow *flow); /* to that of the current receive */
/* Counts a bucket that is in the tensors. */
tb_status tb__flow_bucket_arrived(tb__flow *flow, lane *l, size_t bucket);

/* report.c: fails with a message that names this rank, the device if one failed, the tensors and the flow. */
tb_status tb__flow_fail_copy_op(const copy_op *c, tb_status status, const char *why);

/* shadow.c */
tb_status tb__flow_make_shadow(tb__flow *flow);
bool tb__flow_has_shadow(const tb__flow *flow, size_t tensor);
/* The shadowed receive is complete. */
void tb__flow_prepare(tb__flow *flow);
bool tb__flow_step_prepared(tb__flow *flow); /* checks for a reason to fail */
/* The prepared receive has a reason to fail, with a message for all ranks. */
void tb__flow_would_end(tb__flow *flow, tb_status status, const char *why);
/* An event of the current receive; no-op if receives are not shadowed. */
void tb__flow_tell_owner(tb__flow *flow, tb__shadow_event event, tb_status status, const char *why);

/* invalidate.c: TB_INVALID, naming the tensor, if memory that the leg uses was invalidated. */
tb_status tb__flow_check_memory(tb__flow *flow, bool is_send);
/* Tensors have moved: their memory must be checked again. */
void tb__flow_forget_valid(tb__flow *flow);
/* A sender that had revoked memory has sent the addresses of all of its tensors. */
void tb__flow_readmit(member *sender);
/* Watches for memory that senders revoke. */
void tb__flow_watch_revocations(tb__flow *flow);
/* Releases revoked memory of senders, if no copy reads it any more. */
void tb__flow_release_revoked(tb__flow *flow);
/* Whether a sender of the lane has revoked memory, or moved tensors to where they can't be read. */
bool tb__lane_is_unreadable(const tb__flow *flow, const lane *l);
/* Fails with TB_INVALID, or TB_LOST, because memory of a tensor on this member was invalidated. */
tb_status tb__flow_fail_invalidated(const tb__flow *flow, const member *m, uint32_t tensor);

#endif
