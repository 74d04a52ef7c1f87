/* `tensorbus bench`: what its files share.
 *
 * A *case* is a transfer between ranks, each a process of its own, which the parent forks, and leads through steps. A
 * *line* is a figure of a case next to something it is compared with; a case has one or two of them, whose baselines
 * and transfer take turns in every round. */
#ifndef TB_TOOLS_BENCH_H
#define TB_TOOLS_BENCH_H

#include "base/mem.h"
#include "base/text.h"
#include "tensorbus/tensorbus.h"

#include <sys/types.h>
#include <time.h>

enum {
    BENCH_SIDE = 4,                   /* ranks of a side */
    BENCH_MAX_RANKS = 2 * BENCH_SIDE, /* processes of a case */
    BENCH_MAX_LINES = 2,
    BENCH_MAX_ROUNDS = 1000,
};

static inline int64_t bench_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- Cases (bench_cases.c) ----------------------------------------------------------------------------------- */

typedef enum bench_against {
    BENCH_MEMCPY,         /* bytes delivered, next to bytes copied */
    BENCH_MEMCPY_TRAFFIC, /* bytes read and written, of both */
    BENCH_HAND,           /* the same processes, with loops of their own */
    BENCH_CAST,           /* one process's threads */
} bench_against;

typedef struct bench_line {
    const char *name;
    bench_against against;
    double at_least;
} bench_line;

/* What the elements of a tensor are. */
typedef enum bench_values {
    BENCH_BITS,   /* anything */
    BENCH_FLOATS, /* f32 integers of 24 bits, which a cast has to round */
    BENCH_TERMS,  /* bf16 integers, other ones at each rank, so small that sums are exact */
} bench_values;

typedef struct bench_tensor {
    char name[48];
    tb_shape shape; /* of one or two dims */
    const char *src_layout, *dst_layout;
    tb_dtype src_dtype, dst_dtype;
    bench_values values;
} bench_tensor;

typedef struct bench_job bench_job;

typedef struct bench_case {
    const char *work; /* what it does, in a few words */
    int nlines;
    bench_line line[BENCH_MAX_LINES];
    const char *src, *dst;                            /* layouts; a tensor may have another one */
    bool is_foreign;                                  /* memory that is not tb_alloc's */
    bool is_local;                                    /* the same processes at both ends */
    tb_status (*build)(bench_job *job, int64_t size); /* adds the tensors */
} bench_case;

extern const bench_case bench_cases[];
extern const size_t bench_ncases;

/* A case at a size. */
struct bench_job {
    const bench_case *c;
    TB_VEC(bench_tensor) tensors;
    int64_t counted; /* what GB/s are of */
};

tb_status bench_job_init(const bench_case *c, int64_t size, bench_job *job);
void bench_job_fini(bench_job *job);

/* ---- Elements (bench_values.c) ------------------------------------------------------------------------------- */

/* One rank's part of one tensor; row-major without gaps. */
typedef struct bench_part {
    const bench_tensor *tensor;
    uint32_t number; /* of the tensor, which tells its values from another's */
    int32_t rank;    /* of its side */
    bool is_source;
    int64_t nbytes;
    void *data;
} bench_part;

/* Bytes of the part; 0 if the rank has none. */
tb_status bench_part_size(bench_part *part);

/* A source gets its values; a target is overwritten, so that what was there does not pass for what arrives. */
tb_status bench_part_fill(const bench_part *part);

/* Compares a target's part with what must have arrived; TB_INTERNAL names the first element that is wrong. */
tb_status bench_part_verify(const bench_part *part);

/* `n` elements of f32, for baselines. */
void bench_fill_floats(void *dst, size_t n);

/* ---- Baselines (bench_baseline.c) ---------------------------------------------------------------------------- */

/* Two warm buffers of the parent, which children do not get. */
typedef struct bench_buffers {
    char *src, *dst;
    size_t nbytes;
    void *mapping;
    size_t mapped;
    int threads;
} bench_buffers;

tb_status bench_buffers_init(bench_buffers *buffers, size_t nbytes);
void bench_buffers_fini(bench_buffers *buffers);

/* Copies all of it, or casts it from f32 to bf16; GB/s of the bytes read. */
tb_status bench_memcpy(bench_buffers *buffers, double *gb_per_s);
tb_status bench_cast(bench_buffers *buffers, double *gb_per_s);

/* ---- Hand-written loops (bench_hand.c) ----------------------------------------------------------------------- */

/* A matrix of 4-byte elements in shared mappings, which every process inherits, and a block of columns of its own in
 * each target. Zero-initialised: none. */
