/* Resharding on disk to and from quantised tensors: there and back, element by element, against the reference; and
 * scale groups. */
#include "reshard/disk_test.h"

#include "../tests/support/quantised.h"

#include <math.h>

static const tb__quant_format formats[] = {
    {.kind = TB__QUANT_MXFP8},      {.kind = TB__QUANT_MXFP8, .is_floor = true, .is_swizzled = true},
    {.kind = TB__QUANT_FP8_BLOCK},  {.kind = TB__QUANT_FP8_BLOCK, .is_power_of_two = true},
    {.kind = TB__QUANT_FP8_TENSOR}, {.kind = TB__QUANT_FP8_TENSOR, .is_power_of_two = true},
    {.kind = TB__QUANT_NVFP4},      {.kind = TB__QUANT_NVFP4, .is_swizzled = true},
};
enum { NFORMATS = sizeof formats / sizeof *formats };

/* As a spec has it. */
static json_t *quant_json(const tb__quant_format *f, bool is_target, const char *group) {
    json_t *json = json_pack("{s:s}", "format", tb__quant_name(f->kind));
    if (f->is_swizzled)
        json_object_set_new(json, "scales", json_string("swizzled"));
    if (is_target && (f->is_floor || f->is_power_of_two))
        json_object_set_new(json, "exponent", json_string(f->is_floor ? "floor" : "power_of_two"));
    if (group)
        json_object_set_new(json, "group", json_string(group));
    return json;
}

static float whole_scale(const tb__quant_format *f, float amax) {
    if (f->kind == TB__QUANT_NVFP4)
        return amax == 0 ? 1 : amax / 2688.0F;
    if (!f->is_power_of_two || amax == 0)
        return amax == 0 ? 1 : amax / 448.0F;
    int e = -126;
    while (ldexp(448, e) < (double)amax)
        e++;
    return (float)ldexp(1, e);
}

/* Cutting by hand: rank r of n has one run of a dim. */

typedef struct part {
    tb_shape whole, shape;
    int dim;
    int64_t start;
} part;

static part part_of(const tb_shape *whole, int dim, int n, int rank) {
    part p = {*whole, *whole, dim, 0};
    int64_t all = whole->dim[dim], each = (all + n - 1) / n;
    p.start = rank * each < all ? rank * each : all;
    p.shape.dim[dim] = p.start + each < all ? each : all - p.start;
    return p;
}

static int64_t size_of(const tb_shape *shape) {
    int64_t n = 1;
    for (int d = 0; d < shape->ndim; d++)
        n *= shape->dim[d];
    return n;
}

/* The place of element i of the part in the whole. */
static int64_t place_of(const part *p, int64_t i) {
    int64_t place = 0, step = 1;
    for (int d = p->shape.ndim - 1; d >= 0; d--) {
        place += (i % p->shape.dim[d] + (d == p->dim ? p->start : 0)) * step;
        i /= p->shape.dim[d];
        step *= p->whole.dim[d];
    }
    return place;
}

/* A part that is quantised, and what files have of it. */
typedef struct pack {
    part p;
    tb__quant_format format;
    int64_t rows, columns, nmatrices;
    tb__quant_size size; /* of a matrix */
    unsigned char *data, *scales;
    float scale;
} pack;

static pack pack_init(const part *p, tb__quant_format format) {
    pack k = {.p = *p, .format = format, .nmatrices = 1};
    int last = p->shape.ndim - 1;
    k.columns = p->shape.dim[last];
    k.rows = last > 0 ? p->shape.dim[last - 1] : 1;
    for (int d = 0; d < last - 1; d++)
        k.nmatrices *= p->shape.dim[d];
    assert_ok(tb__quant_measure(&format, k.rows, k.columns, &k.size));
    k.data = malloc((size_t)(k.nmatrices * k.size.data_nbytes) + 1);
    k.scales = malloc((size_t)(k.nmatrices * k.size.scale_nbytes) + 1);
    return k;
}

static void pack_fini(pack *k) {
    free(k->data);
    free(k->scales);
}

