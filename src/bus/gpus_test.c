/* Memory of every kind between two processes, within one, and with agents; the target on the source's GPU, or on
 * another one. Where GPUs have access to each other's memory it is read in place; where they have not, it is staged in
 * host memory, and the dump says why. Processes may see the GPUs in any order. Every element arrives. TB_ONE_GPU: all
 * is on one. */
#include "bus/members_test.h"

#include "../tests/support/cuda_program.h"
#include "device/cuda/report.h"

#include <inttypes.h>

enum { NVERSIONS = 3, NPIECES = 10, COUNT = NPIECES * PIECE / sizeof(uint32_t), POISON = 0x5c };

typedef enum home { OWN, LEGACY, VMM, POOL, UNSHAREABLE, UNSHARED_POOL, PINNED, NHOMES } home;

static const char *const names[NHOMES] = {"own", "legacy", "vmm", "pool", "unshareable", "unshared_pool", "pinned"};

typedef struct tensor {
    void *data;
    home home;
    int gpu; /* -1: host memory that is not pinned */
} tensor;

typedef struct member {
    const char *url;
    int position, nbarriers;
    bool is_alone;   /* it has both ends */
    bool is_one_gpu; /* both ends are on one */
    bool is_on_host; /* this one has all in host memory */
    tb__store *store;
    tb_world *world;
    tb_pair *pairs[2]; /* by direction: 0 sends */
    tensor from[NHOMES], to[NHOMES];
    uint32_t *copy;
} member;

static bool has_peers(void) {
    return tb__cuda_can_reach(1, 0) && tb__cuda_can_reach(0, 1);
}

/* This process's number of the GPU of an end. */
static int gpu_of(const member *m, bool is_source) {
    return m->is_on_host ? -1 : is_source || m->is_one_gpu || getenv("TB_SEEN_BY_1") ? 0 : 1;
}

static void meet(member *m) {
    int round = m->nbarriers++;
    if (m->is_alone)
        return;
    assert_ok(say_of(m->store, "here", round, m->position, ""));
    assert_ok(hear_of(m->store, "here", round, 1 - m->position, PATIENCE_MS, NULL, 0));
}

/* ---- Tensors ---- */

static void *alloc_home(home where, int gpu) {
    char name[16];
    void *p = NULL;
    size_t nbytes = COUNT * sizeof(uint32_t);
    snprintf(name, sizeof name, "cuda:%d", gpu);
    if (gpu < 0) {
        assert_ok(tb_alloc(nbytes, &p));
        return p;
    }
    if (where == LEGACY)
        return (void *)alloc_legacy_on(gpu, nbytes);
    if (where == POOL || where == UNSHARED_POOL) {
        CUmemoryPool pool =
            make_pool_on(gpu, where == POOL && has_shared_pools() ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                                                                  : CU_MEM_HANDLE_TYPE_NONE);
        return (void *)alloc_from_pool_on(gpu, pool, nbytes);
    }
    if (where == VMM || where == UNSHAREABLE)
        return (void *)alloc_vmm_on(gpu, NPIECES,
                                    where == VMM ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE);
    assert_ok(tb_alloc_on(where == OWN ? name : "pinned", nbytes, &p));
    return p;
}

static void free_home(const tensor *t) {
    if (t->gpu < 0)
        tb_free(t->data);
    else if (t->home == LEGACY || t->home == POOL || t->home == UNSHARED_POOL)
        free_legacy((CUdeviceptr)t->data);
    else if (t->home == VMM || t->home == UNSHAREABLE)
        free_vmm((CUdeviceptr)t->data, NPIECES);
    else
        tb_free(t->data);
}

static uint32_t value_of(int version, home which, size_t i) {
    return (uint32_t)i * 2654435761U + (uint32_t)version * 7919 + (uint32_t)which;
}

static void write_tensor(const member *m, const tensor *t) {
    if (t->home == PINNED || t->gpu < 0)
        memcpy(t->data, m->copy, COUNT * sizeof *m->copy);
    else
        write_gpu(t->gpu, (CUdeviceptr)t->data, m->copy, COUNT * sizeof *m->copy);
}

