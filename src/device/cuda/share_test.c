/* Memory of GPUs in other processes: keys, imports and their ends. Peers are forked before there is a driver. */
#include "../tests/support/cuda_program.h"

#include "base/process.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { NPEERS = 3, MOST_FDS = 16, MOST_KEY = 1024 };

typedef enum memory_kind { LEGACY, VMM, FABRIC, POOL, OWN, FREE_ALL } memory_kind;

/* A request to a peer: memory of a kind, filled from a seed; or, with FREE_ALL, to free all that it has. */
typedef struct request {
    memory_kind kind;
    size_t npieces;
    uint32_t seed;
} request;

typedef struct answer {
    bool is_good;
    char why[256];
    size_t nbytes, nfds; /* of the key */
    unsigned char key[MOST_KEY];
} answer;

static struct {
    pid_t pid;
    int socket;
} peers[NPEERS];

static tb__device *device;
static tb__gpu *gpu;

static void fill_numbers(uint32_t *numbers, size_t count, uint32_t seed) {
    for (size_t i = 0; i < count; i++)
        numbers[i] = seed * 1000003 + (uint32_t)i;
}

/* ---- A peer ------------------------------------------------------------------------------------------------------ */

typedef struct allocation {
    memory_kind kind;
    CUdeviceptr base;
    size_t npieces;
} allocation;

