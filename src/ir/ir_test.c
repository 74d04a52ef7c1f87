/* The IR: roles are distinct from modes, buckets have limits, wrong batches and dumps are refused. */
#include "ir/ir_test.h"

#include <stdio.h>

static tb_ir *make(int32_t rank, const char *src_text, const char *dst_text, tb_shape shape, tb_dtype dtype,
                   int64_t bucket_size) {
    tb_layout *src, *dst;
    tb_ir *ir;
    tb_ir_opts opts = {.size = sizeof opts, .bucket_size = bucket_size};
    assert_int_equal(tb_layout_parse(src_text, &src), TB_OK);
    assert_int_equal(tb_layout_parse(dst_text, &dst), TB_OK);
    tb_tensor_spec spec[2] = {{.size = sizeof *spec,
                               .name = "b",
                               .shape = shape,
                               .src = src,
                               .dst = dst,
                               .src_dtype = dtype,
                               .dst_dtype = dtype}};
    spec[1] = spec[0];
    spec[1].name = "a";
    assert_int_equal(tb_ir_create(rank, spec, 2, NULL, &opts, &ir), TB_OK);
    tb_layout_destroy(src);
    tb_layout_destroy(dst);
    return ir;
}

/* A self-copy that travels in a bucket reads and writes: its write is not dropped. */
static void a_self_copy_keeps_its_write(void **state) {
    (void)state;
    tb_ir *ir = make(1, "mesh=2 place=S0", "mesh=2 place=S0", (tb_shape){1, {64}}, TB_F32, 1 << 20);
    assert_int_equal(ir->nchunks, 2);
    assert_int_equal(ir->nbuckets, 1); /* both tensors in one bucket */
    assert_string_equal(ir->names[0], "a");
    for (size_t i = 0; i < ir->nchunks; i++) {
        assert_int_equal(ir->chunks[i].mode, TB_LOCAL);
        assert_true(ir->chunks[i].is_source && ir->chunks[i].is_target);
    }
    tb_ir_destroy(ir);
}

/* A source that keeps a copy and broadcasts to others has two channels, and both ends' buffers have the same size. */
static void a_local_chunk_is_never_bundled_with_a_broadcast(void **state) {
    (void)state;
    tb_ir *ir = make(0, "mesh=1 place=R", "mesh=3 place=R", (tb_shape){1, {64}}, TB_F32, 1 << 20);
    assert_int_equal(ir->nchannels, 2);
    for (size_t i = 0; i < ir->nchannels; i++) {
        const tb_chunk *key = key_of(ir, &ir->channels[i]);
        assert_int_equal(ir->buckets[ir->channels[i].first_bucket].nentries, 2);
        if (key->mode == TB_LOCAL) {
            assert_int_equal(key->ntargets, 1);
        } else {
            assert_int_equal(key->mode, TB_BROADCAST);
            assert_int_equal(key->ntargets, 2);
            assert_true(key->targets[0] != 0 && key->targets[1] != 0);
        }
    }
    tb_ir_destroy(ir);
}

static void bucket_sizes(void **state) {
    (void)state;
    tb_shape shape = {1, {100}};
    tb_ir *ir = make(0, "mesh=1 place=R", "mesh=1 place=R ranks=1", shape, TB_F32, 1);
    assert_int_equal(ir->nbuckets, 2); /* 1: no coalescing */
    tb_ir_destroy(ir);
    ir = make(0, "mesh=1 place=R", "mesh=1 place=R ranks=1", shape, TB_F32, 400);
    assert_int_equal(ir->nbuckets, 2); /* as large as a bucket: alone */
    tb_ir_destroy(ir);
    ir = make(0, "mesh=1 place=R", "mesh=1 place=R ranks=1", shape, TB_F32, 848);
    assert_int_equal(ir->nbuckets, 1);
    assert_int_equal(ir->entries[1].offset, 448); /* aligned to 64 */
    assert_int_equal(ir->buckets[0].total_bytes, 848);
    assert_int_equal(ir->channels[0].max_in_flight, 2);
    tb_ir_destroy(ir);
}

/* A rank that combines holds all contributions to a bucket, before the cast to the wire dtype: the staging memory is
 * divided among them. */
