/* The slow device. One lock guards all of it: memory, runs of all devices, and the faults that tests ask for. */
#include "slow_device.h"

#include "base/checksum.h"
#include "base/mem.h"
#include "base/process.h"
#include "device/host/move.h"
#include "device/host/quant.h"
#include "random_case.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define POOL_NBYTES ((size_t)256 << 30) /* of addresses */

typedef struct slow_run slow_run;
TAILQ_HEAD(slow_runs, slow_run);

typedef struct slow_device {
    tb__device base;
    int wake; /* an eventfd: a run has ended */
    size_t njobs, nmappings, nallocations;
    struct slow_runs waiting; /* for fences that come first */
    struct slow_runs begun;   /* the thread's */
    struct slow_runs ended;   /* their fences are not told yet */
    pthread_t thread;
    bool is_stopping;
} slow_device;

struct tb__job {
    tb__arena arena;
    tb__move *moves;
    size_t nmoves;
    size_t nruns; /* not yet complete */
};

struct slow_run {
    slow_device *device;
    tb__job *job; /* NULL: a checksum */
    tb__fence *fence;
    char *src_buffer, *dst_buffer;
    size_t *order; /* of its moves */
    size_t nmoves, next;
    tb__fence **after;
    size_t nafter;
    const void *bytes;
    size_t nbytes;
    uint64_t *sum;
    int64_t due_us;
    bool is_cancelled, ignores_cancel;
    bool is_held, is_failing;
    uint64_t held_until; /* slow.times_let_go is this */
    size_t stop_at;      /* so many moves are done before it is held or fails */
    tb_status status;
    char why[TB__FENCE_WHY_MAX];
    TAILQ_ENTRY(slow_run) link;
};

typedef struct allocation {
    size_t offset, nbytes;
    uint64_t epoch;
    slow_device *device; /* NULL: a test's */
    LIST_ENTRY(allocation) link;
} allocation;

/* Counts down to a fault; negative: there is none. */
typedef struct fault {
    long after;
    tb_status status;
    char why[TB__FENCE_WHY_MAX];
} fault;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int fd;
    char *seen, *alias; /* the two mappings of the pool; NULL: it is not there yet */
    size_t used;
    uint64_t nallocations;
    LIST_HEAD(, allocation) allocations;
    rng random;
    int64_t most_us;
    fault calls[SLOW_DEVICE_NCALLS], run, hold;
    uint64_t times_let_go; /* runs that were held before the last time go on */
} slow;

static void die(const char *what) {
    fprintf(stderr, "slow device: %s\n", what);
    abort();
}

static void mend(void) {
    for (int i = 0; i < SLOW_DEVICE_NCALLS; i++)
        slow.calls[i].after = -1;
    slow.run.after = slow.hold.after = -1;
}

static void forget_allocations(void) {
    allocation *a;
    while ((a = LIST_FIRST(&slow.allocations))) {
        LIST_REMOVE(a, link);
        free(a);
    }
}

/* Also in a forked child, which has none of the memory. */
static void reset(void) {
    pthread_mutex_init(&slow.lock, NULL);
    tb__monotonic_cond_init(&slow.changed);
    slow.fd = -1;
    slow.seen = slow.alias = NULL;
    slow.used = 0;
    forget_allocations();
    mend();
}

__attribute__((constructor)) static void set_up(void) {
    reset();
    slow.random.state = 1;
    slow.most_us = 300;
    pthread_atfork(NULL, NULL, reset);
}

static void lock(void) {
    pthread_mutex_lock(&slow.lock);
}

static void unlock(void) {
    pthread_mutex_unlock(&slow.lock);
}

static int64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* ---- What tests ask for ------------------------------------------------------------------------------------------ */

void slow_device_install(void) {
    static const tb__device_ops *const devices[] = {&slow_device_ops, &tb__host_device_ops, NULL};
    atomic_store(&tb__devices, devices);
}

void slow_device_set_seed(uint64_t seed) {
    lock();
    slow.random.state = seed;
    unlock();
}