static CUdeviceptr allocate(const request *r) {
    void *p = NULL;
    if (r->kind == LEGACY)
        return alloc_legacy(r->npieces * PIECE);
    if (r->kind == OWN)
        return device->ops->alloc(device, 0, r->npieces * PIECE, &p) == TB_OK ? (CUdeviceptr)p : 0;
    if (r->kind == POOL) {
        CUmemoryPool pool = make_pool_on(0, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        alloc_from_pool_on(0, pool, 1000); /* it is not the first in the pool */
        return alloc_from_pool_on(0, pool, r->npieces * PIECE);
    }
    if (r->kind == FABRIC)
        setenv("FAKE_CUDA_FABRIC", "1", 1);
    return alloc_vmm(r->npieces,
                     r->kind == FABRIC ? CU_MEM_HANDLE_TYPE_FABRIC : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

static tb_status answer_request(const request *r, allocation *out, tb__memory_key *key) {
    size_t nbytes = r->npieces * PIECE;
    tb__memory memory;
    TB_TRY(tb__cuda_load());
    uint32_t *numbers = malloc(nbytes);
    *out = (allocation){r->kind, allocate(r), r->npieces};
    fill_numbers(numbers, nbytes / 4, r->seed);
    write_gpu(0, out->base, numbers, nbytes);
    free(numbers);
    if (!device->ops->find(device, (void *)out->base, nbytes, &memory))
        return tb__fail(TB_INTERNAL, "memory that is not found");
    return tb__device_share(device, &memory, key);
}

static void free_allocation(const allocation *a) {
    if (a->kind == LEGACY || a->kind == POOL)
        free_legacy(a->base);
    else if (a->kind == OWN)
        device->ops->free(device, (void *)a->base);
    else
        free_vmm(a->base, a->npieces);
}

static void send_answer(int socket, const answer *a, const int *fds) {
    union {
        char bytes[CMSG_SPACE(MOST_FDS * sizeof(int))];
        struct cmsghdr align;
    } control = {{0}};
    struct iovec piece = {(void *)(uintptr_t)a, sizeof *a};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    if (a->nfds) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(a->nfds * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        *header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        header->cmsg_len = CMSG_LEN(a->nfds * sizeof(int));
        memcpy(CMSG_DATA(header), fds, a->nfds * sizeof(int));
    }
    sendmsg(socket, &message, MSG_NOSIGNAL);
}

static _Noreturn void be_peer(int socket) {
    static allocation all[100];
    size_t n = 0;
    request r;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (tb__device_open("cuda", &device) != TB_OK)
        _exit(1);
    while (recv(socket, &r, sizeof r, 0) == (ssize_t)sizeof r) {
        answer a = {.is_good = true};
        tb__memory_key key = {0};
        if (r.kind != FREE_ALL) {
            a.is_good = answer_request(&r, &all[n++], &key) == TB_OK;
            snprintf(a.why, sizeof a.why, "%s", tb_error_detail());
            a.nbytes = key.bytes.count;
            a.nfds = key.fds.count;
            for (size_t i = 0; i < key.bytes.count && i < MOST_KEY; i++)
                a.key[i] = key.bytes.data[i];
        }
        while (r.kind == FREE_ALL && n > 0)
            free_allocation(&all[--n]);
        send_answer(socket, &a, key.fds.item);
        tb__memory_key_fini(&key);
    }
    _exit(0);
}

static void start_peers(void) {
    for (int i = 0; i < NPEERS; i++) {
        int ends[2];
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
            exit(1);
        peers[i].pid = fork();
        if (peers[i].pid == 0) {
            for (int k = 0; k < i; k++)
                close(peers[k].socket);
            close(ends[0]);
            be_peer(ends[1]);
        }
        close(ends[1]);
        peers[i].socket = ends[0];
    }
}

static void end_peer(int who, int signal_number) {
    if (peers[who].pid && signal_number)
        kill(peers[who].pid, signal_number);
    close(peers[who].socket);
    if (peers[who].pid)
        waitpid(peers[who].pid, NULL, 0);
    peers[who].pid = 0;
}

/* ---- Keys of peers ----------------------------------------------------------------------------------------------- */

static tb__memory_key ask(int who, request r) {
    static answer a;
    union {
        char bytes[CMSG_SPACE(MOST_FDS * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec piece = {&a, sizeof a};
    struct msghdr message = {
        .msg_iov = &piece, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    tb__memory_key key = {0};
    assert_int_equal(send(peers[who].socket, &r, sizeof r, MSG_NOSIGNAL), (ssize_t)sizeof r);
    assert_int_equal(recvmsg(peers[who].socket, &message, MSG_CMSG_CLOEXEC), (ssize_t)sizeof a);
    if (!a.is_good)
        fail_msg("a peer: %s", a.why);
    tb__pack_raw(&key.bytes, a.key, a.nbytes);
    for (size_t i = 0; i < a.nfds; i++) {
        int fd = -1;
        const struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        if (header)
            memcpy(&fd, CMSG_DATA(header) + i * sizeof fd, sizeof fd);
        assert_true(tb__vec_push(&key.fds, fd));
    }
    return key;
}

static tb__mapping *map(const tb__memory_key *key) {
    tb__mapping *mapping;
    assert_ok(tb__device_map(device, key, false, &mapping));
    return mapping;
}

static void unmap(tb__mapping *mapping) {
    device->ops->unmap(device, mapping);
}

static void check_numbers(const tb__mapping *mapping, request r) {
    size_t nbytes = r.npieces * PIECE;
    uint32_t *got = malloc(nbytes), *wanted = malloc(nbytes);
    assert_true(mapping->nbytes >= nbytes);
    fill_numbers(wanted, nbytes / 4, r.seed);
    read_gpu(0, (CUdeviceptr)mapping->base, got, nbytes);
    assert_memory_equal(got, wanted, nbytes);
    free(got);
    free(wanted);
    assert_null(current_context());
}

/* A GPU that supports it may still not permit it. */
static bool has_fabric(void) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0},
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_FABRIC};
    CUmemGenericAllocationHandle handle;
    if (fake_cuda())
        return true;
    if (tb__cuda.cuMemCreate(&handle, PIECE, &prop, 0) != CUDA_SUCCESS)
        return false;
    assert_cuda(tb__cuda.cuMemRelease(handle));
    return true;
}

static bool has_kind(memory_kind kind) {
    return kind == FABRIC ? has_fabric() : kind == POOL ? has_shared_pools() : true;
}

/* ---- Tests ------------------------------------------------------------------------------------------------------- */

static void test_kinds(void **state) {
    static const size_t nfds[] = {[LEGACY] = 0, [VMM] = 5, [FABRIC] = 0, [POOL] = 1, [OWN] = 1};
    (void)state;
    for (memory_kind kind = LEGACY; kind <= OWN; kind++) {
        request r = {.kind = kind, .npieces = 5, .seed = (uint32_t)kind + 1};
        if (!has_kind((memory_kind)kind))
            continue;
        tb__memory_key key = ask(0, r);
        assert_int_equal(key.fds.count, nfds[kind]);
        tb__mapping *mapping = map(&key);
        tb__memory_key_fini(&key); /* not needed any more */
        check_numbers(mapping, r);
        unmap(mapping);
    }
    ask(0, (request){.kind = FREE_ALL});
}

/* Where the driver can, what is imported can't be written. */
static void test_read_only(void **state) {
    request r = {.kind = VMM, .npieces = 2, .seed = 3};
    CUmemLocation location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    unsigned long long flags = 0;
    (void)state;
    tb__memory_key key = ask(0, r);
    for (int i = 0; i < (fake_cuda() ? 2 : 1); i++) {
        if (i == 1)
            setenv("FAKE_CUDA_NO_READ_ONLY", "1", 1);
        tb__mapping *mapping = map(&key);
        check_numbers(mapping, r);
        assert_cuda(DRIVER_CALL("cuMemGetAccess", (unsigned long long *, const CUmemLocation *, CUdeviceptr), &flags,
                                &location, (CUdeviceptr)mapping->base + PIECE));
        if (fake_cuda())
            assert_int_equal(flags, i ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ);
        else
            printf("  imported memory can be %s\n", flags == CU_MEM_ACCESS_FLAGS_PROT_READ ? "read" : "written");
        unmap(mapping);
        unsetenv("FAKE_CUDA_NO_READ_ONLY");
    }
    tb__memory_key_fini(&key);
    ask(0, (request){.kind = FREE_ALL});
}

static unsigned long long access_of(int ordinal, const void *address) {
    CUmemLocation location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal};
    unsigned long long flags = 0;
    assert_cuda(DRIVER_CALL("cuMemGetAccess", (unsigned long long *, const CUmemLocation *, CUdeviceptr), &flags,
                            &location, (CUdeviceptr)address));
    return flags;
}

/* A mapping to write to, beside one of the same memory that can only be read. */
static void test_writable(void **state) {
    request r = {.kind = VMM, .npieces = 2, .seed = 3};
    tb__memory memory;
    tb__mapping *mapping;
    (void)state;
    tb__memory_key key = ask(0, r);
    tb__mapping *to_read = map(&key);
    assert_ok(tb__device_map(device, &key, true, &mapping));
    check_numbers(mapping, r);
    assert_true(mapping->base != to_read->base);
    assert_int_equal(mapping->index, 0);
    assert_int_equal(access_of(0, mapping->base), CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    assert_true(device->ops->find(device, mapping->base, mapping->nbytes, &memory));
    unmap(mapping);
    check_numbers(to_read, r);
    unmap(to_read);
    tb__memory_key_fini(&key);
    ask(0, (request){.kind = FREE_ALL});
}

/* Mappings of the same memory share one import, which ends with the last of them. */
static void test_counted(void **state) {
    const fake_cuda_control *control = need_fake();
    static const char *const opens[] =
        {[LEGACY] = "cuIpcOpenMemHandle", [VMM] = "cuMemImportFromShareableHandle", [POOL] = "cuMemPoolImportPointer"},
                             *const closes[] = {[LEGACY] = "cuIpcCloseMemHandle",
                                                [VMM] = "cuMemAddressFree",
                                                [POOL] = "cuMemPoolDestroy"};
    (void)state;
    for (int kind = LEGACY; kind <= POOL; kind++) {
        if (!opens[kind])
            continue;
        request r = {.kind = (memory_kind)kind, .npieces = 3, .seed = 7}, other = r;
        other.seed = 8;
        tb__memory_key key = ask(0, r), another = ask(0, other);
        long nopened = control->count_calls(opens[kind]), nclosed = control->count_calls(closes[kind]);
        tb__mapping *a = map(&key), *b = map(&key), *c = map(&another);
        assert_int_equal(control->count_calls(opens[kind]) - nopened, kind == VMM ? 6 : 2);
        assert_true(a->base == b->base && a->base != c->base);
        unmap(a);
        check_numbers(b, r);
        check_numbers(c, other);
        assert_int_equal(control->count_calls(closes[kind]), nclosed);
        unmap(b);
        assert_int_equal(control->count_calls(closes[kind]), nclosed + 1);
        a = map(&key);
        check_numbers(a, r);
        unmap(a);
        unmap(c);
        assert_int_equal(control->count_calls(closes[kind]), nclosed + 3);
        tb__memory_key_fini(&key);
        tb__memory_key_fini(&another);
    }
    ask(0, (request){.kind = FREE_ALL});
}

/* Within a process the memory itself is used. */
static void test_own_process(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        CUdeviceptr p = i == 0 ? alloc_legacy(PIECE) : alloc_vmm(2, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        tb__memory memory;
        tb__memory_key key = {0};
        tb__mapping *none;
        assert_true(device->ops->find(device, (void *)p, PIECE, &memory));
        assert_ok(tb__device_share(device, &memory, &key));
        tb__mapping *mapping = map(&key);
        assert_true((CUdeviceptr)mapping->base == p && mapping->nbytes == memory.nbytes);
        unmap(mapping);
        if (i < 2) {
            if (i == 0)
                free_legacy(p);
            else
                free_vmm(p, 2);
        } else { /* other memory at its addresses */
            assert_cuda(tb__cuda.cuMemUnmap(p, PIECE));
            map_vmm(p, 1, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        }
        assert_fails(tb__device_map(device, &key, false, &none), TB_INVALID, "is gone");
        tb__memory_key again = {0};
        assert_fails(tb__device_share(device, &memory, &again), TB_INVALID, "is gone");
        tb__memory_key_fini(&key);
        if (i == 2)
            free_vmm(p, 2);
    }
}

/* What was imported stays when its owner frees it, and when its owner is killed. */
static void test_lifetimes(void **state) {
    tb__mapping *mappings[OWN + 1];
    request r[OWN + 1];
    int who = NPEERS - 1;
    (void)state;
    for (int kind = LEGACY; kind <= OWN; kind++) {
        mappings[kind] = NULL;
        if (!has_kind((memory_kind)kind))
            continue;
        r[kind] = (request){.kind = (memory_kind)kind, .npieces = 2, .seed = (uint32_t)kind + 40};
        tb__memory_key key = ask(who, r[kind]);
        mappings[kind] = map(&key);
        tb__memory_key_fini(&key);
    }
    if (fake_cuda()) /* where memory is freed that others have open, cuMemFree may wait for them */
        ask(who, (request){.kind = FREE_ALL});
    for (int kind = LEGACY; kind <= OWN; kind++) {
        if (mappings[kind])
            check_numbers(mappings[kind], r[kind]);
    }
    tb__memory_key late = ask(who, (request){.kind = LEGACY, .npieces = 1});
    request held_request = {.kind = VMM, .npieces = 2, .seed = 90};
    tb__memory_key held = ask(who, held_request);
    end_peer(who, SIGKILL);
    for (int kind = LEGACY; kind <= OWN; kind++) {
        if (!mappings[kind])
            continue;
        check_numbers(mappings[kind], r[kind]);
        unmap(mappings[kind]);
    }
    /* Handles end with their process; descriptors hold what they stand for. */
    tb__mapping *none;
    assert_int_equal(tb__device_map(device, &late, false, &none), TB_IO);
    assert_non_null(strstr(tb_error_detail(), "cuda:0"));
    tb__mapping *mapping = map(&held);
    check_numbers(mapping, held_request);
    unmap(mapping);
    tb__memory_key_fini(&late);
    tb__memory_key_fini(&held);
}

/* A stream of the program that is parked holds back some calls of the driver. Unmapping is done by the thread that
 * would let the stream go on, so it must not wait. */
static void test_unmap_while_parked(void **state) {
    (void)state;
    for (int kind = LEGACY; kind <= POOL; kind++) {
        tb__gate *gate;
        if (!has_kind((memory_kind)kind))
            continue;
        tb__memory_key key = ask(0, (request){.kind = (memory_kind)kind, .npieces = 2, .seed = 1});
        tb__mapping *mapping = map(&key);
        CUstream stream = make_stream(0);
        assert_ok(device->ops->gate_create(device, &stream, tb__now_ms() + 10000, &gate));
        int64_t began = tb__now_ms();
        unmap(mapping);
        int64_t took = tb__now_ms() - began;
        device->ops->gate_open(gate);
        if (fake_cuda())
            assert_in_range(took, 0, 5000);
        else
            printf("  memory of kind %d is unmapped within %ld ms\n", kind, (long)took);
        assert_cuda(tb__cuda.cuStreamDestroy(stream));
        tb__memory_key_fini(&key);
    }
    ask(0, (request){.kind = FREE_ALL});
}

/* ---- Keys that are not trusted ----------------------------------------------------------------------------------- */

static void check_bad(const tb__memory_key *key, tb_status status, const char *text) {
    tb__mapping *none = (tb__mapping *)gpu;
    assert_fails(tb__device_map(device, key, false, &none), status, text);
    assert_true(none == (tb__mapping *)gpu);
}

static void put_u64(tb__memory_key *key, size_t from_end, uint64_t value) {
    memcpy(key->bytes.data + key->bytes.count - from_end, &value, sizeof value);
}

enum { NBYTES_AT = 4 + 8 + 8, UUID_AT = NBYTES_AT + 8 + 8 };

/* Memory of a pool with a descriptor of another pool, of another kind of file, none, and with another size. */
static void check_bad_pools(void) {
    tb__memory_key key = ask(0, (request){.kind = POOL, .npieces = 2}),
                   other = ask(0, (request){.kind = POOL, .npieces = 2});
    int fd = key.fds.item[0];
    key.fds.count = 0;
    check_bad(&key, TB_INVALID, "malformed");
    key.fds.count = 1;
    if (fake_cuda()) { /* the driver refuses another pool, with its own error */
        key.fds.item[0] = other.fds.item[0];
        check_bad(&key, TB_IO, "importing 4194304 bytes of a pool on cuda:0: CUDA_ERROR_INVALID_VALUE");
    }
    key.fds.item[0] = fileno(tmpfile());
    assert_true(tb__device_map(device, &key, false, &(tb__mapping *){0}) != TB_OK);
    assert_non_null(strstr(tb_error_detail(), "importing a pool of memory on cuda:0"));
    key.fds.item[0] = fd;
    put_u64(&key, 8, 4 * PIECE);
    check_bad(&key, TB_INVALID, "another size");
    put_u64(&key, 8, 2 * PIECE);
    unmap(map(&key));
    tb__memory_key_fini(&key);
    tb__memory_key_fini(&other);
}

static void test_bad_keys(void **state) {
    tb__mapping *none;
    tb_status status;
    (void)state;
    tb__memory_key key = ask(0, (request){.kind = VMM, .npieces = 3, .seed = 1});
    size_t nbytes = key.bytes.count;
    for (key.bytes.count = 0; key.bytes.count < nbytes; key.bytes.count++)
        check_bad(&key, TB_INVALID, "malformed");
    key.fds.count--;
    check_bad(&key, TB_INVALID, "malformed");
    key.fds.count++;
    /* The last piece: its offset and its size. */
    static const uint64_t bad[] = {
        0, 1, PIECE - 1, (uint64_t)1 << 46, (uint64_t)1 << 63, UINT64_MAX, UINT64_MAX - PIECE};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        put_u64(&key, 16, bad[i]);
        check_bad(&key, TB_INVALID, "malformed");
        put_u64(&key, 16, 2 * PIECE);
        put_u64(&key, 8, bad[i]);
        assert_true(tb__device_map(device, &key, false, &(tb__mapping *){0}) != TB_OK);
        put_u64(&key, 8, PIECE);
    }
    put_u64(&key, 8, 2 * PIECE); /* more than there is, which drivers call by different names */
    status = tb__device_map(device, &key, false, &none);
    assert_true(status == TB_IO || status == TB_REFUSED);
    assert_non_null(strstr(tb_error_detail(), "mapping 4194304 bytes, piece 3 of 3 of memory on cuda:0"));
    put_u64(&key, 8, PIECE);
    /* The memory's size. */
    memcpy(key.bytes.data + NBYTES_AT, &(uint64_t){3 * PIECE + 1}, 8);
    check_bad(&key, TB_INVALID, "malformed");
    memcpy(key.bytes.data + NBYTES_AT, &(uint64_t){3 * PIECE}, 8);
    /* A descriptor of something else. */
    int fd = key.fds.item[1];
    key.fds.item[1] = fileno(tmpfile());
    check_bad(&key, TB_IO, "piece 2 of 3");
    key.fds.item[1] = fd;
    /* Another kind. */
    static const uint32_t kinds[] = {0, TB__SHARE_LEGACY, TB__SHARE_FABRIC, TB__SHARE_POOL, 5, UINT32_MAX};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        memcpy(key.bytes.data, &kinds[i], 4);
        check_bad(&key, TB_INVALID, "malformed");
    }
    memcpy(key.bytes.data, &(uint32_t){TB__SHARE_FD}, 4);
    /* A GPU of another machine. */
    unsigned char uuid[16];
    memcpy(uuid, key.bytes.data + UUID_AT, 16);
    memset(key.bytes.data + UUID_AT, 0x1a, 16);
    check_bad(&key, TB_REFUSED, "is on GPU-1a1a1a1a-1a1a-1a1a-1a1a-1a1a1a1a1a1a, which this process does not see");
    memcpy(key.bytes.data + UUID_AT, uuid, 16);
    unmap(map(&key)); /* it is as it was */
    tb__memory_key_fini(&key);
    /* A size that is not that of the allocation. */
    key = ask(0, (request){.kind = LEGACY, .npieces = 2});
    put_u64(&key, 8, 4 * PIECE);
    check_bad(&key, TB_INVALID, "another size");
    put_u64(&key, 8, PIECE);
    memcpy(key.bytes.data + NBYTES_AT, &(uint64_t){PIECE}, 8);
    check_bad(&key, TB_INVALID, "another size");
    tb__memory_key_fini(&key);
    if (has_shared_pools())
        check_bad_pools();
    ask(0, (request){.kind = FREE_ALL});
}

/* Whichever call fails, the error message names it, and nothing stays open. */
static void test_failed_calls(void **state) {
    const fake_cuda_control *control = need_fake();
    static const struct {
        const char *call;
        long n;
        int kind;
    } faults[] = {{"cuMemImportFromShareableHandle", 0, VMM},
                  {"cuMemImportFromShareableHandle", 2, VMM},
                  {"cuMemAddressReserve", 0, VMM},
                  {"cuMemMap", 0, VMM},
                  {"cuMemMap", 1, VMM},
                  {"cuIpcOpenMemHandle", 0, LEGACY},
                  {"cuMemPoolImportFromShareableHandle", 0, POOL},
                  {"cuMemPoolImportPointer", 0, POOL},
                  {"cuCtxPushCurrent", 0, LEGACY}};
    (void)state;
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        request r = {.kind = (memory_kind)faults[i].kind, .npieces = 3, .seed = 5};
        tb__memory_key key = ask(1, r);
        long nreserved = control->count_calls("cuMemAddressReserve") - control->count_calls("cuMemAddressFree");
        control->fail_call(faults[i].call, faults[i].n, CUDA_ERROR_OUT_OF_MEMORY);
        check_bad(&key, TB_NO_MEMORY, "cuda:0");
        control->mend();
        if (strcmp(faults[i].call, "cuMemAddressReserve") != 0)
            assert_int_equal(control->count_calls("cuMemAddressReserve") - control->count_calls("cuMemAddressFree"),
                             nreserved);
        tb__mapping *mapping = map(&key);
        check_numbers(mapping, r);
        unmap(mapping);
        tb__memory_key_fini(&key);
    }
    /* Sharing fails as well. */
    static const char *const calls[] = {"cuMemRetainAllocationHandle", "cuMemExportToShareableHandle",
                                        "cuIpcGetMemHandle"};
    for (int i = 0; i < 3; i++) {
        CUdeviceptr p = i == 2 ? alloc_legacy(PIECE) : alloc_vmm(2, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        tb__memory memory;
        tb__memory_key key = {0};
        assert_true(device->ops->find(device, (void *)p, PIECE + (i < 2), &memory));
        control->fail_call(calls[i], i < 2, CUDA_ERROR_OUT_OF_MEMORY);
        if (i == 2)
            control->fail_call(calls[i], 0, CUDA_ERROR_OUT_OF_MEMORY);
        assert_fails(tb__device_share(device, &memory, &key), TB_NO_MEMORY, "OUT_OF_MEMORY");
        assert_int_equal(key.bytes.count + key.fds.count, 0);
        if (i == 2)
            free_legacy(p);
        else
            free_vmm(p, 2);
    }
    ask(1, (request){.kind = FREE_ALL});
}

/* ---- Several GPUs ------------------------------------------------------------------------------------------------ */

/* A GPU that is first used later can use existing and new memory. */
static void test_second_gpu(void **state) {
    tb__gpu *second;
    void *own, *later;
    (void)state;
    if (tb__gpu_count() < 2)
        skip();
    assert_null(tb__gpu_if_used(1));
    tb__memory_key key = ask(0, (request){.kind = VMM, .npieces = 2});
    tb__mapping *mapping = map(&key);
    assert_ok(device->ops->alloc(device, 0, 100, &own));
    assert_int_equal(access_of(1, own), CU_MEM_ACCESS_FLAGS_PROT_NONE);
    assert_ok(tb__gpu_get(1, &second));
    assert_int_equal(access_of(1, own), CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    assert_true(access_of(1, mapping->base) & CU_MEM_ACCESS_FLAGS_PROT_READ);
    assert_ok(device->ops->alloc(device, 1, 100, &later));
    assert_int_equal(access_of(0, later), CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    assert_int_equal(access_of(1, later), CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    tb__memory memory;
    assert_true(device->ops->find(device, later, 100, &memory));
    assert_int_equal(memory.index, 1);
    assert_true(memcmp(&second->uuid, &gpu->uuid, sizeof gpu->uuid) != 0);
    device->ops->free(device, own);
    device->ops->free(device, later);
    unmap(mapping);
    tb__memory_key_fini(&key);
    ask(0, (request){.kind = FREE_ALL});
    assert_null(current_context());
}

/* Pieces on several GPUs at neighbouring addresses are several memories; no tensor can span them. */
static void test_split_memory(void **state) {
    CUdeviceptr p;
    tb__memory memory;
    (void)state;
    if (tb__gpu_count() < 2)
        skip();
    assert_cuda(tb__cuda.cuMemAddressReserve(&p, 4 * PIECE, 0, 0, 0));
    for (int i = 0; i < 2; i++)
        map_vmm_on(i, p + i * 2 * PIECE, 2, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    for (int i = 0; i < 2; i++) {
        assert_true(device->ops->find(device, (void *)(p + i * 2 * PIECE), 2 * PIECE, &memory));
        assert_true(memory.index == i && memory.nbytes == 2 * PIECE && memory.is_shareable);
    }
    assert_false(device->ops->find(device, (void *)(p + PIECE), PIECE + 1, &memory));
    assert_ok(tb__device_check_extent(device, (void *)p, 2 * PIECE));
    assert_fails(tb__device_check_extent(device, (void *)p, 2 * PIECE + 1), TB_INVALID,
                 "it begins on cuda:0, and is on cuda:1 from byte 4194304 on");
    free_vmm(p, 4);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kinds),       cmocka_unit_test(test_read_only),
        cmocka_unit_test(test_writable),    cmocka_unit_test(test_counted),
        cmocka_unit_test(test_own_process), cmocka_unit_test(test_unmap_while_parked),
        cmocka_unit_test(test_bad_keys),    cmocka_unit_test(test_failed_calls),
        cmocka_unit_test(test_second_gpu),  cmocka_unit_test(test_split_memory),
        cmocka_unit_test(test_lifetimes),
    };
    start_peers();
    need_gpu();
    if (tb__device_open("cuda", &device) != TB_OK || tb__gpu_get(0, &gpu) != TB_OK) {
        printf("%s\n", tb_error_detail());
        return 1;
    }
    int nfailed = cmocka_run_group_tests(tests, NULL, NULL);
    for (int i = 0; i < NPEERS; i++) {
        if (peers[i].pid)
            end_peer(i, 0);
    }
    tb__device_close(device);
    return nfailed;
}
