/* Replicas of a source that differ: whatever makes several ranks hold the same elements, a single bit that differs is
 * found before anything has its name, and what nobody else holds may be anything. */
#include "layout/layout.h"
#include "reshard/disk_test.h"

#include <fcntl.h>

enum { ROWS = 8, COLUMNS = 6 };

static const tb_shape whole = {2, {ROWS, COLUMNS}};

/* Not a number, with a payload of its own for each element and contribution. */
static uint32_t bits_of(int64_t index, int64_t part) {
    return UINT32_C(0x7fc00000) + (uint32_t)(index * 64 + part * 8);
}

/* An element of a rank's part. */
typedef struct element {
    int32_t rank;
    int64_t place;       /* in the part, row-major */
    int64_t index, part; /* in the tensor, and of which contribution */
} element;

typedef TB_VEC(element) elements;

/* Which contribution the rank has. */
static int64_t part_of(const tb_layout *layout, int32_t rank) {
    int64_t part = 0, rest = rank, size = 1;
    for (int m = layout->ndim - 1; m >= 0; m--) {
        if (layout->place[m].kind == TB_PARTIAL) {
            part += rest % layout->shape[m] * size;
            size *= layout->shape[m];
        }
        rest /= layout->shape[m];
    }
    return part;
}

static void list_elements(const tb_layout *layout, int32_t rank, elements *out, tb_shape *shape) {
    tb_local local;
    int64_t place = 0;
    assert_ok(tb_layout_local(layout, &whole, rank, &local));
    for (size_t a = 0; a < local.nsegments[0]; a++) {
        for (int64_t i = local.segments[0][a].start; i < local.segments[0][a].stop; i++) {
            for (size_t b = 0; b < local.nsegments[1]; b++) {
                for (int64_t k = local.segments[1][b].start; k < local.segments[1][b].stop; k++)
                    assert_true(tb__vec_push(out, (element){rank, place++, i * COLUMNS + k, part_of(layout, rank)}));
            }
        }
    }
    *shape = local.shape;
    tb_local_fini(&local);
}

/* Whether the two are the same place of the same part, in ranks that differ in Replicate dimensions only. */
static bool are_copies(const tb_layout *layout, const element *a, const element *b) {
    int64_t left = a->rank, right = b->rank;
    bool are = a->place == b->place;
    for (int m = layout->ndim - 1; m >= 0; m--) {
        are = are && (layout->place[m].kind == TB_REPLICATE || left % layout->shape[m] == right % layout->shape[m]);
        left /= layout->shape[m];
        right /= layout->shape[m];
    }
    return are;
}

/* Whether e is held again, apart from itself or, with `copies`, apart from itself and its copies. */
static bool is_shared(const tb_layout *layout, const elements *all, const element *e, bool copies) {
    for (size_t i = 0; i < all->count; i++) {
        const element *other = &all->item[i];
        bool is_same = copies ? are_copies(layout, e, other) : e == other;
        if (!is_same && other->index == e->index && other->part == e->part)
            return true;
    }
    return false;
}

/* Flips a bit of a rank's file, of a byte of the tensor. */
static void flip(const char *dir, int32_t rank, const char *name, int64_t byte) {
    char *path;
    tb__safetensors *file;
    unsigned char value;
    assert_ok(tb__rank_file_path(dir, rank, &path));
    assert_ok(tb__safetensors_open(path, &file));
    const tb__safetensor *t = tb__safetensors_find(&file->header, name);
    assert_non_null(t);
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &value, 1, file->data_start + t->offset + byte), 1);
    value ^= 1;
    assert_int_equal(pwrite(fd, &value, 1, file->data_start + t->offset + byte), 1);
    close(fd);
    tb__safetensors_close(file);
    free(path);
}

/* Flips a bit of the element, and with `copies` of all its copies. */
static void flip_element(const char *dir, const tb_layout *layout, const elements *all, const element *e, bool copies) {
    for (size_t i = 0; i < all->count; i++) {
        const element *other = &all->item[i];
        if (e == other || (copies && are_copies(layout, e, other)))
            flip(dir, other->rank, "w", 4 * other->place);
    }
}

static void check_target(const char *dir) {
    target_files out = {.dir = dir};
    uint32_t *got = (uint32_t *)target_files_get(&out, 0, "w", TB_F32, &whole);
    for (int64_t i = 0; i < ROWS * COLUMNS; i++)
        assert_int_equal(got[i], bits_of(i, 0));
    free(got);
    target_files_fini(&out);
}

