/* The ranks of a pair agree on a batch. A rank that has all manifests and tensor lists merges the lists and makes the
 * flows; messages go to these from then on. */
#include "bus/exchange.h"

#include "base/descriptors.h"
#include "base/int.h"
#include "bus/pair_notes.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static void mark_broken(tb__exchange *exchange, tb_status status, bool tell) {
    exchange->state = EXCHANGE_BROKEN;
    tb__handshake_break(&exchange->handshake, status, tell);
    tb__world_report(exchange->world);
    tb__loop_wake(exchange->world->loop);
    tb__loop_signal(exchange->world->loop);
}

void tb__exchange_break(tb__exchange *exchange, tb_status status, bool tell) {
    tb__saved_detail why = tb__save_detail();
    mark_broken(exchange, status, tell);
    for (int i = 0; i < 2; i++) {
        if (exchange->flows[i])
            tb__flow_break(exchange->flows[i], status, why.text);
    }
}

/* Whether this rank is in a transfer, or has to take part in one that others have begun. */
static bool is_moving(const tb__exchange *exchange) {
    for (int side = 0; side < 2; side++) {
        for (int src = 0; exchange->sides[side].is_here && src < 2; src++) {
            tb__flow *flow = exchange->flows[src];
            if (tb__flow_leg(flow, src == side)->is_under_way || tb__flow_may_begin(flow, src == side))
                return true;
        }
    }
    return false;
}

void tb__exchange_report_loss(tb__exchange *exchange) {
    if (!exchange->must_report_loss || is_moving(exchange))
        return;
    exchange->must_report_loss = false;
    tb__handshake_send_broken(&exchange->handshake);
}

void tb__exchange_on_rank_lost(tb__exchange *exchange) {
    exchange->must_report_loss |= exchange->handshake.status == TB_OK;
    mark_broken(exchange, TB_LOST, false);
    tb__exchange_report_loss(exchange);
}

static void on_peer_broken(tb__handshake *handshake, size_t at, tb_status status, const char *why) {
    tb__exchange *exchange = (tb__exchange *)handshake;
    if (status != TB_LOST || !exchange->has_agreed) {
        tb__exchange_break(exchange, tb__fail(status, "%s", why), tb__handshake_is_lead(handshake));
        return;
    }
    for (int i = 0; i < 2; i++) {
        if (exchange->flows[i])
            tb__flow_on_peer_failed(exchange->flows[i], at, why);
    }
    tb__set_detail("%s", why);
    tb__exchange_on_rank_lost(exchange);
}

static int compare_tensor_names(const void *a, const void *b) {
    const tb__added_tensor *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

/* A newline separates names, which have no control characters. */
static void format_key(const tb_batch *batch, const tb_pair *pair, char *out, size_t room) {
    snprintf(out, room, "batch\n%s\n%s", batch->name, pair->name);
}

static tb_status init_handshake(tb__exchange *exchange) {
    const tb__pair_side *sides = exchange->pair->sides;
    char key[2 * TB__DIRECTORY_MAX_NAME + 16];
    size_t n = (size_t)sides[0].size + (size_t)sides[1].size;
    tb__peer **peers = tb__malloc(n, sizeof *peers);
    int *side_of = tb__malloc(n, sizeof *side_of);
    exchange->goodbyes = tb__calloc(n, sizeof *exchange->goodbyes);
    exchange->staging = tb__calloc(n, sizeof *exchange->staging);
    format_key(exchange->batch, exchange->pair, key, sizeof key);
    bool has_room = peers && side_of && exchange->goodbyes && exchange->staging;
    for (size_t i = 0; has_room && i < n; i++) {
        side_of[i] = i >= (size_t)sides[0].size;
        peers[i] = sides[side_of[i]].peers[side_of[i] ? i - (size_t)sides[0].size : i];
    }
    tb_status status = tb__handshake_init(&exchange->handshake, exchange->world, key, exchange->what, peers, side_of,
                                          has_room ? n : 0);
    free(peers);
    free(side_of);
    return has_room ? status : TB_NO_MEMORY;
}

/* By peer: its seat on each side, or -1. */
static tb_status number_seats(tb__exchange *exchange, int side) {
    tb__exchange_side *s = &exchange->sides[side];
    s->compared = -1;
    s->seat_of = tb__malloc(exchange->handshake.npeers, sizeof *s->seat_of);
    if (!s->seat_of)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < exchange->handshake.npeers; i++)
        s->seat_of[i] = -1;
    for (int32_t seat = 0; seat < exchange->pair->sides[side].size; seat++)
        s->seat_of[tb__handshake_find(&exchange->handshake, exchange->pair->sides[side].peers[seat])] = seat;
    return TB_OK;
}

