/* Small tensors on a GPU that would fit into one bucket, of which some can't be shared: these alone are staged, and the
 * others are read in place. One process sends, another receives, with and without a shadow and a snapshot, and every
 * element arrives. */
#include "bus/members_test.h"

#include "../tests/support/cuda_program.h"

#include <inttypes.h>

enum { NTENSORS = 48, COUNT = 1500, NVERSIONS = 3, UNSHAREABLE = 7, POOLED = 31, POISON = 0x5c };

typedef struct member {
    int position, nbarriers;
    tb__store *store;
    tb_world *world;
    CUdeviceptr together;       /* cudaMalloc, of all but two */
    CUdeviceptr data[NTENSORS]; /* by tensor */
} member;

static void meet(member *m) {
    int round = m->nbarriers++;
    assert_ok(say_of(m->store, "here", round, m->position, ""));
    assert_ok(hear_of(m->store, "here", round, 1 - m->position, PATIENCE_MS, NULL, 0));
}

static bool is_staged(int tensor) {
    return tensor == UNSHAREABLE || tensor == POOLED;
}

static void alloc_tensors(member *m) {
    size_t nbytes = COUNT * sizeof(uint32_t);
    m->together = alloc_legacy(NTENSORS * nbytes);
    for (int i = 0; i < NTENSORS; i++)
        m->data[i] = m->together + (size_t)i * nbytes;
    m->data[UNSHAREABLE] = alloc_vmm(1, CU_MEM_HANDLE_TYPE_NONE);
    m->data[POOLED] = alloc_from_pool_on(0, make_pool_on(0, CU_MEM_HANDLE_TYPE_NONE), nbytes);
}

static void free_tensors(const member *m) {
    free_legacy(m->together);
    free_legacy(m->data[POOLED]);
    free_vmm(m->data[UNSHAREABLE], 1);
}

static uint32_t value_of(int version, int tensor, size_t i) {
    return (uint32_t)i * 2654435761U + (uint32_t)version * 7919 + (uint32_t)tensor * 104729;
}

/* Version 0: wrong values. */
static void write_tensors(const member *m, int version) {
    uint32_t copy[COUNT];
    for (int i = 0; i < NTENSORS; i++) {
        memset(copy, POISON, sizeof copy);
        for (size_t j = 0; version && j < COUNT; j++)
            copy[j] = value_of(version, i, j);
        write_gpu(0, m->data[i], copy, sizeof copy);
    }
}

static void verify_tensors(const member *m, int version) {
    uint32_t copy[COUNT];
    for (int i = 0; i < NTENSORS; i++) {
        read_gpu(0, m->data[i], copy, sizeof copy);
        for (size_t j = 0; j < COUNT; j++) {
            if (copy[j] != value_of(version, i, j))
                fail_msg("tensor %d, version %d, element %zu: %" PRIu32, i, version, j, copy[j]);
        }
    }
}

/* A line for each tensor. From a snapshot, which is the library's own memory, all are read. */
static void check_dump(tb_batch *batch, bool is_send, bool has_snapshot) {
    char *dump, name[32];
    assert_ok(tb_batch_dump(batch, is_send, &dump));
    for (int i = 0; i < NTENSORS; i++) {
        snprintf(name, sizeof name, "  t%02d [", i);
        const char *line = strstr(dump, name), *end = line ? strchr(line, '\n') : NULL;
        const char *words = is_staged(i) && !has_snapshot ? "staged (rank "
                            : is_send                     ? ", read in place, "
                                                          : ", direct, mapped, ";
        const char *found = end ? strstr(line, words) : NULL;
        if (!found || found > end)
            fail_msg("'%s' is not said of tensor %d:\n%s", words, i, dump);
    }
    free(dump);
}

static void send_batch(member *m, tb_pair *pair, const char *name, bool has_copies) {
    bool sends = m->position == 0;
    tb_batch *batch;
    tb_batch_opts opts = {.size = sizeof opts};
    if (has_copies && sends)
        opts.snapshot = true;
    else if (has_copies)
        opts.commit = TB_SHADOW;
    assert_ok(tb_batch_create(m->world, name, &opts, &batch));
    for (int i = 0; i < NTENSORS; i++) {
        char tensor[16];
        snprintf(tensor, sizeof tensor, "t%02d", i);
        tb_tensor t = {.size = sizeof t, .data = (void *)m->data[i], .dtype = TB_I32, .ndim = 1, .shape = {COUNT}};
        assert_ok(tb_batch_add(batch, pair, tensor, &t));
    }
    for (int version = 1; version <= NVERSIONS; version++) {
        tb_transfer *t = NULL;
        write_tensors(m, sends ? version : 0);
        meet(m);
        assert_ok((sends ? tb_send : tb_recv)(batch, NULL, &t));
        assert_ok(tb_wait(t, TB_COMMITTED, PATIENCE_MS));
        if (!sends)
            verify_tensors(m, version);
        tb_transfer_destroy(t);
        meet(m);
    }
    check_dump(batch, sends, has_copies);
    meet(m);
    tb_batch_destroy(batch);
}

static int play(const char *url, const char *arg) {
    member m = {.position = atoi(arg)};
    bool sends = m.position == 0;
    tb_pair *pair;
    assert_ok(tb__cuda_load());
    m.store = open_store(url);
    assert_ok(join_bus(url, sends ? "a" : "b", 0, 1, &m.world));
    alloc_tensors(&m);
    assert_ok(tb_pair_create(m.world, "p", sends ? "b" : "a", "mesh=1 place=R", NULL, &pair));
    send_batch(&m, pair, "plain", false);
    send_batch(&m, pair, "copies", true);
    tb_pair_destroy(pair);
    tb_world_destroy(m.world);
    free_tensors(&m);
    tb__store_close(m.store);
    return 0;
}

static void test_only_what_must_be_is_staged(void **state) {
    for (int i = 0; i < 2; i++)
        start_member(*state, i, 0);
    end_members(*state);
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "member") == 0)
        return play(argv[2], argv[3]);
    if (argc == 4 && strcmp(argv[1], "load") == 0) {
        need_gpu();
        return 0;
    }
    if (end_of(start_role("load", "", "")) == 77) /* a process that has used the driver can't fork others that do */
        return 77;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_only_what_must_be_is_staged, set_up, tear_down)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
