/* What a client hears of a transfer that it does not wait for: events, one after the other; and a receive that is held
 * back until the client lets it go on. */
#include "bus/agent/agent_test.h"
#include "bus/protocol/payload.h"

enum { COUNT = 3000 };

typedef struct hall {
    agent_scene agents; /* first */
    bool is_private;
    tb_commit commit;
} hall;

/* A vector that a sends to b. */
typedef struct line {
    program *client;
    program_batch *batch;
    uint32_t *data;
    bool is_private;
} line;

static void fill(const line *l, uint32_t version) {
    for (uint32_t i = 0; i < COUNT; i++)
        l->data[i] = version << 16 | i;
}

static bool holds(const line *l, uint32_t version) {
    for (uint32_t i = 0; i < COUNT; i++) {
        if (l->data[i] != (version << 16 | i))
            return false;
    }
    return true;
}

static void open_line(rank *r, line *l) {
    const hall *h = (const hall *)r->scene;
    tb_batch_opts opts = {.size = sizeof opts, .commit = h->commit};
    *l = (line){.client = open_client(r), .is_private = h->is_private};
    if (l->is_private)
        check((l->data = calloc(COUNT, sizeof *l->data)));
    else
        check_ok(tb_alloc(COUNT * sizeof *l->data, (void **)&l->data));
    fill(l, 0);
    tb_tensor t = {.size = sizeof t, .data = l->data, .dtype = TB_U32, .ndim = 1, .shape = {COUNT}};
    check_ok(program_pair(l->client, "p", other_group(r), "mesh=1 place=R", 0));
    check_ok(program_batch_create(l->client, "step", &opts, &l->batch));
    check_ok(program_add(l->batch, "p", "w", &t));
    check_ok(program_register(l->batch, 0));
}

static void close_line(line *l) {
    program_batch_destroy(l->batch);
    program_close(l->client);
    if (l->is_private)
        free(l->data);
    else
        tb_free(l->data);
}

static void begin(const rank *r, const line *l, int timeout_ms, bool hold) {
    int handle = 0; /* a stream orders nothing in host memory */
    program_transfer_opts opts = {.timeout_ms = timeout_ms, .no_wait = true, .hold = hold, .stream = &handle};
    check_ok(program_transfer(l->batch, is_a(r), &opts));
}

static unsigned events_of(const line *l) {
    program_status status = {0};
    check_ok(program_query(l->batch, &status));
    return status.events;
}

/* ---- One after the other --------------------------------------------------------------------------------------- */

/* Sleeps on the descriptor, and does not miss what another call has read. */
static void sleep_for(const line *l, bool is_send, tb_event event) {
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    tb_status status;
    while ((status = program_wait(l->batch, is_send, event, 0)) == TB_TIMEOUT) {
        struct pollfd fd = {.fd = program_fd(l->batch, is_send), .events = POLLIN};
        check(poll(&fd, 1, tb__ms_until(deadline_ms)) == 1);
    }
    check_ok(status);
}

/* Its own memory is released, but the agent has not been read. */
static void await_signal(const line *l) {
    program_status status = {0};
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    do {
        check_ok(program_query(l->batch, &status));
        check(tb__now_ms() < deadline_ms);
    } while (!status.transfer_signal);
}

