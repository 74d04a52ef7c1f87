/* Programs with tensors on a device, and agents: the agent maps what can be shared, and peers map it by the program's
 * own key; everything else is copied in the program's process, and no byte is written that is no part of a tensor. */
#define TB_SLOW_DEVICE
#include "bus/agent/agent_test.h"
#include "bus/protocol/payload.h"

#define ROWS    "mesh=2 place=Shard(0)"
#define COLUMNS "mesh=2 place=Shard(1)"
#define WHOLE   "mesh=1 place=Replicate"

enum { LITTLE_MS = 30 };

typedef struct plan {
    agent_scene agents; /* first */
    bool is_private;    /* the memory can't be shared */
    bool fails_to_map, is_shadowed;
    size_t nmappings; /* at least, while batches are registered; 0: none */
} plan;

static void move_in_on_device(rank *r, client_setup *s, const plan *p) {
    const char *layout = r->size == 1 ? WHOLE : is_a(r) ? ROWS : COLUMNS;
    part_init(&s->w, layout, r->index, 32, 32);
    tensor_free(s->w.data);
    s->w.data = slow_device_alloc_on(1, !p->is_private, s->w.count * sizeof *s->w.data);
    part_poison(&s->w);
    s->client = open_client(r);
    check_ok(program_pair(s->client, "p", other_group(r), layout, 0));
    check_ok(program_batch_create(s->client, "step", NULL, &s->batch));
    tb_tensor w = part_tensor(&s->w);
    w.memory = "host";
    check_fails(program_add(s->batch, "p", "w", &w), TB_REFUSED,
                "tensor 'w': its memory is said to be on device 'host', but is on device 'slow:1'");
    w.memory = r->index == 0 ? "slow" : "slow:1";
    check_ok(program_add(s->batch, "p", "w", &w));
    meet(r);
    if (p->fails_to_map && is_a(r) && r->index == 0)
        slow_device_fail_call(SLOW_DEVICE_MAP, 0, TB_IO);
    meet(r);
    check_ok(program_register(s->batch, 0));
}

/* The dump says of each direction what the program copies, and why. */
static void check_dump(const rank *r, const client_setup *s, const plan *p) {
    bool is_copied = p->is_private || p->agents.no_gpu;
    for (int is_send = 0; is_send < 2; is_send++) {
        char *dump, line[160];
        snprintf(line, sizeof line, "\n  w on slow:1 is copied by its program %s: %s\n",
                 is_send ? "to host memory before each send" : "from host memory after each receive",
                 p->is_private ? "its memory can't be shared" : "the agent can't map its memory");
        check_ok(tb_batch_dump(s->batch->batch, is_send, &dump));
        if (!p->fails_to_map && (strstr(dump, line) != NULL) != is_copied)
            fails(__FILE__, __LINE__, r->group, dump);
        free(dump);
    }
}

/* Others would be told that this rank has the version before its program has copied it. */
static void check_whole_group(const client_setup *s, const plan *p) {
    tb_transfer_opts opts = {.size = sizeof opts, .whole_group = true};
    tb_transfer *t = NULL;
    if (p->is_private || p->agents.no_gpu)
        check_fails(tb_recv(s->batch->batch, &opts, &t), TB_REFUSED, "it can't be received with whole_group");
}

static void exchange_versions(rank *r) {
    const plan *p = (const plan *)r->scene;
    client_setup s;
    move_in_on_device(r, &s, p);
    check_whole_group(&s, p);
    for (uint32_t version = 1; version <= 4; version++)
        client_exchange(r, &s, version % 2 ? "a" : "b", version);
    check_dump(r, &s, p);
    meet(r);
    check(p->nmappings ? slow_device_count_mappings() >= p->nmappings : slow_device_count_mappings() == 0);
    meet(r);
    check_ok(program_cleanup(s.batch));
    meet(r);
    program_batch_destroy(s.batch);
    program_close(s.client);
    slow_device_free(s.w.data);
    tb_local_fini(&s.w.local);
}

static void run_plan(plan p, void (*body)(rank *r), int32_t n) {
    run_agent_scene(&p.agents, body, n, n);
    check(slow_device_count_mappings() == 0);
    slow_device_mend();
}

/* Each agent maps its program's memory, and those that receive map that of the senders' programs. */
static void test_mapped(void **state) {
    (void)state;
    run_plan((plan){.nmappings = 4}, exchange_versions, 1);
    run_plan((plan){.nmappings = 4}, exchange_versions, 2);
}

