/* The ranks of a pair agree on a batch. Each sends a manifest to all others: a hash of what its side has added, and to
 * some the list itself, so that everybody gets each side's list once. Ranks of a side whose hashes differ, and tensors
 * that the sides do not have alike, are found by everybody at once. Then there are flows, and messages go to them. */
#include "bus/world.h"

#include "base/log.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* The sentence is in tb_error_detail. */
static void break_tie(tb__tie *tie, tb_status status, bool tell) {
    if (tie->state == TIE_BROKEN)
        return;
    tie->state = TIE_BROKEN;
    tb__assembly_break(&tie->all, status, tell);
    for (int i = 0; i < 2; i++) {
        if (tie->flows[i])
            tb__flow_break(tie->flows[i], tb__fail(status, "%s", tie->all.why));
    }
    tb__engine_wake(tie->world->engine);
    tb__engine_signal(tie->world->engine);
}

static void on_broken(tb__assembly *all, tb_status status, const char *why) {
    break_tie((tb__tie *)all, tb__fail(status, "%s", why), false);
}

static void tell_flows(tb__tie *tie, size_t gone, const char *why) {
    for (int i = 0; i < 2; i++) {
        if (tie->flows[i])
            tb__flow_gone(tie->flows[i], gone, tie->knew[gone][i], why);
    }
}

/* What a rank had said does not count any more. */
static void forget_manifest(tb__tie *tie, size_t at) {
    tb__assembly_forget(&tie->all, at);
    for (int side = 0; side < 2; side++) {
        tb__tie_side *s = &tie->sides[side];
        for (int32_t seat = 0; seat < tie->pair->sides[side].size; seat++) {
            if (tie->pair->sides[side].peers[seat] != tie->all.peers[at] || !s->has_come[seat])
                continue;
            s->has_come[seat] = false;
            if (!s->is_here && s->is_known && s->list_from == seat) {
                tb__tensors_fini(&s->tensors);
                s->is_known = false;
            }
        }
    }
}

/* A rank that has destroyed the batch. What needs it no more goes on: if it had agreed, everybody has come, although
 * their manifests may still be on their way to us. If it did so because something went wrong, that is the reason here,
 * too: it may have heard of a dead rank before us. */
static void let_go(tb__assembly *all, size_t at, tb__unpack *message) {
    tb__tie *tie = (tb__tie *)all;
    bool had_agreed = tb__unpack_u32(message) != 0;
    for (int i = 0; i < 2; i++)
        tie->knew[at][i] = tb__unpack_u64(message);
    uint32_t code = tb__unpack_u32(message);
    const char *why = tb__unpack_string(message);
    if (tie->state == TIE_WAITING && (!had_agreed || message->failed)) {
        forget_manifest(tie, at); /* whatever went wrong was the batch it had before, or is heard of here, too */
        return;
    }
    if (tie->state == TIE_AGREED && !message->failed && code > 0 && code <= 64)
        break_tie(tie, tb__fail((tb_status) - (int)code, "%s", why), false);
    tell_flows(tie, at, why);
}

static int compare_tensors(const void *a, const void *b) {
    return strcmp(((const tb__tensor *)a)->name, ((const tb__tensor *)b)->name);
}

/* ---- Making one ------------------------------------------------------------------------------------------------ */

/* Neither name has control characters. */
static void name_key(const tb_batch *batch, const tb_pair *pair, char *out, size_t room) {
    snprintf(out, room, "batch\n%s\n%s", batch->name, pair->name);
}

static tb_status assemble(tb__tie *tie) {
    const tb__pair_side *sides = tie->pair->sides;
    char key[2 * TB__DIRECTORY_MAX_NAME + 16];
    size_t n = (size_t)sides[0].size + (size_t)sides[1].size;
    tb__peer **peers = tb__malloc(n, sizeof *peers);
    tie->knew = tb__calloc(n, sizeof *tie->knew);
    tie->staging = tb__calloc(n, sizeof *tie->staging);
    name_key(tie->batch, tie->pair, key, sizeof key);
    for (size_t i = 0; peers && i < n; i++)
        peers[i] = i < (size_t)sides[0].size ? sides[0].peers[i] : sides[1].peers[i - (size_t)sides[0].size];
    tb_status status = tb__assembly_init(&tie->all, tie->world, key, tie->what, peers, peers ? n : 0);
    free(peers);
    return peers && tie->knew && tie->staging ? status : TB_NO_MEMORY;
}

