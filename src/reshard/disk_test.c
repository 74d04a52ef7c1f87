/* Resharding on disk: random layouts with casts and reductions against a naive evaluation, bands of any size, what is
 * wrong with sources and targets, and that failures leave nothing behind. */
#include "reshard/disk_test.h"

#include "../tests/support/numbers.h"

/* Random cases */

enum { CASES_TOGETHER = 12 };

/* A case and what is made of it. */
typedef struct job {
    random_case c;
    tb_dtype dst_dtype, wire;
    tb_reduce_op op;
    uint64_t divisor;
    int64_t nparts; /* contributions that are combined */
} job;

static uint64_t value_of(const job *j, int64_t global, int64_t part) {
    rng r = {j->c.seed + (uint64_t)global * 1000003 + (uint64_t)part * 7919};
    return number_random(j->c.dtype, &r);
}

static int64_t count_parts(const side *s) {
    int64_t n = 1;
    for (int m = 0; m < s->mesh_ndim; m++)
        n *= s->place[m].kind == TB_PARTIAL ? s->mesh[m] : 1;
    return n;
}

/* Which of the contributions mesh index m has. */
static int64_t part_of(const side *s, int32_t m) {
    int64_t coord[TB_MAX_DIMS], part = 0;
    mesh_coords(s, m, coord);
    for (int i = 0; i < s->mesh_ndim; i++) {
        if (s->place[i].kind == TB_PARTIAL)
            part = part * s->mesh[i] + coord[i];
    }
    return part;
}

/* A Partial(sum) target has its values at coordinate 0, and zeros elsewhere. */
static bool is_zero(const side *s, int32_t m) {
    int64_t coord[TB_MAX_DIMS];
    mesh_coords(s, m, coord);
    for (int i = 0; i < s->mesh_ndim; i++) {
        if (s->place[i].kind == TB_PARTIAL && s->place[i].op == TB_SUM && coord[i] > 0)
            return true;
    }
    return false;
}

/* The places of a part's elements in the whole tensor; to be freed. */
static int64_t *places_of(const side *s, const tb_shape *whole, int32_t m, tb_shape *shape, int64_t *count) {
    static naive_list lists[TB_MAX_DIMS];
    *shape = (tb_shape){.ndim = whole->ndim};
    *count = 1;
    for (int d = 0; d < whole->ndim; d++) {
        naive_local(s, whole, m, d, &lists[d]);
        shape->dim[d] = lists[d].count;
        *count *= lists[d].count;
    }
    int64_t *places = malloc((size_t)*count * sizeof *places + 1);
    for (int64_t i = 0; i < *count; i++) {
        int64_t rest = i, step = 1;
        places[i] = 0;
        for (int d = whole->ndim - 1; d >= 0; d--) {
            places[i] += lists[d].index[rest % shape->dim[d]] * step;
            rest /= shape->dim[d];
            step *= whole->dim[d];
        }
    }
    return places;
}

static void make_job(job *j, uint64_t seed) {
    static const tb_dtype floats[] = {TB_F32, TB_F16, TB_BF16, TB_F8E4M3, TB_F8E5M2};
    tb_plan *plan = NULL;
    while (!plan) { /* now and then a source lacks something */
        tb_layout *src, *dst;
        random_case_make(&j->c, seed++);
        assert_ok(side_layout(&j->c.src, &src));
        assert_ok(side_layout(&j->c.dst, &dst));
        (void)tb_plan_create(src, dst, &j->c.shape, j->c.dtype, NULL, &plan);
        tb_layout_destroy(src);
        tb_layout_destroy(dst);
    }
    tb_plan_destroy(plan);
    rng r = {seed * 31};
    unsigned bits = tb_dtype_bits(j->c.dtype);
    j->dst_dtype = j->c.dtype == TB_I64 ? TB_I64 : floats[rng_range(&r, 0, 4)];
    bool is_narrower = tb_dtype_bits(j->dst_dtype) < bits || tb_dtype_bits(j->dst_dtype) == 8;
    j->wire = is_narrower ? j->dst_dtype : j->c.dtype;
    j->nparts = count_parts(&j->c.src);
    j->op = TB_SUM;
    j->divisor = 1;
    for (int m = 0; m < j->c.src.mesh_ndim; m++) {
        const tb_placement *place = &j->c.src.place[m];
        if (place->kind == TB_PARTIAL && place->op == TB_AVG)
            j->divisor *= (uint64_t)j->c.src.mesh[m];
        else if (place->kind == TB_PARTIAL)
            j->op = place->op;
    }
}

