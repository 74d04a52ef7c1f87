/* A flow: this process's part in moving the tensors of a batch from one group of ranks to another, in one direction.
 * The process may be on the sending side, on the receiving side, or on both.
 *
 * Set-up, the first time: each rank plans on its own. A rank whose tensors others read (a *sender*) tells its readers
 * where they are (BIND). A reader tests which it can read directly, and answers with the buckets that must be staged
 * for it (REACH).
 *
 * Then, for each transfer: the first rank of the sending side issues its number (START). Senders say READY; readers
 * copy straight from the senders' memory. Staged buckets are packed into staging memory and announced (BUCKET). Readers
 * that can map that memory read it there (TAKEN); others ask for the bucket (GO), and it is sent. A reader that has all
 * data of a sender completes its exposure, by compare-and-set in the sender's memory, and sends DONE. A rank that fails
 * revokes its exposures and sends ABORT to all, who acknowledge it (ABORT_ACK).
 *
 * A receive may be *shadowed*: data lands in separate memory. When it is complete the receive is *prepared*, and does
 * not end on its own any more: the flow's owner has it applied (the data is copied into the tensors, and the senders
 * get COMMITTED) or discarded.
 *
 * If a rank's targets overlap its sources, its readers first copy these sources to a buffer, the *stash* (STASHED); the
 * rank writes nothing before all have.
 *
 * Copies are asynchronous: a step submits them to devices, and a later call of the loop's driver continues with their
 * result. A leg that fails ends when its last copy is done.
 *
 * All of this needs the loop's lock. A step releases it while it calls functions of the user. */
#ifndef TB_FLOW_FLOW_H
#define TB_FLOW_FLOW_H

#include "loop/comm.h"
#include "loop/stream.h"
#include "tensorbus/plan.h"

typedef struct tb__flow tb__flow;

/* How a coded tensor is converted to and from its wire form: by moves, or by a function of the user. Without either,
 * its elements are copied. */
typedef struct tb__codec {
    void *arg;
    bool reads_more; /* list_pack reads other memory than src, so that there can be no snapshot */
    bool packs_rows; /* list_pack can only read rows whose elements lie side by side */
    /* call_unpack waits until all of the tensor's group has arrived; then the group's are called one after the other,
     * by tensor and place in the target. Only for tensors whose chunks are whole (tb_tensor_spec). */
    bool unpacks_last;
    /* Lists the moves between a chunk's box and its wire form, which is in the buffer of a run, from `offset` on. The
     * base of `src` is relative to `mapping`, unless that is NULL. */
    tb_status (*list_pack)(void *arg, const tb_chunk *chunk, const tb_binding *src, tb__mapping *mapping,
                           int64_t offset, tb__move_list *out);
    tb_status (*list_unpack)(void *arg, const tb_chunk *chunk, int64_t offset, tb__move_list *out);
    /* Called without the lock. The chunk's box is in host memory, and so is `wire`, which has the chunk's nbytes. */
    tb_status (*call_pack)(void *arg, const tb_chunk *chunk, const tb_binding *src, void *wire);
    tb_status (*call_unpack)(void *arg, const tb_chunk *chunk, const tb_binding *dst, const void *wire);
} tb__codec;

/* The next step with a gathered group. */
typedef enum tb__gather_step {
    TB__GATHER_MEASURE, /* find its largest magnitudes, then ask again */
    TB__GATHER_WAIT,    /* wait for another rank */
    TB__GATHER_WRITE,   /* write the targets, the last step */
} tb__gather_step;

/* Tensors that are gathered first, and written when all of their group has arrived. A group's pieces are gathered in a
 * *slot*, in the target's dtype: the band of each tensor, row-major, at its slot_offset. A group whose chunks can all
 * be converted by themselves, where the senders have them, needs no slot. */
