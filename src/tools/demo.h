/* What `tensorbus demo` is made of: a model and its layouts on both sides, values that tell where an element belongs,
 * processes that work together, and the report. */
#ifndef TB_TOOLS_DEMO_H
#define TB_TOOLS_DEMO_H

#include "tools/tools.h"

#include <signal.h>
#include <stdatomic.h>
#include <sys/types.h>

/* ---- The model (demo_model.c) -------------------------------------------------------------------------------- */

/* What tensor parallelism does to a weight. */
typedef enum tool_cut {
    TOOL_CUT_COLUMN, /* by output features: dim 0 */
    TOOL_CUT_ROW,    /* by input features: dim 1 */
    TOOL_CUT_NORM,   /* a vector, which is not cut */
    TOOL_CUT_COUNT
} tool_cut;

typedef struct tool_weight {
    char name[56];
    tb_shape shape;
    tool_cut cut;
} tool_weight;

/* Weights shaped like those of a small Llama, all in bf16. */
typedef struct tool_model {
    int nlayers;
    int64_t hidden, nelements;
    TB_VEC(tool_weight) weights;
} tool_model;

enum { TOOL_ELEMENT = 2, TOOL_MIN_MODEL = 64 << 10 };

/* A model of `nbytes`, and hardly more: the vocabulary takes what the layers leave. */
tb_status tool_model_init(tool_model *model, int64_t nbytes);
void tool_model_fini(tool_model *model);

/* ---- Layouts of both sides (demo_side.c) --------------------------------------------------------------------- */

enum { TOOL_SOURCE, TOOL_TARGET, TOOL_NSIDES };
enum { TOOL_MAX_SIDE = 64 }; /* processes of one side */

typedef struct tool_side {
    const char *group;
    int32_t nranks;
    tb_layout *layout[TOOL_CUT_COUNT];
    char *text[TOOL_CUT_COUNT]; /* the same, as text */
    bool is_given;              /* by the user, for all weights */
} tool_side;

/* `text` NULL: the layouts that come with the side. `nranks` 0: as many as the text names, or else 4. */
tb_status tool_side_init(tool_side *side, int which, const char *text, int32_t nranks);
void tool_side_fini(tool_side *side);

/* Whether every weight can be moved from the one to the other. */
tb_status tool_sides_check(const tool_side sides[TOOL_NSIDES], const tool_model *model);

/* One rank's part of one weight. */
typedef struct tool_part {
    uint32_t tensor;
    const tool_weight *weight;
    tb_local local;
    int64_t nelements;
    int64_t offset; /* of its data in the rank's memory, in bytes; a multiple of 64 */
} tool_part;

/* All parts of one rank, which lie in one stretch of memory. */
typedef struct tool_parts {
    size_t count;
    tool_part *part;
    int64_t nelements;
    int64_t nbytes; /* of memory, which has gaps */
} tool_parts;

/* The model must outlive the parts. */
tb_status tool_parts_init(tool_parts *parts, const tool_model *model, const tool_side *side, int32_t rank);
void tool_parts_fini(tool_parts *parts);

/* ---- Values (demo_values.c) ---------------------------------------------------------------------------------- */

/* Every element has a value of its own, made of version, tensor and global index; a rank finds its elements' indices
 * through tb_layout_local alone. An element that was never written is always noticed, because poison differs from what
 * is expected there; one that belongs elsewhere in the same run of 65536 always, too; any other with a chance of 65535
 * in 65536. */
void tool_part_fill(const tool_part *part, uint32_t version, void *data);
void tool_part_poison(const tool_part *part, uint32_t version, void *data);

typedef struct tool_wrong {
    int64_t count;              /* of wrong elements */
    int64_t index[TB_MAX_DIMS]; /* global, of the first of them */
    uint16_t expected, found;
} tool_wrong;

/* Whether all elements are right; fills in *wrong if not. */
bool tool_part_check(const tool_part *part, uint32_t version, const void *data, tool_wrong *wrong);

/* TB_INTERNAL, with a sentence that names the tensor, the element, what was expected and what is there. */
tb_status tool_parts_check(const tool_parts *parts, uint32_t version, const void *memory, _Atomic int64_t *done);

