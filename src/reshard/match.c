/* Which names of one side are which of the other. */
#include "base/index.h"
#include "base/mem.h"
#include "base/opts.h"
#include "base/text.h"
#include "reshard/names.h"
#include "reshard/pattern.h"

#include <string.h>

/* One side's names, found by hash. */
typedef struct side {
    const char *label;
    const char *const *name;
    size_t count;
    tb__index index;
    bool *is_matched;
} side;

typedef struct matching {
    tb_match_opts opts;
    tb__pattern *ignored;
    size_t nignored;
    side source, target;
} matching;

static size_t find_hashed(const side *s, const char *name, uint64_t hash) {
    size_t probe = 0, i;
    while ((i = tb__index_next(&s->index, hash, &probe)) != TB__NOWHERE) {
        if (strcmp(s->name[i], name) == 0)
            return i;
    }
    return TB__NOWHERE;
}

static size_t find_name(const side *s, const char *name) {
    return find_hashed(s, name, tb__name_hash(name));
}

static tb_status side_init(side *s, const char *const *names, size_t count) {
    *s = (side){.label = s->label, .name = names, .count = count};
    s->is_matched = tb__calloc(count, sizeof *s->is_matched);
    if (!s->is_matched)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < count; i++) {
        uint64_t hash = tb__name_hash(names[i]);
        if (find_hashed(s, names[i], hash) != TB__NOWHERE)
            return tb__fail(TB_INVALID, "'%.200s' is in %s twice", names[i], s->label);
        if (!tb__index_add(&s->index, hash, i))
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

static void side_fini(side *s) {
    tb__index_fini(&s->index);
    free(s->is_matched);
}

/* The name that stands for all that are tied to this one, or NULL if none is. */
static const char *tied_to(const tb_match_opts *opts, const char *name) {
    for (size_t i = 0; i < opts->nties; i++) {
        if (strcmp(opts->ties[i].name, name) == 0 || strcmp(opts->ties[i].canonical, name) == 0)
            return opts->ties[i].canonical;
    }
    return NULL;
}

static tb_status check_ties(const tb_match_opts *opts) {
    for (size_t i = 0; i < opts->nties; i++) {
        const tb_tie *tie = &opts->ties[i];
        for (size_t j = 0; j < opts->nties; j++) {
            if (strcmp(opts->ties[j].name, tie->canonical) == 0)
                return tb__fail(TB_INVALID, "'%.200s' is tied to '%.200s', which is itself tied to '%.200s'", tie->name,
                                tie->canonical, opts->ties[j].canonical);
            if (i != j && strcmp(opts->ties[j].name, tie->name) == 0)
                return tb__fail(TB_INVALID, "'%.200s' is tied twice", tie->name);
        }
    }
    return TB_OK;
}

/* A source for a target whose own name the source lacks. */
static size_t find_tied(const matching *m, const char *name) {
    const char *canonical = tied_to(&m->opts, name);
    size_t found = canonical ? find_name(&m->source, canonical) : TB__NOWHERE;
    for (size_t i = 0; canonical && i < m->opts.nties && found == TB__NOWHERE; i++) {
        if (strcmp(m->opts.ties[i].canonical, canonical) == 0)
            found = find_name(&m->source, m->opts.ties[i].name);
    }
    return found;
}

static bool is_tied_to_matched(const matching *m, const char *name) {
    const char *canonical = tied_to(&m->opts, name);
    if (!canonical)
        return false;
    size_t found = find_name(&m->source, canonical);
    bool is_matched = found != TB__NOWHERE && m->source.is_matched[found];
    for (size_t i = 0; i < m->opts.nties && !is_matched; i++) {
        if (strcmp(m->opts.ties[i].canonical, canonical) != 0)
            continue;
        found = find_name(&m->source, m->opts.ties[i].name);
        is_matched = found != TB__NOWHERE && m->source.is_matched[found];
    }
    return is_matched;
}

static bool is_ignored(const matching *m, const char *name) {
    tb__capture captures[TB__CAPTURES];
    for (size_t i = 0; i < m->nignored; i++) {
        if (tb__pattern_match(&m->ignored[i], name, captures))
            return true;
    }
    return false;
}

static tb_status match_sides(matching *m, tb_match *out) {
    out->source = tb__malloc(m->target.count, sizeof *out->source);
    out->target = tb__malloc(m->target.count, sizeof *out->target);
    if (!out->source || !out->target)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < m->target.count; i++) {
        size_t found = find_name(&m->source, m->target.name[i]);
        if (found == TB__NOWHERE)
            found = find_tied(m, m->target.name[i]);
        if (found == TB__NOWHERE)
            continue;
        m->target.is_matched[i] = true;
        m->source.is_matched[found] = true;
        out->source[out->nmatched] = found;
        out->target[out->nmatched++] = i;
    }
    return TB_OK;
}

