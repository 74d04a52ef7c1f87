/* Lines between two machines: `tensorbus bench --between` is started in a shell on each, with one store. The first one
 * sends, the second one receives. They meet through the store, and connect by a plain socket, by which they go from
 * step to step together, and with which the transfers are compared. */
#include "bench/bench.h"

#include "base/descriptors.h"
#include "loop/loop.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    MEET = TOOL_NSTEPS, /* more steps */
    SERIES,
    MEET_MS = 600000,
    SILENT_MS = 600000,
    CONNECT_MS = 3000,
    LOOK_MS = 100,
    NADDRESSES = 16,
    CALLS = 200, /* of a latency */
    SMALL = 4096,
    CHUNK = 1 << 20,
    ONLY_ROOM = 256,
};

/* What one shell tells the other through the store. What is measured is what the first one was asked for. */
typedef struct hello {
    char host[TB__CONTACT_PREFIX], only[ONLY_ROOM];
    unsigned char nonce[32];
    int64_t size;
    int32_t rounds, naddresses;
    struct sockaddr_storage address[NADDRESSES];
} hello;

typedef struct shared {
    hello own, theirs;
    bool is_first;
} shared;

typedef struct between {
    bench *b;
    shared *shared;
    int fd; /* to the other shell */
    char *chunk;
} between;

/* How a step has gone on one side. */
typedef struct word {
    int32_t is_ok;
    double seconds;
    char sentence[500];
} word;

typedef struct between_case {
    const char *name, *transport, *work;
    bench_unit unit;
    const char *src, *dst; /* layouts; NULL: as a model has them */
    tb_status (*build)(tool_tensors *tensors, int64_t size);
} between_case;

static tb_status build_matrix(tool_tensors *tensors, int64_t size) {
    int64_t columns = 1;
    while (16 * columns * columns <= size)
        columns *= 2;
    tool_tensor tensor = {
        .name = "matrix", .shape = {2, {size / 4 / columns / 2 * 2, columns}}, .dtype = {TB_F32, TB_F32}};
    return tb__vec_push(tensors, tensor) ? TB_OK : TB_NO_MEMORY;
}

static tb_status build_small(tool_tensors *tensors, int64_t size) {
    (void)size;
    return build_matrix(tensors, SMALL);
}

static tb_status build_model(tool_tensors *tensors, int64_t size) {
    tool_llama unused;
    return tool_llama_add(tensors, size, &unused);
}

#define CASES(transport)                                                                                               \
    {transport "_bandwidth", transport,   "f32 matrix, 1 to 1 rank", BENCH_GB_PER_S, "mesh=1 place=R",                 \
     "mesh=1 place=R",       build_matrix},                                                                            \
        {transport "_latency", transport,  "4 KiB, until the sender knows of it", BENCH_US, "mesh=1 place=R",          \
         "mesh=1 place=R",     build_small},                                                                           \
        {transport "_row_col", transport,         "f32 matrix, Shard(0) to Shard(1), 2 to 2 ranks",                    \
         BENCH_GB_PER_S,       "mesh=2 place=S0", "mesh=2 place=S1",                                                   \
         build_matrix},                                                                                                \
    {                                                                                                                  \
        transport "_model", transport, "small Llama, bf16, Shard(0) on 4 to 2x2 DPxTP", BENCH_GB_PER_S, NULL, NULL,    \
            build_model                                                                                                \
    }

static const between_case cases[] = {CASES("shm"), CASES("ucx")};
enum { NCASES = sizeof cases / sizeof *cases };

bool bench_between_is_line(const char *name, size_t length) {
    for (int i = 0; i < NCASES; i++) {
        if (strlen(cases[i].name) == length && strncmp(cases[i].name, name, length) == 0)
            return true;
    }
    return false;
}

/* ---- The plain socket ---------------------------------------------------------------------------------------- */

static tb_status wait_for(between *w, int fd, short events, int timeout_ms) {
    int64_t deadline = tool_now_ns() + (int64_t)1000000 * timeout_ms;
    for (;;) {
        struct pollfd polls[] = {{.fd = fd, .events = events}, {.fd = w->b->guard.fd, .events = POLLIN}};
        TB_TRY(tool_guard_check(&w->b->guard));
        if (poll(polls, 2, LOOK_MS) > 0 && polls[0].revents)
            return TB_OK;
        if (tool_now_ns() > deadline)
            return tb__fail(TB_TIMEOUT, "the other shell is silent for %d s", timeout_ms / 1000);
    }
}

