/* The interface of devices: one table of functions each.
 *
 * A device owns a kind of memory, and is the only code that reads or writes tensors in it. Everything else gives it
 * *moves*: strided boxes that are copied, cast, reduced or quantised from one place to another. Moves are prepared
 * once, as a *job*, and run for every version; a run completes a *fence*. Adding a device takes a folder and a line in
 * device.c.
 *
 * Rules:
 *  - Only src/device dereferences addresses of tensors.
 *  - One thread at a time calls `run`, `checksum`, `cancel` and `progress`: the driver of the world's loop. Other
 *    threads may call the other functions at the same time.
 *  - Nothing here waits. `run` and `checksum` submit work; fences complete in `progress`, and only there.
 *  - The memory that a job accesses belongs to the device from `run` until the fence is done, whatever its status. A
 *    run that was cancelled is done when it does not access memory any more.
 *  - If `run` fails, its fence is never completed. A failure later on is the fence's status and message.
 *  - The device of the destination does a move, unless that is in host memory and the source is not: then the source's
 *    does. So every device can use host memory, and the host device no other.
 *  - Runs of one device may be done in any order, and at the same time, but after the fences in their `after`. */
#ifndef TB_DEVICE_DEVICE_H
#define TB_DEVICE_DEVICE_H

#include "base/error.h"
#include "base/mem.h"
#include "base/pack.h"
#include "device/move.h"
#include "tensorbus/transport.h"

typedef struct tb__device tb__device;
typedef struct tb__job tb__job;   /* prepared moves */
typedef struct tb__gate tb__gate; /* holds a stream */

enum { TB__FENCE_WHY_MAX = 256 };

/* Completion of a run, of a checksum, or of the work on a stream. Zero-initialise it before it is given to `run`,
 * `checksum` or `stream_record`. */
typedef struct tb__fence {
    bool is_done;
    tb_status status;
    char why[TB__FENCE_WHY_MAX]; /* message of a failure */
    void *state;                 /* owned by the device until it is done */
} tb__fence;

/* Memory of a tensor. */
typedef struct tb__memory {
    void *base;
    size_t nbytes;
    int index;         /* which of the device's units it is on: a GPU's ordinal in this process; 0 on the host */
    uint64_t epoch;    /* tells it apart from earlier memory at the same address */
    bool is_shareable; /* with other processes */
} tb__memory;

/* A number that identifies how other processes reach the memory: the device and unit that it is on, and whether it can
 * be shared. Never 0. */
uint64_t tb__device_memory_kind(const tb__device *device, const tb__memory *memory);

/* A unit of memory that a program can remap or free: an allocation, or a piece of one. */
typedef struct tb__memory_id {
    const void *base;
    uint64_t id;
} tb__memory_id;

typedef TB_VEC(tb__memory_id) tb__memory_ids;

typedef enum tb__memory_change {
    TB__MEMORY_SAME,
    TB__MEMORY_REMAPPED, /* other memory is at that address */
    TB__MEMORY_GONE,     /* none is */
} tb__memory_change;

/* First member of every mapping. */
struct tb__mapping {
    const struct tb__device_ops *ops; /* of the device that made it */
    char *base;                       /* for that device; of a host mapping, an address in this process */
    size_t nbytes;
    int index; /* of the unit that the memory is on */
};

/* Enough to map memory in another process: bytes for a message, and descriptors that travel beside it. */
typedef struct tb__memory_key {
    tb__pack bytes;
    TB_VEC(int) fds; /* owned by the key */
} tb__memory_key;

void tb__memory_key_fini(tb__memory_key *key); /* closes its descriptors */
/* A key for the same memory, with descriptors of its own. */
tb_status tb__memory_key_copy(const tb__memory_key *key, tb__memory_key *out);

/* Which parts of a job to run, and on which buffers. */
typedef struct tb__run {
    const uint32_t *parts; /* without duplicates, else TB_INVALID; NULL: the whole job */
    size_t nparts;
    /* Bases of addresses in buffers, in memory of tb_alloc or the device's own; src_buffer also in a mapping of the
     * device (its `base`). NULL: there are none. */
    void *src_buffer, *dst_buffer;
    /* Of the host device only: moves nothing, but does what a first run would do beside that: page tables are filled,
     * threads are started, kernels are chosen. The run has no buffers. */
    bool is_rehearsal;
    /* Fences of any device that must be done before the run starts, and must stay valid until this run's is done. If
     * one has failed, so does the run. */
    tb__fence *const *after;
    size_t nafter;
} tb__run;

