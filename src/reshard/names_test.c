/* Names: layers and experts of a rank in the whole model, rules, and which names of two sides belong together. */
#include "base/mem.h"
#include "reshard/pattern.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static void assert_ok(tb_status status) {
    if (status != TB_OK)
        print_error("%s\n", tb_error_detail());
    assert_int_equal(status, TB_OK);
}

static void assert_says(tb_status status, tb_status expected, const char *sentence) {
    assert_int_equal(status, expected);
    assert_string_equal(tb_error_detail(), sentence);
}

/* One name, which becomes one tensor without a view. */
static void assert_resolves(const tb_names_opts *opts, const char *local, const char *expected) {
    tb_names *names;
    tb_parts parts;
    assert_ok(tb_names_create(opts, &names));
    assert_ok(tb_names_resolve(names, &local, 1, &parts));
    assert_int_equal(parts.count, 1);
    assert_int_equal(parts.part[0].param, 0);
    assert_null(parts.part[0].view);
    assert_null(parts.part[0].text);
    assert_string_equal(parts.part[0].name, expected);
    tb_parts_fini(&parts);
    tb_names_destroy(names);
}

static void assert_refuses(const tb_names_opts *opts, const char *local, const char *sentence) {
    tb_names *names;
    tb_parts parts;
    assert_ok(tb_names_create(opts, &names));
    assert_says(tb_names_resolve(names, &local, 1, &parts), TB_INVALID, sentence);
    tb_names_destroy(names);
}

static void nothing_said_changes_nothing(void **state) {
    (void)state;
    assert_resolves(NULL, "layers.0.weight", "layers.0.weight");
    assert_resolves(NULL, "a\\b", "a\\b");
    assert_resolves(NULL, "", "");
}

static void stages(void **state) {
    (void)state;
    tb_names_opts opts = {.size = sizeof opts, .stage = 1, .nstages = 2, .nlayers = 32};
    assert_resolves(&opts, "layers.0", "layers.16");
    assert_resolves(&opts, "decoder.layers.15.mlp.layers.3.weight", "decoder.layers.31.mlp.layers.3.weight");
    assert_resolves(&opts, "layers.x.weight", "layers.x.weight");
    assert_resolves(&opts, "sublayers.1.weight", "sublayers.1.weight");
    assert_resolves(&opts, "embed_tokens.weight", "embed_tokens.weight");
    assert_refuses(&opts, "layers.16.weight", "'layers.16.weight' has layer 16, but this rank has 16");
    assert_refuses(&opts, "layers.99999999999999999999.w",
                   "'layers.99999999999999999999.w' has layer 99999999999999999999, but this rank has 16");

    opts.layer_pattern = "h.#.";
    assert_resolves(&opts, "transformer.h.2.ln.weight", "transformer.h.18.ln.weight");
    assert_resolves(&opts, "layers.0.weight", "layers.0.weight");
    opts.layer_pattern = "blocks*.w#";
    assert_resolves(&opts, "blocks_a.w4_scale", "blocks_a.w20_scale");
    assert_resolves(&opts, "blocks.a.w4", "blocks.a.w4");
}

static void uneven_stages(void **state) {
    (void)state;
    static const int64_t first[] = {0, 3, 3, 8};
    tb_names_opts opts = {.size = sizeof opts, .nstages = 4, .nlayers = 10, .first_layers = first};
    assert_resolves(&opts, "layers.2.w", "layers.2.w");
    assert_refuses(&opts, "layers.3.w", "'layers.3.w' has layer 3, but this rank has 3");
    opts.stage = 1;
    assert_refuses(&opts, "layers.0.w", "'layers.0.w' has layer 0, but this rank has 0");
    opts.stage = 3;
    assert_resolves(&opts, "layers.1.w", "layers.9.w");
    assert_refuses(&opts, "layers.2.w", "'layers.2.w' has layer 2, but this rank has 2");
}

