/* What `tensorbus bench` measures, line after line. Each is printed when it is measured. */
#include "bench/bench.h"

#include <string.h>
#include <unistd.h>

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

static const char *const against_names[] = {
    [BENCH_MEMCPY] = "memcpy",
    [BENCH_MEMCPY_TRAFFIC] = "memcpy, reads and writes",
    [BENCH_HAND] = "hand-written loops",
    [BENCH_CAST] = "the cast in one process",
};

/* ---- Results ------------------------------------------------------------------------------------------------- */

tb_status bench_publish(bench *b, bench_result result) {
    tb__text out = {0};
    bool is_memcpy =
        result.against == against_names[BENCH_MEMCPY] || result.against == against_names[BENCH_MEMCPY_TRAFFIC];
    if (b->limit_ratio > 0 && is_memcpy)
        result.limit_ratio = result.ratio / b->limit_ratio;
    else if (b->limit > 0)
        result.limit_ratio = result.limit_weight * result.ours / b->limit;
    if (!tb__vec_push(&b->results, result)) {
        free(result.reason);
        return TB_NO_MEMORY;
    }
    if (b->is_json)
        bench_add_json(&out, &result, b->gpu);
    else
        bench_add_row(&out, &b->table, &result);
    b->output_status = tool_print(&out);
    return b->output_status == TOOL_OK ? TB_OK : TB_CANCELLED;
}

tb_status bench_publish_failure(bench *b, tb_status status, bench_result result) {
    if (status == TB_OK || status == TB_CANCELLED)
        return status;
    result.reason = tb__strdup(tb_error_detail());
    result.is_failure = true;
    b->nfailed++;
    return result.reason ? bench_publish(b, result) : TB_NO_MEMORY;
}

void bench_say_failure(const char *name, tb_status status) {
    if (status != TB_OK && status != TB_CANCELLED && !(isatty(STDOUT_FILENO) && isatty(STDERR_FILENO)))
        tool_say("%s%s%s", name, *name ? ": " : "", tb_error_detail());
}

static bool is_in_list(const char *list, const char *name) {
    size_t length = strlen(name);
    for (const char *at = list; at; at = strchr(at, ','), at = at ? at + 1 : NULL) {
        if (strcspn(at, ",") == length && strncmp(at, name, length) == 0)
            return true;
    }
    return false;
}

bool bench_is_wanted(const bench *b, const char *name) {
    return !b->only || is_in_list(b->only, name);
}

/* ---- Rounds -------------------------------------------------------------------------------------------------- */

/* The rates of one line, round by round. */
typedef struct samples {
    double ours[BENCH_MAX_ROUNDS], theirs[BENCH_MAX_ROUNDS], ratio[BENCH_MAX_ROUNDS];
} samples;

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
        if (bench_is_wanted(b, t->c->line[l].name))
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
static tb_status run_rounds(bench *b, trial *t, bench_rounds *rounds, samples *lines, int64_t *extra_bytes) {
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
    while (bench_rounds_next(rounds, tool_now_ns())) {
        tool_show_line("%s: round %d of %d", name, rounds->done, rounds->most);
        if (rounds->is_last)
            TB_TRY(tool_ranks_step(t->ranks, TOOL_PREPARE, NULL));
        TB_TRY(run_round(b, t, rounds->done - 1, lines));
    }
    tool_show_line("%s: verifying", name);
    TB_TRY(tool_ranks_step(t->ranks, TOOL_VERIFY, NULL));
    int64_t after = tool_ranks_memory(t->ranks);
    *extra_bytes = before < 0 || after < 0 ? -1 : after > before ? after - before : 0;
    return tool_ranks_step(t->ranks, TOOL_CLOSE, NULL);
}

