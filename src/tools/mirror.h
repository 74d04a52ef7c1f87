/* Access to memory of devices. */
#ifndef TB_TOOLS_MIRROR_H
#define TB_TOOLS_MIRROR_H

#include "tools/tools.h"

/* Memory of tb_alloc_on, and where this process accesses its contents: in place or, for a device, in a copy. */
typedef struct tool_mirror {
    void *memory;
    char *host; /* `memory` itself if the CPU can access it */
    size_t nbytes;
    struct tb__device *device; /* copies between the two; NULL: the CPU can access `memory` */
    bool is_foreign;           /* malloc's */
} tool_mirror;

/* `device` as in tb_alloc_on; NULL: malloc. */
tb_status tool_mirror_init(tool_mirror *mirror, const char *device, size_t nbytes);
void tool_mirror_fini(tool_mirror *mirror); /* allows a zero-initialised one */

/* Copies all of it from the host's copy to the device, or back, and waits for the end. */
tb_status tool_mirror_put(const tool_mirror *mirror);
tb_status tool_mirror_get(const tool_mirror *mirror);

#endif
