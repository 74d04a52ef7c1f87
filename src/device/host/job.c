/* Jobs of the host device. A run is work for the worker pool; progress does pieces of it, too, and completes the fences
 * of runs that have ended. */
#include "device/host/host.h"

#include "base/checksum.h"
#include "base/int.h"
#include "base/mem.h"
#include "base/wide.h"
#include "device/host/kernel.h"
#include "device/host/move.h"
#include "device/host/quant.h"
#include "device/host/workers.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>

typedef struct part {
    uint32_t number;
    size_t first;      /* of its moves */
    uint64_t last_run; /* number of the last run that included it */
} part;

struct tb__job {
    tb__arena arena;
    tb__move *moves; /* by part */
    tb__move_costs costs;
    part *parts; /* by number; the last one is a sentinel */
    size_t nparts, nquantised;
    uint64_t nruns;
};

/* Consecutive moves of the job in a run: where their costs begin in the run and in the job. */
typedef struct job_segment {
    int64_t begin, job_begin;
} job_segment;

/* A move of the run that is not a copy. */
typedef struct quant_step {
    size_t move;
    bool is_dequant;
    union {
        tb__quant_job quant;
        tb__dequant_job dequant;
    };
    tb__quant_tensor tensor;
} quant_step;

struct tb__host_run {
    tb__work work;
    tb__host_device *device;
    tb__job *job; /* NULL: a checksum */
    tb__fence *fence;
    char *src_buffer, *dst_buffer;
    bool stream, is_cancelled, is_rehearsal;
    job_segment *segments;
    size_t nsegments;
    quant_step *steps; /* by move */
    size_t nsteps;
    tb__fence **after;
    size_t nafter;
    const char *bytes; /* of a checksum */
    size_t nbytes;
    uint64_t *sums, *sum; /* checksums of blocks, and the result */
    bool is_begun;
    tb_status status; /* first failure of a piece; guarded by the device's lock */
    char why[TB__FENCE_WHY_MAX];
    TAILQ_ENTRY(tb__host_run) link, ended_link;
};

/* ---- Preparing -------------------------------------------------------------------------------------------------- */

/* Resolves mappings to addresses, except for buffers. */
static tb_status resolve_sources(tb__job *job, tb__move *move) {
    const void **src = tb__arena_alloc(&job->arena, move->nsrc, sizeof *src);
    int64_t(*stride)[TB_MAX_DIMS] = tb__arena_alloc(&job->arena, move->nsrc, sizeof *stride);
    tb__mapping **left = NULL;
    if (move->src_mapping)
        left = tb__arena_alloc(&job->arena, move->nsrc, sizeof *left);
    if (move->nsrc && (!src || !stride || (move->src_mapping && !left)))
        return TB_NO_MEMORY;
    bool is_resolved = true;
    for (uint32_t k = 0; k < move->nsrc; k++) {
        tb__mapping *mapping = move->src_mapping ? move->src_mapping[k] : NULL;
        bool is_left = mapping == TB__IN_BUFFER;
        if (left)
            left[k] = is_left ? mapping : NULL;
        is_resolved &= !is_left;
        src[k] = move->src[k];
        if (mapping && !is_left)
            TB_TRY(tb__mapping_source(mapping, &tb__host_device_ops, move, k, &src[k]));
        memcpy(stride[k], move->src_stride[k], sizeof *stride);
    }
    move->src = src;
    move->src_stride = (const int64_t(*)[TB_MAX_DIMS])stride;
    move->src_mapping = is_resolved ? NULL : left;
    return TB_OK;
}

static int compare_parts(const void *a, const void *b) {
    const tb__move *const *x = a, *const *y = b;
    if ((*x)->part != (*y)->part)
        return (*x)->part < (*y)->part ? -1 : 1;
    if ((*x)->dst != (*y)->dst) /* so that neighbours in memory become one move */
        return (*x)->dst < (*y)->dst ? -1 : 1;
    return *x < *y ? -1 : *x > *y;
}

