/* command_rtt: how long a client waits for the reply to a QueryStatus, next to two processes that send each other as
 * many bytes over a Unix socket and do nothing else. Both are asked in turns by one process, which sleeps in the same
 * way for each, and both answer by an epoll loop; all are on one core. */
#include "bench/bench.h"

#include "base/descriptors.h"

#include "bench/fleet.h"
#include "bus/client/remote.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    MEASURE = TOOL_NSTEPS, /* one more step */
    CALLS = 2000,          /* of each kind in it ... */
    TURN = 20,             /* ... so many at a time */
    MAX_FRAME = 4096,
    ASKS = 0, /* the rank that measures; the other answers the bare socket */
};

/* What the rank that measures tells the others. */
typedef struct figures {
    size_t asked, answered; /* bytes of a command, and of its reply */
    double ours, theirs;    /* the last step's medians, in us */
} figures;

/* In each process a copy. */
typedef struct trial {
    tool_job job;
    tool_ranks *ranks;
    tool_fleet *agents;
    tool_mover mover;
    tool_client client;
    int bare[TOOL_NSIDES]; /* by rank: the ends of a bare socket */
    figures *figures;      /* shared */
    double ours[CALLS], theirs[CALLS];
} trial;

/* ---- In a rank's process ------------------------------------------------------------------------------------- */

static tb_status count_bytes(const tb__message *message, size_t *out) {
    tb__bytes bytes = {0};
    tb_status status = tb__message_encode(message, &bytes);
    *out = bytes.count;
    free(bytes.item);
    return status == TB_OK && *out > MAX_FRAME ? tb__fail(TB_INTERNAL, "a frame has %zu bytes", *out) : status;
}

static tb__link *link_of(const trial *t) {
    return ((const remote_world *)t->client.world)->link;
}

/* As tb_batch_query asks, to learn how much goes to and fro. */
static tb_status learn_sizes(trial *t) {
    tb__message command = {.kind = TB__QUERY_STATUS, .batch_id = TOOL_CLIENT_BATCH};
    tb__link_reply *reply = NULL;
    tb__link_lock(link_of(t));
    tb_status status = tb__link_call(link_of(t), &command, NULL, 0, 0, "told the status", &reply);
    tb__link_unlock(link_of(t));
    if (status == TB_OK)
        status = count_bytes(&command, &t->figures->asked);
    if (status == TB_OK)
        status = count_bytes(&reply->message, &t->figures->answered);
    tb__link_reply_free(reply);
    return status;
}

/* All on one core: it is the programs that are compared, not how long another core takes to wake up. */
static void take_core(pid_t pid, const cpu_set_t *all) {
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; i++) {
        if (CPU_ISSET(i, all))
            CPU_SET(i, &one);
    }
    sched_setaffinity(pid, sizeof one, &one);
}

/* The process at the other end, whose loop is its first thread. */
static pid_t agent_of(const trial *t) {
    struct ucred agent = {.pid = 0};
    socklen_t length = sizeof agent;
    getsockopt(link_of(t)->socket.fd, SOL_SOCKET, SO_PEERCRED, &agent, &length);
    return agent.pid;
}

static tb_status write_all(int fd, const char *data, size_t nbytes) {
    ssize_t n = send(fd, data, nbytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    return n == (ssize_t)nbytes ? TB_OK : tb__fail(TB_IO, "the bare socket: %s", strerror(errno));
}

/* `loop` is an epoll of the socket; -1: there is none. */
static tb_status read_all(const trial *t, int fd, int loop, char *data, size_t nbytes) {
    for (size_t have = 0; have < nbytes;) {
        struct epoll_event event;
        struct pollfd readable = {.fd = fd, .events = POLLIN};
        int n = loop >= 0 ? epoll_wait(loop, &event, 1, t->job.timeout_ms) : poll(&readable, 1, t->job.timeout_ms);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return tb__fail(TB_TIMEOUT, "the bare socket: %s", n == 0 ? "silent" : strerror(errno));
        ssize_t got = recv(fd, data + have, nbytes - have, MSG_DONTWAIT);
        if (got <= 0)
            return tb__fail(TB_IO, "the bare socket: %s", got == 0 ? "closed" : strerror(errno));
        have += (size_t)got;
    }
    return TB_OK;
}

static tb_status answer(const trial *t) {
    char frame[MAX_FRAME] = {0};
    int fd = t->bare[!ASKS], loop = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN};
    tb_status status = TB_OK;
    if (loop < 0 || epoll_ctl(loop, EPOLL_CTL_ADD, fd, &event) != 0)
        status = tb__fail(TB_IO, "epoll: %s", tb__errno_text(errno));
    for (int i = 0; i < CALLS && status == TB_OK; i++) {
        status = read_all(t, fd, loop, frame, t->figures->asked);
        if (status == TB_OK)
            status = write_all(fd, frame, t->figures->answered);
    }
    if (loop >= 0)
        close(loop);
    return status;
}

static tb_status query(trial *t) {
    tb_batch_state unused = {.size = sizeof unused};
    return tb_batch_query(t->client.batch, &unused);
}

