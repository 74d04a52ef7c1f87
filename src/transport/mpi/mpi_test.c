/* The transport mpi. The suite has both ends in one process, which MPI connects with itself; then the ranks of a job
 * send each other messages, and give some of them up half-way. Started by mpirun or mpiexec with four ranks. */
#include "transport/mpi/mpi.h"

#include "../tests/support/conformance.h"
#include "base/process.h"

#include <inttypes.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include <cmocka.h>

/* Long enough for any machine; only a hang takes it. */
enum { PATIENCE_MS = 60000, NRANKS = 4 };

static int my_rank;

/* ---- One process ----------------------------------------------------------------------------------------------- */

static tb__mpi_seat seats[2];

static void open_end(tb_transport *t, tb__mpi_seat *seat, int32_t rank) {
    tb_transport_env env = {.rank = rank};
    tb__mpi_take_seat(seat);
    assert_int_equal(tb__transport_open("mpi", &env, t), TB_OK);
    tb__mpi_take_seat(NULL);
}

static void connect_ends(const tb_transport *from, const tb_transport *to, int32_t rank_to) {
    unsigned char address[TB_ADDRESS_MAX];
    size_t n = sizeof address;
    assert_int_equal(to->ops->address(to->context, address, &n), TB_OK);
    assert_int_equal(from->ops->connect(from->context, rank_to, address, n), TB_OK);
}

static void make(endpoints *e) {
    MPI_Comm there, back;
    MPI_Comm_dup(MPI_COMM_SELF, &there);
    MPI_Comm_dup(MPI_COMM_SELF, &back);
    seats[0] = (tb__mpi_seat){.out = there, .in = back};
    seats[1] = (tb__mpi_seat){.out = back, .in = there};
    e->rank_a = 3;
    e->rank_b = 70000;
    open_end(&e->a, &seats[0], e->rank_a);
    open_end(&e->b, &seats[1], e->rank_b);
    connect_ends(&e->a, &e->b, e->rank_b);
    connect_ends(&e->b, &e->a, e->rank_a);
}

static void unmake(endpoints *e) {
    tb__transport_close(&e->a);
    tb__transport_close(&e->b);
}

static void mpi_conforms(void **state) {
    (void)state;
    conformance(make, unmake);
}

static void progress(const endpoints *e) {
    assert_int_equal(e->a.ops->progress(e->a.context), TB_OK);
    assert_int_equal(e->b.ops->progress(e->b.context), TB_OK);
}

static size_t count_other(const unsigned char *memory, size_t n, unsigned char value) {
    size_t count = 0;
    for (size_t i = 0; i < n; i++)
        count += memory[i] != value;
    return count;
}

/* A receive given up when some of it is there: nothing is written after that, the sender is rid of it. */
static void a_receive_is_given_up_half_way(void **state) {
    (void)state;
    enum { N = 10 * CHUNK };
    for (size_t npieces = 1; npieces <= 2; npieces++) {
        endpoints e = {0};
        make(&e);
        unsigned char *from = malloc(N), *to = malloc(N);
        assert_true(from && to);
        memset(from, 7, N);
        memset(to, 0xEE, N);
        tb_piece out = {from, N}, in[2] = {{to, npieces == 1 ? N : N / 3}, {to + N / 3, N - N / 3}};
        tb_op send, receive;
        make_op(&send, TB_OP_SEND, e.rank_b, 1, &out, 1);
        make_op(&receive, TB_OP_RECV, e.rank_a, 1, in, npieces);
        assert_int_equal(tb__transport_post(&e.a, &send), TB_OK);
        assert_int_equal(tb__transport_post(&e.b, &receive), TB_OK);
        int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
        /* One look at each end at a time, so that it is seen half-way. */
        while (to[0] == 0xEE && tb__now_ms() < deadline_ms)
            progress(&e);
        assert_int_equal(to[0], 7);
        bool was_done = is_done(&receive);
        tb__transport_cancel(&e.b, &receive);
        assert_true(is_done(&receive));
        assert_int_equal(receive.status, was_done ? TB_OK : TB_CANCELLED);
        size_t written = count_other(to, N, 0xEE);
        memset(to, 0xEE, N);
        work_until_done(&e, (tb_op *[]){&send}, 1);
        assert_int_equal(send.status, TB_OK);
        for (int i = 0; i < 1000; i++)
            progress(&e);
        assert_int_equal(count_other(to, N, 0xEE), 0);
        printf("    given up after %zu of %d bytes\n", written, (int)N);
        unmake(&e);
        free(from);
        free(to);
    }
}