static tb_status sort_moves(const tb__move *moves, size_t nmoves, tb__move *out) {
    const tb__move **order = tb__malloc(nmoves, sizeof(tb__move *));
    if (nmoves && !order)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < nmoves; i++)
        order[i] = &moves[i];
    if (nmoves)
        qsort(order, nmoves, sizeof *order, compare_parts);
    for (size_t i = 0; i < nmoves; i++)
        out[i] = *order[i];
    free(order);
    return TB_OK;
}

/* Makes a plain copy between two sides without gaps one of a row of bytes; false if it is none. The move's strides are
 * the job's own. */
static bool flatten_move(tb__move *move) {
    unsigned bits = tb_dtype_bits(move->dst_dtype);
    int64_t expected = 1;
    if (move->kind != TB__MOVE_COPY || !tb__move_is_plain(move) || bits < 8 || tb__move_is_empty(move))
        return false;
    for (int d = move->ndim - 1; d >= 0; d--) {
        if (move->len[d] != 1 && (move->dst_stride[d] != expected || move->src_stride[0][d] != expected))
            return false;
        expected *= move->len[d];
    }
    int64_t(*src_stride)[TB_MAX_DIMS] = (int64_t(*)[TB_MAX_DIMS])move->src_stride;
    move->ndim = 1;
    move->len[0] = expected * (bits / 8);
    move->dst_stride[0] = src_stride[0][0] = 1;
    move->src_dtype = move->wire_dtype = move->dst_dtype = TB_U8;
    return true;
}

/* Whether a flat move goes on where another one of its part ends, on both sides. */
static bool continues(const tb__move *move, const tb__move *before) {
    return move->part == before->part && move->is_dst_in_buffer == before->is_dst_in_buffer &&
           !move->src_mapping == !before->src_mapping && (char *)before->dst + before->len[0] == (char *)move->dst &&
           (const char *)before->src[0] + before->len[0] == (const char *)move->src[0];
}

static tb_status fill_job(tb__job *job, const tb__move *moves, size_t nmoves) {
    job->moves = tb__arena_alloc(&job->arena, nmoves, sizeof *job->moves);
    job->costs.ends = tb__arena_alloc(&job->arena, nmoves, sizeof *job->costs.ends);
    job->parts = tb__arena_alloc(&job->arena, nmoves + 1, sizeof *job->parts);
    if (!job->moves || !job->costs.ends || !job->parts)
        return TB_NO_MEMORY;
    TB_TRY(sort_moves(moves, nmoves, job->moves));
    size_t n = 0;
    bool was_flat = false;
    for (size_t i = 0; i < nmoves; i++) {
        tb__move *move = &job->moves[n];
        *move = job->moves[i];
        TB_TRY(tb__move_check(move));
        TB_TRY(resolve_sources(job, move));
        if (move->quantised) {
            tb__quantised *copy = tb__arena_alloc(&job->arena, 1, sizeof *copy);
            if (!copy)
                return TB_NO_MEMORY;
            *copy = *move->quantised;
            move->quantised = copy;
        }
        bool is_flat = flatten_move(move);
        if (is_flat && was_flat && continues(move, move - 1)) {
            move[-1].len[0] += move->len[0];
            continue;
        }
        was_flat = is_flat;
        job->nquantised += move->kind != TB__MOVE_COPY;
        if (n == 0 || move->part != move[-1].part)
            job->parts[job->nparts++] = (part){.number = move->part, .first = n};
        n++;
    }
    job->parts[job->nparts] = (part){.first = n};
    job->costs.moves = job->moves;
    job->costs.n = n;
    tb__move_costs_measure(&job->costs);
    return TB_OK;
}

tb_status tb__host_prepare(tb__device *device, const tb__move *moves, size_t nmoves, tb__job **out) {
    tb__job *job = tb__calloc(1, sizeof *job);
    tb_status status = job ? fill_job(job, moves, nmoves) : TB_NO_MEMORY;
    if (status != TB_OK) {
        tb__host_release(device, job);
        return status;
    }
    *out = job;
    return TB_OK;
}

