/* Specs: read from JSON and checked, so that errors are reported with their place before any file is opened. */
#include "reshard/spec.h"

#include "base/text.h"
#include "format/file.h"
#include "layout/layout.h"
#include "reshard/model_spec.h"
#include "reshard/spec_inside.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { MAX_SPEC = 1 << 28 };

/* A side's mesh, before placements make a layout of it. */
typedef struct mesh {
    int ndim;
    int64_t shape[TB_MAX_DIMS];
    const char *names[TB_MAX_DIMS]; /* borrowed from the JSON; NULL: none */
    int64_t nranks;
    int32_t *ranks; /* NULL: 0, 1, 2, ... */
} mesh;

static const mesh one_rank = {.ndim = 1, .shape = {1}, .nranks = 1};

/* Whether the list, which ends with NULL, contains the key. */
static bool is_among(const char *key, const char *const *keys) {
    while (*keys && strcmp(*keys, key) != 0)
        keys++;
    return *keys != NULL;
}

tb_status tb__spec_check_keys(const json_t *json, const char *const *keys) {
    for (void *it = json_object_iter((json_t *)json); it; it = json_object_iter_next((json_t *)json, it)) {
        const char *key = json_object_iter_key(it);
        if (is_among(key, keys))
            continue;
        tb__text list = {0};
        for (size_t i = 0; keys[i]; i++)
            tb__text_add(&list, "%s'%s'", i ? ", " : "", keys[i]);
        tb_status status =
            tb__fail(TB_INVALID, "'%.60s' is not known here; there are %s", key, list.data ? list.data : "");
        tb__text_fini(&list);
        return status;
    }
    return TB_OK;
}

/* Meshes */

static tb_status read_mesh_shape(const json_t *json, mesh *m) {
    if (!json_is_array(json) || json_array_size(json) == 0 || json_array_size(json) > TB_MAX_DIMS)
        return tb__fail(TB_INVALID, "'mesh' is not an array of 1 to %d sizes", TB_MAX_DIMS);
    m->ndim = (int)json_array_size(json);
    m->nranks = 1;
    for (int i = 0; i < m->ndim; i++) {
        const json_t *size = json_array_get(json, (size_t)i);
        m->shape[i] = json_is_integer(size) ? json_integer_value(size) : 0;
        if (m->shape[i] < 1 || m->shape[i] > TB_MAX_RANKS)
            return tb__fail(TB_INVALID, "'mesh' dim %d is not a size between 1 and %d", i, TB_MAX_RANKS);
        m->nranks *= m->shape[i];
        if (m->nranks > TB_MAX_RANKS)
            return tb__fail(TB_TOO_BIG, "the mesh has more than %d ranks", TB_MAX_RANKS);
    }
    return TB_OK;
}

/* "0,2,4..7", by way of a layout of so many ranks. */
static tb_status read_rank_text(const char *text, mesh *m) {
    char *whole;
    tb_layout *layout;
    tb__text t = {0};
    tb__text_add(&t, "mesh=%" PRId64 " place=R ranks=%s", m->nranks, text);
    TB_TRY(tb__text_take(&t, &whole));
    tb_status status = tb_layout_parse(whole, &layout);
    free(whole);
    TB_TRY(status);
    for (int64_t i = 0; i < m->nranks; i++)
        m->ranks[i] = tb_layout_rank_at(layout, (int32_t)i);
    tb_layout_destroy(layout);
    return TB_OK;
}

static tb_status read_mesh_ranks(const json_t *json, mesh *m, tb__arena *arena) {
    m->ranks = tb__arena_alloc(arena, (size_t)m->nranks, sizeof *m->ranks);
    if (!m->ranks)
        return TB_NO_MEMORY;
    if (json_is_string(json))
        return read_rank_text(json_string_value(json), m);
    if (!json_is_array(json))
        return tb__fail(TB_INVALID, "'ranks' is neither an array of ranks nor text such as \"0,2,4..7\"");
    if (json_array_size(json) != (size_t)m->nranks)
        return tb__fail(TB_INVALID, "the mesh has %" PRId64 " places, but %zu ranks are listed", m->nranks,
                        json_array_size(json));
    for (size_t i = 0; i < (size_t)m->nranks; i++) {
        const json_t *rank = json_array_get(json, i);
        if (!json_is_integer(rank) || json_integer_value(rank) < 0 || json_integer_value(rank) >= TB_MAX_RANKS)
            return tb__fail(TB_INVALID, "'ranks' element %zu is not a rank between 0 and %d", i, TB_MAX_RANKS - 1);
        m->ranks[i] = (int32_t)json_integer_value(rank);
    }
    return TB_OK;
}

