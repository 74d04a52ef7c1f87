/* Launches: submit the chosen parts of a job as kernels and copies on a stream, and collect the kernels' results.
 * Checksums. */
#include "device/cuda/job.h"

#include "base/checksum.h"
#include "base/int.h"
#include "device/host/memory.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

enum { WARPS_OF_PIECES = 4 };

struct tb__cuda_launch {
    tb__gpu *gpu;
    tb__cuda_block *block;  /* results, then lists of items; of a checksum: sums, then the bytes of the last block */
    tb__cuda_quant *quants; /* copies of those that were chosen, in their order */
    uint32_t *results;      /* the index of each one's result, minus first_result */
    size_t nquants, nresults;
    uint32_t first_result;
    uint64_t *sum;
    size_t nbytes; /* of a checksum */
};

/* ---- Choosing ---------------------------------------------------------------------------------------------------- */

typedef struct item_range {
    uint32_t first, count;
} item_range;

typedef struct item_ranges {
    item_range *item;
    size_t count, capacity;
    uint32_t nitems;
} item_ranges;

/* The parts of a job that a launch executes on one GPU. */
typedef struct selection {
    tb__job *job;
    size_t gpu;
    item_ranges kernels[TB__CUDA_NKERNELS + 1]; /* the last ones are those of the copy engine */
    size_t nquants;
} selection;

static void free_selection(selection *s) {
    for (int k = 0; k <= TB__CUDA_NKERNELS; k++)
        free(s->kernels[k].item);
}

static tb_status add_range(item_ranges *ranges, uint32_t first, uint32_t count) {
    item_range *last = ranges->count ? &ranges->item[ranges->count - 1] : NULL;
    if (count == 0)
        return TB_OK;
    ranges->nitems += count;
    if (last && last->first + last->count == first) {
        last->count += count;
        return TB_OK;
    }
    return tb__vec_push(ranges, (item_range){first, count}) ? TB_OK : TB_NO_MEMORY;
}

/* The first move of a quantised tensor whose step is this one or a later one. */
static size_t find_quant(const tb__cuda_part_of_gpu *part, size_t step) {
    size_t i = 0;
    TB_BISECT(i, part->quants.count, part->quants.item[i].step >= step);
    return i;
}

static tb_status choose_steps(selection *s, size_t first, size_t last) {
    const tb__cuda_part_of_gpu *part = &s->job->gpus[s->gpu];
    for (size_t i = first; i < last; i++) {
        const tb__cuda_step *step = &s->job->steps.item[i];
        if (step->gpu == s->gpu)
            TB_TRY(add_range(&s->kernels[step->kernel], step->first, step->count));
    }
    s->nquants += find_quant(part, last) - find_quant(part, first);
    return TB_OK;
}

static tb_status choose_all(selection *s) {
    const tb__cuda_part_of_gpu *part = &s->job->gpus[s->gpu];
    for (int k = 0; k < TB__CUDA_NKERNELS; k++)
        TB_TRY(add_range(&s->kernels[k], 0, part->nitems[k]));
    s->nquants = part->quants.count;
    return add_range(&s->kernels[TB__CUDA_NKERNELS], 0, (uint32_t)part->transfers.count);
}

/* Parts are mostly asked for in their order. */
static tb__cuda_job_part *find_part(tb__job *job, uint32_t number) {
    size_t i = job->next_part;
    if (i >= job->nparts || job->parts[i].number != number) {
        i = 0;
        TB_BISECT(i, job->nparts, job->parts[i].number >= number);
    }
    job->next_part = i + 1;
    return i < job->nparts && job->parts[i].number == number ? &job->parts[i] : NULL;
}

tb_status tb__cuda_check_parts(tb__job *job, const tb__run *run) {
    job->nruns++;
    for (size_t i = 0; run->parts && i < run->nparts; i++) {
        tb__cuda_job_part *p = find_part(job, run->parts[i]);
        if (!p)
            continue;
        if (p->last_run == job->nruns)
            return tb__fail(TB_INVALID, "part %" PRIu32 " of a job is listed twice in one run", p->number);
        p->last_run = job->nruns;
    }
    return TB_OK;
}

static bool is_any_chosen(const selection *s) {
    for (int k = 0; k <= TB__CUDA_NKERNELS; k++) {
        if (s->kernels[k].nitems)
            return true;
    }
    return false;
}

