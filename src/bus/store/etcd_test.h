/* An etcd of the test's own, on loopback. */
#ifndef TB_BUS_STORE_ETCD_TEST_H
#define TB_BUS_STORE_ETCD_TEST_H

#include "bus/store/store_test.h"

#include <fcntl.h>
#include <ftw.h>
#include <netinet/in.h>
#include <sys/prctl.h>

/* ctest's word for a test that lacks something of the machine. */
enum { SKIPPED = 77 };

typedef struct etcd {
    pid_t pid;
    int held[2]; /* sockets that keep the ports of clients and peers for it */
    int port[2];
    char folder[64], url[64];
} etcd;

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

static inline bool etcd_is_installed(void) {
    char path[4096];
    const char *folders = getenv("PATH");
    for (const char *at = folders ? folders : "/usr/bin"; *at;) {
        size_t length = strcspn(at, ":");
        snprintf(path, sizeof path, "%.*s/etcd", (int)length, at);
        if (access(path, X_OK) == 0)
            return true;
        at += length + (at[length] == ':');
    }
    return false;
}

/* Starts it with the data it had, and does not wait. */
static inline void etcd_run(etcd *e) {
    char client[64], peer[64], cluster[80], data[80], log[80];
    snprintf(client, sizeof client, "http://127.0.0.1:%d", e->port[0]);
    snprintf(peer, sizeof peer, "http://127.0.0.1:%d", e->port[1]);
    snprintf(cluster, sizeof cluster, "default=%s", peer);
    snprintf(data, sizeof data, "%s/data", e->folder);
    snprintf(log, sizeof log, "%s/log", e->folder);
    pid_t parent = getpid();
    e->pid = fork();
    if (e->pid == 0) {
        int fd = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
        dup2(fd, 1);
        dup2(fd, 2);
        /* It does not outlive a test that is killed. */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() == parent)
            execlp("etcd", "etcd", "--data-dir", data, "--listen-client-urls", client, "--advertise-client-urls",
                   client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster",
                   cluster, (char *)NULL);
        _exit(127);
    }
    assert_true(e->pid > 0);
}

/* Returns once it answers. */
static inline void etcd_await(const etcd *e) {
    tb__store *store;
    tb_status status;
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    while ((status = tb__store_open(e->url, TOKEN, PATIENCE_MS, &store)) == TB_IO && tb__now_ms() < deadline_ms)
        poll(NULL, 0, 10);
    assert_ok(status);
    tb__store_close(store);
}

static inline void etcd_start(etcd *e) {
    *e = (etcd){.folder = "/tmp/tb-etcd-XXXXXX"};
    assert_non_null(mkdtemp(e->folder));
    for (int i = 0; i < 2; i++)
        e->held[i] = hold_port(&e->port[i]);
    snprintf(e->url, sizeof e->url, "etcd://127.0.0.1:%d", e->port[0]);
    etcd_run(e);
    etcd_await(e);
}

static inline void etcd_kill(etcd *e) {
    kill_role(e->pid);
    e->pid = 0;
}

static inline int remove_one(const char *path, const struct stat *about, int type, struct FTW *where) {
    (void)about, (void)type, (void)where;
    return remove(path);
}

static inline void etcd_stop(etcd *e) {
    if (e->pid > 0)
        etcd_kill(e);
    for (int i = 0; i < 2; i++)
        close(e->held[i]);
    nftw(e->folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

/* For a main that was asked for etcd: says so if there is none. */
static inline bool etcd_may_start(etcd *e) {
    if (!etcd_is_installed()) {
        printf("skipped: etcd is not installed\n");
        return false;
    }
    etcd_start(e);
    return true;
}

#endif
