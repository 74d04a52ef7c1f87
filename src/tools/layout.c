/* tensorbus layout: shows each rank's part of a tensor. */
#include "tools/tools.h"

#include "layout/layout.h"

#include <inttypes.h>
#include <string.h>

enum { SHAPE, LAYOUT, DTYPE, RANK, ALL, JSON, SVG, JSONL, NOPTIONS };

static const tool_option options[NOPTIONS + 1] = {
    [SHAPE] = {"shape", "N,N,...", "global shape of the tensor; '' is a scalar"},
    [LAYOUT] = {"layout", "LAYOUT", "the layout, such as 'mesh=2,2 place=R,S1 ranks=4..7'"},
    [DTYPE] = {"dtype", "DTYPE", "dtype, such as bf16; bytes are then shown, too"},
    [RANK] = {"rank", "RANK", "only this rank, with all its segments"},
    [ALL] = {"all", NULL, "show all ranks, however many there are"},
    [JSON] = {"json", NULL, "print JSON"},
    [SVG] = {"svg", "FILE", "draw the tensor into FILE; -: print only the picture"},
    [JSONL] = {"jsonl", "FILE", "answer each line of FILE (-: standard input) with a line of JSON"},
};

static const char details[] =
    "A layout is a mesh of ranks and one placement for each mesh dimension, applied from left to right:\n"
    "  Shard(d) or Sd               an even cut of dim d; a negative d counts from the end\n"
    "  StridedShard(d,f)            dim d in f equal pieces, each cut like Shard\n"
    "  BlockShard(d,size,...)       dim d in pieces of these sizes, each cut like Shard\n"
    "  Explicit(d, 0-3,5-6; 3-5)    the indices that each coordinate keeps, coordinates separated by ;\n"
    "  Replicate or R               keep everything\n"
    "  Partial(op) or P             a contribution to a sum, avg, min, max or product\n"
    "Segments are half-open: 0-3 is 0, 1, 2. Without ranks=, the mesh has the ranks 0, 1, 2, ...\n"
    "\n"
    "A line for --jsonl has shape, mesh, ranks and placements; the answer has locals, or error:\n"
    "  {\"shape\":[8],\"mesh\":[2],\"ranks\":[0,1],\"placements\":[[\"S\",0]]}\n"
    "  {\"locals\":{\"0\":{\"shape\":[4],\"dims\":[[[0,4]]]},\"1\":{\"shape\":[4],\"dims\":[[[4,8]]]}}}\n"
    "\n"
    "Example:\n"
    "  tensorbus layout --shape 4096,4096 --dtype bf16 --layout 'mesh=2,2 place=R,S1'\n";

/* The parsed arguments. */
typedef struct request {
    tb_shape shape;
    tb_dtype dtype; /* TB_DTYPE_NONE: not given */
    tb_layout *layout;
    tb__grid grid; /* laid out once for all ranks */
    int32_t rank;  /* TB_NO_RANK: all of them */
    bool all;
    tb__arena arena; /* for the current rank */
} request;

/* One rank's part; valid until the next rank's. */
typedef struct part {
    bool is_empty;
    tb_shape shape;
    tb__spans list[TB_MAX_DIMS];
    int64_t nbytes; /* 0 without a dtype */
} part;

static tb_status look_at(request *r, int32_t rank, part *out) {
    tb__place place;
    *out = (part){.is_empty = !tb__grid_place(&r->grid, rank, &place), .shape.ndim = r->shape.ndim};
    if (out->is_empty)
        return TB_OK;
    tb__arena_reset(&r->arena);
    for (int d = 0; d < r->shape.ndim; d++) {
        TB_TRY(tb__axis_list(&r->grid.axis[d], place.coord[d], &r->arena, &out->list[d]));
        for (size_t i = 0; i < out->list[d].count; i++)
            out->shape.dim[d] += out->list[d].item[i].stop - out->list[d].item[i].start;
        out->is_empty |= out->shape.dim[d] == 0;
    }
    return r->dtype == TB_DTYPE_NONE ? TB_OK : tb_shape_size(&out->shape, r->dtype, NULL, &out->nbytes);
}

static void add_list_json(tb__text *out, const tb__spans *list) {
    tb__text_add(out, "[");
    for (size_t i = 0; i < list->count; i++)
        tb__text_add(out, "%s[%" PRId64 ",%" PRId64 "]", i ? "," : "", list->item[i].start, list->item[i].stop);
    tb__text_add(out, "]");
}

