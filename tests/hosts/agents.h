/* Agents and a store on the hosts of a bed, as processes of the command in $TENSORBUS, in a folder of the test's own.
 * Included by one file of a test, after what board.h is told. */
#ifndef TB_TESTS_HOSTS_AGENTS_H
#define TB_TESTS_HOSTS_AGENTS_H

#include "bus/store/store.h"
#include "tests/hosts/board.h"

#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SKIPPED = 77 };

static char folder[] = "/tmp/tb-hosts-XXXXXX";
static const char token[] = "open sesame, open sesame, open sesame";
static char url[64], token_path[64];
static const char *tool;
static pid_t first, store, agents[NSEATS];

static inline void path_of(int seat, char out[64]) {
    snprintf(out, 64, "%s/agent-%d", folder, seat);
}

static inline int remove_one(const char *path, const struct stat *about, int type, struct FTW *where) {
    (void)about, (void)type, (void)where;
    return remove(path);
}

static inline void clean_up(void) {
    if (getpid() == first)
        nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

/* A program on a host, without its standard output. */
static inline pid_t start_program(int host, const char *const *argv) {
    pid_t pid = fork();
    if (pid != 0)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    hosts_enter(host);
    int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    dup2(null, STDOUT_FILENO);
    if (strcmp(argv[0], "etcd") == 0)
        dup2(null, STDERR_FILENO); /* it logs what it does */
    execvp(argv[0], (char *const *)(uintptr_t)argv);
    perror(argv[0]);
    _exit(127);
}

/* The agent of a seat, whose group has this many. */
static inline void start_agent_at(int host, int seat, const char *group, int index, int size) {
    char rank[16], count[16], path[64];
    path_of(seat, path);
    snprintf(rank, sizeof rank, "%d", index);
    snprintf(count, sizeof count, "%d", size);
    const char *argv[] = {
        tool,           "agent",    "--name",   group, "--rank",    rank, "--size",    count, "--store", url,
        "--token-file", token_path, "--socket", path,  "--timeout", "60", "--workers", "1",   NULL};
    agents[seat] = start_program(host, argv);
}

/* Its status; a process that does not end is a failure. */
static inline int end_of(pid_t pid, const char *what) {
    int how = -1;
    for (int64_t deadline_ms = tb__now_ms() + JOIN_MS + SLACK_MS; waitpid(pid, &how, WNOHANG) == 0; nap()) {
        if (tb__now_ms() > deadline_ms)
            fail("%s does not end", what);
    }
    return how;
}

/* From a host, because this process has no network in common with them. */
static inline void await_store(void) {
    pid_t pid = fork();
    if (pid == 0) {
        tb__store *opened = NULL;
        tb_status status;
        int64_t deadline_ms = tb__now_ms() + JOIN_MS;
        hosts_enter(1);
        while ((status = tb__store_open(url, token, JOIN_MS, &opened)) == TB_IO && tb__now_ms() < deadline_ms)
            nap();
        if (status != TB_OK)
            fprintf(stderr, "the store: %s\n", tb_error_detail());
        tb__store_close(opened);
        exit(status != TB_OK);
    }
    if (end_of(pid, "looking for the store") != 0)
        fail("there is no store");
}

static inline void start_store(bool is_etcd) {
    const char *address = getenv("BED_ADDR_0");
    char at[64], peer[64], cluster[80], data[64];
    snprintf(at, sizeof at, "http://%s:2379", address);
    snprintf(peer, sizeof peer, "http://%s:2380", address);
    snprintf(cluster, sizeof cluster, "default=%s", peer);
    snprintf(data, sizeof data, "%s/etcd", folder);
    const char *etcd[] = {"etcd",  "--data-dir",
                          data,    "--listen-client-urls",
                          at,      "--advertise-client-urls",
                          at,      "--listen-peer-urls",
                          peer,    "--initial-advertise-peer-urls",
                          peer,    "--initial-cluster",
                          cluster, NULL};
    if (is_etcd)
        snprintf(url, sizeof url, "etcd://%s:2379", address);
    else
        hosts_store(url, sizeof url);
    const char *own[] = {tool, "store", "--listen", url, "--token-file", token_path, NULL};
    store = start_program(0, is_etcd ? etcd : own);
    await_store();
}

/* Before all else; a status: the test can't run here. */
static inline int make_folder(bool is_etcd) {
    hosts_need_ucx();
    if (is_etcd && system("command -v etcd >/dev/null") != 0) {
        printf("skipped: etcd is not installed\n");
        return SKIPPED;
    }
    if (!mkdtemp(folder))
        return 1;
    first = getpid();
    atexit(clean_up);
    snprintf(token_path, sizeof token_path, "%s/token", folder);
    int fd = open(token_path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, token, strlen(token)) != (ssize_t)strlen(token) || close(fd) != 0)
        fail("can't write %s", token_path);
    return 0;
}

#endif
