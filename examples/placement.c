/* A placement that the library has no kind for, spelled as Explicit: rows are dealt out to the ranks one by one, 0, 1,
 * 2, 0, 1, 2, ... as some programs do with experts. Four ranks have them so, two want halves; every rank's plan is
 * checked. */
#include <tensorbus/plan.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 10, COLUMNS = 4, RANKS = 4 };

/* Rank r keeps rows r, r + RANKS, r + 2 * RANKS, ..., each a segment of one row. */
static tb_status make_round_robin(tb_layout **out) {
    tb_segment segments[ROWS];
    size_t list_ends[RANKS], n = 0;
    for (int rank = 0; rank < RANKS; rank++) {
        for (int row = rank; row < ROWS; row += RANKS)
            segments[n++] = (tb_segment){.start = row, .stop = row + 1};
        list_ends[rank] = n;
    }
    tb_placement rows = {.kind = TB_EXPLICIT, .dim = 0, .nlists = RANKS, .list_ends = list_ends, .segments = segments};
    int64_t mesh[] = {RANKS};
    return tb_layout_create(1, mesh, NULL, &rows, out);
}

int main(void) {
    tb_layout *src = NULL, *dst = NULL;
    tb_plan *plan = NULL;
    char *text = NULL;
    tb_shape shape = {.ndim = 2, .dim = {ROWS, COLUMNS}};
    bool ok = make_round_robin(&src) == TB_OK && tb_layout_parse("mesh=2 place=S0 ranks=4,5", &dst) == TB_OK &&
              tb_plan_create(src, dst, &shape, TB_BF16, NULL, &plan) == TB_OK && tb_plan_check(plan) == TB_OK &&
              tb_layout_format(src, &text) == TB_OK;
    if (ok)
        printf("%s\n", text);
    else
        fprintf(stderr, "%s\n", tb_error_detail());
    free(text);
    tb_plan_destroy(plan);
    tb_layout_destroy(dst);
    tb_layout_destroy(src);
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}
