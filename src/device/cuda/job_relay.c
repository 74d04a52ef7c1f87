/* Relays: moves that read memory of a GPU to which the one that does the move has no access. The GPU that has the
 * memory copies it to pinned host memory, and the move is done from there, a piece of limited size after the other. */
#include "device/cuda/job.h"

#include "base/dtype.h"
#include "base/int.h"

#include <string.h>

enum { PIECE_NBYTES = 16 << 20, ALIGNMENT = 256 };

typedef struct relay_builder {
    tb__job *job;
    tb__move_list in, work; /* of the relay that is being made */
    uint32_t part;
    char *memory;
    size_t used, nbytes; /* of the memory */
} relay_builder;

/* A move, and its operands that its GPU can't access. */
typedef struct far_move {
    const tb__move *move;
    const tb__cuda_far *far;
    size_t nfar;
    int packed;                 /* the dimension whose elements share bytes; -1: none */
    int64_t piece[TB_MAX_DIMS]; /* lengths of the piece that is copied at a time */
} far_move;

static size_t aligned(int64_t nbytes) {
    return (size_t)tb__align(nbytes, ALIGNMENT);
}

static int64_t count_elements(const tb__move *move, const int64_t *len) {
    int64_t n = 1;
    for (int d = 0; d < move->ndim; d++)
        n *= len[d];
    return n;
}

/* As many of the outer dimensions as fit. Only copies can be cut. */
static void choose_piece(far_move *f) {
    const tb__move *m = f->move;
    unsigned bits = tb_dtype_bits(m->src_dtype);
    memcpy(f->piece, m->len, sizeof f->piece);
    f->packed = bits == 4 || tb_dtype_bits(m->dst_dtype) == 4 ? tb__move_packed_dim(m) : -1;
    if (m->kind != TB__MOVE_COPY)
        return;
    int64_t n = count_elements(m, m->len), most = (int64_t)PIECE_NBYTES * 8 / (bits * (int64_t)f->nfar);
    for (int d = 0; d < m->ndim && n > most; d++) {
        if (d == f->packed)
            continue;
        n /= m->len[d];
        int64_t fit = most / n;
        f->piece[d] = fit < 1 ? 1 : tb__min64(fit, m->len[d]);
        n *= f->piece[d];
    }
}

static size_t operand_nbytes(const far_move *f, int source, const int64_t *len) {
    const tb__quantised *q = f->move->quantised;
    tb__quant_size size;
    if (source >= 0)
        return aligned(tb__dtype_bytes(f->move->src_dtype, count_elements(f->move, len)));
    if (source == TB__FAR_SCALE)
        return ALIGNMENT;
    if (!q || tb__quant_measure(&q->format, q->rows, q->columns, &size) != TB_OK)
        return 0; /* it was measured before */
    return aligned(source == TB__FAR_DATA ? size.data_nbytes : size.scale_nbytes);
}

static size_t piece_nbytes(const far_move *f, const int64_t *len) {
    size_t nbytes = 0;
    for (size_t i = 0; i < f->nfar; i++)
        nbytes += operand_nbytes(f, f->far[i].source, len);
    return nbytes;
}

/* Ends the relay that is being made. */
static tb_status add_relay(relay_builder *b) {
    tb__cuda_relay relay = {.part = b->part};
    tb_status status = TB_OK;
    if (b->work.moves.count > 0) {
        status = tb__vec_reserve(&b->job->relays, 1) ? TB_OK : TB_NO_MEMORY;
        if (status == TB_OK)
            status = tb__cuda_prepare(b->job->device, b->in.moves.item, b->in.moves.count, &relay.in);
        if (status == TB_OK)
            status = tb__cuda_prepare(b->job->device, b->work.moves.item, b->work.moves.count, &relay.work);
        if (status == TB_OK)
            b->job->relays.item[b->job->relays.count++] = relay;
        else
            tb__cuda_release(b->job->device, relay.in);
    }
    tb__move_list_fini(&b->in);
    tb__move_list_fini(&b->work);
    b->in = b->work = (tb__move_list){0};
    b->used = 0;
    return status;
}

static int64_t offset_of(const tb__move *m, const int64_t *start, const int64_t *stride, tb_dtype dtype) {
    int64_t elements = 0;
    for (int d = 0; d < m->ndim; d++)
        elements += start[d] * stride[d];
    return tb__dtype_offset(dtype, elements);
}

