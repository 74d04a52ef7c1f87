/* Jobs and their runs: parts, several at once, order, cancelling, refusals, a shortage of memory, lifetimes. */
#include "device_conformance_inside.h"

#include "base/checksum.h"
#include "base/mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static void list_images(const boxes *b, uint8_t **images) {
    for (int i = 0; i < NAREAS; i++)
        images[i] = b->areas[i].image;
}

static void assert_done_well(const tb__fence *fence) {
    assert_true(fence->is_done);
    if (fence->status != TB_OK)
        fail_msg("%s: %s", tb_status_string(fence->status), fence->why);
}

/* One job, many runs of some of its parts, in any order; among them numbers that no move has. */
void check_parts_of_jobs(suite *s) {
    enum { PARTS = 7, RUNS = 12 };
    boxes b;
    for (int c = 0; c < 8 / LESS; c++) {
        make_boxes(s, &b, 40, (size_t)3 << 20);
        for (int i = 0; i < 30; i++) {
            box_rules r = random_rules(s, &b, 400);
            add_box(s, &b, &r, (uint32_t)rng_range(&s->g, 0, PARTS - 1) * 1000003); /* any numbers */
        }
        tb__job *job = prepare_boxes(s, &b);
        for (int run = 0; run < RUNS; run++) {
            uint32_t parts[PARTS + 2], nparts = 0;
            uint8_t *images[NAREAS];
            for (uint32_t p = 0; p < PARTS + 2; p++) {
                if (rng_range(&s->g, 0, 1))
                    parts[nparts++] = p == PARTS ? UINT32_MAX : p * 1000003;
            }
            for (uint32_t p = 1; p < nparts; p++) {
                uint32_t other = (uint32_t)rng_range(&s->g, 0, p), t = parts[p];
                parts[p] = parts[other];
                parts[other] = t;
            }
            put_boxes(s, &b);
            list_images(&b, images);
            tb__fence fence = {0};
            tb__run what = {.parts = parts,
                            .nparts = nparts,
                            .src_buffer = b.areas[AREA_BUFFER].at,
                            .dst_buffer = b.areas[AREA_BUFFER].at};
            if (run == RUNS - 1)
                what.parts = NULL; /* all */
            assert_ok(s->device->ops->run(s->device, job, &what, &fence));
            for (size_t i = 0; i < b.n; i++) {
                bool is_chosen = !what.parts;
                for (uint32_t p = 0; p < nparts; p++)
                    is_chosen |= parts[p] == b.box[i].move.part;
                if (is_chosen)
                    evaluate_box(&b.box[i], images);
            }
            memset(parts, POISON, sizeof parts); /* they were needed for the call only */
            what = (tb__run){0};
            wait_for_one(s, &fence);
            assert_done_well(&fence);
            check_boxes(s, &b, "some parts");
        }
        s->device->ops->release(s->device, job);
        free_boxes(&b);
    }
}

/* Runs of one job, each with a buffer of its own. */
void check_runs_at_once(suite *s) {
    enum { RUNS = 6 };
    boxes b;
    for (int c = 0; c < 12 / LESS; c++) {
        area buffers[RUNS];
        tb__fence fences[RUNS] = {0}, *list[RUNS];
        uint8_t *images[NAREAS];
        make_boxes(s, &b, 20, (size_t)2 << 20);
        for (int i = 0; i < 20; i++) {
            box_rules r = random_rules(s, &b, 1000);
            bool is_buffer_host = b.areas[AREA_BUFFER].owner == s->host && !s->is_host;
            r.dst_area = AREA_BUFFER;
            if (is_buffer_host) {
                r.src_area = AREA_SRC;
                r.nsrc = r.nsrc ? r.nsrc : 1;
            }
            add_box(s, &b, &r, (uint32_t)i);
        }
        put_boxes(s, &b);
        list_images(&b, images);
        tb__job *job = prepare_boxes(s, &b);
        for (int r = 0; r < RUNS; r++) {
            buffers[r] = make_area(s, b.areas[AREA_BUFFER].owner, b.areas[AREA_BUFFER].nbytes);
            fill_random(s, buffers[r].image, buffers[r].nbytes);
            put_area(s, &buffers[r]);
        }
        for (int r = 0; r < RUNS; r++) {
            list[r] = &fences[r];
            assert_ok(s->device->ops->run(
                s->device, job, &(tb__run){.src_buffer = buffers[r].at, .dst_buffer = buffers[r].at}, &fences[r]));
            images[AREA_BUFFER] = buffers[r].image;
            for (size_t i = 0; i < b.n; i++)
                evaluate_box(&b.box[i], images);
        }
        wait_for(s, list, RUNS);
        for (int r = 0; r < RUNS; r++) {
            assert_done_well(&fences[r]);
            check_area(s, &buffers[r], "a buffer of one of several runs");
            free_area(&buffers[r]);
        }
        check_boxes(s, &b, "several runs");
        s->device->ops->release(s->device, job);
        free_boxes(&b);
    }
}

