/* 64 tensors of 512 bytes between two processes, through one pair and through 64. Buckets are a pair's own, so with 64
 * pairs none has more than one of the tensors; one pair with every tensor alone in its bucket tells what of the
 * difference that is. What a transfer takes, from its start until it is committed. */
#include "tensorbus/tensorbus.h"

#include "measure.h"

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TENSORS = 64, ELEMENTS = 128, WARM_UP = 20, ROUNDS = 300 };

static void must(tb_status status, const char *what) {
    if (status == TB_OK)
        return;
    fprintf(stderr, "%s: %s\n", what, tb_error_detail());
    exit(1);
}

static float value(int round, int tensor, int i) {
    return (float)(round * 100000 + tensor * 1000 + i);
}

static void move(tb_batch *batch, bool is_send, float (*data)[ELEMENTS], int round) {
    tb_transfer *t = NULL;
    must((is_send ? tb_send : tb_recv)(batch, NULL, &t), "transfer");
    must(tb_wait(t, TB_COMMITTED, -1), "wait");
    tb_transfer_destroy(t);
    for (int k = 0; k < TENSORS; k++) {
        for (int i = 0; i < ELEMENTS; i++) {
            if (data[k][i] != value(round, k, i)) {
                fprintf(stderr, "tensor %d is not that of round %d\n", k, round);
                exit(1);
            }
        }
    }
}

static double measure(tb_world *world, bool is_send, int npairs, bool staged, int64_t bucket_size) {
    static double seconds[ROUNDS];
    float(*data)[ELEMENTS];
    tb_pair *pairs[TENSORS];
    tb_batch *batch;
    tb_batch_opts opts = {.size = sizeof opts, .staged = staged, .bucket_size = bucket_size};
    tb_pair_opts at_once = {.size = sizeof at_once, .no_wait = true};
    char name[32];
    must(tb_alloc(TENSORS * sizeof *data, (void **)&data), "memory");
    must(tb_batch_create(world, "b", &opts, &batch), "batch");
    for (int i = 0; i < npairs; i++) {
        snprintf(name, sizeof name, "p%d", i);
        must(tb_pair_create(world, name, is_send ? "target" : "source", "mesh=1 place=R", &at_once, &pairs[i]), "pair");
    }
    for (int k = 0; k < TENSORS; k++) {
        tb_tensor t = {.size = sizeof t, .data = data[k], .dtype = TB_F32, .ndim = 1, .shape = {ELEMENTS}};
        snprintf(name, sizeof name, "w%d", k);
        must(tb_batch_add(batch, pairs[k % npairs], name, &t), "tensor");
    }
    must(tb_batch_register(batch, 0), "register");
    for (int round = -WARM_UP; round < ROUNDS; round++) {
        for (int k = 0; k < TENSORS; k++) {
            for (int i = 0; i < ELEMENTS; i++)
                data[k][i] = is_send ? value(round, k, i) : -1;
        }
        double begun = now();
        move(batch, is_send, data, round);
        if (round >= 0)
            seconds[round] = now() - begun;
    }
    tb_batch_destroy(batch);
    for (int i = 0; i < npairs; i++)
        tb_pair_destroy(pairs[i]);
    tb_free(data);
    return median(seconds, ROUNDS);
}

static void run(const char *url, bool is_send) {
    tb_world *world;
    must(tb_world_join(url, is_send ? "source" : "target", 0, 1, NULL, &world), "join");
    for (int staged = 0; staged < 2; staged++) {
        double one = measure(world, is_send, 1, staged, 0), alone = measure(world, is_send, 1, staged, 1);
        double many = measure(world, is_send, TENSORS, staged, 0);
        if (is_send)
            printf("  %s, %d tensors of %zu bytes: %.0f us through 1 pair, %.0f us in buckets of their own, %.0f us "
                   "through %d pairs\n",
                   staged ? "staged" : "read in place", TENSORS, ELEMENTS * sizeof(float), 1e6 * one, 1e6 * alone,
                   1e6 * many, TENSORS);
    }
    tb_world_destroy(world);
}

int main(void) {
    char folder[] = "/tmp/tb-bench-XXXXXX", url[64];
    int status = 1;
    if (!mkdtemp(folder))
        return 1;
    snprintf(url, sizeof url, "unix:%s/s", folder);
    pid_t target = fork();
    if (target == 0) {
        run(url, false);
        return 0;
    }
    run(url, true);
    bool is_good = target > 0 && waitpid(target, &status, 0) == target && status == 0;
    rmdir(folder);
    return is_good ? 0 : 1;
}
