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

static void add_pinned(void *base, size_t nbytes, bool is_registered) {
    pinned_range *r = get(sizeof *r);
    *r = (pinned_range){(uintptr_t)base, nbytes, next_memory_id(), is_registered, {0}};
    LIST_INSERT_HEAD(&pinned, r, link);
}

CUresult cuMemHostAlloc(void **out, size_t nbytes, unsigned flags) {
    ENTER(NEEDS_CONTEXT | IS_UNSAFE);
    (void)flags;
    *out = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*out == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    lock();
    add_pinned(*out, nbytes, false);
    unlock();
    return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void *base) {
    ENTER(NEEDS_CONTEXT | IS_UNSAFE);
    lock();
    pinned_range *r = find_pinned((uintptr_t)base);
    if (!r || r->base != (uintptr_t)base || r->is_registered)
        die("cuMemFreeHost of what cuMemHostAlloc did not allocate");
    munmap(base, r->nbytes);
    LIST_REMOVE(r, link);
    free(r);
    unlock();
    return CUDA_SUCCESS;
}

/* Whether all of it is mapped, and can be written to if that is wanted. */
static bool has_rights(uintptr_t at, size_t nbytes, bool is_written) {
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512], rights[5];
    unsigned long first, last;
    if (!maps)
        die("no /proc");
    for (uintptr_t end = at + nbytes; at < end && fgets(line, sizeof line, maps);) {
        if (sscanf(line, "%lx-%lx %4s", &first, &last, rights) != 3 || at < first || at >= last)
            continue;
        if (rights[0] != 'r' || (is_written && rights[1] != 'w'))
            break;
        at = last;
        nbytes = at < end ? end - at : 0;
    }
    fclose(maps);
    return nbytes == 0;
}

CUresult cuMemHostRegister(void *base, size_t nbytes, unsigned flags) {
    ENTER(NEEDS_CONTEXT | IS_UNSAFE);
    uintptr_t first = (uintptr_t)base;
    CUresult result = CUDA_SUCCESS;
    if (nbytes == 0 || !has_rights(first, nbytes, !(flags & CU_MEMHOSTREGISTER_READ_ONLY)))
        return CUDA_ERROR_INVALID_VALUE;
    lock();
    for (const pinned_range *r = LIST_FIRST(&pinned); r; r = LIST_NEXT(r, link)) {
        if (first < r->base + r->nbytes && r->base < first + nbytes)
            result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
    if (result == CUDA_SUCCESS)
        add_pinned(base, nbytes, true);
    unlock();
    return result;
}

CUresult cuMemHostUnregister(void *base) {
    ENTER(NEEDS_CONTEXT | IS_UNSAFE);
    lock();
    wait_for_parked_streams();
    pinned_range *r = find_pinned((uintptr_t)base);
    if (!r || r->base != (uintptr_t)base || !r->is_registered)
        die("host memory is unregistered that is not registered");
    if (is_in_use_by_kernel(r->base, r->base + r->nbytes))
        die("host memory at %p is unregistered while a kernel uses it", base);
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
