/* What goes wrong between agents and their clients: who is not there, not in time, not allowed, or gone. */
#include "bus/agent/agent_test.h"
#include "bus/client/link.h"
#include "bus/protocol/payload.h"

#include <sys/mman.h>

/* Commands, for raw connections. */
static tb__bytes mesh, replicated, sharded;

static int make_payloads(void **state) {
    (void)state;
    static const char *const texts[2] = {"mesh=1 place=R", "mesh=1 place=S0"};
    for (int i = 0; i < 2; i++) {
        tb_layout *layout;
        check_ok(tb_layout_parse(texts[i], &layout));
        if (i == 0)
            check_ok(tb__mesh_encode(layout, &mesh));
        check_ok(tb__placements_encode(layout, i ? &sharded : &replicated));
        tb_layout_destroy(layout);
    }
    return 0;
}

static int free_payloads(void **state) {
    (void)state;
    free(mesh.item);
    free(replicated.item);
    free(sharded.item);
    return 0;
}

static tb__message pair_command(const rank *r, const tb__bytes *placements, int timeout_ms) {
    return (tb__message){.kind = TB__INIT_PAIR,
                         .pair_name = "p",
                         .local_name = r->group,
                         .expected_world_size = (uint64_t)r->size,
                         .remote_name = other_group(r),
                         .mesh = {mesh.item, mesh.count},
                         .placements = {placements->item, placements->count},
                         .timeout_ms = (uint64_t)timeout_ms};
}

/* Registers one number at that address as "w" of the batch "step". */
static uint64_t post_register(raw *c, const void *at) {
    tb__tensor_payload p = {.name = "w",
                            .dtype = TB_U32,
                            .data = {.kind = TB__MEMORY_ADDRESS, .address = (uintptr_t)at, .nbytes = sizeof(uint32_t)}};
    tb__bytes payload = {0};
    check_ok(tb__tensor_encode(&p, NULL, &payload));
    tb__entry entry = {.pair_name = "p", .payload = {payload.item, payload.count}};
    tb__message m = {.kind = TB__REGISTER_TENSORS, .batch_id = "step", .tensors = {1, &entry}};
    uint64_t seq = raw_post(c, &m);
    free(payload.item);
    return seq;
}

static program_batch *new_batch(program *c, const char *name, uint32_t *data) {
    program_batch *b = NULL;
    check_ok(program_batch_create(c, name, NULL, &b));
    check_ok(program_add(b, "p", "w", &(tb_tensor){.size = sizeof(tb_tensor), .data = data, .dtype = TB_U32}));
    return b;
}

/* ---- Connecting ------------------------------------------------------------------------------------------------ */