/* ---- Order ------------------------------------------------------------------------------------------------------- */

/* Bytes go through a chain of areas, each move after the one before; on the device that is tested and, where both ends
 * are in host memory, on the host. */
static void check_chain(suite *s, size_t nbytes) {
    enum { LINKS = 12 };
    area areas[LINKS + 1];
    const void *src[LINKS];
    tb__job *jobs[LINKS];
    tb__device *workers[LINKS];
    tb__fence fences[LINKS] = {0}, *list[LINKS];
    for (int i = 0; i <= LINKS; i++) {
        areas[i] = make_area(s, rng_range(&s->g, 0, 1) ? s->host : s->device, nbytes);
        memset(areas[i].image, POISON, nbytes);
        if (i == 0)
            fill_random(s, areas[0].image, nbytes);
        put_area(s, &areas[i]);
        memcpy(areas[i].image, areas[0].image, nbytes);
    }
    for (int i = 0; i < LINKS; i++) {
        bool is_host = areas[i].owner == s->host && areas[i + 1].owner == s->host;
        workers[i] = is_host ? s->host : s->device;
        src[i] = areas[i].at;
        tb__move move = byte_move(areas[i + 1].at, &src[i], nbytes);
        assert_ok(workers[i]->ops->prepare(workers[i], &move, 1, &jobs[i]));
        list[i] = &fences[i];
    }
    for (int i = 0; i < LINKS; i++) {
        tb__fence *after[2] = {list[i ? i - 1 : 0], list[i / 2]};
        tb__run what = {.after = after, .nafter = i ? 2 : 0};
        assert_ok(workers[i]->ops->run(workers[i], jobs[i], &what, &fences[i]));
        after[0] = after[1] = NULL;
    }
    wait_for(s, &list[LINKS - 1], 1);
    for (int i = 0; i < LINKS; i++) {
        assert_done_well(&fences[i]); /* all those before it are done */
        workers[i]->ops->release(workers[i], jobs[i]);
    }
    for (int i = 0; i <= LINKS; i++) {
        check_area(s, &areas[i], "a chain");
        free_area(&areas[i]);
    }
}

/* What comes after a failure fails likewise, and does nothing. */
static void check_failed_first(suite *s) {
    area a = make_area(s, s->device, 1000);
    const void *src = a.at;
    tb__move move = byte_move(a.at + 500, &src, 500);
    tb__fence failed = {.is_done = true, .status = TB_LOST, .why = "rank 7 is gone"}, well = {.is_done = true};
    tb__fence *after[] = {&well, &failed}, fences[2] = {0}, *list[] = {&fences[0], &fences[1]};
    tb__job *job;
    fill_random(s, a.image, a.nbytes);
    put_area(s, &a);
    assert_ok(s->device->ops->prepare(s->device, &move, 1, &job));
    assert_ok(s->device->ops->run(s->device, job, &(tb__run){.after = after, .nafter = 2}, &fences[0]));
    tb__fence *then[] = {&fences[0]};
    assert_ok(s->device->ops->run(s->device, job, &(tb__run){.after = then, .nafter = 1}, &fences[1]));
    assert_false(fences[0].is_done || fences[1].is_done);
    wait_for(s, list, 2);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(fences[i].status, TB_LOST);
        assert_string_equal(fences[i].why, "rank 7 is gone");
    }
    check_area(s, &a, "after a failure");
    s->device->ops->release(s->device, job);
    free_area(&a);
}

