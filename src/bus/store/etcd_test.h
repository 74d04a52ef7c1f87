/* An etcd of the test's own, on loopback. */
#ifndef TB_BUS_STORE_ETCD_TEST_H
#define TB_BUS_STORE_ETCD_TEST_H

#include "bus/store/store_test.h"

#include <fcntl.h>
#include <ftw.h>
#include <sys/prctl.h>

/* ctest's word for a test that lacks something of the machine. */
enum { SKIPPED = 77 };

typedef struct etcd {
    pid_t pid;
    int held[2]; /* sockets that keep the ports of clients and peers for it */
    int port[2];
    char folder[64], url[64];
} etcd;

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

static inline void etcd_start(etcd *e) {
    *e = (etcd){.folder = "/tmp/tb-etcd-XXXXXX"};
    assert_non_null(mkdtemp(e->folder));
    for (int i = 0; i < 2; i++)
        e->held[i] = hold_port(&e->port[i]);
    snprintf(e->url, sizeof e->url, "etcd://127.0.0.1:%d", e->port[0]);
    etcd_run(e);
    await_store(e->url);
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
static inline bool etcd_is_missing(void) {
    bool is_missing = !etcd_is_installed();
    if (is_missing)
        printf("skipped: etcd is not installed\n");
    return is_missing;
}

/* The one that a group of tests has for all of them, and for their places. */
static etcd the_etcd;

static inline int start_the_etcd(void **state) {
    (void)state;
    etcd_start(&the_etcd);
    store_of_places = the_etcd.url;
    return 0;
}

static inline int stop_the_etcd(void **state) {
    (void)state;
    etcd_stop(&the_etcd);
    return 0;
}

#endif
