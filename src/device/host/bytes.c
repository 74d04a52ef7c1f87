/* Strided byte copies: the box is reduced to as few dimensions as describe it, then walked in the destination's order,
 * with a loop of its own for each kind of innermost dimension. */
#include "device/host/bytes.h"

#include "device/host/kernel.h"

#include <stdlib.h>
#include <string.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

enum {
    SMALL = 256,        /* runs up to this are not worth a call to memcpy */
    STREAM_RUN = 1024,  /* runs from here on are worth streaming although their ends may share a cache line */
    GATHER_BYTES = 4096 /* short runs are gathered in the first-level cache, and streamed from there */
};

static void drop_dim(tb__byte_box *box, int d) {
    box->ndim--;
    for (; d < box->ndim; d++) {
        box->len[d] = box->len[d + 1];
        box->dst_step[d] = box->dst_step[d + 1];
        box->src_step[d] = box->src_step[d + 1];
    }
}

static void swap_values(int64_t *a, int64_t *b) {
    int64_t t = *a;
    *a = *b;
    *b = t;
}

/* Outermost first: by the destination's step, then by the source's. */
static bool is_outer_dim(const tb__byte_box *box, int a, int b) {
    int64_t x = llabs(box->dst_step[a]), y = llabs(box->dst_step[b]);
    return x != y ? x > y : llabs(box->src_step[a]) > llabs(box->src_step[b]);
}

static void sort_dims(tb__byte_box *box) {
    for (int i = 1; i < box->ndim; i++) {
        for (int d = i; d > 0 && is_outer_dim(box, d, d - 1); d--) {
            swap_values(&box->len[d], &box->len[d - 1]);
            swap_values(&box->dst_step[d], &box->dst_step[d - 1]);
            swap_values(&box->src_step[d], &box->src_step[d - 1]);
        }
    }
}

/* The same bytes in fewer dimensions and longer runs. A dimension that both sides walk backwards is turned round. */
static void collapse_box(tb__byte_box *box) {
    for (int d = box->ndim - 1; d >= 0; d--) {
        if (box->len[d] == 1) {
            drop_dim(box, d);
        } else if (box->dst_step[d] < 0) {
            box->dst += (box->len[d] - 1) * box->dst_step[d];
            box->src += (box->len[d] - 1) * box->src_step[d];
            box->dst_step[d] = -box->dst_step[d];
            box->src_step[d] = -box->src_step[d];
        }
    }
    sort_dims(box);
    int last = box->ndim - 1;
    while (last >= 0 && box->dst_step[last] == (int64_t)box->run && box->src_step[last] == (int64_t)box->run) {
        box->run *= (size_t)box->len[last];
        box->ndim = last--;
    }
    for (int d = box->ndim - 2; d >= 0; d--) {
        if (box->dst_step[d] == box->dst_step[d + 1] * box->len[d + 1] &&
            box->src_step[d] == box->src_step[d + 1] * box->len[d + 1]) {
            box->len[d + 1] *= box->len[d];
            drop_dim(box, d);
        }
    }
}

/* Two copies of `half` bytes that may overlap in the middle. */
#define TWICE(half)                                                                                                    \
    do {                                                                                                               \
        char a_[half], b_[half];                                                                                       \
        memcpy(a_, src, half);                                                                                         \
        memcpy(b_, src + n - (half), half);                                                                            \
        memcpy(dst, a_, half);                                                                                         \
        memcpy(dst + n - (half), b_, half);                                                                            \
    } while (0)

ALWAYS_INLINE void copy_small(char *dst, const char *src, size_t n) {
    if (n <= 16) {
        if (n >= 8)
            TWICE(8);
        else if (n >= 4)
            TWICE(4);
        else if (n >= 2)
            TWICE(2);
        else if (n == 1)
            *dst = *src;
    } else {
        size_t i = 0;
        for (; i + 32 < n; i += 32)
            memcpy(dst + i, src + i, 32);
        if (n >= 32)
            memcpy(dst + n - 32, src + n - 32, 32);
        else
            TWICE(16);
    }
}

/* Fixed sizes become loads and stores. */
#define ROW_LOOP(size)                                                                                                 \
    for (int64_t i = 0; i < n; i++)                                                                                    \
        memcpy(dst + i * dst_step, src + i * src_step, size);                                                          \
    return

static void copy_row(char *dst, int64_t dst_step, const char *src, int64_t src_step, int64_t n, size_t run) {
    switch (run) {
    case 1:
        ROW_LOOP(1);
    case 2:
        ROW_LOOP(2);
    case 4:
        ROW_LOOP(4);
    case 8:
        ROW_LOOP(8);
    case 16:
        ROW_LOOP(16);
    case 32:
        ROW_LOOP(32);
    case 64:
        ROW_LOOP(64);
    case 128:
        ROW_LOOP(128);
    case 256:
        ROW_LOOP(256);
    default:
        if (run > SMALL) {
            ROW_LOOP(run);
        }
        for (int64_t i = 0; i < n; i++)
            copy_small(dst + i * dst_step, src + i * src_step, run);
    }
}

/* Runs that lie end to end in the destination: no line of it is written twice. */
static void gather_row(char *dst, const char *src, int64_t src_step, int64_t n, size_t run, const tb__kernels *k) {
    char block[GATHER_BYTES] __attribute__((aligned(64)));
    int64_t most = GATHER_BYTES / (int64_t)run;
    /* The first block ends on a line of the destination if any can. */
    int64_t ahead = (int64_t)(-(uintptr_t)dst & 63);
    int64_t now = ahead % (int64_t)run == 0 && ahead ? ahead / (int64_t)run : most;
    while (n > 0) {
        if (now > n)
            now = n;
        copy_row(block, (int64_t)run, src, src_step, now, run);
        k->stream(dst, block, (size_t)now * run, src + now * src_step);
        dst += now * (int64_t)run;
        src += now * src_step;
        n -= now;
        now = most;
    }
}

