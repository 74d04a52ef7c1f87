/* The structs behind the public objects that move tensors, guarded by the lock of the world's loop:
 *
 *   world     loop + directory
 *   pair      two groups that have found each other: their peers and layouts
 *   batch     tensors; for each pair an *exchange*, in which its ranks agree on them; in each exchange two flows
 *   transfer  the legs of one or more flows, stepped as one task */
#ifndef TB_BUS_WORLD_H
#define TB_BUS_WORLD_H

#include "base/mem.h"
#include "bus/commit_log.h"
#include "bus/directory.h"
#include "bus/handshake.h"
#include "bus/ops.h"
#include "flow/flow.h"
#include "reshard/encode.h"
#include "tensorbus/plan.h"

#include <stdatomic.h>

typedef struct tb__membership {
    char *group;
    int32_t index, size;
} tb__membership;

typedef struct tb__exchange tb__exchange;
typedef struct tb__engine tb__engine;

/* A cache of plans of models, found by all that a plan is made from. */
typedef struct tb__plans {
    TB_VEC(struct tb__kept_plan {
        uint64_t hash;
        tb__pack key;
        tb_ir *ir;
        uint64_t used; /* when, by the clock */
        size_t nbytes; /* of key and plan */
    })
    kept;
    size_t nbytes; /* of all of them */
    size_t limit;  /* the bound on it and on the cache of single tensors' plans, together */
    uint64_t clock, hits, misses, evicted;
} tb__plans;

enum { TB__LEAST_STAGING = 64 << 10 }; /* staging_bytes of any rank */

/* A batch or copy service with tensors in the program's memory. */
typedef struct tb__memory_user tb__memory_user;
struct tb__memory_user {
    /* The program invalidates the bytes from `first` to `last`. Marks the tensors in them for good, and asks transfers
     * that use them to end. Returns whether something may still use them, which `still` then names. Called again until
     * nothing does. With the lock held. */
    bool (*invalidate)(tb__memory_user *user, uintptr_t first, uintptr_t last, char *still, size_t room);
    tb__memory_user *next;
};

struct tb_world {
    tb__bus_object base; /* first */
    atomic_size_t refs;  /* the user's, and one for each pair, batch and copy service that the user has */
    tb__loop *loop;
    _Atomic bool is_ready; /* `loop` is set; read by the directory's thread */
    tb__directory *directory;
    tb__commit_log *commit_log; /* NULL: no decision was needed yet */
    int32_t rank;
    uint64_t incarnation;
    int timeout_ms;
    int workers; /* 0: chosen by tb__world_set_workers */
    tb__port port;
    TB_VEC(tb__membership) memberships; /* its seats; the first is the one it joined with */
    tb_plan_cache *cache;
    tb__plans plans;
    tb_pair *pairs;       /* those that are not destroyed */
    uint32_t last_serial; /* of pairs; with the lock held */
    tb__memory_user *memory_users;
    TB_VEC(struct tb__round {
        char *pair;
        uint32_t round;
    })
    rounds;           /* see pair.c */
    uint64_t nnonces; /* drawn by this process */
    tb__handshake *handshakes;
    TB_VEC(tb__early_manifest) early;
    void (*at_end)(void *arg); /* last of all; NULL: nothing */
    void *at_end_arg;
    tb_world *next; /* of those that a forked child has destroyed */
};

/* As tb_world_join, where the caller knows whether all ranks are on one machine. */
TB_API tb_status tb__world_create(const char *url, const char *group, int32_t index, int32_t size, bool is_local,
                                  const tb_world_opts *opts, tb_world **out);
/* Calls `at_end` when the world has ended, in whichever thread that is. Must be set before another thread has the
 * world. */
TB_API void tb__world_at_end(tb_world *world, void (*at_end)(void *arg), void *arg);

/* TB_REFUSED, with `what`, if an agent has the world's seat. */
tb_status tb__world_check_local(const tb_world *world, const char *what);
/* TB_REFUSED in a forked child, for an object of the world: public calls check this first. `what` names the object. */
tb_status tb__world_check(const tb_world *world, const char *what);
/* In a forked child, destroying an object only frees its own memory, if no thread was changing the object at the fork.
 * What the parent's threads use is kept: the world, the loop and the directory. */
bool tb__world_is_inherited(const tb_world *world);
bool tb__world_was_unlocked(const tb_world *world);

