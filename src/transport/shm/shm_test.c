/* The shm transport: the shared suite, the way around process_vm_readv, and peers that die. */
#include "transport/shm/shm.h"
#include "../tests/support/conformance.h"

#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static bool pretend_denied; /* as if the system forbade reading other processes */

static void open_one(tb_transport *t, int32_t rank, unsigned char *address, size_t *n) {
    tb_transport_env env = {.size = sizeof env, .rank = rank};
    *n = TB_ADDRESS_MAX;
    assert_int_equal(tb__transport_open("shm", &env, t), TB_OK);
    assert_int_equal(t->ops->address(t->context, address, n), TB_OK);
}

static void connect_to(const tb_transport *from, const tb_transport *to, int32_t rank) {
    unsigned char address[TB_ADDRESS_MAX];
    size_t n = sizeof address;
    assert_int_equal(to->ops->address(to->context, address, &n), TB_OK);
    assert_int_equal(from->ops->connect(from->context, rank, address, n), TB_OK);
}

static void connect_both(endpoints *e) {
    connect_to(&e->a, &e->b, e->rank_b);
    connect_to(&e->b, &e->a, e->rank_a);
    connect_to(&e->b, &e->a, e->rank_a); /* again: nothing happens */
    if (!pretend_denied)
        return;
    for (int i = 0; i < 10; i++) {
        e->a.ops->progress(e->a.context);
        e->b.ops->progress(e->b.context);
    }
    shm_find(e->a.context, e->rank_b)->it_can_read = false;
    shm_find(e->b.context, e->rank_a)->it_can_read = false;
}

static void make(endpoints *e) {
    unsigned char address[TB_ADDRESS_MAX];
    size_t n;
    e->rank_a = 5;
    e->rank_b = 2;
    open_one(&e->a, e->rank_a, address, &n);
    open_one(&e->b, e->rank_b, address, &n);
    connect_both(e);
}

static void unmake(endpoints *e) {
    tb__transport_close(&e->a);
    tb__transport_close(&e->b);
}

static void shm_conforms(void **state) {
    (void)state;
    pretend_denied = false;
    conformance(make, unmake);
}

static void shm_conforms_through_the_ring(void **state) {
    (void)state;
    pretend_denied = true;
    conformance(make, unmake);
    pretend_denied = false;
}

/* A peer in another process. */
typedef struct other {
    pid_t pid;
    tb_transport here; /* rank 0; the other is rank 1 */
    int32_t lost;
    char why[64];
} other;

static void note_loss(void *arg, int32_t peer, const char *why) {
    other *o = arg;
    o->lost = peer;
    snprintf(o->why, sizeof o->why, "%s", why);
}

enum { MEMORY = 1 << 20 };

static void send_to_parent(tb_transport *t, uint64_t tag, const void *data, size_t n) {
    tb_piece piece = {(void *)data, n};
    tb_op op;
    endpoints e = {*t, *t, 1, 1};
    make_op(&op, TB_OP_SEND, 0, tag, &piece, 1);
    tb__transport_post(t, &op);
    work_until_done(&e, (tb_op *[]){&op}, 1);
}

/* Offers its memory, sends a little, and then does nothing but progress until it is killed. */
static void child(int in, int out) {
    tb_transport t;
    unsigned char mine[TB_ADDRESS_MAX], theirs[TB_ADDRESS_MAX];
    size_t n, got;
    open_one(&t, 1, mine, &n);
    if (write(out, mine, n) != (ssize_t)n || (got = (size_t)read(in, theirs, sizeof theirs)) != n)
        _exit(1);
    t.ops->connect(t.context, 0, theirs, got);
    unsigned char *memory = malloc(MEMORY);
    for (size_t i = 0; i < MEMORY; i++)
        memory[i] = (unsigned char)(i * 7);
    tb_mem_desc desc = {.size = sizeof desc, .base = memory, .nbytes = MEMORY, .fd = -1};
    tb_mem *mem;
    tb_mem_key key;
    t.ops->mem_register(t.context, &desc, &mem);
    t.ops->mem_export(t.context, mem, 0, &key);
    send_to_parent(&t, 1, &key, sizeof key);
    struct pollfd fd = {.fd = t.ops->fd(t.context), .events = POLLIN};
    for (;;) {
        poll(&fd, 1, -1);
        t.ops->progress(t.context);
    }
}

