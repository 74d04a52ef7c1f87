/* The traffic of a plan as a heat map: source ranks down, target ranks across, and beside it the totals of each. */
#include "tools/svg.h"

#include "base/int.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
    MOST_BINS = 64,   /* along a side; more ranks than this share rows or columns */
    SIDE = 576,       /* pixels the longer side takes, at most */
    LABEL_SPACE = 54, /* for the ranks' names */
    BAR_SPACE = 130,  /* for the longest bar */
};

#define BAR "#6b8cae" /* a bar's colour */

/* The ranks of one side, in order, some to a bin. */
typedef struct side {
    int32_t *ranks;
    int32_t nranks, per_bin, nbins;
    int64_t busiest[MOST_BINS]; /* bytes of the busiest rank of a bin */
} side;

typedef struct heat {
    side src, dst;
    int64_t moved[MOST_BINS][MOST_BINS], kept[MOST_BINS][MOST_BINS];
    int64_t max_moved, zeros;
    bool has_kept;
    double x, y, cell; /* the map's corner, the size of a cell */
    double top;        /* where the names of hosts stand */
} heat;

static void bin_side(side *s) {
    s->per_bin = (s->nranks + MOST_BINS - 1) / MOST_BINS;
    s->nbins = (s->nranks + s->per_bin - 1) / s->per_bin;
}

static void note_rank(side *s, int32_t i, int64_t nbytes) {
    int64_t *busiest = &s->busiest[i / s->per_bin];
    *busiest = nbytes > *busiest ? nbytes : *busiest;
}

static tb_status side_init(side *s, const tb_layout *layout, const tb_plan_stats *stats, const int64_t *bytes) {
    s->nranks = tb_layout_nranks(layout);
    s->ranks = tb__malloc((size_t)s->nranks, sizeof *s->ranks);
    if (!s->ranks)
        return TB_NO_MEMORY;
    for (int32_t i = 0; i < s->nranks; i++)
        s->ranks[i] = tb_layout_rank_at(layout, i);
    qsort(s->ranks, (size_t)s->nranks, sizeof *s->ranks, tb__compare_int32);
    bin_side(s);
    for (int32_t i = 0, j = 0; i < s->nranks; i++) {
        while (stats->ranks[j] != s->ranks[i]) /* both ascending */
            j++;
        note_rank(s, i, bytes[j]);
    }
    return TB_OK;
}

/* The ranks that have something to do on this side. */
static tb_status side_of_load(side *s, const tool_load *load, bool is_source) {
    s->ranks = tb__malloc(load->nranks, sizeof *s->ranks);
    if (!s->ranks)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < load->nranks; i++) {
        const tool_rank_load *r = &load->ranks[i];
        if (r->keeps || (is_source ? r->sends : r->receives))
            s->ranks[s->nranks++] = r->rank;
    }
    if (s->nranks > 0)
        bin_side(s);
    for (size_t i = 0, n = 0; i < load->nranks && n < (size_t)s->nranks; i++) {
        if (load->ranks[i].rank == s->ranks[n])
            note_rank(s, (int32_t)n++, is_source ? load->ranks[i].sends : load->ranks[i].receives);
    }
    return TB_OK;
}

static int32_t bin_of(const side *s, int32_t rank) {
    const int32_t *found = bsearch(&rank, s->ranks, (size_t)s->nranks, sizeof rank, tb__compare_int32);
    return found ? (int32_t)(found - s->ranks) / s->per_bin : -1;
}

static void add_bytes(heat *h, int32_t from, int32_t to, int64_t nbytes) {
    int32_t row = bin_of(&h->src, from), column = bin_of(&h->dst, to);
    if (from == to) {
        h->kept[row][column] += nbytes;
        h->has_kept |= nbytes > 0;
    } else {
        h->moved[row][column] += nbytes;
        h->max_moved = h->moved[row][column] > h->max_moved ? h->moved[row][column] : h->max_moved;
    }
}

static void gather(heat *h, const tool_plan_view *view) {
    for (size_t i = 0; i < view->transfers.count; i++) {
        const tool_transfer *t = &view->transfers.item[i];
        if (t->source == TB_NO_RANK)
            h->zeros += t->nbytes;
        for (uint32_t j = 0; t->source != TB_NO_RANK && j < t->ntargets; j++)
            add_bytes(h, t->source, t->targets[j], t->nbytes);
    }
}

/* "4", or "4..7" for a bin of several ranks. */
static void name_bin(const side *s, int32_t bin, char *text, size_t size) {
    int32_t first = bin * s->per_bin, last = first + s->per_bin - 1;
    last = last < s->nranks ? last : s->nranks - 1;
    if (first == last)
        snprintf(text, size, "%" PRId32, s->ranks[first]);
    else
        snprintf(text, size, "%" PRId32 "..%" PRId32, s->ranks[first], s->ranks[last]);
}

