/* What `tensorbus bench` measures as row_col, done with MPI: ranks 0 to 3 hold bands of rows of a matrix of floats, and
 * ranks 4 to 7 get blocks of its columns, by one MPI_Alltoallw.
 *
 *     mpicc -O3 -o row_col_mpi row_col_mpi.c && mpirun -np 8 --oversubscribe ./row_col_mpi ROWS COLUMNS ROUNDS
 *
 * Prints "GB/s RATE", the median over the rounds, after two that are not counted. The last round is verified. */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIDE = 4, RANKS = 2 * SIDE, WARM_UP = 2 };

static int compare_doubles(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static _Noreturn void give_up(const char *sentence) {
    fprintf(stderr, "row_col_mpi: %s\n", sentence);
    MPI_Abort(MPI_COMM_WORLD, 1);
    abort();
}

int main(int argc, char **argv) {
    int rank, nranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);
    int rows = argc > 1 ? atoi(argv[1]) : 0, columns = argc > 2 ? atoi(argv[2]) : 0;
    int rounds = argc > 3 ? atoi(argv[3]) : 0;
    if (nranks != RANKS || rows < SIDE || columns < SIDE || rows % SIDE || columns % SIDE || rounds < 1)
        give_up("usage: mpirun -np 8 row_col_mpi ROWS COLUMNS ROUNDS, both multiples of 4");
    if ((double)rows * columns / SIDE * sizeof(float) > INT32_MAX)
        give_up("a rank's part is beyond 2 GiB, and displacements are ints");
    int is_source = rank < SIDE, index = rank % SIDE, band = rows / SIDE, block = columns / SIDE;
    size_t n = (size_t)band * (size_t)columns; /* elements of a band, and of a block of columns */

    void *data = malloc(n * sizeof(float));
    double *seconds = malloc((size_t)rounds * sizeof *seconds);
    if (!data || !seconds)
        give_up("out of memory");
    uint32_t *word = data;
    for (size_t i = 0; i < n; i++)
        word[i] = is_source ? (uint32_t)((size_t)index * n + i) : 0;

    /* A band's part for one target is `block` wide; at the target, the part of one band is one piece. */
    int sizes[2] = {band, columns}, part[2] = {band, block};
    int send_counts[RANKS] = {0}, recv_counts[RANKS] = {0}, send_at[RANKS] = {0}, recv_at[RANKS] = {0};
    MPI_Datatype send_types[RANKS], recv_types[RANKS], piece;
    MPI_Type_contiguous(band * block, MPI_FLOAT, &piece);
    MPI_Type_commit(&piece);
    for (int i = 0; i < RANKS; i++) {
        int start[2] = {0, i % SIDE * block};
        MPI_Type_create_subarray(2, sizes, part, start, MPI_ORDER_C, MPI_FLOAT, &send_types[i]);
        MPI_Type_commit(&send_types[i]);
        recv_types[i] = piece;
        send_counts[i] = is_source && i >= SIDE;
        recv_counts[i] = !is_source && i < SIDE;
        recv_at[i] = recv_counts[i] ? i * band * block * (int)sizeof(float) : 0;
    }

    for (int r = -WARM_UP; r < rounds; r++) {
        if (r == rounds - 1 && !is_source)
            memset(data, 0xa5, n * sizeof(float));
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime(), own, longest;
        MPI_Alltoallw(data, send_counts, send_at, send_types, data, recv_counts, recv_at, recv_types, MPI_COMM_WORLD);
        own = MPI_Wtime() - start;
        MPI_Allreduce(&own, &longest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        if (r >= 0)
            seconds[r] = longest;
    }

    for (int s = 0; s < SIDE && !is_source; s++) {
        for (int i = 0; i < band * block; i++) {
            size_t row = (size_t)s * (size_t)band + (size_t)(i / block), column = (size_t)(index * block + i % block);
            if (word[(size_t)s * (size_t)band * (size_t)block + (size_t)i] !=
                (uint32_t)(row * (size_t)columns + column))
                give_up("a wrong element arrived");
        }
    }
    int is_right = 1;
    MPI_Allreduce(MPI_IN_PLACE, &is_right, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD); /* all have verified */
    if (rank == 0) {
        qsort(seconds, (size_t)rounds, sizeof *seconds, compare_doubles);
        printf("GB/s %.3f\n", 1e-9 * 4 * (double)rows * columns / seconds[rounds / 2]);
    }
    free(data);
    free(seconds);
    MPI_Finalize();
    return 0;
}
