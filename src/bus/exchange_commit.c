/* Shadowed receives of an exchange: whether a side asks for them, memory beside quantised tensors, and how it is
 * decided whether one counts. */
#include "bus/exchange.h"

#include "base/int.h"
#include "layout/overlap.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- What a side asks for -------------------------------------------------------------------------------------- */

static const char *commit_name(tb_commit commit) {
    return commit == TB_SHADOW ? "shadow" : "in place";
}

tb_status tb__exchange_settle_modes(tb__exchange *exchange) {
    for (int side = 0; side < 2; side++) {
        tb__exchange_side *s = &exchange->sides[side];
        const tb__pair_side *seats = &exchange->pair->sides[side];
        for (int32_t seat = 0; seat < seats->size; seat++) {
            const tb__tensor_list *list = tb__exchange_list(s, s->hashes[seat]);
            if (seat > 0 && list->commit != s->commit)
                return tb__fail(TB_CONFLICT, "%s and %s commit %s differently: %s and %s", seats->peers[0]->label,
                                seats->peers[seat]->label, exchange->what, commit_name(s->commit),
                                commit_name(list->commit));
            s->commit = list->commit;
            exchange->checksum |= list->checksum;
        }
    }
    return TB_OK;
}

/* ---- Quantised tensors ------------------------------------------------------------------------------------------ */

/* One for each tensor; those that are parts of one storage share its shadow. */
static tb_status give_memory(tb__exchange_commit *c, tb__shadowed *s) {
    const tb__loop *loop = c->exchange->world->loop;
    const tb__encoded *live = s->live;
    uint64_t hash = tb__hash(0, (uint64_t)(uintptr_t)live->data);
    size_t probe = 0, i;
    while ((i = tb__index_next(&c->by_data, hash, &probe)) != TB__NOWHERE) {
        const tb__shadowed *other = c->shadowed.item[i];
        if (other->live->data == live->data && other->live->scales == live->scales &&
            other->live->matrices == live->matrices && other->live->size.data_nbytes == live->size.data_nbytes) {
            s->encoded.data = other->encoded.data;
            s->encoded.scales = other->encoded.scales;
            return TB_OK;
        }
    }
    size_t data = (size_t)tb__align(live->matrices * live->size.data_nbytes, 64);
    size_t scales = (size_t)tb__align(live->matrices * live->size.scale_nbytes, 64);
    s->device = tb__loop_find_device(loop, live->data, 1);
    if (s->device->ops == &tb__host_device_ops)
        s->device = tb__loop_find_device(loop, live->scales, 1);
    TB_TRY(s->device->ops->alloc(s->device, data + scales, (void **)&s->memory));
    s->encoded.data = s->memory;
    s->encoded.scales = live->scales ? s->memory + data : NULL;
    return tb__index_add(&c->by_data, hash, c->shadowed.count) ? TB_OK : TB_NO_MEMORY;
}

static void free_shadowed(tb__shadowed *s) {
    if (s->memory)
        s->device->ops->free(s->device, s->memory);
    free(s);
}

tb_status tb__exchange_shadow(tb__exchange *exchange, int src, const tb__encoded *live, const tb__encoded **out) {
    tb__exchange_commit *c = &exchange->commits[src];
    tb__shadowed *s = tb__vec_reserve(&c->shadowed, 1) ? tb__calloc(1, sizeof *s) : NULL;
    if (!s)
        return TB_NO_MEMORY;
    s->live = live;
    s->encoded = *live;
    s->encoded.scale = live->scale ? &s->scale : NULL;
    tb_status status = give_memory(c, s);
    if (status != TB_OK) {
        free_shadowed(s);
        return status;
    }
    s->encoded.part.base = s->encoded.data;
    c->shadowed.item[c->shadowed.count++] = s;
    *out = &s->encoded;
    return TB_OK;
}

/* Tensors may have their one scale in one place: then it is the same. */
static tb_status list_shadows(void *arg, tb__move_list *out) {
    const tb__exchange_commit *c = arg;
    tb__index by_scale = {0};
    tb_status status = TB_OK;
    for (size_t i = 0; i < c->shadowed.count && status == TB_OK; i++) {
        const tb__shadowed *s = c->shadowed.item[i];
        status = tb__encoded_list_copy(&s->encoded, s->live, out);
        if (status != TB_OK || !s->live->scale || !tb__encoding_is_global(&s->live->encoding))
            continue;
        uint64_t hash = tb__hash(0, (uint64_t)(uintptr_t)s->live->scale);
        size_t probe = 0, at;
        while ((at = tb__index_next(&by_scale, hash, &probe)) != TB__NOWHERE &&
               c->shadowed.item[at]->live->scale != s->live->scale)
            ;
        if (at == TB__NOWHERE && !tb__index_add(&by_scale, hash, i))
            status = TB_NO_MEMORY;
        else if (at == TB__NOWHERE)
            status = tb__encoded_list_scale(s->encoded.scale, s->live->scale, out);
    }
    tb__index_fini(&by_scale);
    return status;
}

/* ---- Decisions --------------------------------------------------------------------------------------------------- */

