/* The GPUs of this machine, for the tools. */
#ifndef TB_TOOLS_GPU_H
#define TB_TOOLS_GPU_H

#include "device/cuda/report.h"

enum { TOOL_MAX_GPUS = 16 };

typedef struct tool_gpus {
    tb__cuda_driver driver;
    int n; /* number of the GPUs below; there may be more */
    tb__cuda_gpu gpu[TOOL_MAX_GPUS];
    bool reaches[TOOL_MAX_GPUS][TOOL_MAX_GPUS]; /* by row: the GPUs whose memory it can use */
} tool_gpus;

/* TB_REFUSED, with the reason, if tensors can't be on a GPU. Uses a separate process: one that has used the driver
 * can't fork others that use it, and a driver may hang. */
tb_status tool_gpus_look(tool_gpus *out);

#endif
