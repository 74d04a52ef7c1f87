/* Pages: one layout, or both sides of a plan and the traffic between them. */
#include "tools/svg.h"

#include "base/int.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

enum { WIDTH = 1000, MARGIN = 40, MARKS = 66 }; /* MARKS: room for the index marks at the left of a panel */

/* "Tensor 4096 x 4096 bf16, 32 MiB" */
static void add_tensor(tb__text *out, const tb_shape *shape, tb_dtype dtype) {
    int64_t nbytes = 0;
    tb__text_add(out, shape->ndim > 0 ? "Tensor " : "Scalar");
    for (int d = 0; d < shape->ndim; d++)
        tb__text_add(out, "%s%" PRId64, d ? " x " : "", shape->dim[d]);
    if (dtype == TB_DTYPE_NONE)
        return;
    tb_shape_size(shape, dtype, NULL, &nbytes);
    tb__text_add(out, " %s, %s", tb_dtype_name(dtype), tool_size(nbytes).text);
}

/* How large a panel is drawn: the shape's proportions, but never a thread. */
static svg_area panel_size(const tb_shape *shape, const svg_axes *axes, double w, double h) {
    if (shape->ndim == 0)
        return (svg_area){.w = 96, .h = 64};
    if (axes->nrows == 0)
        return (svg_area){.w = w, .h = 64};
    double down = 1, across = 1;
    for (int i = 0; i < axes->nrows; i++)
        down *= fmax(1, (double)shape->dim[axes->row[i]]);
    for (int i = 0; i < axes->ncolumns; i++)
        across *= fmax(1, (double)shape->dim[axes->column[i]]);
    double ratio = fmax(0.5, fmin(sqrt(across / down), 2.2));
    return ratio > w / h ? (svg_area){.w = w, .h = w / ratio} : (svg_area){.w = h * ratio, .h = h};
}

static tb_status draw_side(svg_canvas *canvas, svg_area area, const char *name, const tb_layout *layout,
                           const tb_shape *shape, const svg_axes *axes, size_t *missing) {
    enum { MOST_TEXT = 58 };
    tb__text text = {0};
    int32_t nranks = tb_layout_nranks(layout);
    tool_add_layout(&text, layout);
    svg_text(canvas, area.x, area.y - 34, (svg_style){.size = 16, .is_bold = true}, "%s: %" PRId32 " rank%s", name,
             nranks, nranks == 1 ? "" : "s");
    bool is_narrow = area.w < 500;
    svg_text(canvas, area.x, area.y - 14, (svg_style){.size = 11, .is_mono = true, .colour = SVG_GREY},
             is_narrow && text.count > MOST_TEXT ? "%.*s..." : "%.*s", is_narrow ? MOST_TEXT : (int)text.count,
             text.data ? text.data : "");
    canvas->body.failed |= text.failed;
    tb__text_fini(&text);
    return svg_draw_panel(canvas, area, layout, shape, axes, missing);
}

/* Colours of the ranks, for cells too small to be labelled. */
static void draw_legend(svg_canvas *canvas) {
    enum { MOST = 96, STEP = 56, CHIP = 11 };
    double top = canvas->bottom + 24;
    int32_t per_line = (WIDTH - 2 * MARGIN) / STEP, shown = canvas->nranks < MOST ? canvas->nranks : MOST;
    for (int32_t i = 0; i < shown; i++) {
        int32_t line = i / per_line;
        double x = MARGIN + i % per_line * STEP, y = top + line * 18;
        svg_rect(canvas, x, y, CHIP, CHIP, svg_rank_colour(canvas, canvas->ranks[i]).text, NULL, NULL);
        svg_text(canvas, x + CHIP + 4, y + CHIP - 1.5, (svg_style){.size = 11}, "%" PRId32, canvas->ranks[i]);
    }
    if (shown < canvas->nranks)
        svg_text(canvas, MARGIN, canvas->bottom + 18, (svg_style){.size = 11, .colour = SVG_GREY},
                 "and %" PRId32 " more ranks", canvas->nranks - shown);
}

