/* A libnvshmem_host.so.3 for tests on machines without a GPU: symmetric memory and puts over the fake driver
 * (tests/support/fake_cuda/fake_cuda.h). It behaves as NVSHMEM does where that matters: one set of processes, which
 * meet by a unique id; collective calls that wait for all of them, for ever if one is gone; a heap at another address
 * in each process; puts that take their time on their stream, with the signal after the data; exit does not end during
 * a call. Who breaks NVSHMEM's rules dies with a message: two calls at a time, different collective calls, a call
 * without a context, memory that is not symmetric, or not allocated, a call long after another process of the set has
 * ended.
 *
 * Environment: FAKE_NVSHMEM_HEAP, bytes of symmetric memory (4 GiB); FAKE_NVSHMEM_DELAY_MS, of a collective call, at
 * most (5); FAKE_NVSHMEM_FAIL, a collective call that fails: init or malloc; FAKE_NVSHMEM_DIE, one in which this
 * process is killed. */
#include <cuda.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

enum { MOST_PES = 16, MOST_BLOCKS = 256, GRANULE = 512, GRACE_SECONDS = 5, WITH_UID = 8, SIGNAL_SET = 9 };

typedef struct unique_id {
    int version;
    char name[124]; /* of the socket of the process that made it */
} unique_id;

typedef struct attributes {
    int version;
    void *mpi_comm;
    struct {
        int version;
        struct {
            int version;
            unique_id *id;
            int pe, npes;
        } uid;
        char unused[96];
    } args;
} attributes;

/* What each process tells all others in a collective call. */
typedef struct part {
    int pe, npes, pid, call;
    uint64_t value;
    CUipcMemHandle handle;
} part;

typedef struct block {
    size_t at, nbytes;
} block;

static struct {
    pthread_mutex_t lock; /* of the one call that may be under way */
    bool is_up;
    int pe, npes, socket;
    CUdeviceptr heap, peers[MOST_PES];
    size_t nbytes;
    block blocks[MOST_BLOCKS]; /* by address */
    size_t nblocks;
    int pidfds[MOST_PES];
    _Atomic int64_t ended_s; /* when a process of the set was seen to have ended; 0: none was */
} my = {.lock = PTHREAD_MUTEX_INITIALIZER};

static _Noreturn __attribute__((format(printf, 1, 2))) void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "fake NVSHMEM: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    abort();
}

static int64_t now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec;
}

static size_t setting(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text ? (size_t)strtoull(text, NULL, 10) : otherwise;
}

/* ---- The driver -------------------------------------------------------------------------------------------------- */

#define NAME_OF(name)  NAME_OF_(name)
#define NAME_OF_(name) #name
#define DRIVER(name)   ((__typeof__(&(name)))(uintptr_t)find(NAME_OF(name)))

static void *find(const char *name) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *function = library ? dlsym(library, name) : NULL;
    if (!function)
        die("the driver has no %s", name);
    return function;
}

static void check(const char *what, CUresult result) {
    if (result != CUDA_SUCCESS)
        die("%s: CUresult %d", what, (int)result);
}

/* ---- Calls ------------------------------------------------------------------------------------------------------- */

static void begin(const char *call, bool needs_init) {
    CUcontext context = NULL;
    if (pthread_mutex_trylock(&my.lock) != 0)
        die("%s during another call", call);
    if (needs_init && !my.is_up)
        die("%s before NVSHMEM is initialised", call);
    check("cuCtxGetCurrent", DRIVER(cuCtxGetCurrent)(&context));
    if (needs_init && !context)
        die("%s without a context", call);
    int64_t ended = my.ended_s;
    if (needs_init && ended > 0 && now_s() > ended + GRACE_SECONDS)
        die("%s though another process of the set has ended", call);
}

static void end(void) {
    pthread_mutex_unlock(&my.lock);
}