void slow_device_set_delay(int64_t most_us) {
    lock();
    slow.most_us = most_us;
    unlock();
}

void slow_device_fail_call(slow_device_call call, long n, tb_status status) {
    lock();
    slow.calls[call] = (fault){.after = n, .status = status};
    unlock();
}

void slow_device_fail_run(long n, tb_status status, const char *why) {
    lock();
    slow.run = (fault){.after = n, .status = status};
    snprintf(slow.run.why, sizeof slow.run.why, "%s", why);
    unlock();
}

void slow_device_hold_run(long n) {
    lock();
    slow.hold = (fault){.after = n};
    unlock();
}

void slow_device_let_go(void) {
    lock();
    slow.times_let_go++;
    pthread_cond_broadcast(&slow.changed);
    unlock();
}

void slow_device_mend(void) {
    lock();
    mend();
    unlock();
    slow_device_let_go();
}

/* With the lock held. Whether it is this one's turn. */
static bool strikes(fault *f) {
    return f->after >= 0 && f->after-- == 0;
}

static tb_status check_call(slow_device_call call) {
    static const char *const names[] = {"open", "alloc", "share", "map", "prepare", "run"};
    lock();
    bool fails = strikes(&slow.calls[call]);
    tb_status status = slow.calls[call].status;
    unlock();
    return fails ? tb__fail(status, "%s of the slow device fails, as the test wants", names[call]) : TB_OK;
}

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