/* Hosts are numbered as they appear by rank: alike on every rank. */
static tb_status number_hosts(tb__tie *tie) {
    int32_t most = tie->all.peers[tie->all.npeers - 1]->rank, count = 0;
    tie->nhosts = (size_t)most + 1;
    tie->hosts = tb__calloc(tie->nhosts, sizeof *tie->hosts);
    if (!tie->hosts)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < tie->all.npeers; i++) {
        int32_t number = count;
        for (size_t j = 0; j < i && number == count; j++) {
            if (strcmp(tie->all.peers[i]->host, tie->all.peers[j]->host) == 0)
                number = tie->hosts[tie->all.peers[j]->rank];
        }
        tie->hosts[tie->all.peers[i]->rank] = number;
        count += number == count;
    }
    if (count == 1) {
        free(tie->hosts);
        tie->hosts = NULL;
        tie->nhosts = 0;
    }
    return TB_OK;
}

/* What this process has added for one side of the pair. */
static tb_status collect(tb__tie *tie, int side) {
    tb__tie_side *s = &tie->sides[side];
    const tb__tensors *all = &tie->batch->tensors;
    for (size_t i = 0; i < all->list.count; i++) {
        const tb__tensor *from = &all->list.item[i];
        if (strcmp(from->pair->name, tie->pair->name) != 0 || from->pair->side != side)
            continue;
        s->is_here = true;
        s->index = from->pair->index;
        if (!tb__vec_reserve(&s->tensors.list, 1))
            return TB_NO_MEMORY;
        tb__tensor *t = &s->tensors.list.item[s->tensors.list.count++];
        *t = *from;
        t->name = tb__strdup(from->name);
        t->layout = from->layout ? tb__strdup(from->layout) : NULL;
        if (!t->name || (from->layout && !t->layout))
            return TB_NO_MEMORY;
    }
    s->is_known = s->is_here;
    if (!s->is_here)
        return TB_OK;
    qsort(s->tensors.list.item, s->tensors.list.count, sizeof *s->tensors.list.item, compare_tensors);
    for (size_t i = 1; i < s->tensors.list.count; i++) {
        const char *name = s->tensors.list.item[i].name;
        if (strcmp(s->tensors.list.item[i - 1].name, name) == 0)
            return tb__fail(TB_INVALID, "tensor '%.100s' is in batch '%s' twice", name, tie->batch->name);
    }
    tb__tensors_pack(&s->manifest, &s->tensors);
    return s->manifest.failed ? TB_NO_MEMORY : TB_OK;
}

static void on_message(tb__port *port, tb__peer *from, tb__unpack *message);
static tb_status send_manifest(tb__assembly *all, size_t to);
static void take_manifest(tb__assembly *all, size_t at, tb__unpack *u);
static void count_in(tb__assembly *all, size_t at);

static void on_lost(tb__port *port, tb__peer *peer) {
    tb__tie *tie = (tb__tie *)port;
    size_t at = tb__assembly_find(&tie->all, peer);
    if (at == TB__NOWHERE || tie->all.is_gone[at])
        return;
    for (int i = 0; i < 2; i++) {
        if (tie->flows[i])
            tb__flow_lost(tie->flows[i], at);
    }
    break_tie(tie, tb__fail(TB_LOST, "%s was lost during %s: %s", peer->label, tie->what, peer->why ? peer->why : "?"),
              true);
}