typedef struct tb__gather {
    size_t slots_nbytes; /* the most that all slots may have; 0: no tensor is gathered */
    void *arg;
    /* All functions are called with the lock held. */
    /* The size of a slot for the group; fails if that is too much. */
    tb_status (*measure_slot)(void *arg, uint32_t group, size_t *nbytes);
    void (*begin)(void *arg); /* a receive begins: nothing is measured yet */
    /* Lists the moves of a step of MEASURE or WRITE. Without a slot, only those that do not concern chunks. */
    tb_status (*list)(void *arg, uint32_t group, tb__gather_step step, const char *slot, tb__move_list *out);
    /* The same for a chunk, which begins at `src` and has these strides there; see tb__move for the mapping. */
    tb_status (*list_chunk)(void *arg, const tb_chunk *chunk, tb__gather_step step, const void *src,
                            const int64_t *strides, tb__mapping *mapping, tb__move_list *out);
    bool (*can_list_chunk)(void *arg, const tb_chunk *chunk, const int64_t *strides);
    bool (*must_measure)(void *arg, uint32_t group);
    /* `is_measured`: the chunks of the group have been, one by one. */
    tb_status (*next)(void *arg, tb__flow *flow, uint64_t attempt, uint32_t group, bool is_measured,
                      tb__gather_step *out);
    int32_t (*awaits)(void *arg); /* the rank that WAIT waits for, or TB_NO_RANK */
    /* A message that another rank sent by tb__flow_send_gather_message. False: it is malformed. */
    bool (*on_message)(void *arg, int32_t rank, uint64_t attempt, tb__unpack *message);
} tb__gather;

typedef enum tb__shadow_event {
    TB__SHADOW_PREPARED,  /* the receive is complete, and stays under way until it is applied or discarded */
    TB__SHADOW_WOULD_END, /* the prepared receive would have failed, for this reason; reported once */
    TB__SHADOW_FAILED,    /* the receive fails, for this reason; other ranks are told afterwards */
    TB__SHADOW_APPLIED,   /* tb__flow_apply is done: TB_OK, or why the tensors do not hold the data */
} tb__shadow_event;

/* The owner of shadowed receives, who decides whether prepared ones are applied. */
typedef struct tb__shadow {
    bool is_used; /* otherwise receives are not shadowed */
    void *arg;
    /* Called with the lock, by the thread that steps, ends or breaks the receive. */
    void (*event)(void *arg, tb__shadow_event event, uint64_t attempt, tb_status status, const char *why);
    /* Whether the receive, prepared or not, can't be applied without this member. With the lock. */
    bool (*needs)(void *arg, uint64_t attempt, size_t member);
    /* Called before the tensors are written and, if that succeeded, after. Without the lock. */
    void (*applying)(void *arg, bool is_done);
    /* Lists moves from the owner's own shadows (has_own_shadow) to their tensors. */
    tb_status (*list)(void *arg, tb__move_list *out);
} tb__shadow;

/* A tensor and where this process has its parts. The spec's pointers are borrowed. */
typedef struct tb__flow_tensor {
    uint64_t key; /* identifies it in messages; ascending in a flow */
    tb_tensor_spec spec;
    tb_binding src, dst;    /* local shapes are set, also where they are empty. Dtypes may differ from the spec's where
                               it is coded or gathered */
    const tb__codec *codec; /* of a coded tensor; borrowed */
    bool is_gathered;
    bool has_own_shadow; /* in a shadowed receive, the owner copies it to the target */
    size_t slot_offset;
    const tb_binding *padding; /* around the target: a receive sets it to zero; borrowed */
    size_t npadding;
    const bool *src_invalidated,
        *dst_invalidated;                  /* set while the program has invalidated its memory; borrowed. NULL: never */
    const intptr_t *src_shift, *dst_shift; /* what tb__flow_rebind adds to its address; borrowed. NULL: nothing */
} tb__flow_tensor;

