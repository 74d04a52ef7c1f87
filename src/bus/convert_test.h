/* What quantised tensors should be when they have arrived: worked out by one thread alone, from each rank's own part
 * and the reference quantiser. */
#ifndef TB_BUS_CONVERT_TEST_H
#define TB_BUS_CONVERT_TEST_H

#include "bus/bus_test.h"
#include "reshard/encode.h"

#include "../tests/support/quantised.h"

#include <math.h>

enum { MOST_TENSORS = 5, MOST_SEATS = 3 };

/* One batch: tensors of one kind, from group a, which has numbers, to group b, which has them quantised, and back. */
typedef struct job {
    const char *encode, *scale_group, *layout[2];
    const char *odd_encode; /* of every other tensor, with the same bits; NULL: the same */
    tb_dtype dtype;
    int ntensors;
    tb_shape shape;
    int64_t staging_bytes;
    uint32_t group_window;
    bool staged;
    tb_commit commit;
    int32_t nseats[2];
} job;

/* ---- What is expected ------------------------------------------------------------------------------------------ */

/* A value of the tensor, as bits of its dtype. */
static inline uint64_t value_of(const job *j, uint32_t version, int tensor, int64_t index) {
    uint64_t h = (uint64_t)index * 0x9e3779b97f4a7c15U + version * 0x2545f4914f6cdd1dU + (uint64_t)tensor * 77777;
    h = (h ^ h >> 29) * 0xbf58476d1ce4e5b9U;
    h ^= h >> 32;
    float f = (float)((int)(h % 2001) - 1000) * ldexpf(1, (int)(h >> 20 & 7) - 9);
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return number_cast(TB_F32, j->dtype, bits);
}

/* What a seat holds of a tensor, in numbers. */
typedef struct plain {
    tb_local local;
    int64_t count, columns, rows, matrix_rows;
    int64_t *index; /* global, of each element */
    uint8_t *data;  /* of tensor_alloc */
} plain;

static inline void plain_init(plain *p, const job *j, int which, int32_t seat) {
    tb_layout *layout;
    check_ok(tb_layout_parse(j->layout[which], &layout));
    check_ok(tb_layout_local(layout, &j->shape, seat, &p->local));
    tb_layout_destroy(layout);
    p->count = 1;
    for (int d = 0; d < j->shape.ndim; d++)
        p->count *= p->local.shape.dim[d];
    p->columns = p->local.shape.dim[j->shape.ndim - 1];
    p->rows = p->columns ? p->count / p->columns : 0;
    p->matrix_rows = j->shape.ndim > 1 ? p->local.shape.dim[j->shape.ndim - 2] : 1;
    p->index = malloc((size_t)p->count * sizeof *p->index + 1);
    check((p->data = tensor_alloc((size_t)p->count * number_size(j->dtype))));
    for (int64_t i = 0; i < p->count; i++) {
        int64_t rest = i, at = 0, step = 1;
        for (int d = j->shape.ndim; d-- > 0;) {
            int64_t n = p->local.shape.dim[d];
            at += global_index(&p->local, d, rest % n) * step;
            step *= j->shape.dim[d];
            rest /= n;
        }
        p->index[i] = at;
    }
}

static inline uint8_t *plain_at(const plain *p, const job *j, int64_t i) {
    return (uint8_t *)tensor_bytes(p->data) + (size_t)i * number_size(j->dtype);
}

static inline void plain_fill(plain *p, const job *j, uint32_t version, int tensor) {
    for (int64_t i = 0; i < p->count; i++)
        number_store(j->dtype, plain_at(p, j, i), value_of(j, version, tensor, p->index[i]));
}

static inline void plain_fini(plain *p) {
    tb_local_fini(&p->local);
    free(p->index);
    tensor_free(p->data);
}

/* Quantised storage: matrices one after the other. */
typedef struct store {
    tb__quant_format format;
    int64_t nmatrices, rows, columns;
    tb__quant_size size;
    uint8_t *data, *scales; /* of tensor_alloc, and the scale, too */
    float *scale;
} store;

static inline void store_init(store *s, const job *j, const plain *p) {
    tb__encoding e;
    check_ok(tb__encoding_parse(j->encode, &e));
    *s = (store){.format = e.format, .rows = p->matrix_rows, .columns = p->columns};
    s->nmatrices = p->matrix_rows ? p->rows / p->matrix_rows : 0;
    check_ok(tb__quant_measure(&s->format, s->rows, s->columns, &s->size));
    check((s->data = tensor_alloc((size_t)(s->nmatrices * s->size.data_nbytes) + 1)));
    check((s->scales = tensor_alloc((size_t)(s->nmatrices * s->size.scale_nbytes) + 1)));
    check((s->scale = tensor_alloc(sizeof *s->scale)));
}

static inline float *scale_of(const store *s) {
    return tensor_bytes(s->scale);
}

