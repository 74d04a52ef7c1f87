/* The transport mpi where things don't come through: receives that are given up, peers that leave or stand still. The
 * argument says how MPI sends: as it likes, or by rendezvous and bit by bit, so that even frames can be half-way.
 * Started by mpirun or mpiexec with four ranks. */
#include "transport/mpi/mpi_test.h"

#include "base/process.h"

#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- One process ----------------------------------------------------------------------------------------------- */

/* A message of as many bytes as there are, which comes whole. */
static void move(endpoints *e, unsigned char *from, unsigned char *to, size_t n) {
    uint64_t tag = new_tag();
    tb_piece out = {from, n}, in = {to, n};
    tb_op send, receive;
    for (size_t i = 0; i < n; i++)
        from[i] = (unsigned char)(i / 1000 + tag);
    memset(to, 0, n);
    make_op(&send, TB_OP_SEND, e->rank_b, tag, &out, 1);
    make_op(&receive, TB_OP_RECV, e->rank_a, tag, &in, 1);
    post_both(e, &send, &receive);
    work_until_done(e, (tb_op *[]){&send, &receive}, 2);
    assert_int_equal(receive.status, TB_OK);
    assert_memory_equal(from, to, n);
}

/* The first chunks have long pieces or short ones, as the bits say: MPI receives those to the operation's memory or to
 * memory of the transport's. */
static size_t cut(unsigned char *memory, size_t n, unsigned bits, tb_piece *pieces) {
    enum { SHORT = 128, FIRST = 4 };
    size_t count = 0, at = 0;
    for (; at < FIRST * (size_t)CHUNK; bits >>= 1) {
        size_t step = bits & 1 ? SHORT : CHUNK;
        for (size_t end = at + CHUNK; at < end; at += step)
            pieces[count++] = (tb_piece){memory + at, step};
    }
    pieces[count++] = (tb_piece){memory + at, n - at};
    return count;
}

/* Before the sender has begun, or half-way: either way nothing is written after it, the sender is rid of it, and the
 * next messages get what is theirs. */
static void receives_are_given_up(void **state) {
    (void)state;
    enum { MOST = 16 * CHUNK + 1001 };
    endpoints e = {0};
    make(&e);
    unsigned char *from = make_memory(MOST, 7), *to = make_memory(MOST, 0xEE);
    tb_piece *in = calloc(4 * CHUNK / 128 + 1, sizeof *in);
    const mpi *b = e.b.context;
    assert_non_null(in);
    for (unsigned i = 0; i < 64; i++) {
        bool is_half_way = i & 1;
        size_t n = i & 2 ? MOST : 16 * CHUNK;
        tb_piece out = {from, n};
        tb_op send, receive;
        memset(to, 0xEE, n);
        uint64_t tag = new_tag();
        make_op(&send, TB_OP_SEND, e.rank_b, tag, &out, 1);
        make_op(&receive, TB_OP_RECV, e.rank_a, tag, in, cut(to, n, i / 4, in));
        post_both(&e, &send, &receive);
        int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
        const message *msg = receive.state;
        while (!is_done(&receive) && (is_half_way ? msg->done == 0 : msg->state != MESSAGE_RECEIVES)) {
            assert_true(tb__now_ms() < deadline_ms);
            progress_one(&e.b);
            if (is_half_way)
                progress_one(&e.a);
        }
        assert_false(is_done(&receive));
        tb__transport_cancel(&e.b, &receive);
        assert_true(is_done(&receive));
        assert_int_equal(receive.status, TB_CANCELLED);
        memset(to, 0xEE, n);
        work_until_done(&e, (tb_op *[]){&send}, 1);
        assert_int_equal(send.status, TB_OK);
        while (!TAILQ_EMPTY(&b->all) && tb__now_ms() < deadline_ms)
            progress_one(&e.b);
        assert_true(TAILQ_EMPTY(&b->all)); /* all has come that was waited for */
        assert_int_equal(count_other(to, n, 0xEE), 0);
        for (int j = 0; j < 2; j++)
            move(&e, from, to, n);
    }
    unmake(&e);
    free(from);
    free(to);
    free(in);
}

/* Those of one rank are opened in the order in which they were written, in whichever they come; more than the ring has
 * places for. The test writes them itself. */
