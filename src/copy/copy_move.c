/* Moves the data of a run: a flow with a chunk for each tensor moves data between ranks; devices copy data within this
 * rank. */
#include "copy/copy.h"

#include "ir/ir.h"
#include "layout/overlap.h"
#include "loop/jobs.h"
#include "loop/region.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Time for a step that is copying to notice the deadline, and for a device to finish cancelled work. */
enum { GRACE_MS = 2000, STUCK_MS = 5000 };

/* ---- Views ----------------------------------------------------------------------------------------------------- */

static tb_binding view_binding(const tb__match_view *v) {
    tb_binding b = {.base = v->data, .dtype = v->dtype, .shape = v->shape};
    memcpy(b.strides, v->strides, sizeof b.strides);
    return b;
}

static bool is_same_memory(const tb__match_view *a, const tb__match_view *b) {
    int64_t left[TB_MAX_DIMS], right[TB_MAX_DIMS];
    tb__match_strides(a, left);
    tb__match_strides(b, right);
    return a->data == b->data && a->dtype == b->dtype &&
           memcmp(left, right, (size_t)a->common.ndim * sizeof *left) == 0;
}

/* Which operations: all, those of this rank with itself, or the others. */
typedef enum which { WHICH_ALL, WHICH_LOCAL, WHICH_REMOTE } which;

typedef struct part_list {
    TB_VEC(tb_binding) parts;
    TB_VEC(const tb__match_op *) ops;
} part_list;

static void part_list_fini(part_list *list) {
    free(list->parts.item);
    free((void *)list->ops.item);
}

static bool add_binding(part_list *list, const tb__match_view *v, const tb__match_op *op) {
    return tb__vec_push(&list->parts, view_binding(v)) && tb__vec_push(&list->ops, op);
}

/* The bindings of sends or receives. A copy of a view to itself reads and writes nothing: it is left out unless
 * with_in_place. */
static tb_status collect_bindings(tb_copy *copy, bool is_send, which w, bool with_in_place, part_list *out) {
    const tb__copy_list *list = is_send ? &copy->sends : &copy->recvs;
    tb__match_end others = tb__copy_ops_with(copy, !is_send, copy->index);
    size_t at = 0; /* index of the matching operation: local sends and receives have the same order */
    for (size_t i = 0; i < list->ops.count; i++) {
        const tb__match_op *op = &list->ops.item[i];
        bool is_local = op->seat == copy->index;
        const tb__match_op *other = is_local ? &others.ops[at++] : NULL;
        if (w != WHICH_ALL && is_local != (w == WHICH_LOCAL))
            continue;
        for (uint32_t j = 0; j < op->nviews; j++) {
            const tb__match_view *v = &copy->views.item[op->first_view + j];
            if (other && !with_in_place && is_same_memory(v, &copy->views.item[other->first_view + j]))
                continue;
            if (!add_binding(out, v, op))
                return TB_NO_MEMORY;
        }
    }
    return TB_OK;
}

/* TB_INVALID if targets overlap, or a target has overlapping elements. */
static tb_status check_targets_disjoint(tb_copy *copy) {
    part_list targets = {0};
    tb_status status = collect_bindings(copy, false, WHICH_ALL, true, &targets);
    size_t n = targets.parts.count, a = n, b = n;
    if (status == TB_OK)
        status = tb__bindings_find_overlap(targets.parts.item, n, &a, &b);
    if (status == TB_OK && a < n && a != b && targets.ops.item[a] == targets.ops.item[b])
        status = tb__fail(TB_INVALID, "two tensors of %s would be received into the same memory",
                          tb__match_name(targets.ops.item[a]).text);
    else if (status == TB_OK && a < n && a != b)
        status = tb__fail(TB_INVALID, "%s and %s would be received into the same memory",
                          tb__match_name(targets.ops.item[a]).text, tb__match_name(targets.ops.item[b]).text);
    else if (status == TB_OK && a < n)
        status = tb__fail(TB_INVALID, "a target of %s has several elements in the same memory",
                          tb__match_name(targets.ops.item[a]).text);
    part_list_fini(&targets);
    return status;
}