static void contributions_fit_into_staging_memory(void **state) {
    (void)state;
    static const struct {
        const char *src;
        int64_t staging_bytes, bucket_size;
        bool direct;
        size_t nbuckets; /* of the first channel */
        int64_t total_bytes;
    } cases[] = {
        {"mesh=4 place=P", 131072, 1 << 20, false, 1, 4096}, /* 4 contributors, 2 tensors, 1024 floats of each */
        {"mesh=4 place=P", 131071, 1 << 20, false, 2, 2048},
        {"mesh=4 place=P", 16384, 1 << 20, false, 8, 512}, /* cut to 256 floats */
        {"mesh=4 place=P", 16384, 100, false, 8, 512},     /* larger than a bucket: alone, but not cut further */
        {"mesh=4 place=P", 16384, 1 << 20, true, 1, 4096},
        {"mesh=1 place=R", 65536, 1 << 20, false, 1, 16384}, /* nobody contributes: only the wire dtype counts */
        {"mesh=1 place=R", 65535, 1 << 20, false, 2, 8192},
        {"mesh=1 place=R", 65536, 8192, false, 2, 8192},
        {"mesh=1 place=R", 65535, 1 << 20, true, 1, 16384},
    };
    tb_layout *src, *dst;
    tb_ir *ir;
    assert_int_equal(tb_layout_parse("mesh=1 place=R ranks=9", &dst), TB_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(tb_layout_parse(cases[i].src, &src), TB_OK);
        tb_tensor_spec spec[2] = {{.size = sizeof *spec,
                                   .name = "a",
                                   .shape = {1, {4096}},
                                   .src = src,
                                   .dst = dst,
                                   .src_dtype = TB_F32,
                                   .dst_dtype = TB_BF16}};
        spec[1] = spec[0];
        spec[1].name = "b";
        tb_ir_opts opts = {.size = sizeof opts,
                           .bucket_size = cases[i].bucket_size,
                           .staging_bytes = cases[i].staging_bytes,
                           .direct = cases[i].direct};
        assert_int_equal(tb_ir_create(0, spec, 2, NULL, &opts, &ir), TB_OK);
        assert_int_equal(key_of(ir, &ir->channels[0])->mode, TB_P2P);
        assert_int_equal(ir->channels[0].nbuckets, cases[i].nbuckets);
        assert_int_equal(ir->buckets[0].total_bytes, cases[i].total_bytes);
        tb_ir_destroy(ir);
        tb_layout_destroy(src);
    }
    tb_layout_destroy(dst);
}

/* Groups are in their own order, not in that of names, and share no bucket; names keep their numbers. */
static void groups_are_apart(void **state) {
    (void)state;
    tb_layout *src, *dst;
    tb_ir *ir;
    char *text;
    assert_int_equal(tb_layout_parse("mesh=1 place=R", &src), TB_OK);
    assert_int_equal(tb_layout_parse("mesh=1 place=R ranks=1", &dst), TB_OK);
    static const char *const names[] = {"a", "b", "c", "d"};
    static const uint32_t groups[] = {7, 0, 7, 2};
    tb_tensor_spec spec[4];
    for (size_t i = 0; i < 4; i++)
        spec[i] = (tb_tensor_spec){.size = sizeof(tb_tensor_spec),
                                   .name = names[i],
                                   .shape = {1, {16}},
                                   .src = src,
                                   .dst = dst,
                                   .src_dtype = TB_F32,
                                   .dst_dtype = TB_F32,
                                   .group = groups[i]};
    assert_int_equal(tb_ir_create(0, spec, 4, NULL, NULL, &ir), TB_OK);
    assert_int_equal(ir->nchannels, 1);
    assert_int_equal(ir->nbuckets, 3);
    static const uint32_t tensors[] = {1, 3, 0, 2};
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(ir->chunks[i].tensor, tensors[i]);
    assert_int_equal(ir->buckets[0].group, 0);
    assert_int_equal(ir->buckets[1].group, 2);
    assert_int_equal(ir->buckets[2].group, 7);
    assert_int_equal(ir->buckets[2].nentries, 2);
    assert_int_equal(tb_ir_dump_text(ir, &text), TB_OK);
    assert_non_null(strstr(text, "bucket 0: 1 chunks, 64 bytes\n"));
    assert_non_null(strstr(text, "bucket 2: 2 chunks, 128 bytes, group 7\n"));
    free(text);
    check_dumps(ir);
    char *json;
    tb_ir *parsed;
    assert_int_equal(tb_ir_dump_json(ir, &json), TB_OK);
    *strstr(json, "0,\"total_bytes\"") = '3'; /* before group 2 */
    assert_int_equal(tb_ir_parse_json(json, strlen(json), &parsed), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "'group' is 2, not between 3"));
    free(json);
    tb_ir_destroy(ir);
    tb_layout_destroy(src);
    tb_layout_destroy(dst);
}

