/* One side of the picture: the tensor as a rectangle, cut up and coloured by the ranks that hold the parts. */
#include "tools/svg.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { LABEL_TEXT = 64 };

/* Writes the text into the rectangle, across or upright, as large as possible. False: it does not fit. */
static bool fit_label(svg_canvas *canvas, svg_area area, const char *text, bool is_striped) {
    static const double sizes[] = {14, 12, 10, 8.5};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        double size = sizes[i], length = svg_text_width(text, size) + 4, height = size * 0.95;
        double x = area.x + area.w / 2, y = area.y + area.h / 2;
        bool is_upright = length > area.w || height > area.h;
        if (is_upright && (length > area.h || height > area.w))
            continue;
        double w = is_upright ? height + 4 : length + 4, h = is_upright ? length + 4 : height + 4;
        if (is_striped) /* letters on stripes are hard to read */
            tb__text_add(&canvas->body,
                         "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" rx=\"3\" fill=\"#ffffff\" "
                         "fill-opacity=\"0.82\"/>\n",
                         x - fmin(w, area.w) / 2, y - fmin(h, area.h) / 2, fmin(w, area.w), fmin(h, area.h));
        svg_style style = {.size = size, .anchor = SVG_MIDDLE, .turn = is_upright ? -90 : 0};
        svg_text(canvas, is_upright ? x + size * 0.35 : x, is_upright ? y : y + size * 0.35, style, "%s", text);
        return true;
    }
    return false;
}

static bool label_cell(svg_canvas *canvas, svg_area area, const svg_cell *cell) {
    bool is_striped = cell->nowners > 1, is_complete = (int64_t)cell->nowners == cell->total_owners;
    if (cell->nowners == 0)
        return fit_label(canvas, area, "nobody", true);
    for (size_t most = 12; most > 0 && is_complete; most /= 2) {
        tb__text text = {0};
        tool_add_ranks(&text, cell->owners, cell->nowners, most);
        bool is_short = !text.failed && text.count < LABEL_TEXT;
        bool fits = is_short && fit_label(canvas, area, text.data, is_striped);
        tb__text_fini(&text);
        if (fits)
            return true;
    }
    char count[LABEL_TEXT];
    snprintf(count, sizeof count, "%" PRId64 " ranks", cell->total_owners);
    return fit_label(canvas, area, count, is_striped);
}

static void add_tip(tb__text *tip, const tb_shape *shape, const svg_cell *cell) {
    enum { MOST_RUNS = 16 };
    int64_t len[TB_MAX_DIMS];
    for (int d = 0; d < shape->ndim; d++)
        len[d] = cell->stop[d] - cell->start[d];
    tool_add_box(tip, shape->ndim, cell->start, len);
    tb__text_add(tip, cell->total_owners == 1 ? ": rank " : ": ranks ");
    tool_add_ranks(tip, cell->owners, cell->nowners, MOST_RUNS);
    if ((int64_t)cell->nowners < cell->total_owners)
        tb__text_add(tip, " and others");
}

/* Ranks of bands that are too low for a label in them: some of them, at the right of the panel. */
static tb_status draw_bands(svg_canvas *canvas, svg_area area, svg_cut *cut) {
    enum { SIZE = 9 };
    double last = -1e9;
    size_t named = 0;
    for (size_t r = 0; r < cut->nrows; r++) {
        svg_cell cell;
        tb__text text = {0};
        TB_TRY(svg_cut_cell(cut, r, 0, &cell));
        double at = area.y + (cell.y + cell.h / 2) * area.h;
        if (cell.nowners == 0 || at - last < SIZE + 2)
            continue;
        last = at;
        named++;
        tb__text_add(&text, "%" PRId32 "%s", cell.owners[0], cell.total_owners > 1 ? "+" : "");
        svg_line(canvas, area.x + area.w, at, area.x + area.w + 4, at, SVG_GREY, NULL);
        svg_text(canvas, area.x + area.w + 6, at + SIZE * 0.35, (svg_style){.size = SIZE, .colour = SVG_GREY}, "%s",
                 text.data ? text.data : "");
        canvas->body.failed |= text.failed;
        tb__text_fini(&text);
    }
    svg_text(canvas, area.x, area.y + area.h + 50, (svg_style){.size = 11, .colour = SVG_GREY},
             "%zu bands; the ranks of %zu are at the right", cut->nrows, named);
    return TB_OK;
}

static tb_status draw_cells(svg_canvas *canvas, svg_area area, svg_cut *cut, size_t *missing) {
    for (size_t r = 0; r < cut->nrows; r++) {
        for (size_t c = 0; c < cut->ncolumns; c++) {
            svg_cell cell;
            tb__text tip = {0};
            TB_TRY(svg_cut_cell(cut, r, c, &cell));
            svg_area box = {area.x + cell.x * area.w, area.y + cell.y * area.h, cell.w * area.w, cell.h * area.h};
            svg_fill fill =
                cell.nowners > 0 ? svg_rank_fill(canvas, cell.owners, cell.nowners) : svg_hatch(canvas, SVG_LINE);
            add_tip(&tip, &cut->grid.shape, &cell);
            bool is_fine = box.w < 6 || box.h < 6; /* lines would hide the parts */
            svg_rect(canvas, box.x, box.y, box.w, box.h, fill.text, is_fine ? NULL : "#ffffff", tip.data);
            tb__text_fini(&tip);
            *missing += !label_cell(canvas, box, &cell);
        }
    }
    return TB_OK;
}