static void delay(void) {
    uint32_t random;
    size_t most = setting("FAKE_NVSHMEM_DELAY_MS", 5);
    (void)!getrandom(&random, sizeof random, 0);
    long us = most > 0 ? (long)(random % (most * 1000)) : 0;
    nanosleep(&(struct timespec){us / 1000000, us % 1000000 * 1000}, NULL);
}

static bool transfer(int fd, void *bytes, size_t nbytes, bool is_send) {
    for (size_t done = 0; done < nbytes;) {
        ssize_t n = is_send ? send(fd, (char *)bytes + done, nbytes - done, MSG_NOSIGNAL)
                            : recv(fd, (char *)bytes + done, nbytes - done, 0);
        if (n <= 0 && errno != EINTR)
            return false;
        done += n > 0 ? (size_t)n : 0;
    }
    return true;
}

static _Noreturn void wait_for_ever(void) {
    for (;;)
        pause();
}

/* Gathers a part of each process. Does not return if one is gone. */
static void gather(part *own, part *all) {
    memset(all, 0, sizeof *all * (size_t)my.npes);
    delay();
    if (!transfer(my.socket, own, sizeof *own, true) || !transfer(my.socket, all, sizeof *all * (size_t)my.npes, false))
        wait_for_ever();
    for (int i = 0; i < my.npes; i++) {
        if (all[i].call != own->call || (own->call != 'i' && all[i].value != own->value))
            die("PE %d makes call %c of %llu, and PE %d call %c of %llu", i, all[i].call,
                (unsigned long long)all[i].value, own->pe, own->call, (unsigned long long)own->value);
    }
}

static void meet(char call, uint64_t value) {
    part own = {.pe = my.pe, .npes = my.npes, .call = call, .value = value}, all[MOST_PES];
    gather(&own, all);
}

static bool is_chosen(const char *variable, const char *call) {
    const char *text = getenv(variable);
    return text && strcmp(text, call) == 0;
}

static void maybe_die(const char *call) {
    if (is_chosen("FAKE_NVSHMEM_DIE", call)) {
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL); /* the others are in it */
        raise(SIGKILL);
    }
}

/* ---- Meeting ----------------------------------------------------------------------------------------------------- */

static socklen_t make_address(const unique_id *id, struct sockaddr_un *out) {
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    size_t n = strlen(id->name);
    memcpy(out->sun_path + 1, id->name, n); /* abstract: it goes with the process */
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
}

/* Passes the parts of all processes on to all, again and again. */
static void *run_root(void *arg) {
    int listener = (int)(intptr_t)arg, fds[MOST_PES], npes = 1;
    part all[MOST_PES], one;
    for (int n = 0; n < npes; n++) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0 || !transfer(fd, &one, sizeof one, false))
            wait_for_ever();
        npes = one.npes;
        fds[one.pe] = fd;
        all[one.pe] = one;
    }
    close(listener);
    for (;;) {
        for (int i = 0; i < npes; i++) {
            if (!transfer(fds[i], all, sizeof *all * (size_t)npes, true))
                wait_for_ever();
        }
        for (int i = 0; i < npes; i++) {
            if (!transfer(fds[i], &all[i], sizeof *all, false))
                wait_for_ever();
        }
    }
    return NULL;
}

EXPORTED int nvshmemx_get_uniqueid(unique_id *out) {
    struct sockaddr_un address;
    pthread_t thread;
    uint64_t random;
    begin("nvshmemx_get_uniqueid", false);
    if (my.is_up)
        die("a unique id while NVSHMEM is initialised");
    (void)!getrandom(&random, sizeof random, 0);
    *out = (unique_id){.version = (1 << 16) + sizeof *out};
    snprintf(out->name, sizeof out->name, "fake-nvshmem-%llx", (unsigned long long)random);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    socklen_t nbytes = make_address(out, &address);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, nbytes) != 0 || listen(fd, MOST_PES) != 0 ||
        pthread_create(&thread, NULL, run_root, (void *)(intptr_t)fd) != 0)
        die("no root: %s", strerror(errno));
    pthread_detach(thread);
    end();
    return 0;
}

