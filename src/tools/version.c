/* What `tensorbus --version` prints: the version, and what was built in. */
#include "tools/tools.h"

#include "device/device.h"
#include "transport/transport.h"

#include <microhttpd.h>
#include <stdatomic.h>

int tool_print_version(void) {
    tb__text out = {0};
    tb__text_add(&out, "tensorbus %s\nbuilt by    " TB_COMPILER "\ndevices    ", tb_version_string());
    for (const tb__device_ops *const *ops = atomic_load(&tb__devices); *ops; ops++)
        tb__text_add(&out, " %s", (*ops)->name);
#ifdef TB_NO_CUDA
    tb__text_add(&out, "; no cuda: " TB_NO_CUDA);
#endif
    tb__text_add(&out, "\ntransports ");
    for (const tb_transport_ops *const *ops = atomic_load(&tb__transports); *ops; ops++)
        tb__text_add(&out, " %s", (*ops)->name);
    tb__text_add(&out, "%s%s\n", *TB_BUILT_MPIS ? "; mpi, for " : "", TB_BUILT_MPIS);
    tb__text_add(&out, "linked      " TB_LINKED ", libmicrohttpd %s\n", MHD_get_version());
    tb__text_add(&out, "loaded      UCX, libcurl, libcuda: when they are needed\n");
    return tool_print(&out);
}
