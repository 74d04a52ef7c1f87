/* The small job of docs/coming-from.md, as Megatron-LM's users would write it here. Two processes train a layer whose
 * rows they share; two others serve it, each with all of it, in MXFP8. For every version the weights are resharded, and
 * then the first trainer tells the others which version it was, through the copy service. */
#include <tensorbus/tensorbus.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TRAINERS = 2, ENGINES = 2, ALL = TRAINERS + ENGINES, ROWS = 64, COLUMNS = 96, BLOCK = 32, TIMEOUT_MS = 20000 };

typedef struct process {
    int rank; /* trainers first */
    float *weight;
    unsigned char *data, *scales; /* what an engine has instead */
    tb_world *world;
    tb_pair *pair;
    tb_batch *batch;
    tb_copy *service;
} process;

static bool is_trainer(const process *me) {
    return me->rank < TRAINERS;
}

/* Whole numbers up to 7 are the same in MXFP8, whatever the scale of their block. */
static float value(int version, int row, int column) {
    return (float)((row * 31 + column * 17 + version * 5) % 15 - 7);
}

static float from_f8e4m3(unsigned char x) {
    int exponent = x >> 3 & 15, mantissa = x & 7;
    float f = exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
    return x & 128 ? -f : f;
}

static tb_status set_up(process *me, const char *url) {
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = TIMEOUT_MS};
    tb_copy_opts copying = {.size = sizeof copying, .timeout_ms = TIMEOUT_MS};
    tb_tensor weight = {.size = sizeof weight, .dtype = TB_F32, .ndim = 2, .shape = {ROWS, COLUMNS}};
    tb_status status =
        tb_world_join(url, is_trainer(me) ? "trainer" : "engine", is_trainer(me) ? me->rank : me->rank - TRAINERS,
                      is_trainer(me) ? TRAINERS : ENGINES, &opts, &me->world);
    if (status == TB_OK)
        status = tb_pair_create(me->world, "weights", is_trainer(me) ? "engine" : "trainer",
                                is_trainer(me) ? "mesh=2 place=Shard(0)" : "mesh=2 place=Replicate", NULL, &me->pair);
    if (status == TB_OK)
        status = tb_batch_create(me->world, "model", NULL, &me->batch);
    if (status == TB_OK && is_trainer(me)) {
        status = tb_alloc(sizeof(float) * ROWS / TRAINERS * COLUMNS, (void **)&me->weight);
        weight.data = me->weight;
    } else if (status == TB_OK) { /* the engine keeps its memory: it is written in place, version after version */
        weight.data = me->data = malloc((size_t)ROWS * COLUMNS);
        weight.scales = me->scales = malloc((size_t)ROWS * COLUMNS / BLOCK);
        weight.dtype = TB_F8E4M3;
        weight.encode = "mxfp8";
        status = me->data && me->scales ? TB_OK : tb_error_set(TB_NO_MEMORY, "there is no memory for the weights");
    }
    if (status == TB_OK)
        status = tb_batch_add(me->batch, me->pair, "w", &weight);
    if (status == TB_OK)
        status = tb_world_enter(me->world, "all", me->rank, ALL);
    return status == TB_OK ? tb_copy_open(me->world, "numbers", "all", &copying, &me->service) : status;
}

/* Rank 0 sends, the others receive; what belongs together has one task id. All run, also those with nothing to do. */
static tb_status tell(process *me, int64_t *number) {
    tb_copy_view view = {.size = sizeof view, .data = number, .dtype = TB_I64, .ndim = 1, .shape = {1}};
    tb_status status = TB_OK;
    for (int32_t to = 1; to < ALL && status == TB_OK; to++) {
        if (me->rank == 0)
            status = tb_copy_submit_send(me->service, &view, 1, to, (uint64_t)to);
        else if (me->rank == to)
            status = tb_copy_submit_recv(me->service, &view, 1, 0, (uint64_t)to);
    }
    return status == TB_OK ? tb_copy_run(me->service, TIMEOUT_MS) : status;
}

static tb_status move(process *me, int version, int *wrong) {
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = TIMEOUT_MS};
    int64_t number = me->rank == 0 ? version : -1;
    for (int i = 0; is_trainer(me) && i < ROWS / TRAINERS * COLUMNS; i++)
        me->weight[i] = value(version, me->rank * (ROWS / TRAINERS) + i / COLUMNS, i % COLUMNS);
    tb_status status = tb_reshard_execute(me->batch, "trainer", &opts, NULL, NULL);
    if (status == TB_OK)
        status = tell(me, &number);
    if (status != TB_OK)
        return status;
    *wrong += number != version;
    for (int i = 0; !is_trainer(me) && i < ROWS * COLUMNS; i++) {
        float f = ldexpf(from_f8e4m3(me->data[i]), me->scales[i / BLOCK] - 127); /* COLUMNS is a multiple of BLOCK */
        *wrong += f != value(version, i / COLUMNS, i % COLUMNS);
    }
    printf("rank %d: version %d, %s\n", me->rank, version, *wrong ? "not all right" : "all right");
    return TB_OK;
}

static int run(const char *url, int rank) {
    process me = {.rank = rank};
    int wrong = 0;
    tb_status status = set_up(&me, url);
    for (int version = 1; version <= 3 && status == TB_OK; version++)
        status = move(&me, version, &wrong);
    if (status != TB_OK)
        fprintf(stderr, "rank %d: %s\n", rank, tb_error_detail());
    tb_copy_close(me.service);
    tb_batch_destroy(me.batch);
    tb_pair_destroy(me.pair);
    tb_world_destroy(me.world);
    tb_free(me.weight);
    free(me.data);
    free(me.scales);
    return status == TB_OK && wrong == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

int main(void) {
    char folder[] = "/tmp/from_megatron-XXXXXX", url[64];
    int failures = 0, status;
    if (!mkdtemp(folder))
        return EXIT_FAILURE;
    snprintf(url, sizeof url, "unix:%s/store", folder);
    for (int rank = 0; rank < ALL; rank++) {
        pid_t pid = fork();
        if (pid == 0)
            exit(run(url, rank));
        failures += pid < 0;
    }
    while (wait(&status) > 0)
        failures += status != 0;
    rmdir(folder); /* whoever served the store has removed its socket */
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
