/* What the store's tests share: a folder of their own, raw connections, other processes. */
#ifndef TB_BUS_STORE_STORE_TEST_H
#define TB_BUS_STORE_STORE_TEST_H

#include "bus/store/address.h"
#include "bus/store/protocol.h"
#include "bus/store/server.h"

#include "base/mem.h"

#include "../tests/support/asserts.h"

#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* Long enough for any machine; only a hang takes it. */
enum { PATIENCE_MS = 60000 };

#define TOKEN "open sesame"

/* A folder of its own with the URL of a socket in it. */
typedef struct place {
    char folder[64], path[80], url[128];
} place;

/* Where the places are instead, for tests that are about another store: each has a namespace of its own. */
static const char *store_of_places;

static inline void place_make(place *p) {
    static int count;
    *p = (place){.folder = "/tmp/tb-store-XXXXXX"};
    assert_non_null(mkdtemp(p->folder));
    snprintf(p->path, sizeof p->path, "%s/s", p->folder);
    if (store_of_places)
        snprintf(p->url, sizeof p->url, "%s?namespace=place%d", store_of_places, count++);
    else
        snprintf(p->url, sizeof p->url, "unix:%s", p->path);
}

/* Fails if anything is left in it. */
static inline void place_remove(const place *p) {
    assert_int_equal(rmdir(p->folder), 0);
}

static inline int make_place(void **state) {
    place *p = calloc(1, sizeof *p);
    place_make(p);
    *state = p;
    return 0;
}

static inline int remove_place(void **state) {
    place_remove(*state);
    free(*state);
    return 0;
}

#define AT_A_PLACE(test) cmocka_unit_test_setup_teardown(test, make_place, remove_place)

static inline tb__store *open_store(const char *url) {
    tb__store *store = NULL;
    assert_ok(tb__store_open(url, TOKEN, PATIENCE_MS, &store));
    return store;
}

static inline void set_text(tb__store *store, const char *key, const char *text) {
    assert_ok(tb__store_set(store, key, text, strlen(text), TB__STORE_PERMANENT, NULL));
}

/* Works as usual for everybody else. */
static inline void assert_alive(const char *url) {
    tb__store *store = open_store(url);
    tb__store_value value;
    set_text(store, "alive", "yes");
    assert_ok(tb__store_get(store, "alive", &value));
    assert_string_equal(value.data, "yes");
    tb__store_value_fini(&value);
    tb__store_close(store);
}

/* Returns once somebody answers there, who is being started. Not open_or_serve, which would serve. */
static inline void await_store(const char *url) {
    tb__store *store;
    tb_status status;
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    while ((status = tb__store_open(url, TOKEN, PATIENCE_MS, &store)) == TB_IO && tb__now_ms() < deadline_ms)
        poll(NULL, 0, 2);
    assert_ok(status);
    tb__store_close(store);
}

/* The number of keys under the prefix reaches what is wanted. */
static inline tb_status await_count(tb__store *store, const char *prefix, size_t wanted) {
    for (;;) {
        tb__store_entries entries;
        TB_TRY(tb__store_list(store, prefix, &entries));
        size_t count = entries.count;
        uint64_t revision = entries.revision;
        tb__store_entries_fini(&entries);
        if (count == wanted)
            return TB_OK;
        TB_TRY(tb__store_wait_change(store, prefix, revision, PATIENCE_MS, &revision));
    }
}

static inline void wait_for_count(tb__store *store, const char *prefix, size_t wanted) {
    assert_ok(await_count(store, prefix, wanted));
}

/* A thread that waits for "key". */
typedef struct waiting {
    tb__store *store;
    pthread_t thread;
    tb_status status;
} waiting;

static inline void *wait_for_key(void *arg) {
    waiting *w = arg;
    tb__store_value value;
    w->status = tb__store_wait(w->store, "key", 10 * PATIENCE_MS, &value);
    if (w->status == TB_OK)
        tb__store_value_fini(&value);
    return NULL;
}

static inline void begin_waiting(waiting *w) {
    assert_int_equal(pthread_create(&w->thread, NULL, wait_for_key, w), 0);
}

/* How it ended. */
static inline tb_status end_waiting(waiting *w) {
    assert_int_equal(pthread_join(w->thread, NULL), 0);
    return w->status;
}

