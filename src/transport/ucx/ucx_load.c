/* Finds OpenUCX, loads its functions, redirects its log, and keeps it from installing signal handlers. */
#include "transport/ucx/ucx_load.h"

#include "base/config.h"
#include "base/library.h"
#include "base/log.h"
#include "base/process.h"
#include "transport/transport.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The oldest version that works: active messages with rendezvous, keepalive. */
enum { MAJOR = TB__UCX_MAJOR, MINOR = TB__UCX_MINOR };

static pthread_once_t once = PTHREAD_ONCE_INIT;
static ucx_functions ucx;
static char failure[512]; /* empty: it is loaded */
static char found[640];   /* "1.13.1, /usr/lib/x86_64-linux-gnu/libucp.so.0"; empty: none was */

/* The type of UCX's log handlers. Its own header is not C17: later versions use asm. */
typedef int log_handler(const char *file, unsigned line, const char *function, ucs_log_level_t level,
                        const void *component, const char *message, va_list ap);
enum { THAT_IS_ALL = 0 }; /* of handlers */

/* UCX's messages go to our log, one level lower: a lost peer is an error to UCX, but an event to us. */
static __attribute__((format(printf, 6, 0))) int to_our_log(const char *file, unsigned line, const char *function,
                                                            ucs_log_level_t level, const void *component,
                                                            const char *message, va_list ap) {
    (void)function;
    (void)component;
    char text[512];
    const char *name = strrchr(file, '/');
    vsnprintf(text, sizeof text, message, ap);
    tb__log(level == UCS_LOG_LEVEL_FATAL  ? TB_LOG_ERROR
            : level <= UCS_LOG_LEVEL_WARN ? TB_LOG_INFO
                                          : TB_LOG_DEBUG,
            "ucx: %s (%s:%u)", text, name ? name + 1 : file, line);
    return THAT_IS_ALL;
}

static bool is_env_set(const char *name) {
    return getenv(name) != NULL;
}

/* Not every build of UCX exports these two functions; they are optional. */
static void make_quiet(void *library) {
    void (*push)(log_handler * handler);
    void (*disable)(void);
    void *function =
        is_env_set("UCX_LOG_LEVEL") || is_env_set("UCX_LOG_FILE") ? NULL : dlsym(library, "ucs_log_push_handler");
    if (function) {
        memcpy(&push, &function, sizeof push);
        push(to_our_log);
    }
    bool is_asked = is_env_set("UCX_HANDLE_ERRORS") || is_env_set("UCX_ERROR_SIGNALS");
    function = is_asked ? NULL : dlsym(library, "ucs_debug_disable_signals");
    if (function) {
        memcpy(&disable, &function, sizeof disable);
        disable();
    }
}

/* UCX would take memory that it has not seen allocated for host memory, whatever it is told: it patches the driver's
 * exported functions, and programs get others from cuGetProcAddress. Without this cache it asks the driver. */
static void disable_memory_cache(void *library) {
    ucs_status_t (*set)(const char *name, const char *value);
    void *function = is_env_set("UCX_MEMTYPE_CACHE") ? NULL : dlsym(library, "ucs_global_opts_set_value");
    memcpy(&set, &function, sizeof set);
    if (function && set("MEMTYPE_CACHE", "n") != UCS_OK)
        tb__log(TB_LOG_WARN, "ucx: UCX_MEMTYPE_CACHE=n can't be set");
}

#define SLOT(name)                                                                                                     \
    { "ucp_" #name, &ucx.name, sizeof ucx.name }

#define USUAL_NAME "libucp.so.0"

static void describe(const char *name) {
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL), *function = NULL;
    const char *(*version)(void);
    Dl_info file;
    if (library)
        function = dlsym(library, "ucp_get_version_string");
    memcpy(&version, &function, sizeof version);
    if (version && dladdr(function, &file))
        snprintf(found, sizeof found, "%.40s, %s", version(), file.dli_fname);
}

static void load_functions(void) {
    const tb__symbol slots[] = {
        SLOT(get_version),
        SLOT(config_read),
        SLOT(config_modify),
        SLOT(config_release),
        SLOT(init_version),
        SLOT(cleanup),
        SLOT(context_query),
        SLOT(context_print_info),
        SLOT(worker_create),
        SLOT(worker_destroy),
        SLOT(worker_query),
        SLOT(worker_get_address),
        SLOT(worker_release_address),
        SLOT(worker_get_efd),
        SLOT(worker_arm),
        SLOT(worker_progress),
        SLOT(worker_set_am_recv_handler),
        SLOT(ep_create),
        SLOT(ep_close_nbx),
        SLOT(ep_flush_nbx),
        SLOT(ep_print_info),
        SLOT(am_send_nbx),
        SLOT(am_recv_data_nbx),
        SLOT(tag_send_nbx),
        SLOT(tag_recv_nbx),
        SLOT(request_cancel),
        SLOT(request_free),
        {"ucs_status_string", &ucx.status_string, sizeof ucx.status_string},
    };
    const tb__library_choice choice = {getenv(tb__config_table[TB__CONFIG_UCX].env), USUAL_NAME, describe};
    void *library = tb__library_load_first(&choice, slots, sizeof slots / sizeof *slots, failure, sizeof failure);
    if (!library)
        return;
    unsigned major, minor, release;
    ucx.get_version(&major, &minor, &release);
    if (major != MAJOR || minor < MINOR)
        snprintf(failure, sizeof failure, "it is version %u.%u.%u, and %d.%d or later is needed", major, minor, release,
                 MAJOR, MINOR);
    else
        make_quiet(library);
    disable_memory_cache(library);
}

tb_status ucx_load(const ucx_functions **out) {
    pthread_once(&once, load_functions);
    if (failure[0])
        return tb__fail(TB_REFUSED, "transport ucx needs OpenUCX %d.%d or later (apt install libucx0): %s", MAJOR,
                        MINOR, failure);
    *out = &ucx;
    return TB_OK;
}

const char *tb__ucx_found(void) {
    pthread_once(&once, load_functions);
    return found;
}

static atomic_size_t nusers;
static atomic_uint used_by; /* tb__nforks of the using process */

tb_status ucx_begin_use(void) {
    if (nusers > 0 && used_by != tb__nforks)
        return tb__fail(TB_REFUSED, "transport ucx was open when this process was forked, and can't be opened in it");
    used_by = tb__nforks;
    nusers++;
    return TB_OK;
}

void ucx_end_use(void) {
    nusers--;
}
