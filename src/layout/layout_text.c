/* Layouts as text ("mesh=2,2 place=R,S1 ranks=4..7") and as JSON (the golden files' objects). */
#include "base/text.h"
#include "layout/layout.h"

#include <ctype.h>
#include <inttypes.h>
#include <string.h>
#include <strings.h>

/* A layout as it was read, before it is checked as a whole. */
typedef struct spec {
    int ndim, nplaces;
    int64_t shape[TB_MAX_DIMS];
    tb_placement place[TB_MAX_DIMS];
    TB_VEC(int32_t) ranks;
} spec;

static void spec_fini(spec *s) {
    for (int m = 0; m < s->nplaces; m++)
        tb__placement_fini(&s->place[m]);
    free(s->ranks.item);
}

static tb_status spec_finish(spec *s, bool has_ranks, tb_layout **out) {
    if (s->nplaces != s->ndim)
        return tb__fail(TB_INVALID, "the mesh has %d dims, but there are %d placements", s->ndim, s->nplaces);
    int64_t size = 1;
    for (int m = 0; m < s->ndim && size <= TB_MAX_RANKS && s->shape[m] > 0; m++)
        size *= s->shape[m] <= TB_MAX_RANKS ? s->shape[m] : TB_MAX_RANKS + 1;
    if (has_ranks && size <= TB_MAX_RANKS && s->ranks.count != (size_t)size)
        return tb__fail(TB_INVALID, "the mesh has %" PRId64 " places, but %zu ranks are listed", size, s->ranks.count);
    return tb_layout_create(s->ndim, s->shape, has_ranks ? s->ranks.item : NULL, s->place, out);
}

