/* Memory that the program invalidates while a flow uses it. Only the driver ends a leg, so a leg that uses the memory
 * is marked here, and ends in its next step. Until then it may read and write. */
#include "flow/flow_inside.h"

#include <inttypes.h>

static bool is_flag_set(const bool *flag) {
    return flag && *flag;
}

/* The first tensor whose source, or target, was invalidated; NULL: there is none. */
static const tb__flow_tensor *find_invalidated(const tb__flow *flow, bool is_src) {
    for (size_t i = 0; i < flow->o.ntensors; i++) {
        const tb__flow_tensor *t = &flow->tensors[i];
        if (is_flag_set(is_src ? t->src_invalidated : t->dst_invalidated))
            return t;
    }
    return NULL;
}

/* A receive that was marked because it reads from this rank's own send names the source tensor. */
tb_status tb__flow_check_memory(const tb__flow *flow, bool is_send) {
    const tb__flow_tensor *t = find_invalidated(flow, is_send);
    if (!t && !is_send && flow->recv.memory_invalidated)
        t = find_invalidated(flow, true);
    if (!t)
        return TB_OK;
    return tb__fail(TB_INVALID, "the memory of tensor '%.100s' on rank %" PRId32 " was invalidated; make %s again",
                    t->spec.name, flow->o.rank, flow->what);
}

/* Released sources are not read any more. A prepared receive checks the memory again before it is applied. */
bool tb__flow_mark_invalidated(tb__flow *flow, uintptr_t first, uintptr_t last, const char **tensor) {
    const tb__flow_tensor *src = find_invalidated(flow, true), *dst = find_invalidated(flow, false);
    tb__leg *send = &flow->send, *recv = &flow->recv;
    bool sends = src && send->is_under_way && !send->is_released;
    if (sends)
        tb__leg_invalidate(send);
    if (recv->is_under_way && (sends || dst))
        tb__leg_invalidate(recv);
    bool receives = recv->memory_invalidated && recv->is_under_way && !flow->shadow.is_prepared;
    if (send->memory_invalidated || recv->memory_invalidated)
        tb__loop_wake(flow->o.loop);
    const tb__flow_tensor *held = tb__staged_find_held(flow, first, last), *used = held ? held : dst ? dst : src;
    if (used)
        *tensor = used->spec.name;
    return sends || receives || held || (dst && flow->shadow.is_applying) || (used && flow->copies.is_stuck);
}
