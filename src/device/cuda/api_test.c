/* The driver: loading it, doing without it, processes that are forked, its end. Each case is a process of its own,
 * which has loaded nothing: this program again, with the case's name. */
#include "../tests/support/cuda_program.h"
#include "device/cuda/report.h"

#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* In the process of a case; unlike assert_true, which needs a test around it. */
#define check(claim)                                                                                                   \
    do {                                                                                                               \
        if (!(claim)) {                                                                                                \
            fprintf(stderr, "%s:%d: %s: '%s'\n", __FILE__, __LINE__, #claim, tb_error_detail());                       \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#define check_fails(call, wanted, text) check((call) == (wanted) && strstr(tb_error_detail(), text))

static bool is_loaded(void) {
    return dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW) != NULL;
}

static tb__device *open_cuda(void) {
    tb__device *device;
    check(tb__device_open("cuda", &device) == TB_OK);
    return device;
}

static tb_status alloc(tb__device *device) {
    void *p;
    TB_TRY(device->ops->alloc(device, 0, 1000, &p));
    device->ops->free(device, p);
    return TB_OK;
}

/* ---- Cases ------------------------------------------------------------------------------------------------------- */

/* Opening, asking for host memory and progress load nothing. */
static void case_unused(void) {
    tb__memory memory = {0};
    tb__device *device = open_cuda();
    check(!device->ops->find(device, &memory, sizeof memory, &memory));
    check(!device->ops->progress(device));
    tb__device_close(device);
    check(!is_loaded() && !tb__cuda_is_in_use());
}

/* Every tensor in host memory is asked about: that takes no system calls. What is loaded later is noticed. */
static void case_host_tensors(void) {
    enum { MANY = 100000 };
    tb__memory memory = {0};
    tb__device *device = open_cuda();
    struct timespec began, ended;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &began);
    for (int i = 0; i < MANY; i++)
        check(!device->ops->find(device, &memory, sizeof memory, &memory));
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ended);
    check(ended.tv_sec - began.tv_sec < 2); /* 0.01 s; by looking for the library 5 s and more */
    check(dlopen("libcuda.so.1", RTLD_NOW) != NULL);
    check(tb__cuda_is_in_use());
    tb__device_close(device);
}

/* The driver is there, but nobody has initialised it: asking about addresses does not. */
static void case_uninitialised(void) {
    tb__memory memory = {0};
    CUcontext context;
    check(dlopen("libcuda.so.1", RTLD_NOW) != NULL);
    tb__device *device = open_cuda();
    check(!device->ops->find(device, &memory, sizeof memory, &memory));
    check(tb__cuda_is_in_use());
    check(DRIVER_CALL("cuCtxGetCurrent", (CUcontext *), &context) == CUDA_ERROR_NOT_INITIALIZED);
    pid_t child = fork();
    if (child == 0) { /* which may still initialise it */
        check(alloc(device) == TB_OK);
        exit(0);
    }
    int status;
    check(waitpid(child, &status, 0) == child && status == 0);
    check(alloc(device) == TB_OK);
    tb__device_close(device);
}

static void check_without(const char *why) {
    tb__cuda_driver driver;
    tb__cuda_gpu gpu;
    tb__mapping *mapping;
    uint64_t sum;
    tb__fence fence = {0};
    CUstream stream = NULL;
    tb__gate *gate;
    tb__device *device = open_cuda();
    check_fails(alloc(device), TB_REFUSED, why);
    check_fails(alloc(device), TB_REFUSED, why); /* again */
    check_fails(tb__cuda_describe_driver(&driver), TB_REFUSED, why);
    check_fails(tb__cuda_describe_gpu(0, &gpu), TB_REFUSED, why);
    check(!tb__cuda_can_reach(0, 0) && tb__gpu_count() == 0);
    check(device->ops->checksum(device, &sum, 8, &sum, &fence) == TB_INVALID);
    check(device->ops->map(device, &(tb__memory_key){0}, false, &mapping) == TB_INVALID);
    check_fails(device->ops->stream_record(device, &stream, &fence), TB_REFUSED, why);
    check_fails(device->ops->stream_wait(device, &stream, &fence), TB_REFUSED, why);
    check_fails(device->ops->gate_create(device, &stream, 0, &gate), TB_REFUSED, why);
    tb__device_close(device);
}

static void case_no_driver(void) {
    check_without("there is no CUDA driver: libcuda.so.1");
    check(!is_loaded());
}

static void case_no_gpu(void) {
    check_without("finds no GPU");
}