/* Objects made in a world hold a reference; the last one ends the world. Without the lock. */
void tb__world_ref(tb_world *world);
void tb__world_unref(tb_world *world);
/* Makes all waiting calls check their conditions again. Without the lock. */
void tb__world_wake_waiters(tb_world *world);
/* Has what this process tells in the store of batches that it leads written again, soon: see world_report.c. Any
 * thread, with or without the lock. */
void tb__world_report(tb_world *world);
/* The directory's thread asks for it. Without the lock. */
void tb__world_add_report(void *world, tb__text *out);
/* The deadline of a call that was given a timeout; 0 is the world's. */
int64_t tb__world_deadline(const tb_world *world, int timeout_ms);
const tb__membership *tb__world_find_membership(const tb_world *world,
                                                const char *group); /* NULL: this process is not in the group */
/* Sets the number of copying threads from the machine's cores and the ranks on it. Without the lock. */
void tb__world_set_workers(tb_world *world);
/* Makes the process in the seat known to the loop (tb__loop_meet). The label is used if the loop has not met the
 * process before. With the lock held. */
tb_status tb__world_meet(const tb_world *world, const char *group, const tb__roster *roster, int32_t seat,
                         tb__peer **out);
enum { TB__CONNECT_AGAIN_MS = 200 }; /* between attempts to connect with a rank that was lost */
/* "rank 3 (trainer 1)" */
typedef struct tb__label {
    char text[TB__DIRECTORY_MAX_NAME + 48];
} tb__label;
tb__label tb__label_of(int32_t rank, const char *group, int32_t seat);
/* "0, 4 and 3 more", the empty seats; false: there are none. */
bool tb__world_name_missing(const tb__roster *roster, char *out, size_t room);

/* TB_REFUSED if the bytes are not on the named device; NULL: any device will do. */
tb_status tb__world_check_memory(const tb_world *world, const char *device, const void *address, size_t nbytes);

/* As tb_world_invalidate. */
tb_status tb__world_invalidate_until(tb_world *world, const void *base, size_t nbytes, int64_t deadline_ms);
/* With the lock held. */
void tb__world_add_user(tb_world *world, tb__memory_user *user);
void tb__world_remove_user(tb_world *world, tb__memory_user *user);
/* Whether the span from a binding's first to its last element overlaps these bytes. */
bool tb__binding_overlaps(const tb_binding *binding, uintptr_t first, uintptr_t last);

/* The IR of this rank for these tensors, from the cache or newly planned. For flows, whose `arg` is the world; with the
 * lock held. */
tb_status tb__plans_get(void *world, const tb_tensor_spec *specs, size_t nspecs, const tb_ir_opts *opts, tb_ir **out);
void tb__plans_fini(tb__plans *plans);

/* The layout of a pair that was made without one: seat i sends to seat i, and each seat's tensors are its own. They are
 * planned as tensors that only this seat has. Names of other seats' tensors do not matter: tensor 'w' of seat 2 is
 * 'w@2' to the others. */
#define TB__NO_LAYOUT "none"
bool tb__pair_has_layout(const char *layout);
/* The layout, in seats, of a tensor that has none of its own. */
tb_status tb__pair_layout_parse(const char *layout, int32_t seat, tb_layout **out);

/* Sides are ordered by the names of their groups, so that all ranks number them alike. */
typedef struct tb__pair_side {
    char *group;
    int32_t size;
    tb__peer **peers; /* by seat */
    char *layout;     /* in seats */
} tb__pair_side;

struct tb_pair {
    tb__bus_object base; /* first */
    tb_world *world;
    char *name;
    tb__pair_side sides[2];
    int side;      /* this process's */
    int32_t index; /* its seat there, of so many */
    int32_t size;
    uint32_t round;
    uint32_t serial; /* tells requests of this process apart */
    uint64_t hinted; /* state of the pair that the others know of; 0: not complete, and nobody disagrees */
    tb_pair *next;
    bool is_connected; /* sizes, peers and layouts of both sides are known, and all ranks have answered */
    size_t refs;       /* the user's, and one for each exchange, and each batch that has it */
};

/* By the directory's thread: tells the ranks of pairs that this process leads when they have to look at the notes. */
void tb__pairs_hint(tb_world *world);
/* Whether the note requests a pair. A lead that does so follows all changes, and hints at them. */
bool tb__pair_is_request(const tb__note *note);
void tb__pair_unref(tb_pair *pair); /* with the lock held */
/* Waits until all ranks have requested the pair, are connected, and have answered. Without the lock. */
tb_status tb__pair_connect(tb_pair *pair, int64_t deadline_ms, const atomic_bool *cancelled);
/* Which ranks have not requested a pair that this process is making: "only 1 of 2 ranks of group 'a' have come; ...";
 * "" if none is missing. Without the lock. */