/* Elements that share bytes lie side by side. */
static void set_strides(const far_move *f, const int64_t *len, int64_t *strides) {
    int64_t stride = 1;
    if (f->packed >= 0) {
        strides[f->packed] = 1;
        stride = len[f->packed];
    }
    for (int d = f->move->ndim; d-- > 0;) {
        if (d == f->packed)
            continue;
        strides[d] = stride;
        stride *= len[d];
    }
}

/* Copies a box of a source to the relay's memory, and makes that the source of the move. */
static tb_status bring_source(relay_builder *b, const far_move *f, uint32_t k, tb__move *work) {
    const tb__move *m = f->move;
    const void **src = (const void **)(uintptr_t)work->src;
    int64_t(*strides)[TB_MAX_DIMS] = (int64_t(*)[TB_MAX_DIMS])(uintptr_t)work->src_stride;
    tb__mapping **mapping = (tb__mapping **)(uintptr_t)work->src_mapping;
    const void *from = src[k];
    tb__move in = {.ndim = m->ndim,
                   .dst = b->memory + b->used,
                   .nsrc = 1,
                   .src = &from,
                   .src_stride = &m->src_stride[k],
                   .src_mapping = m->src_mapping ? &m->src_mapping[k] : NULL,
                   .src_dtype = m->src_dtype,
                   .wire_dtype = m->src_dtype,
                   .dst_dtype = m->src_dtype};
    memcpy(in.len, work->len, sizeof in.len);
    set_strides(f, work->len, in.dst_stride);
    TB_TRY(tb__move_list_add(&b->in, &in));
    b->used += operand_nbytes(f, (int)k, work->len);
    src[k] = in.dst;
    memcpy(strides[k], in.dst_stride, sizeof *strides);
    if (mapping)
        mapping[k] = NULL;
    return TB_OK;
}

static tb_status bring_bytes(relay_builder *b, const void *from, size_t nbytes, void **out) {
    static const int64_t unit[1][TB_MAX_DIMS] = {{1}};
    tb__move in = {.ndim = 1,
                   .len = {(int64_t)nbytes},
                   .dst = b->memory + b->used,
                   .dst_stride = {1},
                   .nsrc = 1,
                   .src = &from,
                   .src_stride = unit,
                   .src_dtype = TB_U8,
                   .wire_dtype = TB_U8,
                   .dst_dtype = TB_U8};
    *out = in.dst;
    b->used += aligned((int64_t)nbytes);
    return tb__move_list_add(&b->in, &in);
}

/* Copies those parts of the quantised tensor that the GPU can't access. */
static tb_status bring_quantised(relay_builder *b, int source, tb__quantised *q) {
    tb__quant_size size;
    void *at;
    TB_TRY(tb__quant_measure(&q->format, q->rows, q->columns, &size));
    if (source == TB__FAR_DATA)
        return bring_bytes(b, q->data, (size_t)size.data_nbytes, &q->data);
    if (source == TB__FAR_SCALES)
        return bring_bytes(b, q->scales, (size_t)size.scale_nbytes, &q->scales);
    TB_TRY(bring_bytes(b, q->scale, sizeof *q->scale, &at));
    q->scale = at;
    return TB_OK;
}

/* Adds the piece of the move that begins at `start`. */
static tb_status add_piece(relay_builder *b, const far_move *f, const int64_t *start) {
    const tb__move *m = f->move;
    tb__quantised q = m->quantised ? *m->quantised : (tb__quantised){0};
    tb__move work = *m;
    work.part = 0;
    work.quantised = m->quantised ? &q : NULL;
    for (int d = 0; d < m->ndim; d++)
        work.len[d] = tb__min64(f->piece[d], m->len[d] - start[d]);
    size_t need = piece_nbytes(f, work.len);
    if (b->work.moves.count > 0 && (b->part != m->part || need > b->nbytes - b->used))
        TB_TRY(add_relay(b));
    b->part = m->part;
    work.dst = (void *)((uintptr_t)m->dst + (uintptr_t)offset_of(m, start, m->dst_stride, m->dst_dtype));
    const void **src = tb__memdup(m->src, m->nsrc, sizeof *src);
    int64_t(*strides)[TB_MAX_DIMS] = tb__memdup(m->src_stride, m->nsrc, sizeof *strides);
    tb__mapping **mapping = m->src_mapping ? tb__memdup(m->src_mapping, m->nsrc, sizeof *mapping) : NULL;
    tb_status status = src && strides && !mapping == !m->src_mapping ? TB_OK : TB_NO_MEMORY;
    work.src = src;
    work.src_stride = (const int64_t(*)[TB_MAX_DIMS])strides;
    work.src_mapping = mapping;
    for (uint32_t k = 0; k < m->nsrc && status == TB_OK; k++)
        src[k] = (const void *)((uintptr_t)m->src[k] + (uintptr_t)offset_of(m, start, m->src_stride[k], m->src_dtype));
    for (size_t i = 0; i < f->nfar && status == TB_OK; i++)
        status = f->far[i].source >= 0 ? bring_source(b, f, (uint32_t)f->far[i].source, &work)
                                       : bring_quantised(b, f->far[i].source, &q);
    if (status == TB_OK)
        status = tb__move_list_add(&b->work, &work);
    free(src);
    free(strides);
    free(mapping);
    return status;
}

