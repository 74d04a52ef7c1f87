/* Finds NVSHMEM's host library, and the driver's functions. */
#include "transport/nvshmem/nvshmem_load.h"

#include "base/config.h"
#include "base/library.h"
#include "transport/transport.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define USUAL_NAME "libnvshmem_host.so.3"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static nvshmem_functions nvshmem;
static char failure[512]; /* empty: it is loaded */
static char found[640];   /* "3.8.0, /usr/lib/x86_64-linux-gnu/libnvshmem_host.so.3"; empty: none was */

static pthread_mutex_t cuda_lock = PTHREAD_MUTEX_INITIALIZER;
static nvshmem_cuda cuda;
static bool has_cuda;

static void describe(const char *name) {
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    void *function = library ? dlsym(library, "nvshmemx_vendor_get_version_info") : NULL;
    void (*get_version)(int *, int *, int *);
    int major, minor, patch;
    Dl_info file;
    memcpy(&get_version, &function, sizeof get_version);
    if (!function || !dladdr(function, &file))
        return;
    get_version(&major, &minor, &patch);
    snprintf(found, sizeof found, "%d.%d.%d, %s", major, minor, patch, file.dli_fname);
}

#define SLOT(name, member)                                                                                             \
    { name, &nvshmem.member, sizeof nvshmem.member }

static void load_functions(void) {
    const tb__symbol slots[] = {
        SLOT("nvshmemx_init_status", init_status),
        SLOT("nvshmemx_get_uniqueid", get_uniqueid),
        SLOT("nvshmemx_set_attr_uniqueid_args", set_attr),
        SLOT("nvshmemx_hostlib_init_attr", init),
        SLOT("nvshmemx_hostlib_finalize", finalize),
        SLOT("nvshmem_malloc", malloc),
        SLOT("nvshmem_free", free),
        SLOT("nvshmemx_putmem_signal_on_stream", put_signal),
        SLOT("nvshmemx_signal_op_on_stream", set_signal),
        SLOT("nvshmemx_quiet_on_stream", quiet),
    };
    const tb__library_choice choice = {getenv(tb__config_table[TB__CONFIG_NVSHMEM].env), USUAL_NAME, describe};
    if (tb__library_load_first(&choice, slots, sizeof slots / sizeof *slots, failure, sizeof failure) &&
        strtol(found, NULL, 10) != TB__NVSHMEM_MAJOR)
        snprintf(failure, sizeof failure, "it is version %.*s", (int)strcspn(found, ","), found);
}

const char *tb__nvshmem_found(void) {
    pthread_once(&once, load_functions);
    return found;
}

/* The names are those that the driver exports. */
static tb_status find_cuda(const tb_transport_env *env) {
    const tb__symbol slots[] = {
        {"cuStreamCreate", &cuda.stream_create, sizeof cuda.stream_create},
        {"cuStreamDestroy_v2", &cuda.stream_destroy, sizeof cuda.stream_destroy},
        {"cuStreamSynchronize", &cuda.stream_synchronize, sizeof cuda.stream_synchronize},
        {"cuEventCreate", &cuda.event_create, sizeof cuda.event_create},
        {"cuEventDestroy_v2", &cuda.event_destroy, sizeof cuda.event_destroy},
        {"cuEventRecord", &cuda.event_record, sizeof cuda.event_record},
        {"cuEventQuery", &cuda.event_query, sizeof cuda.event_query},
        {"cuMemcpyAsync", &cuda.copy, sizeof cuda.copy},
        {"cuMemHostAlloc", &cuda.host_alloc, sizeof cuda.host_alloc},
        {"cuMemFreeHost", &cuda.host_free, sizeof cuda.host_free},
        {"cuGetErrorName", &cuda.error_name, sizeof cuda.error_name},
    };
    if (!env->enter_device || !env->leave_device || !env->device_function || !env->tell)
        return tb__fail(TB_REFUSED, "transport nvshmem needs a world with a device for GPUs");
    for (size_t i = 0; i < sizeof slots / sizeof *slots; i++) {
        void *function = env->device_function(env->arg, TB_MEM_CUDA, slots[i].name);
        if (!function)
            return tb__fail(TB_REFUSED, "transport nvshmem needs CUDA's driver, and its function %s was not found",
                            slots[i].name);
        memcpy(slots[i].slot, &function, slots[i].nbytes);
    }
    has_cuda = true;
    return TB_OK;
}

tb_status nvshmem_load(const tb_transport_env *env, const nvshmem_functions **functions, const nvshmem_cuda **driver) {
    pthread_once(&once, load_functions);
    if (failure[0])
        return tb__fail(TB_REFUSED, "transport nvshmem needs NVSHMEM %d (pip install nvidia-nvshmem-cu13): %s",
                        TB__NVSHMEM_MAJOR, failure);
    pthread_mutex_lock(&cuda_lock);
    tb_status status = has_cuda && env->device_function && env->tell ? TB_OK : find_cuda(env);
    pthread_mutex_unlock(&cuda_lock);
    *functions = &nvshmem;
    *driver = &cuda;
    return status;
}
