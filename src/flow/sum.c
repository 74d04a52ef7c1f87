/* Checksums of staged buckets, if enabled: the sender announces a bucket with its checksum, and the receiver compares.
 */
#include "flow/flow_inside.h"

void (*tb__flow_on_arrival)(void *bytes, size_t nbytes);

/* `end` gets the checksum by tb__jobs_sum. */
static tb_status begin_sum(staged_bucket *p, bucket_message *message, char *bytes, size_t nbytes,
                           void (*end)(copy_op *c, tb_status status)) {
    copy_op *c = tb__flow_new_copy_op(p->flow, p->is_send, COPY_SUM, 0);
    if (!c)
        return TB_NO_MEMORY;
    c->from = bytes;
    c->nbytes = nbytes;
    c->staged_bucket = p;
    c->message = message;
    c->end = end;
    p->nsums++;
    tb__flow_start_copy_op(c);
    return TB_OK;
}

/* ---- Out -------------------------------------------------------------------------------------------------------- */

static void end_out_sum(copy_op *c, tb_status status) {
    staged_bucket *p = c->staged_bucket;
    (void)status;
    if (tb__staged_bucket_leg(p)->is_ending)
        return;
    p->nsums--;
    p->sum = tb__jobs_sum(&c->run);
    tb__staged_bucket_announce(p);
}

bool tb__staged_bucket_begin_sum(staged_bucket *p) {
    if (!p->flow->o.checksum || p->kind == STAGED_IN || p->is_summed)
        return false;
    p->is_summed = true;
    tb_status status = begin_sum(p, NULL, p->buffer, p->nbytes, end_out_sum);
    if (status != TB_OK)
        tb__flow_await_reason(p->flow, p->is_send, status, tb_error_detail());
    return true;
}

/* ---- In --------------------------------------------------------------------------------------------------------- */

static void end_in_sum(copy_op *c, tb_status status) {
    tb__flow *flow = c->flow;
    staged_bucket *p = c->staged_bucket;
    const bucket_message *m = c->message;
    const tb_chunk *first = tb__flow_first_chunk(flow, p->bucket);
    if (tb__staged_bucket_leg(p)->is_ending)
        return;
    if (tb__jobs_sum(&c->run) == m->sum) {
        p->nsums--; /* a bucket with a wrong checksum never counts as checked */
        return;
    }
    status =
        tb__fail(TB_IO,
                 "bucket %zu of %s, which begins with tensor '%.100s', has come from %s with other bytes than it "
                 "was sent with",
                 p->bucket, flow->what, flow->tensors[first->tensor].spec.name, flow->members[m->member].peer->label);
    tb__flow_abort(flow, p->is_send, status, tb_error_detail());
}

tb_status tb__staged_bucket_check_sums(staged_bucket *p, bool *is_checked) {
    for (size_t i = 0; !p->is_summed && i < p->nmessages; i++) {
        bucket_message *m = &p->messages[i];
        if (m->op.kind != TB_OP_RECV || p->pieces) /* checksums need a buffer */
            continue;
        if (tb__flow_on_arrival)
            tb__flow_on_arrival(m->piece.base, m->piece.nbytes);
        if (p->flow->o.checksum)
            TB_TRY(begin_sum(p, m, m->piece.base, m->piece.nbytes, end_in_sum));
    }
    p->is_summed = true;
    *is_checked = p->nsums == 0;
    return TB_OK;
}
