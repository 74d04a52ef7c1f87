/* Ranks that have few file descriptors, or none left: large tensors need none of their own, what can be done without is
 * done, and what can't be says who ran out of what, to both sides. Each rank is a process with a limit of its own. */
#include "tensorbus/tensorbus.h"

#include "base/descriptors.h"
#include "base/process.h"

#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { PATIENCE_MS = 60000, SOON_MS = 5000, N = 1024, LARGE = 64 << 20, MOST = 128, POISON = 0x5a5a5a5a };

/* ---- In a rank ------------------------------------------------------------------------------------------------- */

typedef struct rank {
    bool is_a;
    char url[64];
    int in, out; /* to and from the other one */
    tb_world *world;
    tb_pair *pair;
    tb_batch *batch;
    uint32_t *data[MOST];
    int taken[4096], ntaken;
} rank;

#define must(claim)                                                                                                    \
    do {                                                                                                               \
        if (!(claim)) {                                                                                                \
            fprintf(stderr, "%s:%d: rank %s: %s: %s\n", __FILE__, __LINE__, r->is_a ? "a" : "b", #claim,               \
                    tb_error_detail());                                                                                \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

static void tell(const rank *r) {
    must(write(r->out, "", 1) == 1);
}

static void await(const rank *r) {
    char byte;
    must(read(r->in, &byte, 1) == 1);
}

static void limit(const rank *r, rlim_t n) {
    must(setrlimit(RLIMIT_NOFILE, &(struct rlimit){n, n}) == 0);
}

/* All descriptors that there are. */
static void exhaust(rank *r) {
    int fd;
    while (r->ntaken < (int)(sizeof r->taken / sizeof *r->taken) && (fd = fcntl(r->in, F_DUPFD_CLOEXEC, 0)) >= 0)
        r->taken[r->ntaken++] = fd;
    must(fcntl(r->in, F_DUPFD_CLOEXEC, 0) < 0);
}

static void relieve(rank *r) {
    while (r->ntaken > 0)
        close(r->taken[--r->ntaken]);
}

/* The sentence names this process or the other, and the limit that is its own. */
static bool names_limit(pid_t pid) {
    char process[64], number[64];
    snprintf(process, sizeof process, "process %d is out of file descriptors", (int)pid);
    snprintf(number, sizeof number, "RLIMIT_NOFILE is %llu", tb__descriptor_limit());
    return strstr(tb_error_detail(), process) && strstr(tb_error_detail(), number) &&
           strstr(tb_error_detail(), "ulimit -n");
}

static void join(rank *r) {
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS};
    must(tb_world_join(r->url, r->is_a ? "a" : "b", 0, 1, &opts, &r->world) == TB_OK);
}

static tb_status pair_up(rank *r) {
    return tb_pair_create(r->world, "p", r->is_a ? "b" : "a", "mesh=1 place=Replicate", NULL, &r->pair);
}

/* So many tensors, each at the beginning of an allocation that has `nbytes`. */
static void make_batch(rank *r, int count, size_t nbytes) {
    must(tb_batch_create(r->world, "step", NULL, &r->batch) == TB_OK);
    for (int i = 0; i < count; i++) {
        char name[16];
        must(tb_alloc(nbytes, (void **)&r->data[i]) == TB_OK);
        snprintf(name, sizeof name, "w%d", i);
        tb_tensor w = {.size = sizeof w, .data = r->data[i], .dtype = TB_U32, .ndim = 1, .shape = {N}};
        must(tb_batch_add(r->batch, r->pair, name, &w) == TB_OK);
    }
    must(tb_batch_register(r->batch, 0) == TB_OK);
}

static void drop_batch(rank *r, int count) {
    tb_batch_destroy(r->batch);
    r->batch = NULL;
    for (int i = 0; i < count; i++)
        tb_free(r->data[i]);
}

static uint32_t value(int tensor, int i, uint32_t version) {
    return (uint32_t)(tensor * N + i) + version * 10000000;
}

static void set(const rank *r, int count, uint32_t version) {
    for (int k = 0; k < count * N; k++)
        r->data[k / N][k % N] = r->is_a ? value(k / N, k % N, version) : POISON;
}

static void begin(const rank *r, tb_transfer **t) {
    must((r->is_a ? tb_send : tb_recv)(r->batch, NULL, t) == TB_OK);
}

static void end(const rank *r, int count, uint32_t version, tb_transfer *t) {
    must(tb_wait(t, TB_COMMITTED, -1) == TB_OK);
    for (int k = 0; k < count * N; k++)
        must(r->data[k / N][k % N] == value(k / N, k % N, version));
    tb_transfer_destroy(t);
}

static void exchange(const rank *r, int count, uint32_t version) {
    tb_transfer *t = NULL;
    set(r, count, version);
    begin(r, &t);
    end(r, count, version, t);
}

static void leave(rank *r) {
    tell(r); /* who serves the store must not take it away from the other */
    await(r);
    tb_pair_destroy(r->pair);
    tb_world_destroy(r->world);
}

/* More large tensors than there are descriptors, at both ends. */
static void move_many(rank *r) {
    limit(r, 64);
    join(r);
    must(pair_up(r) == TB_OK);
    make_batch(r, 100, LARGE + 1);
    exchange(r, 100, 1);
    exchange(r, 100, 2);
    drop_batch(r, 100);
    leave(r);
}

/* The receiver has none left when the sender tells it where its tensors are. What can't be mapped then is sent; the
 * next batch is mapped again. */
static void receive_without(rank *r) {
    tb_transfer *t = NULL;
    limit(r, 128);
    join(r);
    must(pair_up(r) == TB_OK);
    make_batch(r, 4, LARGE + 1);
    set(r, 4, 1);
    if (!r->is_a) {
        begin(r, &t);
        exhaust(r);
        tell(r);
    } else {
        await(r);
        begin(r, &t);
    }
    end(r, 4, 1, t);
    set(r, 4, 2);
    if (!r->is_a)
        exhaust(r);
    begin(r, &t); /* a transfer takes a descriptor only when it is asked for one */
    if (!r->is_a) {
        must(tb_transfer_fd(t) == -1 && names_limit(getpid()));
        relieve(r);
        must(tb_transfer_fd(t) >= 0);
    }
    end(r, 4, 2, t);
    drop_batch(r, 4);
    make_batch(r, 4, LARGE + 1);
    exchange(r, 4, 3);
    drop_batch(r, 4);
    leave(r);
}

/* One can't connect: it hears whose limit it is, and so does the other, at once or, if it had met it before, when it
 * waits for it. When there are descriptors again, all is well. */
static void pair_without(rank *r) {
    pid_t pid = getpid(), other;
    limit(r, 100);
    join(r);
    must(write(r->out, &pid, sizeof pid) == sizeof pid && read(r->in, &other, sizeof other) == sizeof other);
    if (!r->is_a)
        exhaust(r);
    tb_status status = pair_up(r);
    must((status == TB_OK && r->is_a) || (status == TB_REFUSED && names_limit(r->is_a ? other : pid)));
    must(status == TB_OK || strstr(tb_error_detail(), "b 0"));
    tell(r);
    await(r);
    if (status == TB_OK) {
        must(tb_batch_create(r->world, "step", NULL, &r->batch) == TB_OK);
        tb_tensor nothing = {.size = sizeof nothing, .dtype = TB_U32, .ndim = 1, .shape = {0}};
        must(tb_batch_add(r->batch, r->pair, "w0", &nothing) == TB_OK);
        must(tb_batch_register(r->batch, SOON_MS) == TB_TIMEOUT && names_limit(other));
        tb_batch_destroy(r->batch);
    }
    relieve(r);
    tell(r);
    await(r);
    tb_pair_destroy(r->pair);
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS; /* what was said before holds until the other comes again */
    while ((status = pair_up(r)) == TB_REFUSED && tb__now_ms() < deadline_ms)
        poll(NULL, 0, 10);
    must(status == TB_OK);
    make_batch(r, 2, 4096);
    exchange(r, 2, 1);
    drop_batch(r, 2);
    leave(r);
}

/* One can connect, but not accept the other's connection: it says whose limit that is, and neither says that the other
 * did not register. When there are descriptors again, the same call succeeds. */
static void accept_without(rank *r) {
    enum { ENOUGH_TO_CONNECT = 3 }; /* and too few to accept */
    tb_tensor nothing = {.size = sizeof nothing, .dtype = TB_U32, .ndim = 1, .shape = {0}};
    limit(r, 100);
    join(r);
    if (!r->is_a) {
        exhaust(r);
        for (int i = 0; i < ENOUGH_TO_CONNECT; i++)
            close(r->taken[--r->ntaken]);
    }
    tell(r);
    await(r);
    must(pair_up(r) == TB_OK);
    must(tb_batch_create(r->world, "step", NULL, &r->batch) == TB_OK);
    must(tb_batch_add(r->batch, r->pair, "w0", &nothing) == TB_OK);
    must(tb_batch_register(r->batch, SOON_MS) == TB_TIMEOUT && !strstr(tb_error_detail(), "has not registered"));
    if (r->is_a)
        must(strstr(tb_error_detail(), "(b 0) has added to batch 'step' of pair 'p' have not come"));
    else
        must(strstr(tb_error_detail(), "(a 0) of batch 'step' of pair 'p' has not arrived; this process can't accept "
                                       "a connection: ") &&
             names_limit(getpid()));
    tell(r);
    await(r);
    relieve(r);
    must(tb_batch_register(r->batch, PATIENCE_MS) == TB_OK);
    tell(r);
    await(r);
    tb_batch_destroy(r->batch);
    make_batch(r, 2, 4096);
    exchange(r, 2, 1);
    drop_batch(r, 2);
    leave(r);
}

/* Whatever there is no descriptor for, the sentence says what to do. */
static void join_without(rank *r) {
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = SOON_MS};
    tb_status status = TB_IO;
    if (!r->is_a)
        await(r); /* one of them serves the store, and would be short of them for the other */
    for (rlim_t n = 8; status != TB_OK; n++) {
        must(n < 100);
        must(setrlimit(RLIMIT_NOFILE, &(struct rlimit){n, 100}) == 0);
        status = tb_world_join(r->url, r->is_a ? "a" : "b", 0, 1, &opts, &r->world);
        must(status == TB_OK || ((status == TB_IO || status == TB_TIMEOUT) && names_limit(getpid())));
    }
    limit(r, 100);
    tell(r);
    if (r->is_a)
        await(r);
    must(pair_up(r) == TB_OK);
    leave(r);
}

