/* Memory of a GPU that is unmapped and mapped again, as vLLM's sleep mode does it: two processes, of which one sends
 * and one receives, give up the memory of their tensors fifty times. Nothing uses it meanwhile, the old batch fails by
 * name, a new one moves every element, and neither memory of the GPU nor descriptors are lost. With and without agents.
 *
 * The driver tells only how much memory of the GPU is free to all processes together. If that went down, the cycles are
 * repeated: memory that they lose is lost every time, but what another process has taken only once. */
#include "bus/members_test.h"

#include "../tests/support/cuda_program.h"

#include <dirent.h>
#include <inttypes.h>

enum {
    CYCLES = 50,
    ROUNDS = 8,   /* of these cycles, at most */
    SETTLED = 10, /* by this cycle, caches have what they keep */
    NPIECES = 4,
    NBYTES = NPIECES * PIECE,
    COUNT = NBYTES / sizeof(uint32_t),
    SLACK = 4 << 20, /* of the driver's own; a piece for each cycle would be twenty times that */
    SLACK_FDS = 8,   /* some are closed a moment later; one for each cycle would be five times that */
    POISON = 0x5c
};

typedef struct member {
    const char *url;
    int position, nbarriers;
    tb__store *store;
    tb_world *world;
    CUdeviceptr memory;
    uint32_t *copy;
} member;

static bool is_sender(const member *m) {
    return m->position == 0;
}

/* Waits until both have come. Whether either of them says yes. */
static bool ask_both(member *m, bool mine) {
    char theirs[8] = "";
    int round = m->nbarriers++;
    assert_ok(say_of(m->store, "here", round, m->position, mine ? "yes" : "no"));
    assert_ok(hear_of(m->store, "here", round, 1 - m->position, PATIENCE_MS, theirs, sizeof theirs));
    return mine || strcmp(theirs, "yes") == 0;
}

static void meet(member *m) {
    ask_both(m, false);
}