void tb__pair_describe_wait(tb_world *world, const char *name, char *out, size_t room);
/* Waits until all ranks of a connected pair have answered since the call began. TB_LOST if a connection is lost;
 * TB_CANCELLED once *cancelled is set and the world was woken. Without the lock. */
tb_status tb__pair_ping(tb_pair *pair, int64_t deadline_ms, const atomic_bool *cancelled);
/* Whether a rank was lost, has left the pair, or has made it again with another layout, so that it has to be made again
 * here. Without the lock. */
bool tb__pair_is_stale(const tb_pair *pair);
/* A side's layout, in bus ranks; `text` NULL: the pair's. */
tb_status tb__pair_layout(const tb_pair *pair, int side, const char *text, tb_layout **out);

/* Losses: losses.c. */

enum { TB__WORLD_LOST = 16 }; /* a message to the world's port, beside those of handshakes */
/* Tells the peer who is lost, as far as this process knows. With the lock held. */
void tb__losses_tell(tb_world *world, tb__peer *to);
/* The same to all that it is connected with, if it is the lead of a group. */
void tb__losses_tell_all(tb_world *world);
/* Such a message. It counts for ranks of pairs that `from` leads, if this process is not connected with them. */
void tb__losses_on_message(tb_world *world, const tb__peer *from, tb__unpack *message);

/* The memory areas of a tensor. */
enum { TB__DATA, TB__SCALES, TB__SCALE, TB__MEMORIES };

/* Which memory areas of a tensor are mirrors of a client's memory; and of which the client's address is known, and what
 * to add to an address here for the client's. Zero: none is. */
typedef struct tb__mirrored {
    bool is_mirror[TB__MEMORIES], is_known[TB__MEMORIES];
    uint64_t shift[TB__MEMORIES];
    const void *file[TB__MEMORIES];    /* of the client that a mirror is of; NULL: of its address */
    uint64_t file_shift[TB__MEMORIES]; /* what to add to an address here for the place in it */
    bool is_all;                       /* all of its areas are mirrors */
    const char *device; /* that the client has its data on, for reports: "cuda:0 (copied by the client)"; NULL: unknown
                         */
} tb__mirrored;

/* A tensor that this process has added to a batch. */
typedef struct tb__added_tensor {
    tb_pair *pair;
    char *name;
    tb_shape shape; /* global */
    tb_dtype dtype, wire_dtype;
    uint32_t group;
    char *layout; /* in seats; NULL: the pair's */
    tb_binding binding;
    tb_binding *padding; /* boxes of its storage, to be set to zero when it is received */
    size_t npadding;
    char *encode;                  /* NULL: it is not quantised */
    char *scale_group;             /* NULL: none */
    tb__encoded encoded;           /* where it is, if this rank has some of it */
    bool is_transformed, is_whole; /* by a transform; and that wants its pieces whole */
    void *data;                    /* that it was added with, or has moved to */
    intptr_t shift;                /* while it is being moved: the distance */
    bool is_invalidated;           /* its memory was */
    bool is_on_host;               /* its data or scales are, at least in part */
    tb__device *device;            /* other than the host that they are on; NULL: none */
    int unit;                      /* of the device */
    uint64_t memory_kind;          /* of its data (device.h); 0: this rank has none of it */
    tb__mirrored mirrored;
} tb__added_tensor;

tb_status tb__added_tensor_init(tb__added_tensor *tensor, tb_pair *pair, const char *name, const tb_tensor *given,
                                const tb_transform *transform);
void tb__added_tensor_fini(tb__added_tensor *tensor);
/* Adds its shift, or takes it away again, from where it is bound. */
void tb__added_tensor_shift(tb__added_tensor *tensor, bool back);
/* TB_REFUSED if it can't be at its address plus `shift` in what was agreed on. */
tb_status tb__added_tensor_check_shift(const tb__added_tensor *tensor);