/* Machines are numbered in the order of their first ranks: the same on every rank. */
static tb_status number_hosts(tb__exchange *exchange) {
    const tb__handshake *h = &exchange->handshake;
    tb__index by_host = {0};
    int32_t count = 0;
    exchange->nhosts = (size_t)h->peers[h->npeers - 1]->rank + 1;
    exchange->hosts = tb__calloc(exchange->nhosts, sizeof *exchange->hosts);
    bool has_room = exchange->hosts != NULL;
    for (size_t i = 0; i < h->npeers && has_room; i++) {
        if (i > 0 && h->peers[i]->host == h->peers[i - 1]->host) { /* peers share the text (tb__loop_meet) */
            exchange->hosts[h->peers[i]->rank] = exchange->hosts[h->peers[i - 1]->rank];
            continue;
        }
        uint64_t hash = tb__hash_string(0, h->peers[i]->host);
        size_t probe = 0, j;
        while ((j = tb__index_next(&by_host, hash, &probe)) != TB__NOWHERE &&
               strcmp(h->peers[j]->host, h->peers[i]->host) != 0)
            ;
        if (j == TB__NOWHERE)
            has_room = tb__index_add(&by_host, hash, i);
        exchange->hosts[h->peers[i]->rank] = j == TB__NOWHERE ? count++ : exchange->hosts[h->peers[j]->rank];
    }
    tb__index_fini(&by_host);
    if (!has_room)
        return TB_NO_MEMORY;
    if (count == 1) {
        free(exchange->hosts);
        exchange->hosts = NULL;
        exchange->nhosts = 0;
    }
    return TB_OK;
}

static bool is_pair_side(const tb__exchange *exchange, const tb_pair *pair, int side) {
    return pair->side == side && strcmp(pair->name, exchange->pair->name) == 0;
}

const tb__tensor_list *tb__exchange_list(const tb__exchange_side *side, uint64_t hash) {
    size_t probe = 0, i = tb__index_next(&side->by_hash, hash, &probe);
    return i != TB__NOWHERE ? &side->lists.item[i] : NULL;
}

/* Takes ownership of the data. */
static tb_status add_tensor_list(tb__exchange_side *s, unsigned char *data, size_t nbytes) {
    tb__tensor_list list;
    TB_TRY(tb__tensor_list_init(&list, data, nbytes));
    if (!tb__vec_reserve(&s->lists, 1) || !tb__index_add(&s->by_hash, list.hash, s->lists.count)) {
        tb__tensor_list_fini(&list);
        return TB_NO_MEMORY;
    }
    s->lists.item[s->lists.count++] = list;
    return TB_OK;
}