static tb_status check_no_overlap(tb_copy *copy, which sources, which targets) {
    part_list from = {0}, to = {0};
    tb_status status = collect_bindings(copy, true, sources, false, &from);
    if (status == TB_OK)
        status = collect_bindings(copy, false, targets, false, &to);
    size_t n = from.parts.count;
    bool *is_hit = n && to.parts.count ? tb__calloc(n, sizeof *is_hit) : NULL;
    if (status == TB_OK && n && to.parts.count)
        status = is_hit ? tb__bindings_mark_overlaps(from.parts.item, n, to.parts.item, to.parts.count, is_hit)
                        : TB_NO_MEMORY;
    for (size_t i = 0; is_hit && i < n && status == TB_OK; i++) {
        if (is_hit[i])
            status = tb__fail(TB_INVALID, "%s sends memory that is received into in the same run",
                              tb__match_name(from.ops.item[i]).text);
    }
    free(is_hit);
    part_list_fini(&from);
    part_list_fini(&to);
    return status;
}

/* The flow handles overlap of its own sources and targets; it does not know of local copies. */
tb_status tb__copy_check_memory(tb_copy *copy) {
    TB_TRY(check_targets_disjoint(copy));
    TB_TRY(check_no_overlap(copy, WHICH_ALL, WHICH_LOCAL));
    return check_no_overlap(copy, WHICH_LOCAL, WHICH_REMOTE);
}

/* ---- On this rank ---------------------------------------------------------------------------------------------- */

typedef struct local_moves {
    size_t count;
    tb__move *copies;
    const void **sources;
    int64_t (*strides)[TB_MAX_DIMS];
} local_moves;

static void local_fini(local_moves *l) {
    free(l->copies);
    free((void *)l->sources);
    free(l->strides);
}

static void add_local(local_moves *l, const tb__match_view *from, const tb__match_view *to) {
    size_t i = l->count++;
    l->sources[i] = from->data;
    tb__match_strides(from, l->strides[i]);
    l->copies[i] = (tb__move){.ndim = from->common.ndim,
                              .dst = to->data,
                              .nsrc = 1,
                              .src = &l->sources[i],
                              .src_stride = (const int64_t(*)[TB_MAX_DIMS]) & l->strides[i],
                              .src_dtype = from->dtype,
                              .wire_dtype = to->dtype,
                              .dst_dtype = to->dtype};
    memcpy(l->copies[i].len, from->common.dim, sizeof from->common.dim);
    tb__match_strides(to, l->copies[i].dst_stride);
}

static tb_status make_local(tb_copy *copy, local_moves *l) {
    tb__match_end sends = tb__copy_ops_with(copy, true, copy->index),
                  recvs = tb__copy_ops_with(copy, false, copy->index);
    size_t n = 0;
    for (size_t i = 0; i < sends.nops; i++)
        n += sends.ops[i].nviews;
    l->copies = tb__calloc(n, sizeof *l->copies);
    l->sources = tb__calloc(n, sizeof *l->sources);
    l->strides = tb__calloc(n, sizeof *l->strides);
    if (!l->copies || !l->sources || !l->strides)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < sends.nops; i++) {
        for (uint32_t j = 0; j < sends.ops[i].nviews; j++) {
            const tb__match_view *from = &copy->views.item[sends.ops[i].first_view + j];
            const tb__match_view *to = &copy->views.item[recvs.ops[i].first_view + j];
            if (from->nbytes > 0 && !is_same_memory(from, to))
                add_local(l, from, to);
        }
    }
    return TB_OK;
}

/* A submission of the local copies to devices. */
typedef struct local_run {
    tb__jobs_run run; /* first */
    tb__jobs jobs;
    bool is_done;
    bool is_given_up;           /* the device has not finished it ... */
    tb__quarantine *quarantine; /* ... and may still use this memory */
    tb__loop *loop;
} local_run;

static void on_local_done(tb__jobs_run *run) {
    local_run *l = (local_run *)run;
    l->is_done = true;
    tb__loop_signal(l->loop);
    if (l->is_given_up) {
        tb__quarantine_end(l->quarantine);
        tb__jobs_release(&l->jobs);
        free(l);
    }
}

