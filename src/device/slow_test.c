/* The slow device of tests: what every device does, and what only this one can: fail, and never end. */
#include "device/host/workers.h"

#include "../tests/support/asserts.h"
#include "../tests/support/device_conformance.h"
#include "../tests/support/slow_device.h"

#include "base/process.h"

#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
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
    assert_int_equal(tb__device_map(b.device, &key, &mapping), TB_DENIED);
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
    assert_int_equal(count_done(&b), MOVES);
    b.device->ops->cancel(b.device, &held);
    assert_false(wait_for(&b, &held, 30));
    slow_device_let_go();
    assert_true(wait_for(&b, &held, 60000));
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

/* Memory of programs, for which no device is open. */
static void test_alloc_on(void **state) {
    tb__device *device;
    tb__memory memory;
    void *p = NULL, *host[2] = {NULL, NULL};
    (void)state;
    for (int i = 0; i < SLOW_DEVICE_NUNITS; i++) {
        const char *const names[] = {"slow:0", "slow:1"};
        assert_ok(tb_alloc_on(names[i], 1000, &p));
        assert_ok(tb__device_open("slow", &device));
        assert_true(device->ops->find(device, p, 1000, &memory));
        assert_int_equal(memory.index, i);
        assert_string_equal(tb__device_unit_name(device, i), names[i]);
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
    assert_fails(tb_alloc_on("slow:2", 100, &p), TB_REFUSED, "no slow:2: the slow device has 2 units");
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
        cmocka_unit_test(test_conformance), cmocka_unit_test(test_addresses), cmocka_unit_test(test_failed_calls),
        cmocka_unit_test(test_failed_runs), cmocka_unit_test(test_held_run),  cmocka_unit_test(test_any_order),
        cmocka_unit_test(test_alloc_on),    cmocka_unit_test(test_pinned),    cmocka_unit_test(test_host_only),
    };
    slow_device_install();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