static void fill(const member *m, const tensor *t, int version) {
    for (size_t i = 0; i < COUNT; i++)
        m->copy[i] = value_of(version, t->home, i);
    write_tensor(m, t);
}

static void poison(const member *m, const tensor *t) {
    memset(m->copy, POISON, COUNT * sizeof *m->copy);
    write_tensor(m, t);
}

static void verify(const member *m, const tensor *t, int version) {
    if (t->home == PINNED || t->gpu < 0)
        memcpy(m->copy, t->data, COUNT * sizeof *m->copy);
    else
        read_gpu(t->gpu, (CUdeviceptr)t->data, m->copy, COUNT * sizeof *m->copy);
    for (size_t i = 0; i < COUNT; i++) {
        if (m->copy[i] != value_of(version, t->home, i))
            fail_msg("%s, version %d, element %zu: %" PRIu32, names[t->home], version, i, m->copy[i]);
    }
}

static void add_tensors(member *m, tb_batch *batch, tb_pair *pair, tensor *tensors, int gpu) {
    for (int i = 0; i < NHOMES; i++) {
        tensors[i] = (tensor){.data = alloc_home((home)i, gpu), .home = (home)i, .gpu = gpu};
        tb_tensor t = {
            .size = sizeof t, .data = tensors[i].data, .dtype = TB_I32, .ndim = 2, .shape = {64, COUNT / 64}};
        assert_ok(tb_batch_add(batch, pair, names[i], &t));
    }
    /* One without elements has no memory either: its address is of no one, or of what was freed. */
    CUdeviceptr freed = 64;
    if (gpu >= 0) {
        freed = alloc_legacy_on(gpu, 100);
        free_legacy(freed);
    }
    for (int i = 0; i < 2; i++) {
        tb_tensor t = {.size = sizeof t, .data = i ? (void *)freed : NULL, .dtype = TB_F32, .ndim = 2, .shape = {0, 3}};
        assert_ok(tb_batch_add(batch, pair, i ? "none" : "null", &t));
    }
    (void)m;
}

/* A tensor in pieces of two GPUs at neighbouring addresses is refused: a kernel of the one would have to write what the
 * other one has. */
