/* What transfers are compared with: one process that copies or casts its own warm memory with as many threads as there
 * are cores. Threads are made anew each time, so that none is there when ranks are forked. */
#include "exec/workers.h"
#include "tools/bench.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Buffers that begin at the same place of a page slow each other down on some processors. */
enum { SKEW = 3 * 4096 + 256, MAX_THREADS = 256 };

tb_status bench_buffers_init(bench_buffers *buffers, size_t nbytes) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    *buffers = (bench_buffers){.nbytes = nbytes};
    buffers->threads = cores < 1 ? 1 : cores > MAX_THREADS ? MAX_THREADS : (int)cores;
    buffers->mapped = 2 * nbytes + SKEW;
    buffers->mapping = mmap(NULL, buffers->mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffers->mapping == MAP_FAILED) {
        buffers->mapping = NULL;
        return tb__fail(TB_NO_MEMORY, "can't map %zu bytes for memcpy: %s", buffers->mapped, strerror(errno));
    }
    /* A child that had them would make every page be copied when it is next written. */
    madvise(buffers->mapping, buffers->mapped, MADV_DONTFORK);
    buffers->src = buffers->mapping;
    buffers->dst = buffers->src + nbytes + SKEW;
    bench_fill_floats(buffers->src, nbytes / sizeof(float));
    memset(buffers->dst, 1, nbytes);
    return TB_OK;
}

void bench_buffers_fini(bench_buffers *buffers) {
    if (buffers->mapping)
        munmap(buffers->mapping, buffers->mapped);
    *buffers = (bench_buffers){0};
}

typedef struct share {
    char *dst;
    const char *src;
    size_t nbytes;
    atomic_int *go; /* 0: not yet; 1: copy; 2: do nothing */
} share;

static void *copy_share(void *arg) {
    const share *s = arg;
    int go;
    while ((go = atomic_load(s->go)) == 0)
        sched_yield();
    if (go == 1)
        memcpy(s->dst, s->src, s->nbytes);
    return NULL;
}

/* Share i of as many as there are threads. */
static share cut(const bench_buffers *buffers, int i, atomic_int *go) {
    size_t n = (size_t)buffers->threads, each = buffers->nbytes / n, start = each * (size_t)i;
    bool is_last = i == buffers->threads - 1;
    return (share){buffers->dst + start, buffers->src + start, is_last ? buffers->nbytes - start : each, go};
}

tb_status bench_memcpy(bench_buffers *buffers, double *gb_per_s) {
    pthread_t thread[MAX_THREADS];
    share shares[MAX_THREADS];
    atomic_int go = 0;
    int error = 0, nstarted = 1;
    shares[0] = cut(buffers, 0, &go);
    while (nstarted < buffers->threads && error == 0) {
        shares[nstarted] = cut(buffers, nstarted, &go);
        error = pthread_create(&thread[nstarted], NULL, copy_share, &shares[nstarted]);
        nstarted += error == 0;
    }
    int64_t start = bench_now_ns();
    atomic_store(&go, error ? 2 : 1);
    copy_share(&shares[0]);
    for (int i = 1; i < nstarted; i++)
        pthread_join(thread[i], NULL);
    if (error)
        return tb__fail(TB_IO, "can't start a thread for memcpy: %s", strerror(error));
    *gb_per_s = (double)buffers->nbytes / (double)(bench_now_ns() - start);
    return TB_OK;
}

tb_status bench_cast(bench_buffers *buffers, double *gb_per_s) {
    const void *src = buffers->src;
    const int64_t stride[1][TB_MAX_DIMS] = {{1}};
    tb__copy copy = {
        .ndim = 1,
        .len = {(int64_t)(buffers->nbytes / sizeof(float))},
        .dst = buffers->dst,
        .dst_stride = {1},
        .nsrc = 1,
        .src = &src,
        .src_stride = stride,
        .src_dtype = TB_F32,
        .wire_dtype = TB_BF16,
        .dst_dtype = TB_BF16,
    };
    tb__workers_set(buffers->threads);
    int64_t start = bench_now_ns();
    TB_TRY(tb__workers_run(&copy, 1));
    *gb_per_s = (double)buffers->nbytes / (double)(bench_now_ns() - start);
    return TB_OK;
}