static const char *const side_keys[] = {"mesh",         "ranks", "names", "placements", "layout", "dtype",
                                        "quantisation", "name",  "view",  "shape",      "stage",  NULL};

static tb_status read_mesh_names(const json_t *json, mesh *m) {
    if (!json_is_array(json) || json_array_size(json) != (size_t)m->ndim)
        return tb__fail(TB_INVALID, "'names' is not an array of %d names, one for each mesh dim", m->ndim);
    for (int i = 0; i < m->ndim; i++) {
        m->names[i] = json_string_value(json_array_get(json, (size_t)i));
        if (!m->names[i] || !*m->names[i] || is_among(m->names[i], side_keys))
            return tb__fail(TB_INVALID, "'names' element %d is not text that can name a mesh dim", i);
        for (int j = 0; j < i; j++) {
            if (strcmp(m->names[j], m->names[i]) == 0)
                return tb__fail(TB_INVALID, "two mesh dims have the name '%.60s'", m->names[i]);
        }
    }
    return TB_OK;
}

/* Reads a mesh from an object that may have these keys; without a key, its value in *m stays. */
static tb_status read_mesh(const json_t *json, mesh *m, tb__arena *arena) {
    const json_t *shape = json_object_get(json, "mesh"), *ranks = json_object_get(json, "ranks");
    const json_t *names = json_object_get(json, "names");
    if (shape) {
        mesh fresh = {0};
        TB_TRY(read_mesh_shape(shape, &fresh));
        *m = fresh;
    }
    if (ranks)
        TB_TRY(read_mesh_ranks(ranks, m, arena));
    return names ? read_mesh_names(names, m) : TB_OK;
}

/* The mesh as a layout, and what it says of layers and experts. */
static tb_status keep_mesh(const json_t *json, const mesh *m, tb__spec_mesh *kept, tb__arena *arena) {
    tb_placement place[TB_MAX_DIMS];
    for (int i = 0; i < TB_MAX_DIMS; i++)
        place[i] = (tb_placement){.kind = TB_REPLICATE};
    TB_TRY(tb_layout_create(m->ndim, m->shape, m->ranks, place, &kept->layout));
    return tb__spec_read_numbers(json, m->ndim, m->shape, m->names, kept, arena);
}

static tb_status read_default_mesh(const json_t *root, const char *key, mesh *out, tb__spec_mesh *kept,
                                   tb__arena *arena) {
    static const char *const keys[] = {"mesh", "ranks", "names", "layers", "experts", NULL};
    const json_t *json = json_object_get(root, key);
    mesh m = one_rank;
    kept->is_given = json != NULL;
    tb_status status = TB_OK;
    if (json_is_array(json))
        status = read_mesh_shape(json, &m);
    else if (json_is_object(json) && json_object_get(json, "mesh"))
        status = tb__spec_check_keys(json, keys) == TB_OK ? read_mesh(json, &m, arena) : TB_INVALID;
    else if (json)
        status = tb__fail(TB_INVALID, "it is neither an array of sizes nor an object with 'mesh'");
    if (status == TB_OK)
        status = keep_mesh(json, &m, kept, arena);
    if (status != TB_OK)
        return tb__fail_within(status, "%s", key);
    *out = m;
    return TB_OK;
}

/* Sides */

typedef struct side {
    mesh mesh;
    int nplaces;
    tb_placement place[TB_MAX_DIMS]; /* own their arrays */
} side;

/* Reads a text with a single placement. */
static tb_status read_place_text(const char *text, tb_placement *out) {
    const char *at = text;
    tb_placement place;
    TB_TRY(tb__placement_parse(&at, &place));
    tb__skip_space(&at);
    if (*at) {
        tb__placement_fini(&place);
        return tb__fail(TB_INVALID, "unexpected '%.40s' after a placement", at);
    }
    *out = place;
    return TB_OK;
}

static tb_status read_place(const json_t *json, tb_placement *out) {
    return json_is_string(json) ? read_place_text(json_string_value(json), out) : tb__placement_from_json(json, out);
}

