/* whole_group: a transfer ends when all ranks of the group have ended theirs. Each rank sends the group's lead the
 * result of its own part: ENDED. When all have succeeded, or one has failed, the lead sends the group's result to all:
 * ALL_ENDED. Sends and receives have the same numbers on all ranks, and numbers only grow. */
#include "bus/engine.h"
#include "bus/exchange.h"

#include <inttypes.h>
#include <stdio.h>

static bool has_ended(const tb__engine *engine, int32_t seat, bool is_send, uint64_t number) {
    return engine->whole.ranks && engine->whole.ranks[seat].number[is_send] >= number;
}

static void send_ended(tb__engine *engine, int32_t seat, uint32_t kind, bool is_send, const tb__all_ended *ended) {
    tb__pack pack = {0};
    tb__pack_u32(&pack, kind);
    tb__pack_u32(&pack, is_send);
    tb__pack_u64(&pack, ended->number);
    tb__pack_status(&pack, ended->status);
    tb__pack_string(&pack, ended->why);
    tb__engine_send(engine, seat, &pack);
}

/* At the lead, when it knows the group's result. */
static void announce(tb__engine *engine, bool is_send, uint64_t number, tb_status status, const char *why) {
    tb__all_ended *all = &engine->whole.all[is_send];
    if (number <= all->number)
        return;
    *all = (tb__all_ended){.number = number, .status = status};
    snprintf(all->why, sizeof all->why, "%s", why);
    for (int32_t seat = 1; seat < engine->size; seat++)
        send_ended(engine, seat, TB__ENGINE_ALL_ENDED, is_send, all);
    tb__loop_wake(engine->batch->world->loop);
}

/* At the lead. */
static void record_ended(tb__engine *engine, int32_t seat, bool is_send, uint64_t number, tb_status status,
                         const char *why) {
    tb__whole *w = &engine->whole;
    if (!w->ranks)
        w->ranks = tb__calloc((size_t)engine->size, sizeof *w->ranks);
    if (!w->ranks) {
        announce(engine, is_send, number, TB_NO_MEMORY, "no memory to record ended transfers");
        return;
    }
    if (status != TB_OK) {
        char text[TB__WHY_MAX];
        snprintf(text, sizeof text, "%s: %s", engine->peers[seat]->label, why);
        if (has_ended(engine, seat, is_send, number) && status == TB_TIMEOUT) /* it does not know which rank is
                                                                               * missing */
            tb__whole_describe_wait(engine, is_send, number, text, sizeof text);
        announce(engine, is_send, number, status, text);
        return;
    }
    w->ranks[seat].number[is_send] = number;
    for (int32_t i = 0; i < engine->size; i++) {
        if (!has_ended(engine, i, is_send, number))
            return;
    }
    announce(engine, is_send, number, TB_OK, "");
}

bool tb__whole_message(tb__engine *engine, int32_t seat, uint32_t kind, tb__unpack *message) {
    uint32_t is_send = tb__unpack_u32(message);
    uint64_t number = tb__unpack_u64(message);
    tb_status status = tb__unpack_status(message);
    const char *why = tb__unpack_string(message);
    bool is_for_lead = kind == TB__ENGINE_ENDED;
    if (!tb__unpack_is_done(message) || is_send > 1 || number == 0 || (is_for_lead ? engine->index : seat) != 0)
        return false;
    if (is_for_lead) {
        record_ended(engine, seat, is_send, number, status, why);
    } else if (number > engine->whole.all[is_send].number) {
        tb__all_ended *all = &engine->whole.all[is_send];
        *all = (tb__all_ended){.number = number, .status = status};
        snprintf(all->why, sizeof all->why, "%s", why);
        tb__loop_wake(engine->batch->world->loop);
    }
    return true;
}

void tb__whole_forget(tb__engine *engine, int32_t seat) {
    if (engine->whole.ranks)
        engine->whole.ranks[seat] = (tb__rank_ended){0};
}