typedef struct tb__device_ops {
    const char *name;

    /* Opens the device for one loop. Must be cheap: a device that needs a driver loads it when memory of it is first
     * used. TB_REFUSED: this machine can't have such a device. */
    tb_status (*open)(tb__device **out);
    /* No run may be under way, and all jobs, mappings and memory must be freed. */
    void (*close)(tb__device *device);

    /* Whether the device owns all of these bytes; *out describes their memory. Any thread. */
    bool (*find)(tb__device *device, const void *address, size_t nbytes, tb__memory *out);
    /* (optional; default: memory does not change) Appends the pieces of memory that `find` found. Any thread. */
    tb_status (*list_ids)(tb__device *device, const tb__memory *memory, tb__memory_ids *out);
    /* (with list_ids) Whether a piece is still there. Cheap. Any thread. */
    tb__memory_change (*check_id)(tb__device *device, const tb__memory_id *id);
    /* Any thread. `index` is that of tb__memory. */
    tb_status (*alloc)(tb__device *device, int index, size_t nbytes, void **out);
    void (*free)(tb__device *device, void *address); /* NULL is allowed */
    /* (optional; default: TB_REFUSED) Memory for the program, of tb_alloc_on, which needs no open device; `find` of any
     * open one finds it, and it is shareable. An index of -1 is the unit that the calling thread uses. TB_REFUSED, with
     * the reason, if there is no such unit. Any thread. */
    tb_status (*alloc_on)(int index, size_t nbytes, void **out);
    bool (*free_on)(void *address); /* (with alloc_on) false: it is not such memory, and nothing happens. Any thread */
    /* (optional; default: TB_REFUSED) Pins whole pages of host memory, so that all units of the device read and write
     * them at full speed. Any thread. */
    tb_status (*pin)(void *address, size_t nbytes);
    void (*unpin)(void *address); /* (with pin) all that the call with this address has pinned */
    /* (optional; default: the device's name) The name of a unit in messages, such as "cuda:1". Any thread. */
    const char *(*unit_name)(tb__device *device, int index);
    /* (optional, all six; default: TB_MEM_HOST) What transports call its memory. */
    tb_mem_kind transport_kind;
    /* Memory that transports can send and receive; `alloc` may give memory that they can't. `free` frees it. Any
     * thread. */
    tb_status (*alloc_for_transport)(tb__device *device, int index, size_t nbytes, void **out);
    /* Makes a unit the current one of this thread, until `leave`, for libraries that use the device themselves. Any
     * thread. */
    tb_status (*enter)(tb__device *device, int index);
    void (*leave)(tb__device *device);
    /* The function that the device's driver exports under that name; NULL: there is none, or no driver. Any thread. */
    void *(*driver_function)(tb__device *device, const char *name);
    /* The unit that the calling thread uses. Any thread. */
    int (*current_unit)(tb__device *device);

    /* (optional; default: TB_REFUSED) Lets other processes map memory that `find` found. *key is empty before. */
    tb_status (*share)(tb__device *device, const tb__memory *memory, tb__memory_key *key);
    /* (with share) Maps it; the caller keeps owning the key. Offsets are relative to the memory's base, and `prepare`
     * refuses moves beyond its nbytes. Devices can use their own mappings, and those of the host. If it is writable,
     * moves can also name addresses from the mapping's base on, like those of the device's own memory; the host refuses
     * that (TB_REFUSED). */
    tb_status (*map)(tb__device *device, const tb__memory_key *key, bool is_writable, tb__mapping **out);
    /* (optional; default: TB_OK) Whether a unit can read memory of another one, in its jobs' sources and buffers:
     * memory that `find` found, or from a mapping's base on. Tries it, and gives the unit access if possible.
     * TB_REFUSED, with the reason, if it can't. Any thread. */
    tb_status (*try_access)(tb__device *device, int index, const void *address, size_t nbytes);
    /* No run of a job that uses it may be under way, and such a job must not be run again. */
    void (*unmap)(tb__device *device, tb__mapping *mapping);

    /* (optional, all of stream_... and gate_...; default: TB_REFUSED, the device has no streams) Streams order the
     * program's own work on the device. `stream` points to a handle. TB_REFUSED: the stream is being captured. Any
     * thread may call these, while another one is in `progress`. All but gate_open may wait for room on the stream, and
     * so for gates to be opened: they must be called without any lock that the thread which opens gates needs. */
    /* The fence is done when the work that is on the stream now is done; `cancel` makes it done soon, whatever becomes
     * of that work. Runs may name it in `after`. */
    tb_status (*stream_record)(tb__device *device, const void *stream, tb__fence *fence);
    /* Later work on the stream waits until the run of this fence has ended, well or not. `run` has taken the fence, and
     * `progress` may complete it meanwhile: if it is done, the stream does not wait. TB_REFUSED: the run itself waits
     * for fences of other devices. */
    tb_status (*stream_wait)(tb__device *device, const void *stream, const tb__fence *fence);
    /* Later work on the stream waits until the gate is opened, which happens by itself at the deadline (of
     * tb__now_ms). */
    tb_status (*gate_create)(tb__device *device, const void *stream, int64_t deadline_ms, tb__gate **out);
    void (*gate_open)(tb__gate *gate); /* and frees it, once. Never waits */

    /* Makes a job of moves, which are checked and copied; the caller keeps owning their mappings and memory. */
    tb_status (*prepare)(tb__device *device, const tb__move *moves, size_t nmoves, tb__job **out);
    void (*release)(tb__device *device, tb__job *job); /* no run of it may be under way. NULL is allowed */
    /* *run, its parts and its list of fences may be freed after the call. */
    tb_status (*run)(tb__device *device, tb__job *job, const tb__run *run, tb__fence *fence);
    /* The checksum (base/checksum.h) of the bytes. *out is written before the fence is done. */
    tb_status (*checksum)(tb__device *device, const void *address, size_t nbytes, uint64_t *out, tb__fence *fence);
    /* Stops the work of the fence. The fence is done, with TB_CANCELLED, when no memory is accessed any more; a run
     * that was nearly done may succeed instead. */
    void (*cancel)(tb__device *device, tb__fence *fence);

    /* Does some work and completes fences. Returns whether there may be more to do. */
    bool (*progress)(tb__device *device);
    /* Readable when the device itself has something for progress. Wait for it only after a progress that returned
     * false, and that was called after all `run`, `checksum` and `cancel`, and after the fences of other devices that
     * runs wait for were done. */
    int (*fd)(tb__device *device);
} tb__device_ops;

