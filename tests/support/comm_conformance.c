#include "comm_conformance.h"

#include "transport/transport.h"

#include <cuda.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    MOST_RANKS = 8,
    MOST_COMMS = 16,
    CASE_SECONDS = 150, /* a rank that takes longer has failed */
    WAIT_SECONDS = 60,  /* for what must happen */
    FEW_SECONDS = 10,   /* for what must be quick: a cancellation, the end of what can't go on */
    ROOM = 64 << 20,    /* of the largest message */
    NSLOTS = 12,        /* places of messages in random traffic, in memory of ROOM bytes for each direction */
    SLOT = ROOM / NSLOTS / 256 * 256,
    BEHIND = 64, /* bytes behind a message that must not change */
    MOST_MESSAGES = 4096,
    MOST_PACKET = 60000,
    SKIPPED = 77,
};

/* ---- A rank ------------------------------------------------------------------------------------------------------ */

static const comm_conformance *suite;
static const char *case_name;
static size_t me, nranks;
static int sockets[MOST_RANKS]; /* to each rank; -1: itself, or it is lost */
static tb_transport transport;
static uint64_t seed; /* the same on all ranks */
static uint64_t random_state, nbarriers, barriers_of[MOST_RANKS];
static CUcontext gpu;
static unsigned char *bench; /* host memory, to fill and check */

/* Packets that the socket has no room for. */
typedef struct packet {
    struct packet *next;
    size_t nbytes;
    unsigned char bytes[];
} packet;

static packet *queue_of[MOST_RANKS];

#define need(condition, ...)                                                                                           \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            give_up(__LINE__, __VA_ARGS__);                                                                            \
    } while (0)

static _Noreturn __attribute__((format(printf, 2, 3))) void give_up(int line, const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args); // NOLINT: va_start has initialised it
    va_end(args);
    printf("  %s: rank %zu, line %d: %s\n", case_name, me, line, text);
    fflush(stdout);
    _exit(1);
}

static uint64_t random_below(uint64_t n) {
    random_state = random_state * 6364136223846793005 + 1442695040888963407;
    return (random_state >> 33) % n;
}

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Of the world; not its position. */
static int32_t rank_of(size_t i) {
    return 5 + 7 * (int32_t)i;
}

static size_t index_of(int32_t rank) {
    return (size_t)(rank - 5) / 7;
}

static bool is_lost(size_t i) {
    return i != me && sockets[i] < 0;
}

/* ---- The driver ---- */

#define DRIVER(each)                                                                                                   \
    each(cuInit) each(cuDeviceGet) each(cuDevicePrimaryCtxRetain) each(cuCtxPushCurrent) each(cuCtxPopCurrent)         \
        each(cuMemAlloc) each(cuMemFree) each(cuMemcpyHtoD) each(cuMemcpyDtoH)
#define DECLARE(name) static __typeof__(&(name)) p_##name;
DRIVER(DECLARE)

