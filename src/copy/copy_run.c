/* Submitted operations, and the agreement before a run. Each rank sends every other rank an *offer*: its operations
 * with that rank. A rank that has all offers compares them with its own operations and sends its *vote*. If all votes
 * are TB_OK, the data moves; else all ranks fail with the message of the lowest seat that voted otherwise. */
#include "copy/copy.h"

#include "base/int.h"
#include "base/opts.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MOST_VIEWS = 1 << 24 }; /* in a run, on a rank */

/* ---- Submitting ------------------------------------------------------------------------------------------------ */

static void set_memory_kind(const tb_copy *copy, tb__match_view *v) {
    tb__memory memory;
    const tb__device *device = tb__loop_find_memory(copy->world->loop, v->data, v->nbytes > 0, &memory);
    v->memory_kind = tb__device_memory_kind(device, &memory);
}

static tb_status add_op(tb_copy *copy, tb__copy_list *list, const tb_copy_view *views, size_t nviews, int32_t seat,
                        uint64_t task_id) {
    size_t first = copy->views.count;
    if (copy->is_running)
        return tb__fail(TB_REFUSED, "a run is under way");
    if (seat < 0 || seat >= copy->size)
        return tb__fail(TB_INVALID, "there is no rank %" PRId32 ": the group has %" PRId32, seat, copy->size);
    if (nviews == 0 || nviews > MOST_VIEWS - first)
        return tb__fail(TB_INVALID, "%zu tensors; an operation has at least 1, and a run at most %d", nviews,
                        MOST_VIEWS);
    if (!tb__vec_reserve(&copy->views, nviews) || !tb__vec_reserve(&list->ops, 1))
        return TB_NO_MEMORY;
    for (size_t i = 0; i < nviews; i++) {
        tb_copy_view view;
        tb_status status = tb__struct_read(&view, sizeof view, views, i, "a tb_copy_view");
        if (status == TB_OK)
            status = tb__match_read(&view, &copy->views.item[first + i]);
        if (status == TB_OK)
            status = tb__world_check_memory(copy->world, view.memory, view.data, view.data != NULL);
        if (status == TB_OK)
            set_memory_kind(copy, &copy->views.item[first + i]);
        if (status != TB_OK)
            return tb__fail_within(status, "tensor %zu", i);
    }
    copy->views.count += nviews;
    tb__match_op op = {.task_id = task_id,
                       .has_no_id = task_id == TB_NO_TASK,
                       .seat = seat,
                       .nviews = (uint32_t)nviews,
                       .first_view = first,
                       .number = list->ops.count};
    if (op.has_no_id)
        op.task_id = copy->peers[copy->position[seat]].nwithout_id[list == &copy->sends]++;
    list->ops.item[list->ops.count++] = op;
    return TB_OK;
}

static tb_status submit_op(tb_copy *copy, bool is_send, const tb_copy_view *views, size_t nviews, int32_t seat,
                           uint64_t task_id) {
    TB_TRY(tb__world_check(copy->world, "copy service"));
    tb__loop_lock(copy->world->loop);
    tb_status status = add_op(copy, is_send ? &copy->sends : &copy->recvs, views, nviews, seat, task_id);
    tb__loop_unlock(copy->world->loop);
    if (status != TB_OK && task_id == TB_NO_TASK)
        tb__prefix_detail("%s", copy->what);
    else if (status != TB_OK)
        tb__prefix_detail("%s, task %" PRIu64, copy->what, task_id);
    return status;
}

tb_status tb_copy_submit_send(tb_copy *copy, const tb_copy_view *views, size_t nviews, int32_t dest, uint64_t task_id) {
    return submit_op(copy, true, views, nviews, dest, task_id);
}

tb_status tb_copy_submit_recv(tb_copy *copy, const tb_copy_view *views, size_t nviews, int32_t source,
                              uint64_t task_id) {
    return submit_op(copy, false, views, nviews, source, task_id);
}

/* Index of the first operation with this seat or a higher one. */
static size_t first_op_with(const tb__copy_list *list, int32_t seat) {
    size_t i = 0;
    TB_BISECT(i, list->ops.count, list->ops.item[i].seat >= seat);
    return i;
}

tb__match_end tb__copy_ops_with(tb_copy *copy, bool is_send, int32_t seat) {
    const tb__copy_list *list = is_send ? &copy->sends : &copy->recvs;
    tb__match_end end = {.label = copy->peers[copy->self].label, .views = copy->views.item};
    if (list->ops.item) {
        size_t first = first_op_with(list, seat);
        end.ops = list->ops.item + first;
        end.nops = first_op_with(list, seat + 1) - first;
    }
    return end;
}