static void test_copied(void **state) {
    (void)state;
    for (int32_t n = 1; n <= 2; n++) {
        run_plan((plan){.agents = {.no_gpu = true}}, exchange_versions, n);
        run_plan((plan){.is_private = true}, exchange_versions, n);
    }
    run_plan((plan){.fails_to_map = true, .nmappings = 1}, exchange_versions, 2);
}

/* ---- What is written back ------------------------------------------------------------------------------------------
 */

enum { STORED = 8, WIDTH = 12, USED = 4 };

/* Columns 2 to 5 of the storage are a tensor of 4 rows between two of padding. The rest is the program's own, which
 * changes it while the transfer is under way. */
static void receive_a_part(rank *r) {
    program *c = open_client(r);
    program_batch *batch = NULL;
    tb_batch_opts opts = {.size = sizeof opts,
                          .commit = ((const plan *)r->scene)->is_shadowed ? TB_SHADOW : TB_IN_PLACE};
    uint32_t *data = slow_device_alloc(STORED * WIDTH * sizeof *data), *bytes = slow_device_bytes(data);
    int64_t strides[] = {WIDTH, 1};
    tb_tensor t = {.size = sizeof t,
                   .data = data + 2,
                   .dtype = TB_U32,
                   .ndim = 2,
                   .shape = {6, USED},
                   .strides = strides,
                   .view = "pad(0,1,1)"};
    check_ok(program_pair(c, "p", other_group(r), WHOLE, 0));
    check_ok(program_batch_create(c, "step", &opts, &batch));
    check_ok(program_add(batch, "p", "w", &t));
    check_ok(program_register(batch, 0));
    for (uint32_t version = 1; version <= 2; version++) {
        program_transfer_opts no_wait = {.no_wait = true};
        for (uint32_t i = 0; i < STORED * WIDTH; i++)
            bytes[i] = is_a(r) ? version * 1000 + i : 7;
        if (is_a(r)) {
            meet(r);
            check_ok(program_transfer(batch, true, NULL));
        } else {
            check_ok(program_transfer(batch, false, &no_wait));
            check_fails(program_transfer(batch, true, NULL), TB_REFUSED, "are copied through host memory");
            for (uint32_t i = 0; i < STORED * WIDTH; i++)
                bytes[i] = 8;
            meet(r);
            check_ok(program_wait(batch, false, version == 1 ? TB_COMMITTED : TB_ARRIVED, -1));
            check_ok(program_wait(batch, false, TB_COMMITTED, -1));
            for (uint32_t i = 0; i < STORED; i++) {
                for (uint32_t j = 0; j < WIDTH; j++) {
                    bool is_in = i < 6 && j >= 2 && j < 2 + USED, is_padding = is_in && (i == 0 || i == 5);
                    uint32_t wanted = is_padding ? 0 : is_in ? version * 1000 + i * WIDTH + j : 8;
                    check(bytes[i * WIDTH + j] == wanted);
                }
            }
        }
        meet(r);
    }
    program_batch_destroy(batch);
    program_close(c);
    slow_device_free(data);
}

static void test_nothing_else_is_written(void **state) {
    (void)state;
    run_plan((plan){.agents = {.no_gpu = true}}, receive_a_part, 1);
    run_plan((plan){.agents = {.no_gpu = true}, .is_shadowed = true}, receive_a_part, 1);
}

/* ---- Streams
 * --------------------------------------------------------------------------------------------------------- */

typedef struct helper {
    pthread_t thread;
    const part *part;
    uint32_t *bytes;
    uint32_t version; /* to write; 0: to look for poison */
    slow_work *work;
    bool is_right;
} helper;

static void do_work(void *arg) {
    helper *h = arg;
    h->is_right = true;
    for (size_t i = 0; i < h->part->count; i++) {
        if (h->version)
            h->bytes[i] = part_value(h->part, i, h->version);
        h->is_right &= h->version || h->bytes[i] == POISON;
    }
}

static void *let_go_later(void *arg) {
    const helper *h = arg;
    usleep(LITTLE_MS * 1000);
    slow_work_let_go(h->work);
    return NULL;
}

