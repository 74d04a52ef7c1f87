/* An exchange: all ranks of a pair, and what they have added to one batch. Each sends all others a manifest, with a
 * hash of what it has added for its side; what that is, its *list*, goes to each rank from one of those who have it.
 * From all lists follows what each side has, which tensors belong together, and a flow for each direction.
 *
 * All of this needs the loop's lock. */
#ifndef TB_BUS_EXCHANGE_H
#define TB_BUS_EXCHANGE_H

#include "base/index.h"
#include "bus/commit.h"
#include "bus/world.h"
#include "reshard/convert.h"

/* What every rank gets to know of a tensor. The strings are the list's. */
typedef struct tb__tensor_description {
    const char *name;
    const char *layout; /* in seats; NULL: the pair's */
    tb_shape shape;     /* global */
    tb_dtype dtype, wire_dtype;
    uint32_t group;
    const char *encode, *scale_group; /* NULL: none */
    tb__encoding encoding;            /* what `encode` says */
    bool is_transformed;
} tb__tensor_description;

/* What one rank, or several alike, have added for a side. */
typedef struct tb__tensor_list {
    uint64_t hash;
    unsigned char *data;
    size_t nbytes;
    TB_VEC(tb__tensor_description) tensors; /* by name */
    TB_VEC(tb_tie) ties;
    TB_VEC(const char *) ignored;
    tb_commit commit;
    bool checksum;
} tb__tensor_list;

void tb__tensor_list_pack(tb__pack *pack, const tb_batch *batch, const tb__added_tensor *const *tensors,
                          size_t ntensors);
uint64_t tb__tensor_list_hash(const void *data, size_t nbytes);
/* Takes over the data, also where it fails. */
tb_status tb__tensor_list_init(tb__tensor_list *list, unsigned char *data, size_t nbytes);
void tb__tensor_list_fini(tb__tensor_list *list);

/* A tensor that a side has. */
typedef struct tb__side_tensor {
    const tb__tensor_description *desc;
    const tb__added_tensor *mine; /* NULL: this process has not added it */
    const tb_layout *layout;      /* in bus ranks */
} tb__side_tensor;

typedef struct tb__exchange_side {
    bool is_here;                         /* this process is on it */
    int32_t index;                        /* its seat */
    TB_VEC(const tb__added_tensor *) own; /* what it has added, by name, as in its list */
    uint64_t hash;                        /* of its list */
    uint64_t *hashes;                     /* by seat */
    int64_t *bucket_size;                 /* by seat */
    bool *has_come;                       /* by seat */
    TB_VEC(tb__tensor_list) lists;        /* each once */
    tb__index by_hash;                    /* of the lists */
    TB_VEC(tb__side_tensor) tensors;      /* by name; once all lists are there */
    tb_commit commit;                     /* when it receives */
} tb__exchange_side;

/* A quantised tensor that is received beside the one that lives. */
typedef struct tb__encoded_shadow {
    const tb__encoded *live;
    tb__encoded encoded;
    float scale;
    tb__device *device;
    char *memory; /* the device's; NULL: another tensor's is used */
} tb__encoded_shadow;

typedef struct tb__encoded_shadows {
    TB_VEC(tb__encoded_shadow *) all; /* one for each tensor */
    tb__index by_data;
} tb__encoded_shadows;

/* What a rank has said of one direction when it left. */
typedef struct tb__goodbye {
    uint64_t started; /* transfers, as far as it knew */
    tb__failure last;
    char *why; /* of the failure */
} tb__goodbye;