static void start_other(other *o) {
    int up[2], down[2];
    unsigned char mine[TB_ADDRESS_MAX], theirs[TB_ADDRESS_MAX];
    *o = (other){.lost = TB_NO_RANK};
    assert_int_equal(pipe(up), 0);
    assert_int_equal(pipe(down), 0);
    o->pid = fork();
    assert_true(o->pid >= 0);
    if (o->pid == 0)
        child(down[0], up[1]);
    tb_transport_env env = {.size = sizeof env, .rank = 0, .arg = o, .lost = note_loss};
    size_t n = sizeof mine;
    assert_int_equal(tb__transport_open("shm", &env, &o->here), TB_OK);
    assert_int_equal(o->here.ops->address(o->here.context, mine, &n), TB_OK);
    assert_int_equal(read(up[0], theirs, sizeof theirs), n);
    assert_int_equal(write(down[1], mine, n), n);
    assert_int_equal(o->here.ops->connect(o->here.context, 1, theirs, n), TB_OK);
    for (int i = 0; i < 2; i++) {
        close(up[i]);
        close(down[i]);
    }
}

/* Another process's memory is read; the process is killed in the middle of things; everybody hears of it, by name. */
static void a_killed_peer_is_noticed(void **state) {
    (void)state;
    other o;
    tb_mem_key key;
    tb_remote *remote;
    tb_op receive, send, waiting;
    static unsigned char large[1 << 20], got[MEMORY];
    const tb_range everything = {0, MEMORY};
    tb_piece in = {&key, sizeof key}, out = {large, sizeof large}, more = {got, 1}, all = {got, sizeof got};
    start_other(&o);
    endpoints e = {o.here, o.here, 0, 0};
    make_op(&receive, TB_OP_RECV, 1, 1, &in, 1);
    assert_int_equal(tb__transport_post(&o.here, &receive), TB_OK);
    work_until_done(&e, (tb_op *[]){&receive}, 1);
    assert_int_equal(receive.status, TB_OK);
    assert_int_equal(o.here.ops->mem_import(o.here.context, 1, &key, &remote), TB_OK);
    tb_status status = tb__transport_read(&o.here, remote, &everything, 1, &all, 1);
    if (status == TB_REFUSED) {
        printf("skipped: %s\n", tb_error_detail());
    } else {
        assert_int_equal(status, TB_OK);
        for (size_t i = 0; i < MEMORY; i++)
            assert_int_equal(got[i], (unsigned char)(i * 7));
    }
    assert_int_equal(kill(o.pid, SIGSTOP), 0); /* so that nobody takes the message */
    assert_int_equal(waitpid(o.pid, NULL, WUNTRACED), o.pid);
    make_op(&send, TB_OP_SEND, 1, 2, &out, 1);
    make_op(&waiting, TB_OP_RECV, 1, 3, &more, 1);
    assert_int_equal(tb__transport_post(&o.here, &send), TB_OK);
    assert_int_equal(tb__transport_post(&o.here, &waiting), TB_OK);
    o.here.ops->progress(o.here.context);
    kill(o.pid, SIGKILL);
    work_until_done(&e, (tb_op *[]){&send, &waiting}, 2);
    assert_int_equal(send.status, TB_LOST);
    assert_int_equal(waiting.status, TB_LOST);
    assert_int_equal(o.lost, 1);
    assert_true(strlen(o.why) > 0);
    assert_false(tb__transport_is_valid(&o.here, remote));
    assert_int_equal(tb__transport_read(&o.here, remote, &everything, 1, &all, 1), TB_LOST);
    assert_non_null(strstr(tb_error_detail(), "rank 1"));
    make_op(&send, TB_OP_SEND, 1, 2, &out, 1);
    assert_int_equal(tb__transport_post(&o.here, &send), TB_LOST);
    assert_string_equal(tb_error_detail(), o.why);
    o.here.ops->mem_release(o.here.context, remote);
    tb__transport_close(&o.here);
    waitpid(o.pid, NULL, 0);
}

enum { PAGE = 4096 };

static tb_mem *register_part(endpoints *e, unsigned char *base, int fd, size_t offset, size_t nbytes) {
    tb_mem_desc desc = {.size = sizeof desc, .base = base + offset, .nbytes = nbytes, .fd = fd, .offset = offset};
    tb_mem *mem;
    assert_int_equal(e->b.ops->mem_register(e->b.context, &desc, &mem), TB_OK);
    return mem;
}

