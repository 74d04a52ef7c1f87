/* Tensor lists on their way through the leads. Members with equal lists are asked once; most have the list of their
 * lead, which asks nobody then.
 *
 *   lead -> member       WANT, for the first member with a hash that the lead does not know
 *   lead -> other lead   the lists of its members, each once
 *   lead -> member       all lists but the member's own, after the manifests */
#include "bus/exchange.h"

static tb_status send_list(int side, const tb__tensor_list *list, tb__peer *to, uint32_t port) {
    tb__pack pack = {0};
    tb__pack_u32(&pack, TB__EXCHANGE_LIST);
    tb__pack_u32(&pack, (uint32_t)side);
    tb__pack_u64(&pack, list->hash);
    tb__pack_bytes(&pack, list->data, list->nbytes);
    return tb__loop_send(to, port, &pack);
}

static size_t position_of(const tb__exchange *exchange, int side, int32_t seat) {
    return tb__handshake_find(&exchange->handshake, exchange->pair->sides[side].peers[seat]);
}

static tb_status ask_for_list(tb__exchange *exchange, int side, size_t member, uint64_t hash) {
    tb__exchange_side *s = &exchange->sides[side];
    size_t probe = 0;
    if (tb__index_next(&s->wanted, hash, &probe) != TB__NOWHERE)
        return TB_OK;
    if (!tb__index_add(&s->wanted, hash, 0))
        return TB_NO_MEMORY;
    tb__pack pack = {0};
    tb__pack_u32(&pack, TB__EXCHANGE_WANT);
    tb__pack_u32(&pack, (uint32_t)side);
    tb__pack_u32(&pack, exchange->handshake.port.id);
    return tb__loop_send(exchange->handshake.peers[member], exchange->handshake.ports[member], &pack);
}

void tb__exchange_on_want(tb__exchange *exchange, size_t from, tb__unpack *message) {
    uint32_t side = tb__unpack_u32(message), port = tb__unpack_u32(message);
    if (!tb__unpack_is_done(message) || side > 1 || !exchange->sides[side].is_here)
        return;
    const tb__exchange_side *s = &exchange->sides[side];
    tb_status status = send_list((int)side, tb__exchange_list(s, s->hash), exchange->handshake.peers[from], port);
    if (status != TB_OK)
        tb__exchange_break(exchange, status, true);
}

/* Asks for the lists of this lead's members. `are_here`: none is missing. */
static tb_status collect_lists(tb__exchange *exchange, int side, bool *are_here) {
    const tb__exchange_side *s = &exchange->sides[side];
    for (int32_t seat = 0; seat < exchange->pair->sides[side].size; seat++) {
        size_t at = position_of(exchange, side, seat);
        if (exchange->handshake.ranks[at].lead != exchange->handshake.self || tb__exchange_list(s, s->seats[seat].hash))
            continue;
        *are_here = false;
        TB_TRY(ask_for_list(exchange, side, at, s->seats[seat].hash));
    }
    return TB_OK;
}

/* Sends the lists of a side's seats, each once, but not `known`; those of this lead's members only, unless is_all. */
static tb_status send_side_lists(const tb__exchange *exchange, int side, size_t to, bool is_all, uint64_t known) {
    const tb__exchange_side *s = &exchange->sides[side];
    const tb__handshake *h = &exchange->handshake;
    bool *is_sent = tb__calloc(s->lists.count, sizeof *is_sent);
    tb_status status = is_sent ? TB_OK : TB_NO_MEMORY;
    for (int32_t seat = 0; seat < exchange->pair->sides[side].size && status == TB_OK; seat++) {
        const tb__tensor_list *list = tb__exchange_list(s, s->seats[seat].hash);
        if (!list || list->hash == known || is_sent[list - s->lists.item] ||
            (!is_all && h->ranks[position_of(exchange, side, seat)].lead != h->self))
            continue;
        is_sent[list - s->lists.item] = true;
        status = send_list(side, list, h->peers[to], h->ports[to]);
    }
    free(is_sent);
    return status;
}

static tb_status send_to_members(tb__exchange *exchange) {
    const tb__handshake *h = &exchange->handshake;
    if (h->has_told)
        return TB_OK;
    tb__handshake_tell_members(&exchange->handshake);
    for (size_t to = 0; to < h->npeers; to++) {
        for (int side = 0; side < 2 && to != h->self && h->ranks[to].lead == h->self; side++) {
            int32_t seat = exchange->sides[side].seat_of[to];
            uint64_t known = seat >= 0 ? exchange->sides[side].seats[seat].hash : 0;
            TB_TRY(send_side_lists(exchange, side, to, true, known));
        }
    }
    return TB_OK;
}

tb_status tb__exchange_send_lists(tb__exchange *exchange) {
    const tb__handshake *h = &exchange->handshake;
    if (!tb__handshake_is_lead(h))
        return TB_OK;
    size_t other = h->leads[h->leads[0] == h->self];
    for (int side = 0; side < 2; side++) {
        bool are_here = true;
        TB_TRY(collect_lists(exchange, side, &are_here));
        if (!are_here || exchange->sides[side].are_lists_sent || other == h->self)
            continue;
        TB_TRY(send_side_lists(exchange, side, other, false, 0));
        exchange->sides[side].are_lists_sent = true;
    }
    return tb__exchange_find_missing(exchange) ? TB_OK : send_to_members(exchange);
}