static tb_status add_pieces(relay_builder *b, const far_move *f) {
    int64_t start[TB_MAX_DIMS] = {0};
    int d;
    do {
        TB_TRY(add_piece(b, f, start));
        for (d = f->move->ndim - 1; d >= 0; d--) {
            start[d] += f->piece[d];
            if (start[d] < f->move->len[d])
                break;
            start[d] = 0;
        }
    } while (d >= 0);
    return TB_OK;
}

static far_move next_move(const tb__cuda_far *far, size_t nfar) {
    far_move f = {.move = far->move, .far = far};
    while (f.nfar < nfar && far[f.nfar].move == far->move)
        f.nfar++;
    choose_piece(&f);
    return f;
}

tb_status tb__cuda_add_relays(tb__job *job, const tb__cuda_far *far, size_t nfar) {
    relay_builder b = {.job = job};
    size_t total = 0, largest = 0;
    for (size_t i = 0; i < nfar;) {
        far_move f = next_move(far + i, nfar - i);
        size_t piece = piece_nbytes(&f, f.piece);
        largest = piece > largest ? piece : largest;
        total = piece > SIZE_MAX - total ? SIZE_MAX : total + piece;
        i += f.nfar;
    }
    if (nfar == 0)
        return TB_OK;
    b.nbytes = tb__min_size(total, PIECE_NBYTES);
    b.nbytes = largest > b.nbytes ? largest : b.nbytes;
    TB_TRY(tb_alloc(b.nbytes, (void **)&job->relay_memory));
    b.memory = job->relay_memory;
    tb_status status = TB_OK;
    for (size_t i = 0; i < nfar && status == TB_OK;) {
        far_move f = next_move(far + i, nfar - i);
        status = add_pieces(&b, &f);
        i += f.nfar;
    }
    if (status == TB_OK)
        return add_relay(&b);
    tb__move_list_fini(&b.in);
    tb__move_list_fini(&b.work);
    return status;
}

void tb__cuda_free_relays(tb__job *job) {
    for (size_t i = 0; i < job->relays.count; i++) {
        tb__cuda_release(job->device, job->relays.item[i].in);
        tb__cuda_release(job->device, job->relays.item[i].work);
    }
    free(job->relays.item);
    tb_free(job->relay_memory);
}

static tb_status take_relays(size_t first, size_t last, tb__cuda_relay_list *out) {
    for (size_t i = first; i < last; i++) {
        if (!tb__vec_push(out, i))
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

tb_status tb__cuda_choose_relays(const tb__job *job, const tb__run *run, tb__cuda_relay_list *out) {
    if (!run->parts)
        return take_relays(0, job->relays.count, out);
    for (size_t i = 0; i < run->nparts && job->relays.count > 0; i++) {
        size_t first = 0, last;
        TB_BISECT(first, job->relays.count, job->relays.item[first].part >= run->parts[i]);
        for (last = first; last < job->relays.count && job->relays.item[last].part == run->parts[i];)
            last++;
        TB_TRY(take_relays(first, last, out));
    }
    return TB_OK;
}

tb__job *tb__cuda_relay_job(tb__job *job, size_t relay, bool is_in) {
    const tb__cuda_relay *r = &job->relays.item[relay];
    return is_in ? r->in : r->work;
}

bool tb__cuda_begin_relays(tb__job *job) {
    bool was_relaying = job->is_relaying;
    job->is_relaying = true;
    return !was_relaying;
}

void tb__cuda_end_relays(tb__job *job) {
    job->is_relaying = false;
}