static void one_by_one(rank *r) {
    line l;
    open_line(r, &l);
    for (uint32_t version = 1; version <= 4; version++) {
        meet(r);
        if (is_a(r)) {
            fill(&l, version);
            begin(r, &l, 0, false);
            check_fails(program_wait(l.batch, true, TB_ARRIVED, 0), TB_INVALID, "does not arrive");
            check_fails(program_wait(l.batch, true, TB_COMMITTED, 0), TB_TIMEOUT, "has not been committed after 0 ms");
            if (l.is_private) { /* it was read, and nobody has to receive it for that */
                check_ok(program_wait(l.batch, true, TB_RELEASED, -1));
                check(events_of(&l) == TB_RELEASED);
                await_signal(&l);
                fill(&l, 0);
            } else {
                check_fails(program_wait(l.batch, true, TB_RELEASED, 1), TB_TIMEOUT, "has not been released");
                check(events_of(&l) == 0);
            }
        }
        meet(r);
        if (!is_a(r)) {
            begin(r, &l, 0, false);
            check_fails(program_wait(l.batch, false, TB_RELEASED, 0), TB_INVALID, "is not released");
        }
        if (version % 2)
            sleep_for(&l, is_a(r), is_a(r) ? TB_RELEASED : TB_ARRIVED);
        int handle = 0;
        check_fails(program_stream_wait(l.batch, is_a(r), TB_COMMITTED, NULL), TB_INVALID, "stream is NULL");
        check_ok(program_stream_wait(l.batch, is_a(r), TB_COMMITTED, &handle));
        check_ok(program_wait(l.batch, is_a(r), is_a(r) ? TB_RELEASED : TB_ARRIVED, 0));
        check(is_a(r) || holds(&l, version));
        check(events_of(&l) == (unsigned)((is_a(r) ? TB_RELEASED : TB_ARRIVED) | TB_COMMITTED));
    }
    meet(r);
    close_line(&l);
}

static void test_one_by_one(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        hall h = {.is_private = i & 1, .commit = i & 2 ? TB_SHADOW : TB_IN_PLACE};
        run_agent_scene(&h.agents, one_by_one, 1, 1);
    }
}

/* The transfer's own failure comes through; what others time out of goes on. */
static void failures(rank *r) {
    line l;
    open_line(r, &l);
    if (is_a(r)) {
        begin(r, &l, SOON_MS, false);
        check_fails(program_wait(l.batch, true, TB_COMMITTED, -1), TB_TIMEOUT, "the sending of batch 'step' has not");
        check_fails(program_wait(l.batch, true, TB_COMMITTED, 0), TB_TIMEOUT, "the sending of batch 'step' has not");
    }
    meet(r);
    if (is_a(r)) { /* one that is refused does not make the client forget the one that goes on */
        program_transfer_opts again = {.no_wait = true};
        fill(&l, 2);
        begin(r, &l, 0, false);
        check_fails(program_transfer(l.batch, true, &again), TB_REFUSED, "already being sent");
    }
    meet(r);
    if (!is_a(r))
        begin(r, &l, 0, false);
    check_ok(program_wait(l.batch, is_a(r), TB_COMMITTED, -1));
    check(holds(&l, 2));
    meet(r);
    if (!is_a(r)) { /* what was told before the end is heard */
        begin(r, &l, SOON_MS, false);
        seat_close((agent_scene *)r->scene, 1);
        check_fails(program_wait(l.batch, false, TB_ARRIVED, -1), TB_TIMEOUT, "the receiving of batch 'step' has not");
    }
    meet(r);
    close_line(&l);
}

static void test_failures(void **state) {
    (void)state;
    hall h = {0};
    run_agent_scene(&h.agents, failures, 1, 1);
}

/* ---- On the wire ----------------------------------------------------------------------------------------------- */

static void raw_move_in(rank *r, raw *c, const void *at) {
    tb__bytes mesh = {0}, placements = {0}, payload = {0};
    tb_layout *layout;
    check_ok(tb_layout_parse("mesh=1 place=R", &layout));
    check_ok(tb__mesh_encode(layout, &mesh));
    check_ok(tb__placements_encode(layout, &placements));
    tb_layout_destroy(layout);
    tb__message pair = {.kind = TB__INIT_PAIR,
                        .pair_name = "p",
                        .local_name = r->group,
                        .expected_world_size = 1,
                        .remote_name = other_group(r),
                        .mesh = {mesh.item, mesh.count},
                        .placements = {placements.item, placements.count}};
    tb__tensor_payload p = {.name = "w",
                            .dtype = TB_U32,
                            .data = {.kind = TB__MEMORY_ADDRESS, .address = (uintptr_t)at, .nbytes = sizeof(uint32_t)}};
    raw_greet(c, seat_of(r)->path);
    check(raw_call(c, &pair).status == TB_OK);
    check_ok(tb__tensor_encode(&p, NULL, &payload));
    tb__entry entry = {.pair_name = "p", .payload = {payload.item, payload.count}};
    tb__message batch = {
        .kind = TB__REGISTER_TENSORS, .batch_id = "step", .tensors = {1, &entry}, .commit = TB__SHADOW};
    check(raw_call(c, &batch).status == TB_OK);
    free(mesh.item);
    free(placements.item);
    free(payload.item);
}

