/* The CUDA driver, libcuda.so.1, which is loaded on first use. Functions are looked up by their name and the CUDA
 * version that introduced them. */
#include "device/cuda/cuda.h"

#include "base/process.h"

#include <cudaTypedefs.h>
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

tb__cuda_api tb__cuda;

#define LIBRARY "libcuda.so.1"

typedef struct function {
    const char *name;
    int version;
    void *slot; /* of a pointer to it */
} function;

#define CHECK_TYPE(name, version)                                                                                      \
    _Static_assert(__builtin_types_compatible_p(__typeof__(&(name)), PFN_##name##_v##version),                         \
                   "the version of " #name " is that of its declaration");
TB__CUDA_FUNCTIONS(CHECK_TYPE)

#define FUNCTION(name, version) {#name, version, &tb__cuda.name}, // NOLINT(bugprone-macro-parentheses)
static const function functions[] = {TB__CUDA_FUNCTIONS(FUNCTION)};

enum stage { UNTRIED, HAS_FUNCTIONS, READY, FAILED };

static struct {
    pthread_mutex_t lock; /* while it is loaded */
    _Atomic enum stage stage;
    _Atomic bool is_in_use, is_shut_down;
    _Atomic unsigned long long nloaded; /* number of libraries the process had loaded at the last failed lookup */
    char why[256];                      /* of a failure */
    tb__owner owner;                    /* the process that has initialised it */
    uint64_t process_id;
    void *library;
} driver = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int take_nloaded(struct dl_phdr_info *info, size_t size, void *nloaded) {
    (void)size;
    *(unsigned long long *)nloaded = info->dlpi_adds;
    return 1; /* every library has the same number */
}

/* Called for every tensor. Looking for a library that is not loaded searches many directories, so this looks again only
 * if any library has been loaded since the last time. */
bool tb__cuda_is_in_use(void) {
    unsigned long long nloaded = 0;
    if (atomic_load_explicit(&driver.is_in_use, memory_order_relaxed))
        return true;
    dl_iterate_phdr(take_nloaded, &nloaded);
    if (nloaded > 0 && nloaded == atomic_load(&driver.nloaded))
        return false;
    void *library = dlopen(LIBRARY, RTLD_NOLOAD | RTLD_LAZY | RTLD_LOCAL); /* never closed */
    if (library)
        atomic_store(&driver.is_in_use, true);
    else
        atomic_store(&driver.nloaded, nloaded);
    return library;
}

/* Needs the lock. The driver can't be used from now on. */
__attribute__((format(printf, 1, 2))) static void give_up(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(driver.why, sizeof driver.why, format, args);
    va_end(args);
    atomic_store(&driver.stage, FAILED);
}

/* Libraries that watch which memory is allocated, such as UCX, patch the driver's exported functions, and not those
 * that cuGetProcAddress gives. */
static void use_exported(void *library, const char *name, void *slot) {
    void *address = dlsym(library, name);
    if (address)
        memcpy(slot, &address, sizeof address);
}

static void find_functions(void *library) {
    __typeof__(&cuGetProcAddress) find;
    void *address = dlsym(library, "cuGetProcAddress_v2");
    memcpy(&find, &address, sizeof find);
    if (!find) {
        give_up("the driver " LIBRARY " is older than CUDA 12.0");
        return;
    }
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        const function *f = &functions[i];
        CUdriverProcAddressQueryResult found;
        address = NULL;
        if (find(f->name, &address, f->version, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &found) != CUDA_SUCCESS ||
            !address) {
            give_up("the driver " LIBRARY " is too old: it has no %s, which came with CUDA %d.%d", f->name,
                    f->version / 1000, f->version % 1000 / 10);
            return;
        }
        memcpy(f->slot, &address, sizeof address);
    }
    use_exported(library, "cuMemAlloc_v2", &tb__cuda.cuMemAlloc);
    use_exported(library, "cuMemFree_v2", &tb__cuda.cuMemFree);
    atomic_store(&driver.stage, HAS_FUNCTIONS);
}

/* With the lock held. */
static void load_functions(void) {
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (library) {
        driver.library = library;
        atomic_store(&driver.is_in_use, true);
        find_functions(library);
    } else {
        give_up("there is no CUDA driver: %s", dlerror());
    }
}

/* With the lock held. */
static void initialise(void) {
    CUresult result = tb__cuda.cuInit(0);
    if (result == CUDA_ERROR_NO_DEVICE) {
        give_up("the CUDA driver finds no GPU");
    } else if (result == CUDA_ERROR_NOT_INITIALIZED) {
        give_up("the CUDA driver can't be used in a process that was forked after it was initialised");
    } else if (result != CUDA_SUCCESS) {
        give_up("cuInit: %s", tb__cuda_error_name(result));
    } else {
        tb__owner_init(&driver.owner);
        if (getrandom(&driver.process_id, sizeof driver.process_id, 0) != sizeof driver.process_id)
            give_up("there are no random numbers");
        else
            atomic_store(&driver.stage, READY);
    }
}

bool tb__cuda_was_initialised(void) {
    return atomic_load(&driver.stage) == READY;
}

bool tb__cuda_is_inherited(void) {
    return tb__cuda_was_initialised() && tb__is_inherited(&driver.owner);
}

static tb_status check_ready(void) {
    if (tb__is_inherited(&driver.owner))
        return tb__owner_check(&driver.owner, "CUDA driver", "start a new program instead");
    if (atomic_load_explicit(&driver.is_shut_down, memory_order_relaxed))
        return tb__fail(TB_REFUSED, "the CUDA driver has shut down");
    return TB_OK;
}

tb_status tb__cuda_load(void) {
    if (atomic_load(&driver.stage) == READY)
        return check_ready();
    pthread_mutex_lock(&driver.lock);
    if (driver.stage == UNTRIED)
        load_functions();
    if (driver.stage == HAS_FUNCTIONS)
        initialise();
    pthread_mutex_unlock(&driver.lock);
    return driver.stage == READY ? check_ready() : tb__fail(TB_REFUSED, "%s", driver.why);
}

void *tb__cuda_find_exported(const char *name) {
    return tb__cuda_load() == TB_OK ? dlsym(driver.library, name) : NULL;
}

bool tb__cuda_has_functions(void) {
    if (atomic_load(&driver.stage) == UNTRIED) {
        pthread_mutex_lock(&driver.lock);
        if (driver.stage == UNTRIED)
            load_functions();
        pthread_mutex_unlock(&driver.lock);
    }
    enum stage stage = atomic_load(&driver.stage);
    bool is_usable = stage == HAS_FUNCTIONS || (stage == READY && !tb__is_inherited(&driver.owner));
    return is_usable && !atomic_load_explicit(&driver.is_shut_down, memory_order_relaxed);
}

uint64_t tb__cuda_process_id(void) {
    return driver.process_id;
}

const char *tb__cuda_error_name(CUresult result) {
    const char *name = NULL;
    if (atomic_load(&driver.is_shut_down))
        return "CUDA_ERROR_DEINITIALIZED";
    return tb__cuda.cuGetErrorName(result, &name) == CUDA_SUCCESS && name ? name : "an unknown error";
}

static tb_status status_of(CUresult result) {
    switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
        return TB_NO_MEMORY;
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_NOT_PERMITTED:
    case CUDA_ERROR_DEINITIALIZED:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
        return TB_REFUSED;
    default:
        return TB_IO;
    }
}

tb_status tb__cuda_fail(CUresult result, const char *format, ...) {
    char what[256];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    if (result == CUDA_ERROR_DEINITIALIZED)
        atomic_store(&driver.is_shut_down, true);
    TB_TRY(tb__gpu_note_error(result)); /* an earlier kernel has failed, not this call */
    return tb__fail(status_of(result), "%s: %s", what, tb__cuda_error_name(result));
}