/* Its memory stays in use until the device finishes it. */
static void give_up_local(tb_copy *copy, local_run *r) {
    char what[160];
    snprintf(what, sizeof what, "a local copy of %.80s that a device has not finished", copy->what);
    r->is_given_up = true;
    r->quarantine = tb__quarantine_create(copy->world->loop, what);
    for (size_t i = 0; i < copy->views.count + copy->params.count; i++) {
        const tb__match_view *v =
            i < copy->views.count ? &copy->views.item[i] : &copy->params.item[i - copy->views.count];
        tb_binding b = {.base = v->data, .dtype = v->dtype, .shape = v->shape};
        uintptr_t first, last;
        memcpy(b.strides, v->strides, sizeof b.strides);
        if (tb__binding_span(&b, &first, &last) == TB_OK)
            tb__quarantine_add(r->quarantine, first, last);
    }
    copy->copies_local = false;
}

static bool is_local_done(void *arg) {
    return ((const local_run *)arg)->is_done;
}

static tb_status end_local(tb_copy *copy, local_run *r) {
    tb_status status = r->run.status;
    copy->copies_local = false;
    tb__jobs_release(&r->jobs);
    tb__loop_signal(copy->world->loop); /* tb_world_invalidate may wait for the memory */
    if (status == TB_OK)
        status = tb__copy_check_invalidated(copy);
    else if (status == TB_CANCELLED)
        status =
            tb__fail(TB_TIMEOUT, "%s: run %" PRIu64 ": its local copies have not ended in time", copy->what, copy->run);
    else
        status = tb__fail(status, "%s: run %" PRIu64 ": %s", copy->what, copy->run, r->run.why);
    free(r);
    return status;
}

/* Past the deadline it is cancelled. If a device does not finish it even then, the service becomes unusable, and the
 * memory stays in use. */
tb_status tb__copy_run_moves(tb_copy *copy, const tb__move *moves, size_t nmoves, void *dst_buffer, bool *is_stuck) {
    tb__loop *loop = copy->world->loop;
    local_run *r = tb__calloc(1, sizeof *r);
    if (!r)
        return TB_NO_MEMORY;
    *r = (local_run){.run.done = on_local_done, .loop = loop};
    tb_status status = tb__jobs_prepare(loop, moves, nmoves, &r->jobs);
    if (status != TB_OK) {
        free(r);
        return status;
    }
    copy->copies_local = true;
    tb__jobs_submit(loop, &r->jobs, &(tb__run){.dst_buffer = dst_buffer}, &r->run);
    if (tb__loop_wait(loop, is_local_done, r, copy->deadline_ms))
        return end_local(copy, r);
    tb__jobs_cancel(loop, &r->run);
    if (tb__loop_wait(loop, is_local_done, r, copy->deadline_ms + STUCK_MS))
        return end_local(copy, r);
    *is_stuck = true;
    give_up_local(copy, r);
    tb__copy_break(copy, tb__fail(TB_TIMEOUT, "%s: a device has not finished local copies: their memory stays in use",
                                  copy->what));
    return tb__fail(TB_TIMEOUT, "%s", copy->why);
}

/* ---- Between ranks --------------------------------------------------------------------------------------------- */

/* The key of a tensor, the same at both ends: source rank, target rank, and the tensor's number among those between the
 * two. */
enum { NUMBER_BITS = 24, RANK_BITS = 20 };
_Static_assert(TB_MAX_RANKS == 1 << RANK_BITS, "two ranks and a number have 64 bits");

typedef TB_VEC(tb__flow_tensor) tensor_list;