/* The position of an index of the axis' only cut dim, in pixels. */
static double position(const svg_dim *dim, int64_t index, double length) {
    return (double)index / (double)dim->length * length;
}

static void draw_marks(svg_canvas *canvas, svg_area area, const svg_cut *cut, int d, bool is_down) {
    enum { SIZE = 11 };
    const svg_dim *dim = &cut->dim[d];
    double length = is_down ? area.h : area.w, last = -1e9;
    char text[32];
    snprintf(text, sizeof text, "%" PRId64, dim->length);
    double room = is_down ? SIZE + 3 : svg_text_width(text, SIZE) + 6;
    for (size_t i = 0; i <= dim->nparts; i++) {
        bool is_end = i == dim->nparts;
        double at = position(dim, dim->bound[i], length);
        if (!is_end && (at - last < room || length - at < room || (i > 0 && dim->is_sampled)))
            continue;
        last = at;
        if (is_down) {
            svg_line(canvas, area.x - 5, area.y + at, area.x, area.y + at, SVG_GREY, NULL);
            svg_text(canvas, area.x - 8, area.y + at + 4,
                     (svg_style){.size = SIZE, .anchor = SVG_END, .colour = SVG_GREY}, "%" PRId64, dim->bound[i]);
        } else {
            svg_line(canvas, area.x + at, area.y + area.h, area.x + at, area.y + area.h + 5, SVG_GREY, NULL);
            svg_text(canvas, area.x + at, area.y + area.h + 17,
                     (svg_style){.size = SIZE, .anchor = SVG_MIDDLE, .colour = SVG_GREY}, "%" PRId64, dim->bound[i]);
        }
    }
}

/* "dim 1" or, where dims are nested, "dims 1 x 2"; `marked` is the dim whose indices stand at the marks, or -1. */
static void name_axis(const int *dims, int ndims, int marked, char *text, size_t size) {
    size_t used = (size_t)snprintf(text, size, ndims > 1 ? "dims " : "dim ");
    for (int i = 0; i < ndims && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, i ? " x %d" : "%d", dims[i]);
    if (ndims > 1 && used < size && marked >= 0)
        snprintf(text + used, size - used, ", cut along %d", marked);
    else if (ndims > 1 && used < size)
        snprintf(text + used, size - used, ", nested");
}

static void draw_axes(svg_canvas *canvas, svg_area area, const svg_cut *cut) {
    char name[64];
    svg_style style = {.size = 11, .anchor = SVG_MIDDLE, .colour = SVG_GREY};
    const svg_axes *axes = &cut->axes;
    int down = svg_cut_dim(cut, axes->row, axes->nrows), across = svg_cut_dim(cut, axes->column, axes->ncolumns);
    if (down >= 0)
        draw_marks(canvas, area, cut, down, true);
    if (across >= 0)
        draw_marks(canvas, area, cut, across, false);
    if (axes->ncolumns > 0) {
        name_axis(axes->column, axes->ncolumns, across, name, sizeof name);
        svg_text(canvas, area.x + area.w / 2, area.y + area.h + 33, style, "%s", name);
    }
    if (axes->nrows > 0) {
        name_axis(axes->row, axes->nrows, down, name, sizeof name);
        style.turn = -90;
        svg_text(canvas, area.x - 58, area.y + area.h / 2, style, "%s", name);
    }
}

tb_status svg_draw_panel(svg_canvas *canvas, svg_area area, const tb_layout *layout, const tb_shape *shape,
                         const svg_axes *axes, size_t *missing) {
    svg_cut cut;
    TB_TRY(svg_cut_init(&cut, layout, shape, axes));
    tb_status status = TB_OK;
    bool is_empty = cut.nrows == 0 || cut.ncolumns == 0, has_bands = false;
    if (is_empty) {
        svg_rect(canvas, area.x, area.y, area.w, area.h, "none", SVG_LINE, NULL);
        svg_text(canvas, area.x + area.w / 2, area.y + area.h / 2 + 4,
                 (svg_style){.size = 12, .anchor = SVG_MIDDLE, .colour = SVG_GREY}, "no elements");
    } else {
        size_t before = *missing;
        status = draw_cells(canvas, area, &cut, missing);
        has_bands = *missing > before && cut.ncolumns == 1 && cut.nrows > 1 && area.w < 500;
        if (status == TB_OK && has_bands)
            status = draw_bands(canvas, area, &cut);
        svg_rect(canvas, area.x, area.y, area.w, area.h, "none", SVG_GREY, NULL);
        draw_axes(canvas, area, &cut);
    }
    double below = area.y + area.h + (has_bands ? 65 : axes->ncolumns > 0 && !is_empty ? 50 : 18);
    svg_style note = {.size = 11, .colour = SVG_GREY};
    if (svg_cut_is_sampled(&cut)) {
        svg_text(canvas, area.x, below, note, "cut more finely than can be drawn: sampled");
        below += 15;
    }
    if (cut.grid.partial.count > 0)
        svg_text(canvas, area.x, below, note, "every rank of a cell holds a contribution of its own (%s)",
                 tb__reduce_op_name(cut.grid.op));
    svg_cut_fini(&cut);
    return status;
}