/* A run waits as long as the fence that comes first, and no longer. */
static void check_waiting(suite *s) {
    area a = make_area(s, s->device, 1000);
    const void *src = a.at;
    tb__move move = byte_move(a.at + 500, &src, 500);
    tb__fence first = {0}, *after[] = {&first}, fence = {0};
    tb__job *job;
    fill_random(s, a.image, a.nbytes);
    put_area(s, &a);
    assert_ok(s->device->ops->prepare(s->device, &move, 1, &job));
    assert_ok(s->device->ops->run(s->device, job, &(tb__run){.after = after, .nafter = 1}, &fence));
    for (int i = 0; i < 20; i++)
        progress_devices(s);
    nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    assert_false(fence.is_done);
    check_area(s, &a, "before it may begin");
    assert_false(fence.is_done);
    first.is_done = true;
    wait_for_one(s, &fence);
    assert_done_well(&fence);
    memcpy(a.image + 500, a.image, 500);
    check_area(s, &a, "after it began");
    s->device->ops->release(s->device, job);
    free_area(&a);
}

void check_order(suite *s) {
    for (int i = 0; i < 20 / LESS; i++)
        check_chain(s, (size_t)rng_range(&s->g, 1, i % 5 ? 5000 : 600000));
    check_failed_first(s);
    check_waiting(s);
}

/* ---- Cancelling -------------------------------------------------------------------------------------------------- */

/* Every byte is either as it was or as it should be. */
static void check_either(suite *s, const boxes *b, const uint8_t *expected, bool is_untouched) {
    const area *dst = &b->areas[AREA_DST];
    uint8_t *got = malloc(dst->nbytes);
    assert_non_null(got);
    get_area(s, dst, got);
    for (size_t i = 0; i < dst->nbytes; i++) {
        if (got[i] != POISON && (is_untouched || got[i] != expected[i]))
            fail_msg("cancelled: byte %zu is 0x%02x, neither 0x%02x nor 0x%02x", i, got[i], POISON, expected[i]);
    }
    free(got);
}

/* When the fence is done, nothing is written any more. */
static void check_quiet(suite *s, const boxes *b) {
    const area *dst = &b->areas[AREA_DST];
    memset(dst->image, 0x3c, dst->nbytes);
    put_area(s, dst);
    for (int i = 0; i < 3; i++) {
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
        while (progress_devices(s)) {
        }
    }
    check_area(s, dst, "after its fence was done");
}

static void check_cancelled(suite *s, int64_t when) {
    boxes b;
    uint8_t *images[NAREAS];
    tb__fence fence = {0}, never = {0}, *after[] = {&never};
    make_boxes(s, &b, 64, (size_t)1 << 20);
    for (int i = 0; i < 60; i++) {
        box_rules r = {.src_dtype = TB_F32,
                       .wire_dtype = TB_F32,
                       .dst_dtype = TB_F32,
                       .nsrc = 1,
                       .most = 2500,
                       .is_contiguous = true,
                       .src_area = AREA_SRC};
        add_box(s, &b, &r, (uint32_t)i);
    }
    put_boxes(s, &b);
    tb__job *job = prepare_boxes(s, &b);
    tb__run what = {.src_buffer = b.areas[AREA_BUFFER].at,
                    .dst_buffer = b.areas[AREA_BUFFER].at,
                    .after = after,
                    .nafter = when < 0};
    assert_ok(s->device->ops->run(s->device, job, &what, &fence));
    for (int64_t i = 0; i < when || when < 0; i++) {
        s->device->ops->progress(s->device);
        if (when < 0 && i > 3)
            break; /* it waits */
        if (when >= 20 && fence.is_done)
            break; /* it is done */
        if (when >= 20 && i + 1 == when) {
            wait_for_one(s, &fence);
            break;
        }
    }
    bool was_done = fence.is_done;
    assert_false(when < 1 && was_done);
    s->device->ops->cancel(s->device, &fence);
    if (!was_done)
        s->device->ops->cancel(s->device, &fence); /* again */
    wait_for_one(s, &fence);
    s->device->ops->cancel(s->device, &fence);
    assert_true(fence.is_done);
    list_images(&b, images);
    for (size_t i = 0; i < b.n; i++)
        evaluate_box(&b.box[i], images);
    if (fence.status == TB_OK) {
        assert_true(when >= 0);
        check_boxes(s, &b, "cancelled too late");
    } else {
        assert_false(was_done);
        assert_int_equal(fence.status, TB_CANCELLED);
        assert_true(fence.why[0] != '\0');
        check_either(s, &b, images[AREA_DST], when <= 0);
    }
    check_quiet(s, &b);
    s->device->ops->release(s->device, job);
    free_boxes(&b);
}

