/* How the demo is told: a line that moves while it runs, and the table at its end. */
#include "tools/demo.h"

#include <inttypes.h>

enum { BAR = 24 };

/* All of the ranks that have something to do in this stage. */
static bool takes_part(const tool_job *job, int rank, tool_stage stage) {
    int32_t seat;
    return stage == TOOL_PREPARE || tool_job_side(job, rank, &seat) == TOOL_TARGET;
}

/* Where the slowest rank is. */
static int slowest_step(const tool_job *job) {
    int step = TOOL_NVERSIONS * TOOL_NSTAGES;
    for (int rank = 0; rank < job->nranks; rank++) {
        int theirs = atomic_load(&job->shared->rank[rank].step);
        step = theirs < step ? theirs : step;
    }
    return step;
}

void tool_add_progress(tb__text *out, const tool_job *job) {
    static const char *const words[TOOL_NSTAGES] = {
        [TOOL_PREPARE] = "filling", [TOOL_MOVE] = "moving", [TOOL_VERIFY] = "verifying"};
    int step = slowest_step(job);
    if (step >= TOOL_NVERSIONS * TOOL_NSTAGES)
        return;
    tool_stage stage = (tool_stage)(step % TOOL_NSTAGES);
    int64_t done = 0, total = 0;
    for (int rank = 0; rank < job->nranks; rank++) {
        const tool_rank_state *state = &job->shared->rank[rank];
        if (!takes_part(job, rank, stage))
            continue;
        int64_t theirs = atomic_load(&state->step) > step ? job->nbytes[rank] : atomic_load(&state->done);
        done += theirs < job->nbytes[rank] ? theirs : job->nbytes[rank];
        total += job->nbytes[rank];
    }
    int filled = total > 0 ? (int)((double)done / (double)total * BAR) : 0;
    tb__text_add(out, "version %d of %d  %-9s  [", step / TOOL_NSTAGES + 1, TOOL_NVERSIONS, words[stage]);
    for (int i = 0; i < BAR; i++)
        tb__text_add(out, "%c", i < filled ? '#' : '.');
    tb__text_add(out, "]  %s", tool_size(done).text);
    tb__text_add(out, " of %s", tool_size(total).text);
}

static double slowest_phase(const tool_job *job, int version, int phase) {
    double slowest = 0;
    for (int rank = 0; rank < job->nranks; rank++) {
        double theirs = job->shared->rank[rank].phase[version][phase];
        slowest = theirs > slowest ? theirs : slowest;
    }
    return slowest;
}

/* From the moment when all ranks were ready to the arrival of the last one's data. */
static double version_seconds(const tool_job *job, int version) {
    int64_t last = 0;
    for (int rank = job->side[TOOL_SOURCE].nranks; rank < job->nranks; rank++) {
        int64_t theirs = job->shared->rank[rank].arrived_ns[version];
        last = theirs > last ? theirs : last;
    }
    return (double)(last - job->shared->rank[0].began_ns[version]) * 1e-9;
}

int64_t tool_job_delivered(const tool_job *job) {
    int64_t nbytes = 0;
    for (int rank = job->side[TOOL_SOURCE].nranks; rank < job->nranks; rank++)
        nbytes += job->nbytes[rank];
    return nbytes;
}

static void add_table(tb__text *out, const tool_job *job, double memcpy_rate) {
    tool_table table = {0};
    tool_table_column(&table, "version", true);
    tool_table_column(&table, "delivered", true);
    tool_table_column(&table, "ms", true);
    tool_table_column(&table, "GB/s", true);
    tool_table_column(&table, "of memcpy", true);
    for (int phase = 0; phase < TB_PHASE_COUNT; phase++)
        tool_table_column(&table, tb_phase_name((tb_phase)phase), true);
    for (int version = 0; version < TOOL_NVERSIONS; version++) {
        double seconds = version_seconds(job, version);
        double rate = (double)tool_job_delivered(job) / seconds;
        tool_table_cell(&table, "%d", version + 1);
        tool_table_cell(&table, "%s", tool_size(tool_job_delivered(job)).text);
        tool_table_cell(&table, "%.1f", seconds * 1e3);
        tool_table_cell(&table, "%.2f", rate * 1e-9);
        tool_table_cell(&table, "%.0f%%", rate / memcpy_rate * 100);
        for (int phase = 0; phase < TB_PHASE_COUNT; phase++)
            tool_table_cell(&table, "%.1f", slowest_phase(job, version, phase) * 1e3);
    }
    tool_table_finish(&table, out);
}

static void add_side(tb__text *out, const char *word, const tool_side *side) {
    tb__text_add(out, "%s    %" PRId32 " process%s; ", word, side->nranks, side->nranks == 1 ? "" : "es");
    tool_add_layout(out, side->layout[TOOL_CUT_COLUMN]);
    if (!tb_layout_equal(side->layout[TOOL_CUT_COLUMN], side->layout[TOOL_CUT_ROW])) {
        tb__text_add(out, "; o_proj, down_proj ");
        tool_add_layout(out, side->layout[TOOL_CUT_ROW]);
    }
    if (!tb_layout_equal(side->layout[TOOL_CUT_COLUMN], side->layout[TOOL_CUT_NORM]))
        tb__text_add(out, "; norms replicated");
    tb__text_add(out, "\n");
}

void tool_add_job(tb__text *out, const tool_job *job, double memcpy_rate, int nthreads) {
    int64_t nverified = 0;
    int32_t n = job->side[TOOL_TARGET].nranks;
    for (int rank = 0; rank < job->nranks; rank++)
        nverified += job->shared->rank[rank].nverified;
    tb__text_add(out, "model     %zu bf16 tensors, %d layers, hidden size %" PRId64 ", ", job->model.weights.count,
                 job->model.nlayers, job->model.hidden);
    tool_add_size(out, job->model.nelements * TOOL_ELEMENT);
    tb__text_add(out, "\n");
    add_side(out, "source", &job->side[TOOL_SOURCE]);
    add_side(out, "target", &job->side[TOOL_TARGET]);
    tb__text_add(out, "\n");
    add_table(out, job, memcpy_rate);
    tb__text_add(out, "\nmemcpy    %.2f GB/s by %d thread%s\n", memcpy_rate * 1e-9, nthreads, nthreads == 1 ? "" : "s");
    tb__text_add(out, "%sverified  all %" PRId64 " elements on %" PRId32 " rank%s, in each of %d versions%s\n",
                 tool_bold(), nverified / TOOL_NVERSIONS, n, n == 1 ? "" : "s", TOOL_NVERSIONS, tool_plain());
}
