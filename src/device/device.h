/* What a device implements: one table of functions, one folder.
 *
 * A device owns a kind of memory, and is the only code that reads or writes tensors in it. Everything else hands it
 * *moves*: strided boxes that go from one place to another, copied, cast, reduced or quantised on the way. Moves are
 * prepared once, as a *job*, and run for every version; a run ends in a *fence*. Adding a device takes its folder and a
 * line in device.c.
 *
 * Rules:
 *  - Outside of src/device nobody dereferences a tensor's address.
 *  - One thread at a time calls `run`, `checksum`, `cancel` and `progress`: the driver of the world's loop. Other
 *    threads may call the other functions at the same time.
 *  - Nothing here waits. `run` and `checksum` submit work; fences complete in `progress`, and only there.
 *  - What a job reads and writes is the device's from `run` until the fence is done, whatever its status. A run that
 *    was cancelled is done when it touches nothing any more.
 *  - If `run` fails, its fence is never completed. A failure later on is the fence's status and sentence.
 *  - The device of the destination does a move, unless that is in host memory and the source is not: then the source's
 *    does. So every device can use host memory, and the host device no other.
 *  - Runs of one device may be done in any order, and at the same time: what must be first is named in `after`. */
#ifndef TB_DEVICE_DEVICE_H
#define TB_DEVICE_DEVICE_H

#include "base/error.h"
#include "device/move.h"

typedef struct tb__device tb__device;
typedef struct tb__job tb__job; /* moves that are prepared */

enum { TB__MEMORY_KEY_MAX = 64, TB__FENCE_WHY_MAX = 256 };

/* The end of a piece of work. Zero-initialised before it is given to `run` or `checksum`. */
typedef struct tb__fence {
    bool is_done;
    tb_status status;
    char why[TB__FENCE_WHY_MAX]; /* the sentence of a failure */
    void *state;                 /* the device's own until it is done */
} tb__fence;

/* The memory that a tensor lies in. */
typedef struct tb__memory {
    void *base;
    size_t nbytes;
    uint64_t epoch;    /* differs if there was other memory at the same address before */
    bool is_shareable; /* with other processes */
} tb__memory;

/* What every mapping begins with. */
struct tb__mapping {
    const struct tb__device_ops *ops; /* of the device that made it */
    char *base;                       /* for that device; of a mapping of the host's, an address of this process */
    size_t nbytes;
};

/* Enough to map memory in another process, together with the descriptor that `share` gives. To be copied into messages.
 */
typedef struct tb__memory_key {
    uint32_t nbytes;
    unsigned char bytes[TB__MEMORY_KEY_MAX];
} tb__memory_key;

/* What of a job is done, and where. */
typedef struct tb__run {
    const uint32_t *parts; /* each once, else TB_INVALID; NULL: all of the job */
    size_t nparts;
    void *src_buffer, *dst_buffer; /* where addresses in buffers count from; NULL: there are none */
    /* Fences of any device, which must be done first, and stay where they are until this run's is done. If one has
     * failed, so does the run. */
    tb__fence *const *after;
    size_t nafter;
} tb__run;

typedef struct tb__device_ops {
    const char *name;

    /* TB_REFUSED: this machine has none, or none of that index. */
    tb_status (*open)(int index, tb__device **out);
    /* No run may be under way, and all jobs, mappings and memory have been given back. */
    void (*close)(tb__device *device);

    /* Whether all of these bytes are the device's, and what is known about the memory that they are in. Any thread. */
    bool (*find)(tb__device *device, const void *address, size_t nbytes, tb__memory *out);
    tb_status (*alloc)(tb__device *device, size_t nbytes, void **out);
    void (*free)(tb__device *device, void *address); /* NULL is allowed */

    /* (optional; default: TB_REFUSED) Lets other processes map memory that `find` found. *fd is a descriptor that has
     * to get there together with the key, and that stays the device's; -1: none is needed. */
    tb_status (*share)(tb__device *device, const tb__memory *memory, tb__memory_key *key, int *fd);
    /* (with share) Maps it: the descriptor stays the caller's. Offsets in the mapping count from the memory's base, and
     * moves beyond its nbytes are refused by `prepare`. Devices can use their own mappings, and those of the host. */
    tb_status (*map)(tb__device *device, const tb__memory_key *key, int fd, tb__mapping **out);
    void (*unmap)(tb__device *device, tb__mapping *mapping); /* no job has it any more */

    /* Makes a job of moves, which are checked and copied; their mappings and memory stay the caller's. */
    tb_status (*prepare)(tb__device *device, const tb__move *moves, size_t nmoves, tb__job **out);
    void (*release)(tb__device *device, tb__job *job); /* none of its runs is under way. NULL is allowed */
    /* The run's own struct, its parts and its list of fences are needed for the call only. */
    tb_status (*run)(tb__device *device, tb__job *job, const tb__run *run, tb__fence *fence);
    /* The checksum (base/checksum.h) of the bytes. *out is written before the fence is done. */
    tb_status (*checksum)(tb__device *device, const void *address, size_t nbytes, uint64_t *out, tb__fence *fence);
    /* Begins no more of what the fence is for. It is done, with TB_CANCELLED, as soon as nothing is touched any more; a
     * run that was nearly done may end well instead. */
    void (*cancel)(tb__device *device, tb__fence *fence);

    /* Does a little work and completes fences. Returns whether there may be more to do at once. */
    bool (*progress)(tb__device *device);
    /* Readable when progress has something to do because of the device itself. To be waited for after a progress that
     * found nothing, and that came after all calls of `run`, `checksum` and `cancel`, and after the fences of other
     * devices that its runs wait for were done. */
    int (*fd)(tb__device *device);
} tb__device_ops;

/* What every device begins with. */
struct tb__device {
    const tb__device_ops *ops;
};

/* Devices of this build, the host last, which takes all memory that no other one knows; ends with NULL. */
extern const tb__device_ops *const *_Atomic tb__devices;

tb_status tb__device_open(const char *name, int index, tb__device **out);
void tb__device_close(tb__device *device); /* NULL is allowed */

/* The slots, by name. Where one is missing they do what is said above. */
tb_status tb__device_share(tb__device *device, const tb__memory *memory, tb__memory_key *key, int *fd);
tb_status tb__device_map(tb__device *device, const tb__memory_key *key, int fd, tb__mapping **out);

/* Where a device finds source k of a move, which is in a mapping. TB_INVALID: in none that it can use, or beyond it. */
tb_status tb__mapping_source(const tb__mapping *mapping, const tb__device_ops *ops, const tb__move *move, uint32_t k,
                             const void **out);

extern const tb__device_ops tb__host_device_ops;

#endif