tb_status tool_draw_layout(tb__text *out, const tb_layout *layout, const tb_shape *shape, tb_dtype dtype) {
    int32_t nranks = tb_layout_nranks(layout);
    int32_t *ranks = tb__malloc((size_t)nranks, sizeof *ranks);
    if (!ranks)
        return TB_NO_MEMORY;
    for (int32_t i = 0; i < nranks; i++)
        ranks[i] = tb_layout_rank_at(layout, i);
    qsort(ranks, (size_t)nranks, sizeof *ranks, tb__compare_int32);

    svg_canvas canvas = {.ranks = ranks, .nranks = nranks};
    svg_axes axes = svg_choose_axes(layout, NULL, shape);
    tb__text title = {0};
    size_t missing = 0;
    add_tensor(&title, shape, dtype);
    svg_text(&canvas, MARGIN, 48, (svg_style){.size = 22, .is_bold = true}, "%s", title.data ? title.data : "");
    svg_area area = panel_size(shape, &axes, WIDTH - 2 * MARGIN - (axes.nrows > 0 ? MARKS : 0), 460);
    area.x = axes.nrows > 0 ? MARGIN + MARKS : MARGIN;
    area.y = 124;
    tb_status status = draw_side(&canvas, area, "Layout", layout, shape, &axes, &missing);
    if (missing > 0)
        draw_legend(&canvas);
    svg_finish(&canvas, WIDTH, title.data ? title.data : "", out);
    tb__text_fini(&title);
    free(ranks);
    return status;
}

static void draw_figures(svg_canvas *canvas, const tool_plan_view *view) {
    const tb_plan_stats *s = &view->stats;
    svg_style style = {.size = 13, .colour = SVG_GREY};
    tb__text text = {0};
    tb__text_add(&text, "%s move%s between ranks, in %" PRId64 " chunk%s", tool_size(s->total_bytes).text,
                 s->total_bytes == 1 ? "s" : "", s->nchunks, s->nchunks == 1 ? "" : "s");
    if (s->local_bytes > 0)
        tb__text_add(&text, "; %s stay on their rank", tool_size(s->local_bytes).text);
    if (s->max_send > 0)
        tb__text_add(&text, "; the busiest sender sends %s, the lower bound is %s", tool_size(s->max_send).text,
                     tool_size(s->min_max_send).text);
    svg_text(canvas, MARGIN, 72, style, "%s", text.data ? text.data : "");
    canvas->body.failed |= text.failed;
    tb__text_fini(&text);
}

/* Side by side; bars, which are long and low, one above the other, so that their indices line up. */
static tb_status draw_sides(svg_canvas *canvas, const tool_plan_view *view) {
    svg_axes axes = svg_choose_axes(view->src, view->dst, &view->shape);
    bool is_stacked = axes.nrows == 0 && view->shape.ndim > 0;
    size_t missing = 0;
    svg_area area = panel_size(&view->shape, &axes, is_stacked ? WIDTH - 2 * MARGIN : 370, 320);
    area.x = axes.nrows > 0 ? MARGIN + MARKS : MARGIN;
    area.y = 148;
    TB_TRY(draw_side(canvas, area, "Source", view->src, &view->shape, &axes, &missing));
    if (is_stacked) {
        area.y = canvas->bottom + 66;
    } else {
        double between = area.x + 370 + 28;
        svg_text(canvas, between, area.y + area.h / 2 + 10,
                 (svg_style){.size = 30, .anchor = SVG_MIDDLE, .colour = SVG_LINE}, "\xE2\x86\x92");
        area.x += 370 + 28 + MARKS + 24;
    }
    return draw_side(canvas, area, "Target", view->dst, &view->shape, &axes, &missing);
}

tb_status tool_draw_plan(tb__text *out, const tool_plan_view *view) {
    svg_canvas canvas = {.ranks = view->stats.ranks, .nranks = view->stats.nranks};
    tb__text title = {0};
    add_tensor(&title, &view->shape, view->dtype);
    svg_text(&canvas, MARGIN, 48, (svg_style){.size = 22, .is_bold = true}, "%s", title.data ? title.data : "");
    draw_figures(&canvas, view);
    tb_status status = draw_sides(&canvas, view);
    if (status == TB_OK)
        status = svg_draw_heat(&canvas, MARGIN, view);
    svg_finish(&canvas, WIDTH, title.data ? title.data : "", out);
    tb__text_fini(&title);
    return status;
}

tb_status tool_draw_load(tb__text *out, const char *title, const char *figures, const tool_load *load,
                         const int32_t *hosts) {
    int32_t *ranks = tb__malloc(load->nranks, sizeof *ranks);
    if (!ranks)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < load->nranks; i++)
        ranks[i] = load->ranks[i].rank;
    svg_canvas canvas = {.ranks = ranks, .nranks = (int32_t)load->nranks};
    svg_text(&canvas, MARGIN, 48, (svg_style){.size = 22, .is_bold = true}, "%s", title);
    svg_text(&canvas, MARGIN, 72, (svg_style){.size = 13, .colour = SVG_GREY}, "%s", figures);
    tb_status status = svg_draw_load(&canvas, MARGIN, load, hosts);
    svg_finish(&canvas, WIDTH, title, out);
    free(ranks);
    return status;
}