/* Collects the tensors that this process has added for one side of the pair. */
static tb_status collect_own_tensors(tb__exchange *exchange, int side) {
    tb__exchange_side *s = &exchange->sides[side];
    const tb_batch *batch = exchange->batch;
    for (size_t i = 0; i < batch->pairs.count; i++) {
        if (is_pair_side(exchange, batch->pairs.item[i], side)) {
            s->is_here = true;
            s->index = batch->pairs.item[i]->index;
        }
    }
    if (!s->is_here)
        return TB_OK;
    for (size_t i = 0; i < batch->tensors.count; i++) {
        const tb__added_tensor *t = batch->tensors.item[i];
        if (is_pair_side(exchange, t->pair, side) && !tb__vec_push(&s->own, t))
            return TB_NO_MEMORY;
    }
    if (s->own.count)
        qsort(s->own.item, s->own.count, sizeof *s->own.item, compare_tensor_names);
    for (size_t i = 1; i < s->own.count; i++) {
        if (strcmp(s->own.item[i - 1]->name, s->own.item[i]->name) == 0)
            return tb__fail(TB_INVALID, "tensor '%.100s' is in batch '%s' twice", s->own.item[i]->name, batch->name);
    }
    tb__pack list = {0};
    tb__tensor_list_pack(&list, batch, s->own.item, s->own.count);
    if (list.failed) {
        tb__pack_fini(&list);
        return TB_NO_MEMORY;
    }
    s->hash = tb__tensor_list_hash(list.data, list.count);
    return add_tensor_list(s, list.data, list.count);
}

static void on_exchange_message(tb__port *port, tb__peer *from, tb__unpack *message);
static void add_device(tb__exchange_devices *devices, const char *name) {
    size_t used = strlen(devices->text), length = strlen(name);
    for (const char *at = devices->text; (at = strstr(at, name)); at += length) {
        if ((at == devices->text || at[-1] == ',') && (at[length] == '\0' || at[length] == ','))
            return;
    }
    if (used + length + 2 <= sizeof devices->text)
        snprintf(devices->text + used, sizeof devices->text - used, "%s%s", used ? "," : "", name);
}

/* The devices of this process's tensors; for an agent, those that the client has named. */
static tb__exchange_devices own_devices(const tb__exchange *exchange) {
    tb__exchange_devices devices = {""};
    for (int side = 0; side < 2; side++) {
        for (size_t i = 0; i < exchange->sides[side].own.count; i++) {
            const tb__added_tensor *t = exchange->sides[side].own.item[i];
            if (t->mirrored.device && t->memory_kind != 0) {
                char name[16];
                snprintf(name, sizeof name, "%.*s", (int)strcspn(t->mirrored.device, " ,"), t->mirrored.device);
                add_device(&devices, name);
                continue;
            }
            if (t->is_on_host)
                add_device(&devices, "host");
            if (t->device)
                add_device(&devices, tb__device_unit_name(t->device, t->unit));
        }
    }
    return devices;
}

/* The device of this rank's first tensor that is on one: its messages may be in memory of that. */
static void choose_device(tb__exchange *exchange) {
    for (int side = 0; side < 2; side++) {
        for (size_t i = 0; i < exchange->sides[side].own.count && !exchange->handshake.device; i++) {
            const tb__added_tensor *t = exchange->sides[side].own.item[i];
            exchange->handshake.device = t->device;
            exchange->handshake.unit = t->unit;
        }
    }
}

/* Prepares the first transfer, if the program has said that this rank sends. Buckets may lie in memory of the
 * communicator, which is there when it is ready. */
static void prepare_send(tb__exchange *exchange) {
    int src = exchange->pair->side;
    if (exchange->batch->opts.sends && exchange->state == EXCHANGE_AGREED && exchange->flows[src] &&
        !exchange->lost_ties[src] && !tb__handshake_awaits_comm(&exchange->handshake))
        tb__flow_prepare_send(exchange->flows[src]);
}

/* A communicator that has failed once is of no use any more. */
static void on_exchange_comm(tb__handshake *handshake) {
    tb__exchange *exchange = (tb__exchange *)handshake;
    if (handshake->comm->has_failed && exchange->state != EXCHANGE_BROKEN)
        tb__exchange_break(exchange, tb__fail_within(handshake->comm->status, "%s", exchange->what), true);
    else
        prepare_send(exchange);
    tb__loop_signal(exchange->world->loop);
}

static void pack_exchange_manifest(tb__handshake *handshake, tb__pack *pack);
static void on_exchange_manifest(tb__handshake *handshake, size_t at, tb__unpack *u);
static void on_manifest_confirmed(tb__handshake *handshake, size_t at);

