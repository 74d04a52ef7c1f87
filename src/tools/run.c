/* tensorbus run: starts the ranks of groups, with their agents, on this machine, and ends when they have ended. */
#include "bus/directory_keys.h"
#include "bus/store/server.h"
#include "tools/agents.h"
#include "tools/guard.h"

#include "base/descriptors.h"
#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

enum { GROUPS, STORE, TOKEN_FILE, NO_AGENTS, NOPTIONS };
enum { MOST_GROUPS = 64, MOST_PROCESSES = 1024, GRACE_MS = 10000, LINE = 65536, LABEL = TB__DIRECTORY_MAX_NAME + 40 };

static const tool_option options[NOPTIONS + 1] = {
    [GROUPS] = {"groups", "GROUP=N,...", "the number of processes of each group: trainer=4,engine=2"},
    [STORE] = {"store", "URL", "where they meet; default: a store that this command serves while it runs"},
    [TOKEN_FILE] = {"token-file", "FILE", "its first line is the token, for the store, agents and programs"},
    [NO_AGENTS] = {"no-agents", NULL, "start no agents: each program holds its seat itself"},
};

/* What is forwarded to programs. */
static const int forwarded[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT};

enum { NFORWARDED = sizeof forwarded / sizeof *forwarded };

typedef struct group {
    const char *name;
    int32_t size;
    char **program; /* with its arguments */
} group;

/* One of a process's two outputs; lines of it are printed with the process's label before them. */
typedef struct stream {
    int fd; /* -1: it has ended */
    char *line;
    size_t count;
} stream;

typedef struct process {
    char label[LABEL];
    pid_t pid; /* 0: it has ended */
    bool is_agent;
    stream out[2]; /* as standard output and standard error */
} process;

typedef struct launch {
    char *names; /* of the groups */
    group groups[MOST_GROUPS];
    int ngroups;
    const char *store, *token_file; /* NULL: there is none */
    bool has_agents;
    tb__store_server *server;
    char sockets[TOOL_MAX_FOLDER]; /* of agents: where `tensorbus status` and the like find them */
    char folder[64], url[128], token_path[PATH_MAX], self[PATH_MAX];
    sigset_t before; /* the signals that were blocked */
    TB_VEC(process) processes;
    int exit_status;     /* of the first that failed */
    bool is_unread;      /* nobody reads our output any more */
    int64_t deadline_ms; /* when those that were told to end are killed; 0: none was told */
} launch;

/* ---- Arguments ------------------------------------------------------------------------------------------------- */

static tb_status read_groups(launch *l, const char *text) {
    int32_t total = 0;
    if (!(l->names = tb__strdup(text)))
        return TB_NO_MEMORY;
    for (const char *at = text; at;) {
        size_t length = strcspn(at, ",");
        const char *equals = memrchr(at, '=', length), *number = equals ? equals + 1 : NULL;
        int64_t size;
        if (!equals || !tb__read_int(&number, &size) || number != at + length || size < 1 || size > MOST_PROCESSES)
            return tb__fail(TB_INVALID,
                            "--groups: '%.*s' is not a group and how many processes it has (1 to %d), as in trainer=4",
                            (int)length, at, MOST_PROCESSES);
        if (l->ngroups == MOST_GROUPS || (total += (int32_t)size) > MOST_PROCESSES)
            return tb__fail(TB_TOO_BIG, "--groups: at most %d groups and %d processes", MOST_GROUPS, MOST_PROCESSES);
        group *g = &l->groups[l->ngroups++];
        *g = (group){.name = l->names + (at - text), .size = (int32_t)size};
        l->names[equals - text] = '\0';
        if (tb__name_check("group", g->name) != TB_OK)
            return tb__fail_within(TB_INVALID, "--groups");
        for (group *other = l->groups; other < g; other++) {
            if (strcmp(other->name, g->name) == 0)
                return tb__fail(TB_INVALID, "--groups: group '%s' is there twice", g->name);
        }
        at = at[length] ? at + length + 1 : NULL;
    }
    return TB_OK;
}

