/* Set-up of a flow, once for each plan: the IR and its lanes, groups of tensors, memory beside the tensors (setup.c),
 * and which tensors of other ranks can be reached (bind.c). struct flow_setup and struct member_setup are written there
 * only.
 *
 * All of this needs the loop's lock. */
#ifndef TB_FLOW_SETUP_H
#define TB_FLOW_SETUP_H

#include "base/mem.h"
#include "flow/flow.h"
#include "flow/staged.h"
#include "ir/ir.h"
#include "loop/region.h"

/* Where a sender keeps one of its tensors. */
typedef struct place {
    uint32_t tensor;
    bool overwrites_source; /* its rank is going to overwrite it */
    const char *why_staged; /* why it can't be read; NULL: it can */
    tb_remote *remote;
    char *map;           /* NULL: it must be read ... */
    tb__mapping *reader; /* ... by this, once it is needed, from ... */
    tb__peer *owner;     /* ... this one */
    uint64_t offset;     /* of element (0, 0, ...), in bytes from the remote's beginning */
    int64_t strides[TB_MAX_DIMS];
} place;

/* How a bucket gets to its targets. */
typedef struct bucket_path {
    bool takes_staged; /* as a target: it is sent to this rank; else it is read */
    uint32_t nstaged;  /* as a source: targets that must be sent it */
    uint32_t *staged;
    const char *why_staged; /* for the first of them; NULL: it is not */
} bucket_path;

/* A channel and what this rank does for it. */
typedef struct lane {
    const tb_channel *channel;
    const tb_chunk *first; /* what its chunks have in common */
    bool is_target, is_shipper, is_contributor;
    uint32_t nsenders;
    uint32_t *senders; /* positions of members, in the order they are combined; none: zeros */
    uint32_t shipper;  /* position; of zeros: this rank's */
    uint32_t parent;   /* as a target: position of who sends it, if it is staged: the shipper, or who hands it on */
    uint32_t nchildren;
    uint32_t *children; /* as a target: positions of those to whom this rank hands it on */

    bool takes_staged;      /* as a target: some of its buckets; all or none of those that are reduced */
    bool overwrites_source; /* as a target: put aside before anything is written */
    size_t nstaged;         /* as a source: buckets that must be sent to some target */

    size_t to_take; /* the next bucket to be read, from the channel's first: written by direct.c */
    struct staged_lane staged_lane;
} lane;

typedef struct group {
    uint32_t number;
    uint32_t host;  /* what the host calls it, which may be many groups */
    size_t ordinal; /* of that, among those of this rank */
    size_t slot;    /* how many before it are gathered; TB__NOWHERE: it is not */
    size_t nbuckets;
    const lane **lanes; /* that have buckets of it */
    size_t nlanes;
    size_t left; /* buckets that are not here; written by group.c */
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
    TB_VEC(group) groups;                    /* of what this rank receives, ascending */
    tb__index by_bucket;                     /* of buckets that may be announced, by their first chunk */
    tb__region **src_regions, **dst_regions; /* per tensor; NULL: empty */
    bool *overwritten;                       /* per tensor: this rank is going to overwrite its source */
    bool overwrites_any_source;
    bool overwrites_live;         /* sources that the snapshot is taken of */
    tb_binding *snapshot_of;      /* per tensor: the live tensor, where src is the snapshot */
    TB_VEC(device_memory) beside; /* snapshots and shadows */
    int64_t largest_relay;        /* bytes of a bucket; 0: this rank hands nothing on */
};

/* What is settled about another rank, or this one. */
struct member_setup {
    bool is_reader;         /* it reads, or is sent, what we have */
    bool has_reach;         /* it has said what it has to be sent ... */
    bool stashes;           /* ... and that it puts something aside */
    int64_t reads_nbytes;   /* of ours */
    bool is_sender;         /* we read, or are sent, what it has */
    bool is_bound;          /* it has said where that is */
    const char *why_staged; /* why nothing of it can be read; NULL: its places say that */
    TB_VEC(place) places;   /* by tensor */
    size_t nbuckets;        /* that we get from it */
    int64_t sends_nbytes;   /* in them */
    size_t naside;          /* of them, those to be put aside first */
    size_t gathers_until;   /* so many groups have to be here before what it sent is where it belongs */
};

/* setup.c */
tb_status tb__flow_plan(tb__flow *flow);
/* Plans, the first time. A failure breaks the flow. */
bool tb__flow_ensure_plan(tb__flow *flow, tb__leg *leg);
/* Binds sources, or targets, to memory of the same device beside their own. *out is what they were bound to before; it
 * is the caller's, also after a failure. */
tb_status tb__flow_bind_beside(tb__flow *flow, bool is_src, const bool *has, tb_binding **out);
void tb__flow_unplan(tb__flow *flow);

/* bind.c */
tb_status tb__flow_send_binds(tb__flow *flow);
bool tb__flow_on_bind(tb__flow *flow, member *from, tb__unpack *message);
bool tb__flow_on_reach(tb__flow *flow, member *from, tb__unpack *message);
bool tb__flow_try_reach(tb__flow *flow); /* true: it did something */
bool tb__flow_all_have_reach(const tb__flow *flow);
/* The lane's first bucket from this one on that must be sent to some target; how many it has, if there is none. */
size_t tb__lane_next_staged(const tb__flow *flow, const lane *l, size_t from);
void tb__flow_unbind(tb__flow *flow);
place *tb__member_place(const member *m, uint32_t tensor);
/* A key by which the peer may reach memory of a region; an empty one where it can't. */
void tb__flow_pack_key(tb__pack *pack, const tb__flow *flow, const void *memory, tb__region *region, tb__peer *peer);
/* Maps so many bytes of memory that the member has exported; NULL: that can't be done. *remote is to be released. */
char *tb__member_map(member *m, const void *key, size_t key_nbytes, size_t nbytes, tb_remote **remote);
/* Whether the rank is on another host, so that its memory can't be reached. */
bool tb__flow_is_far(const tb__flow *flow, int32_t rank);

/* group.c */
tb_status tb__flow_count_groups(tb__flow *flow);

#endif
