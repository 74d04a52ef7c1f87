/* The nccl transport with the NCCL that is found: the fake one, or, where there is a GPU, NCCL itself. TB_RANKS: how
 * many ranks (4). */
#include "../tests/support/comm_conformance.h"
#include "transport/transport.h"

#include <stdlib.h>

int main(int argc, char **argv) {
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0); /* all ranks are on one GPU */
    const char *nranks = getenv("TB_RANKS");
    return comm_conformance_main(
        argc, argv, &(comm_conformance){.ops = &tb__nccl_ops, .nranks = nranks ? strtoul(nranks, NULL, 10) : 4});
}