/* "R,S1" */
static tb_status read_places_text(const char *text, side *s) {
    const char *at = text;
    do {
        if (s->nplaces == TB_MAX_DIMS)
            return tb__fail(TB_INVALID, "there are more than %d placements", TB_MAX_DIMS);
        TB_TRY(tb__placement_parse(&at, &s->place[s->nplaces]));
        s->nplaces++;
    } while (tb__accept(&at, ','));
    tb__skip_space(&at);
    return *at ? tb__fail(TB_INVALID, "unexpected '%.40s' after a placement", at) : TB_OK;
}

static tb_status read_places(const json_t *json, side *s) {
    if (json_is_string(json))
        return read_places_text(json_string_value(json), s);
    if (!json_is_array(json))
        return tb__fail(TB_INVALID, "placements are an array such as [[\"R\"],[\"S\",0]] or text such as \"R,S0\"");
    if (json_array_size(json) > TB_MAX_DIMS)
        return tb__fail(TB_INVALID, "there are more than %d placements", TB_MAX_DIMS);
    for (; (size_t)s->nplaces < json_array_size(json); s->nplaces++) {
        tb_status status = read_place(json_array_get(json, (size_t)s->nplaces), &s->place[s->nplaces]);
        if (status != TB_OK)
            return tb__fail_within(status, "placement %d", s->nplaces);
    }
    return TB_OK;
}

/* {"tp": "Shard(0)"}: mesh dims that are not named are Replicate. */
static tb_status read_named_places(const json_t *json, side *s) {
    size_t nnamed = 0;
    for (void *it = json_object_iter((json_t *)json); it; it = json_object_iter_next((json_t *)json, it)) {
        const char *key = json_object_iter_key(it);
        if (is_among(key, side_keys))
            continue;
        int i = 0;
        while (i < s->mesh.ndim && !(s->mesh.names[i] && strcmp(s->mesh.names[i], key) == 0))
            i++;
        if (i == s->mesh.ndim)
            return tb__fail(
                TB_INVALID,
                "'%.60s' is neither 'mesh', 'ranks', 'names', 'placements', 'layout', 'dtype', 'quantisation', 'name', "
                "'view', 'shape' or 'stage' nor the name of a mesh dim",
                key);
        tb_status status = read_place(json_object_iter_value(it), &s->place[i]);
        if (status != TB_OK)
            return tb__fail_within(status, "'%.60s'", key);
        nnamed++;
    }
    const json_t *places = json_object_get(json, "placements");
    if (places && nnamed > 0)
        return tb__fail(TB_INVALID, "it has both 'placements' and placements by the names of mesh dims");
    if (places)
        return read_places(places, s);
    s->nplaces = s->mesh.ndim;
    return TB_OK;
}

static tb_status read_dtype(const json_t *json, tb_dtype *out) {
    if (!json)
        return TB_OK;
    if (!json_is_string(json))
        return tb__fail(TB_INVALID, "'dtype' is not text");
    return tb_dtype_parse(json_string_value(json), out);
}

static tb_status finish_side(const side *s, tb_layout **out) {
    if (s->nplaces != s->mesh.ndim)
        return tb__fail(TB_INVALID, "the mesh has %d dims, but there are %d placements", s->mesh.ndim, s->nplaces);
    return tb_layout_create(s->mesh.ndim, s->mesh.shape, s->mesh.ranks, s->place, out);
}

static tb_status read_side_parts(const json_t *json, side *s, tb_dtype *dtype, tb__arena *arena) {
    if (!json) {
        s->nplaces = s->mesh.ndim;
        return TB_OK;
    }
    if (!json_is_object(json))
        return read_places(json, s);
    TB_TRY(read_mesh(json, &s->mesh, arena));
    TB_TRY(read_dtype(json_object_get(json, "dtype"), dtype));
    return read_named_places(json, s);
}

/* {"layout": "mesh=2 place=S0", "dtype": "f16"} */
static tb_status read_whole_layout(const json_t *json, tb_dtype *dtype, tb_layout **out) {
    static const char *const keys[] = {"layout", "dtype", "quantisation", "name", "view", "shape", NULL};
    const char *text = json_string_value(json_object_get(json, "layout"));
    TB_TRY(tb__spec_check_keys(json, keys));
    if (!text)
        return tb__fail(TB_INVALID, "'layout' is not text such as \"mesh=2 place=Shard(0) ranks=0,1\"");
    TB_TRY(read_dtype(json_object_get(json, "dtype"), dtype));
    return tb_layout_parse(text, out);
}

