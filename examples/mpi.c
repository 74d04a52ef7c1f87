/* An MPI program whose first half has a matrix cut by rows, and whose second half wants it cut by columns. Start it
 * with any even number of ranks: mpirun -n 4 mpi. */
#include <tensorbus/mpi.h>

#include <stdio.h>
#include <stdlib.h>

enum { SIDE = 840 }; /* rows and columns; divided by all numbers of ranks up to eight */

int main(int argc, char **argv) {
    int level, rank, nranks;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level); /* the world has a thread that calls MPI */
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);
    int half = nranks / 2;
    if (nranks % 2 || half < 1 || SIDE % half) {
        fprintf(stderr, "start it with 2, 4, 6 or 8 ranks\n");
        MPI_Finalize();
        return EXIT_FAILURE;
    }
    int index = rank % half;
    bool is_trainer = rank < half;
    int rows = is_trainer ? SIDE / half : SIDE, columns = is_trainer ? SIDE : SIDE / half;
    int first = index * (is_trainer ? rows * SIDE : columns); /* where this rank's part begins in the matrix */

    /* All ranks are the seats of one group. Each takes a seat in its half, too, and speaks for that. */
    void *memory = NULL;
    tb_world *world = NULL;
    tb_pair *pair = NULL;
    tb_batch *batch = NULL;
    tb_transfer *transfer = NULL;
    const char *group = is_trainer ? "trainer" : "inference", *remote = is_trainer ? "inference" : "trainer";
    char layout[64];
    snprintf(layout, sizeof layout, "mesh=%d place=Shard(%d)", half, is_trainer ? 0 : 1);
    tb_pair_opts as_half = {.size = sizeof as_half, .group = group};
    bool ok = tb_world_from_mpi(MPI_COMM_WORLD, "all", NULL, &world) == TB_OK &&
              tb_world_enter(world, group, index, half) == TB_OK &&
              tb_pair_create(world, "weights", remote, layout, &as_half, &pair) == TB_OK &&
              tb_batch_create(world, "step", NULL, &batch) == TB_OK &&
              tb_alloc(sizeof(float) * (size_t)(rows * columns), &memory) == TB_OK;
    tb_tensor matrix = {.size = sizeof matrix, .data = memory, .dtype = TB_F32, .ndim = 2, .shape = {SIDE, SIDE}};
    ok = ok && tb_batch_add(batch, pair, "w", &matrix) == TB_OK;

    float *part = memory;
    for (int i = 0; ok && is_trainer && i < rows * columns; i++)
        part[i] = (float)(first + i);
    ok = ok && (is_trainer ? tb_send : tb_recv)(batch, NULL, &transfer) == TB_OK;

    /* The program's own messages go on meanwhile. */
    int sum = 0;
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);

    ok = ok && tb_wait(transfer, TB_COMMITTED, -1) == TB_OK;
    if (!ok)
        fprintf(stderr, "%s %d: %s\n", group, index, tb_error_detail());
    for (int i = 0; ok && !is_trainer && i < rows * columns; i++) {
        int row = i / columns, column = i % columns;
        ok = part[i] == (float)(first + row * SIDE + column);
    }
    printf("%s %d: %d x %d elements, %s\n", group, index, rows, columns, ok ? "all right" : "not all right");

    /* Whoever leaves is lost to those who are not through yet. And the world goes before MPI does. */
    MPI_Barrier(MPI_COMM_WORLD);
    tb_transfer_destroy(transfer);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    tb_world_destroy(world);
    tb_free(memory);
    MPI_Finalize();
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}