void tb__whole_fini(tb__whole *whole) {
    free(whole->ranks);
}

void tb__whole_tell(tb__engine *engine, bool is_send, uint64_t number, tb_status status, const char *why) {
    if (number == 0 || !engine->peers)
        return;
    if (engine->index == 0) {
        record_ended(engine, 0, is_send, number, status, why);
        return;
    }
    tb__all_ended ended = {.number = number, .status = status};
    snprintf(ended.why, sizeof ended.why, "%s", why);
    send_ended(engine, 0, TB__ENGINE_ENDED, is_send, &ended);
}

/* The first rank that is waited for: the lead knows it; the others wait for the lead. */
static const tb__peer *find_awaited(const tb__engine *engine, bool is_send, uint64_t number) {
    int32_t seat = 0;
    if (engine->index == 0) {
        while (seat < engine->size && has_ended(engine, seat, is_send, number))
            seat++;
    }
    return engine->peers[seat < engine->size ? seat : 0];
}

static bool is_awaited(const tb__engine *engine, const tb__peer *peer, bool is_send, uint64_t number) {
    int32_t seat = 0;
    while (seat < engine->size && engine->peers[seat] != peer)
        seat++;
    return seat < engine->size && (engine->index == 0 ? !has_ended(engine, seat, is_send, number) : seat == 0);
}

/* A rank that is waited for, but can't end the transfer any more; NULL: there is none. */
static const tb__peer *find_gone(const tb__engine *engine, bool is_send, uint64_t number) {
    const tb__engine_part *part;
    for (size_t i = 0; (part = tb__engine_next_part(engine, &i));) {
        const tb__handshake *h = &part->exchange->handshake;
        for (size_t k = 0; k < h->npeers; k++) {
            if ((h->ranks[k].is_gone || h->peers[k]->is_lost) && is_awaited(engine, h->peers[k], is_send, number))
                return h->peers[k];
        }
    }
    return NULL;
}

void tb__whole_describe_wait(const tb__engine *engine, bool is_send, uint64_t number, char *out, size_t room) {
    const char *label = find_awaited(engine, is_send, number)->label, *what = is_send ? "sent" : "received";
    if (engine->index == 0)
        snprintf(out, room, "waiting for %s, which has not %s it with whole_group", label, what);
    else
        snprintf(out, room, "waiting for %s to say that all of group '%s' have %s it", label, engine->group, what);
}

bool tb__whole_is_over(tb__engine *engine, bool is_send, uint64_t number, bool is_cancelled, bool is_late,
                       tb_status *status) {
    const tb__all_ended *all = &engine->whole.all[is_send];
    const tb__peer *gone = find_gone(engine, is_send, number);
    char why[TB__WHY_MAX] = "";
    *status = TB_OK;
    if (all->number >= number) {
        *status = all->number == number ? all->status : TB_OK; /* otherwise all ranks have passed this transfer */
        snprintf(why, sizeof why, "%s", all->why);
    } else if (is_cancelled) {
        *status = TB_CANCELLED;
        snprintf(why, sizeof why, "it was cancelled");
    } else if (gone) {
        *status = TB_LOST;
        snprintf(why, sizeof why, "%s %s", gone->label, gone->is_lost ? "was lost" : "has left the batch");
    } else if (is_late) {
        *status = TB_TIMEOUT;
        tb__whole_describe_wait(engine, is_send, number, why, sizeof why);
    }
    if (*status == TB_OK)
        return all->number >= number;
    if (all->number < number && engine->index == 0)
        announce(engine, is_send, number, *status, why);
    else if (all->number < number)
        tb__whole_tell(engine, is_send, number, *status, why);
    (void)tb__fail(*status, "version %" PRIu64 " of batch '%s' was %s by this rank, but not by all of group '%s': %s",
                   number, engine->batch->name, is_send ? "sent" : "received", engine->group, why);
    return true;
}