/* Text with what the rule's wildcards matched. */
static tb_status read_template(const json_t *json, const char *key, const tb__spec_rule *rule, tb__arena *arena,
                               const char **out) {
    const json_t *value = json_object_get(json, key);
    if (!value)
        return TB_OK;
    if (!json_is_string(value) || !*json_string_value(value))
        return tb__fail(TB_INVALID, "'%s' is not text", key);
    tb_status status = rule->pattern.text ? tb__replacement_check(&rule->pattern, json_string_value(value)) : TB_OK;
    if (status != TB_OK)
        return tb__fail_within(status, "'%s'", key);
    *out = tb__arena_strdup(arena, json_string_value(value));
    return *out ? TB_OK : TB_NO_MEMORY;
}

/* A view that is wrong for every tensor is said at once; one with captures when they are known. */
static tb_status check_view(const char *text) {
    tb_view *view;
    if (!text || strchr(text, '\\'))
        return TB_OK;
    TB_TRY(tb_view_parse(text, &view));
    tb_view_destroy(view);
    return TB_OK;
}

static tb_status read_form(const json_t *json, bool is_target, const tb__spec_rule *rule, tb__spec_form *form,
                           tb__arena *arena) {
    const json_t *shape = json_object_get(json, "shape"), *stage = json_object_get(json, "stage");
    if (!is_target && (json_object_get(json, "name") || shape))
        return tb__fail(TB_INVALID, "'%s' is for 'dst'; the source's %s", shape ? "shape" : "name",
                        shape ? "is the entry's 'shape'" : "is what 'match' matches");
    TB_TRY(read_template(json, "name", rule, arena, &form->name));
    TB_TRY(read_template(json, "view", rule, arena, &form->view));
    TB_TRY(check_view(form->view));
    form->has_own_mesh =
        json_object_get(json, "mesh") || json_object_get(json, "ranks") || json_object_get(json, "layout");
    form->has_stage = stage != NULL;
    form->stage = json_integer_value(stage);
    if (stage && (!json_is_integer(stage) || form->has_own_mesh))
        return tb__fail(TB_INVALID, "'stage' is not a number, or goes with a mesh of its own");
    form->has_shape = shape != NULL;
    if (!shape)
        return TB_OK;
    tb_status status = tb__shape_from_json(shape, &form->shape);
    return status == TB_OK ? TB_OK : tb__fail_within(status, "shape");
}

static tb_status read_side(const json_t *json_rule, const char *key, const mesh *usual, tb__spec_rule *rule,
                           tb_dtype *dtype, tb_layout **out, tb__arena *arena) {
    const json_t *json = json_object_get(json_rule, key);
    const char *text = json_string_value(json);
    bool is_target = strcmp(key, "dst") == 0;
    tb__spec_form *form = is_target ? &rule->dst_form : &rule->src_form;
    tb_status status = json_is_object(json) ? read_form(json, is_target, rule, form, arena) : TB_OK;
    form->has_own_mesh |= text && strstr(text, "mesh=");
    if (status != TB_OK)
        return tb__fail_within(status, "%s", key);
    if (text && strstr(text, "mesh=")) {
        status = tb_layout_parse(text, out);
    } else if (json_object_get(json, "layout")) {
        status = read_whole_layout(json, dtype, out);
    } else {
        side s = {.mesh = *usual};
        status = read_side_parts(json, &s, dtype, arena);
        if (status == TB_OK)
            status = finish_side(&s, out);
        for (int i = 0; i < TB_MAX_DIMS; i++)
            tb__placement_fini(&s.place[i]);
    }
    return status == TB_OK ? TB_OK : tb__fail_within(status, "%s", key);
}

/* Rules */

typedef struct reader {
    tb__spec *spec;
    mesh src, dst;
} reader;

