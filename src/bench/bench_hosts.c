/* Lines of several hosts: how fast tensors cross a network, next to iperf3, and how often one that many want leaves its
 * host. Ranks are processes in network namespaces, which one machine can have many of. */
#include "base/proof.h"
#include "bench/bench.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>

enum { STORE_PORT = 7000, IPERF_PORT = 5201 };

/* Who is where: so many ranks of each side, and their hosts, sources first. */
typedef struct net_case {
    const char *name, *src, *dst;
    int host[8];
} net_case;

static const net_case row_col = {BENCH_NET_ROW_COL, "mesh=2 place=Shard(0)", "mesh=2 place=Shard(1)", {0, 0, 1, 1}};
static const net_case replicate = {
    BENCH_NET_REPLICATE, "mesh=1 place=Shard(0)", "mesh=3 place=Replicate", {0, 1, 2, 3}};

typedef struct trial {
    const net_case *c;
    const bench_bed *bed;
    tool_guard *guard;
    tool_job job;
    char store[64];
    char token[2 * TB__SHA256_NBYTES + 1];
    tool_ranks *ranks;
    tool_mover mover; /* in a rank's process: that rank */
} trial;

/* In a rank's process. UCX knows that all of this is one machine, and would not use the network. */
static tb_status work(void *arg, int rank, int step, tool_slot *slot) {
    trial *t = arg;
    if (step == TOOL_ALLOCATE) {
        TB_TRY(bench_bed_enter(t->bed, t->c->host[rank]));
        setenv("UCX_TLS", "tcp", 0);
        tool_mover_init(&t->mover, &t->job, rank);
    }
    return tool_mover_do(&t->mover, (tool_step)step, slot);
}

static tb_status add_matrix(tool_tensors *tensors, int64_t size) {
    int64_t columns = 1;
    while (4 * columns * columns <= size / 4)
        columns *= 2;
    tool_tensor tensor = {
        .name = "matrix", .shape = {2, {size / 4 / columns / 2 * 2, columns}}, .dtype = {TB_F32, TB_F32}};
    return tb__vec_push(tensors, tensor) ? TB_OK : TB_NO_MEMORY;
}

/* The store listens beyond loopback. */
static tb_status make_token(char out[2 * TB__SHA256_NBYTES + 1]) {
    uint8_t bytes[TB__SHA256_NBYTES];
    TB_TRY(tb__random_bytes(bytes, sizeof bytes));
    for (size_t i = 0; i < sizeof bytes; i++)
        snprintf(out + 2 * i, 3, "%02x", bytes[i]);
    return TB_OK;
}

static tb_status start(trial *t, int64_t size) {
    tool_job *job = &t->job;
    snprintf(t->store, sizeof t->store, "tcp://%s:%d", t->bed->address[0], STORE_PORT);
    job->store = t->store;
    TB_TRY(make_token(t->token));
    job->token = t->token;
    TB_TRY(tool_side_init(&job->side[TOOL_SOURCE], TOOL_SOURCE, "from", t->c->src, 0));
    TB_TRY(tool_side_init(&job->side[TOOL_TARGET], TOOL_TARGET, "to", t->c->dst, 0));
    TB_TRY(add_matrix(&job->tensors, size));
    TB_TRY(tool_job_weigh(job));
    TB_TRY(tool_job_start(job, &(tool_ranks_opts){.work = work, .arg = t}, t->guard, &t->ranks));
    tool_show_line("%s: making the tensors", t->c->name);
    TB_TRY(tool_ranks_step(t->ranks, TOOL_ALLOCATE, NULL));
    TB_TRY(tool_ranks_step(t->ranks, TOOL_PREPARE, NULL));
    tool_show_line("%s: connecting the ranks", t->c->name);
    return tool_job_connect(job, t->ranks);
}

static void end(trial *t) {
    tool_ranks_destroy(t->ranks);
    tool_job_fini(&t->job);
}

/* Rounds of one of the measurements below; the last moves another version, which is verified. */
static tb_status run_rounds(trial *t, bench_rounds *rounds, tb_status (*measure)(trial *t, bench_round *out),
                            bench_round *out) {
    double seconds;
    tool_show_line("%s: warming up", t->c->name);
    TB_TRY(tool_ranks_step(t->ranks, TOOL_MOVE, &seconds));
    while (bench_rounds_next(rounds, tool_now_ns())) {
        tool_show_line("%s: round %d of %d", t->c->name, rounds->done, rounds->most);
        if (rounds->is_last)
            TB_TRY(tool_ranks_step(t->ranks, TOOL_PREPARE, NULL));
        TB_TRY(measure(t, &out[rounds->done - 1]));
    }
    TB_TRY(tool_ranks_step(t->ranks, TOOL_VERIFY, NULL));
    return tool_ranks_step(t->ranks, TOOL_CLOSE, NULL);
}

static tb_status run(const net_case *c, const bench_bed *bed, int64_t size, const tb_batch_opts *opts,
                     bench_rounds *rounds, tool_guard *guard, tb_status (*measure)(trial *t, bench_round *out),
                     bench_round *out) {
    trial t = {.c = c, .bed = bed, .guard = guard, .job = {.batch = *opts}};
    tb_status status = start(&t, size);
    if (status == TB_OK)
        status = run_rounds(&t, rounds, measure, out);
    end(&t);
    return status;
}

