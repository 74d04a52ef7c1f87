/* Random moves, what they should do, and checks that they do that: shapes, casts, reductions. */
#include "device_conformance_inside.h"

#include "base/int.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static const tb_dtype floats[] = {TB_F32, TB_F16, TB_BF16, TB_F8E4M3, TB_F8E5M2, TB_F64};
static const tb_dtype integers[] = {TB_U8, TB_U16, TB_U32, TB_U64, TB_I8, TB_I16, TB_I32, TB_I64};
enum { NFLOATS = sizeof floats / sizeof *floats, NINTEGERS = sizeof integers / sizeof *integers };

static tb_dtype random_dtype(suite *s, bool is_float) {
    return is_float ? floats[rng_range(&s->g, 0, NFLOATS - 1)] : integers[rng_range(&s->g, 0, NINTEGERS - 1)];
}

void make_boxes(suite *s, boxes *b, size_t most_boxes, size_t area_nbytes) {
    *b = (boxes){0};
    /* What is moved has one end on the device. */
    bool is_dst_host = rng_range(&s->g, 0, 3) == 0, is_buffer_host = !is_dst_host && rng_range(&s->g, 0, 1);
    if (s->traits->nunits > 1) { /* a buffer must be where all units reach it */
        is_dst_host = false;
        is_buffer_host = true;
    }
    tb__device *owners[NAREAS] = {
        [AREA_DST] = is_dst_host ? s->host : s->device,
        [AREA_SRC] = s->device,
        [AREA_HOST_SRC] = s->host,
        [AREA_BUFFER] = is_buffer_host ? s->host : s->device,
    };
    for (int i = 0; i < NAREAS; i++) {
        b->areas[i] = make_area(s, owners[i], area_nbytes);
        fill_random(s, b->areas[i].image, area_nbytes);
    }
    memset(b->areas[AREA_DST].image, POISON, area_nbytes);
    b->used[AREA_BUFFER] = area_nbytes / 2; /* sources before that, destinations behind it */
    b->box = calloc(most_boxes, sizeof *b->box);
    assert_non_null(b->box);
}

void free_boxes(boxes *b) {
    for (int i = 0; i < NAREAS; i++)
        free_area(&b->areas[i]);
    free(b->box);
}

static bool is_packed(tb_dtype dtype) {
    return tb_dtype_bits(dtype) == 4;
}

static size_t bytes_of(int64_t elements, tb_dtype dtype) {
    return is_packed(dtype) ? (size_t)elements / 2 : (size_t)elements * number_size(dtype);
}

static void choose_shape(suite *s, tb__move *m, int64_t most, int packed_dim) {
    rng *g = &s->g;
    int64_t n = 1;
    for (int d = 0; d < m->ndim; d++) {
        int64_t longest = rng_range(g, 0, 3) ? 5 : most < 10000 ? 200 : 3000;
        m->len[d] = rng_range(g, rng_range(g, 0, 30) ? 1 : 0, longest);
        if (d == packed_dim)
            m->len[d] *= 2;
        if (n * m->len[d] > most)
            m->len[d] = d == packed_dim ? 2 : 1;
        n *= m->len[d] ? m->len[d] : 1;
    }
}

/* Strides of one side, and how far they reach below and above the first element. */
static void choose_strides(suite *s, const tb__move *m, int packed_dim, bool is_source, int64_t *stride, int64_t *low,
                           int64_t *high) {
    rng *g = &s->g;
    int order[TB_MAX_DIMS];
    bool is_plain = rng_range(g, 0, 3) == 0; /* row-major, without gaps */
    for (int d = 0; d < m->ndim; d++)
        order[d] = m->ndim - 1 - d;
    for (int d = m->ndim - 1; !is_plain && d > 0; d--) {
        int other = (int)rng_range(g, 0, d), t = order[d];
        order[d] = order[other];
        order[other] = t;
    }
    int64_t step = is_plain || rng_range(g, 0, 5) ? 1 : rng_range(g, 2, 3);
    *low = *high = 0;
    if (packed_dim >= 0) {
        stride[packed_dim] = 1;
        *high = m->len[packed_dim] > 0 ? m->len[packed_dim] - 1 : 0;
        step = m->len[packed_dim] > 0 ? m->len[packed_dim] : 2;
    }
    for (int i = 0; i < m->ndim; i++) {
        int d = order[i];
        if (d == packed_dim)
            continue;
        stride[d] = !is_plain && rng_range(g, 0, 7) == 0 ? -step : step;
        if (is_source && rng_range(g, 0, 15) == 0)
            stride[d] = 0;
        int64_t reach = m->len[d] > 0 ? (m->len[d] - 1) * stride[d] : 0;
        *(reach < 0 ? low : high) += reach;
        step *= m->len[d] > 0 ? m->len[d] : 1;
        if (!is_plain && m->len[d] > 1 && rng_range(g, 0, 2) == 0)
            step += 2 * rng_range(g, 1, 5);
    }
}

