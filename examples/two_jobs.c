/* Two programs that know nothing of each other but where to meet. A trainer has a matrix cut by rows over two
 * processes, an inference engine wants it cut by columns over two others. Start them in any order, as
 * "two_jobs trainer 0", "two_jobs trainer 1", "two_jobs inference 0" and "two_jobs inference 1"; or by
 * "tensorbus run --groups trainer=2,inference=2 -- two_jobs", which tells each its seat; alone and without arguments it
 * starts all four. */
#include <tensorbus/tensorbus.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROWS = 600, COLUMNS = 400, SEATS = 2 };

/* `url` and `job` may be NULL, and `size` 0: the environment tells them. */
static int run_job(const char *url, const char *job, int32_t index, int32_t size) {
    tb_world *world = NULL;
    if (tb_world_join(url, job, index, size, NULL, &world) != TB_OK) {
        fprintf(stderr, "%s\n", tb_error_detail());
        return EXIT_FAILURE;
    }
    tb_world_seat(world, &job, &index, &size);
    bool is_trainer = strcmp(job, "trainer") == 0;
    int rows = is_trainer ? ROWS / SEATS : ROWS, columns = is_trainer ? COLUMNS : COLUMNS / SEATS;
    int first = index * (is_trainer ? rows * COLUMNS : columns); /* where this process's part begins in the matrix */

    /* Say how this side lays its tensors out, name what travels together: once in a program's life, like the seat. */
    void *memory = NULL;
    tb_pair *pair = NULL;
    tb_batch *batch = NULL;
    tb_transfer *transfer = NULL;
    const char *remote = is_trainer ? "inference" : "trainer";
    const char *layout = is_trainer ? "mesh=2 place=Shard(0)" : "mesh=2 place=Shard(1)";
    bool ok = tb_pair_create(world, "weights", remote, layout, NULL, &pair) == TB_OK &&
              tb_batch_create(world, "step", NULL, &batch) == TB_OK &&
              /* any memory will do; peers can read this kind in place */
              tb_alloc(sizeof(float) * (size_t)(rows * columns), &memory) == TB_OK;
    tb_tensor matrix = {.size = sizeof matrix,
                        .data = memory,
                        .dtype = TB_F32,
                        .ndim = 2,
                        .shape = {ROWS, COLUMNS}}; /* the global shape */
    ok = ok && tb_batch_add(batch, pair, "w", &matrix) == TB_OK;

    /* Move it. A real program does this for every version. Waits have deadlines, 30 seconds by default. */
    float *part = memory;
    for (int i = 0; ok && is_trainer && i < rows * columns; i++)
        part[i] = (float)(first + i);
    ok = ok && (is_trainer ? tb_send : tb_recv)(batch, NULL, &transfer) == TB_OK &&
         tb_wait(transfer, TB_COMMITTED, -1) == TB_OK;
    if (!ok)
        fprintf(stderr, "%s %d: %s\n", job, index, tb_error_detail());
    for (int i = 0; ok && !is_trainer && i < rows * columns; i++) {
        int row = i / columns, column = i % columns;
        ok = part[i] == (float)(first + row * COLUMNS + column);
    }
    printf("%s %d: %d x %d elements, %s\n", job, index, rows, columns, ok ? "all right" : "not all right");

    tb_transfer_destroy(transfer); /* last made, first destroyed; NULL is fine */
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    tb_world_destroy(world);
    tb_free(memory);
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* A process may fork before it uses the bus, not after. */
static int run_all(void) {
    char folder[] = "/tmp/two_jobs-XXXXXX", url[64];
    int failures = 0, status;
    if (!mkdtemp(folder))
        return EXIT_FAILURE;
    snprintf(url, sizeof url, "unix:%s/store", folder);
    for (int i = 0; i < 2 * SEATS; i++) {
        pid_t pid = fork();
        if (pid == 0)
            exit(run_job(url, i % 2 ? "trainer" : "inference", i / 2, SEATS));
        failures += pid < 0;
    }
    while (wait(&status) > 0)
        failures += status != 0;
    rmdir(folder); /* whoever served the store has removed its socket */
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}

int main(int argc, char **argv) {
    if (argc == 3)
        return run_job("unix:/tmp/two_jobs.sock", argv[1], (int32_t)strtol(argv[2], NULL, 10), SEATS);
    return getenv("TENSORBUS_GROUP") ? run_job(NULL, NULL, 0, 0) : run_all();
}
