/* The layouts of the demo's two sides, and what one rank holds of the model. */
#include "tools/demo.h"

#include "layout/layout.h"

#include <inttypes.h>
#include <string.h>

enum { DEFAULT_RANKS = 4, ALIGNMENT = 64 };

static tb_status refuse_partial(const tb_layout *layout) {
    for (int i = 0; i < layout->ndim; i++) {
        if (layout->place[i].kind == TB_PARTIAL)
            return tb__fail(TB_REFUSED, "Partial is not for the demo, which checks that elements arrive as they were");
    }
    return TB_OK;
}

static tb_status set_layout(tool_side *side, tool_cut cut, const char *text) {
    TB_TRY(tb_layout_parse(text, &side->layout[cut]));
    return tb_layout_format(side->layout[cut], &side->text[cut]);
}

/* Takes the text. */
static tb_status set_layout_text(tool_side *side, tool_cut cut, tb__text *text) {
    char *string;
    TB_TRY(tb__text_take(text, &string));
    tb_status status = set_layout(side, cut, string);
    free(string);
    return status;
}

/* The same ranks, each with everything. */
static tb_status set_replicated(tool_side *side, tool_cut cut, const tb_layout *layout) {
    tb__text text = {0};
    int32_t n = tb_layout_nranks(layout);
    tb__text_add(&text, "mesh=%" PRId32 " place=Replicate ranks=", n);
    for (int32_t i = 0; i < n; i++)
        tb__text_add(&text, "%s%" PRId32, i ? "," : "", tb_layout_rank_at(layout, i));
    return set_layout_text(side, cut, &text);
}

static int32_t highest_rank(const tb_layout *layout) {
    int32_t highest = 0;
    for (int32_t i = 0; i < tb_layout_nranks(layout); i++) {
        int32_t rank = tb_layout_rank_at(layout, i);
        highest = rank > highest ? rank : highest;
    }
    return highest;
}

static tb_status set_given(tool_side *side, const char *text) {
    side->is_given = true;
    TB_TRY(set_layout(side, TOOL_CUT_COLUMN, text));
    TB_TRY(set_layout(side, TOOL_CUT_ROW, text));
    const tb_layout *layout = side->layout[TOOL_CUT_ROW];
    TB_TRY(refuse_partial(layout));
    int32_t highest = highest_rank(layout);
    if (side->nranks == 0)
        side->nranks = highest < TOOL_MAX_SIDE ? highest + 1 : TOOL_MAX_SIDE;
    if (highest >= side->nranks)
        return tb__fail(TB_INVALID, "rank %" PRId32 " is in the mesh, but the ranks of this side are 0 to %" PRId32,
                        highest, side->nranks - 1);
    /* A layout that cuts the second dimension does not fit vectors; everybody gets these whole. */
    for (int i = 0; i < layout->ndim; i++) {
        if (tb__placement_shards(&layout->place[i]) && (layout->place[i].dim > 0 || layout->place[i].dim < -1))
            return set_replicated(side, TOOL_CUT_NORM, layout);
    }
    return set_layout(side, TOOL_CUT_NORM, text);
}

/* As FSDP has it: everything cut by rows. */
static tb_status set_source(tool_side *side) {
    for (tool_cut cut = 0; cut < TOOL_CUT_COUNT; cut++) {
        tb__text text = {0};
        tb__text_add(&text, "mesh=%" PRId32 " place=Shard(0)", side->nranks);
        TB_TRY(set_layout_text(side, cut, &text));
    }
    return TB_OK;
}

/* Tensor parallel, and twice over (data parallel) where the ranks allow it. */
static tb_status set_target(tool_side *side) {
    static const char *const place[TOOL_CUT_COUNT] = {
        [TOOL_CUT_COLUMN] = "Shard(0)", [TOOL_CUT_ROW] = "Shard(1)", [TOOL_CUT_NORM] = "Replicate"};
    int32_t copies = side->nranks >= 4 && side->nranks % 2 == 0 ? 2 : 1;
    for (tool_cut cut = 0; cut < TOOL_CUT_COUNT; cut++) {
        tb__text text = {0};
        tb__text_add(&text, "mesh=%" PRId32 ",%" PRId32 " place=Replicate,%s", copies, side->nranks / copies,
                     place[cut]);
        TB_TRY(set_layout_text(side, cut, &text));
    }
    return TB_OK;
}

tb_status tool_side_init(tool_side *side, int which, const char *text, int32_t nranks) {
    *side = (tool_side){.group = which == TOOL_SOURCE ? "trainer" : "inference", .nranks = nranks};
    tb_status status;
    if (text) {
        status = set_given(side, text);
    } else {
        side->nranks = nranks > 0 ? nranks : DEFAULT_RANKS;
        status = which == TOOL_SOURCE ? set_source(side) : set_target(side);
    }
    if (status != TB_OK)
        tool_side_fini(side);
    return status;
}

void tool_side_fini(tool_side *side) {
    for (tool_cut cut = 0; cut < TOOL_CUT_COUNT; cut++) {
        tb_layout_destroy(side->layout[cut]);
        free(side->text[cut]);
    }
    *side = (tool_side){0};
}

tb_status tool_sides_check(const tool_side sides[TOOL_NSIDES], const tool_model *model) {
    tb_plan_cache *cache;
    TB_TRY(tb_plan_cache_create(&cache));
    tb_status status = TB_OK;
    for (size_t i = 0; i < model->weights.count && status == TB_OK; i++) {
        const tool_weight *weight = &model->weights.item[i];
        const tb_plan *plan;
        status = tb_plan_cache_get(cache, sides[TOOL_SOURCE].layout[weight->cut],
                                   sides[TOOL_TARGET].layout[weight->cut], &weight->shape, TB_BF16, NULL, &plan);
        if (status != TB_OK)
            tb__prefix_detail("%s", weight->name);
    }
    tb_plan_cache_destroy(cache);
    return status;
}

static tb_status add_part(tool_parts *parts, const tool_model *model, const tool_side *side, int32_t rank) {
    size_t i = parts->count;
    const tool_weight *weight = &model->weights.item[i];
    tool_part part = {.tensor = (uint32_t)i, .weight = weight, .offset = parts->nbytes};
    TB_TRY(tb_layout_local(side->layout[weight->cut], &weight->shape, rank, &part.local));
    parts->part[parts->count++] = part;
    int64_t nbytes;
    /* A list may name an index twice, so that a part is larger than its tensor. */
    TB_TRY(tb_shape_size(&part.local.shape, TB_BF16, &parts->part[i].nelements, &nbytes));
    if (parts->nbytes > INT64_MAX / 4 - nbytes)
        return tb__fail(TB_TOO_BIG, "a rank would hold more than 2^61 bytes");
    parts->nelements += parts->part[i].nelements;
    parts->nbytes += (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return TB_OK;
}

tb_status tool_parts_init(tool_parts *parts, const tool_model *model, const tool_side *side, int32_t rank) {
    *parts = (tool_parts){0};
    parts->part = tb__calloc(model->weights.count, sizeof *parts->part);
    if (!parts->part)
        return TB_NO_MEMORY;
    while (parts->count < model->weights.count) {
        tb_status status = add_part(parts, model, side, rank);
        if (status != TB_OK) {
            tool_parts_fini(parts);
            return status;
        }
    }
    return TB_OK;
}

void tool_parts_fini(tool_parts *parts) {
    for (size_t i = 0; i < parts->count; i++)
        tb_local_fini(&parts->part[i].local);
    free(parts->part);
    *parts = (tool_parts){0};
}
