/* What only holds for the transport over NVSHMEM: sets of ranks, collective calls that fail or never return, messages
 * that make no sense. The ranks are processes; the stand-in for NVSHMEM is needed (tests/support/fake_nvshmem). */
#include "transport/nvshmem/nvshmem.h"
#include "transport/transport.h"

#include "base/process.h"

#include <cuda.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { NRANKS = 3, SECONDS = 20, MIB = 1 << 20, MOST_PACKET = 4096, SKIPPED = 77 };

static int32_t me;
static int sockets[NRANKS];
static tb_transport transport;
static size_t nbarriers, came[NRANKS];
static CUcontext gpu;
static void *driver;

#define need(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            printf("rank %d, line %d: %s: %s\n", (int)me, __LINE__, #condition, tb_error_detail());                    \
            fflush(stdout);                                                                                            \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)
#define work_until(condition)                                                                                          \
    do {                                                                                                               \
        for (int64_t end_ = tb__now_ms() + SECONDS * 1000; !(condition);) {                                            \
            need(tb__now_ms() < end_);                                                                                 \
            turn(100);                                                                                                 \
        }                                                                                                              \
    } while (0)

#define NAME_OF(name)  NAME_OF_(name)
#define NAME_OF_(name) #name
#define DRIVER(name)   ((__typeof__(&(name)))(uintptr_t)dlsym(driver, NAME_OF(name)))

static tb_status enter_device(void *arg, tb_mem_kind kind, int device) {
    (void)arg;
    (void)kind;
    (void)device;
    return DRIVER(cuCtxPushCurrent)(gpu) == CUDA_SUCCESS ? TB_OK : TB_IO;
}

static void leave_device(void *arg, tb_mem_kind kind) {
    CUcontext context;
    (void)arg;
    (void)kind;
    DRIVER(cuCtxPopCurrent)(&context);
}

static void *device_function(void *arg, tb_mem_kind kind, const char *name) {
    (void)arg;
    (void)kind;
    return dlsym(driver, name);
}

/* What is told has this byte in front; a barrier is the other byte. */
enum { TOLD = 1, BARRIER = 2 };

static tb_status tell(void *arg, int32_t peer, const void *bytes, size_t nbytes) {
    unsigned char packet[MOST_PACKET] = {TOLD};
    (void)arg;
    need(peer >= 0 && peer < NRANKS && peer != me && nbytes < sizeof packet);
    memcpy(packet + 1, bytes, nbytes);
    if (sockets[peer] < 0)
        return TB_LOST;
    need(send(sockets[peer], packet, nbytes + 1, MSG_NOSIGNAL) > 0 || errno == EPIPE);
    return TB_OK;
}

static void take_packets(int32_t from) {
    unsigned char packet[MOST_PACKET];
    ssize_t n;
    while (sockets[from] >= 0 && (n = recv(sockets[from], packet, sizeof packet, MSG_DONTWAIT)) >= 0) {
        if (n > 0 && packet[0] == TOLD)
            transport.ops->told(transport.context, from, packet + 1, (size_t)n - 1);
        else if (n > 0)
            came[from]++;
        if (n > 0)
            continue;
        close(sockets[from]);
        sockets[from] = -1;
        transport.ops->peer_lost(transport.context, from, "its process has ended");
    }
}

static void turn(int ms) {
    struct pollfd fds[NRANKS + 1];
    need(transport.ops->progress(transport.context) == TB_OK);
    for (int i = 0; i < NRANKS; i++)
        fds[i] = (struct pollfd){.fd = sockets[i], .events = POLLIN};
    fds[NRANKS] = (struct pollfd){.fd = transport.ops->fd(transport.context), .events = POLLIN};
    poll(fds, NRANKS + 1, ms);
    for (int i = 0; i < NRANKS; i++)
        take_packets(i);
}

static bool have_all_come(void) {
    for (int i = 0; i < NRANKS; i++) {
        if (i != me && sockets[i] >= 0 && came[i] < nbarriers)
            return false;
    }
    return true;
}

static void barrier(void) {
    nbarriers++;
    for (int i = 0; i < NRANKS; i++) {
        if (sockets[i] >= 0)
            (void)!send(sockets[i], (unsigned char[]){BARRIER}, 1, MSG_NOSIGNAL);
    }
    work_until(have_all_come());
}