static tb_status add_peer_tensors(tb_copy *copy, tb__owned_ir *ir, int32_t seat, bool is_send, tensor_list *out) {
    tb__match_end end = tb__copy_ops_with(copy, is_send, seat);
    uint64_t here = (uint64_t)copy->world->rank, there = (uint64_t)copy->handshake.peers[copy->position[seat]]->rank;
    uint64_t key = ((is_send ? here : there) << RANK_BITS | (is_send ? there : here)) << NUMBER_BITS;
    for (size_t i = 0; i < end.nops; i++) {
        for (uint32_t j = 0; j < end.ops[i].nviews; j++, key++) {
            const tb__match_view *v = &copy->views.item[end.ops[i].first_view + j];
            char name[96];
            if (v->nbytes == 0)
                continue;
            snprintf(name, sizeof name, "%s, tensor %" PRIu32, tb__match_name(&end.ops[i]).text, j);
            tb_binding b = {.base = v->data, .dtype = v->dtype, .shape = v->common};
            tb_binding nothing = {.dtype = v->dtype, .shape = {.ndim = v->common.ndim}};
            tb__match_strides(v, b.strides);
            tb__flow_tensor t = {.key = key,
                                 .src = is_send ? b : nothing,
                                 .dst = is_send ? nothing : b,
                                 .src_invalidated = is_send ? &v->is_invalidated : NULL,
                                 .dst_invalidated = is_send ? NULL : &v->is_invalidated};
            t.spec = (tb_tensor_spec){.size = sizeof(tb_tensor_spec),
                                      .name = tb__arena_strdup(&ir->arena, name),
                                      .shape = v->common,
                                      .src_dtype = v->dtype,
                                      .dst_dtype = v->dtype,
                                      .wire_dtype = v->dtype,
                                      .memory_kind = v->common_kind};
            if (!t.spec.name || !tb__vec_push(out, t))
                return TB_NO_MEMORY;
        }
    }
    return TB_OK;
}

static int compare_tensor_keys(const void *a, const void *b) {
    const tb__flow_tensor *x = a, *y = b;
    return (x->key > y->key) - (x->key < y->key);
}

static tb_status add_tensor_chunk(const tb_copy *copy, tb__owned_ir *ir, uint32_t tensor, const tb__flow_tensor *t,
                                  const tb__ir_limits *limits) {
    int32_t source = (int32_t)(t->key >> (RANK_BITS + NUMBER_BITS));
    int32_t target = (int32_t)(t->key >> NUMBER_BITS & (TB_MAX_RANKS - 1));
    tb_chunk chunk = {.mode = TB_P2P,
                      .is_source = source == copy->world->rank,
                      .is_target = target == copy->world->rank,
                      .tensor = tensor,
                      .id = t->key,
                      .source = source,
                      .ntargets = 1,
                      .targets = tb__ir_ranks(ir, &target, 1),
                      .contributors = tb__ir_ranks(ir, NULL, 0),
                      .op = TB_SUM,
                      .divisor = 1,
                      .ndim = t->spec.shape.ndim,
                      .src_dtype = t->spec.src_dtype,
                      .wire_dtype = t->spec.wire_dtype,
                      .memory_kind = t->spec.memory_kind};
    if (!chunk.targets || !chunk.contributors)
        return TB_NO_MEMORY;
    memcpy(chunk.len, t->spec.shape.dim, sizeof chunk.len);
    TB_TRY(tb_shape_size(&t->spec.shape, chunk.wire_dtype, NULL, &chunk.nbytes));
    return tb__ir_add(ir, &chunk, limits);
}

/* Chunks of a channel are sorted by key: the same order at both ends. */
static tb_status make_copy_ir(tb_copy *copy, tb__owned_ir *ir, tensor_list *tensors) {
    tb__ir_limits limits = {.bucket_size = copy->bucket_size, .staged = copy->staging_bytes / 4};
    ir->view.rank = copy->world->rank;
    ir->view.bucket_size = copy->bucket_size;
    for (int32_t seat = 0; seat < copy->size; seat++) {
        if (seat == copy->index)
            continue;
        TB_TRY(add_peer_tensors(copy, ir, seat, true, tensors));
        TB_TRY(add_peer_tensors(copy, ir, seat, false, tensors));
    }
    if (tensors->count)
        qsort(tensors->item, tensors->count, sizeof *tensors->item, compare_tensor_keys);
    for (size_t i = 0; i < tensors->count; i++) {
        TB_TRY(add_tensor_chunk(copy, ir, (uint32_t)i, &tensors->item[i], &limits));
        if (!tb__vec_push(&ir->names, tensors->item[i].spec.name))
            return TB_NO_MEMORY;
    }
    TB_TRY(tb__ir_pack(ir, &limits, copy->opts.max_in_flight));
    tb__ir_finish(ir);
    return TB_OK;
}

