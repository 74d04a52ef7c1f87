/* Host memory that GPUs read and write: bytes that are registered with the driver.
 *
 * The driver refuses the program's copies from and to memory of which only a part is registered. So exactly the bytes
 * of a tensor are registered, not the rest of their pages; of memory of tb_alloc, always the whole arena. Bytes can be
 * registered only once, so registrations are counted, and new ones fill the gaps between existing ones. What the
 * program has pinned itself is used as it is.
 *
 * GPUs go on using the old pages of memory that is unmapped while it is registered. An arena is not unmapped as long as
 * it is registered. Other memory stays registered until the job that uses it is released; the program must not unmap it
 * before. */
#include "device/cuda/cuda.h"

#include "base/int.h"
#include "base/mem.h"
#include "device/host/memory.h"

#include <pthread.h>

/* Registered bytes. */
typedef struct registration {
    uintptr_t first, last; /* addresses; `last` is behind them */
    size_t nusers;
    tb__gpu *gpu; /* in whose context it was registered; NULL: the program has pinned it */
} registration;

/* Uses all registrations that share a byte with it. */
struct tb__cuda_pin {
    uintptr_t first, last;
    tb__held_arena held; /* of memory of tb_alloc */
};

/* Of arenas of small allocations that stay registered for the next jobs: unregistering may wait for all streams. */
static const size_t most_kept_nbytes = (size_t)1 << 30;

static struct {
    pthread_mutex_t lock;
    TB_VEC(registration) list; /* by address; none overlaps another */
    size_t kept_nbytes;
} pinned = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Needs the lock, as all below. The first registration that ends behind the address. */
static size_t find_place(uintptr_t address) {
    size_t i = 0;
    TB_BISECT(i, pinned.list.count, pinned.list.item[i].last > address);
    return i;
}

/* Read-only memory takes a second try: the driver does not say why it can't register memory. */
static CUresult register_bytes(uintptr_t first, uintptr_t last) {
    unsigned flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
    CUresult result = tb__cuda.cuMemHostRegister((void *)first, last - first, flags);
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED &&
        result != CUDA_ERROR_OUT_OF_MEMORY)
        result = tb__cuda.cuMemHostRegister((void *)first, last - first, flags | CU_MEMHOSTREGISTER_READ_ONLY);
    return result;
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

/* Capacity is reserved. */
static void insert(registration r) {
    size_t i = find_place(r.first);
    for (size_t k = pinned.list.count++; k > i; k--)
        pinned.list.item[k] = pinned.list.item[k - 1];
    pinned.list.item[i] = r;
}

/* Registers the bytes from *at on, at once or, where the program has pinned some of them, in several pieces. *at is
 * behind those that are registered, also if it fails. */
static tb_status register_gap(tb__gpu *gpu, uintptr_t *at, uintptr_t last) {
    uintptr_t nbytes = last - *at;
    while (*at < last) {
        if (!tb__vec_reserve(&pinned.list, 1))
            return TB_NO_MEMORY;
        CUresult result = register_bytes(*at, *at + nbytes);
        bool is_taken = result == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
        bool is_programs = is_taken && (nbytes == 1 || is_pinned_by_program(*at, *at + nbytes));
        if (result == CUDA_SUCCESS || is_programs) {
            insert((registration){.first = *at, .last = *at + nbytes, .nusers = 1, .gpu = is_programs ? NULL : gpu});
            *at += nbytes;
            nbytes = last - *at;
        } else if (is_taken) {
            nbytes /= 2;
        } else {
            return tb__cuda_fail(result, "pinning %zu bytes of host memory at %p for %s", (size_t)nbytes, (void *)*at,
                                 gpu->unit);
        }
    }
    return TB_OK;
}

static void unregister(size_t i) {
    const registration *r = &pinned.list.item[i];
    if (r->gpu && tb__gpu_push(r->gpu) == TB_OK) {
        tb__cuda.cuMemHostUnregister((void *)r->first);
        tb__gpu_pop();
    }
    pinned.list.count--;
    for (; i < pinned.list.count; i++)
        pinned.list.item[i] = pinned.list.item[i + 1];
}