static void on_exchange_peer_lost(tb__port *port, tb__peer *peer) {
    tb__exchange *exchange = (tb__exchange *)port;
    size_t at = tb__handshake_find(&exchange->handshake, peer);
    if (at == TB__NOWHERE || exchange->handshake.ranks[at].is_gone)
        return;
    for (int i = 0; i < 2; i++) {
        if (exchange->flows[i])
            tb__flow_on_peer_lost(exchange->flows[i], at);
    }
    tb__set_detail("%s was lost during %s: %s", peer->label, exchange->what, peer->why ? peer->why : "?");
    if (exchange->has_agreed)
        tb__exchange_on_rank_lost(exchange);
    else
        tb__exchange_break(exchange, TB_LOST, true);
}

/* In manifests, because some ranks may not have noticed that a side has made the pair again with another layout. */
static uint64_t hash_layouts(const tb_pair *pair) {
    uint64_t hash[2];
    for (int side = 0; side < 2; side++)
        hash[side] = tb__tensor_list_hash(pair->sides[side].layout, strlen(pair->sides[side].layout));
    return tb__tensor_list_hash(hash, sizeof hash);
}

static tb_status init_exchange(tb__exchange *exchange) {
    exchange->layouts_hash = hash_layouts(exchange->pair);
    TB_TRY(init_handshake(exchange));
    TB_TRY(number_hosts(exchange));
    if (tb__handshake_is_lead(&exchange->handshake)) {
        exchange->devices = tb__calloc(exchange->handshake.npeers, sizeof *exchange->devices);
        if (!exchange->devices)
            return TB_NO_MEMORY;
    }
    for (int side = 0; side < 2; side++) {
        tb__exchange_side *s = &exchange->sides[side];
        size_t size = (size_t)exchange->pair->sides[side].size;
        TB_TRY(collect_own_tensors(exchange, side));
        TB_TRY(number_seats(exchange, side));
        s->seats = tb__calloc(size, sizeof *s->seats);
        if (!s->seats)
            return TB_NO_MEMORY;
    }
    choose_device(exchange);
    for (int src = 0; src < 2; src++)
        TB_TRY(tb__engine_add_part(exchange, src));
    return TB_OK;
}

tb_status tb__exchange_create(tb_batch *batch, tb_pair *pair, tb__exchange **out) {
    tb_world *world = batch->world;
    char key[2 * TB__DIRECTORY_MAX_NAME + 16];
    format_key(batch, pair, key, sizeof key);
    if (tb__handshake_exists(world, key))
        return tb__fail(TB_CONFLICT, "there is a batch '%s' of pair '%s' already", batch->name, pair->name);
    tb__exchange *exchange = tb__calloc(1, sizeof *exchange);
    if (!exchange)
        return TB_NO_MEMORY;
    exchange->world = world;
    exchange->batch = batch;
    exchange->pair = pair;
    exchange->staging_bytes = INT64_MAX;
    pair->refs++;
    snprintf(exchange->what, sizeof exchange->what, "batch '%s'", batch->name);
    exchange->handshake.port.message = on_exchange_message;
    exchange->handshake.port.lost = on_exchange_peer_lost;
    exchange->handshake.pack_manifest = pack_exchange_manifest;
    exchange->handshake.on_manifest = on_exchange_manifest;
    exchange->handshake.on_confirmed = on_manifest_confirmed;
    exchange->handshake.on_broken = on_peer_broken;
    exchange->handshake.on_gone = tb__exchange_on_goodbye;
    exchange->handshake.on_comm = on_exchange_comm;
    tb_status status = init_exchange(exchange);
    if (status != TB_OK) {
        tb__exchange_destroy(exchange);
        return status;
    }
    *out = exchange;
    return TB_OK;
}

static void exchange_side_fini(tb__exchange_side *s) {
    for (size_t i = 0; i < s->lists.count; i++)
        tb__tensor_list_fini(&s->lists.item[i]);
    free(s->lists.item);
    tb__index_fini(&s->by_hash);
    tb__index_fini(&s->wanted);
    free(s->seat_of);
    free(s->own.item);
    free(s->used.item);
    free(s->tensors.item);
    free(s->seats);
}

