/* Invalidated memory that operations of a copy service use. */
#include "copy/copy.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static bool view_meets(const tb__match_view *v, uintptr_t first, uintptr_t last) {
    tb_binding b = {.base = v->data, .dtype = v->dtype, .shape = v->shape};
    memcpy(b.strides, v->strides, sizeof b.strides);
    return tb__binding_overlaps(&b, first, last);
}

tb_status tb__copy_check_invalidated(const tb_copy *copy) {
    const tb__copy_list *lists[] = {&copy->sends, &copy->recvs};
    for (size_t i = 0; i < copy->params.count; i++) {
        if (copy->params.item[i].is_invalidated)
            return tb__fail(TB_INVALID, "the memory of a parameter on %s was invalidated; %s can't use it",
                            copy->peers[copy->self].label, copy->what);
    }
    for (size_t i = 0; i < 2; i++) {
        for (size_t j = 0; j < lists[i]->ops.count; j++) {
            const tb__match_op *op = &lists[i]->ops.item[j];
            for (uint32_t k = 0; k < op->nviews; k++) {
                if (copy->views.item[op->first_view + k].is_invalidated)
                    return tb__fail(TB_INVALID,
                                    "the memory of tensor '%s, tensor %" PRIu32
                                    "' on %s was invalidated; %s can't use it",
                                    tb__match_name(op).text, k, copy->peers[copy->self].label, copy->what);
            }
        }
    }
    return TB_OK;
}

/* A run that has not begun to move data is aborted. One that has is ended by its flow's legs, or ends with its local
 * copies. */
bool tb__copy_invalidate(tb__memory_user *user, uintptr_t first, uintptr_t last, char *still, size_t room) {
    tb_copy *copy = (tb_copy *)((char *)user - offsetof(tb_copy, memory));
    bool has_some = false;
    for (size_t i = 0; i < copy->views.count; i++) {
        bool meets = view_meets(&copy->views.item[i], first, last);
        copy->views.item[i].is_invalidated |= meets;
        has_some |= meets;
    }
    for (size_t i = 0; i < copy->params.count; i++) {
        bool meets = view_meets(&copy->params.item[i], first, last);
        copy->params.item[i].is_invalidated |= meets;
        has_some |= meets;
    }
    if (!has_some || !(copy->is_running || copy->copies_local))
        return false;
    const char *tensor = "a tensor";
    bool is_used = copy->copies_local || (copy->flow && tb__flow_mark_invalidated(copy->flow, first, last, &tensor));
    if (is_used) {
        snprintf(still, room, "%s of %s", tensor, copy->what);
    } else if (!copy->flow && copy->broken == TB_OK && (!copy->is_given_up || copy->is_late)) {
        copy->is_given_up = false; /* otherwise this rank, aborted for being late, would take part in the next run */
        tb__copy_abort(copy, tb__copy_check_invalidated(copy));
    }
    return is_used;
}
