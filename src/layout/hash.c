/* Hashes of tensors: sums of hashes of elements and their positions, so that each part can be hashed by the rank that
 * has it. */
#include "layout/hash.h"

#include "base/dtype.h"
#include "base/error.h"
#include "layout/layout.h"

#include <inttypes.h>
#include <string.h>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#define STEP UINT64_C(0x9e3779b97f4a7c15)
#define MUL1 UINT64_C(0xbf58476d1ce4e5b9)
#define MUL2 UINT64_C(0x94d049bb133111eb)

/* The finaliser of splitmix64, a bijection. */
static inline uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * MUL1;
    x = (x ^ x >> 27) * MUL2;
    return x ^ x >> 31;
}

/* Elements at constant steps, both in memory (in bytes) and in the whole tensor. `key` is that of the first one's
 * position. */
typedef struct run {
    const char *at;
    int64_t n, step;
    uint64_t key, key_step;
    unsigned nbytes; /* of an element */
} run;

static uint64_t load(const char *at, unsigned nbytes) {
    uint8_t b1;
    uint16_t b2;
    uint32_t b4;
    uint64_t b8;
    switch (nbytes) {
    case 1:
        memcpy(&b1, at, 1);
        return b1;
    case 2:
        memcpy(&b2, at, 2);
        return b2;
    case 4:
        memcpy(&b4, at, 4);
        return b4;
    default:
        memcpy(&b8, at, 8);
        return mix(b8);
    }
}

static uint64_t hash_portable(run r) {
    uint64_t sum = 0;
    for (; r.n > 0; r.n--, r.at += r.step, r.key += r.key_step)
        sum += mix(r.key + load(r.at, r.nbytes));
    return sum;
}

#ifdef __x86_64__

#define AVX2        __attribute__((target("avx2")))
#define AVX2_INLINE static inline AVX2 __attribute__((always_inline))

AVX2_INLINE __m256i multiply(__m256i x, uint64_t by) {
    __m256i low = _mm256_set1_epi64x((long long)by), high = _mm256_set1_epi64x((long long)(by >> 32));
    __m256i middle = _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(x, 32), low), _mm256_mul_epu32(x, high));
    return _mm256_add_epi64(_mm256_mul_epu32(x, low), _mm256_slli_epi64(middle, 32));
}

AVX2_INLINE __m256i mix4(__m256i x) {
    x = multiply(_mm256_xor_si256(x, _mm256_srli_epi64(x, 30)), MUL1);
    x = multiply(_mm256_xor_si256(x, _mm256_srli_epi64(x, 27)), MUL2);
    return _mm256_xor_si256(x, _mm256_srli_epi64(x, 31));
}

AVX2_INLINE __m256i load4(const char *at, unsigned nbytes) {
    int32_t four;
    switch (nbytes) {
    case 1:
        memcpy(&four, at, 4);
        return _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
    case 2:
        return _mm256_cvtepu16_epi64(_mm_loadl_epi64((const __m128i *)(const void *)at));
    case 4:
        return _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)(const void *)at));
    default:
        return mix4(_mm256_loadu_si256((const __m256i *)(const void *)at));
    }
}

/* Two independent sums, so that consecutive vectors do not wait for each other. */
AVX2_INLINE uint64_t hash_vectors(run r, unsigned nbytes) {
    uint64_t lanes[4];
    for (unsigned i = 0; i < 4; i++)
        lanes[i] = r.key + i * r.key_step;
    __m256i key = _mm256_loadu_si256((const __m256i *)lanes);
    uint64_t step = 4 * r.key_step;
    __m256i four = _mm256_set1_epi64x((int64_t)step);
    __m256i sum = _mm256_setzero_si256(), other = sum;
    for (; r.n >= 8; r.n -= 8, r.at += 8 * (size_t)nbytes) {
        sum = _mm256_add_epi64(sum, mix4(_mm256_add_epi64(key, load4(r.at, nbytes))));
        key = _mm256_add_epi64(key, four);
        other = _mm256_add_epi64(other, mix4(_mm256_add_epi64(key, load4(r.at + 4 * (size_t)nbytes, nbytes))));
        key = _mm256_add_epi64(key, four);
    }
    _mm256_storeu_si256((__m256i *)lanes, key);
    r.key = lanes[0];
    _mm256_storeu_si256((__m256i *)lanes, _mm256_add_epi64(sum, other));
    return lanes[0] + lanes[1] + lanes[2] + lanes[3] + hash_portable(r);
}

