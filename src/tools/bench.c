/* tensorbus bench: how fast tensors move between processes of this machine, next to what the machine can do. */
#include "tools/bench.h"

#include "base/descriptors.h"

#include <string.h>

enum { MIN_SIZE = 1 << 20 };
#define MAX_SIZE ((int64_t)1 << 40)

enum { ONLY, ROUNDS, SIZE, STAGED, CHECKSUM, PEERS, HOSTS, CHECK, JSON };

static const tool_option options[] = {
    [ONLY] = {"only", "NAME,...", "these lines only"},
    [ROUNDS] = {"rounds", "N", "how often each line is measured (5)"},
    [SIZE] = {"size", "BYTES", "what the sources hold together (1GiB; in small, a quarter of it)"},
    [STAGED] = {"staged", NULL, "pack, send and unpack everything, as between machines"},
    [CHECKSUM] = {"checksum", NULL, "every bucket goes with a sum of its bytes, which is compared where it arrives"},
    [PEERS] = {"peers", NULL, "also measure row_col with MPI (MPI_Alltoallw) and with torch (Gloo)"},
    [HOSTS] = {"hosts", NULL, "measure the lines of several hosts instead (needs root, and iperf3)"},
    [CHECK] = {"check", NULL, "fail if a ratio misses its mark"},
    [JSON] = {"json", NULL, "print one JSON object per line"},
    {NULL, NULL, NULL},
};

typedef struct bench {
    const char *only; /* NULL: all */
    int rounds;
    int64_t size;
    bool with_peers, with_hosts;
    bench_bed bed; /* with_hosts */
    tb_batch_opts batch;
    tool_guard guard;
    tool_buffers buffers;
    bench_results results;
} bench;

/* A case that is being run. */
typedef struct trial {
    const bench_case *c;
    tool_job job;
    int64_t counted;
    bench_hand hand;
    tool_ranks *ranks;
    tool_mover mover; /* in a rank's process: that rank */
} trial;

enum { BY_HAND = TOOL_NSTEPS }; /* one more step: the hand-written loops */

/* ---- Names --------------------------------------------------------------------------------------------------- */

static bool is_in_list(const char *list, const char *name) {
    size_t length = strlen(name);
    for (const char *at = list; at; at = strchr(at, ','), at = at ? at + 1 : NULL) {
        if (strcspn(at, ",") == length && strncmp(at, name, length) == 0)
            return true;
    }
    return false;
}

static bool is_wanted(const bench *b, const char *name) {
    return !b->only || is_in_list(b->only, name);
}

static bool is_called(const char *known, const char *name, size_t length) {
    return strlen(known) == length && strncmp(known, name, length) == 0;
}

static bool is_known(const char *name, size_t length) {
    for (size_t i = 0; i < bench_ncases; i++) {
        for (int l = 0; l < bench_cases[i].nlines; l++) {
            if (is_called(bench_cases[i].line[l].name, name, length))
                return true;
        }
    }
    return is_called(BENCH_REFIT, name, length) || is_called(BENCH_DISK, name, length) ||
           is_called(BENCH_QUANT, name, length) || is_called(BENCH_BUS, name, length) ||
           is_called(BENCH_RTT, name, length);
}

static bool is_of_hosts(const char *name, size_t length) {
    return is_called(BENCH_NET_ROW_COL, name, length) || is_called(BENCH_NET_REPLICATE, name, length) ||
           is_called(BENCH_MPI_ROW_COL, name, length) || is_called(BENCH_AUTO_ROW_COL, name, length);
}

static tb_status check_names(const char *list, bool with_hosts) {
    for (const char *at = list; at; at = strchr(at, ','), at = at ? at + 1 : NULL) {
        int length = (int)strcspn(at, ",");
        bool is_hosts = is_of_hosts(at, (size_t)length), is_one = is_known(at, (size_t)length);
        if (is_hosts ? !with_hosts : is_one && with_hosts)
            return tb__fail(TB_INVALID, "--only: '%.*s' is measured with%s --hosts", length, at, is_hosts ? "" : "out");
        if (!is_hosts && !is_one)
            return tb__fail(TB_INVALID, "--only: there is no line '%.*s'; `tensorbus bench --help` lists them",
                            length < 40 ? length : 40, at);
    }
    return TB_OK;
}

