/* Ranks that have no tensor of a pair take part in its transfers through their agents. */
#include "bus/agent/agent_test.h"
#include "bus/protocol/payload.h"

enum { COUNT = 1000, VERSIONS = 3 };

/* Group a and b have two ranks each. Tensor w is on rank 0 of both sides and goes through pair p, v on rank 1 and
 * through q; with `has_none`, there is no pair q. */
typedef struct stages {
    agent_scene agents; /* first */
    tb_commit commit;
    bool has_none;
    bool is_raw; /* b 1 speaks the protocol itself */
} stages;

static const char *const layouts[] = {"mesh=1 place=R ranks=0", "mesh=1 place=R ranks=1"};

static void fill(uint32_t *data, uint32_t version) {
    for (uint32_t i = 0; i < COUNT; i++)
        data[i] = version << 16 | i;
}

static bool holds(const uint32_t *data, uint32_t version) {
    for (uint32_t i = 0; i < COUNT; i++) {
        if (data[i] != (version << 16 | i))
            return false;
    }
    return true;
}

static void by_client(rank *r) {
    const stages *o = (const stages *)r->scene;
    tb_batch_opts opts = {.size = sizeof opts, .commit = o->commit};
    program *client = open_client(r);
    program_batch *batch = NULL;
    program_status status = {0};
    program_pair_state pair = {0};
    uint32_t *data = calloc(COUNT, sizeof *data);
    tb_tensor t = {.size = sizeof t, .data = data, .dtype = TB_U32, .ndim = 1, .shape = {COUNT}};
    bool is_idle = o->has_none && r->index == 1;
    check(data);
    check_ok(program_pair(client, "p", other_group(r), layouts[0], 0));
    if (!o->has_none)
        check_ok(program_pair(client, "q", other_group(r), layouts[1], 0));
    check_ok(program_batch_create(client, "step", &opts, &batch));
    check_fails(program_add_pair(batch, "z"), TB_INVALID, "there is no pair 'z'");
    if (!is_idle)
        check_ok(program_add(batch, r->index == 0 ? "p" : "q", r->index == 0 ? "w" : "v", &t));
    if (!o->has_none)
        check_ok(program_add_pair(batch, r->index == 0 ? "q" : "p"));
    else if (is_idle)
        check_ok(program_add_pair(batch, "p"));
    check_ok(program_register(batch, 0));
    check_fails(program_add_pair(batch, "p"), TB_REFUSED, "has been registered");
    for (uint32_t version = 1; version <= VERSIONS; version++) {
        fill(data, is_a(r) ? version : 99);
        check_ok(program_transfer(batch, is_a(r), NULL));
        check(holds(data, is_idle && !is_a(r) ? 99 : version));
        check_ok(program_query(batch, &status));
        check(status.version == version && !status.is_mixed && !status.is_torn && strcmp(status.state, "idle") == 0);
        check_ok(program_query_pair(batch, "p", &pair));
        check(pair.status == TB_OK && pair.version == version);
        meet(r);
    }
    if (!o->has_none) {
        meet(r);
        check_ok(program_remove_pair(batch, "q"));
        meet(r);
        fill(data, is_a(r) ? 7 : 99);
        check_ok(program_transfer(batch, is_a(r), NULL));
        check(holds(data, is_a(r) || r->index == 0 ? 7 : 99));
        meet(r);
    }
    program_batch_destroy(batch);
    program_close(client);
    free(data);
}

static void by_hand(rank *r) {
    raw c;
    tb_layout *layout;
    tb__bytes mesh = {0}, placements = {0};
    tb__message registers = {.kind = TB__REGISTER_TENSORS, .batch_id = "step", .bucket_size = tb__some_uint(0)},
                transfer = {.kind = TB__TRANSFER, .batch_id = "step", .direction = TB__RECV};
    raw_greet(&c, seat_of(r)->path);
    tb__message reply = raw_call(&c, &registers);
    check(reply.status == TB_INVALID && strstr(reply.message, "made no pair"));
    check_ok(tb_layout_parse(layouts[0], &layout));
    check_ok(tb__mesh_encode(layout, &mesh));
    check_ok(tb__placements_encode(layout, &placements));
    tb__message pair = {.kind = TB__INIT_PAIR,
                        .pair_name = "p",
                        .local_name = r->group,
                        .expected_world_size = 2,
                        .remote_name = other_group(r),
                        .mesh = {mesh.item, mesh.count},
                        .placements = {placements.item, placements.count}};
    check(raw_call(&c, &pair).status == TB_OK);
    check(raw_call(&c, &registers).status == TB_OK);
    for (uint64_t version = 1; version <= VERSIONS; version++) {
        reply = raw_call(&c, &transfer);
        check(reply.status == TB_OK && reply.version.value == version && reply.bytes.value == 0);
        meet(r);
    }
    raw_close(&c);
    tb_layout_destroy(layout);
    free(mesh.item);
    free(placements.item);
}

static void body(rank *r) {
    if (((const stages *)r->scene)->is_raw && !is_a(r) && r->index == 1)
        by_hand(r);
    else
        by_client(r);
}

static void test_idle_ranks(void **state) {
    (void)state;
    for (int i = 0; i < 6; i++) {
        stages s = {.commit = i % 2 ? TB_SHADOW : TB_IN_PLACE, .has_none = i >= 2, .is_raw = i == 4};
        run_agent_scene(&s.agents, body, 2, 2);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_idle_ranks)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
