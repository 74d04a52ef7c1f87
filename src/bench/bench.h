/* `tensorbus bench`: what its files share.
 *
 * A *case* is a transfer between ranks. A *line* is a figure of a case next to something it is compared with; a case
 * has one or two of them, whose baselines and transfer take turns in every round. */
#ifndef TB_BENCH_BENCH_H
#define TB_BENCH_BENCH_H

#include "base/proof.h"
#include "bench/move.h"

enum { BENCH_MAX_LINES = 2, BENCH_MAX_ROUNDS = 1000, BENCH_WORK_MAX = 96 };

/* ---- Rounds (bench_rounds.c) --------------------------------------------------------------------------------- */

/* How often a line is measured: so many times, or as often as there is time for, but at least once. */
typedef struct bench_rounds {
    int most;
    int64_t budget_ns; /* for the whole line, its preparations included; 0: no limit */
    int done;          /* with the one at hand */
    bool is_last;      /* so is the one at hand */
    int64_t began_ns, round_ns, longest_ns;
} bench_rounds;

/* The line begins now. */
bench_rounds bench_rounds_begin(int most, int64_t budget_ns, int64_t now_ns);

/* Whether there is another round, which begins now. */
bool bench_rounds_next(bench_rounds *rounds, int64_t now_ns);

/* What a line is to move after one that took so long, where `size` was moved. */
int64_t bench_fit_size(int64_t size, int64_t took_ns, int64_t budget_ns);

/* Sorts the values. */
double bench_median(double *values, int n);

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
    double at_least_of_limit; /* 0: none */
} bench_line;

typedef struct bench_case {
    const char *work; /* what it does, in a few words */
    int nlines;
    bench_line line[BENCH_MAX_LINES];
    const char *src, *dst; /* layouts; NULL: as a model has them */
    bool is_foreign, is_local;
    tb_status (*build)(tool_tensors *tensors, int64_t size);
} bench_case;

extern const bench_case bench_cases[];
extern const size_t bench_ncases;

const bench_case *bench_case_of(const char *line);

/* Fills in all but the job's batch options; *counted is what GB/s are of. */
tb_status bench_job_init(const bench_case *c, int64_t size, tool_job *job, int64_t *counted);

/* ---- Hand-written loops (bench_hand.c) ----------------------------------------------------------------------- */

/* A matrix of 4-byte elements in shared mappings, which every process inherits, and a block of columns of its own in
 * each target. Zero-initialised: none, and the functions of ranks do nothing. */
typedef struct bench_hand {
    int64_t rows, columns;
    size_t shard_bytes; /* of a source, and of a target */
    uint32_t *shard[TOOL_DEFAULT_RANKS];
    uint32_t *block;
} bench_hand;

tb_status bench_hand_init(bench_hand *hand, const tb_shape *shape); /* in the parent, before ranks are forked */
void bench_hand_fini(bench_hand *hand);

/* In a rank: fills the source's shard, or overwrites the target's block. */
tb_status bench_hand_prepare(bench_hand *hand, bool is_source, int32_t rank);
void bench_hand_run(const bench_hand *hand, int32_t rank);
tb_status bench_hand_verify(const bench_hand *hand, int32_t rank);

/* ---- Other people's ways (bench_peers.c) --------------------------------------------------------------------- */

typedef struct bench_peer_result {
    const char *name, *work;
    const char *line; /* ours that does the same */
    double at_least;  /* how many times as fast that has to be; 0: the peer is compared with memcpy */
    double gb_per_s;
    char *reason; /* why it did not run, to be freed; NULL if it did */
} bench_peer_result;

enum { BENCH_NPEERS = 3 };

/* Peer i before it has run. */
bench_peer_result bench_peer_of(int i);

/* Has peer i move what our line moves, and verify it. Fails only if it was interrupted or lacks what we need for it. */
tb_status bench_peer_run(int i, int64_t size, int rounds, tool_guard *guard, bench_peer_result *out);

/* Where a file is that the tool needs beside itself: as it is installed, or in the source tree. */
bool bench_find_file(const char *name, char *path, size_t size);

