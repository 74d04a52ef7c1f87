/* A flow, made of the structs that its files own: staged.h. What is left is shared by flow.c (life, legs, messages),
 * attempt.c (numbers of transfers), setup.c (who does what), bind.c (who reaches what), copy.c (bytes), send.c and
 * recv.c (one transfer), group.c (what arrives together), commit.c (shadowed receives), memory.c (memory that the
 * program invalidates), unsent.c (messages that could not be sent), wait.c, dump.c. */
#ifndef TB_FLOW_FLOW_INSIDE_H
#define TB_FLOW_FLOW_INSIDE_H

#include "base/mem.h"
#include "flow/flow.h"
#include "flow/staged.h"
#include "ir/ir.h"
#include "loop/jobs.h"
#include "loop/region.h"

#include <stdatomic.h>

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

/* An exposure's state word: attempt << 2 | state. */
enum { EXPOSURE_READY = 1, EXPOSURE_COMPLETE = 2, EXPOSURE_REVOKED = 3 };

/* Each word has a cache line. */
enum { WORD_STRIDE = 64 };

/* Where a sender keeps one of its tensors. */
typedef struct place {
    uint32_t tensor;
    bool overwrites_source; /* its rank is going to overwrite it */
    tb_remote *remote;
    char *map;           /* NULL: it must be read ... */
    tb__mapping *reader; /* ... by this, once it is needed, from ... */
    tb__peer *owner;     /* ... this one */
    uint64_t offset;     /* of element (0, 0, ...), in bytes from the remote's beginning */
    int64_t strides[TB_MAX_DIMS];
} place;

/* Another rank of the flow, or this one. */
typedef struct member {
    tb__peer *peer;
    uint32_t port;
    bool is_gone;
    tb_status gone_status;
    char *gone_why;      /* a sentence; NULL: there was no memory for it */
    int64_t lost_ms;     /* when that was noticed; 0: it has left in an orderly way */
    bool missed_message; /* a message to it could not be sent: it has to hear that the flow is broken */
    uint64_t unacked[2]; /* by leg (is_send): it has not confirmed that this attempt has failed; 0: none */

    bool is_reader; /* it reads, or is sent, what we have */
    bool has_reach, stashes;
    _Atomic uint64_t *word; /* of what we expose to it */
    int64_t reads_nbytes;
    bool has_stashed, is_done, has_committed; /* in this transfer */

    bool is_sender; /* we read, or are sent, what it has */
    bool is_bound, is_reachable;
    tb_remote *words;
    _Atomic uint64_t *peer_exposure;
    TB_VEC(place) places; /* by tensor */
    size_t nbuckets;      /* that we get from it */
    int64_t sends_nbytes; /* in them */
    size_t naside;        /* of them, those to be put aside first */
    uint64_t ready;       /* for which attempt it is */
    size_t left, aside_left;
    size_t gathers_until; /* so many groups have to be here before what it sent is where it belongs */
    bool is_concluded;
} member;

/* A channel and what this rank does for it. */
typedef struct lane {
    const tb_channel *channel;
    const tb_chunk *first; /* what its chunks have in common */
    bool is_target, is_shipper, is_contributor;
    uint32_t nsenders;
    uint32_t *senders; /* positions of members, in the order they are combined; none: zeros */
    uint32_t shipper;  /* position; of zeros: this rank's */
    uint32_t parent;   /* as a target: position of who sends it, if it is staged: the shipper, or who hands it on */
    uint32_t nchildren;
    uint32_t *children; /* as a target: positions of those to whom this rank hands it on */

    bool takes_staged;      /* as a target */
    bool overwrites_source; /* as a target: put aside before anything is written */
    uint32_t nstaged;       /* as a source: targets that must be sent it */
    uint32_t *staged;

    size_t to_take; /* the next bucket to be read directly, from the channel's first */
    struct staged_lane staged_lane;
} lane;

typedef struct group {
    uint32_t number;
    uint32_t host;  /* what the host calls it, which may be many groups */
    size_t ordinal; /* of that, among those of this rank */
    size_t slot;    /* how many before it are gathered; TB__NOWHERE: it is not */
    size_t nbuckets, left;
} group;

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

