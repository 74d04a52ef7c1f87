/* The embedded store against clients, and servers, that do not play by the rules. Each is refused by name, and the
 * others lose nothing: a member that is connected all the time finds its keys as they were. */
#include "bus/store/store_test.h"

#include "bus/directory.h"

typedef struct fixture {
    place at;
    tb__store_server *server;
    char url[128];
    tb__store *member;
} fixture;

static int set_up(void **state) {
    fixture *f = calloc(1, sizeof *f);
    place_make(&f->at);
    assert_ok(tb__store_server_start("tcp://127.0.0.1:0", TOKEN, &f->server));
    snprintf(f->url, sizeof f->url, "%s", tb__store_server_url(f->server));
    f->member = open_store(f->url);
    assert_ok(tb__store_set(f->member, "own", "mine", 4, TB__STORE_EPHEMERAL, NULL));
    *state = f;
    return 0;
}

static void assert_text(tb__store *store, const char *key, const char *text) {
    tb__store_value value;
    assert_ok(tb__store_get(store, key, &value));
    if (text)
        assert_string_equal(value.data, text);
    else
        assert_null(value.data);
    tb__store_value_fini(&value);
}

static int tear_down(void **state) {
    fixture *f = *state;
    assert_text(f->member, "own", "mine"); /* nothing was lost for the others */
    assert_alive(f->url);
    tb__store_close(f->member);
    tb__store_server_stop(f->server);
    place_remove(&f->at);
    free(f);
    return 0;
}

/* The server's next answer has this status and this text in its sentence, and is its last. */
static void assert_refused(int fd, tb_status status, const char *text) {
    tb__bytes in = {0};
    size_t consumed = 0;
    tb__store_message reply;
    assert_true(tb__vec_reserve(&in, 1));
    assert_true(raw_receive(fd, &in, &consumed, &reply));
    assert_int_equal(reply.status, status);
    char sentence[512];
    snprintf(sentence, sizeof sentence, "%.*s", (int)reply.value.nbytes, (const char *)reply.value.data);
    if (!strstr(sentence, text))
        fail_msg("'%s' lacks '%s'", sentence, text);
    assert_false(raw_receive(fd, &in, &consumed, &reply));
    free(in.item);
    close(fd);
}

static void wrong_token(void **state) {
    const fixture *f = *state;
    static const char other[] = "another token that has thirty-two bytes";
    tb__store *store;
    assert_fails(tb__store_open(f->url, other, PATIENCE_MS, &store), TB_DENIED, "the token is not the server's");
    assert_fails(tb__store_open(f->url, NULL, PATIENCE_MS, &store), TB_DENIED, "the token is not the server's");
    assert_fails(tb__store_open(f->url, "short", PATIENCE_MS, &store), TB_INVALID, "it must have at least 32");
    /* A client that does not care whether the server has its token. */
    static const char *const tokens[] = {other, NULL, ""};
    for (int i = 0; i < 3; i++) {
        uint8_t proof[TB__PROOF_NBYTES];
        int fd = raw_connect(f->url);
        raw_login l = raw_begin_hello(fd, tokens[i], 7);
        assert_true(raw_send_message(fd, raw_prove_message(&l, proof)));
        assert_refused(fd, TB_DENIED, "the token is not the server's");
    }
}

/* Somebody who has seen a hello and its proof sends them again: the server's nonce is another one. */
static void replayed(void **state) {
    const fixture *f = *state;
    uint8_t proof[TB__PROOF_NBYTES];
    int fd = raw_connect(f->url);
    raw_login l = raw_begin_hello(fd, TOKEN, 7);
    tb__store_message seen = raw_prove_message(&l, proof);
    assert_true(raw_send_message(fd, seen));
    assert_int_equal(raw_reply(fd).status, TB_OK);
    close(fd);
    fd = raw_connect(f->url);
    assert_true(raw_send_message(fd, (tb__store_message){.id = 1, .version = TB__STORE_VERSION, .end = l.mine}));
    assert_int_equal(raw_reply(fd).status, TB_OK);
    assert_true(raw_send_message(fd, seen));
    assert_refused(fd, TB_DENIED, "the token is not the server's");
}