static tb__quant_tensor pack_matrix(const pack *k, int64_t m) {
    return (tb__quant_tensor){
        k->format, k->rows, k->columns, k->data + m * k->size.data_nbytes, k->scales + m * k->size.scale_nbytes,
        k->scale};
}

/* values[place], of `dtype`; amax: 0 for that of the part. */
static pack pack_make(const part *p, tb__quant_format format, const uint64_t *values, tb_dtype dtype, float amax) {
    pack k = pack_init(p, format);
    int64_t n = size_of(&p->shape), matrix = k.rows * k.columns;
    size_t size = number_size(dtype);
    char *numbers = malloc((size_t)n * size + 1);
    float own = 0;
    for (int64_t i = 0; i < n; i++) {
        uint64_t bits = values[place_of(p, i)];
        number_store(dtype, numbers + (size_t)i * size, bits);
        own = fmaxf(own, fabsf((float)number_value(dtype, bits)));
    }
    k.scale = whole_scale(&format, amax > 0 ? amax : own);
    for (int64_t m = 0; m < k.nmatrices; m++) {
        const tb__quant_tensor to = pack_matrix(&k, m);
        const tb__quant_rows from = {numbers + (size_t)(m * matrix) * size, dtype, k.columns};
        quantised_make(&to, &from);
    }
    free(numbers);
    return k;
}

static bool has_scales(const pack *k) {
    return k->format.kind != TB__QUANT_FP8_TENSOR;
}

static bool has_scale(const pack *k) {
    return k->format.kind == TB__QUANT_FP8_TENSOR || k->format.kind == TB__QUANT_NVFP4;
}

static const char *ending(const pack *k, bool is_whole) {
    if (is_whole)
        return k->format.kind == TB__QUANT_NVFP4 ? "_scale_2" : "_scale";
    return k->format.kind == TB__QUANT_FP8_BLOCK ? "_scale_inv" : "_scale";
}

static tb_shape data_shape(const pack *k) {
    tb_shape shape = k->p.shape;
    if (k->format.kind == TB__QUANT_NVFP4)
        shape.dim[shape.ndim - 1] /= 2;
    return shape;
}

static tb_dtype data_dtype(const pack *k) {
    return k->format.kind == TB__QUANT_NVFP4 ? TB_U8 : TB_F8E4M3;
}

static tb_shape scales_shape(const pack *k) {
    tb_shape shape = k->p.shape;
    int last = shape.ndim - 1;
    int64_t columns = k->size.scale_columns, rows = k->size.scale_rows;
    if (k->format.is_swizzled) {
        columns = (columns + 3) / 4 * 4;
        rows = (rows + 127) / 128 * 128;
    }
    shape.dim[last] = columns;
    if (last > 0)
        shape.dim[last - 1] = rows;
    else
        shape.dim[last] = columns * rows;
    return shape;
}

static tb_dtype scales_dtype(const pack *k) {
    return k->format.kind == TB__QUANT_MXFP8 ? TB_E8M0 : k->format.kind == TB__QUANT_NVFP4 ? TB_F8E4M3 : TB_F32;
}

static void check_bytes(const unsigned char *got, const void *expected, int64_t nbytes, const char *name, int rank) {
    for (int64_t i = 0; i < nbytes; i++) {
        if (got[i] != ((const unsigned char *)expected)[i])
            fail_msg("'%s' of rank %d: byte %lld is 0x%02x, not 0x%02x", name, rank, (long long)i, got[i],
                     ((const unsigned char *)expected)[i]);
    }
}

/* The files have just this. */
static void check_pack(target_files *out, const pack *k, const char *name, int rank) {
    char other[64];
    tb_shape shape = data_shape(k);
    unsigned char *got = target_files_get(out, rank, name, data_dtype(k), &shape);
    check_bytes(got, k->data, k->nmatrices * k->size.data_nbytes, name, rank);
    free(got);
    if (has_scales(k)) {
        shape = scales_shape(k);
        snprintf(other, sizeof other, "%s%s", name, ending(k, false));
        got = target_files_get(out, rank, other, scales_dtype(k), &shape);
        check_bytes(got, k->scales, k->nmatrices * k->size.scale_nbytes, other, rank);
        free(got);
    }
    if (has_scale(k)) {
        snprintf(other, sizeof other, "%s%s", name, ending(k, true));
        got = target_files_get(out, rank, other, TB_F32, &(tb_shape){0});
        check_bytes(got, &k->scale, 4, other, rank);
        free(got);
    }
}