static void case_old_driver(void) {
    check_without("too old: it has no cuFuncLoad, which came with CUDA 12.4");
}

static void case_failing_driver(void) {
    fake_cuda()->fail_call("cuInit", 0, CUDA_ERROR_ECC_UNCORRECTABLE);
    check_without("cuInit: CUDA_ERROR_ECC_UNCORRECTABLE");
}

/* Kernels that are not for this GPU. The next attempt may succeed. */
static void case_failing_gpu(void) {
    tb__device *device = open_cuda();
    fake_cuda()->fail_call("cuModuleLoadData", 0, CUDA_ERROR_NO_BINARY_FOR_GPU);
    check_fails(alloc(device), TB_REFUSED, "loading kernels for cuda:0 (Fake GPU): CUDA_ERROR_NO_BINARY_FOR_GPU");
    fake_cuda()->fail_call("cuDevicePrimaryCtxRetain", 0, CUDA_ERROR_OUT_OF_MEMORY);
    check_fails(alloc(device), TB_NO_MEMORY, "primary context of cuda:0");
    check(fake_cuda()->count_calls("cuDevicePrimaryCtxRelease") == 1);
    check(alloc(device) == TB_OK);
    tb__device_close(device);
}

static void check_child(void (*check_it)(tb__device *device, void *p), tb__device *device, void *p) {
    int status;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        check_it(device, p);
        exit(0);
    }
    check(waitpid(child, &status, 0) == child && status == 0);
}

static void use_in_child(tb__device *device, void *p) {
    tb__memory memory = {0};
    tb__gpu *gpu;
    tb__job *job;
    tb__device *another = open_cuda();
    check_fails(alloc(device), TB_REFUSED, "forked child");
    check_fails(alloc(another), TB_REFUSED, "forked child");
    check_fails(tb__gpu_get(0, &gpu), TB_REFUSED, "forked child");
    check(device->ops->find(device, p, 1, &memory)); /* not the host's: using it fails, but does not crash */
    check(!device->ops->find(device, &memory, 1, &memory));
    check_fails(device->ops->prepare(device, &(tb__move){.ndim = 1, .len = {1}, .dst = p, .dst_dtype = TB_U8}, 1, &job),
                TB_REFUSED, "forked child");
    device->ops->free(device, p); /* what is inherited may be destroyed */
    tb__device_close(another);
    tb__device_close(device);
}

static void case_forked(void) {
    void *p;
    tb__device *device = open_cuda();
    check(device->ops->alloc(device, 0, 1000, &p) == TB_OK);
    check_child(use_in_child, device, p);
    check(alloc(device) == TB_OK);
    device->ops->free(device, p);
    tb__device_close(device);
}

static void use_inherited_driver(tb__device *device, void *p) {
    tb__memory memory = {0};
    (void)p;
    check(!device->ops->find(device, &memory, 1, &memory));
    check_fails(alloc(device), TB_REFUSED, "forked after it was initialised");
    tb__device_close(device);
}

/* The program itself has initialised the driver, before it forked. */
static void case_forked_program(void) {
    tb__device *device = open_cuda();
    check(DRIVER_CALL("cuInit", (unsigned), 0) == CUDA_SUCCESS);
    check_child(use_inherited_driver, device, NULL);
    tb__device_close(device);
}

static void case_shut_down(void) {
    void *p;
    tb__memory memory;
    tb__device *device = open_cuda();
    tb__job *job;
    tb__fence fence = {0}, other = {0};
    uint64_t sum = 0;
    check(device->ops->alloc(device, 0, 1000, &p) == TB_OK);
    fake_cuda()->hold_kernel(0);
    check(device->ops->checksum(device, p, 1000, &sum, &fence) == TB_OK);
    device->ops->progress(device);
    check(device->ops->checksum(device, p, 1000, &sum, &other) == TB_OK);
    check(device->ops->prepare(device, NULL, 0, &job) == TB_OK);
    fake_cuda()->shut_down();
    for (int i = 0; i < 1000 && !(fence.is_done && other.is_done); i++) {
        device->ops->progress(device);
        usleep(1000);
    }
    check(fence.is_done && fence.status == TB_REFUSED && strstr(fence.why, "shut down"));
    check(other.is_done && other.status != TB_OK);
    long ncalls = fake_cuda()->count_calls(NULL);
    check_fails(alloc(device), TB_REFUSED, "shut down");
    check(device->ops->find(device, p, 1, &memory));
    device->ops->free(device, p);
    device->ops->release(device, job);
    tb__device_close(device);
    check(fake_cuda()->count_calls(NULL) == ncalls);
}

