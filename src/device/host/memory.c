/* tb_alloc and tb_free. Large requests have arenas of their own, small ones share arenas, in which each takes the first
 * free extent that is long enough. The bookkeeping is outside of the memory itself, which peers can write to.
 *
 * A descriptor is scarce, and a file that has no pages costs nothing. So files are made much longer than what is asked
 * for, and arenas take their places in them: each new file is as long as all before it together, within bounds. What an
 * arena leaves is given back to the system as a hole, and no arena gets that place again: a device of a peer may still
 * have the old pages pinned, and would read those. Only reserved huge pages, which are taken for a whole file at once,
 * have files of their own. */
#include "device/host/memory.h"

#include "base/descriptors.h"
#include "base/log.h"
#include "base/mem.h"
#include "device/device.h"
#include "device/host/extent.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/queue.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum {
    ALIGNMENT = 64,
    SHARED_BYTES = 64 << 20, /* of an arena for small requests */
    KEPT_BYTES = 1 << 30,    /* of arenas without allocations, at least */
    PAGE = 4096,
    COLOURS = 16,
    COLOUR_STEP = PAGE,
};

/* Before glibc 2.37. */
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

static const size_t min_file = (size_t)1 << 30, max_file = (size_t)64 << 30;

typedef struct tb__memory_arena arena;

/* A memfd, and addresses for all of it, at which only its arenas are mapped. */
typedef struct file {
    tb__arena_file map;
    bool is_whole;               /* one arena has all of it: of huge pages, and other processes' */
    size_t narenas, nbytes_used; /* now; and what they have had so far */
    LIST_ENTRY(file) link;
} file;

struct tb__memory_arena {
    file *file;
    char *base;
    size_t nbytes;
    size_t nusers;     /* allocations, and those who hold it */
    bool is_large;     /* never has more than one allocation */
    tb__extent *first; /* the only one while there are no allocations */
    TAILQ_ENTRY(tb__memory_arena) idle_link;
};

static struct {
    pthread_mutex_t lock;
    tb__extents extents;
    LIST_HEAD(file_list, file) files, inherited;  /* inherited: the parent's files, not mapped here */
    TAILQ_HEAD(idle_list, tb__memory_arena) idle; /* without users; the longest idle first */
    size_t busy_bytes, idle_bytes;                /* of arenas */
    size_t file_bytes;                            /* of files for several arenas */
    size_t narenas;                               /* so far */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .idle = TAILQ_HEAD_INITIALIZER(pool.idle)};