#define NAME_OF(name)  NAME_OF_(name)
#define NAME_OF_(name) #name
#define need_cuda(call)                                                                                                \
    do {                                                                                                               \
        CUresult result_ = (call);                                                                                     \
        need(result_ == CUDA_SUCCESS, "%s: CUresult %d", #call, (int)result_);                                         \
    } while (0)

static void *driver;

static bool has_gpu(void) {
    driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void *function;
#define FIND(name)                                                                                                     \
    function = driver ? dlsym(driver, NAME_OF(name)) : NULL;                                                           \
    memcpy(&p_##name, &function, sizeof function);
    DRIVER(FIND)
    return driver && p_cuInit(0) == CUDA_SUCCESS;
}

static tb_status enter_device(void *arg, tb_mem_kind kind, int device) {
    (void)arg;
    need(kind == TB_MEM_CUDA && device == 0, "it enters device %d of kind %d", device, (int)kind);
    return p_cuCtxPushCurrent(gpu) == CUDA_SUCCESS ? TB_OK : TB_IO;
}

static void leave_device(void *arg, tb_mem_kind kind) {
    CUcontext context;
    (void)arg;
    (void)kind;
    p_cuCtxPopCurrent(&context);
}

static void *device_function(void *arg, tb_mem_kind kind, const char *name) {
    (void)arg;
    return kind == TB_MEM_CUDA ? dlsym(driver, name) : NULL;
}

/* ---- Packets ---- */

enum { TELL = 'T', READY = 'R', BARRIER = 'B', ID = 'I' };

static void flush(size_t to) {
    while (queue_of[to] && sockets[to] >= 0) {
        packet *p = queue_of[to];
        if (send(sockets[to], p->bytes, p->nbytes, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno == EAGAIN)
            return;
        queue_of[to] = p->next;
        free(p);
    }
}

static void put(size_t to, char kind, const void *bytes, size_t nbytes) {
    packet *p = malloc(sizeof *p + 1 + nbytes), **at = &queue_of[to];
    need(nbytes < MOST_PACKET, "a packet of %zu bytes", nbytes);
    if (!p)
        abort();
    p->next = NULL;
    p->nbytes = nbytes + 1;
    p->bytes[0] = (unsigned char)kind;
    memcpy(p->bytes + 1, bytes, nbytes);
    while (*at)
        at = &(*at)->next;
    *at = p;
    flush(to);
}

static tb_status tell(void *arg, int32_t peer, const void *bytes, size_t nbytes) {
    (void)arg;
    size_t to = index_of(peer);
    need(to < nranks && to != me && rank_of(to) == peer, "it tells rank %" PRId32, peer);
    if (is_lost(to))
        return TB_LOST;
    put(to, TELL, bytes, nbytes);
    return TB_OK;
}

static unsigned char ids[MOST_RANKS][MOST_COMMS][TB_COMM_ID_SIZE]; /* by the first rank, in order */
static size_t nids[MOST_RANKS];
static bool is_ready_to_receive[MOST_MESSAGES];

static void deliver(size_t from, const unsigned char *bytes, size_t nbytes) {
    uint64_t tag;
    switch (bytes[0]) {
    case TELL:
        transport.ops->told(transport.context, rank_of(from), bytes + 1, nbytes - 1);
        break;
    case BARRIER:
        barriers_of[from]++;
        break;
    case ID:
        need(nids[from] < MOST_COMMS, "too many ids");
        memcpy(ids[from][nids[from]++], bytes + 1, TB_COMM_ID_SIZE);
        break;
    default:
        memcpy(&tag, bytes + 1, sizeof tag);
        is_ready_to_receive[tag % MOST_MESSAGES] = true;
    }
}

static void take_packets(size_t from) {
    static unsigned char bytes[MOST_PACKET];
    ssize_t n;
    while (sockets[from] >= 0 && (n = recv(sockets[from], bytes, sizeof bytes, MSG_DONTWAIT)) != -1) {
        if (n > 0) {
            deliver(from, bytes, (size_t)n);
            continue;
        }
        close(sockets[from]);
        sockets[from] = -1;
        transport.ops->peer_lost(transport.context, rank_of(from), "its process has ended");
    }
}

/* ---- Waiting ---- */

static long nturns; /* of the loop */

static void turn(int timeout_ms) {
    struct pollfd fds[MOST_RANKS + 1];
    nturns++;
    for (size_t i = 0; i < nranks; i++) {
        short wants_room = queue_of[i] ? POLLOUT : 0;
        fds[i] = (struct pollfd){.fd = sockets[i], .events = (short)(POLLIN | wants_room)};
    }
    fds[nranks] = (struct pollfd){.fd = transport.ops->fd(transport.context), .events = POLLIN};
    poll(fds, nranks + 1, timeout_ms);
    for (size_t i = 0; i < nranks; i++) {
        if (sockets[i] >= 0)
            flush(i);
        take_packets(i);
    }
    need(transport.ops->progress(transport.context) == TB_OK, "progress: %s", tb_error_detail());
}

/* Waits for the condition. What does not make the transport's descriptor readable is only seen after a second. */
#define work_until(condition, seconds, ...)                                                                            \
    do {                                                                                                               \
        for (int64_t end_ = now_ms() + (int64_t)(seconds)*1000; !(condition);) {                                       \
            need(now_ms() < end_, __VA_ARGS__);                                                                        \
            turn(1000);                                                                                                \
        }                                                                                                              \
    } while (0)

static void work_for(int64_t ms) {
    for (int64_t end = now_ms() + ms; now_ms() < end;)
        turn((int)(end - now_ms() > 0 ? end - now_ms() : 0));
}

static bool have_all_come(uint64_t n) {
    for (size_t i = 0; i < nranks; i++) {
        if (i != me && !is_lost(i) && barriers_of[i] < n)
            return false;
    }
    return true;
}

/* Of all that are not lost. */
static void barrier(void) {
    nbarriers++;
    for (size_t i = 0; i < nranks; i++) {
        if (i != me && !is_lost(i))
            put(i, BARRIER, "", 0);
    }
    work_until(have_all_come(nbarriers), WAIT_SECONDS, "the others do not come to barrier %" PRIu64, nbarriers);
}

/* ---- Communicators ---- */

typedef struct comm {
    tb_comm *comm;
    size_t members[MOST_RANKS], nmembers;
    char *memory;
} comm;

static char *own_memory; /* of the driver: for transports without memory of their own */

static bool is_member(const comm *c, size_t i) {
    for (size_t k = 0; k < c->nmembers; k++) {
        if (c->members[k] == i)
            return true;
    }
    return false;
}

/* All ranks create their communicators in the same order. */
static void begin_comm(comm *c, const size_t *members, size_t nmembers) {
    static size_t nused[MOST_RANKS];
    unsigned char id[TB_COMM_ID_SIZE];
    int32_t ranks[MOST_RANKS];
    need(nmembers > 0, "a communicator without ranks");
    size_t self = 0, first = members[0]; // NOLINT: there are some
    *c = (comm){.nmembers = nmembers};
    for (size_t i = 0; i < nmembers; i++) {
        c->members[i] = members[i];
        ranks[i] = rank_of(members[i]);
        self = members[i] == me ? i : self;
    }
    if (!is_member(c, me))
        return;
    if (first == me) {
        need(transport.ops->comm_id(transport.context, id) == TB_OK, "comm_id: %s", tb_error_detail());
        for (size_t i = 1; i < nmembers; i++)
            put(members[i], ID, id, sizeof id);
    } else {
        work_until(nids[first] > nused[first], WAIT_SECONDS, "rank %zu tells no id", first);
        memcpy(id, ids[first][nused[first]++ % MOST_COMMS], sizeof id);
    }
    tb_comm_desc desc = {.size = sizeof desc, .id = id, .ranks = ranks, .nranks = nmembers, .self = self};
    desc.kind = TB_MEM_CUDA;
    desc.nbytes = suite->nbytes;
    need(transport.ops->comm_create(transport.context, &desc, &c->comm) == TB_OK, "comm_create: %s", tb_error_detail());
}

static tb_status check_comm(const comm *c, bool *is_ready) {
    *is_ready = false;
    return transport.ops->comm_check(transport.context, c->comm, is_ready);
}

static bool is_comm_ready(comm *c) {
    bool is_ready;
    need(check_comm(c, &is_ready) == TB_OK, "the communicator has failed: %s", tb_error_detail());
    return is_ready;
}

static void await_comm(comm *c) {
    if (!c->comm)
        return;
    work_until(is_comm_ready(c), WAIT_SECONDS, "the communicator is not ready");
    if (transport.ops->comm_memory && suite->nbytes > 0)
        c->memory = transport.ops->comm_memory(transport.context, c->comm);
    if (!c->memory && !own_memory) {
        CUdeviceptr p;
        need_cuda(p_cuMemAlloc(&p, 2 * (size_t)ROOM + BEHIND));
        own_memory = (char *)(uintptr_t)p;
    }
    if (!c->memory)
        c->memory = own_memory;
}

static void create_comm(comm *c, const size_t *members, size_t nmembers) {
    begin_comm(c, members, nmembers);
    await_comm(c);
}

static void create_comm_of_all(comm *c) {
    size_t members[MOST_RANKS];
    for (size_t i = 0; i < nranks; i++)
        members[i] = (i + 1) % nranks; /* positions are not ranks */
    create_comm(c, members, nranks);
}

static void destroy_comm(comm *c) {
    int64_t begun = now_ms();
    if (c->comm)
        transport.ops->comm_destroy(transport.context, c->comm);
    c->comm = NULL;
    need(now_ms() - begun < FEW_SECONDS * 1000, "comm_destroy took %" PRId64 " ms", now_ms() - begun);
}

/* ---- Messages ---- */

typedef struct message {
    uint64_t tag;
    size_t from, to, nbytes;
    comm *comm;
    tb_op op;
    tb_piece piece;
    bool is_posted, is_done, was_cancelled;
    size_t slot;
    int64_t due_ms;
} message;

static void fill_bench(uint64_t number, size_t nbytes) {
    uint64_t word = number * 0x9E3779B97F4A7C15U + 1;
    for (size_t i = 0; i < nbytes; i += sizeof word, word += 0x632BE59BD9B4E019U)
        memcpy(bench + i, &word, sizeof word); /* it has room for a word more */
}

static void fill(char *at, uint64_t number, size_t nbytes) {
    fill_bench(number, nbytes);
    need_cuda(p_cuMemcpyHtoD((CUdeviceptr)(uintptr_t)at, bench, nbytes));
}

enum { POISON = 0xEE };

static void poison(char *at, size_t nbytes) {
    memset(bench, POISON, nbytes);
    need_cuda(p_cuMemcpyHtoD((CUdeviceptr)(uintptr_t)at, bench, nbytes));
}

/* That the memory has the message, and then poison up to `room`. */
static void check(char *at, uint64_t number, size_t nbytes, size_t room) {
    unsigned char *got = bench + ROOM + BEHIND;
    need_cuda(p_cuMemcpyDtoH(got, (CUdeviceptr)(uintptr_t)at, room));
    fill_bench(number, nbytes);
    for (size_t i = 0; i < nbytes; i++)
        need(got[i] == bench[i], "message %" PRIu64 " of %zu bytes: byte %zu is 0x%02x, not 0x%02x", number, nbytes, i,
             got[i], bench[i]);
    for (size_t i = nbytes; i < room; i++)
        need(got[i] == POISON, "byte %zu behind message %" PRIu64 " of %zu bytes was written", i, number, nbytes);
}

static void mark_done(tb_op *op) {
    message *m = op->arg;
    need(!m->is_done, "message %" PRIu64 " is done twice", m->tag);
    need(!op->state, "message %" PRIu64 " is done, but has a state", m->tag);
    m->is_done = true;
}

static message make_message(comm *c, uint64_t tag, size_t from, size_t to, size_t nbytes) {
    return (message){.comm = c, .tag = tag, .from = from, .to = to, .nbytes = nbytes};
}

static tb_status try_post(message *m, char *at, size_t room) {
    m->piece = (tb_piece){at, room};
    m->op = (tb_op){.kind = m->from == me ? TB_OP_SEND : TB_OP_RECV,
                    .peer = rank_of(m->from == me ? m->to : m->from),
                    .tag = m->tag,
                    .pieces = &m->piece,
                    .npieces = 1,
                    .is_expected = m->from == me,
                    .done = mark_done,
                    .arg = m,
                    .memory = TB_MEM_CUDA,
                    .comm = m->comm->comm};
    m->is_posted = true;
    return tb__transport_post(&transport, &m->op);
}

static void post_message(message *m, char *at, size_t room) {
    need(try_post(m, at, room) == TB_OK, "post: %s", tb_error_detail());
}

static char *send_memory(const comm *c) {
    return c->memory;
}

static char *recv_memory(const comm *c) {
    return c->memory + ROOM;
}

static void post_receive(message *m) {
    poison(recv_memory(m->comm), m->nbytes + BEHIND);
    post_message(m, recv_memory(m->comm), m->nbytes);
    put(m->from, READY, &m->tag, sizeof m->tag);
}

static void post_send(message *m) {
    fill(send_memory(m->comm), m->tag, m->nbytes);
    work_until(is_ready_to_receive[m->tag], WAIT_SECONDS, "rank %zu does not receive message %" PRIu64, m->to, m->tag);
    post_message(m, send_memory(m->comm), m->nbytes);
}

static const char *why(const message *m) {
    return m->op.why[0] ? m->op.why : tb_status_string(m->op.status);
}

static void expect(message *m, tb_status status, int seconds) {
    work_until(m->is_done, seconds, "%s %" PRIu64 " of %zu bytes is not done after %d s",
               m->from == me ? "send" : "receive", m->tag, m->nbytes, seconds);
    need(m->op.status == status, "%s %" PRIu64 ": %s, not %s", m->from == me ? "send" : "receive", m->tag, why(m),
         tb_status_string(status));
}

/* One message; ranks that it is not for return at once. */
static void carry(comm *c, uint64_t tag, size_t from, size_t to, size_t nbytes) {
    message m = make_message(c, tag, from, to, nbytes);
    if (me == to)
        post_receive(&m);
    if (me == from)
        post_send(&m);
    if (me != from && me != to)
        return;
    expect(&m, TB_OK, WAIT_SECONDS);
    if (me == from)
        return;
    need(m.op.nbytes == nbytes, "%zu bytes came of %zu", m.op.nbytes, nbytes);
    check(recv_memory(c), tag, nbytes, nbytes + BEHIND);
}

/* ---- Random traffic ---- */

static message *traffic;
static size_t ntraffic;

static size_t scaled(size_t n) {
    const char *percent = getenv("TB_CASES");
    size_t scale = percent ? (size_t)strtoul(percent, NULL, 10) : 100;
    return n * scale / 100 + 1 < MOST_MESSAGES - 1 ? n * scale / 100 + 1 : MOST_MESSAGES - 1;
}

/* The same list on all ranks. cancels: a part of them is cancelled, by either end, or both. */
static void make_traffic(comm *comms, size_t ncomms, size_t n, uint64_t own_seed, bool cancels) {
    uint64_t own = random_state;
    random_state = own_seed;
    memset(is_ready_to_receive, 0, sizeof is_ready_to_receive);
    ntraffic = n;
    for (size_t i = 0; i < n; i++) {
        comm *c = &comms[random_below(ncomms)];
        size_t from = random_below(c->nmembers), to = (from + 1 + random_below(c->nmembers - 1)) % c->nmembers;
        static const size_t sizes[] = {1, 64, 4096, 100000, 1 << 20, SLOT - BEHIND};
        size_t most = sizes[random_below(sizeof sizes / sizeof *sizes)];
        traffic[i] = make_message(c, i + 1, c->members[from], c->members[to], 1 + random_below(most));
        traffic[i].was_cancelled = cancels && random_below(3) == 0;
    }
    random_state = own;
    for (size_t i = 0; i < n; i++)
        traffic[i].due_ms = now_ms() + (int64_t)random_below(300);
}

/* A message's memory: one of the slots for sends, or for receives. */
static char *slot_at(const message *m) {
    return (m->from == me ? send_memory(m->comm) : recv_memory(m->comm)) + m->slot * (size_t)SLOT;
}

static bool begin_message(message *m, bool (*used)[NSLOTS]) {
    bool is_send = m->from == me;
    size_t slot = random_below(NSLOTS), tried = 0;
    while (tried < NSLOTS && used[is_send][slot]) {
        slot = (slot + 1) % NSLOTS;
        tried++;
    }
    if (tried == NSLOTS)
        return false;
    m->slot = slot;
    used[is_send][slot] = true;
    if (is_send)
        fill(slot_at(m), m->tag, m->nbytes);
    else
        poison(slot_at(m), m->nbytes + BEHIND);
    post_message(m, slot_at(m), m->nbytes);
    if (!is_send)
        put(m->from, READY, &m->tag, sizeof m->tag);
    return true;
}

/* A message was cancelled here, or by the other end. */
static void check_cancelled(const message *m) {
    tb_status s = m->op.status;
    bool is_kept = s == TB_TIMEOUT && suite->lacks & COMM_KEEPS_MEMORY;
    need(s == TB_OK || s == TB_CANCELLED || is_kept, "message %" PRIu64 ": %s", m->tag, why(m));
    if (s == TB_OK && m->to == me)
        check(slot_at(m), m->tag, m->nbytes, m->nbytes + BEHIND);
}

static void end_message(message *m, bool (*used)[NSLOTS]) {
    bool is_send = m->from == me;
    if (m->was_cancelled) {
        check_cancelled(m);
    } else {
        need(m->op.status == TB_OK, "%s %" PRIu64 " of %zu bytes, %s rank %zu: %s", is_send ? "send" : "receive",
             m->tag, m->nbytes, is_send ? "to" : "from", is_send ? m->to : m->from, why(m));
        need(is_send || m->op.nbytes == m->nbytes, "%zu bytes came of %zu", m->op.nbytes, m->nbytes);
        if (!is_send)
            check(slot_at(m), m->tag, m->nbytes, m->nbytes + BEHIND);
    }
    used[is_send][m->slot] = m->op.status == TB_TIMEOUT; /* it may still be accessed */
    m->slot = NSLOTS;
}

/* A cancelled message is cancelled by its receiver at a random time; by its sender, too, or not at all. A receive
 * whose send was cancelled may wait for ever. */
static void maybe_cancel(message *m) {
    bool is_send = m->from == me;
    bool is_time = is_send ? random_below(40) == 0 : now_ms() > m->due_ms + (int64_t)random_below(600);
    if (!m->was_cancelled || !m->op.state || !is_time)
        return;
    int64_t begun = now_ms();
    tb__transport_cancel(&transport, &m->op);
    need(m->is_done, "a cancelled operation is not done");
    need(now_ms() - begun < FEW_SECONDS * 1000, "cancel took %" PRId64 " ms", now_ms() - begun);
}

static bool advance_traffic(bool (*used)[NSLOTS]) {
    size_t nleft = 0, first = random_below(ntraffic);
    for (size_t k = 0; k < ntraffic; k++) {
        message *m = &traffic[(first + k) % ntraffic];
        if (m->from != me && m->to != me)
            continue;
        bool may_begin = m->to == me ? now_ms() >= m->due_ms : is_ready_to_receive[m->tag];
        if (!m->is_posted && may_begin)
            begin_message(m, used);
        if (m->is_posted && !m->is_done)
            maybe_cancel(m);
        if (m->is_done && m->slot < NSLOTS)
            end_message(m, used);
        nleft += !m->is_done;
    }
    return nleft == 0;
}

static void run_traffic(comm *comms, size_t ncomms, size_t n, bool cancels) {
    static uint64_t nruns;
    bool used[2][NSLOTS] = {{false}};
    make_traffic(comms, ncomms, n, seed + ++nruns, cancels);
    barrier();
    for (int64_t end = now_ms() + WAIT_SECONDS * 2000; !advance_traffic(used); turn(3)) {
        size_t nleft = 0;
        for (size_t i = 0; i < n && now_ms() >= end; i++)
            nleft += (traffic[i].from == me || traffic[i].to == me) && !traffic[i].is_done;
        need(now_ms() < end, "%zu of %zu messages are not done", nleft, n);
    }
    barrier();
}

/* ---- Cases ------------------------------------------------------------------------------------------------------- */

static void case_create(void) {
    comm c;
    for (int i = 0; i < 3; i++) {
        create_comm_of_all(&c);
        carry(&c, (uint64_t)i + 1, i % 2, nranks - 1, 1000);
        barrier();
        destroy_comm(&c);
    }
}

static void case_messages(void) {
    static const size_t sizes[] = {1, 3, 4096, 16384, 1000003, 16 << 20, ROOM};
    comm c;
    uint64_t tag = 0;
    create_comm_of_all(&c);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (size_t from = 0; from < nranks; from++) {
            for (size_t to = 0; to < nranks; to++) {
                bool is_rare = sizes[i] > 1 << 20 && from + to != 1;
                if (from != to && !is_rare)
                    carry(&c, ++tag, from, to, sizes[i]);
            }
        }
    }
    barrier();
    destroy_comm(&c);
}

/* Everyone sends to, and receives from, everyone. */
static void case_random(void) {
    comm c;
    create_comm_of_all(&c);
    run_traffic(&c, 1, scaled(400), false);
    destroy_comm(&c);
}

/* Messages that were posted before the communicator is ready. */
static void case_early(void) {
    comm c;
    size_t members[MOST_RANKS];
    for (size_t i = 0; i < nranks; i++)
        members[i] = i;
    if (suite->nbytes > 0) { /* there is no memory yet */
        create_comm(&c, members, nranks);
    } else {
        create_comm(&c, members, nranks);
        barrier();
        destroy_comm(&c);
        begin_comm(&c, members, nranks);
        c.memory = own_memory;
    }
    for (size_t i = 0; i < nranks; i++)
        carry(&c, i + 1, i, (i + 1) % nranks, 70000);
    barrier();
    destroy_comm(&c);
}

/* A communicator for each two ranks, all in use at once. */
static void case_pairs(void) {
    comm comms[MOST_COMMS];
    size_t n = 0;
    for (size_t i = 0; i < nranks; i++) {
        for (size_t k = 0; k < i; k++)
            begin_comm(&comms[n++], (size_t[]){i, k}, 2);
    }
    for (size_t i = 0; i < n; i++)
        await_comm(&comms[i]);
    run_traffic(comms, n, scaled(300), false);
    for (size_t i = 0; i < n; i++)
        destroy_comm(&comms[i]);
    barrier();
}

static void case_cancels(void) {
    comm c;
    create_comm_of_all(&c);
    for (int i = 0; i < 3; i++) {
        run_traffic(&c, 1, scaled(100), true);
        carry(&c, MOST_MESSAGES - 1, 1, 0, 100000);
        barrier();
    }
    destroy_comm(&c);
}

static void cancel_now(message *m) {
    tb__transport_cancel(&transport, &m->op);
    need(m->is_done && m->op.status == TB_CANCELLED, "cancel: %s", why(m));
}

/* A receive that is cancelled before its message is sent: the message is dropped, and nothing is written. */
static void case_cancelled_receive(void) {
    comm c;
    create_comm_of_all(&c);
    message m = make_message(&c, 1, 0, 1, 300000);
    if (me == 1) {
        post_receive(&m);
        work_for(100);
        cancel_now(&m);
    }
    barrier();
    if (me == 0) {
        post_send(&m);
        expect(&m, TB_OK, WAIT_SECONDS);
    }
    barrier();
    if (me == 1)
        check(recv_memory(&c), 0, 0, 300000);
    carry(&c, 2, 0, 1, 300000);
    barrier();
    destroy_comm(&c);
}

/* A receive whose send was cancelled waits, or is cancelled, too. */
static void case_cancelled_send(void) {
    comm c;
    create_comm_of_all(&c);
    message m = make_message(&c, 1, 0, 1, 20 << 20);
    if (me == 1)
        post_receive(&m);
    if (me == 0) {
        post_send(&m);
        tb__transport_cancel(&transport, &m.op);
        need(m.is_done && (m.op.status == TB_CANCELLED || m.op.status == TB_OK), "cancel: %s", why(&m));
    }
    barrier();
    work_for(200);
    if (me == 1 && !m.is_done)
        tb__transport_cancel(&transport, &m.op);
    if (me == 1)
        need(m.is_done && (m.op.status == TB_CANCELLED || m.op.status == TB_OK), "receive: %s", why(&m));
    barrier();
    carry(&c, 3, 0, 1, 300000);
    barrier();
    destroy_comm(&c);
}

static void case_too_big(void) {
    comm c;
    create_comm_of_all(&c);
    message m = make_message(&c, 1, 0, 1, 5000);
    if (me == 1) {
        m.nbytes = 4999;
        post_receive(&m);
        expect(&m, TB_TOO_BIG, WAIT_SECONDS);
        need(m.op.nbytes == 5000, "the size of the message is said to be %zu", m.op.nbytes);
        check(recv_memory(&c), 0, 0, 5000);
    }
    if (me == 0) {
        post_send(&m);
        expect(&m, TB_OK, WAIT_SECONDS);
    }
    barrier();
    message smaller = make_message(&c, 2, 0, 1, me == 1 ? 6000 : 5000);
    if (me == 1) {
        post_receive(&smaller);
        expect(&smaller, TB_OK, WAIT_SECONDS);
        need(smaller.op.nbytes == 5000, "the size of the message is said to be %zu", smaller.op.nbytes);
        check(recv_memory(&c), 2, 5000, 6000);
    }
    if (me == 0) {
        post_send(&smaller);
        expect(&smaller, TB_OK, WAIT_SECONDS);
    }
    barrier();
    destroy_comm(&c);
}

/* Where nothing is to be done, the transport sleeps, also while receives wait. */
static void case_sleep(void) {
    comm c;
    create_comm_of_all(&c);
    carry(&c, 1, 0, 1, 100000);
    message m = make_message(&c, 2, 0, 1, 100000);
    if (me == 1)
        post_receive(&m);
    barrier();
    work_for(300);
    nturns = 0;
    work_for(500);
    need(nturns <= 10, "the loop turned %ld times in half a second without work", nturns);
    barrier();
    if (me == 0)
        post_send(&m);
    if (me < 2)
        expect(&m, TB_OK, WAIT_SECONDS);
    barrier();
    destroy_comm(&c);
}

/* ---- Losses ---- */

static size_t victim(void) {
    return nranks - 1;
}

static tb_status status_of(const comm *c) {
    bool is_ready;
    return check_comm(c, &is_ready);
}

/* The communicator has failed, nothing can be done with it any more, and, unless the transport can't, others work. */
static void check_failed(comm *c, tb_status status) {
    work_until(status_of(c) != TB_OK, FEW_SECONDS, "the communicator does not fail");
    need(status_of(c) == status, "the communicator fails with %s, not %s: %s", tb_status_string(status_of(c)),
         tb_status_string(status), tb_error_detail());
    need(tb_error_detail()[0], "the communicator fails without a message");
    if (c->memory) {
        message late = make_message(c, 999, me, me == 0 ? 1 : 0, 1000);
        tb_status posted = try_post(&late, send_memory(c), 1000);
        if (posted == TB_OK)
            work_until(late.is_done, FEW_SECONDS, "an operation of a failed communicator is not done");
        need(posted != TB_OK || late.op.status != TB_OK, "an operation of a failed communicator succeeds");
    }
    destroy_comm(c);
}

static void use_the_rest(void) {
    comm c;
    size_t members[MOST_RANKS] = {0}, n = 0;
    if (suite->lacks & COMM_IS_OVER_AFTER_A_LOSS)
        return;
    for (size_t i = 0; i < nranks; i++) {
        if (!is_lost(i) && i != victim())
            members[n++] = i;
    }
    create_comm(&c, members, n);
    for (size_t i = 0; i < n; i++)
        carry(&c, 2000 + i, members[i], members[(i + 1) % n], 300000);
    barrier();
    destroy_comm(&c);
}

static void lose_victim(void) {
    if (me == victim())
        raise(SIGKILL);
    work_until(is_lost(victim()), WAIT_SECONDS, "the loss is not seen");
}

static void case_lost_before(void) {
    comm c;
    size_t members[MOST_RANKS];
    for (size_t i = 0; i < nranks; i++)
        members[i] = i;
    if (me != victim())
        begin_comm(&c, members, nranks);
    else
        work_for(100);
    lose_victim();
    check_failed(&c, TB_LOST);
    use_the_rest();
}

static void case_lost_idle(void) {
    comm c;
    create_comm_of_all(&c);
    carry(&c, 1, victim(), 0, 1000);
    barrier();
    lose_victim();
    check_failed(&c, TB_LOST);
    use_the_rest();
}

/* Operations with the lost rank, and of others with each other, of which some have begun. */
static void lose_during(bool victim_sends, int64_t ms) {
    comm c;
    enum { N = 6 };
    message m[N], other = make_message(&c, 500, 0, 1, 100000);
    create_comm_of_all(&c);
    carry(&c, 1, victim(), 0, 1000); /* they are connected */
    carry(&c, 2, 0, victim(), 1000);
    for (size_t i = 0; i < N; i++) {
        size_t at = i * SLOT, partner = i % 2;
        m[i] = make_message(&c, 10 + i, victim_sends ? victim() : partner, victim_sends ? partner : victim(), SLOT);
        if (me == m[i].to) {
            post_message(&m[i], recv_memory(&c) + at, SLOT);
            put(m[i].from, READY, &m[i].tag, sizeof m[i].tag);
        }
    }
    if (me == 1)
        post_message(&other, recv_memory(&c) + N * SLOT, other.nbytes);
    barrier();
    for (size_t i = 0; i < N; i++) {
        if (me == m[i].from)
            post_message(&m[i], send_memory(&c) + i * SLOT, SLOT);
    }
    if (me == victim())
        work_for(ms);
    lose_victim();
    int64_t begun = now_ms();
    for (size_t i = 0; i < N; i++) {
        if (me != m[i].from && me != m[i].to)
            continue;
        work_until(m[i].is_done, FEW_SECONDS, "message %zu with the lost rank is not done", i);
        need(m[i].op.status == TB_OK || m[i].op.status == TB_LOST, "message %zu: %s", i, why(&m[i]));
        need(m[i].op.status == TB_OK || m[i].op.why[0], "message %zu fails without a reason", i);
    }
    if (me == 1) {
        work_until(other.is_done, FEW_SECONDS, "a receive of a failed communicator is not done");
        need(other.op.status == TB_IO, "a receive of a failed communicator: %s", why(&other));
    }
    need(now_ms() - begun < FEW_SECONDS * 1000, "it took too long");
    check_failed(&c, TB_LOST);
    use_the_rest();
}

static void case_lost_sender(void) {
    lose_during(true, 2);
}

static void case_lost_receiver(void) {
    lose_during(false, 2);
}

static void case_lost_at_once(void) {
    lose_during(true, 0);
}

/* A rank that never creates the communicator: others wait, and can give it up. */
static void case_never_joins(void) {
    comm c = {0};
    size_t members[MOST_RANKS];
    for (size_t i = 0; i < nranks; i++)
        members[i] = i;
    if (me != victim()) {
        begin_comm(&c, members, nranks);
        for (int64_t end = now_ms() + 1000; now_ms() < end; turn(20))
            need(!is_comm_ready(&c), "the communicator is ready without all its ranks");
        barrier();
        message m = make_message(&c, 1, me == 0 ? 1 : 0, me, 1000);
        if (own_memory)
            post_message(&m, own_memory, 1000);
        destroy_comm(&c);
        need(!own_memory || (m.is_done && m.op.status == TB_CANCELLED), "a receive was not cancelled");
    } else {
        barrier();
    }
    barrier();
    if (suite->lacks & COMM_IS_OVER_AFTER_A_LOSS)
        return;
    size_t n = 0;
    for (size_t i = 0; i < nranks; i++)
        members[n++] = (i + 1) % nranks; /* that rank knows ids of rank 1 only by now */
    create_comm(&c, members, n);
    carry(&c, 3, 0, victim(), 100000);
    barrier();
    destroy_comm(&c);
}

/* One rank leaves what others still use, and ends: only what names it fails. */
static void case_one_leaves(void) {
    comm c;
    create_comm_of_all(&c);
    carry(&c, 1, victim(), 0, 100000);
    message m = make_message(&c, 2, 0, 1, 100000), with = make_message(&c, 3, victim(), 0, 100000);
    if (me == 1)
        post_receive(&m);
    if (me == 0)
        post_receive(&with);
    barrier();
    if (me == victim()) {
        destroy_comm(&c);
        return;
    }
    if (me == 0) {
        expect(&with, TB_LOST, FEW_SECONDS);
        need(with.op.why[0], "the receive fails without a reason");
        message late = make_message(&c, 4, 0, victim(), 1000);
        tb_status posted = try_post(&late, send_memory(&c), 1000);
        if (posted == TB_OK)
            expect(&late, TB_LOST, FEW_SECONDS);
        need(posted == TB_OK || posted == TB_LOST, "a send to a rank that has left: %s", tb_error_detail());
        post_send(&m);
        expect(&m, TB_OK, WAIT_SECONDS);
    }
    if (me == 1)
        expect(&m, TB_OK, WAIT_SECONDS);
    work_until(is_lost(victim()), WAIT_SECONDS, "the last rank does not end");
    work_for(100);
    need(status_of(&c) == TB_OK, "the communicator has failed: %s", tb_error_detail());
    carry(&c, 5, 1, 0, 1 << 20); /* these two were never connected in this direction */
    carry(&c, 6, 0, 1, 1 << 20);
    barrier();
    destroy_comm(&c);
    use_the_rest();
}

/* What is under way when it is closed is cancelled. */
static void case_close(void) {
    comm c;
    create_comm_of_all(&c);
    message m = make_message(&c, 1, (me + 1) % nranks, me, 5 << 20);
    message s = make_message(&c, 2, me, (me + 1) % nranks, 5 << 20);
    post_message(&m, recv_memory(&c), m.nbytes);
    barrier();
    s.tag = 1;
    bool sends = me % 2 && try_post(&s, send_memory(&c), s.nbytes) == TB_OK; /* unless others have closed it before */
    work_for((int64_t)random_below(30));
    int64_t begun = now_ms();
    tb__transport_close(&transport);
    need(now_ms() - begun < FEW_SECONDS * 1000, "close took %" PRId64 " ms", now_ms() - begun);
    need(m.is_done && (!sends || s.is_done), "the operations are not done");
}

typedef struct conformance_case {
    const char *name;
    void (*run)(void);
    bool loses; /* the last rank is killed */
    unsigned needs;
} conformance_case;

static const conformance_case cases[] = {
    {"create", case_create, false, 0},
    {"messages", case_messages, false, 0},
    {"random", case_random, false, 0},
    {"early", case_early, false, 0},
    {"pairs", case_pairs, false, COMM_HAS_ONE_SET},
    {"cancels", case_cancels, false, 0},
    {"cancelled_receive", case_cancelled_receive, false, 0},
    {"cancelled_send", case_cancelled_send, false, 0},
    {"too_big", case_too_big, false, 0},
    {"sleep", case_sleep, false, 0},
    {"lost_before", case_lost_before, true, 0},
    {"lost_idle", case_lost_idle, true, 0},
    {"lost_sender", case_lost_sender, true, 0},
    {"lost_receiver", case_lost_receiver, true, 0},
    {"lost_at_once", case_lost_at_once, true, 0},
    {"never_joins", case_never_joins, false, 0},
    {"one_leaves", case_one_leaves, false, COMM_IS_OVER_AFTER_A_LOSS},
    {"close", case_close, false, 0},
};
enum { NCASES = sizeof cases / sizeof *cases };

/* argv: program, "--rank", case, rank, number of ranks, a socket for each of them. */
static int rank_main(char **argv) {
    const conformance_case *c = cases;
    while (strcmp(c->name, argv[2]) != 0)
        c++;
    case_name = c->name;
    me = strtoul(argv[3], NULL, 10);
    nranks = strtoul(argv[4], NULL, 10);
    for (size_t i = 0; i < nranks; i++)
        sockets[i] = (int)strtol(argv[5 + i], NULL, 10);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(CASE_SECONDS);
    const char *text = getenv("TB_SEED");
    seed = text ? strtoull(text, NULL, 10) : 0;
    random_state = seed * 31 + me;
    CUdevice device;
    if (!has_gpu())
        return SKIPPED;
    need_cuda(p_cuDeviceGet(&device, 0));
    need_cuda(p_cuDevicePrimaryCtxRetain(&gpu, device));
    bench = malloc(2 * ((size_t)ROOM + BEHIND));
    traffic = calloc(MOST_MESSAGES, sizeof *traffic);
    need(bench && traffic, "no memory");
    tb_transport_env env = {.size = sizeof env,
                            .rank = rank_of(me),
                            .is_driven = true,
                            .enter_device = enter_device,
                            .leave_device = leave_device,
                            .device_function = device_function,
                            .tell = tell};
    transport.ops = suite->ops;
    tb_status status = suite->ops->open(&env, &transport.context);
    if (status == TB_REFUSED && me == 0)
        printf("  %s\n", tb_error_detail());
    if (status == TB_REFUSED)
        return SKIPPED;
    need(status == TB_OK, "open: %s", tb_error_detail());
    need_cuda(p_cuCtxPushCurrent(gpu)); /* for copies */
    c->run();
    tb__transport_close(&transport);
    return 0;
}

/* ---- The parent -------------------------------------------------------------------------------------------------- */

static _Noreturn void exec_rank(const char *program, const char *name, size_t rank, size_t n,
                                int (*pairs)[MOST_RANKS]) {
    char numbers[MOST_RANKS + 2][24], *argv[MOST_RANKS + 6] = {(char *)(uintptr_t)program, (char[]){"--rank"}};
    argv[2] = (char *)(uintptr_t)name;
    snprintf(numbers[0], sizeof numbers[0], "%zu", rank);
    snprintf(numbers[1], sizeof numbers[1], "%zu", n);
    argv[3] = numbers[0];
    argv[4] = numbers[1];
    for (size_t i = 0; i < n; i++) {
        if (i != rank)
            fcntl(pairs[rank][i], F_SETFD, 0);
        snprintf(numbers[2 + i], sizeof numbers[2 + i], "%d", i == rank ? -1 : pairs[rank][i]);
        argv[5 + i] = numbers[2 + i];
    }
    execv("/proc/self/exe", argv);
    _exit(126);
}

/* The worst exit status of the ranks. */
static int run_case(const char *program, const conformance_case *c, size_t n) {
    int pairs[MOST_RANKS][MOST_RANKS], worst = 0;
    pid_t pids[MOST_RANKS];
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < i; k++) {
            int pair[2];
            if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
                return 1;
            pairs[i][k] = pair[0];
            pairs[k][i] = pair[1];
        }
    }
    for (size_t i = 0; i < n; i++) {
        pids[i] = fork();
        if (pids[i] == 0)
            exec_rank(program, c->name, i, n, pairs);
    }
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < n; k++) {
            if (i != k)
                close(pairs[i][k]);
        }
    }
    for (size_t left = n; left > 0; left--) {
        int status, result;
        pid_t pid = wait(&status);
        size_t i = 0;
        while (i < n && pids[i] != pid)
            i++;
        bool is_victim = c->loses && i == n - 1 && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        result = WIFEXITED(status) ? WEXITSTATUS(status) : is_victim ? 0 : 1;
        if (WIFSIGNALED(status) && !is_victim)
            printf("  %s: rank %zu ended by signal %d%s\n", c->name, i, WTERMSIG(status),
                   WTERMSIG(status) == SIGALRM ? ": it took too long" : "");
        pids[i] = 0;
        if (result != 0 && worst == 0) { /* the others would wait for it */
            worst = result;
            for (size_t k = 0; k < n && result != SKIPPED; k++) {
                if (pids[k] > 0)
                    kill(pids[k], SIGKILL);
            }
        }
    }
    return worst;
}

