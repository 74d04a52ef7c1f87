/* A flow, made of the structs that its files own: setup.h, direct.h, staged.h, attempt.h and report.h; and what copies
 * (copy.c, coded.c), groups (group.c) and shadowed receives (commit.c) have. flow.c has its life, its legs and the
 * dispatch of messages; recv.c and send.c the steps of a leg. */
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
    MESSAGE_NOTE,
    MESSAGE_ABORT,
    MESSAGE_COMMITTED,
    MESSAGE_ABORT_ACK,
    MESSAGE_KINDS
} message_kind;

/* Another rank of the flow, or this one. */
struct member {
    tb__peer *peer;
    uint32_t port;
    bool is_gone;
    tb_status gone_status;
    char *gone_why;      /* a sentence; NULL: there was no memory for it */
    int64_t lost_ms;     /* when that was noticed; 0: it has left in an orderly way */
    bool missed_message; /* a message to it could not be sent: it has to hear that the flow is broken */
    uint64_t unacked[2]; /* by leg (is_send): it has not confirmed that this attempt has failed; 0: none */

    struct member_setup setup;
    struct member_direct direct;
};

/* What is done with the bytes of buckets, or of whole tensors. */
typedef enum copy_kind {
    COPY_DIRECT,       /* from senders' tensors to the targets */
    COPY_ASIDE,        /* from senders' tensors to a bucket */
    COPY_PACK,         /* from sources to a bucket */
    COPY_CONTRIBUTE,   /* from sources to a contribution */
    COPY_UNPACK,       /* from a bucket to the targets */
    COPY_COMBINE,      /* from contributions to a bucket */
    COPY_COMBINE_IN,   /* from contributions to the targets */
    COPY_SNAPSHOT,     /* from sources to the snapshot */
    COPY_COMMIT,       /* from the shadow to the targets, and zeros to their padding */
    COPY_PADDING,      /* zeros to the padding of targets */
    COPY_SUM,          /* nowhere: only the checksum of a buffer is computed */
    COPY_SCRATCH_SRC,  /* of coded buckets: from sources to scratch memory */
    COPY_SCRATCH_DST,  /* from targets to scratch memory */
    COPY_SCRATCH_BACK, /* from scratch memory to targets */
    COPY_MEASURE,      /* nowhere: the largest magnitudes of groups that were gathered */
    COPY_GATHERED,     /* from slots to targets */
    COPY_KINDS
} copy_kind;

/* All copies of a kind. */
typedef struct prepared {
    bool is_done;
    tb__jobs jobs;
} prepared;

typedef struct copying copying;

/* Copies under way. */
struct copying {
    tb__jobs_run run; /* first */
    tb__flow *flow;
    bool is_send; /* whose leg it belongs to */
    copy_kind kind;
    copy_kind running; /* of a coded bucket: one of several kinds that make it up */
    char *scratch;     /* likewise: row-major boxes in host memory */
    uint32_t *parts;   /* buckets, or groups that were gathered */
    size_t nparts;
    char *from, *to;             /* buffers */
    char why[TB__FENCE_WHY_MAX]; /* the sentence of a failure, for `end` */
    void (*end)(copying *c, tb_status status);
    staged_bucket *staged_bucket; /* for whoever ends it */
    bucket_message *message;      /* likewise, of a sum */
    size_t nbytes;
    copying *next;
};

/* Shadowed receives: written by commit.c alone. */
typedef struct shadow {
    tb_binding *live; /* per tensor: the target, where dst is the shadow */
    bool is_prepared; /* the receive under way has all its data, and waits to be applied or discarded */
    bool would_end;   /* it has a reason to end, which its owner knows */
    bool is_applying; /* the shadow is being copied into the tensors */
} shadow;

struct tb__flow {
    tb__flow_opts o;
    char *what;
    tb__flow_tensor *tensors;
    member *members;
    size_t nmembers, self, ngone;
    tb__index by_rank;

    struct flow_setup setup;
    struct flow_direct direct;
    struct flow_attempts attempts;
    struct flow_report report;

    shadow shadow;
    uint64_t version; /* that is in the targets */
    bool has_written; /* the receive under way, into the targets themselves */
    bool is_torn;

    struct flow_staged staged;

    /* One transfer each. */
    tb__leg send, recv;
    uint64_t snapshot_attempt;      /* that was taken for this one, or is being taken ... */
    bool is_taking_snapshot;        /* ... now */
    size_t groups_done, slots_done; /* groups that are here, and of them those that were gathered */
    bool is_handing_on;             /* the next one that was gathered is being measured or written */
    size_t hosts_taken;             /* groups of the host's, by the host ... */
    bool takes_all;                 /* ... as soon as they are there */
    char *slots;                    /* memory to gather in */
    size_t buckets_left;
    bool is_clearing_padding;
    prepared prepared[COPY_KINDS];
    copying *copyings;
    size_t ncopyings; /* those whose end is being dealt with included */
    bool is_stuck;    /* a device has not finished copies in time: what they use stays as it is */
    bool is_orphan;   /* it is destroyed when the last of them is done */
};

/* flow.c */
member *tb__flow_find(tb__flow *flow, int32_t rank);
void tb__flow_begin_message(tb__flow *flow, tb__pack *pack, message_kind kind, uint64_t attempt);
/* Takes over what is packed. If it can't be sent, the flow breaks, soon. */
void tb__flow_send_message(tb__flow *flow, member *to, tb__pack *pack);
void tb__flow_tell(tb__flow *flow, member *to, message_kind kind, uint64_t attempt);
void tb__flow_no_room(tb__flow *flow, const member *from); /* for a message of its: the flow breaks, soon */
/* Something failed that has to do with others. Who is gone, and why somebody took his data back, is mostly about to be
 * told: the leg waits for that, a moment, and fails with its own sentence only if nobody says more. */