static json_t *side_entry(const side *s, tb_dtype dtype) {
    tb_layout *layout;
    char *text;
    assert_ok(side_layout(s, &layout));
    assert_ok(tb_layout_format(layout, &text));
    json_t *json = json_pack("{s:s,s:s}", "layout", text, "dtype", tb_dtype_name(dtype));
    free(text);
    tb_layout_destroy(layout);
    return json;
}

static void stock_job(stock *s, const job *j, const char *name) {
    size_t size = number_size(j->c.dtype);
    for (int32_t m = 0; m < j->c.src.nranks; m++) {
        tb_shape shape;
        int64_t n, *places = places_of(&j->c.src, &j->c.shape, m, &shape, &n);
        unsigned char *bytes = malloc((size_t)n * size + 1);
        for (int64_t i = 0; i < n; i++)
            number_store(j->c.dtype, bytes + (size_t)i * size, value_of(j, places[i], part_of(&j->c.src, m)));
        stock_add(s, j->c.src.ranks[m], name, j->c.dtype, &shape, bytes);
        free(places);
    }
}

static uint64_t expected_value(const job *j, int64_t place) {
    uint64_t bits[CASE_MAX_RANKS];
    for (int64_t k = 0; k < j->nparts; k++)
        bits[k] = value_of(j, place, k);
    if (j->c.dtype == TB_I64 && j->nparts == 1)
        return bits[0];
    return number_reduce(j->c.dtype, j->wire, j->dst_dtype, j->op, j->divisor, bits, (size_t)j->nparts);
}

static void check_job(target_files *out, const job *j, const char *name) {
    size_t size = number_size(j->dst_dtype);
    for (int32_t m = 0; m < j->c.dst.nranks; m++) {
        tb_shape shape;
        int64_t n, *places = places_of(&j->c.dst, &j->c.shape, m, &shape, &n);
        unsigned char *got = target_files_get(out, j->c.dst.ranks[m], name, j->dst_dtype, &shape);
        bool zero = is_zero(&j->c.dst, m);
        for (int64_t i = 0; i < n; i++) {
            uint64_t expected = zero ? 0 : expected_value(j, places[i]);
            uint64_t bits = number_load(j->dst_dtype, got + (size_t)i * size);
            if (bits == expected)
                continue;
            random_case_print(&j->c);
            fail_msg("to %s: rank %d, element %lld: %llx instead of %llx", tb_dtype_name(j->dst_dtype),
                     (int)j->c.dst.ranks[m], (long long)i, (unsigned long long)bits, (unsigned long long)expected);
        }
        free(got);
        free(places);
    }
}