/* How often a file of this name is mapped into this process. */
static int count_mappings(const char *name) {
    char line[1024];
    int count = 0;
    FILE *file = fopen("/proc/self/maps", "re");
    assert_non_null(file);
    while (fgets(line, sizeof line, file))
        count += strstr(line, name) != NULL;
    fclose(file);
    return count;
}

/* Lets a work until it has so many of b's files. */
static void work_until_mapped(endpoints *e, size_t count) {
    shm_peer *peer = shm_find(e->a.context, e->rank_b);
    struct pollfd fd = {.fd = e->a.ops->fd(e->a.context), .events = POLLIN};
    for (int i = 0; i < 60 && peer->mappings.count != count; i++) {
        assert_int_equal(e->a.ops->progress(e->a.context), TB_OK);
        if (peer->mappings.count != count)
            poll(&fd, 1, 1000);
    }
    assert_int_equal(peer->mappings.count, count);
}

/* Registrations of one file share a mapping, which goes with the last of them, and with the last remote. */
static void a_file_is_mapped_once(void **state) {
    (void)state;
    endpoints e;
    int fd;
    make(&e);
    unsigned char *base = make_file("mapped-once", (size_t)4 * PAGE, &fd);
    tb_mem *mem[3];
    tb_remote *remote[3];
    int same_file = dup(fd);
    for (size_t i = 0; i < 3; i++) {
        mem[i] = register_part(&e, base, i ? fd : same_file, i * PAGE + 64, 100);
        if (i == 0)
            close(same_file); /* needed for the call only */
        base[i * PAGE + 64] = (unsigned char)(i + 1);
        remote[i] = import_memory(&e, mem[i]);
        assert_int_equal(*(unsigned char *)tb__transport_map(&e.a, remote[i]), i + 1);
    }
    assert_int_equal(count_mappings("mapped-once"), 2); /* the owner's, too */
    work_until_mapped(&e, 1);
    for (size_t i = 0; i < 3; i++) /* released, but registered: it may be asked for again */
        e.a.ops->mem_release(e.a.context, remote[i]);
    work_until_mapped(&e, 1);
    remote[0] = import_memory(&e, mem[0]);
    for (size_t i = 0; i < 3; i++)
        e.b.ops->mem_unregister(e.b.context, mem[i]);
    mem[1] = register_part(&e, base, fd, 0, PAGE); /* the same file is another one now, and comes again */
    remote[1] = import_memory(&e, mem[1]);
    assert_int_equal(shm_find(e.a.context, e.rank_b)->mappings.count, 2);
    assert_false(tb__transport_is_valid(&e.a, remote[0]));
    assert_int_equal(*((unsigned char *)tb__transport_map(&e.a, remote[0])), 1); /* held: still there to be looked at */
    e.a.ops->mem_release(e.a.context, remote[0]);
    assert_int_equal(shm_find(e.a.context, e.rank_b)->mappings.count, 1);
    e.a.ops->mem_release(e.a.context, remote[1]);
    e.b.ops->mem_unregister(e.b.context, mem[1]);
    work_until_mapped(&e, 0);
    assert_int_equal(count_mappings("mapped-once"), 1);
    munmap(base, (size_t)4 * PAGE);
    close(fd);
    unmake(&e);
}

/* One that may stay mapped is there for the next registration; the one that is idle for longest goes first. */
static void files_stay_mapped(void **state) {
    (void)state;
    enum { NFILES = 6, NKEPT = 4 };
    endpoints e;
    int fd[NFILES];
    unsigned char *base[NFILES];
    make(&e);
    for (size_t i = 0; i < NFILES; i++) {
        base[i] = make_file("stays-mapped", PAGE, &fd[i]);
        for (int again = 0; again < 2; again++) {
            tb_mem_desc desc = {.size = sizeof desc, .base = base[i], .nbytes = 100, .fd = fd[i]};
            tb_mem *mem;
            desc.may_stay_mapped = true;
            base[i][0] = (unsigned char)(10 * again + (int)i);
            assert_int_equal(e.b.ops->mem_register(e.b.context, &desc, &mem), TB_OK);
            tb_remote *remote = import_memory(&e, mem);
            assert_int_equal(*(unsigned char *)tb__transport_map(&e.a, remote), base[i][0]);
            e.b.ops->mem_unregister(e.b.context, mem);
            assert_false(tb__transport_is_valid(&e.a, remote));
            e.a.ops->mem_release(e.a.context, remote);
            work_until_mapped(&e, i < NKEPT ? i + 1 : NKEPT);
        }
    }
    assert_int_equal(count_mappings("stays-mapped"), NFILES + NKEPT);
    for (size_t i = 0; i < NFILES; i++) {
        munmap(base[i], PAGE);
        close(fd[i]);
    }
    unmake(&e);
    assert_int_equal(count_mappings("stays-mapped"), 0);
}