static void make_pool(void) {
    slow.fd = tb__fd_own(memfd_create("slow", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (slow.fd < 0 || ftruncate(slow.fd, (off_t)POOL_NBYTES) != 0 ||
        fcntl(slow.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
        die("no memfd");
    slow.seen = mmap(NULL, POOL_NBYTES, PROT_NONE, MAP_SHARED | MAP_NORESERVE, slow.fd, 0);
    slow.alias = mmap(NULL, POOL_NBYTES, PROT_NONE, MAP_SHARED | MAP_NORESERVE, slow.fd, 0);
    if (slow.seen == MAP_FAILED || slow.alias == MAP_FAILED)
        die("no addresses");
    madvise(slow.seen, POOL_NBYTES, MADV_DONTFORK);
    madvise(slow.alias, POOL_NBYTES, MADV_DONTFORK);
    madvise(slow.alias, POOL_NBYTES, MADV_DONTDUMP);
    madvise(slow.seen, POOL_NBYTES, MADV_DONTDUMP);
}

/* With the lock held. Pages without access rights lie between allocations. */
static void *allocate(size_t nbytes, slow_device *device) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    allocation *a = calloc(1, sizeof *a);
    if (!a)
        die("no memory");
    if (!slow.seen)
        make_pool();
    *a = (allocation){.offset = slow.used + page, .nbytes = nbytes, .epoch = ++slow.nallocations, .device = device};
    size_t whole = (nbytes + page - 1) / page * page;
    if (nbytes > POOL_NBYTES || whole + 2 * page > POOL_NBYTES - slow.used)
        die("all addresses are used");
    slow.used += whole + page;
    if (whole && mprotect(slow.alias + a->offset, whole, PROT_READ | PROT_WRITE) != 0)
        die("mprotect");
    LIST_INSERT_HEAD(&slow.allocations, a, link);
    if (device)
        device->nallocations++;
    return slow.seen + a->offset;
}

/* With the lock held. The allocation that has all of these bytes. */
static allocation *find_allocation(const void *address, size_t nbytes) {
    const char *p = address;
    if (!slow.seen || p < slow.seen || p >= slow.seen + POOL_NBYTES)
        return NULL;
    size_t offset = (size_t)(p - slow.seen);
    allocation *a;
    LIST_FOREACH(a, &slow.allocations, link) {
        if (offset >= a->offset && offset - a->offset <= a->nbytes && nbytes <= a->nbytes - (offset - a->offset))
            return a;
    }
    return NULL;
}

static void deallocate(void *address) {
    lock();
    allocation *a = find_allocation(address, 0);
    if (!a || slow.seen + a->offset != address)
        die("memory is freed that is none of its own, or twice");
    size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (a->nbytes + page - 1) / page * page;
    if (whole && (mprotect(slow.alias + a->offset, whole, PROT_NONE) != 0 ||
                  fallocate(slow.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)a->offset, (off_t)whole) != 0))
        die("mprotect, or fallocate");
    if (a->device)
        a->device->nallocations--;
    LIST_REMOVE(a, link);
    free(a);
    unlock();
}

/* By which the device reaches it; host memory as it is. */
static void *translate(const void *address) {
    const char *p = address;
    lock();
    if (slow.seen && p >= slow.seen && p < slow.seen + POOL_NBYTES)
        p = slow.alias + (p - slow.seen);
    unlock();
    return (void *)(uintptr_t)p;
}

void *slow_device_bytes(const void *address) {
    return translate(address);
}

void *slow_device_alloc(size_t nbytes) {
    lock();
    void *p = allocate(nbytes, NULL);
    unlock();
    return p;
}

void slow_device_free(void *address) {
    if (address)
        deallocate(address);
}

static tb_status slow_alloc(tb__device *device, size_t nbytes, void **out) {
    TB_TRY(check_call(SLOW_DEVICE_ALLOC));
    if (nbytes > POOL_NBYTES / 4)
        return tb__fail(TB_NO_MEMORY, "%zu bytes are more than the slow device has", nbytes);
    lock();
    *out = allocate(nbytes, (slow_device *)device);
    unlock();
    return TB_OK;
}

static void slow_free(tb__device *device, void *address) {
    (void)device;
    slow_device_free(address);
}

static bool slow_find(tb__device *device, const void *address, size_t nbytes, tb__memory *out) {
    (void)device;
    lock();
    const allocation *a = find_allocation(address, nbytes);
    if (a)
        *out =
            (tb__memory){.base = slow.seen + a->offset, .nbytes = a->nbytes, .epoch = a->epoch, .is_shareable = true};
    unlock();
    return a;
}

/* ---- Other processes --------------------------------------------------------------------------------------------- */

typedef struct key {
    uint64_t inode, offset, nbytes;
} key;

/* No address of it is ever seen: the mapping is the device's alone. */
typedef struct slow_mapping {
    tb__mapping base;
    void *pages;
    size_t npages_bytes;
} slow_mapping;

static tb_status slow_share(tb__device *device, const tb__memory *memory, tb__memory_key *out, int *fd) {
    struct stat info;
    (void)device;
    TB_TRY(check_call(SLOW_DEVICE_SHARE));
    lock();
    const allocation *a = find_allocation(memory->base, memory->nbytes);
    bool is_same = a && a->epoch == memory->epoch;
    unlock();
    if (!is_same)
        return tb__fail(TB_INVALID, "the memory at %p is gone", memory->base);
    if (fstat(slow.fd, &info) != 0)
        return tb__fail(TB_IO, "fstat: %s", strerror(errno));
    key k = {.inode = info.st_ino, .offset = (uint64_t)((char *)memory->base - slow.seen), .nbytes = memory->nbytes};
    *out = (tb__memory_key){.nbytes = sizeof k};
    memcpy(out->bytes, &k, sizeof k);
    *fd = slow.fd;
    return TB_OK;
}

static tb_status slow_map(tb__device *base, const tb__memory_key *given, int fd, tb__mapping **out) {
    slow_device *device = (slow_device *)base;
    struct stat info;
    key k;
    TB_TRY(check_call(SLOW_DEVICE_MAP));
    if (given->nbytes != sizeof k)
        return tb__fail(TB_INVALID, "a memory key of %" PRIu32 " bytes, not %zu", given->nbytes, sizeof k);
    memcpy(&k, given->bytes, sizeof k);
    if (fstat(fd, &info) != 0)
        return tb__fail(TB_IO, "fstat: %s", strerror(errno));
    uint64_t size = (uint64_t)info.st_size;
    if (k.inode != info.st_ino || k.nbytes > size || k.offset > size - k.nbytes)
        return tb__fail(TB_INVALID, "a memory key that does not belong to its descriptor");
    slow_mapping *mapping = tb__calloc(1, sizeof *mapping);
    if (!mapping)
        return TB_NO_MEMORY;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), before = k.offset % page;
    mapping->npages_bytes = before + k.nbytes + 1; /* never nothing */
    mapping->pages =
        mmap(NULL, mapping->npages_bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, (off_t)(k.offset - before));
    if (mapping->pages == MAP_FAILED) {
        free(mapping);
        return tb__fail(TB_IO, "mmap: %s", strerror(errno));
    }
    mapping->base = (tb__mapping){&slow_device_ops, (char *)mapping->pages + before, k.nbytes};
    device->nmappings++;
    *out = &mapping->base;
    return TB_OK;
}

static void slow_unmap(tb__device *base, tb__mapping *given) {
    slow_mapping *mapping = (slow_mapping *)given;
    if (given->ops != &slow_device_ops)
        die("a mapping of another device is unmapped");
    munmap(mapping->pages, mapping->npages_bytes);
    free(mapping);
    ((slow_device *)base)->nmappings--;
}

/* ---- Jobs -------------------------------------------------------------------------------------------------------- */

static tb_status copy_sources(tb__job *job, tb__move *move) {
    const void **src = tb__arena_alloc(&job->arena, move->nsrc, sizeof *src);
    int64_t(*stride)[TB_MAX_DIMS] = tb__arena_alloc(&job->arena, move->nsrc, sizeof *stride);
    tb__mapping **left = tb__arena_alloc(&job->arena, move->nsrc, sizeof *left);
    if (!src || !stride || !left)
        return TB_NO_MEMORY;
    for (uint32_t k = 0; k < move->nsrc; k++) {
        const tb__mapping *mapping = move->src_mapping ? move->src_mapping[k] : NULL;
        src[k] = mapping ? move->src[k] : translate(move->src[k]);
        left[k] = mapping == TB__IN_BUFFER ? TB__IN_BUFFER : NULL;
        if (mapping && mapping != TB__IN_BUFFER)
            TB_TRY(tb__mapping_source(mapping, &slow_device_ops, move, k, &src[k]));
        memcpy(stride[k], move->src_stride[k], sizeof *stride);
    }
    move->src = src;
    move->src_stride = (const int64_t(*)[TB_MAX_DIMS])stride;
    move->src_mapping = left;
    return TB_OK;
}

static tb_status fill_job(tb__job *job, const tb__move *moves, size_t nmoves) {
    job->moves = tb__arena_alloc(&job->arena, nmoves, sizeof *job->moves);
    if (!job->moves)
        return TB_NO_MEMORY;
    for (job->nmoves = 0; job->nmoves < nmoves; job->nmoves++) {
        tb__move *move = &job->moves[job->nmoves];
        *move = moves[job->nmoves];
        TB_TRY(tb__move_check(move));
        TB_TRY(copy_sources(job, move));
        if (!move->is_dst_in_buffer)
            move->dst = translate(move->dst);
        if (move->quantised) {
            tb__quantised *copy = tb__arena_alloc(&job->arena, 1, sizeof *copy);
            if (!copy)
                return TB_NO_MEMORY;
            *copy = *move->quantised;
            copy->data = translate(copy->data);
            copy->scales = translate(copy->scales);
            move->quantised = copy;
        }
    }
    return TB_OK;
}

static void free_job(tb__job *job) {
    if (job)
        tb__arena_fini(&job->arena);
    free(job);
}

static tb_status slow_prepare(tb__device *device, const tb__move *moves, size_t nmoves, tb__job **out) {
    TB_TRY(check_call(SLOW_DEVICE_PREPARE));
    tb__job *job = tb__calloc(1, sizeof *job);
    tb_status status = job ? fill_job(job, moves, nmoves) : TB_NO_MEMORY;
    if (status != TB_OK) {
        free_job(job);
        return status;
    }
    ((slow_device *)device)->njobs++;
    *out = job;
    return TB_OK;
}

static void slow_release(tb__device *device, tb__job *job) {
    if (job && job->nruns > 0)
        die("a job is released whose runs are under way");
    if (job)
        ((slow_device *)device)->njobs--;
    free_job(job);
}

/* ---- The thread -------------------------------------------------------------------------------------------------- */

static tb__quant_tensor tensor_of(const tb__quantised *q) {
    return (tb__quant_tensor){.format = q->format,
                              .rows = q->rows,
                              .columns = q->columns,
                              .data = q->data,
                              .scales = q->scales,
                              .scale = q->scale ? *q->scale : 0};
}

enum { MOST_SOURCES = 64 };

static tb_status do_move(const slow_run *run, size_t index) {
    tb__move move = run->job->moves[index];
    const void *src[MOST_SOURCES];
    if (move.nsrc > MOST_SOURCES)
        die("a move with too many sources");
    for (uint32_t k = 0; k < move.nsrc; k++)
        src[k] = move.src_mapping[k] ? run->src_buffer + (uintptr_t)move.src[k] : move.src[k];
    move.src = src;
    move.src_mapping = NULL;
    if (move.is_dst_in_buffer)
        move.dst = run->dst_buffer + (uintptr_t)move.dst;
    move.is_dst_in_buffer = false;
    if (move.kind == TB__MOVE_COPY)
        return tb__moves_run(&move, 1);
    if (move.kind == TB__MOVE_DEQUANTISE) {
        tb__quant_tensor from = tensor_of(move.quantised);
        tb__quant_rows rows = {move.dst, move.dst_dtype, move.dst_stride[0]};
        return tb__quant_dequantise(&from, move.quantised->first, move.len[0], &rows);
    }
    tb__quant_rows rows = {(char *)(uintptr_t)src[0], move.src_dtype, move.src_stride[0][0]};
    if (move.kind == TB__MOVE_QUANTISE) {
        tb__quant_tensor to = tensor_of(move.quantised);
        return tb__quant_quantise(&to, move.quantised->first, move.len[0], &rows);
    }
    float amax = 0;
    TB_TRY(tb__quant_amax(&rows, move.len[0], move.len[1], &amax));
    *move.amax = amax > *move.amax ? amax : *move.amax;
    return TB_OK;
}

/* With the lock held. */
static void end_run(slow_run *run, tb_status status, const char *why) {
    run->status = status;
    if (why != run->why)
        snprintf(run->why, sizeof run->why, "%s", why);
    TAILQ_REMOVE(&run->device->begun, run, link);
    TAILQ_INSERT_TAIL(&run->device->ended, run, link);
    eventfd_write(run->device->wake, 1);
}

static bool is_held(const slow_run *run) {
    return run->is_held && run->held_until == slow.times_let_go;
}

static bool may_go_on(const slow_run *run, int64_t now) {
    return run->due_us <= now && !(is_held(run) && run->next == run->stop_at);
}

/* With the lock held, which is free while the move is done. */
static void go_on(slow_run *run) {
    if (run->is_cancelled && !run->ignores_cancel && !is_held(run)) {
        end_run(run, TB_CANCELLED, "it was cancelled");
    } else if (run->is_failing && run->next == run->stop_at) {
        end_run(run, run->status, run->why);
    } else if (run->next == run->nmoves) {
        end_run(run, TB_OK, "");
    } else {
        tb_status status = TB_OK;
        size_t index = run->order ? run->order[run->next] : 0;
        run->next++;
        unlock();
        if (run->job)
            status = do_move(run, index);
        else
            *run->sum = tb__checksum(run->bytes, run->nbytes);
        lock();
        if (status != TB_OK)
            end_run(run, status, tb_error_detail());
    }
}

static void wait_until(int64_t us) {
    struct timespec when = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000};
    if (us == INT64_MAX)
        pthread_cond_wait(&slow.changed, &slow.lock);
    else
        pthread_cond_timedwait(&slow.changed, &slow.lock, &when);
}