typedef struct named {
    const char *name;
    size_t index;
} named;

static int compare_named(const void *a, const void *b) {
    return strcmp(((const named *)a)->name, ((const named *)b)->name);
}

static tb_status list_unmatched(const matching *m, const side *s, size_t **out, size_t *count) {
    TB_VEC(named) left = {0};
    for (size_t i = 0; i < s->count; i++) {
        if (s->is_matched[i] || is_tied_to_matched(m, s->name[i]) || is_ignored(m, s->name[i]))
            continue;
        if (!tb__vec_push(&left, (named){s->name[i], i})) {
            free(left.item);
            return TB_NO_MEMORY;
        }
    }
    if (left.count > 1)
        qsort(left.item, left.count, sizeof *left.item, compare_named);
    size_t *list = tb__malloc(left.count, sizeof *list);
    for (size_t i = 0; list && i < left.count; i++)
        list[i] = left.item[i].index;
    *out = list;
    *count = left.count;
    free(left.item);
    return list ? TB_OK : TB_NO_MEMORY;
}

static void say_unmatched(tb__text *text, const side *s, const size_t *list, size_t count) {
    enum { SHOWN = 3 };
    if (count == 0)
        return;
    tb__text_add(text, "%s%zu only in %s (", text->count ? ", " : "", count, s->label);
    for (size_t i = 0; i < count && i < SHOWN; i++)
        tb__text_add(text, "%s'%.100s'", i ? ", " : "", s->name[list[i]]);
    tb__text_add(text, "%s)", count > SHOWN ? ", ..." : "");
}

static tb_status refuse_unmatched(const matching *m, const tb_match *match) {
    tb__text text = {0};
    say_unmatched(&text, &m->source, match->only_source, match->nonly_source);
    say_unmatched(&text, &m->target, match->only_target, match->nonly_target);
    tb_status status = text.failed ? TB_NO_MEMORY : tb__fail(TB_INVALID, "unmatched parameters: %s", text.data);
    tb__text_fini(&text);
    return status;
}

static tb_status match_all(matching *m, const char *const *source, size_t nsource, const char *const *target,
                           size_t ntarget, tb_match *out) {
    TB_TRY(check_ties(&m->opts));
    m->ignored = tb__calloc(m->opts.nignored, sizeof *m->ignored);
    if (!m->ignored)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < m->opts.nignored; i++) {
        TB_TRY(tb__pattern_init(&m->ignored[i], m->opts.ignored[i]));
        m->nignored++;
    }
    TB_TRY(side_init(&m->source, source, nsource));
    TB_TRY(side_init(&m->target, target, ntarget));
    TB_TRY(match_sides(m, out));
    TB_TRY(list_unmatched(m, &m->source, &out->only_source, &out->nonly_source));
    TB_TRY(list_unmatched(m, &m->target, &out->only_target, &out->nonly_target));
    if (out->nonly_source + out->nonly_target > 0 && !m->opts.allow_unmatched)
        return refuse_unmatched(m, out);
    return TB_OK;
}

tb_status tb_match_names(const char *const *source, size_t nsource, const char *const *target, size_t ntarget,
                         const tb_match_opts *opts, tb_match *out) {
    return tb__match_names(source, nsource, target, ntarget, opts, "the source", "the target", out);
}

tb_status tb__match_names(const char *const *source, size_t nsource, const char *const *target, size_t ntarget,
                          const tb_match_opts *opts, const char *source_label, const char *target_label,
                          tb_match *out) {
    matching m = {.source.label = source_label, .target.label = target_label};
    tb_match match = {.size = sizeof match};
    TB_TRY(tb__opts_read(&m.opts, sizeof m.opts, opts));
    tb_status status = match_all(&m, source, nsource, target, ntarget, &match);
    for (size_t i = 0; i < m.nignored; i++)
        tb__pattern_fini(&m.ignored[i]);
    free(m.ignored);
    side_fini(&m.source);
    side_fini(&m.target);
    if (status == TB_OK)
        status = tb__struct_write(out, &match, sizeof match, "a tb_match");
    if (status != TB_OK)
        tb_match_fini(&match);
    return status;
}

void tb_match_fini(tb_match *match) {
    tb_match taken;
    tb__struct_take(&taken, sizeof taken, match);
    free(taken.source);
    free(taken.target);
    free(taken.only_source);
    free(taken.only_target);
}
