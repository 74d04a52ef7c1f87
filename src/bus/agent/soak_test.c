/* Many versions through two agents, with batches and clients that come and go: what the agents have does not grow.
 * TB_CASES is the number of versions. */
#include "bus/agent/process_test.h"

#include "base/error.h"

#include "../tests/support/random_case.h"

#include <inttypes.h>
#include <pthread.h>

/* At first each version has a client of its own, so that all that is ever done has been done before it counts. */
enum { USUAL = 1000, COUNT = 3000, WARM_UP = 30, BATCH_LIFE = 50, CLIENT_LIFE = 500 };

/* How much more the last fifth may have. A short run is over before all that is kept for next time is there. */
static double growth(int64_t versions) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    (void)versions;
    return 1e9; /* what was freed is kept, too */
#else
    return versions >= 5000 ? 0.02 : 0.1;
#endif
}

typedef struct host {
    const agent_process *agent;
    int side; /* 0 sends */
    int64_t versions;
    program *client;
    program_batch *batch;
    uint32_t *shared, *private;
    char failure[600];
    struct use {
        double kib;
        int files;
    } * uses; /* of the agent, by version */
} host;

static tb_status open_batch(host *h) {
    tb_tensor t = {.size = sizeof t, .data = h->shared, .dtype = TB_U32, .ndim = 1, .shape = {COUNT}};
    TB_TRY(program_batch_create(h->client, "step", NULL, &h->batch));
    TB_TRY(program_add(h->batch, "p", "shared", &t));
    t.data = h->private;
    TB_TRY(program_add(h->batch, "p", "private", &t));
    return program_register(h->batch, PATIENCE_MS);
}

static void close_batch(host *h) {
    program_batch_destroy(h->batch);
    h->batch = NULL;
}

static tb_status open_client(host *h) {
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS};
    TB_TRY(program_connect(h->agent->path, &opts, &h->client));
    return program_pair(h->client, "p", h->side ? "a" : "b", "mesh=1 place=R", PATIENCE_MS);
}

static void close_client(host *h) {
    close_batch(h);
    program_close(h->client);
    h->client = NULL;
}

static tb_status move_version(host *h, uint32_t version) {
    program_transfer_opts opts = {.timeout_ms = PATIENCE_MS};
    for (uint32_t i = 0; i < COUNT; i++)
        h->shared[i] = h->private[i] = h->side ? 0 : version + i;
    TB_TRY(program_transfer(h->batch, h->side == 0, &opts));
    for (uint32_t i = 0; i < COUNT; i++) {
        if (h->shared[i] != version + i || h->private[i] != version + i)
            return tb_error_set(TB_INVALID, "what has arrived is not what was sent");
    }
    return TB_OK;
}

static tb_status go_through(host *h, int64_t version) {
    if (version < 0 || version % CLIENT_LIFE == 0)
        close_client(h);
    if (version % BATCH_LIFE == 0)
        close_batch(h);
    if (!h->client)
        TB_TRY(open_client(h));
    if (!h->batch)
        TB_TRY(open_batch(h));
    TB_TRY(move_version(h, (uint32_t)(version + WARM_UP)));
    if (version < 0)
        return TB_OK;
    h->uses[version].kib = (double)read_number(h->agent->pid, "status", "VmRSS:");
    h->uses[version].files = count_files(h->agent->pid);
    return TB_OK;
}

static void *program_main(void *arg) {
    host *h = arg;
    for (int64_t version = -WARM_UP; version < h->versions && !h->failure[0]; version++) {
        if (go_through(h, version) != TB_OK)
            snprintf(h->failure, sizeof h->failure, "version %" PRId64 ": %s", version, tb_error_detail());
    }
    close_client(h);
    return NULL;
}

/* The mean over a part of the versions, and the most files. */
static struct use sum_up(const host *h, int64_t from, int64_t to) {
    struct use all = {0};
    for (int64_t i = from; i < to; i++) {
        all.kib += h->uses[i].kib / (double)(to - from);
        all.files = h->uses[i].files > all.files ? h->uses[i].files : all.files;
    }
    return all;
}

static void test_soak(void **state) {
    (void)state;
    int64_t versions = test_cases(USUAL), part = versions / 5;
    char folder[] = "/tmp/tb-soak-XXXXXX";
    agent_process agents[2];
    host hosts[2];
    pthread_t threads[2];
    assert_non_null(mkdtemp(folder));
    for (int i = 0; i < 2; i++) {
        begin_agent(&agents[i], folder, i ? "b" : "a", 0, 1, "30");
        await_agent(&agents[i]);
        hosts[i] = (host){.agent = &agents[i], .side = i, .versions = versions};
        assert_ok(tb_alloc(COUNT * sizeof(uint32_t), (void **)&hosts[i].shared));
        assert_non_null(hosts[i].private = malloc(COUNT * sizeof(uint32_t)));
        assert_non_null(hosts[i].uses = calloc((size_t)versions, sizeof *hosts[i].uses));
    }
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, program_main, &hosts[i]), 0);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    for (int i = 2; i-- > 0;)
        end_agent(&agents[i], SIGTERM);
    empty_folder(folder);
    for (int i = 0; i < 2; i++) {
        const host *h = &hosts[i];
        if (h->failure[0])
            fail_msg("%s", h->failure);
        struct use first = sum_up(h, 0, part), last = sum_up(h, versions - part, versions);
        print_message("agent %s: %.0f KiB and %d files in the first fifth of %" PRId64 " versions, %.0f and %d in the "
                      "last\n",
                      i ? "b" : "a", first.kib, first.files, versions, last.kib, last.files);
        assert_true(last.files <= first.files);
        assert_true(last.kib < first.kib * (1 + growth(versions)));
        tb_free(h->shared);
        free(h->private);
        free(h->uses);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_soak)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
