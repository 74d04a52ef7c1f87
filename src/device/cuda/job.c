/* Jobs of the CUDA device: moves become descriptors in memory of the GPU that does them, sorted by part. */
#include "device/cuda/job.h"

#include "base/dtype.h"
#include "base/int.h"

#include <string.h>

enum { DEFAULT_GPU = 0, FEW_SOURCES = 64, NO_GPU = -1 };

#define KERNEL_SHAPE(name, threads, blocks, slots) {threads, blocks, slots},
const tb__cuda_kernel_shape tb__cuda_kernel_shapes[TB__CUDA_NKERNELS] = {TB__CUDA_KERNELS(KERNEL_SHAPE)};

const char *const tb__cuda_kernel_names[TB__CUDA_NKERNELS] = {TB__CUDA_KERNELS(TB__CUDA_KERNEL_NAME)};

tb__cuda_divisor tb__cuda_divide_by(uint32_t by) {
    uint32_t log = 0;
    by = by ? by : 1;
    while (log < 31 && (uint32_t)1 << log < by)
        log++;
    return (tb__cuda_divisor){.by = by, .magic = (uint32_t)(((uint64_t)1 << (31 + log)) / by + 1), .shift = 31 + log};
}

void *tb__cuda_heap_add(tb__cuda_part_of_gpu *part, size_t nbytes, uint32_t *place) {
    nbytes = (size_t)tb__align((int64_t)nbytes, TB__CUDA_HEAP_UNIT);
    if (part->heap.count / TB__CUDA_HEAP_UNIT > UINT32_MAX - nbytes) {
        tb__set_detail("a job whose descriptors need %zu bytes", part->heap.count);
        return NULL;
    }
    if (!tb__vec_reserve(&part->heap, nbytes))
        return NULL;
    uint8_t *at = part->heap.item + part->heap.count;
    *place = (uint32_t)(part->heap.count / TB__CUDA_HEAP_UNIT);
    part->heap.count += nbytes;
    return memset(at, 0, nbytes);
}

tb_status tb__cuda_add_step(tb__job *job, uint32_t gpu, int kernel, uint32_t first, uint32_t count) {
    tb__cuda_step step = {.first = first, .count = count, .kernel = (uint16_t)kernel, .gpu = (uint16_t)gpu};
    return tb__vec_push(&job->steps, step) ? TB_OK : TB_NO_MEMORY;
}

static tb_status extend_stretches(tb__cuda_part_of_gpu *part, int kernel, tb__cuda_stretch next) {
    if (part->stretches[kernel].count) {
        const tb__cuda_stretch *last = &part->stretches[kernel].item[part->stretches[kernel].count - 1];
        if (last->place == next.place && last->tile + (next.first - last->first) == next.tile)
            return TB_OK;
    }
    return tb__vec_push(&part->stretches[kernel], next) ? TB_OK : TB_NO_MEMORY;
}

tb_status tb__cuda_add_tiles(tb__job *job, uint32_t gpu, int kernel, uint32_t place, uint32_t first, uint32_t ntiles) {
    tb__cuda_part_of_gpu *part = &job->gpus[gpu];
    uint32_t item = part->nitems[kernel];
    TB_TRY(extend_stretches(part, kernel, (tb__cuda_stretch){item, place, first}));
    if (ntiles > INT32_MAX / 16 - item) /* blocks of a launch, 16 for an item at most */
        return tb__fail(TB_REFUSED, "a job of too many tiles");
    if (!tb__vec_reserve(&part->items[kernel], ntiles * sizeof(tb__cuda_tile)))
        return TB_NO_MEMORY;
    tb__cuda_tile *tile = (tb__cuda_tile *)(part->items[kernel].item + part->items[kernel].count);
    for (uint32_t i = 0; i < ntiles; i++)
        tile[i] = (tb__cuda_tile){place, first + i};
    part->items[kernel].count += ntiles * sizeof *tile;
    part->nitems[kernel] += ntiles;
    return tb__cuda_add_step(job, gpu, kernel, item, ntiles);
}

/* ---- Where moves are --------------------------------------------------------------------------------------------- */

/* Host memory that moves use. */
typedef struct host_bytes {
    uintptr_t begin, end;
    bool is_whole; /* a mapping, or a tensor */
    tb__gpu *gpu;
} host_bytes;

