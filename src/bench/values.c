/* Values that tell where an element belongs: filling a rank's part, poisoning it, checking it.
 *
 * An element's value is a one-to-one mix of the low 16 bits of its global index under a key, which is a hash of
 * version, tensor and the index's other bits. So the inner loops work on 16-bit lanes with a constant key, and compile
 * to a few vector instructions. Numbers that are rounded or added on the way are made of this value. */
#include "bench/move.h"

#include <inttypes.h>
#include <string.h>

enum { BLOCK = 1 << 16 };

/* Elements that lie side by side in memory and in the tensor, in one block of indices. */
typedef struct stretch {
    char *data;
    size_t length;
    uint64_t first; /* global index */
    uint16_t low, key, last;
} stretch;

static stretch make_stretch(const tool_part *part, uint32_t version, char *data, uint64_t first, size_t length) {
    uint64_t x = ((uint64_t)version << 32 | part->number) * 0x9E3779B97F4A7C15u + first / BLOCK;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    x ^= x >> 31;
    return (stretch){.data = data,
                     .length = length,
                     .first = first,
                     .low = (uint16_t)first,
                     .key = (uint16_t)x,
                     .last = (uint16_t)(x >> 16)};
}

static inline uint16_t value_at(const stretch *s, size_t i) {
    uint16_t x = (uint16_t)((s->low + i) ^ s->key);
    x = (uint16_t)(x * 0x9E4Bu);
    x = (uint16_t)(x ^ x >> 7);
    x = (uint16_t)(x * 0xD6E9u);
    x = (uint16_t)(x ^ x >> 9);
    return (uint16_t)(x ^ s->last);
}

static inline uint32_t word_at(const stretch *s, size_t i) {
    return (uint32_t)value_at(s, i) << 16 | (uint16_t)(s->low + i);
}

static inline float float_at(const stretch *s, size_t i) {
    return (float)(word_at(s, i) >> 8);
}

static inline uint16_t term_at(const stretch *s, size_t i, uint32_t rank) {
    return (uint16_t)((value_at(s, i) ^ 11 * rank) & 31);
}

/* Of either sign, from 2^-15 to 2. */
static inline uint16_t finite_at(const stretch *s, size_t i) {
    uint16_t x = value_at(s, i);
    return (uint16_t)((x & 0x8000) + (112 << 7) + (x & 0x7ff));
}

/* To nearest, ties to even; for finite values. */
static inline uint16_t round_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline uint16_t sum_at(const stretch *s, size_t i, uint32_t nterms) {
    uint32_t sum = 0;
    for (uint32_t rank = 0; rank < nterms; rank++)
        sum += term_at(s, i, rank);
    return round_to_bf16((float)sum);
}

/* What the part must have there. The stretch is a copy, so that the compiler knows that it does not change. */
static void write_values(const tool_part *part, stretch s, void *to) {
    const tool_tensor *tensor = part->tensor;
    bool is_source = part->which == TOOL_SOURCE;
    uint32_t *words = to, rank = (uint32_t)part->rank, nterms = tensor->nterms;
    uint16_t *halves = to;
    float *floats = to;
    switch (tensor->values) {
    case TOOL_BITS:
        for (size_t i = 0; tb_dtype_bits(tensor->dtype[part->which]) == 32 && i < s.length; i++)
            words[i] = word_at(&s, i);
        for (size_t i = 0; tb_dtype_bits(tensor->dtype[part->which]) == 16 && i < s.length; i++)
            halves[i] = value_at(&s, i);
        break;
    case TOOL_FLOATS:
        for (size_t i = 0; is_source && i < s.length; i++)
            floats[i] = float_at(&s, i);
        for (size_t i = 0; !is_source && i < s.length; i++)
            halves[i] = round_to_bf16(float_at(&s, i));
        break;
    case TOOL_TERMS:
        for (size_t i = 0; is_source && i < s.length; i++)
            halves[i] = round_to_bf16(term_at(&s, i, rank));
        for (size_t i = 0; !is_source && i < s.length; i++)
            halves[i] = sum_at(&s, i, nterms);
        break;
    case TOOL_FINITE:
        for (size_t i = 0; i < s.length; i++)
            halves[i] = finite_at(&s, i);
        break;
    }
}

typedef struct walk {
    const tool_part *part;
    uint32_t version;
    size_t element; /* bytes */
    char *next;     /* local memory is row-major: it is walked from front to back */
    void (*visit)(struct walk *walk, const stretch *s);
    tool_wrong *wrong;
} walk;

/* In pieces that stay in the cache, for what is written and then looked at. */
enum { PIECE = 2048 };

static void visit_run(walk *w, uint64_t first, int64_t length) {
    while (length > 0) {
        int64_t n = PIECE - (int64_t)(first % PIECE); /* no piece is in two blocks */
        n = n < length ? n : length;
        stretch s = make_stretch(w->part, w->version, w->next, first, (size_t)n);
        w->visit(w, &s);
        w->next += s.length * w->element;
        first += (uint64_t)n;
        length -= n;
    }
}