void check_cancel(suite *s) {
    for (int64_t i = 0; i < 60 / LESS; i++)
        check_cancelled(s, i % 20 == 0 ? -1 : i % 20 == 1 ? 20 : rng_range(&s->g, 0, 12));
    uint64_t sum = 77;
    area a = make_area(s, s->device, 3 << 20);
    fill_random(s, a.image, a.nbytes);
    put_area(s, &a);
    for (int i = 0; i < 10; i++) {
        tb__fence fence = {0};
        assert_ok(s->device->ops->checksum(s->device, a.at, a.nbytes, &sum, &fence));
        if (i % 2)
            s->device->ops->progress(s->device);
        s->device->ops->cancel(s->device, &fence);
        wait_for_one(s, &fence);
        assert_true(fence.status == TB_CANCELLED || fence.status == TB_OK);
        if (fence.status == TB_OK)
            assert_int_equal(sum, tb__checksum(a.image, a.nbytes));
    }
    free_area(&a);
}

/* ---- Refusals ---------------------------------------------------------------------------------------------------- */

static void check_refused(suite *s, const tb__move *move, tb_status status) {
    tb__job *job = (tb__job *)s, *before = job;
    tb__move two[2] = {{.nsrc = 0, .ndim = 1, .dst_dtype = TB_U8}, *move}; /* an empty one, then the bad one */
    tb_status got = s->device->ops->prepare(s->device, two, 2, &job);
    if (got != status)
        fail_msg("%s: %s, not %s", tb_status_string(got), tb_error_detail(), tb_status_string(status));
    assert_true(job == before && tb_error_detail()[0]);
}

static void check_refused_rows(suite *s, area *a) {
    static const int64_t stride[1][TB_MAX_DIMS] = {{64, 1}}, gaps[1][TB_MAX_DIMS] = {{64, 2}};
    const void *src[] = {a->at}, *none[] = {NULL};
    float amax = 0;
    tb__quantised q = {.format = {.kind = TB__QUANT_MXFP8}, .rows = 2, .columns = 64, .data = a->at + 2048};
    q.scales = a->at + 3072;
    tb__move good = {.kind = TB__MOVE_QUANTISE,
                     .ndim = 2,
                     .len = {2, 64},
                     .nsrc = 1,
                     .src = src,
                     .src_stride = stride,
                     .src_dtype = TB_F32,
                     .dst_dtype = TB_F32,
                     .dst = a->at,
                     .dst_stride = {64, 1},
                     .quantised = &q,
                     .amax = &amax};
    tb__move m = good;
    m.quantised = NULL;
    check_refused(s, &m, TB_INVALID);
    m.kind = TB__MOVE_DEQUANTISE;
    check_refused(s, &m, TB_INVALID);
    m = good;
    m.kind = TB__MOVE_AMAX;
    m.amax = NULL;
    check_refused(s, &m, TB_INVALID);
    m = good;
    m.ndim = 1;
    check_refused(s, &m, TB_INVALID);
    m = good;
    m.nsrc = 0;
    check_refused(s, &m, TB_INVALID);
    m = good;
    m.src = none;
    check_refused(s, &m, TB_INVALID);
    m = good;
    m.src_stride = gaps;
    check_refused(s, &m, TB_INVALID);
    m = good;
    m.len[1] = 32;
    check_refused(s, &m, TB_INVALID);
    m = good;
    m.kind = TB__MOVE_DEQUANTISE;
    m.dst = NULL;
    check_refused(s, &m, TB_INVALID);
    m = good;
    q.scales = NULL;
    check_refused(s, &m, TB_INVALID);
    q.data = NULL;
    check_refused(s, &m, TB_INVALID);
}

