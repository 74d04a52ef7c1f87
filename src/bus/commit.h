/* The decision about shadowed receives of an engine: every rank commits all pairs of a version, or every rank aborts
 * all of them.
 *
 * Decisions. A rank is prepared when all data of all pairs is in its shadow memory. It tells the engine's lead:
 * PREPARED, with nonce, vector and the mark of the store that it is connected to. When all ranks are prepared alike,
 * the lead proposes "commit" to that store, in one transaction: the mark is unchanged, and nothing is decided under
 * NONCE and the receive's number. The store answers every proposal with the first one. The lead tells the ranks the
 * answer: DECIDED. They apply their shadows, each on its own, and tell their senders (COMMITTED, a message of the
 * flow).
 *
 * Aborts. A rank that is not prepared aborts on its own: no rank can have proposed "commit". A prepared rank with a
 * reason to abort (deadline, cancellation, another rank's ABORT, a loss, invalidated memory, PREPARED messages that
 * differ) proposes "abort" to the store and does what the store answers. The lead aborts alone as long as it has
 * proposed nothing, because only it proposes "commit".
 *
 * Unknown outcomes. A rank without an answer from the store asks the engine's other ranks: ASK. Each that has the same
 * nonce answers: the outcome, if it knows it; "abort", if it is not prepared for the receive, after it has recorded
 * that it never will be; otherwise that it does not know. Outcomes are kept for two receives; a rank that has forgotten
 * an outcome does not know. If no rank knows, the rank ends with TB_IN_DOUBT: its tensors keep what they hold, and no
 * transfer begins. The next one first asks the store with that mark, and all ranks, again. Removing the pairs ends the
 * doubt, too.
 *
 * Implementation. Every event is recorded in tb__commit. find_input determines the input of commit_table.h that
 * applies; the table has the next state and the output; perform_output does it. All of this needs the loop's lock. */
#ifndef TB_BUS_COMMIT_H
#define TB_BUS_COMMIT_H

#include "bus/commit_log.h"
#include "flow/flow.h"

typedef struct tb__exchange tb__exchange;
typedef struct tb__engine tb__engine;
typedef struct tb__engine_part tb__engine_part;

typedef struct tb__nonce {
    uint64_t word[2];
} tb__nonce;

typedef enum tb__commit_state {
    COMMIT_IDLE,          /* no receive is prepared */
    COMMIT_PREPARED,      /* this rank has proposed nothing */
    COMMIT_PROPOSED,      /* it has, and awaits the store's answer */
    COMMIT_UNANSWERED,    /* there was none; it will propose again */
    COMMIT_DECIDED,       /* to commit; the program holds it back, or there was no memory to apply it */
    COMMIT_APPLYING,      /* the shadows are being copied into the tensors */
    COMMIT_IN_DOUBT,      /* from here on: the receive has ended without knowing what was decided */
    COMMIT_ASKING,        /* a transfer wants to begin; store and ranks are asked */
    COMMIT_APPLYING_LATE, /* it was committed */
    TB__COMMIT_STATES
} tb__commit_state;

typedef enum tb__commit_input {
    INPUT_NONE,
    INPUT_HAS_ALL,      /* all data of all pairs has arrived */
    INPUT_HEARS_COMMIT, /* from the store, the lead, or another rank */
    INPUT_HEARS_ABORT,
    INPUT_ABORTS_ALONE,  /* the lead has a reason to abort, and has proposed nothing */
    INPUT_ALL_PREPARED,  /* the lead knows that all ranks are prepared alike */
    INPUT_GIVES_UP,      /* a rank other than the lead has a reason to abort */
    INPUT_NO_ANSWER,     /* the store could not be reached, or took too long */
    INPUT_ASKS_AGAIN,    /* some time has passed */
    INPUT_IS_OVER,       /* deadline or cancellation; or another store is in place of the one that decides */
    INPUT_MAY_APPLY,     /* the program does not hold the receive back (any more) */
    INPUT_HAS_APPLIED,   /* all shadows are in the tensors */
    INPUT_LACKS_MEMORY,  /* for copying; there is time to try again */
    INPUT_CANNOT_APPLY,  /* a device has failed, or memory was invalidated */
    INPUT_WANTS_TO_KNOW, /* a transfer begins */
    INPUT_HAS_ANSWER,    /* from the store, or none in time; or from a rank */
    INPUT_LEARNS_COMMIT, /* the answer, when a transfer begins */
    INPUT_LEARNS_ABORT,
    INPUT_IS_REMOVED, /* a pair of the receive is removed from the batch */
    TB__COMMIT_INPUTS
} tb__commit_input;

typedef enum tb__commit_output {
    OUTPUT_NOTHING,
    OUTPUT_TELL_LEAD,      /* PREPARED */
    OUTPUT_PASS_ON,        /* the lead sends DECIDED */
    OUTPUT_DISCARD,        /* the receive fails; the lead sends DECIDED */
    OUTPUT_PROPOSE_COMMIT, /* to the store */
    OUTPUT_PROPOSE_ABORT,
    OUTPUT_PROPOSE_AGAIN, /* the same */
    OUTPUT_ASK_PEERS,     /* ASK */
    OUTPUT_ASK_ALL,       /* ASK, and "abort" is proposed: nobody prepares the receive any more */
    OUTPUT_LEAVE_UNKNOWN, /* the receive ends with TB_IN_DOUBT */
    OUTPUT_APPLY,
    OUTPUT_FINISH, /* outcomes that no rank will ask for again are deleted from the store */
    OUTPUT_KEEP,   /* the version before: this one was aborted */
    OUTPUT_FAIL,   /* the receive fails on this rank, although it is committed */
    TB__COMMIT_OUTPUTS
} tb__commit_output;

