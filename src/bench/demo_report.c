/* How the demo is told: a line that moves while it runs, and the table at its end. */
#include "bench/demo.h"

#include <inttypes.h>

enum { BAR = 24, ELEMENT = 2 };

void demo_show_progress(const demo *d) {
    static const char *const words[TOOL_NSTEPS] = {
        [TOOL_PREPARE] = "filling", [TOOL_MOVE] = "moving", [TOOL_VERIFY] = "verifying"};
    if (d->step >= TOOL_NSTEPS || !words[d->step])
        return;
    /* All have something to fill; what is moved and verified is counted where it arrives. */
    int first = d->step == TOOL_PREPARE ? 0 : d->job.side[TOOL_SOURCE].nranks;
    int64_t done = 0, total = d->job.nbytes[TOOL_TARGET] + (first == 0 ? d->job.nbytes[TOOL_SOURCE] : 0);
    for (int rank = first; rank < d->job.nranks; rank++)
        done += atomic_load(&tool_ranks_slot(d->ranks, rank)->done);
    done = done < total ? done : total;
    char bar[BAR + 1] = {0};
    for (int i = 0; i < BAR; i++)
        bar[i] = (double)(i + 1) * (double)total <= (double)done * BAR ? '#' : '.';
    tool_show_line("version %d of %d  %-9s  [%s]  %s of %s", d->nmoved + 1, DEMO_NVERSIONS, words[d->step], bar,
                   tool_size(done).text, tool_size(total).text);
}

static void add_table(tb__text *out, const demo *d) {
    tool_table table = {0};
    tool_table_columns(&table, "#version", "#delivered", "#ms", "#GB/s");
    if (!d->gpu[0])
        tool_table_columns(&table, "#of memcpy");
    for (int phase = 0; phase < TB_PHASE_COUNT; phase++)
        tool_table_column(&table, tb_phase_name((tb_phase)phase), true);
    for (int i = 0; i < DEMO_NVERSIONS; i++) {
        const demo_version *version = &d->version[i];
        double gb_per_s = 1e-9 * (double)d->job.nbytes[TOOL_TARGET] / version->seconds;
        tool_table_cell(&table, "%d", i + 1);
        tool_table_cell(&table, "%s", tool_size(d->job.nbytes[TOOL_TARGET]).text);
        tool_table_cell(&table, "%.1f", version->seconds * 1e3);
        tool_table_cell(&table, "%.2f", gb_per_s);
        if (!d->gpu[0])
            tool_table_cell(&table, "%.0f%%", gb_per_s / d->memcpy_gb_per_s * 100);
        for (int phase = 0; phase < TB_PHASE_COUNT; phase++)
            tool_table_cell(&table, "%.1f", version->phase[phase] * 1e3);
    }
    tool_table_finish(&table, out);
}

static void add_failed(tool_table *table) {
    tool_table_cell(table, "%d", DEMO_KILLED);
    tool_table_cell(table, "%s", "failed");
    for (int i = 2; i < table->ncolumns; i++)
        tool_table_cell(table, "%s", "");
}

/* With agents: how each version ended, the one that failed before it came the second time. */
static void add_bus_table(tb__text *out, const demo *d) {
    tool_table table = {0};
    tool_table_columns(&table, "#version", "result", "#delivered", "#ms", "#GB/s");
    if (!d->gpu[0])
        tool_table_columns(&table, "#of memcpy");
    tool_table_columns(&table, "verified");
    for (int i = 0; i < DEMO_NVERSIONS; i++) {
        double gb_per_s = 1e-9 * (double)d->job.nbytes[TOOL_TARGET] / d->version[i].seconds;
        if (i + 1 == DEMO_KILLED)
            add_failed(&table);
        tool_table_cell(&table, "%d", i + 1);
        tool_table_cell(&table, "%s", "committed");
        tool_table_cell(&table, "%s", tool_size(d->job.nbytes[TOOL_TARGET]).text);
        tool_table_cell(&table, "%.1f", d->version[i].seconds * 1e3);
        tool_table_cell(&table, "%.2f", gb_per_s);
        if (!d->gpu[0])
            tool_table_cell(&table, "%.0f%%", gb_per_s / d->memcpy_gb_per_s * 100);
        tool_table_cell(&table, "%s", "yes");
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

void demo_add_report(tb__text *out, const demo *d) {
    int32_t n = d->job.side[TOOL_TARGET].nranks;
    tb__text_add(out, "model     %zu bf16 tensors, %d layers, hidden size %" PRId64 ", ", d->job.tensors.count,
                 d->llama.nlayers, d->llama.hidden);
    tool_add_size(out, d->llama.nbytes);
    tb__text_add(out, "\n");
    add_side(out, "source", &d->job.side[TOOL_SOURCE]);
    add_side(out, "target", &d->job.side[TOOL_TARGET]);
    tb__text_add(out, "\n");
    (d->bus ? add_bus_table : add_table)(out, d);
    tb__text_add(out, "\n");
    if (d->bus)
        demo_bus_add_report(out, d);
    if (d->gpu[0])
        tb__text_add(out, "memory    of cuda:0, %s\n", d->gpu);
    else
        tb__text_add(out, "memcpy    %.2f GB/s by %d thread%s\n", d->memcpy_gb_per_s, d->nthreads,
                     d->nthreads == 1 ? "" : "s");
    tb__text_add(out, "%sverified  all %" PRId64 " elements on %" PRId32 " rank%s, in each of %d versions%s\n",
                 tool_bold(), d->nverified / DEMO_NVERSIONS / ELEMENT, n, n == 1 ? "" : "s", DEMO_NVERSIONS,
                 tool_plain());
}