static tb_status create_copy_flow(tb_copy *copy, tb_ir *ir, const tb__flow_tensor *tensors, size_t ntensors) {
    tb__flow_opts opts = {.loop = copy->world->loop,
                          .rank = copy->world->rank,
                          .direction = tb__copy_flow_number(copy->run),
                          .peers = copy->handshake.peers,
                          .ports = copy->handshake.ports,
                          .npeers = copy->handshake.npeers,
                          .comm = copy->handshake.comm,
                          .lead = copy->handshake.npeers,
                          .started = 1,
                          .tensors = tensors,
                          .ntensors = ntensors,
                          .ir = ir,
                          .what = copy->what,
                          .bucket_size = copy->bucket_size,
                          .staging_bytes = copy->staging_bytes,
                          .own_staging_bytes = copy->opts.staging_bytes,
                          .max_in_flight = copy->opts.max_in_flight,
                          .staged = copy->opts.staged,
                          .on_bucket = copy->on_bucket,
                          .on_bucket_arg = copy->on_bucket_arg};
    return tb__flow_create(&opts, &copy->flow);
}

/* Makes no flow if this rank has no operations with others. */
static tb_status make_copy_flow(tb_copy *copy) {
    if (copy->ir && copy->ir->nchannels > 0) {
        tb__ir_ref(copy->ir); /* the flow drops it */
        tb_status made = create_copy_flow(copy, copy->ir, copy->ir_tensors, copy->ir->ntensors);
        if (made != TB_OK)
            tb_ir_destroy(copy->ir);
        return made;
    }
    tensor_list tensors = {0};
    tb__owned_ir *ir = tb__calloc(1, sizeof *ir);
    tb_status status = ir ? make_copy_ir(copy, ir, &tensors) : TB_NO_MEMORY;
    if (status == TB_OK && tensors.count > 0)
        status = create_copy_flow(copy, &ir->view, tensors.item, tensors.count);
    if (!copy->flow)
        tb_ir_destroy(ir ? &ir->view : NULL);
    free(tensors.item);
    return status;
}

/* ---- Steps ----------------------------------------------------------------------------------------------------- */

/* Ends the run with a failure; its message is in tb_error_detail. */
static void fail_copy_run(tb_copy *copy, tb_status status) {
    copy->status = status;
    snprintf(copy->moved_why, sizeof copy->moved_why, "%s", tb_error_detail());
    for (int is_send = 0; is_send < 2; is_send++)
        tb__flow_abort(copy->flow, is_send, status, copy->moved_why);
    copy->has_moved = true;
}

static void describe_run_wait(const tb_copy *copy, char *out, size_t room) {
    bool is_send = tb__flow_leg(copy->flow, true)->is_under_way;
    tb__flow_describe_wait(copy->flow, is_send, out, room);
}

/* A leg that has all its data succeeds, even if peers report failures; at the deadline, even if it has not sent its
 * last messages. */
static void check_legs(tb_copy *copy) {
    bool is_under_way = false, is_complete = true;
    bool is_over = tb__now_ms() >= copy->deadline_ms;
    for (int is_send = 0; is_send < 2; is_send++) {
        const tb__leg *leg = tb__flow_leg(copy->flow, is_send);
        is_under_way |= leg->is_under_way;
        is_complete &= !leg->is_under_way || leg->is_complete;
        if (leg->status != TB_OK) {
            fail_copy_run(copy, tb__fail(leg->status, "%s", leg->why));
            return;
        }
    }
    if (!is_under_way || (is_complete && is_over)) {
        copy->has_moved = true;
    } else if (copy->is_given_up && !is_complete) {
        fail_copy_run(copy, tb__fail(copy->abort_status, "%s", copy->abort_why));
    } else if (is_over) {
        char waits[TB__WHY_MAX];
        describe_run_wait(copy, waits, sizeof waits);
        fail_copy_run(copy, tb__fail(TB_TIMEOUT, "%s: run %" PRIu64 " has not ended in time: %.300s", copy->what,
                                     copy->run, waits));
    }
}

