/* Memory for tensors of tests. Built with TB_SLOW_DEVICE, a test has it on the slow device, or, with
 * TB_TEST_DEVICE=mixed, every second time; else it is memory of tb_alloc. */
#ifndef TB_TESTS_TENSOR_MEMORY_H
#define TB_TESTS_TENSOR_MEMORY_H

#include "tensorbus/tensorbus.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#ifdef TB_SLOW_DEVICE
#include "slow_device.h"

__attribute__((constructor)) static void use_slow_device(void) {
    slow_device_install();
}

static inline bool next_is_slow(void) {
    static _Atomic unsigned count;
    const char *device = getenv("TB_TEST_DEVICE");
    return !device || strcmp(device, "mixed") != 0 || count++ % 2;
}

static inline bool is_slow_memory(const void *p) {
    return slow_device_bytes(p) != p;
}
#else
static inline bool is_slow_memory(const void *p) {
    (void)p;
    return false;
}
#endif

/* Zeros, or anything. NULL: there is no memory. */
static inline void *tensor_alloc(size_t nbytes) {
    void *p;
#ifdef TB_SLOW_DEVICE
    if (next_is_slow())
        return slow_device_alloc(nbytes);
#endif
    return tb_alloc(nbytes, &p) == TB_OK ? p : NULL;
}

/* Where the test can use what tensor_alloc gave, while the library does not. */
static inline void *tensor_bytes(const void *p) {
#ifdef TB_SLOW_DEVICE
    return slow_device_bytes(p);
#else
    return (void *)(uintptr_t)p;
#endif
}

static inline void tensor_free(void *p) {
#ifdef TB_SLOW_DEVICE
    if (p && is_slow_memory(p)) {
        slow_device_free(p);
        return;
    }
#endif
    tb_free(p);
}

#endif