static void check_event(raw *c, uint64_t seq, tb__event_name name, uint64_t version) {
    tb__message m;
    check(raw_next(c, &m) && m.kind == TB__EVENT && m.seq == seq && m.event == name);
    check(m.status == TB_OK && !*m.message && (!m.version.is_set || m.version.value == version));
    check(m.version.is_set || name == TB__EVENT_RELEASED);
}

static void on_the_wire(rank *r) {
    uint32_t number = is_a(r) ? 5 : 0;
    raw c;
    raw_move_in(r, &c, &number);
    for (uint64_t version = 1; version <= 2; version++) {
        bool no_wait = version == 2;
        tb__message reply,
            transfer = {.kind = TB__TRANSFER,
                        .batch_id = "step",
                        .direction = is_a(r) ? TB__SEND : TB__RECV,
                        .no_wait = no_wait,
                        .events = true,
                        .hold = !is_a(r)},
            proceed = {.kind = TB__PROCEED, .batch_id = "step"};
        if (!is_a(r)) {
            reply = raw_call(&c, &proceed);
            check(reply.status == TB_REFUSED && strstr(reply.message, "is not being received"));
        }
        uint64_t seq = raw_post(&c, &transfer), allowed = 0;
        if (no_wait)
            check(raw_reply(&c, &reply) && reply.seq == seq && reply.status == TB_OK);
        check_event(&c, seq, is_a(r) ? TB__EVENT_RELEASED : TB__EVENT_ARRIVED, version);
        if (!is_a(r)) {
            check_event(&c, seq, TB__EVENT_COMMITTING, version);
            check(number == (version == 1 ? 0 : 5));
            allowed = raw_post(&c, &proceed);
            check(raw_reply(&c, &reply) && reply.seq == allowed && reply.status == TB_OK);
        }
        check_event(&c, seq, TB__EVENT_COMMITTED, version);
        if (!no_wait)
            check(raw_reply(&c, &reply) && reply.seq == seq && reply.status == TB_OK && reply.version.value == version);
        check(number == 5);
        meet(r);
    }
    tb__message late = {
        .kind = TB__TRANSFER, .batch_id = "step", .direction = TB__SEND, .timeout_ms = SOON_MS, .events = true};
    if (is_a(r)) {
        tb__message m;
        uint64_t seq = raw_post(&c, &late);
        check_event(&c, seq, TB__EVENT_RELEASED, 3);
        check(raw_next(&c, &m) && m.kind == TB__EVENT && m.event == TB__EVENT_FAILED && m.status == TB_TIMEOUT);
        check(strstr(m.message, "has not ended"));
        check(raw_reply(&c, &m) && m.seq == seq && m.status == TB_TIMEOUT);
    }
    tb__message bad = {.kind = TB__EVENT, .message = ""};
    check(raw_call(&c, &bad).status == TB_INVALID);
    meet(r);
    raw_close(&c);
}

static void test_on_the_wire(void **state) {
    (void)state;
    run_agents(on_the_wire, 1, 1);
}

/* ---- Held back ------------------------------------------------------------------------------------------------- */

