/* A flow: the tensors of one batch that go from one group to another, in one direction, and what this process does for
 * it. It may be on the sending side, on the receiving side, or on both.
 *
 * Set-up, the first time: each rank plans on its own. A rank whose tensors others read (a *sender*) tells its readers
 * where they are (BIND). A reader finds out what it can reach, and answers with the channels that must be staged for it
 * (REACH).
 *
 * Then, for each transfer: the first rank of the sending side issues its number (START). Senders say READY; readers
 * copy straight from the senders' memory; what can't be reached is packed into staging memory and announced (BUCKET).
 * There it is read by readers that can map it, which say so (TAKEN); others ask for it (GO), and it is sent. A reader
 * that has all it gets from a sender completes the exposure, by compare-and-set of a word in the sender's memory, and
 * says DONE. Whoever fails says so to all (ABORT), after it has revoked what it exposed; they confirm that they know it
 * (ABORT_ACK).
 *
 * A receive may be *shadowed*: data lands beside the tensors. A receive that has all of it is *prepared*, and does not
 * end on its own any more: the flow's owner has it applied (the data is copied into the tensors, and the senders are
 * told: COMMITTED) or discarded.
 *
 * Where a rank overwrites memory that others still read (source and target in one allocation), readers put all they
 * read of it aside first (STASHED), and the rank writes nothing before all have.
 *
 * All of this needs the loop's lock, which a step lets go of while it copies. */
#ifndef TB_FLOW_FLOW_H
#define TB_FLOW_FLOW_H

#include "loop/loop.h"
#include "tensorbus/plan.h"

typedef struct tb__flow tb__flow;

/* How a coded tensor gets to and from its wire form: by moves, or by a function of the user's. Where there is neither,
 * its elements are copied. */
typedef struct tb__codec {
    void *arg;
    bool reads_more; /* than src, so that there can be no snapshot */
    bool packs_rows; /* list_pack can only read rows whose elements lie side by side */
    /* Lists the moves between a chunk's box and its wire form, which is in the buffer of a run, from `offset` on. The
     * base of `src` counts from the mapping, unless that is NULL. */
    tb_status (*list_pack)(void *arg, const tb_chunk *chunk, const tb_binding *src, tb__mapping *mapping,
                           int64_t offset, tb__move_list *out);
    tb_status (*list_unpack)(void *arg, const tb_chunk *chunk, int64_t offset, tb__move_list *out);
    /* Called without the lock. The chunk's box is in host memory, and so is `wire`, which has the chunk's nbytes. */
    tb_status (*call_pack)(void *arg, const tb_chunk *chunk, const tb_binding *src, void *wire);
    tb_status (*call_unpack)(void *arg, const tb_chunk *chunk, const tb_binding *dst, const void *wire);
} tb__codec;

/* What is done next with a group that was gathered. */
typedef enum tb__gather_step {
    TB__GATHER_MEASURE, /* its largest magnitudes are looked for, and then it is asked again */
    TB__GATHER_WAIT,    /* for another rank */
    TB__GATHER_WRITE,   /* the targets are written, which is the end of it */
} tb__gather_step;

/* Tensors that are not written into place but gathered, and written when all of a group is here. Its pieces gather in a
 * *slot*, in host memory and in the target's dtype: the band of each tensor row-major, from its offset there on. */
typedef struct tb__gather {
    size_t slot_nbytes; /* 0: there are none */
    uint32_t nslots;    /* groups that may be gathered at a time */
    void *arg;
    /* Lists the moves of a step of MEASURE or WRITE. All functions are called with the lock held. */
    tb_status (*list)(void *arg, uint32_t group, tb__gather_step step, const char *slot, tb__move_list *out);
    tb_status (*next)(void *arg, tb__flow *flow, uint64_t attempt, uint32_t group, tb__gather_step *out);
    int32_t (*awaits)(void *arg); /* for whom; TB_NO_RANK: for nobody */
    /* What another rank said by tb__flow_note. False: it makes no sense. */
    bool (*note)(void *arg, int32_t rank, uint64_t attempt, tb__unpack *note);
} tb__gather;