/* Ends the use of all registrations between these addresses. */
static void release_bytes(uintptr_t first, uintptr_t last) {
    for (size_t i = find_place(first); i < pinned.list.count && pinned.list.item[i].first < last;) {
        if (--pinned.list.item[i].nusers == 0)
            unregister(i);
        else
            i++;
    }
}

/* Registers the gaps, and uses what is there. */
static tb_status use_bytes(tb__gpu *gpu, uintptr_t first, uintptr_t last) {
    tb_status status = TB_OK;
    uintptr_t at = first;
    while (at < last && status == TB_OK) {
        size_t i = find_place(at);
        registration *r = i < pinned.list.count && pinned.list.item[i].first < last ? &pinned.list.item[i] : NULL;
        if (r && r->first <= at) {
            r->nusers++;
            at = r->last;
        } else {
            status = register_gap(gpu, &at, r ? r->first : last);
        }
    }
    if (status != TB_OK)
        release_bytes(first, at);
    return status;
}

static tb_status pin_bytes(tb__gpu *gpu, uintptr_t first, uintptr_t last, tb__cuda_pin *pin) {
    size_t i = find_place(first);
    bool is_ours = i < pinned.list.count && pinned.list.item[i].first < last;
    if (!is_ours && is_pinned_by_program(first, last))
        return TB_OK; /* and there is nothing to unpin */
    TB_TRY(use_bytes(gpu, first, last));
    *pin = (tb__cuda_pin){.first = first, .last = last};
    return TB_OK;
}

/* The GPU sees several registrations as one range only if it uses the host's addresses. */
static tb_status check_addresses(const tb__gpu *gpu) {
    int is_same = 0;
    CUresult result = tb__cuda.cuDeviceGetAttribute(
        &is_same, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, gpu->device);
    if (result == CUDA_SUCCESS && is_same)
        return TB_OK;
    return tb__fail(TB_REFUSED, "%s (%s) can't use host memory at the host's addresses", gpu->unit, gpu->name);
}

tb_status tb__cuda_pin_bytes(tb__gpu *gpu, const void *base, size_t nbytes, tb__cuda_pin **out) {
    tb__cuda_pin *pin = tb__calloc(1, sizeof *pin);
    uintptr_t first = (uintptr_t)base;
    tb_status status = pin ? check_addresses(gpu) : TB_NO_MEMORY;
    if (status == TB_OK)
        status = tb__gpu_push(gpu);
    if (status == TB_OK) {
        pthread_mutex_lock(&pinned.lock);
        status = pin_bytes(gpu, first, first + (nbytes ? nbytes : 1), pin);
        pthread_mutex_unlock(&pinned.lock);
        tb__gpu_pop();
    }
    if (status != TB_OK) {
        free(pin);
        return status;
    }
    *out = pin;
    return TB_OK;
}

tb_status tb__cuda_pin_host(tb__gpu *gpu, uintptr_t *first, uintptr_t *last, tb__cuda_pin **out) {
    tb__held_arena held = {0};
    if (tb__memory_hold((const void *)*first, &held)) {
        *first = (uintptr_t)held.base;
        *last = *first + held.nbytes;
    }
    tb_status status = tb__cuda_pin_bytes(gpu, (const void *)*first, *last - *first, out);
    if (status == TB_OK)
        (*out)->held = held;
    else
        tb__memory_let_go(held.arena);
    return status;
}

/* Needs the lock. Whether the arena stays registered after its last use. */
static bool is_kept(const tb__cuda_pin *pin) {
    size_t i = find_place(pin->first);
    bool is = pin->held.is_shared && i < pinned.list.count && pinned.list.item[i].first < pin->last &&
              pinned.list.item[i].nusers == 1 && pin->held.nbytes <= most_kept_nbytes - pinned.kept_nbytes;
    pinned.kept_nbytes += is ? pin->held.nbytes : 0;
    return is;
}

void tb__cuda_unpin(tb__cuda_pin *pin) {
    if (pin && !tb__cuda_is_inherited()) {
        pthread_mutex_lock(&pinned.lock);
        bool is_over = !is_kept(pin);
        if (is_over)
            release_bytes(pin->first, pin->last);
        pthread_mutex_unlock(&pinned.lock);
        if (is_over)
            tb__memory_let_go(pin->held.arena);
    }
    free(pin);
}