static tb_status add_local_json(tb__text *out, request *r, int32_t rank) {
    part p;
    TB_TRY(look_at(r, rank, &p));
    tb__text_add(out, "\"%" PRId32 "\":{\"shape\":[", rank);
    for (int d = 0; d < p.shape.ndim; d++)
        tb__text_add(out, "%s%" PRId64, d ? "," : "", p.shape.dim[d]);
    tb__text_add(out, p.is_empty ? "],\"dims\":null" : "],\"dims\":[");
    for (int d = 0; d < p.shape.ndim && !p.is_empty; d++) {
        tb__text_add(out, d ? "," : "");
        add_list_json(out, &p.list[d]);
    }
    tb__text_add(out, p.is_empty ? "" : "]");
    if (r->dtype != TB_DTYPE_NONE)
        tb__text_add(out, ",\"bytes\":%" PRId64, p.nbytes);
    tb__text_add(out, "}");
    return TB_OK;
}

static tb_status add_locals_json(tb__text *out, request *r) {
    tb__text_add(out, "\"locals\":{");
    if (r->rank != TB_NO_RANK)
        TB_TRY(add_local_json(out, r, r->rank));
    for (int32_t i = 0; r->rank == TB_NO_RANK && i < tb_layout_nranks(r->layout); i++) {
        tb__text_add(out, i ? "," : "");
        TB_TRY(add_local_json(out, r, tb_layout_rank_at(r->layout, i)));
    }
    tb__text_add(out, "}");
    return TB_OK;
}

static tb_status add_json(tb__text *out, request *r) {
    char *layout;
    TB_TRY(tb_layout_format(r->layout, &layout));
    tb__text_add(out, "{\"shape\":[");
    for (int d = 0; d < r->shape.ndim; d++)
        tb__text_add(out, "%s%" PRId64, d ? "," : "", r->shape.dim[d]);
    tb__text_add(out, "],\"layout\":");
    tb__text_add_json(out, layout);
    free(layout);
    if (r->dtype != TB_DTYPE_NONE)
        tb__text_add(out, ",\"dtype\":\"%s\"", tb_dtype_name(r->dtype));
    tb__text_add(out, ",");
    TB_TRY(add_locals_json(out, r));
    tb__text_add(out, "}\n");
    return TB_OK;
}

static void add_list(tb__text *out, const tb__spans *list, size_t most) {
    if (list->count == 0)
        tb__text_add(out, "none");
    for (size_t i = 0; i < list->count && i < most; i++)
        tb__text_add(out, "%s%" PRId64 "-%" PRId64, i ? "," : "", list->item[i].start, list->item[i].stop);
    if (list->count > most)
        tb__text_add(out, ", %zu more", list->count - most);
}

static tb_status add_row(tool_table *table, request *r, int32_t rank) {
    enum { MOST_SEGMENTS = 6 };
    part p;
    TB_TRY(look_at(r, rank, &p));
    tb__text cell = {0};
    tool_table_cell(table, "%" PRId32, rank);
    tool_add_shape(&cell, &p.shape);
    tool_table_take(table, &cell);
    for (int d = 0; d < p.shape.ndim; d++) {
        add_list(&cell, &p.list[d], r->rank == TB_NO_RANK && !r->all ? MOST_SEGMENTS : SIZE_MAX);
        tool_table_take(table, &cell);
    }
    if (r->dtype != TB_DTYPE_NONE) {
        tool_table_cell(table, "%" PRId64, p.nbytes);
        tool_table_cell(table, "%s", p.nbytes >= 1024 ? tool_size(p.nbytes).text : "");
    }
    return TB_OK;
}

static tb_status add_rows(tool_table *table, request *r, int32_t shown) {
    if (r->rank != TB_NO_RANK)
        return add_row(table, r, r->rank);
    for (int32_t i = 0; i < shown; i++)
        TB_TRY(add_row(table, r, tb_layout_rank_at(r->layout, i)));
    return TB_OK;
}

