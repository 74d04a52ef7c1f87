/* Engines: nonces, vectors, and the parts of a receive. See engine.h. */
#include "bus/engine.h"

#include "base/log.h"
#include "bus/exchange.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

enum { MOST_CHOICES = 4096, MOST_EARLY = 4096, MOST_VECTORS = 4096 };

bool tb__nonces_equal(const tb__nonce *a, const tb__nonce *b) {
    return a->word[0] == b->word[0] && a->word[1] == b->word[1];
}

void tb__vector_pack(tb__pack *pack, const tb__vector *vector) {
    tb__pack_u64(pack, vector->nonce.word[0]);
    tb__pack_u64(pack, vector->nonce.word[1]);
    tb__pack_u64(pack, vector->version);
    tb__pack_u32(pack, (uint32_t)vector->choices.count);
    for (size_t i = 0; i < vector->choices.count; i++) {
        tb__pack_u64(pack, vector->choices.item[i].pair);
        tb__pack_u64(pack, vector->choices.item[i].attempt);
    }
}

bool tb__vector_unpack(tb__unpack *message, tb__vector *out) {
    *out = (tb__vector){0};
    out->nonce.word[0] = tb__unpack_u64(message);
    out->nonce.word[1] = tb__unpack_u64(message);
    out->version = tb__unpack_u64(message);
    size_t count = tb__unpack_count(message, 2 * sizeof(uint64_t));
    bool is_good = !message->failed && out->version > 0 && count > 0 && count <= MOST_CHOICES;
    for (size_t i = 0; i < count && is_good; i++) {
        uint64_t pair = tb__unpack_u64(message);
        is_good = tb__vec_push(&out->choices, (struct tb__choice){pair, tb__unpack_u64(message)});
    }
    if (!is_good || message->failed)
        tb__vector_fini(out);
    return is_good && !message->failed;
}

static const struct tb__choice *find_choice(const tb__vector *v, uint64_t pair) {
    for (size_t i = 0; i < v->choices.count; i++) {
        if (v->choices.item[i].pair == pair)
            return &v->choices.item[i];
    }
    return NULL;
}

void tb__vector_fini(tb__vector *vector) {
    free(vector->choices.item);
    *vector = (tb__vector){0};
}

static bool copy_vector(tb__vector *to, const tb__vector *from) {
    to->choices.count = 0;
    to->nonce = from->nonce;
    to->version = 0;
    for (size_t i = 0; i < from->choices.count; i++) {
        if (!tb__vec_push(&to->choices, from->choices.item[i]))
            return false;
    }
    to->version = from->version;
    return true;
}

tb__engine_part *tb__engine_next_part(const tb__engine *engine, size_t *i) {
    const tb_batch *batch = engine->batch;
    while (*i < 2 * batch->exchanges.count) {
        tb__engine_part *part = &batch->exchanges.item[*i / 2]->receives[*i % 2];
        ++*i;
        if (part->engine == engine)
            return part;
    }
    return NULL;
}

tb__flow *tb__engine_flow(const tb__engine_part *part) {
    return part->exchange->flows[part->src];
}

static uint64_t pair_id(const tb__engine_part *part) {
    return tb__hash_string(0, part->exchange->pair->name);
}

static size_t count_parts(const tb__engine *engine) {
    size_t n = 0;
    const tb__engine_part *part;
    for (size_t i = 0; (part = tb__engine_next_part(engine, &i));)
        n += part->is_in;
    return n;
}

static void on_engine_message(tb__port *port, tb__peer *from, tb__unpack *message);

static void on_engine_peer_lost(tb__port *port, tb__peer *peer) {
    tb__engine *engine = (tb__engine *)port;
    size_t kept = 0;
    for (size_t i = 0; i < engine->early.count; i++) {
        if (engine->early.item[i].from == peer)
            free(engine->early.item[i].data);
        else
            engine->early.item[kept++] = engine->early.item[i];
    }
    engine->early.count = kept;
    tb__loop_wake(engine->batch->world->loop);
}

