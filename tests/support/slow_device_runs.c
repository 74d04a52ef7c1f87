/* Jobs of the slow device, and the thread that does their runs. */
#include "slow_device_inside.h"

#include "base/checksum.h"
#include "base/mem.h"
#include "device/host/move.h"
#include "device/host/quant.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>

struct tb__job {
    tb__arena arena;
    tb__move *moves;
    size_t nmoves;
    size_t nruns; /* not yet complete */
    TB_VEC(slow_mapping *) mappings;
};

struct slow_run {
    slow_pending pending;
    slow_device *device;
    tb__job *job; /* NULL: a checksum */
    tb__fence *fence;
    char *src_buffer, *dst_buffer;
    size_t *order; /* of its moves */
    size_t nmoves, next;
    tb__fence **after;
    size_t nafter;
    const char *bytes;    /* of a checksum: its moves are blocks of them */
    uint64_t *sums, *sum; /* of blocks, and where the result goes */
    size_t nbytes;
    int64_t due_us;
    bool is_cancelled, ignores_cancel;
    bool is_held, is_failing, is_to_own_buffer;
    uint64_t held_until; /* slow.times_let_go is this */
    size_t stop_at;      /* so many moves are done before it is held or fails */
    tb_status status;
    char why[TB__FENCE_WHY_MAX];
    TAILQ_ENTRY(slow_run) link;
};

int64_t slow_now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* ---- Jobs -------------------------------------------------------------------------------------------------------- */

static tb_status copy_sources(tb__job *job, tb__move *move) {
    const void **src = tb__arena_alloc(&job->arena, move->nsrc, sizeof *src);
    int64_t(*stride)[TB_MAX_DIMS] = tb__arena_alloc(&job->arena, move->nsrc, sizeof *stride);
    tb__mapping **left = tb__arena_alloc(&job->arena, move->nsrc, sizeof *left);
    if (!src || !stride || !left)
        return TB_NO_MEMORY;
    for (uint32_t k = 0; k < move->nsrc; k++) {
        tb__mapping *mapping = move->src_mapping ? move->src_mapping[k] : NULL;
        src[k] = mapping ? move->src[k] : slow_translate(move->src[k]);
        left[k] = mapping == TB__IN_BUFFER ? TB__IN_BUFFER : NULL;
        if (mapping && mapping != TB__IN_BUFFER)
            TB_TRY(tb__mapping_source(mapping, &slow_device_ops, move, k, &src[k]));
        if (mapping && mapping != TB__IN_BUFFER && mapping->ops == &slow_device_ops &&
            !tb__vec_push(&job->mappings, (slow_mapping *)mapping))
            return TB_NO_MEMORY;
        memcpy(stride[k], move->src_stride[k], sizeof *stride);
    }
    move->src = src;
    move->src_stride = (const int64_t(*)[TB_MAX_DIMS])stride;
    move->src_mapping = left;
    return TB_OK;
}

static tb_status fill_job(tb__job *job, const tb__move *moves, size_t nmoves) {
    job->moves = tb__arena_alloc(&job->arena, nmoves, sizeof *job->moves);
    if (!job->moves)
        return TB_NO_MEMORY;
    for (job->nmoves = 0; job->nmoves < nmoves; job->nmoves++) {
        tb__move *move = &job->moves[job->nmoves];
        *move = moves[job->nmoves];
        TB_TRY(tb__move_check(move));
        TB_TRY(copy_sources(job, move));
        if (!move->is_dst_in_buffer)
            move->dst = slow_translate(move->dst);
        if (move->quantised) {
            tb__quantised *copy = tb__arena_alloc(&job->arena, 1, sizeof *copy);
            if (!copy)
                return TB_NO_MEMORY;
            *copy = *move->quantised;
            copy->scale = slow_translate(copy->scale);
            if (move->kind != TB__MOVE_QUANTISE || !move->is_dst_in_buffer) {
                copy->data = slow_translate(copy->data);
                copy->scales = slow_translate(copy->scales);
            }
            move->quantised = copy;
        }
    }
    return TB_OK;
}

static void free_job(tb__job *job) {
    if (job) {
        tb__arena_fini(&job->arena);
        free(job->mappings.item);
    }
    free(job);
}

/* With the lock held: runs of the job begin (1) or end (-1). */
static void count_runs(tb__job *job, int change) {
    for (size_t i = 0; i < job->mappings.count; i++) {
        if (job->mappings.item[i]->is_unmapped)
            slow_die("a job is run that uses unmapped memory");
        job->mappings.item[i]->nruns += (size_t)change;
    }
    job->nruns += (size_t)change;
}

