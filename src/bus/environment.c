/* Finds a process's seat by the variables that `tensorbus run`, torchrun, MPI, Slurm and Kubernetes set. */
#include "bus/environment.h"

#include "base/text.h"
#include "device/host/kernel.h"

#include <inttypes.h>
#include <stdlib.h>

/* Who may have started this process: the innermost first, as one may be started by another. */
static const struct {
    const char *index, *size; /* NULL: it does not say */
} launchers[] = {
    {"TENSORBUS_INDEX", "TENSORBUS_SIZE"},
    {"RANK", "WORLD_SIZE"}, /* torchrun */
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    {"PMI_RANK", "PMI_SIZE"},                 /* MPICH */
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"}, /* SLURM_NTASKS is set in a batch script, too */
    {"LWS_WORKER_INDEX", "LWS_GROUP_SIZE"},   /* a LeaderWorkerSet of Kubernetes */
    {"JOB_COMPLETION_INDEX", NULL},           /* an indexed Job of Kubernetes */
};

enum { NLAUNCHERS = sizeof launchers / sizeof *launchers };

/* NULL: it is not set, or empty. */
static const char *get(const char *variable) {
    const char *text = variable ? getenv(variable) : NULL;
    return text && *text ? text : NULL;
}

static tb_status read_number(const char *variable, int32_t least, int32_t most, int32_t *out) {
    const char *text = get(variable), *at = text;
    int64_t number;
    if (!tb__read_int(&at, &number) || *at || number < least || number > most)
        return tb__fail(TB_INVALID, "%s in the environment: '%.40s' is not a number from %" PRId32 " to %" PRId32,
                        variable, text, least, most);
    *out = (int32_t)number;
    return TB_OK;
}

/* TENSORBUS_SIZE is the group's size whoever tells the index. */
static tb_status read_seat(tb__joining *joining) {
    const char *size = get(launchers[0].size) ? launchers[0].size : NULL, *index = NULL;
    for (int i = 0; i < NLAUNCHERS; i++) {
        if (!get(launchers[i].index))
            continue;
        index = launchers[i].index;
        size = size || !get(launchers[i].size) ? size : launchers[i].size;
        if (size)
            break;
    }
    if (!index)
        return tb__fail(TB_INVALID, "neither the call nor the environment tells this process's seat: set "
                                    "TENSORBUS_INDEX and TENSORBUS_SIZE, or start it by `tensorbus run`, torchrun, "
                                    "mpirun or srun");
    if (!size)
        return tb__fail(TB_INVALID, "%s is set, but nothing tells the size of the group: set TENSORBUS_SIZE", index);
    TB_TRY(read_number(size, 1, TB_MAX_RANKS, &joining->size));
    return read_number(index, 0, joining->size - 1, &joining->index);
}

tb_status tb__joining_read(tb__joining *joining) {
    const char *agent = get("TENSORBUS_AGENT"), *token = get("TENSORBUS_TOKEN_FILE");
    if (!joining->url) {
        joining->url = get("TENSORBUS_STORE");
        joining->agent = agent;
        if (!joining->url && !agent)
            return tb__fail(TB_INVALID,
                            "neither the call nor the environment tells where processes meet: set "
                            "TENSORBUS_STORE to the URL of a store, or start the process by `tensorbus run`");
        if (!joining->token && token) {
            tb_status status = tb__token_read(token, joining->token_text);
            if (status != TB_OK)
                return tb__fail_within(status, "TENSORBUS_TOKEN_FILE in the environment");
            joining->token = joining->token_text;
        }
    }
    if (joining->agent)
        return TB_OK;
    if (!joining->group && !(joining->group = get("TENSORBUS_GROUP")))
        return tb__fail(TB_INVALID, "neither the call nor the environment tells this process's group: set "
                                    "TENSORBUS_GROUP, or start it by `tensorbus run`");
    return joining->size == 0 ? read_seat(joining) : TB_OK;
}

tb_status tb__environment_apply(void) {
    const char *copy = get("TENSORBUS_COPY");
    tb_status status = copy ? tb__kernels_select(copy) : TB_OK;
    return status == TB_OK ? TB_OK : tb__fail_within(status, "TENSORBUS_COPY in the environment");
}