/* One program for all groups, or as many as there are groups, with ":" between them. */
static tb_status read_programs(launch *l, char **words) {
    int n = 0;
    for (char **word = words, **first = words;; word++) {
        if (*word && strcmp(*word, ":") != 0)
            continue;
        bool is_last = !*word;
        if (word == first)
            return tb__fail(TB_INVALID, "there is no program %s ':'", is_last ? "behind the last" : "before a");
        if (n < l->ngroups)
            l->groups[n].program = first;
        n++;
        *word = NULL; /* the list that execvp takes ends there */
        first = word + 1;
        if (is_last)
            break;
    }
    if (n > 1 && n != l->ngroups)
        return tb__fail(TB_INVALID,
                        "%d programs for %d groups: give one for all, or one for each, with ':' between "
                        "them",
                        n, l->ngroups);
    for (int i = n; i < l->ngroups; i++)
        l->groups[i].program = words;
    return TB_OK;
}

static tb_status read_arguments(launch *l, const char *const *value) {
    if (!value[GROUPS])
        return tb__fail(TB_INVALID, "--groups is missing; see `tensorbus run --help`");
    TB_TRY(read_groups(l, value[GROUPS]));
    TB_TRY(read_programs(l, tool_program()));
    l->has_agents = !value[NO_AGENTS];
    l->store = value[STORE];
    if (value[TOKEN_FILE]) {
        if (!realpath(value[TOKEN_FILE], l->token_path))
            return tb__fail(TB_INVALID, "--token-file: can't read %s: %s", value[TOKEN_FILE], strerror(errno));
        l->token_file = l->token_path;
    }
    return TB_OK;
}

/* ---- Starting -------------------------------------------------------------------------------------------------- */

/* In the new process, which stays in a group of its own: signals of the terminal come by way of this command. */
static void become(const launch *l, const char *const *words, const int pipes[2], pid_t parent) {
    int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGPIPE, SIG_DFL);
    signal(SIGXFSZ, SIG_DFL);
    sigprocmask(SIG_SETMASK, &l->before, NULL);
    if (getppid() == parent && nothing >= 0 && dup2(nothing, STDIN_FILENO) >= 0 && dup2(pipes[0], STDOUT_FILENO) >= 0 &&
        dup2(pipes[1], STDERR_FILENO) >= 0) {
        execvp(words[0], (char *const *)words);
        dprintf(STDERR_FILENO, "can't start %s: %s\n", words[0], strerror(errno));
    }
    _exit(127);
}

static tb_status start_process(launch *l, bool is_agent, const char *label, const char *const *words) {
    int pipes[2][2] = {{-1, -1}, {-1, -1}};
    process p = {.is_agent = is_agent, .out = {{.fd = -1}, {.fd = -1}}};
    snprintf(p.label, sizeof p.label, "%s", label);
    tb_status status = TB_OK;
    pid_t self = getpid();
    for (int i = 0; i < 2 && status == TB_OK; i++) {
        p.out[i].line = tb__malloc(LINE, 1);
        if (!p.out[i].line)
            status = TB_NO_MEMORY;
        else if (pipe2(pipes[i], O_CLOEXEC) != 0)
            status = tb__fail(TB_IO, "pipe: %s", strerror(errno));
        p.out[i].fd = pipes[i][0];
    }
    if (status == TB_OK && !tb__vec_reserve(&l->processes, 1))
        status = TB_NO_MEMORY;
    if (status == TB_OK && (p.pid = fork()) < 0)
        status = tb__fail(TB_IO, "can't start a process: %s", strerror(errno));
    if (status == TB_OK && p.pid == 0)
        become(l, words, (const int[]){pipes[0][1], pipes[1][1]}, self);
    for (int i = 0; i < 2; i++) {
        if (pipes[i][1] >= 0)
            close(pipes[i][1]);
        if (status == TB_OK)
            fcntl(p.out[i].fd, F_SETFL, O_NONBLOCK);
        else if (p.out[i].fd >= 0)
            close(p.out[i].fd);
        if (status != TB_OK)
            free(p.out[i].line);
    }
    if (status == TB_OK) {
        setpgid(p.pid, p.pid); /* as it does itself: whoever is first */
        l->processes.item[l->processes.count++] = p;
    }
    return status;
}

static void put_variable(tb__config_key key, const char *value) {
    if (value)
        setenv(tb__config_table[key].env, value, 1);
    else
        unsetenv(tb__config_table[key].env);
}

