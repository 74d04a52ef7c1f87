/* Placements: their text form, their JSON form, copies of them. */
#include "base/text.h"
#include "layout/layout.h"

#include <ctype.h>
#include <inttypes.h>
#include <string.h>
#include <strings.h>

static const char *const op_names[] = {
    [TB_SUM] = "sum", [TB_AVG] = "avg", [TB_MIN] = "min", [TB_MAX] = "max", [TB_PRODUCT] = "product"};

enum { NOPS = sizeof op_names / sizeof *op_names };

/* Spelled names, longest first so that no name hides another. The short forms have no parentheses. */
static const struct {
    const char *name, *json;
    tb_placement_kind kind;
} kinds[] = {
    {"StridedShard", "SS", TB_STRIDED_SHARD}, {"BlockShard", "BS", TB_BLOCK_SHARD}, {"Replicate", "R", TB_REPLICATE},
    {"Explicit", "E", TB_EXPLICIT},           {"Partial", "P", TB_PARTIAL},         {"Shard", "S", TB_SHARD},
};

enum { NKINDS = sizeof kinds / sizeof *kinds };

const char *tb__reduce_op_name(tb_reduce_op op) {
    return (unsigned)op < NOPS ? op_names[op] : "?";
}

static bool read_op(const char **at, tb_reduce_op *op) {
    tb__skip_space(at);
    for (int i = 0; i < NOPS; i++) {
        size_t n = strlen(op_names[i]);
        if (strncasecmp(*at, op_names[i], n) == 0 && !isalnum((unsigned char)(*at)[n])) {
            *at += n;
            *op = (tb_reduce_op)i;
            return true;
        }
    }
    return false;
}

bool tb__reduce_op_read(const char *name, tb_reduce_op *out) {
    return read_op(&name, out) && !*name;
}

const char *tb__placement_tag(tb_placement_kind kind) {
    for (size_t i = 0; i < NKINDS; i++) {
        if (kinds[i].kind == kind)
            return kinds[i].json;
    }
    return NULL;
}

bool tb__placement_shards(const tb_placement *placement) {
    return placement->kind != TB_REPLICATE && placement->kind != TB_PARTIAL;
}

void tb__placement_fini(tb_placement *placement) {
    free((void *)placement->sizes);
    free((void *)placement->list_ends);
    free((void *)placement->segments);
    *placement = (tb_placement){0};
}

/* Arrays of a placement under construction. */
typedef struct parts {
    TB_VEC(int64_t) sizes;
    TB_VEC(size_t) list_ends;
    TB_VEC(tb_segment) segments;
} parts;

/* Moves the parts to *out; frees them if reading the placement has failed. */
static tb_status finish_placement(const tb_placement *placement, const parts *p, tb_status status, tb_placement *out) {
    if (status != TB_OK) {
        free(p->sizes.item);
        free(p->list_ends.item);
        free(p->segments.item);
        return status;
    }
    *out = *placement;
    out->nsizes = p->sizes.count;
    out->sizes = p->sizes.item;
    out->nlists = p->list_ends.count;
    out->list_ends = p->list_ends.item;
    out->segments = p->segments.item;
    return TB_OK;
}

/* " 0-3,5-6; ; 3-5": lists separated by semicolons, each of half-open segments, up to the closing parenthesis. */
static tb_status read_lists(const char **at, parts *p) {
    do {
        tb__skip_space(at);
        while (**at != ';' && **at != ')') {
            tb_segment s;
            if (!tb__read_int(at, &s.start) || !tb__accept(at, '-') || !tb__read_int(at, &s.stop))
                return tb__fail(TB_INVALID, "expected a segment such as 0-3 at '%.40s'", *at);
            if (!tb__vec_push(&p->segments, s))
                return TB_NO_MEMORY;
            if (!tb__accept(at, ','))
                tb__skip_space(at);
            else if (tb__skip_space(at), **at == ';' || **at == ')')
                return tb__fail(TB_INVALID, "expected a segment such as 0-3 at '%.40s'", *at);
            else
                continue;
            if (**at != ';' && **at != ')')
                return tb__fail(TB_INVALID, "expected ',', ';' or ')' at '%.40s'", *at);
        }
        if (!tb__vec_push(&p->list_ends, p->segments.count))
            return TB_NO_MEMORY;
    } while (tb__accept(at, ';'));
    return TB_OK;
}

