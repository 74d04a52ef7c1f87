#include "fake_nccl.h"

#include "../fake_cuda/fake_cuda.h"
#include "transport/nccl/nccl_load.h"

#pragma GCC visibility push(default)
#include <cuda.h>
#pragma GCC visibility pop

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

enum {
    MOST_RANKS = 16,
    MOST_OPS = 64,
    NAME_SIZE = 40,
    REMOTE_ERROR = 6,
    INVALID_USAGE = 5,
};
typedef enum life { ALIVE = 0xa11e, FINALIZED = 0xf1a1, DEAD = 0xdead } life;

struct nccl_handle {
    life life;
    int nranks, rank;
    char root[NAME_SIZE]; /* names of abstract sockets, without their first byte */
    CUcontext context;
    _Atomic int state;
    _Atomic bool is_aborted;
    _Atomic int nthreads;                 /* that work for it */
    int to[MOST_RANKS], from[MOST_RANKS]; /* sockets; -1: none */
    bool is_connected_to[MOST_RANKS], is_connected_from[MOST_RANKS];
    CUstream stream;
    struct nccl_handle *next;
};

typedef struct one_op {
    nccl_handle *comm;
    bool is_send;
    char *address;
    size_t nbytes;
    int peer;
    CUstream stream;
} one_op;

/* What was launched. The words are those that the stream writes and waits for. */
typedef struct group {
    _Atomic uint32_t has_begun, is_over;
    nccl_handle *comm;
    int failure;
    size_t nops;
    one_op ops[MOST_OPS];
    struct group *next;
} group;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static nccl_handle *all;  /* also those that have ended, so that their use is seen */
static group *all_groups; /* the streams may still look at them */
static uint64_t random_state;
static _Atomic long ngroups, nalive;
static long group_fault = -1, init_fault = -1;
static int group_fault_result, init_fault_result;
static _Atomic bool aborts_are_held;

static _Thread_local struct {
    int depth;
    size_t nops;
    one_op ops[MOST_OPS];
} building;

static _Noreturn __attribute__((format(printf, 1, 2))) void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "fake NCCL: ");
    vfprintf(stderr, format, args); // NOLINT: va_start has initialised it
    fprintf(stderr, "\n");
    va_end(args);
    abort();
}

static uint64_t random_below(uint64_t n) {
    pthread_mutex_lock(&lock);
    if (random_state == 0 && getrandom(&random_state, sizeof random_state, 0) != sizeof random_state)
        die("getrandom");
    random_state = random_state * 6364136223846793005 + 1442695040888963407;
    uint64_t value = n ? (random_state >> 33) % n : 0;
    pthread_mutex_unlock(&lock);
    return value;
}

static void nap(long us) {
    nanosleep(&(struct timespec){.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000}, NULL);
}

static void random_delay(void) {
    const char *most = getenv("FAKE_NCCL_DELAY_US");
    nap((long)random_below(most ? strtoull(most, NULL, 10) : 1000));
}

static bool strikes(long *n) {
    pthread_mutex_lock(&lock);
    bool is_now = *n >= 0 && (*n)-- == 0;
    pthread_mutex_unlock(&lock);
    return is_now;
}

static void start_thread(void *(*run)(void *), void *arg) {
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &attributes, run, arg) != 0)
        die("no thread");
    pthread_attr_destroy(&attributes);
}

/* ---- The driver -------------------------------------------------------------------------------------------------- */

#define NAME_OF(name)  NAME_OF_(name)
#define NAME_OF_(name) #name
#define DRIVER(name)   ((__typeof__(&(name)))(uintptr_t)driver_function(NAME_OF(name)))

static void *driver_function(const char *name) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *function = library ? dlsym(library, name) : NULL;
    if (!function)
        die("the driver has no %s", name);
    return function;
}

static void need_context(const char *function) {
    if (!fake_cuda() || !fake_cuda()->has_context())
        die("%s without a current context", function);
}

static void *memory_at(const one_op *o) {
    void *at = fake_cuda()->look(o->address, o->nbytes);
    if (!at)
        die("%zu bytes at %p, which is no memory of a GPU", o->nbytes, (void *)o->address);
    return at;
}