/* ---- Checks of this rank's own operations ----------------------------------------------------------------------- */

typedef struct use {
    uint64_t task_id;
    int32_t seat;
    bool is_send;
} use;

static int compare_uses(const void *a, const void *b) {
    const use *x = a, *y = b;
    if (x->task_id != y->task_id)
        return x->task_id < y->task_id ? -1 : 1;
    return (int)y->is_send - (int)x->is_send;
}

static void name_use(const tb_copy *copy, const use *u, char *out, size_t room) {
    snprintf(out, room, "%s %.250s", u->is_send ? "to" : "from", copy->peers[copy->position[u->seat]].label);
}

/* A task id may be used once, except that a local copy has both a send and a receive. */
static tb_status check_uses(const tb_copy *copy, const use *uses, size_t n) {
    for (size_t i = 1; i < n; i++) {
        const use *x = &uses[i - 1], *y = &uses[i];
        bool is_third = i > 1 && uses[i - 2].task_id == y->task_id;
        bool is_own = x->is_send && !y->is_send && x->seat == copy->index && y->seat == copy->index;
        if (x->task_id != y->task_id || (is_own && !is_third))
            continue;
        char first[300], second[300];
        name_use(copy, x, first, sizeof first);
        name_use(copy, y, second, sizeof second);
        return tb__fail(TB_CONFLICT, "%s has submitted task %" PRIu64 " twice: %s, and %s",
                        copy->peers[copy->self].label, y->task_id, first, second);
    }
    return TB_OK;
}

static tb_status check_ids(tb_copy *copy) {
    size_t nsends = copy->sends.ops.count, nops = nsends + copy->recvs.ops.count, n = 0;
    use *uses = tb__malloc(nops, sizeof *uses);
    if (!uses)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < nops; i++) {
        const tb__match_op *op = i < nsends ? &copy->sends.ops.item[i] : &copy->recvs.ops.item[i - nsends];
        if (!op->has_no_id)
            uses[n++] = (use){op->task_id, op->seat, i < nsends};
    }
    if (n)
        qsort(uses, n, sizeof *uses, compare_uses);
    tb_status status = check_uses(copy, uses, n);
    free(uses);
    return status;
}

/* Sorts the operations. Those that were submitted with one rank under one task id become one, with the views of all,
 * which have to lie side by side. */
static tb_status merge_ops(tb_copy *copy) {
    tb__copy_list *lists[] = {&copy->sends, &copy->recvs};
    tb__match_view *views = tb__malloc(copy->views.count, sizeof *views);
    size_t nviews = 0;
    if (!views)
        return TB_NO_MEMORY;
    for (size_t l = 0; l < 2; l++) {
        tb__match_op *ops = lists[l]->ops.item;
        size_t kept = 0, n = lists[l]->ops.count;
        if (n)
            qsort(ops, n, sizeof *ops, tb__match_compare);
        for (size_t i = 0; i < n; i++) {
            tb__match_op op = ops[i];
            memcpy(views + nviews, copy->views.item + op.first_view, op.nviews * sizeof *views);
            op.first_view = nviews;
            nviews += op.nviews;
            if (kept && tb__match_is_same_task(&ops[kept - 1], &op))
                ops[kept - 1].nviews += op.nviews;
            else
                ops[kept++] = op;
        }
        lists[l]->ops.count = kept;
    }
    if (nviews)
        memcpy(copy->views.item, views, nviews * sizeof *views);
    free(views);
    return TB_OK;
}

static tb_status check_own_ops(tb_copy *copy) {
    if (copy->refused.status != TB_OK)
        return tb__fail(copy->refused.status, "%s", copy->refused.why);
    if (copy->ir && (copy->sends.ops.count || copy->recvs.ops.count))
        return tb__fail(TB_REFUSED, "%s executes an IR, but has submitted operations", copy->peers[copy->self].label);
    TB_TRY(merge_ops(copy));
    TB_TRY(check_ids(copy));
    TB_TRY(tb__copy_check_invalidated(copy));
    tb__match_end sender = tb__copy_ops_with(copy, true, copy->index),
                  receiver = tb__copy_ops_with(copy, false, copy->index);
    TB_TRY(tb__match_ends(&sender, &receiver, copy->opts.convert_local));
    tb_status status = tb__copy_check_memory(copy);
    return status == TB_OK ? status : tb__fail_within(status, "%s", copy->peers[copy->self].label);
}