/* Numbers that casts and reductions might get wrong, to the elements of a source. */
static void sprinkle(suite *s, const box *x, uint32_t k, uint8_t *image) {
    const tb__move *m = &x->move;
    int64_t index[TB_MAX_DIMS] = {0}, n = 1;
    for (int d = 0; d < m->ndim; d++)
        n *= m->len[d];
    for (int64_t i = 0; i < n; i++) {
        int64_t at = 0;
        for (int d = 0; d < m->ndim; d++)
            at += index[d] * x->src_stride[k][d];
        number_store(m->src_dtype, image + x->src_offset[k] + at * (int64_t)number_size(m->src_dtype),
                     number_random(m->src_dtype, &s->g));
        for (int d = m->ndim - 1; d >= 0 && ++index[d] == m->len[d]; d--)
            index[d] = 0;
    }
}

static size_t choose_offset(suite *s, size_t room, size_t nbytes, tb_dtype dtype) {
    assert_true(nbytes <= room);
    size_t offset = (size_t)rng_range(&s->g, 0, (int64_t)(room - nbytes));
    size_t size = is_packed(dtype) ? 1 : number_size(dtype);
    return rng_range(&s->g, 0, 5) ? offset - offset % size : offset; /* nothing must be aligned */
}

static void add_source(suite *s, boxes *b, box *x, const box_rules *rules, uint32_t k, int packed_dim) {
    tb__move *m = &x->move;
    int64_t low, high;
    bool any = rules->src_area < 0;
    int i = x->src_area[k] = any ? (rng_range(&s->g, 0, 1) ? AREA_SRC : AREA_HOST_SRC) : rules->src_area;
    if (rules->is_contiguous) {
        x->src_stride[k][0] = 1;
        low = 0;
        high = rules->most - 1;
    } else {
        choose_strides(s, m, packed_dim, true, x->src_stride[k], &low, &high);
    }
    size_t room = i == AREA_BUFFER ? b->areas[i].nbytes / 2 : b->areas[i].nbytes;
    size_t offset = choose_offset(s, room, bytes_of(high - low + 1, m->src_dtype), m->src_dtype);
    x->src_offset[k] = offset + bytes_of(-low, m->src_dtype);
    x->src[k] = i == AREA_BUFFER ? (void *)x->src_offset[k] : b->areas[i].at + x->src_offset[k];
    if (!is_packed(m->src_dtype) && rng_range(&s->g, 0, 3))
        sprinkle(s, x, k, b->areas[i].image);
}

