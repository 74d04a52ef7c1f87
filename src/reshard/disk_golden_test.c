/* Resharding on disk against what PyTorch's DTensor and Megatron's planner do: shards are written where their layouts
 * put them, resharded, and every element looked up where the golden files say it belongs. */
#include "reshard/disk_test.h"

enum { NLAYOUTS = 300, NPLANS = 150, MOST_INDICES = 4096 };

static void read_lines(const char *name, json_t **lines, size_t count) {
    char path[4096], *line = NULL;
    size_t size = 0;
    const char *root = getenv("TB_GOLDEN");
    snprintf(path, sizeof path, "%s/%s", root ? root : "tests/golden", name);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    for (size_t i = 0; i < count; i++) {
        assert_true(getline(&line, &size, file) > 0);
        lines[i] = json_loads(line, 0, NULL);
        assert_non_null(lines[i]);
    }
    assert_true(getline(&line, &size, file) <= 0);
    free(line);
    fclose(file);
}

static tb_shape read_shape(const json_t *json) {
    tb_shape shape = {.ndim = (int)json_array_size(json)};
    for (int d = 0; d < shape.ndim; d++)
        shape.dim[d] = json_integer_value(json_array_get(json, (size_t)d));
    return shape;
}

/* What PyTorch says a rank holds, each element as its place in the whole tensor. */
static int32_t *golden_part(const json_t *line, const char *rank, tb_shape *shape) {
    static int64_t index[TB_MAX_DIMS][MOST_INDICES];
    const json_t *local = json_object_get(json_object_get(line, "locals"), rank);
    tb_shape whole = read_shape(json_object_get(line, "shape"));
    *shape = read_shape(json_object_get(local, "shape"));
    int64_t n = 1;
    for (int d = 0; d < shape->ndim; d++)
        n *= shape->dim[d];
    for (int d = 0; d < shape->ndim && n > 0; d++) { /* there are no lists where the part is empty */
        const json_t *segments = json_array_get(json_object_get(local, "dims"), (size_t)d);
        int64_t count = 0;
        for (size_t i = 0; i < json_array_size(segments); i++) {
            int64_t at = json_integer_value(json_array_get(json_array_get(segments, i), 0));
            int64_t stop = json_integer_value(json_array_get(json_array_get(segments, i), 1));
            for (; at < stop; at++)
                index[d][count++] = at;
        }
        assert_true(count <= MOST_INDICES);
        assert_int_equal(count, shape->dim[d]);
    }
    int32_t *values = malloc((size_t)n * sizeof *values + 1);
    for (int64_t i = 0; i < n; i++) {
        int64_t rest = i, place = 0, step = 1;
        for (int d = shape->ndim - 1; d >= 0; d--) {
            place += index[d][rest % shape->dim[d]] * step;
            rest /= shape->dim[d];
            step *= whole.dim[d];
        }
        values[i] = (int32_t)place;
    }
    return values;
}

static json_t *golden_side(const json_t *line) {
    return json_pack("{s:O,s:O,s:O}", "mesh", json_object_get(line, "mesh"), "ranks", json_object_get(line, "ranks"),
                     "placements", json_object_get(line, "placements"));
}

static void stock_case(stock *s, const json_t *line, const char *name) {
    const char *rank;
    const json_t *local;
    json_object_foreach(json_object_get(line, "locals"), rank, local) {
        tb_shape shape;
        int32_t *values = golden_part(line, rank, &shape);
        stock_add(s, atoi(rank), name, TB_I32, &shape, values);
    }
}

static void check_case(target_files *out, const json_t *line, const char *name) {
    const char *rank;
    const json_t *local;
    json_object_foreach(json_object_get(line, "locals"), rank, local) {
        tb_shape shape;
        int64_t nbytes;
        int32_t *expected = golden_part(line, rank, &shape);
        unsigned char *got = target_files_get(out, atoi(rank), name, TB_I32, &shape);
        assert_ok(tb_shape_size(&shape, TB_I32, NULL, &nbytes));
        assert_memory_equal(got, expected, (size_t)nbytes);
        free(expected);
        free(got);
    }
}

static int32_t count_ranks(json_t *const *lines) {
    int32_t n = 0;
    for (size_t i = 0; i < NLAYOUTS; i++) {
        const char *rank;
        const json_t *local;
        json_object_foreach(json_object_get(lines[i], "locals"), rank, local) {
            n = atoi(rank) >= n ? atoi(rank) + 1 : n;
        }
    }
    return n;
}

static void free_lines(json_t **lines, size_t count) {
    for (size_t i = 0; i < count; i++)
        json_decref(lines[i]);
}

