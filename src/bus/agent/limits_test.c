/* What one client can't do to an agent: there is an end to what it may begin, and to what it may have the agent keep.
 */
#include "bus/agent/agent_test.h"
#include "bus/protocol/payload.h"

#include <fcntl.h>

enum { MOST = 64, JUNK_BYTES = 48 << 20, NFRAMES = 9, BATCHES = 48 };

/* A mesh and its placements, and `junk` bytes that nobody knows. */
typedef struct payload {
    tb__bytes mesh, placements;
} payload;

static payload make_payload(size_t junk) {
    payload p = {0};
    tb_layout *layout;
    check_ok(tb_layout_parse("mesh=1 place=R", &layout));
    check_ok(tb__mesh_encode(layout, &p.mesh));
    check_ok(tb__placements_encode(layout, &p.placements));
    tb_layout_destroy(layout);
    if (junk == 0)
        return p;
    uint8_t key[] = {0xa1,         'z', 0xc6, (uint8_t)(junk >> 24), (uint8_t)(junk >> 16), (uint8_t)(junk >> 8),
                     (uint8_t)junk};
    check(tb__vec_reserve(&p.mesh, sizeof key + junk));
    memcpy(p.mesh.item + p.mesh.count, key, sizeof key);
    memset(p.mesh.item + p.mesh.count + sizeof key, 0, junk);
    p.mesh.count += sizeof key + junk;
    p.mesh.item[0]++; /* one more pair in the map */
    return p;
}

static void free_payload(payload *p) {
    free(p->mesh.item);
    free(p->placements.item);
}

static tb__message pair_command(const rank *r, const char *name, const payload *p, int timeout_ms) {
    return (tb__message){.kind = TB__INIT_PAIR,
                         .pair_name = name,
                         .local_name = r->group,
                         .expected_world_size = (uint64_t)r->size,
                         .remote_name = other_group(r),
                         .mesh = {p->mesh.item, p->mesh.count},
                         .placements = {p->placements.item, p->placements.count},
                         .timeout_ms = (uint64_t)timeout_ms};
}

/* Waits for these words in the agent's report. */
static void expect_report(raw *c, const char *words) {
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    bool is_there = false;
    while (!is_there && tb__now_ms() < deadline_ms) {
        tb__message reply = raw_call(c, &(tb__message){.kind = TB__INSPECT});
        is_there = memmem(reply.report.data, reply.report.nbytes, words, strlen(words));
        usleep(1000);
    }
    check(is_there);
}

/* ---- Commands -------------------------------------------------------------------------------------------------- */

static void many_commands(rank *r) {
    payload p = make_payload(0);
    raw c, neighbour;
    tb__message reply, inspect = {.kind = TB__INSPECT}, query = {.kind = TB__QUERY_STATUS, .batch_id = "none"};
    char name[32];
    raw_greet(&c, seat_of(r)->path);
    raw_greet(&neighbour, seat_of(r)->path);
    for (int i = 0; i < MOST; i++) { /* some of them wait for another's, without a thread */
        snprintf(name, sizeof name, "p%d", i / 2);
        tb__message m = pair_command(r, name, &p, PATIENCE_MS);
        raw_post(&c, &m);
    }
    tb__message more = pair_command(r, "more", &p, SOON_MS);
    for (int i = 0; i < 3; i++) {
        reply = raw_call(&c, &more);
        check(reply.status == TB_TOO_BIG && strcmp(reply.message, "64 commands are under way; wait for one") == 0);
    }
    check(raw_call(&c, &inspect).status == TB_OK);
    check(raw_call(&c, &query).status == TB_INVALID);
    check(raw_call(&neighbour, &more).status == TB_TIMEOUT); /* which has its own */
    raw_close(&c);

    /* Those that have ended do not count. */
    raw_greet(&c, seat_of(r)->path);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < MOST; i++)
            raw_post(&c, &more);
        for (int i = 0; i < MOST; i++)
            check(raw_reply(&c, &reply) && reply.status == TB_TIMEOUT);
    }
    raw_close(&c);
    raw_close(&neighbour);
    free_payload(&p);
}

static void test_many_commands(void **state) {
    (void)state;
    run_agents(many_commands, 1, 0);
}

/* ---- Bytes ----------------------------------------------------------------------------------------------------- */

