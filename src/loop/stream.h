/* A point on a stream of the program: it stands for the work that was on the stream at that time. A send reads, and a
 * receive writes, after its point.
 *
 * All of this needs the loop's lock, unless it says otherwise. */
#ifndef TB_LOOP_STREAM_H
#define TB_LOOP_STREAM_H

#include "loop/loop.h"

typedef struct tb__stream_point {
    tb__submitted submitted; /* first. Its fence is for `after` in runs, and for the loop */
    tb__loop *loop;
    size_t nusers;
    bool is_reached; /* the work is done: TB_OK, or why it has failed */
    tb_status status;
    char why[TB__FENCE_WHY_MAX];
} tb__stream_point;

/* A point after all work on the stream, with one user. Without the lock: devices may wait for room on the stream. */
tb_status tb__stream_point_create(tb__loop *loop, tb__device *device, const void *stream, tb__stream_point **out);
tb__stream_point *tb__stream_point_use(tb__stream_point *point); /* one more user; NULL is allowed */
/* Removes a user. After the last one, the point is not waited for any more. NULL is allowed. */
void tb__stream_point_put(tb__stream_point *point);

/* Before the loop is destroyed: waits until devices have finished with
 * points that have no users. Without the lock, and without a
 * driver. */
void tb__stream_points_drain(tb__loop *loop);

#endif