/* `row` is the global index of what the dimensions before `dim` have chosen, in units of this one. */
static void walk_dim(walk *w, int dim, uint64_t row) {
    const tb_local *local = &w->part->local;
    const tb_shape *shape = &w->part->tensor->shape;
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

static void walk_part(const tool_part *part, uint32_t version, void (*visit)(walk *, const stretch *),
                      tool_wrong *wrong) {
    walk w = {.part = part, .version = version, .next = part->host, .visit = visit, .wrong = wrong};
    w.element = tb_dtype_bits(part->tensor->dtype[part->which]) / 8;
    if (part->nelements > 0)
        walk_dim(&w, 0, 0);
}

static void fill(walk *w, const stretch *s) {
    write_values(w->part, *s, s->data);
}

static void poison(walk *w, const stretch *s) {
    write_values(w->part, *s, s->data);
    for (size_t i = 0; i < s->length * w->element; i++)
        s->data[i] = (char)~s->data[i];
}

static uint32_t bits_at(const char *data, size_t i, size_t element) {
    uint32_t bits = 0;
    memcpy(&bits, data + i * element, element);
    return bits;
}

static void note_first(tool_wrong *wrong, const tb_shape *shape, uint64_t index) {
    for (int d = shape->ndim - 1; d >= 0; d--) {
        wrong->index[d] = (int64_t)(index % (uint64_t)shape->dim[d]);
        index /= (uint64_t)shape->dim[d];
    }
}

static void check(walk *w, const stretch *s) {
    uint32_t piece[PIECE];
    write_values(w->part, *s, piece);
    if (memcmp(s->data, piece, s->length * w->element) == 0)
        return;
    for (size_t i = 0; i < s->length; i++) {
        uint32_t right = bits_at((const char *)piece, i, w->element), found = bits_at(s->data, i, w->element);
        if (found == right || w->wrong->count++ > 0)
            continue;
        note_first(w->wrong, &w->part->tensor->shape, s->first + i);
        w->wrong->expected = right;
        w->wrong->found = found;
    }
}

/* Coded parts are compared byte by byte with what they are to be. */

static tb_status poison_coded(const tool_part *part, uint32_t version) {
    TB_TRY(tool_part_expect(part, version, part->host));
    char *bytes = part->host;
    for (int64_t i = 0; i < part->nbytes; i++)
        bytes[i] = (char)~bytes[i];
    return TB_OK;
}

static tb_status check_coded(const tool_part *part, uint32_t version) {
    const unsigned char *found = part->host;
    unsigned char *right = tb__malloc((size_t)part->nbytes + 1, 1);
    tb_status status = right ? tool_part_expect(part, version, right) : TB_NO_MEMORY;
    int64_t count = 0, first = -1;
    for (int64_t i = 0; status == TB_OK && i < part->nbytes; i++) {
        bool is_wrong = found[i] != right[i];
        count += is_wrong;
        first = is_wrong && first < 0 ? i : first;
    }
    if (count > 0)
        status = tb__fail(TB_INTERNAL,
                          "version %" PRIu32 " of %s is wrong at byte %" PRId64
                          " of this rank's: expected 0x%02x, found 0x%02x; %" PRId64 " of its %" PRId64
                          " bytes here are wrong",
                          version, part->tensor->name, first, right[first], found[first], count, part->nbytes);
    free(right);
    return status;
}

tb_status tool_part_fill(const tool_part *part, uint32_t version) {
    if (tool_part_is_coded(part))
        return tool_part_expect(part, version, part->host);
    walk_part(part, version, fill, NULL);
    return TB_OK;
}

tb_status tool_part_poison(const tool_part *part, uint32_t version) {
    if (tool_part_is_coded(part))
        return poison_coded(part, version);
    walk_part(part, version, poison, NULL);
    return TB_OK;
}

bool tool_part_check(const tool_part *part, uint32_t version, tool_wrong *wrong) {
    *wrong = (tool_wrong){0};
    walk_part(part, version, check, wrong);
    return wrong->count == 0;
}

static tb_status fail_wrong(const tool_part *part, uint32_t version, const tool_wrong *wrong) {
    tb__text index = {0};
    int ndigits = (int)tb_dtype_bits(part->tensor->dtype[part->which]) / 4;
    for (int d = 0; d < part->tensor->shape.ndim; d++)
        tb__text_add(&index, "%s%" PRId64, d ? "," : "", wrong->index[d]);
    tb_status status = tb__fail(TB_INTERNAL,
                                "version %" PRIu32 " of %s is wrong at [%s]: expected 0x%0*" PRIx32
                                ", found 0x%0*" PRIx32 "; %" PRId64 " of its %" PRId64 " elements here are wrong",
                                version, part->tensor->name, index.data ? index.data : "", ndigits, wrong->expected,
                                ndigits, wrong->found, wrong->count, part->nelements);
    tb__text_fini(&index);
    return status;
}

static tb_status check_part(const tool_part *part, uint32_t version) {
    tool_wrong wrong;
    if (tool_part_is_coded(part))
        return check_coded(part, version);
    return tool_part_check(part, version, &wrong) ? TB_OK : fail_wrong(part, version, &wrong);
}

tb_status tool_parts_check(const tool_parts *parts, uint32_t version, _Atomic int64_t *done) {
    TB_TRY(tool_mirror_get(&parts->mirror));
    for (size_t i = 0; i < parts->count; i++) {
        TB_TRY(check_part(&parts->part[i], version));
        atomic_fetch_add_explicit(done, parts->part[i].nbytes, memory_order_relaxed);
    }
    return TB_OK;
}