/* ---- Sockets ----------------------------------------------------------------------------------------------------- */

static void choose_name(char name[NAME_SIZE]) {
    uint64_t numbers[2];
    if (getrandom(numbers, sizeof numbers, 0) != sizeof numbers)
        die("getrandom");
    snprintf(name, NAME_SIZE, "nccl%016llx%08x", (unsigned long long)numbers[0], (unsigned)numbers[1]);
}

static struct sockaddr_un address_of(const char *name) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path + 1, name, strlen(name));
    return address;
}

static int listen_at(const char *name) {
    struct sockaddr_un address = address_of(name);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) != 0 || listen(fd, MOST_RANKS) != 0)
        die("a listener: %s", strerror(errno));
    return fd;
}

/* -1: it was aborted. A listener that is not there yet is waited for. */
static int connect_to(const char *name, const nccl_handle *c) {
    struct sockaddr_un address = address_of(name);
    for (;;) {
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0)
            die("a socket: %s", strerror(errno));
        if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0)
            return fd;
        close(fd);
        if (atomic_load(&c->is_aborted))
            return -1;
        nap(1000);
    }
}

static bool wait_for(int fd, short events, const nccl_handle *c) {
    while (poll(&(struct pollfd){.fd = fd, .events = events}, 1, 5) <= 0) {
        if (c && atomic_load(&c->is_aborted))
            return false;
    }
    return !c || !atomic_load(&c->is_aborted);
}

/* The other end is gone, which NCCL does not notice. */
static bool hang(nccl_handle *c) {
    if (c && getenv("FAKE_NCCL_SEES_LOSS"))
        atomic_store(&c->state, REMOTE_ERROR);
    while (c && !atomic_load(&c->is_aborted))
        nap(1000);
    return false;
}

/* False: it was aborted. c: NULL for the root, which can't be. */
static bool take(int fd, void *to, size_t nbytes, nccl_handle *c) {
    for (size_t n = 0; n < nbytes;) {
        if (!wait_for(fd, POLLIN, c))
            return false;
        ssize_t got = recv(fd, (char *)to + n, nbytes - n, MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
            return hang(c);
        n += got > 0 ? (size_t)got : 0;
    }
    return true;
}

static bool give(int fd, const void *from, size_t nbytes, nccl_handle *c) {
    for (size_t n = 0; n < nbytes;) {
        if (!wait_for(fd, POLLOUT, c))
            return false;
        ssize_t sent = send(fd, (const char *)from + n, nbytes - n, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN && errno != EINTR)
            return hang(c);
        n += sent > 0 ? (size_t)sent : 0;
    }
    return true;
}

/* ---- Connecting -------------------------------------------------------------------------------------------------- */

typedef struct arrival {
    int rank, nranks;
    char name[NAME_SIZE]; /* of its listener */
} arrival;

/* Tells all ranks of each other, once all have come. */
static void *run_root(void *arg) {
    int listener = (int)(intptr_t)arg, fds[MOST_RANKS];
    arrival all_ranks[MOST_RANKS] = {0}, a = {.nranks = 1};
    for (int n = 0; n < a.nranks; n++) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0 || !take(fd, &a, sizeof a, NULL)) {
            n--;
            continue;
        }
        if (a.rank < 0 || a.rank >= a.nranks || a.nranks > MOST_RANKS || all_ranks[a.rank].nranks)
            die("rank %d of %d comes twice, or is out of range", a.rank, a.nranks);
        all_ranks[a.rank] = a;
        fds[a.rank] = fd;
    }
    for (int i = 0; i < a.nranks; i++) {
        give(fds[i], all_ranks, sizeof all_ranks, NULL);
        close(fds[i]);
    }
    close(listener);
    return NULL;
}

