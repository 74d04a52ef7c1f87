/* What a rank's parameters are called in the whole model: numbers of layers and experts, then the user's rules. */
#include "reshard/names.h"
#include "base/index.h"
#include "base/mem.h"
#include "base/opts.h"
#include "reshard/pattern.h"
#include "tensorbus/plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

typedef struct rule {
    tb__pattern match;
    char *name;    /* NULL: the old one */
    tb_view *view; /* NULL: none */
    char *text;    /* of the view */
    bool is_more;  /* the same pattern as the rule before */
} rule;

/* How a number in a name becomes that of the whole model. */
typedef struct renumber {
    char *pattern; /* NULL: numbers stay */
    int64_t first; /* of the first `count` local numbers */
    int64_t count;
    int64_t *map; /* or one by one */
} renumber;

struct tb_names {
    renumber layers, experts;
    rule *rule;
    size_t nrules;
};

static tb_status set_pattern(renumber *numbers, const char *pattern) {
    TB_TRY(tb__number_check(pattern));
    numbers->pattern = tb__strdup(pattern);
    return numbers->pattern ? TB_OK : TB_NO_MEMORY;
}

/* The first layer of a stage must not be below that of the previous stage. */
static tb_status set_first_layer(const tb_names_opts *opts, int64_t at, int64_t nslots, renumber *out) {
    for (int64_t i = 0; i < nslots; i++) {
        int64_t first = opts->first_layers[i];
        int64_t next = i + 1 < nslots ? opts->first_layers[i + 1] : opts->nlayers;
        if (first < 0 || next < first)
            return tb__fail(TB_INVALID,
                            "the first layers of the stages have to ascend to the number of layers, but %" PRId64
                            " comes before %" PRId64,
                            first, next);
    }
    out->first = opts->first_layers[at];
    out->count = (at + 1 < nslots ? opts->first_layers[at + 1] : opts->nlayers) - out->first;
    return TB_OK;
}

static tb_status set_layers(const tb_names_opts *opts, renumber *out) {
    int64_t nchunks = opts->nchunks ? opts->nchunks : 1, nslots = nchunks * opts->nstages;
    if (opts->nstages == 0)
        return TB_OK;
    if (opts->nstages < 0 || opts->stage < 0 || opts->stage >= opts->nstages)
        return tb__fail(TB_INVALID, "there is no stage %" PRId32 " of %" PRId32, opts->stage, opts->nstages);
    if (nchunks < 0 || opts->chunk < 0 || opts->chunk >= nchunks)
        return tb__fail(TB_INVALID, "there is no chunk %" PRId32 " of %" PRId64, opts->chunk, nchunks);
    int64_t at = (int64_t)opts->chunk * opts->nstages + opts->stage;
    if (opts->first_layers) {
        TB_TRY(set_first_layer(opts, at, nslots, out));
    } else {
        if (opts->nlayers < 0 || opts->nlayers % nslots != 0)
            return tb__fail(TB_INVALID,
                            "%" PRId64 " layers can't be dealt out equally to %" PRId64
                            " stages; give the first layer of each",
                            opts->nlayers, nslots);
        out->count = opts->nlayers / nslots;
        out->first = at * out->count;
    }
    return set_pattern(out, opts->layer_pattern ? opts->layer_pattern : "layers.#.");
}

static tb_status set_experts(const tb_names_opts *opts, renumber *out) {
    if (opts->expert_map) {
        for (size_t i = 0; i < opts->nexpert_map; i++) {
            if (opts->expert_map[i] < 0 || (opts->nexperts > 0 && opts->expert_map[i] >= opts->nexperts))
                return tb__fail(TB_INVALID, "the map says that local expert %zu is expert %" PRId64 ", of %" PRId64, i,
                                opts->expert_map[i], opts->nexperts);
        }
        out->map = tb__memdup(opts->expert_map, opts->nexpert_map, sizeof *out->map);
        if (!out->map)
            return TB_NO_MEMORY;
        out->count = (int64_t)opts->nexpert_map;
    } else {
        if (opts->nexpert_ranks == 0)
            return TB_OK;
        if (opts->nexpert_ranks < 0 || opts->expert_rank < 0 || opts->expert_rank >= opts->nexpert_ranks)
            return tb__fail(TB_INVALID, "there is no expert rank %" PRId32 " of %" PRId32, opts->expert_rank,
                            opts->nexpert_ranks);
        if (opts->nexperts < 0 || opts->nexperts % opts->nexpert_ranks != 0)
            return tb__fail(TB_INVALID,
                            "%" PRId64 " experts can't be dealt out equally to %" PRId32 " ranks; give a map",
                            opts->nexperts, opts->nexpert_ranks);
        out->count = opts->nexperts / opts->nexpert_ranks;
        out->first = opts->expert_rank * out->count;
    }
    return set_pattern(out, opts->expert_pattern ? opts->expert_pattern : "experts.#.");
}

