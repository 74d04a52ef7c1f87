/* tb_alloc and tb_free. Large requests have arenas of their own, small ones share arenas, in which each takes the first
 * free extent that is long enough. What is free is known here and in extent.c, and nowhere in the memory itself. */
#include "exec/memory.h"

#include "base/log.h"
#include "base/mem.h"
#include "exec/extent.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/queue.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

enum {
    ALIGNMENT = 64,
    HUGE_PAGE = 2 << 20,
    SHARED_BYTES = 64 << 20, /* of an arena for small requests */
    KEPT_BYTES = 1 << 30,    /* of arenas without allocations, at least */
    COLOURS = 16,
    COLOUR_STEP = 4096,
};

typedef struct tb__memory_arena {
    tb__arena_file file;
    size_t nallocations;
    bool is_large;     /* never has more than one */
    tb__extent *first; /* the only one while there are no allocations */
    LIST_ENTRY(tb__memory_arena) link;
    TAILQ_ENTRY(tb__memory_arena) idle_link;
} arena;

static struct {
    pthread_mutex_t lock;
    tb__extents extents;
    LIST_HEAD(arena_list, tb__memory_arena) arenas, inherited; /* inherited: the parent's, of which we have no memory */
    TAILQ_HEAD(idle_list, tb__memory_arena) idle;              /* without allocations; the longest idle first */
    size_t busy_bytes, idle_bytes;
    size_t narenas; /* so far */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .idle = TAILQ_HEAD_INITIALIZER(pool.idle)};

static pthread_once_t once = PTHREAD_ONCE_INIT;

static void before_fork(void) {
    pthread_mutex_lock(&pool.lock);
}

static void after_fork_in_parent(void) {
    pthread_mutex_unlock(&pool.lock);
}

/* The parent's tensors must not be written to from here, nor kept in memory when it gives them up. Their addresses stay
 * taken, so that a pointer into them is never taken for one of ours. */
static void after_fork_in_child(void) {
    arena *it;
    while ((it = LIST_FIRST(&pool.arenas))) {
        (void)mmap(it->file.base, it->file.nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
                   -1, 0);
        close(it->file.fd);
        it->file.fd = -1;
        LIST_REMOVE(it, link);
        LIST_INSERT_HEAD(&pool.inherited, it, link);
    }
    TAILQ_INIT(&pool.idle);
    pool.extents.root = NULL;
    pool.busy_bytes = pool.idle_bytes = 0;
    pthread_mutex_unlock(&pool.lock);
}