/* ---- Communicators ---- */

static tb_status try_create(unsigned char number, const int32_t *ranks, size_t n, size_t nbytes, tb_comm **out) {
    unsigned char id[TB_COMM_ID_SIZE] = {number};
    size_t self = 0;
    while (self < n && ranks[self] != me)
        self++;
    tb_comm_desc desc = {.size = sizeof desc, .id = id, .ranks = ranks, .nranks = n, .self = self};
    desc.kind = TB_MEM_CUDA;
    desc.nbytes = nbytes;
    return transport.ops->comm_create(transport.context, &desc, out);
}

static bool is_ready(tb_comm *c) {
    bool is_ready;
    need(transport.ops->comm_check(transport.context, c, &is_ready) == TB_OK);
    return is_ready;
}

static tb_status check(tb_comm *c) {
    bool is_ready;
    return transport.ops->comm_check(transport.context, c, &is_ready);
}

static void create(unsigned char number, const int32_t *ranks, size_t n, size_t nbytes, tb_comm **out) {
    need(try_create(number, ranks, n, nbytes, out) == TB_OK);
    work_until(is_ready(*out));
}

static void destroy(tb_comm *c) {
    int64_t begun = tb__now_ms();
    transport.ops->comm_destroy(transport.context, c);
    need(tb__now_ms() - begun < 5000);
}

static void mark_done(tb_op *op) {
    *(bool *)op->arg = true;
}

/* A message from rank 0 to rank 1. */
static void carry(tb_comm *c, uint64_t tag) {
    unsigned char bytes[1000], seen[1000];
    bool is_done[] = {false}; /* the analyzer sees that it changes */
    tb_piece piece = {transport.ops->comm_memory(transport.context, c), sizeof bytes};
    tb_op op = {.kind = me == 0 ? TB_OP_SEND : TB_OP_RECV,
                .peer = me == 0,
                .tag = tag,
                .pieces = &piece,
                .npieces = 1,
                .is_expected = me == 0,
                .done = mark_done,
                .arg = is_done,
                .memory = TB_MEM_CUDA,
                .comm = c};
    memset(bytes, (int)tag, sizeof bytes);
    need(enter_device(NULL, TB_MEM_CUDA, 0) == TB_OK);
    if (me == 0)
        need(DRIVER(cuMemcpyHtoD)((CUdeviceptr)(uintptr_t)piece.base, bytes, sizeof bytes) == CUDA_SUCCESS);
    if (me == 1)
        need(tb__transport_post(&transport, &op) == TB_OK);
    barrier();
    if (me == 0)
        need(tb__transport_post(&transport, &op) == TB_OK);
    if (me < 2)
        work_until(is_done[0]);
    need(op.status == TB_OK);
    if (me == 1)
        need(DRIVER(cuMemcpyDtoH)(seen, (CUdeviceptr)(uintptr_t)piece.base, sizeof seen) == CUDA_SUCCESS &&
             memcmp(seen, bytes, sizeof seen) == 0);
    leave_device(NULL, TB_MEM_CUDA);
}

static const int32_t all[] = {0, 1, 2}, reversed[] = {2, 1, 0}, two[] = {1, 0};

/* Two communicators with the same ranks, which come and go; each has memory of its own, and gives it back. */
static void test_same_set(void) {
    tb_comm *a, *b;
    for (unsigned char i = 0; i < 3; i++) {
        need(try_create((unsigned char)(2 * i + 1), all, NRANKS, 300 * MIB, &a) == TB_OK);
        create((unsigned char)(2 * i + 2), reversed, NRANKS, 300 * MIB, &b);
        work_until(is_ready(a));
        need(transport.ops->comm_memory(transport.context, a) != transport.ops->comm_memory(transport.context, b));
        carry(a, 1);
        carry(b, 2);
        destroy(a);
        carry(b, 3);
        create((unsigned char)(100 + i), all, NRANKS, 300 * MIB, &a);
        carry(a, 4);
        carry(b, 5);
        barrier();
        destroy(a);
        destroy(b);
        barrier();
    }
}