void tb__host_release(tb__device *device, tb__job *job) {
    (void)device;
    if (job)
        tb__arena_fini(&job->arena);
    free(job);
}

/* ---- Working, in any thread ------------------------------------------------------------------------------------- */

static quant_step *find_step(const tb__host_run *run, size_t move) {
    size_t i = 0;
    TB_BISECT(i, run->nsteps, run->steps[i].move >= move);
    return &run->steps[i];
}

static void run_step(quant_step *s, int64_t from, int64_t to, int64_t of) {
    int64_t nparts = s->is_dequant ? s->dequant.nparts : s->quant.nparts;
    int64_t first = (int64_t)((tb__wide)nparts * (tb__wide)from / (tb__wide)of),
            last = (int64_t)((tb__wide)nparts * (tb__wide)to / (tb__wide)of);
    if (first < last && s->is_dequant)
        tb__dequant_run(&s->dequant, first, last);
    else if (first < last)
        tb__quant_run(&s->quant, first, last);
}

/* Records the first failure, with this thread's tb_error_detail. */
static void fail_run(tb__host_run *run, tb_status status) {
    pthread_mutex_lock(&run->device->lock);
    if (run->status == TB_OK) {
        run->status = status;
        snprintf(run->why, sizeof run->why, "%s", tb_error_detail());
    }
    pthread_mutex_unlock(&run->device->lock);
}

/* A copy from or to the run's buffers. */
static tb_status run_with_buffers(const tb__host_run *run, const tb__move *move, tb__move_share share) {
    const void *few[16], **src = few;
    tb__move placed = *move;
    if (move->nsrc > sizeof few / sizeof *few && !(src = tb__malloc(move->nsrc, sizeof *src)))
        return TB_NO_MEMORY;
    for (uint32_t k = 0; k < move->nsrc; k++) {
        const tb__mapping *mapping = move->src_mapping ? move->src_mapping[k] : NULL;
        src[k] = mapping == TB__IN_BUFFER ? run->src_buffer + (uintptr_t)move->src[k] : move->src[k];
    }
    placed.src = src;
    if (move->is_dst_in_buffer)
        placed.dst = run->dst_buffer + (uintptr_t)move->dst;
    tb__move_run(&placed, share, run->stream);
    if (src != few)
        free(src);
    return TB_OK;
}

static void run_move(void *arg, size_t index, int64_t from, int64_t to, int64_t of) {
    tb__host_run *run = arg;
    const tb__move *move = &run->job->moves[index];
    if (run->is_rehearsal) {
        tb__move_fill_page_tables(move, tb__move_cut(move, from, to, of));
        return;
    }
    if (move->kind != TB__MOVE_COPY) {
        run_step(find_step(run, index), from, to, of);
        return;
    }
    tb__move_share share = tb__move_cut(move, from, to, of);
    tb_status status = TB_OK;
    if (move->src_mapping || move->is_dst_in_buffer)
        status = run_with_buffers(run, move, share);
    else
        tb__move_run(move, share, run->stream);
    if (status != TB_OK)
        fail_run(run, status);
}

/* A piece may reach over several segments. */
static void run_piece(void *arg, int64_t from, int64_t to) {
    tb__host_run *run = arg;
    size_t low = 0, high = run->nsegments;
    while (low + 1 < high) {
        size_t middle = low + (high - low) / 2;
        if (run->segments[middle].begin <= from)
            low = middle;
        else
            high = middle;
    }
    for (size_t i = low; i < run->nsegments && run->segments[i].begin < to; i++) {
        const job_segment *s = &run->segments[i];
        int64_t end = i + 1 < run->nsegments ? s[1].begin : run->work.total;
        int64_t a = from > s->begin ? from : s->begin, b = to < end ? to : end, shift = s->job_begin - s->begin;
        tb__move_costs_run(&run->job->costs, a + shift, b + shift, run_move, run);
    }
    if (run->stream)
        tb__kernels_get()->fence();
}