EXPORTED int nvshmemx_init_status(void) {
    return my.is_up ? 2 : 0;
}

EXPORTED int nvshmemx_set_attr_uniqueid_args(int pe, int npes, const unique_id *id, attributes *attr) {
    attr->args.uid.id = (unique_id *)(uintptr_t)id;
    attr->args.uid.pe = pe;
    attr->args.uid.npes = npes;
    return 0;
}

static void *watch(void *unused) {
    struct pollfd fds[MOST_PES];
    int n = my.npes;
    (void)unused;
    for (int i = 0; i < n; i++)
        fds[i] = (struct pollfd){.fd = my.pidfds[i], .events = POLLIN};
    while (poll(fds, (nfds_t)n, -1) < 0 && errno == EINTR)
        ;
    my.ended_s = now_s();
    return NULL;
}

/* Of this set only: a later one has others. */
static void watch_others(const part *all) {
    pthread_t thread;
    for (int i = 0; i < my.npes; i++)
        my.pidfds[i] = i == my.pe ? -1 : (int)syscall(SYS_pidfd_open, all[i].pid, 0);
    if (pthread_create(&thread, NULL, watch, NULL) != 0)
        die("no thread");
    pthread_detach(thread);
}

/* As on a real GPU: exit does not end while a thread is in a call that waits. */
static void finish(void) {
    pthread_mutex_lock(&my.lock);
    pthread_mutex_unlock(&my.lock);
}

static void connect_to_root(const unique_id *id) {
    struct sockaddr_un address;
    socklen_t nbytes = make_address(id, &address);
    my.socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(my.socket, (struct sockaddr *)&address, nbytes) != 0)
        wait_for_ever();
}

