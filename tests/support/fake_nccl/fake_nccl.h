/* An NCCL for tests on machines without a GPU: libnccl.so.2 over the fake driver (tests/support/fake_cuda).
 *
 * It does what NCCL does where it matters: calls do not block, but ncclCommAbort; communicators
 * connect and launch in threads, and are in progress meanwhile; the first group between two ranks is launched only when
 * both launch it; what was launched occupies its stream until its counterpart runs; a killed peer is not noticed. So
 * ranks that launch in orders that contradict each other hang. Who breaks NCCL's rules dies with a message: a call
 * while the communicator is in progress, or after its end; a send and a receive of different sizes; memory that is no
 * GPU's; no current context.
 *
 * Ranks find each other by the unique id, over abstract sockets; they may be threads, processes, or several in one
 * thread. A group here has sends or receives, not both, of one communicator.
 *
 * Environment: FAKE_NCCL_DELAY_US, of connecting and launching, at most (1000); FAKE_NCCL_SEES_LOSS=1, a lost peer is
 * an asynchronous error; FAKE_NCCL_VERSION, what ncclGetVersion tells. */
#ifndef TB_TESTS_FAKE_NCCL_H
#define TB_TESTS_FAKE_NCCL_H

/* What tests ask of it, found by dlsym as fake_nccl_controls. */
typedef struct fake_nccl_control {
    /* The n-th group that is launched from now on (0: the next) fails with this result, once. */
    void (*fail_group)(long n, int result);
    /* So does the n-th communicator, while it connects. */
    void (*fail_init)(long n, int result);
    long (*count_groups)(void); /* launched so far */
    long (*count_alive)(void);  /* communicators */
    /* From now on, ncclCommAbort does not return, and what was launched stays; until it is called with 0. */
    void (*hold_aborts)(int is_held);
} fake_nccl_control;

#endif