typedef enum tb__shadow_event {
    TB__SHADOW_PREPARED,  /* the receive has all its data, and stays under way until it is applied or discarded */
    TB__SHADOW_WOULD_END, /* the prepared receive would have ended, for this reason; told once */
    TB__SHADOW_FAILED,    /* the receive ends, for this reason; other ranks are told right after */
    TB__SHADOW_APPLIED,   /* tb__flow_apply is done: TB_OK, or why the tensors do not hold the data */
} tb__shadow_event;

/* The owner of shadowed receives, who decides what becomes of those that are prepared. */
typedef struct tb__shadow {
    bool is_used; /* otherwise receives are not shadowed */
    void *arg;
    /* With the lock, by the thread that steps, ends or breaks the receive. */
    void (*event)(void *arg, tb__shadow_event event, uint64_t attempt, tb_status status, const char *why);
    /* Whether a receive, prepared or not, can't be applied without this member. With the lock. */
    bool (*needs)(void *arg, uint64_t attempt, size_t member);
    /* Called before the tensors change and, if that went well, after; until then their memory is in use. Without the
     * lock. */
    void (*applying)(void *arg, bool is_done);
    /* Lists moves from shadows that the flow did not make to their tensors. */
    tb_status (*list)(void *arg, tb__move_list *out);
} tb__shadow;

/* A tensor and where this process has its parts. The spec's pointers are borrowed. */
typedef struct tb__flow_tensor {
    uint64_t key; /* by which ranks speak of it; ascending in a flow */
    tb_tensor_spec spec;
    tb_binding src, dst;    /* local shapes are set, also where they are empty. Dtypes may differ from the spec's where
                               it is coded or gathered */
    const tb__codec *codec; /* of a coded one; borrowed */
    bool is_gathered;
    bool has_own_shadow; /* in a shadowed receive the owner copies it to its place */
    size_t slot_offset;
    const tb_binding *padding; /* around the target: a receive sets it to zero; borrowed */
    size_t npadding;
    const bool *src_invalidated,
        *dst_invalidated; /* whether the program has taken its memory away; borrowed. NULL: it never does */
} tb__flow_tensor;

typedef struct tb__flow_opts {
    tb__loop *loop;
    int32_t rank;
    uint32_t direction;     /* goes along with messages, so that several flows can share a port */
    tb__peer *const *peers; /* all ranks of both sides, each once, this one too; borrowed */
    const uint32_t *ports;  /* theirs; borrowed */
    size_t npeers;
    size_t lead;      /* position of the peer that issues numbers; npeers: nobody does ... */
    uint64_t started; /* ... beyond this one, which all know of */
    const tb__flow_tensor *tensors;
    size_t ntensors; /* by key */
    tb_ir *ir; /* what this rank does, where that is known already; the flow's, once it is made. NULL: to be planned,
                  for which tensors are by name, too */
    /* Plans, or finds a plan that is ready, which the flow shares then; it is called once, when the flow is first used.
     * NULL: tb_ir_create does */
    tb_status (*get_ir)(void *arg, const tb_tensor_spec *specs, size_t nspecs, const tb_ir_opts *opts, tb_ir **out);
    void *get_ir_arg;
    tb_plan_cache *cache;
    const int32_t *hosts; /* by rank; NULL: all on one */
    size_t nhosts;
    const char *what; /* for sentences: "batch 'step'"; borrowed */
    int64_t bucket_size, staging_bytes;
    int64_t own_staging_bytes; /* staging_bytes is what both sides can do; this is the rank's own bound */
    uint32_t max_in_flight;
    uint32_t group_window; /* 0: all */
    tb__gather gather;
    const uint32_t *host_groups; /* by group, never falling: what the host calls it; NULL: the same. Borrowed */
    bool staged, snapshot;
    bool checksum;            /* everywhere alike */
    bool targets_are_mirrors; /* written back when a receive has succeeded: one that fails leaves nothing torn */
    tb__shadow shadow;
} tb__flow_opts;

