/* What kernels.cpp shares with the other files of the fake driver, which are C. */
#ifndef TB_TESTS_FAKE_CUDA_LAUNCH_H
#define TB_TESTS_FAKE_CUDA_LAUNCH_H

#include "device/cuda/kernels.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

__attribute__((noreturn)) __attribute__((format(printf, 1, 2))) void die(const char *format, ...);

/* Executes so many blocks of the kernel of this name ("tb__copy_rows"). `translate` gives the place in this process of
 * memory at an address of the GPU's; of 0, NULL. One thread at a time. False: there is no such kernel. */
bool launch_kernel(const char *name, unsigned grid, const tb__cuda_args *args, void *(*translate)(uint64_t address));

#ifdef __cplusplus
}
#endif

#endif