static tb_status set_rule(const tb_rule *from, const rule *before, rule *out) {
    TB_TRY(tb__pattern_init(&out->match, from->match));
    out->is_more = before && strcmp(before->match.text, from->match) == 0;
    if (from->name) {
        TB_TRY(tb__replacement_check(&out->match, from->name));
        out->name = tb__strdup(from->name);
        if (!out->name)
            return TB_NO_MEMORY;
    }
    if (!from->view)
        return TB_OK;
    out->text = tb__strdup(from->view);
    return out->text ? tb_view_parse(from->view, &out->view) : TB_NO_MEMORY;
}

static tb_status set_rules(const tb_names_opts *opts, tb_names *names) {
    names->rule = tb__calloc(opts->nrules, sizeof *names->rule);
    if (!names->rule)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < opts->nrules; i++) {
        names->nrules++;
        tb_status status = set_rule(&opts->rules[i], i ? &names->rule[i - 1] : NULL, &names->rule[i]);
        if (status != TB_OK)
            return tb__fail_within(status, "rule %zu", i);
    }
    return TB_OK;
}

tb_status tb_names_create(const tb_names_opts *callers, tb_names **out) {
    tb_names_opts opts;
    TB_TRY(tb__opts_read(&opts, sizeof opts, callers));
    tb_names *names = tb__calloc(1, sizeof *names);
    if (!names)
        return TB_NO_MEMORY;
    tb_status status = set_layers(&opts, &names->layers);
    if (status == TB_OK)
        status = set_experts(&opts, &names->experts);
    if (status == TB_OK)
        status = set_rules(&opts, names);
    if (status != TB_OK) {
        tb_names_destroy(names);
        return status;
    }
    *out = names;
    return TB_OK;
}

void tb_names_destroy(tb_names *names) {
    if (!names)
        return;
    for (size_t i = 0; i < names->nrules; i++) {
        tb__pattern_fini(&names->rule[i].match);
        free(names->rule[i].name);
        free(names->rule[i].text);
        tb_view_destroy(names->rule[i].view);
    }
    free(names->rule);
    free(names->layers.pattern);
    free(names->experts.pattern);
    free(names->experts.map);
    free(names);
}

/* Replaces the name's number by that in the whole model. The name is then the text of `out`. */
static tb_status apply_numbers(const renumber *numbers, const char *what, const char **name, tb__text *out) {
    tb__capture place;
    if (!numbers->pattern || !tb__number_find(numbers->pattern, *name, &place))
        return TB_OK;
    const char *at = place.start;
    int64_t local;
    if (!tb__read_int(&at, &local) || local >= numbers->count)
        return tb__fail(TB_INVALID, "'%.200s' has %s %.*s, but this rank has %" PRId64, *name, what, (int)place.length,
                        place.start, numbers->count);
    char number[24];
    int ndigits =
        snprintf(number, sizeof number, "%" PRId64, numbers->map ? numbers->map[local] : numbers->first + local);
    out->count = 0;
    tb__name_add(out, *name, (size_t)(place.start - *name));
    tb__name_add(out, number, (size_t)ndigits);
    tb__name_add(out, place.start + place.length, strlen(place.start + place.length));
    if (out->failed)
        return TB_NO_MEMORY;
    *name = out->data;
    return TB_OK;
}

/* Parts under construction: names are offsets into the text while that can still move. */
typedef struct resolving {
    TB_VEC(tb_part) part;
    TB_VEC(size_t) name;
    tb__text text;
    tb__text layered, numbered;
} resolving;

