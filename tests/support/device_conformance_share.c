/* Memory of other processes. Peers are forked before there are threads; they open the device, fill memory, share it,
 * and end when they are told to, or are killed. */
#include "device_conformance_inside.h"

#include "base/process.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_MEMORIES = 8 };

/* What a peer is told: to share memory with the bytes of a seed, from `filled` bytes before its end on. */
typedef struct request {
    size_t nbytes, filled;
    uint64_t seed;
    bool is_host; /* memory of the host device instead */
} request;

typedef struct answer {
    tb_status status;
    char why[200];
    size_t key_nbytes;
    unsigned char key[256];
    uint64_t offset; /* in the mapping, of the first byte that was asked for */
    bool has_fd;
} answer;

static void fill_bytes(uint64_t seed, uint8_t *bytes, size_t nbytes) {
    suite s = {.g = {seed}};
    fill_random(&s, bytes, nbytes);
}

static void send_answer(int socket, const answer *a, int fd) {
    struct iovec piece = {(void *)a, sizeof *a};
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {{0}};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        *header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fd)};
        memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    sendmsg(socket, &message, MSG_NOSIGNAL);
}

static void receive_answer(int socket, answer *a, int *fd) {
    struct iovec piece = {a, sizeof *a};
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    struct msghdr message = {
        .msg_iov = &piece, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    assert_int_equal(recvmsg(socket, &message, MSG_CMSG_CLOEXEC), (ssize_t)sizeof *a);
    *fd = -1;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (a->has_fd && header)
        memcpy(fd, CMSG_DATA(header), sizeof *fd);
    if (a->status != TB_OK)
        fail_msg("a peer: %s: %s", tb_status_string(a->status), a->why);
}

/* In the peer. */
static tb_status do_request(suite *s, const request *r, answer *a, int *fd) {
    tb__memory_key key = {0};
    tb__device *device = r->is_host ? s->host : s->device;
    uint8_t *bytes = malloc(r->filled + 1);
    const void *src = bytes;
    tb__memory memory;
    tb__fence fence = {0};
    tb__job *job;
    void *at;
    TB_TRY(device->ops->alloc(device, 0, r->nbytes, &at));
    char *filled = (char *)at + r->nbytes - r->filled;
    fill_bytes(r->seed, bytes, r->filled);
    tb__move move = byte_move(filled, &src, r->filled);
    TB_TRY(device->ops->prepare(device, &move, 1, &job));
    TB_TRY(device->ops->run(device, job, &(tb__run){0}, &fence));
    while (!fence.is_done)
        device->ops->progress(device);
    TB_TRY(fence.status);
    device->ops->release(device, job);
    free(bytes);
    if (!device->ops->find(device, at, r->nbytes, &memory))
        return TB_INTERNAL;
    a->offset = (uint64_t)((char *)at - (char *)memory.base);
    TB_TRY(tb__device_share(device, &memory, &key));
    a->key_nbytes = key.bytes.count;
    memcpy(a->key, key.bytes.data, key.bytes.count);
    *fd = key.fds.count ? dup(key.fds.item[0]) : -1;
    tb__memory_key_fini(&key);
    return TB_OK;
}

static void be_peer(suite *s, int socket) {
    request r;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (tb__device_open(s->traits->name, &s->device) != TB_OK || tb__device_open("host", &s->host) != TB_OK)
        _exit(1);
    while (recv(socket, &r, sizeof r, 0) == (ssize_t)sizeof r) {
        answer a = {0};
        int fd = -1;
        a.status = do_request(s, &r, &a, &fd);
        snprintf(a.why, sizeof a.why, "%s", tb_error_detail());
        a.has_fd = fd >= 0;
        send_answer(socket, &a, fd);
        if (fd >= 0)
            close(fd);
    }
    _exit(0);
}

void start_peers(suite *s) {
    for (int i = 0; i < NPEERS; i++) {
        int ends[2];
        assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
        fflush(stdout);
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            close(ends[0]);
            for (int k = 0; k < i; k++)
                close(s->peers[k].socket);
            be_peer(s, ends[1]);
        }
        close(ends[1]);
        s->peers[i] = (peer){pid, ends[0]};
    }
}

static void end_peer(peer *p, int signal_number) {
    int status;
    if (p->pid == 0)
        return;
    if (signal_number)
        kill(p->pid, signal_number);
    close(p->socket);
    assert_int_equal(waitpid(p->pid, &status, 0), p->pid);
    if (signal_number)
        assert_true(WIFSIGNALED(status));
    else
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    p->pid = 0;
}

void stop_peers(suite *s) {
    for (int i = 0; i < NPEERS; i++)
        end_peer(&s->peers[i], 0);
}

/* ---- Checks ------------------------------------------------------------------------------------------------------ */

/* Memory of a peer, mapped. */
typedef struct shared {
    request request;
    answer answer;
    tb__device *device;
    tb__mapping *mapping;
    int fd;
} shared;

