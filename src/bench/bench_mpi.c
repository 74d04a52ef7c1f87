/* Worlds of an MPI job, next to MPI_Alltoallw: bench/mpi_row_col, which is a program of its own, as it is MPI that
 * starts its processes. One is built for each MPI that was there. */
#include "bench/bench.h"

#include <stdio.h>
#include <string.h>

enum { RANKS = 4 };

static const struct {
    const char *program;
    const char *launchers[2]; /* Debian's name, where there are several MPIs, and the usual one */
} builds[] = {
    {"mpi_row_col_openmpi", {"mpirun.openmpi", "mpirun"}},
    {"mpi_row_col_mpich", {"mpiexec.mpich", "mpiexec"}},
};

static const char not_built[] = "tensorbus was built without MPI: apt-get install libopenmpi-dev, and build it again";
static const char missing[] = "the MPI that it was built with is not installed: apt-get install openmpi-bin, or mpich";

/* A side that every rank has an equal share of. */
static int64_t side_of(int64_t size) {
    int64_t side = RANKS;
    while ((side + RANKS) * (side + RANKS) * (int64_t)sizeof(float) <= size)
        side += RANKS;
    return side;
}

static bool is_missing(const tb__text *reason) {
    return reason->data && strcmp(reason->data, missing) == 0;
}

static tb_status launch(size_t build, const char *program, int64_t size, int rounds, tool_guard *guard, tb__text *said,
                        tb__text *reason) {
    char side[24], count[24], folder[80];
    tb_status status = TB_OK;
    snprintf(side, sizeof side, "%lld", (long long)side_of(size));
    snprintf(count, sizeof count, "%d", rounds);
    TB_TRY(tool_folder_make(folder, sizeof folder));
    for (int i = 0; i < 2 && status == TB_OK; i++) {
        const char *const argv[] = {builds[build].launchers[i], "-n", "4", program, side, count, NULL};
        tb__text_fini(reason);
        *reason = (tb__text){0};
        status = bench_program_run(argv, folder, guard, missing, said, reason);
        if (!is_missing(reason))
            break;
    }
    tool_folder_remove(folder);
    return status;
}

/* The line of JSON, whatever MPI has said before it. */
static void read_rates(const tb__text *said, bench_mpi_rates *out, tb__text *reason) {
    const char *line = said->data ? strstr(said->data, "{\"side\"") : NULL;
    json_t *told = line ? json_loads(line, JSON_DISABLE_EOF_CHECK, NULL) : NULL;
    out->alltoallw = json_number_value(json_object_get(told, "alltoallw_gbs"));
    out->mpi = json_number_value(json_object_get(told, "mpi_gbs"));
    out->automatic = json_number_value(json_object_get(told, "auto_gbs"));
    json_decref(told);
    if (out->alltoallw <= 0 || out->mpi <= 0 || out->automatic <= 0)
        tb__text_add(reason, "it told no rates");
}

tb_status bench_mpi_run(int64_t size, int rounds, tool_guard *guard, bench_mpi_rates *out, char **why) {
    char program[640];
    tb__text said = {0}, reason = {0};
    tb_status status = TB_OK;
    bool is_any = false;
    /* The first whose MPI is there. */
    for (size_t i = 0; i < sizeof builds / sizeof *builds && status == TB_OK && (!is_any || is_missing(&reason)); i++) {
        if (!bench_find_file(builds[i].program, program, sizeof program))
            continue;
        is_any = true;
        status = launch(i, program, size, rounds, guard, &said, &reason);
    }
    if (!is_any)
        tb__text_add(&reason, "%s", not_built);
    if (status == TB_OK && reason.count == 0)
        read_rates(&said, out, &reason);
    if (status == TB_OK && reason.count > 0)
        status = tb__text_take(&reason, why);
    tb__text_fini(&said);
    tb__text_fini(&reason);
    return status;
}
