/* The host device, with one thread and with several. */
#include "device/host/workers.h"

#include "../tests/support/asserts.h"
#include "../tests/support/device_conformance.h"

#include <string.h>

/* The last two numbers of a key. */
static void forge_key(unsigned char *key, size_t key_nbytes, uint64_t offset, uint64_t nbytes) {
    memcpy(key + key_nbytes - 16, &offset, 8);
    memcpy(key + key_nbytes - 8, &nbytes, 8);
}

static void run_suite(int nthreads) {
    static const device_traits traits = {.name = "host", .forge_key = forge_key};
    tb__workers_set(nthreads);
    device_conformance(&traits);
    tb__workers_set(1);
}

static void test_one_thread(void **state) {
    (void)state;
    run_suite(1);
}

static void test_several_threads(void **state) {
    (void)state;
    run_suite(3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_thread),
        cmocka_unit_test(test_several_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