static inline void store_poison(store *s) {
    memset(tensor_bytes(s->data), 0xa5, (size_t)(s->nmatrices * s->size.data_nbytes));
    memset(tensor_bytes(s->scales), 0xa5, (size_t)(s->nmatrices * s->size.scale_nbytes));
    *scale_of(s) = -1;
}

static inline void store_fini(store *s) {
    tensor_free(s->data);
    tensor_free(s->scales);
    tensor_free(s->scale);
}

static inline tb__quant_tensor matrix_of(const store *s, int64_t m) {
    return (tb__quant_tensor){.format = s->format,
                              .rows = s->rows,
                              .columns = s->columns,
                              .data = (uint8_t *)tensor_bytes(s->data) + m * s->size.data_nbytes,
                              .scales = (uint8_t *)tensor_bytes(s->scales) + m * s->size.scale_nbytes,
                              .scale = *scale_of(s)};
}

static inline float amax_of(const job *j, const plain *p) {
    float most = 0;
    for (int64_t i = 0; i < p->count; i++) {
        float f = (float)fabs(number_value(j->dtype, number_load(j->dtype, plain_at(p, j, i))));
        most = f > most ? f : most;
    }
    return most;
}

/* What all seats of group b have of a version in the end, worked out by one thread alone. */
typedef struct ending {
    plain plain[MOST_TENSORS][MOST_SEATS];
    store store[MOST_TENSORS][MOST_SEATS];
} ending;

static inline void ending_init(ending *e, const job *j) {
    for (int t = 0; t < j->ntensors; t++) {
        for (int32_t seat = 0; seat < j->nseats[1]; seat++) {
            plain_init(&e->plain[t][seat], j, 1, seat);
            store_init(&e->store[t][seat], j, &e->plain[t][seat]);
        }
    }
}

static inline void ending_fini(ending *e, const job *j) {
    for (int t = 0; t < j->ntensors; t++) {
        for (int32_t seat = 0; seat < j->nseats[1]; seat++) {
            plain_fini(&e->plain[t][seat]);
            store_fini(&e->store[t][seat]);
        }
    }
}

/* Whether two parts have their scale in common. */
static inline bool shares(const job *j, bool is_same_tensor, bool is_same_seat) {
    if (!j->scale_group)
        return is_same_tensor && is_same_seat;
    return strncmp(j->scale_group, "local:", 6) != 0 || is_same_seat;
}

static inline void ending_make(ending *e, const job *j, uint32_t version) {
    for (int t = 0; t < j->ntensors; t++) {
        for (int32_t seat = 0; seat < j->nseats[1]; seat++)
            plain_fill(&e->plain[t][seat], j, version, t);
    }
    for (int t = 0; t < j->ntensors; t++) {
        for (int32_t seat = 0; seat < j->nseats[1]; seat++) {
            store *s = &e->store[t][seat];
            float amax = 0;
            for (int u = 0; u < j->ntensors; u++) {
                for (int32_t k = 0; k < j->nseats[1]; k++) {
                    float one = shares(j, u == t, k == seat) ? amax_of(j, &e->plain[u][k]) : 0;
                    amax = one > amax ? one : amax;
                }
            }
            store_poison(s);
            if (s->format.kind == TB__QUANT_FP8_TENSOR || s->format.kind == TB__QUANT_NVFP4)
                check_ok(tb__quant_scale(&s->format, amax, scale_of(s)));
            for (int64_t m = 0; m < s->nmatrices; m++) {
                tb__quant_tensor to = matrix_of(s, m);
                int64_t skip = m * s->rows * s->columns;
                quantised_make(&to, &(tb__quant_rows){plain_at(&e->plain[t][seat], j, skip), j->dtype, s->columns});
            }
        }
    }
}

static inline void check_store(const store *got, const store *wanted) {
    check(memcmp(tensor_bytes(got->data), tensor_bytes(wanted->data),
                 (size_t)(got->nmatrices * got->size.data_nbytes)) == 0);
    check(memcmp(tensor_bytes(got->scales), tensor_bytes(wanted->scales),
                 (size_t)(got->nmatrices * got->size.scale_nbytes)) == 0);
    check(got->nmatrices == 0 || *scale_of(got) == *scale_of(wanted));
}

/* Some seat of b has that element with that value. */
static inline bool is_in_ending(const ending *e, const job *j, int tensor, int64_t index, uint64_t bits) {
    for (int32_t seat = 0; seat < j->nseats[1]; seat++) {
        const plain *p = &e->plain[tensor][seat];
        const store *s = &e->store[tensor][seat];
        for (int64_t i = 0; i < p->count; i++) {
            if (p->index[i] != index)
                continue;
            int64_t row = i / p->columns;
            tb__quant_tensor m = matrix_of(s, row / s->rows);
            if (quantised_value(&m, row % s->rows, i % p->columns, j->dtype) == bits)
                return true;
        }
    }
    return false;
}

#endif
