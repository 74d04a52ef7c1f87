/* What the tests of the transport mpi share: ends in one process, which MPI connects with itself, ends in all four
 * ranks, and how the ranks begin and end. */
#ifndef TB_TRANSPORT_MPI_MPI_TEST_H
#define TB_TRANSPORT_MPI_MPI_TEST_H

#include "transport/mpi/mpi.h"

#include "../tests/support/conformance.h"

#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Long enough for any machine; only a hang takes it. */
enum { PATIENCE_MS = 60000, NRANKS = 4 };

static int my_rank;
static int nlost; /* peers, by the ends of this process */

static inline void on_lost(void *arg, int32_t transport_rank, const char *why) {
    (void)arg;
    (void)transport_rank;
    (void)why;
    nlost++;
}

static inline void open_end(tb_transport *t, tb__mpi_comms *comms, int32_t rank) {
    tb_transport_env env = {.size = sizeof env, .rank = rank, .lost = on_lost};
    tb__mpi_set_next_comms(comms);
    assert_int_equal(tb__transport_open("mpi", &env, t), TB_OK);
    tb__mpi_set_next_comms(NULL);
}

static inline void connect_ends(const tb_transport *from, const tb_transport *to, int32_t rank_to) {
    unsigned char address[TB_ADDRESS_MAX];
    size_t n = sizeof address;
    assert_int_equal(to->ops->address(to->context, address, &n), TB_OK);
    assert_int_equal(from->ops->connect(from->context, rank_to, address, n), TB_OK);
}

static inline void make(endpoints *e) {
    MPI_Comm there, back;
    MPI_Comm_dup(MPI_COMM_SELF, &there);
    MPI_Comm_dup(MPI_COMM_SELF, &back);
    e->rank_a = 3;
    e->rank_b = 70000;
    open_end(&e->a, &(tb__mpi_comms){.out = there, .in = back}, e->rank_a);
    open_end(&e->b, &(tb__mpi_comms){.out = back, .in = there}, e->rank_b);
    connect_ends(&e->a, &e->b, e->rank_b);
    connect_ends(&e->b, &e->a, e->rank_a);
}

static inline void unmake(endpoints *e) {
    tb__transport_close(&e->a);
    tb__transport_close(&e->b);
}

/* An end that is connected to those of all ranks, as 100 and the rank. */
static inline void open_among_ranks(tb_transport *t) {
    unsigned char address[TB_ADDRESS_MAX] = {0}, all[NRANKS][TB_ADDRESS_MAX];
    size_t n = sizeof address;
    MPI_Comm comm;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    open_end(t, &(tb__mpi_comms){.out = comm, .in = comm, .uid = {1, 2, 3}}, 100 + my_rank);
    assert_int_equal(t->ops->address(t->context, address, &n), TB_OK);
    MPI_Allgather(address, TB_ADDRESS_MAX, MPI_BYTE, all, TB_ADDRESS_MAX, MPI_BYTE, MPI_COMM_WORLD);
    for (int i = 0; i < NRANKS; i++)
        assert_int_equal(t->ops->connect(t->context, 100 + i, all[i], n), TB_OK);
}

static inline void progress_one(const tb_transport *t) {
    assert_int_equal(t->ops->progress(t->context), TB_OK);
}

/* From a to b. */
static inline void post_both(const endpoints *e, tb_op *send, tb_op *receive) {
    assert_int_equal(tb__transport_post(&e->b, receive), TB_OK);
    assert_int_equal(tb__transport_post(&e->a, send), TB_OK);
}

static inline unsigned char *make_memory(size_t n, unsigned char value) {
    unsigned char *memory = malloc(n);
    assert_non_null(memory);
    memset(memory, value, n);
    return memory;
}

static inline size_t count_other(const unsigned char *memory, size_t n, unsigned char value) {
    size_t count = 0;
    for (size_t i = 0; i < n; i++)
        count += memory[i] != value;
    return count;
}

static inline void begin_ranks(int *argc, char ***argv) {
    int level, nranks;
    MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &my_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);
    if (nranks != NRANKS || level < MPI_THREAD_MULTIPLE || tb_transport_register(&tb__mpi_ops) != TB_OK)
        MPI_Abort(MPI_COMM_WORLD, 2);
}

/* Tests in which all ranks take part. */
static inline void run_together(const struct CMUnitTest *tests, size_t count) {
    for (size_t i = 0; i < count; i++) {
        int failures = _cmocka_run_group_tests("transport mpi, between ranks", &tests[i], 1, NULL, NULL);
        fflush(NULL);
        if (failures > 0)
            MPI_Abort(MPI_COMM_WORLD, 1); /* the others may be waiting */
    }
}

/* Tests of one process, of which once is enough, and the end of all ranks. The others sleep, which MPI_Barrier would
 * not. Returns what main does. */
static inline int run_alone(const struct CMUnitTest *tests, size_t count) {
    MPI_Request done;
    int is_done_there = 0, failures = 0;
    if (my_rank == 0)
        failures = _cmocka_run_group_tests("transport mpi", tests, count, NULL, NULL);
    MPI_Ibarrier(MPI_COMM_WORLD, &done);
    while (!is_done_there) {
        poll(NULL, 0, 20);
        MPI_Test(&done, &is_done_there, MPI_STATUS_IGNORE);
    }
    MPI_Finalize();
    return failures > 0;
}

#endif