static void held(rank *r) {
    line l;
    open_line(r, &l);
    for (uint32_t version = 1; version <= 3; version++) {
        if (is_a(r))
            fill(&l, version);
        meet(r);
        begin(r, &l, 0, !is_a(r));
        if (!is_a(r)) {
            check_ok(program_wait(l.batch, false, TB_DECIDED, -1));
            check_fails(program_wait(l.batch, false, TB_COMMITTED, 5), TB_TIMEOUT, "has not been committed");
            check(holds(&l, version - 1));
            check(events_of(&l) == (TB_ARRIVED | TB_DECIDED));
        }
        meet(r);
        if (is_a(r))
            check_fails(program_wait(l.batch, true, TB_COMMITTED, 5), TB_TIMEOUT, "has not been committed");
        meet(r);
        if (!is_a(r))
            check_ok(program_proceed(l.batch));
        check_ok(program_wait(l.batch, is_a(r), TB_COMMITTED, -1));
        check(holds(&l, version));
        meet(r);
    }
    meet(r);
    close_line(&l);
}

static void test_held(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        hall h = {.is_private = i, .commit = TB_SHADOW};
        run_agent_scene(&h.agents, held, 1, 1);
    }
}

/* The deadline ends it, and so does the client that goes: the sender's version is committed. */
static void let_go(rank *r) {
    enum { ENOUGH_MS = 1500 }; /* to get there */
    line l;
    open_line(r, &l);
    for (uint32_t version = 0; version <= 1; version++) {
        if (is_a(r))
            fill(&l, version);
        begin(r, &l, is_a(r) || version == 0 ? 0 : ENOUGH_MS, !is_a(r) && version == 1);
        check_ok(program_wait(l.batch, is_a(r), TB_COMMITTED, is_a(r) ? -1 : PATIENCE_MS));
        check(holds(&l, version));
        meet(r);
    }
    if (is_a(r))
        fill(&l, 2);
    begin(r, &l, 0, !is_a(r));
    if (!is_a(r)) {
        check_ok(program_wait(l.batch, false, TB_DECIDED, -1));
        program_close(l.client);
    } else {
        check_ok(program_wait(l.batch, true, TB_COMMITTED, -1));
    }
    meet(r);
    if (!is_a(r)) {
        check(holds(&l, 2)); /* the agent has it mapped */
        program_batch_destroy(l.batch);
        tb_free(l.data);
    } else {
        close_line(&l);
    }
}

static void test_let_go(void **state) {
    (void)state;
    hall h = {.commit = TB_SHADOW};
    run_agent_scene(&h.agents, let_go, 1, 1);
}

/* A batch that is sent and received at once tells of the send, too. */
static void both_ways(rank *r) {
    line l;
    open_line(r, &l);
    meet(r);
    if (is_a(r)) {
        program_transfer_opts opts = {.no_wait = true};
        fill(&l, 1);
        check_ok(program_transfer(l.batch, false, &opts));
        check_ok(program_transfer(l.batch, true, &opts));
        await_signal(&l);
        meet(r);
        check_ok(program_wait(l.batch, true, TB_COMMITTED, -1));
        program_status status = {0};
        check_ok(program_query(l.batch, &status));
        check(!status.transfer_signal);
        meet(r);
        check_ok(program_wait(l.batch, false, TB_COMMITTED, -1));
        check(holds(&l, 2));
    } else {
        meet(r);
        await_signal(&l); /* there is something to receive */
        check_ok(program_transfer(l.batch, false, NULL));
        program_status status = {0};
        check_ok(program_query(l.batch, &status));
        check(!status.transfer_signal);
        check(holds(&l, 1));
        meet(r);
        fill(&l, 2);
        check_ok(program_transfer(l.batch, true, NULL));
    }
    meet(r);
    close_line(&l);
}

static void test_both_ways(void **state) {
    (void)state;
    hall h = {.commit = TB_IN_PLACE};
    run_agent_scene(&h.agents, both_ways, 1, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_by_one), cmocka_unit_test(test_failures), cmocka_unit_test(test_on_the_wire),
        cmocka_unit_test(test_held),       cmocka_unit_test(test_let_go),   cmocka_unit_test(test_both_ways),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
