/* What the tests share in which other processes play roles. These end with an exit status, for cmocka is in the first
 * process only. */
#ifndef TB_BUS_STORE_ROLES_TEST_H
#define TB_BUS_STORE_ROLES_TEST_H

#include "bus/store/store_test.h"

#include <sys/resource.h>

enum { BROKEN = 99 };

static inline void must(tb_status status) {
    if (status == TB_OK)
        return;
    fprintf(stderr, "pid %d: %s: %s\n", (int)getpid(), tb_status_string(status), tb_error_detail());
    _exit(BROKEN);
}

static inline void must_be(bool claim, const char *what) {
    must(claim ? TB_OK : tb__fail(TB_INTERNAL, "%s", what));
}

static inline void sleep_until_killed(void) {
    for (;;)
        pause();
}

typedef struct role {
    const char *name;
    int (*play)(const char *url, const char *arg);
} role;

/* For main: whether this process was started to play one of them, which it has done then, and how that ended. */
static inline bool has_played(const role *roles, size_t nroles, int argc, char **argv, int *end) {
    for (size_t i = 0; argc == 4 && i < nroles; i++) {
        if (strcmp(argv[1], roles[i].name) == 0) {
            *end = roles[i].play(argv[2], argv[3]);
            return true;
        }
    }
    return false;
}

/* A role: serves the store, with `arg` descriptors at most, if that is a number. */
static inline int serve(const char *url, const char *arg) {
    tb__store_server *server;
    rlim_t nfiles = (rlim_t)strtol(arg, NULL, 10);
    if (nfiles > 0)
        setrlimit(RLIMIT_NOFILE, &(struct rlimit){nfiles, nfiles});
    must(tb__store_server_start(url, TOKEN, &server));
    sleep_until_killed();
    return 0;
}

/* A role: has two ephemeral keys, and then `arg`, which is permanent. */
static inline int live(const char *url, const char *arg) {
    tb__store *store;
    must(tb__store_open(url, TOKEN, PATIENCE_MS, &store));
    must(tb__store_set(store, "member/1", "x", 1, TB__STORE_EPHEMERAL, NULL));
    must(tb__store_set(store, "member/2", "x", 1, TB__STORE_EPHEMERAL, NULL));
    must(tb__store_set(store, arg, "x", 1, TB__STORE_PERMANENT, NULL));
    sleep_until_killed();
    return 0;
}

/* A process whose role serves the store; returns once it answers. */
static inline pid_t start_server(const char *role_name, const char *url, const char *arg) {
    pid_t pid = start_role(role_name, url, arg);
    await_store(url);
    return pid;
}

#endif
