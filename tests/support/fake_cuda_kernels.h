/* What the kernels of the CUDA device do, on the CPU. */
#ifndef TB_TESTS_FAKE_CUDA_KERNELS_H
#define TB_TESTS_FAKE_CUDA_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

/* Does what the kernel of this name ("tb__copy_rows") would do with these parameters. `translate` gives the place in
 * this process of memory at an address for the GPU. False: there is no such kernel. */
bool fake_cuda_launch(const char *kernel, unsigned grid, void **params, void *(*translate)(uint64_t device_address));

#endif