static tb_status add_results(bench *b, const bench_case *c, samples *lines, int nrounds, int64_t extra_bytes) {
    for (int l = 0; l < c->nlines; l++) {
        const bench_line *line = &c->line[l];
        if (!bench_is_wanted(b, line->name))
            continue;
        bench_result result = {
            .name = line->name,
            .work = c->work,
            .against = against_names[line->against],
            .ours = bench_median(lines[l].ours, nrounds),
            .theirs = bench_median(lines[l].theirs, nrounds),
            .ratio = bench_median(lines[l].ratio, nrounds),
            .at_least = line->at_least,
            .at_least_of_limit = line->at_least_of_limit,
            .limit_weight = line->against == BENCH_CAST ? 0.75 : 1, /* reads 4 bytes and writes 2 */
            .rounds = nrounds,
            .extra_bytes = extra_bytes,
        };
        TB_TRY(bench_publish(b, result));
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

static tb_status run_trial(bench *b, trial *t, bench_rounds *rounds, samples *lines, int64_t *extra_bytes) {
    tool_ranks_opts opts = {.work = work, .arg = t};
    for (int l = 0; l < t->c->nlines; l++) {
        if (t->c->line[l].against == BENCH_HAND && bench_is_wanted(b, t->c->line[l].name))
            TB_TRY(bench_hand_init(&t->hand, &t->job.tensors.item[0].shape));
    }
    TB_TRY(tool_job_start(&t->job, &opts, &b->guard, &t->ranks));
    return run_rounds(b, t, rounds, lines, extra_bytes);
}

/* What took too long takes less from now on, unless the size was asked for. */
static void fit_size(bench *b, const char *name, const bench_rounds *rounds) {
    int64_t took = tool_now_ns() - rounds->began_ns, size = b->size;
    if (b->is_size_given || rounds->budget_ns == 0)
        return;
    b->size = bench_fit_size(size, took / 2, rounds->budget_ns);
    if (b->size == size)
        return;
    b->buffers.nbytes = (size_t)b->size;
    tool_say("%s took %d s; the lines that follow move %s instead of %s", name, (int)(took / 1000000000),
             tool_size(b->size).text, tool_size(size).text);
}

static tb_status measure_case(bench *b, const bench_case *c, bench_rounds *rounds, samples *lines,
                              int64_t *extra_bytes) {
    trial t = {.c = c};
    TB_TRY(bench_job_init(c, b->size, &t.job, &t.counted));
    t.job.batch = b->batch;
    tb_status status = run_trial(b, &t, rounds, lines, extra_bytes);
    tool_ranks_destroy(t.ranks);
    bench_hand_fini(&t.hand);
    tool_job_fini(&t.job);
    tool_end_threads();
    return status;
}

static tb_status run_case(bench *b, const bench_case *c) {
    samples *lines = tb__calloc(BENCH_MAX_LINES, sizeof *lines);
    int64_t extra_bytes = -1;
    bench_rounds rounds = bench_rounds_begin(b->rounds, b->budget_ns, tool_now_ns());
    tb_status status = lines ? measure_case(b, c, &rounds, lines, &extra_bytes) : TB_NO_MEMORY;
    tb_status measured = status;
    bench_say_failure(c->line[0].name, measured);
    if (measured == TB_OK)
        status = add_results(b, c, lines, rounds.done, extra_bytes);
    for (int l = 0; l < c->nlines && measured != TB_OK; l++) {
        const bench_line *line = &c->line[l];
        if (bench_is_wanted(b, line->name) && (l == 0 || status == TB_OK))
            status = bench_publish_failure(b, measured,
                                           (bench_result){.name = line->name,
                                                          .work = c->work,
                                                          .at_least = line->at_least,
                                                          .at_least_of_limit = line->at_least_of_limit});
    }
    free(lines);
    fit_size(b, c->line[0].name, &rounds);
    return status;
}

/* ---- Peers --------------------------------------------------------------------------------------------------- */

/* A peer's ranks may spin while they wait, so memcpy does not take turns with it, but comes right before and after. */
static tb_status measure_peer(bench *b, int i, bench_peer_result *peer, double *theirs) {
    enum { BEFORE = 3 };
    double rates[2 * BEFORE] = {0};
    for (int k = 0; k < BEFORE; k++)
        TB_TRY(tool_memcpy(&b->buffers, &rates[k]));
    TB_TRY(bench_peer_run(i, b->size, b->rounds, &b->guard, peer));
    for (int k = BEFORE; k < 2 * BEFORE; k++)
        TB_TRY(tool_memcpy(&b->buffers, &rates[k]));
    *theirs = bench_median(rates, 2 * BEFORE);
    return TB_OK;
}

static tb_status run_peer(bench *b, int i) {
    bench_peer_result peer = bench_peer_of(i);
    double theirs = 0;
    tb_status status = measure_peer(b, i, &peer, &theirs);
    bench_result result = {
        .name = peer.name,
        .work = peer.work,
        .against = against_names[BENCH_MEMCPY],
        .ours = peer.gb_per_s,
        .theirs = theirs,
        .ratio = theirs > 0 ? peer.gb_per_s / theirs : 0,
        .rounds = b->rounds,
        .extra_bytes = -1,
        .reason = peer.reason,
    };
    for (size_t k = 0; k < b->results.count && peer.at_least > 0; k++) {
        const bench_result *ours = &b->results.item[k];
        if (strcmp(ours->name, peer.line) != 0)
            continue;
        result.against = "slice copies of PyTorch";
        result.ours = ours->ours;
        result.theirs = peer.gb_per_s;
        result.ratio = peer.gb_per_s > 0 ? ours->ours / peer.gb_per_s : 0;
        result.at_least = peer.at_least;
    }
    if (status == TB_OK)
        return bench_publish(b, result);
    free(peer.reason);
    bench_say_failure(peer.name, status);
    return bench_publish_failure(b, status, result);
}

/* ---- Lines of their own ------------------------------------------------------------------------------------ */

static void add_medians(bench_result *result, const bench_round *round, int n, samples *s) {
    if (n == 0)
        return;
    for (int i = 0; i < n; i++) {
        s->ours[i] = round[i].ours;
        s->theirs[i] = round[i].theirs;
        s->ratio[i] = round[i].theirs > 0 ? round[i].ours / round[i].theirs : 0;
    }
    result->ours = bench_median(s->ours, n);
    result->theirs = bench_median(s->theirs, n);
    result->ratio = bench_median(s->ratio, n);
    result->rounds = n;
}

/* All other lines are compared with it, so it is measured whether it is wanted or not. */
static tb_status run_limit(bench *b) {
    enum { MOST = 15 };
    bench_rounds rounds = bench_rounds_begin(b->rounds < MOST ? b->rounds : MOST, b->budget_ns, tool_now_ns());
    bench_result result = {.name = BENCH_LIMIT, .against = against_names[BENCH_MEMCPY], .extra_bytes = -1};
    samples *s = tb__calloc(1, sizeof *s);
    bench_round *round = tb__calloc((size_t)b->rounds, sizeof *round);
    tool_show_line(BENCH_LIMIT ": looking for the best copy");
    tb_status status =
        s && round ? bench_limit_run(&b->buffers, &rounds, &b->guard, round, b->limit_work) : TB_NO_MEMORY;
    if (status == TB_OK) {
        add_medians(&result, round, rounds.done, s);
        b->limit = result.ours;
        b->limit_ratio = result.ratio;
        result.work = b->limit_work;
        if (bench_is_wanted(b, BENCH_LIMIT))
            status = bench_publish(b, result);
    }
    free(s);
    free(round);
    return status;
}

static tb_status run_refit(bench *b, bench_other *o) {
    o->result.work = "MoE model, pp2 tp2 ep2 to dp4 ep4, 4 to 4 ranks";
    o->result.against = against_names[BENCH_MEMCPY];
    o->result.at_least = 0.8;
    return bench_refit_run(&b->buffers, &b->batch, &o->rounds, &b->guard, o->round, &o->result.extra_bytes);
}

static tb_status run_quant(bench *b, bench_other *o) {
    o->result.work = "bf16 to MXFP8 in memory, reads and writes";
    o->result.against = against_names[BENCH_MEMCPY_TRAFFIC];
    o->result.at_least = 0.8;
    return bench_quant_run(&b->buffers, &o->rounds, &b->guard, o->round);
}

static tb_status run_first(bench *b, bench_other *o) {
    o->result.work = "the model for the first time, 4 to 4 ranks";
    o->result.against = "the second time";
    o->result.at_least = 0.8;
    o->result.limit_weight = 1;
    return bench_first_run(b->size, &b->batch, &o->rounds, &b->guard, o->round);
}

static tb_status run_bus(bench *b, bench_other *o) {
    o->result.work = "the model through agents, 4 to 4 ranks";
    o->result.against = "without agents";
    o->result.at_least = 0.95;
    o->result.limit_weight = 1;
    return bench_bus_run(BENCH_BUS, b->size, NULL, &b->batch, &o->rounds, &b->guard, o->round);
}

static tb_status run_rtt(bench *b, bench_other *o) {
    o->result.work = "QueryStatus to an agent and back";
    o->result.against = "a bare Unix socket";
    o->result.unit = BENCH_US;
    o->result.at_most = 1.3;
    return bench_rtt_run(&b->batch, &o->rounds, &b->guard, o->round);
}

tb_status bench_run_other(bench *b, const char *name, const void *arg, tb_status (*run)(bench *b, bench_other *o)) {
    if (!bench_is_wanted(b, name))
        return TB_OK;
    bench_other o = {.rounds = bench_rounds_begin(b->rounds, b->budget_ns, tool_now_ns()),
                     .arg = arg,
                     .result = {.name = name, .extra_bytes = -1}};
    samples *s = tb__calloc(1, sizeof *s);
    o.round = tb__calloc((size_t)b->rounds, sizeof *o.round);
    tb_status status = s && o.round ? run(b, &o) : TB_NO_MEMORY;
    if (status == TB_OK) {
        add_medians(&o.result, o.round, o.rounds.done, s);
        status = bench_publish(b, o.result);
    } else {
        free(o.result.reason);
        bench_say_failure(name, status);
        status = bench_publish_failure(b, status, o.result);
    }
    free(s);
    free(o.round);
    fit_size(b, name, &o.rounds);
    return status;
}

/* ---- Several hosts ------------------------------------------------------------------------------------------- */

enum { NET_SHARE = 4 }; /* of the size: networks are slower than memory */

static tb_status run_net_row_col(bench *b, bench_other *o) {
    o->result.work = "f32 matrix, Shard(0) to Shard(1), 2 to 2 ranks, host to host";
    o->result.against = "iperf3";
    o->result.at_least = 0.85;
    return bench_net_row_col_run(&b->bed, b->size / NET_SHARE, &b->batch, &o->rounds, &b->guard, o->round,
                                 &o->result.reason);
}

static tb_status run_net_replicate(bench *b, bench_other *o) {
    o->result.work = "f32 matrix, 1 host to 3: what leaves the one";
    o->result.against = "the matrix";
    o->result.unit = BENCH_GB;
    o->result.at_most = 1.05;
    return bench_net_replicate_run(&b->bed, b->size / NET_SHARE, &b->batch, &o->rounds, &b->guard, o->round);
}

static tb_status add_mpi_line(bench *b, tb_status measured, bench_result result, double ours,
                              const bench_mpi_rates *rates, const char *why) {
    if (!bench_is_wanted(b, result.name))
        return TB_OK;
    if (measured != TB_OK)
        return bench_publish_failure(b, measured, result);
    result.against = "MPI_Alltoallw";
    result.rounds = b->rounds;
    result.extra_bytes = -1;
    result.ours = ours;
    result.theirs = rates->alltoallw;
    result.ratio = why ? 0 : ours / rates->alltoallw;
    if (why && !(result.reason = tb__strdup(why)))
        return TB_NO_MEMORY;
    return bench_publish(b, result);
}

/* One run of a program has both lines, and medians of its own. */
static tb_status run_mpi(bench *b) {
    if (!bench_is_wanted(b, BENCH_MPI_ROW_COL) && !bench_is_wanted(b, BENCH_AUTO_ROW_COL))
        return TB_OK;
    bench_mpi_rates rates = {0};
    char *why = NULL;
    tool_show_line("%s, %s", BENCH_MPI_ROW_COL, BENCH_AUTO_ROW_COL);
    tb_status measured = bench_mpi_run(b->size / NET_SHARE, b->rounds, &b->guard, &rates, &why);
    bench_say_failure(BENCH_MPI_ROW_COL, measured);
    bench_result mpi = {.name = BENCH_MPI_ROW_COL,
                        .work = "f32 matrix, rows to columns, 4 ranks of MPI, transport mpi",
                        .at_least = 0.9};
    bench_result automatic = {.name = BENCH_AUTO_ROW_COL, .work = "the same, transport auto", .at_least = 1.7};
    tb_status status = add_mpi_line(b, measured, mpi, rates.mpi, &rates, why);
    if (status == TB_OK)
        status = add_mpi_line(b, measured, automatic, rates.automatic, &rates, why);
    free(why);
    return status;
}

/* Lines between hosts, for which there have to be some. */
static tb_status run_net(bench *b) {
    static const struct {
        const char *name;
        tb_status (*run)(bench *b, bench_other *o);
    } lines[] = {{BENCH_NET_ROW_COL, run_net_row_col}, {BENCH_NET_REPLICATE, run_net_replicate}};
    if (!bench_is_wanted(b, BENCH_NET_ROW_COL) && !bench_is_wanted(b, BENCH_NET_REPLICATE))
        return TB_OK;
    tool_show_line("making %d hosts", BENCH_NHOSTS);
    tb_status made = bench_bed_start(&b->bed, BENCH_NHOSTS, &b->guard);
    bench_say_failure("", made);
    tb_status status = TB_OK;
    for (size_t i = 0; i < sizeof lines / sizeof *lines && status == TB_OK; i++) {
        if (made == TB_OK)
            status = bench_run_other(b, lines[i].name, NULL, lines[i].run);
        else if (bench_is_wanted(b, lines[i].name))
            status = bench_publish_failure(b, made, (bench_result){.name = lines[i].name, .at_least = 1});
    }
    if (made == TB_OK)
        bench_bed_stop(&b->bed);
    return status;
}

static tb_status run_hosts(bench *b) {
    TB_TRY(run_net(b));
    return run_mpi(b);
}

/* ---- All ----------------------------------------------------------------------------------------------------- */

/* How much the first line moves, by how long it takes to fill some memory: a line takes ten times as long, at least, as
 * it takes to make the buffers. */
static tb_status choose_size(bench *b) {
    enum { PROBE = 64 << 20, TIMES = 10 };
    tool_buffers probe = {0};
    int64_t began = tool_now_ns(), size = b->size;
    if (b->is_size_given || b->budget_ns == 0)
        return TB_OK;
    TB_TRY(tool_buffers_init(&probe, PROBE));
    int64_t took = (tool_now_ns() - began) * TIMES * (size / PROBE);
    tool_buffers_fini(&probe);
    b->size = bench_fit_size(size, took / 2, b->budget_ns);
    if (b->size < size)
        tool_say("memory is slow here: lines move %s instead of %s", tool_size(b->size).text, tool_size(size).text);
    return TB_OK;
}

static tb_status run_all(bench *b) {
    tool_show_line("making the buffers of memcpy");
    TB_TRY(choose_size(b));
    TB_TRY(tool_buffers_init(&b->buffers, (size_t)b->size));
    TB_TRY(run_limit(b));
    for (size_t i = 0; i < bench_ncases; i++) {
        const bench_case *c = &bench_cases[i];
        bool is_any_wanted = false;
        for (int l = 0; l < c->nlines; l++)
            is_any_wanted = is_any_wanted || bench_is_wanted(b, c->line[l].name);
        if (is_any_wanted)
            TB_TRY(run_case(b, c));
    }
    TB_TRY(bench_run_other(b, BENCH_REFIT, NULL, run_refit));
    TB_TRY(bench_run_other(b, BENCH_QUANT, NULL, run_quant));
    TB_TRY(bench_run_other(b, BENCH_FIRST, NULL, run_first));
    TB_TRY(bench_run_other(b, BENCH_BUS, NULL, run_bus));
    TB_TRY(bench_run_other(b, BENCH_RTT, NULL, run_rtt));
    for (int i = 0; i < BENCH_NPEERS && b->with_peers; i++) {
        if (!bench_is_wanted(b, bench_peer_of(i).line))
            continue;
        tool_show_line("the same by others, %d of %d", i + 1, BENCH_NPEERS);
        TB_TRY(run_peer(b, i));
    }
    return bench_disk_run(b); /* last: the kernel is busy with its files for a while */
}

tb_status bench_run(bench *b) {
    return b->with_hosts ? run_hosts(b) : run_all(b);
}