/* "4M", for the narrow cells. */
static void short_size(int64_t nbytes, char *text, size_t size) {
    tool_size_text full = tool_size(nbytes);
    double value = 0;
    char unit = 0;
    sscanf(full.text, "%lf %c", &value, &unit);
    snprintf(text, size, unit && unit != 'B' ? "%g%c" : "%g", value, unit);
}

static void draw_cell(svg_canvas *canvas, const heat *h, int32_t row, int32_t column, const char *hatch) {
    int64_t moved = h->moved[row][column], kept = h->kept[row][column];
    double x = h->x + column * h->cell, y = h->y + row * h->cell, t = (double)moved / (double)h->max_moved;
    char from[32], to[32], tip[160], label[32];
    if (moved == 0 && kept == 0)
        return;
    name_bin(&h->src, row, from, sizeof from);
    name_bin(&h->dst, column, to, sizeof to);
    snprintf(tip, sizeof tip, "%s to %s: %" PRId64 " bytes%s", from, to, moved > 0 ? moved : kept,
             moved > 0 ? "" : " that stay");
    svg_rect(canvas, x, y, h->cell, h->cell, moved > 0 ? svg_mix(t).text : hatch, h->cell >= 12 ? "#ffffff" : NULL,
             tip);
    short_size(moved > 0 ? moved : kept, label, sizeof label);
    if (svg_text_width(label, 10) + 3 > h->cell)
        return;
    svg_text(canvas, x + h->cell / 2, y + h->cell / 2 + 3.5,
             (svg_style){.size = 10, .anchor = SVG_MIDDLE, .colour = moved > 0 && t > 0.45 ? "#ffffff" : NULL}, "%s",
             label);
}

static double name_size(const heat *h) {
    return fmax(8, fmin(h->cell, 12));
}

static double widest_name(const side *s, double size) {
    double widest = 0;
    for (int32_t i = 0; i < s->nbins; i++) {
        char name[32];
        name_bin(s, i, name, sizeof name);
        widest = fmax(widest, svg_text_width(name, size));
    }
    return widest;
}

/* Chip and name of every row or column; names are left out where they would touch. */
static void draw_names(svg_canvas *canvas, const heat *h, const side *s, bool is_down) {
    double chip = fmin(h->cell - 2, 10), size = name_size(h), last = -1e9;
    bool is_upright = !is_down && widest_name(s, size) > h->cell;
    for (int32_t i = 0; i < s->nbins; i++) {
        double at = (is_down ? h->y : h->x) + (i + 0.5) * h->cell;
        char name[32];
        name_bin(s, i, name, sizeof name);
        svg_colour colour = svg_rank_colour(canvas, s->ranks[(int64_t)i * s->per_bin]);
        if (is_down)
            svg_rect(canvas, h->x - chip - 4, at - chip / 2, chip, chip, colour.text, NULL, NULL);
        else
            svg_rect(canvas, at - chip / 2, h->y - chip - 4, chip, chip, colour.text, NULL, NULL);
        if (at - last < size)
            continue;
        last = at;
        svg_style style = {.size = size, .anchor = is_down ? SVG_END : is_upright ? SVG_START : SVG_MIDDLE};
        if (is_down) {
            svg_text(canvas, h->x - chip - 8, at + size * 0.35, style, "%s", name);
        } else {
            style.turn = is_upright ? -90 : 0;
            svg_text(canvas, is_upright ? at + size * 0.35 : at, h->y - chip - 9, style, "%s", name);
        }
    }
}

static int64_t largest(const side *s) {
    int64_t most = 0;
    for (int32_t i = 0; i < s->nbins; i++)
        most = s->busiest[i] > most ? s->busiest[i] : most;
    return most;
}

/* Draws the bytes that each source sends, at the right of its row, against the lower bound. */
static void draw_sent(svg_canvas *canvas, const heat *h, int64_t bound) {
    double x = h->x + h->dst.nbins * h->cell + 16, height = h->src.nbins * h->cell, size = fmax(8, fmin(h->cell, 11));
    double most = fmax((double)largest(&h->src), (double)bound);
    svg_text(canvas, x, h->y - 12, (svg_style){.size = 12, .is_bold = true}, "sends");
    if (most == 0)
        return;
    for (int32_t i = 0; i < h->src.nbins; i++) {
        int64_t nbytes = h->src.busiest[i];
        double y = h->y + i * h->cell, w = (double)nbytes / most * BAR_SPACE;
        svg_rect(canvas, x, y + h->cell * 0.15, w, h->cell * 0.7, BAR, NULL, NULL);
        svg_text(canvas, x + BAR_SPACE + 8, y + h->cell / 2 + size * 0.35, (svg_style){.size = size}, "%s",
                 tool_size(nbytes).text);
    }
    if (bound == 0) /* there is none, of a whole model */
        return;
    double at = x + (double)bound / most * BAR_SPACE;
    svg_line(canvas, at, h->y - 4, at, h->y + height + 6, "#c0392b", "4 3");
    svg_text(canvas, at, h->y + height + 18, (svg_style){.size = 10, .anchor = SVG_MIDDLE, .colour = "#c0392b"},
             "lower bound %s", tool_size(bound).text);
}