static void virtual_stages(void **state) {
    (void)state;
    /* 16 layers, 2 stages of 2 chunks: stage 0 has layers 0-3 and 8-11, stage 1 has 4-7 and 12-15 */
    tb_names_opts opts = {.size = sizeof opts, .stage = 1, .nstages = 2, .chunk = 1, .nchunks = 2, .nlayers = 16};
    assert_resolves(&opts, "layers.0.w", "layers.12.w");
    opts.chunk = 0;
    assert_resolves(&opts, "layers.3.w", "layers.7.w");
    static const int64_t first[] = {0, 1, 5, 15};
    opts.first_layers = first;
    opts.chunk = 1;
    assert_resolves(&opts, "layers.0.w", "layers.15.w");
    opts.stage = 0;
    assert_resolves(&opts, "layers.0.w", "layers.5.w");
}

static void experts(void **state) {
    (void)state;
    tb_names_opts opts = {.size = sizeof opts,
                          .expert_rank = 3,
                          .nexpert_ranks = 4,
                          .nexperts = 32,
                          .nlayers = 8,
                          .stage = 1,
                          .nstages = 2};
    assert_resolves(&opts, "layers.1.mlp.experts.7.w1", "layers.5.mlp.experts.31.w1");
    assert_resolves(&opts, "layers.1.mlp.shared_experts.0.w1", "layers.5.mlp.shared_experts.0.w1");
    assert_refuses(&opts, "layers.1.mlp.experts.8.w1", "'layers.5.mlp.experts.8.w1' has expert 8, but this rank has 8");
    opts.expert_pattern = "experts.*.weight#";
    assert_resolves(&opts, "mlp.experts.linear_fc1.weight5", "mlp.experts.linear_fc1.weight29");

    static const int64_t map[] = {5, 0, 31};
    opts.expert_pattern = NULL;
    opts.expert_map = map;
    opts.nexpert_map = 3;
    assert_resolves(&opts, "experts.0.w1", "experts.5.w1");
    assert_resolves(&opts, "experts.2.w1", "experts.31.w1");
    assert_refuses(&opts, "experts.3.w1", "'experts.3.w1' has expert 3, but this rank has 3");
}

/* A redundant expert is on two ranks under one name, but not twice on one. */
static void redundant_experts(void **state) {
    (void)state;
    static const int64_t maps[3][2] = {{0, 1}, {1, 2}, {1, 1}};
    static const char *const params[] = {"experts.0.w", "experts.1.w"};
    static const char *const expected[2][2] = {{"experts.0.w", "experts.1.w"}, {"experts.1.w", "experts.2.w"}};
    for (int rank = 0; rank < 3; rank++) {
        tb_names_opts opts = {.size = sizeof opts, .expert_map = maps[rank], .nexpert_map = 2, .nexperts = 3};
        tb_names *names;
        tb_parts parts;
        assert_ok(tb_names_create(&opts, &names));
        tb_status status = tb_names_resolve(names, params, 2, &parts);
        if (rank == 2) {
            assert_says(status, TB_INVALID, "'experts.0.w' and 'experts.1.w' both become 'experts.1.w'");
        } else {
            assert_ok(status);
            for (int i = 0; i < 2; i++)
                assert_string_equal(parts.part[i].name, expected[rank][i]);
            tb_parts_fini(&parts);
        }
        tb_names_destroy(names);
    }
}

