/* tb_alloc: random requests against a model, reuse and release of memory, edge cases, threads, forks, failures. */
#include "device/host/memory.h"
#include "base/mem.h"

#include "../tests/support/random_case.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define MIB ((size_t)1 << 20)

static void *take(size_t nbytes) {
    void *p = NULL;
    if (tb_alloc(nbytes, &p) != TB_OK)
        fail_msg("%zu bytes: %s", nbytes, tb_error_detail());
    assert_non_null(p);
    assert_int_equal((uintptr_t)p % 64, 0);
    return p;
}

static tb__arena_file find(const void *p, size_t nbytes) {
    tb__arena_file file;
    assert_true(tb__memory_find(p, nbytes, &file));
    return file;
}

static bool is_open(int fd) {
    return fcntl(fd, F_GETFD) >= 0;
}

/* Whether the kernel can read from there. */
static bool is_readable(const void *p) {
    int fd[2];
    if (pipe(fd) != 0)
        return true;
    bool result = write(fd[1], p, 1) == 1;
    close(fd[0]);
    close(fd[1]);
    return result;
}

static int nlines;

static void count_line(void *arg, tb_log_level level, const char *line) {
    (void)arg;
    assert_int_equal(level, TB_LOG_ERROR);
    assert_non_null(strstr(line, "tb_free"));
    nlines++;
}

