/* Shared by the files that draw pictures. */
#ifndef TB_TOOLS_SVG_H
#define TB_TOOLS_SVG_H

#include "layout/layout.h"
#include "tools/tools.h"

/* ---- The canvas (svg_canvas.c) ------------------------------------------------------------------------------- */

enum { SVG_MOST_STRIPES = 8 };

/* A pattern of stripes, and the first ranks whose colours it has. */
typedef struct svg_stripes {
    size_t pattern, count;
    int32_t ranks[SVG_MOST_STRIPES];
} svg_stripes;

typedef struct svg_canvas {
    tb__text body;
    double bottom;        /* of what was drawn so far */
    const int32_t *ranks; /* every rank that has a colour, ascending */
    int32_t nranks;
    size_t npatterns;
    TB_VEC(svg_stripes) stripes;
} svg_canvas;

typedef enum svg_anchor { SVG_START, SVG_MIDDLE, SVG_END } svg_anchor;

typedef struct svg_style {
    double size;
    svg_anchor anchor;
    bool is_bold, is_mono;
    const char *colour; /* NULL: dark */
    double turn;        /* degrees around the point */
} svg_style;

enum { SVG_COLOUR_TEXT = 8 };

typedef struct svg_colour {
    char text[SVG_COLOUR_TEXT];
} svg_colour;

#define SVG_GREY "#5f6b7a"
#define SVG_LINE "#c3ccd6"

svg_colour svg_mix(double t); /* the heat map's scale: 0 is almost white, 1 is darkest */
svg_colour svg_rank_colour(const svg_canvas *canvas, int32_t rank);

/* `fill` is a colour or a url(#...). `tip` is shown under the mouse; may be NULL. */
void svg_rect(svg_canvas *canvas, double x, double y, double w, double h, const char *fill, const char *stroke,
              const char *tip);
void svg_line(svg_canvas *canvas, double x1, double y1, double x2, double y2, const char *stroke, const char *dashes);
void svg_text(svg_canvas *canvas, double x, double y, svg_style style, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

double svg_text_width(const char *text, double size); /* about */

/* The fill of a cell that these ranks hold: a colour, or stripes, which are defined if necessary. */
typedef struct svg_fill {
    char text[24];
} svg_fill;

svg_fill svg_rank_fill(svg_canvas *canvas, const int32_t *ranks, size_t count);
svg_fill svg_hatch(svg_canvas *canvas, const char *colour);

/* Writes the whole document. Consumes the canvas. */
void svg_finish(svg_canvas *canvas, double width, const char *title, tb__text *out);

/* ---- A tensor cut up by a layout (svg_cut.c) ----------------------------------------------------------------- */

/* Which tensor dims run down and which run across. Where several run across, they are nested. */
typedef struct svg_axes {
    int nrows, ncolumns;
    int row[TB_MAX_DIMS], column[TB_MAX_DIMS];
} svg_axes;

/* `other` may be NULL. Dims that a layout cuts come first. */
svg_axes svg_choose_axes(const tb_layout *layout, const tb_layout *other, const tb_shape *shape);

/* One dim: neighbouring parts are held by different coordinates. */
typedef struct svg_dim {
    int64_t length;
    size_t nparts;
    int64_t *bound;  /* nparts + 1 */
    int32_t *cls;    /* nparts; -1: nobody */
    bool is_sampled; /* cut more finely than can be drawn */
} svg_dim;

typedef struct svg_cut {
    tb__grid grid;
    svg_axes axes;
    svg_dim dim[TB_MAX_DIMS];
    size_t nrows, ncolumns; /* parts along the axes */
    tb__arena arena;
    TB_VEC(int32_t) owners; /* of the cell asked for last */
} svg_cut;

tb_status svg_cut_init(svg_cut *cut, const tb_layout *layout, const tb_shape *shape, const svg_axes *axes);
void svg_cut_fini(svg_cut *cut);

typedef struct svg_cell {
    double x, y, w, h;     /* fractions of the whole */
    const int32_t *owners; /* ascending; may be only the first of them */
    size_t nowners;
    int64_t total_owners;
    int64_t start[TB_MAX_DIMS], stop[TB_MAX_DIMS];
} svg_cell;

/* The cell's owners are valid until the next call. */
tb_status svg_cut_cell(svg_cut *cut, size_t row, size_t column, svg_cell *out);

bool svg_cut_is_sampled(const svg_cut *cut);

/* The one dim of an axis that is cut, or -1: none or several. */
int svg_cut_dim(const svg_cut *cut, const int *dims, int ndims);

/* ---- Parts of a page ----------------------------------------------------------------------------------------- */

typedef struct svg_area {
    double x, y, w, h;
} svg_area;

/* A layout as a rectangle cut up, with index marks around it; *missing counts the cells too small for their label.
 * (svg_panel.c) */
tb_status svg_draw_panel(svg_canvas *canvas, svg_area area, const tb_layout *layout, const tb_shape *shape,
                         const svg_axes *axes, size_t *missing);

/* The traffic of a plan, source ranks down, target ranks across, below what was drawn so far. (svg_heat.c) */
tb_status svg_draw_heat(svg_canvas *canvas, double x, const tool_plan_view *view);
/* The same of a whole model; hosts may be NULL. */
tb_status svg_draw_load(svg_canvas *canvas, double x, const tool_load *load, const int32_t *hosts);

#endif
