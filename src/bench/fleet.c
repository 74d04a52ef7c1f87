/* Agents and their store as processes of this one: forked, watched, killed where that is to be shown, and ended. */
#include "bench/fleet.h"

#include "base/descriptors.h"
#include "base/process.h"
#include "bus/agent/agent.h"
#include "bus/store/server.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    END_MS = 10000, /* what one that was told to end gets */
    LOOK_MS = 20,
    MAX_SENTENCE = 500,
};

static const char ready[] = "ready";

typedef struct process {
    pid_t pid; /* 0: there is none */
    int pipe;  /* what it says when it is ready, or why it is not; -1: it has said so */
    int how;   /* it ended by itself: what waitpid tells */
    bool has_ended;
} process;

struct tool_fleet {
    const tool_job *job;
    tool_guard *guard;
    process store;
    process agent[TOOL_NSIDES * TOOL_MAX_SIDE];
};

typedef struct store_url {
    char text[sizeof((tool_job *)NULL)->folder + 16];
} store_url;

/* A name of its own: ranks that are on the bus themselves have theirs in the same folder. */
static store_url url_of(const tool_job *job) {
    store_url url;
    snprintf(url.text, sizeof url.text, "unix:%s/bus", job->folder);
    return url;
}

/* ---- In the process ------------------------------------------------------------------------------------------ */

static _Noreturn void give_up(int output) {
    const char *why = tb_error_detail();
    (void)!write(output, why, strlen(why));
    _exit(TOOL_FAILED);
}

static void say_ready(int output) {
    (void)!write(output, ready, sizeof ready - 1);
    close(output);
}

/* A terminal's signals reach the parent too, which ends all in good order. */
static void leave_signals(const tool_guard *guard) {
    signal(SIGINT, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGQUIT, SIG_IGN);
    tool_guard_drop(guard);
}

/* It is told when its parent dies, and then removes the folder, as nobody else is left to do that. */
static _Noreturn void be_store(const tool_fleet *a, int output, pid_t parent) {
    tb__store_server *server;
    sigset_t end;
    char folder[sizeof a->job->folder];
    snprintf(folder, sizeof folder, "%s", a->job->folder);
    sigemptyset(&end);
    sigaddset(&end, SIGTERM);
    sigprocmask(SIG_BLOCK, &end, NULL);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (tb__store_server_start(url_of(a->job).text, NULL, &server) != TB_OK)
        give_up(output);
    say_ready(output);
    while (getppid() == parent) {
        struct timespec look = {.tv_sec = 1};
        if (sigtimedwait(&end, NULL, &look) == SIGTERM)
            break;
    }
    tb__store_server_stop(server);
    if (getppid() != parent)
        tool_folder_remove(folder);
    _exit(TOOL_OK);
}

static tb__agent *running; /* for the signal handler */

static void on_signal(int number) {
    (void)number;
    tb__agent_stop(running);
}

static _Noreturn void be_agent(const tool_fleet *a, int rank, int output) {
    const tool_job *job = a->job;
    int nsources = job->side[TOOL_SOURCE].nranks, which = rank < nsources ? TOOL_SOURCE : TOOL_TARGET;
    store_url url = url_of(job);
    tool_agent_path path = tool_agent_socket(job, rank);
    tb__agent_opts opts = {.socket = path.text,
                           .store = url.text,
                           .group = job->side[which].group,
                           .index = rank - (which == TOOL_TARGET ? nsources : 0),
                           .size = job->side[which].nranks,
                           .timeout_ms = job->timeout_ms};
    if (tb__agent_create(&opts, &running) != TB_OK)
        give_up(output);
    sigaction(SIGTERM, &(struct sigaction){.sa_handler = on_signal}, NULL);
    say_ready(output);
    tb__agent_run(running);
    tb__agent_destroy(running);
    _exit(TOOL_OK);
}

/* ---- In the parent ------------------------------------------------------------------------------------------- */

enum { STORE = -1 }; /* in place of a rank */

static process *process_of(tool_fleet *a, int rank) {
    return rank == STORE ? &a->store : &a->agent[rank];
}

static tool_rank_name name_of(const tool_fleet *a, int rank) {
    tool_rank_name name;
    if (rank == STORE)
        snprintf(name.text, sizeof name.text, "the store");
    else
        snprintf(name.text, sizeof name.text, "the agent of %.15s", a->job->names[rank].text);
    return name;
}

static tb_status start(tool_fleet *a, int rank) {
    process *p = process_of(a, rank);
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0)
        return tb__fail(TB_IO, "%s: pipe: %s", name_of(a, rank).text, tb__errno_text(errno));
    fflush(NULL); /* or the child would print it again */
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) {
        close(ends[0]);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        leave_signals(a->guard);
        if (getppid() != parent)
            _exit(TOOL_FAILED);
        if (rank == STORE)
            be_store(a, ends[1], parent);
        be_agent(a, rank, ends[1]);
    }
    int error = errno;
    close(ends[1]);
    if (pid < 0) {
        close(ends[0]);
        return tb__fail(TB_IO, "%s: fork: %s", name_of(a, rank).text, strerror(error));
    }
    *p = (process){.pid = pid, .pipe = ends[0]};
    return TB_OK;
}