/* First member of every device. */
struct tb__device {
    const tb__device_ops *ops;
};

/* Devices of this build; ends with NULL. The host is last: it owns all memory that no other device does. */
extern const tb__device_ops *const *_Atomic tb__devices;

tb_status tb__device_open(const char *name, tb__device **out);
/* Frees memory of alloc_on. False: no device has allocated it. */
bool tb__devices_free(void *address);
void tb__device_close(tb__device *device); /* NULL is allowed */

/* Fails unless all of the bytes are on the same unit as the first; they may be in several adjacent
 * memories. */
tb_status tb__device_check_extent(tb__device *device, const void *address, size_t nbytes);

/* Call the slot of that name, or the default above if it is NULL. */
const char *tb__device_unit_name(tb__device *device, int index);
tb_status tb__device_share(tb__device *device, const tb__memory *memory, tb__memory_key *key);
tb_status tb__device_map(tb__device *device, const tb__memory_key *key, bool is_writable, tb__mapping **out);
tb_status tb__device_try_access(tb__device *device, int index, const void *address, size_t nbytes);
tb_status tb__device_stream_record(tb__device *device, const void *stream, tb__fence *fence);
tb_status tb__device_stream_wait(tb__device *device, const void *stream, const tb__fence *fence);
tb_status tb__device_gate_create(tb__device *device, const void *stream, int64_t deadline_ms, tb__gate **out);

/* The address of source k of a move, which is in a mapping. TB_INVALID: the device can't use the mapping, or the source
 * is outside of it. */
tb_status tb__mapping_source(const tb__mapping *mapping, const tb__device_ops *ops, const tb__move *move, uint32_t k,
                             const void **out);

/* Those of this build, in the order in which they are asked whose memory is: each is a folder with a table
 * tb__NAME_device_ops. */
#ifdef TB_HAS_CUDA
#define TB__CUDA_DEVICE(each) each(cuda)
#else
#define TB__CUDA_DEVICE(each)
#endif
#define TB__BUILT_IN_DEVICES(each) TB__CUDA_DEVICE(each) each(host)
#define TB__DECLARE_DEVICE(name)   extern const tb__device_ops tb__##name##_device_ops;
TB__BUILT_IN_DEVICES(TB__DECLARE_DEVICE)

#endif