static tb_status init(tb__tie *tie) {
    TB_TRY(assemble(tie));
    TB_TRY(number_hosts(tie));
    for (int side = 0; side < 2; side++) {
        tb__tie_side *s = &tie->sides[side];
        size_t size = (size_t)tie->pair->sides[side].size;
        TB_TRY(collect(tie, side));
        s->hashes = tb__calloc(size, sizeof *s->hashes);
        s->bucket_size = tb__calloc(size, sizeof *s->bucket_size);
        s->has_come = tb__calloc(size, sizeof *s->has_come);
        if (!s->hashes || !s->bucket_size || !s->has_come)
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

tb_status tb__tie_create(tb_batch *batch, tb_pair *pair, tb__tie **out) {
    tb_world *world = batch->world;
    char key[2 * TB__DIRECTORY_MAX_NAME + 16];
    name_key(batch, pair, key, sizeof key);
    if (tb__assembly_exists(world, key))
        return tb__fail(TB_CONFLICT, "there is a batch '%s' of pair '%s' already", batch->name, pair->name);
    tb__tie *tie = tb__calloc(1, sizeof *tie);
    if (!tie)
        return TB_NO_MEMORY;
    tie->world = world;
    tie->batch = batch;
    tie->pair = pair;
    tie->staging_bytes = INT64_MAX;
    pair->refs++;
    snprintf(tie->what, sizeof tie->what, "batch '%s'", batch->name);
    tie->all.port.message = on_message;
    tie->all.port.lost = on_lost;
    tie->all.tell = send_manifest;
    tie->all.come = take_manifest;
    tie->all.counted = count_in;
    tie->all.broken = on_broken;
    tie->all.gone = let_go;
    tb_status status = init(tie);
    if (status != TB_OK) {
        tb__tie_destroy(tie);
        return status;
    }
    *out = tie;
    return TB_OK;
}

void tb__tie_destroy(tb__tie *tie) {
    tb__pack farewell = {0};
    tb__pack_u32(&farewell, tie->has_agreed);
    for (int side = 0; side < 2; side++)
        tb__pack_u64(&farewell, tie->flows[side] ? tb__flow_started(tie->flows[side]) : 0);
    tb__pack_u32(&farewell, tie->state == TIE_BROKEN ? (uint32_t)-tie->all.status : 0);
    const char *why = tie->state == TIE_BROKEN ? tie->all.why : "";
    for (int side = 0; side < 2 && !*why; side++)
        why = tie->flows[side] ? tb__flow_last_failure(tie->flows[side]) : "";
    tb__pack_string(&farewell, why);
    tb__assembly_leave(&tie->all, &farewell);
    tb__pack_fini(&farewell);
    for (int side = 0; side < 2; side++) {
        tb__flow_destroy(tie->flows[side]);
        tb__tensors_fini(&tie->sides[side].tensors);
        tb__pack_fini(&tie->sides[side].manifest);
        free(tie->sides[side].hashes);
        free(tie->sides[side].bucket_size);
        free(tie->sides[side].has_come);
    }
    for (size_t i = 0; i < tie->layouts.count; i++)
        tb_layout_destroy(tie->layouts.item[i]);
    free(tie->layouts.item);
    for (size_t i = 0; i < tie->backlog.count; i++)
        free(tie->backlog.item[i].data);
    free(tie->backlog.item);
    tb__pair_unref(tie->pair);
    free(tie->hosts);
    free(tie->knew);
    free(tie->staging);
    tb__assembly_fini(&tie->all);
    free(tie);
}

/* ---- Comparing ------------------------------------------------------------------------------------------------- */

static void add_shape(char *out, size_t room, const tb_shape *shape) {
    size_t at = 0;
    out[0] = '\0';
    for (int d = 0; d < shape->ndim && at < room; d++)
        at += (size_t)snprintf(out + at, room - at, "%s%" PRId64, d ? "," : "", shape->dim[d]);
}

static tb_status compare_sides(const tb__tie *tie) {
    const tb__pair_side *sides = tie->pair->sides;
    const tb__tensors *a = &tie->sides[0].tensors, *b = &tie->sides[1].tensors;
    size_t i = 0, j = 0;
    while (i < a->list.count || j < b->list.count) {
        const tb__tensor *x = i < a->list.count ? &a->list.item[i] : NULL;
        const tb__tensor *y = j < b->list.count ? &b->list.item[j] : NULL;
        int c = x && y ? strcmp(x->name, y->name) : x ? -1 : 1;
        const tb__tensor *lone = c < 0 ? x : c > 0 ? y : NULL;
        if (!x || !y || lone)
            return tb__fail(TB_CONFLICT, "%s: tensor '%.100s' was added by group '%s' but not by group '%s'", tie->what,
                            lone ? lone->name : "", sides[c > 0].group, sides[c < 0].group);
        if (x->shape.ndim != y->shape.ndim ||
            memcmp(x->shape.dim, y->shape.dim, (size_t)x->shape.ndim * sizeof *x->shape.dim) != 0) {
            char left[96], right[96];
            add_shape(left, sizeof left, &x->shape);
            add_shape(right, sizeof right, &y->shape);
            return tb__fail(TB_CONFLICT, "%s: tensor '%.100s' has shape [%s] in group '%s' but [%s] in group '%s'",
                            tie->what, x->name, left, sides[0].group, right, sides[1].group);
        }
        i++;
        j++;
    }
    return TB_OK;
}

/* The layout of a tensor on a side, made once for each text. */
static tb_status get_layout(tb__tie *tie, int side, const tb__tensor *t, const char **texts, size_t *ntexts,
                            size_t first, const tb_layout **out) {
    const char *text = t->layout ? t->layout : "";
    for (size_t i = 0; i < *ntexts; i++) {
        if (strcmp(texts[i], text) == 0) {
            *out = tie->layouts.item[first + i];
            return TB_OK;
        }
    }
    tb_layout *layout;
    if (!tb__vec_reserve(&tie->layouts, 1))
        return TB_NO_MEMORY;
    TB_TRY(tb__pair_layout(tie->pair, side, t->layout, &layout));
    tie->layouts.item[tie->layouts.count++] = layout;
    texts[(*ntexts)++] = text;
    *out = layout;
    return TB_OK;
}

/* Each side's layouts, one per tensor. */
static tb_status get_layouts(tb__tie *tie, int side, const tb_layout **out) {
    const tb__tensors *tensors = &tie->sides[side].tensors;
    const char **texts = tb__malloc(tensors->list.count + 1, sizeof *texts);
    size_t ntexts = 0, first = tie->layouts.count;
    tb_status status = texts ? TB_OK : TB_NO_MEMORY;
    for (size_t i = 0; i < tensors->list.count && status == TB_OK; i++) {
        status = get_layout(tie, side, &tensors->list.item[i], texts, &ntexts, first, &out[i]);
        if (status != TB_OK)
            tb__prefix_detail("tensor '%.100s'", tensors->list.item[i].name);
    }
    free(texts);
    return status;
}

/* ---- Flows ----------------------------------------------------------------------------------------------------- */

static tb_status bind(const tb__tie *tie, int side, size_t i, tb_binding *out) {
    const tb__tensor *t = &tie->sides[side].tensors.list.item[i];
    if (tie->sides[side].is_here) {
        *out = t->binding;
        return TB_OK;
    }
    tb_shape nothing = {.ndim = t->shape.ndim};
    if (nothing.ndim == 0) /* a scalar always has an element; a row of none does not */
        nothing = (tb_shape){.ndim = 1};
    return tb_binding_contiguous(NULL, 0, t->dtype, &nothing, out);
}

static tb_status make_flow(tb__tie *tie, int src, const tb_layout **layouts[2], tb__flow_tensor *tensors) {
    int dst = !src;
    size_t n = tie->sides[0].tensors.list.count;
    for (size_t i = 0; i < n; i++) {
        const tb__tensor *from = &tie->sides[src].tensors.list.item[i], *to = &tie->sides[dst].tensors.list.item[i];
        tensors[i] = (tb__flow_tensor){.key = i,
                                       .spec = {.name = from->name,
                                                .shape = from->shape,
                                                .src = layouts[src][i],
                                                .dst = layouts[dst][i],
                                                .src_dtype = from->dtype,
                                                .dst_dtype = to->dtype,
                                                .wire_dtype = from->wire_dtype,
                                                .group = to->group}};
        TB_TRY(bind(tie, src, i, &tensors[i].src));
        TB_TRY(bind(tie, dst, i, &tensors[i].dst));
    }
    const tb_batch_opts *o = &tie->batch->opts;
    tb__flow_opts opts = {.engine = tie->world->engine,
                          .rank = tie->world->rank,
                          .direction = (uint32_t)src,
                          .peers = tie->all.peers,
                          .ports = tie->all.ports,
                          .npeers = tie->all.npeers,
                          .lead = tb__assembly_find(&tie->all, tie->pair->sides[src].peers[0]),
                          .tensors = tensors,
                          .ntensors = n,
                          .cache = tie->world->cache,
                          .hosts = tie->hosts,
                          .nhosts = tie->nhosts,
                          .what = tie->what,
                          .bucket_size = tie->sides[src].bucket_size[0],
                          .staging_bytes = tie->staging_bytes,
                          .own_staging_bytes = o->staging_bytes,
                          .max_in_flight = o->max_in_flight,
                          .group_window = o->group_window,
                          .staged = o->staged,
                          .snapshot = o->snapshot};
    return tb__flow_create(&opts, &tie->flows[src]);
}

static tb_status make_flows(tb__tie *tie) {
    size_t n = tie->sides[0].tensors.list.count;
    const tb_layout **layouts[2] = {tb__malloc(n + 1, sizeof *layouts[0]), tb__malloc(n + 1, sizeof *layouts[1])};
    tb__flow_tensor *tensors = tb__malloc(n + 1, sizeof *tensors);
    tb_status status = layouts[0] && layouts[1] && tensors ? TB_OK : TB_NO_MEMORY;
    for (int side = 0; side < 2 && status == TB_OK; side++)
        status = get_layouts(tie, side, layouts[side]);
    for (int side = 0; side < 2 && status == TB_OK; side++)
        status = make_flow(tie, side, layouts, tensors);
    free(layouts[0]);
    free(layouts[1]);
    free(tensors);
    return status;
}

static void pass_on(tb__tie *tie, size_t peer, tb__unpack *message) {
    uint32_t direction = tb__unpack_u32(message);
    if (message->failed || direction > 1 || !tb__flow_message(tie->flows[direction], peer, message))
        break_tie(tie,
                  tb__fail(TB_INVALID, "%s sent a message about %s that makes no sense", tie->all.peers[peer]->label,
                           tie->what),
                  true);
}

/* Every rank has come, but one that is in both groups may have added tensors for one of them only. */
static tb_status check_seats(const tb__tie *tie) {
    for (int side = 0; side < 2; side++) {
        for (int32_t i = 0; i < tie->pair->sides[side].size; i++) {
            if (!tie->sides[side].has_come[i])
                return tb__fail(TB_CONFLICT, "%s has added no tensors to %s as %s %" PRId32,
                                tie->pair->sides[side].peers[i]->label, tie->what, tie->pair->sides[side].group, i);
        }
        if (!tie->sides[side].is_known)
            return tb__fail(TB_INTERNAL, "nobody sent the tensors of group '%s'", tie->pair->sides[side].group);
    }
    return TB_OK;
}

/* Everybody has come: compare, and begin. */
static void try_agree(tb__tie *tie) {
    if (tie->state != TIE_WAITING || tie->all.nunknown > 0)
        return;
    for (size_t i = 0; i < tie->all.npeers; i++)
        tie->staging_bytes = tie->staging[i] < tie->staging_bytes ? tie->staging[i] : tie->staging_bytes;
    tb_status status = check_seats(tie);
    if (status == TB_OK)
        status = compare_sides(tie);
    if (status == TB_OK)
        status = make_flows(tie);
    if (status != TB_OK) {
        break_tie(tie, status, true);
        return;
    }
    tie->state = TIE_AGREED;
    tie->has_agreed = true;
    for (size_t i = 0; i < tie->backlog.count; i++) {
        struct tb__backlog *b = &tie->backlog.item[i];
        tb__unpack message = {b->data, b->data + b->nbytes, false};
        if (tie->state == TIE_AGREED)
            pass_on(tie, b->peer, &message);
        free(b->data);
    }
    tie->backlog.count = 0;
    for (size_t i = 0; i < tie->all.npeers; i++) {
        if (tie->all.is_gone[i])
            tell_flows(tie, i, "");
    }
    tb__engine_signal(tie->world->engine);
}

static void on_message(tb__port *port, tb__peer *from, tb__unpack *message) {
    tb__tie *tie = (tb__tie *)port;
    size_t at = tb__assembly_find(&tie->all, from);
    if (at == TB__NOWHERE || tie->state == TIE_BROKEN)
        return;
    if (tie->state == TIE_AGREED) {
        pass_on(tie, at, message);
        return;
    }
    size_t nbytes = (size_t)(message->end - message->at);
    unsigned char *copy = tb__malloc(nbytes, 1);
    if (copy)
        memcpy(copy, message->at, nbytes);
    if (!copy || !tb__vec_push(&tie->backlog, (struct tb__backlog){at, copy, nbytes})) {
        free(copy);
        break_tie(tie, TB_NO_MEMORY, true);
    }
}

/* ---- Manifests, out and in ------------------------------------------------------------------------------------- */

static tb_status send_manifest(tb__assembly *all, size_t to) {
    tb__tie *tie = (tb__tie *)all;
    tb__pack pack = {0};
    tb__pack_i64(&pack, tie->batch->opts.staging_bytes);
    tb__pack_u32(&pack, (uint32_t)tie->sides[0].is_here + (uint32_t)tie->sides[1].is_here);
    for (int side = 0; side < 2; side++) {
        const tb__tie_side *s = &tie->sides[side];
        if (!s->is_here)
            continue;
        tb__pack_u32(&pack, (uint32_t)side);
        tb__pack_u32(&pack, (uint32_t)s->index);
        tb__pack_u64(&pack, tb__tensors_hash(&s->manifest));
        tb__pack_i64(&pack, tie->batch->opts.bucket_size);
        bool takes_list = (int32_t)(to % (size_t)tie->pair->sides[side].size) == s->index;
        tb__pack_bytes(&pack, s->manifest.data, takes_list ? s->manifest.count : 0);
    }
    return tb__assembly_send(all, to, &pack);
}

static const char *seat_name(const tb__tie *tie, int side, int32_t seat) {
    return tie->pair->sides[side].peers[seat]->label;
}

/* Whether what the seat sent is about this very batch. */
static bool counts(const tb__tie *tie, int side, int32_t seat) {
    return tie->sides[side].has_come[seat] &&
           tie->all.counts[tb__assembly_find(&tie->all, tie->pair->sides[side].peers[seat])];
}

static tb_status check_side(const tb__tie *tie, int side, int32_t seat) {
    const tb__tie_side *s = &tie->sides[side];
    for (int32_t i = 0; i < tie->pair->sides[side].size; i++) {
        if (i == seat || !counts(tie, side, i))
            continue;
        if (s->hashes[i] != s->hashes[seat])
            return tb__fail(TB_CONFLICT, "%s and %s added different tensors to %s, which is of pair '%s'",
                            seat_name(tie, side, i), seat_name(tie, side, seat), tie->what, tie->pair->name);
        if (s->bucket_size[i] != s->bucket_size[seat])
            return tb__fail(TB_CONFLICT, "%s and %s have different bucket sizes for %s: %" PRId64 " and %" PRId64,
                            seat_name(tie, side, i), seat_name(tie, side, seat), tie->what, s->bucket_size[i],
                            s->bucket_size[seat]);
    }
    return TB_OK;
}

static tb_status read_side(tb__tie *tie, const tb__peer *from, tb__unpack *u) {
    uint32_t side = tb__unpack_u32(u), seat = tb__unpack_u32(u);
    uint64_t hash = tb__unpack_u64(u);
    int64_t bucket_size = tb__unpack_i64(u);
    size_t nbytes;
    const void *list = tb__unpack_bytes(u, &nbytes);
    if (u->failed || side > 1 || seat >= (uint32_t)tie->pair->sides[side].size ||
        tie->pair->sides[side].peers[seat] != from || bucket_size < 1)
        return tb__fail(TB_INVALID, "%s sent a manifest of %s that makes no sense", from->label, tie->what);
    tb__tie_side *s = &tie->sides[side];
    s->has_come[seat] = true;
    s->hashes[seat] = hash;
    s->bucket_size[seat] = bucket_size;
    if (s->is_known || nbytes == 0)
        return TB_OK;
    if (!tb__tensors_unpack(list, nbytes, &s->tensors))
        return tb__fail(TB_INVALID, "%s sent a list of tensors of %s that makes no sense", from->label, tie->what);
    s->is_known = true;
    s->list_from = (int32_t)seat;
    return TB_OK;
}

static void take_manifest(tb__assembly *all, size_t at, tb__unpack *u) {
    tb__tie *tie = (tb__tie *)all;
    int64_t staging_bytes = tb__unpack_i64(u);
    uint32_t nsides = tb__unpack_u32(u);
    tb_status status =
        nsides >= 1 && nsides <= 2 && staging_bytes > 0
            ? TB_OK
            : tb__fail(TB_INVALID, "%s sent a manifest of %s that makes no sense", all->peers[at]->label, tie->what);
    tie->staging[at] = staging_bytes;
    for (uint32_t i = 0; i < nsides && status == TB_OK; i++)
        status = read_side(tie, all->peers[at], u);
    if (status != TB_OK)
        break_tie(tie, status, true);
}

/* The peer has our manifest, and we have its. */
static void count_in(tb__assembly *all, size_t at) {
    tb__tie *tie = (tb__tie *)all;
    tb_status status = TB_OK;
    for (int side = 0; side < 2; side++) {
        for (int32_t seat = 0; seat < tie->pair->sides[side].size && status == TB_OK; seat++) {
            if (tie->pair->sides[side].peers[seat] == all->peers[at] && counts(tie, side, seat))
                status = check_side(tie, side, seat);
        }
    }
    if (status != TB_OK)
        break_tie(tie, status, true);
    else
        try_agree(tie);
}

tb_status tb__tie_announce(tb__tie *tie) {
    return tb__assembly_announce(&tie->all);
}
