/* Messages between ranks: manifests and their answers, BIND and all that a flow says, commits. Two ranks of this
 * process have registered a batch, and the receiver waits for a version. The sender sends the input, a byte that
 * chooses the port and a message, in place of what it would say. Whatever it is, both ranks live on, end their batch in
 * time, and the next batch is as good as the first. */
#include "bus/world.h"
#include "fuzz.h"
#include "loop/loop_inside.h"

#include <pthread.h>
#include <unistd.h>

enum { SENDER, RECEIVER, NRANKS, NVALUES = 64, PATIENCE_MS = 20000, WAIT_MS = 10 };

static const char *const groups[] = {"a", "b"};

typedef struct rank {
    tb_world *world;
    tb_pair *pair;
    tb_batch *batch;
    tb_status status;
    float values[NVALUES];
} rank;

static rank ranks[NRANKS];
static char folder[] = "/tmp/tb-fuzz-XXXXXX";

static void *join_bus(void *arg) {
    rank *r = arg;
    char url[64];
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS, .transport = "shm", .workers = 1};
    snprintf(url, sizeof url, "unix:%s/s", folder);
    r->status = tb_world_join(url, groups[r - ranks], 0, 1, &opts, &r->world);
    tb_pair_opts pair = {.size = sizeof pair, .group = groups[r - ranks]};
    if (r->status == TB_OK)
        r->status = tb_pair_create(r->world, "p", groups[r == ranks], "mesh=1 place=R", &pair, &r->pair);
    return NULL;
}

static void *make_batch(void *arg) {
    rank *r = arg;
    tb_batch_opts opts = {.size = sizeof opts, .commit = TB_SHADOW};
    tb_tensor tensor = {.size = sizeof tensor, .data = r->values, .dtype = TB_F32, .ndim = 1, .shape = {NVALUES}};
    r->status = tb_batch_create(r->world, "batch", &opts, &r->batch);
    if (r->status == TB_OK)
        r->status = tb_batch_add(r->batch, r->pair, "w", &tensor);
    if (r->status == TB_OK)
        r->status = tb_batch_register(r->batch, PATIENCE_MS);
    return NULL;
}

/* Both ranks at once. Whether both have succeeded. */
static bool run_both(void *(*run)(void *)) {
    pthread_t thread;
    expect(pthread_create(&thread, NULL, run, &ranks[SENDER]) == 0);
    run(&ranks[RECEIVER]);
    pthread_join(thread, NULL);
    return ranks[SENDER].status == TB_OK && ranks[RECEIVER].status == TB_OK;
}

static void leave_bus(void) {
    for (int i = NRANKS; i-- > 0;) {
        tb_pair_destroy(ranks[i].pair);
        tb_world_destroy(ranks[i].world);
        ranks[i].pair = NULL;
        ranks[i].world = NULL;
    }
}

static void drop_batches(void) {
    for (int i = 0; i < NRANKS; i++) {
        tb_batch_destroy(ranks[i].batch);
        ranks[i].batch = NULL;
    }
}

/* The n-th port of the receiver. */
static uint32_t choose_port(uint8_t n) {
    tb__loop *loop = ranks[RECEIVER].world->loop;
    uint32_t ids[64];
    size_t count = 0;
    tb__loop_lock(loop);
    for (const tb__port *port = loop->ports; port && count < 64; port = port->next)
        ids[count++] = port->id;
    tb__loop_unlock(loop);
    return count ? ids[n % count] : TB__PORT_WORLD;
}

static void send_message(const uint8_t *data, size_t size) {
    tb__loop *loop = ranks[SENDER].world->loop;
    uint32_t port = choose_port(data[0]);
    tb__pack pack = {0};
    if (size > 1)
        tb__pack_raw(&pack, data + 1, size - 1);
    tb__loop_lock(loop);
    tb__peer *peer =
        tb__loop_find_peer(loop, tb_world_rank(ranks[RECEIVER].world), tb_world_incarnation(ranks[RECEIVER].world));
    if (peer)
        (void)tb__loop_send(peer, port, &pack);
    else
        tb__pack_fini(&pack);
    tb__loop_unlock(loop);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static bool is_made;
    if (size == 0 || size > 4096)
        return 0;
    if (!is_made)
        expect(mkdtemp(folder));
    is_made = true;
    bool is_new = !ranks[SENDER].world;
    if (is_new)
        expect(run_both(join_bus));
    if (!run_both(make_batch)) { /* what the last message has done may show only now; a new bus is good */
        expect(!is_new);
        drop_batches();
        leave_bus();
        expect(run_both(join_bus) && run_both(make_batch));
    }
    tb_transfer *transfer = NULL;
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = WAIT_MS};
    if (tb_recv(ranks[RECEIVER].batch, &opts, &transfer) == TB_OK) {
        send_message(data, size);
        (void)tb_wait(transfer, TB_COMMITTED, -1);
        tb_transfer_destroy(transfer);
    }
    drop_batches();
    return 0;
}