static tb_status choose_items(selection *s, const tb__run *run) {
    TB_TRY(tb__cuda_check_parts(s->job, run));
    if (!run->parts)
        return choose_all(s);
    for (size_t i = 0; i < run->nparts; i++) {
        const tb__cuda_job_part *p = find_part(s->job, run->parts[i]);
        if (p)
            TB_TRY(choose_steps(s, p->first, p[1].first));
    }
    return TB_OK;
}

/* ---- Data to the GPU and back ------------------------------------------------------------------------------------ */

static int compare_quants(const void *a, const void *b) {
    const uint32_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

/* Copies the chosen moves of quantised tensors, so that the job may be released when the launch is finished late. */
static tb_status list_quants(tb__cuda_launch *launch, const selection *s, const tb__run *run) {
    const tb__cuda_part_of_gpu *part = &s->job->gpus[s->gpu];
    size_t nparts = run->parts ? run->nparts : 1;
    if (s->nquants == 0)
        return TB_OK;
    launch->results = tb__malloc(s->nquants, sizeof *launch->results);
    launch->quants = tb__malloc(s->nquants, sizeof *launch->quants);
    if (!launch->results || !launch->quants)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < nparts; i++) {
        const tb__cuda_job_part *p = run->parts ? find_part(s->job, run->parts[i]) : NULL;
        size_t first = 0, last = run->parts ? 0 : part->quants.count;
        if (p) {
            first = find_quant(part, p->first);
            last = find_quant(part, p[1].first);
        }
        for (size_t q = first; q < last; q++)
            launch->results[launch->nquants++] = (uint32_t)q;
    }
    qsort(launch->results, launch->nquants, sizeof *launch->results, compare_quants);
    launch->first_result = part->quants.item[launch->results[0]].result;
    for (size_t i = 0; i < launch->nquants; i++) {
        launch->quants[i] = part->quants.item[launch->results[i]];
        launch->results[i] = launch->quants[i].result - launch->first_result;
    }
    return TB_OK;
}

static tb_status name_failure(tb_status status, const tb__cuda_quant *q) {
    return status != TB_OK && q->name ? tb__fail_within(status, "tensor '%.100s'", q->name) : status;
}

static tb_status fail_scale(const tb__cuda_quant *q, float scale) {
    tb_status status = tb__fail(TB_INVALID, "the scale of a %s tensor is %g; it must be positive and finite",
                                tb__quant_name(q->format), (double)scale);
    return name_failure(status, q);
}

/* Scales are read here, when the run begins. */
static tb_status reset_results(tb__cuda_result *results, const tb__cuda_launch *launch) {
    for (size_t i = 0; i < launch->nquants; i++) {
        const tb__cuda_quant *q = &launch->quants[i];
        tb__cuda_result *r = &results[launch->results[i]];
        *r = (tb__cuda_result){.bad = UINT64_MAX};
        if (!q->needs_scale)
            continue;
        r->scale = q->scale ? *q->scale : 0;
        if (!(r->scale > 0 && isfinite(r->scale)))
            return fail_scale(q, r->scale);
    }
    return TB_OK;
}

static void write_list(uint32_t *list, const item_ranges *ranges) {
    for (size_t i = 0; i < ranges->count; i++) {
        for (uint32_t k = 0; k < ranges->item[i].count; k++)
            *list++ = ranges->item[i].first + k;
    }
}

static bool needs_list(const item_ranges *ranges) {
    return ranges->count > TB__CUDA_RANGES;
}

/* Fills the block: results, then lists. */
static tb_status fill_block(tb__cuda_launch *launch, const selection *s, size_t results_nbytes, size_t nbytes) {
    if (nbytes == 0)
        return TB_OK;
    TB_TRY(tb__cuda_block_get(launch->gpu, nbytes, TB__CUDA_PINNED | TB__CUDA_DEVICE, &launch->block));
    TB_TRY(reset_results(launch->block->pinned, launch));
    uint32_t *list = (uint32_t *)((char *)launch->block->pinned + results_nbytes);
    for (int k = 0; k < TB__CUDA_NKERNELS; k++) {
        if (needs_list(&s->kernels[k])) {
            write_list(list, &s->kernels[k]);
            list += s->kernels[k].nitems;
        }
    }
    return TB_OK;
}

/* Buffers of runs in host memory are memory of the library's own, in arenas, of which there are few. So they may be
 * freed before the job is released. */
static tb_status pin_buffer(tb__job *job, size_t gpu, void *buffer) {
    tb__memory memory;
    tb__arena_file file;
    uintptr_t at = (uintptr_t)buffer;
    if (tb__memory_find(buffer, 1, &file))
        return tb__cuda_host_pin(&job->host, job->gpus[gpu].gpu, at, at + 1);
    if (!buffer || tb__cuda_find(job->device, buffer, 1, &memory))
        return TB_OK;
    return tb__fail(TB_INVALID, "the buffer at %p of a run is neither memory of tb_alloc nor on a GPU", buffer);
}