static void watch_forks(void) {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

static size_t round_up(size_t n, size_t unit) {
    return (n + unit - 1) / unit * unit;
}

static size_t read_count(const char *path) {
    char text[32];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    return strtoull(text, NULL, 10);
}

static bool has_huge_pages(size_t nbytes) {
    size_t unused = read_count("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    size_t promised = unused ? read_count("/sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages") : 0;
    return unused >= promised && unused - promised >= nbytes / HUGE_PAGE;
}

/* A mapping at a multiple of the huge page's size, or NULL. */
static void *map_file(int fd, size_t nbytes) {
    char *space = mmap(NULL, nbytes + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED)
        return NULL;
    size_t before = round_up((uintptr_t)space, HUGE_PAGE) - (uintptr_t)space;
    if (mmap(space + before, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        int error = errno;
        munmap(space, nbytes + HUGE_PAGE);
        errno = error;
        return NULL;
    }
    if (before > 0)
        munmap(space, before);
    munmap(space + before + nbytes, HUGE_PAGE - before);
    return space + before;
}

static tb_status open_file(size_t nbytes, bool is_huge, tb__arena_file *out) {
    unsigned flags = is_huge ? MFD_HUGETLB | MFD_HUGE_2MB : 0;
    int fd = memfd_create("tensorbus", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags);
    if (fd < 0)
        return tb__fail(TB_IO, "memfd_create: %s", strerror(errno));
    /* Reserved huge pages may still be denied to this process's control group, and that must not show as a signal
     * when they are touched. Other pages come as they are touched, as malloc's do. */
    void *base = NULL;
    if (ftruncate(fd, (off_t)nbytes) == 0 && (!is_huge || fallocate(fd, 0, 0, (off_t)nbytes) == 0) &&
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
        base = map_file(fd, nbytes);
    if (!base) {
        int error = errno;
        close(fd);
        return tb__fail(error == ENOMEM || error == ENOSPC ? TB_NO_MEMORY : TB_IO, "an arena of %zu bytes: %s", nbytes,
                        strerror(error));
    }
    if (!is_huge)
        madvise(base, nbytes, MADV_HUGEPAGE); /* where the kernel knows better, that is fine too */
    *out = (tb__arena_file){.base = base, .nbytes = nbytes, .fd = fd};
    return TB_OK;
}

/* The kernel promises more than it has, and kills who believes it. What can't be there is refused here. */
static tb_status check_room(size_t nbytes) {
    struct sysinfo info;
    struct rlimit file;
    if (sysinfo(&info) == 0) {
        size_t most = ((size_t)info.totalram + info.totalswap) * info.mem_unit;
        if (nbytes > most || pool.busy_bytes + pool.idle_bytes > most - nbytes)
            return tb__fail(TB_NO_MEMORY, "an arena of %zu bytes, beside %zu in use: the machine has %zu in all",
                            nbytes, pool.busy_bytes, most);
    }
    if (getrlimit(RLIMIT_FSIZE, &file) == 0 && nbytes > file.rlim_cur)
        return tb__fail(TB_NO_MEMORY, "an arena of %zu bytes: the process is limited to files of %zu", nbytes,
                        (size_t)file.rlim_cur);
    return TB_OK;
}

static void release_arena(arena *it) {
    TAILQ_REMOVE(&pool.idle, it, idle_link);
    LIST_REMOVE(it, link);
    pool.idle_bytes -= it->file.nbytes;
    tb__extents_remove(&pool.extents, it->first);
    munmap(it->file.base, it->file.nbytes);
    close(it->file.fd);
    free(it->first);
    free(it);
}

static void release_idle(size_t keep) {
    while (pool.idle_bytes > keep)
        release_arena(TAILQ_FIRST(&pool.idle));
}

static tb_status open_arena_file(size_t nbytes, tb__arena_file *out) {
    TB_TRY(check_room(nbytes));
    if (has_huge_pages(nbytes) && open_file(nbytes, true, out) == TB_OK)
        return TB_OK;
    return open_file(nbytes, false, out);
}

/* Makes an arena, idle at first, with one extent of at least nbytes. */
static tb_status add_arena(size_t nbytes, bool is_large, tb__extent **out) {
    arena *made = tb__calloc(1, sizeof *made);
    tb__extent *extent = tb__calloc(1, sizeof *extent);
    tb_status status = made && extent ? TB_OK : TB_NO_MEMORY;
    /* Streams that are a power of two apart hinder one another in the cache, and a sum reads the same allocation of
     * several processes: so each arena, and each process, begins some pages later. Whole pages, because rows that fill
     * pages should not lie across them. */
    size_t colour = ((size_t)getpid() + pool.narenas) % COLOURS * COLOUR_STEP;
    size_t size = is_large ? round_up(colour + nbytes, HUGE_PAGE) : SHARED_BYTES;
    if (status == TB_OK) {
        status = open_arena_file(size, &made->file);
        if (status != TB_OK && pool.idle_bytes > 0) {
            release_idle(0);
            status = open_arena_file(size, &made->file);
        }
    }
    if (status != TB_OK) {
        free(made);
        free(extent);
        return status;
    }
    pool.narenas++;
    made->is_large = is_large;
    made->first = extent;
    *extent = (tb__extent){
        .start = (uintptr_t)made->file.base + colour, .nbytes = size - colour, .is_offered = !is_large, .arena = made};
    tb__extents_add(&pool.extents, extent);
    LIST_INSERT_HEAD(&pool.arenas, made, link);
    TAILQ_INSERT_TAIL(&pool.idle, made, idle_link);
    pool.idle_bytes += size;
    *out = extent;
    return TB_OK;
}

/* The idle arena that fits a large request best, unless it is so much larger that much would lie waste. */
static tb__extent *find_idle(size_t nbytes) {
    tb__extent *best = NULL;
    for (const arena *it = TAILQ_FIRST(&pool.idle); it; it = TAILQ_NEXT(it, idle_link)) {
        size_t has = it->first->nbytes;
        if (it->is_large && has >= nbytes && has - nbytes <= nbytes / 8 && (!best || has < best->nbytes))
            best = it->first;
    }
    return best;
}

/* Leaves the extent nbytes, and what it has beyond them to a new one. */
static tb_status cut(tb__extent *extent, size_t nbytes) {
    tb__extent *rest = tb__calloc(1, sizeof *rest);
    if (!rest)
        return TB_NO_MEMORY;
    *rest = (tb__extent){.start = extent->start + nbytes,
                         .nbytes = extent->nbytes - nbytes,
                         .is_offered = true,
                         .prev = extent,
                         .next = extent->next,
                         .arena = extent->arena};
    if (rest->next)
        rest->next->prev = rest;
    extent->next = rest;
    extent->nbytes = nbytes;
    tb__extents_add(&pool.extents, rest);
    return TB_OK;
}

static tb_status take(size_t nbytes, size_t asked, tb__extent **out) {
    bool is_large = nbytes > SHARED_BYTES - (COLOURS - 1) * COLOUR_STEP;
    tb__extent *extent = is_large ? find_idle(nbytes) : tb__extents_fit(&pool.extents, nbytes);
    if (!extent)
        TB_TRY(add_arena(nbytes, is_large, &extent));
    if (!is_large && extent->nbytes > nbytes)
        TB_TRY(cut(extent, nbytes));
    extent->is_used = true;
    extent->is_offered = false;
    extent->asked = asked;
    tb__extents_update(&pool.extents, extent);
    arena *from = extent->arena;
    if (from->nallocations++ == 0) {
        TAILQ_REMOVE(&pool.idle, from, idle_link);
        pool.idle_bytes -= from->file.nbytes;
        pool.busy_bytes += from->file.nbytes;
    }
    *out = extent;
    return TB_OK;
}

tb_status tb_alloc(size_t nbytes, void **out) {
    if (nbytes > PTRDIFF_MAX - 2 * (size_t)HUGE_PAGE)
        return tb__fail(TB_TOO_BIG, "an allocation of %zu bytes", nbytes);
    tb__extent *extent;
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&pool.lock);
    tb_status status = take(round_up(nbytes > 0 ? nbytes : 1, ALIGNMENT), nbytes, &extent);
    if (status == TB_OK)
        *out = (void *)extent->start;
    pthread_mutex_unlock(&pool.lock);
    return status;
}

/* Gives what the right one has to the left one. */
static void merge(tb__extent *left, tb__extent *right) {
    tb__extents_remove(&pool.extents, right);
    left->nbytes += right->nbytes;
    left->next = right->next;
    if (left->next)
        left->next->prev = left;
    free(right);
}

static void give_back(tb__extent *extent) {
    arena *from = extent->arena;
    extent->is_used = false;
    extent->is_offered = !from->is_large;
    if (extent->next && !extent->next->is_used)
        merge(extent, extent->next);
    if (extent->prev && !extent->prev->is_used) {
        extent = extent->prev;
        merge(extent, extent->next);
    }
    tb__extents_update(&pool.extents, extent);
    if (--from->nallocations > 0)
        return;
    TAILQ_INSERT_TAIL(&pool.idle, from, idle_link);
    pool.idle_bytes += from->file.nbytes;
    pool.busy_bytes -= from->file.nbytes;
    release_idle(pool.busy_bytes > KEPT_BYTES ? pool.busy_bytes : KEPT_BYTES);
}

static bool is_inherited(uintptr_t address) {
    for (const arena *it = LIST_FIRST(&pool.inherited); it; it = LIST_NEXT(it, link)) {
        if (address - (uintptr_t)it->file.base < it->file.nbytes)
            return true;
    }
    return false;
}

void tb_free(void *ptr) {
    if (!ptr)
        return;
    pthread_mutex_lock(&pool.lock);
    tb__extent *extent = tb__extents_at(&pool.extents, (uintptr_t)ptr);
    bool is_ours = extent && extent->is_used && extent->start == (uintptr_t)ptr;
    if (is_ours)
        give_back(extent);
    bool is_known = is_ours || is_inherited((uintptr_t)ptr);
    pthread_mutex_unlock(&pool.lock);
    if (!is_known)
        tb__log(TB_LOG_ERROR, "tb_free: %p is not the start of a live allocation; nothing is freed", ptr);
}

/* ---- Of other processes ---------------------------------------------------------------------------------------- */

static tb_status map_foreign(int fd, tb__arena_file *out) {
    struct stat info;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return tb__fail(TB_DENIED, "the memory is no memfd that is sealed against shrinking");
    if (seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE))
        return tb__fail(TB_DENIED, "the memory is sealed against writing");
    if ((fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDWR)
        return tb__fail(TB_DENIED, "the memory's descriptor was not opened for reading and writing");
    if (fstat(fd, &info) != 0)
        return tb__fail(TB_IO, "fstat: %s", strerror(errno));
    *out = (tb__arena_file){.nbytes = (size_t)info.st_size};
    if (info.st_size <= 0)
        return tb__fail(TB_INVALID, "the memory has no bytes");
    out->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (out->fd < 0)
        return tb__fail(TB_IO, "fcntl: %s", strerror(errno));
    out->base = map_file(out->fd, out->nbytes);
    if (out->base)
        return TB_OK;
    tb_status status = tb__fail(TB_NO_MEMORY, "%zu bytes of another process: %s", out->nbytes, strerror(errno));
    close(out->fd);
    return status;
}

tb_status tb__memory_adopt(int fd, void **base, size_t *nbytes) {
    arena *made = tb__calloc(1, sizeof *made);
    tb__extent *extent = tb__calloc(1, sizeof *extent);
    tb_status status = made && extent ? map_foreign(fd, &made->file) : TB_NO_MEMORY;
    if (status != TB_OK) {
        free(made);
        free(extent);
        return status;
    }
    made->is_large = true;
    made->nallocations = 1; /* which nobody frees */
    made->first = extent;
    *extent = (tb__extent){.start = (uintptr_t)made->file.base,
                           .nbytes = made->file.nbytes,
                           .asked = made->file.nbytes,
                           .is_used = true,
                           .arena = made};
    *base = made->file.base;
    *nbytes = made->file.nbytes;
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&pool.lock);
    tb__extents_add(&pool.extents, extent);
    LIST_INSERT_HEAD(&pool.arenas, made, link);
    pthread_mutex_unlock(&pool.lock);
    return TB_OK;
}

void tb__memory_abandon(void *base) {
    pthread_mutex_lock(&pool.lock);
    tb__extent *extent = tb__extents_at(&pool.extents, (uintptr_t)base);
    arena *it = extent && extent->is_used && extent->start == (uintptr_t)base ? extent->arena : NULL;
    if (it) {
        LIST_REMOVE(it, link);
        tb__extents_remove(&pool.extents, extent);
        munmap(it->file.base, it->file.nbytes);
        close(it->file.fd);
        free(extent);
        free(it);
    }
    pthread_mutex_unlock(&pool.lock);
}

bool tb__memory_find(const void *ptr, size_t nbytes, tb__arena_file *out) {
    pthread_mutex_lock(&pool.lock);
    const tb__extent *extent = tb__extents_at(&pool.extents, (uintptr_t)ptr);
    bool is_found = false;
    if (extent && extent->is_used) {
        size_t offset = (uintptr_t)ptr - extent->start;
        is_found = nbytes > 0 ? offset < extent->asked && nbytes <= extent->asked - offset
                              : offset < extent->asked || offset == 0;
        if (is_found)
            *out = extent->arena->file;
    }
    pthread_mutex_unlock(&pool.lock);
    return is_found;
}