/* Runs a program to its end, with TMPDIR in the folder. What keeps it from running goes to `reason`, which is `missing`
 * if it is not there; the status is that of the bench. */
tb_status bench_program_run(const char *const *argv, const char *folder, tool_guard *guard, const char *missing,
                            tb__text *said, tb__text *reason);

/* ---- Lines of their own (bench_refit.c, bench_quant.c, bench_first.c, bench_bus.c, bench_rtt.c) */

#define BENCH_LIMIT "limit"
#define BENCH_TINY  "tiny"
#define BENCH_REFIT "refit"
#define BENCH_QUANT "quant_mxfp8"
#define BENCH_FIRST "first"
#define BENCH_BUS   "bus_model"
#define BENCH_RTT   "command_rtt"

typedef struct bench_round {
    double ours, theirs; /* in the line's unit */
} bench_round;

/* (memcpy.c) Finds the machine's fastest copy, and measures it next to memcpy in every round. `work` is what it is. */
tb_status bench_limit_run(tool_buffers *buffers, bench_rounds *rounds, tool_guard *guard, bench_round *out,
                          char work[BENCH_WORK_MAX]);

/* Moves a mixture-of-experts model as large as a buffer, and copies the buffer, in every round. */
tb_status bench_refit_run(tool_buffers *buffers, const tb_batch_opts *opts, bench_rounds *rounds, tool_guard *guard,
                          bench_round *out, int64_t *extra_bytes);

/* Quantises as much bf16 as a buffer has room for, and copies as many bytes, in every round; checks some thousand
 * blocks in the end. The buffers hold other numbers afterwards. */
tb_status bench_quant_run(const tool_buffers *buffers, bench_rounds *rounds, tool_guard *guard, bench_round *out);

/* Moves a model of `size` bytes for the first time and for the second, in every round. */
tb_status bench_first_run(int64_t size, const tb_batch_opts *opts, bench_rounds *rounds, tool_guard *guard,
                          bench_round *out);

/* Moves a model of `size` bytes through agents, and without them, in every round. `memory` is where it is: see
 * tool_job; `name` is the line's. */
tb_status bench_bus_run(const char *name, int64_t size, const char *memory, const tb_batch_opts *opts,
                        bench_rounds *rounds, tool_guard *guard, bench_round *out);

/* Times a command's round trip, and one of as many bytes over a bare socket: us, medians of some thousand. */
tb_status bench_rtt_run(const tb_batch_opts *opts, bench_rounds *rounds, tool_guard *guard, bench_round *out);

/* ---- Several hosts (bench_bed.c, bench_hosts.c) -------------------------------------------------------------- */

#define BENCH_NET_ROW_COL   "net_row_col"
#define BENCH_NET_REPLICATE "net_replicate"

enum { BENCH_MAX_HOSTS = 8, BENCH_NHOSTS = 4 };

/* Network namespaces on one bridge, which tests/hosts/bed makes. */
typedef struct bench_bed {
    pid_t pid;
    int input; /* they are there while it is open */
    int count;
    char script[640];
    char host[BENCH_MAX_HOSTS][32], address[BENCH_MAX_HOSTS][32];
} bench_bed;

/* TB_DENIED without root; TB_REFUSED, and why, where they can't be made. */
tb_status bench_bed_start(bench_bed *bed, int count, tool_guard *guard);
void bench_bed_stop(bench_bed *bed); /* all that runs there ends */

/* For a process without threads: it is on that host from now on, and has its name. */
tb_status bench_bed_enter(const bench_bed *bed, int host);

/* What has left the host through its network so far. */
tb_status bench_bed_sent(const bench_bed *bed, int host, tool_guard *guard, int64_t *nbytes);

/* Moves a matrix from two ranks of a host to two of another, and as many bytes by iperf3, in every round. *reason, to
 * be freed, is why it was not measured; NULL if it was. */
tb_status bench_net_row_col_run(const bench_bed *bed, int64_t size, const tb_batch_opts *opts, bench_rounds *rounds,
                                tool_guard *guard, bench_round *out, char **reason);