static tb_status add_ranks(spec *s, int64_t first, int64_t last) {
    if (first < 0 || last >= TB_MAX_RANKS || first >= TB_MAX_RANKS)
        return tb__fail(TB_INVALID, "rank %" PRId64 " is not between 0 and %d", first < 0 ? first : last,
                        TB_MAX_RANKS - 1);
    if (last < first)
        return tb__fail(TB_INVALID, "ranks %" PRId64 "..%" PRId64 " go backwards", first, last);
    if (s->ranks.count + (size_t)(last - first) >= TB_MAX_RANKS)
        return tb__fail(TB_TOO_BIG, "more than %d ranks are listed", TB_MAX_RANKS);
    for (int64_t r = first; r <= last; r++) {
        if (!tb__vec_push(&s->ranks, (int32_t)r))
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

static tb_status read_mesh(const char **at, spec *s) {
    do {
        if (s->ndim == TB_MAX_DIMS)
            return tb__fail(TB_INVALID, "a mesh has at most %d dims", TB_MAX_DIMS);
        if (!tb__read_int(at, &s->shape[s->ndim]))
            return tb__fail(TB_INVALID, "mesh= takes sizes such as 2,4; found '%.40s'", *at);
        s->ndim++;
    } while (tb__accept(at, ','));
    return TB_OK;
}

static tb_status read_places(const char **at, spec *s) {
    do {
        if (s->nplaces == TB_MAX_DIMS)
            return tb__fail(TB_INVALID, "there are more than %d placements", TB_MAX_DIMS);
        TB_TRY(tb__placement_parse(at, &s->place[s->nplaces]));
        s->nplaces++;
    } while (tb__accept(at, ','));
    return TB_OK;
}

static tb_status read_ranks(const char **at, spec *s) {
    do {
        int64_t first, last;
        if (!tb__read_int(at, &first))
            return tb__fail(TB_INVALID, "ranks= takes ranks such as 0,2,4..7; found '%.40s'", *at);
        last = first;
        if (strncmp(*at, "..", 2) == 0) {
            *at += 2;
            if (!tb__read_int(at, &last))
                return tb__fail(TB_INVALID, "ranks= takes ranks such as 0,2,4..7; found '%.40s'", *at);
        }
        TB_TRY(add_ranks(s, first, last));
    } while (tb__accept(at, ','));
    return TB_OK;
}

static tb_status read_spec(const char *text, spec *s, bool *has_ranks) {
    static const struct {
        const char *key;
        tb_status (*read)(const char **at, spec *s);
    } fields[] = {{"mesh=", read_mesh}, {"place=", read_places}, {"ranks=", read_ranks}};
    bool seen[3] = {false};
    const char *at = text;
    for (tb__skip_space(&at); *at; tb__skip_space(&at)) {
        size_t i = 0;
        while (i < 3 && strncasecmp(at, fields[i].key, strlen(fields[i].key)) != 0)
            i++;
        if (i == 3)
            return tb__fail(TB_INVALID, "expected mesh=, place= or ranks= at '%.40s'", at);
        if (seen[i])
            return tb__fail(TB_INVALID, "%s is given twice", fields[i].key);
        seen[i] = true;
        at += strlen(fields[i].key);
        TB_TRY(fields[i].read(&at, s));
        if (*at && !isspace((unsigned char)at[-1]))
            return tb__fail(TB_INVALID, "unexpected '%.40s' after %s", at, fields[i].key);
    }
    if (!seen[0] || !seen[1])
        return tb__fail(TB_INVALID, "a layout needs mesh= and place=, as in 'mesh=2,2 place=R,S1 ranks=4..7'");
    *has_ranks = seen[2];
    return TB_OK;
}

tb_status tb_layout_parse(const char *text, tb_layout **out) {
    spec s = {0};
    bool has_ranks;
    tb_status status = read_spec(text, &s, &has_ranks);
    if (status == TB_OK)
        status = spec_finish(&s, has_ranks, out);
    spec_fini(&s);
    return status;
}

static tb_status read_json_spec(const json_t *json, spec *s, bool *has_ranks) {
    const json_t *mesh = json_object_get(json, "mesh"), *ranks = json_object_get(json, "ranks");
    const json_t *places = json_object_get(json, "placements");
    if (!json_is_array(mesh) || !json_is_array(places))
        return tb__fail(TB_INVALID, "a layout needs 'mesh' and 'placements', both arrays");
    if (ranks && !json_is_array(ranks) && !json_is_null(ranks))
        return tb__fail(TB_INVALID, "'ranks' is not an array of ranks");
    if (json_array_size(mesh) > TB_MAX_DIMS || json_array_size(places) > TB_MAX_DIMS)
        return tb__fail(TB_INVALID, "a mesh has at most %d dims", TB_MAX_DIMS);
    for (; (size_t)s->ndim < json_array_size(mesh); s->ndim++) {
        const json_t *n = json_array_get(mesh, (size_t)s->ndim);
        if (!json_is_integer(n))
            return tb__fail(TB_INVALID, "'mesh' dim %d is not a size", s->ndim);
        s->shape[s->ndim] = json_integer_value(n);
    }
    for (; (size_t)s->nplaces < json_array_size(places); s->nplaces++) {
        tb_status status = tb__placement_from_json(json_array_get(places, (size_t)s->nplaces), &s->place[s->nplaces]);
        if (status != TB_OK)
            return tb__fail_within(status, "placement %d", s->nplaces);
    }
    *has_ranks = json_is_array(ranks);
    for (size_t i = 0; i < json_array_size(ranks); i++) {
        const json_t *rank = json_array_get(ranks, i);
        if (!json_is_integer(rank))
            return tb__fail(TB_INVALID, "'ranks' element %zu is not a rank", i);
        TB_TRY(add_ranks(s, json_integer_value(rank), json_integer_value(rank)));
    }
    return TB_OK;
}

tb_status tb__layout_from_json(const json_t *json, tb_layout **out) {
    spec s = {0};
    bool has_ranks;
    tb_status status = read_json_spec(json, &s, &has_ranks);
    if (status == TB_OK)
        status = spec_finish(&s, has_ranks, out);
    spec_fini(&s);
    return status;
}

static void add_placement(tb__text *text, const tb_placement *p) {
    switch (p->kind) {
    case TB_REPLICATE:
        tb__text_add(text, "Replicate");
        break;
    case TB_SHARD:
        tb__text_add(text, "Shard(%d)", p->dim);
        break;
    case TB_STRIDED_SHARD:
        tb__text_add(text, "StridedShard(%d,%" PRId64 ")", p->dim, p->split);
        break;
    case TB_BLOCK_SHARD:
        tb__text_add(text, "BlockShard(%d", p->dim);
        for (size_t j = 0; j < p->nsizes; j++)
            tb__text_add(text, ",%" PRId64, p->sizes[j]);
        tb__text_add(text, ")");
        break;
    case TB_EXPLICIT:
        tb__text_add(text, "Explicit(%d,", p->dim);
        for (size_t r = 0, i = 0; r < p->nlists; r++) {
            tb__text_add(text, r ? "; " : " ");
            for (const char *sep = ""; i < p->list_ends[r]; i++, sep = ",")
                tb__text_add(text, "%s%" PRId64 "-%" PRId64, sep, p->segments[i].start, p->segments[i].stop);
        }
        tb__text_add(text, ")");
        break;
    case TB_PARTIAL:
        tb__text_add(text, "Partial(%s)", tb__reduce_op_name(p->op));
        break;
    }
}

tb_status tb_layout_format(const tb_layout *layout, char **out) {
    tb__text text = {0};
    for (int m = 0; m < layout->ndim; m++)
        tb__text_add(&text, "%s%" PRId64, m ? "," : "mesh=", layout->shape[m]);
    for (int m = 0; m < layout->ndim; m++) {
        tb__text_add(&text, m ? "," : " place=");
        add_placement(&text, &layout->place[m]);
    }
    int32_t n = layout->nranks;
    for (int32_t i = 0; i < n;) { /* runs of at least three are written as a..b */
        int32_t rank = tb_layout_rank_at(layout, i), run = 1;
        while (i + run < n && tb_layout_rank_at(layout, i + run) == rank + run)
            run++;
        if (i == 0 && run == n && rank == 0)
            break;
        tb__text_add(&text, "%s%" PRId32, i ? "," : " ranks=", rank);
        if (run > 2)
            tb__text_add(&text, "..%" PRId32, rank + run - 1);
        i += run > 2 ? run : 1;
    }
    return tb__text_take(&text, out);
}
