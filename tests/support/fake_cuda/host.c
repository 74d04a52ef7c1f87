/* Pinned host memory of the fake driver: allocated, or registered. */
#include "inside.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static LIST_HEAD(pinned_list, pinned_range) pinned;

pinned_range *find_pinned(uintptr_t address) {
    pinned_range *r = LIST_FIRST(&pinned);
    while (r && address - r->base >= r->nbytes)
        r = LIST_NEXT(r, link);
    return r;
}

bool is_pinned(const void *address) {
    return find_pinned((uintptr_t)address);
}

bool is_partly_pinned(const void *address, size_t nbytes) {
    uintptr_t first = (uintptr_t)address, last = first + nbytes;
    bool is_partly = false;
    for (const pinned_range *r = LIST_FIRST(&pinned); r; r = LIST_NEXT(r, link)) {
        if (first >= r->base && last <= r->base + r->nbytes)
            return false;
        is_partly |= first < r->base + r->nbytes && r->base < last;
    }
    return is_partly;
}

static void add_pinned(void *base, size_t nbytes, uint64_t mapped) {
    pinned_range *r = get(sizeof *r);
    *r = (pinned_range){(uintptr_t)base, nbytes, next_memory_id(), mapped, {0}};
    LIST_INSERT_HEAD(&pinned, r, link);
}

CUresult cuMemHostAlloc(void **out, size_t nbytes, unsigned flags) {
    ENTER(NEEDS_CONTEXT | IS_UNSAFE);
    (void)flags;
    *out = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*out == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    lock();
    add_pinned(*out, nbytes, 0);
    unlock();
    return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void *base) {
    ENTER(NEEDS_CONTEXT | IS_UNSAFE);
    lock();
    pinned_range *r = find_pinned((uintptr_t)base);
    if (!r || r->base != (uintptr_t)base || r->mapped)
        die("cuMemFreeHost of what cuMemHostAlloc did not allocate");
    munmap(base, r->nbytes);
    LIST_REMOVE(r, link);
    free(r);
    unlock();
    return CUDA_SUCCESS;
}

/* Tells what is mapped at the addresses from what was mapped there before; 0: not all of it is, or not with the rights
 * that are wanted. Anonymous memory is not told from other such memory. */
static uint64_t identify(uintptr_t at, size_t nbytes, bool is_written) {
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512], rights[5];
    unsigned long first, last, offset, inode;
    uint64_t id = 1, before = 0;
    uintptr_t end = at + nbytes;
    if (!maps)
        die("no /proc");
    while (at < end && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx %4s %lx %*s %lu", &first, &last, rights, &offset, &inode) != 5 || at < first ||
            at >= last)
            continue;
        if (rights[0] != 'r' || (is_written && rights[1] != 'w'))
            break;
        uint64_t file = inode ? (inode ^ (offset - first) * 7) % 1000003 : 0;
        if (file && file != before) /* a mapping that is cut into pieces counts as one */
            id = id * 31 + file;
        before = file;
        at = last;
    }
    fclose(maps);
    return at < end ? 0 : id;
}

CUresult cuMemHostRegister(void *base, size_t nbytes, unsigned flags) {
    ENTER(NEEDS_CONTEXT | IS_UNSAFE);
    uintptr_t first = (uintptr_t)base;
    CUresult result = CUDA_SUCCESS;
    uint64_t mapped = nbytes ? identify(first, nbytes, !(flags & CU_MEMHOSTREGISTER_READ_ONLY)) : 0;
    if (!mapped)
        return CUDA_ERROR_INVALID_VALUE;
    lock();
    for (const pinned_range *r = LIST_FIRST(&pinned); r; r = LIST_NEXT(r, link)) {
        if (first < r->base + r->nbytes && r->base < first + nbytes)
            result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
    if (result == CUDA_SUCCESS)
        add_pinned(base, nbytes, mapped);
    unlock();
    return result;
}

CUresult cuMemHostUnregister(void *base) {
    ENTER(NEEDS_CONTEXT | IS_UNSAFE);
    lock();
    wait_for_parked_streams();
    pinned_range *r = find_pinned((uintptr_t)base);
    if (!r || r->base != (uintptr_t)base || !r->mapped)
        die("host memory is unregistered that is not registered");
    if (is_in_use_by_kernel(r->base, r->base + r->nbytes))
        die("host memory at %p is unregistered while a kernel uses it", base);
    if (identify(r->base, r->nbytes, false) != r->mapped)
        die("host memory at %p was unmapped while it was registered: GPUs have used other pages than the CPU", base);
    LIST_REMOVE(r, link);
    free(r);
    unlock();
    return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr *out, void *base, unsigned flags) {
    ENTER(NEEDS_CONTEXT);
    (void)flags;
    lock();
    bool is_good = is_pinned(base);
    unlock();
    *out = (CUdeviceptr)base;
    return is_good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