/* Whether it has ended; waits for that if `options` is 0. */
static bool reap(process *p, int options) {
    pid_t ended;
    if (p->pid == 0)
        return true;
    do {
        ended = waitpid(p->pid, &p->how, options);
    } while (ended < 0 && errno == EINTR);
    if (ended != p->pid)
        return false;
    p->pid = 0;
    p->has_ended = true;
    return true;
}

static tb_status tell_end(const tool_fleet *a, int rank, int how) {
    tool_rank_name name = name_of(a, rank);
    if (WIFSIGNALED(how))
        return tb__fail(TB_LOST, "%s was ended by signal %d (%s)", name.text, WTERMSIG(how), strsignal(WTERMSIG(how)));
    return tb__fail(TB_LOST, "%s ended with exit status %d", name.text, WEXITSTATUS(how));
}

static tb_status read_answer(tool_fleet *a, int rank) {
    process *p = process_of(a, rank);
    char said[MAX_SENTENCE + 1];
    ssize_t n = read(p->pipe, said, sizeof said - 1);
    close(p->pipe);
    p->pipe = -1;
    said[n > 0 ? n : 0] = '\0';
    if (strcmp(said, ready) == 0)
        return TB_OK;
    reap(p, 0);
    return n > 0 ? tb__fail(TB_IO, "%s: %s", name_of(a, rank).text, said) : tell_end(a, rank, p->how);
}

static tb_status wait_ready(tool_fleet *a, int rank, int64_t deadline) {
    process *p = process_of(a, rank);
    for (;;) {
        struct pollfd polls[] = {{.fd = p->pipe, .events = POLLIN}, {.fd = a->guard->fd, .events = POLLIN}};
        TB_TRY(tool_guard_check(a->guard));
        int left = tb__ms_until(deadline);
        if (left == 0)
            return tb__fail(TB_TIMEOUT, "%s is not ready after %d ms", name_of(a, rank).text, a->job->timeout_ms);
        (void)poll(polls, 2, left);
        if (polls[0].revents)
            return read_answer(a, rank);
    }
}

static tb_status start_all(tool_fleet *a) {
    int64_t deadline = tb__now_ms() + a->job->timeout_ms;
    TB_TRY(start(a, STORE));
    TB_TRY(wait_ready(a, STORE, deadline));
    for (int rank = 0; rank < a->job->nranks; rank++)
        TB_TRY(start(a, rank));
    for (int rank = 0; rank < a->job->nranks; rank++)
        TB_TRY(wait_ready(a, rank, deadline));
    return TB_OK;
}

tb_status tool_fleet_create(const tool_job *job, tool_guard *guard, tool_fleet **out) {
    tool_fleet *a = tb__calloc(1, sizeof *a);
    if (!a)
        return TB_NO_MEMORY;
    a->job = job;
    a->guard = guard;
    for (int rank = STORE; rank < job->nranks; rank++)
        process_of(a, rank)->pipe = -1;
    tb_status status = start_all(a);
    if (status == TB_OK)
        *out = a;
    else
        tool_fleet_destroy(a);
    return status;
}

static void send_signal(const process *p, int number) {
    if (p->pid != 0)
        kill(p->pid, number);
}

void tool_fleet_halt(tool_fleet *a, int rank) {
    send_signal(&a->agent[rank], SIGSTOP);
}

void tool_fleet_kill(tool_fleet *a, int rank) {
    send_signal(&a->agent[rank], SIGKILL);
    reap(&a->agent[rank], 0);
    a->agent[rank].has_ended = false; /* as it was told to */
}

tb_status tool_fleet_restart(tool_fleet *a, int rank) {
    TB_TRY(start(a, rank));
    return wait_ready(a, rank, tb__now_ms() + a->job->timeout_ms);
}

tb_status tool_fleet_check(tool_fleet *a) {
    for (int rank = STORE; rank < a->job->nranks; rank++) {
        process *p = process_of(a, rank);
        if (p->pid != 0)
            (void)reap(p, WNOHANG);
        if (p->has_ended)
            return tell_end(a, rank, p->how);
    }
    return TB_OK;
}

/* Those that were told to end; who takes too long is killed. */
static void await_end(process *p, int64_t deadline) {
    while (!reap(p, WNOHANG)) {
        if (tb__now_ms() >= deadline) {
            send_signal(p, SIGKILL);
            reap(p, 0);
            return;
        }
        poll(NULL, 0, LOOK_MS);
    }
}

void tool_fleet_destroy(tool_fleet *a) {
    if (!a)
        return;
    /* Whoever has not come so far is killed: it may be waiting for others to join. */
    for (int rank = 0; rank < a->job->nranks; rank++) {
        send_signal(&a->agent[rank], a->agent[rank].pipe < 0 ? SIGTERM : SIGKILL);
        send_signal(&a->agent[rank], SIGCONT);
    }
    send_signal(&a->store, SIGCONT);
    int64_t deadline = tb__now_ms() + END_MS;
    for (int rank = 0; rank < a->job->nranks; rank++)
        await_end(&a->agent[rank], deadline);
    send_signal(&a->store, SIGTERM);
    await_end(&a->store, deadline);
    for (int rank = STORE; rank < a->job->nranks; rank++) {
        if (process_of(a, rank)->pipe >= 0)
            close(process_of(a, rank)->pipe);
    }
    free(a);
}