/* A lost peer's pages are not kept, but for those that somebody may be reading. */
static void a_lost_peers_files_go(void **state) {
    (void)state;
    endpoints e;
    int fd[2];
    make(&e);
    unsigned char *base[2] = {make_file("lost-0", PAGE, &fd[0]), make_file("lost-1", PAGE, &fd[1])};
    tb_remote *remote[2];
    for (size_t i = 0; i < 2; i++)
        remote[i] = import_memory(&e, register_part(&e, base[i], fd[i], 0, PAGE));
    e.a.ops->mem_release(e.a.context, remote[0]);
    tb__transport_close(&e.b); /* forgets its memory, too */
    work_until_mapped(&e, 1);
    assert_int_equal(count_mappings("lost-0"), 1);
    assert_int_equal(count_mappings("lost-1"), 2);
    assert_false(tb__transport_is_valid(&e.a, remote[1]));
    e.a.ops->mem_release(e.a.context, remote[1]);
    assert_int_equal(count_mappings("lost-1"), 1);
    for (size_t i = 0; i < 2; i++) {
        munmap(base[i], PAGE);
        close(fd[i]);
    }
    unmake(&e);
}

static void send_through_ring(endpoints *e, const tb_transport *from, const tb_transport *to, unsigned char value) {
    static unsigned char out[SHM_RING_SLOT_SIZE + 1], in[sizeof out];
    tb_piece here = {out, sizeof out}, there = {in, sizeof in};
    tb_op send, receive;
    memset(out, value, sizeof out);
    memset(in, 0xEE, sizeof in);
    make_op(&send, TB_OP_SEND, to == &e->a ? e->rank_a : e->rank_b, value, &here, 1);
    make_op(&receive, TB_OP_RECV, from == &e->a ? e->rank_a : e->rank_b, value, &there, 1);
    assert_int_equal(tb__transport_post(to, &receive), TB_OK);
    assert_int_equal(tb__transport_post(from, &send), TB_OK);
    work_until_done(e, (tb_op *[]){&send, &receive}, 2);
    assert_int_equal(receive.status, TB_OK);
    assert_memory_equal(in, out, sizeof in);
}

/* However often two ranks lose each other and connect again. A connection of which there is a remote keeps its control
 * page until that is released. */
static void lost_connections_leave_no_memory(void **state) {
    (void)state;
    static unsigned char memory[64];
    endpoints e;
    tb_remote *remote = NULL;
    pretend_denied = true;
    int pages = count_mappings("tensorbus-control"), rings = count_mappings("tensorbus-ring");
    make(&e);
    for (unsigned char i = 0; i < 4; i++) {
        if (i > 0) {
            e.a.ops->disconnect(e.a.context, e.rank_b, "the test ends it");
            while (!shm_find(e.a.context, e.rank_b)->is_lost || !shm_find(e.b.context, e.rank_a)->is_lost) {
                struct pollfd wait = {.fd = e.b.ops->fd(e.b.context), .events = POLLIN};
                e.a.ops->progress(e.a.context);
                assert_int_equal(poll(&wait, 1, 60000), 1);
                e.b.ops->progress(e.b.context);
            }
            assert_int_equal(count_mappings("tensorbus-ring"), rings);
            connect_both(&e);
        }
        send_through_ring(&e, &e.a, &e.b, (unsigned char)(2 * i + 1));
        send_through_ring(&e, &e.b, &e.a, (unsigned char)(2 * i + 2));
        if (i == 0)
            remote = import_memory(&e, register_part(&e, memory, -1, 0, sizeof memory));
        assert_int_equal(count_mappings("tensorbus-ring"), rings + 4); /* of each direction, at both ends */
        assert_int_equal(count_mappings("tensorbus-control"), pages + 4 + (i > 0));
    }
    assert_false(tb__transport_is_valid(&e.a, remote));
    e.a.ops->mem_release(e.a.context, remote);
    assert_int_equal(count_mappings("tensorbus-control"), pages + 4);
    unmake(&e);
    pretend_denied = false;
}