static void sum_blocks(void *arg, int64_t from, int64_t to) {
    const tb__host_run *run = arg;
    for (int64_t i = from; i < to; i++) {
        size_t at = (size_t)i * TB__CHECKSUM_BLOCK, left = run->nbytes - at;
        run->sums[i] = tb__checksum_block(run->bytes + at, left < TB__CHECKSUM_BLOCK ? left : TB__CHECKSUM_BLOCK);
    }
}

static _Thread_local const tb__host_device *progressing; /* this thread will check `ended` anyway */

static void on_work_done(tb__work *work) {
    tb__host_run *run = work->arg;
    tb__host_device *device = run->device;
    pthread_mutex_lock(&device->lock);
    TAILQ_INSERT_TAIL(&device->ended, run, ended_link);
    if (progressing != device && !device->is_woken) {
        eventfd_write(device->wake, 1); /* with the lock: once the run is taken, the device may be closed */
        device->is_woken = true;
    }
    pthread_mutex_unlock(&device->lock);
}

/* ---- Runs ------------------------------------------------------------------------------------------------------- */

static void free_run(tb__host_run *run) {
    if (run) {
        free(run->segments);
        free(run->steps);
        free(run->sums);
        free(run->after);
    }
    free(run);
}

static tb_status begin_step(quant_step *s, const tb__host_run *run, size_t index) {
    const tb__move *move = &run->job->moves[index];
    const tb__quantised *q = move->quantised;
    s->move = index;
    s->is_dequant = move->kind == TB__MOVE_DEQUANTISE;
    char *to = move->kind == TB__MOVE_QUANTISE && move->is_dst_in_buffer ? run->dst_buffer : NULL;
    if (q)
        s->tensor = (tb__quant_tensor){.format = q->format,
                                       .rows = q->rows,
                                       .columns = q->columns,
                                       .data = to ? to + (uintptr_t)q->data : q->data,
                                       .scales = to ? to + (uintptr_t)q->scales : q->scales,
                                       .scale = q->scale ? *q->scale : 0};
    if (q && s->is_dequant) {
        tb__quant_rows rows = {.data = move->dst, .dtype = move->dst_dtype, .stride = move->dst_stride[0]};
        rows.data = move->is_dst_in_buffer ? run->dst_buffer + (uintptr_t)move->dst : move->dst;
        return tb__dequant_begin(&s->dequant, &s->tensor, q->first, move->len[0], q->first_column, move->len[1], &rows);
    }
    bool is_in_buffer = move->src_mapping && move->src_mapping[0] == TB__IN_BUFFER;
    const char *from = is_in_buffer ? run->src_buffer + (uintptr_t)move->src[0] : move->src[0];
    tb__quant_rows rows = {.data = (char *)(uintptr_t)from, .dtype = move->src_dtype, .stride = move->src_stride[0][0]};
    return tb__quant_begin(&s->quant, q ? &s->tensor : NULL, q ? q->first : move->first_row, move->len[0], move->len[1],
                           &rows);
}

static tb_status name_failure(tb_status status, const tb__move *move) {
    return status != TB_OK && move->name ? tb__fail_within(status, "tensor '%.100s'", move->name) : status;
}

/* Begins all quantising moves. Scales are read here, when the run begins. */
static tb_status begin_steps(tb__host_run *run) {
    for (size_t i = 0; i < run->nsteps; i++) {
        tb_status status = begin_step(&run->steps[i], run, run->steps[i].move);
        if (status != TB_OK)
            return name_failure(status, &run->job->moves[run->steps[i].move]);
    }
    return TB_OK;
}

static part *find_part(const tb__job *job, uint32_t number) {
    size_t i = 0;
    TB_BISECT(i, job->nparts, job->parts[i].number >= number);
    return i < job->nparts && job->parts[i].number == number ? &job->parts[i] : NULL;
}

static void add_moves(tb__host_run *run, size_t first, size_t last, int64_t *written) {
    const tb__move_costs *costs = &run->job->costs;
    if (first == last)
        return;
    int64_t begin = tb__move_costs_begin(costs, first);
    run->segments[run->nsegments++] = (job_segment){.begin = run->work.total, .job_begin = begin};
    run->work.total += costs->ends[last - 1] - begin;
    for (size_t i = first; i < last; i++) {
        *written += tb__move_written(&run->job->moves[i]);
        if (run->job->moves[i].kind != TB__MOVE_COPY && !run->is_rehearsal)
            run->steps[run->nsteps++].move = i;
    }
}