void tb__exchange_destroy(tb__exchange *exchange) {
    tb__exchange_leave(exchange);
    for (int src = 0; src < 2; src++)
        tb__engine_remove_part(&exchange->receives[src]);
    for (int side = 0; side < 2; side++) {
        bool is_done = tb__flow_destroy(exchange->flows[side]);
        if (is_done) { /* else a device may still use them */
            tb__exchange_free_shadows(&exchange->shadows[side]);
            tb__convert_destroy(exchange->converts[side]);
        }
        free(exchange->received[side].item);
        free(exchange->lost_ties[side]);
        exchange_side_fini(&exchange->sides[side]);
    }
    for (size_t i = 0; i < exchange->layouts.count; i++)
        tb_layout_destroy(exchange->layouts.item[i].layout);
    free(exchange->layouts.item);
    tb__index_fini(&exchange->by_text);
    for (size_t i = 0; i < exchange->backlog.count; i++)
        free(exchange->backlog.item[i].data);
    free(exchange->backlog.item);
    tb__pair_unref(exchange->pair);
    free(exchange->hosts);
    tb__exchange_free_goodbyes(exchange);
    free(exchange->staging);
    free(exchange->devices);
    tb__handshake_fini(&exchange->handshake);
    free(exchange);
}

static void dispatch_message(tb__exchange *exchange, size_t peer, tb__unpack *message) {
    uint32_t to = tb__unpack_u32(message);
    tb__set_detail("truncated or malformed");
    if (to > 1 || message->failed || !tb__flow_message(exchange->flows[to], peer, message))
        tb__exchange_break(exchange,
                           tb__fail_within(TB_INVALID, "%s sent an invalid message about %s",
                                           exchange->handshake.peers[peer]->label, exchange->what),
                           true);
}

/* A rank that is in both groups may have added tensors for one of them only. */
static tb_status check_all_seats_added(const tb__exchange *exchange) {
    for (int side = 0; side < 2; side++) {
        for (int32_t i = 0; i < exchange->pair->sides[side].size; i++) {
            if (!exchange->sides[side].seats[i].has_come)
                return tb__fail(TB_CONFLICT, "%s has added no tensors to %s as %s %" PRId32,
                                exchange->pair->sides[side].peers[i]->label, exchange->what,
                                exchange->pair->sides[side].group, i);
        }
    }
    return TB_OK;
}

/* A rank whose list has not arrived; NULL: there is none. */
const tb__peer *tb__exchange_find_missing(const tb__exchange *exchange) {
    for (int side = 0; side < 2; side++) {
        for (int32_t i = 0; i < exchange->pair->sides[side].size; i++) {
            if (!tb__exchange_list(&exchange->sides[side], exchange->sides[side].seats[i].hash))
                return exchange->pair->sides[side].peers[i];
        }
    }
    return NULL;
}

/* Batches of this pair that the peer has registered and this rank has not: "; it has registered 'a', 'b'". */
static void list_other_batches(const tb__exchange *exchange, size_t peer, char *out, size_t room) {
    enum { MOST = 3 };
    static const char prefix[] = "batch\n";
    size_t next = 0, count = 0;
    int used = 0;
    out[0] = '\0';
    for (const char *key; (key = tb__handshake_next_early(&exchange->handshake, peer, &next));) {
        const char *name = strncmp(key, prefix, sizeof prefix - 1) == 0 ? key + sizeof prefix - 1 : NULL;
        const char *end = name ? strchr(name, '\n') : NULL;
        if (!end || strcmp(end + 1, exchange->pair->name) != 0 || ++count > MOST)
            continue;
        used += snprintf(out + used, room - (size_t)used, "%s'%.*s'", count > 1 ? ", " : "; it has registered ",
                         (int)tb__min64(end - name, 60), name);
    }
    if (count > MOST)
        snprintf(out + used, room - (size_t)used, " and %zu more", count - MOST);
}