AVX2 static uint64_t hash_avx2(run r) {
    switch (r.nbytes) {
    case 1:
        return hash_vectors(r, 1);
    case 2:
        return hash_vectors(r, 2);
    case 4:
        return hash_vectors(r, 4);
    default:
        return hash_vectors(r, 8);
    }
}

static bool use_avx2(void) {
    return __builtin_cpu_supports("avx2");
}

#else

static uint64_t hash_avx2(run r) {
    return hash_portable(r);
}

static bool use_avx2(void) {
    return false;
}

#endif

static bool is_portable_forced;

void tb__hash_force_portable(bool is_forced) {
    is_portable_forced = is_forced;
}

static uint64_t hash_run(run r) {
    return r.step == r.nbytes && !is_portable_forced && use_avx2() ? hash_avx2(r) : hash_portable(r);
}

/* Two elements to a byte: `at` counts elements from the base. */
static uint64_t hash_halves(const uint8_t *base, int64_t at, run r) {
    uint64_t sum = 0;
    for (; r.n > 0; r.n--, at += r.step, r.key += r.key_step)
        sum += mix(r.key + (base[at >> 1] >> (4 * (at & 1)) & 15));
    return sum;
}

typedef struct dim {
    int64_t n, step; /* in memory, in elements */
    uint64_t key_step;
} dim;

static int64_t distance(int64_t step) {
    return step < 0 ? -step : step;
}

/* Sorts dims by their step in memory, largest first. Merges dims that are contiguous both there and in the tensor. */
static int order_dims(const tb_binding *part, const tb_shape *shape, dim *dims) {
    int count = 0;
    uint64_t row = STEP;
    for (int d = shape->ndim - 1; d >= 0; row *= (uint64_t)shape->dim[d], d--) {
        if (part->shape.dim[d] == 1)
            continue;
        dim new = {part->shape.dim[d], part->strides[d], row};
        int at = count++;
        for (; at > 0 && distance(dims[at - 1].step) > distance(new.step); at--)
            dims[at] = dims[at - 1];
        dims[at] = new;
    }
    int merged = 0; /* from the fastest on */
    for (int i = 0; i < count; i++) {
        dim *last = &dims[merged > 0 ? merged - 1 : 0];
        if (merged > 0 && dims[i].step == last->step * last->n &&
            dims[i].key_step == last->key_step * (uint64_t)last->n)
            last->n *= dims[i].n;
        else
            dims[merged++] = dims[i];
    }
    if (merged == 0)
        dims[merged++] = (dim){1, 1, STEP};
    return merged;
}

static tb_status check_box(const tb_binding *part, const tb_shape *shape, const int64_t *start) {
    int64_t nbytes;
    TB_TRY(tb_shape_size(shape, part->dtype, NULL, NULL));
    TB_TRY(tb_shape_size(&part->shape, part->dtype, NULL, &nbytes));
    if (part->shape.ndim != shape->ndim)
        return tb__fail(TB_INVALID, "the box has %d dims, and the tensor has %d", part->shape.ndim, shape->ndim);
    for (int d = 0; d < shape->ndim; d++) {
        if (start[d] < 0 || start[d] > shape->dim[d] - part->shape.dim[d])
            return tb__fail(TB_INVALID,
                            "dim %d: the box has %" PRId64 " indices from %" PRId64 ", and the tensor has %" PRId64, d,
                            part->shape.dim[d], start[d], shape->dim[d]);
    }
    if (nbytes > 0 && !part->base)
        return tb__fail(TB_INVALID, "the box has %" PRId64 " bytes, and its base is NULL", nbytes);
    return TB_OK;
}

