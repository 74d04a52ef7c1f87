/* A matrix of floats goes from bands of rows to blocks of columns, among the same four ranks of an MPI job, in three
 * ways: by MPI_Alltoallw with subarray datatypes, by a world whose transport is mpi, and by one that chooses itself,
 * which between processes of one host is shm.
 *
 *     mpirun -n 4 mpi_row_col [SIDE [ROUNDS]]
 *
 * The ways take turns. Prints one line of JSON: the medians, in gigabytes of matrix a second, and what they are to
 * MPI_Alltoallw. Every way's last round is verified. */
#include <tensorbus/mpi.h>

#include "measure.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { RANKS = 4, WARM_UP = 3, USUAL_SIDE = 8192, USUAL_ROUNDS = 15, WAYS = 3 };

static _Noreturn void give_up(const char *what, const char *sentence) {
    fprintf(stderr, "mpi_row_col: %s: %s\n", what, sentence);
    MPI_Abort(MPI_COMM_WORLD, 1);
    abort();
}

static void must(const char *what, tb_status status) {
    if (status != TB_OK)
        give_up(what, tb_error_detail());
}

typedef struct matrix {
    int rank, side, band;     /* rows of a band, columns of a block */
    uint32_t *rows, *columns; /* this rank's part, before and after */
} matrix;

/* ---- MPI's way -------------------------------------------------------------------------------------------------- */

typedef struct parts {
    MPI_Datatype from[RANKS], to[RANKS];
} parts;

static void make_parts(parts *p, const matrix *m) {
    int band[2] = {m->band, m->side}, block[2] = {m->side, m->band}, part[2] = {m->band, m->band};
    for (int i = 0; i < RANKS; i++) {
        MPI_Type_create_subarray(2, band, part, (int[]){0, i * m->band}, MPI_ORDER_C, MPI_FLOAT, &p->from[i]);
        MPI_Type_create_subarray(2, block, part, (int[]){i * m->band, 0}, MPI_ORDER_C, MPI_FLOAT, &p->to[i]);
        MPI_Type_commit(&p->from[i]);
        MPI_Type_commit(&p->to[i]);
    }
}

static void free_parts(parts *p) {
    for (int i = 0; i < RANKS; i++) {
        MPI_Type_free(&p->from[i]);
        MPI_Type_free(&p->to[i]);
    }
}

static void exchange_by_mpi(const matrix *m, const parts *p) {
    static const int once[RANKS] = {1, 1, 1, 1}, at[RANKS] = {0};
    MPI_Alltoallw(m->rows, once, at, p->from, m->columns, once, at, p->to, MPI_COMM_WORLD);
}

/* ---- Ours ------------------------------------------------------------------------------------------------------- */

typedef struct bus {
    tb_world *world;
    tb_pair *rows, *columns;
    tb_batch *batch;
} bus;

static void open_bus(bus *b, const matrix *m, const char *transport) {
    tb_world_opts opts = {.size = sizeof opts, .transport = transport};
    must("world", tb_world_from_mpi(MPI_COMM_WORLD, "rows", &opts, &b->world));
    must("enter", tb_world_enter(b->world, "columns", m->rank, RANKS));
    tb_pair_opts as_rows = {.size = sizeof as_rows, .group = "rows", .no_wait = true};
    tb_pair_opts as_columns = {.size = sizeof as_columns, .group = "columns"};
    must("pair", tb_pair_create(b->world, "p", "columns", "mesh=4 place=Shard(0)", &as_rows, &b->rows));
    must("pair", tb_pair_create(b->world, "p", "rows", "mesh=4 place=Shard(1)", &as_columns, &b->columns));
    must("batch", tb_batch_create(b->world, "m", NULL, &b->batch));
    tb_tensor w = {.size = sizeof w, .data = m->rows, .dtype = TB_F32, .ndim = 2, .shape = {m->side, m->side}};
    must("add", tb_batch_add(b->batch, b->rows, "w", &w));
    w.data = m->columns;
    must("add", tb_batch_add(b->batch, b->columns, "w", &w));
    must("register", tb_batch_register(b->batch, 0));
}

