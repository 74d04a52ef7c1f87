/* Layouts and shapes as text. The input is a layout, optionally a newline and a shape; the layout is then laid over
 * that shape, and what a few ranks hold is looked at. */
#include "base/wide.h"
#include "cost.h"
#include "fuzz.h"
#include "numbers.h"

enum { MOST_RANKS = 4096, MOST_RANKS_SUMMED = 64 };

static void check_mesh(const tb_layout *layout) {
    int32_t n = tb_layout_nranks(layout);
    expect(n >= 1 && n <= TB_MAX_RANKS);
    for (int32_t i = 0; i < n; i += n < MOST_RANKS ? 1 : n / 64) {
        int32_t rank = tb_layout_rank_at(layout, i);
        expect(rank >= 0 && rank < TB_MAX_RANKS);
        expect(tb_layout_index_of(layout, rank) == i);
    }
    expect(tb_layout_index_of(layout, TB_NO_RANK) == -1);
    expect(tb_layout_index_of(layout, TB_MAX_RANKS) == -1);
}

/* Returns the number of elements. */
static tb__wide check_local(const tb_layout *layout, const tb_shape *shape, int32_t rank) {
    tb_local local;
    expect(tb_layout_local(layout, shape, rank, &local) == TB_OK);
    expect(local.shape.ndim == shape->ndim);
    bool is_member = tb_layout_index_of(layout, rank) >= 0;
    tb__wide nelements = is_member;
    for (int d = 0; d < shape->ndim; d++) {
        int64_t length = 0;
        for (size_t i = 0; i < local.nsegments[d]; i++) {
            const tb_segment *s = &local.segments[d][i];
            expect(0 <= s->start && s->start < s->stop && s->stop <= shape->dim[d]);
            length += s->stop - s->start;
        }
        expect(length == local.shape.dim[d]);
        expect(is_member || local.nsegments[d] == 0);
        nelements *= (uint64_t)length;
    }
    tb_local_fini(&local);
    return nelements;
}

/* Without Explicit placements every element is held once for each copy and each contribution. */
static void check_sum(const tb_layout *layout, const tb_shape *shape) {
    int64_t nelements;
    uint64_t ncopies = 1;
    tb__wide sum = 0;
    for (int m = 0; m < layout->ndim; m++) {
        if (!tb__placement_shards(&layout->place[m]))
            ncopies *= (uint64_t)layout->shape[m];
    }
    expect(tb_shape_size(shape, TB_U8, &nelements, NULL) == TB_OK);
    for (int32_t i = 0; i < layout->nranks; i++)
        sum += check_local(layout, shape, tb_layout_rank_at(layout, i));
    expect(sum == (tb__wide)(uint64_t)nelements * ncopies);
}

static void check_over(const tb_layout *layout, const tb_shape *shape) {
    int32_t n = tb_layout_nranks(layout);
    bool is_explicit = has_explicit(layout); /* such a layout is checked by making every rank's lists */
    if (is_explicit && !lists_are_short(layout, shape, n))
        return;
    bool is_valid = succeeded(tb_layout_check(layout, shape));
    if (is_valid)
        note_sizes(layout, shape);
    if (n > MOST_RANKS || !lists_are_short(layout, shape, 4))
        return;
    if (!is_valid) {
        tb_local local;
        expect(!succeeded(tb_layout_local(layout, shape, tb_layout_rank_at(layout, 0), &local)));
        return;
    }
    check_local(layout, shape, tb_layout_rank_at(layout, 0));
    check_local(layout, shape, tb_layout_rank_at(layout, n / 2));
    check_local(layout, shape, tb_layout_rank_at(layout, n - 1));
    check_local(layout, shape, TB_NO_RANK);
    if (!is_explicit && n <= MOST_RANKS_SUMMED && lists_are_short(layout, shape, n))
        check_sum(layout, shape);
}

static void check_shape(const tb_shape *shape) {
    int64_t nelements, nbytes;
    expect(shape->ndim >= 0 && shape->ndim <= TB_MAX_DIMS);
    for (int dtype = TB_DTYPE_NONE; dtype <= TB_DTYPE_COUNT; dtype++) {
        if (succeeded(tb_shape_size(shape, (tb_dtype)dtype, &nelements, &nbytes)))
            expect(nelements >= 0 && nbytes >= 0 && nbytes <= INT64_C(1) << 62);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const uint8_t *newline = size ? memchr(data, '\n', size) : NULL;
    size_t length = newline ? (size_t)(newline - data) : size;
    char *layout_text = fuzz_string(data, length);
    char *shape_text = newline ? fuzz_string(newline + 1, size - length - 1) : fuzz_string(data, size);
    tb_layout *layout = NULL;
    tb_shape shape;
    bool has_layout = succeeded(tb_layout_parse(layout_text, &layout));
    bool has_shape = succeeded(tb_shape_parse(shape_text, &shape));
    expect(has_layout == (layout != NULL));
    if (has_layout) {
        check_mesh(layout);
        expect_text_form(layout);
    }
    if (has_shape)
        check_shape(&shape);
    if (has_layout && has_shape)
        check_over(layout, &shape);
    tb_layout_destroy(layout);
    free(layout_text);
    free(shape_text);
    return 0;
}
