/* What the files of the nccl transport share: nccl.c (the table, progress, closing), nccl_comm.c (communicators),
 * nccl_exchange.c (who launches what when), nccl_gpu.c (the driver). */
#ifndef TB_TRANSPORT_NCCL_NCCL_H
#define TB_TRANSPORT_NCCL_NCCL_H

#include "transport/message.h"
#include "transport/nccl/nccl_load.h"

#include "base/pack.h"
#include "base/process.h"

#include <stdatomic.h>
#include <sys/queue.h>

enum {
    NCCL_MOST_OPS = 32,      /* messages of one exchange: a bit each */
    NCCL_MOST_RUNNING = 2,   /* launched exchanges of a rank: one carries, the next one is ready */
    NCCL_GRACE_MS = 1000,    /* for what was launched, when it is cancelled or a peer destroys the communicator */
    NCCL_LOSS_MS = 500,      /* for the loss of a rank to be noticed, when NCCL has reported an error */
    NCCL_ABORT_MS = 4000,    /* for ncclCommAbort, and for what was launched to end after it */
    NCCL_FINALIZE_MS = 2000, /* for ncclCommFinalize */
};
#define NCCL_MOST_NBYTES ((size_t)64 << 20) /* of one exchange, unless a single message has more */

typedef struct nccl nccl;
typedef struct exchange exchange;
TAILQ_HEAD(posted_list, posted);

/* ---- nccl_gpu.c: the driver ---- */

enum { GPU_SUCCESS = 0, GPU_NOT_READY = 600 };

typedef struct nccl_driver {
    int (*cuCtxGetCurrent)(void **context);
    int (*cuCtxPushCurrent_v2)(void *context);
    int (*cuCtxPopCurrent_v2)(void **context);
    int (*cuStreamCreate)(void **stream, unsigned flags);
    int (*cuStreamDestroy_v2)(void *stream);
    int (*cuEventCreate)(void **event, unsigned flags);
    int (*cuEventDestroy_v2)(void *event);
    int (*cuEventRecord)(void *event, void *stream);
    int (*cuEventQuery)(void *event);
    int (*cuMemAlloc_v2)(uintptr_t *address, size_t nbytes);
    int (*cuMemFree_v2)(uintptr_t address);
    int (*cuGetErrorName)(int error, const char **name);
} nccl_driver;

/* What this rank has on a GPU. */
typedef struct nccl_gpu {
    int device;
    void *context; /* of the driver */
    void *stream;  /* of everything that is launched there */
    void *sink;    /* for messages that nobody wants any more */
    size_t sink_nbytes;
    LIST_ENTRY(nccl_gpu) link;
} nccl_gpu;

tb_status nccl_driver_load(nccl *n);
/* Finds it, or begins to use it. */
tb_status nccl_gpu_get(nccl *n, int device, nccl_gpu **out);
/* What is on the GPUs stays there unless all has ended: freeing it would wait. */
void nccl_gpus_free(nccl *n, bool has_ended);
/* Memory for so many bytes that are dropped; NULL, with a message: there is none. In the GPU's context. */
void *nccl_gpu_sink(nccl *n, nccl_gpu *gpu, size_t nbytes);
const char *nccl_gpu_error(const nccl *n, int error);
tb_status nccl_enter(const nccl *n, const nccl_gpu *gpu);
void nccl_leave(const nccl *n);

/* ---- nccl_comm.c ---- */

/* The end of a handle of NCCL's, in a thread, because ncclCommAbort blocks, for half a second on a GPU that ranks
 * share. */
typedef struct ending ending;

typedef enum nccl_presence { NCCL_PRESENT, NCCL_LEFT, NCCL_LOST } nccl_presence;

struct tb_comm {
    nccl *owner;
    nccl_gpu *gpu;
    uint64_t key; /* the same on all ranks */
    nccl_handle *handle;
    bool is_ready;
    size_t nranks, self;
    int32_t *ranks;
    unsigned char *presence; /* of each rank, an nccl_presence; this one has left if it was destroyed here */
    uint32_t noffered;       /* exchanges */
    tb_status failure;
    char why[256];
    int32_t lost;   /* the rank that was lost; -1: none */
    bool is_untold; /* other ranks must still be told of the failure */
    /* After a failure: until when the loss of a rank may turn out to be its reason, when what was launched is aborted,
     * and when it is given up. */
    int64_t loss_ms, abort_ms, give_up_ms;
    ending *ending;           /* of the handle */
    struct posted_list sends; /* in no exchange */
    struct posted_list receives;
    LIST_ENTRY(tb_comm) link;
};