static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Unmaps memory, but keeps its addresses reserved. */
static void unmap_but_reserve(void *base, size_t nbytes) {
    (void)mmap(base, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

static void before_fork(void) {
    pthread_mutex_lock(&pool.lock);
}

static void after_fork_in_parent(void) {
    pthread_mutex_unlock(&pool.lock);
}

/* The parent's tensors must not be written to from here, nor kept in memory when it gives them up. Their addresses stay
 * taken, so that a pointer into them is never taken for one of ours. */
static void after_fork_in_child(void) {
    file *it;
    while ((it = LIST_FIRST(&pool.files))) {
        unmap_but_reserve(it->map.base, it->map.nbytes);
        close(it->map.fd);
        it->map.fd = -1;
        LIST_REMOVE(it, link);
        LIST_INSERT_HEAD(&pool.inherited, it, link);
    }
    TAILQ_INIT(&pool.idle);
    pool.extents.root = NULL;
    pool.busy_bytes = pool.idle_bytes = pool.file_bytes = 0;
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
    return unused >= promised && unused - promised >= nbytes / TB__HUGE_PAGE;
}

/* The file's bytes at their addresses. */
static bool map_part(const tb__arena_file *map, char *base, size_t nbytes) {
    return mmap(base, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, map->fd,
                (off_t)(base - (char *)map->base)) != MAP_FAILED;
}

static tb_status open_file(size_t nbytes, bool is_huge, file **out) {
    unsigned flags = is_huge ? MFD_HUGETLB | MFD_HUGE_2MB : 0;
    file *made = tb__calloc(1, sizeof *made);
    if (!made)
        return TB_NO_MEMORY;
    int fd = memfd_create("tensorbus", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags);
    if (fd < 0) {
        free(made);
        return tb__fail(TB_IO, "memfd_create: %s", tb__errno_text(errno));
    }
    /* Reserved huge pages may still be denied to this process's control group, and that must not show as a signal
     * when they are touched. Other pages come as they are touched, as malloc's do. */
    void *base = NULL;
    if (ftruncate(fd, (off_t)nbytes) == 0 && (!is_huge || fallocate(fd, 0, 0, (off_t)nbytes) == 0) &&
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
        base = tb__reserve_addresses(nbytes);
    if (!base) {
        int error = errno;
        close(fd);
        free(made);
        return tb__fail(error == ENOMEM || error == ENOSPC ? TB_NO_MEMORY : TB_IO, "an arena of %zu bytes: %s", nbytes,
                        strerror(error));
    }
    made->map = (tb__arena_file){.base = base, .nbytes = nbytes, .fd = fd};
    made->is_whole = is_huge;
    LIST_INSERT_HEAD(&pool.files, made, link);
    pool.file_bytes += is_huge ? 0 : nbytes;
    *out = made;
    return TB_OK;
}

static void punch_hole(const file *in, const char *base, size_t nbytes) {
    (void)fallocate(in->map.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, base - (const char *)in->map.base,
                    (off_t)nbytes);
}

/* One without arenas. Peers may have it mapped for longer, and must not keep its pages. */
static void close_file(file *it) {
    if (!it->map.is_adopted)
        punch_hole(it, it->map.base, it->map.nbytes);
    pool.file_bytes -= it->is_whole ? 0 : it->map.nbytes;
    LIST_REMOVE(it, link);
    munmap(it->map.base, it->map.nbytes);
    close(it->map.fd);
    free(it);
}

/* The kernel overcommits, and kills processes that use too much. So requests beyond the machine's memory are refused
 * here. */
static tb_status check_room(size_t nbytes) {
    struct sysinfo info;
    struct rlimit limit;
    if (sysinfo(&info) == 0) {
        size_t most = ((size_t)info.totalram + info.totalswap) * info.mem_unit;
        if (nbytes > most || pool.busy_bytes + pool.idle_bytes > most - nbytes)
            return tb__fail(TB_NO_MEMORY, "an arena of %zu bytes, beside %zu in use: the machine has %zu in all",
                            nbytes, pool.busy_bytes, most);
    }
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && nbytes > limit.rlim_cur)
        return tb__fail(TB_NO_MEMORY, "an arena of %zu bytes: the process is limited to files of %zu", nbytes,
                        (size_t)limit.rlim_cur);
    return TB_OK;
}

static void release_arena(arena *it) {
    file *from = it->file;
    TAILQ_REMOVE(&pool.idle, it, idle_link);
    pool.idle_bytes -= it->nbytes;
    tb__extents_remove(&pool.extents, it->first);
    if (--from->narenas == 0) {
        close_file(from);
    } else {
        unmap_but_reserve(it->base, it->nbytes);
        punch_hole(from, it->base, it->nbytes);
    }
    free(it->first);
    free(it);
}

static void release_idle(size_t keep) {
    while (pool.idle_bytes > keep)
        release_arena(TAILQ_FIRST(&pool.idle));
}

/* A new file, for this arena and, if the process may have such a long one, for many others. */
static tb_status add_file(size_t nbytes, file **out) {
    struct rlimit limit;
    size_t size = pool.file_bytes < min_file ? min_file : pool.file_bytes;
    size = size < max_file ? size : max_file;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < size)
        size = limit.rlim_cur / TB__HUGE_PAGE * TB__HUGE_PAGE;
    if (size > nbytes && open_file(size, false, out) == TB_OK)
        return TB_OK;
    return open_file(nbytes, false, out);
}

static bool has_room(const file *in, size_t nbytes) {
    return !in->is_whole && in->map.nbytes - in->nbytes_used >= nbytes;
}

/* Gives the arena its place in a file. */
static tb_status place_arena(arena *it, size_t nbytes) {
    file *in = NULL;
    TB_TRY(check_room(nbytes));
    if (!has_huge_pages(nbytes) || open_file(nbytes, true, &in) != TB_OK) {
        in = LIST_FIRST(&pool.files);
        while (in && !has_room(in, nbytes))
            in = LIST_NEXT(in, link);
        if (!in)
            TB_TRY(add_file(nbytes, &in));
    }
    it->file = in;
    it->base = (char *)in->map.base + in->nbytes_used;
    it->nbytes = nbytes;
    if (map_part(&in->map, it->base, nbytes)) {
        if (!in->is_whole)
            madvise(it->base, nbytes, MADV_HUGEPAGE); /* a hint only */
        in->narenas++;
        in->nbytes_used += nbytes;
        return TB_OK;
    }
    int error = errno;
    if (in->narenas == 0)
        close_file(in);
    else
        unmap_but_reserve(it->base, nbytes);
    return tb__fail(error == ENOMEM || error == ENOSPC ? TB_NO_MEMORY : TB_IO, "an arena of %zu bytes: %s", nbytes,
                    strerror(error));
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
    size_t size = is_large ? round_up(colour + nbytes, TB__HUGE_PAGE) : SHARED_BYTES;
    if (status == TB_OK) {
        status = place_arena(made, size);
        if (status != TB_OK && pool.idle_bytes > 0) {
            release_idle(0);
            status = place_arena(made, size);
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
        .start = (uintptr_t)made->base + colour, .nbytes = size - colour, .is_offered = !is_large, .arena = made};
    tb__extents_add(&pool.extents, extent);
    TAILQ_INSERT_TAIL(&pool.idle, made, idle_link);
    pool.idle_bytes += size;
    *out = extent;
    return TB_OK;
}

/* The idle arena that fits a large request best, unless it is so much larger that too much would be wasted. */
static tb__extent *find_idle(size_t nbytes) {
    tb__extent *best = NULL;
    for (const arena *it = TAILQ_FIRST(&pool.idle); it; it = TAILQ_NEXT(it, idle_link)) {
        size_t has = it->first->nbytes;
        if (it->is_large && has >= nbytes && has - nbytes <= nbytes / 8 && (!best || has < best->nbytes))
            best = it->first;
    }
    return best;
}

/* Shortens the extent to nbytes; a new free extent gets the rest. */
static tb_status split_extent(tb__extent *extent, size_t nbytes) {
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

static void merge_extents(tb__extent *left, tb__extent *right) {
    tb__extents_remove(&pool.extents, right);
    left->nbytes += right->nbytes;
    left->next = right->next;
    if (left->next)
        left->next->prev = left;
    free(right);
}

/* Cuts nbytes at a multiple of `alignment` out of the extent, which is long enough for both. */
static tb_status cut_extent(tb__extent **extent, size_t nbytes, size_t alignment) {
    tb__extent *it = *extent, *before = NULL;
    size_t nbefore = round_up(it->start, alignment) - it->start;
    if (nbefore > 0) {
        TB_TRY(split_extent(it, nbefore));
        tb__extents_update(&pool.extents, it);
        before = it;
        it = it->next;
    }
    tb_status status = it->nbytes > nbytes ? split_extent(it, nbytes) : TB_OK;
    if (status != TB_OK && before) {
        merge_extents(before, it);
        tb__extents_update(&pool.extents, before);
    }
    *extent = it;
    return status;
}

static tb_status allocate_extent(size_t nbytes, size_t asked, size_t alignment, tb__extent **out) {
    size_t most = nbytes + alignment - ALIGNMENT;
    bool is_large = most > SHARED_BYTES - (COLOURS - 1) * COLOUR_STEP;
    tb__extent *extent = is_large ? find_idle(nbytes) : tb__extents_fit(&pool.extents, most);
    if (!extent)
        TB_TRY(add_arena(nbytes, is_large, &extent));
    if (!is_large)
        TB_TRY(cut_extent(&extent, nbytes, alignment));
    extent->is_used = true;
    extent->is_offered = false;
    extent->asked = asked;
    tb__extents_update(&pool.extents, extent);
    arena *from = extent->arena;
    if (from->nusers++ == 0) {
        TAILQ_REMOVE(&pool.idle, from, idle_link);
        pool.idle_bytes -= from->nbytes;
        pool.busy_bytes += from->nbytes;
    }
    *out = extent;
    return TB_OK;
}

static int64_t thread_cpu_us(void) {
    struct timespec used;
    return clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used) == 0 ? used.tv_sec * 1000000 + used.tv_nsec / 1000 : 0;
}

/* Gives the extent huge pages, whole ones also at its ends. From Linux 6.1 on the kernel makes them on request, also
 * where it makes none by itself for shared memory, of places with at least one page. That takes less time than all the
 * small pages would, once they are touched. Where there are no huge pages, or they are hard to find, the rest comes in
 * small ones. */
static void make_huge(const tb__extent *extent) {
    enum { STEP = 8 * TB__HUGE_PAGE, MOST_US = 8 * 2000 };
    char *at = (char *)(extent->start / TB__HUGE_PAGE * TB__HUGE_PAGE);
    char *end = (char *)round_up(extent->start + extent->nbytes, TB__HUGE_PAGE);
    for (size_t now; at < end; at += now) {
        int64_t began = thread_cpu_us();
        now = (size_t)(end - at) < STEP ? (size_t)(end - at) : STEP;
        for (size_t i = 0; i < now; i += TB__HUGE_PAGE) {
            if (madvise(at + i, PAGE, MADV_POPULATE_READ) != 0)
                return;
        }
        if (madvise(at, now, MADV_COLLAPSE) != 0 || thread_cpu_us() - began > MOST_US)
            return;
    }
}

/* Memory that begins at a multiple of `alignment`, and has whole multiples of it for itself. */
static tb_status allocate(size_t nbytes, size_t alignment, tb__extent **out) {
    if (nbytes > PTRDIFF_MAX - 2 * (size_t)TB__HUGE_PAGE)
        return tb__fail(TB_TOO_BIG, "an allocation of %zu bytes", nbytes);
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&pool.lock);
    tb_status status = allocate_extent(round_up(nbytes > 0 ? nbytes : 1, alignment), nbytes, alignment, out);
    pthread_mutex_unlock(&pool.lock);
    if (status == TB_OK && nbytes >= TB__HUGE_PAGE && !(*out)->arena->file->is_whole)
        make_huge(*out);
    return status;
}

tb_status tb_alloc(size_t nbytes, void **out) {
    tb__extent *extent;
    TB_TRY(allocate(nbytes, ALIGNMENT, &extent));
    *out = (void *)extent->start;
    return TB_OK;
}

static _Atomic size_t npinned; /* allocations */

tb_status tb__memory_alloc_pinned(size_t nbytes, tb_status (*pin)(void *, size_t), void (*unpin)(void *), void **out) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    tb__extent *extent;
    TB_TRY(allocate(nbytes, page, &extent));
    tb_status status = pin((void *)extent->start, round_up(nbytes > 0 ? nbytes : 1, page));
    if (status != TB_OK) {
        tb_free((void *)extent->start);
        return status;
    }
    extent->unpin = unpin;
    atomic_fetch_add(&npinned, 1);
    *out = (void *)extent->start;
    return TB_OK;
}

