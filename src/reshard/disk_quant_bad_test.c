/* Resharding on disk to and from quantised tensors: what can't be quantised, what is wrong with scales, and that
 * failures leave nothing behind. */
#include "reshard/disk_test.h"

#include <math.h>

static void bad_targets(void **state) {
    folder *f = *state;
    static const char spec[] =
        "{\"rules\": [{\"match\": \"%s\", \"dst\": {\"quantisation\": \"%s\"}}, {\"match\": \"*\"}]}";
    static const char *const all[] = {"mxfp8", "fp8_tensor", "nvfp4"};
    char text[256];
    stock s = {0};
    float *w = malloc(64 * sizeof *w);
    int32_t *i = malloc(4);
    for (int k = 0; k < 64; k++)
        w[k] = k == 33 ? INFINITY : 1;
    *i = 1;
    stock_add(&s, 0, "w", TB_F32, &(tb_shape){1, {64}}, w);
    stock_add(&s, 0, "i", TB_I32, &(tb_shape){1, {1}}, i);
    stock_add(&s, 0, "odd", TB_F32, &(tb_shape){2, {2, 3}}, calloc(6, 4));
    stock_add(&s, 0, "scalar", TB_F32, &(tb_shape){0}, calloc(1, 4));
    stock_write(&s, path_in(f, "in"), 1);
    for (int k = 0; k < 3; k++) {
        snprintf(text, sizeof text, spec, "w", all[k]);
        check_refused(f, text, path_in(f, "in"), TB_INVALID,
                      "tensor 'w' of rank 0, from element 0 on: the element at row 0, column 33 is not finite");
        snprintf(text, sizeof text, spec, "scalar", all[k]);
        check_refused(f, text, path_in(f, "in"), TB_REFUSED, "tensor 'scalar': it has 0 dims, too few for");
    }
    snprintf(text, sizeof text, spec, "i", "mxfp8");
    check_refused(f, text, path_in(f, "in"), TB_REFUSED, "tensor 'i': it is i32, but mxfp8 is made from f32");
    snprintf(text, sizeof text, spec, "w", "fp8_block");
    check_refused(f, text, path_in(f, "in"), TB_REFUSED, "tensor 'w': it has 1 dims, too few for fp8_block");
    snprintf(text, sizeof text, spec, "odd", "nvfp4");
    check_refused(f, text, path_in(f, "in"), TB_REFUSED,
                  "tensor 'odd': nvfp4 has two elements to a byte, and rows of 3 would end inside one");
}

/* Rank 1's index 1 is larger than rank 0's, so that the scale depends on which of them counts. */
static void verify_finds(void **state) {
    folder *f = *state;
    stock s = {0};
    for (int32_t rank = 0; rank < 2; rank++) {
        float *values = malloc(2 * sizeof *values);
        values[0] = rank ? 5 : 1;
        values[1] = 1;
        stock_add(&s, rank, "w", TB_F32, &(tb_shape){1, {2}}, values);
    }
    stock_write(&s, path_in(f, "in"), 2);
    const tb__disk_opts opts = {.verify = true, .trust_replicas = true};
    assert_fails(
        reshard_text("{\"src_mesh\": [2], \"tensors\": {\"w\": {\"shape\": [3], \"src\": \"Explicit(0, 0-2; 1-3)\", "
                     "\"dst\": {\"quantisation\": \"fp8_tensor\"}}}}",
                     path_in(f, "in"), path_in(f, "out"), &opts),
        TB_INTERNAL, "tensor 'w_scale' of rank 0 is not what the source has, at byte");
    assert_int_equal(access(path_in(f, "out"), F_OK), -1);
}

/* One rank's file with w and these others, as a header's text, and what is said of it. */
static void check_source(folder *f, const char *format, const char *header, size_t nbytes, const char *sentence) {
    char text[256];
    const char *dir = path_in(f, "source");
    assert_int_equal(mkdir(dir, 0777), 0);
    write_file(path_in(f, "source/rank_0.safetensors"), header, nbytes);
    snprintf(text, sizeof text, "{\"rules\": [{\"match\": \"*\", \"src\": {\"quantisation\": \"%s\"}}]}", format);
    check_refused(f, text, dir, TB_INVALID, sentence);
    remove_tree(dir);
}

#define W_F8 "\"w\":{\"dtype\":\"F8_E4M3\",\"shape\":[2,64],\"data_offsets\":[0,128]}"
#define W_U8 "\"w\":{\"dtype\":\"U8\",\"shape\":[2,64],\"data_offsets\":[0,128]}"
#define AT   "/source/rank_0.safetensors: "