/* Facts about the moves, collected before descriptors are made. */
typedef struct preparation {
    tb__job *job;
    tb__device *device;
    const tb__move **moves; /* by part */
    size_t nmoves;
    int *ordinal; /* of the GPU of each move; NO_GPU: any */
    tb__cuda_spans spans;
    TB_VEC(host_bytes) host;
    int first_ordinal; /* of the first move that has one */
    tb__gpu **gpus;    /* of the job's */
    TB_VEC(tb__cuda_far) far;
} preparation;

/* The bytes that a side of a move reaches, relative to its first element. */
static void measure_reach(const int64_t *len, int ndim, const int64_t *stride, tb_dtype dtype, int64_t *low,
                          int64_t *high) {
    int64_t bits = tb_dtype_bits(dtype), from = 0, to = 1;
    for (int d = 0; d < ndim; d++) {
        int64_t reach = (len[d] - 1) * stride[d];
        *(reach < 0 ? &from : &to) += reach;
    }
    *low = bits == 4 ? from / 2 - (from % 2 != 0) : from * (bits / 8);
    *high = bits == 4 ? to / 2 + (to % 2 != 0) : to * (bits / 8);
}

/* An operand of a move, and where it is in memory. */
typedef struct operand {
    uintptr_t begin, end;
    bool is_in_buffer, is_source;
    int source;                      /* as in tb__cuda_far */
    const tb__mapping *host_mapping; /* it lies in */
    const tb__move_tensor *tensor;   /* likewise, perhaps; NULL: none is known */
} operand;

typedef tb_status operand_fn(preparation *p, size_t move, const operand *o);

static tb_status visit_source(preparation *p, size_t i, uint32_t k, operand_fn *fn) {
    const tb__move *move = p->moves[i];
    const tb__mapping *mapping = move->src_mapping ? move->src_mapping[k] : NULL;
    const void *at = move->src[k];
    operand o = {.is_source = true, .source = (int)k, .is_in_buffer = mapping == TB__IN_BUFFER};
    o.tensor = &move->src_tensor;
    int64_t low, high;
    if (mapping && !o.is_in_buffer) {
        TB_TRY(tb__mapping_source(mapping, p->device->ops, move, k, &at));
        o.host_mapping = mapping->ops == &tb__host_device_ops ? mapping : NULL;
    }
    measure_reach(move->len, move->ndim, move->src_stride[k], move->src_dtype, &low, &high);
    o.begin = (uintptr_t)at + (uintptr_t)low;
    o.end = (uintptr_t)at + (uintptr_t)high;
    return fn(p, i, &o);
}

static tb_status visit_quantised(preparation *p, size_t i, operand_fn *fn) {
    const tb__quantised *q = p->moves[i]->quantised;
    bool is_made = p->moves[i]->kind == TB__MOVE_QUANTISE;
    tb__quant_size size;
    TB_TRY(tb__quant_measure(&q->format, q->rows, q->columns, &size));
    operand o = {.begin = (uintptr_t)q->data, .is_in_buffer = is_made && p->moves[i]->is_dst_in_buffer};
    o.is_source = !is_made;
    o.source = TB__FAR_DATA;
    o.end = o.begin + (uintptr_t)size.data_nbytes;
    TB_TRY(fn(p, i, &o));
    if (size.scale_nbytes == 0)
        return TB_OK;
    o.source = TB__FAR_SCALES;
    o.begin = (uintptr_t)q->scales;
    o.end = o.begin + (uintptr_t)size.scale_nbytes;
    return fn(p, i, &o);
}

/* Calls fn for each operand, the destination first. */
static tb_status visit_operands(preparation *p, size_t i, operand_fn *fn) {
    const tb__move *move = p->moves[i];
    if (move->kind == TB__MOVE_QUANTISE)
        TB_TRY(visit_quantised(p, i, fn));
    if (move->kind == TB__MOVE_COPY || move->kind == TB__MOVE_DEQUANTISE) {
        int64_t low, high;
        measure_reach(move->len, move->ndim, move->dst_stride, move->dst_dtype, &low, &high);
        operand o = {.begin = (uintptr_t)move->dst + (uintptr_t)low, .end = (uintptr_t)move->dst + (uintptr_t)high};
        o.is_in_buffer = move->is_dst_in_buffer;
        o.tensor = &move->dst_tensor;
        TB_TRY(fn(p, i, &o));
    }
    if (move->kind == TB__MOVE_DEQUANTISE)
        return visit_quantised(p, i, fn);
    for (uint32_t k = 0; k < move->nsrc; k++)
        TB_TRY(visit_source(p, i, k, fn));
    return TB_OK;
}

