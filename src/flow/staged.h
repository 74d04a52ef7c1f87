/* Staged buckets: data that a reader does not read from the sender's tensors. Only these write struct flow_staged:
 * bucket.c (memory, one bucket and its messages), staged.c (packing, unpacking, the stash), reduce.c (combining
 * contributions), pieces.c (buckets that need no buffer), device_stage.c (memory on a device) and sum.c (checksums).
 * All of this needs the loop's lock. */
#ifndef TB_FLOW_STAGED_H
#define TB_FLOW_STAGED_H

#include "base/text.h"
#include "flow/flow.h"
#include "ir/ir.h"
#include "loop/peer_memory.h"
#include "loop/region.h"

typedef struct lane lane;
typedef struct member member;

/* Staging memory is divided by purpose, so that none can starve another. */
typedef enum pool {
    POOL_SEND,    /* packed buckets and contributions */
    POOL_REDUCE,  /* received contributions to buckets that this rank reduces and sends, and these buckets */
    POOL_COMBINE, /* received contributions to this rank's own tensors */
    POOL_RECEIVE, /* received buckets */
    POOL_STASH,   /* buckets that can't be written yet; gets what the other pools leave */
    POOL_COUNT
} pool;

typedef struct staged_bucket staged_bucket;

/* One message of a staged bucket. */
typedef struct bucket_message {
    staged_bucket *staged_bucket;
    uint32_t member;
    uint64_t tag, sum; /* sum: the checksum from the sender */
    tb_op op;
    tb_piece piece;
    bool is_posted, is_done;
} bucket_message;

/* A bucket in staging memory, to be sent, received or reduced. */
struct staged_bucket {
    tb__flow *flow;
    lane *lane;
    size_t bucket; /* index in the IR */
    enum { STAGED_OUT, STAGED_IN, STAGED_REDUCE } kind;
    double timed_from; /* when its packing began, if it is timed; else 0 */
    bool is_send;      /* whose leg it belongs to */
    bool is_announced; /* to its receivers */
    bool is_summed;    /* its checksums are known, or being computed: ... */
    size_t nsums;      /* ... this many still */
    uint64_t sum;      /* of an outgoing bucket */
    bool is_relayed;   /* of a received bucket: announced to the lane's children */
    bool is_begun;     /* its copy has begun */
    bool is_unpacked;  /* of a received bucket: it is in the tensors or the stash */
    pool pool;
    char *buffer; /* of a reduction: the contributions, one after the other */
    size_t nbytes;
    tb_piece *pieces; /* its bytes in the tensors; NULL: it has a buffer */
    size_t npieces;
    tb__region *region;      /* of the buffer, for receivers that map it; NULL: none does */
    tb__peer_memory *memory; /* of a received bucket: the sender's buffer, if it is read there; else NULL */
    char *map;               /* where it is mapped */
    char *output; /* of a reduction: the bucket to be sent or stashed; NULL: the result goes into the tensors */
    pool output_pool;
    size_t output_nbytes;
    size_t left; /* messages that are not done */
    tb_status status;
    staged_bucket *next;
    size_t nmessages;
    bucket_message messages[]; /* of a received bucket: [0] receives it, the others relay it */
};

/* A bucket that a peer has packed for this rank. */
typedef struct announcement {
    uint64_t attempt;
    uint32_t member;
    size_t bucket;
    uint64_t tag;
    size_t nbytes;
    uint64_t sum;            /* if checksums are enabled */
    bool is_on_device;       /* the sender has it on a device */
    tb__peer_memory *memory; /* the sender's buffer, if it can be read there; NULL: ask for the bucket */
    char *map;
} announcement;

/* A bucket in the stash. */
typedef struct stashed {
    lane *lane;
    size_t bucket;
    char *buffer;
    size_t nbytes;
    const tb_chunk *first; /* of the bucket */
} stashed;

/* Staging memory on one of a device's units, for outgoing or for received buckets: only device_stage.c writes it. */
typedef struct device_stage {
    tb__device *device;
    int unit;
    char *memory; /* NULL: there is none */
    size_t nbytes;
    bool is_of_comm;    /* the memory belongs to the flow's communicator */
    tb__region *region; /* for readers that map it */
} device_stage;