static tb_status read_rule_parts(const reader *r, const json_t *json, tb__spec_rule *rule) {
    const json_t *shape = json_object_get(json, "shape"), *skip = json_object_get(json, "skip");
    if (skip && !json_is_boolean(skip))
        return tb__fail(TB_INVALID, "'skip' is neither true nor false");
    rule->is_skipped = json_is_true(skip);
    rule->has_shape = shape != NULL;
    if (shape) {
        tb_status status = tb__shape_from_json(shape, &rule->shape);
        if (status != TB_OK)
            return tb__fail_within(status, "shape");
    }
    if (rule->is_skipped)
        return TB_OK;
    tb_dtype side_dtype = TB_DTYPE_NONE;
    TB_TRY(read_dtype(json_object_get(json, "dtype"), &rule->src_dtype));
    TB_TRY(read_side(json, "src", &r->src, rule, &side_dtype, &rule->src, &r->spec->arena));
    if (side_dtype != TB_DTYPE_NONE && rule->src_dtype != TB_DTYPE_NONE && side_dtype != rule->src_dtype)
        return tb__fail(TB_INVALID, "its dtype is %s, but that of 'src' is %s", tb_dtype_name(rule->src_dtype),
                        tb_dtype_name(side_dtype));
    if (side_dtype != TB_DTYPE_NONE)
        rule->src_dtype = side_dtype;
    TB_TRY(read_side(json, "dst", &r->dst, rule, &rule->dst_dtype, &rule->dst, &r->spec->arena));
    TB_TRY(tb__spec_read_quants(json, json_object_get(json, "match") != NULL, rule, &r->spec->arena));
    tb_status status = rule->has_shape ? tb_layout_check(rule->src, &rule->shape) : TB_OK;
    if (status != TB_OK)
        return tb__fail_within(status, "src");
    if (rule->dst_form.has_shape)
        status = tb_layout_check(rule->dst, &rule->dst_form.shape);
    else if (rule->has_shape && !rule->src_form.view && !rule->dst_form.view)
        status = tb_layout_check(rule->dst, &rule->shape);
    return status == TB_OK ? TB_OK : tb__fail_within(status, "dst");
}

static tb_status read_rule(const reader *r, const json_t *json, const char *const *keys, tb__spec_rule *rule) {
    tb_status status =
        json_is_object(json) ? tb__spec_check_keys(json, keys) : tb__fail(TB_INVALID, "it is not an object");
    if (status == TB_OK)
        status = read_rule_parts(r, json, rule);
    return status == TB_OK ? TB_OK : tb__fail_within(status, "%s", rule->where);
}

/* One that follows another of the same tensors holds together with that. */
static tb_status read_entry(const reader *r, const json_t *json, const char *const *keys, tb__spec_rule *rule,
                            const tb__spec_rule *before) {
    TB_TRY(read_rule(r, json, keys, rule));
    rule->is_more = before && strcmp(before->match, rule->match) == 0;
    if (rule->is_more && (rule->is_skipped || before->is_skipped))
        return tb__fail(TB_INVALID, "%s: of what holds for the same tensors, one leaves them out", rule->where);
    return TB_OK;
}

static tb_status read_tensor(const reader *r, const char *name, const json_t *json) {
    static const char *const keys[] = {"shape", "dtype", "src", "dst", "skip", NULL};
    tb__spec *spec = r->spec;
    size_t count = json_is_array(json) ? json_array_size(json) : 1;
    tb__spec_rule *first = &spec->tensors[spec->ntensors];
    for (size_t i = 0; i < count; i++) {
        tb__spec_rule *rule = first + i, *before = i > 0 ? rule - 1 : NULL;
        *rule = (tb__spec_rule){.match = before ? before->match : tb__arena_strdup(&spec->arena, name)};
        if (!rule->match || (i == 0 && !tb__index_add(&spec->by_name, tb__hash_string(0, rule->match), spec->ntensors)))
            return TB_NO_MEMORY;
        spec->ntensors++;
        snprintf(rule->where, sizeof rule->where, "tensors '%.50s'", rule->match);
        TB_TRY(read_entry(r, json_is_array(json) ? json_array_get(json, i) : json, keys, rule, before));
    }
    return TB_OK;
}

static tb_status read_tensors(const reader *r, const json_t *json) {
    tb__spec *spec = r->spec;
    size_t count = 0;
    if (!json)
        return TB_OK;
    if (!json_is_object(json))
        return tb__fail(TB_INVALID, "'tensors' is not an object of names and what holds for them");
    for (void *it = json_object_iter((json_t *)json); it; it = json_object_iter_next((json_t *)json, it)) {
        const json_t *value = json_object_iter_value(it);
        count += json_is_array(value) ? json_array_size(value) : 1;
    }
    spec->tensors = tb__arena_alloc(&spec->arena, count, sizeof *spec->tensors);
    if (!spec->tensors)
        return TB_NO_MEMORY;
    for (void *it = json_object_iter((json_t *)json); it; it = json_object_iter_next((json_t *)json, it))
        TB_TRY(read_tensor(r, json_object_iter_key(it), json_object_iter_value(it)));
    return TB_OK;
}

