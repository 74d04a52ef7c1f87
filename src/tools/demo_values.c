/* Values that tell where an element belongs: filling a rank's part, poisoning it, checking it.
 *
 * An element's value is a one-to-one mix of the low 16 bits of its global index under a key, which is a hash of
 * version, tensor and the index's other bits. So the inner loops work on 16-bit lanes with a constant key, and compile
 * to a few vector instructions. */
#include "tools/demo.h"

#include <inttypes.h>
#include <string.h>

enum { BLOCK = 1 << 16 };

static uint32_t block_key(uint32_t version, uint32_t tensor, uint64_t block) {
    uint64_t x = ((uint64_t)version << 32 | tensor) * 0x9E3779B97F4A7C15u + block;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return (uint32_t)(x ^ x >> 31);
}

static inline uint16_t value_of(uint16_t low, uint16_t key, uint16_t last) {
    uint16_t x = (uint16_t)(low ^ key);
    x = (uint16_t)(x * 0x9E4Bu);
    x = (uint16_t)(x ^ x >> 7);
    x = (uint16_t)(x * 0xD6E9u);
    x = (uint16_t)(x ^ x >> 9);
    return (uint16_t)(x ^ last);
}

/* Elements that lie side by side in memory and in the tensor, in one block of indices. */
typedef struct stretch {
    uint16_t *data;
    int64_t length;
    uint64_t first; /* global index */
    uint16_t low, key, last;
} stretch;

typedef struct walk {
    const tool_part *part;
    uint32_t version;
    uint16_t *next; /* local memory is row-major: it is walked from front to back */
    void (*visit)(struct walk *walk, const stretch *s);
    tool_wrong *wrong;
} walk;

static void visit_run(walk *w, uint64_t first, int64_t length) {
    while (length > 0) {
        int64_t left = BLOCK - (int64_t)(first % BLOCK);
        uint32_t key = block_key(w->version, w->part->tensor, first / BLOCK);
        stretch s = {.data = w->next,
                     .length = length < left ? length : left,
                     .first = first,
                     .low = (uint16_t)first,
                     .key = (uint16_t)key,
                     .last = (uint16_t)(key >> 16)};
        w->visit(w, &s);
        w->next += s.length;
        first += (uint64_t)s.length;
        length -= s.length;
    }
}

/* `row` is the global index of what the dimensions before `dim` have chosen, in units of this one. */
static void walk_dim(walk *w, int dim, uint64_t row) {
    const tb_local *local = &w->part->local;
    const tb_shape *shape = &w->part->weight->shape;
    if (dim == shape->ndim) { /* a scalar */
        visit_run(w, row, 1);
        return;
    }
    uint64_t base = row * (uint64_t)shape->dim[dim];
    for (size_t i = 0; i < local->nsegments[dim]; i++) {
        tb_segment s = local->segments[dim][i];
        if (dim + 1 == shape->ndim) {
            visit_run(w, base + (uint64_t)s.start, s.stop - s.start);
            continue;
        }
        for (int64_t at = s.start; at < s.stop; at++)
            walk_dim(w, dim + 1, base + (uint64_t)at);
    }
}

static void walk_part(walk *w) {
    if (w->part->nelements > 0)
        walk_dim(w, 0, 0);
}

static void write_values(uint16_t *restrict data, int64_t n, uint16_t low, uint16_t key, uint16_t last) {
    for (int64_t i = 0; i < n; i++)
        data[i] = value_of((uint16_t)(low + (uint16_t)i), key, last);
}

static void fill(walk *w, const stretch *s) {
    (void)w;
    write_values(s->data, s->length, s->low, s->key, s->last);
}

static void poison(walk *w, const stretch *s) {
    (void)w;
    write_values(s->data, s->length, s->low, s->key, (uint16_t)~s->last);
}

static uint16_t compare_values(const uint16_t *restrict data, int64_t n, uint16_t low, uint16_t key, uint16_t last) {
    uint16_t difference = 0;
    for (int64_t i = 0; i < n; i++)
        difference = (uint16_t)(difference | (data[i] ^ value_of((uint16_t)(low + (uint16_t)i), key, last)));
    return difference;
}

static void note_first(const walk *w, const stretch *s, int64_t i, uint16_t expected) {
    const tb_shape *shape = &w->part->weight->shape;
    uint64_t index = s->first + (uint64_t)i;
    for (int d = shape->ndim - 1; d >= 0; d--) {
        w->wrong->index[d] = (int64_t)(index % (uint64_t)shape->dim[d]);
        index /= (uint64_t)shape->dim[d];
    }
    w->wrong->expected = expected;
    w->wrong->found = s->data[i];
}

static void check(walk *w, const stretch *s) {
    if (compare_values(s->data, s->length, s->low, s->key, s->last) == 0)
        return;
    for (int64_t i = 0; i < s->length; i++) {
        uint16_t expected = value_of((uint16_t)(s->low + (uint16_t)i), s->key, s->last);
        if (s->data[i] == expected)
            continue;
        if (w->wrong->count++ == 0)
            note_first(w, s, i, expected);
    }
}

void tool_part_fill(const tool_part *part, uint32_t version, void *data) {
    walk_part(&(walk){.part = part, .version = version, .next = data, .visit = fill});
}

void tool_part_poison(const tool_part *part, uint32_t version, void *data) {
    walk_part(&(walk){.part = part, .version = version, .next = data, .visit = poison});
}

bool tool_part_check(const tool_part *part, uint32_t version, const void *data, tool_wrong *wrong) {
    *wrong = (tool_wrong){0};
    walk_part(&(walk){.part = part, .version = version, .next = (uint16_t *)data, .visit = check, .wrong = wrong});
    return wrong->count == 0;
}

static tb_status fail_wrong(const tool_part *part, uint32_t version, const tool_wrong *wrong) {
    tb__text index = {0};
    for (int d = 0; d < part->weight->shape.ndim; d++)
        tb__text_add(&index, "%s%" PRId64, d ? "," : "", wrong->index[d]);
    tb_status status = tb__fail(TB_INTERNAL,
                                "version %" PRIu32 " of %s is wrong at [%s]: expected 0x%04x, found 0x%04x; %" PRId64
                                " of its %" PRId64 " elements here are wrong",
                                version, part->weight->name, index.data ? index.data : "", wrong->expected,
                                wrong->found, wrong->count, part->nelements);
    tb__text_fini(&index);
    return status;
}

tb_status tool_parts_check(const tool_parts *parts, uint32_t version, const void *memory, _Atomic int64_t *done) {
    for (size_t i = 0; i < parts->count; i++) {
        const tool_part *part = &parts->part[i];
        tool_wrong wrong;
        if (!tool_part_check(part, version, (const char *)memory + part->offset, &wrong))
            return fail_wrong(part, version, &wrong);
        atomic_fetch_add_explicit(done, part->nelements * TOOL_ELEMENT, memory_order_relaxed);
    }
    return TB_OK;
}