static void *do_runs(void *arg) {
    slow_device *device = arg;
    lock();
    while (!device->is_stopping) {
        slow_run *run, *chosen = NULL;
        int64_t now = now_us(), due = INT64_MAX, ngoing = 0;
        TAILQ_FOREACH(run, &device->begun, link) {
            if (may_go_on(run, now) && rng_range(&slow.random, 0, ngoing++) == 0)
                chosen = run;
            else if (run->due_us > now && run->due_us < due)
                due = run->due_us;
        }
        if (chosen)
            go_on(chosen);
        else
            wait_until(due);
    }
    unlock();
    return NULL;
}

/* ---- Runs -------------------------------------------------------------------------------------------------------- */

static void free_run(slow_run *run) {
    if (run) {
        free(run->order);
        free(run->after);
    }
    free(run);
}

static bool has_part(const tb__run *what, uint32_t part) {
    for (size_t i = 0; what->parts && i < what->nparts; i++) {
        if (what->parts[i] == part)
            return true;
    }
    return !what->parts;
}

static tb_status fill_run(slow_run *run, const tb__run *what) {
    run->src_buffer = translate(what->src_buffer);
    run->dst_buffer = translate(what->dst_buffer);
    run->order = tb__malloc(run->job->nmoves, sizeof *run->order);
    run->after = tb__malloc(what->nafter, sizeof(tb__fence *));
    if (!run->order || !run->after)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < run->job->nmoves; i++) {
        if (has_part(what, run->job->moves[i].part))
            run->order[run->nmoves++] = i;
    }
    for (size_t i = 0; i < what->nafter; i++)
        run->after[run->nafter++] = what->after[i];
    return TB_OK;
}