/* Somebody without the token gives the server its own words back. */
static void reflected(void **state) {
    const fixture *f = *state;
    tb__bytes in = {0};
    size_t consumed = 0;
    tb__store_message reply;
    uint8_t proof[TB__PROOF_NBYTES];
    assert_true(tb__vec_reserve(&in, 1));
    int fd = raw_connect(f->url);
    assert_true(raw_send_message(fd, (tb__store_message){.id = 1, .version = TB__STORE_VERSION, .end = {{9}, {9}}}));
    assert_true(raw_receive(fd, &in, &consumed, &reply));
    assert_int_equal(reply.value.nbytes, sizeof proof);
    memcpy(proof, reply.value.data, sizeof proof);
    assert_true(raw_send_message(
        fd, (tb__store_message){.id = 2, .op = TB__STORE_PROVE, .value = {.data = proof, .nbytes = sizeof proof}}));
    assert_refused(fd, TB_DENIED, "the token is not the server's");
    /* The challenge of one connection as the hello of another: the answer is a proof of the server's, for a server. */
    int first = raw_connect(f->url), second = raw_connect(f->url);
    raw_login a = raw_begin_hello(first, "", 7);
    assert_true(raw_send_message(second, (tb__store_message){.id = 1, .version = TB__STORE_VERSION, .end = a.server}));
    in.count = consumed = 0;
    assert_true(raw_receive(second, &in, &consumed, &reply));
    memcpy(proof, reply.value.data, sizeof proof);
    assert_true(raw_send_message(first, (tb__store_message){.id = 2,
                                                            .op = TB__STORE_PROVE,
                                                            .value = {.data = proof, .nbytes = sizeof proof},
                                                            .secret = a.secret}));
    assert_refused(first, TB_DENIED, "the token is not the server's");
    close(second);
    free(in.item);
}

static void downgrade(void **state) {
    const fixture *f = *state;
    /* Version 1, which sent the token. */
    static const uint8_t old[] = {26,  0,   0, 0, 1, 0, 0, 0, 0,   0,   0,   0,   0,   'T', 'B',
                                  'K', 'V', 1, 0, 0, 0, 7, 0, 's', 'e', 's', 'a', 'm', 'e', '!'};
    int fd = raw_connect(f->url);
    assert_true(raw_send(fd, old, sizeof old));
    assert_refused(fd, TB_REFUSED, "the client speaks version 1 of the store's protocol, the server version 5");
    /* No proof, and a request in its place. */
    fd = raw_connect(f->url);
    (void)raw_begin_hello(fd, TOKEN, 7);
    assert_true(raw_send_message(fd, (tb__store_message){.id = 2, .op = TB__STORE_LIST}));
    assert_refused(fd, TB_DENIED, "a list before the client has proved that it has the token");
    fd = raw_connect(f->url);
    (void)raw_begin_hello(fd, TOKEN, 7);
    assert_true(raw_send_message(fd, (tb__store_message){.id = 2, .op = TB__STORE_PROVE}));
    assert_refused(fd, TB_DENIED, "the token is not the server's");
    fd = raw_connect(f->url);
    assert_true(raw_send_message(fd, (tb__store_message){.id = 2, .op = TB__STORE_PROVE}));
    assert_refused(fd, TB_INVALID, "a prove before the hello");
}

/* A server without the token: a client that has one sends it nothing but its hello. */
static void false_server(void **state) {
    (void)state;
    tb__store_server *server;
    tb__store *store;
    assert_ok(tb__store_server_start("tcp://127.0.0.1:0", NULL, &server));
    assert_fails(tb__store_open(tb__store_server_url(server), TOKEN, PATIENCE_MS, &store), TB_DENIED,
                 "the token is not the server's");
    tb__store_server_stop(server);
}

