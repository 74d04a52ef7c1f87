/* The slow device of tests: what every device does, and what only this one can: fail, and never end. */
#include "device/host/workers.h"

#include "../tests/support/asserts.h"
#include "../tests/support/device_conformance.h"
#include "../tests/support/slow_device.h"

#include "base/process.h"

#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* The last two numbers of a key. */
static void forge_key(unsigned char *key, size_t key_nbytes, uint64_t offset, uint64_t nbytes) {
    memcpy(key + key_nbytes - 16, &offset, 8);
    memcpy(key + key_nbytes - 8, &nbytes, 8);
}

static void test_conformance(void **state) {
    static const device_traits traits = {.name = "slow", .forge_key = forge_key};
    (void)state;
    device_conformance(&traits);
}

/* A device, and a job of `MOVES` moves in its memory, each of so many bytes. */
enum { MOVES = 16, NBYTES = 1000 };

typedef struct bed {
    tb__device *device;
    char *memory; /* sources, then destinations */
    const void *src[MOVES];
    tb__job *job;
} bed;

static void make_bed(bed *b) {
    static const int64_t unit[1][TB_MAX_DIMS] = {{1}};
    tb__move moves[MOVES];
    assert_ok(tb__device_open("slow", &b->device));
    b->memory = slow_device_alloc((size_t)2 * MOVES * NBYTES);
    for (int i = 0; i < MOVES; i++) {
        b->src[i] = b->memory + (size_t)i * NBYTES;
        moves[i] = (tb__move){.part = (uint32_t)i,
                              .ndim = 1,
                              .len = {NBYTES},
                              .dst = b->memory + (size_t)(MOVES + i) * NBYTES,
                              .dst_stride = {1},
                              .nsrc = 1,
                              .src = &b->src[i],
                              .src_stride = unit,
                              .src_dtype = TB_U8,
                              .wire_dtype = TB_U8,
                              .dst_dtype = TB_U8};
    }
    memset(slow_device_bytes(b->memory), 1, (size_t)MOVES * NBYTES);
    memset(slow_device_bytes(b->memory + (size_t)MOVES * NBYTES), 0, (size_t)MOVES * NBYTES);
    assert_ok(b->device->ops->prepare(b->device, moves, MOVES, &b->job));
}

static void free_bed(bed *b) {
    b->device->ops->release(b->device, b->job);
    slow_device_free(b->memory);
    tb__device_close(b->device);
}

/* Moves that are done: whole ones only. */
static int count_done(const bed *b) {
    const char *dst = slow_device_bytes(b->memory + (size_t)MOVES * NBYTES);
    int n = 0;
    for (int i = 0; i < MOVES * NBYTES; i++) {
        assert_int_equal(dst[i], dst[i - i % NBYTES]);
        n += i % NBYTES == 0 && dst[i] == 1;
    }
    return n;
}

static void start(bed *b, tb__fence *fence) {
    *fence = (tb__fence){0};
    assert_ok(b->device->ops->run(b->device, b->job, &(tb__run){0}, fence));
}

/* Asleep in between. False: it is not done after so long. */
static bool wait_for(bed *b, const tb__fence *fence, int timeout_ms) {
    int64_t deadline = tb__now_ms() + timeout_ms;
    while (!fence->is_done && tb__now_ms() < deadline) {
        struct pollfd fd = {.fd = b->device->ops->fd(b->device), .events = POLLIN};
        if (!b->device->ops->progress(b->device))
            poll(&fd, 1, tb__ms_until(deadline));
    }
    return fence->is_done;
}

/* The kernel can't use its addresses either. */
static void test_addresses(void **state) {
    (void)state;
    char *p = slow_device_alloc(10000), byte = 5;
    int fd[2];
    assert_int_equal(pipe(fd), 0);
    assert_int_equal(write(fd[1], p, 1), -1);
    assert_int_equal(errno, EFAULT);
    memset(slow_device_bytes(p), 7, 10000);
    assert_int_equal(write(fd[1], (char *)slow_device_bytes(p) + 9999, 1), 1);
    assert_int_equal(read(fd[0], p, 1), -1);
    assert_int_equal(errno, EFAULT);
    assert_int_equal(read(fd[0], &byte, 1), 1);
    assert_int_equal(byte, 7);
    void *alias = slow_device_bytes(p);
    slow_device_free(p);
    assert_int_equal(write(fd[1], alias, 1), -1);
    char *other = slow_device_alloc(10000);
    assert_true(other != p);
    assert_int_equal(*(char *)slow_device_bytes(other), 0);
    slow_device_free(other);
    close(fd[0]);
    close(fd[1]);
}