tb_status tb_hash_box(const tb_binding *part, const tb_shape *shape, const int64_t *start, uint64_t *out) {
    TB_TRY(check_box(part, shape, start));
    uint64_t sum = 0, first = 0;
    for (int d = 0; d < shape->ndim; d++) {
        if (part->shape.dim[d] == 0) {
            *out = 0;
            return TB_OK;
        }
        first = first * (uint64_t)shape->dim[d] + (uint64_t)start[d];
    }
    dim dims[TB_MAX_DIMS];
    int ndims = order_dims(part, shape, dims);
    bool is_packed = tb_dtype_bits(part->dtype) == 4;
    unsigned nbytes = is_packed ? 1 : tb_dtype_bits(part->dtype) / 8;
    const char *base = (const char *)part->base + part->offset;
    run r = {.n = dims[0].n, .step = dims[0].step, .key = (first + 1) * STEP, .key_step = dims[0].key_step};
    r.nbytes = nbytes;
    r.step *= nbytes;
    int64_t index[TB_MAX_DIMS] = {0}, at = 0;
    for (int d = 0; d < ndims;) {
        r.at = base + (is_packed ? 0 : at * nbytes);
        sum += is_packed ? hash_halves((const uint8_t *)base, at, r) : hash_run(r);
        for (d = 1; d < ndims; d++) {
            at += dims[d].step;
            r.key += dims[d].key_step;
            if (++index[d] < dims[d].n)
                break;
            at -= dims[d].step * dims[d].n;
            r.key -= dims[d].key_step * (uint64_t)dims[d].n;
            index[d] = 0;
        }
    }
    *out = sum;
    return TB_OK;
}

tb_status tb_hash_part(const tb_layout *layout, const tb_shape *shape, int32_t rank, const tb_binding *part,
                       uint64_t *out) {
    tb_local local;
    for (int d = 0; d < layout->ndim; d++) {
        if (layout->place[d].kind == TB_PARTIAL)
            return tb__fail(TB_REFUSED, "mesh dim %d is Partial: contributions have no hash", d);
    }
    TB_TRY(tb_layout_local(layout, shape, rank, &local));
    tb_status status = TB_OK;
    uint64_t sum = 0;
    size_t at[TB_MAX_DIMS] = {0};
    int64_t from[TB_MAX_DIMS] = {0}, start[TB_MAX_DIMS] = {0};
    bool is_empty = false;
    if (part->shape.ndim != shape->ndim)
        status = tb__fail(TB_INVALID, "the part has %d dims, and the tensor has %d", part->shape.ndim, shape->ndim);
    for (int d = 0; d < shape->ndim && status == TB_OK; d++) {
        is_empty |= local.shape.dim[d] == 0;
        if (part->shape.dim[d] != local.shape.dim[d])
            status =
                tb__fail(TB_INVALID,
                         "dim %d: the part has %" PRId64 " indices, and rank %" PRId32 " has %" PRId64 " by the layout",
                         d, part->shape.dim[d], rank, local.shape.dim[d]);
    }
    for (int d = 0; d >= 0 && status == TB_OK && !is_empty;) {
        tb_binding box = *part;
        int64_t offset = 0;
        for (int i = 0; i < shape->ndim; i++) {
            tb_segment segment = local.segments[i][at[i]];
            box.shape.dim[i] = segment.stop - segment.start;
            start[i] = segment.start;
            offset += from[i] * part->strides[i];
        }
        if (tb__dtype_packing(part->dtype) > 1 && offset % 2) {
            status = tb__fail(TB_REFUSED, "a segment of %s begins in the middle of a byte", tb_dtype_name(part->dtype));
            break;
        }
        box.offset += tb__dtype_offset(part->dtype, offset);
        uint64_t hash;
        status = tb_hash_box(&box, shape, start, &hash);
        if (status != TB_OK)
            break;
        sum += hash;
        for (d = shape->ndim - 1; d >= 0; d--) {
            from[d] += box.shape.dim[d];
            if (++at[d] < local.nsegments[d])
                break;
            at[d] = 0;
            from[d] = 0;
        }
    }
    tb_local_fini(&local);
    if (status == TB_OK)
        *out = sum;
    return status;
}