/* Sends until nothing more is taken for a while. */
static size_t send_some(const raw *c, const tb__bytes *frame, size_t sent, size_t total, int patience_ms) {
    struct pollfd writable = {.fd = c->fd, .events = POLLOUT};
    while (sent < total && poll(&writable, 1, patience_ms) == 1) {
        size_t at = sent % frame->count;
        ssize_t n = send(c->fd, frame->item + at, frame->count - at, MSG_NOSIGNAL | MSG_DONTWAIT);
        check(n > 0 || errno == EAGAIN);
        sent += n > 0 ? (size_t)n : 0;
    }
    return sent;
}

static void many_bytes(rank *r) {
    payload large = make_payload(JUNK_BYTES);
    tb__message reply, command = pair_command(r, "p", &large, 0);
    tb__bytes frame = {0};
    raw c, neighbour;
    check_ok(tb__message_encode(&command, &frame));
    size_t total = NFRAMES * frame.count;
    raw_greet(&c, seat_of(r)->path);
    if (is_a(r)) {
        size_t sent = send_some(&c, &frame, 0, total, SOON_MS);
        check(sent < total); /* the agent has stopped to read this one, and no other */
        raw_greet(&neighbour, seat_of(r)->path);
        check(raw_call(&neighbour, &(tb__message){.kind = TB__INSPECT}).status == TB_OK);
        raw_close(&neighbour);
        meet(r);
        sent = send_some(&c, &frame, sent, total, PATIENCE_MS); /* it goes on when commands have ended */
        check(sent == total);
        for (int i = 0; i < NFRAMES; i++)
            check(raw_reply(&c, &reply) && reply.status == TB_OK);
    } else {
        meet(r);
        check(raw_call(&c, &command).status == TB_OK);
    }
    meet(r);
    raw_close(&c);
    free(frame.item);
    free_payload(&large);
}

static void test_many_bytes(void **state) {
    (void)state;
    run_agents(many_bytes, 1, 1);
}

/* One that goes while nothing of it is read is forgotten. */
static void full_and_gone(rank *r) {
    payload large = make_payload(JUNK_BYTES);
    tb__message command = pair_command(r, "p", &large, 3 * PATIENCE_MS);
    tb__bytes frame = {0};
    raw c;
    check_ok(tb__message_encode(&command, &frame));
    raw_greet(&c, seat_of(r)->path);
    check(send_some(&c, &frame, 0, NFRAMES * frame.count, SOON_MS) < NFRAMES * frame.count);
    raw_close(&c);
    raw_greet(&c, seat_of(r)->path);
    expect_report(&c, "\"clients\":[],\"pairs\":[]"); /* and what it asked for is given up, not begun again */
    raw_close(&c);
    free(frame.item);
    free_payload(&large);
}

static void test_full_and_gone(void **state) {
    (void)state;
    run_agents(full_and_gone, 1, 0);
}

/* ---- Background work ------------------------------------------------------------------------------------------- */

/* Batches of clients that go end by and by, more of them than are ended at once. */
static void many_batches(rank *r) {
    payload p = make_payload(0);
    raw c[3];
    tb__message command = pair_command(r, "p", &p, 0);
    uint32_t number = 0;
    for (int i = 0; i < 3; i++)
        raw_greet(&c[i], seat_of(r)->path);
    check(raw_call(&c[0], &command).status == TB_OK);
    meet(r); /* nobody goes before both have the pair */
    for (int i = 0; is_a(r) && i < 2 * BATCHES; i++) {
        char id[16];
        snprintf(id, sizeof id, "b%d", i);
        tb__tensor_payload t = {
            .name = "w",
            .dtype = TB_U32,
            .data = {.kind = TB__MEMORY_ADDRESS, .address = (uintptr_t)&number, .nbytes = sizeof number}};
        tb__bytes bytes = {0};
        check_ok(tb__tensor_encode(&t, NULL, &bytes));
        tb__entry entry = {.pair_name = "p", .payload = {bytes.item, bytes.count}};
        tb__message m = {.kind = TB__REGISTER_TENSORS, .batch_id = id, .tensors = {1, &entry}};
        raw_post(&c[i % 2], &m);
        free(bytes.item);
    }
    if (is_a(r)) {
        tb__message query = {.kind = TB__QUERY_STATUS, .batch_id = "b0"};
        check(strcmp(raw_call(&c[0], &query).state, "registering") == 0);
    }
    raw_close(&c[0]);
    raw_close(&c[1]);
    expect_report(&c[2], "\"batches\":[]");
    meet(r);
    raw_close(&c[2]);
    free_payload(&p);
}

static void test_many_batches(void **state) {
    (void)state;
    run_agents(many_batches, 1, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_many_commands),
        cmocka_unit_test(test_many_bytes),
        cmocka_unit_test(test_full_and_gone),
        cmocka_unit_test(test_many_batches),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