static double seconds_of(const struct rusage *use) {
    return (double)(use->ru_utime.tv_sec + use->ru_stime.tv_sec) +
           1e-6 * (double)(use->ru_utime.tv_usec + use->ru_stime.tv_usec);
}

/* One serves the store, and has none for the other, who waits, and hears why. */
static void serve_without(rank *r) {
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = SOON_MS};
    pid_t pid = getpid();
    struct rusage before, after;
    limit(r, 100);
    if (r->is_a) {
        join(r);
        exhaust(r);
        must(write(r->out, &pid, sizeof pid) == sizeof pid);
        getrusage(RUSAGE_SELF, &before);
        await(r);
        getrusage(RUSAGE_SELF, &after);
        must(seconds_of(&after) - seconds_of(&before) < SOON_MS * 1e-3 / 4);
        relieve(r);
        tell(r);
    } else {
        must(read(r->in, &pid, sizeof pid) == sizeof pid);
        must(tb_world_join(r->url, "b", 0, 1, &opts, &r->world) == TB_TIMEOUT && names_limit(pid));
        must(strstr(tb_error_detail(), "the store can't take another connection"));
        tell(r);
        await(r);
        join(r);
    }
    must(pair_up(r) == TB_OK);
    leave(r);
}

/* ---- In the test ----------------------------------------------------------------------------------------------- */