/* Every element of every rank differs once; then it does together with its copies, so that only other parts that have
 * it can show the difference. */
static void check_layout(folder *f, const char *text, bool is_partial) {
    tb_layout *layout;
    stock s = {0};
    elements all = {0};
    char spec[512], ranks[32];
    const char *in = path_in(f, "in"), *out = path_in(f, "out");
    assert_ok(tb_layout_parse(text, &layout));
    int32_t nranks = tb_layout_nranks(layout);
    for (int32_t rank = 0; rank < nranks; rank++) {
        tb_shape shape;
        size_t first = all.count;
        list_elements(layout, rank, &all, &shape);
        uint32_t *bits = malloc((all.count - first) * sizeof *bits + 1);
        for (size_t i = first; i < all.count; i++)
            bits[i - first] = bits_of(all.item[i].index, all.item[i].part);
        stock_add(&s, rank, "w", TB_F32, &shape, bits);
    }
    stock_write(&s, in, nranks);
    /* what differs may not be seen any more in what is written */
    snprintf(spec, sizeof spec,
             "{\"tensors\": {\"w\": {\"shape\": [8, 6], \"src\": \"%s\", \"dst\": {\"dtype\": \"%s\"}}}}", text,
             "bf16");
    assert_ok(reshard_text(spec, in, out, &(tb__disk_opts){.verify = true, .threads = 2}));
    remove_tree(out);
    for (size_t i = 0; i < 2 * all.count; i++) {
        const element *e = &all.item[i % all.count];
        bool copies = i >= all.count;
        const tb__disk_opts opts = {.verify = i % 2, .band_bytes = i % 3 ? 64 : 0, .threads = 1 + (int)i % 2};
        flip_element(in, layout, &all, e, copies);
        tb_status status = reshard_text(spec, in, out, &opts);
        flip_element(in, layout, &all, e, copies);
        if (!is_shared(layout, &all, e, copies)) {
            check_ok(status, text);
            remove_tree(out);
            continue;
        }
        if (status != TB_INVALID)
            fail_msg("%s: element %lld of rank %d%s differs: %s", text, (long long)e->place, (int)e->rank,
                     copies ? " and its copies" : "", tb_status_string(status));
        check_sentence("tensor 'w': by the spec rank");
        if (!copies) { /* of copies the first is named */
            snprintf(ranks, sizeof ranks, "%d", (int)e->rank);
            check_sentence(ranks);
        }
        assert_int_equal(access(out, F_OK), -1);
    }
    if (!is_partial) {
        snprintf(spec, sizeof spec, "{\"tensors\": {\"w\": {\"shape\": [8, 6], \"src\": \"%s\"}}}", text);
        assert_ok(reshard_text(spec, in, out, &(tb__disk_opts){.verify = true}));
        check_target(out);
        remove_tree(out);
    }
    remove_tree(in);
    free(all.item);
    tb_layout_destroy(layout);
}

static void every_element(void **state) {
    folder *f = *state;
    check_layout(f, "mesh=3 place=R", false);
    check_layout(f, "mesh=2,2 place=S0,R", false);
    check_layout(f, "mesh=2,2 place=R,S1", false);
    check_layout(f, "mesh=2,3 place=R,StridedShard(0,2)", false);
    check_layout(f, "mesh=2,2,2 place=R,S0,R", false);
    check_layout(f, "mesh=3,2 place=S0,S1", false); /* nobody shares anything */
    check_layout(f, "mesh=2,2 place=Partial(sum),R", true);
    check_layout(f, "mesh=2,2 place=Partial(avg),Explicit(0,0-5;4-8)", true);
    check_layout(f, "mesh=3 place=Explicit(0,0-4;2-6;5-8)", false);
    check_layout(f, "mesh=3 place=Explicit(1,4-6,0-2;1-4;2-3,5-6)", false);
    check_layout(f, "mesh=2,2 place=Explicit(0,0-5;4-8),Explicit(1,0-4;3-6)", false);
    check_layout(f, "mesh=2,2 place=Explicit(0,0-5;4-8),R", false);
    check_layout(f, "mesh=2,2 place=R,Explicit(0,0-5;4-8)", false);
    check_layout(f, "mesh=2,2,2 place=R,Explicit(1,0-4;3-6),R", false);
    check_layout(f, "mesh=2,2 place=R,Explicit(0,0-4,2-3;4-8)", false);
    check_layout(f, "mesh=2 place=Explicit(0,0-4,2-3;4-8)", false); /* one rank has a row twice */
}