EXPORTED int ncclGetVersion(int *version);
EXPORTED const char *ncclGetErrorString(int result);
EXPORTED const char *ncclGetLastError(nccl_handle *c);
EXPORTED int ncclGetUniqueId(nccl_id *out);
EXPORTED int ncclCommInitRankConfig(nccl_handle **out, int nranks, nccl_id id, int rank, nccl_config *config);
EXPORTED int ncclCommFinalize(nccl_handle *c);
EXPORTED int ncclCommAbort(nccl_handle *c);
EXPORTED int ncclCommGetAsyncError(nccl_handle *c, int *out);
EXPORTED int ncclGroupStart(void);
EXPORTED int ncclGroupEnd(void);
EXPORTED int ncclSend(const void *from, size_t count, int type, int peer, nccl_handle *c, void *stream);
EXPORTED int ncclRecv(void *to, size_t count, int type, int peer, nccl_handle *c, void *stream);

int ncclGetVersion(int *version) {
    const char *text = getenv("FAKE_NCCL_VERSION");
    *version = text ? atoi(text) : 23007;
    return NCCL_SUCCESS;
}

const char *ncclGetErrorString(int result) {
    return result == REMOTE_ERROR ? "remote process exited or there was a network error" : "a fault of the test";
}

const char *ncclGetLastError(nccl_handle *c) {
    (void)c;
    return "fake NCCL";
}

int ncclGetUniqueId(nccl_id *out) {
    memset(out, 0, sizeof *out);
    choose_name(out->bytes);
    start_thread(run_root, (void *)(intptr_t)listen_at(out->bytes));
    return NCCL_SUCCESS;
}

static bool connect_peers(nccl_handle *c, int listener, const arrival *ranks) {
    for (int i = 0; i < c->nranks; i++) {
        if (i == c->rank)
            continue;
        c->to[i] = connect_to(ranks[i].name, c);
        if (c->to[i] < 0 || !give(c->to[i], &c->rank, sizeof c->rank, c))
            return false;
    }
    for (int i = 0; i < c->nranks - 1; i++) {
        int from;
        if (!wait_for(listener, POLLIN, c))
            return false;
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0 || !take(fd, &from, sizeof from, c))
            return false;
        c->from[from] = fd;
    }
    return true;
}

static void *run_init(void *arg) {
    nccl_handle *c = arg;
    arrival a = {.rank = c->rank, .nranks = c->nranks}, ranks[MOST_RANKS];
    choose_name(a.name);
    int listener = listen_at(a.name), root = connect_to(c->root, c);
    bool is_done = root >= 0 && give(root, &a, sizeof a, c) && take(root, ranks, sizeof ranks, c) &&
                   connect_peers(c, listener, ranks);
    random_delay();
    close(listener);
    if (root >= 0)
        close(root);
    if (is_done)
        atomic_store(&c->state, strikes(&init_fault) ? init_fault_result : NCCL_SUCCESS);
    atomic_fetch_sub(&c->nthreads, 1);
    return NULL;
}

int ncclCommInitRankConfig(nccl_handle **out, int nranks, nccl_id id, int rank, nccl_config *config) {
    nccl_handle *c = calloc(1, sizeof *c);
    need_context("ncclCommInitRankConfig");
    if (!c || config->magic != 0xcafebeef || config->size < sizeof *config || config->blocking != 0)
        die("the configuration is not that of a communicator that does not block");
    *c = (nccl_handle){.life = ALIVE, .nranks = nranks, .rank = rank, .state = NCCL_IN_PROGRESS, .nthreads = 1};
    memcpy(c->root, id.bytes, NAME_SIZE);
    for (int i = 0; i < MOST_RANKS; i++)
        c->to[i] = c->from[i] = -1;
    DRIVER(cuCtxGetCurrent)(&c->context);
    pthread_mutex_lock(&lock);
    c->next = all;
    all = c;
    pthread_mutex_unlock(&lock);
    atomic_fetch_add(&nalive, 1);
    start_thread(run_init, c);
    *out = c;
    return NCCL_IN_PROGRESS;
}

/* ---- Launching --------------------------------------------------------------------------------------------------- */

static nccl_handle *check_comm(nccl_handle *c, const char *function) {
    if (!c || (c->life != ALIVE && c->life != FINALIZED))
        die("%s of a communicator that has ended", function);
    return c;
}

static void check_not_in_progress(const nccl_handle *c, const char *function) {
    if (atomic_load(&c->state) == NCCL_IN_PROGRESS)
        die("%s while the communicator is in progress", function);
}

