/* The store between processes: who wins, who is woken, what remains when somebody is killed. */
#include "bus/store/roles_test.h"

enum { NRACERS = 16, NMEETING = 20, WON = 10, LOST = 11, SERVED = 12 };

/* Roles: what the other processes do. */

static int race(const char *url, const char *arg) {
    tb__store *store;
    tb__store_value value;
    uint64_t mine = 0;
    must(tb__store_open(url, TOKEN, PATIENCE_MS, &store));
    must(await_key(store, "go", PATIENCE_MS, &value));
    tb__store_value_fini(&value);
    tb_status status =
        tb__store_compare_and_set(store, "leader", 0, arg, strlen(arg), TB__STORE_PERMANENT, &mine, &value);
    if (status == TB_CONFLICT) {
        must(value.revision > 0 && strcmp(value.data, arg) != 0 ? TB_OK : TB_INTERNAL);
        tb__store_value_fini(&value);
    } else {
        must(status);
    }
    tb__store_close(store);
    return status == TB_OK ? WON : LOST;
}

static int meet(const char *url, const char *arg) {
    tb__store *store;
    tb__store_server *server;
    char key[64];
    must(tb__store_open_or_serve(url, TOKEN, NULL, PATIENCE_MS, &store, &server));
    snprintf(key, sizeof key, "here/%s", arg);
    must(tb__store_set(store, key, "", 0, TB__STORE_EPHEMERAL, NULL));
    snprintf(key, sizeof key, "came/%s", arg);
    must(tb__store_set(store, key, "", 0, TB__STORE_PERMANENT, NULL));
    must(await_count(store, "came/", NMEETING));
    if (server)
        must(await_count(store, "here/", 1));
    tb__store_close(store);
    tb__store_server_stop(server);
    return server ? SERVED : LOST;
}

/* Another user's process, for whom the file system's permissions are no obstacle. */
static int strange(const char *url, const char *arg) {
    (void)arg;
    tb__store *store;
    tb__address address;
    must(setresuid(65534, 65534, 65534) == 0 ? TB_OK : TB_IO);
    must(tb__store_open(url, TOKEN, PATIENCE_MS, &store) == TB_DENIED ? TB_OK : TB_INTERNAL);
    must(tb__address_parse(url, &address));
    struct sockaddr_un {
        sa_family_t family;
        char path[108];
    } name = {.family = AF_UNIX};
    memcpy(name.path, address.path, sizeof name.path);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    must(connect(fd, (const struct sockaddr *)&name, sizeof name) == 0 ? TB_OK : TB_IO);
    uint8_t bytes[1024];
    tb__store_message reply;
    size_t used = 0, count = 0;
    for (ssize_t n; (n = recv(fd, bytes + count, sizeof bytes - count, 0)) > 0;)
        count += (size_t)n;
    must(decode_frame(bytes, count, sizeof bytes, &reply, &used));
    return used > 0 && reply.status == TB_DENIED ? 0 : BROKEN;
}

/* The tests. */

static void one_winner(void **state) {
    const place *p = *state;
    tb__store_server *server;
    pid_t racers[NRACERS];
    char name[16];
    assert_ok(tb__store_server_start(p->url, TOKEN, &server));
    tb__store *store = open_store(p->url);
    for (int round = 0; round < 3; round++) {
        int nwinners = 0;
        for (int i = 0; i < NRACERS; i++) {
            snprintf(name, sizeof name, "%d", i);
            racers[i] = start_role("race", p->url, name);
        }
        set_text(store, "go", "");
        for (int i = 0; i < NRACERS; i++) {
            int end = end_of(racers[i]);
            assert_true(end == WON || end == LOST);
            nwinners += end == WON;
        }
        assert_int_equal(nwinners, 1);
        delete_all(store, "");
    }
    tb__store_close(store);
    tb__store_server_stop(server);
}

