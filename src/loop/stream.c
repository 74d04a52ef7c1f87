/* Points on streams. */
#include "loop/stream.h"

#include "base/mem.h"
#include "loop/loop_inside.h"

#include <stdio.h>
#include <unistd.h>

enum { DRAIN_MS = 5000 };

static void free_unused(tb__stream_point *point) {
    if (point->is_reached && point->nusers == 0)
        free(point);
}

static void on_reached(tb__submitted *submitted) {
    tb__stream_point *point = (tb__stream_point *)submitted;
    point->is_reached = true;
    point->status = submitted->fence.status;
    snprintf(point->why, sizeof point->why, "%s", submitted->fence.why);
    tb__loop_wake(point->loop);
    free_unused(point);
}

tb_status tb__stream_point_create(tb__loop *loop, tb__device *device, const void *stream, tb__stream_point **out) {
    tb__stream_point *point = tb__calloc(1, sizeof *point);
    if (!point)
        return TB_NO_MEMORY;
    point->loop = loop;
    point->nusers = 1;
    point->submitted = (tb__submitted){.device = device, .done = on_reached};
    tb_status status = tb__device_stream_record(device, stream, &point->submitted.fence);
    if (status != TB_OK) {
        free(point);
        return status;
    }
    tb__loop_lock(loop);
    tb__loop_follow(loop, &point->submitted);
    tb__loop_unlock(loop);
    *out = point;
    return TB_OK;
}

tb__stream_point *tb__stream_point_use(tb__stream_point *point) {
    if (point)
        point->nusers++;
    return point;
}

void tb__stream_point_put(tb__stream_point *point) {
    if (!point || --point->nusers > 0)
        return;
    if (!point->is_reached)
        tb__loop_cancel(point->loop, &point->submitted);
    free_unused(point);
}

/* Removes points that are done from the list. Returns whether others are left. */
static bool finish_points(tb__loop *loop) {
    bool has_more = false;
    for (tb__submitted **at = &loop->submitted, *it; (it = *at);) {
        if (it->done != on_reached || !it->fence.is_done) {
            has_more |= it->done == on_reached;
            at = &it->next;
            continue;
        }
        *at = it->next;
        on_reached(it);
    }
    return has_more;
}

void tb__stream_points_drain(tb__loop *loop) {
    int64_t deadline_ms = tb__now_ms() + DRAIN_MS;
    while (finish_points(loop) && tb__now_ms() < deadline_ms) {
        for (tb__submitted *it = loop->submitted; it; it = it->next) {
            if (it->done == on_reached && !it->fence.is_done)
                it->device->ops->cancel(it->device, &it->fence);
        }
        for (size_t i = 0; i < loop->ndevices; i++)
            (void)loop->devices[i]->ops->progress(loop->devices[i]);
        usleep(100);
    }
}
