/* A rank leaves an exchange, because its batch is destroyed: what it says, and what the others make of it. */
#include "bus/exchange.h"

/* ---- Out ------------------------------------------------------------------------------------------------------- */

static void pack_failure(tb__pack *pack, const tb__failure *last) {
    tb__pack_u64(pack, last->attempt);
    tb__pack_u64(pack, last->number);
    tb__pack_status(pack, last->status);
    tb__pack_string(pack, last->why);
}

/* The failures are for those who have not heard of them: others leave, or are lost, because of them. */
void tb__exchange_leave(tb__exchange *exchange) {
    bool is_broken = exchange->state == EXCHANGE_BROKEN;
    const char *why = is_broken ? exchange->all.why : "";
    tb__failure last[2] = {{.why = ""}, {.why = ""}};
    tb__pack goodbye = {0};
    tb__pack_u32(&goodbye, exchange->has_agreed);
    for (int side = 0; side < 2; side++) {
        if (exchange->flows[side])
            last[side] = tb__flow_last_failure(exchange->flows[side]);
        why = *why ? why : last[side].why;
        tb__pack_u64(&goodbye, exchange->flows[side] ? tb__flow_started(exchange->flows[side]) : 0);
    }
    tb__pack_status(&goodbye, is_broken ? exchange->all.status : TB_OK);
    tb__pack_string(&goodbye, why);
    for (int side = 0; side < 2; side++)
        pack_failure(&goodbye, &last[side]);
    tb__assembly_leave(&exchange->all, &goodbye);
    tb__pack_fini(&goodbye);
}

/* ---- In -------------------------------------------------------------------------------------------------------- */

void tb__exchange_tell_gone(tb__exchange *exchange, size_t gone) {
    for (int i = 0; i < 2; i++) {
        const tb__goodbye *f = &exchange->goodbyes[gone][i];
        if (exchange->flows[i])
            tb__flow_on_peer_left(exchange->flows[i], gone, f->started, &f->last);
    }
}

/* What a rank had said does not count any more. Lists stay: they are what their hashes say. */
static void forget_manifest(tb__exchange *exchange, size_t at) {
    tb__assembly_forget(&exchange->all, at);
    for (int side = 0; side < 2; side++) {
        for (int32_t seat = 0; seat < exchange->pair->sides[side].size; seat++) {
            if (exchange->pair->sides[side].peers[seat] == exchange->all.peers[at])
                exchange->sides[side].has_come[seat] = false;
        }
    }
}

/* A direction in which nothing failed ends for the reason that the rank has for leaving. */
static void keep_failure(tb__goodbye *f, tb__failure last, const char *why) {
    free(f->why);
    f->why = tb__strdup(last.status != TB_OK ? last.why : why);
    f->last = last;
    f->last.why = f->why ? f->why : "";
}

static tb__failure unpack_failure(tb__unpack *message) {
    tb__failure last;
    last.attempt = tb__unpack_u64(message);
    last.number = tb__unpack_u64(message);
    last.status = tb__unpack_status(message);
    last.why = tb__unpack_string(message);
    if (message->failed || last.status == TB_OK)
        last = (tb__failure){.why = ""};
    return last;
}

/* What needs the rank no more goes on: if it had agreed, everybody has come, although their manifests may still be on
 * their way to us. If it left because something went wrong, that is the reason here, too: it may have heard of a dead
 * rank before us. */
void tb__exchange_on_goodbye(tb__assembly *all, size_t at, tb__unpack *message) {
    tb__exchange *exchange = (tb__exchange *)all;
    bool had_agreed = tb__unpack_u32(message) != 0;
    for (int i = 0; i < 2; i++)
        exchange->goodbyes[at][i].started = tb__unpack_u64(message);
    tb_status status = tb__unpack_status(message);
    const char *why = tb__unpack_string(message);
    for (int i = 0; i < 2; i++)
        keep_failure(&exchange->goodbyes[at][i], unpack_failure(message), why);
    if (exchange->state == EXCHANGE_WAITING && (!had_agreed || message->failed)) {
        forget_manifest(exchange, at); /* whatever went wrong was the batch it had before, or is heard of here, too */
        return;
    }
    if (exchange->state == EXCHANGE_AGREED && !message->failed && status == TB_LOST) {
        tb__set_detail("%s", why);
        tb__exchange_lose_rank(exchange);
    } else if (exchange->state == EXCHANGE_AGREED && !message->failed && status != TB_OK) {
        tb__exchange_break(exchange, tb__fail(status, "%s", why), false);
    }
    tb__exchange_tell_gone(exchange, at);
}

void tb__exchange_free_goodbyes(tb__exchange *exchange) {
    for (size_t i = 0; exchange->goodbyes && i < exchange->all.npeers; i++) {
        free(exchange->goodbyes[i][0].why);
        free(exchange->goodbyes[i][1].why);
    }
    free(exchange->goodbyes);
}