/* ---- Processes (demo_run.c) ---------------------------------------------------------------------------------- */

/* While it lasts, signals that would end this process (those it does not ignore) are held back, so that it can tidy up
 * first; fini lets them through. */
typedef struct tool_guard {
    sigset_t before, ending;
    struct sigaction child_action;
    int fd;     /* readable when a signal has come or a child has ended */
    int caught; /* the first signal that came, or 0 */
} tool_guard;

tb_status tool_guard_init(tool_guard *guard);
void tool_guard_fini(tool_guard *guard);

/* Memory that is shared with processes forked later, zero at first. */
tb_status tool_share(size_t nbytes, void **out);
void tool_unshare(void *ptr, size_t nbytes);

typedef struct tool_crew {
    int nranks;
    const char *const *names;                              /* of the ranks, for sentences */
    tb_status (*work)(void *arg, int rank);                /* in the rank's process; its sentence reaches the parent */
    void (*tick)(void *arg);                               /* in this process, ten times a second; may be NULL */
    void (*said)(void *arg, const char *name, char *line); /* a line that a rank wrote to a standard stream */
    void *arg;
} tool_crew;

/* Forks the ranks and waits for all of them; none is left when it returns. If one fails or dies, the others are ended
 * and the sentence names the one that was first. TB_CANCELLED if the guard caught a signal. There must be no other
 * thread in this process. */
tb_status tool_crew_run(const tool_crew *crew, tool_guard *guard);

/* In shared memory; `count` is the number of processes that meet. */
typedef struct tool_barrier {
    uint32_t count;
    _Atomic uint32_t arrived, generation;
    _Atomic int64_t released_ns;
} tool_barrier;

/* *released_ns (CLOCK_MONOTONIC) is when the last one came, the same for all. */
tb_status tool_barrier_wait(tool_barrier *barrier, int timeout_ms, int64_t *released_ns);

int64_t tool_now_ns(void);

/* ---- The job (demo_rank.c, demo_report.c, demo_memcpy.c) ----------------------------------------------------- */

enum { TOOL_NVERSIONS = 3 };

/* What a version goes through on a rank. */
typedef enum tool_stage { TOOL_PREPARE, TOOL_MOVE, TOOL_VERIFY, TOOL_NSTAGES } tool_stage;

/* What a rank tells the parent, in shared memory. The times are read when the rank has ended. */
typedef struct tool_rank_state {
    _Atomic int step;     /* version * TOOL_NSTAGES + stage */
    _Atomic int64_t done; /* bytes of that stage */
    int64_t began_ns[TOOL_NVERSIONS], arrived_ns[TOOL_NVERSIONS];
    double phase[TOOL_NVERSIONS][TB_PHASE_COUNT];
    int64_t nverified; /* elements */
} tool_rank_state;

typedef struct tool_shared {
    tool_barrier barrier;
    tool_rank_state rank[]; /* sources, then targets */
} tool_shared;

typedef struct tool_job {
    const tb__config *config;
    tool_model model;
    tool_side side[TOOL_NSIDES];
    int nranks;      /* of both sides */
    int64_t *nbytes; /* per rank: of its parts, without gaps */
    char url[128];   /* of the store */
    int timeout_ms;  /* for each wait */
    tool_shared *shared;
} tool_job;

/* Which side a rank of the job is on; *seat is its index there. */
int tool_job_side(const tool_job *job, int rank, int32_t *seat);

/* All that one rank does; `arg` is the job. */
tb_status tool_rank_work(void *arg, int rank);

/* The moving line: which version, what is done with it, how much of that. Nothing when all is done. */
void tool_add_progress(tb__text *out, const tool_job *job);
void tool_add_job(tb__text *out, const tool_job *job, double memcpy_rate, int nthreads);
int64_t tool_job_delivered(const tool_job *job); /* bytes that a version puts on all targets together */

/* Bytes a second of memcpy from warm memory to warm memory, by a thread for each core this process may use. */
tb_status tool_measure_memcpy(int64_t nbytes, double *rate, int *nthreads);

#endif