static void frames(void **state) {
    const fixture *f = *state;
    static const uint8_t oversize[] = {1, 4, 0, 0}; /* 1025: more than a stranger may send */
    int fd = raw_connect(f->url);
    assert_true(raw_send(fd, oversize, sizeof oversize));
    assert_refused(fd, TB_TOO_BIG, "a frame of 1025 bytes where at most 1024 are allowed");
    static const uint8_t larger[] = {0, 0, 0x20, 0};
    fd = raw_connect(f->url);
    raw_hello(fd);
    assert_true(raw_send(fd, larger, sizeof larger));
    assert_refused(fd, TB_TOO_BIG, "a frame of 2097152 bytes");
    static const uint8_t truncated[] = {13, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, TB__STORE_GET, 5, 0, 'k', 'e'};
    fd = raw_connect(f->url);
    raw_hello(fd);
    assert_true(raw_send(fd, truncated, sizeof truncated));
    assert_refused(fd, TB_INVALID, "it ends too early");
    /* One that ends in the middle of a frame takes nothing with it. */
    fd = raw_connect(f->url);
    raw_hello(fd);
    assert_true(raw_send(fd, truncated, sizeof truncated - 3));
    close(fd);
}

static void others_keys(void **state) {
    fixture *f = *state;
    tb__store *other = open_store(f->url);
    tb__store_value present;
    uint64_t revision;
    assert_fails(tb__store_set(other, "own", "x", 1, TB__STORE_EPHEMERAL, NULL), TB_DENIED,
                 "set 'own': it belongs to another process");
    assert_fails(tb__store_set(other, "own", "x", 1, TB__STORE_PERMANENT, NULL), TB_DENIED, "another process");
    assert_fails(tb__store_delete(other, "own"), TB_DENIED, "delete 'own': it belongs to another process");
    assert_ok(tb__store_get(other, "own", &present));
    revision = present.revision;
    tb__store_value_fini(&present);
    assert_fails(tb__store_compare_and_set(other, "own", revision, "x", 1, TB__STORE_EPHEMERAL, NULL, NULL), TB_DENIED,
                 "another process");
    set_text(f->member, "permanent", "mine");
    assert_fails(tb__store_set(other, "permanent", "x", 1, TB__STORE_PERMANENT, NULL), TB_DENIED, "another process");
    assert_ok(tb__store_count(f->member, "counter", 0, 5, NULL));
    assert_fails(tb__store_set(other, "counter", "1", 1, TB__STORE_PERMANENT, NULL), TB_DENIED, "it is a counter");
    assert_fails(tb__store_delete(other, "counter"), TB_DENIED, "it is a counter");
    assert_fails(tb__store_delete(f->member, "counter"), TB_DENIED, "it is a counter");
    assert_text(f->member, "counter", "5");
    tb__store_close(other);
}

/* Without a secret a connection reads, and no more. */
static void no_secret(void **state) {
    const fixture *f = *state;
    uint8_t proof[TB__PROOF_NBYTES];
    int fd = raw_connect(f->url);
    raw_login l = raw_begin_hello(fd, TOKEN, 7);
    l.secret = (tb__store_secret){{0}};
    assert_true(raw_send_message(fd, raw_prove_message(&l, proof)));
    assert_int_equal(raw_reply(fd).status, TB_OK);
    assert_true(raw_send_message(fd, (tb__store_message){.id = 3, .op = TB__STORE_GET, .key = blob_of("own")}));
    assert_int_equal(raw_reply(fd).status, TB_OK);
    assert_true(raw_send_message(fd, (tb__store_message){.id = 4, .op = TB__STORE_SET, .key = blob_of("new")}));
    assert_int_equal(raw_reply(fd).status, TB_DENIED);
    assert_true(raw_send_message(fd, (tb__store_message){.id = 5, .op = TB__STORE_COUNT, .key = blob_of("new")}));
    assert_int_equal(raw_reply(fd).status, TB_DENIED);
    tb__store_message block = {.id = 6, .op = TB__STORE_TAKE_BLOCK, .guard = blob_of("n"), .key = blob_of("new")};
    assert_true(raw_send_message(fd, block));
    assert_int_equal(raw_reply(fd).status, TB_DENIED);
    close(fd);
    /* Another's id with one's own secret. */
    fd = raw_connect(f->url);
    l = raw_begin_hello(fd, TOKEN, 7);
    l.secret.bytes[0] ^= 1;
    assert_true(raw_send_message(fd, raw_prove_message(&l, proof)));
    assert_refused(fd, TB_DENIED, "the id in the hello is not made from the secret");
}