tb_status slow_prepare(tb__device *device, const tb__move *moves, size_t nmoves, tb__job **out) {
    TB_TRY(slow_check_call(SLOW_DEVICE_PREPARE));
    tb__job *job = tb__calloc(1, sizeof *job);
    tb_status status = job ? fill_job(job, moves, nmoves) : TB_NO_MEMORY;
    if (status != TB_OK) {
        free_job(job);
        return status;
    }
    ((slow_device *)device)->njobs++;
    *out = job;
    return TB_OK;
}

void slow_release(tb__device *device, tb__job *job) {
    if (job && job->nruns > 0)
        slow_die("a job is released whose runs are under way");
    if (job)
        ((slow_device *)device)->njobs--;
    free_job(job);
}

/* ---- The thread -------------------------------------------------------------------------------------------------- */

/* The matrix of a move; of one in the buffer, addresses count from there. */
static tb__quant_tensor tensor_of(const tb__quantised *q, char *buffer) {
    return (tb__quant_tensor){.format = q->format,
                              .rows = q->rows,
                              .columns = q->columns,
                              .data = buffer ? buffer + (uintptr_t)q->data : q->data,
                              .scales = buffer ? buffer + (uintptr_t)q->scales : q->scales,
                              .scale = q->scale ? *q->scale : 0};
}

enum { MOST_SOURCES = 64 };

static tb_status do_quantised(const tb__move *move, char *buffer) {
    const tb__quantised *q = move->quantised;
    if (move->kind == TB__MOVE_DEQUANTISE) {
        tb__quant_tensor from = tensor_of(q, NULL);
        tb__quant_rows rows = {move->dst, move->dst_dtype, move->dst_stride[0]};
        tb__dequant_job job;
        TB_TRY(tb__dequant_begin(&job, &from, q->first, move->len[0], q->first_column, move->len[1], &rows));
        if (job.nparts > 0)
            tb__dequant_run(&job, 0, job.nparts);
        return TB_OK;
    }
    tb__quant_rows rows = {(char *)(uintptr_t)move->src[0], move->src_dtype, move->src_stride[0][0]};
    if (move->kind == TB__MOVE_QUANTISE) {
        tb__quant_tensor to = tensor_of(q, buffer);
        return tb__quant_quantise(&to, q->first, move->len[0], &rows);
    }
    float amax = 0;
    TB_TRY(tb__quant_amax(&rows, move->len[0], move->len[1], &amax));
    *move->amax = amax > *move->amax ? amax : *move->amax;
    return TB_OK;
}

static tb_status do_move(const slow_run *run, size_t index) {
    tb__move move = run->job->moves[index];
    const void *src[MOST_SOURCES];
    if (move.nsrc > MOST_SOURCES)
        slow_die("a move with too many sources");
    for (uint32_t k = 0; k < move.nsrc; k++)
        src[k] = move.src_mapping[k] ? run->src_buffer + (uintptr_t)move.src[k] : move.src[k];
    move.src = src;
    move.src_mapping = NULL;
    char *buffer = move.is_dst_in_buffer ? run->dst_buffer : NULL;
    if (buffer)
        move.dst = buffer + (uintptr_t)move.dst;
    move.is_dst_in_buffer = false;
    if (move.kind == TB__MOVE_COPY)
        return tb__moves_run(&move, 1);
    tb_status status = do_quantised(&move, buffer);
    return status != TB_OK && move.name ? tb__fail_within(status, "tensor '%.100s'", move.name) : status;
}

/* With the lock held. */
static void end_run(slow_run *run, tb_status status, const char *why) {
    slow_streams_end_run(run);
    slow.nheld -= run->is_held;
    pthread_cond_broadcast(&slow.changed);
    run->status = status;
    if (why != run->why)
        snprintf(run->why, sizeof run->why, "%s", why);
    TAILQ_REMOVE(&run->device->begun, run, link);
    TAILQ_INSERT_TAIL(&run->device->ended, run, link);
    eventfd_write(run->device->wake, 1);
}

static void sum_block(const slow_run *run, size_t index) {
    size_t at = index * TB__CHECKSUM_BLOCK, left = run->nbytes - at;
    run->sums[index] = tb__checksum_block(run->bytes + at, left < TB__CHECKSUM_BLOCK ? left : TB__CHECKSUM_BLOCK);
}

