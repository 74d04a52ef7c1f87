/* Chooses the device that does a move; runs jobs of several devices as one. */
#include "loop/jobs.h"

#include "base/mem.h"
#include "loop/loop_inside.h"

#include <stdio.h>

/* The device that reads source k. */
static tb__device *find_source_device(tb__loop *loop, const tb__move *move, uint32_t k, tb__device *host) {
    const tb__mapping *mapping = move->src_mapping ? move->src_mapping[k] : NULL;
    if (!mapping)
        return tb__loop_find_device(loop, move->src[k], 1);
    for (size_t i = 0; mapping != TB__IN_BUFFER && i < loop->ndevices; i++) {
        if (loop->devices[i]->ops == mapping->ops)
            return loop->devices[i];
    }
    return host;
}

/* The destination's device does a move; if the destination is in host memory, the first device that owns an operand, or
 * has mapped it. */
tb__device *tb__jobs_choose_device(tb__loop *loop, const tb__move *move) {
    tb__device *host = tb__loop_find_device(loop, NULL, 0), *device = host;
    const tb__quantised *q = move->quantised;
    bool has_dst = move->kind == TB__MOVE_COPY || move->kind == TB__MOVE_DEQUANTISE;
    if (has_dst && !move->is_dst_in_buffer)
        device = tb__loop_find_device(loop, move->dst, 1);
    bool is_in_buffer = move->kind == TB__MOVE_QUANTISE && move->is_dst_in_buffer;
    if (device == host && q && !is_in_buffer)
        device = tb__loop_find_device(loop, q->data, 1);
    if (device == host && q && !is_in_buffer)
        device = tb__loop_find_device(loop, q->scales, 1);
    if (device == host && q)
        device = tb__loop_find_device(loop, q->scale, 1);
    for (uint32_t k = 0; device == host && k < move->nsrc; k++)
        device = find_source_device(loop, move, k, host);
    return device;
}

static tb_status prepare_device_job(tb__device *device, tb__device *const *devices, const tb__move *moves,
                                    size_t nmoves, tb__move *some, tb__jobs *out) {
    size_t n = 0;
    for (size_t i = 0; i < out->count; i++) {
        if (out->item[i].device == device)
            return TB_OK;
    }
    for (size_t i = 0; i < nmoves; i++) {
        if (devices[i] == device)
            some[n++] = moves[i];
    }
    if (out->count == TB__JOBS_MAX)
        return tb__fail(TB_TOO_BIG, "tensors on more than %d devices", TB__JOBS_MAX);
    TB_TRY(device->ops->prepare(device, some, n, &out->item[out->count].job));
    out->item[out->count++].device = device;
    return TB_OK;
}

tb_status tb__jobs_prepare(tb__loop *loop, const tb__move *moves, size_t nmoves, tb__jobs *out) {
    tb__device **devices = tb__malloc(nmoves, sizeof *devices);
    tb__move *some = tb__malloc(nmoves, sizeof *some);
    tb_status status = devices && some ? TB_OK : TB_NO_MEMORY;
    *out = (tb__jobs){0};
    for (size_t i = 0; i < nmoves && status == TB_OK; i++)
        devices[i] = tb__jobs_choose_device(loop, &moves[i]);
    for (size_t i = 0; i < nmoves && status == TB_OK; i++) {
        if (i == 0 || devices[i] != devices[i - 1])
            status = prepare_device_job(devices[i], devices, moves, nmoves, some, out);
    }
    free(devices);
    free(some);
    if (status != TB_OK)
        tb__jobs_release(out);
    return status;
}

void tb__jobs_release(tb__jobs *jobs) {
    for (size_t i = 0; i < jobs->count; i++)
        jobs->item[i].device->ops->release(jobs->item[i].device, jobs->item[i].job);
    jobs->count = 0;
}

static void on_job_done(tb__submitted *submitted) {
    struct tb__jobs_item *item = (struct tb__jobs_item *)submitted;
    tb__jobs_run *run = item->run;
    const tb__fence *fence = &submitted->fence;
    if (fence->status != TB_OK && (run->status == TB_OK || run->status == TB_CANCELLED)) {
        run->status = fence->status;
        run->failed = submitted->device;
        snprintf(run->why, sizeof run->why, "%s", fence->why);
    }
    item->run = NULL;
    if (--run->left == 0)
        run->done(run);
}

void tb__jobs_submit(tb__loop *loop, const tb__jobs *jobs, const tb__run *what, tb__jobs_run *run) {
    run->left = jobs->count;
    for (size_t i = 0; i < jobs->count; i++) {
        run->item[i].run = run;
        run->item[i].submitted = (tb__submitted){
            .device = jobs->item[i].device, .job = jobs->item[i].job, .run = *what, .done = on_job_done};
        tb__loop_submit(loop, &run->item[i].submitted);
    }
}

bool tb__jobs_rehearse(tb__loop *loop, const tb__jobs *jobs, tb__jobs_run *run) {
    run->left = 0;
    for (size_t i = 0; i < jobs->count; i++) {
        if (jobs->item[i].device->ops != &tb__host_device_ops)
            continue;
        run->left++;
        run->item[i].run = run;
        run->item[i].submitted = (tb__submitted){.device = jobs->item[i].device,
                                                 .job = jobs->item[i].job,
                                                 .run = {.is_rehearsal = true},
                                                 .done = on_job_done};
        tb__loop_submit(loop, &run->item[i].submitted);
    }
    return run->left > 0;
}

void tb__jobs_submit_sum(tb__loop *loop, const void *bytes, size_t nbytes, tb__jobs_run *run) {
    run->left = 1;
    run->item[0].run = run;
    run->item[0].submitted = (tb__submitted){
        .device = tb__loop_find_device(loop, bytes, nbytes), .bytes = bytes, .nbytes = nbytes, .done = on_job_done};
    tb__loop_submit(loop, &run->item[0].submitted);
}

bool tb__jobs_are_begun_on(const tb__jobs_run *run, const tb__device *device) {
    for (size_t i = 0; i < TB__JOBS_MAX; i++) {
        const tb__submitted *it = &run->item[i].submitted;
        if (run->item[i].run && (!it->is_begun || it->device != device))
            return false;
    }
    return true;
}

void tb__jobs_cancel(tb__loop *loop, tb__jobs_run *run) {
    for (size_t i = 0; i < TB__JOBS_MAX; i++) {
        if (run->item[i].run)
            tb__loop_cancel(loop, &run->item[i].submitted);
    }
}
