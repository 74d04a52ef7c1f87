/* Shapes, text, colours: SVG as text. */
#include "tools/svg.h"

#include "base/int.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void add_escaped(tb__text *out, const char *text) {
    for (const char *c = text; *c; c++) {
        if (*c == '<')
            tb__text_add(out, "&lt;");
        else if (*c == '>')
            tb__text_add(out, "&gt;");
        else if (*c == '&')
            tb__text_add(out, "&amp;");
        else if (*c == '"')
            tb__text_add(out, "&quot;");
        else if ((unsigned char)*c < 0x20)
            tb__text_add(out, " ");
        else
            tb__text_add(out, "%c", *c);
    }
}

static svg_colour colour_of(double r, double g, double b) {
    svg_colour c;
    snprintf(c.text, sizeof c.text, "#%02x%02x%02x", (unsigned)lround(r * 255) & 0xFF, (unsigned)lround(g * 255) & 0xFF,
             (unsigned)lround(b * 255) & 0xFF);
    return c;
}

static svg_colour hsl(double hue, double saturation, double lightness) {
    double rgb[3], reach = saturation * fmin(lightness, 1 - lightness);
    for (int i = 0; i < 3; i++) {
        static const double shift[] = {0, 8, 4};
        double k = fmod(shift[i] + hue / 30, 12);
        rgb[i] = lightness - reach * fmax(-1, fmin(fmin(k - 3, 9 - k), 1));
    }
    return colour_of(rgb[0], rgb[1], rgb[2]);
}

svg_colour svg_mix(double t) {
    static const double light[] = {0.89, 0.94, 0.99}, dark[] = {0.03, 0.27, 0.55};
    double rgb[3];
    for (int i = 0; i < 3; i++)
        rgb[i] = light[i] + (dark[i] - light[i]) * fmax(0, fmin(t, 1));
    return colour_of(rgb[0], rgb[1], rgb[2]);
}

svg_colour svg_rank_colour(const svg_canvas *canvas, int32_t rank) {
    static const char palette[][SVG_COLOUR_TEXT] = {"#7fb3e6", "#f7b267", "#8fd694", "#f28482", "#b8a1e3", "#f4d35e",
                                                    "#7fd1c7", "#f5a6c9", "#c9b18f", "#a3b8cc", "#c4dd6b", "#d98cc9"};
    enum { NPALETTE = sizeof palette / sizeof *palette };
    int32_t lo = 0;
    TB_BISECT(lo, canvas->nranks, canvas->ranks[lo] >= rank);
    if (canvas->nranks <= NPALETTE) {
        svg_colour c;
        memcpy(c.text, palette[lo % NPALETTE], sizeof c.text);
        return c;
    }
    /* Steps of the golden angle keep neighbours apart; lightness tells those apart that come close again. */
    static const double lightness[] = {0.75, 0.67, 0.84};
    return hsl(fmod(lo * 137.508, 360), 0.58, lightness[lo % 3]);
}

static void reach(svg_canvas *canvas, double y) {
    canvas->bottom = y > canvas->bottom ? y : canvas->bottom;
}

void svg_rect(svg_canvas *canvas, double x, double y, double w, double h, const char *fill, const char *stroke,
              const char *tip) {
    tb__text *out = &canvas->body;
    tb__text_add(out, "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\"", x, y, w, h, fill);
    if (stroke)
        tb__text_add(out, " stroke=\"%s\"", stroke);
    if (tip) {
        tb__text_add(out, "><title>");
        add_escaped(out, tip);
        tb__text_add(out, "</title></rect>\n");
    } else {
        tb__text_add(out, "/>\n");
    }
    reach(canvas, y + h);
}

void svg_line(svg_canvas *canvas, double x1, double y1, double x2, double y2, const char *stroke, const char *dashes) {
    tb__text_add(&canvas->body, "<line x1=\"%.2f\" y1=\"%.2f\" x2=\"%.2f\" y2=\"%.2f\" stroke=\"%s\"", x1, y1, x2, y2,
                 stroke);
    if (dashes)
        tb__text_add(&canvas->body, " stroke-dasharray=\"%s\"", dashes);
    tb__text_add(&canvas->body, "/>\n");
    reach(canvas, fmax(y1, y2));
}