/* What was registered before the file grew stays where it is; what lies behind that is reached as well. */
static void a_file_may_grow(void **state) {
    (void)state;
    endpoints e;
    int fd;
    make(&e);
    unsigned char *base = make_file("grows", PAGE, &fd);
    tb_mem *mem[2] = {register_part(&e, base, fd, 0, PAGE)};
    tb_remote *remote[2] = {import_memory(&e, mem[0])};
    void *first = tb__transport_map(&e.a, remote[0]);
    munmap(base, PAGE);
    assert_int_equal(ftruncate(fd, 2 * PAGE), 0);
    base = mmap(NULL, (size_t)2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_true(base != MAP_FAILED);
    base[PAGE] = 9;
    mem[1] = register_part(&e, base, fd, PAGE, PAGE);
    remote[1] = import_memory(&e, mem[1]);
    assert_int_equal(*(unsigned char *)tb__transport_map(&e.a, remote[1]), 9);
    assert_ptr_equal(tb__transport_map(&e.a, remote[0]), first);
    for (size_t i = 0; i < 2; i++) {
        e.b.ops->mem_unregister(e.b.context, mem[i]);
        e.a.ops->mem_release(e.a.context, remote[i]);
    }
    work_until_mapped(&e, 0);
    munmap(base, (size_t)2 * PAGE);
    close(fd);
    unmake(&e);
}

/* Files that could make a peer fault, and keys that lead out of a file. */
static void bad_memory_is_refused(void **state) {
    (void)state;
    endpoints e;
    int fd, open_fd = memfd_create("not-sealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    unsigned char *base = make_file("sealed", PAGE, &fd);
    tb_mem *mem;
    tb_mem_key key;
    tb_remote *remote;
    make(&e);
    assert_int_equal(ftruncate(open_fd, PAGE), 0);
    tb_mem_desc desc = {.size = sizeof desc, .base = base, .nbytes = PAGE, .fd = open_fd};
    assert_int_equal(e.b.ops->mem_register(e.b.context, &desc, &mem), TB_REFUSED);
    assert_non_null(strstr(tb_error_detail(), "sealed against shrinking"));
    desc.fd = fd;
    desc.offset = 1;
    assert_int_equal(e.b.ops->mem_register(e.b.context, &desc, &mem), TB_INVALID);
    desc.offset = SIZE_MAX - 1;
    assert_int_equal(e.b.ops->mem_register(e.b.context, &desc, &mem), TB_INVALID);
    mem = register_part(&e, base, fd, 0, PAGE);
    e.a.ops->mem_release(e.a.context, import_memory(&e, mem));
    assert_int_equal(e.b.ops->mem_export(e.b.context, mem, e.rank_a, &key), TB_OK);
    key.bytes[key.nbytes - 8] ^= 1; /* the offset */
    assert_int_equal(e.a.ops->mem_import(e.a.context, e.rank_b, &key, &remote), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "outside of its file"));
    key.bytes[key.nbytes - 8] ^= 1;
    key.bytes[key.nbytes - 1] ^= 0xFF; /* an offset that wraps around */
    assert_int_equal(e.a.ops->mem_import(e.a.context, e.rank_b, &key, &remote), TB_INVALID);
    key.bytes[key.nbytes - 1] ^= 0xFF;
    key.bytes[key.nbytes - 16] ^= 0x40; /* the file */
    assert_int_equal(e.a.ops->mem_import(e.a.context, e.rank_b, &key, &remote), TB_INVALID);
    key.bytes[key.nbytes - 16] ^= 0x40;
    e.b.ops->mem_unregister(e.b.context, mem);
    assert_int_equal(e.a.ops->mem_import(e.a.context, e.rank_b, &key, &remote), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "unregistered"));
    shm_peer *peer = shm_find(e.b.context, e.rank_a);
    int unsealed = dup(open_fd); /* as if b did not look */
    shm_link_send(e.b.context, &peer->out, &(shm_frame){.kind = SHM_FILE, .serial = 99}, &unsealed, 1);
    for (int i = 0; i < 60 && !shm_find(e.a.context, e.rank_b)->is_lost; i++) {
        struct pollfd wait = {.fd = e.a.ops->fd(e.a.context), .events = POLLIN};
        poll(&wait, 1, 1000);
        e.a.ops->progress(e.a.context);
    }
    assert_true(shm_find(e.a.context, e.rank_b)->is_lost);
    munmap(base, PAGE);
    close(fd);
    close(open_fd);
    unmake(&e);
}

