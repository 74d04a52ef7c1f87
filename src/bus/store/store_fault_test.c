/* What a store's server puts up with: pending_hello, nonsense, silence, crowds, files that are in the way. */
#include "bus/store/store_test.h"

#include <sys/resource.h>
#include <sys/un.h>

typedef struct fixture {
    place at;
    tb__store_server *server;
} fixture;

static int set_up_limited(void **state, const tb__store_limits *limits) {
    fixture *f = calloc(1, sizeof *f);
    place_make(&f->at);
    assert_ok(tb__store_server_start_limited(f->at.url, TOKEN, limits, &f->server));
    *state = f;
    return 0;
}

static int set_up(void **state) {
    return set_up_limited(state, &(tb__store_limits){0});
}

static int set_up_small(void **state) {
    return set_up_limited(state, &(tb__store_limits){.max_sessions = 10, .max_table_nbytes = 4096});
}

static int set_up_impatient(void **state) {
    return set_up_limited(state, &(tb__store_limits){.hello_timeout_ms = 50});
}

static int tear_down(void **state) {
    fixture *f = *state;
    tb__store_server_stop(f->server);
    place_remove(&f->at);
    free(f);
    return 0;
}

static void wrong_token(void **state) {
    fixture *f = *state;
    static const char *const tokens[] = {"", TOKEN "!", "Open sesame, open sesame, open sesame",
                                         "open sesame, open sesame, open sesam"};
    tb__store *store;
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
        assert_fails(tb__store_open(f->at.url, tokens[i], PATIENCE_MS, &store), TB_DENIED, "token");
    assert_int_equal(tb__store_open(f->at.url, NULL, PATIENCE_MS, &store), TB_DENIED);
    char longest[TB__TOKEN_MAX + 2];
    memset(longest, 't', sizeof longest);
    longest[TB__TOKEN_MAX + 1] = '\0';
    assert_fails(tb__store_open(f->at.url, longest, PATIENCE_MS, &store), TB_TOO_BIG, "511 bytes; 510 are allowed");
    longest[TB__TOKEN_MAX] = '\0';
    assert_int_equal(tb__store_open(f->at.url, longest, PATIENCE_MS, &store), TB_DENIED);
    assert_fails(tb__store_open(f->at.url, "open sesame", PATIENCE_MS, &store), TB_INVALID, "at least 32");
    assert_alive(f->at.url);
}

/* The server's answer to these bytes is this status with this text in its sentence, and the end. */
static void assert_refused(int fd, tb_status status, const char *text) {
    tb__bytes in = {0};
    size_t consumed = 0;
    tb__store_message reply;
    char sentence[512];
    assert_true(tb__vec_reserve(&in, 1));
    assert_true(raw_receive(fd, &in, &consumed, &reply));
    assert_int_equal(reply.status, status);
    snprintf(sentence, sizeof sentence, "%.*s", (int)reply.value.nbytes, (const char *)reply.value.data);
    if (!strstr(sentence, text))
        fail_msg("'%s' lacks '%s'", sentence, text);
    assert_false(raw_receive(fd, &in, &consumed, &reply));
    free(in.item);
    close(fd);
}

static void wrong_version(void **state) {
    fixture *f = *state;
    int fd = raw_connect(f->at.url);
    assert_true(raw_send_message(fd, (tb__store_message){.id = 1, .version = 999}));
    assert_refused(fd, TB_REFUSED, "version 999 of the store's protocol, the server version 5");
    /* The rest of a hello may look different in another version. */
    static const uint8_t future[] = {23,  0,   0,   0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 'T',
                                     'B', 'K', 'V', 6, 0, 0, 0, 1, 2, 3, 4, 5, 6};
    fd = raw_connect(f->at.url);
    assert_true(raw_send(fd, future, sizeof future));
    assert_refused(fd, TB_REFUSED, "version 6");
    assert_alive(f->at.url);
}

static void not_a_client(void **state) {
    fixture *f = *state;
    static const char http[] = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    int fd = raw_connect(f->at.url);
    assert_true(raw_send(fd, http, sizeof http - 1));
    assert_refused(fd, TB_TOO_BIG, "at most");
    static const uint8_t other[] = {19, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 'T', 'B', 'X', 'X', 3, 0, 0, 0, 0, 0};
    fd = raw_connect(f->at.url);
    assert_true(raw_send(fd, other, sizeof other));
    assert_refused(fd, TB_INVALID, "hello");
    fd = raw_connect(f->at.url);
    assert_true(raw_send_message(fd, (tb__store_message){.id = 1, .op = TB__STORE_GET, .key = blob_of("k")}));
    assert_refused(fd, TB_INVALID, "get before the hello");
    assert_alive(f->at.url);
}