void svg_text(svg_canvas *canvas, double x, double y, svg_style style, const char *format, ...) {
    static const char *const anchors[] = {"start", "middle", "end"};
    tb__text *out = &canvas->body;
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    tb__text_add(out, "<text x=\"%.2f\" y=\"%.2f\" font-size=\"%g\"", x, y, style.size);
    if (style.anchor != SVG_START)
        tb__text_add(out, " text-anchor=\"%s\"", anchors[style.anchor]);
    if (style.is_bold)
        tb__text_add(out, " font-weight=\"bold\"");
    if (style.is_mono)
        tb__text_add(out, " font-family=\"Menlo, Consolas, 'DejaVu Sans Mono', monospace\"");
    if (style.colour)
        tb__text_add(out, " fill=\"%s\"", style.colour);
    if (style.turn != 0)
        tb__text_add(out, " transform=\"rotate(%g %.2f %.2f)\"", style.turn, x, y);
    tb__text_add(out, ">");
    add_escaped(out, text);
    tb__text_add(out, "</text>\n");
    reach(canvas, y + style.size / 3);
}

double svg_text_width(const char *text, double size) {
    return (double)strlen(text) * size * 0.6;
}

/* The pattern for these ranks, which is defined on first use. */
static size_t find_stripes(svg_canvas *canvas, const int32_t *ranks, size_t count) {
    enum { STRIPE = 9 };
    for (size_t i = 0; i < canvas->stripes.count; i++) {
        const svg_stripes *s = &canvas->stripes.item[i];
        if (s->count == count && memcmp(s->ranks, ranks, count * sizeof *ranks) == 0)
            return s->pattern;
    }
    svg_stripes stripes = {.pattern = canvas->npatterns++, .count = count};
    memcpy(stripes.ranks, ranks, count * sizeof *ranks);
    if (!tb__vec_push(&canvas->stripes, stripes))
        canvas->body.failed = true;
    tb__text_add(&canvas->body,
                 "<pattern id=\"p%zu\" width=\"%zu\" height=\"8\" patternUnits=\"userSpaceOnUse\" "
                 "patternTransform=\"rotate(45)\">",
                 stripes.pattern, count * STRIPE);
    for (size_t i = 0; i < count; i++)
        tb__text_add(&canvas->body, "<rect x=\"%zu\" width=\"%d\" height=\"8\" fill=\"%s\"/>", i * STRIPE, STRIPE,
                     svg_rank_colour(canvas, ranks[i]).text);
    tb__text_add(&canvas->body, "</pattern>\n");
    return stripes.pattern;
}

svg_fill svg_rank_fill(svg_canvas *canvas, const int32_t *ranks, size_t count) {
    svg_fill fill;
    if (count == 1)
        snprintf(fill.text, sizeof fill.text, "%s", svg_rank_colour(canvas, ranks[0]).text);
    else
        snprintf(fill.text, sizeof fill.text, "url(#p%zu)",
                 find_stripes(canvas, ranks, count < SVG_MOST_STRIPES ? count : SVG_MOST_STRIPES));
    return fill;
}

svg_fill svg_hatch(svg_canvas *canvas, const char *colour) {
    svg_fill fill;
    size_t id = canvas->npatterns++;
    tb__text_add(&canvas->body,
                 "<pattern id=\"p%zu\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\" "
                 "patternTransform=\"rotate(45)\"><rect width=\"5\" height=\"5\" fill=\"#ffffff\"/>"
                 "<rect width=\"1.6\" height=\"5\" fill=\"%s\"/></pattern>\n",
                 id, colour);
    snprintf(fill.text, sizeof fill.text, "url(#p%zu)", id);
    return fill;
}

void svg_finish(svg_canvas *canvas, double width, const char *title, tb__text *out) {
    double height = ceil(canvas->bottom + 28);
    tb__text_add(out,
                 "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" height=\"%.0f\" "
                 "font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\" fill=\"#1d2733\">\n<title>",
                 width, height, width, height);
    add_escaped(out, title);
    tb__text_add(out, "</title>\n<rect width=\"%.0f\" height=\"%.0f\" fill=\"#ffffff\"/>\n%s</svg>\n", width, height,
                 canvas->body.data ? canvas->body.data : "");
    out->failed |= canvas->body.failed;
    tb__text_fini(&canvas->body);
    free(canvas->stripes.item);
}