typedef struct device_memory {
    tb__device *device;
    void *memory;
} device_memory;

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
    char *from, *to;                           /* buffers */
    void (*end)(copying *c, tb_status status); /* the sentence of a failure is in tb_error_detail */
    staged_bucket *staged_bucket;              /* for whoever ends it */
    bucket_message *message;                   /* likewise, of a sum */
    size_t nbytes;
    copying *next;
};

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
    tb_status broken; /* and why */
    char why[TB__WHY_MAX];
    tb_status failure; /* it is going to break, and why */
    char failure_why[TB__WHY_MAX];
    tb__task failing; /* breaks it, and tells those who have to hear of it */
    tb__flow_tensor *tensors;
    member *members;
    size_t nmembers, self, ngone;
    tb__index by_rank;

    /* The plan. */
    bool is_planned, is_bound, is_reached;
    tb_ir *ir;
    tb__arena arena;
    lane *lanes; /* as many as the IR has channels */
    TB_VEC(group) groups;
    bool *overwritten; /* per tensor: this rank is going to overwrite its source */
    bool overwrites_any_source;
    bool overwrites_live;                    /* sources that the snapshot is taken of */
    tb__region **src_regions, **dst_regions; /* per tensor; NULL: empty */
    tb__region *words_region;
    char *words;
    uint64_t snapshot_attempt; /* that was taken for this one, or is being taken ... */
    bool is_taking_snapshot;   /* ... now */
    tb_binding *snapshot_of;   /* per tensor: the live tensor, where src is the snapshot */
    tb__index by_bucket;       /* of buckets that may be announced, by their first chunk */

    /* Numbers. Attempts are the flow's own, one after the other; what they are called is the batch's business. */
    uint64_t started;
    TB_VEC(issued) starts;             /* ascending */
    uint64_t last_sent, last_received; /* attempts that legs of this rank have had */
    TB_VEC(tb__abort) aborts;          /* ascending */

    shadow shadow;
    uint64_t version; /* that is in the targets */
    bool has_written; /* the receive under way, into the targets themselves */
    bool is_torn;

    struct flow_staged staged;

    /* One transfer each. */
    tb__leg send, recv;
    bool send_is_exposed;
    uint64_t writable_attempt; /* the last attempt for which sources may be overwritten */
    size_t readers_left, committers_left;
    uint32_t next_lane_in;
    size_t groups_done, slots_done; /* groups that are here, and of them those that were gathered */
    bool is_handing_on;             /* the next one that was gathered is being measured or written */
    size_t hosts_taken;             /* groups of the host's, by the host ... */
    bool takes_all;                 /* ... as soon as they are there */
    char *slots;                    /* memory to gather in */
    size_t buckets_left;
    int64_t largest_relay;        /* bytes of a bucket; 0: this rank hands nothing on */
    bool is_clearing_padding;
    TB_VEC(device_memory) beside; /* snapshots and shadows */
    prepared prepared[COPY_KINDS];
    copying *copyings;
    size_t ncopyings; /* those whose end is being dealt with included */
};

/* flow.c */
member *tb__flow_find(tb__flow *flow, int32_t rank);
void tb__flow_begin_message(tb__flow *flow, tb__pack *pack, message_kind kind, uint64_t attempt);
/* Takes over what is packed. If it can't be sent, the flow breaks, soon. */
void tb__flow_send_message(tb__flow *flow, member *to, tb__pack *pack);
void tb__flow_tell(tb__flow *flow, member *to, message_kind kind, uint64_t attempt);
void tb__flow_no_room(tb__flow *flow, const member *from); /* for a message of its: the flow breaks, soon */
/* Plans, the first time. A failure breaks the flow. */
bool tb__flow_ensure_plan(tb__flow *flow, tb__leg *leg);
/* Something failed that has to do with others. Who is gone, and why somebody took his data back, is mostly about to be
 * told: the leg waits for that, a moment, and fails with its own sentence only if nobody says more. */
void tb__flow_await_reason(tb__flow *flow, bool is_send, tb_status status);
/* Whether something has come about that ends the leg; what, is in tb_error_detail. `tells`: others have to hear of it.
 */
tb_status tb__flow_find_reason(tb__flow *flow, bool is_send, bool *tells);
/* Ends a leg that may end, with the sentence in tb_error_detail. Others are told `told`; NULL: they know. */
void tb__flow_end_leg(tb__flow *flow, bool is_send, tb_status status, const char *told);
/* What is left to do of a leg that ends, when its last copying is done. */
void tb__flow_close_leg(tb__flow *flow, bool is_send);
/* This rank's reason, for others. */
enum { TB__WORDS_MAX = TB__WHY_MAX + 256 };
const char *tb__flow_own_words(const tb__flow *flow, tb_status status, const char *why, char words[TB__WORDS_MAX]);
/* Whether the rank is on another host, so that its memory can't be reached. */
bool tb__flow_is_far(const tb__flow *flow, int32_t rank);
/* That a member is gone, and why. */
tb_status tb__member_is_gone(const member *m);
/* Back to waiting, in one way or the other. */
void tb__leg_idle(tb__leg *leg);