static void test_failed_calls(void **state) {
    bed b;
    tb__fence fence = {0};
    tb__device *none = NULL;
    tb__job *job = NULL;
    tb__memory memory;
    tb__memory_key key = {0};
    tb__mapping *mapping = NULL;
    void *p = NULL;
    uint64_t sum = 0;
    (void)state;
    make_bed(&b);
    const tb__device_ops *ops = b.device->ops;
    slow_device_fail_call(SLOW_DEVICE_OPEN, 0, TB_IO);
    assert_int_equal(tb__device_open("slow", &none), TB_IO);
    slow_device_fail_call(SLOW_DEVICE_ALLOC, 1, TB_NO_MEMORY);
    assert_ok(ops->alloc(b.device, 0, 100, &p));
    assert_fails(ops->alloc(b.device, 0, 100, &p), TB_NO_MEMORY, "alloc");
    slow_device_fail_call(SLOW_DEVICE_PREPARE, 0, TB_IO);
    assert_int_equal(ops->prepare(b.device, NULL, 0, &job), TB_IO);
    assert_null(job);
    slow_device_fail_call(SLOW_DEVICE_RUN, 0, TB_IO);
    assert_int_equal(ops->run(b.device, b.job, &(tb__run){0}, &fence), TB_IO);
    slow_device_fail_call(SLOW_DEVICE_RUN, 0, TB_IO);
    assert_int_equal(ops->checksum(b.device, p, 100, &sum, &fence), TB_IO);
    assert_true(ops->find(b.device, p, 100, &memory));
    slow_device_fail_call(SLOW_DEVICE_SHARE, 0, TB_REFUSED);
    assert_int_equal(tb__device_share(b.device, &memory, &key), TB_REFUSED);
    assert_ok(tb__device_share(b.device, &memory, &key));
    slow_device_fail_call(SLOW_DEVICE_MAP, 0, TB_DENIED);
    assert_int_equal(tb__device_map(b.device, &key, false, &mapping), TB_DENIED);
    assert_null(mapping);
    tb__memory_key_fini(&key);
    assert_false(wait_for(&b, &fence, 5));
    ops->free(b.device, p);
    assert_int_equal(count_done(&b), 0);
    free_bed(&b);
}

static void test_failed_runs(void **state) {
    bed b;
    tb__fence fences[3], sum_fence = {0};
    uint64_t sum = 0;
    (void)state;
    make_bed(&b);
    slow_device_fail_run(1, TB_LOST, "the bus of the device is gone");
    for (int i = 0; i < 3; i++)
        start(&b, &fences[i]);
    for (int i = 0; i < 3; i++) {
        assert_true(wait_for(&b, &fences[i], 60000));
        assert_int_equal(fences[i].status, i == 1 ? TB_LOST : TB_OK);
        assert_string_equal(fences[i].why, i == 1 ? "the bus of the device is gone" : "");
    }
    slow_device_fail_run(0, TB_IO, "no sum");
    assert_ok(b.device->ops->checksum(b.device, b.memory, 100, &sum, &sum_fence));
    assert_true(wait_for(&b, &sum_fence, 60000));
    assert_int_equal(sum_fence.status, TB_IO);
    free_bed(&b);
    /* Some moves are done, and some are not. */
    bool was_partial = false;
    for (int i = 0; i < 1000 && !was_partial; i++) {
        make_bed(&b);
        slow_device_fail_run(0, TB_IO, "a failure");
        start(&b, &fences[0]);
        assert_true(wait_for(&b, &fences[0], 60000));
        was_partial = count_done(&b) % MOVES != 0;
        free_bed(&b);
    }
    assert_true(was_partial);
}

/* It is not done, cancelled or not, until it is let go; others are. */
static void test_held_run(void **state) {
    bed b;
    tb__fence held, other;
    (void)state;
    make_bed(&b);
    slow_device_hold_run(0);
    start(&b, &held);
    start(&b, &other);
    assert_true(wait_for(&b, &other, 60000));
    b.device->ops->cancel(b.device, &held);
    assert_false(wait_for(&b, &held, 30));
    slow_device_let_go();
    assert_true(wait_for(&b, &held, 60000));
    assert_int_equal(count_done(&b), MOVES); /* not before: the held run may have done some of them meanwhile */
    assert_true(held.status == TB_CANCELLED || held.status == TB_OK);
    slow_device_hold_run(3); /* of a run that never comes */
    slow_device_mend();
    for (int i = 0; i < 5; i++) {
        start(&b, &held);
        assert_true(wait_for(&b, &held, 60000));
        assert_int_equal(held.status, TB_OK);
    }
    free_bed(&b);
}