void add_box(suite *s, boxes *b, const box_rules *rules, uint32_t part) {
    box *x = &b->box[b->n++];
    tb__move *m = &x->move;
    int64_t low = 0, high = rules->most - 1;
    int packed_dim = -1;
    *x = (box){.move = {.part = part,
                        .nsrc = rules->nsrc,
                        .src_dtype = rules->src_dtype,
                        .wire_dtype = rules->wire_dtype,
                        .dst_dtype = rules->dst_dtype,
                        .op = rules->op,
                        .avg_divisor = rules->divisor,
                        .src_mapping = rules->src_area == AREA_BUFFER ? in_buffer : NULL,
                        .is_dst_in_buffer = rules->dst_area == AREA_BUFFER},
               .dst_area = rules->dst_area};
    if (rules->is_contiguous) {
        m->ndim = 1;
        m->len[0] = rules->most;
        m->dst_stride[0] = 1;
    } else {
        m->ndim = (int)rng_range(&s->g, is_packed(m->dst_dtype), TB_MAX_DIMS);
        if (is_packed(m->dst_dtype))
            packed_dim = (int)rng_range(&s->g, 0, m->ndim - 1);
        choose_shape(s, m, rules->most, packed_dim);
        choose_strides(s, m, packed_dim, false, m->dst_stride, &low, &high);
    }
    for (uint32_t k = 0; k < m->nsrc; k++)
        add_source(s, b, x, rules, k, packed_dim);
    m->src = x->src;
    m->src_stride = (const int64_t(*)[TB_MAX_DIMS])x->src_stride;
    area *dst = &b->areas[x->dst_area];
    size_t nbytes = bytes_of(high - low + 1, m->dst_dtype), gap = (size_t)rng_range(&s->g, 0, 70);
    b->used[x->dst_area] += gap;
    assert_true(nbytes <= dst->nbytes - b->used[x->dst_area]);
    x->dst_offset = b->used[x->dst_area] + bytes_of(-low, m->dst_dtype);
    b->used[x->dst_area] += nbytes;
    m->dst = m->is_dst_in_buffer ? (void *)x->dst_offset : dst->at + x->dst_offset;
}

box_rules random_rules(suite *s, const boxes *b, int64_t most) {
    rng *g = &s->g;
    box_rules r = {.nsrc = 1, .most = most, .src_area = -1};
    int64_t kind = rng_range(g, 0, 9);
    if (kind < 5) {
        r.src_dtype = r.wire_dtype = r.dst_dtype = (tb_dtype)rng_range(g, TB_BOOL, TB_DTYPE_COUNT - 1);
        r.nsrc = kind > 0;
    } else {
        bool is_float = rng_range(g, 0, 3) > 0;
        r.src_dtype = random_dtype(s, is_float);
        r.wire_dtype = random_dtype(s, is_float);
        r.dst_dtype = random_dtype(s, is_float);
        if (kind > 7) {
            r.nsrc = (uint32_t)rng_range(g, 2, rng_range(g, 0, 3) ? 4 : MOST_SOURCES);
            r.op = (tb_reduce_op)rng_range(g, 0, TB_PRODUCT);
        }
    }
    /* One end at least is the device's. */
    bool is_dst_host = b->areas[AREA_DST].owner == s->host, is_buffer_host = b->areas[AREA_BUFFER].owner == s->host;
    r.dst_area = rng_range(g, 0, 3) ? AREA_DST : AREA_BUFFER;
    bool ends_on_host = r.dst_area == AREA_DST ? is_dst_host : is_buffer_host;
    if (rng_range(g, 0, 3) == 0 && (s->is_host || !(ends_on_host && is_buffer_host)))
        r.src_area = AREA_BUFFER;
    else if (ends_on_host && !s->is_host)
        r.src_area = AREA_SRC;
    if (ends_on_host && !s->is_host && r.nsrc == 0)
        r.nsrc = 1;
    return r;
}

static unsigned load_half(const uint8_t *image, size_t offset, int64_t element) {
    uint8_t byte = image[(int64_t)offset + (element >> 1)];
    return element & 1 ? byte >> 4 : byte & 15;
}

static void store_half(uint8_t *image, size_t offset, int64_t element, unsigned half) {
    uint8_t *byte = &image[(int64_t)offset + (element >> 1)];
    *byte = (uint8_t)(element & 1 ? (*byte & 15) | half << 4 : (*byte & 0xf0) | half);
}

static int64_t element_of(const tb__move *m, const int64_t *index, const int64_t *stride) {
    int64_t at = 0;
    for (int d = 0; d < m->ndim; d++)
        at += index[d] * stride[d];
    return at;
}