static tb_status add_table(tb__text *out, request *r) {
    enum { MOST_ROWS = 32 };
    static const char *const dim_titles[TB_MAX_DIMS] = {"dim 0", "dim 1", "dim 2", "dim 3",
                                                        "dim 4", "dim 5", "dim 6", "dim 7"};
    tb__text_add(out, "tensor  ");
    tool_add_shape(out, &r->shape);
    if (r->dtype != TB_DTYPE_NONE) {
        int64_t nbytes;
        TB_TRY(tb_shape_size(&r->shape, r->dtype, NULL, &nbytes));
        tb__text_add(out, " %s, ", tb_dtype_name(r->dtype));
        tool_add_size(out, nbytes);
    }
    tb__text_add(out, "\nlayout  ");
    tool_add_layout(out, r->layout);
    tb__text_add(out, "\n\n");
    if (r->rank != TB_NO_RANK && tb_layout_index_of(r->layout, r->rank) < 0) {
        tb__text_add(out, "rank %" PRId32 " is not in the mesh: it holds nothing\n", r->rank);
        return TB_OK;
    }

    int32_t nranks = tb_layout_nranks(r->layout);
    int32_t shown = r->all || nranks <= MOST_ROWS ? nranks : MOST_ROWS;
    tool_table table = {0};
    tool_table_columns(&table, "#rank", "holds");
    for (int d = 0; d < r->shape.ndim; d++)
        tool_table_column(&table, dim_titles[d], false);
    if (r->dtype != TB_DTYPE_NONE) {
        tool_table_columns(&table, "#bytes", "#");
    }
    tb_status status = add_rows(&table, r, shown);
    tool_table_finish(&table, out);
    if (r->rank == TB_NO_RANK && shown < nranks)
        tb__text_add(out, "%s%" PRId32 " more ranks; --all shows them%s\n", tool_dim(), nranks - shown, tool_plain());
    return status;
}

static void request_fini(request *r) {
    tb__grid_fini(&r->grid);
    tb__arena_fini(&r->arena);
    tb_layout_destroy(r->layout);
}

static tb_status answer(const json_t *line, tb__text *out) {
    request r = {.rank = TB_NO_RANK};
    TB_TRY(tb__shape_from_json(json_object_get(line, "shape"), &r.shape));
    tb_status status = tb__layout_from_json(line, &r.layout);
    if (status == TB_OK)
        status = tb__grid_init(&r.grid, r.layout, &r.shape, TB__SOURCE);
    tb__text_add(out, "{");
    if (status == TB_OK)
        status = add_locals_json(out, &r);
    tb__text_add(out, "}");
    request_fini(&r);
    return status;
}

static tb_status read_request(const char *const *value, request *r) {
    r->rank = TB_NO_RANK;
    r->all = value[ALL] != NULL;
    TB_TRY(tb_shape_parse(value[SHAPE], &r->shape));
    if (value[DTYPE])
        TB_TRY(tb_dtype_parse(value[DTYPE], &r->dtype));
    TB_TRY(tb_shape_size(&r->shape, r->dtype != TB_DTYPE_NONE ? r->dtype : TB_U8, NULL, NULL));
    if (value[RANK])
        TB_TRY(tool_read_rank(value[RANK], &r->rank));
    tb_status status = tb_layout_parse(value[LAYOUT], &r->layout);
    if (status == TB_OK)
        status = tb__grid_init(&r->grid, r->layout, &r->shape, TB__SOURCE);
    return status == TB_OK ? TB_OK : tb__fail_within(status, "--layout");
}

/* Does everything but the printing. */
static tb_status prepare(const char *const *value, request *r, tb__text *out, tb__text *picture) {
    TB_TRY(read_request(value, r));
    if (value[SVG])
        TB_TRY(tool_draw_layout(picture, r->layout, &r->shape, r->dtype));
    return value[JSON] ? add_json(out, r) : add_table(out, r);
}

static int run(const tb__config *config, const char *const *value) {
    (void)config;
    if (value[JSONL]) {
        int exit_status = tool_expect_alone(options, value, JSONL);
        return exit_status == TOOL_OK ? tool_answer_lines(value[JSONL], answer) : exit_status;
    }
    if (!value[SHAPE] || !value[LAYOUT])
        return tool_fail(TOOL_BAD_INPUT, "--%s is missing; see `tensorbus layout --help`",
                         options[value[SHAPE] ? LAYOUT : SHAPE].name);
    request r = {0};
    tb__text out = {0}, picture = {0};
    tb_status status = prepare(value, &r, &out, &picture);
    int exit_status = status == TB_OK ? tool_deliver(&out, &picture, value[SVG]) : tool_fail_status(status);
    tb__text_fini(&out);
    tb__text_fini(&picture);
    request_fini(&r);
    return exit_status;
}

const tool_command tool_layout = {
    .name = "layout",
    .summary = "show which part of a tensor each rank holds",
    .usage = "--shape N,N,... --layout LAYOUT [OPTION...]\n"
             "--jsonl FILE",
    .details = details,
    .options = options,
    .run = run,
};
