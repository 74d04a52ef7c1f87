/* Two checkpoints compared. */
#include "reshard/disk_diff.h"

#include "base/dtype.h"
#include "device/host/move.h"
#include "ir/ir.h"
#include "layout/layout.h"
#include "reshard/disk_inside.h"

#include <math.h>
#include <string.h>

enum { BAND = 1 << 20 };

typedef struct differ {
    const tb__disk *disk;
    tb__disk_input *other;
    const tb__diff_opts *opts;
    tb__disk_gather gather;
    tb__disk_bands bands;
    tb__disk_pieces pieces;
    tb_routes *routes;
    tb__arena arena;
    unsigned char *a, *b; /* a band of each */
    double *x, *y;        /* as numbers */
    size_t room;          /* elements of x and y */
} differ;

/* Numbers of any dtype as doubles; false: it has none. */
static bool to_doubles(const void *from, tb_dtype dtype, int64_t n, double *to) {
    const void *const sources[] = {from};
    const int64_t stride[1][TB_MAX_DIMS] = {{1}};
    tb__move copy = {.ndim = 1,
                     .nsrc = 1,
                     .src = sources,
                     .src_stride = stride,
                     .src_dtype = dtype,
                     .dst = to,
                     .dst_dtype = TB_F64,
                     .avg_divisor = 1,
                     .len = {n},
                     .dst_stride = {1}};
    if (tb__wire_dtype(dtype, TB_F64, TB_DTYPE_NONE, &copy.wire_dtype) != TB_OK || tb__move_check(&copy) != TB_OK)
        return false;
    tb__move_run(&copy, tb__move_whole(&copy), false);
    return true;
}

/* The index in the whole tensor of element `at` of the rank's part. */
static tb_status find_index(const tb__disk_tensor *t, int32_t rank, int64_t at, int64_t *index) {
    tb_local local;
    TB_TRY(tb_layout_local(t->dst, &t->shape, rank, &local));
    for (int d = t->shape.ndim - 1; d >= 0; d--) {
        int64_t i = at % local.shape.dim[d];
        at /= local.shape.dim[d];
        for (size_t k = 0; k < local.nsegments[d]; k++) {
            tb_segment s = local.segments[d][k];
            index[d] = s.start + i;
            if (i < s.stop - s.start)
                break;
            i -= s.stop - s.start;
        }
    }
    tb_local_fini(&local);
    return TB_OK;
}

static tb_status take_difference(const tb__disk_tensor *t, int32_t rank, int64_t at, double difference, tb__diff *out) {
    if (out->largest >= difference)
        return TB_OK;
    out->largest = difference;
    out->rank = rank;
    return find_index(t, rank, at, out->index);
}

static tb_status compare_band(differ *f, const tb__disk_tensor *t, int32_t rank, int64_t first, int64_t n,
                              tb_dtype dtype, tb__diff *out) {
    double sum = 0;
    size_t nbytes = (size_t)tb__dtype_bytes(t->band_dtype, n);
    out->nelements += n;
    if (dtype == t->band_dtype && memcmp(f->a, f->b, nbytes) == 0)
        return TB_OK;
    bool is_number = to_doubles(f->a, t->band_dtype, n, f->x) && to_doubles(f->b, dtype, n, f->y);
    size_t size = (size_t)tb_dtype_bits(t->band_dtype) / 8;
    if (!is_number && (dtype != t->band_dtype || size == 0))
        return tb__fail(TB_REFUSED, "%s and %s can't be compared", tb_dtype_name(t->band_dtype), tb_dtype_name(dtype));
    for (int64_t i = 0; i < n; i++) {
        double x = is_number ? f->x[i] : 0, y = is_number ? f->y[i] : 0, difference = 0;
        if (!is_number)
            difference = memcmp(f->a + (size_t)i * size, f->b + (size_t)i * size, size) ? INFINITY : 0;
        else if (isnan(x) || isnan(y))
            difference = isnan(x) && isnan(y) ? 0 : INFINITY;
        else if (x != y)
            difference = fabs(x - y);
        else if (dtype == t->band_dtype && size == 8 && memcmp(f->a + 8 * i, f->b + 8 * i, 8) != 0 && x != 0)
            difference = 1; /* integers of 64 bits that are one double */
        if (difference == 0)
            continue;
        sum += difference;
        out->ndifferent += !(difference <= f->opts->absolute + f->opts->relative * fabs(y));
        TB_TRY(take_difference(t, rank, first + i, difference, out));
    }
    out->mean += sum;
    return TB_OK;
}

