/* The ranks of a pair agree on a batch. When everybody's manifest counts, the ranks send each other their bodies, so
 * that everybody gets each of them once; whoever has all of them finds out what follows. Then there are flows, and
 * messages go to them. */
#include "bus/accord.h"

#include "base/descriptors.h"
#include "base/int.h"
#include "base/log.h"
#include "bus/pair_notes.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Messages to the accord's port begin with the direction of the flow they are for, or with this. */
enum { MESSAGE_BODY = 2 };

static void close_accord(tb__accord *accord, tb_status status, bool tell) {
    accord->state = ACCORD_BROKEN;
    tb__assembly_break(&accord->all, status, tell);
    tb__engine_wake(accord->world->engine);
    tb__engine_signal(accord->world->engine);
}

void tb__accord_break(tb__accord *accord, tb_status status, bool tell) {
    tb__saved_detail why = tb__save_detail();
    close_accord(accord, status, tell);
    for (int i = 0; i < 2; i++) {
        if (accord->flows[i])
            tb__flow_break(accord->flows[i], tb__fail(status, "%s", why.text));
    }
}

/* Whether this rank is in a transfer, or will be in one that others have begun. */
static bool is_moving(const tb__accord *accord) {
    for (int side = 0; side < 2; side++) {
        for (int src = 0; accord->sides[side].is_here && src < 2; src++) {
            tb__flow *flow = accord->flows[src];
            if (tb__flow_leg(flow, src == side)->is_under_way || tb__flow_may_begin(flow, src == side))
                return true;
        }
    }
    return false;
}

void tb__accord_tell_loss(tb__accord *accord) {
    if (!accord->owes_loss || is_moving(accord))
        return;
    accord->owes_loss = false;
    tb__assembly_tell(&accord->all);
}

void tb__accord_lose_rank(tb__accord *accord) {
    accord->owes_loss |= accord->all.status == TB_OK;
    close_accord(accord, TB_LOST, false);
    tb__accord_tell_loss(accord);
}

static void on_broken(tb__assembly *all, size_t at, tb_status status, const char *why) {
    tb__accord *accord = (tb__accord *)all;
    if (status != TB_LOST || !accord->has_agreed) {
        tb__accord_break(accord, tb__fail(status, "%s", why), false);
        return;
    }
    for (int i = 0; i < 2; i++) {
        if (accord->flows[i])
            tb__flow_failed(accord->flows[i], at, why);
    }
    tb__set_detail("%s", why);
    tb__accord_lose_rank(accord);
}

static int compare_tensors(const void *a, const void *b) {
    const tb__tensor *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

/* ---- Making one ------------------------------------------------------------------------------------------------ */

/* Neither name has control characters. */
static void name_key(const tb_batch *batch, const tb_pair *pair, char *out, size_t room) {
    snprintf(out, room, "batch\n%s\n%s", batch->name, pair->name);
}

static tb_status assemble(tb__accord *accord) {
    const tb__pair_side *sides = accord->pair->sides;
    char key[2 * TB__DIRECTORY_MAX_NAME + 16];
    size_t n = (size_t)sides[0].size + (size_t)sides[1].size;
    tb__peer **peers = tb__malloc(n, sizeof *peers);
    accord->goodbyes = tb__calloc(n, sizeof *accord->goodbyes);
    accord->staging = tb__calloc(n, sizeof *accord->staging);
    name_key(accord->batch, accord->pair, key, sizeof key);
    for (size_t i = 0; peers && i < n; i++)
        peers[i] = i < (size_t)sides[0].size ? sides[0].peers[i] : sides[1].peers[i - (size_t)sides[0].size];
    tb_status status = tb__assembly_init(&accord->all, accord->world, key, accord->what, peers, peers ? n : 0);
    free(peers);
    return peers && accord->goodbyes && accord->staging ? status : TB_NO_MEMORY;
}

/* Hosts are numbered as they appear by rank: alike on every rank. */
static tb_status number_hosts(tb__accord *accord) {
    int32_t most = accord->all.peers[accord->all.npeers - 1]->rank, count = 0;
    accord->nhosts = (size_t)most + 1;
    accord->hosts = tb__calloc(accord->nhosts, sizeof *accord->hosts);
    if (!accord->hosts)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < accord->all.npeers; i++) {
        int32_t number = count;
        for (size_t j = 0; j < i && number == count; j++) {
            if (strcmp(accord->all.peers[i]->host, accord->all.peers[j]->host) == 0)
                number = accord->hosts[accord->all.peers[j]->rank];
        }
        accord->hosts[accord->all.peers[i]->rank] = number;
        count += number == count;
    }
    if (count == 1) {
        free(accord->hosts);
        accord->hosts = NULL;
        accord->nhosts = 0;
    }
    return TB_OK;
}