/* One with other ranks is refused, everywhere, and works when the first ones have gone. */
static void test_other_set(void) {
    tb_comm *c = NULL, *other = NULL;
    if (me < 2)
        create(1, two, 2, MIB, &c);
    barrier();
    if (me < 2) {
        need(try_create(2, all, NRANKS, MIB, &other) == TB_REFUSED);
        need(strstr(tb_error_detail(), "NVSHMEM connects one set of ranks in a process"));
        carry(c, 1);
    } else {
        need(try_create(2, all, NRANKS, MIB, &other) == TB_OK);
        work_until(check(other) != TB_OK);
        need(check(other) == TB_REFUSED && strstr(tb_error_detail(), "one set of ranks"));
        destroy(other);
        barrier(); /* of carry */
    }
    barrier();
    if (c)
        destroy(c);
    barrier();
    create(3, all, NRANKS, MIB, &c);
    carry(c, 2);
    barrier();
    destroy(c);
}

static tb_op make_op(tb_comm *c, tb_op_kind kind, int32_t peer, const tb_piece *piece, bool *is_done) {
    return (tb_op){.kind = kind,
                   .peer = peer,
                   .tag = 77,
                   .pieces = piece,
                   .npieces = 1,
                   .is_expected = kind == TB_OP_SEND,
                   .done = mark_done,
                   .arg = is_done,
                   .memory = TB_MEM_CUDA,
                   .comm = c};
}

/* A rank that has left is missed by what names it, and by nothing else, also when its process has ended. */
static void test_left(void) {
    tb_comm *c, *next;
    create(1, all, NRANKS, MIB, &c);
    bool is_done[2] = {false};
    tb_piece piece = {transport.ops->comm_memory(transport.context, c), 1000};
    tb_op wait = make_op(c, TB_OP_RECV, 2, &piece, &is_done[0]), late = make_op(c, TB_OP_SEND, 2, &piece, &is_done[1]);
    if (me == 0)
        need(tb__transport_post(&transport, &wait) == TB_OK);
    barrier();
    if (me == 2) {
        destroy(c);
        return;
    }
    if (me == 0) {
        work_until(is_done[0]);
        need(wait.status == TB_LOST && strcmp(wait.why, "rank 2 has left the communicator") == 0);
    }
    carry(c, 1);
    work_until(sockets[2] < 0);
    need(tb__transport_post(&transport, &late) == TB_OK);
    work_until(is_done[1]);
    need(late.status == TB_LOST && is_ready(c));
    carry(c, 2);
    need(try_create(9, all, NRANKS, MIB, &next) == TB_REFUSED);
    need(strstr(tb_error_detail(), "NVSHMEM can't be used in this process any more: rank 2 is lost"));
    carry(c, 3);
    barrier();
    destroy(c);
}

/* One that leaves before the others have come breaks it: they could never be connected. */
static void test_left_early(void) {
    tb_comm *c;
    for (int32_t leaver = 0; leaver < NRANKS; leaver++) {
        if (me == leaver) {
            need(try_create((unsigned char)(leaver + 1), all, NRANKS, MIB, &c) == TB_OK);
            turn(0);
            destroy(c);
        }
        barrier();
        if (me != leaver) {
            need(try_create((unsigned char)(leaver + 1), all, NRANKS, MIB, &c) == TB_OK);
            work_until(check(c) != TB_OK);
            need(check(c) == TB_LOST && strstr(tb_error_detail(), "has left before all were connected"));
            destroy(c);
        }
        barrier();
    }
    create(9, all, NRANKS, MIB, &c);
    carry(c, 1);
    barrier();
    destroy(c);
}

static void expect_over(void) {
    tb_comm *c;
    need(try_create(9, all, NRANKS, MIB, &c) == TB_REFUSED);
    need(strstr(tb_error_detail(), "NVSHMEM can't be used in this process any more: "));
}

static void fail_in(const char *call) {
    tb_comm *c;
    if (me == 1)
        setenv("FAKE_NVSHMEM_FAIL", call, 1);
    need(try_create(1, all, NRANKS, MIB, &c) == TB_OK);
    work_until(check(c) != TB_OK);
    need(check(c) == TB_IO && strstr(tb_error_detail(), call));
    barrier();
    destroy(c);
    if (me == 1)
        expect_over();
    barrier();
}

static void test_init_fails(void) {
    fail_in("init");
}

static void test_malloc_fails(void) {
    fail_in("malloc");
}