static void random_layouts(void **state) {
    folder *f = *state;
    static job jobs[CASES_TOGETHER];
    static const int64_t bands[] = {64, 256, 4096, 0};
    uint64_t seed = test_seed();
    for (int64_t round = 0; round < test_cases(15); round++) {
        char name[32], in[32], to[32];
        stock s = {0};
        json_t *tensors = json_object();
        snprintf(in, sizeof in, "in_%lld", (long long)round);
        snprintf(to, sizeof to, "out_%lld", (long long)round);
        for (int i = 0; i < CASES_TOGETHER; i++) {
            job *j = &jobs[i];
            make_job(j, seed + (uint64_t)round * 1000 + (uint64_t)i * 50);
            snprintf(name, sizeof name, "case_%d", i);
            stock_job(&s, j, name);
            add_entry(tensors, name, &j->c.shape, j->c.dtype, side_entry(&j->c.src, j->c.dtype),
                      side_entry(&j->c.dst, j->dst_dtype));
        }
        int32_t nranks = 0;
        for (size_t i = 0; i < s.tensors.count; i++)
            nranks = s.tensors.item[i].rank >= nranks ? s.tensors.item[i].rank + 1 : nranks;
        assert_true(nranks <= MOST_RANKS);
        bool has_rank[MOST_RANKS] = {false};
        for (size_t i = 0; i < s.tensors.count; i++)
            has_rank[s.tensors.item[i].rank] = true;
        const char *dir = path_in(f, in);
        stock_write(&s, dir, nranks);
        for (int32_t rank = 0; rank < nranks; rank++) { /* a file that no mesh has is refused */
            char file[48];
            snprintf(file, sizeof file, "rank_%d.safetensors", (int)rank);
            if (!has_rank[rank])
                unlink(keep_path(f, dir, file));
        }
        reshard_entries(tensors, dir, path_in(f, to), &(tb__disk_opts){.verify = true, .band_bytes = bands[round % 4]});
        target_files out = {.dir = path_in(f, to)};
        for (int i = 0; i < CASES_TOGETHER; i++) {
            snprintf(name, sizeof name, "case_%d", i);
            check_job(&out, &jobs[i], name);
        }
        target_files_fini(&out);
        remove_tree(dir);
        remove_tree(path_in(f, to));
    }
}

/* Tensors larger than a band */

enum { ROWS = 600, COLUMNS = 5000 };

static void stock_matrix(stock *s, const char *layout_text, const char *name) {
    tb_layout *layout;
    const tb_shape whole = {2, {ROWS, COLUMNS}};
    assert_ok(tb_layout_parse(layout_text, &layout));
    for (int32_t rank = 0; rank < tb_layout_nranks(layout); rank++) {
        tb_local local;
        assert_ok(tb_layout_local(layout, &whole, rank, &local));
        int32_t *values = malloc((size_t)(local.shape.dim[0] * local.shape.dim[1]) * sizeof *values + 1);
        size_t n = 0;
        for (size_t a = 0; a < local.nsegments[0]; a++) {
            for (int64_t i = local.segments[0][a].start; i < local.segments[0][a].stop; i++) {
                for (size_t b = 0; b < local.nsegments[1]; b++) {
                    for (int64_t k = local.segments[1][b].start; k < local.segments[1][b].stop; k++)
                        values[n++] = (int32_t)(i * COLUMNS + k);
                }
            }
        }
        stock_add(s, rank, name, TB_I32, &local.shape, values);
        tb_local_fini(&local);
    }
    tb_layout_destroy(layout);
}

/* Long runs are read to their places at once, short ones through the stage, and gaps are skipped or not. */
static void bands_and_runs(void **state) {
    folder *f = *state;
    static const char *const layouts[] = {"mesh=4 place=S0", "mesh=4 place=S1", "mesh=4 place=StridedShard(0,7)",
                                          "mesh=4 place=StridedShard(1,50)", "mesh=2,2 place=S1,S0"};
    enum { N = sizeof layouts / sizeof *layouts };
    stock s = {0}, expected = {0};
    json_t *tensors = json_object();
    const tb_shape whole = {2, {ROWS, COLUMNS}};
    char name[32];
    for (int i = 0; i < N; i++) {
        for (int k = 0; k < N; k++) {
            snprintf(name, sizeof name, "%d_to_%d", i, k);
            stock_matrix(&s, layouts[i], name);
            add_entry(tensors, name, &whole, TB_I32, json_string(layouts[i]), json_string(layouts[k]));
        }
    }
    stock_write(&s, path_in(f, "in"), 4);
    reshard_entries(tensors, path_in(f, "in"), path_in(f, "out"),
                    &(tb__disk_opts){.verify = true, .memory = TB__DISK_MIN_MEMORY, .threads = 3});
    target_files out = {.dir = path_in(f, "out")};
    for (int k = 0; k < N; k++) {
        stock_matrix(&expected, layouts[k], "x");
        for (int32_t rank = 0; rank < 4; rank++) {
            struct stocked *part = &expected.tensors.item[4 * k + rank];
            for (int i = 0; i < N; i++) {
                snprintf(name, sizeof name, "%d_to_%d", i, k);
                unsigned char *got = target_files_get(&out, rank, name, TB_I32, &part->about.shape);
                assert_memory_equal(got, part->bytes, (size_t)part->about.nbytes);
                free(got);
            }
        }
    }
    target_files_fini(&out);
    stock_write(&expected, path_in(f, "unused"), 0);
}