/* Four ranks' rows, and a spec without a rule for them. */
static void forgotten_rule(void **state) {
    folder *f = *state;
    stock s = {0};
    for (int32_t rank = 0; rank < 4; rank++) {
        int32_t *up = malloc(8 * sizeof *up), *norm = malloc(2 * sizeof *norm);
        for (int i = 0; i < 8; i++)
            up[i] = rank * 8 + i;
        norm[0] = norm[1] = 5;
        stock_add(&s, rank, "up_proj", TB_I32, &(tb_shape){2, {2, 4}}, up);
        stock_add(&s, rank, "norm", TB_I32, &(tb_shape){1, {2}}, norm);
    }
    const char *in = path_in(f, "in"), *out = path_in(f, "out");
    stock_write(&s, in, 4);
    static const char spec[] = "{\"src_mesh\": [4], \"rules\": [{\"match\": \"*\"}]}";
    for (int i = 0; i < 4; i++) {
        const tb__disk_opts opts = {.files = i & 1 ? TB__SPEC_HF : TB__SPEC_RANKS, .verify = i & 2};
        assert_fails(reshard_text(spec, in, out, &opts), TB_INVALID,
                     "tensor 'up_proj': by the spec ranks 0, 1, 2, 3 hold the same, but in the files ranks 1, 2, 3 "
                     "differ from rank 0, at byte 0 first; do they hold shards of it?");
        assert_int_equal(access(out, F_OK), -1);
    }
    /* what was in the directory stays as it was */
    assert_int_equal(mkdir(out, 0777), 0);
    write_bytes(path_in(f, "out/config.json"), "{}", 2);
    assert_fails(reshard_text(spec, in, out, &(tb__disk_opts){0}), TB_INVALID, "up_proj");
    assert_int_equal(count_entries(out), 1);
    assert_ok(reshard_text(spec, in, out, &(tb__disk_opts){.trust_replicas = true, .verify = true}));
    target_files target = {.dir = out};
    int32_t *got = (int32_t *)target_files_get(&target, 0, "up_proj", TB_I32, &(tb_shape){2, {2, 4}});
    for (int32_t i = 0; i < 8; i++)
        assert_int_equal(got[i], i);
    free(got);
    target_files_fini(&target);
}

/* Shards that are not all of one size, or not there, contradict the spec before any data is read. */
static void other_shapes(void **state) {
    folder *f = *state;
    stock s = {0};
    for (int32_t rank = 0; rank < 2; rank++)
        stock_add(&s, rank, "w", TB_I32, &(tb_shape){1, {3 - rank}}, calloc(3, sizeof(int32_t)));
    stock_write(&s, path_in(f, "in"), 2);
    static const char spec[] = "{\"src_mesh\": [2], \"rules\": [{\"match\": \"*\"}]}";
    check_refused(f, spec, path_in(f, "in"), TB_INVALID,
                  "/in/rank_1.safetensors: tensor 'w' is 2, but its layout gives rank 1 3 of 3; the spec has it "
                  "replicated, do the ranks hold shards of it?");
    for (int32_t rank = 0; rank < 2; rank++)
        stock_add(&s, rank, "w", rank ? TB_F32 : TB_I32, &(tb_shape){1, {3 - rank}}, calloc(3, sizeof(int32_t)));
    stock_write(&s, path_in(f, "dtypes"), 2);
    check_refused(f, spec, path_in(f, "dtypes"), TB_INVALID, "tensor 'w' is 2, but its layout gives rank 1 3 of 3");
    assert_null(strstr(tb_error_detail(), "replicated")); /* shards would have one dtype */
    stock_add(&s, 0, "w", TB_I32, &(tb_shape){1, {1}}, calloc(1, sizeof(int32_t)));
    stock_write(&s, path_in(f, "lacks"), 2);
    check_refused(f, spec, path_in(f, "lacks"), TB_INVALID,
                  "/lacks/rank_1.safetensors: tensor 'w' is not in it, but the spec has it on rank 1");
    stock_add(&s, 0, "w", TB_I32, &(tb_shape){1, {0}}, calloc(1, sizeof(int32_t)));
    stock_add(&s, 1, "w", TB_I32, &(tb_shape){1, {0}}, calloc(1, sizeof(int32_t)));
    stock_write(&s, path_in(f, "empty"), 2);
    assert_ok(reshard_text(spec, path_in(f, "empty"), path_in(f, "out"), &(tb__disk_opts){.verify = true}));
}

