/* The CUDA device does what every device does. */
#include "../tests/support/asserts.h"
#include "../tests/support/device_conformance.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* The last two numbers of a key: those of its last piece. */
static void forge_key(unsigned char *key, size_t key_nbytes, uint64_t offset, uint64_t nbytes) {
    memcpy(key + key_nbytes - 16, &offset, 8);
    memcpy(key + key_nbytes - 8, &nbytes, 8);
}

static void test_conformance(void **state) {
    static const device_traits traits = {.name = "cuda", .forge_key = forge_key, .has_opaque_fds = true};
    (void)state;
    device_conformance(&traits);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_conformance)};
    if (!dlopen("libcuda.so.1", RTLD_NOW)) { /* not initialised: the suite forks first */
        printf("skipped: %s\n", dlerror());
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