/* ---- Submitting -------------------------------------------------------------------------------------------------- */

static tb_status launch_kernel(tb__gpu *gpu, int kernel, tb__cuda_args *args, CUstream stream) {
    const tb__cuda_kernel_shape *shape = &tb__cuda_kernel_shapes[kernel];
    uint32_t per_block = 1;
    if (kernel == TB__CUDA_copy_small_pieces)
        per_block = WARPS_OF_PIECES * TB__CUDA_WARP_PIECES;
    else if (kernel == TB__CUDA_copy_pieces || kernel == TB__CUDA_copy_shifted_pieces)
        per_block = WARPS_OF_PIECES;
    else if (kernel == TB__CUDA_copy_words)
        per_block = TB__CUDA_BLOCK_WORDS;
    else if (kernel == TB__CUDA_take_results)
        per_block = TB__CUDA_BLOCK_RESULTS;
    uint32_t grid = (args->nitems + per_block - 1) / per_block * shape->blocks;
    void *params[] = {args};
    CUresult result =
        tb__cuda.cuLaunchKernel(gpu->kernels[kernel], grid, 1, 1, shape->threads, 1, 1, 0, stream, params, NULL);
    return result == CUDA_SUCCESS ? TB_OK
                                  : tb__cuda_fail(result, "kernel %s on %s", tb__cuda_kernel_names[kernel], gpu->unit);
}

static bool add_launch_range(tb__cuda_args *args, uint32_t *begin, uint32_t first, uint32_t place, uint32_t count) {
    if (args->nranges == TB__CUDA_RANGES)
        return false;
    args->ranges[args->nranges++] = (tb__cuda_range){*begin, first, place};
    *begin += count;
    return true;
}

/* Lists the ranges as tiles of their objects, so that kernels need not read items. False: there are too many. */
static bool list_stretches(const tb__cuda_part_of_gpu *part, int kernel, const item_ranges *ranges,
                           tb__cuda_args *args) {
    size_t n = part->stretches[kernel].count;
    const tb__cuda_stretch *all = part->stretches[kernel].item;
    uint32_t begin = 0;
    args->nranges = 0;
    for (size_t i = 0; i < ranges->count && n; i++) {
        uint32_t at = ranges->item[i].first, end = at + ranges->item[i].count;
        size_t k = 0;
        TB_BISECT(k, n, k + 1 == n || all[k + 1].first > at);
        for (; at < end; k++) {
            uint32_t last = k + 1 < n && all[k + 1].first < end ? all[k + 1].first : end;
            if (!add_launch_range(args, &begin, all[k].tile + (at - all[k].first), all[k].place, last - at))
                return false;
            at = last;
        }
    }
    return args->nranges > 0;
}

static void list_items(const item_ranges *ranges, tb__cuda_args *args) {
    uint32_t begin = 0;
    args->nranges = 0;
    for (size_t i = 0; i < ranges->count; i++)
        add_launch_range(args, &begin, ranges->item[i].first, (uint32_t)TB__CUDA_NO_PLACE, ranges->item[i].count);
}

static tb_status submit_kernel(const selection *s, int kernel, tb__cuda_args *args, CUdeviceptr *list,
                               CUstream stream) {
    const tb__cuda_part_of_gpu *part = &s->job->gpus[s->gpu];
    const item_ranges *ranges = &s->kernels[kernel];
    args->items = part->memory->device + part->offset[kernel];
    args->nitems = ranges->nitems;
    args->list = 0;
    if (needs_list(ranges)) {
        args->list = *list;
        args->nranges = 0;
        *list += ranges->nitems * sizeof(uint32_t);
    } else if (!list_stretches(part, kernel, ranges, args)) {
        list_items(ranges, args);
    }
    return launch_kernel(part->gpu, kernel, args, stream);
}

static tb_status submit_transfers(const selection *s, CUstream stream) {
    const tb__cuda_part_of_gpu *part = &s->job->gpus[s->gpu];
    const item_ranges *ranges = &s->kernels[TB__CUDA_NKERNELS];
    for (size_t i = 0; i < ranges->count; i++) {
        for (uint32_t k = 0; k < ranges->item[i].count; k++) {
            const tb__cuda_transfer *t = &part->transfers.item[ranges->item[i].first + k];
            CUresult result = tb__cuda.cuMemcpyAsync(t->dst, t->src, t->nbytes, stream);
            if (result != CUDA_SUCCESS)
                return tb__cuda_fail(result, "cuMemcpyAsync of %" PRIu64 " bytes on %s", t->nbytes, part->gpu->unit);
        }
    }
    return TB_OK;
}

