/* An engine: a group of ranks that receives a batch, through one pair or several. All its pairs together make one
 * receive, of one version. The first rank of the group is its *lead*.
 *
 * The version. Senders number their sends, and offer each with START. Through one pair the ranks receive all offers, in
 * order. With several pairs the lead waits until each of them has an offer, takes the highest number, fails lower
 * offers (TB_SUPERSEDED), and, when all pairs offer the same number, tells the ranks which attempt of each pair that
 * is: the *vector*. The number is the version, and the number of the receive.
 *
 * The nonce. Whenever the lead registers pairs, it draws 128 random bits, which its manifests carry. They name the
 * engine in all messages of this file and in the store: a process that has got the rank number of another one, and a
 * store that has replaced another one, never answer for it.
 *
 * In place, the pairs go on without each other once the vector is known. With shadows, commit.h decides about all of
 * them at once. All of this needs the loop's lock. */
#ifndef TB_BUS_ENGINE_H
#define TB_BUS_ENGINE_H

#include "bus/commit.h"
#include "bus/world.h"

typedef struct tb__vector {
    tb__nonce nonce;
    uint64_t version; /* 0: none */
    TB_VEC(struct tb__choice {
        uint64_t pair; /* hash of its name */
        uint64_t attempt;
    })
    choices;
} tb__vector;

void tb__vector_pack(tb__pack *pack, const tb__vector *vector);
/* False: it is not valid, or there is no memory. */
bool tb__vector_unpack(tb__unpack *message, tb__vector *out);
void tb__vector_fini(tb__vector *vector);

/* How the ranks of a group have ended their transfers with whole_group: whole.c. By direction: receives, sends. */
typedef struct tb__rank_ended {
    uint64_t number[2]; /* of the last transfer that it has ended well */
} tb__rank_ended;

typedef struct tb__all_ended {
    uint64_t number; /* 0: none */
    tb_status status;
    char why[TB__WHY_MAX];
} tb__all_ended;

typedef struct tb__whole {
    tb__rank_ended *ranks; /* at the lead, by seat; NULL: it has no reports */
    tb__all_ended all[2];  /* from the lead */
} tb__whole;

/* The answers of the lead to questions about the transfer_signal: signal.c. */
typedef enum tb__answer { TB__NO_ANSWER, TB__ANSWER_NO, TB__ANSWER_YES, TB__ANSWER_FORGOTTEN } tb__answer;
typedef struct tb__question tb__question;
typedef struct tb__signal {
    uint64_t last; /* the highest question that was answered here; 0: none ... */
    bool answer;   /* ... and its answer */
    TB_VEC(struct tb__answers {
        uint64_t first; /* question; up to that of the next */
        bool answer;
    })
    runs;                  /* at the lead */
    tb__question *waiting; /* at the others */
} tb__signal;

/* The part of an engine's receives that goes through one pair, in one direction. */
struct tb__engine_part {
    tb__engine *engine; /* NULL: this process does not receive in this direction */
    tb__exchange *exchange;
    int src;         /* the side that sends */
    bool is_in;      /* the current, or last, receive has it */
    bool is_aborted; /* with the others, because one of them failed */
    bool is_prepared;
    bool is_applied;        /* the flow has tried to copy the shadow ... */
    tb__reason not_applied; /* ... and the reason if it could not */
};

struct tb__engine {
    tb__port port; /* first: for messages of the engine's other ranks */
    tb_batch *batch;
    char *group;
    int32_t index, size; /* this rank's seat */
    tb__peer **peers;    /* by seat; NULL: no pair is registered yet */
    uint32_t *ports;     /* theirs */
    tb__nonce drawn;     /* at the lead: sent with manifests ... */
    uint64_t drawn_epoch;
    tb__nonce nonce; /* ... and the one in use */
    uint64_t epoch;
    uint64_t taken;             /* the highest version that a receive of this rank has begun to take */
    TB_VEC(tb__vector) vectors; /* that the lead has fixed and this rank has not taken, in order */
    tb__vector current;         /* of the receive that is under way, or in doubt */
    tb__nonce last_nonce;
    uint64_t last_version; /* of the last receive that took a vector */
    bool is_receiving;
    TB_VEC(struct tb__early_message {
        tb__peer *from;
        unsigned char *data;
        size_t nbytes;
    })
    early; /* of ranks whose manifests have not all come */
    tb__commit commit;
    tb__whole whole;
    tb__signal signal;
};

