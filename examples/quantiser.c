/* A quantiser that the library does not have, as a transform: f32 goes as one byte for each number and one scale for
 * each piece, and comes out as f32 again. A transform is for conversions between two programs that both have it;
 * formats of engines, and those on disk, are built in (`encode`). Two processes run here; the receiver checks the
 * rounding. */
#include <tensorbus/tensorbus.h>

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROWS = 64, COLUMNS = 48 };

static int64_t count(const tb_binding *part) {
    int64_t n = 1;
    for (int d = 0; d < part->shape.ndim; d++)
        n *= part->shape.dim[d];
    return n;
}

/* Element i of the piece, which lies with strides in this rank's tensor. */
static float *element(const tb_binding *part, int64_t i) {
    int64_t at = 0;
    for (int d = part->shape.ndim; d-- > 0; i /= part->shape.dim[d])
        at += i % part->shape.dim[d] * part->strides[d];
    return (float *)(void *)((char *)part->base + part->offset) + at;
}

/* On the wire: the scale, then a byte for each element. Both ends must say the same. */
static int64_t wire_nbytes(void *arg, const tb_transform_piece *piece) {
    int64_t n = 1;
    (void)arg;
    for (int d = 0; d < piece->ndim; d++)
        n *= piece->shape[d];
    return (int64_t)sizeof(float) + n;
}

static tb_status quantise(void *arg, const tb_transform_piece *piece, const tb_binding *part, void *wire) {
    float most = 0, scale;
    int8_t *out = (int8_t *)wire + sizeof scale;
    (void)arg;
    (void)piece;
    for (int64_t i = 0; i < count(part); i++)
        most = fmaxf(most, fabsf(*element(part, i)));
    scale = most > 0 ? most / 127 : 1;
    memcpy(wire, &scale, sizeof scale);
    for (int64_t i = 0; i < count(part); i++)
        out[i] = (int8_t)lrintf(*element(part, i) / scale);
    return TB_OK;
}

static tb_status restore(void *arg, const tb_transform_piece *piece, const tb_binding *part, const void *wire) {
    float scale;
    const int8_t *in = (const int8_t *)wire + sizeof scale;
    (void)arg;
    (void)piece;
    memcpy(&scale, wire, sizeof scale);
    for (int64_t i = 0; i < count(part); i++)
        *element(part, i) = (float)in[i] * scale;
    return TB_OK;
}

static float value(int i) {
    return sinf((float)i);
}

static int run(const char *url, bool sends) {
    static float matrix[ROWS * COLUMNS];
    tb_transform int8 = {
        .size = sizeof int8, .prepare_recv = wire_nbytes, .prepare_send = quantise, .finalize_recv = restore};
    tb_batch_opts opts = {.size = sizeof opts, .transform = &int8};
    tb_tensor w = {.size = sizeof w, .data = matrix, .dtype = TB_F32, .ndim = 2, .shape = {ROWS, COLUMNS}};
    tb_world *world = NULL;
    tb_pair *pair = NULL;
    tb_batch *batch = NULL;
    tb_transfer *transfer = NULL;
    for (int i = 0; sends && i < ROWS * COLUMNS; i++)
        matrix[i] = value(i);
    bool ok = tb_world_join(url, sends ? "trainer" : "engine", 0, 1, NULL, &world) == TB_OK &&
              tb_pair_create(world, "weights", sends ? "engine" : "trainer", "mesh=1 place=R", NULL, &pair) == TB_OK &&
              tb_batch_create(world, "step", &opts, &batch) == TB_OK && tb_batch_add(batch, pair, "w", &w) == TB_OK &&
              (sends ? tb_send : tb_recv)(batch, NULL, &transfer) == TB_OK &&
              tb_wait(transfer, TB_COMMITTED, -1) == TB_OK;
    if (!ok)
        fprintf(stderr, "%s\n", tb_error_detail());
    float worst = 0;
    for (int i = 0; i < ROWS * COLUMNS; i++)
        worst = fmaxf(worst, fabsf(matrix[i] - value(i)));
    if (ok && !sends)
        printf("largest error %.4f, half a step is %.4f\n", (double)worst, 0.5 / 127);
    ok = ok && worst <= 0.5F / 127 * 1.001F;
    tb_transfer_destroy(transfer);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    tb_world_destroy(world);
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}

int main(void) {
    char folder[] = "/tmp/quantiser-XXXXXX", url[64];
    int status = 0;
    if (!mkdtemp(folder))
        return EXIT_FAILURE;
    snprintf(url, sizeof url, "unix:%s/store", folder);
    pid_t pid = fork();
    if (pid == 0)
        exit(run(url, true));
    int received = run(url, false);
    waitpid(pid, &status, 0);
    rmdir(folder);
    return received == EXIT_SUCCESS && status == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