static bool is_held(const slow_run *run) {
    return run->is_held && run->held_until == slow.times_let_go;
}

static bool may_go_on(const slow_run *run, int64_t now) {
    return run->due_us <= now && !(is_held(run) && run->next == run->stop_at);
}

/* With the lock held, which is free while the move is done. */
static void go_on(slow_run *run) {
    if (run->is_cancelled && !run->ignores_cancel && !is_held(run)) {
        end_run(run, TB_CANCELLED, "it was cancelled");
    } else if (run->is_failing && run->next == run->stop_at) {
        end_run(run, run->status, run->why);
    } else if (run->next == run->nmoves) {
        if (run->sum)
            *run->sum = tb__checksum_block(run->sums, run->nmoves * sizeof *run->sums);
        end_run(run, TB_OK, "");
    } else {
        tb_status status = TB_OK;
        size_t index = run->order[run->next++];
        slow_unlock();
        if (run->job)
            status = do_move(run, index);
        else
            sum_block(run, index);
        slow_lock();
        if (status != TB_OK)
            end_run(run, status, tb_error_detail());
    }
}

void *slow_do_runs(void *arg) {
    slow_device *device = arg;
    slow_lock();
    while (!device->is_stopping) {
        slow_run *chosen = NULL;
        int64_t due = slow_open_late_gates(device), now = slow_now_us(), ngoing = 0;
        for (slow_run *run = TAILQ_FIRST(&device->begun); run; run = TAILQ_NEXT(run, link)) {
            if (may_go_on(run, now) && rng_range(&slow.random, 0, ngoing++) == 0)
                chosen = run;
            else if (run->due_us > now && run->due_us < due)
                due = run->due_us;
        }
        if (chosen)
            go_on(chosen);
        else
            slow_wait_until(due);
    }
    slow_unlock();
    return NULL;
}

/* ---- Runs -------------------------------------------------------------------------------------------------------- */

static void free_run(slow_run *run) {
    if (run) {
        free(run->order);
        free(run->sums);
        free(run->after);
    }
    free(run);
}

static bool has_part(const tb__run *what, uint32_t part) {
    for (size_t i = 0; what->parts && i < what->nparts; i++) {
        if (what->parts[i] == part)
            return true;
    }
    return !what->parts;
}

static tb_status fill_run(slow_run *run, const tb__run *what) {
    run->src_buffer = slow_translate(what->src_buffer);
    run->dst_buffer = slow_translate(what->dst_buffer);
    run->is_to_own_buffer = run->dst_buffer != what->dst_buffer;
    run->order = tb__malloc(run->job->nmoves, sizeof *run->order);
    run->after = tb__malloc(what->nafter, sizeof(tb__fence *));
    if (!run->order || !run->after)
        return TB_NO_MEMORY;
    for (size_t i = 0; what->parts && i < what->nparts; i++) {
        if (has_part(&(tb__run){.parts = what->parts, .nparts = i}, what->parts[i]))
            return tb__fail(TB_INVALID, "part %" PRIu32 " of a job is listed twice in one run", what->parts[i]);
    }
    for (size_t i = 0; i < run->job->nmoves; i++) {
        if (has_part(what, run->job->moves[i].part))
            run->order[run->nmoves++] = i;
    }
    for (size_t i = 0; i < what->nafter; i++)
        run->after[run->nafter++] = what->after[i];
    return TB_OK;
}

static void queue_run(slow_run *run) {
    slow_device *device = run->device;
    slow_lock();
    for (size_t i = 1; i < run->nmoves; i++) {
        size_t other = (size_t)rng_range(&slow.random, 0, (int64_t)i), index = run->order[i];
        run->order[i] = run->order[other];
        run->order[other] = index;
    }
    run->ignores_cancel = rng_range(&slow.random, 0, 3) == 0;
    run->stop_at = (size_t)rng_range(&slow.random, 0, (int64_t)run->nmoves);
    run->is_held = slow_strikes(&slow.hold);
    run->held_until = slow.times_let_go;
    run->is_failing = slow_strikes(&slow.run);
    if (run->is_failing) {
        run->status = slow.run.status;
        memcpy(run->why, slow.run.why, sizeof run->why);
    }
    if (run->job)
        count_runs(run->job, 1);
    slow.nbuffer_runs += run->is_to_own_buffer;
    slow_unlock();
    run->fence->state = run;
    TAILQ_INSERT_TAIL(&device->waiting, run, link);
}

