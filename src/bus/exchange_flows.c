/* Matches the tensors of the two sides, in each direction, and makes the flows. */
#include "bus/exchange.h"

#include "layout/overlap.h"
#include "reshard/names.h"
#include "reshard/pattern.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* The ties and ignored patterns of all ranks, each once. */
typedef struct matching {
    TB_VEC(tb_tie) ties;
    TB_VEC(const char *) ignored;
    const char **names[2]; /* by side */
    tb__arena arena;
} matching;

static int compare_ties(const void *a, const void *b) {
    const tb_tie *x = a, *y = b;
    int c = strcmp(x->name, y->name);
    return c ? c : strcmp(x->canonical, y->canonical);
}

static tb_status collect_list(matching *m, const tb__tensor_list *list) {
    for (size_t i = 0; i < list->ties.count; i++) {
        if (!tb__vec_push(&m->ties, list->ties.item[i]))
            return TB_NO_MEMORY;
    }
    for (size_t i = 0; i < list->ignored.count; i++) {
        if (!tb__vec_push(&m->ignored, list->ignored.item[i]))
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

static tb_status add_seat_ties(matching *m, const tb_tie *tie, int32_t nseats) {
    for (int32_t seat = 0; seat < nseats; seat++) {
        const char *from[] = {tie->name, tie->canonical};
        char *to[2];
        for (int i = 0; i < 2; i++) {
            size_t room = strlen(from[i]) + 16;
            if (!(to[i] = tb__arena_alloc(&m->arena, room, 1)))
                return TB_NO_MEMORY;
            snprintf(to[i], room, "%s@%" PRId32, from[i], seat);
        }
        if (!tb__vec_push(&m->ties, ((tb_tie){to[0], to[1]})))
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

static tb_status is_name_ignored(const matching *m, const char *name, bool *out) {
    *out = false;
    for (size_t i = 0; i < m->ignored.count && !*out; i++) {
        tb__pattern pattern;
        tb__capture unused[TB__CAPTURES];
        TB_TRY(tb__pattern_init(&pattern, m->ignored.item[i]));
        *out = tb__pattern_match(&pattern, name, unused);
        tb__pattern_fini(&pattern);
    }
    return TB_OK;
}

/* Whether one of the patterns is for the tensor of this name without its seat. */
static tb_status is_seat_ignored(const matching *m, const char *name, bool *out) {
    char *bare = tb__strdup(name), *seat = bare ? strrchr(bare, '@') : NULL;
    if (seat)
        *seat = '\0';
    tb_status status = bare ? is_name_ignored(m, bare, out) : TB_NO_MEMORY;
    free(bare);
    return status;
}

/* Of a pair without layouts: ties and patterns are those of each seat's tensors. */
static tb_status match_seats(matching *m, const tb__exchange *exchange) {
    TB_VEC(const char *) ignored = {0};
    size_t nties = m->ties.count;
    tb_status status = TB_OK;
    for (size_t i = 0; i < nties && status == TB_OK; i++) {
        tb_tie tie = m->ties.item[i];
        status = add_seat_ties(m, &tie, exchange->pair->sides[0].size);
    }
    for (int side = 0; side < 2 && m->ignored.count > 0; side++) {
        for (size_t i = 0; i < exchange->sides[side].tensors.count && status == TB_OK; i++) {
            bool is_ignored;
            status = is_seat_ignored(m, m->names[side][i], &is_ignored);
            if (status == TB_OK && is_ignored && !tb__vec_push(&ignored, m->names[side][i]))
                status = TB_NO_MEMORY;
        }
    }
    for (size_t i = 0; i < ignored.count && status == TB_OK; i++)
        status = tb__vec_push(&m->ignored, ignored.item[i]) ? TB_OK : TB_NO_MEMORY;
    free(ignored.item);
    return status;
}

static tb_status matching_init(matching *m, const tb__exchange *exchange) {
    for (int side = 0; side < 2; side++) {
        const tb__exchange_side *s = &exchange->sides[side];
        for (size_t i = 0; i < s->used.count; i++)
            TB_TRY(collect_list(m, s->used.item[i]));
        m->names[side] = tb__malloc(s->tensors.count, sizeof *m->names[side]);
        if (!m->names[side])
            return TB_NO_MEMORY;
        for (size_t i = 0; i < s->tensors.count; i++)
            m->names[side][i] = s->tensors.item[i].desc->name;
    }
    if (!tb__pair_has_layout(exchange->pair->sides[0].layout))
        TB_TRY(match_seats(m, exchange));
    tb__vec_sort_unique(&m->ties, compare_ties);
    tb__vec_sort_unique(&m->ignored, tb__compare_strings);
    return TB_OK;
}

static void matching_fini(matching *m) {
    free(m->ties.item);
    free(m->ignored.item);
    free(m->names[0]);
    free(m->names[1]);
    tb__arena_fini(&m->arena);
}

static tb_status check_shapes(const tb__exchange *exchange, int src, const tb__tensor_description *from,
                              const tb__tensor_description *to) {
    const tb__pair_side *sides = exchange->pair->sides;
    if (from->shape.ndim == to->shape.ndim &&
        memcmp(from->shape.dim, to->shape.dim, (size_t)to->shape.ndim * sizeof *to->shape.dim) == 0)
        return TB_OK;
    char left[96], right[96];
    tb__shape_text(&from->shape, left, sizeof left);
    tb__shape_text(&to->shape, right, sizeof right);
    if (strcmp(from->name, to->name) == 0)
        return tb__fail(TB_CONFLICT, "%s: tensor '%.100s' has shape [%s] in group '%s' but [%s] in group '%s'",
                        exchange->what, from->name, left, sides[src].group, right, sides[!src].group);
    return tb__fail(TB_CONFLICT,
                    "%s: tensor '%.100s' has shape [%s] in group '%s' but '%.100s', which is tied to it, [%s] in group "
                    "'%s'",
                    exchange->what, from->name, left, sides[src].group, to->name, right, sides[!src].group);
}

/* In the order of the targets' names. */
static tb_status match_tensors(const tb__exchange *exchange, int src, const matching *m, tb_match *out) {
    const tb__pair_side *sides = exchange->pair->sides;
    const tb__exchange_side *from = &exchange->sides[src], *to = &exchange->sides[!src];
    tb_match_opts opts = {.size = sizeof opts,
                          .ties = m->ties.item,
                          .nties = m->ties.count,
                          .ignored = m->ignored.item,
                          .nignored = m->ignored.count};
    /* The direction of the batch is not known yet, so messages name the groups. */
    char here[TB__DIRECTORY_MAX_NAME + 16], there[sizeof here];
    snprintf(here, sizeof here, "group '%s'", sides[src].group);
    snprintf(there, sizeof there, "group '%s'", sides[!src].group);
    tb_status status =
        tb__match_names(m->names[src], from->tensors.count, m->names[!src], to->tensors.count, &opts, here, there, out);
    if (status != TB_OK) /* the ranks' options contradict each other */
        return tb__fail_within(status == TB_INVALID ? TB_CONFLICT : status, "%s", exchange->what);
    for (size_t i = 0; i < out->nmatched && status == TB_OK; i++)
        status =
            check_shapes(exchange, src, from->tensors.item[out->source[i]].desc, to->tensors.item[out->target[i]].desc);
    if (status != TB_OK)
        tb_match_fini(out);
    return status;
}

/* Whether the side has declared a tie of the tensor; `length` is that of its name. */
static bool has_declared_tie(const tb__exchange_side *side, const char *name, size_t length) {
    for (size_t i = 0; i < side->used.count; i++) {
        const tb__tensor_list *list = side->used.item[i];
        for (size_t k = 0; k < list->ties.count; k++) {
            const char *ends[] = {list->ties.item[k].name, list->ties.item[k].canonical};
            for (int e = 0; e < 2; e++) {
                if (strlen(ends[e]) == length && memcmp(ends[e], name, length) == 0)
                    return true;
            }
        }
    }
    return false;
}

/* The name that a tensor of this name is tied to; NULL: none. */
static const char *find_tied_name(const matching *m, const char *name) {
    for (size_t i = 0; i < m->ties.count; i++) {
        if (strcmp(m->ties.item[i].name, name) == 0)
            return m->ties.item[i].canonical;
        if (strcmp(m->ties.item[i].canonical, name) == 0)
            return m->ties.item[i].name;
    }
    return NULL;
}

/* A source that is not sent, because the other side has it tied to another. Both sources may have other values, which
 * only their own side can know: unless it has declared the tie, too, this direction can't be used. */
static tb_status find_lost_tie(tb__exchange *exchange, int src, const matching *m, const tb_match *pairs) {
    const tb__exchange_side *from = &exchange->sides[src];
    const tb__pair_side *sides = exchange->pair->sides;
    bool *is_sent = tb__calloc(from->tensors.count, sizeof *is_sent), is_ignored = false;
    tb_status status = is_sent ? TB_OK : TB_NO_MEMORY;
    for (size_t i = 0; i < pairs->nmatched && status == TB_OK; i++)
        is_sent[pairs->source[i]] = true;
    for (size_t i = 0; i < from->tensors.count && m->ties.count > 0 && status == TB_OK; i++) {
        const char *name = m->names[src][i], *other = is_sent[i] ? NULL : find_tied_name(m, name);
        const char *seat = tb__pair_has_layout(sides[0].layout) ? NULL : strrchr(name, '@');
        if (!other || has_declared_tie(from, name, seat ? (size_t)(seat - name) : strlen(name)))
            continue;
        status = is_name_ignored(m, name, &is_ignored);
        if (status != TB_OK || is_ignored)
            continue;
        (void)tb__fail(TB_CONFLICT,
                       "%s: tensor '%.100s' of group '%s' would be lost: group '%s' has it tied to '%.100s', and group "
                       "'%s' does not; if the two are equal there, declare the tie there, too",
                       exchange->what, name, sides[src].group, sides[!src].group, other, sides[src].group);
        exchange->lost_ties[src] = tb__strdup(tb_error_detail());
        status = exchange->lost_ties[src] ? TB_OK : TB_NO_MEMORY;
        break;
    }
    free(is_sent);
    return status;
}

static tb_status bind_side_tensor(const tb__side_tensor *held, tb_binding *out) {
    if (held->mine) {
        *out = held->mine->binding;
        return TB_OK;
    }
    tb_shape nothing = {.ndim = held->desc->shape.ndim};
    if (nothing.ndim == 0) /* a scalar always has an element; a row of none does not */
        nothing = (tb_shape){.ndim = 1};
    return tb_binding_contiguous(NULL, 0, held->desc->dtype, &nothing, out);
}

static tb_status make_tensor(const tb__side_tensor *from, const tb__side_tensor *to, uint64_t key,
                             tb__flow_tensor *out) {
    *out = (tb__flow_tensor){.key = key,
                             .spec = {.size = sizeof(tb_tensor_spec),
                                      .name = to->desc->name,
                                      .shape = to->desc->shape,
                                      .src = from->layout,
                                      .dst = to->layout,
                                      .src_dtype = from->desc->dtype,
                                      .dst_dtype = to->desc->dtype,
                                      .wire_dtype = from->desc->wire_dtype,
                                      .group = to->desc->group}};
    if (from->memory_kind || to->memory_kind)
        out->spec.memory_kind = tb__hash(tb__hash(1, from->memory_kind), to->memory_kind);
    if (to->mine) {
        out->padding = to->mine->padding;
        out->npadding = to->mine->npadding;
    }
    out->src_invalidated = from->mine ? &from->mine->is_invalidated : NULL;
    out->dst_invalidated = to->mine ? &to->mine->is_invalidated : NULL;
    out->src_shift = from->mine ? &from->mine->shift : NULL;
    out->dst_shift = to->mine ? &to->mine->shift : NULL;
    TB_TRY(bind_side_tensor(from, &out->src));
    return bind_side_tensor(to, &out->dst);
}

static const tb__encoded *encoded_of(const tb__side_tensor *held) {
    return held->mine && held->mine->encode && held->mine->encoded.rows ? &held->mine->encoded : NULL;
}

/* The conversion of a tensor between the two sides. */
static tb__convert_how get_conversion(const tb__exchange *exchange, const tb__side_tensor *from,
                                      const tb__side_tensor *to) {
    return (tb__convert_how){.src_encoding = from->desc->encode ? &from->desc->encoding : NULL,
                             .dst_encoding = to->desc->encode ? &to->desc->encoding : NULL,
                             .src = encoded_of(from),
                             .dst = encoded_of(to),
                             .scale_group = to->desc->scale_group,
                             .is_sent_transformed = from->desc->is_transformed,
                             .is_received_transformed = to->desc->is_transformed,
                             .is_whole = from->desc->is_whole || to->desc->is_whole,
                             .transform = exchange->batch->opts.transform};
}

static bool are_mirrors(const tb__exchange *exchange, int src) {
    bool are_all = true;
    for (size_t i = 0; i < exchange->received[src].count; i++)
        are_all &= exchange->received[src].item[i]->mirrored.is_all;
    return are_all;
}

static tb_status create_exchange_flow(tb__exchange *exchange, int src, tb__flow_tensor *tensors,
                                      const tb__convert_how *how, size_t ntensors) {
    const tb_batch_opts *o = &exchange->batch->opts;
    tb__flow_opts opts = {.loop = exchange->world->loop,
                          .rank = exchange->world->rank,
                          .direction = (uint32_t)src,
                          .peers = exchange->handshake.peers,
                          .ports = exchange->handshake.ports,
                          .npeers = exchange->handshake.npeers,
                          .comm = exchange->handshake.comm,
                          .lead = tb__handshake_find(&exchange->handshake, exchange->pair->sides[src].peers[0]),
                          .tensors = tensors,
                          .ntensors = ntensors,
                          .get_ir = tb__plans_get,
                          .get_ir_arg = exchange->world,
                          .hosts = exchange->hosts,
                          .nhosts = exchange->nhosts,
                          .what = exchange->what,
                          .bucket_size = exchange->sides[src].seats[0].bucket_size,
                          .staging_bytes = exchange->staging_bytes,
                          .own_staging_bytes = o->staging_bytes,
                          .max_in_flight = o->max_in_flight,
                          .group_window = o->group_window,
                          .staged = o->staged,
                          .checksum = exchange->checksum,
                          .snapshot = o->snapshot,
                          .targets_are_mirrors = are_mirrors(exchange, src),
                          .mark = exchange->batch->mark};
    tb__commit_own_flow(&exchange->receives[src], &opts.shadow);
    TB_TRY(tb__convert_create(&opts, tensors, how, &exchange->converts[src]));
    return tb__flow_create(&opts, &exchange->flows[src]);
}

static tb_status make_exchange_flow(tb__exchange *exchange, int src, const matching *m) {
    tb_match pairs = {.size = sizeof pairs};
    TB_TRY(match_tensors(exchange, src, m, &pairs));
    tb__flow_tensor *tensors = tb__malloc(pairs.nmatched, sizeof *tensors);
    tb__convert_how *how = tb__malloc(pairs.nmatched, sizeof *how);
    tb_status status = tensors && how ? TB_OK : TB_NO_MEMORY;
    for (size_t i = 0; i < pairs.nmatched && status == TB_OK; i++) {
        const tb__side_tensor *from = &exchange->sides[src].tensors.item[pairs.source[i]];
        const tb__side_tensor *to = &exchange->sides[!src].tensors.item[pairs.target[i]];
        status = make_tensor(from, to, i, &tensors[i]);
        how[i] = get_conversion(exchange, from, to);
        if (status == TB_OK && how[i].dst && exchange->sides[!src].commit == TB_SHADOW) {
            tensors[i].has_own_shadow = true;
            status = tb__exchange_shadow(exchange, src, how[i].dst, &how[i].dst);
        }
        if (to->mine && !tb__vec_push(&exchange->received[src], to->mine))
            status = TB_NO_MEMORY;
    }
    if (status == TB_OK)
        status = find_lost_tie(exchange, src, m, &pairs);
    if (status == TB_OK)
        status = create_exchange_flow(exchange, src, tensors, how, pairs.nmatched);
    free(tensors);
    free(how);
    tb_match_fini(&pairs);
    return status;
}

/* A receive in place may write padding before data that is sent from the same memory was read. */
tb_status tb__exchange_check_padding(const tb__exchange *exchange, int src) {
    const tb__exchange_side *s = &exchange->sides[src];
    TB_VEC(tb_binding) sources = {0}, padding = {0};
    bool has_room = true, *marks = NULL;
    if (s->own.count == 0 || exchange->sides[!src].commit == TB_SHADOW) /* a shadow is applied after all reads */
        return TB_OK;
    for (size_t i = 0; i < exchange->received[src].count && has_room; i++) {
        const tb__added_tensor *t = exchange->received[src].item[i];
        for (size_t j = 0; j < t->npadding && has_room; j++)
            has_room = tb__vec_push(&padding, t->padding[j]);
    }
    for (size_t i = 0; i < s->own.count && has_room && padding.count; i++)
        has_room = tb__vec_push(&sources, s->own.item[i]->binding);
    if (has_room && sources.count)
        has_room = (marks = tb__calloc(sources.count, sizeof *marks)) != NULL;
    tb_status status = has_room ? TB_OK : TB_NO_MEMORY;
    if (status == TB_OK && marks)
        status = tb__bindings_mark_overlaps(sources.item, sources.count, padding.item, padding.count, marks);
    for (size_t i = 0; i < sources.count && status == TB_OK; i++) {
        if (marks[i])
            status = tb__fail(TB_REFUSED, "%s: tensor '%.100s' is sent from memory that is padding of one received",
                              exchange->what, s->own.item[i]->name);
    }
    free(sources.item);
    free(padding.item);
    free(marks);
    return status;
}

tb_status tb__exchange_make_flows(tb__exchange *exchange) {
    matching m = {0};
    tb_status status = matching_init(&m, exchange);
    for (int src = 0; src < 2 && status == TB_OK; src++)
        status = make_exchange_flow(exchange, src, &m);
    matching_fini(&m);
    return status;
}