tb_status tb__exchange_fail_waiting(const tb__exchange *exchange) {
    const tb__handshake *handshake = &exchange->handshake;
    const char *what = exchange->what, *pair = exchange->pair->name, *shortage = tb__shortage_text();
    char refusal[TB__WHY_MAX], cause[2 * TB__WHY_MAX];
    tb__pair_find_refusal(exchange->pair, refusal, sizeof refusal);
    snprintf(cause, sizeof cause, "%s%s%s", shortage, *refusal ? "; " : "", refusal);
    size_t nhave, late = tb__handshake_find_missing(handshake, &nhave);
    if (late != TB__NOWHERE) {
        const char *label = handshake->peers[late]->label;
        if (*shortage)
            return tb__fail(TB_TIMEOUT, "the registration by %s of %s of pair '%s' has not arrived%s", label, what,
                            pair, cause);
        char others[300];
        list_other_batches(exchange, late, others, sizeof others);
        return tb__fail(TB_TIMEOUT, "%s has not registered %s of pair '%s' (%zu of %zu ranks have)%s%s", label, what,
                        pair, nhave, handshake->npeers, others, cause);
    }
    if (tb__handshake_awaits_comm(handshake))
        return tb__fail(TB_TIMEOUT, "%s has not connected the %zu ranks of %s of pair '%s'%s",
                        handshake->comm->transport->ops->name, handshake->npeers, what, pair, cause);
    const tb__peer *missing = tb__exchange_find_missing(exchange);
    return tb__fail(TB_TIMEOUT, "the tensors that %s has added to %s of pair '%s' have not come%s",
                    missing ? missing->label : "nobody", what, pair, shortage);
}

/* This rank receives for the side's engine, or sends to it: then its sends count on from the engine's last version. */
static void join_engines(tb__exchange *exchange, int side) {
    const tb__exchange_side *s = &exchange->sides[side];
    uint64_t *nsends = &exchange->batch->nsends;
    for (int32_t seat = 0; exchange->sides[!side].is_here && seat < exchange->pair->sides[side].size; seat++)
        *nsends = s->seats[seat].engine.taken > *nsends ? s->seats[seat].engine.taken : *nsends;
    if (exchange->receives[!side].engine)
        tb__engine_on_agreed(&exchange->receives[!side]);
}

/* When all peers are confirmed and all lists are here: merges them and makes the flows. */
static void try_agree(tb__exchange *exchange) {
    if (exchange->state != EXCHANGE_WAITING || exchange->handshake.nunconfirmed > 0)
        return;
    tb_status sent = tb__exchange_send_lists(exchange);
    if (sent != TB_OK) {
        tb__exchange_break(exchange, sent, true);
        return;
    }
    if (tb__exchange_find_missing(exchange))
        return;
    for (size_t i = 0; i < exchange->handshake.npeers; i++)
        exchange->staging_bytes = tb__min64(exchange->staging_bytes, exchange->staging[i]);
    tb_status status = TB_OK;
    for (int side = 0; side < 2 && status == TB_OK; side++)
        status = tb__exchange_merge(exchange, side);
    if (status == TB_OK)
        status = tb__exchange_agree_modes(exchange);
    if (status == TB_OK)
        status = tb__handshake_make_comm(&exchange->handshake, (size_t)exchange->staging_bytes);
    if (status == TB_OK)
        status = tb__exchange_make_flows(exchange);
    if (status != TB_OK) {
        tb__exchange_break(exchange, status, true);
        return;
    }
    exchange->state = EXCHANGE_AGREED;
    exchange->has_agreed = true;
    for (int side = 0; side < 2; side++)
        join_engines(exchange, side);
    for (size_t i = 0; i < exchange->backlog.count; i++) {
        struct tb__backlog *b = &exchange->backlog.item[i];
        tb__unpack message = {b->data, b->data + b->nbytes, false};
        if (exchange->state == EXCHANGE_AGREED)
            dispatch_message(exchange, b->peer, &message);
        free(b->data);
    }
    exchange->backlog.count = 0;
    for (size_t i = 0; i < exchange->handshake.npeers; i++) {
        if (exchange->handshake.ranks[i].is_gone)
            tb__exchange_report_gone(exchange, i);
    }
    if (exchange->devices)
        tb__world_report(exchange->world);
    prepare_send(exchange);
    tb__loop_signal(exchange->world->loop);
}