/* Reads the arguments between a kind's parentheses. */
static tb_status read_arguments(const char **at, tb_placement *out, parts *p) {
    if (out->kind == TB_PARTIAL) {
        if (!read_op(at, &out->op))
            return tb__fail(TB_INVALID, "Partial takes sum, avg, min, max or product, not '%.40s'", *at);
        return TB_OK;
    }
    int64_t dim;
    const char *begin = *at;
    if (!tb__read_int(at, &dim) || dim < -TB_MAX_DIMS || dim >= TB_MAX_DIMS)
        return tb__fail(TB_INVALID, "expected a dim between %d and %d at '%.40s'", -TB_MAX_DIMS, TB_MAX_DIMS - 1,
                        begin);
    out->dim = (int)dim;
    if (out->kind == TB_SHARD)
        return TB_OK;
    if (!tb__accept(at, ','))
        return tb__fail(TB_INVALID, "expected ',' after the dim at '%.40s'", *at);
    if (out->kind == TB_EXPLICIT)
        return read_lists(at, p);
    if (out->kind == TB_STRIDED_SHARD) {
        if (!tb__read_int(at, &out->split))
            return tb__fail(TB_INVALID, "expected a split factor at '%.40s'", *at);
        return TB_OK;
    }
    do {
        int64_t size;
        if (!tb__read_int(at, &size))
            return tb__fail(TB_INVALID, "expected a block size at '%.40s'", *at);
        if (!tb__vec_push(&p->sizes, size))
            return TB_NO_MEMORY;
    } while (tb__accept(at, ','));
    return TB_OK;
}

tb_status tb__placement_parse(const char **at, tb_placement *out) {
    tb__skip_space(at);
    tb_placement placement = {0};
    const char *begin = *at;
    size_t letters = 0;
    while (isalpha((unsigned char)begin[letters]))
        letters++;
    size_t i = 0;
    while (i < NKINDS && !(strlen(kinds[i].name) == letters && strncasecmp(begin, kinds[i].name, letters) == 0) &&
           !(letters == 1 && strlen(kinds[i].json) == 1 && kinds[i].kind != TB_EXPLICIT &&
             toupper((unsigned char)*begin) == *kinds[i].json))
        i++;
    if (i == NKINDS)
        return tb__fail(TB_INVALID,
                        "'%.40s' is not a placement: Shard(d), StridedShard(d,f), BlockShard(d,size,...), "
                        "Explicit(d, 0-3,5-6; 3-5), Replicate or Partial(op); short S0, R, P",
                        begin);
    *at += letters;
    placement.kind = kinds[i].kind;
    bool is_short = letters == 1;
    parts p = {0};
    tb_status status = TB_OK;
    if (placement.kind == TB_REPLICATE) {
        /* takes nothing */
    } else if (placement.kind == TB_SHARD && is_short && **at != '(') {
        status = read_arguments(at, &placement, &p);
    } else if (tb__accept(at, '(')) {
        status = read_arguments(at, &placement, &p);
        if (status == TB_OK && !tb__accept(at, ')'))
            status = tb__fail(TB_INVALID, "expected ')' at '%.40s'", *at);
    } else if (placement.kind != TB_PARTIAL) { /* Partial alone is Partial(sum) */
        status = tb__fail(TB_INVALID, "%s needs its arguments in parentheses", kinds[i].name);
    }
    return finish_placement(&placement, &p, status, out);
}

static tb_status read_json_int(const json_t *json, const char *what, int64_t *out) {
    if (!json_is_integer(json))
        return tb__fail(TB_INVALID, "%s is not an integer", what);
    *out = json_integer_value(json);
    return TB_OK;
}

