/* Staged buckets: data that a reader does not read in the sender's tensors. struct flow_staged is written by bucket.c
 * (memory, one bucket and its messages), staged.c (packing, unpacking, the stash), reduce.c (combining contributions),
 * pieces.c (buckets that need no buffer) and sum.c (checksums), and by nobody else. All of this needs the loop's lock.
 */
#ifndef TB_FLOW_STAGED_H
#define TB_FLOW_STAGED_H

#include "flow/flow.h"
#include "ir/ir.h"
#include "loop/region.h"

typedef struct lane lane;
typedef struct member member;

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
    uint64_t tag, sum; /* the sum that the sender has told */
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
    bool is_summed;    /* its checksums are known, or being computed ... */
    size_t nsums;      /* ... so many still */
    uint64_t sum;      /* of what goes out */
    bool is_relayed;   /* of what came: it is announced to those to whom it is handed on */
    bool is_begun;     /* it is being copied, or was */
    bool is_unpacked;  /* what came is in its place */
    pool pool;
    char *buffer; /* what goes out or comes in; of a reduction: the contributions, one after the other */
    size_t nbytes;
    tb_piece *pieces; /* instead: where the tensors have it; NULL: there is a buffer */
    size_t npieces;
    tb__region *region; /* of the buffer, for receivers that read it there; NULL: none does */
    tb_remote *remote;  /* of what came: the sender's buffer, which is read there; NULL: it is received */
    char *map;          /* where that is mapped */
    char *output;       /* of a reduction: the bucket to be shipped or put aside; NULL: it goes into the tensors */
    pool output_pool;
    size_t output_nbytes;
    size_t left; /* messages that are not done */
    tb_status status;
    staged_bucket *next;
    size_t nmessages;
    bucket_message messages[]; /* of what came in: the first; the others hand it on */
};

/* A bucket that a peer has packed for us. */
typedef struct announcement {
    uint64_t attempt;
    uint32_t member;
    size_t bucket;
    uint64_t tag;
    size_t nbytes;
    uint64_t sum;      /* where there are checksums */
    tb_remote *remote; /* the sender's buffer, to be read there; NULL: it is to be received */
    char *map;
} announcement;

/* A bucket that was put aside. */
typedef struct stashed {
    lane *lane;
    size_t bucket;
    char *buffer;
    size_t nbytes;
} stashed;

/* What has been done of a lane, in the transfers under way. */
struct staged_lane {
    size_t to_send, to_combine; /* the next bucket, from the channel's first */
    uint32_t in_flight;         /* buckets that are packed, and that not all have who get them */
};

struct flow_staged {
    int64_t pool_used[POOL_COUNT], pool_size[POOL_COUNT];
    int64_t nbytes, nbytes_most;    /* of all pools together, now and ever */
    staged_bucket *buckets;         /* under way */
    char gaps[2][TB__BUCKET_ALIGN]; /* between the chunks of what is sent without a buffer: zeros; and received:
                                       anything */
    const member *held_by;          /* a message to or from it has not given this rank's tensors back; NULL: none */

    /* Of the send. */
    size_t sends_left;   /* buckets, over all lanes */
    int64_t largest_out; /* bytes of a bucket that is packed */
    uint32_t next_lane;  /* where to look for the next one */

    /* Of the receive. */
    TB_VEC(announcement) announcements;
    bool *is_taken; /* per bucket that is handed on: it was asked for */
    size_t nrelays; /* buckets that are being handed on */
    TB_VEC(stashed) stash;
};

/* ---- For the rest of the flow ---------------------------------------------------------------------------------- */