tb_status slow_run_job(tb__device *device, tb__job *job, const tb__run *what, tb__fence *fence) {
    TB_TRY(slow_check_call(SLOW_DEVICE_RUN));
    slow_run *run = tb__calloc(1, sizeof *run);
    if (!run)
        return TB_NO_MEMORY;
    *run = (slow_run){.device = (slow_device *)device, .job = job, .fence = fence};
    tb_status status = fill_run(run, what);
    if (status != TB_OK) {
        free_run(run);
        return status;
    }
    queue_run(run);
    return TB_OK;
}

tb_status slow_checksum(tb__device *device, const void *address, size_t nbytes, uint64_t *out, tb__fence *fence) {
    TB_TRY(slow_check_call(SLOW_DEVICE_RUN));
    slow_run *run = tb__calloc(1, sizeof *run);
    if (!run)
        return TB_NO_MEMORY;
    *run = (slow_run){.device = (slow_device *)device,
                      .fence = fence,
                      .nmoves = tb__checksum_nblocks(nbytes),
                      .bytes = slow_translate(address),
                      .nbytes = nbytes,
                      .sum = out};
    run->sums = tb__malloc(run->nmoves, sizeof *run->sums);
    run->order = tb__malloc(run->nmoves, sizeof *run->order);
    if (!run->sums || !run->order) {
        free_run(run);
        return TB_NO_MEMORY;
    }
    for (size_t i = 0; i < run->nmoves; i++)
        run->order[i] = i;
    queue_run(run);
    return TB_OK;
}

void slow_cancel(tb__device *device, tb__fence *fence) {
    (void)device;
    slow_lock();
    slow_pending *pending = fence->is_done ? NULL : fence->state;
    if (pending && pending->is_mark)
        slow_cancel_mark((slow_work *)pending);
    else if (pending)
        ((slow_run *)pending)->is_cancelled = true;
    slow_unlock();
}

void slow_complete_fence(tb__fence *fence, tb_status status, const char *why) {
    fence->status = status;
    snprintf(fence->why, sizeof fence->why, "%s", why);
    fence->state = NULL;
    fence->is_done = true;
}

static void complete(slow_run *run, tb_status status, const char *why) {
    slow_lock(); /* another thread may be making a stream wait for it */
    slow_streams_end_run(run);
    slow_complete_fence(run->fence, status, why);
    if (run->job)
        count_runs(run->job, -1);
    slow_unlock();
    free_run(run);
}

/* The fence that keeps it from beginning: not done, or failed. */
static const tb__fence *find_obstacle(const slow_run *run) {
    const tb__fence *failed = NULL;
    for (size_t i = 0; i < run->nafter; i++) {
        if (!run->after[i]->is_done)
            return run->after[i];
        if (run->after[i]->status != TB_OK && !failed)
            failed = run->after[i];
    }
    return failed;
}

static bool begin_waiting(slow_device *device) {
    bool did = false;
    for (slow_run *run = TAILQ_FIRST(&device->waiting), *next; run; run = next) {
        const tb__fence *obstacle = run->is_cancelled ? NULL : find_obstacle(run);
        next = TAILQ_NEXT(run, link);
        if (obstacle && !obstacle->is_done)
            continue;
        TAILQ_REMOVE(&device->waiting, run, link);
        did = true;
        if (run->is_cancelled) {
            complete(run, TB_CANCELLED, "it was cancelled");
        } else if (obstacle) {
            complete(run, obstacle->status, obstacle->why);
        } else {
            slow_lock();
            int64_t most = rng_range(&slow.random, 0, 19) == 0 ? slow.most_us * 10 : slow.most_us;
            run->due_us = slow_now_us() + rng_range(&slow.random, 0, most);
            slow.nheld += run->is_held;
            TAILQ_INSERT_TAIL(&device->begun, run, link);
            pthread_cond_broadcast(&slow.changed);
            slow_unlock();
        }
    }
    return did;
}

bool slow_progress(tb__device *base) {
    slow_device *device = (slow_device *)base;
    eventfd_t unused;
    eventfd_read(device->wake, &unused);
    slow_lock();
    bool did = slow_complete_marks(device);
    slow_unlock();
    did |= begin_waiting(device);
    for (;;) {
        slow_lock();
        slow_run *run = TAILQ_FIRST(&device->ended);
        if (run)
            TAILQ_REMOVE(&device->ended, run, link);
        slow_unlock();
        if (!run)
            return did;
        complete(run, run->status, run->why);
        did = true;
    }
}