/* Bound, but not listening: nobody else is given the port, and whoever asks for it by number may listen. */
static inline int hold_port(int *port) {
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof name;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on), 0);
    assert_int_equal(bind(fd, (const struct sockaddr *)&name, sizeof name), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&name, &length), 0);
    *port = ntohs(name.sin_port);
    return fd;
}

/* Connections without a client behind them. */
static inline int raw_connect(const char *url) {
    tb__address address;
    int fd = -1;
    assert_ok(tb__address_parse(url, &address));
    assert_ok(tb__address_connect(&address, tb__now_ms() + PATIENCE_MS, &fd, &(int){0}));
    return fd;
}

/* False if the other side has hung up, or takes no more (when it need not take all). */
static inline bool raw_send(int fd, const void *data, size_t nbytes) {
    const char *at = data;
    while (nbytes > 0) {
        ssize_t n = send(fd, at, nbytes, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) {
            struct pollfd writable = {.fd = fd, .events = POLLOUT};
            assert_int_equal(poll(&writable, 1, PATIENCE_MS), 1);
            continue;
        }
        if (n < 0)
            return false;
        at += n;
        nbytes -= (size_t)n;
    }
    return true;
}

static inline bool raw_send_message(int fd, tb__store_message message) {
    tb__bytes bytes = {0};
    assert_ok(tb__store_encode(&message, &bytes));
    bool is_sent = raw_send(fd, bytes.item, bytes.count);
    free(bytes.item);
    return is_sent;
}

static inline tb__span span_of(const char *text) {
    return (tb__span){.data = (const uint8_t *)text, .nbytes = strlen(text)};
}

/* Reads the next reply into `in`, whose frames before it are consumed; false at the end of the connection. */
static inline bool raw_receive(int fd, tb__bytes *in, size_t *consumed, tb__store_message *reply) {
    for (;;) {
        size_t used;
        assert_ok(tb__store_decode(in->item + *consumed, in->count - *consumed, TB__STORE_MAX_REPLY, reply, &used));
        *consumed += used;
        if (used > 0)
            return true;
        memmove(in->item, in->item + *consumed, in->count - *consumed);
        in->count -= *consumed;
        *consumed = 0;
        struct pollfd readable = {.fd = fd, .events = POLLIN};
        assert_int_equal(poll(&readable, 1, PATIENCE_MS), 1);
        assert_true(tb__vec_reserve(in, 1 << 16));
        ssize_t n = recv(fd, in->item + in->count, 1 << 16, 0);
        if (n <= 0)
            return false;
        in->count += (size_t)n;
    }
}

/* One reply; its spans are gone. */
static inline tb__store_message raw_reply(int fd) {
    tb__bytes in = {0};
    size_t consumed = 0;
    tb__store_message reply = {0};
    assert_true(tb__vec_reserve(&in, 1));
    assert_true(raw_receive(fd, &in, &consumed, &reply));
    assert_true(reply.is_reply);
    free(in.item);
    return reply;
}

static inline void raw_hello(int fd) {
    assert_true(
        raw_send_message(fd, (tb__store_message){.id = 1, .version = TB__STORE_VERSION, .value = span_of(TOKEN)}));
    assert_int_equal(raw_reply(fd).status, TB_OK);
}

/* This program again, with a role to play instead of the tests. Processes are started afresh rather than forked,
 * because ThreadSanitizer does not follow threads made after a fork. */
static inline pid_t start_role(const char *role, const char *url, const char *arg) {
    extern char **environ;
    char path[4096]; /* glibc's name for how we were called: /proc need not be there */
    assert_non_null(realpath(program_invocation_name, path));
    char *argv[] = {path, (char *)(uintptr_t)role, (char *)(uintptr_t)url, (char *)(uintptr_t)arg, NULL};
    pid_t pid = -1;
    assert_int_equal(posix_spawn(&pid, path, NULL, NULL, argv, environ), 0);
    return pid;
}

/* The exit status, or minus the signal. */
static inline int end_of(pid_t pid) {
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static inline void kill_role(pid_t pid) {
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(end_of(pid), -SIGKILL);
}

/* Until SIGCONT. */
static inline void stop_role(pid_t pid) {
    int status = 0;
    assert_int_equal(kill(pid, SIGSTOP), 0);
    assert_int_equal(waitpid(pid, &status, WUNTRACED), pid); /* its other threads run on until then */
    assert_true(WIFSTOPPED(status));
}

#endif