/* A rank dies in a collective call, in which the others stay for ever. */
static void die_in(const char *call) {
    tb_comm *c;
    if (me == NRANKS - 1)
        setenv("FAKE_NVSHMEM_DIE", call, 1);
    need(try_create(1, all, NRANKS, MIB, &c) == TB_OK);
    work_until(check(c) != TB_OK);
    need(me < NRANKS - 1 && check(c) == TB_LOST && strstr(tb_error_detail(), "rank 2 is lost"));
    destroy(c);
    expect_over();
    barrier();
}

static void test_death_in_init(void) {
    die_in("init");
}

static void test_death_in_malloc(void) {
    die_in("malloc");
}

/* A process has one rank. */
static void test_two_ranks(void) {
    tb_transport_env env = {.size = sizeof env,
                            .rank = 7,
                            .enter_device = enter_device,
                            .leave_device = leave_device,
                            .device_function = device_function,
                            .tell = tell};
    tb_transport other, first = transport;
    tb_comm *c, *of_other;
    create(1, all, NRANKS, MIB, &c);
    need(tb__transport_open("nvshmem", &env, &other) == TB_OK);
    tb_comm_desc desc = {.size = sizeof desc, .id = (unsigned char[TB_COMM_ID_SIZE]){5}, .nranks = 2};
    desc.ranks = (int32_t[]){7, (me + 1) % NRANKS};
    desc.kind = TB_MEM_CUDA;
    desc.nbytes = MIB;
    need(other.ops->comm_create(other.context, &desc, &of_other) == TB_REFUSED);
    need(strstr(tb_error_detail(), "another rank of this process uses NVSHMEM"));
    tb__transport_close(&other);
    transport = first;
    carry(c, 1);
    barrier();
    destroy(c);
}

/* Whatever it is told, it does not fall over. */
static void test_bad_messages(void) {
    static const uint64_t odd[] = {0, 1, 2, 255, 256, 65535, UINT32_MAX, 1 << 20, UINT64_MAX};
    uint64_t random = 12345;
    tb_comm *c;
    for (unsigned char round = 0; round < 4; round++) {
        if (round > 0)
            create(round, all, NRANKS, MIB, &c);
        barrier();
        for (int i = 0; i < 3000 && me == 1; i++) {
            nvshmem_message m = {0};
            uint64_t *fields[] = {&m.id, &m.tag, &m.nbytes, &m.offset, &m.value};
            m.key = random % 3 ? round : random;
            for (int k = 0; k < 5; k++) {
                random = random * 6364136223846793005 + 1442695040888963407;
                *fields[k] = odd[(random >> 40) % 9];
            }
            /* what makes it call NVSHMEM alone is left to its leader, who is trusted */
            m.kind = (uint32_t[]){TELL_JOIN, TELL_OFFER, TELL_GRANT, TELL_DROP, TELL_FREE, 99}[(random >> 33) % 6];
            m.slot = (uint32_t)odd[(random >> 50) % 9];
            transport.ops->told(transport.context, (int32_t[]){0, 2, 3}[(random >> 20) % 3], &m,
                                (random >> 60) ? sizeof m : (size_t)(random >> 45) % sizeof m);
            if (i % 100 == 0)
                turn(0);
        }
        barrier();
        if (round > 0)
            destroy(c);
        barrier();
    }
}

static void test_missing(void) {
    tb_transport other;
    tb_transport_env env = {.size = sizeof env, .rank = 0};
    need(tb__transport_open("nvshmem", &env, &other) == TB_REFUSED);
    need(strstr(tb_error_detail(), "transport nvshmem needs NVSHMEM 3 (pip install nvidia-nvshmem-cu13): "));
    need(!*tb__nvshmem_found());
}

typedef struct test {
    const char *name;
    void (*run)(void);
    bool loses, lacks_library;
} test;

static const test tests[] = {
    {"same_set", test_same_set, false, false},
    {"other_set", test_other_set, false, false},
    {"left", test_left, false, false},
    {"left_early", test_left_early, false, false},
    {"init_fails", test_init_fails, false, false},
    {"malloc_fails", test_malloc_fails, false, false},
    {"death_in_init", test_death_in_init, true, false},
    {"death_in_malloc", test_death_in_malloc, true, false},
    {"two_ranks", test_two_ranks, false, false},
    {"bad_messages", test_bad_messages, false, false},
    {"missing", test_missing, false, true},
};
enum { NTESTS = sizeof tests / sizeof *tests };