/* Each of these after a proper hello. */
static void malformed(void **state) {
    fixture *f = *state;
    static const struct {
        size_t nbytes;
        uint8_t bytes[32];
        tb_status status;
        const char *text;
    } cases[] = {
        {4, {0, 0, 0, 0}, TB_INVALID, "ends too early"},
        {12, {8, 0, 0, 0, 9}, TB_INVALID, "ends too early"},
        {13, {9, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, TB__STORE_NOPS}, TB_INVALID, "no such operation"},
        {13, {9, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, TB__STORE_GET}, TB_INVALID, "ends too early"},
        {15, {11, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, TB__STORE_GET, 0, 0}, TB_INVALID, "key is empty"},
        {15, {11, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, TB__STORE_GET, 2, 0}, TB_INVALID, "ends too early"},
        {15, {11, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, TB__STORE_GET, 0, 255}, TB_INVALID, "too long"},
        {16, {12, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, TB__STORE_GET, 1, 0, 0}, TB_INVALID, "NUL"},
        {17, {13, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, TB__STORE_GET, 1, 0, 'k', 1}, TB_INVALID, "bytes follow"},
        {21, {17, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, TB__STORE_SET, 1, 0, 'k', 0, 0, 0, 0, 3}, TB_INVALID, "lifetime"},
        {20, {16, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, TB__STORE_SET, 1, 0, 'k', 1, 0, 16, 0}, TB_INVALID, "too long"},
        {14, {10, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0x80 | TB__STORE_CANCEL, 0}, TB_INVALID, "a request was expected"},
        {14, {10, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0x80 | TB__STORE_CANCEL, 99}, TB_INVALID, "no such status"},
        {4, {255, 255, 255, 255}, TB_TOO_BIG, "4294967295 bytes"},
        {4, {0, 0, 64, 0}, TB_TOO_BIG, "4194304 bytes"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int fd = raw_connect(f->at.url);
        raw_hello(fd);
        assert_true(raw_send(fd, cases[i].bytes, cases[i].nbytes));
        assert_refused(fd, cases[i].status, cases[i].text);
    }
    int fd = raw_connect(f->at.url);
    raw_hello(fd);
    assert_true(raw_send_message(fd, (tb__store_message){.id = 2, .version = TB__STORE_VERSION}));
    assert_refused(fd, TB_INVALID, "second hello");
    assert_alive(f->at.url);
}

static void nonsense(void **state) {
    fixture *f = *state;
    uint64_t random = 88172645463325252u;
    for (int round = 0; round < 500; round++) {
        uint8_t bytes[256];
        for (size_t i = 0; i < sizeof bytes; i++) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            bytes[i] = (uint8_t)random;
        }
        /* Half of them are frames as far as their length and operation go. */
        if (round % 2) {
            memset(bytes + 1, 0, 3);
            bytes[12] %= TB__STORE_NOPS;
        }
        int fd = raw_connect(f->at.url);
        if (round % 4 >= 2)
            raw_hello(fd);
        raw_send(fd, bytes, sizeof bytes);
        close(fd);
    }
    assert_alive(f->at.url);
}

/* A request that comes byte by byte is as good as any other; half of one is nothing. */
static void half_frames(void **state) {
    fixture *f = *state;
    int slow = raw_connect(f->at.url), half = raw_connect(f->at.url);
    raw_hello(slow);
    raw_hello(half);
    tb__bytes bytes = {0};
    assert_ok(tb__store_encode(
        &(tb__store_message){.id = 7, .op = TB__STORE_SET, .key = blob_of("slow"), .value = blob_of("value")}, &bytes));
    assert_true(raw_send(half, bytes.item, bytes.count - 1));
    for (size_t i = 0; i < bytes.count; i++)
        assert_true(raw_send(slow, bytes.item + i, 1));
    assert_int_equal(raw_reply(slow).id, 7);
    assert_alive(f->at.url);
    close(half);
    close(slow);
    free(bytes.item);
}

static void silence(void **state) {
    fixture *f = *state;
    int silent = raw_connect(f->at.url), half = raw_connect(f->at.url);
    assert_true(raw_send(half, "\x10", 1));
    assert_refused(silent, TB_TIMEOUT, "no hello within 50 ms");
    assert_refused(half, TB_TIMEOUT, "no hello within 50 ms");
}