static void killed_client(void **state) {
    const place *p = *state;
    tb__store_server *server;
    tb__store_value value;
    assert_ok(tb__store_server_start(p->url, TOKEN, &server));
    tb__store *store = open_store(p->url);
    pid_t pid = start_role("live", p->url, "ready");
    assert_ok(await_key(store, "ready", PATIENCE_MS, &value));
    tb__store_value_fini(&value);
    wait_for_count(store, "member/", 2);
    kill_role(pid);
    wait_for_count(store, "member/", 0);
    wait_for_count(store, "ready", 1);
    tb__store_close(store);
    tb__store_server_stop(server);
}

static void killed_server(void **state) {
    const place *p = *state;
    tb__store_value value;
    uint64_t revision;
    pid_t pid = start_server("serve", p->url, "");
    waiting w = {.store = open_store(p->url)};
    begin_waiting(&w);
    kill_role(pid);
    assert_int_equal(end_waiting(&w), TB_LOST);
    assert_fails(tb__store_set(w.store, "k", "", 0, TB__STORE_PERMANENT, NULL), TB_LOST, "set 'k': unix:/tmp/");
    assert_int_equal(tb__store_get(w.store, "k", &value), TB_LOST);
    assert_int_equal(tb__store_wait_change(w.store, "k", 0, 0, &revision), TB_LOST);
    tb__store_close(w.store);

    /* It left its socket behind, which refuses clients and is replaced by the next server. */
    tb__store *store;
    tb__store_server *server = NULL;
    assert_int_equal(access(p->path, F_OK), 0);
    assert_fails(tb__store_open(p->url, TOKEN, PATIENCE_MS, &store), TB_IO, "refused");
    assert_ok(tb__store_open_or_serve(p->url, TOKEN, NULL, PATIENCE_MS, &store, &server));
    assert_non_null(server);
    assert_alive(p->url);
    tb__store_close(store);
    tb__store_server_stop(server);
}

/* A thread that waits can be told to stop, and what the store's owner had written goes at once. */
static void hanging_up(void **state) {
    const place *p = *state;
    tb__store_server *server;
    assert_ok(tb__store_server_start(p->url, TOKEN, &server));
    tb__store *other = open_store(p->url);
    waiting w = {.store = open_store(p->url)};
    assert_ok(tb__store_set(w.store, "mine", "", 0, TB__STORE_EPHEMERAL, NULL));
    begin_waiting(&w);
    tb__store_hang_up(w.store);
    assert_int_equal(end_waiting(&w), TB_LOST);
    assert_fails(tb__store_delete(w.store, "mine"), TB_LOST, "this side has hung up");
    wait_for_count(other, "mine", 0);
    tb__store_hang_up(w.store);
    tb__store_close(w.store);
    tb__store_close(other);
    tb__store_server_stop(server);
}

static void stopped_server(void **state) {
    const place *p = *state;
    tb__store *late, *store;
    tb__store_server *server;
    pid_t pid = start_server("serve", p->url, "");
    assert_ok(tb__store_open_until(p->url, TOKEN, NULL, tb__now_ms() + PATIENCE_MS, 50, &late));
    stop_role(pid);
    assert_fails(tb__store_set(late, "k", "", 0, TB__STORE_PERMANENT, NULL), TB_TIMEOUT, "set 'k'");
    tb__store_set_timeout(late, 20);
    assert_fails(tb__store_delete(late, "k"), TB_TIMEOUT, "nothing within 20 ms");
    assert_fails(tb__store_open(p->url, TOKEN, 50, &store), TB_TIMEOUT, "silent");
    assert_fails(tb__store_open_or_serve(p->url, TOKEN, NULL, 50, &store, &server), TB_TIMEOUT, "silent");
    tb__store_close(late);
    kill_role(pid);
    assert_ok(tb__store_server_start(p->url, TOKEN, &server));
    tb__store_server_stop(server);
}

static void meet_at(const char *url) {
    pid_t pids[NMEETING];
    char name[16];
    int nserved = 0;
    for (int i = 0; i < NMEETING; i++) {
        snprintf(name, sizeof name, "%d", i);
        pids[i] = start_role("meet", url, name);
    }
    for (int i = 0; i < NMEETING; i++) {
        int end = end_of(pids[i]);
        assert_true(end == SERVED || end == LOST);
        nserved += end == SERVED;
    }
    assert_int_equal(nserved, 1);
}

