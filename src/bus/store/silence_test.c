/* A connection with the store on which nothing comes any more, as after a cut of the network: a new one that is
 * answered takes its place. Where a new one is not answered either, the store is silent, and not lost. */
#include "bus/directory.h"
#include "bus/store/store_test.h"

#include <stdatomic.h>
#include <sys/un.h>

enum { MAX_LINKS = 16 };

/* Passes on what clients and the server say to each other, but for the first `nstopped` connections. */
typedef struct relay {
    place at, front;
    tb__store_server *server;
    int listener, wake[2];
    atomic_int nstopped, nlinks;
    int links[MAX_LINKS][2]; /* the client's end, and the server's */
    pthread_t thread;
} relay;

static void pass_on(int from, int to) {
    char bytes[1 << 16];
    ssize_t n = recv(from, bytes, sizeof bytes, MSG_DONTWAIT);
    if (n > 0)
        raw_send(to, bytes, (size_t)n);
    else if (n == 0)
        shutdown(to, SHUT_WR);
}

static void *run(void *arg) {
    relay *r = arg;
    for (;;) {
        struct pollfd fds[2 + 2 * MAX_LINKS] = {{.fd = r->wake[0], .events = POLLIN},
                                                {.fd = r->listener, .events = POLLIN}};
        int n = atomic_load(&r->nlinks), stopped = atomic_load(&r->nstopped);
        for (int i = 0; i < 2 * n; i++)
            fds[2 + i] = (struct pollfd){.fd = i / 2 < stopped ? -1 : r->links[i / 2][i % 2], .events = POLLIN};
        poll(fds, 2 + 2 * (nfds_t)n, 20);
        if (fds[0].revents)
            return NULL;
        for (int i = 0; i < 2 * n; i++) {
            if (fds[2 + i].revents)
                pass_on(r->links[i / 2][i % 2], r->links[i / 2][1 - i % 2]);
            if (fds[2 + i].revents & POLLHUP) {
                close(r->links[i / 2][i % 2]);
                r->links[i / 2][i % 2] = -1;
            }
        }
        if (fds[1].revents && n < MAX_LINKS) {
            r->links[n][0] = accept(r->listener, NULL, NULL);
            r->links[n][1] = raw_connect(r->at.url);
            atomic_store(&r->nlinks, n + 1);
        }
    }
}

static int set_up(void **state) {
    relay *r = calloc(1, sizeof *r);
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    place_make(&r->at);
    place_make(&r->front);
    assert_ok(tb__store_server_start(r->at.url, TOKEN, &r->server));
    snprintf(name.sun_path, sizeof name.sun_path, "%s", r->front.path);
    r->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(r->listener, (struct sockaddr *)&name, sizeof name), 0);
    assert_int_equal(listen(r->listener, MAX_LINKS), 0);
    assert_int_equal(pipe(r->wake), 0);
    assert_int_equal(pthread_create(&r->thread, NULL, run, r), 0);
    *state = r;
    return 0;
}

static int tear_down(void **state) {
    relay *r = *state;
    assert_int_equal(write(r->wake[1], "", 1), 1);
    pthread_join(r->thread, NULL);
    for (int i = 0; i < 2 * atomic_load(&r->nlinks); i++) {
        if (r->links[i / 2][i % 2] >= 0)
            close(r->links[i / 2][i % 2]);
    }
    close(r->wake[0]);
    close(r->wake[1]);
    close(r->listener);
    unlink(r->front.path);
    tb__store_server_stop(r->server);
    place_remove(&r->front);
    place_remove(&r->at);
    free(r);
    return 0;
}

static void a_connection_that_is_silent_is_lost(void **state) {
    relay *r = *state;
    tb__store *store = open_store(r->front.url);
    set_text(store, "key", "before");
    atomic_store(&r->nstopped, 1);
    assert_fails(tb__store_set(store, "key", "never", 5, TB__STORE_PERMANENT, NULL), TB_LOST, "a new one was answered");
    tb__store_close(store);
    assert_alive(r->front.url);
}

static void a_store_that_is_silent_is_not(void **state) {
    relay *r = *state;
    tb__store *store = open_store(r->front.url);
    tb__store_value value;
    set_text(store, "key", "before");
    atomic_store(&r->nstopped, MAX_LINKS);
    tb__store_set_timeout(store, 4000);
    assert_int_equal(tb__store_get(store, "key", &value), TB_TIMEOUT);
    atomic_store(&r->nstopped, 0);
    tb__store_set_timeout(store, PATIENCE_MS);
    assert_ok(tb__store_get(store, "key", &value));
    assert_string_equal(value.data, "before");
    tb__store_value_fini(&value);
    tb__store_close(store);
}

/* What others write comes over the new connection. */
static void a_directory_comes_back(void **state) {
    relay *r = *state;
    tb__directory_opts opts = {.token = TOKEN, .timeout_ms = PATIENCE_MS};
    tb__directory *here, *there;
    tb__roster roster = {0};
    assert_ok(tb__directory_open(r->front.url, "here", 0, 1, &opts, &here));
    assert_ok(tb__directory_open(r->at.url, "there", 0, 1, &opts, &there));
    atomic_store(&r->nstopped, 1);
    assert_ok(tb__directory_announce(there, "contact", 7, PATIENCE_MS));
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    while (roster.npresent == 0) {
        assert_true(tb__now_ms() < deadline_ms);
        tb__directory_probe_store(here, 4000);
        tb__roster_fini(&roster);
        assert_ok(tb__directory_roster(here, "there", &roster));
        poll(NULL, 0, 10);
    }
    tb__roster_fini(&roster);
    tb__directory_close(here);
    tb__directory_close(there);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_connection_that_is_silent_is_lost, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_store_that_is_silent_is_not, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_directory_comes_back, set_up, tear_down),
    };
    signal(SIGPIPE, SIG_IGN);
    return cmocka_run_group_tests_name("store, silence", tests, NULL, NULL);
}
