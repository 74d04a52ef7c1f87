/* The transport mpi. The suite has both ends in one process, which MPI connects with itself; then the ranks of a job
 * send each other messages, and give some of them up half-way. Started by mpirun or mpiexec with four ranks. */
#include "transport/mpi/mpi_test.h"

#include "base/process.h"

#include <inttypes.h>
#include <sys/resource.h>

/* ---- One process ----------------------------------------------------------------------------------------------- */

static void mpi_conforms(void **state) {
    (void)state;
    conformance(make, unmake);
}

static void progress(const endpoints *e) {
    progress_one(&e->a);
    progress_one(&e->b);
}

enum { HALVED = 10 * CHUNK };

/* A message of which some is there, in one piece or two at each end. */
typedef struct half_way {
    endpoints e;
    unsigned char *from, *to;
    tb_piece out[2], in[2];
    tb_op send, receive;
} half_way;

static void cut_in_two(unsigned char *memory, size_t npieces, tb_piece pieces[2]) {
    pieces[0] = (tb_piece){memory, npieces == 1 ? HALVED : HALVED / 3};
    pieces[1] = (tb_piece){memory + HALVED / 3, HALVED - HALVED / 3};
}

static void begin_half_way(half_way *h, size_t nout, size_t nin) {
    *h = (half_way){.from = make_memory(HALVED, 7), .to = make_memory(HALVED, 0xEE)};
    make(&h->e);
    cut_in_two(h->from, nout, h->out);
    cut_in_two(h->to, nin, h->in);
    make_op(&h->send, TB_OP_SEND, h->e.rank_b, 1, h->out, nout);
    make_op(&h->receive, TB_OP_RECV, h->e.rank_a, 1, h->in, nin);
    post_both(&h->e, &h->send, &h->receive);
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    /* One look at each end at a time, so that it is seen half-way. */
    while (h->to[0] == 0xEE && tb__now_ms() < deadline_ms)
        progress(&h->e);
    assert_int_equal(h->to[0], 7);
}

static void end_half_way(half_way *h) {
    unmake(&h->e);
    free(h->from);
    free(h->to);
}

/* A receive given up when some of it is there: nothing is written after that, the sender is rid of it. */
static void a_receive_is_given_up_half_way(void **state) {
    (void)state;
    for (size_t npieces = 1; npieces <= 2; npieces++) {
        half_way h;
        begin_half_way(&h, 1, npieces);
        bool was_done = is_done(&h.receive);
        tb__transport_cancel(&h.e.b, &h.receive);
        assert_true(is_done(&h.receive));
        assert_int_equal(h.receive.status, was_done ? TB_OK : TB_CANCELLED);
        size_t written = count_other(h.to, HALVED, 0xEE);
        memset(h.to, 0xEE, HALVED);
        work_until_done(&h.e, (tb_op *[]){&h.send}, 1);
        assert_int_equal(h.send.status, TB_OK);
        for (int i = 0; i < 1000; i++)
            progress(&h.e);
        assert_int_equal(count_other(h.to, HALVED, 0xEE), 0);
        printf("    given up after %zu of %d bytes\n", written, (int)HALVED);
        end_half_way(&h);
    }
}

/* A send given up when some of it is there: the receive is told, and the next message comes whole. */
static void a_send_is_given_up_half_way(void **state) {
    (void)state;
    for (size_t npieces = 1; npieces <= 2; npieces++) {
        half_way h;
        tb_op again;
        begin_half_way(&h, npieces, 1);
        if (is_done(&h.send))
            fail_msg("it was sent at one go");
        tb__transport_cancel(&h.e.a, &h.send);
        assert_true(is_done(&h.send));
        assert_int_equal(h.send.status, TB_CANCELLED);
        memset(h.from, 9, HALVED); /* nobody reads it any more */
        work_until_done(&h.e, (tb_op *[]){&h.receive}, 1);
        assert_int_equal(h.receive.status, TB_CANCELLED);
        make_op(&again, TB_OP_SEND, h.e.rank_b, 2, h.out, npieces);
        make_op(&h.receive, TB_OP_RECV, h.e.rank_a, 2, h.in, 1);
        post_both(&h.e, &again, &h.receive);
        work_until_done(&h.e, (tb_op *[]){&again, &h.receive}, 2);
        assert_int_equal(count_other(h.to, HALVED, 9), 0);
        assert_int_equal(h.receive.status, TB_OK);
        end_half_way(&h);
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
        make_op(&send, TB_OP_SEND, e.rank_b, (uint64_t)which, out, nout);
        make_op(&receive, TB_OP_RECV, e.rank_a, (uint64_t)which, in, nin);
        post_both(&e, &send, &receive);
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
        progress_one(&e.b);
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
    static const size_t lengths[] = {0,     1,       100,       TB_SHORT_MAX, TB_SHORT_MAX + 1,
                                     70000, 1000003, 2 * CHUNK, 2 * CHUNK + 1};
    return lengths[i % (sizeof lengths / sizeof *lengths)];
}

/* All to all, many at a time, of all lengths, received in another order than they are sent in. */
static void ranks_talk(void **state) {
    (void)state;
    enum { N = 45 };
    tb_transport t;
    open_among_ranks(&t);
    tb_op *ops = calloc((size_t)2 * NRANKS * N, sizeof *ops);
    tb_piece *pieces = calloc((size_t)2 * NRANKS * N, sizeof *pieces);
    assert_true(ops && pieces);
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
        progress_one(&t);
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
    begin_ranks(&argc, &argv);
    run_together(together, sizeof together / sizeof *together);
    return run_alone(alone, sizeof alone / sizeof *alone);
}