/* A process whose old connection is half open comes back: it has its keys at once, and the old connection is ended. */
static void take_over(void **state) {
    const fixture *f = *state;
    tb__store_secret secret;
    tb__store *old, *newer;
    assert_ok(tb__store_secret_make(&secret));
    assert_ok(tb__store_open_until(f->url, TOKEN, &secret, tb__now_ms() + PATIENCE_MS, PATIENCE_MS, &old));
    assert_ok(tb__store_set(old, "seat", "taken", 5, TB__STORE_EPHEMERAL, NULL));
    assert_ok(tb__store_open_until(f->url, TOKEN, &secret, tb__now_ms() + PATIENCE_MS, PATIENCE_MS, &newer));
    assert_text(newer, "seat", "taken");
    assert_fails(tb__store_set(old, "seat", "late", 4, TB__STORE_EPHEMERAL, NULL), TB_LOST,
                 "a newer connection of the same process has taken over");
    assert_ok(tb__store_set(newer, "seat", "kept", 4, TB__STORE_EPHEMERAL, NULL));
    tb__store_close(old);
    assert_alive(f->url);
    assert_text(newer, "seat", "kept");
    tb__store_close(newer);
    wait_for_count(f->member, "seat", 0);
}

static void forged_decision(void **state) {
    const fixture *f = *state;
    tb__directory_opts opts = {.token = TOKEN, .timeout_ms = PATIENCE_MS};
    tb__directory *lead, *rank;
    char *answer;
    assert_ok(tb__directory_open(f->url, "engine", 0, 2, &opts, &lead));
    assert_ok(tb__directory_open(f->url, "engine", 1, 2, &opts, &rank));
    uint64_t number = tb__directory_store_number(lead);
    assert_ok(tb__directory_decide(lead, number, "q", "commit", PATIENCE_MS, &answer));
    free(answer);
    tb__store *forger = open_store(f->url);
    assert_fails(tb__store_set(forger, "decisions/q", "abort 1 x", 9, TB__STORE_PERMANENT, NULL), TB_DENIED,
                 "set 'decisions/q': it is written once, and was");
    assert_fails(tb__store_delete(forger, "decisions/q"), TB_DENIED, "only the process that made it can delete it");
    assert_fails(tb__store_set(forger, "mark", "another", 7, TB__STORE_PERMANENT, NULL), TB_DENIED, "written once");
    assert_fails(tb__directory_forget(rank, "q", PATIENCE_MS), TB_DENIED, "only the process that made it");
    assert_ok(tb__directory_decide(rank, number, "q", "abort 1 x", PATIENCE_MS, &answer));
    assert_string_equal(answer, "commit");
    free(answer);
    assert_ok(tb__directory_forget(lead, "q", PATIENCE_MS));
    tb__store_close(forger);
    tb__directory_close(rank);
    tb__directory_close(lead);
}

/* Strangers that say nothing, or send a hello byte by byte, cost little and go. */
static void many_strangers(void **state) {
    const fixture *f = *state;
    enum { STRANGERS = 200 };
    int fds[STRANGERS];
    for (int i = 0; i < STRANGERS; i++) {
        fds[i] = raw_connect(f->url);
        assert_true(raw_send(fds[i], "\xc8\1\0\0", (size_t)(i % 5)));
    }
    assert_alive(f->url);
    for (int i = 0; i < STRANGERS; i++)
        close(fds[i]);
}

#define SERVED(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        SERVED(wrong_token),
        SERVED(replayed),
        SERVED(reflected),
        SERVED(downgrade),
        cmocka_unit_test(false_server),
        SERVED(frames),
        SERVED(others_keys),
        SERVED(no_secret),
        SERVED(take_over),
        SERVED(forged_decision),
        SERVED(many_strangers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