struct tb_batch {
    tb__bus_object base; /* first */
    atomic_size_t refs;  /* the user's, and one for each of its transfers */
    tb_world *world;
    char *name;
    tb_batch_opts opts;
    tb_transform transform;             /* to which opts points, if there is one */
    tb__pack matching;                  /* ties and ignored patterns, packed for the tensor lists */
    TB_VEC(tb_pair *) pairs;            /* in which it takes part */
    TB_VEC(tb__added_tensor *) tensors; /* exchanges point to them */
    TB_VEC(tb__exchange *) exchanges;   /* one for each pair that was registered */
    TB_VEC(tb__engine *) engines;       /* one for each group that this process receives for */
    uint64_t epoch;
    tb_transfer *sending, *receiving;
    tb__memory_user memory;
    uint64_t nsends;         /* sends begun by this process */
    int64_t ended;           /* the time when its last transfer ended, in seconds since 1970; 0: none has */
    uint64_t common_version; /* the last version that all pairs had at the same time */
    size_t nstarting;        /* calls that are about to begin a transfer */
    _Atomic uint32_t *mark;  /* set before a receive writes the tensors; NULL: nobody looks at it */
    bool is_delivered_later; /* received tensors are copied elsewhere: see tb__transfer_delivered */
};

/* The versions that the pairs of a batch have. */
typedef struct tb__versions {
    uint64_t lowest, highest;
} tb__versions;

#define TB__NO_VERSIONS                                                                                                \
    { UINT64_MAX, 0 }

static inline void tb__versions_add(tb__versions *v, uint64_t version) {
    v->lowest = version < v->lowest ? version : v->lowest;
    v->highest = version > v->highest ? version : v->highest;
}

static inline bool tb__versions_differ(const tb__versions *v) {
    return v->lowest < v->highest;
}

/* Updates *common_version, the last version that all pairs had at the same time; 0 if a pair has none. */
static inline void tb__versions_update_common(const tb__versions *v, uint64_t *common_version) {
    if (v->lowest == v->highest || v->lowest == 0)
        *common_version = v->lowest;
}

void tb__batch_unref(tb_batch *batch); /* without the lock */
/* Whether memory of its tensors was invalidated. Without the lock. */
bool tb__batch_has_invalidated(const tb_batch *batch);
bool tb__batch_invalidate(tb__memory_user *user, uintptr_t first, uintptr_t last, char *still, size_t room);
/* As tb_batch_add, for memory that may be mirrored. */
tb_status tb__batch_add_mirrored(tb_batch *batch, tb_pair *pair, const char *name, const tb_tensor *tensor,
                                 const tb__mirrored *mirrored);
/* The tensors that this process receives through the pair; none before it is registered. Valid while the pair is in the
 * batch. Without the lock. */
void tb__batch_get_received(const tb_batch *batch, const tb_pair *pair, const tb__added_tensor *const **out,
                            size_t *count);
/* As tb_batch_signal; TB_CANCELLED as for pairs. */
tb_status tb__batch_ask_signal(tb_batch *batch, const char *group, uint64_t question, int timeout_ms,
                               const atomic_bool *cancelled, bool *out);
/* The last question that was answered here, for each group of which one was. Without the lock. */
typedef struct tb__signal_state {
    char group[TB__DIRECTORY_MAX_NAME + 1];
    uint64_t question;
    bool answer;
} tb__signal_state;
size_t tb__batch_get_signals(const tb_batch *batch, tb__signal_state *out, size_t most);
/* Updates common_version, after versions or pairs have changed. With the lock held. */
void tb__batch_update_version(tb_batch *batch);
/* Whether a receive has ended with TB_IN_DOUBT, and its outcome is not known yet. With the lock held. */
bool tb__batch_is_in_doubt(const tb_batch *batch);
/* What a batch that is being registered waits for; "" if nothing. Without the lock. */
void tb__batch_describe_wait(const tb_batch *batch, char *out, size_t room);
/* Of one that sends: whether it has begun, and not all have read the tensors. With the lock held. */
bool tb__transfer_is_unread(const tb_transfer *transfer);
/* As tb_wait, until the transfer's own deadline, for any of these events. Groups of tensors are not taken. */
tb_status tb__transfer_wait_any(tb_transfer *transfer, unsigned events);
/* Receives of the batch with whole_group end at this rank when tb__transfer_delivered says so, if is_later. */
void tb__batch_deliver_later(tb_batch *batch, bool is_later);
/* Waits until all parts of the transfer have ended at this rank. With whole_group it goes on. */
tb_status tb__transfer_wait_moved(tb_transfer *transfer);
/* Tells the other ranks of the group that this rank has ended the transfer, or why it has failed to. */
void tb__transfer_delivered(tb_transfer *transfer, tb_status status, const char *why);
/* All groups of tensors may come, whatever the batch's group_window. */
void tb__transfer_take_groups(tb_transfer *transfer);
/* As tb_cancel, but does not wait for the end. */
void tb__transfer_begin_cancel(tb_transfer *transfer);

void tb__matching_pack(tb__pack *pack, const tb_batch_opts *opts);

#endif