/* A send given up when some of it is there: the receive waits on, and gets the next one whole. */
static void a_send_is_given_up_half_way(void **state) {
    (void)state;
    enum { N = 10 * CHUNK };
    for (size_t npieces = 1; npieces <= 2; npieces++) {
        endpoints e = {0};
        make(&e);
        unsigned char *from = malloc(N), *to = malloc(N);
        assert_true(from && to);
        memset(from, 7, N);
        memset(to, 0xEE, N);
        tb_piece out[2] = {{from, npieces == 1 ? N : N / 3}, {from + N / 3, N - N / 3}}, in = {to, N};
        tb_op send, again, receive;
        make_op(&send, TB_OP_SEND, e.rank_b, 1, out, npieces);
        make_op(&receive, TB_OP_RECV, e.rank_a, 1, &in, 1);
        assert_int_equal(tb__transport_post(&e.a, &send), TB_OK);
        assert_int_equal(tb__transport_post(&e.b, &receive), TB_OK);
        int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
        while (to[0] == 0xEE && tb__now_ms() < deadline_ms)
            progress(&e);
        assert_int_equal(to[0], 7);
        if (!is_done(&send)) {
            tb__transport_cancel(&e.a, &send);
            assert_true(is_done(&send));
            assert_int_equal(send.status, TB_CANCELLED);
            memset(from, 9, N); /* nobody reads it any more */
            for (int i = 0; i < 100; i++)
                progress(&e);
            assert_false(is_done(&receive));
            make_op(&again, TB_OP_SEND, e.rank_b, 1, out, npieces);
            assert_int_equal(tb__transport_post(&e.a, &again), TB_OK);
            work_until_done(&e, (tb_op *[]){&again, &receive}, 2);
            assert_int_equal(count_other(to, N, 9), 0);
        } else {
            fail_msg("it was sent at one go");
        }
        assert_int_equal(receive.status, TB_OK);
        unmake(&e);
        free(from);
        free(to);
    }
}

/* Pieces so short that they are packed, on either side or both. */
static void short_pieces(void **state) {
    (void)state;
    enum { N = CHUNK + 4321, SHORT = 100, MOST = N / SHORT + 1 };
    endpoints e = {0};
    make(&e);
    unsigned char *from = malloc(N), *to = malloc(N);
    tb_piece *out = calloc(MOST, sizeof *out), *in = calloc(MOST, sizeof *in);
    assert_true(from && to && out && in);
    for (int which = 1; which <= 3; which++) {
        size_t nout = 0, nin = 0, step_out = which & 1 ? SHORT : 5000, step_in = which & 2 ? SHORT : 7777;
        for (size_t at = 0; at < N; at += step_out)
            out[nout++] = (tb_piece){from + at, N - at < step_out ? N - at : step_out};
        for (size_t at = 0; at < N; at += step_in)
            in[nin++] = (tb_piece){to + at, N - at < step_in ? N - at : step_in};
        for (size_t i = 0; i < N; i++)
            from[i] = (unsigned char)(i * 2654435761U / 512 + (size_t)which);
        memset(to, 0, N);
        tb_op send, receive;
        make_op(&send, TB_OP_SEND, e.rank_b, 1, out, nout);
        make_op(&receive, TB_OP_RECV, e.rank_a, 1, in, nin);
        assert_int_equal(tb__transport_post(&e.a, &send), TB_OK);
        assert_int_equal(tb__transport_post(&e.b, &receive), TB_OK);
        work_until_done(&e, (tb_op *[]){&send, &receive}, 2);
        assert_int_equal(receive.status, TB_OK);
        assert_memory_equal(from, to, N);
    }
    unmake(&e);
    free(from);
    free(to);
    free(out);
    free(in);
}

/* Waiting for messages that don't come takes next to no time. */
static void waiting_costs_little(void **state) {
    (void)state;
    endpoints e = {0};
    unsigned char byte;
    tb_piece in = {&byte, 1};
    tb_op receive;
    struct rusage before, after;
    make(&e);
    make_op(&receive, TB_OP_RECV, e.rank_a, 1, &in, 1);
    assert_int_equal(tb__transport_post(&e.b, &receive), TB_OK);
    int64_t end_ms = tb__now_ms() + 1000;
    getrusage(RUSAGE_THREAD, &before);
    while (tb__now_ms() < end_ms) {
        struct pollfd fd = {.fd = e.b.ops->fd(e.b.context), .events = POLLIN};
        poll(&fd, 1, tb__ms_until(end_ms));
        assert_int_equal(e.b.ops->progress(e.b.context), TB_OK);
    }
    getrusage(RUSAGE_THREAD, &after);
    double used =
        (double)(after.ru_utime.tv_sec - before.ru_utime.tv_sec + after.ru_stime.tv_sec - before.ru_stime.tv_sec) +
        1e-6 * (double)(after.ru_utime.tv_usec - before.ru_utime.tv_usec + after.ru_stime.tv_usec -
                        before.ru_stime.tv_usec);
    printf("    %.3f s of one second\n", used);
    assert_true(used < 0.3);
    unmake(&e);
}

/* ---- Four processes --------------------------------------------------------------------------------------------- */

static unsigned char value(int from, int to, size_t i, size_t at) {
    return (unsigned char)((size_t)from * 31 + (size_t)to * 17 + i * 7 + at * 2654435761U / 128);
}

static size_t length(size_t i) {
    static const size_t lengths[] = {0, 1, 100, INLINE_MAX, INLINE_MAX + 1, 70000, 1000003, 2 * CHUNK, 2 * CHUNK + 1};
    return lengths[i % (sizeof lengths / sizeof *lengths)];
}

