/* Tensors that have moved to other memory between two transfers. This rank uses the new addresses at once. The plan,
 * and how each bucket is reached, stay: the new memory is of the same kind as the old one. Readers get the new
 * addresses (REBIND) before READY of the next transfer. */
#include "flow/flow_inside.h"
#include "layout/overlap.h"

#include <inttypes.h>
#include <string.h>

static intptr_t shift_of(const tb__flow_tensor *t, bool is_src) {
    const intptr_t *shift = is_src ? t->src_shift : t->dst_shift;
    return shift ? *shift : 0;
}

static bool has_any_shift(const tb__flow *flow) {
    for (size_t i = 0; i < flow->o.ntensors; i++) {
        if (shift_of(&flow->tensors[i], true) || shift_of(&flow->tensors[i], false))
            return true;
    }
    return false;
}

static void shift_tensors(tb__flow *flow, bool back) {
    for (size_t i = 0; i < flow->o.ntensors; i++) {
        for (int is_src = 0; is_src < 2; is_src++) {
            intptr_t by = shift_of(&flow->tensors[i], is_src);
            tb_binding *b = by ? tb__flow_live(flow, i, is_src) : NULL;
            if (b)
                b->base =
                    (void *)((uintptr_t)b->base + (uintptr_t)(back ? -by : by)); // NOLINT(performance-no-int-to-ptr)
        }
    }
}

static bool is_flag_set(const bool *flag) {
    return flag && *flag;
}

/* Invalidated memory must be replaced all at once, since readers have given up all of this rank's. */
static tb_status check_invalidated(const tb__flow *flow) {
    for (size_t i = 0; i < flow->o.ntensors; i++) {
        const tb__flow_tensor *t = &flow->tensors[i];
        bool is_src_bad = is_flag_set(t->src_invalidated) && !*t->src_shift;
        if (is_src_bad || (is_flag_set(t->dst_invalidated) && !*t->dst_shift))
            return tb__fail(TB_REFUSED,
                            "the memory of tensor '%.100s' was invalidated, and it has to move with the others",
                            t->spec.name);
    }
    return TB_OK;
}

/* The overwritten sources must stay the same, because other ranks know them. */
static tb_status check_overlaps(tb__flow *flow) {
    size_t n = flow->o.ntensors;
    bool *before = tb__memdup(flow->setup.overwritten, n, sizeof *before);
    bool any = flow->setup.overwrites_any_source, live = flow->setup.overwrites_live;
    if (!before)
        return TB_NO_MEMORY;
    shift_tensors(flow, false);
    tb_status status = tb__flow_check_overlaps(flow);
    shift_tensors(flow, true);
    for (size_t i = 0; i < n && status == TB_OK; i++) {
        if (flow->setup.overwritten[i] != before[i])
            status = tb__fail(TB_REFUSED,
                              "tensor '%.100s' %s into memory that is sent in %s, which is settled when that is made",
                              flow->tensors[i].spec.name,
                              before[i] ? "would not be received any more" : "would be received", flow->what);
    }
    memcpy(flow->setup.overwritten, before, n * sizeof *before);
    flow->setup.overwrites_any_source = any;
    flow->setup.overwrites_live = live;
    free(before);
    return status;
}

tb_status tb__flow_check_rebind(tb__flow *flow) {
    if (!flow->setup.is_planned || !has_any_shift(flow))
        return TB_OK;
    if (flow->send.is_under_way || flow->recv.is_under_way || flow->shadow.is_prepared || flow->shadow.is_applying ||
        flow->copies.nops > 0 || !tb__flow_end_rehearsal(flow))
        return tb__fail(TB_REFUSED, "a transfer of %s still uses them", flow->what);
    TB_TRY(check_invalidated(flow));
    return check_overlaps(flow);
}

bool tb__flow_holds_tensors(const tb__flow *flow) {
    return flow->staged.held != NULL;
}

/* Replaces the regions of tensors that have moved, and tells readers. Regions of the old memory are given back last:
 * that makes readers unmap it, and they must have heard where the tensors are now. */
static tb_status move_regions(tb__flow *flow, bool *has_moved, tb__region **gone) {
    struct flow_setup *setup = &flow->setup;
    size_t ngone = 0;
    tb_status status = TB_OK;
    bool is_all = false;
    for (size_t i = 0; i < flow->o.ntensors && status == TB_OK; i++) {
        for (int is_src = 0; is_src < 2 && status == TB_OK; is_src++) {
            tb__region **at = is_src ? &setup->src_regions[i] : &setup->dst_regions[i], *now;
            uintptr_t first, last;
            if (!shift_of(&flow->tensors[i], is_src) || !*at || (is_src && setup->snapshot_of))
                continue;
            status = tb__binding_span(tb__flow_live(flow, i, is_src), &first, &last);
            if (status == TB_OK) // NOLINTNEXTLINE(performance-no-int-to-ptr)
                status = tb__region_get(flow->o.loop, (void *)first, last - first, &now);
            if (status != TB_OK)
                break;
            gone[ngone++] = *at;
            *at = now;
            has_moved[i] |= is_src;
            is_all |= is_src && is_flag_set(flow->tensors[i].src_invalidated);
        }
    }
    if (is_all)
        memset(has_moved, true, flow->o.ntensors);
    if (status == TB_OK)
        status = tb__flow_send_rebinds(flow, has_moved);
    while (ngone > 0)
        tb__region_put(gone[--ngone]);
    return status;
}

static tb_status rebind(tb__flow *flow) {
    size_t n = flow->o.ntensors;
    bool *has_moved = tb__calloc(n, sizeof *has_moved);
    tb__region **gone = tb__calloc(2 * n, sizeof(tb__region *));
    tb__flow_release_copies(flow);
    flow->setup.accesses.count = 0; /* other memory may be there now */
    tb_status status = has_moved && gone ? tb__flow_check_overlaps(flow) : TB_NO_MEMORY;
    if (status == TB_OK)
        status = move_regions(flow, has_moved, gone);
    free(has_moved);
    free(gone);
    TB_TRY(status);
    TB_TRY(tb__flow_watch_memory(flow));
    return flow->o.shadow.is_used ? tb__flow_prepare_copies(flow, COPY_COMMIT) : TB_OK;
}

void tb__flow_rebind(tb__flow *flow) {
    if (!has_any_shift(flow))
        return;
    shift_tensors(flow, false);
    tb__flow_forget_valid(flow);
    tb_status status = flow->setup.is_planned ? rebind(flow) : TB_OK;
    if (status != TB_OK) {
        status = tb__fail_within(status, "rank %" PRId32, flow->o.rank);
        tb__flow_break(flow, status, tb_error_detail());
    }
}