/* The time of the next step if no event comes before. */
static int64_t next_step_ms(const tb_copy *copy) {
    int64_t when_ms = copy->has_moved ? INT64_MAX : copy->deadline_ms;
    for (int is_send = 0; is_send < 2; is_send++) {
        const tb__leg *leg = tb__flow_leg(copy->flow, is_send);
        if (leg->is_under_way && leg->wake_ms && leg->wake_ms < when_ms)
            when_ms = leg->wake_ms;
    }
    return when_ms;
}

static bool step_run(tb__task *task) {
    tb_copy *copy = (tb_copy *)((char *)task - offsetof(tb_copy, task));
    if (copy->has_moved)
        return false;
    if (copy->broken != TB_OK)
        tb__flow_break(copy->flow, copy->broken, copy->why);
    bool did = tb__flow_step(copy->flow, true);
    did |= tb__flow_step(copy->flow, false);
    check_legs(copy);
    task->deadline_ms = next_step_ms(copy);
    if (copy->has_moved)
        tb__loop_signal(copy->world->loop);
    return did || copy->has_moved;
}

static bool has_moved(void *arg) {
    return ((const tb_copy *)arg)->has_moved;
}

/* The peer has voted, so it knows that the run has started. */
void tb__copy_flow_gone(tb_copy *copy, size_t peer) {
    if (copy->peers[peer].lost_why)
        tb__flow_on_peer_failed(copy->flow, peer, copy->peers[peer].lost_why);
    else
        tb__flow_on_peer_left(copy->flow, peer, 1, &(tb__failure){.why = ""});
}

static void begin_flow(tb_copy *copy) {
    copy->phases = (tb__phases){.since = tb__seconds(), .now = TB_PHASE_WAIT};
    for (int is_send = 0; is_send < 2; is_send++)
        tb__flow_begin(copy->flow, is_send, 1, &copy->phases);
    for (size_t i = 0; i < copy->backlog.count && copy->broken == TB_OK; i++) {
        const struct tb__copy_backlog *b = &copy->backlog.item[i];
        tb__unpack message = {b->data, b->data + b->nbytes, false};
        tb__set_detail("truncated or malformed");
        if (!tb__flow_message(copy->flow, b->peer, &message))
            tb__copy_break(copy, tb__fail_within(TB_INVALID, "%s sent an invalid message about %s",
                                                 copy->peers[b->peer].label, copy->what));
    }
    tb__copy_drop_backlog(copy);
    for (size_t i = 0; i < copy->handshake.npeers; i++) {
        if (copy->handshake.ranks[i].is_gone || copy->peers[i].lost_why)
            tb__copy_flow_gone(copy, i);
    }
    copy->task.step = step_run;
    copy->task.deadline_ms = copy->deadline_ms;
    tb__loop_add_task(copy->world->loop, &copy->task);
    tb__loop_wake(copy->world->loop);
}

static void end_flow(tb_copy *copy) {
    tb__loop *loop = copy->world->loop;
    tb__loop_wait(loop, has_moved, copy, copy->deadline_ms + GRACE_MS);
    tb__loop_remove_task(loop, &copy->task);
    if (!copy->has_moved)
        fail_copy_run(copy, tb__fail(TB_TIMEOUT, "%s: run %" PRIu64 " has not ended in time", copy->what, copy->run));
    tb__flow_destroy(copy->flow);
    copy->flow = NULL;
}

tb_status tb__copy_move(tb_copy *copy) {
    local_moves l = {0};
    copy->status = TB_OK;
    copy->has_moved = false;
    tb_status status = make_local(copy, &l);
    if (status == TB_OK)
        status = make_copy_flow(copy);
    if (status != TB_OK) {
        local_fini(&l);
        return tb__copy_abort(copy, status);
    }
    if (copy->flow)
        begin_flow(copy);
    if (l.count) {
        status = tb__copy_run_moves(copy, l.copies, l.count, NULL, &(bool){false});
        if (status != TB_OK)
            tb__copy_abort(copy, status);
    }
    local_fini(&l);
    tb__saved_detail why = tb__save_detail();
    if (copy->flow)
        end_flow(copy);
    if (status != TB_OK)
        return tb__fail(status, "%s", why.text);
    return copy->status == TB_OK ? TB_OK : tb__fail(copy->status, "%s", copy->moved_why);
}