static tb_status start_agent(launch *l, const group *g, const char *index, const char *size, const char *socket) {
    char label[LABEL];
    const char *words[] = {l->self,   "agent", "--name",   g->name, "--rank", index, "--size", size,
                           "--store", l->url,  "--socket", socket,  NULL,     NULL,  NULL};
    enum { TOKEN_WORD = 12 };
    snprintf(label, sizeof label, "agent of %s %s", g->name, index);
    if (l->token_file) {
        words[TOKEN_WORD] = "--token-file";
        words[TOKEN_WORD + 1] = l->token_file;
    }
    return start_process(l, true, label, words);
}

enum { SOCKET_ROOM = TOOL_MAX_FOLDER + 64 };

static void name_socket(const launch *l, int g, int32_t index, const char *ending, char out[SOCKET_ROOM]) {
    snprintf(out, SOCKET_ROOM, "%s/run-%d-%d-%" PRId32 ".sock%s", l->sockets, (int)getpid(), g, index, ending);
}

/* Those of agents that were killed are still there. */
static void remove_sockets(const launch *l) {
    static const char *const endings[] = {"", ".lock"};
    char path[SOCKET_ROOM];
    for (int g = 0; *l->sockets && g < l->ngroups; g++) {
        for (int32_t i = 0; i < l->groups[g].size; i++) {
            for (int k = 0; k < 2; k++) {
                name_socket(l, g, i, endings[k], path);
                unlink(path);
            }
        }
    }
}

static tb_status start_all(launch *l) {
    put_variable(TB__CONFIG_STORE, l->url);
    put_variable(TB__CONFIG_TOKEN_FILE, l->token_file);
    for (int g = 0; g < l->ngroups; g++) {
        char size[16];
        snprintf(size, sizeof size, "%" PRId32, l->groups[g].size);
        put_variable(TB__CONFIG_GROUP, l->groups[g].name);
        put_variable(TB__CONFIG_SIZE, size);
        for (int32_t i = 0; i < l->groups[g].size; i++) {
            char index[16], label[LABEL], socket[SOCKET_ROOM];
            snprintf(index, sizeof index, "%" PRId32, i);
            snprintf(label, sizeof label, "%s %s", l->groups[g].name, index);
            name_socket(l, g, i, "", socket);
            put_variable(TB__CONFIG_INDEX, index);
            put_variable(TB__CONFIG_AGENT, l->has_agents ? socket : NULL);
            if (l->has_agents)
                TB_TRY(start_agent(l, &l->groups[g], index, size, socket));
            TB_TRY(start_process(l, false, label, (const char *const *)l->groups[g].program));
        }
    }
    return TB_OK;
}

/* The store, unless it is somewhere else. */
static tb_status prepare(launch *l) {
    char token[TB__TOKEN_ROOM] = "";
    ssize_t length = readlink("/proc/self/exe", l->self, sizeof l->self - 1);
    if (length < 0)
        return tb__fail(TB_IO, "can't find this program: /proc/self/exe: %s", strerror(errno));
    if (l->token_file)
        TB_TRY(tool_read_token(l->token_file, token));
    if (l->has_agents)
        TB_TRY(tool_agents_make_folder(l->sockets));
    TB_TRY(tool_folder_make(l->folder, sizeof l->folder));
    if (l->store) {
        if ((size_t)snprintf(l->url, sizeof l->url, "%s", l->store) >= sizeof l->url)
            return tb__fail(TB_INVALID, "--store: a URL of at most %zu bytes", sizeof l->url - 1);
        return TB_OK;
    }
    snprintf(l->url, sizeof l->url, "unix:%s/store.sock", l->folder);
    return tb__store_server_start(l->url, token, &l->server);
}

/* ---- Output ---------------------------------------------------------------------------------------------------- */

static void write_line(launch *l, const process *p, int which, const char *line, size_t count) {
    FILE *to = which == 0 ? stdout : stderr;
    fprintf(to, "[%s] %.*s\n", p->label, (int)count, line);
    if (fflush(to) != 0 && which == 0)
        l->is_unread = true;
}