static int compare_steps(const void *a, const void *b) {
    const quant_step *x = a, *y = b;
    return x->move < y->move ? -1 : x->move > y->move;
}

static tb_status choose_moves(tb__host_run *run, const tb__run *what) {
    tb__job *job = run->job;
    size_t nparts = what->parts ? what->nparts : 1;
    int64_t written = 0;
    run->segments = tb__malloc(nparts, sizeof *run->segments);
    run->steps = tb__calloc(job->nquantised, sizeof *run->steps);
    if ((nparts && !run->segments) || (job->nquantised && !run->steps))
        return TB_NO_MEMORY;
    job->nruns++;
    if (!what->parts)
        add_moves(run, 0, job->costs.n, &written);
    for (size_t i = 0; what->parts && i < what->nparts; i++) {
        part *p = find_part(job, what->parts[i]);
        if (!p)
            continue;
        if (p->last_run == job->nruns)
            return tb__fail(TB_INVALID, "part %" PRIu32 " of a job is listed twice in one run", p->number);
        p->last_run = job->nruns;
        add_moves(run, p->first, p[1].first, &written);
    }
    if (run->nsteps)
        qsort(run->steps, run->nsteps, sizeof *run->steps, compare_steps);
    run->stream = written >= TB__STREAM_BYTES;
    if (run->stream)
        tb__kernels_choose();
    return TB_OK;
}

static void end_run(tb__host_run *run, tb_status status) {
    tb__fence *fence = run->fence;
    for (size_t i = 0; status == TB_OK && i < run->nsteps; i++) {
        quant_step *s = &run->steps[i];
        const tb__move *move = &run->job->moves[s->move];
        float amax = 0;
        if (s->is_dequant)
            continue;
        status = name_failure(tb__quant_end(&s->quant, &amax), move);
        if (status == TB_OK && move->kind == TB__MOVE_AMAX && amax > *move->amax)
            *move->amax = amax;
    }
    if (status == TB_OK && run->sum)
        *run->sum = tb__checksum_block(run->sums, tb__checksum_nblocks(run->nbytes) * sizeof *run->sums);
    fence->status = status;
    if (status != TB_OK)
        snprintf(fence->why, sizeof fence->why, "%s", tb_error_detail());
    fence->state = NULL;
    fence->is_done = true;
    free_run(run);
}

/* Whether the fences that the run waits for are done; *status: one has failed. */
static bool is_ready(const tb__host_run *run, tb_status *status) {
    *status = TB_OK;
    for (size_t i = 0; i < run->nafter; i++) {
        if (!run->after[i]->is_done)
            return false;
        if (run->after[i]->status != TB_OK && *status == TB_OK)
            *status = tb__fail(run->after[i]->status, "%s", run->after[i]->why);
    }
    return true;
}

static void begin_run(tb__host_run *run) {
    tb_status status = run->is_cancelled ? tb__fail(TB_CANCELLED, "it was cancelled") : begin_steps(run);
    if (status != TB_OK || run->work.total == 0) {
        end_run(run, status);
        return;
    }
    run->work.piece = tb__workers_piece(run->job ? run->work.total : (int64_t)run->nbytes);
    if (!run->job) /* blocks, not bytes */
        run->work.piece = (run->work.piece + TB__CHECKSUM_BLOCK - 1) / TB__CHECKSUM_BLOCK;
    run->is_begun = true;
    TAILQ_INSERT_TAIL(&run->device->running, run, link);
    tb__workers_submit(&run->work);
}

static tb__host_run *new_run(tb__device *device, tb__fence *fence, tb__work_fn *fn) {
    tb__host_run *run = tb__calloc(1, sizeof *run);
    if (!run)
        return NULL;
    run->device = (tb__host_device *)device;
    run->fence = fence;
    run->work = (tb__work){.fn = fn, .arg = run, .done = on_work_done};
    return run;
}