static tb_status lost(ssize_t n) {
    return tb__fail(TB_LOST, "the connection to the other shell has ended%s%s", n == 0 ? "" : ": ",
                    n == 0 ? "; its own message says why" : strerror(errno));
}

static tb_status send_all(between *w, const void *data, size_t nbytes) {
    for (size_t done = 0; done < nbytes;) {
        ssize_t n = send(w->fd, (const char *)data + done, nbytes - done, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EAGAIN) {
            TB_TRY(wait_for(w, w->fd, POLLOUT, SILENT_MS));
            continue;
        }
        if (n <= 0 && errno != EINTR)
            return lost(-1);
        done += n > 0 ? (size_t)n : 0;
    }
    return TB_OK;
}

static tb_status recv_all(between *w, void *data, size_t nbytes) {
    for (size_t done = 0; done < nbytes;) {
        ssize_t n = recv(w->fd, (char *)data + done, nbytes - done, MSG_DONTWAIT);
        if (n < 0 && errno == EAGAIN) {
            TB_TRY(wait_for(w, w->fd, POLLIN, SILENT_MS));
            continue;
        }
        if (n == 0 || (n < 0 && errno != EINTR))
            return lost(n);
        done += n > 0 ? (size_t)n : 0;
    }
    return TB_OK;
}

/* Both sides say how it went, and learn how long it took the second one, which receives. */
static tb_status agree(between *w, tb_status status, double *seconds) {
    word own = {.is_ok = status == TB_OK, .seconds = *seconds}, theirs;
    if (status == TB_CANCELLED)
        return status;
    snprintf(own.sentence, sizeof own.sentence, "%s", status == TB_OK ? "" : tb_error_detail());
    TB_TRY(send_all(w, &own, sizeof own));
    TB_TRY(recv_all(w, &theirs, sizeof theirs));
    theirs.sentence[sizeof theirs.sentence - 1] = '\0';
    *seconds = w->shared->is_first ? theirs.seconds : own.seconds;
    if (status != TB_OK)
        return tb__fail(status, "%s", own.sentence);
    return theirs.is_ok ? TB_OK : tb__fail(TB_REFUSED, "on the other side: %s", theirs.sentence);
}

/* As many bytes by the socket itself. */
static tb_status send_plain(between *w, int64_t nbytes, double *seconds) {
    char ack = 0;
    int64_t began = tool_now_ns();
    for (int64_t done = 0; done < nbytes;) {
        size_t n = nbytes - done < CHUNK ? (size_t)(nbytes - done) : CHUNK;
        TB_TRY(w->shared->is_first ? send_all(w, w->chunk, n) : recv_all(w, w->chunk, n));
        done += (int64_t)n;
    }
    *seconds = 1e-9 * (double)(tool_now_ns() - began);
    return w->shared->is_first ? recv_all(w, &ack, 1) : send_all(w, &ack, 1);
}

/* Messages of 4 KiB, each of which the other side answers with a byte. */
static tb_status ping_plain(between *w, double *seconds) {
    char ack = 0;
    int64_t began = tool_now_ns();
    for (int i = 0; i < CALLS; i++) {
        TB_TRY(w->shared->is_first ? send_all(w, w->chunk, SMALL) : recv_all(w, w->chunk, SMALL));
        TB_TRY(w->shared->is_first ? recv_all(w, &ack, 1) : send_all(w, &ack, 1));
    }
    *seconds = 1e-9 * (double)(tool_now_ns() - began);
    return TB_OK;
}

/* ---- Meeting ------------------------------------------------------------------------------------------------- */

static tb_status transfer(tb_batch *batch, bool is_send) {
    const tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = MEET_MS};
    tb_transfer *t = NULL;
    tb_status status = is_send ? tb_send(batch, &opts, &t) : tb_recv(batch, &opts, &t);
    if (status == TB_OK)
        status = tb_wait(t, TB_COMMITTED, -1);
    tb_transfer_destroy(t);
    return status;
}

