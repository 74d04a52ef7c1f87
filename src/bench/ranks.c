/* Processes that work together: forked from this one, led through steps, watched, and ended with it. */
#include "bench/move.h"

#include "base/descriptors.h"
#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    TICK_MS = 100,
    LOOK_MS = 1000,
    GRACE_MS = 2000, /* how long the cause is awaited once its consequences show */
    MAX_SENTENCE = 800,
    MAX_LINE = 500,
};

/* What a rank has in shared memory. */
typedef struct seat {
    tool_slot slot;
    _Atomic uint32_t turn; /* of the last step that it ended */
    _Atomic int order;     /* of its failure, from 1, over all ranks; 0: it has not failed */
    tb_status status;
    char sentence[MAX_SENTENCE];
} seat;

typedef struct board {
    _Atomic uint32_t turn; /* a futex; the parent adds one to begin a step */
    _Atomic uint32_t ndone;
    _Atomic int nfailed;
    int step;
    seat rank[];
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

struct tool_ranks {
    tool_ranks_opts opts;
    tool_guard *guard;
    int done_fd; /* written to by the last rank that ends a step, and by one that fails */
    board *board;
    size_t board_nbytes;
    member *member;
    struct pollfd *polls; /* of the pipes, the guard, done_fd */
    int first;            /* the rank to blame so far; -1: none */
    weight weight;        /* of its failure */
};

static void futex(_Atomic uint32_t *word, int operation, uint32_t value, const struct timespec *timeout) {
    syscall(SYS_futex, word, operation, value, timeout, NULL, 0);
}

/* In the rank's process. */

static void do_step(const tool_ranks *r, int rank) {
    seat *own = &r->board->rank[rank];
    tb_status status = r->opts.work(r->opts.arg, rank, r->board->step, &own->slot);
    if (own->slot.ended_ns == 0)
        own->slot.ended_ns = tool_now_ns();
    if (status != TB_OK) {
        own->status = status;
        snprintf(own->sentence, sizeof own->sentence, "%s", tb_error_detail());
        atomic_store(&own->order, atomic_fetch_add(&r->board->nfailed, 1) + 1);
    }
    fflush(stdout);
    atomic_fetch_add(&own->turn, 1);
    bool is_last = atomic_fetch_add(&r->board->ndone, 1) + 1 == (uint32_t)r->opts.n;
    if (is_last || status != TB_OK)
        (void)eventfd_write(r->done_fd, 1);
}

static _Noreturn void be_rank(const tool_ranks *r, int rank, int output, pid_t parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
    close(output);
    for (int i = 0; i < rank; i++)
        close(r->member[i].pipe);
    /* A terminal's signals reach the parent too, which ends all in good order. */
    signal(SIGINT, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGQUIT, SIG_IGN);
    tool_guard_drop(r->guard);
    struct timespec look = tb__time_of_ms(LOOK_MS);
    for (uint32_t turn = 0;; turn++) {
        do {
            if (getppid() != parent)
                _exit(TOOL_FAILED); /* it may have died before it could be followed */
            futex(&r->board->turn, FUTEX_WAIT, turn, &look);
        } while (atomic_load(&r->board->turn) == turn);
        do_step(r, rank);
    }
}

/* In the parent. */

static tb_status start_rank(tool_ranks *r, int rank) {
    int ends[2];
    const char *name = r->opts.names[rank].text;
    if (pipe2(ends, O_CLOEXEC) != 0)
        return tb__fail(TB_IO, "%s: pipe: %s", name, tb__errno_text(errno));
    fflush(NULL); /* or the child would print it again */
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) {
        close(ends[0]);
        be_rank(r, rank, ends[1], parent);
    }
    int error = errno;
    close(ends[1]);
    if (pid < 0) {
        close(ends[0]);
        return tb__fail(TB_IO, "%s: fork: %s", name, strerror(error));
    }
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    r->member[rank].pid = pid;
    r->member[rank].pipe = ends[0];
    return TB_OK;
}

