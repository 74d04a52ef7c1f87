/* A plan as one page of HTML, without other files: its picture, and what each rank sends, receives and keeps. The page
 * is page/plan.html, with the picture and the transfers in the places of two words. */
#include "tools/tools.h"

#include <inttypes.h>
#include <string.h>

extern const char tool_plan_page[], tool_plan_page_end[]; /* page/page.c */

static void add_transfers(tb__text *out, const tool_plan_view *view) {
    for (size_t i = 0; i < view->transfers.count; i++) {
        const tool_transfer *t = &view->transfers.item[i];
        tb__text_add(out, "[%" PRId32 ",%" PRId64 ",%" PRId64 ",[", t->source == TB_NO_RANK ? -1 : t->source, t->nboxes,
                     t->nbytes);
        for (uint32_t j = 0; j < t->ntargets; j++)
            tb__text_add(out, "%s%" PRId32, j ? "," : "", t->targets[j]);
        tb__text_add(out, "]],\n");
    }
}

tb_status tool_draw_plan_page(tb__text *out, const tool_plan_view *view) {
    static const char picture[] = "\nPICTURE\n", transfers[] = "\nTRANSFERS";
    const char *first = strstr(tool_plan_page, picture), *second = strstr(tool_plan_page, transfers);
    tb__text_add(out, "%.*s\n", (int)(first - tool_plan_page), tool_plan_page);
    TB_TRY(tool_draw_plan(out, view));
    first += sizeof picture - 1;
    tb__text_add(out, "%.*s\n", (int)(second - first), first);
    add_transfers(out, view);
    tb__text_add(out, "%s", second + sizeof transfers - 1);
    return TB_OK;
}