/* Prints the lines that are complete; at the end, or where there is no room, also the rest. */
static void write_lines(launch *l, process *p, int which, bool is_end) {
    stream *s = &p->out[which];
    char *at = s->line, *end = s->line + s->count, *newline;
    bool is_silent = p->is_agent && which == 0; /* that it listens */
    for (; (newline = memchr(at, '\n', (size_t)(end - at))); at = newline + 1) {
        if (!is_silent)
            write_line(l, p, which, at, (size_t)(newline - at));
    }
    if (end > at && (is_end || (at == s->line && s->count == LINE))) {
        if (!is_silent)
            write_line(l, p, which, at, (size_t)(end - at));
        at = end;
    }
    s->count = (size_t)(end - at);
    memmove(s->line, at, s->count);
}

static void read_stream(launch *l, process *p, int which) {
    stream *s = &p->out[which];
    while (s->fd >= 0) {
        ssize_t n = read(s->fd, s->line + s->count, LINE - s->count);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return;
        if (n > 0)
            s->count += (size_t)n;
        write_lines(l, p, which, n <= 0);
        if (n <= 0) {
            close(s->fd);
            s->fd = -1;
        }
    }
}

/* ---- Ending ---------------------------------------------------------------------------------------------------- */

static size_t count_running(const launch *l, bool is_agent) {
    size_t n = 0;
    for (size_t i = 0; i < l->processes.count; i++)
        n += l->processes.item[i].pid && l->processes.item[i].is_agent == is_agent;
    return n;
}

static void send_signal(const launch *l, bool is_agent, int number) {
    for (size_t i = 0; i < l->processes.count; i++) {
        if (l->processes.item[i].pid && l->processes.item[i].is_agent == is_agent)
            kill(-l->processes.item[i].pid, number);
    }
}

/* Tells programs to end, or, when they have, agents. */
static void stop(launch *l, bool is_agent) {
    send_signal(l, is_agent, SIGTERM);
    send_signal(l, is_agent, SIGCONT); /* one that stands still would not hear it */
    l->deadline_ms = tb__now_ms() + GRACE_MS;
}

static void note_end(launch *l, process *p, const siginfo_t *info) {
    bool by_signal = info->si_code != CLD_EXITED, is_over = p->is_agent && count_running(l, false) == 0;
    kill(-p->pid, SIGKILL); /* what it has started, and left */
    waitpid(p->pid, NULL, 0);
    p->pid = 0;
    for (int i = 0; i < 2; i++) {
        read_stream(l, p, i);
        write_lines(l, p, i, true); /* if something holds the pipe still */
    }
    /* Those that were told to end may end as they like; so may agents whose programs have ended. */
    if (l->exit_status || l->deadline_ms || is_over || (!by_signal && info->si_status == 0 && !p->is_agent))
        return;
    l->exit_status = by_signal ? 128 + info->si_status : p->is_agent ? TOOL_FAILED : info->si_status;
    const char *others = count_running(l, false) ? "; stopping the others" : "";
    if (by_signal)
        tool_say("%s was ended by signal %d, %s%s", p->label, info->si_status, strsignal(info->si_status), others);
    else
        tool_say("%s has ended with exit status %d%s", p->label, info->si_status, others);
}

