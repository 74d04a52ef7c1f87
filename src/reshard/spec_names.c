/* Specs: what tensors are called. Names and views of rules with what wildcards matched, and numbers of layers and
 * experts, which files of ranks count from 0. */
#include "layout/layout.h"
#include "reshard/spec_inside.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *key, *pattern;
} kinds[TB__SPEC_NUMBERS] = {
    [TB__SPEC_LAYERS] = {"layers", "layers.#."},
    [TB__SPEC_EXPERTS] = {"experts", "experts.#."},
};

/* ---- Reading ------------------------------------------------------------------------------------------------- */

/* {"dim": "pp", "count": 32, "first": [0, 20], "pattern": "layers.#."} */
static tb_status read_first(const json_t *json, tb__spec_numbers *numbers, tb__arena *arena) {
    const json_t *count = json_object_get(json, "count"), *list = json_object_get(json, "first");
    int64_t n = json_is_integer(count) ? json_integer_value(count) : -1, ncoords = numbers->ncoords;
    if (n < 0 || n > INT32_MAX)
        return tb__fail(TB_INVALID, "'count' is missing, or not how many there are in all");
    int64_t *first = tb__arena_alloc(arena, (size_t)ncoords + 1, sizeof *first);
    if (!first)
        return TB_NO_MEMORY;
    numbers->first = first;
    first[ncoords] = n;
    if (!list && n % ncoords != 0)
        return tb__fail(TB_INVALID,
                        "%" PRId64 " can't be dealt out equally to %" PRId64 "; 'first' has the first of each", n,
                        ncoords);
    if (list && (!json_is_array(list) || json_array_size(list) != (size_t)ncoords))
        return tb__fail(TB_INVALID, "'first' is not an array of %" PRId64 " numbers", ncoords);
    for (int64_t i = 0; i < ncoords; i++) {
        const json_t *value = json_array_get(list, (size_t)i);
        first[i] = list ? (json_is_integer(value) ? json_integer_value(value) : -1) : n / ncoords * i;
        if (first[i] < (i ? first[i - 1] : 0) || first[i] > n || (i == 0 && first[i] != 0))
            return tb__fail(TB_INVALID, "'first' does not ascend from 0 to %" PRId64, n);
    }
    return TB_OK;
}

static tb_status read_numbers(const json_t *json, int ndim, const int64_t *shape, const char *const *names, int kind,
                              tb__spec_numbers *out, tb__arena *arena) {
    static const char *const keys[] = {"dim", "count", "first", "pattern", NULL};
    if (!json_is_object(json))
        return tb__fail(TB_INVALID, "it is not an object such as {\"dim\": \"pp\", \"count\": 32}");
    TB_TRY(tb__spec_check_keys(json, keys));
    const char *dim = json_string_value(json_object_get(json, "dim"));
    const json_t *pattern = json_object_get(json, "pattern");
    while (out->dim < ndim && !(dim && names[out->dim] && strcmp(names[out->dim], dim) == 0))
        out->dim++;
    if (out->dim == ndim)
        return tb__fail(TB_INVALID, "'dim' is not the name of a mesh dim");
    out->ncoords = shape[out->dim];
    TB_TRY(read_first(json, out, arena));
    const char *text = pattern ? json_string_value(pattern) : kinds[kind].pattern;
    if (!text)
        return tb__fail(TB_INVALID, "'pattern' is not text");
    TB_TRY(tb__number_check(text));
    out->pattern = tb__arena_strdup(arena, text);
    return out->pattern ? TB_OK : TB_NO_MEMORY;
}

tb_status tb__spec_read_numbers(const json_t *json, int ndim, const int64_t *shape, const char *const *names,
                                tb__spec_mesh *mesh, tb__arena *arena) {
    for (int i = 0; i < TB__SPEC_NUMBERS; i++) {
        const json_t *one = json_object_get(json, kinds[i].key);
        if (!one)
            continue;
        tb_status status = read_numbers(one, ndim, shape, names, i, &mesh->numbers[i], arena);
        if (status != TB_OK)
            return tb__fail_within(status, "'%s'", kinds[i].key);
    }
    return TB_OK;
}

/* ---- Names and views of rules --------------------------------------------------------------------------------- */

static tb_status take_text(tb__text *text, tb__arena *arena, const char **out) {
    char *whole;
    TB_TRY(tb__text_take(text, &whole));
    *out = tb__arena_strdup(arena, whole);
    free(whole);
    return *out ? TB_OK : TB_NO_MEMORY;
}

tb_status tb__spec_expand(const tb__spec_rule *rule, const char *name, const char *text, tb__arena *arena,
                          const char **out) {
    tb__capture captures[TB__CAPTURES];
    *out = text;
    if (!text || !rule->pattern.text || !strchr(text, '\\'))
        return TB_OK;
    if (!tb__pattern_match(&rule->pattern, name, captures))
        return tb__fail(TB_INTERNAL, "'%.100s' does not match '%.100s'", name, rule->match);
    tb__text whole = {0};
    tb__replacement_expand(text, captures, &whole);
    return take_text(&whole, arena, out);
}

/* ---- Numbers of layers and experts ---------------------------------------------------------------------------- */

static int64_t read_number(const tb__capture *at) {
    int64_t value = 0;
    for (size_t i = 0; i < at->length; i++) {
        if (value > INT32_MAX)
            return INT64_MAX; /* of no model */
        value = value * 10 + at->start[i] - '0';
    }
    return value;
}