/* In a process of its own, which keeps its seat, and serves the store if nobody else does, until the bench has ended.
 */
static tb_status meet(void *arg, int rank, int step, tool_slot *slot) {
    static const char *const groups[] = {"bench-first", "bench-second"};
    between *w = arg;
    shared *s = w->shared;
    tb_world *world;
    tb_pair *pair;
    tb_batch *batch;
    const tb_world_opts opts = {.size = sizeof opts, .token = w->b->token};
    const tb_pair_opts pair_opts = {.size = sizeof pair_opts, .timeout_ms = MEET_MS};
    (void)rank, (void)step, (void)slot;
    tb_status status = tb_world_join(w->b->store, groups[0], 0, 1, &opts, &world);
    s->is_first = status == TB_OK;
    if (status == TB_CONFLICT)
        status = tb_world_join(w->b->store, groups[1], 0, 1, &opts, &world);
    if (status == TB_CONFLICT)
        return tb__fail_within(status, "two shells are at it already, or were until a few seconds ago");
    TB_TRY(status);
    void *data;
    TB_TRY(tb_alloc(sizeof(hello), &data));
    hello *memory = data;
    const tb_tensor tensor = {.size = sizeof tensor,
                              .data = memory,
                              .dtype = TB_U8,
                              .ndim = 1,
                              .shape = {sizeof *memory},
                              .layout = "mesh=1 place=R"};
    TB_TRY(tb_pair_create(world, "bench-meet", groups[s->is_first], "mesh=1 place=R", &pair_opts, &pair));
    TB_TRY(tb_batch_create(world, "hello", NULL, &batch));
    TB_TRY(tb_batch_add(batch, pair, "hello", &tensor));
    TB_TRY(tb_batch_register(batch, MEET_MS));
    for (int i = 0; i < 2; i++) {
        bool is_send = s->is_first == (i == 0);
        *memory = s->own;
        TB_TRY(transfer(batch, is_send));
        if (!is_send)
            s->theirs = *memory;
    }
    return TB_OK;
}

/* Addresses of this machine that are up; loopback comes last, for two shells of one machine. */
static tb_status listen_anywhere(hello *own, int *out) {
    struct sockaddr_in any = {.sin_family = AF_INET};
    socklen_t length = sizeof any;
    struct ifaddrs *all;
    *out = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (*out < 0 || bind(*out, (struct sockaddr *)&any, sizeof any) != 0 || listen(*out, 4) != 0 ||
        getsockname(*out, (struct sockaddr *)&any, &length) != 0 || getifaddrs(&all) != 0)
        return tb__fail(TB_IO, "can't listen: %s", tb__errno_text(errno));
    for (int pass = 0; pass < 2; pass++) {
        for (const struct ifaddrs *at = all; at && own->naddresses < NADDRESSES; at = at->ifa_next) {
            if (!at->ifa_addr || at->ifa_addr->sa_family != AF_INET || !(at->ifa_flags & IFF_UP) ||
                !(at->ifa_flags & IFF_LOOPBACK) != (pass == 0))
                continue;
            struct sockaddr_in *to = (struct sockaddr_in *)&own->address[own->naddresses++];
            memcpy(to, at->ifa_addr, sizeof *to);
            to->sin_port = any.sin_port;
        }
    }
    freeifaddrs(all);
    return TB_OK;
}

static tb_status accept_other(between *w, int listener) {
    unsigned char nonce[sizeof w->shared->own.nonce];
    for (;;) { /* strangers are sent away */
        TB_TRY(wait_for(w, listener, POLLIN, SILENT_MS));
        w->fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        struct pollfd readable = {.fd = w->fd, .events = POLLIN};
        bool is_theirs = w->fd >= 0 && poll(&readable, 1, CONNECT_MS) > 0 &&
                         recv(w->fd, nonce, sizeof nonce, MSG_WAITALL) == (ssize_t)sizeof nonce &&
                         memcmp(nonce, w->shared->own.nonce, sizeof nonce) == 0;
        if (is_theirs)
            return send_all(w, nonce, sizeof nonce);
        if (w->fd >= 0)
            close(w->fd);
        w->fd = -1;
    }
}

