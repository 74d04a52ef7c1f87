/* An exchange of tensor lists among all ranks of a pair, for one batch. The manifest of each rank has the hash of its
 * *tensor list*: the tensors that it has added for its side. The leads collect the lists, each once, and send them on
 * (exchange_lists.c). From all lists every rank computes what each side has, which tensors of the two sides
 * match, and a flow for each direction.
 *
 * All functions need the loop's lock. */
#ifndef TB_BUS_EXCHANGE_H
#define TB_BUS_EXCHANGE_H

#include "base/index.h"
#include "bus/engine.h"
#include "reshard/convert.h"

/* A tensor's description, which a rank sends to all others. The strings belong to the list. */
typedef struct tb__tensor_description {
    const char *name;
    const char *layout; /* in seats; NULL: the pair's */
    tb_shape shape;     /* global */
    tb_dtype dtype, wire_dtype;
    uint32_t group;
    const char *encode, *scale_group; /* NULL: none */
    tb__encoding encoding;            /* parsed from `encode` */
    bool is_transformed, is_whole;
    uint32_t memory; /* ranks number the kinds of memory that their tensors are in, from 0 on */
} tb__tensor_description;

/* The tensors that a rank has added for a side. Ranks with equal lists share one. */
typedef struct tb__tensor_list {
    uint64_t hash;
    unsigned char *data;
    size_t nbytes;
    TB_VEC(tb__tensor_description) tensors; /* by name */
    TB_VEC(tb_tie) ties;
    TB_VEC(const char *) ignored;
    tb_commit commit;
    bool checksum;
    /* Set by tb__exchange_merge: */
    bool is_used; /* a seat has it; else it came from a rank that has left */
    int32_t first_seat;
    size_t number; /* among those that are used, by their first seats */
} tb__tensor_list;

void tb__tensor_list_pack(tb__pack *pack, const tb_batch *batch, const tb__added_tensor *const *tensors,
                          size_t ntensors);
uint64_t tb__tensor_list_hash(const void *data, size_t nbytes);
/* Takes over the data, also if it fails. */
tb_status tb__tensor_list_init(tb__tensor_list *list, unsigned char *data, size_t nbytes);
void tb__tensor_list_fini(tb__tensor_list *list);

/* A tensor of a side's merged list. */
typedef struct tb__side_tensor {
    const tb__tensor_description *desc;
    const tb__added_tensor *mine; /* NULL: this process has not added it */
    const tb_layout *layout;      /* in bus ranks */
    uint64_t memory_kind;         /* equal for tensors that every rank of the side has in one kind of memory */
} tb__side_tensor;

/* A seat's manifest. */
typedef struct tb__exchange_seat {
    bool has_come;
    uint64_t hash; /* of its list */
    int64_t bucket_size;
    tb__engine_manifest engine;
} tb__exchange_seat;

typedef struct tb__exchange_side {
    bool is_here;                         /* this process is on it */
    int32_t index;                        /* its seat */
    TB_VEC(const tb__added_tensor *) own; /* the tensors it has added, by name, in the order of its list */
    uint64_t hash;                        /* of its list */
    tb__exchange_seat *seats;
    int32_t *seat_of;                     /* by peer: its seat, or -1 */
    int32_t compared;                     /* the seat that others' bucket sizes are compared with; -1: none */
    tb__index wanted;                     /* hashes of lists that a lead has asked for */
    bool are_lists_sent;                  /* by this lead, to the other one */
    TB_VEC(tb__tensor_list) lists;        /* each once */
    tb__index by_hash;                    /* of the lists */
    TB_VEC(const tb__tensor_list *) used; /* by number; this and `tensors` once all lists are there */
    TB_VEC(tb__side_tensor) tensors;      /* by name */
    tb_commit commit;                     /* when it receives */
} tb__exchange_side;

/* The shadow of a quantised tensor: where it is received before it is committed. */
typedef struct tb__encoded_shadow {
    const tb__encoded *live;
    tb__encoded encoded;
    float scale;
    tb__device *device;
    char *memory; /* allocated on `device`; NULL: shares the memory of another shadow */
} tb__encoded_shadow;

typedef struct tb__encoded_shadows {
    TB_VEC(tb__encoded_shadow *) all; /* one for each tensor */
    tb__index by_data;
} tb__encoded_shadows;

/* A rank's state when it left, in one direction. */
typedef struct tb__goodbye {
    uint64_t started; /* transfers that it knew of */
    tb__failure last;
    char *why; /* of the failure */
} tb__goodbye;

/* "cuda:3", "host", "host,cuda:0"; "": it has no tensors */
typedef struct tb__exchange_devices {
    char text[48];
} tb__exchange_devices;