/* The first operand on a GPU determines which GPU does the move. */
static tb_status choose_gpu(preparation *p, size_t i, const operand *o) {
    int found;
    if (o->is_in_buffer)
        *(o->is_source ? &p->job->reads_buffer : &p->job->writes_buffer) = true;
    if (o->is_in_buffer || o->host_mapping)
        return TB_OK;
    TB_TRY(tb__cuda_find_gpu(&p->spans, p->device, o->begin, o->end, &found));
    if (found >= 0 && p->ordinal[i] == NO_GPU)
        p->ordinal[i] = found;
    if (found >= 0 && p->first_ordinal == NO_GPU)
        p->first_ordinal = found;
    return TB_OK;
}

static uint32_t find_job_gpu(const preparation *p, size_t i) {
    int ordinal = p->ordinal[i] == NO_GPU ? p->first_ordinal : p->ordinal[i];
    uint32_t k = 0;
    while (k < p->job->ngpus && p->gpus[k]->ordinal != ordinal)
        k++;
    return k;
}

/* Operands that the GPU can't read get a relay; operands that it can't write, such as scales on another GPU than their
 * data, are refused. */
static tb_status check_access(preparation *p, size_t move, const operand *o, const tb__gpu *gpu) {
    tb_status status = tb__cuda_span_access(&p->spans, gpu, o->begin, o->end, !o->is_source);
    if (status != TB_REFUSED || !o->is_source)
        return status;
    return tb__vec_push(&p->far, ((tb__cuda_far){p->moves[move], o->source})) ? TB_OK : TB_NO_MEMORY;
}

/* Mappings and tensors are pinned as a whole. */
static tb_status collect_host(preparation *p, size_t i, const operand *o) {
    const tb__mapping *m = o->host_mapping;
    host_bytes h = {.begin = o->begin, .end = o->end};
    int found = NO_GPU;
    if (!o->is_in_buffer && !m)
        TB_TRY(tb__cuda_find_gpu(&p->spans, p->device, o->begin, o->end, &found));
    if (o->is_in_buffer)
        return TB_OK;
    h.gpu = p->gpus[find_job_gpu(p, i)];
    if (found >= 0)
        return found == h.gpu->ordinal ? TB_OK : check_access(p, i, o, h.gpu);
    if (m)
        h = (host_bytes){(uintptr_t)m->base, (uintptr_t)m->base + m->nbytes, true, h.gpu};
    else if (o->tensor && o->tensor->first <= o->begin && o->end <= o->tensor->last)
        h = (host_bytes){o->tensor->first, o->tensor->last, true, h.gpu};
    const host_bytes *last = p->host.count ? &p->host.item[p->host.count - 1] : NULL;
    bool is_known = last && last->begin <= h.begin && h.end <= last->end;
    return is_known || tb__vec_push(&p->host, h) ? TB_OK : TB_NO_MEMORY;
}