/* Tensors in memory that is reached in different ways share no bucket, at either end. */
static void kinds_of_memory_are_apart(void **state) {
    (void)state;
    tb_layout *src, *dst;
    assert_int_equal(tb_layout_parse("mesh=1 place=R", &src), TB_OK);
    assert_int_equal(tb_layout_parse("mesh=1 place=R ranks=1", &dst), TB_OK);
    static const char *const names[] = {"a", "b", "c", "d"};
    tb_tensor_spec spec[4];
    for (size_t i = 0; i < 4; i++)
        spec[i] = (tb_tensor_spec){.size = sizeof(tb_tensor_spec),
                                   .name = names[i],
                                   .shape = {1, {16}},
                                   .src = src,
                                   .dst = dst,
                                   .src_dtype = TB_F32,
                                   .dst_dtype = TB_F32,
                                   .memory_kind = i == 1 ? UINT64_MAX : 0};
    for (int32_t rank = 0; rank < 2; rank++) {
        static const uint32_t tensors[] = {0, 2, 3, 1};
        tb_ir *ir;
        assert_int_equal(tb_ir_create(rank, spec, 4, NULL, NULL, &ir), TB_OK);
        assert_int_equal(ir->nchannels, 2);
        assert_int_equal(ir->nbuckets, 2);
        for (size_t i = 0; i < 4; i++)
            assert_int_equal(ir->chunks[ir->entries[i].chunk].tensor, tensors[i]);
        assert_int_equal(ir->buckets[0].nentries, 3);
        check_dumps(ir);
        tb_ir_destroy(ir);
    }
    tb_layout_destroy(src);
    tb_layout_destroy(dst);
}

/* A bit for each element; less than a byte is nothing. */
static int64_t bits_size(const void *arg, int ndim, const int64_t *len) {
    int64_t n = *(const int64_t *)arg;
    for (int d = 0; d < ndim; d++)
        n *= len[d];
    return n / 8;
}

static void coded_rows_of_less_than_a_byte(void **state) {
    (void)state;
    tb_layout *src, *dst;
    tb_ir *ir;
    int64_t bits = 1, total = 0;
    assert_int_equal(tb_layout_parse("mesh=1 place=R", &src), TB_OK);
    assert_int_equal(tb_layout_parse("mesh=1 place=R ranks=1", &dst), TB_OK);
    tb_ir_opts opts = {.size = sizeof opts, .staging_bytes = 64 << 10};
    tb_tensor_spec spec = {.size = sizeof spec,
                           .name = "x",
                           .shape = {2, {1 << 20, 2}},
                           .src = src,
                           .dst = dst,
                           .src_dtype = TB_U8,
                           .dst_dtype = TB_U8,
                           .coded = true,
                           .coded_nbytes = bits_size,
                           .coded_arg = &bits};
    assert_int_equal(tb_ir_create(0, &spec, 1, NULL, &opts, &ir), TB_OK);
    assert_true(ir->nchunks >= 16);
    for (size_t i = 0; i < ir->nchunks; i++) {
        assert_true(ir->chunks[i].nbytes <= 16 << 10);
        total += ir->chunks[i].nbytes;
    }
    assert_int_equal(total, 1 << 18);
    tb_ir_destroy(ir);
    bits = -8;
    assert_int_equal(tb_ir_create(0, &spec, 1, NULL, NULL, &ir), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "tensor 'x': a part of it has -2097152 bytes on the wire"));
    spec.shape.dim[1] = 1; /* cut into rows of an eighth of a byte */
    spec.band = 1;
    bits = 1;
    assert_int_equal(tb_ir_create(0, &spec, 1, NULL, NULL, &ir), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "tensor 'x': a part of it has 0 bytes on the wire"));
    tb_layout_destroy(src);
    tb_layout_destroy(dst);
}