/* Later runs are done before earlier ones, at times. */
static void test_any_order(void **state) {
    bed b;
    tb__fence fences[8];
    bool was_mixed = false;
    (void)state;
    make_bed(&b);
    for (int round = 0; round < 1000 && !was_mixed; round++) {
        for (int i = 0; i < 8; i++)
            start(&b, &fences[i]);
        for (int left = 8; left > 0;) {
            struct pollfd fd = {.fd = b.device->ops->fd(b.device), .events = POLLIN};
            if (!b.device->ops->progress(b.device))
                assert_int_equal(poll(&fd, 1, 60000), 1);
            left = 0;
            for (int i = 0; i < 8; i++) {
                was_mixed |= fences[i].is_done && left > 0;
                left += !fences[i].is_done;
            }
        }
    }
    assert_true(was_mixed);
    free_bed(&b);
}

/* ---- Streams ----------------------------------------------------------------------------------------------------- */

static void count_call(void *arg) {
    ++*(int *)arg;
}

/* Fences of streams are done when the work before them is, in any order that streams allow; runs wait for them. */
static void test_recorded_fences(void **state) {
    bed b;
    tb__fence first = {0}, second = {0}, other = {0}, run = {0};
    tb__fence *after[] = {&second};
    slow_stream *s = slow_stream_create(), *none = NULL;
    int ncalls = 0;
    (void)state;
    make_bed(&b);
    const tb__device_ops *ops = b.device->ops;
    assert_ok(tb__device_stream_record(b.device, &s, &first));
    slow_work *held = slow_stream_add(s, count_call, &ncalls, true);
    slow_work *next = slow_stream_add(s, count_call, &ncalls, false);
    assert_ok(tb__device_stream_record(b.device, &s, &second));
    assert_ok(tb__device_stream_record(b.device, &none, &other)); /* the default stream */
    assert_ok(ops->run(b.device, b.job, &(tb__run){.after = after, .nafter = 1}, &run));
    assert_true(wait_for(&b, &first, 60000));
    assert_true(wait_for(&b, &other, 60000));
    assert_false(wait_for(&b, &second, 20));
    assert_false(run.is_done);
    assert_int_equal(ncalls, 0);
    assert_false(slow_work_wait(next, 1));
    slow_work_let_go(held);
    assert_true(slow_work_wait(next, 60000));
    assert_true(wait_for(&b, &run, 60000));
    assert_true(second.is_done && second.status == TB_OK && run.status == TB_OK);
    assert_int_equal(ncalls, 2);
    assert_int_equal(count_done(&b), MOVES);
    slow_stream_destroy(s);
    free_bed(&b);
}

/* One that is cancelled does not wait for the stream, which goes on; nor does a run that waits for it. */
static void test_cancelled_record(void **state) {
    bed b;
    tb__fence mark = {0}, run = {0};
    tb__fence *after[] = {&mark};
    slow_stream *s = slow_stream_create();
    int ncalls = 0;
    (void)state;
    make_bed(&b);
    const tb__device_ops *ops = b.device->ops;
    slow_work *held = slow_stream_add(s, NULL, NULL, true);
    assert_ok(tb__device_stream_record(b.device, &s, &mark));
    slow_stream_add(s, count_call, &ncalls, false);
    assert_ok(ops->run(b.device, b.job, &(tb__run){.after = after, .nafter = 1}, &run));
    ops->cancel(b.device, &mark);
    assert_true(wait_for(&b, &run, 60000));
    assert_int_equal(mark.status, TB_CANCELLED);
    assert_int_equal(run.status, TB_CANCELLED);
    assert_int_equal(ncalls, 0);
    slow_work_let_go(held);
    assert_int_equal(ncalls, 1);
    mark = run = (tb__fence){0};
    slow_stream_fail(s, TB_IO, "the stream has failed");
    assert_ok(tb__device_stream_record(b.device, &s, &mark));
    assert_ok(ops->run(b.device, b.job, &(tb__run){.after = after, .nafter = 1}, &run));
    assert_true(wait_for(&b, &run, 60000));
    assert_int_equal(run.status, TB_IO);
    assert_string_equal(run.why, "the stream has failed");
    assert_int_equal(count_done(&b), 0);
    slow_stream_destroy(s);
    free_bed(&b);
}