void tb__flow_await_reason(tb__flow *flow, bool is_send, tb_status status, const char *why);
/* Ends a leg that may end. Others are told `told`; NULL: they know. */
void tb__flow_end_leg(tb__flow *flow, bool is_send, tb_status status, const char *why, const char *told);
/* A copying is done that a stuck flow had given up. The flow may be gone then. */
void tb__flow_end_stuck(tb__flow *flow);
/* What is left to do of a leg that ends, when its last copying is done. */
void tb__flow_close_leg(tb__flow *flow, bool is_send);
/* Why a member is gone, in a sentence. */
const char *tb__member_why_gone(const member *m);
/* Back to waiting, in one way or the other. */
void tb__leg_idle(tb__leg *leg);

/* copy.c */
/* Made ready to be run, the first time. */
tb_status tb__flow_prepare_copies(tb__flow *flow, copy_kind kind);
void tb__flow_release_copies(tb__flow *flow); /* no copying is under way */
/* One without parts yet, with room for so many; NULL: no memory. It is the flow's once it is started, and its end is
 * called by the driver, between steps, or at once where there is nothing to copy. If it can't be started, it is gone.
 */
copying *tb__flow_new_copying(tb__flow *flow, bool is_send, copy_kind kind, size_t nparts);
tb_status tb__flow_start_copying(copying *c);
void tb__flow_drop_copying(copying *c); /* that was not started; NULL is allowed */
void tb__flow_cancel_copyings(tb__flow *flow, bool is_send);
/* The moves of a chunk that is copied to its place in the bucket, or from there, element by element. */
tb_status tb__flow_list_elements(tb__flow *flow, const tb_bucket_entry *entry, bool packs, tb__move_list *out);
int64_t tb__flow_bucket_nbytes(const tb__flow *flow, size_t bucket); /* without what lies between chunks */
int64_t tb__flow_raw_size(const tb__flow *flow, const tb_bucket *bucket);
/* Whether both are the same elements of the same memory. */
bool tb__flow_is_in_place(const tb__flow *flow, const tb_chunk *chunk);
size_t tb__box_offset(const tb_binding *binding, const tb_box *box);
char *tb__binding_at(const tb_binding *binding, const int64_t *index);
/* How many elements of a box lie together, one after the other; `outer` is how many dims count such runs. */
int64_t tb__box_run(int ndim, const int64_t *len, const int64_t *strides, int *outer);
/* Where the n-th run of a box that begins at `start` begins. */
void tb__box_run_start(int64_t n, int outer, const int64_t *len, const int64_t *start, int64_t *index);

/* coded.c */
/* Makes scratch memory for a bucket where its chunks need it, and chooses what is run first. */
tb_status tb__flow_begin_coded(copying *c);
/* Chooses what is run next; COPY_KINDS: nothing is left. Calls functions of the user's in between, with the lock free.
 */
tb_status tb__flow_step_coded(copying *c);
/* The moves of one chunk; `scratch` is where its box is in scratch memory, and is moved on. */
tb_status tb__flow_list_coded(tb__flow *flow, copy_kind kind, const tb_bucket_entry *entry, int64_t *scratch,
                              tb__move_list *out);

/* group.c */
/* The moves of all groups that are gathered. */
tb_status tb__flow_list_gathered(tb__flow *flow, copy_kind kind, tb__move_list *out);
tb_status tb__flow_open_groups(tb__flow *flow);
bool tb__flow_is_in_window(const tb__flow *flow, const tb_bucket *bucket);
/* One bucket of the group is here. */
tb_status tb__flow_count_group(tb__flow *flow, uint32_t number);
/* Hands the next group on, if it is complete and was gathered. */
tb_status tb__flow_hand_on(tb__flow *flow, bool *did);
char *tb__flow_slot(const tb__flow *flow, const tb_chunk *chunk);

/* send.c, recv.c */
bool tb__flow_step_send(tb__flow *flow);
bool tb__flow_step_recv(tb__flow *flow);
/* Something of the receive has been done, or has failed. */
void tb__flow_end_step_recv(tb__flow *flow, tb_status status, const char *why);
/* Whether the window has room for it. */
bool tb__flow_admits(const tb__flow *flow, const lane *l, const tb_bucket *bucket);
/* A bucket is in the tensors. */
tb_status tb__flow_bucket_arrived(tb__flow *flow, lane *l, size_t bucket);

/* flow.c: tells one member, which may be this rank itself, that an attempt has ended for it. */
void tb__flow_tell_abort(tb__flow *flow, size_t position, uint64_t attempt, uint64_t number, tb_status status,
                         const char *why);

/* commit.c */
tb_status tb__flow_make_shadow(tb__flow *flow);
bool tb__flow_has_shadow(const tb__flow *flow, size_t tensor);
/* All of a shadowed receive is in the shadow. */
void tb__flow_prepare(tb__flow *flow);
bool tb__flow_step_prepared(tb__flow *flow); /* looks for a reason to end */
/* The prepared receive has a reason to end, in words that all may hear. */
void tb__flow_would_end(tb__flow *flow, tb_status status, const char *why);
/* About the receive under way; does nothing where receives are not shadowed. */
void tb__flow_tell_owner(tb__flow *flow, tb__shadow_event event, tb_status status, const char *why);

/* memory.c: TB_INVALID, by name, if memory that the leg uses was invalidated. */
tb_status tb__flow_check_memory(const tb__flow *flow, bool is_send);

#endif
