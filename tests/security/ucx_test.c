/* Ranks that are connected through UCX, and processes on the network that do not belong to them: with another token,
 * with recorded hellos, with made-up frames. They are refused by name, and the ranks go on. */
#include "../support/ucx_ends.h"

#include "base/log.h"

#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { HELLO_TAG = UCX_MAGIC, HEAD = sizeof(ucx_frame) + sizeof(ucx_challenge), ROUNDS = 10 };

static char warned[512]; /* the last warning */

static void keep_warning(void *arg, tb_log_level level, const char *text) {
    (void)arg;
    if (level == TB_LOG_WARN)
        snprintf(warned, sizeof warned, "%s", text);
}

/* Two ranks, and a process that can reach b, but has another key. */
typedef struct scene {
    endpoints e;
    tb_transport stranger;
    unsigned char address_b[TB_ADDRESS_MAX], address_s[TB_ADDRESS_MAX];
    size_t nb, ns;
    ucp_ep_h ep; /* of the stranger, to b */
} scene;

/* Lets all of them work for a while. */
static void work(scene *s) {
    for (int i = 0; i < ROUNDS; i++) {
        progress(&s->e);
        assert_int_equal(s->stranger.ops->progress(s->stranger.context), TB_OK);
        poll(NULL, 0, 2);
    }
}

static int set_up(void **state) {
    scene *s = test_calloc(1, sizeof *s);
    warned[0] = '\0';
    tb_log_set(TB_LOG_WARN, keep_warning, NULL);
    make(&s->e);
    send_byte(&s->e, true, 1, 1);
    s->nb = sizeof s->address_b;
    assert_int_equal(s->e.b.ops->address(s->e.b.context, s->address_b, &s->nb), TB_OK);
    ends_key[0] ^= 1;
    open_one(&s->stranger, 9, NULL, s->address_s, &s->ns);
    ends_key[0] ^= 1;
    connect_to(&s->stranger, s->e.rank_b, s->address_b, s->nb);
    s->ep = ucx_find(s->stranger.context, s->e.rank_b)->ep;
    work(s);
    *state = s;
    return 0;
}

/* Nothing was lost for the ranks. */
static int tear_down(void **state) {
    scene *s = *state;
    send_byte(&s->e, true, 2, 2);
    send_byte(&s->e, false, 3, 3);
    assert_int_equal(lost_by_a.count, 0);
    ucx_close_endpoint(ucx_find(s->stranger.context, s->e.rank_b)); /* nobody answers its goodbye */
    tb__transport_close(&s->stranger);
    unmake(&s->e);
    tb_log_set(TB_LOG_OFF, NULL, NULL);
    test_free(s);
    return 0;
}

static void finish(scene *s, ucs_status_ptr_t request) {
    ucx *u = s->stranger.context;
    assert_false(UCS_PTR_IS_ERR(request));
    work(s);
    if (request)
        u->call->request_free(request);
}

static void send_hello(scene *s, const void *bytes, size_t nbytes) {
    ucx *u = s->stranger.context;
    finish(s, u->call->tag_send_nbx(s->ep, bytes, nbytes, HELLO_TAG, &(ucp_request_param_t){0}));
}

static void send_frame(scene *s, const ucx_frame *frame, size_t header_nbytes, size_t nbytes) {
    static unsigned char zeros[1 << 16];
    unsigned char header[2 * sizeof *frame] = {0};
    ucx *u = s->stranger.context;
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_AM_SEND_FLAG_EAGER};
    memcpy(header, frame, sizeof *frame);
    finish(s, u->call->am_send_nbx(s->ep, UCX_ACTIVE_MESSAGE, header, header_nbytes, zeros, nbytes, &param));
}

/* The hello that a process of the bus would send: somebody has recorded it. */
static size_t make_hello(const scene *s, int32_t rank, uint64_t number, unsigned char *out) {
    ucx_address head;
    memcpy(&head, s->address_s, sizeof head);
    ucx_frame frame = {.kind = UCX_HELLO, .rank = rank, .number = number, .tag = 1};
    frame.from = ucx_connection_id(head.id, number);
    ucx_challenge challenge = {.nonce = {4, 2}};
    size_t nbytes = HEAD + s->ns;
    memcpy(out, &frame, sizeof frame);
    memcpy(out + sizeof frame, &challenge, sizeof challenge);
    memcpy(out + HEAD, s->address_s, s->ns);
    tb__hmac_sha256(ends_key, sizeof ends_key, out, nbytes, challenge.code);
    memcpy(out + sizeof frame, &challenge, sizeof challenge);
    return nbytes;
}