static void ids_are_made_of_target_name_and_box(void **state) {
    (void)state;
    tb_ir *ir = make(1, "mesh=2 place=S0", "mesh=1 place=R ranks=5", (tb_shape){1, {8}}, TB_F32, 1);
    assert_int_equal(ir->nchunks, 2);
    for (uint64_t i = 0; i < 2; i++) /* rank 1 sends the second of rank 5's two boxes */
        assert_int_equal(ir->chunks[i].id, ((UINT64_C(5) << 22 | i) << 18 | 1) << 4);
    tb_ir_destroy(ir);
}

static void partial_sources_and_targets(void **state) {
    (void)state;
    tb_shape shape = {1, {8}};
    tb_ir *ir = make(2, "mesh=2 place=R", "mesh=2 place=P ranks=2,3", shape, TB_F32, 1 << 20);
    assert_int_equal(ir->chunks[0].mode, TB_P2P);
    tb_ir_destroy(ir);
    ir = make(3, "mesh=2 place=R", "mesh=2 place=P ranks=2,3", shape, TB_F32, 1 << 20);
    assert_int_equal(ir->nchunks, 2); /* zeros: target only, no source */
    assert_int_equal(ir->chunks[0].source, TB_NO_RANK);
    assert_true(ir->chunks[0].is_target && !ir->chunks[0].is_source);
    tb_ir_destroy(ir);
    ir = make(0, "mesh=2 place=P", "mesh=1 place=R ranks=4", shape, TB_F32, 1 << 20);
    bool ships = false, helps = false; /* the role of shipper is spread: rank 0 ships half, and helps with the rest */
    for (size_t i = 0; i < ir->nchunks; i++) {
        ships |= ir->chunks[i].mode == TB_P2P && ir->chunks[i].source == 0;
        helps |= ir->chunks[i].mode == TB_NONE && ir->chunks[i].source == 1;
        assert_int_equal(ir->chunks[i].ncontributors, 2);
        assert_int_equal(ir->chunks[i].op, TB_SUM);
        assert_int_equal(ir->chunks[i].divisor, 1);
    }
    assert_true(ships && helps);
    tb_ir_destroy(ir);
    ir = make(0, "mesh=2,3 place=P,Partial(avg)", "mesh=1 place=R ranks=9", shape, TB_F32, 1 << 20);
    assert_int_equal(ir->chunks[0].op, TB_SUM);
    assert_int_equal(ir->chunks[0].divisor, 3);
    tb_ir_destroy(ir);
}

