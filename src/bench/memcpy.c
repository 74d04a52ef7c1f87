/* What transfers are compared with: one process that copies or casts its own warm memory with as many threads as it may
 * use cores. */
#include "base/process.h"
#include "bench/move.h"
#include "device/host/move.h"
#include "device/host/workers.h"

#include <errno.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>

/* Buffers that begin at the same place of a page slow each other down on some processors. */
enum { SKEW = 3 * 4096 + 256, MAX_THREADS = TB__WORKERS_MAX };

static int count_cores(void) {
    cpu_set_t cores;
    int n = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    return n < MAX_THREADS ? n : MAX_THREADS;
}

tb_status tool_buffers_init(tool_buffers *buffers, size_t nbytes) {
    size_t mapped = 2 * nbytes + SKEW;
    void *mapping = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED)
        return tb__fail(TB_NO_MEMORY, "can't map %zu bytes for memcpy: %s", mapped, strerror(errno));
    /* A child that had them would make every page be copied when it is next written. */
    madvise(mapping, mapped, MADV_DONTFORK);
    *buffers = (tool_buffers){.src = mapping, .nbytes = nbytes, .mapping = mapping, .mapped = mapped};
    buffers->dst = buffers->src + nbytes + SKEW;
    buffers->nthreads = count_cores();
    float *floats = mapping;
    for (size_t i = 0; i < nbytes / sizeof *floats; i++)
        floats[i] = (float)i;
    memset(buffers->dst, 1, nbytes);
    return TB_OK;
}

void tool_buffers_fini(tool_buffers *buffers) {
    if (buffers->mapping)
        munmap(buffers->mapping, buffers->mapped);
    *buffers = (tool_buffers){0};
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
static share cut(const tool_buffers *buffers, int i, atomic_int *go) {
    size_t n = (size_t)buffers->nthreads, each = buffers->nbytes / n, start = each * (size_t)i;
    bool is_last = i == buffers->nthreads - 1;
    return (share){buffers->dst + start, buffers->src + start, is_last ? buffers->nbytes - start : each, go};
}

tb_status tool_memcpy(tool_buffers *buffers, double *gb_per_s) {
    pthread_t thread[MAX_THREADS];
    share shares[MAX_THREADS];
    atomic_int go = 0;
    tb_status status = TB_OK;
    int nstarted = 1;
    shares[0] = cut(buffers, 0, &go);
    while (nstarted < buffers->nthreads && status == TB_OK) {
        shares[nstarted] = cut(buffers, nstarted, &go);
        status = tb__start_thread(&thread[nstarted], "tb-memcpy", copy_share, &shares[nstarted]);
        nstarted += status == TB_OK;
    }
    int64_t start = tool_now_ns();
    atomic_store(&go, status == TB_OK ? 1 : 2);
    copy_share(&shares[0]);
    for (int i = 1; i < nstarted; i++)
        pthread_join(thread[i], NULL);
    if (status == TB_OK)
        *gb_per_s = (double)buffers->nbytes / (double)(tool_now_ns() - start);
    return status;
}

tb_status tool_cast(tool_buffers *buffers, double *gb_per_s) {
    const void *src = buffers->src;
    const int64_t stride[1][TB_MAX_DIMS] = {{1}};
    tb__move copy = {
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
    tb__workers_set(buffers->nthreads);
    int64_t start = tool_now_ns();
    TB_TRY(tb__moves_run(&copy, 1));
    *gb_per_s = (double)buffers->nbytes / (double)(tool_now_ns() - start);
    return TB_OK;
}

void tool_end_threads(void) {
    tb__workers_set(1);
}
