/* Facts about CUDA for `tensorbus doctor`. In every build; nothing here creates a context. */
#ifndef TB_DEVICE_CUDA_REPORT_H
#define TB_DEVICE_CUDA_REPORT_H

#include "base/error.h"

typedef struct tb__cuda_driver {
    int version; /* the CUDA version of the driver: 13000 is 13.0 */
    int ngpus;
} tb__cuda_driver;

typedef struct tb__cuda_gpu {
    char name[64], uuid[48]; /* "NVIDIA H200", "GPU-0123..." */
    int capability;          /* 90 is 9.0 */
    size_t nbytes;           /* of memory */
    bool has_ipc;            /* memory of cuMemAlloc can be shared; of VMM: */
    bool has_vmm, has_vmm_fd, has_fabric;
    bool has_read_only_pinning; /* host memory without write access can be pinned */
} tb__cuda_gpu;

/* TB_REFUSED: the build has no CUDA device, or there is no driver or no GPU. The error message says which. */
tb_status tb__cuda_describe_driver(tb__cuda_driver *out);
tb_status tb__cuda_describe_gpu(int ordinal, tb__cuda_gpu *out);
/* Whether a GPU can use the memory of another one. */
bool tb__cuda_can_reach(int from, int to);

#endif
