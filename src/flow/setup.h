/* Set-up of a flow, once for each plan: the IR and its lanes, tensor groups, memory for snapshots and shadows
 * (setup.c), and which tensors of other ranks can be reached (bind.c, reach.c). Only these, and group.c for the list of
 * groups, write struct flow_setup, struct member_setup and lane.
 *
 * All of this needs the loop's lock. */
#ifndef TB_FLOW_SETUP_H
#define TB_FLOW_SETUP_H

#include "base/mem.h"
#include "flow/flow.h"
#include "flow/staged.h"
#include "ir/ir.h"
#include "loop/peer_memory.h"
#include "loop/region.h"

/* Where a sender keeps one of its tensors. */
typedef struct remote_tensor {
    uint32_t tensor;
    bool is_overwritten;    /* its rank will overwrite it during the transfer */
    bool is_tried;          /* whether it can be read is known */
    const char *why_staged; /* why it can't be read; NULL: it can */
    tb__peer_memory *memory;
    uint64_t offset; /* of element (0, 0, ...), in bytes from the memory's beginning */
    int64_t strides[TB_MAX_DIMS];
} remote_tensor;

/* How a bucket gets to its targets. */
typedef struct bucket_path {
    bool takes_staged;          /* as a target: it is sent to this rank, which otherwise reads it ... */
    const char *why_taken;      /* ... and why; of this rank's own data, why its device stages it; NULL: it is read */
    bool is_for_device;         /* if it is read: by another device than the host's */
    bool is_unpacked_on_device; /* if it is staged: it can be taken from the sender's device ... */
    bool is_unpacked_on_host;   /* ... or from its host memory */
    uint32_t nstaged;           /* as a source: members that it must be sent to */
    uint32_t *staged;
    uint32_t nstaged_on_device; /* of them, those that can take it from the device */
    bool is_packed_on_device;   /* it can be staged there */
    const char *why_staged;     /* reason of the first of the members; NULL: there are none */
} bucket_path;

/* Whether a unit of a device can read the memory that begins at `base`, which is another unit's. */
typedef struct tried_access {
    const tb__device *device;
    int unit;
    const void *base;
    const char *why; /* it can't; NULL: it can */
} tried_access;

/* A piece of memory that a tensor is in (remap.c). */
typedef struct watched_memory {
    tb__device *device;
    tb__memory_id id;
    uint32_t tensor; /* the first one in it */
    bool is_shared;  /* others may have mapped it */
} watched_memory;

/* A channel of the IR, and this rank's roles in it. */
typedef struct lane {
    const tb_channel *channel;
    const tb_chunk *first; /* source, contributors and targets are the same for all its chunks */
    bool is_target, is_channel_source, is_contributor;
    uint32_t nsenders;
    uint32_t *senders; /* positions of members, in the order of reduction; none: the targets get zeros */
    uint32_t source;   /* position of the rank that sends buckets, after reducing them; if there are no senders, of this
                          rank */
    uint32_t parent;   /* as a target: position of the member that sends staged buckets: the source, or a relay */
    uint32_t nchildren;
    uint32_t *children; /* as a target: positions of members that this rank relays buckets to */

    bool takes_staged; /* as a target: some of its buckets are staged; all of them if they are reduced */
    bool is_stashed;   /* as a target: its buckets go to the stash first, because targets overlap sources, or because
                          some of them are unpacked last (tb__codec.unpacks_last) */
    size_t nstaged;    /* as a source: buckets that are staged for some target */

    size_t to_take; /* index of the next bucket to be read; written by direct.c */
    struct staged_lane staged_lane;
} lane;

typedef struct group {
    uint32_t number;
    uint32_t user_group; /* the program's number; one user group may be several groups here */
    size_t ordinal;      /* of the user group, among those of this rank */
    size_t slot;         /* its index among groups that are gathered in slots; TB__NOWHERE: it is not */
    bool is_converted;   /* its chunks are converted where the senders have them ... */
    bool is_read_twice;  /* ... in two steps: measured one by one, then written together */
    size_t nbuckets;
    const lane **lanes; /* with buckets of this group */
    size_t nlanes;
    /* Written by group.c: */
    size_t left;  /* buckets that have not arrived ... */
    size_t nlast; /* ... and how many of them are in the stash, to be unpacked when all others have */
} group;

typedef struct device_memory {
    tb__device *device;
    void *memory;
} device_memory;

struct flow_setup {
    bool is_planned, is_bound, is_reached;
    tb_ir *ir;
    tb__arena arena;
    lane *lanes;                             /* as many as the IR has channels */
    bucket_path *paths;                      /* as many as the IR has buckets */
    TB_VEC(group) groups;                    /* of tensors that this rank receives, ascending */
    tb__index by_bucket;                     /* buckets by their first chunk's id and part */
    tb__region **src_regions, **dst_regions; /* per tensor; NULL: empty */
    bool *overwritten;                       /* per tensor: this rank's targets overlap its source */
    bool overwrites_any_source;
    bool overwrites_live;    /* targets overlap sources, but these are sent from a snapshot */
    tb_binding *snapshot_of; /* per tensor: the program's binding, if src is the snapshot; NULL: no snapshots */
    TB_VEC(device_memory) duplicates; /* memory of snapshots and shadows */
    TB_VEC(tried_access) accesses;
    TB_VEC(watched_memory) watched[2]; /* of targets, of sources; by address */
    const char *last_reason;           /* that was put into the arena, why something is staged */
    int64_t largest_relay;             /* bytes of the largest bucket that this rank relays; 0: it relays none */
};

