/* The pool: the same bytes from any number of threads, several callers at once, forks, failures; other work than
 * copies. */
#include "device/host/workers.h"
#include "base/mem.h"
#include "device/host/move.h"

#include "../tests/support/numbers.h"

#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { SMALL_COPIES = 500, NCOPIES = SMALL_COPIES + 6, MEMORY = 24 << 20 };

static const int64_t unit[4][TB_MAX_DIMS] = {{1}, {1}, {1}, {1}};
static const int64_t matrix[1][TB_MAX_DIMS] = {{1024, 1}};
static const int64_t turned[1][TB_MAX_DIMS] = {{1, 1024}};

/* Large and small copies of all kinds, from one stretch of memory to another. */
typedef struct batch {
    uint8_t *src, *dst;
    const void *from[NCOPIES + 4];
    tb__move copies[NCOPIES];
    size_t n, written;
} batch;

static void add(batch *b, tb__move copy, tb_dtype from, tb_dtype to, size_t nbytes) {
    copy.dst = b->dst + b->written;
    b->written += nbytes;
    if (!copy.src) {
        b->from[b->n] = b->src + 64 * b->n;
        copy.src = &b->from[b->n];
        copy.nsrc = 1;
    }
    copy.src_dtype = from;
    copy.wire_dtype = copy.dst_dtype = to;
    b->copies[b->n++] = copy;
}

static void make_batch(batch *b, rng *g) {
    memset(b, 0, sizeof *b);
    b->src = malloc(MEMORY);
    b->dst = malloc(MEMORY);
    for (size_t i = 0; i < MEMORY; i += 8)
        memcpy(b->src + i, &(uint64_t){rng_next(g)}, 8);
    const tb__move row = {.ndim = 1, .len = {3000001}, .dst_stride = {1}, .src_stride = unit};
    const tb__move square = {.ndim = 2, .len = {1000, 700}, .dst_stride = {700, 1}, .src_stride = matrix};
    const tb__move turn = {.ndim = 2, .len = {700, 1000}, .dst_stride = {1000, 1}, .src_stride = turned};
    add(b, row, TB_U8, TB_U8, 3000001);
    add(b, square, TB_F32, TB_F32, 2800000);
    add(b, turn, TB_F32, TB_F32, 2800000);
    add(b, square, TB_F32, TB_BF16, 1400000);
    for (int i = 0; i < SMALL_COPIES; i++) {
        tb__move small = row;
        small.len[0] = rng_range(g, 0, i % 50 == 0 ? 40000 : 300);
        add(b, small, TB_BF16, TB_F32, (size_t)small.len[0] * 4 + 3);
    }
    tb__move scalar = {.src_stride = unit};
    add(b, scalar, TB_F64, TB_F64, 8);
    tb__move sum = row;
    sum.len[0] = 500001;
    sum.nsrc = 4;
    for (size_t k = 0; k < 4; k++)
        b->from[NCOPIES + k] = b->src + 1000002 * k;
    sum.src = &b->from[NCOPIES];
    add(b, sum, TB_F16, TB_F16, 1000002);
    assert_true(b->written < MEMORY && b->n == NCOPIES);
}

static void free_batch(batch *b) {
    free(b->src);
    free(b->dst);
}

static void run(batch *b, uint8_t poison) {
    memset(b->dst, poison, MEMORY);
    assert_int_equal(tb__moves_run(b->copies, b->n), TB_OK);
}

static void test_threads_agree(void **state) {
    (void)state;
    rng g = {test_seed()};
    batch b;
    make_batch(&b, &g);
    tb__workers_set(1);
    run(&b, 0x5a);
    uint8_t *expected = malloc(MEMORY);
    memcpy(expected, b.dst, MEMORY);
    for (int threads = 2; threads <= 5; threads++) {
        tb__workers_set(threads % 5 + (threads == 5)); /* 2, 3, 4, 1 */
        for (int i = 0; i < 3; i++) {
            run(&b, 0x5a);
            assert_true(memcmp(b.dst, expected, MEMORY) == 0);
        }
    }
    /* Without memory for its books the batch is done by the caller alone. */
    tb__workers_set(2);
    tb__mem_fail_after(0);
    run(&b, 0x5a);
    tb__mem_fail_after(-1);
    assert_true(memcmp(b.dst, expected, MEMORY) == 0);
    free(expected);
    free_batch(&b);
}

