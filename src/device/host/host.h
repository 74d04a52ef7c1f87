/* Shared by host.c (memory) and job.c (runs). */
#ifndef TB_DEVICE_HOST_HOST_H
#define TB_DEVICE_HOST_HOST_H

#include "device/device.h"
#include "device/host/move.h"

#include <pthread.h>
#include <sys/queue.h>

/* A mapped file with memory of another process. If it has grown, it is mapped again. */
typedef struct tb__host_file {
    uint64_t device, inode;
    char *base;
    size_t nbytes;
    size_t refs; /* mappings */
    LIST_ENTRY(tb__host_file) link;
} tb__host_file;

typedef struct tb__host_mapping {
    tb__mapping base;
    tb__host_file *file;
} tb__host_mapping;

typedef struct tb__host_run tb__host_run;
TAILQ_HEAD(tb__host_runs, tb__host_run);

typedef struct tb__host_device {
    tb__device base;
    int wake; /* an eventfd: written when workers have ended a run */
    LIST_HEAD(tb__host_files, tb__host_file) files;
    struct tb__host_runs waiting; /* for other fences */
    struct tb__host_runs running;
    pthread_mutex_t lock;       /* guards what follows, which any thread changes */
    struct tb__host_runs ended; /* all pieces are done, but not the fence */
    bool is_woken;              /* `wake` is readable */
} tb__host_device;

tb_status tb__host_prepare(tb__device *device, const tb__move *moves, size_t nmoves, tb__job **out);
void tb__host_release(tb__device *device, tb__job *job);
tb_status tb__host_run_job(tb__device *device, tb__job *job, const tb__run *what, tb__fence *fence);
tb_status tb__host_checksum(tb__device *device, const void *address, size_t nbytes, uint64_t *out, tb__fence *fence);
void tb__host_cancel(tb__device *device, tb__fence *fence);
bool tb__host_progress(tb__device *device);

#endif