/* ---- Next to iperf3 ------------------------------------------------------------------------------------------- */

static const char missing_iperf[] = "iperf3 is not installed: apt-get install iperf3";

/* On a host, to its end. What keeps it from running goes to `reason`. */
static tb_status run_iperf(const bench_bed *bed, const char *const *arguments, tool_guard *guard, tb__text *said,
                           tb__text *reason) {
    const char *argv[16] = {bed->script, "exec"};
    for (int i = 0; arguments[i]; i++)
        argv[i + 2] = arguments[i];
    return bench_program_run(argv, "/tmp", guard, missing_iperf, said, reason);
}

/* What iperf3 tells in JSON; false where it was not heard. */
static bool read_rate(const tb__text *said, double *gb_per_s) {
    json_t *report = said->data ? json_loads(said->data, JSON_DISABLE_EOF_CHECK, NULL) : NULL;
    json_t *received = json_object_get(json_object_get(report, "end"), "sum_received");
    double bits = json_number_value(json_object_get(received, "bits_per_second"));
    json_decref(report);
    *gb_per_s = 1e-9 * bits / 8;
    return bits > 0;
}

/* One connection from host 0 to host 1, as many bytes. The server is asked again until it listens. */
static tb_status measure_iperf(const bench_bed *bed, int64_t nbytes, tool_guard *guard, double *gb_per_s,
                               tb__text *reason) {
    enum { TRIES = 50, NAP_MS = 100 };
    char count[24];
    tb__text said = {0};
    tb_status status = TB_OK;
    bool is_heard = false;
    snprintf(count, sizeof count, "%lld", (long long)nbytes);
    const char *const client[] = {"0", "iperf3", "-c", bed->address[1], "-n", count, "-J", NULL};
    for (int i = 0; i < TRIES && status == TB_OK && !is_heard; i++) {
        tb__text_fini(reason);
        *reason = (tb__text){0};
        status = run_iperf(bed, client, guard, &said, reason);
        is_heard = status == TB_OK && read_rate(&said, gb_per_s);
        if (reason->data && strcmp(reason->data, missing_iperf) == 0)
            break;
        if (!is_heard)
            poll(NULL, 0, NAP_MS);
    }
    if (status == TB_OK && !is_heard && reason->count == 0)
        tb__text_add(reason, "iperf3 told no rate");
    tb__text_fini(&said);
    return status;
}

/* Starts the server, which the end of the hosts will end, and has it heard once. */
static tb_status start_iperf(const bench_bed *bed, tool_guard *guard, tb__text *reason) {
    static const char *const server[] = {"1", "iperf3", "-s", "-D", NULL};
    tb__text said = {0};
    double unused;
    tb_status status = run_iperf(bed, server, guard, &said, reason);
    tb__text_fini(&said);
    return status != TB_OK || reason->count ? status : measure_iperf(bed, 1 << 20, guard, &unused, reason);
}

static tb_status measure_row_col(trial *t, bench_round *out) {
    double seconds;
    int64_t nbytes = t->job.nbytes[TOOL_TARGET];
    tb__text reason = {0};
    tb_status status = measure_iperf(t->bed, nbytes, t->guard, &out->theirs, &reason);
    if (status == TB_OK && reason.count)
        status = tb__fail(TB_IO, "%s", reason.data);
    tb__text_fini(&reason);
    TB_TRY(status);
    TB_TRY(tool_ranks_step(t->ranks, TOOL_MOVE, &seconds));
    out->ours = 1e-9 * (double)nbytes / seconds;
    return TB_OK;
}

tb_status bench_net_row_col_run(const bench_bed *bed, int64_t size, const tb_batch_opts *opts, bench_rounds *rounds,
                                tool_guard *guard, bench_round *out, char **reason) {
    tb__text why = {0};
    tb_status status = start_iperf(bed, guard, &why);
    if (status == TB_OK && why.count == 0)
        status = run(&row_col, bed, size, opts, rounds, guard, measure_row_col, out);
    else if (status == TB_OK)
        status = tb__text_take(&why, reason);
    tb__text_fini(&why);
    return status;
}

/* ---- What leaves a host --------------------------------------------------------------------------------------- */

static tb_status measure_egress(trial *t, bench_round *out) {
    int64_t before, after;
    TB_TRY(bench_bed_sent(t->bed, 0, t->guard, &before));
    TB_TRY(tool_ranks_step(t->ranks, TOOL_MOVE, NULL));
    TB_TRY(bench_bed_sent(t->bed, 0, t->guard, &after));
    out->ours = 1e-9 * (double)(after - before);
    out->theirs = 1e-9 * (double)t->job.nbytes[TOOL_SOURCE];
    return TB_OK;
}

tb_status bench_net_replicate_run(const bench_bed *bed, int64_t size, const tb_batch_opts *opts, bench_rounds *rounds,
                                  tool_guard *guard, bench_round *out) {
    return run(&replicate, bed, size, opts, rounds, guard, measure_egress, out);
}
