/* Memory of devices, as a process sees it. */
#ifndef TB_TOOLS_MIRROR_H
#define TB_TOOLS_MIRROR_H

#include "tools/tools.h"

/* Memory of tb_alloc_on, and where this process reads and writes what is in it: there, or, on a device, in a copy. */
typedef struct tool_mirror {
    void *memory;
    char *host; /* the same as `memory` where the CPU can use that */
    size_t nbytes;
    struct tb__device *device; /* that copies from the one to the other; NULL: the CPU can use `memory` */
    bool is_foreign;           /* malloc's */
} tool_mirror;

/* `device` as tb_alloc_on takes it; NULL: malloc. */
tb_status tool_mirror_init(tool_mirror *mirror, const char *device, size_t nbytes);
void tool_mirror_fini(tool_mirror *mirror); /* also of one that is zero */

/* Copies all of it from the host's copy to the device, or back, and waits until that is done. */
tb_status tool_mirror_put(const tool_mirror *mirror);
tb_status tool_mirror_get(const tool_mirror *mirror);

#endif