/* ---- Offers ---------------------------------------------------------------------------------------------------- */

static void pack_end(tb__pack *pack, const tb__match_end *end) {
    tb__pack_u32(pack, (uint32_t)end->nops);
    for (size_t i = 0; i < end->nops; i++) {
        tb__pack_u64(pack, end->ops[i].task_id);
        tb__pack_u32(pack, end->ops[i].has_no_id);
        tb__pack_u32(pack, end->ops[i].nviews);
        for (uint32_t j = 0; j < end->ops[i].nviews; j++) {
            const tb__match_view *v = &end->views[end->ops[i].first_view + j];
            tb__pack_u32(pack, v->item_bits);
            tb__pack_u64(pack, v->memory_kind);
            tb__pack_u32(pack, (uint32_t)v->shape.ndim);
            for (int d = 0; d < v->shape.ndim; d++)
                tb__pack_i64(pack, v->shape.dim[d]);
        }
    }
}

/* A rank whose own operations are invalid sends an empty offer, which is not compared; its vote has the error. */
static tb_status send_offers(tb_copy *copy, bool is_good) {
    for (size_t i = 0; i < copy->handshake.npeers; i++) {
        tb__pack pack = {0};
        if (i == copy->self)
            continue;
        tb__pack_u32(&pack, COPY_OFFER);
        tb__pack_u64(&pack, copy->run);
        tb__pack_u32(&pack, is_good);
        for (int is_send = 0; is_good && is_send < 2; is_send++) {
            tb__match_end end = tb__copy_ops_with(copy, is_send, copy->peers[i].seat);
            pack_end(&pack, &end);
        }
        if (is_good) {
            tb__pack_u32(&pack, copy->ir != NULL);
            tb__pack_u64(&pack, copy->ir ? copy->ir_hashes[copy->peers[i].seat] : 0);
        }
        TB_TRY(tb__loop_send(copy->handshake.peers[i], copy->handshake.ports[i], &pack));
    }
    return TB_OK;
}

typedef struct offer {
    TB_VEC(tb__match_op) ops;
    TB_VEC(tb__match_view) views;
} offer;

static bool unpack_view(tb__unpack *u, tb__match_view *v) {
    v->item_bits = tb__unpack_u32(u);
    v->memory_kind = tb__unpack_u64(u);
    v->dtype = tb__match_carrier(v->item_bits);
    uint32_t ndim = tb__unpack_u32(u);
    if (u->failed || v->dtype == TB_DTYPE_NONE || ndim < 1 || ndim > TB_MAX_DIMS)
        return false;
    v->shape.ndim = (int)ndim;
    for (uint32_t d = 0; d < ndim; d++)
        v->shape.dim[d] = tb__unpack_i64(u);
    return !u->failed && tb_shape_size(&v->shape, v->dtype, NULL, &v->nbytes) == TB_OK;
}

static bool unpack_op(tb__unpack *u, offer *o, const tb__match_op *last) {
    tb__match_op op = {.task_id = tb__unpack_u64(u), .first_view = o->views.count, .number = o->ops.count};
    op.has_no_id = tb__unpack_u32(u) != 0;
    op.nviews = (uint32_t)tb__unpack_count(u, 24);
    bool is_sorted = !last || (tb__match_compare(last, &op) < 0 && !tb__match_is_same_task(last, &op));
    if (u->failed || op.nviews == 0 || !is_sorted || !tb__vec_push(&o->ops, op) ||
        !tb__vec_reserve(&o->views, op.nviews))
        return false;
    for (uint32_t i = 0; i < op.nviews; i++) {
        tb__match_view v = {0};
        if (!unpack_view(u, &v))
            return false;
        o->views.item[o->views.count++] = v;
    }
    return true;
}

static bool unpack_end(tb__unpack *u, offer *o) {
    size_t n = tb__unpack_count(u, 16), first = o->ops.count;
    for (size_t i = 0; i < n && !u->failed; i++) {
        if (!unpack_op(u, o, o->ops.count > first ? &o->ops.item[o->ops.count - 1] : NULL))
            return false;
    }
    return !u->failed;
}

