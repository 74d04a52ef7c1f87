/* NVSHMEM's host library, and the functions of CUDA's driver that the transport uses. Neither's headers are needed:
 * what is declared here is their ABI. */
#ifndef TB_TRANSPORT_NVSHMEM_LOAD_H
#define TB_TRANSPORT_NVSHMEM_LOAD_H

#include "tensorbus/transport.h"

/* Where a group of processes meets: made by one of them. */
typedef struct nvshmem_uid {
    int version;
    char bytes[124];
} nvshmem_uid;

/* How a process takes part: nvshmemx_init_attr_t of version 1, which all versions 3 of the library understand. */
typedef struct nvshmem_attr {
    int version;
    void *mpi_comm;
    struct {
        int version;
        struct {
            int version;
            nvshmem_uid *id;
            int pe, npes;
        } uid;
        char unused[96];
    } args;
} nvshmem_attr;

_Static_assert(sizeof(nvshmem_uid) == 128 && sizeof(nvshmem_attr) == 144, "as in NVSHMEM 3");

enum { NVSHMEM_WITH_UID = 8, NVSHMEM_SIGNAL_SET = 9 };

typedef struct nvshmem_functions {
    int (*init_status)(void); /* 0: nobody has initialised it */
    int (*get_uniqueid)(nvshmem_uid *out);
    int (*set_attr)(int pe, int npes, const nvshmem_uid *uid, nvshmem_attr *attr);
    int (*init)(unsigned flags, nvshmem_attr *attr);
    void (*finalize)(void);
    void *(*malloc)(size_t nbytes);
    void (*free)(void *memory);
    void (*put_signal)(void *to, const void *from, size_t nbytes, uint64_t *signal, uint64_t value, int operation,
                       int pe, void *stream);
    void (*set_signal)(uint64_t *signal, uint64_t value, int operation, int pe, void *stream);
    void (*quiet)(void *stream);
} nvshmem_functions;

/* CUresult, CUstream, CUevent and CUdeviceptr are int, void *, void * and uint64_t. */
typedef struct nvshmem_cuda {
    int (*stream_create)(void **out, unsigned flags);
    int (*stream_destroy)(void *stream);
    int (*stream_synchronize)(void *stream);
    int (*event_create)(void **out, unsigned flags);
    int (*event_destroy)(void *event);
    int (*event_record)(void *event, void *stream);
    int (*event_query)(void *event);
    int (*copy)(uint64_t to, uint64_t from, size_t nbytes, void *stream);
    int (*host_alloc)(void **out, size_t nbytes, unsigned flags);
    int (*host_free)(void *memory);
    int (*error_name)(int error, const char **out);
} nvshmem_cuda;

enum { CUDA_NOT_READY = 600, CUDA_NON_BLOCKING = 1, CUDA_NO_TIMING = 2 };

/* Loads both, once. TB_REFUSED: one of them is missing, or too old. */
tb_status nvshmem_load(const tb_transport_env *env, const nvshmem_functions **functions, const nvshmem_cuda **cuda);

#endif