static void frames_keep_their_order(void **state) {
    (void)state;
    enum { N = 3 * RING };
    struct {
        header header;
        unsigned char data[8];
    } frames[N];
    MPI_Request requests[N];
    endpoints e = {0};
    unsigned char got[N][8];
    tb_piece in[N];
    tb_op receives[N], *all[N];
    memset(got, 0, sizeof got);
    make(&e);
    mpi *a = e.a.context;
    for (int i = 0; i < N; i++) {
        uint64_t serial = (uint64_t)(N - 1 - i);
        frames[i].header = (header){.kind = FRAME_SHORT, .tag = 5, .nbytes = 8, .serial = serial};
        memset(frames[i].data, (int)serial, 8);
        MPI_Isend(&frames[i], sizeof frames[i], MPI_BYTE, 0, FRAME_TAG, a->comms.out, &requests[i]);
        in[i] = (tb_piece){got[i], 8};
        make_op(&receives[i], TB_OP_RECV, e.rank_a, 5, &in[i], 1);
        assert_int_equal(tb__transport_post(&e.b, &receives[i]), TB_OK);
        all[i] = &receives[i];
    }
    a->peers[0].nwritten = N; /* as if it had */
    work_until_done(&e, all, N);
    for (int i = 0; i < N; i++) {
        assert_int_equal(count_other(got[i], 8, (unsigned char)i), 0);
        MPI_Wait(&requests[i], MPI_STATUS_IGNORE);
    }
    unmake(&e);
}

typedef struct cancelling {
    tb_transport *transport;
    tb_op *op;
} cancelling;

static void *cancel(void *arg) {
    cancelling *c = arg;
    tb__transport_cancel(c->transport, c->op);
    return NULL;
}

/* A send that is given up waits for its receiver, which has not got to it. Other endpoints go on meanwhile, and its
 * receiver as well: after five seconds it would be lost. */
static void who_waits_holds_up_nobody(void **state) {
    (void)state;
    enum { N = 8 * CHUNK };
    endpoints e = {0}, other = {0};
    make(&e);
    make(&other);
    unsigned char *from = make_memory(N, 7), *to = make_memory(N, 0);
    tb_piece out = {from, N}, in = {to, N};
    tb_op send, receive;
    make_op(&send, TB_OP_SEND, e.rank_b, 1, &out, 1);
    make_op(&receive, TB_OP_RECV, e.rank_a, 1, &in, 1);
    post_both(&e, &send, &receive);
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    while (((message *)receive.state)->state != MESSAGE_RECEIVES && tb__now_ms() < deadline_ms)
        progress_one(&e.b);
    tb__transport_cancel(&e.b, &receive); /* its chunks are received and thrown away, by and by */
    while (((message *)send.state)->state != MESSAGE_SENDS && tb__now_ms() < deadline_ms)
        progress_one(&e.a);
    assert_false(is_done(&send));
    nlost = 0;
    pthread_t thread;
    cancelling c = {&e.a, &send};
    assert_int_equal(pthread_create(&thread, NULL, cancel, &c), 0);
    unsigned char *from_other = make_memory(N, 0), *to_other = make_memory(N, 0);
    for (int i = 0; i < 10; i++)
        move(&other, from_other, to_other, N);
    mpi *b = e.b.context;
    while (tb__now_ms() < deadline_ms && !TAILQ_EMPTY(&b->all))
        progress_one(&e.b);
    pthread_join(thread, NULL);
    assert_true(is_done(&send));
    assert_int_equal(send.status, TB_CANCELLED);
    assert_int_equal(nlost, 0);
    move(&e, from, to, N);
    unmake(&other);
    unmake(&e);
    free(from);
    free(to);
    free(from_other);
    free(to_other);
}

/* ---- Four processes --------------------------------------------------------------------------------------------- */

enum { STANDS, GOES_ON, NFLAGS };
static _Atomic int *flags; /* shared by all, so that ranks hear of each other without MPI */