static void evaluate_element(const box *x, const int64_t *index, uint8_t *const *images) {
    const tb__move *m = &x->move;
    uint64_t bits[MOST_SOURCES] = {0}, result = 0;
    int64_t to = element_of(m, index, m->dst_stride);
    if (is_packed(m->dst_dtype)) {
        int64_t from = element_of(m, index, x->src_stride[0]);
        unsigned half = m->nsrc ? load_half(images[x->src_area[0]], x->src_offset[0], from) : 0;
        store_half(images[x->dst_area], x->dst_offset, to, half);
        return;
    }
    for (uint32_t k = 0; k < m->nsrc; k++) {
        int64_t at = element_of(m, index, x->src_stride[k]) * (int64_t)number_size(m->src_dtype);
        bits[k] = number_load(m->src_dtype, images[x->src_area[k]] + x->src_offset[k] + at);
    }
    bool is_copy =
        m->nsrc == 1 && m->avg_divisor <= 1 && m->src_dtype == m->wire_dtype && m->wire_dtype == m->dst_dtype;
    if (is_copy)
        result = bits[0];
    else if (m->nsrc)
        result = number_reduce(m->src_dtype, m->wire_dtype, m->dst_dtype, m->op, m->avg_divisor, bits, m->nsrc);
    number_store(m->dst_dtype, images[x->dst_area] + x->dst_offset + to * (int64_t)number_size(m->dst_dtype), result);
}

void evaluate_box(const box *x, uint8_t *const *images) {
    int64_t index[TB_MAX_DIMS] = {0};
    int d;
    if (tb__move_is_empty(&x->move))
        return;
    do {
        evaluate_element(x, index, images);
        for (d = x->move.ndim - 1; d >= 0 && ++index[d] == x->move.len[d]; d--)
            index[d] = 0;
    } while (d >= 0);
}

tb__job *prepare_boxes(suite *s, const boxes *b) {
    tb__move *moves = malloc((b->n + 1) * sizeof *moves);
    tb__job *job;
    assert_non_null(moves);
    for (size_t i = 0; i < b->n; i++)
        moves[i] = b->box[i].move;
    assert_ok(s->device->ops->prepare(s->device, moves, b->n, &job));
    memset(moves, POISON, b->n * sizeof *moves); /* they were copied */
    free(moves);
    return job;
}

void put_boxes(suite *s, boxes *b) {
    memset(b->areas[AREA_DST].image, POISON, b->areas[AREA_DST].nbytes);
    for (int i = 0; i < NAREAS; i++)
        put_area(s, &b->areas[i]);
}

void check_boxes(suite *s, boxes *b, const char *what) {
    static const char *const names[NAREAS] = {"destination", "source", "source in host memory", "buffer"};
    char text[128];
    for (int i = 0; i < NAREAS; i++) {
        snprintf(text, sizeof text, "%s, %s", what, names[i]);
        check_area(s, &b->areas[i], text);
    }
}

/* Runs all boxes at once and checks every byte of all areas. */
static void run_boxes(suite *s, boxes *b, const char *what) {
    uint8_t *images[NAREAS];
    tb__fence fence = {0};
    put_boxes(s, b);
    tb__job *job = prepare_boxes(s, b);
    assert_ok(s->device->ops->run(
        s->device, job, &(tb__run){.src_buffer = b->areas[AREA_BUFFER].at, .dst_buffer = b->areas[AREA_BUFFER].at},
        &fence));
    for (int i = 0; i < NAREAS; i++)
        images[i] = b->areas[i].image;
    for (size_t i = 0; i < b->n; i++)
        evaluate_box(&b->box[i], images);
    wait_for_one(s, &fence);
    if (fence.status != TB_OK)
        fail_msg("%s: %s", tb_status_string(fence.status), fence.why);
    check_boxes(s, b, what);
    s->device->ops->release(s->device, job);
}

void check_moves(suite *s) {
    boxes b;
    int64_t cases = test_cases(160 / LESS);
    for (int64_t c = 0; c < cases; c++) {
        bool is_large = c % 40 == 39; /* several pieces, past the cache */
        size_t n = is_large ? 2 : (size_t)rng_range(&s->g, 0, 12);
        make_boxes(s, &b, n + 1, is_large ? (size_t)24 << 20 : (size_t)1 << 20);
        for (size_t i = 0; i < n; i++) {
            box_rules r = random_rules(s, &b, is_large ? 100000 : 700);
            add_box(s, &b, &r, (uint32_t)rng_range(&s->g, 0, 3));
        }
        run_boxes(s, &b, "a random job");
        free_boxes(&b);
    }
}