/* A list may arrive before the manifests that name its hash, and again after the agreement. */
static void on_tensor_list(tb__exchange *exchange, size_t at, tb__unpack *message) {
    uint32_t side = tb__unpack_u32(message);
    uint64_t hash = tb__unpack_u64(message);
    size_t nbytes;
    const void *data = tb__unpack_bytes(message, &nbytes);
    bool is_good = tb__unpack_is_done(message) && side <= 1 && nbytes > 0 && tb__tensor_list_hash(data, nbytes) == hash;
    if (exchange->state != EXCHANGE_WAITING || (is_good && tb__exchange_list(&exchange->sides[side], hash)))
        return;
    unsigned char *copy = is_good ? tb__memdup(data, nbytes, 1) : NULL;
    tb_status status = is_good ? TB_NO_MEMORY : TB_INVALID;
    if (copy)
        status = add_tensor_list(&exchange->sides[side], copy, nbytes);
    if (status == TB_INVALID)
        tb__set_detail("%s sent an invalid tensor list for %s: %zu bytes for side %u%s",
                       exchange->handshake.peers[at]->label, exchange->what, nbytes, (unsigned)side,
                       is_good ? ", which can't be parsed" : ", truncated or with a wrong hash");
    if (status != TB_OK)
        tb__exchange_break(exchange, status, true);
    else
        try_agree(exchange);
}

static void on_exchange_message(tb__port *port, tb__peer *from, tb__unpack *message) {
    tb__exchange *exchange = (tb__exchange *)port;
    size_t at = tb__handshake_find(&exchange->handshake, from);
    if (at == TB__NOWHERE || (exchange->state == EXCHANGE_BROKEN && !exchange->has_agreed))
        return;
    tb__unpack list = *message;
    uint32_t kind = tb__unpack_u32(&list);
    if (kind == TB__EXCHANGE_LIST) {
        on_tensor_list(exchange, at, &list);
        return;
    }
    if (kind == TB__EXCHANGE_WANT) {
        tb__exchange_on_want(exchange, at, &list);
        return;
    }
    if (exchange->has_agreed) {
        dispatch_message(exchange, at, message);
        return;
    }
    size_t nbytes = (size_t)(message->end - message->at);
    unsigned char *copy = tb__memdup(message->at, nbytes, 1);
    if (!copy || !tb__vec_push(&exchange->backlog, (struct tb__backlog){at, copy, nbytes})) {
        free(copy);
        tb__exchange_break(exchange, TB_NO_MEMORY, true);
    }
}

static void pack_exchange_manifest(tb__handshake *handshake, tb__pack *pack) {
    const tb__exchange *exchange = (const tb__exchange *)handshake;
    tb__pack_u64(pack, exchange->layouts_hash);
    tb__pack_i64(pack, exchange->batch->opts.staging_bytes);
    tb__pack_string(pack, own_devices(exchange).text);
    tb__pack_u32(pack, (uint32_t)exchange->sides[0].is_here + (uint32_t)exchange->sides[1].is_here);
    for (int side = 0; side < 2; side++) {
        const tb__exchange_side *s = &exchange->sides[side];
        if (!s->is_here)
            continue;
        tb__pack_u32(pack, (uint32_t)side);
        tb__pack_u32(pack, (uint32_t)s->index);
        tb__pack_u64(pack, s->hash);
        tb__pack_i64(pack, exchange->batch->opts.bucket_size);
        tb__engine_pack_manifest(exchange->receives[!side].engine, pack);
    }
}

static const char *seat_name(const tb__exchange *exchange, int side, int32_t seat) {
    return exchange->pair->sides[side].peers[seat]->label;
}