static int compare_host(const void *a, const void *b) {
    const host_bytes *x = a, *y = b;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

/* Overlapping ranges are pinned together, and so are adjacent ones, unless they are different tensors, which may have
 * different lifetimes. */
static tb_status pin_host(preparation *p) {
    if (p->host.count)
        qsort(p->host.item, p->host.count, sizeof *p->host.item, compare_host);
    for (size_t i = 0, next; i < p->host.count; i = next) {
        host_bytes h = p->host.item[i];
        for (next = i + 1; next < p->host.count; next++) {
            const host_bytes *n = &p->host.item[next];
            if (n->begin > h.end || (n->begin == h.end && (h.is_whole || n->is_whole)))
                break;
            h.end = n->end > h.end ? n->end : h.end;
            h.is_whole |= n->is_whole;
        }
        TB_TRY(tb__cuda_host_pin(&p->job->host, h.gpu, h.begin, h.end));
    }
    return TB_OK;
}

static tb_status list_gpus(preparation *p) {
    int count = tb__gpu_count();
    p->gpus = tb__calloc((size_t)(count > 0 ? count : 1), sizeof(tb__gpu *));
    p->job->gpus = tb__calloc((size_t)(count > 0 ? count : 1), sizeof *p->job->gpus);
    if (!p->gpus || !p->job->gpus)
        return TB_NO_MEMORY;
    if (p->first_ordinal == NO_GPU)
        p->first_ordinal = DEFAULT_GPU;
    for (size_t i = 0; i < p->nmoves; i++) {
        if (tb__move_is_empty(p->moves[i]) || find_job_gpu(p, i) < p->job->ngpus)
            continue;
        size_t at = p->job->ngpus;
        TB_TRY(tb__gpu_get(p->ordinal[i] == NO_GPU ? p->first_ordinal : p->ordinal[i], &p->gpus[at]));
        p->job->gpus[at].gpu = p->gpus[at];
        p->job->ngpus++;
    }
    return TB_OK;
}

/* ---- Descriptors ------------------------------------------------------------------------------------------------- */

static tb_status find_scale(preparation *p, const tb__move *move, int *ordinal) {
    const tb__quantised *q = move->quantised;
    bool has_scale = q && q->scale && (q->format.kind == TB__QUANT_FP8_TENSOR || q->format.kind == TB__QUANT_NVFP4);
    *ordinal = NO_GPU;
    if (move->kind == TB__MOVE_COPY || move->kind == TB__MOVE_AMAX || !has_scale)
        return TB_OK;
    return tb__cuda_find_gpu(&p->spans, p->device, (uintptr_t)q->scale, (uintptr_t)(q->scale + 1), ordinal);
}

/* Scales in host memory are read when a run is launched. */
static tb_status check_scale(preparation *p, size_t i) {
    const tb__gpu *gpu = p->gpus[find_job_gpu(p, i)];
    int found;
    TB_TRY(find_scale(p, p->moves[i], &found));
    if (found < 0 || found == gpu->ordinal)
        return TB_OK;
    uintptr_t begin = (uintptr_t)p->moves[i]->quantised->scale;
    operand o = {.begin = begin, .end = begin + sizeof(float), .is_source = true, .source = TB__FAR_SCALE};
    return check_access(p, i, &o, gpu);
}

static tb_status add_move(preparation *p, size_t i) {
    const tb__move *move = p->moves[i];
    const void *few[FEW_SOURCES], **src = few;
    int scale_on;
    if (tb__move_is_empty(move))
        return TB_OK;
    if (move->nsrc > FEW_SOURCES && !(src = tb__malloc(move->nsrc, sizeof *src)))
        return TB_NO_MEMORY;
    tb_status status = TB_OK;
    for (uint32_t k = 0; k < move->nsrc && status == TB_OK; k++) {
        const tb__mapping *mapping = move->src_mapping ? move->src_mapping[k] : NULL;
        src[k] = move->src[k];
        if (mapping && mapping != TB__IN_BUFFER)
            status = tb__mapping_source(mapping, p->device->ops, move, k, &src[k]);
    }
    uint32_t gpu = find_job_gpu(p, i);
    if (status == TB_OK && move->kind == TB__MOVE_COPY)
        status = tb__cuda_add_copy(p->job, gpu, move, src);
    else if (status == TB_OK && (status = find_scale(p, move, &scale_on)) == TB_OK)
        status = tb__cuda_add_matrix(p->job, gpu, move, src, scale_on >= 0);
    if (src != few)
        free(src);
    return status;
}

static tb_status add_moves(preparation *p) {
    tb__job *job = p->job;
    size_t far = 0;
    job->parts = tb__calloc(p->nmoves + 1, sizeof *job->parts);
    if (!job->parts)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < p->nmoves; i++) {
        if (i == 0 || p->moves[i]->part != p->moves[i - 1]->part)
            job->parts[job->nparts++] = (tb__cuda_job_part){.number = p->moves[i]->part, .first = job->steps.count};
        if (far < p->far.count && p->far.item[far].move == p->moves[i]) {
            while (far < p->far.count && p->far.item[far].move == p->moves[i])
                far++;
            continue;
        }
        TB_TRY(add_move(p, i));
    }
    job->parts[job->nparts] = (tb__cuda_job_part){.first = job->steps.count};
    return TB_OK;
}

/* Uploads all descriptors of a GPU to one piece of its memory. The GPU's context is current. */
static tb_status upload_part(tb__cuda_part_of_gpu *part) {
    uint64_t nbytes = (uint64_t)tb__align((int64_t)part->heap.count, 256);
    for (int k = 0; k < TB__CUDA_NKERNELS; k++) {
        part->offset[k] = nbytes;
        nbytes += (uint64_t)tb__align((int64_t)part->items[k].count, 256);
    }
    TB_TRY(tb__cuda_block_get(part->gpu, nbytes, TB__CUDA_DEVICE, &part->memory));
    if (part->heap.count)
        TB_TRY(tb__cuda_upload(part->gpu, part->memory->device, part->heap.item, part->heap.count));
    for (int k = 0; k < TB__CUDA_NKERNELS; k++) {
        CUdeviceptr to = part->memory->device + part->offset[k];
        if (part->items[k].count)
            TB_TRY(tb__cuda_upload(part->gpu, to, part->items[k].item, part->items[k].count));
        free(part->items[k].item);
        memset(&part->items[k], 0, sizeof part->items[k]);
    }
    free(part->heap.item);
    memset(&part->heap, 0, sizeof part->heap);
    return TB_OK;
}