static void rules(void **state) {
    (void)state;
    static const tb_rule list[] = {
        {"model.layers.*.self_attn.?_proj.weight", "decoder.\\1.\\2.w", NULL},
        {"model.*", "\\1", NULL},
        {"^transformer\\.h\\.([0-9]+)\\.(attn|mlp)\\.(.*)$", "layers.\\1.\\2_\\3", NULL},
        {"^exact", "found", NULL},
        {"back\\slash", "a\\\\b", NULL},
        {"kept.*", NULL, NULL},
        {"*", "other:\\0", NULL},
    };
    tb_names_opts opts = {.size = sizeof opts, .rules = list, .nrules = COUNT(list)};
    assert_resolves(&opts, "model.layers.12.self_attn.q_proj.weight", "decoder.12.q.w");
    assert_resolves(&opts, "model.layers.12.self_attn.qk_proj.weight", "layers.12.self_attn.qk_proj.weight");
    assert_resolves(&opts, "transformer.h.3.attn.c.bias", "layers.3.attn_c.bias");
    assert_resolves(&opts, "transformer.h.3.norm.bias", "other:transformer.h.3.norm.bias");
    assert_resolves(&opts, "exact", "found");
    assert_resolves(&opts, "exactly", "other:exactly");
    assert_resolves(&opts, "back\\slash", "a\\b");
    assert_resolves(&opts, "kept.as.it.is", "kept.as.it.is");

    /* rules see the numbers of the whole model */
    static const tb_rule numbered[] = {{"layers.16.*", "first.\\1", NULL}};
    opts =
        (tb_names_opts){.size = sizeof opts, .stage = 1, .nstages = 2, .nlayers = 32, .rules = numbered, .nrules = 1};
    assert_resolves(&opts, "layers.0.w", "first.w");
}

static void globs_capture(void **state) {
    (void)state;
    static const struct {
        const char *pattern, *name, *expected; /* captures with | between them; NULL: no match */
    } cases[] = {
        {"a*b*c", "aXbYbZc", "X|YbZ"}, {"*", "", ""},           {"*.w", "a.b.w", "a.b"}, {"?*", "abc", "a|bc"},
        {"a?c", "ac", NULL},           {"*ab", "aab", "a"},     {"*a*", "xxa", "xx|"},   {"a*?c", "abbc", "b|b"},
        {"abc", "abcd", NULL},         {"abc", "ab", NULL},     {"a*b", "a", NULL},      {"*?b", "ab", "|a"},
        {"[a]*", "[a]x", "x"},         {"*a?b", "aaxb", "a|x"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        tb__pattern pattern;
        tb__capture captures[TB__CAPTURES];
        char text[64] = "";
        assert_ok(tb__pattern_init(&pattern, cases[i].pattern));
        bool is_match = tb__pattern_match(&pattern, cases[i].name, captures);
        assert_int_equal(is_match, cases[i].expected != NULL);
        for (int c = 1; is_match && c <= pattern.ncaptures; c++)
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s%.*s", c > 1 ? "|" : "",
                     (int)captures[c].length, captures[c].start);
        if (is_match)
            assert_string_equal(text, cases[i].expected);
        tb__pattern_fini(&pattern);
    }
}

/* One parameter becomes several tensors, each with its view. */
static void parts_of_a_parameter(void **state) {
    (void)state;
    static const tb_rule list[] = {
        {"*.linear_qkv.weight", "\\1.q", "split(0,-1,6,128) slice(1,0,4)"},
        {"*.linear_qkv.weight", "\\1.k", "split(0,-1,6,128) slice(1,4,1)"},
        {"*.linear_qkv.weight", "\\1.v", "split(0,-1,6,128) slice(1,5,1)"},
        {"*.weight", "\\1.w", NULL},
        {"*.linear_qkv.weight", "\\1.never", NULL},
    };
    static const char *const params[] = {"0.weight", "0.linear_qkv.weight", "1.linear_qkv.weight", "bias"};
    static const struct {
        size_t param;
        const char *name;
        bool has_view;
    } expected[] = {{0, "0.w", false}, {1, "0.q", true}, {1, "0.k", true}, {1, "0.v", true},
                    {2, "1.q", true},  {2, "1.k", true}, {2, "1.v", true}, {3, "bias", false}};
    tb_names_opts opts = {.size = sizeof opts, .rules = list, .nrules = COUNT(list)};
    tb_names *names;
    tb_parts parts;
    assert_ok(tb_names_create(&opts, &names));
    assert_ok(tb_names_resolve(names, params, COUNT(params), &parts));
    assert_int_equal(parts.count, COUNT(expected));
    for (size_t i = 0; i < COUNT(expected); i++) {
        assert_int_equal(parts.part[i].param, expected[i].param);
        assert_string_equal(parts.part[i].name, expected[i].name);
        assert_int_equal(parts.part[i].view != NULL, expected[i].has_view);
        assert_int_equal(parts.part[i].text != NULL, expected[i].has_view);
    }
    assert_string_equal(parts.part[2].text, "split(0,-1,6,128) slice(1,4,1)");
    assert_ptr_equal(parts.part[1].view, parts.part[4].view);
    tb_parts_fini(&parts);
    assert_ok(tb_names_resolve(names, NULL, 0, &parts));
    assert_int_equal(parts.count, 0);
    tb_parts_fini(&parts);
    tb_names_destroy(names);
}