/* Even an empty run completes its fence in progress. */
static void queue_run(tb__host_run *run) {
    run->fence->state = run;
    TAILQ_INSERT_TAIL(&run->device->waiting, run, link);
}

tb_status tb__host_run_job(tb__device *device, tb__job *job, const tb__run *what, tb__fence *fence) {
    tb__host_run *run = new_run(device, fence, run_piece);
    if (!run)
        return TB_NO_MEMORY;
    run->job = job;
    run->is_rehearsal = what->is_rehearsal;
    run->src_buffer = what->src_buffer;
    run->dst_buffer = what->dst_buffer;
    run->nafter = what->nafter;
    run->after = tb__malloc(what->nafter, sizeof(tb__fence *));
    tb_status status = what->nafter && !run->after ? TB_NO_MEMORY : choose_moves(run, what);
    if (status != TB_OK) {
        free_run(run);
        return status;
    }
    if (what->nafter)
        memcpy(run->after, what->after, what->nafter * sizeof(tb__fence *));
    queue_run(run);
    return TB_OK;
}

tb_status tb__host_checksum(tb__device *device, const void *address, size_t nbytes, uint64_t *out, tb__fence *fence) {
    tb__host_run *run = new_run(device, fence, sum_blocks);
    size_t nblocks = tb__checksum_nblocks(nbytes);
    if (run)
        run->sums = tb__malloc(nblocks, sizeof *run->sums);
    if (!run || !run->sums) {
        free_run(run);
        return TB_NO_MEMORY;
    }
    run->bytes = address;
    run->nbytes = nbytes;
    run->sum = out;
    run->work.total = (int64_t)nblocks;
    queue_run(run);
    return TB_OK;
}

void tb__host_cancel(tb__device *device, tb__fence *fence) {
    (void)device;
    tb__host_run *run = fence->state;
    if (fence->is_done || !run)
        return;
    run->is_cancelled = true;
    run->nafter = 0;
    if (run->is_begun)
        tb__workers_cancel(&run->work);
}

/* ---- Progress --------------------------------------------------------------------------------------------------- */

static bool begin_ready_runs(tb__host_device *device) {
    bool did = false;
    for (tb__host_run *run = TAILQ_FIRST(&device->waiting), *next; run; run = next) {
        tb_status status;
        next = TAILQ_NEXT(run, link);
        if (!is_ready(run, &status))
            continue;
        TAILQ_REMOVE(&device->waiting, run, link);
        if (status == TB_OK)
            begin_run(run);
        else
            end_run(run, status);
        did = true;
    }
    return did;
}

static bool complete_ended_runs(tb__host_device *device) {
    bool did = false;
    for (;;) {
        pthread_mutex_lock(&device->lock);
        tb__host_run *run = TAILQ_FIRST(&device->ended);
        eventfd_t unused;
        if (run)
            TAILQ_REMOVE(&device->ended, run, ended_link);
        else if (device->is_woken)
            eventfd_read(device->wake, &unused); /* with the lock: it is readable only if a run has ended */
        device->is_woken &= run != NULL;
        pthread_mutex_unlock(&device->lock);
        if (!run)
            return did;
        TAILQ_REMOVE(&device->running, run, link);
        tb_status status = run->status != TB_OK ? tb__fail(run->status, "%s", run->why) : TB_OK;
        end_run(run, run->is_cancelled ? tb__fail(TB_CANCELLED, "it was cancelled") : status);
        did = true;
    }
}

/* One piece of the first run that has one. */
static bool help_one_piece(tb__host_device *device) {
    tb__host_run *run = TAILQ_FIRST(&device->running);
    progressing = device;
    while (run && !tb__workers_help(&run->work))
        run = TAILQ_NEXT(run, link);
    progressing = NULL;
    return run;
}

bool tb__host_progress(tb__device *base) {
    tb__host_device *device = (tb__host_device *)base;
    bool did = begin_ready_runs(device);
    did |= help_one_piece(device);
    return complete_ended_runs(device) || did;
}