static void crowd(void **state) {
    fixture *f = *state;
    enum { MAX = 10 };
    tb__store *stores[MAX], *store;
    for (int i = 0; i < MAX; i++)
        stores[i] = open_store(f->at.url);
    assert_fails(tb__store_open(f->at.url, TOKEN, PATIENCE_MS, &store), TB_LOST, "has 10 connections");
    tb__store_close(stores[0]);
    tb__store_server *server;
    assert_ok(tb__store_open_or_serve(f->at.url, TOKEN, NULL, PATIENCE_MS, &stores[0], &server));
    assert_null(server);
    for (int i = 0; i < MAX; i++)
        tb__store_close(stores[i]);
}

static void full(void **state) {
    fixture *f = *state;
    static const char bytes[1500];
    tb__store *store = open_store(f->at.url);
    assert_ok(tb__store_set(store, "1", bytes, sizeof bytes, TB__STORE_PERMANENT, NULL));
    assert_ok(tb__store_set(store, "2", bytes, sizeof bytes, TB__STORE_PERMANENT, NULL));
    assert_fails(tb__store_set(store, "3", bytes, sizeof bytes, TB__STORE_PERMANENT, NULL), TB_TOO_BIG, "full");
    assert_ok(tb__store_set(store, "2", bytes, sizeof bytes, TB__STORE_PERMANENT, NULL));
    assert_ok(tb__store_delete(store, "1"));
    assert_ok(tb__store_set(store, "3", bytes, sizeof bytes, TB__STORE_PERMANENT, NULL));
    tb__store_close(store);
}

static void too_many_waits(void **state) {
    fixture *f = *state;
    enum { MAX = 1024 };
    int fd = raw_connect(f->at.url);
    raw_hello(fd);
    for (uint64_t i = 0; i <= MAX; i++)
        assert_true(
            raw_send_message(fd, (tb__store_message){.id = 10 + i, .op = TB__STORE_WAIT_CHANGE, .key = blob_of("k")}));
    tb__store_message reply = raw_reply(fd);
    assert_int_equal(reply.id, 10 + MAX);
    assert_int_equal(reply.status, TB_REFUSED);
    assert_true(raw_send_message(fd, (tb__store_message){.id = 10, .op = TB__STORE_CANCEL}));
    assert_true(
        raw_send_message(fd, (tb__store_message){.id = 5, .op = TB__STORE_WAIT_CHANGE, .key = blob_of("other")}));
    tb__store *store = open_store(f->at.url);
    set_text(store, "other", "");
    assert_int_equal(raw_reply(fd).id, 5);
    tb__store_close(store);
    close(fd);
    assert_alive(f->at.url);
}

/* Asks and asks, and reads no reply: it waits for itself, and for nobody else. */
static void slow_reader(void **state) {
    fixture *f = *state;
    enum { NREQUESTS = 100 };
    uint8_t *bytes = calloc(1, TB__STORE_MAX_VALUE);
    tb__store *store = open_store(f->at.url);
    assert_ok(tb__store_set(store, "big", bytes, TB__STORE_MAX_VALUE, TB__STORE_PERMANENT, NULL));
    int fd = raw_connect(f->at.url);
    raw_hello(fd);
    for (uint64_t i = 1; i <= NREQUESTS; i++)
        assert_true(raw_send_message(fd, (tb__store_message){.id = i, .op = TB__STORE_GET, .key = blob_of("big")}));
    for (int i = 0; i < 20; i++)
        assert_alive(f->at.url);
    tb__bytes in = {0};
    size_t consumed = 0;
    assert_true(tb__vec_reserve(&in, 1));
    for (uint64_t i = 1; i <= NREQUESTS; i++) {
        tb__store_message reply;
        assert_true(raw_receive(fd, &in, &consumed, &reply));
        assert_int_equal(reply.id, i);
        assert_int_equal(reply.value.nbytes, TB__STORE_MAX_VALUE);
    }
    free(in.item);
    free(bytes);
    close(fd);
    tb__store_close(store);
}

static void thousands(void **state) {
    fixture *f = *state;
    enum { WANTED = 3000 };
    struct rlimit limit;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = limit.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
    /* Both ends of each are in this process. */
    size_t count = limit.rlim_cur < 2 * WANTED + 100 ? (size_t)(limit.rlim_cur - 100) / 2 : WANTED;
    int *fds = calloc(count, sizeof *fds);
    for (size_t i = 0; i < count; i++) {
        fds[i] = raw_connect(f->at.url);
        raw_hello(fds[i]);
        assert_true(
            raw_send_message(fds[i], (tb__store_message){.id = 2, .op = TB__STORE_WAIT_CHANGE, .key = blob_of("go")}));
    }
    tb__store *store = open_store(f->at.url);
    set_text(store, "go", "now");
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(raw_reply(fds[i]).revision, 1);
        close(fds[i]);
    }
    tb__store_close(store);
    free(fds);
}

