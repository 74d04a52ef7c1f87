/* Sums of what goes through staging memory, where they are asked for. */
#include "flow/flow_inside.h"

#include "base/checksum.h"

void (*tb__flow_on_arrival)(void *bytes, size_t nbytes);

/* With the lock free: it takes about as long as a copy. */
uint64_t tb__flow_sum(const tb__flow *flow, const void *bytes, size_t nbytes) {
    if (!flow->o.checksum)
        return 0;
    tb__loop_unlock(flow->o.loop);
    uint64_t sum = tb__checksum(bytes, nbytes);
    tb__loop_lock(flow->o.loop);
    return sum;
}

tb_status tb__flow_check_sums(const staged_bucket *p) {
    const tb__flow *flow = p->flow;
    const tb_chunk *first =
        &flow->setup.ir->chunks[flow->setup.ir->entries[flow->setup.ir->buckets[p->bucket].first_entry].chunk];
    for (size_t i = 0; i < p->nmessages; i++) {
        const bucket_message *c = &p->messages[i];
        if (c->op.kind != TB_OP_RECV || p->pieces) /* what goes without a buffer goes without a sum */
            continue;
        if (tb__flow_on_arrival)
            tb__flow_on_arrival(c->piece.base, c->piece.nbytes);
        if (tb__flow_sum(flow, c->piece.base, c->piece.nbytes) != c->sum)
            return tb__fail(TB_IO,
                            "bucket %zu of %s, which begins with tensor '%.100s', has come from %s with other bytes "
                            "than it was sent with",
                            p->bucket, flow->what, flow->tensors[first->tensor].spec.name,
                            flow->members[c->member].peer->label);
    }
    return TB_OK;
}
