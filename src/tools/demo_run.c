/* Processes that work together: forked from this one, watched until they have ended, and ended with it. */
#include "tools/demo.h"

#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    TICK_MS = 100,
    GRACE_MS = 2000, /* how long the cause is awaited once its consequences show */
    MAX_SENTENCE = 800,
    MAX_LINE = 500,
};

int64_t tool_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Signals */

tb_status tool_guard_init(tool_guard *guard) {
    static const int ending[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
    sigset_t watched;
    guard->caught = 0;
    sigemptyset(&guard->ending);
    for (size_t i = 0; i < sizeof ending / sizeof *ending; i++) {
        struct sigaction action;
        if (sigaction(ending[i], NULL, &action) == 0 && action.sa_handler != SIG_IGN)
            sigaddset(&guard->ending, ending[i]);
    }
    watched = guard->ending;
    sigaddset(&watched, SIGCHLD);
    guard->fd = signalfd(-1, &watched, SFD_NONBLOCK | SFD_CLOEXEC);
    if (guard->fd < 0)
        return tb__fail(TB_IO, "signalfd: %s", strerror(errno));
    /* Whoever started us may ignore it, and then nobody could learn how a child ended. */
    sigaction(SIGCHLD, &(struct sigaction){.sa_handler = SIG_DFL}, &guard->child_action);
    sigprocmask(SIG_BLOCK, &watched, &guard->before);
    return TB_OK;
}

static void look_for_signals(tool_guard *guard) {
    struct signalfd_siginfo info;
    while (read(guard->fd, &info, sizeof info) == (ssize_t)sizeof info) {
        if (info.ssi_signo != SIGCHLD && guard->caught == 0)
            guard->caught = (int)info.ssi_signo;
    }
}

void tool_guard_fini(tool_guard *guard) {
    look_for_signals(guard);
    close(guard->fd);
    sigaction(SIGCHLD, &guard->child_action, NULL);
    if (guard->caught != 0)
        raise(guard->caught);
    sigprocmask(SIG_SETMASK, &guard->before, NULL); /* a signal that was raised takes effect here */
}

/* Shared memory */

tb_status tool_share(size_t nbytes, void **out) {
    void *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return tb__fail(TB_NO_MEMORY, "can't map %zu bytes of shared memory: %s", nbytes, strerror(errno));
    *out = memory;
    return TB_OK;
}

void tool_unshare(void *ptr, size_t nbytes) {
    if (ptr)
        munmap(ptr, nbytes);
}

static void futex(_Atomic uint32_t *word, int operation, uint32_t value, const struct timespec *timeout) {
    syscall(SYS_futex, word, operation, value, timeout, NULL, 0);
}

tb_status tool_barrier_wait(tool_barrier *barrier, int timeout_ms, int64_t *released_ns) {
    int64_t deadline = tb__now_ms() + timeout_ms;
    uint32_t generation = atomic_load(&barrier->generation);
    if (atomic_fetch_add(&barrier->arrived, 1) + 1 == barrier->count) {
        atomic_store(&barrier->arrived, 0);
        atomic_store(&barrier->released_ns, tool_now_ns());
        atomic_fetch_add(&barrier->generation, 1);
        futex(&barrier->generation, FUTEX_WAKE, INT32_MAX, NULL);
    }
    while (atomic_load(&barrier->generation) == generation) {
        int left = tb__ms_until(deadline);
        if (left == 0)
            return tb__fail(TB_TIMEOUT, "only %" PRIu32 " of %" PRIu32 " ranks were ready within %d ms",
                            atomic_load(&barrier->arrived), barrier->count, timeout_ms);
        futex(&barrier->generation, FUTEX_WAIT, generation, &(struct timespec){left / 1000, left % 1000 * 1000000});
    }
    *released_ns = atomic_load(&barrier->released_ns);
    return TB_OK;
}

/* The crew */

/* What a rank leaves behind when it fails, in shared memory. */
typedef struct record {
    _Atomic int order; /* from 1, over all ranks; 0: it has not failed */
    tb_status status;
    char sentence[MAX_SENTENCE];
} record;

typedef struct board {
    _Atomic int nfailed;
    record rank[];
} board;

/* How surely a failure is a cause, and not a consequence. */
typedef enum weight { NONE, CONSEQUENCE, CAUSE, KILLED } weight;

typedef struct member {
    pid_t pid;        /* 0: it has been waited for */
    int pipe;         /* what it writes to standard streams; -1 at its end */
    int wait_status;  /* once waited for */
    size_t line_used; /* of a line whose end has not come */
    char line[MAX_LINE + 1];
} member;

typedef struct watch {
    const tool_crew *crew;
    tool_guard *guard;
    board *board;
    size_t board_nbytes;
    member *member;
    struct pollfd *polls; /* of the pipes, then of the guard */
    int nalive;
    int first;     /* the rank to blame so far; -1: none */
    weight weight; /* of its failure */
} watch;

static void flush_line(watch *w, int rank) {
    member *m = &w->member[rank];
    m->line[m->line_used] = '\0';
    if (m->line_used > 0 && w->crew->said)
        w->crew->said(w->crew->arg, w->crew->names[rank], m->line);
    m->line_used = 0;
}

static void drain(watch *w, int rank) {
    member *m = &w->member[rank];
    while (m->pipe >= 0) {
        char buffer[4096];
        ssize_t n = read(m->pipe, buffer, sizeof buffer);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return;
        for (ssize_t i = 0; i < n; i++) {
            if (buffer[i] != '\n')
                m->line[m->line_used++] = buffer[i];
            if (buffer[i] == '\n' || m->line_used == MAX_LINE)
                flush_line(w, rank);
        }
        if (n <= 0) {
            flush_line(w, rank);
            close(m->pipe);
            m->pipe = -1;
        }
    }
}

static weight weigh(const watch *w, int rank) {
    int wait_status = w->member[rank].wait_status;
    const record *r = &w->board->rank[rank];
    if (WIFSIGNALED(wait_status))
        return WTERMSIG(wait_status) == SIGTERM ? CONSEQUENCE : KILLED; /* perhaps all of us are being ended */
    if (WEXITSTATUS(wait_status) == 0)
        return NONE;
    bool is_consequence = atomic_load(&r->order) > 0 && (r->status == TB_LOST || r->status == TB_CANCELLED);
    return is_consequence ? CONSEQUENCE : CAUSE;
}

/* Of equals the one that failed first is to blame; one that could not tell when failed before those that could. */
static void blame(watch *w, int rank) {
    weight mine = weigh(w, rank);
    if (mine == NONE || mine < w->weight)
        return;
    if (mine == w->weight && atomic_load(&w->board->rank[rank].order) >= atomic_load(&w->board->rank[w->first].order))
        return;
    w->weight = mine;
    w->first = rank;
}

static void reap(watch *w, int rank, int options) {
    member *m = &w->member[rank];
    pid_t ended;
    do {
        ended = waitpid(m->pid, &m->wait_status, options);
    } while (ended < 0 && errno == EINTR);
    if (ended == m->pid) {
        m->pid = 0;
        w->nalive--;
        drain(w, rank);
    }
}

static void watch_once(watch *w, int timeout_ms) {
    int n = w->crew->nranks;
    if (w->crew->tick)
        w->crew->tick(w->crew->arg);
    for (int rank = 0; rank < n; rank++)
        w->polls[rank] = (struct pollfd){.fd = w->member[rank].pipe, .events = POLLIN};
    w->polls[n] = (struct pollfd){.fd = w->guard->fd, .events = POLLIN};
    (void)poll(w->polls, (nfds_t)n + 1, timeout_ms);
    look_for_signals(w->guard);
    for (int rank = 0; rank < n; rank++) {
        drain(w, rank);
        if (w->member[rank].pid == 0)
            continue;
        reap(w, rank, WNOHANG);
        if (w->member[rank].pid == 0)
            blame(w, rank);
    }
}

/* Until all have ended, or there is a reason to end them. A consequence is no reason yet: its cause may show, or a
 * signal that was meant for all of us and reached this process last. */
static void watch_all(watch *w) {
    int64_t grace_ends = INT64_MAX;
    while (w->guard->caught == 0 && w->weight < CAUSE && (w->nalive > 0 || w->weight == CONSEQUENCE)) {
        int left = tb__ms_until(grace_ends);
        if (left == 0)
            return;
        watch_once(w, left < TICK_MS ? left : TICK_MS);
        if (w->weight == CONSEQUENCE && grace_ends == INT64_MAX)
            grace_ends = tb__now_ms() + GRACE_MS;
    }
}

static void end_all(watch *w) {
    for (int rank = 0; rank < w->crew->nranks; rank++) {
        if (w->member[rank].pid != 0)
            kill(w->member[rank].pid, SIGKILL);
    }
    for (int rank = 0; rank < w->crew->nranks; rank++) {
        if (w->member[rank].pid != 0)
            reap(w, rank, 0);
    }
}

/* In the rank's process. */
static _Noreturn void be_rank(watch *w, int rank, int output, pid_t parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(TOOL_FAILED); /* it died before it could be followed */
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
    close(output);
    close(w->guard->fd);
    for (int i = 0; i < rank; i++)
        close(w->member[i].pipe);
    /* A terminal's signals reach the parent too, which ends all in good order. */
    signal(SIGINT, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGQUIT, SIG_IGN);
    sigprocmask(SIG_SETMASK, &w->guard->before, NULL);
    tb_status status = w->crew->work(w->crew->arg, rank);
    if (status != TB_OK) {
        record *r = &w->board->rank[rank];
        r->status = status;
        snprintf(r->sentence, sizeof r->sentence, "%s", tb_error_detail());
        atomic_store(&r->order, atomic_fetch_add(&w->board->nfailed, 1) + 1);
    }
    fflush(stdout);
    _exit(status == TB_OK ? TOOL_OK : TOOL_FAILED);
}

static tb_status start_rank(watch *w, int rank) {
    int ends[2];
    const char *name = w->crew->names[rank];
    if (pipe2(ends, O_CLOEXEC) != 0)
        return tb__fail(TB_IO, "%s: pipe: %s", name, strerror(errno));
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) {
        close(ends[0]);
        be_rank(w, rank, ends[1], parent);
    }
    int error = errno;
    close(ends[1]);
    if (pid < 0) {
        close(ends[0]);
        return tb__fail(TB_IO, "%s: fork: %s", name, strerror(error));
    }
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    w->member[rank].pid = pid;
    w->member[rank].pipe = ends[0];
    w->nalive++;
    return TB_OK;
}