/* A move of a matrix, whose rows have gaps between them, from the same or, transposed, from columns. Mostly aligned. */
static void add_matrix(suite *s, boxes *b, const box_rules *rules, int64_t rows, int64_t columns, bool is_transposed) {
    box *x = &b->box[b->n++];
    int64_t unit = rng_range(&s->g, 0, 3) ? 16 : 1, gap = unit * rng_range(&s->g, 1, 3);
    int64_t dst_step = tb__align(columns + gap, unit);
    int64_t src_step = tb__align((is_transposed ? rows : columns) + gap, unit);
    x->move = (tb__move){.ndim = 2,
                         .len = {rows, columns},
                         .dst_stride = {dst_step, 1},
                         .nsrc = rules->nsrc,
                         .op = rules->op,
                         .src_dtype = rules->src_dtype,
                         .wire_dtype = rules->wire_dtype,
                         .dst_dtype = rules->dst_dtype,
                         .src = x->src,
                         .src_stride = (const int64_t(*)[TB_MAX_DIMS])x->src_stride};
    area *src = &b->areas[AREA_SRC], *dst = &b->areas[AREA_DST];
    int64_t src_nbytes = (is_transposed ? columns : rows) * src_step * (int64_t)number_size(rules->src_dtype);
    for (uint32_t k = 0; k < rules->nsrc; k++) {
        int64_t offset = rng_range(&s->g, 0, (int64_t)src->nbytes - src_nbytes);
        x->src_area[k] = AREA_SRC;
        x->src_offset[k] = (size_t)(offset - offset % unit);
        x->src[k] = src->at + x->src_offset[k];
        x->src_stride[k][0] = is_transposed ? 1 : src_step;
        x->src_stride[k][1] = is_transposed ? src_step : 1;
    }
    x->dst_area = AREA_DST;
    x->dst_offset = (size_t)tb__align((int64_t)b->used[AREA_DST], unit);
    x->move.dst = dst->at + x->dst_offset;
    b->used[AREA_DST] = x->dst_offset + (size_t)(rows * dst_step) * number_size(rules->dst_dtype);
    assert_true(b->used[AREA_DST] <= dst->nbytes);
}

/* What is large enough for a device to have other ways for it: rows, sums of few, casts, transposes. */
void check_matrices(suite *s) {
    static const tb_dtype dtypes[] = {TB_U8, TB_I16, TB_F32, TB_I64};
    boxes b;
    for (int pass = 0; pass < (LESS > 1 ? 1 : 3); pass++) {
        make_boxes(s, &b, 13 + 2 * NFLOATS * NFLOATS, (size_t)24 << 20);
        for (int i = 0; i < 4; i++) { /* by the bytes of an element */
            box_rules r = {.src_dtype = dtypes[i], .wire_dtype = dtypes[i], .dst_dtype = dtypes[i], .nsrc = 1};
            int64_t size = 16 * rng_range(&s->g, 5, 12);
            add_matrix(s, &b, &r, size, size, true);
            add_matrix(s, &b, &r, rng_range(&s->g, 16, 300), rng_range(&s->g, 16, 300), true);
            add_matrix(s, &b, &r, 70, rng_range(&s->g, 1000, 2000), false);
        }
        box_rules bytes = {.src_dtype = TB_U8, .wire_dtype = TB_U8, .dst_dtype = TB_U8, .nsrc = 1};
        add_matrix(s, &b, &bytes, 50, 16 * rng_range(&s->g, 1800, 2000), false);
        for (int src = 0; src < NFLOATS; src++) {
            for (int dst = 0; dst < NFLOATS; dst++) {
                bool has_wire = rng_range(&s->g, 0, 1);
                box_rules r = {.src_dtype = floats[src], .dst_dtype = floats[dst], .nsrc = 1};
                r.wire_dtype = has_wire ? floats[rng_range(&s->g, 0, NFLOATS - 1)] : floats[dst];
                add_matrix(s, &b, &r, 13, 16 * rng_range(&s->g, 80, 100), false);
                r.nsrc = (uint32_t)rng_range(&s->g, 2, 5);
                r.op = rng_range(&s->g, 0, 2) ? TB_SUM : (tb_reduce_op)rng_range(&s->g, 0, TB_PRODUCT);
                add_matrix(s, &b, &r, 3, 16 * rng_range(&s->g, 110, 140), false);
            }
        }
        run_boxes(s, &b, "matrices");
        free_boxes(&b);
    }
}