static void test_nobody_there(void **state) {
    (void)state;
    char folder[] = "/tmp/tb-agent-XXXXXX", path[64], longer[200];
    program *c = NULL;
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = SOON_MS};
    check(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/s", folder);
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    check_fails(program_connect(longer, NULL, &c), TB_INVALID, "too long");
    tb__link *link = NULL;
    tb__link_opts at_once = {.timeout_ms = PATIENCE_MS};
    check_fails(tb__link_open(path, &at_once, &link), TB_IO, "there is no socket");
    check_fails(program_connect(path, &opts, &c), TB_IO, "there is no socket");
    check_fails(program_connect("", NULL, &c), TB_INVALID, "is empty");
    check_fails(program_connect(folder, NULL, &c), TB_INVALID, "is a folder");
    check_fails(program_connect("/dev/null", NULL, &c), TB_INVALID, "is a file");
    check_fails(program_connect(path, &(tb_world_opts){.size = sizeof opts, .timeout_ms = -1}, &c), TB_INVALID,
                "can't be negative");

    struct sockaddr_un name = {.sun_family = AF_UNIX};
    snprintf(name.sun_path, sizeof name.sun_path, "%s", path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    check(fd >= 0 && bind(fd, (const struct sockaddr *)&name, sizeof name) == 0);
    check_fails(tb__link_open(path, &at_once, &link), TB_IO, "nobody listens");
    int64_t begun_ms = tb__now_ms();
    check_fails(program_connect(path, &opts, &c), TB_IO, "nobody listens");
    check(tb__now_ms() - begun_ms >= SOON_MS);
    check(listen(fd, 0) == 0);
    begun_ms = tb__now_ms();
    check_fails(program_connect(path, &opts, &c), TB_TIMEOUT, "has not answered the hello");
    check_fails(program_connect(path, &opts, &c), TB_TIMEOUT, "it does not accept connections");
    check(tb__now_ms() - begun_ms >= 2 * SOON_MS);
    close(fd);
    unlink(path);
    check(rmdir(folder) == 0);
}

static void strangers(rank *r) {
    program *c = NULL;
    tb_world_opts opts = {.size = sizeof opts, .token = "wrong"};
    const char *path = seat_of(r)->path;
    check_fails(program_connect(path, &opts, &c), TB_DENIED, "the token is wrong");
    opts.token = "open sesame, open sesame, open sesame!";
    check_fails(program_connect(path, &opts, &c), TB_DENIED, "the token is wrong");
    check_fails(program_connect(path, NULL, &c), TB_DENIED, "the token is wrong");

    raw stranger;
    raw_open(&stranger, path);
    tb__message reply, hello = {.kind = TB__HELLO, .protocol = 7, .client = "raw"};
    reply = raw_call(&stranger, &hello);
    check(reply.status == TB_REFUSED && strstr(reply.message, "7") && strstr(reply.message, "versions 1 to 2"));
    check(!raw_reply(&stranger, &reply)); /* it hangs up */
    raw_close(&stranger);

    /* More than a stranger may send. */
    raw_open(&stranger, path);
    check(raw_send(&stranger, "\x00\x00\x10\x00", 4, NULL, 0));
    check(raw_reply(&stranger, &reply) && reply.status == TB_TOO_BIG);
    check(!raw_reply(&stranger, &reply));
    raw_close(&stranger);

    c = open_client(r);
    program_close(c);
}

static void test_strangers(void **state) {
    (void)state;
    agent_scene h = {.token = "open sesame, open sesame, open sesame"};
    run_agent_scene(&h, strangers, 1, 0);
}

/* ---- Pairs ----------------------------------------------------------------------------------------------------- */

/* Each has his own time for a pair, whoever asked first. */
static void patience(rank *r) {
    program *c = open_client(r);
    tb__message reply, short_one = pair_command(r, &replicated, SOON_MS), long_one = pair_command(r, &replicated, 0);
    if (is_a(r)) {
        raw first, second;
        raw_greet(&first, seat_of(r)->path);
        raw_greet(&second, seat_of(r)->path);
        raw_post(&first, &short_one);
        raw_post(&second, &long_one);
        check(raw_reply(&first, &reply) && reply.status == TB_TIMEOUT);
        check_fails(program_pair(c, "p", "b", "mesh=1 place=R", SOON_MS), TB_TIMEOUT, "b 0 is missing");
        check_fails(program_pair(c, "p", "b", "mesh=1 place=S0", SOON_MS), TB_CONFLICT, "already");
        meet(r);
        check(raw_reply(&second, &reply) && reply.status == TB_OK);
        meet(r); /* a pair that all its clients leave is not seen by who looks later */
        raw_close(&first);
        raw_close(&second);
    } else {
        meet(r);
        check_ok(program_pair(c, "p", "a", "mesh=1 place=R", 0));
        meet(r);
    }
    meet(r);
    program_close(c);
}

static void test_patience(void **state) {
    (void)state;
    run_agents(patience, 1, 1);
}

/* A client that dies while its pair is made, and one that dies while its batch is registered, leave their names. */
static void leave_early(rank *r) {
    uint32_t number = is_a(r) ? 5 : 0;
    int64_t begun_ms = tb__now_ms();
    raw gone;
    if (is_a(r)) {
        tb__message other = pair_command(r, &sharded, 0);
        raw_greet(&gone, seat_of(r)->path);
        raw_post(&gone, &other);
        raw_close(&gone);
    }
    program *c = open_client(r);
    while (is_a(r) && program_pair(c, "p", "b", "mesh=1 place=R", SOON_MS) == TB_CONFLICT &&
           tb__now_ms() < begun_ms + PATIENCE_MS / 2)
        usleep(1000); /* until the agent has seen it go; then it waits for b */
    meet(r);
    check_ok(program_pair(c, "p", other_group(r), "mesh=1 place=R", 0));
    if (is_a(r)) {
        tb__message mine = pair_command(r, &replicated, 0);
        raw_greet(&gone, seat_of(r)->path);
        check(raw_call(&gone, &mine).status == TB_OK);
        post_register(&gone, &number);
        tb__message query = {.kind = TB__QUERY_STATUS, .batch_id = "step"};
        check(strcmp(raw_call(&gone, &query).state, "registering") == 0);
        raw_close(&gone);
    }
    program_batch *b = new_batch(c, "step", &number);
    while (is_a(r) && program_register(b, SOON_MS) == TB_CONFLICT && tb__now_ms() < begun_ms + PATIENCE_MS / 2)
        usleep(1000); /* until the agent has seen it go; then it waits for b */
    meet(r);
    check_ok(program_register(b, 0));
    check_ok(program_transfer(b, is_a(r), NULL));
    check(number == 5);
    check(tb__now_ms() - begun_ms < PATIENCE_MS); /* nobody's deadline has passed */
    meet(r);
    program_batch_destroy(b);
    program_close(c);
}

static void test_leave_early(void **state) {
    (void)state;
    run_agents(leave_early, 1, 1);
}

/* A side that comes back with another layout: the other makes the pair again, and is told so if it does not. */
static void come_back(rank *r) {
    uint32_t number = is_a(r) ? 5 : 0;
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    tb_tensor t = {.size = sizeof t, .data = &number, .dtype = TB_U32, .ndim = 1, .shape = {1}};
    program *c = open_client(r);
    program_batch *b = NULL;
    check_ok(program_pair(c, "p", other_group(r), "mesh=1 place=R", 0));
    meet(r);
    if (is_a(r)) {
        program_close(c);
        c = open_client(r);
        tb_status made;
        while ((made = program_pair(c, "p", "b", "mesh=1 place=S0", 0)) == TB_CONFLICT && tb__now_ms() < deadline_ms)
            usleep(1000); /* until the agent has seen the first one go */
        check_ok(made);
    }
    meet(r);
    check_ok(program_batch_create(c, "step", NULL, &b));
    check_ok(program_add(b, "p", "w", &t));
    check_fails(program_register(b, 0), TB_CONFLICT, "it has to be made again");
    tb_status status = TB_CONFLICT;
    while (status == TB_CONFLICT && tb__now_ms() < deadline_ms) { /* until b's agent has heard of the new layout */
        meet(r);
        check_ok(program_pair(c, "p", other_group(r), is_a(r) ? "mesh=1 place=S0" : "mesh=1 place=R", 0));
        program_batch_destroy(b); /* it has the old one */
        check_ok(program_batch_create(c, "step", NULL, &b));
        check_ok(program_add(b, "p", "w", &t));
        meet(r);
        status = program_register(b, 0);
    }
    check_ok(status);
    check_ok(program_transfer(b, is_a(r), NULL));
    check(number == 5);
    meet(r);
    program_batch_destroy(b);
    program_close(c);
}

static void test_come_back(void **state) {
    (void)state;
    run_agents(come_back, 1, 1);
}

/* ---- Batches --------------------------------------------------------------------------------------------------- */

static void clean_up_early(rank *r) {
    uint32_t number = 0;
    int64_t begun_ms = tb__now_ms();
    raw c;
    raw_greet(&c, seat_of(r)->path);
    tb__message pair = pair_command(r, &replicated, 0), reply;
    check(raw_call(&c, &pair).status == TB_OK);
    tb__message cleanup = {.kind = TB__CLEANUP_BATCH, .batch_id = "step"};
    if (is_a(r)) {
        uint64_t first = post_register(&c, &number), second = raw_post(&c, &cleanup);
        check(raw_reply(&c, &reply) && reply.seq == first && reply.status == TB_CANCELLED);
        check(strstr(reply.message, "given up"));
        check(raw_reply(&c, &reply) && reply.seq == second && reply.status == TB_OK);
    }
    meet(r);
    uint64_t seq = post_register(&c, &number);
    check(raw_reply(&c, &reply) && reply.seq == seq);
    check(reply.status == TB_OK);
    meet(r);
    if (is_a(r)) {
        tb__message transfer = {.kind = TB__TRANSFER, .batch_id = "step", .direction = TB__SEND};
        uint64_t first = raw_post(&c, &transfer), again = raw_post(&c, &transfer), second = raw_post(&c, &cleanup);
        check(raw_reply(&c, &reply) && reply.seq == again && reply.status == TB_REFUSED);
        check(strstr(reply.message, "is already being sent"));
        check(raw_reply(&c, &reply) && reply.seq == first && reply.status == TB_CANCELLED);
        check(raw_reply(&c, &reply) && reply.seq == second && reply.status == TB_OK);
    }
    check(tb__now_ms() - begun_ms < PATIENCE_MS);
    meet(r);
    raw_close(&c);
}

static void test_clean_up_early(void **state) {
    (void)state;
    run_agents(clean_up_early, 1, 1);
}

static void bad_calls(rank *r) {
    uint32_t *page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), number = 7, pairs[3] = {0};
    check(page != MAP_FAILED);
    program *c = open_client(r);
    program_batch *b = NULL;
    check_ok(program_batch_create(c, "step", NULL, &b));
    tb_tensor t = {.size = sizeof t, .data = &number, .dtype = TB_U32};
    check_fails(program_register(b, 0), TB_INVALID, "has no tensors");
    check_fails(program_pair(c, "p", other_group(r), "mesh=1", 0), TB_INVALID, "");
    check_fails(program_pair(c, "p", other_group(r), "mesh=2 place=R", 0), TB_INVALID, "rank 1");
    check_fails(program_pair(c, "p", r->group, "mesh=1 place=R", 0), TB_INVALID, "two groups");
    check_fails(program_pair(c, is_a(r) ? "lonely a" : "lonely b", "nobody", "mesh=1 place=R", SOON_MS), TB_TIMEOUT,
                "nobody");
    check_ok(program_pair(c, "p", other_group(r), "mesh=1 place=R", 0));
    t.memory = "cuda";
    check_fails(program_add(b, "p", "w", &t), TB_REFUSED, "said to be on device 'cuda', but is on device 'host'");
    t.memory = "host";
    t.ndim = TB_MAX_DIMS + 1;
    check_fails(program_add(b, "p", "w", &t), TB_INVALID, "dimensions");
    t = (tb_tensor){.size = sizeof(tb_tensor), .dtype = TB_U32};
    check_fails(program_add(b, "p", "w", &t), TB_INVALID, "its data is NULL");
    t = (tb_tensor){.size = sizeof(tb_tensor),
                    .data = &number,
                    .dtype = TB_U32,
                    .ndim = 2,
                    .shape = {INT64_C(1) << 40, INT64_C(1) << 40}};
    check_fails(program_add(b, "p", "w", &t), TB_TOO_BIG, "w");
    t.encode = "mxfp8";
    check(program_add(b, "p", "w", &t) != TB_OK);
    check_fails(program_transfer(b, true, NULL), TB_INVALID, "has no tensors");
    check_fails(program_remove_pair(b, "p"), TB_INVALID, "pair 'p' is not in batch 'step'");
    program_transfer_opts negative = {.timeout_ms = -5, .no_wait = true};
    check_fails(program_transfer(b, true, &negative), TB_INVALID, "timeout_ms can't be negative");
    program_batch_destroy(b);
    tb_transform transform = {.size = sizeof transform};
    tb_batch_opts opts = {.size = sizeof opts, .transform = &transform};
    check_fails(program_batch_create(c, "step", &opts, &b), TB_REFUSED, "transform");

    /* Memory that is not there, memory in two tensors, and a tensor in two pieces of one that overlap. */
    raw other;
    tb__message reply, pair = pair_command(r, &replicated, 0);
    raw_greet(&other, seat_of(r)->path);
    check(raw_call(&other, &pair).status == TB_OK);
    post_register(&other, (void *)16); // NOLINT(performance-no-int-to-ptr)
    check(raw_reply(&other, &reply) && reply.status == TB_INVALID && strstr(reply.message, "run past"));
    check(strncmp(reply.message, "tensor 'w': ", 12) == 0); /* also where the sentence has its letters */
    raw_close(&other);
    check_ok(program_batch_create(c, "step", NULL, &b));
    t = (tb_tensor){.size = sizeof(tb_tensor), .data = pairs, .dtype = TB_U32, .ndim = 1, .shape = {2}};
    check_ok(program_add(b, "p", "one", &t));
    t.data = pairs + 1;
    check_ok(program_add(b, "p", "two", &t));
    check_fails(program_register(b, 0), TB_REFUSED, "overlap");
    program_batch_destroy(b);

    /* Memory that may be read, but not written. */
    b = new_batch(c, "step", is_a(r) ? &number : page);
    check_ok(program_register(b, 0));
    check_ok(program_register(b, 0));
    t.data = &number;
    check_fails(program_add(b, "p", "more", &t), TB_REFUSED, "has been registered");
    if (is_a(r))
        (void)program_transfer(b, true, NULL); /* whether it hears of it in time is not said */
    else
        check_fails(program_transfer(b, false, NULL), TB_IO, "can't be written");
    meet(r);
    program_batch_destroy(b);
    program_close(c);
    munmap(page, 4096);
}