static void wire_dtypes(void **state) {
    (void)state;
    tb_dtype wire;
    assert_int_equal(tb__wire_dtype(TB_F32, TB_BF16, TB_DTYPE_NONE, &wire), TB_OK);
    assert_int_equal(wire, TB_BF16);
    assert_int_equal(tb__wire_dtype(TB_BF16, TB_F32, TB_DTYPE_NONE, &wire), TB_OK);
    assert_int_equal(wire, TB_BF16);
    assert_int_equal(tb__wire_dtype(TB_F16, TB_BF16, TB_DTYPE_NONE, &wire), TB_OK);
    assert_int_equal(wire, TB_F16);
    assert_int_equal(tb__wire_dtype(TB_F32, TB_F32, TB_BF16, &wire), TB_OK);
    assert_int_equal(wire, TB_BF16);
    assert_int_equal(tb__wire_dtype(TB_BF16, TB_F8E4M3, TB_DTYPE_NONE, &wire), TB_REFUSED);
    assert_int_equal(tb__wire_dtype(TB_BF16, TB_F8E4M3, TB_BF16, &wire), TB_REFUSED);
    assert_int_equal(tb__wire_dtype(TB_BF16, TB_F8E4M3, TB_F8E4M3, &wire), TB_OK);
    assert_int_equal(tb__wire_dtype(TB_F8E4M3, TB_F8E4M3, TB_DTYPE_NONE, &wire), TB_OK);
    assert_int_equal(tb__wire_dtype(TB_F64, TB_BF16, TB_DTYPE_NONE, &wire), TB_OK);
    assert_int_equal(wire, TB_BF16);
    assert_int_equal(tb__wire_dtype(TB_I32, TB_F32, TB_DTYPE_NONE, &wire), TB_REFUSED);
    assert_int_equal(tb__wire_dtype(TB_I32, TB_I64, TB_DTYPE_NONE, &wire), TB_OK);
    assert_int_equal(wire, TB_I32);
    assert_int_equal(tb__wire_dtype(TB_U8, TB_I16, TB_DTYPE_NONE, &wire), TB_OK);
    assert_int_equal(tb__wire_dtype(TB_I32, TB_I32, TB_I64, &wire), TB_REFUSED); /* back from the wire */
    static const tb_dtype losing[][2] = {{TB_I64, TB_I32}, {TB_I32, TB_U32}, {TB_U32, TB_I32}, {TB_I8, TB_U64}};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(tb__wire_dtype(losing[i][0], losing[i][1], TB_DTYPE_NONE, &wire), TB_REFUSED);
        assert_non_null(strstr(tb_error_detail(), "may lose values; ask for it by wire dtype"));
        assert_int_equal(tb__wire_dtype(losing[i][0], losing[i][1], losing[i][1], &wire), TB_OK);
        assert_int_equal(wire, losing[i][1]);
    }
    assert_int_equal(tb__wire_dtype(TB_BOOL, TB_U8, TB_U8, &wire), TB_REFUSED);
    assert_int_equal(tb__wire_dtype(TB_F32, (tb_dtype)99, TB_DTYPE_NONE, &wire), TB_INVALID);
}

static void wrong_batches(void **state) {
    (void)state;
    tb_layout *layout;
    tb_ir *ir;
    assert_int_equal(tb_layout_parse("mesh=1 place=R", &layout), TB_OK);
    tb_tensor_spec spec[2] = {{.size = sizeof *spec,
                               .name = "x",
                               .shape = {1, {4}},
                               .src = layout,
                               .dst = layout,
                               .src_dtype = TB_F32,
                               .dst_dtype = TB_F32}};
    spec[1] = spec[0];
    assert_int_equal(tb_ir_create(0, spec, 2, NULL, NULL, &ir), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "'x' is in the batch twice"));
    spec[0].dst_dtype = TB_I32;
    assert_int_equal(tb_ir_create(0, spec, 1, NULL, NULL, &ir), TB_REFUSED);
    assert_non_null(strstr(tb_error_detail(), "tensor 'x'"));
    tb_ir_opts opts = {0};
    assert_int_equal(tb_ir_create(0, spec, 1, NULL, &opts, &ir), TB_INVALID); /* size not set */
    assert_int_equal(tb_ir_create(0, NULL, 0, NULL, NULL, &ir), TB_OK);       /* an empty batch is fine */
    assert_int_equal(ir->nchunks, 0);
    tb_ir_destroy(ir);
    tb_layout_destroy(layout);
}

static void replace(char *text, const char *from, const char *to) {
    char *at = strstr(text, from);
    assert_non_null(at);
    assert_int_equal(strlen(from), strlen(to));
    while (*to)
        *at++ = *to++;
}