static tb_status upload_all(tb__job *job) {
    for (size_t i = 0; i < job->ngpus; i++) {
        TB_TRY(tb__gpu_push(job->gpus[i].gpu));
        tb_status status = upload_part(&job->gpus[i]);
        tb__gpu_pop();
        TB_TRY(status);
    }
    return TB_OK;
}

/* ---- Jobs -------------------------------------------------------------------------------------------------------- */

/* By part, and within one in the given order, in which neighbours are mostly adjacent in memory. */
static tb_status sort_moves(preparation *p, const tb__move *moves) {
    uint64_t *keys = tb__malloc(p->nmoves, sizeof *keys);
    bool is_sorted = true;
    if (p->nmoves && !keys)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < p->nmoves; i++) {
        keys[i] = (uint64_t)moves[i].part << 32 | i;
        is_sorted &= i == 0 || moves[i].part >= moves[i - 1].part;
    }
    if (!is_sorted)
        qsort(keys, p->nmoves, sizeof *keys, tb__compare_uint64);
    for (size_t i = 0; i < p->nmoves; i++)
        p->moves[i] = &moves[(uint32_t)keys[i]];
    free(keys);
    return TB_OK;
}

static tb_status fill_job(preparation *p, const tb__move *moves) {
    if (p->nmoves >= UINT32_MAX)
        return tb__fail(TB_REFUSED, "a job of %zu moves", p->nmoves);
    for (size_t i = 0; i < p->nmoves; i++)
        TB_TRY(tb__move_check(&moves[i]));
    p->moves = tb__malloc(p->nmoves, sizeof(tb__move *));
    p->ordinal = tb__malloc(p->nmoves, sizeof *p->ordinal);
    if (p->nmoves && (!p->moves || !p->ordinal))
        return TB_NO_MEMORY;
    TB_TRY(sort_moves(p, moves));
    for (size_t i = 0; i < p->nmoves; i++)
        p->ordinal[i] = NO_GPU;
    for (size_t i = 0; i < p->nmoves; i++) {
        if (!tb__move_is_empty(p->moves[i]))
            TB_TRY(visit_operands(p, i, choose_gpu));
    }
    TB_TRY(list_gpus(p));
    for (size_t i = 0; i < p->nmoves; i++) {
        if (tb__move_is_empty(p->moves[i]))
            continue;
        TB_TRY(visit_operands(p, i, collect_host));
        TB_TRY(check_scale(p, i));
    }
    TB_TRY(pin_host(p));
    TB_TRY(add_moves(p));
    TB_TRY(upload_all(p->job));
    return tb__cuda_add_relays(p->job, p->far.item, p->far.count);
}

tb_status tb__cuda_prepare(tb__device *device, const tb__move *moves, size_t nmoves, tb__job **out) {
    preparation p = {.device = device, .nmoves = nmoves, .first_ordinal = NO_GPU};
    p.job = tb__calloc(1, sizeof *p.job);
    tb_status status = TB_NO_MEMORY;
    if (p.job) {
        p.job->device = device;
        status = fill_job(&p, moves);
    }
    free(p.moves);
    free(p.ordinal);
    free(p.gpus);
    free(p.spans.list.item);
    free(p.host.item);
    free(p.far.item);
    if (status != TB_OK) {
        tb__cuda_release(device, p.job);
        return status;
    }
    *out = p.job;
    return TB_OK;
}

void tb__cuda_release(tb__device *device, tb__job *job) {
    (void)device;
    if (!job)
        return;
    for (size_t i = 0; i < job->ngpus; i++) {
        tb__cuda_part_of_gpu *part = &job->gpus[i];
        for (int k = 0; k < TB__CUDA_NKERNELS; k++) {
            free(part->items[k].item);
            free(part->stretches[k].item);
        }
        free(part->heap.item);
        free(part->transfers.item);
        free(part->quants.item);
        tb__cuda_block_put(part->memory);
    }
    tb__cuda_free_relays(job);
    tb__cuda_host_fini(&job->host);
    free(job->gpus);
    free(job->steps.item);
    free(job->parts);
    free(job);
}

size_t tb__cuda_job_ngpus(const tb__job *job) {
    return job->ngpus;
}

tb__gpu *tb__cuda_job_gpu(const tb__job *job, size_t i) {
    return job->gpus[i].gpu;
}