/* All to all, many at a time, of all lengths, received in another order than they are sent in. */
static void ranks_talk(void **state) {
    (void)state;
    enum { N = 45 };
    static tb__mpi_seat seat;
    MPI_Comm comm;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    seat = (tb__mpi_seat){.out = comm, .in = comm, .uid = {1, 2, 3}};
    tb_transport t;
    open_end(&t, &seat, 100 + my_rank);
    unsigned char address[TB_ADDRESS_MAX], all[NRANKS][TB_ADDRESS_MAX];
    size_t n = sizeof address;
    memset(address, 0, sizeof address);
    assert_int_equal(t.ops->address(t.context, address, &n), TB_OK);
    MPI_Allgather(address, TB_ADDRESS_MAX, MPI_BYTE, all, TB_ADDRESS_MAX, MPI_BYTE, MPI_COMM_WORLD);
    tb_op *ops = calloc((size_t)2 * NRANKS * N, sizeof *ops);
    tb_piece *pieces = calloc((size_t)2 * NRANKS * N, sizeof *pieces);
    assert_true(ops && pieces);
    for (int other = 0; other < NRANKS; other++)
        assert_int_equal(t.ops->connect(t.context, 100 + other, all[other], n), TB_OK);
    assert_false(t.ops->reaches(t.context, "elsewhere", 9));
    size_t count = 0;
    for (size_t i = 0; i < N; i++) {
        for (int step = 0; step < NRANKS; step++) {
            int other = (my_rank + step) % NRANKS;
            size_t j = (i * 11 + 5) % N, nbytes = length(i);
            pieces[count] = (tb_piece){malloc(nbytes + 1), nbytes};
            for (size_t at = 0; at < nbytes; at++)
                ((unsigned char *)pieces[count].base)[at] = value(my_rank, other, i, at);
            make_op(&ops[count], TB_OP_SEND, 100 + other, (uint64_t)i << 40, &pieces[count], 1);
            assert_int_equal(tb__transport_post(&t, &ops[count]), TB_OK);
            count++;
            pieces[count] = (tb_piece){malloc(length(j) + 1), length(j)};
            make_op(&ops[count], TB_OP_RECV, 100 + other, (uint64_t)j << 40, &pieces[count], 1);
            assert_int_equal(tb__transport_post(&t, &ops[count]), TB_OK);
            count++;
        }
    }
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    for (size_t k = 0; k < count && tb__now_ms() < deadline_ms;) {
        struct pollfd fd = {.fd = t.ops->fd(t.context), .events = POLLIN};
        if (is_done(&ops[k])) {
            k++;
            continue;
        }
        assert_int_equal(t.ops->progress(t.context), TB_OK);
        if (!is_done(&ops[k]))
            poll(&fd, 1, 1000);
    }
    for (size_t k = 0; k < count; k++) {
        assert_true(is_done(&ops[k]));
        assert_int_equal(ops[k].status, TB_OK);
        size_t i = (size_t)(ops[k].tag >> 40);
        if (ops[k].kind == TB_OP_RECV)
            assert_int_equal(ops[k].nbytes, length(i));
        for (size_t at = 0; ops[k].kind == TB_OP_RECV && at < length(i); at++) {
            if (((unsigned char *)pieces[k].base)[at] != value(ops[k].peer - 100, my_rank, i, at))
                fail_msg("byte %zu of message %zu from rank %" PRId32 " is wrong", at, i, ops[k].peer - 100);
        }
        free(pieces[k].base);
    }
    MPI_Barrier(MPI_COMM_WORLD); /* a peer that closes is lost to the others */
    tb__transport_close(&t);
    free(ops);
    free(pieces);
}

int main(int argc, char **argv) {
    const struct CMUnitTest alone[] = {
        cmocka_unit_test(mpi_conforms),
        cmocka_unit_test(a_receive_is_given_up_half_way),
        cmocka_unit_test(a_send_is_given_up_half_way),
        cmocka_unit_test(short_pieces),
        cmocka_unit_test(waiting_costs_little),
    };
    const struct CMUnitTest together[] = {cmocka_unit_test(ranks_talk)};
    int level, nranks, failures = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &my_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);
    if (nranks != NRANKS || tb_transport_register(&tb__mpi_ops) != TB_OK)
        MPI_Abort(MPI_COMM_WORLD, 2);
    failures = cmocka_run_group_tests_name("transport mpi, between ranks", together, NULL, NULL);
    if (failures > 0)
        MPI_Abort(MPI_COMM_WORLD, 1);
    /* The suite moves gigabytes: once is enough. The others sleep, which MPI_Barrier would not. */
    MPI_Request done;
    int is_done_there = 0;
    if (my_rank == 0)
        failures = cmocka_run_group_tests_name("transport mpi", alone, NULL, NULL);
    MPI_Ibarrier(MPI_COMM_WORLD, &done);
    while (!is_done_there) {
        poll(NULL, 0, 20);
        MPI_Test(&done, &is_done_there, MPI_STATUS_IGNORE);
    }
    MPI_Finalize();
    return failures > 0;
}