static void wrong_options(void **state) {
    (void)state;
    static const int64_t descending[] = {0, 5, 4}, map[] = {0, 4};
    const struct {
        tb_names_opts opts;
        const char *sentence;
    } cases[] = {
        {{.stage = 2, .nstages = 2, .nlayers = 4}, "there is no stage 2 of 2"},
        {{.nstages = 2, .chunk = 1, .nlayers = 4}, "there is no chunk 1 of 1"},
        {{.nstages = 2, .nlayers = 5}, "5 layers can't be dealt out equally to 2 stages; give the first layer of each"},
        {{.nstages = 3, .nlayers = 8, .first_layers = descending},
         "the first layers of the stages have to ascend to the number of layers, but 5 comes before 4"},
        {{.nstages = 1, .nlayers = 8, .layer_pattern = "layers."},
         "'layers.' does not say where the number stands: it needs one #, as in layers.#."},
        {{.expert_rank = -1, .nexpert_ranks = 2, .nexperts = 4}, "there is no expert rank -1 of 2"},
        {{.nexpert_ranks = 3, .nexperts = 4}, "4 experts can't be dealt out equally to 3 ranks; give a map"},
        {{.expert_map = map, .nexpert_map = 2, .nexperts = 4}, "the map says that local expert 1 is expert 4, of 4"},
        {{.rules = &(tb_rule){"", "x", NULL}, .nrules = 1}, "rule 0: a pattern is empty"},
        {{.rules = &(tb_rule){"a*", "", NULL}, .nrules = 1}, "rule 0: the rule for 'a*' has an empty name"},
        {{.rules = &(tb_rule){"a*", "\\2", NULL}, .nrules = 1}, "rule 0: the name '\\2' uses \\2, but 'a*' captures 1"},
        {{.rules = &(tb_rule){"a*", "x\\", NULL}, .nrules = 1},
         "rule 0: the name 'x\\' has a \\ that no digit follows"},
        {{.rules = &(tb_rule){"a*", "x", "turn(1)"}, .nrules = 1},
         "rule 0: view 'turn(1)': expected split, merge, permute, slice or pad at 'turn(1)'"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        tb_names_opts opts = cases[i].opts;
        tb_names *names = NULL;
        opts.size = sizeof opts;
        assert_says(tb_names_create(&opts, &names), TB_INVALID, cases[i].sentence);
        assert_null(names);
    }
    tb_names_opts opts = {.size = sizeof opts, .rules = &(tb_rule){"^a(", "x", NULL}, .nrules = 1};
    tb_names *names = NULL;
    assert_int_equal(tb_names_create(&opts, &names), TB_INVALID);
    assert_memory_equal(tb_error_detail(), "rule 0: pattern '^a(': ", 23);
}

static void assert_list(const size_t *list, size_t count, const char *const *names, const char *expected) {
    char text[256] = "";
    for (size_t i = 0; i < count; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s", i ? " " : "", names[list[i]]);
    assert_string_equal(text, expected);
}

static void matching(void **state) {
    (void)state;
    static const char *const source[] = {"c", "only.b", "a", "only.a", "extra"};
    static const char *const target[] = {"a", "z", "c", "rotary.inv_freq"};
    static const char *const ignored[] = {"rotary.*", "extra", "a" /* both sides have it: moved all the same */};
    tb_match_opts opts = {.size = sizeof opts, .ignored = ignored, .nignored = 3, .allow_unmatched = true};
    tb_match match = {.size = sizeof match};
    assert_ok(tb_match_names(source, COUNT(source), target, COUNT(target), &opts, &match));
    assert_list(match.source, match.nmatched, source, "a c");
    assert_list(match.target, match.nmatched, target, "a c");
    assert_list(match.only_source, match.nonly_source, source, "only.a only.b");
    assert_list(match.only_target, match.nonly_target, target, "z");
    tb_match_fini(&match);

    opts.allow_unmatched = false;
    assert_says(tb_match_names(source, COUNT(source), target, COUNT(target), &opts, &match), TB_INVALID,
                "unmatched parameters: 2 only in the source ('only.a', 'only.b'), 1 only in the target ('z')");
    assert_says(tb_match_names(source, COUNT(source), NULL, 0, NULL, &match), TB_INVALID,
                "unmatched parameters: 5 only in the source ('a', 'c', 'extra', ...)");
    static const char *const twice[] = {"a", "b", "a"};
    assert_says(tb_match_names(twice, 3, target, 1, NULL, &match), TB_INVALID, "'a' is in the source twice");
    assert_says(tb_match_names(target, 1, twice, 3, NULL, &match), TB_INVALID, "'a' is in the target twice");
    assert_ok(tb_match_names(NULL, 0, NULL, 0, NULL, &match));
    assert_int_equal(match.nmatched, 0);
    tb_match_fini(&match);
}

/* Which source each target takes, where lm_head and another are tied to embed. */
static void tied_weights(void **state) {
    (void)state;
    static const tb_tie ties[] = {{"lm_head", "embed"}, {"output", "embed"}};
    static const struct {
        const char *source[3], *target[3], *taken;
    } cases[] = {
        {{"embed"}, {"embed", "lm_head"}, "embed embed"},
        {{"embed"}, {"lm_head"}, "embed"},
        {{"embed", "lm_head"}, {"embed"}, "embed"},
        {{"embed", "lm_head"}, {"lm_head", "embed"}, "lm_head embed"},
        {{"lm_head"}, {"embed"}, "lm_head"},
        {{"output"}, {"lm_head", "embed"}, "output output"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        size_t nsource = 0, ntarget = 0;
        while (nsource < 3 && cases[i].source[nsource])
            nsource++;
        while (ntarget < 3 && cases[i].target[ntarget])
            ntarget++;
        tb_match_opts opts = {.size = sizeof opts, .ties = ties, .nties = 2};
        tb_match match = {.size = sizeof match};
        assert_ok(tb_match_names(cases[i].source, nsource, cases[i].target, ntarget, &opts, &match));
        assert_int_equal(match.nmatched, ntarget);
        assert_list(match.source, match.nmatched, cases[i].source, cases[i].taken);
        tb_match_fini(&match);
    }
    tb_match match = {.size = sizeof match};
    tb_match_opts opts = {.size = sizeof opts, .ties = ties, .nties = 2};
    static const char *const other[] = {"other"}, *const head[] = {"lm_head"};
    assert_says(tb_match_names(other, 1, head, 1, &opts, &match), TB_INVALID,
                "unmatched parameters: 1 only in the source ('other'), 1 only in the target ('lm_head')");
    static const tb_tie chain[] = {{"a", "b"}, {"b", "c"}}, twice[] = {{"a", "b"}, {"a", "c"}};
    opts.ties = chain;
    assert_says(tb_match_names(other, 1, other, 1, &opts, &match), TB_INVALID,
                "'a' is tied to 'b', which is itself tied to 'c'");
    opts.ties = twice;
    assert_says(tb_match_names(other, 1, other, 1, &opts, &match), TB_INVALID, "'a' is tied twice");
}

/* 1,000 experts, dealt out to 4 ranks by an uneven map here and equally there, meet by name. */
static void experts_meet(void **state) {
    (void)state;
    enum { EXPERTS = 1000, RANKS = 4, PER_RANK = EXPERTS / RANKS };
    static char text[PER_RANK][32];
    static const char *params[PER_RANK], *sides[2][EXPERTS];
    tb_parts parts[2][RANKS];
    tb_names *names[2][RANKS];
    for (int i = 0; i < PER_RANK; i++) {
        snprintf(text[i], sizeof text[i], "mlp.experts.%d.w1", i);
        params[i] = text[i];
    }
    for (int side = 0; side < 2; side++) {
        size_t n = 0;
        for (int rank = 0; rank < RANKS; rank++) {
            int64_t map[PER_RANK];
            for (int i = 0; i < PER_RANK; i++)
                map[i] = (int64_t)i * RANKS + rank; /* round robin */
            tb_names_opts opts = {.size = sizeof opts,
                                  .nexperts = EXPERTS,
                                  .expert_rank = rank,
                                  .nexpert_ranks = RANKS,
                                  .expert_map = side ? map : NULL,
                                  .nexpert_map = PER_RANK};
            assert_ok(tb_names_create(&opts, &names[side][rank]));
            assert_ok(tb_names_resolve(names[side][rank], params, PER_RANK, &parts[side][rank]));
            for (size_t i = 0; i < PER_RANK; i++)
                sides[side][n++] = parts[side][rank].part[i].name;
        }
    }
    tb_match match = {.size = sizeof match};
    assert_ok(tb_match_names(sides[0], EXPERTS, sides[1], EXPERTS, NULL, &match));
    assert_int_equal(match.nmatched, EXPERTS);
    for (size_t i = 0; i < EXPERTS; i++) {
        assert_int_equal(match.target[i], i);
        assert_int_equal(match.source[i], i % PER_RANK * RANKS + i / PER_RANK);
    }
    tb_match_fini(&match);
    for (int side = 0; side < 2; side++) {
        for (int rank = 0; rank < RANKS; rank++) {
            tb_parts_fini(&parts[side][rank]);
            tb_names_destroy(names[side][rank]);
        }
    }
}

/* Every allocation fails once; nothing leaks or is half made, which asan sees. */
static void out_of_memory(void **state) {
    (void)state;
    static const tb_rule list[] = {{"*.a", "\\1.q", "split(0,2,-1)"}, {"*.a", "\\1.k", NULL}, {"^b.*", "c", NULL}};
    static const int64_t map[] = {2, 1};
    static const char *const params[] = {"layers.0.experts.0.a", "layers.1.experts.1.w", "bbb"};
    static const char *const ignored[] = {"x*", "^y"};
    tb_names_opts opts = {.size = sizeof opts,
                          .nstages = 1,
                          .nlayers = 2,
                          .expert_map = map,
                          .nexpert_map = 2,
                          .rules = list,
                          .nrules = 3};
    tb_match_opts match_opts = {.size = sizeof match_opts, .ignored = ignored, .nignored = 2, .allow_unmatched = true};
    bool is_done = false;
    for (long n = 0; !is_done; n++) {
        tb_names *names = NULL;
        tb_parts parts = {0};
        tb_match match = {.size = sizeof match};
        assert_true(n < 1000);
        tb__mem_fail_after(n);
        tb_status status = tb_names_create(&opts, &names);
        if (status == TB_OK)
            status = tb_names_resolve(names, params, 3, &parts);
        if (status == TB_OK)
            status = tb_match_names(params, 3, ignored, 2, &match_opts, &match);
        tb__mem_fail_after(-1);
        is_done = status == TB_OK;
        assert_true(is_done || status == TB_NO_MEMORY);
        if (is_done)
            assert_int_equal(parts.count, 4);
        tb_match_fini(&match);
        tb_parts_fini(&parts);
        tb_names_destroy(names);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_said_changes_nothing),
        cmocka_unit_test(stages),
        cmocka_unit_test(uneven_stages),
        cmocka_unit_test(virtual_stages),
        cmocka_unit_test(experts),
        cmocka_unit_test(redundant_experts),
        cmocka_unit_test(rules),
        cmocka_unit_test(globs_capture),
        cmocka_unit_test(parts_of_a_parameter),
        cmocka_unit_test(wrong_options),
        cmocka_unit_test(matching),
        cmocka_unit_test(tied_weights),
        cmocka_unit_test(experts_meet),
        cmocka_unit_test(out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
