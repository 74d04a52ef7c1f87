/* Chooses the kernels that suit the machine. */
#include "device/host/kernel.h"

#include <stdatomic.h>

static _Atomic(const tb__kernels *) chosen;

int tb__kernels_list(const tb__kernels *sets[TB__KERNEL_SETS_MAX]) {
    const tb__kernels *all[TB__KERNEL_SETS_MAX] = {&tb__kernels_portable, tb__kernels_avx2(), tb__kernels_avx512()};
    int n = 0;
    for (int i = 0; i < TB__KERNEL_SETS_MAX; i++) {
        if (all[i])
            sets[n++] = all[i];
    }
    return n;
}

const tb__kernels *tb__kernels_get(void) {
    const tb__kernels *kernels = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (kernels)
        return kernels;
    const tb__kernels *sets[TB__KERNEL_SETS_MAX] = {NULL};
    kernels = sets[tb__kernels_list(sets) - 1];
    /* Concurrent threads write the same value. */
    atomic_store_explicit(&chosen, kernels, memory_order_relaxed);
    return kernels;
}

void tb__kernels_force(const tb__kernels *kernels) {
    atomic_store_explicit(&chosen, kernels, memory_order_relaxed);
}