typedef struct tb__flow_opts {
    tb__loop *loop;
    int32_t rank;
    uint32_t direction;     /* part of each message, so that several flows can share a port */
    tb__peer *const *peers; /* all ranks of both sides, each once, ascending, this one too; borrowed */
    const uint32_t *ports;  /* theirs; borrowed */
    size_t npeers;
    tb__comm *comm;   /* that carries buckets in memory of its device; NULL: none. Borrowed */
    size_t lead;      /* position of the peer that issues numbers; npeers: no peer does ... */
    uint64_t started; /* ... beyond this one, which all know of */
    const tb__flow_tensor *tensors;
    size_t ntensors; /* by key */
    tb_ir *ir; /* a ready plan of this rank; owned by the flow once that is created. NULL: to be planned, which needs
                  tensors sorted by name, too */
    /* Makes a plan, or shares an existing one; called once, when the flow is first used. NULL: tb_ir_create */
    tb_status (*get_ir)(void *arg, const tb_tensor_spec *specs, size_t nspecs, const tb_ir_opts *opts, tb_ir **out);
    void *get_ir_arg;
    tb_plan_cache *cache;
    const int32_t *hosts; /* machine of each rank; NULL: all on one */
    size_t nhosts;
    const char *what; /* the flow's name in messages: "batch 'step'"; borrowed */
    int64_t bucket_size, staging_bytes;
    int64_t own_staging_bytes; /* this rank's own limit; staging_bytes is the smallest of both sides */
    uint32_t max_in_flight;
    uint32_t group_window; /* 0: all */
    tb__gather gather;
    const uint32_t *user_groups; /* by group, ascending: the program's number of it; NULL: the same. Borrowed */
    bool staged, snapshot;
    bool checksum;            /* the same on all ranks */
    bool targets_are_mirrors; /* the owner writes them back after a successful receive; so a failed one leaves no tensor
                                 torn */
    _Atomic uint32_t *mark;   /* set before targets that are no mirrors are written; NULL: none */
    tb__shadow shadow;
    /* Called as buckets of this rank advance, with the lock held; steps may be left out. NULL: none. */
    void (*on_bucket)(void *arg, size_t bucket, tb_bucket_step step);
    void *on_bucket_arg;
} tb__flow_opts;

/* Plans nothing yet. */
tb_status tb__flow_create(const tb__flow_opts *opts, tb__flow **out);
/* False: a device has not finished a copy, or a transport has not given a message back. The memory that they use is
 * kept, for good in the case of a message, and the owner must not free the tensors' memory either. */
bool tb__flow_destroy(tb__flow *flow);

/* Handles a message of a peer, which begins with its kind. False: it is not valid; tb_error_detail may say why. */
bool tb__flow_message(tb__flow *flow, size_t peer, tb__unpack *message);

/* How a rank's last transfer failed. */
typedef struct tb__failure {
    tb_status status; /* TB_OK: it has not */
    const char *why;  /* never NULL */
    uint64_t attempt; /* 0: none, or one that other ranks may have committed */
    uint64_t number;
} tb__failure;

/* A peer takes no further part. Transfers that do not need it any more continue, others fail, and none begins. Either
 * it is lost; or it reports that another peer is lost; or it has left in an orderly way. Then it says how many
 * transfers had started, as far as it knew, and how its last one failed, which may be news to this rank. */
void tb__flow_on_peer_lost(tb__flow *flow, size_t peer);
void tb__flow_on_peer_failed(tb__flow *flow, size_t peer, const char *why);
void tb__flow_on_peer_left(tb__flow *flow, size_t peer, uint64_t started, const tb__failure *last);

tb__failure tb__flow_last_failure(const tb__flow *flow);
uint64_t tb__flow_started(const tb__flow *flow);

/* Makes current and later transfers fail with this reason, on all ranks. */
void tb__flow_break(tb__flow *flow, tb_status status, const char *why);

/* The time of a transfer by phase; at any moment it is in exactly one. */
typedef struct tb__phases {
    double seconds[TB_PHASE_COUNT];
    double since;
    tb_phase now;
} tb__phases;

void tb__phases_enter(tb__phases *phases, tb_phase phase);

enum { TB__WHY_MAX = 512 };

/* A failure with its message, for failures that outlive a call or go to another thread: tb_error_detail belongs to the
 * last failed call of its thread only. */
typedef struct tb__fault {
    tb_status status; /* TB_OK: none */
    char why[TB__WHY_MAX];
} tb__fault;

tb__fault tb__fault_of(tb_status status, const char *why);

/* A leg: this rank's send or receive of one transfer. Only leg.c and attempt.c write it; programs of the flow read it.
 */