static tb_status start_all(tool_ranks *r) {
    size_t n = (size_t)r->opts.n;
    void *shared;
    r->member = tb__calloc(n, sizeof *r->member);
    r->polls = tb__calloc(n + 2, sizeof *r->polls);
    if (!r->member || !r->polls)
        return TB_NO_MEMORY;
    for (int rank = 0; rank < r->opts.n; rank++)
        r->member[rank].pipe = -1;
    r->done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (r->done_fd < 0)
        return tb__fail(TB_IO, "eventfd: %s", tb__errno_text(errno));
    r->board_nbytes = sizeof(board) + n * sizeof(seat);
    TB_TRY(tool_share(r->board_nbytes, &shared));
    r->board = shared;
    for (int rank = 0; rank < r->opts.n; rank++)
        TB_TRY(start_rank(r, rank));
    return TB_OK;
}

tb_status tool_ranks_create(const tool_ranks_opts *opts, tool_guard *guard, tool_ranks **out) {
    tool_ranks *r = tb__calloc(1, sizeof *r);
    if (!r)
        return TB_NO_MEMORY;
    *r = (tool_ranks){.opts = *opts, .guard = guard, .done_fd = -1, .first = -1};
    tb_status status = start_all(r);
    if (status == TB_OK)
        *out = r;
    else
        tool_ranks_destroy(r);
    return status;
}

static void flush_line(tool_ranks *r, int rank) {
    member *m = &r->member[rank];
    m->line[m->line_used] = '\0';
    if (m->line_used > 0)
        tool_fail(TOOL_FAILED, "%s: %s", r->opts.names[rank].text, m->line);
    m->line_used = 0;
}

static void drain(tool_ranks *r, int rank) {
    member *m = &r->member[rank];
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
                flush_line(r, rank);
        }
        if (n <= 0) {
            flush_line(r, rank);
            close(m->pipe);
            m->pipe = -1;
        }
    }
}

static void reap(tool_ranks *r, int rank, int options) {
    member *m = &r->member[rank];
    pid_t ended;
    do {
        ended = waitpid(m->pid, &m->wait_status, options);
    } while (ended < 0 && errno == EINTR);
    if (ended == m->pid)
        m->pid = 0;
    drain(r, rank);
}

static weight weigh(const tool_ranks *r, int rank) {
    const member *m = &r->member[rank];
    const seat *s = &r->board->rank[rank];
    if (m->pid == 0 && WIFSIGNALED(m->wait_status))
        return WTERMSIG(m->wait_status) == SIGTERM ? CONSEQUENCE : KILLED; /* perhaps all of us are being ended */
    if (atomic_load(&s->order) > 0)
        return s->status == TB_LOST || s->status == TB_CANCELLED ? CONSEQUENCE : CAUSE;
    return m->pid == 0 ? CAUSE : NONE;
}

/* Of equals the one that failed first is to blame; one that could not tell when failed before those that could. */
static void blame(tool_ranks *r, int rank) {
    weight mine = weigh(r, rank);
    if (mine == NONE || mine < r->weight)
        return;
    if (mine == r->weight && atomic_load(&r->board->rank[rank].order) >= atomic_load(&r->board->rank[r->first].order))
        return;
    r->weight = mine;
    r->first = rank;
}

/* Whether the step has come to an end, or there is a reason to give it up. A consequence is no reason yet: its cause
 * may show, or a signal that was meant for all of us and reached this process last. */
static bool is_over(tool_ranks *r) {
    bool are_done = atomic_load(&r->board->ndone) == (uint32_t)r->opts.n; /* before looking how they fared */
    for (int rank = 0; rank < r->opts.n; rank++) {
        if (r->member[rank].pid != 0)
            reap(r, rank, WNOHANG);
        blame(r, rank);
    }
    return tool_guard_check(r->guard) != TB_OK || r->weight >= CAUSE || (r->weight == NONE && are_done);
}

static void wait_for_news(tool_ranks *r, int timeout_ms) {
    int n = r->opts.n, tick_ms = r->opts.tick ? TICK_MS : LOOK_MS;
    eventfd_t seen;
    if (r->opts.tick)
        r->opts.tick(r->opts.arg);
    for (int rank = 0; rank < n; rank++)
        r->polls[rank] = (struct pollfd){.fd = r->member[rank].pipe, .events = POLLIN};
    r->polls[n] = (struct pollfd){.fd = r->guard->fd, .events = POLLIN};
    r->polls[n + 1] = (struct pollfd){.fd = r->done_fd, .events = POLLIN};
    (void)poll(r->polls, (nfds_t)n + 2, timeout_ms < tick_ms ? timeout_ms : tick_ms);
    (void)eventfd_read(r->done_fd, &seen);
}