void check_refusals(suite *s) {
    area a = make_area(s, s->device, 4096);
    const void *src[] = {a.at, a.at + 100}, *none[] = {NULL, NULL};
    static const int64_t unit[2][TB_MAX_DIMS] = {{1}, {1}};
    tb__move good = byte_move(a.at + 1000, src, 100), m = good;
    good.src_stride = unit;
    m.ndim = TB_MAX_DIMS + 1;
    check_refused(s, &m, TB_INVALID);
    m.ndim = -1;
    check_refused(s, &m, TB_INVALID);
    m = good;
    m.len[0] = -1;
    check_refused(s, &m, TB_INVALID);
    m = good;
    m.kind = (tb__move_kind)9;
    check_refused(s, &m, TB_INVALID);
    m = good;
    m.dst_dtype = TB_DTYPE_COUNT;
    check_refused(s, &m, TB_INVALID);
    m = good;
    m.dst_dtype = TB_F32;
    check_refused(s, &m, TB_REFUSED); /* no cast from u8 */
    m = good;
    m.dst = NULL;
    check_refused(s, &m, TB_INVALID);
    m = good;
    m.src = none;
    check_refused(s, &m, TB_INVALID);
    m = good;
    m.nsrc = 2;
    m.op = (tb_reduce_op)77;
    check_refused(s, &m, TB_INVALID);
    m = good;
    m.nsrc = 2;
    m.src_dtype = m.wire_dtype = m.dst_dtype = TB_E8M0;
    check_refused(s, &m, TB_REFUSED);
    m = good;
    m.avg_divisor = 3;
    check_refused(s, &m, TB_REFUSED); /* no average of integers */
    m = good;
    m.src_dtype = m.wire_dtype = m.dst_dtype = TB_F32;
    m.len[0] = 3;
    m.avg_divisor = 3;
    m.op = TB_MAX;
    check_refused(s, &m, TB_INVALID);
    m = good;
    m.src_dtype = m.wire_dtype = m.dst_dtype = TB_F4E2M1;
    m.len[0] = 3;
    check_refused(s, &m, TB_INVALID);
    check_refused_rows(s, &a);
    free_area(&a);
}

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

/* Whichever allocation fails, what fails says so, and leaves nothing behind. */
void check_shortage(suite *s) {
    boxes b;
    uint8_t *images[NAREAS];
    tb__job *job = NULL;
    tb_status status;
    uint64_t sum = 0;
    make_boxes(s, &b, 40, (size_t)3 << 20);
    for (int i = 0; i < 40; i++) {
        box_rules r = random_rules(s, &b, 300);
        add_box(s, &b, &r, (uint32_t)(i % 5));
    }
    tb__move moves[40];
    for (size_t i = 0; i < b.n; i++)
        moves[i] = b.box[i].move;
    put_boxes(s, &b);
    list_images(&b, images);
    long n = 0;
    do {
        tb__mem_fail_after(n++);
        status = s->device->ops->prepare(s->device, moves, b.n, &job);
        tb__mem_fail_after(-1);
        assert_true(status == TB_OK || status == TB_NO_MEMORY);
        assert_true(n < 1000);
    } while (status != TB_OK);
    assert_true(n > 1);
    uint32_t parts[] = {3, 0, 1, 4, 2};
    tb__fence done = {.is_done = true}, *after[] = {&done}, fence = {0};
    tb__run what = {.parts = parts,
                    .nparts = 5,
                    .src_buffer = b.areas[AREA_BUFFER].at,
                    .dst_buffer = b.areas[AREA_BUFFER].at,
                    .after = after,
                    .nafter = 1};
    n = 0;
    do {
        tb__mem_fail_after(n++);
        status = s->device->ops->run(s->device, job, &what, &fence);
        tb__mem_fail_after(-1);
        assert_true(status == TB_OK || status == TB_NO_MEMORY);
        assert_false(fence.is_done);
    } while (status != TB_OK);
    wait_for_one(s, &fence); /* the failed ones have not touched it */
    assert_done_well(&fence);
    for (size_t i = 0; i < b.n; i++)
        evaluate_box(&b.box[i], images);
    check_boxes(s, &b, "after a shortage");
    fence = (tb__fence){0};
    n = 0;
    do {
        tb__mem_fail_after(n++);
        status = s->device->ops->checksum(s->device, b.areas[AREA_SRC].at, 1000, &sum, &fence);
        tb__mem_fail_after(-1);
        assert_true(status == TB_OK || status == TB_NO_MEMORY);
    } while (status != TB_OK);
    wait_for_one(s, &fence);
    assert_done_well(&fence);
    assert_int_equal(sum, tb__checksum(images[AREA_SRC], 1000));
    s->device->ops->release(s->device, job);
    free_boxes(&b);
    void *p;
    assert_int_equal(s->device->ops->alloc(s->device, 0, (size_t)1 << 62, &p), TB_NO_MEMORY);
}