EXPORTED int nvshmemx_hostlib_init_attr(unsigned flags, attributes *attr) {
    part own, all[MOST_PES];
    begin("nvshmemx_hostlib_init_attr", false);
    if (my.is_up || flags != WITH_UID || attr->version != (1 << 16) + (int)sizeof *attr ||
        attr->args.version != (1 << 16) + (int)sizeof attr->args || attr->args.uid.npes > MOST_PES)
        die("nvshmemx_hostlib_init_attr: wrong arguments, or a second time");
    static bool is_registered;
    if (!is_registered)
        is_registered = atexit(finish) == 0;
    my.pe = attr->args.uid.pe;
    my.npes = attr->args.uid.npes;
    my.nbytes = setting("FAKE_NVSHMEM_HEAP", (size_t)4 << 30);
    own = (part){.pe = my.pe, .npes = my.npes, .pid = getpid(), .call = 'i'};
    check("cuMemAlloc", DRIVER(cuMemAlloc)(&my.heap, my.nbytes));
    check("cuIpcGetMemHandle", DRIVER(cuIpcGetMemHandle)(&own.handle, my.heap));
    maybe_die("init");
    connect_to_root(attr->args.uid.id);
    gather(&own, all);
    for (int i = 0; i < my.npes; i++) {
        my.peers[i] = my.heap;
        if (i != my.pe)
            check("cuIpcOpenMemHandle",
                  DRIVER(cuIpcOpenMemHandle)(&my.peers[i], all[i].handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    }
    my.nblocks = 0;
    watch_others(all);
    my.is_up = true;
    meet('b', 0); /* all have opened the memory of all */
    end();
    return is_chosen("FAKE_NVSHMEM_FAIL", "init") ? 7 : 0;
}

EXPORTED void nvshmemx_hostlib_finalize(void) {
    begin("nvshmemx_hostlib_finalize", true);
    meet('e', 0);
    for (int i = 0; i < my.npes; i++) {
        if (i != my.pe)
            check("cuIpcCloseMemHandle", DRIVER(cuIpcCloseMemHandle)(my.peers[i]));
    }
    meet('E', 0);
    check("cuMemFree", DRIVER(cuMemFree)(my.heap));
    close(my.socket);
    my.is_up = false;
    my.ended_s = 0;
    end();
}

EXPORTED void nvshmemx_vendor_get_version_info(int *major, int *minor, int *patch) {
    *major = 3;
    *minor = 0;
    *patch = 0;
}

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

/* The first gap that is large enough; the same in all processes. */
static bool place(size_t nbytes, block *out) {
    size_t at = 0, i = 0;
    while (i < my.nblocks && my.blocks[i].at - at < nbytes) {
        at = my.blocks[i].at + my.blocks[i].nbytes;
        i++;
    }
    if (my.nblocks == MOST_BLOCKS || my.nbytes - at < nbytes)
        return false;
    memmove(&my.blocks[i + 1], &my.blocks[i], (my.nblocks - i) * sizeof *my.blocks);
    my.blocks[i] = *out = (block){at, nbytes};
    my.nblocks++;
    return true;
}

EXPORTED void *nvshmem_malloc(size_t nbytes) {
    block b;
    begin("nvshmem_malloc", true);
    bool is_placed = place((nbytes + GRANULE - 1) / GRANULE * GRANULE, &b);
    maybe_die("malloc");
    meet('m', nbytes);
    end();
    return is_placed && !is_chosen("FAKE_NVSHMEM_FAIL", "malloc") ? (void *)(uintptr_t)(my.heap + b.at) : NULL;
}

EXPORTED void nvshmem_free(void *memory) {
    size_t i = 0, at = (size_t)((uintptr_t)memory - my.heap);
    if (!memory)
        return;
    begin("nvshmem_free", true);
    meet('f', at);
    while (i < my.nblocks && my.blocks[i].at != at)
        i++;
    if (i == my.nblocks)
        die("nvshmem_free of %p, which is not allocated", memory);
    memmove(&my.blocks[i], &my.blocks[i + 1], (my.nblocks - i - 1) * sizeof *my.blocks);
    my.nblocks--;
    end();
}

/* Where it is in another process. */
static CUdeviceptr translate(const void *address, size_t nbytes, int pe) {
    size_t at = (size_t)((uintptr_t)address - my.heap), i = 0;
    while (i < my.nblocks && at - my.blocks[i].at >= my.blocks[i].nbytes)
        i++;
    if (i == my.nblocks || nbytes > my.blocks[i].nbytes - (at - my.blocks[i].at))
        die("%zu bytes at %p are not allocated symmetric memory", nbytes, address);
    if (pe < 0 || pe >= my.npes || pe == my.pe)
        die("PE %d puts to PE %d of %d", my.pe, pe, my.npes);
    return my.peers[pe] + at;
}

static void set_word(uint64_t *signal, uint64_t value, int operation, int pe, CUstream stream) {
    if ((uintptr_t)signal % sizeof *signal || operation != SIGNAL_SET)
        die("a signal at %p, by operation %d", (void *)signal, operation);
    check("cuMemcpyHtoDAsync",
          DRIVER(cuMemcpyHtoDAsync)(translate(signal, sizeof value, pe), &value, sizeof value, stream));
}

EXPORTED void nvshmemx_putmem_signal_on_stream(void *to, const void *from, size_t nbytes, uint64_t *signal,
                                               uint64_t value, int operation, int pe, CUstream stream) {
    begin("nvshmemx_putmem_signal_on_stream", true);
    if (nbytes == 0)
        die("a put of no bytes");
    check("cuMemcpyAsync",
          DRIVER(cuMemcpyAsync)(translate(to, nbytes, pe), (CUdeviceptr)(uintptr_t)from, nbytes, stream));
    set_word(signal, value, operation, pe, stream);
    end();
}

EXPORTED void nvshmemx_signal_op_on_stream(uint64_t *signal, uint64_t value, int operation, int pe, CUstream stream) {
    begin("nvshmemx_signal_op_on_stream", true);
    set_word(signal, value, operation, pe, stream);
    end();
}

EXPORTED void nvshmemx_quiet_on_stream(CUstream stream) {
    (void)stream;
    begin("nvshmemx_quiet_on_stream", true);
    end();
}