static tb_status ping(trial *t) {
    char frame[MAX_FRAME] = {0};
    TB_TRY(write_all(t->bare[ASKS], frame, t->figures->asked));
    return read_all(t, t->bare[ASKS], -1, frame, t->figures->answered);
}

static tb_status ask(trial *t) {
    for (int i = 0; i < 2 * CALLS; i++) {
        bool is_ours = i / TURN % 2;
        int at = i / (2 * TURN) * TURN + i % TURN;
        int64_t start = tool_now_ns();
        TB_TRY(is_ours ? query(t) : ping(t));
        (is_ours ? t->ours : t->theirs)[at] = 1e-3 * (double)(tool_now_ns() - start);
    }
    t->figures->ours = bench_median(t->ours, CALLS);
    t->figures->theirs = bench_median(t->theirs, CALLS);
    return TB_OK;
}

static tb_status measure(trial *t, int rank) {
    cpu_set_t all;
    if (sched_getaffinity(0, sizeof all, &all) != 0)
        return tb__fail(TB_IO, "sched_getaffinity: %s", strerror(errno));
    pid_t agent = rank == ASKS ? agent_of(t) : 0;
    take_core(0, &all);
    if (agent > 0)
        take_core(agent, &all);
    tb_status status = rank == ASKS ? ask(t) : answer(t);
    sched_setaffinity(0, sizeof all, &all);
    if (agent > 0)
        sched_setaffinity(agent, sizeof all, &all);
    return status;
}

static tb_status work(void *arg, int rank, int step, tool_slot *slot) {
    trial *t = arg;
    switch (step) {
    case TOOL_CONNECT:
        return tool_client_open(&t->client);
    case TOOL_MOVE:
        TB_TRY(tool_client_move(&t->client));
        return rank == ASKS ? learn_sizes(t) : TB_OK;
    case MEASURE:
        return measure(t, rank);
    case TOOL_ALLOCATE:
        tool_mover_init(&t->mover, &t->job, rank);
        t->client = (tool_client){.job = &t->job, .end = &t->mover.end[0], .rank = rank};
        break;
    case TOOL_CLOSE:
        tool_client_close(&t->client);
        break;
    default:
        break;
    }
    return tool_mover_do(&t->mover, (tool_step)step, slot);
}

/* ---- In the parent ------------------------------------------------------------------------------------------- */

static tb_status run_rounds(trial *t, bench_rounds *rounds, bench_round *out) {
    static const int steps[] = {TOOL_ALLOCATE, TOOL_PREPARE, TOOL_CONNECT, TOOL_MOVE, TOOL_VERIFY, MEASURE};
    tool_show_line(BENCH_RTT ": connecting");
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        TB_TRY(tool_ranks_step(t->ranks, steps[i], NULL));
    while (bench_rounds_next(rounds, tool_now_ns())) {
        tool_show_line(BENCH_RTT ": round %d of %d", rounds->done, rounds->most);
        TB_TRY(tool_ranks_step(t->ranks, MEASURE, NULL));
        out[rounds->done - 1] = (bench_round){t->figures->ours, t->figures->theirs};
    }
    return tool_ranks_step(t->ranks, TOOL_CLOSE, NULL);
}

static tb_status make_bare(int fd[TOOL_NSIDES]) {
    return socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fd) == 0
               ? TB_OK
               : tb__fail(TB_IO, "socketpair: %s", tb__errno_text(errno));
}

static tb_status start(trial *t, tool_guard *guard) {
    tool_job *job = &t->job;
    tool_llama unused;
    void *shared;
    TB_TRY(tool_share(sizeof *t->figures, &shared));
    t->figures = shared;
    TB_TRY(tool_side_init(&job->side[TOOL_SOURCE], TOOL_SOURCE, "from", NULL, 1));
    TB_TRY(tool_side_init(&job->side[TOOL_TARGET], TOOL_TARGET, "to", NULL, 1));
    TB_TRY(tool_llama_add(&job->tensors, TOOL_MIN_LLAMA, &unused));
    TB_TRY(tool_job_weigh(job));
    TB_TRY(make_bare(t->bare));
    TB_TRY(tool_job_start(job, &(tool_ranks_opts){.work = work, .arg = t}, guard, &t->ranks));
    return tool_fleet_create(job, guard, &t->agents);
}

tb_status bench_rtt_run(const tb_batch_opts *opts, bench_rounds *rounds, tool_guard *guard, bench_round *out) {
    trial t = {.job.batch = *opts, .bare = {-1, -1}};
    tb_status status = start(&t, guard);
    if (status == TB_OK) {
        status = run_rounds(&t, rounds, out);
        if (status != TB_OK && status != TB_CANCELLED)
            (void)tool_fleet_check(t.agents);
    }
    tool_ranks_destroy(t.ranks);
    tool_fleet_destroy(t.agents);
    for (int i = 0; i < TOOL_NSIDES; i++) {
        if (t.bare[i] >= 0)
            close(t.bare[i]);
    }
    tool_unshare(t.figures, sizeof *t.figures);
    tool_job_fini(&t.job);
    return status;
}