/* Draws the bytes that each target receives, below its column. */
static void draw_received(svg_canvas *canvas, const heat *h) {
    double y = h->y + h->src.nbins * h->cell + 12, most = (double)largest(&h->dst);
    double size = fmax(8, fmin(h->cell, 11)), reach = 40, last = -1e9, widest = 0;
    svg_text(canvas, h->x - 8, y + 12, (svg_style){.size = 12, .anchor = SVG_END, .is_bold = true}, "receives");
    for (int32_t i = 0; i < h->dst.nbins; i++)
        widest = fmax(widest, svg_text_width(tool_size(h->dst.busiest[i]).text, size));
    bool is_upright = widest > h->cell;
    for (int32_t i = 0; most > 0 && i < h->dst.nbins; i++) {
        int64_t nbytes = h->dst.busiest[i];
        double x = h->x + i * h->cell;
        svg_rect(canvas, x + h->cell * 0.15, y, h->cell * 0.7, (double)nbytes / most * reach, BAR, NULL, NULL);
        if (x - last < size)
            continue;
        last = x;
        svg_text(canvas, x + h->cell / 2 + (is_upright ? size * 0.35 : 0), y + reach + (is_upright ? 6 : size + 4),
                 (svg_style){.size = size, .anchor = is_upright ? SVG_END : SVG_MIDDLE, .turn = is_upright ? -90 : 0},
                 "%s", tool_size(nbytes).text);
    }
    if (is_upright) /* text that hangs down reaches further than its point */
        canvas->bottom = fmax(canvas->bottom, y + reach + 8 + widest);
}

static void draw_scale(svg_canvas *canvas, const heat *h, double x, const char *hatch) {
    enum { STEPS = 32, WIDTH = 160 };
    double y = canvas->bottom + 16;
    svg_style style = {.size = 11, .colour = SVG_GREY};
    if (h->max_moved > 0) {
        svg_text(canvas, x, y + 9, style, "0");
        for (int i = 0; i < STEPS; i++)
            svg_rect(canvas, x + 14 + i * (double)WIDTH / STEPS, y, (double)WIDTH / STEPS + 0.3, 10,
                     svg_mix((i + 0.5) / STEPS).text, NULL, NULL);
        svg_text(canvas, x + WIDTH + 20, y + 9, style, "%s between two%s", tool_size(h->max_moved).text,
                 h->src.per_bin > 1 || h->dst.per_bin > 1 ? " groups of ranks" : " ranks");
    }
    if (h->has_kept) {
        svg_rect(canvas, x + 420, y - 1, 12, 12, hatch, SVG_LINE, NULL);
        svg_text(canvas, x + 438, y + 9, style, "stays on its rank");
    }
    if (h->src.per_bin > 1 || h->dst.per_bin > 1) {
        y += 18;
        svg_text(canvas, x, y + 9, style,
                 "a row is up to %" PRId32 " ranks, a column up to %" PRId32 "; bars show the busiest rank of each",
                 h->src.per_bin, h->dst.per_bin);
    }
    if (h->zeros > 0) {
        y += 18;
        svg_text(canvas, x, y + 9, style, "besides, %s are filled with zeros", tool_size(h->zeros).text);
    }
}

/* Which rows, or columns, are ranks of which host, and lines between those of different ones. */
static void draw_hosts(svg_canvas *canvas, const heat *h, const side *s, const int32_t *hosts, bool is_down) {
    double along = (is_down ? h->src.nbins : h->dst.nbins) * h->cell;
    double across = (is_down ? h->dst.nbins : h->src.nbins) * h->cell;
    double from = is_down ? h->x : h->y, begin = is_down ? h->y : h->x;
    for (int32_t i = 0, next; i < s->nbins; i = next) {
        int32_t host = hosts[s->ranks[(int64_t)i * s->per_bin]];
        for (next = i + 1; next < s->nbins && hosts[s->ranks[(int64_t)next * s->per_bin]] == host; next++)
            ;
        double at = begin + next * h->cell, middle = begin + (i + next) * h->cell / 2, size = (next - i) * h->cell;
        char name[32];
        snprintf(name, sizeof name, "host %" PRId32, host);
        if (size < svg_text_width(name, 10))
            snprintf(name, sizeof name, "%" PRId32, host);
        svg_style style = {.size = 10, .anchor = SVG_MIDDLE, .colour = SVG_GREY, .turn = is_down ? -90 : 0};
        if (is_down && at < begin + along - 1)
            svg_line(canvas, from - LABEL_SPACE, at, from + across, at, SVG_GREY, "2 2");
        else if (!is_down && at < begin + along - 1)
            svg_line(canvas, at, h->top - 10, at, from + across, SVG_GREY, "2 2");
        svg_text(canvas, is_down ? h->x - LABEL_SPACE + 6 : middle, is_down ? middle : h->top, style, "%s", name);
    }
}