/* Compares the peer's receives with this rank's sends, and the peer's sends with this rank's receives. */
static tb_status compare_offer(tb_copy *copy, const tb__copy_peer *peer, tb__unpack *u, offer *o) {
    bool is_good = unpack_end(u, o);
    size_t nrecvs = o->ops.count;
    is_good = is_good && unpack_end(u, o);
    uint32_t has_ir = tb__unpack_u32(u);
    uint64_t hash = tb__unpack_u64(u);
    is_good = is_good && tb__unpack_is_done(u) && has_ir <= 1;
    if (!is_good)
        return tb__fail(TB_INVALID, "%s sent an invalid offer of %zu bytes for run %" PRIu64, peer->label,
                        peer->offer_nbytes, copy->run);
    tb__match_end sends = tb__copy_ops_with(copy, true, peer->seat), recvs = tb__copy_ops_with(copy, false, peer->seat);
    tb__match_end its_recvs = {.label = peer->label, .ops = o->ops.item, .nops = nrecvs, .views = o->views.item};
    tb__match_end its_sends = {.label = peer->label, .nops = o->ops.count - nrecvs, .views = o->views.item};
    its_sends.ops = its_sends.nops ? o->ops.item + nrecvs : NULL;
    /* Both ends check the lower seat's sends first, and so find the same failure. */
    bool is_lower = copy->index < peer->seat;
    const char *first = is_lower ? sends.label : peer->label, *second = is_lower ? peer->label : sends.label;
    if (has_ir != (copy->ir != NULL))
        return tb__fail(TB_CONFLICT, "one of %s and %s executes an IR, and the other one runs operations", first,
                        second);
    if (copy->ir && hash != copy->ir_hashes[peer->seat])
        return tb__fail(TB_CONFLICT, "the IRs of %s and %s have different chunks or buckets for each other", first,
                        second);
    TB_TRY(is_lower ? tb__match_ends(&sends, &its_recvs, false) : tb__match_ends(&its_sends, &recvs, false));
    return is_lower ? tb__match_ends(&its_sends, &recvs, false) : tb__match_ends(&sends, &its_recvs, false);
}

static tb_status check_offers(tb_copy *copy) {
    for (int32_t seat = 0; seat < copy->size; seat++) {
        tb__copy_peer *peer = &copy->peers[copy->position[seat]];
        if (seat == copy->index)
            continue;
        tb__unpack u = {peer->offer, peer->offer + peer->offer_nbytes, false};
        if (tb__unpack_u32(&u) == 0)
            continue;
        offer o = {0};
        tb_status status = compare_offer(copy, peer, &u, &o);
        free(o.ops.item);
        free(o.views.item);
        TB_TRY(status);
    }
    return TB_OK;
}

/* ---- Votes ----------------------------------------------------------------------------------------------------- */

static tb_status send_votes(tb_copy *copy) {
    const tb__copy_peer *self = &copy->peers[copy->self];
    for (size_t i = 0; i < copy->handshake.npeers; i++) {
        tb__pack pack = {0};
        if (i == copy->self)
            continue;
        tb__pack_u32(&pack, COPY_VOTE);
        tb__pack_u64(&pack, copy->run);
        tb__pack_status(&pack, self->vote);
        tb__pack_string(&pack, self->why);
        TB_TRY(tb__loop_send(copy->handshake.peers[i], copy->handshake.ports[i], &pack));
    }
    return TB_OK;
}

static tb_status count_votes(const tb_copy *copy) {
    for (int32_t seat = 0; seat < copy->size; seat++) {
        const tb__copy_peer *peer = &copy->peers[copy->position[seat]];
        if (peer->vote != TB_OK)
            return tb__fail(peer->vote, "%s", peer->why);
    }
    return TB_OK;
}

/* ---- A run ----------------------------------------------------------------------------------------------------- */

typedef struct waiting {
    tb_copy *copy;
    bool for_votes;
    const tb__copy_peer *missing; /* the first */
    size_t nthere;
    bool is_gone; /* for good */
} waiting;

static bool has_all_peers(void *arg) {
    waiting *w = arg;
    tb_copy *copy = w->copy;
    w->missing = NULL;
    w->nthere = 0;
    w->is_gone = false;
    for (size_t i = 0; i < copy->handshake.npeers; i++) {
        const tb__copy_peer *peer = &copy->peers[i];
        if (i == copy->self || (w->for_votes ? peer->voted : peer->offered) == copy->run) {
            w->nthere++;
        } else if (!w->missing || ((copy->handshake.ranks[i].is_gone || peer->lost_why) && !w->is_gone)) {
            w->missing = peer;
            w->is_gone = copy->handshake.ranks[i].is_gone || peer->lost_why;
        }
    }
    return !w->missing || w->is_gone || copy->broken != TB_OK || copy->is_given_up;
}

