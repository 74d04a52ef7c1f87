/* Memory that the program invalidates while a flow uses it, and memory that other ranks revoke. Only the driver ends a
 * leg, so a leg that uses the program's memory is marked here, and ends in its next step. Until then it may read and
 * write. */
#include "flow/flow_inside.h"

#include <inttypes.h>

static bool is_flag_set(const bool *flag) {
    return flag && *flag;
}

/* The first tensor whose source, or target, was invalidated; NULL: there is none. If there is none, that holds until
 * memory of this flow is invalidated: looking at a million tensors takes milliseconds. */
static const tb__flow_tensor *find_invalidated(tb__flow *flow, bool is_src) {
    for (size_t i = 0; i < flow->o.ntensors && !flow->memory.is_valid[is_src]; i++) {
        const tb__flow_tensor *t = &flow->tensors[i];
        if (is_flag_set(is_src ? t->src_invalidated : t->dst_invalidated))
            return t;
    }
    flow->memory.is_valid[is_src] = true;
    return NULL;
}

/* A receive that was marked because it reads from this rank's own send names the source tensor. */
tb_status tb__flow_check_memory(tb__flow *flow, bool is_send) {
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
    flow->memory = (struct flow_memory){0};
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
    bool rehearses = (src || dst) && flow->copies.is_rehearsing;
    if (rehearses)
        tb__flow_cancel_rehearsal(flow);
    bool is_used =
        sends || receives || rehearses || held || (dst && flow->shadow.is_applying) || (used && flow->copies.is_stuck);
    if ((src || dst) && !is_used && !send->is_under_way && !recv->is_under_way && flow->copies.nops == 0)
        tb__flow_release_copies(flow); /* devices may have pinned the memory for them */
    return is_used;
}

/* ---- Memory of senders ------------------------------------------------------------------------------------------ */

bool tb__lane_is_unreadable(const tb__flow *flow, const lane *l) {
    for (uint32_t i = 0; i < l->nsenders; i++) {
        const member *m = &flow->members[l->senders[i]];
        if (m->setup.is_revoked || m->setup.why_unreachable)
            return true;
    }
    return false;
}

tb_status tb__flow_fail_invalidated(const tb__flow *flow, const member *m, uint32_t tensor) {
    return tb__fail(m->peer->is_lost ? TB_LOST : TB_INVALID,
                    "the memory of tensor '%.100s' on %s was invalidated; make %s again",
                    flow->tensors[tensor].spec.name, m->peer->label, flow->what);
}

/* Its staging memory is not the program's: it is revoked when the sender is gone. */
static void release_stage(member *m) {
    if (!m->setup.stage || !tb__peer_memory_is_revoked(m->setup.stage))
        return;
    tb__peer_memory_release(m->setup.stage);
    m->setup.stage = NULL;
}

static const remote_tensor *find_revoked(const member *m) {
    for (size_t i = 0; i < m->setup.remote_tensors.count; i++) {
        const remote_tensor *p = &m->setup.remote_tensors.item[i];
        if (p->memory && tb__peer_memory_is_revoked(p->memory))
            return p;
    }
    return NULL;
}

/* The jobs of reads use memory of all senders, and must not run again once some of it is unmapped. So no read is begun
 * until those under way have ended, and the jobs are prepared anew, without the senders that have revoked memory. */
void tb__flow_release_revoked(tb__flow *flow) {
    if (flow->direct.is_revoking)
        tb__flow_cancel_rehearsal(flow);
    if (!flow->direct.is_revoking || tb__flow_is_reading(flow))
        return;
    flow->direct.is_revoking = false;
    tb__flow_forget_reads(flow);
    while (flow->direct.replaced.count > 0)
        tb__peer_memory_release(flow->direct.replaced.item[--flow->direct.replaced.count]);
    for (size_t i = 0; i < flow->nmembers; i++) {
        member *m = &flow->members[i];
        for (size_t j = 0; m->setup.is_revoked && j < m->setup.remote_tensors.count; j++) {
            remote_tensor *p = &m->setup.remote_tensors.item[j];
            tb__peer_memory_release(p->memory);
            p->memory = NULL;
            p->why_staged = "its memory was invalidated";
        }
    }
}

void tb__flow_forget_valid(tb__flow *flow) {
    flow->memory = (struct flow_memory){0};
}

void tb__flow_readmit(member *m) {
    m->setup.is_revoked = false;
}

/* A receive that has all of the sender's data goes on; one that needs a sender which is gone fails for that reason. The
 * sender may have ended its part, and its memory, because the transfer had failed: then that is the reason. */
static void on_revoked(tb__revocation_watch *watch) {
    tb__flow *flow = (tb__flow *)((char *)watch - offsetof(tb__flow, direct.watch));
    tb__staged_drop_revoked(flow);
    for (size_t i = 0; i < flow->nmembers; i++) {
        member *m = &flow->members[i];
        release_stage(m);
        const remote_tensor *p = m->setup.is_revoked ? NULL : find_revoked(m);
        if (!p)
            continue;
        m->setup.is_revoked = flow->direct.is_revoking = true;
        if (!flow->recv.attempt || m->direct.is_concluded || m->is_gone || m->peer->is_lost)
            continue;
        bool tells;
        tb__fault fault = tb__flow_find_reason(flow, false, &tells);
        if (fault.status == TB_OK)
            fault = tb__fault_of(tb__flow_fail_invalidated(flow, m, p->tensor), tb_error_detail());
        tb__flow_fail_leg(flow, false, &fault, tells);
    }
    tb__flow_release_revoked(flow);
}

void tb__flow_watch_revocations(tb__flow *flow) {
    flow->direct.watch.revoked = on_revoked;
    tb__loop_watch_revocations(flow->o.loop, &flow->direct.watch);
}
