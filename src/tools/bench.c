/* tensorbus bench: how fast tensors move between processes of this machine, next to what the machine can do. */
#include "tools/bench.h"
#include "tools/tools.h"

#include <errno.h>
#include <ftw.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { MIN_SIZE = 1 << 20 };
#define MAX_SIZE ((int64_t)1 << 40)

enum { ONLY, ROUNDS, SIZE, PEERS, CHECK, JSON };

static const tool_option options[] = {
    [ONLY] = {"only", "NAME,...", "these lines only"},
    [ROUNDS] = {"rounds", "N", "how often each line is measured (5)"},
    [SIZE] = {"size", "BYTES", "what the sources hold together (1GiB; in small, a quarter of it)"},
    [PEERS] = {"peers", NULL, "also measure row_col with MPI (MPI_Alltoallw) and with torch (Gloo)"},
    [CHECK] = {"check", NULL, "fail if a ratio is below its mark"},
    [JSON] = {"json", NULL, "print one JSON object per line"},
    {NULL, NULL, NULL},
};

typedef struct bench {
    const char *only; /* NULL: all */
    int rounds;
    int64_t size;
    bool with_peers;
    char folder[64]; /* "": not made */
    bench_buffers buffers;
    bench_results results;
} bench;

/* ---- What is going on ---------------------------------------------------------------------------------------- */

/* One line on a terminal, replaced by the next; "" takes it away. */
__attribute__((format(printf, 1, 2))) static void say(const char *format, ...) {
    if (!isatty(STDERR_FILENO))
        return;
    va_list args;
    va_start(args, format);
    fprintf(stderr, "\r\033[K");
    vfprintf(stderr, format, args);
    fflush(stderr);
    va_end(args);
}

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

static bool is_known(const char *name, size_t length) {
    for (size_t i = 0; i < bench_ncases; i++) {
        for (int l = 0; l < bench_cases[i].nlines; l++) {
            const char *known = bench_cases[i].line[l].name;
            if (strlen(known) == length && strncmp(known, name, length) == 0)
                return true;
        }
    }
    return false;
}