/* Moves a matrix from one host to three others: GB that leave the one, and those of the matrix. */
tb_status bench_net_replicate_run(const bench_bed *bed, int64_t size, const tb_batch_opts *opts, bench_rounds *rounds,
                                  tool_guard *guard, bench_round *out);

/* ---- Below MPI (bench_mpi.c) --------------------------------------------------------------------------------- */

#define BENCH_MPI_ROW_COL  "mpi_row_col"
#define BENCH_AUTO_ROW_COL "auto_row_col"

/* GB/s of one run: by MPI_Alltoallw, by a world whose transport is mpi, by one that chooses itself. */
typedef struct bench_mpi_rates {
    double alltoallw, mpi, automatic;
} bench_mpi_rates;

/* *why, to be freed, is why it was not measured; NULL if it was. */
tb_status bench_mpi_run(int64_t size, int rounds, tool_guard *guard, bench_mpi_rates *out, char **why);

/* ---- GPUs (bench_gpu_cases.c, bench_gpu.c, bench_gpu_latency.c, bench_gpu_carried.c)
 * ------------------------------------------------ */

#define BENCH_GPU_SMALL    "gpu_small"
#define BENCH_GPU_LAUNCHES "gpu_launches"
#define BENCH_GPU_LATENCY  "gpu_latency"
#define BENCH_GPU_BUS      "gpu_bus_model"

typedef struct bench_gpu_case {
    const char *name, *work;
    double at_least;
    int nreads; /* how often a source's elements are read for those of a target; 0: only bytes delivered are counted */
    const char *src, *dst; /* layouts; NULL: as a model has them */
    const char *memory[TOOL_NSIDES];
    tb_status (*build)(tool_tensors *tensors, int64_t size);
} bench_gpu_case;

extern const bench_gpu_case bench_gpu_cases[];
extern const size_t bench_gpu_ncases;

bool bench_gpu_is_line(const char *name, size_t length);
const bench_gpu_case *bench_gpu_case_of(const char *name); /* which is one of them */

/* Fills in all but the job's batch options. */
tb_status bench_gpu_job_init(const bench_gpu_case *c, int64_t size, tool_job *job);
/* How much a copy moves that reads and writes as many bytes as these parts of a target need; where only bytes delivered
 * are counted, those. */
int64_t bench_gpu_payload(const bench_gpu_case *c, const tool_parts *parts);

/* What was measured of a case. */
typedef struct bench_gpu_round {
    bench_round gpu;   /* GB/s of the time that the GPU was busy for one target after the other */
    double wall;       /* all targets at once, by the clock: ratio to as many copies at once */
    int64_t nlaunches; /* of kernels, for the target that has most */
} bench_gpu_round;

/* Moves the tensors of the case, and copies as many bytes by cuMemcpyAsync, in every round. */
tb_status bench_gpu_case_run(const bench_gpu_case *c, int64_t size, const tb_batch_opts *opts, bench_rounds *rounds,
                             tool_guard *guard, bench_gpu_round *out);

/* Moves 4 KiB from process to process, and copies them, some hundred times: us, medians. */
tb_status bench_gpu_latency_run(const tb_batch_opts *opts, bench_rounds *rounds, tool_guard *guard, bench_round *out);

/* The name of a line of --transport: "ucx_row_col". */
typedef struct bench_carried_name {
    char text[24];
} bench_carried_name;
bench_carried_name bench_gpu_carried_name(const char *transport);
/* Moves a matrix by the transport, and contiguous bytes, in every round. */
tb_status bench_gpu_carried_run(const char *transport, int64_t size, const tb_batch_opts *opts, bench_rounds *rounds,
                                tool_guard *guard, bench_round *out);

/* ---- Report (bench_report.c) --------------------------------------------------------------------------------- */

typedef enum bench_unit { BENCH_GB_PER_S, BENCH_US, BENCH_GB, BENCH_LAUNCHES } bench_unit;