/* Plans nothing yet. */
tb_status tb__flow_create(const tb__flow_opts *opts, tb__flow **out);
/* False: a device has not finished a copy. The flow then stays until it has, with all memory that its copies use, which
 * must not be freed either. */
bool tb__flow_destroy(tb__flow *flow);

/* A message of a peer's; begins with its kind. False: it makes no sense, and tb_error_detail may say more. */
bool tb__flow_message(tb__flow *flow, size_t peer, tb__unpack *message);

/* How a rank's last transfer has failed. */
typedef struct tb__failure {
    tb_status status; /* TB_OK: it has not */
    const char *why;  /* never NULL */
    uint64_t attempt; /* 0: it had none, or may have been committed on others */
    uint64_t number;
} tb__failure;

/* A peer takes no further part: transfers that it has done its part in go on, others fail, and none is begun any more.
 * It is lost; or another one is lost, and this one says so in its own words; or it leaves in an orderly way. Then it
 * says how many transfers had been started, as far as it knew, and how its last one failed, of which this rank may not
 * have heard yet. */
void tb__flow_lost(tb__flow *flow, size_t peer);
void tb__flow_failed(tb__flow *flow, size_t peer, const char *why);
void tb__flow_gone(tb__flow *flow, size_t peer, uint64_t started, const tb__failure *last);

tb__failure tb__flow_last_failure(const tb__flow *flow);
uint64_t tb__flow_started(const tb__flow *flow);

/* Nothing will move any more, for this reason. */
void tb__flow_break(tb__flow *flow, tb_status status, const char *why);

/* Times of a transfer by phase: each moment counts to one. */
typedef struct tb__phases {
    double seconds[TB_PHASE_COUNT];
    double since;
    tb_phase now;
} tb__phases;

void tb__phases_enter(tb__phases *phases, tb_phase phase);

enum { TB__WHY_MAX = 512 };

/* A failure with its sentence. Whatever outlives a call, or goes to another thread, has it in this form: the sentence
 * in tb_error_detail is only of the failure that a call has just returned. */
typedef struct tb__fault {
    tb_status status; /* TB_OK: none */
    char why[TB__WHY_MAX];
} tb__fault;

tb__fault tb__fault_of(tb_status status, const char *why);

/* One rank's part in one transfer. */
typedef struct tb__leg {
    bool is_under_way;
    bool awaits_abort_acks;  /* it has failed, and waits until its peers have heard of it */
    bool is_cancelled;       /* set by anyone, to be noticed by the next step */
    bool memory_invalidated; /* likewise: memory that it uses was invalidated */
    tb_status status;        /* of one that failed; the sentence is in `why` */
    char why[TB__WHY_MAX];
    uint64_t attempt; /* 0: not begun */
    uint64_t number;  /* of a send: what it is called, as far as this rank knows */
    bool is_released, is_arrived, is_committed;
    bool is_complete; /* it has all that it needs from others, and ends well */
    int64_t bytes_done, bytes_total;
    uint32_t groups_done, groups_total;
    size_t in_flight;    /* staged messages */
    size_t ncopying;     /* copies under way, in ... */
    tb_phase copy_phase; /* ... this phase */
    bool is_ending;      /* when the last of them is done */
    int64_t wake_ms;     /* it wants to be stepped then; 0: no time of its own */
    int64_t stuck_ms;    /* if it ends: copies that are not done by then are given up with their memory */
    int64_t acks_ms;     /* until when it waits for acknowledgements */
    tb__fault failure;   /* it has failed, and waits a little for who can say why */
    tb__phases *phases;
} tb__leg;

tb__leg *tb__flow_leg(tb__flow *flow, bool is_send);