static void exchange_by_bus(const bus *b) {
    tb_transfer *out, *in;
    must("send", tb_send(b->batch, NULL, &out));
    must("receive", tb_recv(b->batch, NULL, &in));
    must("receive", tb_wait(in, TB_ARRIVED, -1));
    must("send", tb_wait(out, TB_RELEASED, -1));
    must("receive", tb_wait(in, TB_COMMITTED, -1));
    must("send", tb_wait(out, TB_COMMITTED, -1));
    tb_transfer_destroy(out);
    tb_transfer_destroy(in);
}

static void close_bus(bus *b) {
    tb_batch_destroy(b->batch);
    tb_pair_destroy(b->rows);
    tb_pair_destroy(b->columns);
    tb_world_destroy(b->world);
}

/* ---- Measuring -------------------------------------------------------------------------------------------------- */

static void verify(const matrix *m) {
    for (int row = 0; row < m->side; row++) {
        for (int i = 0; i < m->band; i++) {
            if (m->columns[(size_t)row * (size_t)m->band + (size_t)i] !=
                (uint32_t)row * (uint32_t)m->side + (uint32_t)(m->rank * m->band + i))
                give_up("verify", "a wrong element arrived");
        }
    }
}

int main(int argc, char **argv) {
    static const char *const transports[WAYS] = {NULL, "mpi", "auto"};
    int level, nranks;
    matrix m = {.side = argc > 1 ? (int)strtol(argv[1], NULL, 10) : USUAL_SIDE};
    int rounds = argc > 2 ? (int)strtol(argv[2], NULL, 10) : USUAL_ROUNDS;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &m.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);
    if (nranks != RANKS || m.side < RANKS || m.side > 40000 || m.side % RANKS || rounds < 1)
        give_up("usage", "mpirun -n 4 mpi_row_col [SIDE [ROUNDS]], a side that is a multiple of 4");
    m.band = m.side / RANKS;
    size_t n = (size_t)m.band * (size_t)m.side;
    bus busses[WAYS] = {0};
    double *seconds[WAYS];
    parts p;
    make_parts(&p, &m);
    must("memory", tb_alloc(n * sizeof *m.rows, (void **)&m.rows));
    must("memory", tb_alloc(n * sizeof *m.columns, (void **)&m.columns));
    for (int way = 0; way < WAYS; way++) {
        seconds[way] = malloc((size_t)rounds * sizeof *seconds[way]);
        if (!seconds[way])
            give_up("memory", "there is none");
        if (transports[way])
            open_bus(&busses[way], &m, transports[way]);
    }
    for (size_t i = 0; i < n; i++)
        m.rows[i] = (uint32_t)((size_t)m.rank * n + i);

    for (int r = -WARM_UP; r < rounds; r++) {
        for (int way = 0; way < WAYS; way++) {
            if (r == rounds - 1)
                memset(m.columns, 0xa5, n * sizeof *m.columns);
            MPI_Barrier(MPI_COMM_WORLD);
            double start = now(), own, longest;
            if (transports[way])
                exchange_by_bus(&busses[way]);
            else
                exchange_by_mpi(&m, &p);
            own = now() - start;
            MPI_Allreduce(&own, &longest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
            if (r >= 0)
                seconds[way][r] = longest;
            if (r == rounds - 1)
                verify(&m);
        }
    }

    double rate[WAYS];
    for (int way = 0; way < WAYS; way++) {
        rate[way] = 4e-9 * m.side * m.side / median(seconds[way], (size_t)rounds);
        free(seconds[way]);
    }
    if (m.rank == 0)
        printf("{\"side\": %d, \"rounds\": %d, \"alltoallw_gbs\": %.3f, \"mpi_gbs\": %.3f, \"auto_gbs\": %.3f, "
               "\"mpi_ratio\": %.3f, \"auto_ratio\": %.3f}\n",
               m.side, rounds, rate[0], rate[1], rate[2], rate[1] / rate[0], rate[2] / rate[0]);
    MPI_Barrier(MPI_COMM_WORLD);
    for (int way = 0; way < WAYS; way++) {
        if (transports[way])
            close_bus(&busses[way]);
    }
    free_parts(&p);
    tb_free(m.rows);
    tb_free(m.columns);
    MPI_Finalize();
    return 0;
}