/* Finds or makes the engine that this process is in as a receiver of the exchange in this direction. */
tb_status tb__engine_add_part(tb__exchange *exchange, int src);
/* The exchange is destroyed, and so are its flows: a decision about a receive with it can't be applied any more. */
void tb__engine_remove_part(tb__engine_part *part);
void tb__engine_destroy(tb__engine *engine);

/* At the lead: draws a nonce for the pairs that are registered now. */
tb_status tb__engine_draw_nonce(tb__engine *engine);
/* A rank's manifest, as far as it concerns its engine. */
typedef struct tb__engine_manifest {
    uint32_t port;
    tb__nonce nonce; /* the lead's */
    uint64_t epoch;
    uint64_t taken;
} tb__engine_manifest;
void tb__engine_pack_manifest(const tb__engine *engine, tb__pack *pack);
tb__engine_manifest tb__engine_unpack_manifest(tb__unpack *manifest);
/* All ranks of the exchange have agreed. */
void tb__engine_on_agreed(tb__engine_part *part);

/* The next part after the i-th candidate; NULL: there are no more. Begin with 0. */
tb__engine_part *tb__engine_next_part(const tb__engine *engine, size_t *i);
tb__flow *tb__engine_flow(const tb__engine_part *part);

/* A transfer begins to receive: the flows of its parts have begun. */
void tb__engine_begin(tb__engine *engine, const tb_transfer_opts *opts);
/* Makes progress where possible; returns whether it did. By the driver, in a step of the transfer. */
bool tb__engine_step(tb__engine *engine);
/* The receive has ended. */
void tb__engine_end(tb__engine *engine);

/* Sends a message to the port of the engine's rank with this seat; takes over the pack. */
void tb__engine_send(tb__engine *engine, int32_t seat, tb__pack *message);
bool tb__nonces_equal(const tb__nonce *a, const tb__nonce *b);
/* With one pair: sets `current` as soon as the flow has taken an attempt. */
void tb__engine_ensure_current(tb__engine *engine);
/* An ENDED or ALL_ENDED. False: it is not valid. */
bool tb__whole_message(tb__engine *engine, int32_t seat, uint32_t kind, tb__unpack *message);
void tb__whole_forget(tb__engine *engine, int32_t seat); /* another process has the seat now */
void tb__whole_fini(tb__whole *whole);
/* This rank's transfer with whole_group and this number has ended; 0: it had none. */
void tb__whole_tell(tb__engine *engine, bool is_send, uint64_t number, tb_status status, const char *why);
/* Writes what this rank waits for after that. */
void tb__whole_describe_wait(const tb__engine *engine, bool is_send, uint64_t number, char *out, size_t room);
/* Whether waiting is over, and the result, with tb_error_detail. Informs the others of a
 * failure. */
bool tb__whole_is_over(tb__engine *engine, bool is_send, uint64_t number, bool is_cancelled, bool is_late,
                       tb_status *status);
/* A QUESTION or ANSWER. False: it is not valid. */
bool tb__signal_message(tb__engine *engine, int32_t seat, uint32_t kind, tb__unpack *message);
void tb__signal_fini(tb__signal *signal);
/* Records in the flows that the receive with this vector has failed. */
void tb__engine_record_abort(tb__engine *engine, const tb__vector *vector, tb_status status, const char *why);

#endif
