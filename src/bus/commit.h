/* The decision about shadowed receives, in one direction of an exchange: every rank of the receiving side commits an
 * attempt, or every rank aborts it.
 *
 * Who decides. The first receiving rank is the *lead*. Each receiver that is prepared (all data is in its shadow
 * memory) says so to the lead: PREPARED, with the number of the store it is connected to. When all receivers are
 * prepared and connected to the same store, the lead proposes "commit" to that store. The store keeps the first
 * proposal about an attempt and answers every proposal with it. The lead tells the receivers the answer: DECIDED. They
 * apply their shadows, each on its own, and tell their senders (COMMITTED, a message of the flow).
 *
 * Who may abort. A receiver that is not prepared aborts on its own: nobody can have proposed "commit". A prepared
 * receiver with a reason to abort (deadline, cancellation, another rank's ABORT, a loss, invalidated memory) proposes
 * "abort" to the store and does what the store answers. Only the lead proposes "commit", so until it has, the lead
 * aborts without the store and tells the receivers: DECIDED.
 *
 * What a loss does:
 * - A receiver is lost before it is prepared: the lead aborts. Later: the others commit or abort without it.
 * - The lead is lost: receivers that are not prepared abort, prepared ones propose "abort". The store answers "commit"
 *   if the lead had proposed that first.
 * - A sender is lost: receivers that have all its data do not need it, the others are not prepared, and abort.
 * - The store does not answer: whoever has proposed asks again until its deadline. If another store has taken its
 *   place, the lead stops at once, and others after a second, in which the lead may tell them that it aborts.
 *   A rank that stops without an answer ends with *outcome unknown*: its tensors keep what they hold. When its next
 *   transfer begins, it asks again, applies its shadow if the answer is "commit", and moves nothing before.
 * - Anything is lost after "commit" was decided: the ranks that are left commit. A rank whose memory was invalidated
 *   says so, and does not have the version.
 *
 * How it is built. Whatever happens (messages, events of the flow, answers) is recorded in tb__commit_machine as an
 * input. One function in commit.c makes all transitions between states from the inputs, and returns outputs (messages,
 * proposals, apply, discard), which another function performs. It runs in tb__commit_step.
 *
 * All of this needs the loop's lock. */
#ifndef TB_BUS_COMMIT_H
#define TB_BUS_COMMIT_H

#include "bus/commit_log.h"
#include "flow/flow.h"

typedef struct tb__exchange tb__exchange;

typedef enum tb__commit_state {
    COMMIT_IDLE,            /* no receive is prepared */
    COMMIT_PREPARED,        /* this rank has proposed nothing */
    COMMIT_PROPOSED,        /* it has, and awaits the store's answer */
    COMMIT_UNANSWERED,      /* there was none; it will propose again */
    COMMIT_DECIDED,         /* to commit; the program holds it back, or there was no memory to apply it */
    COMMIT_APPLYING,        /* the shadow is being copied into the tensors */
    COMMIT_OUTCOME_UNKNOWN, /* from here on: the receive has ended without knowing what was decided */
    COMMIT_ASKING_AGAIN,    /* it awaits the store's answer */
    COMMIT_APPLYING_LATE,   /* the answer was "commit" */
} tb__commit_state;

typedef struct tb__reason {
    tb_status status; /* TB_OK: none */
    char why[TB__WHY_MAX];
} tb__reason;

typedef struct tb__receiver {
    bool is_receiver;
    uint64_t prepared;     /* for which attempt it is; known at the lead */
    uint64_t store_number; /* of the store that it was connected to then */
} tb__receiver;

typedef struct tb__attempt_span {
    uint64_t first, last;
} tb__attempt_span;

struct tb__commit_machine {
    tb__exchange *exchange;
    int src;      /* the side that sends */
    bool is_used; /* receives are shadowed */
    size_t lead;  /* position among the exchange's peers */
    bool is_lead; /* this rank is */

    tb__commit_state state;
    uint64_t attempt;      /* that this rank is prepared for, or was last */
    uint64_t store_number; /* of the store it was connected to when it became prepared: only that one decides */
    bool has_proposed;
    int64_t wake_ms; /* when a step can do something although nothing has happened; 0: never */

    /* Inputs about the attempt. */
    bool is_prepared;       /* not yet acted on */
    tb__reason reason;      /* of this rank, to abort */
    tb__decision decision;  /* by the store, or by the lead */
    tb__reason aborted;     /* the reason of a decision to abort */
    tb__reason unanswered;  /* why the store has not answered */
    bool is_applied;        /* the flow has tried to ... */
    tb__reason not_applied; /* ... and why it could not */
    bool is_wanted;         /* a transfer begins that has to know the outcome */

    /* The transfer that receives. */
    bool holds, may_proceed; /* it waits, once decided, until it may be applied */
    bool is_late;            /* its deadline has passed */
    bool is_decided;
    bool is_committing; /* `committing` has been called */
    void (*committing)(void *arg, bool is_done);
    void *committing_arg;

    tb__receiver *receivers;            /* by position */
    TB_VEC(tb__attempt_span) questions; /* at the lead: that the store may have been asked about, ascending */
};

/* `owner` is for the flow of this direction, which is made next. Where receives are in place, both stay unused. */
tb_status tb__commit_init(tb__commit_machine *c, tb__exchange *exchange, int src, tb__shadow *owner);
/* After the flow is destroyed. */
void tb__commit_fini(tb__commit_machine *c);

/* A message of a peer's, after the number that it begins with. False: it is not valid. */
bool tb__commit_message(tb__commit_machine *c, size_t from, tb__unpack *message);

/* The store's answer to a proposal: what is decided, with the reason to abort; or TB__DECISION_NONE, and why there is
 * no answer. From the commit log's thread. */
void tb__commit_answer(tb__commit_machine *c, uint64_t attempt, tb__decision decision, tb_status status,
                       const char *why);

/* A transfer begins to receive. */
void tb__commit_begin(tb__commit_machine *c, const tb_transfer_opts *opts);
/* Makes the transitions that can be made; returns whether there were any. By the driver, in a step of the transfer.
 * Lets go of the lock while the program's functions are called. */
bool tb__commit_step(tb__commit_machine *c);

/* Whether a receive has ended without its outcome being known. Then none can begin. */
bool tb__commit_outcome_is_unknown(const tb__commit_machine *c);
/* Asks the store, and applies the shadow if the answer is "commit". TB_IN_DOUBT if there is no answer. Waits. */
tb_status tb__commit_resolve(tb__commit_machine *c, int64_t deadline_ms, const tb_transfer_opts *opts);

#endif