/* The numbers it stands for, into values[place]. */
static void unpack(const pack *k, tb_dtype dtype, uint64_t *values) {
    int64_t matrix = k->rows * k->columns;
    for (int64_t i = 0; i < size_of(&k->p.shape); i++) {
        const tb__quant_tensor from = pack_matrix(k, i / matrix);
        values[place_of(&k->p, i)] = quantised_value(&from, i % matrix / k->columns, i % k->columns, dtype);
    }
}

/* There and back */

/* Of four shards of any dim all are even, and blocks of no format end with them. */
static const tb_shape shapes[] = {{2, {260, 120}}, {3, {3, 140, 72}}, {2, {1000, 8}}, {1, {4040}}};
static const tb_dtype dtypes[] = {TB_F32, TB_F16, TB_BF16};
enum { NSHAPES = sizeof shapes / sizeof *shapes, MOST = 64 };

typedef struct trip {
    char name[32];
    tb_shape shape;
    tb__quant_format format, next; /* what it is on the way, and afterwards */
    int first_dim, second_dim;     /* that is cut */
    tb_dtype dtype, plain;         /* as which it is read, and written where it is not quantised again */
    uint64_t *values;
} trip;

static float number_at(int64_t i) {
    return (float)((i * 7919) % 2003 - 1001) / (float)(1 + i % 37);
}

static json_t *cut_side(int n, int dim, json_t *quant, tb_dtype dtype) {
    json_t *json = json_pack("{s:[i],s:[[s,i]]}", "mesh", n, "placements", "S", dim);
    if (quant)
        json_object_set_new(json, "quantisation", quant);
    if (dtype != TB_DTYPE_NONE)
        json_object_set_new(json, "dtype", json_string(tb_dtype_name(dtype)));
    return json;
}

/* All pairs of formats and dims, a third of them for each band size. */
static int make_trips(trip *trips, int third) {
    int n = 0, kept = 0;
    for (int s = 0; s < NSHAPES; s++) {
        for (int f = 0; f < NFORMATS; f++) {
            for (int dims = 0; dims < shapes[s].ndim * shapes[s].ndim; dims++, n++) {
                if ((n + n / 3) % 3 != third)
                    continue;
                trip t = {.shape = shapes[s], .format = formats[f], .next = formats[(f + n) % NFORMATS]};
                t.first_dim = dims / t.shape.ndim;
                t.second_dim = dims % t.shape.ndim;
                t.dtype = dtypes[n % 3];
                t.plain = dtypes[n / 3 % 3];
                bool needs_two = t.format.kind == TB__QUANT_FP8_BLOCK || t.next.kind == TB__QUANT_FP8_BLOCK;
                if (needs_two && t.shape.ndim < 2)
                    t.format = t.next = formats[0];
                snprintf(t.name, sizeof t.name, "trip_%d", n);
                t.values = malloc((size_t)size_of(&t.shape) * sizeof *t.values);
                assert_true(kept < MOST);
                trips[kept++] = t;
            }
        }
    }
    return kept;
}

static tb_status check_progress(void *arg, const tb__disk_state *state) {
    (void)arg;
    assert_true(state->bytes_done >= 0 && state->bytes_done <= state->bytes_total);
    return TB_OK;
}

/* From one plain rank to four that are quantised, which is compared with the reference; t->values become what the
 * reference reads there. */