static tb_status await_peers(tb_copy *copy, bool for_votes) {
    waiting w = {.copy = copy, .for_votes = for_votes};
    tb__loop_wait(copy->world->loop, has_all_peers, &w, copy->deadline_ms);
    if (copy->broken != TB_OK)
        return tb__fail(copy->broken, "%s", copy->why);
    if (copy->is_given_up)
        return tb__fail(copy->abort_status, "%s", copy->abort_why);
    if (!w.missing)
        return TB_OK;
    if (w.missing->lost_why)
        return tb__copy_abort(copy, tb__fail(TB_LOST, "%s", w.missing->lost_why));
    if (w.is_gone)
        return tb__copy_abort(copy, tb__fail(TB_LOST, "%s has closed %s", w.missing->label, copy->what));
    return tb__copy_abort(copy, tb__fail(TB_TIMEOUT, "%s: %s has not %s run %" PRIu64 " (%zu of %zu ranks have)",
                                         copy->what, w.missing->label, for_votes ? "agreed to" : "come to", copy->run,
                                         w.nthere, copy->handshake.npeers));
}

/* Sets this rank's vote; the message of a failure is in tb_error_detail. */
static void set_vote(tb_copy *copy, tb_status status) {
    tb__copy_peer *self = &copy->peers[copy->self];
    self->vote = status;
    self->why[0] = '\0';
    if (status != TB_OK) {
        tb__prefix_detail("%s", copy->what);
        snprintf(self->why, sizeof self->why, "%s", tb_error_detail());
    }
}

/* Exchanges offers and votes with all ranks. */
static tb_status exchange_votes(tb_copy *copy) {
    const tb__copy_peer *self = &copy->peers[copy->self];
    set_vote(copy, check_own_ops(copy));
    tb_status status = send_offers(copy, self->vote == TB_OK);
    if (status != TB_OK)
        return tb__copy_abort(copy, status);
    TB_TRY(await_peers(copy, false));
    if (self->vote == TB_OK)
        set_vote(copy, check_offers(copy));
    status = send_votes(copy);
    return status == TB_OK ? await_peers(copy, true) : tb__copy_abort(copy, status);
}

/* Skips runs that others aborted before this rank took part. If they abort one while its offers are on their way, it
 * takes part in the next. */
static tb_status run_copy_service(tb_copy *copy) {
    tb_status status = TB_OK;
    do {
        if (copy->broken != TB_OK)
            return tb__fail(copy->broken, "%s", copy->why);
        TB_TRY(tb__copy_find_loss(copy));
        copy->run = (copy->aborted > copy->run ? copy->aborted : copy->run) + 1;
        copy->is_given_up = false;
        status = exchange_votes(copy);
    } while (status != TB_OK && copy->is_given_up && copy->is_late);
    TB_TRY(status);
    TB_TRY(count_votes(copy));
    return tb__copy_move(copy);
}

void tb_copy_cancel(tb_copy *copy) {
    if (tb__world_is_inherited(copy->world))
        return;
    tb__loop *loop = copy->world->loop;
    tb__loop_lock(loop);
    bool is_late = copy->is_given_up && copy->is_late && !copy->flow;
    if (copy->is_running && copy->broken == TB_OK && (!copy->is_given_up || is_late)) {
        copy->is_given_up = false; /* otherwise this rank, aborted for being late, would take part in the next run */
        (void)tb__copy_abort(copy, tb__fail(TB_CANCELLED, "%s: run %" PRIu64 " was cancelled by %s", copy->what,
                                            copy->run, copy->peers[copy->self].label));
    }
    tb__loop_unlock(loop);
}

tb_status tb_copy_run(tb_copy *copy, int timeout_ms) {
    TB_TRY(tb__world_check(copy->world, "copy service"));
    tb__loop *loop = copy->world->loop;
    if (timeout_ms < 0)
        return tb__fail(TB_INVALID, "timeout_ms can't be negative");
    tb__loop_lock(loop);
    if (copy->is_running) {
        tb__loop_unlock(loop);
        return tb__fail(TB_REFUSED, "%s: a run is under way", copy->what);
    }
    copy->is_running = true;
    copy->deadline_ms = tb__world_deadline(copy->world, timeout_ms);
    tb_status status = run_copy_service(copy);
    copy->is_running = false;
    copy->sends.ops.count = copy->recvs.ops.count = copy->views.count = 0;
    copy->refused.status = TB_OK;
    for (size_t i = 0; i < copy->handshake.npeers; i++)
        memset(copy->peers[i].nwithout_id, 0, sizeof copy->peers[i].nwithout_id);
    tb__copy_drop_backlog(copy);
    tb__loop_unlock(loop);
    return status;
}