bool tb__memory_has_pinned(void) {
    return atomic_load(&npinned) > 0;
}

static void let_go(arena *from) {
    if (--from->nusers > 0)
        return;
    TAILQ_INSERT_TAIL(&pool.idle, from, idle_link);
    pool.idle_bytes += from->nbytes;
    pool.busy_bytes -= from->nbytes;
    release_idle(pool.busy_bytes > KEPT_BYTES ? pool.busy_bytes : KEPT_BYTES);
}

static void free_extent(tb__extent *extent) {
    arena *from = extent->arena;
    extent->is_used = false;
    extent->is_offered = !from->is_large;
    if (extent->next && !extent->next->is_used)
        merge_extents(extent, extent->next);
    if (extent->prev && !extent->prev->is_used) {
        extent = extent->prev;
        merge_extents(extent, extent->next);
    }
    tb__extents_update(&pool.extents, extent);
    let_go(from);
}

static bool is_inherited(uintptr_t address) {
    for (const file *it = LIST_FIRST(&pool.inherited); it; it = LIST_NEXT(it, link)) {
        if (address - (uintptr_t)it->map.base < it->map.nbytes)
            return true;
    }
    return false;
}

/* Not under the lock, because drivers may take long. */
static void unpin(tb__extent *extent) {
    void (*fn)(void *) = extent->unpin;
    extent->unpin = NULL;
    pthread_mutex_unlock(&pool.lock);
    fn((void *)extent->start);
    atomic_fetch_sub(&npinned, 1);
    pthread_mutex_lock(&pool.lock);
}