/* A transfer waits for the work that is on the stream, which ends while the call waits. */
static void follow_streams(rank *r) {
    const plan *p = (const plan *)r->scene;
    client_setup s;
    slow_stream *stream = slow_stream_create();
    move_in_on_device(r, &s, p);
    for (uint32_t version = 1; version <= 3; version++) {
        helper h = {.part = &s.w, .bytes = part_bytes(&s.w), .version = is_a(r) ? version : 0};
        program_transfer_opts opts = {.stream = &stream, .no_wait = !is_a(r)};
        part_poison(&s.w);
        h.work = slow_stream_add(stream, do_work, &h, true);
        check(pthread_create(&h.thread, NULL, let_go_later, &h) == 0);
        check_ok(program_transfer(s.batch, is_a(r), &opts));
        check(pthread_join(h.thread, NULL) == 0);
        if (!is_a(r))
            check_ok(program_stream_wait(s.batch, false, TB_COMMITTED, &stream));
        check(h.is_right && part_holds(&s.w, version));
    }
    slow_work *held = slow_stream_add(stream, NULL, NULL, true);
    program_transfer_opts late = {.stream = &stream, .timeout_ms = LITTLE_MS};
    check_fails(program_transfer(s.batch, is_a(r), &late), TB_TIMEOUT, "has not finished the work on the stream");
    slow_work_let_go(held);
    meet(r);
    program_batch_destroy(s.batch);
    program_close(s.client);
    slow_device_free(s.w.data);
    tb_local_fini(&s.w.local);
    slow_stream_destroy(stream);
}

static void test_streams(void **state) {
    (void)state;
    run_plan((plan){.nmappings = 1}, follow_streams, 1);
    run_plan((plan){.agents = {.no_gpu = true}}, follow_streams, 1);
}

/* ---- Frames that are wrong
 * ------------------------------------------------------------------------------------------- */

static tb__message register_one(raw *c, const tb__payload_memory *data, const tb__entry *memories, size_t n) {
    tb__bytes payload = {0};
    tb__tensor_payload p = {.name = "w", .dtype = TB_U32, .shape = {1, {1}}, .data = *data};
    check_ok(tb__tensor_encode(&p, NULL, &payload));
    tb__entry entry = {"p", {payload.item, payload.count}};
    tb__message message = {
        .kind = TB__REGISTER_TENSORS, .batch_id = "b", .tensors = {1, &entry}, .memories = {n, memories}};
    tb__message reply = raw_call(c, &message);
    free(payload.item);
    return reply;
}

static void send_wrong_memory(rank *r) {
    program *c = open_client(r);
    check_ok(program_pair(c, "p", other_group(r), WHOLE, 0));
    if (is_a(r)) {
        raw x;
        tb__bytes payload = {0};
        tb__device_memory m = {.id = 1, .fd = 0, .nfds = 1, .key = {(const uint8_t *)"key", 3}};
        tb__payload_memory at = {.kind = TB__MEMORY_DEVICE, .nbytes = 4};
        raw_greet(&x, seat_of(r)->path);
        tb__message pair = {.kind = TB__INIT_PAIR, .pair_name = "p", .local_name = "a", .expected_world_size = 1};
        tb__bytes mesh = {0}, placements = {0};
        tb_layout *layout;
        check_ok(tb_layout_parse(WHOLE, &layout));
        check_ok(tb__mesh_encode(layout, &mesh));
        check_ok(tb__placements_encode(layout, &placements));
        tb_layout_destroy(layout);
        pair.remote_name = "b";
        pair.mesh = (tb__blob){mesh.item, mesh.count};
        pair.placements = (tb__blob){placements.item, placements.count};
        check(raw_call(&x, &pair).status == TB_OK);
        tb__message reply = register_one(&x, &at, NULL, 0);
        check(reply.status == TB_INVALID && strstr(reply.message, "its memory is number 0, but 0 came"));
        check_ok(tb__map_encode(&tb__device_memory_schema, &m, &payload));
        tb__entry entry = {"slow", {payload.item, payload.count}};
        reply = register_one(&x, &at, &entry, 1);
        check(reply.status == TB_REFUSED && reply.unmapped.value);
        check(strstr(reply.message, "has 1 descriptors from 0 on, but 0 came"));
        payload.count = 0;
        m.nfds = 0;
        check_ok(tb__map_encode(&tb__device_memory_schema, &m, &payload));
        entry.payload.nbytes = payload.count;
        entry.payload.data = payload.item;
        reply = register_one(&x, &at, &entry, 1);
        check(reply.status == TB_REFUSED &&
              strstr(reply.message, "can't map memory of device slow: a memory key of 3"));
        entry.pair_name = "tpu";
        reply = register_one(&x, &at, &entry, 1);
        check(reply.status == TB_REFUSED && strstr(reply.message, "there is no device 'tpu' here"));
        raw_close(&x);
        free(payload.item);
        free(mesh.item);
        free(placements.item);
    }
    meet(r);
    program_close(c);
}

static void test_wrong_memory(void **state) {
    (void)state;
    run_plan((plan){.nmappings = 0}, send_wrong_memory, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mapped),
        cmocka_unit_test(test_copied),
        cmocka_unit_test(test_nothing_else_is_written),
        cmocka_unit_test(test_streams),
        cmocka_unit_test(test_wrong_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