/* Work on a stream waits for a run, also for one that waits itself; not for one that is done. */
static void test_stream_waits(void **state) {
    bed b;
    tb__fence mark = {0}, run = {0};
    tb__fence *after[] = {&mark};
    slow_stream *s = slow_stream_create(), *program = slow_stream_create();
    (void)state;
    make_bed(&b);
    const tb__device_ops *ops = b.device->ops;
    slow_work *held = slow_stream_add(program, NULL, NULL, true);
    assert_ok(tb__device_stream_record(b.device, &program, &mark));
    assert_ok(ops->run(b.device, b.job, &(tb__run){.after = after, .nafter = 1}, &run));
    assert_ok(tb__device_stream_wait(b.device, &s, &run));
    slow_work *later = slow_stream_add(s, NULL, NULL, false);
    assert_false(wait_for(&b, &run, 20));
    assert_false(slow_work_wait(later, 1));
    slow_work_let_go(held);
    assert_true(wait_for(&b, &run, 60000));
    assert_true(slow_work_wait(later, 60000));
    assert_ok(tb__device_stream_wait(b.device, &s, &run));
    assert_int_equal(slow_stream_count(s), 2);
    run = (tb__fence){0};
    slow_device_hold_run(0);
    start(&b, &run);
    assert_ok(tb__device_stream_wait(b.device, &s, &run));
    later = slow_stream_add(s, NULL, NULL, false);
    assert_false(wait_for(&b, &run, 20));
    ops->cancel(b.device, &run);
    assert_false(wait_for(&b, &run, 20));
    assert_false(slow_work_wait(later, 1));
    slow_device_let_go();
    assert_true(wait_for(&b, &run, 60000));
    assert_true(slow_work_wait(later, 60000));
    slow_stream_destroy(s);
    slow_stream_destroy(program);
    free_bed(&b);
}

/* They are opened, or open at their deadline, which nobody has to look at. */
static void test_gates(void **state) {
    bed b;
    tb__gate *gates[2];
    slow_stream *s = slow_stream_create();
    (void)state;
    make_bed(&b);
    const tb__device_ops *ops = b.device->ops;
    assert_ok(tb__device_gate_create(b.device, &s, tb__now_ms() + 60000, &gates[0]));
    slow_work *later = slow_stream_add(s, NULL, NULL, false);
    assert_false(slow_work_wait(later, 20));
    ops->gate_open(gates[0]);
    assert_true(slow_work_wait(later, 60000));
    int64_t began_ms = tb__now_ms();
    assert_ok(tb__device_gate_create(b.device, &s, began_ms + 30, &gates[0]));
    assert_ok(tb__device_gate_create(b.device, &s, began_ms + 10, &gates[1]));
    later = slow_stream_add(s, NULL, NULL, false);
    assert_true(slow_work_wait(later, 60000));
    assert_true(tb__now_ms() >= began_ms + 30);
    ops->gate_open(gates[0]);
    ops->gate_open(gates[1]);
    slow_stream_destroy(s);
    free_bed(&b);
}

static void test_refused_streams(void **state) {
    bed b;
    tb__fence fence = {0};
    tb__gate *gate = NULL;
    tb__device *host;
    slow_stream *s = slow_stream_create();
    (void)state;
    make_bed(&b);
    slow_stream_set_captured(s, true);
    assert_fails(tb__device_stream_record(b.device, &s, &fence), TB_REFUSED, "captured");
    assert_fails(tb__device_stream_wait(b.device, &s, &fence), TB_REFUSED, "captured");
    assert_fails(tb__device_gate_create(b.device, &s, INT64_MAX, &gate), TB_REFUSED, "captured");
    slow_stream_set_captured(s, false);
    slow_device_fail_call(SLOW_DEVICE_STREAM, 0, TB_IO);
    assert_int_equal(tb__device_stream_record(b.device, &s, &fence), TB_IO);
    assert_int_equal(slow_stream_count(s), 0);
    assert_ok(tb__device_open("host", &host));
    assert_fails(tb__device_stream_record(host, &s, &fence), TB_REFUSED, "device host has no streams");
    assert_fails(tb__device_stream_wait(host, &s, &fence), TB_REFUSED, "device host has no streams");
    assert_fails(tb__device_gate_create(host, &s, INT64_MAX, &gate), TB_REFUSED, "device host has no streams");
    tb__device_close(host);
    slow_stream_destroy(s);
    free_bed(&b);
}

/* ---- Memory of programs ------------------------------------------------------------------------------------------ */