static void queue_run(slow_run *run) {
    slow_device *device = run->device;
    lock();
    for (size_t i = 1; i < run->nmoves && run->order; i++) {
        size_t other = (size_t)rng_range(&slow.random, 0, (int64_t)i), index = run->order[i];
        run->order[i] = run->order[other];
        run->order[other] = index;
    }
    run->ignores_cancel = rng_range(&slow.random, 0, 3) == 0;
    run->stop_at = (size_t)rng_range(&slow.random, 0, (int64_t)run->nmoves);
    run->is_held = strikes(&slow.hold);
    run->held_until = slow.times_let_go;
    run->is_failing = strikes(&slow.run);
    if (run->is_failing) {
        run->status = slow.run.status;
        memcpy(run->why, slow.run.why, sizeof run->why);
    }
    unlock();
    if (run->job)
        run->job->nruns++;
    run->fence->state = run;
    TAILQ_INSERT_TAIL(&device->waiting, run, link);
}

static tb_status slow_run_job(tb__device *device, tb__job *job, const tb__run *what, tb__fence *fence) {
    TB_TRY(check_call(SLOW_DEVICE_RUN));
    slow_run *run = tb__calloc(1, sizeof *run);
    if (!run)
        return TB_NO_MEMORY;
    *run = (slow_run){.device = (slow_device *)device, .job = job, .fence = fence};
    tb_status status = fill_run(run, what);
    if (status != TB_OK) {
        free_run(run);
        return status;
    }
    queue_run(run);
    return TB_OK;
}

