/* The slow device: its memory, and what tests ask for. */
#include "slow_device_inside.h"

#include "base/mem.h"
#include "base/process.h"

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

slow_state slow;

_Noreturn void slow_die(const char *what) {
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
    pinned *p;
    while ((a = LIST_FIRST(&slow.allocations))) {
        LIST_REMOVE(a, link);
        free(a);
    }
    while ((p = LIST_FIRST(&slow.pins))) {
        LIST_REMOVE(p, link);
        free(p);
    }
}

/* Also in a forked child, which has none of the memory. */
static void reset(void) {
    pthread_mutex_init(&slow.lock, NULL);
    tb__monotonic_cond_init(&slow.changed);
    slow.fd = -1;
    slow.seen = slow.alias = NULL;
    slow.used = slow.nheld = 0;
    forget_allocations();
    slow_streams_reset();
    mend();
}

__attribute__((constructor)) static void set_up(void) {
    reset();
    slow.random.state = 1;
    slow.most_us = 300;
    pthread_atfork(NULL, NULL, reset);
}

void slow_lock(void) {
    pthread_mutex_lock(&slow.lock);
}

void slow_unlock(void) {
    pthread_mutex_unlock(&slow.lock);
}

/* ---- What tests ask for ------------------------------------------------------------------------------------------ */

void slow_device_install(void) {
    static const tb__device_ops *const devices[] = {&slow_device_ops, &tb__host_device_ops, NULL};
    atomic_store(&tb__devices, devices);
}

void slow_device_set_seed(uint64_t seed) {
    slow_lock();
    slow.random.state = seed;
    slow_unlock();
}

void slow_device_set_delay(int64_t most_us) {
    slow_lock();
    slow.most_us = most_us;
    slow_unlock();
}

void slow_device_fail_call(slow_device_call call, long n, tb_status status) {
    slow_lock();
    slow.calls[call] = (fault){.after = n, .status = status};
    slow_unlock();
}

void slow_wait_until(int64_t us) {
    struct timespec when = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000};
    if (us == INT64_MAX)
        pthread_cond_wait(&slow.changed, &slow.lock);
    else
        pthread_cond_timedwait(&slow.changed, &slow.lock, &when);
}

void slow_device_fail_run(long n, tb_status status, const char *why) {
    slow_lock();
    slow.run = (fault){.after = n, .status = status};
    snprintf(slow.run.why, sizeof slow.run.why, "%s", why);
    slow_unlock();
}

void slow_device_hold_run(long n) {
    slow_lock();
    slow.hold = (fault){.after = n};
    slow_unlock();
}

void slow_device_let_go(void) {
    slow_lock();
    slow.times_let_go++;
    pthread_cond_broadcast(&slow.changed);
    int64_t until = slow_now_us() + 10 * 1000000;
    while (slow.nheld > 0 && slow_now_us() < until)
        slow_wait_until(until);
    slow_unlock();
}

void slow_device_mend(void) {
    slow_lock();
    mend();
    slow_unlock();
    slow_device_let_go();
}

/* With the lock held. Whether it is this one's turn. */
bool slow_strikes(fault *f) {
    return f->after >= 0 && f->after-- == 0;
}

tb_status slow_check_call(slow_device_call call) {
    static const char *const names[] = {"open", "alloc", "share", "map", "prepare", "run", "pin", "a stream"};
    slow_lock();
    bool fails = slow_strikes(&slow.calls[call]);
    tb_status status = slow.calls[call].status;
    slow_unlock();
    return fails ? tb__fail(status, "%s of the slow device fails, as the test wants", names[call]) : TB_OK;
}

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