/* Every pair of layouts of one shape is a tensor, and all of them one checkpoint. */
static void dtensor_pairs(void **state) {
    folder *f = *state;
    static json_t *lines[NLAYOUTS];
    read_lines("dtensor_layouts.jsonl", lines, NLAYOUTS);
    json_t *tensors = json_object();
    stock s = {0};
    char name[32];
    int npairs = 0;
    for (int pass = 0; pass < 2; pass++) {
        target_files out = {.dir = path_in(f, "out")};
        for (int i = 0; i < NLAYOUTS; i++) {
            for (int k = 0; k < NLAYOUTS; k++) {
                if (!json_equal(json_object_get(lines[i], "shape"), json_object_get(lines[k], "shape")))
                    continue;
                snprintf(name, sizeof name, "%d_to_%d", i, k);
                if (pass == 1) {
                    check_case(&out, lines[k], name);
                    continue;
                }
                tb_shape shape = read_shape(json_object_get(lines[i], "shape"));
                stock_case(&s, lines[i], name);
                add_entry(tensors, name, &shape, TB_I32, golden_side(lines[i]), golden_side(lines[k]));
                npairs++;
            }
        }
        if (pass == 0) {
            stock_write(&s, path_in(f, "in"), count_ranks(lines));
            reshard_entries(tensors, path_in(f, "in"), path_in(f, "out"), &(tb__disk_opts){.verify = true});
        }
        target_files_fini(&out);
    }
    assert_int_equal(npairs, 550);
    free_lines(lines, NLAYOUTS);
}

static void check_model(const char *dir, json_t *const *lines) {
    tb__checkpoint *model;
    char name[32];
    assert_ok(tb__checkpoint_open(dir, &model));
    assert_int_equal(model->count, NLAYOUTS);
    assert_true(model->nfiles > 1);
    for (int i = 0; i < NLAYOUTS; i++) {
        snprintf(name, sizeof name, "case_%d", i);
        const tb__checkpoint_tensor *t = tb__checkpoint_find(model, name);
        tb_shape shape = read_shape(json_object_get(lines[i], "shape"));
        assert_non_null(t);
        assert_shape(&t->tensor->shape, &shape);
        int32_t *values = malloc((size_t)t->tensor->nbytes + 1);
        assert_ok(tb__safetensors_read(model->files[t->file], t->tensor, 0, (size_t)t->tensor->nbytes, values));
        for (int64_t k = 0; k < t->tensor->nbytes / 4; k++)
            assert_int_equal(values[k], k);
        free(values);
    }
    tb__checkpoint_close(model);
}

/* Every layout to a model of one rank, and from there back. */
static void dtensor_there_and_back(void **state) {
    folder *f = *state;
    static json_t *lines[NLAYOUTS];
    read_lines("dtensor_layouts.jsonl", lines, NLAYOUTS);
    json_t *there = json_object(), *back = json_object();
    stock s = {0};
    target_files out = {.dir = path_in(f, "back")};
    char name[32];
    for (int i = 0; i < NLAYOUTS; i++) {
        snprintf(name, sizeof name, "case_%d", i);
        tb_shape shape = read_shape(json_object_get(lines[i], "shape"));
        stock_case(&s, lines[i], name);
        add_entry(there, name, &shape, TB_I32, golden_side(lines[i]), json_string("R"));
        add_entry(back, name, &shape, TB_I32, json_string("R"), golden_side(lines[i]));
    }
    stock_write(&s, path_in(f, "in"), count_ranks(lines));
    reshard_entries(there, path_in(f, "in"), path_in(f, "model"),
                    &(tb__disk_opts){.files = TB__SPEC_HF, .max_file_bytes = 100000, .verify = true});
    check_model(path_in(f, "model"), lines);
    reshard_entries(back, path_in(f, "model"), path_in(f, "back"), &(tb__disk_opts){.verify = true});
    for (int i = 0; i < NLAYOUTS; i++) {
        snprintf(name, sizeof name, "case_%d", i);
        check_case(&out, lines[i], name);
    }
    target_files_fini(&out);
    free_lines(lines, NLAYOUTS);
}

/* Megatron's plans */

static int64_t get(const json_t *json, const char *which, const char *key) {
    char full[32];
    snprintf(full, sizeof full, "%s_%s", which, key);
    return json_integer_value(json_object_get(json, full));
}

/* partition_stride is StridedShard; partition_sizes, per rank, are BlockShard with sizes times the ranks. */
static json_t *megatron_side(const json_t *line, const char *which, int64_t first) {
    char key[32];
    snprintf(key, sizeof key, "%s_sizes", which);
    int64_t world = get(line, which, "world"), dim = json_integer_value(json_object_get(line, "dim"));
    const json_t *sizes = json_object_get(line, key);
    json_t *ranks = json_array(), *place = json_array();
    for (int64_t i = 0; i < world; i++)
        json_array_append_new(ranks, json_integer(first + i));
    bool is_strided = get(line, which, "stride") > 1;
    json_array_append_new(place, json_string(json_is_array(sizes) ? "BS" : is_strided ? "SS" : "S"));
    json_array_append_new(place, json_integer(dim));
    for (size_t i = 0; i < json_array_size(sizes); i++)
        json_array_append_new(place, json_integer(json_integer_value(json_array_get(sizes, i)) * world));
    if (!json_is_array(sizes) && is_strided)
        json_array_append_new(place, json_integer(get(line, which, "stride")));
    return json_pack("{s:[I],s:o,s:[o]}", "mesh", (json_int_t)world, "ranks", ranks, "placements", place);
}