static tb_status make_engine(tb__exchange *exchange, int dst, tb__engine **out) {
    const tb__pair_side *side = &exchange->pair->sides[dst];
    tb_batch *batch = exchange->batch;
    tb__engine *engine = tb__vec_reserve(&batch->engines, 1) ? tb__calloc(1, sizeof *engine) : NULL;
    if (!engine)
        return TB_NO_MEMORY;
    engine->batch = batch;
    engine->index = exchange->sides[dst].index;
    engine->size = side->size;
    engine->port.message = on_engine_message;
    engine->port.lost = on_engine_peer_lost;
    tb__loop_add_port(batch->world->loop, &engine->port);
    engine->group = tb__strdup(side->group);
    engine->ports = tb__calloc((size_t)side->size, sizeof *engine->ports);
    tb_status status = engine->group && engine->ports ? tb__commit_init(&engine->commit, engine) : TB_NO_MEMORY;
    if (status != TB_OK) {
        tb__engine_destroy(engine);
        return status;
    }
    batch->engines.item[batch->engines.count++] = engine;
    *out = engine;
    return TB_OK;
}

tb_status tb__engine_add_part(tb__exchange *exchange, int src) {
    tb_batch *batch = exchange->batch;
    tb__engine_part *part = &exchange->receives[src];
    *part = (tb__engine_part){.exchange = exchange, .src = src};
    if (!exchange->sides[!src].is_here)
        return TB_OK;
    tb__engine *engine = NULL;
    for (size_t i = 0; i < batch->engines.count && !engine; i++) {
        if (strcmp(batch->engines.item[i]->group, exchange->pair->sides[!src].group) == 0)
            engine = batch->engines.item[i];
    }
    if (!engine)
        TB_TRY(make_engine(exchange, !src, &engine));
    part->engine = engine;
    return TB_OK;
}

void tb__engine_remove_part(tb__engine_part *part) {
    if (part->engine && part->is_in)
        tb__commit_remove(&part->engine->commit);
    part->engine = NULL;
}

void tb__engine_destroy(tb__engine *engine) {
    tb__loop_remove_port(engine->batch->world->loop, &engine->port);
    tb__commit_fini(&engine->commit);
    tb__whole_fini(&engine->whole);
    tb__signal_fini(&engine->signal);
    for (size_t i = 0; i < engine->early.count; i++)
        free(engine->early.item[i].data);
    free(engine->early.item);
    for (size_t i = 0; i < engine->vectors.count; i++)
        tb__vector_fini(&engine->vectors.item[i]);
    free(engine->vectors.item);
    tb__vector_fini(&engine->current);
    free(engine->peers);
    free(engine->ports);
    free(engine->group);
    free(engine);
}

static void drop_vector(tb__engine *engine, size_t i) {
    tb__vector_fini(&engine->vectors.item[i]);
    memmove(engine->vectors.item + i, engine->vectors.item + i + 1,
            (--engine->vectors.count - i) * sizeof *engine->vectors.item);
}

tb_status tb__engine_draw_nonce(tb__engine *engine) {
    if (engine->index != 0)
        return TB_OK;
    if (getrandom(engine->drawn.word, sizeof engine->drawn.word, 0) != (ssize_t)sizeof engine->drawn.word)
        return tb__fail(TB_IO, "getrandom: %s", strerror(errno));
    engine->drawn_epoch = ++engine->batch->world->nnonces;
    return TB_OK;
}

void tb__engine_pack_manifest(const tb__engine *engine, tb__pack *pack) {
    tb__pack_u32(pack, engine->port.id);
    tb__pack_u64(pack, engine->drawn.word[0]);
    tb__pack_u64(pack, engine->drawn.word[1]);
    tb__pack_u64(pack, engine->drawn_epoch);
    tb__pack_u64(pack, engine->taken);
}