static void share_flags(void) {
    char path[] = "/tmp/tb-mpi-XXXXXX";
    int fd = -1;
    if (my_rank == 0)
        fd = mkstemp(path);
    MPI_Bcast(path, sizeof path, MPI_CHAR, 0, MPI_COMM_WORLD);
    FILE *file = my_rank == 0 ? fdopen(fd, "r+") : fopen(path, "r+");
    if (!file || ftruncate(fileno(file), sizeof *flags * NFLAGS) != 0)
        MPI_Abort(MPI_COMM_WORLD, 2);
    flags = mmap(NULL, sizeof *flags * NFLAGS, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
    fclose(file);
    if (flags == MAP_FAILED)
        MPI_Abort(MPI_COMM_WORLD, 2);
    MPI_Barrier(MPI_COMM_WORLD);
    if (my_rank == 0)
        unlink(path);
}

static void clear_flags(void) {
    for (int i = 0; i < NFLAGS; i++)
        atomic_store(&flags[i], 0);
    MPI_Barrier(MPI_COMM_WORLD);
}

/* Without MPI; or with it, by progress of `t`. */
static void wait_for_flag(int which, const tb_transport *t) {
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    while (!atomic_load(&flags[which])) {
        assert_true(tb__now_ms() < deadline_ms);
        if (t)
            progress_one(t);
        else
            poll(NULL, 0, 1);
        sched_yield();
    }
}

static void work(const tb_transport *t, const tb_op *op) {
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    while (!is_done(op)) {
        assert_true(tb__now_ms() < deadline_ms);
        progress_one(t);
        sched_yield();
    }
}

/* An endpoint that is connected to all, as 100 and the rank, and has exchanged a message with all. */
static void meet(tb_transport *t) {
    unsigned char byte[2 * NRANKS];
    tb_op ops[2 * NRANKS];
    tb_piece pieces[2 * NRANKS];
    nlost = 0;
    open_among_ranks(t);
    for (int k = 0; k < 2 * NRANKS; k++) {
        pieces[k] = (tb_piece){&byte[k], 1};
        make_op(&ops[k], k % 2 ? TB_OP_RECV : TB_OP_SEND, 100 + k / 2, 99, &pieces[k], 1);
        assert_int_equal(tb__transport_post(t, &ops[k]), TB_OK);
    }
    for (int k = 0; k < 2 * NRANKS; k++)
        work(t, &ops[k]);
    clear_flags();
}

/* A sender closes in the middle. Who is told that it is lost may use the memory for something else. */
static void nothing_is_written_after_a_loss(void **state) {
    (void)state;
    enum { N = 24 * CHUNK, ROUNDS = 12 };
    unsigned char *memory = make_memory(N, 7);
    int ncut = 0;
    for (size_t round = 0; round < ROUNDS; round++) {
        bool is_send = my_rank % 2 == 0;
        tb_transport t;
        tb_piece piece = {memory, N};
        tb_op op;
        meet(&t);
        memset(memory, 7, N);
        make_op(&op, is_send ? TB_OP_SEND : TB_OP_RECV, 100 + (my_rank ^ 1), 1, &piece, 1);
        assert_int_equal(tb__transport_post(&t, &op), TB_OK);
        if (is_send) {
            int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
            const message *msg = op.state;
            while (!is_done(&op) && (msg->state != MESSAGE_SENDS || msg->done < round * CHUNK)) {
                assert_true(tb__now_ms() < deadline_ms);
                progress_one(&t);
            }
            tb__transport_close(&t);
            assert_true(is_done(&op));
        } else {
            work(&t, &op);
            assert_true(op.status == TB_OK || op.status == TB_LOST);
            ncut += op.status == TB_LOST;
            memset(memory, 0xEE, N);
        }
        MPI_Barrier(MPI_COMM_WORLD);
        MPI_Barrier(MPI_COMM_WORLD);
        if (!is_send) {
            assert_int_equal(count_other(memory, N, 0xEE), 0);
            tb__transport_close(&t);
        }
    }
    if (my_rank % 2)
        printf("    %d of %d were cut short\n", ncut, (int)ROUNDS);
    free(memory);
}

/* Rank 2 has begun frames, and does nothing more. Rank 1 is heard by rank 0 all the same, and rank 2 when it goes on,
 * each frame in its turn. */
static void who_stands_still_holds_up_nobody(void **state) {
    (void)state;
    enum { LONG = 4000, SHORT = 100, N = 2 * RING };
    tb_transport t;
    unsigned char *memory = make_memory((N + 1) * (size_t)LONG, 0), byte = 1;
    tb_piece pieces[N + 1];
    tb_op ops[N + 1], one;
    meet(&t);
    for (int i = 0; i <= N; i++)
        pieces[i] = (tb_piece){memory + (size_t)i * LONG, my_rank == 2 && i > 0 ? SHORT : LONG};
    for (int i = 0; i <= N && (my_rank == 0 || my_rank == 2); i++) {
        if (my_rank == 2)
            memset(pieces[i].base, i, pieces[i].nbytes);
        make_op(&ops[i], my_rank == 2 ? TB_OP_SEND : TB_OP_RECV, my_rank == 2 ? 100 : 102, 1, &pieces[i], 1);
        assert_int_equal(tb__transport_post(&t, &ops[i]), TB_OK);
    }
    make_op(&one, my_rank == 1 ? TB_OP_SEND : TB_OP_RECV, my_rank == 1 ? 100 : 101, 2, &(tb_piece){&byte, 1}, 1);
    if (my_rank == 2) {
        atomic_store(&flags[STANDS], 1);
        wait_for_flag(GOES_ON, NULL);
    } else if (my_rank < 2) {
        wait_for_flag(STANDS, NULL);
        assert_int_equal(tb__transport_post(&t, &one), TB_OK);
        work(&t, &one);
    }
    if (my_rank == 0)
        atomic_store(&flags[GOES_ON], 1);
    for (int i = 0; i <= N && (my_rank == 0 || my_rank == 2); i++) {
        work(&t, &ops[i]);
        assert_int_equal(ops[i].status, TB_OK);
        if (my_rank == 0) {
            assert_int_equal(ops[i].nbytes, i > 0 ? SHORT : LONG);
            assert_int_equal(count_other(pieces[i].base, ops[i].nbytes, (unsigned char)i), 0);
        }
    }
    MPI_Barrier(MPI_COMM_WORLD);
    tb__transport_close(&t);
    free(memory);
}

/* Rank 2 stands still in the middle of chunks when rank 0 loses it: rank 0 is told when MPI is through with them. */
static void a_loss_waits_for_what_is_half_way(void **state) {
    (void)state;
    enum { N = 16 * CHUNK };
    tb_transport t;
    unsigned char *memory = make_memory(N, 7);
    tb_piece piece = {memory, N};
    tb_op op;
    meet(&t);
    make_op(&op, my_rank == 2 ? TB_OP_SEND : TB_OP_RECV, my_rank == 2 ? 100 : 102, 1, &piece, 1);
    if (my_rank == 0 || my_rank == 2)
        assert_int_equal(tb__transport_post(&t, &op), TB_OK);
    if (my_rank == 2) {
        const message *msg = op.state;
        int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
        while (!is_done(&op) && msg->state != MESSAGE_SENDS && tb__now_ms() < deadline_ms)
            progress_one(&t);
        atomic_store(&flags[STANDS], 1);
        wait_for_flag(GOES_ON, NULL);
        work(&t, &op); /* until rank 0 has closed */
    }
    if (my_rank == 0) {
        wait_for_flag(STANDS, &t);
        mpi_lock();
        mpi_lose_peer(t.context, 2, "of the test");
        mpi_unlock();
        printf("    %s\n", is_done(&op) ? "nothing was half-way" : "something was half-way");
        assert_int_equal(nlost, is_done(&op));
        if (is_done(&op))
            memset(memory, 0xEE, N);
        atomic_store(&flags[GOES_ON], 1);
        if (!is_done(&op)) {
            work(&t, &op);
            memset(memory, 0xEE, N);
        }
        assert_int_equal(nlost, 1);
        tb__transport_close(&t);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (my_rank == 0)
        assert_int_equal(count_other(memory, N, 0xEE), 0);
    else
        tb__transport_close(&t);
    free(memory);
}

static void ask_for_rendezvous(void) {
    static const char *const settings[][2] = {
        {"OMPI_MCA_pml", "ob1"},
        {"OMPI_MCA_btl", "tcp,self"},
        {"OMPI_MCA_btl_tcp_if_include", "lo"},
        {"OMPI_MCA_btl_tcp_eager_limit", "1024"},
        {"OMPI_MCA_btl_tcp_rndv_eager_limit", "512"},
        {"MPIR_CVAR_NOLOCAL", "1"},
        {"UCX_TLS", "posix,self"},
        {"UCX_RNDV_THRESH", "1024"},
    };
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        setenv(settings[i][0], settings[i][1], 1);
}

int main(int argc, char **argv) {
    const struct CMUnitTest together[] = {
        cmocka_unit_test(who_stands_still_holds_up_nobody),
        cmocka_unit_test(a_loss_waits_for_what_is_half_way),
        cmocka_unit_test(nothing_is_written_after_a_loss),
    };
    const struct CMUnitTest alone[] = {
        cmocka_unit_test(receives_are_given_up),
        cmocka_unit_test(frames_keep_their_order),
        cmocka_unit_test(who_waits_holds_up_nobody),
    };
    if (argc == 2 && strcmp(argv[1], "rendezvous") == 0)
        ask_for_rendezvous();
    begin_ranks(&argc, &argv);
    share_flags();
    run_together(together, sizeof together / sizeof *together);
    return run_alone(alone, sizeof alone / sizeof *alone);
}