typedef struct tb__leg {
    bool is_under_way;
    bool awaits_abort_acks;  /* it has failed, and waits until its peers have acknowledged that */
    bool awaits_choice;      /* of a receive: it takes no attempt before tb__flow_choose */
    bool is_cancelled;       /* set by any thread; the next step ends the leg */
    bool memory_invalidated; /* likewise, because memory that it uses was invalidated */
    tb_status status;        /* TB_OK, or why it failed, with a message */
    char why[TB__WHY_MAX];
    uint64_t attempt; /* 0: none yet */
    uint64_t number;  /* the transfer number */
    bool is_released, is_arrived, is_committed;
    bool is_complete; /* it needs nothing from other ranks any more, and succeeds */
    int64_t bytes_done, bytes_total;
    uint32_t groups_done, groups_total;
    size_t in_flight;    /* messages of staged buckets */
    size_t ncopies;      /* copies under way, in ... */
    tb_phase copy_phase; /* ... this phase */
    bool is_ending;      /* it ends when the last copy is done */
    int64_t begun_ms;
    int64_t wake_ms;   /* it must be stepped at this time; 0: none */
    int64_t stuck_ms;  /* of a leg that is ending: copies that are not done by then are given up with their memory */
    int64_t acks_ms;   /* how long it waits for acknowledgements */
    tb__fault failure; /* it has failed, and waits REASON_MS for a rank that reports the cause */
    tb__phases *phases;
} tb__leg;

tb__leg *tb__flow_leg(tb__flow *flow, bool is_send);
void tb__leg_cancel(tb__leg *leg); /* its next step ends it */

static inline bool tb__leg_has_ended(const tb__leg *leg) {
    return !leg->is_under_way && !leg->awaits_abort_acks;
}

/* Begins the next transfer; the leg shows its progress. `number` is the transfer number of a send, and ascends. The
 * lead's number is valid, and is sent to all. Other senders count along, so that they recognise a transfer of theirs
 * that failed before they began it, and do not send it as the next one. */
void tb__flow_begin(tb__flow *flow, bool is_send, uint64_t number, tb__phases *phases);

/* Plans, and tells the readers where the tensors are: what the first send would begin with. A reader that hears of it
 * before the first receive maps the memory, and fills its page tables in the background. */
void tb__flow_prepare_send(tb__flow *flow);

/* The receive that has just begun takes the attempt that tb__flow_choose names, and no other. It skips attempts that
 * were superseded, and fails with those that failed otherwise. */
void tb__flow_await_choice(tb__flow *flow);
void tb__flow_choose(tb__flow *flow, uint64_t attempt);
/* The next attempt to receive, if it has started, and its number. */
bool tb__flow_get_offer(const tb__flow *flow, uint64_t *attempt, uint64_t *number);
bool tb__flow_is_aborted(const tb__flow *flow, uint64_t attempt); /* as far as this rank knows */
/* Fails an attempt on all ranks (TB_SUPERSEDED) that this rank does not receive. */
void tb__flow_supersede(tb__flow *flow, uint64_t attempt, const char *why);

/* The next send reads this rank's tensors, or the next receive writes them, after this point; NULL: at once. Holds for
 * a receive that is applied later, too. */
void tb__flow_set_stream_point(tb__flow *flow, bool is_send, tb__stream_point *point);

/* Whether a transfer can begin. If a peer is gone, only one that others have started. */
bool tb__flow_may_begin(const tb__flow *flow, bool is_send);
/* Fails if a peer has reported that another one is lost. */
tb_status tb__flow_check_loss(const tb__flow *flow);

/* Whether senders have started a transfer that this rank has not received and that has not failed. */
bool tb__flow_is_offered(const tb__flow *flow);

/* The transfer number of an attempt; 0: it has not started. */
uint64_t tb__flow_number(const tb__flow *flow, uint64_t attempt);

/* Whether all data of the receive has arrived, or is being written by copies that have begun on this device. */
bool tb__flow_has_begun_writes(const tb__flow *flow, const tb__device *device);

/* Fences of copies, which stay valid while they are held, also if the flow is destroyed. Zero-initialised: none. */
typedef struct tb__held_fences {
    TB_VEC(const tb__fence *) fences;
    TB_VEC(struct copy_op *) ops;
} tb__held_fences;

