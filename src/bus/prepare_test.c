/* What registration prepares for a side that is going to send: readers have mapped its memory, and filled their page
 * tables, before the first transfer. */
#include "bus/bus_test.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>

enum { SIDE = 4096, NBYTES = SIDE * SIDE * (int)sizeof(uint32_t), PAGE = 4096, NPAGES = NBYTES / PAGE, ROUNDS = 5 };

/* In a transfer that was prepared. Else there is one for 16 pages, in kernels that fill so many entries at a time. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { MOST_FAULTS = INT32_MAX }; /* the sanitizer has memory of its own */
#else
enum { MOST_FAULTS = NPAGES / 32 };
#endif

static const tb_batch_opts sends = {.size = sizeof sends, .sends = true};

/* Shared memory in this process's page tables, in KiB. All ranks are in this process. */
static long mapped_kib(void) {
    char line[128];
    long kib = -1;
    FILE *file = fopen("/proc/self/status", "re");
    check(file != NULL);
    while (kib < 0 && fgets(line, sizeof line, file))
        (void)sscanf(line, "RssShmem: %ld", &kib);
    (void)fclose(file);
    check(kib >= 0);
    return kib;
}

static bool has_mapped(long before_kib, long nbytes, int timeout_ms) {
    int64_t deadline_ms = tb__now_ms() + timeout_ms;
    while (mapped_kib() < before_kib + nbytes / 1024 && tb__now_ms() < deadline_ms)
        usleep(1000);
    return mapped_kib() >= before_kib + nbytes / 1024;
}

static long count_faults(void) {
    struct rusage usage;
    check(getrusage(RUSAGE_SELF, &usage) == 0);
    return usage.ru_minflt;
}

/* As set_up, but the tensors have values before the registration, and that can be waited for. */
static void make_batch(rank *r, setup *s, const tb_batch_opts *opts) {
    static const char layout[] = "mesh=1 place=R";
    part_init(&s->w, layout, r->index, SIDE, SIDE);
    part_poison(&s->w);
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout, NULL, &s->pair));
    check_ok(tb_batch_create(r->world, "step", opts, &s->batch));
    tb_tensor w = part_tensor(&s->w);
    check_ok(tb_batch_add(s->batch, s->pair, "w", &w));
}

static void prepare(rank *r) {
    setup s;
    make_batch(r, &s, is_a(r) ? &sends : NULL);
    meet(r);
    long before = mapped_kib();
    meet(r);
    check_ok(tb_batch_register(s.batch, 0));
    check(has_mapped(before, NBYTES, PATIENCE_MS));
    meet(r);
    long faults = count_faults();
    exchange(r, &s, "a", 1);
    meet(r);
    check(count_faults() - faults < MOST_FAULTS);
    exchange(r, &s, "b", 2); /* which nothing was prepared for */
    exchange(r, &s, "a", 3);
    tear_down(&s);
}

static void test_page_tables(void **state) {
    (void)state;
    run_ranks(prepare, 1, 1, NULL);
}

static void prepare_nothing(rank *r) {
    setup s;
    make_batch(r, &s, NULL);
    meet(r);
    long before = mapped_kib();
    meet(r);
    check_ok(tb_batch_register(s.batch, 0));
    check(!has_mapped(before, NBYTES / 2, SOON_MS));
    meet(r);
    exchange(r, &s, "a", 1);
    tear_down(&s);
}

static void test_not_asked_for(void **state) {
    (void)state;
    run_ranks(prepare_nothing, 1, 1, NULL);
}

static size_t count_pages(void *memory) {
    static _Thread_local unsigned char has[NPAGES + 1];
    uintptr_t first = (uintptr_t)memory / PAGE * PAGE;
    size_t count = 0;
    check(mincore((void *)first, NBYTES, has) == 0); // NOLINT(performance-no-int-to-ptr)
    for (size_t i = 1; i + 1 < NPAGES; i++)          /* the first and the last one are of other tensors, too */
        count += has[i] & 1;
    return count;
}

/* A tensor without memory gets none before it is moved. */
static void prepare_empty(rank *r) {
    setup s;
    void *empty;
    make_batch(r, &s, is_a(r) ? &sends : NULL);
    check_ok(tb_alloc(2 * (size_t)NBYTES, &empty)); /* longer than what earlier batches had: it is new */
    tb_tensor t = part_tensor(&s.w);
    t.data = empty;
    check_ok(tb_batch_add(s.batch, s.pair, "empty", &t));
    meet(r);
    long before = mapped_kib();
    meet(r);
    check_ok(tb_batch_register(s.batch, 0));
    check(has_mapped(before, NBYTES, PATIENCE_MS));
    usleep(1000 * SOON_MS);
    meet(r);
    check(count_pages(empty) < NPAGES / 256); /* tb_alloc tries a few, for huge pages */
    meet(r);
    tear_down(&s);
    tb_free(empty);
}

static void test_no_memory_is_allocated(void **state) {
    (void)state;
    run_ranks(prepare_empty, 1, 1, NULL);
}

/* What is being prepared is given up when the batch is used or destroyed, or its memory invalidated. */
static void hurry(rank *r) {
    for (int round = 0; round < ROUNDS; round++) {
        setup s;
        make_batch(r, &s, is_a(r) ? &sends : NULL);
        check_ok(tb_batch_register(s.batch, 0));
        if (round % 2 == 0)
            exchange(r, &s, "a", (uint32_t)round + 1);
        else if (round % 3 == 0)
            check_ok(tb_world_invalidate(r->world, s.w.data, NBYTES));
        meet(r);
        tear_down(&s);
        meet(r);
    }
}

static void test_hurry(void **state) {
    (void)state;
    run_ranks(hurry, 1, 1, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_page_tables),
        cmocka_unit_test(test_not_asked_for),
        cmocka_unit_test(test_no_memory_is_allocated),
        cmocka_unit_test(test_hurry),
    };
    /* With huge pages, memory has pages when it is allocated. */
    (void)prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
    return cmocka_run_group_tests_name("prepare", tests, NULL, NULL);
}
