/* The page tables of memory that a copy is going to use. Memory of another process has no entries in this process's
 * page tables until it is used: the first copy of it would take about twice as long as the second. */
#include "device/host/move.h"

#include "base/int.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* Since Linux 5.14. Older kernels refuse them, and page tables are filled by the copies themselves. */
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ  22
#define MADV_POPULATE_WRITE 23
#endif

enum {
    GAP = 64 << 10, /* between rows that are treated as one: a page fault fills as many entries */
    PAGES = 1024,   /* that mincore is asked for at a time */
    HAS_PAGE = 1,   /* the bit of mincore that is defined */
};

/* Whole pages that are next to one another, or nearly; they are filled together. */
typedef struct extent {
    uintptr_t first, last;
    int advice;
} extent;

/* Where there is no memory yet, there is none afterwards: it is the program that decides when that is allocated. */
static void fill_entries(const extent *e) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    unsigned char has[PAGES];
    for (uintptr_t at = e->first; at < e->last;) {
        size_t n = (e->last - at) / page < PAGES ? (e->last - at) / page : PAGES;
        if (mincore((void *)at, n * page, has) != 0) // NOLINT(performance-no-int-to-ptr)
            return;
        for (size_t i = 0, next; i < n; i = next) {
            for (next = i; next < n && has[next] & HAS_PAGE;)
                next++;
            if (next > i) // NOLINTNEXTLINE(performance-no-int-to-ptr)
                (void)madvise((void *)(at + i * page), (next - i) * page, e->advice);
            next += next == i;
        }
        at += n * page;
    }
}

static void add_row(extent *e, uintptr_t at, uintptr_t nbytes) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t first = at / page * page, last = (at + nbytes + page - 1) / page * page;
    if (e->last > e->first && first + GAP >= e->first && first <= e->last + GAP) {
        e->first = first < e->first ? first : e->first;
        e->last = last > e->last ? last : e->last;
        return;
    }
    fill_entries(e);
    e->first = first;
    e->last = last;
}

/* A dimension of an operand: how many steps of how many bytes. */
typedef struct dim {
    int64_t len, step;
} dim;

static int compare_steps(const void *a, const void *b) {
    const dim *x = a, *y = b;
    return (x->step > y->step) - (x->step < y->step);
}

/* The operand begins at its lowest address. Dimensions whose steps leave no gap become part of a row. */
static void fill_operand(uintptr_t at, dim *dims, int ndim, int64_t element, int advice) {
    extent e = {.advice = advice};
    int64_t row = element, index[TB_MAX_DIMS] = {0};
    int inner = 0;
    qsort(dims, (size_t)ndim, sizeof *dims, compare_steps);
    while (inner < ndim && dims[inner].step <= row + GAP) {
        row += (dims[inner].len - 1) * dims[inner].step;
        inner++;
    }
    for (bool has_more = true; has_more;) {
        uintptr_t begin = at;
        int d = inner;
        for (int i = inner; i < ndim; i++)
            begin += (uintptr_t)(index[i] * dims[i].step);
        add_row(&e, begin, (uintptr_t)row);
        while (d < ndim && ++index[d] == dims[d].len)
            index[d++] = 0;
        has_more = d < ndim;
    }
    fill_entries(&e);
}

static void fill_side(const tb__move *copy, tb__move_share part, const void *base, const int64_t *strides,
                      tb_dtype dtype, int advice) {
    unsigned bits = tb_dtype_bits(dtype);
    dim dims[TB_MAX_DIMS];
    uintptr_t at = (uintptr_t)base;
    for (int d = 0; d < copy->ndim; d++) {
        int64_t lo = d == part.dim ? part.lo : 0, hi = d == part.dim ? part.hi : copy->len[d];
        int64_t step = strides[d] * bits / 8;
        at += (uintptr_t)((step < 0 ? hi - 1 : lo) * step);
        dims[d] = (dim){hi - lo, llabs(step)};
    }
    fill_operand(at, dims, copy->ndim, bits < 8 ? 1 : bits / 8, advice);
}

void tb__move_fill_page_tables(const tb__move *copy, tb__move_share part) {
    if (part.lo >= part.hi || tb__move_is_empty(copy) || copy->kind != TB__MOVE_COPY)
        return;
    for (uint32_t k = 0; k < copy->nsrc; k++) {
        if (!copy->src_mapping || !copy->src_mapping[k])
            fill_side(copy, part, copy->src[k], copy->src_stride[k], copy->src_dtype, MADV_POPULATE_READ);
    }
    if (!copy->is_dst_in_buffer)
        fill_side(copy, part, copy->dst, copy->dst_stride, copy->dst_dtype, MADV_POPULATE_WRITE);
}