tb__engine_manifest tb__engine_unpack_manifest(tb__unpack *manifest) {
    tb__engine_manifest m;
    m.port = tb__unpack_u32(manifest);
    m.nonce.word[0] = tb__unpack_u64(manifest);
    m.nonce.word[1] = tb__unpack_u64(manifest);
    m.epoch = tb__unpack_u64(manifest);
    m.taken = tb__unpack_u64(manifest);
    return m;
}

/* Ranks may register several pairs at once that the lead has registered one after the other: its last nonce counts. A
 * lead that was lost, and has come back as another process, counts from 1 again. */
void tb__engine_on_agreed(tb__engine_part *part) {
    tb__engine *engine = part->engine;
    const tb__pair_side *side = &part->exchange->pair->sides[!part->src];
    const tb__exchange_seat *seats = part->exchange->sides[!part->src].seats;
    const tb__engine_manifest *lead = &seats[0].engine;
    if (engine->peers && !engine->peers[0]->is_lost && lead->epoch < engine->epoch)
        return;
    tb__peer **peers = tb__memdup(side->peers, (size_t)side->size, sizeof(tb__peer *));
    if (!peers) {
        tb__exchange_break(part->exchange, TB_NO_MEMORY, true);
        return;
    }
    for (int32_t i = 0; i < side->size && engine->peers; i++) {
        if (engine->peers[i] != peers[i])
            tb__whole_forget(engine, i);
    }
    free(engine->peers);
    engine->peers = peers;
    bool is_new = !tb__nonces_equal(&engine->nonce, &lead->nonce);
    for (size_t i = engine->vectors.count; i-- > 0 && is_new;) {
        if (tb__nonces_equal(&engine->vectors.item[i].nonce, &engine->nonce)) /* they can't be taken any more */
            drop_vector(engine, i);
    }
    engine->nonce = lead->nonce;
    engine->epoch = lead->epoch;
    for (int32_t i = 0; i < side->size; i++)
        engine->ports[i] = seats[i].engine.port;
    size_t n = engine->early.count;
    for (size_t i = 0; i < n; i++) { /* those that are still early come behind */
        struct tb__early_message early = engine->early.item[i];
        tb__unpack message = {early.data, early.data + early.nbytes, false};
        on_engine_message(&engine->port, early.from, &message);
        free(early.data);
    }
    if (n == 0)
        return;
    engine->early.count -= n;
    memmove(engine->early.item, engine->early.item + n, engine->early.count * sizeof *engine->early.item);
}

/* A message that is lost for lack of memory is compensated: a rank that gets no answer asks, or fails at its
 * deadline. */
void tb__engine_send(tb__engine *engine, int32_t seat, tb__pack *message) {
    if (!engine->peers) {
        tb__pack_fini(message);
        return;
    }
    if (tb__loop_send(engine->peers[seat], engine->ports[seat], message) != TB_OK)
        tb__log(TB_LOG_ERROR, "batch '%s': no memory for a message to %s", engine->batch->name,
                engine->peers[seat]->label);
}

static int32_t find_seat(const tb__engine *engine, const tb__peer *peer) {
    for (int32_t i = 0; engine->peers && i < engine->size; i++) {
        if (engine->peers[i] == peer)
            return i;
    }
    return -1;
}

static void keep_early(tb__engine *engine, tb__peer *from, const tb__unpack *message) {
    size_t nbytes = (size_t)(message->end - message->at);
    unsigned char *copy = engine->early.count < MOST_EARLY ? tb__memdup(message->at, nbytes, 1) : NULL;
    if (!copy || !tb__vec_push(&engine->early, (struct tb__early_message){from, copy, nbytes})) {
        free(copy);
        tb__log(TB_LOG_ERROR, "batch '%s': no memory for a message of %s", engine->batch->name, from->label);
    }
}