static size_t count_strangers(const ucx *u) {
    size_t count = 0;
    for (size_t i = 0; i < u->peers.count; i++)
        count += u->peers.item[i]->is_stranger;
    return count;
}

/* Its hello was refused when it connected: nothing is kept of it, and UCX has not seen its address. */
static void wrong_token(void **state) {
    scene *s = *state;
    for (time_t deadline = seconds() + 60; !warned[0] && seconds() < deadline;)
        work(s);
    assert_non_null(strstr(warned, "claims rank 9 was refused: its sender does not have the token of the bus"));
    assert_null(ucx_find(s->e.b.context, 9));
    assert_false(ucx_find(s->stranger.context, s->e.rank_b)->has_hello);
}

/* A hello of rank 7, recorded earlier: it gets a place among the strangers, and no further. The real rank 7 is not kept
 * out by it. */
static void replayed_hello(void **state) {
    scene *s = *state;
    unsigned char hello[HEAD + TB_ADDRESS_MAX], address[TB_ADDRESS_MAX];
    size_t nbytes = make_hello(s, 7, 1, hello), n;
    send_hello(s, hello, nbytes);
    for (time_t deadline = seconds() + 60; !ucx_find(s->e.b.context, 7) && seconds() < deadline;)
        work(s);
    ucx_peer *peer = ucx_find(s->e.b.context, 7);
    assert_true(peer && peer->is_stranger && !peer->has_hello);
    send_frame(s, &(ucx_frame){.kind = UCX_PROOF, .rank = 7, .from = peer->id, .serial = 1}, sizeof(ucx_frame), 32);
    assert_false(peer->has_hello);
    tb_transport real;
    losses lost = {0};
    open_one(&real, 7, &lost, address, &n);
    connect_to(&real, s->e.rank_b, s->address_b, s->nb);
    connect_to(&s->e.b, 7, address, n);
    for (time_t deadline = seconds() + 60; !ucx_find(s->e.b.context, 7)->has_hello && seconds() < deadline;) {
        assert_int_equal(real.ops->progress(real.context), TB_OK);
        progress(&s->e);
        poll(NULL, 0, 2);
    }
    assert_true(ucx_find(s->e.b.context, 7)->has_hello);
    leave(&real, &s->e.b);
}

/* A recorded hello of a rank that is connected is late, or of another process. */
static void replayed_hello_of_a_peer(void **state) {
    scene *s = *state;
    unsigned char hello[HEAD + TB_ADDRESS_MAX];
    const ucx_peer *peer = ucx_find(s->e.b.context, s->e.rank_a);
    for (uint64_t number = 1; number < 4; number++)
        send_hello(s, hello, make_hello(s, s->e.rank_a, number, hello));
    assert_ptr_equal(ucx_find(s->e.b.context, s->e.rank_a), peer);
    assert_true(peer->has_hello && !ucx_has_failed(peer));
}

/* b's own hello, sent back to it. */
static void reflected_hello(void **state) {
    scene *s = *state;
    ucx *u = s->e.b.context;
    unsigned char hello[HEAD + TB_ADDRESS_MAX];
    ucx_frame frame = {.kind = UCX_HELLO, .rank = s->e.rank_b, .number = 1, .from = u->id};
    ucx_challenge challenge = {.nonce = {4, 2}};
    memcpy(hello, &frame, sizeof frame);
    memcpy(hello + sizeof frame, &challenge, sizeof challenge);
    memcpy(hello + HEAD, u->address, u->address_nbytes);
    tb__hmac_sha256(ends_key, sizeof ends_key, hello, HEAD + u->address_nbytes, challenge.code);
    memcpy(hello + sizeof frame, &challenge, sizeof challenge);
    u->warn_again_ms = 0; /* it has just warned of the stranger */
    send_hello(s, hello, HEAD + u->address_nbytes);
    assert_null(ucx_find(u, s->e.rank_b));
    assert_non_null(strstr(warned, "a hello was refused"));
}

