/* The driver of a GPU, as the bench uses it beside the library: what transfers cost the GPU, and what they are compared
 * with. Only in builds with the CUDA device, and in processes of their own: one that has used the driver can't fork
 * others that use it. */
#ifndef TB_BENCH_BENCH_DRIVER_H
#define TB_BENCH_BENCH_DRIVER_H

#include "bench/bench.h"

/* ---- What the library does (bench_driver.c) ------------------------------------------------------------------ */

/* From now on the library's kernels and copies on cuda:0 are timed, by events right before and after each. */
tb_status bench_driver_watch(void);

/* What was submitted from now on ... */
tb_status bench_driver_reset(void);
/* ... has kept the GPU busy for so long, which is counted once where several things were done at a time. Waits for it
 * to end. */
tb_status bench_driver_spent(double *seconds, int64_t *nlaunches);

/* ---- cuMemcpyAsync (bench_driver.c) -------------------------------------------------------------------------- */

/* Memory on cuda:0 that another process can map. */
typedef struct bench_offer {
    unsigned char handle[64];
} bench_offer;

tb_status bench_offer_init(bench_offer *offer, size_t nbytes); /* it stays until the process ends */

typedef enum bench_copy_kind {
    BENCH_COPY_BETWEEN, /* from memory of another process, through CUDA IPC */
    BENCH_COPY_TO_HOST, /* from this process's GPU memory to its pinned memory */
    BENCH_COPY_TO_GPU,  /* and back */
} bench_copy_kind;

typedef struct bench_copy {
    uint64_t src, dst; /* addresses of the driver's */
    size_t nbytes;
    void *stream, *start, *end;
} bench_copy;

/* The offer is needed where it is BETWEEN. Copies once, and verifies it; what it takes stays until the process ends. */
tb_status bench_copy_init(bench_copy *copy, bench_copy_kind kind, const bench_offer *offer, size_t nbytes);
/* *seconds is by events; NULL: it is not timed. Returns when it is done. */
tb_status bench_copy_run(const bench_copy *copy, double *seconds);

/* Fills memory on cuda:0, as the kernel of a program would, and waits until that is done. */
tb_status bench_fill(void *memory, size_t nbytes, unsigned char value);

#endif