static void first_leg(folder *f, trip *trips, int n, const tb__disk_opts *opts) {
    stock s = {0};
    json_t *tensors = json_object();
    for (int i = 0; i < n; i++) {
        trip *t = &trips[i];
        float *numbers = malloc((size_t)size_of(&t->shape) * sizeof *numbers);
        for (int64_t k = 0; k < size_of(&t->shape); k++) {
            uint32_t bits;
            numbers[k] = number_at(k + 100 * i);
            memcpy(&bits, &numbers[k], sizeof bits);
            t->values[k] = bits;
        }
        stock_add(&s, 0, t->name, TB_F32, &t->shape, numbers);
        add_entry(tensors, t->name, &t->shape, TB_F32, json_string("R"),
                  cut_side(4, t->first_dim, quant_json(&t->format, true, NULL), TB_DTYPE_NONE));
    }
    stock_write(&s, path_in(f, "plain"), 1);
    reshard_entries(tensors, path_in(f, "plain"), path_in(f, "four"), opts);
    target_files out = {.dir = path_in(f, "four")};
    for (int i = 0; i < n; i++) {
        trip *t = &trips[i];
        uint64_t *read = malloc((size_t)size_of(&t->shape) * sizeof *read);
        for (int rank = 0; rank < 4; rank++) {
            part p = part_of(&t->shape, t->first_dim, 4, rank);
            pack k = pack_make(&p, t->format, t->values, TB_F32, 0);
            check_pack(&out, &k, t->name, rank);
            unpack(&k, t->dtype, read);
            pack_fini(&k);
        }
        free(t->values);
        t->values = read;
    }
    target_files_fini(&out);
}

static void check_plain(target_files *out, const trip *t, const part *p, int rank) {
    unsigned char *got = target_files_get(out, rank, t->name, t->plain, &p->shape);
    size_t size = number_size(t->plain);
    for (int64_t i = 0; i < size_of(&p->shape); i++) {
        uint64_t expected = number_cast(t->dtype, t->plain, t->values[place_of(p, i)]);
        uint64_t bits = number_load(t->plain, got + (size_t)i * size);
        if (bits != expected)
            fail_msg("'%s', %s by dim %d to dim %d: element %lld of rank %d is 0x%llx, not 0x%llx", t->name,
                     tb__quant_name(t->format.kind), t->first_dim, t->second_dim, (long long)i, rank,
                     (unsigned long long)bits, (unsigned long long)expected);
    }
    free(got);
}

/* From there to two ranks, plain or quantised again. */
static void second_leg(folder *f, const trip *trips, int n, bool is_plain, const char *to, const tb__disk_opts *opts) {
    json_t *tensors = json_object();
    for (int i = 0; i < n; i++) {
        const trip *t = &trips[i];
        json_t *quant = is_plain ? NULL : quant_json(&t->next, true, NULL);
        add_entry(tensors, t->name, &t->shape, t->dtype,
                  cut_side(4, t->first_dim, quant_json(&t->format, false, NULL), TB_DTYPE_NONE),
                  cut_side(2, t->second_dim, quant, is_plain ? t->plain : TB_DTYPE_NONE));
        if (i % 2)
            json_object_del(json_object_get(tensors, t->name), "shape");
    }
    reshard_entries(tensors, path_in(f, "four"), path_in(f, to), opts);
    target_files out = {.dir = path_in(f, to)};
    for (int i = 0; i < n; i++) {
        const trip *t = &trips[i];
        for (int rank = 0; rank < 2; rank++) {
            part p = part_of(&t->shape, t->second_dim, 2, rank);
            if (is_plain) {
                check_plain(&out, t, &p, rank);
                continue;
            }
            pack k = pack_make(&p, t->next, t->values, t->dtype, 0);
            check_pack(&out, &k, t->name, rank);
            pack_fini(&k);
        }
    }
    target_files_fini(&out);
    remove_tree(path_in(f, to));
}

static void there_and_back(void **state) {
    folder *f = *state;
    static trip trips[MOST];
    static const int64_t bands[] = {0, 64, 4096};
    tb__disk_opts opts = {.verify = true, .progress = check_progress};
    for (int b = 0; b < 3; b++) {
        int n = make_trips(trips, b);
        opts.band_bytes = bands[b];
        first_leg(f, trips, n, &opts);
        second_leg(f, trips, n, true, "out", &opts);
        second_leg(f, trips, n, false, "out", &opts);
        remove_tree(path_in(f, "plain"));
        remove_tree(path_in(f, "four"));
        for (int i = 0; i < n; i++)
            free(trips[i].values);
    }
}