/* Progress of a lane in the current transfers. */
struct staged_lane {
    size_t to_send, to_combine; /* index of the next bucket in the channel */
    uint32_t in_flight;         /* buckets that are packed but not received by all */
};

struct flow_staged {
    int64_t pool_used[POOL_COUNT], pool_size[POOL_COUNT];
    int64_t nbytes, nbytes_max;     /* of all pools, now and at most */
    device_stage on_device[2];      /* of the receive, of the send; beside host memory: buckets in it count as
                                       POOL_RECEIVE and POOL_SEND, too */
    bool is_timing;                 /* an outgoing bucket is timed, so that no other is packed */
    staged_bucket *buckets;         /* under way, a list */
    char gaps[2][TB__BUCKET_ALIGN]; /* bytes between chunks of buckets without a buffer: [0] zeros to send, [1] a sink
                                     */
    staged_bucket *held; /* a list: buckets with a message that the transport has not given back, and that may still
                            access memory. They are never freed */

    /* Of the send. */
    size_t sends_left;   /* buckets, over all lanes */
    int64_t largest_out; /* bytes of a bucket that is packed */
    uint32_t next_lane;  /* where the search for the next bucket starts */

    /* Of the receive. */
    TB_VEC(announcement) announcements;
    bool *is_taken;        /* per bucket: its announcement was accepted */
    size_t nrelays;        /* buckets that are being relayed */
    TB_VEC(stashed) stash; /* to be written when that is allowed */
    TB_VEC(stashed) last;  /* likewise, but to be unpacked last ... */
    bool is_last_sorted;   /* ... by group, tensor and place in the target, descending */
    bool is_last_running;  /* one of them is being unpacked */
};

/* ---- For the rest of the flow ---------------------------------------------------------------------------------- */

tb_status tb__staged_init(tb__flow *flow); /* after the lanes are made */
void tb__staged_fini(tb__flow *flow);      /* no copy operation is under way */
/* TB_REFUSED if the stash does not fit into staging memory. May shrink the other pools. */
tb_status tb__staged_fit_stash(tb__flow *flow);
/* At the begin of a transfer. */
void tb__staged_open_send(tb__flow *flow);
void tb__staged_open_recv(tb__flow *flow);
/* At the end of a leg: frees its buckets, and of a receive the stash. */
void tb__staged_close(tb__flow *flow, bool is_send);
/* A tensor with memory in first .. last-1 that a message of a held bucket may still access; NULL: none. */
const tb__flow_tensor *tb__staged_find_held(const tb__flow *flow, uintptr_t first, uintptr_t last);
bool tb__staged_step_out(tb__flow *flow);                  /* packs and announces */
bool tb__staged_step_in(tb__flow *flow);                   /* accepts announced buckets, unpacks and relays them */
bool tb__staged_step_reduce(tb__flow *flow, bool is_send); /* gathers contributions and combines them */
/* Whether the bucket is unpacked when all others of its group have arrived. */
bool tb__flow_unpacks_last(const tb__flow *flow, size_t bucket);
/* Adds a bucket to the stash, which takes ownership of the buffer (of POOL_STASH). */
tb_status tb__staged_stash(tb__flow *flow, lane *l, size_t bucket, char *buffer, size_t nbytes);
/* Writes a bucket of the stash, if that is allowed now; *did: it was. */
tb_status tb__staged_write_stash(tb__flow *flow, bool *did);
/* Forgets announcements of attempts `first` to `last`. */
void tb__staged_drop_announcements(tb__flow *flow, uint64_t first, uint64_t last);
void tb__staged_drop_revoked(tb__flow *flow); /* announcements of buckets in memory that was revoked */
void tb__staged_drop_sends(tb__flow *flow,
                           const member *to); /* announced buckets that a member, now gone, has not asked for */

/* Messages. False: it is not valid; tb_error_detail may say why. */
bool tb__staged_on_bucket(tb__flow *flow, member *from, uint64_t attempt, tb__unpack *message);
bool tb__staged_on_go(tb__flow *flow, member *from, tb__unpack *message);
bool tb__staged_on_taken(tb__flow *flow, const member *from, tb__unpack *message);

