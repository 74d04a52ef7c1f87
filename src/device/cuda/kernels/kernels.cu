/* The kernels of the CUDA device, in one module. */
#include "checksum.cuh"
#include "copy.cuh"
#include "quant.cuh"
#include "transpose.cuh"