/* In place, the lead may be several versions ahead of this rank, which has to take each of them: its senders wait. */
static bool on_vector(tb__engine *engine, int32_t seat, tb__unpack *message) {
    tb__vector vector;
    if (seat != 0 || !tb__vector_unpack(message, &vector))
        return false;
    if (engine->vectors.count == MOST_VECTORS || !tb__vec_push(&engine->vectors, vector)) {
        tb__log(TB_LOG_ERROR, "batch '%s': no memory for a message of %s", engine->batch->name,
                engine->peers[0]->label);
        tb__vector_fini(&vector);
    }
    tb__loop_wake(engine->batch->world->loop);
    return tb__unpack_is_done(message);
}

static bool handle_message(tb__engine *engine, int32_t seat, uint32_t kind, tb__unpack *message) {
    switch (kind) {
    case TB__ENGINE_VECTOR:
        return on_vector(engine, seat, message);
    case TB__ENGINE_ENDED:
    case TB__ENGINE_ALL_ENDED:
        return tb__whole_message(engine, seat, kind, message);
    case TB__ENGINE_QUESTION:
    case TB__ENGINE_ANSWER:
        return tb__signal_message(engine, seat, kind, message);
    default:
        return tb__commit_message(&engine->commit, seat, kind, message);
    }
}

static void on_engine_message(tb__port *port, tb__peer *from, tb__unpack *message) {
    tb__engine *engine = (tb__engine *)port;
    int32_t seat = find_seat(engine, from);
    if (seat < 0) {
        keep_early(engine, from, message);
        return;
    }
    uint32_t kind = tb__unpack_u32(message);
    if (handle_message(engine, seat, kind, message))
        return;
    size_t i = 0;
    const tb__engine_part *part = tb__engine_next_part(engine, &i);
    if (part)
        tb__exchange_break(part->exchange,
                           tb__fail(TB_INVALID,
                                    "%s sent an invalid message about batch '%s': kind %u, truncated or "
                                    "malformed",
                                    from->label, engine->batch->name, (unsigned)kind),
                           true);
}

static void fail_parts(tb__engine *engine, tb_status status, const char *why) {
    tb__engine_part *part;
    for (size_t i = 0; (part = tb__engine_next_part(engine, &i));) {
        tb__flow *flow = part->is_in ? tb__engine_flow(part) : NULL;
        if (!flow || part->is_aborted || tb__flow_leg(flow, false)->status != TB_OK ||
            !tb__flow_leg(flow, false)->is_under_way)
            continue;
        uint64_t attempt, number;
        bool is_offered = tb__flow_leg(flow, false)->attempt || tb__flow_get_offer(flow, &attempt, &number);
        part->is_aborted = true;
        if (part->is_prepared)
            tb__flow_discard(flow, true, status, why);
        else if (is_offered)
            tb__flow_abort(flow, false, status, why);
        else
            tb__flow_fail_waiting(flow, status, why);
        part->is_prepared = false;
    }
}

static void note_taken(tb__engine *engine) {
    engine->taken = engine->current.version > engine->taken ? engine->current.version : engine->taken;
    engine->last_nonce = engine->current.nonce;
    engine->last_version = engine->current.version;
}

/* With one pair: the attempt that its leg has taken. */
static bool follow_leg(tb__engine *engine) {
    size_t i = 0;
    const tb__engine_part *part;
    while ((part = tb__engine_next_part(engine, &i)) && !part->is_in)
        ;
    const tb__leg *leg = part ? tb__flow_leg(tb__engine_flow(part), false) : NULL;
    if (!leg || !leg->attempt)
        return false;
    engine->current.nonce = engine->nonce;
    engine->current.choices.count = 0;
    if (!tb__vec_push(&engine->current.choices, (struct tb__choice){pair_id(part), leg->attempt}))
        return false;
    engine->current.version = leg->number;
    note_taken(engine);
    return true;
}

void tb__engine_ensure_current(tb__engine *engine) {
    if (engine->current.version == 0 && engine->is_receiving && count_parts(engine) == 1)
        (void)follow_leg(engine);
}