typedef struct bench_hand {
    int64_t rows, columns;
    size_t shard_bytes; /* of a source, and of a target */
    uint32_t *shard[BENCH_SIDE];
    uint32_t *block;
} bench_hand;

tb_status bench_hand_init(bench_hand *hand, const tb_shape *shape); /* in the parent, before ranks are forked */
void bench_hand_fini(bench_hand *hand);
tb_status bench_hand_fill(bench_hand *hand, bool is_source, int32_t rank);
void bench_hand_run(const bench_hand *hand, int32_t rank);
tb_status bench_hand_verify(const bench_hand *hand, int32_t rank);

/* ---- Ranks (bench_ranks.c, bench_rank.c) --------------------------------------------------------------------- */

/* What ranks are told to do. They sleep between steps. */
typedef enum bench_step {
    BENCH_ALLOCATE, /* tensors, filled and touched */
    BENCH_CONNECT,  /* the world, pairs, batches */
    BENCH_TRANSFER,
    BENCH_BY_HAND, /* the same with the hand-written loops */
    BENCH_SPOIL,   /* the targets */
    BENCH_VERIFY,
    BENCH_CLOSE,
} bench_step;

/* Where a rank tells the parent how it fared; in a page that they share. */
typedef struct bench_slot {
    int64_t finished_ns;
    tb_status status;
    char sentence[480];
} bench_slot;

typedef struct bench_control {
    _Atomic uint32_t turn;  /* a futex; the parent adds one to begin a step */
    _Atomic uint32_t ndone; /* a futex; ranks that have ended the step */
    bench_step step;
    bench_slot slot[BENCH_MAX_RANKS];
} bench_control;

typedef struct bench_ranks {
    const bench_job *job;
    bench_hand *hand;
    const char *folder; /* where the world's socket is */
    int n;
    pid_t pid[BENCH_MAX_RANKS]; /* 0: gone */
    bench_control *control;
} bench_ranks;

/* "from 2", "to 0". */
typedef struct bench_rank_name {
    char text[24];
} bench_rank_name;
bench_rank_name bench_name_rank(const bench_case *c, int i);

tb_status bench_ranks_start(bench_ranks *ranks, const bench_job *job, bench_hand *hand, const char *folder);

/* Has all ranks do a step; *seconds is from its beginning until the last one had ended it, and may be NULL. On failure
 * the sentence names the rank. */
tb_status bench_ranks_step(bench_ranks *ranks, bench_step step, double *seconds);

/* Memory of all ranks together, pages that they share counted once; -1 where the kernel does not tell. */
int64_t bench_ranks_memory(const bench_ranks *ranks);

/* Ends them, whatever they are doing. */
void bench_ranks_stop(bench_ranks *ranks);

/* A child's life; does not return. */
_Noreturn void bench_rank_main(const bench_ranks *ranks, int i, pid_t parent);

/* Waits until *word is not `seen`, a signal, or the time has passed. */
void bench_futex_wait(_Atomic uint32_t *word, uint32_t seen, int timeout_ms);
void bench_futex_wake(_Atomic uint32_t *word);

/* ---- Interruption (bench_signals.c) -------------------------------------------------------------------------- */

/* From begin to end SIGINT, SIGTERM and SIGHUP are only noted; after the end the signal takes its course. */
void bench_signals_begin(void);
void bench_signals_end(void);
void bench_signals_default(void); /* in a child */

/* TB_CANCELLED once one came. */
tb_status bench_signals_check(void);

/* ---- Other people's ways (bench_peers.c) --------------------------------------------------------------------- */

typedef struct bench_peer_result {
    const char *name, *work;
    double gb_per_s;
    char *reason; /* why it did not run, to be freed; NULL if it did */
} bench_peer_result;

enum { BENCH_NPEERS = 2 };

/* Has peer i move what row_col moves, and verify it. Fails only if it was interrupted or has no memory. */
tb_status bench_peer_run(int i, const char *folder, int64_t size, int rounds, bench_peer_result *out);

/* ---- Report (bench_report.c) --------------------------------------------------------------------------------- */

typedef struct bench_result {
    const char *name, *work, *against;
    double gb_per_s, against_gb_per_s, ratio; /* medians over the rounds */
    double at_least;                          /* 0: nothing is asked */
    int rounds;
    int64_t extra_bytes; /* memory that the library took beside the tensors; -1: not known */
    char *reason;        /* of a peer that did not run; else NULL */
} bench_result;

typedef TB_VEC(bench_result) bench_results;

bool bench_is_reached(const bench_result *result);
void bench_add_table(tb__text *out, const bench_results *results);
void bench_add_json(tb__text *out, const bench_results *results);

#endif
