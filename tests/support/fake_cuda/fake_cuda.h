/* A driver of CUDA for tests, built as libcuda.so.1, so that the CUDA device runs on machines without a GPU.
 *
 * Its memory is in memfds, at addresses without access rights: only its kernels reach it, through a second mapping.
 * Streams do their work on a thread, in the order of each stream, after random delays. Other processes can open its
 * handles. Who breaks the driver's rules dies with a message: a call without a context, a handle that was destroyed, a
 * kernel that touches memory which is freed, not mapped for its GPU, or not pinned, host memory that is unmapped while
 * it is registered.
 *
 * Environment: FAKE_CUDA_GPUS, how many (1); CUDA_VISIBLE_DEVICES, numbers of those that the process sees;
 * FAKE_CUDA_MEMORY, bytes that each has (8 GiB); FAKE_CUDA_DELAY_US, of a kernel, at most (300); FAKE_CUDA_SEED;
 * FAKE_CUDA_FABRIC=1, fabric handles work; FAKE_CUDA_NO_VMM=1; FAKE_CUDA_NO_PEERS=1; FAKE_CUDA_NO_READ_ONLY=1, VMM
 * gives no access without the right to write; FAKE_CUDA_WITHOUT, a function that is missing.
 *
 * Below is what tests ask of it, which find these functions by dlsym: a real driver has none. In what follows n counts
 * from now on; 0 is the next one. */
#ifndef TB_TESTS_FAKE_CUDA_H
#define TB_TESTS_FAKE_CUDA_H

#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fake_cuda_control {
    /* The n-th call of this function gives this CUresult, once. */
    void (*fail_call)(const char *function, long n, int result);
    /* The n-th kernel or copy fails, and with it its context, for good. */
    void (*fail_kernel)(long n, int result);
    /* The n-th kernel or copy does nothing until it is let go. */
    void (*hold_kernel)(long n);
    void (*let_go)(void);
    void (*set_delay)(int64_t most_us);
    /* Nothing fails any more, and nothing is held. */
    void (*mend)(void);
    /* Every call gives CUDA_ERROR_DEINITIALIZED, as when the program ends. */
    void (*shut_down)(void);
    /* Calls so far, of this function or, if it is NULL, of all. */
    long (*count_calls)(const char *function);
    /* Where the host can read and write memory of a GPU; NULL: no GPU has memory there. Dies if fewer bytes are. */
    void *(*look)(const void *address, size_t nbytes);
    /* Whether a context is current in this thread. */
    bool (*has_context)(void);
} fake_cuda_control;

/* NULL: the driver is a real one, or there is none. */
static inline const fake_cuda_control *fake_cuda(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return library ? dlsym(library, "fake_cuda_controls") : NULL;
}

#endif