/* ---- Rounds -------------------------------------------------------------------------------------------------- */

static int compare_doubles(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

/* Sorts the values. */
static double median(double *value, int n) {
    qsort(value, (size_t)n, sizeof *value, compare_doubles);
    return n % 2 ? value[n / 2] : (value[n / 2 - 1] + value[n / 2]) / 2;
}

/* The rates of one line, round by round. */
typedef struct samples {
    double ours[BENCH_MAX_ROUNDS], theirs[BENCH_MAX_ROUNDS], ratio[BENCH_MAX_ROUNDS];
} samples;

static const char *const against_names[] = {
    [BENCH_MEMCPY] = "memcpy",
    [BENCH_MEMCPY_TRAFFIC] = "memcpy, reads and writes",
    [BENCH_HAND] = "hand-written loops",
    [BENCH_CAST] = "the cast in one process",
};

static tb_status measure_baseline(bench *b, const trial *t, bench_against against, double *gb_per_s) {
    double seconds;
    switch (against) {
    case BENCH_MEMCPY:
        return tool_memcpy(&b->buffers, gb_per_s);
    case BENCH_MEMCPY_TRAFFIC:
        TB_TRY(tool_memcpy(&b->buffers, gb_per_s));
        *gb_per_s *= 2;
        return TB_OK;
    case BENCH_CAST:
        return tool_cast(&b->buffers, gb_per_s);
    case BENCH_HAND:
        TB_TRY(tool_ranks_step(t->ranks, BY_HAND, &seconds));
        *gb_per_s = 1e-9 * (double)t->counted / seconds;
        return TB_OK;
    }
    return tb__fail(TB_INTERNAL, "there is no baseline %d", (int)against);
}

static tb_status run_round(bench *b, const trial *t, int round, samples *lines) {
    double seconds;
    for (int l = 0; l < t->c->nlines; l++) {
        if (is_wanted(b, t->c->line[l].name))
            TB_TRY(measure_baseline(b, t, t->c->line[l].against, &lines[l].theirs[round]));
    }
    TB_TRY(tool_ranks_step(t->ranks, TOOL_MOVE, &seconds));
    for (int l = 0; l < t->c->nlines; l++) {
        lines[l].ours[round] = 1e-9 * (double)t->counted / seconds;
        lines[l].ratio[round] = lines[l].ours[round] / lines[l].theirs[round];
    }
    return TB_OK;
}

/* Leads the ranks through the case. The last round moves another version, which is verified. Staging memory stays with
 * a rank once it had it, so that what they have in the end is the most they had. */
static tb_status run_rounds(bench *b, trial *t, samples *lines, int64_t *extra_bytes) {
    enum { WARM_UP = 2 };
    const char *name = t->c->line[0].name;
    tool_show_line("%s: making the tensors", name);
    TB_TRY(tool_ranks_step(t->ranks, TOOL_ALLOCATE, NULL));
    TB_TRY(tool_ranks_step(t->ranks, TOOL_PREPARE, NULL));
    int64_t before = tool_ranks_memory(t->ranks);
    tool_show_line("%s: connecting the ranks", name);
    TB_TRY(tool_job_connect(&t->job, t->ranks));
    tool_show_line("%s: warming up", name);
    for (int i = 0; i < WARM_UP; i++)
        TB_TRY(run_round(b, t, 0, lines));
    for (int i = 0; i < b->rounds; i++) {
        tool_show_line("%s: round %d of %d", name, i + 1, b->rounds);
        if (i == b->rounds - 1)
            TB_TRY(tool_ranks_step(t->ranks, TOOL_PREPARE, NULL));
        TB_TRY(run_round(b, t, i, lines));
    }
    tool_show_line("%s: verifying", name);
    TB_TRY(tool_ranks_step(t->ranks, TOOL_VERIFY, NULL));
    int64_t after = tool_ranks_memory(t->ranks);
    *extra_bytes = before < 0 || after < 0 ? -1 : after > before ? after - before : 0;
    return tool_ranks_step(t->ranks, TOOL_CLOSE, NULL);
}

static tb_status add_results(bench *b, const bench_case *c, samples *lines, int64_t extra_bytes) {
    for (int l = 0; l < c->nlines; l++) {
        const bench_line *line = &c->line[l];
        if (!is_wanted(b, line->name))
            continue;
        bench_result result = {
            .name = line->name,
            .work = c->work,
            .against = against_names[line->against],
            .ours = median(lines[l].ours, b->rounds),
            .theirs = median(lines[l].theirs, b->rounds),
            .ratio = median(lines[l].ratio, b->rounds),
            .at_least = line->at_least,
            .rounds = b->rounds,
            .extra_bytes = extra_bytes,
        };
        if (!tb__vec_push(&b->results, result))
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

/* In a rank's process. */
static tb_status work(void *arg, int rank, int step, tool_slot *slot) {
    trial *t = arg;
    if (step == TOOL_ALLOCATE)
        tool_mover_init(&t->mover, &t->job, rank);
    const tool_end *end = &t->mover.end[0];
    bool is_source = end->which == TOOL_SOURCE;
    if (step == BY_HAND) {
        if (!is_source)
            bench_hand_run(&t->hand, end->seat);
        return TB_OK;
    }
    TB_TRY(tool_mover_do(&t->mover, (tool_step)step, slot));
    if (step == TOOL_PREPARE)
        return bench_hand_prepare(&t->hand, is_source, end->seat);
    return step == TOOL_VERIFY && !is_source ? bench_hand_verify(&t->hand, end->seat) : TB_OK;
}

static tb_status run_trial(bench *b, trial *t, samples *lines) {
    tool_ranks_opts opts = {.work = work, .arg = t};
    int64_t extra_bytes = -1;
    for (int l = 0; l < t->c->nlines; l++) {
        if (t->c->line[l].against == BENCH_HAND && is_wanted(b, t->c->line[l].name))
            TB_TRY(bench_hand_init(&t->hand, &t->job.tensors.item[0].shape));
    }
    TB_TRY(tool_job_start(&t->job, &opts, &b->guard, &t->ranks));
    TB_TRY(run_rounds(b, t, lines, &extra_bytes));
    return add_results(b, t->c, lines, extra_bytes);
}

static tb_status run_case(bench *b, const bench_case *c) {
    trial t = {.c = c};
    TB_TRY(bench_job_init(c, b->size, &t.job, &t.counted));
    t.job.batch = b->batch;
    samples *lines = tb__calloc(BENCH_MAX_LINES, sizeof *lines);
    tb_status status = lines ? run_trial(b, &t, lines) : TB_NO_MEMORY;
    tool_ranks_destroy(t.ranks);
    bench_hand_fini(&t.hand);
    tool_job_fini(&t.job);
    tool_end_threads();
    free(lines);
    return status == TB_OK || status == TB_CANCELLED ? status : tb__fail_within(status, "%s", c->line[0].name);
}

/* ---- Peers --------------------------------------------------------------------------------------------------- */

/* A peer's ranks may spin while they wait, so memcpy does not take turns with it, but comes right before and after. */
static tb_status run_peer(bench *b, int i) {
    enum { BEFORE = 3 };
    double theirs[2 * BEFORE] = {0};
    bench_peer_result peer = {0};
    for (int k = 0; k < BEFORE; k++)
        TB_TRY(tool_memcpy(&b->buffers, &theirs[k]));
    TB_TRY(bench_peer_run(i, b->size, b->rounds, &b->guard, &peer));
    tb_status status = TB_OK;
    for (int k = BEFORE; k < 2 * BEFORE && status == TB_OK; k++)
        status = tool_memcpy(&b->buffers, &theirs[k]);
    bench_result result = {
        .name = peer.name,
        .work = peer.work,
        .against = against_names[BENCH_MEMCPY],
        .ours = peer.gb_per_s,
        .theirs = median(theirs, 2 * BEFORE),
        .rounds = b->rounds,
        .extra_bytes = -1,
        .reason = peer.reason,
    };
    result.ratio = result.ours / result.theirs;
    if (status == TB_OK && tb__vec_push(&b->results, result))
        return TB_OK;
    free(peer.reason);
    return status == TB_OK ? TB_NO_MEMORY : status;
}

/* ---- Lines of their own ------------------------------------------------------------------------------------ */

/* Adds the result with its medians; takes its reason. */
static tb_status add_rounds(bench *b, bench_result result, const bench_round *rounds) {
    samples *s = tb__calloc(1, sizeof *s);
    for (int i = 0; s && i < b->rounds; i++) {
        s->ours[i] = rounds[i].ours;
        s->theirs[i] = rounds[i].theirs;
        s->ratio[i] = rounds[i].theirs > 0 ? rounds[i].ours / rounds[i].theirs : 0;
    }
    if (s) {
        result.ours = median(s->ours, b->rounds);
        result.theirs = median(s->theirs, b->rounds);
        result.ratio = median(s->ratio, b->rounds);
        result.rounds = b->rounds;
    }
    bool ok = s && tb__vec_push(&b->results, result);
    if (!ok)
        free(result.reason);
    free(s);
    return ok ? TB_OK : TB_NO_MEMORY;
}

static tb_status run_refit(bench *b, bench_round *rounds) {
    bench_result result = {.name = BENCH_REFIT,
                           .work = "MoE model, pp2 tp2 ep2 to dp4 ep4, 4 to 4 ranks",
                           .against = against_names[BENCH_MEMCPY],
                           .at_least = 0.8};
    TB_TRY(bench_refit_run(&b->buffers, &b->batch, b->rounds, &b->guard, rounds, &result.extra_bytes));
    return add_rounds(b, result, rounds);
}

static tb_status run_disk(bench *b, bench_round *rounds) {
    enum { TIMES = 4 }; /* the size, so that it is 4 GiB unless another is asked for */
    bench_result result = {
        .name = BENCH_DISK, .work = "checkpoint on disk, tp4 to tp2", .against = "cp", .at_least = 0.8};
    TB_TRY(bench_disk_run(TIMES * b->size, b->rounds, &b->guard, rounds, &result.extra_bytes, &result.reason));
    return add_rounds(b, result, rounds);
}

static tb_status run_quant(bench *b, bench_round *rounds) {
    bench_result result = {.name = BENCH_QUANT,
                           .work = "bf16 to MXFP8 in memory, reads and writes",
                           .against = against_names[BENCH_MEMCPY_TRAFFIC],
                           .at_least = 0.6,
                           .extra_bytes = -1};
    TB_TRY(bench_quant_run(&b->buffers, b->rounds, &b->guard, rounds));
    return add_rounds(b, result, rounds);
}

static tb_status run_bus(bench *b, bench_round *rounds) {
    bench_result result = {.name = BENCH_BUS,
                           .work = "the model through agents, 4 to 4 ranks",
                           .against = "without agents",
                           .at_least = 0.95,
                           .extra_bytes = -1};
    TB_TRY(bench_bus_run(b->size, &b->batch, b->rounds, &b->guard, rounds));
    return add_rounds(b, result, rounds);
}

static tb_status run_rtt(bench *b, bench_round *rounds) {
    bench_result result = {.name = BENCH_RTT,
                           .work = "QueryStatus to an agent and back",
                           .against = "a bare Unix socket",
                           .unit = BENCH_US,
                           .at_most = 1.5,
                           .extra_bytes = -1};
    TB_TRY(bench_rtt_run(&b->batch, b->rounds, &b->guard, rounds));
    return add_rounds(b, result, rounds);
}

static tb_status run_other(bench *b, const char *name, tb_status (*run)(bench *b, bench_round *rounds)) {
    if (!is_wanted(b, name))
        return TB_OK;
    bench_round *rounds = tb__calloc((size_t)b->rounds, sizeof *rounds);
    tb_status status = rounds ? run(b, rounds) : TB_NO_MEMORY;
    free(rounds);
    return status == TB_OK || status == TB_CANCELLED ? status : tb__fail_within(status, "%s", name);
}

/* ---- Several hosts ------------------------------------------------------------------------------------------- */

enum { NET_SHARE = 4 }; /* of the size: networks are slower than memory */

static tb_status run_net_row_col(bench *b, bench_round *rounds) {
    bench_result result = {.name = BENCH_NET_ROW_COL,
                           .work = "f32 matrix, Shard(0) to Shard(1), 2 to 2 ranks, host to host",
                           .against = "iperf3",
                           .at_least = 0.85,
                           .extra_bytes = -1};
    TB_TRY(
        bench_net_row_col_run(&b->bed, b->size / NET_SHARE, &b->batch, b->rounds, &b->guard, rounds, &result.reason));
    return add_rounds(b, result, rounds);
}

static tb_status run_net_replicate(bench *b, bench_round *rounds) {
    bench_result result = {.name = BENCH_NET_REPLICATE,
                           .work = "f32 matrix, 1 host to 3: what leaves the one",
                           .against = "the matrix",
                           .unit = BENCH_GB,
                           .at_most = 1.05,
                           .extra_bytes = -1};
    TB_TRY(bench_net_replicate_run(&b->bed, b->size / NET_SHARE, &b->batch, b->rounds, &b->guard, rounds));
    return add_rounds(b, result, rounds);
}

static tb_status add_mpi_line(bench *b, bench_result result, double ours, const bench_mpi_rates *rates,
                              const char *why) {
    if (!is_wanted(b, result.name))
        return TB_OK;
    result.against = "MPI_Alltoallw";
    result.rounds = b->rounds;
    result.extra_bytes = -1;
    result.ours = ours;
    result.theirs = rates->alltoallw;
    result.ratio = why ? 0 : ours / rates->alltoallw;
    if (why && !(result.reason = tb__strdup(why)))
        return TB_NO_MEMORY;
    if (tb__vec_push(&b->results, result))
        return TB_OK;
    free(result.reason);
    return TB_NO_MEMORY;
}

/* One run of a program has both lines, and medians of its own. */
static tb_status run_mpi(bench *b) {
    if (!is_wanted(b, BENCH_MPI_ROW_COL) && !is_wanted(b, BENCH_AUTO_ROW_COL))
        return TB_OK;
    bench_mpi_rates rates = {0};
    char *why = NULL;
    tool_show_line("%s, %s", BENCH_MPI_ROW_COL, BENCH_AUTO_ROW_COL);
    TB_TRY(bench_mpi_run(b->size / NET_SHARE, b->rounds, &b->guard, &rates, &why));
    bench_result mpi = {.name = BENCH_MPI_ROW_COL,
                        .work = "f32 matrix, rows to columns, 4 ranks of MPI, transport mpi",
                        .at_least = 0.9};
    bench_result automatic = {.name = BENCH_AUTO_ROW_COL, .work = "the same, transport auto", .at_least = 1.7};
    tb_status status = add_mpi_line(b, mpi, rates.mpi, &rates, why);
    if (status == TB_OK)
        status = add_mpi_line(b, automatic, rates.automatic, &rates, why);
    free(why);
    return status;
}

/* Lines between hosts, for which there have to be some. */
static tb_status run_net(bench *b) {
    if (!is_wanted(b, BENCH_NET_ROW_COL) && !is_wanted(b, BENCH_NET_REPLICATE))
        return TB_OK;
    tool_show_line("making %d hosts", BENCH_NHOSTS);
    TB_TRY(bench_bed_start(&b->bed, BENCH_NHOSTS, &b->guard));
    tb_status status = run_other(b, BENCH_NET_ROW_COL, run_net_row_col);
    if (status == TB_OK)
        status = run_other(b, BENCH_NET_REPLICATE, run_net_replicate);
    bench_bed_stop(&b->bed);
    return status;
}

static tb_status run_hosts(bench *b) {
    TB_TRY(run_net(b));
    return run_mpi(b);
}

/* ---- The command --------------------------------------------------------------------------------------------- */

static tb_status run_all(bench *b) {
    tool_show_line("making the buffers of memcpy");
    TB_TRY(tool_buffers_init(&b->buffers, (size_t)b->size));
    for (size_t i = 0; i < bench_ncases; i++) {
        const bench_case *c = &bench_cases[i];
        bool is_any_wanted = false;
        for (int l = 0; l < c->nlines; l++)
            is_any_wanted = is_any_wanted || is_wanted(b, c->line[l].name);
        if (is_any_wanted)
            TB_TRY(run_case(b, c));
    }
    TB_TRY(run_other(b, BENCH_REFIT, run_refit));
    TB_TRY(run_other(b, BENCH_QUANT, run_quant));
    TB_TRY(run_other(b, BENCH_BUS, run_bus));
    TB_TRY(run_other(b, BENCH_RTT, run_rtt));
    for (int i = 0; i < BENCH_NPEERS && b->with_peers; i++) {
        tool_show_line("row_col by others, %d of %d", i + 1, BENCH_NPEERS);
        TB_TRY(run_peer(b, i));
    }
    return run_other(b, BENCH_DISK, run_disk); /* last: the kernel is busy with its files for a while */
}

static tb_status read_options(const char *const *value, bench *b) {
    b->only = value[ONLY];
    b->rounds = 5;
    b->size = (int64_t)1 << 30;
    b->with_peers = value[PEERS] != NULL;
    b->with_hosts = value[HOSTS] != NULL;
    if (b->with_hosts && b->with_peers)
        return tb__fail(TB_INVALID, "--hosts does not go with --peers");
    TB_TRY(check_names(b->only, b->with_hosts));
    if (value[ROUNDS]) {
        const char *at = value[ROUNDS];
        int64_t rounds;
        if (!tb__read_int(&at, &rounds) || *at || rounds < 1 || rounds > BENCH_MAX_ROUNDS)
            return tb__fail(TB_INVALID, "--rounds: '%.40s' is not a number between 1 and %d", value[ROUNDS],
                            BENCH_MAX_ROUNDS);
        b->rounds = (int)rounds;
    }
    if (value[SIZE]) {
        tb_status status = tb__read_size(value[SIZE], &b->size);
        if (status != TB_OK)
            return tb__fail_within(status, "--size");
        if (b->size < MIN_SIZE || b->size > MAX_SIZE)
            return tb__fail(TB_INVALID, "--size: %.40s is not between 1MiB and 1TiB", value[SIZE]);
    }
    return TB_OK;
}

static int report(const bench *b, const char *const *value) {
    tb__text out = {0};
    (value[JSON] ? bench_add_json : bench_add_table)(&out, &b->results);
    int exit_status = tool_print(&out), nmarks = 0, nmissed = 0, nunknown = 0;
    for (size_t i = 0; i < b->results.count; i++) {
        nmarks += bench_has_mark(&b->results.item[i]);
        nmissed += !bench_is_reached(&b->results.item[i]);
        nunknown += bench_has_mark(&b->results.item[i]) && b->results.item[i].reason;
    }
    if (exit_status == TOOL_OK && value[CHECK] && nunknown > 0)
        return tool_fail(TOOL_FAILED, "%d of %d ratios miss their marks, %d of which were not measured", nmissed,
                         nmarks, nunknown);
    if (exit_status == TOOL_OK && value[CHECK] && nmissed > 0)
        return tool_fail(TOOL_FAILED, "%d of %d ratios miss their marks", nmissed, nmarks);
    return exit_status;
}

static int run(const tb__config *config, const char *const *value) {
    bench b = {.batch = tool_batch_opts(config, value[STAGED], value[CHECKSUM])};
    tb_status status = read_options(value, &b);
    tb__descriptor_limit_raise();
    if (status == TB_OK)
        status = tool_guard_init(&b.guard);
    if (status != TB_OK)
        return tool_fail_status(status);
    status = b.with_hosts ? run_hosts(&b) : run_all(&b);
    tool_buffers_fini(&b.buffers);
    int exit_status = status == TB_OK ? report(&b, value) : tool_fail(TOOL_FAILED, "%s", tb_error_detail());
    for (size_t i = 0; i < b.results.count; i++)
        free(b.results.item[i].reason);
    free(b.results.item);
    tool_guard_fini(&b.guard);
    return exit_status;
}

const tool_command tool_bench = {
    .name = "bench",
    .summary = "move tensors between processes and measure it against memcpy",
    .usage = "[--only NAME,...] [--rounds N] [--size BYTES] [--check] [OPTION...]\n"
             "--hosts [--only NAME,...] [--rounds N] [--size BYTES] [--check] [--json]",
    .details =
        "  name          what moves                                               against             at least\n"
        "  row_col       f32 matrix, Shard(0) to Shard(1), 4 to 4 ranks           memcpy                  0.85\n"
        "  row_col_hand  the same                                                 hand-written loops      0.95\n"
        "  foreign       the same from and to malloc'ed memory                    memcpy                  0.25\n"
        "  model         a small Llama, Shard(0) over 4 to 2x2 DPxTP              memcpy                  0.85\n"
        "  replicate     f32 matrix, Shard(0) to Replicate, 4 to 4 ranks          memcpy                  0.90\n"
        "  local         f32 matrix, Shard(0) to Shard(0), the same 4 ranks       memcpy                  0.95\n"
        "  small         tensors of 64 KiB, 4 to 4 ranks                          memcpy                  0.60\n"
        "  cast          f32 to bf16, Shard(0) to Shard(1), input bytes           the cast, 1 process     0.90\n"
        "  partial       bf16 Partial(sum) over 4 to Shard(0): 4 reads, 1 write   memcpy's traffic        0.60\n"
        "  refit         200 tensors, experts, pp2 tp2 ep2 to dp4 ep4, 4 to 4     memcpy                  0.80\n"
        "  quant_mxfp8   bf16 to MXFP8 in memory, one process: reads and writes   memcpy's traffic        0.60\n"
        "  bus_model     the model through agents, whose clients have it          without agents          0.95\n"
        "  command_rtt   QueryStatus to an agent and back: us                     bare Unix socket     at most 1.50\n"
        "  reshard_disk  `tensorbus reshard` of 4 times the size, tp4 to tp2      cp                      0.80\n"
        "\n"
        "with --hosts, between network namespaces of this machine, a quarter of the size:\n"
        "  net_row_col   f32 matrix, Shard(0) to Shard(1), 2 ranks to 2           iperf3                  0.85\n"
        "  net_replicate f32 matrix to 3 other hosts: what leaves its own, GB     the matrix           at most 1.05\n"
        "  mpi_row_col   f32 matrix, rows to columns, 4 ranks of an MPI job       MPI_Alltoallw           0.90\n"
        "  auto_row_col  the same by the transport that suits, shm                MPI_Alltoallw           1.70\n"
        "\n"
        "GB/s (10^9) are of bytes delivered, unless the line says otherwise; they are medians over the rounds.\n"
        "Every rank is a process. memcpy is one process with a thread for each core, on warm memory. It takes turns\n"
        "with the transfer: the ratio is worked out in every round, and the median of that is told. A transfer lasts\n"
        "from the moment the sleeping ranks are woken until the last of them is done. The last one is verified,\n"
        "element by element. Extra memory is what all ranks have beside the tensors when the rounds are over; staging\n"
        "memory is kept for the next transfer, so that this is the most they had. `tensorbus config` lists the\n"
        "settings; the marks are for the defaults, and without --staged or --checksum. reshard_disk works in TMPDIR,\n"
        "with files in the page cache; its extra memory is all that the resharding process had. quant_mxfp8 reads 2\n"
        "bytes of each number and writes 33/32; memcpy copies half of their sum, with as many threads, in the same\n"
        "memory.\n"
        "The ranks of bus_model move the same memory by themselves and through their agents, in turns, until the\n"
        "version is committed. command_rtt is the median of 2000 round trips, on one core; a process that does\n"
        "nothing but answer as many bytes takes turns with the agent.\n"
        "\n"
        "The exit status is 1 if something failed or a wrong element arrived; with --check also if a ratio misses\n"
        "its mark, or was not measured.\n",
    .options = options,
    .run = run,
};