void tb_free(void *ptr) {
    if (!ptr)
        return;
    pthread_mutex_lock(&pool.lock);
    tb__extent *extent = tb__extents_at(&pool.extents, (uintptr_t)ptr);
    bool is_ours = extent && extent->is_used && extent->start == (uintptr_t)ptr;
    if (is_ours && extent->unpin)
        unpin(extent);
    if (is_ours)
        free_extent(extent);
    bool is_known = is_ours || is_inherited((uintptr_t)ptr);
    pthread_mutex_unlock(&pool.lock);
    if (!is_known && !tb__devices_free(ptr))
        tb__log(TB_LOG_ERROR, "tb_free: %p is not the start of a live allocation; nothing is freed", ptr);
}

/* ---- Memory of other processes --------------------------------------------------------------------------------- */

static tb_status map_foreign(int fd, tb__arena_file *out) {
    struct stat info;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return tb__fail(TB_DENIED, "the memory is not a memfd that is sealed against shrinking");
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
        return tb__fail(TB_IO, "fcntl: %s", tb__errno_text(errno));
    out->base = tb__reserve_addresses(out->nbytes);
    if (out->base && map_part(out, out->base, out->nbytes))
        return TB_OK;
    tb_status status = tb__fail(TB_NO_MEMORY, "%zu bytes of another process: %s", out->nbytes, strerror(errno));
    if (out->base)
        munmap(out->base, out->nbytes);
    close(out->fd);
    return status;
}