static void zero_row(char *dst, int64_t dst_step, int64_t n, size_t run, bool stream, const tb__kernels *k) {
    for (int64_t i = 0; i < n; i++) {
        if (stream)
            k->stream_zeros(dst + i * dst_step, run);
        else
            memset(dst + i * dst_step, 0, run);
    }
}

/* What is done with the innermost dimension, decided once for the whole box. */
typedef struct walk {
    const tb__byte_box *box;
    const tb__kernels *kernels;
    enum { ZEROS, RUNS, STREAM_RUNS, GATHER, TRANSPOSE } kind;
    bool stream;
    int inner; /* dimensions that the kind deals with: the last ones */
    tb__swapped_dims swapped;
} walk;

/* Whether streaming the runs one by one writes whole lines only. */
static bool fills_lines(const tb__byte_box *box) {
    uint64_t all = (uintptr_t)box->dst | box->run;
    for (int d = 0; d < box->ndim; d++)
        all |= (uint64_t)box->dst_step[d];
    return all % 64 == 0;
}

static bool try_transpose(walk *w, tb__byte_box *box) {
    int last = box->ndim - 1, best = last;
    for (int d = 0; d < last; d++) {
        if (llabs(box->src_step[d]) < llabs(box->src_step[best]))
            best = d;
    }
    if (best == last)
        return false;
    int64_t dst_step[2] = {box->dst_step[best], box->dst_step[last]};
    int64_t src_step[2] = {box->src_step[best], box->src_step[last]};
    if (!tb__is_swapped(box->run, dst_step, src_step))
        return false;
    for (int d = best; d + 1 < last; d++) {
        swap_values(&box->len[d], &box->len[d + 1]);
        swap_values(&box->dst_step[d], &box->dst_step[d + 1]);
        swap_values(&box->src_step[d], &box->src_step[d + 1]);
    }
    w->swapped = (tb__swapped_dims){
        .run = box->run,
        .len = {box->len[last - 1], box->len[last]},
        .dst_step = {dst_step[0], dst_step[1]},
        .src_step = {src_step[0], src_step[1]},
    };
    return true;
}

static void choose_walk(walk *w, tb__byte_box *box, bool stream) {
    w->inner = 1;
    if (!box->src)
        w->kind = ZEROS;
    else if (box->ndim >= 2 && try_transpose(w, box))
        w->kind = TRANSPOSE;
    else if (stream && (box->run >= STREAM_RUN || fills_lines(box)))
        w->kind = STREAM_RUNS;
    else if (stream && box->run <= GATHER_BYTES / 4 && box->ndim && box->dst_step[box->ndim - 1] == (int64_t)box->run)
        w->kind = GATHER;
    else
        w->kind = RUNS;
    if (w->kind == TRANSPOSE)
        w->inner = 2;
    /* Zeros are streamed by the same rule; a lone run has no dimension. */
    w->stream = stream && (w->kind != ZEROS || box->run >= STREAM_RUN || fills_lines(box));
}

static void copy_innermost(const walk *w, char *dst, const char *src) {
    const tb__byte_box *box = w->box;
    int d = box->ndim - 1;
    int64_t n = d < 0 ? 1 : box->len[d], dst_step = d < 0 ? 0 : box->dst_step[d],
            src_step = d < 0 ? 0 : box->src_step[d];
    switch (w->kind) {
    case ZEROS:
        zero_row(dst, dst_step, n, box->run, w->stream, w->kernels);
        break;
    case RUNS:
        copy_row(dst, dst_step, src, src_step, n, box->run);
        break;
    case STREAM_RUNS:
        w->kernels->stream_rows(dst, dst_step, src, src_step, n, box->run);
        break;
    case GATHER:
        gather_row(dst, src, src_step, n, box->run, w->kernels);
        break;
    case TRANSPOSE:
        tb__transpose(dst, src, &w->swapped, w->stream);
        break;
    }
}

void tb__bytes_copy(char *dst, const char *src, size_t nbytes, bool stream) {
    if (stream && (nbytes >= STREAM_RUN || ((uintptr_t)dst | nbytes) % 64 == 0))
        tb__kernels_get()->stream_rows(dst, 0, src, 0, 1, nbytes);
    else if (nbytes > SMALL)
        memcpy(dst, src, nbytes);
    else
        copy_small(dst, src, nbytes);
}

void tb__bytes_move(const tb__byte_box *original, bool stream) {
    tb__byte_box box = *original;
    for (int d = 0; d < box.ndim; d++) {
        if (box.len[d] == 0)
            return;
        if (!box.src)
            box.src_step[d] = box.dst_step[d];
    }
    if (box.run == 0)
        return;
    const char *from = box.src;
    if (!from)
        box.src = box.dst; /* steps along, and is not read */
    collapse_box(&box);
    if (!from)
        box.src = NULL;
    walk w = {.box = &box, .kernels = tb__kernels_get()};
    choose_walk(&w, &box, stream);

    int outer = box.ndim - w.inner;
    int64_t index[TB_MAX_DIMS] = {0};
    char *dst = box.dst;
    const char *src = from ? box.src : box.dst;
    for (;;) {
        copy_innermost(&w, dst, src);
        int d = outer - 1;
        for (; d >= 0; d--) {
            dst += box.dst_step[d];
            src += box.src_step[d];
            if (++index[d] < box.len[d])
                break;
            dst -= box.len[d] * box.dst_step[d];
            src -= box.len[d] * box.src_step[d];
            index[d] = 0;
        }
        if (d < 0)
            return;
    }
}
