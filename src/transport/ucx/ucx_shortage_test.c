/* The ucx transport in a process that has no file descriptors left: a peer that connects then has to wait, and gets in
 * when there are some again. */
#include "../tests/support/ucx_ends.h"

#include "base/process.h"

#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

/* Rank 1: connects, says so when it has met rank 0, and works until it is killed. */
static void play(tb_transport *t, const unsigned char *address, size_t nbytes, int in, int out, const void *arg) {
    (void)in;
    (void)arg;
    connect_to(t, 0, address, nbytes);
    struct pollfd fd = {.fd = t->ops->fd(t->context), .events = POLLIN};
    for (bool has_told = false;;) {
        t->ops->progress(t->context);
        const ucx_peer *peer = ucx_find(t->context, 0);
        if (!has_told && peer && peer->has_hello)
            has_told = write(out, "x", 1) == 1;
        poll(&fd, 1, 100);
    }
}

/* Drives the endpoint until the other process says something, or for so long. */
static bool hears(const tb_transport *t, const stranger *o, int ms) {
    struct pollfd fds[2] = {{.fd = t->ops->fd(t->context), .events = POLLIN}, {.fd = o->up, .events = POLLIN}};
    int64_t deadline_ms = tb__now_ms() + ms;
    while (!(fds[1].revents & POLLIN) && tb__now_ms() < deadline_ms) {
        assert_int_equal(t->ops->progress(t->context), TB_OK);
        poll(fds, 2, tb__ms_until(deadline_ms));
    }
    return fds[1].revents & POLLIN;
}

static void listens_again(void **state) {
    (void)state;
    enum { MOST = 1024 };
    int taken[MOST], n = 0;
    losses l = {0};
    unsigned char mine[TB_ADDRESS_MAX];
    size_t nbytes;
    stranger o;
    tb_transport t;
    struct rlimit limit;
    stranger_start(&o, play, NULL);
    open_one(&t, 0, &l, mine, &nbytes);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &(struct rlimit){MOST, limit.rlim_max}), 0);
    while (n < MOST && (taken[n] = dup(STDERR_FILENO)) >= 0)
        n++;
    assert_false(hears(&t, &o, 1000));
    stranger_tell(&o, mine, nbytes);
    assert_false(hears(&t, &o, 2000));
    assert_int_equal(l.count, 0);
    while (n > 0)
        close(taken[--n]);
    assert_true(hears(&t, &o, 60000));
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
    stranger_kill(&o);
    tb__transport_close(&t);
    stranger_close(&o);
}

int main(int argc, char **argv) {
    if (!choose_lanes(argc, argv))
        return 77;
    const struct CMUnitTest tests[] = {cmocka_unit_test(listens_again)};
    return cmocka_run_group_tests_name("transport ucx, shortage", tests, NULL, NULL);
}
