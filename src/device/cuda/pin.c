/* Host memory that GPUs read and write: pages that are registered with the driver. Memory of different jobs may share
 * pages, and a page can be registered only once, so registrations are counted, and new ones fill the gaps between those
 * that are there. Pages that the program has pinned itself are used as they are. */
#include "device/cuda/cuda.h"

#include "base/int.h"
#include "base/mem.h"

#include <pthread.h>
#include <unistd.h>

/* Registered pages. */
typedef struct registration {
    uintptr_t first, last; /* addresses; `last` is behind them */
    size_t nusers;
    tb__gpu *gpu; /* in whose context it was registered */
} registration;

/* Uses all registrations that share a page with it. */
struct tb__cuda_pin {
    uintptr_t first, last;
};

static struct {
    pthread_mutex_t lock;
    TB_VEC(registration) list; /* by address; none overlaps another */
} pinned = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* With the lock held, as all below. The first registration that ends behind the address. */
static size_t find_place(uintptr_t address) {
    size_t i = 0;
    TB_BISECT(i, pinned.list.count, pinned.list.item[i].last > address);
    return i;
}

/* Pages that can only be read are tried second: the driver says no more than that it can't register them. */
static tb_status register_pages(const tb__gpu *gpu, uintptr_t first, uintptr_t last) {
    unsigned flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
    CUresult result = tb__cuda.cuMemHostRegister((void *)first, last - first, flags);
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED &&
        result != CUDA_ERROR_OUT_OF_MEMORY)
        result = tb__cuda.cuMemHostRegister((void *)first, last - first, flags | CU_MEMHOSTREGISTER_READ_ONLY);
    return result == CUDA_SUCCESS ? TB_OK
                                  : tb__cuda_fail(result, "pinning %zu bytes of host memory at %p for %s",
                                                  (size_t)(last - first), (void *)first, gpu->unit);
}

static tb_status insert(size_t i, registration r) {
    if (!tb__vec_reserve(&pinned.list, 1))
        return TB_NO_MEMORY;
    TB_TRY(register_pages(r.gpu, r.first, r.last));
    for (size_t k = pinned.list.count++; k > i; k--)
        pinned.list.item[k] = pinned.list.item[k - 1];
    pinned.list.item[i] = r;
    return TB_OK;
}

static void unregister(size_t i) {
    const registration *r = &pinned.list.item[i];
    if (tb__gpu_push(r->gpu) == TB_OK) {
        tb__cuda.cuMemHostUnregister((void *)r->first);
        tb__gpu_pop();
    }
    pinned.list.count--;
    for (; i < pinned.list.count; i++)
        pinned.list.item[i] = pinned.list.item[i + 1];
}

/* Ends the use of all registrations between these addresses. */
static void release_pages(uintptr_t first, uintptr_t last) {
    for (size_t i = find_place(first); i < pinned.list.count && pinned.list.item[i].first < last;) {
        if (--pinned.list.item[i].nusers == 0)
            unregister(i);
        else
            i++;
    }
}

/* Registers the gaps, and uses what is there. */
static tb_status use_pages(tb__gpu *gpu, uintptr_t first, uintptr_t last) {
    tb_status status = TB_OK;
    uintptr_t at = first;
    for (size_t i = find_place(first); at < last && status == TB_OK; i++) {
        bool is_last = i == pinned.list.count || pinned.list.item[i].first >= last;
        uintptr_t next = is_last ? last : pinned.list.item[i].first;
        if (at < next)
            status = insert(i, (registration){.first = at, .last = next, .gpu = gpu});
        if (status == TB_OK) {
            pinned.list.item[i].nusers++;
            at = pinned.list.item[i].last;
        }
    }
    if (status != TB_OK)
        release_pages(first, at);
    return status;
}

/* Whether the program has pinned all of it, at once. */
static bool is_pinned_by_program(uintptr_t first, uintptr_t last) {
    uint64_t ids[2] = {0};
    for (int i = 0; i < 2; i++) {
        uint64_t memory_type = 0;
        CUpointer_attribute what[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_BUFFER_ID};
        void *where[] = {&memory_type, &ids[i]};
        if (tb__cuda.cuPointerGetAttributes(2, what, where, i ? last - 1 : first) != CUDA_SUCCESS ||
            memory_type != CU_MEMORYTYPE_HOST)
            return false;
    }
    return ids[0] == ids[1];
}

static tb_status pin_pages(tb__gpu *gpu, uintptr_t first, uintptr_t last, tb__cuda_pin *pin) {
    size_t i = find_place(first);
    bool is_ours = i < pinned.list.count && pinned.list.item[i].first < last;
    if (!is_ours && is_pinned_by_program(first, last))
        return TB_OK; /* there is nothing to end */
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    *pin = (tb__cuda_pin){first & ~(page - 1), (last + page - 1) & ~(page - 1)};
    tb_status status = use_pages(gpu, pin->first, pin->last);
    if (status != TB_OK)
        *pin = (tb__cuda_pin){0};
    return status;
}

tb_status tb__cuda_pin_host(tb__gpu *gpu, const void *base, size_t nbytes, tb__cuda_pin **out, CUdeviceptr *address) {
    tb__cuda_pin *pin = tb__calloc(1, sizeof *pin);
    uintptr_t first = (uintptr_t)base;
    if (!pin)
        return TB_NO_MEMORY;
    tb_status status = tb__gpu_push(gpu);
    if (status != TB_OK) {
        free(pin);
        return status;
    }
    pthread_mutex_lock(&pinned.lock);
    status = pin_pages(gpu, first, first + (nbytes ? nbytes : 1), pin);
    if (status == TB_OK) {
        CUresult result = tb__cuda.cuMemHostGetDevicePointer(address, (void *)first, 0);
        if (result != CUDA_SUCCESS) {
            status = tb__cuda_fail(result, "the address of host memory at %p on %s", base, gpu->unit);
            release_pages(pin->first, pin->last);
        }
    }
    pthread_mutex_unlock(&pinned.lock);
    tb__gpu_pop();
    if (status == TB_OK)
        *out = pin;
    else
        free(pin);
    return status;
}

void tb__cuda_unpin(tb__cuda_pin *pin) {
    if (pin && !tb__cuda_is_inherited()) {
        pthread_mutex_lock(&pinned.lock);
        release_pages(pin->first, pin->last);
        pthread_mutex_unlock(&pinned.lock);
    }
    free(pin);
}