static tb_status fail_for(const watch *w) {
    const char *name = w->crew->names[w->first];
    const record *r = &w->board->rank[w->first];
    int wait_status = w->member[w->first].wait_status;
    if (WIFSIGNALED(wait_status))
        return tb__fail(TB_LOST, "%s was ended by signal %d (%s)", name, WTERMSIG(wait_status),
                        strsignal(WTERMSIG(wait_status)));
    if (atomic_load(&r->order) == 0)
        return tb__fail(TB_LOST, "%s ended with exit status %d", name, WEXITSTATUS(wait_status));
    return tb__fail(r->status, "%s: %.*s", name, MAX_SENTENCE, r->sentence);
}

static tb_status run_crew(watch *w) {
    tb_status status = TB_OK;
    for (int rank = 0; rank < w->crew->nranks; rank++)
        w->member[rank].pipe = -1;
    for (int rank = 0; rank < w->crew->nranks && status == TB_OK; rank++)
        status = start_rank(w, rank);
    if (status == TB_OK)
        watch_all(w);
    end_all(w);
    if (status != TB_OK)
        return status;
    if (w->guard->caught != 0)
        return tb__fail(TB_CANCELLED, "ended by signal %d (%s)", w->guard->caught, strsignal(w->guard->caught));
    return w->weight == NONE ? TB_OK : fail_for(w);
}

tb_status tool_crew_run(const tool_crew *crew, tool_guard *guard) {
    size_t n = (size_t)crew->nranks;
    watch w = {.crew = crew, .guard = guard, .first = -1, .board_nbytes = sizeof(board) + n * sizeof(record)};
    void *shared;
    TB_TRY(tool_share(w.board_nbytes, &shared));
    w.board = shared;
    w.member = tb__calloc(n, sizeof *w.member);
    w.polls = tb__calloc(n + 1, sizeof *w.polls);
    tb_status status = w.member && w.polls ? run_crew(&w) : TB_NO_MEMORY;
    free(w.polls);
    free(w.member);
    tool_unshare(w.board, w.board_nbytes);
    return status;
}
