/* Specs: every form of a side means the layout it should, names find their rules, and what is wrong is said with its
 * place. */
#include "reshard/spec.h"

#include "format/format_test.h"

static tb__spec *parse(const char *text) {
    tb__spec *spec = NULL;
    assert_ok(tb__spec_parse(text, strlen(text), &spec));
    return spec;
}

/* The target's layout of a spec whose only rule has this as its target. */
static void check_side(const char *mesh, const char *side, const char *wanted) {
    char text[512], *got;
    snprintf(text, sizeof text, "{\"dst_mesh\": %s, \"rules\": [{\"match\": \"*\"%s%s}]}", mesh,
             *side ? ", \"dst\": " : "", side);
    tb__spec *spec = parse(text);
    assert_ok(tb_layout_format(spec->rules[0].dst, &got));
    assert_string_equal(got, wanted);
    free(got);
    tb__spec_destroy(spec);
}

static void sides(void **state) {
    (void)state;
    check_side("[2]", "", "mesh=2 place=Replicate");
    check_side("[2]", "\"S0\"", "mesh=2 place=Shard(0)");
    check_side("[2]", "[[\"S\", 0]]", "mesh=2 place=Shard(0)");
    check_side("[2]", "[\"Shard(0)\"]", "mesh=2 place=Shard(0)");
    check_side("[2]", "{\"placements\": \"Partial(avg)\"}", "mesh=2 place=Partial(avg)");
    check_side("[2]", "\"mesh=3 place=S1 ranks=4..6\"", "mesh=3 place=Shard(1) ranks=4..6");
    check_side("[2]", "{\"layout\": \"mesh=3 place=S1\", \"dtype\": \"f16\"}", "mesh=3 place=Shard(1)");
    check_side("[2, 3]", "\"R,S-1\"", "mesh=2,3 place=Replicate,Shard(-1)");
    check_side("[2, 3]", "[[\"SS\", 0, 2], [\"BS\", 1, 4, 8]]", "mesh=2,3 place=StridedShard(0,2),BlockShard(1,4,8)");
    check_side("{\"mesh\": [2], \"ranks\": [7, 3]}", "\"S0\"", "mesh=2 place=Shard(0) ranks=7,3");
    check_side("{\"mesh\": [4], \"ranks\": \"1,4..6\"}", "\"S0\"", "mesh=4 place=Shard(0) ranks=1,4..6");
    check_side("[2]", "{\"ranks\": [5, 6], \"placements\": [[\"R\"]]}", "mesh=2 place=Replicate ranks=5,6");
    check_side("[2]", "{\"mesh\": [2, 2], \"placements\": \"S0,S1\"}", "mesh=2,2 place=Shard(0),Shard(1)");
    check_side("{\"mesh\": [2, 4], \"names\": [\"dp\", \"tp\"]}", "{\"tp\": \"Shard(0)\"}",
               "mesh=2,4 place=Replicate,Shard(0)");
    check_side("{\"mesh\": [2, 4], \"names\": [\"dp\", \"tp\"]}",
               "{\"tp\": [\"S\", 0], \"dp\": \"S1\", \"dtype\": \"f32\"}", "mesh=2,4 place=Shard(1),Shard(0)");
    check_side("[2]", "{\"mesh\": [3], \"names\": [\"ep\"], \"ep\": \"S0\"}", "mesh=3 place=Shard(0)");
}

static void names(void **state) {
    (void)state;
    tb__spec *spec =
        parse("{\"tensors\": {\"a.w\": {\"shape\": [4, 2], \"dtype\": \"bfloat16\"}, \"b*\": {}},"
              "\"rules\": [{\"match\": \"a.*\", \"skip\": true}, {\"match\": \"*.[vw]\", \"dst\": {\"dtype\": "
              "\"f16\"}}, {\"match\": \"x?\"}]}");
    assert_int_equal(spec->ntensors, 2);
    assert_int_equal(spec->nrules, 3);
    const tb__spec_rule *own = tb__spec_find(spec, "a.w");
    assert_string_equal(own->where, "tensors 'a.w'");
    assert_true(own->has_shape && own->shape.ndim == 2 && own->shape.dim[0] == 4);
    assert_int_equal(own->src_dtype, TB_BF16);
    assert_int_equal(own->dst_dtype, TB_DTYPE_NONE);
    assert_true(tb__spec_find(spec, "a.v")->is_skipped);
    assert_ptr_equal(tb__spec_find(spec, "c.layers.1.w"), &spec->rules[1]);
    assert_int_equal(spec->rules[1].dst_dtype, TB_F16);
    assert_ptr_equal(tb__spec_find(spec, "xy"), &spec->rules[2]);
    assert_string_equal(spec->rules[2].where, "rules 2");
    assert_ptr_equal(tb__spec_find(spec, "b*"), &spec->tensors[1]); /* a name, not a pattern */
    assert_null(tb__spec_find(spec, "bc"));
    assert_null(tb__spec_find(spec, "xyz"));
    tb__spec_destroy(spec);
}