/* Sends a ring, and that something is in its last slot. False: the other end has lost us, and says why. */
static bool send_ring(endpoints *e, int fd, char *why, size_t room) {
    static unsigned char large[SHM_RING_SLOT_SIZE];
    other o = {.lost = TB_NO_RANK};
    tb_piece in = {large, sizeof large};
    tb_op receive;
    ((shm *)e->a.context)->env = (tb_transport_env){.rank = e->rank_a, .arg = &o, .lost = note_loss};
    make_op(&receive, TB_OP_RECV, e->rank_b, 7, &in, 1);
    assert_int_equal(tb__transport_post(&e->a, &receive), TB_OK);
    shm_peer *peer = shm_find(e->b.context, e->rank_a), *there = shm_find(e->a.context, e->rank_b);
    shm_frame message = {.kind = SHM_LONG, .tag = 7, .serial = 1, .nbytes = sizeof large};
    shm_frame chunk = {.kind = SHM_CHUNK, .slot = SHM_RING_SLOTS - 1, .serial = 1, .nbytes = sizeof large};
    shm_link_send(e->b.context, &peer->out, &(shm_frame){.kind = SHM_RING}, (int[]){dup(fd)}, 1);
    shm_link_send(e->b.context, &peer->out, &message, NULL, 0);
    shm_link_send(e->b.context, &peer->out, &chunk, NULL, 0);
    for (int i = 0; i < 60 && !there->ring_in && !there->is_lost; i++) {
        struct pollfd wait = {.fd = e->a.ops->fd(e->a.context), .events = POLLIN};
        poll(&wait, 1, 1000);
        e->a.ops->progress(e->a.context);
    }
    if (!is_done(&receive))
        tb__transport_cancel(&e->a, &receive);
    ((shm *)e->a.context)->env = (tb_transport_env){.rank = e->rank_a};
    snprintf(why, room, "%s", o.why);
    return !there->is_lost;
}