static void refuse_split(const member *m, tb_pair *pair) {
    tb_batch *batch;
    CUdeviceptr at;
    if (m->is_on_host || tb__gpu_count() < 2)
        return;
    assert_cuda(tb__cuda.cuMemAddressReserve(&at, 2 * PIECE, 0, 0, 0));
    for (int i = 0; i < 2; i++)
        map_vmm_on(i, at + i * PIECE, 1, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    tb_tensor t = {.size = sizeof t, .data = (void *)at, .dtype = TB_I32, .ndim = 1, .shape = {PIECE / 4 + 1}};
    assert_ok(tb_batch_create(m->world, "split", NULL, &batch));
    assert_fails(tb_batch_add(batch, pair, "split", &t), TB_INVALID,
                 "it begins on cuda:0, and is on cuda:1 from byte 2097152 on: a tensor is on one of them");
    tb_batch_destroy(batch);
    free_vmm(at, 2);
}

/* ---- The dump ---- */

static void check_line(const char *dump, const char *name, const char *words) {
    char begin[32];
    snprintf(begin, sizeof begin, "  %s [", name);
    const char *line = strstr(dump, begin), *end = line ? strchr(line, '\n') : NULL, *at = line;
    while (at && (at = strstr(at, words)) && at < end)
        return;
    fail_msg("'%s' is not said of '%s':\n%s", words, name, dump);
}

/* Each GPU reads what the other one has, but not of its pools. What can't be shared is staged in any case, unless both
 * ends are one process. */
static void check_dump(const member *m, tb_batch *batch, bool is_send) {
    char *dump;
    if (m->is_on_host) { /* it has not used a GPU, nor even made a context */
        assert_null(tb__gpu_if_used(0));
        return;
    }
    assert_ok(tb_batch_dump(batch, is_send, &dump));
    for (int i = OWN; i < NHOMES && getenv("TB_ON_HOST"); i++) {
        if (i < PINNED)
            check_line(dump, names[i], " on cuda:0 ");
        check_line(dump, names[i],
                   !is_send     ? ", direct, mapped, "
                   : i < PINNED ? ", staged (rank "
                                : ", read in place, ");
    }
    if (getenv("TB_ON_HOST")) {
        free(dump);
        return;
    }
    for (int i = OWN; i < PINNED; i++) {
        bool is_pools = i == POOL || i == UNSHARED_POOL;
        bool is_refused =
            (i == UNSHAREABLE || i == UNSHARED_POOL || (i == POOL && !has_shared_pools())) && !m->is_alone;
        bool is_hidden = tb__gpu_count() == 1 && !m->is_one_gpu;
        bool has_access = m->is_one_gpu || (has_peers() && !is_pools);
        if (is_refused)
            check_line(dump, names[i], " can't share it: ");
        else if (is_hidden)
            check_line(dump, names[i], ", which this process does not see");
        else if (has_access)
            check_line(dump, names[i], is_send ? ", read in place, " : ", direct, mapped, ");
        else if (is_pools)
            check_line(dump, names[i], "can't access memory of a pool (cudaMallocAsync) on cuda:");
        else if (fake_cuda())
            check_line(dump, names[i], i == LEGACY ? "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)" : "can't access memory of ");
        if (is_refused || !has_access)
            check_line(dump, names[i], is_send ? ", staged (rank " : ", copy, staged (rank ");
    }
    free(dump);
}

/* ---- Transfers ---- */

static void send_versions(member *m, tb_batch *batch, bool sends, bool receives) {
    for (int version = 1; version <= NVERSIONS; version++) {
        tb_transfer *out = NULL, *in = NULL;
        for (int i = 0; i < NHOMES; i++) {
            if (sends)
                fill(m, &m->from[i], version);
            if (receives)
                poison(m, &m->to[i]);
        }
        meet(m);
        if (sends)
            assert_ok(tb_send(batch, NULL, &out));
        if (receives)
            assert_ok(tb_recv(batch, NULL, &in));
        if (sends)
            assert_ok(tb_wait(out, TB_COMMITTED, -1));
        if (receives)
            assert_ok(tb_wait(in, TB_COMMITTED, -1));
        for (int i = 0; i < NHOMES && receives; i++)
            verify(m, &m->to[i], version);
        tb_transfer_destroy(out);
        tb_transfer_destroy(in);
        meet(m);
    }
}

/* What the tool says of the batch of this member's agent, or of a tensor in it; `command` ends where its socket is. */
static void check_tool(const member *m, const char *command, const char *name) {
    char line[1024], call[400];
    bool has_no_gpu = getenv("TB_NO_GPU") || getenv("TB_SEEN_BY_0"), is_said = false; /* of the agent */
    snprintf(line, sizeof line, "cuda:%d%s", gpu_of(m, m->position == 0), has_no_gpu ? " (copied by the client)" : "");
    char *wanted = strdup(line);
    snprintf(call, sizeof call, "%s %s%s/%s", getenv("TENSORBUS"), command, getenv("TB_AGENTS"),
             m->position == 0 ? "a" : "b");
    FILE *said = popen(call, "r");
    assert_non_null(said);
    while (fgets(line, sizeof line, said))
        is_said |= strstr(line, name) && strstr(line, wanted);
    assert_int_equal(pclose(said), 0);
    if (!is_said)
        fail_msg("%s does not say %s", call, wanted);
    free(wanted);
}

static void play_pair(member *m, bool has_agent) {
    tb_batch *batch;
    bool sends = m->position == 0;
    tb_batch_opts opts = {.size = sizeof opts, .staging_bytes = 8 << 20};
    assert_ok(tb_pair_create(m->world, "p", sends ? "b" : "a", "mesh=1 place=R", NULL, &m->pairs[0]));
    assert_ok(tb_batch_create(m->world, "step", &opts, &batch));
    refuse_split(m, m->pairs[0]);
    add_tensors(m, batch, m->pairs[0], sends ? m->from : m->to, gpu_of(m, sends));
    send_versions(m, batch, sends, !sends);
    if (!has_agent) {
        check_dump(m, batch, sends);
    } else {
        check_tool(m, "status --socket ", "step");
        check_tool(m, "top --once --socket ", "step");
        check_tool(m, "inspect agent:", "legacy");
    }
    meet(m);
    tb_batch_destroy(batch);
    tb_pair_destroy(m->pairs[0]);
    for (int i = 0; i < NHOMES; i++)
        free_home(sends ? &m->from[i] : &m->to[i]);
}

/* One process is both groups; tensors go there and back. */
static void play_alone(member *m) {
    tb_batch *batch;
    tb_pair_opts a = {.size = sizeof a, .group = "a", .no_wait = true}, b = {.size = sizeof b, .group = "b"};
    assert_ok(tb_world_enter(m->world, "b", 0, 1));
    assert_ok(tb_pair_create(m->world, "p", "b", "mesh=1 place=R", &a, &m->pairs[0]));
    assert_ok(tb_pair_create(m->world, "p", "a", "mesh=1 place=R", &b, &m->pairs[1]));
    assert_ok(tb_batch_create(m->world, "step", NULL, &batch));
    add_tensors(m, batch, m->pairs[0], m->from, gpu_of(m, true));
    add_tensors(m, batch, m->pairs[1], m->to, gpu_of(m, false));
    for (int version = 1; version <= NVERSIONS; version++) {
        for (int i = 0; i < NHOMES; i++) {
            fill(m, &m->from[i], version);
            poison(m, &m->to[i]);
        }
        assert_ok(tb_reshard_execute(batch, "a", NULL, NULL, NULL));
        for (int i = 0; i < NHOMES; i++) {
            verify(m, &m->to[i], version);
            poison(m, &m->from[i]);
        }
        assert_ok(tb_reshard_execute(batch, "b", NULL, NULL, NULL));
        for (int i = 0; i < NHOMES; i++)
            verify(m, &m->from[i], version);
    }
    check_dump(m, batch, true);
    check_dump(m, batch, false);
    tb_batch_destroy(batch);
    for (int i = 0; i < 2; i++)
        tb_pair_destroy(m->pairs[i]);
    for (int i = 0; i < NHOMES; i++) {
        free_home(&m->from[i]);
        free_home(&m->to[i]);
    }
}

static int play(const char *url, const char *arg) {
    const char *agents = getenv("TB_AGENTS");
    const char *run = strchr(arg, ' ');
    member m = {.url = url,
                .position = atoi(arg),
                .nbarriers = run ? 100 * atoi(run) : 0,
                .is_alone = getenv("TB_ALONE") != NULL,
                .is_one_gpu = getenv("TB_ONE_GPU") != NULL};
    const char *seen = getenv(m.position == 0 ? "TB_SEEN_BY_0" : "TB_SEEN_BY_1");
    if (seen)
        setenv("CUDA_VISIBLE_DEVICES", seen, 1);
    const char *on_host = getenv("TB_ON_HOST");
    m.is_on_host = on_host && m.position == atoi(on_host);
    if (!m.is_on_host)
        assert_ok(tb__cuda_load());
    m.store = open_store(url);
    m.copy = malloc(COUNT * sizeof *m.copy);
    assert_non_null(m.copy);
    const char *group = m.position == 0 ? "a" : "b";
    assert_ok(agents ? join_agent(group, &m.world) : join_bus(url, group, 0, 1, &m.world));
    if (m.is_alone)
        play_alone(&m);
    else
        play_pair(&m, agents != NULL);
    tb_world_destroy(m.world);
    tb__store_close(m.store);
    free(m.copy);
    return 0;
}

/* ---- The first process ---- */

static void set_peers(bool has) {
    if (has)
        unsetenv("FAKE_CUDA_NO_PEERS");
    else
        setenv("FAKE_CUDA_NO_PEERS", "1", 1);
}

/* Each run has barriers of its own. */
static void run_members(scene *s, int count, bool peers) {
    static int nruns;
    set_peers(peers);
    if (count == 1)
        setenv("TB_ALONE", "1", 1);
    else
        unsetenv("TB_ALONE");
    for (int i = 0; i < count; i++)
        start_member(s, i, nruns);
    end_members(s);
    nruns++;
}

static void test_two_processes(void **state) {
    run_members(*state, 2, true);
}

static void test_two_processes_without_access(void **state) {
    run_members(*state, 2, false);
}

static void test_one_process(void **state) {
    run_members(*state, 1, true);
}

static void test_one_process_without_access(void **state) {
    run_members(*state, 1, false);
}

/* The target is on the GPU that is its process's first, and not the sender's. */
static void test_two_processes_that_count_differently(void **state) {
    setenv("TB_SEEN_BY_1", "1,0", 1);
    run_members(*state, 2, true);
    run_members(*state, 2, false);
    unsetenv("TB_SEEN_BY_1");
}

/* As in containers with a GPU each. */
static void test_two_processes_that_see_one_each(void **state) {
    setenv("TB_SEEN_BY_0", "0", 1);
    setenv("TB_SEEN_BY_1", "1", 1);
    run_members(*state, 2, true);
    unsetenv("TB_SEEN_BY_0");
    unsetenv("TB_SEEN_BY_1");
}

static void test_two_processes_on_one(void **state) {
    run_members(*state, 2, true);
}

static void test_one_process_on_one(void **state) {
    run_members(*state, 1, true);
}

static void start_two(scene *s) {
    for (int i = 0; i < 2; i++)
        start_member(s, i, 0);
}

static void run_between_agents(scene *s, bool peers) {
    set_peers(peers);
    unsetenv("TB_ALONE");
    run_with_agents(s, start_two);
}

static void test_agents(void **state) {
    run_between_agents(*state, true);
}

static void test_agents_without_access(void **state) {
    run_between_agents(*state, false);
}

static void test_agents_without_gpu(void **state) {
    setenv("TB_NO_GPU", "1", 1);
    run_between_agents(*state, true);
    unsetenv("TB_NO_GPU");
}

/* What the agents don't see is copied by the clients. */
static void test_agents_that_see_another(void **state) {
    setenv("CUDA_VISIBLE_DEVICES", "1", 1);
    setenv("TB_SEEN_BY_0", "0", 1);
    setenv("TB_SEEN_BY_1", "0", 1);
    run_between_agents(*state, true);
    unsetenv("CUDA_VISIBLE_DEVICES");
    unsetenv("TB_SEEN_BY_0");
    unsetenv("TB_SEEN_BY_1");
}

static void test_agents_on_one(void **state) {
    run_between_agents(*state, true);
}

/* One end has its tensors in host memory, and sees GPUs, or none; the other end's are on one. */
static void test_host_and_gpu(void **state) {
    for (int i = 0; i < 4; i++) {
        setenv("TB_ON_HOST", i % 2 ? "1" : "0", 1);
        if (i >= 2)
            setenv(i % 2 ? "TB_SEEN_BY_1" : "TB_SEEN_BY_0", "", 1);
        run_members(*state, 2, true);
        unsetenv("TB_SEEN_BY_0");
        unsetenv("TB_SEEN_BY_1");
    }
    unsetenv("TB_ON_HOST");
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "member") == 0)
        return play(argv[2], argv[3]);
    if (argc == 4 && strcmp(argv[1], "count") == 0)
        return tb__gpu_count();
    /* A process that has used the driver can't fork others that use it: so another one counts. */
    int count = end_of(start_role("count", "", ""));
    int wanted = getenv("TB_ONE_GPU") ? 1 : 2;
    if (count < wanted) {
        printf("skipped: it takes %d GPUs, and there are %d\n", wanted, count);
        return 77;
    }
#define SCENE(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)
    const struct CMUnitTest one[] = {
        SCENE(test_two_processes_on_one),
        SCENE(test_one_process_on_one),
        SCENE(test_agents_on_one),
        SCENE(test_host_and_gpu),
    };
    const struct CMUnitTest two[] = {
        SCENE(test_two_processes),
        SCENE(test_two_processes_without_access),
        SCENE(test_two_processes_that_count_differently),
        SCENE(test_two_processes_that_see_one_each),
        SCENE(test_one_process),
        SCENE(test_one_process_without_access),
        SCENE(test_agents),
        SCENE(test_agents_without_access),
        SCENE(test_agents_without_gpu),
        SCENE(test_agents_that_see_another),
    };
    return wanted == 1 ? cmocka_run_group_tests_name("one GPU", one, NULL, NULL)
                       : cmocka_run_group_tests_name("two GPUs", two, NULL, NULL);
}
