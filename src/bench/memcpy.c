/* What transfers are compared with: one process that copies or casts its own warm memory with as many threads as it may
 * use cores; and the limit, the fastest of many ways of copying. */
#include "base/process.h"
#include "bench/bench.h"
#include "device/host/kernel.h"
#include "device/host/move.h"
#include "device/host/workers.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

/* Buffers that begin at the same place of a page slow each other down on some processors. */
enum { SKEW = 3 * 4096 + 256, MAX_THREADS = TB__WORKERS_MAX };

static int count_cores(void) {
    cpu_set_t cores;
    int n = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    return n < MAX_THREADS ? n : MAX_THREADS;
}

static tb_status init_buffers(tool_buffers *buffers, size_t nbytes, bool is_huge) {
    size_t mapped = 2 * nbytes + SKEW;
    void *mapping = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED)
        return tb__fail(TB_NO_MEMORY, "can't map %zu bytes for memcpy: %s", mapped, strerror(errno));
    /* A child that had them would make every page be copied when it is next written. */
    madvise(mapping, mapped, MADV_DONTFORK);
    if (is_huge)
        madvise(mapping, mapped, MADV_HUGEPAGE);
    *buffers = (tool_buffers){.src = mapping, .nbytes = nbytes, .mapping = mapping, .mapped = mapped};
    buffers->dst = buffers->src + nbytes + SKEW;
    buffers->nthreads = count_cores();
    float *floats = mapping;
    for (size_t i = 0; i < nbytes / sizeof *floats; i++)
        floats[i] = (float)i;
    memset(buffers->dst, 1, nbytes);
    return TB_OK;
}

tb_status tool_buffers_init(tool_buffers *buffers, size_t nbytes) {
    return init_buffers(buffers, nbytes, false);
}

void tool_buffers_fini(tool_buffers *buffers) {
    if (buffers->mapping)
        munmap(buffers->mapping, buffers->mapped);
    *buffers = (tool_buffers){0};
}

/* How memory is copied: by a set of kernels, by memcpy, or by one instruction. */
typedef struct way {
    const char *name;
    enum { MEMCPY, STRING, KERNELS } kind;
    const tb__kernels *kernels;
} way;

static const way by_memcpy = {.name = "memcpy"};

static void copy(const way *w, char *dst, const char *src, size_t nbytes) {
    if (w->kind == KERNELS) {
        w->kernels->stream_rows(dst, 0, src, 0, 1, nbytes);
        w->kernels->fence();
        return;
    }
#ifdef __x86_64__
    if (w->kind == STRING) {
        __asm__ volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(nbytes)::"memory");
        return;
    }
#endif
    memcpy(dst, src, nbytes);
}

typedef struct share {
    const way *way;
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
        copy(s->way, s->dst, s->src, s->nbytes);
    return NULL;
}

/* Share i of n. */
static share cut(const tool_buffers *buffers, const way *w, int i, int n, atomic_int *go) {
    size_t each = buffers->nbytes / (size_t)n, start = each * (size_t)i;
    return (share){w, buffers->dst + start, buffers->src + start, i == n - 1 ? buffers->nbytes - start : each, go};
}

static tb_status copy_by(const tool_buffers *buffers, const way *w, int nthreads, double *gb_per_s) {
    pthread_t thread[MAX_THREADS];
    share shares[MAX_THREADS];
    atomic_int go = 0;
    tb_status status = TB_OK;
    int nstarted = 1;
    shares[0] = cut(buffers, w, 0, nthreads, &go);
    while (nstarted < nthreads && status == TB_OK) {
        shares[nstarted] = cut(buffers, w, nstarted, nthreads, &go);
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

tb_status tool_memcpy(tool_buffers *buffers, double *gb_per_s) {
    return copy_by(buffers, &by_memcpy, buffers->nthreads, gb_per_s);
}

/* ---- The best copy ------------------------------------------------------------------------------------------- */

enum { MAX_WAYS = 2 + TB__KERNEL_SETS_MAX };

/* The portable kernels are memcpy. */
static int list_ways(way ways[MAX_WAYS]) {
    const tb__kernels *sets[TB__KERNEL_SETS_MAX];
    int nsets = tb__kernels_list(sets), n = 0;
    ways[n++] = by_memcpy;
#ifdef __x86_64__
    ways[n++] = (way){.name = "rep movsb", .kind = STRING};
#endif
    for (int i = 1; i < nsets; i++)
        ways[n++] = (way){.name = sets[i]->name, .kind = KERNELS, .kernels = sets[i]};
    return n;
}

/* Every way, twice, with one thread to all cores. */
static tb_status search(const tool_buffers *buffers, way *best, int *nthreads, double *most) {
    enum { TRIES = 2 };
    way ways[MAX_WAYS];
    int nways = list_ways(ways), all = buffers->nthreads;
    *most = 0;
    *best = ways[0];
    *nthreads = 1;
    for (int t = 1; t <= all; t = t < all && 2 * t > all ? all : 2 * t) {
        for (int i = 0; i < TRIES * nways; i++) {
            double rate;
            TB_TRY(copy_by(buffers, &ways[i % nways], t, &rate));
            if (rate <= *most)
                continue;
            *most = rate;
            *best = ways[i % nways];
            *nthreads = t;
        }
    }
    return TB_OK;
}

static tb_status run_limit(tool_buffers *buffers, const tool_buffers *huge, bench_rounds *rounds, tool_guard *guard,
                           bench_round *out, char work[BENCH_WORK_MAX]) {
    const tool_buffers *from = buffers;
    way best[2];
    int nthreads[2], which = 0;
    double most[2];
    TB_TRY(search(buffers, &best[0], &nthreads[0], &most[0]));
    TB_TRY(search(huge, &best[1], &nthreads[1], &most[1]));
    if (most[1] > most[0]) {
        which = 1;
        from = huge;
    }
    snprintf(work, BENCH_WORK_MAX, "the best copy: %s, %d thread%s%s", best[which].name, nthreads[which],
             nthreads[which] == 1 ? "" : "s", which ? ", huge pages" : "");
    while (bench_rounds_next(rounds, tool_now_ns())) {
        bench_round *round = &out[rounds->done - 1];
        TB_TRY(tool_guard_check(guard));
        TB_TRY(tool_memcpy(buffers, &round->theirs));
        TB_TRY(copy_by(from, &best[which], nthreads[which], &round->ours));
    }
    return TB_OK;
}

tb_status bench_limit_run(tool_buffers *buffers, bench_rounds *rounds, tool_guard *guard, bench_round *out,
                          char work[BENCH_WORK_MAX]) {
    tool_buffers huge;
    TB_TRY(init_buffers(&huge, buffers->nbytes, true));
    tb_status status = run_limit(buffers, &huge, rounds, guard, out, work);
    tool_buffers_fini(&huge);
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