static bool is_asked_for(const char *name, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], name) == 0)
            return true;
    }
    return argc < 2;
}

int comm_conformance_main(int argc, char **argv, const comm_conformance *what) {
    int result = 0;
    suite = what;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc > 5 && strcmp(argv[1], "--rank") == 0)
        return rank_main(argv);
    if (!getenv("TB_SEED")) {
        char text[24];
        snprintf(text, sizeof text, "%" PRId64, now_ms());
        setenv("TB_SEED", text, 1);
    }
    printf("TB_SEED=%s, %zu ranks\n", getenv("TB_SEED"), what->nranks);
    for (size_t i = 0; i < NCASES; i++) {
        int64_t begun = now_ms();
        if (!is_asked_for(cases[i].name, argc, argv))
            continue;
        if (cases[i].needs & what->lacks) {
            printf("%-18s not for this transport\n", cases[i].name);
            continue;
        }
        int status = run_case(argv[0], &cases[i], what->nranks);
        if (status == SKIPPED) {
            printf("skipped: there is no GPU, or the transport can't be opened\n");
            return status;
        }
        printf("%-18s %s, %.1f s\n", cases[i].name, status ? "FAILED" : "passed", 1e-3 * (double)(now_ms() - begun));
        result |= status != 0;
    }
    return result;
}