/* argv: program, test, rank, sockets. */
static int rank_main(char **argv) {
    const test *t = &tests[strtol(argv[1], NULL, 10)];
    CUdevice device;
    me = (int32_t)strtol(argv[2], NULL, 10);
    for (int i = 0; i < NRANKS; i++)
        sockets[i] = (int)strtol(argv[3 + i], NULL, 10);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(3 * SECONDS);
    if (t->lacks_library) {
        setenv("TENSORBUS_NVSHMEM", "/nowhere/libnvshmem_host.so.3", 1);
        t->run();
        return 0;
    }
    setenv("FAKE_NVSHMEM_HEAP", "1073741824", 1);
    driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    const char *library = getenv("TENSORBUS_NVSHMEM");
    if (!driver || !library || !dlsym(driver, "fake_cuda_controls"))
        return SKIPPED;
    need(DRIVER(cuInit)(0) == CUDA_SUCCESS && DRIVER(cuDeviceGet)(&device, 0) == CUDA_SUCCESS);
    need(DRIVER(cuDevicePrimaryCtxRetain)(&gpu, device) == CUDA_SUCCESS);
    tb_transport_env env = {.size = sizeof env,
                            .rank = me,
                            .enter_device = enter_device,
                            .leave_device = leave_device,
                            .device_function = device_function,
                            .tell = tell};
    need(tb__transport_open("nvshmem", &env, &transport) == TB_OK);
    t->run();
    int64_t begun = tb__now_ms();
    tb__transport_close(&transport);
    need(tb__now_ms() - begun < 10000);
    return 0;
}

static int run_test(size_t number) {
    int pairs[NRANKS][NRANKS], worst = 0;
    pid_t pids[NRANKS];
    for (int i = 0; i < NRANKS; i++) {
        pairs[i][i] = -1;
        for (int k = 0; k < i; k++) {
            int pair[2];
            if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
                return 1;
            pairs[i][k] = pair[0];
            pairs[k][i] = pair[1];
        }
    }
    for (int i = 0; i < NRANKS; i++) {
        pids[i] = fork();
        if (pids[i] > 0)
            continue;
        char text[NRANKS + 2][16], *argv[NRANKS + 4] = {(char[]){"rank"}, text[0], text[1]};
        snprintf(text[0], sizeof text[0], "%d", (int)number);
        snprintf(text[1], sizeof text[1], "%d", i);
        for (int k = 0; k < NRANKS; k++) {
            snprintf(text[2 + k], sizeof text[2 + k], "%d", pairs[i][k]);
            argv[3 + k] = text[2 + k];
            if (k != i)
                fcntl(pairs[i][k], F_SETFD, 0);
        }
        execv("/proc/self/exe", argv);
        _exit(126);
    }
    for (int i = 0; i < NRANKS; i++) {
        for (int k = 0; k < NRANKS; k++) {
            if (i != k)
                close(pairs[i][k]);
        }
    }
    for (int left = NRANKS; left > 0; left--) {
        int status;
        pid_t pid = wait(&status);
        bool is_victim = tests[number].loses && pid == pids[NRANKS - 1];
        int result = WIFEXITED(status) ? WEXITSTATUS(status) : is_victim && WTERMSIG(status) == SIGKILL ? 0 : 1;
        if (WIFSIGNALED(status) && !is_victim)
            printf("a rank ended by signal %d\n", WTERMSIG(status));
        worst = result > worst ? result : worst;
    }
    return worst;
}

int main(int argc, char **argv) {
    int result = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (strcmp(argv[0], "rank") == 0)
        return rank_main(argv);
    for (size_t i = 0; i < NTESTS; i++) {
        if (argc > 1 && strcmp(argv[1], tests[i].name) != 0)
            continue;
        int64_t begun = tb__now_ms();
        int status = run_test(i);
        if (status == SKIPPED) {
            printf("skipped: the stand-ins are needed\n");
            return status;
        }
        printf("%-16s %s, %.1f s\n", tests[i].name, status ? "FAILED" : "passed",
               1e-3 * (double)(tb__now_ms() - begun));
        result |= status != 0;
    }
    return result;
}