static pid_t start(const char *url, bool is_a, int in, int out, void (*body)(rank *r)) {
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid > 0)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    rank *r = calloc(1, sizeof *r);
    *r = (rank){.is_a = is_a, .in = in, .out = out};
    snprintf(r->url, sizeof r->url, "%s", url);
    body(r);
    free(r);
    exit(0);
}

static void run(void (*body)(rank *r)) {
    char folder[] = "/tmp/tb-descriptors-XXXXXX", url[64];
    int up[2], down[2];
    pid_t pids[2];
    assert_non_null(mkdtemp(folder));
    snprintf(url, sizeof url, "unix:%s/s", folder);
    assert_int_equal(pipe2(up, O_CLOEXEC), 0);
    assert_int_equal(pipe2(down, O_CLOEXEC), 0);
    pids[0] = start(url, true, down[0], up[1], body);
    pids[1] = start(url, false, up[0], down[1], body);
    for (int i = 0; i < 2; i++) {
        close(up[i]);
        close(down[i]);
    }
    int64_t deadline_ms = tb__now_ms() + 2 * PATIENCE_MS;
    for (int nleft = 2; nleft > 0;) {
        int status;
        pid_t ended = waitpid(-1, &status, WNOHANG);
        bool is_good = ended == 0 ? tb__now_ms() < deadline_ms : WIFEXITED(status) && WEXITSTATUS(status) == 0;
        for (int i = 0; i < 2; i++) {
            if (ended == pids[i])
                pids[i] = 0;
            if (!is_good && pids[i])
                kill(pids[i], SIGKILL);
        }
        if (!is_good)
            while (wait(NULL) > 0)
                ;
        assert_true(is_good);
        nleft -= ended > 0;
        if (ended == 0)
            poll(NULL, 0, 5);
    }
    assert_int_equal(rmdir(folder), 0);
}

static void test_many_large_tensors(void **state) {
    (void)state;
    run(move_many);
}

static void test_receiver_at_its_limit(void **state) {
    (void)state;
    run(receive_without);
}

static void test_connecting_at_the_limit(void **state) {
    (void)state;
    run(pair_without);
}

static void test_accepting_at_the_limit(void **state) {
    (void)state;
    run(accept_without);
}

static void test_joining_at_the_limit(void **state) {
    (void)state;
    run(join_without);
}

static void test_serving_at_the_limit(void **state) {
    (void)state;
    run(serve_without);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_many_large_tensors),      cmocka_unit_test(test_receiver_at_its_limit),
        cmocka_unit_test(test_connecting_at_the_limit), cmocka_unit_test(test_accepting_at_the_limit),
        cmocka_unit_test(test_joining_at_the_limit),    cmocka_unit_test(test_serving_at_the_limit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