/* No device has to be open. */
static void test_alloc_on(void **state) {
    tb__device *device;
    tb__memory memory;
    void *p = NULL, *host[2] = {NULL, NULL};
    (void)state;
    for (int i = 0; i < SLOW_DEVICE_NUNITS; i++) {
        char name[20];
        snprintf(name, sizeof name, "slow:%d", i);
        assert_ok(tb_alloc_on(name, 1000, &p));
        assert_ok(tb__device_open("slow", &device));
        assert_true(device->ops->find(device, p, 1000, &memory));
        assert_int_equal(memory.index, i);
        assert_string_equal(tb__device_unit_name(device, i), name);
        assert_true(memory.is_shareable);
        tb_free(p);
        assert_false(device->ops->find(device, p, 1000, &memory));
        tb__device_close(device);
    }
    assert_ok(tb_alloc_on("slow", 0, &p));
    tb_free(p);
    for (int i = 0; i < 2; i++) {
        assert_ok(tb_alloc_on(i == 0 ? "host" : "host:0", 100, &host[i]));
        memset(host[i], 1, 100);
    }
    tb_free(host[0]);
    tb_free(host[1]);
    p = NULL;
    assert_fails(tb_alloc_on("slow:8", 100, &p), TB_REFUSED, "no slow:8: the slow device has 8 units");
    assert_fails(tb_alloc_on("host:1", 100, &p), TB_REFUSED, "no host:1");
    assert_fails(tb_alloc_on("tpu", 100, &p), TB_INVALID, "no device 'tpu'; this build has pinned, slow, host");
    static const char *const wrong[] = {"",    ":",    "slow:", "slow:x", "slow:-1", "slow:0x1", "slow:9999999",
                                        "slo", "slow1"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_fails(tb_alloc_on(wrong[i], 100, &p), TB_INVALID, wrong[i]);
    assert_int_equal(tb_alloc_on(NULL, 100, &p), TB_INVALID);
    slow_device_fail_call(SLOW_DEVICE_ALLOC, 0, TB_NO_MEMORY);
    assert_int_equal(tb_alloc_on("slow", 100, &p), TB_NO_MEMORY);
    assert_null(p);
}

/* Pinned pages are shareable host memory, belong to one allocation each, and are unpinned before they are freed. */
static void test_pinned(void **state) {
    enum { N = 40 };
    static const size_t sizes[] = {0, 1, 100, 4096, 4097, 100000, (size_t)70 << 20};
    tb__device *host;
    tb__memory memory;
    void *p[N], *plain[N], *none = NULL;
    size_t nbytes = 0;
    (void)state;
    assert_ok(tb__device_open("host", &host));
    for (int i = 0; i < N; i++) {
        size_t n = sizes[i % 7];
        assert_ok(tb_alloc(100, &plain[i])); /* lies between */
        assert_ok(tb_alloc_on("pinned", n, &p[i]));
        assert_true(host->ops->find(host, p[i], n, &memory));
        assert_true(memory.is_shareable);
        memset(p[i], i, n);
        nbytes += (n > 0 ? n + 4095 : 4096) / 4096 * 4096;
        assert_int_equal(slow_device_pinned(), nbytes);
    }
    slow_device_fail_call(SLOW_DEVICE_PIN, 0, TB_NO_MEMORY);
    assert_fails(tb_alloc_on("pinned", 100, &none), TB_NO_MEMORY, "pin");
    assert_null(none);
    for (int i = 0; i < N; i++) {
        size_t n = sizes[i % 7];
        tb_free(plain[i]);
        assert_true(n == 0 || ((char *)p[i])[n - 1] == i);
        tb_free(p[i]);
        nbytes -= (n > 0 ? n + 4095 : 4096) / 4096 * 4096;
        assert_int_equal(slow_device_pinned(), nbytes);
    }
    tb__device_close(host);
}

/* In a build that has nothing but the host. */
static void test_host_only(void **state) {
    static const tb__device_ops *const devices[] = {&tb__host_device_ops, NULL};
    void *p = NULL;
    (void)state;
    atomic_store(&tb__devices, devices);
    assert_fails(tb_alloc_on("pinned", 100, &p), TB_REFUSED, "needs the driver of a GPU");
    assert_fails(tb_alloc_on("slow", 100, &p), TB_INVALID, "no device 'slow'; this build has pinned, host");
    assert_null(p);
    slow_device_install();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_conformance),
        cmocka_unit_test(test_addresses),
        cmocka_unit_test(test_failed_calls),
        cmocka_unit_test(test_failed_runs),
        cmocka_unit_test(test_held_run),
        cmocka_unit_test(test_any_order),
        cmocka_unit_test(test_alloc_on),
        cmocka_unit_test(test_pinned),
        cmocka_unit_test(test_host_only),
        cmocka_unit_test(test_recorded_fences),
        cmocka_unit_test(test_cancelled_record),
        cmocka_unit_test(test_stream_waits),
        cmocka_unit_test(test_gates),
        cmocka_unit_test(test_refused_streams),
    };
    slow_device_install();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