/* The group of a tensor of this name, by a rule. */
static void check_group(const char *match, const char *group, const char *name, const char *wanted) {
    char text[256];
    const char *got = NULL;
    tb__arena arena = {0};
    snprintf(text, sizeof text,
             "{\"rules\": [{\"match\": \"%s\", \"dst\": {\"quantisation\": {\"format\": \"fp8_tensor\", \"group\": "
             "\"%s\"}}}]}",
             match, group);
    tb__spec *spec = parse(text);
    assert_ok(tb__spec_group(tb__spec_find(spec, name), name, &arena, &got));
    assert_string_equal(got, wanted);
    tb__arena_fini(&arena);
    tb__spec_destroy(spec);
}

static void groups(void **state) {
    (void)state;
    check_group("*", "all", "a.w", "all");
    check_group("*", "tensor", "a.w", "a.w");
    check_group("*", "*", "a.w", "a.w");
    check_group("layers.*.experts.*.w1.*", "*/*", "layers.3.experts.12.w1.weight", "3/12");
    check_group("*.w*", "x.*.w", "a.w.b.w1", "x.a.w");
    check_group("a[bc]?", "one", "abc", "one");
}

static void quantised(void **state) {
    (void)state;
    tb__spec *spec = parse("{\"rules\": [{\"match\": \"a\", \"src\": {\"quantisation\": \"fp8_tensor\"}, \"dst\": "
                           "{\"quantisation\": {\"format\": \"nvfp4\", \"scales\": \"swizzled\"}}}, {\"match\": \"b\", "
                           "\"dtype\": \"f16\", \"src\": {\"quantisation\": {\"format\": \"mxfp8\"}}, \"dst\": "
                           "{\"quantisation\": {\"format\": \"fp8_tensor\", \"exponent\": \"power_of_two\"}}}]}");
    assert_int_equal(spec->rules[0].src_quant.kind, TB__QUANT_FP8_TENSOR);
    assert_int_equal(spec->rules[0].src_dtype, TB_BF16);
    assert_int_equal(spec->rules[0].dst_quant.kind, TB__QUANT_NVFP4);
    assert_true(spec->rules[0].dst_quant.is_swizzled);
    assert_null(spec->rules[0].group);
    assert_int_equal(spec->rules[1].src_quant.kind, TB__QUANT_MXFP8);
    assert_int_equal(spec->rules[1].src_dtype, TB_F16);
    assert_true(spec->rules[1].dst_quant.is_power_of_two && !spec->rules[1].dst_quant.is_floor);
    tb__spec_destroy(spec);
}

static void check_wrong(const char *text, const char *sentence) {
    tb__spec *spec = NULL;
    assert_fails(tb__spec_parse(text, strlen(text), &spec), TB_INVALID, sentence);
    assert_null(spec);
}

