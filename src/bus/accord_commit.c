/* Shadowed receives of an accord: whether a side asks for them, memory beside quantised tensors, and how it is decided
 * whether one counts. */
#include "bus/accord.h"

#include "base/int.h"
#include "layout/overlap.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- What a side asks for -------------------------------------------------------------------------------------- */

static const char *commit_name(tb_commit commit) {
    return commit == TB_SHADOW ? "shadow" : "in place";
}

tb_status tb__accord_settle_modes(tb__accord *accord) {
    for (int side = 0; side < 2; side++) {
        tb__accord_side *s = &accord->sides[side];
        const tb__pair_side *seats = &accord->pair->sides[side];
        for (int32_t seat = 0; seat < seats->size; seat++) {
            const tb__body *body = tb__accord_body(s, s->hashes[seat]);
            if (seat > 0 && body->commit != s->commit)
                return tb__fail(TB_CONFLICT, "%s and %s commit %s differently: %s and %s", seats->peers[0]->label,
                                seats->peers[seat]->label, accord->what, commit_name(s->commit),
                                commit_name(body->commit));
            s->commit = body->commit;
            accord->checksum |= body->checksum;
        }
    }
    return TB_OK;
}

/* ---- Quantised tensors ------------------------------------------------------------------------------------------ */

/* One for each tensor; those that are parts of one storage share its shadow. */
static tb_status give_memory(tb__accord_commit *c, tb__shadowed *s) {
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
    TB_TRY(tb_alloc(data + scales, (void **)&s->memory));
    memset(s->memory, 0, data + scales); /* what tiles have too much is zero */
    s->encoded.data = s->memory;
    s->encoded.scales = live->scales ? s->memory + data : NULL;
    return tb__index_add(&c->by_data, hash, c->shadowed.count) ? TB_OK : TB_NO_MEMORY;
}

tb_status tb__accord_shadow(tb__accord *accord, int src, const tb__encoded *live, const tb__encoded **out) {
    tb__accord_commit *c = &accord->commits[src];
    tb__shadowed *s = tb__vec_reserve(&c->shadowed, 1) ? tb__calloc(1, sizeof *s) : NULL;
    if (!s)
        return TB_NO_MEMORY;
    s->live = live;
    s->encoded = *live;
    s->encoded.scale = live->scale ? &s->scale : NULL;
    tb_status status = give_memory(c, s);
    if (status != TB_OK) {
        tb_free(s->memory);
        free(s);
        return status;
    }
    s->encoded.part.base = s->encoded.data;
    c->shadowed.item[c->shadowed.count++] = s;
    *out = &s->encoded;
    return TB_OK;
}

static void apply(void *arg) {
    const tb__accord_commit *c = arg;
    for (size_t i = 0; i < c->shadowed.count; i++)
        tb__encoded_copy(&c->shadowed.item[i]->encoded, c->shadowed.item[i]->live);
    for (size_t i = 0; i < c->accord->padded[c->src].count; i++)
        (void)tb__tensor_clear_padding(c->accord->padded[c->src].item[i]); /* which can be done, or was refused */
}

/* ---- Verdicts --------------------------------------------------------------------------------------------------- */

/* The lead's port is no other batch's, so this question is never asked about another. */
static void name_question(const tb__accord_commit *c, uint64_t attempt, char *out, size_t room) {
    const tb__accord *accord = c->accord;
    const tb__peer *lead = accord->pair->sides[!c->src].peers[0];
    snprintf(out, room, "%" PRId32 "/%" PRIu64 "/%" PRIu32 "/%d/%" PRIu64, lead->rank, lead->incarnation,
             accord->all.ports[tb__assembly_find(&accord->all, lead)], c->src, attempt);
}

static uint64_t store_number(void *arg) {
    const tb__accord_commit *c = arg;
    return tb__directory_store_number(c->accord->world->directory);
}

static tb_status propose(void *arg, uint64_t store, uint64_t attempt, tb__verdict verdict, tb_status status,
                         const char *why) {
    const tb__accord_commit *c = arg;
    char question[128];
    name_question(c, attempt, question, sizeof question);
    return tb__decider_propose(c->accord->world->decider, c->accord->flows[c->src], store, question, attempt, verdict,
                               status, why);
}

static void forget(void *arg, uint64_t attempt) {
    const tb__accord_commit *c = arg;
    char question[128];
    name_question(c, attempt, question, sizeof question);
    tb__decider_forget(c->accord->world->decider, question);
}

tb_status tb__accord_commit_init(tb__accord *accord, int src, tb__shadow *out) {
    tb__accord_commit *c = &accord->commits[src];
    const tb__pair_side *engine = &accord->pair->sides[!src];
    tb_world *world = accord->world;
    if (accord->sides[!src].commit != TB_SHADOW)
        return TB_OK;
    if (!world->decider)
        TB_TRY(tb__decider_create(world->engine, world->directory, &world->decider));
    c->is_engine = tb__calloc(accord->all.npeers, sizeof *c->is_engine);
    if (!c->is_engine)
        return TB_NO_MEMORY;
    for (int32_t i = 0; i < engine->size; i++)
        c->is_engine[tb__assembly_find(&accord->all, engine->peers[i])] = true;
    *out = (tb__shadow){.is_used = true,
                        .is_engine = c->is_engine,
                        .lead = tb__assembly_find(&accord->all, engine->peers[0]),
                        .arg = c,
                        .store_number = store_number,
                        .propose = propose,
                        .forget = forget,
                        .apply = apply};
    return TB_OK;
}

void tb__accord_commit_fini(tb__accord *accord, int src) {
    tb__accord_commit *c = &accord->commits[src];
    if (accord->world->decider && accord->flows[src])
        tb__decider_drop(accord->world->decider, accord->flows[src]);
    for (size_t i = 0; i < c->shadowed.count; i++) {
        tb_free(c->shadowed.item[i]->memory);
        free(c->shadowed.item[i]);
    }
    free(c->shadowed.item);
    tb__index_fini(&c->by_data);
    free(c->is_engine);
}

/* ---- Doubts ----------------------------------------------------------------------------------------------------- */

static bool has_answer(void *arg) {
    return !tb__flow_awaits_answer(arg);
}

tb_status tb__accord_resolve(tb__accord *accord, int64_t deadline_ms, const tb_transfer_opts *opts) {
    for (int src = 0; src < 2; src++) {
        tb__flow *flow = accord->flows[src];
        if (!flow || !tb__flow_is_in_doubt(flow))
            continue;
        TB_TRY(tb__flow_ask_again(flow));
        tb__engine_wait(accord->world->engine, has_answer, flow, deadline_ms);
        TB_TRY(tb__flow_settle(flow, opts->committing, opts->arg));
    }
    return TB_OK;
}

bool tb__accord_is_in_doubt(const tb__accord *accord) {
    return (accord->flows[0] && tb__flow_is_in_doubt(accord->flows[0])) ||
           (accord->flows[1] && tb__flow_is_in_doubt(accord->flows[1]));
}

tb_status tb__accord_check_clash(const tb__accord *to, const tb__flow *receives, const tb__accord *from,
                                 const tb__flow *sends) {
    const tb__accord_side *target = &to->sides[receives == to->flows[0]],
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