/* All seats of a side are compared with the first one that was confirmed. */
static tb_status check_bucket_size(tb__exchange *exchange, int side, int32_t seat) {
    tb__exchange_side *s = &exchange->sides[side];
    if (s->compared < 0 || !s->seats[s->compared].has_come)
        s->compared = seat;
    if (s->seats[s->compared].bucket_size == s->seats[seat].bucket_size)
        return TB_OK;
    int32_t a = s->compared < seat ? s->compared : seat, b = s->compared < seat ? seat : s->compared;
    return tb__fail(TB_CONFLICT, "%s and %s have different bucket sizes for %s: %" PRId64 " and %" PRId64,
                    seat_name(exchange, side, a), seat_name(exchange, side, b), exchange->what, s->seats[a].bucket_size,
                    s->seats[b].bucket_size);
}

static tb_status read_manifest_side(tb__exchange *exchange, const tb__peer *from, tb__unpack *u) {
    uint32_t side = tb__unpack_u32(u), seat = tb__unpack_u32(u);
    uint64_t hash = tb__unpack_u64(u);
    int64_t bucket_size = tb__unpack_i64(u);
    tb__engine_manifest engine = tb__engine_unpack_manifest(u);
    if (u->failed || side > 1 || seat >= (uint32_t)exchange->pair->sides[side].size ||
        exchange->pair->sides[side].peers[seat] != from || bucket_size < 1)
        return tb__fail(TB_INVALID, "%s sent an invalid manifest of %s: %sside %u, seat %u, bucket size %" PRId64,
                        from->label, exchange->what, u->failed ? "truncated, " : "", (unsigned)side, (unsigned)seat,
                        bucket_size);
    exchange->sides[side].seats[seat] = (tb__exchange_seat){true, hash, bucket_size, engine};
    return TB_OK;
}

static void on_exchange_manifest(tb__handshake *handshake, size_t at, tb__unpack *u) {
    tb__exchange *exchange = (tb__exchange *)handshake;
    uint64_t layouts = tb__unpack_u64(u);
    int64_t staging_bytes = tb__unpack_i64(u);
    const char *devices = tb__unpack_string(u);
    uint32_t nsides = tb__unpack_u32(u);
    tb_status status =
        nsides >= 1 && nsides <= 2 && staging_bytes >= TB__LEAST_STAGING
            ? TB_OK
            : tb__fail(TB_INVALID, "%s sent an invalid manifest of %s: %u sides, %" PRId64 " staging bytes",
                       handshake->peers[at]->label, exchange->what, (unsigned)nsides, staging_bytes);
    exchange->staging[at] = staging_bytes;
    if (exchange->devices) {
        snprintf(exchange->devices[at].text, sizeof exchange->devices[at].text, "%s", devices);
        tb__world_report(exchange->world);
    }
    if (status == TB_OK && layouts != exchange->layouts_hash)
        status = tb__fail(TB_CONFLICT, "%s has made pair '%s' with other layouts: it has to be made again",
                          handshake->peers[at]->label, exchange->pair->name);
    for (uint32_t i = 0; i < nsides && status == TB_OK; i++)
        status = read_manifest_side(exchange, handshake->peers[at], u);
    if (status != TB_OK)
        tb__exchange_break(exchange, status, true);
}

static void on_manifest_confirmed(tb__handshake *handshake, size_t at) {
    tb__exchange *exchange = (tb__exchange *)handshake;
    tb_status status = TB_OK;
    for (int side = 0; side < 2 && status == TB_OK; side++) {
        int32_t seat = exchange->sides[side].seat_of[at];
        if (seat >= 0 && exchange->sides[side].seats[seat].has_come)
            status = check_bucket_size(exchange, side, seat);
    }
    if (status == TB_OK && handshake->nunconfirmed == 0)
        status = check_all_seats_added(exchange);
    if (status != TB_OK)
        tb__exchange_break(exchange, status, true);
    else
        try_agree(exchange);
}

tb_status tb__exchange_announce(tb__exchange *exchange) {
    return tb__handshake_announce(&exchange->handshake);
}