static tb_status compare_part(differ *f, const tb__disk_tensor *t, int32_t rank, tb__diff *out) {
    tb__safetensor slots[TB__DISK_SLOTS];
    tb__disk_source source = tb__disk_input_find(f->other, rank, t->name);
    TB_TRY(tb__disk_part_tensors(t, rank, slots));
    const tb_shape *shape = &slots[TB__DISK_DATA].shape;
    if (!source.tensor) {
        int64_t n = 1;
        for (int d = 0; d < shape->ndim; d++)
            n *= shape->dim[d];
        out->is_missing |= n > 0;
        return TB_OK;
    }
    out->b = source.tensor->dtype;
    out->has_other_shape |= !tb__disk_same_shape(shape, &source.tensor->shape);
    if (out->has_other_shape)
        return TB_OK;
    if (t->unknown &&
        (!source.tensor->unknown_dtype || strcmp(source.tensor->unknown_dtype, t->unknown->unknown_dtype) != 0)) {
        out->has_other_shape = true; /* nothing to be compared with */
        return TB_OK;
    }
    tb_dtype dtype = t->unknown ? TB_U8 : out->b;
    tb_local local;
    TB_TRY(tb_layout_local(t->dst, &t->shape, rank, &local));
    tb_shape part = local.shape;
    tb_local_fini(&local);
    tb__arena_reset(&f->arena);
    TB_TRY(tb__disk_list_pieces(t, rank, true, f->routes, &f->pieces, &f->arena));
    tb__disk_bands_init(&f->bands, t, &part, BAND);
    for (int64_t i = 0; i < f->bands.count; i++) {
        tb__disk_band band;
        tb__disk_bands_at(&f->bands, i, &band);
        if (band.nelements == 0)
            continue;
        TB_TRY(tb__disk_gather_band(&f->gather, t, &f->pieces, &band, f->a));
        TB_TRY(tb__safetensors_read(source.file, source.tensor, tb__dtype_bytes(dtype, band.first),
                                    (size_t)tb__dtype_bytes(dtype, band.nelements), f->b));
        TB_TRY(compare_band(f, t, rank, band.first, band.nelements, dtype, out));
    }
    return TB_OK;
}

static tb_status compare_tensor(differ *f, const tb__disk_tensor *t, tb__diff *out) {
    *out = (tb__diff){.name = t->name, .a = t->band_dtype, .rank = TB_NO_RANK, .shape = t->shape};
    if (t->dst_quant.format.kind)
        return tb__fail(TB_REFUSED, "tensor '%.100s' is quantised by the spec; it can't be compared", t->name);
    for (int32_t i = 0; i < tb_layout_nranks(t->dst); i++) {
        tb_status status = compare_part(f, t, tb_layout_rank_at(t->dst, i), out);
        if (status != TB_OK)
            return tb__fail_within(status, "tensor '%.100s'", t->name);
    }
    out->mean = out->nelements ? out->mean / (double)out->nelements : 0;
    return TB_OK;
}

static tb_status list_only_b(const differ *f, tb_status (*only_b)(void *arg, const char *name), void *arg) {
    const char **names;
    size_t count, k = 0;
    TB_TRY(tb__disk_input_names(f->other, &names, &count));
    tb_status status = TB_OK;
    for (size_t i = 0; i < count && status == TB_OK; i++) {
        while (k < f->disk->count && strcmp(f->disk->tensors[k].name, names[i]) < 0)
            k++;
        bool is_known = k < f->disk->count && strcmp(f->disk->tensors[k].name, names[i]) == 0;
        for (size_t c = 0; c < f->disk->spec->nconstants; c++)
            is_known |= strcmp(f->disk->spec->constants[c].name, names[i]) == 0;
        if (!is_known)
            status = only_b(arg, names[i]);
    }
    free(names);
    return status;
}

static tb_status compare_all(differ *f, tb_status (*found)(void *arg, const tb__diff *diff),
                             tb_status (*only_b)(void *arg, const char *name), void *arg) {
    f->room = 2 * BAND;
    f->gather.stage_nbytes = BAND;
    f->gather.stage = tb__malloc(BAND, 1);
    f->a = tb__malloc(BAND, 1);
    f->b = tb__malloc(BAND, 16); /* of the widest dtype, for elements of half a byte */
    f->x = tb__malloc(f->room, sizeof *f->x);
    f->y = tb__malloc(f->room, sizeof *f->y);
    if (!f->gather.stage || !f->a || !f->b || !f->x || !f->y)
        return TB_NO_MEMORY;
    TB_TRY(tb_routes_create(&f->routes));
    for (size_t i = 0; i < f->disk->count; i++) {
        tb__diff diff;
        TB_TRY(compare_tensor(f, &f->disk->tensors[i], &diff));
        TB_TRY(found(arg, &diff));
    }
    return list_only_b(f, only_b, arg);
}

tb_status tb__disk_diff(const tb__disk *disk, const char *dir, const tb__diff_opts *opts,
                        tb_status (*found)(void *arg, const tb__diff *diff),
                        tb_status (*only_b)(void *arg, const char *name), void *arg) {
    differ f = {.disk = disk, .opts = opts, .gather = {.input = disk->input}};
    TB_TRY(tb__disk_input_open(dir, &disk->spec->dst_mesh, disk->ranks, disk->nranks, true, &f.other));
    tb_status status = TB_OK;
    if (tb__disk_input_model(f.other) && disk->nranks != 1)
        status = tb__file_fail(TB_INVALID, dir, "it is a model, which is one rank, but the spec's target has %zu",
                               disk->nranks);
    if (status == TB_OK)
        status = compare_all(&f, found, only_b, arg);
    tb__disk_gather_fini(&f.gather);
    tb_routes_destroy(f.routes);
    tb__arena_fini(&f.arena);
    free(f.pieces.list.item);
    free(f.pieces.reach.item);
    free(f.gather.stage);
    free(f.a);
    free(f.b);
    free(f.x);
    free(f.y);
    tb__disk_input_close(f.other);
    return status;
}