struct tb__exchange {
    tb__handshake handshake; /* first: messages find the exchange through it */
    tb_world *world;
    tb_batch *batch;
    tb_pair *pair; /* for names and peers */
    char what[TB__DIRECTORY_MAX_NAME + 16];
    tb__exchange_side sides[2];
    tb__goodbye (*goodbyes)[2];    /* by peer that has left, and by sending side */
    int64_t *staging;              /* by peer: its bound on staging memory */
    int64_t staging_bytes;         /* the least of all ranks */
    tb__exchange_devices *devices; /* by peer, at leads: devices of its tensors */
    uint64_t layouts_hash;         /* of the pair's layouts */
    bool checksum;                 /* requested by any rank */
    int32_t *hosts;                /* by rank; NULL: one host */
    size_t nhosts;
    enum { EXCHANGE_WAITING, EXCHANGE_AGREED, EXCHANGE_BROKEN } state;
    bool has_agreed;
    bool must_report_loss; /* the peers have to be told that a rank was lost */
    TB_VEC(struct tb__side_layout {
        const char *text;
        int side;
        tb_layout *layout;
    })
    layouts; /* each once */
    tb__index by_text;
    tb__flow *flows[2];                           /* by sending side */
    char *lost_ties[2];                           /* likewise: why nothing may be sent; NULL: it may */
    tb__engine_part receives[2];                  /* likewise */
    tb__encoded_shadows shadows[2];               /* likewise */
    tb__convert *converts[2];                     /* of the flows; NULL: nothing is converted */
    TB_VEC(const tb__added_tensor *) received[2]; /* by sending side: this process's tensors among those received */
    TB_VEC(struct tb__backlog {
        size_t peer;
        unsigned char *data;
        size_t nbytes;
    })
    backlog; /* messages to flows that do not exist yet */
};

/* Messages to the exchange's port begin with the direction of the flow they are for, or with one of these. */
enum {
    TB__EXCHANGE_LIST = 2,
    TB__EXCHANGE_WANT = 16, /* a lead asks for the list of a side */
};

tb_status tb__exchange_create(tb_batch *batch, tb_pair *pair, tb__exchange **out);
tb_status tb__exchange_announce(tb__exchange *exchange);
void tb__exchange_destroy(tb__exchange *exchange);

/* Called when a transfer ends: reports a loss that was noticed meanwhile. */
void tb__exchange_report_loss(tb__exchange *exchange);

/* Ends all transfers, and refuses new ones, for the reason in tb_error_detail. `tell`: also informs the peers. */
void tb__exchange_break(tb__exchange *exchange, tb_status status, bool tell);
/* A rank was lost: transfers that do not need it any more go on, and no new one begins. The peers are informed when
 * this rank has ended its transfers, because the message says that it takes no further part. A rank that learns of a
 * loss this way forwards it: the sender may have no connection with some of the others. The reason is in
 * tb_error_detail. */
void tb__exchange_on_rank_lost(tb__exchange *exchange);

/* exchange_leave.c. This rank leaves, with a goodbye. */
void tb__exchange_leave(tb__exchange *exchange);
/* The peer has left; `message` is its goodbye. */
void tb__exchange_on_goodbye(tb__handshake *handshake, size_t at, tb__unpack *message);
/* Reports to the flows that a rank has left. */
void tb__exchange_report_gone(tb__exchange *exchange, size_t gone);
void tb__exchange_free_goodbyes(tb__exchange *exchange);

/* TB_TIMEOUT, with a message that names the ranks and lists the exchange waits for. */
tb_status tb__exchange_fail_waiting(const tb__exchange *exchange);

const tb__tensor_list *tb__exchange_list(const tb__exchange_side *side, uint64_t hash); /* NULL: it has not arrived */

/* A rank whose list has not arrived; NULL: there is none. */
const tb__peer *tb__exchange_find_missing(const tb__exchange *exchange);

/* exchange_lists.c. At a lead that has all manifests: asks its members for lists that it lacks, sends those of its
 * members to the other lead, and when it has all, all to its members, after the manifests. */
tb_status tb__exchange_send_lists(tb__exchange *exchange);
void tb__exchange_on_want(tb__exchange *exchange, size_t from, tb__unpack *message);

/* Merges the lists of all seats of a side. Every rank fails alike. */
tb_status tb__exchange_merge(tb__exchange *exchange, int side);

/* Matches the tensors of the two sides, and makes a flow for each direction. */
tb_status tb__exchange_make_flows(tb__exchange *exchange);

/* exchange_shadow.c. Agrees on commit modes and checksums. Every rank fails alike. */
tb_status tb__exchange_agree_modes(tb__exchange *exchange);
/* Makes the shadow of a quantised tensor. */
tb_status tb__exchange_shadow(tb__exchange *exchange, int src, const tb__encoded *live, const tb__encoded **out);
/* Appends the moves that copy the shadows into the tensors. */
tb_status tb__exchange_list_shadows(const tb__encoded_shadows *shadows, tb__move_list *out);
void tb__exchange_free_shadows(tb__encoded_shadows *shadows);
/* TB_REFUSED if a shadowed receive would overwrite tensors that another flow is sending. */
tb_status tb__exchange_check_clash(const tb__exchange *to, const tb__flow *receives, const tb__exchange *from,
                                   const tb__flow *sends);

/* TB_REFUSED if padding of the tensors that are received from side `src` is memory that this process sends from. */
tb_status tb__exchange_check_padding(const tb__exchange *exchange, int src);

/* TB_REFUSED while a transfer of the batch exists. */
tb_status tb__batch_check_idle(const tb_batch *batch);

/* "4,5" */
void tb__shape_text(const tb_shape *shape, char *out, size_t room);

#endif
