/* A whole plan, as a table for people and as JSON for programs. */
#include "tools/tools.h"

#include <inttypes.h>

enum { MOST_ROWS = 32 }; /* of a table, unless all are asked for */

/* A transfer's mode, as in chunks. */
static const char *kind_name(const tool_transfer *t) {
    tb_chunk_mode kind = tool_is_local(t) ? TB_LOCAL : t->ntargets > 1 ? TB_BROADCAST : TB_P2P;
    return tb_chunk_mode_name(kind);
}

static int64_t bytes_in_all(const tool_transfer *t) {
    int64_t nbytes;
    return __builtin_mul_overflow(t->nbytes, t->ntargets, &nbytes) ? INT64_MAX : nbytes;
}

/* An index, and how much it moves. */
typedef struct load {
    int64_t nbytes;
    size_t index;
} load;

static int compare_loads(const void *left, const void *right) {
    const load *a = left, *b = right;
    return a->nbytes != b->nbytes ? (a->nbytes < b->nbytes) - (a->nbytes > b->nbytes)
                                  : (a->index > b->index) - (a->index < b->index);
}

static void add_transfer_row(tool_table *table, const tool_plan_view *view, const tool_transfer *t,
                             bool has_contributors) {
    tb__text cell = {0};
    if (t->source == TB_NO_RANK)
        tool_table_cell(table, "zeros");
    else
        tool_table_cell(table, "%" PRId32, t->source);
    if (t->source == t->targets[0])
        tb__text_add(&cell, "itself");
    else
        tool_add_ranks(&cell, t->targets, t->ntargets, 5);
    tool_table_take(table, &cell);
    tool_table_cell(table, "%s", kind_name(t));
    if (t->source != TB_NO_RANK && t->nboxes == 1)
        tool_add_box(&cell, view->shape.ndim, t->start, t->len);
    else if (t->source != TB_NO_RANK)
        tb__text_add(&cell, "%" PRId64 " boxes", t->nboxes);
    else
        tb__text_add(&cell, "-");
    tool_table_take(table, &cell);
    if (has_contributors) {
        if (t->ncontributors)
            tool_table_cell(table, "%" PRIu32 " ranks", t->ncontributors);
        else
            tool_table_cell(table, "-");
    }
    tool_table_cell(table, "%" PRId64, t->nboxes * t->ntargets);
    tool_table_cell(table, "%" PRId64, bytes_in_all(t));
    tool_table_cell(table, "%s", bytes_in_all(t) >= 1024 ? tool_size(bytes_in_all(t)).text : "");
}

static void add_transfers(tb__text *out, const tool_plan_view *view, bool all) {
    size_t count = view->transfers.count, shown = all || count <= MOST_ROWS ? count : MOST_ROWS;
    load *loads = tb__malloc(count, sizeof *loads);
    if (!loads) {
        out->failed = true;
        return;
    }
    bool has_contributors = false;
    for (size_t i = 0; i < count; i++) {
        loads[i] = (load){bytes_in_all(&view->transfers.item[i]), i};
        has_contributors |= view->transfers.item[i].ncontributors > 0;
    }
    if (shown < count)
        qsort(loads, count, sizeof *loads, compare_loads);
    tool_table table = {0};
    tool_table_columns(&table, "#from", "to", "kind", "box at source");
    if (has_contributors)
        tool_table_columns(&table, "reduced over");
    tool_table_columns(&table, "#chunks", "#bytes", "#");
    for (size_t i = 0; i < shown; i++)
        add_transfer_row(&table, view, &view->transfers.item[loads[i].index], has_contributors);
    tool_table_finish(&table, out);
    if (shown < count)
        tb__text_add(out, "%sthe largest %zu of %zu; --all shows the others%s\n", tool_dim(), shown, count,
                     tool_plain());
    tb__text_add(out, "\n");
    free(loads);
}

/* Local bytes of each rank of view->stats, to be freed by the caller. */
static int64_t *local_bytes(const tool_plan_view *view) {
    const tb_plan_stats *s = &view->stats;
    int64_t *local = tb__calloc((size_t)s->nranks, sizeof *local);
    int32_t i = 0;
    for (size_t t = 0; local && t < view->transfers.count; t++) {
        const tool_transfer *transfer = &view->transfers.item[t];
        if (transfer->source == TB_NO_RANK || !tool_is_local(transfer))
            continue;
        while (s->ranks[i] != transfer->source) /* both are in ascending order */
            i++;
        local[i] += transfer->nbytes;
    }
    return local;
}

/* Figures of a rank. Those without information are left out of the table. */
enum { SENDS, EGRESS, RECEIVES, KEEPS, REDUCES, NFIGURES };

