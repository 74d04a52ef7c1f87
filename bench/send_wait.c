/* What it takes to send a small batch that is registered, from one process to another: tb_send, and tb_wait until it is
 * committed.
 *
 *     send_wait [COUNT]
 *
 * Prints the median and the quartiles of COUNT (2000) transfers, in microseconds. */
#include "measure.h"

#include "tensorbus/tensorbus.h"

#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

static void check(tb_status status, const char *what) {
    if (status == TB_OK)
        return;
    fprintf(stderr, "send_wait: %s: %s\n", what, tb_error_detail());
    exit(1);
}

static void move(bool sends, const char *url, int count, double *seconds) {
    tb_world *world;
    tb_pair *pair;
    tb_batch *batch;
    void *data;
    check(tb_world_join(url, sends ? "trainer" : "engine", 0, 1, NULL, &world), "join");
    check(tb_pair_create(world, "pair", sends ? "engine" : "trainer", "mesh=1 place=R", NULL, &pair), "pair");
    check(tb_batch_create(world, "batch", NULL, &batch), "batch");
    check(tb_alloc(4096, &data), "alloc");
    tb_tensor tensor = {.size = sizeof tensor, .data = data, .dtype = TB_F32, .ndim = 1, .shape = {1024}};
    check(tb_batch_add(batch, pair, "w", &tensor), "add");
    check(tb_batch_register(batch, 0), "register");
    for (int i = 0; i < count; i++) {
        tb_transfer *transfer = NULL;
        double start = now();
        check((sends ? tb_send : tb_recv)(batch, NULL, &transfer), "begin");
        check(tb_wait(transfer, TB_COMMITTED, -1), "wait");
        tb_transfer_destroy(transfer);
        if (seconds)
            seconds[i] = now() - start;
    }
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    tb_world_destroy(world);
    tb_free(data);
}

int main(int argc, char **argv) {
    int count = argc > 1 ? atoi(argv[1]) : 2000;
    double *seconds = count > 0 ? malloc((size_t)count * sizeof *seconds) : NULL;
    char url[64];
    int status = 1;
    if (!seconds) {
        fprintf(stderr, "usage: send_wait [COUNT]\n");
        return 2;
    }
    snprintf(url, sizeof url, "unix:/tmp/tb-send-wait-%d.sock", (int)getpid());
    pid_t child = fork();
    move(child != 0, url, count, child ? seconds : NULL);
    if (child == 0)
        exit(0);
    bool is_good = waitpid(child, &status, 0) == child && status == 0;
    if (is_good) {
        double middle = 1e6 * median(seconds, (size_t)count);
        printf("us %.1f %.1f %.1f\n", middle, 1e6 * seconds[count / 4], 1e6 * seconds[3 * count / 4]);
    }
    free(seconds);
    return !is_good;
}
