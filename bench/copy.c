/* How fast copies are, next to plain memcpy by the same number of threads on memory that is as warm, in the same run.
 * Figures are of traffic: bytes read and written. Each line takes turns with memcpy; medians of five. An argument picks
 * the lines that contain it. */
#include "measure.h"

#include "device/host/move.h"
#include "device/host/workers.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { REPEATS = 5, SIDE = 16384, MANY = 4096 };
#define MIB ((size_t)1 << 20)

static char *src, *dst; /* 1 GiB each, and a little */
static const char *picked = "";

typedef struct half {
    char *dst;
    const char *src;
    size_t nbytes;
} half;

static void *copy_half(void *arg) {
    const half *h = arg;
    memcpy(h->dst, h->src, h->nbytes);
    return NULL;
}

/* What the library is compared with. */
static void plain(size_t nbytes, int threads) {
    if (threads == 1) {
        memcpy(dst, src, nbytes);
        return;
    }
    pthread_t other;
    half h = {dst + nbytes / 2, src + nbytes / 2, nbytes - nbytes / 2};
    if (pthread_create(&other, NULL, copy_half, &h) != 0)
        exit(1);
    memcpy(dst, src, nbytes / 2);
    pthread_join(other, NULL);
}

static void run(const tb__move *copies, size_t n) {
    if (tb__moves_run(copies, n) != TB_OK) {
        fprintf(stderr, "bench/copy: %s\n", tb_error_detail());
        exit(1);
    }
}

/* `wanted` is the ratio that the line must reach with one thread; 0: any. */
static bool measure(const char *what, const tb__move *copies, size_t n, double wanted) {
    double traffic = 0;
    bool ok = true;
    if (!strstr(what, picked))
        return true;
    for (size_t i = 0; i < n; i++)
        traffic += (double)tb__move_traffic(&copies[i]);
    printf("  %-44s", what);
    for (int threads = 1; threads <= 2; threads++) {
        tb__workers_set(threads);
        size_t reference = 512 * MIB;
        double ours[REPEATS], theirs[REPEATS];
        run(copies, n);
        for (int r = 0; r < REPEATS; r++) {
            double start = now();
            plain(reference, threads);
            theirs[r] = now() - start;
            start = now();
            run(copies, n);
            ours[r] = now() - start;
        }
        double rate = traffic / median(ours, REPEATS), memcpy_rate = 2 * (double)reference / median(theirs, REPEATS);
        printf("  %6.2f GB/s %5.2f", 1e-9 * rate, rate / memcpy_rate);
        ok = ok && (threads > 1 || rate >= wanted * memcpy_rate);
    }
    if (wanted > 0)
        printf("  (at least %.2f) %s", wanted, ok ? "ok" : "TOO SLOW");
    printf("\n");
    return ok;
}

static const void *sources[4];
static int64_t strides[4][TB_MAX_DIMS];

/* rows x columns elements, row-major at the destination; one source whose rows lie `step` elements apart. */
static tb__move matrix(int64_t rows, int64_t columns, int64_t step, tb_dtype from, tb_dtype to) {
    sources[0] = src;
    strides[0][0] = step;
    strides[0][1] = 1;
    return (tb__move){
        .ndim = 2,
        .len = {rows, columns},
        .dst = dst,
        .dst_stride = {columns, 1},
        .nsrc = 1,
        .src = sources,
        .src_stride = (const int64_t(*)[TB_MAX_DIMS])strides,
        .src_dtype = from,
        .wire_dtype = to,
        .dst_dtype = to,
    };
}