static void ask(suite *s, int who, request r, shared *out) {
    *out = (shared){.request = r, .device = r.is_host ? s->host : s->device};
    assert_int_equal(send(s->peers[who].socket, &r, sizeof r, MSG_NOSIGNAL), (ssize_t)sizeof r);
    receive_answer(s->peers[who].socket, &out->answer, &out->fd);
}

static void close_fd(shared *x) {
    if (x->fd >= 0)
        close(x->fd);
    x->fd = -1;
}

/* Maps memory by bytes of a key and a descriptor; -1: none. */
static tb_status map_key(tb__device *device, const void *bytes, size_t nbytes, int fd, tb__mapping **out) {
    tb__memory_key key = {.bytes = {.data = (unsigned char *)(uintptr_t)bytes, .count = nbytes},
                          .fds = {.item = &fd, .count = fd >= 0}};
    return tb__device_map(device, &key, false, out);
}

static tb_status map_answer(const shared *x, tb__mapping **out) {
    return map_key(x->device, x->answer.key, x->answer.key_nbytes, x->fd, out);
}

/* The descriptor is not needed any more when it is mapped. */
static void map_shared(shared *x) {
    assert_ok(map_answer(x, &x->mapping));
    close_fd(x);
}

/* Reads what the peer wrote, some of it from one mapping and some of it from another. */
static void check_shared(suite *s, shared *const *list, size_t n) {
    enum { SLICES = 10 };
    area to = make_area(s, rng_range(&s->g, 0, 1) ? s->device : s->host, 1 << 20);
    const void *src[SLICES];
    tb__mapping *mappings[SLICES];
    tb__move moves[SLICES];
    size_t used = 0;
    memset(to.image, POISON, to.nbytes);
    put_area(s, &to);
    for (int i = 0; i < SLICES; i++) {
        const shared *x = list[rng_range(&s->g, 0, (int64_t)n - 1)];
        if (x->request.is_host && to.owner == s->host && !s->is_host)
            x = list[0]; /* one end is the device's */
        size_t length = (size_t)rng_range(&s->g, 1, x->request.filled < 60000 ? (int64_t)x->request.filled : 60000);
        size_t from = (size_t)rng_range(&s->g, 0, (int64_t)(x->request.filled - length));
        uint8_t *bytes = malloc(x->request.filled);
        fill_bytes(x->request.seed, bytes, x->request.filled);
        used += (size_t)rng_range(&s->g, 0, 99);
        memcpy(to.image + used, bytes + from, length);
        free(bytes);
        src[i] = (void *)(uintptr_t)(x->answer.offset + x->request.nbytes - x->request.filled + from);
        mappings[i] = x->mapping;
        moves[i] = byte_move(to.at + used, &src[i], length);
        moves[i].src_mapping = &mappings[i];
        used += length;
    }
    run_moves(s, s->device, moves, SLICES, NULL);
    check_area(s, &to, "memory of a peer");
    free_area(&to);
}

void check_sharing(suite *s) {
    enum { N = 7 };
    static shared x[N];
    shared *list[N];
    if (!s->device->ops->share) {
        printf(" (it shares no memory)");
        return;
    }
    for (int i = 0; i < N; i++) {
        size_t nbytes = i == 4 ? (size_t)200 << 20 : (size_t)rng_range(&s->g, 1, 500000); /* what a file grows for */
        request r = {.nbytes = nbytes, .filled = nbytes < 500000 ? nbytes : 500000, .seed = rng_next(&s->g)};
        r.is_host = i == 1 || i == 2;
        ask(s, i % 2, r, &x[i]);
        map_shared(&x[i]);
        list[i] = &x[i];
        check_shared(s, list, (size_t)i + 1);
    }
    /* Twice the same, and each ends on its own. */
    shared again = x[0];
    ask(s, 0, (request){.nbytes = 1000, .filled = 1000, .seed = 5}, &again);
    tb__mapping *second;
    assert_ok(map_answer(&again, &second));
    map_shared(&again);
    s->device->ops->unmap(s->device, second);
    check_shared(s, &(shared *){&again}, 1);
    s->device->ops->unmap(s->device, again.mapping);
    for (int i = N - 1; i >= 0; i--) {
        check_shared(s, list, (size_t)i + 1);
        x[i].device->ops->unmap(x[i].device, x[i].mapping);
    }
    /* Memory that is not the device's can't be shared. */
    tb__memory memory = {.base = x, .nbytes = sizeof x, .is_shareable = true};
    tb__memory_key key = {0};
    assert_true(tb__device_share(s->device, &memory, &key) != TB_OK);
    memory.is_shareable = false;
    assert_int_equal(tb__device_share(s->device, &memory, &key), TB_REFUSED);
    assert_int_equal(key.bytes.count + key.fds.count, 0);
}