static tb_status slow_checksum(tb__device *device, const void *address, size_t nbytes, uint64_t *out,
                               tb__fence *fence) {
    TB_TRY(check_call(SLOW_DEVICE_RUN));
    slow_run *run = tb__calloc(1, sizeof *run);
    if (!run)
        return TB_NO_MEMORY;
    *run = (slow_run){.device = (slow_device *)device,
                      .fence = fence,
                      .nmoves = 1,
                      .bytes = translate(address),
                      .nbytes = nbytes,
                      .sum = out};
    queue_run(run);
    return TB_OK;
}

static void slow_cancel(tb__device *device, tb__fence *fence) {
    (void)device;
    lock();
    if (!fence->is_done && fence->state)
        ((slow_run *)fence->state)->is_cancelled = true;
    unlock();
}

static void complete(slow_run *run, tb_status status, const char *why) {
    tb__fence *fence = run->fence;
    fence->status = status;
    snprintf(fence->why, sizeof fence->why, "%s", why);
    fence->state = NULL;
    fence->is_done = true;
    if (run->job)
        run->job->nruns--;
    free_run(run);
}

/* The fence that keeps it from beginning: not done, or failed. */
static const tb__fence *find_obstacle(const slow_run *run) {
    const tb__fence *failed = NULL;
    for (size_t i = 0; i < run->nafter; i++) {
        if (!run->after[i]->is_done)
            return run->after[i];
        if (run->after[i]->status != TB_OK && !failed)
            failed = run->after[i];
    }
    return failed;
}