static tb_status copy_between(tb__gpu *gpu, int kernel, CUdeviceptr dst, CUdeviceptr src, size_t nitems,
                              CUstream stream) {
    tb__cuda_args args = {.items = src, .results = dst, .nitems = (uint32_t)nitems};
    return launch_kernel(gpu, kernel, &args, stream);
}

/* Whether the block on the GPU has to be written before the kernels run. */
static bool needs_upload(const tb__cuda_launch *launch, size_t results_nbytes, size_t nbytes) {
    bool needs_it = nbytes > results_nbytes || launch->block->nclean < launch->nresults;
    for (size_t i = 0; i < launch->nquants && !needs_it; i++)
        needs_it = launch->quants[i].needs_scale;
    return needs_it;
}

static tb_status submit(tb__cuda_launch *launch, const selection *s, tb__cuda_args *args, size_t nbytes,
                        CUstream stream) {
    tb__cuda_block *block = launch->block;
    size_t results_nbytes = launch->nresults * sizeof(tb__cuda_result);
    CUdeviceptr list = 0;
    if (block && needs_upload(launch, results_nbytes, nbytes))
        TB_TRY(copy_between(launch->gpu, TB__CUDA_copy_words, block->device, block->pinned_address,
                            nbytes / sizeof(uint32_t), stream));
    if (block) {
        block->nclean = 0; /* until the launch is finished */
        args->results = block->device;
        args->first_result = launch->first_result;
        list = block->device + results_nbytes;
    }
    TB_TRY(submit_transfers(s, stream));
    for (int k = 0; k < TB__CUDA_NKERNELS; k++) {
        if (s->kernels[k].nitems)
            TB_TRY(submit_kernel(s, k, args, &list, stream));
    }
    return launch->nresults ? copy_between(launch->gpu, TB__CUDA_take_results, block->pinned_address, block->device,
                                           launch->nresults, stream)
                            : TB_OK;
}

/* Everything that may lack memory is done before anything is submitted. */
static tb_status launch_selection(tb__cuda_launch *launch, selection *s, const tb__run *run, CUstream stream,
                                  bool *is_submitted) {
    tb__cuda_part_of_gpu *part = &s->job->gpus[s->gpu];
    tb__cuda_args args = {.heap = part->memory ? part->memory->device : 0,
                          .src_buffer = (uintptr_t)run->src_buffer,
                          .dst_buffer = (uintptr_t)run->dst_buffer};
    TB_TRY(choose_items(s, run));
    TB_TRY(list_quants(launch, s, run));
    if (s->job->reads_buffer && is_any_chosen(s)) /* else another device may use it */
        TB_TRY(pin_buffer(s->job, s->gpu, run->src_buffer));
    if (s->job->writes_buffer && is_any_chosen(s))
        TB_TRY(pin_buffer(s->job, s->gpu, run->dst_buffer));
    launch->nresults = launch->nquants ? launch->results[launch->nquants - 1] + 1 : 0;
    size_t results_nbytes = launch->nresults * sizeof(tb__cuda_result), nbytes = results_nbytes;
    for (int k = 0; k < TB__CUDA_NKERNELS; k++)
        nbytes += needs_list(&s->kernels[k]) ? s->kernels[k].nitems * sizeof(uint32_t) : 0;
    TB_TRY(fill_block(launch, s, results_nbytes, nbytes));
    *is_submitted = true;
    return submit(launch, s, &args, nbytes, stream);
}

static void free_launch(tb__cuda_launch *launch) {
    tb__cuda_block_put(launch->block);
    free(launch->quants);
    free(launch->results);
    free(launch);
}

tb_status tb__cuda_launch_job(tb__job *job, size_t i, const tb__run *run, CUstream stream, tb__cuda_launch **out) {
    tb__cuda_launch *launch = tb__calloc(1, sizeof *launch);
    selection s = {.job = job, .gpu = i};
    bool is_submitted = false;
    if (!launch)
        return TB_NO_MEMORY;
    launch->gpu = job->gpus[i].gpu;
    tb_status status = launch_selection(launch, &s, run, stream, &is_submitted);
    free_selection(&s);
    if (status != TB_OK) {
        if (is_submitted)
            launch->block = NULL; /* submitted work may still use it */
        free_launch(launch);
        return status;
    }
    *out = launch;
    return TB_OK;
}