static void draw(svg_canvas *canvas, heat *h, double x, int64_t total, int64_t bound, const int32_t *hosts) {
    int32_t most = h->src.nbins > h->dst.nbins ? h->src.nbins : h->dst.nbins;
    double top = canvas->bottom + 40;
    h->cell = fmax(9, fmin(floor((double)SIDE / most), 56));
    h->x = x + LABEL_SPACE + 14 + (hosts ? 14 : 0);
    double widest = widest_name(&h->dst, name_size(h));
    h->top = top + 40;
    h->y = top + 48 + (widest > h->cell ? widest : 14) + (hosts ? 14 : 0);
    svg_text(canvas, x, top, (svg_style){.size = 16, .is_bold = true}, "Traffic between ranks: %s in all",
             tool_size(total).text);
    svg_text(canvas, h->x, top + 22, (svg_style){.size = 12, .colour = SVG_GREY}, "to (target ranks)");
    svg_text(canvas, x - 4, h->y + h->src.nbins * h->cell / 2,
             (svg_style){.size = 12, .anchor = SVG_MIDDLE, .colour = SVG_GREY, .turn = -90}, "from (source ranks)");
    svg_rect(canvas, h->x, h->y, h->dst.nbins * h->cell, h->src.nbins * h->cell, "#f6f8fa", SVG_LINE, NULL);
    svg_fill hatch = svg_hatch(canvas, "#b4c0cc");
    tb__text_add(&canvas->body, "<g shape-rendering=\"crispEdges\">\n"); /* no hairlines between cells */
    for (int32_t row = 0; row < h->src.nbins; row++) {
        for (int32_t column = 0; column < h->dst.nbins; column++)
            draw_cell(canvas, h, row, column, hatch.text);
    }
    tb__text_add(&canvas->body, "</g>\n");
    draw_names(canvas, h, &h->src, true);
    draw_names(canvas, h, &h->dst, false);
    if (hosts) {
        draw_hosts(canvas, h, &h->src, hosts, true);
        draw_hosts(canvas, h, &h->dst, hosts, false);
    }
    draw_sent(canvas, h, bound);
    draw_received(canvas, h);
    draw_scale(canvas, h, h->x, hatch.text);
}

tb_status svg_draw_heat(svg_canvas *canvas, double x, const tool_plan_view *view) {
    const tb_plan_stats *s = &view->stats;
    heat *h = tb__calloc(1, sizeof *h);
    if (!h)
        return TB_NO_MEMORY;
    tb_status status = side_init(&h->src, view->src, s, s->send_bytes);
    if (status == TB_OK)
        status = side_init(&h->dst, view->dst, s, s->recv_bytes);
    if (status == TB_OK) {
        gather(h, view);
        draw(canvas, h, x, s->total_bytes, s->min_max_send, view->hosts);
    }
    free(h->src.ranks);
    free(h->dst.ranks);
    free(h);
    return status;
}

tb_status svg_draw_load(svg_canvas *canvas, double x, const tool_load *load, const int32_t *hosts) {
    heat *h = tb__calloc(1, sizeof *h);
    if (!h)
        return TB_NO_MEMORY;
    tb_status status = side_of_load(&h->src, load, true);
    if (status == TB_OK)
        status = side_of_load(&h->dst, load, false);
    if (status == TB_OK && h->src.nranks > 0 && h->dst.nranks > 0) {
        for (size_t i = 0; i < load->rank_links.count; i++)
            add_bytes(h, load->rank_links.item[i].from, load->rank_links.item[i].to, load->rank_links.item[i].nbytes);
        for (size_t i = 0; i < load->nranks; i++) {
            if (load->ranks[i].keeps)
                add_bytes(h, load->ranks[i].rank, load->ranks[i].rank, load->ranks[i].keeps);
        }
        draw(canvas, h, x, tool_load_total(load), 0, hosts);
    }
    free(h->src.ranks);
    free(h->dst.ranks);
    free(h);
    return status;
}