typedef struct figures {
    const char *title[NFIGURES];
    const int64_t *bytes[NFIGURES]; /* by rank */
    int64_t sum[NFIGURES];
    bool is_shown[NFIGURES];
    int64_t *keeps;
} figures;

static bool figures_init(figures *f, const tool_plan_view *view) {
    const tb_plan_stats *s = &view->stats;
    *f = (figures){
        .title = {"sends", "egress", "receives", "keeps", "combines"},
        .keeps = local_bytes(view),
    };
    if (!f->keeps)
        return false;
    f->bytes[SENDS] = s->send_bytes;
    f->bytes[EGRESS] = s->egress_bytes;
    f->bytes[RECEIVES] = s->recv_bytes;
    f->bytes[KEEPS] = f->keeps;
    f->bytes[REDUCES] = s->reduce_bytes;
    for (int k = 0; k < NFIGURES; k++) {
        for (int32_t i = 0; i < s->nranks; i++) {
            if (__builtin_add_overflow(f->sum[k], f->bytes[k][i], &f->sum[k]))
                f->sum[k] = INT64_MAX;
        }
        f->is_shown[k] = f->sum[k] != 0;
    }
    f->is_shown[SENDS] = f->is_shown[RECEIVES] = true;
    f->is_shown[EGRESS] = f->sum[EGRESS] != f->sum[SENDS];
    return true;
}

static void add_ranks(tb__text *out, const tool_plan_view *view, const figures *f, bool all) {
    const tb_plan_stats *s = &view->stats;
    int32_t shown = all || s->nranks <= MOST_ROWS ? s->nranks : MOST_ROWS;
    load *loads = tb__malloc((size_t)s->nranks, sizeof *loads);
    if (!loads) {
        out->failed = true;
        return;
    }
    for (int32_t i = 0; i < s->nranks; i++)
        loads[i] = (load){s->send_bytes[i] > s->recv_bytes[i] ? s->send_bytes[i] : s->recv_bytes[i], (size_t)i};
    if (shown < s->nranks)
        qsort(loads, (size_t)s->nranks, sizeof *loads, compare_loads);
    tool_table table = {0};
    tool_table_columns(&table, "#rank");
    for (int k = 0; k < NFIGURES; k++) {
        if (f->is_shown[k]) {
            tool_table_column(&table, f->title[k], true);
            tool_table_columns(&table, "#");
        }
    }
    for (int32_t i = 0; i < shown; i++) {
        tool_table_cell(&table, "%" PRId32, s->ranks[loads[i].index]);
        for (int k = 0; k < NFIGURES; k++) {
            int64_t nbytes = f->bytes[k][loads[i].index];
            if (f->is_shown[k]) {
                tool_table_cell(&table, "%" PRId64, nbytes);
                tool_table_cell(&table, "%s", nbytes >= 1024 ? tool_size(nbytes).text : "");
            }
        }
    }
    tool_table_finish(&table, out);
    if (shown < s->nranks)
        tb__text_add(out, "%sthe busiest %" PRId32 " of %" PRId32 " ranks; --all shows the others%s\n", tool_dim(),
                     shown, s->nranks, tool_plain());
    tb__text_add(out, "\n");
    free(loads);
}

/* The busiest sender: its rank, or TB_NO_RANK if nothing is sent. */
static int32_t busiest(const tb_plan_stats *s) {
    for (int32_t i = 0; i < s->nranks; i++) {
        if (s->max_send > 0 && s->send_bytes[i] == s->max_send)
            return s->ranks[i];
    }
    return TB_NO_RANK;
}

void tool_add_plan_heading(tb__text *out, const tool_plan_view *view) {
    int64_t nbytes = 0;
    tb_shape_size(&view->shape, view->dtype, NULL, &nbytes);
    tb__text_add(out, "tensor    ");
    tool_add_shape(out, &view->shape);
    tb__text_add(out, " %s, ", tb_dtype_name(view->dtype));
    tool_add_size(out, nbytes);
    tb__text_add(out, "\nsource    ");
    tool_add_layout(out, view->src);
    tb__text_add(out, "\ntarget    ");
    tool_add_layout(out, view->dst);
    tb__text_add(out, "\n\n");
}