int ncclCommGetAsyncError(nccl_handle *c, int *out) {
    *out = atomic_load(&check_comm(c, "ncclCommGetAsyncError")->state);
    return NCCL_SUCCESS;
}

int ncclGroupStart(void) {
    if (building.depth++ > 0)
        die("a group in a group");
    building.nops = 0;
    return NCCL_SUCCESS;
}

static int add_op(const char *function, one_op o, int type) {
    check_comm(o.comm, function);
    check_not_in_progress(o.comm, function);
    if (building.depth == 0 || building.nops == MOST_OPS || type != NCCL_BYTES)
        die("%s outside of a group, or not of bytes, or too many", function);
    if (o.peer < 0 || o.peer >= o.comm->nranks || o.peer == o.comm->rank)
        die("%s: rank %d of %d", function, o.peer, o.comm->nranks);
    const one_op *first = &building.ops[0];
    if (building.nops > 0 && (first->comm != o.comm || first->is_send != o.is_send || first->stream != o.stream))
        die("a group of several communicators, directions or streams");
    memory_at(&o);
    building.ops[building.nops++] = o;
    return NCCL_SUCCESS;
}

int ncclSend(const void *from, size_t count, int type, int peer, nccl_handle *c, void *stream) {
    return add_op("ncclSend", (one_op){c, true, (char *)(uintptr_t)from, count, peer, stream}, type);
}

int ncclRecv(void *to, size_t count, int type, int peer, nccl_handle *c, void *stream) {
    return add_op("ncclRecv", (one_op){c, false, to, count, peer, stream}, type);
}

static int socket_of(const one_op *o) {
    return o->is_send ? o->comm->to[o->peer] : o->comm->from[o->peer];
}

/* The first group between two ranks, in one direction, is launched when the other does, too. */
static bool connect_group(group *g) {
    nccl_handle *c = g->comm;
    for (size_t i = 0; i < g->nops; i++) {
        const one_op *o = &g->ops[i];
        bool *is_connected = o->is_send ? &c->is_connected_to[o->peer] : &c->is_connected_from[o->peer];
        char byte = 'C';
        if (!*is_connected && (!give(socket_of(o), &byte, 1, c) || !take(socket_of(o), &byte, 1, c)))
            return false;
        if (byte != 'C')
            die("the first group of two ranks is not launched by both");
        *is_connected = true;
    }
    return true;
}

static bool run_send(const one_op *o) {
    char byte;
    int fd = socket_of(o);
    return give(fd, &o->nbytes, sizeof o->nbytes, o->comm) && take(fd, &byte, 1, o->comm) &&
           give(fd, memory_at(o), o->nbytes, o->comm) && take(fd, &byte, 1, o->comm);
}

static bool run_recv(const one_op *o) {
    size_t nbytes;
    int fd = socket_of(o);
    if (!take(fd, &nbytes, sizeof nbytes, o->comm))
        return false;
    if (nbytes != o->nbytes)
        die("rank %d receives %zu bytes, and rank %d sends %zu", o->comm->rank, o->nbytes, o->peer, nbytes);
    return give(fd, "G", 1, o->comm) && take(fd, memory_at(o), nbytes, o->comm) && give(fd, "D", 1, o->comm);
}

static void occupy_stream(group *g) {
    CUcontext context;
    CUdeviceptr begun = (CUdeviceptr)(uintptr_t)&g->has_begun, over = (CUdeviceptr)(uintptr_t)&g->is_over;
    DRIVER(cuCtxPushCurrent)(g->comm->context);
    DRIVER(cuStreamWriteValue32)(g->ops[0].stream, begun, 1, 0);
    DRIVER(cuStreamWaitValue32)(g->ops[0].stream, over, 1, CU_STREAM_WAIT_VALUE_GEQ);
    DRIVER(cuCtxPopCurrent)(&context);
}