static void make_pool(void) {
    slow.fd = tb__fd_own(memfd_create("slow", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (slow.fd < 0 || ftruncate(slow.fd, (off_t)POOL_NBYTES) != 0 ||
        fcntl(slow.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
        slow_die("no memfd");
    slow.seen = mmap(NULL, POOL_NBYTES, PROT_NONE, MAP_SHARED | MAP_NORESERVE, slow.fd, 0);
    slow.alias = mmap(NULL, POOL_NBYTES, PROT_NONE, MAP_SHARED | MAP_NORESERVE, slow.fd, 0);
    if (slow.seen == MAP_FAILED || slow.alias == MAP_FAILED)
        slow_die("no addresses");
    madvise(slow.seen, POOL_NBYTES, MADV_DONTFORK);
    madvise(slow.alias, POOL_NBYTES, MADV_DONTFORK);
    madvise(slow.alias, POOL_NBYTES, MADV_DONTDUMP);
    madvise(slow.seen, POOL_NBYTES, MADV_DONTDUMP);
}

/* With the lock held. Pages without access rights lie between allocations. */
static void *allocate(size_t nbytes, int unit, bool is_shareable, slow_device *device) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    allocation *a = calloc(1, sizeof *a);
    if (!a)
        slow_die("no memory");
    if (!slow.seen)
        make_pool();
    *a = (allocation){.offset = slow.used + page,
                      .nbytes = nbytes,
                      .epoch = ++slow.nallocations,
                      .unit = unit,
                      .is_shareable = is_shareable,
                      .device = device};
    size_t whole = (nbytes + page - 1) / page * page;
    if (nbytes > POOL_NBYTES || whole + 2 * page > POOL_NBYTES - slow.used)
        slow_die("all addresses are used");
    slow.used += whole + page;
    if (whole && mprotect(slow.alias + a->offset, whole, PROT_READ | PROT_WRITE) != 0)
        slow_die("mprotect");
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
    for (allocation *a = LIST_FIRST(&slow.allocations); a; a = LIST_NEXT(a, link)) {
        if (offset >= a->offset && offset - a->offset <= a->nbytes && nbytes <= a->nbytes - (offset - a->offset))
            return a;
    }
    return NULL;
}

/* With the lock held. */
static allocation *find_start(const void *address) {
    allocation *a = find_allocation(address, 0);
    return a && slow.seen + a->offset == address ? a : NULL;
}

static void deallocate(void *address) {
    slow_lock();
    allocation *a = find_start(address);
    if (!a)
        slow_die("memory is freed that is none of its own, or twice");
    size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (a->nbytes + page - 1) / page * page;
    if (whole && (mprotect(slow.alias + a->offset, whole, PROT_NONE) != 0 ||
                  fallocate(slow.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)a->offset, (off_t)whole) != 0))
        slow_die("mprotect, or fallocate");
    if (a->device)
        a->device->nallocations--;
    LIST_REMOVE(a, link);
    free(a);
    slow_unlock();
}

/* By which the device reaches it; host memory as it is. */
void *slow_translate(const void *address) {
    const char *p = address;
    slow_lock();
    if (slow.seen && p >= slow.seen && p < slow.seen + POOL_NBYTES)
        p = slow.alias + (p - slow.seen);
    for (const slow_mapping *m = LIST_FIRST(&slow.writable); m; m = LIST_NEXT(m, writable_link)) {
        if (p >= m->seen && p < m->seen + m->npages_bytes) {
            p = m->pages + (p - m->seen);
            break;
        }
    }
    slow_unlock();
    return (void *)(uintptr_t)p;
}

void *slow_device_bytes(const void *address) {
    return slow_translate(address);
}

void *slow_device_alloc_on(int unit, bool is_shareable, size_t nbytes) {
    slow_lock();
    void *p = allocate(nbytes, unit, is_shareable, NULL);
    slow_unlock();
    return p;
}

void *slow_device_alloc(size_t nbytes) {
    return slow_device_alloc_on(0, true, nbytes);
}

size_t slow_device_count_buffer_runs(void) {
    slow_lock();
    size_t count = slow.nbuffer_runs;
    slow_unlock();
    return count;
}

size_t slow_device_count_allocations(int unit) {
    size_t count = 0;
    slow_lock();
    for (const allocation *a = LIST_FIRST(&slow.allocations); a; a = LIST_NEXT(a, link))
        count += a->device && a->unit == unit;
    slow_unlock();
    return count;
}

void slow_device_free(void *address) {
    if (address)
        deallocate(address);
}

void slow_device_replace(void *address) {
    slow_lock();
    allocation *a = find_allocation(address, 0);
    if (!a || slow.seen + a->offset != address)
        slow_die("memory is replaced that is none of its own");
    a->epoch = ++slow.nallocations;
    memset(slow.alias + a->offset, 0xaa, a->nbytes);
    slow_unlock();
}

static tb_status slow_alloc(tb__device *device, int index, size_t nbytes, void **out) {
    TB_TRY(slow_check_call(SLOW_DEVICE_ALLOC));
    if (index < 0 || index >= SLOW_DEVICE_NUNITS)
        return tb__fail(TB_REFUSED, "there is no slow:%d: the slow device has %d units", index, SLOW_DEVICE_NUNITS);
    if (nbytes > POOL_NBYTES / 4)
        return tb__fail(TB_NO_MEMORY, "%zu bytes are more than the slow device has", nbytes);
    slow_lock();
    *out = allocate(nbytes, index, true, (slow_device *)device);
    slow_unlock();
    return TB_OK;
}

static tb_status slow_alloc_on(int index, size_t nbytes, void **out) {
    return slow_alloc(NULL, index < 0 ? 0 : index, nbytes, out);
}

static bool slow_free_on(void *address) {
    slow_lock();
    const allocation *a = find_start(address);
    bool is_ours = a && !a->device;
    slow_unlock();
    if (is_ours)
        deallocate(address);
    return is_ours;
}

static const char *slow_unit_name(tb__device *device, int index) {
    static const char *const names[SLOW_DEVICE_NUNITS] = {"slow:0", "slow:1", "slow:2", "slow:3",
                                                          "slow:4", "slow:5", "slow:6", "slow:7"};
    (void)device;
    return names[index];
}

/* ---- Pinned host memory ------------------------------------------------------------------------------------------ */

static tb_status slow_pin(void *address, size_t nbytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    TB_TRY(slow_check_call(SLOW_DEVICE_PIN));
    pinned *made = calloc(1, sizeof *made);
    if (!made || (uintptr_t)address % page != 0 || nbytes == 0 || nbytes % page != 0)
        slow_die("memory is pinned that is not whole pages");
    *made = (pinned){.address = address, .nbytes = nbytes};
    slow_lock();
    for (const pinned *p = LIST_FIRST(&slow.pins); p; p = LIST_NEXT(p, link)) {
        if ((char *)address < (char *)p->address + p->nbytes && (char *)p->address < (char *)address + nbytes)
            slow_die("memory is pinned twice");
    }
    LIST_INSERT_HEAD(&slow.pins, made, link);
    slow_unlock();
    return TB_OK;
}

static void slow_unpin(void *address) {
    slow_lock();
    pinned *p = LIST_FIRST(&slow.pins);
    while (p && p->address != address)
        p = LIST_NEXT(p, link);
    if (!p)
        slow_die("memory is unpinned that is not pinned");
    LIST_REMOVE(p, link);
    free(p);
    slow_unlock();
}

size_t slow_device_pinned(void) {
    size_t nbytes = 0;
    slow_lock();
    for (const pinned *p = LIST_FIRST(&slow.pins); p; p = LIST_NEXT(p, link))
        nbytes += p->nbytes;
    slow_unlock();
    return nbytes;
}

static void slow_free(tb__device *device, void *address) {
    (void)device;
    slow_device_free(address);
}

static bool slow_find(tb__device *device, const void *address, size_t nbytes, tb__memory *out) {
    (void)device;
    slow_lock();
    const allocation *a = find_allocation(address, nbytes);
    if (a)
        *out = (tb__memory){.base = slow.seen + a->offset,
                            .nbytes = a->nbytes,
                            .index = a->unit,
                            .epoch = a->epoch,
                            .is_shareable = a->is_shareable};
    slow_unlock();
    return a;
}

/* ---- Other processes --------------------------------------------------------------------------------------------- */

typedef struct key {
    uint64_t unit, inode, offset, nbytes;
} key;

static tb_status slow_share(tb__device *device, const tb__memory *memory, tb__memory_key *out) {
    struct stat info;
    (void)device;
    TB_TRY(slow_check_call(SLOW_DEVICE_SHARE));
    slow_lock();
    const allocation *a = find_allocation(memory->base, memory->nbytes);
    bool is_same = a && a->epoch == memory->epoch;
    slow_unlock();
    if (!is_same)
        return tb__fail(TB_INVALID, "the memory at %p is gone", memory->base);
    if (fstat(slow.fd, &info) != 0)
        return tb__fail(TB_IO, "fstat: %s", strerror(errno));
    key k = {.unit = (uint64_t)memory->index,
             .inode = info.st_ino,
             .offset = (uint64_t)((char *)memory->base - slow.seen),
             .nbytes = memory->nbytes};
    int fd = fcntl(slow.fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return tb__fail(TB_IO, "fcntl: %s", strerror(errno));
    if (!tb__vec_push(&out->fds, fd)) {
        close(fd);
        return TB_NO_MEMORY;
    }
    tb__pack_raw(&out->bytes, &k, sizeof k);
    return out->bytes.failed ? TB_NO_MEMORY : TB_OK;
}

/* The pages of the file, or addresses for so many without access. */
static tb_status map_pages(int fd, uint64_t offset, size_t nbytes, int access, char **out) {
    void *pages = mmap(NULL, nbytes, access, MAP_SHARED | MAP_NORESERVE, fd, (off_t)offset);
    *out = pages == MAP_FAILED ? NULL : pages;
    return *out ? TB_OK : tb__fail(TB_IO, "mmap: %s", strerror(errno));
}

static tb_status slow_map(tb__device *base, const tb__memory_key *given, bool is_writable, tb__mapping **out) {
    slow_device *device = (slow_device *)base;
    struct stat info;
    key k;
    TB_TRY(slow_check_call(SLOW_DEVICE_MAP));
    if (given->bytes.count != sizeof k || given->fds.count != 1)
        return tb__fail(TB_INVALID, "a memory key of %zu bytes and %zu descriptors", given->bytes.count,
                        given->fds.count);
    int fd = given->fds.item[0];
    memcpy(&k, given->bytes.data, sizeof k);
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
    tb_status status = map_pages(fd, k.offset - before, mapping->npages_bytes,
                                 is_writable ? PROT_READ | PROT_WRITE : PROT_READ, &mapping->pages);
    if (status == TB_OK && is_writable)
        status = map_pages(fd, k.offset - before, mapping->npages_bytes, PROT_NONE, &mapping->seen);
    if (status != TB_OK) {
        if (mapping->pages)
            munmap(mapping->pages, mapping->npages_bytes);
        free(mapping);
        return status;
    }
    mapping->base =
        (tb__mapping){&slow_device_ops, (is_writable ? mapping->seen : mapping->pages) + before, k.nbytes, (int)k.unit};
    slow_lock();
    device->nmappings++;
    LIST_INSERT_HEAD(&slow.mappings, mapping, link);
    if (is_writable)
        LIST_INSERT_HEAD(&slow.writable, mapping, writable_link);
    slow_unlock();
    *out = &mapping->base;
    return TB_OK;
}

static void slow_unmap(tb__device *base, tb__mapping *given) {
    slow_mapping *mapping = (slow_mapping *)given;
    if (given->ops != &slow_device_ops)
        slow_die("a mapping of another device is unmapped");
    slow_lock();
    if (mapping->nruns > 0)
        slow_die("memory is unmapped while a job that uses it is run");
    if (mapping->is_unmapped)
        slow_die("memory is unmapped twice");
    mapping->is_unmapped = true;
    if (mapping->seen)
        LIST_REMOVE(mapping, writable_link);
    ((slow_device *)base)->nmappings--;
    slow_unlock();
    munmap(mapping->pages, mapping->npages_bytes);
    if (mapping->seen)
        munmap(mapping->seen, mapping->npages_bytes);
}

size_t slow_device_count_mappings(void) {
    size_t count = 0;
    slow_lock();
    for (const slow_mapping *m = LIST_FIRST(&slow.mappings); m; m = LIST_NEXT(m, link))
        count += !m->is_unmapped;
    slow_unlock();
    return count;
}

/* ---- Opening ----------------------------------------------------------------------------------------------------- */

static tb_status slow_open(tb__device **out) {
    TB_TRY(slow_check_call(SLOW_DEVICE_OPEN));
    slow_device *device = tb__calloc(1, sizeof *device);
    if (!device)
        return TB_NO_MEMORY;
    *device = (slow_device){.base = {.ops = &slow_device_ops}};
    TAILQ_INIT(&device->waiting);
    TAILQ_INIT(&device->begun);
    TAILQ_INIT(&device->ended);
    TAILQ_INIT(&device->marks);
    device->wake = tb__fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (device->wake < 0)
        slow_die("no eventfd");
    if (tb__start_thread(&device->thread, "slow-device", slow_do_runs, device) != TB_OK)
        slow_die("no thread");
    *out = &device->base;
    return TB_OK;
}

static void slow_close(tb__device *base) {
    slow_device *device = (slow_device *)base;
    slow_lock();
    if (!TAILQ_EMPTY(&device->waiting) || !TAILQ_EMPTY(&device->begun) || !TAILQ_EMPTY(&device->ended))
        slow_die("closed while runs are under way");
    if (device->njobs > 0 || device->nmappings > 0 || device->nallocations > 0)
        slow_die("closed before jobs, mappings or memory were given back");
    if (device->nmarks > 0 || !LIST_EMPTY(&device->gates))
        slow_die("closed before fences of streams were done, or gates were opened");
    device->is_stopping = true;
    pthread_cond_broadcast(&slow.changed);
    slow_unlock();
    pthread_join(device->thread, NULL);
    tb__fd_close(device->wake);
    free(device);
}

static int slow_fd(tb__device *device) {
    return ((slow_device *)device)->wake;
}

const tb__device_ops slow_device_ops = {
    .name = "slow",
    .open = slow_open,
    .close = slow_close,
    .find = slow_find,
    .alloc = slow_alloc,
    .free = slow_free,
    .alloc_on = slow_alloc_on,
    .free_on = slow_free_on,
    .pin = slow_pin,
    .unpin = slow_unpin,
    .unit_name = slow_unit_name,
    .stream_record = slow_stream_record,
    .stream_wait = slow_stream_wait,
    .gate_create = slow_gate_create,
    .gate_open = slow_gate_open,
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
