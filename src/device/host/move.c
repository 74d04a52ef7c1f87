/* Shares of copies. Plain copies become byte moves; the others go tile by tile through tile.c. */
#include "device/host/move.h"

#include "base/int.h"
#include "base/mem.h"
#include "base/wide.h"
#include "device/host/bytes.h"
#include "device/host/kernel.h"
#include "device/host/tile.h"
#include "device/host/workers.h"

#include <stdlib.h>

enum { MOVE_BYTES = 256 }; /* what it costs to begin a move, in bytes */

bool tb__move_is_plain(const tb__move *copy) {
    return copy->nsrc == 1 && copy->avg_divisor <= 1 && copy->src_dtype == copy->wire_dtype &&
           copy->wire_dtype == copy->dst_dtype;
}

tb__move_share tb__move_whole(const tb__move *copy) {
    return copy->ndim ? (tb__move_share){0, 0, copy->len[0]} : (tb__move_share){-1, 0, 1};
}

/* Long enough to be cut finely; if none is, the longest. Outer ones first, so that runs stay whole. */
static int choose_dim(const tb__move *copy) {
    int best = -1, longest = 0;
    for (int d = 0; d < copy->ndim; d++) {
        if (copy->len[d] > copy->len[longest])
            longest = d;
        if (copy->len[d] >= 64 && (best < 0 || llabs(copy->dst_stride[d]) > llabs(copy->dst_stride[best])))
            best = d;
    }
    return best < 0 ? longest : best;
}

static int64_t cut_at(const tb__move *copy, int dim, int64_t at, int64_t of) {
    int64_t len = copy->len[dim];
    if (at == 0 || at >= of)
        return at == 0 ? 0 : len;
    int64_t index = (int64_t)((tb__wide)len * (tb__wide)at / (tb__wide)of);
    if (llabs(copy->dst_stride[dim]) != 1)
        return index;
    /* A line holds 64 bytes' worth; the first may hold fewer. */
    unsigned bits = tb_dtype_bits(copy->dst_dtype);
    int64_t per_line = 64 * 8 / bits, first = 0;
    if (copy->dst_stride[dim] == 1)
        first = (int64_t)(-(uintptr_t)copy->dst & 63) * 8 / bits;
    return index < first ? 0 : index - (index - first) % per_line;
}

tb__move_share tb__move_cut(const tb__move *copy, int64_t from, int64_t to, int64_t of) {
    if (copy->ndim == 0)
        return (tb__move_share){-1, 0, from == 0};
    int dim = choose_dim(copy);
    return (tb__move_share){dim, cut_at(copy, dim, from, of), cut_at(copy, dim, to, of)};
}

static void move_bytes(const tb__move *copy, tb__move_share part, bool stream) {
    unsigned bits = tb_dtype_bits(copy->dst_dtype);
    bool is_packed = bits == 4;
    int pairs = is_packed ? tb__move_packed_dim(copy) : -1;
    tb__byte_box box = {.ndim = copy->ndim, .run = is_packed ? 1 : bits / 8, .dst = copy->dst};
    int64_t size = (int64_t)box.run, start = 0, src_start = 0;
    for (int d = 0; d < copy->ndim; d++) {
        int64_t dst_step = copy->dst_stride[d] * size, src_step = copy->nsrc ? copy->src_stride[0][d] * size : 0;
        int64_t lo = d == part.dim ? part.lo : 0, hi = d == part.dim ? part.hi : copy->len[d];
        if (d == pairs) { /* bytes, not elements */
            lo /= 2;
            hi /= 2;
        } else if (is_packed) {
            dst_step /= 2;
            src_step /= 2;
        }
        box.len[d] = hi - lo;
        box.dst_step[d] = dst_step;
        box.src_step[d] = src_step;
        start += lo * dst_step;
        src_start += lo * src_step;
    }
    box.dst += start;
    if (copy->nsrc)
        box.src = (const char *)copy->src[0] + src_start;
    tb__bytes_move(&box, stream);
}

/* As job.c makes them of small tensors, for which the way to the kernel takes as long as the copy. */
static bool is_lone_run(const tb__move *copy) {
    return copy->ndim == 1 && copy->nsrc == 1 && copy->dst_dtype == TB_U8 && copy->dst_stride[0] == 1 &&
           copy->src_stride[0][0] == 1 && tb__move_is_plain(copy);
}