/* A stranger that never proves anything is given up after some heartbeats, by name. */
static void stranger_is_given_up(void **state) {
    scene *s = *state;
    unsigned char hello[HEAD + TB_ADDRESS_MAX];
    tb__ucx_heartbeat_ms = 20;
    send_hello(s, hello, make_hello(s, 7, 1, hello));
    for (time_t deadline = seconds() + 60; lost_by_b.count == 0 && seconds() < deadline; rest(&s->e))
        progress(&s->e);
    tb__ucx_heartbeat_ms = 1000;
    assert_int_equal(lost_by_b.rank, 7);
    assert_string_equal(lost_by_b.why, "it has not proved that it has the token of the bus");
}

static void many_strangers(void **state) {
    scene *s = *state;
    unsigned char hello[HEAD + TB_ADDRESS_MAX];
    const ucx *u = s->e.b.context;
    ucx *sender = s->stranger.context;
    for (int32_t i = 0; i < 80; i++) {
        size_t nbytes = make_hello(s, 100 + i, 1, hello);
        ucs_status_ptr_t request =
            sender->call->tag_send_nbx(s->ep, hello, nbytes, HELLO_TAG, &(ucp_request_param_t){0});
        assert_false(UCS_PTR_IS_ERR(request));
        for (int j = 0; j < 3; j++) {
            assert_int_equal(s->e.b.ops->progress(s->e.b.context), TB_OK);
            sender->call->worker_progress(sender->worker);
        }
        assert_true(count_strangers(u) <= UCX_STRANGERS);
        if (request)
            sender->call->request_free(request);
    }
    for (time_t deadline = seconds() + 60; !u->is_deaf && seconds() < deadline;)
        work(s);
    assert_int_equal(count_strangers(u), UCX_STRANGERS);
    assert_true(u->is_deaf);
    assert_true(sizeof(ucx_peer) + s->ns <= UCX_STRANGER_NBYTES);
}

static void frames(void **state) {
    scene *s = *state;
    const ucx_peer *peer = ucx_find(s->e.b.context, s->e.rank_a);
    ucx_frame good = {.kind = UCX_MESSAGE, .rank = s->e.rank_a, .serial = peer->serial_in, .tag = 2, .nbytes = 1};
    /* What a process could know or guess: the id of the process, of its connection, of nobody. */
    const uint64_t guesses[] = {0,           1, peer->id, ucx_connection_id(peer->id, peer->number), peer->id_in ^ 1,
                                peer->id_out};
    for (size_t i = 0; i < sizeof guesses / sizeof *guesses; i++) {
        for (int kind = UCX_HELLO; kind <= UCX_CHUNK + 1; kind++) {
            ucx_frame frame = good;
            frame.kind = (uint16_t)kind;
            frame.from = guesses[i];
            send_frame(s, &frame, sizeof frame, 32);
        }
    }
    send_frame(s, &good, sizeof good - 1, 1);   /* truncated */
    send_frame(s, &good, 1, 1);                 /* no kind */
    send_frame(s, &good, 2 * sizeof good, 1);   /* oversize */
    send_frame(s, &good, sizeof good, 1 << 15); /* with more than a message may have */
    static const unsigned char large[2 * (HEAD + TB_ADDRESS_MAX)];
    send_hello(s, large, sizeof large); /* more than the receiver has room for */
    send_hello(s, large, HEAD - 1);
    send_hello(s, large, 0);
    send_hello(s, large, HEAD);
    assert_true(!ucx_has_failed(peer)); /* and what comes with tag 2, in tear_down, is not theirs */
}

#define SCENE(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

int main(int argc, char **argv) {
    if (!choose_lanes(argc, argv))
        return 77;
    const struct CMUnitTest tests[] = {
        SCENE(wrong_token),     SCENE(replayed_hello),       SCENE(replayed_hello_of_a_peer),
        SCENE(reflected_hello), SCENE(stranger_is_given_up), SCENE(many_strangers),
        SCENE(frames),
    };
    return cmocka_run_group_tests_name("strangers on the UCX port", tests, NULL, NULL);
}
