/* What is particular to the store in etcd: leases, tokens, endpoints, etcd ending and coming back, strange answers. */
#include "bus/store/etcd_json.h"
#include "bus/store/etcd_test.h"
#include "bus/store/etcd_token.h"
#include "bus/store/gateway.h"
#include "bus/store/roles_test.h"

enum { NATTEMPTS = 10 };

/* A namespace that no other test uses. */
static const char *fresh_url(void) {
    static char url[128];
    static int count;
    snprintf(url, sizeof url, "%s?namespace=test%d", the_etcd.url, count++);
    return url;
}

/* Posts to etcd by hand. */
static json_t *post(const char *path, const char *text) {
    tb__gateway *gateway;
    json_t *reply;
    tb__gateway_call call = {.path = path, .deadline_ms = tb__now_ms() + PATIENCE_MS};
    tb__store_url parts;
    assert_ok(tb__store_url_split(the_etcd.url, &parts));
    assert_ok(tb__gateway_create(&parts, &gateway));
    assert_ok(tb__gateway_post(gateway, &call, json_loads(text, 0, NULL), &reply));
    tb__gateway_destroy(gateway);
    return reply;
}

static void killed_client(void **state) {
    (void)state;
    const char *url = fresh_url();
    tb__store_value value;
    tb__store *store = open_store(url);
    pid_t pid = start_role("live", url, "ready");
    assert_ok(await_key(store, "ready", PATIENCE_MS, &value));
    tb__store_value_fini(&value);
    wait_for_count(store, "member/", 2);
    kill_role(pid);
    int64_t begun_ms = tb__now_ms();
    wait_for_count(store, "member/", 0);
    /* They hang on a lease, not on the connection. What is permanent stays. */
    assert_true(tb__now_ms() - begun_ms > 1000);
    wait_for_count(store, "ready", 1);
    tb__store_close(store);
}

/* A lease that is kept lives longer than a lease. */
static void kept_lease(void **state) {
    (void)state;
    const char *url = fresh_url();
    tb__store *store = open_store(url), *other = open_store(url);
    uint64_t revision;
    assert_ok(tb__store_set(store, "mine", "", 0, TB__STORE_EPHEMERAL, &revision));
    assert_int_equal(tb__store_wait_change(other, "mine", revision, 7500, &revision), TB_TIMEOUT);
    wait_for_count(other, "mine", 1);
    tb__store_close(store);
    wait_for_count(other, "mine", 0);
    tb__store_close(other);
}

static void hanging_up(void **state) {
    (void)state;
    const char *url = fresh_url();
    tb__store *other = open_store(url);
    waiting w = {.store = open_store(url)};
    assert_ok(tb__store_set(w.store, "mine", "", 0, TB__STORE_EPHEMERAL, NULL));
    begin_waiting(&w);
    int64_t begun_ms = tb__now_ms();
    tb__store_hang_up(w.store);
    assert_int_equal(end_waiting(&w), TB_LOST);
    assert_fails(tb__store_delete(w.store, "mine"), TB_LOST, "this side has hung up");
    wait_for_count(other, "mine", 0);
    assert_true(tb__now_ms() - begun_ms < PATIENCE_MS / 2);
    tb__store_hang_up(w.store);
    tb__store_close(w.store);
    tb__store_close(other);
}

static void forked_child(void **state) {
    (void)state;
    const char *url = fresh_url();
    tb__store_value value;
    tb__store *store = open_store(url);
    assert_ok(tb__store_set(store, "mine", "x", 1, TB__STORE_EPHEMERAL, NULL));
    pid_t pid = fork();
    if (pid == 0) {
        bool is_lost = tb__store_get(store, "mine", &value) == TB_LOST;
        tb__store_hang_up(store);
        tb__store_close(store);
        _exit(is_lost ? 0 : BROKEN);
    }
    assert_int_equal(end_of(pid), 0);
    assert_ok(tb__store_get(store, "mine", &value));
    assert_string_equal(value.data, "x");
    tb__store_value_fini(&value);
    tb__store_close(store);
}

/* Somebody takes the lease away. */
static void lost_lease(void **state) {
    (void)state;
    waiting w = {.store = open_store(fresh_url())};
    begin_waiting(&w);
    json_t *leases = post("/v3/lease/leases", "{}"), *lease;
    size_t i;
    assert_true(json_array_size(json_object_get(leases, "leases")) > 0);
    json_array_foreach(json_object_get(leases, "leases"), i, lease) {
        char text[64];
        snprintf(text, sizeof text, "{\"ID\":\"%lld\"}", (long long)tb__etcd_read_number(lease, "ID"));
        json_decref(post("/v3/lease/revoke", text));
    }
    json_decref(leases);
    assert_int_equal(end_waiting(&w), TB_LOST);
    assert_fails(tb__store_set(w.store, "k", "", 0, TB__STORE_EPHEMERAL, NULL), TB_LOST, "its lease has run out");
    tb__store_close(w.store);
}