static void meeting(void **state) {
    const place *p = *state;
    for (int round = 0; round < 3; round++)
        meet_at(p->url);
    /* A dead server's socket makes no difference. */
    kill_role(start_server("serve", p->url, ""));
    meet_at(p->url);
}

static void meeting_over_tcp(void **state) {
    (void)state;
    int port, fd = hold_port(&port);
    char url[64];
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
    meet_at(url);
    close(fd);
}

/* More connections than the server has descriptors for: those wait, and have their turn when others leave. */
static void few_descriptors(void **state) {
    const place *p = *state;
    enum { NFILES = 32, NCONNECTIONS = 60 };
    int fds[NCONNECTIONS];
    char nfiles[16];
    snprintf(nfiles, sizeof nfiles, "%d", NFILES);
    pid_t pid = start_server("serve", p->url, nfiles);
    for (int i = 0; i < NCONNECTIONS; i++)
        fds[i] = raw_connect(p->url);
    raw_hello(fds[0]);
    for (int i = 1; i < NCONNECTIONS; i++)
        close(fds[i]);
    assert_alive(p->url);
    close(fds[0]);
    kill_role(pid);
    tb__store_server *server;
    assert_ok(tb__store_server_start(p->url, TOKEN, &server));
    tb__store_server_stop(server);
}

/* A forked child does not keep its parent's connections and listeners open, and can't use or break them. */
static void forked_child(void **state) {
    const place *p = *state;
    tb__store_server *server;
    tb__store_value value;
    int hold[2];
    assert_int_equal(pipe(hold), 0);
    assert_ok(tb__store_server_start(p->url, TOKEN, &server));
    tb__store *store = open_store(p->url), *other = open_store(p->url);
    assert_ok(tb__store_set(store, "mine", "", 0, TB__STORE_EPHEMERAL, NULL));
    pid_t pid = fork();
    if (pid == 0) {
        bool is_lost = tb__store_get(store, "mine", &value) == TB_LOST;
        tb__store_close(store);
        tb__store_server_stop(server);
        char byte;
        close(hold[1]);
        ssize_t n = read(hold[0], &byte, 1);
        _exit(is_lost && n == 0 ? 0 : BROKEN);
    }
    assert_true(pid > 0);
    assert_alive(p->url);
    tb__store_close(store);
    wait_for_count(other, "mine", 0);
    tb__store_server_stop(server);
    assert_int_equal(tb__store_get(other, "mine", &value), TB_LOST);
    tb__store_close(other);
    assert_ok(tb__store_server_start(p->url, TOKEN, &server));
    assert_alive(p->url);
    tb__store_server_stop(server);
    close(hold[1]);
    close(hold[0]);
    assert_int_equal(end_of(pid), 0);
}

static void other_user(void **state) {
    const place *p = *state;
    if (geteuid() != 0)
        skip();
    tb__store_server *server;
    assert_ok(tb__store_server_start(p->url, TOKEN, &server));
    assert_int_equal(chmod(p->folder, 0755), 0);
    assert_int_equal(chmod(p->path, 0777), 0);
    assert_int_equal(end_of(start_role("strange", p->url, "")), 0);
    assert_alive(p->url);
    tb__store_server_stop(server);
}

static const role roles[] = {{"race", race}, {"live", live}, {"serve", serve}, {"meet", meet}, {"strange", strange}};

int main(int argc, char **argv) {
    int end;
    if (has_played(roles, sizeof roles / sizeof *roles, argc, argv, &end))
        return end;
    const struct CMUnitTest tests[] = {
        AT_A_PLACE(one_winner),       AT_A_PLACE(killed_client),   AT_A_PLACE(killed_server),
        AT_A_PLACE(hanging_up),       AT_A_PLACE(stopped_server),  AT_A_PLACE(meeting),
        AT_A_PLACE(meeting_over_tcp), AT_A_PLACE(few_descriptors), AT_A_PLACE(forked_child),
        AT_A_PLACE(other_user),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
