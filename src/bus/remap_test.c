/* Memory of a GPU that its owner maps anew, or frees, without tb_world_invalidate: a peer that has mapped it would go
 * on reading what was there before. So the send fails, by name; a target is written by its address, and only has to be
 * there. With and without agents, and what it costs for many tensors. */
#include "bus/members_test.h"

#include "../tests/support/cuda_program.h"

#include <inttypes.h>

enum { NPIECES = 2, NBYTES = NPIECES * PIECE, COUNT = NBYTES / sizeof(uint32_t), MANY = 65536 };

typedef struct member {
    int position, nbarriers;
    tb__store *store;
    tb_world *world;
    tb_pair *pair;
    tb_batch *batch;
    CUdeviceptr memory;
    uint32_t *copy;
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

static void fill(const member *m, int version) {
    for (size_t i = 0; i < COUNT; i++)
        m->copy[i] = is_sender(m) ? value_of(version, i) : 0x5c5c5c5c;
    write_gpu(0, m->memory, m->copy, NBYTES);
}

static void verify(const member *m, int version) {
    read_gpu(0, m->memory, m->copy, NBYTES);
    for (size_t i = 0; i < COUNT; i++) {
        if (m->copy[i] != value_of(version, i))
            fail_msg("version %d, element %zu: %" PRIu32, version, i, m->copy[i]);
    }
}

static void remap(const member *m, int handle_types) {
    assert_cuda(tb__cuda.cuMemUnmap(m->memory, NBYTES));
    map_vmm(m->memory, NPIECES, handle_types);
}

/* The receiver comes first: who comes after a failure waits for the next transfer. */
static tb_status move(member *m) {
    tb_transfer *t = NULL;
    if (is_sender(m))
        meet(m);
    tb_status status = (is_sender(m) ? tb_send : tb_recv)(m->batch, NULL, &t);
    if (!is_sender(m))
        meet(m);
    if (status == TB_OK)
        status = tb_wait(t, TB_COMMITTED, -1);
    tb_transfer_destroy(t);
    return status;
}

static void make_batch(member *m) {
    tb_tensor t = {
        .size = sizeof t, .data = (void *)(uintptr_t)m->memory, .dtype = TB_I32, .ndim = 1, .shape = {COUNT}};
    assert_ok(tb_batch_create(m->world, "step", NULL, &m->batch));
    assert_ok(tb_batch_add(m->batch, m->pair, "w", &t));
    assert_ok(tb_batch_register(m->batch, 0));
}

/* What would end the program, or the GPU's context, is refused when it is added. */
static void refuse_bad_memory(member *m) {
    tb_batch *batch;
    tb_tensor t = {.size = sizeof t, .data = (void *)(uintptr_t)m->memory, .dtype = TB_I32, .ndim = 1};
    assert_ok(tb_batch_create(m->world, "bad", NULL, &batch));
    t.shape[0] = COUNT + 1;
    assert_fails(tb_batch_add(batch, m->pair, "long", &t), TB_INVALID,
                 "it has 4194308 bytes, but the memory on cuda:0 that it begins in ends after 4194304 of them");
    assert_non_null(strstr(tb_error_detail(), "tensor 'long'"));
    CUdeviceptr freed = alloc_legacy(4096);
    free_legacy(freed);
    t.shape[0] = 4;
    t.data = (void *)(uintptr_t)freed;
    assert_fails(tb_batch_add(batch, m->pair, "freed", &t), TB_INVALID,
                 "are neither mapped memory of this process nor");
    assert_non_null(strstr(tb_error_detail(), "tensor 'freed'"));
    tb_batch_destroy(batch);
}

static void move_well(member *m, int version) {
    fill(m, version);
    assert_ok(move(m));
    verify(m, version);
    meet(m);
}

static void join(member *m, const char *url) {
    assert_ok(tb__cuda_load());
    m->store = open_store(url);
    m->copy = malloc(NBYTES);
    assert_non_null(m->copy);
    const char *group = is_sender(m) ? "a" : "b";
    assert_ok(getenv("TB_AGENTS") ? join_agent(group, &m->world) : join_bus(url, group, 0, 1, &m->world));
    assert_ok(tb_pair_create(m->world, "p", is_sender(m) ? "b" : "a", "mesh=1 place=R", NULL, &m->pair));
}

static void leave(member *m) {
    tb_pair_destroy(m->pair);
    tb_world_destroy(m->world);
    tb__store_close(m->store);
    free(m->copy);
}

static int play_remap(member *m, const char *url) {
    enum { FD = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR };
    join(m, url);
    m->memory = alloc_vmm(NPIECES, FD);
    refuse_bad_memory(m);
    make_batch(m);
    move_well(m, 1);
    if (!is_sender(m)) /* the target is written by its address */
        remap(m, FD);
    move_well(m, 2);
    if (is_sender(m))
        remap(m, FD);
    assert_fails(move(m), TB_INVALID, "the memory of tensor 'w' on rank ");
    assert_non_null(
        strstr(tb_error_detail(), " was remapped since it was registered; call tb_world_invalidate before"));
    meet(m);
    tb_batch_destroy(m->batch);
    meet(m);
    make_batch(m);
    move_well(m, 3);
    if (!is_sender(m)) /* there is nothing to write to */
        assert_cuda(tb__cuda.cuMemUnmap(m->memory, NBYTES));
    assert_fails(move(m), TB_INVALID, "the memory of tensor 'w' on rank ");
    assert_non_null(strstr(tb_error_detail(), " was freed or unmapped since it was registered; call"));
    meet(m);
    tb_batch_destroy(m->batch);
    meet(m);
    if (!is_sender(m))
        map_vmm(m->memory, NPIECES, FD);
    /* What nobody can map is read by its address, too. */
    if (is_sender(m))
        remap(m, CU_MEM_HANDLE_TYPE_NONE);
    make_batch(m);
    move_well(m, 4);
    if (is_sender(m))
        remap(m, CU_MEM_HANDLE_TYPE_NONE);
    move_well(m, 5);
    tb_batch_destroy(m->batch);
    free_vmm(m->memory, NPIECES);
    leave(m);
    return 0;
}

static void make_batch_again(member *m) {
    meet(m);
    tb_batch_destroy(m->batch);
    meet(m);
    make_batch(m);
}

/* An agent has mapped the memory of both ends, so it is the client that says it, before the agent is asked for
 * anything: at either end, of any piece, and also if nothing is there any more. */
static int play_agents(member *m, const char *url) {
    enum { FD = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, NONE = CU_MEM_HANDLE_TYPE_NONE };
    int version = 1;
    tb_transfer *t = NULL;
    join(m, url);
    m->memory = alloc_vmm(NPIECES, FD);
    make_batch(m);
    move_well(m, version++);
    for (int i = 0; i < 6; i++) { /* whose turn it is, and what: all, the last piece, nothing is left */
        if (i % 2 == m->position) {
            CUdeviceptr at = m->memory + (i / 2 == 1 ? NBYTES - PIECE : 0);
            size_t npieces = i / 2 == 1 ? 1 : NPIECES;
            assert_cuda(tb__cuda.cuMemUnmap(at, npieces * PIECE));
            if (i / 2 < 2)
                map_vmm(at, npieces, FD);
            assert_fails((is_sender(m) ? tb_send : tb_recv)(m->batch, NULL, &t), TB_INVALID,
                         "the memory of tensor 'w' was ");
            assert_non_null(
                strstr(tb_error_detail(), i / 2 < 2 ? " was remapped since" : " was freed or unmapped since"));
            if (i / 2 == 2)
                map_vmm(m->memory, NPIECES, FD);
        }
        make_batch_again(m);
        move_well(m, version++);
    }
    /* As it should be done. */
    assert_ok(tb_world_invalidate(m->world, (void *)(uintptr_t)m->memory, NBYTES));
    remap(m, FD);
    make_batch_again(m);
    move_well(m, version++);
    /* What the agent can't map is copied by the client, from and to whatever is at the address. */
    remap(m, NONE);
    make_batch_again(m);
    move_well(m, version++);
    remap(m, NONE);
    move_well(m, version++);
    tb_batch_destroy(m->batch);
    free_vmm(m->memory, NPIECES);
    leave(m);
    return 0;
}

/* One question to the driver for each allocation and version, not one for each tensor. */
static int play_many(member *m, const char *url) {
    const fake_cuda_control *fake = fake_cuda();
    char name[24];
    join(m, url);
    m->memory = alloc_vmm(NPIECES, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    assert_ok(tb_batch_create(m->world, "step", NULL, &m->batch));
    for (int i = 0; i < MANY; i++) {
        tb_tensor t = {.size = sizeof t,
                       .data = (char *)(uintptr_t)m->memory + (size_t)i * (NBYTES / MANY),
                       .dtype = TB_I32,
                       .ndim = 1,
                       .shape = {NBYTES / MANY / 4}};
        snprintf(name, sizeof name, "w%d", i);
        assert_ok(tb_batch_add(m->batch, m->pair, name, &t));
    }
    assert_ok(tb_batch_register(m->batch, 0));
    for (int version = 1; version <= 3; version++) {
        fill(m, version);
        long before = fake ? fake->count_calls("cuPointerGetAttributes") : 0;
        assert_ok(move(m));
        long calls = fake ? fake->count_calls("cuPointerGetAttributes") - before : 0;
        verify(m, version);
        if (fake && version > 1) {
            printf("%s: %ld questions about addresses for a version of %d tensors in %d pieces\n",
                   is_sender(m) ? "sender" : "receiver", calls, MANY, NPIECES);
            assert_int_equal(calls, NPIECES);
        }
        meet(m);
    }
    tb_batch_destroy(m->batch);
    free_vmm(m->memory, NPIECES);
    leave(m);
    return 0;
}

static void run_role(scene *s, const char *role) {
    char arg[16];
    for (int i = 0; i < 2; i++) {
        snprintf(arg, sizeof arg, "%d", i);
        s->pids[i] = start_role(role, s->place.url, arg);
    }
    end_members(s);
}

static void test_remap(void **state) {
    run_role(*state, "remap");
}

static void test_many(void **state) {
    run_role(*state, "many");
}

static void start_agents_clients(scene *s) {
    for (int i = 0; i < 2; i++)
        s->pids[i] = start_role("agents", s->place.url, i == 0 ? "0" : "1");
}

static void test_agents(void **state) {
    run_with_agents(*state, start_agents_clients);
}

int main(int argc, char **argv) {
    member m = {.position = argc == 4 ? atoi(argv[3]) : 0};
    if (argc == 4 && strcmp(argv[1], "remap") == 0)
        return play_remap(&m, argv[2]);
    if (argc == 4 && strcmp(argv[1], "agents") == 0)
        return play_agents(&m, argv[2]);
    if (argc == 4 && strcmp(argv[1], "many") == 0)
        return play_many(&m, argv[2]);
    if (argc == 4 && strcmp(argv[1], "look") == 0)
        return tb__cuda_load() == TB_OK ? 0 : 1;
    if (end_of(start_role("look", "", "")) != 0) { /* in a process of its own: a driver does not survive a fork */
        printf("skipped: there is no GPU\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(test_remap, set_up, tear_down),
                                       cmocka_unit_test_setup_teardown(test_agents, set_up, tear_down),
                                       cmocka_unit_test_setup_teardown(test_many, set_up, tear_down)};
    return cmocka_run_group_tests_name("remap", tests, NULL, NULL);
}