static bool try_address(between *w, const hello *theirs, int i) {
    w->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct pollfd polls = {.fd = w->fd, .events = POLLOUT};
    int error = 0;
    socklen_t length = sizeof error;
    (void)connect(w->fd, (const struct sockaddr *)&theirs->address[i], sizeof(struct sockaddr_in));
    if (poll(&polls, 1, CONNECT_MS) > 0 && getsockopt(w->fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 &&
        error == 0 && send(w->fd, theirs->nonce, sizeof theirs->nonce, MSG_NOSIGNAL) == (ssize_t)sizeof theirs->nonce) {
        char answer[sizeof theirs->nonce];
        polls.events = POLLIN;
        if (poll(&polls, 1, CONNECT_MS) > 0 && recv(w->fd, answer, sizeof answer, 0) == (ssize_t)sizeof answer &&
            memcmp(answer, theirs->nonce, sizeof answer) == 0)
            return true;
    }
    close(w->fd);
    w->fd = -1;
    return false;
}

static tb_status connect_other(between *w) {
    const hello *theirs = &w->shared->theirs;
    for (int i = 0; i < theirs->naddresses && i < NADDRESSES; i++) {
        TB_TRY(tool_guard_check(&w->b->guard));
        if (try_address(w, theirs, i))
            return TB_OK;
    }
    return tb__fail(TB_REFUSED,
                    "none of the other machine's %d IPv4 addresses can be reached; for this, a firewall between the "
                    "machines has to let any port through",
                    (int)theirs->naddresses);
}

/* ---- Lines --------------------------------------------------------------------------------------------------- */

typedef struct trial {
    between *w;
    const between_case *c;
    tool_job job;
    int first; /* rank of the job */
    tool_ranks *ranks;
    tool_mover mover; /* in a rank's process: that rank */
} trial;

static tb_status work(void *arg, int rank, int step, tool_slot *slot) {
    trial *t = arg;
    if (step == TOOL_ALLOCATE)
        tool_mover_init(&t->mover, &t->job, t->first + rank);
    if (step != SERIES)
        return tool_mover_do(&t->mover, (tool_step)step, slot);
    for (int i = 0; i < CALLS; i++)
        TB_TRY(tool_mover_do(&t->mover, TOOL_MOVE, slot));
    return TB_OK;
}

static tb_status do_step(trial *t, int step, double *seconds) {
    *seconds = 0;
    tb_status status = tool_ranks_step(t->ranks, step, seconds);
    return agree(t->w, status, seconds);
}

static tb_status run_round(trial *t, bench_round *out) {
    double ours, theirs = 0;
    bool is_latency = t->c->unit == BENCH_US;
    int64_t nbytes = t->job.nbytes[TOOL_TARGET];
    TB_TRY(do_step(t, is_latency ? SERIES : TOOL_MOVE, &ours));
    tb_status status = is_latency ? ping_plain(t->w, &theirs) : send_plain(t->w, nbytes, &theirs);
    TB_TRY(agree(t->w, status, &theirs));
    *out = is_latency ? (bench_round){1e6 * ours / CALLS, 1e6 * theirs / CALLS}
                      : (bench_round){1e-9 * (double)nbytes / ours, 1e-9 * (double)nbytes / theirs};
    return TB_OK;
}

static tb_status run_rounds(trial *t, bench_rounds *rounds, bench_round *out) {
    static const int before[] = {TOOL_ALLOCATE, TOOL_PREPARE, TOOL_CONNECT, TOOL_MOVE};
    double unused;
    tool_show_line("%s: connecting the ranks", t->c->name);
    for (size_t i = 0; i < sizeof before / sizeof *before; i++)
        TB_TRY(do_step(t, before[i], &unused));
    while (bench_rounds_next(rounds, tool_now_ns())) {
        tool_show_line("%s: round %d of %d", t->c->name, rounds->done, rounds->most);
        if (rounds->is_last)
            TB_TRY(do_step(t, TOOL_PREPARE, &unused));
        TB_TRY(run_round(t, &out[rounds->done - 1]));
    }
    TB_TRY(do_step(t, TOOL_VERIFY, &unused));
    return do_step(t, TOOL_CLOSE, &unused);
}

static tb_status start(trial *t) {
    const between *w = t->w;
    tool_job *job = &t->job;
    int which = w->shared->is_first ? TOOL_SOURCE : TOOL_TARGET;
    job->store = w->b->store;
    job->token = w->b->token;
    job->transport = t->c->transport;
    TB_TRY(tool_side_init(&job->side[TOOL_SOURCE], TOOL_SOURCE, "bench-from", t->c->src, 0));
    TB_TRY(tool_side_init(&job->side[TOOL_TARGET], TOOL_TARGET, "bench-to", t->c->dst, 0));
    TB_TRY(t->c->build(&job->tensors, w->b->size));
    TB_TRY(tool_job_weigh(job));
    t->first = which == TOOL_TARGET ? job->side[TOOL_SOURCE].nranks : 0;
    const tool_ranks_opts opts = {.n = job->side[which].nranks,
                                  .names = &job->names[t->first],
                                  .timeout_ms = 4 * job->timeout_ms,
                                  .work = work,
                                  .arg = t};
    return tool_ranks_create(&opts, &w->b->guard, &t->ranks);
}

static tb_status run_case(bench *b, bench_other *o) {
    trial t = {.w = b->between, .c = o->arg, .job = {.batch = b->batch}};
    double unused = 0;
    o->result.work = t.c->work;
    o->result.against = "a plain socket";
    o->result.unit = t.c->unit;
    tb_status status = agree(t.w, start(&t), &unused);
    if (status == TB_OK)
        status = run_rounds(&t, &o->rounds, o->round);
    tool_ranks_destroy(t.ranks);
    tool_job_fini(&t.job);
    return status;
}

static tb_status run_lines(between *w) {
    bench *b = w->b;
    const shared *s = w->shared;
    const hello *first = s->is_first ? &s->own : &s->theirs;
    bool is_one_host = strcmp(s->own.host, s->theirs.host) == 0;
    int one = 1;
    if (first->rounds < 1 || first->rounds > BENCH_MAX_ROUNDS || memchr(first->only, '\0', ONLY_ROOM) == NULL)
        return tb__fail(TB_INVALID, "the other shell says what can't be");
    setsockopt(w->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    b->size = first->size;
    b->rounds = first->rounds;
    b->only = *first->only ? first->only : NULL;
    for (int i = 0; i < NCASES; i++) {
        if (strcmp(cases[i].transport, "shm") == 0 && !is_one_host)
            continue; /* it does not reach other machines */
        TB_TRY(bench_run_other(b, cases[i].name, &cases[i], run_case));
    }
    return TB_OK;
}

static tb_status run_with(between *w, int *listener, tool_ranks **helper) {
    static const tool_rank_name name = {"the seat at the store"};
    hello *own = &w->shared->own;
    own->size = w->b->size;
    own->rounds = w->b->rounds;
    if (snprintf(own->only, sizeof own->only, "%s", w->b->only ? w->b->only : "") >= (int)sizeof own->only)
        return tb__fail(TB_INVALID, "--only is too long");
    tb__get_machine_id(NULL, own->host);
    TB_TRY(tb__random_bytes(own->nonce, sizeof own->nonce));
    TB_TRY(listen_anywhere(own, listener));
    const tool_ranks_opts opts = {.n = 1, .names = &name, .timeout_ms = 2 * MEET_MS, .work = meet, .arg = w};
    TB_TRY(tool_ranks_create(&opts, &w->b->guard, helper));
    tool_show_line("waiting for the other shell");
    TB_TRY(tool_ranks_step(*helper, MEET, NULL));
    TB_TRY(w->shared->is_first ? accept_other(w, *listener) : connect_other(w));
    return run_lines(w);
}

tb_status bench_between_run(bench *b) {
    void *memory;
    between w = {.b = b, .fd = -1};
    int listener = -1;
    tool_ranks *helper = NULL;
    TB_TRY(tool_share(sizeof *w.shared, &memory));
    w.shared = memory;
    w.chunk = tb__calloc(1, CHUNK);
    b->between = &w;
    tb_status status = w.chunk ? run_with(&w, &listener, &helper) : TB_NO_MEMORY;
    tool_ranks_destroy(helper);
    b->between = NULL;
    if (w.fd >= 0)
        close(w.fd);
    if (listener >= 0)
        close(listener);
    free(w.chunk);
    b->only = NULL;
    tool_unshare(memory, sizeof *w.shared);
    return status;
}
