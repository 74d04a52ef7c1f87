/* A flow, made of the structs that its files own: setup.h, direct.h, attempt.h and report.h; and what staged buckets
 * (bucket.c, staged.c, reduce.c, pieces.c, sum.c), copies (copy.c), groups (group.c) and shadowed receives (commit.c)
 * have. flow.c has its life, its legs and the dispatch of messages; recv.c and send.c the steps of a leg. */
#ifndef TB_FLOW_FLOW_INSIDE_H
#define TB_FLOW_FLOW_INSIDE_H

#include "flow/attempt.h"
#include "flow/direct.h"
#include "flow/report.h"
#include "flow/setup.h"

typedef enum message_kind {
    MESSAGE_BIND,
    MESSAGE_REACH,
    MESSAGE_START,
    MESSAGE_READY,
    MESSAGE_BUCKET,
    MESSAGE_GO,
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

/* Staging memory is dealt out by use, so that no use can starve another. */
typedef enum pool {
    POOL_SEND,    /* packed buckets and contributions */
    POOL_REDUCE,  /* contributions that came, for what is shipped, and that itself */
    POOL_COMBINE, /* contributions that came, for this rank's own tensors */
    POOL_RECEIVE, /* buckets that came */
    POOL_STASH,   /* what was put aside; as large as the others leave it */
    POOL_COUNT
} pool;

typedef struct staged_bucket staged_bucket;

/* One message of a staged bucket. */
typedef struct bucket_message {
    staged_bucket *staged_bucket;
    uint32_t member;
    uint64_t tag, sum;
    tb_op op;
    tb_piece piece;
    bool is_posted, is_done;
} bucket_message;

/* A bucket on its way through staging memory. */
struct staged_bucket {
    tb__flow *flow;
    lane *lane;
    size_t bucket; /* of the IR */
    enum { STAGED_OUT, STAGED_IN, STAGED_REDUCE } kind;
    bool is_send;      /* whose leg it belongs to */
    bool is_announced; /* those who get it know */
    bool is_checked;   /* of what came: it is what was sent ... */
    bool is_begun;     /* it is being copied, or was */
    bool is_unpacked;  /* ... and in its place */
    pool pool;
    char *buffer; /* what goes out or comes in; of a reduction: the contributions, one after the other */
    size_t nbytes;
    tb_piece *pieces; /* instead: where the tensors have it; NULL: there is a buffer */
    size_t npieces;
    char *output; /* of a reduction: the bucket to be shipped or put aside; NULL: it goes into the tensors */
    pool output_pool;
    size_t output_nbytes;
    size_t left; /* messages that are not done */
    tb_status status;
    staged_bucket *next;
    size_t nmessages;
    bucket_message messages[]; /* of what came in: the first; the others hand it on */
};

/* What is done with the bytes of buckets, or of whole tensors. */
typedef enum copy_kind {
    COPY_DIRECT,     /* from senders' tensors to the targets */
    COPY_ASIDE,      /* from senders' tensors to a bucket */
    COPY_PACK,       /* from sources to a bucket */
    COPY_CONTRIBUTE, /* from sources to a contribution */
    COPY_UNPACK,     /* from a bucket to the targets */
    COPY_COMBINE,    /* from contributions to a bucket */
    COPY_COMBINE_IN, /* from contributions to the targets */
    COPY_SNAPSHOT,   /* from sources to the snapshot */
    COPY_COMMIT,     /* from the shadow to the targets */
    COPY_KINDS
} copy_kind;

enum { MOST_FLOW_DEVICES = 4 };

typedef struct device_job {
    tb__device *device;
    tb__job *job;
} device_job;

/* All copies of a kind. */
typedef struct prepared {
    bool is_done;
    device_job jobs[MOST_FLOW_DEVICES];
    size_t njobs;
} prepared;

typedef struct copying copying;

typedef struct copy_run {
    tb__submitted submitted;
    copying *copying;
} copy_run;

/* Copies under way. */
struct copying {
    tb__flow *flow;
    bool is_send; /* whose leg it belongs to */
    copy_kind kind;
    uint32_t *parts; /* buckets */
    size_t nparts;
    char *from, *to; /* buffers */
    copy_run runs[MOST_FLOW_DEVICES];
    size_t left; /* runs that are not done */
    tb_status status;
    char why[TB__FENCE_WHY_MAX];
    void (*end)(copying *c, tb_status status); /* the sentence of a failure is in `why` */
    staged_bucket *staged_bucket;              /* for whoever ends it */
    size_t nbytes;
    copying *next;
};

/* A bucket that a peer has packed for us. */
typedef struct announcement {
    uint64_t attempt;
    uint32_t member;
    size_t bucket;
    uint64_t tag;
    size_t nbytes;
    uint64_t sum; /* where there are checksums */
} announcement;

/* A bucket that was put aside. */
typedef struct stashed {
    lane *lane;
    size_t bucket;
    char *buffer;
    size_t nbytes;
} stashed;

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
    const member *held_by; /* a message to or from it has not given this rank's tensors back; NULL: none */

    /* One transfer each. */
    tb__leg send, recv;
    uint64_t snapshot_attempt; /* that was taken for this one, or is being taken ... */
    bool is_taking_snapshot;   /* ... now */
    size_t sends_left;         /* staged buckets, over all lanes */
    int64_t largest_out;       /* of what is packed, a bucket */
    uint32_t next_lane_out;
    size_t groups_done, slots_done; /* groups that are here, and of them those that were gathered */
    size_t hosts_taken;             /* groups of the host's, by the host ... */
    bool takes_all;                 /* ... as soon as they are there */
    char *slots;                    /* memory to gather in */
    size_t buckets_left;
    bool *is_taken; /* per bucket that is handed on: it was asked for */
    size_t nrelays; /* staged_buckets that are being handed on */
    TB_VEC(stashed) stash;
    TB_VEC(announcement) announcements;
    staged_bucket *staged_buckets;
    int64_t pool_used[POOL_COUNT], pool_size[POOL_COUNT];
    int64_t staged, staged_most; /* of all pools together, now and ever */
    prepared prepared[COPY_KINDS];
    copying *copyings;
    size_t ncopyings;               /* those whose end is being dealt with included */
    char gaps[2][TB__BUCKET_ALIGN]; /* between the chunks of what is sent without a buffer: zeros; and received:
                                       anything */
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
/* What is coded goes through codecs instead, here and now; the lock is free meanwhile. Stops early, with TB_CANCELLED,
 * if the leg has ended when a chunk is done. */
bool tb__flow_is_coded(const tb__flow *flow, size_t bucket);
tb_status tb__flow_convert(tb__flow *flow, bool is_send, size_t bucket, char *buffer, bool packs);
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

/* group.c */
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
void tb__flow_end_recv(tb__flow *flow);
/* Whether the window has room for it. */
bool tb__flow_admits(const tb__flow *flow, const lane *l, const tb_bucket *bucket);
/* A bucket is in the tensors. */
tb_status tb__flow_bucket_arrived(tb__flow *flow, lane *l, size_t bucket);
/* A bucket is in staging memory, which goes over to the stash. */
tb_status tb__flow_put_aside(tb__flow *flow, lane *l, size_t bucket, char *buffer, size_t nbytes);

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

/* bucket.c */
lane *tb__flow_lane(tb__flow *flow, size_t bucket);
const tb_chunk *tb__flow_first_chunk(const tb__flow *flow, size_t bucket);
size_t tb__flow_find_bucket(const tb__flow *flow, uint64_t id, uint32_t part);
bool tb__flow_has_room(const tb__flow *flow, pool which, size_t nbytes);
void *tb__flow_stage(tb__flow *flow, pool which, size_t nbytes); /* NULL: no memory */
void tb__flow_unstage(tb__flow *flow, pool which, void *buffer, size_t nbytes);
staged_bucket *tb__staged_bucket_create(tb__flow *flow, lane *l, size_t bucket, bool is_send, size_t nmessages);
void tb__staged_bucket_destroy(staged_bucket *p);
tb__leg *tb__staged_bucket_leg(const staged_bucket *p);
tb_status tb__staged_bucket_check(const staged_bucket *p); /* whether a message of it has failed */
/* Tells those who get it that it is there. */
void tb__staged_bucket_announce(staged_bucket *p);
/* Takes what was announced: the receive is there before the sender hears that it may send. */
void tb__bucket_message_ask(bucket_message *c, const announcement *a);
void tb__flow_forget_bucket(tb__flow *flow, size_t announcement);
bool tb__flow_on_bucket(tb__flow *flow, member *from, uint64_t attempt, tb__unpack *message);
bool tb__flow_on_go(tb__flow *flow, member *from, tb__unpack *message);
void tb__flow_drop_staged(tb__flow *flow, bool is_send);
void tb__flow_drop_sends(tb__flow *flow, const member *to); /* buckets that one that is gone has not asked for */

/* staged.c */
void tb__flow_open_out(tb__flow *flow);
bool tb__flow_step_out(tb__flow *flow); /* packs and announces */
bool tb__flow_step_in(tb__flow *flow);  /* asks for what was announced, unpacks what came, and hands it on */
staged_bucket *tb__staged_bucket_create_out(tb__flow *flow, lane *l, size_t bucket);

/* pieces.c: a bucket where the tensors have it, in order, if that is in long runs: of this rank's sources, or of
 * its targets. Whoever calls frees the pieces; NULL: it needs a buffer. */
tb_piece *tb__flow_pieces(tb__flow *flow, const lane *l, size_t bucket, bool is_target, size_t *count);

/* memory.c: TB_INVALID, by name, if memory that the leg uses was invalidated. */
tb_status tb__flow_check_memory(const tb__flow *flow, bool is_send);

/* reduce.c */
bool tb__flow_step_reduce(tb__flow *flow, bool is_send); /* gathers contributions and combines them */
/* The order of reductions: the same on every rank. */
bool tb__flow_is_before(const tb__flow *flow, size_t a, size_t b);

/* sum.c. 0 where there are no checksums. */
uint64_t tb__flow_sum(const tb__flow *flow, const void *bytes, size_t nbytes);
/* Whether what came is what was sent. */
tb_status tb__flow_check_sums(const staged_bucket *p);

#endif
