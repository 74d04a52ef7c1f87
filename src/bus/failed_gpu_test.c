/* A GPU whose context has failed for good, as after an illegal access in a kernel: the rank's transfers fail by name,
 * and so do those of its peer, which is told whose device is lost; tensors in host memory go on. At either end, while a
 * version is moved. With the fake driver only: no program should do that to a real one. */
#include "bus/members_test.h"

#include "../tests/support/cuda_program.h"

#include <inttypes.h>

enum { NPIECES = 2, COUNT = NPIECES * PIECE / sizeof(uint32_t), POISON = 0x5c5c5c5c };

typedef struct member {
    int position, victim, nbarriers;
    tb__store *store;
    tb_world *world;
    tb_pair *pair;
    tb_batch *on_gpu, *on_host;
    CUdeviceptr memory;
    uint32_t *host, *copy;
} member;

static bool is_sender(const member *m) {
    return m->position == 0;
}

static void meet(member *m) {
    int round = m->nbarriers++;
    assert_ok(say_of(m->store, "here", round, m->position, ""));
    assert_ok(hear_of(m->store, "here", round, 1 - m->position, PATIENCE_MS, NULL, 0));
}

static uint32_t value_of(int version, size_t i) {
    return (uint32_t)i * 2654435761U + (uint32_t)version;
}

static void fill(const member *m, uint32_t *to, int version) {
    for (size_t i = 0; i < COUNT; i++)
        to[i] = is_sender(m) ? value_of(version, i) : POISON;
}

static void verify(const uint32_t *got, int version) {
    for (size_t i = 0; i < COUNT; i++) {
        if (got[i] != value_of(version, i))
            fail_msg("version %d, element %zu: %" PRIu32, version, i, got[i]);
    }
}

static tb_batch *make_batch(const member *m, const char *name, void *data) {
    tb_batch *batch;
    tb_tensor t = {.size = sizeof t, .data = data, .dtype = TB_I32, .ndim = 1, .shape = {COUNT}};
    assert_ok(tb_batch_create(m->world, name, NULL, &batch));
    assert_ok(tb_batch_add(batch, m->pair, "w", &t));
    assert_ok(tb_batch_register(batch, 0));
    return batch;
}

/* The receiver comes first: who comes after a failure waits for the next transfer. */
static tb_status move(member *m, tb_batch *batch) {
    tb_transfer *t = NULL;
    if (is_sender(m))
        meet(m);
    tb_status status = (is_sender(m) ? tb_send : tb_recv)(batch, NULL, &t);
    if (!is_sender(m))
        meet(m);
    if (status == TB_OK)
        status = tb_wait(t, TB_COMMITTED, -1);
    tb_transfer_destroy(t);
    return status;
}

static void move_on_host(member *m, int version) {
    fill(m, m->host, version);
    assert_ok(move(m, m->on_host));
    verify(m->host, version);
}

static void join(member *m, const char *url) {
    assert_ok(tb__cuda_load());
    m->store = open_store(url);
    m->copy = malloc(COUNT * sizeof *m->copy);
    assert_non_null(m->copy);
    assert_ok(join_bus(url, is_sender(m) ? "a" : "b", 0, 1, &m->world));
    assert_ok(tb_pair_create(m->world, "p", is_sender(m) ? "b" : "a", "mesh=1 place=R", NULL, &m->pair));
    /* The receiver's kernel reads what is shared, the sender's packs what is not. */
    m->memory = alloc_vmm(NPIECES, m->victim == 0 ? CU_MEM_HANDLE_TYPE_NONE : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    assert_ok(tb_alloc(COUNT * sizeof *m->host, (void **)&m->host));
    m->on_host = make_batch(m, "on_host", m->host);
    m->on_gpu = make_batch(m, "on_gpu", (void *)(uintptr_t)m->memory);
}

static int play(const char *url, const char *arg) {
    const fake_cuda_control *fake = fake_cuda();
    member m = {.position = arg[0] - '0', .victim = arg[1] - '0'};
    bool is_victim = m.position == m.victim;
    join(&m, url);
    fill(&m, m.copy, 1);
    write_gpu(0, m.memory, m.copy, COUNT * sizeof *m.copy);
    assert_ok(move(&m, m.on_gpu));
    read_gpu(0, m.memory, m.copy, COUNT * sizeof *m.copy);
    verify(m.copy, 1);
    move_on_host(&m, 1);
    if (is_victim)
        fake->fail_kernel(0, CUDA_ERROR_ILLEGAL_ADDRESS);
    for (int i = 0; i < 2; i++) { /* the kernel that fails, and what comes after it */
        assert_fails(move(&m, m.on_gpu), TB_IO,
                     m.victim == 0 ? " (a 0): the cuda:0 device " : " (b 0): the cuda:0 device ");
        assert_non_null(strstr(tb_error_detail(), "tensor 'w' of batch 'on_gpu': cuda:0 (Fake GPU) has failed: "
                                                  "CUDA_ERROR_ILLEGAL_ADDRESS"));
    }
    move_on_host(&m, 2);
    meet(&m);
    tb_batch_destroy(m.on_gpu);
    tb_batch_destroy(m.on_host);
    tb_pair_destroy(m.pair);
    tb_world_destroy(m.world);
    tb_free(m.host);
    tb__store_close(m.store);
    free(m.copy);
    return 0;
}

static void run_with_victim(scene *s, int victim) {
    char arg[32];
    for (int i = 0; i < 2; i++) {
        snprintf(arg, sizeof arg, "%d%d", i, victim);
        s->pids[i] = start_role("member", s->place.url, arg);
    }
    end_members(s);
}

static void test_receiver(void **state) {
    run_with_victim(*state, 1);
}

static void test_sender(void **state) {
    run_with_victim(*state, 0);
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "member") == 0)
        return play(argv[2], argv[3]);
    if (!fake_cuda()) {
        printf("skipped: it takes the fake driver\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_receiver, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_sender, set_up, tear_down),
    };
    return cmocka_run_group_tests_name("failed GPU", tests, NULL, NULL);
}