/* Parts are more than a band, rows more than a stage takes, and gaps between rows are not read along. */
static void large_parts(void **state) {
    folder *f = *state;
    static trip trips[NFORMATS];
    int n = 0;
    for (int i = 0; i < NFORMATS; i++) {
        trip t = {.format = formats[i], .next = formats[(i + 3) % NFORMATS], .dtype = TB_BF16, .plain = TB_BF16};
        t.shape = i % 2 ? (tb_shape){2, {40, 24000}} : (tb_shape){2, {600, 1600}};
        t.first_dim = i / 2 % 2;
        t.second_dim = 1 - t.first_dim;
        snprintf(t.name, sizeof t.name, "large_%d", i);
        t.values = malloc((size_t)size_of(&t.shape) * sizeof *t.values);
        trips[n++] = t;
    }
    const tb__disk_opts opts = {.verify = true, .memory = 128 << 20, .threads = 3, .band_bytes = 64 << 10};
    first_leg(f, trips, n, &opts);
    second_leg(f, trips, n, true, "out", &opts);
    second_leg(f, trips, n, false, "out", &opts);
    for (int i = 0; i < n; i++)
        free(trips[i].values);
}

/* Scale groups */

enum { GROUPED = 6, ROWS = 64, COLUMNS = 48 };
static const tb_shape grouped_shape = {2, {ROWS, COLUMNS}};

/* Tensor k in rank 0's file: the largest number of each is where no other has its own. */
static void stock_grouped(stock *s, const char *const *names, uint64_t values[GROUPED][ROWS * COLUMNS]) {
    for (int k = 0; k < GROUPED; k++) {
        float *numbers = malloc(ROWS * COLUMNS * sizeof *numbers);
        for (int i = 0; i < ROWS * COLUMNS; i++) {
            uint32_t bits;
            numbers[i] = number_at(i + k) * 0.01F;
            if (i == (k * 37 + 20) % ROWS * COLUMNS + k)
                numbers[i] = -20.0F - (float)k;
            memcpy(&bits, &numbers[i], sizeof bits);
            values[k][i] = bits;
        }
        stock_add(s, 0, names[k], TB_F32, &grouped_shape, numbers);
    }
}

static void check_grouped(target_files *out, tb__quant_format format, const char *name, const uint64_t *values,
                          float amax) {
    for (int rank = 0; rank < 4; rank++) {
        part p = part_of(&grouped_shape, 0, 2, rank % 2);
        pack k = pack_make(&p, format, values, TB_F32, amax);
        check_pack(out, &k, name, rank);
        pack_fini(&k);
    }
}