struct tb__exchange {
    tb__handshake all; /* first: messages find the exchange through it */
    tb_world *world;
    tb_batch *batch;
    tb_pair *pair; /* one of this process's, for names and peers */
    char what[TB__DIRECTORY_MAX_NAME + 16];
    tb__exchange_side sides[2];
    tb__goodbye (*goodbyes)[2]; /* by peer that is gone, and by sending side */
    int64_t *staging;           /* by peer: its bound on staging memory */
    int64_t staging_bytes;      /* the least of all ranks */
    bool checksum;              /* any rank asks for it */
    int32_t *hosts;             /* by rank; NULL: one host */
    size_t nhosts;
    enum { EXCHANGE_WAITING, EXCHANGE_AGREED, EXCHANGE_BROKEN } state;
    bool has_agreed;
    bool must_report_loss; /* others have to be told that a rank was lost */
    TB_VEC(struct tb__side_layout {
        const char *text;
        int side;
        tb_layout *layout;
    })
    layouts; /* each once */
    tb__index by_text;
    tb__flow *flows[2];                           /* by sending side */
    tb__commit_machine commits[2];                /* likewise */
    tb__encoded_shadows shadows[2];               /* likewise */
    tb__convert *converts[2];                     /* of the flows; NULL: nothing is converted */
    TB_VEC(const tb__added_tensor *) received[2]; /* by sending side: what this process has of the tensors received */
    TB_VEC(struct tb__backlog {
        size_t peer;
        unsigned char *data;
        size_t nbytes;
    })
    backlog; /* messages to flows that are not there yet */
};

/* Messages to the exchange's port begin with the direction of the flow they are for, or with one of these. */
enum {
    TB__EXCHANGE_LIST = 2,
    TB__EXCHANGE_COMMIT = 3, /* plus the direction of the tb__commit_machine they are for */
};

tb_status tb__exchange_create(tb_batch *batch, tb_pair *pair, tb__exchange **out);
tb_status tb__exchange_announce(tb__exchange *exchange);
void tb__exchange_destroy(tb__exchange *exchange);

/* A transfer of it has ended: others are told of a loss that was noticed meanwhile. */
void tb__exchange_report_loss(tb__exchange *exchange);

/* Nothing will go through it any more, for the reason in tb_error_detail. */
void tb__exchange_break(tb__exchange *exchange, tb_status status, bool tell);
/* A rank is lost: what can end without it does, and nothing new is begun. The others are told when this rank has ended
 * what it can, because that says that it takes no further part. So does a rank that was told of the loss: the one that
 * told it may have no connection with some of the others. The sentence is in tb_error_detail. */
void tb__exchange_on_rank_lost(tb__exchange *exchange);

/* exchange_leave.c. This rank leaves. */
void tb__exchange_leave(tb__exchange *exchange);
/* Another one has, and this is what it says. */
void tb__exchange_on_goodbye(tb__handshake *all, size_t at, tb__unpack *message);
/* Tells the flows of a rank that has left. */
void tb__exchange_report_gone(tb__exchange *exchange, size_t gone);
void tb__exchange_free_goodbyes(tb__exchange *exchange);

/* TB_TIMEOUT, and a sentence that says what an exchange that is not settled waits for. */
tb_status tb__exchange_fail_waiting(const tb__exchange *exchange);

const tb__tensor_list *tb__exchange_list(const tb__exchange_side *side, uint64_t hash); /* NULL: it has not come */

/* What the side has, from the lists of all its seats. Fails alike on every rank. */
tb_status tb__exchange_merge(tb__exchange *exchange, int side);

/* Which tensors of the two sides belong together, and a flow for each direction. */
tb_status tb__exchange_make_flows(tb__exchange *exchange);

/* exchange_shadow.c. What both sides ask for; fails alike on every rank. */
tb_status tb__exchange_agree_modes(tb__exchange *exchange);
/* A shadow for a quantised tensor. */
tb_status tb__exchange_shadow(tb__exchange *exchange, int src, const tb__encoded *live, const tb__encoded **out);
/* Lists moves from the shadows of quantised tensors to their places. */
tb_status tb__exchange_list_shadows(const tb__encoded_shadows *shadows, tb__move_list *out);
void tb__exchange_free_shadows(tb__encoded_shadows *shadows);
/* Whether a shadowed receive would write what is sent through another flow at the same time. */
tb_status tb__exchange_check_clash(const tb__exchange *to, const tb__flow *receives, const tb__exchange *from,
                                   const tb__flow *sends);

/* TB_REFUSED if padding of the tensors that are received from side `src` is memory that this process sends from. */
tb_status tb__exchange_check_padding(const tb__exchange *exchange, int src);

/* "4,5" */
void tb__shape_text(const tb_shape *shape, char *out, size_t room);

#endif