static void bad_sources(void **state) {
    folder *f = *state;
    check_source(f, "mxfp8", "{" W_F8 "}", 128,
                 AT "tensor 'w_scale' is not in it, but 'w' is mxfp8 and needs its scales");
    check_source(f, "fp8_block", "{" W_F8 "}", 128, AT "tensor 'w_scale_inv' is not in it, but 'w' is fp8_block");
    check_source(f, "fp8_tensor", "{" W_F8 "}", 128, AT "tensor 'w_scale' is not in it, but 'w' is fp8_tensor");
    check_source(f, "mxfp8", "{" W_U8 "}", 128, AT "tensor 'w' is u8, but the data of mxfp8 is f8e4m3");
    check_source(f, "nvfp4", "{" W_F8 "}", 128, AT "tensor 'w' is f8e4m3, but the data of nvfp4 is u8");
    check_source(f, "mxfp8",
                 "{" W_F8 ",\"w_scale\":{\"dtype\":\"F8_E8M0\",\"shape\":[2,3],\"data_offsets\":[128,134]}}", 134,
                 AT "tensor 'w_scale' is 2,3 of e8m0, but mxfp8 has 2,2 of e8m0 for 'w'");
    check_source(f, "mxfp8", "{" W_F8 ",\"w_scale\":{\"dtype\":\"U8\",\"shape\":[2,2],\"data_offsets\":[128,132]}}",
                 132, AT "tensor 'w_scale' is 2,2 of u8, but mxfp8 has 2,2 of e8m0 for 'w'");
    check_source(f, "nvfp4",
                 "{" W_U8 ",\"w_scale\":{\"dtype\":\"F8_E4M3\",\"shape\":[2,8],\"data_offsets\":[128,144]}}", 144,
                 AT "tensor 'w_scale_2' is not in it, but 'w' is nvfp4");
    check_source(f, "nvfp4",
                 "{" W_U8 ",\"w_scale\":{\"dtype\":\"F8_E4M3\",\"shape\":[2,8],\"data_offsets\":[128,144]},"
                 "\"w_scale_2\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[144,152]}}",
                 152, AT "tensor 'w_scale_2' is 2 of f32, but nvfp4 has a scalar of f32 for 'w'");
    check_source(f, "fp8_tensor", "{" W_F8 ",\"w_scale\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[128,132]}}",
                 132, AT "tensor 'w_scale' is 0; a scale is positive and finite");
    check_source(f, "fp8_block", "{\"w\":{\"dtype\":\"F8_E4M3\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2,
                 "tensor 'w': src: it has 1 dims, too few for fp8_block");
    check_source(f, "nvfp4", "{\"w\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", 1,
                 "tensor 'w': src: it has 0 dims, too few for nvfp4");
    assert_int_equal(mkdir(path_in(f, "in"), 0777), 0);
    write_file(path_in(f, "in/rank_0.safetensors"),
               "{" W_F8 ",\"w_scale\":{\"dtype\":\"F8_E8M0\",\"shape\":[2,2],\"data_offsets\":[128,132]}}", 132);
    check_refused(f,
                  "{\"tensors\": {\"w_scale\": {}}, \"rules\": [{\"match\": \"w\", \"src\": {\"quantisation\": "
                  "\"mxfp8\"}}]}",
                  path_in(f, "in"), TB_INVALID,
                  "tensor 'w_scale': the spec has an entry for it, but it is a scale of 'w'");
    check_refused(f, "{\"tensors\": {\"w\": {\"shape\": [3, 64], \"src\": {\"quantisation\": \"mxfp8\"}}}}",
                  path_in(f, "in"), TB_INVALID,
                  "tensor 'w' is 2,64, but its layout gives rank 0 3,64 of 3,64 as mxfp8");
    write_file(path_in(f, "in/rank_1.safetensors"),
               "{\"w_scale\":{\"dtype\":\"F8_E8M0\",\"shape\":[2,2],\"data_offsets\":[0,4]}}", 4);
    check_refused(f,
                  "{\"src_mesh\": [2], \"rules\": [{\"match\": \"w\", \"src\": {\"mesh\": [1], \"quantisation\": "
                  "\"mxfp8\"}}, {\"match\": \"*\"}]}",
                  path_in(f, "in"), TB_INVALID,
                  "/in/rank_1.safetensors: tensor 'w_scale' is in it, but the rank is not");
}

/* Every allocation of the calling thread fails once. */
static void no_memory(void **state) {
    folder *f = *state;
    static const char spec[] =
        "{\"dst_mesh\": [2], \"rules\": [{\"match\": \"*\", \"src\": {\"quantisation\": \"mxfp8\"}, \"dst\": "
        "{\"placements\": \"S0\", \"quantisation\": {\"format\": \"nvfp4\", \"group\": \"all*\"}}}]}";
    assert_int_equal(mkdir(path_in(f, "in"), 0777), 0);
    write_file(path_in(f, "in/rank_0.safetensors"),
               "{" W_F8 ",\"w_scale\":{\"dtype\":\"F8_E8M0\",\"shape\":[2,2],\"data_offsets\":[128,132]}}", 132);
    const char *in = path_in(f, "in"), *out = path_in(f, "out");
    long n = 0;
    for (;; n++) {
        tb__mem_fail_after(n);
        tb_status status = reshard_text(spec, in, out, &(tb__disk_opts){.threads = 1});
        tb__mem_fail_after(-1);
        if (status == TB_OK)
            break;
        assert_int_equal(status, TB_NO_MEMORY);
        assert_int_equal(access(out, F_OK), -1);
    }
    assert_true(n > 20);
}

#define with_folder(test) cmocka_unit_test_setup_teardown(test, folder_set_up, folder_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        with_folder(bad_targets),
        with_folder(verify_finds),
        with_folder(bad_sources),
        with_folder(no_memory),
    };
    return cmocka_run_group_tests_name("reshard disk quant bad", tests, NULL, NULL);
}