void tb__move_run(const tb__move *copy, tb__move_share part, bool stream) {
    if (part.lo >= part.hi || tb__move_is_empty(copy))
        return;
    if (is_lone_run(copy))
        tb__bytes_copy((char *)copy->dst + part.lo, (const char *)copy->src[0] + part.lo, (size_t)(part.hi - part.lo),
                       stream);
    else if (copy->nsrc == 0 || tb__move_is_plain(copy))
        move_bytes(copy, part, stream);
    else
        tb__tiles_run(copy, part, stream);
}

/* ---- Many moves ------------------------------------------------------------------------------------------------ */

void tb__move_costs_measure(const tb__move_costs *costs) {
    int64_t end = 0;
    for (size_t i = 0; i < costs->n; i++)
        costs->ends[i] = end += tb__move_traffic(&costs->moves[i]) + MOVE_BYTES;
}

/* The first move that ends beyond `at`. */
static size_t find_move(const tb__move_costs *costs, int64_t at) {
    size_t i = 0;
    TB_BISECT(i, costs->n, costs->ends[i] > at);
    return i;
}

enum {
    MOVES_AHEAD = 8,
    FETCH_BYTES = 1024, /* of longer moves the processor fetches the rest by itself */
};

/* Where the next short move reads, no processor knows. */
static void fetch_source(const tb__move *move) {
    if (move->ndim != 1 || move->nsrc != 1 || move->src_mapping || move->src_dtype != TB_U8 ||
        move->src_stride[0][0] != 1)
        return;
    const char *src = move->src[0];
    int64_t nbytes = tb__min64(move->len[0], FETCH_BYTES);
    for (int64_t i = 0; i < nbytes; i += 64)
        __builtin_prefetch(src + i);
}

void tb__move_costs_run(const tb__move_costs *costs, int64_t from, int64_t to, tb__share_fn *fn, void *arg) {
    for (size_t i = find_move(costs, from); i < costs->n; i++) {
        int64_t begin = tb__move_costs_begin(costs, i), length = costs->ends[i] - begin;
        if (begin >= to)
            return;
        if (i + MOVES_AHEAD < costs->n)
            fetch_source(&costs->moves[i + MOVES_AHEAD]);
        if (length >= TB__PIECE_BYTES)
            fn(arg, i, from > begin ? from - begin : 0, to - begin < length ? to - begin : length, length);
        else if (begin >= from) /* short moves are not divided: the share with the beginning does it */
            fn(arg, i, 0, length, length);
    }
}

typedef struct batch {
    tb__move_costs costs;
    bool stream;
} batch;

static void run_copy(void *arg, size_t move, int64_t from, int64_t to, int64_t of) {
    const batch *b = arg;
    const tb__move *copy = &b->costs.moves[move];
    tb__move_run(copy, tb__move_cut(copy, from, to, of), b->stream);
}

static void run_all(void *arg, int64_t from, int64_t to) {
    const batch *b = arg;
    (void)from;
    (void)to;
    for (size_t i = 0; i < b->costs.n; i++)
        tb__move_run(&b->costs.moves[i], tb__move_whole(&b->costs.moves[i]), b->stream);
    if (b->stream)
        tb__kernels_get()->fence();
}

static void run_share(void *arg, int64_t from, int64_t to) {
    batch *b = arg;
    tb__move_costs_run(&b->costs, from, to, run_copy, b);
    if (b->stream)
        tb__kernels_get()->fence();
}

tb_status tb__moves_run(const tb__move *copies, size_t n) {
    int64_t written = 0, traffic = 0;
    for (size_t i = 0; i < n; i++) {
        TB_TRY(tb__move_check(&copies[i]));
        written += tb__move_written(&copies[i]);
        traffic += tb__move_traffic(&copies[i]);
    }
    batch b = {.costs = {.moves = copies, .n = n}, .stream = written >= TB__STREAM_BYTES};
    if (b.stream)
        tb__kernels_choose();
    tb__work work = {.fn = run_all, .arg = &b, .total = 1, .piece = 1};
    /* Without memory for the costs, this thread does all of it. */
    if (tb__workers_count() > 1 && traffic / 2 >= TB__PIECE_BYTES)
        b.costs.ends = tb__malloc(n, sizeof *b.costs.ends);
    if (b.costs.ends) {
        tb__move_costs_measure(&b.costs);
        work.fn = run_share;
        work.total = b.costs.ends[n - 1];
        work.piece = tb__workers_piece(work.total);
    }
    tb__workers_run(&work);
    free(b.costs.ends);
    return TB_OK;
}