void check_lifetimes(suite *s) {
    enum { N = 40 };
    const tb__device_ops *ops = s->device->ops;
    tb__device *more[3], *none = (tb__device *)s;
    void *at[N];
    tb__memory memory;
    assert_string_equal(ops->name, s->traits->name);
    assert_int_equal(tb__device_open("no such device", &none), TB_INVALID);
    assert_true(none == (tb__device *)s);
    tb__device_close(NULL);
    ops->free(s->device, NULL);
    ops->release(s->device, NULL);
    for (int i = 0; i < 3; i++)
        assert_ok(tb__device_open(s->traits->name, &more[i]));
    for (int i = 0; i < N; i++) {
        size_t nbytes = (size_t)rng_range(&s->g, 1, i % 9 ? 100000 : 3000000);
        assert_ok(ops->alloc(more[i % 3], 0, nbytes, &at[i]));
        assert_true(ops->find(more[1], at[i], nbytes, &memory)); /* whichever of them it is from */
        assert_true((char *)memory.base <= (char *)at[i]);
        assert_true((char *)memory.base + memory.nbytes >= (char *)at[i] + nbytes);
        assert_true(ops->find(s->device, (char *)at[i] + nbytes / 2, nbytes - nbytes / 2, &memory));
        if (!s->is_host) {
            assert_false(ops->find(s->device, at[i], memory.nbytes + 100000, &memory));
            assert_false(ops->find(s->device, at, 1, &memory)); /* memory of the host */
        }
        if (i % 4 == 3) {
            ops->free(more[i % 3], at[i]);
            assert_true(s->is_host || !ops->find(s->device, at[i], 1, &memory));
            at[i] = NULL;
        }
    }
    for (int i = 0; i < N; i++)
        ops->free(more[i % 3], at[i]);
    /* A device that is new works, and one that did nothing closes. */
    uint64_t sum = 0;
    tb__fence fence = {0};
    assert_ok(ops->alloc(more[0], 0, 0, &at[0]));
    assert_ok(ops->checksum(more[0], at[0], 0, &sum, &fence));
    while (!fence.is_done)
        ops->progress(more[0]);
    assert_done_well(&fence);
    assert_int_equal(sum, tb__checksum("", 0));
    ops->free(more[0], at[0]);
    tb__device_close(more[1]);
    tb__device_close(more[0]);
    tb__device_close(more[2]);
    /* Of no moves. */
    tb__job *job;
    fence = (tb__fence){0};
    assert_ok(ops->prepare(s->device, NULL, 0, &job));
    assert_ok(ops->run(s->device, job, &(tb__run){0}, &fence));
    assert_false(fence.is_done);
    wait_for_one(s, &fence);
    assert_done_well(&fence);
    ops->release(s->device, job);
    tb__move empty = {.part = 7, .ndim = 1, .dst_dtype = TB_U8};
    uint32_t twice[] = {7, 8, 7};
    fence = (tb__fence){0};
    assert_ok(ops->prepare(s->device, &empty, 1, &job));
    assert_int_equal(ops->run(s->device, job, &(tb__run){.parts = twice, .nparts = 3}, &fence), TB_INVALID);
    assert_ok(ops->run(s->device, job, &(tb__run){.parts = twice, .nparts = 2}, &fence));
    wait_for_one(s, &fence);
    assert_done_well(&fence);
    ops->release(s->device, job);
}

void check_checksums(suite *s) {
    enum { N = 30 };
    area a = make_area(s, s->device, 5 << 20);
    tb__fence fences[N], *list[N];
    uint64_t sums[N], expected[N];
    fill_random(s, a.image, a.nbytes);
    put_area(s, &a);
    for (int i = 0; i < N; i++) {
        static const size_t lengths[] = {0, 1, 16, 17, 240, 241, 65535, 65536, 65537, 131072, 5 << 20};
        size_t known = sizeof lengths / sizeof *lengths;
        size_t n = (size_t)i < known ? lengths[i] : (size_t)rng_range(&s->g, 0, (int64_t)a.nbytes);
        size_t offset = (size_t)rng_range(&s->g, 0, (int64_t)(a.nbytes - n));
        fences[i] = (tb__fence){0};
        list[i] = &fences[i];
        expected[i] = tb__checksum(a.image + offset, n);
        assert_ok(s->device->ops->checksum(s->device, a.at + offset, n, &sums[i], &fences[i]));
    }
    wait_for(s, list, N);
    for (int i = 0; i < N; i++) {
        assert_done_well(&fences[i]);
        assert_true(sums[i] == expected[i]);
    }
    free_area(&a);
}