static tb_status read_json_lists(const json_t *lists, parts *p) {
    if (!json_is_array(lists))
        return tb__fail(TB_INVALID, "[\"E\",dim,lists]: lists is not an array");
    for (size_t i = 0; i < json_array_size(lists); i++) {
        const json_t *list = json_array_get(lists, i);
        if (!json_is_array(list))
            return tb__fail(TB_INVALID, "[\"E\",dim,lists]: list %zu is not an array of segments", i);
        for (size_t j = 0; j < json_array_size(list); j++) {
            const json_t *pair = json_array_get(list, j);
            tb_segment s;
            if (json_array_size(pair) != 2)
                return tb__fail(TB_INVALID, "[\"E\",dim,lists]: list %zu, segment %zu is not [start,stop]", i, j);
            TB_TRY(read_json_int(json_array_get(pair, 0), "a segment's start", &s.start));
            TB_TRY(read_json_int(json_array_get(pair, 1), "a segment's stop", &s.stop));
            if (!tb__vec_push(&p->segments, s))
                return TB_NO_MEMORY;
        }
        if (!tb__vec_push(&p->list_ends, p->segments.count))
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

static tb_status read_json_arguments(const json_t *json, tb_placement *out, parts *p) {
    size_t n = json_array_size(json);
    if (out->kind == TB_REPLICATE)
        return n == 1 ? TB_OK : tb__fail(TB_INVALID, "[\"R\"] takes nothing more");
    if (out->kind == TB_PARTIAL) {
        const char *name = json_string_value(json_array_get(json, 1));
        if (n != 2 || !name || !tb__reduce_op_read(name, &out->op))
            return tb__fail(TB_INVALID, "[\"P\",op] takes sum, avg, min, max or product");
        return TB_OK;
    }
    int64_t dim;
    TB_TRY(read_json_int(json_array_get(json, 1), "a placement's dim", &dim));
    if (dim < -TB_MAX_DIMS || dim >= TB_MAX_DIMS)
        return tb__fail(TB_INVALID, "a placement's dim, %" PRId64 ", is out of range", dim);
    out->dim = (int)dim;
    if (out->kind == TB_SHARD)
        return n == 2 ? TB_OK : tb__fail(TB_INVALID, "[\"S\",dim] takes nothing more");
    if (out->kind == TB_STRIDED_SHARD) {
        if (n != 3)
            return tb__fail(TB_INVALID, "[\"SS\",dim,split_factor] has %zu elements", n);
        return read_json_int(json_array_get(json, 2), "a split factor", &out->split);
    }
    if (out->kind == TB_EXPLICIT) {
        if (n != 3)
            return tb__fail(TB_INVALID, "[\"E\",dim,lists] has %zu elements", n);
        return read_json_lists(json_array_get(json, 2), p);
    }
    for (size_t i = 2; i < n; i++) {
        int64_t size;
        TB_TRY(read_json_int(json_array_get(json, i), "a block size", &size));
        if (!tb__vec_push(&p->sizes, size))
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

tb_status tb__placement_from_json(const json_t *json, tb_placement *out) {
    const char *tag = json_string_value(json_array_get(json, 0));
    size_t i = 0;
    while (i < NKINDS && !(tag && strcmp(tag, kinds[i].json) == 0))
        i++;
    if (i == NKINDS)
        return tb__fail(TB_INVALID, "a placement is one of [\"R\"], [\"S\",dim], [\"SS\",dim,split_factor], "
                                    "[\"BS\",dim,size,...], [\"E\",dim,lists], [\"P\",op]");
    tb_placement placement = {.kind = kinds[i].kind};
    parts p = {0};
    tb_status status = read_json_arguments(json, &placement, &p);
    return finish_placement(&placement, &p, status, out);
}

static bool copy_array(const void *from, size_t count, size_t size, void **out) {
    *out = count > 0 ? tb__memdup(from, count, size) : NULL;
    return *out || count == 0;
}

tb_status tb__placement_copy(const tb_placement *from, tb_placement *out) {
    tb_placement copy = {.kind = from->kind};
    bool ok = true;
    if (tb__placement_shards(from))
        copy.dim = from->dim;
    if (from->kind == TB_STRIDED_SHARD) {
        copy.split = from->split;
    } else if (from->kind == TB_BLOCK_SHARD) {
        copy.nsizes = from->nsizes;
        ok = copy_array(from->sizes, from->nsizes, sizeof *from->sizes, (void **)&copy.sizes);
    } else if (from->kind == TB_EXPLICIT) {
        size_t nsegments = from->nlists ? from->list_ends[from->nlists - 1] : 0;
        copy.nlists = from->nlists;
        ok = copy_array(from->list_ends, from->nlists, sizeof *from->list_ends, (void **)&copy.list_ends) &&
             copy_array(from->segments, nsegments, sizeof *from->segments, (void **)&copy.segments);
    } else if (from->kind == TB_PARTIAL) {
        copy.op = from->op;
    }
    if (!ok) {
        tb__placement_fini(&copy);
        return TB_NO_MEMORY;
    }
    *out = copy;
    return TB_OK;
}
