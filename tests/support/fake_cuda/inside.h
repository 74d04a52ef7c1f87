/* What the files of the fake driver share: driver.c (calls, GPUs, contexts), memory.c, pool.c, host.c and stream.c;
 * and launch.h, what those and kernels.cpp share. */
#ifndef TB_TESTS_FAKE_CUDA_INSIDE_H
#define TB_TESTS_FAKE_CUDA_INSIDE_H

#pragma GCC visibility push(default)
#include <cuda.h>
#pragma GCC visibility pop

#include "launch.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

enum { MOST_GPUS = 8 };

/* ---- driver.c ---- */

/* Marks what handles point to; a destroyed object is never freed. */
typedef enum object_kind { DEAD = 0xdead, CONTEXT = 0xc0, STREAM, EVENT, FUNCTION, STORAGE, POOL } object_kind;

typedef struct fake_gpu fake_gpu;

struct CUctx_st {
    object_kind kind;
    fake_gpu *gpu;
};

struct fake_gpu {
    int ordinal; /* in this process */
    struct CUctx_st primary;
    CUresult error; /* of its context, for good */
    bool is_reset;  /* its context was destroyed */
    size_t nbytes_used;
    uint32_t peers; /* GPUs that may use its memory of cuMemAlloc */
    CUstream null_stream;
};

/* One lock guards everything. */
typedef struct fake {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool is_initialised, is_forked, is_shut_down;
    int ngpus;
    int physical[MOST_GPUS]; /* which GPU of the machine each of them is: CUDA_VISIBLE_DEVICES */
    size_t most_nbytes;
    fake_gpu gpus[MOST_GPUS];
    uint64_t random;
    int64_t most_us;
    int ncaptures; /* streams that are being captured */
} fake_state;

extern fake_state fake;

void lock(void);
void unlock(void);
uint64_t random_below(uint64_t n); /* with the lock held */
void *get(size_t nbytes);          /* zeros; dies if there is no memory */
void *make_object(size_t nbytes);  /* zeros */

/* What a call needs. */
enum {
    NEEDS_NOTHING = 0, /* not even cuInit */
    NEEDS_INIT = 1,
    NEEDS_CONTEXT = 3, /* and that it has not failed */
    IS_UNSAFE = 4,     /* ends all captures, unless the thread's mode is relaxed */
};
/* The beginning of every call: if it is not CUDA_SUCCESS, that is the result. */
CUresult enter(const char *function, int needs);
#define ENTER(needs)                                                                                                   \
    do {                                                                                                               \
        CUresult entered_ = enter(__func__, needs);                                                                    \
        if (entered_ != CUDA_SUCCESS)                                                                                  \
            return entered_;                                                                                           \
    } while (0)
bool can_be_peers(int from, int to); /* also if they are the same */
/* Which GPU of the machine it is, and back; -1: this process does not see it. */
int physical(int ordinal);
int visible(int gpu);
CUcontext current_context(void);
fake_gpu *current_gpu(void);
void *check_handle(const void *handle, object_kind kind, const char *what); /* dies if it is something else */

/* A count down to a fault; negative: there is none. */
typedef struct countdown {
    long n;
    int result;
} countdown;
bool strikes(countdown *c);

/* ---- memory.c ---- */

/* The address by which the fake reaches what is at an address of the GPU's. Dies if it can't reach it. With the lock
 * held. */
void *reach(uint64_t address, int gpu);
void *look(const void *address, size_t nbytes); /* of fake_cuda_control */
uint64_t next_memory_id(void);                  /* with the lock held */
void give_peers_access(void);                   /* with the lock held. After fake_gpu.peers have changed */

/* A handle in bytes: a descriptor of a process. */
typedef struct handle_bytes {
    int pid, fd, gpu; /* the machine's number of the GPU */
    uint64_t inode;
} handle_bytes;

/* With the lock held, here and below. 0: there is no memory. */
uint64_t place_in_pool(CUmemoryPool pool, size_t nbytes);
/* NULL: it is memory of no pool, or was imported. */
CUmemoryPool describe_in_pool(uint64_t address, handle_bytes *out);
uint64_t import_to_pool(CUmemoryPool pool, const handle_bytes *handle); /* 0: it is gone */

/* ---- pool.c ---- */

/* The same in all processes. */
typedef struct pool_name {
    int pid, gpu;
    uint64_t number;
} pool_name;

struct CUmemPoolHandle_st {
    object_kind kind;
    fake_gpu *gpu;
    pool_name name;
    unsigned long long handle_types;
    bool is_exported, is_import;
};

/* ---- host.c ---- */

/* Host memory. */
typedef struct pinned_range {
    uintptr_t base;
    size_t nbytes;
    uint64_t id;
    uint64_t mapped; /* what was mapped there when it was registered; 0: it was allocated */
    LIST_ENTRY(pinned_range) link;
} pinned_range;

pinned_range *find_pinned(uintptr_t address); /* with the lock held, here and below; NULL: it is not pinned */
bool is_pinned(const void *address);
/* The driver refuses copies from and to such memory: some bytes are pinned, others not, or in another range. */
bool is_partly_pinned(const void *address, size_t nbytes);

/* ---- stream.c ---- */

void stream_fail(fake_gpu *gpu); /* with the lock held. Work of its streams is gone */
void end_captures(void);         /* with the lock held: they have become invalid */
/* Blocks while a stream waits for a value, as the driver's own calls do. Releases the lock meanwhile. */
void wait_for_parked_streams(void);
void fail_kernel(long n, int result);
void hold_kernel(long n);
void let_go(void);
/* Whether the kernel that is being executed has used memory between these addresses. With the lock held. */
bool is_in_use_by_kernel(uint64_t first, uint64_t last);

#endif
