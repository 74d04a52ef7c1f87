/* Views as text. The input is a view, a newline, a layout, a newline and a shape. What ranks hold of the canonical
 * tensor lies inside their memory, and is what the canonical layout says. */
#include "cost.h"
#include "fuzz.h"
#include "numbers.h"

enum { MOST_RANKS = 64, LONGEST = 1 << 16 };

static void check_rank(const tb_view *view, const tb_layout *layout, const tb_shape *shape, const tb_layout *viewed,
                       const tb_shape *canonical, int32_t rank) {
    tb_local stored, local;
    tb_binding binding, bound, *boxes;
    int64_t nbytes;
    size_t nboxes;
    expect(tb_layout_local(layout, shape, rank, &stored) == TB_OK);
    expect(tb_layout_local(viewed, canonical, rank, &local) == TB_OK);
    if (succeeded(tb_shape_size(&stored.shape, TB_F32, NULL, &nbytes))) {
        expect(tb_binding_contiguous(NULL, 0, TB_F32, &stored.shape, &binding) == TB_OK);
        if (succeeded(tb_view_bind(view, shape, layout, rank, &binding, &bound))) {
            expect(bound.shape.ndim == local.shape.ndim);
            for (int d = 0; d < local.shape.ndim; d++)
                expect(bound.shape.dim[d] == local.shape.dim[d]);
            expect(tb_binding_check(&bound, nbytes) == TB_OK);
        }
        if (succeeded(tb_view_padding(view, shape, layout, rank, &binding, &boxes, &nboxes))) {
            for (size_t i = 0; i < nboxes; i++)
                expect(tb_binding_check(&boxes[i], nbytes) == TB_OK);
            free(boxes);
        }
    }
    tb_local_fini(&stored);
    tb_local_fini(&local);
}

static void check_view(const tb_view *view, const tb_layout *layout, const tb_shape *shape) {
    tb_layout *viewed;
    tb_shape canonical;
    int32_t n = tb_layout_nranks(layout);
    for (int d = 0; d < shape->ndim; d++) {
        if (shape->dim[d] > LONGEST)
            return;
    }
    if (n > MOST_RANKS || !lists_are_short(layout, shape, n) ||
        !succeeded(tb_view_apply(view, shape, layout, &canonical, &viewed)))
        return;
    expect(tb_layout_nranks(viewed) <= n);
    if (succeeded(tb_layout_check(viewed, &canonical))) {
        for (int32_t i = 0; i < n; i++)
            check_rank(view, layout, shape, viewed, &canonical, tb_layout_rank_at(layout, i));
    }
    tb_layout_destroy(viewed);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *text = fuzz_string(data, size), *layout_text = strchr(text, '\n'), *shape_text;
    tb_view *view = NULL;
    tb_layout *layout = NULL;
    tb_shape shape;
    shape_text = layout_text ? strchr(layout_text + 1, '\n') : NULL;
    if (shape_text) {
        *layout_text++ = '\0';
        *shape_text++ = '\0';
    }
    bool has_view = succeeded(tb_view_parse(text, &view));
    expect(has_view == (view != NULL));
    if (has_view && shape_text && succeeded(tb_layout_parse(layout_text, &layout)) &&
        succeeded(tb_shape_parse(shape_text, &shape)))
        check_view(view, layout, &shape);
    tb_layout_destroy(layout);
    tb_view_destroy(view);
    free(text);
    return 0;
}