static void test_bad_calls(void **state) {
    (void)state;
    run_agents(bad_calls, 1, 1);
}

/* A receiver that goes in the middle: whoever sends to it hears of it, and not at the deadline. */
static void receiver_goes(rank *r) {
    uint32_t number = 1;
    int64_t begun_ms = tb__now_ms();
    program *c = open_client(r);
    check_ok(program_pair(c, "p", other_group(r), "mesh=1 place=R", 0));
    program_batch *b = new_batch(c, "step", &number);
    check_ok(program_register(b, 0));
    meet(r);
    if (is_a(r)) {
        check(program_transfer(b, true, NULL) != TB_OK);
        check(tb__now_ms() - begun_ms < PATIENCE_MS);
    } else {
        program_close(c);
    }
    program_batch_destroy(b);
    if (!is_a(r)) { /* a new one, to the same agent */
        c = open_client(r);
        check_ok(program_pair(c, "p", other_group(r), "mesh=1 place=R", 0));
    }
    meet(r);
    program_close(c);
}

static void test_receiver_goes(void **state) {
    (void)state;
    run_agents(receiver_goes, 1, 1);
}

/* ---- The agent's end ------------------------------------------------------------------------------------------- */

static void agent_goes(rank *r) {
    agent_scene *h = (agent_scene *)r->scene;
    uint32_t number = 1;
    program *c = open_client(r);
    check_ok(program_pair(c, "p", other_group(r), "mesh=1 place=R", 0));
    program_batch *b = new_batch(c, "step", &number), *unused = new_batch(c, "unused", &number);
    check_ok(program_register(b, 0));
    meet(r);
    if (is_a(r))
        seat_close(h, 0);
    else
        check(program_transfer(b, false, NULL) != TB_OK); /* from an agent that goes */
    meet(r);
    if (is_a(r)) {
        tb_batch_state state = {.size = sizeof state};
        tb__link *link = NULL;
        check_fails(program_transfer(b, true, NULL), TB_LOST, "is gone");
        check_ok(tb_batch_query(b->batch, &state)); /* what is known */
        check(state.version == 0 && !state.is_torn);
        check_fails(program_register(unused, 0), TB_LOST, "is gone");
        check_fails(program_pair(c, "q", "b", "mesh=1 place=R", 0), TB_LOST, "is gone");
        check_fails(tb__link_open(seat_of(r)->path, &(tb__link_opts){.timeout_ms = PATIENCE_MS}, &link), TB_IO,
                    "there is no socket");
    }
    program_batch_destroy(unused);
    program_close(c);
    program_batch_destroy(b);
}

static void test_agent_goes(void **state) {
    (void)state;
    run_agents(agent_goes, 1, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nobody_there), cmocka_unit_test(test_strangers),
        cmocka_unit_test(test_patience),     cmocka_unit_test(test_leave_early),
        cmocka_unit_test(test_come_back),    cmocka_unit_test(test_clean_up_early),
        cmocka_unit_test(test_bad_calls),    cmocka_unit_test(test_receiver_goes),
        cmocka_unit_test(test_agent_goes),
    };
    return cmocka_run_group_tests(tests, make_payloads, free_payloads);
}