static void add_summary(tb__text *out, const tool_plan_view *view, const figures *f) {
    const tb_plan_stats *s = &view->stats;
    tb__text_add(out, "moves     ");
    tool_add_size(out, s->total_bytes);
    tb__text_add(out, " between ranks; %" PRId64 " chunk%s in all\n", s->nchunks, s->nchunks == 1 ? "" : "s");
    if (s->local_bytes) {
        tb__text_add(out, "local     ");
        tool_add_size(out, s->local_bytes);
        tb__text_add(out, " stay on the rank that has them\n");
    }
    if (f->is_shown[EGRESS]) {
        tb__text_add(out, "egress    ");
        tool_add_size(out, f->sum[EGRESS]);
        tb__text_add(out, " leave their ranks if a box for several others is sent once\n");
    }
    if (f->is_shown[REDUCES]) {
        tb__text_add(out, "reduces   ");
        tool_add_size(out, f->sum[REDUCES]);
        tb__text_add(out, " of other ranks' contributions are combined\n");
    }
    if (s->max_send > 0) {
        tb__text_add(out, "busiest   rank %" PRId32 " sends ", busiest(s));
        tool_add_size(out, s->max_send);
        if (s->max_send == s->min_max_send) {
            tb__text_add(out, ", which is the lower bound\n");
        } else {
            tb__text_add(out, "; the lower bound is ");
            tool_add_size(out, s->min_max_send);
            tb__text_add(out, "\n");
        }
    }
    tb__text_add(out, "check     ok: every target element is written once, from a rank that holds it\n");
}

void tool_add_plan(tb__text *out, const tool_plan_view *view, bool all) {
    figures f;
    if (!figures_init(&f, view)) {
        out->failed = true;
        return;
    }
    tool_add_plan_heading(out, view);
    if (view->transfers.count > 0) {
        add_transfers(out, view, all);
        add_ranks(out, view, &f, all);
    }
    add_summary(out, view, &f);
    free(f.keeps);
}

static void add_layout_json(tb__text *out, const char *key, const tb_layout *layout) {
    char *text;
    if (tb_layout_format(layout, &text) != TB_OK) {
        out->failed = true;
        return;
    }
    tb__text_add(out, "\"%s\":", key);
    tb__text_add_json(out, text);
    free(text);
}

void tool_add_plan_json(tb__text *out, const tool_plan_view *view, const char *more) {
    const tb_plan_stats *s = &view->stats;
    figures f;
    int64_t nbytes = 0;
    if (!figures_init(&f, view)) {
        out->failed = true;
        return;
    }
    tb_shape_size(&view->shape, view->dtype, NULL, &nbytes);
    tb__text_add(out, "{\"shape\":[");
    for (int d = 0; d < view->shape.ndim; d++)
        tb__text_add(out, "%s%" PRId64, d ? "," : "", view->shape.dim[d]);
    tb__text_add(out, "],\"dtype\":\"%s\",\"bytes\":%" PRId64 ",", tb_dtype_name(view->dtype), nbytes);
    add_layout_json(out, "src", view->src);
    tb__text_add(out, ",");
    add_layout_json(out, "dst", view->dst);
    tb__text_add(
        out,
        ",\"check\":\"ok\",\"chunks\":%" PRId64 ",\"total_bytes\":%" PRId64 ",\"local_bytes\":%" PRId64
        ",\"egress_bytes\":%" PRId64 ",\"reduce_bytes\":%" PRId64 ",\"max_send\":%" PRId64 ",\"min_max_send\":%" PRId64,
        s->nchunks, s->total_bytes, s->local_bytes, f.sum[EGRESS], f.sum[REDUCES], s->max_send, s->min_max_send);
    if (busiest(s) != TB_NO_RANK)
        tb__text_add(out, ",\"busiest\":%" PRId32, busiest(s));
    else
        tb__text_add(out, ",\"busiest\":null");
    tb__text_add(out, ",\"ranks\":[");
    for (int32_t i = 0; i < s->nranks; i++)
        tb__text_add(out,
                     "%s{\"rank\":%" PRId32 ",\"send_bytes\":%" PRId64 ",\"egress_bytes\":%" PRId64
                     ",\"recv_bytes\":%" PRId64 ",\"local_bytes\":%" PRId64 ",\"reduce_bytes\":%" PRId64 "}",
                     i ? "," : "", s->ranks[i], s->send_bytes[i], s->egress_bytes[i], s->recv_bytes[i], f.keeps[i],
                     s->reduce_bytes[i]);
    tb__text_add(out, "],\"transfers\":[");
    for (size_t i = 0; i < view->transfers.count; i++) {
        const tool_transfer *t = &view->transfers.item[i];
        tb__text_add(out, i ? ",{\"source\":" : "{\"source\":");
        if (t->source == TB_NO_RANK)
            tb__text_add(out, "null");
        else
            tb__text_add(out, "%" PRId32, t->source);
        for (uint32_t j = 0; j < t->ntargets; j++)
            tb__text_add(out, "%s%" PRId32, j ? "," : ",\"targets\":[", t->targets[j]);
        tb__text_add(out, "],\"kind\":\"%s\",\"chunks\":%" PRId64 ",\"bytes\":%" PRId64 "}", kind_name(t),
                     t->nboxes * t->ntargets, bytes_in_all(t));
    }
    tb__text_add(out, "]%s%s}\n", more ? "," : "", more ? more : "");
    free(f.keeps);
}