/* A member's role according to the plan, BIND and REACH. */
struct member_setup {
    bool is_reader;                       /* it reads this rank's tensors, or is sent buckets of them */
    bool has_reach;                       /* it has sent REACH: which buckets must be staged for it ... */
    bool must_stash;                      /* ... and whether it stashes any */
    int64_t reads_nbytes;                 /* of this rank's tensors */
    bool is_sender;                       /* this rank reads its tensors, or is sent buckets of them */
    bool is_bound;                        /* it has sent BIND */
    const char *why_staged;               /* why none of its tensors can be read; NULL: see remote_tensors */
    TB_VEC(remote_tensor) remote_tensors; /* by tensor */
    tb__peer_memory *stage;               /* its staging memory on a device; NULL: none, or it can't be mapped */
    size_t nbuckets;                      /* that this rank gets from it */
    size_t nread_twice;                   /* of them, those whose group is read twice */
    int64_t sends_nbytes;                 /* in them */
    size_t nstash;                        /* of them, those that are stashed first */
    bool is_revoked; /* it has revoked some of its memory, so that none of it is read any more; written by invalidate.c
                      */
    const char *why_unreachable; /* a tensor that is read in place has moved, and can't be; NULL: they all can */
    size_t gathers_until;        /* so many groups must be done before all it sent has been converted */
};

/* setup.c */
tb_status tb__flow_plan(tb__flow *flow);
/* The program's binding of a source, or target: not that of its snapshot, or shadow. */
tb_binding *tb__flow_live(const tb__flow *flow, size_t tensor, bool is_src);
/* Whether targets can be received into, and which sources they overlap: for the plan, and for one whose tensors have
 * moved. */
tb_status tb__flow_check_overlaps(tb__flow *flow);
/* Plans, the first time. A failure breaks the flow. */
bool tb__flow_ensure_plan(tb__flow *flow);
/* Binds sources, or targets, to new memory on their devices, for snapshots and shadows. *out is the array of previous
 * bindings; the caller frees it, also after a failure. */
tb_status tb__flow_bind_duplicates(tb__flow *flow, bool is_src, const bool *has, tb_binding **out);
void tb__flow_unplan(tb__flow *flow);

/* remap.c: lists the memory of sources and targets, for the plan ... */
tb_status tb__flow_watch_memory(tb__flow *flow);
/* ... and fails with TB_INVALID, naming the tensor, if memory that the leg uses is gone; or, for a send, if others may
 * have mapped memory that was replaced. */
tb_status tb__flow_check_remapped(const tb__flow *flow, bool is_send);

/* bind.c */
tb_status tb__flow_send_binds(tb__flow *flow);
bool tb__flow_on_bind(tb__flow *flow, member *from, tb__unpack *message);
/* Tells readers of the tensors that are marked. */
tb_status tb__flow_send_rebinds(tb__flow *flow, const bool *has_moved);
bool tb__flow_on_rebind(tb__flow *flow, member *from, tb__unpack *message);
void tb__flow_unbind(tb__flow *flow);
remote_tensor *tb__member_find_tensor(const member *m, uint32_t tensor);
/* Keeps in the flow's arena why something is staged. Reasons are read at both ends, so they name ranks. */
__attribute__((format(printf, 2, 3))) const char *tb__flow_keep_reason(tb__flow *flow, const char *format, ...);
/* Packs a key by which the peer can access the region; an empty one if it can't. */
void tb__flow_pack_key(tb__pack *pack, const tb__flow *flow, tb__region *region, tb__peer *peer);
/* Maps so many bytes of memory that the member has exported, where the path allows it: on a device, or on the host.
 * NULL: not possible. The caller releases *memory. */
char *tb__member_map(member *m, const void *key, size_t key_nbytes, size_t nbytes, const bucket_path *path,
                     tb__peer_memory **memory);

/* reach.c */
bool tb__flow_on_reach(tb__flow *flow, member *from, tb__unpack *message);
bool tb__flow_try_reach(tb__flow *flow); /* true: it did something */
/* After tensors of the member have moved: whether those that are read in place can be. If not, they may have moved on
 * since then, and the next REBIND says where to; so it matters only once the member is ready for a receive. */
void tb__flow_check_reach(tb__flow *flow, member *from);
/* A member whose tensors the receive under way needs and can't reach; NULL: there is none. */
const member *tb__flow_find_unreachable(const tb__flow *flow);
bool tb__flow_all_have_reach(const tb__flow *flow);
/* The lane's first bucket, from this one on, that is staged for some target; the lane's bucket count if there is none.
 */
size_t tb__lane_next_staged(const tb__flow *flow, const lane *l, size_t from);
/* Why a unit of a device can't read memory of another unit, mapped or of this process; NULL: it can. Each memory is
 * tried once for each unit. */
const char *tb__flow_why_not_accessed(tb__flow *flow, tb__device *device, int unit, const tb__memory *memory);

/* group.c */
tb_status tb__flow_count_groups(tb__flow *flow);
/* When paths are chosen: decides which gathered groups need slots. */
tb_status tb__flow_choose_slots(tb__flow *flow);
/* The device of the slots. */
tb__device *tb__flow_slot_device(const tb__flow *flow);

#endif