/* The program destroys the context that it shares with the library: what is under way fails, and all that comes. */
static void case_reset(void) {
    void *p;
    tb__device *device = open_cuda();
    tb__fence fence = {0}, other = {0};
    uint64_t sum = 0;
    const char *why = "cuda:0 (Fake GPU) has failed: CUDA_ERROR_CONTEXT_IS_DESTROYED";
    check(device->ops->alloc(device, 0, 1000, &p) == TB_OK);
    fake_cuda()->hold_kernel(0);
    check(device->ops->checksum(device, p, 1000, &sum, &fence) == TB_OK);
    device->ops->progress(device);
    check(DRIVER_CALL("cuDevicePrimaryCtxReset_v2", (CUdevice), 0) == CUDA_SUCCESS);
    for (int i = 0; i < 10000 && !fence.is_done; i++) {
        device->ops->progress(device);
        usleep(1000);
    }
    check(fence.is_done && fence.status == TB_IO && strstr(fence.why, why));
    check_fails(alloc(device), TB_IO, why);
    check(device->ops->checksum(device, p, 1000, &sum, &other) == TB_OK);
    device->ops->progress(device);
    device->ops->progress(device);
    check(other.is_done && other.status == TB_IO && strstr(other.why, why));
    device->ops->free(device, p);
    tb__device_close(device);
}

static void case_report(void) {
    tb__cuda_driver driver;
    tb__cuda_gpu gpu;
    CUcontext context;
    check(tb__cuda_describe_driver(&driver) == TB_OK);
    check(driver.version >= 12000 && driver.ngpus >= 1);
    check(tb__cuda_describe_gpu(0, &gpu) == TB_OK);
    check(gpu.name[0] && strncmp(gpu.uuid, "GPU-", 4) == 0 && strlen(gpu.uuid) == 40);
    check(gpu.capability >= 80 && gpu.nbytes > (size_t)1 << 30);
    check(tb__cuda_describe_gpu(driver.ngpus, &gpu) == TB_IO);
    check(DRIVER_CALL("cuCtxGetCurrent", (CUcontext *), &context) == CUDA_SUCCESS && !context);
    if (fake_cuda())
        check(fake_cuda()->count_calls("cuDevicePrimaryCtxRetain") == 0 && gpu.has_ipc && gpu.has_vmm_fd);
}

/* ---- Processes --------------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    void (*run)(void);
    const char *variable; /* of the environment, with its value */
    bool needs_fake;
} cases[] = {
    {"unused", case_unused, NULL, false},
    {"host_tensors", case_host_tensors, NULL, false},
    {"uninitialised", case_uninitialised, NULL, false},
    {"no_driver", case_no_driver, "LD_LIBRARY_PATH=", true},
    {"no_gpu", case_no_gpu, "FAKE_CUDA_GPUS=0", true},
    {"old_driver", case_old_driver, "FAKE_CUDA_WITHOUT=cuFuncLoad", true},
    {"failing_driver", case_failing_driver, NULL, true},
    {"failing_gpu", case_failing_gpu, NULL, true},
    {"forked", case_forked, NULL, false},
    {"forked_program", case_forked_program, NULL, false},
    {"shut_down", case_shut_down, NULL, true},
    {"reset", case_reset, NULL, true},
    {"report", case_report, NULL, false},
};
enum { NCASES = sizeof cases / sizeof *cases };

static void test_case(void **state) {
    size_t i = *(size_t *)*state;
    int status;
    if (cases[i].needs_fake && !fake_cuda())
        skip();
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        if (cases[i].variable)
            putenv((char *)(uintptr_t)cases[i].variable);
        execl("/proc/self/exe", "api_test", cases[i].name, (char *)NULL);
        _exit(1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

int main(int argc, char **argv) {
    static size_t numbers[NCASES];
    struct CMUnitTest tests[NCASES];
    for (size_t i = 0; i < NCASES; i++) {
        if (argc > 1 && strcmp(argv[1], cases[i].name) == 0) {
            cases[i].run();
            return 0;
        }
        numbers[i] = i;
        tests[i] = (struct CMUnitTest){cases[i].name, test_case, NULL, NULL, &numbers[i]};
    }
    if (!dlopen("libcuda.so.1", RTLD_NOW)) {
        printf("skipped: %s\n", dlerror());
        return 77;
    }
    return _cmocka_run_group_tests("api_test", tests, NCASES, NULL, NULL);
}