/* Runs it in a child, where it returns whether all is well. */
static bool holds_in_child(bool (*run)(void *), void *arg) {
    pid_t child = fork();
    if (child == 0) {
        alarm(100);
        _exit(run(arg) ? 0 : 1);
    }
    int status;
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

enum { SLOTS = 200 };

typedef struct slot {
    uint8_t *at;
    size_t nbytes;
    uint8_t mark;
} slot;

/* A mark at both ends, and in between where that is not much. */
static size_t marked(const slot *s) {
    return s->nbytes < 4096 ? s->nbytes : 64;
}

static void fill(slot *s, uint8_t mark) {
    s->mark = mark;
    if (s->nbytes == 0)
        return;
    memset(s->at, mark, marked(s));
    memset(s->at + s->nbytes - marked(s), mark, marked(s));
}

static bool is_kept(const slot *s) {
    for (size_t i = 0; i < marked(s); i++) {
        if (s->at[i] != s->mark || s->at[s->nbytes - 1 - i] != s->mark)
            return false;
    }
    return true;
}

static size_t random_size(rng *r) {
    switch (rng_range(r, 0, 40)) {
    case 0:
        return (size_t)rng_range(r, 63 * (int64_t)MIB, 130 * (int64_t)MIB);
    case 1:
    case 2:
        return (size_t)rng_range(r, (int64_t)MIB, 40 * (int64_t)MIB);
    case 3:
        return 0;
    default:
        return (size_t)rng_range(r, 1, rng_range(r, 0, 1) ? 500 : 300000);
    }
}

static bool is_apart(const slot *a, const slot *b) {
    return a->at != b->at && (a->at + a->nbytes <= b->at || b->at + b->nbytes <= a->at);
}

static void turn_over(slot *slots, rng *r) {
    slot *s = &slots[rng_range(r, 0, SLOTS - 1)];
    if (s->at) {
        assert_true(is_kept(s));
        find(s->at, s->nbytes);
        tb_free(s->at);
        s->at = NULL;
        return;
    }
    s->nbytes = random_size(r);
    s->at = take(s->nbytes);
    for (const slot *other = slots; other < slots + SLOTS; other++)
        assert_true(other == s || !other->at || is_apart(s, other));
    fill(s, (uint8_t)rng_range(r, 0, 255));
}

static void give_all(slot *slots) {
    for (slot *s = slots; s < slots + SLOTS; s++) {
        assert_true(!s->at || is_kept(s));
        tb_free(s->at);
        s->at = NULL;
    }
}

static void test_random(void **state) {
    (void)state;
    rng r = {test_seed()};
    static slot slots[SLOTS];
    int64_t cases = test_cases(20000);
    for (int64_t i = 0; i < cases; i++) {
        turn_over(slots, &r);
        if (i % 4096 == 4095)
            give_all(slots);
    }
    give_all(slots);
}

static void test_reuse(void **state) {
    (void)state;
    static const size_t sizes[] = {1000, 20 << 20, 100 << 20, 64 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char *p = take(sizes[i]);
        tb__arena_file file = find(p, sizes[i]);
        tb_free(p);
        char *again = take(sizes[i]);
        tb__arena_file same = find(again, sizes[i]);
        assert_true(p == again && file.base == same.base && file.fd == same.fd);
        tb_free(again);
    }
    /* Never used before: zero. */
    size_t nbytes = 200 * MIB;
    char *p = take(nbytes);
    for (size_t i = 0; i < nbytes; i += 4096)
        assert_int_equal(p[i], 0);
    assert_int_equal(p[nbytes - 1], 0);
    tb_free(p);
    /* Not much larger than what is asked for. */
    char *small = take(110 * MIB);
    assert_true(small != p);
    tb_free(small);
}

/* Pieces that were freed in any order become one again. */
static void test_pieces_join(void **state) {
    (void)state;
    enum { N = 63 };
    rng r = {test_seed()};
    char *whole = take(63 * MIB), *piece[N];
    void *base = find(whole, 1).base;
    tb_free(whole);
    for (int i = 0; i < N; i++) {
        piece[i] = take(MIB);
        assert_ptr_equal(find(piece[i], MIB).base, base);
    }
    for (int left = N; left > 0; left--) {
        int64_t i = rng_range(&r, 0, left - 1);
        tb_free(piece[i]);
        piece[i] = piece[left - 1];
    }
    assert_ptr_equal(take(63 * MIB), whole);
    tb_free(whole);
}

/* Of files, of which some may be closed by now. */
static blkcnt_t blocks_of(const int *fds, int nfds) {
    blkcnt_t sum = 0;
    struct stat info;
    for (int i = 0; i < nfds; i++)
        sum += fstat(fds[i], &info) == 0 ? info.st_blocks : 0;
    return sum;
}

/* Idle memory is bounded: it is returned to the system, also from the middle of a file. */
static void test_idle_is_bounded(void **state) {
    (void)state;
    enum { N = 12, EACH = 128 << 20 };
    char *p[N], *stays = take(EACH);
    int fds[N], nmapped = 0;
    for (int i = 0; i < N; i++) {
        p[i] = take(EACH);
        *p[i] = 1;
        fds[i] = find(p[i], EACH).fd;
    }
    blkcnt_t before = blocks_of(fds, N);
    for (int i = 0; i < N; i++) {
        tb_free(p[i]);
        tb__arena_file file;
        assert_false(tb__memory_find(p[i], 1, &file));
    }
    for (int i = 0; i < N; i++)
        nmapped += is_readable(p[i]);
    assert_in_range(nmapped, 1, 8);
    assert_true(is_readable(p[N - 1]));
    assert_true(blocks_of(fds, N) < before);
    /* As much as is in use is kept. */
    for (int i = 0; i < N; i++)
        p[i] = take(EACH);
    char *more = take((size_t)(N + 1) * EACH);
    for (int i = 0; i < N; i++)
        tb_free(p[i]);
    for (int i = 0; i < N; i++)
        assert_true(is_readable(p[i]));
    tb_free(more);
    tb_free(stays);
}

/* A file that is closed here has no pages left, although others may still have it mapped. */
static void test_closed_files_are_empty(void **state) {
    (void)state;
    const size_t nbytes = (size_t)5 << 28; /* more than is kept */
    char *p = take(nbytes);
    struct stat info;
    *p = 1;
    int fd = dup(find(p, nbytes).fd);
    assert_int_equal(fstat(fd, &info), 0);
    assert_true(info.st_blocks > 0);
    tb_free(p);
    assert_false(is_readable(p));
    assert_int_equal(fstat(fd, &info), 0);
    assert_int_equal(info.st_blocks, 0);
    close(fd);
}

/* Where a stretch of memory is in its file. */
typedef struct place {
    ino_t file;
    size_t first, last;
} place;

static place place_of(const char *p, size_t nbytes) {
    struct stat info;
    tb__arena_file file = find(p, nbytes);
    assert_int_equal(fstat(file.fd, &info), 0);
    size_t first = (size_t)(p - (const char *)file.base);
    return (place){info.st_ino, first, first + nbytes};
}

/* Returned places of a file are never used again: a peer's GPU may still have the old pages. */
static void test_places_are_used_once(void **state) {
    (void)state;
    enum { N = 8 };
    const size_t nbytes[] = {300 * MIB, 340 * MIB, 400 * MIB};
    char *p[N], *stays = take(MIB);
    place before[3 * N] = {{0}};
    size_t n = 0;
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < N; i++) {
            p[i] = take(nbytes[round]);
            place now = place_of(p[i], nbytes[round]);
            for (size_t k = 0; k < n; k++)
                assert_false(now.file == before[k].file && now.first < before[k].last && before[k].first < now.last);
            before[n++] = now;
        }
        for (int i = 0; i < N; i++)
            tb_free(p[i]);
    }
    tb_free(stays);
}

