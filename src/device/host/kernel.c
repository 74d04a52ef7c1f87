/* Chooses the kernels that suit the machine. */
#include "device/host/kernel.h"

#include <stdatomic.h>

static _Atomic(const tb__kernels *) chosen;

const tb__kernels *tb__kernels_get(void) {
    const tb__kernels *kernels = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (kernels)
        return kernels;
    kernels = tb__kernels_avx2();
    if (!kernels)
        kernels = &tb__kernels_portable;
    /* Threads that come here at once all write the same. */
    atomic_store_explicit(&chosen, kernels, memory_order_relaxed);
    return kernels;
}

void tb__kernels_force(const tb__kernels *kernels) {
    atomic_store_explicit(&chosen, kernels, memory_order_relaxed);
}