static void *run_group(void *arg) {
    group *g = arg;
    nccl_handle *c = g->comm;
    random_delay();
    bool is_good = connect_group(g);
    if (is_good) {
        occupy_stream(g);
        atomic_store(&c->state, g->failure);
    }
    while (is_good && !atomic_load(&g->has_begun)) {
        nap(100);
        is_good = !atomic_load(&c->is_aborted);
    }
    for (size_t i = 0; is_good && i < g->nops; i++)
        is_good =
            g->failure == NCCL_SUCCESS ? g->ops[i].is_send ? run_send(&g->ops[i]) : run_recv(&g->ops[i]) : hang(c);
    while (atomic_load(&c->is_aborted) && atomic_load(&aborts_are_held))
        nap(1000);
    atomic_store(&g->is_over, 1);
    atomic_fetch_sub(&c->nthreads, 1);
    return NULL;
}

int ncclGroupEnd(void) {
    if (building.depth-- != 1)
        die("the end of a group that was not begun");
    if (building.nops == 0)
        return NCCL_SUCCESS;
    need_context("ncclGroupEnd");
    nccl_handle *c = building.ops[0].comm;
    check_not_in_progress(c, "ncclGroupEnd");
    if (c->stream && c->stream != building.ops[0].stream)
        die("a communicator that is used on two streams");
    c->stream = building.ops[0].stream;
    group *g = calloc(1, sizeof *g);
    if (!g)
        die("no memory");
    pthread_mutex_lock(&lock);
    g->next = all_groups;
    all_groups = g;
    pthread_mutex_unlock(&lock);
    atomic_fetch_add(&ngroups, 1);
    g->comm = c;
    g->nops = building.nops;
    memcpy(g->ops, building.ops, g->nops * sizeof *g->ops);
    g->failure = strikes(&group_fault) ? group_fault_result : NCCL_SUCCESS;
    atomic_store(&c->state, NCCL_IN_PROGRESS);
    atomic_fetch_add(&c->nthreads, 1);
    start_thread(run_group, g);
    return NCCL_IN_PROGRESS;
}

/* ---- The end ----------------------------------------------------------------------------------------------------- */

static void end_comm(nccl_handle *c) {
    while (atomic_load(&c->nthreads) > 0)
        nap(500);
    for (int i = 0; i < MOST_RANKS; i++) {
        if (c->to[i] >= 0)
            close(c->to[i]);
        if (c->from[i] >= 0)
            close(c->from[i]);
    }
    c->life = DEAD;
    atomic_fetch_sub(&nalive, 1);
}

static void *run_finalize(void *arg) {
    nccl_handle *c = arg;
    while (atomic_load(&c->nthreads) > 1)
        nap(500);
    atomic_store(&c->state, NCCL_SUCCESS);
    atomic_fetch_sub(&c->nthreads, 1);
    return NULL;
}

int ncclCommFinalize(nccl_handle *c) {
    check_not_in_progress(check_comm(c, "ncclCommFinalize"), "ncclCommFinalize");
    if (c->life == FINALIZED)
        return INVALID_USAGE;
    c->life = FINALIZED;
    atomic_store(&c->state, NCCL_IN_PROGRESS);
    atomic_fetch_add(&c->nthreads, 1);
    start_thread(run_finalize, c);
    return NCCL_IN_PROGRESS;
}

int ncclCommAbort(nccl_handle *c) {
    atomic_store(&check_comm(c, "ncclCommAbort")->is_aborted, true);
    nap((long)random_below(30000));
    end_comm(c);
    return NCCL_SUCCESS;
}

/* ---- Controls ---------------------------------------------------------------------------------------------------- */

static void fail_group(long n, int result) {
    pthread_mutex_lock(&lock);
    group_fault = n;
    group_fault_result = result;
    pthread_mutex_unlock(&lock);
}

static void fail_init(long n, int result) {
    pthread_mutex_lock(&lock);
    init_fault = n;
    init_fault_result = result;
    pthread_mutex_unlock(&lock);
}

static long count_groups(void) {
    return atomic_load(&ngroups);
}

static long count_alive(void) {
    return atomic_load(&nalive);
}

static void hold_aborts(int is_held) {
    atomic_store(&aborts_are_held, is_held);
}

EXPORTED extern const fake_nccl_control fake_nccl_controls;
const fake_nccl_control fake_nccl_controls = {fail_group, fail_init, count_groups, count_alive, hold_aborts};