tb_status tb__staged_init(tb__flow *flow); /* when the lanes are known */
void tb__staged_fini(tb__flow *flow);      /* no copying is under way */
/* Whether all that has to be put aside fits; the other pools make room for it. */
tb_status tb__staged_fit_stash(tb__flow *flow);
/* The next transfer begins. */
void tb__staged_open_send(tb__flow *flow);
void tb__staged_open_recv(tb__flow *flow);
/* The leg is over: gives back its buckets, and of a receive the stash. */
void tb__staged_close(tb__flow *flow, bool is_send);
bool tb__staged_step_out(tb__flow *flow);                  /* packs and announces */
bool tb__staged_step_in(tb__flow *flow);                   /* takes what was announced, unpacks it, and hands it on */
bool tb__staged_step_reduce(tb__flow *flow, bool is_send); /* gathers contributions and combines them */
/* A bucket is in staging memory of the stash, which goes over to it. */
tb_status tb__staged_put_aside(tb__flow *flow, lane *l, size_t bucket, char *buffer, size_t nbytes);
/* Writes some of the stash, if that may be written now; `did` says whether. */
tb_status tb__staged_write_stash(tb__flow *flow, bool *did);
/* Announcements of attempts from the first to the last: they are asked for no more. */
void tb__staged_drop_announcements(tb__flow *flow, uint64_t first, uint64_t last);
void tb__staged_drop_sends(tb__flow *flow, const member *to); /* buckets that one that is gone has not asked for */

/* Messages. False: it is not valid; tb_error_detail may say why. */
bool tb__staged_on_bucket(tb__flow *flow, member *from, uint64_t attempt, tb__unpack *message);
bool tb__staged_on_go(tb__flow *flow, member *from, tb__unpack *message);
bool tb__staged_on_taken(tb__flow *flow, const member *from, tb__unpack *message);

lane *tb__flow_lane(tb__flow *flow, size_t bucket);
const tb_chunk *tb__flow_first_chunk(const tb__flow *flow, size_t bucket);
size_t tb__flow_find_bucket(const tb__flow *flow, uint64_t id, uint32_t part);
void *tb__flow_stage(tb__flow *flow, pool which, size_t nbytes); /* NULL: no memory */
void tb__flow_unstage(tb__flow *flow, pool which, void *buffer, size_t nbytes);

/* ---- Among the files of staged buckets ------------------------------------------------------------------------- */

bool tb__flow_has_room(const tb__flow *flow, pool which, size_t nbytes);
staged_bucket *tb__staged_bucket_create(tb__flow *flow, lane *l, size_t bucket, bool is_send, size_t nmessages);
staged_bucket *tb__staged_bucket_create_out(tb__flow *flow, lane *l, size_t bucket); /* for all who want it staged */
void tb__staged_bucket_destroy(staged_bucket *p);
tb__leg *tb__staged_bucket_leg(const staged_bucket *p);
tb_status tb__staged_bucket_check(const staged_bucket *p); /* whether a message of it has failed */
/* Tells those who get it that it is there. */
void tb__staged_bucket_announce(staged_bucket *p);
/* Takes what was announced: the receive is there before the sender hears that it may send. */
void tb__bucket_message_ask(bucket_message *c, const announcement *a);
/* Takes it off the list; what it has is the caller's. */
void tb__staged_forget(tb__flow *flow, size_t announcement);
/* The bucket was read in its sender's buffer, which is free then. TB_CANCELLED: the sender took it back before. */
tb_status tb__staged_bucket_end_read(staged_bucket *p);
/* The order of reductions: the same on every rank. */
bool tb__flow_is_before(const tb__flow *flow, size_t a, size_t b);
/* A bucket where the tensors have it, in order, if that is in long runs: of this rank's sources, or of its targets.
 * Whoever calls frees the pieces; NULL: it needs a buffer. */
tb_piece *tb__flow_pieces(tb__flow *flow, const lane *l, size_t bucket, bool is_target, size_t *count);
/* Computes the checksum of what goes out, if there are checksums, and calls tb__staged_bucket_announce then. False: it
 * is known, or there is none. */
bool tb__staged_bucket_begin_sum(staged_bucket *p);
/* Whether what came is what was sent: *is_checked once that is known. The leg fails if it is not. */
tb_status tb__staged_bucket_check_sums(staged_bucket *p, bool *is_checked);

#endif
