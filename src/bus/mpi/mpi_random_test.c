/* Random batches between the ranks of an MPI job, over MPI alone. Started by mpirun or mpiexec with four ranks. */
#include "tensorbus/mpi.h"

#include "../tests/support/random_case.h"
#include "../tests/support/random_worker.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { USUAL_CASES = 100 };
#else
enum { USUAL_CASES = 200 };
#endif

static int my_rank;

static void barrier(void) {
    MPI_Barrier(MPI_COMM_WORLD);
}

static bool is_first_to_fail(void) {
    return true;
}

static _Noreturn void give_up(void) {
    MPI_Abort(MPI_COMM_WORLD, 1);
    abort();
}

/* All ranks are in one world. Which groups they are in, and on which seats, is up to the case. */
static tb_status join(const char *group, int32_t seat, int32_t nseats, const char *host, tb_world **out) {
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = RANDOM_PATIENCE_MS, .transport = "mpi", .host = host};
    tb_world *world = NULL;
    tb_status status = tb_world_from_mpi(MPI_COMM_WORLD, "all", &opts, &world);
    if (status == TB_OK)
        status = tb_world_enter(world, group, seat, nseats);
    *out = world;
    return status;
}

int main(int argc, char **argv) {
    int level, nranks;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &my_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);
    /* Each would draw a seed of its own. */
    uint64_t seed = my_rank == 0 ? test_seed() : 0;
    int64_t ncases = test_cases(USUAL_CASES);
    MPI_Bcast(&seed, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
    random_pool pool = {.number = my_rank,
                        .nworkers = nranks,
                        .barrier = barrier,
                        .join = join,
                        .is_first_to_fail = is_first_to_fail,
                        .give_up = give_up};
    if (nranks != 4) {
        fprintf(stderr, "it takes four ranks\n");
        give_up();
    }
    random_work(&pool, seed, ncases);
    if (my_rank == 0)
        printf("%" PRId64 " random batches\n", ncases);
    MPI_Finalize();
    return 0;
}