static void check_not_mapped(suite *s, const unsigned char *key, size_t nbytes, int fd) {
    tb__mapping *none = (tb__mapping *)s;
    assert_true(map_key(s->device, key, nbytes, fd, &none) != TB_OK);
    assert_true(none == (tb__mapping *)s && tb_error_detail()[0]);
}

/* A move from beyond the mapping. */
static void check_beyond(suite *s, shared *x) {
    area to = make_area(s, s->device, 4096);
    size_t end = x->answer.offset + x->request.nbytes;
    const struct {
        uintptr_t offset;
        int64_t length, stride;
    } bad[] = {
        {end, 1, 1},         {end - 1, 2, 1},      {0, 1, 1},           {0, (int64_t)end + 1, 1}, {0, 2, (int64_t)end},
        {0, 2, INT64_MAX},   {0, INT64_MAX, 5},    {UINTPTR_MAX, 1, 1}, {UINTPTR_MAX - 3, 8, 1},  {5, 7, -1},
        {end, INT64_MAX, 1}, {0, 3, INT64_MIN / 2}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const void *src = (void *)bad[i].offset;
        int64_t stride[1][TB_MAX_DIMS] = {{bad[i].stride}};
        tb__move move = byte_move(to.at, &src, 1);
        tb__job *job;
        move.src_mapping = &x->mapping;
        move.len[0] = bad[i].length;
        move.src_stride = (const int64_t(*)[TB_MAX_DIMS])stride;
        if (i == 2) {
            assert_ok(s->device->ops->prepare(s->device, &move, 1, &job)); /* the one that is good */
            s->device->ops->release(s->device, job);
        } else {
            assert_int_equal(s->device->ops->prepare(s->device, &move, 1, &job), TB_INVALID);
        }
    }
    free_area(&to);
}

void check_forged_keys(suite *s) {
    shared x, other;
    if (!s->device->ops->share) {
        printf(" (it shares no memory)");
        return;
    }
    ask(s, 0, (request){.nbytes = 5000, .filled = 5000, .seed = 1}, &x);
    ask(s, 1, (request){.nbytes = 5000, .filled = 5000, .seed = 2}, &other);
    unsigned char key[sizeof x.answer.key + 1];
    size_t nbytes = x.answer.key_nbytes;
    memcpy(key, x.answer.key, sizeof x.answer.key);
    for (size_t n = 0; n < nbytes; n++)
        check_not_mapped(s, key, n, x.fd);
    check_not_mapped(s, key, nbytes + 1, x.fd);
    if (x.fd >= 0) {
        check_not_mapped(s, key, nbytes, -1);
        if (!s->traits->has_opaque_fds)
            check_not_mapped(s, key, nbytes, other.fd); /* another process's */
        int plain = fileno(tmpfile());
        check_not_mapped(s, key, nbytes, plain);
        close(plain);
    }
    static const uint64_t huge[] = {(uint64_t)1 << 40, (uint64_t)1 << 62, INT64_MAX, UINT64_MAX, UINT64_MAX - 4095};
    for (size_t i = 0; i < 5 && s->traits->forge_key; i++) {
        s->traits->forge_key(key, nbytes, huge[i], 5000);
        check_not_mapped(s, key, nbytes, x.fd);
        s->traits->forge_key(key, nbytes, 0, huge[i]);
        check_not_mapped(s, key, nbytes, x.fd);
        s->traits->forge_key(key, nbytes, 4096, huge[i]);
        check_not_mapped(s, key, nbytes, x.fd);
        s->traits->forge_key(key, nbytes, huge[i], huge[4 - i]);
        check_not_mapped(s, key, nbytes, x.fd);
    }
    map_shared(&x);
    check_beyond(s, &x);
    check_shared(s, &(shared *){&x}, 1);
    s->device->ops->unmap(s->device, x.mapping);
    close_fd(&other);
}

/* What is mapped can be read, and let go, when its owner is dead. */
void check_dead_peer(suite *s) {
    shared x, unmapped;
    if (!s->device->ops->share) {
        printf(" (it shares no memory)");
        return;
    }
    ask(s, NPEERS - 1, (request){.nbytes = 300000, .filled = 300000, .seed = 9}, &x);
    ask(s, NPEERS - 1, (request){.nbytes = 300000, .filled = 300000, .seed = 10}, &unmapped);
    map_shared(&x);
    end_peer(&s->peers[NPEERS - 1], SIGKILL);
    check_shared(s, &(shared *){&x}, 1);
    s->device->ops->unmap(s->device, x.mapping);
    /* Its descriptor keeps what was not mapped, or mapping it fails. */
    if (map_answer(&unmapped, &unmapped.mapping) == TB_OK) {
        check_shared(s, &(shared *){&unmapped}, 1);
        s->device->ops->unmap(s->device, unmapped.mapping);
    }
    close_fd(&unmapped);
}
