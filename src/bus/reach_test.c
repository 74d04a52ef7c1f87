/* How a tensor is reached is decided per tensor: one rank has a tensor that others can map, one that they can only read
 * by calls, and one that has to be staged. The dump says which, and why. */
#define TB_SLOW_DEVICE
#include "bus/bus_test.h"

enum { SIDE = 64, NTENSORS = 3 };

/* All go from one rank to the same two ranks, each in a bucket of its own. */
static const char from[] = "mesh=1 place=Replicate", to[] = "mesh=2 place=Shard(0)";
enum { BUCKET = SIDE * SIDE / 2 * sizeof(uint32_t) };

static const struct {
    const char *name, *received, *sent; /* in the dumps */
} kinds[NTENSORS] = {
    {"device", ", copy, staged (other processes can't map the memory of its device), ",
     ", staged (other processes can't map the memory of its device), "},
    {"private", ", direct, not mapped, ", ", read in place, "},
    {"shared", ", direct, mapped, ", ", read in place, "},
};

/* The sender's tensors have the homes that their names say; the receivers' are shared. */
static void init_tensor(const rank *r, int i, part *p) {
    part_init(p, is_a(r) ? from : to, r->index, SIDE, SIDE);
    size_t nbytes = p->count * sizeof *p->data;
    tensor_free(p->data);
    p->data = NULL;
    if (!is_a(r) || i == 2)
        check_ok(tb_alloc(nbytes, (void **)&p->data));
    else
        p->data = i == 0 ? slow_device_alloc(nbytes) : malloc(nbytes);
    check(p->data);
}

static void fini_tensor(const rank *r, int i, part *p) {
    if (!is_a(r) || i != 1) {
        part_fini(p);
        return;
    }
    tb_local_fini(&p->local);
    free(p->data);
}

static void check_dump(const rank *r, tb_batch *batch) {
    char *dump;
    check_ok(tb_batch_dump(batch, is_a(r), &dump));
    for (int i = 0; i < NTENSORS; i++) {
        const char *line = strstr(dump, kinds[i].name), *end = line ? strchr(line, '\n') : NULL;
        const char *how = line ? strstr(line, is_a(r) ? kinds[i].sent : kinds[i].received) : NULL;
        if (!end || !how || how > end)
            fails(__FILE__, __LINE__, kinds[i].name, dump);
    }
    free(dump);
}

static void send_all_kinds(rank *r) {
    part parts[NTENSORS];
    tb_pair *pair;
    tb_batch *batch;
    tb_batch_opts opts = {.size = sizeof opts, .bucket_size = BUCKET};
    check_ok(tb_pair_create(r->world, "p", other_group(r), is_a(r) ? from : to, NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &batch));
    for (int i = 0; i < NTENSORS; i++) {
        init_tensor(r, i, &parts[i]);
        tb_tensor t = part_tensor(&parts[i]);
        check_ok(tb_batch_add(batch, pair, kinds[i].name, &t));
    }
    for (uint32_t version = 1; version <= 3; version++) {
        tb_transfer *t = NULL;
        for (int i = 0; i < NTENSORS; i++) {
            if (is_a(r))
                part_fill(&parts[i], version);
            else
                part_poison(&parts[i]);
        }
        check_ok((is_a(r) ? tb_send : tb_recv)(batch, NULL, &t));
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        for (int i = 0; i < NTENSORS; i++)
            check(part_holds(&parts[i], version));
        tb_transfer_destroy(t);
    }
    check_dump(r, batch);
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    for (int i = 0; i < NTENSORS; i++)
        fini_tensor(r, i, &parts[i]);
}

static void test_each_tensor_for_itself(void **state) {
    (void)state;
    scene s;
    scene_init(&s);
    s.transport = "shm";
    run_ranks_in(&s, send_all_kinds, 1, 2, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_each_tensor_for_itself)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