/* What is wrong */

/* Two ranks with w, 4 x 2 of i32 by rows, and n, of which each has all. */
static const char *small_source(folder *f, const char *name) {
    stock s = {0};
    for (int32_t rank = 0; rank < 2; rank++) {
        int32_t *w = malloc(4 * sizeof *w), *n = malloc(sizeof *n);
        for (int i = 0; i < 4; i++)
            w[i] = rank * 4 + i;
        *n = 7;
        stock_add(&s, rank, "w", TB_I32, &(tb_shape){2, {2, 2}}, w);
        stock_add(&s, rank, "n", TB_I32, &(tb_shape){1, {1}}, n);
    }
    stock_write(&s, path_in(f, name), 2);
    return path_in(f, name);
}

#define SMALL "\"src_mesh\": [2], \"dst_mesh\": [1], "
static const char small_spec[] = "{" SMALL "\"rules\": [{\"match\": \"w\", \"src\": \"S0\"}, {\"match\": \"n\"}]}";

static void bad_sources(void **state) {
    folder *f = *state;
    const char *in = small_source(f, "in");
    check_refused(f, "{\"src_mesh\": [3], \"rules\": [{\"match\": \"*\"}]}", in, TB_INVALID,
                  "/in/rank_2.safetensors: can't be opened: No such file");
    check_refused(f, "{\"rules\": [{\"match\": \"*\"}]}", in, TB_INVALID,
                  "/in/rank_1.safetensors: rank 1 is in no source mesh");
    check_refused(f, "{" SMALL "\"rules\": [{\"match\": \"w\"}]}", in, TB_INVALID, "tensor 'n': the spec has no entry");
    check_refused(f, "{" SMALL "\"tensors\": {\"x\": {\"shape\": [4]}}, \"rules\": [{\"match\": \"*\"}]}", in,
                  TB_INVALID, "/in/rank_0.safetensors: tensor 'x' is not in it");
    check_refused(f,
                  "{" SMALL "\"rules\": [{\"match\": \"w\", \"shape\": [6, 2], \"src\": \"S0\"}, {\"match\": \"n\"}]}",
                  in, TB_INVALID, "/in/rank_0.safetensors: tensor 'w' is 2,2, but its layout gives rank 0 3,2 of 6,2");
    check_refused(f,
                  "{" SMALL "\"rules\": [{\"match\": \"w\", \"dtype\": \"f32\", \"src\": \"S0\"}, {\"match\": \"n\"}]}",
                  in, TB_INVALID, "/in/rank_0.safetensors: tensor 'w' is i32, but the spec says f32");
    check_refused(f, "{" SMALL "\"rules\": [{\"match\": \"w\", \"src\": \"S2\"}, {\"match\": \"n\"}]}", in, TB_INVALID,
                  "tensor 'w': src: mesh dim 0 shards dim 2 of a tensor that has 2 dims");
    check_refused(f,
                  "{" SMALL "\"rules\": [{\"match\": \"w\", \"src\": \"Explicit(0, 0-2; 2-4)\"}, {\"match\": \"n\"}]}",
                  in, TB_INVALID, "tensor 'w': a source that is Explicit needs 'shape'");
    check_refused(
        f,
        "{" SMALL
        "\"rules\": [{\"match\": \"w\", \"src\": \"S0\", \"dst\": {\"dtype\": \"f32\"}}, {\"match\": \"n\"}]}",
        in, TB_REFUSED, "tensor 'w': there is no cast from i32 to f32");
    check_refused(f,
                  "{" SMALL "\"rules\": [{\"match\": \"w\", \"src\": \"S0\"}, "
                  "{\"match\": \"n\", \"src\": {\"mesh\": [1]}}]}",
                  in, TB_INVALID, "/in/rank_1.safetensors: tensor 'n' is in it, but the rank is not");
    check_refused(f, small_spec, path_in(f, "none"), TB_INVALID, "/none: can't be opened");
    write_file(path_in(f, "in/rank_1.safetensors"),
               "{\"w\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[0,16]}}", 15);
    check_refused(f, small_spec, in, TB_INVALID, "/in/rank_1.safetensors: tensor 'w' has bytes 0 to 16");
    write_file(path_in(f, "in/rank_1.safetensors"),
               "{\"w\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[0,16]}}", 16);
    check_refused(f, small_spec, in, TB_INVALID, "/in/rank_1.safetensors: tensor 'n' is not in it");
    write_file(path_in(f, "in/rank_1.safetensors"),
               "{\"n\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
               "\"w\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[4,20]}}",
               20);
    check_refused(f, small_spec, in, TB_INVALID, "tensor 'n' is f32, but another rank has it as i32");
    write_file(path_in(f, "in/rank_1.safetensors"),
               "{\"n\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[0,4]},"
               "\"w\":{\"dtype\":\"I32\",\"shape\":[2,3],\"data_offsets\":[4,28]}}",
               28);
    check_refused(f, small_spec, in, TB_INVALID, "/in/rank_1.safetensors: tensor 'w' is 2,3, but its layout gives");
    assert_int_equal(mkdir(path_in(f, "model"), 0777), 0);
    write_file(path_in(f, "model/model.safetensors"),
               "{\"w\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4);
    check_refused(f, small_spec, path_in(f, "model"), TB_INVALID,
                  "tensor 'w': its source mesh has 2 ranks, but the source is a model");
}

static void bad_targets(void **state) {
    folder *f = *state;
    const char *in = small_source(f, "in"), *out = path_in(f, "out");
    const tb__disk_opts plain = {0}, model = {.files = TB__SPEC_HF};
    assert_fails(reshard_text(small_spec, in, in, &plain), TB_REFUSED,
                 "/in: it holds rank_0.safetensors, rank_1.safetensors; old and new files would be mixed");
    assert_fails(reshard_text(small_spec, in, in, &model), TB_REFUSED,
                 "/in: it holds rank_0.safetensors, rank_1.safetensors; old and new files would be mixed");
    assert_fails(reshard_text(small_spec, in, path_in(f, "a/b"), &plain), TB_IO, "/a/b: can't be created");
    assert_fails(reshard_text(small_spec, in, path_in(f, "in/rank_0.safetensors"), &plain), TB_INVALID,
                 "it is not a directory");
    assert_fails(reshard_text(small_spec, in, out, &(tb__disk_opts){.memory = 1000}), TB_INVALID, "are too few");
    assert_fails(reshard_text("{\"src_mesh\": [2], \"dst_mesh\": [2], \"rules\": [{\"match\": \"w\", \"src\": \"S0\"}, "
                              "{\"match\": \"n\"}]}",
                              in, out, &model),
                 TB_INVALID, "one target rank, but the spec has 2");
    assert_int_equal(access(out, F_OK), -1);
    assert_int_equal(count_entries(in), 2);
    /* what was in the directory stays there */
    assert_int_equal(mkdir(out, 0777), 0);
    write_bytes(path_in(f, "out/config.json"), "{}", 2);
    assert_ok(reshard_text(small_spec, in, out, &plain));
    assert_int_equal(count_entries(out), 2);
    assert_fails(reshard_text(small_spec, in, out, &plain), TB_REFUSED, "it holds rank_0.safetensors; old and new");
}

typedef struct rival {
    const char *in, *out;
    int nruns;
} rival;

static tb_status run_rivals(void *arg, const tb__disk_state *at) {
    rival *r = arg;
    (void)at;
    for (int is_model = 0; is_model < 2; is_model++, r->nruns++)
        assert_fails(
            reshard_text(small_spec, r->in, r->out, &(tb__disk_opts){.files = is_model ? TB__SPEC_HF : TB__SPEC_RANKS}),
            TB_REFUSED, "/out: another run writes into this directory");
    return TB_OK;
}

/* From its beginning until the last file has its name, a run has its directory for itself. */
static void one_run_at_a_time(void **state) {
    folder *f = *state;
    rival r = {.in = small_source(f, "in"), .out = path_in(f, "out")};
    for (int is_model = 0; is_model < 2; is_model++) {
        const tb__disk_opts opts = {
            .files = is_model ? TB__SPEC_HF : TB__SPEC_RANKS, .verify = true, .progress = run_rivals, .arg = &r};
        r.nruns = 0;
        assert_ok(reshard_text(small_spec, r.in, r.out, &opts));
        assert_true(r.nruns >= 4); /* in each of the two passes */
        assert_int_equal(count_entries(r.out), 1);
        remove_tree(r.out);
    }
}

/* A rank's part that is empty may be missing, where the spec has the shape. */
static void empty_parts(void **state) {
    folder *f = *state;
    stock s = {0};
    int32_t *value = malloc(sizeof *value);
    *value = 5;
    stock_add(&s, 0, "w", TB_I32, &(tb_shape){1, {1}}, value);
    stock_write(&s, path_in(f, "in"), 2);
    static const char spec[] = "{\"src_mesh\": [2], \"dst_mesh\": [3], \"rules\": [{\"match\": \"w\", \"src\": \"S0\", "
                               "%s\"dst\": \"S0\"}]}";
    char text[256];
    snprintf(text, sizeof text, spec, "\"shape\": [1], ");
    assert_ok(reshard_text(text, path_in(f, "in"), path_in(f, "out"), &(tb__disk_opts){.verify = true}));
    target_files out = {.dir = path_in(f, "out")};
    for (int32_t rank = 0; rank < 3; rank++)
        free(target_files_get(&out, rank, "w", TB_I32, &(tb_shape){1, {rank == 0}}));
    target_files_fini(&out);
    snprintf(text, sizeof text, spec, "");
    check_refused(f, text, path_in(f, "in"), TB_INVALID, "/in/rank_1.safetensors: tensor 'w' is not in it");
}

/* Both ranks have index 1, but not the same there, and are trusted: what is written is not what every layout says. */
static void verify_finds(void **state) {
    folder *f = *state;
    stock s = {0};
    for (int32_t rank = 0; rank < 2; rank++) {
        int32_t *values = malloc(2 * sizeof *values);
        values[0] = values[1] = rank;
        stock_add(&s, rank, "w", TB_I32, &(tb_shape){1, {2}}, values);
    }
    stock_write(&s, path_in(f, "in"), 2);
    const tb__disk_opts opts = {.verify = true, .trust_replicas = true};
    assert_fails(
        reshard_text("{\"src_mesh\": [2], \"tensors\": {\"w\": {\"shape\": [3], \"src\": \"Explicit(0, 0-2; 1-3)\"}}}",
                     path_in(f, "in"), path_in(f, "out"), &opts),
        TB_INTERNAL, "tensor 'w' of rank 0 is not what the source has, at byte 4");
    assert_int_equal(access(path_in(f, "out"), F_OK), -1);
}

static tb_status give_up(void *arg, const tb__disk_state *state) {
    bool wanted = *(const bool *)arg;
    return state->is_verifying == wanted ? tb__fail(TB_CANCELLED, "enough") : TB_OK;
}

static void cancelled(void **state) {
    folder *f = *state;
    const char *in = small_source(f, "in"), *out = path_in(f, "out");
    for (int is_verifying = 0; is_verifying < 2; is_verifying++) {
        for (int is_model = 0; is_model < 2; is_model++) {
            bool when = is_verifying;
            const tb__disk_opts opts = {
                .verify = true, .files = is_model ? TB__SPEC_HF : TB__SPEC_RANKS, .progress = give_up, .arg = &when};
            assert_fails(reshard_text(small_spec, in, out, &opts), TB_CANCELLED, "enough");
            assert_int_equal(access(out, F_OK), -1);
        }
    }
    assert_int_equal(count_entries(f->path), 1);
}

/* Every allocation of the calling thread fails once. */
static void no_memory(void **state) {
    folder *f = *state;
    const char *in = small_source(f, "in"), *out = path_in(f, "out");
    for (int is_model = 0; is_model < 2; is_model++) {
        const tb__disk_opts opts = {.files = is_model ? TB__SPEC_HF : TB__SPEC_RANKS, .threads = 1};
        long n = 0;
        for (;; n++) {
            tb__mem_fail_after(n);
            tb_status status = reshard_text(small_spec, in, out, &opts);
            tb__mem_fail_after(-1);
            if (status == TB_OK)
                break;
            assert_int_equal(status, TB_NO_MEMORY);
            assert_int_equal(access(out, F_OK), -1);
        }
        assert_true(n > 20);
        remove_tree(out);
    }
}

/* Rules without shapes: they come from the files. */
static void deduced_shapes(void **state) {
    folder *f = *state;
    stock s = {0};
    stock_matrix(&s, "mesh=2,2 place=S1,S0", "a");
    stock_matrix(&s, "mesh=2,2 place=R,BlockShard(1,1000,4000)", "b");
    stock_matrix(&s, "mesh=2,2 place=S0,StridedShard(0,3)", "c");
    stock_write(&s, path_in(f, "in"), 4);
    static const char text[] = "{\"src_mesh\": {\"mesh\": [2, 2], \"names\": [\"dp\", \"tp\"]}, \"rules\": ["
                               "{\"match\": \"a\", \"src\": {\"tp\": \"S0\", \"dp\": [\"S\", -1]}},"
                               "{\"match\": \"b\", \"src\": {\"tp\": \"BlockShard(1,1000,4000)\"}},"
                               "{\"match\": \"[c-z]\", \"src\": {\"placements\": [[\"S\", 0], [\"SS\", 0, 3]]}}]}";
    assert_ok(reshard_text(text, path_in(f, "in"), path_in(f, "out"), &(tb__disk_opts){0}));
    target_files out = {.dir = path_in(f, "out")};
    for (const char *name = "a\0b\0c\0"; *name; name += 2) {
        int32_t *got = (int32_t *)target_files_get(&out, 0, name, TB_I32, &(tb_shape){2, {ROWS, COLUMNS}});
        for (int32_t i = 0; i < ROWS * COLUMNS; i++)
            assert_int_equal(got[i], i);
        free(got);
    }
    target_files_fini(&out);
}

#define with_folder(test) cmocka_unit_test_setup_teardown(test, folder_set_up, folder_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        with_folder(random_layouts), with_folder(bands_and_runs),    with_folder(bad_sources),
        with_folder(bad_targets),    with_folder(one_run_at_a_time), with_folder(empty_parts),
        with_folder(verify_finds),   with_folder(cancelled),         with_folder(no_memory),
        with_folder(deduced_shapes),
    };
    return cmocka_run_group_tests_name("reshard disk", tests, NULL, NULL);
}