static bool is_of(const tb__accord *accord, const tb_pair *pair, int side) {
    return pair->side == side && strcmp(pair->name, accord->pair->name) == 0;
}

const tb__body *tb__accord_body(const tb__accord_side *side, uint64_t hash) {
    size_t probe = 0, i = tb__index_next(&side->by_hash, hash, &probe);
    return i != TB__NOWHERE ? &side->bodies.item[i] : NULL;
}

/* Takes over the data. */
static tb_status add_body(tb__accord_side *s, unsigned char *data, size_t nbytes) {
    tb__body body;
    TB_TRY(tb__body_init(&body, data, nbytes));
    if (!tb__vec_reserve(&s->bodies, 1) || !tb__index_add(&s->by_hash, body.hash, s->bodies.count)) {
        tb__body_fini(&body);
        return TB_NO_MEMORY;
    }
    s->bodies.item[s->bodies.count++] = body;
    return TB_OK;
}

/* What this process has added for one side of the pair. */
static tb_status collect(tb__accord *accord, int side) {
    tb__accord_side *s = &accord->sides[side];
    const tb_batch *batch = accord->batch;
    for (size_t i = 0; i < batch->pairs.count; i++) {
        if (is_of(accord, batch->pairs.item[i], side)) {
            s->is_here = true;
            s->index = batch->pairs.item[i]->index;
        }
    }
    if (!s->is_here)
        return TB_OK;
    for (size_t i = 0; i < batch->tensors.count; i++) {
        const tb__tensor *t = batch->tensors.item[i];
        if (is_of(accord, t->pair, side) && !tb__vec_push(&s->own, t))
            return TB_NO_MEMORY;
    }
    if (s->own.count)
        qsort(s->own.item, s->own.count, sizeof *s->own.item, compare_tensors);
    for (size_t i = 1; i < s->own.count; i++) {
        if (strcmp(s->own.item[i - 1]->name, s->own.item[i]->name) == 0)
            return tb__fail(TB_INVALID, "tensor '%.100s' is in batch '%s' twice", s->own.item[i]->name, batch->name);
    }
    tb__pack body = {0};
    tb__body_pack(&body, batch, s->own.item, s->own.count);
    if (body.failed) {
        tb__pack_fini(&body);
        return TB_NO_MEMORY;
    }
    s->hash = tb__body_hash(body.data, body.count);
    return add_body(s, body.data, body.count);
}

static void on_message(tb__port *port, tb__peer *from, tb__unpack *message);
static tb_status send_manifest(tb__assembly *all, size_t to);
static void take_manifest(tb__assembly *all, size_t at, tb__unpack *u);
static void count_in(tb__assembly *all, size_t at);

static void on_lost(tb__port *port, tb__peer *peer) {
    tb__accord *accord = (tb__accord *)port;
    size_t at = tb__assembly_find(&accord->all, peer);
    if (at == TB__NOWHERE || accord->all.is_gone[at])
        return;
    for (int i = 0; i < 2; i++) {
        if (accord->flows[i])
            tb__flow_lost(accord->flows[i], at);
    }
    tb__set_detail("%s was lost during %s: %s", peer->label, accord->what, peer->why ? peer->why : "?");
    if (accord->has_agreed)
        tb__accord_lose_rank(accord);
    else
        tb__accord_break(accord, TB_LOST, true);
}

