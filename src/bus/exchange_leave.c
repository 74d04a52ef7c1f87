/* Goodbyes: messages of ranks that leave an exchange, because their batch is destroyed, and their effect on peers. */
#include "bus/exchange.h"

static void pack_failure(tb__pack *pack, const tb__failure *last) {
    tb__pack_u64(pack, last->attempt);
    tb__pack_u64(pack, last->number);
    tb__pack_status(pack, last->status);
    tb__pack_string(pack, last->why);
}

/* The goodbye repeats the last failures for peers that do not know them: ranks leave because of these. */
void tb__exchange_leave(tb__exchange *exchange) {
    bool is_broken = exchange->state == EXCHANGE_BROKEN;
    const char *why = is_broken ? exchange->handshake.why : "";
    tb__failure last[2] = {{.why = ""}, {.why = ""}};
    tb__pack goodbye = {0};
    tb__pack_u32(&goodbye, exchange->has_agreed);
    for (int side = 0; side < 2; side++) {
        if (exchange->flows[side])
            last[side] = tb__flow_last_failure(exchange->flows[side]);
        why = *why ? why : last[side].why;
        tb__pack_u64(&goodbye, exchange->flows[side] ? tb__flow_started(exchange->flows[side]) : 0);
    }
    tb__pack_status(&goodbye, is_broken ? exchange->handshake.status : TB_OK);
    tb__pack_string(&goodbye, why);
    for (int side = 0; side < 2; side++)
        pack_failure(&goodbye, &last[side]);
    tb__handshake_leave(&exchange->handshake, &goodbye);
    tb__pack_fini(&goodbye);
}

void tb__exchange_report_gone(tb__exchange *exchange, size_t gone) {
    for (int i = 0; i < 2; i++) {
        const tb__goodbye *f = &exchange->goodbyes[gone][i];
        if (exchange->flows[i])
            tb__flow_on_peer_left(exchange->flows[i], gone, f->started, &f->last);
    }
}

/* Drops the rank's manifest. Its lists stay: they are found by hash. */
static void forget_manifest(tb__exchange *exchange, size_t at) {
    tb__handshake_forget(&exchange->handshake, at);
    for (int side = 0; side < 2; side++) {
        tb__exchange_side *s = &exchange->sides[side];
        if (s->seat_of[at] >= 0)
            s->seats[s->seat_of[at]].has_come = false;
        tb__index_clear(&s->wanted); /* it may have been asked for one */
        s->are_lists_sent = false;
    }
}

/* In a direction without a failure, the rank's reason for leaving counts. */
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

/* Transfers that do not need the rank any more go on: if it had agreed, all ranks have registered, though their
 * manifests may still be on the way to us. A failure that made it leave is a failure here, too: it may have noticed a
 * lost rank before us. */
void tb__exchange_on_goodbye(tb__handshake *handshake, size_t at, tb__unpack *message) {
    tb__exchange *exchange = (tb__exchange *)handshake;
    bool had_agreed = tb__unpack_u32(message) != 0;
    for (int i = 0; i < 2; i++)
        exchange->goodbyes[at][i].started = tb__unpack_u64(message);
    tb_status status = tb__unpack_status(message);
    const char *why = tb__unpack_string(message);
    for (int i = 0; i < 2; i++)
        keep_failure(&exchange->goodbyes[at][i], unpack_failure(message), why);
    if (exchange->state == EXCHANGE_WAITING && (!had_agreed || message->failed)) {
        forget_manifest(exchange, at); /* its failure concerned an earlier batch, or is reported here as well */
        return;
    }
    if (exchange->state == EXCHANGE_AGREED && !message->failed && status == TB_LOST) {
        tb__set_detail("%s", why);
        tb__exchange_on_rank_lost(exchange);
    } else if (exchange->state == EXCHANGE_AGREED && !message->failed && status != TB_OK) {
        tb__exchange_break(exchange, tb__fail(status, "%s", why), false);
    }
    tb__exchange_report_gone(exchange, at);
}

void tb__exchange_free_goodbyes(tb__exchange *exchange) {
    for (size_t i = 0; exchange->goodbyes && i < exchange->handshake.npeers; i++) {
        free(exchange->goodbyes[i][0].why);
        free(exchange->goodbyes[i][1].why);
    }
    free(exchange->goodbyes);
}