typedef struct bench_result {
    const char *name, *work, *against;
    bench_unit unit;
    double ours, theirs, ratio; /* medians over the rounds */
    double wall_ratio;          /* the same, of all ranks at once by the clock, where the ratio is not; 0: not told */
    double at_least, at_most;   /* the mark of the ratio; 0: none */
    double limit_weight;        /* what a copy takes for a counted byte, in copied bytes; 0: not told */
    double limit_ratio;         /* to the best copy; set by bench_publish; 0: not told */
    double at_least_of_limit;   /* its mark; 0: none */
    int rounds;
    int64_t extra_bytes; /* memory that the library took beside the tensors; -1: not known */
    char *reason;        /* why it was not measured; NULL if it was */
    bool is_failure;     /* something went wrong: the reason tells what */
} bench_result;

typedef TB_VEC(bench_result) bench_results;

bool bench_has_mark(const bench_result *result);
bool bench_is_reached(const bench_result *result); /* true where there is none; false if not measured */

/* A row of a table, whose widths are such that more rows of any line can follow; the first comes with the titles. */
void bench_table_init(tool_table *table, bool with_gpu);
void bench_add_row(tb__text *out, tool_table *table, const bench_result *result);
void bench_add_json(tb__text *out, const bench_result *result, const char *gpu); /* "": none */

/* ---- All of it (bench_lines.c) ------------------------------------------------------------------------------- */

typedef struct bench {
    const char *only; /* NULL: all */
    int rounds;
    int64_t budget_ns; /* 0: no limit */
    int64_t size;
    bool is_size_given;
    bool with_peers, with_hosts, with_gpu, with_between, is_json;
    const char *transport;                      /* with_gpu: the one that is measured; NULL: none */
    char carried_work[64], carried_against[32]; /* of its line */
    char gpu[64];                               /* with_gpu: its name; else "" */
    int output_status;                          /* of the last line that was printed */
    int nfailed;
    tool_table table;
    bench_bed bed; /* with_hosts */
    /* with_between: where the two meet, and its token, or "" */
    const char *store;
    char token[TB__TOKEN_ROOM];
    struct between *between;
    tb_batch_opts batch;
    tool_guard guard;
    tool_buffers buffers;
    double limit, limit_ratio; /* the best copy: GB/s, and next to memcpy; 0: not known */
    char limit_work[BENCH_WORK_MAX];
    bench_results results;
} bench;

/* Measures and prints the lines that are wanted; those that fail are counted. */
tb_status bench_run(bench *bench);

/* (bench_gpu_lines.c) The same with --gpu; only in builds with the CUDA device. */
tb_status bench_gpu_run(bench *bench);
/* (bench_gpu_torch.c) What PyTorch takes for these lines. */
tb_status bench_gpu_torch_run(bench *bench);

/* For all lines: whether it is to be measured; the result, printed and kept, with its reason; TB_CANCELLED if nobody
 * can read it. */
bool bench_is_wanted(const bench *bench, const char *name);
tb_status bench_publish(bench *bench, bench_result result);
/* A line that fails is told of, and the others are measured. The reason of the result is not taken. */
tb_status bench_publish_failure(bench *bench, tb_status status, bench_result result);
/* On standard error, unless that is the terminal on which the line that failed is printed. */
void bench_say_failure(const char *name, tb_status status);

/* A line that is measured by a function of its own, in rounds. */
typedef struct bench_other {
    bench_rounds rounds;
    const void *arg;
    bench_round *round;
    bench_result result;
} bench_other;

/* Measures it, if it is wanted. `run` fills in the rounds and all of the result but figures, which are their medians.
 */
tb_status bench_run_other(bench *bench, const char *name, const void *arg,
                          tb_status (*run)(struct bench *bench, bench_other *line));

/* The lines that reshard checkpoints on disk and copy them, in every round; of less than the size where writing is slow
 * and nobody asked for the size. Extra memory is the most that a resharding took. */
bool bench_disk_is_line(const char *name, size_t length);
tb_status bench_disk_run(struct bench *bench);

/* (bench_between.c) With --between: measures the lines with another shell, which has the same store, and prints them on
 * both sides. */
bool bench_between_is_line(const char *name, size_t length);
tb_status bench_between_run(struct bench *bench);

#endif
