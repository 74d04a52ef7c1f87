/* What every transport with communicators must do, over NVSHMEM: on a real GPU, or on stand-ins. */
#include "../tests/support/comm_conformance.h"
#include "transport/transport.h"

int main(int argc, char **argv) {
    comm_conformance suite = {.ops = &tb__nvshmem_ops,
                              .nranks = 3,
                              .nbytes = (size_t)160 << 20,
                              .lacks = COMM_IS_OVER_AFTER_A_LOSS | COMM_HAS_ONE_SET | COMM_KEEPS_MEMORY};
    return comm_conformance_main(argc, argv, &suite);
}