/* `from` is NULL if no rule applies. */
static tb_status add_part(resolving *r, size_t param, const rule *from, const tb__capture *captures) {
    if (!tb__vec_reserve(&r->part, 1) || !tb__vec_push(&r->name, r->text.count))
        return TB_NO_MEMORY;
    tb_part *part = &r->part.item[r->part.count++];
    *part = (tb_part){.param = param, .view = from ? from->view : NULL, .text = from ? from->text : NULL};
    tb__replacement_expand(from && from->name ? from->name : "\\0", captures, &r->text);
    if (!r->text.failed)
        r->text.count++; /* keeps the end of the string */
    return r->text.failed ? TB_NO_MEMORY : TB_OK;
}

static tb_status resolve_param(const tb_names *names, size_t param, const char *name, resolving *r) {
    tb__capture captures[TB__CAPTURES];
    TB_TRY(apply_numbers(&names->layers, "layer", &name, &r->layered));
    TB_TRY(apply_numbers(&names->experts, "expert", &name, &r->numbered));
    size_t i = 0;
    while (i < names->nrules && !tb__pattern_match(&names->rule[i].match, name, captures))
        i++;
    if (i == names->nrules) {
        captures[0] = (tb__capture){name, strlen(name)};
        return add_part(r, param, NULL, captures);
    }
    do {
        TB_TRY(add_part(r, param, &names->rule[i], captures));
    } while (++i < names->nrules && names->rule[i].is_more);
    return TB_OK;
}

uint64_t tb__name_hash(const char *name) {
    uint64_t hash = 0;
    for (size_t left = strlen(name); left > 0;) {
        uint64_t word = 0;
        size_t n = left < sizeof word ? left : sizeof word;
        memcpy(&word, name, n);
        hash = tb__hash(hash, word);
        name += n;
        left -= n;
    }
    return hash;
}

static tb_status check_distinct(const tb_parts *parts, const char *const *params) {
    tb__index index = {0};
    tb_status status = TB_OK;
    for (size_t i = 0; i < parts->count && status == TB_OK; i++) {
        const tb_part *part = &parts->part[i];
        uint64_t hash = tb__name_hash(part->name);
        size_t probe = 0, j;
        while (status == TB_OK && (j = tb__index_next(&index, hash, &probe)) != TB__NOWHERE) {
            if (strcmp(parts->part[j].name, part->name) == 0)
                status = tb__fail(TB_INVALID, "'%.200s' and '%.200s' both become '%.200s'",
                                  params[parts->part[j].param], params[part->param], part->name);
        }
        if (status == TB_OK && !tb__index_add(&index, hash, i))
            status = TB_NO_MEMORY;
    }
    tb__index_fini(&index);
    return status;
}

/* One allocation for the parts and their names. */
static tb_status take_parts(const resolving *r, tb_parts *out) {
    size_t nbytes = r->part.count * sizeof *out->part;
    char *memory = tb__malloc(nbytes + r->text.count, 1);
    if (!memory)
        return TB_NO_MEMORY;
    *out = (tb_parts){r->part.count, (tb_part *)(void *)memory};
    if (r->part.count == 0)
        return TB_OK;
    memcpy(memory, r->part.item, nbytes);
    memcpy(memory + nbytes, r->text.data, r->text.count);
    for (size_t i = 0; i < r->part.count; i++)
        out->part[i].name = memory + nbytes + r->name.item[i];
    return TB_OK;
}

tb_status tb_names_resolve(const tb_names *names, const char *const *params, size_t nparams, tb_parts *out) {
    resolving r = {0};
    tb_parts parts = {0};
    tb_status status = TB_OK;
    for (size_t i = 0; i < nparams && status == TB_OK; i++)
        status = resolve_param(names, i, params[i], &r);
    if (status == TB_OK)
        status = take_parts(&r, &parts);
    free(r.part.item);
    free(r.name.item);
    tb__text_fini(&r.text);
    tb__text_fini(&r.layered);
    tb__text_fini(&r.numbered);
    if (status == TB_OK)
        status = check_distinct(&parts, params);
    if (status != TB_OK) {
        tb_parts_fini(&parts);
        return status;
    }
    *out = parts;
    return TB_OK;
}

void tb_parts_fini(tb_parts *parts) {
    free(parts->part);
    *parts = (tb_parts){0};
}