/* flow_attempt.c */
/* False: there is no memory for it. */
bool tb__flow_note_start(tb__flow *flow, uint64_t attempt, uint64_t number);
/* Of the last one that was begun, as far as this rank knows. */
uint64_t tb__flow_last_number(const tb__flow *flow);
/* The last attempt that a leg of this rank has had. */
uint64_t *tb__flow_last_of(tb__flow *flow, bool is_send);
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

/* flow_wait.c: whether a leg can't end well without the member. */
bool tb__flow_needs(const tb__flow *flow, bool is_send, const member *m);

/* flow_plan.c */
tb_status tb__flow_plan(tb__flow *flow);
/* Binds sources, or targets, to memory of the same device beside their own. *out is what they were bound to before; it
 * is the caller's, also after a failure. */
tb_status tb__flow_bind_beside(tb__flow *flow, bool is_src, const bool *has, tb_binding **out);
void tb__flow_unplan(tb__flow *flow);

/* flow_bind.c */
tb_status tb__flow_send_binds(tb__flow *flow);
bool tb__flow_on_bind(tb__flow *flow, member *from, tb__unpack *message);
bool tb__flow_on_reach(tb__flow *flow, member *from, tb__unpack *message);
void tb__flow_unbind(tb__flow *flow);
/* A key by which the peer may reach memory of a region; an empty one where it can't. */
void tb__flow_pack_key(tb__pack *pack, const tb__flow *flow, const void *memory, tb__region *region, tb__peer *peer);
/* Maps so many bytes of memory that the member has exported; NULL: that can't be done. *remote is to be released. */
char *tb__member_map(member *m, const void *key, size_t key_nbytes, size_t nbytes, tb_remote **remote);
place *tb__member_place(const member *m, uint32_t tensor);

/* flow_copy.c */
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

/* flow_coded.c */
/* Makes scratch memory for a bucket where its chunks need it, and chooses what is run first. */
tb_status tb__flow_begin_coded(copying *c);
/* Chooses what is run next; COPY_KINDS: nothing is left. Calls functions of the user's in between, with the lock free.
 */
tb_status tb__flow_step_coded(copying *c);
/* The moves of one chunk; `scratch` is where its box is in scratch memory, and is moved on. */
tb_status tb__flow_list_coded(tb__flow *flow, copy_kind kind, const tb_bucket_entry *entry, int64_t *scratch,
                              tb__move_list *out);

/* flow_group.c */
/* The moves of all groups that are gathered. */
tb_status tb__flow_list_gathered(tb__flow *flow, copy_kind kind, tb__move_list *out);
tb_status tb__flow_count_groups(tb__flow *flow);
tb_status tb__flow_open_groups(tb__flow *flow);
bool tb__flow_is_in_window(const tb__flow *flow, const tb_bucket *bucket);
/* Tells senders that they are not needed any more. */
tb_status tb__flow_conclude(tb__flow *flow);
/* One bucket of the group is here. */
tb_status tb__flow_count_group(tb__flow *flow, uint32_t number);
/* Hands the next group on, if it is complete and was gathered. */
tb_status tb__flow_hand_on(tb__flow *flow, bool *did);
char *tb__flow_slot(const tb__flow *flow, const tb_chunk *chunk);

/* flow_send.c, flow_recv.c */
tb_status tb__flow_check_exposures(const tb__flow *flow); /* what was read until now was good */
bool tb__flow_step_send(tb__flow *flow);
bool tb__flow_is_served(const tb__flow *flow, const member *reader); /* it needs this rank no more */
void tb__flow_read_word(tb__flow *flow, member *reader); /* of one that is gone: it may have completed its exposure */
void tb__flow_conclude_gone(tb__flow *flow, member *sender); /* if all that comes from it is here */
bool tb__flow_step_recv(tb__flow *flow);
/* Something of the receive has been done, or has failed. */
void tb__flow_end_step_recv(tb__flow *flow, tb_status status);
void tb__flow_revoke(tb__flow *flow); /* every exposure of the transfer that is being sent */
void tb__flow_on_done(tb__flow *flow, member *from, uint64_t attempt);
void tb__flow_on_committed(tb__flow *flow, member *from, uint64_t attempt);
void tb__flow_on_stashed(tb__flow *flow, member *from, uint64_t attempt);
bool tb__flow_try_reach(tb__flow *flow); /* flow_bind.c: true: it did something */
/* Whether this rank's targets may be written: nobody still reads what they overwrite. */
bool tb__flow_may_write(const tb__flow *flow);
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

/* flow_unsent.c: breaks the flow in the driver's next turn, for the reason in tb_error_detail. */
void tb__flow_fail_later(tb__flow *flow, tb_status status);

/* flow_memory.c: TB_INVALID, by name, if memory that the leg uses was invalidated. */
tb_status tb__flow_check_memory(const tb__flow *flow, bool is_send);

#endif