/* Element i of a rank's part, before and after. */
static int32_t value_of(int64_t rank, int64_t i) {
    return (int32_t)(rank * 1000000 + i);
}

static int64_t size_of(const tb_shape *shape) {
    int64_t n;
    assert_ok(tb_shape_size(shape, TB_I32, &n, NULL));
    return n;
}

/* Where an index in `dim` of an element is in another shape that differs in that dimension only. */
static int64_t place_in(const tb_shape *from, const tb_shape *to, int dim, int64_t i, int64_t index) {
    int64_t inner = 1;
    for (int d = dim + 1; d < from->ndim; d++)
        inner *= from->dim[d];
    int64_t outer = i / inner / from->dim[dim];
    return (outer * to->dim[dim] + index) * inner + i % inner;
}

static void check_megatron_rank(target_files *out, const json_t *line, const char *name, int rank, const json_t *ops) {
    int dim = (int)json_integer_value(json_object_get(line, "dim"));
    tb_shape src = read_shape(json_object_get(line, "src_local")), dst = read_shape(json_object_get(line, "dst_local"));
    int64_t n = size_of(&dst), inner = 1;
    int32_t *got = (int32_t *)target_files_get(out, rank, name, TB_I32, &dst);
    for (int d = dim + 1; d < dst.ndim; d++)
        inner *= dst.dim[d];
    for (int64_t i = 0; i < n; i++) {
        int64_t at = i / inner % dst.dim[dim], from = -1, index = 0;
        for (size_t k = 0; k < json_array_size(ops); k++) {
            const json_t *op = json_array_get(ops, k);
            const json_t *here = json_array_get(json_array_get(op, 2), (size_t)dim);
            const json_t *there = json_array_get(json_array_get(op, 1), (size_t)dim);
            int64_t start = json_integer_value(json_array_get(here, 0));
            if (at < start || at >= json_integer_value(json_array_get(here, 1)))
                continue;
            from = json_integer_value(json_array_get(op, 0));
            index = json_integer_value(json_array_get(there, 0)) + at - start;
        }
        assert_true(from >= 0);
        assert_int_equal(got[i], value_of(from, place_in(&dst, &src, dim, i, index)));
    }
    free(got);
}

static void megatron_plans(void **state) {
    folder *f = *state;
    static json_t *lines[NPLANS];
    read_lines("megatron_tp.jsonl", lines, NPLANS);
    json_t *tensors = json_object();
    stock s = {0};
    int64_t nranks = 0;
    char name[32];
    for (int i = 0; i < NPLANS; i++) {
        int64_t world = get(lines[i], "src", "world");
        tb_shape shape = read_shape(json_object_get(lines[i], "src_local"));
        int64_t n = size_of(&shape);
        snprintf(name, sizeof name, "plan_%d", i);
        for (int64_t rank = 0; rank < world; rank++) {
            int32_t *values = malloc((size_t)n * sizeof *values);
            for (int64_t k = 0; k < n; k++)
                values[k] = value_of(rank, k);
            stock_add(&s, (int32_t)rank, name, TB_I32, &shape, values);
        }
        shape.dim[json_integer_value(json_object_get(lines[i], "dim"))] *= world;
        nranks = world > nranks ? world : nranks;
        add_entry(tensors, name, &shape, TB_I32, megatron_side(lines[i], "src", 0),
                  megatron_side(lines[i], "dst", world));
    }
    stock_write(&s, path_in(f, "in"), (int32_t)nranks);
    reshard_entries(tensors, path_in(f, "in"), path_in(f, "out"), &(tb__disk_opts){0});
    target_files out = {.dir = path_in(f, "out")};
    for (int i = 0; i < NPLANS; i++) {
        const char *rank;
        const json_t *ops;
        snprintf(name, sizeof name, "plan_%d", i);
        assert_int_equal(json_object_size(json_object_get(lines[i], "ops")), get(lines[i], "dst", "world"));
        json_object_foreach(json_object_get(lines[i], "ops"), rank, ops) {
            check_megatron_rank(&out, lines[i], name, atoi(rank), ops);
        }
    }
    target_files_fini(&out);
    free_lines(lines, NPLANS);
}

#define with_folder(test) cmocka_unit_test_setup_teardown(test, folder_set_up, folder_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        with_folder(dtensor_pairs),
        with_folder(dtensor_there_and_back),
        with_folder(megatron_plans),
    };
    return cmocka_run_group_tests_name("reshard disk golden", tests, NULL, NULL);
}