static bool runs(void) {
    printf("plain copies: traffic, and its ratio to memcpy's, with 1 thread and with 2\n");
    tb__move c = matrix(1, 128 * MIB, 0, TB_F32, TB_F32);
    bool ok = measure("contiguous, 512 MiB", &c, 1, 0.95);
    c = matrix(SIDE, SIDE / 4, SIDE, TB_F32, TB_F32);
    ok = measure("a quarter of the columns of [16384, 16384]", &c, 1, 0.95) && ok;
    strides[0][0] = SIDE / 4;
    c.dst_stride[0] = SIDE;
    ok = measure("the same, the other way", &c, 1, 0.95) && ok;
    static const int64_t sizes[] = {256, 64, 8};
    for (int i = 0; i < 3; i++) {
        char what[64];
        int64_t run = sizes[i] / 4, rows = (int64_t)(64 * MIB) / sizes[i];
        snprintf(what, sizeof what, "runs of %" PRId64 " B, every fourth, packed", sizes[i]);
        c = matrix(rows, run, 4 * run, TB_F32, TB_F32);
        ok = measure(what, &c, 1, 0) && ok;
        snprintf(what, sizeof what, "runs of %" PRId64 " B, unpacked", sizes[i]);
        strides[0][0] = run;
        c.dst_stride[0] = 4 * run;
        ok = measure(what, &c, 1, 0) && ok;
    }
    c = matrix(8192, 8192, 1, TB_F32, TB_F32);
    strides[0][1] = 8192;
    ok = measure("transpose, [8192, 8192] f32", &c, 1, 0) && ok;
    c.src_dtype = c.wire_dtype = c.dst_dtype = TB_BF16;
    ok = measure("transpose, [8192, 8192] bf16", &c, 1, 0) && ok;
    return ok;
}

static bool arithmetic(void) {
    printf("arithmetic\n");
    tb__move c = matrix(1, 128 * MIB, 0, TB_F32, TB_BF16);
    bool ok = measure("f32 to bf16", &c, 1, 0.9);
    c = matrix(1, 128 * MIB, 0, TB_BF16, TB_F32);
    ok = measure("bf16 to f32", &c, 1, 0) && ok;
    c = matrix(1, 128 * MIB, 0, TB_F32, TB_F8E4M3);
    ok = measure("f32 to f8e4m3", &c, 1, 0) && ok;
    c = matrix(8192, 8192, 1, TB_F32, TB_BF16);
    strides[0][1] = 8192;
    ok = measure("f32 to bf16, transposed", &c, 1, 0) && ok;
    c = matrix(1, 128 * MIB, 0, TB_BF16, TB_BF16);
    c.nsrc = 4;
    /* Rows a large power of two apart share sets of the caches and banks of the memory, so there is a line for that. */
    for (int k = 0; k < 4; k++) {
        sources[k] = src + (size_t)k * (256 * MIB + 12288);
        strides[k][0] = 0;
        strides[k][1] = 1;
    }
    ok = measure("bf16, sum of 4", &c, 1, 0.7) && ok;
    for (int k = 0; k < 4; k++)
        sources[k] = src + (size_t)k * 256 * MIB;
    return measure("bf16, sum of 4 that lie 256 MiB apart", &c, 1, 0) && ok;
}

static bool many(void) {
    printf("many copies\n");
    static tb__move copies[MANY];
    static const void *from[MANY];
    for (int i = 0; i < MANY; i++) {
        copies[i] = matrix(1, 16384, 0, TB_F32, TB_F32);
        from[i] = src + (size_t)i * 65536 * 2;
        copies[i].src = &from[i];
        copies[i].dst = dst + (size_t)(MANY - 1 - i) * 65536;
    }
    return measure("4,096 of 64 KiB", copies, MANY, 0);
}

int main(int argc, char **argv) {
    if (argc > 1)
        picked = argv[1];
    src = aligned_alloc(2 * MIB, 1026 * MIB);
    dst = aligned_alloc(2 * MIB, 1024 * MIB);
    if (!src || !dst)
        return 1;
    for (size_t i = 0; i < 1026 * MIB; i++)
        src[i] = (char)(i * 31 >> 3 & 63);
    memset(dst, 1, 1024 * MIB);
    bool ok = runs();
    ok = arithmetic() && ok;
    ok = many() && ok;
    free(src);
    free(dst);
    return ok ? 0 : 1;
}
