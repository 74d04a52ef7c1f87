/* Specs: the quantisation of each side, and tensors that share a scale. */
#include "reshard/pattern.h"
#include "reshard/spec_inside.h"

#include <string.h>

/* The options of each format; the first of two words is the default. */
static const struct {
    tb__quant_kind kind;
    const char *exponents[2]; /* NULL: there is no choice */
    bool can_swizzle, has_group;
} formats[] = {
    {TB__QUANT_MXFP8, {"ceil", "floor"}, true, false},
    {TB__QUANT_FP8_BLOCK, {"any", "power_of_two"}, false, false},
    {TB__QUANT_FP8_TENSOR, {"any", "power_of_two"}, false, true},
    {TB__QUANT_NVFP4, {NULL, NULL}, true, true},
};
enum { NFORMATS = sizeof formats / sizeof *formats };

static tb_status find_format(const json_t *json, size_t *out) {
    const char *name = json_string_value(json);
    for (size_t i = 0; name && i < NFORMATS; i++) {
        if (strcmp(name, tb__quant_name(formats[i].kind)) == 0) {
            *out = i;
            return TB_OK;
        }
    }
    return tb__fail(TB_INVALID, "the format is none of \"mxfp8\", \"fp8_block\", \"fp8_tensor\" and \"nvfp4\"");
}

/* The index of the given word; 0 if it is missing. */
static tb_status read_choice(const json_t *json, const char *key, const char *const words[2], int *out) {
    const json_t *value = json_object_get(json, key);
    const char *text = json_string_value(value);
    *out = 0;
    if (!value)
        return TB_OK;
    for (int i = 0; i < 2; i++) {
        if (text && words[i] && strcmp(text, words[i]) == 0) {
            *out = i;
            return TB_OK;
        }
    }
    if (!words[0])
        return tb__fail(TB_INVALID, "the format has no '%s'", key);
    if (!words[1])
        return tb__fail(TB_INVALID, "'%s' is not \"%s\"", key, words[0]);
    return tb__fail(TB_INVALID, "'%s' is neither \"%s\" nor \"%s\"", key, words[0], words[1]);
}

/* "mxfp8", or {"format": "mxfp8", "exponent": "floor", "scales": "swizzled"} */
static tb_status read_quant(const json_t *json, bool is_target, tb__quant_format *out) {
    static const char *const target_keys[] = {"format", "exponent", "scales", "group", NULL};
    static const char *const source_keys[] = {"format", "scales", NULL}; /* the other options show in the scales
                                                                          * themselves */
    size_t i;
    int is_second, is_swizzled;
    if (json_is_object(json))
        TB_TRY(tb__spec_check_keys(json, is_target ? target_keys : source_keys));
    TB_TRY(find_format(json_is_object(json) ? json_object_get(json, "format") : json, &i));
    const char *const orders[2] = {"rows", formats[i].can_swizzle ? "swizzled" : NULL};
    TB_TRY(read_choice(json, "exponent", formats[i].exponents, &is_second));
    TB_TRY(read_choice(json, "scales", orders, &is_swizzled));
    *out = (tb__quant_format){.kind = formats[i].kind, .is_swizzled = is_swizzled};
    out->is_floor = is_second && out->kind == TB__QUANT_MXFP8;
    out->is_power_of_two = is_second && out->kind != TB__QUANT_MXFP8;
    if (json_object_get(json, "group") && !formats[i].has_group)
        return tb__fail(TB_INVALID, "%s has no 'group': its scales cover blocks", tb__quant_name(out->kind));
    return TB_OK;
}

static size_t count_stars(const char *text) {
    size_t n = 0;
    for (; *text; text++)
        n += *text == '*';
    return n;
}