/* More than a thread takes at a time, in little memory; the very last byte differs. */
static void large(void **state) {
    folder *f = *state;
    enum { NBYTES = (64 << 20) + 4097 };
    stock s = {0};
    for (int32_t rank = 0; rank < 2; rank++)
        stock_add(&s, rank, "w", TB_U8, &(tb_shape){1, {NBYTES}}, calloc(NBYTES, 1));
    const char *in = path_in(f, "in"), *out = path_in(f, "out");
    stock_write(&s, in, 2);
    static const char spec[] =
        "{\"src_mesh\": [2], \"dst_mesh\": [2], \"rules\": [{\"match\": \"*\", \"dst\": \"S0\"}]}";
    const tb__disk_opts opts = {.memory = TB__DISK_MIN_MEMORY};
    flip(in, 1, "w", NBYTES - 1);
    assert_fails(reshard_text(spec, in, out, &opts), TB_INVALID,
                 "tensor 'w': by the spec ranks 0, 1 hold the same, but in the files rank 1 differs from rank 0, at "
                 "byte 67112960 first");
    assert_int_equal(access(out, F_OK), -1);
    flip(in, 1, "w", NBYTES - 1);
    assert_ok(reshard_text(spec, in, out, &opts));
}

/* Data and scales as they lie in the files. */
static void quantised(void **state) {
    folder *f = *state;
    static const struct {
        const char *format, *tensors[3];
    } cases[] = {{"mxfp8", {"w", "w_scale"}},
                 {"fp8_block", {"w", "w_scale_inv"}},
                 {"fp8_tensor", {"w", "w_scale"}},
                 {"nvfp4", {"w", "w_scale", "w_scale_2"}}};
    enum { N = 256 };
    stock s = {0};
    float *values = malloc(N * N * sizeof *values);
    for (int i = 0; i < N * N; i++)
        values[i] = (float)(i % 251) - 100;
    stock_add(&s, 0, "w", TB_F32, &(tb_shape){2, {N, N}}, values);
    const char *plain = path_in(f, "plain"), *in = path_in(f, "in"), *out = path_in(f, "out");
    stock_write(&s, plain, 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[256], sentence[128];
        snprintf(text, sizeof text,
                 "{\"dst_mesh\": [2, 2], \"rules\": [{\"match\": \"*\", \"dst\": {\"placements\": \"S0,R\", "
                 "\"quantisation\": \"%s\"}}]}",
                 cases[i].format);
        assert_ok(reshard_text(text, plain, in, &(tb__disk_opts){0}));
        for (int to = 0; to < 2; to++) { /* with and without a look at everything before it is quantised again */
            snprintf(text, sizeof text,
                     "{\"src_mesh\": [2, 2], \"rules\": [{\"match\": \"*\", \"src\": {\"placements\": \"S0,R\", "
                     "\"quantisation\": \"%s\"}%s}]}",
                     cases[i].format, to ? ", \"dst\": {\"quantisation\": \"fp8_tensor\"}" : "");
            assert_ok(reshard_text(text, in, out, &(tb__disk_opts){.verify = true}));
            remove_tree(out);
            for (int k = 0; k < 3 && cases[i].tensors[k]; k++) {
                snprintf(
                    sentence, sizeof sentence,
                    "tensor '%s': by the spec ranks 2, 3 hold the same, but in the files rank 3 differs from rank 2",
                    cases[i].tensors[k]);
                flip(in, 3, cases[i].tensors[k], 0);
                check_refused(f, text, in, TB_INVALID, sentence);
                flip(in, 3, cases[i].tensors[k], 0);
            }
        }
        remove_tree(in);
    }
}

#define with_folder(test) cmocka_unit_test_setup_teardown(test, folder_set_up, folder_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        with_folder(every_element), with_folder(forgotten_rule), with_folder(other_shapes),
        with_folder(large),         with_folder(quantised),
    };
    return cmocka_run_group_tests_name("reshard replicas", tests, NULL, NULL);
}