static void wrong_specs(void **state) {
    (void)state;
    check_wrong("", "not JSON, at line");
    check_wrong("{\"rules\": [],}", "not JSON, at line 1");
    check_wrong("[]", "a spec is a JSON object");
    check_wrong("{}", "a spec has 'tensors' or 'rules'; this one has neither");
    check_wrong("{\"rules\": [], \"meshes\": 1}", "'meshes' is not known here; there are 'src_mesh', 'dst_mesh'");
    check_wrong("{\"rules\": {}}", "'rules' is not an array");
    check_wrong("{\"tensors\": []}", "'tensors' is not an object");
    check_wrong("{\"tensors\": {\"a\": {}, \"a\": {}}}", "duplicate");
    check_wrong("{\"rules\": [], \"src_mesh\": 3}", "src_mesh: it is neither an array of sizes nor an object");
    check_wrong("{\"rules\": [], \"src_mesh\": [2, 0]}", "src_mesh: 'mesh' dim 1 is not a size");
    check_wrong("{\"rules\": [], \"dst_mesh\": []}", "dst_mesh: 'mesh' is not an array of 1 to 8 sizes");
    check_wrong("{\"rules\": [], \"dst_mesh\": {\"mesh\": [2], \"ranks\": [1]}}",
                "dst_mesh: the mesh has 2 places, but 1 ranks are listed");
    check_wrong("{\"rules\": [], \"dst_mesh\": {\"mesh\": [2], \"ranks\": \"1..3\"}}",
                "dst_mesh: the mesh has 2 places");
    check_wrong("{\"rules\": [], \"dst_mesh\": {\"mesh\": [1], \"ranks\": [-1]}}", "'ranks' element 0 is not a rank");
    check_wrong("{\"rules\": [], \"dst_mesh\": {\"mesh\": [2], \"names\": [\"a\", \"b\"]}}",
                "'names' is not an array of 1");
    check_wrong("{\"rules\": [], \"dst_mesh\": {\"mesh\": [1], \"names\": [\"mesh\"]}}", "can name a mesh dim");
    check_wrong("{\"rules\": [], \"dst_mesh\": {\"mesh\": [1, 1], \"names\": [\"a\", \"a\"]}}",
                "two mesh dims have the name");
    check_wrong("{\"rules\": [], \"dst_mesh\": {\"mesh\": [1], \"rank\": [0]}}", "dst_mesh: 'rank' is not known here");
    check_wrong("{\"rules\": [{}]}", "rules 0: 'match' is missing");
    check_wrong("{\"rules\": [{\"match\": \"*\"}, 5]}", "rules 1: it is not an object");
    check_wrong("{\"rules\": [{\"match\": \"*\", \"dts\": \"R\"}]}", "rules 0: 'dts' is not known here");
    check_wrong("{\"rules\": [{\"match\": \"*\", \"dst\": \"Q0\"}]}", "rules 0: dst: 'Q0' is not a placement");
    check_wrong("{\"rules\": [{\"match\": \"*\", \"dst\": \"S0,S1\"}]}",
                "rules 0: dst: the mesh has 1 dims, but there are 2");
    check_wrong("{\"rules\": [{\"match\": \"*\", \"dst\": \"S0 R\"}]}",
                "rules 0: dst: unexpected 'R' after a placement");
    check_wrong("{\"rules\": [{\"match\": \"*\", \"dst\": [[\"S\"]]}]}",
                "rules 0: dst: placement 0: a placement's dim");
    check_wrong("{\"rules\": [{\"match\": \"*\", \"dst\": 5}]}", "rules 0: dst: placements are an array such as");
    check_wrong("{\"rules\": [{\"match\": \"*\", \"dst\": {\"tp\": \"S0\"}}]}", "rules 0: dst: 'tp' is neither 'mesh'");
    check_wrong(
        "{\"dst_mesh\": {\"mesh\": [1], \"names\": [\"tp\"]}, \"rules\": [{\"match\": \"*\", \"dst\": {\"tp\": \"S0\", "
        "\"placements\": \"S0\"}}]}",
        "rules 0: dst: it has both 'placements' and placements by");
    check_wrong("{\"rules\": [{\"match\": \"*\", \"dst\": {\"layout\": \"mesh=1 place=R\", \"mesh\": [1]}}]}",
                "rules 0: dst: 'mesh' is not known here; there are 'layout', 'dtype', 'quantisation'");
    check_wrong("{\"rules\": [{\"match\": \"*\", \"dst\": {\"dtype\": \"f33\"}}]}", "rules 0: dst: ");
    check_wrong("{\"rules\": [{\"match\": \"*\", \"dtype\": \"f16\", \"src\": {\"dtype\": \"f32\"}}]}",
                "rules 0: its dtype is f16, but that of 'src' is f32");
    check_wrong(
        "{\"rules\": [{\"match\": \"*\", \"dst\": {\"quantisation\": \"q4\"}}]}",
        "rules 0: dst: quantisation: the format is none of \"mxfp8\", \"fp8_block\", \"fp8_tensor\" and \"nvfp4\"");
    check_wrong(
        "{\"rules\": [{\"match\": \"*\", \"dst\": {\"quantisation\": {\"format\": \"mxfp8\", \"exponent\": 1}}}]}",
        "quantisation: 'exponent' is neither \"ceil\" nor \"floor\"");
    check_wrong("{\"rules\": [{\"match\": \"*\", \"dst\": {\"quantisation\": {\"format\": \"fp8_block\", \"scales\": "
                "\"swizzled\"}}}]}",
                "quantisation: 'scales' is not \"rows\"");
    check_wrong(
        "{\"rules\": [{\"match\": \"*\", \"dst\": {\"quantisation\": {\"format\": \"mxfp8\", \"block\": 16}}}]}",
        "quantisation: 'block' is not known here");
    check_wrong("{\"rules\": [{\"match\": \"*\", \"dst\": {\"quantisation\": \"mxfp8\", \"dtype\": \"f16\"}}]}",
                "rules 0: dst: it has both 'dtype' and 'quantisation'");
    check_wrong("{\"rules\": [{\"match\": \"*\", \"src\": {\"quantisation\": {\"format\": \"mxfp8\", \"exponent\": "
                "\"floor\"}}}]}",
                "rules 0: src: quantisation: 'exponent' is not known here");
    check_wrong("{\"rules\": [{\"match\": \"*\", \"dtype\": \"f8e4m3\", \"src\": {\"quantisation\": \"mxfp8\"}}]}",
                "rules 0: its dtype is f8e4m3, but a quantised source is read as f32");
    check_wrong("{\"rules\": [{\"match\": \"*\", \"dst\": {\"quantisation\": {\"format\": \"nvfp4\", \"exponent\": "
                "\"ceil\"}}}]}",
                "quantisation: the format has no 'exponent'");
    check_wrong(
        "{\"rules\": [{\"match\": \"*\", \"dst\": {\"quantisation\": {\"format\": \"mxfp8\", \"group\": \"g\"}}}]}",
        "quantisation: mxfp8 has no 'group'");
    check_wrong(
        "{\"rules\": [{\"match\": \"*\", \"dst\": {\"quantisation\": {\"format\": \"nvfp4\", \"group\": \"\"}}}]}",
        "quantisation: 'group' is not a name");
    check_wrong(
        "{\"rules\": [{\"match\": \"a.w\", \"dst\": {\"quantisation\": {\"format\": \"nvfp4\", \"group\": \"*\"}}}]}",
        "quantisation: 'group' has more * than 'match', or than 9");
    check_wrong("{\"rules\": [{\"match\": \"*.w[13]\", \"dst\": {\"quantisation\": {\"format\": \"nvfp4\", \"group\": "
                "\"*\"}}}]}",
                "'group' has a *, so that 'match' may have no other wildcards than *");
    check_wrong("{\"tensors\": {\"a\": {\"dst\": {\"quantisation\": {\"format\": \"nvfp4\", \"group\": \"*\"}}}}}",
                "tensors 'a': dst: quantisation: 'group' has a *, which only that of a rule may have");
    check_wrong("{\"rules\": [{\"match\": \"*\", \"skip\": 1}]}", "rules 0: 'skip' is neither true nor false");
    check_wrong("{\"tensors\": {\"a\": {\"shape\": [-1]}}}", "tensors 'a': shape: ");
    check_wrong("{\"tensors\": {\"a\": {\"shape\": [4], \"dst\": \"S1\"}}}",
                "tensors 'a': dst: mesh dim 0 shards dim 1");
    check_wrong("{\"tensors\": {\"a\": {\"match\": \"*\"}}}", "tensors 'a': 'match' is not known here");
    check_wrong("{\"rules\": [], \"constants\": [1]}", "'constants' is not an object of names and numbers");
    check_wrong("{\"rules\": [], \"constants\": {\"a\": \"1\"}}", "constants 'a': it has no number");
    check_wrong("{\"rules\": [], \"constants\": {\"\": 1}}", "constants '': it has no name");
}