/* Adds those of the receive's copies that write tensors. Release them also if this fails. */
tb_status tb__flow_hold_writes(tb__flow *flow, tb__held_fences *held);
void tb__held_fences_release(tb__held_fences *held);

/* Makes progress where possible; returns whether it did. */
bool tb__flow_step(tb__flow *flow, bool is_send);

/* Fails the leg, here and at the peers, for this reason. Tensors are accessed until the leg is not under way any more:
 * it ends when its last copy is done. A prepared receive stays under way; its owner gets TB__SHADOW_WOULD_END. The leg
 * has ended when the peers have acknowledged it, so that no later receive fails for this reason. */
void tb__flow_abort(tb__flow *flow, bool is_send, tb_status status, const char *why);

/* Fails a receive that has no attempt, on this rank alone: what is sent later is not affected. */
void tb__flow_fail_waiting(tb__flow *flow, tb_status status, const char *why);

/* The program has invalidated the memory at first .. last-1, which is memory of tensors (src_invalidated,
 * dst_invalidated). Makes the legs that use it fail in their next step; later legs fail before they use it. Returns
 * whether the memory may still be accessed; *tensor names a tensor in it. */
bool tb__flow_mark_invalidated(tb__flow *flow, uintptr_t first, uintptr_t last, const char **tensor);

/* Tensors are at other addresses: each at its old one plus its src_shift, dst_shift. No transfer is under way. Call the
 * check first, for all flows that they are in: TB_REFUSED, with nothing changed, if the plan does not fit any more.
 * Then the change: readers get the new addresses before this rank's next transfer begins. A failure of it breaks the
 * flow. */
tb_status tb__flow_check_rebind(tb__flow *flow);
void tb__flow_rebind(tb__flow *flow);
/* Whether a message of an earlier transfer may still be sent from tensors, or received into them. */
bool tb__flow_holds_tensors(const tb__flow *flow);

/* Writes which ranks the leg waits for, and for what. */
void tb__flow_describe_wait(tb__flow *flow, bool is_send, char *out, size_t room);

/* Sends another rank a message for its tb__gather.on_message. */
void tb__flow_send_gather_message(tb__flow *flow, int32_t rank, uint64_t attempt, tb__pack *message);

/* Lists what this rank sends or receives, piece by piece, and how: directly, by a copy out of a bucket, or converted.
 * TB_REFUSED before the first transfer has decided that. */
tb_status tb__flow_dump(const tb__flow *flow, bool is_send, char **out);

/* A copy of the plan, which is made now if it has not been. */
tb_status tb__flow_copy_ir(tb__flow *flow, tb_ir **out);

/* Copies the shadow of the last prepared receive into the tensors, and tells the senders. The receive is under way, or
 * was discarded without being aborted. TB__SHADOW_APPLIED reports the result, when the copy is done or before this
 * returns. Releases the lock while it calls `applying`. */
void tb__flow_apply(tb__flow *flow);
/* Does not wait any longer for the device that copies the shadow: TB__SHADOW_APPLIED reports TB_TIMEOUT, and the flow
 * breaks. */
void tb__flow_give_up_apply(tb__flow *flow);
/* Ends the prepared receive; the tensors keep what they hold. If it is aborted, all ranks are told that it has failed.
 * Otherwise others may have applied it, and only the senders hear that this rank has not. */
void tb__flow_discard(tb__flow *flow, bool is_aborted, tb_status status, const char *why);
/* Records that the attempt has failed: its legs, now or later, fail with this reason. */
void tb__flow_record_abort(tb__flow *flow, uint64_t attempt, uint64_t number, tb_status status, const char *why);

/* The version in this rank's targets; torn: a later transfer has failed after it had written a part of them. */
uint64_t tb__flow_version(const tb__flow *flow, bool *is_torn);

/* For tests: called with the bytes of each received bucket, before they are checked. */
extern void (*tb__flow_on_arrival)(void *bytes, size_t nbytes);

/* The program has taken all groups up to this one, which makes room in the window. UINT32_MAX: all, as they arrive. */
void tb__flow_take_groups(tb__flow *flow, uint32_t group);
/* Whether all groups up to this one have arrived. */
bool tb__flow_has_group(const tb__flow *flow, uint32_t group);

#endif
