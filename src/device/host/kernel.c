/* Chooses the kernels that suit the machine: by what its processor has, and by measuring how they copy. */
#include "device/host/kernel.h"

#include "base/process.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static _Atomic(const tb__kernels *) chosen;
static atomic_bool is_fixed; /* forced or selected */

int tb__kernels_list(const tb__kernels *sets[TB__KERNEL_SETS_MAX]) {
    const tb__kernels *avx512 = tb__kernels_avx512();
    int n = 0;
    sets[n++] = &tb__kernels_portable;
    if (tb__kernels_avx2())
        sets[n++] = tb__kernels_avx2();
    for (int i = 0; avx512 && i < TB__AVX512_WAYS; i++)
        sets[n++] = &avx512[i];
    return n;
}

const tb__kernels *tb__kernels_get(void) {
    const tb__kernels *kernels = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (kernels)
        return kernels;
    const tb__kernels *sets[TB__KERNEL_SETS_MAX] = {NULL};
    kernels = sets[tb__kernels_list(sets) - 1];
    /* Concurrent threads write the same value, unless the fastest set is known meanwhile. */
    const tb__kernels *none = NULL;
    atomic_compare_exchange_strong(&chosen, &none, kernels);
    return kernels;
}

void tb__kernels_force(const tb__kernels *kernels) {
    atomic_store(&is_fixed, kernels != NULL);
    atomic_store(&chosen, kernels);
}

static const tb__kernels *find_set(const char *name) {
    const tb__kernels *sets[TB__KERNEL_SETS_MAX];
    for (int i = tb__kernels_list(sets) - 1; i >= 0; i--) {
        if (strcmp(sets[i]->name, name) == 0)
            return sets[i];
    }
    return NULL;
}

tb_status tb__kernels_select(const char *name) {
    const tb__kernels *sets[TB__KERNEL_SETS_MAX], *found = find_set(name);
    char known[160] = "";
    if (found || strcmp(name, "auto") == 0) {
        tb__kernels_force(found);
        return TB_OK;
    }
    for (int i = tb__kernels_list(sets) - 1; i >= 0; i--) {
        size_t n = strlen(known);
        snprintf(known + n, sizeof known - n, ", %s", sets[i]->name);
    }
    return tb__fail(TB_INVALID, "'%.40s' is no way of copying that this machine has: auto%s", name, known);
}

/* ---- Measuring ------------------------------------------------------------------------------------------------- */

/* As columns of a matrix are copied: rows of several pages, with others between them. */
enum { RUN = 16 << 10, PITCH = 4 * RUN, NROWS = 256, NROUNDS = 3 };

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* So that a processor with a large cache is measured at its memory, too. */
static void leave_caches(const char *src) {
#ifdef __x86_64__
    for (size_t r = 0; r < NROWS; r++) {
        for (size_t i = 0; i < RUN; i += 64)
            __builtin_ia32_clflush(src + r * PITCH + i);
    }
#else
    (void)src;
#endif
}

tb_status tb__kernels_measure(const tb__kernels *const *sets, int nsets, double *gb_per_s) {
    void *memory; /* in pages like those of tensors */
    TB_TRY(tb_alloc((size_t)NROWS * (PITCH + RUN), &memory));
    char *src = memory, *dst = src + (size_t)NROWS * PITCH;
    for (size_t r = 0; r < NROWS; r++)
        memset(src + r * PITCH, 1, RUN);
    memset(dst, 0, (size_t)NROWS * RUN);
    for (int i = 0; i < nsets; i++)
        gb_per_s[i] = 0;
    for (int round = 0; round < NROUNDS; round++) { /* in turns: other programs are at work as well */
        for (int i = 0; i < nsets; i++) {
            leave_caches(src);
            double began = seconds_now();
            sets[i]->stream_rows(dst, RUN, src, PITCH, NROWS, RUN);
            sets[i]->fence();
            double rate = 1e-9 * NROWS * RUN / (seconds_now() - began);
            gb_per_s[i] = rate > gb_per_s[i] ? rate : gb_per_s[i];
        }
    }
    tb_free(memory);
    return TB_OK;
}

/* The last one is preferred: it has to be clearly slower than another. NULL: it can't be measured. */
static const tb__kernels *measure_fastest(void) {
    const tb__kernels *sets[TB__KERNEL_SETS_MAX];
    double rate[TB__KERNEL_SETS_MAX];
    int n = tb__kernels_list(sets), best = n - 1;
    if (n == 1)
        return sets[0];
    if (tb__kernels_measure(sets, n, rate) != TB_OK)
        return NULL;
    for (int i = 0; i < n - 1; i++) {
        if (rate[i] > 1.05 * rate[n - 1] && rate[i] > rate[best])
            best = i;
    }
    return sets[best];
}

/* ---- Choosing -------------------------------------------------------------------------------------------------- */

static char file[64];

static void name_file(void) {
    snprintf(file, sizeof file, "/dev/shm/tensorbus-%u-copy", (unsigned)geteuid());
}

const char *tb__kernels_file(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, name_file);
    return file;
}

/* False if whoever has the lock takes too long. */
static bool lock(int fd) {
    enum { TRIES = 200 };
    for (int i = 0; i < TRIES; i++) {
        if (flock(fd, LOCK_EX | LOCK_NB) == 0)
            return true;
        tb__sleep_ms(1);
    }
    return false;
}

/* The file is locked while a process measures, so that it is not disturbed by others that want to know the same. A file
 * of somebody else is not used. */
const tb__kernels *tb__kernels_fastest(const char *path) {
    char text[64] = "";
    struct stat about;
    int fd = tb__fd_own(open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    bool is_ours = fd >= 0 && fstat(fd, &about) == 0 && S_ISREG(about.st_mode) && about.st_uid == geteuid() && lock(fd);
    ssize_t n = is_ours ? read(fd, text, sizeof text - 1) : 0;
    text[n > 0 ? n : 0] = '\0';
    text[strcspn(text, "\n")] = '\0';
    const tb__kernels *found = find_set(text);
    if (!found) {
        found = measure_fastest();
        n = found ? snprintf(text, sizeof text, "%s\n", found->name) : 0;
        if (is_ours && n > 0 && (ftruncate(fd, 0) != 0 || pwrite(fd, text, (size_t)n, 0) != n))
            (void)ftruncate(fd, 0); /* the next process measures again */
    }
    if (fd >= 0)
        tb__fd_close(fd);
    return found;
}

static void choose(void) {
    const tb__kernels *found = tb__kernels_fastest(tb__kernels_file());
    if (found && !atomic_load(&is_fixed))
        atomic_store(&chosen, found);
}

void tb__kernels_choose(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (!atomic_load(&is_fixed))
        pthread_once(&once, choose);
}