/* From each to each, by way of each. */
static void check_casts_among(suite *s, const tb_dtype *dtypes, size_t ndtypes) {
    boxes b;
    make_boxes(s, &b, ndtypes * ndtypes * ndtypes, (size_t)24 << 20);
    for (size_t src = 0; src < ndtypes; src++) {
        for (size_t wire = 0; wire < ndtypes; wire++) {
            for (size_t dst = 0; dst < ndtypes; dst++) {
                box_rules r = {.src_dtype = dtypes[src],
                               .wire_dtype = dtypes[wire],
                               .dst_dtype = dtypes[dst],
                               .nsrc = 1,
                               .most = 2000 / LESS,
                               .is_contiguous = true,
                               .src_area = AREA_SRC};
                add_box(s, &b, &r, 0);
            }
        }
    }
    run_boxes(s, &b, "casts");
    free_boxes(&b);
}

/* All casts by all wires, and of every number there is in 8 and 16 bits. */
void check_casts(suite *s) {
    boxes b;
    check_casts_among(s, floats, NFLOATS);
    check_casts_among(s, integers, NINTEGERS);
    static const tb_dtype narrow[] = {TB_F16, TB_BF16, TB_F8E4M3, TB_F8E5M2};
    make_boxes(s, &b, 4 * NFLOATS, (size_t)4 << 20);
    for (int src = 0; src < 4; src++) {
        for (int dst = 0; dst < NFLOATS; dst++) {
            size_t size = number_size(narrow[src]);
            box_rules r = {.src_dtype = narrow[src],
                           .wire_dtype = floats[dst],
                           .dst_dtype = floats[dst],
                           .nsrc = 1,
                           .most = size == 1 ? 256 : 65536,
                           .is_contiguous = true,
                           .src_area = AREA_SRC};
            add_box(s, &b, &r, 0);
        }
    }
    for (size_t i = 0; i < b.n; i++) { /* the source of all of one size is the same: all codes */
        box *x = &b.box[i];
        size_t size = number_size(x->move.src_dtype);
        x->src_offset[0] = size == 1 ? 0 : 256;
        x->src[0] = b.areas[AREA_SRC].at + x->src_offset[0];
        for (uint64_t code = 0; code < (uint64_t)x->move.len[0]; code++)
            number_store(x->move.src_dtype, b.areas[AREA_SRC].image + x->src_offset[0] + code * size, code);
    }
    run_boxes(s, &b, "all codes");
    free_boxes(&b);
}

void check_reductions(suite *s) {
    boxes b;
    for (int pass = 0; pass < (LESS > 1 ? 1 : 3); pass++) {
        make_boxes(s, &b, (NFLOATS + NINTEGERS) * MOST_SOURCES * (TB_PRODUCT + 1), (size_t)16 << 20);
        for (int i = 0; i < NFLOATS + NINTEGERS; i++) {
            bool is_float = i < NFLOATS;
            tb_dtype dtype = is_float ? floats[i] : integers[i - NFLOATS];
            for (uint32_t nsrc = 1; nsrc <= MOST_SOURCES; nsrc++) {
                for (tb_reduce_op op = 0; op <= TB_PRODUCT; op++) {
                    box_rules r = random_rules(s, &b, 300);
                    r.src_dtype = r.wire_dtype = r.dst_dtype = dtype;
                    if (rng_range(&s->g, 0, 1))
                        r.wire_dtype = random_dtype(s, is_float);
                    if (rng_range(&s->g, 0, 1))
                        r.dst_dtype = random_dtype(s, is_float);
                    r.nsrc = nsrc;
                    r.op = op;
                    r.is_contiguous = pass == 0;
                    if (is_float && (op == TB_SUM || op == TB_AVG) && rng_range(&s->g, 0, 1))
                        r.divisor = (uint64_t)rng_range(&s->g, 1, 50);
                    add_box(s, &b, &r, 0);
                }
            }
        }
        run_boxes(s, &b, "reductions");
        free_boxes(&b);
    }
}