lane *tb__flow_lane(tb__flow *flow, size_t bucket);
const tb_chunk *tb__flow_first_chunk(const tb__flow *flow, size_t bucket);
size_t tb__flow_find_bucket(const tb__flow *flow, uint64_t id, uint32_t part);
void *tb__flow_stage(tb__flow *flow, pool which, size_t nbytes); /* NULL: no memory */
/* Of POOL_SEND, for this bucket: on a device if it is staged there. */
void *tb__flow_stage_bucket(staged_bucket *p);
/* For an announced bucket: on a device if it is there at its sender. */
void *tb__flow_stage_received(tb__flow *flow, const announcement *a, pool which);
void tb__flow_unstage(tb__flow *flow, pool which, void *buffer, size_t nbytes);

/* device_stage.c: makes the send's, if tensors on a device have to be staged, and the receive's, if a transport brings
 * such buckets to a device. */
void tb__staged_make_device_stage(tb__flow *flow, bool is_send);
void tb__staged_free_device_stages(tb__flow *flow);
/* The one that the buffer is in; NULL: it is in host memory. */
const device_stage *tb__staged_find_device(const tb__flow *flow, const char *buffer);
/* NULL: no room; free when no bucket has it. */
char *tb__staged_alloc_on_device(const tb__flow *flow, bool is_send, size_t nbytes);
/* Whether a bucket can be staged there, by this rank as its source; or taken from there, as its target. */
bool tb__staged_packs_on_device(tb__flow *flow, size_t bucket);
bool tb__staged_unpacks_on_device(tb__flow *flow, const lane *l, size_t bucket);
/* Whether this rank can hand buckets that it has staged there to the member. */
bool tb__staged_carries(const tb__flow *flow, const member *to);
/* Of an outgoing bucket that can be staged there: whether it is. Times it, if that is not decided for its receiver. */
bool tb__staged_prefers_device(staged_bucket *p);
/* The bucket is done: its time counts. */
void tb__staged_end_timing(staged_bucket *p);
/* Adds a line on whether such buckets go to the member from the device, if that is possible. */
void tb__staged_describe_way(const tb__flow *flow, const member *to, tb__text *out);
/* Whether the host device alone reads the bucket, as its target. */
bool tb__staged_unpacks_on_host(tb__flow *flow, size_t bucket);

/* ---- Among the files of staged buckets ------------------------------------------------------------------------- */

bool tb__flow_has_room(const tb__flow *flow, pool which, size_t nbytes);
staged_bucket *tb__staged_bucket_create(tb__flow *flow, lane *l, size_t bucket, bool is_send, size_t nmessages);
staged_bucket *tb__staged_bucket_create_out(tb__flow *flow, lane *l,
                                            size_t bucket); /* for all targets that it is staged for */
void tb__staged_bucket_destroy(staged_bucket *p);
tb__leg *tb__staged_bucket_leg(const staged_bucket *p);
tb_status tb__staged_bucket_check(const staged_bucket *p); /* fails if one of its messages has failed */
/* Announces it to its receivers. */
void tb__staged_bucket_announce(staged_bucket *p);
/* Posts the receive of an announced bucket, then tells the sender to send it. */
void tb__bucket_message_ask(bucket_message *c, const announcement *a);
/* Removes an announcement from the list, without releasing its `memory`. */
void tb__staged_forget(tb__flow *flow, size_t announcement);
/* Ends reading a bucket in its sender's buffer, and tells the sender. TB_CANCELLED: the sender had withdrawn the
 * buffer. */
tb_status tb__staged_bucket_end_read(staged_bucket *p);
/* The order of reductions: the same on every rank. */
bool tb__flow_is_before(const tb__flow *flow, size_t a, size_t b);
/* The bytes of a bucket in this rank's sources or targets, as pieces, if they lie in long runs. The caller frees the
 * array. NULL: the bucket needs a buffer. */
tb_piece *tb__flow_pieces(tb__flow *flow, const lane *l, size_t bucket, bool is_target, size_t *count);
/* Starts the checksum of an outgoing bucket, and announces the bucket when it is known. False: it is known, or
 * checksums are disabled. */
bool tb__staged_bucket_begin_sum(staged_bucket *p);
/* Compares the checksums of a received bucket; *is_checked when all are compared. The leg fails if one differs. */
tb_status tb__staged_bucket_check_sums(staged_bucket *p, bool *is_checked);

#endif