static void tokens(void **state) {
    (void)state;
    char url[128], other[160];
    tb__store *store;
    snprintf(url, sizeof url, "%s", fresh_url());
    tb__store_close(open_store(url));
    assert_fails(tb__store_open(url, "close sesame, close sesame, close sesame", PATIENCE_MS, &store), TB_DENIED,
                 "tensorbus/token/test");
    assert_fails(tb__store_open(url, NULL, PATIENCE_MS, &store), TB_DENIED, "token");
    assert_fails(tb__store_open(url, TOKEN " ", PATIENCE_MS, &store), TB_DENIED, "token");
    snprintf(other, sizeof other, "%s-other", url);
    assert_ok(tb__store_open(other, "close sesame, close sesame, close sesame", PATIENCE_MS, &store));
    tb__store_close(store);
    tb__store_close(open_store(url));

    tb__verifier a, b;
    assert_ok(tb__verifier_make(TOKEN, &a));
    assert_ok(tb__verifier_make(TOKEN, &b));
    assert_string_not_equal(a.text, b.text);
    assert_true(tb__verifier_accepts(a.text, TB__VERIFIER_NBYTES, TOKEN));
    assert_false(tb__verifier_accepts(a.text, TB__VERIFIER_NBYTES - 1, TOKEN));
    a.text[TB__VERIFIER_NBYTES - 1] ^= 1;
    assert_false(tb__verifier_accepts(a.text, TB__VERIFIER_NBYTES, TOKEN));
}