tb_status tb__memory_adopt(int fd, void **base, size_t *nbytes) {
    file *from = tb__calloc(1, sizeof *from);
    arena *made = tb__calloc(1, sizeof *made);
    tb__extent *extent = tb__calloc(1, sizeof *extent);
    tb_status status = from && made && extent ? map_foreign(fd, &from->map) : TB_NO_MEMORY;
    if (status != TB_OK) {
        free(from);
        free(made);
        free(extent);
        return status;
    }
    from->is_whole = from->map.is_adopted = true;
    *made = (arena){.file = from,
                    .base = from->map.base,
                    .nbytes = from->map.nbytes,
                    .nusers = 1, /* never freed by tb_free */
                    .is_large = true,
                    .first = extent};
    *extent = (tb__extent){
        .start = (uintptr_t)made->base, .nbytes = made->nbytes, .asked = made->nbytes, .is_used = true, .arena = made};
    *base = made->base;
    *nbytes = made->nbytes;
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&pool.lock);
    tb__extents_add(&pool.extents, extent);
    LIST_INSERT_HEAD(&pool.files, from, link);
    pthread_mutex_unlock(&pool.lock);
    return TB_OK;
}

void tb__memory_abandon(void *base) {
    pthread_mutex_lock(&pool.lock);
    tb__extent *extent = tb__extents_at(&pool.extents, (uintptr_t)base);
    arena *it = extent && extent->is_used && extent->start == (uintptr_t)base ? extent->arena : NULL;
    if (it) {
        tb__extents_remove(&pool.extents, extent);
        close_file(it->file);
        free(extent);
        free(it);
    }
    pthread_mutex_unlock(&pool.lock);
}

static bool is_mapped(const void *ptr) {
    char byte;
    struct iovec here = {&byte, 1}, there = {(void *)(uintptr_t)ptr, 1};
    return process_vm_readv(getpid(), &here, 1, &there, 1, 0) >= 0 || errno != EFAULT; /* else the call is not
                                                                                        * permitted */
}

tb_status tb__memory_check_mapped(const void *ptr, size_t nbytes) {
    bool begins = nbytes == 0 || is_mapped(ptr);
    if (nbytes == 0 || (begins && is_mapped((const char *)ptr + nbytes - 1)))
        return TB_OK;
    if (begins)
        return tb__fail(TB_INVALID, "its %zu bytes at %p run past the memory that is mapped there", nbytes, ptr);
    return tb__fail(TB_INVALID,
                    "its %zu bytes at %p are neither mapped memory of this process nor memory of a device: they were "
                    "freed, or the address is wrong",
                    nbytes, ptr);
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
            *out = extent->arena->file->map;
    }
    pthread_mutex_unlock(&pool.lock);
    return is_found;
}

/* ---- Arenas that devices have pinned ---------------------------------------------------------------------------- */

bool tb__memory_hold(const void *ptr, tb__held_arena *out) {
    pthread_mutex_lock(&pool.lock);
    const tb__extent *extent = tb__extents_at(&pool.extents, (uintptr_t)ptr);
    arena *it = extent && extent->is_used && (uintptr_t)ptr - extent->start < extent->nbytes ? extent->arena : NULL;
    bool is_ours = it && !it->file->map.is_adopted;
    if (is_ours) {
        it->nusers++;
        *out = (tb__held_arena){it, it->base, it->nbytes, !it->is_large};
    }
    pthread_mutex_unlock(&pool.lock);
    return is_ours;
}

void tb__memory_let_go(tb__memory_arena *held) {
    if (!held)
        return;
    pthread_mutex_lock(&pool.lock);
    let_go(held);
    pthread_mutex_unlock(&pool.lock);
}
