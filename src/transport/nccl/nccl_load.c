#include "transport/nccl/nccl_load.h"

#include "base/config.h"
#include "base/library.h"
#include "transport/transport.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define USUAL_NAME "libnccl.so.2"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static nccl_functions nccl;
static char failure[512]; /* empty: it is loaded */
static char found[640];   /* "2.30.7, /usr/lib/x86_64-linux-gnu/libnccl.so.2"; empty: none was */

static int read_version(void *function) {
    int (*get_version)(int *), version = 0;
    memcpy(&get_version, &function, sizeof get_version);
    return get_version && get_version(&version) == NCCL_SUCCESS ? version : 0;
}

static void describe(const char *name) {
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    void *function = library ? dlsym(library, "ncclGetVersion") : NULL;
    int version = read_version(function);
    Dl_info file;
    if (version && dladdr(function, &file))
        snprintf(found, sizeof found, "%d.%d.%d, %s", version / 10000, version / 100 % 100, version % 100,
                 file.dli_fname);
}

#define SLOT(name)                                                                                                     \
    { "nccl" #name, &nccl.name, sizeof nccl.name }

static void load_functions(void) {
    const tb__symbol slots[] = {
        SLOT(GetVersion),         SLOT(GetErrorString), SLOT(GetLastError), SLOT(GetUniqueId),
        SLOT(CommInitRankConfig), SLOT(CommFinalize),   SLOT(CommAbort),    SLOT(CommGetAsyncError),
        SLOT(GroupStart),         SLOT(GroupEnd),       SLOT(Send),         SLOT(Recv),
    };
    const tb__library_choice choice = {getenv(tb__config_table[TB__CONFIG_NCCL].env), USUAL_NAME, describe};
    if (!tb__library_load_first(&choice, slots, sizeof slots / sizeof *slots, failure, sizeof failure))
        return;
    int version = 0;
    nccl.GetVersion(&version);
    if (version < TB__NCCL_OLDEST)
        snprintf(failure, sizeof failure, "it is version %d.%d.%d", version / 10000, version / 100 % 100,
                 version % 100);
}

tb_status nccl_load(const nccl_functions **out) {
    pthread_once(&once, load_functions);
    if (failure[0])
        return tb__fail(TB_REFUSED, "transport nccl needs NCCL %d.%d or later (pip install nvidia-nccl-cu13): %s",
                        TB__NCCL_OLDEST / 10000, TB__NCCL_OLDEST / 100 % 100, failure);
    *out = &nccl;
    return TB_OK;
}

const char *tb__nccl_found(void) {
    pthread_once(&once, load_functions);
    return found;
}

nccl_config nccl_non_blocking(void) {
    nccl_config config;
    memset(&config, 0, sizeof config); /* later versions have a number in the padding at its end */
    config.size = sizeof config;
    config.magic = 0xcafebeef;
    config.version = TB__NCCL_OLDEST;
    config.cga_cluster_size = config.min_ctas = config.max_ctas = config.split_share = INT_MIN;
    return config;
}
