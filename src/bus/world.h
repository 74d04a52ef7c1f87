/* What stands behind the public objects that move tensors. Everything hangs on the world's engine, whose lock guards
 * it:
 *
 *   world    engine + directory
 *   pair     two groups that have found each other: their peers and layouts
 *   batch    tensors; for each pair a *tie*, in which the ranks of the pair agree on them; in each tie two flows
 *   transfer the legs of one or more flows, stepped as one task
 */
#ifndef TB_BUS_WORLD_H
#define TB_BUS_WORLD_H

#include "base/mem.h"
#include "bus/assembly.h"
#include "bus/directory.h"
#include "exec/flow.h"

#include <stdatomic.h>

typedef struct tb__seat {
    char *group;
    int32_t index, size;
} tb__seat;

typedef struct tb__tie tb__tie;

struct tb_world {
    atomic_size_t refs; /* the user's, and one for each pair, batch and copy service that the user has */
    tb__engine *engine;
    _Atomic bool is_ready; /* the engine is there, for the directory's thread */
    tb__directory *directory;
    int32_t rank;
    uint64_t incarnation;
    int timeout_ms;
    int workers; /* 0: to be worked out */
    tb__port port;
    TB_VEC(tb__seat) seats; /* the first is the one it joined with */
    tb_plan_cache *cache;
    tb_pair *pairs; /* those that are not destroyed */
    TB_VEC(struct tb__round {
        char *pair;
        uint32_t round;
    })
    rounds; /* see pair.c */
    tb__assembly *assemblies;
    TB_VEC(tb__early) early;
};

/* Whoever is made in a world keeps it; the last one ends it. Without the lock. */
void tb__world_ref(tb_world *world);
void tb__world_unref(tb_world *world);
/* The deadline of a call that was given a timeout; 0 is the world's. */
int64_t tb__world_deadline(const tb_world *world, int timeout_ms);
const tb__seat *tb__world_seat(const tb_world *world, const char *group); /* NULL: not in that group */
/* Sets how many threads copy, now that others are known to share the host. Without the lock. */
void tb__world_set_workers(tb_world *world);
/* "'a', 'b' and 3 more" of seats that nobody has taken; false: all are. */
bool tb__world_name_missing(const tb__roster *roster, char *out, size_t room);
tb_status tb__world_check_name(const char *what, const char *name);

/* ---- Pairs ---------------------------------------------------------------------------------------------------- */

/* Sides are ordered by the names of their groups, so that all ranks number them alike. */
typedef struct tb__pair_side {
    char *group;
    int32_t size;
    tb__peer **peers; /* by seat */
    char *layout;     /* in seats */
} tb__pair_side;

struct tb_pair {
    tb_world *world;
    char *name;
    tb__pair_side sides[2];
    int side;      /* this process's */
    int32_t index; /* its seat there, of so many */
    int32_t size;
    uint32_t round;
    tb_pair *next;
    bool has_met; /* both sides are known: sizes, peers, layouts */
    size_t refs;  /* the user's, and one per tie */
};

void tb__pair_unref(tb_pair *pair); /* with the lock held */
/* Waits until both sides are known. Without the lock. */
tb_status tb__pair_meet(tb_pair *pair, int64_t deadline_ms);
/* A side's layout, in bus ranks; `text` NULL: the pair's. */
tb_status tb__pair_layout(const tb_pair *pair, int side, const char *text, tb_layout **out);

/* ---- Batches -------------------------------------------------------------------------------------------------- */

typedef struct tb__tensor {
    tb_pair *pair; /* NULL: it came from the other side */
    char *name;
    tb_shape shape; /* global */
    tb_dtype dtype, wire_dtype;
    uint32_t group;
    char *layout; /* NULL: the pair's */
    tb_binding binding;
} tb__tensor;

typedef struct tb__tensors {
    TB_VEC(tb__tensor) list;
} tb__tensors;

void tb__tensors_fini(tb__tensors *tensors);
void tb__tensors_pack(tb__pack *pack, const tb__tensors *tensors);
/* Without what is this process's own. False: it makes no sense, and what is there has to be freed none the less. */
bool tb__tensors_unpack(const void *data, size_t nbytes, tb__tensors *out);
uint64_t tb__tensors_hash(const tb__pack *pack);

/* What one side of a tie brings. */
typedef struct tb__tie_side {
    bool is_here;         /* this process is on it */
    int32_t index;        /* its seat */
    tb__tensors tensors;  /* by name */
    bool is_known;        /* tensors are ... */
    int32_t list_from;    /* ... from this seat, where the side is not here */
    tb__pack manifest;    /* of this side, where it is here */
    uint64_t *hashes;     /* by seat */
    int64_t *bucket_size; /* by seat */
    bool *has_come;       /* by seat */
} tb__tie_side;

/* All ranks of a pair, for one batch. */
struct tb__tie {
    tb__assembly all; /* first: messages find the tie through it */
    tb_world *world;
    tb_batch *batch;
    tb_pair *pair; /* one of this process's, for names and peers */
    char what[TB__DIRECTORY_MAX_NAME + 16];
    tb__tie_side sides[2];
    uint64_t (*knew)[2];   /* by peer that is gone: how many transfers had been started, by sending side */
    int64_t *staging;      /* by peer: its bound on staging memory */
    int64_t staging_bytes; /* the least of all ranks */
    int32_t *hosts;        /* by rank; NULL: one host */
    size_t nhosts;
    enum { TIE_WAITING, TIE_AGREED, TIE_BROKEN } state;
    bool has_agreed;
    TB_VEC(tb_layout *) layouts;
    tb__flow *flows[2]; /* by sending side */
    TB_VEC(struct tb__backlog {
        size_t peer;
        unsigned char *data;
        size_t nbytes;
    })
    backlog; /* messages to flows that are not there yet */
};

struct tb_batch {
    atomic_size_t refs; /* the user's, and one for each of its transfers */
    tb_world *world;
    char *name;
    tb_batch_opts opts;
    tb__tensors tensors;
    TB_VEC(tb__tie *) ties;
    bool is_sealed; /* nothing can be added */
    tb_transfer *sending, *receiving;
};

void tb__batch_unref(tb_batch *batch); /* without the lock */

/* With the lock held. */
tb_status tb__tie_create(tb_batch *batch, tb_pair *pair, tb__tie **out);
tb_status tb__tie_announce(tb__tie *tie);
void tb__tie_destroy(tb__tie *tie);

#endif