static tb_status read_group(const json_t *json, bool is_pattern, tb__spec_rule *rule, tb__arena *arena) {
    const char *text = json_string_value(json);
    if (!json)
        return TB_OK;
    if (!text || !*text)
        return tb__fail(TB_INVALID, "'group' is not a name");
    size_t stars = count_stars(text);
    if (stars > 0 && !is_pattern)
        return tb__fail(TB_INVALID, "'group' has a *, which only that of a rule may have");
    if (stars > 0 && (*rule->match == '^' || strpbrk(rule->match, "?[\\")))
        return tb__fail(TB_INVALID, "'group' has a *, so that 'match' may have no other wildcards than *");
    if (stars > count_stars(rule->match) || stars >= TB__CAPTURES)
        return tb__fail(TB_INVALID, "'group' has more * than 'match', or than %d", TB__CAPTURES - 1);
    rule->group = tb__arena_strdup(arena, text);
    return rule->group ? TB_OK : TB_NO_MEMORY;
}

static tb_status read_target(const json_t *json, bool is_pattern, tb__spec_rule *rule, tb__arena *arena) {
    TB_TRY(read_quant(json, true, &rule->dst_quant));
    return read_group(json_object_get(json, "group"), is_pattern, rule, arena);
}

tb_status tb__spec_read_quants(const json_t *json, bool is_pattern, tb__spec_rule *rule, tb__arena *arena) {
    const json_t *src = json_object_get(json_object_get(json, "src"), "quantisation");
    const json_t *dst = json_object_get(json_object_get(json, "dst"), "quantisation");
    tb_status status = src ? read_quant(src, false, &rule->src_quant) : TB_OK;
    if (status != TB_OK)
        return tb__fail_within(status, "src: quantisation");
    if (src && rule->src_dtype == TB_DTYPE_NONE)
        rule->src_dtype = TB_BF16;
    if (src && rule->src_dtype != TB_F32 && rule->src_dtype != TB_F16 && rule->src_dtype != TB_BF16)
        return tb__fail(TB_INVALID, "its dtype is %s, but a quantised source is read as f32, f16 or bf16",
                        tb_dtype_name(rule->src_dtype));
    if (dst && rule->dst_dtype != TB_DTYPE_NONE)
        return tb__fail(TB_INVALID, "dst: it has both 'dtype' and 'quantisation', which has its own dtypes");
    status = dst ? read_target(dst, is_pattern, rule, arena) : TB_OK;
    return status == TB_OK ? TB_OK : tb__fail_within(status, "dst: quantisation");
}

/* Replaces each * of the group by the text that the * of the pattern matched. */
static tb_status fill_stars(const tb__spec_rule *rule, const char *name, tb__text *out) {
    tb__pattern pattern;
    tb__capture captures[TB__CAPTURES];
    size_t n = 0;
    tb_status status = tb__pattern_init(&pattern, rule->match);
    if (status == TB_OK && !tb__pattern_match(&pattern, name, captures))
        status = tb__fail(TB_INTERNAL, "'%.100s' does not match '%.100s'", name, rule->match);
    tb__pattern_fini(&pattern);
    TB_TRY(status);
    for (const char *at = rule->group; *at; at++) {
        if (*at == '*') {
            n++;
            tb__name_add(out, captures[n].start, captures[n].length);
        } else {
            tb__name_add(out, at, 1);
        }
    }
    return TB_OK;
}

tb_status tb__spec_group(const tb__spec_rule *rule, const char *name, tb__arena *arena, const char **out) {
    *out = rule->group;
    if (!rule->group)
        return TB_OK;
    if (strcmp(rule->group, "tensor") == 0) {
        *out = name;
        return TB_OK;
    }
    if (count_stars(rule->group) == 0)
        return TB_OK;
    tb__text text = {0};
    char *filled;
    tb_status status = fill_stars(rule, name, &text);
    if (status != TB_OK) {
        tb__text_fini(&text);
        return status;
    }
    TB_TRY(tb__text_take(&text, &filled));
    *out = tb__arena_strdup(arena, filled);
    free(filled);
    return *out ? TB_OK : TB_NO_MEMORY;
}