static bool take_vector(tb__engine *engine, const tb__vector *vector) {
    tb__engine_part *part;
    char why[TB__WHY_MAX];
    if (!copy_vector(&engine->current, vector)) {
        fail_parts(engine, TB_NO_MEMORY, "no memory for the versions of the pairs");
        return true;
    }
    for (size_t i = 0; (part = tb__engine_next_part(engine, &i));) {
        const struct tb__choice *choice = part->is_in ? find_choice(vector, pair_id(part)) : NULL;
        if (choice) {
            tb__flow_choose(tb__engine_flow(part), choice->attempt);
        } else if (part->is_in) {
            snprintf(why, sizeof why, "%s receives version %" PRIu64 " of batch '%s' without pair '%s'",
                     engine->peers[0]->label, vector->version, engine->batch->name, part->exchange->pair->name);
            fail_parts(engine, TB_CONFLICT, why);
            return true;
        }
    }
    note_taken(engine);
    return true;
}

/* In place, a late rank still takes those pairs that have not failed: their senders wait for it. */
static bool is_void(const tb__engine *engine, const tb__vector *vector) {
    bool has_failed = false, has_good = false;
    const tb__engine_part *part;
    for (size_t i = 0; (part = tb__engine_next_part(engine, &i));) {
        const struct tb__choice *choice = part->is_in ? find_choice(vector, pair_id(part)) : NULL;
        if (!choice)
            continue;
        bool is_aborted = tb__flow_is_aborted(tb__engine_flow(part), choice->attempt);
        has_failed |= is_aborted;
        has_good |= !is_aborted;
    }
    return engine->commit.is_used ? has_failed : !has_good && has_failed;
}

/* Takes the first vector of the present registration that can be taken. Those of the next one stay. */
static bool follow_vector(tb__engine *engine) {
    for (size_t i = 0; i < engine->vectors.count;) {
        const tb__vector *v = &engine->vectors.item[i];
        if (!tb__nonces_equal(&v->nonce, &engine->nonce)) {
            i++;
            continue;
        }
        bool is_old = tb__nonces_equal(&v->nonce, &engine->last_nonce) && v->version <= engine->last_version;
        bool is_taken = !is_old && !is_void(engine, v) && take_vector(engine, v);
        drop_vector(engine, i);
        if (is_taken)
            return true;
    }
    return false;
}

static bool supersede_lower(tb__engine *engine, uint64_t highest) {
    const tb__engine_part *part;
    uint64_t attempt, number;
    char why[TB__WHY_MAX];
    bool did = false;
    for (size_t i = 0; (part = tb__engine_next_part(engine, &i));) {
        tb__flow *flow = part->is_in ? tb__engine_flow(part) : NULL;
        if (!flow || !tb__flow_get_offer(flow, &attempt, &number) || number >= highest)
            continue;
        snprintf(why, sizeof why,
                 "version %" PRIu64 " of batch '%s' was superseded: group '%s' is offered version %" PRIu64
                 " through another pair",
                 number, engine->batch->name, engine->group, highest);
        tb__flow_supersede(flow, attempt, why);
        did = true;
    }
    return did;
}

static void send_vector(tb__engine *engine, const tb__vector *vector) {
    for (int32_t seat = 1; seat < engine->size; seat++) {
        tb__pack pack = {0};
        tb__pack_u32(&pack, TB__ENGINE_VECTOR);
        tb__vector_pack(&pack, vector);
        tb__engine_send(engine, seat, &pack);
    }
}

