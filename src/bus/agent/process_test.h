/* What the tests with agents that are processes share: agents and clients of their own, and what they leave behind. */
#ifndef TB_BUS_AGENT_PROCESS_TEST_H
#define TB_BUS_AGENT_PROCESS_TEST_H

#include "tensorbus/tensorbus.h"

#include "base/process.h"

#include "../tests/support/asserts.h"
#include "../tests/support/program.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* Only a hang takes it. */
enum { PATIENCE_MS = 60000 };

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { NOTICE_MS = 20000 };
#else
enum { NOTICE_MS = 2000 };
#endif

typedef struct agent_process {
    pid_t pid; /* 0: none */
    char path[80];
} agent_process;

/* In the folder, where the store is, too. The tool is in $TENSORBUS, as for tests of the command. */
static inline void begin_agent(agent_process *a, const char *folder, const char *group, int index, int size,
                               const char *timeout_s) {
    extern char **environ;
    char rank[16], seats[16], store[80], path[sizeof a->path];
    const char *tool = getenv("TENSORBUS");
    assert_non_null(tool);
    snprintf(path, sizeof path, "%s/%s%d", folder, group, index); /* the folder may be in one struct with the agent */
    memcpy(a->path, path, sizeof path);
    snprintf(rank, sizeof rank, "%d", index);
    snprintf(seats, sizeof seats, "%d", size);
    snprintf(store, sizeof store, "unix:%s/store", folder);
    const char *argv[] = {tool,  "agent",    "--name", group,       "--rank",  rank,        "--size", seats, "--store",
                          store, "--socket", a->path,  "--timeout", timeout_s, "--workers", "1",      NULL};
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", 1 /* O_WRONLY */, 0);
    assert_int_equal(posix_spawn(&a->pid, tool, &files, NULL, (char **)(uintptr_t)argv, environ), 0);
    posix_spawn_file_actions_destroy(&files);
}

/* Once it listens it takes part; until then a program waits for it. */
static inline void await_agent(const agent_process *a) {
    program *c = NULL;
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS};
    assert_ok(program_connect(a->path, &opts, &c));
    program_close(c);
}

/* The exit status, or minus the signal; a process that does not end is a failure. */
static inline int end_of(pid_t pid) {
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    int status = 0;
    pid_t ended;
    while ((ended = waitpid(pid, &status, WNOHANG)) == 0 && tb__now_ms() < deadline_ms)
        usleep(1000);
    if (ended == 0) {
        kill(pid, SIGKILL);
        waitpid(pid, &status, 0);
        fail_msg("process %d does not end", (int)pid);
    }
    assert_int_equal(ended, pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static inline void end_agent(agent_process *a, int how) {
    if (!a->pid)
        return;
    pid_t pid = a->pid;
    a->pid = 0;
    assert_int_equal(kill(pid, how), 0);
    assert_int_equal(end_of(pid), how == SIGKILL ? -SIGKILL : 0);
}

/* A number of /proc/PID/NAME, which stands after `key`. */
static inline long read_number(pid_t pid, const char *name, const char *key) {
    char path[64], line[512];
    long value = -1;
    snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, name);
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    while (fgets(line, sizeof line, file)) {
        if (strncmp(line, key, strlen(key)) == 0)
            value = strtol(line + strlen(key), NULL, 10);
    }
    fclose(file);
    assert_true(value >= 0);
    return value;
}

static inline int count_entries(const char *path) {
    DIR *folder = opendir(path);
    int count = 0;
    assert_non_null(folder);
    while (readdir(folder))
        count++;
    closedir(folder);
    return count - 2;
}

static inline int count_files(pid_t pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    return count_entries(path);
}

/* Agents that were killed leave their sockets, and a lock that is nobody's; whoever comes next removes them. */
static inline void empty_folder(const char *path) {
    DIR *folder = opendir(path);
    struct dirent *entry;
    char name[400];
    assert_non_null(folder);
    while ((entry = readdir(folder))) {
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        if (entry->d_name[0] != '.')
            unlink(name);
    }
    closedir(folder);
    assert_int_equal(rmdir(path), 0);
}

/* ---- Two agents, each a group of its own ----------------------------------------------------------------------- */

typedef struct two_agents {
    char folder[32];
    agent_process agents[2];
} two_agents;

static const char *const two_groups[2] = {"a", "b"};

static inline int begin_two(void **state) {
    static two_agents s;
    s = (two_agents){.folder = "/tmp/tb-agent-XXXXXX"};
    assert_non_null(mkdtemp(s.folder));
    for (int i = 0; i < 2; i++) {
        begin_agent(&s.agents[i], s.folder, two_groups[i], 0, 1, "30");
        await_agent(&s.agents[i]);
    }
    *state = &s;
    return 0;
}

static inline int end_two(void **state) {
    two_agents *s = *state;
    for (int i = 2; i-- > 0;)
        end_agent(&s->agents[i], SIGTERM);
    empty_folder(s->folder);
    return 0;
}

#endif