typedef struct tb__reason {
    tb_status status; /* TB_OK: none */
    char why[TB__WHY_MAX];
} tb__reason;

typedef struct tb__outcome_record {
    tb__nonce nonce;
    uint64_t version;
    tb__decision decision; /* TB__DECISION_NONE: no record */
    tb__reason aborted;
} tb__outcome_record;

/* The lead's knowledge of a rank. */
typedef struct tb__prepared_rank {
    uint64_t version; /* for which it is prepared */
    tb__nonce nonce;
    uint64_t vector_hash;
    uint64_t store_number; /* of the store that it was connected to then */
} tb__prepared_rank;

struct tb__commit {
    tb__engine *engine;
    bool is_used; /* receives are shadowed */
    tb__commit_state state;
    uint64_t serial;       /* counts the receives of this rank */
    uint64_t store_number; /* of the store it was connected to when it became prepared: only that one decides */
    bool has_proposed;
    uint64_t nproposals, nproposals_before; /* to the store, in all, and before this receive */
    int64_t wake_ms;                        /* when a step can do something although nothing has happened; 0: never */

    /* Inputs about the receive. */
    tb__reason reason;     /* of this rank, to abort */
    tb__decision proposal; /* of this rank */
    tb__decision decision; /* by the store, or as another rank reports */
    tb__reason aborted;    /* the reason of a decision to abort */
    tb__reason unanswered; /* why the store has not answered */
    size_t nawaited;       /* ranks that were asked and have not answered ... */
    int64_t asked_ms;      /* ... since then */
    bool is_wanted;        /* a transfer that has to know the outcome begins */
    bool is_removed;
    size_t ndone; /* parts whose shadow is in the tensors */

    /* The transfer that receives. */
    bool holds, may_proceed; /* it waits, once decided, until it may be applied */
    bool is_late;            /* its deadline has passed */
    bool is_decided;
    bool is_committing; /* `committing` has been called */
    void (*committing)(void *arg, bool is_done);
    void *committing_arg;

    tb__nonce prepared_nonce;    /* of `last_prepared` and `refused` */
    uint64_t last_prepared;      /* the highest version that this rank was prepared for */
    uint64_t announced;          /* at the lead: the receive whose abort it has told the ranks; a serial */
    uint64_t refused;            /* this rank never prepares this version, nor a lower one */
    tb__outcome_record known[2]; /* the last outcomes */
    tb__prepared_rank *ranks;    /* at the lead: by seat */
    TB_VEC(uint64_t) questions;  /* at the lead: versions that the store may have been asked about, ascending */
};

/* Messages between ranks of an engine begin with one of these. */
enum {
    TB__ENGINE_VECTOR,
    TB__ENGINE_PREPARED,
    TB__ENGINE_DECIDED,
    TB__ENGINE_ASK,
    TB__ENGINE_ENDED,
    TB__ENGINE_ALL_ENDED,
    TB__ENGINE_QUESTION,
    TB__ENGINE_ANSWER
};

tb_status tb__commit_init(tb__commit *c, tb__engine *engine);
void tb__commit_fini(tb__commit *c);
/* The owner of the flow of a part, which is made next. Where receives are in place, it stays unused. */
void tb__commit_own_flow(tb__engine_part *part, tb__shadow *owner);

/* A message of the rank with this seat. False: it is not valid. */
bool tb__commit_message(tb__commit *c, int32_t seat, uint32_t kind, tb__unpack *message);

/* The store's answer to the proposal of this number: the decision, with the reason to abort; or TB__DECISION_NONE, and
 * why there is no answer. From the commit log's thread. */
void tb__commit_answer(tb__commit *c, uint64_t proposal, tb__decision decision, tb_status status, const char *why);

/* A transfer begins to receive. */
void tb__commit_begin(tb__commit *c, const tb_transfer_opts *opts);
/* Makes the transitions that can be made; returns whether there were any. By the driver, in a step of the transfer.
 * Releases the lock while the program's functions are called. */
bool tb__commit_step(tb__commit *c);
/* Whether the rank is not prepared: it may fail the receive on its own. */
bool tb__commit_is_open(const tb__commit *c);

/* Whether a receive has ended without its outcome being known. Then none can begin. */
bool tb__commit_is_in_doubt(const tb__commit *c);
/* Asks, and applies the shadows if the answer is "commit". TB_IN_DOUBT if there is no answer. Waits. */
tb_status tb__commit_resolve(tb__commit *c, int64_t deadline_ms, const tb_transfer_opts *opts);
void tb__commit_remove(tb__commit *c); /* a pair of the receive that is in doubt is removed */

/* For tests: called with the names of each transition that is made: state, input, next state, output. */
extern void (*tb__commit_on_transition)(const tb__engine *engine, const char *const names[4]);
/* Whether the table has the transition. */
bool tb__commit_table_has(const char *const names[4]);

#endif
