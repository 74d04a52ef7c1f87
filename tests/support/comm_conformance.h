/* What every transport with communicators must do. Each case runs in ranks that are processes of their own, which carry
 * each other's messages over sockets. It runs on the driver of CUDA that is found, fake or real; all ranks use the
 * first GPU.
 *
 * Environment: TB_SEED; TB_CASES, how many random messages, in percent of the usual (100). */
#ifndef TB_TESTS_COMM_CONFORMANCE_H
#define TB_TESTS_COMM_CONFORMANCE_H

#include "tensorbus/transport.h"

/* What a transport may not be able to do. */
enum {
    COMM_IS_OVER_AFTER_A_LOSS = 1, /* no communicator can be made any more in a process that has lost a rank */
    COMM_HAS_ONE_SET = 2,          /* all communicators of a process have the same ranks */
    COMM_KEEPS_MEMORY = 4,         /* a cancelled operation may complete with TB_TIMEOUT */
};

typedef struct comm_conformance {
    const tb_transport_ops *ops;
    size_t nranks; /* at least 3 */
    size_t nbytes; /* tb_comm_desc.nbytes: at least 160 MiB if the transport has comm_memory; else 0 */
    unsigned lacks;
} comm_conformance;

/* For main: runs all cases, or those whose names are arguments, and prints what became of them. Returns the exit
 * status: 77, if there is no GPU, or the transport can't be opened for lack of its library. */
int comm_conformance_main(int argc, char **argv, const comm_conformance *suite);

#endif