/* At the lead, with several pairs. */
static bool fix_vector(tb__engine *engine) {
    const tb__engine_part *part;
    uint64_t highest = 0, attempt, number;
    for (size_t i = 0; (part = tb__engine_next_part(engine, &i));) {
        tb__flow *flow = part->is_in ? tb__engine_flow(part) : NULL;
        if (!flow)
            continue;
        if (tb__flow_leg(flow, false)->status != TB_OK || !tb__flow_get_offer(flow, &attempt, &number))
            return false;
        highest = number > highest ? number : highest;
    }
    if (highest == 0)
        return false;
    if (supersede_lower(engine, highest))
        return true;
    tb__vector vector = {.nonce = engine->nonce, .version = highest};
    bool has_room = true;
    for (size_t i = 0; (part = tb__engine_next_part(engine, &i));) {
        if (part->is_in && tb__flow_get_offer(tb__engine_flow(part), &attempt, &number))
            has_room &= tb__vec_push(&vector.choices, (struct tb__choice){pair_id(part), attempt});
    }
    if (has_room) {
        send_vector(engine, &vector);
        (void)take_vector(engine, &vector);
    } else {
        fail_parts(engine, TB_NO_MEMORY, "no memory for the versions of the pairs");
    }
    tb__vector_fini(&vector);
    return true;
}

void tb__engine_record_abort(tb__engine *engine, const tb__vector *vector, tb_status status, const char *why) {
    const tb__engine_part *part;
    for (size_t i = 0; (part = tb__engine_next_part(engine, &i));) {
        const struct tb__choice *choice = find_choice(vector, pair_id(part));
        if (choice && tb__engine_flow(part))
            tb__flow_record_abort(tb__engine_flow(part), choice->attempt, vector->version, status, why);
    }
    tb__loop_wake(engine->batch->world->loop);
}

void tb__engine_begin(tb__engine *engine, const tb_transfer_opts *opts) {
    tb__engine_part *part;
    for (size_t i = 0; (part = tb__engine_next_part(engine, &i));) {
        part->is_in = tb__engine_flow(part) != NULL;
        part->is_aborted = part->is_prepared = part->is_applied = false;
    }
    engine->current.version = 0;
    engine->current.choices.count = 0;
    engine->is_receiving = true;
    bool chooses = count_parts(engine) > 1;
    for (size_t i = 0; chooses && (part = tb__engine_next_part(engine, &i));) {
        if (part->is_in)
            tb__flow_await_choice(tb__engine_flow(part));
    }
    tb__commit_begin(&engine->commit, opts);
}

/* Before the version is fixed, and with shadows before this rank is prepared, a pair that fails fails all. */
static bool fail_together(tb__engine *engine) {
    const tb__engine_part *part;
    const tb__leg *failed = NULL;
    const tb__reason *reason = &engine->commit.reason;
    bool has_prepared = false, has_all = true;
    if (engine->current.version != 0 && (!engine->commit.is_used || !tb__commit_is_open(&engine->commit)))
        return false;
    for (size_t i = 0; (part = tb__engine_next_part(engine, &i));) {
        const tb__leg *leg = part->is_in ? tb__flow_leg(tb__engine_flow(part), false) : NULL;
        if (!leg)
            continue;
        if (leg->status != TB_OK && !failed)
            failed = leg;
        has_prepared |= part->is_prepared;
        has_all &= part->is_prepared;
    }
    if (failed)
        fail_parts(engine, failed->status, failed->why);
    else if (has_prepared && !has_all && reason->status != TB_OK)
        fail_parts(engine, reason->status, reason->why);
    return failed != NULL;
}

bool tb__engine_step(tb__engine *engine) {
    bool did = false;
    if (!engine->is_receiving)
        return false;
    size_t nparts = count_parts(engine);
    if (engine->current.version == 0 && nparts == 1)
        (void)follow_leg(engine);
    else if (engine->current.version == 0)
        did |= engine->index == 0 ? fix_vector(engine) : follow_vector(engine);
    if (nparts > 1)
        (void)fail_together(engine);
    return (engine->commit.is_used && tb__commit_step(&engine->commit)) || did;
}

void tb__engine_end(tb__engine *engine) {
    engine->is_receiving = false;
}
