/* A peer whose host hears nothing: a firewall stands before it, or it is switched off behind a router. The kernel takes
 * two minutes to give up connecting to it. Whoever meets such a peer must not stand still: other peers wait, too. */
#include "tests/support/hosts.h"
#include "transport/transport.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PATIENCE_MS = 40000, LOOK_MS = 10, TURNS = 20, SKIPPED = 77 };

static void must(tb_status status) {
    if (status == TB_OK)
        return;
    fprintf(stderr, "FAILED: %s: %s\n", tb_status_string(status), tb_error_detail());
    exit(1);
}

static void begin(int host, tb_transport *out) {
    tb_transport_env env = {.size = sizeof env, .rank = host, .is_driven = true};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    hosts_enter(host);
    must(tb__transport_open("ucx", &env, out));
}

/* On host 1: tells its address. */
static _Noreturn void wait_for_peers(int out) {
    tb_transport t;
    unsigned char address[TB_ADDRESS_MAX];
    size_t nbytes = sizeof address;
    begin(1, &t);
    must(t.ops->address(t.context, address, &nbytes));
    if (write(out, address, nbytes) != (ssize_t)nbytes)
        exit(1);
    for (;;)
        pause();
}

/* On host 0: what can be done without the peer goes on. */
static _Noreturn void meet(const unsigned char *address, size_t nbytes) {
    tb_transport t;
    begin(0, &t);
    must(t.ops->connect(t.context, 1, address, nbytes));
    for (int i = 0; i < TURNS; i++) {
        must(t.ops->progress(t.context));
        poll(&(struct pollfd){.fd = t.ops->fd(t.context), .events = POLLIN}, 1, LOOK_MS);
    }
    tb__transport_close(&t);
    exit(0);
}

static void run(void) {
    unsigned char address[TB_ADDRESS_MAX];
    int fds[2], how = 0;
    if (pipe(fds) != 0)
        exit(1);
    if (fork() == 0)
        wait_for_peers(fds[1]);
    ssize_t n = read(fds[0], address, sizeof address);
    if (n <= 0)
        exit(1);
    if (!hosts_do("drop 1 100")) {
        printf("skipped: packets can't be dropped here\n");
        exit(SKIPPED);
    }
    pid_t pid = fork();
    if (pid == 0)
        meet(address, (size_t)n);
    int left_ms = PATIENCE_MS;
    for (; waitpid(pid, &how, WNOHANG) == 0 && left_ms > 0; left_ms -= LOOK_MS)
        nanosleep(&(struct timespec){.tv_nsec = LOOK_MS * 1000000}, NULL);
    if (left_ms <= 0)
        fprintf(stderr, "FAILED: it stands still\n");
    exit(left_ms > 0 && WIFEXITED(how) ? WEXITSTATUS(how) : 1); /* the others end with us */
}

int main(int argc, char **argv) {
    (void)argc;
    if (hosts_count() != 2) {
        fprintf(stderr, "to be run by tests/hosts/bed 2 -- %s\n", argv[0]);
        return 2;
    }
    hosts_need_ucx();
    run();
}