/* Of this process, or of its agent. */
static size_t count_descriptors(const member *m) {
    size_t count = 0;
    char path[64] = "/proc/self/fd";
    if (getenv("TB_AGENTS"))
        snprintf(path, sizeof path, "/proc/%s/fd", getenv(is_sender(m) ? "TB_AGENT_A" : "TB_AGENT_B"));
    DIR *folder = opendir(path);
    assert_non_null(folder);
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

static size_t free_memory(void) {
    size_t nfree, total;
    CUcontext before = current_context();
    set_context(primary_context(0));
    assert_cuda(DRIVER_CALL("cuMemGetInfo_v2", (size_t *, size_t *), &nfree, &total));
    set_context(before);
    return nfree;
}

static uint32_t value_of(int cycle, size_t i) {
    return (uint32_t)i * 2654435761U + (uint32_t)cycle;
}

static void fill(const member *m, int cycle) {
    for (size_t i = 0; i < COUNT; i++)
        m->copy[i] = value_of(cycle, i);
    if (!is_sender(m))
        memset(m->copy, POISON, NBYTES);
    write_gpu(0, m->memory, m->copy, NBYTES);
}

static void verify(const member *m, int cycle) {
    read_gpu(0, m->memory, m->copy, NBYTES);
    for (size_t i = 0; i < COUNT; i++) {
        if (m->copy[i] != value_of(cycle, i))
            fail_msg("cycle %d, element %zu: %" PRIu32, cycle, i, m->copy[i]);
    }
}

/* The receiver comes first: who comes after a failure waits for the next transfer. */
static tb_status move(member *m, tb_batch *batch) {
    tb_transfer *t = NULL;
    if (is_sender(m))
        meet(m);
    TB_TRY((is_sender(m) ? tb_send : tb_recv)(batch, NULL, &t));
    if (!is_sender(m))
        meet(m);
    tb_status status = tb_wait(t, TB_COMMITTED, -1);
    tb_transfer_destroy(t);
    return status;
}

/* Every fifth time it is memory that can't be shared, as vLLM's. */
static int handle_types(int cycle) {
    return cycle % 5 == 4 ? CU_MEM_HANDLE_TYPE_NONE : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

static void run_cycle(member *m, tb_pair *pair, int cycle, size_t *nfree) {
    tb_batch *batch;
    tb_tensor t = {
        .size = sizeof t, .data = (void *)(uintptr_t)m->memory, .dtype = TB_I32, .ndim = 1, .shape = {COUNT}};
    map_vmm(m->memory, NPIECES, handle_types(cycle));
    assert_ok(tb_batch_create(m->world, "step", NULL, &batch));
    assert_ok(tb_batch_add(batch, pair, "w", &t));
    assert_ok(tb_batch_register(batch, 0));
    fill(m, cycle);
    assert_ok(move(m, batch));
    verify(m, cycle);
    meet(m);
    assert_ok(tb_world_invalidate(m->world, t.data, NBYTES));
    assert_cuda(tb__cuda.cuMemUnmap(m->memory, NBYTES));
    meet(m);
    *nfree = free_memory();
    assert_fails(move(m, batch), TB_INVALID, "the memory of tensor 'w'");
    meet(m);
    tb_batch_destroy(batch);
}

/* Whether less memory of the GPU was free after the cycles, for either of the two. */
static bool run_cycles(member *m, tb_pair *pair) {
    size_t nfree = 0, free_before = 0, fds_before = 0;
    for (int i = 0; i < CYCLES; i++) {
        run_cycle(m, pair, i, &nfree);
        if (i == SETTLED) {
            free_before = nfree;
            fds_before = count_descriptors(m);
        }
    }
    printf("%s: %zu bytes of the GPU were free after cycle %d, %zu after %d; %zu descriptors, then %zu\n",
           is_sender(m) ? "sender" : "receiver", free_before, SETTLED, nfree, CYCLES, fds_before, count_descriptors(m));
    assert_true(count_descriptors(m) <= fds_before + SLACK_FDS);
    return ask_both(m, nfree + SLACK < free_before);
}

static int play(const char *url, const char *arg) {
    member m = {.url = url, .position = atoi(arg)};
    int round = 0;
    tb_pair *pair;
    assert_ok(tb__cuda_load());
    m.store = open_store(url);
    m.copy = malloc(NBYTES);
    assert_non_null(m.copy);
    assert_cuda(tb__cuda.cuMemAddressReserve(&m.memory, NBYTES, 0, 0, 0));
    const char *group = is_sender(&m) ? "a" : "b";
    assert_ok(getenv("TB_AGENTS") ? join_agent(group, &m.world) : join_bus(url, group, 0, 1, &m.world));
    assert_ok(tb_pair_create(m.world, "p", is_sender(&m) ? "b" : "a", "mesh=1 place=R", NULL, &pair));
    while (round < ROUNDS && run_cycles(&m, pair))
        round++;
    if (round == ROUNDS)
        fail_msg("memory of the GPU was lost in each of %d rounds; does another program allocate all the time?",
                 ROUNDS);
    tb_pair_destroy(pair);
    tb_world_destroy(m.world);
    tb__store_close(m.store);
    free(m.copy);
    return 0;
}

static void test_sleep(void **state) {
    scene *s = *state;
    for (int i = 0; i < 2; i++)
        start_member(s, i, 0);
    end_members(s);
}

static void start_clients(scene *s) {
    char pid[16];
    for (int i = 0; i < 2; i++) {
        snprintf(pid, sizeof pid, "%d", (int)s->pids[MAX_MEMBERS - 2 + i]);
        setenv(i == 0 ? "TB_AGENT_A" : "TB_AGENT_B", pid, 1);
    }
    for (int i = 0; i < 2; i++)
        start_member(s, i, 0);
}

static void test_sleep_with_agents(void **state) {
    run_with_agents(*state, start_clients);
}

/* A process that has used the driver can't fork others that use it: so another one looks whether there is a GPU. */
static bool has_gpu(void) {
    pid_t pid = start_role("look", "", "");
    return end_of(pid) == 0;
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "member") == 0)
        return play(argv[2], argv[3]);
    if (argc == 4 && strcmp(argv[1], "look") == 0)
        return tb__cuda_load() == TB_OK ? 0 : 1;
    if (!has_gpu()) {
        printf("skipped: there is no GPU\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(test_sleep, set_up, tear_down),
                                       cmocka_unit_test_setup_teardown(test_sleep_with_agents, set_up, tear_down)};
    return cmocka_run_group_tests_name("sleep", tests, NULL, NULL);
}