static tb_status tell_who_failed(const tool_ranks *r) {
    const char *name = r->opts.names[r->first].text;
    const seat *s = &r->board->rank[r->first];
    int wait_status = r->member[r->first].wait_status;
    if (r->member[r->first].pid == 0 && WIFSIGNALED(wait_status))
        return tb__fail(TB_LOST, "%s was ended by signal %d (%s)", name, WTERMSIG(wait_status),
                        strsignal(WTERMSIG(wait_status)));
    if (atomic_load(&s->order) == 0)
        return tb__fail(TB_LOST, "%s ended with exit status %d", name, WEXITSTATUS(wait_status));
    return tb__fail(s->status, "%s: %.*s", name, MAX_SENTENCE, s->sentence);
}

static tb_status tell_who_is_late(const tool_ranks *r) {
    char who[256] = "";
    for (int rank = 0; rank < r->opts.n; rank++) {
        size_t used = strlen(who);
        if (atomic_load(&r->board->rank[rank].turn) != atomic_load(&r->board->turn))
            snprintf(who + used, sizeof who - used, "%s%s", used ? ", " : "", r->opts.names[rank].text);
    }
    return tb__fail(TB_TIMEOUT, "not ready after %d ms: %s", r->opts.timeout_ms, who);
}

static tb_status watch(tool_ranks *r) {
    int64_t deadline = tb__now_ms() + r->opts.timeout_ms;
    bool is_cut_short = false;
    while (!is_over(r)) {
        if (r->weight == CONSEQUENCE && !is_cut_short) {
            deadline = tb__now_ms() + GRACE_MS;
            is_cut_short = true;
        }
        int left = tb__ms_until(deadline);
        if (left == 0)
            return is_cut_short ? tell_who_failed(r) : tell_who_is_late(r);
        wait_for_news(r, left);
    }
    TB_TRY(tool_guard_check(r->guard));
    return r->weight == NONE ? TB_OK : tell_who_failed(r);
}

tb_status tool_ranks_step(tool_ranks *r, int step, double *seconds) {
    for (int rank = 0; rank < r->opts.n; rank++) {
        tool_slot *slot = &r->board->rank[rank].slot;
        atomic_store(&slot->done, 0);
        slot->ended_ns = 0;
    }
    r->board->step = step;
    atomic_store(&r->board->ndone, 0);
    if (r->opts.tick)
        r->opts.tick(r->opts.arg); /* however short the step may be */
    int64_t start = tool_now_ns(), end = start;
    atomic_fetch_add(&r->board->turn, 1);
    futex(&r->board->turn, FUTEX_WAKE, INT32_MAX, NULL);
    TB_TRY(watch(r));
    for (int rank = 0; rank < r->opts.n; rank++) {
        int64_t theirs = r->board->rank[rank].slot.ended_ns;
        end = theirs > end ? theirs : end;
    }
    if (seconds)
        *seconds = 1e-9 * (double)(end - start);
    return TB_OK;
}

const tool_slot *tool_ranks_slot(const tool_ranks *r, int rank) {
    return &r->board->rank[rank].slot;
}

int64_t tool_ranks_memory(const tool_ranks *r) {
    int64_t total = 0;
    for (int rank = 0; rank < r->opts.n; rank++) {
        char line[256], path[64];
        snprintf(path, sizeof path, "/proc/%d/smaps_rollup", (int)r->member[rank].pid);
        FILE *file = fopen(path, "re");
        int64_t kib = -1;
        while (file && kib < 0 && fgets(line, sizeof line, file)) {
            if (sscanf(line, "Pss: %" SCNd64, &kib) != 1)
                kib = -1;
        }
        if (file)
            fclose(file);
        if (kib < 0)
            return -1;
        total += kib * 1024;
    }
    return total;
}

void tool_ranks_destroy(tool_ranks *r) {
    if (!r)
        return;
    for (int rank = 0; r->member && rank < r->opts.n; rank++) {
        if (r->member[rank].pid != 0)
            kill(r->member[rank].pid, SIGKILL);
    }
    for (int rank = 0; r->member && rank < r->opts.n; rank++) {
        if (r->member[rank].pid != 0)
            reap(r, rank, 0);
        if (r->member[rank].pipe >= 0)
            close(r->member[rank].pipe);
    }
    if (r->done_fd >= 0)
        close(r->done_fd);
    tool_unshare(r->board, r->board_nbytes);
    free(r->polls);
    free(r->member);
    free(r);
}