/* The lead's port is no other batch's, so this question is never asked about another. */
static void name_question(const tb__exchange_commit *c, uint64_t attempt, char *out, size_t room) {
    const tb__exchange *exchange = c->exchange;
    const tb__peer *lead = exchange->pair->sides[!c->src].peers[0];
    snprintf(out, room, "%" PRId32 "/%" PRIu64 "/%" PRIu32 "/%d/%" PRIu64, lead->rank, lead->incarnation,
             exchange->all.ports[tb__assembly_find(&exchange->all, lead)], c->src, attempt);
}

static uint64_t store_number(void *arg) {
    const tb__exchange_commit *c = arg;
    return tb__directory_store_number(c->exchange->world->directory);
}

static tb_status propose(void *arg, uint64_t store, uint64_t attempt, tb__decision decision, tb_status status,
                         const char *why) {
    const tb__exchange_commit *c = arg;
    char question[128];
    name_question(c, attempt, question, sizeof question);
    return tb__commit_log_propose(c->exchange->world->commit_log, c->exchange->flows[c->src], store, question, attempt,
                                  decision, status, why);
}

static void forget(void *arg, uint64_t attempt) {
    const tb__exchange_commit *c = arg;
    char question[128];
    name_question(c, attempt, question, sizeof question);
    tb__commit_log_forget(c->exchange->world->commit_log, question);
}

tb_status tb__exchange_commit_init(tb__exchange *exchange, int src, tb__shadow *out) {
    tb__exchange_commit *c = &exchange->commits[src];
    const tb__pair_side *receivers = &exchange->pair->sides[!src];
    tb_world *world = exchange->world;
    if (exchange->sides[!src].commit != TB_SHADOW)
        return TB_OK;
    if (!world->commit_log)
        TB_TRY(tb__commit_log_create(world->loop, world->directory, &world->commit_log));
    c->is_engine = tb__calloc(exchange->all.npeers, sizeof *c->is_engine);
    if (!c->is_engine)
        return TB_NO_MEMORY;
    for (int32_t i = 0; i < receivers->size; i++)
        c->is_engine[tb__assembly_find(&exchange->all, receivers->peers[i])] = true;
    *out = (tb__shadow){.is_used = true,
                        .is_engine = c->is_engine,
                        .lead = tb__assembly_find(&exchange->all, receivers->peers[0]),
                        .arg = c,
                        .store_number = store_number,
                        .propose = propose,
                        .forget = forget,
                        .list = list_shadows};
    return TB_OK;
}

void tb__exchange_commit_fini(tb__exchange *exchange, int src) {
    tb__exchange_commit *c = &exchange->commits[src];
    if (exchange->world->commit_log && exchange->flows[src])
        tb__commit_log_drop(exchange->world->commit_log, exchange->flows[src]);
    tb__flow_destroy(exchange->flows[src]); /* before the memory that it uses */
    for (size_t i = 0; i < c->shadowed.count; i++)
        free_shadowed(c->shadowed.item[i]);
    free(c->shadowed.item);
    tb__index_fini(&c->by_data);
    free(c->is_engine);
}

/* ---- Doubts ----------------------------------------------------------------------------------------------------- */

static bool has_answer(void *arg) {
    return !tb__flow_awaits_answer(arg);
}

tb_status tb__exchange_resolve(tb__exchange *exchange, int64_t deadline_ms, const tb_transfer_opts *opts) {
    for (int src = 0; src < 2; src++) {
        tb__flow *flow = exchange->flows[src];
        if (!flow || !tb__flow_outcome_is_unknown(flow))
            continue;
        TB_TRY(tb__flow_ask_again(flow));
        tb__loop_wait(exchange->world->loop, has_answer, flow, deadline_ms);
        TB_TRY(tb__flow_settle(flow, opts->committing, opts->arg));
    }
    return TB_OK;
}

bool tb__exchange_is_in_doubt(const tb__exchange *exchange) {
    return (exchange->flows[0] && tb__flow_outcome_is_unknown(exchange->flows[0])) ||
           (exchange->flows[1] && tb__flow_outcome_is_unknown(exchange->flows[1]));
}

tb_status tb__exchange_check_clash(const tb__exchange *to, const tb__flow *receives, const tb__exchange *from,
                                   const tb__flow *sends) {
    const tb__exchange_side *target = &to->sides[receives == to->flows[0]],
                            *source = &from->sides[sends == from->flows[1]];
    TB_VEC(tb_binding) reads = {0}, writes = {0};
    if (target->commit != TB_SHADOW)
        return TB_OK;
    bool *marks = tb__calloc(source->own.count, sizeof *marks);
    bool has_room = marks != NULL;
    for (size_t i = 0; i < source->own.count && has_room; i++)
        has_room = tb__vec_push(&reads, source->own.item[i]->binding);
    for (size_t i = 0; i < target->own.count && has_room; i++)
        has_room = tb__vec_push(&writes, target->own.item[i]->binding);
    tb_status status =
        has_room ? tb__bindings_mark_overlaps(reads.item, reads.count, writes.item, writes.count, marks) : TB_NO_MEMORY;
    for (size_t i = 0; i < source->own.count && status == TB_OK; i++) {
        if (marks[i])
            status = tb__fail(TB_REFUSED,
                              "%s: tensor '%.100s' is being sent, and would be overwritten by what is received from "
                              "elsewhere meanwhile",
                              from->what, source->own.item[i]->name);
    }
    free(reads.item);
    free(writes.item);
    free(marks);
    return status;
}
