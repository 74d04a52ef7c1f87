/* Kernels over rows of numbers: casts, reductions, stores past the cache. There are three sets, portable C, AVX2 with
 * F16C, and AVX-512, which give the same bits; the last one that the machine can run is chosen once.
 *
 * Casts round to nearest even. A cast to f8 saturates, infinities included; one to f16 or bf16 overflows to infinity.
 * NaN stays NaN and keeps its sign: f16, bf16 and f32 keep as much of the payload as they have room for, made quiet; f8
 * has one NaN of each sign. Nothing here needs aligned rows, and no two rows may overlap. */
#ifndef TB_DEVICE_HOST_KERNEL_H
#define TB_DEVICE_HOST_KERNEL_H

#include "tensorbus/plan.h"

enum {
    TB__REDUCE_OPS = TB_PRODUCT + 1,
    TB__COMBINE_MAX = 8, /* sources that one call of a combine or reduce kernel takes */
};

typedef void tb__widen_fn(float *dst, const void *src, size_t n);
typedef void tb__narrow_fn(void *dst, const float *src, size_t n);

/* Narrows several rows of n elements, a few elements of each in turn. Streams: rows of `dst` must begin at multiples of
 * 32 bytes. */
typedef void tb__narrow_rows_fn(char *dst, int64_t dst_step, const char *src, int64_t src_step, int64_t rows, size_t n);

/* acc = src[0] op src[1] op ..., or with `resume` acc op src[0] op ... The accumulator is f32 for floats of at most 32
 * bits, else of the sources' own dtype. A NaN in it is the positive quiet one, whichever operands it came from. */
typedef void tb__combine_fn(void *acc, const void *const *src, uint32_t nsrc, size_t n, bool resume);

/* All of a reduction whose result has the sources' dtype, in one pass. `stream` as below. */
typedef void tb__reduce_fn(void *dst, const void *const *src, uint32_t nsrc, size_t n, bool stream);

typedef struct tb__kernels {
    const char *name;
    tb__widen_fn *widen[TB_DTYPE_COUNT];             /* f16, bf16, f8e4m3, f8e5m2 */
    tb__narrow_fn *narrow[TB_DTYPE_COUNT];           /* the same */
    tb__narrow_rows_fn *narrow_rows[TB_DTYPE_COUNT]; /* (optional) the same */
    /* By dtype and op, TB_AVG as TB_SUM. NULL in a set other than the portable one: use the portable one. */
    tb__combine_fn *combine[TB_DTYPE_COUNT][TB__REDUCE_OPS];
    tb__reduce_fn *reduce[TB_DTYPE_COUNT][TB__REDUCE_OPS]; /* (optional) */
    /* Copies and fills with zeros without leaving the destination in the cache; `fence` puts it in order with later
     * stores. `next` is what will be read about a page later, if that is known; it is not needed. */
    void (*stream)(void *dst, const void *src, size_t nbytes, const void *next);
    /* The same for n rows of so many bytes, one or more, of any length. */
    void (*stream_rows)(char *dst, int64_t dst_step, const char *src, int64_t src_step, int64_t n, size_t nbytes);
    void (*stream_zeros)(void *dst, size_t nbytes);
    void (*fence)(void);
    const struct tb__quant_kernels *quant; /* quant_kernel.h */
} tb__kernels;

/* Processors read ahead within a page, and wait for the translation of the next. A touch has it ready; an address that
 * is not there does no harm. */
enum { TB__PAGE = 4096 };

static inline void tb__touch(const void *at) {
    __builtin_prefetch(at);
    __builtin_prefetch((const char *)at + 64);
}

/* Bytes up to the destination's next cache line, which can't be streamed. */
static inline size_t tb__head_bytes(const void *dst, size_t nbytes) {
    size_t head = -(uintptr_t)dst & 63;
    return head < nbytes ? head : nbytes;
}

extern const tb__kernels tb__kernels_portable;

/* NULL where the machine cannot run them. Those with AVX-512 differ in how far ahead their copies prefetch. */
enum { TB__AVX512_WAYS = 3 };
const tb__kernels *tb__kernels_avx2(void);
const tb__kernels *tb__kernels_avx512(void); /* an array */

/* The sets that the machine can run, the portable one first; returns how many. */
enum { TB__KERNEL_SETS_MAX = 2 + TB__AVX512_WAYS };
int tb__kernels_list(const tb__kernels *sets[TB__KERNEL_SETS_MAX]);

/* The set in use: the last one of the list, until another one has been chosen. */
const tb__kernels *tb__kernels_get(void);

/* Uses this set from now on, whatever is faster; NULL: the last one of the list. Not while copies run. */
void tb__kernels_force(const tb__kernels *kernels);

/* The same by name: "auto" or that of a set that the machine can run. */
tb_status tb__kernels_select(const char *name);

/* GB/s that each set of the list copies, rows of memory that is not in a cache: takes some 10 ms. */
tb_status tb__kernels_measure(const tb__kernels *const *sets, int nsets, double *gb_per_s);

/* The fastest set, which the file has, if another process has measured; NULL: it can't be measured. */
const tb__kernels *tb__kernels_fastest(const char *path);

/* Uses the fastest set from now on, unless one was forced or selected. Called before something large is copied; only
 * the first call does anything. The file is one for all processes of the user, until the machine is started again. */
void tb__kernels_choose(void);
const char *tb__kernels_file(void);

#endif