static tb_status check_names(const char *list) {
    for (const char *at = list; at; at = strchr(at, ','), at = at ? at + 1 : NULL) {
        int length = (int)strcspn(at, ",");
        if (!is_known(at, (size_t)length))
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

static tb_status measure_baseline(bench *b, bench_ranks *ranks, bench_against against, double *gb_per_s) {
    double seconds;
    switch (against) {
    case BENCH_MEMCPY:
        return bench_memcpy(&b->buffers, gb_per_s);
    case BENCH_MEMCPY_TRAFFIC:
        TB_TRY(bench_memcpy(&b->buffers, gb_per_s));
        *gb_per_s *= 2;
        return TB_OK;
    case BENCH_CAST:
        return bench_cast(&b->buffers, gb_per_s);
    case BENCH_HAND:
        TB_TRY(bench_ranks_step(ranks, BENCH_BY_HAND, &seconds));
        *gb_per_s = 1e-9 * (double)ranks->job->counted / seconds;
        return TB_OK;
    }
    return tb__fail(TB_INTERNAL, "there is no baseline %d", (int)against);
}

static tb_status run_round(bench *b, bench_ranks *ranks, int round, samples *lines) {
    const bench_case *c = ranks->job->c;
    double seconds;
    for (int l = 0; l < c->nlines; l++) {
        if (is_wanted(b, c->line[l].name))
            TB_TRY(measure_baseline(b, ranks, c->line[l].against, &lines[l].theirs[round]));
    }
    TB_TRY(bench_ranks_step(ranks, BENCH_TRANSFER, &seconds));
    for (int l = 0; l < c->nlines; l++) {
        lines[l].ours[round] = 1e-9 * (double)ranks->job->counted / seconds;
        lines[l].ratio[round] = lines[l].ours[round] / lines[l].theirs[round];
    }
    return TB_OK;
}

/* Leads the ranks through the case. The last round finds targets that hold something else, and is verified. */
static tb_status run_rounds(bench *b, bench_ranks *ranks, samples *lines, int64_t *extra_bytes) {
    enum { WARM_UP = 2 };
    const char *name = ranks->job->c->line[0].name;
    say("%s: making the tensors", name);
    TB_TRY(bench_ranks_step(ranks, BENCH_ALLOCATE, NULL));
    int64_t before = bench_ranks_memory(ranks);
    say("%s: connecting the ranks", name);
    TB_TRY(bench_ranks_step(ranks, BENCH_CONNECT, NULL));
    say("%s: warming up", name);
    for (int i = 0; i < WARM_UP; i++)
        TB_TRY(run_round(b, ranks, 0, lines));
    for (int i = 0; i < b->rounds; i++) {
        say("%s: round %d of %d", name, i + 1, b->rounds);
        if (i == b->rounds - 1)
            TB_TRY(bench_ranks_step(ranks, BENCH_SPOIL, NULL));
        TB_TRY(run_round(b, ranks, i, lines));
    }
    say("%s: verifying", name);
    TB_TRY(bench_ranks_step(ranks, BENCH_VERIFY, NULL));
    int64_t after = bench_ranks_memory(ranks);
    *extra_bytes = before < 0 || after < 0 ? -1 : after > before ? after - before : 0;
    return bench_ranks_step(ranks, BENCH_CLOSE, NULL);
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
            .gb_per_s = median(lines[l].ours, b->rounds),
            .against_gb_per_s = median(lines[l].theirs, b->rounds),
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

static tb_status run_job(bench *b, const bench_job *job, samples *lines) {
    const bench_case *c = job->c;
    bench_hand hand = {0};
    bench_ranks ranks = {0};
    int64_t extra_bytes = -1;
    for (int l = 0; l < c->nlines; l++) {
        if (c->line[l].against == BENCH_HAND && is_wanted(b, c->line[l].name))
            TB_TRY(bench_hand_init(&hand, &job->tensors.item[0].shape));
    }
    tb_status status = bench_ranks_start(&ranks, job, &hand, b->folder);
    if (status == TB_OK)
        status = run_rounds(b, &ranks, lines, &extra_bytes);
    bench_ranks_stop(&ranks);
    bench_hand_fini(&hand);
    return status == TB_OK ? add_results(b, c, lines, extra_bytes) : status;
}

static tb_status run_case(bench *b, const bench_case *c) {
    bench_job job;
    TB_TRY(bench_job_init(c, b->size, &job));
    samples *lines = tb__calloc(BENCH_MAX_LINES, sizeof *lines);
    tb_status status = lines ? run_job(b, &job, lines) : TB_NO_MEMORY;
    free(lines);
    bench_job_fini(&job);
    return status == TB_OK ? TB_OK : tb__fail_within(status, "%s", c->line[0].name);
}

/* ---- Peers --------------------------------------------------------------------------------------------------- */

/* A peer's ranks may spin while they wait, so memcpy does not take turns with it, but comes right before and after. */
static tb_status run_peer(bench *b, int i) {
    enum { BEFORE = 3 };
    double theirs[2 * BEFORE] = {0};
    bench_peer_result peer = {0};
    for (int k = 0; k < BEFORE; k++)
        TB_TRY(bench_memcpy(&b->buffers, &theirs[k]));
    TB_TRY(bench_peer_run(i, b->folder, b->size, b->rounds, &peer));
    tb_status status = TB_OK;
    for (int k = BEFORE; k < 2 * BEFORE && status == TB_OK; k++)
        status = bench_memcpy(&b->buffers, &theirs[k]);
    bench_result result = {
        .name = peer.name,
        .work = peer.work,
        .against = against_names[BENCH_MEMCPY],
        .gb_per_s = peer.gb_per_s,
        .against_gb_per_s = median(theirs, 2 * BEFORE),
        .rounds = b->rounds,
        .extra_bytes = -1,
        .reason = peer.reason,
    };
    result.ratio = result.gb_per_s / result.against_gb_per_s;
    if (status == TB_OK && tb__vec_push(&b->results, result))
        return TB_OK;
    free(peer.reason);
    return status == TB_OK ? TB_NO_MEMORY : status;
}

/* ---- The command --------------------------------------------------------------------------------------------- */

static tb_status make_folder(bench *b) {
    const char *parent = getenv("TMPDIR");
    char path[sizeof b->folder];
    /* A socket's path is short; a long TMPDIR would not do. */
    int length = snprintf(path, sizeof path, "%s/tensorbus-bench-XXXXXX",
                          parent && *parent == '/' && strlen(parent) < 24 ? parent : "/tmp");
    if (length < 0 || (size_t)length >= sizeof path || !mkdtemp(path))
        return tb__fail(TB_IO, "can't make a folder %s: %s", path, strerror(errno));
    memcpy(b->folder, path, sizeof path);
    return TB_OK;
}

static int remove_entry(const char *path, const struct stat *about, int kind, struct FTW *where) {
    (void)about;
    (void)kind;
    (void)where;
    return remove(path);
}

/* Ranks and peers that were ended leave files behind. */
static void remove_folder(const bench *b) {
    if (b->folder[0])
        nftw(b->folder, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}

static tb_status run_all(bench *b) {
    TB_TRY(make_folder(b));
    say("making the buffers of memcpy");
    TB_TRY(bench_buffers_init(&b->buffers, (size_t)b->size));
    for (size_t i = 0; i < bench_ncases; i++) {
        const bench_case *c = &bench_cases[i];
        bool is_any_wanted = false;
        for (int l = 0; l < c->nlines; l++)
            is_any_wanted = is_any_wanted || is_wanted(b, c->line[l].name);
        if (is_any_wanted)
            TB_TRY(run_case(b, c));
    }
    for (int i = 0; i < BENCH_NPEERS && b->with_peers; i++) {
        say("row_col by others, %d of %d", i + 1, BENCH_NPEERS);
        TB_TRY(run_peer(b, i));
    }
    return TB_OK;
}

static tb_status read_options(const char *const *value, bench *b) {
    b->only = value[ONLY];
    b->rounds = 5;
    b->size = (int64_t)1 << 30;
    b->with_peers = value[PEERS] != NULL;
    TB_TRY(check_names(b->only));
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
    int exit_status = tool_print(&out), nmarks = 0, nbelow = 0;
    for (size_t i = 0; i < b->results.count; i++) {
        nmarks += b->results.item[i].at_least > 0;
        nbelow += !bench_is_reached(&b->results.item[i]);
    }
    if (exit_status == TOOL_OK && value[CHECK] && nbelow > 0)
        return tool_fail(TOOL_FAILED, "%d of %d ratios are below their marks", nbelow, nmarks);
    return exit_status;
}

static int run(const tb__config *config, const char *const *value) {
    (void)config;
    bench b = {0};
    tb_status status = read_options(value, &b);
    if (status != TB_OK)
        return tool_fail_status(status);
    bench_signals_begin();
    status = run_all(&b);
    say("%s", "");
    bench_buffers_fini(&b.buffers);
    remove_folder(&b);
    bench_signals_end();
    int exit_status = status == TB_OK ? report(&b, value) : tool_fail(TOOL_FAILED, "%s", tb_error_detail());
    for (size_t i = 0; i < b.results.count; i++)
        free(b.results.item[i].reason);
    free(b.results.item);
    return exit_status;
}

const tool_command tool_bench = {
    .name = "bench",
    .summary = "move tensors between processes and measure it against memcpy",
    .usage = "[--only NAME,...] [--rounds N] [--size BYTES] [--peers] [--check] [--json]",
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
        "\n"
        "GB/s (10^9) are of bytes delivered, unless the line says otherwise; they are medians over the rounds.\n"
        "Every rank is a process. memcpy is one process with a thread for each core, on warm memory. It takes turns\n"
        "with the transfer: the ratio is worked out in every round, and the median of that is told. A transfer lasts\n"
        "from the moment the sleeping ranks are woken until the last of them is done. The last one is verified,\n"
        "element by element. Extra memory is what all ranks have beside the tensors when the rounds are over.\n"
        "\n"
        "The exit status is 1 if something failed or a wrong element arrived; with --check also if a ratio is below\n"
        "its mark.\n",
    .options = options,
    .run = run,
};