static tb_status read_rules(const reader *r, const json_t *json) {
    static const char *const keys[] = {"match", "shape", "dtype", "src", "dst", "skip", NULL};
    tb__spec *spec = r->spec;
    if (!json)
        return TB_OK;
    if (!json_is_array(json))
        return tb__fail(TB_INVALID, "'rules' is not an array");
    spec->rules = tb__arena_alloc(&spec->arena, json_array_size(json), sizeof *spec->rules);
    if (!spec->rules)
        return TB_NO_MEMORY;
    while (spec->nrules < json_array_size(json)) {
        const json_t *one = json_array_get(json, spec->nrules);
        const char *match = json_string_value(json_object_get(one, "match"));
        tb__spec_rule *rule = &spec->rules[spec->nrules];
        *rule = (tb__spec_rule){.match = tb__arena_strdup(&spec->arena, match ? match : "")};
        if (!rule->match)
            return TB_NO_MEMORY;
        snprintf(rule->where, sizeof rule->where, "rules %zu", spec->nrules++);
        tb_status status = match ? tb__pattern_init_shell(&rule->pattern, match) : TB_OK;
        if (status != TB_OK)
            return tb__fail_within(status, "%s", rule->where);
        TB_TRY(read_entry(r, one, keys, rule, rule > spec->rules ? rule - 1 : NULL));
        if (!match)
            return tb__fail(TB_INVALID, "%s: 'match' is missing or not text", rule->where);
    }
    return TB_OK;
}

static tb_status read_constants(tb__spec *spec, const json_t *json) {
    const char *name;
    json_t *value;
    if (json && !json_is_object(json))
        return tb__fail(TB_INVALID, "'constants' is not an object of names and numbers");
    spec->constants = tb__arena_alloc(&spec->arena, json_object_size(json), sizeof *spec->constants);
    if (!spec->constants)
        return TB_NO_MEMORY;
    json_object_foreach((json_t *)json, name, value) {
        tb__spec_constant *one = &spec->constants[spec->nconstants++];
        *one = (tb__spec_constant){tb__arena_strdup(&spec->arena, name), (float)json_number_value(value)};
        if (!one->name)
            return TB_NO_MEMORY;
        if (!*name || !json_is_number(value))
            return tb__fail(TB_INVALID, "constants '%.60s': it has no %s", name, *name ? "number" : "name");
    }
    return TB_OK;
}

static tb_status read_files(const json_t *json, tb__spec_files *out) {
    static const char *const words[] = {[TB__SPEC_RANKS] = "ranks", [TB__SPEC_HF] = "hf", [TB__SPEC_VLLM] = "vllm"};
    const char *text = json_string_value(json);
    for (size_t i = 0; text && i < sizeof words / sizeof *words; i++) {
        if (strcmp(text, words[i]) == 0) {
            *out = (tb__spec_files)i;
            return TB_OK;
        }
    }
    return json ? tb__fail(TB_INVALID, "'files' is none of \"ranks\", \"hf\" and \"vllm\"") : TB_OK;
}

static tb_status read_root(tb__spec *spec, const json_t *json) {
    static const char *const keys[] = {"src_mesh", "dst_mesh", "tensors", "rules", "constants", "files", NULL};
    reader r = {.spec = spec};
    if (!json_is_object(json))
        return tb__fail(TB_INVALID, "a spec is a JSON object");
    TB_TRY(tb__spec_check_keys(json, keys));
    if (!json_object_get(json, "tensors") && !json_object_get(json, "rules"))
        return tb__fail(TB_INVALID, "a spec has 'tensors' or 'rules'; this one has neither");
    TB_TRY(read_files(json_object_get(json, "files"), &spec->files));
    TB_TRY(read_constants(spec, json_object_get(json, "constants")));
    TB_TRY(read_default_mesh(json, "src_mesh", &r.src, &spec->src_mesh, &spec->arena));
    TB_TRY(read_default_mesh(json, "dst_mesh", &r.dst, &spec->dst_mesh, &spec->arena));
    TB_TRY(read_tensors(&r, json_object_get(json, "tensors")));
    return read_rules(&r, json_object_get(json, "rules"));
}