tb_status nccl_comm_id(void *context, unsigned char id[TB_COMM_ID_SIZE]);
tb_status nccl_comm_create(void *context, const tb_comm_desc *desc, tb_comm **out);
tb_status nccl_comm_check(void *context, tb_comm *comm, bool *is_ready);
void nccl_comm_destroy(void *context, tb_comm *comm);
/* Fails all its operations, tells the other ranks if `tells`, and aborts what was launched after grace_ms. `lost`: see
 * tb_comm. Calls no `done`. */
void nccl_comm_fail(tb_comm *c, tb_status status, int32_t lost, int64_t grace_ms, bool tells, const char *format, ...)
    __attribute__((format(printf, 6, 7)));
/* "ncclSend: unhandled cuda error (...)"; fails the communicator. */
void nccl_comm_fail_call(tb_comm *c, const char *function, int result);
/* Status and message of an operation with this peer after a failure. */
tb_status nccl_comm_failure_of(const tb_comm *c, int32_t peer, tb_op *op);
void nccl_comm_progress(tb_comm *c); /* may free it */
/* It has failed, and whatever the reason is, is known. */
bool nccl_comm_has_failed(const tb_comm *c);
/* Nothing of it is launched any more: ncclCommAbort has returned. */
bool nccl_comm_is_aborted(const tb_comm *c);
tb_comm *nccl_comm_find(const nccl *n, uint64_t key); /* NULL: there is none */
/* NCCL's rank; -1: it is none of the communicator's. */
int nccl_comm_position(const tb_comm *c, int32_t rank);
void nccl_comm_peer_lost(void *context, int32_t peer, const char *why);
void nccl_comm_on_failed(nccl *n, int32_t peer, tb__unpack *message);
void nccl_comm_on_leave(tb_comm *c, int32_t peer);
/* Ends a communicator that this rank has left, whether others use it or not. */
void nccl_comm_end(tb_comm *c);
bool nccl_endings_reap(nccl *n);    /* frees what has ended; true: all have */
void nccl_endings_abandon(nccl *n); /* leaves the others to their threads */

/* ---- nccl_exchange.c ---- */

/* An operation. It is in one of the communicator's lists, in an exchange, or finished. */
typedef struct posted {
    tb__waiter waiter;
    tb_op *op;
    tb_comm *comm;
    exchange *exchange;
    bool is_finished;
    TAILQ_ENTRY(posted) link;
} posted;

TAILQ_HEAD(exchange_list, exchange);

typedef enum nccl_message { NCCL_OFFER = 1, NCCL_ACCEPT, NCCL_START, NCCL_LEAVE, NCCL_FAILED } nccl_message;

struct nccl {
    tb_transport_env env;
    const nccl_functions *call;
    nccl_driver driver;
    int timer;      /* the descriptor that is polled */
    unsigned nidle; /* turns of progress without any */
    LIST_HEAD(gpu_list, nccl_gpu) gpus;
    LIST_HEAD(comm_list, tb_comm) comms;
    LIST_HEAD(ending_list, ending) endings;
    exchange *turn;                 /* whose turn it is; NULL: the next one may have it */
    unsigned nrunning;              /* launched exchanges */
    struct exchange_list exchanges; /* all */
    struct exchange_list waiting;   /* for their turn, in the order in which they came */
    struct posted_list finished;    /* whose `done` is to be called */
};

tb_status nccl_post(void *context, tb_op *op);
void nccl_cancel(void *context, tb_op *op);
void nccl_told(void *context, int32_t peer, const void *bytes, size_t nbytes);
/* Offers what was posted, looks after what was launched, and gives turns. */
void nccl_exchanges_progress(nccl *n);
void nccl_nap(void); /* between two looks at what was launched */
void nccl_call_done(nccl *n);
/* Ends what a failed communicator has not launched; and what it has, once that is over, or if `gives_up`. False:
 * something is left. */
bool nccl_exchanges_fail(tb_comm *c, bool gives_up);
bool nccl_exchanges_are_any(const tb_comm *c);
/* Ends all operations that are not launched, and the exchanges of launched ones when they are over. This rank, or the
 * peer, is leaving; peer: -1, all of them; is_lost: nothing comes from it any more. */
void nccl_exchanges_part(tb_comm *c, int32_t peer, bool is_lost, tb_status status);
bool nccl_exchanges_are_launched(const tb_comm *c);
void nccl_exchanges_progress_launched(tb_comm *c);

/* ---- nccl.c ---- */

/* Has progress called soon. */
void nccl_wake(nccl *n);

/* A message to the same communicator at a peer. Frees the body. TB_NO_MEMORY: the communicator has failed. */
tb_status nccl_tell(tb_comm *c, int32_t peer, nccl_message kind, tb__pack *body);

#endif
