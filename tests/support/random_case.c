/* Random layout pairs, and the naive evaluation of layouts: one index at a time, straight from the rules. */
#include "random_case.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

uint64_t rng_next(rng *r) {
    uint64_t z = (r->state += 0x9E3779B97F4A7C15U);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9U;
    z = (z ^ z >> 27) * 0x94D049BB133111EBU;
    return z ^ z >> 31;
}

int64_t rng_range(rng *r, int64_t lo, int64_t hi) {
    return lo + (int64_t)(rng_next(r) % (uint64_t)(hi - lo + 1));
}

uint64_t test_seed(void) {
    const char *text = getenv("TB_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 10) : ((uint64_t)time(NULL) << 20 ^ (uint64_t)getpid()) & 0xFFFFFFFFFF;
    printf("seed %" PRIu64 " (TB_SEED=%" PRIu64 " repeats this run)\n", seed, seed);
    return seed;
}

int64_t test_cases(int64_t usual) {
    const char *text = getenv("TB_CASES");
    return text ? strtoll(text, NULL, 10) : usual;
}

void mesh_coords(const side *s, int32_t m, int64_t *coord) {
    for (int i = s->mesh_ndim - 1; i >= 0; i--) {
        coord[i] = m % s->mesh[i];
        m = (int32_t)(m / s->mesh[i]);
    }
}

/* Keeps of `list` what part r of c gets of a piece of `size` at `start`. */
static void keep_part(const naive_list *list, int64_t start, int64_t size, int64_t c, int64_t r, naive_list *out) {
    int64_t q = (size + c - 1) / c;
    for (int64_t i = 0; i < size; i++) {
        if (i >= r * q && i < (r + 1) * q)
            out->index[out->count++] = list->index[start + i];
    }
}

static void apply(const tb_placement *p, int64_t c, int64_t r, const naive_list *list, naive_list *out) {
    int64_t n = list->count, start = 0;
    out->count = 0;
    if (p->kind == TB_SHARD) {
        keep_part(list, 0, n, c, r, out);
    } else if (p->kind == TB_STRIDED_SHARD) {
        int64_t q = (n + p->split - 1) / p->split;
        for (int64_t j = 0; j < p->split; j++) {
            int64_t lo = j * q < n ? j * q : n, hi = (j + 1) * q < n ? (j + 1) * q : n;
            keep_part(list, lo, hi - lo, c, r, out);
        }
    } else if (p->kind == TB_BLOCK_SHARD) {
        for (size_t j = 0; j < p->nsizes; j++) {
            keep_part(list, start, p->sizes[j], c, r, out);
            start += p->sizes[j];
        }
    } else {
        for (size_t i = r ? p->list_ends[r - 1] : 0; i < p->list_ends[r]; i++) {
            for (int64_t x = p->segments[i].start; x < p->segments[i].stop; x++)
                out->index[out->count++] = list->index[x];
        }
    }
}

/* As naive_local, after the first `nstages` mesh dims. */
static void naive_after(const side *s, const tb_shape *shape, int32_t m, int d, int nstages, naive_list *out) {
    int64_t coord[TB_MAX_DIMS] = {0};
    mesh_coords(s, m, coord);
    naive_list *next = calloc(1, sizeof *next);
    out->count = shape->dim[d];
    for (int64_t i = 0; i < out->count; i++)
        out->index[i] = i;
    for (int i = 0; i < nstages; i++) {
        const tb_placement *p = &s->place[i];
        if (p->kind == TB_REPLICATE || p->kind == TB_PARTIAL || (p->dim < 0 ? p->dim + shape->ndim : p->dim) != d)
            continue;
        apply(p, s->mesh[i], coord[i], out, next);
        out->count = next->count;
        memcpy(out->index, next->index, (size_t)next->count * sizeof *out->index);
    }
    free(next);
}

void naive_local(const side *s, const tb_shape *shape, int32_t m, int d, naive_list *out) {
    naive_after(s, shape, m, d, s->mesh_ndim, out);
}

/* The shortest and the longest list in dim d before mesh dim i, over the whole mesh. */
static void lengths_before(const side *s, const tb_shape *shape, int d, int i, int64_t *shortest, int64_t *longest) {
    naive_list *list = calloc(1, sizeof *list);
    *shortest = INT64_MAX;
    *longest = 0;
    for (int32_t m = 0; m < s->nranks; m++) {
        naive_after(s, shape, m, d, i, list);
        *shortest = list->count < *shortest ? list->count : *shortest;
        *longest = list->count > *longest ? list->count : *longest;
    }
    free(list);
}

static void make_blocks(rng *r, side *s, int i, int64_t n) {
    tb_placement *p = &s->place[i];
    p->kind = TB_BLOCK_SHARD;
    p->sizes = s->sizes[i];
    p->nsizes = (size_t)rng_range(r, 1, 4);
    for (size_t j = 0; j + 1 < p->nsizes; j++) {
        s->sizes[i][j] = rng_range(r, 0, n);
        n -= s->sizes[i][j];
    }
    s->sizes[i][p->nsizes - 1] = n;
}

/* Either a random cut of [0, n) dealt out to the coordinates, some pieces to several, or lists out of the blue. */
static void make_lists(rng *r, side *s, int i, int64_t n, bool covers) {
    tb_placement *p = &s->place[i];
    size_t c = (size_t)s->mesh[i];
    size_t count = 0;
    p->kind = TB_EXPLICIT;
    p->segments = s->segments[i];
    p->list_ends = s->list_ends[i];
    p->nlists = c;
    uint64_t holders[64];
    int64_t cut[65], ncuts = 0;
    for (int64_t at = 0; at < n && ncuts < 12;) {
        int64_t len = rng_range(r, 1, n - at < 4 ? n - at : 4);
        cut[ncuts] = at;
        holders[ncuts] = UINT64_C(1) << rng_range(r, 0, (int64_t)c - 1);
        if (rng_range(r, 0, 3) == 0)
            holders[ncuts] |= rng_next(r);
        ncuts++;
        at += ncuts == 12 ? n - at : len;
    }
    cut[ncuts] = n;
    for (size_t x = 0; x < c; x++) {
        int64_t shift = rng_range(r, 0, ncuts); /* lists need not ascend */
        for (int64_t j = 0; j < ncuts; j++) {
            int64_t k = (j + shift) % ncuts;
            if (holders[k] >> x & 1)
                s->segments[i][count++] = (tb_segment){cut[k], cut[k + 1]};
        }
        if (!covers && n > 0 && rng_range(r, 0, 2) == 0) { /* a second slot, or an empty segment */
            int64_t start = rng_range(r, 0, n);
            s->segments[i][count++] = (tb_segment){start, rng_range(r, start, n < start + 3 ? n : start + 3)};
        }
        s->list_ends[i][x] = count;
    }
}

static void make_placement(rng *r, side *s, int i, const tb_shape *shape, tb_reduce_op op, bool is_source) {
    tb_placement *p = &s->place[i];
    *p = (tb_placement){.kind = TB_REPLICATE};
    int64_t choice = rng_range(r, 0, 99);
    if (choice < 20)
        return;
    if (choice < 28) {
        p->kind = TB_PARTIAL;
        p->op = op == TB_SUM && rng_range(r, 0, 2) == 0 ? TB_AVG : op;
        return;
    }
    if (shape->ndim == 0)
        return;
    int d = (int)rng_range(r, 0, shape->ndim - 1);
    int64_t shortest, longest;
    lengths_before(s, shape, d, i, &shortest, &longest);
    p->kind = TB_SHARD;
    p->dim = rng_range(r, 0, 4) == 0 ? d - shape->ndim : d;
    if (choice >= 60 && choice < 75) {
        p->kind = TB_STRIDED_SHARD;
        p->split = rng_range(r, 1, 4);
    } else if (choice >= 75 && choice < 87 && shortest == longest) {
        make_blocks(r, s, i, longest);
    } else if (choice >= 87) {
        bool hole = rng_range(r, 0, 30) == 0;
        make_lists(r, s, i, hole ? shortest / 2 : shortest, is_source);
    }
}

static void make_side(rng *r, side *s, const tb_shape *shape, tb_reduce_op op, bool is_source, int32_t first_rank,
                      bool permuted) {
    s->mesh_ndim = (int)rng_range(r, 1, 3);
    s->nranks = 1;
    for (int i = 0; i < s->mesh_ndim; i++) {
        s->mesh[i] = rng_range(r, 1, 4);
        while (s->nranks * s->mesh[i] > 16)
            s->mesh[i]--;
        s->nranks *= (int32_t)s->mesh[i];
    }
    int32_t rank = first_rank;
    for (int32_t m = 0; m < s->nranks; m++) {
        s->ranks[m] = rank;
        rank += permuted ? (int32_t)rng_range(r, 1, 2) : 1;
    }
    for (int32_t m = s->nranks - 1; m > 0 && permuted; m--) {
        int32_t other = (int32_t)rng_range(r, 0, m), swap = s->ranks[m];
        s->ranks[m] = s->ranks[other];
        s->ranks[other] = swap;
    }
    for (int i = 0; i < s->mesh_ndim; i++)
        make_placement(r, s, i, shape, op, is_source);
}

void random_case_make(random_case *c, uint64_t seed) {
    static const tb_dtype dtypes[] = {TB_BF16, TB_F32, TB_I64, TB_F8E4M3};
    rng r = {seed};
    memset(c, 0, sizeof *c);
    c->seed = seed;
    c->dtype = dtypes[rng_range(&r, 0, 3)];
    c->shape.ndim = (int)(rng_range(&r, 0, 9) == 0 ? rng_range(&r, 0, 6) : rng_range(&r, 1, 3));
    for (int d = 0, room = 400; d < c->shape.ndim; d++) {
        int64_t most = c->shape.ndim == 1 ? 40 : 12;
        c->shape.dim[d] = rng_range(&r, rng_range(&r, 0, 30) == 0 ? 0 : 1, most < room ? most : room);
        room /= c->shape.dim[d] ? (int)c->shape.dim[d] : 1;
    }
    tb_reduce_op src_op = (tb_reduce_op)rng_range(&r, 0, 4), dst_op = (tb_reduce_op)rng_range(&r, 0, 3);
    if (c->dtype == TB_I64) { /* avg of integers is refused */
        src_op = src_op == TB_SUM || src_op == TB_AVG ? TB_MIN : src_op;
        dst_op = dst_op == TB_SUM || dst_op == TB_AVG ? TB_MAX : dst_op;
    }
    src_op = src_op == TB_AVG ? TB_SUM : src_op;
    dst_op = dst_op == TB_AVG ? TB_SUM : dst_op;
    make_side(&r, &c->src, &c->shape, src_op, true, (int32_t)rng_range(&r, 0, 3), rng_range(&r, 0, 1));
    int32_t first = rng_range(&r, 0, 1) ? 40 : (int32_t)rng_range(&r, 0, 8);
    make_side(&r, &c->dst, &c->shape, dst_op, false, first, rng_range(&r, 0, 1));
    if (rng_range(&r, 0, 9) == 0 && c->src.nranks == c->dst.nranks) /* the same ranks in the same order */
        memcpy(c->dst.ranks, c->src.ranks, sizeof c->src.ranks);
}

tb_status side_layout(const side *s, tb_layout **out) {
    return tb_layout_create(s->mesh_ndim, s->mesh, s->ranks, s->place, out);
}

void random_case_print(const random_case *c) {
    printf("case %" PRIu64 ": shape", c->seed);
    for (int d = 0; d < c->shape.ndim; d++)
        printf("%c%" PRId64, d ? ',' : ' ', c->shape.dim[d]);
    printf(" dtype %s\n", tb_dtype_name(c->dtype));
    for (int i = 0; i < 2; i++) {
        tb_layout *layout;
        char *text;
        if (side_layout(i ? &c->dst : &c->src, &layout) == TB_OK) {
            if (tb_layout_format(layout, &text) == TB_OK) {
                printf("  %s '%s'\n", i ? "dst" : "src", text);
                free(text);
            }
            tb_layout_destroy(layout);
        }
    }
}
