/* The two sides of a job: the layouts of each, and whether what they ask for can be done here. */
#include "bench/move.h"

#include "layout/layout.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

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
    TB_TRY(set_layout(side, TOOL_CUT_COLUMN, text));
    TB_TRY(set_layout(side, TOOL_CUT_ROW, text));
    const tb_layout *layout = side->layout[TOOL_CUT_ROW];
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

tb_status tool_side_init(tool_side *side, int which, const char *group, const char *text, int32_t nranks) {
    *side = (tool_side){.group = group, .nranks = nranks};
    tb_status status;
    if (text) {
        status = set_given(side, text);
    } else {
        side->nranks = nranks > 0 ? nranks : TOOL_DEFAULT_RANKS;
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

tb_status tool_job_check(const tool_job *job) {
    tb_plan_cache *cache;
    TB_TRY(tb_plan_cache_create(&cache));
    tb_status status = TB_OK;
    for (size_t i = 0; i < job->tensors.count && status == TB_OK; i++) {
        const tool_tensor *tensor = &job->tensors.item[i];
        const tb_plan *plan;
        status = tb_plan_cache_get(cache, job->side[TOOL_SOURCE].layout[tensor->cut],
                                   job->side[TOOL_TARGET].layout[tensor->cut], &tensor->shape,
                                   tensor->dtype[TOOL_SOURCE], NULL, &plan);
        if (status != TB_OK)
            tb__prefix_detail("%s", tensor->name);
    }
    tb_plan_cache_destroy(cache);
    return status;
}

static void name_ranks(tool_job *job) {
    job->nranks = 0;
    for (int which = 0; which < (job->is_local ? 1 : TOOL_NSIDES); which++) {
        const char *group = job->is_local ? "rank" : job->side[which].group;
        for (int32_t i = 0; i < job->side[which].nranks; i++) {
            tool_rank_name *name = &job->names[job->nranks++];
            snprintf(name->text, sizeof name->text, "%s %" PRId32, group, i);
        }
    }
}

tb_status tool_job_weigh(tool_job *job) {
    int64_t total = 0, available = tool_read_kib("/proc/meminfo", "MemAvailable:");
    name_ranks(job);
    for (int which = 0; which < TOOL_NSIDES; which++) {
        job->nbytes[which] = 0;
        for (int32_t rank = 0; rank < job->side[which].nranks; rank++) {
            tool_parts parts;
            TB_TRY(tool_parts_init(&parts, job, which, rank));
            job->nbytes[which] += parts.nbytes;
            total += parts.nbytes_allocated;
            tool_parts_fini(&parts);
            if (total > INT64_MAX / 4)
                return tb__fail(TB_TOO_BIG, "the ranks would hold more than 2^61 bytes together");
        }
    }
    if (available > 0 && total > available)
        return tb__fail(TB_TOO_BIG, "the ranks would hold %s together, but only %s of memory are free",
                        tool_size(total).text, tool_size(available).text);
    /* 100 MB/s, or 10,000 tensors a second, is slower than any machine that has room for it. */
    int64_t patience_ms = 30000 + total / 100000 + (int64_t)job->tensors.count / 10;
    job->timeout_ms = (int)(patience_ms < 3600000 ? patience_ms : 3600000);
    return TB_OK;
}

void tool_job_fini(tool_job *job) {
    for (int which = 0; which < TOOL_NSIDES; which++)
        tool_side_fini(&job->side[which]);
    free(job->tensors.item);
    tool_folder_remove(job->folder);
    *job = (tool_job){0};
}
