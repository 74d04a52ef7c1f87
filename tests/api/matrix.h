/* Tensors of tests: matrices of 32-bit integers, whose elements tell version, place and tensor. */
#ifndef TB_TESTS_API_MATRIX_H
#define TB_TESTS_API_MATRIX_H

#include "tensorbus/plan.h"

#include <stdio.h>
#include <stdlib.h>

#define POISON 0xdeadbeefU
enum { IS_POISON = -1, IS_MIXED = -2 };

/* The part of one rank. */
typedef struct memory {
    bool is_shared; /* of tb_alloc */
    tb_local local;
    int64_t rows, columns;
    uint32_t seed;
    size_t count;
    uint32_t *data;
} memory;

static inline int64_t global_index(const tb_local *local, int dim, int64_t i) {
    for (size_t k = 0; k < local->nsegments[dim]; k++) {
        const tb_segment *s = &local->segments[dim][k];
        if (i < s->stop - s->start)
            return s->start + i;
        i -= s->stop - s->start;
    }
    return -1;
}

static inline uint32_t value_at(const memory *m, size_t i, uint32_t version) {
    int64_t width = m->local.shape.dim[1];
    int64_t row = global_index(&m->local, 0, (int64_t)i / width);
    int64_t column = global_index(&m->local, 1, (int64_t)i % width);
    return (version << 24) | (((uint32_t)(row * m->columns + column) + m->seed) & 0xffffff);
}

static inline int memory_content(const memory *m) {
    if (m->count == 0)
        return IS_MIXED;
    uint32_t version = m->data[0] >> 24;
    bool is_whole = true, is_poison = true;
    for (size_t i = 0; i < m->count; i++) {
        is_whole &= m->data[i] == value_at(m, i, version);
        is_poison &= m->data[i] == POISON;
    }
    return is_poison ? IS_POISON : is_whole ? (int)version : IS_MIXED;
}

static inline const char *content_name(int c, char text[16]) {
    if (c < 0)
        return c == IS_POISON ? "poison" : "mixed";
    snprintf(text, 16, "%d", c);
    return text;
}

static inline void memory_fill(memory *m, uint32_t version) {
    for (size_t i = 0; i < m->count; i++)
        m->data[i] = value_at(m, i, version);
}

static inline void memory_poison(memory *m) {
    for (size_t i = 0; i < m->count; i++)
        m->data[i] = POISON;
}

/* Poisoned. `tensor` is its name, which its elements depend on. */
static inline tb_status memory_create(bool is_shared, const char *layout, int32_t seat, int64_t rows, int64_t columns,
                                      const char *tensor, memory **out) {
    memory *m = calloc(1, sizeof *m);
    tb_layout *parsed = NULL;
    tb_shape shape = {.ndim = 2, .dim = {rows, columns}};
    *m = (memory){.is_shared = is_shared, .rows = rows, .columns = columns};
    for (const char *c = tensor; *c; c++)
        m->seed = m->seed * 31 + (uint32_t)*c * 7919;
    tb_status status = tb_layout_parse(layout, &parsed);
    if (status == TB_OK)
        status = tb_layout_local(parsed, &shape, seat, &m->local);
    tb_layout_destroy(parsed);
    if (status == TB_OK) {
        m->count = (size_t)(m->local.shape.dim[0] * m->local.shape.dim[1]);
        if (is_shared)
            status = tb_alloc(m->count * sizeof *m->data, (void **)&m->data);
        else
            m->data = malloc(m->count * sizeof *m->data + 1);
    }
    if (status != TB_OK) {
        free(m);
        return status;
    }
    memory_poison(m);
    *out = m;
    return TB_OK;
}

static inline void memory_destroy(memory *m) {
    tb_local_fini(&m->local);
    if (m->is_shared)
        tb_free(m->data);
    else
        free(m->data);
    free(m);
}

#endif
