/* Buckets become copies. A bucket is done in slices: so much at a time that the engine looks up between them, and, for
 * memory that has to be read first, so little that it is still in the cache when it is copied on. */
#include "exec/flow_inside.h"
#include "exec/workers.h"

#include "base/dtype.h"

#include <inttypes.h>
#include <string.h>

enum {
    SLICE_BYTES = 32 << 20,
    BOUNCE_BYTES = 1 << 20, /* for all that a slice reads */
    MAX_RANGES = 1024,      /* per read */
};

static int64_t max64(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static int64_t min64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Bytes from one element to another that is so many elements away. */
static int64_t distance(tb_dtype dtype, int64_t elements) {
    return tb_dtype_bits(dtype) == 4 ? elements / 2 : elements * (tb_dtype_bits(dtype) / 8);
}

static int64_t element_offset(const int64_t *strides, int ndim, const int64_t *start) {
    int64_t offset = 0;
    for (int d = 0; d < ndim; d++)
        offset += start[d] * strides[d];
    return offset;
}

size_t tb__box_offset(const tb_binding *binding, const tb_box *box) {
    return (size_t)distance(binding->dtype, element_offset(binding->strides, binding->shape.ndim, box->start));
}

int64_t tb__box_run(int ndim, const int64_t *len, const int64_t *strides, int *outer) {
    int64_t run = 1;
    int d = ndim;
    while (d > 0 && (strides[d - 1] == run || len[d - 1] == 1))
        run *= len[--d];
    *outer = d;
    return run;
}

void tb__box_run_start(int64_t n, int outer, const int64_t *len, const int64_t *start, int64_t *index) {
    for (int i = outer; i-- > 0;) {
        index[i] = start[i] + n % len[i];
        n /= len[i];
    }
}

char *tb__binding_at(const tb_binding *b, const int64_t *start) {
    return (char *)b->base + b->offset + distance(b->dtype, element_offset(b->strides, b->shape.ndim, start));
}

bool tb__flow_is_in_place(const tb__flow *flow, const tb_chunk *chunk) {
    const tb__flow_tensor *t = &flow->tensors[chunk->tensor];
    if (chunk->is_coded || t->is_gathered)
        return false;
    if (chunk->source != flow->o.rank || !chunk->is_target || chunk->ncontributors > 0 ||
        t->src.dtype != t->dst.dtype || chunk->wire_dtype != t->src.dtype ||
        tb__binding_at(&t->src, chunk->src.start) != tb__binding_at(&t->dst, chunk->dst.start))
        return false;
    for (int d = 0; d < chunk->ndim; d++) {
        if (chunk->len[d] > 1 && t->src.strides[d] != t->dst.strides[d])
            return false;
    }
    return true;
}

static int64_t nelements(const tb_chunk *chunk) {
    int64_t n = 1;
    for (int d = 0; d < chunk->ndim; d++)
        n *= chunk->len[d];
    return n;
}

static int64_t align64(int64_t n) {
    return (n + 63) / 64 * 64;
}

static int64_t raw_nbytes(const tb__flow *flow, const tb_chunk *chunk) {
    return align64(tb__dtype_bytes(flow->tensors[chunk->tensor].spec.src_dtype, nelements(chunk)));
}

int64_t tb__flow_raw_size(const tb__flow *flow, const tb_bucket *bucket) {
    const tb_ir *ir = flow->ir;
    int64_t nbytes = 0;
    for (size_t i = 0; i < bucket->nentries; i++)
        nbytes += raw_nbytes(flow, &ir->chunks[ir->entries[bucket->first_entry + i].chunk]);
    return nbytes;
}

/* ---- Slices --------------------------------------------------------------------------------------------------- */

/* How far a bucket has come. */
typedef struct cursor {
    size_t entry;
    int64_t row;        /* of the entry's chunk: see cut_dim */
    int64_t raw_offset; /* of the entry in a buffer of contributions */
} cursor;

/* A part of a chunk. */
typedef struct block {
    const tb_chunk *chunk;
    const tb_bucket_entry *entry;
    int64_t raw_offset;
    int64_t start[TB_MAX_DIMS], len[TB_MAX_DIMS]; /* in the chunk */
} block;

typedef struct reading {
    const char *owner;
    const tb_transport *transport;
    tb_remote *remote;
    size_t first_range, nranges;
    tb_piece piece;
} reading;

/* What is done with the lock free. */
typedef struct slice {
    TB_VEC(reading) readings;
    TB_VEC(tb_range) ranges;
    size_t bounce_used;
    int64_t nbytes; /* in the wire dtype */
} slice;

/* Rows are indices of the dims up to this one, counted together; so that one of them fits. -1: the chunk is one. */
static int cut_dim(const tb_chunk *chunk, int64_t element_bits, int64_t budget) {
    int64_t bits = element_bits;
    for (int d = chunk->ndim; d-- > 0;) {
        if (bits * chunk->len[d] > budget * 8)
            return d;
        bits *= chunk->len[d];
    }
    return -1;
}

static int64_t widest_bits(const tb__flow *flow, const tb_chunk *chunk) {
    const tb_tensor_spec *spec = &flow->tensors[chunk->tensor].spec;
    return max64(tb_dtype_bits(chunk->wire_dtype),
                 max64(tb_dtype_bits(spec->src_dtype), tb_dtype_bits(spec->dst_dtype)));
}

/* The next block of at most `room` bytes, but at least one row; false if not one row fits and `must` is not set. */
static bool next_block(const tb__flow *flow, const tb_bucket *bucket, cursor *at, int64_t budget, int64_t room,
                       bool must, block *out) {
    const tb_bucket_entry *entry = &flow->ir->entries[bucket->first_entry + at->entry];
    const tb_chunk *chunk = &flow->ir->chunks[entry->chunk];
    int64_t bits = widest_bits(flow, chunk), row_bits = bits, rows = 1, above = 1;
    int d = cut_dim(chunk, bits, budget);
    for (int i = d + 1; i < chunk->ndim; i++)
        row_bits *= chunk->len[i];
    for (int i = 0; i <= d; i++)
        above *= chunk->len[i];
    *out = (block){.chunk = chunk, .entry = entry, .raw_offset = at->raw_offset};
    memcpy(out->len, chunk->len, sizeof out->len);
    if (d >= 0) {
        int64_t inside = at->row % chunk->len[d], outer = at->row / chunk->len[d];
        rows = min64(chunk->len[d] - inside, room * 8 / row_bits);
        if (d == chunk->ndim - 1 && rows < chunk->len[d] - inside)
            rows -= rows % 64; /* whole bytes, and lines where it can be */
        if (rows <= 0 && !must)
            return false;
        if (rows <= 0)
            rows = min64(chunk->len[d] - inside, d == chunk->ndim - 1 ? 64 : 1);
        out->start[d] = inside;
        out->len[d] = rows;
        for (int i = d; i-- > 0;) {
            out->start[i] = outer % chunk->len[i];
            out->len[i] = 1;
            outer /= chunk->len[i];
        }
    } else if (row_bits > room * 8 && !must) {
        return false;
    }
    at->row += rows;
    if (at->row == above) {
        at->row = 0;
        at->entry++;
        at->raw_offset += raw_nbytes(flow, chunk);
    }
    return true;
}

/* ---- Ends ----------------------------------------------------------------------------------------------------- */

static void row_major(const tb_chunk *chunk, const int64_t *len, int64_t *strides) {
    int64_t stride = 1;
    for (int d = chunk->ndim; d-- > 0;) {
        strides[d] = stride;
        stride *= len[d];
    }
}

static bool add_ranges(slice *s, const place *p, tb_dtype dtype, const block *b, const int64_t *start) {
    const tb_chunk *chunk = b->chunk;
    int outer;
    int64_t run = tb__box_run(chunk->ndim, b->len, p->strides, &outer), count = 1, index[TB_MAX_DIMS];
    for (int i = 0; i < outer; i++)
        count *= b->len[i];
    memcpy(index, start, sizeof index);
    for (int64_t n = 0; n < count; n++) {
        tb__box_run_start(n, outer, b->len, start, index);
        int64_t offset = (int64_t)p->offset + distance(dtype, element_offset(p->strides, chunk->ndim, index));
        if (!tb__vec_push(&s->ranges, (tb_range){(size_t)offset, (size_t)tb__dtype_bytes(dtype, run)}))
            return false;
    }
    return true;
}

/* Where an end has the block, and how it is strided there. NULL: no memory. */
static char *locate(tb__flow *flow, slice *s, const end *e, const block *b, int64_t *strides) {
    const tb_chunk *chunk = b->chunk;
    const tb__flow_tensor *t = &flow->tensors[chunk->tensor];
    int64_t start[TB_MAX_DIMS] = {0};
    const tb_box *box = e->kind == END_TARGET ? &chunk->dst : &chunk->src;
    for (int d = 0; d < chunk->ndim; d++)
        start[d] = box->start[d] + b->start[d];
    if (e->kind == END_TARGET && t->is_gathered) { /* its band begins in the slot */
        row_major(chunk, t->dst.shape.dim, strides);
        if (t->spec.band)
            start[0] -= (int64_t)(chunk->group - t->spec.group) * t->spec.band;
        return tb__flow_slot(flow, chunk) + t->slot_offset +
               distance(t->spec.dst_dtype, element_offset(strides, chunk->ndim, start));
    }
    if (e->kind == END_SOURCE || e->kind == END_TARGET) {
        const tb_binding *binding = e->kind == END_SOURCE ? &t->src : &t->dst;
        memcpy(strides, binding->strides, sizeof binding->strides);
        return tb__binding_at(binding, start);
    }
    if (e->kind == END_BUCKET || e->kind == END_RAW) {
        row_major(chunk, chunk->len, strides);
        int64_t at = element_offset(strides, chunk->ndim, b->start);
        return e->kind == END_BUCKET ? e->buffer + b->entry->offset + distance(chunk->wire_dtype, at)
                                     : e->buffer + b->raw_offset + distance(t->spec.src_dtype, at);
    }
    const place *p = tb__member_place(e->member, chunk->tensor);
    tb_dtype dtype = t->spec.src_dtype;
    if (p->map) {
        memcpy(strides, p->strides, sizeof p->strides);
        return p->map + p->offset + distance(dtype, element_offset(p->strides, chunk->ndim, start));
    }
    int64_t n = 1;
    for (int d = 0; d < chunk->ndim; d++)
        n *= b->len[d];
    char *to = flow->bounce + s->bounce_used;
    size_t nbytes = (size_t)tb__dtype_bytes(dtype, n);
    reading r = {.owner = e->member->peer->label,
                 .transport = e->member->peer->transport,
                 .remote = p->remote,
                 .first_range = s->ranges.count};
    r.piece = (tb_piece){to, nbytes};
    if (!add_ranges(s, p, dtype, b, start))
        return NULL;
    r.nranges = s->ranges.count - r.first_range;
    if (!tb__vec_push(&s->readings, r))
        return NULL;
    s->bounce_used += (nbytes + 63) / 64 * 64;
    row_major(chunk, b->len, strides);
    return to;
}

static tb_status add_copy(tb__flow *flow, slice *s, const block *b, const end *from, size_t nfrom, const end *to) {
    const tb_chunk *chunk = b->chunk;
    const tb_tensor_spec *spec = &flow->tensors[chunk->tensor].spec;
    const void **src = tb__arena_alloc(&flow->copy_arena, nfrom, sizeof *src);
    int64_t(*strides)[TB_MAX_DIMS] = tb__arena_alloc(&flow->copy_arena, nfrom, sizeof *strides);
    if (!src || !strides)
        return TB_NO_MEMORY;
    tb__copy copy = {.ndim = chunk->ndim,
                     .nsrc = (uint32_t)nfrom,
                     .src = src,
                     .src_stride = (const int64_t(*)[TB_MAX_DIMS])strides,
                     .src_dtype = spec->src_dtype,
                     .wire_dtype = chunk->wire_dtype,
                     .dst_dtype = spec->dst_dtype,
                     .op = chunk->op,
                     .avg_divisor = chunk->ncontributors ? chunk->divisor : 1};
    memcpy(copy.len, b->len, sizeof copy.len);
    for (size_t i = 0; i < nfrom; i++) {
        memset(strides[i], 0, sizeof *strides);
        src[i] = locate(flow, s, &from[i], b, strides[i]);
        if (!src[i])
            return TB_NO_MEMORY;
    }
    copy.dst = locate(flow, s, to, b, copy.dst_stride);
    if (nfrom && from[0].kind == END_BUCKET) { /* reduced and cast to the wire dtype before */
        copy.src_dtype = chunk->wire_dtype;
        copy.avg_divisor = 1;
    }
    if (to->kind == END_BUCKET)
        copy.dst_dtype = chunk->wire_dtype;
    if (to->kind == END_RAW) { /* a contribution goes as it is */
        copy.wire_dtype = copy.dst_dtype = spec->src_dtype;
        copy.avg_divisor = 1;
    }
    return tb__vec_push(&flow->copies, copy) ? TB_OK : TB_NO_MEMORY;
}

/* ---- Buckets -------------------------------------------------------------------------------------------------- */

static bool has_to_read(const tb__flow *flow, const tb_bucket *bucket, const end *from, size_t nfrom) {
    const tb_chunk *first = &flow->ir->chunks[flow->ir->entries[bucket->first_entry].chunk];
    for (size_t i = 0; i < nfrom; i++) {
        const place *p = from[i].kind == END_FEEDER ? tb__member_place(from[i].member, first->tensor) : NULL;
        for (size_t j = 0; p && j < from[i].member->places.count; j++) {
            if (!from[i].member->places.item[j].map)
                return true;
        }
    }
    return false;
}

/* Fills the slice with what comes next. */
static tb_status fill_slice(tb__flow *flow, slice *s, const tb_bucket *bucket, cursor *at, const end *from,
                            size_t nfrom, const end *to, int64_t budget) {
    int64_t used = 0;
    flow->copies.count = 0;
    tb__arena_reset(&flow->copy_arena);
    s->readings.count = s->ranges.count = 0;
    s->bounce_used = 0;
    s->nbytes = 0;
    while (at->entry < bucket->nentries && used < budget && s->ranges.count < MAX_RANGES) {
        block b;
        if (!next_block(flow, bucket, at, budget, budget - used, flow->copies.count == 0 && used == 0, &b))
            break;
        int64_t n = 1;
        for (int d = 0; d < b.chunk->ndim; d++)
            n *= b.len[d];
        used += tb__dtype_bytes(TB_U8, (n * widest_bits(flow, b.chunk) + 7) / 8) + 64;
        s->nbytes += tb__dtype_bytes(b.chunk->wire_dtype, n);
        bool is_pull = to->kind == END_TARGET && nfrom == 1 && from[0].kind == END_FEEDER;
        if (is_pull && tb__flow_is_in_place(flow, b.chunk))
            continue;
        TB_TRY(add_copy(flow, s, &b, from, nfrom, to));
    }
    return TB_OK;
}

static tb_status run_slice(const tb__flow *flow, const slice *s) {
    for (size_t i = 0; i < s->readings.count; i++) {
        const reading *r = &s->readings.item[i];
        tb_status status =
            tb__transport_read(r->transport, r->remote, s->ranges.item + r->first_range, r->nranges, &r->piece, 1);
        if (status != TB_OK)
            return tb__fail_within(status, "%s", r->owner);
    }
    return tb__workers_run(flow->copies.item, flow->copies.count);
}

/* The bytes between chunks are zero, so that a bucket's bytes depend on its tensors only. */
static void clear_gaps(const tb__flow *flow, const tb_bucket *bucket, char *buffer) {
    const tb_bucket_entry *entry = &flow->ir->entries[bucket->first_entry];
    for (size_t i = 0; i + 1 < bucket->nentries; i++) {
        int64_t stop = entry[i].offset + entry[i].nbytes;
        memset(buffer + stop, 0, (size_t)(entry[i + 1].offset - stop));
    }
}

/* Whether the leg still wants what is being copied. */
static tb_status check_wanted(const tb__flow *flow, bool is_send) {
    const tb__leg *leg = is_send ? &flow->send : &flow->recv;
    if (leg->memory_invalidated)
        return tb__flow_check_memory(flow, is_send);
    return leg->is_cancelled ? tb__fail(TB_CANCELLED, "rank %" PRId32 " cancelled %s", flow->o.rank, flow->what)
                             : TB_OK;
}

static tb_status copy_plain(tb__flow *flow, bool is_send, const tb_bucket *bucket, const end *from, size_t nfrom,
                            end to, bool counts) {
    tb__leg *leg = is_send ? &flow->send : &flow->recv;
    bool reads = has_to_read(flow, bucket, from, nfrom);
    int64_t budget = reads ? BOUNCE_BYTES / (int64_t)nfrom : SLICE_BYTES;
    if (reads && !flow->bounce && !(flow->bounce = tb__malloc(2 * BOUNCE_BYTES, 1)))
        return TB_NO_MEMORY;
    if (to.kind == END_BUCKET)
        clear_gaps(flow, bucket, to.buffer);
    slice s = {0};
    cursor at = {0};
    tb_status status = TB_OK;
    while (status == TB_OK && at.entry < bucket->nentries) {
        status = fill_slice(flow, &s, bucket, &at, from, nfrom, &to, budget);
        if (status != TB_OK)
            break;
        tb__engine_unlock(flow->o.engine);
        status = run_slice(flow, &s);
        tb__engine_lock(flow->o.engine);
        if (counts)
            leg->bytes_done += s.nbytes;
        if (status == TB_OK)
            status = check_wanted(flow, is_send);
    }
    free(s.readings.item);
    free(s.ranges.item);
    return status;
}

/* What has no codec at one end travels as its elements. */
static tb_status check_elements(const tb__flow *flow, const tb_chunk *chunk) {
    int64_t n = 1;
    for (int d = 0; d < chunk->ndim; d++)
        n *= chunk->len[d];
    int64_t nbytes = tb__dtype_bytes(chunk->wire_dtype, n);
    if (nbytes == chunk->nbytes)
        return TB_OK;
    return tb__fail(TB_INVALID,
                    "tensor '%.100s' has a piece of %" PRId64
                    " bytes on the wire, but nothing converts it here, and its "
                    "elements have %" PRId64,
                    flow->tensors[chunk->tensor].spec.name, chunk->nbytes, nbytes);
}

/* One chunk of a coded bucket, as if it were alone in it. */
static tb_status code_entry(tb__flow *flow, bool is_send, const tb_bucket *bucket, size_t i, const end *from, end to) {
    const tb_bucket_entry *entry = &flow->ir->entries[bucket->first_entry + i];
    const tb_chunk *chunk = &flow->ir->chunks[entry->chunk];
    const tb__flow_tensor *t = &flow->tensors[chunk->tensor];
    bool packs = to.kind == END_BUCKET;
    if (packs ? !t->codec->pack : !t->codec->unpack) {
        tb_bucket alone = *bucket;
        alone.first_entry += i;
        alone.nentries = 1;
        TB_TRY(check_elements(flow, chunk));
        return copy_plain(flow, is_send, &alone, from, 1, to, false);
    }
    tb__engine_unlock(flow->o.engine);
    tb_status status = packs ? t->codec->pack(t->codec->arg, chunk, &t->src, to.buffer + entry->offset)
                             : t->codec->unpack(t->codec->arg, chunk, &t->dst, from->buffer + entry->offset);
    tb__engine_lock(flow->o.engine);
    return status == TB_OK ? TB_OK : tb__fail_within(status, "tensor '%.100s'", t->spec.name);
}

static tb_status copy_coded(tb__flow *flow, bool is_send, const tb_bucket *bucket, const end *from, end to,
                            bool counts) {
    tb__leg *leg = is_send ? &flow->send : &flow->recv;
    if (to.kind == END_BUCKET)
        clear_gaps(flow, bucket, to.buffer);
    for (size_t i = 0; i < bucket->nentries; i++) {
        TB_TRY(code_entry(flow, is_send, bucket, i, from, to));
        leg->bytes_done += counts ? flow->ir->entries[bucket->first_entry + i].nbytes : 0;
        TB_TRY(check_wanted(flow, is_send));
    }
    return TB_OK;
}

/* Of this rank with itself: by way of a buffer, as if it came from another. */
static tb_status copy_coded_local(tb__flow *flow, bool is_send, const tb_bucket *bucket, end to, bool counts) {
    char *buffer = tb__malloc((size_t)bucket->total_bytes, 1);
    if (!buffer)
        return TB_NO_MEMORY;
    end source = {.kind = END_SOURCE}, middle = {.kind = END_BUCKET, .buffer = buffer};
    tb_status status = copy_coded(flow, is_send, bucket, &source, middle, false);
    if (status == TB_OK)
        status = copy_coded(flow, is_send, bucket, &middle, to, counts);
    free(buffer);
    return status;
}

tb_status tb__flow_copy(tb__flow *flow, bool is_send, const tb_bucket *bucket, const end *from, size_t nfrom, end to,
                        bool counts) {
    flow->has_written |= to.kind == END_TARGET && !flow->o.shadow.is_used;
    if (!flow->ir->chunks[flow->ir->entries[bucket->first_entry].chunk].is_coded)
        return copy_plain(flow, is_send, bucket, from, nfrom, to, counts);
    if (from->kind == END_FEEDER && to.kind == END_TARGET)
        return copy_coded_local(flow, is_send, bucket, to, counts);
    end source = {.kind = END_SOURCE};
    return copy_coded(flow, is_send, bucket, from->kind == END_FEEDER ? &source : from, to, counts);
}

tb_status tb__flow_take_snapshot(tb__flow *flow) {
    size_t n = flow->o.ntensors;
    tb__arena_reset(&flow->copy_arena);
    flow->copies.count = 0;
    for (size_t i = 0; i < n; i++) {
        const tb_binding *live = &flow->snapshot_of[i], *to = &flow->tensors[i].src;
        const void **src = tb__arena_alloc(&flow->copy_arena, 1, sizeof *src);
        int64_t(*strides)[TB_MAX_DIMS] = tb__arena_alloc(&flow->copy_arena, 1, sizeof *strides);
        int64_t count;
        TB_TRY(tb_shape_size(&live->shape, live->dtype, &count, NULL));
        if (!src || !strides)
            return TB_NO_MEMORY;
        if (count == 0)
            continue;
        *src = tb__binding_at(live, (int64_t[TB_MAX_DIMS]){0});
        memcpy(strides, live->strides, sizeof *strides);
        tb__copy copy = {.ndim = live->shape.ndim,
                         .nsrc = 1,
                         .src = src,
                         .src_stride = (const int64_t(*)[TB_MAX_DIMS])strides,
                         .dst = tb__binding_at(to, (int64_t[TB_MAX_DIMS]){0}),
                         .src_dtype = live->dtype,
                         .wire_dtype = live->dtype,
                         .dst_dtype = live->dtype};
        memcpy(copy.len, live->shape.dim, sizeof copy.len);
        memcpy(copy.dst_stride, to->strides, sizeof copy.dst_stride);
        if (!tb__vec_push(&flow->copies, copy))
            return TB_NO_MEMORY;
    }
    tb__engine_unlock(flow->o.engine);
    tb_status status = tb__workers_run(flow->copies.item, flow->copies.count);
    tb__engine_lock(flow->o.engine);
    return status;
}