/* Memory that a device has pinned stays where it is, also when it is freed. */
static void test_held(void **state) {
    (void)state;
    enum { N = 20 };
    const size_t nbytes = 200 * MIB;
    tb__held_arena large, small;
    char *p = take(nbytes), *few = take(100), *others[N];
    assert_true(tb__memory_hold(p + nbytes / 2, &large) && tb__memory_hold(few + 99, &small));
    assert_true(large.base <= p && p + nbytes <= large.base + large.nbytes && !large.is_shared);
    assert_true(small.base <= few && few + 100 <= small.base + small.nbytes && small.is_shared);
    assert_int_equal(((uintptr_t)large.base | large.nbytes | (uintptr_t)small.base | small.nbytes) % 4096, 0);
    assert_false(tb__memory_hold(&large, &(tb__held_arena){0}));
    *p = 7;
    tb_free(p);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < N; i++) {
            others[i] = take(nbytes);
            assert_true(others[i] != p || round > 0);
        }
        for (int i = 0; i < N; i++)
            tb_free(others[i]);
        assert_true(round > 0 || *p == 7);
        if (round == 0)
            tb__memory_let_go(large.arena);
    }
    tb_free(few);
    tb__memory_let_go(small.arena);
    tb__memory_let_go(NULL);
}

static int count_descriptors(void) {
    int count = 0;
    DIR *dir = opendir("/proc/self/fd");
    assert_non_null(dir);
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

/* Descriptors do not grow with the number of allocations, nor with their size. */
static void test_descriptors(void **state) {
    (void)state;
    enum { N = 100 };
    int before = count_descriptors();
    char *p[N];
    for (int i = 0; i < N; i++)
        p[i] = take((size_t)(64 + i % 7) * MIB);
    assert_in_range(count_descriptors() - before, 0, 5);
    for (int i = 0; i < N; i++)
        *p[i] = p[i][(64 + i % 7) * MIB - 1] = (char)i;
    for (int i = 0; i < N; i++)
        assert_true(*p[i] == (char)i && p[i][(64 + i % 7) * MIB - 1] == (char)i);
    for (int i = 0; i < N; i++)
        tb_free(p[i]);
}

static void test_file(void **state) {
    (void)state;
    static const size_t sizes[] = {12345, 65 << 20};
    for (size_t i = 0; i < 2; i++) {
        char *p = take(sizes[i]);
        tb__arena_file file = find(p, sizes[i]);
        struct stat info;
        assert_int_equal(fstat(file.fd, &info), 0);
        assert_int_equal(info.st_size, file.nbytes);
        assert_int_equal((uintptr_t)file.base % (2 * MIB), 0);
        assert_int_equal(file.nbytes % (2 * MIB), 0);
        assert_int_equal(fcntl(file.fd, F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
        assert_true(fcntl(file.fd, F_GETFD) & FD_CLOEXEC);
        assert_true((char *)file.base <= p && p + sizes[i] <= (char *)file.base + file.nbytes);
        /* A peer sees this process's data, and may write anything anywhere: the bookkeeping is not affected. */
        char *peer = mmap(NULL, file.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, 0);
        assert_true(peer != MAP_FAILED);
        p[sizes[i] - 1] = 77;
        assert_int_equal(peer[p + sizes[i] - 1 - (char *)file.base], 77);
        memset(peer + (p - (char *)file.base) / MIB * MIB, 0xff, 64 * MIB);
        assert_int_equal(p[0], -1);
        munmap(peer, file.nbytes);
        void *other = take(sizes[i]);
        tb_free(p);
        tb_free(other);
    }
}

static void test_find(void **state) {
    (void)state;
    tb__arena_file file = {.fd = -7};
    char *before = take(64), *p = take(1000), *nothing = take(0), *nothing_either = take(0);
    assert_true(nothing != nothing_either);
    find(p, 1000);
    find(p, 0);
    find(p + 999, 1);
    find(p + 999, 0);
    find(nothing, 0);
    assert_false(tb__memory_find(p, 1001, &file));
    assert_false(tb__memory_find(p, SIZE_MAX, &file));
    assert_false(tb__memory_find(p - 1, 2, &file));
    assert_false(tb__memory_find(p + 999, 2, &file));
    assert_false(tb__memory_find(p + 1000, 0, &file));
    assert_false(tb__memory_find(p + 1000, 1, &file));
    assert_false(tb__memory_find(nothing, 1, &file));
    assert_false(tb__memory_find(nothing + 1, 0, &file));
    assert_false(tb__memory_find(NULL, 0, &file));
    assert_false(tb__memory_find(&file, 1, &file));
    assert_false(tb__memory_find((void *)UINTPTR_MAX, 1, &file));
    tb_free(p);
    assert_false(tb__memory_find(p, 1, &file));
    assert_int_equal(file.fd, -7);
    tb_free(before);
    tb_free(nothing);
    tb_free(nothing_either);
}

static void test_bad_frees(void **state) {
    (void)state;
    char *p = take(1000), *q = take(1000), on_stack[64];
    tb_log_set(TB_LOG_ERROR, count_line, NULL);
    nlines = 0;
    tb_free(NULL);
    assert_int_equal(nlines, 0);
    tb_free(p + 64);
    tb_free(on_stack);
    tb_free((void *)UINTPTR_MAX);
    assert_int_equal(nlines, 3);
    find(p, 1000);
    tb_free(p);
    assert_int_equal(nlines, 3);
    tb_free(p);
    assert_int_equal(nlines, 4);
    tb_log_set(TB_LOG_OFF, NULL, NULL);
    /* Nothing was freed in excess: the place is given out once. */
    char *again = take(1000), *other = take(1000);
    assert_true(again != other && again != q && other != q);
    tb_free(again);
    tb_free(other);
    tb_free(q);
}

static bool is_limited(void *arg) {
    (void)arg;
    void *p = NULL;
    int fd = open("/dev/null", O_RDONLY);
    struct rlimit files = {(rlim_t)fd, (rlim_t)fd}, size = {32 * MIB, 32 * MIB};
    if (setrlimit(RLIMIT_NOFILE, &files) != 0 || tb_alloc(1, &p) != TB_IO || p ||
        !strstr(tb_error_detail(), "memfd_create") || !strstr(tb_error_detail(), "its RLIMIT_NOFILE is"))
        return false;
    close(fd);
    if (setrlimit(RLIMIT_FSIZE, &size) != 0 || tb_alloc(1, &p) != TB_NO_MEMORY || p)
        return false;
    return strstr(tb_error_detail(), "limited to files of 33554432") != NULL;
}

static void test_too_much(void **state) {
    (void)state;
    void *p = NULL;
    assert_int_equal(tb_alloc(SIZE_MAX, &p), TB_TOO_BIG);
    assert_int_equal(tb_alloc(PTRDIFF_MAX, &p), TB_TOO_BIG);
    assert_non_null(strstr(tb_error_detail(), "9223372036854775807"));
    assert_int_equal(tb_alloc((size_t)1 << 60, &p), TB_NO_MEMORY);
    assert_non_null(strstr(tb_error_detail(), "the machine has"));
    assert_int_equal(tb_alloc((size_t)1 << 45, &p), TB_NO_MEMORY);
    assert_null(p);
    assert_true(holds_in_child(is_limited, NULL));
    tb_free(take(1));
}

/* How much of the mapping at this address is mapped in huge pages of shared memory. */
static size_t huge_bytes(const void *at) {
    char line[256];
    unsigned long from, to;
    size_t kib = 0;
    bool is_inside = false;
    FILE *maps = fopen("/proc/self/smaps", "re");
    assert_non_null(maps);
    while (fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2)
            is_inside = (uintptr_t)at >= from && (uintptr_t)at < to;
        else if (is_inside)
            (void)sscanf(line, "ShmemPmdMapped: %zu kB", &kib);
    }
    fclose(maps);
    return kib << 10;
}

/* A small allocation takes only what is touched. */
static bool is_small_lazy(void *arg) {
    struct stat info;
    void *p;
    (void)arg;
    return tb_alloc(MIB, &p) == TB_OK && fstat(find(p, MIB).fd, &info) == 0 && info.st_blocks == 0;
}

/* Allocations that are as large as a huge page have huge pages, before they are touched, where the kernel makes them:
 * in an arena that small ones share, and in one of their own. */
static void test_huge_pages(void **state) {
    (void)state;
    static const size_t sizes[] = {8 * MIB, 100 * MIB};
    assert_true(holds_in_child(is_small_lazy, NULL));
    for (size_t i = 0; i < 2; i++) {
        char *p = take(sizes[i]), *whole = p + -(uintptr_t)p % TB__HUGE_PAGE;
        size_t nbytes = sizes[i] / TB__HUGE_PAGE * TB__HUGE_PAGE - TB__HUGE_PAGE, found = huge_bytes(whole);
        /* By hand, as the first page is there: what is refused now may have been refused then. */
        if (found < nbytes && madvise(whole, nbytes, 25 /* MADV_COLLAPSE */) != 0)
            skip();
        assert_true(found >= nbytes);
        memset(p, 1, sizes[i]);
        assert_true(huge_bytes(whole) >= nbytes);
        tb_free(p);
    }
}

static bool fails_cleanly(void *arg) {
    size_t nbytes = *(size_t *)arg;
    void *p = NULL, *first = NULL;
    int nfailed = 0;
    for (;; nfailed++) {
        tb__mem_fail_after(nfailed);
        tb_status status = tb_alloc(nbytes, &p);
        tb__mem_fail_after(-1);
        if (status == TB_OK)
            break;
        if (status != TB_NO_MEMORY || p || nfailed > 10)
            return false;
    }
    /* Failed calls have left nothing behind that could be in the way, or taken twice. */
    tb_free(p);
    return nfailed >= 2 && tb_alloc(nbytes, &first) == TB_OK && first == p;
}

static void test_failed_allocations(void **state) {
    (void)state;
    assert_true(holds_in_child(fails_cleanly, &(size_t){100}));
    assert_true(holds_in_child(fails_cleanly, &(size_t){70 * MIB}));
}

static void *work(void *arg) {
    rng r = {*(uint64_t *)arg};
    slot slots[SLOTS] = {{0}};
    for (int i = 0; i < 4000; i++)
        turn_over(slots, &r);
    give_all(slots);
    return NULL;
}

static void test_threads(void **state) {
    (void)state;
    uint64_t seed = test_seed(), seeds[4];
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        seeds[i] = seed + (uint64_t)i;
        assert_int_equal(pthread_create(&threads[i], NULL, work, &seeds[i]), 0);
    }
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
}

typedef struct family {
    char *shared[2], *large[2]; /* by generation */
    int fd[2];                  /* of the large ones */
    int generation;
} family;

static bool is_independent(void *arg) {
    family f = *(family *)arg;
    void *mine[2];
    tb__arena_file file;
    nlines = 0;
    tb_log_set(TB_LOG_ERROR, count_line, NULL);
    for (int g = 0; g < f.generation; g++) {
        if (is_open(f.fd[g]))
            return false;
    }
    for (int g = 0; g < f.generation; g++) {
        if (tb__memory_find(f.shared[g], 1, &file) || is_readable(f.shared[g]) || is_readable(f.large[g]))
            return false;
        tb_free(f.shared[g]);
        tb_free(f.large[g]);
    }
    if (nlines != 0 || tb_alloc(1000, &mine[0]) != TB_OK || tb_alloc(70 * MIB, &mine[1]) != TB_OK ||
        !tb__memory_find(mine[0], 1000, &file))
        return false;
    for (int i = 0; i < 2; i++) {
        if (*(char *)mine[i] != 0)
            return false;
        memset(mine[i], 'c', 1000);
    }
    if (f.generation < 2) {
        if (!tb__memory_find(mine[1], 70 * MIB, &file))
            return false;
        f.fd[f.generation] = file.fd;
        f.shared[f.generation] = mine[0];
        f.large[f.generation++] = mine[1];
        if (!holds_in_child(is_independent, &f))
            return false;
    }
    bool is_kept = *(char *)mine[0] == 'c' && *(char *)mine[1] == 'c';
    tb_free(mine[0]);
    tb_free(mine[1]);
    return is_kept && nlines == 0;
}

static void test_fork(void **state) {
    (void)state;
    family f = {.shared = {take(1000)}, .large = {take(70 * MIB)}, .generation = 1};
    f.fd[0] = find(f.large[0], 70 * MIB).fd;
    memset(f.shared[0], 'p', 1000);
    memset(f.large[0], 'p', 1000);
    assert_true(holds_in_child(is_independent, &f));
    assert_int_equal(f.shared[0][999], 'p');
    assert_int_equal(f.large[0][999], 'p');
    find(f.shared[0], 1000);
    tb_free(f.shared[0]);
    tb_free(f.large[0]);
    tb_free(take(1000));
}

/* Memory of another process, as its descriptor comes over a socket. */
static void adopted_memory(void **state) {
    (void)state;
    char *ours, *theirs = NULL;
    void *base;
    size_t nbytes;
    tb__arena_file file, found;
    assert_int_equal(tb_alloc(100000, (void **)&ours), TB_OK);
    memset(ours, 7, 100000);
    assert_true(tb__memory_find(ours, 100000, &file));
    assert_int_equal(tb__memory_adopt(file.fd, &base, &nbytes), TB_OK);
    assert_int_equal(nbytes, file.nbytes);
    theirs = (char *)base + (ours - (char *)file.base);
    assert_int_equal(theirs[99999], 7);
    theirs[5] = 8;
    assert_int_equal(ours[5], 8);
    assert_true(tb__memory_find(theirs, 100000, &found));
    assert_ptr_equal(found.base, base);
    assert_true(found.fd != file.fd);
    assert_false(tb__memory_find((char *)base + nbytes - 1, 2, &found));
    tb__memory_abandon(base);
    assert_false(tb__memory_find(theirs, 1, &found));
    tb_free(ours);

    int fd = memfd_create("not-sealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(fd >= 0 && ftruncate(fd, 4096) == 0);
    assert_int_equal(tb__memory_adopt(fd, &base, &nbytes), TB_DENIED);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int reader = open(path, O_RDONLY | O_CLOEXEC);
    assert_true(reader >= 0);
    assert_int_equal(tb__memory_adopt(reader, &base, &nbytes), TB_DENIED);
    assert_non_null(strstr(tb_error_detail(), "was not opened for reading and writing"));
    close(reader);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), 0);
    assert_int_equal(tb__memory_adopt(fd, &base, &nbytes), TB_DENIED);
    assert_non_null(strstr(tb_error_detail(), "is sealed against writing"));
    close(fd);
    assert_int_equal(tb__memory_adopt(STDERR_FILENO, &base, &nbytes), TB_DENIED);
}

int main(void) {
    const struct CMUnitTest huge_pages[] = {cmocka_unit_test(test_huge_pages)};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(adopted_memory),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_reuse),
        cmocka_unit_test(test_pieces_join),
        cmocka_unit_test(test_idle_is_bounded),
        cmocka_unit_test(test_closed_files_are_empty),
        cmocka_unit_test(test_places_are_used_once),
        cmocka_unit_test(test_held),
        cmocka_unit_test(test_descriptors),
        cmocka_unit_test(test_file),
        cmocka_unit_test(test_find),
        cmocka_unit_test(test_bad_frees),
        cmocka_unit_test(test_too_much),
        cmocka_unit_test(test_failed_allocations),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_fork),
    };
    int nfailed = cmocka_run_group_tests(huge_pages, NULL, NULL);
    /* Without huge pages the gigabytes that the others allocate have no pages, unless they are touched. */
    (void)prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
    return nfailed + cmocka_run_group_tests(tests, NULL, NULL);
}