static void bind_socket(const char *path, bool is_listening, int *fd) {
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    snprintf(name.sun_path, sizeof name.sun_path, "%s", path);
    *fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(*fd, (const struct sockaddr *)&name, sizeof name), 0);
    if (is_listening)
        assert_int_equal(listen(*fd, 1), 0);
}

static void files(void **state) {
    (void)state;
    place p;
    struct stat made;
    char lock[128];
    tb__store_server *server, *second;
    tb__store *store;
    int fd;
    place_make(&p);
    snprintf(lock, sizeof lock, "%s.lock", p.path);
    assert_fails(tb__store_open(p.url, TOKEN, PATIENCE_MS, &store), TB_IO, "the socket is missing");

    /* A stale socket is replaced. */
    bind_socket(p.path, false, &fd);
    close(fd);
    assert_fails(tb__store_open(p.url, TOKEN, PATIENCE_MS, &store), TB_IO, "refused");
    assert_ok(tb__store_server_start(p.url, TOKEN, &server));
    assert_int_equal(stat(p.path, &made), 0);
    assert_int_equal(made.st_mode & 0777, 0600);

    /* A living server's is not, even if its lock file is gone. */
    assert_fails(tb__store_server_start(p.url, TOKEN, &second), TB_CONFLICT, "another process");
    assert_alive(p.url);
    assert_int_equal(unlink(lock), 0);
    assert_fails(tb__store_server_start(p.url, TOKEN, &second), TB_CONFLICT, "its lock file was deleted");
    assert_alive(p.url);
    tb__store_server_stop(server);
    assert_int_equal(access(p.path, F_OK), -1);
    assert_int_equal(access(lock, F_OK), -1);

    /* Nor is somebody else's: one who listens and never answers. */
    bind_socket(p.path, true, &fd);
    assert_fails(tb__store_server_start(p.url, TOKEN, &server), TB_CONFLICT, "it is not tensorbus");
    assert_fails(tb__store_open(p.url, TOKEN, 30, &store), TB_TIMEOUT, "silent");
    assert_fails(tb__store_open_or_serve(p.url, TOKEN, NULL, 30, &store, &server), TB_TIMEOUT, "silent");
    close(fd);
    assert_int_equal(unlink(p.path), 0);

    /* Nor is a file of another kind. */
    FILE *file = fopen(p.path, "w");
    assert_non_null(file);
    fclose(file);
    assert_fails(tb__store_server_start(p.url, TOKEN, &server), TB_INVALID, "not a socket");
    assert_int_equal(unlink(p.path), 0);
    place_remove(&p);
    assert_fails(tb__store_server_start(p.url, TOKEN, &server), TB_IO, "the folder of this socket does not exist");
    assert_fails(tb__store_server_start("tcp://192.0.2.1:0", TOKEN, &server), TB_REFUSED, "this host");
    /* Another way to write 127.0.0.1, as a host's name in its /etc/hosts may be. */
    assert_fails(tb__store_server_start("tcp://0x7f000001:0", TOKEN, &server), TB_REFUSED,
                 "'0x7f000001' is 127.0.0.1 here, which no other host reaches");
    assert_fails(tb__store_open_or_serve("tcp://0x7f000001:1", TOKEN, NULL, 30, &store, &server), TB_TIMEOUT,
                 "nobody listens there; nor can this process serve it: ");
    assert_fails(tb__store_open("tcp://127.0.0.1:0", TOKEN, 10, &store), TB_INVALID, "port 0");
}

#define SERVED(test)       cmocka_unit_test_setup_teardown(test, set_up, tear_down)
#define SERVED_SMALL(test) cmocka_unit_test_setup_teardown(test, set_up_small, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        SERVED(wrong_token),
        SERVED(wrong_version),
        SERVED(not_a_client),
        SERVED(malformed),
        SERVED(nonsense),
        SERVED(half_frames),
        cmocka_unit_test_setup_teardown(silence, set_up_impatient, tear_down),
        SERVED_SMALL(crowd),
        SERVED_SMALL(full),
        SERVED(too_many_waits),
        SERVED(slow_reader),
        SERVED(thousands),
        cmocka_unit_test(files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