static void reap(launch *l) {
    for (size_t i = 0; i < l->processes.count; i++) {
        process *p = &l->processes.item[i];
        siginfo_t info = {0};
        if (p->pid && waitid(P_PID, (id_t)p->pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid)
            note_end(l, p, &info);
    }
}

static void on_signal(launch *l, int number) {
    if (number == SIGCHLD)
        return;
    send_signal(l, false, number);
    if (number == SIGTSTP)
        raise(SIGSTOP);
}

/* Ends when everything has. */
static tb_status watch(launch *l, int signals) {
    TB_VEC(struct pollfd) polled = {0};
    bool is_stopping = false, are_agents_stopping = false;
    tb_status status = TB_OK;
    for (;;) {
        reap(l);
        if (!is_stopping && (l->exit_status || l->is_unread)) {
            is_stopping = true;
            stop(l, false);
        }
        if (!are_agents_stopping && count_running(l, false) == 0) {
            are_agents_stopping = true;
            stop(l, true);
        }
        if (count_running(l, false) + count_running(l, true) == 0)
            break;
        if (l->deadline_ms && tb__now_ms() >= l->deadline_ms) {
            send_signal(l, are_agents_stopping, SIGKILL);
            l->deadline_ms = INT64_MAX;
        }
        polled.count = 0;
        if (!tb__vec_reserve(&polled, 1 + 2 * l->processes.count)) {
            status = TB_NO_MEMORY;
            break;
        }
        polled.item[polled.count++] = (struct pollfd){.fd = signals, .events = POLLIN};
        for (size_t i = 0; i < 2 * l->processes.count; i++)
            polled.item[polled.count++] =
                (struct pollfd){.fd = l->processes.item[i / 2].out[i % 2].fd, .events = POLLIN};
        poll(polled.item, polled.count,
             l->deadline_ms && l->deadline_ms != INT64_MAX ? tb__ms_until(l->deadline_ms) : -1);
        struct signalfd_siginfo info;
        while (read(signals, &info, sizeof info) == sizeof info)
            on_signal(l, (int)info.ssi_signo);
        for (size_t i = 0; i < 2 * l->processes.count; i++) {
            if (polled.item[1 + i].revents)
                read_stream(l, &l->processes.item[i / 2], (int)(i % 2));
        }
    }
    free(polled.item);
    return status;
}

/* ---- The command ----------------------------------------------------------------------------------------------- */

static void fini(launch *l) {
    send_signal(l, false, SIGKILL); /* nothing is left, unless this command has failed */
    send_signal(l, true, SIGKILL);
    for (size_t i = 0; i < l->processes.count; i++) {
        for (int k = 0; k < 2; k++) {
            if (l->processes.item[i].out[k].fd >= 0)
                close(l->processes.item[i].out[k].fd);
            free(l->processes.item[i].out[k].line);
        }
    }
    free(l->processes.item);
    tb__store_server_stop(l->server);
    tool_folder_remove(l->folder);
    remove_sockets(l);
    free(l->names);
}

static int run(const tb__config *config, const char *const *value) {
    (void)config;
    static launch l;
    sigset_t caught;
    sigemptyset(&caught);
    sigaddset(&caught, SIGCHLD);
    for (int i = 0; i < NFORWARDED; i++)
        sigaddset(&caught, forwarded[i]);
    sigprocmask(SIG_BLOCK, &caught, &l.before); /* before the store's threads begin */
    tb__descriptor_limit_raise();
    int signals = signalfd(-1, &caught, SFD_CLOEXEC | SFD_NONBLOCK);
    tb_status status = signals >= 0 ? read_arguments(&l, value) : tb__fail(TB_IO, "signalfd: %s", strerror(errno));
    if (status == TB_OK)
        status = prepare(&l);
    if (status == TB_OK)
        status = start_all(&l);
    if (status == TB_OK)
        status = watch(&l, signals);
    int exit_status = status != TB_OK ? tool_fail_status(status) : l.is_unread ? TOOL_UNREAD : l.exit_status;
    fini(&l);
    if (signals >= 0)
        close(signals);
    return exit_status;
}

const tool_command tool_run = {
    .name = "run",
    .summary = "start the processes of groups on this machine, each with a seat and an agent",
    .usage = "--groups GROUP=N[,GROUP=N...] [OPTION...] -- PROGRAM [ARG...] [: PROGRAM [ARG...]]...",
    .operand = "a program",
    .takes_program = true,
    .details =
        "Each process gets its seat in environment variables: TENSORBUS_STORE, TENSORBUS_GROUP, TENSORBUS_INDEX,\n"
        "TENSORBUS_SIZE and, with agents, TENSORBUS_AGENT. tb_world_join(NULL, NULL, 0, 0, NULL, &world), and\n"
        "tb.join() in Python, read these variables. Give one program, which runs in all groups, or one for each\n"
        "group in the order of --groups, separated by \":\".\n"
        "\n"
        "  tensorbus run --groups trainer=4,engine=2 -- python3 job.py\n"
        "  tensorbus run --groups trainer=4,engine=2 -- ./train --fast : ./serve --port 80\n"
        "\n"
        "Each line of their output is printed with the seat in front: [trainer 0]. Their standard input is empty.\n"
        "HUP, INT, QUIT, TERM, USR1, USR2, TSTP and CONT are forwarded to the programs and to the processes that\n"
        "these have started. If a program fails, the others get SIGTERM, and SIGKILL 10 seconds later. The exit\n"
        "status is that of the first program that failed, or 128 plus the number of the signal that ended it.\n"
        "Agents end after all programs; no process that was started outlives this command.\n",
    .options = options,
    .run = run,
};