static void endpoints(void **state) {
    (void)state;
    char url[160], text[160];
    int dead_port, silent_port;
    int dead = hold_port(&dead_port), silent = hold_port(&silent_port);
    tb__store *store;
    assert_int_equal(listen(silent, 8), 0);
    snprintf(url, sizeof url, "etcd://127.0.0.1:%d", dead_port);
    assert_fails(tb__store_open(url, TOKEN, PATIENCE_MS, &store), TB_IO, url);
    snprintf(url, sizeof url, "etcd://127.0.0.1:%d", silent_port);
    assert_fails(tb__store_open(url, TOKEN, 200, &store), TB_TIMEOUT, "silent");
    snprintf(text, sizeof text, "http://127.0.0.1:%d accepts connections but does not answer within ", silent_port);
    assert_non_null(strstr(tb_error_detail(), text));
    assert_non_null(strstr(tb_error_detail(), " ms: is it etcd?"));
    tb__store_server *server;
    assert_fails(tb__store_open_or_serve(url, TOKEN, NULL, 200, &store, &server), TB_TIMEOUT, "silent");
    snprintf(url, sizeof url, "etcd://127.0.0.1:%d,127.0.0.1:%d,127.0.0.1:%d", dead_port, silent_port,
             the_etcd.port[0]);
    assert_alive(url);
    close(dead);
    close(silent);
    static const char *const bad[] = {"etcd:",      "etcd://",      "etcd://h",       "etcd://h:1,",
                                      "etcd://h:0", "etcd://a/b:1", "etcd://::1:200", "etcd://u@h:1"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(tb__store_open(bad[i], TOKEN, PATIENCE_MS, &store), TB_INVALID);
}

/* More keys than a page has, in order, and one revision for all of them. */
static void pages(void **state) {
    (void)state;
    enum { COUNT = 600 };
    tb__store *store = open_store(fresh_url());
    tb__store_entries entries;
    char key[16];
    uint64_t last = 0;
    for (int i = 0; i < COUNT; i++) {
        snprintf(key, sizeof key, "k/%03d", i);
        assert_ok(tb__store_set(store, key, key, strlen(key), TB__STORE_PERMANENT, &last));
    }
    set_text(store, "k0", "not under the prefix");
    assert_ok(tb__store_list(store, "k/", &entries));
    assert_int_equal(entries.count, COUNT);
    assert_true(entries.revision > last);
    for (int i = 0; i < COUNT; i++) {
        snprintf(key, sizeof key, "k/%03d", i);
        assert_string_equal(entries.item[i].key, key);
        assert_string_equal(entries.item[i].value.data, key);
    }
    tb__store_entries_fini(&entries);
    delete_all(store, "k/");
    wait_for_count(store, "", 1);
    tb__store_close(store);
}

/* etcd ends, and nobody answers for longer than the lease lasts. */
static void lost_etcd(void **state) {
    (void)state;
    const char *url = fresh_url();
    tb__store_value value;
    waiting w = {.store = open_store(url)};
    set_text(w.store, "stays", "x");
    assert_ok(tb__store_set(w.store, "goes", "x", 1, TB__STORE_EPHEMERAL, NULL));
    begin_waiting(&w);
    etcd_kill(&the_etcd);
    tb__store_set_timeout(w.store, 100);
    assert_fails(tb__store_get(w.store, "stays", &value), TB_TIMEOUT, " ms: etcd://127");
    assert_int_equal(end_waiting(&w), TB_LOST);
    assert_fails(tb__store_get(w.store, "stays", &value), TB_LOST, "the connection was lost: nothing within");
    tb__store_close(w.store);
    etcd_run(&the_etcd);
    await_store(the_etcd.url);
    tb__store *store = open_store(url);
    wait_for_count(store, "stays", 1);
    wait_for_count(store, "goes", 0);
    tb__store_close(store);
}

/* etcd ends and comes back soon enough. Returns false if it took too long to tell. */
static bool survive(void) {
    const char *url = fresh_url();
    waiting w = {.store = open_store(url)};
    assert_ok(tb__store_set(w.store, "mine", "x", 1, TB__STORE_EPHEMERAL, NULL));
    begin_waiting(&w);
    int64_t begun_ms = tb__now_ms();
    etcd_kill(&the_etcd);
    etcd_run(&the_etcd);
    await_store(the_etcd.url);
    bool is_soon = tb__now_ms() - begun_ms < 2500;
    if (!is_soon)
        tb__store_hang_up(w.store);
    tb__store *other = open_store(url);
    set_text(other, "key", "x");
    tb_status status = end_waiting(&w);
    if (is_soon) {
        assert_int_equal(status, TB_OK);
        wait_for_count(w.store, "mine", 1);
        wait_for_count(w.store, "key", 1);
    }
    tb__store_close(other);
    tb__store_close(w.store);
    return is_soon;
}

static void restarted_etcd(void **state) {
    (void)state;
    for (int i = 0; i < NATTEMPTS; i++) {
        if (survive())
            return;
    }
    skip(); /* this machine is too slow for it */
}

/* A server that sends the same whatever it is asked. */
typedef struct stranger {
    int fd;
    const char *answer;
} stranger;

static void *answer_all(void *arg) {
    stranger *s = arg;
    char request[4096];
    for (int fd; (fd = accept(s->fd, NULL, NULL)) >= 0; close(fd)) {
        if (recv(fd, request, sizeof request, 0) > 0)
            raw_send(fd, s->answer, strlen(s->answer));
    }
    return NULL;
}

static void strange_answers(void **state) {
    (void)state;
    static const struct {
        const char *http; /* NULL: the body is all that is sent */
        const char *body;
        tb_status status;
        const char *text;
    } cases[] = {
        {"404 Not Found", "Not Found", TB_REFUSED, "not etcd 3.4"},
        {"200 OK", "hello", TB_REFUSED, "not JSON"},
        {"200 OK", "{}", TB_IO, "refuses a change"},
        {"200 OK", "{\"succeeded\":true}", TB_REFUSED, "grants no leases"},
        {"200 OK", "{\"kvs\":[{\"key\":\"?\",\"value\":1}]}", TB_IO, "an entry without mod_revision"},
        {"200 OK", "{\"kvs\":[{\"value\":\"?\",\"mod_revision\":\"3\"}]}", TB_IO, "an entry without mod_revision"},
        {"200 OK", "{\"kvs\":[{\"value\":\"QUJD\",\"mod_revision\":\"3\"}]}", TB_DENIED, "token"},
        {"403 Forbidden", "{\"code\":7,\"message\":\"go away\"}", TB_DENIED, "go away"},
        {"503 Unavailable", "{\"code\":14,\"message\":\"no leader\"}", TB_TIMEOUT, "no leader"},
        {NULL, "220 mail.example.com ESMTP\r\n\r\n", TB_REFUSED, " answers, but not in HTTP: is it etcd?"},
        {NULL, "SSH-2.0-OpenSSH_9.2\r\n", TB_REFUSED, " answers, but not in HTTP: is it etcd?"},
        {NULL, "", TB_TIMEOUT, " closes connections without an answer: is it etcd?"},
    };
    char url[64], answer[256];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int port;
        pthread_t thread;
        tb__store *store;
        stranger s = {.fd = hold_port(&port), .answer = cases[i].http ? answer : cases[i].body};
        if (cases[i].http)
            snprintf(answer, sizeof answer, "HTTP/1.1 %s\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n%s",
                     cases[i].http, strlen(cases[i].body), cases[i].body);
        assert_int_equal(listen(s.fd, 8), 0);
        assert_int_equal(pthread_create(&thread, NULL, answer_all, &s), 0);
        snprintf(url, sizeof url, "etcd://127.0.0.1:%d", port);
        /* Where it is worth another try the time passes. */
        int timeout_ms = cases[i].status == TB_TIMEOUT ? 300 : PATIENCE_MS;
        assert_fails(tb__store_open(url, TOKEN, timeout_ms, &store), cases[i].status, cases[i].text);
        shutdown(s.fd, SHUT_RDWR);
        pthread_join(thread, NULL);
        close(s.fd);
    }
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "live") == 0)
        return live(argv[2], argv[3]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(killed_client), cmocka_unit_test(kept_lease),     cmocka_unit_test(hanging_up),
        cmocka_unit_test(forked_child),  cmocka_unit_test(lost_lease),     cmocka_unit_test(tokens),
        cmocka_unit_test(endpoints),     cmocka_unit_test(pages),          cmocka_unit_test(strange_answers),
        cmocka_unit_test(lost_etcd),     cmocka_unit_test(restarted_etcd),
    };
    return etcd_is_missing() ? SKIPPED : cmocka_run_group_tests(tests, start_the_etcd, stop_the_etcd);
}