static tb_status init(tb__accord *accord) {
    TB_TRY(assemble(accord));
    TB_TRY(number_hosts(accord));
    for (int side = 0; side < 2; side++) {
        tb__accord_side *s = &accord->sides[side];
        size_t size = (size_t)accord->pair->sides[side].size;
        TB_TRY(collect(accord, side));
        s->hashes = tb__calloc(size, sizeof *s->hashes);
        s->bucket_size = tb__calloc(size, sizeof *s->bucket_size);
        s->has_come = tb__calloc(size, sizeof *s->has_come);
        if (!s->hashes || !s->bucket_size || !s->has_come)
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

tb_status tb__accord_create(tb_batch *batch, tb_pair *pair, tb__accord **out) {
    tb_world *world = batch->world;
    char key[2 * TB__DIRECTORY_MAX_NAME + 16];
    name_key(batch, pair, key, sizeof key);
    if (tb__assembly_exists(world, key))
        return tb__fail(TB_CONFLICT, "there is a batch '%s' of pair '%s' already", batch->name, pair->name);
    tb__accord *accord = tb__calloc(1, sizeof *accord);
    if (!accord)
        return TB_NO_MEMORY;
    accord->world = world;
    accord->batch = batch;
    accord->pair = pair;
    accord->staging_bytes = INT64_MAX;
    for (int side = 0; side < 2; side++)
        accord->commits[side] = (tb__accord_commit){.accord = accord, .src = side};
    pair->refs++;
    snprintf(accord->what, sizeof accord->what, "batch '%s'", batch->name);
    accord->all.port.message = on_message;
    accord->all.port.lost = on_lost;
    accord->all.tell = send_manifest;
    accord->all.come = take_manifest;
    accord->all.counted = count_in;
    accord->all.broken = on_broken;
    accord->all.gone = tb__accord_on_goodbye;
    tb_status status = init(accord);
    if (status != TB_OK) {
        tb__accord_destroy(accord);
        return status;
    }
    *out = accord;
    return TB_OK;
}

static void side_fini(tb__accord_side *s) {
    for (size_t i = 0; i < s->bodies.count; i++)
        tb__body_fini(&s->bodies.item[i]);
    free(s->bodies.item);
    tb__index_fini(&s->by_hash);
    free(s->own.item);
    free(s->tensors.item);
    free(s->hashes);
    free(s->bucket_size);
    free(s->has_come);
}

void tb__accord_destroy(tb__accord *accord) {
    tb__accord_leave(accord);
    for (int side = 0; side < 2; side++) {
        tb__accord_commit_fini(accord, side);
        tb__flow_destroy(accord->flows[side]);
        tb__convert_destroy(accord->converts[side]);
        free(accord->received[side].item);
        free(accord->padded[side].item);
        side_fini(&accord->sides[side]);
    }
    for (size_t i = 0; i < accord->layouts.count; i++)
        tb_layout_destroy(accord->layouts.item[i].layout);
    free(accord->layouts.item);
    tb__index_fini(&accord->by_text);
    for (size_t i = 0; i < accord->backlog.count; i++)
        free(accord->backlog.item[i].data);
    free(accord->backlog.item);
    tb__pair_unref(accord->pair);
    free(accord->hosts);
    tb__accord_free_goodbyes(accord);
    free(accord->staging);
    tb__assembly_fini(&accord->all);
    free(accord);
}

/* ---- Agreement -------------------------------------------------------------------------------------------------- */

/* Flows that are broken take only what was decided before, and may still be on its way. */
static void pass_on(tb__accord *accord, size_t peer, tb__unpack *message) {
    uint32_t direction = tb__unpack_u32(message);
    tb__set_detail("it can't be read");
    if (message->failed || direction > 1 || !tb__flow_message(accord->flows[direction], peer, message))
        tb__accord_break(accord,
                         tb__fail_within(TB_INVALID, "%s sent a message about %s that makes no sense",
                                         accord->all.peers[peer]->label, accord->what),
                         true);
}

/* Every rank has come, but one that is in both groups may have added tensors for one of them only. */
static tb_status check_seats(const tb__accord *accord) {
    for (int side = 0; side < 2; side++) {
        for (int32_t i = 0; i < accord->pair->sides[side].size; i++) {
            if (!accord->sides[side].has_come[i])
                return tb__fail(TB_CONFLICT, "%s has added no tensors to %s as %s %" PRId32,
                                accord->pair->sides[side].peers[i]->label, accord->what,
                                accord->pair->sides[side].group, i);
        }
    }
    return TB_OK;
}

/* A seat whose body is not here yet; NULL: there is none. */
static const tb__peer *find_missing(const tb__accord *accord) {
    for (int side = 0; side < 2; side++) {
        for (int32_t i = 0; i < accord->pair->sides[side].size; i++) {
            if (!tb__accord_body(&accord->sides[side], accord->sides[side].hashes[i]))
                return accord->pair->sides[side].peers[i];
        }
    }
    return NULL;
}

tb_status tb__accord_not_settled(const tb__accord *accord) {
    const tb__assembly *all = &accord->all;
    const char *what = accord->what, *pair = accord->pair->name, *shortage = tb__shortage_text();
    char refusal[TB__WHY_MAX], cause[2 * TB__WHY_MAX];
    tb__pair_find_refusal(accord->pair, refusal, sizeof refusal);
    snprintf(cause, sizeof cause, "%s%s%s", shortage, *refusal ? "; " : "", refusal);
    size_t late = all->npeers; /* one that has not registered, or else one that has not confirmed */
    for (size_t i = 0; i < all->npeers; i++) {
        if (!all->counts[i] && (late == all->npeers || (all->ports[late] && !all->ports[i])))
            late = i;
    }
    if (late < all->npeers) {
        const char *label = all->peers[late]->label;
        if (all->ports[late])
            return tb__fail(TB_TIMEOUT, "%s has registered %s of pair '%s', but has not confirmed our registration%s",
                            label, what, pair, cause);
        if (*shortage)
            return tb__fail(TB_TIMEOUT, "the registration by %s of %s of pair '%s' has not arrived%s", label, what,
                            pair, cause);
        return tb__fail(TB_TIMEOUT, "%s has not registered %s of pair '%s' (%zu of %zu ranks have)%s", label, what,
                        pair, all->npeers - all->nunknown, all->npeers, cause);
    }
    const tb__peer *missing = find_missing(accord);
    return tb__fail(TB_TIMEOUT, "what %s has added to %s of pair '%s' has not come%s",
                    missing ? missing->label : "nobody", what, pair, shortage);
}

/* Everybody has come, and all bodies are here: compare, and begin. */
static void try_agree(tb__accord *accord) {
    if (accord->state != ACCORD_WAITING || accord->all.nunknown > 0 || find_missing(accord))
        return;
    for (size_t i = 0; i < accord->all.npeers; i++)
        accord->staging_bytes = tb__min64(accord->staging_bytes, accord->staging[i]);
    tb_status status = TB_OK;
    for (int side = 0; side < 2 && status == TB_OK; side++)
        status = tb__accord_unite(accord, side);
    if (status == TB_OK)
        status = tb__accord_settle_modes(accord);
    if (status == TB_OK)
        status = tb__accord_make_flows(accord);
    if (status != TB_OK) {
        tb__accord_break(accord, status, true);
        return;
    }
    accord->state = ACCORD_AGREED;
    accord->has_agreed = true;
    for (size_t i = 0; i < accord->backlog.count; i++) {
        struct tb__backlog *b = &accord->backlog.item[i];
        tb__unpack message = {b->data, b->data + b->nbytes, false};
        if (accord->state == ACCORD_AGREED)
            pass_on(accord, b->peer, &message);
        free(b->data);
    }
    accord->backlog.count = 0;
    for (size_t i = 0; i < accord->all.npeers; i++) {
        if (accord->all.is_gone[i])
            tb__accord_tell_gone(accord, i);
    }
    tb__engine_signal(accord->world->engine);
}

/* It may come before this rank knows whose it is, and after it has agreed: then it is one that was sent again. */
static void take_body(tb__accord *accord, size_t at, tb__unpack *message) {
    uint32_t side = tb__unpack_u32(message);
    uint64_t hash = tb__unpack_u64(message);
    size_t nbytes;
    const void *data = tb__unpack_bytes(message, &nbytes);
    bool is_good = tb__unpack_is_done(message) && side <= 1 && nbytes > 0 && tb__body_hash(data, nbytes) == hash;
    if (accord->state != ACCORD_WAITING || (is_good && tb__accord_body(&accord->sides[side], hash)))
        return;
    unsigned char *copy = is_good ? tb__memdup(data, nbytes, 1) : NULL;
    tb_status status = is_good ? TB_NO_MEMORY : TB_INVALID;
    if (copy)
        status = add_body(&accord->sides[side], copy, nbytes);
    if (status == TB_INVALID)
        tb__set_detail("%s sent a list of tensors of %s that makes no sense", accord->all.peers[at]->label,
                       accord->what);
    if (status != TB_OK)
        tb__accord_break(accord, status, true);
    else
        try_agree(accord);
}

static void on_message(tb__port *port, tb__peer *from, tb__unpack *message) {
    tb__accord *accord = (tb__accord *)port;
    size_t at = tb__assembly_find(&accord->all, from);
    if (at == TB__NOWHERE || (accord->state == ACCORD_BROKEN && !accord->has_agreed))
        return;
    tb__unpack body = *message;
    if (tb__unpack_u32(&body) == MESSAGE_BODY) {
        take_body(accord, at, &body);
        return;
    }
    if (accord->has_agreed) {
        pass_on(accord, at, message);
        return;
    }
    size_t nbytes = (size_t)(message->end - message->at);
    unsigned char *copy = tb__memdup(message->at, nbytes, 1);
    if (!copy || !tb__vec_push(&accord->backlog, (struct tb__backlog){at, copy, nbytes})) {
        free(copy);
        tb__accord_break(accord, TB_NO_MEMORY, true);
    }
}

/* ---- Manifests, out and in ------------------------------------------------------------------------------------- */

/* A side that has left the pair, and made it again with another layout, may not have been noticed by all. */
static uint64_t hash_layouts(const tb_pair *pair) {
    uint64_t hash[2];
    for (int side = 0; side < 2; side++)
        hash[side] = tb__body_hash(pair->sides[side].layout, strlen(pair->sides[side].layout));
    return tb__body_hash(hash, sizeof hash);
}

static tb_status send_manifest(tb__assembly *all, size_t to) {
    tb__accord *accord = (tb__accord *)all;
    tb__pack pack = {0};
    tb__pack_u64(&pack, hash_layouts(accord->pair));
    tb__pack_i64(&pack, accord->batch->opts.staging_bytes);
    tb__pack_u32(&pack, (uint32_t)accord->sides[0].is_here + (uint32_t)accord->sides[1].is_here);
    for (int side = 0; side < 2; side++) {
        const tb__accord_side *s = &accord->sides[side];
        if (!s->is_here)
            continue;
        tb__pack_u32(&pack, (uint32_t)side);
        tb__pack_u32(&pack, (uint32_t)s->index);
        tb__pack_u64(&pack, s->hash);
        tb__pack_i64(&pack, accord->batch->opts.bucket_size);
    }
    return tb__assembly_send(all, to, &pack);
}

static tb_status send_body(tb__accord *accord, int side, size_t to) {
    const tb__body *body = tb__accord_body(&accord->sides[side], accord->sides[side].hash);
    tb__pack pack = {0};
    tb__pack_u32(&pack, MESSAGE_BODY);
    tb__pack_u32(&pack, (uint32_t)side);
    tb__pack_u64(&pack, body->hash);
    tb__pack_bytes(&pack, body->data, body->nbytes);
    return tb__engine_send(accord->all.peers[to], accord->all.ports[to], &pack);
}

/* Seats that have the same body share the work: the peer at position p gets it from the one that is p-th among them,
 * modulo their number. */
static tb_status send_side(tb__accord *accord, int side) {
    const tb__accord_side *s = &accord->sides[side];
    const tb__pair_side *seats = &accord->pair->sides[side];
    size_t nalike = 1, before = 0; /* this seat is one */
    bool *has = tb__calloc(accord->all.npeers, sizeof *has);
    if (!has)
        return TB_NO_MEMORY;
    for (int32_t seat = 0; seat < seats->size; seat++) {
        if (s->hashes[seat] != s->hash)
            continue;
        before += seat < s->index;
        nalike += seat != s->index;
        has[tb__assembly_find(&accord->all, seats->peers[seat])] = true;
    }
    tb_status status = TB_OK;
    for (size_t to = 0; to < accord->all.npeers && status == TB_OK; to++) {
        if (!has[to] && to % nalike == before)
            status = send_body(accord, side, to);
    }
    free(has);
    return status;
}

/* Before this rank can agree, so that what it leaves behind is enough for the others to. */
static tb_status send_bodies(tb__accord *accord) {
    for (int side = 0; side < 2; side++) {
        if (accord->sides[side].is_here)
            TB_TRY(send_side(accord, side));
    }
    return TB_OK;
}

static const char *seat_name(const tb__accord *accord, int side, int32_t seat) {
    return accord->pair->sides[side].peers[seat]->label;
}

/* Whether what the seat sent is about this very batch. */
static bool counts(const tb__accord *accord, int side, int32_t seat) {
    return accord->sides[side].has_come[seat] &&
           accord->all.counts[tb__assembly_find(&accord->all, accord->pair->sides[side].peers[seat])];
}

static tb_status check_side(const tb__accord *accord, int side, int32_t seat) {
    const tb__accord_side *s = &accord->sides[side];
    for (int32_t i = 0; i < accord->pair->sides[side].size; i++) {
        if (i == seat || !counts(accord, side, i))
            continue;
        if (s->bucket_size[i] != s->bucket_size[seat])
            return tb__fail(TB_CONFLICT, "%s and %s have different bucket sizes for %s: %" PRId64 " and %" PRId64,
                            seat_name(accord, side, i), seat_name(accord, side, seat), accord->what, s->bucket_size[i],
                            s->bucket_size[seat]);
    }
    return TB_OK;
}

static tb_status read_side(tb__accord *accord, const tb__peer *from, tb__unpack *u) {
    uint32_t side = tb__unpack_u32(u), seat = tb__unpack_u32(u);
    uint64_t hash = tb__unpack_u64(u);
    int64_t bucket_size = tb__unpack_i64(u);
    if (u->failed || side > 1 || seat >= (uint32_t)accord->pair->sides[side].size ||
        accord->pair->sides[side].peers[seat] != from || bucket_size < 1)
        return tb__fail(TB_INVALID, "%s sent a manifest of %s that makes no sense", from->label, accord->what);
    tb__accord_side *s = &accord->sides[side];
    s->has_come[seat] = true;
    s->hashes[seat] = hash;
    s->bucket_size[seat] = bucket_size;
    return TB_OK;
}

static void take_manifest(tb__assembly *all, size_t at, tb__unpack *u) {
    tb__accord *accord = (tb__accord *)all;
    uint64_t layouts = tb__unpack_u64(u);
    int64_t staging_bytes = tb__unpack_i64(u);
    uint32_t nsides = tb__unpack_u32(u);
    tb_status status =
        nsides >= 1 && nsides <= 2 && staging_bytes >= TB__LEAST_STAGING
            ? TB_OK
            : tb__fail(TB_INVALID, "%s sent a manifest of %s that makes no sense", all->peers[at]->label, accord->what);
    accord->staging[at] = staging_bytes;
    if (status == TB_OK && layouts != hash_layouts(accord->pair))
        status = tb__fail(TB_CONFLICT, "%s has made pair '%s' with other layouts: it has to be made again",
                          all->peers[at]->label, accord->pair->name);
    for (uint32_t i = 0; i < nsides && status == TB_OK; i++)
        status = read_side(accord, all->peers[at], u);
    if (status != TB_OK)
        tb__accord_break(accord, status, true);
}

/* The peer has our manifest, and we have its. */
static void count_in(tb__assembly *all, size_t at) {
    tb__accord *accord = (tb__accord *)all;
    tb_status status = TB_OK;
    for (int side = 0; side < 2; side++) {
        for (int32_t seat = 0; seat < accord->pair->sides[side].size && status == TB_OK; seat++) {
            if (accord->pair->sides[side].peers[seat] == all->peers[at] && counts(accord, side, seat))
                status = check_side(accord, side, seat);
        }
    }
    if (status == TB_OK && all->nunknown == 0)
        status = check_seats(accord);
    if (status == TB_OK && all->nunknown == 0)
        status = send_bodies(accord);
    if (status != TB_OK)
        tb__accord_break(accord, status, true);
    else
        try_agree(accord);
}

tb_status tb__accord_announce(tb__accord *accord) {
    return tb__assembly_announce(&accord->all);
}