/* Numbers that are valid alone and overflow together. */
static void huge_dumps(void **state) {
    (void)state;
    static const struct {
        const char *src, *offset, *word;
    } wrong[] = {{"4611686018427387904", "0", "a box ends past 2^62"}, {"0", "4611686018427387904", "go past 2^62"}};
    for (size_t i = 0; i < 2; i++) {
        char text[1024];
        tb_ir *ir;
        int n =
            snprintf(text, sizeof text,
                     "{\"rank\":2,\"bucket_size\":1,\"tensors\":[\"w\"],\"channels\":[{\"mode\":\"P2P\","
                     "\"source\":0,\"targets\":[2],\"contributors\":[],\"max_in_flight\":2,\"buckets\":[{"
                     "\"group\":0,\"total_bytes\":1,\"chunks\":[{\"tensor\":0,\"id\":\"0000200000000000\",\"part\":0,"
                     "\"is_source\":false,\"is_target\":true,\"op\":\"sum\",\"divisor\":1,"
                     "\"shape\":[4611686018427387904],\"src\":[%s],\"dst\":[0],\"src_cell\":0,\"dst_cell\":0,"
                     "\"order\":0,\"src_dtype\":\"u8\",\"wire_dtype\":\"u8\",\"offset\":%s,\"nbytes\":"
                     "4611686018427387904}]}]}]}",
                     wrong[i].src, wrong[i].offset);
        assert_int_equal(tb_ir_parse_json(text, (size_t)n, &ir), TB_INVALID);
        assert_non_null(strstr(tb_error_detail(), wrong[i].word));
    }
}

/* Each change to a valid dump is detected. */
static void wrong_dumps(void **state) {
    (void)state;
    static const struct {
        const char *from, *to, *word;
    } wrong[] = {
        {"\"rank\":0", "\"rank\":x", "line 1"},
        {"\"rank\":0", "\"bank\":0", "'rank' is missing"},
        {"\"a\",\"b\"", "\"b\",\"a\"", "in order"},
        {"\"P2P\"", "\"P3P\"", "'mode'"},
        {"\"targets\":[1]", "\"targets\":[0]", "sends to itself"},
        {"\"offset\":448", "\"offset\":449", "multiple of 64"},
        {"\"offset\":448", "\"offset\":384", "multiple of 64"},
        {"\"nbytes\":400", "\"nbytes\":404", "the shape has 400"},
        {"\"total_bytes\":848", "\"total_bytes\":849", "end at 848"},
        {"\"shape\":[100]", "\"shape\":[ -1]", "out of range"},
        {"\"tensor\":1", "\"tensor\":2", "between 0 and 1"},
        {"\"wire_dtype\":\"f32\"", "\"wire_dtype\":\"f33\"", "not a dtype"},
        {"\"src_dtype\":\"f32\"", "\"src_dtype\":\"i32\"", "no cast from i32 to f32"},
        {"\"src_dtype\":\"f32\"", "\"src_dtype\":12345", "'src_dtype' is missing"},
        {"\"is_source\":true", "\"is_source\":null", "true or false"},
        {"\"group\":0", "\"grope\":0", "'group' is missing"},
        {"\"max_in_flight\":2", "\"via\":[1],\"yyy\":1", "'via' does not name"},
    };
    char *json;
    tb_ir *ir = make(0, "mesh=1 place=R", "mesh=1 place=R ranks=1", (tb_shape){1, {100}}, TB_F32, 848);
    assert_int_equal(tb_ir_dump_json(ir, &json), TB_OK);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char *copy = strdup(json);
        tb_ir *parsed;
        replace(copy, wrong[i].from, wrong[i].to);
        tb_status status = tb_ir_parse_json(copy, strlen(copy), &parsed);
        if (status != TB_INVALID || !strstr(tb_error_detail(), wrong[i].word))
            fail_msg("%s gave %d '%s'", wrong[i].to, status, tb_error_detail());
        free(copy);
    }
    free(json);
    tb_ir_destroy(ir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_self_copy_keeps_its_write),
        cmocka_unit_test(a_local_chunk_is_never_bundled_with_a_broadcast),
        cmocka_unit_test(bucket_sizes),
        cmocka_unit_test(contributions_fit_into_staging_memory),
        cmocka_unit_test(groups_are_apart),
        cmocka_unit_test(kinds_of_memory_are_apart),
        cmocka_unit_test(coded_rows_of_less_than_a_byte),
        cmocka_unit_test(ids_are_made_of_target_name_and_box),
        cmocka_unit_test(partial_sources_and_targets),
        cmocka_unit_test(wire_dtypes),
        cmocka_unit_test(wrong_batches),
        cmocka_unit_test(huge_dumps),
        cmocka_unit_test(wrong_dumps),
    };
    return cmocka_run_group_tests_name("ir", tests, NULL, NULL);
}