static void rings_are_checked(void **state) {
    (void)state;
    const off_t whole = (off_t)SHM_RING_SLOTS * SHM_RING_SLOT_SIZE;
    for (int i = 0; i < 4; i++) {
        endpoints e;
        char why[64];
        int fd = i == 3 ? open("/dev/zero", O_RDWR | O_CLOEXEC) : memfd_create("ring", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        make(&e);
        for (int j = 0; j < 10; j++) { /* until they know each other */
            e.a.ops->progress(e.a.context);
            e.b.ops->progress(e.b.context);
        }
        if (i < 3)
            assert_int_equal(ftruncate(fd, i == 0 ? PAGE : i == 1 ? whole - PAGE : whole), 0);
        assert_int_equal(send_ring(&e, fd, why, sizeof why), i == 2);
        if (i < 2)
            assert_non_null(strstr(why, "its ring has less than"));
        if (i == 2) /* which can't be made shorter any more */
            assert_int_equal(ftruncate(fd, PAGE), -1);
        if (i == 3)
            assert_non_null(strstr(why, "sealed against shrinking"));
        close(fd);
        unmake(&e);
    }
}

/* As many tensors as a large model has can be registered. All numbers can be in use, and a number that was given back
 * can be had again, as another registration. */
static void registrations_run_out(void **state) {
    (void)state;
    endpoints e;
    static tb_mem *mem[SHM_REGISTRATIONS + 1];
    static unsigned char memory[64];
    tb_mem_desc desc = {.size = sizeof desc, .base = memory, .nbytes = sizeof memory, .fd = -1};
    assert_true(SHM_REGISTRATIONS >= 1000000);
    make(&e);
    for (size_t i = 0; i < SHM_REGISTRATIONS; i++)
        assert_int_equal(e.b.ops->mem_register(e.b.context, &desc, &mem[i]), TB_OK);
    assert_int_equal(e.b.ops->mem_register(e.b.context, &desc, &mem[SHM_REGISTRATIONS]), TB_TOO_BIG);
    tb_remote *remote = import_memory(&e, mem[SHM_REGISTRATIONS - 1]);
    for (size_t i = 1; i < SHM_REGISTRATIONS; i += 2)
        e.b.ops->mem_unregister(e.b.context, mem[i]);
    for (size_t i = 1; i < SHM_REGISTRATIONS; i += 2)
        assert_int_equal(e.b.ops->mem_register(e.b.context, &desc, &mem[i]), TB_OK);
    assert_int_equal(e.b.ops->mem_register(e.b.context, &desc, &mem[SHM_REGISTRATIONS]), TB_TOO_BIG);
    assert_false(tb__transport_is_valid(&e.a, remote));
    e.a.ops->mem_release(e.a.context, remote);
    unmake(&e); /* which forgets them all */
}

/* Whoever connects and talks nonsense is shown the door; nobody else notices. */
static void nonsense_is_refused(void **state) {
    (void)state;
    endpoints e;
    unsigned char address[TB_ADDRESS_MAX], garbage[4096];
    size_t n = sizeof address;
    make(&e);
    e.b.ops->address(e.b.context, address, &n);
    memset(garbage, 0xA5, sizeof garbage);
    for (int i = 0; i < 20; i++) {
        tb_transport stranger;
        unsigned char unused[TB_ADDRESS_MAX];
        size_t nunused;
        open_one(&stranger, 9, unused, &nunused);
        assert_int_equal(stranger.ops->connect(stranger.context, e.rank_b, address, n), TB_OK);
        shm_peer *peer = shm_find(stranger.context, e.rank_b);
        for (int j = 0; j < i % 4; j++)
            send(peer->out.fd, garbage, (size_t)i * 200, MSG_NOSIGNAL | MSG_DONTWAIT);
        for (int j = 0; j < 10; j++)
            e.b.ops->progress(e.b.context);
        tb__transport_close(&stranger);
        for (int j = 0; j < 10; j++)
            e.b.ops->progress(e.b.context);
    }
    address[0] ^= 1;
    assert_int_equal(e.a.ops->connect(e.a.context, 7, address, n), TB_INVALID);
    address[0] ^= 1;
    address[4] ^= 8;
    assert_int_equal(e.a.ops->connect(e.a.context, 7, address, n), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "version"));
    unsigned char byte = 7, got = 0;
    tb_piece out = {&byte, 1}, in = {&got, 1};
    tb_op send_op, receive;
    make_op(&send_op, TB_OP_SEND, e.rank_b, 1, &out, 1);
    make_op(&receive, TB_OP_RECV, e.rank_a, 1, &in, 1);
    assert_int_equal(tb__transport_post(&e.a, &send_op), TB_OK);
    assert_int_equal(tb__transport_post(&e.b, &receive), TB_OK);
    work_until_done(&e, (tb_op *[]){&send_op, &receive}, 2);
    assert_int_equal(got, 7);
    unmake(&e);
}

/* Sockets would turn them away; so they are to meet by other means, or be told why not. */
static void other_users_are_out_of_reach(void **state) {
    (void)state;
    endpoints e;
    unsigned char address[TB_ADDRESS_MAX];
    size_t n = sizeof address;
    make(&e);
    e.b.ops->address(e.b.context, address, &n);
    assert_true(tb__transport_reaches(&e.a, address, n));
    uint32_t user = geteuid() + 1;
    memcpy(address + n - 2 * sizeof user, &user, sizeof user);
    assert_false(tb__transport_reaches(&e.a, address, n));
    assert_non_null(strstr(tb_error_detail(), "it runs as user "));
    address[n - 16] ^= 1; /* in another namespace of users the number tells nothing */
    assert_true(tb__transport_reaches(&e.a, address, n));
    unmake(&e);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(shm_conforms),
                                       cmocka_unit_test(shm_conforms_through_the_ring),
                                       cmocka_unit_test(a_killed_peer_is_noticed),
                                       cmocka_unit_test(a_file_is_mapped_once),
                                       cmocka_unit_test(files_stay_mapped),
                                       cmocka_unit_test(a_lost_peers_files_go),
                                       cmocka_unit_test(lost_connections_leave_no_memory),
                                       cmocka_unit_test(a_file_may_grow),
                                       cmocka_unit_test(bad_memory_is_refused),
                                       cmocka_unit_test(rings_are_checked),
                                       cmocka_unit_test(registrations_run_out),
                                       cmocka_unit_test(nonsense_is_refused),
                                       cmocka_unit_test(other_users_are_out_of_reach)};
    return cmocka_run_group_tests_name("transport shm", tests, NULL, NULL);
}