/* Four ranks, of which 0 and 2, 1 and 3 have the same: a group's amax is that of all shards of all its tensors. */
static void groups(void **state) {
    folder *f = *state;
    static const char *const names[GROUPED] = {"a.5.w1", "a.5.w3", "a.6.w1", "a.6.w3", "one", "parts"};
    static const char spec[] =
        "{\"dst_mesh\": {\"mesh\": [2, 2], \"names\": [\"dp\", \"tp\"]}, "
        "\"tensors\": {\"a.6.w3\": {\"dst\": {\"tp\": \"S0\", \"quantisation\": {\"format\": \"%s\", \"group\": "
        "\"a.6.w\"}}}},"
        "\"rules\": ["
        "{\"match\": \"a.*.w*\", \"dst\": {\"tp\": \"S0\", \"quantisation\": {\"format\": \"%s\", \"group\": "
        "\"a.*.w\"}}},"
        "{\"match\": \"o*\", \"dst\": {\"tp\": \"S0\", \"quantisation\": {\"format\": \"%s\", \"group\": \"tensor\"}}},"
        "{\"match\": \"*\", \"dst\": {\"tp\": \"S0\", \"quantisation\": \"%s\"}}]}";
    static uint64_t values[GROUPED][ROWS * COLUMNS];
    stock s = {0};
    stock_grouped(&s, names, values);
    stock_write(&s, path_in(f, "in"), 1);
    for (int i = 4; i < NFORMATS; i += 2) {
        char text[1024];
        const char *name = tb__quant_name(formats[i].kind);
        snprintf(text, sizeof text, spec, name, name, name, name);
        assert_ok(reshard_text(text, path_in(f, "in"), path_in(f, "out"), &(tb__disk_opts){.verify = true}));
        target_files out = {.dir = path_in(f, "out")};
        check_grouped(&out, formats[i], "a.5.w1", values[0], 21);
        check_grouped(&out, formats[i], "a.5.w3", values[1], 21);
        check_grouped(&out, formats[i], "a.6.w1", values[2], 23);
        check_grouped(&out, formats[i], "a.6.w3", values[3], 23);
        check_grouped(&out, formats[i], "one", values[4], 24);
        check_grouped(&out, formats[i], "parts", values[5], 0);
        target_files_fini(&out);
        remove_tree(path_in(f, "out"));
    }
    check_refused(f,
                  "{\"rules\": ["
                  "{\"match\": \"a*\", \"dst\": {\"quantisation\": {\"format\": \"nvfp4\", \"group\": \"g\"}}},"
                  "{\"match\": \"*\", \"dst\": {\"quantisation\": {\"format\": \"fp8_tensor\", \"group\": \"g\"}}}]}",
                  path_in(f, "in"), TB_REFUSED,
                  "tensor 'one': it is fp8_tensor, but 'a.5.w1' of the same group 'g' is nvfp4");
}

/* Zeros have the scale 1, and so have parts without elements. */
static void zeros_and_nothing(void **state) {
    folder *f = *state;
    stock s = {0};
    stock_add(&s, 0, "w", TB_BF16, &(tb_shape){2, {1, 32}}, calloc(32, 2));
    stock_write(&s, path_in(f, "in"), 1);
    for (int i = 0; i < NFORMATS; i++) {
        const part whole = part_of(&(tb_shape){2, {1, 32}}, 0, 1, 0);
        const uint64_t values[32] = {0};
        json_t *there = json_object(), *back = json_object();
        add_entry(there, "w", &whole.shape, TB_BF16, json_string("R"),
                  cut_side(2, 0, quant_json(&formats[i], true, NULL), TB_DTYPE_NONE));
        reshard_entries(there, path_in(f, "in"), path_in(f, "two"), &(tb__disk_opts){.verify = true});
        target_files out = {.dir = path_in(f, "two")};
        for (int rank = 0; rank < 2; rank++) {
            part p = part_of(&whole.shape, 0, 2, rank);
            pack k = pack_make(&p, formats[i], values, TB_BF16, 0);
            check_pack(&out, &k, "w", rank);
            pack_fini(&k);
        }
        target_files_fini(&out);
        add_entry(back, "w", &whole.shape, TB_BF16, cut_side(2, 0, quant_json(&formats[i], false, NULL), TB_DTYPE_NONE),
                  json_string("R"));
        reshard_entries(back, path_in(f, "two"), path_in(f, "one"), &(tb__disk_opts){.verify = true});
        out = (target_files){.dir = path_in(f, "one")};
        unsigned char *got = target_files_get(&out, 0, "w", TB_BF16, &whole.shape);
        check_bytes(got, (const char[64]){0}, 64, "w", 0);
        free(got);
        target_files_fini(&out);
        remove_tree(path_in(f, "one"));
        remove_tree(path_in(f, "two"));
    }
}

#define with_folder(test) cmocka_unit_test_setup_teardown(test, folder_set_up, folder_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        with_folder(there_and_back),
        with_folder(large_parts),
        with_folder(groups),
        with_folder(zeros_and_nothing),
    };
    return cmocka_run_group_tests_name("reshard disk quant", tests, NULL, NULL);
}