static inline bool tb__leg_has_ended(const tb__leg *leg) {
    return !leg->is_under_way && !leg->awaits_abort_acks;
}

/* Begins the next transfer. Its end, good or bad, is told by the leg. `number` is what a send is called: all are told
 * that of the rank which issues attempts. It grows from one to the next. Other senders count for themselves: by that
 * they know a transfer of theirs that was given up before they came, and don't send it as the next one. */
void tb__flow_begin(tb__flow *flow, bool is_send, uint64_t number, tb__phases *phases);

/* Whether a transfer can begin: one that peers are in already, where some of them are gone. */
bool tb__flow_may_begin(const tb__flow *flow, bool is_send);

/* Whether senders have begun a transfer that this rank has not received yet, and that was not given up. */
bool tb__flow_is_offered(const tb__flow *flow);

/* What an attempt is called; 0: it has not begun. */
uint64_t tb__flow_number(const tb__flow *flow, uint64_t attempt);

/* Does what can be done; returns whether it did anything. */
bool tb__flow_step(tb__flow *flow, bool is_send);

/* Fails the leg, here and at the peers, for this reason. Nothing of it is read or written when this returns, unless a
 * step is under way. One that is prepared stays under way; its owner is told. It has ended when
 * the peers have confirmed that they heard of it: then a receive that begins later, anywhere, does not fail by it. */
void tb__flow_abort(tb__flow *flow, bool is_send, tb_status status, const char *why);

/* The program has taken memory of tensors away (src_invalidated, dst_invalidated). Asks the legs that use it to end, by
 * name. Returns whether one of them may still read or write it, of which `tensor` is the name then. A later leg fails
 * before it uses the memory. */
bool tb__flow_mark_invalidated(tb__flow *flow, const char **tensor);

/* Adds to the sentence who is being waited for, and for what. */
void tb__flow_describe_wait(tb__flow *flow, bool is_send, char *out, size_t room);

/* Tells another rank something about a group that is complete. */
void tb__flow_note(tb__flow *flow, int32_t rank, uint64_t attempt, tb__pack *note);

/* What this rank sends or receives, piece by piece, and how: directly, by a copy out of a bucket, or by a
 * transformation. TB_REFUSED before both sides know. */
tb_status tb__flow_dump(const tb__flow *flow, bool is_send, char **out);

/* Copies the shadow of the last receive that was prepared into the tensors, and tells the senders. The receive is under
 * way, or was discarded without being aborted. TB__SHADOW_APPLIED says how it went, maybe before this returns. Lets go
 * of the lock. */
void tb__flow_apply(tb__flow *flow);
/* Ends the prepared receive; the tensors keep what they hold. If it is aborted, all ranks are told that it has failed.
 * Otherwise others may have applied it, and only the senders hear that this rank has not. */
void tb__flow_discard(tb__flow *flow, bool is_aborted, tb_status status, const char *why);
/* That the attempt was given up, for legs that have it, or will. */
void tb__flow_note_abort(tb__flow *flow, uint64_t attempt, uint64_t number, tb_status status, const char *why);

/* Sends a member a message of the owner's; takes over what is packed. If it can't be sent, the flow breaks, soon. */
void tb__flow_send(tb__flow *flow, size_t member, tb__pack *message);

/* The last attempt that is in this rank's targets; torn: a later one has written a part of them. */
uint64_t tb__flow_version(const tb__flow *flow, bool *is_torn);

/* Tests: called with the bytes of each bucket that came, before they are looked at. NULL: nobody is. */
extern void (*tb__flow_on_arrival)(void *bytes, size_t nbytes);

/* All groups up to this one have been taken by the host: room for more in the window. UINT32_MAX: all. */
void tb__flow_take_groups(tb__flow *flow, uint32_t group);
/* Whether all groups up to this one have arrived. */
bool tb__flow_has_group(const tb__flow *flow, uint32_t group);

#endif