static int64_t coordinate(const tb_layout *layout, int32_t index, int dim) {
    int64_t rest = index;
    for (int m = layout->ndim - 1; m > dim; m--)
        rest /= layout->shape[m];
    return rest % layout->shape[dim];
}

/* Of each number in the name, the other one. */
static tb_status renumber(const tb__spec_mesh *mesh, int32_t rank, const char *name, bool is_local, tb__arena *arena,
                          const char **out) {
    int32_t index = tb_layout_index_of(mesh->layout, rank);
    *out = name;
    for (int i = 0; i < TB__SPEC_NUMBERS && index >= 0; i++) {
        const tb__spec_numbers *numbers = &mesh->numbers[i];
        tb__capture at;
        if (!numbers->pattern || !tb__number_find(numbers->pattern, *out, &at))
            continue;
        int64_t coord = coordinate(mesh->layout, index, numbers->dim), value = read_number(&at);
        int64_t first = numbers->first[coord], count = numbers->first[coord + 1] - first;
        int64_t local = is_local ? value : value - first;
        if (local < 0 || local >= count)
            return tb__fail(TB_INVALID,
                            "tensor '%.100s': rank %" PRId32 " has %s %" PRId64 " to %" PRId64 " of %" PRId64 "%s",
                            name, rank, kinds[i].key, first, first + count - 1, numbers->first[numbers->ncoords],
                            is_local ? ", which its file counts from 0" : "");
        tb__text text = {0};
        tb__name_add(&text, *out, (size_t)(at.start - *out));
        tb__text_add(&text, "%" PRId64, is_local ? first + local : local);
        tb__name_add(&text, at.start + at.length, strlen(at.start + at.length));
        TB_TRY(take_text(&text, arena, out));
    }
    return TB_OK;
}

tb_status tb__spec_local_name(const tb__spec_mesh *mesh, int32_t rank, const char *name, tb__arena *arena,
                              const char **out) {
    return renumber(mesh, rank, name, false, arena, out);
}

tb_status tb__spec_whole_name(const tb__spec_mesh *mesh, int32_t rank, const char *local, tb__arena *arena,
                              const char **out) {
    return renumber(mesh, rank, local, true, arena, out);
}

/* Which coordinate has the number; -1: the name has none, so that all have it. */
static tb_status find_coordinate(const tb__spec_numbers *numbers, const tb__spec_form *form, int kind, const char *name,
                                 int64_t *out) {
    tb__capture at;
    *out = -1;
    if (!numbers->pattern)
        return TB_OK;
    if (!tb__number_find(numbers->pattern, name, &at)) {
        if (kind == TB__SPEC_LAYERS && form->has_stage)
            *out = form->stage < 0 ? form->stage + numbers->ncoords : form->stage;
        if (*out >= numbers->ncoords || (form->has_stage && kind == TB__SPEC_LAYERS && *out < 0))
            return tb__fail(TB_INVALID, "there is no stage %" PRId64 " of %" PRId64, form->stage, numbers->ncoords);
        return TB_OK;
    }
    int64_t value = read_number(&at), coord = 0;
    if (value >= numbers->first[numbers->ncoords])
        return tb__fail(TB_INVALID, "'%.100s' has a number beyond the %" PRId64 " %s of the spec", name,
                        numbers->first[numbers->ncoords], kinds[kind].key);
    while (value >= numbers->first[coord + 1])
        coord++;
    *out = coord;
    return TB_OK;
}

/* The part of the layout that has this coordinate in a mesh dim. */
static tb_status keep_coordinate(const tb_layout *layout, int dim, int64_t coord, tb_layout **out) {
    int64_t shape[TB_MAX_DIMS];
    size_t n = 0, most = (size_t)layout->nranks;
    const tb_placement *place = &layout->place[dim];
    if (place->kind != TB_REPLICATE && !(place->kind == TB_SHARD && layout->shape[dim] == 1))
        return tb__fail(TB_INVALID, "mesh dim %d has other layers or experts in each place; it can't cut a tensor",
                        dim);
    int32_t *ranks = tb__malloc(most, sizeof *ranks);
    if (!ranks)
        return TB_NO_MEMORY;
    memcpy(shape, layout->shape, (size_t)layout->ndim * sizeof *shape);
    shape[dim] = 1;
    for (int32_t i = 0; i < layout->nranks; i++) {
        if (coordinate(layout, i, dim) == coord)
            ranks[n++] = tb_layout_rank_at(layout, i);
    }
    tb_status status = tb_layout_create(layout->ndim, shape, ranks, layout->place, out);
    free(ranks);
    return status;
}

tb_status tb__spec_layout(const tb__spec_mesh *mesh, const tb__spec_form *form, const tb_layout *layout,
                          const char *name, tb_layout **out) {
    tb_layout *kept = tb__layout_ref(layout);
    for (int i = 0; i < TB__SPEC_NUMBERS && !form->has_own_mesh; i++) {
        int64_t coord;
        tb_layout *part;
        tb_status status = find_coordinate(&mesh->numbers[i], form, i, name, &coord);
        if (status == TB_OK && coord >= 0) {
            status = keep_coordinate(kept, mesh->numbers[i].dim, coord, &part);
            tb_layout_destroy(kept);
            kept = status == TB_OK ? part : NULL;
        }
        if (status != TB_OK) {
            tb_layout_destroy(kept);
            return status;
        }
    }
    *out = kept;
    return TB_OK;
}