/* ---- Results ----------------------------------------------------------------------------------------------------- */

static tb_status take_result(const tb__cuda_quant *q, const tb__cuda_result *r) {
    float value;
    if (r->has_bad_scale) {
        memcpy(&value, &r->bad_scale, sizeof value);
        return fail_scale(q, value);
    }
    if (r->bad != UINT64_MAX) {
        tb_status status = tb__fail(TB_INVALID, "the element at row %" PRId64 ", column %" PRId64 " is not finite",
                                    q->first + (int64_t)r->bad / q->columns, (int64_t)r->bad % q->columns);
        return name_failure(status, q);
    }
    memcpy(&value, &r->amax, sizeof value);
    if (q->kind == TB__MOVE_AMAX && value > *q->amax)
        *q->amax = value;
    return TB_OK;
}

static void take_sum(const tb__cuda_launch *launch, uint64_t *sums) {
    size_t whole = launch->nbytes / TB__CHECKSUM_BLOCK, rest = launch->nbytes % TB__CHECKSUM_BLOCK;
    if (rest)
        sums[whole] = tb__checksum_block(sums + whole + 1, rest);
    *launch->sum = tb__checksum_block(sums, tb__checksum_nblocks(launch->nbytes) * sizeof *sums);
}

tb_status tb__cuda_launch_finish(tb__cuda_launch *launch) {
    tb_status status = TB_OK;
    void *reported = launch->block ? launch->block->pinned : NULL;
    const tb__cuda_result *results = reported;
    for (size_t i = 0; results && i < launch->nquants && status == TB_OK; i++)
        status = take_result(&launch->quants[i], &results[launch->results[i]]);
    if (launch->block)
        launch->block->nclean = launch->nresults;
    if (launch->sum && reported)
        take_sum(launch, reported);
    free_launch(launch);
    return status;
}

void tb__cuda_launch_discard(tb__cuda_launch *launch) {
    if (launch)
        free_launch(launch);
}

/* ---- Checksums --------------------------------------------------------------------------------------------------- */

/* Kernels sum whole blocks, and write to pinned memory; the bytes of the last one, if it is shorter, are copied. */
static tb_status submit_checksum(const tb__cuda_launch *launch, const void *address, CUstream stream) {
    size_t whole = launch->nbytes / TB__CHECKSUM_BLOCK, rest = launch->nbytes % TB__CHECKSUM_BLOCK;
    tb__cuda_args args = {
        .items = (uintptr_t)address, .results = launch->block->pinned_address, .nitems = (uint32_t)whole};
    if (whole)
        TB_TRY(launch_kernel(launch->gpu, TB__CUDA_checksum, &args, stream));
    if (rest == 0)
        return TB_OK;
    CUdeviceptr to = (uintptr_t)launch->block->pinned + (whole + 1) * sizeof(uint64_t);
    CUresult result = tb__cuda.cuMemcpyAsync(to, (uintptr_t)address + whole * TB__CHECKSUM_BLOCK, rest, stream);
    return result == CUDA_SUCCESS
               ? TB_OK
               : tb__cuda_fail(result, "cuMemcpyAsync of %zu bytes from %s", rest, launch->gpu->unit);
}

tb_status tb__cuda_launch_checksum(tb__gpu *gpu, const void *address, size_t nbytes, uint64_t *sum, CUstream stream,
                                   tb__cuda_launch **out) {
    if (nbytes / TB__CHECKSUM_BLOCK > INT32_MAX)
        return tb__fail(TB_REFUSED, "a checksum of %zu bytes", nbytes);
    tb__cuda_launch *launch = tb__calloc(1, sizeof *launch);
    if (!launch)
        return TB_NO_MEMORY;
    launch->gpu = gpu;
    launch->sum = sum;
    launch->nbytes = nbytes;
    size_t need = (tb__checksum_nblocks(nbytes) + 1) * sizeof(uint64_t) + nbytes % TB__CHECKSUM_BLOCK;
    tb_status status = tb__cuda_block_get(gpu, need, TB__CUDA_PINNED, &launch->block);
    if (status != TB_OK) {
        free_launch(launch);
        return status;
    }
    status = submit_checksum(launch, address, stream);
    if (status != TB_OK) {
        launch->block = NULL; /* submitted work may still use it */
        free_launch(launch);
        return status;
    }
    *out = launch;
    return TB_OK;
}