static bool begin_waiting(slow_device *device) {
    bool did = false;
    for (slow_run *run = TAILQ_FIRST(&device->waiting), *next; run; run = next) {
        const tb__fence *obstacle = run->is_cancelled ? NULL : find_obstacle(run);
        next = TAILQ_NEXT(run, link);
        if (obstacle && !obstacle->is_done)
            continue;
        TAILQ_REMOVE(&device->waiting, run, link);
        did = true;
        if (run->is_cancelled) {
            complete(run, TB_CANCELLED, "it was cancelled");
        } else if (obstacle) {
            complete(run, obstacle->status, obstacle->why);
        } else {
            lock();
            int64_t most = rng_range(&slow.random, 0, 19) == 0 ? slow.most_us * 10 : slow.most_us;
            run->due_us = now_us() + rng_range(&slow.random, 0, most);
            TAILQ_INSERT_TAIL(&device->begun, run, link);
            pthread_cond_broadcast(&slow.changed);
            unlock();
        }
    }
    return did;
}

static bool slow_progress(tb__device *base) {
    slow_device *device = (slow_device *)base;
    eventfd_t unused;
    eventfd_read(device->wake, &unused);
    bool did = begin_waiting(device);
    for (;;) {
        lock();
        slow_run *run = TAILQ_FIRST(&device->ended);
        if (run)
            TAILQ_REMOVE(&device->ended, run, link);
        unlock();
        if (!run)
            return did;
        complete(run, run->status, run->why);
        did = true;
    }
}

static int slow_fd(tb__device *device) {
    return ((slow_device *)device)->wake;
}

/* ---- Opening ----------------------------------------------------------------------------------------------------- */

static tb_status slow_open(int index, tb__device **out) {
    if (index != 0)
        return tb__fail(TB_REFUSED, "there is one slow device, not one with index %d", index);
    TB_TRY(check_call(SLOW_DEVICE_OPEN));
    slow_device *device = tb__calloc(1, sizeof *device);
    if (!device)
        return TB_NO_MEMORY;
    *device = (slow_device){.base = {.ops = &slow_device_ops}};
    TAILQ_INIT(&device->waiting);
    TAILQ_INIT(&device->begun);
    TAILQ_INIT(&device->ended);
    device->wake = tb__fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (device->wake < 0)
        die("no eventfd");
    if (tb__start_thread(&device->thread, "slow-device", do_runs, device) != TB_OK)
        die("no thread");
    *out = &device->base;
    return TB_OK;
}

static void slow_close(tb__device *base) {
    slow_device *device = (slow_device *)base;
    lock();
    if (!TAILQ_EMPTY(&device->waiting) || !TAILQ_EMPTY(&device->begun) || !TAILQ_EMPTY(&device->ended))
        die("closed while runs are under way");
    if (device->njobs > 0 || device->nmappings > 0 || device->nallocations > 0)
        die("closed before jobs, mappings or memory were given back");
    device->is_stopping = true;
    pthread_cond_broadcast(&slow.changed);
    unlock();
    pthread_join(device->thread, NULL);
    tb__fd_close(device->wake);
    free(device);
}

const tb__device_ops slow_device_ops = {
    .name = "slow",
    .open = slow_open,
    .close = slow_close,
    .find = slow_find,
    .alloc = slow_alloc,
    .free = slow_free,
    .share = slow_share,
    .map = slow_map,
    .unmap = slow_unmap,
    .prepare = slow_prepare,
    .release = slow_release,
    .run = slow_run_job,
    .checksum = slow_checksum,
    .cancel = slow_cancel,
    .progress = slow_progress,
    .fd = slow_fd,
};