static void no_memory(void **state) {
    (void)state;
    static const char text[] =
        "{\"src_mesh\": {\"mesh\": [2], \"ranks\": \"3,4\"}, \"tensors\": {\"a\": {\"src\": "
        "\"Explicit(0, 0-1; 1-2)\", \"dst\": {\"mesh\": [1], \"ranks\": [3]}}}, "
        "\"rules\": [{\"match\": \"*\", \"src\": [[\"BS\", 0, 2, 4]]}], \"constants\": {\"c\": 1}}";
    tb__spec *spec = NULL;
    long n = 0;
    for (;; n++) {
        tb__mem_fail_after(n);
        tb_status status = tb__spec_parse(text, strlen(text), &spec);
        tb__mem_fail_after(-1);
        if (status == TB_OK)
            break;
        assert_int_equal(status, TB_NO_MEMORY);
    }
    assert_true(n > 5);
    tb__spec_destroy(spec);
}

static void files(void **state) {
    folder *f = *state;
    tb__spec *spec = NULL;
    assert_fails(tb__spec_load(path_in(f, "none.json"), NULL, NULL, &spec), TB_INVALID, "/none.json: can't be opened");
    write_bytes(path_in(f, "bad.json"), "{}", 2);
    assert_fails(tb__spec_load(path_in(f, "bad.json"), NULL, NULL, &spec), TB_INVALID,
                 "/bad.json: a spec has 'tensors' or");
    write_bytes(path_in(f, "good.json"), "{\"rules\":[]}", 12);
    assert_ok(tb__spec_load(path_in(f, "good.json"), NULL, NULL, &spec));
    assert_int_equal(spec->nrules, 0);
    tb__spec_destroy(spec);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sides),
        cmocka_unit_test(names),
        cmocka_unit_test(groups),
        cmocka_unit_test(quantised),
        cmocka_unit_test(wrong_specs),
        cmocka_unit_test(no_memory),
        cmocka_unit_test_setup_teardown(files, folder_set_up, folder_tear_down),
    };
    return cmocka_run_group_tests_name("reshard spec", tests, NULL, NULL);
}