static void *call_often(void *arg) {
    batch *b = arg;
    for (int i = 0; i < 3; i++)
        run(b, (uint8_t)i);
    return b;
}

static void test_several_callers(void **state) {
    (void)state;
    rng g = {test_seed()};
    static batch b[3];
    pthread_t threads[3];
    tb__workers_set(3);
    for (int i = 0; i < 3; i++)
        make_batch(&b[i], &g);
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, call_often, &b[i]), 0);
    tb__workers_set(2);
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    for (int i = 0; i < 3; i++) {
        uint8_t *got = malloc(MEMORY);
        memcpy(got, b[i].dst, MEMORY);
        tb__workers_set(1);
        run(&b[i], 2);
        assert_true(memcmp(b[i].dst, got, MEMORY) == 0);
        free(got);
        free_batch(&b[i]);
    }
}

static void test_fork(void **state) {
    (void)state;
#ifdef __SANITIZE_THREAD__
    skip(); /* it lets no child of a threaded process start threads */
#endif
    rng g = {test_seed()};
    batch b;
    make_batch(&b, &g);
    tb__workers_set(3);
    run(&b, 0);
    uint8_t *expected = malloc(MEMORY);
    memcpy(expected, b.dst, MEMORY);
    pid_t child = fork();
    if (child == 0) {
        memset(b.dst, 0, MEMORY);
        bool ok = tb__moves_run(b.copies, b.n) == TB_OK && memcmp(b.dst, expected, MEMORY) == 0;
        tb__workers_set(1);
        _exit(ok ? 0 : 1);
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    run(&b, 0);
    assert_true(memcmp(b.dst, expected, MEMORY) == 0);
    free(expected);
    free_batch(&b);
}

static void test_many_small_batches(void **state) {
    (void)state;
    enum { N = 300000 };
    uint8_t *src = malloc(N), *dst = malloc(N);
    const void *from = src;
    tb__move copy = {.ndim = 1, .len = {N}, .dst = dst, .dst_stride = {1}, .nsrc = 1, .src = &from, .src_stride = unit};
    copy.src_dtype = copy.wire_dtype = copy.dst_dtype = TB_U8;
    tb__workers_set(4);
    for (int i = 0; i < 500; i++) {
        memset(src, i, N);
        assert_int_equal(tb__moves_run(&copy, 1), TB_OK);
        assert_int_equal(dst[0], i & 255);
        assert_int_equal(dst[N - 1], i & 255);
        assert_int_equal(dst[N / 2], i & 255);
    }
    free(src);
    free(dst);
}

/* One bad copy among good ones: nothing is written. */
static void test_bad_batch(void **state) {
    (void)state;
    rng g = {test_seed()};
    batch b;
    make_batch(&b, &g);
    memset(b.dst, 0x5a, MEMORY);
    b.copies[NCOPIES - 1].op = (tb_reduce_op)77;
    assert_int_equal(tb__moves_run(b.copies, b.n), TB_INVALID);
    for (size_t i = 0; i < MEMORY; i++)
        assert_int_equal(b.dst[i], 0x5a);
    assert_int_equal(tb__moves_run(NULL, 0), TB_OK);
    free_batch(&b);
}

static void test_limits(void **state) {
    (void)state;
    tb__workers_set(-3);
    assert_int_equal(tb__workers_count(), 1);
    tb__workers_set(100000);
    assert_int_equal(tb__workers_count(), TB__WORKERS_MAX);
    /* Left at 3, so that threads are there when the process exits. */
    tb__workers_set(3);
    rng g = {test_seed()};
    batch b;
    make_batch(&b, &g);
    run(&b, 0);
    free_batch(&b);
}

enum { COUNTED = 5000 };

typedef struct tally {
    _Atomic int count[COUNTED], parts, strange;
} tally;

/* Counts each index, parts that are none, and threads that round otherwise than they should. */
static void count_part(void *arg, int64_t from, int64_t to) {
    tally *t = arg;
    atomic_fetch_add(&t->parts, 1);
    if (from < 0 || from >= to || to > COUNTED || fegetround() != FE_TONEAREST) {
        atomic_fetch_add(&t->strange, 1);
        return;
    }
    for (int64_t i = from; i < to; i++)
        atomic_fetch_add(&t->count[i], 1);
}

static void check_parts(int64_t n) {
    static tally t;
    memset(&t, 0, sizeof t);
    tb__workers_for(n, count_part, &t);
    assert_int_equal(t.strange, 0);
    for (int64_t i = 0; i < COUNTED; i++)
        assert_int_equal(t.count[i], i < n);
    if (n <= 0)
        assert_int_equal(t.parts, 0);
}

static void test_other_work(void **state) {
    (void)state;
    assert_int_equal(fesetround(FE_UPWARD), 0);
    for (int threads = 1; threads <= 4; threads++) {
        tb__workers_set(threads);
        for (int64_t n = -1; n < 200; n++)
            check_parts(n);
        check_parts(COUNTED);
    }
    /* The caller's own rounding is back afterwards. */
    assert_int_equal(fegetround(), FE_UPWARD);
    fesetround(FE_TONEAREST);
}

static void *work_often(void *arg) {
    for (int i = 0; i < 200; i++)
        tb__workers_for(COUNTED, count_part, arg);
    return NULL;
}

/* Copies and other work from several threads take turns. */
static void test_mixed_callers(void **state) {
    (void)state;
    static tally t[2];
    static batch b;
    rng g = {test_seed()};
    make_batch(&b, &g);
    pthread_t threads[3];
    tb__workers_set(3);
    assert_int_equal(pthread_create(&threads[0], NULL, work_often, &t[0]), 0);
    assert_int_equal(pthread_create(&threads[1], NULL, work_often, &t[1]), 0);
    assert_int_equal(pthread_create(&threads[2], NULL, call_often, &b), 0);
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    for (int k = 0; k < 2; k++) {
        assert_int_equal(t[k].strange, 0);
        for (int i = 0; i < COUNTED; i++)
            assert_int_equal(t[k].count[i], 200);
    }
    uint8_t *got = malloc(MEMORY);
    memcpy(got, b.dst, MEMORY);
    tb__workers_set(1);
    run(&b, 2);
    assert_true(memcmp(b.dst, got, MEMORY) == 0);
    free(got);
    free_batch(&b);
}

/* ---- Work that nobody waits for in the pool ------------------------------------------------------------------------
 */

typedef struct submitted {
    tb__work work;
    tally t;
    _Atomic int ndone;
} submitted;

static void note_done(tb__work *work) {
    submitted *s = work->arg;
    atomic_fetch_add(&s->ndone, 1); /* the last thing that the pool does with it */
}

static void count_submitted(void *arg, int64_t from, int64_t to) {
    submitted *s = arg;
    count_part(&s->t, from, to);
}

static void submit(submitted *s, int64_t total, int64_t piece) {
    s->work = (tb__work){.fn = count_submitted, .arg = s, .total = total, .piece = piece, .done = note_done};
    tb__workers_submit(&s->work);
}

enum { WORKS = 20 };

/* Submits many, then helps with all of them, in another order. */
static void *submit_and_help(void *arg) {
    submitted *all = arg;
    for (int i = 0; i < WORKS; i++)
        submit(&all[i], 1 + i * (COUNTED - 1) / (WORKS - 1), 1 + 37 * (i % 5));
    for (int i = WORKS - 1; i >= 0; i--) {
        while (!atomic_load(&all[i].ndone)) {
            if (!tb__workers_help(&all[i].work))
                sched_yield();
        }
    }
    return NULL;
}

static void test_submitted(void **state) {
    enum { CALLERS = 3 };
    static submitted all[CALLERS][WORKS];
    pthread_t threads[CALLERS];
    (void)state;
    for (int n = 1; n <= 4; n++) {
        tb__workers_set(n);
        memset(all, 0, sizeof all);
        for (int i = 0; i < CALLERS; i++)
            assert_int_equal(pthread_create(&threads[i], NULL, submit_and_help, all[i]), 0);
        tb__workers_set(n); /* changes nothing while they work */
        for (int i = 0; i < CALLERS; i++)
            assert_int_equal(pthread_join(threads[i], NULL), 0);
        for (int i = 0; i < CALLERS * WORKS; i++) {
            const submitted *s = &all[i / WORKS][i % WORKS];
            assert_int_equal(s->ndone, 1);
            assert_int_equal(s->t.strange, 0);
            for (int64_t k = 0; k < COUNTED; k++)
                assert_int_equal(s->t.count[k], k < s->work.total);
        }
    }
}

/* Of what is dropped, a beginning is done, and nothing after `done` was called. */
static void test_dropped(void **state) {
    static submitted s;
    (void)state;
    for (int i = 0; i < 600; i++) {
        memset(&s, 0, sizeof s);
        tb__workers_set(1 + i % 3);
        submit(&s, COUNTED, 1 + i % 7);
        for (int k = 0; k < i % 50; k++)
            tb__workers_help(&s.work);
        tb__workers_cancel(&s.work);
        while (!atomic_load(&s.ndone))
            sched_yield();
        int64_t parts = s.t.parts;
        for (int64_t k = 1; k < COUNTED; k++) /* what was done is at the beginning */
            assert_true(s.t.count[k] == 0 || (s.t.count[k] == 1 && s.t.count[k - 1] == 1));
        assert_false(tb__workers_help(&s.work));
        tb__workers_cancel(&s.work);
        assert_int_equal(s.t.parts, parts);
        assert_int_equal(s.ndone, 1);
    }
}

/* A child has none of its parent's work. */
static void test_fork_with_work(void **state) {
    static submitted mine, other;
    (void)state;
#ifdef __SANITIZE_THREAD__
    skip();
#endif
    tb__workers_set(1);
    memset(&mine, 0, sizeof mine);
    submit(&mine, COUNTED, 10);
    tb__workers_help(&mine.work);
    pid_t child = fork();
    if (child == 0) {
        tb__workers_set(3);
        memset(&other, 0, sizeof other);
        submit(&other, COUNTED, 10);
        while (!atomic_load(&other.ndone))
            tb__workers_help(&other.work);
        bool ok = other.t.strange == 0 && mine.t.parts == 1;
        for (int i = 0; i < COUNTED; i++)
            ok = ok && other.t.count[i] == 1;
        tb__workers_set(1);
        _exit(ok ? 0 : 1);
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    while (tb__workers_help(&mine.work)) {
    }
    assert_int_equal(mine.ndone, 1);
    for (int i = 0; i < COUNTED; i++)
        assert_int_equal(mine.t.count[i], 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_threads_agree), cmocka_unit_test(test_several_callers),
        cmocka_unit_test(test_fork),          cmocka_unit_test(test_many_small_batches),
        cmocka_unit_test(test_bad_batch),     cmocka_unit_test(test_other_work),
        cmocka_unit_test(test_mixed_callers), cmocka_unit_test(test_submitted),
        cmocka_unit_test(test_dropped),       cmocka_unit_test(test_fork_with_work),
        cmocka_unit_test(test_limits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
