/* command_rtt: how long a client waits for the reply to a QueryStatus, next to two processes that send each other as
 * many bytes over a Unix socket and do nothing else. */
#include "tools/bench.h"

#include "bus/client/client.h"
#include "tools/fleet.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    QUERY = TOOL_NSTEPS, /* more steps: asking the agent, */
    PING,                /* and the bare socket */
    CALLS = 2000,        /* in a step */
    MAX_FRAME = 4096,
    ASKS = 0, /* the rank that measures; the other answers the bare socket */
};

/* What the rank that measures tells the others. */
typedef struct figures {
    size_t asked, answered; /* bytes of a command, and of its reply */
    double us;              /* the last step's median */
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
    double us[CALLS];
} trial;

/* ---- In a rank's process ------------------------------------------------------------------------------------- */

static int compare_doubles(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static void tell_median(trial *t) {
    qsort(t->us, CALLS, sizeof *t->us, compare_doubles);
    t->figures->us = t->us[CALLS / 2];
}

static tb_status count_bytes(const tb__message *message, size_t *out) {
    tb__bytes bytes = {0};
    tb_status status = tb__message_encode(message, &bytes);
    *out = bytes.count;
    free(bytes.item);
    return status == TB_OK && *out > MAX_FRAME ? tb__fail(TB_INTERNAL, "a frame has %zu bytes", *out) : status;
}

/* As tb_client_query asks, to learn how much goes to and fro. */
static tb_status learn_sizes(trial *t) {
    tb__message command = {.kind = TB__QUERY_STATUS, .batch_id = TOOL_CLIENT_BATCH};
    tb__client_reply *reply;
    TB_TRY(tb__client_call(t->client.client, &command, NULL, 0, 0, "told the status", &reply));
    tb_status status = count_bytes(&command, &t->figures->asked);
    if (status == TB_OK)
        status = count_bytes(&reply->message, &t->figures->answered);
    tb__client_reply_free(reply);
    return status;
}

static tb_status query(trial *t) {
    for (int i = 0; i < CALLS; i++) {
        tb_client_status about;
        int64_t start = tool_now_ns();
        TB_TRY(tb_client_query(t->client.batch, &about));
        t->us[i] = 1e-3 * (double)(tool_now_ns() - start);
    }
    tell_median(t);
    return TB_OK;
}

static tb_status write_all(int fd, const char *data, size_t nbytes) {
    ssize_t n = send(fd, data, nbytes, MSG_NOSIGNAL);
    return n == (ssize_t)nbytes ? TB_OK : tb__fail(TB_IO, "the bare socket: %s", strerror(errno));
}

/* It has a deadline of its own: see make_bare. */
static tb_status read_all(int fd, char *data, size_t nbytes) {
    for (size_t have = 0; have < nbytes;) {
        ssize_t n = recv(fd, data + have, nbytes - have, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return tb__fail(TB_IO, "the bare socket: %s", n == 0 ? "closed" : strerror(errno));
        have += (size_t)n;
    }
    return TB_OK;
}

static tb_status ping(trial *t, int rank) {
    char frame[MAX_FRAME] = {0};
    size_t asked = t->figures->asked, answered = t->figures->answered;
    int fd = t->bare[rank];
    for (int i = 0; i < CALLS; i++) {
        int64_t start = tool_now_ns();
        if (rank == ASKS)
            TB_TRY(write_all(fd, frame, asked));
        TB_TRY(read_all(fd, frame, rank == ASKS ? answered : asked));
        if (rank != ASKS)
            TB_TRY(write_all(fd, frame, answered));
        t->us[i] = 1e-3 * (double)(tool_now_ns() - start);
    }
    if (rank == ASKS)
        tell_median(t);
    return TB_OK;
}

static tb_status work(void *arg, int rank, int step, tool_slot *slot) {
    trial *t = arg;
    switch (step) {
    case TOOL_CONNECT:
        return tool_client_open(&t->client);
    case TOOL_MOVE:
        TB_TRY(tool_client_move(&t->client));
        return rank == ASKS ? learn_sizes(t) : TB_OK;
    case QUERY:
        return rank == ASKS ? query(t) : TB_OK;
    case PING:
        return ping(t, rank);
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

static tb_status measure(const trial *t, int step, double *us) {
    TB_TRY(tool_ranks_step(t->ranks, step, NULL));
    *us = t->figures->us;
    return TB_OK;
}

static tb_status run_rounds(trial *t, int rounds, bench_round *out) {
    static const int steps[] = {TOOL_ALLOCATE, TOOL_PREPARE, TOOL_CONNECT, TOOL_MOVE, TOOL_VERIFY, QUERY, PING};
    tool_show_line(BENCH_RTT ": connecting");
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        TB_TRY(tool_ranks_step(t->ranks, steps[i], NULL));
    for (int i = 0; i < rounds; i++) {
        tool_show_line(BENCH_RTT ": round %d of %d", i + 1, rounds);
        TB_TRY(measure(t, PING, &out[i].theirs));
        TB_TRY(measure(t, QUERY, &out[i].ours));
    }
    return tool_ranks_step(t->ranks, TOOL_CLOSE, NULL);
}

static tb_status make_bare(int fd[TOOL_NSIDES], int timeout_ms) {
    struct timeval patience = {.tv_sec = timeout_ms / 1000};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fd) != 0)
        return tb__fail(TB_IO, "socketpair: %s", strerror(errno));
    for (int i = 0; i < TOOL_NSIDES; i++)
        setsockopt(fd[i], SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    return TB_OK;
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
    TB_TRY(make_bare(t->bare, job->timeout_ms));
    TB_TRY(tool_job_start(job, &(tool_ranks_opts){.work = work, .arg = t}, guard, &t->ranks));
    return tool_fleet_create(job, guard, &t->agents);
}

tb_status bench_rtt_run(const tb_batch_opts *opts, int rounds, tool_guard *guard, bench_round *out) {
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
