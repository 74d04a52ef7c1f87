/* A process's one use of NVSHMEM, and the thread for its calls that block.
 *
 * NVSHMEM connects one fixed set of ranks, in one process each, and has no two calls at a time. Its collective calls
 * wait for all ranks, for ever if one is gone; a thread makes them, in the order in which they were added. When a rank
 * is lost while it is in use, no function of NVSHMEM is called any more in this process: many would wait for the lost
 * rank, and some end the process. */
#ifndef TB_TRANSPORT_NVSHMEM_LIBRARY_H
#define TB_TRANSPORT_NVSHMEM_LIBRARY_H

#include "transport/nvshmem/nvshmem_load.h"

typedef enum nvshmem_job_kind { JOB_UID, JOB_INIT, JOB_ALLOC, JOB_FREE, JOB_FINALIZE } nvshmem_job_kind;

enum { NVSHMEM_SLOTS = 256, NVSHMEM_STREAMS = 4 };

/* What a communicator has of the library and the driver. */
typedef struct nvshmem_memory {
    char *base;      /* symmetric; first what comm_memory gives, then the words */
    uint64_t *words; /* a signal for each slot */
    uint64_t *seen;  /* in pinned memory: copies of the words */
    void *streams[NVSHMEM_STREAMS];
    void *watch; /* the stream for these copies ... */
    void *event; /* ... and the event after the last one */
} nvshmem_memory;

/* A call, or several that belong together, which the thread makes. */
typedef struct nvshmem_job {
    struct nvshmem_job *next;
    nvshmem_job_kind kind;
    int device;
    nvshmem_uid uid;       /* of JOB_UID: the result; of JOB_INIT */
    int pe, npes;          /* of JOB_INIT */
    size_t nbytes;         /* of JOB_ALLOC */
    uint64_t key;          /* of JOB_ALLOC and JOB_FREE: which communicator */
    nvshmem_memory memory; /* of JOB_ALLOC: the result */
    tb_status status;
    char why[256];
} nvshmem_job;

/* Makes the context `owner` the only one to use the library, until nvshmem_library_leave. It fails, with a sentence, if
 * another one does, or if a rank was lost. `event`, an eventfd, becomes readable when a job is done. */
tb_status nvshmem_library_take(const void *owner, const tb_transport_env *env, int event);
/* Nothing of the library is in use any more. */
void nvshmem_library_leave(const void *owner);
/* Adds a job, which belongs to the library until nvshmem_library_done gives it back. */
void nvshmem_library_add(nvshmem_job *job);
/* NULL: no job is done. */
nvshmem_job *nvshmem_library_done(void);
/* The function that the thread is in; NULL: it waits for jobs. */
const char *nvshmem_library_calling(void);
/* Between these two calls the caller may call functions of NVSHMEM that do not block. False: not now. */
bool nvshmem_library_enter(void);
void nvshmem_library_exit(void);
/* From now on no function of NVSHMEM is called. `why` is a sentence, for those who want to use it later. */
void nvshmem_library_lose(const char *why);
/* From now on no collective function is called. */
void nvshmem_library_end(const char *why);
/* One of these two. */
bool nvshmem_library_is_over(void);
bool nvshmem_library_is_lost(void);
/* For `close`, when this rank has left all communicators: if the others close, too, within seconds, all of them
 * finalise NVSHMEM, and a later world can use it. They tell each other by words in symmetric memory. */
void nvshmem_library_part(const void *owner);
/* For `close`: whether the thread is in no call, or ends the one that it is in, within seconds. What is left of the
 * owner's use is given up, and the library is lost, if it is initialised. */
bool nvshmem_library_abandon(const void *owner);

#endif
