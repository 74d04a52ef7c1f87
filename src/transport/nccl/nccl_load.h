/* NCCL, loaded when the first nccl transport is opened, so that tensorbus works without it. What is declared here is
 * its binary interface as of 2.19, which later versions keep. */
#ifndef TB_TRANSPORT_NCCL_NCCL_LOAD_H
#define TB_TRANSPORT_NCCL_NCCL_LOAD_H

#include "base/error.h"

#include <stddef.h>

typedef struct nccl_handle nccl_handle; /* a communicator of NCCL's */

/* Results, as far as they matter here. */
enum { NCCL_SUCCESS = 0, NCCL_IN_PROGRESS = 7 };

enum { NCCL_ID_SIZE = 128, NCCL_BYTES = 1 /* data type: ncclUint8 */ };

typedef struct nccl_id {
    char bytes[NCCL_ID_SIZE];
} nccl_id;

typedef struct nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
} nccl_config;

/* Its functions, without their prefix. The streams are the driver's. */
typedef struct nccl_functions {
    int (*GetVersion)(int *version);
    const char *(*GetErrorString)(int result);
    const char *(*GetLastError)(nccl_handle *comm);
    int (*GetUniqueId)(nccl_id *out);
    int (*CommInitRankConfig)(nccl_handle **out, int nranks, nccl_id id, int rank, nccl_config *config);
    int (*CommFinalize)(nccl_handle *comm);
    int (*CommAbort)(nccl_handle *comm);
    int (*CommGetAsyncError)(nccl_handle *comm, int *out);
    int (*GroupStart)(void);
    int (*GroupEnd)(void);
    int (*Send)(const void *from, size_t count, int type, int peer, nccl_handle *comm, void *stream);
    int (*Recv)(void *to, size_t count, int type, int peer, nccl_handle *comm, void *stream);
} nccl_functions;

/* Once loaded it stays. */
tb_status nccl_load(const nccl_functions **out);

/* A configuration with nothing set but that calls do not block. */
nccl_config nccl_non_blocking(void);

#endif