static tb_status load_json(const char *text, size_t length, json_t **out) {
    json_error_t error;
    *out = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error);
    if (!*out)
        return tb__fail(json_error_code(&error) == json_error_out_of_memory ? TB_NO_MEMORY : TB_INVALID,
                        "not JSON, at line %d, column %d: %s", error.line, error.column, error.text);
    return TB_OK;
}

tb_status tb__spec_parse(const char *text, size_t length, tb__spec **out) {
    json_t *json;
    TB_TRY(load_json(text, length, &json));
    tb_status status = tb__spec_from_json(json, out);
    json_decref(json);
    return status;
}

tb_status tb__spec_from_json(const json_t *json, tb__spec **out) {
    tb__spec *spec = tb__calloc(1, sizeof *spec);
    tb_status status = spec ? read_root(spec, json) : TB_NO_MEMORY;
    if (status != TB_OK)
        tb__spec_destroy(spec);
    else
        *out = spec;
    return status;
}

/* What the text stands for, where it refers to a model. */
static tb_status parse_for(const char *text, size_t length, const char *dir, tb__text *notes, tb__spec **out) {
    json_t *json, *resolved = NULL;
    TB_TRY(load_json(text, length, &json));
    tb_status status = json_object_get(json, "model") ? tb__model_spec_resolve(json, dir, &resolved, notes) : TB_OK;
    if (status == TB_OK)
        status = tb__spec_from_json(resolved ? resolved : json, out);
    json_decref(json);
    json_decref(resolved);
    return status;
}

tb_status tb__spec_load(const char *path, const char *dir, tb__text *notes, tb__spec **out) {
    tb__text unused = {0};
    int fd = -1;
    int64_t nbytes = 0;
    TB_TRY(tb__file_open(path, &fd, &nbytes));
    char *text = NULL;
    tb_status status = TB_OK;
    if (nbytes > MAX_SPEC) {
        status =
            tb__file_fail(TB_TOO_BIG, path, "a spec of %" PRId64 " bytes is more than is read (%d)", nbytes, MAX_SPEC);
    } else if (!(text = tb__malloc((size_t)nbytes + 1, 1))) {
        status = TB_NO_MEMORY;
    } else {
        status = tb__file_read(fd, path, 0, text, (size_t)nbytes);
        if (status == TB_OK && (status = parse_for(text, (size_t)nbytes, dir, notes ? notes : &unused, out)) != TB_OK)
            tb__file_fail_within(status, path);
    }
    close(fd);
    free(text);
    tb__text_fini(&unused);
    return status;
}

void tb__spec_destroy(tb__spec *spec) {
    if (!spec)
        return;
    for (size_t i = 0; i < spec->ntensors + spec->nrules; i++) {
        tb__spec_rule *rule = i < spec->ntensors ? &spec->tensors[i] : &spec->rules[i - spec->ntensors];
        tb_layout_destroy(rule->src);
        tb_layout_destroy(rule->dst);
        tb__pattern_fini(&rule->pattern);
    }
    tb_layout_destroy(spec->src_mesh.layout);
    tb_layout_destroy(spec->dst_mesh.layout);
    tb__index_fini(&spec->by_name);
    tb__arena_fini(&spec->arena);
    free(spec);
}

const tb__spec_rule *tb__spec_find(const tb__spec *spec, const char *name) {
    size_t probe = 0, i;
    while ((i = tb__index_next(&spec->by_name, tb__hash_string(0, name), &probe)) != TB__NOWHERE) {
        if (strcmp(spec->tensors[i].match, name) == 0)
            return &spec->tensors[i];
    }
    tb__capture captures[TB__CAPTURES];
    for (i = 0; i < spec->nrules; i++) {
        if (!spec->rules[i].is_more && tb__pattern_match(&spec->rules[i].pattern, name, captures))
            return &spec->rules[i];
    }
    return NULL;
}

const tb__spec_rule *tb__spec_more(const tb__spec *spec, const tb__spec_rule *rule) {
    const tb__spec_rule *end = rule->pattern.text ? spec->rules + spec->nrules : spec->tensors + spec->ntensors;
    return rule + 1 < end && rule[1].is_more ? rule + 1 : NULL;
}
