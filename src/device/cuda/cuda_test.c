/* The CUDA device passes the suite of all devices; with $TB_UNITS, on so many GPUs, with or without access to each
 * other's memory. */
#include "../tests/support/asserts.h"
#include "../tests/support/device_conformance.h"

#include "device/cuda/cuda.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static unsigned nunits;

/* The last two numbers of a key: those of its last piece. */
static void forge_key(unsigned char *key, size_t key_nbytes, uint64_t offset, uint64_t nbytes) {
    memcpy(key + key_nbytes - 16, &offset, 8);
    memcpy(key + key_nbytes - 8, &nbytes, 8);
}

static void test_conformance(void **state) {
    device_traits traits = {.name = "cuda", .forge_key = forge_key, .has_opaque_fds = true, .nunits = nunits};
    (void)state;
    device_conformance(&traits);
}

/* Another process counts: the suite forks first. */
static unsigned count_gpus(void) {
    int status = 0;
    pid_t pid = fork();
    if (pid == 0)
        _exit(tb__gpu_count());
    return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? (unsigned)WEXITSTATUS(status) : 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_conformance)};
    if (!dlopen("libcuda.so.1", RTLD_NOW)) { /* not initialised: the suite forks first */
        printf("skipped: %s\n", dlerror());
        return 77;
    }
    nunits = getenv("TB_UNITS") ? (unsigned)atoi(getenv("TB_UNITS")) : 0;
    if (count_gpus() < nunits) {
        printf("skipped: it takes %u GPUs, and there are %u\n", nunits, count_gpus());
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
