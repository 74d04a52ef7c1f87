/* Buckets of tensors on a GPU that go to other processes by ucx or nccl, from memory of the GPU to memory of the GPU.
 * UCX and NCCL are the stand-ins of tests/support, or, on a GPU, the real ones. */
#include "bus/bus_test.h"

#include <dlfcn.h>

enum { SIDE = 1024, DELAY_US = 1000000 };

/* Chunks of this process so far, in memory of a GPU; -1: UCX is a real one. It must be loaded already. */
static long count_chunks(const char *which) {
    const char *name = getenv("TENSORBUS_UCX");
    void *library = name ? dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD) : NULL;
    const _Atomic long *count = library ? dlsym(library, which) : NULL;
    return count ? *count : -1;
}

static bool dump_has(const setup *s, const char *words) {
    char *dump;
    check_ok(tb_batch_dump(s->batch, true, &dump));
    bool has = strstr(dump, words);
    if (!has)
        print_error("%s", dump);
    free(dump);
    return has;
}

/* As many chunks as wanted have been sent from memory of a GPU, and received there. */
static void move_some(rank *r, setup *s, uint32_t ntransfers, long wanted) {
    static _Thread_local uint32_t version; /* every rank is a thread */
    meet(r);
    long sent = count_chunks("fake_ucx_sent_from_gpu"), received = count_chunks("fake_ucx_received_on_gpu");
    for (uint32_t i = 0; i < ntransfers; i++)
        exchange(r, s, "a", ++version);
    meet(r);
    check(sent < 0 || count_chunks("fake_ucx_sent_from_gpu") - sent == wanted);
    check(received < 0 || count_chunks("fake_ucx_received_on_gpu") - received == wanted);
    meet(r);
}

static void measure(rank *r) {
    const char *way = r->scene->shared;
    bool is_device = strcmp(way, "its memory") == 0;
    setup s;
    char words[64];
    set_up(r, &s, "mesh=1 place=R", "mesh=1 place=R", SIDE, SIDE, NULL);
    move_some(r, &s, 1, 1);
    check(!is_a(r) || dump_has(&s, "(b 0) by ucx from its memory; whether"));
    move_some(r, &s, 3, 1); /* one more, and two by way of host memory */
    snprintf(words, sizeof words, "by ucx from %s: ", way);
    check(!is_a(r) || dump_has(&s, words));
    move_some(r, &s, 5, is_device ? 5 : 0);
    tear_down(&s);
}

/* Whichever way is slower is given up. The stand-in's TCP is as fast from one memory as from the other, so only its
 * delay is sure to be seen. */
static void test_the_faster_way(void **state) {
    (void)state;
    if (!getenv("TENSORBUS_UCX") || !strstr(getenv("TENSORBUS_UCX"), "fake_ucx"))
        skip();
    scene s;
    char text[16];
    snprintf(text, sizeof text, "%d", DELAY_US);
    setenv("FAKE_UCX_DELAY_US", text, 1);
    scene_init(&s);
    s.transport = "ucx";
    run_ranks_in(&s, measure, 1, 1, "host memory");
    unsetenv("FAKE_UCX_DELAY_US");
}

/* Small buckets are not timed. */
static void move_small(rank *r) {
    setup s;
    set_up(r, &s, "mesh=2 place=S(0)", "mesh=2 place=S(1)", 64, 64, NULL);
    move_some(r, &s, 3, 3L * 2 * 2);
    check(!is_a(r) || dump_has(&s, "by ucx from its memory; whether"));
    tear_down(&s);
}

static void test_small_buckets(void **state) {
    (void)state;
    scene s;
    scene_init(&s);
    s.transport = "ucx";
    run_ranks_in(&s, move_small, 2, 2, NULL);
}

/* Checksums are computed in host memory. */
static void move_summed(rank *r) {
    setup s;
    set_up(r, &s, "mesh=1 place=R", "mesh=1 place=R", 64, 64,
           &(tb_batch_opts){.size = sizeof(tb_batch_opts), .checksum = true});
    move_some(r, &s, 2, 0);
    tear_down(&s);
}

static void test_checksums(void **state) {
    (void)state;
    scene s;
    scene_init(&s);
    s.transport = "ucx";
    run_ranks_in(&s, move_summed, 1, 1, NULL);
}

/* A transport with communicators that the program names takes all buckets. */
static void move_by_nccl(rank *r) {
    setup s;
    set_up(r, &s, "mesh=2 place=S(0)", "mesh=2 place=S(1)", 64, 64, NULL);
    for (uint32_t version = 1; version <= 3; version++)
        exchange(r, &s, "a", version);
    check(!is_a(r) || dump_has(&s, "by nccl from its memory\n"));
    tear_down(&s);
}

static void test_nccl(void **state) {
    (void)state;
    scene s;
    scene_init(&s);
    s.transport = "nccl";
    run_ranks_in(&s, move_by_nccl, 2, 2, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_faster_way),
        cmocka_unit_test(test_small_buckets),
        cmocka_unit_test(test_checksums),
        cmocka_unit_test(test_nccl),
    };
    return cmocka_run_group_tests_name("carried", tests, NULL, NULL);
}
