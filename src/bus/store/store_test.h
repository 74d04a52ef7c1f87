/* What the store's tests share: a folder of their own, raw connections, other processes. */
#ifndef TB_BUS_STORE_STORE_TEST_H
#define TB_BUS_STORE_STORE_TEST_H

#include "bus/protocol/protocol.h"
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

#define TOKEN "open sesame, open sesame, open sesame"

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

/* Sleeps until the key exists. */
static inline tb_status await_key(tb__store *store, const char *key, int timeout_ms, tb__store_value *out) {
    int64_t deadline_ms = tb__now_ms() + timeout_ms;
    for (;;) {
        tb__store_entries entries;
        TB_TRY(tb__store_list(store, key, &entries));
        uint64_t revision = entries.revision;
        tb__store_entries_fini(&entries);
        TB_TRY(tb__store_get(store, key, out));
        if (out->data)
            return TB_OK;
        TB_TRY(tb__store_wait_change(store, key, revision, tb__ms_until(deadline_ms), &revision));
    }
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
    w->status = await_key(w->store, "key", 10 * PATIENCE_MS, &value);
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

static inline tb__blob blob_of(const char *text) {
    return (tb__blob){.data = (const uint8_t *)text, .nbytes = strlen(text)};
}

/* Reads the frame that the bytes begin with; `used` is its size, or 0 if more is needed. */
static inline tb_status decode_frame(const uint8_t *data, size_t nbytes, size_t max_nbytes, tb__store_message *out,
                                     size_t *used) {
    tb__frame_reader reader = {.bytes = {.item = (uint8_t *)(uintptr_t)data, .count = nbytes},
                               .max_nbytes = max_nbytes};
    tb__blob frame;
    bool has_frame;
    *used = 0;
    TB_TRY(tb__frame_next(&reader, &frame, &has_frame));
    *used = has_frame ? reader.taken : 0;
    return has_frame ? tb__store_decode(frame, out) : TB_OK;
}

/* Reads the next reply into `in`, whose frames before it are consumed; false at the end of the connection. */
static inline bool raw_receive(int fd, tb__bytes *in, size_t *consumed, tb__store_message *reply) {
    for (;;) {
        size_t used;
        assert_ok(decode_frame(in->item + *consumed, in->count - *consumed, TB__STORE_MAX_REPLY, reply, &used));
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

/* What a raw client keeps between its hello and its prove. */
typedef struct raw_login {
    tb__store_secret secret;
    tb__proof_key key;
    tb__proof_end mine, server;
} raw_login;

/* A hello of the process with this secret, and the server's answer. */
static inline raw_login raw_begin_hello(int fd, const char *token, unsigned secret) {
    raw_login l = {.secret = {{1, (uint8_t)secret, (uint8_t)(secret >> 8)}}};
    uint8_t digest[TB__SHA256_NBYTES];
    tb__sha256 hash;
    tb__proof_key_derive(token, TB__STORE_PURPOSE, &l.key);
    tb__sha256_init(&hash);
    tb__sha256_add(&hash, l.secret.bytes, sizeof l.secret.bytes);
    tb__sha256_end(&hash, digest);
    memcpy(l.mine.id, digest, sizeof l.mine.id);
    assert_ok(tb__random_bytes(l.mine.nonce, sizeof l.mine.nonce));
    assert_true(raw_send_message(fd, (tb__store_message){.id = 1, .version = TB__STORE_VERSION, .end = l.mine}));
    tb__store_message reply = raw_reply(fd);
    assert_int_equal(reply.status, TB_OK);
    l.server = reply.end;
    return l;
}

static inline tb__store_message raw_prove_message(const raw_login *l, uint8_t proof[TB__PROOF_NBYTES]) {
    tb__proof_make(&l->key, "client", TB__STORE_VERSION, &l->mine, &l->server, proof);
    return (tb__store_message){
        .id = 2, .op = TB__STORE_PROVE, .value = {.data = proof, .nbytes = TB__PROOF_NBYTES}, .secret = l->secret};
}

/* The hello of a process of its own. */
static inline void raw_hello(int fd) {
    static unsigned count;
    uint8_t proof[TB__PROOF_NBYTES];
    raw_login l = raw_begin_hello(fd, TOKEN, ++count);
    assert_true(raw_send_message(fd, raw_prove_message(&l, proof)));
    assert_int_equal(raw_reply(fd).status, TB_OK);
}

/* Deletes everything that is this store's. */
static inline void delete_all(tb__store *store, const char *prefix) {
    tb__store_entries entries;
    assert_ok(tb__store_list(store, prefix, &entries));
    for (size_t i = 0; i < entries.count; i++)
        assert_ok(tb__store_delete(store, entries.item[i].key));
    tb__store_entries_fini(&entries);
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
